//! Arrivals without departures: the protocol of the published runs. A pod that does not fit is dropped.

use super::arrivals::Arrivals;
use super::curve::Curve;
use super::fragmentation::Typical;
use super::kinds::Setting;
use super::placer::Placer;
use super::world::World;
use crate::sim::openb::Qos;
use serde::Serialize;

/// What one run came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    pub seed: u64,
    pub curve: Curve,
    pub admission: Admission,
}

/// Of the pods that others may be evicted for, those that stayed, in thousandths of GPUs and in pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Admission {
    pub asked: u64,
    pub admitted: u64,
    pub pods_asked: u64,
    pub pods_admitted: u64,
    /// Pods that had to leave for others.
    pub evicted: u64,
}

impl Admission {
    /// In hundredths, by GPUs.
    pub fn percent(&self) -> f64 {
        100.0 * self.admitted as f64 / self.asked.max(1) as f64
    }
}

/// Whether others may be evicted for such a pod.
pub fn is_high(qos: Option<Qos>) -> bool {
    matches!(qos, Some(Qos::LatencySensitive | Qos::Guaranteed))
}

pub fn replay(setting: &Setting, arrivals: &Arrivals, typical: &Typical, placer: &mut dyn Placer) -> Replay {
    let mut world = World::new(setting, &arrivals.ranks, Some(typical));
    let mut curve = Curve::new(setting.capacity());
    let mut admission = Admission::default();
    for arrival in arrivals.iter(setting) {
        let outcome = world.admit(arrival, placer);
        let asked = setting.kinds[arrival.kind].milli_gpus();
        curve.note(asked, world.cluster.allocated(), world.fragmented());
        admission.evicted += outcome.evicted.len() as u64;
        if asked > 0 && is_high(setting.pods[arrival.pod].qos) {
            admission.asked += asked;
            admission.pods_asked += 1;
            admission.admitted += if outcome.is_placed { asked } else { 0 };
            admission.pods_admitted += u64::from(outcome.is_placed);
        }
    }
    Replay { seed: arrivals.seed, curve, admission }
}
