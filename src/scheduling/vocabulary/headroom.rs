//! The part of each GPU that is never handed out.

use crate::ids::GpuModel;
use crate::units::{Percent, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// The share of every GPU that is never allocated: what CUDA contexts and fragmentation use beyond the engines' requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Headroom {
    /// For every GPU that `models` does not cover.
    #[serde(with = "setting::Percentage::<90>")]
    pub default: Percent,
    /// A part of a GPU model's name, case-insensitive, and its headroom. The longest match wins.
    #[serde(deserialize_with = "parse_models", serialize_with = "render_models")]
    #[schemars(with = "BTreeMap<String, setting::Percentage<90>>")]
    pub models: BTreeMap<String, Percent>,
}

type ModelSettings = Option<BTreeMap<String, setting::Percentage<90>>>;

/// Names are kept in lower case.
fn parse_models<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Percent>, D::Error> {
    let models = ModelSettings::deserialize(deserializer)?.unwrap_or_default();
    Ok(models
        .into_iter()
        .map(|(part, percent)| (part.to_ascii_lowercase(), percent.0))
        .collect())
}

/// An empty map is left out.
fn render_models<S: Serializer>(
    models: &BTreeMap<String, Percent>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let models = models
        .iter()
        .map(|(part, percent)| (part.clone(), setting::Percentage(*percent)));
    let models: ModelSettings =
        Some(models.collect()).filter(|models: &BTreeMap<_, _>| !models.is_empty());
    models.serialize(serializer)
}

impl Default for Headroom {
    /// The usual advice is 10 to 15 %.
    fn default() -> Self {
        Self::uniform(const { Percent::new(10).unwrap() })
    }
}

impl Headroom {
    pub fn uniform(percent: Percent) -> Self {
        Self {
            default: percent,
            models: BTreeMap::new(),
        }
    }

    pub fn percent_for(&self, model: &GpuModel) -> Percent {
        if self.models.is_empty() {
            return self.default;
        }
        let model = model.as_str().to_ascii_lowercase();
        let named = self
            .models
            .iter()
            .filter(|(part, _)| model.contains(part.as_str()));
        named
            .max_by_key(|(part, _)| part.len())
            .map_or(self.default, |(_, percent)| *percent)
    }
}
