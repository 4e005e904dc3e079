//! Sleeping engines that will be needed soon: those of a model whose awake engines are getting full.
//!
//! To take back what a sleeping engine lent takes its borrowers' grace periods and drain times. When the engines that serve its
//! model come near their limits, somebody is about to wake it: so the reclaim begins then. It is a guess, and only the reclaim
//! follows from it: the engine is told that it may wake when it has asked, and not before.
//!
//! A model is under pressure when each of its awake engines is, by the figures that decisions count: smoothed, with their trend.
//! As long as one has room, requests have a place. Pressure begins at one figure and ends at another, and must last before it
//! counts. A recall ends a loan, so that each one within an hour doubles the time until the next loan, however the load jitters.

use super::relief::is_pressed;
use crate::ids::{GpuUuid, ModelId, PodUid};
use crate::ledger::{Ledger, NodeState};
use crate::policy::PressureRules;
use crate::units::Moment;
use crate::vocabulary::engine_model::EngineModelState;
use crate::vocabulary::node_reading::{EngineLoad, Freshness, NodeReading};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which models are under pressure, and since when: the state between two checks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecallWatch {
    pressed: BTreeMap<ModelId, Moment>,
}

/// Sleeping engines that get back what they lent before they ask for it, and those that need not any more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoansRecalled {
    pub begin: Vec<PodUid>,
    pub end: Vec<PodUid>,
}

impl RecallWatch {
    /// The lenders whose recall begins or ends now. The caller is expected to bring that into the ledger.
    pub fn check(&mut self, ledger: &Ledger) -> LoansRecalled {
        let mut recalls = LoansRecalled::default();
        let planning = &ledger.policy().planning;
        let rules = planning
            .pressure
            .as_ref()
            .filter(|_| planning.lending.reclaim_on_load);
        let lenders = || ledger.nodes_with_lenders();
        // By model of a sleeping lender: whether all engines are busy of which it is known.
        let mut models: BTreeMap<&ModelId, Option<bool>> = BTreeMap::new();
        if rules.is_some() {
            for reading in lenders().filter_map(NodeState::believed_reading) {
                models.extend(lent_models(reading).map(|(_, model)| (model, None)));
            }
        }
        if let Some(rules) = rules.filter(|_| !models.is_empty()) {
            self.mark_busy_models(ledger, rules, &mut models);
        }
        let now = ledger.now();
        let busy = models
            .into_iter()
            .filter(|(_, is_busy)| *is_busy == Some(true));
        self.pressed = busy
            .map(|(model, _)| {
                (
                    model.clone(),
                    self.pressed.get(model).copied().unwrap_or(now),
                )
            })
            .collect();
        for node in lenders() {
            // Unknown load neither begins nor ends a recall.
            let Some(reading) = node.believed_reading() else {
                continue;
            };
            for (uid, is_recalled) in node.sleeping_lenders() {
                let since = lent_models(reading).filter(|(pod, _)| *pod == uid);
                let since = since.filter_map(|(_, model)| self.pressed.get(model)).min();
                match (since, rules) {
                    (Some(since), Some(rules))
                        if !is_recalled && *since + rules.evict_after <= now =>
                    {
                        recalls.begin.push(uid.clone());
                    }
                    (None, _) if is_recalled => recalls.end.push(uid.clone()),
                    _ => {}
                }
            }
        }
        recalls
    }

    /// Marks which of these models are busy, by the engines that serve them: of pods on their agent's node, and of namespaces that may
    /// serve the model. Unknown load is neither pressure nor free capacity.
    fn mark_busy_models(
        &self,
        ledger: &Ledger,
        rules: &PressureRules,
        models: &mut BTreeMap<&ModelId, Option<bool>>,
    ) {
        for node in ledger
            .all_node_states()
            .filter(|node| node.view().freshness == Freshness::Fresh)
        {
            let Some(reading) = node.believed_reading() else {
                continue;
            };
            for engine in reading
                .engines
                .iter()
                .filter(|engine| engine.state == EngineModelState::Resident)
            {
                let Some(all_busy) = models.get_mut(&engine.model) else {
                    continue;
                };
                let pod = ledger
                    .pod_state(&engine.pod)
                    .filter(|_| node.has_resident(&engine.pod));
                let counts = ledger.policy().autoscaling.replica_filter(&engine.model);
                if !pod.is_some_and(|pod| counts(Some(&pod.key.namespace))) {
                    continue;
                }
                let Some(load) = load_of(node, &engine.gpus) else {
                    continue;
                };
                let is_busy = is_pressed(load, rules, self.pressed.contains_key(&engine.model));
                *all_busy = Some(all_busy.unwrap_or(true) && is_busy);
            }
        }
    }
}

impl LoansRecalled {
    pub fn is_empty(&self) -> bool {
        self.begin.is_empty() && self.end.is_empty()
    }
}

/// The models that sleep on a node, each with its pod.
fn lent_models(reading: &NodeReading) -> impl Iterator<Item = (&PodUid, &ModelId)> {
    let asleep = reading.engines.iter();
    let asleep = asleep.filter(|engine| matches!(engine.state, EngineModelState::Asleep(_)));
    asleep.map(|engine| (&engine.pod, &engine.model))
}

/// How busy the engines on these GPUs are as decisions count it; `None` if that is unknown. Engines that share a GPU share its
/// figure.
fn load_of(node: &NodeState, gpus: &[GpuUuid]) -> Option<EngineLoad> {
    let view = node.view();
    let index_of = |uuid: &GpuUuid| view.devices.iter().position(|device| device.uuid == *uuid);
    let loads = gpus
        .iter()
        .map(|uuid| Some(view.gpus.get(index_of(uuid)?)?.engine_load));
    let load = loads
        .collect::<Option<Vec<_>>>()?
        .into_iter()
        .reduce(EngineLoad::combined_with)?;
    (load.occupancy().is_some() || load.queue.is_some()).then_some(load)
}
