//! Start gates: for how long an engine that starts keeps others from starting on its GPUs.
//!
//! A gate counts from when a Binding is known to have landed. While the Binding may still land, its engine may begin to start at any
//! moment, and the gate stays shut.
//!
//! No tenant keeps others from a GPU for ever with one start after the other: within an hour, its engines that do not become ready
//! together no longer than one may, and all together three times as long.
//!
//! [`NodeStarts`] keeps of each node for how long engines have kept others from starting, and what their starts have taught of it.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::{PodPhase, PodState};
use super::start_times::{PodStart, StartSample, StartSamples};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::placing::rank;
use crate::placing::start_model::StartModel;
use crate::policy::{Policy, StartGate};
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::model_tier::time_to_ready;
use crate::vocabulary::node::Node;
use crate::vocabulary::start_time::{NodeStartFactors, StartFactors, StartKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The least time, in milliseconds, for which a tenant's engines that do not become ready may keep others from a GPU within an hour;
/// more, if its class lets one engine do so for longer.
const MIN_GATE_SHARE_MILLIS: u64 = 600_000;
/// How many times that long all of a tenant's engines together may keep others from a GPU.
const TOTAL_GATE_SHARE_FACTOR: u64 = 3;

impl Ledger {
    /// The start of a pod whose Binding to the node is known to have landed just now: until when its engine keeps others from
    /// starting on its GPUs, and what is expected of it. Until now it may have begun at any moment.
    pub(super) fn start_after_binding(
        &self,
        uid: &PodUid,
        node: &NodeName,
    ) -> (Option<Moment>, Option<Arc<PodStart>>) {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return (None, None);
        };
        let (starting, start, now) = (pod_state.starting, &pod_state.start, self.now);
        match &pod_state.phase {
            PodPhase::Bound(_) => (starting, start.clone()),
            PodPhase::Assumed(assumed) if assumed.placement.node == *node => {
                let from_now = |start: &Arc<PodStart>| Arc::new(start.counted_from(now));
                (
                    starting.map(|until| now + until.since(assumed.since)),
                    start.as_ref().map(from_now),
                )
            }
            // It was given up here, or bound by the leader that this replica may succeed.
            PodPhase::Assumed(_) | PodPhase::Waiting(_) => {
                let view = self.node_states.get(node).map(NodeState::view);
                view.map_or((None, None), |view| {
                    self.expected_start(&pod_state.demand, view)
                })
            }
        }
    }

    /// Until when an engine keeps others from starting on these GPUs, that would until then, with what its tenant has taken there.
    pub(super) fn capped_by_gate_share(
        &self,
        until: Option<Moment>,
        demand: &Demand,
        node: &NodeName,
        gpus: &[GpuUuid],
    ) -> Option<Moment> {
        let Millis(taken) = self.gate_time_taken(demand, node, gpus);
        let latest_end = self.now + Millis(self.gate_share_millis(demand).saturating_sub(taken));
        until
            .map(|until| until.min(latest_end))
            .filter(|until| *until > self.now)
    }

    /// What the pod's tenant has taken within an hour of the time for which it may keep others from one of these GPUs; of any, if it
    /// is not known which.
    pub(crate) fn gate_time_taken(
        &self,
        demand: &Demand,
        node: &NodeName,
        gpus: &[GpuUuid],
    ) -> Millis {
        let starter = starter_of(demand, &self.policy);
        let gate_time =
            |node_state: &NodeState| node_state.starts().gate_times(starter, gpus, self.now);
        let (failed, all) = self
            .node_states
            .get(node)
            .map(gate_time)
            .unwrap_or_default();
        failed.max(Millis(
            all.0.saturating_sub(
                self.gate_share_millis(demand)
                    .saturating_mul(TOTAL_GATE_SHARE_FACTOR - 1),
            ),
        ))
    }

    fn gate_share_millis(&self, demand: &Demand) -> u64 {
        self.policy
            .class(demand.class)
            .start_gate
            .max
            .0
            .max(MIN_GATE_SHARE_MILLIS)
    }

    /// Whether a pod that is gone left for others, who may have had it evicted, and not for its own use.
    pub(super) fn was_evicted_for_others(&self, uid: &PodUid) -> bool {
        let node_state = self
            .pod_states
            .get(uid)
            .and_then(|pod| self.node_states.get(pod.node()?));
        let evicts_it = |pod: &PodUid| {
            self.pod_states
                .reservation(pod)
                .is_some_and(|reservation| reservation.victims.contains(uid))
        };
        let is_victim =
            || node_state.is_some_and(|node_state| node_state.pods().iter().any(evicts_it));
        self.overuse_of(uid).is_none()
            && (self.pods_with_eviction_condition.contains(uid) || is_victim())
    }

    /// Records how long the pod's start gate kept others from starting, because it opens or the pod is gone.
    pub(super) fn record_gate_time(&mut self, uid: &PodUid, is_ready: bool) {
        let Some(PodState {
            demand,
            phase: PodPhase::Bound(bound),
            starting: Some(until),
            ..
        }) = self.pod_states.get(uid)
        else {
            return;
        };
        let Some(node_state) = self.node_states.get_mut(&bound.node) else {
            return;
        };
        // Of a pod without a record all GPUs of its node were kept.
        let all_gpus = || {
            node_state
                .devices()
                .iter()
                .map(|device| device.uuid.clone())
                .collect()
        };
        let gpus = bound.devices.clone().unwrap_or_else(all_gpus);
        let gate_time = (self.now.min(*until).since(bound.since), self.now);
        let starter = starter_of(demand, &self.policy);
        node_state
            .starts_mut()
            .record_past_start(uid, starter, gpus, gate_time, is_ready);
    }

    /// The pod's engine is ready.
    pub(super) fn record_engine_ready(&mut self, uid: &PodUid, node: &NodeName) {
        let has_failed = |node_state: &NodeState| node_state.starts().has_failed(uid);
        if self.node_states.get(node).is_some_and(has_failed)
            && let Some(node_state) = self.node_states.get_mut(node)
        {
            node_state.starts_mut().record_ready(uid);
        }
    }

    /// The expected start of a pod that begins to start now: until when its engine keeps others from starting, and what is expected.
    pub(super) fn expected_start(
        &self,
        demand: &Demand,
        node: &Node,
    ) -> (Option<Moment>, Option<Arc<PodStart>>) {
        let (starts, now) = (self.start_times.model(), self.now);
        (
            start_gate_end(demand, node, now, starts, &self.policy),
            PodStart::expect(demand, node, now, starts, &self.policy.loading),
        )
    }
}

/// The tenant or namespace that a pod's start counts for. A name stays the same under the next policy.
fn starter_of<'a>(demand: &'a Demand, policy: &'a Policy) -> Starter<'a> {
    let tenant = demand.tenant.and_then(|id| policy.tenant(id));
    tenant.map_or((false, &demand.traits.namespace), |tenant| {
        (true, &tenant.name)
    })
}

/// Until when an engine that begins to start now keeps others from starting on its GPUs; `None` if it is none, or its GPUs are
/// not known.
pub(super) fn start_gate_end(
    demand: &Demand,
    node: &Node,
    now: Moment,
    start_model: &StartModel,
    policy: &Policy,
) -> Option<Moment> {
    let estimate = rank::estimate_start(node, demand, start_model, &policy.loading);
    let expected = match (estimate, &demand.model) {
        // What others taught never opens it earlier: an engine whose probe answers too soon would let two start at once.
        (Some(found), Some(_)) => found.total().max(found.prior.total()),
        // What it will load is unknown, and may be as large as what it asks for.
        (found, _) => {
            let pull = found.map_or(Millis::default(), |found| found.time.pull);
            pull + time_to_ready(None, demand.weights(), &policy.loading)
        }
    };
    let StartGate { min, max } = policy.class(demand.class).start_gate;
    // Twice, because loading does not take exactly as long as predicted.
    let is_gated = demand.terms.engine && !demand.is_allocated_externally();
    let length = expected.times(2).clamp(min.min(max), max);
    (is_gated && length > Millis::default()).then(|| now + length)
}

/// The most kinds of starts that are remembered of a node; beyond that the kind observed longest ago is forgotten.
const MAX_KINDS_PER_NODE: usize = 8;
/// The most samples of each kind.
const MAX_SAMPLES_PER_KIND: usize = 12;
/// The fewest samples from which factors are fitted: one start may be an accident.
const MIN_SAMPLES: usize = 2;
/// How long a past start's gate time counts against its tenant: shares are per hour.
const GATE_TIME_WINDOW: Millis = Millis::seconds(3600);
/// The least gate time that a start is charged, which bounds how many past starts are remembered.
const MIN_GATE_TIME: Millis = Millis::seconds(1);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeStarts {
    /// By kind, the one that was observed last at the end.
    samples: Vec<(StartKind, StartSamples)>,
    factors: NodeStartFactors,
    #[serde(default)]
    past: Vec<PastStart>,
}

/// A tenant by its name, or a namespace without one: whose starts count together.
type Starter<'a> = (bool, &'a str);

/// For how long a pod's engine has kept others from starting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PastStart {
    uid: PodUid,
    gpus: Arc<[GpuUuid]>,
    is_tenant: bool,
    name: String,
    ended: Moment,
    held: Millis,
    is_ready: bool,
}

impl NodeStarts {
    pub(crate) fn factors(&self) -> &NodeStartFactors {
        &self.factors
    }

    /// An engine has started here; `cluster_factors` is what the cluster knows of that kind.
    pub(crate) fn learn(
        &mut self,
        kind: StartKind,
        sample: StartSample,
        cluster_factors: StartFactors,
    ) {
        let index = self.samples.iter().position(|(of, _)| *of == kind);
        let (_, mut samples) = index
            .map(|index| self.samples.remove(index))
            .unwrap_or((kind, StartSamples::default()));
        samples.add(sample, MAX_SAMPLES_PER_KIND);
        let factors = samples.fit(cluster_factors, MIN_SAMPLES);
        self.samples.push((kind, samples));
        if self.samples.len() > MAX_KINDS_PER_NODE {
            self.samples.remove(0);
        }
        let is_kept = |kept_kind: &StartKind| {
            *kept_kind != kind && self.samples.iter().any(|(kept, _)| kept == kept_kind)
        };
        let mut all: Vec<_> = self
            .factors
            .iter()
            .filter(|(of, _)| is_kept(of))
            .copied()
            .collect();
        all.extend(factors.map(|factors| (kind, factors)));
        all.sort_unstable_by_key(|(of, _)| *of);
        self.factors = Arc::from(all);
    }

    /// The pod's engine has kept others from starting on these GPUs for so long.
    fn record_past_start(
        &mut self,
        uid: &PodUid,
        (is_tenant, name): Starter<'_>,
        gpus: Arc<[GpuUuid]>,
        (held, ended): (Millis, Moment),
        is_ready: bool,
    ) {
        self.past
            .retain(|past| past.uid != *uid && ended.since(past.ended) < GATE_TIME_WINDOW);
        let (uid, name, held) = (uid.clone(), name.into(), held.max(MIN_GATE_TIME));
        self.past.push(PastStart {
            uid,
            gpus,
            is_tenant,
            name,
            ended,
            held,
            is_ready,
        });
    }

    /// Whether the pod's engine counts as one that did not become ready.
    pub(crate) fn has_failed(&self, uid: &PodUid) -> bool {
        self.past
            .iter()
            .any(|past| past.uid == *uid && !past.is_ready)
    }

    /// It has become ready after all.
    pub(crate) fn record_ready(&mut self, uid: &PodUid) {
        self.past
            .iter_mut()
            .filter(|past| past.uid == *uid)
            .for_each(|past| past.is_ready = true);
    }

    /// For how long engines of the starter have kept others from one of these GPUs, or from any if none is named: those that did
    /// not become ready, and all.
    pub(crate) fn gate_times(
        &self,
        starter: Starter<'_>,
        gpus: &[GpuUuid],
        now: Moment,
    ) -> (Millis, Millis) {
        let is_by_starter = |start: &&PastStart| {
            (start.is_tenant, &*start.name) == starter && now.since(start.ended) < GATE_TIME_WINDOW
        };
        let starts_by_starter: Vec<&PastStart> = self.past.iter().filter(is_by_starter).collect();
        let sum = |gpu: Option<&GpuUuid>, failed_only: bool| {
            let on_it = starts_by_starter
                .iter()
                .filter(|start| gpu.is_none_or(|gpu| start.gpus.contains(gpu)));
            let counted = on_it.filter(|start| !failed_only || !start.is_ready);
            counted.fold(Millis::default(), |sum, start| sum + start.held)
        };
        let longest = |failed_only| {
            let each = gpus.iter().map(|gpu| sum(Some(gpu), failed_only)).max();
            each.unwrap_or_else(|| sum(None, failed_only))
        };
        (longest(true), longest(false))
    }
}

#[cfg(test)]
mod tests;
