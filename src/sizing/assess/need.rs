//! What a workload could request instead of whole GPUs, and why; or why it keeps GPUs of its own. Unknown is never nothing.

use super::usage::{COMPUTE, DAY_S, Quantity, Samples, Usage};
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

/// The need of a workload that keeps GPUs of its own.
pub fn own(reason: OwnGpu, why: impl ToString) -> Need {
    let why = why.to_string();
    Need {
        request: Err(reason),
        why,
    }
}

fn unknown(why: impl ToString) -> Need {
    own(OwnGpu::Unknown, why)
}

/// A workload, and what was measured of it: the figures of its index.
#[derive(Clone, Copy)]
pub struct Measured<'m> {
    pub workload: &'m Workload,
    pub index: usize,
    pub usage: &'m Usage,
}

impl<'m> Measured<'m> {
    pub fn samples(self, of: Quantity) -> Option<&'m Samples> {
        self.usage.workloads.get(&(self.index, of))
    }

    fn peak(self, of: Quantity) -> Option<f64> {
        Some(self.samples(of)?.peak)
    }

    /// As [`Samples::quantile`] says.
    pub fn quantile(self, of: Quantity, percent: f64, hour: Option<usize>) -> Option<f64> {
        self.samples(of)?.quantile(of, percent, hour)
    }

    /// How its compute is measured.
    pub fn compute(self) -> Option<Quantity> {
        let mut measures = COMPUTE.into_iter();
        measures.find(|measure| self.samples(*measure).is_some())
    }

    /// What it needs; with an hour, at that hour of the day, at so many per cent of its samples.
    pub fn need(self, hour: Option<(usize, f64)>) -> Need {
        let found = match (&self.workload.kept, &self.workload.model) {
            (Some(why), _) => Err(own(OwnGpu::Kept, why)),
            (None, Some(Ok(model))) => self.engine_need(model, hour),
            (None, Some(Err(why))) => Err(unknown(why)),
            (None, None) => self.process_need(),
        };
        let gpu = self.workload.gpu.as_ref();
        let total = gpu.map_or(Bytes(u64::MAX), |gpu| gpu.total);
        match found {
            Ok((request, why)) if request.0 / WHOLE_PERCENT > total.0 / 100 => {
                let why = format!("it needs {request} of {total}: {why}");
                own(OwnGpu::Size, why)
            }
            Ok((request, why)) => Need {
                request: Ok(request),
                why,
            },
            Err(own) => own,
        }
    }

    /// The peak of a quantity, unless too little is known of it.
    fn covered_peak(self, of: Quantity, what: &str) -> Result<f64, Need> {
        let samples = self.samples(of);
        let samples = samples.ok_or_else(|| unknown(format!("{what} is not known")))?;
        let covered = self.usage.covered_s(samples);
        let Workload { pods, gpus, .. } = self.workload;
        let (each, devices) = match of {
            Quantity::KvUsage => (1, "engines"),
            _ => (*gpus as usize, "GPUs"),
        };
        let (known, all) = (samples.devices.len(), pods.len() * each);
        let lacking = if covered < DAY_S {
            format!("for {} hours", covered / 3600)
        } else if known < all {
            format!("of {known} of {all} {devices}")
        } else {
            return Ok(samples.peak);
        };
        Err(unknown(format!("{what} is known {lacking} only")))
    }

    fn engine_need(
        self,
        (model, arguments): &(ModelArchitecture, EngineArguments),
        hour: Option<(usize, f64)>,
    ) -> Result<(Bytes, String), Need> {
        let (gpus, parallel) = (self.workload.gpus, arguments.tensor_parallel);
        if parallel != u64::from(gpus) {
            let why = format!("it has {gpus} GPUs, and its tensor parallelism is {parallel}");
            return Err(unknown(why));
        }
        let peak = self.covered_peak(Quantity::KvUsage, "its KV cache's peak")?;
        self.check_compute()?;
        let estimate = Estimate::for_model(model, arguments).map_err(unknown)?;
        let weights = estimate.bytes_of(PartName::Weights);
        let used = self.peak(Quantity::Vram).map(|mib| Bytes::mib(mib as u64));
        if used.is_some_and(|used| used < weights) {
            return Err(unknown("it has less VRAM in use than its weights take"));
        }
        let at_hour =
            hour.and_then(|(hour, percent)| self.quantile(Quantity::KvUsage, percent, Some(hour)));
        let count = |of| self.peak(of).map(|count| count as u64);
        let preemptions = self.samples(Quantity::Preemptions);
        let observation = Observation {
            reserved: None,
            used: used.map(|used| used.times(gpus.into())),
            kv_cache_usage: at_hour.or(Some(peak)),
            kv_cache_tokens: count(Quantity::KvTokens),
            running: count(Quantity::Running),
            waiting: count(Quantity::Waiting),
            preempting: preemptions.is_some_and(|samples| samples.rises > 0),
        };
        let size = RightSize::new(model, arguments, &estimate, &observation);
        let size = size.map_err(|_| unknown("the size of its KV cache is not known"))?;
        let why = format!(
            "weights {}; of {} of KV cache {} at the peak: {}",
            weights.times(gpus.into()),
            size.kv_cache_bytes,
            size.kv_cache_used_bytes,
            size.reason
        );
        Ok((size.needed_with_margin_bytes.split(gpus), why))
    }

    /// Of a process that is no engine: what it had at most, and a quarter more.
    fn process_need(self) -> Result<(Bytes, String), Need> {
        let peak = self.covered_peak(Quantity::Vram, "its VRAM")?;
        self.check_compute()?;
        let computed = self.computed(None).unwrap_or(1.0);
        if computed >= BUSY {
            let why = format!("it computes {:.0} % of the time", computed * 100.0);
            return Err(own(OwnGpu::Busy, why));
        }
        let peak = Bytes::mib(peak as u64);
        let why = format!("it had {peak} at most, and a quarter more is left to it");
        Ok((round_up_to_gib(Bytes(peak.0 / 4 * 5)), why))
    }

    fn check_compute(self) -> Result<f64, Need> {
        let measure = self.compute().unwrap_or(Quantity::Utilization);
        self.covered_peak(measure, "what it computes")
    }

    /// A share of the time for which it computes, 0 to 1: the median, of one hour of the day or of all.
    fn computed(self, hour: Option<usize>) -> Option<f64> {
        let measure = self.compute()?;
        Some(self.quantile(measure, 50.0, hour)? / measure.most())
    }

    /// A step of the workload alone on its GPU, and for which share of the time it works in its busiest hour; unknown is always.
    pub fn work(self) -> EngineWork {
        let hours = (0..24).filter_map(|hour| self.computed(Some(hour)));
        let job = EngineWork {
            busy: hours.max_by(f64::total_cmp).unwrap_or(1.0),
            ..EngineWork::job(1.0)
        };
        self.engine_work(job).unwrap_or(job)
    }

    fn engine_work(self, job: EngineWork) -> Option<EngineWork> {
        let speed = GpuSpeed::of(self.workload.gpu.as_ref()?.model.as_str())?;
        let (model, arguments) = self.workload.model.as_ref()?.as_ref().ok()?;
        let estimate = Estimate::for_model(model, arguments).ok()?;
        let running = self.quantile(Quantity::Running, 50.0, None);
        let operations = 2.0 * estimate.active_parameters as f64 / arguments.tensor_parallel as f64;
        Some(EngineWork {
            overhead_s: STEP_OVERHEAD_S,
            memory_s: speed.memory_s(estimate.bytes_of(PartName::Weights).0 as f64),
            compute_s: running.unwrap_or(1.0).max(1.0) * speed.compute_s(operations),
            ..job
        })
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

    fn measured<'m>(workload: &'m Workload, usage: &'m Usage) -> Measured<'m> {
        Measured {
            workload,
            index: 0,
            usage,
        }
    }

    fn need(one: &Workload, usage: &Usage) -> Need {
        measured(one, usage).need(None)
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
        assert_eq!(measured(&llama(1, 1), &none).work().busy, 1.0);
    }
}
