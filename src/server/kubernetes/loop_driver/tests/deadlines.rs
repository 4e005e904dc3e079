//! Reservations until their deadlines, and the order of the writes about them.

use super::*;
use crate::service::Tenure;
use stowage_scheduling::control_loop::{PlanState, StatusChange};
use stowage_scheduling::control_loop::{PodWrite, StatusPurpose};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey};
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingFailed;
use stowage_scheduling::verbs::wait::{ReleaseReservation, Reserve};
use stowage_scheduling::vocabulary::placement::Reservation;
use tokio::sync::oneshot;

fn left(bench: &PlannerFixture, name: &str) -> Millis {
    let deadline = reservation_for(bench, name).deadline;
    deadline.since(bench.state.cluster().ledger().now())
}

/// The watch shows the pod's reservation, whose write is not answered.
fn show_unanswered(bench: &mut PlannerFixture, name: &str) {
    let reservation = reservation_for(bench, name);
    bench
        .recorder
        .reservations
        .lock()
        .insert(name.into(), reservation);
    bench.show_condition(&format!("{name}: hold n"));
}

/// Its victim leaves five seconds before the deadline.
async fn late() -> PlannerFixture {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    bench.tick().await;
    let mut leaving = bench.pod("job");
    leaving["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    bench.show(leaving);
    let early = left(&bench, "serving").0 / 1000 - 5;
    bench.advance_seconds(early);
    bench.delete("job");
    bench
}

#[tokio::test]
async fn a_pod_nominated_late_has_time_to_be_bound_and_its_condition_shows_it() {
    let mut bench = late().await;
    assert_eq!(
        bench.tick().await,
        ["serving: hold n, nominate n, placed", "serving: lift"]
    );
    bench.advance_seconds(14);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
    bench.advance_seconds(2);
    assert_eq!(
        bench.state.cluster().ledger().totals().reservations,
        0,
        "but not forever"
    );
}

#[tokio::test]
async fn a_pod_that_is_nominated_again_gets_no_more_time() {
    let mut bench = late().await;
    bench.tick().await;
    let deadline = reservation_for(&bench, "serving").deadline;
    for _ in 0..3 {
        bench.advance_seconds(4);
        bench.tick().await;
    }
    assert_eq!(reservation_for(&bench, "serving").deadline, deadline);
}

#[tokio::test]
async fn a_standby_sees_that_a_reservation_was_extended() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.state.set_tenure(Tenure::Standby);
    let mut pod = waiting("serving", 50, 100);
    pod["status"]["conditions"] = reservation_observed(&[], 10);
    bench.show(pod.clone());
    assert!(left(&bench, "serving") <= Millis::seconds(10));
    // The API server's state goes by the wall clock, which advances meanwhile.
    pod["status"]["conditions"] = reservation_observed(&[], 300);
    bench.show(pod.clone());
    assert!(left(&bench, "serving") > Millis::seconds(200));
    pod["status"]["conditions"] = reservation_observed(&[], 10);
    bench.show(pod);
    assert!(
        left(&bench, "serving") > Millis::seconds(200),
        "what is shown late shortens nothing"
    );
}

#[tokio::test]
async fn a_reservation_that_ends_while_it_is_being_written_is_cleared_after_that() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    let answer = stall_write(&mut bench).await;
    let lasts = left(&bench, "serving").0 / 1000 + 1;
    bench.advance_seconds(lasts);
    tokio::task::yield_now().await;
    assert_eq!(bench.recorder.written(), Vec::<String>::new());
    answer.send(()).unwrap();
    assert_eq!(
        bench.tick().await[..2],
        ["serving: hold n, making room", "serving: end hold"]
    );
}

#[tokio::test]
async fn a_reservation_whose_write_breaks_off_is_given_up() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    let (answer, stalled) = oneshot::channel();
    *bench.recorder.stalled_status_write.lock() = Some(stalled);
    drop(answer);
    assert_eq!(
        bench.tick().await,
        ["serving: end hold, clear nomination"],
        "it may have been written"
    );
}

#[tokio::test]
async fn no_pod_is_evicted_for_the_preempt_verbs_reservation_before_the_api_server_shows_it() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    // The verb writes the condition, too; its write takes long.
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    for _ in 0..5 {
        bench.advance_seconds(2);
        assert_eq!(bench.tick().await, Vec::<String>::new());
    }
    show_unanswered(&mut bench, "serving");
    assert_eq!(
        bench.tick().await,
        ["job: evict Preempted"],
        "the scheduler has had its turn"
    );
}

#[tokio::test]
async fn a_node_lost_while_victims_remain_ends_the_reservation_and_all_evictions_for_it() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("one", "n", 30, -10));
    bench.show(bound("two", "n", 30, -10));
    bench.show(gated("serving", 70, 100));
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("two".into(), EvictionOutcome::TryLater { after: None });
    bench.tick().await;
    assert_eq!(
        bench.tick().await,
        ["one: evict Preempted", "two: evict Preempted"]
    );
    bench.delete("one");
    bench.index.replace_nodes(&bench.state, &[]);
    bench.advance_seconds(1);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    let mut written = bench.tick().await;
    assert!(
        written.contains(&"serving: end hold".to_owned()),
        "{written:?}"
    );
    for _ in 0..10 {
        bench.advance_seconds(2);
        written.extend(bench.tick().await);
    }
    assert!(
        written
            .iter()
            .all(|write| !write.contains("evict") && !write.contains("nominate")),
        "{written:?}"
    );
}

fn write(name: &str, change: StatusChange, purpose: StatusPurpose) -> PodWrite {
    PodWrite::Status {
        key: PodKey::parse("default", name).unwrap(),
        uid: uid(name),
        change,
        purpose,
    }
}

#[tokio::test]
async fn a_nomination_and_the_lift_of_a_gate_are_not_sent_once_their_reservation_has_ended_or_changed()
 {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    let reservation = reservation_for(&bench, "serving");
    let nomination = |reservation| {
        let change = StatusChange::nominate(NodeName::parse("n").unwrap());
        write(
            "serving",
            change,
            StatusPurpose::Nominate {
                reservation,
                is_gated: false,
            },
        )
    };
    let lift = |reservation| {
        let (key, uid) = (PodKey::parse("default", "serving").unwrap(), uid("serving"));
        PodWrite::RemoveGate {
            key,
            uid,
            reservation,
        }
    };
    let is_sent = |bench: &PlannerFixture, reservation: &Reservation| {
        let writes = [nomination(reservation.clone()), lift(reservation.clone())];
        let [nominates, lifts] =
            writes.map(|write| write.revalidate(bench.state.cluster().ledger()).is_some());
        assert_eq!(nominates, lifts);
        nominates
    };
    assert!(is_sent(&bench, &reservation));
    let extended = Reservation {
        deadline: reservation.deadline + Millis(1),
        ..reservation.clone()
    };
    assert!(is_sent(&bench, &extended), "it is the same one");
    assert!(!is_sent(
        &bench,
        &Reservation {
            victims: [].into(),
            ..reservation.clone()
        }
    ));
    bench.advance_seconds(61);
    assert!(!is_sent(&bench, &reservation));
}

#[tokio::test]
async fn the_gate_of_a_pod_that_has_a_reservation_by_now_is_not_given_up() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    let change = StatusChange::plan(PlanState::GateRemoved {
        why: "it waits too long".into(),
    });
    let release = write(
        "serving",
        change,
        StatusPurpose::Release {
            why: "it waits too long".into(),
        },
    );
    assert!(
        release
            .clone()
            .revalidate(bench.state.cluster().ledger())
            .is_some()
    );
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    assert_eq!(release.revalidate(bench.state.cluster().ledger()), None);
}

#[tokio::test]
async fn a_nomination_that_is_not_sent_is_followed_by_that_to_the_pods_present_reservation() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(gated("a", 40, 0));
    bench.begin_tick();
    // The plan is in force, and its nomination waits to be sent.
    bench.finish_planning_run().await;
    let planned = reservation_for(&bench, "a");
    let other = if planned.node.as_str() == "n" {
        "m"
    } else {
        "n"
    };
    let mut cluster = bench.state.cluster();
    cluster.apply(ReleaseReservation(uid("a")));
    let reservation = Reservation {
        node: NodeName::parse(other).unwrap(),
        ..planned
    };
    cluster
        .apply(Reserve {
            uid: uid("a"),
            reservation,
        })
        .unwrap();
    drop(cluster);
    assert_eq!(bench.settle().await, Vec::<String>::new());
    let nominated = format!("a: nominate {other}, placed");
    assert_eq!(bench.tick().await, [nominated.as_str(), "a: lift"]);
}

#[tokio::test]
async fn a_leader_extends_no_reservation_because_its_condition_shows_a_later_deadline() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    let deadline = reservation_for(&bench, "serving").deadline;
    let mut pod = bench.pod("serving");
    // As it looks after the wall clock was set back by 40 minutes.
    pod["status"]["conditions"] = reservation_observed(&["uid-job"], 2400);
    bench.show(pod);
    assert_eq!(reservation_for(&bench, "serving").deadline, deadline);
}

#[test]
fn a_reservation_made_while_the_end_of_another_waits_to_be_written_is_shown_instead() {
    let n = NodeName::parse("n").unwrap();
    let nominated_no_more = StatusChange::end_reservation_and_nomination();
    for (change, purpose) in [
        (
            StatusChange::end_reservation(),
            StatusPurpose::EndUnknownReservation,
        ),
        (
            nominated_no_more.clone(),
            StatusPurpose::EndReservation { placed_on: Some(n) },
        ),
        (nominated_no_more, StatusPurpose::AbandonReservation),
    ] {
        let mut bench = PlannerFixture::new(&["n"]);
        bench.show(bound("job", "n", 60, -10));
        bench.show(waiting("serving", 50, 100));
        let end = write("serving", change, purpose);
        assert_eq!(
            end.clone().revalidate(bench.state.cluster().ledger()),
            Some(end.clone())
        );
        reserve_as_the_preempt_verb(&bench, "serving", "job");
        let Some(PodWrite::Status { change, .. }) = end.revalidate(bench.state.cluster().ledger())
        else {
            panic!("it is written");
        };
        assert_eq!(
            change,
            StatusChange::reservation(reservation_for(&bench, "serving"))
        );
    }
}

/// While the end of a reservation is being written, the verb makes another and writes its condition past the planner's queue. The
/// end is answered when the test answers.
async fn held_again_while_the_end_is_written() -> (PlannerFixture, oneshot::Sender<()>) {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    let (answer, stalled) = oneshot::channel();
    *bench.recorder.stalled_status_write.lock() = Some(stalled);
    bench.advance_seconds(61);
    tokio::task::yield_now().await;
    assert!(
        bench.recorder.stalled_status_write.lock().is_none(),
        "its end is being written"
    );
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    (bench, answer)
}

#[tokio::test]
async fn a_reservation_made_while_the_end_of_another_is_being_written_is_shown_after_it() {
    let (mut bench, answer) = held_again_while_the_end_is_written().await;
    answer.send(()).unwrap();
    assert_eq!(
        bench.settle().await,
        ["serving: end hold", "serving: hold n"]
    );
}

#[tokio::test]
async fn a_reservation_is_shown_after_the_end_of_another_although_a_third_write_waits() {
    let (mut bench, answer) = held_again_while_the_end_is_written().await;
    bench.planner.control_loop.add_write(write(
        "serving",
        StatusChange::requeue(),
        StatusPurpose::Requeue,
    ));
    answer.send(()).unwrap();
    assert_eq!(
        bench.settle().await,
        ["serving: end hold", "serving: touch", "serving: hold n"]
    );
}

#[tokio::test]
async fn a_reservation_that_could_not_be_shown_again_is_shown_later_for_as_long_as_it_lasts() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    let show = || {
        write(
            "serving",
            StatusChange::default(),
            StatusPurpose::ShowReservation,
        )
    };
    *bench.recorder.is_unreachable.lock() = true;
    bench.planner.control_loop.add_write(show());
    assert_eq!(
        bench.settle().await,
        ["serving: hold n"],
        "and nobody answers"
    );
    assert_eq!(bench.tick().await, Vec::<String>::new(), "not at once");
    *bench.recorder.is_unreachable.lock() = false;
    bench.advance_seconds(1);
    assert_eq!(bench.tick().await, ["serving: hold n"]);
    bench.advance_seconds(20);
    assert_eq!(bench.tick().await, ["job: evict Preempted"], "it is shown");

    *bench.recorder.is_unreachable.lock() = true;
    bench.planner.control_loop.add_write(show());
    bench.settle().await;
    *bench.recorder.is_unreachable.lock() = false;
    bench
        .state
        .cluster()
        .apply(ReleaseReservation(uid("serving")));
    bench.advance_seconds(1);
    assert_eq!(bench.tick().await, Vec::<String>::new(), "it has ended");
}

/// With the verb's reservation, which the pod shows.
fn shown_reservation() -> PlannerFixture {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), EvictionOutcome::TryLater { after: None });
    let mut shown = bench.pod("serving");
    shown["status"]["conditions"] = reservation_observed(&["uid-job"], 60);
    bench.show(shown);
    bench
}

/// What is written within so many seconds beside evictions.
async fn written_within(bench: &mut PlannerFixture, seconds: u64) -> Vec<String> {
    let mut written = bench.written_within(seconds).await;
    written.retain(|write| !write.contains("evict"));
    written
}

#[tokio::test]
async fn a_reservation_whose_condition_a_late_write_has_ended_is_shown_again() {
    let mut bench = shown_reservation();
    assert_eq!(
        written_within(&mut bench, 15).await,
        Vec::<String>::new(),
        "it is shown"
    );
    let mut ended = bench.pod("serving");
    ended["status"]["conditions"] = json!([]);
    bench.show(ended);
    assert_eq!(written_within(&mut bench, 15).await, ["serving: hold n"]);
}

#[tokio::test]
async fn a_reservation_whose_condition_an_earlier_one_has_overwritten_is_shown_again() {
    let mut bench = shown_reservation();
    bench.show(bound("other", "n", 1, -10));
    let mut late = bench.pod("serving");
    let victims = [uid("job"), uid("other")].into();
    let reservation = Reservation {
        victims,
        ..reservation_for(&bench, "serving")
    };
    bench
        .state
        .cluster()
        .apply(ReleaseReservation(uid("serving")));
    bench
        .state
        .cluster()
        .apply(Reserve {
            uid: uid("serving"),
            reservation,
        })
        .unwrap();
    late["metadata"]["labels"] = json!({ "changed": "since" });
    bench.show(late);
    assert_eq!(written_within(&mut bench, 15).await, ["serving: hold n"]);
}

/// The pod's Binding is begun, and known not to be written after so many seconds.
async fn bind_fails_after(bench: &mut PlannerFixture, seconds: u64) {
    let key = PodKey::parse("default", "serving").unwrap();
    let asked = BindAsked {
        uid: uid("serving"),
        key,
        node: NodeName::parse("n").unwrap(),
    };
    bench.state.cluster().apply(asked).unwrap();
    for _ in 0..seconds {
        bench.advance_seconds(1);
        bench.tick().await;
    }
    bench.state.cluster().apply(BindingFailed(uid("serving")));
}

#[tokio::test]
async fn a_bind_that_fails_slowly_gives_a_reservation_no_more_time() {
    let mut bench = late().await;
    bench.tick().await;
    let deadline = reservation_for(&bench, "serving").deadline;
    bind_fails_after(&mut bench, 3).await;
    for _ in 0..3 {
        bench.advance_seconds(3);
        bench.tick().await;
    }
    assert_eq!(reservation_for(&bench, "serving").deadline, deadline);
}

#[tokio::test]
async fn a_reservation_that_the_watch_shows_stands_although_its_write_is_not_answered() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    let answer = stall_write(&mut bench).await;
    show_unanswered(&mut bench, "serving");
    *bench.recorder.is_unreachable.lock() = true;
    answer.send(()).unwrap();
    bench.settle().await;
    *bench.recorder.is_unreachable.lock() = false;
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
}

#[tokio::test]
async fn a_pod_that_was_bound_elsewhere_while_its_reservation_was_written_is_nominated_after_its_binding_failed()
 {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    bench.refuse(waiting("serving", 50, 100));
    bench.advance_seconds(5);
    let answer = stall_write(&mut bench).await;
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(node("m")).unwrap());
    let (uid, key) = (uid("serving"), PodKey::parse("default", "serving").unwrap());
    let asked = BindAsked {
        uid: uid.clone(),
        key,
        node: NodeName::parse("m").unwrap(),
    };
    bench.state.cluster().apply(asked).unwrap();
    answer.send(()).unwrap();
    bench.tick().await;
    bench.state.cluster().apply(BindingFailed(uid));
    let mut written = bench.written_within(4).await;
    assert_eq!(written, ["job: evict Preempted"]);
    bench.delete("job");
    written = bench.written_within(1).await;
    assert!(
        written.iter().any(|write| write.contains("nominate n")),
        "{written:?}"
    );
}

#[tokio::test]
async fn a_reservation_without_victims_is_shown_over_one_that_landed_late_until_the_pod_shows_it() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    let reservation = Reservation {
        node: NodeName::parse("m").unwrap(),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [].into(),
        deadline: bench.state.cluster().ledger().now() + Millis::seconds(60),
    };
    bench
        .state
        .cluster()
        .apply(Reserve {
            uid: uid("serving"),
            reservation,
        })
        .unwrap();
    let mut late = bench.pod("serving");
    late["status"]["conditions"] = reservation_observed(&["uid-job"], 50);
    bench.show(late);
    *bench.recorder.is_unreachable.lock() = true;
    bench.written_within(12).await;
    *bench.recorder.is_unreachable.lock() = false;
    let written = bench.written_within(25).await;
    assert!(
        written.iter().any(|write| write.contains("hold m")),
        "{written:?}"
    );
    assert!(
        written.iter().all(|write| !write.contains("evict")),
        "{written:?}"
    );
    let later = bench.written_within(15).await;
    assert!(
        later.iter().all(|write| !write.contains("hold")),
        "{later:?}"
    );
}
