//! What a workload could request instead of whole GPUs, and why; or why it keeps GPUs of its own. Unknown is never nothing.

use super::usage::{DAY_S, Quantity, Samples, Usage};
use crate::capacity_plan::question::TemplateGpu;
use crate::estimate::architecture::ModelArchitecture;
use crate::estimate::pod::round_up_to_gib;
use crate::estimate::right_size::{Observation, RightSize};
use crate::estimate::{Estimate, PartName, Workload as EngineArguments};
use serde::Serialize;
use std::collections::BTreeMap;
use stowage_scheduling::contention::{EngineWork, GpuSpeed, STEP_OVERHEAD_S};
use stowage_scheduling::units::Bytes;

/// Pods that are made alike.
#[derive(Debug, Clone)]
pub struct Workload {
    /// `Deployment team-a/llama`.
    pub name: String,
    /// Indices of its pods, for whoever places them.
    pub pods: Vec<usize>,
    /// How many of its pods each node has.
    pub nodes: BTreeMap<String, u32>,
    /// GPUs of each pod, or GPUs of which it has a part.
    pub gpus: u32,
    /// The part of each of them, up to 1.
    pub part: f64,
    /// Why its pods stay on the GPUs on which they are: what they use cannot be told, or another hands it out.
    pub kept: Option<String>,
    /// The GPU that it has today, where that is known.
    pub gpu: Option<TemplateGpu>,
    /// The model that its engine serves, and with which arguments, or why that is not known; `None` if it shows no engine.
    pub model: Option<Result<(ModelArchitecture, EngineArguments), String>>,
}

/// Why a workload keeps GPUs of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OwnGpu {
    Unknown,
    /// It stays on the GPUs on which it is, shared or not.
    Kept,
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

/// Per cent of a GPU's VRAM from which on nothing fits beside, after the policy's headroom.
const WHOLE_PERCENT: u64 = 85;
/// The share of the time from which on a process that is no engine has none to share: a neighbor would cost it half of its speed.
const BUSY: f64 = 0.5;

impl Need {
    /// The need of the workload of this index; with an hour, of that hour of the day at so many per cent of its samples.
    pub fn new(one: &Workload, index: usize, usage: &Usage, hour: Option<(usize, f64)>) -> Self {
        let found = match (&one.kept, &one.model) {
            (Some(why), _) => Err((OwnGpu::Kept, why.clone())),
            (None, Some(Ok(model))) => engine_need(one, model, index, usage, hour),
            (None, Some(Err(why))) => Err(unknown(why)),
            (None, None) => measured_need(one, index, usage),
        };
        let total = one.gpu.as_ref().map_or(Bytes(u64::MAX), |gpu| gpu.total);
        let is_whole = |request: Bytes| request.0 / WHOLE_PERCENT > total.0 / 100;
        let (request, why) = match found {
            Ok((request, why)) if is_whole(request) => (
                Err(OwnGpu::Size),
                format!("it needs {request} of {total}: {why}"),
            ),
            Ok((request, why)) => (Ok(request), why),
            Err((reason, why)) => (Err(reason), why),
        };
        Self { request, why }
    }
}

type Kept = (OwnGpu, String);
type Found = Result<(Bytes, String), Kept>;

fn unknown(why: impl ToString) -> Kept {
    (OwnGpu::Unknown, why.to_string())
}

/// Refuses a quantity of which too little is known.
fn covered(
    one: &Workload,
    index: usize,
    usage: &Usage,
    of: Quantity,
    what: &str,
) -> Result<f64, Kept> {
    let samples = usage
        .of(index, of)
        .ok_or_else(|| unknown(format!("{what} is not known")))?;
    let covered = usage.covered_s(samples);
    if covered < DAY_S {
        return Err(unknown(format!(
            "{what} is known for {} hours only",
            covered / 3600
        )));
    }
    let (each, devices) = match of {
        Quantity::KvUsage => (1, "engines"),
        _ => (one.gpus as usize, "GPUs"),
    };
    let (known, all) = (samples.devices.len(), one.pods.len() * each);
    if known < all {
        return Err(unknown(format!(
            "{what} is known of {known} of {all} {devices} only"
        )));
    }
    Ok(samples.peak)
}

fn covered_compute(one: &Workload, index: usize, usage: &Usage) -> Result<f64, Kept> {
    let measure = usage.compute(index).unwrap_or(Quantity::Utilization);
    covered(one, index, usage, measure, "what it computes")
}

fn engine_need(
    one: &Workload,
    (model, arguments): &(ModelArchitecture, EngineArguments),
    index: usize,
    usage: &Usage,
    hour: Option<(usize, f64)>,
) -> Found {
    let gpus = u64::from(one.gpus);
    if arguments.tensor_parallel != gpus {
        let parallel = arguments.tensor_parallel;
        return Err(unknown(format!(
            "it has {gpus} GPUs, and its tensor parallelism is {parallel}"
        )));
    }
    let peak = covered(one, index, usage, Quantity::KvUsage, "its KV cache's peak")?;
    covered_compute(one, index, usage)?;
    let estimate = Estimate::for_model(model, arguments).map_err(unknown)?;
    let weights = estimate.bytes_of(PartName::Weights);
    let used = usage.peak(index, Quantity::Vram);
    let used = used.map(|mib| Bytes::mib(mib as u64));
    if used.is_some_and(|used| used < weights) {
        return Err(unknown("it has less VRAM in use than its weights take"));
    }
    let at_hour = hour.and_then(|(hour, percent)| {
        let kv = usage.of(index, Quantity::KvUsage)?;
        kv.quantile(Quantity::KvUsage, percent, Some(hour))
    });
    let count = |of| usage.peak(index, of).map(|count| count as u64);
    let observation = Observation {
        reserved: None,
        used: used.map(|used| used.times(gpus)),
        kv_cache_usage: at_hour.or(Some(peak)),
        kv_cache_tokens: count(Quantity::KvTokens),
        running: count(Quantity::Running),
        waiting: count(Quantity::Waiting),
        preempting: usage
            .of(index, Quantity::Preemptions)
            .is_some_and(|one| one.rises > 0),
    };
    let size = RightSize::new(model, arguments, &estimate, &observation);
    let size = size.map_err(|_| unknown("the size of its KV cache is not known"))?;
    let why = format!(
        "weights {}; of {} of KV cache {} at the peak: {}",
        weights.times(gpus),
        size.kv_cache_bytes,
        size.kv_cache_used_bytes,
        size.reason
    );
    Ok((size.needed_with_margin_bytes.split(one.gpus), why))
}

/// A process that is no engine: what it had at most, and a quarter more.
fn measured_need(one: &Workload, index: usize, usage: &Usage) -> Found {
    let peak = covered(one, index, usage, Quantity::Vram, "its VRAM")?;
    covered_compute(one, index, usage)?;
    let computed = computed(index, usage, |samples, of| samples.quantile(of, 50.0, None));
    let computed = computed.unwrap_or(1.0);
    if computed >= BUSY {
        let percent = computed * 100.0;
        return Err((
            OwnGpu::Busy,
            format!("it computes {percent:.0} % of the time"),
        ));
    }
    let peak = Bytes::mib(peak as u64);
    let why = format!("it had {peak} at most, and a quarter more is left to it");
    Ok((round_up_to_gib(Bytes(peak.0 / 4 * 5)), why))
}

/// A share of the time for which it computes, 0 to 1.
fn computed(
    index: usize,
    usage: &Usage,
    read: impl Fn(&Samples, Quantity) -> Option<f64>,
) -> Option<f64> {
    let measure = usage.compute(index)?;
    let value = read(usage.of(index, measure)?, measure)?;
    Some(if measure == Quantity::Active {
        value
    } else {
        value / 100.0
    })
}

/// A step of the workload alone on such a GPU, and for which share of the time it works in its busiest hour; unknown is always.
pub fn work(one: &Workload, index: usize, usage: &Usage, speed: Option<GpuSpeed>) -> EngineWork {
    let busiest = computed(index, usage, |samples, of| {
        let medians = (0..24).filter_map(|hour| samples.quantile(of, 50.0, Some(hour)));
        medians.max_by(f64::total_cmp)
    });
    let job = EngineWork {
        busy: busiest.unwrap_or(1.0),
        ..EngineWork::job(1.0)
    };
    let (Some(Ok((model, arguments))), Some(speed)) = (&one.model, speed) else {
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

#[cfg(test)]
mod tests {
    use super::super::usage::{Answer, Series};
    use super::*;
    use crate::estimate::shipped::ShippedModel;

    const FIGURES: [(Quantity, f64); 3] = [
        (Quantity::KvUsage, 0.5),
        (Quantity::KvTokens, 100_000.0),
        (Quantity::Utilization, 30.0),
    ];

    fn llama(gpus: u32, tensor_parallel: u64) -> Workload {
        let model = ShippedModel::find("llama-3.1-8b").unwrap().read().unwrap();
        let arguments = EngineArguments {
            sequences: 1,
            tensor_parallel,
            ..EngineArguments::default()
        };
        Workload {
            name: "llama".into(),
            pods: vec![0],
            gpus,
            nodes: BTreeMap::new(),
            part: 1.0,
            kept: None,
            gpu: None,
            model: Some(Ok((model, arguments))),
        }
    }

    /// Each of these quantities at a value for so many hours, of a window of two days.
    fn usage(hours: i64, values: &[(Quantity, f64)]) -> Usage {
        let mut usage = Usage {
            window: Some((0, 47 * 3600)),
            step: Some(3600),
            ..Usage::default()
        };
        let mut answer = Answer::default();
        for (quantity, value) in values {
            let series = Series {
                quantity: *quantity,
                device: "pod".into(),
                workload: Some(0),
                samples: (0..hours).map(|hour| (hour * 3600, *value)).collect(),
            };
            answer.add(series, &mut usage);
        }
        answer.fold(&mut usage);
        usage
    }

    fn need(one: &Workload, usage: &Usage) -> Need {
        Need::new(one, 0, usage, None)
    }

    #[test]
    fn an_engine_whose_compute_or_kv_cache_nobody_knows_is_unknown() {
        let one = llama(1, 1);
        for (missing, why) in [
            (0, "KV cache's peak"),
            (1, "size of its KV cache"),
            (2, "what it computes"),
        ] {
            let mut figures = FIGURES.to_vec();
            figures.remove(missing);
            let found = need(&one, &usage(48, &figures));
            assert_eq!(found.request, Err(OwnGpu::Unknown));
            assert!(found.why.contains(why), "{}", found.why);
        }
        // 15 GiB of weights, some of the engine's own, and half of 12.2 GiB with a quarter more.
        let request = need(&one, &usage(48, &FIGURES)).request.unwrap();
        assert!((24..=30).contains(&(request.0 >> 30)), "{request}");
    }

    #[test]
    fn figures_of_one_replica_are_not_those_of_all() {
        let mut two = llama(1, 1);
        two.pods = vec![0, 1];
        let found = need(&two, &usage(48, &FIGURES));
        let why = "its KV cache's peak is known of 1 of 2 engines only";
        assert_eq!((found.request, &*found.why), (Err(OwnGpu::Unknown), why));
    }

    #[test]
    fn vram_that_does_not_hold_the_weights_is_a_contradiction() {
        let figures = [&FIGURES[..], &[(Quantity::Vram, 6000.0)]].concat();
        let found = need(&llama(1, 1), &usage(48, &figures));
        assert_eq!(found.request, Err(OwnGpu::Unknown));
    }

    #[test]
    fn a_peak_of_less_than_a_day_is_none() {
        let one = llama(1, 1);
        assert!(need(&one, &usage(24, &FIGURES)).request.is_ok());
        let short = need(&one, &usage(23, &FIGURES));
        assert_eq!(short.request, Err(OwnGpu::Unknown));
        assert_eq!(short.why, "its KV cache's peak is known for 23 hours only");
    }

    #[test]
    fn gpus_that_no_tensor_parallelism_explains_are_unknown() {
        let found = need(&llama(2, 1), &usage(48, &FIGURES));
        assert_eq!(found.request, Err(OwnGpu::Unknown));
    }

    #[test]
    fn an_engine_that_interrupts_requests_gets_all_its_kv_cache() {
        let one = llama(1, 1);
        let calm = usage(48, &FIGURES);
        let mut pressed = calm.clone();
        let mut answer = Answer::default();
        let series = Series {
            quantity: Quantity::Preemptions,
            device: "pod".into(),
            workload: Some(0),
            samples: vec![(0, 1.0), (3600, 2.0)],
        };
        answer.add(series, &mut pressed);
        answer.fold(&mut pressed);
        assert!(need(&one, &pressed).request.unwrap() > need(&one, &calm).request.unwrap());
    }

    #[test]
    fn what_nobody_measured_works_all_the_time() {
        let none = usage(0, &[]);
        assert_eq!(work(&llama(1, 1), 0, &none, None).busy, 1.0);
    }
}
