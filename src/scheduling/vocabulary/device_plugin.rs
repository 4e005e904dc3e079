//! GPUs that a device plugin hands out: what pods ask of it, and what a node has left.
//!
//! The kubelet picks the GPU when the pod starts, so everything here is of whole nodes: no GPU is assumed or reserved, and what
//! agents report of single GPUs is an indication at most. A tenant is charged a whole GPU for each device, be it a share or a
//! MIG slice of one: the plugin does not say how much of a card it is. Pods that ask for VRAM are `fit`'s and `pack`'s.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// A resource of a device plugin: `nvidia.com/gpu`, `nvidia.com/gpu.shared` or `nvidia.com/mig-<n>g.<m>gb`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct PluginResource(Arc<str>);

/// How many of each resource there are. A pod asks for one resource; what a node offers may be several.
pub type PluginDevices = BTreeMap<PluginResource, u32>;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no GPU of a device plugin: nvidia.com/gpu, nvidia.com/gpu.shared and nvidia.com/mig-* are"
)]
pub struct NotAPluginResource(String);

impl PluginResource {
    pub fn parse(name: &str) -> Option<Self> {
        Self::is_plugin_resource(name).then(|| Self(name.into()))
    }

    pub fn is_plugin_resource(name: &str) -> bool {
        matches!(name, "nvidia.com/gpu" | "nvidia.com/gpu.shared")
            || name.starts_with("nvidia.com/mig-")
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for PluginResource {
    type Error = NotAPluginResource;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        Self::parse(&name).ok_or(NotAPluginResource(name))
    }
}

impl fmt::Display for PluginResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// From what a pod requests its GPUs: Stowage, a device plugin or ResourceClaims.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuRequest {
    /// `stowage.dev/vram`: Stowage picks the GPUs.
    #[default]
    Vram,
    /// So many devices of a plugin: the kubelet picks them. More than any node has simply fit nowhere.
    Plugin {
        resource: PluginResource,
        count: u32,
    },
    /// Devices that its ResourceClaims name: kube-scheduler picks them. The ledger has no such pod.
    Claims,
}

/// What a node has of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginShare {
    pub resource: PluginResource,
    pub allocatable: u32,
    /// Devices of pods that are bound there or about to be. May be more than is allocatable, while a plugin restarts.
    pub used: u32,
}

impl PluginShare {
    pub fn available(&self) -> u32 {
        self.allocatable.saturating_sub(self.used)
    }

    /// The shares of a node that offers these devices and whose pods use those, in order of resource.
    pub fn for_node(allocatable: &PluginDevices, used: &PluginDevices) -> Vec<Self> {
        let resources: BTreeSet<&PluginResource> = allocatable.keys().chain(used.keys()).collect();
        let count =
            |of: &PluginDevices, resource: &PluginResource| of.get(resource).copied().unwrap_or(0);
        let share = |resource: &PluginResource| Self {
            resource: resource.clone(),
            allocatable: count(allocatable, resource),
            used: count(used, resource),
        };
        resources.into_iter().map(share).collect()
    }
}
