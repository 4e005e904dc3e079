//! When the gate of a nominated pod is lifted.

use super::*;

/// Nominated, and no watch has shown it.
async fn nominated() -> PlannerFixture {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 40, 0));
    assert_eq!(bench.tick_without_watch().await, ["a: nominate n, placed"]);
    bench
}

#[tokio::test]
async fn a_gate_is_lifted_once_when_the_watch_shows_the_nomination_and_not_before() {
    let mut bench = nominated().await;
    assert!(bench.tick_without_watch().await.is_empty());
    bench.show_nominated("a", "n");
    assert_eq!(bench.tick_without_watch().await, ["a: lift"]);
    assert!(bench.tick_without_watch().await.is_empty());
}

#[tokio::test]
async fn a_watch_that_is_faster_than_the_answer_lets_the_gate_be_lifted_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let (answer, stalled) = tokio::sync::oneshot::channel();
    *bench.recorder.stalled_status_write.lock() = Some(stalled);
    bench.show(gated("a", 40, 0));
    bench.begin_tick();
    bench.finish_planning_run().await;
    bench.show_nominated("a", "n");
    answer.send(()).unwrap();
    assert_eq!(bench.settle().await, ["a: nominate n, placed", "a: lift"]);
}

#[tokio::test]
async fn a_gate_does_not_wait_for_a_watch_that_shows_nothing() {
    let mut bench = nominated().await;
    bench.advance_seconds(1);
    assert_eq!(bench.tick_without_watch().await, ["a: lift"]);
}

#[tokio::test]
async fn a_gate_that_could_not_be_lifted_is_tried_again_with_its_nomination() {
    let mut bench = nominated().await;
    bench.show_nominated("a", "n");
    *bench.recorder.is_unreachable.lock() = true;
    assert_eq!(bench.tick_without_watch().await, ["a: lift"]);
    assert!(bench.tick_without_watch().await.is_empty(), "after a pause");
    *bench.recorder.is_unreachable.lock() = false;
    bench.advance_seconds(1);
    assert_eq!(
        bench.tick_without_watch().await,
        ["a: nominate n, placed", "a: lift"]
    );
}

#[tokio::test]
async fn the_gate_of_a_pod_whose_reservation_ended_meanwhile_stays() {
    let mut bench = nominated().await;
    bench.index.replace_nodes(&bench.state, &[]);
    bench.advance_seconds(1);
    let written = bench.tick_without_watch().await;
    assert!(!written.contains(&"a: lift".to_owned()), "{written:?}");
}

/// Its last write is queued or under way while a run finds a placement.
#[tokio::test]
async fn a_pod_that_is_placed_while_it_is_given_up_keeps_its_gate_until_it_is_nominated() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    bench.show(gated("a", 50, 0));
    assert!(bench.tick().await.is_empty());
    bench.advance_seconds(31);
    let answer = stall_write(&mut bench).await;
    bench.delete("chat");
    bench.advance_seconds(1);
    bench.begin_tick();
    bench.finish_planning_run().await;
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
    answer.send(()).unwrap();
    assert_eq!(
        bench.settle().await,
        ["a: released", "a: nominate n, placed"]
    );
    assert!(
        !bench
            .recorder
            .event_reasons()
            .contains(&"StowagePlanFailed")
    );
}
