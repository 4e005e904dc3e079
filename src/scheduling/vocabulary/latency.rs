//! How long the requests of an engine take, as the engine measures it, and what its class allows; and what pods on a GPU leave to a
//! neighbor, and cost it.

use crate::contention::{STEP_OVERHEAD_S, SWITCH_OVERHEAD};
use crate::ids::PodUid;
use crate::units::{Bytes, Micros, Millis, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One latency over the requests of the last half minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Latency {
    #[serde(rename = "meanMicros")]
    pub mean: Micros,
    /// The 99th percentile, from the histogram's buckets; missing if it is beyond the last of them.
    #[serde(rename = "p99Micros", default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<Micros>,
}

/// What a pod's engines say of their requests; of several engines, the slowest and the busiest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLatency {
    pub pod: PodUid,
    /// The means. `None` if there was no request, or they do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_per_token: Option<Micros>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_to_first_token: Option<Micros>,
    /// The share of time for which they have requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<Percent>,
}

/// The most that the means of a class's engines shall be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyLimits {
    pub time_per_token: Option<Micros>,
    pub time_to_first_token: Option<Micros>,
}

/// Latencies are means over so long: the agents' `RATE_WINDOW`.
pub(crate) const LATENCY_WINDOW: Millis = Millis::seconds(30);

impl EngineLatency {
    /// Whether any of its requests was measured.
    pub fn is_measured(&self) -> bool {
        self.time_per_token.is_some() || self.time_to_first_token.is_some()
    }
}

impl LatencyLimits {
    pub fn is_none(&self) -> bool {
        self.time_per_token.is_none() && self.time_to_first_token.is_none()
    }

    /// The latency that is nearest to its limit or furthest beyond it, and the limit; `None` if none is known that has a limit.
    pub fn nearest(&self, latency: &EngineLatency) -> Option<(Micros, Micros)> {
        let pairs = [
            latency.time_per_token.zip(self.time_per_token),
            latency.time_to_first_token.zip(self.time_to_first_token),
        ];
        let cross = |one: &(Micros, Micros), other: &(Micros, Micros)| {
            let products = (
                u128::from(one.0.0) * u128::from(other.1.0),
                u128::from(other.0.0) * u128::from(one.1.0),
            );
            products.0.cmp(&products.1)
        };
        pairs.into_iter().flatten().max_by(cross)
    }
}

const STEP_OVERHEAD_MICROS: u128 = (STEP_OVERHEAD_S * 1e6) as u128;
const SWITCH_OVERHEAD_PERMILLE: u128 = (SWITCH_OVERHEAD * 1e3) as u128;

/// What is expected of a pod that is not there yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedWork {
    /// How much of the time it will have requests.
    pub busy: Percent,
    /// How long its steps take, in per cent of what its weights take to read.
    pub slowness: u16,
}

impl ExpectedWork {
    /// Of a pod of whose model nothing is known.
    pub const UNKNOWN: Self = Self {
        busy: Percent::FULL,
        slowness: 100,
    };
}

impl Default for ExpectedWork {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

/// What the pods on a GPU leave to one more, and cost it, in per cent of the time for which a pod has work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighborRoom {
    /// How much of the time they have work, added up.
    pub busy: u16,
    /// How much of the time one more may have work, so that each engine keeps the limits of its class: at most 100. Negative if as
    /// much has to leave before.
    pub room: i16,
    /// How long a GiB of weights takes to read, if the GPU's speed is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micros_per_gib: Option<u16>,
}

impl NeighborRoom {
    /// Without an engine that has limits.
    pub const EMPTY: Self = Self {
        busy: 0,
        room: i16::MAX,
        micros_per_gib: None,
    };
    /// Room for a pod that has work all the time.
    pub const ALL: i16 = 100;
    /// No neighbor may come, whoever leaves.
    pub const CLOSED: i16 = i16::MIN;

    /// Whether the engines here keep their limits beside a pod that has work for that share of the time.
    pub fn leaves_room_to(&self, expected: ExpectedWork) -> bool {
        i16::from(expected.busy.get()) <= self.room
    }

    /// What a pod would take for a token here, if that is more than its limit, and more because of those that are here: a limit that it
    /// would not keep alone is none.
    pub fn beyond_limit(
        &self,
        expected: ExpectedWork,
        weights: Bytes,
        limit: Option<Micros>,
    ) -> Option<Micros> {
        let (limit, alone) = limit.zip(self.step_alone(expected, weights))?;
        let beside = self.beside_all(alone);
        (alone <= limit && beside > limit).then_some(beside)
    }

    /// What a step takes alone here, of a pod with so much weights on this GPU; `None` if the GPU's speed is not known.
    pub fn step_alone(&self, expected: ExpectedWork, weights: Bytes) -> Option<Micros> {
        let per_gib: u128 = self.micros_per_gib?.into();
        let reading = (u128::from(weights.0) * per_gib) >> 30;
        let step = (reading + STEP_OVERHEAD_MICROS) * u128::from(expected.slowness) / 100;
        Some(Micros(u64::try_from(step).unwrap_or(u64::MAX)))
    }

    /// What a step takes that alone takes `alone`, beside all pods here that take turns: [`contention`](crate::contention)'s formula, of
    /// which only the sum of their work is known here, so that it is never too little.
    pub fn beside_all(&self, alone: Micros) -> Micros {
        let busy = u128::from(self.busy);
        let switching = 1000 + SWITCH_OVERHEAD_PERMILLE * busy.min(100) / 100;
        let step = u128::from(alone.0) * (100 + busy) * switching / 100_000;
        Micros(u64::try_from(step).unwrap_or(u64::MAX))
    }

    /// Without any pod.
    pub fn emptied(self) -> Self {
        Self {
            micros_per_gib: self.micros_per_gib,
            ..Self::EMPTY
        }
    }

    /// With one pod more of which nothing is known: it has work all the time.
    pub fn charged(self) -> Self {
        Self {
            busy: self.busy.saturating_add(100),
            room: self.moved(-Self::ALL),
            ..self
        }
    }

    /// With one pod less that has work for that share of the time.
    pub fn discharged(self, busy: Percent) -> Self {
        Self {
            busy: self.busy.saturating_sub(busy.get().into()),
            room: self.moved(busy.get().into()).min(self.room.max(Self::ALL)),
            ..self
        }
    }

    fn moved(self, by: i16) -> i16 {
        match self.room {
            Self::CLOSED => Self::CLOSED,
            room if room == Self::EMPTY.room => room,
            room => room.saturating_add(by).max(Self::CLOSED + 1),
        }
    }
}

impl Default for NeighborRoom {
    fn default() -> Self {
        Self::EMPTY
    }
}
