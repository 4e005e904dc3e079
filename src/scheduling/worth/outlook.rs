//! A node as decisions read it, summed up once for all demands: its GPUs in lots of such as are alike, and what its free GPU is
//! good for under one [`Worth`].
//!
//! Eight GPUs of a node are rarely more than three lots: those that are empty, those that are full, and one or two between.

use super::blocks::Block;
use super::cutting::GRID;
use super::kind::{Kind, free_for_others, hundredths};
use super::{Learned, Site, Worth};
use crate::scheduling::device::{Device, Gpu, GpuSet};
use crate::scheduling::request::Companion;
use crate::units::Bytes;
use std::sync::Arc;

/// Good as long as neither the node nor the [`Worth`] changes.
#[derive(Debug, Clone)]
pub struct Outlook {
    /// In the order of their first GPUs.
    lots: Arc<[Lot]>,
    free: Bytes,
    /// `None` if nothing was learned.
    pub(super) before: Option<Before>,
}

/// GPUs of one node that nothing tells apart but their places.
#[derive(Debug, Clone, Copy)]
pub struct Lot {
    pub gpu: Gpu,
    pub places: GpuSet,
    pub(super) part: Part,
}

/// A node before anything is taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before {
    pub standing: Standing,
    /// φ.
    pub potential: f64,
    /// Σ P_k·blocks.
    pub blocks: f64,
}

/// Of a GPU what is free.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Part {
    /// Its kind's place.
    pub kind: u8,
    pub hundredths: u8,
    /// From 0 to 1.
    pub free: f64,
}

/// A node at one moment, summed up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    pub spare: Option<Companion>,
    /// How many levels of CPU it serves.
    pub level: usize,
    pub whole: u32,
    pub sums: Sums,
}

/// In GPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub free: f64,
    pub worth: f64,
    /// What the pods seen lately could not use.
    pub stuck: f64,
}

impl Worth {
    /// The node, summed up.
    pub fn outlook(&self, site: Site<'_>) -> Outlook {
        let learned = self.learned.as_ref();
        let lots = lots(site, learned);
        Outlook {
            free: site.gpus.iter().map(Gpu::free).sum(),
            before: learned.map(|learned| learned.before(site.spare, &lots)),
            lots: lots.into(),
        }
    }
}

impl Outlook {
    pub fn lots(&self) -> &[Lot] {
        &self.lots
    }

    /// Free VRAM over all its GPUs.
    pub fn free(&self) -> Bytes {
        self.free
    }

    /// The lot of the GPU at this place.
    pub(super) fn lot_of(&self, place: usize) -> &Lot {
        let is_it = |lot: &&Lot| lot.places.contains(place);
        self.lots.iter().find(is_it).expect("every GPU of a node is in one of its lots")
    }
}

fn lots(site: Site<'_>, learned: Option<&Learned>) -> Vec<Lot> {
    let mut lots: Vec<Lot> = Vec::with_capacity(site.gpus.len().min(4));
    for (place, gpu) in site.gpus.iter().enumerate() {
        let part = learned.map_or_else(Part::default, |learned| {
            Part::of(&learned.kinds, learned.kind_of(gpu, site.devices.get(place)), free_for_others(gpu))
        });
        match lots.iter_mut().find(|lot| lot.gpu == *gpu && lot.part == part) {
            Some(lot) => lot.places.insert(place),
            None => lots.push(Lot { gpu: *gpu, places: GpuSet::one(place), part }),
        }
    }
    lots
}

impl Part {
    pub fn of(kinds: &[Kind], kind: u8, free: Bytes) -> Self {
        let free = kinds[usize::from(kind)].free_part(free);
        Self { kind, hundredths: hundredths(free) as u8, free }
    }

    pub fn is_whole(&self) -> bool {
        usize::from(self.hundredths) == GRID
    }
}

impl Learned {
    fn before(&self, spare: Option<Companion>, lots: &[Lot]) -> Before {
        let standing = self.standing(spare, lots);
        Before { standing, potential: self.potential(&standing), blocks: self.blocks(&standing) }
    }

    /// These GPUs beside this much CPU and memory.
    pub(super) fn standing(&self, spare: Option<Companion>, lots: &[Lot]) -> Standing {
        let level = self.level(spare);
        let whole = lots.iter().filter(|lot| lot.part.is_whole()).map(|lot| lot.places.len()).sum();
        let mut sums = Sums::default();
        for Lot { places, part, .. } in lots {
            sums.add(f64::from(places.len()), self.sums_of(*part, level, whole));
        }
        Standing { spare, level, whole, sums }
    }

    pub(super) fn level(&self, spare: Option<Companion>) -> usize {
        spare.map_or(self.levels.all(), |spare| self.levels.served_by(spare.cpu))
    }

    /// One GPU's, on a node that serves so many levels of CPU and has so many whole GPUs.
    pub(super) fn sums_of(&self, part: Part, level: usize, whole: u32) -> Sums {
        let (kind, hundredths) = (&self.kinds[usize::from(part.kind)], usize::from(part.hundredths));
        let free = kind.scale * part.free;
        let stuck = free * (1.0 - kind.usable.share(level, hundredths, whole as usize));
        Sums { free, worth: kind.scale * kind.curve.at(hundredths), stuck }
    }

    /// φ.
    pub(super) fn potential(&self, standing: &Standing) -> f64 {
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

    /// Σ P_k·blocks.
    pub(super) fn blocks(&self, standing: &Standing) -> f64 {
        let (cpu, partial) = (standing.spare.map(|spare| spare.cpu), self.setting.partial_blocks);
        let of = |(block, price): &(Block, f64)| price * block.on(standing.whole as usize, cpu, partial);
        self.blocks.iter().map(of).sum()
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
}

impl Sums {
    /// Adds so many times another.
    pub fn add(&mut self, times: f64, other: Self) {
        self.free += times * other.free;
        self.worth += times * other.worth;
        self.stuck += times * other.stuck;
    }
}
