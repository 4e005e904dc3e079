//! The oracle: which GPUs are overallocated, and by which pods, read off the API server's objects and nothing else.

use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Allocatable VRAM of a GPU of 80 GiB.
const PROMISABLE: u64 = 72 << 30;
/// The capacity of a GPU: no policy can have allocated more than that.
const WHOLE: u64 = 80 << 30;

/// One pod's part of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PodShare {
    pod: String,
    bytes: u64,
    is_exclusive: bool,
    has_started: bool,
}

/// GPUs that are overallocated, with their pods.
pub fn promised_twice(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<String>> {
    names(promises(pods), |parts| is_more_than(PROMISABLE, parts))
}

/// GPUs that are overallocated by the Bindings' own records, with a pod that has not started and could be evicted.
pub fn could_be_mended(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<String>> {
    names(promises(pods), |parts| is_more_than(WHOLE, parts) && parts.iter().any(|part| !part.has_started))
}

fn promises(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<PodShare>> {
    let mut promises: BTreeMap<String, Vec<PodShare>> = BTreeMap::new();
    for pod in pods {
        for (gpu, part) in parts(pod) {
            promises.entry(gpu).or_default().push(part);
        }
    }
    promises
}

fn names(
    mut promises: BTreeMap<String, Vec<PodShare>>,
    is_wrong: impl Fn(&[PodShare]) -> bool,
) -> BTreeMap<String, Vec<String>> {
    promises.retain(|_, parts| is_wrong(parts));
    promises.into_iter().map(|(gpu, parts)| (gpu, parts.into_iter().map(|part| part.pod).collect())).collect()
}

fn is_more_than(limit: u64, parts: &[PodShare]) -> bool {
    let sum: u64 = parts.iter().map(|part| part.bytes).sum();
    sum > limit || (parts.len() > 1 && parts.iter().any(|part| part.is_exclusive))
}

fn parts(pod: &Value) -> Vec<(String, PodShare)> {
    let written = &pod["metadata"]["annotations"];
    let text = |key: &str| written[key].as_str();
    let (Some(node), Some(devices), Some(granted)) = (
        pod["spec"]["nodeName"].as_str(),
        text("stowage.dev/devices"),
        text("stowage.dev/vram-granted").and_then(|bytes| bytes.parse::<u64>().ok()),
    ) else {
        return Vec::new();
    };
    if matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let devices: Vec<&str> = devices.split(',').collect();
    let part = PodShare {
        pod: name(pod),
        bytes: granted.div_ceil(devices.len() as u64),
        is_exclusive: text("stowage.dev/exclusive") == Some("true"),
        has_started: pod["status"]["phase"] == "Running",
    };
    devices.into_iter().map(|device| (format!("{node}/{device}"), part.clone())).collect()
}

/// Active reservations, as the pods' conditions show them: per pod, its GPUs.
pub fn holds(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<String>> {
    pods.iter().filter_map(|pod| Some((name(pod), held(pod)?))).collect()
}

fn held(pod: &Value) -> Option<Vec<String>> {
    let mut conditions = pod["status"]["conditions"].as_array()?.iter();
    let reservation =
        conditions.find(|one| one["type"] == "stowage.dev/Reserved" && one["status"] == "True")?;
    if pod["spec"]["nodeName"].is_string() {
        return None;
    }
    let message: Value = serde_json::from_str(reservation["message"].as_str()?).ok()?;
    let node = message["node"].as_str()?.to_owned();
    let devices = message["devices"].as_array()?.iter().filter_map(Value::as_str);
    Some(devices.map(|device| format!("{node}/{device}")).collect())
}

/// GPUs with reservations of more than one pod, which each take more than half of a GPU.
pub fn held_twice(pods: &[Arc<Value>]) -> BTreeMap<String, Vec<String>> {
    let mut holders: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| asks_most(pod)) {
        held(pod).into_iter().flatten().for_each(|gpu| holders.entry(gpu).or_default().push(name(pod)));
    }
    holders.retain(|_, pods| pods.len() > 1);
    holders
}

fn asks_most(pod: &Value) -> bool {
    let annotations = &pod["metadata"]["annotations"];
    let gpus = annotations["stowage.dev/gpus"].as_str().and_then(|gpus| gpus.parse().ok()).unwrap_or(1);
    let asked = pod["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"].as_str();
    let gib: u64 = asked.and_then(|asked| asked.strip_suffix("Gi")?.parse().ok()).unwrap_or(0);
    annotations["stowage.dev/exclusive"] == "true" || (gib << 30).div_ceil(gpus) > PROMISABLE / 2
}

pub fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}
