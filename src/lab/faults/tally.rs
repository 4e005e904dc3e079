//! Counts of what happened: a history in which nothing happens proves nothing.

use super::fault::FaultKind;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::AddAssign;
use std::time::Duration;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct FaultTally {
    pub histories: u64,
    pub steps: u64,
    /// Simulated time, of all histories together.
    pub simulated: Duration,
    /// Requests to the replicas that were answered, by verb.
    pub answers: BTreeMap<&'static str, u64>,
    /// How often the Lease passed to another holder.
    pub leadership_changes: u64,
    /// Terms in which anything was bound.
    pub epochs: BTreeSet<String>,
    pub bound: u64,
    /// Reservations that pods' conditions showed.
    pub reservations: u64,
    pub evicted: u64,
    /// Engines that were bound where starts are held back.
    pub engine_starts: u64,
    /// Groups, in the end, that are bound whole, and in part.
    pub whole_groups: u64,
    pub partial_groups: u64,
    /// The most tasks that ran at once.
    pub max_tasks: usize,
    /// Evictions for kube-scheduler's preemptors.
    pub preempted: u64,
    /// Bindings to a GPU on which a process of an ended pod was seen for long.
    pub bound_beside_ended_process: u64,
    pub faults: BTreeMap<FaultKind, u64>,
    /// GPUs overallocated by a Binding that was delayed for longer than the write times allow.
    pub over_allocated_by_proxy: u64,
    /// Bindings and reservations that landed while another leader acted.
    pub late_commits: u64,
    /// The reservations among them, and how many of these the leader that acted wrote about.
    pub late_reservations: u64,
    pub late_reservations_answered: u64,
    /// Over-allocations that each replica's audit found, and pods that were evicted to end one.
    pub over_allocations_reported: u64,
    pub over_allocation_evictions: u64,
}

impl FaultTally {
    pub fn count_fault(&mut self, kind: FaultKind) {
        *self.faults.entry(kind).or_default() += 1;
    }

    /// Answers of the four verbs.
    pub fn decisions(&self) -> u64 {
        let is_verb =
            |verb: &&'static str| ["filter", "prioritize", "preempt", "bind"].contains(verb);
        self.answers
            .iter()
            .filter(|(verb, _)| is_verb(verb))
            .map(|(_, count)| count)
            .sum()
    }

    pub fn total_faults(&self) -> u64 {
        self.faults.values().sum()
    }
}

impl AddAssign for FaultTally {
    fn add_assign(&mut self, other: Self) {
        self.histories += other.histories;
        self.steps += other.steps;
        self.simulated += other.simulated;
        self.leadership_changes += other.leadership_changes;
        self.epochs.extend(other.epochs);
        self.bound += other.bound;
        self.reservations += other.reservations;
        self.evicted += other.evicted;
        self.preempted += other.preempted;
        self.engine_starts += other.engine_starts;
        self.whole_groups += other.whole_groups;
        self.partial_groups += other.partial_groups;
        self.max_tasks = self.max_tasks.max(other.max_tasks);
        self.bound_beside_ended_process += other.bound_beside_ended_process;
        self.over_allocated_by_proxy += other.over_allocated_by_proxy;
        self.late_commits += other.late_commits;
        self.late_reservations += other.late_reservations;
        self.late_reservations_answered += other.late_reservations_answered;
        self.over_allocations_reported += other.over_allocations_reported;
        self.over_allocation_evictions += other.over_allocation_evictions;
        other
            .answers
            .into_iter()
            .for_each(|(verb, count)| *self.answers.entry(verb).or_default() += count);
        other
            .faults
            .into_iter()
            .for_each(|(kind, count)| *self.faults.entry(kind).or_default() += count);
    }
}

impl fmt::Display for FaultTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} histories of {} steps in {:.1} h of simulated time",
            self.histories,
            self.steps,
            self.simulated.as_secs_f64() / 3600.0
        )?;
        let answers: Vec<String> = self
            .answers
            .iter()
            .map(|(verb, count)| format!("{count} {verb}"))
            .collect();
        writeln!(f, "answers: {}", answers.join(", "))?;
        writeln!(
            f,
            "{} hand-overs, {} terms that bound something, {} pods bound, {} reservations, {} evictions, of which {} for \
             kube-scheduler; {} Bindings beside memory of ended pods, {} starts of engines; \
             {} groups bound whole, {} in part; {} tasks at once",
            self.leadership_changes,
            self.epochs.len(),
            self.bound,
            self.reservations,
            self.evicted,
            self.preempted,
            self.bound_beside_ended_process,
            self.engine_starts,
            self.whole_groups,
            self.partial_groups,
            self.max_tasks
        )?;
        writeln!(
            f,
            "by a proxy, which breaks the write times: {} Bindings and reservations landed while another leader acted, which wrote \
             about {} of {} such reservations, {} GPUs overallocated, {} conflicts reported, {} pods evicted to end one",
            self.late_commits,
            self.late_reservations_answered,
            self.late_reservations,
            self.over_allocated_by_proxy,
            self.over_allocations_reported,
            self.over_allocation_evictions
        )?;
        let faults: Vec<String> = self
            .faults
            .iter()
            .map(|(kind, count)| format!("{count} {kind}"))
            .collect();
        write!(f, "{} faults: {}", self.total_faults(), faults.join(", "))
    }
}
