//! What neither time nor an eviction changes: the pod asks for more than any node has. It is no remedy, and is told beside them.

use crate::explaining::facts::Facts;
use crate::ids::{GpuModel, NodeName};
use crate::units::Bytes;
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fmt;

/// Why waiting does not help, and its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Impasse {
    #[serde(flatten)]
    pub kind: ImpasseKind,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "code"
)]
pub enum ImpasseKind {
    /// No GPU would fit the pod even if it were empty.
    NoGpuLargeEnough {
        needs_bytes: Bytes,
        largest_bytes: Bytes,
        node: NodeName,
        model: Option<GpuModel>,
    },
    /// No device plugin offers as many on one node; `node` offers the most.
    NoNodeWithDevices {
        resource: String,
        #[serde(rename = "asked")]
        requested: u32,
        most: u32,
        node: Option<NodeName>,
    },
}

/// The impasse of a pod that fits nowhere; `None` where time or an eviction may help.
pub fn impasse(facts: &Facts) -> Option<Impasse> {
    let kind = match &facts.demand().ask {
        GpuRequest::Plugin { resource, count } => no_node_with_devices(facts, resource, *count),
        _ => no_gpu_large_enough(facts),
    }?;
    Some(Impasse {
        text: kind.to_string(),
        kind,
    })
}

/// The largest GPU is too small.
fn no_gpu_large_enough(facts: &Facts) -> Option<ImpasseKind> {
    let nodes = facts.snapshot.nodes().iter();
    let gpus = nodes.flat_map(|node| {
        node.gpus
            .iter()
            .enumerate()
            .map(move |(gpu_index, gpu)| (gpu.capacity, node, gpu_index))
    });
    let (largest, node, gpu_index) =
        gpus.min_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.name.cmp(&b.1.name)))?;
    (largest < facts.demand().per_gpu).then(|| ImpasseKind::NoGpuLargeEnough {
        needs_bytes: facts.demand().per_gpu,
        largest_bytes: largest,
        node: node.name.clone(),
        model: node
            .devices
            .get(gpu_index)
            .map(|device| device.model.clone()),
    })
}

/// No node offers as many devices, even without its pods.
fn no_node_with_devices(
    facts: &Facts,
    resource: &PluginResource,
    requested: u32,
) -> Option<ImpasseKind> {
    let offers = facts.snapshot.nodes().iter().map(|node| {
        let share = node.plugin_share_of(resource);
        (
            share.map_or(0, |share| share.allocatable),
            Reverse(&node.name),
        )
    });
    let most: Option<(u32, Reverse<&NodeName>)> = offers.max().filter(|(most, _)| *most > 0);
    let node = most.map(|(_, Reverse(node))| node.clone());
    let most = most.map_or(0, |(most, _)| most);
    (most < requested).then(|| ImpasseKind::NoNodeWithDevices {
        resource: resource.to_string(),
        requested,
        most,
        node,
    })
}

impl fmt::Display for ImpasseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoGpuLargeEnough {
                needs_bytes,
                largest_bytes,
                node,
                model,
            } => {
                let model = model
                    .as_ref()
                    .map_or(String::new(), |model| format!(", {model}"));
                write!(
                    f,
                    "no GPU of this cluster can allocate {needs_bytes}; the largest ({node}{model}) can allocate {largest_bytes}"
                )
            }
            Self::NoNodeWithDevices {
                resource,
                requested,
                most,
                node,
            } => {
                write!(
                    f,
                    "no node's device plugin offers {requested} of {resource}"
                )?;
                match node {
                    Some(node) => write!(f, "; {node} offers most, {most}"),
                    None => write!(
                        f,
                        "; check that the plugin is running and the resource's name is right"
                    ),
                }
            }
        }
    }
}
