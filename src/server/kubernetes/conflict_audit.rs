//! Runs the continuous audit once a second: exports conflicts as metrics, log lines and Events on the pods concerned, and
//! evicts the pod that has not started if the policy says so.
//!
//! [`conflicts`](stowage_scheduling::audit::conflicts) decides which allocations conflict and which pod is evicted, from what
//! the watches show. Every replica audits and counts; only the leader records Events and evicts. No lock but the audit's own is
//! held.

use crate::service::{Service, WorkKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::{ControlPlane, IsDue};
use stowage_scheduling::audit::conflicts::{AuditRound, ConflictVictim, GpuConflict};
use stowage_scheduling::control_loop::retry::{Backoff, RetryState};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, PodEvent, PodEventReason, PodOnRecord,
};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::policy::{ConflictRule, Mode};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::wait::{EvictionsOrdered, PodEvicted};
use stowage_scheduling::vocabulary::gpu::Device;
use tokio::task::JoinSet;

/// A conflict counts after two seconds: more frequent audits would find nothing sooner.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Nodes that are checked under one lock, in less than a millisecond.
const CHECKED_AT_ONCE: usize = 32;
/// Conflicts that one audit logs and records as Events. A fault that affects every node at once must not drown all other
/// messages.
const REPORTED_AT_ONCE: usize = 20;
/// Conflicts waiting to be reported. Beyond these the oldest are not reported; the gauge still counts them.
const UNREPORTED_LIMIT: usize = 1024;
/// Concurrent evictions.
const EVICTIONS: usize = 8;
/// Pauses before another eviction of the same pod; they grow with each attempt.
const PAUSES: Backoff = Backoff {
    first: Millis::seconds(20),
    longest: Millis::seconds(600),
};

/// Runs until it is dropped.
pub async fn run(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) {
    let mut audit = ConflictAudit::new(service, control_plane);
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            _ = ticks.tick() => {
                let round = audit.look().await;
                audit.tick(round, audit.service.now());
            }
            Some(done) = audit.evictions.join_next() => {
                if let Ok((victim, outcome)) = done {
                    audit.note(&victim, &outcome, audit.service.now());
                }
            }
        }
    }
}

struct ConflictAudit {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    was_open: bool,
    unreported: VecDeque<Arc<GpuConflict>>,
    /// Pods whose eviction was requested.
    tries: BTreeMap<PodUid, RetryState>,
    /// Pods whose eviction waits for `evictionsPerMinute`, reported once each.
    limited: BTreeSet<PodUid>,
    evictions: JoinSet<(ConflictVictim, AuditEvictionOutcome)>,
}

/// Outcome of an eviction that the audit decided on, or why none was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AuditEvictionOutcome {
    Tried(EvictionOutcome),
    /// Fresh reads do not show both pods on the node, or show that the victim has started.
    Over,
    Unread(String),
    RateLimited,
}

impl fmt::Display for AuditEvictionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tried(outcome) => outcome.fmt(f),
            Self::Over => f.write_str("the conflict is over, or the pod has started"),
            Self::Unread(error) => write!(f, "one of the pods could not be read: {error}"),
            Self::RateLimited => f.write_str("enough pods were evicted within the minute"),
        }
    }
}

impl ConflictAudit {
    fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            service,
            control_plane,
            was_open: false,
            unreported: VecDeque::new(),
            tries: BTreeMap::new(),
            limited: BTreeSet::new(),
            evictions: JoinSet::new(),
        }
    }

    /// Runs one round in the background: in a large cluster it takes longer than a request should wait.
    async fn look(&self) -> AuditRound {
        let service = self.service.clone();
        let looking = self
            .service
            .heavy_work
            .begin_in_background(WorkKind::ConflictAudit, move || {
                look(&service, service.now())
            });
        looking.await.unwrap_or_else(|error| {
            tracing::error!(%error, "a round of the audit was not completed; the next one goes on");
            AuditRound::default()
        })
    }

    fn tick(&mut self, look: AuditRound, now: Moment) {
        log(&look);
        let is_open = self.service.leadership.is_open();
        if is_open {
            let begun = match self.was_open {
                true => look.begun,
                // A replica that becomes leader reports the current conflicts.
                false => self.service.conflicts().standing().cloned().collect(),
            };
            self.queue(begun);
            self.tell();
            self.remedy(now);
        } else {
            self.unreported.clear();
            self.forget_evictions();
        }
        self.was_open = is_open;
    }

    fn queue(&mut self, begun: Vec<Arc<GpuConflict>>) {
        self.unreported.extend(begun);
        let events = &self.service.metrics.events;
        let dropped = events.with_label_values(&[PodEventReason::GpuConflict.reason(), "dropped"]);
        let too_many = self.unreported.len().saturating_sub(UNREPORTED_LIMIT);
        dropped.inc_by(
            self.unreported
                .drain(..too_many)
                .map(|conflict| conflict.parties.len() as u64)
                .sum(),
        );
    }

    fn tell(&mut self) {
        let told = self.unreported.len().min(REPORTED_AT_ONCE);
        for conflict in self.unreported.drain(..told) {
            for party in &conflict.parties {
                let (key, uid, kind) = (
                    party.key.clone(),
                    party.uid.clone(),
                    PodEventReason::GpuConflict,
                );
                let text = conflict.told_to(&party.key);
                self.control_plane.record_event(PodEvent {
                    key,
                    uid,
                    kind,
                    text,
                });
            }
        }
    }

    fn remedy(&mut self, now: Moment) {
        let victims = victims(&self.service, now);
        let still: BTreeSet<&PodUid> = victims.iter().map(|victim| &victim.uid).collect();
        self.tries.retain(|uid, _| still.contains(uid));
        self.limited.retain(|uid| still.contains(uid));
        for victim in victims
            .iter()
            .filter(|victim| self.is_due(&victim.uid, now))
            .cloned()
            .collect::<Vec<_>>()
        {
            if self.evictions.len() >= EVICTIONS {
                break;
            }
            self.evict_for(victim, now);
        }
    }

    fn forget_evictions(&mut self) {
        self.tries.clear();
        self.limited.clear();
    }

    fn is_due(&self, uid: &PodUid, now: Moment) -> bool {
        self.tries.get(uid).is_none_or(|retry| retry.is_due(now))
    }

    /// Evicts a victim within `evictionsPerMinute`, so that even a wrong audit could not empty a cluster.
    fn evict_for(&mut self, victim: ConflictVictim, now: Moment) {
        let one = std::slice::from_ref(&victim.uid);
        let mut ledger = self.service.cluster();
        let may = ledger.ledger().may_order(one);
        if may {
            ledger.apply(EvictionsOrdered(one.to_vec()));
        }
        drop(ledger);
        if !may {
            if self.limited.insert(victim.uid.clone()) {
                self.announce(&victim, &AuditEvictionOutcome::RateLimited);
            }
            return;
        }
        self.limited.remove(&victim.uid);
        // No second eviction of this pod starts before the first is answered, or broke off long ago.
        self.tries
            .entry(victim.uid.clone())
            .or_default()
            .done(now + PAUSES.longest);
        let (service, control_plane) = (self.service.clone(), self.control_plane.clone());
        self.evictions.spawn(async move {
            // Reads show both pods, but the victim's condition is written after them. A pod that joined since is not settled.
            let is_same = |other: &ConflictVictim| {
                (&other.uid, &other.stays_uid) == (&victim.uid, &victim.stays_uid)
            };
            let is_victim = || victims(&service, now).iter().any(is_same);
            let outcome = evict(&*control_plane, &victim, &is_victim).await;
            (victim, outcome)
        });
    }

    /// What follows from the answer to an eviction.
    fn note(&mut self, victim: &ConflictVictim, outcome: &AuditEvictionOutcome, now: Moment) {
        if *outcome == AuditEvictionOutcome::Tried(EvictionOutcome::Evicted) {
            self.service.cluster().apply(PodEvicted(victim.uid.clone()));
        }
        self.announce(victim, outcome);
        // Also an evicted one: if it is still in conflict then, the watch has not shown that it leaves.
        self.tries
            .entry(victim.uid.clone())
            .or_default()
            .failed(now, PAUSES, Millis(0));
    }

    fn announce(&self, victim: &ConflictVictim, outcome: &AuditEvictionOutcome) {
        let evictions = &self.service.metrics.conflicts.evictions;
        evictions.with_label_values(&[code(outcome)]).inc();
        let ConflictVictim {
            key, gpu, stays, ..
        } = victim;
        if *outcome == AuditEvictionOutcome::Tried(EvictionOutcome::Evicted) {
            tracing::warn!(pod = %key, %gpu, other = %stays, "evicted before it started: its GPU was allocated twice");
        } else {
            tracing::warn!(pod = %key, %gpu, other = %stays, %outcome, "not evicted yet, although its GPU was allocated twice");
        }
    }
}

/// The pods to evict for a conflict; none where the policy only reports.
fn victims(service: &Service, now: Moment) -> Vec<ConflictVictim> {
    let policy = service.cluster().ledger().policy().clone();
    let evicts = policy.mode == Mode::Enforce && policy.conflicts == ConflictRule::EvictUnstarted;
    if evicts {
        service.conflicts().victims(now)
    } else {
        Vec::new()
    }
}

/// Reads both pods first, past every cache: a watch that died silently shows an old state.
async fn evict(
    control_plane: &dyn ControlPlane,
    victim: &ConflictVictim,
    is_victim: &IsDue<'_>,
) -> AuditEvictionOutcome {
    match is_due(control_plane, victim).await {
        Ok(true) => {
            let why = EvictionReason::Conflict {
                with: victim.stays.clone(),
                gpu: victim.gpu.clone(),
            };
            AuditEvictionOutcome::Tried(
                control_plane
                    .evict(&victim.key, &victim.uid, &why, is_victim)
                    .await,
            )
        }
        Ok(false) | Err(ControlPlaneError::Gone) => AuditEvictionOutcome::Over,
        Err(error) => AuditEvictionOutcome::Unread(error.to_string()),
    }
}

/// Whether reads show both pods on the node, and that the victim has not started.
async fn is_due(
    control_plane: &dyn ControlPlane,
    victim: &ConflictVictim,
) -> Result<bool, ControlPlaneError> {
    let is_there = |pod: &PodOnRecord| pod.node.as_ref() == Some(&victim.node) && !pod.is_over;
    let stays = control_plane
        .read_pod(&victim.stays)
        .await?
        .filter(is_there);
    if stays.is_none_or(|pod| pod.uid != victim.stays_uid) {
        return Ok(false);
    }
    let leaves = control_plane.read_pod(&victim.key).await?.filter(is_there);
    Ok(leaves.is_some_and(|pod| pod.uid == victim.uid && !pod.has_started))
}

/// Audits the nodes that are due, a few under each lock, because watches wait for that lock.
fn look(service: &Service, now: Moment) -> AuditRound {
    let due = service.conflicts().due(now);
    let nodes = with_devices(service, due);
    let mut round = AuditRound::default();
    for nodes in nodes.chunks(CHECKED_AT_ONCE) {
        // A statement of its own, so that the lock is released with it.
        let AuditRound { begun, ended } = service.conflicts().look(nodes, now);
        round.begun.extend(begun);
        round.ended.extend(ended);
    }
    service.metrics.conflicts.set(&service.conflicts(), &round);
    round
}

/// The devices of these nodes, from agents' reports or labels. One that is gone counts as without devices. They are read from a
/// copy: this thread has a low priority, and a request waits while such a thread has the ledger's lock and no core.
fn with_devices(service: &Service, nodes: Vec<NodeName>) -> Vec<(NodeName, Arc<[Device]>)> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let ledger = service.scratch_ledger();
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

fn log(look: &AuditRound) {
    for conflict in look.begun.iter().take(REPORTED_AT_ONCE) {
        tracing::error!(kind = conflict.kind.code(), node = %conflict.node, gpu = %conflict.gpu, "{conflict}");
    }
    if let Some(more @ 1..) = look.begun.len().checked_sub(REPORTED_AT_ONCE) {
        tracing::error!(
            more,
            "more GPUs are in conflict: see the metric stowage_gpu_conflicts"
        );
    }
    for conflict in look.ended.iter().take(REPORTED_AT_ONCE) {
        tracing::info!(kind = conflict.kind.code(), node = %conflict.node, gpu = %conflict.gpu, "the conflict is over");
    }
}

/// Label of an outcome in metrics.
fn code(outcome: &AuditEvictionOutcome) -> &'static str {
    match outcome {
        AuditEvictionOutcome::Tried(outcome) => outcome.code(),
        AuditEvictionOutcome::Unread(_) => "unknown",
        AuditEvictionOutcome::RateLimited => "rate-limited",
        AuditEvictionOutcome::Over => "over",
    }
}

#[cfg(test)]
mod tests;
