//! Best-effort pods without GPUs. The ledger does not have them, but kube-scheduler evicts them like any others if CPU or
//! memory is short: for each node, what they would free, and which of them are evicted.

use crate::simulate::packing::trace::PodKind;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::vocabulary::demand::HostResources;

#[derive(Debug, Default)]
pub struct BestEffortCpuPods {
    /// By rank of node and number.
    by_node: BTreeMap<(usize, usize), HostResources>,
    /// The node of each, by number.
    rank_by_number: BTreeMap<usize, usize>,
}

impl BestEffortCpuPods {
    pub fn add(&mut self, rank: usize, number: usize, kind: &PodKind) {
        self.by_node.insert(
            (rank, number),
            HostResources {
                cpu: MilliCpu(kind.cpu),
                memory: Bytes(kind.memory),
            },
        );
        self.rank_by_number.insert(number, rank);
    }

    pub fn remove(&mut self, number: usize) {
        if let Some(rank) = self.rank_by_number.remove(&number) {
            self.by_node.remove(&(rank, number));
        }
    }

    /// What all of them there would free.
    pub fn freed(&self, rank: usize) -> HostResources {
        self.pods_on(rank)
            .fold(HostResources::default(), |sum, (_, freed)| HostResources {
                cpu: MilliCpu(sum.cpu.0 + freed.cpu.0),
                memory: sum.memory + freed.memory,
            })
    }

    /// What is missing on a node when all of them there are evicted.
    pub(crate) fn lack_without(&self, rank: usize, lack: HostResources) -> HostResources {
        remaining_lack(lack, self.freed(rank))
    }

    /// The victims so that nothing is missing: the largest first, and none that is not needed.
    pub(crate) fn victims(&self, rank: usize, mut lack: HostResources) -> Vec<usize> {
        let mut there: Vec<(usize, HostResources)> = self.pods_on(rank).collect();
        there.sort_by_key(|(number, freed)| (Reverse((freed.cpu, freed.memory)), *number));
        let mut leavers = Vec::new();
        for (number, freed) in there {
            let remaining = remaining_lack(lack, freed);
            if remaining != lack {
                leavers.push(number);
                lack = remaining;
            }
        }
        leavers
    }

    fn pods_on(&self, rank: usize) -> impl Iterator<Item = (usize, HostResources)> {
        self.by_node
            .range((rank, 0)..=(rank, usize::MAX))
            .map(|((_, number), freed)| (*number, *freed))
    }
}

/// What is still missing after that much was freed.
pub fn remaining_lack(lack: HostResources, freed: HostResources) -> HostResources {
    HostResources {
        cpu: MilliCpu(lack.cpu.0.saturating_sub(freed.cpu.0)),
        memory: lack.memory.minus(freed.memory),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::kind;
    use super::*;

    #[test]
    fn the_largest_are_evicted_and_none_without_need() {
        let mut pods = BestEffortCpuPods::default();
        for (number, cpu) in [(1, 1000), (2, 4000), (3, 2000)] {
            pods.add(0, number, &kind(cpu, 0, 0));
        }
        pods.add(1, 4, &kind(64_000, 0, 0));
        let lack = |cpu| HostResources {
            cpu: MilliCpu(cpu),
            memory: Bytes::ZERO,
        };
        assert_eq!(pods.victims(0, lack(0)), [0; 0]);
        assert_eq!(pods.victims(0, lack(3000)), [2]);
        assert_eq!(pods.victims(0, lack(5000)), [2, 3]);
        assert_eq!(pods.lack_without(0, lack(8000)), lack(1000));
        assert_eq!(pods.freed(0), lack(7000));
        pods.remove(2);
        assert_eq!(pods.lack_without(0, lack(8000)), lack(5000));
    }
}
