//! Which pods a GPU takes beside engines with limits on latency, by what readings say of them.

use crate::contention::{ComputeSharing, EngineWork, GpuSpeed, STEP_OVERHEAD_S, contention};
use crate::ids::ModelId;
use crate::placing::fit::{Misfit, fit};
use crate::policy::{Class, Policy};
use crate::testkit::random::Random;
use crate::testkit::{LedgerCluster, gpu_at, node, uid};
use crate::units::{Bytes, Micros, Millis, Percent};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::Device;
use crate::vocabulary::latency::{EngineLatency, ExpectedWork, NeighborRoom};
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, SleepState};
use crate::vocabulary::placement::Reservation;

/// Engines shall take at most 40 ms for a token.
fn limited() -> Policy {
    let policy = Policy::default();
    let limited = |class: &Class| Class {
        max_time_per_token: class.engine.then_some(Millis(40)),
        ..class.clone()
    };
    let classes = policy.classes().iter().map(limited).collect();
    policy.with_classes(classes).unwrap()
}

/// One GPU with a bound engine.
fn with_engine(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1)]);
    cluster.add_running("engine", ("n", 0), engine(), None, Default::default());
    cluster
}

fn engine() -> Demand {
    Demand {
        model: ModelId::parse("org/m").ok(),
        ..crate::testkit::demand_of(30 << 30, 1, Sharing::Shared, 100)
    }
}

fn latency(millis: Option<u64>, busy: u8) -> EngineLatency {
    EngineLatency {
        pod: uid("engine"),
        time_per_token: millis.map(|millis| Micros::from(Millis(millis))),
        time_to_first_token: None,
        busy: Percent::new(busy),
    }
}

fn read(cluster: &mut LedgerCluster, latencies: Vec<EngineLatency>) {
    read_with(cluster, latencies, Vec::new());
}

fn read_with(
    cluster: &mut LedgerCluster,
    latencies: Vec<EngineLatency>,
    sleep: Vec<(crate::ids::PodUid, SleepState)>,
) {
    cluster.advance(1);
    let gpu = GpuReading {
        uuid: gpu_at("n", 0),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    let reading = NodeReading {
        sampled: cluster.ledger().now(),
        gpus: vec![gpu],
        latencies,
        sleep,
        ..NodeReading::default()
    };
    cluster
        .ledger_mut()
        .take_reading(&node("n"), reading.into());
}

fn room(cluster: &mut LedgerCluster) -> i16 {
    let snapshot = cluster.snapshot();
    snapshot.node("n").unwrap().gpus[0].neighbors.room
}

#[test]
fn without_limits_every_gpu_takes_neighbors() {
    let mut cluster = with_engine(Policy::default());
    read(&mut cluster, vec![latency(Some(900), 100)]);
    assert_eq!(room(&mut cluster), NeighborRoom::EMPTY.room);
}

#[test]
fn an_engine_near_its_limit_takes_only_what_lets_it_keep_it() {
    // Beside a neighbor that always works, a step takes 2.27 times as long.
    for (millis, expected) in [
        (10, 100),
        (17, 100),
        (18, 90),
        (30, 20),
        (39, 0),
        (41, NeighborRoom::CLOSED),
    ] {
        let mut cluster = with_engine(limited());
        read(&mut cluster, vec![latency(Some(millis), 100)]);
        assert_eq!(room(&mut cluster), expected, "{millis} ms");
    }
}

#[test]
fn a_refusal_names_the_limit_and_no_figure_of_the_moment() {
    let mut cluster = with_engine(limited());
    let verdict = |cluster: &mut LedgerCluster| {
        let snapshot = cluster.snapshot();
        let demand = crate::testkit::demand_of(10 << 30, 1, Sharing::Shared, 0);
        fit(snapshot.node("n").unwrap(), &demand).map(|_| ())
    };
    let refused = Misfit::LatencyLimit {
        closed: 1,
        asked: 1,
    };
    for millis in [30, 33, 38, 31] {
        read(&mut cluster, vec![latency(Some(millis), 100)]);
        assert_eq!(verdict(&mut cluster), Err(refused));
    }
    read(&mut cluster, vec![latency(Some(12), 100)]);
    assert_eq!(verdict(&mut cluster), Ok(()));
}

#[test]
fn what_is_not_known_of_an_engine_with_requests_keeps_neighbors_away() {
    let mut cluster = with_engine(limited());
    read(&mut cluster, vec![latency(None, 30)]);
    assert_eq!(
        room(&mut cluster),
        NeighborRoom::CLOSED,
        "it says no latency"
    );
    read(&mut cluster, vec![latency(Some(10), 30)]);
    assert_eq!(room(&mut cluster), 100);
    read(&mut cluster, Vec::new());
    assert_eq!(room(&mut cluster), NeighborRoom::CLOSED, "it says nothing");
    read(&mut cluster, vec![latency(Some(10), 30)]);
    cluster.advance(60);
    assert_eq!(
        room(&mut cluster),
        NeighborRoom::CLOSED,
        "the report is old"
    );
}

#[test]
fn a_sleeping_engine_takes_any_neighbor_and_an_idle_one_on_an_unknown_gpu_none() {
    let mut cluster = with_engine(limited());
    read_with(
        &mut cluster,
        Vec::new(),
        vec![(uid("engine"), SleepState::Asleep)],
    );
    assert_eq!(room(&mut cluster), 100);
    read(&mut cluster, vec![latency(None, 0)]);
    assert_eq!(room(&mut cluster), NeighborRoom::CLOSED);
}

#[test]
fn a_latency_that_jitters_changes_no_decision() {
    let mut cluster = with_engine(limited());
    read(&mut cluster, vec![latency(Some(28), 80)]);
    let generation = cluster.snapshot().node("n").unwrap().generation;
    let counted = room(&mut cluster);
    for second in 0..600 {
        let millis = 27 + second % 3;
        read(
            &mut cluster,
            vec![latency(Some(millis), 80 - (second % 7) as u8)],
        );
        assert!(counted - room(&mut cluster) <= 10);
    }
    let changes = cluster.snapshot().node("n").unwrap().generation - generation;
    assert!(changes <= 3, "{changes}");
}

#[test]
fn pods_that_came_a_moment_ago_count_on_top_of_what_was_measured() {
    let mut cluster = with_engine(limited());
    read(&mut cluster, vec![latency(Some(15), 100)]);
    assert_eq!(room(&mut cluster), 100);
    let job = || crate::testkit::demand_of(5 << 30, 1, Sharing::Shared, -100);
    cluster.add_running("a", ("n", 0), job(), None, Default::default());
    // With one 34.1 ms, with two 51.1.
    assert_eq!(room(&mut cluster), 30);
    read(&mut cluster, vec![latency(Some(15), 100)]);
    assert_eq!(room(&mut cluster), 30);
    cluster.add_running("b", ("n", 0), job(), None, Default::default());
    assert_eq!(room(&mut cluster), -70);
    // Measured beside both: what it takes is what counts.
    cluster.advance(30);
    read(&mut cluster, vec![latency(Some(15), 100)]);
    assert_eq!(room(&mut cluster), 100);
}

#[test]
fn gpus_that_are_reserved_have_a_neighbor_more() {
    let mut cluster = with_engine(limited());
    read(&mut cluster, vec![latency(Some(15), 100)]);
    let job = crate::testkit::demand_of(5 << 30, 1, Sharing::Shared, -100);
    cluster.add_waiting("a", job.clone());
    let reservation = Reservation {
        node: node("n"),
        devices: [gpu_at("n", 0)].into(),
        victims: [].into(),
        deadline: cluster.ledger().now() + Millis::seconds(60),
    };
    cluster
        .ledger_mut()
        .reserve(&uid("a"), reservation)
        .unwrap();
    assert_eq!(room(&mut cluster), 30);
    assert!(cluster.ledger_mut().assume(&uid("a"), &node("n")).is_ok());
    assert_eq!(room(&mut cluster), 30, "it counts once");
}

#[test]
fn room_that_a_job_takes_is_found_again_when_it_leaves() {
    let mut cluster = with_engine(limited());
    let job = crate::testkit::demand_of(10 << 30, 1, Sharing::Shared, -100);
    cluster.add_running("job", ("n", 0), job, None, Default::default());
    cluster.advance(30);
    read(&mut cluster, vec![latency(Some(42), 100)]);
    let snapshot = cluster.snapshot();
    let mut gpu = snapshot.node("n").unwrap().gpus[0];
    assert!(gpu.neighbors.room < 0, "{:?}", gpu.neighbors);
    assert_eq!(gpu.neighbors.busy, 200);
    gpu.discharge(Bytes::gib(10), Sharing::Shared, Percent::FULL);
    assert!(
        (0..100).contains(&gpu.neighbors.room),
        "{:?}",
        gpu.neighbors
    );
    assert_eq!(gpu.neighbors.busy, 100);
}

#[test]
fn a_pod_of_a_model_with_few_requests_fits_where_another_does_not() {
    let mut cluster = with_engine(limited());
    read(&mut cluster, vec![latency(Some(30), 15)]);
    let ledger = cluster.ledger();
    let expected = |demand: Demand| ledger.for_placing(&uid("new"), demand).expected.busy.get();
    assert_eq!(expected(engine()), 20);
    let nameless = Demand {
        model: None,
        ..engine()
    };
    assert_eq!(expected(nameless), 100);
    assert_eq!(ledger.node(&node("n")).unwrap().gpus[0].neighbors.room, 20);
}

#[test]
fn an_engine_goes_where_it_keeps_its_own_limit() {
    let policy = limited();
    let class = policy.classify(&engine().traits);
    let engine = |weights: u64| Demand {
        class: class.class,
        terms: class.terms,
        weights: Some(Bytes::gib(weights)),
        ..engine()
    };
    let room = |busy| NeighborRoom {
        busy,
        // An H100.
        micros_per_gib: Some(377),
        ..NeighborRoom::EMPTY
    };
    let takes = |busy, weights, slowness| {
        let demand = engine(weights);
        let expected = ExpectedWork {
            busy: Percent::default(),
            slowness,
        };
        let limit = demand.terms.max_time_per_token;
        let weights = demand.weights_per_gpu();
        room(busy).beyond_limit(expected, weights, limit).is_none()
    };
    // Alone 16.6 ms: with one neighbor that always works 37.7 ms, with two 56.5.
    assert!(takes(0, 40, 100) && takes(100, 40, 100) && !takes(200, 40, 100));
    // Its model has been seen to take twice as long.
    assert!(takes(0, 40, 200) && !takes(100, 40, 200));
    assert!(takes(200, 300, 100), "it keeps no such limit anywhere");
    let unknown = NeighborRoom {
        busy: 300,
        ..NeighborRoom::EMPTY
    };
    let demand = engine(40);
    let limit = demand.terms.max_time_per_token;
    let weights = demand.weights_per_gpu();
    assert_eq!(
        unknown.beyond_limit(ExpectedWork::UNKNOWN, weights, limit),
        None
    );
}

#[test]
fn what_an_engine_takes_is_shown_beside_what_is_expected_and_a_limit_it_keeps_nowhere_is_told() {
    let mut cluster = LedgerCluster::empty(limited());
    let device = Device {
        model: crate::ids::GpuModel::parse("NVIDIA-H100-80GB-HBM3").unwrap(),
        ..crate::testkit::whole_gpu(gpu_at("n", 0), 0, Bytes::gib(80))
    };
    cluster.add_node("n", vec![device]);
    cluster.add_running("engine", ("n", 0), engine(), None, Default::default());
    let beyond = |cluster: &LedgerCluster| {
        let name = node("n");
        let beyond = cluster.ledger().engines_beyond_limits_alone(&name);
        beyond
            .map(|(_, alone, limit)| (alone.0, limit.0))
            .collect::<Vec<_>>()
    };
    let expected = |cluster: &LedgerCluster| {
        let occupants = cluster.ledger().occupants_of(&node("n"));
        occupants[0].expected_time_per_token.unwrap().0
    };
    // A limit of 40 ms; a tenth more is no reason to speak.
    for (takes, told) in [(40, vec![]), (44, vec![]), (46, vec![(46_000, 40_000)])] {
        read(&mut cluster, vec![latency(Some(takes), 100)]);
        assert_eq!(beyond(&cluster), told, "{takes} ms");
    }
    // 30 GiB at 377 us, and 1.5 ms; its model has been seen to take up to four times as long.
    (0..40).for_each(|_| read(&mut cluster, vec![latency(Some(26), 100)]));
    let alone = expected(&cluster);
    assert!((24_000..28_000).contains(&alone), "{alone} us");
    cluster.add_running(
        "job",
        ("n", 0),
        Demand {
            model: None,
            ..engine()
        },
        None,
        Default::default(),
    );
    // It is not known to be without work, so it counts as one that always works; what was measured was measured without it.
    read(&mut cluster, vec![latency(Some(90), 100)]);
    assert_eq!(expected(&cluster), alone * 2 * 1136 / 1000);
    assert_eq!(beyond(&cluster), []);
    // It has gone, and what is measured is still beside it for half a minute.
    cluster.ledger_mut().release(&uid("job"));
    read(&mut cluster, vec![latency(Some(90), 100)]);
    assert_eq!(beyond(&cluster), []);
    cluster.advance(30);
    read(&mut cluster, vec![latency(Some(90), 100)]);
    assert_eq!(beyond(&cluster), [(90_000, 40_000)]);
}

/// Engines of three models, whose true steps are up to three times off what their weights take to read, join GPUs whose engines are
/// busy for different shares of the time. Returns by how much each prediction was off, in per cent.
fn errors_of_joins(seed: u64) -> Vec<u64> {
    const GIB: [u64; 3] = [16, 30, 8];
    const TRUE_SLOWNESS: [f64; 3] = [3.0, 0.4, 1.7];
    let mut draws = Random::seeded(seed, 0);
    let mut draw = |from: f64, to: f64| from + (to - from) * (draws.unit_interval());
    let mut cluster = LedgerCluster::empty(limited());
    let speed = GpuSpeed::H100;
    let mut errors = Vec::new();
    for join in 0..40 {
        let on = format!("n{join}");
        let product = crate::ids::GpuModel::parse(&format!("NVIDIA-{}", speed.product)).unwrap();
        let device = Device {
            model: product,
            ..crate::testkit::whole_gpu(gpu_at(&on, 0), 0, Bytes::gib(80))
        };
        cluster.add_node(&on, vec![device]);
        let others: Vec<f64> = (0..join % 3).map(|_| draw(0.1, 1.0)).collect();
        for (index, _) in others.iter().enumerate() {
            let other = Demand {
                model: None,
                ..engine()
            };
            cluster.add_running(
                &format!("{on}-{index}"),
                (&on, 0),
                other,
                None,
                Default::default(),
            );
        }
        let of = join % 3;
        let demand = Demand {
            model: ModelId::parse(&format!("org/{of}")).ok(),
            weights: Some(Bytes::gib(GIB[of])),
            ..engine()
        };
        let beside = |cluster: &mut LedgerCluster, own: Option<(f64, f64)>| {
            cluster.advance(1);
            let measured = |(name, busy, step): (String, f64, f64)| EngineLatency {
                pod: uid(&name),
                time_per_token: Micros::from_seconds(step),
                time_to_first_token: None,
                busy: Percent::from_share(busy),
            };
            let mut latencies: Vec<EngineLatency> = (0..)
                .zip(&others)
                .map(|(index, busy)| measured((format!("{on}-{index}"), *busy, 0.02)))
                .chain(own.map(|(busy, step)| measured((on.clone(), busy, step))))
                .collect();
            latencies.sort_by(|one, other| one.pod.cmp(&other.pod));
            let reading = NodeReading {
                sampled: cluster.ledger().now(),
                gpus: vec![GpuReading {
                    uuid: gpu_at(&on, 0),
                    used: Some(Bytes::ZERO),
                    attributed: Vec::new(),
                    engine_load: EngineLoad::NONE,
                }],
                latencies,
                ..NodeReading::default()
            };
            cluster
                .ledger_mut()
                .take_reading(&node(&on), reading.into());
        };
        cluster.advance(30);
        beside(&mut cluster, None);
        let expected = cluster
            .ledger()
            .for_placing(&uid(&on), demand.clone())
            .expected;
        let room = cluster.ledger().node(&node(&on)).unwrap().gpus[0].neighbors;
        let alone = room.step_alone(expected, demand.weights_per_gpu()).unwrap();
        let predicted = room.beside_all(alone).as_seconds();

        cluster.add_running(&on, (&on, 0), demand, None, Default::default());
        cluster.advance(30);
        let reading = speed.memory_s(Bytes::gib(GIB[of]).0 as f64);
        let alone = TRUE_SLOWNESS[of] * (STEP_OVERHEAD_S + reading);
        let work = |busy: f64| EngineWork {
            overhead_s: 0.0,
            memory_s: alone,
            compute_s: 0.0,
            busy,
            sms: 1.0,
        };
        let works: Vec<EngineWork> = [0.5]
            .iter()
            .chain(&others)
            .map(|busy| work(*busy))
            .collect();
        let under = contention(&works, ComputeSharing::TimeSlicing)[0];
        let observed = work(0.5).step_s(&under);
        for _ in 0..10 {
            let noise = draw(0.8, 1.2);
            beside(&mut cluster, Some((0.5, observed * noise)));
        }
        errors.push((100.0 * (predicted / observed - 1.0).abs()) as u64);
    }
    errors
}

#[test]
fn after_ten_joins_half_of_the_predictions_are_off_by_a_fifth_at_most() {
    for seed in 0..20 {
        let errors = errors_of_joins(seed);
        let median = |errors: &[u64]| {
            let mut sorted = errors.to_vec();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        let (first, later) = (median(&errors[..3]), median(&errors[10..]));
        assert!(first >= 40 && later <= 20, "seed {seed}: {errors:?}");
    }
}
