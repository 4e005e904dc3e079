//! Fragmentation as FGD measures it (Weng, Yang et al., USENIX ATC 2023, §3): how much of the free capacity of a node's GPUs a
//! pod drawn from the typical ones could not use. Typical pods are weighted by counts, not shares, so that sums are exact.

use super::cluster::SimulatedNode;
use super::trace::{PodKind, WorkloadTrace};
use crate::simulate::openb::WHOLE_GPU;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Typical pods are the most frequent ones that together are this percentage of all (95 % in the published runs).
const TYPICAL_PERCENT: u64 = 95;

/// The typical pods.
#[derive(Debug, Clone)]
pub struct TypicalPods {
    /// Shapes of GPU pods only: a pod without GPUs uses no GPU anywhere.
    shapes: Vec<TypicalShape>,
    /// How many pods they represent.
    count: u64,
}

/// Typical pods that differ in their CPU only.
#[derive(Debug, Clone)]
struct TypicalShape {
    milli: u32,
    gpus: u32,
    models: Box<[bool]>,
    /// By rising CPU: how many ask for that much or less.
    cumulative_by_cpu: Vec<(u64, u64)>,
}

/// The free capacity of one node.
#[derive(Debug, Clone, Copy)]
pub struct FreeCapacity<'a> {
    pub model: usize,
    pub cpu: u64,
    /// What is free of each GPU, in thousandths.
    pub gpus: &'a [u32],
}

impl<'a> From<&'a SimulatedNode> for FreeCapacity<'a> {
    fn from(node: &'a SimulatedNode) -> Self {
        Self {
            model: node.model,
            cpu: node.cpu,
            gpus: &node.gpus,
        }
    }
}

impl TypicalPods {
    /// The typical pods of a trace. Memory does not distinguish them, as in the published runs.
    pub fn from_trace(setting: &WorkloadTrace) -> Self {
        let mut counts: BTreeMap<(u64, u32, u32, &[bool]), u64> = BTreeMap::new();
        for pod in &setting.pods {
            let PodKind {
                cpu,
                milli_per_gpu: milli,
                gpus,
                models,
                ..
            } = &setting.kinds[pod.kind];
            *counts.entry((*cpu, *milli, *gpus, models)).or_default() += 1;
        }
        let mut by_count: Vec<_> = counts.into_iter().collect();
        by_count.sort_by_key(|(shape, count)| Reverse((*count, *shape)));
        let mut shapes: BTreeMap<(u32, u32, &[bool]), BTreeMap<u64, u64>> = BTreeMap::new();
        let mut covered = 0;
        for ((cpu, milli, gpus, models), count) in by_count {
            if covered * 100 >= TYPICAL_PERCENT * setting.pods.len() as u64 {
                break;
            }
            covered += count;
            if gpus > 0 {
                *shapes
                    .entry((milli, gpus, models))
                    .or_default()
                    .entry(cpu)
                    .or_default() += count;
            }
        }
        Self {
            shapes: shapes.into_iter().map(TypicalShape::from_counts).collect(),
            count: covered,
        }
    }

    /// How many pods they represent: the divisor of [`Self::fragments`].
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Thousandths of GPUs that are free and of no use to a pod, summed over all pods that the typical ones represent.
    ///
    /// To a pod that does not fit, all free capacity is of no use; to one that fits, that of GPUs that have too little for it.
    pub fn fragments(&self, capacity: FreeCapacity<'_>) -> u64 {
        let free: u64 = capacity.gpus.iter().map(|free| u64::from(*free)).sum();
        let useful: u64 = self.shapes.iter().map(|shape| shape.usable(capacity)).sum();
        self.count * free - useful
    }
}

impl TypicalShape {
    fn from_counts(
        ((milli, gpus, models), cpus): ((u32, u32, &[bool]), BTreeMap<u64, u64>),
    ) -> Self {
        let mut sum = 0;
        let up_to = cpus.into_iter().map(|(cpu, count)| {
            sum += count;
            (cpu, sum)
        });
        Self {
            milli,
            gpus,
            models: models.into(),
            cumulative_by_cpu: up_to.collect(),
        }
    }

    /// The free capacity of GPUs that fit such a pod, times the number of such pods for which the CPU suffices.
    fn usable(&self, rest: FreeCapacity<'_>) -> u64 {
        if !self.models[rest.model] {
            return 0;
        }
        let (mut roomy, mut free) = (0, 0);
        for gpu in rest.gpus.iter().filter(|free| **free >= self.milli) {
            roomy += 1;
            free += u64::from(*gpu);
        }
        if roomy < self.gpus {
            0
        } else {
            free * self.pods_with_cpu(rest.cpu)
        }
    }

    fn pods_with_cpu(&self, cpu: u64) -> u64 {
        let enough = self
            .cumulative_by_cpu
            .partition_point(|(wanted, _)| *wanted <= cpu);
        enough
            .checked_sub(1)
            .map_or(0, |last| self.cumulative_by_cpu[last].1)
    }
}

/// The whole cluster's fragmentation, maintained node by node.
#[derive(Debug, Clone)]
pub(crate) struct ClusterFragmentation<'t> {
    typical: &'t TypicalPods,
    by_node: Vec<u64>,
    /// Thousandths of GPUs, summed over all pods that the typical ones represent.
    sum: u64,
}

impl<'t> ClusterFragmentation<'t> {
    pub fn new(typical: &'t TypicalPods, nodes: &[SimulatedNode]) -> Self {
        let by_node: Vec<u64> = nodes
            .iter()
            .map(|node| typical.fragments(node.into()))
            .collect();
        Self {
            typical,
            sum: by_node.iter().sum(),
            by_node,
        }
    }

    /// Applies one node's change.
    pub fn update(&mut self, rank: usize, node: &SimulatedNode) {
        let now = self.typical.fragments(node.into());
        self.sum = self.sum - self.by_node[rank] + now;
        self.by_node[rank] = now;
    }

    /// In GPUs, for a pod drawn from the typical ones.
    pub fn gpus(&self) -> f64 {
        self.sum as f64 / self.typical.count.max(1) as f64 / f64::from(WHOLE_GPU)
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{SimulatedCluster, SimulatedPlacement};
    use super::super::testing::{kind, setting};
    use super::*;
    use stowage_scheduling::vocabulary::gpu::GpuSet;

    /// Three kinds of the same frequency: on CPUs alone, half a GPU with much CPU, two whole ones.
    fn typical() -> TypicalPods {
        TypicalPods::from_trace(&setting(
            &[(8000, 2)],
            &[kind(1000, 0, 0), kind(6000, 1, 500), kind(2000, 2, 1000)],
        ))
    }

    #[test]
    fn free_capacity_counts_as_fragmented_for_pods_that_cannot_use_it() {
        let typical = typical();
        let fragments = |cpu, gpus: &[u32]| {
            typical.fragments(FreeCapacity {
                model: 0,
                cpu,
                gpus,
            })
        };
        assert_eq!(typical.count(), 3);
        // Only the pod on CPUs has no use for it.
        assert_eq!(fragments(8000, &[1000, 1000]), 2000);
        // Neither it nor the pod of two; the third fits on one GPU, and of the other nothing is free.
        assert_eq!(fragments(8000, &[0, 500]), 500 * 2);
        // The rest of the first is too little for the half.
        assert_eq!(fragments(8000, &[400, 1000]), 1400 * 2 + 400);
        // Too little CPU for the half.
        assert_eq!(fragments(5999, &[1000, 1000]), 2000 * 2);
    }

    #[test]
    fn a_model_that_a_pod_does_not_accept_is_of_no_use_to_it() {
        let picky = PodKind {
            models: [false, true].into(),
            ..kind(1000, 1, 500)
        };
        let typical = TypicalPods::from_trace(&setting(&[(8000, 1)], &[picky]));
        assert_eq!(
            typical.fragments(FreeCapacity {
                model: 0,
                cpu: 8000,
                gpus: &[1000]
            }),
            1000
        );
        assert_eq!(
            typical.fragments(FreeCapacity {
                model: 1,
                cpu: 8000,
                gpus: &[1000]
            }),
            0
        );
    }

    #[test]
    fn rare_pods_are_not_typical() {
        let mut setting = setting(&[(8000, 1)], &[kind(1000, 1, 500), kind(1000, 1, 700)]);
        setting.pods = (0..100)
            .map(|n| crate::simulate::packing::trace::WorkloadPod {
                kind: usize::from(n >= 95),
                qos: None,
            })
            .collect();
        assert_eq!(TypicalPods::from_trace(&setting).count(), 95);
        setting.pods.push(setting.pods[99]);
        assert_eq!(TypicalPods::from_trace(&setting).count(), 101);
    }

    #[test]
    fn the_sum_follows_each_change() {
        let setting = setting(&[(8000, 2), (8000, 2)], &[kind(1000, 1, 600)]);
        let typical = TypicalPods::from_trace(&setting);
        let mut cluster = SimulatedCluster::new(&setting, &[0, 1]);
        let mut fragments = ClusterFragmentation::new(&typical, cluster.nodes());
        assert_eq!(fragments.gpus(), 0.0);
        cluster.allocate(
            &setting.kinds[0],
            SimulatedPlacement {
                node: 1,
                gpus: GpuSet::single(1),
            },
        );
        fragments.update(1, &cluster.nodes()[1]);
        assert_eq!(fragments.gpus(), 0.4);
    }
}
