//! Same-GPU affinity against the definition: never without room, and nothing without an engine that may be woken.

use super::choices::{gpu, has_free_vram_by_definition, node};
use super::demand;
use crate::ids::ModelId;
use crate::placing::fit::fit_by;
use crate::placing::pack;
use crate::placing::pack::NodeEvaluation;
use crate::placing::rank::{estimate_start, score_node};
use crate::placing::snapshot::Snapshot;
use crate::placing::start_model::StartModel;
use crate::policy::Policy;
use crate::units::Bytes;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::engine_model::{ReusableEngine, ReusableEngineSet, SleepLevel};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::model_tier::{LoadingSpeeds, ModelTier, NodeModel};
use crate::vocabulary::node::Node;
use proptest::prelude::*;

fn model(name: &str) -> ModelId {
    ModelId::parse(name).unwrap()
}

/// Engines of two models in two namespaces, on any GPUs.
fn engine() -> impl Strategy<Value = ReusableEngine> {
    let level = prop_oneof![
        Just(SleepLevel::WeightsOffloaded),
        Just(SleepLevel::WeightsDiscarded)
    ];
    (
        0u8..3,
        0u8..4,
        prop::collection::vec(0usize..8, 1..4),
        level,
    )
        .prop_map(|(of_model, namespace, gpus, level)| ReusableEngine {
            model: model(if of_model > 0 { "own" } else { "other" }),
            namespace: if namespace > 0 {
                "default".into()
            } else {
                "elsewhere".into()
            },
            gpus: gpus.into_iter().collect(),
            level,
        })
}

fn own_demand() -> impl Strategy<Value = Demand> {
    demand().prop_map(|demand| {
        let mut traits = (*demand.traits).clone();
        traits.namespace = "default".into();
        Demand {
            model: Some(model("own")),
            traits: traits.into(),
            ..demand
        }
    })
}

proptest! {
    #[test]
    fn a_pod_goes_where_an_engine_sleeps_only_if_there_is_room(
        gpus in prop::collection::vec(gpu(), 8), engines in prop::collection::vec(engine(), 0..5), demand in own_demand()
    ) {
        let reusable: ReusableEngineSet = engines.clone().into();
        let evaluation = NodeEvaluation::by_best_fit(&gpus, &demand);
        let packed = pack::choose_by_cost(&evaluation, GpuSet::ALL);
        let chosen = pack::choose(&evaluation, &reusable, GpuSet::ALL);
        prop_assert_eq!(chosen.is_some(), packed.is_some(), "an engine that sleeps neither admits nor refuses a pod");
        let Some(chosen) = chosen else { return Ok(()) };
        prop_assert_eq!(chosen.gpus.len(), demand.gpus);
        prop_assert!(chosen.gpus.iter().all(|place| has_free_vram_by_definition(&gpus[place], &demand)));
        let is_open = |engine: &&ReusableEngine| {
            let is_own = engine.model.as_str() == "own" && &*engine.namespace == "default";
            is_own
                && engine.gpus.len() == demand.gpus
                && engine.gpus.iter().all(|place| has_free_vram_by_definition(&gpus[place], &demand))
        };
        let open: Vec<&ReusableEngine> = engines.iter().filter(is_open).collect();
        let is_contended = |set: GpuSet| set.iter().any(|place| pack::is_contended(&gpus[place], &demand));
        let best = open.iter().filter(|engine| !is_contended(engine.gpus)).map(|engine| engine.level).min();
        match best {
            Some(level) => prop_assert!(
                open.iter().any(|engine| engine.gpus == chosen.gpus && engine.level == level),
                "{:?} is none of {:?}", chosen.gpus, open
            ),
            // Only GPUs that another pod was just offered have such an engine, if any have.
            None => {
                let packed = packed.unwrap();
                prop_assert!(chosen == packed || packed.contended && open.iter().any(|engine| engine.gpus == chosen.gpus));
            }
        }
    }

    #[test]
    fn without_an_engine_for_it_a_pod_is_placed_scored_and_priced_as_before(
        gpus in prop::collection::vec(gpu(), 1..8), engines in prop::collection::vec(engine(), 0..5),
        demand in own_demand(), gib in 0u64..200
    ) {
        let foreign: Vec<ReusableEngine> =
            engines.into_iter().filter(|engine| !engine.is_usable_by(&demand)).collect();
        let held = NodeModel { model: model("own"), tier: ModelTier::Disk, bytes: Bytes::gib(gib) };
        let bare = Node { holdings: [held].into_iter().collect(), ..node("n", gpus.clone()) };
        let beside = Node { reusable: foreign.into(), ..bare.clone() };
        let policy = Policy::default();
        let evaluation = NodeEvaluation::by_best_fit(&gpus, &demand);
        prop_assert_eq!(fit_by(&evaluation, &beside), fit_by(&evaluation, &bare));
        let scored = |node: &Node| score_node(&Snapshot::new(1, 1, vec![node.clone()]), 0, &demand, &policy);
        prop_assert_eq!(scored(&beside), scored(&bare));
        let (starts, speeds) = (StartModel::default(), LoadingSpeeds::default());
        for gpu_index in 0..gpus.len() {
            prop_assert_eq!(pack::estimate_wake(&beside, GpuSet::single(gpu_index), &demand, &starts, &speeds), None);
        }
    }

    #[test]
    fn a_wake_is_never_priced_above_a_start(
        engines in prop::collection::vec(engine(), 0..5), demand in own_demand(), gib in 0u64..200, on_disk in any::<bool>()
    ) {
        let held = NodeModel { model: model("own"), tier: ModelTier::Disk, bytes: Bytes::gib(gib) };
        let holdings = on_disk.then_some(held).into_iter().collect();
        let node = Node { holdings, reusable: engines.clone().into(), ..node("n", Vec::new()) };
        let (starts, speeds) = (StartModel::default(), LoadingSpeeds::default());
        let start = estimate_start(&node, &demand, &starts, &speeds).unwrap().total();
        for gpus in engines.iter().map(|engine| engine.gpus).chain([GpuSet::single(0)]) {
            if let Some(wake) = pack::estimate_wake(&node, gpus, &demand, &starts, &speeds) {
                prop_assert!(wake.start_time == start && wake.wake_time < start, "{:?} against {}", wake, start.0);
            }
        }
    }
}
