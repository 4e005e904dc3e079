//! What a plan is asked: the pods, and the kinds of nodes that may hold them. Values that an edge or a test fills in.

use super::geometry::Geometry;
use super::gpu_types::GpuType;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, NodeName, PodKey};
use stowage_scheduling::kube_filters::node::{FilterNode, ObjectLabels, Taint};
use stowage_scheduling::kube_filters::resources::{CPU, MEMORY};
use stowage_scheduling::kube_filters::{Requirements, ResourceList};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::device_plugin::PluginDevices;
use stowage_scheduling::vocabulary::gpu::{Device, Health};

/// Pods, and the nodes that they may be placed on.
#[derive(Debug, Clone)]
pub struct CapacityQuestion {
    /// The policy, with every rule enforced: none of it is record-only.
    pub policy: Arc<Policy>,
    pub pods: Vec<PodToPlace>,
    /// Kinds of nodes, in order of preference: nodes of a later one are added for pods that the earlier ones cannot hold.
    pub node_kinds: Vec<NodeTemplate>,
}

/// A pod that needs GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodToPlace {
    pub key: PodKey,
    /// Pods of the same number are equal in all but name, as replicas of a workload are.
    pub workload: usize,
    /// What its manifest is, for people: `pods.yaml: Deployment team-a/llama`.
    pub source: Arc<str>,
    pub demand: Demand,
    /// What kube-scheduler's filters ask of its node.
    pub requirements: Requirements,
}

/// One kind of node, of which a plan takes as many as it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTemplate {
    /// Its nodes are called after it.
    pub name: String,
    /// GPUs of each node.
    pub gpus: u32,
    pub gpu: TemplateGpu,
    /// What each GPU is cut into; `None` for whole GPUs, and for such as are cut as device-plugin pods ask.
    pub geometry: Option<Geometry>,
    /// What a device plugin offers on a node that was observed; `None` for one that is only described.
    pub plugin_devices: Option<PluginDevices>,
    pub labels: ObjectLabels,
    pub taints: Vec<Taint>,
    pub host: TemplateHost,
    /// Maximum number of nodes of this kind; `None` for no limit.
    pub max_nodes: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateGpu {
    /// Name for people: the type's, or what the user wrote.
    pub name: String,
    pub model: GpuModel,
    /// Memory in bytes, as NVML reports it.
    pub total: Bytes,
    /// The catalogued GPU type, if its name is one.
    pub gpu_type: Option<&'static GpuType>,
}

/// What a node has beside its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateHost {
    /// A node that is only described: a resource that the description leaves out never limits it.
    Described {
        cpu: Option<MilliCpu>,
        memory: Option<Bytes>,
    },
    /// A node that was observed in a cluster.
    Observed {
        allocatable: ResourceList,
        pods: u64,
    },
}

/// A stand-in for "unlimited": more than the pods of one node request together, and far below the overflow of a `u64` sum.
const UNLIMITED: u64 = 1 << 50;

impl TemplateHost {
    /// Allocatable resources of an observed node; `None` for a described one.
    pub fn allocatable(&self) -> Option<&ResourceList> {
        match self {
            Self::Observed { allocatable, .. } => Some(allocatable),
            Self::Described { .. } => None,
        }
    }

    /// How many pods it allows, if it is known.
    pub fn pods(&self) -> Option<u64> {
        match self {
            Self::Observed { pods, .. } => Some(*pods),
            Self::Described { .. } => None,
        }
    }
}

impl NodeTemplate {
    /// The node as kube-scheduler's filters see it. `resources` are the names of all that pods ask for beside GPUs.
    pub(super) fn filter_node(&self, name: &NodeName, resources: &[Arc<str>]) -> FilterNode {
        let (allocatable, pods) = match &self.host {
            TemplateHost::Observed { allocatable, pods } => (allocatable.clone(), *pods),
            TemplateHost::Described { cpu, memory } => {
                let amounts = ResourceList {
                    cpu: cpu.unwrap_or(MilliCpu(UNLIMITED)),
                    memory: memory.unwrap_or(Bytes(UNLIMITED)),
                    ephemeral_storage: Bytes(UNLIMITED),
                    others: resources
                        .iter()
                        .map(|name| (name.clone(), UNLIMITED))
                        .collect(),
                };
                (amounts, UNLIMITED)
            }
        };
        let mut labels = self.labels.clone();
        labels.insert(HOSTNAME.into(), name.to_string());
        FilterNode {
            name: name.clone(),
            labels: Arc::new(labels),
            taints: self.taints.clone().into(),
            allocatable,
            pods,
        }
    }

    /// The first `gpus` GPUs of such a node, or their slices.
    pub(super) fn devices(&self, node: &NodeName, gpus: u32) -> Vec<Device> {
        let gpu_uuid = |gpu_index: u32| {
            GpuUuid::parse(&format!("GPU-{node}-{gpu_index}")).expect("a node's name is short")
        };
        let whole_gpu = |gpu_index: u32| {
            self.device(
                gpu_uuid(gpu_index),
                gpu_index,
                self.gpu.model.clone(),
                None,
                self.gpu.total,
            )
        };
        let Some(geometry) = &self.geometry else {
            return (0..gpus).map(whole_gpu).collect();
        };
        let mut slices = Vec::new();
        for gpu_index in 0..gpus {
            for profile in geometry.profiles() {
                let index = slices.len() as u32;
                let uuid =
                    GpuUuid::parse(&format!("MIG-{node}-{index}")).expect("a node's name is short");
                let model = GpuModel::parse(&format!("{}-MIG-{profile}", self.gpu.model));
                let model = model.expect("a profile is a plain word");
                let total = self.slice_memory(profile).unwrap_or_default();
                slices.push(self.device(uuid, index, model, Some(gpu_uuid(gpu_index)), total));
            }
        }
        slices
    }

    /// How many slices each GPU is cut into; 1 for whole ones.
    pub(super) fn slices_per_gpu(&self) -> u32 {
        self.geometry
            .as_ref()
            .map_or(1, |geometry| geometry.profiles().len() as u32)
    }

    /// Memory of a slice of that profile; `None` if it is not known.
    pub(super) fn slice_memory(&self, profile: &str) -> Option<Bytes> {
        self.gpu.gpu_type?.slice_memory(profile)
    }

    /// Allocatable amount of a resource other than GPUs; `None` if it is not known.
    pub(super) fn allocatable_of(&self, resource: &str) -> Option<u64> {
        match (&self.host, resource) {
            (TemplateHost::Observed { allocatable, .. }, _) => Some(allocatable.get(resource)),
            (TemplateHost::Described { cpu, .. }, CPU) => cpu.map(|cpu| cpu.0),
            (TemplateHost::Described { memory, .. }, MEMORY) => memory.map(|memory| memory.0),
            (TemplateHost::Described { .. }, _) => None,
        }
    }

    fn device(
        &self,
        uuid: GpuUuid,
        index: u32,
        model: GpuModel,
        parent: Option<GpuUuid>,
        total: Bytes,
    ) -> Device {
        Device {
            uuid,
            index,
            model,
            parent,
            total,
            reserved: Bytes::ZERO,
            health: Health::Healthy,
            exclusive_process: false,
            island: None,
        }
    }
}

/// The label by which pods that repel each other keep to nodes of their own.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
