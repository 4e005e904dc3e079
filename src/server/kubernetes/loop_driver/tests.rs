//! The planner's acts, one tick at a time, against a control plane that records each call.

mod deadlines;
mod earlier_reservations;
mod ended_members;
mod evictions;
mod fixture;
mod gangs;
mod gates;
mod limits;
mod loans;
mod reservations_observed;
mod runs;
mod told;
mod unequal_gpus;
mod victims;
mod volumes;

use super::*;
use crate::kubernetes::index::ClusterIndex;
use crate::kubernetes::testing::Recorder;
use crate::service::Tenure;
use fixture::*;
use serde_json::{Value, json};
use stowage_kubernetes_objects as objects;
use stowage_scheduling::control_loop::{EvictionOutcome, UNPLANNABLE_PER_TICK};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::{Mode, Policy};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterAsked, FilterDecided};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::vocabulary::placement::Reservation;

#[tokio::test]
async fn a_gated_pod_is_nominated_and_let_through() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 40, 0));
    assert_eq!(bench.tick().await, ["a: nominate n, placed", "a: lift"]);
    assert!(bench.tick().await.is_empty(), "the watch will show it");
    assert_eq!(
        bench.state.cluster().ledger().totals().reservations,
        1,
        "the room is its own until it is bound"
    );
}

#[tokio::test]
async fn a_pod_under_another_gate_too_is_left_alone() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 40, 0);
    pod["spec"]["schedulingGates"] = json!([{ "name": "stowage.dev/plan" }, { "name": "quota" }]);
    bench.show(pod);
    assert!(bench.tick().await.is_empty());
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn victims_are_evicted_once_the_reservation_is_written_and_the_pod_is_nominated_once_they_are_gone()
 {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    assert!(bench.tick().await.is_empty(), "it has been told once");
    let mut leaving = bench.pod("job");
    leaving["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    leaving["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    bench.show(leaving);
    assert!(bench.tick().await.is_empty(), "it takes its time");
    bench.delete("job");
    assert_eq!(
        bench.tick().await,
        ["serving: nominate n, placed", "serving: lift"]
    );
}

#[tokio::test]
async fn a_reservation_that_cannot_be_written_evicts_no_pod() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    *bench.recorder.is_unreachable.lock() = true;
    assert_eq!(
        bench.tick().await,
        [
            "serving: hold n, making room",
            "serving: end hold, clear nomination"
        ]
    );
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    assert_eq!(
        bench.recorder.event_reasons(),
        ["StowageReserved", "StowageReservationEnded"]
    );
}

#[tokio::test]
async fn an_eviction_that_a_budget_refuses_is_retried_with_back_off() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), EvictionOutcome::TryLater { after: None });
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    assert!(bench.tick().await.is_empty(), "not at once");
    bench.advance_seconds(1);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    bench.advance_seconds(120);
    assert_eq!(
        bench.state.cluster().ledger().totals().reservations,
        0,
        "and not forever"
    );
    let written = bench.tick().await;
    assert!(
        written.contains(&"serving: end hold".to_owned()),
        "{written:?}"
    );
}

#[tokio::test]
async fn an_eviction_that_is_refused_for_good_ends_the_reservation_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    let refused = EvictionOutcome::Refused {
        message: "forbidden".into(),
    };
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), refused);
    bench.tick().await;
    assert_eq!(
        bench.tick().await,
        [
            "job: evict Preempted",
            "serving: end hold, clear nomination"
        ]
    );
    assert!(
        bench
            .written_within(15)
            .await
            .contains(&"job: stays".to_owned())
    );
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn a_nomination_that_the_scheduler_clears_is_restored_three_times_and_no_more() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 40, 0));
    bench.tick().await;
    bench.show(waiting("a", 40, 0));
    let mut restored = 0;
    for _ in 0..20 {
        bench.advance_seconds(1);
        // What the scheduler clears at once no watch shows.
        let written = bench.tick_without_watch().await;
        restored += written
            .iter()
            .filter(|write| write.starts_with("a: nominate"))
            .count();
    }
    assert_eq!(restored, 2, "beside the first");
}

#[tokio::test]
async fn a_gated_pod_without_a_place_is_let_through_after_half_a_minute_with_the_reason() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    bench.show(gated("a", 50, 0));
    assert!(bench.tick().await.is_empty());
    bench.advance_seconds(31);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
    assert_eq!(bench.recorder.event_reasons(), ["StowagePlanFailed"]);
}

#[tokio::test]
async fn a_gated_pod_that_is_not_supported_is_let_through_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 50, 0);
    pod["spec"]["volumes"] =
        json!([{ "name": "data", "awsElasticBlockStore": { "volumeID": "disk" } }]);
    bench.show(pod);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn the_reservation_of_a_deleted_pod_is_released() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.tick().await;
    bench.delete("a");
    bench.show(gated("b", 50, 0));
    assert_eq!(bench.tick().await, ["b: nominate n, placed", "b: lift"]);
}

#[tokio::test]
async fn two_pods_that_want_one_gpu_do_not_both_get_it() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("first", 50, 100));
    bench.show(gated("second", 50, 100));
    let mut written = bench.tick().await;
    for _ in 0..3 {
        bench.advance_seconds(1);
        written.extend(bench.tick().await);
    }
    written.retain(|write| write.contains("hold"));
    assert_eq!(written, ["first: hold n, making room"]);
}

#[tokio::test]
async fn a_group_with_a_member_not_bound_in_time_is_released_with_one_event() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(member("a", 50, "pair", 2));
    bench.show(member("b", 50, "pair", 2));
    let written = bench.tick().await;
    assert_eq!(
        written
            .iter()
            .filter(|write| write.ends_with("lift"))
            .count(),
        2,
        "{written:?}"
    );
    for name in ["a", "b"] {
        let mut released = bench.pod(name);
        released["spec"]["schedulingGates"] = Value::Null;
        bench.show(released);
    }
    bench.recorder.event_reasons();
    bench.advance_seconds(31);
    bench.tick().await;
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    let told = bench.recorder.event_reasons();
    assert_eq!(
        told.iter()
            .filter(|reason| **reason == "StowageGroupFailed")
            .count(),
        1,
        "{told:?}"
    );
}

#[tokio::test]
async fn a_node_that_is_lost_after_the_eviction_leaves_no_reservation() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    bench.tick().await;
    bench.delete("job");
    bench.index.replace_nodes(&bench.state, &[]);
    let written = bench.tick().await;
    assert!(
        written.iter().all(|write| !write.contains("nominate")),
        "{written:?}"
    );
    bench.advance_seconds(120);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn no_pod_is_evicted_that_would_not_terminate_in_time() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), EvictionOutcome::TryLater { after: None });
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    bench.advance_seconds(45);
    bench.recorder.eviction_outcomes.lock().clear();
    let written = bench.tick().await;
    assert_eq!(written[..1], ["serving: end hold, clear nomination"]);
    assert!(
        written.iter().all(|write| !write.contains("evict")),
        "{written:?}"
    );
    assert!(
        bench
            .written_within(15)
            .await
            .contains(&"job: stays".to_owned())
    );
}

#[tokio::test]
async fn the_gate_of_an_unplannable_pod_is_lifted_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut other = gated("other", 40, 0);
    other["spec"]["containers"][0]["resources"] = json!({});
    let mut unclear = gated("unclear", 40, 0);
    unclear["metadata"]["annotations"] = json!({ "stowage.dev/gpus": "none" });
    bench.show(other.clone());
    bench.show(unclear);
    bench.collect_unplannable_pods();
    let written = bench.tick().await;
    for line in [
        "other: released",
        "other: lift",
        "unclear: released",
        "unclear: lift",
    ] {
        assert!(written.iter().any(|written| written == line), "{written:?}");
    }
    bench.collect_unplannable_pods();
    assert!(bench.tick().await.is_empty(), "the watch will show it");
    bench.advance_seconds(11);
    bench.collect_unplannable_pods();
    assert_eq!(bench.tick().await.len(), 4, "it did not");
    other["spec"]["schedulingGates"] = Value::Null;
    bench.show(other);
    bench.delete("unclear");
    assert!(bench.index.unplannable_pods_after(None, 1).is_empty());
}

#[tokio::test]
async fn each_tick_handles_a_limited_number_of_unplannable_pods_in_turn() {
    let mut bench = PlannerFixture::new(&["n"]);
    for n in 0..UNPLANNABLE_PER_TICK + 40 {
        let mut unplannable_pod = gated(&format!("unplannable-{n:03}"), 40, 0);
        unplannable_pod["spec"]["containers"][0]["resources"] = json!({});
        bench.show(unplannable_pod);
    }
    let lifted = |written: Vec<String>| {
        written
            .iter()
            .filter(|write| write.ends_with("lift"))
            .count()
    };
    let mut looks = Vec::new();
    for _ in 0..4 {
        bench.collect_unplannable_pods();
        looks.push(lifted(bench.tick().await));
    }
    assert_eq!(looks, [UNPLANNABLE_PER_TICK, 40, 0, 0]);
    bench.delete("unplannable-007");
    bench.collect_unplannable_pods();
    bench.begin_tick();
    assert_eq!(
        bench.planner.control_loop.released_count(),
        UNPLANNABLE_PER_TICK + 39,
        "a pod that is gone is forgotten"
    );
}

#[tokio::test]
async fn a_gated_pod_that_asks_a_device_plugin_is_let_through_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 40, 0);
    pod["spec"]["containers"][0]["resources"] = json!({ "limits": { "nvidia.com/gpu": "1" } });
    bench.show(pod);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn in_shadow_mode_no_pod_stays_behind_the_gate() {
    let mut policy = Policy::default();
    policy.mode = Mode::Shadow;
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    bench.show(gated("a", 40, 0));
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn a_deleted_pod_with_a_finalizer_gets_nothing_and_loses_its_reservation() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.tick().await;
    let mut ending = bench.pod("a");
    ending["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    ending["metadata"]["finalizers"] = json!(["batch.kubernetes.io/job-tracking"]);
    bench.show(ending);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
    assert!(bench.tick().await.is_empty());
}
