//! What a Node object shows of its GPUs beside their list: resources of other allocators, changes under way, and labels that
//! cannot be right. What is not recognised is unknown, and nothing is placed on what is unknown.

use super::gpu::Device;
use crate::coded::coded;
use crate::units::{Bytes, plural};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// What a Node object shows of its GPUs, before a policy judges it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSigns {
    /// Extended resources of which the node has any, without Stowage's and those that Stowage serves pods of; and whether the name
    /// suggests an NVIDIA GPU.
    pub resources: BTreeMap<Arc<str>, bool>,
    /// Labels by which the layout of the GPUs, or their driver, is being changed.
    pub changes: Vec<NodeLabel>,
    /// The first label of GPU feature discovery that cannot be right.
    pub unreadable: Option<NodeLabel>,
    /// The GPUs by those labels: their number, and the memory of each.
    pub labelled: Option<(u32, Bytes)>,
    /// The driver keeps a container within its VRAM there: gpu-fractioning is ready.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_vram_limits: bool,
}

/// A label of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeLabel {
    pub key: Arc<str>,
    /// Empty if the label is missing.
    pub value: Arc<str>,
}

coded! {
    /// What is remarkable about a node's GPUs, and whether it is that something else hands them out, or may do so. The first four keep
    /// pods away that request VRAM.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    pub enum NodeWarning: bool {
        "other-allocator" OtherAllocator { resource: Arc<str> },
            "{resource} in the node's capacity stands for its GPUs, so something else than Stowage hands them out: remove that from the node, or, if it stands for other things, add {resource} to nodes.harmlessResources in the policy"
            => true;
        "unknown-gpu-resource" UnknownResource { resource: Arc<str> },
            "{resource} in the node's capacity may stand for its GPUs: add it to nodes.gpuResources in the policy if something else hands them out by it, or to nodes.harmlessResources"
            => true;
        "gpus-changing" GpusChanging { label: NodeLabel },
            "the label {label} says that the node's GPUs or their driver are being changed; nodes.ignoredLabels in the policy names labels that do not count"
            => false;
        "unreadable-label" UnreadableLabel { label: NodeLabel },
            "the label {label} cannot be right: start the agent on the node, whose report counts instead, or correct the label"
            => false;
        "ignored-label" IgnoredLabel { label: NodeLabel },
            "the label {label} cannot be right; what the agent reports counts"
            => false;
        "contradicted-labels" ContradictedLabels { gpus: u32, memory: Bytes },
            "by its labels the node has {} of {memory}, which the agent does not report; what it reports counts", plural(*gpus, "GPU")
            => false;
    }
}

impl NodeSigns {
    /// Those of a hypothetical node: whoever buys nodes for pods that require limits installs what keeps them.
    pub fn with_vram_limits() -> Self {
        Self {
            keeps_vram_limits: true,
            ..Self::default()
        }
    }

    /// A warning about the labels of GPU feature discovery, compared with what an agent has reported.
    pub fn label_warning(&self, devices: &[Device], is_reported: bool) -> Option<NodeWarning> {
        match (self.unreadable.clone(), self.labelled) {
            (Some(label), _) if is_reported => Some(NodeWarning::IgnoredLabel { label }),
            (Some(label), _) => Some(NodeWarning::UnreadableLabel { label }),
            (None, Some((gpus, memory)))
                if is_reported && !matches_labels(devices, gpus, memory) =>
            {
                Some(NodeWarning::ContradictedLabels { gpus, memory })
            }
            _ => None,
        }
    }
}

/// Whether the devices are so many GPUs, one of them with about so much memory: the labels of a node with unlike GPUs are of one.
/// Labels of MIG slices are of the cards or of the slices, whatever the strategy.
fn matches_labels(devices: &[Device], gpus: u32, memory: Bytes) -> bool {
    let has_slices = devices.iter().any(|device| device.parent.is_some());
    let is_about = |device: &Device| device.total.0.abs_diff(memory.0) <= memory.0 / 16;
    has_slices || devices.len() == gpus as usize && devices.iter().any(is_about)
}

impl fmt::Display for NodeLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value } = self;
        if value.is_empty() {
            write!(f, "{key}, which is empty or missing,")
        } else {
            write!(f, "{key}={value}")
        }
    }
}
