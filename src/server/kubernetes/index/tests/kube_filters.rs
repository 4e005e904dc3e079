//! What the index brings to the view of kube-scheduler's own filters.

use super::*;
use stowage_scheduling::kube_filters::{AssumedNodeChange, FilterVerdict, Requirements};

/// Node `a` takes one pod; whether it would take another one.
fn takes_one_more(bench: &IndexFixture) -> bool {
    let (uid, node) = (uid_of("new"), NodeName::parse("a").unwrap());
    let kube_filters = bench.state.cluster().kube_filters().snapshot();
    kube_filters.verdict(
        &uid,
        &Requirements::default(),
        &node,
        &AssumedNodeChange::default(),
    ) == FilterVerdict::Accepts
}

fn with_room_for_one_pod() -> IndexFixture {
    let mut bench = IndexFixture::new();
    let mut only = node("a", 2);
    only.status = Some(read(json!({ "allocatable": { "pods": "1" } })));
    bench.index.apply_node(&bench.state, &only);
    bench
}

fn without_gpu(uid: &str, phase: &str) -> Value {
    json!({
        "metadata": { "name": uid, "namespace": "team-a", "uid": uid },
        "spec": { "nodeName": "a", "containers": [] },
        "status": { "phase": phase },
    })
}

#[test]
fn a_pod_without_a_gpu_counts_for_the_kube_filters_until_it_ends_or_is_gone() {
    let mut bench = with_room_for_one_pod();
    assert!(takes_one_more(&bench));
    bench.apply(&without_gpu("web", "Running"));
    assert!(!takes_one_more(&bench));
    bench.apply(&without_gpu("web", "Succeeded"));
    assert!(takes_one_more(&bench));
    bench.apply(&without_gpu("web", "Running"));
    bench
        .index
        .delete_pod(&bench.state, &read(without_gpu("web", "Running")));
    assert!(takes_one_more(&bench));
    assert!(
        bench.state.cluster().ledger().pod_states().is_empty(),
        "the ledger is not bothered"
    );
}

#[test]
fn a_pod_that_a_new_list_does_not_have_is_gone_from_the_kube_filters() {
    let mut bench = with_room_for_one_pod();
    bench.apply(&without_gpu("web", "Running"));
    bench.index.replace_pods(&bench.state, &[]);
    assert!(takes_one_more(&bench));
    assert_eq!(bench.state.cluster().kube_filters().pods().count(), 0);
}

#[test]
fn the_requirements_of_a_pending_pod_are_known_until_it_is_bound() {
    let mut bench = with_room_for_one_pod();
    bench.apply(&pod("p", "1", 10));
    assert!(
        bench
            .state
            .cluster()
            .kube_filters()
            .requirements_of(&uid_of("1"))
            .is_some()
    );
    bench.apply(&bound("p", "1", 10, "a", Some("index-0")));
    assert!(
        bench
            .state
            .cluster()
            .kube_filters()
            .requirements_of(&uid_of("1"))
            .is_none()
    );
    assert!(!takes_one_more(&bench));
    // Its name stands for another pod now.
    bench.apply(&pod("p", "2", 10));
    assert!(takes_one_more(&bench));
}

#[test]
fn a_node_that_is_gone_accepts_no_pod() {
    let mut bench = with_room_for_one_pod();
    bench.index.delete_node(&bench.state, &node("a", 2));
    assert!(!takes_one_more(&bench));
}
