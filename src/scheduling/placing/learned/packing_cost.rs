//! The packing cost of giving GPUs of a node to a demand, in one figure: how much less of the cluster's free GPU capacity later
//! pods can use.
//!
//! ```text
//! φ = Σ_g w_g·(r_g − U(r_g)) + κ·max(wasted by CPU, by memory) + f·Σ_g w_g·r_g·(1 − share(g))      w_g: capacity ÷ the largest
//! cost = φ(after) − φ(before) + t·(½·CPU left ÷ 128 + ½·free GPUs left ÷ 8) + gpu·σ + Σ_k P_k·(blocks before − after)
//! ```
//!
//! Thousands of nodes are scored for each pod: all that is the same for every pod is in the node's [`NodeSummary`] already, and
//! nothing is allocated here. It has the node's GPUs in groups of equal ones, and the value of its free GPU capacity under one
//! [`PackingModel`]. Eight GPUs of a node are rarely more than three groups: empty ones, full ones, and one or two between.

use super::cutting_stock::GRID;
use super::values::{GpuBlock, GpuKind, free_for_next_pod, hundredths};
use super::{LearnedDemand, PackingModel};
use crate::placing::pack::{EqualGpus, Packing, PackingCost};
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::{Device, Gpu, GpuSet};
use crate::vocabulary::node::Node;
use std::sync::Arc;

/// The GPUs of a node, and the node's free CPU and memory.
#[derive(Debug, Clone, Copy)]
pub struct NodeGpus<'a> {
    pub gpus: &'a [Gpu],
    /// Parallel to `gpus`.
    pub devices: &'a [Device],
    /// CPU and memory that pods may still use; `None` if unknown.
    pub free_host: Option<HostResources>,
}

/// Billionths: far above the noise of the arithmetic, far below any figure that matters.
const UNIT: f64 = 1e9;
/// CPU and GPUs of a large node, the unit for what is left on a node.
const LARGE_NODE: (f64, f64) = (128_000.0, 8.0);

/// A node, and the model for its GPUs: the packing that has learned from demand.
#[derive(Debug, Clone, Copy)]
pub(in crate::placing) struct LearnedPacking<'a> {
    learned: &'a LearnedDemand,
    node_summary: &'a NodeSummary,
    before: &'a NodeBefore,
}

/// The node without the pod's CPU and memory, but with all of its GPUs: the same for every choice.
#[derive(Debug)]
pub(in crate::placing) struct NodeAfterHostCharge {
    free_host: Option<HostHeadroom>,
    /// Set if the node then serves fewer levels of CPU than before.
    changed_sums: Option<NodeSums>,
    /// Σ P_k·blocks, as long as no whole GPU is taken.
    blocks: f64,
    /// The part of the cost that is the same for every choice.
    base: f64,
}

impl PackingModel {
    /// The cost of placing a pod without GPUs that takes these resources of a node; `None` if nothing was learned, or the node's
    /// resources are unknown.
    pub fn host_packing_cost(
        &self,
        node_summary: &NodeSummary,
        taken: HostResources,
    ) -> Option<PackingCost> {
        let packing = self
            .learned_packing(node_summary)
            .filter(|packing| packing.before.free_host.is_some())?;
        let after_host_charge = packing.after_host_charge(taken);
        let NodeSums { sums, .. } = after_host_charge.node_sums(packing.before);
        Some(to_billionths(packing.learned.packing_cost(
            &after_host_charge,
            sums,
            after_host_charge.blocks,
            0.0,
        )))
    }

    /// The packing of a node that this model has summarized; `None` if nothing was learned.
    #[inline]
    pub(in crate::placing) fn learned_packing<'a>(
        &'a self,
        node_summary: &'a NodeSummary,
    ) -> Option<LearnedPacking<'a>> {
        let (learned, before) = self.learned.as_ref().zip(node_summary.before.as_ref())?;
        Some(LearnedPacking {
            learned,
            node_summary,
            before,
        })
    }
}

impl Packing for LearnedPacking<'_> {
    type Base = NodeAfterHostCharge;

    fn base(&self, demand: &Demand) -> NodeAfterHostCharge {
        self.after_host_charge(demand.host_resources)
    }

    fn cost(
        &self,
        after_host_charge: &NodeAfterHostCharge,
        demand: &Demand,
        chosen: GpuSet,
    ) -> PackingCost {
        let gpu_groups = self.node_summary.gpu_groups().iter();
        let met = gpu_groups.filter(|gpu_group| gpu_group.indices.intersects(chosen));
        let taken = met.map(|gpu_group| (gpu_group, gpu_group.indices.intersection(chosen).len()));
        to_billionths(self.packing_cost_of(after_host_charge, chosen, taken, demand))
    }

    fn cost_of_one(
        &self,
        after_host_charge: &NodeAfterHostCharge,
        demand: &Demand,
        equal: EqualGpus<'_>,
    ) -> PackingCost {
        let Some(gpu_group) = equal.gpu_group else {
            return self.cost(after_host_charge, demand, equal.indices.lowest());
        };
        let taken = std::iter::once((gpu_group, 1));
        to_billionths(self.packing_cost_of(
            after_host_charge,
            gpu_group.indices.lowest(),
            taken,
            demand,
        ))
    }

    /// A figure from 0 to 1,000 that grows with the cost.
    fn scaled_cost(&self, _: GpuSet, packing_cost: PackingCost) -> u32 {
        scaled(packing_cost)
    }

    fn unusable_leftover(&self, demand: &Demand, chosen: GpuSet) -> Option<Bytes> {
        let Self {
            learned,
            node_summary,
            ..
        } = self;
        let useless = |index| learned.unusable_leftover(node_summary.gpu_group_of(index), demand);
        Some(chosen.iter().map(useless).sum())
    }
}

/// Half of the scale for cost 0, three quarters for a GPU, nearly all for many: steps are finest where costs are closest.
fn scaled(PackingCost(packing_cost): PackingCost) -> u32 {
    let packing_cost = packing_cost as f64 * (1.0 / UNIT);
    (500.0 + 500.0 * packing_cost / (1.0 + packing_cost.abs())) as u32
}

/// Rounded: equal costs differ by the noise of the arithmetic.
fn to_billionths(packing_cost: f64) -> PackingCost {
    // From 2^52 to 2^53 there are no fractions: the sum is rounded, and ends in the whole number. A cast would check for what
    // cannot occur, two million GPUs, and every choice waits for this.
    const WITHOUT_FRACTIONS: f64 = 1.5 * (1u64 << 52) as f64;
    debug_assert!(packing_cost.abs() < 2e6, "{packing_cost}");
    let bits = |sum: f64| sum.to_bits() as i64;
    PackingCost(bits(packing_cost * UNIT + WITHOUT_FRACTIONS) - bits(WITHOUT_FRACTIONS))
}

impl NodeAfterHostCharge {
    fn node_sums<'a>(&'a self, before: &'a NodeBefore) -> &'a NodeSums {
        self.changed_sums.as_ref().unwrap_or(&before.node_sums)
    }
}

impl LearnedPacking<'_> {
    /// The node after the pod's CPU and memory are charged.
    fn after_host_charge(&self, taken: HostResources) -> NodeAfterHostCharge {
        let Self {
            learned,
            node_summary,
            before,
        } = self;
        let free_host = before
            .free_host
            .map(|free_host| free_host.without(HostHeadroom::from_resources(taken)));
        let is_level = free_host.is_none_or(|free_host| {
            learned
                .levels
                .is_served(before.node_sums.level, free_host.cpu)
        });
        let cpu_left = free_host.map_or(0.0, |free_host| free_host.cpu);
        NodeAfterHostCharge {
            free_host,
            changed_sums: (!is_level)
                .then(|| learned.node_sums(free_host, node_summary.gpu_groups())),
            blocks: learned.blocks(before.node_sums.whole, free_host),
            base: before.blocks - before.potential
                + learned.setting.tie * 0.5 / LARGE_NODE.0 * cpu_left,
        }
    }

    /// The cost if the demand gets these GPUs: `taken` says how many of each group.
    fn packing_cost_of<'a>(
        &self,
        after_host_charge: &NodeAfterHostCharge,
        chosen: GpuSet,
        taken: impl Iterator<Item = (&'a GpuGroup, u32)>,
        demand: &Demand,
    ) -> f64 {
        let Self {
            learned,
            node_summary,
            before,
        } = self;
        let NodeSums {
            level,
            whole,
            mut sums,
        } = *after_host_charge.node_sums(before);
        let (mut still_whole, mut scarcity) = (whole, 0.0);
        for (gpu_group, count) in taken {
            let kind = &learned.kinds[usize::from(gpu_group.part.kind)];
            let left = gpu_group.part.after(demand, kind);
            let was = if after_host_charge.changed_sums.is_none() {
                gpu_group.sums
            } else {
                GpuSums::for_gpu(kind, gpu_group.part, level, whole)
            };
            let is = GpuSums::for_gpu(kind, left, level, whole);
            // A value that has to be looked up is added last: nothing waits for it before.
            sums.add(-f64::from(count), was);
            sums.add(f64::from(count), is);
            scarcity += f64::from(count) * kind.scarcity * (was.free - is.free);
            if gpu_group.part.is_whole() && !left.is_whole() {
                still_whole -= count;
            }
        }
        if still_whole == whole {
            return learned.packing_cost(
                after_host_charge,
                &sums,
                after_host_charge.blocks,
                scarcity,
            );
        }
        let others = node_summary
            .gpu_groups()
            .iter()
            .map(|gpu_group| (gpu_group, gpu_group.indices.difference(chosen)));
        sums.stuck += learned.stuck_with_fewer(others, level, whole, still_whole);
        learned.packing_cost(
            after_host_charge,
            &sums,
            learned.blocks(still_whole, after_host_charge.free_host),
            scarcity,
        )
    }
}

impl LearnedDemand {
    /// The cost, given the sums over the GPUs, the remaining blocks, and the scarcity of what is taken.
    #[inline]
    fn packing_cost(
        &self,
        after_host_charge: &NodeAfterHostCharge,
        sums: &GpuSums,
        blocks: f64,
        scarcity: f64,
    ) -> f64 {
        let tie = self.setting.tie * 0.5 / LARGE_NODE.1 * sums.free;
        // The value that takes longest is added last.
        (after_host_charge.base + self.unusable(sums) + tie - blocks + scarcity)
            + self.wasted(sums.value, after_host_charge.free_host)
    }

    /// How much less useful the remaining whole GPUs are if their node has fewer of them.
    fn stuck_with_fewer<'a>(
        &self,
        others: impl Iterator<Item = (&'a GpuGroup, GpuSet)>,
        level: usize,
        before: u32,
        after: u32,
    ) -> f64 {
        let of = |(gpu_group, others): (&GpuGroup, GpuSet)| {
            let usable = &self.kinds[usize::from(gpu_group.part.kind)].usable;
            let fewer =
                usable.multi_gpu_share(level, before) - usable.multi_gpu_share(level, after);
            f64::from(others.len()) * gpu_group.sums.free * fewer
        };
        others
            .filter(|(gpu_group, _)| gpu_group.part.is_whole())
            .map(of)
            .sum()
    }

    /// The useless part of what the demand leaves of a GPU. A remainder below one hundredth is included.
    fn unusable_leftover(&self, gpu_group: &GpuGroup, demand: &Demand) -> Bytes {
        let kind = &self.kinds[usize::from(gpu_group.part.kind)];
        let part = usize::from(gpu_group.part.after(demand, kind).hundredths);
        let of_use = (part - kind.curve.worthless(part)) as u64;
        let left = match demand.sharing {
            Sharing::Shared => free_for_next_pod(&gpu_group.gpu).minus(demand.per_gpu),
            Sharing::Exclusive => Bytes::ZERO,
        };
        left.minus(Bytes(
            (u128::from(kind.capacity.0) * u128::from(of_use) / GRID as u128) as u64,
        ))
    }
}

impl Node {
    /// The node's GPUs, and its free CPU and memory.
    pub fn node_gpus(&self) -> NodeGpus<'_> {
        NodeGpus {
            gpus: &self.gpus,
            devices: &self.devices,
            free_host: self.free_host,
        }
    }
}

/// The summary of one node under a packing model. Valid as long as neither the node nor the [`PackingModel`] changes.
#[derive(Debug, Clone)]
pub struct NodeSummary {
    /// The node's groups of equal GPUs, in the order of their first GPUs.
    gpu_groups: Arc<[GpuGroup]>,
    free: Bytes,
    /// `None` if nothing was learned.
    pub(super) before: Option<NodeBefore>,
}

/// GPUs of one node that differ by index only.
#[derive(Debug, Clone, Copy)]
pub struct GpuGroup {
    pub gpu: Gpu,
    pub indices: GpuSet,
    pub(super) part: FreePart,
    /// The sums of one of them, as the node is; zero if nothing was learned.
    pub(super) sums: GpuSums,
}

/// A node before a placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeBefore {
    pub free_host: Option<HostHeadroom>,
    pub node_sums: NodeSums,
    /// φ.
    pub potential: f64,
    /// Σ P_k·blocks.
    pub blocks: f64,
}

/// The free part of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct FreePart {
    /// The index of the GPU's kind.
    pub kind: u8,
    pub hundredths: u8,
    /// More than 1 only on a GPU that is larger than its kind.
    pub free: f64,
}

/// A node at one moment, summarized.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeSums {
    /// How many levels of CPU it serves.
    pub level: usize,
    pub whole: u32,
    pub sums: GpuSums,
}

/// A million cores: no node has more, whatever it says, and every packing cost stays small enough to be rounded.
const MAX_MILLI_CPU: u64 = 1_000_000_000;

/// CPU in thousandths of a core and memory in bytes, as floating point.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostHeadroom {
    pub cpu: f64,
    pub memory: f64,
}

/// Sums over GPUs, in GPUs of the largest kind.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GpuSums {
    pub free: f64,
    pub value: f64,
    /// Free capacity that recent pods could not use.
    pub stuck: f64,
}

impl PackingModel {
    /// Summarizes a node.
    pub fn node_summary(&self, node_gpus: NodeGpus<'_>) -> NodeSummary {
        let learned = self.learned.as_ref();
        let mut gpu_groups = gpu_groups(node_gpus, learned);
        let before = learned.map(|learned| {
            learned.node_before(
                node_gpus.free_host.map(HostHeadroom::from_resources),
                &mut gpu_groups,
            )
        });
        NodeSummary {
            free: node_gpus.gpus.iter().map(Gpu::free).sum(),
            before,
            gpu_groups: gpu_groups.into(),
        }
    }
}

impl NodeSummary {
    pub(crate) fn gpu_groups(&self) -> &[GpuGroup] {
        &self.gpu_groups
    }

    /// Free VRAM over all its GPUs.
    pub fn free(&self) -> Bytes {
        self.free
    }

    /// The group of the GPU at this index.
    pub(in crate::placing) fn gpu_group_of(&self, index: usize) -> &GpuGroup {
        let is_it = |gpu_group: &&GpuGroup| gpu_group.indices.contains(index);
        self.gpu_groups
            .iter()
            .find(is_it)
            .expect("every GPU of a node is in one of its groups")
    }
}

fn gpu_groups(node_gpus: NodeGpus<'_>, learned: Option<&LearnedDemand>) -> Vec<GpuGroup> {
    let mut gpu_groups: Vec<GpuGroup> = Vec::with_capacity(node_gpus.gpus.len().min(4));
    for (index, gpu) in node_gpus.gpus.iter().enumerate() {
        let part = learned.map_or_else(FreePart::default, |learned| {
            let kind = learned.kind_of(gpu, node_gpus.devices.get(index));
            FreePart::new(
                &learned.kinds[usize::from(kind)],
                kind,
                free_for_next_pod(gpu),
            )
        });
        match gpu_groups
            .iter_mut()
            .find(|gpu_group| gpu_group.gpu == *gpu && gpu_group.part == part)
        {
            Some(gpu_group) => gpu_group.indices.insert(index),
            None => gpu_groups.push(GpuGroup {
                gpu: *gpu,
                indices: GpuSet::single(index),
                part,
                sums: GpuSums::default(),
            }),
        }
    }
    gpu_groups
}

impl FreePart {
    /// The free part of a GPU of the kind at this index.
    pub fn new(kind: &GpuKind, kind_index: u8, free: Bytes) -> Self {
        let free = kind.part(free);
        Self {
            kind: kind_index,
            hundredths: hundredths(free) as u8,
            free,
        }
    }

    /// The free part that this demand leaves on a GPU of this kind.
    fn after(self, demand: &Demand, kind: &GpuKind) -> Self {
        let free = match demand.sharing {
            Sharing::Shared => (self.free - kind.part(demand.per_gpu)).max(0.0),
            Sharing::Exclusive => 0.0,
        };
        Self {
            hundredths: hundredths(free) as u8,
            free,
            ..self
        }
    }

    pub fn is_whole(&self) -> bool {
        usize::from(self.hundredths) == GRID
    }
}

impl LearnedDemand {
    fn node_before(
        &self,
        free_host: Option<HostHeadroom>,
        gpu_groups: &mut [GpuGroup],
    ) -> NodeBefore {
        let node_sums = self.node_sums(free_host, gpu_groups);
        for gpu_group in gpu_groups {
            gpu_group.sums = self.sums_of(gpu_group.part, node_sums.level, node_sums.whole);
        }
        let (potential, blocks) = (
            self.potential(&node_sums.sums, free_host),
            self.blocks(node_sums.whole, free_host),
        );
        NodeBefore {
            free_host,
            node_sums,
            potential,
            blocks,
        }
    }

    /// The sums of these GPUs beside this much CPU and memory.
    pub(super) fn node_sums(
        &self,
        free_host: Option<HostHeadroom>,
        gpu_groups: &[GpuGroup],
    ) -> NodeSums {
        let level = free_host.map_or(self.levels.len(), |free_host| {
            self.levels.served_by(free_host.cpu)
        });
        let whole = gpu_groups
            .iter()
            .filter(|gpu_group| gpu_group.part.is_whole())
            .map(|gpu_group| gpu_group.indices.len())
            .sum();
        let mut sums = GpuSums::default();
        for gpu_group in gpu_groups {
            sums.add(
                f64::from(gpu_group.indices.len()),
                self.sums_of(gpu_group.part, level, whole),
            );
        }
        NodeSums { level, whole, sums }
    }

    fn sums_of(&self, part: FreePart, level: usize, whole: u32) -> GpuSums {
        GpuSums::for_gpu(&self.kinds[usize::from(part.kind)], part, level, whole)
    }

    /// φ.
    fn potential(&self, sums: &GpuSums, free_host: Option<HostHeadroom>) -> f64 {
        self.unusable(sums) + self.wasted(sums.value, free_host)
    }

    /// The part of φ that GPUs cause.
    pub(super) fn unusable(&self, sums: &GpuSums) -> f64 {
        sums.free - sums.value + self.setting.fragments * sums.stuck
    }

    /// The part of φ that a lack of CPU or memory causes, for free GPU capacity of this value.
    pub(super) fn wasted(&self, value: f64, free_host: Option<HostHeadroom>) -> f64 {
        let Some(free_host) = free_host.filter(|_| self.setting.host_demand > 0.0) else {
            return 0.0;
        };
        let by_cpu = self.cpu.map_or(0.0, |cpu| cpu.wasted(value, free_host.cpu));
        let by_memory = self
            .memory
            .map_or(0.0, |memory| memory.wasted(value, free_host.memory));
        self.setting.host_demand * by_cpu.max(by_memory)
    }

    /// Σ P_k·blocks.
    pub(super) fn blocks(&self, whole: u32, free_host: Option<HostHeadroom>) -> f64 {
        let (cpu, partial) = (
            free_host.map(|free_host| free_host.cpu),
            self.setting.partial_blocks,
        );
        let of =
            |(block, price): &(GpuBlock, f64)| price * block.count_on(whole as usize, cpu, partial);
        self.blocks.iter().map(of).sum()
    }

    /// The kind of this model and capacity, or else the nearest capacity.
    fn kind_of(&self, gpu: &Gpu, device: Option<&Device>) -> u8 {
        let is_it = |kind: &&GpuKind| {
            kind.capacity == gpu.capacity && device.is_some_and(|device| device.model == kind.model)
        };
        let exact = self.kinds.iter().position(|kind| is_it(&kind));
        let distance = |kind: &GpuKind| kind.capacity.0.abs_diff(gpu.capacity.0);
        let nearest = || (0..self.kinds.len()).min_by_key(|index| distance(&self.kinds[*index]));
        exact
            .or_else(nearest)
            .expect("a model that was learned has kinds") as u8
    }
}

impl HostHeadroom {
    pub fn from_resources(host_resources: HostResources) -> Self {
        Self {
            cpu: host_resources.cpu.0.min(MAX_MILLI_CPU) as f64,
            memory: host_resources.memory.0 as f64,
        }
    }

    pub fn without(self, taken: Self) -> Self {
        Self {
            cpu: (self.cpu - taken.cpu).max(0.0),
            memory: (self.memory - taken.memory).max(0.0),
        }
    }
}

impl GpuSums {
    /// The sums of one GPU of this kind, on a node that serves so many levels of CPU and has so many whole GPUs.
    pub fn for_gpu(kind: &GpuKind, part: FreePart, level: usize, whole: u32) -> Self {
        let (free, hundredths) = (
            kind.scale * part.free.min(1.0),
            usize::from(part.hundredths),
        );
        let stuck = free * (1.0 - kind.usable.share(level, hundredths, whole));
        Self {
            free,
            value: kind.scale * kind.curve.at(hundredths),
            stuck,
        }
    }

    /// Adds `other`, `times` times.
    pub fn add(&mut self, times: f64, other: Self) {
        self.free += times * other.free;
        self.value += times * other.value;
        self.stuck += times * other.stuck;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EmptyNode, demand_history, learned, shared, whole};
    use super::*;
    use crate::placing::pack::NodeEvaluation;
    use crate::units::MilliCpu;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_packing_cost_is_rounded_to_the_nearest_billionth(packing_cost in prop_oneof![-1e6..1e6, -1.0..1.0]) {
            let PackingCost(billionths) = to_billionths(packing_cost);
            prop_assert!((billionths as f64 - packing_cost * UNIT).abs() <= 0.5, "{} {}", billionths, packing_cost);
        }

        #[test]
        fn the_incremental_packing_cost_equals_a_fresh_computation(
            sizes in prop::collection::vec((1u64..=1000, 0u64..20_000), 10..40),
            charged in prop::collection::vec(prop_oneof![Just(0u64), 1u64..=300], 4),
            cpu in prop::option::of(0u64..100_000),
            (milli, wanted_cpu, gpus) in (1u64..=1000, 0u64..120_000, 1u32..=3),
        ) {
            // A GiB per core, for every pod.
            let beside = |demand: Demand, cpu: u64| {
                let host_resources = HostResources { cpu: MilliCpu(cpu), memory: Bytes::gib(cpu / 1000) };
                Demand { host_resources, ..demand }
            };
            let pods = sizes.iter().map(|(milli, cpu)| beside(shared(*milli), *cpu));
            let seen_before = EmptyNode::new(&[("H100", 1000), ("L4", 400)], Some(8000));
            let packing_model = learned(&demand_history(pods.chain([whole(2), whole(4)])), &[seen_before]);
            // Some are larger, and some smaller, than any GPU that the model was learned from.
            let models = [("H100", 1000), ("H200", 1400), ("L4", 400), ("T4", 300)];
            let machine = EmptyNode::new(&models, cpu).with_charges(&charged);
            let demand = if milli > 900 { whole(gpus) } else { beside(shared(milli), wanted_cpu) };
            let node_summary = packing_model.node_summary(machine.node_gpus());
            let evaluation = NodeEvaluation::by_model(&packing_model, &node_summary, &demand);
            let gpu_candidates = (0..4).filter(|place| machine.gpus[*place].has_free_vram(&demand));
            let chosen: GpuSet = gpu_candidates.take(demand.gpus as usize).collect();
            let mut after = machine.clone();
            chosen.iter().for_each(|place| after.gpus[place].charge(demand.per_gpu, demand.sharing));
            let left = |free_host: HostResources| HostResources {
                cpu: MilliCpu(free_host.cpu.0.saturating_sub(demand.host_resources.cpu.0)),
                memory: free_host.memory.minus(demand.host_resources.memory),
            };
            after.free_host = machine.free_host.map(left);
            let known = packing_model.learned.as_ref().unwrap();
            let [seen, fresh] =
                [&machine, &after].map(|machine| packing_model.node_summary(machine.node_gpus()).before.unwrap());
            // No pod requires a model: all of the cost but φ is ties and blocks.
            let cpu_left = after.free_host.map(|free_host| free_host.cpu.0 as f64);
            let tie = 0.5 * cpu_left.unwrap_or_default() / LARGE_NODE.0
                + 0.5 * fresh.node_sums.sums.free / LARGE_NODE.1;
            let on = |whole: u32, cpu: Option<f64>| -> f64 {
                let blocks = known.blocks.iter();
                blocks.map(|(block, price)| price * block.count_on(whole as usize, cpu, 0.0)).sum()
            };
            let broken = on(seen.node_sums.whole, cpu.map(|cpu| cpu as f64)) - on(fresh.node_sums.whole, cpu_left);
            let expected = fresh.potential - seen.potential + known.setting.tie * tie + broken;
            let told = evaluation.packing_cost(chosen).0 as f64 / UNIT;
            prop_assert!((told - expected).abs() < 1e-8, "{} {}", told, expected);
        }
    }
}
