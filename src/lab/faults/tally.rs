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
    pub hand_overs: u64,
    /// Terms in which anything was bound.
    pub epochs: BTreeSet<String>,
    pub bound: u64,
    /// Reservations that pods' conditions showed.
    pub held: u64,
    pub evicted: u64,
    /// Engines that were bound where starts are held back.
    pub starts: u64,
    /// Groups, in the end, that are bound whole, and in part.
    pub whole_groups: u64,
    pub half_groups: u64,
    /// The most tasks that ran at once.
    pub most_tasks: usize,
    /// Evictions for kube-scheduler's preemptors.
    pub preempted: u64,
    /// Bindings to a GPU on which a process of an ended pod was seen for long.
    pub beside_left_over: u64,
    pub faults: BTreeMap<FaultKind, u64>,
    /// GPUs overallocated by a Binding that was delayed for longer than the write times allow.
    pub by_proxy: u64,
    /// Bindings and reservations that landed while another leader acted.
    pub landed_late: u64,
    /// The reservations among them, and how many of these the leader that acted wrote about.
    pub late_reservations: u64,
    pub late_answered: u64,
    /// Over-allocations that each replica's audit found, and pods that were evicted to end one.
    pub reported: u64,
    pub remedied: u64,
}

impl FaultTally {
    pub fn note(&mut self, kind: FaultKind) {
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

    pub fn faults_in_all(&self) -> u64 {
        self.faults.values().sum()
    }
}

impl AddAssign for FaultTally {
    fn add_assign(&mut self, other: Self) {
        self.histories += other.histories;
        self.steps += other.steps;
        self.simulated += other.simulated;
        self.hand_overs += other.hand_overs;
        self.epochs.extend(other.epochs);
        self.bound += other.bound;
        self.held += other.held;
        self.evicted += other.evicted;
        self.preempted += other.preempted;
        self.starts += other.starts;
        self.whole_groups += other.whole_groups;
        self.half_groups += other.half_groups;
        self.most_tasks = self.most_tasks.max(other.most_tasks);
        self.beside_left_over += other.beside_left_over;
        self.by_proxy += other.by_proxy;
        self.landed_late += other.landed_late;
        self.late_reservations += other.late_reservations;
        self.late_answered += other.late_answered;
        self.reported += other.reported;
        self.remedied += other.remedied;
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
            self.hand_overs,
            self.epochs.len(),
            self.bound,
            self.held,
            self.evicted,
            self.preempted,
            self.beside_left_over,
            self.starts,
            self.whole_groups,
            self.half_groups,
            self.most_tasks
        )?;
        writeln!(
            f,
            "by a proxy, which breaks the write times: {} Bindings and reservations landed while another leader acted, which wrote \
             about {} of {} such reservations, {} GPUs overallocated, {} conflicts reported, {} pods evicted to end one",
            self.landed_late,
            self.late_answered,
            self.late_reservations,
            self.by_proxy,
            self.reported,
            self.remedied
        )?;
        let faults: Vec<String> = self
            .faults
            .iter()
            .map(|(kind, count)| format!("{count} {kind}"))
            .collect();
        write!(f, "{} faults: {}", self.faults_in_all(), faults.join(", "))
    }
}
