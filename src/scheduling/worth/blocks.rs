//! Whole GPUs side by side, which pods of several need: what breaking up a block of them costs.
//!
//! ```text
//! D_k = R·d_k ÷ k                         R: free GPUs; d_k: the share of the demand that comes in pods of k GPUs
//! n_k = Σ_nodes min(⌊whole ÷ k⌋, ⌊CPU ÷ c_k⌋)                                    c_k: the median CPU of such pods
//! P_k = B·k·Φ((D_k − n_k + √D_k) ÷ √D_k)                              the price of one block, by how scarce they are
//! ```
//!
//! Arrivals are counted as a Poisson stream: of D_k that are expected √D_k more or fewer come.

use super::companion::at_most;
use super::mix::Mix;
use crate::units::MilliCpu;
use std::collections::BTreeMap;

/// Sizes of blocks that are priced: the most wanted ones. Pods come with two, four or eight GPUs, rarely with another number.
const MOST: usize = 4;

/// A block of `gpus` whole GPUs on one node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    pub gpus: usize,
    /// Of pods that want as many; the half of them want no more.
    pub cpu: MilliCpu,
    /// The share of the demand for GPUs that comes in such pods.
    pub share: f64,
}

impl Block {
    /// The blocks that the pods seen lately want most. `demand` is what a wish takes, in GPUs.
    pub fn wanted(mix: &Mix, demand: impl Fn(&super::mix::Wish) -> f64) -> Vec<Self> {
        let all: f64 = mix.wishes().map(|(wish, count)| demand(wish) * f64::from(count)).sum();
        let mut pods: BTreeMap<u32, (f64, BTreeMap<MilliCpu, u32>)> = BTreeMap::new();
        for (wish, count) in mix.wishes().filter(|(wish, _)| wish.gpus > 1) {
            let (taken, cpus) = pods.entry(wish.gpus).or_default();
            *taken += demand(wish) * f64::from(count);
            *cpus.entry(wish.companion.cpu).or_default() += count;
        }
        let block = |(gpus, (taken, cpus)): (u32, (f64, BTreeMap<MilliCpu, u32>))| Self {
            gpus: gpus as usize,
            cpu: median(&cpus),
            share: taken / all.max(f64::MIN_POSITIVE),
        };
        let mut blocks: Vec<Self> = pods.into_iter().map(block).collect();
        blocks.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.gpus.cmp(&b.gpus)));
        blocks.truncate(MOST);
        blocks
    }

    /// How many there are on a node with so many whole GPUs; with the part of the next one that there is, if `partial` says how
    /// much that counts.
    pub fn on(&self, whole: usize, cpu: Option<MilliCpu>, partial: f64) -> f64 {
        let gpus = whole as f64 / self.gpus as f64;
        let blocks = match cpu {
            Some(cpu) if self.cpu.0 > 0 => gpus.min(cpu.0 as f64 / self.cpu.0 as f64),
            _ => gpus,
        };
        let nearly = blocks.fract();
        // To the fourth power: a block with one GPU missing is worth keeping, a half one hardly.
        blocks.trunc() + partial * nearly * nearly * nearly * nearly
    }

    /// P_k ÷ B, if `free` GPUs of the cluster are free and `blocks` of them stand together.
    pub fn price(&self, free: f64, blocks: f64) -> f64 {
        let wanted = free * self.share / self.gpus as f64;
        let spread = wanted.sqrt();
        let scarcity = if spread > 0.0 { at_most((wanted - blocks + spread) / spread) } else { 0.0 };
        self.gpus as f64 * scarcity
    }
}

fn median(counts: &BTreeMap<MilliCpu, u32>) -> MilliCpu {
    let all: u32 = counts.values().sum();
    let mut before = 0;
    for (cpu, count) in counts {
        before += count;
        if before * 2 >= all {
            return *cpu;
        }
    }
    MilliCpu::default()
}
