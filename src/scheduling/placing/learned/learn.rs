//! Learns a [`PackingModel`] from the demand history and the current cluster. Takes about a millisecond, once in a hundred
//! arrivals; nothing on the request path calls it.

use super::demand_history::{DemandHistory, DemandShape, ENOUGH};
use super::gpu_blocks::GpuBlock;
use super::gpu_kind;
use super::gpu_kind::{CpuLevels, GpuKind, ServableShare, free_for_others, share_of};
use super::host_demand::HostDemand;
use super::packing_cost::NodeGpus;
use super::potential_weights::PotentialWeights;
use super::{LearnedDemand, PackingModel};
use crate::ids::GpuModel;
use crate::units::Bytes;
use crate::vocabulary::gpu::Gpu;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The greatest number of GPU kinds; further kinds are treated as the most similar one. Clusters have a handful, and agents that
/// report the same card with different reserves make only a few.
const MOST_KINDS: usize = 64;

impl PackingModel {
    /// What `demand_history` says about GPUs like those of these nodes. An empty model if too little was seen, or there are no
    /// GPUs.
    pub fn learn<'a>(
        demand_history: &DemandHistory,
        nodes_gpus: impl Iterator<Item = NodeGpus<'a>> + Clone,
    ) -> Self {
        let (free, learned_at) = (FreeGpus::of(nodes_gpus.clone()), demand_history.arrivals());
        if demand_history.len() < ENOUGH || free.by_kind.is_empty() {
            return Self {
                learned_at,
                ..Self::default()
            };
        }
        let setting = PotentialWeights::at(
            demand_history.departures_per_arrival(),
            demand_history.turned_away(),
        );
        let demand = |demand_shape: &DemandShape| free.taken_by(demand_shape);
        let levels = CpuLevels::of(demand_history);
        let brought = |part: fn(&DemandShape) -> f64| {
            HostDemand::of(demand_history.demand_shapes().map(|(demand_shape, count)| {
                (demand(demand_shape), part(demand_shape), f64::from(count))
            }))
        };
        let blocks = GpuBlock::wanted(demand_history, demand);
        let turning_over = free.all() + setting.turnover * (free.capacity - free.all());
        let price = |block: GpuBlock| {
            let there: f64 = nodes_gpus
                .clone()
                .map(|node_gpus| blocks_on(node_gpus, &block, setting.partial_blocks))
                .sum();
            (
                block,
                setting.blocks * block.price(free.all(), turning_over, there),
            )
        };
        let blocks = blocks
            .into_iter()
            .map(price)
            .filter(|(_, price)| *price > 0.0)
            .collect();
        let (cpu, memory) = (
            brought(|demand_shape| demand_shape.host_resources.cpu.0 as f64),
            brought(|demand_shape| demand_shape.host_resources.memory.0 as f64),
        );
        let kinds = kinds(demand_history, &free, &levels);
        Self {
            generation: 0,
            learned_at,
            learned: Some(LearnedDemand {
                setting,
                kinds,
                levels,
                cpu,
                memory,
                blocks,
            }),
        }
    }
}

fn is_whole(gpu: &Gpu) -> bool {
    gpu.capacity > Bytes::ZERO && free_for_others(gpu) >= gpu.capacity
}

fn blocks_on(node_gpus: NodeGpus<'_>, block: &GpuBlock, partial: f64) -> f64 {
    let whole = node_gpus.gpus.iter().filter(|gpu| is_whole(gpu)).count();
    block.on(
        whole,
        node_gpus.free_host.map(|free_host| free_host.cpu.0 as f64),
        partial,
    )
}

/// Free GPU capacity of the cluster, by kind.
struct FreeGpus {
    /// In units of the largest GPU.
    by_kind: BTreeMap<(GpuModel, Bytes), f64>,
    largest: Bytes,
    /// The capacity of all GPUs, in the same units.
    capacity: f64,
    capacities: BTreeSet<Bytes>,
}

impl FreeGpus {
    fn of<'a>(nodes_gpus: impl Iterator<Item = NodeGpus<'a>> + Clone) -> Self {
        let mut capacity = 0.0;
        let mut bytes: Vec<((GpuModel, Bytes), f64)> = Vec::new();
        for (gpu, device) in
            nodes_gpus.flat_map(|node_gpus| node_gpus.gpus.iter().zip(node_gpus.devices))
        {
            if gpu.capacity == Bytes::ZERO {
                continue;
            }
            let free = free_for_others(gpu).0 as f64;
            capacity += gpu.capacity.0 as f64;
            // A name is copied once per kind.
            match bytes
                .iter()
                .position(|(kind, _)| kind.1 == gpu.capacity && kind.0 == device.model)
            {
                Some(known) => bytes[known].1 += free,
                None if bytes.len() == MOST_KINDS => {}
                None => bytes.push(((device.model.clone(), gpu.capacity), free)),
            }
        }
        let capacities: BTreeSet<Bytes> =
            bytes.iter().map(|((_, capacity), _)| *capacity).collect();
        let largest = capacities.last().copied().unwrap_or_default();
        let by_kind = bytes
            .into_iter()
            .map(|(kind, sum)| (kind, sum / largest.0.max(1) as f64))
            .collect();
        Self {
            by_kind,
            largest,
            capacity: capacity / largest.0.max(1) as f64,
            capacities,
        }
    }

    /// R: all free capacity.
    fn all(&self) -> f64 {
        self.by_kind.values().sum()
    }

    fn scale(&self, capacity: Bytes) -> f64 {
        capacity.0 as f64 / self.largest.0.max(1) as f64
    }

    /// What a demand shape takes. A pod that wants whole GPUs is assumed to get the smallest that fit.
    fn taken_by(&self, demand_shape: &DemandShape) -> f64 {
        let smallest = self
            .capacities
            .range(demand_shape.per_gpu..)
            .next()
            .unwrap_or(&self.largest);
        let share = share_of(demand_shape, *smallest).unwrap_or(1.0);
        share * self.scale(*smallest) * f64::from(demand_shape.gpus)
    }

    /// Free capacity of these models.
    fn on(&self, models: &[GpuModel]) -> f64 {
        self.by_kind
            .iter()
            .filter(|((model, _), _)| models.contains(model))
            .map(|(_, free)| free)
            .sum()
    }
}

fn kinds(demand_history: &DemandHistory, free: &FreeGpus, levels: &CpuLevels) -> Vec<GpuKind> {
    let curves: BTreeMap<Bytes, Arc<_>> = free
        .capacities
        .iter()
        .map(|capacity| {
            (
                *capacity,
                Arc::new(gpu_kind::curve(demand_history, *capacity)),
            )
        })
        .collect();
    let insisting = insisting(demand_history, free);
    let kind = |(model, capacity): &(GpuModel, Bytes)| GpuKind {
        model: model.clone(),
        capacity: *capacity,
        per_byte: 1.0 / capacity.0.max(1) as f64,
        scale: free.scale(*capacity),
        curve: curves[capacity].clone(),
        usable: ServableShare::of(demand_history, levels, model, *capacity),
        scarcity: insisting
            .iter()
            .filter(|(models, _)| models.contains(model))
            .map(|(_, engine_load)| engine_load)
            .sum::<f64>()
            .min(1.0),
    };
    free.by_kind.keys().map(kind).collect()
}

/// R·d_s ÷ free(s), for each set of models that pods require.
fn insisting(demand_history: &DemandHistory, free: &FreeGpus) -> Vec<(Arc<[GpuModel]>, f64)> {
    let all: f64 = demand_history
        .demand_shapes()
        .map(|(demand_shape, count)| free.taken_by(demand_shape) * f64::from(count))
        .sum();
    let mut demand: BTreeMap<Arc<[GpuModel]>, f64> = BTreeMap::new();
    for (demand_shape, count) in demand_history
        .demand_shapes()
        .filter(|(demand_shape, _)| !demand_shape.models.is_empty())
    {
        *demand.entry(demand_shape.models.clone()).or_default() +=
            free.taken_by(demand_shape) * f64::from(count);
    }
    let engine_load = |(models, taken): (Arc<[GpuModel]>, f64)| {
        let there = free.on(&models).max(f64::MIN_POSITIVE);
        (
            models,
            (free.all() * taken / all.max(f64::MIN_POSITIVE) / there).min(1.0),
        )
    };
    demand.into_iter().map(engine_load).collect()
}
