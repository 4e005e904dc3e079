//! Pending residents by kind: of pods with the same request either the oldest fits or none does.

use super::workload::{JobRole, JobSize};
use std::collections::{BTreeMap, BTreeSet};

/// What decides where a pod fits. Higher priorities first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKind {
    pub role: JobRole,
    pub size: JobSize,
}

/// Jobs by their index in the workload, which is their order of arrival.
#[derive(Debug, Default)]
pub struct Backlog(BTreeMap<JobKind, BTreeSet<usize>>);

impl Backlog {
    pub fn put(&mut self, kind: JobKind, job: usize) {
        self.0.entry(kind).or_default().insert(job);
    }

    pub fn has(&self, kind: JobKind) -> bool {
        self.0.contains_key(&kind)
    }

    /// The first in order that is of none of these kinds.
    pub fn first_but(&self, refused: &BTreeSet<JobKind>) -> Option<(JobKind, usize)> {
        let waiting = self.0.iter().filter(|(kind, _)| !refused.contains(kind));
        let eldest = waiting.filter_map(|(kind, jobs)| Some((*kind, *jobs.first()?)));
        eldest.min_by_key(|(kind, job)| (kind.role, *job))
    }

    pub fn take(&mut self, kind: JobKind, job: usize) {
        let Some(jobs) = self.0.get_mut(&kind) else { return };
        jobs.remove(&job);
        if jobs.is_empty() {
            self.0.remove(&kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_urgent_go_first_and_then_the_eldest() {
        let kind = |role, milli| JobKind { role, size: JobSize { gpus: 1, milli } };
        let (small, large) = (kind(JobRole::BestEffort, 100), kind(JobRole::BestEffort, 900));
        let urgent = kind(JobRole::Burstable, 500);
        let mut backlog = Backlog::default();
        for (kind, job) in [(small, 7), (large, 3), (small, 5), (urgent, 9)] {
            backlog.put(kind, job);
        }
        assert_eq!(backlog.first_but(&BTreeSet::new()), Some((urgent, 9)));
        assert_eq!(backlog.first_but(&BTreeSet::from([urgent])), Some((large, 3)));
        backlog.take(large, 3);
        assert!(!backlog.has(large));
        assert_eq!(backlog.first_but(&BTreeSet::from([urgent])), Some((small, 5)));
        assert_eq!(backlog.first_but(&BTreeSet::from([urgent, small])), None);
    }
}
