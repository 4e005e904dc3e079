//! The `prioritize` verb: scores of 0 to 10 for the nodes that passed filter.

use super::filter::{DecisionView, FilterDecision, asking};
use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, HostPriority};
use super::{Extender, shadow};
use crate::scheduling::placing::rank::{ScheduleAttempt, score_steps, shortlist};
use crate::scheduling::policy::Mode;

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.service.metrics.answers;
    let zeros = || nodes.names().map(|host| HostPriority { host, score: 0 }).collect::<Vec<_>>();
    let Ok(mut asking) = asking(extender, &args.pod)? else {
        answers.with_label_values(&["prioritize", "refused", "invalid-request"]).inc();
        return Ok(zeros());
    };
    let view = DecisionView::take(&mut extender.service.ledger(), &mut asking);
    let attempt = ScheduleAttempt { limit: nodes.len().max(1), ..view.attempt() };
    let list = shortlist(&view.snapshot, &asking.demand, nodes.names(), attempt);
    if view.policy.mode == Mode::Shadow {
        shadow::prioritize(extender, &FilterDecision { asking, view, list });
        return Ok(zeros());
    }
    if let Some(first) = list.best.first() {
        let mut ledger = extender.service.ledger();
        ledger.offer(&asking.uid, &view.snapshot.nodes()[first.node], first.gpus, extender.service.now());
    }
    answers.with_label_values(&["prioritize", "ranked", ""]).inc();
    let mut hosts = zeros();
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.asked].score = step;
    }
    Ok(hosts)
}
