//! The part of each GPU that is never handed out.

use crate::ids::GpuModel;
use crate::units::Percent;
use serde::Serialize;
use std::collections::BTreeMap;

/// The share of every GPU that is never handed out: what CUDA contexts and fragmentation inside the driver take beyond
/// what engines ask for. The usual advice is 10 to 15 %.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Headroom {
    pub default: Percent,
    /// By a part of the GPU model's name, in lower case; the longest that is in it counts.
    pub models: BTreeMap<String, Percent>,
}

impl Headroom {
    pub fn all(percent: Percent) -> Self {
        Self { default: percent, models: BTreeMap::new() }
    }

    pub fn of(&self, model: &GpuModel) -> Percent {
        if self.models.is_empty() {
            return self.default;
        }
        let model = model.as_str().to_ascii_lowercase();
        let named = self.models.iter().filter(|(part, _)| model.contains(part.as_str()));
        named.max_by_key(|(part, _)| part.len()).map_or(self.default, |(_, percent)| *percent)
    }
}
