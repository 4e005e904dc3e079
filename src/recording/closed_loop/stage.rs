//! One loop: a cluster on the recorded clock, pods that come when they came, run for as long as they ran, and leave.
//!
//! What concerns no decision (nodes, GPUs, namespaces, budgets, pods without a GPU) comes in as it was recorded, at its time. A
//! pod that is evicted is gone after its grace period; one that has an owner comes back with what is left of its running time.

use super::demand::{BoundPodUpdate, RecordedBinding, RecordedDemand, RecordedPod};
use super::policies::LoopPolicy;
use super::reports::{RecordedLoads, Resident};
use super::tally::Tally;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_policy_file::windows::TimeZones;
use stowage_scheduling::control_loop::ControlLoop;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::kube_filters::NodeFootprint;
use stowage_scheduling::ledger::{
    LoadError, ObservedPhase, ObservedWaiting, PodObservation, PodState, SchedulingGate,
};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::{Digest, Policy};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::observe::{
    EngineStartObserved, FilterPod, FilterPodObserved, PodDeleted, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::tick::{ClockAdvanced, PolicySet};
use stowage_scheduling::verbs::{Cluster, ClusterState, Input};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::disruption_info::{ObservedDisruptionInfo, PodDeletion};
use stowage_scheduling::vocabulary::node_reading::NodeReading;

/// Interval between two rounds of the planner, one second as in the service.
pub const ROUND_INTERVAL: Millis = Millis::seconds(1);
/// Minimum interval between two samples of the VRAM figures, and the maximum number of samples but for the last.
const SAMPLE_INTERVAL_AND_COUNT: (Millis, u64) = (Millis::seconds(1), 400);
/// Interval between two checks of the policy windows: they open and close on the minute, so a second is close enough.
const WINDOW_CHECK_INTERVAL: Millis = Millis::seconds(1);
/// Delay until an owner has made a pod in the place of one that is gone.
const OWNER_DELAY: Millis = Millis::seconds(1);
/// A demand of no policy's version is classified when it is observed.
const UNCLASSIFIED: u64 = u64::MAX;

/// Event of a loop that follows from no recorded input.
#[derive(Debug)]
pub(super) enum LoopEvent {
    Arrives(PodUid),
    Gated(PodUid, SchedulingGate),
    /// kube-scheduler begins to schedule the pod.
    SchedulingStarts(PodUid),
    /// kube-scheduler binds it to the node that it was offered.
    Binds(PodUid, NodeName),
    /// A recorded update of the bound pod is observed, by index.
    Observed(PodUid, usize),
    /// It ends by itself.
    Ends(PodUid),
    /// Its grace period is over.
    GracePeriodEnds(PodUid),
    Round,
    Sample,
}

/// A pod of a loop.
#[derive(Debug)]
pub(super) struct LoopPod<'d> {
    /// UID of the recorded pod that it replays.
    pub recorded_uid: &'d PodUid,
    pub recorded: &'d RecordedPod,
    /// How often it has come back after an eviction.
    recreations: u32,
    /// When it began to wait; `None` before kube-scheduler, or the planner, sees it.
    pub waiting_since: Option<Moment>,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
    pub placement: Option<LoopPlacement>,
    is_terminating: bool,
    /// How long its predecessors ran, in milliseconds.
    ran_before: Millis,
}

#[derive(Debug)]
pub(super) struct LoopPlacement {
    pub since: Moment,
    pub node: NodeName,
    pub devices: Option<Arc<[GpuUuid]>>,
}

/// A loop that is being played.
#[derive(Debug)]
pub(crate) struct ClosedLoop<'d> {
    pub(super) control_loop: ControlLoop<Cluster>,
    pub tally: Tally,
    pub(super) pods: BTreeMap<PodUid, LoopPod<'d>>,
    pub(super) scores: ScoreCache,
    demand: &'d RecordedDemand,
    /// Median time from an eviction until the pod is gone.
    median_termination_time: Option<Millis>,
    policy_override: LoopPolicy,
    recorded_policy: Policy,
    zones: TimeZones,
    events: BTreeMap<(Moment, u64), LoopEvent>,
    event_count: u64,
    pods_by_node: BTreeMap<NodeName, BTreeSet<PodUid>>,
    /// When the windows of the policy are checked next.
    next_window_check: Moment,
}

impl<'d> ClosedLoop<'d> {
    /// A loop that begins in the state of the first checkpoint, at that time.
    pub fn begin(
        demand: &'d RecordedDemand,
        policy_override: LoopPolicy,
        state: ClusterState,
        at: Timestamp,
    ) -> Result<Self, LoadError> {
        let cluster = Cluster::load(state)?;
        let mut closed_loop = Self {
            recorded_policy: Policy::clone(cluster.ledger().policy()),
            control_loop: ControlLoop::with_known_refusals(cluster),
            tally: Tally::default(),
            pods: BTreeMap::new(),
            scores: ScoreCache::default(),
            demand,
            median_termination_time: demand.median_termination_time(),
            policy_override,
            zones: TimeZones::default(),
            events: BTreeMap::new(),
            event_count: 0,
            pods_by_node: BTreeMap::new(),
            next_window_check: Moment::default(),
        };
        closed_loop.apply_policy(at);
        let mut pods: Vec<_> = demand
            .pods
            .iter()
            .filter(|(_, pod)| !pod.is_replacement)
            .collect();
        // Of those that come within a millisecond, first the first.
        pods.sort_by_key(|(_, pod)| pod.number);
        pods.into_iter()
            .for_each(|(uid, pod)| closed_loop.add_recorded_pod(uid, pod));
        closed_loop.schedule_event(demand.began, LoopEvent::Sample);
        closed_loop.schedule_event(demand.began, LoopEvent::Round);
        Ok(closed_loop)
    }

    pub fn now(&self) -> Moment {
        self.control_loop.cluster_access.ledger().now()
    }

    /// Handles all events before `now`, each at its time. `at` is the wall time of `now`.
    pub fn advance(&mut self, now: Moment, at: Timestamp) {
        while let Some(first) = self
            .events
            .first_entry()
            .filter(|first| first.key().0 < now)
        {
            let ((when, _), event) = first.remove_entry();
            self.control_loop.cluster_access.apply(ClockAdvanced(
                when.max(self.control_loop.cluster_access.ledger().now()),
            ));
            self.handle(event);
        }
        self.control_loop.cluster_access.apply(ClockAdvanced(now));
        if self.policy_override.has_windows() && self.next_window_check <= now {
            self.next_window_check = now + WINDOW_CHECK_INTERVAL;
            self.apply_policy(at);
        }
    }

    /// The recording ends: the last sample is taken.
    pub fn finish(&mut self, at: Timestamp) {
        let now = self.now();
        self.advance(now + Millis(1), at);
        self.take_sample();
        let waiting = self
            .pods
            .values()
            .filter(|pod| pod.placement.is_none())
            .filter_map(|pod| pod.waiting_since);
        let waiting: Vec<Millis> = waiting.map(|came| now.since(came)).collect();
        self.tally.waits.extend(waiting);
    }

    fn take_sample(&mut self) {
        let waiting = self.waiting_pods();
        self.tally.sample(
            &self.control_loop.cluster_access,
            self.demand.began,
            waiting,
        );
    }

    /// The policy in force.
    pub fn policy(&self) -> Digest {
        self.control_loop.cluster_access.ledger().policy().digest
    }

    /// Pods that wait for a place.
    pub fn waiting_pods(&self) -> usize {
        self.pods
            .values()
            .filter(|pod| pod.placement.is_none() && pod.waiting_since.is_some())
            .count()
    }

    /// Applies a recorded input that follows from no decision as it is.
    pub fn apply_input(&mut self, input: &Input, at: Timestamp) {
        let is_independent = match input {
            Input::PolicySet(set) => {
                self.recorded_policy = set.policy.clone();
                return self.apply_policy(at);
            }
            Input::FilterPodObserved(observed) => !self.demand.pods.contains_key(&observed.uid),
            Input::PodDeleted(deleted) => !self.demand.pods.contains_key(&deleted.0),
            Input::NodeObserved(_)
            | Input::NodeDeleted(_)
            | Input::NodeImagesObserved(_)
            | Input::FreeHostKnown(_) => true,
            Input::NamespacesListed(_)
            | Input::NamespaceObserved(_)
            | Input::NamespaceDeleted(_) => true,
            Input::DevicesReported(_) | Input::SliceObserved(_) | Input::SliceDeleted(_) => true,
            Input::BudgetObserved(_) | Input::BudgetDeleted(_) | Input::BudgetsVisible(_) => true,
            Input::StorageObserved(_) | Input::StorageDeleted(_) => true,
            Input::LeadershipBegan(_) | Input::LeadershipEnded(_) => true,
            _ => false,
        };
        if is_independent {
            self.control_loop.cluster_access.apply(input.clone());
        }
    }

    /// Applies a report of a node, adapted to the pods that are there in this loop.
    pub fn apply_reading(
        &mut self,
        node: &NodeName,
        recorded: &NodeReading,
        loads: &RecordedLoads<'_>,
    ) {
        let here = self.pods_by_node.get(node).into_iter().flatten();
        let residents: Vec<Resident<'_>> = here
            .filter_map(|uid| {
                let (uid, pod) = self.pods.get_key_value(uid)?;
                let devices = pod
                    .placement
                    .as_ref()?
                    .devices
                    .as_deref()
                    .unwrap_or_default();
                Some(Resident {
                    uid,
                    recorded: pod.recorded_uid,
                    devices,
                })
            })
            .collect();
        let reading = loads.reading(self.now(), node, recorded, &residents);
        self.control_loop.cluster_access.apply(ReadingReported {
            node: node.clone(),
            reading: reading.into(),
        });
    }

    pub(super) fn schedule_event(&mut self, when: Moment, event: LoopEvent) {
        self.event_count += 1;
        self.events.insert((when, self.event_count), event);
    }

    fn apply_policy(&mut self, at: Timestamp) {
        let policy = self
            .policy_override
            .policy_at(&self.recorded_policy, &mut self.zones, at);
        let mut policy = policy.with_namespace_labels(&Default::default());
        policy.version = self.control_loop.cluster_access.ledger().policy().version;
        let current = Policy::clone(self.control_loop.cluster_access.ledger().policy())
            .with_namespace_labels(&Default::default());
        if policy != current {
            self.control_loop.cluster_access.apply(PolicySet {
                policy,
                prepared: None,
            });
        }
    }

    /// Adds a recorded pod and schedules what the recording says of it.
    fn add_recorded_pod(&mut self, uid: &'d PodUid, recorded: &'d RecordedPod) {
        let pod = LoopPod {
            recorded_uid: uid,
            recorded,
            recreations: 0,
            waiting_since: None,
            gate: recorded
                .gates
                .first()
                .map(|(_, gate)| *gate)
                .unwrap_or_default(),
            nominated: None,
            placement: None,
            is_terminating: false,
            ran_before: Millis::default(),
        };
        self.pods.insert(uid.clone(), pod);
        if let Some(RecordedBinding { node, devices, .. }) =
            recorded.initial_binding(self.demand.began).cloned()
        {
            if self
                .control_loop
                .cluster_access
                .ledger()
                .pod_state(uid)
                .is_some_and(PodState::is_assumed)
            {
                let (uid, node, devices) = (uid.clone(), node.clone(), devices.clone());
                self.control_loop
                    .cluster_access
                    .apply(BindingWritten { uid, node, devices });
            }
            return self.record_bound(uid, node, devices);
        }
        if recorded.is_foreign() {
            if recorded.bound.is_some() {
                self.schedule_event(recorded.arrived, LoopEvent::Arrives(uid.clone()));
            }
            return;
        }
        self.schedule_event(recorded.arrived, LoopEvent::Arrives(uid.clone()));
        for (when, gate) in recorded.gates.iter().skip(1) {
            self.schedule_event(*when, LoopEvent::Gated(uid.clone(), *gate));
        }
        // Of a pod that was asked about before the recording begins, the Binding is the first that shows.
        let scheduled_at = recorded
            .first_filtered
            .or(recorded.bound.as_ref().map(|bound| bound.at));
        if let Some(starts_at) = scheduled_at.filter(|_| {
            !recorded
                .gates
                .iter()
                .any(|(_, gate)| *gate == SchedulingGate::Planned)
        }) {
            self.schedule_event(starts_at, LoopEvent::SchedulingStarts(uid.clone()));
        }
        if let (None, Some(gone)) = (&recorded.bound, recorded.gone_at) {
            self.schedule_event(gone, LoopEvent::Ends(uid.clone()));
        }
    }

    fn handle(&mut self, event: LoopEvent) {
        match event {
            LoopEvent::Arrives(uid) => self.arrive(&uid),
            LoopEvent::Gated(uid, gate) => {
                self.pods
                    .get_mut(&uid)
                    .into_iter()
                    .for_each(|pod| pod.gate = gate);
                self.observe_waiting(&uid);
            }
            LoopEvent::SchedulingStarts(uid) => self.schedule(&uid),
            LoopEvent::Binds(uid, node) => self.bind_or_requeue(&uid, &node),
            LoopEvent::Observed(uid, update) => self.replay_update(&uid, update),
            LoopEvent::Ends(uid) | LoopEvent::GracePeriodEnds(uid) => self.remove_pod(&uid),
            LoopEvent::Round => {
                self.round();
                self.schedule_event(self.now() + ROUND_INTERVAL, LoopEvent::Round);
            }
            LoopEvent::Sample => {
                self.take_sample();
                let apart = Millis(
                    self.demand
                        .ended
                        .since(self.demand.began)
                        .0
                        .div_ceil(SAMPLE_INTERVAL_AND_COUNT.1),
                );
                self.schedule_event(
                    self.now() + apart.max(SAMPLE_INTERVAL_AND_COUNT.0),
                    LoopEvent::Sample,
                );
            }
        }
    }

    fn arrive(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let is_foreign = pod.recorded.is_foreign() && pod.recreations == 0;
        if let Some(bound) = pod.recorded.bound.as_ref().filter(|_| is_foreign) {
            let (node, devices) = (bound.node.clone(), bound.devices.clone());
            return self.record_bound(uid, node, devices);
        }
        if let Some(wants) = pod
            .recorded
            .requirements
            .clone()
            .or(pod.recorded.successor.clone())
        {
            self.control_loop.cluster_access.apply(FilterPodObserved {
                uid: uid.clone(),
                pod: FilterPod::Waiting(wants),
            });
        }
        if pod.recorded.is_initial && pod.recreations == 0 {
            self.record_arrival(uid);
        } else {
            self.observe_waiting(uid);
        }
    }

    /// Feeds the waiting pod to the ledger as the watch would.
    pub(super) fn observe_waiting(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid).filter(|pod| pod.placement.is_none()) else {
            return;
        };
        let reservation = self
            .control_loop
            .cluster_access
            .ledger()
            .reservation_status_of(uid)
            .map(|status| status.reservation);
        let waiting = ObservedWaiting {
            reservation,
            gate: pod.gate,
            nominated: pod.nominated.clone(),
        };
        let observation = self.observation(uid, pod, ObservedPhase::Waiting(waiting));
        self.control_loop
            .cluster_access
            .apply(PodObserved(observation));
        if is_planned(&self.pods[uid]) {
            self.record_arrival(uid);
        }
    }

    /// The pod may be placed from here on.
    pub(super) fn record_arrival(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod.waiting_since.get_or_insert(now);
        let tally = self.tally.pods.entry(pod.recorded_uid.clone()).or_default();
        tally.arrived_at.get_or_insert(now);
    }

    /// The pod is bound there.
    pub(super) fn record_bound(
        &mut self,
        uid: &PodUid,
        node: NodeName,
        devices: Option<Arc<[GpuUuid]>>,
    ) {
        let now = self.now();
        self.pods_by_node
            .entry(node.clone())
            .or_default()
            .insert(uid.clone());
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod.placement = Some(LoopPlacement {
            since: now,
            node,
            devices,
        });
        let (recorded, root, ran_before, returns) = (
            pod.recorded,
            pod.recorded_uid,
            pod.ran_before,
            pod.recreations,
        );
        if let Some(came) = pod.waiting_since {
            self.tally.waits.push(now.since(came));
        }
        let is_starting = recorded.has_engine_start();
        // What the first checkpoint has is shown already.
        if returns > 0 || recorded.initial_binding(self.demand.began).is_none() {
            self.observe_bound(uid, is_starting, None);
        }
        // What it showed after its Binding it shows again, as long after this one.
        let bound = recorded.bound.as_ref().map(|bound| bound.at);
        let last_update = if recorded.was_evicted {
            recorded.gone_at
        } else {
            None
        };
        for (index, (when, _)) in recorded.updates.iter().enumerate() {
            if let Some(bound) =
                bound.filter(|_| returns == 0 && last_update.is_none_or(|last| *when < last))
            {
                self.schedule_event(
                    now + when.since(bound),
                    LoopEvent::Observed(uid.clone(), index),
                );
            }
        }
        if let Some(work) = self.demand.total_runtime(root) {
            let left = Millis(work.0.saturating_sub(ran_before.0));
            self.schedule_event(now + left, LoopEvent::Ends(uid.clone()));
        }
    }

    /// Feeds the bound pod to the ledger as the watch would.
    fn observe_bound(&mut self, uid: &PodUid, is_starting: bool, leaving: Option<PodDeletion>) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let Some(placement) = &pod.placement else {
            return;
        };
        let state = ObservedPhase::Bound {
            node: placement.node.clone(),
            devices: placement.devices.clone(),
            starting: is_starting,
            ran: Some(self.now().since(placement.since)),
        };
        let mut observation = self.observation(uid, pod, state);
        let borrows = self
            .control_loop
            .cluster_access
            .ledger()
            .pod_state(uid)
            .is_some_and(|state| state.borrows());
        if let Some(observed) = &mut observation.observed {
            (observed.leaving, observed.loan.borrows) = (leaving, borrows);
        }
        let footprint = pod
            .recorded
            .footprint
            .clone()
            .map(|footprint| NodeFootprint {
                node: placement.node.clone(),
                ..footprint
            });
        let successor = pod
            .recorded
            .successor
            .clone()
            .or(pod.recorded.requirements.clone());
        if let Some(footprint) = footprint {
            let pod = FilterPod::Bound {
                footprint,
                successor,
            };
            self.control_loop.cluster_access.apply(FilterPodObserved {
                uid: uid.clone(),
                pod,
            });
        }
        self.control_loop
            .cluster_access
            .apply(PodObserved(observation));
    }

    fn replay_update(&mut self, uid: &PodUid, index: usize) {
        let Some(pod) = self
            .pods
            .get(uid)
            .filter(|pod| !pod.is_terminating && pod.placement.is_some())
        else {
            return;
        };
        match &pod.recorded.updates[index].1 {
            BoundPodUpdate::Start(progress) => {
                self.control_loop.cluster_access.apply(EngineStartObserved {
                    uid: uid.clone(),
                    progress: *progress,
                });
            }
            BoundPodUpdate::Pod {
                is_starting,
                disruption,
                ..
            } => {
                let Some(LoopPlacement {
                    node,
                    devices,
                    since,
                }) = &pod.placement
                else {
                    return;
                };
                let state = ObservedPhase::Bound {
                    node: node.clone(),
                    devices: devices.clone(),
                    starting: *is_starting,
                    ran: Some(self.now().since(*since)),
                };
                let mut observation = self.observation(uid, pod, state);
                let mut observed = (**disruption).clone();
                observed.loan.borrows = self
                    .control_loop
                    .cluster_access
                    .ledger()
                    .pod_state(uid)
                    .is_some_and(|state| state.borrows());
                observation.observed = Some(observed);
                self.control_loop
                    .cluster_access
                    .apply(PodObserved(observation));
            }
        }
    }

    fn observation(&self, uid: &PodUid, pod: &LoopPod<'_>, state: ObservedPhase) -> PodObservation {
        let RecordedPod {
            key,
            demand,
            disruption,
            ..
        } = pod.recorded;
        let observed = ObservedDisruptionInfo {
            disruption_info: disruption.disruption_info.clone(),
            ..ObservedDisruptionInfo::default()
        };
        let demand = Demand {
            classified_by: UNCLASSIFIED,
            ..demand.clone()
        };
        PodObservation {
            uid: uid.clone(),
            key: key.clone(),
            demand,
            state,
            observed: Some(observed),
        }
    }

    /// The pod is being deleted; it is gone after its grace period.
    pub(super) fn terminate(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self
            .pods
            .get_mut(uid)
            .filter(|pod| !pod.is_terminating && pod.placement.is_some())
        else {
            return;
        };
        pod.is_terminating = true;
        let grace = pod.recorded.grace;
        // Most are gone long before their grace period is over.
        let termination_time = pod
            .recorded
            .termination_time()
            .filter(|_| pod.recorded.was_evicted)
            .or(self.median_termination_time);
        self.tally
            .pods
            .entry(pod.recorded_uid.clone())
            .or_default()
            .evictions += 1;
        self.tally.evictions += 1;
        self.observe_bound(
            uid,
            false,
            Some(PodDeletion {
                asked_ago: Millis::default(),
                grace,
            }),
        );
        self.schedule_event(
            now + termination_time.unwrap_or(grace).min(grace),
            LoopEvent::GracePeriodEnds(uid.clone()),
        );
    }

    /// The pod is gone. One that was evicted comes back, if it has an owner.
    fn remove_pod(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        self.control_loop
            .cluster_access
            .apply(PodDeleted(uid.clone()));
        let Some(placement) = pod.placement else {
            return;
        };
        self.pods_by_node
            .get_mut(&placement.node)
            .into_iter()
            .for_each(|here| _ = here.remove(uid));
        let ran_before = pod.ran_before + now.since(placement.since);
        let is_finished = self
            .demand
            .total_runtime(pod.recorded_uid)
            .is_some_and(|work| work <= ran_before);
        if !pod.is_terminating
            || is_finished
            || pod.recorded.disruption.disruption_info.owner.is_none()
        {
            return;
        }
        let returns = pod.recreations + 1;
        let next = PodUid::parse(&format!("{}-{returns}", pod.recorded_uid))
            .unwrap_or_else(|_| pod.recorded_uid.clone());
        let gate = pod
            .recorded
            .gates
            .first()
            .map(|(_, gate)| *gate)
            .unwrap_or_default();
        let (came, is_leaving) = (None, false);
        self.pods.insert(
            next.clone(),
            LoopPod {
                recreations: returns,
                waiting_since: came,
                gate,
                nominated: None,
                placement: None,
                is_terminating: is_leaving,
                ran_before,
                ..pod
            },
        );
        self.tally.returned += 1;
        self.schedule_event(now + OWNER_DELAY, LoopEvent::Arrives(next.clone()));
        if gate != SchedulingGate::Planned {
            self.schedule_event(now + OWNER_DELAY, LoopEvent::SchedulingStarts(next));
        }
    }
}

fn is_planned(pod: &LoopPod<'_>) -> bool {
    pod.gate == SchedulingGate::Planned
}
