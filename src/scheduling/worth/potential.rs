//! What is to be said against giving GPUs of a node to a demand, in one figure: how much less of the cluster's free GPU can be
//! used by those who come after it.
//!
//! ```text
//! φ = Σ_g w_g·(r_g − U(r_g)) + κ·max(wasted by CPU, by memory) + f·Σ_g w_g·r_g·(1 − share(g))      w_g: capacity ÷ the largest
//! loss = φ(after) − φ(before) + t·(½·CPU left ÷ 128 + ½·free GPUs left ÷ 8) + gpu·σ + Σ_k P_k·(blocks before − after)
//! ```
//!
//! Where nothing was learned, the loss is what best fit goes by: the VRAM left over. Thousands of nodes are judged for each pod: all
//! that is the same for every pod is in the node's [`Outlook`] already, and for one that has it nothing is allocated.

use super::cutting::GRID;
use super::kind::{free_for_others, hundredths};
use super::outlook::{Before, Lot, Outlook, Part, Standing};
use super::{Learned, Worth};
use crate::scheduling::device::{Device, Gpu, GpuSet};
use crate::scheduling::request::{Companion, Demand, Sharing};
use crate::units::{Bytes, MilliCpu};
use serde::Serialize;
use std::cell::OnceCell;

/// GPUs side by side, and what is left beside them.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    pub gpus: &'a [Gpu],
    /// In parallel.
    pub devices: &'a [Device],
    /// CPU and memory that pods may still have; `None` if nobody knows.
    pub spare: Option<Companion>,
}

/// What is lost by a choice, less is better: billionths of a GPU, or, where nothing was learned, bytes left over. Comparable
/// under one [`Worth`] for one demand only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Loss(pub i64);

/// Billionths: far above the noise of the arithmetic, far below anything that matters.
const UNIT: f64 = 1e9;
/// CPU and GPUs of a large node, by which what is left on one is measured.
const LARGE_NODE: (f64, f64) = (128_000.0, 8.0);

/// One node, looked at for one demand: its choices are compared by it.
#[derive(Debug)]
pub struct Appraisal<'a> {
    demand: &'a Demand,
    seen: Seen<'a>,
    learned: Option<&'a Learned>,
    /// The node without the pod's CPU and memory: what is the same for every choice. Found when the first choice is compared:
    /// most nodes have no room, and nothing to choose.
    beside: OnceCell<Standing>,
}

/// GPUs of a node: each alone, or in lots of such as are alike.
#[derive(Debug, Clone, Copy)]
pub enum Lots<'a> {
    Alone(&'a [Gpu]),
    Alike(&'a [Lot]),
}

/// What a node is judged by.
#[derive(Debug)]
enum Seen<'a> {
    /// Where nothing was learned.
    Gpus(&'a [Gpu]),
    Known(&'a Outlook),
    Fresh(Box<Outlook>),
}

impl Seen<'_> {
    fn outlook(&self) -> Option<&Outlook> {
        match self {
            Self::Gpus(_) => None,
            Self::Known(outlook) => Some(outlook),
            Self::Fresh(outlook) => Some(outlook),
        }
    }
}

impl Worth {
    /// This node, to be looked at for this demand.
    pub fn appraise<'a>(&'a self, site: Site<'a>, demand: &'a Demand) -> Appraisal<'a> {
        match self.is_learned() {
            true => self.appraisal(Seen::Fresh(Box::new(self.outlook(site))), demand),
            false => Appraisal::by_best_fit(site.gpus, demand),
        }
    }

    /// The same of a node that this worth has summed up already.
    pub fn appraise_known<'a>(&'a self, outlook: &'a Outlook, demand: &'a Demand) -> Appraisal<'a> {
        self.appraisal(Seen::Known(outlook), demand)
    }

    fn appraisal<'a>(&'a self, seen: Seen<'a>, demand: &'a Demand) -> Appraisal<'a> {
        let learned = self.learned.as_ref().filter(|_| !demand.asks_plugin());
        Appraisal { demand, seen, learned, beside: OnceCell::new() }
    }

    /// What is lost if a pod without a GPU takes this from a node; `None` if nothing was learned, or nobody knows what the node
    /// has.
    pub fn loss_of_company(&self, outlook: &Outlook, taken: Companion) -> Option<Loss> {
        let (learned, before) = self.learned.as_ref().zip(outlook.before.as_ref())?;
        before.standing.spare?;
        let beside = learned.beside(outlook, before, taken);
        Some(fixed(learned.loss(before, &beside)))
    }
}

impl<'a> Appraisal<'a> {
    /// GPUs of which nothing else is known: those with the least left over are best.
    pub fn by_best_fit(gpus: &'a [Gpu], demand: &'a Demand) -> Self {
        Self { demand, seen: Seen::Gpus(gpus), learned: None, beside: OnceCell::new() }
    }

    pub fn demand(&self) -> &'a Demand {
        self.demand
    }

    /// Its GPUs.
    pub fn lots(&self) -> Lots<'_> {
        match &self.seen {
            Seen::Gpus(gpus) => Lots::Alone(gpus),
            Seen::Known(outlook) => Lots::Alike(outlook.lots()),
            Seen::Fresh(outlook) => Lots::Alike(outlook.lots()),
        }
    }

    /// The GPU at this place.
    pub fn gpu(&self, place: usize) -> &Gpu {
        match &self.seen {
            Seen::Gpus(gpus) => &gpus[place],
            Seen::Known(outlook) => &outlook.lot_of(place).gpu,
            Seen::Fresh(outlook) => &outlook.lot_of(place).gpu,
        }
    }

    /// Free VRAM over all its GPUs.
    pub fn free(&self) -> Bytes {
        match &self.seen {
            Seen::Gpus(gpus) => gpus.iter().map(Gpu::free).sum(),
            Seen::Known(outlook) => outlook.free(),
            Seen::Fresh(outlook) => outlook.free(),
        }
    }

    /// What is lost if the demand gets these.
    pub fn of(&self, chosen: GpuSet) -> Loss {
        match self.before() {
            Some((learned, outlook, before)) => {
                let beside = || learned.beside(outlook, before, self.demand.companion);
                let beside = *self.beside.get_or_init(beside);
                let (after, scarcity) = learned.after(chosen, outlook, self.demand, beside);
                fixed(learned.loss(before, &after) + scarcity)
            }
            None => {
                let left: Bytes = chosen.iter().map(|place| self.left(place)).sum();
                Loss(i64::try_from(left.0).unwrap_or(i64::MAX))
            }
        }
    }

    /// The same on a scale from 0 to 1,000: what of the chosen GPUs stays free, or a measure that grows with the loss.
    pub fn part(&self, chosen: GpuSet, loss: Loss) -> u32 {
        match self.learned {
            Some(_) => on_scale(loss),
            None => {
                let whole: Bytes = chosen.iter().map(|place| self.gpu(place).capacity).sum();
                (loss.0.unsigned_abs().saturating_mul(1000) / whole.0.max(1)) as u32
            }
        }
    }

    /// Of what stays free on these GPUs, what is of no use to the pods seen lately; `None` if nothing was learned.
    pub fn useless(&self, chosen: GpuSet) -> Option<Bytes> {
        let (learned, outlook, _) = self.before()?;
        Some(chosen.iter().map(|place| learned.useless(outlook.lot_of(place), self.demand)).sum())
    }

    fn before(&self) -> Option<(&'a Learned, &Outlook, &Before)> {
        let outlook = self.seen.outlook()?;
        Some((self.learned?, outlook, outlook.before.as_ref()?))
    }

    fn left(&self, place: usize) -> Bytes {
        self.gpu(place).free().minus(self.demand.per_gpu)
    }
}

/// Half of the scale for no loss, three quarters for a GPU, nearly all for many: steps are finest where losses lie closest.
fn on_scale(Loss(loss): Loss) -> u32 {
    let loss = loss as f64 / UNIT;
    (500.0 + 500.0 * loss / (1.0 + loss.abs())) as u32
}

fn fixed(loss: f64) -> Loss {
    // Rounded: what should be equal differs by the noise of the arithmetic. By hand, for it is done for every node.
    let loss = loss * UNIT;
    Loss((loss + 0.5_f64.copysign(loss)) as i64)
}

fn less(spare: Companion, taken: Companion) -> Companion {
    Companion {
        cpu: MilliCpu(spare.cpu.0.saturating_sub(taken.cpu.0)),
        memory: spare.memory.minus(taken.memory),
    }
}

/// What the demand leaves of a GPU to others.
fn rest(gpu: &Gpu, demand: &Demand) -> Bytes {
    match demand.sharing {
        Sharing::Shared => free_for_others(gpu).minus(demand.per_gpu),
        Sharing::Exclusive => Bytes::ZERO,
    }
}

impl Learned {
    /// A node that has this much less of CPU and memory.
    fn beside(&self, outlook: &Outlook, before: &Before, taken: Companion) -> Standing {
        let before = before.standing;
        let spare = before.spare.map(|spare| less(spare, taken));
        match self.level(spare) == before.level {
            true => Standing { spare, ..before },
            false => self.standing(spare, outlook.lots()),
        }
    }

    /// The node once the demand has these GPUs too, and what it costs that others insist on them.
    fn after(&self, chosen: GpuSet, outlook: &Outlook, demand: &Demand, beside: Standing) -> (Standing, f64) {
        let (mut after, mut scarcity) = (beside, 0.0);
        for (lot, taken) in outlook.lots().iter().map(|lot| (lot, lot.places.and(chosen))) {
            if taken.is_empty() {
                continue;
            }
            let kind = &self.kinds[usize::from(lot.part.kind)];
            let left = Part::of(&self.kinds, lot.part.kind, rest(&lot.gpu, demand));
            let (count, level) = (f64::from(taken.len()), after.level);
            after.sums.add(-count, self.sums_of(lot.part, level, beside.whole));
            after.sums.add(count, self.sums_of(left, level, beside.whole));
            scarcity += count * kind.scale * kind.scarcity * (lot.part.free - left.free);
            if lot.part.is_whole() && !left.is_whole() {
                after.whole -= taken.len();
            }
        }
        if after.whole < beside.whole {
            self.regroup(&mut after, chosen, outlook, beside.whole);
        }
        (after, scarcity)
    }

    /// With fewer whole GPUs than before those that are left are of less use, too.
    fn regroup(&self, after: &mut Standing, chosen: GpuSet, outlook: &Outlook, before: u32) {
        for lot in outlook.lots().iter().filter(|lot| lot.part.is_whole()) {
            let others = f64::from(lot.places.without(chosen).len());
            after.sums.add(-others, self.sums_of(lot.part, after.level, before));
            after.sums.add(others, self.sums_of(lot.part, after.level, after.whole));
        }
    }

    /// All of the loss but the scarcity.
    fn loss(&self, before: &Before, after: &Standing) -> f64 {
        let cpu_left = after.spare.map_or(0.0, |spare| spare.cpu.0 as f64);
        let left = 0.5 * cpu_left / LARGE_NODE.0 + 0.5 * after.sums.free / LARGE_NODE.1;
        let broken = before.blocks - self.blocks(after);
        self.potential(after) - before.potential + self.setting.tie * left + broken
    }

    /// Of what the demand leaves of a GPU. A rest below one hundredth counts with it.
    fn useless(&self, lot: &Lot, demand: &Demand) -> Bytes {
        let kind = &self.kinds[usize::from(lot.part.kind)];
        let left = rest(&lot.gpu, demand);
        let part = hundredths(kind.free_part(left));
        let of_use = (part - kind.curve.useless(part)) as u64;
        left.minus(Bytes((u128::from(kind.capacity.0) * u128::from(of_use) / GRID as u128) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Machine, learned, mix, shared, whole, with_cpu};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn what_a_choice_changes_is_what_a_fresh_look_at_the_node_shows(
            sizes in prop::collection::vec((1u64..=1000, 0u64..20_000), 10..40),
            charged in prop::collection::vec(prop_oneof![Just(0u64), 1u64..=900], 8),
            cpu in 0u64..100_000,
            (milli, wanted_cpu, gpus) in (1u64..=1000, 0u64..20_000, 1u32..=3),
        ) {
            let pods = sizes.iter().map(|(milli, cpu)| with_cpu(shared(*milli), *cpu));
            let machine = Machine::of(&[("H100", 1000), ("H100", 1000), ("L4", 400), ("L4", 400)], Some(cpu)).with(&charged);
            let worth = learned(&mix(pods.chain([whole(2), whole(4)])), std::slice::from_ref(&machine));
            let demand = if milli > 900 { whole(gpus) } else { with_cpu(shared(milli), wanted_cpu) };
            let appraisal = worth.appraise(machine.site(), &demand);
            let seats = (0..4).filter(|place| machine.gpus[*place].has_space(&demand));
            let chosen: GpuSet = seats.take(demand.gpus as usize).collect();
            let mut after = machine.clone();
            chosen.iter().for_each(|place| after.gpus[place].charge(demand.per_gpu, demand.sharing));
            after.spare = machine.spare.map(|spare| less(spare, demand.companion));
            let known = worth.learned.as_ref().unwrap();
            let [seen, fresh] =
                [&machine, &after].map(|machine| worth.outlook(machine.site()).before.unwrap());
            // Nobody insists on a model: all of the loss but φ is ties and blocks.
            let cpu_left = after.spare.unwrap().cpu;
            let tie = 0.5 * cpu_left.0 as f64 / LARGE_NODE.0 + 0.5 * fresh.standing.sums.free / LARGE_NODE.1;
            let on = |whole: u32, cpu: MilliCpu| -> f64 {
                let blocks = known.blocks.iter();
                blocks.map(|(block, price)| price * block.on(whole as usize, Some(cpu), 0.0)).sum()
            };
            let broken = on(seen.standing.whole, MilliCpu(cpu)) - on(fresh.standing.whole, cpu_left);
            let expected = fresh.potential - seen.potential + known.setting.tie * tie + broken;
            let told = appraisal.of(chosen).0 as f64 / UNIT;
            prop_assert!((told - expected).abs() < 1e-8, "{} {}", told, expected);
        }
    }
}
