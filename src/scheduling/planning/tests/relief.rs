//! Pressure on an engine that lasts evicts its neighbors, one after the other.

use super::*;
use crate::ledger::ObservedPhase;
use crate::policy::Class;
use crate::verbs::wait::EvictionsOrdered;
use crate::vocabulary::disruption_info::Replacement;
use crate::vocabulary::latency::EngineLatency;

/// The node's first GPU.
fn pressed(cluster: &mut LedgerCluster, kv_percent: u8, queue: u32) {
    all_pressed(cluster, 1, kv_percent, queue);
}

/// The node's first `gpus` GPUs.
fn all_pressed(cluster: &mut LedgerCluster, gpus: usize, kv_percent: u8, queue: u32) {
    let engine_load = EngineLoad::new(Percent::new(kv_percent), Some(queue));
    let read = |gpu| GpuReading {
        uuid: gpu_at("n", gpu),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load,
    };
    let gpus = (0..gpus).map(read).collect();
    let sampled = cluster.ledger().now();
    cluster.ledger_mut().take_reading(
        &node("n"),
        NodeReading {
            sampled,
            gpus,
            ..NodeReading::default()
        }
        .into(),
    );
}

/// A serving engine and two jobs on one GPU.
fn shares_a_gpu() -> LedgerCluster {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("engine", "n", 0, shared(30, 100));
    cluster.bound("small", "n", 0, job(10));
    cluster.bound("large", "n", 0, job(20));
    cluster
}

fn evicted(cluster: &LedgerCluster, watch: &mut PressureWatch) -> Vec<String> {
    watch
        .check(cluster.ledger(), &BTreeSet::new())
        .into_iter()
        .map(|relief| relief.uid.to_string())
        .collect()
}

#[test]
fn lasting_pressure_evicts_an_engines_neighbors_one_by_one_cheapest_first() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    let none: [&str; 0] = [];
    pressed(&mut cluster, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), none, "a spike evicts no pod");
    for _ in 0..9 {
        cluster.advance(1);
        pressed(&mut cluster, 97, 0);
        assert_eq!(evicted(&cluster, &mut watch), none);
    }
    cluster.advance(1);
    pressed(&mut cluster, 85, 0);
    assert_eq!(
        evicted(&cluster, &mut watch),
        ["small"],
        "it is not over at 85 %"
    );
    cluster.ledger_mut().release(&uid("small"));
    assert_eq!(evicted(&cluster, &mut watch), none, "that has time to help");
    cluster.advance(10);
    pressed(&mut cluster, 85, 0);
    assert_eq!(evicted(&cluster, &mut watch), ["large"]);
    cluster.ledger_mut().release(&uid("large"));
    cluster.advance(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(
        evicted(&cluster, &mut watch),
        none,
        "the engine itself stays"
    );
}

#[test]
fn a_limit_that_keeps_a_neighbor_for_now_delays_no_later_relief() {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute.node = 1;
    let (mut cluster, mut watch) = (
        LedgerCluster::with_policy_and_nodes(policy, &[("n", 2)]),
        PressureWatch::default(),
    );
    cluster.bound("engine", "n", 0, shared(30, 100));
    cluster.bound("small", "n", 0, job(10));
    cluster.bound("elsewhere", "n", 1, job(10));
    pressed(&mut cluster, 97, 0);
    assert!(evicted(&cluster, &mut watch).is_empty());
    cluster.advance(5);
    cluster.apply(EvictionsOrdered(vec![uid("elsewhere")]));
    let mut relieved = Vec::new();
    for second in 6..=80 {
        cluster.advance(1);
        pressed(&mut cluster, 97, 0);
        if let [first, ..] = &evicted(&cluster, &mut watch)[..] {
            relieved.push((second, first.clone()));
            break;
        }
    }
    let allowed_again = 5 + 60;
    let [(at, pod)] = &relieved[..] else {
        panic!("no relief")
    };
    assert_eq!(pod, "small");
    assert!(
        (allowed_again..=allowed_again + 1).contains(at),
        "after {at} s"
    );
}

#[test]
fn one_check_orders_evictions_within_the_limit_and_the_rest_once_it_allows() {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute.node = 1;
    let (mut cluster, mut watch) = (
        LedgerCluster::with_policy_and_nodes(policy, &[("n", 2)]),
        PressureWatch::default(),
    );
    for gpu in 0..2 {
        cluster.bound(&format!("engine-{gpu}"), "n", gpu, shared(30, 100));
        cluster.bound(&format!("job-{gpu}"), "n", gpu, job(10));
    }
    let mut relieved = Vec::new();
    for second in 0..=80 {
        all_pressed(&mut cluster, 2, 97, 0);
        let named = evicted(&cluster, &mut watch);
        assert!(named.len() <= 1, "{named:?}");
        for pod in named {
            cluster.apply(EvictionsOrdered(vec![uid(&pod)]));
            cluster.ledger_mut().release(&uid(&pod));
            relieved.push((pod, second));
        }
        cluster.advance(1);
    }
    let [(first, at), (second, then)] = &relieved[..] else {
        panic!("{relieved:?}")
    };
    assert_eq!((&first[..], *at, &second[..]), ("job-0", 10, "job-1"));
    assert!((70..=71).contains(then), "after {then} s");
}

#[test]
fn a_pod_on_two_gpus_under_pressure_is_named_once() {
    let (mut cluster, mut watch) = (LedgerCluster::new(&[("n", 2)]), PressureWatch::default());
    for gpu in 0..2 {
        cluster.bound(&format!("engine-{gpu}"), "n", gpu, shared(30, 100));
    }
    let devices = Some(Arc::from([gpu_at("n", 0), gpu_at("n", 1)]));
    let ran = Some(Millis::seconds(600));
    let state = ObservedPhase::Bound {
        node: node("n"),
        devices,
        starting: false,
        ran,
    };
    let observed = Some(ObservedDisruptionInfo::default());
    cluster.observe(
        "job",
        demand_of(10 << 30, 2, Sharing::Shared, -10),
        state,
        observed,
    );
    cluster.bound("other", "n", 1, job(20));
    all_pressed(&mut cluster, 2, 97, 0);
    evicted(&cluster, &mut watch);
    cluster.advance(10);
    all_pressed(&mut cluster, 2, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), ["job"]);
    // Its eviction has time to help on both GPUs, on its way and after it.
    cluster.advance(1);
    all_pressed(&mut cluster, 2, 97, 0);
    let on_its_way = BTreeSet::from([uid("job")]);
    assert_eq!(watch.check(cluster.ledger(), &on_its_way), []);
    cluster.ledger_mut().release(&uid("job"));
    cluster.advance(8);
    all_pressed(&mut cluster, 2, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), [""; 0]);
    cluster.advance(1);
    all_pressed(&mut cluster, 2, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), ["other"]);
}

#[test]
fn pressure_that_falls_below_its_end_is_timed_anew() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    for (seconds, kv, queue) in [(0, 97, 0), (9, 70, 0), (1, 97, 0), (9, 97, 0), (5, 20, 5)] {
        cluster.advance(seconds);
        pressed(&mut cluster, kv, queue);
        assert_eq!(
            evicted(&cluster, &mut watch),
            Vec::<String>::new(),
            "{seconds} {kv}"
        );
    }
    pressed(&mut cluster, 20, 80);
    evicted(&cluster, &mut watch);
    cluster.advance(10);
    pressed(&mut cluster, 20, 80);
    assert_eq!(
        evicted(&cluster, &mut watch),
        ["small"],
        "a queue presses as well"
    );
}

#[test]
fn a_neighbor_that_ends_soon_is_awaited_and_one_that_takes_hours_is_evicted() {
    for (grace, expected) in [(30, vec![]), (24 * 3600, vec!["bait"])] {
        let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
        let leaving = Some(PodDeletion {
            asked_ago: Millis(0),
            grace: Millis::seconds(grace),
        });
        let observed = ObservedDisruptionInfo {
            leaving,
            ..ObservedDisruptionInfo::default()
        };
        cluster.add_running("bait", ("n", 0), job(1), None, observed);
        pressed(&mut cluster, 97, 0);
        evicted(&cluster, &mut watch);
        cluster.advance(10);
        pressed(&mut cluster, 97, 0);
        assert_eq!(evicted(&cluster, &mut watch), expected, "{grace} s");
    }
}

#[test]
fn an_unmeasured_engine_evicts_no_neighbor() {
    let (cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    assert!(watch.check(cluster.ledger(), &BTreeSet::new()).is_empty());
}

#[test]
fn pressure_evicts_no_group_member_and_no_pod_with_an_exhausted_budget() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    cluster.bound_with("small", ("n", 0), job(10), group("g", None));
    cluster.bound_with("smaller", ("n", 0), job(5), group("g", None));
    pressed(&mut cluster, 97, 0);
    evicted(&cluster, &mut watch);
    cluster.advance(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(
        evicted(&cluster, &mut watch),
        ["large"],
        "a group leaves whole or not at all"
    );
    let namespace = cluster
        .ledger()
        .pod_state(&uid("large"))
        .unwrap()
        .demand
        .traits
        .namespace
        .clone();
    let budget = |allowed| DisruptionBudget {
        namespace: namespace.clone(),
        name: "one".into(),
        selector: Selector::EVERYTHING,
        allowed,
        unhealthy_may_go: false,
    };
    cluster.ledger_mut().set_budget(budget(0));
    cluster.advance(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), Vec::<String>::new());
    cluster.ledger_mut().set_budget(budget(1));
    cluster.advance(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(evicted(&cluster, &mut watch), ["large"]);
}

#[test]
fn a_neighbor_whose_replacement_would_be_back_at_once_is_not_evicted() {
    for replacement in [Replacement::SameNode, Replacement::Static] {
        let (mut cluster, mut watch) = (LedgerCluster::new(&[("n", 1)]), PressureWatch::default());
        cluster.bound("engine", "n", 0, shared(30, 100));
        cluster.bound_with(
            "a",
            ("n", 0),
            job(5),
            DisruptionInfo {
                replacement,
                ..DisruptionInfo::default()
            },
        );
        cluster.bound("b", "n", 0, job(30));
        pressed(&mut cluster, 97, 0);
        assert!(evicted(&cluster, &mut watch).is_empty());
        cluster.advance(10);
        pressed(&mut cluster, 97, 0);
        assert_eq!(
            evicted(&cluster, &mut watch),
            ["b"],
            "the dearer one: {replacement:?}"
        );
        cluster.ledger_mut().release(&uid("b"));
        cluster.advance(10);
        pressed(&mut cluster, 97, 0);
        assert!(evicted(&cluster, &mut watch).is_empty());
    }
}

/// What the engine takes for a token, on a GPU without pressure.
fn slow(cluster: &mut LedgerCluster, millis: u64) {
    let read = GpuReading {
        uuid: gpu_at("n", 0),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    let latency = EngineLatency {
        pod: uid("engine"),
        time_per_token: Some(Millis(millis).into()),
        time_to_first_token: None,
        busy: Percent::new(100),
    };
    let reading = NodeReading {
        sampled: cluster.ledger().now(),
        gpus: vec![read],
        latencies: vec![latency],
        ..NodeReading::default()
    };
    cluster
        .ledger_mut()
        .take_reading(&node("n"), reading.into());
}

#[test]
fn an_engine_beyond_its_limit_for_long_loses_its_neighbors_until_it_keeps_it() {
    let limited = |class: &Class| Class {
        max_time_per_token: class.engine.then_some(Millis(40)),
        ..class.clone()
    };
    let classes = Policy::default().classes().iter().map(limited).collect();
    let policy = Policy::default().with_classes(classes).unwrap();
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1)]);
    cluster.bound("engine", "n", 0, shared(30, 100));
    cluster.bound("small", "n", 0, job(10));
    cluster.bound("large", "n", 0, job(20));
    let (mut watch, none): (_, [&str; 0]) = (PressureWatch::default(), []);
    slow(&mut cluster, 40);
    assert_eq!(evicted(&cluster, &mut watch), none);
    for _ in 0..10 {
        slow(&mut cluster, 41);
        assert_eq!(evicted(&cluster, &mut watch), none);
        cluster.advance(1);
    }
    // It is over at nine tenths.
    slow(&mut cluster, 38);
    assert_eq!(evicted(&cluster, &mut watch), ["small"]);
    assert!(is_relief_due(
        cluster.ledger(),
        &uid("small"),
        &gpu_at("n", 0)
    ));
    cluster.ledger_mut().release(&uid("small"));
    for _ in 0..30 {
        slow(&mut cluster, 38);
        assert_eq!(evicted(&cluster, &mut watch), none, "the mean is old");
        cluster.advance(1);
    }
    slow(&mut cluster, 38);
    assert_eq!(evicted(&cluster, &mut watch), ["large"]);
    slow(&mut cluster, 36);
    assert_eq!(evicted(&cluster, &mut watch), none);
    assert!(!is_relief_due(
        cluster.ledger(),
        &uid("large"),
        &gpu_at("n", 0)
    ));
    cluster.advance(60);
    slow(&mut cluster, 36);
    assert_eq!(evicted(&cluster, &mut watch), none);
}
