//! Victims for the pod: the core's own search, on the nodes that are nearest to fitting.

use super::request::with_priority;
use super::{GroupRestart, PreemptionNeeds, RemedyChange, Victim, candidate_on};
use crate::evicting::{
    BudgetRules, PreemptionCandidate, Shortfall, VictimGroup, VictimSet, cheapest_victims,
};
use crate::explaining::explanation::OthersPart;
use crate::explaining::facts::{Facts, MAX_NODES_SEARCHED_FOR_VICTIMS};
use crate::explaining::nodes::NodeOutline;
use crate::kube_filters::{AssumedNodeChange, FilterVerdict};
use crate::ledger::evictions::EvictionLimit;
use crate::ledger::{PodState, PotentialVictim};
use crate::placing::fit::{check_node_admission, evictions_could_resolve};
use crate::verbs::ClusterCopy;
use crate::vocabulary::demand::Demand;

/// The highest priority a user's PriorityClass may have; above it are the system's own.
const HIGHEST_USER_PRIORITY: i32 = 1_000_000_000;

/// The cheapest pods that the policy allows to evict: for the pod as it is, or, if no pod may be evicted for it, with the lowest
/// priority for which one may.
pub fn preempt(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
) -> Option<RemedyChange> {
    let demand = facts.demand();
    if let Some(found) = cheapest(cluster, facts, outline, demand) {
        let needs = match found.limit {
            _ if !demand.may_preempt => PreemptionNeeds::PreemptionPolicy,
            Some(limit) => PreemptionNeeds::Allowance(limit),
            None => PreemptionNeeds::Nothing,
        };
        return Some(found.remedy(cluster, facts, needs));
    }
    let highest = with_priority(demand, &facts.policy, HIGHEST_USER_PRIORITY);
    let found = cheapest(cluster, facts, outline, &highest)?;
    let lowest_sufficient = found.highest_priority().saturating_add(1);
    // With another priority it may be in another class: only what was tried is reported.
    let tried = cheapest(
        cluster,
        facts,
        outline,
        &with_priority(demand, &facts.policy, lowest_sufficient),
    )?;
    Some(tried.remedy(cluster, facts, PreemptionNeeds::Priority(lowest_sufficient)))
}

struct FoundVictims {
    node_index: usize,
    set: VictimSet,
    victims: Vec<PotentialVictim>,
    gangs: Vec<VictimGroup>,
    /// The eviction limit that forbids it now.
    limit: Option<EvictionLimit>,
}

fn cheapest(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
    demand: &Demand,
) -> Option<FoundVictims> {
    // For a pod that may not preempt, the explanation still shows which pods it would evict.
    let demand = &Demand {
        may_preempt: true,
        ..demand.clone()
    };
    let nodes = facts.snapshot.nodes();
    let could_help = |node_index: &usize| {
        check_node_admission(&nodes[*node_index], demand).is_ok()
            && evictions_could_resolve(&nodes[*node_index].gpus, demand)
    };
    let node_indices = outline
        .preemption_node_indices(facts)
        .filter(could_help)
        .take(MAX_NODES_SEARCHED_FOR_VICTIMS);
    let filters = cluster.kube_filters();
    let query = filters
        .requirements_of(&facts.uid)
        .map(|wants| filters.query(Some(&facts.uid), wants));
    let found = node_indices.filter_map(|node_index| {
        let name = &nodes[node_index].name;
        let coming = cluster.ledger().incoming_pods(name);
        let candidate = cluster
            .ledger()
            .candidates_for_demand(&facts.preemptor, demand, [name])
            .pop()?;
        let missing = demand
            .vram()
            .minus(cluster.ledger().remaining_capacity_on(name));
        // What the scheduler itself must see freed, which counts by the node's sum.
        let candidate = PreemptionCandidate {
            shortfall: Shortfall {
                vram: missing,
                host_resources: query.as_ref().map_or_else(Default::default, |query| {
                    let leaving = &[];
                    query.shortfall(name, &AssumedNodeChange { leaving, coming })
                }),
            },
            ..candidate
        };
        let set = cheapest_victims(&candidate, demand, BudgetRules::Keep)
            .filter(|set| !set.victims.is_empty())?;
        let leaving = set.all_victims();
        let change = AssumedNodeChange {
            leaving: &leaving,
            coming,
        };
        let is_refused = query
            .as_ref()
            .is_some_and(|query| matches!(query.verdict(name, &change), FilterVerdict::Rejects(_)));
        if is_refused {
            return None;
        }
        let leaves = |resident: &PotentialVictim| set.victims.contains(&resident.uid);
        let victims = candidate
            .potential_victims
            .into_iter()
            .filter(leaves)
            .collect();
        let limit = cluster.ledger().eviction_limit(&leaving);
        Some(FoundVictims {
            node_index,
            set,
            victims,
            gangs: candidate.gangs,
            limit,
        })
    });
    found.min_by_key(|found| {
        (
            found.limit.is_some(),
            found.set.eviction_cost,
            found.node_index,
        )
    })
}

impl FoundVictims {
    fn highest_priority(&self) -> i32 {
        self.victims
            .iter()
            .map(|victim| victim.priority)
            .max()
            .unwrap_or(i32::MIN)
    }

    fn remedy(&self, cluster: &ClusterCopy, facts: &Facts, needs: PreemptionNeeds) -> RemedyChange {
        let found_victims = self
            .victims
            .iter()
            .filter_map(|victim| Some((victim, cluster.ledger().pod_state(&victim.uid)?)));
        let (shown, hidden): (Vec<_>, Vec<_>) =
            found_victims.partition(|(_, entry)| facts.may_see(&entry.key));
        let mut victims: Vec<Victim> = shown
            .into_iter()
            .map(|(victim, entry)| self.victim(facts, victim, entry))
            .collect();
        victims.sort_by(|a, b| a.pod.cmp(&b.pod));
        let node = &facts.snapshot.nodes()[self.node_index];
        RemedyChange::Preempt {
            gpu_candidate: candidate_on(node, self.set.gpus),
            victims,
            others: OthersPart::sum(hidden.iter().map(|(victim, _)| victim.vram())),
            needs,
        }
    }

    fn victim(&self, facts: &Facts, victim: &PotentialVictim, entry: &PodState) -> Victim {
        Victim {
            pod: entry.key.to_string(),
            class: facts.policy.class(victim.class).name.clone(),
            priority: victim.priority,
            vram_bytes: victim.vram(),
            eviction_cost: victim.eviction_cost,
            group: self.group_restart(victim, entry),
            is_kueues: entry.disruption_info.queue_managed,
        }
    }

    /// What the restart of the victim's group loses: its members here, and those on other nodes.
    fn group_restart(&self, victim: &PotentialVictim, entry: &PodState) -> Option<GroupRestart> {
        let gang = self.gangs.get(usize::from(victim.gang?))?;
        let here = self.victims.iter().filter(|one| one.gang == victim.gang);
        let cost = here
            .map(|one| one.eviction_cost.total())
            .fold(gang.eviction_cost.cost, u64::saturating_add);
        let name = entry.disruption_info.group.as_ref()?.to_string();
        Some(GroupRestart {
            name,
            pods: gang.members.len() as u32,
            cost,
        })
    }
}
