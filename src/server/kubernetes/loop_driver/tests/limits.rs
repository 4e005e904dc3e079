//! Pods that only a limit keeps pending: on evictions, on placements in one run, on writes in progress.

use super::*;
use stowage_scheduling::policy::EvictionRates;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};
use stowage_scheduling::verbs::wait::EvictionsOrdered;

fn one_a_minute(nodes: &[&str]) -> PlannerFixture {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 1,
        ..EvictionRates::default()
    };
    let mut bench = PlannerFixture::with_policy(policy, nodes);
    nodes
        .iter()
        .for_each(|node| bench.show(bound(&format!("job-{node}"), node, 60, -10)));
    bench
}

#[tokio::test]
async fn a_pod_kept_pending_by_eviction_limits_gets_an_event_that_does_not_requeue_it() {
    let mut bench = one_a_minute(&["m", "n"]);
    for name in ["y", "z"] {
        bench.show(waiting(name, 50, 100));
        bench.state.cluster().apply(FilterDecided {
            uid: uid(name),
            answer: FilterAnswer::Refused {
                queried_nodes: None,
            },
        });
    }
    bench.advance_seconds(2);
    assert_eq!(bench.tick().await, ["y: hold m"]);
    assert_eq!(
        bench.recorder.event_reasons(),
        ["StowageReserved", "StowageEvictionLimit"]
    );
    assert_eq!(bench.tick().await, ["job-m: evict Preempted"]);
    bench.advance_seconds(65);
    let written = bench.tick().await;
    assert!(
        written.iter().any(|write| write.starts_with("z: hold ")),
        "its minute has come: {written:?}"
    );
}

#[tokio::test]
async fn a_plan_takes_no_effect_beyond_what_the_eviction_limits_have_left_by_then() {
    let mut none = Policy::default();
    none.preemption.evictions_per_minute = EvictionRates {
        cluster: 0,
        ..EvictionRates::default()
    };
    let used_up: [&dyn Fn(&PlannerFixture); 2] = [
        &|bench| {
            bench
                .state
                .cluster()
                .apply(EvictionsOrdered(vec![uid("job-n")]))
        },
        &|bench| assert!(bench.state.set_policy(none.clone())),
    ];
    for use_up in used_up {
        let mut bench = one_a_minute(&["m", "n"]);
        bench.show(gated("y", 50, 100));
        bench.begin_tick();
        use_up(&bench);
        assert_eq!(bench.settle().await, Vec::<String>::new());
        assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    }
}

#[tokio::test]
async fn the_condition_of_a_gated_pod_names_the_eviction_limit_that_keeps_it_pending() {
    let mut bench = one_a_minute(&["m", "n"]);
    bench.show(gated("y", 50, 100));
    bench.show(gated("z", 50, 100));
    assert_eq!(bench.tick().await, ["y: hold m, making room"]);
    bench.advance_seconds(3);
    let written = bench.tick().await;
    let told = written.iter().find(|write| write.starts_with("z: waits: "));
    let told = told.unwrap_or_else(|| panic!("{written:?}"));
    assert!(
        told.contains(
            "the eviction allowance of this minute is used up: 1 a minute in the cluster"
        ),
        "{told}"
    );
}

#[tokio::test]
async fn reasons_beyond_the_write_limit_are_postponed_and_counted() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    (0..1100).for_each(|n| bench.show(gated(&format!("pod-{n:04}"), 50, 0)));
    bench.advance_seconds(3);
    bench.begin_tick();
    bench.finish_planning_run().await;
    let postponed = || {
        bench
            .state
            .metrics
            .planner
            .postponed
            .with_label_values(&["reason"])
            .get()
    };
    assert_eq!(postponed(), 1100 - 1024);
    let mut told = bench.tick().await;
    for _ in 0..4 {
        bench.advance_seconds(5);
        told.extend(bench.tick().await);
    }
    assert_eq!(told.len(), 1100, "each is told in the end");
}
