//! Arrivals without departures: the protocol of the published runs. A pod that does not fit is dropped. If pods may be evicted,
//! a victim is pending and returns when evictions of other pods make it fit.

use super::arrivals::Arrivals;
use super::curve::AllocationCurve;
use super::fragmentation::Typical;
use super::placer::{Placer, PodArrival};
use super::run::PackingRun;
use super::trace::PlayedTrace;
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
    pub asked: u64,
    pub admitted: u64,
    /// How often a pod was evicted for another.
    pub evicted: u64,
}

impl AdmissionCounts {
    /// The admitted share of the requested GPUs, in percent.
    pub fn percent(&self) -> f64 {
        100.0 * self.admitted as f64 / self.asked.max(1) as f64
    }
}

/// Whether other pods may be evicted for such a pod.
pub fn is_high(qos: Option<Qos>) -> bool {
    matches!(qos, Some(Qos::LatencySensitive | Qos::Guaranteed))
}

pub fn replay(
    setting: &PlayedTrace,
    arrivals: &Arrivals,
    typical: &Typical,
    placer: &mut dyn Placer,
) -> Replay {
    let world = PackingRun::new(setting, &arrivals.ranks, Some(typical));
    let mut run = ReplayRun {
        setting,
        world,
        waiting: EvictedPods::default(),
        came: arrivals.pods.len(),
    };
    let mut curve = AllocationCurve::new(setting.capacity());
    let mut admission = AdmissionCounts::default();
    for arrival in arrivals.iter(setting) {
        let (is_placed, evicted) = run.step(arrival, placer);
        let asked = setting.kinds[arrival.kind].milli_gpus();
        curve.note(asked, run.world.cluster.allocated(), run.world.fragmented());
        admission.evicted += evicted;
        if is_high(setting.pods[arrival.pod].qos) {
            admission.asked += asked;
            admission.admitted += if is_placed { asked } else { 0 };
        }
    }
    Replay {
        seed: arrivals.seed,
        curve,
        admission,
    }
}

struct ReplayRun<'s> {
    setting: &'s PlayedTrace,
    world: PackingRun<'s>,
    waiting: EvictedPods,
    /// Pods numbered so far: one that returns gets another number.
    came: usize,
}

/// Evicted pods by kind, as indices of the setting's pods.
type EvictedPods = BTreeMap<usize, Vec<usize>>;

impl ReplayRun<'_> {
    /// Whether the pod was placed, and how many were evicted for it.
    fn step(&mut self, arrival: PodArrival, placer: &mut dyn Placer) -> (bool, u64) {
        let outcome = self.world.admit(arrival, placer);
        let Some(node) = outcome.node else {
            return (false, 0);
        };
        for pod in &outcome.evicted {
            if !self.come_back(*pod, placer) {
                self.waiting
                    .entry(self.setting.pods[*pod].kind)
                    .or_default()
                    .push(*pod);
            }
        }
        if !outcome.evicted.is_empty() {
            self.fill(node, placer);
        }
        (true, outcome.evicted.len() as u64)
    }

    /// Places pending pods on a node that has changed; they did not fit before.
    fn fill(&mut self, node: usize, placer: &mut dyn Placer) {
        let kinds: Vec<usize> = self.waiting.keys().copied().collect();
        for kind in kinds {
            let fits = |run: &Self| run.world.cluster.nodes()[node].fits(&run.setting.kinds[kind]);
            while fits(self)
                && let Some(pod) = self.waiting.get_mut(&kind).and_then(Vec::pop)
            {
                if !self.come_back(pod, placer) {
                    self.waiting.entry(kind).or_default().push(pod);
                    break;
                }
            }
        }
        self.waiting.retain(|_, pods| !pods.is_empty());
    }

    fn come_back(&mut self, pod: usize, placer: &mut dyn Placer) -> bool {
        let arrival = PodArrival {
            number: self.came,
            pod,
            kind: self.setting.pods[pod].kind,
        };
        self.came += 1;
        self.world.admit(arrival, placer).node.is_some()
    }
}
