//! kube-scheduler's own choice of victims (default preemption): a dry run on each node that readmits the more important pods
//! first, and `pickOneNodeForPreemption` over the results. Once with VRAM as sums over nodes, as kube-scheduler knows it, and
//! once with the VRAM of single GPUs.
//!
//! It is simulated in its favor. It tries all nodes, not a hundred; a node on which no eviction would make the pod fit on
//! single GPUs is not offered; and if the pod does not fit after its evictions, more pods of the same node are evicted, where
//! the real one would continue with the next node.

use super::orders::{Person, VictimChoice, best, choice, fits_without, people};
use crate::scheduling::evicting::PreemptionCandidate;
use crate::scheduling::ledger::Ledger;
use crate::scheduling::vocabulary::demand::Demand;
use crate::units::Moment;
use std::cmp::Reverse;

/// By sums over nodes, and then more victims in the same order until the pod fits on a GPU. Nodes whose sum is enough have no
/// victims for it; they are used if there is no other.
pub fn by_sums(ledger: &Ledger, rooms: &[&PreemptionCandidate], demand: &Demand) -> Option<VictimChoice> {
    let ruled: Vec<(&PreemptionCandidate, Vec<Person<'_>>)> =
        rooms.iter().map(|room| (*room, victims_by_sum(ledger, room, demand))).collect();
    let with_victims = ruled.iter().filter(|(_, victims)| !victims.is_empty());
    let (room, victims) = with_victims
        .min_by_key(|(room, victims)| (rank(victims), &room.node))
        .or_else(|| ruled.iter().min_by_key(|(room, _)| &room.node))?;
    Some(choice(room, demand, &until_it_fits(ledger, room, demand, victims)))
}

/// The same dry run, with a filter for single GPUs.
pub fn on_gpus(ledger: &Ledger, rooms: &[&PreemptionCandidate], demand: &Demand) -> Option<VictimChoice> {
    best(rooms, demand, |room| {
        let everyone = most_important_first(ledger, room);
        let mut leave = everyone.clone();
        for one in &everyone {
            let without: Vec<Person<'_>> =
                leave.iter().filter(|other| other.resident.uid != one.resident.uid).copied().collect();
            if fits_without(room, demand, &without).is_some() {
                leave = without;
            }
        }
        ((rank(&leave), &room.node), leave)
    })
}

/// Removes every pod of lower priority, then adds them back, the most important first, as long as the node's sum allows it.
fn victims_by_sum<'a>(ledger: &Ledger, room: &'a PreemptionCandidate, demand: &Demand) -> Vec<Person<'a>> {
    let everyone = most_important_first(ledger, room);
    let freed = everyone.iter().map(|one| one.resident.vram()).sum();
    let mut left = ledger.sum_left_on(&room.node) + freed;
    let mut victims = Vec::new();
    for one in everyone {
        let without = left.minus(one.resident.vram());
        match without >= demand.vram() {
            true => left = without,
            false => victims.push(one),
        }
    }
    victims
}

fn until_it_fits<'a>(
    ledger: &Ledger,
    room: &'a PreemptionCandidate,
    demand: &Demand,
    victims: &[Person<'a>],
) -> Vec<Person<'a>> {
    let mut leave = victims.to_vec();
    let is_victim = |one: &Person<'_>| victims.iter().any(|v| v.resident.uid == one.resident.uid);
    let mut others: Vec<Person<'a>> =
        most_important_first(ledger, room).into_iter().filter(|one| !is_victim(one)).collect();
    while fits_without(room, demand, &leave).is_none() {
        let Some(least_important) = others.pop() else { break };
        leave.push(least_important);
    }
    leave
}

/// Higher priority first, then the pod that has run longer.
fn most_important_first<'a>(ledger: &Ledger, room: &'a PreemptionCandidate) -> Vec<Person<'a>> {
    let mut everyone = people(ledger, room);
    everyone.sort_by_key(|one| (Reverse(one.resident.priority), one.started, &one.resident.uid));
    everyone
}

/// The lowest highest priority, the lowest sum of priorities, the fewest victims, and the one whose most important victim
/// started last.
fn rank(victims: &[Person<'_>]) -> impl Ord + use<> {
    let highest = victims.iter().map(|one| one.resident.priority).max();
    // Shifted, so that more victims of negative priority do not make a lower sum.
    let sum: u64 = victims.iter().map(|one| u64::from(one.resident.priority.abs_diff(i32::MIN))).sum();
    let of_highest = victims.iter().filter(|one| Some(one.resident.priority) == highest);
    let began: Option<Moment> = of_highest.map(|one| one.started).min();
    (highest, sum, victims.len(), Reverse(began))
}
