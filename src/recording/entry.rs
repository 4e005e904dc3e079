//! What a segment says: its header, and its entries in order.

use super::answer::Answer;
use serde::{Deserialize, Serialize};
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::{ClusterState, Input};

/// The first line of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SegmentHeader {
    /// Build that recorded, as `stowage version` prints it. Another build may answer otherwise.
    pub stowage: String,
    /// Wall time at which the segment began: milliseconds since 1970 by the machine's clock.
    pub wall_ms: i64,
    /// That moment on the recorded clock.
    pub began: Moment,
}

/// One step of a recording.
#[derive(Debug, Clone)]
pub enum Entry {
    Checkpoint(Box<Checkpoint>),
    /// The recorded clock from here on.
    Clock(Moment),
    Input(NumberedInput),
    Answer(Answer),
}

/// The cluster between two inputs.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkpoint {
    /// The number of the next input.
    pub next: u64,
    /// Gap between the entry before and this checkpoint.
    pub after: Gap,
    pub state: ClusterState,
}

impl Checkpoint {
    /// Whether the entries before lead to it. `next` is the number of the input expected: if it differs, a segment is missing.
    pub fn continues(&self, next: u64) -> bool {
        self.after == Gap::None && self.next == next
    }
}

/// Whether the recording goes on without a break.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gap {
    /// The entries before lead to this state.
    None,
    /// The recording begins here.
    Start,
    /// Changes are missing: how many were not recorded because the recorder did not keep up, or could not write.
    Dropped(u64),
    /// A panic discarded the cluster's state.
    Discarded,
}

/// Input with its number, which is one more than that of the input before.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NumberedInput {
    #[serde(rename = "n")]
    pub number: u64,
    #[serde(rename = "in")]
    pub input: Input,
}
