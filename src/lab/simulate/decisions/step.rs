//! The kinds of steps, by the names that `--without` takes.

use std::fmt;
use std::str::FromStr;

macro_rules! steps {
    ($($kind:ident $weight:literal $name:literal $what:literal)*) => {
        /// What happens in one step.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum StepKind { $(#[doc = $what] $kind),* }

        impl StepKind {
            pub const ALL: &[Self] = &[$(Self::$kind),*];
            const WEIGHTS: &[usize] = &[$($weight),*];

            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name),* }
            }

            pub fn what(self) -> &'static str {
                match self { $(Self::$kind => $what),* }
            }
        }
    };
}

steps! {
    Schedule 96 "schedule" "kube-scheduler asks filter, prioritize and bind for a pod, or some of them"
    Rebind 10 "rebind" "a Binding is asked for once more, or for another node"
    Preempt 22 "preempt" "kube-scheduler asks where a refused pod may preempt"
    Plan 14 "plan" "the planner runs"
    Backlog 2 "backlog" "small pods that may be evicted fill GPUs, others of high priority come, and the planner runs"
    Arrive 22 "arrive" "a pod or a group of pods comes"
    Leave 16 "leave" "a pod ends, or is deleted"
    Answer 8 "answer" "a write is answered, or lands"
    Watch 12 "watch" "what happened to pods is shown"
    Report 18 "report" "an agent reports, late or with a figure missing now and then"
    Pass 22 "pass" "time passes"
    Device 4 "device" "a GPU is lost, drained, or comes back"
    Budget 4 "budget" "a disruption budget changes"
    Policy 2 "policy" "the other policy comes into force"
    Restart 1 "restart" "the process restarts, from what pods show"
    Store 1 "store" "the state is stored and loaded"
}

impl StepKind {
    /// The sum of all weights, which a draw of one byte can meet.
    pub const WHOLE: usize = {
        let (mut sum, mut place) = (0, 0);
        while place < Self::WEIGHTS.len() {
            sum += Self::WEIGHTS[place];
            place += 1;
        }
        sum
    };

    /// The kind to which a number below [`Self::WHOLE`] falls.
    pub fn drawn(mut number: usize) -> Self {
        for (kind, weight) in Self::ALL.iter().zip(Self::WEIGHTS) {
            if number < *weight {
                return *kind;
            }
            number -= weight;
        }
        Self::Pass
    }
}

const _: () = assert!(StepKind::WHOLE <= 256);

/// The text is no kind's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no kind of step \"{name}\"; write one of {}", names().join(", "))]
pub struct UnknownStep {
    name: String,
}

fn names() -> Vec<&'static str> {
    StepKind::ALL.iter().map(|kind| kind.name()).collect()
}

impl FromStr for StepKind {
    type Err = UnknownStep;

    fn from_str(text: &str) -> Result<Self, UnknownStep> {
        let found = Self::ALL.iter().find(|kind| kind.name() == text);
        found.copied().ok_or_else(|| UnknownStep {
            name: text.to_owned(),
        })
    }
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
