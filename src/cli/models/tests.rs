//! The whole output of `stowage models`: a golden file for each situation. `STOWAGE_BLESS=1` writes them again; read what changed
//! before you commit it.

use super::table;
use crate::cli::output::Columns;
use std::path::PathBuf;
use stowage_scheduling::explaining::models::{PageRequest, list_models, locate};
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::{LedgerCluster, demand_of, gpu_at, node, uid};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::observe::ReadingReported;
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use stowage_scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use stowage_scheduling::vocabulary::model_tier::{ModelTier, NodeModel};
use stowage_scheduling::vocabulary::node_reading::NodeReading;

const LLAMA: &str = "meta-llama/Llama-3.1-8B";
const QWEN: &str = "Qwen/Qwen3-32B";

fn model(name: &str) -> ModelId {
    ModelId::parse(name).unwrap()
}

fn check(golden: &str, text: &str) {
    let path = PathBuf::from(env!("CARGO_WORKSPACE_DIR"))
        .join(format!("tests/golden/models/{golden}.txt"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, committed, "{golden}: STOWAGE_BLESS=1 writes it again");
}

fn engine(pod: &str, name: &str, on: (&str, u32), state: EngineModelState) -> EngineReading {
    EngineReading {
        pod: uid(pod),
        model: model(name),
        gpus: [gpu_at(on.0, on.1)].into(),
        state,
        reusable_in: (pod == "launcher").then(|| "default".into()),
        observed_at: stowage_scheduling::testkit::START,
    }
}

fn read(
    cluster: &mut LedgerCluster,
    on: &str,
    engines: Vec<EngineReading>,
    files: &[(&str, ModelTier, u64)],
) {
    let file = |(name, tier, gib): &(&str, ModelTier, u64)| NodeModel {
        model: model(name),
        tier: *tier,
        bytes: Bytes::gib(*gib),
    };
    let sampled = cluster.ledger().now();
    let holdings = files.iter().map(file).collect();
    let reading = NodeReading {
        sampled,
        holdings,
        engines,
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node(on),
        reading: reading.into(),
    });
}

/// Five nodes, of which the last does not report.
fn cluster() -> LedgerCluster {
    let nodes = [
        ("node-a", 2),
        ("node-b", 2),
        ("node-c", 2),
        ("node-d", 2),
        ("node-e", 2),
    ];
    let mut cluster = LedgerCluster::with_policy_and_nodes(Policy::default(), &nodes);
    let demand = demand_of(40 << 30, 1, Sharing::Shared, 0);
    for (pod, gpu) in [("llama-0", ("node-a", 0)), ("llama-1", ("node-a", 1))] {
        let ran = Some(Millis::seconds(4));
        cluster.add_running(
            pod,
            gpu,
            demand.clone(),
            ran,
            ObservedDisruptionInfo::default(),
        );
    }
    let (awake, loading) = (EngineModelState::Resident, EngineModelState::Loading);
    let [shallow, deep] =
        [SleepLevel::WeightsOffloaded, SleepLevel::WeightsDiscarded].map(EngineModelState::Asleep);
    let engines = vec![
        engine("llama-0", LLAMA, ("node-a", 0), awake),
        engine("llama-1", LLAMA, ("node-a", 1), loading),
    ];
    read(
        &mut cluster,
        "node-a",
        engines,
        &[(LLAMA, ModelTier::Resident, 15)],
    );
    let engines = vec![
        engine("deep", LLAMA, ("node-b", 0), deep),
        engine("launcher", LLAMA, ("node-b", 1), shallow),
    ];
    read(
        &mut cluster,
        "node-b",
        engines,
        &[
            (LLAMA, ModelTier::Sleeping, 15),
            (QWEN, ModelTier::Partial, 7),
        ],
    );
    read(
        &mut cluster,
        "node-c",
        Vec::new(),
        &[(LLAMA, ModelTier::PageCache, 15)],
    );
    read(
        &mut cluster,
        "node-d",
        Vec::new(),
        &[(LLAMA, ModelTier::Disk, 15)],
    );
    cluster.advance(1);
    cluster
}

#[test]
fn a_models_places_are_listed_with_the_time_until_each_answers() {
    let cluster = cluster();
    let all = PageRequest {
        limit: 100,
        after: None,
    };
    check(
        "one-model",
        &table::model_table(
            &locate(cluster.ledger(), &model(LLAMA), &all),
            Columns(None),
        ),
    );
    let few = PageRequest {
        limit: 3,
        after: None,
    };
    check(
        "one-page",
        &table::model_table(
            &locate(cluster.ledger(), &model(LLAMA), &few),
            Columns(None),
        ),
    );
    check(
        "nowhere",
        &table::model_table(
            &locate(cluster.ledger(), &model("org/unheard-of"), &all),
            Columns(None),
        ),
    );
}

#[test]
fn all_models_are_listed_with_their_counts() {
    let cluster = cluster();
    check(
        "all-models",
        &table::models_table(
            &list_models(
                cluster.ledger(),
                &PageRequest {
                    limit: 100,
                    after: None,
                },
            ),
            Columns(None),
        ),
    );
    let first = list_models(
        cluster.ledger(),
        &PageRequest {
            limit: 1,
            after: None,
        },
    );
    let next = first.next.clone();
    assert_eq!((first.models.len(), next.clone()), (1, Some(model(LLAMA))));
    let second = list_models(
        cluster.ledger(),
        &PageRequest {
            limit: 1,
            after: next,
        },
    );
    assert_eq!(
        (second.models[0].model.clone(), second.next),
        (model(QWEN), None)
    );
}
