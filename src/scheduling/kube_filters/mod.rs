//! What the stock scheduler's own filters would say, so that nobody is evicted, and no gate lifted, for a node it would refuse.
//!
//! Fed with all nodes and all pods, those without a GPU as well: they take CPU, memory and ports, too. GPUs and
//! `stowage.dev/vram` are the ledger's and are left out. Judged are NodeUnschedulable, TaintToleration, NodeAffinity,
//! NodeResourcesFit and NodePorts; where a pod asks for anything else that filters nodes, the verdict says that it cannot be
//! judged. Not known here is what a scheduler's profile adds by its arguments (`addedAffinity`, ignored resources).
//!
//! [`amounts`], [`machine`] and [`ports`] are the words; [`requirements`] what a pod shows; [`verdict`] the filters;
//! [`page`] is a node with its pods and [`repelling`] what bound pods hold against others; here is the view of them all.
//! Nothing here knows a Kubernetes type: `contract` reads them.

mod anti_affinity;
pub mod filters;
pub mod host_ports;
pub mod node;
mod node_state;
pub mod requirements;
pub mod resources;

pub use filters::{FilterReason, FilterVerdict};
pub use node::FilterNode;
pub use requirements::{AntiAffinity, NamespaceScope, NodeFootprint, Requirements, UnsupportedRule};
pub use resources::Amounts;

use super::vocabulary::demand::HostResources;
use crate::ids::{NodeName, PodUid};
use crate::units::{Bytes, MilliCpu};
use anti_affinity::AntiAffinityIndex;
use filters::{NodeOccupancy, classify};
use node_state::FilterNodeState;
use resources::{CPU, MEMORY};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The cluster as the stock filters see it.
#[derive(Debug, Default)]
pub struct ClusterFilters {
    seen: FilterSnapshot,
    /// On which node's page a bound pod stands.
    places: BTreeMap<PodUid, NodeName>,
}

/// The view at one moment, to be asked without its lock. Cheap to take: pages are shared until they change.
#[derive(Debug, Clone, Default)]
pub struct FilterSnapshot {
    pages: FxHashMap<NodeName, Arc<FilterNodeState>>,
    waiting: Arc<BTreeMap<PodUid, Arc<Requirements>>>,
    /// Of bound pods, what their successors will ask; kept only where somebody may be moved.
    movable: Arc<BTreeMap<PodUid, Arc<Requirements>>>,
    repelling: Arc<AntiAffinityIndex>,
}

/// How a plan alters a node before the pod comes there. Pods that stand here and neither are on the node nor wait change nothing,
/// except that a `coming` pod that was never seen cannot be judged.
#[derive(Debug, Clone, Copy, Default)]
pub struct AssumedNodeChange<'a> {
    /// Who leaves: what they take is given back. Whom they keep away by anti-affinity counts until they are gone.
    pub leaving: &'a [PodUid],
    /// Waiting pods that take their room there first: planned earlier, held, or assumed and not yet seen bound.
    pub coming: &'a [PodUid],
}

/// One pod to be judged on many nodes: what is the same for all of them is looked up once.
#[derive(Debug)]
pub struct FilterQuery<'a> {
    view: &'a FilterSnapshot,
    /// `None`: any pod that asks the same and is not there yet.
    pod: Option<&'a PodUid>,
    wants: &'a Requirements,
    /// Topology labels and their values, where bound pods may keep it away.
    shut: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

impl ClusterFilters {
    /// A node as it is now.
    pub fn set_machine(&mut self, mut machine: FilterNode) {
        let page = self.seen.pages.entry(machine.name.clone()).or_default();
        if page.machine.as_deref() == Some(&machine) {
            return;
        }
        // The ledger has the same labels, shared: they seldom change, and are most of a node.
        if let Some(known) = page.machine.as_ref().filter(|known| known.labels == machine.labels) {
            machine.labels = known.labels.clone();
        }
        Arc::make_mut(page).machine = Some(Arc::new(machine));
    }

    /// The node is gone; its pods stay until they are seen to go.
    pub fn remove_machine(&mut self, name: &NodeName) {
        if let Some(page) = self.seen.pages.get_mut(name).filter(|page| page.machine.is_some()) {
            Arc::make_mut(page).machine = None;
            self.forget_blank(name);
        }
    }

    /// A bound pod as it is now. It does not wait any more.
    pub fn set_pod(&mut self, uid: PodUid, footprint: NodeFootprint) {
        // Most of what is seen of a bound pod is its status.
        if self.seen.footprint(&footprint.node, &uid) == Some(&footprint) {
            return;
        }
        self.remove_pod(&uid);
        // All pods of a node share its name, and all pods that repel alike what they repel.
        let node =
            self.seen.pages.get_key_value(&footprint.node).map_or(&footprint.node, |(name, _)| name).clone();
        let repels = match footprint.repels.is_empty() {
            true => Arc::default(),
            false => Arc::make_mut(&mut self.seen.repelling).add(&node, &footprint.repels),
        };
        let ports = shared_if_empty(footprint.ports);
        let amounts = Amounts { others: shared_if_empty(footprint.amounts.others), ..footprint.amounts };
        self.places.insert(uid.clone(), node.clone());
        let page = self.seen.pages.entry(node.clone()).or_default();
        Arc::make_mut(page).insert(uid, NodeFootprint { node, amounts, ports, repels });
    }

    /// A pod that waits, as it is now.
    pub fn set_waiting(&mut self, uid: PodUid, wants: Requirements) {
        if self.seen.wants(&uid) == Some(&wants) {
            return;
        }
        self.remove_pod(&uid);
        Arc::make_mut(&mut self.seen.waiting).insert(uid, Arc::new(wants));
    }

    /// What the pod will ask that takes this bound one's place if it is evicted.
    pub fn set_movable(&mut self, uid: PodUid, wants: Requirements) {
        if self.seen.movable.get(&uid).map(|known| &**known) != Some(&wants) {
            Arc::make_mut(&mut self.seen.movable).insert(uid, Arc::new(wants));
        }
    }

    /// The pod has ended or is gone.
    pub fn remove_pod(&mut self, uid: &PodUid) {
        if self.seen.waiting.contains_key(uid) {
            Arc::make_mut(&mut self.seen.waiting).remove(uid);
        }
        if self.seen.movable.contains_key(uid) {
            Arc::make_mut(&mut self.seen.movable).remove(uid);
        }
        let Some(node) = self.places.remove(uid) else { return };
        let Some(page) = self.seen.pages.get_mut(&node) else { return };
        let removed = Arc::make_mut(page).remove(uid);
        if let Some(footprint) = removed.filter(|footprint| !footprint.repels.is_empty()) {
            Arc::make_mut(&mut self.seen.repelling).remove(&node, &footprint.repels);
        }
        self.forget_blank(&node);
    }

    /// Every pod it knows, bound ones first, each in order of UID.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.places.keys().chain(self.seen.waiting.keys())
    }

    pub fn snapshot(&self) -> FilterSnapshot {
        self.seen.clone()
    }

    /// On which node a bound pod is.
    pub fn node_of(&self, pod: &PodUid) -> Option<&NodeName> {
        self.places.get(pod)
    }

    /// CPU and memory that bound pods leave of a node; `None` if it is not known.
    pub fn free_host(&self, node: &NodeName) -> Option<HostResources> {
        let page = self.seen.pages.get(node)?;
        let (offered, taken) = (&page.machine.as_ref()?.allocatable, page.taken(&[], &[]));
        let left = |resource: &str| offered.of_resource(resource).saturating_sub(taken.of_resource(resource));
        Some(HostResources { cpu: MilliCpu(left(CPU)), memory: Bytes(left(MEMORY)) })
    }

    /// See [`FilterSnapshot::wants`].
    pub fn wants(&self, pod: &PodUid) -> Option<&Requirements> {
        self.seen.wants(pod)
    }

    fn forget_blank(&mut self, name: &NodeName) {
        if self.seen.pages.get(name).is_some_and(|page| page.is_blank()) {
            self.seen.pages.remove(name);
        }
    }
}

impl FilterSnapshot {
    /// The verdict of kube-scheduler's filters on this pod on this node, altered as `beside` says.
    ///
    /// For many nodes, use a [`FilterQuery`].
    pub fn verdict(
        &self,
        pod: &PodUid,
        wants: &Requirements,
        node: &NodeName,
        beside: &AssumedNodeChange<'_>,
    ) -> FilterVerdict {
        self.ask(Some(pod), wants).verdict(node, beside)
    }

    /// What a waiting pod asks of its node.
    pub fn wants(&self, pod: &PodUid) -> Option<&Requirements> {
        self.waiting.get(pod).map(|wants| &**wants)
    }

    /// What the successor of a bound pod will ask.
    pub fn movable(&self, pod: &PodUid) -> Option<&Requirements> {
        self.movable.get(pod).map(|wants| &**wants)
    }

    pub fn ask<'a>(&'a self, pod: Option<&'a PodUid>, wants: &'a Requirements) -> FilterQuery<'a> {
        let mut shut = BTreeMap::<&str, BTreeSet<&str>>::new();
        for (repulsion, sources) in self.repelling.against(wants) {
            let topology = &*repulsion.topology;
            let values = sources.filter_map(|node| self.machine(node)?.labels.get(topology));
            shut.entry(topology).or_default().extend(values.map(String::as_str));
        }
        FilterQuery { view: self, pod, wants, shut }
    }

    fn machine(&self, node: &NodeName) -> Option<&FilterNode> {
        self.pages.get(node)?.machine.as_deref()
    }

    fn footprint(&self, node: &NodeName, uid: &PodUid) -> Option<&NodeFootprint> {
        self.pages.get(node)?.pod(uid)
    }
}

impl<'a> FilterQuery<'a> {
    pub fn verdict(&self, node: &NodeName, beside: &AssumedNodeChange<'_>) -> FilterVerdict {
        let page = self.view.pages.get(node);
        let Some((page, machine)) = page.and_then(|page| Some((page, page.machine.as_deref()?))) else {
            return FilterVerdict::Refuses(FilterReason::UnknownNode);
        };
        let (coming, unseen) = self.coming(page, beside.coming);
        let repelled = self.is_ruled_out(machine) || coming.iter().any(|other| self.is_repelled_by(other));
        let unjudged = repelled.then_some(UnsupportedRule::RepelledByAnother).or(unseen);
        let (taken, ports) = (page.taken(beside.leaving, &coming), page.ports(beside.leaving, &coming));
        classify(self.wants, NodeOccupancy { machine, taken: &taken, ports, unjudged })
    }

    /// What the node lacks of the CPU and memory that the pod asks for.
    pub fn shortfall(&self, node: &NodeName, beside: &AssumedNodeChange<'_>) -> HostResources {
        let Some(page) = self.view.pages.get(node) else { return HostResources::default() };
        let Some(machine) = &page.machine else { return HostResources::default() };
        let (coming, _) = self.coming(page, beside.coming);
        let taken = page.taken(beside.leaving, &coming);
        let shortfall = |resource: &str, asked: u64| {
            let left = machine.allocatable.of_resource(resource).saturating_sub(taken.of_resource(resource));
            asked.saturating_sub(left)
        };
        let Amounts { cpu, memory, .. } = &self.wants.amounts;
        HostResources { cpu: MilliCpu(shortfall(CPU, cpu.0)), memory: Bytes(shortfall(MEMORY, memory.0)) }
    }

    /// Those who are not there yet, and whether one of them was never seen.
    fn coming(
        &self,
        page: &FilterNodeState,
        coming: &[PodUid],
    ) -> (Vec<&'a Requirements>, Option<UnsupportedRule>) {
        let absent = || coming.iter().filter(|uid| Some(*uid) != self.pod && page.pod(uid).is_none());
        let seen: Vec<_> = absent().filter_map(|uid| self.view.wants(uid)).collect();
        let unseen = seen.len() < absent().count();
        (seen, unseen.then_some(UnsupportedRule::UnseenNeighbour))
    }

    fn is_ruled_out(&self, machine: &FilterNode) -> bool {
        let is_there = |topology: &str, values: &BTreeSet<&str>| {
            machine.labels.get(topology).is_some_and(|value| values.contains(&**value))
        };
        self.shut.iter().any(|(topology, values)| is_there(topology, values))
    }

    /// Both will be on one node, whatever the topology.
    fn is_repelled_by(&self, other: &Requirements) -> bool {
        other.repels.iter().any(|repulsion| repulsion.may_take(self.wants))
    }
}

/// Nearly every pod has no ports of its node and no extended resources: those share one list.
fn shared_if_empty<T>(list: Arc<[T]>) -> Arc<[T]> {
    if list.is_empty() { Arc::default() } else { list }
}

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;
