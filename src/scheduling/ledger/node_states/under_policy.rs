//! The nodes under another policy, or some of them: prepared on a copy, and then taken in one step.

use super::super::node_state::{CountedNode, NodeState};
use super::super::pod_states::PodStates;
use super::super::publication::Publication;
use super::super::set_policy::PolicyChange;
use super::super::tenant_usage::TenantsOnNode;
use super::{NodeStates, note};
use crate::ids::NodeName;
use crate::policy::Policy;
use std::collections::BTreeSet;
use std::sync::Arc;

impl NodeStates {
    /// All nodes under another policy, with sums and a snapshot of their own. Their generations stay: what is remembered of a
    /// node is remembered with the policy's version, too.
    pub(in crate::ledger) fn under_policy(
        &self,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) -> Self {
        let publication = Publication::at(self.publication.generation(), self.publication.epoch());
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
    pub(in crate::ledger) fn bring_some_under_policy(
        &mut self,
        names: &BTreeSet<NodeName>,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        for name in names {
            let node_state = self.nodes.get_shared(name).cloned();
            self.take_in(name, node_state, change, pods);
        }
        self.publication.part_from_readers();
    }

    /// Takes the nodes of `changed`, which were made of an `earlier` copy. Nodes that have come, gone or changed since the copy
    /// are brought under the policy now. Answers what was here.
    pub(in crate::ledger) fn take_changed(
        &mut self,
        earlier: &Self,
        mut changed: Self,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) -> Self {
        let since = self
            .nodes
            .changed_since(&earlier.nodes)
            .chain(earlier.nodes.changed_since(&self.nodes));
        let since: BTreeSet<NodeName> = since.cloned().collect();
        changed.publication.follow(&self.publication, &since);
        for name in &since {
            changed.take_in(name, self.nodes.get_shared(name).cloned(), change, pods);
        }
        match change.ages_at {
            // Time has passed since the copy was made.
            Some(now) => {
                while let Some(name) = changed.take_aged(now) {
                    changed.bring_view_under_policy(&name, change, pods);
                }
            }
            None => changed.aging = std::mem::take(&mut self.aging),
        }
        std::mem::replace(self, changed)
    }

    /// Puts a node in place of what was known of it, under a policy; `None` if it is gone.
    fn take_in(
        &mut self,
        name: &NodeName,
        node_state: Option<Arc<NodeState>>,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        self.take_out(name, change.policy);
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
        node_state.admit_by(policy);
        node_state.recount(pods, policy);
        self.usages
            .replace(&TenantsOnNode::default(), node_state.tenants(), policy);
        note(&mut self.with_loans, name, node_state.has_loans());
        self.bring_view_under_policy(name, change, pods);
    }

    fn bring_view_under_policy(
        &mut self,
        name: &NodeName,
        change: &PolicyChange<'_>,
        pods: &PodStates,
    ) {
        let PolicyChange {
            policy, ages_at, ..
        } = *change;
        if let Some(now) = ages_at {
            self.note_age(name, now, policy);
        }
        let node_state = self.nodes.get_mut(name).expect("it was just listed");
        note(
            &mut self.with_lenders,
            name,
            node_state.has_sleeping_lenders(),
        );
        let (view, generation) = (
            node_state.view_by(pods, policy),
            node_state.view().generation,
        );
        if view != *node_state.view() {
            node_state.set_view(view, generation);
            self.publication.publish(node_state.view());
        }
        self.count(name);
    }

    /// Takes a node out, and what it adds to the sums.
    fn take_out(&mut self, name: &NodeName, policy: &Policy) {
        let Some(node_state) = self.nodes.get(name) else {
            return;
        };
        self.usages
            .replace(node_state.tenants(), &TenantsOnNode::default(), policy);
        let counted = *node_state.counted();
        if let Some(due) = node_state.ages_at(&policy.telemetry) {
            self.aging.remove(&(due, name.clone()));
        }
        self.replace_counted(&counted, &CountedNode::default());
        self.with_loans.remove(name);
        self.with_lenders.remove(name);
        self.nodes.remove(name);
    }
}
