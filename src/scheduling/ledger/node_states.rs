//! The states of all nodes, and what follows from them: the sums by tenant, spare GPUs, when readings age, and the snapshot.
//!
//! A node follows from its devices, its readings and the pods that have something there. Whatever changes one of these ends in
//! [`NodeStates::refresh`] or [`NodeStates::refresh_view`], which bring sums and snapshot up to date.
//!
//! Under another policy all nodes, or some of them, are prepared on a copy, and then taken in one step.

use super::copy_on_write::{NodeMap, Publication};
use super::node_state::{NodeContribution, NodeState};
use super::pod_states::{PodMove, PodStates};
use super::quotas::{TenantAccount, TenantUsages, TenantsOnNode};
use super::set_policy::PolicyChange;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::placing::learned::PackingModel;
use crate::placing::snapshot::{RetiredSummaries, Snapshot};
use crate::placing::start_model::StartModel;
use crate::policy::Policy;
use crate::units::Moment;
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::HostResources;
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::NodeReading;
use crate::vocabulary::spare::SpareCounts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Index;
use std::sync::Arc;

#[derive(Debug, Clone, Default)]
pub(super) struct NodeStates {
    nodes: NodeMap,
    /// The moments at which nodes' readings go stale or expire.
    freshness_deadlines: BTreeSet<(Moment, NodeName)>,
    usages: TenantUsages,
    /// Nodes with pods that borrow from engines, or whose engines are to wake.
    with_loans: BTreeSet<NodeName>,
    /// Nodes with engines that sleep and lend, or may come to.
    with_lenders: BTreeSet<NodeName>,
    /// The free GPUs of all nodes that count for the rules of `planning.spare`.
    spare: SpareCounts,
    /// The total VRAM and GPUs of all nodes that exist.
    total: TenantUsage,
    publication: Publication,
}

/// What is stored of the nodes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct StoredNodes {
    /// In order of name.
    nodes: Vec<Arc<NodeState>>,
    generation: u64,
    #[serde(rename = "epoch")]
    node_list_generation: u64,
}

impl StoredNodes {
    pub(super) fn node_list_generation(&self) -> u64 {
        self.node_list_generation
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().map(|node_state| &**node_state)
    }
}

impl NodeStates {
    /// No nodes, in generations that were not used before.
    pub(super) fn emptied(&self) -> Self {
        let publication = Publication::from_generations(
            self.generation() + 1,
            self.publication.node_list_generation() + 1,
        );
        Self {
            publication,
            ..Self::default()
        }
    }

    /// A copy: it shares the states of all nodes, and the snapshot. Readings do not age there.
    pub(super) fn scratch(&self) -> Self {
        Self {
            nodes: self.nodes.clone(),
            freshness_deadlines: BTreeSet::new(),
            usages: self.usages.clone(),
            with_loans: self.with_loans.clone(),
            with_lenders: self.with_lenders.clone(),
            spare: self.spare,
            total: self.total,
            publication: self.publication.clone(),
        }
    }

    /// The nodes, from which sums, aging and the snapshot follow, beside the versions of the snapshot.
    pub(super) fn export(&self) -> StoredNodes {
        StoredNodes {
            nodes: self.nodes.shared(),
            generation: self.publication.generation(),
            node_list_generation: self.publication.node_list_generation(),
        }
    }

    /// Fails with a pod that has something on a node that is not stored, and that node.
    pub(super) fn load(
        stored: StoredNodes,
        pods: &PodStates,
        policy: &Policy,
    ) -> Result<Self, (PodUid, NodeName)> {
        let StoredNodes {
            nodes,
            generation,
            node_list_generation,
        } = stored;
        let mut loaded = Self {
            publication: Publication::from_generations(generation, node_list_generation),
            ..Self::default()
        };
        let names: Vec<NodeName> = nodes
            .iter()
            .map(|node_state| node_state.view().name.clone())
            .collect();
        nodes
            .into_iter()
            .for_each(|node_state| loaded.nodes.insert_shared(node_state));
        // In no order: nothing follows from the order in which pods come to a node.
        for (uid, _) in pods.in_no_order() {
            for name in pods.nodes_of(uid) {
                let node_state = loaded
                    .nodes
                    .get_mut(&name)
                    .ok_or_else(|| (uid.clone(), name.clone()))?;
                node_state.add_pod(uid);
            }
        }
        for name in &names {
            let node_state = loaded.nodes.get_or_create(name);
            node_state.update_warnings(policy);
            node_state.recount(pods, policy);
            let (view, generation) = (
                node_state.build_view(pods, policy),
                node_state.view().generation,
            );
            node_state.set_view(view, generation);
            if let Some(due) = node_state.ages_at(&policy.telemetry) {
                loaded.freshness_deadlines.insert((due, name.clone()));
            }
            loaded
                .usages
                .replace(&TenantsOnNode::default(), node_state.tenants(), policy);
            if node_state.has_loans() {
                loaded.with_loans.insert(name.clone());
            }
            if node_state.has_sleeping_lenders() {
                loaded.with_lenders.insert(name.clone());
            }
            let (_, now) = node_state.update_contribution();
            loaded.replace_contribution(&NodeContribution::default(), &now);
        }
        Ok(loaded)
    }

    pub(super) fn nodes(&self) -> &NodeMap {
        &self.nodes
    }

    /// A node that exists, or on which pods are.
    pub(super) fn get(&self, name: &NodeName) -> Option<&NodeState> {
        self.nodes.get(name)
    }

    pub(super) fn existing(&self, name: &NodeName) -> Option<&NodeState> {
        self.get(name).filter(|node_state| node_state.exists())
    }

    /// In order of name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.nodes.iter()
    }

    /// Nodes that exist, in order of name.
    pub(super) fn all_existing(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values().filter(|node_state| node_state.exists())
    }

    /// A node, to change what takes nothing of it. Other changes need a refresh.
    pub(super) fn get_mut(&mut self, name: &NodeName) -> Option<&mut NodeState> {
        self.nodes.get_mut(name)
    }

    pub(super) fn existing_mut(&mut self, name: &NodeName) -> Option<&mut NodeState> {
        self.get_mut(name).filter(|node_state| node_state.exists())
    }

    /// The node, created with nothing but its name if there is none.
    pub(super) fn get_or_create(&mut self, name: &NodeName) -> &mut NodeState {
        self.nodes.get_or_create(name)
    }

    /// Nodes with pods that borrow, or that are to wake, in order of name.
    pub(super) fn with_loans(&self) -> impl Iterator<Item = &NodeName> {
        self.with_loans.iter()
    }

    /// Nodes with engines that sleep and lend, or may come to, in order of name.
    pub(super) fn with_lenders(&self) -> impl Iterator<Item = &NodeName> {
        self.with_lenders.iter()
    }

    pub(super) fn generation(&self) -> u64 {
        self.publication.generation()
    }

    pub(super) fn snapshot(
        &mut self,
        packing_model: &Arc<PackingModel>,
        start_model: &Arc<StartModel>,
    ) -> Arc<Snapshot> {
        self.publication
            .snapshot(&self.nodes, packing_model, start_model)
    }

    pub(super) fn set_packing_model(&mut self, packing_model: Arc<PackingModel>) {
        self.publication.set_packing_model(packing_model);
    }

    pub(super) fn install_packing_model(
        &mut self,
        packing_model: Arc<PackingModel>,
        summarized: Snapshot,
    ) -> RetiredSummaries {
        self.publication
            .install_packing_model(packing_model, summarized)
    }

    /// What a tenant's pods use on all nodes.
    pub(super) fn tenant_usage(&self, tenant: TenantId) -> TenantUsage {
        self.usages.usage_of(tenant)
    }

    pub(super) fn tenant_account(&self, tenant: TenantId) -> Option<&TenantAccount> {
        self.usages.get(tenant)
    }

    /// Since when a bound pod of the tenant runs has changed, and nothing that it takes.
    pub(super) fn forget_guaranteed(&mut self, tenant: TenantId) {
        self.usages.forget_guaranteed(tenant);
    }

    /// VRAM and GPUs of all nodes that exist.
    pub(super) fn total(&self) -> TenantUsage {
        self.total
    }

    /// The node exists, as one of that kind. Returns whether that is new.
    pub(super) fn create(
        &mut self,
        name: &NodeName,
        kind: NodeKind,
        pods: &PodStates,
        policy: &Policy,
    ) -> bool {
        let is_new = self.nodes.get_or_create(name).create(kind, policy);
        if is_new {
            self.publication.record_node_set_change(name);
            self.refresh(name, pods, policy);
        }
        is_new
    }

    /// The node does not exist any more. Returns whether it did.
    pub(super) fn remove(&mut self, name: &NodeName, policy: &Policy) -> bool {
        let Some(node_state) = self.existing_mut(name) else {
            return false;
        };
        node_state.remove();
        self.update_contribution(name);
        // A node that comes back under its name may be another machine.
        self.forget_reading(name, policy);
        self.publication.record_node_set_change(name);
        self.publication.next_generation();
        true
    }

    /// Updates the nodes that a pod came to, left or stays on.
    pub(super) fn apply_pod_move(
        &mut self,
        uid: &PodUid,
        moved: &PodMove,
        pods: &PodStates,
        policy: &Policy,
    ) {
        for node in moved.nodes_left() {
            self.get_mut(node)
                .expect("a node with a pod stays")
                .remove_pod(uid, policy);
        }
        for node in moved.nodes_after() {
            self.get_or_create(node).add_pod(uid);
        }
        for node in moved.affected_nodes() {
            self.refresh(node, pods, policy);
            self.forget_if_empty(node);
        }
    }

    /// Recomputes a node from its pods and devices.
    pub(super) fn refresh(&mut self, name: &NodeName, pods: &PodStates, policy: &Policy) {
        if let Some(node_state) = self.nodes.get_mut(name) {
            let before = node_state.recount(pods, policy);
            self.usages.replace(&before, node_state.tenants(), policy);
            set_membership(&mut self.with_loans, name, node_state.has_loans());
            self.refresh_view(name, pods, policy);
        }
    }

    /// Rebuilds a node's view from its pods, devices and readings, without counting its pods again.
    pub(super) fn refresh_view(&mut self, name: &NodeName, pods: &PodStates, policy: &Policy) {
        let Some(node_state) = self.nodes.get_mut(name) else {
            return;
        };
        set_membership(
            &mut self.with_lenders,
            name,
            node_state.has_sleeping_lenders(),
        );
        node_state.update_neighbors(policy);
        let view = node_state.build_view(pods, policy);
        if view != *node_state.view() {
            node_state.set_view(view, self.publication.next_generation());
            self.publication.publish(node_state.view());
            self.catch_up_if_many();
        }
        self.update_contribution(name);
    }

    fn catch_up_if_many(&mut self) {
        if self.publication.has_many_pending_changes() {
            self.publication.catch_up(&self.nodes);
        }
    }

    /// Whether new pods go to a node at all.
    pub(super) fn set_takes_new_pods(&mut self, name: &NodeName, takes_new_pods: bool) {
        self.nodes
            .get_or_create(name)
            .set_takes_new_pods(takes_new_pods);
        self.update_contribution(name);
    }

    fn update_contribution(&mut self, name: &NodeName) {
        let Some(node_state) = self.nodes.get_mut(name) else {
            return;
        };
        let (before, now) = node_state.update_contribution();
        self.replace_contribution(&before, &now);
    }

    fn replace_contribution(&mut self, before: &NodeContribution, now: &NodeContribution) {
        self.spare.replace(&before.spare, &now.spare);
        self.total = self.total.minus(before.total) + now.total;
    }

    /// The free GPUs of all nodes that count for the rules of `planning.spare`.
    pub(super) fn spare(&self) -> &SpareCounts {
        &self.spare
    }

    /// CPU and memory that a node has left without the pods that are on their way.
    pub(super) fn set_free_host(
        &mut self,
        name: &NodeName,
        free_host: Option<HostResources>,
        pods: &PodStates,
    ) {
        let Some(node_state) = self.nodes.get_mut(name) else {
            return;
        };
        // Nothing else of the node follows from it.
        if node_state.set_free_host(free_host, pods) {
            node_state.set_generation(self.publication.next_generation());
            self.publication.publish(node_state.view());
            self.catch_up_if_many();
        }
    }

    /// Takes a reading of a node that exists. Returns pods whose GPUs no record names, with the GPUs on which the reading shows
    /// them.
    pub(super) fn take_reading(
        &mut self,
        name: &NodeName,
        reading: Arc<NodeReading>,
        policy: &Policy,
    ) -> Vec<(PodUid, Arc<[GpuUuid]>)> {
        let Some(node_state) = self
            .nodes
            .get_mut(name)
            .filter(|node_state| node_state.exists())
        else {
            return Vec::new();
        };
        if let Some(due) = node_state.ages_at(&policy.telemetry) {
            self.freshness_deadlines.remove(&(due, name.clone()));
        }
        node_state.take_reading(reading, policy)
    }

    /// Updates a node's freshness to the age of its reading, and records when it changes next.
    pub(super) fn update_freshness(&mut self, name: &NodeName, now: Moment, policy: &Policy) {
        let Some(node_state) = self.nodes.get_mut(name) else {
            return;
        };
        node_state.update_freshness(now, &policy.telemetry);
        if let Some(due) = node_state.ages_at(&policy.telemetry) {
            self.freshness_deadlines.insert((due, name.clone()));
        }
    }

    pub(super) fn forget_reading(&mut self, name: &NodeName, policy: &Policy) {
        let Some(node_state) = self.nodes.get_mut(name) else {
            return;
        };
        if let Some(deadline) = node_state.forget_reading(&policy.telemetry) {
            self.freshness_deadlines.remove(&(deadline, name.clone()));
        }
    }

    /// Removes the first deadline of a reading that has passed by `now`, and returns its node.
    pub(super) fn pop_aged(&mut self, now: Moment) -> Option<NodeName> {
        self.freshness_deadlines
            .first()
            .filter(|(due, _)| *due <= now)?;
        self.freshness_deadlines.pop_first().map(|(_, name)| name)
    }

    /// Forgets a node that does not exist and has no pods.
    pub(super) fn forget_if_empty(&mut self, name: &NodeName) {
        if self
            .get(name)
            .is_some_and(|node_state| !node_state.exists() && node_state.pods().is_empty())
        {
            self.nodes.remove(name);
            self.with_loans.remove(name);
            self.with_lenders.remove(name);
        }
    }
}

/// Adds a node to a set, or removes it.
fn set_membership(nodes: &mut BTreeSet<NodeName>, name: &NodeName, belongs: bool) {
    match belongs {
        true if !nodes.contains(name) => drop(nodes.insert(name.clone())),
        false if !nodes.is_empty() => drop(nodes.remove(name)),
        _ => {}
    }
}

impl Index<&NodeName> for NodeStates {
    type Output = NodeState;

    fn index(&self, name: &NodeName) -> &NodeState {
        self.get(name)
            .expect("a node that exists or has pods has a state")
    }
}

impl NodeStates {
    /// All nodes under another policy, with sums and a snapshot of their own. Their generations stay: what is remembered of a
    /// node is remembered with the policy's version, too.
    pub(super) fn under_policy(&self, change: &PolicyChange<'_>, pods: &PodStates) -> Self {
        let publication = Publication::from_generations(
            self.publication.generation(),
            self.publication.node_list_generation(),
        );
        let mut changed = Self {
            nodes: self.nodes.clone(),
            publication,
            ..Self::default()
        };
        let names: Vec<NodeName> = changed.nodes.iter().map(|(name, _)| name.clone()).collect();
        names
            .iter()
            .for_each(|name| changed.bring_under_policy(name, change, pods));
        changed
    }

    /// Brings some nodes under a policy by which the readings of all age as before. Their generations stay, too.
    pub(super) fn bring_some_under_policy(
        &mut self,
        names: &BTreeSet<NodeName>,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        for name in names {
            let node_state = self.nodes.get_shared(name).cloned();
            self.insert_under_policy(name, node_state, change, pods);
        }
        self.publication.unshare_from_readers();
    }

    /// Installs the nodes of `changed`, which were made from an earlier copy. Nodes that came, went or changed since that copy
    /// are brought under the policy now. Returns the nodes from before.
    pub(super) fn merge_prepared(
        &mut self,
        base: &Self,
        mut changed: Self,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) -> Self {
        let changed_names = self
            .nodes
            .changed_since(&base.nodes)
            .chain(base.nodes.changed_since(&self.nodes));
        let changed_names: BTreeSet<NodeName> = changed_names.cloned().collect();
        changed
            .publication
            .continue_from(&self.publication, &changed_names);
        for name in &changed_names {
            changed.insert_under_policy(name, self.nodes.get_shared(name).cloned(), change, pods);
        }
        match change.recompute_freshness_at {
            // Time has passed since the copy was made.
            Some(now) => {
                while let Some(name) = changed.pop_aged(now) {
                    changed.bring_view_under_policy(&name, change, pods);
                }
            }
            None => changed.freshness_deadlines = std::mem::take(&mut self.freshness_deadlines),
        }
        std::mem::replace(self, changed)
    }

    /// Replaces a node's state and brings it under a policy; `None` if the node is gone.
    fn insert_under_policy(
        &mut self,
        name: &NodeName,
        node_state: Option<Arc<NodeState>>,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        self.remove_from_sums(name, change.policy);
        if let Some(node_state) = node_state {
            self.nodes.insert_shared(node_state);
            self.bring_under_policy(name, change, pods);
        }
    }

    /// Brings a node of which nothing is in the sums yet under a policy.
    fn bring_under_policy(&mut self, name: &NodeName, change: &PolicyChange<'_>, pods: &PodStates) {
        let policy = change.policy;
        let node_state = self.nodes.get_mut(name).expect("it was just listed");
        node_state.forget_sums();
        if change.forgets_starts {
            node_state.forget_starts();
        }
        node_state.apply_policy(policy);
        node_state.recount(pods, policy);
        self.usages
            .replace(&TenantsOnNode::default(), node_state.tenants(), policy);
        set_membership(&mut self.with_loans, name, node_state.has_loans());
        self.bring_view_under_policy(name, change, pods);
    }

    fn bring_view_under_policy(
        &mut self,
        name: &NodeName,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        let PolicyChange {
            policy,
            recompute_freshness_at: ages_at,
            ..
        } = *change;
        if let Some(now) = ages_at {
            self.update_freshness(name, now, policy);
        }
        let node_state = self.nodes.get_mut(name).expect("it was just listed");
        set_membership(
            &mut self.with_lenders,
            name,
            node_state.has_sleeping_lenders(),
        );
        let (view, generation) = (
            node_state.build_view(pods, policy),
            node_state.view().generation,
        );
        if view != *node_state.view() {
            node_state.set_view(view, generation);
            self.publication.publish(node_state.view());
        }
        self.update_contribution(name);
    }

    /// Removes a node, and its contribution to the sums.
    fn remove_from_sums(&mut self, name: &NodeName, policy: &Policy) {
        let Some(node_state) = self.nodes.get(name) else {
            return;
        };
        self.usages
            .replace(node_state.tenants(), &TenantsOnNode::default(), policy);
        let counted = *node_state.contribution();
        if let Some(due) = node_state.ages_at(&policy.telemetry) {
            self.freshness_deadlines.remove(&(due, name.clone()));
        }
        self.replace_contribution(&counted, &NodeContribution::default());
        self.with_loans.remove(name);
        self.with_lenders.remove(name);
        self.nodes.remove(name);
    }
}
