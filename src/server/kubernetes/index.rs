//! The cluster index: brings pods, nodes, disruption budgets, ResourceSlices and volumes from the watches into the ledger and
//! into the view of kube-scheduler's filters.
//!
//! Synchronous and without a client: a watch, a dump and a test feed it alike. It keeps names, never objects: sixteen thousand
//! pod objects would be most of this process' memory.
//!
//! ```text
//!  begin_pod_list ─► apply_pod* ─► end_pod_list      a list: pods known before and absent from it are gone
//!  apply_pod · delete_pod                            changes after the list
//! ```

mod budgets;
mod caught_up;
mod conflicts;
mod kube_filters;
pub mod namespaces;
mod pod_warnings;
mod slices;
mod storage;
mod unplannable_pods;

use crate::service::ServerState;
use caught_up::PodWatchProgress;
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::ReservationMessage;
use stowage_scheduling::control_loop::PodEvent;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::kube_filters::StorageKind;
use stowage_scheduling::ledger::{
    Ledger, PodPhase, PodState, PodWarning, StartProgress, TimedStart,
};
use stowage_scheduling::planning::WaitReason;
use stowage_scheduling::policy::NamespaceLabels;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{
    EngineStartObserved, FilterPodObserved, NodeDeleted, NodeImagesObserved, NodeObserved,
    PlacelessMemberObserved, PodDeleted, PodObserved, PodReleased, ReservationGone,
};
use stowage_scheduling::vocabulary::classification::PodTraits;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
pub use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::placement::Reservation;

#[derive(Debug, Default)]
pub struct ClusterIndex {
    /// The pod that a name stands for now; only pods that request a GPU and have not ended.
    pods: FxHashMap<PodKey, IndexedPod>,
    nodes: BTreeMap<NodeName, IndexedNode>,
    /// Nodes whose record has changed since these were last handed out.
    changed_nodes: BTreeSet<NodeName>,
    /// Pods with a current warning.
    warnings: BTreeMap<PodUid, PodWarning>,
    /// Pods behind the planner's gate that the planner will not place.
    unplannable_pods: BTreeMap<PodUid, (PodKey, WaitReason)>,
    /// During a list: pods that were known when it began and have not been in it yet.
    unlisted_pods: FxHashSet<PodUid>,
    unlisted_nodes: BTreeSet<NodeName>,
    /// By namespace and name.
    unlisted_budgets: BTreeSet<(String, String)>,
    unlisted_slices: BTreeSet<Arc<str>>,
    unlisted_storage: BTreeMap<StorageKind, BTreeSet<Arc<str>>>,
    pods_list: ListProgress,
    pod_watch_progress: PodWatchProgress,
    /// Whether a list of pods is in progress: pods that it shows may have changed long ago.
    is_listing_pods: bool,
    nodes_list: ListProgress,
    budgets_list: ListProgress,
    /// Listed only while a policy asks for their labels.
    namespaces_list: ListProgress,
    /// During a list: the namespaces that have been in it.
    listed_namespaces: NamespaceLabels,
    slices_list: ListProgress,
    /// Pods in the ledger that no watch had shown at the last sweep.
    unwatched_pods: BTreeSet<PodUid>,
}

/// The pod that a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct IndexedPod {
    uid: PodUid,
    /// The resourceVersion in which it was last applied.
    resource_version: Option<u64>,
}

/// Progress of the latest list of one kind of object.
#[derive(Debug, Clone, Copy, Default)]
struct ListProgress {
    /// Leadership's term when it began.
    term: u64,
    is_complete: bool,
}

impl ListProgress {
    /// Marks the list incomplete if it was begun in an earlier term.
    fn expect(&mut self, term: u64) {
        if self.term < term {
            *self = Self {
                term,
                is_complete: false,
            };
        }
    }
}

/// A node's allocator of GPUs and advertised VRAM, as its status shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexedNode {
    pub kind: NodeKind,
    /// `stowage.dev/vram` in its capacity.
    pub advertised_vram: Option<Bytes>,
}

impl ClusterIndex {
    // ---- pods ----

    /// Applies a pod's present state. Returns an Event that the pod should get.
    pub fn apply_pod(&mut self, state: &ServerState, pod: &Pod) -> Option<PodEvent> {
        let event = self.apply_pod_state(state, pod);
        self.record_pod_version(pod);
        event
    }

    fn apply_pod_state(&mut self, state: &ServerState, pod: &Pod) -> Option<PodEvent> {
        let (uid, key) = objects::identity(pod).ok()?;
        self.unlisted_pods.remove(&uid);
        if self.is_listed_unchanged(state, &uid, &key, pod) {
            return None;
        }
        let filter_observation = kube_filters::filter_observation(state, &uid, pod);
        if !objects::asks_for_gpu(pod) {
            state.cluster().apply(filter_observation);
            apply_placeless_member(state, &uid, pod);
            // The ledger knows a pod that asks for zero until it is bound.
            if objects::requests_zero_gpus(pod) && !objects::is_pending(pod) {
                self.release(state, &uid, &key);
            }
            self.update_unplannable_pod(&uid, &key, pod, true);
            return None;
        }
        if objects::is_finished(pod) || objects::is_deleted_without_node(pod) {
            state.cluster().apply(filter_observation);
            self.release(state, &uid, &key);
            apply_placeless_member(state, &uid, pod);
            return None;
        }
        self.release_predecessor(state, &uid, &key);
        self.pods.insert(
            key.clone(),
            IndexedPod {
                uid: uid.clone(),
                resource_version: resource_version(pod),
            },
        );
        conflicts::observe_pod(state, &uid, &key, pod);
        let progress = self.start_progress(pod);
        let PodApplyOutcome {
            warning,
            is_in_ledger,
            event,
            start,
        } = observe_pod(state, pod, &uid, filter_observation, progress);
        start
            .iter()
            .for_each(|start| state.metrics.starts.observe_start(start));
        self.update_unplannable_pod(&uid, &key, pod, !is_in_ledger);
        self.record_warning(state, &uid, warning);
        event
    }

    pub fn delete_pod(&mut self, state: &ServerState, pod: &Pod) {
        if let Ok((uid, key)) = objects::identity(pod) {
            self.release(state, &uid, &key);
        }
        self.record_pod_version(pod);
    }

    /// Marks the pod list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_pod_list(&mut self, term: u64) {
        self.pods_list.expect(term);
    }

    /// Begins a list of all pods. Pods that enter the ledger from here on may be younger than the list.
    pub(crate) fn begin_pod_list(&mut self, state: &ServerState) {
        self.is_listing_pods = true;
        self.pod_watch_progress
            .begin_list(state.leadership.takeover());
        // Copies, so that the lock is released before all of them are gone through.
        let (ledger, filters) = {
            let cluster = state.cluster();
            (
                cluster.ledger().scratch(),
                cluster.kube_filters().snapshot(),
            )
        };
        self.unlisted_pods = ledger
            .pods_in_no_order()
            .map(|(uid, _)| uid.clone())
            .collect();
        self.unlisted_pods.extend(
            filters
                .pods_in_no_order()
                .chain(ledger.placeless_members().keys())
                .cloned(),
        );
        // A ledger that has been discarded since does not name them.
        self.unlisted_pods
            .extend(self.pods.values().map(|pod| pod.uid.clone()));
        self.unlisted_pods
            .extend(self.unplannable_pods.keys().cloned());
        state.over_allocations().begin_relist();
    }

    /// Ends the list: pods that were known when it began and are not in it are gone.
    pub fn end_pod_list(&mut self, state: &ServerState) {
        let gone = std::mem::take(&mut self.unlisted_pods);
        for uid in &gone {
            state.cluster().apply(PodDeleted(uid.clone()));
            state.over_allocations().remove(uid);
            self.warnings.remove(uid);
            self.unplannable_pods.remove(uid);
        }
        state.over_allocations().end_relist();
        self.pods.retain(|_, pod| !gone.contains(&pod.uid));
        self.pods_list.is_complete = true;
        self.is_listing_pods = false;
        self.update_pods_caught_up();
    }

    /// Replaces all pods at once.
    #[cfg(test)]
    pub(crate) fn replace_pods(&mut self, state: &ServerState, pods: &[Pod]) -> Vec<PodEvent> {
        self.begin_pod_list(state);
        let events = pods
            .iter()
            .filter_map(|pod| self.apply_pod(state, pod))
            .collect();
        self.end_pod_list(state);
        events
    }

    /// Releases pending pods that no watch shows, now or at the last sweep. A request can bring a pod before the watch shows
    /// it, or after it was deleted; the latter would stay forever. Sweep no more often than a watch may lag; a reservation
    /// ends by itself before its pod is swept.
    pub fn sweep(index: &Mutex<Self>, state: &ServerState) {
        let ledger = state.scratch_ledger();
        // Goes through all pods, and a watch may be waiting for the index.
        let waiting = waiting_pods_in(&ledger);
        let mut index = index.lock();
        let is_unwatched = |key: &PodKey, uid: &PodUid| {
            index
                .pods
                .get(key)
                .is_none_or(|indexed| indexed.uid != *uid)
        };
        let unwatched_pods: BTreeSet<PodUid> = waiting
            .into_iter()
            .filter(|(key, uid)| is_unwatched(key, uid))
            .map(|(_, uid)| uid)
            .collect();
        for uid in unwatched_pods.intersection(&index.unwatched_pods) {
            let mut cluster = state.cluster();
            // It may have been bound since the copy.
            if cluster
                .ledger()
                .pod_state(uid)
                .is_some_and(waits_without_reservation)
            {
                cluster.apply(PodReleased(uid.clone()));
            }
        }
        index.unwatched_pods = unwatched_pods;
    }

    /// Events for all current warnings, which a new leader records.
    pub fn current_warning_events(&self, state: &ServerState) -> Vec<PodEvent> {
        let ledger = state.scratch_ledger();
        let warnings = self
            .warnings
            .iter()
            .filter_map(|(uid, warning)| pod_warnings::event(&ledger, uid, *warning));
        warnings
            .chain(slices::current_published_events(&ledger, self.nodes.keys()))
            .collect()
    }

    // ---- nodes ----

    pub fn apply_node(&mut self, state: &ServerState, node: &Node) {
        self.apply_node_with_recorded(state, node, &BTreeSet::new());
    }

    /// A node without an agent, on whose GPUs bound pods are recorded.
    pub(super) fn apply_node_with_recorded(
        &mut self,
        state: &ServerState,
        node: &Node,
        recorded: &BTreeSet<GpuUuid>,
    ) {
        let Some(name) = node_name(node) else { return };
        self.unlisted_nodes.remove(&name);
        let record = IndexedNode {
            kind: node_kind(node),
            advertised_vram: advertised_vram(node),
        };
        let machine = objects::kube_filters::filter_node(node);
        let labels = machine
            .as_ref()
            .map(|machine| machine.labels.clone())
            .unwrap_or_default();
        let labelled = objects::devices_from_labels(node);
        let signs = objects::node_signs(node, &labelled);
        state.cluster().apply(NodeObserved {
            name: name.clone(),
            kind: record.kind,
            identity: objects::node_identity(node),
            // Feature discovery's labels count only where Stowage may allocate the GPUs: other nodes have them as well.
            labelled: if record.kind == NodeKind::Stowage {
                let devices = labelled.unwrap_or_default();
                devices.map(|devices| objects::with_recorded_uuids(devices, recorded))
            } else {
                Some(Vec::new())
            },
            plugin_devices: objects::plugin_devices(node),
            signs,
            advertised: record.advertised_vram,
            labels,
            machine,
        });
        let images = objects::node_images(node);
        state.cluster().apply(NodeImagesObserved {
            node: name.clone(),
            images,
        });
        if self.nodes.insert(name.clone(), record) != Some(record) {
            self.changed_nodes.insert(name);
        }
    }

    pub fn delete_node(&mut self, state: &ServerState, node: &Node) {
        if let Some(name) = node_name(node) {
            self.remove_node(state, &name);
        }
    }

    /// Marks the node list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_node_list(&mut self, term: u64) {
        self.nodes_list.expect(term);
    }

    pub(crate) fn begin_node_list(&mut self) {
        self.unlisted_nodes = self.nodes.keys().cloned().collect();
    }

    pub(crate) fn end_node_list(&mut self, state: &ServerState) {
        for name in std::mem::take(&mut self.unlisted_nodes) {
            self.remove_node(state, &name);
        }
        self.nodes_list.is_complete = true;
    }

    /// Replaces all nodes at once.
    #[cfg(test)]
    pub(crate) fn replace_nodes(&mut self, state: &ServerState, nodes: &[Node]) {
        self.begin_node_list();
        nodes.iter().for_each(|node| self.apply_node(state, node));
        self.end_node_list(state);
    }

    /// Hands out the nodes that show another kind or capacity than at the last call.
    pub(crate) fn take_changed_nodes(&mut self) -> BTreeSet<NodeName> {
        std::mem::take(&mut self.changed_nodes)
    }

    /// In order of name.
    pub fn nodes(&self) -> &BTreeMap<NodeName, IndexedNode> {
        &self.nodes
    }

    /// The oldest leadership term among complete lists of pods, nodes, budgets and ResourceSlices; `None` while one is incomplete.
    /// A kind that may not be read counts as complete.
    pub(crate) fn synced_term(&self) -> Option<u64> {
        let lists = [
            self.pods_list,
            self.nodes_list,
            self.budgets_list,
            self.slices_list,
        ];
        if lists.iter().all(|list| list.is_complete) {
            lists.iter().map(|list| list.term).min()
        } else {
            None
        }
    }

    // ---- inside ----

    /// How far the pod's start is. When a list shows a pod ready, it may have been so for long.
    fn start_progress(&self, pod: &Pod) -> Option<StartProgress> {
        match objects::start_progress(pod)? {
            StartProgress::Ready | StartProgress::Running if self.is_listing_pods => {
                Some(StartProgress::Untimed)
            }
            progress => Some(progress),
        }
    }

    fn release(&mut self, state: &ServerState, uid: &PodUid, key: &PodKey) {
        state.cluster().apply(PodDeleted(uid.clone()));
        state.over_allocations().remove(uid);
        self.warnings.remove(uid);
        self.unplannable_pods.remove(uid);
        if self
            .pods
            .get(key)
            .is_some_and(|indexed| indexed.uid == *uid)
        {
            self.pods.remove(key);
        }
    }

    /// A name stands for one pod at a time: a new UID means that the old pod is gone.
    fn release_predecessor(&mut self, state: &ServerState, uid: &PodUid, key: &PodKey) {
        let indexed_uid = self.pods.get(key).map(|indexed| indexed.uid.clone());
        if let Some(predecessor) = indexed_uid.filter(|indexed| indexed != uid) {
            self.release(state, &predecessor, key);
        }
    }

    /// Whether a list shows a bound pod as it was applied last. A new leader lists a million of them, of which some have changed.
    /// The ledger brings a bound pod's classification to another policy by itself; what its successor requires is read only under
    /// a policy that moves pods.
    fn is_listed_unchanged(
        &self,
        state: &ServerState,
        uid: &PodUid,
        key: &PodKey,
        pod: &Pod,
    ) -> bool {
        let is_unchanged = || {
            let indexed = self.pods.get(key).filter(|indexed_pod| {
                indexed_pod.uid == *uid && indexed_pod.resource_version.is_some()
            });
            indexed.is_some_and(|indexed_pod| indexed_pod.resource_version == resource_version(pod))
                && !self.warnings.contains_key(uid)
        };
        if !self.is_listing_pods || !is_unchanged() {
            return false;
        }
        let lacks_successor = |cluster: &Cluster| {
            kube_filters::may_move(state, pod)
                && cluster.kube_filters().successor_requirements(uid).is_none()
        };
        let cluster = state.cluster();
        // Not in a ledger that was discarded.
        let is_bound = cluster
            .ledger()
            .pod_state(uid)
            .is_some_and(|pod_state| matches!(pod_state.phase, PodPhase::Bound(_)));
        is_bound && !lacks_successor(&cluster)
    }

    /// Records the pod's current warning and counts it when it is new, not each time the watch shows the pod again.
    fn record_warning(&mut self, state: &ServerState, uid: &PodUid, warning: PodWarning) {
        let Some(code) = pod_warnings::code(warning) else {
            self.warnings.remove(uid);
            return;
        };
        if self.warnings.insert(uid.clone(), warning) != Some(warning) {
            state.metrics.pod_warnings.with_label_values(&[code]).inc();
        }
    }

    fn remove_node(&mut self, state: &ServerState, name: &NodeName) {
        state.cluster().apply(NodeDeleted(name.clone()));
        self.nodes.remove(name);
        self.changed_nodes.remove(name);
    }
}

/// Pods that wait without a reservation.
fn waiting_pods_in(ledger: &Ledger) -> Vec<(PodKey, PodUid)> {
    let waiting = ledger
        .pods_in_no_order()
        .filter(|(_, pod_state)| waits_without_reservation(pod_state));
    waiting
        .map(|(uid, pod_state)| (pod_state.key.clone(), uid.clone()))
        .collect()
}

fn waits_without_reservation(pod_state: &PodState) -> bool {
    matches!(pod_state.phase, PodPhase::Waiting(_)) && pod_state.reservation().is_none()
}

/// Result of applying a pod's present state to the ledger.
struct PodApplyOutcome {
    warning: PodWarning,
    is_in_ledger: bool,
    event: Option<PodEvent>,
    /// Its engine's start, if this observation completes it.
    start: Option<TimedStart>,
}

/// Applies the pod's state to the cluster under one lock. The object is parsed before, because filter requests wait for that lock.
fn observe_pod(
    state: &ServerState,
    pod: &Pod,
    uid: &PodUid,
    filter_observation: FilterPodObserved,
    progress: Option<StartProgress>,
) -> PodApplyOutcome {
    let reservation = recorded_reservation(state, pod);
    let has_reservation = reservation.is_some();
    let (policy, classify) = (state.policy(), |traits: &PodTraits| state.classify(traits));
    let observation =
        objects::classified_observation(pod, &policy, &classify, reservation, state.clock.wall());
    let mut cluster = state.cluster();
    cluster.apply(filter_observation);
    // Only a leader makes reservations, and knows them before their conditions are written: every other replica takes the pod's
    // condition as true.
    if !has_reservation
        && cluster.ledger().leader().is_none()
        && cluster
            .ledger()
            .pod_state(uid)
            .is_some_and(|entry| entry.reservation().is_some())
    {
        cluster.apply(ReservationGone(uid.clone()));
    }
    let warning = match observation {
        Some(observation) => cluster.apply(PodObserved(observation)),
        None => {
            // It is pending and was edited into an invalid request: its previous request is void.
            if cluster
                .ledger()
                .pod_state(uid)
                .is_some_and(|entry| matches!(entry.phase, PodPhase::Waiting(_)))
            {
                cluster.apply(PodReleased(uid.clone()));
            }
            PodWarning::Nothing
        }
    };
    let is_timed = |pod: &PodState| pod.start.as_ref().is_some_and(|start| start.took.is_none());
    let progress = progress.filter(|_| cluster.ledger().pod_state(uid).is_some_and(is_timed));
    let start = progress.and_then(|progress| {
        cluster.apply(EngineStartObserved {
            uid: uid.clone(),
            progress,
        })
    });
    PodApplyOutcome {
        warning,
        is_in_ledger: cluster.ledger().pod_state(uid).is_some(),
        event: pod_warnings::event(cluster.ledger(), uid, warning),
        start,
    }
}

/// Applies a pod that is a member of a group and needs no placement. All other pods change nothing here.
fn apply_placeless_member(state: &ServerState, uid: &PodUid, pod: &Pod) {
    let member = objects::member_without_placement(pod);
    let mut cluster = state.cluster();
    if member.is_some() || cluster.ledger().placeless_members().contains_key(uid) {
        cluster.apply(PlacelessMemberObserved {
            uid: uid.clone(),
            member,
        });
    }
}

/// The resourceVersion: two objects with the same UID and resourceVersion are equal.
fn resource_version(pod: &Pod) -> Option<u64> {
    pod.metadata.resource_version.as_ref()?.parse().ok()
}

fn recorded_reservation(state: &ServerState, pod: &Pod) -> Option<Reservation> {
    let ReservationMessage {
        node,
        devices,
        victims,
        deadline,
        ..
    } = ReservationMessage::read(pod)?;
    Some(Reservation {
        node,
        devices,
        victims,
        deadline: state.clock.to_moment(deadline),
    })
}

fn node_name(node: &Node) -> Option<NodeName> {
    NodeName::parse(node.metadata.name.as_deref()?).ok()
}

fn node_kind(node: &Node) -> NodeKind {
    match objects::resources(node).any(PluginResource::is_plugin_resource) {
        true => NodeKind::DevicePlugin,
        false => NodeKind::Stowage,
    }
}

fn advertised_vram(node: &Node) -> Option<Bytes> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    Bytes::parse_quantity(&capacity.get(objects::VRAM)?.0).ok()
}

#[cfg(test)]
mod event_cost_tests;
#[cfg(test)]
mod exclusive_tests;
#[cfg(test)]
mod node_signs_tests;
#[cfg(test)]
mod replaced_node_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod volume_tests;
