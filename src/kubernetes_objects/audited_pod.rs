//! A pod as the continuous audit reads it: what its Binding or its reservation records. From the object alone; the ledger's
//! state of the pod is not used.

use super::{
    ReservationMessage, annotation, asks_device_plugin, binding_annotations, classified_demand,
    granted, granted_exclusive, is_mirror, recorded_devices,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::sync::Arc;
use stowage_scheduling::audit::conflicts::{AuditedPod, BindTimes, GpuShare, Grant, ReservedShare};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey};
use stowage_scheduling::units::Moment;
use stowage_scheduling::vocabulary::classification::{Classification, PodTraits};
use stowage_scheduling::vocabulary::demand::{MAX_GPUS, Sharing};
use stowage_scheduling::vocabulary::memory_fraction::MemoryFraction;

/// A bound pod; `None` if it has no node. A pod without a readable record has no GPUs.
pub fn audited_binding(pod: &Pod, key: &PodKey) -> Option<AuditedPod> {
    let node = pod
        .spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|name| !name.is_empty())?;
    let node = NodeName::parse(node).ok()?;
    // A device plugin's GPUs are not recorded: such an annotation was not written by Stowage.
    let gpus: Arc<[GpuUuid]> = recorded_devices(pod)
        .filter(|_| !asks_device_plugin(pod))
        .unwrap_or_default();
    let granted = granted(pod)
        .filter(|_| !gpus.is_empty())
        .unwrap_or_default();
    let grant = Grant {
        per_gpu: granted.split((gpus.len() as u32).max(1)),
        sharing: granted_sharing(pod),
        fraction: fraction(pod).unwrap_or_default(),
        has_started: has_started(pod),
        is_leaving: pod.metadata.deletion_timestamp.is_some(),
        is_static: is_mirror(pod),
        borrows: super::borrows(pod),
        bind_times: bound_and_created(pod),
    };
    Some(AuditedPod {
        key: key.clone(),
        node,
        gpus,
        share: GpuShare::Bound(grant),
    })
}

/// The GPUs of a pending pod's reservation; `None` if it has no active one, or the pod's request is invalid. `moment` converts
/// a wall time.
pub fn audited_reservation(
    pod: &Pod,
    key: &PodKey,
    classify: impl FnOnce(&PodTraits) -> Classification,
    moment: impl Fn(jiff::Timestamp) -> Moment,
) -> Option<AuditedPod> {
    let ReservationMessage {
        node,
        devices,
        victims,
        deadline,
        ..
    } = ReservationMessage::read(pod)?;
    let demand = classified_demand(pod, classify)
        .ok()
        .filter(|demand| !demand.is_allocated_externally())?;
    let gpus = devices
        .get(..devices.len().min(MAX_GPUS as usize))
        .map(Arc::from)?;
    let (per_gpu, sharing) = (demand.per_gpu, demand.sharing);
    let reserved = ReservedShare {
        per_gpu,
        sharing,
        victims,
        deadline: moment(deadline),
    };
    Some(AuditedPod {
        key: key.clone(),
        node,
        gpus,
        share: GpuShare::Reserved(Box::new(reserved)),
    })
}

fn granted_sharing(pod: &Pod) -> Sharing {
    if granted_exclusive(pod) == Some(true) {
        Sharing::Exclusive
    } else {
        Sharing::Shared
    }
}

fn fraction(pod: &Pod) -> Option<MemoryFraction> {
    // A part of its limit, which says nothing of the GPU.
    if super::has_vram_limits(pod) {
        return Some(MemoryFraction::ZERO);
    }
    MemoryFraction::parse(annotation(pod, binding_annotations::MEMORY_FRACTION)?)
}

/// Whether a container of the pod runs or has run. Init containers do not count: a pod that still downloads its model has
/// nothing on a GPU.
pub fn has_started(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let is_pending = status
        .phase
        .as_deref()
        .is_none_or(|phase| phase == "Pending");
    let is_ready = status
        .conditions
        .iter()
        .flatten()
        .any(|one| one.type_ == "Ready" && one.status == "True");
    !is_pending || is_ready || status.container_statuses.iter().flatten().any(has_run)
}

fn has_run(container: &ContainerStatus) -> bool {
    let now = container
        .state
        .as_ref()
        .is_some_and(|state| state.running.is_some() || state.terminated.is_some());
    let before = container
        .last_state
        .as_ref()
        .is_some_and(|state| state.terminated.is_some());
    now || before || container.ready || container.restart_count > 0
}

fn bound_and_created(pod: &Pod) -> BindTimes {
    let seconds = |time: &Time| time.0.as_second();
    let created = pod
        .metadata
        .creation_timestamp
        .as_ref()
        .map(seconds)
        .unwrap_or_default();
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten();
    let bound = conditions.rfind(|one| one.type_ == "PodScheduled" && one.status == "True");
    let bound = bound
        .and_then(|condition| condition.last_transition_time.as_ref())
        .map(seconds);
    BindTimes {
        bound: bound.unwrap_or(created),
        created,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use stowage_scheduling::units::Bytes;

    fn pod(annotations: Value, status: Value) -> Pod {
        let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
        serde_json::from_value(json!({
            "metadata": { "name": "p", "annotations": annotations, "creationTimestamp": "2026-03-01T12:00:00Z" },
            "spec": { "nodeName": "n", "containers": [{ "name": "engine", "resources": resources }] },
            "status": status,
        }))
        .unwrap()
    }

    fn observed(annotations: Value, status: Value) -> (Vec<String>, Grant) {
        let observed = audited_binding(
            &pod(annotations, status),
            &PodKey::parse("default", "p").unwrap(),
        )
        .unwrap();
        let GpuShare::Bound(grant) = observed.share else {
            panic!("it is bound")
        };
        (
            observed.gpus.iter().map(GpuUuid::to_string).collect(),
            grant,
        )
    }

    #[test]
    fn what_a_binding_recorded_is_read_back() {
        let (gpus, grant) = observed(
            json!({
                "stowage.dev/devices": "GPU-1,GPU-2",
                "stowage.dev/vram-granted": (80u64 << 30).to_string(),
                "stowage.dev/gpu-memory-fraction": "0.85",
                "stowage.dev/exclusive-granted": "true",
            }),
            json!({ "conditions": [
                { "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-03-01T12:00:05Z" },
            ]}),
        );
        assert_eq!(gpus, ["GPU-1", "GPU-2"]);
        assert_eq!(
            (
                grant.per_gpu,
                grant.fraction.to_string().as_str(),
                grant.sharing
            ),
            (Bytes::gib(40), "0.8500", Sharing::Exclusive)
        );
        assert_eq!(grant.bind_times.bound - grant.bind_times.created, 5);
    }

    #[test]
    fn a_record_that_cannot_be_read_names_no_gpu_and_one_of_too_many_neither() {
        assert!(observed(json!({}), json!({})).0.is_empty());
        let many = (0..=MAX_GPUS)
            .map(|n| format!("GPU-{n}"))
            .collect::<Vec<_>>()
            .join(",");
        let (gpus, grant) = observed(json!({ "stowage.dev/devices": many }), json!({}));
        assert_eq!((gpus.len(), grant.per_gpu), (0, Bytes::ZERO));
        for odd in ["", "85", "0.855", "0.x5", "2.00", "1.50", "-0.5"] {
            let (_, grant) = observed(json!({ "stowage.dev/gpu-memory-fraction": odd }), json!({}));
            assert_eq!(grant.fraction, MemoryFraction::ZERO, "{odd:?}");
        }
    }

    #[test]
    fn a_record_of_more_gpus_than_a_node_can_have_is_none() {
        let recorded = |count: u32| {
            let names = (0..count)
                .map(|n| format!("GPU-{n}"))
                .collect::<Vec<_>>()
                .join(",");
            recorded_devices(&pod(json!({ "stowage.dev/devices": names }), json!({})))
                .map(|gpus| gpus.len())
        };
        assert_eq!(
            (recorded(MAX_GPUS), recorded(100_000)),
            (Some(MAX_GPUS as usize), None)
        );
    }

    #[test]
    fn a_pod_has_started_when_a_container_runs_or_has_run_and_not_while_one_prepares() {
        let started = |status: Value| observed(json!({}), status).1.has_started;
        let waits = json!({ "name": "engine", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ContainerCreating" } } });
        assert!(!started(
            json!({ "phase": "Pending", "containerStatuses": [waits] })
        ));
        let mut init = waits.clone();
        init["state"] = json!({ "running": {} });
        assert!(!started(
            json!({ "phase": "Pending", "initContainerStatuses": [init], "containerStatuses": [waits] })
        ));
        for (field, value) in [
            ("state", json!({ "running": {} })),
            ("state", json!({ "terminated": { "exitCode": 1 } })),
            ("lastState", json!({ "terminated": { "exitCode": 1 } })),
            ("restartCount", json!(1)),
        ] {
            let mut container = waits.clone();
            container[field] = value;
            assert!(
                started(json!({ "phase": "Pending", "containerStatuses": [container] })),
                "{field}"
            );
        }
        assert!(started(json!({ "phase": "Running" })) && started(json!({ "phase": "Unknown" })));
    }
}
