//! Victim orders: Stowage's own, and those that it is compared with. Each picks a node by its own rule, and victims there until
//! the pod fits on single GPUs; pods that may not be evicted (priority, class) are left out in all of them.

use super::kube_scheduler;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::evicting;
use crate::scheduling::evicting::{BudgetRules, PreemptionCandidate, SearchEffort};
use crate::scheduling::ledger::{Ledger, PodPhase};
use crate::scheduling::ledger::{PotentialVictim, discharge, settle_class_exclusions};
use crate::scheduling::placing::pack;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::gpu::GpuSet;
use crate::units::{Millis, Moment};
use serde::Serialize;
use std::cmp::Reverse;

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

/// A resident, and since when it has been running.
#[derive(Debug, Clone, Copy)]
pub struct Person<'a> {
    pub resident: &'a PotentialVictim,
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
        rooms: &[PreemptionCandidate],
        demand: &Demand,
    ) -> Option<VictimChoice> {
        if self == Self::Stowage {
            return cheapest(rooms, demand);
        }
        let rooms: Vec<&PreemptionCandidate> = rooms.iter().filter(|room| could_fit(room, demand)).collect();
        let people = |room| people(ledger, room);
        match self {
            Self::Stowage => unreachable!("it was answered"),
            Self::Stock => kube_scheduler::by_sums(ledger, &rooms, demand),
            Self::StockOnGpus => kube_scheduler::on_gpus(ledger, &rooms, demand),
            Self::YoungestFirst => best(&rooms, demand, |room| {
                let mut people = people(room);
                people.sort_by_key(|one| (Reverse(one.started), &one.resident.uid));
                let leave = in_order(room, demand, &people);
                let eldest = leave.iter().map(|one| one.started).min();
                ((Reverse(eldest), leave.len(), &room.node), leave)
            }),
            Self::LowestPriorityFirst => best(&rooms, demand, |room| {
                let mut people = people(room);
                people.sort_by_key(|one| (one.resident.priority, &one.resident.uid));
                let leave = in_order(room, demand, &people);
                let highest = leave.iter().map(|one| one.resident.priority).max();
                ((highest, leave.len(), &room.node), leave)
            }),
        }
    }
}

fn cheapest(rooms: &[PreemptionCandidate], demand: &Demand) -> Option<VictimChoice> {
    let set = evicting::cheapest(rooms, demand, BudgetRules::Keep, SearchEffort::default())?;
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
    rooms: &[&'a PreemptionCandidate],
    demand: &Demand,
    rule: impl Fn(&'a PreemptionCandidate) -> (K, Vec<Person<'a>>),
) -> Option<VictimChoice> {
    let ruled = rooms.iter().map(|room| (rule(room), *room));
    let ((_, leave), room) = ruled.min_by(|((a, _), _), ((b, _), _)| a.cmp(b))?;
    Some(choice(room, demand, &leave))
}

/// The pod's placement after the victims are gone; it fits there then.
pub fn choice(room: &PreemptionCandidate, demand: &Demand, leave: &[Person<'_>]) -> VictimChoice {
    let evicted: Vec<PodUid> = leave.iter().map(|one| one.resident.uid.clone()).collect();
    VictimChoice {
        node: room.node.clone(),
        gpus: fits_without(room, demand, leave).expect("victims are chosen until the pod fits"),
        awaited: evicted.clone(),
        evicted,
        grace: leave.iter().map(|one| one.resident.grace).max().unwrap_or_default(),
        exact: true,
    }
}

/// All pods that may be evicted from a node.
pub fn people<'a>(ledger: &Ledger, room: &'a PreemptionCandidate) -> Vec<Person<'a>> {
    let started = |uid: &PodUid| match &ledger.pod_state(uid)?.phase {
        PodPhase::Bound(bound) => Some(bound.started),
        _ => None,
    };
    let person = |resident: &'a PotentialVictim| Person {
        resident,
        started: started(&resident.uid).unwrap_or_else(|| ledger.now()),
    };
    room.candidates.iter().map(person).collect()
}

/// The shortest prefix of these whose eviction makes the pod fit, without those whose eviction is not needed.
fn in_order<'a>(room: &PreemptionCandidate, demand: &Demand, people: &[Person<'a>]) -> Vec<Person<'a>> {
    let enough = (0..=people.len()).find(|count| fits_without(room, demand, &people[..*count]).is_some());
    let mut leave = people[..enough.unwrap_or(people.len())].to_vec();
    for place in (0..leave.len()).rev() {
        let spared = leave.remove(place);
        if fits_without(room, demand, &leave).is_none() {
            leave.insert(place, spared);
        }
    }
    leave
}

/// The GPUs that the pod would get if these were evicted.
pub fn fits_without(room: &PreemptionCandidate, demand: &Demand, leave: &[Person<'_>]) -> Option<GpuSet> {
    let mut gpus = room.gpus.clone();
    leave.iter().for_each(|one| discharge(&mut gpus, one.resident));
    settle_class_exclusions(&room.class_exclusions, &mut gpus, |uid| {
        leave.iter().any(|one| one.resident.uid == *uid)
    });
    pack::choose(&gpus, demand, GpuSet::ALL)
}

fn could_fit(room: &PreemptionCandidate, demand: &Demand) -> bool {
    let all: Vec<Person<'_>> =
        room.candidates.iter().map(|resident| Person { resident, started: Moment::default() }).collect();
    fits_without(room, demand, &all).is_some()
}
