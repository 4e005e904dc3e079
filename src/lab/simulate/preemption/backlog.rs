//! Pending residents by kind: of pods with the same request either the oldest fits or none does.

use crate::simulate::fleet::pods::PodSpec;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::Bytes;

/// What decides where a pod fits. Higher priorities first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodKind {
    pub priority: Reverse<i32>,
    pub gpus: u32,
    pub per_gpu: Bytes,
}

/// Pods by their age: lower numbers are older.
#[derive(Debug, Default)]
pub struct Backlog(BTreeMap<PodKind, BTreeSet<(u64, PodUid)>>);

impl PodKind {
    pub fn of(spec: &PodSpec) -> Self {
        Self { priority: Reverse(spec.priority), gpus: spec.gpus, per_gpu: spec.per_gpu() }
    }
}

impl Backlog {
    pub fn put(&mut self, kind: PodKind, age: u64, uid: PodUid) {
        self.0.entry(kind).or_default().insert((age, uid));
    }

    pub fn has(&self, kind: PodKind) -> bool {
        self.0.contains_key(&kind)
    }

    /// The first in order that is of none of these kinds.
    pub fn first_but(&self, refused: &BTreeSet<PodKind>) -> Option<(PodKind, u64, PodUid)> {
        let waiting = self.0.iter().filter(|(kind, _)| !refused.contains(kind));
        let eldest = waiting.filter_map(|(kind, pods)| Some((kind, pods.first()?)));
        let (kind, (age, uid)) = eldest.min_by_key(|(kind, eldest)| (kind.priority, *eldest))?;
        Some((*kind, *age, uid.clone()))
    }

    pub fn take(&mut self, kind: PodKind, age: u64, uid: &PodUid) {
        let Some(pods) = self.0.get_mut(&kind) else { return };
        pods.remove(&(age, uid.clone()));
        if pods.is_empty() {
            self.0.remove(&kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::testkit::uid;

    #[test]
    fn the_urgent_go_first_and_then_the_eldest() {
        let kind = |priority, gib| PodKind { priority: Reverse(priority), gpus: 1, per_gpu: Bytes::gib(gib) };
        let (small, large, urgent) = (kind(-20, 10), kind(-20, 70), kind(-10, 40));
        let mut backlog = Backlog::default();
        for (kind, age) in [(small, 7), (large, 3), (small, 5), (urgent, 9)] {
            backlog.put(kind, age, uid(&format!("pod-{age}")));
        }
        let first = |backlog: &Backlog, refused: &[PodKind]| {
            backlog.first_but(&refused.iter().copied().collect()).map(|(kind, age, _)| (kind, age))
        };
        assert_eq!(first(&backlog, &[]), Some((urgent, 9)));
        assert_eq!(first(&backlog, &[urgent]), Some((large, 3)));
        backlog.take(large, 3, &uid("pod-3"));
        assert!(!backlog.has(large));
        assert_eq!(first(&backlog, &[urgent]), Some((small, 5)));
        assert_eq!(first(&backlog, &[urgent, small]), None);
    }
}
