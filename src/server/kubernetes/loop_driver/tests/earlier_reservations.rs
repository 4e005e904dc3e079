//! Answers to writes about a reservation that the pod does not have any more.

use super::*;
use stowage_scheduling::verbs::wait::{ReleaseReservation, Reserve};
use tokio::sync::oneshot;

/// The reservation that `serving` had.
fn release(bench: &PlannerFixture) -> Reservation {
    let reservation = reservation_for(bench, "serving");
    bench
        .state
        .cluster()
        .apply(ReleaseReservation(uid("serving")));
    reservation
}

/// The preempt verb makes one like the first, with other victims.
fn reserve_as_the_verb_does(bench: &PlannerFixture, first: Reservation) {
    let reservation = Reservation {
        victims: [uid("job"), uid("other")].into(),
        ..first
    };
    bench
        .state
        .cluster()
        .apply(Reserve {
            uid: uid("serving"),
            reservation,
        })
        .unwrap();
}

/// A reservation with victims is given up while it is being written.
async fn released_while_it_is_written() -> (PlannerFixture, Reservation, oneshot::Sender<()>) {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(bound("other", "n", 1, -10));
    bench.show(gated("serving", 50, 100));
    let answer = stall_write(&mut bench).await;
    let first = release(&bench);
    (bench, first, answer)
}

/// A reservation without victims is given up while its nomination is being written, and the verb makes one with a victim.
async fn held_again_while_its_nomination_is_written() -> (PlannerFixture, oneshot::Sender<()>) {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("serving", 50, 100));
    let answer = stall_write(&mut bench).await;
    bench
        .state
        .cluster()
        .apply(ReleaseReservation(uid("serving")));
    bench.show(bound("job", "n", 60, -10));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    (bench, answer)
}

#[tokio::test]
async fn no_pod_is_evicted_because_an_earlier_reservation_of_the_pod_was_written() {
    let (mut bench, first, answer) = released_while_it_is_written().await;
    bench.begin_tick();
    // Its write takes long.
    reserve_as_the_verb_does(&bench, first);
    bench.begin_tick();
    bench.advance_seconds(4);
    answer.send(()).unwrap();
    assert_eq!(
        bench.tick_without_watch().await,
        ["serving: hold n, making room"]
    );
    bench.advance_seconds(1);
    assert_eq!(
        bench.tick_without_watch().await,
        Vec::<String>::new(),
        "nothing shows the present one"
    );
}

#[tokio::test]
async fn the_gate_of_a_pod_is_not_lifted_because_it_was_nominated_for_an_earlier_reservation() {
    let (mut bench, answer) = held_again_while_its_nomination_is_written().await;
    answer.send(()).unwrap();
    let mut written = bench.settle().await;
    written.extend(bench.written_within(3).await);
    assert!(
        written.iter().all(|write| !write.contains("lift")),
        "{written:?}"
    );
}

#[tokio::test]
async fn a_gate_is_not_lifted_for_an_earlier_reservation_although_the_watch_shows_its_nomination() {
    let (mut bench, answer) = held_again_while_its_nomination_is_written().await;
    bench.show_nominated("serving", "n");
    answer.send(()).unwrap();
    let written = bench.settle().await;
    assert!(
        written.iter().all(|write| !write.contains("lift")),
        "{written:?}"
    );
}

#[tokio::test]
async fn a_reservation_is_not_called_off_because_the_write_of_an_earlier_one_failed() {
    let (mut bench, first, answer) = released_while_it_is_written().await;
    reserve_as_the_verb_does(&bench, first);
    *bench.recorder.is_unreachable.lock() = true;
    answer.send(()).unwrap();
    bench.settle().await;
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
}
