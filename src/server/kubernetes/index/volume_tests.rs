//! Pods with persistent volume claims: kube-scheduler's verdict is known where their volumes are.

use crate::kubernetes::dump::{Dump, DumpControlPlane};
use crate::kubernetes::index::ClusterIndex;
use crate::service::ServerState;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use stowage_scheduling::explaining::{ShownNodes, explain};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{
    AssumedNodeChange, FilterReason, FilterVerdict, UnsupportedRule,
};
use stowage_scheduling::policy::Policy;

fn node(name: &str, zone: &str) -> Value {
    json!({
        "kind": "Node",
        "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone,
        } },
        "status": { "allocatable": { "pods": "110", "cpu": "64", "memory": "512Gi" } },
    })
}

fn pod_with_claim(claim: &str) -> Value {
    json!({
        "kind": "Pod",
        "metadata": { "name": "engine", "namespace": "team", "uid": "1" },
        "spec": {
            "containers": [{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "40Gi" } } }],
            "volumes": [{ "name": "weights", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

fn bound_claim(volume: &str) -> Value {
    json!({
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "weights", "namespace": "team",
            "annotations": { "pv.kubernetes.io/bind-completed": "yes" },
        },
        "spec": { "volumeName": volume, "accessModes": ["ReadWriteMany"], "storageClassName": "disks" },
        "status": { "phase": "Bound" },
    })
}

fn volume(name: &str, label: &str, values: &[&str]) -> Value {
    let term =
        json!({ "matchExpressions": [{ "key": label, "operator": "In", "values": values }] });
    json!({
        "kind": "PersistentVolume",
        "metadata": { "name": name },
        "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [term] } } },
    })
}

fn unbound_claim(class: &str) -> Value {
    json!({
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": "weights", "namespace": "team" },
        "spec": { "accessModes": ["ReadWriteOnce"], "storageClassName": class },
        "status": { "phase": "Pending" },
    })
}

fn class(name: &str, provisioner: &str, zone: Option<&str>) -> Value {
    let topologies = zone.map(|zone| {
        let rule = json!({ "key": "topology.kubernetes.io/zone", "values": [zone] });
        json!([{ "matchLabelExpressions": [rule] }])
    });
    json!({
        "kind": "StorageClass", "metadata": { "name": name }, "provisioner": provisioner,
        "volumeBindingMode": "WaitForFirstConsumer", "allowedTopologies": topologies,
    })
}

/// A cluster of these objects, and of nodes `a`, `b` and `c`, in zones east, west and west.
fn loaded(objects: &[Value]) -> Arc<ServerState> {
    let nodes = [node("a", "east"), node("b", "west"), node("c", "west")];
    let items: Vec<&Value> = nodes.iter().chain(objects).collect();
    let dump = Dump::from_text(
        json!({ "kind": "List", "items": items }).to_string(),
        Path::new("dump"),
    );
    let state = ServerState::new(Policy::default());
    DumpControlPlane::load(&dump, &state, &mut ClusterIndex::default()).unwrap();
    state
}

/// What kube-scheduler's filters say of the pod on each node.
fn verdicts(objects: &[Value]) -> Vec<FilterVerdict> {
    let state = loaded(objects);
    let cluster = state.cluster();
    let uid = PodUid::parse("1").unwrap();
    let wants = cluster.kube_filters().requirements_of(&uid).unwrap();
    let query = cluster.kube_filters().query(Some(&uid), wants);
    let verdict = |name| {
        query.verdict(
            &NodeName::parse(name).unwrap(),
            &AssumedNodeChange::default(),
        )
    };
    ["a", "b", "c"].map(verdict).into()
}

#[test]
fn a_bound_claim_is_evaluated_by_the_node_affinity_of_its_volume() {
    let in_west = volume("pv-1", "topology.kubernetes.io/zone", &["west"]);
    let verdicts = verdicts(&[pod_with_claim("weights"), bound_claim("pv-1"), in_west]);
    assert_eq!(
        verdicts[1..],
        [FilterVerdict::Accepts, FilterVerdict::Accepts]
    );
    assert!(
        matches!(verdicts[0], FilterVerdict::Rejects(_)),
        "{:?}",
        verdicts[0]
    );
    assert!(!matches!(
        verdicts[0],
        FilterVerdict::Rejects(FilterReason::UnknownNode)
    ));
}

#[test]
fn an_unbound_claim_is_evaluated_by_its_class_unless_that_provisions_nothing() {
    let pod = || pod_with_claim("weights");
    let elsewhere = FilterVerdict::Rejects(FilterReason::VolumeElsewhere);
    let east = class("disks", "disk.example.com", Some("east"));
    assert_eq!(
        verdicts(&[pod(), unbound_claim("disks"), east]),
        [FilterVerdict::Accepts, elsewhere.clone(), elsewhere]
    );
    let local = class("local", "kubernetes.io/no-provisioner", None);
    let unsupported = FilterVerdict::Unsupported(UnsupportedRule::VolumeNotProvisioned);
    assert_eq!(
        verdicts(&[pod(), unbound_claim("local"), local]),
        [unsupported.clone(), unsupported.clone(), unsupported]
    );
}

#[test]
fn what_is_not_supported_is_explained() {
    let mut pod = pod_with_claim("weights");
    let claim = |n: u8| json!({ "name": format!("v-{n}"), "persistentVolumeClaim": { "claimName": format!("c-{n}") } });
    let unsupported = |objects: &[Value]| {
        let state = loaded(objects);
        let explanation = explain(
            &mut state.cluster_copy(),
            &PodUid::parse("1").unwrap(),
            &ShownNodes::default(),
        );
        let parts = explanation.unwrap().unsupported.into_iter();
        parts
            .map(|part| (part.rule, part.nodes))
            .collect::<Vec<_>>()
    };
    let disks = || class("disks", "disk.example.com", None);
    assert_eq!(
        unsupported(&[pod.clone(), unbound_claim("disks"), disks()]),
        []
    );
    assert_eq!(
        unsupported(&[pod.clone()]),
        [("volume-unknown".to_owned(), 3)]
    );
    pod["spec"]["volumes"] = (0..9).map(claim).collect();
    let claims = (0..9).map(|n| {
        let mut claim = unbound_claim("disks");
        claim["metadata"]["name"] = json!(format!("c-{n}"));
        claim
    });
    let objects: Vec<Value> = claims.chain([pod, disks()]).collect();
    assert_eq!(
        unsupported(&objects),
        [("attach-limit".to_owned(), 3)],
        "limits of CSI drivers are not read"
    );
}
