//! Where a model's weights are on a node, and how long it takes from there until an engine answers.

use crate::units::{Bytes, Millis};
use serde::{Deserialize, Serialize};

/// Where a model's weights are; the further down the list, the sooner an engine is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "service", derive(schemars::JsonSchema))]
pub enum Tier {
    /// Some of its files; the rest must still be fetched.
    Partial,
    Disk,
    /// On disk, and in the kernel's page cache.
    PageCache,
    /// In host memory, held by an engine that sleeps.
    Sleeping,
    /// On its way into a GPU.
    Loading,
    /// In a GPU.
    Resident,
}

/// What loading costs: bytes a second by where the weights are, and what no speed helps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadingSpeeds {
    pub network: Bytes,
    pub disk: Bytes,
    pub page_cache: Bytes,
    pub wake: Bytes,
    /// Process start, CUDA context, profiling, graph capture.
    pub init: Millis,
}
