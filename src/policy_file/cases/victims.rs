//! Why a case's pod evicts other pods than expected: what each set costs, and what protects a pod.

use super::CaseDecision;
use stowage_scheduling::evicting::{EvictionCost, PreemptionCandidate};
use stowage_scheduling::explaining::eviction_cost_text;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::{Ledger, PotentialVictim};

/// Explains the found and the expected victims, each with its eviction cost. `case` is the case's pod, which fits nowhere.
pub fn explain_victims(
    ledger: &Ledger,
    case: &PodUid,
    answer: &CaseDecision<'_>,
    wanted: &[&str],
) -> Vec<String> {
    let preemptor = ledger.preemptor(case);
    let candidates = ledger.candidates_for(&preemptor, &answer.nodes);
    let mut reasons = Vec::new();
    let found = answer.victim_set.as_ref();
    match found {
        Some(set) => reasons.extend(
            set.evicted()
                .filter_map(|uid| describe_eviction_cost(ledger, &candidates, uid)),
        ),
        None => reasons.push("no set of pods that may be evicted would free enough VRAM".into()),
    }
    if wanted.is_empty() {
        reasons.push("the pod fits nowhere unless others leave".into());
    }
    let (mut expected_victims, mut are_all_evictable) = (Vec::new(), !wanted.is_empty());
    for name in wanted
        .iter()
        .filter(|name| !answer.victims.iter().any(|victim| victim == *name))
    {
        let pod = ledger
            .pod_states()
            .into_iter()
            .find(|(uid, pod)| *pod.key.name == **name && *uid != case);
        let Some((uid, _)) = pod else {
            reasons.push(format!("{name} is not among cluster.pods"));
            are_all_evictable = false;
            continue;
        };
        match ledger.keep_reason_of(&preemptor, &answer.demand, uid) {
            Some(why) => {
                reasons.push(format!("{name} cannot be evicted: {why}"));
                are_all_evictable = false;
            }
            None => reasons.extend(describe_eviction_cost(ledger, &candidates, uid)),
        }
    }
    for name in wanted {
        let expected_victim = candidates.iter().find_map(|candidate| {
            victim_named(ledger, candidate, name).map(|one| (&candidate.node, one))
        });
        are_all_evictable &= expected_victim.is_some();
        expected_victims.extend(expected_victim);
    }
    reasons.extend(
        found
            .filter(|_| are_all_evictable)
            .and_then(|set| deciding_difference(&set.eviction_cost, &expected_victims)),
    );
    reasons
}

fn victim_named<'a>(
    ledger: &Ledger,
    candidate: &'a PreemptionCandidate,
    name: &str,
) -> Option<&'a PotentialVictim> {
    let is_it = |one: &&PotentialVictim| {
        ledger
            .pod_state(&one.uid)
            .is_some_and(|pod| *pod.key.name == *name)
    };
    candidate.potential_victims.iter().find(is_it)
}

/// `old on a, priority -1, loses 3.6 GPU-seconds: work 3.5, restart 0.1`.
fn describe_eviction_cost(
    ledger: &Ledger,
    candidates: &[PreemptionCandidate],
    uid: &PodUid,
) -> Option<String> {
    let name = &ledger.pod_state(uid)?.key.name;
    let find = |candidate: &'_ PreemptionCandidate| -> Option<(NodeName, PotentialVictim)> {
        let victim = candidate
            .potential_victims
            .iter()
            .find(|one| one.uid == *uid)?;
        Some((candidate.node.clone(), victim.clone()))
    };
    let (node, victim) = candidates.iter().find_map(find)?;
    Some(format!(
        "{name} on {node}, priority {}, {}",
        victim.priority,
        eviction_cost_text(&victim.eviction_cost)
    ))
}

/// What decides between the found set and the expected pods.
fn deciding_difference(
    found: &EvictionCost,
    wanted: &[(&NodeName, &PotentialVictim)],
) -> Option<String> {
    let (node, _) = wanted.first()?;
    if wanted.iter().any(|(other, _)| other != node) {
        return Some(
            "the expected pods are on several nodes, and the pod needs VRAM on one".into(),
        );
    }
    let cost = wanted
        .iter()
        .fold(EvictionCost::default(), |cost, (_, victim)| {
            cost.plus(victim)
        });
    if cost <= *found {
        return Some("evicting the expected pods alone does not free enough VRAM".into());
    }
    let differs = [
        (
            cost.violations != found.violations,
            "overdraws fewer disruption budgets",
        ),
        (
            cost.from_guarantee != found.from_guarantee,
            "takes nothing of a tenant's guarantee",
        ),
        (
            cost.priority != found.priority,
            "has the lower highest priority",
        ),
        (
            cost.spared != found.spared,
            "is of tenants that borrow more",
        ),
        (cost.cost != found.cost, "loses fewer GPU-seconds"),
        (
            cost.deletion_cost != found.deletion_cost,
            "has the lower highest pod deletion cost",
        ),
        (cost.victims != found.victims, "is of fewer pods"),
        (cost.evicted != found.evicted, "frees less VRAM"),
    ];
    let (_, what) = differs.into_iter().find(|(differs, _)| *differs)?;
    Some(format!("the set that was found {what}, which decides"))
}
