//! The summary of a node, computed once for all demands: its GPUs in groups of equal ones, and the value of its free GPU capacity
//! under one [`PackingModel`].
//!
//! Eight GPUs of a node are rarely more than three groups: empty ones, full ones, and one or two between.

use super::cutting_stock::GRID;
use super::gpu_blocks::GpuBlock;
use super::gpu_kind::{GpuKind, free_for_others, hundredths};
use super::{LearnedDemand, NodeGpus, PackingModel};
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::{Device, Gpu, GpuSet};
use std::sync::Arc;

/// Valid as long as neither the node nor the [`PackingModel`] changes.
#[derive(Debug, Clone)]
pub struct NodeSummary {
    /// In the order of their first GPUs.
    gpu_groups: Arc<[GpuGroup]>,
    free: Bytes,
    /// `None` if nothing was learned.
    pub(super) before: Option<NodeBefore>,
}

/// GPUs of one node that differ by index only.
#[derive(Debug, Clone, Copy)]
pub struct GpuGroup {
    pub gpu: Gpu,
    pub places: GpuSet,
    pub(super) part: FreePart,
    /// The sums of one of them, as the node is; zero if nothing was learned.
    pub(super) sums: GpuSums,
}

/// A node before a placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeBefore {
    pub free_host: Option<HostHeadroom>,
    pub standing: NodeSums,
    /// φ.
    pub potential: f64,
    /// Σ P_k·blocks.
    pub blocks: f64,
}

/// The free part of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct FreePart {
    /// The index of its kind.
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
const MOST_CPU: u64 = 1_000_000_000;

/// CPU in thousandths of a core and memory in bytes, as floating point.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostHeadroom {
    pub cpu: f64,
    pub memory: f64,
}

/// In GPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GpuSums {
    pub free: f64,
    pub packing_model: f64,
    /// What recent pods could not use.
    pub stuck: f64,
}

impl PackingModel {
    /// Summarizes a node.
    pub fn node_summary(&self, node_gpus: NodeGpus<'_>) -> NodeSummary {
        let learned = self.learned.as_ref();
        let mut gpu_groups = gpu_groups(node_gpus, learned);
        let before = learned.map(|learned| {
            learned.before(node_gpus.free_host.map(HostHeadroom::of), &mut gpu_groups)
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
    pub(in crate::placing) fn gpu_group_of(&self, place: usize) -> &GpuGroup {
        let is_it = |gpu_group: &&GpuGroup| gpu_group.places.contains(place);
        self.gpu_groups
            .iter()
            .find(is_it)
            .expect("every GPU of a node is in one of its groups")
    }
}

fn gpu_groups(node_gpus: NodeGpus<'_>, learned: Option<&LearnedDemand>) -> Vec<GpuGroup> {
    let mut gpu_groups: Vec<GpuGroup> = Vec::with_capacity(node_gpus.gpus.len().min(4));
    for (place, gpu) in node_gpus.gpus.iter().enumerate() {
        let part = learned.map_or_else(FreePart::default, |learned| {
            let kind = learned.kind_of(gpu, node_gpus.devices.get(place));
            FreePart::of(
                &learned.kinds[usize::from(kind)],
                kind,
                free_for_others(gpu),
            )
        });
        match gpu_groups
            .iter_mut()
            .find(|gpu_group| gpu_group.gpu == *gpu && gpu_group.part == part)
        {
            Some(gpu_group) => gpu_group.places.insert(place),
            None => gpu_groups.push(GpuGroup {
                gpu: *gpu,
                places: GpuSet::one(place),
                part,
                sums: GpuSums::default(),
            }),
        }
    }
    gpu_groups
}

impl FreePart {
    /// The free part of a GPU of the kind at this index.
    pub fn of(kind: &GpuKind, at: u8, free: Bytes) -> Self {
        let free = kind.part(free);
        Self {
            kind: at,
            hundredths: hundredths(free) as u8,
            free,
        }
    }

    /// What this demand leaves free on a GPU of this kind.
    pub(crate) fn left_by(self, demand: &Demand, kind: &GpuKind) -> Self {
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
    fn before(&self, free_host: Option<HostHeadroom>, gpu_groups: &mut [GpuGroup]) -> NodeBefore {
        let standing = self.standing(free_host, gpu_groups);
        for gpu_group in gpu_groups {
            gpu_group.sums = self.sums_of(gpu_group.part, standing.level, standing.whole);
        }
        let (potential, blocks) = (
            self.potential(&standing.sums, free_host),
            self.blocks(standing.whole, free_host),
        );
        NodeBefore {
            free_host,
            standing,
            potential,
            blocks,
        }
    }

    /// The sums of these GPUs beside this much CPU and memory.
    pub(super) fn standing(
        &self,
        free_host: Option<HostHeadroom>,
        gpu_groups: &[GpuGroup],
    ) -> NodeSums {
        let level = free_host.map_or(self.levels.all(), |free_host| {
            self.levels.served_by(free_host.cpu)
        });
        let whole = gpu_groups
            .iter()
            .filter(|gpu_group| gpu_group.part.is_whole())
            .map(|gpu_group| gpu_group.places.len())
            .sum();
        let mut sums = GpuSums::default();
        for gpu_group in gpu_groups {
            sums.add(
                f64::from(gpu_group.places.len()),
                self.sums_of(gpu_group.part, level, whole),
            );
        }
        NodeSums { level, whole, sums }
    }

    fn sums_of(&self, part: FreePart, level: usize, whole: u32) -> GpuSums {
        GpuSums::of(&self.kinds[usize::from(part.kind)], part, level, whole)
    }

    /// φ.
    fn potential(&self, sums: &GpuSums, free_host: Option<HostHeadroom>) -> f64 {
        self.unusable(sums) + self.wasted(sums.packing_model, free_host)
    }

    /// The part of φ that GPUs cause.
    pub(super) fn unusable(&self, sums: &GpuSums) -> f64 {
        sums.free - sums.packing_model + self.setting.fragments * sums.stuck
    }

    /// The part of φ that a lack of CPU or memory causes, for free GPU capacity of this value.
    pub(super) fn wasted(&self, packing_model: f64, free_host: Option<HostHeadroom>) -> f64 {
        let Some(free_host) = free_host.filter(|_| self.setting.host_demand > 0.0) else {
            return 0.0;
        };
        let by_cpu = self
            .cpu
            .map_or(0.0, |cpu| cpu.wasted(packing_model, free_host.cpu));
        let by_memory = self
            .memory
            .map_or(0.0, |memory| memory.wasted(packing_model, free_host.memory));
        self.setting.host_demand * by_cpu.max(by_memory)
    }

    /// Σ P_k·blocks.
    pub(super) fn blocks(&self, whole: u32, free_host: Option<HostHeadroom>) -> f64 {
        let (cpu, partial) = (
            free_host.map(|free_host| free_host.cpu),
            self.setting.partial_blocks,
        );
        let of = |(block, price): &(GpuBlock, f64)| price * block.on(whole as usize, cpu, partial);
        self.blocks.iter().map(of).sum()
    }

    /// The kind of this model and capacity, or else the nearest capacity.
    fn kind_of(&self, gpu: &Gpu, device: Option<&Device>) -> u8 {
        let is_it = |kind: &&GpuKind| {
            kind.capacity == gpu.capacity && device.is_some_and(|device| device.model == kind.model)
        };
        let exact = self.kinds.iter().position(|kind| is_it(&kind));
        let distance = |kind: &GpuKind| kind.capacity.0.abs_diff(gpu.capacity.0);
        let nearest = || (0..self.kinds.len()).min_by_key(|place| distance(&self.kinds[*place]));
        exact
            .or_else(nearest)
            .expect("a model that was learned has kinds") as u8
    }
}

impl HostHeadroom {
    pub fn of(host_resources: HostResources) -> Self {
        Self {
            cpu: host_resources.cpu.0.min(MOST_CPU) as f64,
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
    pub fn of(kind: &GpuKind, part: FreePart, level: usize, whole: u32) -> Self {
        let (free, hundredths) = (
            kind.scale * part.free.min(1.0),
            usize::from(part.hundredths),
        );
        let stuck = free * (1.0 - kind.usable.share(level, hundredths, whole));
        Self {
            free,
            packing_model: kind.scale * kind.curve.at(hundredths),
            stuck,
        }
    }

    /// Adds `other`, `times` times.
    pub fn add(&mut self, times: f64, other: Self) {
        self.free += times * other.free;
        self.packing_model += times * other.packing_model;
        self.stuck += times * other.stuck;
    }
}
