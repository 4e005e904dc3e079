//! Learns a [`PackingModel`] from the demand history and the current cluster. Takes about a millisecond, once in a hundred
//! arrivals; nothing on the request path calls it.
//!
//! It sets the weights of the parts of the potential ([`PotentialWeights`]) by how many pods end and how many never get a place.
//! Where pods arrive and stay, a place is spoilt for good: CPU that a node lacks is lacking forever. Where as many pods end as
//! arrive, everything becomes free again, and whole GPUs are worth keeping for the largest pods: nodes are kept empty as long as
//! there are any. Where the demand exceeds the capacity, no node stays empty; all that counts then is how much of the free
//! capacity could be used at once. Each setting is worse than simpler policies at the others' ends, so the observed demand
//! decides.

use super::demand_history::{DemandHistory, DemandShape, MIN_ARRIVALS};
use super::packing_cost::NodeGpus;
use super::values::{
    CpuLevels, GpuBlock, GpuKind, HostDemand, ServableShare, capacity_share, free_for_next_pod,
};
use super::{LearnedDemand, PackingModel, exact, values};
use crate::ids::GpuModel;
use crate::units::Bytes;
use crate::vocabulary::gpu::Gpu;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The greatest number of GPU kinds; further kinds are treated as the most similar one. Clusters have a handful, and agents that
/// report the same card with different reserves make only a few.
const MAX_KINDS: usize = 64;

impl PackingModel {
    /// What `demand_history` says about GPUs like those of these nodes. An empty model if too little was seen, or there are no
    /// GPUs.
    pub fn learn<'a>(
        demand_history: &DemandHistory,
        nodes_gpus: impl Iterator<Item = NodeGpus<'a>> + Clone,
    ) -> Self {
        let (free, learned_at) = (FreeGpus::new(nodes_gpus.clone()), demand_history.arrivals());
        if demand_history.len() < MIN_ARRIVALS || free.by_kind.is_empty() {
            return Self {
                learned_at,
                ..Self::default()
            };
        }
        let setting = PotentialWeights::interpolated(
            demand_history.departures_per_arrival(),
            demand_history.unmet_ratio(),
        );
        let demand = |demand_shape: &DemandShape| free.taken_by(demand_shape);
        let levels = CpuLevels::from_history(demand_history);
        let brought = |part: fn(&DemandShape) -> f64| {
            HostDemand::from_pods(demand_history.demand_shapes().map(|(demand_shape, count)| {
                (demand(demand_shape), part(demand_shape), f64::from(count))
            }))
        };
        let blocks = GpuBlock::most_wanted(demand_history, demand);
        let turning_over = free.total() + setting.turnover * (free.capacity - free.total());
        let price = |block: GpuBlock| {
            let existing: f64 = nodes_gpus
                .clone()
                .map(|node_gpus| blocks_on(node_gpus, &block, setting.partial_blocks))
                .sum();
            (
                block,
                setting.blocks * block.price(free.total(), turning_over, existing),
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
    gpu.capacity > Bytes::ZERO && free_for_next_pod(gpu) >= gpu.capacity
}

fn blocks_on(node_gpus: NodeGpus<'_>, block: &GpuBlock, partial: f64) -> f64 {
    let whole = node_gpus.gpus.iter().filter(|gpu| is_whole(gpu)).count();
    block.count_on(
        whole,
        node_gpus.free_host.map(|free_host| free_host.cpu.0 as f64),
        partial,
    )
}

/// Free GPU capacity of the cluster, by kind.
struct FreeGpus {
    /// Free capacity by GPU kind, in units of the largest GPU.
    by_kind: BTreeMap<(GpuModel, Bytes), f64>,
    largest: Bytes,
    /// The capacity of all GPUs, in the same units.
    capacity: f64,
    capacities: BTreeSet<Bytes>,
}

impl FreeGpus {
    fn new<'a>(nodes_gpus: impl Iterator<Item = NodeGpus<'a>> + Clone) -> Self {
        let mut capacity = 0.0;
        let mut bytes: Vec<((GpuModel, Bytes), f64)> = Vec::new();
        for (gpu, device) in
            nodes_gpus.flat_map(|node_gpus| node_gpus.gpus.iter().zip(node_gpus.devices))
        {
            if gpu.capacity == Bytes::ZERO {
                continue;
            }
            let free = free_for_next_pod(gpu).0 as f64;
            capacity += gpu.capacity.0 as f64;
            // A name is copied once per kind.
            match bytes
                .iter()
                .position(|(kind, _)| kind.1 == gpu.capacity && kind.0 == device.model)
            {
                Some(index) => bytes[index].1 += free,
                None if bytes.len() == MAX_KINDS => {}
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
    fn total(&self) -> f64 {
        self.by_kind.values().sum()
    }

    fn scale(&self, capacity: Bytes) -> f64 {
        capacity.0 as f64 / self.largest.0.max(1) as f64
    }

    /// The capacity that a demand shape takes. A pod that wants whole GPUs is assumed to get the smallest that fit.
    fn taken_by(&self, demand_shape: &DemandShape) -> f64 {
        let smallest = self
            .capacities
            .range(demand_shape.per_gpu..)
            .next()
            .unwrap_or(&self.largest);
        let share = capacity_share(demand_shape, *smallest).unwrap_or(1.0);
        share * self.scale(*smallest) * f64::from(demand_shape.gpus)
    }

    /// Free capacity of these models.
    fn of_models(&self, models: &[GpuModel]) -> f64 {
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
                Arc::new(values::value_curve(demand_history, *capacity)),
            )
        })
        .collect();
    let scarcity_by_models = scarcity_by_models(demand_history, free);
    let kind = |(model, capacity): &(GpuModel, Bytes)| GpuKind {
        model: model.clone(),
        capacity: *capacity,
        per_byte: 1.0 / capacity.0.max(1) as f64,
        scale: free.scale(*capacity),
        curve: curves[capacity].clone(),
        usable: ServableShare::from_history(demand_history, levels, model, *capacity),
        scarcity: scarcity_by_models
            .iter()
            .filter(|(models, _)| models.contains(model))
            .map(|(_, scarcity)| scarcity)
            .sum::<f64>()
            .min(1.0),
    };
    free.by_kind.keys().map(kind).collect()
}

/// R·d_s ÷ free(s), for each set of models that pods require.
fn scarcity_by_models(
    demand_history: &DemandHistory,
    free: &FreeGpus,
) -> Vec<(Arc<[GpuModel]>, f64)> {
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
    let scarcity = |(models, taken): (Arc<[GpuModel]>, f64)| {
        let available = free.of_models(&models).max(f64::MIN_POSITIVE);
        (
            models,
            (free.total() * taken / all.max(f64::MIN_POSITIVE) / available).min(1.0),
        )
    };
    demand.into_iter().map(scarcity).collect()
}

/// Factors of the potential's parts; see [`super::packing_cost`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct PotentialWeights {
    /// κ: the part wasted by a lack of CPU and memory.
    #[serde(with = "exact")]
    pub host_demand: f64,
    /// f: the part that recent pods could not use now.
    #[serde(with = "exact")]
    pub fragments: f64,
    /// t: what is left on the node. Breaks ties, or, where pods end, keeps some nodes empty for the largest pods.
    #[serde(with = "exact")]
    pub tie: f64,
    /// B: whole GPUs for multi-GPU pods.
    #[serde(with = "exact")]
    pub blocks: f64,
    /// Credit for blocks that are nearly whole.
    #[serde(with = "exact")]
    pub partial_blocks: f64,
    /// c: the part of the used capacity that becomes free again.
    #[serde(with = "exact")]
    pub turnover: f64,
}

/// No pod ends: found by trial on openb, as are the others.
const NO_TURNOVER: PotentialWeights = PotentialWeights {
    host_demand: 1.0,
    fragments: 0.1,
    tie: 0.02,
    blocks: 0.1,
    partial_blocks: 0.0,
    turnover: 0.0,
};
/// As many pods end as arrive.
const FULL_TURNOVER: PotentialWeights = PotentialWeights {
    host_demand: 0.0,
    fragments: 0.3,
    tie: 0.6,
    blocks: 0.3,
    partial_blocks: 1.0,
    turnover: 1.0,
};
/// As many pods end as get a place, and some get none.
const OVERSUBSCRIBED: PotentialWeights = PotentialWeights {
    fragments: 1.0,
    tie: 0.1,
    ..FULL_TURNOVER
};
/// The part of the demand that is refused by chance.
const REFUSED_BY_CHANCE: f64 = 0.02;
/// The refused part of the demand from which on the capacity does not suffice for all.
const REFUSED_FOR_CAPACITY: f64 = 0.08;
/// Pods that end per arrival in a cluster that is full and stays so; a few pods are refused, and never end.
const FULL_CHURN: f64 = 0.5;

impl PotentialWeights {
    /// Interpolates, by the number of pods that ended per arrival, and by the refused part of the demand.
    pub fn interpolated(departures_per_arrival: f64, turned_away: f64) -> Self {
        let change = (departures_per_arrival / FULL_CHURN).clamp(0.0, 1.0);
        let crowd = ((turned_away - REFUSED_BY_CHANCE)
            / (REFUSED_FOR_CAPACITY - REFUSED_BY_CHANCE))
            .clamp(0.0, 1.0);
        NO_TURNOVER.blend(&FULL_TURNOVER.blend(&OVERSUBSCRIBED, crowd), change)
    }

    fn blend(&self, other: &Self, part: f64) -> Self {
        let between = |of: fn(&Self) -> f64| of(self) * (1.0 - part) + of(other) * part;
        Self {
            host_demand: between(|s| s.host_demand),
            fragments: between(|s| s.fragments),
            tie: between(|s| s.tie),
            blocks: between(|s| s.blocks),
            partial_blocks: between(|s| s.partial_blocks),
            turnover: between(|s| s.turnover),
        }
    }
}

#[cfg(test)]
mod potential_weights_tests {
    use super::*;

    #[test]
    fn host_demand_has_weight_without_departures_and_fragments_with_many() {
        assert_eq!(PotentialWeights::interpolated(0.0, 0.0), NO_TURNOVER);
        assert_eq!(PotentialWeights::interpolated(0.9, 0.01), FULL_TURNOVER);
        let between = PotentialWeights::interpolated(0.25, 0.0);
        assert!(
            between.host_demand < NO_TURNOVER.host_demand
                && between.fragments < FULL_TURNOVER.fragments
        );
    }

    #[test]
    fn excess_demand_raises_the_weight_of_fragments_only_if_pods_leave() {
        assert_eq!(PotentialWeights::interpolated(0.9, 0.3), OVERSUBSCRIBED);
        assert_eq!(PotentialWeights::interpolated(0.0, 0.3), NO_TURNOVER);
        let between = PotentialWeights::interpolated(0.9, 0.05);
        assert!(
            between.fragments > FULL_TURNOVER.fragments
                && between.fragments < OVERSUBSCRIBED.fragments
        );
    }
}
