//! Two policies over one cluster: which pods become something else, where they could go, and who would have to leave.

use super::{ask, cluster};
use crate::ids::{PodKey, PodUid};
use crate::scheduling::ledger::{Ledger, Phase, PodEntry, Seen, SeenState, SeenWaiting};
use crate::scheduling::policy::{Eviction, Policy};
use crate::scheduling::stake::Shown;
use serde::Serialize;

/// What one policy says of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Verdict {
    pub class: String,
    pub tenant: Option<String>,
    pub preemptible: bool,
    /// Nodes it could go to, best first; of a bound pod, if it came anew.
    pub nodes: Vec<String>,
    /// If there is none: who would have to leave for it.
    pub victims: Vec<String>,
}

/// A pod of which two policies say different things.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    pub pod: PodKey,
    /// Where it is bound, if it is.
    pub node: Option<String>,
    pub old: Verdict,
    pub new: Verdict,
}

/// What changes from one policy to another.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Comparison {
    /// Pods that were looked at.
    pub pods: usize,
    pub changes: Vec<Change>,
    /// Nodes that the one takes pods on and the other does not, or not of the same classes, each with what they say.
    pub nodes: Vec<NodeChange>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeChange {
    pub node: String,
    pub old: String,
    pub new: String,
}

/// Both ledgers hold the same cluster, each under its policy. In order of pod; those of which nothing changes are left out.
pub fn compare(old: &mut Ledger, new: &mut Ledger) -> Comparison {
    let mut pods: Vec<(PodKey, PodUid)> =
        old.entries().into_iter().map(|(uid, entry)| (entry.key.clone(), uid.clone())).collect();
    pods.sort_unstable();
    let mut comparison = Comparison { pods: pods.len(), nodes: node_changes(old, new), changes: Vec::new() };
    for (pod, uid) in pods {
        let (Some(before), Some(after)) = (verdict(old, &uid), verdict(new, &uid)) else { continue };
        if before != after {
            let node = old.entry(&uid).and_then(PodEntry::node).map(ToString::to_string);
            comparison.changes.push(Change { pod, node, old: before, new: after });
        }
    }
    comparison
}

/// What a ledger's policy says of a pod in it. The ledger is left as it was.
fn verdict(ledger: &mut Ledger, uid: &PodUid) -> Option<Verdict> {
    let policy = ledger.policy().clone();
    let entry = ledger.entry(uid)?.clone();
    ledger.release(uid);
    let answer = ask(ledger, &policy, entry.demand.clone());
    let best = answer.list.best.iter().map(|candidate| answer.nodes[candidate.asked].to_string());
    let nodes: Vec<String> = best.collect();
    let victims = answer.victims.clone();
    ledger.release(&cluster::uid(super::CASE));
    put_back(ledger, uid, entry.clone());
    let class = policy.class(entry.demand.class);
    Some(Verdict {
        class: class.name.clone(),
        tenant: entry.demand.tenant.and_then(|id| policy.tenant(id)).map(|tenant| tenant.name.clone()),
        preemptible: class.eviction == Eviction::ForHigherPriority,
        nodes,
        victims,
    })
}

fn put_back(ledger: &mut Ledger, uid: &PodUid, entry: PodEntry) {
    let now = ledger.now();
    let leaving = match &entry.phase {
        Phase::Bound(bound) => bound.leaving,
        _ => None,
    };
    let shown = Some(Shown::of(&entry.stake, leaving, now));
    let state = match entry.phase {
        Phase::Bound(bound) => SeenState::Bound {
            node: bound.node,
            devices: bound.devices,
            starting: entry.starting.is_some(),
            ran: Some(now.since(bound.started)),
        },
        Phase::Waiting(waiting) => {
            SeenState::Waiting(SeenWaiting { hold: waiting.hold, ..SeenWaiting::default() })
        }
        // A dump has no Binding on its way.
        Phase::Assumed(_) => SeenState::Waiting(SeenWaiting::default()),
    };
    ledger.see(Seen { uid: uid.clone(), key: entry.key, demand: entry.demand, state, shown });
}

fn node_changes(old: &mut Ledger, new: &mut Ledger) -> Vec<NodeChange> {
    let (old_policy, new_policy) = (old.policy().clone(), new.policy().clone());
    let (before, after) = (old.snapshot(), new.snapshot());
    let changes = before.nodes().iter().filter_map(|node| {
        let other = after.node(node.name.as_str())?;
        let (old, new) = (said(&old_policy, node), said(&new_policy, other));
        (old != new).then(|| NodeChange { node: node.name.to_string(), old, new })
    });
    changes.collect()
}

/// `stowage, classes fraud and credit, 72.0 GiB`.
fn said(policy: &Policy, node: &crate::scheduling::node::Node) -> String {
    use crate::scheduling::node::NodeKind;
    let kind = match node.kind {
        NodeKind::Stowage => "stowage",
        NodeKind::DevicePlugin => "device plugin",
    };
    let is_admitted = |name: &&str| policy.class_named(name).is_some_and(|id| node.classes.contains(id));
    let names: Vec<&str> = policy.classes().iter().map(|class| class.name.as_str()).collect();
    let admitted: Vec<&str> = names.iter().copied().filter(is_admitted).collect();
    let classes = if admitted.len() == names.len() { "all classes".into() } else { admitted.join(", ") };
    let state = match (node.closed, node.miscut) {
        (true, _) => ", closed: nobody sees it",
        (_, true) => ", closed: its GPUs are not cut as expected",
        _ => "",
    };
    format!("{kind}, {classes}, {} to promise{state}", node.capacity())
}
