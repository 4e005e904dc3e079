//! How many replicas of a model its load asks for: the targets, the bounds, and how fast the number changes.

use super::selection::{is_pattern, pattern_matches};
use crate::ids::ModelId;
use crate::units::{Millis, Percent, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How many replicas a model is said to need. Stowage changes no replicas itself: an HPA or KEDA reads the number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct AutoscalingRules {
    /// The KV cache usage that a replica is meant to have.
    #[serde(with = "setting::Percentage::<100>")]
    pub kv_cache: Percent,
    /// The waiting requests that a replica is meant to have at most.
    #[schemars(range(min = 1, max = 1000000))]
    pub waiting: u32,
    /// The requests, running and waiting, that a replica is meant to have. Default: they do not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1, max = 1000000))]
    pub running: Option<u32>,
    /// The fewest replicas. With 0, a model without load needs none, and something else starts the first.
    #[schemars(range(max = 100000))]
    pub min_replicas: u32,
    /// The most replicas.
    #[schemars(range(min = 1, max = 100000))]
    pub max_replicas: u32,
    /// Replicas beyond what the load asks for.
    pub reserve: Reserve,
    /// How far the load may be from what the replicas are meant to have before their number changes.
    #[serde(with = "setting::Percentage::<50>")]
    pub tolerance: Percent,
    /// How far ahead the trend of the load counts: until a replica that starts now would answer, and no further than this. `0s`
    /// counts no trend.
    #[serde(with = "setting::Duration")]
    pub look_ahead: Millis,
    pub scale_up: ScaleUp,
    pub scale_down: ScaleDown,
    /// Targets and bounds of models, by a model's name or by a pattern of names in which `*` stands for any text. The name
    /// counts before a pattern, and the longest pattern before others.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, ModelRules>,
}

/// Replicas beyond what the load asks for; the larger of the two counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Reserve {
    #[schemars(range(max = 100000))]
    pub replicas: u32,
    /// A share of what the load asks for.
    #[serde(with = "setting::Percentage::<100>")]
    pub percent: Percent,
}

/// How fast the number rises. The larger of the two steps counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ScaleUp {
    /// It rises to the least that was asked for within this time.
    #[serde(with = "setting::Duration")]
    pub window: Millis,
    /// At most so many replicas beyond those that serve. Replicas that start are among them.
    #[schemars(range(min = 1, max = 100000))]
    pub replicas: u32,
    /// At most this share of the replicas that serve beyond them.
    #[schemars(range(max = 10000))]
    pub percent: u32,
}

/// How fast the number falls. The larger of the two steps counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ScaleDown {
    /// It falls to the most that was asked for within this time.
    #[serde(with = "setting::Duration")]
    pub window: Millis,
    /// Within a `period` it falls by at most so many replicas.
    #[schemars(range(min = 1, max = 100000))]
    pub replicas: u32,
    /// Within a `period` it falls by at most this share.
    #[serde(with = "setting::Percentage::<100>")]
    pub percent: Percent,
    #[serde(with = "setting::Duration")]
    pub period: Millis,
}

/// What is different for some models; the rest is as for all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct ModelRules {
    #[serde(
        with = "setting::Optional::<setting::Percentage<100>>",
        skip_serializing_if = "Option::is_none"
    )]
    pub kv_cache: Option<Percent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1, max = 1000000))]
    pub waiting: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1, max = 1000000))]
    pub running: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(max = 100000))]
    pub min_replicas: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "u32", range(min = 1, max = 100000))]
    pub max_replicas: Option<u32>,
    /// The namespaces whose pods are replicas of the model; `*` stands for any text. Default: all, although engines name their
    /// models themselves, and those of any namespace raise the number. With a list, pods that take their GPUs by ResourceClaims
    /// do not count: their namespaces are unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("items" = {"format": "name-pattern", "type": "string"}))]
    pub namespaces: Vec<String>,
}

impl AutoscalingRules {
    /// The rules of one model.
    pub fn for_model(&self, model: &ModelId) -> Self {
        let none = ModelRules::default();
        let overrides = self.model_rules(model).unwrap_or(&none);
        Self {
            kv_cache: overrides.kv_cache.unwrap_or(self.kv_cache),
            waiting: overrides.waiting.unwrap_or(self.waiting),
            running: overrides.running.or(self.running),
            min_replicas: overrides.min_replicas.unwrap_or(self.min_replicas),
            max_replicas: overrides.max_replicas.unwrap_or(self.max_replicas),
            models: BTreeMap::new(),
            ..*self
        }
    }

    /// Whether pods of a namespace are replicas of the model; `None` is a pod whose namespace is unknown.
    pub fn replica_filter(&self, model: &ModelId) -> impl Fn(Option<&str>) -> bool {
        let namespaces = self
            .model_rules(model)
            .map_or(&[][..], |rules| &rules.namespaces);
        move |namespace| {
            let is_named = |name: &str| {
                namespaces
                    .iter()
                    .any(|pattern| pattern_matches(pattern, name))
            };
            namespaces.is_empty() || namespace.is_some_and(is_named)
        }
    }

    fn model_rules(&self, model: &ModelId) -> Option<&ModelRules> {
        let patterns = || {
            self.models
                .iter()
                .filter(|(pattern, _)| pattern_matches(pattern, model.as_str()))
        };
        let longest = || {
            patterns()
                .max_by_key(|(pattern, _)| pattern.len())
                .map(|(_, rules)| rules)
        };
        let is_it = |name: &str| {
            !is_pattern(name) && ModelId::parse(name).is_ok_and(|named| named == *model)
        };
        let by_name = || {
            self.models
                .iter()
                .find(|(name, _)| is_it(name))
                .map(|(_, rules)| rules)
        };
        self.models
            .get(model.as_str())
            .or_else(by_name)
            .or_else(longest)
    }

    /// The models that have rules by their name: they are known before any of their replicas is.
    pub(crate) fn named_models(&self) -> impl Iterator<Item = ModelId> {
        self.models
            .keys()
            .filter(|name| !is_pattern(name))
            .filter_map(|name| ModelId::parse(name).ok())
    }
}

impl Default for AutoscalingRules {
    /// The targets are what llm-d's autoscaler aims for: it counts a replica as saturated at 80 % of its KV cache or 5 waiting
    /// requests, and scales when a tenth of the cache is left of that. The tolerance is the HPA's. Five minutes ahead is as far
    /// as two minutes of trend say anything, and longer than most engines take to start.
    fn default() -> Self {
        Self {
            kv_cache: const { Percent::new(70).unwrap() },
            waiting: 5,
            running: None,
            min_replicas: 1,
            max_replicas: 100,
            reserve: Reserve::default(),
            tolerance: const { Percent::new(10).unwrap() },
            look_ahead: Millis::seconds(300),
            scale_up: ScaleUp::default(),
            scale_down: ScaleDown::default(),
            models: BTreeMap::new(),
        }
    }
}

impl Default for ScaleUp {
    /// The HPA's: at once, by 4 replicas or to twice as many.
    fn default() -> Self {
        Self {
            window: Millis(0),
            replicas: 4,
            percent: 100,
        }
    }
}

impl Default for ScaleDown {
    /// The HPA's window. Half of the replicas a minute: each has requests to finish and a KV cache that is warm.
    fn default() -> Self {
        Self {
            window: Millis::seconds(300),
            replicas: 4,
            percent: const { Percent::new(50).unwrap() },
            period: Millis::seconds(60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_name_counts_before_a_pattern_and_a_longer_pattern_before_a_shorter_one() {
        let most = |max_replicas| ModelRules {
            max_replicas: Some(max_replicas),
            ..ModelRules::default()
        };
        let models = [
            ("*", 2),
            ("meta-llama/*", 3),
            ("meta-llama/Llama-3.1-8B", 4),
            ("*-8B", 5),
        ];
        let rules = AutoscalingRules {
            models: models
                .map(|(name, max)| (name.to_owned(), most(max)))
                .into(),
            waiting: 9,
            ..AutoscalingRules::default()
        };
        let of = |name: &str| rules.for_model(&ModelId::parse(name).unwrap());
        assert_eq!(of("meta-llama/Llama-3.1-8B").max_replicas, 4);
        assert_eq!(
            of("hf://meta-llama/llama-3.1-8b").max_replicas,
            4,
            "another name of the same model"
        );
        assert_eq!(of("meta-llama/Other-8B").max_replicas, 3);
        assert_eq!(of("Qwen/Qwen3-8B").max_replicas, 5);
        assert_eq!(
            (
                of("Qwen/Qwen3-32B").max_replicas,
                of("Qwen/Qwen3-32B").waiting
            ),
            (2, 9)
        );
        let named: Vec<_> = rules
            .named_models()
            .map(|model| model.to_string())
            .collect();
        assert_eq!(named, ["meta-llama/Llama-3.1-8B"]);
    }
}
