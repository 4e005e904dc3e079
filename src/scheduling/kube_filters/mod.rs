//! What kube-scheduler's own default filters would answer, so that no pod is evicted, and no gate removed, for a node that it
//! would refuse.
//!
//! The input is all nodes and all pods, also those without a GPU: they use CPU, memory and ports, too. GPUs and
//! `stowage.dev/vram` belong to the ledger and are left out. The filters are NodeUnschedulable, TaintToleration, NodeAffinity,
//! NodeResourcesFit and NodePorts, and for persistent volume claims VolumeBinding and VolumeZone; where a pod requests anything
//! else that filters nodes, the verdict is unknown. Arguments of a scheduler profile (`addedAffinity`, ignored resources) are not
//! known here.
//!
//! [`resources`] and [`node`] are the types; [`requirements`] is what a pod shows; [`filters`] the verdict;
//! [`volumes`] what claims and their volumes ask of a node; [`node_state`] is a node with its pods and [`anti_affinity`] the
//! index of bound pods' anti-affinities; this file is the view of them all. Nothing here knows a Kubernetes type:
//! `kubernetes::objects` reads them.

mod anti_affinity;
pub mod filters;
pub mod node;
mod node_state;
pub mod requirements;
pub mod resources;
pub mod volumes;

pub use filters::{FilterReason, FilterVerdict};
pub use node::FilterNode;
pub use requirements::{
    AntiAffinity, NamespaceScope, NodeFootprint, Requirements, UnsupportedRule,
};
pub use resources::ResourceList;
pub use volumes::{StorageKind, StorageObject};

use super::sharing::ShardedMap;
use super::vocabulary::demand::HostResources;
use crate::ids::{NodeName, PodUid};
use crate::units::{Bytes, MilliCpu};
use anti_affinity::AntiAffinityIndex;
use filters::{NodeOccupancy, run_filters};
use node_state::FilterNodeState;
use resources::{CPU, MEMORY};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use volumes::{VolumeIndex, VolumeIndexState, VolumeRules};

/// The cluster as kube-scheduler's filters see it.
#[derive(Debug, Default)]
pub struct ClusterFilters {
    current: FilterSnapshot,
    /// The node of each bound pod.
    node_by_pod: ShardedMap<PodUid, NodeName>,
}

/// The view at one moment, to be read without its lock. Cheap to take: node states are shared until they change.
#[derive(Debug, Clone, Default)]
pub struct FilterSnapshot {
    node_states: ShardedMap<NodeName, Arc<FilterNodeState>>,
    waiting: ShardedMap<PodUid, Arc<Requirements>>,
    /// Requirements of the successors of bound pods; stored only where pods may be moved.
    movable: ShardedMap<PodUid, Arc<Requirements>>,
    anti_affinities: Arc<AntiAffinityIndex>,
    volumes: Arc<VolumeIndex>,
}

/// Stored form of [`ClusterFilters`]: every node, pod and storage object as it was set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClusterFiltersState {
    machines: Vec<Arc<FilterNode>>,
    bound: BTreeMap<PodUid, NodeFootprint>,
    waiting: BTreeMap<PodUid, Arc<Requirements>>,
    movable: BTreeMap<PodUid, Arc<Requirements>>,
    #[serde(default)]
    volumes: VolumeIndexState,
}

/// How a plan changes a node before the pod is placed there. Listed pods that neither are on the node nor wait change nothing,
/// except that a `coming` pod that was never observed makes the verdict unknown.
#[derive(Debug, Clone, Copy, Default)]
pub struct AssumedNodeChange<'a> {
    /// Pods that leave: their resources are free. Their anti-affinity counts until they are gone.
    pub leaving: &'a [PodUid],
    /// Pending pods that use resources there first: planned earlier, reserved, or assumed and not yet observed bound.
    pub coming: &'a [PodUid],
}

/// One pod to be checked on many nodes: what is the same for all of them is computed once.
#[derive(Debug)]
pub struct FilterQuery<'a> {
    snapshot: &'a FilterSnapshot,
    /// `None`: any pod with the same requirements that is not there yet.
    pod: Option<&'a PodUid>,
    requirements: &'a Requirements,
    /// Topology labels and their values where bound pods may exclude it by anti-affinity.
    excluded_topologies: BTreeMap<&'a str, BTreeSet<&'a str>>,
    volumes: VolumeRules<'a>,
}

impl ClusterFilters {
    /// Sets a node as it is now.
    pub fn set_node(&mut self, mut machine: FilterNode) {
        let node_state = self
            .current
            .node_states
            .get_or_insert_with(machine.name.clone(), Arc::default);
        if node_state.node.as_deref() == Some(&machine) {
            return;
        }
        // The ledger shares the same labels: they seldom change, and are most of a node.
        if let Some(recorded) = node_state
            .node
            .as_ref()
            .filter(|recorded| recorded.labels == machine.labels)
        {
            machine.labels = recorded.labels.clone();
        }
        Arc::make_mut(node_state).node = Some(Arc::new(machine));
    }

    /// Removes the node; its pods stay until they are observed to go.
    pub(crate) fn remove_node(&mut self, name: &NodeName) {
        if let Some(node_state) = self
            .current
            .node_states
            .get_mut(name)
            .filter(|node_state| node_state.node.is_some())
        {
            Arc::make_mut(node_state).node = None;
            self.remove_node_state_if_empty(name);
        }
    }

    /// Sets a bound pod as it is now. It no longer waits.
    pub fn set_pod(&mut self, uid: PodUid, footprint: NodeFootprint) {
        // Most changes of a bound pod are changes of its status.
        if self.current.footprint(&footprint.node, &uid) == Some(&footprint) {
            return;
        }
        self.remove_pod(&uid);
        // All pods of a node share its name, and all pods with equal anti-affinities share those.
        let node = self
            .current
            .node_states
            .get_key_value(&footprint.node)
            .map_or(&footprint.node, |(name, _)| name)
            .clone();
        let repels = match footprint.repels.is_empty() {
            true => Arc::default(),
            false => Arc::make_mut(&mut self.current.anti_affinities).add(&node, &footprint.repels),
        };
        let NodeFootprint {
            volumes,
            claims_devices,
            ..
        } = footprint;
        let ports = shared_if_empty(footprint.ports);
        let amounts = ResourceList {
            others: shared_if_empty(footprint.amounts.others),
            ..footprint.amounts
        };
        self.node_by_pod.insert(uid.clone(), node.clone());
        let node_state = self
            .current
            .node_states
            .get_or_insert_with(node.clone(), Arc::default);
        Arc::make_mut(node_state).insert(
            uid,
            NodeFootprint {
                node,
                amounts,
                ports,
                repels,
                volumes,
                claims_devices,
            },
        );
    }

    /// Sets a pending pod as it is now.
    pub fn set_pending(&mut self, uid: PodUid, wants: Requirements) {
        if self
            .current
            .requirements_of(&uid)
            .is_some_and(|current| **current == wants)
        {
            return;
        }
        self.remove_pod(&uid);
        self.current.waiting.insert(uid, Arc::new(wants));
    }

    /// Sets the requirements of the successor of a bound pod, which replaces it if it is evicted.
    pub(crate) fn set_successor(&mut self, uid: PodUid, wants: Requirements) {
        if self.current.movable.get(&uid).map(|current| &**current) != Some(&wants) {
            self.current.movable.insert(uid, Arc::new(wants));
        }
    }

    /// The requirements of a bound pod's successor.
    pub fn successor_requirements(&self, pod: &PodUid) -> Option<&Arc<Requirements>> {
        self.current.successor_requirements(pod)
    }

    /// Removes a pod that has ended or was deleted.
    pub(crate) fn remove_pod(&mut self, uid: &PodUid) {
        self.current.waiting.remove(uid);
        self.current.movable.remove(uid);
        let Some(node) = self.node_by_pod.remove(uid) else {
            return;
        };
        let Some(node_state) = self.current.node_states.get_mut(&node) else {
            return;
        };
        let removed = Arc::make_mut(node_state).remove(uid);
        if let Some(footprint) = removed.filter(|footprint| !footprint.repels.is_empty()) {
            Arc::make_mut(&mut self.current.anti_affinities).remove(&node, &footprint.repels);
        }
        self.remove_node_state_if_empty(&node);
    }

    /// Rebuilds the filters from an exported state. Sums and the index of anti-affinities follow from the pods.
    pub fn from_state(state: ClusterFiltersState) -> Self {
        let mut filters = Self::default();
        state
            .machines
            .into_iter()
            .for_each(|machine| filters.set_node(Arc::unwrap_or_clone(machine)));
        state
            .bound
            .into_iter()
            .for_each(|(uid, footprint)| filters.set_pod(uid, footprint));
        filters.current.waiting = state.waiting.into_iter().collect();
        filters.current.movable = state.movable.into_iter().collect();
        filters.current.volumes = Arc::new(VolumeIndex::from_state(state.volumes));
        filters
    }

    /// Sets a claim (by `namespace/name`), a volume or a storage class as it is now.
    pub(crate) fn set_storage(&mut self, name: Arc<str>, object: StorageObject) {
        Arc::make_mut(&mut self.current.volumes).set(name, object);
    }

    pub(crate) fn remove_storage(&mut self, kind: StorageKind, name: &str) {
        Arc::make_mut(&mut self.current.volumes).remove(kind, name);
    }

    /// The names of all known objects of a kind, in no order.
    pub fn storage_names(&self, kind: StorageKind) -> Vec<Arc<str>> {
        self.current.volumes.names(kind)
    }

    /// All known pods, in no order.
    pub fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.current.pods_in_no_order()
    }

    pub fn snapshot(&self) -> FilterSnapshot {
        self.current.clone()
    }

    /// The node of a bound pod.
    pub fn node_of(&self, pod: &PodUid) -> Option<&NodeName> {
        self.node_by_pod.get(pod)
    }

    /// CPU and memory of a node that bound pods leave free; `None` if the node is not known.
    pub fn free_host(&self, node: &NodeName) -> Option<HostResources> {
        let node_state = self.current.node_states.get(node)?;
        let (offered, taken) = (
            &node_state.node.as_ref()?.allocatable,
            node_state.requested_after(&[], &[]),
        );
        let left = |resource: &str| offered.get(resource).saturating_sub(taken.get(resource));
        Some(HostResources {
            cpu: MilliCpu(left(CPU)),
            memory: Bytes(left(MEMORY)),
        })
    }

    /// Whether a pod bound to the node has ResourceClaims.
    pub fn claims_devices(&self, node: &NodeName) -> bool {
        self.current
            .node_states
            .get(node)
            .is_some_and(|node_state| node_state.claims_devices())
    }

    /// See [`FilterSnapshot::requirements_of`].
    pub fn requirements_of(&self, pod: &PodUid) -> Option<&Arc<Requirements>> {
        self.current.requirements_of(pod)
    }

    /// See [`FilterSnapshot::query`].
    pub fn query<'a>(
        &'a self,
        pod: Option<&'a PodUid>,
        wants: &'a Requirements,
    ) -> FilterQuery<'a> {
        self.current.query(pod, wants)
    }

    fn remove_node_state_if_empty(&mut self, name: &NodeName) {
        if self
            .current
            .node_states
            .get(name)
            .is_some_and(|node_state| node_state.is_empty())
        {
            self.current.node_states.remove(name);
        }
    }
}

impl FilterSnapshot {
    pub fn volumes(&self) -> &Arc<VolumeIndex> {
        &self.volumes
    }

    /// Exports the whole state of the filters, to be stored.
    pub fn export(&self) -> ClusterFiltersState {
        let states = || {
            self.node_states
                .iter_unordered()
                .map(|(_, node_state)| node_state)
        };
        let mut machines: Vec<_> = states()
            .filter_map(|node_state| node_state.node.clone())
            .collect();
        machines.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let pods = states().flat_map(|node_state| node_state.pods());
        ClusterFiltersState {
            machines,
            bound: pods
                .map(|(uid, footprint)| (uid.clone(), footprint.clone()))
                .collect(),
            waiting: in_order(&self.waiting),
            movable: in_order(&self.movable),
            volumes: self.volumes.export(),
        }
    }

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
        self.query(Some(pod), wants).verdict(node, beside)
    }

    /// The requirements of a pending pod.
    pub fn requirements_of(&self, pod: &PodUid) -> Option<&Arc<Requirements>> {
        self.waiting.get(pod)
    }

    /// All known pods, in no order.
    pub fn pods_in_no_order(&self) -> impl Iterator<Item = &PodUid> {
        let bound = self
            .node_states
            .iter_unordered()
            .flat_map(|(_, node_state)| node_state.pods());
        bound
            .map(|(uid, _)| uid)
            .chain(self.waiting.iter_unordered().map(|(uid, _)| uid))
    }

    /// The requirements of a bound pod's successor.
    pub fn successor_requirements(&self, pod: &PodUid) -> Option<&Arc<Requirements>> {
        self.movable.get(pod)
    }

    pub fn query<'a>(
        &'a self,
        pod: Option<&'a PodUid>,
        wants: &'a Requirements,
    ) -> FilterQuery<'a> {
        let mut shut = BTreeMap::<&str, BTreeSet<&str>>::new();
        for (repulsion, sources) in self.anti_affinities.that_may_exclude(wants) {
            let topology = &*repulsion.topology;
            let values = sources.filter_map(|node| self.node_object(node)?.labels.get(topology));
            shut.entry(topology)
                .or_default()
                .extend(values.map(String::as_str));
        }
        FilterQuery {
            snapshot: self,
            pod,
            requirements: wants,
            excluded_topologies: shut,
            volumes: self.volumes.rules_for(wants),
        }
    }

    fn node_object(&self, node: &NodeName) -> Option<&FilterNode> {
        self.node_states.get(node)?.node.as_deref()
    }

    fn footprint(&self, node: &NodeName, uid: &PodUid) -> Option<&NodeFootprint> {
        self.node_states.get(node)?.pod(uid)
    }
}

impl<'a> FilterQuery<'a> {
    pub fn verdict(&self, node: &NodeName, beside: &AssumedNodeChange<'_>) -> FilterVerdict {
        let node_state = self.snapshot.node_states.get(node);
        let Some((node_state, machine)) =
            node_state.and_then(|node_state| Some((node_state, node_state.node.as_deref()?)))
        else {
            return FilterVerdict::Rejects(FilterReason::UnknownNode);
        };
        let (coming, unobserved) = self.observed_arrivals(node_state, beside.coming);
        let is_excluded = self.is_excluded_by_bound_pods(machine)
            || coming.iter().any(|other| self.is_excluded_by(other));
        let unsupported = is_excluded
            .then_some(UnsupportedRule::AntiAffinityOfAnotherPod)
            .or(unobserved);
        let (taken, ports) = (
            node_state.requested_after(beside.leaving, &coming),
            node_state.ports_after(beside.leaving, &coming),
        );
        let attached = node_state.volumes_after(beside.leaving, &coming);
        let volumes = &self.volumes;
        run_filters(
            self.requirements,
            NodeOccupancy {
                machine,
                requested: &taken,
                ports,
                volumes,
                attached,
                unsupported,
            },
        )
    }

    /// How much the node lacks of the CPU and memory that the pod requests.
    pub fn shortfall(&self, node: &NodeName, beside: &AssumedNodeChange<'_>) -> HostResources {
        let Some(node_state) = self.snapshot.node_states.get(node) else {
            return HostResources::default();
        };
        let Some(machine) = &node_state.node else {
            return HostResources::default();
        };
        let (coming, _) = self.observed_arrivals(node_state, beside.coming);
        let taken = node_state.requested_after(beside.leaving, &coming);
        let shortfall = |resource: &str, requested: u64| {
            let left = machine
                .allocatable
                .get(resource)
                .saturating_sub(taken.get(resource));
            requested.saturating_sub(left)
        };
        let ResourceList { cpu, memory, .. } = &self.requirements.amounts;
        HostResources {
            cpu: MilliCpu(shortfall(CPU, cpu.0)),
            memory: Bytes(shortfall(MEMORY, memory.0)),
        }
    }

    /// The requirements of coming pods that are not on the node yet, and a rule if one of them was never observed.
    fn observed_arrivals(
        &self,
        node_state: &FilterNodeState,
        coming: &[PodUid],
    ) -> (Vec<&'a Requirements>, Option<UnsupportedRule>) {
        let absent = || {
            coming
                .iter()
                .filter(|uid| Some(*uid) != self.pod && node_state.pod(uid).is_none())
        };
        let observed: Vec<_> = absent()
            .filter_map(|uid| self.snapshot.requirements_of(uid))
            .map(|wants| &**wants)
            .collect();
        let has_unobserved = observed.len() < absent().count();
        (
            observed,
            has_unobserved.then_some(UnsupportedRule::UnknownNeighbor),
        )
    }

    fn is_excluded_by_bound_pods(&self, machine: &FilterNode) -> bool {
        let is_there = |topology: &str, values: &BTreeSet<&str>| {
            machine
                .labels
                .get(topology)
                .is_some_and(|value| values.contains(&**value))
        };
        self.excluded_topologies
            .iter()
            .any(|(topology, values)| is_there(topology, values))
    }

    /// Whether a required anti-affinity of `other` may exclude the pod. Both will be on one node, whatever the topology key.
    fn is_excluded_by(&self, other: &Requirements) -> bool {
        other
            .repels
            .iter()
            .any(|repulsion| repulsion.may_exclude(self.requirements))
    }
}

fn in_order(pods: &ShardedMap<PodUid, Arc<Requirements>>) -> BTreeMap<PodUid, Arc<Requirements>> {
    pods.iter_unordered()
        .map(|(uid, wants)| (uid.clone(), wants.clone()))
        .collect()
}

/// Nearly every pod has no host ports and no extended resources: those share one empty list.
fn shared_if_empty<T>(list: Arc<[T]>) -> Arc<[T]> {
    if list.is_empty() {
        Arc::default()
    } else {
        list
    }
}

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;
