//! Runs the continuous audit once a second: exports conflicts as metrics, log lines and Events on the pods concerned, and
//! evicts the pod that has not started if the policy says so.
//!
//! [`conflicts`](stowage_scheduling::audit::conflicts) decides which allocations conflict and which pod is evicted, from what
//! the watches show. Every replica audits and counts; only the leader records Events and evicts. No lock but the audit's own is
//! held.

use crate::service::{ServerState, WorkKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::{ControlPlane, IsDue};
use stowage_scheduling::audit::conflicts::{AuditRound, OverAllocation, OverAllocationVictim};
use stowage_scheduling::control_loop::retry::{Backoff, RetryState};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, PodEventReason,
};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::policy::{ConflictRule, Mode};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::wait::{EvictionsOrdered, PodEvicted};
use stowage_scheduling::vocabulary::gpu::Device;
use tokio::task::JoinSet;

/// A conflict counts after two seconds: more frequent audits would find nothing sooner.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);
/// Nodes that are checked under one lock, in less than a millisecond.
const NODES_PER_LOCK: usize = 32;
/// Conflicts that one audit logs and records as Events. A fault that affects every node at once must not drown all other
/// messages.
const MAX_REPORTS_PER_ROUND: usize = 20;
/// Conflicts waiting to be reported. Beyond these the oldest are not reported; the gauge still counts them.
const MAX_UNREPORTED: usize = 1024;
/// Concurrent evictions.
const MAX_CONCURRENT_EVICTIONS: usize = 8;
/// Pauses before another eviction of the same pod; they grow with each attempt.
const EVICTION_RETRY_BACKOFF: Backoff = Backoff {
    min: Millis::seconds(20),
    max: Millis::seconds(600),
};

/// Runs until it is dropped.
pub async fn run(state: Arc<ServerState>, control_plane: Arc<dyn ControlPlane>) {
    let mut audit = AllocationAudit::new(state, control_plane);
    let mut ticks = tokio::time::interval(AUDIT_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            _ = ticks.tick() => {
                let round = audit.run_round().await;
                audit.tick(round, audit.state.now());
            }
            Some(done) = audit.evictions.join_next() => {
                if let Ok((victim, outcome)) = done {
                    audit.record_outcome(&victim, &outcome, audit.state.now());
                }
            }
        }
    }
}

struct AllocationAudit {
    state: Arc<ServerState>,
    control_plane: Arc<dyn ControlPlane>,
    was_open: bool,
    unreported: VecDeque<Arc<OverAllocation>>,
    /// Pods whose eviction was requested.
    retries: BTreeMap<PodUid, RetryState>,
    /// Pods whose eviction waits for `evictionsPerMinute`, reported once each.
    rate_limited: BTreeSet<PodUid>,
    evictions: JoinSet<(OverAllocationVictim, AuditEvictionOutcome)>,
}

/// Outcome of an eviction that the audit decided on, or why none was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AuditEvictionOutcome {
    Attempted(EvictionOutcome),
    /// Fresh reads do not show both pods on the node, or show that the victim has started.
    Resolved,
    ReadFailed(String),
    RateLimited,
}

impl fmt::Display for AuditEvictionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attempted(outcome) => outcome.fmt(f),
            Self::Resolved => f.write_str("the conflict is over, or the pod has started"),
            Self::ReadFailed(error) => write!(f, "one of the pods could not be read: {error}"),
            Self::RateLimited => f.write_str("enough pods were evicted within the minute"),
        }
    }
}

impl AllocationAudit {
    fn new(state: Arc<ServerState>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            state,
            control_plane,
            was_open: false,
            unreported: VecDeque::new(),
            retries: BTreeMap::new(),
            rate_limited: BTreeSet::new(),
            evictions: JoinSet::new(),
        }
    }

    /// Runs one round in the background: in a large cluster it takes longer than a request should wait.
    async fn run_round(&self) -> AuditRound {
        let state = self.state.clone();
        let round_task = self
            .state
            .heavy_work
            .spawn_in_background(WorkKind::ConflictAudit, move || {
                audit_due_nodes(&state, state.now())
            });
        round_task.await.unwrap_or_else(|error| {
            tracing::error!(%error, "a round of the audit was not completed; the next one goes on");
            AuditRound::default()
        })
    }

    fn tick(&mut self, round: AuditRound, now: Moment) {
        log(&round);
        let is_open = self.state.leadership.is_open();
        if is_open {
            let begun = match self.was_open {
                true => round.begun,
                // A replica that becomes leader reports the current conflicts.
                false => self.state.over_allocations().confirmed().cloned().collect(),
            };
            self.queue_reports(begun);
            self.record_events();
            self.evict_victims(now);
        } else {
            self.unreported.clear();
            self.forget_evictions();
        }
        self.was_open = is_open;
    }

    fn queue_reports(&mut self, begun: Vec<Arc<OverAllocation>>) {
        self.unreported.extend(begun);
        let events = &self.state.metrics.events;
        let dropped =
            events.with_label_values(&[PodEventReason::GpuConflict.into_str(), "dropped"]);
        let too_many = self.unreported.len().saturating_sub(MAX_UNREPORTED);
        dropped.inc_by(
            self.unreported
                .drain(..too_many)
                .map(|over_allocation| over_allocation.parties.len() as u64)
                .sum(),
        );
    }

    fn record_events(&mut self) {
        let count = self.unreported.len().min(MAX_REPORTS_PER_ROUND);
        for over_allocation in self.unreported.drain(..count) {
            for party in &over_allocation.parties {
                let (key, uid, kind) = (
                    party.key.clone(),
                    party.uid.clone(),
                    PodEventReason::GpuConflict,
                );
                let text = over_allocation.text_for(&party.key);
                self.control_plane.record_event(PodEvent {
                    key,
                    uid,
                    kind,
                    text,
                });
            }
        }
    }

    fn evict_victims(&mut self, now: Moment) {
        let victims = victims(&self.state, now);
        let victim_uids: BTreeSet<&PodUid> = victims.iter().map(|victim| &victim.uid).collect();
        self.retries.retain(|uid, _| victim_uids.contains(uid));
        self.rate_limited.retain(|uid| victim_uids.contains(uid));
        for victim in victims
            .iter()
            .filter(|victim| self.is_due(&victim.uid, now))
            .cloned()
            .collect::<Vec<_>>()
        {
            if self.evictions.len() >= MAX_CONCURRENT_EVICTIONS {
                break;
            }
            self.evict_for(victim, now);
        }
    }

    fn forget_evictions(&mut self) {
        self.retries.clear();
        self.rate_limited.clear();
    }

    fn is_due(&self, uid: &PodUid, now: Moment) -> bool {
        self.retries.get(uid).is_none_or(|retry| retry.is_due(now))
    }

    /// Evicts a victim within `evictionsPerMinute`, so that even a wrong audit could not empty a cluster.
    fn evict_for(&mut self, victim: OverAllocationVictim, now: Moment) {
        let uids = std::slice::from_ref(&victim.uid);
        let mut cluster = self.state.cluster();
        let may_evict = cluster.ledger().is_within_eviction_rates(uids);
        if may_evict {
            cluster.apply(EvictionsOrdered(uids.to_vec()));
        }
        drop(cluster);
        if !may_evict {
            if self.rate_limited.insert(victim.uid.clone()) {
                self.report_outcome(&victim, &AuditEvictionOutcome::RateLimited);
            }
            return;
        }
        self.rate_limited.remove(&victim.uid);
        // No second eviction of this pod starts before the first is answered, or broke off long ago.
        self.retries
            .entry(victim.uid.clone())
            .or_default()
            .record_success(now + EVICTION_RETRY_BACKOFF.max);
        let (state, control_plane) = (self.state.clone(), self.control_plane.clone());
        self.evictions.spawn(async move {
            // Reads show both pods, but the victim's condition is written after them. A pod that joined since is not settled.
            let is_same = |other: &OverAllocationVictim| {
                (&other.uid, &other.remaining_uid) == (&victim.uid, &victim.remaining_uid)
            };
            let is_victim = || victims(&state, now).iter().any(is_same);
            let outcome = evict(&*control_plane, &victim, &is_victim).await;
            (victim, outcome)
        });
    }

    /// What follows from the answer to an eviction.
    fn record_outcome(
        &mut self,
        victim: &OverAllocationVictim,
        outcome: &AuditEvictionOutcome,
        now: Moment,
    ) {
        if *outcome == AuditEvictionOutcome::Attempted(EvictionOutcome::Evicted) {
            self.state.cluster().apply(PodEvicted(victim.uid.clone()));
        }
        self.report_outcome(victim, outcome);
        // Also an evicted one: if it is still in conflict then, the watch has not shown that it leaves.
        self.retries
            .entry(victim.uid.clone())
            .or_default()
            .record_failure(now, EVICTION_RETRY_BACKOFF, Millis(0));
    }

    fn report_outcome(&self, victim: &OverAllocationVictim, outcome: &AuditEvictionOutcome) {
        let evictions = &self.state.metrics.over_allocations.evictions;
        evictions.with_label_values(&[outcome_code(outcome)]).inc();
        let OverAllocationVictim {
            key,
            gpu,
            remaining_pod: stays,
            ..
        } = victim;
        if *outcome == AuditEvictionOutcome::Attempted(EvictionOutcome::Evicted) {
            tracing::warn!(pod = %key, %gpu, other = %stays, "evicted before it started: its GPU was allocated twice");
        } else {
            tracing::warn!(pod = %key, %gpu, other = %stays, %outcome, "not evicted yet, although its GPU was allocated twice");
        }
    }
}

/// The pods to evict for a conflict; none where the policy only reports.
fn victims(state: &ServerState, now: Moment) -> Vec<OverAllocationVictim> {
    let policy = state.cluster().ledger().policy().clone();
    let may_evict =
        policy.mode == Mode::Enforce && policy.conflicts == ConflictRule::EvictUnstarted;
    if may_evict {
        state.over_allocations().victims(now)
    } else {
        Vec::new()
    }
}

/// Reads both pods first, past every cache: a watch that died silently shows an old state.
async fn evict(
    control_plane: &dyn ControlPlane,
    victim: &OverAllocationVictim,
    is_victim: &IsDue<'_>,
) -> AuditEvictionOutcome {
    match is_still_over_allocated(control_plane, victim).await {
        Ok(true) => {
            let why = EvictionReason::Conflict {
                with: victim.remaining_pod.clone(),
                gpu: victim.gpu.clone(),
            };
            AuditEvictionOutcome::Attempted(
                control_plane
                    .evict(&victim.key, &victim.uid, &why, is_victim)
                    .await,
            )
        }
        Ok(false) | Err(ControlPlaneError::Gone) => AuditEvictionOutcome::Resolved,
        Err(error) => AuditEvictionOutcome::ReadFailed(error.to_string()),
    }
}

/// Whether reads show both pods on the node, and that the victim has not started.
async fn is_still_over_allocated(
    control_plane: &dyn ControlPlane,
    victim: &OverAllocationVictim,
) -> Result<bool, ControlPlaneError> {
    let is_there = |pod: &FreshPod| pod.node.as_ref() == Some(&victim.node) && !pod.is_over;
    let staying = control_plane
        .read_pod(&victim.remaining_pod)
        .await?
        .filter(is_there);
    if staying.is_none_or(|pod| pod.uid != victim.remaining_uid) {
        return Ok(false);
    }
    let victim_pod = control_plane.read_pod(&victim.key).await?.filter(is_there);
    Ok(victim_pod.is_some_and(|pod| pod.uid == victim.uid && !pod.has_started))
}

/// Audits the nodes that are due, a few under each lock, because watches wait for that lock.
fn audit_due_nodes(state: &ServerState, now: Moment) -> AuditRound {
    let due = state.over_allocations().due(now);
    let nodes = with_devices(state, due);
    let mut round = AuditRound::default();
    for nodes in nodes.chunks(NODES_PER_LOCK) {
        // A statement of its own, so that the lock is released with it.
        let AuditRound { begun, ended } = state.over_allocations().check_nodes(nodes, now);
        round.begun.extend(begun);
        round.ended.extend(ended);
    }
    state
        .metrics
        .over_allocations
        .set(&state.over_allocations(), &round);
    round
}

/// The devices of these nodes, from agents' reports or labels. One that is gone counts as without devices. They are read from a
/// copy: this thread has a low priority, and a request waits while such a thread has the ledger's lock and no core.
fn with_devices(state: &ServerState, nodes: Vec<NodeName>) -> Vec<(NodeName, Arc<[Device]>)> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let ledger = state.scratch_ledger();
    let existing = |name: &NodeName| ledger.node(name).filter(|_| ledger.has_node(name));
    let devices = |name: &NodeName| {
        existing(name)
            .map(|node| node.devices.clone())
            .unwrap_or_default()
    };
    nodes
        .into_iter()
        .map(|name| (name.clone(), devices(&name)))
        .collect()
}

fn log(round: &AuditRound) {
    for over_allocation in round.begun.iter().take(MAX_REPORTS_PER_ROUND) {
        tracing::error!(kind = over_allocation.kind.into_str(), node = %over_allocation.node, gpu = %over_allocation.gpu, "{over_allocation}");
    }
    if let Some(more @ 1..) = round.begun.len().checked_sub(MAX_REPORTS_PER_ROUND) {
        tracing::error!(
            more,
            "more GPUs are in conflict: see the metric stowage_gpu_conflicts"
        );
    }
    for over_allocation in round.ended.iter().take(MAX_REPORTS_PER_ROUND) {
        tracing::info!(kind = over_allocation.kind.into_str(), node = %over_allocation.node, gpu = %over_allocation.gpu, "the conflict is over");
    }
}

/// Label of an outcome in metrics.
fn outcome_code(outcome: &AuditEvictionOutcome) -> &'static str {
    match outcome {
        AuditEvictionOutcome::Attempted(outcome) => outcome.code(),
        AuditEvictionOutcome::ReadFailed(_) => "unknown",
        AuditEvictionOutcome::RateLimited => "rate-limited",
        AuditEvictionOutcome::Resolved => "over",
    }
}

#[cfg(test)]
mod tests;
