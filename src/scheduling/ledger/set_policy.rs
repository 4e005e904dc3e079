//! Another policy for the same pods and nodes.
//!
//! To classify every pod anew may take a while, and no request should wait for it: [`Ledger::to_classify`] gives out what they
//! show, the caller classifies them beside the lock, and [`Ledger::set_policy`] changes everything in one step, classifying only
//! pods that came in between. So every decision is made by one policy or by the other.

use super::Ledger;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::classification::{Classification, PodTraits};
use crate::units::Moment;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How pods that show the same are classified.
pub type Classifications = FxHashMap<Arc<PodTraits>, Classification>;

/// One of these is `true` on a node with a GPU: those of GPU feature discovery, of Node feature discovery (a PCI device of vendor
/// 10de, with or without its class) and of the GPU operator's stack for DRA. The agent's DaemonSet selects its nodes by the same.
pub const GPU_LABELS: [&str; 5] = [
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
    "feature.node.kubernetes.io/pci-0300_10de.present",
    "nvidia.com/gpu.deploy.dra-driver",
];

impl Ledger {
    /// What all pods show.
    pub fn to_classify(&self) -> Vec<Arc<PodTraits>> {
        self.pod_states.in_no_order().map(|(_, pod_state)| pod_state.demand.traits.clone()).collect()
    }

    /// `policy` is in force from here on, with a new version. What is bound stays bound, whatever it says; it counts as what it
    /// is now. `classified` may lack some.
    pub(in crate::scheduling) fn set_policy(&mut self, mut policy: Policy, classified: &Classifications) {
        let version = self.policy.version + 1;
        policy.version = version;
        // Labels may have changed since the pods were classified beforehand.
        let (given, policy) = (policy.selections().clone(), policy.with_namespaces(&self.namespaces));
        let is_current = |namespace: &str| {
            given.get(namespace).copied().unwrap_or_default() == policy.selection(namespace)
        };
        self.pod_states.classify_each(|demand| {
            let known = classified.get(&demand.traits).filter(|_| is_current(&demand.traits.namespace));
            let known = known.map(|known| Classification { version, ..*known });
            demand.take(known.unwrap_or_else(|| policy.classify(&demand.traits)));
        });
        let before = std::mem::replace(&mut self.policy, Arc::new(policy));
        if before.loading != self.policy.loading {
            self.forget_start_times();
        }
        self.evictions.move_to(&before, &self.policy);
        self.take_packing();
        self.node_states.set_policy(self.now, &self.pod_states, &self.policy);
        if before.dra != self.policy.dra {
            self.note_all_published();
        }
        self.requeue_all();
    }

    /// The labels of a node, by which it is in a pool.
    #[cfg(test)]
    pub(in crate::scheduling) fn set_labels(&mut self, name: &NodeName, labels: BTreeMap<String, String>) {
        self.share_labels(name, Arc::new(labels));
    }

    /// The same, of labels that the caller keeps, too.
    pub(in crate::scheduling) fn share_labels(
        &mut self,
        name: &NodeName,
        labels: Arc<BTreeMap<String, String>>,
    ) {
        let policy = &self.policy;
        if self.node_states.get_mut(name).is_some_and(|node_state| node_state.set_labels(labels, policy)) {
            self.refresh(name);
            self.note_published(name);
        }
    }

    /// Whether the node's labels say that it has GPUs, by those that the agent's DaemonSet selects its nodes by.
    pub(in crate::scheduling) fn shows_gpus(&self, name: &NodeName) -> bool {
        let labels = self.node_states.get(name).map(|node_state| node_state.labels());
        labels.is_some_and(|labels| {
            GPU_LABELS.iter().any(|label| labels.get(*label).is_some_and(|value| value == "true"))
        })
    }

    /// Since when a bound pod runs, if that is longer than this ledger knows of it.
    pub(super) fn has_run_since(&mut self, uid: &PodUid, started: Moment) {
        self.pod_states.note(uid, |pod_state| pod_state.note_running_since(started));
        self.note_disruption_info(uid);
    }
}
