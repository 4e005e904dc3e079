//! Node pools: kinds of nodes, what allocates their GPUs, and their MIG layout.

use crate::vocabulary::classification::ClassSet;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::node::NodeKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    pub name: String,
    /// Labels of its nodes, all of them. Empty takes every node.
    pub selector: BTreeMap<String, String>,
    pub allocator: NodeKind,
    /// Names of the classes that may be placed here; `None` for all.
    pub classes: Option<Vec<String>>,
    /// The MIG profiles of each GPU, such as `3g.40gb` twice: empty for whole GPUs, `None` for any.
    pub mig: Option<Vec<String>>,
    /// Its total capacity, as far as its owner declares it.
    pub capacity: Option<TenantUsage>,
}

/// A pool, by its index in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PoolId(pub(super) u16);

impl PoolId {
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// What a node's pool allows there, as decisions read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolAdmission {
    pub pool: Option<PoolId>,
    pub classes: ClassSet,
}

impl Default for PoolAdmission {
    /// The admission of a node before any policy was applied to it: all classes.
    fn default() -> Self {
        Self {
            pool: None,
            classes: ClassSet::ALL,
        }
    }
}

impl Pool {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            selector: BTreeMap::new(),
            allocator: NodeKind::Stowage,
            classes: None,
            mig: None,
            capacity: None,
        }
    }

    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.selector
            .iter()
            .all(|(key, value)| labels.get(key) == Some(value))
    }

    /// Whether a node's GPUs have the pool's MIG layout. A slice's model ends in its profile, as NVML names it
    /// (`NVIDIA-A100-SXM4-80GB-MIG-3g.40gb`).
    pub(crate) fn has_expected_mig_layout(&self, devices: &[Device]) -> bool {
        let Some(expected) = &self.mig else {
            return true;
        };
        let mut expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        expected.sort_unstable();
        let mut cards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for device in devices {
            let card = device.parent.as_ref().unwrap_or(&device.uuid).as_str();
            let slices = cards.entry(card).or_default();
            slices.extend(device.parent.is_some().then(|| profile(device)));
        }
        cards.values_mut().all(|slices| {
            slices.sort_unstable();
            *slices == expected
        })
    }
}

fn profile(slice: &Device) -> &str {
    slice.model.as_str().rsplit('-').next().unwrap_or_default()
}
