//! Dual pods of llm-d: the engine of a requesting pod runs in another pod, which asks for no GPU. What the awake engine has there
//! is the requesting pod's: counted for the other, it would look like memory that nobody was granted.
//!
//! The annotation is a controller's word on a pod that others may edit, so it moves memory only between pods of one namespace, and
//! only on GPUs that the requesting pod was granted.

use super::identifies;
use crate::pods::PodOnNode;
use std::collections::BTreeSet;
use stowage_report::{GpuReport, ProcessReport};
use stowage_scheduling::ids::PodUid;

/// On a server-providing pod, while a requesting pod is bound to it: that pod's UID and name.
pub(crate) const REQUESTER: &str = "dual-pods.llm-d.ai/requester";

/// Gives the awake engine of each server-providing pod to the requesting pod that is bound to it: on each GPU of that pod the
/// process with most memory. The others belong to engines that sleep there, for any pod.
pub(crate) fn attribute_to_requesters(gpus: &mut [GpuReport], pods: &[PodOnNode]) {
    for (provider, requester) in pods
        .iter()
        .filter_map(|pod| Some((pod, requester_of(pod, pods)?)))
    {
        let granted = requester.devices.as_deref().unwrap_or_default();
        for gpu in gpus
            .iter_mut()
            .filter(|gpu| granted.iter().any(|id| identifies(id, gpu)))
        {
            let providers_processes = gpu
                .processes
                .iter_mut()
                .flatten()
                .filter(|process| process.pod.as_ref() == Some(&provider.uid));
            if let Some(awake) =
                providers_processes.max_by_key(|process: &&mut ProcessReport| process.used_bytes)
            {
                awake.pod = Some(requester.uid.clone());
            }
        }
    }
}

/// The requesting pod that is bound to a pod without a grant of its own.
fn requester_of<'a>(provider: &PodOnNode, pods: &'a [PodOnNode]) -> Option<&'a PodOnNode> {
    let (uid, name) = provider.annotations.get(REQUESTER)?.split_once(' ')?;
    let is_requester = |pod: &&PodOnNode| {
        let is_named = pod.uid.as_str() == uid && &*pod.key.name == name;
        is_named && pod.key.namespace == provider.key.namespace
    };
    pods.iter()
        .find(is_requester)
        .filter(|_| provider.devices.is_none() && provider.granted_vram.is_none())
}

/// The requesting pods: their engines run in other pods, and are read there.
pub(crate) fn requesters(pods: &[PodOnNode]) -> BTreeSet<&PodUid> {
    pods.iter()
        .filter_map(|pod| Some(&requester_of(pod, pods)?.uid))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(namespace: &str, name: &str, annotations: Value) -> PodOnNode {
        let pod = json!({
            "metadata": { "name": name, "namespace": namespace, "uid": format!("uid-{name}"), "annotations": annotations },
            "spec": { "containers": [{ "name": "inference-server" }] },
        });
        PodOnNode::from_pod(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    /// GPU 0 and 1, on each an awake engine of the launcher, one that sleeps, and another pod's process.
    fn owners(pods: &[PodOnNode]) -> Vec<Vec<String>> {
        let gpu = |uuid: &str| {
            let process =
                |pid, gib: u64, pod| json!({ "pid": pid, "usedBytes": gib << 30, "pod": pod });
            serde_json::from_value(json!({
                "uuid": uuid, "index": 0, "model": "H100", "totalBytes": 80u64 << 30,
                "processes": [process(1, 2, "uid-launcher"), process(2, 40, "uid-launcher"), process(3, 60, "uid-other")],
            }))
            .unwrap()
        };
        let mut gpus: Vec<GpuReport> = vec![gpu("GPU-a"), gpu("GPU-b")];
        attribute_to_requesters(&mut gpus, pods);
        let owner = |process: &ProcessReport| process.pod.as_ref().unwrap().to_string();
        gpus.iter()
            .map(|gpu| gpu.processes.iter().flatten().map(owner).collect())
            .collect()
    }

    const UNCHANGED: [&str; 3] = ["uid-launcher", "uid-launcher", "uid-other"];

    #[test]
    fn the_awake_engine_of_a_bound_provider_is_the_requesting_pods() {
        let requester = pod(
            "llm-d",
            "requester",
            json!({ "stowage.dev/devices": "GPU-b" }),
        );
        let launcher = pod(
            "llm-d",
            "launcher",
            json!({ REQUESTER: "uid-requester requester" }),
        );
        let given = owners(&[requester.clone(), launcher.clone()]);
        assert_eq!(given[0], UNCHANGED, "it was not granted this GPU");
        assert_eq!(given[1], ["uid-launcher", "uid-requester", "uid-other"]);
        let unbound = pod("llm-d", "launcher", json!({}));
        assert_eq!(owners(&[requester.clone(), unbound])[1], UNCHANGED);
        let foreign = pod(
            "team-b",
            "launcher",
            json!({ REQUESTER: "uid-requester requester" }),
        );
        assert_eq!(
            owners(&[requester.clone(), foreign])[1],
            UNCHANGED,
            "of another namespace"
        );
        let granted =
            json!({ REQUESTER: "uid-requester requester", "stowage.dev/devices": "GPU-b" });
        assert_eq!(
            owners(&[requester, pod("llm-d", "launcher", granted)])[1],
            UNCHANGED,
            "it has its own"
        );
        assert_eq!(
            owners(&[launcher])[1],
            UNCHANGED,
            "there is no such pod here"
        );
    }
}
