//! The answer: how many replicas, and why, with its numbers.

use super::load::ModelLoad;
use super::signals::{MilliReplicas, Need, Signal};
use crate::units::Millis;
use crate::units::text::format_duration;
use serde::Serialize;

/// How many replicas a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredReplicas {
    /// The number of replicas in all, sleeping ones included.
    pub replicas: u32,
    /// The number that the load asks for, before windows, steps and bounds.
    pub requested: u32,
    /// Sleeping replicas that would be woken for the load before others start.
    pub wake: u32,
    pub serving: u32,
    pub starting: u32,
    pub asleep: u32,
    /// The factor that decided the number.
    pub by: DecidingFactor,
    /// How far ahead the trend was taken.
    pub ready_in: Millis,
    /// The need by each signal that counts.
    pub needs: Vec<SignalNeed>,
}

/// The factor that decides a number of replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum DecidingFactor {
    /// The signal that asks for the most replicas.
    #[strum(transparent)]
    Signal(Signal),
    /// The load is near enough to what the replicas are meant to have.
    Tolerance,
    /// A window of `scaleUp` or `scaleDown` holds the number.
    Window,
    /// The largest step is taken.
    Step,
    Min,
    Max,
    /// No replica says how busy it is.
    UnknownLoad,
    /// There is no replica that could have a load.
    NoReplicas,
}

/// The replicas that one signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SignalNeed {
    pub signal: Signal,
    /// Over all replicas that report it: requests, or thousandths of a replica's KV cache.
    pub now: u64,
    /// That sum when one more replica would answer, by the trend.
    pub predicted: u64,
    /// Serving replicas that do not report it.
    pub missing: u32,
    /// The need in thousandths of a replica.
    pub milli_replicas: MilliReplicas,
}

impl From<&Need> for SignalNeed {
    fn from(need: &Need) -> Self {
        let Need {
            signal,
            now,
            predicted,
            missing,
            min_replicas: least,
            ..
        } = *need;
        Self {
            signal,
            now,
            predicted,
            missing,
            milli_replicas: least,
        }
    }
}

impl DesiredReplicas {
    /// All replicas there are.
    pub fn current(&self) -> u32 {
        let there = [self.serving, self.starting, self.asleep];
        there.into_iter().fold(0, u32::saturating_add)
    }

    /// Why, in a sentence or two.
    pub fn message(&self) -> String {
        let (replicas, requested) = (self.replicas, self.requested);
        let why = match self.by {
            DecidingFactor::Signal(_) => "as the load requires".to_owned(),
            DecidingFactor::Tolerance => {
                "the load is within the tolerance of what they are meant to have".to_owned()
            }
            DecidingFactor::Window => {
                format!(
                    "the load asks for {requested}, and the window of autoscaling has not passed"
                )
            }
            DecidingFactor::Step => {
                format!("the load asks for {requested}, and this is the largest step")
            }
            DecidingFactor::Min => format!("minReplicas; the load asks for {requested}"),
            DecidingFactor::Max => format!("maxReplicas; the load asks for {requested}"),
            DecidingFactor::UnknownLoad => {
                "no replica says how busy it is, so the number stays".to_owned()
            }
            DecidingFactor::NoReplicas => "there is no replica that serves".to_owned(),
        };
        let there = format!(
            "{} serve, {} start, {} sleep",
            self.serving, self.starting, self.asleep
        );
        let wake = match self.wake {
            0 => String::new(),
            wake => format!(" {wake} of those that sleep would serve it when woken."),
        };
        let needs: String = self
            .needs
            .iter()
            .map(|need| format!(" {}.", self.sentence(need)))
            .collect();
        format!("{replicas}: {why}. {there}.{wake}{needs}")
    }

    fn sentence(&self, need: &SignalNeed) -> String {
        let amount = |sum: u64| match need.signal {
            Signal::KvCache => format!("{} KV caches", MilliReplicas(sum)),
            Signal::Waiting => format!("{sum} waiting requests"),
            Signal::Running => format!("{sum} requests"),
        };
        let ahead = match need.predicted == need.now {
            true => String::new(),
            false => {
                format!(
                    " ({} in {}, by the trend)",
                    amount(need.predicted),
                    format_duration(self.ready_in)
                )
            }
        };
        let missing = match need.missing {
            0 => String::new(),
            missing => format!("; {missing} replicas do not report it"),
        };
        format!(
            "{}{ahead} ask for {} replicas{missing}",
            amount(need.now),
            need.milli_replicas
        )
    }
}

impl ModelLoad {
    /// Whether anything of the model is there.
    pub fn has_replicas(&self) -> bool {
        self.replicas() > 0
    }
}
