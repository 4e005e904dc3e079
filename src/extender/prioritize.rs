//! `prioritize`: the order of the nodes that filter passed, as 0 to 10.

use super::Extender;
use super::filter::asking;
use super::request::BadRequest;
use super::wire::{AskedNodes, ExtenderArgs, HostPriority};
use crate::scheduling::rank::{Attempt, OwnRoom, score_steps, shortlist};

pub fn prioritize<'a>(
    extender: &Extender,
    args: &ExtenderArgs<'_>,
    nodes: &'a AskedNodes<'a>,
) -> Result<Vec<HostPriority<'a>>, BadRequest> {
    let answers = &extender.service.metrics.answers;
    let Ok(asking) = asking(extender, &args.pod)? else {
        answers.with_label_values(&["prioritize", "refused", "not-understood"]).inc();
        return Ok(nodes.names().map(|host| HostPriority { host, score: 0 }).collect());
    };
    let (snapshot, own_room, policy) = {
        let mut ledger = extender.service.ledger();
        (ledger.snapshot(), ledger.own_room(&asking.uid), ledger.policy().clone())
    };
    let own_room = own_room.as_ref().map(|(node, verdict)| OwnRoom { node, verdict: *verdict });
    let speeds = &policy.loading;
    let attempt = Attempt { limit: nodes.len().max(1), just_failed: None, own_room, speeds };
    let list = shortlist(&snapshot, &asking.demand, nodes.names(), attempt);
    if let Some(first) = list.best.first() {
        let mut ledger = extender.service.ledger();
        ledger.offer(&asking.uid, &snapshot.nodes()[first.node], first.gpus, extender.service.now());
    }
    answers.with_label_values(&["prioritize", "ranked", ""]).inc();
    let mut hosts: Vec<HostPriority<'a>> =
        nodes.names().map(|host| HostPriority { host, score: 0 }).collect();
    for (candidate, step) in list.best.iter().zip(score_steps()) {
        hosts[candidate.asked].score = step;
    }
    Ok(hosts)
}
