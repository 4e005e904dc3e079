//! One node as a decision sees it: its GPUs and what is left of each.

use super::classification::ClassSet;
use super::cluster_share::TenantUsage;
use super::demand::HostResources;
use super::device_plugin::{PluginResource, PluginShare};
use super::engine_model::ReusableEngineSet;
use super::gpu::{Device, Gpu, GpuSet};
use super::image::NodeImageSet;
use super::is_default;
use super::model_tier::{NodeModel, NodeModelSet};
use super::node_reading::Freshness;
use super::node_signs::NodeWarning;
use super::start_time::{NodeStartFactors, StartFactors, StartKind};
use crate::ids::{GpuModel, GpuUuid, ModelId, NodeName};
use crate::units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What hands out a node's GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// Stowage chooses the GPU, and the container gets it by CDI.
    #[default]
    Stowage,
    /// A device plugin offers `nvidia.com/*`, and the kubelet picks: a GPU assumed here could be handed out twice.
    DevicePlugin,
    /// A DRA driver publishes them as ResourceSlices, and kube-scheduler allocates them to claims.
    Dra,
}

/// Identity of the Node object behind a name and of its machine. A name is reused: by another machine, or by the same one that
/// has registered again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeIdentity {
    /// The Node object's UID.
    pub uid: Arc<str>,
    /// What the machine says of itself, if it says anything.
    pub machine: Option<Arc<str>>,
    /// When the Node object was created, in seconds since 1970 by the API server's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<i64>,
}

impl NodeIdentity {
    pub fn is_same_machine(&self, other: &Self) -> bool {
        self.uid == other.uid || self.machine.is_some() && self.machine == other.machine
    }
}

/// `gpus` and `devices` run in parallel: the first is what changes and what decisions read, the second what the
/// hardware is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub name: NodeName,
    pub kind: NodeKind,
    /// The ledger's generation when this node last changed.
    pub generation: u64,
    pub gpus: Arc<[Gpu]>,
    pub devices: Arc<[Device]>,
    /// What a device plugin offers here, in order of resource.
    pub plugin: Arc<[PluginShare]>,
    /// How far what was measured here can be believed.
    pub freshness: Freshness,
    /// The policy places nothing on a node without a recent report.
    pub closed: bool,
    /// Its GPUs are not cut as its pool expects.
    pub miscut: bool,
    /// The driver keeps containers within their VRAM here.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keeps_vram_limits: bool,
    /// Warnings about its GPUs that follow from its Node object, first those that keep pods away that request VRAM.
    #[serde(default)]
    pub warnings: Arc<[NodeWarning]>,
    /// Classes that its pool takes.
    pub classes: ClassSet,
    /// Models of which something is here.
    pub holdings: NodeModelSet,
    /// Engines that sleep on its GPUs and that new pods may wake.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reusable: ReusableEngineSet,
    /// Images that are here, as far as the node lists them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub images: NodeImageSet,
    /// How far the policy's speeds are off here, as far as engines have started here.
    #[serde(default, skip_serializing_if = "is_default")]
    pub start_factors: NodeStartFactors,
    /// Pods of each model that are here or on their way; kept only where the policy spreads them.
    pub replicas: Arc<[(ModelId, u16)]>,
    /// CPU and memory that pods may still have here; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_host: Option<HostResources>,
}

impl Node {
    /// The UUIDs of these GPUs; indices that the node does not have are skipped.
    pub fn uuids(&self, gpus: GpuSet) -> Arc<[GpuUuid]> {
        gpus.iter()
            .filter_map(|gpu_index| self.devices.get(gpu_index))
            .map(|device| device.uuid.clone())
            .collect()
    }

    /// A node of which only the name is known; it admits all classes.
    pub fn from_name(name: NodeName) -> Self {
        Self {
            name,
            kind: NodeKind::default(),
            generation: 0,
            gpus: Arc::new([]),
            devices: Arc::new([]),
            plugin: Arc::new([]),
            freshness: Freshness::default(),
            closed: false,
            miscut: false,
            keeps_vram_limits: false,
            warnings: Arc::default(),
            classes: ClassSet::ALL,
            holdings: NodeModelSet::default(),
            reusable: ReusableEngineSet::default(),
            images: NodeImageSet::default(),
            start_factors: NodeStartFactors::default(),
            replicas: Arc::new([]),
            free_host: None,
        }
    }

    /// Free VRAM over all its GPUs.
    pub fn free(&self) -> Bytes {
        self.gpus.iter().map(Gpu::free).sum()
    }

    /// The tier and size in which the node has a model; `None` if it has nothing of it.
    pub fn holding(&self, model: &ModelId) -> Option<&NodeModel> {
        self.holdings.get(model)
    }

    /// What was learned here of one kind of start.
    pub(crate) fn start_factors_of(&self, kind: StartKind) -> Option<&StartFactors> {
        self.start_factors
            .iter()
            .find(|(of_kind, _)| *of_kind == kind)
            .map(|(_, factors)| factors)
    }

    /// The model of its GPUs, of which a node has one as a rule.
    pub fn gpu_model(&self) -> Option<&GpuModel> {
        self.devices.first().map(|device| &device.model)
    }

    /// Pods of that model that are here or on their way.
    pub(crate) fn replicas_of(&self, model: &ModelId) -> u16 {
        self.replicas
            .iter()
            .find(|(other, _)| other == model)
            .map_or(0, |(_, count)| *count)
    }

    /// What a device plugin has of that resource here.
    pub(crate) fn plugin_share_of(&self, resource: &PluginResource) -> Option<&PluginShare> {
        self.plugin.iter().find(|share| share.resource == *resource)
    }

    /// What the node adds to the cluster that tenants share, in the units of their usage. A device counts as a GPU, whatever
    /// part of one it is: so do those that pods ask for.
    pub fn quota_capacity(&self) -> TenantUsage {
        let gpus = match self.kind {
            NodeKind::Stowage => self.gpus.len() as u64,
            NodeKind::DevicePlugin => self
                .plugin
                .iter()
                .map(|share| u64::from(share.allocatable))
                .sum(),
            // Claims are charged to no tenant.
            NodeKind::Dra => return TenantUsage::default(),
        };
        TenantUsage {
            vram: self.capacity(),
            milli_gpus: gpus * 1000,
        }
    }

    pub fn capacity(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.capacity).sum()
    }

    pub fn charged(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.charged).sum()
    }
}
