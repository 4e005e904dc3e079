//! The packing cost of giving GPUs of a node to a demand, in one figure: how much less of the cluster's free GPU capacity later
//! pods can use.
//!
//! ```text
//! φ = Σ_g w_g·(r_g − U(r_g)) + κ·max(wasted by CPU, by memory) + f·Σ_g w_g·r_g·(1 − share(g))      w_g: capacity ÷ the largest
//! cost = φ(after) − φ(before) + t·(½·CPU left ÷ 128 + ½·free GPUs left ÷ 8) + gpu·σ + Σ_k P_k·(blocks before − after)
//! ```
//!
//! Thousands of nodes are scored for each pod: all that is the same for every pod is in the node's [`NodeSummary`] already, and
//! nothing is allocated here.

use super::cutting_stock::GRID;
use super::gpu_kind::free_for_others;
use super::node_summary::{GpuGroup, GpuSums, HostHeadroom, NodeBefore, NodeSummary, NodeSums};
use super::{LearnedDemand, PackingModel};
use crate::placing::packing::{EqualGpus, Packing, PackingCost};
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::{Device, Gpu, GpuSet};
use crate::vocabulary::node::Node;

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
pub(in crate::placing) struct NodeWithoutHost {
    free_host: Option<HostHeadroom>,
    /// Set if the node then serves fewer levels of CPU than before.
    standing: Option<NodeSums>,
    /// Σ P_k·blocks, as long as no whole GPU is taken.
    blocks: f64,
    /// The part of the cost that is the same for every choice.
    base: f64,
}

impl PackingModel {
    /// The cost of placing a pod without GPUs that takes these resources of a node; `None` if nothing was learned, or the node's
    /// resources are unknown.
    pub fn packing_cost_of_host(
        &self,
        node_summary: &NodeSummary,
        taken: HostResources,
    ) -> Option<PackingCost> {
        let known = self
            .learned_packing(node_summary)
            .filter(|known| known.before.free_host.is_some())?;
        let beside = known.beside(taken);
        let NodeSums { sums, .. } = beside.standing(known.before);
        Some(fixed(known.learned.packing_cost(
            &beside,
            sums,
            beside.blocks,
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
    type Base = NodeWithoutHost;

    fn base(&self, demand: &Demand) -> NodeWithoutHost {
        self.beside(demand.host_resources)
    }

    fn cost(&self, beside: &NodeWithoutHost, demand: &Demand, chosen: GpuSet) -> PackingCost {
        let gpu_groups = self.node_summary.gpu_groups().iter();
        let met = gpu_groups.filter(|gpu_group| gpu_group.places.meets(chosen));
        let taken = met.map(|gpu_group| (gpu_group, gpu_group.places.and(chosen).len()));
        fixed(self.packing_cost_of(beside, chosen, taken, demand))
    }

    fn cost_of_one(
        &self,
        beside: &NodeWithoutHost,
        demand: &Demand,
        equal: EqualGpus<'_>,
    ) -> PackingCost {
        let Some(gpu_group) = equal.gpu_group else {
            return self.cost(beside, demand, equal.places.lowest());
        };
        let taken = std::iter::once((gpu_group, 1));
        fixed(self.packing_cost_of(beside, gpu_group.places.lowest(), taken, demand))
    }

    /// A measure that grows with the cost.
    fn part(&self, _: GpuSet, packing_cost: PackingCost) -> u32 {
        on_scale(packing_cost)
    }

    fn useless(&self, demand: &Demand, chosen: GpuSet) -> Option<Bytes> {
        let Self {
            learned,
            node_summary,
            ..
        } = self;
        let useless = |place| learned.useless(node_summary.gpu_group_of(place), demand);
        Some(chosen.iter().map(useless).sum())
    }
}

/// Half of the scale for cost 0, three quarters for a GPU, nearly all for many: steps are finest where costs are closest.
fn on_scale(PackingCost(packing_cost): PackingCost) -> u32 {
    let packing_cost = packing_cost as f64 * (1.0 / UNIT);
    (500.0 + 500.0 * packing_cost / (1.0 + packing_cost.abs())) as u32
}

/// Rounded: equal costs differ by the noise of the arithmetic.
fn fixed(packing_cost: f64) -> PackingCost {
    // From 2^52 to 2^53 there are no fractions: the sum is rounded, and ends in the whole number. A cast would check for what
    // cannot occur, two million GPUs, and every choice waits for this.
    const WITHOUT_FRACTIONS: f64 = 1.5 * (1u64 << 52) as f64;
    debug_assert!(packing_cost.abs() < 2e6, "{packing_cost}");
    let bits = |sum: f64| sum.to_bits() as i64;
    PackingCost(bits(packing_cost * UNIT + WITHOUT_FRACTIONS) - bits(WITHOUT_FRACTIONS))
}

impl NodeWithoutHost {
    fn standing<'a>(&'a self, before: &'a NodeBefore) -> &'a NodeSums {
        self.standing.as_ref().unwrap_or(&before.standing)
    }
}

impl LearnedPacking<'_> {
    /// The node with this much less CPU and memory.
    fn beside(&self, taken: HostResources) -> NodeWithoutHost {
        let Self {
            learned,
            node_summary,
            before,
        } = self;
        let free_host = before
            .free_host
            .map(|free_host| free_host.without(HostHeadroom::of(taken)));
        let is_level = free_host.is_none_or(|free_host| {
            learned
                .levels
                .is_served(before.standing.level, free_host.cpu)
        });
        let cpu_left = free_host.map_or(0.0, |free_host| free_host.cpu);
        NodeWithoutHost {
            free_host,
            standing: (!is_level).then(|| learned.standing(free_host, node_summary.gpu_groups())),
            blocks: learned.blocks(before.standing.whole, free_host),
            base: before.blocks - before.potential
                + learned.setting.tie * 0.5 / LARGE_NODE.0 * cpu_left,
        }
    }

    /// The cost if the demand gets these GPUs: `taken` says how many of each group.
    fn packing_cost_of<'a>(
        &self,
        beside: &NodeWithoutHost,
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
        } = *beside.standing(before);
        let (mut still_whole, mut scarcity) = (whole, 0.0);
        for (gpu_group, count) in taken {
            let kind = &learned.kinds[usize::from(gpu_group.part.kind)];
            let left = gpu_group.part.left_by(demand, kind);
            let was = if beside.standing.is_none() {
                gpu_group.sums
            } else {
                GpuSums::of(kind, gpu_group.part, level, whole)
            };
            let is = GpuSums::of(kind, left, level, whole);
            // A value that has to be looked up is added last: nothing waits for it before.
            sums.add(-f64::from(count), was);
            sums.add(f64::from(count), is);
            scarcity += f64::from(count) * kind.scarcity * (was.free - is.free);
            if gpu_group.part.is_whole() && !left.is_whole() {
                still_whole -= count;
            }
        }
        if still_whole == whole {
            return learned.packing_cost(beside, &sums, beside.blocks, scarcity);
        }
        let others = node_summary
            .gpu_groups()
            .iter()
            .map(|gpu_group| (gpu_group, gpu_group.places.without(chosen)));
        sums.stuck += learned.stuck_with_fewer(others, level, whole, still_whole);
        learned.packing_cost(
            beside,
            &sums,
            learned.blocks(still_whole, beside.free_host),
            scarcity,
        )
    }
}

impl LearnedDemand {
    /// The cost, given the sums over the GPUs, the remaining blocks, and the scarcity of what is taken.
    #[inline]
    fn packing_cost(
        &self,
        beside: &NodeWithoutHost,
        sums: &GpuSums,
        blocks: f64,
        scarcity: f64,
    ) -> f64 {
        let tie = self.setting.tie * 0.5 / LARGE_NODE.1 * sums.free;
        // The value that takes longest is added last.
        (beside.base + self.unusable(sums) + tie - blocks + scarcity)
            + self.wasted(sums.packing_model, beside.free_host)
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
            let fewer = usable.in_groups(level, before) - usable.in_groups(level, after);
            f64::from(others.len()) * gpu_group.sums.free * fewer
        };
        others
            .filter(|(gpu_group, _)| gpu_group.part.is_whole())
            .map(of)
            .sum()
    }

    /// The useless part of what the demand leaves of a GPU. A remainder below one hundredth is included.
    fn useless(&self, gpu_group: &GpuGroup, demand: &Demand) -> Bytes {
        let kind = &self.kinds[usize::from(gpu_group.part.kind)];
        let part = usize::from(gpu_group.part.left_by(demand, kind).hundredths);
        let of_use = (part - kind.curve.useless(part)) as u64;
        let left = match demand.sharing {
            Sharing::Shared => free_for_others(&gpu_group.gpu).minus(demand.per_gpu),
            Sharing::Exclusive => Bytes::ZERO,
        };
        left.minus(Bytes(
            (u128::from(kind.capacity.0) * u128::from(of_use) / GRID as u128) as u64,
        ))
    }
}

impl Node {
    /// Its GPUs, and what is left beside them.
    pub fn node_gpus(&self) -> NodeGpus<'_> {
        NodeGpus {
            gpus: &self.gpus,
            devices: &self.devices,
            free_host: self.free_host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{EmptyNode, demand_history, learned, shared, whole};
    use super::*;
    use crate::placing::packing::NodeEvaluation;
    use crate::units::MilliCpu;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn a_packing_cost_is_rounded_to_the_nearest_billionth(packing_cost in prop_oneof![-1e6..1e6, -1.0..1.0]) {
            let PackingCost(billionths) = fixed(packing_cost);
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
            let seen_before = EmptyNode::of(&[("H100", 1000), ("L4", 400)], Some(8000));
            let packing_model = learned(&demand_history(pods.chain([whole(2), whole(4)])), &[seen_before]);
            // Some are larger, and some smaller, than any GPU that the model was learned from.
            let models = [("H100", 1000), ("H200", 1400), ("L4", 400), ("T4", 300)];
            let machine = EmptyNode::of(&models, cpu).with(&charged);
            let demand = if milli > 900 { whole(gpus) } else { beside(shared(milli), wanted_cpu) };
            let node_summary = packing_model.node_summary(machine.node_gpus());
            let evaluation = NodeEvaluation::of(&packing_model, &node_summary, &demand);
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
                + 0.5 * fresh.standing.sums.free / LARGE_NODE.1;
            let on = |whole: u32, cpu: Option<f64>| -> f64 {
                let blocks = known.blocks.iter();
                blocks.map(|(block, price)| price * block.on(whole as usize, cpu, 0.0)).sum()
            };
            let broken = on(seen.standing.whole, cpu.map(|cpu| cpu as f64)) - on(fresh.standing.whole, cpu_left);
            let expected = fresh.potential - seen.potential + known.setting.tie * tie + broken;
            let told = evaluation.packing_cost(chosen).0 as f64 / UNIT;
            prop_assert!((told - expected).abs() < 1e-8, "{} {}", told, expected);
        }
    }
}
