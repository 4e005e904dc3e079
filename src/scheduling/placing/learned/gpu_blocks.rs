//! Blocks of whole GPUs on one node, which multi-GPU pods need: the cost of breaking up a block.
//!
//! ```text
//! D_k = R·d_k ÷ k                         R: free GPUs; d_k: the share of the demand that comes in pods of k GPUs
//! n_k = Σ_nodes min(⌊whole ÷ k⌋, ⌊CPU ÷ c_k⌋)                                    c_k: the CPU that such pods want
//! P_k = B·k·Φ((D_k − n_k + s_k) ÷ s_k)                                the price of one block, by how scarce they are
//! s_k = √((R + c·(all GPUs − R))·d_k ÷ k)                              c: from 0, no pod ends, to 1, as many as come
//! ```
//!
//! Each k has two blocks: what the median pod wants, with the demand of all such pods; and what the largest wants, with the
//! demand of those above the median. Few nodes have what the second needs, and one small pod on each of them excludes those pods.
//!
//! Arrivals are counted as a Poisson stream: with D_k expected arrivals, √D_k more or fewer come. Where pods leave again and
//! others replace them, their number varies by the square root of all of them.

use super::demand_history::{DemandHistory, DemandShape};
use super::exact;
use super::host_demand::at_most;
use crate::units::MilliCpu;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// GPU counts of which blocks are priced: the most wanted ones. Pods request two, four or eight GPUs, rarely another number.
const MOST: usize = 4;

/// A block of `gpus` whole GPUs on one node.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct GpuBlock {
    pub gpus: usize,
    /// The CPU that a pod for this block wants beside them, in thousandths of a core.
    #[serde(with = "exact")]
    pub cpu: f64,
    /// The share of the demand for GPUs that such pods make up.
    #[serde(with = "exact")]
    pub share: f64,
}

impl GpuBlock {
    /// The blocks that recent pods want most. `demand` is what a demand shape takes, in GPUs.
    pub fn wanted(
        demand_history: &DemandHistory,
        demand: impl Fn(&DemandShape) -> f64,
    ) -> Vec<Self> {
        let all: f64 = demand_history
            .demand_shapes()
            .map(|(demand_shape, count)| demand(demand_shape) * f64::from(count))
            .sum();
        let mut pods: BTreeMap<u32, Vec<CpuWant>> = BTreeMap::new();
        for (demand_shape, count) in demand_history
            .demand_shapes()
            .filter(|(demand_shape, _)| demand_shape.gpus > 1)
        {
            let share = demand(demand_shape) * f64::from(count) / all.max(f64::MIN_POSITIVE);
            pods.entry(demand_shape.gpus).or_default().push(CpuWant {
                cpu: demand_shape.host_resources.cpu,
                count,
                share,
            });
        }
        let mut pods: Vec<(u32, Vec<CpuWant>)> = pods.into_iter().collect();
        let share = |wants: &[CpuWant]| wants.iter().map(|want| want.share).sum::<f64>();
        pods.sort_by(|(m, a), (n, b)| share(b).total_cmp(&share(a)).then(m.cmp(n)));
        pods.truncate(MOST);
        pods.into_iter()
            .flat_map(|(gpus, wants)| Self::of(gpus as usize, wants))
            .collect()
    }

    /// The block that the median of these pods wants, and the one that the largest above it wants.
    fn of(gpus: usize, mut wants: Vec<CpuWant>) -> impl Iterator<Item = Self> {
        wants.sort_by_key(|want| want.cpu);
        let median = median(&wants);
        let block = |cpu: MilliCpu, wants: &[CpuWant]| {
            let share = wants.iter().map(|want| want.share).sum();
            Self {
                gpus,
                cpu: cpu.0 as f64,
                share,
            }
        };
        let above = &wants[wants.partition_point(|want| want.cpu <= median)..];
        let largest = above.last().map(|want| block(want.cpu, above));
        [Some(block(median, &wants)), largest].into_iter().flatten()
    }

    /// The number of blocks on a node with so many whole GPUs; including the part of the next block that exists, weighted by
    /// `partial`.
    pub fn on(&self, whole: usize, cpu: Option<f64>, partial: f64) -> f64 {
        // Asked of every node that a pod could be placed on: most have too few whole GPUs, and CPU for all.
        if whole < self.gpus && partial == 0.0 {
            return 0.0;
        }
        let gpus = whole as f64 / self.gpus as f64;
        let blocks = match cpu {
            Some(cpu) if cpu < gpus * self.cpu => cpu / self.cpu,
            _ => gpus,
        };
        let nearly = blocks.fract();
        // To the fourth power: a block with one GPU missing is worth keeping, a half block hardly.
        blocks.trunc() + partial * nearly * nearly * nearly * nearly
    }

    /// P_k ÷ B, if `free` GPUs of the cluster are free, `turning_over` are free or become free again, and the free ones form
    /// `blocks` blocks.
    pub fn price(&self, free: f64, turning_over: f64, blocks: f64) -> f64 {
        let wanted = free * self.share / self.gpus as f64;
        let spread = (turning_over * self.share / self.gpus as f64).sqrt();
        let scarcity = if spread > 0.0 {
            at_most((wanted - blocks + spread) / spread)
        } else {
            0.0
        };
        self.gpus as f64 * scarcity
    }
}

/// The number of pods of some GPU count that want this much CPU, and their share of the demand.
struct CpuWant {
    cpu: MilliCpu,
    count: u32,
    share: f64,
}

/// The median of sorted wants.
fn median(wants: &[CpuWant]) -> MilliCpu {
    let all: u32 = wants.iter().map(|want| want.count).sum();
    let mut before = 0;
    let is_half = |want: &&CpuWant| {
        before += want.count;
        before * 2 >= all
    };
    wants
        .iter()
        .find(is_half)
        .map(|want| want.cpu)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;
    use crate::vocabulary::demand::{HostResources, Sharing};

    fn demand_history(pods: &[(u32, u64)]) -> DemandHistory {
        let mut demand_history = DemandHistory::default();
        for (gpus, cpu) in pods {
            let host_resources = HostResources {
                cpu: MilliCpu(*cpu),
                memory: Bytes::ZERO,
            };
            let (per_gpu, sharing) = (Bytes::gib(80), Sharing::Exclusive);
            demand_history.arrive(DemandShape {
                per_gpu,
                gpus: *gpus,
                sharing,
                host_resources,
                models: [].into(),
            });
        }
        demand_history
    }

    #[test]
    fn each_gpu_count_has_a_block_for_the_median_pod_and_one_for_the_largest() {
        let demand_history =
            demand_history(&[(1, 4), (1, 4), (4, 32), (4, 32), (4, 64), (2, 8), (2, 8)]);
        let blocks = GpuBlock::wanted(&demand_history, |demand_shape| f64::from(demand_shape.gpus));
        let said: Vec<_> = blocks
            .iter()
            .map(|b| (b.gpus, b.cpu, (b.share * 18.0).round() as u32))
            .collect();
        assert_eq!(said, [(4, 32.0, 12), (4, 64.0, 4), (2, 8.0, 4)]);
    }

    #[test]
    fn a_node_has_as_many_blocks_as_its_gpus_and_its_cpu_allow() {
        let block = GpuBlock {
            gpus: 4,
            cpu: 32.0,
            share: 1.0,
        };
        let on = |whole, cpu, partial| block.on(whole, cpu, partial);
        assert_eq!(
            (on(8, None, 0.0), on(7, None, 0.0), on(8, Some(40.0), 0.0)),
            (2.0, 1.0, 1.0)
        );
        assert_eq!((on(2, None, 1.0), on(6, None, 0.5)), (0.0625, 1.031_25));
    }

    #[test]
    fn the_scarcer_blocks_are_the_higher_the_cost_of_one() {
        let block = GpuBlock {
            gpus: 4,
            cpu: 32.0,
            share: 0.5,
        };
        let price = |blocks| block.price(80.0, 80.0, blocks);
        assert!(
            price(40.0) < 0.01
                && price(10.0) > 2.0
                && price(0.0) > price(10.0)
                && price(0.0) <= 4.0
        );
        assert_eq!(block.price(0.0, 0.0, 0.0), 0.0);
        // The last blocks, if pods come and go.
        assert!(block.price(80.0, 800.0, 25.0) > 100.0 * price(25.0));
    }
}
