//! What a workload could request instead of whole GPUs, and why; or why it keeps GPUs of its own. Unknown is never nothing.

use super::usage::{Quantity, Usage};
use crate::capacity_plan::question::TemplateGpu;
use crate::estimate::architecture::ModelArchitecture;
use crate::estimate::pod::round_up_to_gib;
use crate::estimate::right_size::{Observation, RightSize};
use crate::estimate::{Estimate, PartName, Workload as EngineArguments};
use serde::Serialize;
use stowage_scheduling::contention::{EngineWork, GpuSpeed, STEP_OVERHEAD_S};
use stowage_scheduling::units::Bytes;

/// How a workload's pods have GPUs today.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    Whole,
    /// Shares of time: a GPU's figures belong to none of its pods.
    TimeSliced,
    Mig,
    /// An allocator gives it this amount on each GPU.
    Fixed {
        per_gpu: Bytes,
        by: &'static str,
    },
}

/// Pods that are made alike.
#[derive(Debug, Clone)]
pub struct Workload {
    /// `Deployment team-a/llama`.
    pub name: String,
    /// Indices of its pods, for whoever places them.
    pub pods: Vec<usize>,
    /// GPUs, slices or shares of each pod.
    pub gpus: u32,
    pub ask: Ask,
    /// The GPU that it has today, where that is known.
    pub gpu: Option<TemplateGpu>,
    /// Whether it shows an engine, which takes its VRAM when it starts.
    pub is_engine: bool,
    /// The model that an engine serves, and with which arguments; or why that is not known.
    pub model: Result<(ModelArchitecture, EngineArguments), String>,
}

/// Why a workload keeps GPUs of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OwnGpu {
    Unknown,
    Mig,
    /// Neighbors would make its tokens later than its class allows.
    Latency,
    /// It computes for most of the time.
    Busy,
    /// It needs nearly all of its GPU.
    Size,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Need {
    /// VRAM to request on each GPU.
    pub request: Result<Bytes, OwnGpu>,
    pub why: String,
}

/// Seconds of samples from which a peak is believed: a day, or half of a shorter window.
const MIN_COVERED_S: i64 = 86_400;
/// Per cent of a GPU's VRAM from which on nothing fits beside, after the policy's headroom.
const WHOLE_PERCENT: u64 = 85;
/// Per cent of the time from which on a process that is no engine has no time to share: a neighbor would cost it half of its speed.
const BUSY_PERCENT: f64 = 50.0;

fn own(reason: OwnGpu, why: impl Into<String>) -> Need {
    Need {
        request: Err(reason),
        why: why.into(),
    }
}

fn unknown(why: impl Into<String>) -> Need {
    own(OwnGpu::Unknown, why)
}

impl Need {
    /// The need of the workload of this index; with an hour, of that hour of the day at so many per cent of its samples.
    pub fn new(
        workload: &Workload,
        index: usize,
        usage: &Usage,
        at_hour: Option<(usize, f64)>,
    ) -> Self {
        let need = match workload.ask {
            Ask::Mig => own(OwnGpu::Mig, "MIG slices stay as they are cut"),
            Ask::Fixed { per_gpu, by } => Self {
                request: Ok(per_gpu),
                why: format!("{by} gives it {per_gpu} on each GPU today"),
            },
            _ if workload.is_engine => engine_need(workload, index, usage, at_hour),
            Ask::TimeSliced => {
                unknown("under time-slicing a GPU's figures belong to none of its pods")
            }
            Ask::Whole => measured_need(index, usage),
        };
        match (&need.request, &workload.gpu) {
            (Ok(request), Some(gpu)) if request.0 / WHOLE_PERCENT > gpu.total.0 / 100 => own(
                OwnGpu::Size,
                format!("it needs {request} of {}: {}", gpu.total, need.why),
            ),
            _ => need,
        }
    }
}

/// Why samples of this quantity say too little; `None` if they are enough.
fn too_little(index: usize, usage: &Usage, quantity: Quantity, of: &str) -> Option<String> {
    let Some(samples) = usage.of(index, quantity) else {
        return Some(format!("{of} is not known"));
    };
    let covered = usage.covered_s(samples);
    (covered < MIN_COVERED_S.min(usage.window_s() / 2))
        .then(|| format!("{of} is known for {} hours only", covered / 3600))
}

fn engine_need(
    workload: &Workload,
    index: usize,
    usage: &Usage,
    at_hour: Option<(usize, f64)>,
) -> Need {
    let (model, arguments) = match &workload.model {
        Ok(model) => model,
        Err(why) => return unknown(why),
    };
    let gpus = u64::from(workload.gpus);
    if arguments.tensor_parallel != gpus {
        let parallel = arguments.tensor_parallel;
        return unknown(format!(
            "it has {gpus} GPUs and --tensor-parallel-size {parallel}"
        ));
    }
    if let Some(why) = too_little(index, usage, Quantity::KvUsage, "its KV cache's peak") {
        return unknown(why);
    }
    let estimate = match Estimate::for_model(model, arguments) {
        Ok(estimate) => estimate,
        Err(why) => return unknown(why.to_string()),
    };
    let peak = |quantity| Some(usage.of(index, quantity)?.peak);
    let kv_at = |(hour, percent)| {
        let samples = usage.of(index, Quantity::KvUsage)?;
        samples.quantile(Quantity::KvUsage, percent, Some(hour))
    };
    let observation = Observation {
        reserved: None,
        // Of one GPU, and of a time-sliced one nobody's.
        used: peak(Quantity::Vram).map(|mib| Bytes::mib(mib as u64).times(gpus)),
        kv_cache_usage: at_hour.and_then(kv_at).or(peak(Quantity::KvUsage)),
        kv_cache_tokens: peak(Quantity::KvTokens).map(|tokens| tokens as u64),
        running: peak(Quantity::Running).map(|count| count as u64),
        waiting: peak(Quantity::Waiting).map(|count| count as u64),
        preempting: usage.preempts(index),
    };
    match RightSize::new(model, arguments, &estimate, &observation) {
        Err(_) => unknown("the size of its KV cache is not known"),
        Ok(size) => Need {
            request: Ok(size.needed_with_margin_bytes.split(workload.gpus)),
            why: format!(
                "weights {}, of {} of KV cache {} at the peak: {}",
                estimate.bytes_of(PartName::Weights).times(gpus),
                size.kv_cache_bytes,
                size.kv_cache_used_bytes,
                size.reason
            ),
        },
    }
}

/// A process that is no engine: what it had at most, and a quarter more.
fn measured_need(index: usize, usage: &Usage) -> Need {
    let lacks = |quantity, of| too_little(index, usage, quantity, of);
    if let Some(why) = lacks(Quantity::Vram, "its VRAM") {
        return unknown(why);
    }
    let compute = usage.compute(index);
    let median = compute.and_then(|(measure, samples)| {
        let median = samples.quantile(measure, 50.0, None)?;
        Some(if measure == Quantity::Active {
            median * 100.0
        } else {
            median
        })
    });
    let (Some(vram), Some(median)) = (usage.of(index, Quantity::Vram), median) else {
        return unknown("what it computes is not known");
    };
    if median >= BUSY_PERCENT {
        return own(
            OwnGpu::Busy,
            format!("it computes {median:.0} % of the time"),
        );
    }
    let peak = Bytes::mib(vram.peak as u64);
    Need {
        request: Ok(round_up_to_gib(Bytes(peak.0 / 4 * 5))),
        why: format!("it had {peak} at most, and a quarter more is left to it"),
    }
}

/// A step of the workload alone on such a GPU, and for which share of the time it works in its busiest hour; unknown is always.
pub fn work(
    workload: &Workload,
    index: usize,
    usage: &Usage,
    speed: Option<GpuSpeed>,
) -> EngineWork {
    let busiest = usage.compute(index).and_then(|(measure, samples)| {
        let medians = (0..24).filter_map(|hour| samples.quantile(measure, 50.0, Some(hour)));
        let most = medians.fold(None, |most: Option<f64>, one| {
            Some(most.unwrap_or(0.0).max(one))
        })?;
        Some(if measure == Quantity::Active {
            most
        } else {
            most / 100.0
        })
    });
    let job = EngineWork {
        busy: busiest.unwrap_or(1.0),
        ..EngineWork::job(1.0)
    };
    let (Ok((model, arguments)), Some(speed)) = (&workload.model, speed) else {
        return job;
    };
    let Ok(estimate) = Estimate::for_model(model, arguments) else {
        return job;
    };
    let running = usage.of(index, Quantity::Running);
    let running = running.and_then(|samples| samples.quantile(Quantity::Running, 50.0, None));
    let operations = 2.0 * estimate.active_parameters as f64 / arguments.tensor_parallel as f64;
    EngineWork {
        overhead_s: STEP_OVERHEAD_S,
        memory_s: speed.memory_s(estimate.bytes_of(PartName::Weights).0 as f64),
        compute_s: running.unwrap_or(1.0).max(1.0) * speed.compute_s(operations),
        ..job
    }
}
