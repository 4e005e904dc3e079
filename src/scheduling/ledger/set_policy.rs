//! Another policy for the same pods and nodes.
//!
//! To classify a million pods again, and to add up all nodes, takes seconds, and no request should wait for it. So it is done
//! outside the lock: [`PreparedPolicy::new`] does it for a copy of the ledger, and [`Ledger::install_policy`] puts the result in
//! place in one step. What has changed since the copy was made shows by what both do not share, and only that is done under the
//! lock; so that it is little, [`PreparedPolicy::caught_up`] does most of it beside the lock, too. Every decision is made by one
//! policy or by the other, and whether a policy was prepared, and when, makes no difference.
//!
//! Labels of namespaces reclassify some pods. The ledger keeps the labels for later policies; the policy keeps which namespaces its
//! selectors match. A label that no selector matches changes nothing. Otherwise it is as if a policy with another version came into
//! force, because a pod that was classified a moment ago may be something else now; but only the pods of the namespaces concerned
//! are classified again. Like another policy, it can be prepared outside the lock.

use super::Ledger;
use super::copy_on_write::PodMap;
use super::node_states::NodeStates;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use crate::policy::namespaces::Labels;
use crate::policy::{NamespaceLabels, NamespaceSelection, Policy};
use crate::units::Moment;
use crate::vocabulary::classification::{Classification, PodTraits};
use crate::vocabulary::node_signs::NodeSigns;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The classification of pods by their traits.
pub type Classifications = FxHashMap<Arc<PodTraits>, Classification>;

/// A policy and everything that follows from it, made of a copy of a ledger.
#[derive(Debug, Clone)]
pub struct PreparedPolicy {
    /// The copy from which it was made.
    base: Box<Ledger>,
    /// That copy under the policy.
    prepared: Box<Ledger>,
    classified: Arc<Classifications>,
    reclassified: ReclassifiedPods,
}

/// Which pods are classified again.
#[derive(Debug, Clone)]
enum ReclassifiedPods {
    All,
    /// Those of namespaces that the policy's selectors now match otherwise.
    InNamespaces(BTreeSet<String>),
}

impl ReclassifiedPods {
    fn contains(&self, pod_state: &PodState) -> bool {
        match self {
            Self::All => true,
            Self::InNamespaces(names) => names.contains(&pod_state.demand.traits.namespace),
        }
    }
}

/// What was in force before. Dropping it takes as long as a pass over all pods: drop it outside the lock.
#[derive(Debug)]
pub struct RetiredPolicy {
    _earlier: Box<Ledger>,
    _pods: PodMap,
    _nodes: NodeStates,
}

/// The policy that pods and nodes are brought to. Under other loading speeds, what was learned of starts does not count.
#[derive(Debug, Clone, Copy)]
pub(super) struct PolicyChange<'a> {
    pub policy: &'a Policy,
    /// The time for which freshness is recomputed by the policy's rules; `None` if these have not changed.
    pub recompute_freshness_at: Option<Moment>,
    pub forgets_starts: bool,
}

impl PreparedPolicy {
    /// `copy` is [`Ledger::scratch`] of the ledger in which the policy shall be in force.
    pub fn new(copy: Ledger, mut policy: Policy) -> Self {
        policy.version = copy.policy.version + 1;
        let policy = Arc::new(policy.with_namespace_labels(&copy.namespaces));
        let mut classified = Classifications::default();
        for (_, pod_state) in copy.pod_states.in_no_order() {
            let traits = &pod_state.demand.traits;
            if !classified.contains_key(traits) {
                classified.insert(traits.clone(), policy.classify(traits));
            }
        }
        let mut changed = copy.clone();
        let forgets_starts = copy.policy.loading != policy.loading;
        changed.pod_states = copy.pod_states.with_each_changed(|pod_state| {
            let classification = classified[&pod_state.demand.traits];
            reclassify(pod_state, classification, forgets_starts);
        });
        let change = PolicyChange {
            policy: &policy,
            recompute_freshness_at: Some(copy.now),
            forgets_starts,
        };
        changed.node_states = copy.node_states.under_policy(&change, &changed.pod_states);
        changed.policy = policy;
        Self::finish(copy, changed, Arc::new(classified), ReclassifiedPods::All)
    }

    fn finish(
        earlier: Ledger,
        mut changed: Ledger,
        classified: Arc<Classifications>,
        concerned: ReclassifiedPods,
    ) -> Self {
        // The first request after the change finds it made.
        changed.snapshot().summarize_nodes();
        Self {
            base: Box::new(earlier),
            prepared: Box::new(changed),
            classified,
            reclassified: concerned,
        }
    }

    /// The policy in force as it is once namespaces have these labels, of which it says these `selections`. Only their pods, and
    /// the nodes of these, are gone through.
    pub(super) fn for_labels(
        copy: Ledger,
        edits: NamespaceEdits,
        selections: &BTreeMap<String, NamespaceSelection>,
    ) -> Self {
        let mut policy = Policy::clone(&copy.policy);
        policy.version += 1;
        selections
            .iter()
            .for_each(|(name, selection)| policy.set_namespace_selection(name, *selection));
        let policy = Arc::new(policy);
        let mut changed = copy.clone();
        changed.store_labels(edits);
        let concerned = ReclassifiedPods::InNamespaces(selections.keys().cloned().collect());
        let (mut classified, mut nodes) = (Classifications::default(), BTreeSet::new());
        for (uid, pod_state) in copy
            .pod_states
            .in_no_order()
            .filter(|(_, pod_state)| concerned.contains(pod_state))
        {
            let traits = &pod_state.demand.traits;
            let classification = *classified
                .entry(traits.clone())
                .or_insert_with(|| policy.classify(traits));
            nodes.extend(copy.pod_states.nodes_of(uid));
            changed
                .pod_states
                .edit_without_move(uid, |pod_state| pod_state.demand.reclassify(classification));
        }
        let change = PolicyChange {
            policy: &policy,
            recompute_freshness_at: None,
            forgets_starts: false,
        };
        changed
            .node_states
            .bring_some_under_policy(&nodes, &change, &changed.pod_states);
        changed.policy = policy;
        Self::finish(copy, changed, Arc::new(classified), concerned)
    }

    /// This preparation on a later copy of the same ledger. Only what has changed between the two copies is gone through, so that it
    /// takes less time than the first preparation, and less has changed once it is done.
    pub fn caught_up(self, copy: Ledger) -> Self {
        if !self.is_current(&copy) {
            return Self::new(copy, Policy::clone(&self.prepared.policy));
        }
        self.rebased_on(copy)
    }

    /// This preparation, which is current, on a later copy.
    fn rebased_on(self, copy: Ledger) -> Self {
        let (mut changed, classified) = (copy.clone(), self.classified.clone());
        let concerned = self.reclassified.clone();
        drop(changed.install_current(self));
        Self::finish(copy, changed, classified, concerned)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.prepared.policy
    }

    /// How the policy classifies the pods that there were.
    pub fn classified(&self) -> &Arc<Classifications> {
        &self.classified
    }

    /// Whether the ledger still has the policy and the namespaces from which it was made. Pods and nodes may have changed.
    pub(super) fn is_current(&self, ledger: &Ledger) -> bool {
        self.base.policy.version == ledger.policy.version
            && self.base.namespaces == ledger.namespaces
    }
}

fn reclassify(pod_state: &mut PodState, classification: Classification, forgets_starts: bool) {
    pod_state.demand.reclassify(classification);
    if forgets_starts {
        pod_state.start = None;
    }
}

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
    /// `policy` is in force from here on, with a new version. What is bound stays bound, whatever it says; it counts as what it
    /// is now.
    pub(crate) fn set_policy(&mut self, policy: Policy) -> RetiredPolicy {
        self.install_policy(PreparedPolicy::new(self.scratch(), policy))
    }

    /// Puts a prepared policy in force. If the preparation is out of date, the policy is prepared again.
    pub(crate) fn install_policy(&mut self, prepared: PreparedPolicy) -> RetiredPolicy {
        if !prepared.is_current(self) {
            return self.set_policy(Policy::clone(&prepared.prepared.policy));
        }
        self.install_current(prepared)
    }

    /// Puts a preparation in force that is current ([`PreparedPolicy::is_current`]).
    fn install_current(&mut self, prepared: PreparedPolicy) -> RetiredPolicy {
        let PreparedPolicy {
            base: earlier,
            prepared: changed,
            reclassified: concerned,
            ..
        } = prepared;
        let Self {
            policy,
            namespaces,
            pod_states,
            node_states,
            ..
        } = *changed;
        let is_new_policy = matches!(concerned, ReclassifiedPods::All);
        let forgets_starts = self.policy.loading != policy.loading;
        let pods = self
            .pod_states
            .merge_prepared(&earlier.pod_states, pod_states, |pod_state| {
                if concerned.contains(pod_state) {
                    reclassify(
                        pod_state,
                        policy.classify(&pod_state.demand.traits),
                        forgets_starts,
                    );
                }
            });
        let change = PolicyChange {
            policy: &policy,
            recompute_freshness_at: is_new_policy.then_some(self.now),
            forgets_starts,
        };
        let nodes = self.node_states.merge_prepared(
            &earlier.node_states,
            node_states,
            &change,
            &self.pod_states,
        );
        self.namespaces = namespaces;
        let before = std::mem::replace(&mut self.policy, policy);
        if is_new_policy {
            self.apply_settings(&before);
        }
        self.update_whole_queue();
        RetiredPolicy {
            _earlier: earlier,
            _pods: pods,
            _nodes: nodes,
        }
    }

    /// Applies the policy's settings to what follows from them and not from its classes.
    fn apply_settings(&mut self, before: &Policy) {
        if before.loading != self.policy.loading {
            self.start_times.forget();
        }
        self.evictions.map_tenants(before, &self.policy);
        self.apply_packing_policy();
        if before.dra != self.policy.dra {
            self.update_all_published();
        }
    }

    /// The labels of a node, by which it is in a pool.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn set_labels(&mut self, name: &NodeName, labels: BTreeMap<String, String>) {
        self.set_shared_labels(name, Arc::new(labels));
    }

    /// Sets the labels of a node, by which it is in a pool. They are shared with the caller.
    pub(crate) fn set_shared_labels(
        &mut self,
        name: &NodeName,
        labels: Arc<BTreeMap<String, String>>,
    ) {
        let policy = &self.policy;
        if self
            .node_states
            .get_mut(name)
            .is_some_and(|node_state| node_state.set_labels(labels, policy))
        {
            self.refresh(name);
            self.update_published(name);
        }
    }

    /// What a node that exists shows of its GPUs beside their list.
    pub(crate) fn set_signs(&mut self, name: &NodeName, signs: NodeSigns) {
        let policy = &self.policy;
        if self
            .node_states
            .get_mut(name)
            .is_some_and(|node_state| node_state.set_signs(signs, policy))
        {
            self.refresh(name);
        }
    }

    /// Whether the node's labels say that it has GPUs, by those that the agent's DaemonSet selects its nodes by.
    pub(crate) fn has_gpu_label(&self, name: &NodeName) -> bool {
        let labels = self
            .node_states
            .get(name)
            .map(|node_state| node_state.labels());
        labels.is_some_and(|labels| {
            GPU_LABELS
                .iter()
                .any(|label| labels.get(*label).is_some_and(|value| value == "true"))
        })
    }

    /// Records since when a bound pod runs, if that is earlier than recorded.
    pub(super) fn record_running_since(&mut self, uid: &PodUid, started: Moment) {
        let Some(bound) = self.pod_states.get(uid).and_then(PodState::bound) else {
            return;
        };
        if bound.started <= started {
            return;
        }
        self.pod_states
            .edit_without_move(uid, |pod_state| pod_state.set_earlier_start(started));
        if let Some(tenant) = self.pod_states[uid].demand.tenant {
            self.node_states.forget_guaranteed(tenant);
        }
        self.update_node_disruption_info(uid);
    }
}

/// Other labels of namespaces, by name; `None` for a namespace that is gone.
pub(crate) type NamespaceEdits = BTreeMap<String, Option<Arc<Labels>>>;

/// Other labels and everything that follows from them, made of a copy of a ledger.
#[derive(Debug)]
pub(crate) struct PreparedLabels(PreparedPolicy);

impl PreparedLabels {
    /// `copy` is [`Ledger::scratch`] of the ledger in which these labels shall be known. Returns `None` if its policy says the same
    /// of all namespaces.
    pub fn new(copy: Ledger, edits: NamespaceEdits) -> Option<Self> {
        let selections = copy.changed_selections(&edits);
        (!selections.is_empty()).then(|| Self(PreparedPolicy::for_labels(copy, edits, &selections)))
    }

    /// This preparation on a later copy of the same ledger, with the edits for it.
    pub fn caught_up(self, copy: Ledger, edits: NamespaceEdits) -> Option<Self> {
        match self.0.is_current(&copy) {
            true => Some(Self(self.0.rebased_on(copy))),
            false => Self::new(copy, edits),
        }
    }
}

impl Ledger {
    /// The labels of all namespaces, as far as they are known.
    pub fn namespaces(&self) -> &NamespaceLabels {
        &self.namespaces
    }

    /// A policy as it would be in force here: with what its selectors say of the known namespaces.
    pub fn under_namespaces(&self, policy: Policy) -> Policy {
        policy.with_namespace_labels(&self.namespaces)
    }

    /// Namespaces have these labels from now on. Returns what was in force before if the policy says something else of any of
    /// them now.
    pub(crate) fn edit_namespaces(&mut self, edits: NamespaceEdits) -> Option<RetiredPolicy> {
        let selections = self.changed_selections(&edits);
        if selections.is_empty() {
            self.store_labels(edits);
            return None;
        }
        Some(self.install_current(PreparedPolicy::for_labels(
            self.scratch(),
            edits,
            &selections,
        )))
    }

    /// Puts prepared labels in force. If the preparation is out of date, returns `None`, and nothing has changed.
    pub(crate) fn install_labels(&mut self, prepared: PreparedLabels) -> Option<RetiredPolicy> {
        prepared
            .0
            .is_current(self)
            .then(|| self.install_current(prepared.0))
    }

    /// What the policy says of the namespaces of which it says something else by these labels.
    fn changed_selections(&self, edits: &NamespaceEdits) -> BTreeMap<String, NamespaceSelection> {
        let selections = edits
            .iter()
            .map(|(name, labels)| (name, self.policy.select_by_labels(labels.as_deref())));
        let changed = selections
            .filter(|(name, selection)| *selection != self.policy.namespace_selection(name));
        changed
            .map(|(name, selection)| (name.clone(), selection))
            .collect()
    }

    fn store_labels(&mut self, edits: NamespaceEdits) {
        let namespaces = Arc::make_mut(&mut self.namespaces);
        for (name, labels) in edits {
            match labels {
                Some(labels) => namespaces.insert(name, labels),
                None => namespaces.remove(&name),
            };
        }
    }
}
