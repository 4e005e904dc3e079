//! An agent that changes its list of GPUs with every report: what it costs everyone else.

use super::*;
use crate::extender::request::RequestLimits;
use crate::kubernetes::testing::Recorder;
use crate::service::ServerState;
use serde_json::{Value, json};
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ledger::PODS_LOOKED_AT;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::observe::{NodeObserved, PodObserved};
use stowage_scheduling::vocabulary::node::NodeKind;

const NODES: usize = 200;
const PODS_PER_NODE: usize = 8;

fn name(node: usize) -> NodeName {
    NodeName::parse(&format!("node-{node}")).unwrap()
}

fn gpu(index: usize) -> Value {
    json!({ "uuid": format!("GPU-{index}"), "index": index, "model": "H100", "totalBytes": 80u64 << 30 })
}

fn report(sequence: u64, gpus: usize) -> String {
    let gpus: Vec<Value> = (0..gpus).map(gpu).collect();
    json!({ "node": "node-0", "bootId": "boot", "sequence": sequence, "ageMillis": 0, "gpus": gpus })
        .to_string()
}

fn bound(node: usize, slot: usize) -> k8s_openapi::api::core::v1::Pod {
    let name = format!("pod-{node}-{slot}");
    let pod = json!({
        "metadata": { "name": name, "namespace": "team-a", "uid": name, "annotations": {
            "stowage.dev/devices": format!("GPU-{}", slot % 2), "stowage.dev/vram-granted": (1u64 << 30).to_string(),
        } },
        "spec": { "nodeName": format!("node-{node}"), "containers": [{
            "name": "engine", "resources": { "limits": { "stowage.dev/vram": "1Gi" } },
        }] },
    });
    serde_json::from_value(pod).unwrap()
}

/// Every node has eight pods, spread over two GPUs of which its record names one.
fn crowded() -> Extender {
    let state = ServerState::with_stopped_clock(Policy::default());
    state.lead_from_the_start();
    let mut cluster = state.cluster();
    for node in 0..NODES {
        cluster.apply(NodeObserved::new(name(node), NodeKind::Stowage));
        for slot in 0..PODS_PER_NODE {
            let pod = bound(node, slot);
            let seen = objects::observation(
                &pod,
                cluster.ledger().policy(),
                None,
                jiff::Timestamp::UNIX_EPOCH,
            );
            cluster.apply(PodObserved(seen.unwrap()));
        }
    }
    drop(cluster);
    Extender::new(
        state,
        std::sync::Arc::new(Recorder::default()),
        RequestLimits::default(),
    )
}

fn take_report(extender: &Extender, text: &str) -> ReportsResult {
    reports(
        extender,
        &Sender::Anyone,
        extender.state.now(),
        text.as_bytes(),
    )
    .unwrap()
}

#[test]
fn a_change_of_one_nodes_gpus_visits_only_the_pods_of_that_node() {
    let extender = crowded();
    assert_eq!(take_report(&extender, &report(1, 2)).accepted, 1);
    PODS_LOOKED_AT.set(0);
    assert_eq!(take_report(&extender, &report(2, 1)).accepted, 1);
    let looked_at = PODS_LOOKED_AT.get();
    // Each of the node's pods several times, and none of the other 1,600.
    assert!(
        looked_at <= 20 * PODS_PER_NODE,
        "{looked_at} entries were looked at"
    );
}
