//! In which order a run looks at pending pods: in that of the queue, but that of the pods of one priority those of the tenant that
//! borrows least come first, by what the run has placed so far. Namespaces without a tenant count as one each.
//!
//! A pod that finds no place takes its tenant no turn: the tenant's next one is looked at. Otherwise a tenant whose pods ask for
//! several GPUs would wait with all of them while another takes every single GPU that becomes free. But no
//! tenant spends more than a part of the run's steps at once while another has pods: of pods of different kinds a run has steps for
//! a few only.

use crate::ids::PodUid;
use crate::ledger::{Ledger, PendingPod};
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::cluster_share::TenantUsage;
use std::collections::{BTreeMap, VecDeque};

/// The parts of a run's steps: one tenant spends one part before it is the turn of one that borrows more.
const TURNS_PER_RUN: u64 = 16;

pub(super) struct Turns<'p> {
    bands: VecDeque<PriorityBand<'p>>,
    /// The capacity of the cluster, if tenants have shares of it.
    cluster_capacity: TenantUsage,
    /// Steps that one tenant spends at once.
    steps_per_turn: u64,
    /// Steps spent when the last pod had its turn.
    spent_before: u64,
}

/// Pods of one priority: those of each tenant, and those without one.
struct PriorityBand<'p> {
    rank: Rank,
    queues: BTreeMap<TenantQueueKey<'p>, TenantQueue<'p>>,
    /// The queue whose pod had the last turn.
    last_turn: Option<TenantQueueKey<'p>>,
}

/// A tenant, or the namespace of pods without one.
type TenantQueueKey<'p> = (Option<TenantId>, &'p str);

#[derive(Default)]
struct TenantQueue<'p> {
    spent: u64,
    pods: VecDeque<&'p PendingPod>,
}

/// Whether the pod is on its way, and its priority.
pub(super) type Rank = (bool, i32);

pub(super) fn rank(pod: &PendingPod) -> Rank {
    (pod.is_requeued(), pod.demand.priority)
}

impl<'p> Turns<'p> {
    /// `steps` is what may be spent on the pods.
    pub fn new(queue: &[&'p PendingPod], ledger: &Ledger, steps: u64) -> Self {
        let mut bands: VecDeque<PriorityBand<'_>> = VecDeque::new();
        for pod in queue {
            let rank = rank(pod);
            if bands.back().is_none_or(|band| band.rank != rank) {
                bands.push_back(PriorityBand {
                    rank,
                    queues: BTreeMap::new(),
                    last_turn: None,
                });
            }
            bands.back_mut().expect("there is one").add(pod);
        }
        Self {
            bands,
            cluster_capacity: ledger.cluster_total(),
            steps_per_turn: (steps / TURNS_PER_RUN).max(1),
            spent_before: 0,
        }
    }

    /// The pod whose turn it is, with what `ledger` has placed and after so many steps.
    pub fn next(&mut self, ledger: &Ledger, spent: u64) -> Option<&'p PendingPod> {
        let cost = spent - std::mem::replace(&mut self.spent_before, spent);
        while let Some(band) = self.bands.front_mut() {
            if let Some(line) = band
                .last_turn
                .take()
                .and_then(|last| band.queues.get_mut(&last))
            {
                line.spent += cost;
            }
            if let Some(pod) = band.next(ledger, self.cluster_capacity, self.steps_per_turn) {
                return Some(pod);
            }
            self.bands.pop_front();
        }
        None
    }

    /// The pods whose turn has not come.
    pub fn remaining(&self) -> impl Iterator<Item = &'p PodUid> {
        let lines = self.bands.iter().flat_map(|band| band.queues.values());
        lines.flat_map(|line| line.pods.iter().map(|pod| &pod.uid))
    }
}

impl<'p> PriorityBand<'p> {
    fn add(&mut self, pod: &'p PendingPod) {
        let tenant = pod.demand.tenant;
        let namespace = if tenant.is_none() {
            &*pod.key.namespace
        } else {
            ""
        };
        self.queues
            .entry((tenant, namespace))
            .or_default()
            .pods
            .push_back(pod);
    }

    fn next(
        &mut self,
        ledger: &Ledger,
        cluster_capacity: TenantUsage,
        steps_per_turn: u64,
    ) -> Option<&'p PendingPod> {
        let turn = |(tenant, _): TenantQueueKey<'_>, line: &TenantQueue<'_>| {
            let first = line.pods.front()?;
            Some((
                line.spent / steps_per_turn,
                ledger.borrowed_share(tenant, cluster_capacity),
                first.turn,
            ))
        };
        let lines = self
            .queues
            .iter_mut()
            .filter_map(|(key, line)| Some((turn(*key, line)?, *key, line)));
        let (_, key, line) = lines.min_by_key(|(turn, ..)| *turn)?;
        let pod = line.pods.pop_front();
        self.last_turn = Some(key);
        if line.pods.is_empty() {
            self.queues.remove(&key);
        }
        pod
    }
}
