//! Models in container images: what KServe and image volumes call `oci://…`.
//!
//! The kubelet lists the images on its node in the Node object, fifty at most. A model image is identified by its reference,
//! and a pod that uses it names the same: `stowage.dev/model: oci://REGISTRY/NAME:TAG`.

use super::{ModelScan, ModelSource};
use k8s_openapi::api::core::v1::{ContainerImage, Node};
use kube::{Api, Client};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use stowage_report::ModelReport;
use stowage_scheduling::ids::{ModelId, NodeName};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use stowage_telemetry::root_cause;
use tokio::task::JoinHandle;

/// Images arrive with pods, and the kubelet updates the list every five minutes at best.
const IMAGE_POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Smaller images are pulled quickly, and nearly every image is smaller.
const MIN_MODEL_IMAGE: Bytes = Bytes::gib(1);

/// Dropping it ends the requests.
pub struct NodeImages {
    scan: Arc<Mutex<ModelScan>>,
    task: JoinHandle<()>,
}

impl NodeImages {
    /// Must be called inside a tokio runtime.
    pub fn start(client: Client, node: &NodeName) -> Self {
        let scan = Arc::new(Mutex::new(ModelScan::default()));
        let task = tokio::spawn(poll_images(Api::all(client), node.clone(), scan.clone()));
        Self { scan, task }
    }
}

impl Drop for NodeImages {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ModelSource for NodeImages {
    fn models(&mut self) -> ModelScan {
        self.scan.lock().clone()
    }
}

async fn poll_images(nodes: Api<Node>, name: NodeName, scan: Arc<Mutex<ModelScan>>) {
    let mut ticks = tokio::time::interval(IMAGE_POLL_INTERVAL);
    loop {
        ticks.tick().await;
        let found = match nodes.get(name.as_str()).await {
            Ok(node) => ModelScan {
                models: model_images(&node),
                problems: Vec::new(),
            },
            // The last list stays valid: images disappear more slowly than API servers come back.
            Err(error) => ModelScan {
                models: scan.lock().models.clone(),
                problems: vec![format!(
                    "images: the Node object {name} cannot be read: {}",
                    root_cause(&error)
                )],
            },
        };
        *scan.lock() = found;
    }
}

/// The node's large images, by the name that a user would write.
pub(crate) fn model_images(node: &Node) -> Vec<ModelReport> {
    let images = node
        .status
        .iter()
        .flat_map(|status| status.images.iter().flatten());
    images.filter_map(model_image).collect()
}

fn model_image(image: &ContainerImage) -> Option<ModelReport> {
    let bytes = Bytes(u64::try_from(image.size_bytes?).ok()?);
    // By digest only if it has no tag.
    let names = image.names.as_ref()?;
    let name = names
        .iter()
        .find(|name| !name.contains('@'))
        .or(names.first())?;
    let model = ModelId::parse(&format!("oci://{name}")).ok()?;
    (bytes >= MIN_MODEL_IMAGE).then(|| ModelReport {
        model,
        tier: ModelTier::Disk,
        bytes,
        source: "image".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_large_image_is_known_by_its_tag() {
        let node = serde_json::from_value(json!({ "status": { "images": [
            { "names": ["r.io/m/llama@sha256:00", "r.io/m/llama:1"], "sizeBytes": 16u64 << 30 },
            { "names": ["r.io/pause:3"], "sizeBytes": 700_000 },
            { "names": ["r.io/m/qwen@sha256:11"], "sizeBytes": 8u64 << 30 },
            { "sizeBytes": 8u64 << 30 },
        ] } }))
        .unwrap();
        let found: Vec<_> = model_images(&node)
            .into_iter()
            .map(|one| (one.model.to_string(), one.bytes.0 >> 30))
            .collect();
        assert_eq!(
            found,
            [
                ("oci://r.io/m/llama:1".into(), 16),
                ("oci://r.io/m/qwen@sha256:11".into(), 8)
            ]
        );
    }
}
