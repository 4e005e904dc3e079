//! Planning runs beside the ticks: nothing waits for them, and their results are checked again.

use super::*;
use crate::service::Tenure;
use std::collections::BTreeSet;

#[test]
fn a_planning_run_delays_no_deadline() {
    // One thread for plans, so that a test can occupy it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut bench = PlannerFixture::new(&["n", "m"]);
        bench.show(gated("held", 50, 0));
        bench.tick().await;
        bench.show(gated("next", 50, 0));
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let occupied = tokio::task::spawn_blocking(move || wait.recv());
        bench.begin_tick();
        assert!(
            bench.planner.control_loop.is_planning(),
            "the run waits for the thread"
        );
        bench.advance_seconds(31);
        bench.begin_tick();
        go_on.send(()).unwrap();
        occupied.await.unwrap().unwrap();
        let written = bench.settle().await;
        assert_eq!(written[0], "held: end hold, clear nomination");
        assert!(
            written
                .iter()
                .any(|write| write.starts_with("next: nominate")),
            "{written:?}"
        );
    });
}

#[tokio::test]
async fn changes_during_a_planning_run_are_checked_before_anything_is_written() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.begin_tick();
    bench.show(bound("faster", "n", 40, 0));
    // The copy is from before: the plan placed the pod, and the ledger rejected it.
    assert_eq!(bench.settle().await, Vec::<String>::new());
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn a_plan_of_a_replica_that_stops_leading_comes_to_nothing() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.begin_tick();
    bench.state.set_tenure(Tenure::Standby);
    bench.begin_tick();
    assert!(bench.settle().await.is_empty());
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    bench.state.lead_from_the_start();
    // The planner has not been notified yet.
    bench.begin_tick();
    bench.state.set_tenure(Tenure::Standby);
    bench.finish_planning_run().await;
    assert!(bench.settle().await.is_empty());
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn no_more_gated_pods_are_placed_than_the_scheduler_can_bind() {
    let nodes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let mut bench = PlannerFixture::new(&nodes);
    (0..850).for_each(|n| bench.show(gated(&format!("pod-{n:03}"), 1, -10)));
    let mut told = BTreeSet::new();
    for _ in 0..5 {
        told.extend(
            bench
                .tick()
                .await
                .into_iter()
                .filter(|write| write.ends_with("lift")),
        );
    }
    assert_eq!(
        told.len(),
        768,
        "the third look was the first with too many"
    );
    let names: Vec<String> = (0..300).map(|n| format!("pod-{n:03}")).collect();
    for name in names {
        bench.delete(&name);
    }
    assert!(
        !bench.tick().await.is_empty(),
        "it goes on when they are bound, or gone"
    );
}

#[tokio::test]
async fn a_pod_on_which_planning_fails_keeps_no_other_from_being_planned() {
    for priority in [1000, 0, -10] {
        let mut bench =
            PlannerFixture::new(&["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]);
        bench.planner.panics_on = Some("poison");
        bench.show(gated("poison", 1, priority));
        (0..10).for_each(|n| bench.show(gated(&format!("pod-{n:02}"), 1, 0)));
        let mut written = Vec::new();
        for _ in 0..20 {
            written.extend(bench.tick().await);
            bench.advance_seconds(1);
        }
        let lifted: BTreeSet<&String> = written
            .iter()
            .filter(|write| write.ends_with(": lift"))
            .collect();
        assert_eq!(lifted.len(), 10, "priority {priority}: {written:?}");
        let failed = || {
            bench
                .state
                .metrics
                .panics
                .with_label_values(&["plan"])
                .get()
        };
        assert!(
            (2..=6).contains(&failed()),
            "it is found by halves: {}",
            failed()
        );
        let before = failed();
        bench.show(gated("late", 1, -10));
        let late = bench.tick().await;
        assert!(late.contains(&"late: lift".to_owned()), "{late:?}");
        // It waits as a pod without a place does, and no longer than one.
        let mut poisons: Vec<String> = Vec::new();
        for _ in 0..15 {
            bench.advance_seconds(1);
            poisons.extend(bench.tick().await);
        }
        poisons.retain(|write| write.starts_with("poison: "));
        assert!(
            poisons.iter().any(|write| write.contains("lift")),
            "{poisons:?}"
        );
        assert_eq!(
            bench
                .state
                .metrics
                .panics
                .with_label_values(&["plan"])
                .get(),
            before
        );
    }
}

#[tokio::test]
async fn a_pod_on_which_planning_failed_is_tried_again_alone() {
    let mut bench = PlannerFixture::new(&["a"]);
    bench.planner.panics_on = Some("poison");
    for name in ["poison", "other"] {
        bench.refuse(waiting(name, 1, 0));
    }
    let mut written = Vec::new();
    for _ in 0..10 {
        bench.advance_seconds(1);
        written.extend(bench.tick_without_watch().await);
    }
    assert!(
        written
            .iter()
            .any(|write| write.starts_with("other: nominate a")),
        "{written:?}"
    );
    assert!(
        !written.iter().any(|write| write.starts_with("poison")),
        "{written:?}"
    );
    bench.planner.panics_on = None;
    written.clear();
    for _ in 0..30 {
        bench.advance_seconds(10);
        written.extend(bench.tick_without_watch().await);
    }
    assert!(
        written
            .iter()
            .any(|write| write.starts_with("poison: nominate a")),
        "{written:?}"
    );
}
