//! From an agent's reading of a sleeping engine to the GPU that a pod gets, through the verbs.

use crate::ids::ModelId;
use crate::placing::pack::{WakeEstimate, estimate_wake};
use crate::placing::rank::{Candidate, ScheduleAttempt, shortlist};
use crate::policy::{Policy, SleepingRule};
use crate::testkit::{LedgerCluster, demand_of, gpu_at, node, uid, with_namespace};
use crate::units::{Bytes, Millis};
use crate::verbs::bind::{BindAnswer, BindAsked};
use crate::verbs::filter::{FilterAnswer, FilterDecided};
use crate::verbs::observe::{PodDeleted, ReadingReported};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

const ASLEEP: EngineModelState = EngineModelState::Asleep(SleepLevel::WeightsOffloaded);

/// Two nodes of four GPUs; by packing alone a pod goes to the first GPU of the first.
fn cluster(policy: Policy) -> LedgerCluster {
    LedgerCluster::with_policy_and_nodes(policy, &[("a", 4), ("b", 4)])
}

fn llama(gib: u64) -> Demand {
    let demand = Demand {
        model: ModelId::parse("llama").ok(),
        ..demand_of(gib << 30, 1, Sharing::Shared, 0)
    };
    with_namespace(demand, "default", &Policy::default())
}

/// Of a pod that asks for no GPU, as llm-d's launchers do.
fn engine(pod: &str, on: &str, gpu: u32) -> EngineReading {
    EngineReading {
        pod: uid(pod),
        model: ModelId::parse("llama").unwrap(),
        gpus: [gpu_at(on, gpu)].into(),
        state: ASLEEP,
        reusable_in: Some("default".into()),
        observed_at: crate::testkit::START,
    }
}

fn report(cluster: &mut LedgerCluster, on: &str, engines: Vec<EngineReading>) {
    let gpu = |index| GpuReading {
        uuid: gpu_at(on, index),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    let sampled = cluster.ledger().now();
    let engines = engines
        .into_iter()
        .map(|engine| EngineReading {
            observed_at: sampled,
            ..engine
        })
        .collect();
    let reading = NodeReading {
        sampled,
        gpus: (0..4).map(gpu).collect(),
        engines,
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node(on),
        reading: reading.into(),
    });
}

/// The best place for the demand.
fn best(cluster: &mut LedgerCluster, demand: &Demand) -> Option<(String, GpuSet)> {
    let (snapshot, policy) = (cluster.snapshot(), cluster.ledger().policy().clone());
    let names = snapshot.nodes().iter().map(|node| node.name.as_str());
    let list = shortlist(
        &snapshot,
        demand,
        names,
        ScheduleAttempt::unreserved(&policy),
    );
    let placement = |best: &Candidate| {
        (
            snapshot.nodes()[best.node_index].name.to_string(),
            best.gpus,
        )
    };
    list.best.first().map(placement)
}

fn offer(cluster: &mut LedgerCluster, pod: &str, on: &str, gpu: u32) {
    let answer = FilterAnswer::Offered {
        node: node(on),
        devices: [gpu_at(on, gpu)].into(),
    };
    cluster.apply(FilterDecided {
        uid: uid(pod),
        answer,
    });
}

fn bind(cluster: &mut LedgerCluster, pod: &str, on: &str) -> Vec<String> {
    let asked = BindAsked::for_pod(cluster.ledger(), &uid(pod), &node(on)).unwrap();
    match cluster.apply(asked) {
        Ok(BindAnswer::Write(decision)) => decision
            .placement
            .devices
            .iter()
            .map(ToString::to_string)
            .collect(),
        other => panic!("{other:?}"),
    }
}

fn best_at(on: &str, gpu: usize) -> Option<(String, GpuSet)> {
    Some((on.into(), GpuSet::single(gpu)))
}

#[test]
fn a_pod_is_offered_and_gets_the_gpu_on_which_an_engine_of_its_model_sleeps() {
    let mut cluster = cluster(Policy::default());
    report(&mut cluster, "a", Vec::new());
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    assert_eq!(best(&mut cluster, &llama(40)), best_at("b", 3));
    assert_eq!(
        best(
            &mut cluster,
            &Demand {
                model: None,
                ..llama(40)
            }
        ),
        best_at("a", 0),
        "it names no model"
    );
    let elsewhere = with_namespace(llama(40), "elsewhere", &Policy::default());
    assert_eq!(
        best(&mut cluster, &elsewhere),
        best_at("a", 0),
        "another namespace's"
    );
    cluster.add_waiting("p", llama(40));
    offer(&mut cluster, "p", "b", 3);
    assert_eq!(bind(&mut cluster, "p", "b"), ["GPU-b-3"]);
}

#[test]
fn an_engine_is_reused_by_one_pod_only() {
    let mut cluster = cluster(Policy::default());
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    cluster.add_waiting("first", llama(20));
    offer(&mut cluster, "first", "b", 3);
    assert_ne!(
        best(&mut cluster, &llama(20)),
        best_at("b", 3),
        "it was offered to the first"
    );
    bind(&mut cluster, "first", "b");
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    assert_ne!(
        best(&mut cluster, &llama(20)),
        best_at("b", 3),
        "the first has come, and the engine is still asleep"
    );
    // A second one sleeps there.
    report(
        &mut cluster,
        "b",
        vec![engine("launcher", "b", 3), engine("other", "b", 3)],
    );
    let free = cluster.snapshot().node("b").unwrap().reusable.clone();
    assert_eq!(free.iter().count(), 1);
    cluster.apply(PodDeleted(uid("first")));
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    assert_eq!(
        best(&mut cluster, &llama(20)),
        best_at("b", 3),
        "the first has left"
    );
}

#[test]
fn a_gpu_without_room_is_not_chosen_for_its_engine() {
    let mut cluster = cluster(Policy::default());
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    let job = Demand {
        model: None,
        ..llama(60)
    };
    cluster.add_running(
        "job",
        ("b", 3),
        job,
        None,
        ObservedDisruptionInfo::default(),
    );
    assert_ne!(
        best(&mut cluster, &llama(40)).unwrap(),
        best_at("b", 3).unwrap()
    );
    assert_eq!(best(&mut cluster, &llama(10)), best_at("b", 3));
}

#[test]
fn a_class_opens_its_engines_and_none_does_by_default() {
    let closed = |pod: &str| EngineReading {
        reusable_in: None,
        ..engine(pod, "b", 3)
    };
    let opened = |sleeping| {
        let policy = Policy::default();
        let mut classes = policy.classes().to_vec();
        classes
            .iter_mut()
            .for_each(|class| (class.reusable, class.sleeping) = (true, sleeping));
        policy.with_classes(classes).unwrap()
    };
    let (lends, keeps) = (opened(SleepingRule::Lend), opened(SleepingRule::Keep));
    // An engine that lends must ask before it wakes.
    for (policy, is_open) in [(Policy::default(), false), (lends, false), (keeps, true)] {
        let mut cluster = cluster(policy);
        cluster.add_running(
            "engine",
            ("b", 3),
            llama(20),
            Some(Millis::seconds(3600)),
            ObservedDisruptionInfo::default(),
        );
        report(&mut cluster, "b", vec![closed("engine")]);
        let is_chosen = cluster
            .snapshot()
            .node("b")
            .unwrap()
            .reusable
            .usable_by(&llama(40))
            .count()
            == 1;
        assert_eq!(is_chosen, is_open);
        assert_eq!(
            best(&mut cluster, &llama(40)),
            best_at("b", 3),
            "by packing or by its engine"
        );
        // The agent names a pod that this node does not have.
        report(&mut cluster, "b", vec![closed("nobody")]);
        assert!(cluster.snapshot().node("b").unwrap().reusable.is_empty());
    }
}

#[test]
fn only_recently_seen_sleeping_engines_are_reused() {
    let mut cluster = cluster(Policy::default());
    let states = [EngineModelState::Resident, EngineModelState::Loading];
    for state in states {
        report(
            &mut cluster,
            "b",
            vec![EngineReading {
                state,
                ..engine("launcher", "b", 3)
            }],
        );
        assert!(cluster.snapshot().node("b").unwrap().reusable.is_empty());
    }
    let nowhere = EngineReading {
        gpus: [].into(),
        ..engine("launcher", "b", 3)
    };
    let elsewhere = EngineReading {
        gpus: [gpu_at("b", 9)].into(),
        ..engine("launcher", "b", 3)
    };
    report(&mut cluster, "b", vec![nowhere, elsewhere]);
    assert!(cluster.snapshot().node("b").unwrap().reusable.is_empty());
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    assert_eq!(best(&mut cluster, &llama(40)), best_at("b", 3));
    cluster.advance(20);
    assert_eq!(
        best(&mut cluster, &llama(40)),
        best_at("b", 3),
        "stale figures are still a hint"
    );
    cluster.advance(20);
    assert_ne!(
        best(&mut cluster, &llama(40)).unwrap(),
        best_at("b", 3).unwrap(),
        "the agent is silent"
    );
}

#[test]
fn reports_that_say_the_same_change_no_node() {
    let mut cluster = cluster(Policy::default());
    report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    let generation = cluster.snapshot().node("b").unwrap().generation;
    for _ in 0..5 {
        cluster.advance(1);
        report(&mut cluster, "b", vec![engine("launcher", "b", 3)]);
    }
    assert_eq!(cluster.snapshot().node("b").unwrap().generation, generation);
}

#[test]
fn a_wake_is_priced_by_the_weights_and_the_depth_of_the_sleep() {
    let mut cluster = cluster(Policy::default());
    let deep = EngineModelState::Asleep(SleepLevel::WeightsDiscarded);
    report(
        &mut cluster,
        "b",
        vec![
            engine("x", "b", 3),
            EngineReading {
                state: deep,
                ..engine("y", "b", 1)
            },
        ],
    );
    let (snapshot, policy) = (cluster.snapshot(), cluster.ledger().policy().clone());
    let (node, starts) = (snapshot.node("b").unwrap(), snapshot.start_model());
    let wake = |gpu| {
        estimate_wake(
            node,
            GpuSet::single(gpu),
            &llama(40),
            starts,
            &policy.loading,
        )
    };
    // 40 GiB from the network take 43 s, from disk 14.3 s, from host memory 2.1 s; a start takes 20 s, a wake 0.1 s.
    assert_eq!(
        wake(3),
        Some(WakeEstimate {
            wake_time: Millis(2_248),
            start_time: Millis(77_267)
        })
    );
    assert_eq!(
        wake(1),
        Some(WakeEstimate {
            wake_time: Millis(57_367),
            start_time: Millis(77_267)
        })
    );
    assert_eq!(wake(0), None);
}
