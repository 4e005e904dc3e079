//! What each signal asks for, in replicas: all that the replicas use, divided by what one is meant to use.

use super::load::{ModelLoad, ReportedSum};
use super::trend::{Horizon, LoadTrend};
use crate::policy::AutoscalingRules;
use crate::units::{Moment, Percent};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Thousandths of a replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MilliReplicas(pub u64);

impl MilliReplicas {
    pub fn whole(replicas: u32) -> Self {
        Self(u64::from(replicas) * 1000)
    }

    /// `used ÷ target`, rounded up; `target` is what one replica is meant to use.
    fn from_usage(used: u64, target: u64) -> Self {
        let milli = (u128::from(used) * 1000).div_ceil(u128::from(target.max(1)));
        Self(u64::try_from(milli).unwrap_or(u64::MAX))
    }

    /// The number of whole replicas, rounded up.
    pub(crate) fn rounded_up(self) -> u32 {
        u32::try_from(self.0.div_ceil(1000)).unwrap_or(u32::MAX)
    }

    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    pub(super) fn share(self, percent: Percent) -> Self {
        let share = (u128::from(self.0) * u128::from(percent.get())).div_ceil(100);
        Self(u64::try_from(share).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for MilliReplicas {
    /// `3.15`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hundredths = self.0.div_ceil(10);
        write!(f, "{}.{:02}", hundredths / 100, hundredths % 100)
    }
}

/// What replicas are counted by.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum Signal {
    /// KV cache in use, in thousandths of a replica's.
    KvCache,
    /// Requests that wait.
    Waiting,
    /// Requests, running and waiting.
    Running,
}

/// The replicas that one signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Need {
    pub signal: Signal,
    /// The sum over the replicas that report it.
    pub now: u64,
    /// The sum when one more replica would answer, by the trend.
    pub predicted: u64,
    /// Serving replicas that do not report it.
    pub missing: u32,
    /// The least number of replicas: what is not reported counts as nothing.
    pub min_replicas: MilliReplicas,
    /// The greatest number: a replica that does not report it counts as one that is as busy as it is meant to be.
    pub max_replicas: MilliReplicas,
}

/// What each signal asks for that counts. A signal that no replica reports is left out, unless nothing else says how busy the
/// replicas are.
pub(super) fn needs(
    rules: &AutoscalingRules,
    load: &ModelLoad,
    trend: &LoadTrend,
    now: Moment,
) -> Vec<Need> {
    let rise = load.ready_in.min(rules.look_ahead);
    // A replica that starts now helps only once it answers: a queue that is gone not long after that needs none.
    let horizon = Horizon {
        rise,
        fall: rise + rules.look_ahead,
    };
    let is_occupancy_known = knows_occupancy(rules, load);
    let signals = [
        (Signal::KvCache, u64::from(rules.kv_cache.get()) * 10),
        (Signal::Waiting, rules.waiting.into()),
        (Signal::Running, rules.running.unwrap_or(0).into()),
    ];
    let counted = signals
        .into_iter()
        .filter(|(signal, _)| *signal != Signal::Running || rules.running.is_some());
    let counted =
        counted.filter(|(signal, _)| signal.reported(load).replicas > 0 || !is_occupancy_known);
    counted
        .map(|(signal, target)| need(signal, target, load, trend, now, horizon))
        .collect()
}

/// Whether any replica says how busy it is. A queue does not: it is empty at any load below the limit.
pub(super) fn knows_occupancy(rules: &AutoscalingRules, load: &ModelLoad) -> bool {
    load.kv_cache.replicas > 0 || rules.running.is_some() && load.running.replicas > 0
}

fn need(
    signal: Signal,
    target: u64,
    load: &ModelLoad,
    trend: &LoadTrend,
    now: Moment,
    horizon: Horizon,
) -> Need {
    let reported = signal.reported(load);
    let missing = load.serving.saturating_sub(reported.replicas);
    let predicted = match missing {
        0 => trend.predicted(signal, reported.sum, now, horizon),
        _ => reported.sum,
    };
    let by_sum = MilliReplicas::from_usage(predicted.max(reported.sum), target);
    let min_replicas = match signal {
        // More replicas have just begun to work on it: first it is seen what they make of it.
        Signal::Waiting if trend.is_settling(now) => by_sum.min(MilliReplicas::whole(load.awake())),
        // A queue that will be gone in time asks for no replica.
        Signal::Waiting => MilliReplicas::from_usage(predicted, target),
        // A cache is used and a request is worked on until it is done.
        Signal::KvCache | Signal::Running => by_sum,
    };
    let max_replicas = by_sum.plus(MilliReplicas::whole(missing));
    Need {
        signal,
        now: reported.sum,
        predicted,
        missing,
        min_replicas,
        max_replicas,
    }
}

impl Signal {
    pub(super) fn reported(self, load: &ModelLoad) -> ReportedSum {
        match self {
            Self::KvCache => load.kv_cache,
            Self::Waiting => load.waiting,
            // Every request counts that the engine has. One that does not report its queue has at least those that run.
            Self::Running => {
                let sum = load.running.sum.saturating_add(load.waiting.sum);
                ReportedSum {
                    sum,
                    replicas: load.running.replicas,
                }
            }
        }
    }
}
