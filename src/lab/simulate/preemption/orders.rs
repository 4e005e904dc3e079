//! Victim orders: Stowage's own, and those that it is compared with. Each picks a node by its own rule, and victims there until
//! the pod fits on single GPUs; pods that may not be evicted (priority, class) are left out in all of them.

use super::kube_scheduler;
use serde::Serialize;
use std::cmp::Reverse;
use stowage_scheduling::evicting;
use stowage_scheduling::evicting::{BudgetRules, PreemptionCandidate, SearchEffort};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::{Ledger, PodPhase};
use stowage_scheduling::ledger::{PotentialVictim, discharge, settle_class_exclusions};
use stowage_scheduling::placing::pack;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::gpu::GpuSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum VictimOrder {
    /// The cheapest set by the production eviction cost, with the production search.
    Stowage,
    /// kube-scheduler's choice by sums over nodes; if the pod fits on no single GPU then, more are evicted in its order.
    Stock,
    /// The same rules applied to single GPUs: better than kube-scheduler can do.
    StockOnGpus,
    /// The youngest pod is evicted first; the node is the one whose oldest victim is the youngest.
    YoungestFirst,
    /// The lowest priority is evicted first; the node is the one whose highest victim is the lowest, then with the fewest
    /// victims.
    LowestPriorityFirst,
}

/// A preemption: the node, its victims, and the pod's GPUs there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimChoice {
    pub node: NodeName,
    pub gpus: GpuSet,
    /// The pods to evict for it.
    pub evicted: Vec<PodUid>,
    /// The pods that must be gone before it can arrive: its victims, and pods that leave anyway.
    pub awaited: Vec<PodUid>,
    pub grace: Millis,
    /// False if a search reached its limit before it was complete.
    pub exact: bool,
}

/// A pod that may be evicted, and since when it has been running.
#[derive(Debug, Clone, Copy)]
pub struct RunningPod<'a> {
    pub pod: &'a PotentialVictim,
    pub started: Moment,
}

impl VictimOrder {
    pub const ALL: [Self; 5] =
        [Self::Stowage, Self::Stock, Self::StockOnGpus, Self::YoungestFirst, Self::LowestPriorityFirst];

    pub fn said(self) -> &'static str {
        match self {
            Self::Stowage => "stowage",
            Self::Stock => "kube-scheduler",
            Self::StockOnGpus => "kube-scheduler, with single GPUs",
            Self::YoungestFirst => "youngest first",
            Self::LowestPriorityFirst => "lowest priority first",
        }
    }

    /// `None` if no set of evictions would be enough on any node.
    pub fn choose(
        self,
        ledger: &Ledger,
        candidates: &[PreemptionCandidate],
        demand: &Demand,
    ) -> Option<VictimChoice> {
        if self == Self::Stowage {
            return cheapest(candidates, demand);
        }
        let candidates: Vec<&PreemptionCandidate> =
            candidates.iter().filter(|candidate| could_fit(candidate, demand)).collect();
        let running_pods = |candidate| running_pods(ledger, candidate);
        match self {
            Self::Stowage => unreachable!("it was answered"),
            Self::Stock => kube_scheduler::by_sums(ledger, &candidates, demand),
            Self::StockOnGpus => kube_scheduler::on_gpus(ledger, &candidates, demand),
            Self::YoungestFirst => best(&candidates, demand, |candidate| {
                let mut running_pods = running_pods(candidate);
                running_pods.sort_by_key(|one| (Reverse(one.started), &one.pod.uid));
                let victims = in_order(candidate, demand, &running_pods);
                let eldest = victims.iter().map(|one| one.started).min();
                ((Reverse(eldest), victims.len(), &candidate.node), victims)
            }),
            Self::LowestPriorityFirst => best(&candidates, demand, |candidate| {
                let mut running_pods = running_pods(candidate);
                running_pods.sort_by_key(|one| (one.pod.priority, &one.pod.uid));
                let victims = in_order(candidate, demand, &running_pods);
                let highest = victims.iter().map(|one| one.pod.priority).max();
                ((highest, victims.len(), &candidate.node), victims)
            }),
        }
    }
}

fn cheapest(candidates: &[PreemptionCandidate], demand: &Demand) -> Option<VictimChoice> {
    let set = evicting::cheapest(candidates, demand, BudgetRules::Keep, SearchEffort::default())?;
    Some(VictimChoice {
        node: set.node.clone(),
        gpus: set.gpus,
        evicted: set.evicted().cloned().collect(),
        awaited: set.all_victims(),
        grace: set.longest_grace,
        exact: set.exact,
    })
}

/// The least by its key among the victim sets that the rule chooses on each candidate node.
pub fn best<'a, K: Ord>(
    candidates: &[&'a PreemptionCandidate],
    demand: &Demand,
    rule: impl Fn(&'a PreemptionCandidate) -> (K, Vec<RunningPod<'a>>),
) -> Option<VictimChoice> {
    let ruled = candidates.iter().map(|candidate| (rule(candidate), *candidate));
    let ((_, victims), candidate) = ruled.min_by(|((a, _), _), ((b, _), _)| a.cmp(b))?;
    Some(choice(candidate, demand, &victims))
}

/// The pod's placement after the victims are gone; it fits there then.
pub fn choice(candidate: &PreemptionCandidate, demand: &Demand, victims: &[RunningPod<'_>]) -> VictimChoice {
    let evicted: Vec<PodUid> = victims.iter().map(|one| one.pod.uid.clone()).collect();
    VictimChoice {
        node: candidate.node.clone(),
        gpus: fits_without(candidate, demand, victims).expect("victims are chosen until the pod fits"),
        awaited: evicted.clone(),
        evicted,
        grace: victims.iter().map(|one| one.pod.grace).max().unwrap_or_default(),
        exact: true,
    }
}

/// All pods that may be evicted from a node.
pub fn running_pods<'a>(ledger: &Ledger, candidate: &'a PreemptionCandidate) -> Vec<RunningPod<'a>> {
    let started = |uid: &PodUid| match &ledger.pod_state(uid)?.phase {
        PodPhase::Bound(bound) => Some(bound.started),
        _ => None,
    };
    let running_pod = |resident: &'a PotentialVictim| RunningPod {
        pod: resident,
        started: started(&resident.uid).unwrap_or_else(|| ledger.now()),
    };
    candidate.potential_victims.iter().map(running_pod).collect()
}

/// The shortest prefix of these whose eviction makes the pod fit, without those whose eviction is not needed.
fn in_order<'a>(
    candidate: &PreemptionCandidate,
    demand: &Demand,
    running_pods: &[RunningPod<'a>],
) -> Vec<RunningPod<'a>> {
    let enough = (0..=running_pods.len())
        .find(|count| fits_without(candidate, demand, &running_pods[..*count]).is_some());
    let mut victims = running_pods[..enough.unwrap_or(running_pods.len())].to_vec();
    for place in (0..victims.len()).rev() {
        let spared = victims.remove(place);
        if fits_without(candidate, demand, &victims).is_none() {
            victims.insert(place, spared);
        }
    }
    victims
}

/// The GPUs that the pod would get if these were evicted.
pub fn fits_without(
    candidate: &PreemptionCandidate,
    demand: &Demand,
    victims: &[RunningPod<'_>],
) -> Option<GpuSet> {
    let mut gpus = candidate.gpus.clone();
    victims.iter().for_each(|one| discharge(&mut gpus, one.pod));
    settle_class_exclusions(&candidate.class_exclusions, &mut gpus, |uid| {
        victims.iter().any(|one| one.pod.uid == *uid)
    });
    pack::choose(&gpus, demand, GpuSet::ALL)
}

fn could_fit(candidate: &PreemptionCandidate, demand: &Demand) -> bool {
    let all: Vec<RunningPod<'_>> = candidate
        .potential_victims
        .iter()
        .map(|resident| RunningPod { pod: resident, started: Moment::default() })
        .collect();
    fits_without(candidate, demand, &all).is_some()
}
