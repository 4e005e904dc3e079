//! How long a pod takes to answer, as an explanation says it.

use crate::placing::start_model::FactorSource;
use crate::units::{Bytes, Millis};
use serde::{Deserialize, Serialize};

/// The time from binding until the pod answers, in parts that follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartPart {
    pub pull_millis: Millis,
    pub fetch_millis: Millis,
    pub load_millis: Millis,
    pub init_millis: Millis,
    /// The whole time by the policy's speeds alone.
    pub policy_millis: Millis,
    pub missing_images: u32,
    pub missing_image_bytes: Bytes,
    /// No node lists some of the missing images: the policy's size counts.
    pub is_image_size_assumed: bool,
    /// How the pull was calibrated.
    pub pull: CalibrationPart,
    /// How the rest was calibrated.
    pub engine: CalibrationPart,
}

/// How many times as long something takes as the policy says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CalibrationPart {
    /// Where that was learned.
    pub source: FactorSource,
    /// From how many starts; 0 if nothing was.
    pub starts: u16,
    /// Of the part that depends on bytes.
    pub transfer_thousandths: u32,
    pub init_thousandths: u32,
}

/// When a bound pod's engine was expected to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundStartPart {
    /// After binding.
    pub expected_millis: Millis,
    /// The same by the policy's speeds alone.
    pub policy_millis: Millis,
    /// When it did; `None` while it starts.
    pub took_millis: Option<Millis>,
}
