//! The `filter` verb on the wire: reads the pod, asks the core, and answers which of the named nodes fit.

use super::request::BadRequest;
use super::wire::{ExtenderArgs, FilterResult, RawNodeList, RequestNodes};
use super::{Extender, shadow};
use k8s_openapi::api::core::v1::Pod;
use std::fmt::Write;
use std::time::Instant;
use stowage_kubernetes_objects as objects;
use stowage_recording::answer::{AnsweredInput, Decision};
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::explaining::remedy::RemedyChange;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::ledger::is_made_from_template;
use stowage_scheduling::placing::fit::sentence;
use stowage_scheduling::placing::rank::{RejectedNodes, Shortlist};
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::plural;
use stowage_scheduling::verbs::filter::{FilterAsked, decision_of, filter as decide};
use stowage_scheduling::verbs::request::{DecisionView, VerbRequest};
use stowage_scheduling::vocabulary::demand::RequestError;
use stowage_scheduling::vocabulary::device_plugin::GpuRequest;
use stowage_telemetry::NO_CODE;

/// A pod whose request is invalid.
#[derive(Debug)]
pub struct InvalidPod {
    pub uid: PodUid,
    pub key: PodKey,
    pub error: RequestError,
}

impl InvalidPod {
    /// Records an Event on the pod.
    pub fn record_event(&self, extender: &Extender) {
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
pub fn read_pod(
    extender: &Extender,
    pod: &Pod,
) -> Result<Result<VerbRequest, InvalidPod>, BadRequest> {
    let (uid, key) =
        objects::identity(pod).map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    match objects::classified_demand(pod, |traits| extender.state.classify(traits)) {
        Ok(demand) => {
            let disruption = Some(objects::disruption(pod, extender.state.clock.wall()));
            Ok(Ok(VerbRequest {
                uid,
                key,
                demand,
                waiting: objects::waiting(pod),
                disruption,
            }))
        }
        Err(RequestError::NoVram) if objects::requests_zero_gpus(pod) => {
            let demand = objects::claims_demand(pod, |traits| extender.state.classify(traits));
            Ok(Ok(VerbRequest {
                uid,
                key,
                demand,
                waiting: objects::waiting(pod),
                disruption: None,
            }))
        }
        Err(error @ RequestError::NoVram) => Err(BadRequest::unprocessable(error.code(), error)),
        Err(error) => Ok(Err(InvalidPod { uid, key, error })),
    }
}

pub fn filter<'a>(
    extender: &Extender,
    args: &'a ExtenderArgs<'a>,
    nodes: &'a RequestNodes<'a>,
) -> Result<FilterResult<'a>, BadRequest> {
    let pass_all = |code| {
        count_answer(extender, "passed", code);
        filter_result(nodes, 0..nodes.len(), std::iter::empty())
    };
    if objects::uses_claims_only(&args.pod) {
        return Ok(pass_all("claims"));
    }
    let request = match read_pod(extender, &args.pod)? {
        Ok(request) => request,
        Err(invalid) => {
            let let_through = shadow::filter_invalid(extender, nodes, &args.pod, &invalid);
            return Ok(let_through.unwrap_or_else(|| refuse_invalid(extender, nodes, &invalid)));
        }
    };
    if request.demand.ask == GpuRequest::Claims {
        // The ledger records the pod, for its Binding.
        take_view(extender, request);
        return Ok(pass_all("no-gpu"));
    }
    let step = extender.state.traces().step("decide");
    let (view, recorded_input) = take_view(extender, request);
    let score_cache = || extender.state.score_cache();
    let mut scores = score_cache().take(&view.snapshot, &view.request.demand, &view.policy);
    let shortlist = decide(&view, nodes.names(), &mut scores);
    score_cache().put(scores);
    if step.is_recorded() {
        step.set("stowage.nodes.passed", shortlist.best.len() as i64);
        step.set("stowage.nodes.refused", shortlist.rejected.len() as i64);
        step.set("stowage.policy.digest", view.policy.digest.to_string());
        if let (true, Some((_, misfit))) = (shortlist.best.is_empty(), shortlist.rejected.first()) {
            step.set("stowage.refusal", misfit.code());
        }
    }
    drop(step);
    let answer = match view.policy.mode {
        Mode::Enforce => enforce(extender, nodes, view, &shortlist),
        Mode::Shadow => shadow::filter(extender, nodes, &view, &shortlist),
    };
    extender
        .state
        .record_answer(recorded_input, || Decision::Filter(shortlist));
    Ok(answer)
}

fn take_view(extender: &Extender, request: VerbRequest) -> (DecisionView, Option<AnsweredInput>) {
    let (metrics, started) = (&extender.state.metrics, Instant::now());
    let mut cluster = extender.state.cluster();
    let locked = Instant::now();
    let view = cluster.apply(FilterAsked(request));
    let recorded_input = cluster.last_recorded_input();
    drop(cluster);
    metrics
        .ledger_wait
        .observe(locked.duration_since(started).as_secs_f64());
    metrics.ledger_hold.observe(locked.elapsed().as_secs_f64());
    (view, recorded_input)
}

fn enforce<'a>(
    extender: &Extender,
    nodes: &'a RequestNodes<'a>,
    view: DecisionView,
    list: &Shortlist,
) -> FilterResult<'a> {
    count_refusals(extender, list);
    let decided = decision_of(&view, list);
    let DecisionView {
        request, snapshot, ..
    } = view;
    let refusal = list
        .best
        .is_empty()
        .then(|| refusal_text(nodes, list, &snapshot));
    // Before the ledger changes: it copies a snapshot that is still in use.
    drop(snapshot);
    if let Some(decided) = decided {
        extender.state.cluster().apply(decided);
    }
    if let Some(text) = refusal {
        report_refusal(extender, &request, list, text);
        let phrases = list
            .rejected
            .iter()
            .map(|(index, misfit)| (*index, misfit.phrase()));
        return filter_result(nodes, std::iter::empty(), phrases);
    }
    count_answer(extender, "passed", NO_CODE);
    filter_result(
        nodes,
        list.best.iter().map(|candidate| candidate.query_index),
        std::iter::empty(),
    )
}

fn refuse_invalid<'a>(
    extender: &Extender,
    nodes: &'a RequestNodes<'a>,
    invalid: &InvalidPod,
) -> FilterResult<'a> {
    invalid.record_event(extender);
    count_answer(extender, "refused", invalid.error.code());
    let phrase = invalid.error.phrase();
    filter_result(
        nodes,
        std::iter::empty(),
        (0..nodes.len()).map(|index| (index, phrase)),
    )
}

/// The answer in the request's own form, from the indices of the nodes that pass and of those that are rejected.
pub fn filter_result<'a>(
    nodes: &'a RequestNodes<'a>,
    passed: impl Iterator<Item = usize>,
    refused: impl Iterator<Item = (usize, &'static str)>,
) -> FilterResult<'a> {
    let failed_and_unresolvable_nodes = refused
        .map(|(index, phrase)| (nodes.wire_name(index), phrase))
        .collect();
    match nodes {
        RequestNodes::Names(_) => FilterResult {
            node_names: Some(passed.map(|index| nodes.name(index)).collect()),
            failed_and_unresolvable_nodes,
            ..FilterResult::default()
        },
        RequestNodes::Whole(whole) => {
            let items = passed.map(|index| whole[index].1).collect();
            let nodes = Some(RawNodeList {
                api_version: "v1",
                kind: "NodeList",
                items,
            });
            FilterResult {
                nodes,
                failed_and_unresolvable_nodes,
                ..FilterResult::default()
            }
        }
    }
}

fn report_refusal(extender: &Extender, request: &VerbRequest, list: &Shortlist, mut text: String) {
    let code = list
        .rejected
        .first()
        .map_or("no-nodes", |(_, misfit)| misfit.code());
    count_answer(extender, "refused", code);
    let (key, uid) = (request.key.clone(), request.uid.clone());
    // It is of the pod's own namespace, so the Event may name it. A copy of the ledger is dear for a pod that has none.
    if is_made_from_template(&key, &request.demand)
        && let Some(old) = extender.state.ledger_copy().blocking_predecessor(&uid)
    {
        write!(
            text,
            " In a rolling update, {}.",
            RemedyChange::from_predecessor(old)
        )
        .expect("a String takes any text");
    }
    extender.control_plane.record_event(PodEvent {
        key,
        uid,
        kind: PodEventReason::Unschedulable,
        text,
    });
}

/// `0 of 40 nodes fit. 38 × no GPU can take the pod now, such as node-3: …`
fn refusal_text(nodes: &RequestNodes<'_>, list: &Shortlist, snapshot: &Snapshot) -> String {
    let mut text = format!("0 of {} fit.", plural(nodes.len(), "node"));
    for RejectedNodes {
        count,
        first_query_index: first,
        misfit,
        ..
    } in list.rejected_by_code()
    {
        let example = nodes.name(first);
        let why = sentence(&misfit, snapshot.node(example));
        write!(
            text,
            " {count} × {}, such as {example}: {why}.",
            misfit.phrase()
        )
        .expect("a String takes any text");
    }
    text
}

fn count_answer(extender: &Extender, outcome: &str, code: &str) {
    extender
        .state
        .metrics
        .answers
        .with_label_values(&["filter", outcome, code])
        .inc();
}

fn count_refusals(extender: &Extender, list: &Shortlist) {
    for RejectedNodes { code, count, .. } in list.rejected_by_code() {
        extender
            .state
            .metrics
            .refusals
            .with_label_values(&[code])
            .inc_by(count.into());
    }
}
