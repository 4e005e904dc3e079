//! All models: the answer for each, and what is remembered of it.

use super::desired::DesiredReplicas;
use super::load::ModelLoad;
use super::model_state::ModelScaling;
use crate::ids::ModelId;
use crate::policy::AutoscalingRules;
use crate::units::Moment;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Models that are answered for: some kilobytes each. Of more, those with rules by their name and then those with the most
/// replicas.
pub const MAX_MODELS: usize = 2000;

/// The scaling state of every model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Autoscaler {
    models: BTreeMap<ModelId, ModelRecord>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct ModelRecord {
    scaling: ModelScaling,
    /// When it last had a replica.
    #[serde(rename = "seen")]
    last_replica_at: Moment,
}

impl Autoscaler {
    /// How many replicas each model needs now. A model is known by its replicas or by its name in the policy. One that lost its
    /// last replica is answered for until the window of `scaleDown` has passed: all its replicas may be replaced at once.
    pub fn evaluate(
        &mut self,
        rules: &AutoscalingRules,
        mut loads: BTreeMap<ModelId, ModelLoad>,
        now: Moment,
    ) -> BTreeMap<ModelId, DesiredReplicas> {
        let window = rules.scale_down.window;
        self.models.retain(|model, record| {
            loads.contains_key(model) || now.since(record.last_replica_at) <= window
        });
        let named: Vec<ModelId> = rules.named_models().take(MAX_MODELS).collect();
        for model in self.models.keys().chain(&named) {
            loads.entry(model.clone()).or_default();
        }
        if loads.len() > MAX_MODELS {
            keep_largest(&mut loads, &named);
            self.models.retain(|model, _| loads.contains_key(model));
        }
        let decide = |(model, load): (ModelId, ModelLoad)| {
            let record = self.models.entry(model.clone()).or_default();
            if load.has_replicas() {
                record.last_replica_at = now;
            }
            let desired = record.scaling.decide(&rules.for_model(&model), &load, now);
            (model, desired)
        };
        loads.into_iter().map(decide).collect()
    }
}

fn keep_largest(loads: &mut BTreeMap<ModelId, ModelLoad>, named: &[ModelId]) {
    let mut order: Vec<_> = loads
        .iter()
        .map(|(model, load)| {
            (
                Reverse(named.contains(model)),
                Reverse(load.replicas()),
                model.clone(),
            )
        })
        .collect();
    order.sort_unstable();
    order.drain(..MAX_MODELS.min(order.len()));
    for (.., model) in order {
        loads.remove(&model);
    }
}
