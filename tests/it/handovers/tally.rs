//! Counts of what happened: a history in which nothing happens proves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;
use stowage::lab::demo::api_server::faults::{DelayStage, InjectedFault, Operation};

#[derive(Debug, Default)]
pub struct HandoverTally {
    /// The Lease passed to another holder.
    pub hand_overs: u64,
    /// Terms in which anything was bound.
    pub epochs: BTreeSet<String>,
    pub bound: u64,
    pub held: u64,
    pub evicted: u64,
    /// Replicas that died, stopped, were cut off, and watches that were disturbed.
    pub events: BTreeMap<&'static str, u64>,
    /// What became of writes of pods.
    pub fates: BTreeMap<&'static str, u64>,
    /// GPUs overallocated by a Binding that was delayed for longer than the write times allow.
    pub by_proxy: u64,
    /// Conflicts that the audits of the replicas found, each for itself, and pods they evicted to end one.
    pub reported: u64,
    pub remedied: u64,
}

impl HandoverTally {
    pub fn note(&mut self, event: &'static str) {
        *self.events.entry(event).or_default() += 1;
    }

    pub fn note_fates(&mut self, met: &[(Operation, InjectedFault)]) {
        const WRITES: [Operation; 4] =
            [Operation::Binding, Operation::PodStatus, Operation::Eviction, Operation::Pod];
        for (_, fault) in met.iter().filter(|(operation, _)| WRITES.contains(operation)) {
            *self.fates.entry(name(*fault)).or_default() += 1;
        }
    }

    /// Each kind of thing that the histories are made of.
    pub fn assert_all_happened(&self, seeds: u64) {
        assert!(self.hand_overs >= seeds, "{self}");
        assert!(self.epochs.len() as u64 >= seeds && self.bound >= 10 * seeds, "{self}");
        assert!(self.held > 0 && self.evicted > 0 && self.by_proxy > 0 && self.reported > 0, "{self}");
        for event in ["killed", "restarted", "stopped", "cut off", "watch held back", "watch silent"] {
            assert!(self.events.contains_key(event), "no {event}: {self}");
        }
        for fate in [
            "late on its way",
            "late in the queue",
            "late in the commit",
            "unanswered",
            "repeated",
            "refused",
        ] {
            assert!(self.fates.contains_key(fate), "none {fate}: {self}");
        }
    }
}

fn name(fault: InjectedFault) -> &'static str {
    match fault {
        InjectedFault::LandsLate(DelayStage::Network, _) => "late on its way",
        InjectedFault::LandsLate(DelayStage::Queue, _) => "late in the queue",
        InjectedFault::LandsLate(DelayStage::Commit, _) => "late in the commit",
        InjectedFault::LosesAnswer => "unanswered",
        InjectedFault::ArrivesTwice(_) => "repeated",
        InjectedFault::Fails | InjectedFault::Throttles(_) => "refused",
        _ => "prompt",
    }
}

impl AddAssign for HandoverTally {
    fn add_assign(&mut self, other: Self) {
        self.hand_overs += other.hand_overs;
        self.epochs.extend(other.epochs);
        self.bound += other.bound;
        self.held += other.held;
        self.evicted += other.evicted;
        self.by_proxy += other.by_proxy;
        self.reported += other.reported;
        self.remedied += other.remedied;
        for (sum, others) in [(&mut self.events, other.events), (&mut self.fates, other.fates)] {
            others.into_iter().for_each(|(name, count)| *sum.entry(name).or_default() += count);
        }
    }
}

impl std::fmt::Display for HandoverTally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hand_overs, epochs, bound, held, evicted, events, fates, by_proxy, reported, remedied } =
            self;
        write!(
            f,
            "{hand_overs} hand-overs, {} terms that bound something, {bound} pods bound, {held} holds, {evicted} evictions; \
             {events:?}; writes of pods {fates:?}; promised twice by a \
             proxy {by_proxy}, found by the replicas' audits {reported}, pods evicted to end it {remedied}",
            epochs.len()
        )
    }
}
