//! What the ledger can be asked. Nothing here changes it.

use super::Ledger;
use super::budget_index::BudgetIndex;
use super::copy_on_write::NodeMap;
use super::node_state::NodeState;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::policy::Policy;
use crate::units::Bytes;
use crate::vocabulary::gpu::{ClassExclusion, Gpu};
use crate::vocabulary::node::{Node, NodeKind};
use crate::vocabulary::node_reading::NodeReading;
use crate::vocabulary::smoothed_load::SmoothedLoad;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sums over the cluster, for gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub waiting: u64,
    pub assumed: u64,
    pub bound: u64,
    pub unplaced: u64,
    pub reservations: u64,
    pub soft_reservations: u64,
    pub nodes: u64,
    /// Of these, nodes whose GPUs a DRA driver publishes.
    pub dra_nodes: u64,
    pub gpus: u64,
    /// Sleeping engines that new pods may wake.
    pub reusable_engines: u64,
    pub capacity: Bytes,
    pub charged: Bytes,
    /// What sleeping engines lend, used or not, and the pods that borrow.
    pub lent: Bytes,
    pub borrowing: u64,
}

/// What the capacity that a node advertises follows from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CapacityBasis {
    pub kind: NodeKind,
    /// Of its GPUs, healthy or not.
    pub gpus: Bytes,
    /// What its sleeping engines lend, used or not: so much more than its GPUs have the node advertises.
    pub lent: Bytes,
    /// What pods that are bound or assumed there ask for.
    pub asked_for: Bytes,
}

/// The nodes at one moment. To keep it costs little: nothing of the pods is kept with it.
#[derive(Debug, Clone)]
pub struct NodesAtOneTime(NodeMap);

impl Ledger {
    /// The state of a pod that the ledger knows.
    pub(crate) fn known_pod(&self, uid: &PodUid) -> &PodState {
        &self.pod_states[uid]
    }

    /// The state of a node that exists, or on which pods are.
    pub(crate) fn node_state(&self, name: &NodeName) -> Option<&NodeState> {
        self.node_states.get(name)
    }

    /// In order of name.
    pub(crate) fn all_node_states(&self) -> impl Iterator<Item = &NodeState> {
        self.node_states.iter().map(|(_, node_state)| node_state)
    }

    /// The GPUs of a node if this pod had nothing there.
    pub(crate) fn gpus_without(&self, node_state: &NodeState, uid: &PodUid) -> Vec<Gpu> {
        node_state.gpus_without(uid, &self.pod_states, &self.policy)
    }

    /// Which pods of a node but this one keep classes off GPUs.
    pub(crate) fn class_exclusions_beside(
        &self,
        node_state: &NodeState,
        uid: &PodUid,
    ) -> Vec<ClassExclusion> {
        node_state.class_exclusions(uid, &self.pod_states)
    }

    /// Which budgets cover which pods.
    pub(crate) fn budget_index(&self) -> BudgetIndex<'_> {
        BudgetIndex::new(self.budgets.all())
    }

    pub fn pod_state(&self, uid: &PodUid) -> Option<&PodState> {
        self.pod_states.get(uid)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// All pods, in no order: for sums, and for what is put into an order afterwards.
    pub fn pods_in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.pod_states.in_no_order()
    }

    /// All pods, in order of UID.
    pub fn pod_states(&self) -> BTreeMap<&PodUid, &PodState> {
        self.pod_states.in_no_order().collect()
    }

    /// The pods that are bound or assumed on a node, in order of UID. Only these are looked at.
    pub fn pods_of(&self, node: &NodeName) -> impl Iterator<Item = (&PodUid, &PodState)> {
        let here = self
            .node_states
            .get(node)
            .into_iter()
            .flat_map(|node_state| node_state.pods());
        here.map(|uid| (uid, &self.pod_states[uid]))
            .filter(move |(_, pod_state)| pod_state.node() == Some(node))
    }

    /// Whether a Node object of this name exists.
    pub fn has_node(&self, name: &NodeName) -> bool {
        self.node_states.existing(name).is_some()
    }

    /// The nodes as they are now, for [`Self::nodes_changed_since`].
    pub fn nodes_now(&self) -> NodesAtOneTime {
        NodesAtOneTime(self.node_states.nodes().clone())
    }

    /// Nodes that have changed, or come, since then, in no order.
    pub fn nodes_changed_since<'a>(
        &'a self,
        earlier: &'a NodesAtOneTime,
    ) -> impl Iterator<Item = &'a NodeName> {
        self.node_states.nodes().changed_since(&earlier.0)
    }

    /// A node as decisions see it; also one that does not exist, as long as pods are there.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.node_states.get(name).map(NodeState::view)
    }

    /// The latest that was measured on a node, if anything was.
    pub fn reading(&self, name: &NodeName) -> Option<&NodeReading> {
        self.node_states.get(name)?.reading()
    }

    /// How busy the engines on a GPU are, over its readings.
    pub(crate) fn smoothed_load(&self, name: &NodeName, gpu: &GpuUuid) -> Option<&SmoothedLoad> {
        let node_state = self.node_states.get(name)?;
        let place = node_state
            .devices()
            .iter()
            .position(|device| device.uuid == *gpu)?;
        node_state.smoothed_load(gpu, place)
    }

    /// Bound pods that are known to be on this GPU, in order of UID.
    pub(crate) fn pods_on(&self, node: &NodeName, gpu: &GpuUuid) -> Vec<PodUid> {
        let Some(node_state) = self.node_states.get(node) else {
            return Vec::new();
        };
        let Some(place) = node_state
            .devices()
            .iter()
            .position(|device| device.uuid == *gpu)
        else {
            return Vec::new();
        };
        let is_there = |uid: &&PodUid| {
            let pod_state = &self.pod_states[*uid];
            let charge = node_state
                .charge_of(pod_state)
                .filter(|charge| charge.placed && charge.gpus.contains(place));
            charge.is_some() && pod_state.bound().is_some()
        };
        node_state.pods().iter().filter(is_there).cloned().collect()
    }

    /// Whether the pod is being deleted.
    pub fn is_leaving(&self, uid: &PodUid) -> bool {
        self.pod_states.get(uid).is_some_and(PodState::is_leaving)
    }

    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for (_, pod_state) in self.pod_states.in_no_order() {
            match &pod_state.phase {
                PodPhase::Waiting(_) => totals.waiting += 1,
                PodPhase::Assumed(_) => totals.assumed += 1,
                PodPhase::Bound(_) if self.is_placed(pod_state) => totals.bound += 1,
                PodPhase::Bound(_) => totals.unplaced += 1,
            }
            totals.reservations += u64::from(pod_state.reservation().is_some());
            totals.soft_reservations += u64::from(pod_state.soft_reservation().is_some());
            totals.borrowing += u64::from(pod_state.borrows());
        }
        for node_state in self.node_states.all_existing() {
            totals.nodes += 1;
            totals.gpus += node_state.devices().len() as u64;
            let is_dra = node_state.view().kind == NodeKind::Dra;
            totals.dra_nodes += u64::from(is_dra);
            totals.reusable_engines += node_state.view().reusable.iter().count() as u64;
            totals.capacity += if is_dra {
                Bytes::ZERO
            } else {
                node_state.view().capacity()
            };
            totals.charged += node_state.view().charged();
            totals.lent += node_state.lent();
        }
        totals
    }

    /// Whether it is known on which GPUs a pod is.
    fn is_placed(&self, pod_state: &PodState) -> bool {
        let charge = || {
            self.node_states
                .get(pod_state.node()?)?
                .charge_of(pod_state)
        };
        charge().is_some_and(|charge| charge.placed)
    }

    /// What the node's sum has left, as the scheduler counts it: by what pods ask for, and with the pods that are to come.
    pub(crate) fn sum_left_on(&self, name: &NodeName) -> Bytes {
        let Some(node_state) = self.node_states.get(name) else {
            return Bytes::ZERO;
        };
        let here = node_state.pods().iter().map(|uid| &self.pod_states[uid]);
        let reserved = here
            .filter(|pod_state| {
                pod_state
                    .reservation()
                    .is_some_and(|reservation| reservation.node == *name)
            })
            .map(|pod_state| pod_state.demand.vram())
            .sum();
        (node_state.view().capacity() + node_state.lent())
            .minus(self.asked_for_on(name))
            .minus(reserved)
    }

    /// Also of a node that does not exist, as long as pods are there.
    pub fn capacity_basis(&self, name: &NodeName) -> Option<CapacityBasis> {
        let node_state = self.node_states.get(name)?;
        Some(CapacityBasis {
            kind: node_state.view().kind,
            gpus: node_state.view().capacity(),
            lent: node_state.lent(),
            asked_for: node_state.asked_for(),
        })
    }

    /// VRAM that pods that are bound or assumed on a node ask for, as the node's sum would show it.
    pub fn asked_for_on(&self, name: &NodeName) -> Bytes {
        self.node_states
            .get(name)
            .map_or(Bytes::ZERO, NodeState::asked_for)
    }

    pub(crate) fn node_states(&self) -> impl Iterator<Item = (&NodeName, &Node)> {
        self.node_states
            .iter()
            .map(|(name, node_state)| (name, node_state.view()))
    }
}
