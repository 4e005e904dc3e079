//! One loop: a cluster on the recorded clock, pods that come when they came, run for as long as they ran, and leave.
//!
//! What concerns no decision (nodes, GPUs, namespaces, budgets, pods without a GPU) comes in as it was recorded, at its time. A
//! pod that is evicted is gone after its grace period; one that has an owner comes back with what is left of its running time.

use super::demand::{RecordedBinding, RecordedDemand, RecordedPod, Show};
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
pub const ROUND: Millis = Millis::seconds(1);
/// Minimum interval between two samples of the VRAM figures, and the maximum number of samples but for the last.
const SAMPLES: (Millis, u64) = (Millis::seconds(1), 400);
/// Interval between two checks of the policy windows: they open and close on the minute, so a second is close enough.
const WINDOWS: Millis = Millis::seconds(1);
/// Delay until an owner has made a pod in the place of one that is gone.
const OWNER_DELAY: Millis = Millis::seconds(1);
/// A demand of no policy's version is classified when it is observed.
const UNCLASSIFIED: u64 = u64::MAX;

/// Event of a loop that follows from no recorded input.
#[derive(Debug)]
pub(super) enum Event {
    Arrives(PodUid),
    Gated(PodUid, SchedulingGate),
    /// kube-scheduler begins to schedule the pod.
    Asks(PodUid),
    /// kube-scheduler binds it to the node that it was offered.
    Binds(PodUid, NodeName),
    /// A recorded update of the bound pod is observed, by index.
    Shows(PodUid, usize),
    /// It ends by itself.
    Ends(PodUid),
    /// Its grace period is over.
    Leaves(PodUid),
    Round,
    Sample,
}

/// A pod of a loop.
#[derive(Debug)]
pub(super) struct LoopPod<'d> {
    /// UID of the recorded pod that it replays.
    pub root: &'d PodUid,
    pub recorded: &'d RecordedPod,
    /// How often it has come back after an eviction.
    returns: u32,
    /// When it began to wait; `None` before kube-scheduler, or the planner, sees it.
    pub came: Option<Moment>,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
    pub place: Option<LoopPlace>,
    is_leaving: bool,
    /// How long its predecessors ran, in milliseconds.
    ran_before: Millis,
}

#[derive(Debug)]
pub(super) struct LoopPlace {
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
    usual_leave: Option<Millis>,
    rule: LoopPolicy,
    recorded_policy: Policy,
    zones: TimeZones,
    events: BTreeMap<(Moment, u64), Event>,
    numbered: u64,
    on_node: BTreeMap<NodeName, BTreeSet<PodUid>>,
    /// When the windows of the policy are checked next.
    windows_at: Moment,
}

impl<'d> ClosedLoop<'d> {
    /// A loop that begins in the state of the first checkpoint, at that time.
    pub fn begin(
        demand: &'d RecordedDemand,
        rule: LoopPolicy,
        state: ClusterState,
        at: Timestamp,
    ) -> Result<Self, LoadError> {
        let cluster = Cluster::load(state)?;
        let mut closed_loop = Self {
            recorded_policy: Policy::clone(cluster.ledger().policy()),
            control_loop: ControlLoop::going_on(cluster),
            tally: Tally::default(),
            pods: BTreeMap::new(),
            scores: ScoreCache::default(),
            demand,
            usual_leave: demand.usual_leave(),
            rule,
            zones: TimeZones::default(),
            events: BTreeMap::new(),
            numbered: 0,
            on_node: BTreeMap::new(),
            windows_at: Moment::default(),
        };
        closed_loop.come_under(at);
        let mut pods: Vec<_> = demand
            .pods
            .iter()
            .filter(|(_, pod)| !pod.is_replacement)
            .collect();
        // Of those that come within a millisecond, first the first.
        pods.sort_by_key(|(_, pod)| pod.number);
        pods.into_iter()
            .for_each(|(uid, pod)| closed_loop.expect(uid, pod));
        closed_loop.at(demand.began, Event::Sample);
        closed_loop.at(demand.began, Event::Round);
        Ok(closed_loop)
    }

    pub fn now(&self) -> Moment {
        self.control_loop.books.ledger().now()
    }

    /// Handles all events before `now`, each at its time. `at` is the wall time of `now`.
    pub fn advance(&mut self, now: Moment, at: Timestamp) {
        while let Some(first) = self
            .events
            .first_entry()
            .filter(|first| first.key().0 < now)
        {
            let ((when, _), event) = first.remove_entry();
            self.control_loop.books.apply(ClockAdvanced(
                when.max(self.control_loop.books.ledger().now()),
            ));
            self.happen(event);
        }
        self.control_loop.books.apply(ClockAdvanced(now));
        if self.rule.has_windows() && self.windows_at <= now {
            self.windows_at = now + WINDOWS;
            self.come_under(at);
        }
    }

    /// The recording ends: the last sample is taken.
    pub fn end(&mut self, at: Timestamp) {
        let now = self.now();
        self.advance(now + Millis(1), at);
        self.sample();
        let waiting = self
            .pods
            .values()
            .filter(|pod| pod.place.is_none())
            .filter_map(|pod| pod.came);
        let waiting: Vec<Millis> = waiting.map(|came| now.since(came)).collect();
        self.tally.waits.extend(waiting);
    }

    fn sample(&mut self) {
        let waiting = self.waiting();
        self.tally
            .sample(&self.control_loop.books, self.demand.began, waiting);
    }

    /// The policy in force.
    pub fn policy(&self) -> Digest {
        self.control_loop.books.ledger().policy().digest
    }

    /// Pods that wait for a place.
    pub fn waiting(&self) -> usize {
        self.pods
            .values()
            .filter(|pod| pod.place.is_none() && pod.came.is_some())
            .count()
    }

    /// Applies a recorded input that follows from no decision as it is.
    pub fn input(&mut self, input: &Input, at: Timestamp) {
        let is_worlds = match input {
            Input::PolicySet(set) => {
                self.recorded_policy = set.policy.clone();
                return self.come_under(at);
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
        if is_worlds {
            self.control_loop.books.apply(input.clone());
        }
    }

    /// Applies a report of a node, adapted to the pods that are there in this loop.
    pub fn read(&mut self, node: &NodeName, recorded: &NodeReading, loads: &RecordedLoads<'_>) {
        let here = self.on_node.get(node).into_iter().flatten();
        let residents: Vec<Resident<'_>> = here
            .filter_map(|uid| {
                let (uid, pod) = self.pods.get_key_value(uid)?;
                let devices = pod.place.as_ref()?.devices.as_deref().unwrap_or_default();
                Some(Resident {
                    uid,
                    recorded: pod.root,
                    devices,
                })
            })
            .collect();
        let reading = loads.reading(self.now(), node, recorded, &residents);
        self.control_loop.books.apply(ReadingReported {
            node: node.clone(),
            reading: reading.into(),
        });
    }

    pub(super) fn at(&mut self, when: Moment, event: Event) {
        self.numbered += 1;
        self.events.insert((when, self.numbered), event);
    }

    fn come_under(&mut self, at: Timestamp) {
        let policy = self.rule.when(&self.recorded_policy, &mut self.zones, at);
        let mut policy = policy.with_namespaces(&Default::default());
        policy.version = self.control_loop.books.ledger().policy().version;
        let known = Policy::clone(self.control_loop.books.ledger().policy())
            .with_namespaces(&Default::default());
        if policy != known {
            self.control_loop.books.apply(PolicySet {
                policy,
                prepared: None,
            });
        }
    }

    /// Adds a recorded pod and schedules what the recording says of it.
    fn expect(&mut self, uid: &'d PodUid, recorded: &'d RecordedPod) {
        let pod = LoopPod {
            root: uid,
            recorded,
            returns: 0,
            came: None,
            gate: recorded
                .gates
                .first()
                .map(|(_, gate)| *gate)
                .unwrap_or_default(),
            nominated: None,
            place: None,
            is_leaving: false,
            ran_before: Millis::default(),
        };
        self.pods.insert(uid.clone(), pod);
        if let Some(RecordedBinding { node, devices, .. }) =
            recorded.initial_place(self.demand.began).cloned()
        {
            if self
                .control_loop
                .books
                .ledger()
                .pod_state(uid)
                .is_some_and(PodState::is_assumed)
            {
                let (uid, node, devices) = (uid.clone(), node.clone(), devices.clone());
                self.control_loop
                    .books
                    .apply(BindingWritten { uid, node, devices });
            }
            return self.settle(uid, node, devices);
        }
        if recorded.is_foreign() {
            if recorded.bound.is_some() {
                self.at(recorded.arrived, Event::Arrives(uid.clone()));
            }
            return;
        }
        self.at(recorded.arrived, Event::Arrives(uid.clone()));
        for (when, gate) in recorded.gates.iter().skip(1) {
            self.at(*when, Event::Gated(uid.clone(), *gate));
        }
        // Of a pod that was asked about before the recording begins, the Binding is the first that shows.
        let asked = recorded
            .asked
            .or(recorded.bound.as_ref().map(|bound| bound.at));
        if let Some(asked) = asked.filter(|_| {
            !recorded
                .gates
                .iter()
                .any(|(_, gate)| *gate == SchedulingGate::Planned)
        }) {
            self.at(asked, Event::Asks(uid.clone()));
        }
        if let (None, Some(gone)) = (&recorded.bound, recorded.gone) {
            self.at(gone, Event::Ends(uid.clone()));
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrives(uid) => self.arrive(&uid),
            Event::Gated(uid, gate) => {
                self.pods
                    .get_mut(&uid)
                    .into_iter()
                    .for_each(|pod| pod.gate = gate);
                self.show_waiting(&uid);
            }
            Event::Asks(uid) => self.ask(&uid),
            Event::Binds(uid, node) => self.take_offer(&uid, &node),
            Event::Shows(uid, place) => self.show(&uid, place),
            Event::Ends(uid) | Event::Leaves(uid) => self.remove(&uid),
            Event::Round => {
                self.round();
                self.at(self.now() + ROUND, Event::Round);
            }
            Event::Sample => {
                self.sample();
                let apart = Millis(
                    self.demand
                        .ended
                        .since(self.demand.began)
                        .0
                        .div_ceil(SAMPLES.1),
                );
                self.at(self.now() + apart.max(SAMPLES.0), Event::Sample);
            }
        }
    }

    fn arrive(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let is_foreign = pod.recorded.is_foreign() && pod.returns == 0;
        if let Some(bound) = pod.recorded.bound.as_ref().filter(|_| is_foreign) {
            let (node, devices) = (bound.node.clone(), bound.devices.clone());
            return self.settle(uid, node, devices);
        }
        if let Some(wants) = pod
            .recorded
            .wants
            .clone()
            .or(pod.recorded.successor.clone())
        {
            self.control_loop.books.apply(FilterPodObserved {
                uid: uid.clone(),
                pod: FilterPod::Waiting(wants),
            });
        }
        if pod.recorded.is_known && pod.returns == 0 {
            self.note_came(uid);
        } else {
            self.show_waiting(uid);
        }
    }

    /// Feeds the waiting pod to the ledger as the watch would.
    pub(super) fn show_waiting(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid).filter(|pod| pod.place.is_none()) else {
            return;
        };
        let reservation = self
            .control_loop
            .books
            .ledger()
            .reservation_of(uid)
            .map(|status| status.reservation);
        let waiting = ObservedWaiting {
            reservation,
            gate: pod.gate,
            nominated: pod.nominated.clone(),
        };
        let observation = self.observation(uid, pod, ObservedPhase::Waiting(waiting));
        self.control_loop.books.apply(PodObserved(observation));
        if pod_is_planned(&self.pods[uid]) {
            self.note_came(uid);
        }
    }

    /// The pod may be placed from here on.
    pub(super) fn note_came(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod.came.get_or_insert(now);
        let tally = self.tally.pods.entry(pod.root.clone()).or_default();
        tally.came.get_or_insert(now);
    }

    /// The pod is bound there.
    pub(super) fn settle(&mut self, uid: &PodUid, node: NodeName, devices: Option<Arc<[GpuUuid]>>) {
        let now = self.now();
        self.on_node
            .entry(node.clone())
            .or_default()
            .insert(uid.clone());
        let Some(pod) = self.pods.get_mut(uid) else {
            return;
        };
        pod.place = Some(LoopPlace {
            since: now,
            node,
            devices,
        });
        let (recorded, root, ran_before, returns) =
            (pod.recorded, pod.root, pod.ran_before, pod.returns);
        if let Some(came) = pod.came {
            self.tally.waits.push(now.since(came));
        }
        let is_starting = recorded.starts();
        // What the first checkpoint has is shown already.
        if returns > 0 || recorded.initial_place(self.demand.began).is_none() {
            self.show_bound(uid, is_starting, None);
        }
        // What it showed after its Binding it shows again, as long after this one.
        let bound = recorded.bound.as_ref().map(|bound| bound.at);
        let last = if recorded.was_evicted {
            recorded.gone
        } else {
            None
        };
        for (place, (when, _)) in recorded.shows.iter().enumerate() {
            if let Some(bound) =
                bound.filter(|_| returns == 0 && last.is_none_or(|last| *when < last))
            {
                self.at(now + when.since(bound), Event::Shows(uid.clone(), place));
            }
        }
        if let Some(work) = self.demand.work(root) {
            let left = Millis(work.0.saturating_sub(ran_before.0));
            self.at(now + left, Event::Ends(uid.clone()));
        }
    }

    /// Feeds the bound pod to the ledger as the watch would.
    fn show_bound(&mut self, uid: &PodUid, is_starting: bool, leaving: Option<PodDeletion>) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let Some(place) = &pod.place else { return };
        let state = ObservedPhase::Bound {
            node: place.node.clone(),
            devices: place.devices.clone(),
            starting: is_starting,
            ran: Some(self.now().since(place.since)),
        };
        let mut observation = self.observation(uid, pod, state);
        let borrows = self
            .control_loop
            .books
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
                node: place.node.clone(),
                ..footprint
            });
        let successor = pod
            .recorded
            .successor
            .clone()
            .or(pod.recorded.wants.clone());
        if let Some(footprint) = footprint {
            let pod = FilterPod::Bound {
                footprint,
                successor,
            };
            self.control_loop.books.apply(FilterPodObserved {
                uid: uid.clone(),
                pod,
            });
        }
        self.control_loop.books.apply(PodObserved(observation));
    }

    fn show(&mut self, uid: &PodUid, place: usize) {
        let Some(pod) = self
            .pods
            .get(uid)
            .filter(|pod| !pod.is_leaving && pod.place.is_some())
        else {
            return;
        };
        match &pod.recorded.shows[place].1 {
            Show::Start(progress) => {
                self.control_loop.books.apply(EngineStartObserved {
                    uid: uid.clone(),
                    progress: *progress,
                });
            }
            Show::Pod {
                is_starting,
                disruption,
                ..
            } => {
                let Some(LoopPlace {
                    node,
                    devices,
                    since,
                }) = &pod.place
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
                    .books
                    .ledger()
                    .pod_state(uid)
                    .is_some_and(|state| state.borrows());
                observation.observed = Some(observed);
                self.control_loop.books.apply(PodObserved(observation));
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
    pub(super) fn leave(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self
            .pods
            .get_mut(uid)
            .filter(|pod| !pod.is_leaving && pod.place.is_some())
        else {
            return;
        };
        pod.is_leaving = true;
        let grace = pod.recorded.grace;
        // Most are gone long before their grace period is over.
        let took = pod
            .recorded
            .took_to_leave()
            .filter(|_| pod.recorded.was_evicted)
            .or(self.usual_leave);
        self.tally
            .pods
            .entry(pod.root.clone())
            .or_default()
            .evictions += 1;
        self.tally.evictions += 1;
        self.show_bound(
            uid,
            false,
            Some(PodDeletion {
                asked_ago: Millis::default(),
                grace,
            }),
        );
        self.at(
            now + took.unwrap_or(grace).min(grace),
            Event::Leaves(uid.clone()),
        );
    }

    /// The pod is gone. One that was evicted comes back, if it has an owner.
    fn remove(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        self.control_loop.books.apply(PodDeleted(uid.clone()));
        let Some(place) = pod.place else { return };
        self.on_node
            .get_mut(&place.node)
            .into_iter()
            .for_each(|here| _ = here.remove(uid));
        let ran_before = pod.ran_before + now.since(place.since);
        let is_over = self
            .demand
            .work(pod.root)
            .is_some_and(|work| work <= ran_before);
        if !pod.is_leaving || is_over || pod.recorded.disruption.disruption_info.owner.is_none() {
            return;
        }
        let returns = pod.returns + 1;
        let next =
            PodUid::parse(&format!("{}-{returns}", pod.root)).unwrap_or_else(|_| pod.root.clone());
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
                returns,
                came,
                gate,
                nominated: None,
                place: None,
                is_leaving,
                ran_before,
                ..pod
            },
        );
        self.tally.returned += 1;
        self.at(now + OWNER_DELAY, Event::Arrives(next.clone()));
        if gate != SchedulingGate::Planned {
            self.at(now + OWNER_DELAY, Event::Asks(next));
        }
    }
}

fn pod_is_planned(pod: &LoopPod<'_>) -> bool {
    pod.gate == SchedulingGate::Planned
}
