//! Compares two policies on one cluster: which pods change class, nodes or victims.

use super::{cluster, decide};
use serde::Serialize;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::ledger::{
    ObservedPhase, ObservedWaiting, PodObservation, PodPhase, PodState,
};
use stowage_scheduling::policy::{Policy, Preemptibility};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{PodObserved, PodReleased};
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;

/// One policy's decision for a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodDecision {
    pub class: String,
    pub tenant: Option<String>,
    pub preemptible: bool,
    /// Nodes it could go to, best first; for a bound pod, if it were new.
    pub nodes: Vec<String>,
    /// The pods it would evict if no node fits.
    pub victims: Vec<String>,
}

/// A pod for which two policies decide differently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DecisionChange {
    pub pod: PodKey,
    /// The node that the pod is bound to, if it is.
    pub node: Option<String>,
    pub old: PodDecision,
    pub new: PodDecision,
}

/// The differences between two policies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyComparison {
    /// Pods that were compared.
    pub pods: usize,
    pub changes: Vec<DecisionChange>,
    /// Nodes that only one policy places pods on, or that admit different classes, each with the admitted classes.
    pub nodes: Vec<NodeChange>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeChange {
    pub node: String,
    pub old: String,
    pub new: String,
}

/// Compares the decisions of two policies on one cluster: `old` and `new` have the same pods. Changes are in order of pod.
pub fn compare(old: &mut Cluster, new: &mut Cluster) -> PolicyComparison {
    let mut pods: Vec<(PodKey, PodUid)> = old
        .ledger()
        .pod_states()
        .into_iter()
        .map(|(uid, entry)| (entry.key.clone(), uid.clone()))
        .collect();
    pods.sort_unstable();
    let mut comparison = PolicyComparison {
        pods: pods.len(),
        nodes: node_changes(old, new),
        changes: Vec::new(),
    };
    for (pod, uid) in pods {
        let (Some(before), Some(after)) = (decision_for(old, &uid), decision_for(new, &uid)) else {
            continue;
        };
        if before != after {
            let node = old
                .ledger()
                .pod_state(&uid)
                .and_then(PodState::node)
                .map(ToString::to_string);
            comparison.changes.push(DecisionChange {
                pod,
                node,
                old: before,
                new: after,
            });
        }
    }
    comparison
}

/// A ledger's decision for one of its pods. The ledger is left as it was.
fn decision_for(cluster: &mut Cluster, uid: &PodUid) -> Option<PodDecision> {
    let policy = cluster.ledger().policy().clone();
    let entry = cluster.ledger().pod_state(uid)?.clone();
    cluster.apply(PodReleased(uid.clone()));
    let answer = decide(cluster, &policy, entry.demand.clone());
    let best = answer
        .shortlist
        .best
        .iter()
        .map(|candidate| answer.nodes[candidate.query_index].to_string());
    let nodes: Vec<String> = best.collect();
    let victims = answer.victims.clone();
    cluster.apply(PodReleased(cluster::uid_from_name(super::CASE_POD)));
    restore_pod(cluster, uid, entry.clone());
    let class = policy.class(entry.demand.class);
    Some(PodDecision {
        class: class.name.clone(),
        tenant: entry
            .demand
            .tenant
            .and_then(|id| policy.tenant(id))
            .map(|tenant| tenant.name.clone()),
        preemptible: class.eviction == Preemptibility::ForHigherPriority,
        nodes,
        victims,
    })
}

fn restore_pod(cluster: &mut Cluster, uid: &PodUid, entry: PodState) {
    let now = cluster.ledger().now();
    let leaving = match &entry.phase {
        PodPhase::Bound(bound) => bound.leaving,
        _ => None,
    };
    let observed_disruption = Some(ObservedDisruptionInfo::from_disruption_info(
        &entry.disruption_info,
        leaving,
        now,
    ));
    let state = match entry.phase {
        PodPhase::Bound(bound) => ObservedPhase::Bound {
            node: bound.node,
            devices: bound.devices,
            starting: entry.starting.is_some(),
            ran: Some(now.since(bound.started)),
        },
        PodPhase::Waiting(waiting) => ObservedPhase::Waiting(ObservedWaiting {
            reservation: waiting.reservation,
            ..ObservedWaiting::default()
        }),
        // A dump has no Binding in progress.
        PodPhase::Assumed(_) => ObservedPhase::Waiting(ObservedWaiting::default()),
    };
    cluster.apply(PodObserved(PodObservation {
        uid: uid.clone(),
        key: entry.key,
        demand: entry.demand,
        state,
        observed: observed_disruption,
    }));
}

fn node_changes(old: &mut Cluster, new: &mut Cluster) -> Vec<NodeChange> {
    let (old_policy, new_policy) = (old.ledger().policy().clone(), new.ledger().policy().clone());
    let (before, after) = (old.snapshot(), new.snapshot());
    let changes = before.nodes().iter().filter_map(|node| {
        let other = after.node(node.name.as_str())?;
        let (old, new) = (
            describe_node(&old_policy, node),
            describe_node(&new_policy, other),
        );
        (old != new).then(|| NodeChange {
            node: node.name.to_string(),
            old,
            new,
        })
    });
    changes.collect()
}

/// `stowage, classes fraud and credit, 72.0 GiB`.
fn describe_node(policy: &Policy, node: &stowage_scheduling::vocabulary::node::Node) -> String {
    use stowage_scheduling::placing::fit::node_exclusion;
    use stowage_scheduling::vocabulary::node::NodeKind;
    let kind = match node.kind {
        NodeKind::Stowage => "stowage",
        NodeKind::DevicePlugin => "device plugin",
        NodeKind::Dra => "DRA driver",
    };
    let is_admitted = |name: &&str| {
        policy
            .class_named(name)
            .is_some_and(|id| node.classes.contains(id))
    };
    let names: Vec<&str> = policy
        .classes()
        .iter()
        .map(|class| class.name.as_str())
        .collect();
    let admitted: Vec<&str> = names.iter().copied().filter(is_admitted).collect();
    let classes = if admitted.len() == names.len() {
        "all classes".into()
    } else {
        admitted.join(", ")
    };
    let exclusion = node_exclusion(node);
    let closed = match (&exclusion, node.closed, node.miscut) {
        (Some(misfit), ..) => misfit.phrase(),
        (_, true, _) => "no fresh report (telemetry.expired: refuse)",
        (_, _, true) => "its GPUs are not cut as expected",
        _ => return format!("{kind}, {classes}, {} allocatable", node.capacity()),
    };
    format!("{kind}, {classes}, closed: {closed}")
}
