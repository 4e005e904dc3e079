//! Arrivals without departures: the protocol of the published runs. A pod that does not fit is dropped. If pods may be evicted,
//! a victim is pending and returns when evictions of other pods make it fit.

use super::arrivals::Arrivals;
use super::curve::AllocationCurve;
use super::fragmentation::TypicalPods;
use super::placer::{Placer, PodArrival};
use super::run::PackingRun;
use super::trace::WorkloadTrace;
use crate::simulate::openb::Qos;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    pub seed: u64,
    pub curve: AllocationCurve,
    pub admission: AdmissionCounts,
}

/// The placed part of the pods for which others may be evicted, in thousandths of GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct AdmissionCounts {
    #[serde(rename = "asked")]
    pub requested: u64,
    pub admitted: u64,
    /// How often a pod was evicted for another.
    pub evicted: u64,
}

impl AdmissionCounts {
    /// The admitted share of the requested GPUs, in percent.
    pub fn percent(&self) -> f64 {
        100.0 * self.admitted as f64 / self.requested.max(1) as f64
    }
}

/// Whether other pods may be evicted for such a pod.
pub fn has_high_priority(qos: Option<Qos>) -> bool {
    matches!(qos, Some(Qos::LatencySensitive | Qos::Guaranteed))
}

pub fn replay(
    setting: &WorkloadTrace,
    arrivals: &Arrivals,
    typical: &TypicalPods,
    placer: &mut dyn Placer,
) -> Replay {
    let world = PackingRun::new(setting, &arrivals.ranks, Some(typical));
    let mut run = ReplayRun {
        setting,
        packing: world,
        pending: EvictedPods::default(),
        arrivals: arrivals.pods.len(),
    };
    let mut curve = AllocationCurve::new(setting.capacity());
    let mut admission = AdmissionCounts::default();
    for arrival in arrivals.iter(setting) {
        let (is_placed, evicted) = run.step(arrival, placer);
        let requested = setting.kinds[arrival.kind].milli_gpus();
        curve.record(
            requested,
            run.packing.cluster.allocated(),
            run.packing.fragmented_gpus(),
        );
        admission.evicted += evicted;
        if has_high_priority(setting.pods[arrival.pod].qos) {
            admission.requested += requested;
            admission.admitted += if is_placed { requested } else { 0 };
        }
    }
    Replay {
        seed: arrivals.seed,
        curve,
        admission,
    }
}

struct ReplayRun<'s> {
    setting: &'s WorkloadTrace,
    packing: PackingRun<'s>,
    pending: EvictedPods,
    /// Pods numbered so far: one that returns gets another number.
    arrivals: usize,
}

/// Evicted pods by kind, as indices of the setting's pods.
type EvictedPods = BTreeMap<usize, Vec<usize>>;

impl ReplayRun<'_> {
    /// Whether the pod was placed, and how many were evicted for it.
    fn step(&mut self, arrival: PodArrival, placer: &mut dyn Placer) -> (bool, u64) {
        let outcome = self.packing.admit(arrival, placer);
        let Some(node) = outcome.node else {
            return (false, 0);
        };
        for pod in &outcome.evicted {
            if !self.place_again(*pod, placer) {
                self.pending
                    .entry(self.setting.pods[*pod].kind)
                    .or_default()
                    .push(*pod);
            }
        }
        if !outcome.evicted.is_empty() {
            self.refill_node(node, placer);
        }
        (true, outcome.evicted.len() as u64)
    }

    /// Places pending pods on a node that has changed; they did not fit before.
    fn refill_node(&mut self, node: usize, placer: &mut dyn Placer) {
        let kinds: Vec<usize> = self.pending.keys().copied().collect();
        for kind in kinds {
            let fits =
                |run: &Self| run.packing.cluster.nodes()[node].fits(&run.setting.kinds[kind]);
            while fits(self)
                && let Some(pod) = self.pending.get_mut(&kind).and_then(Vec::pop)
            {
                if !self.place_again(pod, placer) {
                    self.pending.entry(kind).or_default().push(pod);
                    break;
                }
            }
        }
        self.pending.retain(|_, pods| !pods.is_empty());
    }

    fn place_again(&mut self, pod: usize, placer: &mut dyn Placer) -> bool {
        let arrival = PodArrival {
            number: self.arrivals,
            pod,
            kind: self.setting.pods[pod].kind,
        };
        self.arrivals += 1;
        self.packing.admit(arrival, placer).node.is_some()
    }
}
