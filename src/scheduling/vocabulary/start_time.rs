//! The time from binding a pod until its engine answers: its parts, and the factors by which the policy's speeds are corrected.
//!
//! The policy's speeds are priors. What is observed of engines that start is compared with them and gives [`StartFactors`], for
//! each [`StartKind`]: an engine and the way that its weights go.

use super::model_tier::ModelTier;
use crate::engines::Engine;
use crate::units::Millis;
use serde::{Deserialize, Serialize};

/// The parts of a start, one after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartTime {
    /// The images that the node lacks are pulled.
    pub pull: Millis,
    /// The files of the model that the node lacks are fetched.
    pub fetch: Millis,
    /// The weights are loaded onto the GPU.
    pub load: Millis,
    /// All else: the process starts, allocates its KV cache, compiles, captures graphs.
    pub init: Millis,
}

impl StartTime {
    pub fn total(&self) -> Millis {
        self.pull + self.engine()
    }

    /// Without the pull: what the engine itself takes.
    pub fn engine(&self) -> Millis {
        self.transfer() + self.init
    }

    /// The part that depends on how much the model weighs.
    pub fn transfer(&self) -> Millis {
        self.fetch + self.load
    }

    /// This start, with pulls corrected by the factors `pull` and the engine by the factors `engine`.
    pub fn corrected(&self, pull: &StartFactors, engine: &StartFactors) -> Self {
        Self {
            pull: pull.transfer.apply_to(self.pull),
            fetch: engine.transfer.apply_to(self.fetch),
            load: engine.transfer.apply_to(self.load),
            init: engine.init.apply_to(self.init),
        }
    }
}

/// How many times as long something takes as the policy says, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TimeFactor(pub u32);

impl TimeFactor {
    /// The policy's own figure: factor 1.
    pub(crate) const PRIOR: Self = Self(1000);
    /// No speed in a policy is further off than by this: what seems to be is an accident.
    pub const LIMITS: (Self, Self) = (Self(100), Self(10_000));

    pub fn apply_to(self, time: Millis) -> Millis {
        match self {
            Self::PRIOR => time,
            Self(factor) => {
                Millis((u128::from(time.0) * u128::from(factor) / 1000).min(u64::MAX.into()) as u64)
            }
        }
    }

    /// Whether the two differ by a tenth of the smaller one, or more.
    pub fn is_far_from(self, other: Self) -> bool {
        let (small, large) = (self.0.min(other.0), self.0.max(other.0));
        u64::from(large) * 10 >= u64::from(small) * 11
    }
}

/// What was learned of one kind of start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFactors {
    /// Factor of the part that depends on the bytes to be moved.
    pub transfer: TimeFactor,
    /// Factor of [`StartTime::init`].
    pub init: TimeFactor,
    /// Number of observed starts behind it; 0 for the policy's own figures.
    pub samples: u16,
}

impl StartFactors {
    pub(crate) const PRIOR: Self = Self {
        transfer: TimeFactor::PRIOR,
        init: TimeFactor::PRIOR,
        samples: 0,
    };

    pub fn is_far_from(&self, other: &Self) -> bool {
        self.transfer.is_far_from(other.transfer) || self.init.is_far_from(other.init)
    }
}

/// The way that weights go to the GPU. Tiers with the same way take the same speeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LoadPath {
    /// Some or all files are fetched first.
    Network,
    Disk,
    PageCache,
}

impl LoadPath {
    pub fn from_tier(tier: Option<ModelTier>) -> Self {
        match tier {
            None | Some(ModelTier::Partial) => Self::Network,
            Some(ModelTier::Disk) => Self::Disk,
            Some(
                ModelTier::PageCache
                | ModelTier::Sleeping
                | ModelTier::Loading
                | ModelTier::Resident,
            ) => Self::PageCache,
        }
    }
}

/// A kind of start whose factors are learned on their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartKind {
    /// The pull of images, whatever they are.
    Pull,
    Engine(Engine, LoadPath),
}

/// What was learned on one node, in order of kind. Cheap to clone.
pub(crate) type NodeStartFactors = std::sync::Arc<[(StartKind, StartFactors)]>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_correct_their_own_part_and_never_overflow() {
        let time = StartTime {
            pull: Millis(10),
            fetch: Millis(100),
            load: Millis(50),
            init: Millis(1000),
        };
        let factors = |transfer, init| StartFactors {
            transfer: TimeFactor(transfer),
            init: TimeFactor(init),
            samples: 3,
        };
        let corrected = time.corrected(&factors(500, 9000), &factors(3000, 2000));
        let expected = StartTime {
            pull: Millis(5),
            fetch: Millis(300),
            load: Millis(150),
            init: Millis(2000),
        };
        assert_eq!(corrected, expected);
        assert_eq!(
            TimeFactor(10_000).apply_to(Millis(u64::MAX)),
            Millis(u64::MAX)
        );
        assert_eq!(
            time.corrected(&StartFactors::PRIOR, &StartFactors::PRIOR),
            time
        );
    }
}
