//! The conditions and Events that show pods the planner's progress.

use super::*;
use stowage_scheduling::control_loop::FreshPod;

#[tokio::test]
async fn the_condition_of_a_gated_pod_without_a_placement_gets_the_reason_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    bench.show(gated("a", 50, 0));
    assert_eq!(
        bench.tick().await,
        Vec::<String>::new(),
        "most have a place a moment later"
    );
    bench.advance_seconds(3);
    let told = bench.tick().await;
    assert!(
        told.len() == 1
            && told[0]
                .starts_with("a: waits: no node that matches the pod's constraints can take it"),
        "{told:?}"
    );
    for _ in 0..4 {
        bench.advance_seconds(5);
        assert_eq!(bench.tick().await, Vec::<String>::new());
    }
}

#[tokio::test]
async fn the_condition_of_a_group_changes_with_the_reason_and_at_most_twice_a_minute() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(member("a", 50, "pair", 2));
    bench.advance_seconds(3);
    assert_eq!(
        bench.tick().await,
        ["a: waits: not all pods of its group exist"]
    );
    bench.show(member("b", 50, "pair", 2));
    bench.advance_seconds(5);
    assert_eq!(
        bench.tick().await,
        ["b: waits: not all pods of its group can be placed"]
    );
    bench.advance_seconds(26);
    assert_eq!(
        bench.tick().await,
        ["a: waits: not all pods of its group can be placed"]
    );
}

#[tokio::test]
async fn a_planned_pod_that_the_scheduler_does_not_take_keeps_its_reason() {
    let said = "0/1 nodes are available: 1 Insufficient cpu.";
    let record = |node: Option<&str>| FreshPod {
        uid: uid("a"),
        node: node.map(|node| stowage_scheduling::ids::NodeName::parse(node).unwrap()),
        devices: None,
        has_started: false,
        is_over: false,
        borrows: false,
        refusal: Some(said.into()),
    };
    for (record, expected) in [
        (
            Some(record(None)),
            format!("a: end hold, refused on n: {said}"),
        ),
        (
            Some(FreshPod {
                refusal: None,
                ..record(None)
            }),
            "a: end hold, refused on n: it was not bound there in time".into(),
        ),
        (Some(record(Some("n"))), "a: end hold".into()),
        (None, "a: end hold".into()),
    ] {
        let mut bench = PlannerFixture::new(&["n"]);
        bench.show(gated("a", 40, 0));
        bench.tick().await;
        bench.show(waiting("a", 40, 0));
        bench
            .recorder
            .pods_on_record
            .lock()
            .extend(record.map(|record| ("a".to_owned(), record)));
        bench.advance_seconds(31);
        let written = bench.tick().await;
        assert!(written.contains(&expected), "{expected}: {written:?}");
    }
}
