//! What one pod event costs: evaluated expressions, and locks. Eighty thousand pods show themselves whenever their status changes.

use super::*;
use crate::service::PODS_VISITED_UNDER_LOCK;
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_scheduling::policy::expression::evaluations;
use stowage_scheduling::policy::{
    Class, Consolidation, Expression, Match, NamespaceSelector, Policy,
};
use stowage_scheduling::units::Millis;

/// Node `a` with two GPUs, and a policy that asks every pod one expression.
fn watched() -> (Arc<ServerState>, ClusterIndex) {
    let expression = Expression::compile("pod.labels['tier'] == 'gold'").ok();
    let gold = Class {
        matches: Match {
            expression,
            ..Match::default()
        },
        ..Class::new("gold")
    };
    let policy = Policy::default()
        .with_classes(vec![gold, Class::new("rest")])
        .unwrap();
    let (state, mut index) = (ServerState::new(policy), ClusterIndex::default());
    let labels = json!({
        "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
    });
    let node = json!({ "metadata": { "name": "a", "labels": labels }, "status": {} });
    index.replace_nodes(&state, &[serde_json::from_value(node).unwrap()]);
    (state, index)
}

/// A replica of one workload, bound to a GPU.
fn replica(uid: &str) -> Value {
    json!({
        "metadata": {
            "name": uid, "namespace": "team-a", "uid": uid, "labels": { "tier": "gold" },
            "annotations": { "stowage.dev/devices": "index-0", "stowage.dev/vram-granted": (1u64 << 30).to_string() },
        },
        "spec": {
            "nodeName": "a",
            "containers": [{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "1Gi" } } }],
        },
        "status": { "phase": "Running" },
    })
}

fn apply(index: &mut ClusterIndex, state: &ServerState, pod: &Value) {
    index.apply_pod(state, &serde_json::from_value(pod.clone()).unwrap());
}

#[test]
fn replicas_of_one_workload_and_their_events_are_classified_once() {
    let (state, mut index) = watched();
    let before = evaluations::so_far();
    for uid in ["1", "2", "3"] {
        apply(&mut index, &state, &replica(uid));
    }
    apply(&mut index, &state, &replica("2"));
    assert_eq!(evaluations::so_far() - before, 1);
    let class = |uid: &str| {
        let cluster = state.cluster();
        let class = cluster
            .ledger()
            .pod_state(&PodUid::parse(uid).unwrap())
            .unwrap()
            .demand
            .class;
        cluster.ledger().policy().class(class).name.clone()
    };
    assert_eq!(["1", "2", "3"].map(class), ["gold"; 3]);
}

#[test]
fn a_bound_pods_event_locks_the_cluster_once_and_the_audit_once() {
    let (state, mut index) = watched();
    apply(&mut index, &state, &replica("1"));
    let before = state.locks_taken();
    apply(&mut index, &state, &replica("1"));
    assert_eq!(state.locks_taken() - before, 2);
}

#[test]
fn a_list_skips_a_bound_pod_that_has_not_changed_since_it_was_applied() {
    let (state, mut index) = watched();
    let listed = |version: u64, gib: u64| {
        let mut pod = replica("1");
        pod["metadata"]["resourceVersion"] = json!(version.to_string());
        pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!((gib << 30).to_string());
        serde_json::from_value(pod).unwrap()
    };
    // The audit is asked by every pod that is applied.
    let mut locks_of = |pod: &Pod| {
        let before = state.locks_taken();
        index.replace_pods(&state, std::slice::from_ref(pod));
        state.locks_taken() - before
    };
    let (first, again) = (locks_of(&listed(1, 1)), locks_of(&listed(1, 1)));
    assert_eq!(
        again,
        first - 1,
        "the cluster is asked whether it has the pod"
    );
    assert_eq!(locks_of(&listed(2, 1)), first, "it has changed");
    state.set_policy(
        Policy::default()
            .with_classes(vec![Class::new("another")])
            .unwrap(),
    );
    assert_eq!(locks_of(&listed(2, 1)), again);
    let class = |cluster: &Ledger| {
        let pod = cluster.pod_state(&PodUid::parse("1").unwrap()).unwrap();
        cluster.policy().class(pod.demand.class).name.clone()
    };
    assert_eq!(class(state.cluster().ledger()), "another");
    state
        .cluster()
        .apply(PodDeleted(PodUid::parse("1").unwrap()));
    assert_eq!(locks_of(&listed(2, 1)), first + 1, "the ledger lacks it");
    assert!(
        state
            .cluster()
            .ledger()
            .pod_state(&PodUid::parse("1").unwrap())
            .is_some()
    );
}

#[test]
fn a_list_reads_a_bound_pod_again_once_the_policy_moves_pods() {
    let (state, mut index) = watched();
    let mut pod = replica("1");
    pod["metadata"]["resourceVersion"] = json!("1");
    let pod: Pod = serde_json::from_value(pod).unwrap();
    index.replace_pods(&state, std::slice::from_ref(&pod));
    let uid = PodUid::parse("1").unwrap();
    let successor_is_known = || {
        state
            .cluster()
            .kube_filters()
            .successor_requirements(&uid)
            .is_some()
    };
    assert!(!successor_is_known(), "nothing asks for it");
    let mut policy = Policy::default();
    policy.planning.consolidation = Some(Consolidation {
        gain: Millis::seconds(600),
    });
    state.set_policy(policy);
    index.replace_pods(&state, std::slice::from_ref(&pod));
    assert!(successor_is_known());
}

#[test]
fn a_label_of_a_namespace_goes_through_no_pods_under_the_lock() {
    const PODS: usize = 200;
    let (state, mut index) = watched();
    let namespace = |team: &str| {
        serde_json::from_value(json!({ "name": "team-a", "labels": { "team": team } }))
    };
    index.add_listed_namespace(&namespace("red").unwrap());
    state.record_namespaces(index.take_listed_namespaces());
    index.end_namespace_list();
    let blue = NamespaceSelector {
        match_labels: [("team".into(), "blue".into())].into(),
        ..Default::default()
    };
    let matches = Match {
        namespace_selector: Some(blue),
        ..Match::default()
    };
    let classes = vec![
        Class {
            matches,
            ..Class::new("blue")
        },
        Class::new("rest"),
    ];
    assert!(state.set_policy(Policy::default().with_classes(classes).unwrap()));
    (0..PODS).for_each(|pod| apply(&mut index, &state, &replica(&pod.to_string())));
    let looked_at = || PODS_VISITED_UNDER_LOCK.get();
    let before = looked_at();
    namespaces::apply(&state, &namespace("blue").unwrap());
    let under_lock = looked_at() - before;
    let cluster = state.cluster();
    let class = cluster
        .ledger()
        .pod_state(&PodUid::parse("7").unwrap())
        .unwrap()
        .demand
        .class;
    assert_eq!(cluster.ledger().policy().class(class).name, "blue");
    assert!(
        under_lock < PODS / 4,
        "{under_lock} pods were looked at under the lock"
    );
}
