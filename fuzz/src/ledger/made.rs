//! The API objects of the race, made from a few numbers, and what a Binding does to a pod.

use super::{ApiPod, NODES};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, GpuUuid, LeaderEpoch, ModelId, NodeName, PodUid};
use stowage_scheduling::units::{Bytes, Moment};
use stowage_scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::placement::Reservation;

pub fn epoch(term: i32) -> LeaderEpoch {
    LeaderEpoch::new("lease", term, "nonce")
}

/// Binds the pod as the API server would, unless it has a node.
pub fn bind(
    pod: &mut ApiPod,
    reservation: &mut Option<Reservation>,
    node: &NodeName,
    annotations: BTreeMap<String, String>,
) {
    let spec = pod.spec.get_or_insert_default();
    if spec.node_name.is_none() {
        spec.node_name = Some(node.to_string());
        pod.metadata
            .annotations
            .get_or_insert_default()
            .extend(annotations);
        *reservation = None;
    }
}

pub fn pod(uid: &str, number: u8, amount: u8) -> ApiPod {
    let pod = serde_json::json!({
        "metadata": {
            "name": uid, "namespace": "default", "uid": uid,
            "labels": { "app": format!("a{}", number % 3), "llm-d.ai/model": "model" },
            "annotations": {
                "stowage.dev/gpus": (1 + number / 16 % 3).to_string(),
                "stowage.dev/exclusive": (number >= 128).to_string(),
            },
        },
        "spec": {
            "priority": i32::from(amount % 5) - 2,
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "engine",
                "resources": { "limits": { "stowage.dev/vram": format!("{}Gi", 1 + amount % 90) } },
            }],
        },
    });
    serde_json::from_value(pod).expect("it is a pod")
}

/// Sleeping engine of a pod on a GPU; new pods may wake it if `amount` is even.
pub fn sleeping(pod: &PodUid, device: &Device, amount: u8) -> EngineReading {
    EngineReading {
        pod: pod.clone(),
        model: ModelId::parse("model").expect("a name"),
        gpus: [device.uuid.clone()].into(),
        state: EngineModelState::Asleep(SleepLevel::from_reported(Some(amount % 3))),
        reusable_in: amount.is_multiple_of(2).then(|| "default".into()),
        observed_at: Moment(u64::MAX),
    }
}

pub fn device(node: u8, machine: u8, index: u32, amount: u8) -> Device {
    let health = match amount % 11 {
        9 => Health::Draining,
        10 => Health::Lost,
        _ => Health::Healthy,
    };
    Device {
        uuid: GpuUuid::parse(&format!("GPU-{}-{machine}-{index}", node % NODES)).expect("a name"),
        index,
        model: GpuModel::parse("H100").expect("a name"),
        parent: None,
        total: Bytes::gib(80),
        reserved: Bytes::ZERO,
        health: if index == 0 { health } else { Health::Healthy },
        exclusive_process: false,
        island: None,
    }
}
