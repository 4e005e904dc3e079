//! The cluster's free resources as kube-scheduler's filters and the published policies see them: CPU, memory and thousandths of
//! each GPU. Every placement is recorded here too, whichever policy made it, so that a policy that allocates what is taken is
//! detected. Placement decisions are made elsewhere.

use super::trace::{PODS_PER_NODE, PodKind, WorkloadNode, WorkloadTrace};
use crate::simulate::openb::WHOLE_GPU;
use std::collections::BTreeMap;
use stowage_scheduling::vocabulary::gpu::GpuSet;

/// Nodes by their rank: of two that are equal to a policy, the lower gets the pod.
#[derive(Debug, Clone)]
pub struct SimulatedCluster {
    nodes: Vec<SimulatedNode>,
    /// In thousandths of GPUs.
    allocated: u64,
}

#[derive(Debug, Clone)]
pub struct SimulatedNode {
    /// Its index in [`WorkloadTrace::nodes`].
    pub trace_index: usize,
    pub model: usize,
    /// Free resources: thousandths of cores, bytes, thousandths of each GPU, pods.
    pub cpu: u64,
    pub memory: u64,
    pub gpus: Box<[u32]>,
    pub pod_slots: u32,
    /// How many pods of each sort are here.
    pub sorts: BTreeMap<PodSort, u32>,
    /// Increases with every change.
    pub version: u32,
}

/// Where a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedPlacement {
    /// The node's rank.
    pub node: usize,
    pub gpus: GpuSet,
}

/// What GPU pods are grouped by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodSort {
    /// A part of one GPU.
    Part,
    /// This number of whole GPUs.
    Whole(u32),
}

impl PodSort {
    pub fn from_kind(kind: &PodKind) -> Option<Self> {
        match kind.gpus {
            0 => None,
            _ if kind.is_shared() => Some(Self::Part),
            gpus => Some(Self::Whole(gpus)),
        }
    }
}

impl SimulatedCluster {
    /// All is free; `ranks` has every node once, in the order of their ranks.
    pub fn new(setting: &WorkloadTrace, ranks: &[usize]) -> Self {
        Self {
            nodes: ranks
                .iter()
                .map(|site| SimulatedNode::new(*site, &setting.nodes[*site]))
                .collect(),
            allocated: 0,
        }
    }

    pub fn nodes(&self) -> &[SimulatedNode] {
        &self.nodes
    }

    /// In thousandths of GPUs.
    pub fn allocated(&self) -> u64 {
        self.allocated
    }

    pub fn allocate(&mut self, kind: &PodKind, placement: SimulatedPlacement) {
        self.nodes[placement.node].allocate(kind, placement.gpus);
        self.allocated += kind.milli_gpus();
    }

    pub(crate) fn release(&mut self, kind: &PodKind, placement: SimulatedPlacement) {
        self.nodes[placement.node].release(kind, placement.gpus);
        self.allocated -= kind.milli_gpus();
    }
}

impl SimulatedNode {
    fn new(site: usize, capacity: &WorkloadNode) -> Self {
        Self {
            trace_index: site,
            model: capacity.model,
            cpu: capacity.cpu,
            memory: capacity.memory,
            gpus: vec![WHOLE_GPU; capacity.gpus as usize].into(),
            pod_slots: PODS_PER_NODE,
            sorts: BTreeMap::new(),
            version: 1,
        }
    }

    pub fn fits(&self, kind: &PodKind) -> bool {
        self.is_accepted(kind) && self.has_gpus(kind)
    }

    /// Whether kube-scheduler's own filters accept the node: of GPUs they only know the model.
    pub(crate) fn is_accepted(&self, kind: &PodKind) -> bool {
        kind.models[self.model]
            && kind.cpu <= self.cpu
            && kind.memory <= self.memory
            && self.pod_slots > 0
    }

    /// Whether enough single GPUs have the free capacity.
    pub(crate) fn has_gpus(&self, kind: &PodKind) -> bool {
        kind.gpus == 0
            || self
                .gpus_with_room(kind)
                .nth(kind.gpus as usize - 1)
                .is_some()
    }

    /// Indices of GPUs on which a part fits.
    pub fn gpus_with_room(&self, kind: &PodKind) -> impl Iterator<Item = usize> {
        let milli = kind.milli_per_gpu;
        self.gpus
            .iter()
            .enumerate()
            .filter(move |(_, free)| **free >= milli)
            .map(|(gpu_index, _)| gpu_index)
    }

    /// Free capacity over all GPUs, in thousandths of one.
    pub fn free_milli(&self) -> u64 {
        self.gpus.iter().map(|free| u64::from(*free)).sum()
    }

    /// The number of unused GPUs.
    pub fn unused_gpus(&self) -> u32 {
        self.gpus.iter().filter(|free| **free == WHOLE_GPU).count() as u32
    }

    /// The tightest GPUs that fit, and of equal ones those with the lowest indices. Whole GPUs are equal.
    pub fn tightest_gpus(&self, kind: &PodKind) -> GpuSet {
        if kind.is_shared() {
            let tightest = self
                .gpus_with_room(kind)
                .min_by_key(|gpu_index| (self.gpus[*gpu_index], *gpu_index));
            return tightest.map(GpuSet::single).unwrap_or_default();
        }
        self.gpus_with_room(kind).take(kind.gpus as usize).collect()
    }

    fn allocate(&mut self, kind: &PodKind, gpus: GpuSet) {
        const CHECKED_FIT: &str = "the placing policy has checked that the pod fits";
        self.cpu = self.cpu.checked_sub(kind.cpu).expect(CHECKED_FIT);
        self.memory = self.memory.checked_sub(kind.memory).expect(CHECKED_FIT);
        self.pod_slots = self.pod_slots.checked_sub(1).expect(CHECKED_FIT);
        assert_eq!(
            gpus.len(),
            kind.gpus,
            "a pod gets as many GPUs as it asks for"
        );
        for gpu_index in gpus.iter() {
            self.gpus[gpu_index] = self.gpus[gpu_index]
                .checked_sub(kind.milli_per_gpu)
                .expect(CHECKED_FIT);
        }
        if let Some(sort) = PodSort::from_kind(kind) {
            *self.sorts.entry(sort).or_default() += 1;
        }
        self.version += 1;
    }

    fn release(&mut self, kind: &PodKind, gpus: GpuSet) {
        self.cpu += kind.cpu;
        self.memory += kind.memory;
        self.pod_slots += 1;
        gpus.iter()
            .for_each(|gpu_index| self.gpus[gpu_index] += kind.milli_per_gpu);
        if let Some(sort) = PodSort::from_kind(kind)
            && let Some(count) = self.sorts.get_mut(&sort)
        {
            *count -= 1;
            self.sorts.retain(|_, count| *count > 0);
        }
        self.version += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kind, setting};
    use super::*;

    #[test]
    fn what_a_pod_takes_it_gives_back() {
        let setting = setting(&[(64_000, 2)], &[]);
        let mut cluster = SimulatedCluster::new(&setting, &[0]);
        let (part, whole) = (kind(1000, 1, 400), kind(1000, 2, 1000));
        let seat = SimulatedPlacement {
            node: 0,
            gpus: cluster.nodes()[0].tightest_gpus(&part),
        };
        cluster.allocate(&part, seat);
        assert_eq!(
            (cluster.allocated(), &*cluster.nodes()[0].gpus),
            (400, &[600, 1000][..])
        );
        assert!(!cluster.nodes()[0].fits(&whole));
        assert_eq!(
            cluster.nodes()[0].sorts,
            BTreeMap::from([(PodSort::Part, 1)])
        );
        cluster.release(&part, seat);
        assert!(cluster.nodes()[0].fits(&whole));
        assert_eq!(
            (cluster.allocated(), cluster.nodes()[0].sorts.len()),
            (0, 0)
        );
    }

    #[test]
    fn a_part_goes_to_the_tightest_gpu_and_whole_ones_are_the_first_that_are_free() {
        let setting = setting(&[(64_000, 4)], &[]);
        let mut cluster = SimulatedCluster::new(&setting, &[0]);
        cluster.allocate(
            &kind(0, 1, 300),
            SimulatedPlacement {
                node: 0,
                gpus: GpuSet::single(0),
            },
        );
        cluster.allocate(
            &kind(0, 1, 500),
            SimulatedPlacement {
                node: 0,
                gpus: GpuSet::single(2),
            },
        );
        let node = &cluster.nodes()[0];
        assert_eq!(node.tightest_gpus(&kind(0, 1, 200)), GpuSet::single(2));
        assert_eq!(node.tightest_gpus(&kind(0, 1, 600)), GpuSet::single(0));
        assert_eq!(
            node.tightest_gpus(&kind(0, 2, 1000)),
            [1, 3].into_iter().collect()
        );
        assert!(!node.fits(&kind(0, 3, 1000)));
    }

    #[test]
    #[should_panic(expected = "the placing policy has checked that the pod fits")]
    fn a_gpu_that_is_handed_out_twice_is_caught() {
        let setting = setting(&[(64_000, 1)], &[]);
        let mut cluster = SimulatedCluster::new(&setting, &[0]);
        let seat = SimulatedPlacement {
            node: 0,
            gpus: GpuSet::single(0),
        };
        cluster.allocate(&kind(0, 1, 600), seat);
        cluster.allocate(&kind(0, 1, 600), seat);
    }
}
