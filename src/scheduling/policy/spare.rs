//! Spare GPUs: how many stay free of preemptible pods, and which GPUs count.

use super::window::Window;
use crate::ids::GpuModel;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// GPUs that stay wholly free of preemptible pods, so that a pod that is not preemptible starts without an eviction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SpareRule {
    /// How many.
    #[schemars(range(min = 1, max = 1000000))]
    pub gpus: u32,
    /// A part of the GPU model's name, case-insensitive. Default: any model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("format" = "gpu-model"))]
    pub model: Option<String>,
    /// The node pool. Default: any node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("format" = "name"))]
    pub pool: Option<String>,
    /// The windows in which it holds. Default: always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<Window>,
}

impl SpareRule {
    /// Whether GPUs of that model on nodes of that pool count for it.
    pub fn covers(&self, pool: Option<&str>, model: &GpuModel) -> bool {
        let is_of_pool = self
            .pool
            .as_deref()
            .is_none_or(|wanted| pool == Some(wanted));
        is_of_pool
            && self
                .model
                .as_deref()
                .is_none_or(|part| contains(model.as_str(), part))
    }
}

impl fmt::Display for SpareRule {
    /// Its GPUs: `GPUs`, `GPUs of model H100 in pool inference`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPUs")?;
        self.model
            .iter()
            .try_for_each(|model| write!(f, " of model {model}"))?;
        self.pool
            .iter()
            .try_for_each(|pool| write!(f, " in pool {pool}"))
    }
}

/// Case does not count.
fn contains(name: &str, part: &str) -> bool {
    part.is_empty()
        || name
            .as_bytes()
            .windows(part.len())
            .any(|bytes| bytes.eq_ignore_ascii_case(part.as_bytes()))
}
