//! A kind of GPU: one model with one capacity, and the value of its free parts.
//!
//! Every size is a share of the kind's own capacity: 40 GiB are half of one GPU and all of another, so each capacity has its own
//! value curve. A GPU's weight is its capacity divided by the largest.
//!
//! [`ServableShare`] is the fragmentation measure of Weng, Yang et al., "Beware of Fragmentation" (USENIX ATC 2023), rearranged
//! as a lookup table: F = Σ_g r_g·(1 − the share of pods that GPU g, as it is, could serve).

use super::cutting_stock::{GRID, ValueCurve, WantedSize};
use super::demand_history::{DemandHistory, DemandShape};
use super::exact;
use crate::ids::GpuModel;
use crate::units::{Bytes, MilliCpu};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Gpu;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Steps of CPU that are distinguished. More would only follow the noise of two thousand pods.
const LEVELS: usize = 32;
/// Pods of more GPUs than this are refused by nearly any node that has not all of its GPUs free.
const GROUPS: usize = 16;

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
pub(crate) fn share_of(demand_shape: &DemandShape, capacity: Bytes) -> Option<f64> {
    let share = demand_shape.per_gpu.0 as f64 / capacity.0.max(1) as f64;
    match demand_shape.sharing {
        _ if demand_shape.per_gpu > capacity => None,
        Sharing::Exclusive => Some(1.0),
        Sharing::Shared => Some(share),
    }
}

/// A share in hundredths, rounded up, from 1. A share that is above one only by a rounding error counts as one.
fn size(share: f64) -> usize {
    ((share * GRID as f64 - 1e-6).ceil() as usize).clamp(1, GRID)
}

/// The value curve of GPUs with this capacity.
pub fn curve(demand_history: &DemandHistory, capacity: Bytes) -> ValueCurve {
    let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
    for (demand_shape, count) in demand_history.demand_shapes() {
        if let Some(share) = share_of(demand_shape, capacity) {
            *counts.entry(size(share)).or_default() +=
                f64::from(count) * f64::from(demand_shape.gpus);
        }
    }
    let wanted: Vec<WantedSize> = counts
        .into_iter()
        .map(|(size, count)| WantedSize { size, count })
        .collect();
    ValueCurve::of(&wanted)
}

/// Amounts of CPU that distinguish recent pods, in thousandths of a core, sorted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CpuLevels(#[serde(with = "exact")] Vec<f64>);

impl CpuLevels {
    pub fn of(demand_history: &DemandHistory) -> Self {
        let mut counts: BTreeMap<MilliCpu, u32> = BTreeMap::new();
        demand_history
            .demand_shapes()
            .for_each(|(demand_shape, count)| {
                *counts.entry(demand_shape.host_resources.cpu).or_default() += count
            });
        let each = (demand_history.len() as u32).div_ceil(LEVELS as u32).max(1);
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

    pub fn all(&self) -> usize {
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
    /// By how many hundredths are free.
    #[serde(with = "exact")]
    by_part: Vec<[f64; GRID + 1]>,
    /// By the node's number of whole GPUs; empty if no multi-GPU pod arrived.
    #[serde(with = "exact")]
    by_group: Vec<[f64; GROUPS + 1]>,
}

impl ServableShare {
    pub fn of(
        demand_history: &DemandHistory,
        levels: &CpuLevels,
        model: &GpuModel,
        capacity: Bytes,
    ) -> Self {
        let has_groups = demand_history
            .demand_shapes()
            .any(|(demand_shape, _)| demand_shape.gpus > 1);
        let groups = if has_groups { levels.all() + 1 } else { 0 };
        let mut usable = Self {
            by_part: vec![[0.0; GRID + 1]; levels.all() + 1],
            by_group: vec![[0.0; GROUPS + 1]; groups],
        };
        let all = demand_history.len().max(1) as f64;
        for (demand_shape, count) in demand_history
            .demand_shapes()
            .filter(|(demand_shape, _)| may_run_on(demand_shape, model))
        {
            let Some(share) = share_of(demand_shape, capacity) else {
                continue;
            };
            let level = levels.needed_for(demand_shape.host_resources.cpu);
            let weight = f64::from(count) / all;
            match (demand_shape.gpus, demand_shape.sharing) {
                (2.., Sharing::Exclusive) => {
                    usable.by_group[level][GROUPS.min(demand_shape.gpus as usize)] += weight
                }
                _ => usable.by_part[level][size(share)] += weight,
            }
        }
        usable.by_part.iter_mut().for_each(|row| add_up(row));
        usable.by_group.iter_mut().for_each(|row| add_up(row));
        add_up_rows(&mut usable.by_part);
        add_up_rows(&mut usable.by_group);
        usable
    }

    /// The share of pods that a GPU with this many free hundredths could serve, on a node of this CPU level with this many whole
    /// GPUs.
    pub fn share(&self, level: usize, hundredths: usize, whole: u32) -> f64 {
        let alone = self.by_part[level][hundredths];
        if hundredths == GRID {
            alone + self.in_groups(level, whole)
        } else {
            alone
        }
    }

    /// The part of that share that multi-GPU pods make up.
    pub(crate) fn in_groups(&self, level: usize, whole: u32) -> f64 {
        self.by_group
            .get(level)
            .map_or(0.0, |row| row[GROUPS.min(whole as usize)])
    }
}

pub(crate) fn may_run_on(demand_shape: &DemandShape, model: &GpuModel) -> bool {
    demand_shape.models.is_empty() || demand_shape.models.contains(model)
}

fn add_up(row: &mut [f64]) {
    (1..row.len()).for_each(|place| row[place] += row[place - 1]);
}

fn add_up_rows<const N: usize>(rows: &mut [[f64; N]]) {
    for place in 1..rows.len() {
        let (before, after) = rows.split_at_mut(place);
        after[0]
            .iter_mut()
            .zip(&before[place - 1])
            .for_each(|(sum, below)| *sum += below);
    }
}

/// A GPU's free VRAM for the next pod: none if the GPU accepts no pods.
pub(crate) fn free_for_others(gpu: &Gpu) -> Bytes {
    let is_open = gpu.health == crate::vocabulary::gpu::Health::Healthy && !gpu.exclusive;
    if is_open { gpu.free() } else { Bytes::ZERO }
}
