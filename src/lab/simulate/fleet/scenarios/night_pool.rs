//! S1, idle serving GPUs harvested: a serving fleet follows the day's traffic, and jobs fill the GPUs that its replicas leave idle
//! and go the moment a replica wants them back.
//!
//! # The workload
//!
//! Twenty nodes of four H100. A 70B model over four GPUs a replica, with the traffic of a service that writes code: the trace of
//! a day, or a generated one, scaled so that its peak keeps sixteen replicas seven tenths busy. The autoscaler is the one that
//! ships as a metric, by the policy's targets for KV cache, queue and requests, with two to twenty replicas; a replica takes
//! about a minute and a half to start, and finishes its requests before it goes, within two minutes. A request is late if its
//! first token takes more than five seconds.
//!
//! Jobs never run out, and eight are pending at any time: of one GPU (70 %), two or four, with ten minutes to two hours of work,
//! even by logarithm. Four fifths of them save their work every ten minutes, and once more in the half minute that they have to
//! leave; the others lose all that they have done. What is lost is done again.
//!
//! The variants: no jobs at all; victims in kube-scheduler's order; and Stowage's with replicas by an HPA on GPU utilization,
//! which is near its top whenever an engine has a request.

mod jobs;
mod pool;

use super::endless_jobs::EndlessJobs;
use super::running_jobs::JobTimer;
use super::{Figure, Scenario, ScenarioInput, Target, TargetBound, VariantRun, shipped_policy};
use crate::simulate::fleet::engines::{EngineSpec, GpuSpeed, ModelShape, Slo, max_rate_per_s};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::replicas::{ServingDay, ShippedScaler, UtilizationScaler};
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use crate::simulate::fleet::stage::Stage;
use crate::simulate::fleet::traffic::{
    DayOfTraffic, Gaps, RequestSize, Service, TrafficError, TrafficText, built_in, minutes,
};
use jobs::JOBS;
use pool::Pool;
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName};
use stowage_scheduling::policy::AutoscalingRules;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

const TRACE: &str = "llm_24h_per_minute.csv";

pub(crate) static NIGHT_POOL: Scenario = Scenario {
    name: "night-pool",
    claim: "Jobs use the GPUs that serving replicas leave idle, and no request notices.",
    variants: &[
        "stowage",
        "victims by kube-scheduler",
        "no jobs",
        "replicas by GPU utilization",
    ],
    figures: &[
        Figure {
            name: "idle",
            decimals: 0,
            help: "GPU-hours without a replica",
        },
        Figure {
            name: "harvested",
            decimals: 0,
            help: "GPU-hours of jobs' work that was kept",
        },
        Figure {
            name: "of idle",
            decimals: 1,
            help: "harvested, in hundredths of idle less a headroom of 2 % of all GPUs",
        },
        Figure {
            name: "lost",
            decimals: 2,
            help: "work that was done and lost, in hundredths of what was harvested",
        },
        Figure {
            name: "evictions",
            decimals: 0,
            help: "jobs that left for a replica",
        },
        Figure {
            name: "wait p50",
            decimals: 1,
            help: "seconds from a replica's creation until it has its GPUs, median",
        },
        Figure {
            name: "wait p99",
            decimals: 1,
            help: "the same, 99th percentile",
        },
        Figure {
            name: "late",
            decimals: 3,
            help: "requests whose first token took more than 5 s, in hundredths",
        },
        Figure {
            name: "replicas",
            decimals: 0,
            help: "GPU-hours of replicas",
        },
    ],
    targets: &[
        Target {
            name: "harvested, % of idle GPU-hours net of headroom",
            bound: TargetBound::AtLeast(95.0),
            value: |means| means.mean_of("stowage", "of idle"),
            limit: None,
        },
        Target {
            name: "work lost, % of harvested",
            bound: TargetBound::AtMost(1.0),
            value: |means| means.mean_of("stowage", "lost"),
            limit: None,
        },
        Target {
            name: "late requests that jobs add, % of requests",
            bound: TargetBound::AtMost(0.0),
            value: |means| {
                (means.mean_of("stowage", "late") - means.mean_of("no jobs", "late")).max(0.0)
            },
            limit: None,
        },
    ],
    traces: &[TRACE],
    check: Some(|input| day(input, 0).map(drop)),
    play,
};

const MODEL: &str = "llama-70b";
const NODES: usize = 20;
const GPUS_PER_NODE: u32 = 4;
const GPU_VRAM: Bytes = Bytes::gib(80);
/// Replicas that the busiest minute needs, each with that share of what it can do.
const PEAK_REPLICAS: f64 = 16.0;
const PEAK_SHARE: f64 = 0.7;
const SLO: Slo = Slo {
    ttft_s: 5.0,
    tpot_s: 0.2,
};
/// Between two steps of the engines.
const ENGINE_STEP: Millis = Millis::seconds(5);
/// For how long a replica that is let go finishes its requests.
const DRAIN_TIME: Millis = Millis::seconds(120);
/// What an HPA on GPU utilization is usually told.
const TARGET_UTILIZATION: f64 = 0.7;
/// Share of all GPUs that is not counted as idle.
const HEADROOM_SHARE: f64 = 0.02;

pub(crate) enum Timer {
    Step,
    Job(JobTimer),
}

impl From<JobTimer> for Timer {
    fn from(timer: JobTimer) -> Self {
        Self::Job(timer)
    }
}

/// A 70B model over a node's GPUs.
fn engine() -> EngineSpec {
    let spec = EngineSpec::new(
        &ModelShape::LLAMA_70B,
        &GpuSpeed::H100,
        GPUS_PER_NODE,
        Bytes::gib(72),
    );
    spec.expect("a 70B model fits on four H100")
}

fn day(input: &ScenarioInput, seed: u64) -> Result<DayOfTraffic, TrafficError> {
    let RequestSize { prompt, output } = RequestSize::CODE;
    let peak = PEAK_REPLICAS * PEAK_SHARE * max_rate_per_s(&engine(), prompt, output);
    let day = match input.traces.get(TRACE) {
        None => return Ok(built_in::working_day(seed, peak, RequestSize::CODE)),
        Some(trace) => minutes::read(
            TrafficText {
                file: &trace.file,
                text: &trace.text,
            },
            Service::Code,
            Gaps::Refuse,
        )?,
    };
    Ok(day.with_peak(peak))
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let policy = shipped_policy(
        "night-harvest",
        include_str!("../../../../../policies/night-harvest/policy.yaml"),
    );
    let scheduler: Box<dyn FleetScheduler> = match variant {
        1 => Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::MostAllocated,
            PreemptionMode::LowerPriority,
            seed,
        )),
        _ => Box::new(Stowage::new(policy.clone())),
    };
    let day = day(input, seed).expect("the trace was checked");
    let spec = engine();
    let model = ModelId::parse(MODEL).expect("it is a name");
    let rules = AutoscalingRules {
        min_replicas: 2,
        max_replicas: NODES as u32,
        ..policy.autoscaling.for_model(&model)
    };
    let hours = if input.is_short { 3 } else { 24 };
    // The short part is the morning's rise.
    let begins = Moment(if input.is_short { 6 * 3_600_000 } else { 0 });
    let stage = Stage::new(machines(), scheduler, seed);
    let jobs = EndlessJobs::new((variant != 2).then_some(JOBS), seed);
    match variant {
        3 => {
            let scaler = UtilizationScaler::new(TARGET_UTILIZATION, 2, NODES as u32);
            Pool::new(
                stage,
                jobs,
                ServingDay::new(spec, day, SLO, scaler, begins),
                begins,
            )
            .play(hours)
        }
        _ => {
            let scaler = ShippedScaler::new(rules);
            Pool::new(
                stage,
                jobs,
                ServingDay::new(spec, day, SLO, scaler, begins),
                begins,
            )
            .play(hours)
        }
    }
}

fn weights() -> Bytes {
    Bytes(141_000_000_000)
}

/// Every node has the model's files: it is the only one.
fn machines() -> Machines {
    let spec = |n: usize| MachineSpec {
        name: NodeName::parse(&format!("node-{n:02}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse("H100-80GB").expect("it is a plain word"),
        gpus: GPUS_PER_NODE,
        vram: GPU_VRAM,
        page_cache: Bytes::gib(300),
    };
    let mut machines = Machines::new((0..NODES).map(spec), LoadingSpeeds::default());
    for n in 0..NODES {
        let model = ModelId::parse(MODEL).expect("it is a name");
        machines
            .get_mut(&spec(n).name)
            .expect("it was just made")
            .disk
            .insert(model, weights());
    }
    machines
}
