//! A group is placed whole or not at all, where the policy wants it.

use super::*;
use crate::ids::ModelId;
use crate::testkit::{START, with_namespace};
use crate::units::Bytes;
use crate::verbs::observe::ReadingReported;
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};

#[test]
fn a_group_is_placed_whole_or_not_at_all() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(
        cluster.plan(),
        [
            "a waits: group-too-large",
            "b waits: group-too-large",
            "c waits: group-too-large"
        ]
    );
    cluster.add_gated("single", job(60));
    assert_eq!(
        cluster.plan()[0],
        "single on m",
        "the group reserves nothing"
    );
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 2)]);
    for name in ["a", "b"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(
        cluster.plan(),
        ["a waits: group-incomplete", "b waits: group-incomplete"]
    );
    cluster.member("c", job(60), group("trio", Some(3)));
    cluster.advance(5);
    assert_eq!(cluster.plan(), ["a on n, b on m, c on m"]);
}

#[test]
fn a_group_without_a_declared_size_is_the_pods_that_exist_for_a_while() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.member("a", job(60), group("g", None));
    assert!(cluster.plan().is_empty());
    cluster.member("b", job(60), group("g", None));
    cluster.advance(3);
    assert_eq!(cluster.plan(), ["a on n, b on n"]);
}

#[test]
fn a_group_is_packed_on_the_fewest_nodes_when_the_policy_says_so() {
    let nodes = [("k", 1), ("l", 1), ("m", 1), ("n", 3)];
    let mut cluster =
        LedgerCluster::with_policy_and_nodes(with_placement(GroupPlacement::FewestNodes), &nodes);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(cluster.plan(), ["a on n, b on n, c on n"]);
}

#[test]
fn a_group_is_placed_in_one_island_or_waits_when_the_policy_says_so() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(
        with_placement(GroupPlacement::OneIsland),
        &[("n", 4), ("m", 8)],
    );
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    let steps = plan_steps(cluster.ledger_mut(), 64);
    let [PlanStep::Place(placements)] = &steps[..] else {
        panic!("{steps:?}")
    };
    let gpus: Vec<&str> = placements
        .iter()
        .map(|placement| placement.reservation.devices[0].as_str())
        .collect();
    assert_eq!(
        gpus,
        ["GPU-m-0", "GPU-m-1", "GPU-m-2"],
        "an island of n has two GPUs"
    );
    let mut cluster = LedgerCluster::with_policy_and_nodes(
        with_placement(GroupPlacement::OneIsland),
        &[("n", 4)],
    );
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert!(
        cluster
            .plan()
            .iter()
            .all(|step| step.ends_with("waits: group-too-large"))
    );
}

#[test]
fn a_group_evicts_for_all_its_members_or_for_none() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, shared(60, 0));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(
        cluster.plan(),
        ["a waits: group-too-large", "b waits: group-too-large"],
        "serving stays"
    );
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, job(60));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(cluster.plan(), ["a on m after k, b on n after j"]);
}

/// Engines of the model `m` sleep on these GPUs of the node, and new pods of it may wake them.
fn asleep(cluster: &mut LedgerCluster, on: &str, gpus: &[u32]) {
    let engine = |gpu: &u32| EngineReading {
        pod: uid(&format!("asleep-{gpu}")),
        model: ModelId::parse("m").unwrap(),
        gpus: [gpu_at(on, *gpu)].into(),
        state: EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
        reusable_in: Some("default".into()),
        observed_at: START,
    };
    let gpu = |index| GpuReading {
        uuid: gpu_at(on, index),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    let engines = gpus.iter().map(engine).collect();
    let reading = NodeReading {
        sampled: START,
        gpus: (0..8).map(gpu).collect(),
        engines,
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node(on),
        reading: reading.into(),
    });
}

fn of_model(demand: Demand) -> Demand {
    with_namespace(
        Demand {
            model: ModelId::parse("m").ok(),
            ..demand
        },
        "default",
        &Policy::default(),
    )
}

/// The GPU of each pod, in the order in which the pods are placed.
fn gpus_of(cluster: &mut LedgerCluster) -> Vec<String> {
    let steps = plan_steps(cluster.ledger_mut(), 64);
    let placements = steps.iter().flat_map(|step| match step {
        PlanStep::Place(placements) => placements.as_slice(),
        other => panic!("{other:?}"),
    });
    placements
        .map(|placement| placement.reservation.devices[0].to_string())
        .collect()
}

#[test]
fn a_pod_under_the_gate_is_placed_where_an_engine_of_its_model_sleeps() {
    let mut cluster = LedgerCluster::new(&[("n", 8)]);
    asleep(&mut cluster, "n", &[5]);
    cluster.add_gated("p", of_model(job(60)));
    cluster.add_gated("q", of_model(job(60)));
    assert_eq!(
        gpus_of(&mut cluster),
        ["GPU-n-5", "GPU-n-0"],
        "one engine is promised to one pod"
    );
}

#[test]
fn each_pod_of_a_group_wakes_an_engine_of_its_own_as_far_as_there_are_any() {
    for (placement, expected) in [
        (GroupPlacement::Anywhere, ["GPU-n-5", "GPU-n-6", "GPU-n-0"]),
        (
            GroupPlacement::FewestNodes,
            ["GPU-n-5", "GPU-n-6", "GPU-n-0"],
        ),
        // Of two islands the one in which more engines sleep.
        (GroupPlacement::OneIsland, ["GPU-n-5", "GPU-n-6", "GPU-n-4"]),
    ] {
        let mut cluster =
            LedgerCluster::with_policy_and_nodes(with_placement(placement), &[("n", 8)]);
        asleep(&mut cluster, "n", &[5, 6]);
        for name in ["a", "b", "c"] {
            cluster.member(name, of_model(job(60)), group("trio", Some(3)));
        }
        assert_eq!(gpus_of(&mut cluster), expected, "{placement:?}");
    }
}
