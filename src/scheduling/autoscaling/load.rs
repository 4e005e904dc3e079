//! What the replicas of one model report, in sums.

use crate::ids::{ModelId, NodeName, PodUid};
use crate::units::Millis;
use serde::{Deserialize, Serialize};

/// Thousandths of a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Permille(u16);

impl Permille {
    pub const FULL: Self = Self(1000);

    /// The nearest; `None` for what is no share of 1.
    pub fn from_share(share: f64) -> Option<Self> {
        (0.0..=1.0)
            .contains(&share)
            .then(|| Self((share * 1000.0).round() as u16))
    }

    pub fn get(self) -> u64 {
        self.0.into()
    }
}

/// One engine, as its node's agent reported it last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSample {
    /// The node whose agent reported it.
    pub node: NodeName,
    /// The agent's report is not stale, however old this engine's figures are.
    pub is_report_fresh: bool,
    pub pod: PodUid,
    pub model: ModelId,
    pub figures: EngineFigures,
}

/// What an engine does, and what it says of its load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineFigures {
    Serving {
        kv_cache: Option<Permille>,
        waiting: Option<u64>,
        running: Option<u64>,
    },
    /// It serves, or did, and its figures are missing or old.
    Silent,
    Starting,
    Asleep,
    /// It finishes its requests and takes no more.
    Draining,
}

/// A sum over the replicas that report the figure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedSum {
    pub sum: u64,
    /// How many of the serving replicas report it.
    pub replicas: u32,
}

/// The replicas of one model and what they report together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelLoad {
    /// Replicas that serve, with or without figures.
    pub serving: u32,
    /// Replicas that start: pods that are pending, bound or whose engine loads.
    pub starting: u32,
    /// Replicas whose engine sleeps.
    pub asleep: u32,
    /// KV cache in use, in thousandths of a replica's.
    pub kv_cache: ReportedSum,
    /// Requests that wait.
    pub waiting: ReportedSum,
    /// Requests that are worked on.
    pub running: ReportedSum,
    /// How long until one more replica would answer, by waking or starting one.
    pub ready_in: Millis,
}

impl ReportedSum {
    fn add(&mut self, figure: Option<u64>) {
        if let Some(figure) = figure {
            self.sum = self.sum.saturating_add(figure);
            self.replicas = self.replicas.saturating_add(1);
        }
    }
}

impl ModelLoad {
    /// Counts one replica.
    pub fn add(&mut self, replica: EngineFigures) {
        let count = match replica {
            EngineFigures::Serving { .. } | EngineFigures::Silent => &mut self.serving,
            EngineFigures::Starting => &mut self.starting,
            EngineFigures::Asleep => &mut self.asleep,
            EngineFigures::Draining => return,
        };
        *count = count.saturating_add(1);
        if let EngineFigures::Serving {
            kv_cache,
            waiting,
            running,
        } = replica
        {
            self.kv_cache.add(kv_cache.map(Permille::get));
            self.waiting.add(waiting);
            self.running.add(running);
        }
    }

    /// All replicas there are, in any state.
    pub fn replicas(&self) -> u32 {
        self.awake().saturating_add(self.asleep)
    }

    /// Replicas that serve or will.
    pub fn awake(&self) -> u32 {
        self.serving.saturating_add(self.starting)
    }
}

impl EngineFigures {
    /// Two engines of one pod are one replica, as busy as the fuller cache and both queues.
    pub fn merged_with(self, other: Self) -> Self {
        use EngineFigures::*;
        let sum = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        match (self, other) {
            (
                Serving {
                    kv_cache: a,
                    waiting: b,
                    running: c,
                },
                Serving {
                    kv_cache: x,
                    waiting: y,
                    running: z,
                },
            ) => Serving {
                kv_cache: a.zip(x).map(|(a, x)| a.max(x)),
                waiting: sum(b, y),
                running: sum(c, z),
            },
            (Serving { .. } | Silent, Serving { .. } | Silent) => Silent,
            (one @ (Serving { .. } | Silent), _) | (_, one @ (Serving { .. } | Silent)) => one,
            (Starting, _) | (_, Starting) => Starting,
            (Asleep, _) | (_, Asleep) => Asleep,
            (Draining, Draining) => Draining,
        }
    }
}
