//! The dry run of preemption, and the choice among the candidates that the extender keeps.
//!
//! Pure. The scheduler evicts and nominates; the cycle calls the extender.

use super::extender::ExtenderVictims;
use super::filters::{Resolvable, run_filters};
use super::message::{self, NodeRejections};
use super::objects::{SchedulerNode, SchedulerPod};
use super::view::SchedulerCache;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A node and its victims.
#[derive(Debug, Clone)]
pub(crate) struct DryRunCandidate {
    pub node: String,
    pub victims: Vec<Arc<SchedulerPod>>,
    pub pdb_violations: i64,
}

/// The result of the dry run.
#[derive(Debug, Default)]
pub(crate) struct DryRun {
    pub candidates: Vec<DryRunCandidate>,
    pub rejections: NodeRejections,
    /// Nodes on which all victims could be re-admitted: the extender rejected them, not the scheduler's own filters.
    pub errors: Vec<String>,
}

/// Why a pod may not preempt now.
pub(crate) fn ineligibility(
    pod: &SchedulerPod,
    view: &SchedulerCache,
    refusals: &NodeRejections,
) -> Option<&'static str> {
    if pod.never_preempts() {
        return Some("not eligible due to preemptionPolicy=Never.");
    }
    let node = pod.nominated_node.as_deref()?;
    // A nominated node that cannot be resolved makes the pod eligible before its terminating victims are checked.
    if refusals
        .get(node)
        .is_none_or(|refusal| refusal.resolvable == Resolvable::Never)
    {
        return None;
    }
    let waits = view
        .pods_on(node)
        .any(|other| other.priority < pod.priority && other.is_being_preempted());
    waits.then_some("not eligible due to a terminating pod on the nominated node.")
}

/// How many candidates are searched for among `nodes`.
pub(crate) fn max_candidates(nodes: usize) -> usize {
    /// The defaults of `minCandidateNodesPercentage` and `minCandidateNodesAbsolute`.
    const PERCENT: usize = 10;
    const ABSOLUTE: usize = 100;
    (nodes * PERCENT / 100).max(ABSOLUTE).min(nodes)
}

/// Tries the nodes that evictions might help, from `offset` on, until there are enough candidates.
pub fn dry_run(
    pod: &SchedulerPod,
    view: &SchedulerCache,
    refusals: &NodeRejections,
    offset: usize,
    ignored: Option<&str>,
) -> DryRun {
    let by_eviction = |node: &&Arc<SchedulerNode>| {
        refusals
            .get(&node.name)
            .is_some_and(|refusal| refusal.resolvable == Resolvable::ByEviction)
    };
    let nodes: Vec<&Arc<SchedulerNode>> = view.nodes().filter(by_eviction).collect();
    let wanted = max_candidates(nodes.len());
    let mut found = DryRun::default();
    for index in 0..nodes.len() {
        if found.candidates.len() >= wanted {
            break;
        }
        try_node(
            pod,
            view,
            nodes[(index + offset) % nodes.len()],
            ignored,
            &mut found,
        );
    }
    found
}

fn try_node(
    pod: &SchedulerPod,
    view: &SchedulerCache,
    node: &SchedulerNode,
    ignored: Option<&str>,
    found: &mut DryRun,
) {
    let (lower_priority, staying): (Vec<&Arc<SchedulerPod>>, Vec<&Arc<SchedulerPod>>) = view
        .pods_on(&node.name)
        .partition(|other| other.priority < pod.priority);
    if lower_priority.is_empty() {
        found
            .rejections
            .insert(node.name.clone(), message::no_victims());
        return;
    }
    let nominated = view.nominated_before(pod, &node.name);
    let mut usage =
        super::filters::NodeUsage::from_pods(staying.into_iter().chain(nominated).map(Arc::as_ref));
    if let Err(refusal) = run_filters(pod, node, &usage, ignored) {
        found.rejections.insert(node.name.clone(), refusal);
        return;
    }
    let mut victims = Vec::new();
    for other in sort_by_importance(lower_priority) {
        let mut with = usage.clone();
        with.add(other);
        match run_filters(pod, node, &with, ignored) {
            Ok(()) => usage = with,
            Err(_) => victims.push(other.clone()),
        }
    }
    if victims.is_empty() {
        found.errors.push(message::unexpected_victims(&node.name));
    } else {
        found.candidates.push(DryRunCandidate {
            node: node.name.clone(),
            victims,
            pdb_violations: 0,
        });
    }
}

/// Higher priority first, then the pod that has run longer.
fn sort_by_importance(mut pods: Vec<&Arc<SchedulerPod>>) -> Vec<&Arc<SchedulerPod>> {
    pods.sort_by(|a, b| {
        let key = |pod: &SchedulerPod| {
            (
                Reverse(pod.priority),
                pod.start_time().to_owned(),
                pod.uid.clone(),
            )
        };
        key(a).cmp(&key(b))
    });
    pods
}

/// The extender's answer as candidates; it may have replaced victims by any pods on the node.
pub fn candidates_from_answer(
    answer: BTreeMap<String, ExtenderVictims>,
    view: &SchedulerCache,
    extender: &str,
) -> Result<Vec<DryRunCandidate>, String> {
    let one = |(node, meta): (String, ExtenderVictims)| {
        if view.node(&node).is_none() {
            return Err(format!("nodeinfo not found for node name \"{node}\""));
        }
        let on_node = |uid: &String| {
            let victim = view.pods_on(&node).find(|pod| pod.uid == *uid).cloned();
            victim.ok_or_else(|| {
                format!(
                    "extender: {extender} claims to preempt pod (UID: &{{{uid}}}) on node: {node}, \
                     but the pod is not found on that node"
                )
            })
        };
        let victims: Vec<Arc<SchedulerPod>> =
            meta.uids.iter().map(on_node).collect::<Result<_, _>>()?;
        if victims.is_empty() {
            return Err(message::unexpected_victims(&node));
        }
        Ok(DryRunCandidate {
            node,
            victims,
            pdb_violations: meta.pdb_violations,
        })
    };
    answer.into_iter().map(one).collect()
}

/// Fewest budget violations, then the lowest highest priority, the lowest sum, the fewest victims, and the node whose most
/// important victim started last; then the name.
pub fn select_candidate(candidates: Vec<DryRunCandidate>) -> Option<DryRunCandidate> {
    candidates.into_iter().min_by_key(|candidate| {
        let priorities = || candidate.victims.iter().map(|victim| victim.priority);
        let highest = priorities().max().unwrap_or(i64::MIN);
        // As the real one does: shifted, so that more victims of negative priority do not make a lower sum.
        let sum: i128 = priorities()
            .map(|priority| i128::from(priority) + (1 << 31))
            .sum();
        let of_highest = candidate
            .victims
            .iter()
            .filter(|victim| victim.priority == highest);
        let started = of_highest
            .map(|victim| victim.start_time().to_owned())
            .min()
            .unwrap_or_default();
        let node = candidate.node.clone();
        (
            candidate.pdb_violations,
            highest,
            sum,
            candidate.victims.len(),
            Reverse(started),
            node,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::scheduler::filters::{NodeRejection, Rejector};
    use serde_json::json;

    fn pod(uid: &str, priority: i64, vram: &str, node: Option<&str>) -> Arc<SchedulerPod> {
        let container = json!({"resources": {"requests": {"stowage.dev/vram": vram}}});
        Arc::new(
            SchedulerPod::parse(Arc::new(json!({
                "metadata": {"name": uid, "uid": uid},
                "spec": {"nodeName": node, "priority": priority, "containers": [container]},
            })))
            .unwrap(),
        )
    }

    fn full_node() -> (SchedulerCache, NodeRejections) {
        let mut view = SchedulerCache::default();
        let status = json!({"allocatable": {"pods": "10", "stowage.dev/vram": "80Gi"}});
        view.apply_node(Arc::new(SchedulerNode::parse(Arc::new(
            json!({"metadata": {"name": "n"}, "status": status}),
        ))));
        for victim in [
            pod("low", 1, "40Gi", Some("n")),
            pod("lower", 0, "40Gi", Some("n")),
        ] {
            view.apply_pod(victim);
        }
        let refusal = NodeRejection::new(
            Rejector::Resources,
            Resolvable::ByEviction,
            "Insufficient stowage.dev/vram",
        );
        (view, NodeRejections::from([("n".to_owned(), refusal)]))
    }

    #[test]
    fn between_equals_the_pod_that_started_last_is_evicted_and_an_unstarted_one_before_it() {
        let on = |node: &str, started: Option<&str>| {
            let mut object =
                json!({"metadata": {"name": node, "uid": node}, "spec": {"priority": 1}});
            if let Some(started) = started {
                object["status"] = json!({"startTime": started});
            }
            let victims = vec![Arc::new(SchedulerPod::parse(Arc::new(object)).unwrap())];
            DryRunCandidate {
                node: node.into(),
                victims,
                pdb_violations: 0,
            }
        };
        let early = on("a", Some("2026-01-01T00:00:00Z"));
        let late = on("b", Some("2026-01-01T00:00:01Z"));
        let not_yet = on("c", None);
        let chosen = |candidates: &[&DryRunCandidate]| {
            select_candidate(candidates.iter().copied().cloned().collect())
                .unwrap()
                .node
        };
        assert_eq!(chosen(&[&early, &late]), "b");
        assert_eq!(chosen(&[&early, &late, &not_yet]), "c");
    }

    #[test]
    fn only_needed_victims_are_evicted_lowest_priority_first() {
        let (view, refusals) = full_node();
        let found = dry_run(&pod("p", 9, "40Gi", None), &view, &refusals, 0, None);
        let victims: Vec<&str> = found.candidates[0]
            .victims
            .iter()
            .map(|victim| victim.uid.as_str())
            .collect();
        assert_eq!(victims, ["lower"]);
    }

    #[test]
    fn a_refusal_by_the_extender_alone_re_admits_every_victim_and_is_an_error() {
        let (view, refusals) = full_node();
        let found = dry_run(
            &pod("p", 9, "40Gi", None),
            &view,
            &refusals,
            0,
            Some("stowage.dev/vram"),
        );
        assert!(found.candidates.is_empty());
        assert_eq!(
            found.errors,
            ["expected at least one victim pod on node \"n\""]
        );
    }

    #[test]
    fn no_pod_of_equal_priority_is_a_victim() {
        let (view, refusals) = full_node();
        let found = dry_run(&pod("p", 0, "40Gi", None), &view, &refusals, 0, None);
        assert_eq!(found.rejections["n"], message::no_victims());
    }

    #[test]
    fn a_uid_that_is_not_on_the_node_fails_the_whole_preemption() {
        let (view, _) = full_node();
        let foreign_pod = ExtenderVictims {
            uids: vec!["foreign".into()],
            pdb_violations: 0,
        };
        assert!(
            candidates_from_answer(
                BTreeMap::from([("n".to_owned(), foreign_pod)]),
                &view,
                "http://e"
            )
            .is_err()
        );
        let nobody = ExtenderVictims {
            uids: vec![],
            pdb_violations: 0,
        };
        assert!(
            candidates_from_answer(
                BTreeMap::from([("n".to_owned(), nobody)]),
                &view,
                "http://e"
            )
            .is_err()
        );
    }

    #[test]
    fn the_cheapest_victims_are_chosen() {
        let candidate = |node: &str, victims, pdb_violations| DryRunCandidate {
            node: node.into(),
            victims,
            pdb_violations,
        };
        let chosen = select_candidate(vec![
            candidate("violates", vec![pod("a", 0, "1", None)], 1),
            candidate("high", vec![pod("b", 5, "1", None)], 0),
            candidate(
                "two",
                vec![pod("c", 1, "1", None), pod("d", 1, "1", None)],
                0,
            ),
            candidate("one", vec![pod("e", 1, "1", None)], 0),
        ]);
        assert_eq!(chosen.unwrap().node, "one");
    }
}
