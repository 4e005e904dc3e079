//! Devices that DRA drivers publish as ResourceSlices: kube-scheduler may allocate each of them to a claim at any time, so the
//! GPUs of a node for which a GPU driver publishes one are not Stowage's.
//!
//! A node is published when a slice of a GPU driver that counts
//! - names the node and has a device, whatever the device is; or
//! - reaches it by a selector or as every node, and has a device that may be one of the node's: by its UUID, or because its UUID
//!   or the node's own GPUs are not known yet.
//!
//! A slice counts unless its pool has a newer generation that is complete and for the same nodes. While a newer one is incomplete
//! both count: a device that moves from one slice to another is in no gap between them.
//!
//! A driver that restarts takes its slices away for a while, and pods keep the devices of their claims. So a node that was
//! published stays it as long as pods with claims are bound there.
//!
//! What is kept of a slice on one node is whether it has a device, so that thousands of devices take no more than one.

use super::Ledger;
use super::node_state::NodeState;
use crate::ids::{GpuUuid, NodeName};
use crate::kube_filters::node::NodeTerm;
use crate::policy::DraRules;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A ResourceSlice as far as placement depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSlice {
    pub driver: Arc<str>,
    pub pool: Arc<str>,
    /// Which nodes the whole slice is for, in the words of its spec; empty for all. kube-scheduler looks at one node at a time:
    /// only a generation for the same nodes makes a slice out of date.
    #[serde(default)]
    pub scope: Arc<str>,
    pub generation: i64,
    /// How many slices its pool has in this generation.
    pub slices_of_pool: i64,
    /// Its devices, by the nodes that reach them. Without an entry it has no device.
    pub devices: Vec<PublishedDevices>,
}

/// Devices that the same nodes reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PublishedDevices {
    /// Those of one node, at least one.
    OnNode(NodeName),
    /// Those that nodes reach which match one of the terms; all nodes without terms.
    Shared {
        terms: Option<Vec<NodeTerm>>,
        uuids: DeviceUuids,
    },
}

/// Which devices they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceUuids {
    /// All of them say which GPU they are, or are a part of.
    Known(BTreeSet<GpuUuid>),
    /// Some do not, or they are too many to compare.
    Unknown,
}

/// Nodes that a slice made another kind while pods of Stowage are there, and those pods' VRAM still counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewlyPublished {
    pub nodes: Vec<NodeName>,
}

/// A pool's key: driver, pool name and scope.
type PoolKey = (Arc<str>, Arc<str>, Arc<str>);

/// All slices, by name, and what follows from them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "StoredSlices", into = "StoredSlices")]
pub(super) struct ResourceSlices {
    slices: BTreeMap<Arc<str>, Arc<DeviceSlice>>,
    pools: BTreeMap<PoolKey, SlicePool>,
    on_node: BTreeMap<NodeName, BTreeSet<Arc<str>>>,
    /// By driver, slices with devices that are not of one node. Those of drivers that hand out no GPUs may be thousands.
    shared: BTreeMap<Arc<str>, BTreeSet<Arc<str>>>,
}

/// The stored form: all other fields follow from the slices.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredSlices(BTreeMap<Arc<str>, Arc<DeviceSlice>>);

/// The slices of one pool.
#[derive(Debug, Clone, Default)]
struct SlicePool {
    names: BTreeSet<Arc<str>>,
    generations: BTreeMap<i64, PoolGeneration>,
}

#[derive(Debug, Clone, Default)]
struct PoolGeneration {
    slices: i64,
    /// How many slices say that the pool has so many.
    announced: BTreeMap<i64, u32>,
}

/// Where a change of slices may make a difference.
#[derive(Debug, Default)]
struct SliceChange {
    nodes: BTreeSet<NodeName>,
    shared: Vec<Arc<DeviceSlice>>,
}

impl SlicePool {
    /// Slices of an older generation do not count.
    fn oldest_that_counts(&self) -> i64 {
        match self.generations.last_key_value() {
            Some((newest, generation)) if generation.is_complete() => *newest,
            _ => i64::MIN,
        }
    }

    fn add(&mut self, name: &Arc<str>, slice: &DeviceSlice) {
        self.names.insert(name.clone());
        let generation = self.generations.entry(slice.generation).or_default();
        generation.slices += 1;
        *generation
            .announced
            .entry(slice.slices_of_pool)
            .or_default() += 1;
    }

    fn remove(&mut self, name: &Arc<str>, slice: &DeviceSlice) {
        self.names.remove(name);
        let Some(generation) = self.generations.get_mut(&slice.generation) else {
            return;
        };
        generation.slices -= 1;
        if let Some(count) = generation.announced.get_mut(&slice.slices_of_pool) {
            *count -= 1;
            if *count == 0 {
                generation.announced.remove(&slice.slices_of_pool);
            }
        }
        if generation.slices == 0 {
            self.generations.remove(&slice.generation);
        }
    }
}

impl PoolGeneration {
    fn is_complete(&self) -> bool {
        self.announced
            .last_key_value()
            .is_some_and(|(most, _)| self.slices >= *most)
    }
}

impl PublishedDevices {
    fn reaches(&self, node_state: &NodeState) -> bool {
        match self {
            Self::OnNode(name) => *name == node_state.view().name,
            Self::Shared { terms, uuids } => {
                let name = &node_state.view().name;
                let is_selected = |terms: &Vec<NodeTerm>| {
                    terms
                        .iter()
                        .any(|term| term.matches(node_state.labels(), name))
                };
                terms.as_ref().is_none_or(is_selected) && uuids.may_be_on(node_state)
            }
        }
    }
}

impl DeviceUuids {
    fn may_be_on(&self, node_state: &NodeState) -> bool {
        let Self::Known(uuids) = self else {
            return true;
        };
        // Until the agent reports, the node's GPUs have no UUIDs to compare.
        let is_published = |uuid: &GpuUuid| uuid.index().is_some() || uuids.contains(uuid);
        node_state.devices().iter().any(|device| {
            is_published(&device.uuid) || device.parent.as_ref().is_some_and(is_published)
        })
    }
}

impl ResourceSlices {
    /// Puts a slice in the place of the one with its name, or takes that one out.
    fn replace(&mut self, name: &Arc<str>, slice: Option<DeviceSlice>) -> SliceChange {
        let mut change = SliceChange::default();
        if self.slices.get(name).map(|current| &**current) == slice.as_ref() {
            return change;
        }
        if let Some(previous) = self.slices.remove(name) {
            self.change_pool(&mut change, &previous, |pool| pool.remove(name, &previous));
            self.unlink(name, &previous);
            change.add(&previous);
        }
        if let Some(slice) = slice.map(Arc::new) {
            self.slices.insert(name.clone(), slice.clone());
            self.change_pool(&mut change, &slice, |pool| pool.add(name, &slice));
            self.link(name, &slice);
            change.add(&slice);
        }
        change
    }

    fn change_pool(
        &mut self,
        change: &mut SliceChange,
        slice: &DeviceSlice,
        edit: impl FnOnce(&mut SlicePool),
    ) {
        let key = slice.pool_key();
        let pool = self.pools.entry(key.clone()).or_default();
        let before = pool.oldest_that_counts();
        edit(pool);
        if pool.oldest_that_counts() != before {
            let others = pool.names.iter().filter_map(|name| self.slices.get(name));
            others.for_each(|slice| change.add(slice));
        }
        if pool.names.is_empty() {
            self.pools.remove(&key);
        }
    }

    fn link(&mut self, name: &Arc<str>, slice: &DeviceSlice) {
        for devices in &slice.devices {
            match devices {
                PublishedDevices::OnNode(node) => {
                    self.on_node
                        .entry(node.clone())
                        .or_default()
                        .insert(name.clone());
                }
                PublishedDevices::Shared { .. } => {
                    self.shared
                        .entry(slice.driver.clone())
                        .or_default()
                        .insert(name.clone());
                }
            }
        }
    }

    fn unlink(&mut self, name: &Arc<str>, slice: &DeviceSlice) {
        if let Some(names) = self.shared.get_mut(&slice.driver) {
            names.remove(name);
            if names.is_empty() {
                self.shared.remove(&slice.driver);
            }
        }
        for devices in &slice.devices {
            let PublishedDevices::OnNode(node) = devices else {
                continue;
            };
            if let Some(names) = self.on_node.get_mut(node) {
                names.remove(name);
                if names.is_empty() {
                    self.on_node.remove(node);
                }
            }
        }
    }

    /// Whether a slice of a GPU driver counts.
    fn counts(&self, slice: &DeviceSlice, rules: &DraRules) -> bool {
        rules.is_gpu_driver(&slice.driver)
            && self
                .pools
                .get(&slice.pool_key())
                .is_none_or(|pool| slice.generation >= pool.oldest_that_counts())
    }

    fn publishes(&self, node_state: &NodeState, rules: &DraRules) -> bool {
        let here = self
            .on_node
            .get(&node_state.view().name)
            .into_iter()
            .flatten();
        let shared = rules
            .gpu_drivers
            .iter()
            .filter_map(|driver| self.shared.get(driver.as_str()))
            .flatten();
        here.chain(shared)
            .filter_map(|name| self.slices.get(name))
            .any(|slice| {
                self.counts(slice, rules)
                    && slice
                        .devices
                        .iter()
                        .any(|devices| devices.reaches(node_state))
            })
    }
}

impl DeviceSlice {
    fn pool_key(&self) -> PoolKey {
        (self.driver.clone(), self.pool.clone(), self.scope.clone())
    }
}

impl SliceChange {
    fn add(&mut self, slice: &Arc<DeviceSlice>) {
        let mut is_shared = false;
        for devices in &slice.devices {
            match devices {
                PublishedDevices::OnNode(node) => drop(self.nodes.insert(node.clone())),
                PublishedDevices::Shared { .. } => is_shared = true,
            }
        }
        self.shared.extend(is_shared.then(|| slice.clone()));
    }

    fn affects(&self, node_state: &NodeState) -> bool {
        let mut devices = self.shared.iter().flat_map(|slice| &slice.devices);
        devices.any(|devices| devices.reaches(node_state))
    }
}

impl From<StoredSlices> for ResourceSlices {
    fn from(stored: StoredSlices) -> Self {
        let mut slices = Self::default();
        for (name, slice) in stored.0 {
            slices.replace(&name, Some(Arc::unwrap_or_clone(slice)));
        }
        slices
    }
}

impl From<ResourceSlices> for StoredSlices {
    fn from(slices: ResourceSlices) -> Self {
        Self(slices.slices)
    }
}

impl Ledger {
    /// A slice as the API server shows it, or `None` if it is gone.
    pub(crate) fn set_slice(
        &mut self,
        name: &Arc<str>,
        slice: Option<DeviceSlice>,
    ) -> NewlyPublished {
        let rules = &self.policy.dra;
        let before = self
            .slices
            .slices
            .get(name)
            .map(|previous| previous.driver.clone());
        let drivers = before
            .into_iter()
            .chain(slice.as_ref().map(|slice| slice.driver.clone()));
        let hands_out_gpus = drivers
            .into_iter()
            .any(|driver| rules.is_gpu_driver(&driver));
        let change = Arc::make_mut(&mut self.slices).replace(name, slice);
        if !hands_out_gpus {
            return NewlyPublished::default();
        }
        let mut nodes = change.nodes.clone();
        if !change.shared.is_empty() {
            let concerned = self
                .node_states
                .iter()
                .filter(|(_, node_state)| change.affects(node_state));
            nodes.extend(concerned.map(|(name, _)| name.clone()));
        }
        let has_become_published =
            |node: &NodeName| self.update_published(node) && self.requested_on(node).0 > 0;
        NewlyPublished {
            nodes: nodes.into_iter().filter(has_become_published).collect(),
        }
    }

    /// Names of all slices, in order.
    pub fn slice_names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.slices.slices.keys()
    }

    /// Updates whether DRA drivers publish a node's GPUs. Returns whether it has become published.
    pub(super) fn update_published(&mut self, name: &NodeName) -> bool {
        #[cfg(test)]
        tests::CHECKED.set(tests::CHECKED.get() + 1);
        let Some(node_state) = self.node_states.get(name) else {
            return false;
        };
        let stays = node_state.is_published() && node_state.has_device_claims();
        let is_published = stays || self.slices.publishes(node_state, &self.policy.dra);
        if node_state.is_published() == is_published {
            return false;
        }
        if let Some(node_state) = self.node_states.get_mut(name) {
            node_state.set_published(is_published);
        }
        self.refresh(name);
        if is_published {
            self.remove_soft_reservations_on(name);
            self.expire_reservations_on(name, |_, _| true);
        }
        is_published
    }

    /// Whether pods with ResourceClaims are bound to a node.
    pub(crate) fn set_device_claims(&mut self, name: &NodeName, claims_devices: bool) {
        // A state that a plan shares is copied only for a change.
        let is_changed = |node_state: &NodeState| node_state.has_device_claims() != claims_devices;
        if self.node_states.get(name).is_some_and(is_changed) {
            if let Some(node_state) = self.node_states.get_mut(name) {
                node_state.set_device_claims(claims_devices);
            }
            self.update_published(name);
        }
    }

    /// Updates whether all nodes are published, after the policy's list of GPU drivers has changed.
    pub(super) fn update_all_published(&mut self) {
        let names: Vec<NodeName> = self
            .node_states
            .iter()
            .map(|(name, _)| name.clone())
            .collect();
        for name in &names {
            self.update_published(name);
        }
    }
}

#[cfg(test)]
mod tests;
