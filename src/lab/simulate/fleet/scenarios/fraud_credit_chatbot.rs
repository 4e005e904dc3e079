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
//! an 8B model with 36 GiB, and half of what a GPU's headroom leaves. While an app has two, each has a request a second, and otherwise
//! one a minute.
//!
//! *Latency* of fraud detection: 15 inferences a second come by chance and take 10 to 15 ms each of a GPU of their own. Beside an
//! engine that is busy they have less than half of it ([`latency`]).
//!
//! The variants: Stowage; kube-scheduler with whole GPUs; time-slicing, where a pod gets a GPU by chance; and Stowage where fraud
//! detection may have company, without a limit and with one: its first token, which is its answer, shall take 20 ms on average
//! (`maxTimeToFirstToken`). Where GPUs are shared, replicas of the day have 18 GiB each, so that one fits beside fraud detection,
//! which has 54 GiB under Stowage's headroom.

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
use stowage_scheduling::policy::{Class, Policy};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;
use time_slicing::TimeSlicing;

pub(crate) static FRAUD_CREDIT_CHATBOT: Scenario = Scenario {
    name: "fraud-credit-chatbot",
    claim: "Two GPUs serve three models, and the one that must answer in time never has company.",
    variants: &[
        "stowage",
        "kube-scheduler, whole GPUs",
        "time-slicing",
        "sharing",
        "limits",
    ],
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
            name: "the same on a shared GPU with a limit",
            bound: TargetBound::AtMost(45.0),
            value: |means| means.mean_of("limits", "fraud p99"),
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
const SHARING_FRAUD_VRAM: Bytes = Bytes::gib(54);
/// For fraud detection's mean. Alone its median is 13 ms, and its 99th percentile 30 ms.
const MAX_TIME_TO_ANSWER: Millis = Millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Stowage,
    WholeGpus,
    TimeSlicing,
    /// Stowage where fraud detection may have company.
    Sharing,
    /// The same with a limit on its latency.
    Limits,
}

/// VRAM of a pod in the day.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    fraud: Bytes,
    replica: Bytes,
}

impl Variant {
    const ALL: [Self; 5] = [
        Self::Stowage,
        Self::WholeGpus,
        Self::TimeSlicing,
        Self::Sharing,
        Self::Limits,
    ];

    fn shares(self) -> bool {
        matches!(self, Self::Sharing | Self::Limits)
    }

    fn sizes(self) -> Sizes {
        let (fraud, replica) = match self {
            Self::Stowage | Self::WholeGpus => (FRAUD_VRAM, REPLICA_VRAM),
            Self::TimeSlicing => (FRAUD_VRAM, SLICED_REPLICA_VRAM),
            Self::Sharing | Self::Limits => (SHARING_FRAUD_VRAM, SLICED_REPLICA_VRAM),
        };
        Sizes { fraud, replica }
    }

    fn policy(self) -> Policy {
        let policy = policy();
        if !self.shares() {
            return policy;
        }
        let limit = (self == Self::Limits).then_some(MAX_TIME_TO_ANSWER);
        let classes = policy.classes().iter().map(|class| {
            let is_fraud = class.name == App::Fraud.label();
            Class {
                shares_with: None,
                engine: class.engine || is_fraud,
                max_time_to_first_token: limit.filter(|_| is_fraud),
                ..class.clone()
            }
        });
        let classes = classes.collect();
        policy.with_classes(classes).expect("the same classes")
    }

    fn new_scheduler(self, policy: &Policy, seed: u64) -> Box<dyn FleetScheduler> {
        match self {
            Self::Stowage | Self::Sharing | Self::Limits => Box::new(Stowage::new(policy.clone())),
            Self::WholeGpus => Box::new(KubeSchedulerBaseline::new(
                ScoringStrategy::LeastAllocated,
                PreemptionMode::LowerPriority,
                seed,
            )),
            Self::TimeSlicing => Box::new(TimeSlicing::new(seed)),
        }
    }
}

fn policy() -> Policy {
    let text = include_str!("../../../../../policies/fraud-credit-chatbot/policy.yaml");
    shipped_policy("fraud-credit-chatbot", text)
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
    let variant = Variant::ALL[variant];
    let policy = variant.policy();
    let new = |seed| variant.new_scheduler(&policy, seed);
    let count = if input.is_short { 40 } else { 10_000 };
    let schedules = Schedules::play_schedules(count, seed, variant.shares(), new);
    let hours = if input.is_short { 4 } else { 24 };
    let day = day::play_day(hours, seed, variant.sizes(), new(seed));
    let (gpus, note) = planned::gpus_needed(variant, &policy);
    let [p50, p99] = day.fraud_ms;
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
    let notes = match variant {
        Variant::Stowage => {
            let kept = format!(
                "in {} sets credit scoring left while other VRAM was kept for a waiting pod of lower priority",
                schedules.credit_evictions_beside_reserved
            );
            let found = [note, kept].into_iter();
            found.chain(planned::mig_geometries()).collect()
        }
        Variant::Sharing | Variant::Limits => {
            let (minutes, evictions) = (day.company_minutes, day.evictions);
            vec![format!(
                "{variant:?}: of {hours} hours fraud detection had company for {minutes} minutes; {evictions} evictions"
            )]
        }
        _ => Vec::new(),
    };
    VariantRun {
        figures,
        curves: day.curves,
        violations: broken,
        notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_keeps_fraud_detection_in_time_beside_engines_that_begin_to_work() {
        let p99 = |variant: Variant| {
            let scheduler = variant.new_scheduler(&variant.policy(), 42);
            let day = day::play_day(4, 42, variant.sizes(), scheduler);
            (day.fraud_ms[1], day.evictions, day.company_minutes)
        };
        let (kept, evictions, company) = p99(Variant::Limits);
        assert!(
            kept < 45.0 && evictions > 0 && company > 0.0,
            "{kept} {evictions} {company}"
        );
        let (late, evictions, longer) = p99(Variant::Sharing);
        assert!(
            late > 45.0 && evictions == 0 && longer > company,
            "{late} {evictions} {longer}"
        );
    }
}
