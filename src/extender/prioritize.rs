//! `prioritize`: the order of the nodes that filter passed, as 0 to 10.

use super::Extender;
use super::filter::{View, asking};
use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, HostPriority};
use crate::scheduling::rank::{Attempt, score_steps, shortlist};

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.service.metrics.answers;
    let Ok(mut asking) = asking(extender, &args.pod)? else {
        answers.with_label_values(&["prioritize", "refused", "not-understood"]).inc();
        return Ok(nodes.names().map(|host| HostPriority { host, score: 0 }).collect());
    };
    let view = View::take(&mut extender.service.ledger(), &mut asking);
    let attempt = Attempt { limit: nodes.len().max(1), ..view.attempt() };
    let list = shortlist(&view.snapshot, &asking.demand, nodes.names(), attempt);
    if let Some(first) = list.best.first() {
        let mut ledger = extender.service.ledger();
        ledger.offer(&asking.uid, &view.snapshot.nodes()[first.node], first.gpus, extender.service.now());
    }
    answers.with_label_values(&["prioritize", "ranked", ""]).inc();
    let mut hosts: Vec<HostPriority<'a>> =
        nodes.names().map(|host| HostPriority { host, score: 0 }).collect();
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.asked].score = step;
    }
    Ok(hosts)
}
