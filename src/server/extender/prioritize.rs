//! The `prioritize` verb: scores of 0 to 10 for the nodes that passed filter.

use super::filter::read_pod;
use super::request::BadRequest;
use super::wire::{ExtenderArgs, HostPriority, RequestNodes};
use super::{Extender, shadow};
use stowage_kubernetes_objects as objects;
use stowage_recording::answer::{AnsweredInput, Decision};
use stowage_scheduling::placing::rank::{Shortlist, score_steps};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::verbs::filter::offer_of;
use stowage_scheduling::verbs::prioritize::{PrioritizeAsked, prioritize as decide};
use stowage_scheduling::verbs::request::{DecisionView, VerbRequest};
use stowage_telemetry::NO_CODE;

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a RequestNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.state.metrics.answers;
    if objects::uses_claims_only(&args.pod) {
        return prioritize_claims(extender, args, nodes);
    }
    let Ok(request) = read_pod(extender, &args.pod)? else {
        answers
            .with_label_values(&["prioritize", "refused", "invalid-request"])
            .inc();
        return Ok(zero_scores(nodes));
    };
    let step = extender.state.traces().step("decide");
    let (view, recorded_input) = take_view(extender, request);
    let list = decide(&view, nodes.names());
    if let Some(first) = list.best.first().filter(|_| step.is_recorded()) {
        step.set(
            "stowage.nodes.first",
            nodes.name(first.query_index).to_owned(),
        );
    }
    drop(step);
    if view.policy.mode == Mode::Shadow {
        shadow::prioritize(extender, &view, &list);
        extender
            .state
            .record_answer(recorded_input, || Decision::Prioritize(list));
        return Ok(zero_scores(nodes));
    }
    if let Some(first) = list.best.first() {
        let offered = offer_of(&view, first);
        // Before the ledger changes: it copies a snapshot that is still in use.
        drop(view);
        extender.state.cluster().apply(offered);
    }
    answers
        .with_label_values(&["prioritize", "ranked", NO_CODE])
        .inc();
    let hosts = host_scores(nodes, &list);
    extender
        .state
        .record_answer(recorded_input, || Decision::Prioritize(list));
    Ok(hosts)
}

fn take_view(extender: &Extender, request: VerbRequest) -> (DecisionView, Option<AnsweredInput>) {
    let mut cluster = extender.state.cluster();
    (
        cluster.apply(PrioritizeAsked(request)),
        cluster.last_recorded_input(),
    )
}

/// The verb `prioritize-claims`: ranks nodes for pods whose devices kube-scheduler allocates by ResourceClaims. An extender entry
/// without `managedResources` sends it all pods, because none can name claims; every other pod gets zeros, at no cost.
pub(crate) fn prioritize_claims<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a RequestNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let count = |outcome| {
        extender
            .state
            .metrics
            .answers
            .with_label_values(&["prioritize", outcome, "claims"])
            .inc();
    };
    if !objects::uses_claims_only(&args.pod) {
        count("not-ranked");
        return Ok(zero_scores(nodes));
    }
    let (uid, key) = objects::identity(&args.pod)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let demand = objects::claims_demand(&args.pod, |traits| extender.state.classify(traits));
    // The ledger keeps no trace of the pod: its devices are kube-scheduler's to count.
    let request = VerbRequest {
        uid,
        key,
        demand,
        waiting: objects::waiting(&args.pod),
        disruption: None,
    };
    let (view, recorded_input) = take_view(extender, request);
    if view.policy.mode == Mode::Shadow {
        count("not-ranked");
        return Ok(zero_scores(nodes));
    }
    let list = decide(&view, nodes.names());
    count("ranked");
    let hosts = host_scores(nodes, &list);
    extender
        .state
        .record_answer(recorded_input, || Decision::Prioritize(list));
    Ok(hosts)
}

fn zero_scores<'a>(nodes: &'a RequestNodes<'a>) -> Vec<HostPriority<'a>> {
    nodes
        .names()
        .map(|host| HostPriority { host, score: 0 })
        .collect()
}

fn host_scores<'a>(nodes: &'a RequestNodes<'a>, list: &Shortlist) -> Vec<HostPriority<'a>> {
    let mut hosts = zero_scores(nodes);
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.query_index].score = step;
    }
    hosts
}
