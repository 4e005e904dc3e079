//! S5, two GPUs and three models: fraud detection has a GPU to itself, credit scoring and a chatbot share the other, and when VRAM
//! is short the chatbot leaves first.
//!
//! # The workloads
//!
//! One node with two A100 of 80 GB, in the node pool of the policy `fraud-credit-chatbot`.
//!
//! *Random schedules*, 10,000 a seed: within a minute, up to a dozen pods of the three classes come in any order, with 4 to 60 GiB
//! each; some only claim to be fraud detection (its label with a lower priority). Most end after a while, some stay. What counts
//! is what the hardware holds: pods beside fraud detection, and which pod is evicted for which.
//!
//! *A day*: fraud detection with 60 GiB (tables of embeddings) at all times; credit scoring with one replica, two from one to five
//! at night and in half a dozen busy periods; the chatbot with one replica, two from seven to eleven in the evening. A replica is
//! an 8B model with 36 GiB, and half of what a GPU's headroom leaves.
//!
//! *Latency* of fraud detection: 15 inferences a second come by chance and take 10 to 15 ms each of a GPU of their own. Beside an
//! engine that is busy they have less than half of it ([`latency`]).
//!
//! The variants: Stowage; kube-scheduler with whole GPUs; and time-slicing, where a pod gets a GPU by chance. As nothing is
//! isolated there, replicas of the day have 18 GiB each, so that any two pods fit on one GPU.

mod app;
mod day;
mod latency;
mod planned;
mod schedules;
mod time_slicing;

use super::{Figure, Scenario, ScenarioInput, Target, TargetBound, VariantRun, shipped_policy};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use app::App;
use schedules::Schedules;
use stowage_scheduling::ids::{GpuModel, NodeName};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;
use time_slicing::TimeSlicing;

pub(crate) static FRAUD_CREDIT_CHATBOT: Scenario = Scenario {
    name: "fraud-credit-chatbot",
    claim: "Two GPUs serve three models, and the one that must answer in time never has company.",
    variants: &["stowage", "kube-scheduler, whole GPUs", "time-slicing"],
    figures: &[
        Figure {
            name: "foreign",
            decimals: 0,
            help: "pods bound beside fraud detection, in random schedules",
        },
        Figure {
            name: "evictions",
            decimals: 0,
            help: "pods for which others were evicted, in random schedules",
        },
        Figure {
            name: "chatbot first",
            decimals: 1,
            help: "evictions in which credit scoring stays if leaving chatbots make the room, in hundredths",
        },
        Figure {
            name: "fraud evicted",
            decimals: 0,
            help: "evictions of fraud detection, in random schedules",
        },
        Figure {
            name: "utilization",
            decimals: 1,
            help: "VRAM that running pods ask for, over a day, in hundredths of the two GPUs'",
        },
        Figure {
            name: "credit up",
            decimals: 1,
            help: "of the day, a replica of credit scoring runs, in hundredths",
        },
        Figure {
            name: "chatbot up",
            decimals: 1,
            help: "of the day, a replica of the chatbot runs, in hundredths",
        },
        Figure {
            name: "fraud p50",
            decimals: 1,
            help: "ms from an inference's arrival to its answer, median",
        },
        Figure {
            name: "fraud p99",
            decimals: 1,
            help: "the same, 99th percentile",
        },
        Figure {
            name: "GPUs",
            decimals: 0,
            help: "GPUs that hold one pod of each, as capacity is planned",
        },
    ],
    targets: &[
        Target {
            name: "pods beside fraud detection",
            bound: TargetBound::AtMost(0.0),
            value: |means| means.mean_of("stowage", "foreign"),
            limit: None,
        },
        Target {
            name: "the chatbot leaves first, %",
            bound: TargetBound::AtLeast(100.0),
            value: |means| means.mean_of("stowage", "chatbot first"),
            limit: None,
        },
        Target {
            name: "evictions of fraud detection",
            bound: TargetBound::AtMost(0.0),
            value: |means| means.mean_of("stowage", "fraud evicted"),
            limit: None,
        },
        Target {
            name: "VRAM in use, %",
            bound: TargetBound::AtLeast(82.0),
            value: |means| means.mean_of("stowage", "utilization"),
            limit: Some(|_| {
                100.0 * (FRAUD_VRAM.0 + 2 * REPLICA_VRAM.0) as f64 / (2 * GPU_VRAM.0) as f64
            }),
        },
        Target {
            name: "fraud detection answers, p99, ms",
            bound: TargetBound::AtMost(45.0),
            value: |means| means.mean_of("stowage", "fraud p99"),
            limit: None,
        },
        Target {
            name: "GPUs that suffice",
            bound: TargetBound::AtMost(2.0),
            value: |means| means.mean_of("stowage", "GPUs"),
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

const GPU_VRAM: Bytes = Bytes::gib(80);
const FRAUD_VRAM: Bytes = Bytes::gib(60);
const REPLICA_VRAM: Bytes = Bytes::gib(36);
/// Beside fraud detection there is no room for more.
const SLICED_REPLICA_VRAM: Bytes = Bytes::gib(18);

fn policy() -> Policy {
    let text = include_str!("../../../../../policies/fraud-credit-chatbot/policy.yaml");
    shipped_policy("fraud-credit-chatbot", text)
}

fn new_scheduler(variant: usize, policy: &Policy, seed: u64) -> Box<dyn FleetScheduler> {
    match variant {
        0 => Box::new(Stowage::new(policy.clone())),
        1 => Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::LeastAllocated,
            PreemptionMode::LowerPriority,
            seed,
        )),
        _ => Box::new(TimeSlicing::new(seed)),
    }
}

fn machines() -> Machines {
    let spec = MachineSpec {
        name: NodeName::parse("bank-1").expect("it is a name"),
        labels: [("gpu-pool".to_owned(), "bank".to_owned())].into(),
        gpu: GpuModel::parse("A100-80GB").expect("it is a plain word"),
        gpus: 2,
        vram: GPU_VRAM,
        page_cache: Bytes::gib(100),
    };
    Machines::new([spec], LoadingSpeeds::default())
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let policy = policy();
    let new = |seed| new_scheduler(variant, &policy, seed);
    let schedules = Schedules::play_schedules(if input.is_short { 40 } else { 10_000 }, seed, new);
    let replica = if variant == 2 {
        SLICED_REPLICA_VRAM
    } else {
        REPLICA_VRAM
    };
    let day = day::play_day(
        if input.is_short { 4 } else { 24 },
        seed,
        replica,
        new(seed),
    );
    let inferences = if input.is_short { 5_000 } else { 200_000 };
    let [p50, p99] = latency::quantiles(&day.hours_by_neighbors, inferences, seed);
    let (gpus, note) = planned::gpus_needed(variant, replica, &policy);
    let figures = vec![
        schedules.beside_fraud as f64,
        schedules.evictions as f64,
        schedules.chatbot_first(),
        schedules.fraud_evicted as f64,
        day.utilization,
        day.availability[App::Credit as usize],
        day.availability[App::Chatbot as usize],
        p50,
        p99,
        f64::from(gpus),
    ];
    let mut broken = schedules.broken;
    broken.extend(day.broken);
    let kept = format!(
        "in {} sets credit scoring left while other VRAM was kept for a waiting pod of lower priority",
        schedules.credit_evictions_beside_reserved
    );
    let notes = if variant == 0 {
        [note, kept]
            .into_iter()
            .chain(planned::mig_geometries())
            .collect()
    } else {
        Vec::new()
    };
    VariantRun {
        figures,
        curves: day.curves,
        violations: broken,
        notes,
    }
}
