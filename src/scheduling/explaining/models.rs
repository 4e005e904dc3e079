//! Where models are: on which GPUs of which nodes they are loaded or asleep, where their files are, and how long until a pod of
//! each answers. For routers, autoscalers and people, and never for a decision.
//!
//! Times are those by which nodes are ranked: the policy's speeds, corrected by what was learned of engines that started before.
//! They are the times of the engine that the pod runs or, for a new pod, of the engine that the existing pods of the model run.
//! Image pulls are not included, because the images of a new pod are unknown.
//!
//! It reads a copy of the ledger, so no request waits for it, and returns one page at a time, so an answer does not grow with the
//! cluster. A node without a recent report counts as unknown.

use crate::engines::Engine;
use crate::ids::{GpuUuid, ModelId, NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, PodPhase, PodState};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::vocabulary::model_tier::{ModelTier, NodeModel, engine_start_time, time_to_wake};
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::NodeReading;
use crate::vocabulary::start_time::StartTime;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The requested page of a list: at most `limit` entries after the key `after`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRequest<K> {
    pub limit: usize,
    pub after: Option<K>,
}

/// One model, everywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelLocations {
    pub model: ModelId,
    /// What its weights take; `None` if no node knows.
    pub weights_bytes: Option<Bytes>,
    /// Over all nodes, not only those of this page.
    pub counts: ModelCounts,
    /// Until a new pod would answer on a node that has nothing of it, where that is soonest; `None` if it is unknown what its
    /// weights take.
    pub absent_ready_in_millis: Option<Millis>,
    /// In order of node.
    #[serde(rename = "places")]
    pub locations: Vec<ModelLocation>,
    /// The node after which the next page begins; `None` if this is the last.
    pub next: Option<NodeName>,
}

/// All models, in order of name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelList {
    pub models: Vec<ModelSummary>,
    /// The model after which the next page begins; `None` if this is the last.
    pub next: Option<ModelId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelSummary {
    pub model: ModelId,
    pub counts: ModelCounts,
}

/// In how many places a model is in which state: of engines each counts, of files each node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelCounts {
    pub resident: u32,
    pub asleep: u32,
    pub loading: u32,
    pub page_cache: u32,
    pub disk: u32,
    pub partial: u32,
    /// Nodes that have nothing of it.
    pub absent: u32,
    /// Nodes whose agent has not reported recently.
    pub unknown: u32,
}

/// The state of a model in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelLocationState {
    Resident,
    Asleep,
    Loading,
    PageCache,
    Disk,
    /// Some of its files are on disk.
    Partial,
}

/// An engine with the model, or a node with its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelLocation {
    pub node: NodeName,
    pub state: ModelLocationState,
    /// The engine's GPUs; empty for files, or if it is unknown where the engine runs.
    pub gpus: Vec<GpuUuid>,
    /// The engine's pod.
    pub pod: Option<PodKey>,
    /// It is known even where the pod's name is not, because the pod asks for no GPU.
    pub pod_uid: Option<PodUid>,
    /// While it is asleep: 1 keeps the weights in host memory, 2 drops them.
    pub sleep_level: Option<u8>,
    /// While it is asleep: the namespace whose new pods may wake it, if any may.
    pub reusable_in: Option<Arc<str>>,
    /// Until it answers: after a wake if it is asleep, after the start of a new pod where only files are. `None` if it is unknown
    /// what its weights take.
    pub ready_in_millis: Option<Millis>,
    /// The age of what was measured here.
    pub age_millis: Millis,
    /// While it is asleep: whether it may wake at once. If not, it lends VRAM or may lend it, and has to ask first. `None` if its
    /// pod is unknown.
    pub wakeable: Option<bool>,
}

/// Where one model is.
pub fn locate(
    ledger: &Ledger,
    model: &ModelId,
    page_request: &PageRequest<NodeName>,
) -> ModelLocations {
    let heaviest = ledger.all_node_states().filter_map(|node_state| {
        Some(node_state.believed_reading()?.holdings.get(model)?.bytes)
            .filter(|bytes| *bytes > Bytes::ZERO)
    });
    let weights = heaviest.max();
    let usual = usual_engine(ledger, model);
    let mut absent: Option<Millis> = None;
    let mut located = ModelLocations {
        model: model.clone(),
        weights_bytes: weights,
        counts: ModelCounts::default(),
        absent_ready_in_millis: None,
        locations: Vec::new(),
        next: None,
    };
    let nodes = ledger
        .all_node_states()
        .filter(|node_state| node_state.exists());
    for node_state in nodes {
        let node: &Node = node_state.view();
        let name = &node.name;
        let Some(reading) = node_state.believed_reading() else {
            located.counts.unknown += 1;
            continue;
        };
        let reported = ReportedModels {
            ledger,
            node,
            reading,
            weights,
            usual_engine: usual,
        };
        let locations = reported.locations(model);
        if let Some(weights) = weights.filter(|_| locations.is_empty()) {
            let here = reported.start_time(None, weights, usual).total();
            absent = Some(absent.map_or(here, |soonest| soonest.min(here)));
        }
        located.counts.add_node(&locations);
        if page_request.after.as_ref().is_none_or(|after| after < name) && !locations.is_empty() {
            if located.locations.len() < page_request.limit {
                located.locations.extend(locations);
            } else if located.next.is_none() {
                located.next = located.locations.last().map(|last| last.node.clone());
            }
        }
    }
    let by_policy = |weights| engine_start_time(None, weights, &ledger.policy().loading).total();
    located.absent_ready_in_millis = absent.or(weights.map(by_policy));
    located
}

/// What a new pod of the model would run: what most of its pods run, or, if it has none, most pods; `None` if no pod runs any.
fn usual_engine(ledger: &Ledger, model: &ModelId) -> Option<Engine> {
    let mut counts = Engine::ALL.map(|engine| (0_usize, 0_usize, engine));
    let readings = ledger
        .all_node_states()
        .filter_map(|node_state| node_state.believed_reading());
    for engine_reading in readings.flat_map(|reading| &reading.engines) {
        let Some(pod_state) = ledger.pod_state(&engine_reading.pod) else {
            continue;
        };
        if let Some((own, all, _)) = counts
            .iter_mut()
            .find(|(.., kind)| *kind == pod_state.demand.engine)
        {
            *own += usize::from(engine_reading.model == *model);
            *all += 1;
        }
    }
    let most = counts
        .into_iter()
        .max_by_key(|(own, all, engine)| (*own, *all, std::cmp::Reverse(*engine)));
    most.filter(|(_, all, _)| *all > 0)
        .map(|(.., engine)| engine)
}

/// Lists all models and in how many places each is. Never more than one list page of them is kept, whatever agents report.
pub fn list_models(ledger: &Ledger, page_request: &PageRequest<ModelId>) -> ModelList {
    let mut counts_by_model: BTreeMap<&ModelId, ModelCounts> = BTreeMap::new();
    let mut is_more = false;
    let nodes: Vec<_> = ledger
        .all_node_states()
        .filter(|node_state| node_state.exists())
        .collect();
    for reading in nodes
        .iter()
        .filter_map(|node_state| node_state.believed_reading())
    {
        let here = reading.engines.iter().map(|engine| &engine.model);
        for model in here.chain(reading.holdings.iter().map(|holding| &holding.model)) {
            if page_request
                .after
                .as_ref()
                .is_none_or(|after| after < model)
            {
                counts_by_model.entry(model).or_default();
            }
        }
        // Of those that come after the page, none can be in it: only smaller names come.
        while counts_by_model.len() > page_request.limit {
            counts_by_model.pop_last();
            is_more = true;
        }
    }
    let (mut reported, mut unknown) = (0, 0);
    // Until the last node is counted, `absent` is the number of nodes that have something.
    for node_state in nodes {
        let Some(reading) = node_state.believed_reading() else {
            unknown += 1;
            continue;
        };
        reported += 1;
        for (model, states) in states_by_model(reading) {
            if let Some(counts) = counts_by_model.get_mut(model) {
                counts.absent += 1;
                states
                    .into_iter()
                    .for_each(|state| *counts.count_mut(state) += 1);
            }
        }
    }
    for counts in counts_by_model.values_mut() {
        (counts.absent, counts.unknown) = (reported - counts.absent, unknown);
    }
    let next = counts_by_model
        .last_key_value()
        .map(|(model, _)| (*model).clone())
        .filter(|_| is_more);
    let models = counts_by_model
        .into_iter()
        .map(|(model, counts)| ModelSummary {
            model: model.clone(),
            counts,
        });
    ModelList {
        models: models.collect(),
        next,
    }
}

/// The states of each model on one node.
fn states_by_model(reading: &NodeReading) -> BTreeMap<&ModelId, Vec<ModelLocationState>> {
    let mut states: BTreeMap<&ModelId, Vec<ModelLocationState>> = BTreeMap::new();
    for engine in &reading.engines {
        states
            .entry(&engine.model)
            .or_default()
            .push(engine.state.into());
    }
    for holding in reading.holdings.iter() {
        let here = states.entry(&holding.model).or_default();
        // Of a model that an engine has, the engine says all.
        if here.is_empty() {
            here.push(holding.tier.into());
        }
    }
    states
}

/// When a bound pod started to run; `None` if it is not bound.
fn running_since(pod_state: &PodState) -> Option<Moment> {
    match &pod_state.phase {
        PodPhase::Bound(bound) => Some(bound.started),
        PodPhase::Waiting(_) | PodPhase::Assumed(_) => None,
    }
}

/// What a node's agent reports of models.
struct ReportedModels<'a> {
    ledger: &'a Ledger,
    node: &'a Node,
    reading: &'a NodeReading,
    weights: Option<Bytes>,
    /// The engine that a new pod would run.
    usual_engine: Option<Engine>,
}

impl ReportedModels<'_> {
    fn locations(&self, model: &ModelId) -> Vec<ModelLocation> {
        let holding = self.reading.holdings.get(model);
        let engines = self
            .reading
            .engines
            .iter()
            .filter(|engine| engine.model == *model);
        let mut locations: Vec<ModelLocation> = engines
            .map(|engine| self.engine_location(engine, holding))
            .collect();
        if locations.is_empty() {
            locations.extend(holding.map(|holding| self.file_location(holding)));
        }
        locations
    }

    /// The time an engine takes to start here; by the policy's speeds alone, if it is unknown which engine.
    fn start_time(
        &self,
        holding: Option<&NodeModel>,
        weights: Bytes,
        engine: Option<Engine>,
    ) -> StartTime {
        let speeds = &self.ledger.policy().loading;
        match engine {
            Some(engine) => self
                .ledger
                .start_model()
                .engine_start(self.node, engine, holding, weights, speeds),
            None => engine_start_time(holding, weights, speeds),
        }
    }

    /// The time until an engine answers that is loading now.
    fn time_until_loaded(
        &self,
        pod_state: Option<&PodState>,
        holding: Option<&NodeModel>,
        weights: Bytes,
    ) -> Millis {
        let now = self.ledger.now();
        let left =
            |whole: Millis, since: Moment| Millis(whole.0.saturating_sub(now.since(since).0));
        if let Some(start) = pod_state.and_then(|pod_state| pod_state.start.as_deref()) {
            return left(start.expected.total(), start.since);
        }
        // Its own reading has brought the files into the page cache.
        let from_disk = holding.map(|holding| NodeModel {
            tier: holding.tier.min(ModelTier::Disk),
            ..holding.clone()
        });
        let engine = pod_state
            .map(|pod_state| pod_state.demand.engine)
            .or(self.usual_engine);
        let whole = self.start_time(from_disk.as_ref(), weights, engine).total();
        left(whole, pod_state.and_then(running_since).unwrap_or(now))
    }

    /// The time until a sleeping engine answers if it is woken now.
    fn time_until_awake(
        &self,
        level: SleepLevel,
        pod_state: Option<&PodState>,
        holding: Option<&NodeModel>,
        weights: Bytes,
    ) -> Millis {
        let speeds = &self.ledger.policy().loading;
        match level {
            SleepLevel::WeightsOffloaded => time_to_wake(level, holding, weights, speeds),
            // As long as engines have taken to read them.
            SleepLevel::WeightsDiscarded => {
                let engine = pod_state
                    .map(|pod_state| pod_state.demand.engine)
                    .or(self.usual_engine);
                self.start_time(holding, weights, engine).transfer() + speeds.wake_init
            }
        }
    }

    fn engine_location(
        &self,
        engine: &EngineReading,
        holding: Option<&NodeModel>,
    ) -> ModelLocation {
        let pod_state = self.ledger.pod_state(&engine.pod);
        let level = match engine.state {
            EngineModelState::Asleep(level) => Some(level),
            _ => None,
        };
        let namespace_if_reusable = || {
            let pod_state = pod_state?;
            let is_open = self.ledger.policy().class(pod_state.demand.class).reusable;
            is_open.then(|| pod_state.key.namespace.clone())
        };
        let ready = |weights| match engine.state {
            EngineModelState::Resident => Millis::default(),
            EngineModelState::Asleep(level) => {
                self.time_until_awake(level, pod_state, holding, weights)
            }
            EngineModelState::Loading => self.time_until_loaded(pod_state, holding, weights),
        };
        ModelLocation {
            node: self.node.name.clone(),
            state: engine.state.into(),
            gpus: engine.gpus.to_vec(),
            pod: pod_state.map(|pod_state| pod_state.key.clone()),
            pod_uid: Some(engine.pod.clone()),
            sleep_level: level.map(|level| level.number()),
            reusable_in: level
                .and_then(|_| engine.reusable_in.clone().or_else(namespace_if_reusable)),
            ready_in_millis: match engine.state {
                EngineModelState::Resident => Some(Millis::default()),
                _ => self.weights.map(ready),
            },
            age_millis: self.ledger.now().since(engine.observed_at),
            wakeable: level.and_then(|_| self.ledger.may_wake(&engine.pod)),
        }
    }

    fn file_location(&self, holding: &NodeModel) -> ModelLocation {
        ModelLocation {
            node: self.node.name.clone(),
            state: holding.tier.into(),
            gpus: Vec::new(),
            pod: None,
            pod_uid: None,
            sleep_level: None,
            reusable_in: None,
            ready_in_millis: self.weights.map(|weights| {
                self.start_time(Some(holding), weights, self.usual_engine)
                    .total()
            }),
            age_millis: self.ledger.now().since(self.reading.sampled),
            wakeable: None,
        }
    }
}

impl ModelCounts {
    /// Counts the locations on one node.
    fn add_node(&mut self, locations: &[ModelLocation]) {
        locations
            .iter()
            .for_each(|location| *self.count_mut(location.state) += 1);
        self.absent += u32::from(locations.is_empty());
    }

    fn count_mut(&mut self, state: ModelLocationState) -> &mut u32 {
        match state {
            ModelLocationState::Resident => &mut self.resident,
            ModelLocationState::Asleep => &mut self.asleep,
            ModelLocationState::Loading => &mut self.loading,
            ModelLocationState::PageCache => &mut self.page_cache,
            ModelLocationState::Disk => &mut self.disk,
            ModelLocationState::Partial => &mut self.partial,
        }
    }

    /// Each state with its number of places, the soonest to answer first.
    pub fn by_state(&self) -> [(ModelLocationState, u32); 6] {
        [
            (ModelLocationState::Resident, self.resident),
            (ModelLocationState::Asleep, self.asleep),
            (ModelLocationState::Loading, self.loading),
            (ModelLocationState::PageCache, self.page_cache),
            (ModelLocationState::Disk, self.disk),
            (ModelLocationState::Partial, self.partial),
        ]
    }

    /// Whether any node has anything of it.
    pub fn is_anywhere(&self) -> bool {
        self.by_state().iter().any(|(_, count)| *count > 0)
    }
}

impl From<EngineModelState> for ModelLocationState {
    fn from(state: EngineModelState) -> Self {
        match state {
            EngineModelState::Loading => Self::Loading,
            EngineModelState::Resident => Self::Resident,
            EngineModelState::Asleep(_) => Self::Asleep,
        }
    }
}

impl From<ModelTier> for ModelLocationState {
    /// An engine that the agent names no GPUs of shows in the node's tier only.
    fn from(tier: ModelTier) -> Self {
        match tier {
            ModelTier::Partial => Self::Partial,
            ModelTier::Disk => Self::Disk,
            ModelTier::PageCache => Self::PageCache,
            ModelTier::Sleeping => Self::Asleep,
            ModelTier::Loading => Self::Loading,
            ModelTier::Resident => Self::Resident,
        }
    }
}

#[cfg(test)]
mod tests;
