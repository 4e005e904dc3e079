//! What a Node object shows of its GPUs: their list by the labels of GPU feature discovery, resources of other allocators, and
//! changes under way. Labels and resources of others are never taken for what they cannot be.

use super::VRAM;
use k8s_openapi::api::core::v1::Node;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::MAX_GPUS;
use stowage_scheduling::vocabulary::device_plugin::{PluginDevices, PluginResource};
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::node_signs::{NodeLabel, NodeSigns};

/// Labels that GPU feature discovery sets on nodes.
pub mod feature_discovery {
    pub const COUNT: &str = "nvidia.com/gpu.count";
    pub const MEMORY_MIB: &str = "nvidia.com/gpu.memory";
    pub const PRODUCT: &str = "nvidia.com/gpu.product";
}

/// The memory of a GPU or MIG slice in MiB: a figure in GiB is less, one in KiB or bytes is more.
const PLAUSIBLE_MIB: RangeInclusive<u64> = 512..=4 << 20;
/// Labels by which NVIDIA's managers of MIG layouts, vGPUs and drivers say what they do, and the values by which they do nothing.
const MANAGER_STATES: [(&str, &[&str]); 3] = [
    ("nvidia.com/mig.config.state", &["", "success"]),
    ("nvidia.com/vgpu.config.state", &["", "success"]),
    // The node waits for its turn while an upgrade is required.
    (
        "nvidia.com/gpu-driver-upgrade-state",
        &["", "upgrade-done", "upgrade-required"],
    ),
];
/// The GPU operator's pods run where such a label says so, and a manager that works adds to the value that they pause.
const DEPLOY_LABEL_PREFIX: &str = "nvidia.com/gpu.deploy.";
const PAUSED_VALUE: &str = "paused-for-";
/// The condition of a node on which gpu-fractioning has each container's VRAM limits kept by the driver. When its operator stops,
/// the condition becomes `Unknown`.
const LIMITS_CONDITION: &str = "gpu-fractioning.nvidia.com/Ready";
/// Parts of names of resources that stand for NVIDIA GPUs.
const GPU_NAME_PARTS: [&str; 3] = ["gpu", "nvidia", "cuda"];

/// The GPUs of a node from feature discovery's labels: enough for placement until an agent reports. `None` without such labels.
pub fn devices_from_labels(node: &Node) -> Result<Option<Vec<Device>>, NodeLabel> {
    static NO_LABELS: BTreeMap<String, String> = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&NO_LABELS);
    let value = |key| labels.get(key).map_or("", String::as_str);
    if ![feature_discovery::COUNT, feature_discovery::MEMORY_MIB]
        .iter()
        .any(|key| labels.contains_key(*key))
    {
        return Ok(None);
    }
    let number = |key, plausible: RangeInclusive<u64>| {
        let number = value(key)
            .parse()
            .ok()
            .filter(|number| plausible.contains(number));
        number.ok_or_else(|| label(key, value(key)))
    };
    let count = number(feature_discovery::COUNT, 1..=MAX_GPUS.into())?;
    let total = Bytes::mib(number(feature_discovery::MEMORY_MIB, PLAUSIBLE_MIB)?);
    let product = labels
        .get(feature_discovery::PRODUCT)
        .map_or("unknown", String::as_str);
    let model = GpuModel::parse(product).map_err(|_| label(feature_discovery::PRODUCT, product))?;
    let device = |index| Device {
        uuid: GpuUuid::from_index(index),
        index,
        model: model.clone(),
        parent: None,
        total,
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    };
    Ok(Some((0..count as u32).map(device).collect()))
}

/// The devices of a node's labels under the UUIDs that bound pods record of it. Labels say that the GPUs are alike, so it does not
/// matter which of them has which UUID. Records of more GPUs than there are, or of slices where the labels show none, match none.
pub fn with_recorded_uuids(mut devices: Vec<Device>, recorded: &BTreeSet<GpuUuid>) -> Vec<Device> {
    let are_slices = devices
        .iter()
        .any(|device| device.model.as_str().contains("-MIG-"));
    let (by_index, by_uuid): (Vec<&GpuUuid>, Vec<&GpuUuid>) =
        recorded.iter().partition(|uuid| uuid.index().is_some());
    let named = by_uuid
        .into_iter()
        .filter(|uuid| uuid.is_slice() == are_slices);
    let free = devices
        .iter_mut()
        .filter(|device| !by_index.contains(&&device.uuid));
    let (named, free): (Vec<_>, Vec<_>) = (named.collect(), free.collect());
    if named.len() <= free.len() {
        free.into_iter()
            .zip(named)
            .for_each(|(device, uuid)| device.uuid = uuid.clone());
    }
    devices
}

/// What else a node shows of its GPUs, beside what its labels say of their list.
pub fn node_signs(node: &Node, labelled: &Result<Option<Vec<Device>>, NodeLabel>) -> NodeSigns {
    let devices = labelled.as_ref().ok().and_then(Option::as_ref);
    NodeSigns {
        resources: other_resources(node),
        changes: node
            .metadata
            .labels
            .iter()
            .flatten()
            .filter_map(change)
            .collect(),
        unreadable: labelled.as_ref().err().cloned(),
        labelled: devices.map(|devices| (devices.len() as u32, devices[0].total)),
        keeps_vram_limits: has_condition(node, LIMITS_CONDITION),
    }
}

fn has_condition(node: &Node, kind: &str) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    conditions
        .flatten()
        .any(|condition| condition.type_ == kind && condition.status == "True")
}

/// The devices that device plugins advertise on a node, for placement.
pub fn plugin_devices(node: &Node) -> PluginDevices {
    let allocatable = node
        .status
        .iter()
        .flat_map(|status| &status.allocatable)
        .flatten();
    let devices = allocatable.filter_map(|(name, amount)| {
        let count = Bytes::parse_quantity(&amount.0).ok()?;
        Some((
            PluginResource::parse(name)?,
            u32::try_from(count.0).unwrap_or(u32::MAX),
        ))
    });
    devices.collect()
}

/// The resources of which the node has any. Capacity, too: while a plugin restarts none of its devices are allocatable, and its
/// pods still have their GPUs. The kubelet keeps a resource whose plugin is gone, with an amount of 0.
pub fn resources(node: &Node) -> impl Iterator<Item = &str> {
    let status = node.status.iter();
    let amounts = status
        .flat_map(|status| status.allocatable.iter().chain(&status.capacity))
        .flatten();
    amounts
        .filter(|(_, amount)| Bytes::parse_quantity(&amount.0) != Ok(Bytes::ZERO))
        .map(|(name, _)| name.as_str())
}

fn other_resources(node: &Node) -> BTreeMap<Arc<str>, bool> {
    let is_other = |name: &&str| {
        let is_extended = name
            .split_once('/')
            .is_some_and(|(domain, _)| !domain.ends_with("kubernetes.io"));
        is_extended && *name != VRAM && !PluginResource::is_plugin_resource(name)
    };
    let suggests_gpu = |name: &str| {
        let name = name.to_ascii_lowercase();
        GPU_NAME_PARTS.iter().any(|part| name.contains(part))
    };
    resources(node)
        .filter(is_other)
        .map(|name| (name.into(), suggests_gpu(name)))
        .collect()
}

fn change((key, value): (&String, &String)) -> Option<NodeLabel> {
    let state = MANAGER_STATES.iter().find(|(label, _)| label == key);
    let is_changing = match state {
        Some((_, idle)) => !idle.contains(&value.as_str()),
        None => key.starts_with(DEPLOY_LABEL_PREFIX) && value.contains(PAUSED_VALUE),
    };
    is_changing.then(|| label(key, value))
}

fn label(key: &str, value: &str) -> NodeLabel {
    NodeLabel {
        key: key.into(),
        value: value.into(),
    }
}
