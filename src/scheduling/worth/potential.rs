//! What is to be said against giving GPUs of a node to a demand, in one figure: how much less of the cluster's free GPU can be
//! used by those who come after it.
//!
//! ```text
//! φ = Σ_g w_g·(r_g − U(r_g)) + κ·max(wasted by CPU, by memory) + f·Σ_g w_g·r_g·(1 − share(g))      w_g: capacity ÷ the largest
//! loss = φ(after) − φ(before) + t·(½·CPU left ÷ 128 + ½·free GPUs left ÷ 8) + gpu·σ + Σ_k P_k·(blocks before − after)
//! ```
//!
//! Where nothing was learned, the loss is what best fit goes by: the VRAM left over. It allocates nothing: thousands of nodes
//! are judged for each pod.

use super::blocks::Block;
use super::cutting::GRID;
use super::kind::{Kind, free_for_others, hundredths};
use super::{Learned, Worth};
use crate::scheduling::device::{Device, Gpu, GpuSet};
use crate::scheduling::request::{Companion, Demand, MAX_GPUS, Sharing};
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
/// CPU and GPUs of a large node. Only ties are settled by them.
const LARGE_NODE: (f64, f64) = (128_000.0, 8.0);

/// One node, looked at for one demand: its choices are compared by it.
#[derive(Debug)]
pub struct Appraisal<'a> {
    demand: &'a Demand,
    site: Site<'a>,
    learned: Option<&'a Learned>,
    /// Looked up when the first choice is compared: most nodes have no room, and nothing to choose.
    prospect: OnceCell<Prospect<'a>>,
}

/// What a node's free GPU promises, before anything is taken and with nothing but the pod's CPU and memory gone: what is the same
/// for every choice.
#[derive(Debug)]
struct Prospect<'a> {
    learned: &'a Learned,
    free: FreeParts,
    before: Standing,
    beside: Standing,
    /// φ, before anything is taken.
    potential: f64,
}

/// Of each GPU what is free, by its place.
#[derive(Debug)]
struct FreeParts {
    parts: [Part; MAX_GPUS as usize],
    count: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Part {
    /// Its kind's place.
    kind: u8,
    hundredths: u8,
    /// From 0 to 1.
    free: f64,
}

/// A node at one moment, summed up.
#[derive(Debug, Clone, Copy)]
struct Standing {
    spare: Option<Companion>,
    /// How many levels of CPU it serves.
    level: usize,
    whole: usize,
    sums: Sums,
}

/// In GPUs.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    free: f64,
    worth: f64,
    /// What the pods seen lately could not use.
    stuck: f64,
}

impl<'a> Site<'a> {
    /// GPUs of which nothing else is known.
    pub fn of_gpus(gpus: &'a [Gpu]) -> Self {
        Self { gpus, devices: &[], spare: None }
    }
}

impl Worth {
    /// This node, to be looked at for this demand.
    pub fn appraise<'a>(&'a self, site: Site<'a>, demand: &'a Demand) -> Appraisal<'a> {
        let learned = self.learned.as_ref().filter(|_| !demand.asks_plugin());
        Appraisal { demand, site, learned, prospect: OnceCell::new() }
    }

    /// What is lost if a pod without a GPU takes this from a node; `None` if nothing was learned, or nobody knows what the node
    /// has.
    pub fn loss_of_company(&self, site: Site<'_>, taken: Companion) -> Option<Loss> {
        let (learned, spare) = self.learned.as_ref().zip(site.spare)?;
        let prospect = learned.prospect(Site { spare: Some(spare), ..site }, taken);
        Some(fixed(prospect.loss_with(&prospect.beside)))
    }
}

impl<'a> Appraisal<'a> {
    pub fn gpus(&self) -> &'a [Gpu] {
        self.site.gpus
    }

    pub fn demand(&self) -> &'a Demand {
        self.demand
    }

    /// What is lost if the demand gets one of its GPUs at this place, whatever the others are.
    pub fn of_one(&self, place: usize) -> Loss {
        self.of(GpuSet::one(place))
    }

    /// What is lost if it gets these.
    pub fn of(&self, chosen: GpuSet) -> Loss {
        match self.prospect() {
            Some(prospect) => fixed(prospect.loss(self.site.gpus, self.demand, chosen)),
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
                let whole: Bytes = chosen.iter().map(|place| self.site.gpus[place].capacity).sum();
                (i128::from(loss.0) * 1000 / i128::from(whole.0.max(1))) as u32
            }
        }
    }

    /// Of what stays free on these GPUs, what is of no use to the pods seen lately; `None` if nothing was learned.
    pub fn useless(&self, chosen: GpuSet) -> Option<Bytes> {
        let (prospect, gpus) = (self.prospect()?, self.site.gpus);
        let on = |place: usize| prospect.useless(place, &gpus[place], self.demand);
        Some(chosen.iter().map(on).sum())
    }

    /// Whether two GPUs are alike, so that nothing tells them apart but what was promised to others.
    pub fn are_alike(&self, one: usize, other: usize) -> bool {
        match self.prospect() {
            Some(prospect) => prospect.free.parts[one] == prospect.free.parts[other],
            None => self.left(one) == self.left(other),
        }
    }

    fn prospect(&self) -> Option<&Prospect<'a>> {
        let learned = self.learned?;
        Some(self.prospect.get_or_init(|| learned.prospect(self.site, self.demand.companion)))
    }

    fn left(&self, place: usize) -> Bytes {
        self.site.gpus[place].free().minus(self.demand.per_gpu)
    }
}

/// Half of the scale for no loss, three quarters for a GPU, nearly all for many: steps are finest where losses lie closest.
fn on_scale(Loss(loss): Loss) -> u32 {
    let (loss, unit) = (i128::from(loss), UNIT as i128);
    (500 + 500 * loss / (unit + loss.abs())) as u32
}

fn fixed(loss: f64) -> Loss {
    Loss((loss * UNIT).round() as i64)
}

fn less(spare: Companion, taken: Companion) -> Companion {
    Companion {
        cpu: MilliCpu(spare.cpu.0.saturating_sub(taken.cpu.0)),
        memory: spare.memory.minus(taken.memory),
    }
}

impl FreeParts {
    fn iter(&self) -> impl Iterator<Item = Part> + Clone {
        self.parts[..self.count].iter().copied()
    }
}

impl Part {
    fn is_whole(&self) -> bool {
        usize::from(self.hundredths) == GRID
    }

    fn of(kinds: &[Kind], kind: u8, free: Bytes) -> Self {
        let free = kinds[usize::from(kind)].free_part(free);
        Self { kind, hundredths: hundredths(free) as u8, free }
    }
}

impl Prospect<'_> {
    /// Of what the demand leaves of a GPU. A rest below one hundredth counts with it.
    fn useless(&self, place: usize, gpu: &Gpu, demand: &Demand) -> Bytes {
        let kind = &self.learned.kinds[usize::from(self.free.parts[place].kind)];
        let left = match demand.sharing {
            Sharing::Shared => free_for_others(gpu).minus(demand.per_gpu),
            Sharing::Exclusive => Bytes::ZERO,
        };
        let part = hundredths(kind.free_part(left));
        let of_use = (part - kind.curve.useless(part)) as u64;
        left.minus(Bytes((u128::from(kind.capacity.0) * u128::from(of_use) / GRID as u128) as u64))
    }

    fn loss(&self, gpus: &[Gpu], demand: &Demand, chosen: GpuSet) -> f64 {
        let kinds = &self.learned.kinds;
        let left = |place: usize| match demand.sharing {
            Sharing::Shared => {
                let left = free_for_others(&gpus[place]).minus(demand.per_gpu);
                Part::of(kinds, self.free.parts[place].kind, left)
            }
            Sharing::Exclusive => Part { hundredths: 0, free: 0.0, ..self.free.parts[place] },
        };
        let taken = |place: usize| {
            let before = &self.free.parts[place];
            let kind = &kinds[usize::from(before.kind)];
            kind.scale * kind.scarcity * (before.free - left(place).free)
        };
        let scarcity: f64 = chosen.iter().map(taken).sum();
        self.loss_with(&self.after(chosen, left)) + scarcity
    }

    /// The node once these GPUs have only that left.
    fn after(&self, chosen: GpuSet, left: impl Fn(usize) -> Part) -> Standing {
        let mut after = self.beside;
        if chosen.iter().any(|place| self.free.parts[place].is_whole()) {
            // With fewer whole ones the others are of less use, too.
            let parts = self.free.iter().enumerate();
            let parts = parts.map(|(place, part)| if chosen.contains(place) { left(place) } else { part });
            return self.learned.standing(after.spare, parts);
        }
        for place in chosen.iter() {
            let was = self.learned.sums_of(self.free.parts[place], after.level, after.whole);
            let is = self.learned.sums_of(left(place), after.level, after.whole);
            after.sums.free += is.free - was.free;
            after.sums.worth += is.worth - was.worth;
            after.sums.stuck += is.stuck - was.stuck;
        }
        after
    }

    fn loss_with(&self, after: &Standing) -> f64 {
        let learned = self.learned;
        let broken = |(block, price): &(Block, f64)| {
            let on = |at: &Standing| {
                block.on(at.whole, at.spare.map(|spare| spare.cpu), learned.setting.partial_blocks)
            };
            price * (on(&self.before) - on(after))
        };
        let cpu_left = after.spare.map_or(0.0, |spare| spare.cpu.0 as f64);
        let left = 0.5 * cpu_left / LARGE_NODE.0 + 0.5 * after.sums.free / LARGE_NODE.1;
        let blocks: f64 = learned.blocks.iter().map(broken).sum();
        learned.potential(after) - self.potential + learned.setting.tie * left + blocks
    }
}

impl Learned {
    /// A node to which a pod comes that takes this beside its GPUs.
    fn prospect<'a>(&'a self, site: Site<'_>, taken: Companion) -> Prospect<'a> {
        let free = self.free_parts(site);
        let before = self.standing(site.spare, free.iter());
        let spare = site.spare.map(|spare| less(spare, taken));
        let beside = match self.level(spare) == before.level {
            true => Standing { spare, ..before },
            false => self.standing(spare, free.iter()),
        };
        Prospect { learned: self, free, before, beside, potential: self.potential(&before) }
    }

    fn free_parts(&self, site: Site<'_>) -> FreeParts {
        let mut free = FreeParts { parts: [Part::default(); MAX_GPUS as usize], count: site.gpus.len() };
        let mut known: Option<(Bytes, u8)> = None;
        for (place, gpu) in site.gpus.iter().enumerate() {
            // GPUs of a node are nearly always alike.
            let kind = match known {
                Some((capacity, kind)) if capacity == gpu.capacity => kind,
                _ => self.kind_of(gpu, site.devices.get(place)),
            };
            known = Some((gpu.capacity, kind));
            free.parts[place] = Part::of(&self.kinds, kind, free_for_others(gpu));
        }
        free
    }

    /// The kind of this model and capacity, or else the nearest capacity.
    fn kind_of(&self, gpu: &Gpu, device: Option<&Device>) -> u8 {
        let is_it = |kind: &&Kind| {
            kind.capacity == gpu.capacity && device.is_some_and(|device| device.model == kind.model)
        };
        let exact = self.kinds.iter().position(|kind| is_it(&kind));
        let distance = |kind: &Kind| kind.capacity.0.abs_diff(gpu.capacity.0);
        let nearest = || (0..self.kinds.len()).min_by_key(|place| distance(&self.kinds[*place]));
        exact.or_else(nearest).expect("a worth that was learned has kinds") as u8
    }

    fn level(&self, spare: Option<Companion>) -> usize {
        spare.map_or(self.levels.all(), |spare| self.levels.served_by(spare.cpu))
    }

    /// These free parts beside this much CPU and memory.
    fn standing(&self, spare: Option<Companion>, parts: impl Iterator<Item = Part> + Clone) -> Standing {
        let level = self.level(spare);
        let whole = parts.clone().filter(Part::is_whole).count();
        let mut sums = Sums::default();
        for part in parts {
            let Sums { free, worth, stuck } = self.sums_of(part, level, whole);
            sums.free += free;
            sums.worth += worth;
            sums.stuck += stuck;
        }
        Standing { spare, level, whole, sums }
    }

    fn sums_of(&self, part: Part, level: usize, whole: usize) -> Sums {
        let (kind, hundredths) = (&self.kinds[usize::from(part.kind)], usize::from(part.hundredths));
        let free = kind.scale * part.free;
        let stuck = free * (1.0 - kind.usable.share(level, hundredths, whole));
        Sums { free, worth: kind.scale * kind.curve.at(hundredths), stuck }
    }

    /// φ.
    fn potential(&self, standing: &Standing) -> f64 {
        let Sums { free, worth, stuck } = standing.sums;
        let wasted = if self.setting.company > 0.0 { self.wasted(worth, standing.spare) } else { 0.0 };
        free - worth + self.setting.company * wasted + self.setting.fragments * stuck
    }

    /// Of free GPU of this worth, what CPU or memory will be lacking for.
    fn wasted(&self, worth: f64, spare: Option<Companion>) -> f64 {
        let Some(spare) = spare else { return 0.0 };
        let by_cpu = self.cpu.map_or(0.0, |cpu| cpu.wasted(worth, spare.cpu.0 as f64));
        let by_memory = self.memory.map_or(0.0, |memory| memory.wasted(worth, spare.memory.0 as f64));
        by_cpu.max(by_memory)
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
            let (seen, fresh) = (appraisal.prospect().unwrap(), known.prospect(after.site(), Companion::default()));
            // Nobody insists on a model: all of the loss but φ is ties and blocks.
            let cpu_left = after.spare.unwrap().cpu;
            let tie = 0.5 * cpu_left.0 as f64 / LARGE_NODE.0 + 0.5 * fresh.before.sums.free / LARGE_NODE.1;
            let on = |whole: usize, cpu: MilliCpu| -> f64 {
                known.blocks.iter().map(|(block, price)| price * block.on(whole, Some(cpu), 0.0)).sum()
            };
            let broken = on(seen.before.whole, MilliCpu(cpu)) - on(fresh.before.whole, cpu_left);
            let expected = fresh.potential - seen.potential + known.setting.tie * tie + broken;
            let told = seen.loss(&machine.gpus, &demand, chosen);
            prop_assert!((told - expected).abs() < 1e-9, "{} {}", told, expected);
        }
    }
}
