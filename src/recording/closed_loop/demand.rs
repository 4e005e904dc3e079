//! What a recording says was asked of the cluster, whatever was answered: pods with their requests, when they came, for how long
//! they ran, and what they showed while they did.

use crate::entry::{Checkpoint, Entry, NumberedInput};
use crate::read::RecordingPart;
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, OwnerUid, PodKey, PodUid};
use stowage_scheduling::kube_filters::{NodeFootprint, Requirements};
use stowage_scheduling::ledger::{
    LoadError, ObservedPhase, PodObservation, PodPhase, PodState, SchedulingGate, StartProgress,
};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::binding::{BindingAnswer, PodRead};
use stowage_scheduling::verbs::observe::{FilterPod, FilterPodObserved};
use stowage_scheduling::verbs::{Cluster, Input};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::disruption_info::{
    Checkpoint as Saved, ObservedDisruptionInfo,
};

/// Every pod that asks for GPUs, over the whole recording.
#[derive(Debug, Default)]
pub struct RecordedDemand {
    pub pods: BTreeMap<PodUid, RecordedPod>,
    /// The recorded clock at the first checkpoint.
    pub began: Moment,
    pub ended: Moment,
    /// The demand stops at a gap: what came after it is not compared.
    pub stops_at_gap: bool,
    has_begun: bool,
    /// The number of the next input.
    next: u64,
    /// Pods that were evicted and not replaced yet, by their owners.
    unreplaced: BTreeMap<OwnerUid, Vec<PodUid>>,
    /// Filter observation of a pod that is not recorded yet: if it requests GPUs, the next input shows the pod. Other pods are not in
    /// the ledger and are played as recorded.
    unmatched_filter_pod: Option<FilterPodObserved>,
}

/// One pod, as the recording shows it.
#[derive(Debug)]
pub struct RecordedPod {
    pub key: PodKey,
    pub demand: Demand,
    /// Whether it is in the first checkpoint.
    pub is_initial: bool,
    pub arrived: Moment,
    /// Scheduling gates, each with the moment from which it held the pod back.
    pub gates: Vec<(Moment, SchedulingGate)>,
    /// First filter request for the pod; the next field is the last one before it was bound.
    pub first_filtered: Option<Moment>,
    last_filtered: Moment,
    /// The number of the input that showed it first.
    pub number: u64,
    /// Requirements that kube-scheduler's filters check; `None` if no watch showed them.
    pub requirements: Option<Requirements>,
    pub footprint: Option<NodeFootprint>,
    pub successor: Option<Requirements>,
    pub disruption: ObservedDisruptionInfo,
    pub grace: Millis,
    pub bound: Option<RecordedBinding>,
    /// Updates observed once it was bound.
    pub updates: Vec<(Moment, BoundPodUpdate)>,
    pub was_evicted: bool,
    /// When its deletion was first observed.
    deletion_observed: Option<Moment>,
    pub gone_at: Option<Moment>,
    /// Pod that its owner made in its place after an eviction; `is_replacement` marks that pod.
    pub replaced_by: Option<PodUid>,
    pub is_replacement: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedBinding {
    pub at: Moment,
    pub node: NodeName,
    pub devices: Option<Arc<[GpuUuid]>>,
}

/// Update of a bound pod.
#[derive(Debug)]
pub enum BoundPodUpdate {
    Pod {
        is_starting: bool,
        disruption: Box<ObservedDisruptionInfo>,
        saved: Saved,
    },
    Start(StartProgress),
}

impl RecordedDemand {
    /// Takes in the next part. Returns whether the recording continues without a gap.
    pub fn step(&mut self, part: &RecordingPart) -> Result<bool, LoadError> {
        match part {
            RecordingPart::Entry(Entry::Checkpoint(checkpoint)) if !self.has_begun => {
                self.begin(checkpoint)?
            }
            RecordingPart::Entry(Entry::Checkpoint(checkpoint))
                if !checkpoint.continues(self.next) =>
            {
                self.stops_at_gap = true;
                return Ok(false);
            }
            RecordingPart::Entry(Entry::Clock(now)) if self.has_begun => self.ended = *now,
            RecordingPart::Entry(Entry::Input(numbered)) if self.has_begun => {
                self.apply_input(numbered)
            }
            _ => {}
        }
        Ok(true)
    }

    /// Whether there was a checkpoint to begin at.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    fn begin(&mut self, checkpoint: &Checkpoint) -> Result<(), LoadError> {
        let now = checkpoint.state.now();
        self.next = checkpoint.next;
        (self.has_begun, self.began, self.ended) = (true, now, now);
        let cluster = Cluster::load(checkpoint.state.clone())?;
        let filters = cluster.kube_filters().snapshot();
        for (uid, state) in cluster.ledger().pod_states() {
            let mut pod = RecordedPod {
                is_initial: true,
                ..RecordedPod::new(&state.key, &state.demand, now)
            };
            pod.requirements = filters
                .requirements_of(uid)
                .or_else(|| filters.successor_requirements(uid))
                .map(|wants| (**wants).clone());
            pod.disruption.disruption_info = (*state.disruption_info).clone();
            pod.bound = binding(state, now);
            if let PodPhase::Waiting(waiting) = &state.phase {
                pod.gates.push((now, waiting.gate));
            }
            self.pods.insert(uid.clone(), pod);
        }
        Ok(())
    }

    fn apply_input(&mut self, NumberedInput { number, input }: &NumberedInput) {
        let now = self.ended;
        self.next = number + 1;
        match input {
            Input::PodObserved(observed) => self.observe(&observed.0, *number),
            Input::FilterPodObserved(observed) => self.observe_filters(observed),
            Input::FilterAsked(query) => {
                let request = &query.0;
                let entry = self.pods.entry(request.uid.clone());
                let new = || RecordedPod {
                    number: *number,
                    ..RecordedPod::new(&request.key, &request.demand, now)
                };
                let pod = entry.or_insert_with(new);
                pod.first_filtered.get_or_insert(now);
                if pod.bound.is_none() {
                    pod.last_filtered = now;
                }
            }
            Input::BindingAnswered(answered) if answered.answer == BindingAnswer::Written => {
                let placement = &answered.placement;
                self.record_bound(&answered.uid, &placement.node, placement.recorded_gpus());
            }
            Input::BindingRead(read) => {
                if let PodRead::Bound { node, devices, .. } = &read.pod {
                    self.record_bound(&read.uid, node, devices.clone());
                }
            }
            Input::EngineStartObserved(start) => {
                if let Some(pod) = self
                    .pods
                    .get_mut(&start.uid)
                    .filter(|pod| pod.bound.is_some())
                {
                    pod.updates
                        .push((now, BoundPodUpdate::Start(start.progress)));
                }
            }
            Input::PodEvicted(evicted) => self.record_evicted(&evicted.0),
            Input::PreemptDecided(decided) => {
                let victims = &decided.victims;
                victims
                    .victims
                    .iter()
                    .chain(&victims.elsewhere)
                    .for_each(|victim| self.record_evicted(victim));
            }
            Input::PodDeleted(deleted) => self.record_gone(&deleted.0),
            Input::PodReleased(released) => self.record_gone(&released.0),
            _ => {}
        }
    }

    fn observe(&mut self, observation: &PodObservation, number: u64) {
        let now = self.ended;
        let PodObservation {
            uid,
            key,
            demand,
            state,
            observed,
        } = observation;
        if !self.pods.contains_key(uid) {
            self.pods.insert(
                uid.clone(),
                RecordedPod {
                    number,
                    ..RecordedPod::new(key, demand, now)
                },
            );
            if let Some(first) = self
                .unmatched_filter_pod
                .take()
                .filter(|first| first.uid == *uid)
            {
                self.observe_filters(&first);
            }
        }
        let pod = self.pods.get_mut(uid).expect("it is there by now");
        if let Some(leaving) = observed.as_ref().and_then(|observed| observed.leaving) {
            pod.grace = leaving.grace;
            pod.deletion_observed
                .get_or_insert(now.before(leaving.asked_ago));
        }
        match state {
            ObservedPhase::Waiting(waiting) if pod.bound.is_none() => {
                pod.observe_gate(now, waiting.gate)
            }
            ObservedPhase::Waiting(_) => {}
            ObservedPhase::Bound {
                node,
                devices,
                starting,
                ..
            } => {
                pod.record_binding(now, node, devices.clone());
                pod.record_update(now, *starting, observed.as_ref());
            }
        }
        let Some(observed) = observed else { return };
        let is_first = pod.disruption.disruption_info.owner.is_none();
        pod.disruption.disruption_info = observed.disruption_info.clone();
        if let Some(owner) = observed
            .disruption_info
            .owner
            .clone()
            .filter(|_| is_first && !pod.is_initial)
        {
            self.replace(&owner, uid);
        }
    }

    /// Marks the pod as the replacement of the pod of this owner that was evicted first.
    fn replace(&mut self, owner: &OwnerUid, by: &PodUid) {
        let Some(unreplaced) = self
            .unreplaced
            .get_mut(owner)
            .filter(|unreplaced| !unreplaced.is_empty())
        else {
            return;
        };
        let evicted = unreplaced.remove(0);
        self.pods
            .get_mut(by)
            .into_iter()
            .for_each(|pod| pod.is_replacement = true);
        self.pods
            .get_mut(&evicted)
            .into_iter()
            .for_each(|pod| pod.replaced_by = Some(by.clone()));
    }

    fn observe_filters(&mut self, observed: &FilterPodObserved) {
        let Some(pod) = self.pods.get_mut(&observed.uid) else {
            self.unmatched_filter_pod = Some(observed.clone());
            return;
        };
        match &observed.pod {
            FilterPod::Waiting(wants) => pod.requirements = Some(wants.clone()),
            FilterPod::Bound {
                footprint,
                successor,
            } => {
                pod.footprint = Some(footprint.clone());
                // A policy that moves no pods does not ask for it.
                pod.successor = successor.clone().or(pod.successor.take());
            }
            FilterPod::Irrelevant => {}
        }
    }

    fn record_bound(&mut self, uid: &PodUid, node: &NodeName, devices: Option<Arc<[GpuUuid]>>) {
        let now = self.ended;
        self.pods
            .get_mut(uid)
            .into_iter()
            .for_each(|pod| pod.record_binding(now, node, devices.clone()));
    }

    fn record_evicted(&mut self, uid: &PodUid) {
        let Some(pod) = self
            .pods
            .get_mut(uid)
            .filter(|pod| pod.bound.is_some() && !pod.was_evicted)
        else {
            return;
        };
        pod.was_evicted = true;
        if let Some(owner) = pod.disruption.disruption_info.owner.clone() {
            self.unreplaced.entry(owner).or_default().push(uid.clone());
        }
    }

    fn record_gone(&mut self, uid: &PodUid) {
        let now = self.ended;
        self.pods
            .get_mut(uid)
            .into_iter()
            .for_each(|pod| _ = pod.gone_at.get_or_insert(now));
    }

    /// Median time from deletion until an evicted pod was gone; `None` if the recording has no eviction.
    pub(crate) fn median_termination_time(&self) -> Option<Millis> {
        let mut termination_times: Vec<Millis> = self
            .pods
            .values()
            .filter(|pod| pod.was_evicted)
            .filter_map(RecordedPod::termination_time)
            .collect();
        termination_times.sort_unstable();
        termination_times.get(termination_times.len() / 2).copied()
    }

    /// How long a pod runs in all, including the pods that replaced it; `None` if its end is not in the recording, or was an
    /// eviction.
    pub fn total_runtime(&self, uid: &PodUid) -> Option<Millis> {
        let (mut runtime, mut next) = (Millis::default(), Some(uid));
        while let Some(uid) = next {
            let pod = self.pods.get(uid)?;
            let (bound, gone) = (pod.bound.as_ref()?, pod.gone_at?);
            runtime = runtime + gone.since(bound.at);
            next = pod.replaced_by.as_ref();
            if next.is_none() && pod.was_evicted {
                return None;
            }
        }
        Some(runtime)
    }
}

impl RecordedPod {
    fn new(key: &PodKey, demand: &Demand, now: Moment) -> Self {
        Self {
            key: key.clone(),
            demand: demand.clone(),
            is_initial: false,
            arrived: now,
            gates: Vec::new(),
            first_filtered: None,
            last_filtered: now,
            number: 0,
            requirements: None,
            footprint: None,
            successor: None,
            disruption: ObservedDisruptionInfo::default(),
            grace: demand.grace,
            bound: None,
            updates: Vec::new(),
            was_evicted: false,
            deletion_observed: None,
            gone_at: None,
            replaced_by: None,
            is_replacement: false,
        }
    }

    /// Records a gate. The planner removes its gate by itself: that is the planner's decision, not the demand, and is not recorded.
    fn observe_gate(&mut self, now: Moment, gate: SchedulingGate) {
        let is_gate_removed =
            |last: SchedulingGate| last == SchedulingGate::Planned && gate == SchedulingGate::Open;
        match self.gates.last() {
            Some((_, last)) if *last == gate || is_gate_removed(*last) => {}
            _ => self.gates.push((now, gate)),
        }
    }

    fn record_binding(&mut self, at: Moment, node: &NodeName, devices: Option<Arc<[GpuUuid]>>) {
        self.bound.get_or_insert_with(|| RecordedBinding {
            at,
            node: node.clone(),
            devices,
        });
    }

    fn record_update(
        &mut self,
        now: Moment,
        is_starting: bool,
        observed: Option<&ObservedDisruptionInfo>,
    ) {
        let disruption = observed.unwrap_or(&self.disruption).clone();
        let saved = disruption.at(now).checkpoint;
        let is_repeat = self.updates.iter().rev().find_map(|(_, show)| match show {
            BoundPodUpdate::Pod {
                is_starting: was_starting,
                disruption: last,
                saved: at,
            } => Some(
                *was_starting == is_starting
                    && last.disruption_info == disruption.disruption_info
                    && is_about_equal(*at, saved),
            ),
            BoundPodUpdate::Start(_) => None,
        });
        if is_repeat != Some(true) {
            self.updates.push((
                now,
                BoundPodUpdate::Pod {
                    is_starting,
                    disruption: Box::new(disruption),
                    saved,
                },
            ));
        }
    }

    /// Delay from kube-scheduler's last filter request to the Binding; zero if the recording does not show both.
    pub(crate) fn bind_delay(&self) -> Millis {
        let last_filtered = self.first_filtered.map(|_| self.last_filtered);
        last_filtered
            .zip(self.bound.as_ref())
            .map_or(Millis::default(), |(filtered_at, bound)| {
                bound.at.since(filtered_at)
            })
    }

    /// Time from its deletion until it was gone.
    pub(crate) fn termination_time(&self) -> Option<Millis> {
        Some(self.gone_at?.since(self.deletion_observed?))
    }

    /// Whether another scheduler bound it, or a kubelet runs it from a file: Stowage was never asked.
    pub(crate) fn is_foreign(&self) -> bool {
        let is_planned = |(_, gate): &(Moment, SchedulingGate)| *gate == SchedulingGate::Planned;
        !self.is_initial && self.first_filtered.is_none() && !self.gates.iter().any(is_planned)
    }

    /// Its binding when the recording begins.
    pub(crate) fn initial_binding(&self, began: Moment) -> Option<&RecordedBinding> {
        self.bound
            .as_ref()
            .filter(|bound| self.is_initial && bound.at == began && self.gates.is_empty())
    }

    /// Whether the recording shows its engine's start, or shows nothing after its binding.
    pub fn has_engine_start(&self) -> bool {
        let starting = |(_, show): &(Moment, BoundPodUpdate)| {
            matches!(
                show,
                BoundPodUpdate::Pod {
                    is_starting: true,
                    ..
                }
            )
        };
        self.updates.is_empty() || self.updates.iter().any(starting)
    }
}

fn binding(state: &PodState, at: Moment) -> Option<RecordedBinding> {
    let node = state.node()?.clone();
    Some(RecordedBinding {
        at,
        node,
        devices: state
            .devices()
            .cloned()
            .filter(|devices| !devices.is_empty()),
    })
}

/// Whether two checkpoints are within two seconds: moments derived from wall clocks waver.
fn is_about_equal(one: Saved, other: Saved) -> bool {
    match (one, other) {
        (Saved::Never, Saved::Never) => true,
        (Saved::At(one), Saved::At(other)) => {
            one.since(other).max(other.since(one)) < Millis::seconds(2)
        }
        _ => false,
    }
}
