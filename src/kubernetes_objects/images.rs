//! Container images: those that a node lists, those that a pod needs, and the engine that a pod runs by its label or its image.

use super::{containers, requested_resources};
use k8s_openapi::api::core::v1::{Container, Node, Pod};
use std::collections::BTreeSet;
use std::sync::Arc;
use stowage_scheduling::engines::Engine;
use stowage_scheduling::ledger::StartProgress;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::ContainerRole;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::image::{ImageId, MAX_POD_IMAGES, NodeImage, largest_images};

/// The label that llm-d puts on the pods of an engine.
const ENGINE_LABEL: &str = "llm-d.ai/engine-type";

/// The images on a node under each of their names, the largest if there are very many; `None` if it lists none: a kubelet may be
/// told not to.
pub fn node_images(node: &Node) -> Option<Vec<NodeImage>> {
    let images = node
        .status
        .as_ref()?
        .images
        .as_ref()
        .filter(|images| !images.is_empty())?;
    let named = images.iter().flat_map(|image| {
        let bytes = Bytes(
            image
                .size_bytes
                .and_then(|bytes| u64::try_from(bytes).ok())
                .unwrap_or(0),
        );
        let names = image.names.iter().flatten();
        names.filter_map(move |name| {
            Some(NodeImage {
                image: ImageId::from_reference(name)?,
                bytes,
            })
        })
    });
    Some(largest_images(named.collect()))
}

/// The images of a pod's containers, in order, each once. A container that is never pulled for has none: with `Never` the image
/// is there or the pod does not start.
pub(crate) fn pod_images(pod: &Pod) -> Arc<[ImageId]> {
    let needed = pod
        .spec
        .iter()
        .flat_map(containers)
        .filter_map(|(_, container)| {
            let is_pulled = container.image_pull_policy.as_deref() != Some("Never");
            container
                .image
                .as_deref()
                .filter(|_| is_pulled)
                .and_then(ImageId::from_reference)
        });
    let images: BTreeSet<ImageId> = needed.take(MAX_POD_IMAGES).collect();
    images.into_iter().collect()
}

/// The engine that a pod runs.
pub fn engine(pod: &Pod) -> Engine {
    let engine_label = pod
        .metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(ENGINE_LABEL));
    let by_image = || gpu_containers(pod).find_map(|container| container.image.as_deref());
    engine_label
        .map(String::as_str)
        .or_else(by_image)
        .map(Engine::from_text)
        .unwrap_or_default()
}

/// How far a bound pod has come with its start; `None` while it has not begun.
pub fn start_progress(pod: &Pod) -> Option<StartProgress> {
    let status = pod.status.as_ref()?;
    let statuses = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses)
        .flatten();
    let mut restarts = statuses.map(|container| container.restart_count);
    // Without a probe a container counts as ready when its process runs.
    let has_probe = |container: &Container| {
        container.readiness_probe.is_some() || container.startup_probe.is_some()
    };
    if restarts.any(|count| count > 0) || !gpu_containers(pod).all(has_probe) {
        return Some(StartProgress::Untimed);
    }
    let is_ready = status
        .conditions
        .iter()
        .flatten()
        .any(|one| one.type_ == "Ready" && one.status == "True");
    if is_ready {
        return Some(StartProgress::Ready);
    }
    // An init container may fetch the model: the time until the others run is not that of a pull.
    let roles = pod.spec.iter().flat_map(containers).map(|(role, _)| role);
    let has_init = roles.into_iter().any(|role| role == ContainerRole::Init);
    (status.phase.as_deref() == Some("Running") && !has_init).then_some(StartProgress::Running)
}

/// The containers that ask for VRAM or a GPU.
fn gpu_containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let asks = |container: &Container| {
        requested_resources(container)
            .any(|resource| resource == super::VRAM || PluginResource::is_plugin_resource(resource))
    };
    pod.spec
        .iter()
        .flat_map(containers)
        .map(|(_, container)| container)
        .filter(move |one| asks(one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use stowage_scheduling::vocabulary::image::MAX_NODE_IMAGES;

    fn id(reference: &str) -> ImageId {
        ImageId::from_reference(reference).unwrap()
    }

    fn pod(status: Value, edit: impl FnOnce(&mut Value)) -> Pod {
        let mut pod = json!({
            "metadata": { "labels": {} },
            "spec": {
                "initContainers": [{ "name": "proxy", "image": "proxy:1", "restartPolicy": "Always" }],
                "containers": [
                    {
                        "name": "engine", "image": "vllm/vllm-openai:v0.33.0",
                        "resources": { "limits": { "stowage.dev/vram": "40Gi" } },
                        "readinessProbe": { "httpGet": { "path": "/health", "port": 8000 } },
                    },
                    { "name": "side", "image": "sglang-exporter" },
                    { "name": "never", "image": "local", "imagePullPolicy": "Never" },
                ],
            },
            "status": status,
        });
        edit(&mut pod);
        serde_json::from_value(pod).unwrap()
    }

    #[test]
    fn a_pod_needs_the_images_of_all_its_containers_that_are_pulled() {
        let mut expected = ["proxy:1", "vllm/vllm-openai:v0.33.0", "sglang-exporter"].map(id);
        expected.sort_unstable();
        assert_eq!(*pod_images(&pod(json!({}), |_| ())), expected);
        let many: Vec<Value> = (0..1000)
            .map(|n| json!({ "name": format!("c{n}"), "image": format!("i:{n}") }))
            .collect();
        let crowded = pod(json!({}), |pod| pod["spec"]["containers"] = many.into());
        assert_eq!(pod_images(&crowded).len(), MAX_POD_IMAGES);
    }

    #[test]
    fn the_engine_is_that_of_the_container_with_the_gpu_unless_a_label_says_otherwise() {
        assert_eq!(engine(&pod(json!({}), |_| ())), Engine::Vllm);
        let labelled = pod(json!({}), |pod| {
            pod["metadata"]["labels"][ENGINE_LABEL] = "sglang".into()
        });
        assert_eq!(engine(&labelled), Engine::Sglang);
    }

    #[test]
    fn a_start_is_timed_from_the_pull_to_the_probe() {
        let running = || json!({ "phase": "Running", "containerStatuses": [] });
        let ready = || {
            let conditions = json!([{ "type": "Ready", "status": "True" }]);
            json!({ "phase": "Running", "conditions": conditions, "containerStatuses": [] })
        };
        let progress =
            |status: Value, edit: &dyn Fn(&mut Value)| start_progress(&pod(status, edit));
        assert_eq!(progress(json!({ "phase": "Pending" }), &|_| ()), None);
        assert_eq!(progress(running(), &|_| ()), Some(StartProgress::Running));
        assert_eq!(progress(ready(), &|_| ()), Some(StartProgress::Ready));
        let fetches = |pod: &mut Value| {
            let init = json!({ "name": "fetch", "image": "storage-initializer" });
            pod["spec"]["initContainers"]
                .as_array_mut()
                .unwrap()
                .push(init);
        };
        assert_eq!(
            progress(running(), &fetches),
            None,
            "the pull cannot be told from the fetch"
        );
        assert_eq!(progress(ready(), &fetches), Some(StartProgress::Ready));
        let restarted = |pod: &mut Value| {
            let status = json!({ "name": "engine", "restartCount": 1, "ready": true, "image": "", "imageID": "" });
            pod["status"]["containerStatuses"] = json!([status]);
        };
        assert_eq!(progress(ready(), &restarted), Some(StartProgress::Untimed));
        let unprobed =
            |pod: &mut Value| pod["spec"]["containers"][0]["readinessProbe"] = Value::Null;
        assert_eq!(progress(ready(), &unprobed), Some(StartProgress::Untimed));
    }

    #[test]
    fn a_node_that_lists_ten_thousand_images_is_read_within_bounds() {
        let image = |n: u64| json!({ "names": [format!("r.io/i:{n}"), ""], "sizeBytes": n });
        let node = |images: Vec<Value>| {
            serde_json::from_value::<Node>(json!({ "status": { "images": images } })).unwrap()
        };
        let listed = node_images(&node((0..10_000).map(image).collect())).unwrap();
        assert_eq!(listed.len(), MAX_NODE_IMAGES);
        assert!(
            listed
                .iter()
                .all(|image| image.bytes.0 >= 10_000 - MAX_NODE_IMAGES as u64)
        );
        assert_eq!(node_images(&node(Vec::new())), None);
        let odd = json!({ "names": ["r.io/odd"], "sizeBytes": -1 });
        let expected = vec![NodeImage {
            image: id("r.io/odd"),
            bytes: Bytes::ZERO,
        }];
        assert_eq!(node_images(&node(vec![odd, json!({})])), Some(expected));
    }
}
