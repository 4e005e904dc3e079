//! The replicas of every model: what agents report of its engines, beside the pods that the ledger knows.
//!
//! A pod that asks for a model and of which no engine is reported starts, until it has taken twice as long as expected; then it
//! is a replica whose load is unknown. A pod of a group, such as one of a LeaderWorkerSet, is no replica of its own if an engine
//! of another pod of the group is reported; a group without any is one replica.

use super::load::{EngineFigures, EngineSample, ModelLoad};
use crate::engines::Engine;
use crate::ids::{GpuModel, ModelId, PodUid};
use crate::ledger::{Ledger, PodPhase, PodState};
use crate::placing::start_model::StartModel;
use crate::units::{Bytes, Millis};
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::engine_model::SleepLevel;
use crate::vocabulary::model_tier::{ModelTier, NodeModel, time_to_wake};
use crate::vocabulary::node::NodeKind;
use std::collections::{BTreeMap, BTreeSet};

/// A start that takes longer than this multiple of the expected time has failed, or is over and nothing reports its engine.
const START_TIME_LIMIT_FACTOR: u64 = 2;

/// One replica of a model.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Replica<'a> {
    Group(&'a GroupKey),
    Pod(&'a PodUid),
}

type Replicas<'a> = BTreeMap<Replica<'a>, ReplicaState<'a>>;

/// The figures of a replica's engines, and its pod; `None` for a group, and for a pod that is not in the ledger.
struct ReplicaState<'a> {
    figures: EngineFigures,
    pod: Option<&'a PodState>,
}

/// The load of every model of which there is a replica. `engines` are all that agents report.
pub fn loads(ledger: &Ledger, engines: &[EngineSample]) -> BTreeMap<ModelId, ModelLoad> {
    let files = best_holdings(ledger);
    let names = model_names(ledger, engines, &files);
    let named = |model| {
        let model: &ModelId = ModelId::resolve_among(model, names.iter().copied());
        names.get(model).copied().unwrap_or(model)
    };
    let mut models: BTreeMap<&ModelId, Replicas<'_>> = BTreeMap::new();
    // Groups of which an engine is reported.
    let mut reported_groups: BTreeSet<&GroupKey> = BTreeSet::new();
    for engine in engines {
        let pod_state = ledger.pod_state(&engine.pod);
        if is_believed(ledger, engine, pod_state) {
            // Several engines of one pod are one replica.
            let replicas = models.entry(named(&engine.model)).or_default();
            add_engine(
                replicas,
                Replica::Pod(&engine.pod),
                engine.figures,
                pod_state,
            );
            reported_groups.extend(pod_state.and_then(group));
        }
    }
    // Which of two comes first makes no difference: what they do together is a sum.
    for (uid, pod_state) in ledger.pods_in_no_order() {
        let Some(model) = pod_state
            .demand
            .model
            .as_ref()
            .filter(|_| is_replica(ledger, pod_state))
        else {
            continue;
        };
        let replicas = models.entry(named(model)).or_default();
        let (replica, pod) = match group(pod_state) {
            _ if replicas.contains_key(&Replica::Pod(uid)) => continue,
            Some(group) if reported_groups.contains(group) => continue,
            Some(group) => (Replica::Group(group), None),
            None => (Replica::Pod(uid), Some(pod_state)),
        };
        add_engine(
            replicas,
            replica,
            figures_without_engine(ledger, pod_state),
            pod,
        );
    }
    let rules = &ledger.policy().autoscaling;
    let load = |(model, mut replicas): (&ModelId, Replicas<'_>)| {
        let counts = rules.replica_filter(model);
        replicas.retain(|replica, state| counts(namespace(replica, state)));
        let mut load = ModelLoad::default();
        replicas.values().for_each(|state| load.add(state.figures));
        load.ready_in = time_to_ready(ledger, files.get(model), &replicas, load.asleep > 0);
        (model.clone(), load)
    };
    models
        .into_iter()
        .map(load)
        .filter(|(_, load)| load.has_replicas())
        .collect()
}

/// Every model once, whatever its names: of these the first in order.
fn model_names<'a>(
    ledger: &'a Ledger,
    engines: &'a [EngineSample],
    files: &BTreeMap<&'a ModelId, NodeModel>,
) -> BTreeSet<&'a ModelId> {
    let of_pods = ledger
        .pods_in_no_order()
        .filter_map(|(_, pod_state)| pod_state.demand.model.as_ref());
    let of_engines = engines.iter().map(|engine| &engine.model);
    let mut names: Vec<&ModelId> = files
        .keys()
        .copied()
        .chain(of_engines)
        .chain(of_pods)
        .collect();
    names.sort_by_key(|model| (*model, model.as_str()));
    names.dedup();
    names.into_iter().collect()
}

fn add_engine<'a>(
    replicas: &mut Replicas<'a>,
    replica: Replica<'a>,
    figures: EngineFigures,
    pod: Option<&'a PodState>,
) {
    replicas
        .entry(replica)
        .and_modify(|state| state.figures = state.figures.merged_with(figures))
        .or_insert(ReplicaState { figures, pod });
}

/// Whether the engine counts: an agent is believed about pods of its own node only, and what it said last of a pod ends with the
/// pod. Pods that take their GPUs by ResourceClaims are not in the ledger: such an engine counts while its agent is heard.
fn is_believed(ledger: &Ledger, engine: &EngineSample, pod_state: Option<&PodState>) -> bool {
    match pod_state {
        Some(pod_state) => pod_state.node() == Some(&engine.node) && !is_leaving(pod_state),
        None => {
            let is_dra = ledger
                .node(&engine.node)
                .is_some_and(|node| node.kind == NodeKind::Dra);
            is_dra && engine.is_report_fresh
        }
    }
}

fn group(pod_state: &PodState) -> Option<&GroupKey> {
    pod_state.disruption_info.group.as_ref()
}

/// A pod that takes its GPUs by ResourceClaims is not in the ledger, and its agent reports no namespace.
fn namespace<'a>(replica: &Replica<'a>, state: &ReplicaState<'a>) -> Option<&'a str> {
    match replica {
        Replica::Group(group) => Some(&group.namespace),
        Replica::Pod(_) => state.pod.map(|pod_state| &*pod_state.key.namespace),
    }
}

/// Whether a pod of a model is one of its replicas: a batch job names a model, too, to start where its files are.
fn is_replica(ledger: &Ledger, pod_state: &PodState) -> bool {
    ledger.policy().class(pod_state.demand.class).engine && !is_leaving(pod_state)
}

fn is_leaving(pod_state: &PodState) -> bool {
    matches!(&pod_state.phase, PodPhase::Bound(bound) if bound.leaving.is_some())
}

/// The figures of a replica of whose engine nothing is reported.
fn figures_without_engine(ledger: &Ledger, pod_state: &PodState) -> EngineFigures {
    let PodPhase::Bound(bound) = &pod_state.phase else {
        return EngineFigures::Starting;
    };
    let expected = pod_state
        .start
        .as_deref()
        .map(|start| (start.since, start.expected.total(), start.took));
    let (since, expected) = match expected {
        Some((.., Some(_))) => return EngineFigures::Silent,
        Some((since, expected, None)) => (since, expected),
        // It was bound before this process began.
        None => (bound.started, ledger.policy().loading.init),
    };
    match ledger.now().since(since).0 <= expected.0.saturating_mul(START_TIME_LIMIT_FACTOR) {
        true => EngineFigures::Starting,
        false => EngineFigures::Silent,
    }
}

/// The best tier that each model's files are in, and their size.
fn best_holdings(ledger: &Ledger) -> BTreeMap<&ModelId, NodeModel> {
    let mut best: BTreeMap<&ModelId, NodeModel> = BTreeMap::new();
    let readings = ledger
        .all_node_states()
        .filter(|node_state| node_state.exists());
    for holding in readings
        .filter_map(|node_state| node_state.believed_reading())
        .flat_map(|reading| reading.holdings.iter())
    {
        // What is in memory somewhere is on a disk elsewhere at best.
        let tier = holding.tier.min(ModelTier::Disk);
        let best_known = best.entry(&holding.model).or_insert_with(|| NodeModel {
            tier,
            ..holding.clone()
        });
        (best_known.tier, best_known.bytes) = (
            best_known.tier.max(tier),
            best_known.bytes.max(holding.bytes),
        );
    }
    best
}

/// How long until one more replica would answer: one that sleeps and is woken, or one that starts where the files are.
fn time_to_ready(
    ledger: &Ledger,
    files: Option<&NodeModel>,
    replicas: &Replicas<'_>,
    is_asleep: bool,
) -> Millis {
    let speeds = &ledger.policy().loading;
    let weights = files.map_or(Bytes::ZERO, |files| files.bytes);
    if is_asleep {
        return time_to_wake(SleepLevel::WeightsOffloaded, files, weights, speeds);
    }
    let pods = replicas.values().filter_map(|state| state.pod);
    let pod_state = pods.min_by_key(|pod_state| pod_state.demand.engine);
    let engine = pod_state.map_or(Engine::Other, |pod_state| pod_state.demand.engine);
    let gpu = pod_state
        .and_then(PodState::node)
        .and_then(|node| gpu_model_on(ledger, node));
    let start_model: &StartModel = ledger.start_model();
    start_model
        .cluster_engine_start(gpu, engine, files, weights, speeds)
        .total()
}

fn gpu_model_on<'a>(ledger: &'a Ledger, node: &crate::ids::NodeName) -> Option<&'a GpuModel> {
    ledger
        .node(node)?
        .devices
        .first()
        .map(|device| &device.model)
}
