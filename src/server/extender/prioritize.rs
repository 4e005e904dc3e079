//! The `prioritize` verb: scores of 0 to 10 for the nodes that passed filter.

use super::filter::read_pod;
use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, HostPriority};
use super::{Extender, shadow};
use stowage_kubernetes_objects as objects;
use stowage_recording::answer::{Asked, Decision};
use stowage_scheduling::placing::rank::{Shortlist, score_steps};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::verbs::filter::offered;
use stowage_scheduling::verbs::prioritize::{PrioritizeAsked, prioritize as decide};
use stowage_scheduling::verbs::request::{DecisionView, VerbRequest};
use stowage_telemetry::NO_CODE;

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.service.metrics.answers;
    if objects::asks_by_claims(&args.pod) {
        return prioritize_claims(extender, args, nodes);
    }
    let Ok(request) = read_pod(extender, &args.pod)? else {
        answers
            .with_label_values(&["prioritize", "refused", "invalid-request"])
            .inc();
        return Ok(zeros(nodes));
    };
    let step = extender.service.traces().step("decide");
    let (view, asked) = ask(extender, request);
    let list = decide(&view, nodes.names());
    if let Some(first) = list.best.first().filter(|_| step.is_recorded()) {
        step.set("stowage.nodes.first", nodes.name(first.asked).to_owned());
    }
    drop(step);
    if view.policy.mode == Mode::Shadow {
        shadow::prioritize(extender, &view, &list);
        extender
            .service
            .record_answer(asked, || Decision::Prioritize(list));
        return Ok(zeros(nodes));
    }
    if let Some(first) = list.best.first() {
        let offered = offered(&view, first);
        // Before the ledger changes: it copies a snapshot that is still in use.
        drop(view);
        extender.service.cluster().apply(offered);
    }
    answers
        .with_label_values(&["prioritize", "ranked", NO_CODE])
        .inc();
    let hosts = ranked(nodes, &list);
    extender
        .service
        .record_answer(asked, || Decision::Prioritize(list));
    Ok(hosts)
}

fn ask(extender: &Extender, request: VerbRequest) -> (DecisionView, Option<Asked>) {
    let mut cluster = extender.service.cluster();
    (cluster.apply(PrioritizeAsked(request)), cluster.asked())
}

/// The verb `prioritize-claims`: ranks nodes for pods whose devices kube-scheduler allocates by ResourceClaims. An extender entry
/// without `managedResources` sends it all pods, because none can name claims; every other pod gets zeros, at no cost.
pub(crate) fn prioritize_claims<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let count = |outcome| {
        extender
            .service
            .metrics
            .answers
            .with_label_values(&["prioritize", outcome, "claims"])
            .inc();
    };
    if !objects::asks_by_claims(&args.pod) {
        count("not-ranked");
        return Ok(zeros(nodes));
    }
    let (uid, key) = objects::identity(&args.pod)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let demand = objects::claims_demand(&args.pod, |traits| extender.service.classify(traits));
    // The ledger keeps no trace of the pod: its devices are kube-scheduler's to count.
    let request = VerbRequest {
        uid,
        key,
        demand,
        waiting: objects::waiting(&args.pod),
        disruption: None,
    };
    let (view, asked) = ask(extender, request);
    if view.policy.mode == Mode::Shadow {
        count("not-ranked");
        return Ok(zeros(nodes));
    }
    let list = decide(&view, nodes.names());
    count("ranked");
    let hosts = ranked(nodes, &list);
    extender
        .service
        .record_answer(asked, || Decision::Prioritize(list));
    Ok(hosts)
}

fn zeros<'a>(nodes: &'a AskedNodes<'a>) -> Vec<HostPriority<'a>> {
    nodes
        .names()
        .map(|host| HostPriority { host, score: 0 })
        .collect()
}

fn ranked<'a>(nodes: &'a AskedNodes<'a>, list: &Shortlist) -> Vec<HostPriority<'a>> {
    let mut hosts = zeros(nodes);
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.asked].score = step;
    }
    hosts
}
