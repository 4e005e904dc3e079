//! The aggregated messages of a pod's PodScheduled condition.
//!
//! Pure. They must be exact: a text that differs from the last one is a write, and that write wakes the pod.

use super::filters::{NodeRejection, Rejector, Resolvable};
use std::collections::BTreeMap;

/// Node → why it was rejected. May contain names of nodes that do not exist, if the extender named them.
pub type NodeRejections = BTreeMap<String, NodeRejection>;

/// `0/6 nodes are available: 6 no room.`; nodes without a refusal add nothing.
pub(crate) fn fit_error(nodes: usize, rejections: &NodeRejections) -> String {
    let texts = rejections
        .values()
        .flat_map(|refusal| refusal.reasons.iter().map(String::as_str));
    fit_message(nodes, texts)
}

/// The message of a preemption dry run without candidates; a node that was not tried counts as one where preemption does not help.
pub(crate) fn no_candidates(nodes: usize, dry_run: &NodeRejections) -> String {
    let untried = nodes.saturating_sub(dry_run.len());
    let texts = dry_run
        .values()
        .flat_map(|refusal| refusal.reasons.iter().map(String::as_str));
    let not_helpful = std::iter::repeat_n("Preemption is not helpful for scheduling", untried);
    fit_message(nodes, texts.chain(not_helpful))
}

/// The joint message of the two PostFilter plugins when preemption failed.
pub(crate) fn post_filter(preemption: &str) -> String {
    format!("no new claims to deallocate, preemption: {preemption}")
}

/// Several errors as Go's aggregate prints them.
pub(crate) fn aggregate(errors: &[String]) -> String {
    match errors {
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

pub(crate) fn unexpected_victims(node: &str) -> String {
    format!("expected at least one victim pod on node \"{node}\"")
}

/// A node without pods of lower priority.
pub(crate) fn no_victims() -> NodeRejection {
    NodeRejection::new(
        Rejector::Resources,
        Resolvable::Never,
        "No preemption victims found for incoming pod",
    )
}

fn fit_message<'a>(nodes: usize, texts: impl Iterator<Item = &'a str>) -> String {
    let mut histogram: BTreeMap<&str, usize> = BTreeMap::new();
    texts.for_each(|text| *histogram.entry(text).or_default() += 1);
    let mut counted: Vec<String> = histogram
        .into_iter()
        .map(|(text, count)| format!("{count} {text}"))
        .collect();
    counted.sort();
    match counted.is_empty() {
        true => format!("0/{nodes} nodes are available:"),
        false => format!("0/{nodes} nodes are available: {}.", counted.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dry_run_names_the_nodes_it_did_not_try() {
        let dry_run = NodeRejections::from([("n0003".to_owned(), no_victims())]);
        assert_eq!(
            no_candidates(6, &dry_run),
            "0/6 nodes are available: 1 No preemption victims found for incoming pod, \
             5 Preemption is not helpful for scheduling."
        );
        assert_eq!(
            fit_error(6, &NodeRejections::new()),
            "0/6 nodes are available:"
        );
    }
}
