//! The fleet as tables: one for each view, with its columns and a row for each thing. Pure.

use super::cell::Cell;
use clap::ValueEnum;
use std::collections::BTreeMap;
use stowage_scheduling::explaining::fleet::{
    Fleet, FleetGpu, FleetNode, FleetPendingPod, FleetPod,
};
use stowage_scheduling::ledger::{OccupantPhase, SchedulingGate};
use stowage_scheduling::units::{Bytes, Moment, Percent};
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::node_reading::Freshness;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum View {
    /// Nodes, with the sums of their GPUs
    #[default]
    Nodes,
    /// GPUs, and MIG slices
    Gpus,
    /// Pods on their GPUs
    Pods,
    /// Pods that wait
    Pending,
    /// Models that pods name
    Models,
}

impl View {
    pub const ALL: [Self; 5] = [
        Self::Nodes,
        Self::Gpus,
        Self::Pods,
        Self::Pending,
        Self::Models,
    ];

    pub fn title(self) -> &'static str {
        match self {
            Self::Nodes => "Nodes",
            Self::Gpus => "GPUs",
            Self::Pods => "Pods",
            Self::Pending => "Pending",
            Self::Models => "Models",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    pub title: &'static str,
    /// The first column has this, and what the others leave.
    width: u16,
    /// What it needs on a narrow screen: its figures and no bar, or a name's beginning.
    least: u16,
    /// Whether the others may have its room there.
    is_optional: bool,
    pub is_right: bool,
}

const fn left(title: &'static str, width: u16, least: u16) -> Column {
    Column {
        title,
        width,
        least,
        is_optional: false,
        is_right: false,
    }
}

const fn right(title: &'static str, width: u16) -> Column {
    Column {
        is_right: true,
        ..left(title, width, width)
    }
}

const fn optional(column: Column) -> Column {
    Column {
        is_optional: true,
        ..column
    }
}

/// The widths of columns on a screen; 0 of one without room. The last ones shrink first.
pub fn widths(columns: &[Column], screen: u16) -> Vec<u16> {
    // Each but the first begins after a space.
    let total = |widths: &[u16]| {
        let shown = widths.iter().filter(|width| **width > 0);
        shown.map(|width| width + 1).sum::<u16>().saturating_sub(1)
    };
    let mut least: Vec<u16> = columns.iter().map(|column| column.least).collect();
    let mut widths: Vec<u16> = columns.iter().map(|column| column.width).collect();
    for (index, column) in columns.iter().enumerate().rev() {
        if column.is_optional && total(&least) > screen {
            (least[index], widths[index]) = (0, 0);
        }
    }
    for index in (0..widths.len()).rev() {
        let over = total(&widths).saturating_sub(screen);
        widths[index] -= over.min(widths[index] - least[index]);
    }
    widths[0] += screen.saturating_sub(total(&widths));
    widths
}

const NODES: [Column; 8] = [
    left("NODE", 16, 10),
    optional(left("POOL", 10, 6)),
    right("GPUS", 4),
    left("ALLOCATED", 24, 13),
    left("KV CACHE", 12, 8),
    right("QUEUE", 5),
    right("PODS", 4),
    left("REPORT", 8, 7),
];
const GPUS: [Column; 11] = [
    left("NODE", 16, 10),
    right("GPU", 3),
    optional(left("MODEL", 21, 8)),
    left("HEALTH", 8, 8),
    optional(right("A TOKEN", 8)),
    optional(right("SMS", 5)),
    optional(right("MEM BW", 7)),
    left("ALLOCATED", 24, 13),
    left("KV CACHE", 12, 8),
    right("QUEUE", 5),
    right("PODS", 4),
];
const PODS: [Column; 8] = [
    left("POD", 20, 16),
    optional(left("CLASS", 13, 8)),
    optional(left("TENANT", 10, 6)),
    left("NODE", 14, 10),
    left("GPUS", 7, 4),
    right("VRAM", 9),
    right("RUNS FOR", 8),
    left("STATE", 10, 8),
];
const PENDING: [Column; 7] = [
    left("POD", 20, 16),
    optional(left("CLASS", 13, 8)),
    optional(left("TENANT", 10, 6)),
    right("PRIORITY", 10),
    right("REQUESTS", 13),
    right("WAITS FOR", 9),
    left("STATE", 22, 8),
];
const MODELS: [Column; 7] = [
    left("MODEL", 24, 16),
    right("PODS", 4),
    optional(right("STARTING", 8)),
    right("GPUS", 4),
    right("VRAM", 10),
    left("KV CACHE", 12, 8),
    right("QUEUE", 5),
];

impl View {
    pub fn columns(self) -> &'static [Column] {
        match self {
            Self::Nodes => &NODES,
            Self::Gpus => &GPUS,
            Self::Pods => &PODS,
            Self::Pending => &PENDING,
            Self::Models => &MODELS,
        }
    }

    /// A row for each thing, in the fleet's order.
    pub fn rows(self, fleet: &Fleet) -> Vec<Vec<Cell>> {
        let nodes = fleet.nodes.iter();
        match self {
            Self::Nodes => nodes.map(node_row).collect(),
            Self::Gpus => nodes.flat_map(gpu_rows).collect(),
            Self::Pods => nodes
                .flat_map(|node| {
                    node.pods
                        .iter()
                        .map(move |one| pod_row(node, one, fleet.now))
                })
                .collect(),
            Self::Pending => fleet
                .pending
                .iter()
                .map(|one| pending_row(one, fleet.now))
                .collect(),
            Self::Models => model_rows(fleet),
        }
    }
}

/// What is allocated of what can be, over GPUs.
pub fn allocated<'a>(gpus: impl Iterator<Item = &'a FleetGpu> + Clone) -> (Bytes, Bytes) {
    (
        gpus.clone().map(|gpu| gpu.allocated_bytes).sum(),
        gpus.map(|gpu| gpu.allocatable_bytes).sum(),
    )
}

/// The fullest KV cache and the queues together, unknown only if they are of all GPUs; none where no pod runs an engine.
fn engine_cells<'a>(
    gpus: impl Iterator<Item = &'a FleetGpu> + Clone,
    has_engine: bool,
) -> [Cell; 2] {
    let is_idle = |gpu: &FleetGpu| gpu.kv_cache_percent == Some(Percent::default());
    if !has_engine && gpus.clone().all(is_idle) {
        return ["-", "-"].map(|none| Cell::Text(none.into()));
    }
    let fullest = gpus.clone().filter_map(|gpu| gpu.kv_cache_percent).max();
    let queues = gpus.filter_map(|gpu| gpu.queue).map(u64::from);
    [
        Cell::Percent(fullest),
        Cell::MaybeCount(queues.reduce(|a, b| a + b)),
    ]
}

fn node_row(node: &FleetNode) -> Vec<Cell> {
    let (part, of) = allocated(node.gpus.iter());
    let report = match node.freshness {
        Freshness::Unreported => "none",
        Freshness::Fresh => "fresh",
        Freshness::Stale => "stale",
        Freshness::Expired => "expired",
    };
    let has_engine = node.pods.iter().any(|pod| pod.has_engine);
    let [kv_cache, queue] = engine_cells(node.gpus.iter(), has_engine);
    vec![
        Cell::untrusted_text(node.name.as_str()),
        Cell::untrusted_text(node.pool.as_deref().unwrap_or("-")),
        Cell::Count(node.gpus.len() as u64),
        Cell::Share { part, of },
        kv_cache,
        queue,
        Cell::Count(node.pods.len() as u64),
        Cell::Text(if node.closed {
            "closed".into()
        } else {
            report.into()
        }),
    ]
}

fn gpu_rows(node: &FleetNode) -> impl Iterator<Item = Vec<Cell>> {
    let mut pods = vec![(0, false); node.gpus.len()];
    for pod in &node.pods {
        for index in &pod.gpus {
            if let Some((count, has_engine)) = pods.get_mut(*index) {
                *count += 1;
                *has_engine |= pod.has_engine;
            }
        }
    }
    node.gpus.iter().zip(pods).map(|(gpu, (pods, has_engine))| {
        let [kv_cache, queue] = engine_cells(std::iter::once(gpu), has_engine);
        let [sms, bandwidth] = gpu.activity.percents().map(Cell::Percent);
        let health = match gpu.health {
            Health::Healthy if gpu.starting => "starting",
            Health::Healthy => "ok",
            Health::Draining => "draining",
            Health::Lost => "lost",
        };
        vec![
            Cell::untrusted_text(node.name.as_str()),
            Cell::Count(gpu.index.into()),
            Cell::untrusted_text(gpu.model.as_str()),
            Cell::Text(health.into()),
            match has_engine {
                true => Cell::Latency(gpu.time_per_token_micros),
                false => Cell::Text("-".into()),
            },
            sms,
            bandwidth,
            Cell::Share {
                part: gpu.allocated_bytes,
                of: gpu.allocatable_bytes,
            },
            kv_cache,
            queue,
            Cell::Count(pods),
        ]
    })
}

fn pod_row(node: &FleetNode, pod: &FleetPod, now: Moment) -> Vec<Cell> {
    let state = match pod.phase {
        _ if pod.leaving => "leaving",
        OccupantPhase::Bound if pod.starting => "starting",
        OccupantPhase::Bound if pod.borrows => "borrows",
        OccupantPhase::Bound => "running",
        OccupantPhase::Somewhere => "unplaced",
        OccupantPhase::Assumed => "binding",
        OccupantPhase::Reserved => "reserved",
        OccupantPhase::SoftlyReserved => "offered",
    };
    let index = |position: &usize| {
        node.gpus
            .get(*position)
            .map_or("?".into(), |gpu| gpu.index.to_string())
    };
    vec![
        Cell::untrusted_text(&pod.pod.to_string()),
        Cell::untrusted_text(&pod.class),
        Cell::untrusted_text(pod.tenant.as_deref().unwrap_or("-")),
        Cell::untrusted_text(node.name.as_str()),
        Cell::Text(pod.gpus.iter().map(index).collect::<Vec<_>>().join(",")),
        Cell::Bytes(pod.bytes_per_gpu.times(pod.gpus.len().max(1) as u64)),
        Cell::Age(pod.started.map(|started| now.since(started))),
        Cell::Text(state.into()),
    ]
}

fn pending_row(pod: &FleetPendingPod, now: Moment) -> Vec<Cell> {
    let state = match (&pod.reservation, pod.gate) {
        (Some(reservation), _) => format!("reserved on {}", reservation.node),
        (None, SchedulingGate::Others) => "gated by another".into(),
        (None, SchedulingGate::Planned) => "gated by stowage.dev/plan".into(),
        (None, SchedulingGate::Open) if pod.refused => "refused".into(),
        (None, SchedulingGate::Open) => "pending".into(),
    };
    vec![
        Cell::untrusted_text(&pod.pod.to_string()),
        Cell::untrusted_text(&pod.class),
        Cell::untrusted_text(pod.tenant.as_deref().unwrap_or("-")),
        Cell::Priority(pod.priority),
        Cell::Request {
            per_gpu: pod.bytes_per_gpu,
            gpus: pod.gpus,
        },
        Cell::Age(Some(now.since(pod.since))),
        Cell::untrusted_text(&state),
    ]
}

/// What the pods of one model have together.
#[derive(Default)]
struct ModelSum<'a> {
    pods: u64,
    starting: u64,
    bytes: Bytes,
    gpus: Vec<&'a FleetGpu>,
    /// Those of its pods that run engines.
    engine_gpus: Vec<&'a FleetGpu>,
}

fn model_rows(fleet: &Fleet) -> Vec<Vec<Cell>> {
    let mut sums: BTreeMap<&str, ModelSum<'_>> = BTreeMap::new();
    for node in &fleet.nodes {
        for pod in &node.pods {
            let Some(model) = &pod.model else { continue };
            let sum = sums.entry(model.as_str()).or_default();
            sum.pods += 1;
            sum.starting += u64::from(pod.starting);
            sum.bytes += pod.bytes_per_gpu.times(pod.gpus.len() as u64);
            let gpus = pod.gpus.iter().filter_map(|index| node.gpus.get(*index));
            sum.gpus.extend(gpus.clone());
            sum.engine_gpus.extend(gpus.filter(|_| pod.has_engine));
        }
    }
    let row = |(model, mut sum): (&str, ModelSum<'_>)| {
        // Two pods may share one.
        for gpus in [&mut sum.gpus, &mut sum.engine_gpus] {
            gpus.sort_by_key(|gpu| &gpu.uuid);
            gpus.dedup_by_key(|gpu| &gpu.uuid);
        }
        let has_engine = !sum.engine_gpus.is_empty();
        let [kv_cache, queue] = engine_cells(sum.engine_gpus.iter().copied(), has_engine);
        vec![
            Cell::untrusted_text(model),
            Cell::Count(sum.pods),
            Cell::Count(sum.starting),
            Cell::Count(sum.gpus.len() as u64),
            Cell::Bytes(sum.bytes),
            kv_cache,
            queue,
        ]
    };
    sums.into_iter().map(row).collect()
}
