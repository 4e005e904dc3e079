//! S2, mixed models on one pool: a catalog of a hundred models, most of which are hardly asked for. A GPU for each stands idle
//! most of the time and a pool is full before all have a place; Stowage packs them by VRAM, with KV caches and queues in view.
//!
//! # The workload
//!
//! A hundred models of 1B to 70B, of which rank r is asked for 1/r as often as rank 1; 15 requests a second together. Each has
//! stretches of six minutes with four times its mean and of half an hour with two fifths of it. H100 in nodes of eight, every
//! node with all files on its disk. The models' first pods come one after the other, every half minute, as teams bring them:
//! where all came at once, a few models found no place on the same pool. Teams size an engine's grant for its busy stretches:
//! weights, profile run, and a KV cache for the requests inside if it has half of a GPU's compute, and a quarter more; at least
//! 8,192 tokens. Where one engine does not keep up with them, a team has as many as do. The policy's autoscaler adds up to eight,
//! and in an hour a new version of every model is rolled out, one model after the other and one pod after the other: an old one
//! leaves when the new one is ready and it has finished its requests. Pods with something to do take turns on their GPU: one
//! beside two busy neighbors is 3.4 times as slow. A request is in time with a first token within 5 s and 0.2 s for each
//! further one.
//!
//! With a trace, each model is asked as one of its services, for an hour that begins at a minute of the model's own, and sized for
//! the service's busiest minute; over the day it is asked as often as without.
//!
//! *GPUs* is the smallest pool with a place for every model and 99 % of the requests in time, by bisection. The other figures are
//! of one pool for all variants: a fourth more than the engines' grants take without any gap, and jobs in what they leave
//! ([`jobs`]).
//!
//! The variants: Stowage; Stowage whose agents report no KV caches and queues, so that it packs by VRAM alone; Stowage whose jobs
//! borrow what awake engines do not use, on nodes that keep VRAM limits, where engines allocate their KV caches as they fill (those
//! that allocate them when they start have nothing to lend, and that is the first variant); Stowage whose engines shall take at
//! most 40 ms for a token (`maxTimePerToken`), of which agents report what they take; Stowage where pods have a part of the SMs
//! each instead of turns, as large as their part of the VRAM; and kube-scheduler with whole GPUs for every engine, which then have
//! all of its memory for their KV cache.

mod catalog;
mod jobs;
mod neighbors;
mod pool;
mod served;
mod sizing;
mod sums;

use super::running_jobs::JobTimer;
use super::{
    Curve, Figure, Scenario, ScenarioInput, Target, TargetBound, TraceFileText, VariantRun,
};
use crate::simulate::fleet::engines::Slo;
use crate::simulate::fleet::replicas::ReplicaTiming;
use crate::simulate::fleet::traffic::{
    DayOfTraffic, Gaps, Service, TrafficError, TrafficText, minutes,
};
use catalog::MIN_KV_TOKENS;
use sizing::{Placer, Sizing};
use stowage_scheduling::contention::ComputeSharing;
use stowage_scheduling::units::{Bytes, Millis};

pub(crate) static MIXED_MODELS: Scenario = Scenario {
    name: "mixed-models",
    claim: "A catalog of models shares a fraction of the GPUs of one model per GPU, and answers in time.",
    variants: &[
        "stowage",
        "KV-blind",
        "borrowing",
        "limits",
        "SM sharing",
        "one model per GPU",
    ],
    figures: &[
        Figure {
            name: "GPUs",
            decimals: 1,
            help: "the smallest pool with a place for every model and 99 % of requests in time",
        },
        Figure {
            name: "least",
            decimals: 1,
            help: "GPUs that the engines of busy stretches take if no VRAM is left over between them",
        },
        Figure {
            name: "in time",
            decimals: 2,
            help: "requests within the bounds on the pool, in hundredths",
        },
        Figure {
            name: "TTFT p99",
            decimals: 2,
            help: "seconds to the first token on the pool, 99th percentile of requests that an engine took",
        },
        Figure {
            name: "alone",
            decimals: 2,
            help: "the same if each engine had its GPUs' compute to itself, which no placement can better",
        },
        Figure {
            name: "TPOT p99",
            decimals: 1,
            help: "milliseconds for an output token on the pool, 99th percentile of requests",
        },
        Figure {
            name: "within 2x",
            decimals: 2,
            help: "requests that took at most twice as long for a token as beside no neighbor, in hundredths",
        },
        Figure {
            name: "placements",
            decimals: 0,
            help: "pods placed on the pool while it serves",
        },
        Figure {
            name: "onto full",
            decimals: 2,
            help: "of these onto a GPU with an engine above 90 % of its KV cache when that was decided, in hundredths",
        },
        Figure {
            name: "models",
            decimals: 1,
            help: "models with a place on the pool",
        },
        Figure {
            name: "stranded",
            decimals: 2,
            help: "free VRAM that no model fits, in hundredths of that of GPUs in use",
        },
        Figure {
            name: "busy",
            decimals: 1,
            help: "time for which a GPU in use has a request, in hundredths",
        },
        Figure {
            name: "job-hours",
            decimals: 1,
            help: "hours of jobs' work that is done, beside the engines",
        },
        Figure {
            name: "lost",
            decimals: 2,
            help: "hours of jobs' work that was lost and is done again",
        },
        Figure {
            name: "ended",
            decimals: 0,
            help: "jobs that the driver ended because an engine took its VRAM back",
        },
    ],
    targets: &[
        Target {
            name: "GPUs saved against one model per GPU, %",
            bound: TargetBound::AtLeast(60.0),
            value: |means| {
                percent_saved(
                    means.mean_of("stowage", "GPUs"),
                    means.mean_of("one model per GPU", "GPUs"),
                )
            },
            limit: Some(|means| {
                percent_saved(
                    means.mean_of("stowage", "least"),
                    means.mean_of("one model per GPU", "GPUs"),
                )
            }),
        },
        Target {
            name: "placements onto a GPU above 90 % KV, %",
            bound: TargetBound::AtMost(0.0),
            value: |means| means.mean_of("stowage", "onto full"),
            limit: None,
        },
        Target {
            name: "TTFT p99: KV-blind ÷ Stowage",
            bound: TargetBound::AtLeast(2.0),
            value: |means| {
                means.mean_of("KV-blind", "TTFT p99") / means.mean_of("stowage", "TTFT p99")
            },
            limit: Some(|means| {
                means.mean_of("KV-blind", "TTFT p99") / means.mean_of("stowage", "alone")
            }),
        },
    ],
    traces: &[TRACE],
    check: Some(|input| days(input).map(drop)),
    play,
};

const TRACE: &str = "llm_24h_per_minute.csv";
const MODELS: usize = 100;
/// Requests a second, for so many models.
const REQUESTS_PER_S: f64 = 15.0;
const GPU_VRAM: Bytes = Bytes::gib(80);
const NODE_GPUS: usize = 8;
const SLO: Slo = Slo {
    ttft_s: 5.0,
    tpot_s: 0.2,
};
/// Share of the requests that may be late.
const MAX_LATE_SHARE: f64 = 0.01;
/// Replicas beyond those that a model's busy stretches need.
const MAX_EXTRA_REPLICAS: u32 = 8;
/// Between two steps of the engines. As often as agents report: in a step of five seconds the cache of a small engine fills and
/// empties, and what a reading shows is by chance.
const ENGINE_STEP: Millis = Millis::seconds(1);
const REPLICA_TIMING: ReplicaTiming = ReplicaTiming {
    ready_in: Millis::seconds(40),
    drain_time: Millis::seconds(120),
};
/// Between the first pods of two models.
const MODEL_ARRIVAL_INTERVAL: Millis = Millis::seconds(30);
/// From the last one until traffic begins.
const WARM_UP_TIME: Millis = Millis::seconds(120);
/// GPUs of the pool, as a multiple of the fewest that hold all engines.
const POOL_SIZE_FACTOR: f64 = 1.25;

#[derive(Debug, PartialEq, Eq)]
enum Timer {
    /// This model's first pod is created.
    ModelArrives(usize),
    Step,
    /// A new version of this model is there.
    Rollout(usize),
    Job(JobTimer),
}

impl From<JobTimer> for Timer {
    fn from(timer: JobTimer) -> Self {
        Self::Job(timer)
    }
}

fn percent_saved(gpus: f64, instead_of: f64) -> f64 {
    100.0 * (1.0 - gpus / instead_of)
}

/// The services of the trace; none without one.
fn days(input: &ScenarioInput) -> Result<Vec<DayOfTraffic>, TrafficError> {
    let Some(TraceFileText { file, text }) = input.traces.get(TRACE) else {
        return Ok(Vec::new());
    };
    let day = |service: Service| {
        let day = minutes::read(TrafficText { file, text }, service, Gaps::Refuse)?;
        let tokens = day
            .mean_size()
            .map_or(0.0, |size| size.prompt + size.output);
        match (1.0..=MIN_KV_TOKENS).contains(&tokens) {
            true => Ok(day),
            false => Err(TrafficError::Unplayable {
                file: file.clone(),
                service: service.name(),
                tokens,
                most: MIN_KV_TOKENS,
            }),
        }
    };
    Ok(vec![day(Service::Code)?, day(Service::Conversation)?])
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let placer = [
        Placer::Stowage,
        Placer::KvBlind,
        Placer::Borrowing,
        Placer::Limited,
        Placer::SmSharing,
        Placer::WholeGpus,
    ][variant];
    let (models, minutes) = if input.is_short {
        (12, 10)
    } else {
        (MODELS, 60)
    };
    let sizing = Sizing::new(
        placer,
        seed,
        models,
        minutes,
        &days(input).expect("the trace was checked"),
    );
    let needed = sizing.gpus_needed();
    let size = (POOL_SIZE_FACTOR * sizing.min_gpus as f64).ceil() as usize;
    let mut pool = sizing.play_pool(size, placer.sharing());
    let ttft = pool.ttft();
    let alone = match placer {
        Placer::WholeGpus => ttft.clone(),
        _ => sizing.play_pool(size, ComputeSharing::Exclusive).ttft(),
    };
    let seconds = |share: f64| ttft.quantile_s(share).unwrap_or(0.0);
    let point = |thousandth: u32| {
        (
            seconds(f64::from(thousandth) / 1000.0),
            f64::from(thousandth) / 10.0,
        )
    };
    let broken = std::mem::take(&mut pool.stage.violations);
    let end = pool.stage.now();
    pool.jobs.running.count_unfinished(end);
    let (sums, jobs) = (&pool.sums, &pool.jobs.running);
    VariantRun {
        figures: vec![
            needed.unwrap_or_else(|most| most) as f64,
            sizing.min_gpus as f64,
            100.0 * (1.0 - (pool.late() + pool.waiting()) / sizing.requests()),
            seconds(0.99),
            alone.quantile_s(0.99).unwrap_or(0.0),
            1000.0 * pool.tpot().quantile_s(0.99).unwrap_or(0.0),
            pool.within_twice(),
            sums.placements,
            sums.onto_full(),
            sums.placed_models as f64,
            sums.stranded(),
            sums.busy(),
            jobs.saved_gpu_hours,
            jobs.lost_gpu_hours,
            jobs.crashes as f64,
        ],
        curves: vec![
            Curve {
                name: "GPUs in use",
                x_label: "hours",
                points: sums.curve.clone(),
            },
            Curve {
                name: "requests with a first token, %, from 90",
                x_label: "seconds",
                points: (900..1000).map(point).collect(),
            },
        ],
        violations: broken,
        notes: needed
            .err()
            .map(|most| format!("{placer:?}: no pool of up to {most} GPUs suffices"))
            .into_iter()
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_of_a_service_that_is_never_asked_or_asked_too_much_at_once_is_refused() {
        let days_of = |requests: u32, tokens: u32| {
            let rows = (0..1440).map(|minute| {
                format!("{minute},code,1,100,10\n{minute},conv,{requests},{tokens},{tokens}\n")
            });
            let text = rows.fold(
                "minute,service,requests,prompt_tokens,output_tokens\n".into(),
                |all: String, row| all + &row,
            );
            let file = TraceFileText {
                file: TRACE.into(),
                text,
            };
            let traces = [(TRACE, file)].into();
            days(&ScenarioInput {
                traces,
                is_short: true,
            })
        };
        assert_eq!(days_of(2, 4000).unwrap().len(), 2);
        let refused = days_of(1, 5000).unwrap_err().to_string();
        assert!(refused.contains("10000 tokens on average"), "{refused}");
        assert!(refused.contains("8192 tokens at most"), "{refused}");
        let never = days_of(0, 0).unwrap_err().to_string();
        assert!(never.contains("conv have 0 tokens"), "{never}");
    }
}
