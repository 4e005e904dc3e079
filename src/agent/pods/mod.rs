//! The pods on this node, as far as the agent needs them.
//!
//! A [`PodSource`] provides them; [`watched`] is the one that uses the API server. Nothing here knows a GPU.

pub mod watched;

use k8s_openapi::api::core::v1::{Container, Pod};
use std::collections::BTreeMap;
use std::net::IpAddr;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{GpuUuid, PodKey, PodUid};
use stowage_scheduling::units::Bytes;

/// Prefixes of annotations that the agent uses.
const READ_ANNOTATIONS: [&str; 5] = [
    "stowage.dev/",
    "prometheus.io/",
    "prometheus.kserve.io/",
    "kubernetes.io/config.",
    "dual-pods.llm-d.ai/requester",
];

/// Labels that the agent uses.
const READ_LABELS: [&str; 4] = [
    "llm-d.ai/engine-type",
    "llm-d.ai/model",
    "stowage.dev/reusable",
    "dual-pods.llm-d.ai/sleeping",
];
/// Limits on what a pod's author writes, because it is stored for every pod of the node: an annotation's value is a name, a
/// port or a path, ...
const MAX_VALUE: usize = 1024;
/// ... there are a few of them, ...
const MAX_ANNOTATIONS: usize = 64;
/// ... and each port is an address that may have to be probed for an engine.
const MAX_PORTS: usize = 64;

/// A pod that runs on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOnNode {
    pub uid: PodUid,
    pub key: PodKey,
    pub ip: Option<IpAddr>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// The ports its containers declare, in the order in which they do.
    pub ports: Vec<u16>,
    /// The container that declares a port, by its id, if it is the only one.
    pub containers: BTreeMap<u16, String>,
    /// The GPUs its Binding recorded.
    pub devices: Option<Vec<GpuUuid>>,
    /// The VRAM it was granted, over all its GPUs.
    pub granted_vram: Option<Bytes>,
    /// The VRAM limits that its Binding wrote, on each of its GPUs.
    pub written_limit: Option<Bytes>,
    /// It requests VRAM or a GPU.
    pub wants_gpu: bool,
    /// It is being deleted.
    pub is_terminating: bool,
    pub is_ready: bool,
    /// It is larger than an agent reads: whether it is ready, and where its engines are, is not known.
    pub is_too_large: bool,
}

/// A source of the pods on the node.
pub trait PodSource: Send {
    /// All of them, in order of UID, or why they are unknown.
    fn pods(&mut self) -> Result<Vec<PodOnNode>, String>;
}

/// No pods: the agent runs without a cluster.
#[derive(Debug)]
pub struct NoPods(pub String);

impl PodSource for NoPods {
    fn pods(&mut self) -> Result<Vec<PodOnNode>, String> {
        Err(self.0.clone())
    }
}

impl PodOnNode {
    /// `None` for a pod that has ended or has no valid name.
    pub fn from_pod(pod: &Pod) -> Option<Self> {
        if objects::is_finished(pod) {
            return None;
        }
        let (uid, key) = objects::identity(pod).ok()?;
        let status = pod.status.as_ref();
        let conditions = status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        let is_read = |(key, _): &(&String, &String)| {
            READ_ANNOTATIONS
                .iter()
                .any(|prefix| key.starts_with(prefix))
        };
        let annotations = pod.metadata.annotations.iter().flatten();
        let labels = pod.metadata.labels.iter().flatten();
        let is_short = |(_, value): &(&String, &String)| value.len() <= MAX_VALUE;
        let owned = |(key, value): (&String, &String)| (key.clone(), value.clone());
        let devices = objects::recorded_devices(pod);
        Some(Self {
            uid,
            key,
            ip: status.and_then(|status| status.pod_ip.as_deref()?.parse().ok()),
            labels: labels
                .filter(|(key, _)| READ_LABELS.contains(&key.as_str()))
                .map(owned)
                .collect(),
            annotations: annotations
                .filter(is_read)
                .filter(is_short)
                .take(MAX_ANNOTATIONS)
                .map(owned)
                .collect(),
            ports: containers(pod).flat_map(ports).take(MAX_PORTS).collect(),
            containers: containers_by_port(pod),
            devices: devices.map(|devices| devices.to_vec()),
            granted_vram: objects::granted(pod),
            written_limit: objects::written_limit(pod),
            wants_gpu: objects::asks_for_vram(pod) || objects::asks_device_plugin(pod),
            is_terminating: pod.metadata.deletion_timestamp.is_some(),
            is_ready: conditions
                .into_iter()
                .any(|c| c.type_ == "Ready" && c.status == "True"),
            is_too_large: objects::is_stand_in(&pod.metadata),
        })
    }
}

fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
}

/// A metrics port uses TCP, and has a telling name.
fn ports(container: &Container) -> impl Iterator<Item = u16> {
    let tcp = container
        .ports
        .iter()
        .flatten()
        .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP");
    tcp.filter_map(|port| u16::try_from(port.container_port).ok())
}

/// The container id of each port that exactly one container declares, as far as the kubelet has reported ids.
fn containers_by_port(pod: &Pod) -> BTreeMap<u16, String> {
    let statuses = || {
        let status = pod.status.iter();
        status
            .flat_map(|status| [&status.init_container_statuses, &status.container_statuses])
            .flatten()
            .flatten()
    };
    let mut declared: BTreeMap<u16, Vec<&str>> = BTreeMap::new();
    for container in containers(pod) {
        ports(container).for_each(|port| declared.entry(port).or_default().push(&container.name));
    }
    let only_declaring_container = |(port, names): (u16, Vec<&str>)| {
        let [only] = names[..] else { return None };
        let id = statuses()
            .find(|one| one.name == only)?
            .container_id
            .as_deref()?;
        Some((port, id.split_once("://")?.1.to_owned()))
    };
    declared
        .into_iter()
        .filter_map(only_declaring_container)
        .take(MAX_PORTS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use kube::api::ListParams;
    use kube::client::Body;
    use kube::{Api, Client};
    use serde_json::{Value, json};
    use stowage_kubernetes_objects::pruning::{Pruning, ResponseMode};

    /// The pod of a list of this one.
    async fn listed(pod: Value, answers: ResponseMode) -> Pod {
        let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [pod] }).to_string();
        let server = tower::service_fn(move |_: Request<Body>| {
            let body = Body::from(list.clone().into_bytes());
            std::future::ready(Ok::<_, std::io::Error>(Response::new(body)))
        });
        let pods = Api::<Pod>::all(Client::new(Pruning(server, answers), "default"));
        pods.list(&ListParams::default())
            .await
            .unwrap()
            .items
            .remove(0)
    }

    #[tokio::test]
    async fn a_pruned_pod_reads_like_a_whole_one() {
        let container = |name: &str, port: u16| json!({ "name": name, "image": "i", "env": vec![json!({ "name": "A" }); 20_000], "ports": [{ "containerPort": port }], "resources": { "limits": { "stowage.dev/vram": "1Gi" } } });
        let status = |name: &str| json!({ "name": name, "containerID": format!("containerd://{name}"), "image": "i", "imageID": "i", "ready": true, "restartCount": 0 });
        let pod = json!({
            "metadata": {
                "name": "a", "namespace": "b", "uid": "c", "labels": { "llm-d.ai/engine-type": "vllm" },
                "annotations": { "stowage.dev/devices": "GPU-1", "stowage.dev/vram-granted": "2", "prometheus.io/port": "9", "x.example/y": "z" },
            },
            "spec": { "nodeName": "n", "initContainers": [container("side", 1)], "containers": [container("one", 8000), container("two", 8001)] },
            "status": {
                "phase": "Running", "podIP": "10.0.0.1", "conditions": [{ "type": "Ready", "status": "True" }],
                "initContainerStatuses": [status("side")], "containerStatuses": [status("one"), status("two")],
            },
        });
        let seen =
            async |answers| PodOnNode::from_pod(&listed(pod.clone(), answers).await).unwrap();
        let (pruned, whole) = (
            seen(ResponseMode::Pruned).await,
            seen(ResponseMode::Whole).await,
        );
        assert_eq!(pruned, whole);
        assert_eq!(pruned.containers.len(), 3);
        assert!(!pruned.is_too_large);
    }

    #[tokio::test]
    async fn a_pod_beyond_the_size_limit_has_no_readable_engine() {
        let labels: serde_json::Map<String, Value> =
            (0..9000).map(|n| (format!("{n:060}"), json!(""))).collect();
        let pod = json!({
            "metadata": { "name": "a", "namespace": "b", "uid": "c", "labels": labels },
            "spec": { "nodeName": "n", "containers": [{ "name": "e", "resources": { "limits": { "stowage.dev/vram": "1Gi" } } }] },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        let seen = PodOnNode::from_pod(&listed(pod, ResponseMode::Pruned).await).unwrap();
        assert!(seen.is_too_large && seen.wants_gpu);
    }

    fn pod(edit: impl FnOnce(&mut serde_json::Value)) -> Option<PodOnNode> {
        let mut pod = json!({
            "metadata": {
                "name": "llama", "namespace": "team-a", "uid": "1",
                "labels": { "llm-d.ai/engine-type": "vllm" },
                "annotations": {
                    "stowage.dev/devices": "GPU-a,GPU-b", "stowage.dev/vram-granted": "1024",
                    "stowage.dev/metrics-port": "9000", "example.com/huge": "x",
                },
            },
            "spec": { "containers": [{
                "name": "engine",
                "ports": [{ "containerPort": 8000 }, { "containerPort": 53, "protocol": "UDP" }],
                "resources": { "limits": { "stowage.dev/vram": "1Ki" } },
            }] },
            "status": { "phase": "Running", "podIP": "10.0.0.7", "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        edit(&mut pod);
        PodOnNode::from_pod(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn only_the_fields_that_the_agent_reads_are_stored() {
        let pod = pod(|_| {}).unwrap();
        assert_eq!(pod.key.to_string(), "team-a/llama");
        assert_eq!(pod.ip, Some([10, 0, 0, 7].into()));
        assert_eq!(pod.ports, [8000]);
        assert_eq!(pod.devices.unwrap().len(), 2);
        assert_eq!(pod.granted_vram, Some(Bytes(1024)));
        assert!(pod.annotations.contains_key("stowage.dev/metrics-port"));
        assert!(!pod.annotations.contains_key("example.com/huge"));
        assert!(pod.wants_gpu && pod.is_ready && !pod.is_terminating);
    }

    #[test]
    fn a_port_belongs_to_the_one_container_that_declares_it() {
        let ports = |ports: &[u16]| {
            ports
                .iter()
                .map(|port| json!({ "containerPort": port }))
                .collect::<Vec<_>>()
        };
        let pod = pod(|pod| {
            pod["spec"]["initContainers"] = json!([{ "name": "proxy", "restartPolicy": "Always", "ports": ports(&[8000, 9000]) }]);
            pod["spec"]["containers"] = json!([
                { "name": "engine", "ports": ports(&[8200, 9000]) }, { "name": "starting", "ports": ports(&[8300]) },
            ]);
            pod["status"]["initContainerStatuses"] = json!([{ "name": "proxy", "containerID": "containerd://aa", "ready": true, "restartCount": 0, "image": "", "imageID": "" }]);
            pod["status"]["containerStatuses"] = json!([{ "name": "engine", "containerID": "cri-o://bb", "ready": true, "restartCount": 0, "image": "", "imageID": "" }]);
        });
        let containers: Vec<_> = pod.unwrap().containers.into_iter().collect();
        assert_eq!(
            containers,
            [(8000, "aa".to_owned()), (8200, "bb".to_owned())]
        );
    }

    #[test]
    fn annotations_and_ports_of_a_pod_are_stored_within_limits() {
        let ports: Vec<_> = (1..=60_000)
            .map(|port| json!({ "containerPort": port }))
            .collect();
        let labels: BTreeMap<String, String> = (0..10_000)
            .map(|n| (format!("label-{n}"), "x".repeat(63)))
            .collect();
        let pod = pod(|pod| {
            pod["spec"]["containers"][0]["ports"] = json!(ports);
            pod["metadata"]["labels"] = json!(labels);
            pod["metadata"]["labels"]["llm-d.ai/model"] = json!("llama");
            pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(["a"; 100_000].join(","));
            pod["metadata"]["annotations"]["stowage.dev/note"] = json!("x".repeat(100_000));
        });
        let pod = pod.unwrap();
        assert_eq!(
            (pod.ports.len(), pod.ports[0]),
            (64, 1),
            "each is an address to look at"
        );
        assert_eq!(
            pod.labels.into_keys().collect::<Vec<_>>(),
            ["llm-d.ai/model"]
        );
        assert_eq!(pod.devices, None, "no node has so many");
        assert_eq!(
            pod.annotations.into_keys().collect::<Vec<_>>(),
            ["stowage.dev/metrics-port", "stowage.dev/vram-granted"]
        );
    }

    #[test]
    fn a_pod_that_has_ended_is_not_on_the_node_any_more() {
        assert_eq!(pod(|pod| pod["status"]["phase"] = json!("Succeeded")), None);
    }

    #[test]
    fn a_pod_of_the_device_plugin_wants_a_gpu_too() {
        let limits = json!({ "nvidia.com/gpu": "1" });
        let plugin =
            pod(|pod| pod["spec"]["containers"][0]["resources"]["limits"] = limits).unwrap();
        assert!(plugin.wants_gpu);
        let none = pod(|pod| pod["spec"]["containers"][0]["resources"] = json!({})).unwrap();
        assert!(!none.wants_gpu);
    }
}
