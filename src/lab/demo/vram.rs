//! Who has how much of a GPU, and what its driver does when a process allocates: annotations that the simulated GPUs obey. No real
//! node knows them.
//!
//! Where the driver keeps limits, as that of r615 does with gpu-fractioning, a container gets no more than its Binding wrote for it.
//! One that allocates what is kept for it gets it: the driver ends a process that has more than is kept for its own container.
//! Elsewhere a process gets what is free, whoever it was granted to.

use super::api_server::ApiServer;
use super::change_tracker::GpuView;
use super::sleeping;
use anyhow::{Result, anyhow};
use serde_json::{Value, json};

/// Of a pod: bytes that it has of each of its GPUs. Without it, it takes all of its grant when it starts.
pub(super) const ALLOCATED: &str = "demo.stowage.dev/vram-allocated";

/// Of a node: its driver keeps limits.
pub(super) const KEEPS_LIMITS: &str = "demo.stowage.dev/keeps-vram-limits";

/// Bytes of each GPU, as the node reads them in a pod's annotations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct VramLimits {
    /// The soft limit.
    pub kept: u64,
    /// The hard limit.
    pub most: u64,
}

/// What an allocation comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Allocation {
    /// These pods' processes were ended for it.
    Done { ended: Vec<String> },
    /// It fails, because its container may not have so much.
    BeyondLimit,
    /// It fails, because others have the memory.
    OutOfMemory,
}

pub(super) fn keeps_limits(api: &ApiServer, node: &str) -> bool {
    let node = api.get(&format!("nodes/{node}"));
    node.is_some_and(|node| node["metadata"]["annotations"][KEEPS_LIMITS].is_string())
}

/// The limits that the driver keeps for a pod, over its containers; `None` if it keeps none.
pub(super) fn limits(api: &ApiServer, pod: &Value) -> Option<VramLimits> {
    let written = |what: &str| {
        let annotations = pod["metadata"]["annotations"].as_object()?.iter();
        let of_containers = annotations
            .filter(|(key, _)| key.starts_with("nvidia.com/container.") && key.ends_with(what));
        let mebibytes =
            |(_, value): (_, &Value)| value.as_str()?.strip_suffix("Mi")?.parse::<u64>().ok();
        let sum = of_containers.map(mebibytes).sum::<Option<u64>>()?;
        (sum > 0).then_some(sum << 20)
    };
    let is_kept = keeps_limits(api, pod["spec"]["nodeName"].as_str()?);
    let (kept, most) = (
        written(".gpu-memory.request")?,
        written(".gpu-memory.limit")?,
    );
    is_kept.then_some(VramLimits { kept, most })
}

/// Bytes that a pod has of each of its GPUs; `None` if it has all of its grant.
pub(super) fn allocated(pod: &Value) -> Option<u64> {
    if sleeping::is_asleep(pod) {
        return Some(sleeping::SLEEPING_VRAM_BYTES);
    }
    pod["metadata"]["annotations"][ALLOCATED]
        .as_str()?
        .parse()
        .ok()
}

/// Bytes that a pod lacks on its GPUs to have so much of each, by its grant of each; `None` if it is on none. What a GPU has beyond
/// what pods are granted is in use by contexts.
pub(super) fn lacking(
    api: &ApiServer,
    gpus: &[GpuView],
    name: &str,
    bytes: impl Fn(u64) -> u64,
) -> Option<u64> {
    // A pod is shown a moment longer than it is there.
    let used = |other: &str, granted: u64| match api.get(&format!("pods/default/{other}")) {
        Some(_) if other == name => bytes(granted),
        Some(pod) => allocated(&pod).unwrap_or(granted),
        None => 0,
    };
    let own = gpus_of(gpus, name);
    own.map(|gpu| {
        let all = gpu
            .pods
            .iter()
            .map(|(pod, granted)| used(&pod.name, *granted));
        all.sum::<u64>().saturating_sub(gpu.allocatable)
    })
    .max()
}

fn gpus_of<'a>(gpus: &'a [GpuView], name: &'a str) -> impl Iterator<Item = &'a GpuView> {
    gpus.iter()
        .filter(move |gpu| gpu.pods.iter().any(|(pod, _)| pod.name == name))
}

/// A pod allocates until it has so many bytes of each of its GPUs.
pub(super) fn allocate(
    api: &ApiServer,
    gpus: &[GpuView],
    name: &str,
    bytes: u64,
) -> Result<Allocation> {
    let limits_of = |name: &str| limits(api, &*api.get(&format!("pods/default/{name}"))?);
    let own = limits_of(name);
    if own.is_some_and(|own| bytes > own.most) {
        return Ok(Allocation::BeyondLimit);
    }
    let is_kept = own.is_some_and(|own| bytes <= own.kept);
    let has_more_than_is_kept = |other: &str| {
        let pod = api.get(&format!("pods/default/{other}"));
        let has = pod.and_then(|pod| allocated(&pod)).unwrap_or(u64::MAX);
        limits_of(other).is_some_and(|limits| has > limits.kept)
    };
    let mut ended = Vec::new();
    while lacking(api, gpus, name, |_| bytes).is_none_or(|lacking| lacking > 0) {
        let mut others = gpus_of(gpus, name)
            .flat_map(|gpu| &gpu.pods)
            .map(|(pod, _)| &pod.name);
        let Some(other) =
            others.find(|other| is_kept && *other != name && has_more_than_is_kept(other))
        else {
            return Ok(Allocation::OutOfMemory);
        };
        restart(api, other, 0)?;
        ended.push(other.clone());
    }
    set_allocated(api, name, bytes)?;
    Ok(Allocation::Done { ended })
}

/// A pod's container ends and starts again, and has so many bytes of each of its GPUs then.
pub(super) fn restart(api: &ApiServer, name: &str, bytes: u64) -> Result<()> {
    let path = format!("pods/default/{name}");
    let pod = api.get(&path).ok_or_else(|| anyhow!("{name} is gone"))?;
    let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    let status = json!({"containerStatuses": [{
        "name": "engine", "image": "engine:1", "imageID": "", "ready": true, "restartCount": restarts.unwrap_or(0) + 1,
    }]});
    let patched = api.patch_status(&path, &json!({"status": status}));
    patched.map_err(|error| anyhow!("{name} cannot restart: {error:?}"))?;
    set_allocated(api, name, bytes)
}

fn set_allocated(api: &ApiServer, name: &str, bytes: u64) -> Result<()> {
    let patch = json!({"metadata": {"annotations": {ALLOCATED: bytes.to_string()}}});
    let patched = api.patch(&format!("pods/default/{name}"), &patch);
    patched
        .map(drop)
        .map_err(|error| anyhow!("{name} cannot allocate: {error:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::change_tracker::ChangeTracker;
    use crate::demo::machine::DemoMachine;
    use stowage_kubernetes_objects::{VRAM, binding_annotations};

    const MACHINE: DemoMachine = DemoMachine {
        node: "node-d",
        model: "H100",
        gpu_count: 1,
        gib_per_gpu: 80,
        models: &[],
    };
    const GIB: u64 = 1 << 30;

    /// A node that keeps limits, and pods on its GPU: name, GiB granted, kept and in use.
    async fn node(pods: &[(&str, u64, u64, u64)]) -> ApiServer {
        let api = ApiServer::start().await.unwrap();
        let mut node = MACHINE.node_object();
        node["metadata"]["annotations"] = json!({KEEPS_LIMITS: "true"});
        api.create("nodes", node).unwrap();
        for (name, granted, kept, used) in pods {
            let limit = |what: &str| format!("nvidia.com/container.engine.gpu-memory.{what}");
            let annotations = json!({
                ALLOCATED: (used * GIB).to_string(),
                binding_annotations::DEVICES: MACHINE.uuid(0),
                binding_annotations::GRANTED: (granted * GIB).to_string(),
                limit("request"): format!("{}Mi", (kept << 10).max(1)),
                limit("limit"): format!("{}Mi", granted << 10),
            });
            let container = json!({"name": "engine", "resources": {"limits": {VRAM: "1Gi"}}});
            let metadata = json!({"name": name, "annotations": annotations});
            let pod = json!({"metadata": metadata, "spec": {"nodeName": "node-d", "containers": [container]}});
            api.create("pods", pod).unwrap();
        }
        api
    }

    fn allocate(api: &ApiServer, pod: &str, gib: u64) -> Allocation {
        let mut tracker = ChangeTracker::default();
        tracker.changes(api);
        super::allocate(api, &tracker.gpus(&[MACHINE]), pod, gib * GIB).unwrap()
    }

    fn has_gib(api: &ApiServer, pod: &str) -> u64 {
        allocated(&api.get(&format!("pods/default/{pod}")).unwrap()).unwrap() / GIB
    }

    fn done(ended: &[&str]) -> Allocation {
        let ended = ended.iter().map(ToString::to_string).collect();
        Allocation::Done { ended }
    }

    #[tokio::test]
    async fn an_allocation_beyond_the_limit_fails_alone() {
        let api = node(&[("a", 30, 30, 20), ("b", 42, 42, 12)]).await;
        assert_eq!(allocate(&api, "b", 43), Allocation::BeyondLimit);
        assert_eq!((has_gib(&api, "a"), has_gib(&api, "b")), (20, 12));
        assert_eq!(allocate(&api, "b", 42), done(&[]));
        assert_eq!(allocate(&api, "a", 30), done(&[]));
    }

    #[tokio::test]
    async fn what_is_kept_for_a_pod_is_taken_from_those_that_have_more_than_is_kept_for_them() {
        let pods = [
            ("a", 30, 30, 30),
            ("b", 42, 42, 12),
            ("job", 14, 0, 14),
            ("more", 14, 0, 14),
        ];
        let api = node(&pods).await;
        assert_eq!(allocate(&api, "job", 14), done(&[]));
        assert_eq!(allocate(&api, "b", 28), done(&["job"]), "one is enough");
        assert_eq!((has_gib(&api, "job"), has_gib(&api, "more")), (0, 14));
        let job = api.get("pods/default/job").unwrap();
        assert_eq!(job["status"]["containerStatuses"][0]["restartCount"], 1);
        assert_eq!(
            allocate(&api, "job", 14),
            Allocation::OutOfMemory,
            "none is kept for it"
        );
        assert_eq!(allocate(&api, "b", 42), done(&["more"]));
        assert_eq!(has_gib(&api, "a"), 30);
    }

    #[tokio::test]
    async fn without_limits_a_process_gets_what_is_free_whoever_it_was_granted_to() {
        let api = node(&[("a", 30, 30, 20), ("b", 42, 42, 12)]).await;
        api.patch(
            "nodes/node-d",
            &json!({"metadata": {"annotations": {KEEPS_LIMITS: null}}}),
        )
        .unwrap();
        assert_eq!(allocate(&api, "b", 52), done(&[]));
        assert_eq!(allocate(&api, "a", 30), Allocation::OutOfMemory);
    }
}
