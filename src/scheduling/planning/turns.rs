//! In which order a run looks at pending pods: in that of the queue, but that of the pods of one priority those of the tenant that
//! borrows least come first, by what the run has placed so far.
//!
//! A pod that finds no place takes its tenant no turn: the tenant's next one is looked at. Otherwise a tenant whose pods ask for
//! several GPUs would wait with all of them while another takes every single GPU that becomes free.

use crate::ids::PodUid;
use crate::scheduling::ledger::{Ledger, PendingPod};
use crate::scheduling::vocabulary::classification::TenantId;
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use std::collections::VecDeque;

pub(super) struct Turns<'p> {
    bands: VecDeque<Band<'p>>,
    /// What the cluster has, if tenants have shares of it.
    whole: TenantUsage,
}

/// Pods of one priority: those of each tenant, and those without one.
struct Band<'p> {
    rank: Rank,
    lines: Vec<(Option<TenantId>, VecDeque<&'p PendingPod>)>,
}

/// Whether they are on their way, and their priority.
pub(super) type Rank = (bool, i32);

pub(super) fn rank(pod: &PendingPod) -> Rank {
    (pod.is_on_its_way(), pod.demand.priority)
}

impl<'p> Turns<'p> {
    pub fn of(queue: &[&'p PendingPod], ledger: &Ledger) -> Self {
        let mut bands: VecDeque<Band<'_>> = VecDeque::new();
        for pod in queue {
            let rank = rank(pod);
            if bands.back().is_none_or(|band| band.rank != rank) {
                bands.push_back(Band { rank, lines: Vec::new() });
            }
            bands.back_mut().expect("there is one").add(pod);
        }
        Self { bands, whole: ledger.whole() }
    }

    /// The pod whose turn it is, with what `ledger` has placed.
    pub fn next(&mut self, ledger: &Ledger) -> Option<&'p PendingPod> {
        while let Some(band) = self.bands.front_mut() {
            if let Some(pod) = band.next(ledger, self.whole) {
                return Some(pod);
            }
            self.bands.pop_front();
        }
        None
    }

    /// Those whose turn has not come.
    pub fn rest(&self) -> impl Iterator<Item = &'p PodUid> {
        let lines = self.bands.iter().flat_map(|band| &band.lines);
        lines.flat_map(|(_, line)| line.iter().map(|pod| &pod.uid))
    }
}

impl<'p> Band<'p> {
    fn add(&mut self, pod: &'p PendingPod) {
        let tenant = pod.demand.tenant;
        match self.lines.iter_mut().find(|(known, _)| *known == tenant) {
            Some((_, line)) => line.push_back(pod),
            None => self.lines.push((tenant, [pod].into())),
        }
    }

    fn next(&mut self, ledger: &Ledger, whole: TenantUsage) -> Option<&'p PendingPod> {
        let turn = |(tenant, line): &(Option<TenantId>, VecDeque<&PendingPod>)| {
            let first = line.front()?;
            Some((ledger.borrowed_share(*tenant, whole), first.demand.class, first.since, first.uid.clone()))
        };
        let lines = self.lines.iter_mut().filter_map(|line| Some((turn(line)?, line)));
        let (_, (_, line)) = lines.min_by(|(one, _), (other, _)| one.cmp(other))?;
        line.pop_front()
    }
}
