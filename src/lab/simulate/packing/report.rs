//! Compares runs of several policies and seeds.

use super::churn::{OfferedLoad, Rejections};
use super::curve::{self, AllocationCurve, Point};
use super::policy::SimulatedPolicy;
use super::replay::Replay;
use serde::Serialize;

/// One policy over all seeds; percentages of all GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PackingLine {
    pub policy: SimulatedPolicy,
    pub seeds: Vec<u64>,
    /// Allocated when 100 % and 130 % of the GPUs have been requested: means over seeds.
    pub at_100: Option<f64>,
    pub at_130: Option<f64>,
    /// By seed.
    pub each_at_130: Vec<f64>,
    /// Free, and of no use to a pod drawn from the typical ones.
    pub fragmented_at_100: Option<f64>,
    pub fragmented_at_130: Option<f64>,
    /// The placed share of the requests for which other pods may be evicted; only if pods may be evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_priority_admitted: Option<f64>,
    /// Evicted pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evicted: Option<f64>,
    #[serde(skip)]
    pub points: Vec<Point>,
}

impl PackingLine {
    /// The replays of one policy, in the order of their seeds.
    pub fn from_replays(
        policy: SimulatedPolicy,
        replays: &[Replay],
        shows_admission: bool,
    ) -> Self {
        let curves: Vec<&AllocationCurve> = replays.iter().map(|replay| &replay.curve).collect();
        let points = curve::mean(&curves);
        let at = |load: u64| points.iter().find(|point| point.load == load);
        let mean = |of: &dyn Fn(&Replay) -> f64| {
            let sum: f64 = replays.iter().map(of).sum();
            (shows_admission && !replays.is_empty()).then(|| sum / replays.len() as f64)
        };
        Self {
            policy,
            seeds: replays.iter().map(|replay| replay.seed).collect(),
            at_100: at(100).map(|point| point.allocated),
            at_130: at(130).map(|point| point.allocated),
            each_at_130: curves
                .iter()
                .filter_map(|curve| curve.at(130))
                .map(|point| point.allocated)
                .collect(),
            fragmented_at_100: at(100).map(|point| point.fragmented),
            fragmented_at_130: at(130).map(|point| point.fragmented),
            high_priority_admitted: mean(&|replay| replay.admission.percent()),
            evicted: mean(&|replay| replay.admission.evicted as f64),
            points,
        }
    }
}

/// One policy with departures, over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RejectionLine {
    pub policy: SimulatedPolicy,
    pub seeds: Vec<u64>,
    /// The share of all GPUs that pods would keep busy if none were rejected; 1 is all.
    pub load: f64,
    /// The rejected share of the requested GPUs, in percent: the mean over seeds.
    pub rejected: f64,
    /// By seed.
    pub each_rejected: Vec<f64>,
}

impl RejectionLine {
    pub fn from_runs(
        policy: SimulatedPolicy,
        load: OfferedLoad,
        runs: &[(u64, Rejections)],
    ) -> Self {
        let each: Vec<f64> = runs
            .iter()
            .map(|(_, rejections)| rejections.percent())
            .collect();
        Self {
            policy,
            seeds: runs.iter().map(|(seed, _)| *seed).collect(),
            load: load.as_share(),
            rejected: each.iter().sum::<f64>() / each.len().max(1) as f64,
            each_rejected: each,
        }
    }
}
