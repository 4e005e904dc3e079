//! Slices as the watch brings them: relists, and what pods are told.

use crate::kubernetes::index::ClusterIndex;
use crate::service::ServerState;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::json;
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::node::NodeKind;

fn node(name: &str) -> Node {
    let labels = json!({
        "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
    });
    serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } })).unwrap()
}

fn pod(name: &str, on: &str) -> Pod {
    let container =
        json!({ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "40Gi" } } });
    serde_json::from_value(json!({
        "metadata": { "name": name, "namespace": "team", "uid": name,
                      "annotations": { "stowage.dev/devices": "index-0" } },
        "spec": { "nodeName": on, "containers": [container] },
    }))
    .unwrap()
}

fn slice(name: &str, node: &str) -> ResourceSlice {
    serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": node,
            "pool": { "name": name, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0" }],
        },
    }))
    .unwrap()
}

fn kind(state: &ServerState, name: &str) -> NodeKind {
    let name = stowage_scheduling::ids::NodeName::parse(name).unwrap();
    state.cluster().ledger().node(&name).unwrap().kind
}

#[test]
fn pods_on_a_node_whose_gpus_a_driver_publishes_get_one_event() {
    let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
    index.replace_nodes(&state, &[node("a"), node("b")]);
    index.replace_pods(&state, &[pod("engine", "a")]);
    let events = index.apply_slice(&state, &slice("s", "a"));
    let told: Vec<_> = events
        .iter()
        .map(|event| (event.key.to_string(), event.kind))
        .collect();
    assert_eq!(
        told,
        [("team/engine".to_owned(), PodEventReason::PublishedByDra)]
    );
    assert!(index.apply_slice(&state, &slice("s", "a")).is_empty());
    assert_eq!(
        index.current_warning_events(&state).len(),
        1,
        "another leader tells it again"
    );
    assert!(
        index.apply_slice(&state, &slice("t", "b")).is_empty(),
        "no pod is there"
    );
    assert_eq!([kind(&state, "a"), kind(&state, "b")], [NodeKind::Dra; 2]);
}

#[test]
fn slices_that_a_new_list_does_not_show_are_gone() {
    let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
    index.replace_nodes(&state, &[node("a"), node("b")]);
    index.apply_slice(&state, &slice("s", "a"));
    index.begin_slice_list(&state);
    index.apply_slice(&state, &slice("t", "b"));
    assert_eq!(
        kind(&state, "a"),
        NodeKind::Dra,
        "the list is not at its end"
    );
    index.end_slice_list(&state);
    assert_eq!(
        [kind(&state, "a"), kind(&state, "b")],
        [NodeKind::Stowage, NodeKind::Dra]
    );
}

#[test]
fn a_server_without_slices_is_as_complete_as_one_that_has_listed_them() {
    let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
    index.replace_nodes(&state, &[node("a")]);
    index.replace_pods(&state, &[]);
    index.begin_budget_list(&state);
    index.end_budget_list(&state);
    assert_eq!(
        index.synced_term(),
        None,
        "a GPU is not promised before slices are known"
    );
    index.mark_slices_not_served();
    assert_eq!(index.synced_term(), Some(0));
    index.expect_slice_list(1);
    assert_eq!(index.synced_term(), None, "another term asks again");
}

/// kube-scheduler looks at the slices of one node at a time: a generation on another node makes none of them out of date.
#[test]
fn a_driver_that_calls_its_pool_the_same_on_every_node_keeps_all_its_nodes() {
    let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
    index.replace_nodes(&state, &[node("a"), node("b")]);
    let of_pool = |name: &str, node: &str, generation: i64| {
        let mut slice = slice(name, node);
        slice.spec.pool.name = "gpus".into();
        slice.spec.pool.generation = generation;
        slice
    };
    index.apply_slice(&state, &of_pool("s", "a", 1));
    index.apply_slice(&state, &of_pool("t", "b", 2));
    assert_eq!([kind(&state, "a"), kind(&state, "b")], [NodeKind::Dra; 2]);
    let mut empty = of_pool("u", "a", 2);
    empty.spec.devices = None;
    index.apply_slice(&state, &empty);
    assert_eq!(
        [kind(&state, "a"), kind(&state, "b")],
        [NodeKind::Stowage, NodeKind::Dra]
    );
}

/// Its claim is made by kube-scheduler, for a resource such as `nvidia.com/gpu` that a DeviceClass stands for.
#[test]
fn a_pod_that_has_a_device_by_an_extended_resource_keeps_its_node_the_drivers() {
    let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
    index.replace_nodes(&state, &[node("a")]);
    index.apply_slice(&state, &slice("s", "a"));
    let container =
        json!({ "name": "engine", "resources": { "limits": { "nvidia.com/gpu": "1" } } });
    let by_resource = json!({
        "metadata": { "name": "engine", "namespace": "team", "uid": "1" },
        "spec": { "nodeName": "a", "containers": [container] },
        "status": { "extendedResourceClaimStatus": {
            "resourceClaimName": "engine-extended-resources-1",
            "requestMappings": [{ "containerName": "engine", "resourceName": "nvidia.com/gpu", "requestName": "r" }],
        } },
    });
    index.apply_pod(
        &state,
        &serde_json::from_value(by_resource.clone()).unwrap(),
    );
    index.delete_slice(&state, &slice("s", "a"));
    assert_eq!(
        kind(&state, "a"),
        NodeKind::Dra,
        "the driver restarts, and the pod has its GPU"
    );
    index.delete_pod(&state, &serde_json::from_value(by_resource).unwrap());
    assert_eq!(kind(&state, "a"), NodeKind::Stowage);
}
