//! The `filter` verb: which of the named nodes fit the pod, shortened to the best few.

use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, FilterResult, RawNodeList};
use super::{Extender, shadow};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::kubernetes::objects;
use crate::kubernetes::port::{PodEvent, PodEventReason};
use crate::scheduling::ledger::{Ledger, ObservedPhase, ObservedWaiting, PodObservation};
use crate::scheduling::placing::fit::Misfit;
use crate::scheduling::placing::rank::{ReservedPlacement, ScheduleAttempt, Shortlist};
use crate::scheduling::placing::snapshot::Snapshot;
use crate::scheduling::policy::{Mode, Policy};
use crate::scheduling::vocabulary::cluster_share::TenantLimit;
use crate::scheduling::vocabulary::demand::{Demand, RequestError};
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

/// The shortlist doubles with every attempt that did not lead to a bind, at most this many times: with four nodes at first, 256
/// nodes are enough for other plugins to find one they accept.
const MAX_DOUBLINGS: u32 = 6;

/// What a verb needs to know of its pod before it calls the core.
pub struct VerbRequest {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub waiting: ObservedWaiting,
}

/// A pod whose request is invalid.
#[derive(Debug)]
pub struct UnreadablePod {
    pub uid: PodUid,
    pub key: PodKey,
    pub error: RequestError,
}

/// The decision for one pod and what it was based on. It has no effect yet.
pub struct FilterDecision {
    pub asking: VerbRequest,
    pub view: DecisionView,
    pub list: Shortlist,
}

/// A view of the cluster and of the pod, all of one moment and one policy.
pub struct DecisionView {
    pub snapshot: Arc<Snapshot>,
    pub reserved_placement: Option<(NodeName, Result<crate::scheduling::vocabulary::gpu::GpuSet, Misfit>)>,
    pub policy: Arc<Policy>,
    pub allowance: TenantLimit,
}

impl VerbRequest {
    /// Adds the pod to the ledger. If the policy has changed since the pod was read, classifies the pod by the new one.
    pub fn enter(&self, ledger: &mut Ledger) {
        ledger.see(PodObservation {
            uid: self.uid.clone(),
            key: self.key.clone(),
            demand: self.demand.clone(),
            state: ObservedPhase::Waiting(self.waiting.clone()),
            // The watch reports it.
            observed: None,
        });
    }

    /// Classifies the pod by `policy` if it was classified by another one.
    pub fn come_under(&mut self, policy: &Policy) {
        if self.demand.classified_by != policy.version {
            self.demand.take(policy.classify(&self.demand.traits));
        }
    }
}

impl DecisionView {
    /// Brings `asking` to the policy of the view.
    pub fn take(ledger: &mut Ledger, asking: &mut VerbRequest) -> Self {
        let policy = ledger.policy().clone();
        asking.come_under(&policy);
        let snapshot = ledger.snapshot();
        asking.demand.weighed_by(&snapshot);
        Self {
            reserved_placement: ledger.reserved_placement(&asking.uid),
            allowance: ledger.allowance(&asking.uid, &asking.demand),
            snapshot,
            policy,
        }
    }

    /// A first attempt; the verb sets how many candidates it wants.
    pub fn attempt(&self) -> ScheduleAttempt<'_> {
        ScheduleAttempt {
            limit: usize::from(self.policy.shortlist),
            just_failed: None,
            reserved_placement: self
                .reserved_placement
                .as_ref()
                .map(|(node, verdict)| ReservedPlacement { node, verdict: *verdict }),
            policy: &self.policy,
            allowance: self.allowance,
        }
    }
}

impl UnreadablePod {
    /// Records an Event on the pod.
    pub fn tell(&self, extender: &Extender) {
        let (key, uid, text) = (self.key.clone(), self.uid.clone(), self.error.to_string());
        extender.control_plane.record_event(PodEvent {
            key,
            uid,
            kind: PodEventReason::InvalidRequest,
            text,
        });
    }
}

/// The pod of a request. The outer error is a malformed request, the inner one a pod whose request is invalid.
pub fn asking(extender: &Extender, pod: &Pod) -> Result<Result<VerbRequest, UnreadablePod>, BadRequest> {
    let (uid, key) = objects::identity(pod).map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    match objects::classified_demand(pod, |traits| extender.service.classify(traits)) {
        Ok(demand) => Ok(Ok(VerbRequest { uid, key, demand, waiting: objects::waiting(pod) })),
        Err(error @ RequestError::NoVram) => Err(BadRequest::unprocessable(error.code(), error)),
        Err(error) => Ok(Err(UnreadablePod { uid, key, error })),
    }
}

pub fn filter<'a>(
    extender: &Extender,
    args: &'a ExtenderArgs<'a>,
    nodes: &'a AskedNodes<'a>,
) -> Result<FilterResult<'a>, BadRequest> {
    let asking = match asking(extender, &args.pod)? {
        Ok(asking) => asking,
        Err(unclear) => {
            let let_through = shadow::filter_unclear(extender, nodes, &args.pod, &unclear);
            return Ok(let_through.unwrap_or_else(|| refuse_unclear(extender, nodes, &unclear)));
        }
    };
    let decision = decide(extender, asking, nodes);
    Ok(match decision.view.policy.mode {
        Mode::Enforce => enforce(extender, nodes, &decision),
        Mode::Shadow => shadow::filter(extender, nodes, &decision),
    })
}

fn decide(extender: &Extender, mut asking: VerbRequest, nodes: &AskedNodes<'_>) -> FilterDecision {
    let (view, tries, just_failed) = begin(extender, &mut asking);
    let first = view.attempt();
    let attempt = ScheduleAttempt {
        limit: first.limit << tries.min(MAX_DOUBLINGS),
        just_failed: just_failed.as_ref(),
        ..first
    };
    let score_cache = || extender.service.score_cache();
    let mut page = score_cache().take(&view.snapshot, &asking.demand, &view.policy);
    let list = page.shortlist(&view.snapshot, &asking.demand, nodes.names(), attempt);
    score_cache().put(page);
    FilterDecision { asking, view, list }
}

fn enforce<'a>(
    extender: &Extender,
    nodes: &'a AskedNodes<'a>,
    decision: &FilterDecision,
) -> FilterResult<'a> {
    let FilterDecision { asking, view, list } = decision;
    count_refusals(extender, list);
    if list.best.is_empty() {
        refuse(extender, asking, &view.snapshot, nodes, list);
        let phrases = list.refused.iter().map(|(place, misfit)| (*place, misfit.phrase()));
        return answer(nodes, std::iter::empty(), phrases);
    }
    count_answer(extender, "passed", "");
    offer_if_only(extender, asking, &view.snapshot, list);
    answer(nodes, list.best.iter().map(|candidate| candidate.asked), std::iter::empty())
}

fn refuse_unclear<'a>(
    extender: &Extender,
    nodes: &'a AskedNodes<'a>,
    unclear: &UnreadablePod,
) -> FilterResult<'a> {
    unclear.tell(extender);
    count_answer(extender, "refused", unclear.error.code());
    let phrase = unclear.error.phrase();
    answer(nodes, std::iter::empty(), (0..nodes.len()).map(|place| (place, phrase)))
}

/// Adds the pod to the ledger and takes the view for the whole decision, with how often the pod came back unbound and from
/// which nodes.
fn begin(extender: &Extender, asking: &mut VerbRequest) -> (DecisionView, u32, Option<NodeName>) {
    let service = &extender.service;
    let _timer = service.metrics.ledger_seconds.start_timer();
    let mut ledger = service.ledger();
    asking.enter(&mut ledger);
    let (tries, just_failed) = ledger.begin_attempt(&asking.uid);
    (DecisionView::take(&mut ledger, asking), tries, just_failed)
}

/// With one node in the answer kube-scheduler skips prioritize, so the soft reservation is made here.
fn offer_if_only(extender: &Extender, asking: &VerbRequest, snapshot: &Snapshot, list: &Shortlist) {
    if let [only] = list.best[..] {
        let service = &extender.service;
        let mut ledger = service.ledger();
        ledger.offer(&asking.uid, &snapshot.nodes()[only.node], only.gpus, service.now());
    }
}

/// Indices of the nodes that pass, and of those that are rejected.
pub fn answer<'a>(
    nodes: &'a AskedNodes<'a>,
    places: impl Iterator<Item = usize>,
    refused: impl Iterator<Item = (usize, &'static str)>,
) -> FilterResult<'a> {
    let failed_and_unresolvable_nodes = refused.map(|(place, phrase)| (nodes.name(place), phrase)).collect();
    match nodes {
        AskedNodes::Names(_) => FilterResult {
            node_names: Some(places.map(|place| nodes.name(place)).collect()),
            failed_and_unresolvable_nodes,
            ..FilterResult::default()
        },
        AskedNodes::Whole(whole) => {
            let items = places.map(|place| whole[place].1).collect();
            let nodes = Some(RawNodeList { api_version: "v1", kind: "NodeList", items });
            FilterResult { nodes, failed_and_unresolvable_nodes, ..FilterResult::default() }
        }
    }
}

fn refuse(
    extender: &Extender,
    asking: &VerbRequest,
    snapshot: &Snapshot,
    nodes: &AskedNodes<'_>,
    list: &Shortlist,
) {
    extender.service.ledger().note_refused(&asking.uid, Some(nodes.in_snapshot(snapshot)));
    let code = list.refused.first().map_or("no-nodes", |(_, misfit)| misfit.code());
    count_answer(extender, "refused", code);
    let (key, uid) = (asking.key.clone(), asking.uid.clone());
    let text = refusal_text(nodes, list);
    extender.control_plane.record_event(PodEvent { key, uid, kind: PodEventReason::Unschedulable, text });
}

/// `0 of 40 nodes fit. 38 × no single GPU has room now, such as node-3: …`
fn refusal_text(nodes: &AskedNodes<'_>, list: &Shortlist) -> String {
    let mut reasons: BTreeMap<&str, (u32, usize, Misfit)> = BTreeMap::new();
    for (place, misfit) in &list.refused {
        reasons.entry(misfit.code()).or_insert((0, *place, *misfit)).0 += 1;
    }
    let mut text = format!("0 of {} nodes fit.", nodes.len());
    for (count, place, misfit) in reasons.values() {
        let example = nodes.name(*place);
        write!(text, " {count} × {}, such as {example}: {misfit}.", misfit.phrase())
            .expect("a String takes any text");
    }
    text
}

fn count_answer(extender: &Extender, outcome: &str, code: &str) {
    extender.service.metrics.answers.with_label_values(&["filter", outcome, code]).inc();
}

fn count_refusals(extender: &Extender, list: &Shortlist) {
    let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
    for (_, misfit) in &list.refused {
        *counts.entry(misfit.code()).or_default() += 1;
    }
    for (code, count) in counts {
        extender.service.metrics.refusals.with_label_values(&[code]).inc_by(count);
    }
}
