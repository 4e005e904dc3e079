//! The times are those by which nodes are ranked.

use super::*;
use crate::ledger::StartProgress;
use crate::placing::rank;
use crate::testkit::{LedgerCluster, START, demand_of, gpu_at, key, node, uid};
use crate::verbs::bind::BindAsked;
use crate::verbs::binding::BindingWritten;
use crate::verbs::observe::{EngineStartObserved, PodDeleted, ReadingReported};
use crate::vocabulary::demand::{Demand, Sharing};

const WEIGHTS: Bytes = Bytes(30_000_000_000);

/// By the policy it answers after 30 + 10 + 20 s where nothing is there, and after 10 + 20 s where its files are on disk.
fn engine() -> Demand {
    Demand {
        model: ModelId::parse("m").ok(),
        weights: Some(WEIGHTS),
        engine: Engine::Vllm,
        ..demand_of(1 << 30, 1, Sharing::Shared, 0)
    }
}

fn bind(cluster: &mut LedgerCluster, pod: &str, on: &str) {
    cluster.add_waiting(pod, engine());
    cluster
        .apply(BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node(on),
        })
        .unwrap();
    let devices = cluster
        .ledger()
        .pod_state(&uid(pod))
        .unwrap()
        .devices()
        .cloned();
    cluster.apply(BindingWritten {
        uid: uid(pod),
        node: node(on),
        devices,
    });
}

/// Three engines start where nothing of the model is, and take three times as long as the policy says.
fn learn(cluster: &mut LedgerCluster, on: &str) {
    for _ in 0..3 {
        bind(cluster, "pod", on);
        cluster.advance(180);
        cluster
            .apply(EngineStartObserved {
                uid: uid("pod"),
                progress: StartProgress::Ready,
            })
            .unwrap();
        cluster.apply(PodDeleted(uid("pod")));
    }
}

fn report(
    cluster: &mut LedgerCluster,
    on: &str,
    tier: Option<ModelTier>,
    states: &[(&str, EngineModelState)],
) {
    let sampled = cluster.ledger().now();
    let engine = |(pod, state): &(&str, EngineModelState)| EngineReading {
        pod: uid(pod),
        model: ModelId::parse("m").unwrap(),
        gpus: [gpu_at(on, 0)].into(),
        state: *state,
        reusable_in: None,
        observed_at: sampled,
    };
    let holding = |tier| NodeModel {
        model: ModelId::parse("m").unwrap(),
        tier,
        bytes: WEIGHTS,
    };
    let reading = NodeReading {
        sampled,
        holdings: tier.into_iter().map(holding).collect(),
        engines: states.iter().map(engine).collect(),
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node(on),
        reading: reading.into(),
    });
}

fn located(cluster: &LedgerCluster) -> ModelLocations {
    locate(
        cluster.ledger(),
        &ModelId::parse("m").unwrap(),
        &PageRequest {
            limit: 100,
            after: None,
        },
    )
}

fn ready_on(located: &ModelLocations, on: &str) -> Option<Millis> {
    located
        .locations
        .iter()
        .find(|location| location.node == node(on))
        .unwrap()
        .ready_in_millis
}

#[test]
fn ready_times_use_the_learned_start_factors_as_ranking_does() {
    let mut cluster = LedgerCluster::new(&[("absent", 4), ("disk", 4), ("slow", 4)]);
    learn(&mut cluster, "slow");
    report(&mut cluster, "absent", None, &[]);
    report(&mut cluster, "disk", Some(ModelTier::Disk), &[]);
    report(&mut cluster, "slow", Some(ModelTier::Resident), &[]);
    let by_policy = located(&cluster);
    assert_eq!(
        by_policy.absent_ready_in_millis,
        Some(Millis::seconds(60)),
        "no pod says which engine it will be"
    );
    bind(&mut cluster, "loads", "slow");
    report(
        &mut cluster,
        "slow",
        Some(ModelTier::Resident),
        &[("loads", EngineModelState::Loading)],
    );
    let learned = located(&cluster);
    let snapshot = cluster.snapshot();
    let ranked = |on: &str| {
        let (view, starts) = (snapshot.node(on).unwrap(), snapshot.start_model());
        rank::estimate_start(view, &engine(), starts, &cluster.ledger().policy().loading)
            .unwrap()
            .total()
    };
    let absent = learned.absent_ready_in_millis.unwrap();
    assert!((150_000..=180_000).contains(&absent.0), "{absent:?}");
    assert_eq!(absent, ranked("absent"));
    assert_eq!(ready_on(&learned, "disk"), Some(ranked("disk")));
}

#[test]
fn an_engine_that_loads_answers_when_its_start_was_expected_to_end() {
    let mut cluster = LedgerCluster::new(&[("slow", 4)]);
    learn(&mut cluster, "slow");
    bind(&mut cluster, "loads", "slow");
    let expected = cluster
        .ledger()
        .pod_state(&uid("loads"))
        .unwrap()
        .start
        .clone()
        .unwrap()
        .expected;
    assert!(expected.time.total() > expected.prior.total() && cluster.ledger().now() > START);
    cluster.advance(50);
    report(
        &mut cluster,
        "slow",
        Some(ModelTier::Loading),
        &[("loads", EngineModelState::Loading)],
    );
    let left = Millis(expected.time.total().0 - 50_000);
    assert_eq!(ready_on(&located(&cluster), "slow"), Some(left));
    cluster.advance(500);
    report(
        &mut cluster,
        "slow",
        Some(ModelTier::Loading),
        &[("loads", EngineModelState::Loading)],
    );
    assert_eq!(
        ready_on(&located(&cluster), "slow"),
        Some(Millis(0)),
        "it is late"
    );
}
