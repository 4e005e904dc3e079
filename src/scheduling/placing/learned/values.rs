//! The value of free GPUs by what pods request: as parts ([`GpuKind`]), as blocks of whole GPUs ([`GpuBlock`]), and beside the CPU and
//! memory that are free ([`HostDemand`]).
//!
//! # Kinds
//!
//! Every size is a share of the kind's own capacity: 40 GiB are half of one GPU and all of another, so each capacity has its own
//! value curve. A GPU's weight is its capacity divided by the largest.
//!
//! [`ServableShare`] is the fragmentation measure of Weng, Yang et al., "Beware of Fragmentation" (USENIX ATC 2023), rearranged
//! as a lookup table: F = Σ_g r_g·(1 − the share of pods that GPU g, as it is, could serve).
//!
//! # Blocks
//!
//! Multi-GPU pods need blocks of whole GPUs on one node. Breaking up a block has a cost.
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
//!
//! # CPU and memory
//!
//! Wasted is the expected part of free GPU capacity that no pod can use because the node's CPU or memory is spent.
//!
//! The CPU and memory that pods request follow their GPU request only on average. If each unit of GPU that is placed brings `a`
//! of CPU with a variance of `b²`, then free GPU of value W brings a normally distributed demand of mean aW and deviation b√W,
//! and the node's free CPU falls short by the expected overshoot of a normal variable:
//!
//! ```text
//! a = λ·Σcpu ÷ Σgpu        b² = Σ(cpu − Σcpu ÷ Σgpu·gpu)² ÷ Σgpu           over the pods seen recently
//! μ = aW, s = b√W, z = (μ − free) ÷ s:   shortfall = s·(z·Φ(z) + φ(z)) = (μ − free)·Φ(z) + s·φ(z)
//! wasted = min(W, shortfall ÷ a)                                           in GPUs
//! ```

use super::cutting_stock::{GRID, ValueCurve, WantedSize};
use super::demand_history::{DemandHistory, DemandShape};
use super::exact;
use crate::ids::GpuModel;
use crate::units::{Bytes, MilliCpu};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Gpu;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// Steps of CPU that are distinguished. More would only follow the noise of two thousand pods.
const MAX_CPU_LEVELS: usize = 32;
/// Pods of more GPUs than this are refused by nearly any node that has not all of its GPUs free.
const MAX_GROUP_GPUS: usize = 16;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GpuKind {
    pub model: GpuModel,
    pub capacity: Bytes,
    /// One byte as a part of the capacity.
    #[serde(with = "exact")]
    pub per_byte: f64,
    /// The kind's weight beside the largest.
    #[serde(with = "exact")]
    pub scale: f64,
    pub curve: Arc<ValueCurve>,
    pub usable: ServableShare,
    /// The cost, for each GPU taken, of other pods that can only run on this model.
    #[serde(with = "exact")]
    pub scarcity: f64,
}

impl GpuKind {
    /// These bytes as a part of one such GPU.
    pub fn part(&self, bytes: Bytes) -> f64 {
        bytes.0 as f64 * self.per_byte
    }
}

/// Whole hundredths of a part, which is never negative. A part that is below one only by a rounding error counts as one.
pub fn hundredths(part: f64) -> usize {
    debug_assert!(part >= 0.0);
    // By way of a signed integer: that cast is cheaper, and this runs for every node.
    ((part * GRID as f64 + 1e-6) as i64 as usize).min(GRID)
}

/// The share of a capacity that a demand shape takes; `None` if it is too large for it.
pub(crate) fn capacity_share(demand_shape: &DemandShape, capacity: Bytes) -> Option<f64> {
    let share = demand_shape.per_gpu.0 as f64 / capacity.0.max(1) as f64;
    match demand_shape.sharing {
        _ if demand_shape.per_gpu > capacity => None,
        Sharing::Exclusive => Some(1.0),
        Sharing::Shared => Some(share),
    }
}

/// A share in hundredths, rounded up, from 1. A share that is above one only by a rounding error counts as one.
fn size_in_hundredths(share: f64) -> usize {
    ((share * GRID as f64 - 1e-6).ceil() as usize).clamp(1, GRID)
}

/// The value curve of GPUs with this capacity.
pub fn value_curve(demand_history: &DemandHistory, capacity: Bytes) -> ValueCurve {
    let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
    for (demand_shape, count) in demand_history.demand_shapes() {
        if let Some(share) = capacity_share(demand_shape, capacity) {
            *counts.entry(size_in_hundredths(share)).or_default() +=
                f64::from(count) * f64::from(demand_shape.gpus);
        }
    }
    let wanted: Vec<WantedSize> = counts
        .into_iter()
        .map(|(size, count)| WantedSize { size, count })
        .collect();
    ValueCurve::from_demand(&wanted)
}

/// Amounts of CPU that distinguish recent pods, in thousandths of a core, sorted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CpuLevels(#[serde(with = "exact")] Vec<f64>);

impl CpuLevels {
    pub fn from_history(demand_history: &DemandHistory) -> Self {
        let mut counts: BTreeMap<MilliCpu, u32> = BTreeMap::new();
        demand_history
            .demand_shapes()
            .for_each(|(demand_shape, count)| {
                *counts.entry(demand_shape.host_resources.cpu).or_default() += count
            });
        let each = (demand_history.len() as u32)
            .div_ceil(MAX_CPU_LEVELS as u32)
            .max(1);
        let last = counts.keys().next_back().copied();
        let mut levels = Vec::new();
        let mut since = 0;
        for (cpu, count) in counts {
            since += count;
            // The largest amount of a step stands for all of it: a pod is never assumed to need less than it does.
            if since >= each || Some(cpu) == last {
                levels.push(cpu.0 as f64);
                since = 0;
            }
        }
        Self(levels)
    }

    /// How many of the levels this much CPU serves.
    pub(crate) fn served_by(&self, cpu: f64) -> usize {
        self.0.partition_point(|level| *level <= cpu)
    }

    /// Whether this much CPU serves the first `level` levels.
    pub fn is_served(&self, level: usize, cpu: f64) -> bool {
        level == 0 || self.0[level - 1] <= cpu
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// How many levels must be served for a pod that wants this much.
    fn needed_for(&self, cpu: MilliCpu) -> usize {
        (self.0.partition_point(|level| *level < cpu.0 as f64) + 1).min(self.0.len())
    }
}

/// The share of recent pods that a GPU of one kind could serve, by CPU level of the node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ServableShare {
    /// The share by free hundredths.
    #[serde(with = "exact")]
    by_part: Vec<[f64; GRID + 1]>,
    /// The share by the node's number of whole GPUs; empty if no multi-GPU pod arrived.
    #[serde(with = "exact")]
    by_group: Vec<[f64; MAX_GROUP_GPUS + 1]>,
}

impl ServableShare {
    pub fn from_history(
        demand_history: &DemandHistory,
        levels: &CpuLevels,
        model: &GpuModel,
        capacity: Bytes,
    ) -> Self {
        let has_groups = demand_history
            .demand_shapes()
            .any(|(demand_shape, _)| demand_shape.gpus > 1);
        let groups = if has_groups { levels.len() + 1 } else { 0 };
        let mut usable = Self {
            by_part: vec![[0.0; GRID + 1]; levels.len() + 1],
            by_group: vec![[0.0; MAX_GROUP_GPUS + 1]; groups],
        };
        let all = demand_history.len().max(1) as f64;
        for (demand_shape, count) in demand_history
            .demand_shapes()
            .filter(|(demand_shape, _)| may_run_on(demand_shape, model))
        {
            let Some(share) = capacity_share(demand_shape, capacity) else {
                continue;
            };
            let level = levels.needed_for(demand_shape.host_resources.cpu);
            let weight = f64::from(count) / all;
            match (demand_shape.gpus, demand_shape.sharing) {
                (2.., Sharing::Exclusive) => {
                    usable.by_group[level][MAX_GROUP_GPUS.min(demand_shape.gpus as usize)] += weight
                }
                _ => usable.by_part[level][size_in_hundredths(share)] += weight,
            }
        }
        usable.by_part.iter_mut().for_each(|row| prefix_sum(row));
        usable.by_group.iter_mut().for_each(|row| prefix_sum(row));
        prefix_sum_rows(&mut usable.by_part);
        prefix_sum_rows(&mut usable.by_group);
        usable
    }

    /// The share of pods that a GPU with this many free hundredths could serve, on a node of this CPU level with this many whole
    /// GPUs.
    pub fn share(&self, level: usize, hundredths: usize, whole: u32) -> f64 {
        let alone = self.by_part[level][hundredths];
        if hundredths == GRID {
            alone + self.multi_gpu_share(level, whole)
        } else {
            alone
        }
    }

    /// The part of that share that multi-GPU pods make up.
    pub(crate) fn multi_gpu_share(&self, level: usize, whole: u32) -> f64 {
        self.by_group
            .get(level)
            .map_or(0.0, |row| row[MAX_GROUP_GPUS.min(whole as usize)])
    }
}

fn may_run_on(demand_shape: &DemandShape, model: &GpuModel) -> bool {
    demand_shape.models.is_empty() || demand_shape.models.contains(model)
}

fn prefix_sum(row: &mut [f64]) {
    (1..row.len()).for_each(|index| row[index] += row[index - 1]);
}

fn prefix_sum_rows<const N: usize>(rows: &mut [[f64; N]]) {
    for index in 1..rows.len() {
        let (before, after) = rows.split_at_mut(index);
        after[0]
            .iter_mut()
            .zip(&before[index - 1])
            .for_each(|(sum, below)| *sum += below);
    }
}

/// A GPU's free VRAM for the next pod: none if the GPU accepts no pods.
pub(crate) fn free_for_next_pod(gpu: &Gpu) -> Bytes {
    let is_open = gpu.health == crate::vocabulary::gpu::Health::Healthy && !gpu.exclusive;
    if is_open { gpu.free() } else { Bytes::ZERO }
}

/// GPU counts of which blocks are priced: the most wanted ones. Pods request two, four or eight GPUs, rarely another number.
const MAX_PRICED_GPU_COUNTS: usize = 4;

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
    pub fn most_wanted(
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
        pods.truncate(MAX_PRICED_GPU_COUNTS);
        pods.into_iter()
            .flat_map(|(gpus, wants)| Self::median_and_largest(gpus as usize, wants))
            .collect()
    }

    /// The block that the median of these pods wants, and the one that the largest above it wants.
    fn median_and_largest(gpus: usize, mut wants: Vec<CpuWant>) -> impl Iterator<Item = Self> {
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
    pub fn count_on(&self, whole: usize, cpu: Option<f64>, partial: f64) -> f64 {
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
            normal_cdf((wanted - blocks + spread) / spread)
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

/// λ: the pod that gets the last GPUs of a node is not the average pod but one of those that fit, and these need less CPU and
/// memory. Found by trial on openb, where it is better than 1 on every variant.
const FITTING_POD_FACTOR: f64 = 0.8;

/// The demand of recent pods for one resource beside their GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostDemand {
    /// Amount of the resource per GPU.
    #[serde(with = "exact")]
    per_gpu: f64,
    /// GPUs per unit of the resource.
    #[serde(with = "exact")]
    gpus: f64,
    /// The deviation per GPU, in GPUs.
    #[serde(with = "exact")]
    spread: f64,
    /// The steps of [`overshoot`] in a unit of the resource, on one GPU.
    #[serde(with = "exact")]
    steps: f64,
    /// The square of [`MAX_DEVIATIONS`] deviations.
    #[serde(with = "exact")]
    far: f64,
}

impl HostDemand {
    /// From pods' GPU request and their request of the resource, with a count each. `None` if they request none of it.
    pub fn from_pods(pods: impl Iterator<Item = (f64, f64, f64)> + Clone) -> Option<Self> {
        let sum = |part: fn((f64, f64, f64)) -> f64| pods.clone().map(part).sum::<f64>();
        let gpu = sum(|(gpu, _, count)| gpu * count);
        let brought = sum(|(_, brought, count)| brought * count);
        if gpu <= 0.0 || brought <= 0.0 {
            return None;
        }
        let per_gpu = brought / gpu;
        let squares = pods
            .map(|(gpu, brought, count)| count * (brought - per_gpu * gpu).powi(2))
            .sum::<f64>();
        let spread = (squares / gpu).sqrt();
        let per_gpu = FITTING_POD_FACTOR * per_gpu;
        Some(Self {
            per_gpu,
            gpus: 1.0 / per_gpu,
            spread: spread / per_gpu,
            steps: STEPS_PER_DEVIATION / spread,
            far: (MAX_DEVIATIONS * spread).powi(2),
        })
    }

    /// The part of free GPU capacity of this value that `free` of the resource cannot serve, in GPUs.
    #[inline]
    pub(crate) fn wasted(self, value: f64, free: f64) -> f64 {
        let shortfall = self.per_gpu * value - free;
        // Most nodes have plenty, and thousands are asked. A value of zero, or below it by a rounding error, ends here, too.
        if shortfall <= 0.0 && shortfall * shortfall >= self.far * value {
            return 0.0;
        }
        if self.spread == 0.0 {
            return value.min(shortfall.max(0.0) * self.gpus);
        }
        // The root and the reciprocal take longest: neither waits for the other.
        let (root, reciprocal) = (value.sqrt(), 1.0 / value);
        let steps =
            MAX_DEVIATIONS * STEPS_PER_DEVIATION + shortfall * self.steps * (root * reciprocal);
        value.min(self.spread * root * overshoot(steps))
    }
}

/// A normal variable rarely exceeds this many deviations: once in thirty thousand times.
const MAX_DEVIATIONS: f64 = 4.0;
/// Steps per deviation in the table of [`overshoot`].
const STEPS_PER_DEVIATION: f64 = 64.0;

/// z·Φ(z) + φ(z), where z is `steps` steps above −[`MAX_DEVIATIONS`]: the expected excess of a standard normal variable over −z,
/// where no excess counts as zero. Interpolated in a table, at most 2e-5 too high, because thousands of nodes are asked.
#[inline]
fn overshoot(steps: f64) -> f64 {
    /// The value at each step, and the difference to the next.
    static AT_STEPS: LazyLock<Box<[(f64, f64)]>> = LazyLock::new(|| {
        let at =
            |step: i32| exact_overshoot(f64::from(step) / STEPS_PER_DEVIATION - MAX_DEVIATIONS);
        (0..(2.0 * MAX_DEVIATIONS * STEPS_PER_DEVIATION) as i32)
            .map(|step| (at(step), at(step + 1) - at(step)))
            .collect()
    });
    if steps <= 0.0 {
        return 0.0;
    }
    let below = steps as i64;
    match AT_STEPS.get(below as usize) {
        Some((low, more)) => low + (steps - below as f64) * more,
        None => steps / STEPS_PER_DEVIATION - MAX_DEVIATIONS,
    }
}

/// z·Φ(z) + φ(z), computed; at the ends of the table the limits beyond them.
fn exact_overshoot(z: f64) -> f64 {
    if z.abs() >= MAX_DEVIATIONS {
        z.max(0.0)
    } else {
        z * normal_cdf(z) + normal_density(z)
    }
}

/// Φ(z), to seven digits: formula 26.2.17 of Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964.
pub fn normal_cdf(z: f64) -> f64 {
    const TERMS: [f64; 5] = [
        0.319_381_530,
        -0.356_563_782,
        1.781_477_937,
        -1.821_255_978,
        1.330_274_429,
    ];
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let tail = normal_density(z) * TERMS.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    if z < 0.0 { tail } else { 1.0 - tail }
}

fn normal_density(z: f64) -> f64 {
    const AT_ZERO: f64 = 0.398_942_280_401_432_7;
    AT_ZERO * (-0.5 * z * z).exp()
}

#[cfg(test)]
mod gpu_blocks_tests {
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
            demand_history.record_arrival(DemandShape {
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
        let blocks =
            GpuBlock::most_wanted(&demand_history, |demand_shape| f64::from(demand_shape.gpus));
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
        let on = |whole, cpu, partial| block.count_on(whole, cpu, partial);
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

#[cfg(test)]
mod host_demand_tests {
    use super::*;

    fn overshoot(z: f64) -> f64 {
        super::overshoot((z + MAX_DEVIATIONS) * STEPS_PER_DEVIATION)
    }

    #[test]
    fn the_normal_distribution_matches_published_tables() {
        for (z, share) in [
            (-3.0, 0.001_349_9),
            (-1.0, 0.158_655_3),
            (0.0, 0.5),
            (1.96, 0.975_002_1),
        ] {
            assert!(
                (normal_cdf(z) - share).abs() < 1e-6,
                "{z}: {}",
                normal_cdf(z)
            );
        }
    }

    #[test]
    fn the_expected_overshoot_is_the_integral_of_the_distribution() {
        let step = 1e-3;
        let integral = |z: f64| {
            (-8_000..(z / step) as i64)
                .map(|n| normal_cdf(n as f64 * step) * step)
                .sum::<f64>()
        };
        for z in [-2.0, -0.5, 0.0, 1.0, 3.0] {
            assert!(
                (overshoot(z) - integral(z)).abs() < 1e-3,
                "{z}: {} {}",
                overshoot(z),
                integral(z)
            );
        }
        assert_eq!((overshoot(-40.0), overshoot(40.0)), (0.0, 40.0));
    }

    #[test]
    fn interpolation_adds_almost_nothing_and_never_decreases() {
        let ends = [
            -MAX_DEVIATIONS,
            (-MAX_DEVIATIONS).next_up(),
            MAX_DEVIATIONS.next_down(),
            MAX_DEVIATIONS,
        ]
        .into_iter();
        let mut points: Vec<f64> = (-4500..4500)
            .map(|n| f64::from(n) / 1000.0)
            .chain(ends)
            .collect();
        points.sort_by(f64::total_cmp);
        for z in &points {
            let above = overshoot(*z) - (z * normal_cdf(*z) + normal_density(*z));
            assert!((-1e-5..2e-5).contains(&above), "{z}: {above}");
        }
        assert!(
            points
                .windows(2)
                .all(|pair| overshoot(pair[0]) <= overshoot(pair[1]))
        );
    }

    #[test]
    fn with_equal_host_demand_only_the_shortfall_is_wasted() {
        let host_demand =
            HostDemand::from_pods([(1.0, 10.0, 3.0), (0.5, 5.0, 1.0)].into_iter()).unwrap();
        // The pods that fit request 8 per GPU.
        assert_eq!(host_demand.wasted(4.0, 32.0), 0.0);
        assert_eq!(host_demand.wasted(4.0, 24.0), 1.0);
        assert_eq!(host_demand.wasted(4.0, 0.0), 4.0);
        assert_eq!(
            (
                host_demand.wasted(0.0, 0.0),
                host_demand.wasted(-1e-17, 0.0)
            ),
            (0.0, 0.0)
        );
    }

    #[test]
    fn more_varied_host_demand_wastes_more_when_resources_just_suffice() {
        let host_demand = |other: f64| {
            HostDemand::from_pods([(1.0, 8.0, 1.0), (1.0, other, 1.0)].into_iter()).unwrap()
        };
        let wasted = [8.0, 12.0, 20.0]
            .map(|other| host_demand(other).wasted(2.0, (8.0 + other) / 2.0 * 2.0));
        assert!(wasted[0] < wasted[1] && wasted[1] < wasted[2], "{wasted:?}");
    }

    #[test]
    fn pods_without_host_demand_waste_nothing() {
        assert_eq!(HostDemand::from_pods([(1.0, 0.0, 3.0)].into_iter()), None);
        assert_eq!(HostDemand::from_pods(std::iter::empty()), None);
    }
}
