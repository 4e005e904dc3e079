//! VRAM that engines lend is never promised twice, whatever comes in between.
//!
//! The oracle is the hardware ([`world`]): a node whose processes have memory, beside an API server with its own record of pods,
//! and a ledger that learns of both late, is stored and loaded, or restarts. Engines follow the protocol: they wake only after
//! their pod showed that this very request was answered. They may crash at any time; then they ask nobody for the room to load
//! again. Where the driver keeps VRAM limits, awake engines allocate and free their VRAM as they like, and ask nobody: the driver
//! ends borrowers, and nobody else ever lacks memory.

mod world;

use crate::units::{Millis, Moment};
use crate::verbs::tick::PolicySet;
use proptest::prelude::*;
use world::{ENGINES, Lending, PODS, World, policy};

#[derive(Debug, Clone)]
enum Step {
    /// A pod arrives and kube-scheduler binds it; the answer to its Binding may be lost.
    Bind(u8, bool),
    /// The watch shows what the API server has of a pod.
    Watch(u8),
    Sleep(u8),
    /// The engine's owner takes the annotation away.
    Withdraw(u8),
    Ask(u8),
    /// The engine wakes, if its pod shows that it may.
    Wake(u8),
    /// The engine, if it is awake, has so many percent of its grant from now on.
    Hold(u8, u64),
    /// What the node says of VRAM limits.
    Ready(bool),
    /// The engine's process ends. The next one loads the model as soon as there is room, once everything comes to rest.
    Crash(u8),
    /// The planner looks: evicts, and sends what it has to say to pods.
    Plan,
    /// The API server takes the planner's next change of a pod's status.
    Land,
    /// A pod that is being deleted ends.
    End(u8),
    /// The driver gives back the memory of a pod that has ended.
    Free(u8),
    /// The agent samples; its report arrives later.
    Sample,
    Deliver,
    /// Three reports a second apart, which arrive at once.
    Settle,
    Restart,
    Store,
    Policy(bool),
    /// All awake engines have so much of their KV caches in use.
    Load(u8),
    Pass(u64),
}

/// What may happen where the driver keeps VRAM limits, too.
fn step_with_limits() -> impl Strategy<Value = Step> {
    let hold = (0..ENGINES, 10u64..=100).prop_map(|(engine, percent)| Step::Hold(engine, percent));
    prop_oneof![
        60 => step(),
        14 => hold,
        4 => Just(Step::Settle),
        2 => prop::bool::weighted(0.8).prop_map(Step::Ready),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let (engine, pod) = (0..ENGINES, 0..PODS);
    prop_oneof![
        8 => (pod.clone(), any::<bool>()).prop_map(|(pod, answered)| Step::Bind(pod, answered)),
        6 => pod.clone().prop_map(Step::Watch),
        6 => engine.clone().prop_map(Step::Sleep),
        3 => engine.clone().prop_map(Step::Withdraw),
        4 => engine.clone().prop_map(Step::Ask),
        5 => engine.clone().prop_map(Step::Wake),
        2 => engine.prop_map(Step::Crash),
        6 => Just(Step::Plan),
        6 => Just(Step::Land),
        5 => pod.clone().prop_map(Step::End),
        5 => pod.prop_map(Step::Free),
        3 => Just(Step::Sample),
        3 => Just(Step::Deliver),
        8 => Just(Step::Settle),
        1 => Just(Step::Restart),
        1 => Just(Step::Store),
        1 => any::<bool>().prop_map(Step::Policy),
        2 => prop::sample::select(vec![20, 85, 97]).prop_map(Step::Load),
        3 => (1u64..3000).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn an_engine_that_asked_never_lacks_memory_and_is_always_answered(
        lends in prop::sample::select(vec![Lending::Asleep, Lending::Asleep, Lending::Asleep, Lending::Nothing]),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new(lends);
        for step in &steps {
            world.apply_step(step);
            world.check(step);
        }
        world.settle_all();
        let is_down = world.processes.values().any(|process| process.down);
        prop_assert!(!is_down, "an engine that crashed finds its room taken: {:?}", world.processes);
        for engine in 0..ENGINES {
            world.apply_step(&Step::Ask(engine));
        }
        world.settle_all();
        let engines: Vec<u8> = world.processes.keys().copied().filter(|pod| *pod < ENGINES).collect();
        for engine in engines {
            world.apply_step(&Step::Wake(engine));
            world.check(&Step::Wake(engine));
            let record = &world.records[&engine];
            prop_assert!(!world.processes[&engine].asleep, "{engine} is not answered: {record:?}");
        }
    }

    #[test]
    fn where_the_driver_keeps_limits_no_pod_ever_lacks_memory_that_it_was_granted(
        steps in prop::collection::vec(step_with_limits(), 1..150),
    ) {
        let mut world = World::new(Lending::Unused);
        for step in &steps {
            world.apply_step(step);
            world.check(step);
        }
        for engine in 0..ENGINES {
            world.apply_step(&Step::Hold(engine, 100));
        }
    }
}

/// Pods that have so many percent of their grants for a while, where the driver keeps limits.
fn held(pods: &[(u8, u64)]) -> World {
    let mut world = World::new(Lending::Unused);
    for (pod, percent) in pods {
        world.apply_step(&Step::Bind(*pod, true));
        world.hold(*pod, *percent);
    }
    world.settle();
    world.settle();
    world
}

/// The random histories above do what they are for.
#[test]
fn vram_that_an_awake_engine_does_not_use_is_borrowed_until_it_allocates_it() {
    let mut world = held(&[(0, 40), (1, 100)]);
    // Of the 60 B that it was granted it keeps 24 and a margin of 4.
    world.apply_step(&Step::Bind(9, true));
    assert!(
        !world.records.contains_key(&9),
        "the driver would not end it"
    );
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows && world.records[&10].has_limits);
    world.hold(0, 100);
    assert_eq!(world.ended_by_driver, 1);
    world.watch(10);
    world.settle();
    assert_eq!(
        (world.woken_over, world.taken_back),
        (0, 0),
        "the borrower is gone already"
    );
    world.hold(0, 40);
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(
        !world.records.contains_key(&10),
        "what was taken back is not lent again at once"
    );
}

#[test]
fn an_awake_engine_lends_only_where_all_pods_have_limits() {
    // Both GPUs are full: 60 and 30 B without limits, and 50 and 40 B.
    let mut world = held(&[(0, 20), (11, 100), (1, 100), (8, 100)]);
    assert_eq!(world.processes[&0].gpu, world.processes[&11].gpu);
    world.apply_step(&Step::Bind(6, true));
    assert!(
        !world.records.contains_key(&6),
        "the driver would not give pod 11 its VRAM back"
    );
}

#[test]
fn beside_a_pod_without_limits_an_awake_engine_counts_with_its_whole_grant() {
    let mut world = World::new(Lending::Unused);
    for pod in [1, 3, 0, 11] {
        world.apply_step(&Step::Bind(pod, true));
    }
    assert_eq!(world.processes[&1].gpu, world.processes[&3].gpu);
    world.apply_step(&Step::Sleep(3));
    world.apply_step(&Step::Ready(false));
    world.settle();
    world.settle();
    world.apply_step(&Step::Bind(5, true));
    assert!(world.records[&5].borrows && !world.records[&5].has_limits);
    world.apply_step(&Step::Ready(true));
    world.hold(1, 20);
    world.settle();
    world.settle();
    world.apply_step(&Step::Ask(3));
    world.watch(3);
    world.plan();
    assert!(
        world.records[&5].leaving && world.writes.is_empty(),
        "50 and 30 and 25 B"
    );
}

#[test]
fn an_awake_engine_lends_only_while_the_node_keeps_limits() {
    let mut world = World::new(Lending::Unused);
    for pod in [0, 1] {
        world.apply_step(&Step::Bind(pod, true));
    }
    world.hold(0, 20);
    world.apply_step(&Step::Ready(false));
    for (is_ready, is_lent) in [(false, false), (true, true)] {
        world.apply_step(&Step::Ready(is_ready));
        world.settle();
        world.settle();
        world.apply_step(&Step::Bind(10, true));
        assert_eq!(world.records.contains_key(&10), is_lent);
    }
}

#[test]
fn an_engine_whose_use_swings_lends_only_what_it_used_at_no_time() {
    let mut world = World::new(Lending::Unused);
    world.apply_step(&Step::Bind(0, true));
    world.apply_step(&Step::Bind(1, true));
    for percent in [20, 50, 20, 50, 20, 20] {
        world.hold(0, percent);
        for step in [Step::Pass(1000), Step::Sample, Step::Deliver] {
            world.apply_step(&step);
        }
    }
    world.apply_step(&Step::Bind(10, true));
    assert!(
        !world.records.contains_key(&10),
        "it had 30 B two seconds ago, and the job has 50"
    );
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
}

#[test]
fn borrowers_of_an_engine_that_grows_leave_before_the_driver_ends_them() {
    let mut world = held(&[(0, 40), (1, 100)]);
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    // It has 24 B. The job fits beside 36 and the margin.
    world.hold(0, 44);
    world.settle();
    world.plan();
    assert!(!world.records[&10].leaving);
    world.hold(0, 52);
    world.settle();
    world.plan();
    assert!(world.records[&10].leaving, "it has 31 B, and grew by 7");
    assert_eq!((world.taken_back, world.ended_by_driver), (1, 0));
}

/// The random histories above do what they are for.
#[test]
fn an_engine_sleeps_its_vram_is_borrowed_and_given_back_before_it_wakes() {
    let mut world = World::new(Lending::Asleep);
    world.apply_step(&Step::Bind(0, true));
    world.apply_step(&Step::Bind(1, true));
    world.apply_step(&Step::Bind(10, true));
    assert!(!world.records.contains_key(&10), "30 B and 40 B are free");
    world.apply_step(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world.apply_step(&Step::Bind(11, true));
    assert!(
        !world.records[&11].borrows && world.records[&11].devices.is_some(),
        "what is free is not lent"
    );
    world.apply_step(&Step::Ask(0));
    world.watch(0);
    world.plan();
    assert!(
        world.records[&10].leaving && world.writes.is_empty(),
        "it is not told before the room is free"
    );
    world.apply_step(&Step::End(10));
    world.settle();
    world.plan();
    assert!(
        world.writes.is_empty(),
        "the driver has not given the memory back"
    );
    world.apply_step(&Step::Free(10));
    world.settle();
    world.plan();
    world.commit();
    world.apply_step(&Step::Wake(0));
    world.check(&Step::Wake(0));
    assert_eq!((world.wakes, world.borrowed, world.woken_over), (1, 1, 0));
}

#[test]
fn an_engine_that_wakes_without_asking_is_named_once_and_its_loan_ends() {
    let mut world = World::new(Lending::Asleep);
    world.apply_step(&Step::Bind(0, true));
    world.apply_step(&Step::Bind(1, true));
    world.apply_step(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world.processes.get_mut(&0).unwrap().asleep = false;
    world.settle();
    assert_eq!(world.woken_over, 1);
    world.plan();
    assert!(world.records[&10].leaving);
    world.apply_step(&Step::Bind(9, true));
    assert!(!world.records.contains_key(&9), "nothing more is lent");
}

fn assert_at_most_in_an_hour(most: usize, evicted: &[Moment]) {
    assert!(evicted.len() > 4, "{evicted:?}");
    for (first, at) in evicted.iter().enumerate() {
        let within = evicted[first..]
            .iter()
            .filter(|later| later.since(*at) < Millis::seconds(3600));
        assert!(within.count() <= most, "{evicted:?}");
    }
}

/// When the borrower of an engine is evicted that sleeps until its VRAM is borrowed and wakes at once then, for four hours.
fn evicted_by_an_engine_that_flaps(after: Millis) -> Vec<Moment> {
    let mut world = World::new(Lending::Asleep);
    let mut policy = policy(Lending::Asleep);
    policy.planning.lending.after = after;
    world.apply(PolicySet {
        policy,
        prepared: None,
    });
    world.apply_step(&Step::Bind(0, true));
    world.apply_step(&Step::Bind(1, true));
    let mut evicted = Vec::new();
    let begin = world.cluster.ledger().now();
    while world.cluster.ledger().now().since(begin) < Millis::seconds(4 * 3600) {
        world.processes.get_mut(&0).unwrap().asleep = true;
        world.apply_step(&Step::Bind(10, true));
        world.settle();
        if world.records.contains_key(&10) {
            world.processes.get_mut(&0).unwrap().asleep = false;
            world.settle();
            world.plan();
            world.watch(10);
            assert!(world.records[&10].leaving);
            world.apply_step(&Step::End(10));
            world.apply_step(&Step::Free(10));
            evicted.push(world.cluster.ledger().now());
        }
    }
    evicted
}

#[test]
fn an_engine_that_flaps_costs_its_borrowers_few_evictions_in_an_hour_however_short_its_sleep_may_be()
 {
    assert_at_most_in_an_hour(6, &evicted_by_an_engine_that_flaps(Millis::seconds(60)));
    assert_at_most_in_an_hour(13, &evicted_by_an_engine_that_flaps(Millis::default()));
}

/// An engine sleeps, another of its model is awake, and pod 10 borrows.
fn lent_out() -> World {
    let mut world = World::new(Lending::Asleep);
    world.apply_step(&Step::Bind(0, true));
    world.apply_step(&Step::Bind(1, true));
    world.apply_step(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world
}

#[test]
fn a_loaded_model_reclaims_lent_vram_before_its_sleeping_engine_asks() {
    let mut world = lent_out();
    world.kv_cache = 97;
    world.settle();
    world.plan();
    assert!(!world.records[&10].leaving, "it may be a spike");
    world.settle();
    world.plan();
    assert!(
        world.records[&10].leaving && world.writes.is_empty(),
        "it has not asked"
    );
    world.apply_step(&Step::End(10));
    world.apply_step(&Step::Free(10));
    // Not busy enough to begin, and not idle enough to end.
    world.kv_cache = 85;
    for _ in 0..10 {
        world.settle();
        world.plan();
    }
    world.apply_step(&Step::Bind(10, true));
    assert!(
        !world.records.contains_key(&10),
        "nothing is lent meanwhile"
    );
    assert!(world.writes.is_empty());
    // Its room is free when it asks.
    world.apply_step(&Step::Ask(0));
    world.watch(0);
    world.plan();
    assert_eq!(world.writes.len(), 1);
}

#[test]
fn an_engine_lends_again_some_time_after_its_model_is_full_no_more() {
    let mut world = lent_out();
    world.kv_cache = 97;
    for _ in 0..2 {
        world.settle();
        world.plan();
    }
    world.apply_step(&Step::Store);
    world.kv_cache = 20;
    world.settle();
    world.plan();
    world.apply_step(&Step::End(10));
    world.apply_step(&Step::Free(10));
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(
        !world.records.contains_key(&10),
        "its next loan begins later than its first"
    );
    world.settle();
    world.settle();
    world.apply_step(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
}

#[test]
fn a_load_that_jitters_evicts_borrowers_at_most_six_times_in_an_hour() {
    let mut world = lent_out();
    let mut policy = policy(Lending::Asleep);
    policy.planning.lending.after = Millis::seconds(60);
    world.apply(PolicySet {
        policy,
        prepared: None,
    });
    let mut evicted = Vec::new();
    let begin = world.cluster.ledger().now();
    while world.cluster.ledger().now().since(begin) < Millis::seconds(4 * 3600) {
        // The load rises as soon as the VRAM is borrowed, and falls as soon as it is not.
        world.kv_cache = if world.records.contains_key(&10) {
            97
        } else {
            20
        };
        for _ in 0..2 {
            world.settle();
            world.plan();
        }
        if world.records.get(&10).is_some_and(|record| record.leaving) {
            world.apply_step(&Step::End(10));
            world.apply_step(&Step::Free(10));
            evicted.push(world.cluster.ledger().now());
        }
        world.apply_step(&Step::Bind(10, true));
    }
    assert_at_most_in_an_hour(6, &evicted);
}

#[test]
fn without_reclaim_on_load_vram_is_returned_only_when_the_engine_asks() {
    let mut world = lent_out();
    let mut policy = policy(Lending::Asleep);
    policy.planning.lending.reclaim_on_load = false;
    world.apply(PolicySet {
        policy,
        prepared: None,
    });
    world.kv_cache = 97;
    for _ in 0..5 {
        world.settle();
        world.plan();
    }
    assert!(!world.records[&10].leaving);
}
