//! What the API server's objects say about GPUs, and nothing else, for the oracle. No ledger is asked.

use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Allocatable VRAM of a GPU of 80 GiB.
pub const ALLOCATABLE_BYTES: u64 = 72 << 30;
/// The capacity of a GPU: no policy can have allocated more than that.
const CAPACITY_BYTES: u64 = 80 << 30;

/// One pod's part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodShare {
    pub pod: String,
    pub bytes: u64,
    /// What it may use, by what its engine is told.
    pub usable_bytes: u64,
    pub is_exclusive: bool,
    has_started: bool,
    /// An engine that is not ready yet.
    pub is_starting: bool,
}

/// A GPU, as `node/index`.
pub(crate) type GpuName = String;

/// GPUs that are overallocated, with their pods.
pub fn over_allocated(pods: &[Arc<Value>]) -> BTreeMap<GpuName, Vec<String>> {
    pods_by_gpu(allocations(pods), |parts| exceeds(ALLOCATABLE_BYTES, parts))
}

/// GPUs that have less than the Bindings' own records allocate, headroom and all: what the continuous audit reports.
pub fn beyond_capacity(pods: &[Arc<Value>]) -> BTreeMap<GpuName, Vec<String>> {
    pods_by_gpu(allocations(pods), |parts| exceeds(CAPACITY_BYTES, parts))
}

/// GPUs that are overallocated by the Bindings' own records, with a pod that has not started and could be evicted.
pub(crate) fn repairable_over_allocations(pods: &[Arc<Value>]) -> BTreeMap<GpuName, Vec<String>> {
    pods_by_gpu(allocations(pods), |parts| {
        exceeds(CAPACITY_BYTES, parts) && parts.iter().any(|part| !part.has_started)
    })
}

fn pods_by_gpu(
    mut promises: BTreeMap<GpuName, Vec<PodShare>>,
    is_wrong: impl Fn(&[PodShare]) -> bool,
) -> BTreeMap<GpuName, Vec<String>> {
    promises.retain(|_, parts| is_wrong(parts));
    promises
        .into_iter()
        .map(|(gpu, parts)| (gpu, parts.into_iter().map(|part| part.pod).collect()))
        .collect()
}

/// A sum of its own: the continuous audit is judged by it, and the core's oracle uses the audit's check.
fn exceeds(limit: u64, parts: &[PodShare]) -> bool {
    let sum: u64 = parts.iter().map(|part| part.bytes).sum();
    sum > limit || (parts.len() > 1 && parts.iter().any(|part| part.is_exclusive))
}

/// Each GPU's bound pods.
pub fn allocations(pods: &[Arc<Value>]) -> BTreeMap<GpuName, Vec<PodShare>> {
    let mut promises: BTreeMap<GpuName, Vec<PodShare>> = BTreeMap::new();
    for pod in pods {
        for (gpu, part) in pod_allocations(pod) {
            promises.entry(gpu).or_default().push(part);
        }
    }
    promises
}

fn pod_allocations(pod: &Value) -> Vec<(GpuName, PodShare)> {
    let (Some((node, gpus)), Some(bytes)) = (devices_of(pod), granted_per_gpu(pod)) else {
        return Vec::new();
    };
    if matches!(
        pod["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    ) {
        return Vec::new();
    }
    let part = PodShare {
        pod: pod_name(pod),
        bytes,
        usable_bytes: usable_per_gpu(pod).unwrap_or(bytes),
        is_exclusive: is_granted_exclusive(pod),
        has_started: pod["status"]["phase"] == "Running",
        is_starting: is_starting(pod),
    };
    gpus.into_iter()
        .map(|gpu| (format!("{node}/{gpu}"), part.clone()))
        .collect()
}

/// Whether it is of a class whose pods run engines, where the policy has such.
pub(crate) fn is_engine(pod: &Value) -> bool {
    pod["spec"]["priority"].as_i64().unwrap_or(0) >= 0
}

/// A bound engine that is not ready. It becomes so when it runs.
pub fn is_starting(pod: &Value) -> bool {
    let runs = matches!(
        pod["status"]["phase"].as_str(),
        Some("Running" | "Succeeded" | "Failed")
    );
    is_engine(pod) && !runs && pod["metadata"]["deletionTimestamp"].is_null()
}

/// The node of a bound pod, and the indices of its GPUs there.
pub fn devices_of(pod: &Value) -> Option<(String, Vec<usize>)> {
    let node = pod["spec"]["nodeName"].as_str()?;
    let devices = pod["metadata"]["annotations"]["stowage.dev/devices"].as_str()?;
    Some((
        node.to_owned(),
        devices.split(',').filter_map(gpu_index).collect(),
    ))
}

/// A GPU is called by its index until an agent has reported its UUID, which ends with it here.
fn gpu_index(device: &str) -> Option<usize> {
    device.rsplit('-').next()?.parse().ok()
}

pub(crate) fn granted_per_gpu(pod: &Value) -> Option<u64> {
    let granted: u64 = pod["metadata"]["annotations"]["stowage.dev/vram-granted"]
        .as_str()?
        .parse()
        .ok()?;
    let (_, gpus) = devices_of(pod)?;
    Some(granted.div_ceil(gpus.len() as u64))
}

/// A pod that has its GPUs to itself is granted what each of them has free, all of it in one sum. Its engine is told the least of
/// them, and may use that of each; what the pod asks for it has in any case.
fn usable_per_gpu(pod: &Value) -> Option<u64> {
    let fraction = pod["metadata"]["annotations"]["stowage.dev/gpu-memory-fraction"].as_str()?;
    let ten_thousandths: u64 = fraction.replace('.', "").parse().ok()?;
    is_granted_exclusive(pod).then(|| {
        requested_gpus(pod)
            .1
            .max(CAPACITY_BYTES / 10_000 * ten_thousandths)
    })
}

/// How many GPUs a pod asks for, and how much of each.
pub fn requested_gpus(pod: &Value) -> (u64, u64) {
    let gpus = pod["metadata"]["annotations"]["stowage.dev/gpus"].as_str();
    let gpus = gpus.and_then(|gpus| gpus.parse().ok()).unwrap_or(1);
    let limit = pod["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"].as_str();
    let gib: u64 = limit
        .and_then(|quantity| quantity.strip_suffix("Gi")?.parse().ok())
        .unwrap_or(0);
    (gpus, (gib << 30).div_ceil(gpus))
}

/// Whether the pod's Binding grants it whole GPUs. What the pod requests may have been edited since.
pub(crate) fn is_granted_exclusive(pod: &Value) -> bool {
    pod["metadata"]["annotations"]["stowage.dev/exclusive-granted"] == "true"
}

pub(crate) fn requests_exclusive(pod: &Value) -> bool {
    pod["metadata"]["annotations"]["stowage.dev/exclusive"] == "true"
}

/// Active reservations, as the pods' conditions show them: per pod, its GPUs.
pub fn reservations_by_pod(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<GpuName>> {
    pods.iter()
        .filter_map(|pod| Some((pod_name(pod), reserved_gpus(pod)?)))
        .collect()
}

/// What a pod's condition says that it holds.
pub fn shown_reservation(pod: &Value) -> Option<Value> {
    let mut conditions = pod["status"]["conditions"].as_array()?.iter();
    let reservation =
        conditions.find(|one| one["type"] == "stowage.dev/Reserved" && one["status"] == "True")?;
    if pod["spec"]["nodeName"].is_string() {
        return None;
    }
    serde_json::from_str(reservation["message"].as_str()?).ok()
}

fn reserved_gpus(pod: &Value) -> Option<Vec<GpuName>> {
    let message = shown_reservation(pod)?;
    let node = message["node"].as_str()?.to_owned();
    let devices = message["devices"]
        .as_array()?
        .iter()
        .filter_map(Value::as_str);
    Some(
        devices
            .filter_map(gpu_index)
            .map(|gpu| format!("{node}/{gpu}"))
            .collect(),
    )
}

/// GPUs with reservations of more than one pod, which each take more than half of a GPU.
pub(crate) fn doubly_reserved(pods: &[Arc<Value>]) -> BTreeMap<GpuName, Vec<String>> {
    let mut holders: BTreeMap<GpuName, Vec<String>> = BTreeMap::new();
    for pod in pods
        .iter()
        .filter(|pod| requests_exclusive(pod) || requested_gpus(pod).1 > ALLOCATABLE_BYTES / 2)
    {
        reserved_gpus(pod)
            .into_iter()
            .flatten()
            .for_each(|gpu| holders.entry(gpu).or_default().push(pod_name(pod)));
    }
    holders.retain(|_, pods| pods.len() > 1);
    holders
}

pub fn pod_name(pod: &Value) -> String {
    pod["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}
