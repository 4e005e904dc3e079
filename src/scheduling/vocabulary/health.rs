//! Health of a GPU, from what its node's driver answers.
//!
//! One rule holds for everything that a node shows: **what is not recognized makes the thing unknown, and unknown is never
//! healthy, free or idle.** For a GPU this means that pods come only while each answer about it is known to be harmless. Any
//! other answer makes it draining at once, and lost when it lasts. No health evicts a pod: an unknown answer does not show that
//! work has ended, and where it has, the documented loss is told to the pod's owner.

use crate::units::{Millis, Moment};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Ordered from the best to the worst.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    Healthy = 0,
    /// Gone from the bus or out of order. Its pods keep their charge; nothing new goes there.
    Lost = 2,
    /// Keeps its pods, takes no more. A word of a later version counts as this.
    #[serde(other)]
    Draining = 1,
}

/// NVML's compute mode: how many processes may use a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ComputeMode {
    #[default]
    Default,
    /// One at a time: a pod that shares the GPU could not start beside another.
    ExclusiveProcess,
    /// None.
    Prohibited,
    /// One that this version does not know, or that could not be read.
    #[serde(other)]
    Unknown,
}

impl ComputeMode {
    /// What it says against a GPU, if anything. One process at a time is a matter of which pod comes.
    pub fn fault(self) -> Option<&'static str> {
        match self {
            Self::Default | Self::ExclusiveProcess => None,
            Self::Prohibited => {
                Some("its compute mode is Prohibited; nvidia-smi -c DEFAULT lets processes use it")
            }
            Self::Unknown => {
                Some("its compute mode cannot be read, or is one that this version does not know")
            }
        }
    }
}

/// How the driver has answered for one GPU so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AnswerState {
    /// Well, ever since the GPU was first read.
    #[default]
    Steady,
    /// In a way that is not known to be harmless, since then.
    Failing { since: Moment },
    /// Well again, since then.
    Recovered { since: Moment },
}

/// How long a GPU has been failing, or has answered well again. Ages, because no clock is compared with another's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerAges {
    pub failing: Option<Millis>,
    pub recovered: Option<Millis>,
}

impl AnswerState {
    /// The state after one more answer.
    pub fn next(self, is_harmless: bool, now: Moment) -> Self {
        match (self, is_harmless) {
            (Self::Failing { .. }, true) => Self::Recovered { since: now },
            (Self::Steady | Self::Recovered { .. }, false) => Self::Failing { since: now },
            (state, _) => state,
        }
    }

    pub fn ages(self, now: Moment) -> AnswerAges {
        match self {
            Self::Steady => AnswerAges::default(),
            Self::Failing { since } => AnswerAges {
                failing: Some(now.since(since)),
                recovered: None,
            },
            Self::Recovered { since } => AnswerAges {
                failing: None,
                recovered: Some(now.since(since)),
            },
        }
    }
}

impl AnswerAges {
    /// Health by the answers alone. A GPU that recovers takes pods once it has answered well for as long as makes a failing one
    /// lost.
    pub fn health(self, lost_after: Millis) -> Health {
        match self {
            Self {
                failing: Some(length),
                ..
            } if length >= lost_after => Health::Lost,
            Self {
                failing: Some(_), ..
            } => Health::Draining,
            Self {
                recovered: Some(length),
                ..
            } if length < lost_after => Health::Draining,
            _ => Health::Healthy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOST_AFTER: Millis = Millis::seconds(30);

    /// Health after each of these answers, one a second.
    fn healths(answers: &str) -> String {
        let mut state = AnswerState::default();
        let health = |(second, answer): (u64, char)| {
            let now = Moment::default() + Millis::seconds(second);
            state = state.next(answer == '.', now);
            match state.ages(now).health(LOST_AFTER) {
                Health::Healthy => 'h',
                Health::Draining => 'd',
                Health::Lost => 'L',
            }
        };
        (0..).zip(answers.chars()).map(health).collect()
    }

    #[test]
    fn one_bad_answer_drains_a_gpu_until_it_has_answered_well_for_the_whole_time() {
        let answers = format!("..x{}", ".".repeat(32));
        assert_eq!(healths(&answers), format!("hhd{}hh", "d".repeat(30)));
    }

    #[test]
    fn bad_answers_that_last_lose_a_gpu_and_a_good_one_in_between_begins_anew() {
        assert_eq!(healths(&"x".repeat(32)), format!("{}LL", "d".repeat(30)));
        let interrupted = format!("{}.{}", "x".repeat(29), "x".repeat(30));
        assert_eq!(healths(&interrupted), "d".repeat(60));
    }

    #[test]
    fn a_compute_mode_of_a_later_version_is_unknown() {
        let read = |word: &str| serde_json::from_str::<ComputeMode>(word).unwrap();
        assert_eq!(read("\"exclusive-process\""), ComputeMode::ExclusiveProcess);
        assert_eq!(read("\"exclusive-context\""), ComputeMode::Unknown);
    }

    #[test]
    fn a_health_of_a_later_version_takes_no_pods() {
        let read = |word: &str| serde_json::from_str::<Health>(word).unwrap();
        assert_eq!(
            ["\"healthy\"", "\"lost\"", "\"draining\""].map(read),
            [Health::Healthy, Health::Lost, Health::Draining]
        );
        assert_eq!(read("\"being-reset\""), Health::Draining);
    }

    proptest! {
        /// Against the whole history of answers: when the last bad one was, and since when none was good.
        #[test]
        fn no_gpu_is_healthy_after_an_unrecognized_answer_nor_lost_by_less_than_lasting_ones(
            answers in prop::collection::vec((any::<bool>(), 0u64..20_000), 1..60),
            lost_after in (1u64..60_000).prop_map(Millis),
        ) {
            let (mut state, mut now, mut history) = (AnswerState::default(), Moment::default(), Vec::new());
            for (is_harmless, pause) in answers {
                now = now + Millis(pause);
                state = state.next(is_harmless, now);
                history.push((is_harmless, now));
                let health = state.ages(now).health(lost_after);
                let well = history.iter().rev().take_while(|(is_harmless, _)| *is_harmless).last();
                let badly = history.iter().rev().take_while(|(is_harmless, _)| !is_harmless).last();
                let lasts = |first: Option<&(bool, Moment)>| first.is_some_and(|(_, since)| now.since(*since) >= lost_after);
                let ever_failed = history.iter().any(|(is_harmless, _)| !is_harmless);
                prop_assert_eq!(health == Health::Healthy, is_harmless && (!ever_failed || lasts(well)));
                prop_assert_eq!(health == Health::Lost, !is_harmless && lasts(badly));
            }
        }
    }
}
