//! kube-scheduler's own choice of victims (default preemption): a dry run on each node that readmits the more important pods
//! first, and `pickOneNodeForPreemption` over the results. Once with VRAM as sums over nodes, as kube-scheduler knows it, and
//! once with the VRAM of single GPUs.
//!
//! It is simulated in its favor. It tries all nodes, not a hundred; a node on which no eviction would make the pod fit on
//! single GPUs is not offered; and if the pod does not fit after its evictions, more pods of the same node are evicted, where
//! the real one would continue with the next node.

use super::orders::{RunningPod, VictimChoice, best, choice, fits_without, running_pods};
use std::cmp::Reverse;
use stowage_scheduling::evicting::PreemptionCandidate;
use stowage_scheduling::ledger::Ledger;
use stowage_scheduling::units::Moment;
use stowage_scheduling::vocabulary::demand::Demand;

/// By sums over nodes, and then more victims in the same order until the pod fits on a GPU. Nodes whose sum is enough have no
/// victims for it; they are used if there is no other.
pub fn by_sums(
    ledger: &Ledger,
    candidates: &[&PreemptionCandidate],
    demand: &Demand,
) -> Option<VictimChoice> {
    let ruled: Vec<(&PreemptionCandidate, Vec<RunningPod<'_>>)> =
        candidates.iter().map(|candidate| (*candidate, victims_by_sum(ledger, candidate, demand))).collect();
    let with_victims = ruled.iter().filter(|(_, victims)| !victims.is_empty());
    let (candidate, victims) = with_victims
        .min_by_key(|(candidate, victims)| (rank(victims), &candidate.node))
        .or_else(|| ruled.iter().min_by_key(|(candidate, _)| &candidate.node))?;
    Some(choice(candidate, demand, &until_it_fits(ledger, candidate, demand, victims)))
}

/// The same dry run, with a filter for single GPUs.
pub fn on_gpus(
    ledger: &Ledger,
    candidates: &[&PreemptionCandidate],
    demand: &Demand,
) -> Option<VictimChoice> {
    best(candidates, demand, |candidate| {
        let all = most_important_first(ledger, candidate);
        let mut victims = all.clone();
        for one in &all {
            let without: Vec<RunningPod<'_>> =
                victims.iter().filter(|other| other.pod.uid != one.pod.uid).copied().collect();
            if fits_without(candidate, demand, &without).is_some() {
                victims = without;
            }
        }
        ((rank(&victims), &candidate.node), victims)
    })
}

/// Removes every pod of lower priority, then adds them back, the most important first, as long as the node's sum allows it.
fn victims_by_sum<'a>(
    ledger: &Ledger,
    candidate: &'a PreemptionCandidate,
    demand: &Demand,
) -> Vec<RunningPod<'a>> {
    let all = most_important_first(ledger, candidate);
    let freed = all.iter().map(|one| one.pod.vram()).sum();
    let mut left = ledger.sum_left_on(&candidate.node) + freed;
    let mut victims = Vec::new();
    for one in all {
        let without = left.minus(one.pod.vram());
        match without >= demand.vram() {
            true => left = without,
            false => victims.push(one),
        }
    }
    victims
}

fn until_it_fits<'a>(
    ledger: &Ledger,
    candidate: &'a PreemptionCandidate,
    demand: &Demand,
    victims: &[RunningPod<'a>],
) -> Vec<RunningPod<'a>> {
    let mut victims = victims.to_vec();
    let is_victim = |one: &RunningPod<'_>| victims.iter().any(|v| v.pod.uid == one.pod.uid);
    let mut others: Vec<RunningPod<'a>> =
        most_important_first(ledger, candidate).into_iter().filter(|one| !is_victim(one)).collect();
    while fits_without(candidate, demand, &victims).is_none() {
        let Some(least_important) = others.pop() else { break };
        victims.push(least_important);
    }
    victims
}

/// Higher priority first, then the pod that has run longer.
fn most_important_first<'a>(ledger: &Ledger, candidate: &'a PreemptionCandidate) -> Vec<RunningPod<'a>> {
    let mut all = running_pods(ledger, candidate);
    all.sort_by_key(|one| (Reverse(one.pod.priority), one.started, &one.pod.uid));
    all
}

/// The lowest highest priority, the lowest sum of priorities, the fewest victims, and the one whose most important victim
/// started last.
fn rank(victims: &[RunningPod<'_>]) -> impl Ord + use<> {
    let highest = victims.iter().map(|one| one.pod.priority).max();
    // Shifted, so that more victims of negative priority do not make a lower sum.
    let sum: u64 = victims.iter().map(|one| u64::from(one.pod.priority.abs_diff(i32::MIN))).sum();
    let of_highest = victims.iter().filter(|one| Some(one.pod.priority) == highest);
    let began: Option<Moment> = of_highest.map(|one| one.started).min();
    (highest, sum, victims.len(), Reverse(began))
}
