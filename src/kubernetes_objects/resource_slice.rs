//! ResourceSlices of DRA drivers, converted into what placement depends on: which nodes reach their devices, and which GPUs these
//! are. What cannot be read counts as the most that it could mean.

use super::kube_filters::node_terms;
use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};
use std::collections::BTreeSet;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName};
use stowage_scheduling::kube_filters::node::NodeTerm;
use stowage_scheduling::ledger::{DeviceSlice, DeviceUuids, PublishedDevices};

/// The attribute by which a driver names a GPU or a part of one, as NVML does.
const UUID: &str = "uuid";
/// The attribute of a part of a GPU that names the GPU.
const PARENT_UUID: &str = "parentUUID";
/// UUIDs that are compared. The API allows no slice more than 128 devices.
const MAX_UUIDS: usize = 1024;

/// A slice by its name; `None` for one without a name.
pub fn device_slice(slice: &ResourceSlice) -> Option<(Arc<str>, DeviceSlice)> {
    let ResourceSliceSpec { driver, pool, .. } = &slice.spec;
    let read = DeviceSlice {
        driver: driver.as_str().into(),
        pool: pool.name.as_str().into(),
        scope: scope(&slice.spec).into(),
        generation: pool.generation,
        slices_of_pool: pool.resource_slice_count,
        devices: published_devices(&slice.spec),
    };
    Some((slice.metadata.name.as_deref()?.into(), read))
}

/// The nodes that the whole slice is for. One whose devices have nodes of their own is for all.
fn scope(spec: &ResourceSliceSpec) -> String {
    match (&spec.node_name, &spec.node_selector) {
        (Some(name), _) => format!("node {name}"),
        (None, Some(selector)) => serde_json::to_string(selector).unwrap_or_default(),
        (None, None) => String::new(),
    }
}

fn published_devices(spec: &ResourceSliceSpec) -> Vec<PublishedDevices> {
    let of_slice = reach(spec.node_name.as_deref(), spec.node_selector.as_ref());
    let mut found: Vec<PublishedDevices> = Vec::new();
    for device in spec.devices.iter().flatten() {
        let reach = match spec.per_device_node_selection {
            Some(true) => reach(device.node_name.as_deref(), device.node_selector.as_ref()),
            _ => of_slice.clone(),
        };
        let same_reach = found
            .iter_mut()
            .find(|devices| is_reached_by(devices, &reach));
        match (same_reach, reach) {
            (Some(devices), _) => add_device(devices, device, &spec.driver),
            (None, Reach::Node(name)) => found.push(PublishedDevices::OnNode(name)),
            (None, Reach::Selected(terms)) => {
                let mut devices = PublishedDevices::Shared {
                    terms,
                    uuids: DeviceUuids::Known(BTreeSet::new()),
                };
                add_device(&mut devices, device, &spec.driver);
                found.push(devices);
            }
        }
    }
    found
}

/// Which nodes reach a device.
#[derive(Clone)]
enum Reach {
    Node(NodeName),
    /// Those that match one of the terms; all without terms.
    Selected(Option<Vec<NodeTerm>>),
}

fn reach(node: Option<&str>, selector: Option<&NodeSelector>) -> Reach {
    match node.map(NodeName::parse) {
        Some(Ok(name)) => Reach::Node(name),
        _ => Reach::Selected(selector.and_then(|selector| node_terms(selector).ok())),
    }
}

fn is_reached_by(devices: &PublishedDevices, reach: &Reach) -> bool {
    match (devices, reach) {
        (PublishedDevices::OnNode(on_node), Reach::Node(name)) => on_node == name,
        (
            PublishedDevices::Shared {
                terms: listed_terms,
                ..
            },
            Reach::Selected(terms),
        ) => listed_terms == terms,
        _ => false,
    }
}

/// Adds a device to those that the same nodes reach.
fn add_device(devices: &mut PublishedDevices, device: &Device, driver: &str) {
    let PublishedDevices::Shared { uuids, .. } = devices else {
        return;
    };
    let DeviceUuids::Known(listed) = uuids else {
        return;
    };
    let mut named = uuids_of(device, driver).peekable();
    let is_known = named.peek().is_some();
    listed.extend(named);
    if !is_known || listed.len() > MAX_UUIDS {
        *uuids = DeviceUuids::Unknown;
    }
}

/// The GPU or part of one that it is, and the GPU that it is a part of, as far as it says so. An attribute without a domain is of
/// the driver's.
fn uuids_of(device: &Device, driver: &str) -> impl Iterator<Item = GpuUuid> {
    let attribute = move |name: &str| {
        let attributes = device.attributes.as_ref()?;
        let found = attributes
            .get(name)
            .or_else(|| attributes.get(&format!("{driver}/{name}")))?;
        GpuUuid::parse(found.string.as_deref()?).ok()
    };
    [UUID, PARENT_UUID].into_iter().filter_map(attribute)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(spec: Value) -> DeviceSlice {
        let mut whole = json!({
            "driver": "gpu.nvidia.com", "pool": { "name": "p", "generation": 3, "resourceSliceCount": 2 },
        });
        whole
            .as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        let slice = json!({ "metadata": { "name": "s" }, "spec": whole });
        device_slice(&serde_json::from_value(slice).unwrap())
            .unwrap()
            .1
    }

    fn gpu(uuid: &str) -> Value {
        json!({ "name": "gpu", "attributes": { "uuid": { "string": uuid } } })
    }

    fn known_uuids(uuids: &[&str]) -> DeviceUuids {
        DeviceUuids::Known(
            uuids
                .iter()
                .map(|uuid| GpuUuid::parse(uuid).unwrap())
                .collect(),
        )
    }

    fn node(name: &str) -> PublishedDevices {
        PublishedDevices::OnNode(NodeName::parse(name).unwrap())
    }

    #[test]
    fn a_slice_reaches_one_node_selected_nodes_or_all_and_each_device_its_own() {
        assert_eq!(
            read(json!({ "nodeName": "a", "devices": [gpu("GPU-1"), gpu("GPU-2")] })).devices,
            [node("a")]
        );
        assert_eq!(read(json!({ "nodeName": "a" })).devices, []);
        let all =
            read(json!({ "allNodes": true, "devices": [gpu("GPU-1"), gpu("GPU-2")] })).devices;
        assert_eq!(
            all,
            [PublishedDevices::Shared {
                terms: None,
                uuids: known_uuids(&["GPU-1", "GPU-2"])
            }]
        );
        let term =
            json!({ "matchExpressions": [{ "key": "rack", "operator": "In", "values": ["7"] }] });
        let selector = json!({ "nodeSelectorTerms": [term] });
        let selected = read(json!({ "nodeSelector": selector, "devices": [gpu("GPU-1")] })).devices;
        assert!(
            matches!(&selected[..], [PublishedDevices::Shared { terms: Some(terms), .. }] if terms.len() == 1)
        );
        let mut on_a = gpu("GPU-1");
        on_a["nodeName"] = json!("a");
        let mut everywhere = gpu("GPU-2");
        everywhere["allNodes"] = json!(true);
        let each = json!({ "perDeviceNodeSelection": true, "devices": [on_a, everywhere] });
        let shared = PublishedDevices::Shared {
            terms: None,
            uuids: known_uuids(&["GPU-2"]),
        };
        assert_eq!(read(each).devices, [node("a"), shared]);
    }

    #[test]
    fn generations_are_compared_among_slices_for_the_same_nodes() {
        let scope = |spec: Value| read(spec).scope;
        let rack = |rack: &str| {
            let term = json!({ "matchExpressions": [{ "key": "rack", "operator": "In", "values": [rack] }] });
            json!({ "nodeSelector": { "nodeSelectorTerms": [term] } })
        };
        assert_eq!(
            scope(json!({ "nodeName": "a" })),
            scope(json!({ "nodeName": "a", "devices": [gpu("GPU-1")] }))
        );
        assert_eq!(scope(rack("7")), scope(rack("7")));
        let different = [
            json!({ "nodeName": "a" }),
            json!({ "nodeName": "b" }),
            rack("7"),
            rack("8"),
        ];
        let different: BTreeSet<_> = different
            .into_iter()
            .chain([json!({ "allNodes": true })])
            .map(scope)
            .collect();
        assert_eq!(different.len(), 5);
        assert_eq!(
            scope(json!({ "allNodes": true })),
            scope(json!({ "perDeviceNodeSelection": true }))
        );
    }

    #[test]
    fn a_device_is_known_by_its_uuid_or_by_that_of_the_gpu_it_is_a_part_of() {
        let shared = |devices: Value| match &read(json!({ "allNodes": true, "devices": devices }))
            .devices[..]
        {
            [PublishedDevices::Shared { uuids, .. }] => uuids.clone(),
            other => panic!("{other:?}"),
        };
        let qualified =
            json!({ "name": "a", "attributes": { "gpu.nvidia.com/uuid": { "string": "GPU-1" } } });
        let part = json!({ "name": "b", "attributes": { "parentUUID": { "string": "GPU-2" } } });
        assert_eq!(
            shared(json!([qualified, part])),
            known_uuids(&["GPU-1", "GPU-2"])
        );
        let another =
            json!({ "name": "a", "attributes": { "example.com/uuid": { "string": "GPU-1" } } });
        assert_eq!(shared(json!([gpu("GPU-1"), another])), DeviceUuids::Unknown);
        let thousands: Vec<Value> = (0..5000).map(|n| gpu(&format!("GPU-{n}"))).collect();
        assert_eq!(
            shared(json!(thousands)),
            DeviceUuids::Unknown,
            "too many to compare: it may be any"
        );
    }
}
