//! Reservations that the API server shows and this planner has not made: of an earlier leader, forged, late, or ended.

use super::*;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::verbs::filter::FilterAsked;
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::wait::TakeUnknownReservations;

#[tokio::test]
async fn a_new_leader_continues_where_the_previous_one_stopped() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    let mut pod = gated("serving", 50, 100);
    pod["status"]["conditions"] = reservation_observed(&["uid-job"], 60);
    bench.take_over(pod);
    assert!(
        bench.tick().await.is_empty(),
        "the maker of the reservation may still be evicting"
    );
    bench.advance_seconds(4);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    bench.delete("job");
    assert_eq!(
        bench.tick().await,
        ["serving: nominate n, placed", "serving: lift"]
    );
}

#[tokio::test]
async fn a_forged_reservation_with_a_protected_victim_is_ended_and_evicts_no_pod() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    let mut pod = waiting("greedy", 50, 0);
    pod["status"]["conditions"] = reservation_until(&["uid-chat"], "2999-01-01T00:00:00Z");
    bench.take_over(pod);
    bench.advance_seconds(0);
    assert_eq!(bench.tick().await, ["greedy: end hold"]);
    bench.advance_seconds(10);
    assert!(
        bench
            .tick()
            .await
            .iter()
            .all(|write| !write.contains("evict"))
    );
}

/// A pod whose condition reserves the node's only GPU, without victims.
fn shows_hold(name: &str, priority: i32) -> Value {
    let mut pod = waiting(name, 50, priority);
    pod["status"]["conditions"] = reservation_observed(&[], 60);
    pod
}

#[tokio::test]
async fn of_two_reservations_of_one_gpu_a_new_leader_adopts_one_and_ends_the_other() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.state.set_tenure(Tenure::Standby);
    bench.show(shows_hold("meek", 0));
    bench.take_over(shows_hold("urgent", 100));
    bench.advance_seconds(0);
    assert_eq!(
        bench
            .tick()
            .await
            .iter()
            .filter(|write| write.contains("meek"))
            .collect::<Vec<_>>(),
        ["meek: end hold"]
    );
    let preemptor = |name: &str| {
        bench
            .state
            .cluster()
            .ledger()
            .reservation_status_of(&uid(name))
    };
    assert!(preemptor("urgent").is_some() && preemptor("meek").is_none());
}

#[tokio::test]
async fn a_late_reservation_of_a_dead_leader_reserves_nothing_and_is_ended_by_a_write() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(waiting("late", 50, 100));
    bench.show(shows_hold("late", 100));
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    assert_eq!(bench.tick().await, ["late: end hold"]);
    assert!(
        bench
            .state
            .cluster()
            .apply(TakeUnknownReservations)
            .is_empty(),
        "once for each time that it shows"
    );
}

#[tokio::test]
async fn a_reservation_with_a_deadline_in_a_thousand_years_ends_all_the_same() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = waiting("greedy", 50, 0);
    pod["status"]["conditions"] = reservation_until(&[], "2999-01-01T00:00:00Z");
    bench.take_over(pod);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
    bench.advance_seconds(2 * 3600);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn a_stale_condition_of_an_ended_reservation_evicts_no_pod() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    let reservation = bench.state.cluster().ledger().reservation_statuses()[0]
        .reservation
        .clone();
    let refused = EvictionOutcome::Refused {
        message: "forbidden".into(),
    };
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), refused);
    bench.tick().await;
    // The watch is late: it shows the condition as it was written.
    let mut late = bench.pod("serving");
    let victims: Vec<&str> = reservation.victims.iter().map(PodUid::as_str).collect();
    late["status"]["conditions"] = reservation_observed(&victims, 55);
    bench.show(late);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    for _ in 0..3 {
        bench.advance_seconds(5);
        let written = bench.tick().await;
        let is_harmless = |write: &String| {
            write.starts_with("serving: waits")
                || ["serving: end hold", "job: stays"].contains(&write.as_str())
        };
        assert!(written.iter().all(is_harmless), "{written:?}");
    }
}

/// A reservation without victims is not written. One that is shown all the same is ended when the pod is bound.
#[tokio::test]
async fn a_binding_is_followed_by_a_write_only_where_a_condition_may_show_the_reservation() {
    let is_ended = |bench: &PlannerFixture| {
        let cluster = bench.state.cluster();
        assert!(
            cluster
                .ledger()
                .pod_state(&uid("serving"))
                .unwrap()
                .reservation()
                .is_some()
        );
        cluster.ledger().may_show_reservation(&uid("serving"))
    };
    let mut planned = PlannerFixture::new(&["n"]);
    planned.show(gated("serving", 50, 100));
    assert_eq!(
        planned.tick().await,
        ["serving: nominate n, placed", "serving: lift"]
    );
    assert!(!is_ended(&planned));

    let mut evicting = PlannerFixture::new(&["n"]);
    evicting.show(bound("job", "n", 60, -10));
    evicting.show(gated("serving", 50, 100));
    evicting.tick().await;
    assert!(is_ended(&evicting), "it is written before a pod is evicted");

    let mut adopted = PlannerFixture::new(&["n"]);
    adopted.take_over(shows_hold("serving", 100));
    assert!(is_ended(&adopted), "an earlier leader has written it");
}

/// As kube-scheduler asks.
fn filter(bench: &PlannerFixture, name: &str) {
    let mut cluster = bench.state.cluster();
    let demand = cluster
        .ledger()
        .pod_state(&uid(name))
        .unwrap()
        .demand
        .clone();
    let (key, waiting) = (
        PodKey::parse("default", name).unwrap(),
        ObservedWaiting::default(),
    );
    cluster.apply(FilterAsked(VerbRequest {
        uid: uid(name),
        key,
        demand,
        waiting,
        disruption: None,
    }));
}

/// Ticks for so many seconds, one a second, each after a request of kube-scheduler, and returns what was written.
async fn ticks(bench: &mut PlannerFixture, seconds: u64) -> Vec<String> {
    let mut written = Vec::new();
    for _ in 0..seconds {
        bench.advance_seconds(1);
        filter(bench, "late");
        written.extend(bench.tick().await);
    }
    written
}

#[tokio::test]
async fn a_reservation_whose_end_was_not_written_is_ended_again_while_the_pod_shows_it() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.take_over(shows_hold("late", 100));
    *bench.recorder.is_unreachable.lock() = true;
    bench.advance_seconds(61);
    assert!(bench.tick().await.contains(&"late: end hold".to_owned()));
    *bench.recorder.is_unreachable.lock() = false;
    assert_eq!(
        ticks(&mut bench, 15).await,
        ["late: end hold"],
        "once, and then the watch has time to show it"
    );
    bench.show(waiting("late", 50, 100));
    assert_eq!(ticks(&mut bench, 120).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_reservation_that_this_leader_wrote_lands_after_its_end_and_is_ended_again() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.take_over(shows_hold("late", 100));
    bench.advance_seconds(61);
    assert!(bench.tick().await.contains(&"late: end hold".to_owned()));
    bench.show(waiting("late", 50, 100));
    bench.show(shows_hold("late", 100));
    assert_eq!(ticks(&mut bench, 15).await, ["late: end hold"]);
}

/// The bind verb writes the end once, and the leader may have gone in between.
#[tokio::test]
async fn a_bound_pod_that_shows_a_reservation_gets_it_ended() {
    let mut placed = bound("late", "n", 50, 100);
    placed["status"]["conditions"] = reservation_observed(&[], 60);
    let mut bench = PlannerFixture::new(&["n"]);
    bench.take_over(placed);
    assert_eq!(
        bench.written_within(2).await,
        Vec::<String>::new(),
        "it may be on its way"
    );
    assert_eq!(
        bench.written_within(120).await,
        ["late: end hold"],
        "and then the watch shows it"
    );
}

/// Its message is of another version, or was edited.
#[tokio::test]
async fn a_reservation_that_cannot_be_read_is_ended() {
    for mut pod in [waiting("late", 50, 100), bound("late", "n", 50, 100)] {
        pod["status"]["conditions"] = json!([reserved(&json!({ "node": "n" }))]);
        let mut bench = PlannerFixture::new(&["n"]);
        bench.take_over(pod);
        let written = bench.written_within(60).await;
        assert_eq!(
            written
                .iter()
                .filter(|write| write.contains("end hold"))
                .count(),
            1,
            "{written:?}"
        );
    }
}

/// kube-scheduler asks about pods that have just been deleted: its watch lags, or the request does.
#[tokio::test]
async fn nothing_stays_reserved_for_a_pod_that_only_a_request_has_shown_and_that_is_gone() {
    let of_a_group = |name: &str| {
        let mut pod = waiting(name, 50, 100);
        pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/name"] = json!("llama");
        pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] = json!("0");
        pod["metadata"]["annotations"] = json!({ "leaderworkerset.sigs.k8s.io/size": "2" });
        pod
    };
    for (pods, expected) in [
        (vec![waiting("a", 50, 100)], vec!["a: nominate m, touch"]),
        (
            vec![of_a_group("a"), of_a_group("b")],
            vec!["a: nominate m, touch", "b: nominate n, touch"],
        ),
    ] {
        let mut bench = PlannerFixture::new(&["n", "m"]);
        bench
            .recorder
            .missing_pods
            .lock()
            .extend(["a".into(), "b".into()]);
        pods.into_iter().for_each(|pod| bench.refuse(pod));
        let mut written = Vec::new();
        for _ in 0..4 {
            bench.advance_seconds(2);
            written.extend(bench.tick_without_watch().await);
        }
        assert_eq!(written, expected);
        let totals = bench.state.cluster().ledger().totals();
        assert_eq!(
            (totals.reservations, totals.waiting),
            (0, 0),
            "{expected:?}"
        );
    }
}
