//! The `prioritize` verb: scores of 0 to 10 for the nodes that passed filter.

use super::filter::read_pod;
use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, HostPriority};
use super::{Extender, shadow};
use crate::scheduling::placing::rank::score_steps;
use crate::scheduling::policy::Mode;
use crate::scheduling::verbs::filter::offered;
use crate::scheduling::verbs::prioritize::{PrioritizeAsked, prioritize as decide};

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.service.metrics.answers;
    let zeros = || nodes.names().map(|host| HostPriority { host, score: 0 }).collect::<Vec<_>>();
    let Ok(request) = read_pod(extender, &args.pod)? else {
        answers.with_label_values(&["prioritize", "refused", "invalid-request"]).inc();
        return Ok(zeros());
    };
    let view = extender.service.cluster().apply(PrioritizeAsked(request));
    let list = decide(&view, nodes.names());
    if view.policy.mode == Mode::Shadow {
        shadow::prioritize(extender, &view, &list);
        return Ok(zeros());
    }
    if let Some(first) = list.best.first() {
        extender.service.cluster().apply(offered(&view, first));
    }
    answers.with_label_values(&["prioritize", "ranked", ""]).inc();
    let mut hosts = zeros();
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.asked].score = step;
    }
    Ok(hosts)
}
