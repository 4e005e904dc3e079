//! S6, teams that share one pool: each has a guarantee of its own, borrows what the others leave idle, and gives it back when it
//! is wanted.
//!
//! # The workload
//!
//! Sixteen A100 on three nodes of four and two nodes of two, a day from six in the morning. *Inference* follows a working day: one
//! engine (32B, one GPU) at night, eight at the peak. *Training* comes in campaigns, a dozen jobs in the morning and some fifty in
//! the evening, of one, two or four GPUs and half an hour to three hours. *Experiments* are sweeps of 20 to 40 jobs of one GPU and
//! 5 to 40 minutes, six times a day. Jobs save their work every ten minutes; one that is evicted loses what it did since and is
//! submitted again. A team's queue keeps eight jobs pending.
//!
//! Pods have one of two PriorityClasses, as with a ResourceQuota for each: the higher one as far as the team stays within its
//! guarantee, the lower one beyond. A PriorityClass cannot be changed, so a pod that waits with the lower one is created again
//! when the guarantee has room for it.
//!
//! The variants: Stowage; three static partitions of 6, 6 and 4 GPUs; the same pool with kube-scheduler's preemption and no
//! quotas; and Stowage with one priority for each team (inference, training, experiments) instead of the two PriorityClasses.

mod account;
mod demand;
mod guarantee;
mod pods;
mod pool;
mod sums;

use super::running_jobs::JobTimer;
use super::{
    Figure, Means, Scenario, ScenarioInput, Target, TargetBound, VariantRun, shipped_policy,
};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use crate::simulate::fleet::stage::Stage;
use pods::PriorityScheme;
use pool::Pool;
use stowage_scheduling::ids::{GpuModel, NodeName, PodUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

pub(crate) static TEAMS: Scenario = Scenario {
    name: "teams",
    claim: "Teams on one pool get what they are guaranteed at once, and share fairly what is idle.",
    variants: &[
        "stowage",
        "static partitions",
        "one pool, priorities only",
        "stowage, a priority for each team",
    ],
    figures: &[
        Figure {
            name: "in a cycle",
            decimals: 1,
            help: "pods within a guarantee that get GPUs, or for which pods are evicted, within 5 s of when GPUs of one node are free or borrowed by pods that may be evicted, in hundredths",
        },
        Figure {
            name: "guaranteed p99",
            decimals: 1,
            help: "seconds that this takes, 99th percentile",
        },
        Figure {
            name: "guaranteed max",
            decimals: 0,
            help: "the same, the longest",
        },
        Figure {
            name: "Jain",
            decimals: 3,
            help: "Jain's index of borrowed GPUs over weight, while two teams or more wait to borrow one GPU",
        },
        Figure {
            name: "contested",
            decimals: 1,
            help: "GPU-hours over weight that those teams borrow meanwhile",
        },
        Figure {
            name: "even",
            decimals: 2,
            help: "the same, for each set of such teams times its Jain's index",
        },
        Figure {
            name: "most even",
            decimals: 2,
            help: "the same if those GPUs were split as evenly as whole ones can be at each moment, but for those that a team had got while no other waited for one",
        },
        Figure {
            name: "Jain, any",
            decimals: 3,
            help: "the same while two teams or more wait to borrow any number of GPUs",
        },
        Figure {
            name: "completed",
            decimals: 0,
            help: "GPU-hours of engines, and of jobs' work that was kept",
        },
        Figure {
            name: "lost",
            decimals: 1,
            help: "work that was done and lost, in hundredths of completed",
        },
        Figure {
            name: "inference p95",
            decimals: 0,
            help: "seconds until an engine has its GPU, 95th percentile",
        },
        Figure {
            name: "training p95",
            decimals: 0,
            help: "seconds until a job runs first, 95th percentile",
        },
        Figure {
            name: "experiments p95",
            decimals: 0,
            help: "the same of experiments",
        },
        Figure {
            name: "idle",
            decimals: 1,
            help: "GPU time without a pod while a pod within its team's limit waits, in hundredths",
        },
        Figure {
            name: "evictions",
            decimals: 0,
            help: "pods that left for another",
        },
    ],
    targets: &[
        Target {
            name: "seconds until a guarantee is met, p99",
            bound: TargetBound::AtMost(5.0),
            value: |means| means.mean_of("stowage", "guaranteed p99"),
            limit: None,
        },
        Target {
            name: "Jain's index of what is borrowed",
            bound: TargetBound::AtLeast(0.98),
            // Over all seeds: in some, teams compete for minutes only.
            value: |means| share_of_contested(means, "even"),
            limit: Some(|means| share_of_contested(means, "most even")),
        },
        Target {
            name: "completed GPU-hours: Stowage ÷ static partitions",
            bound: TargetBound::AtLeast(1.25),
            value: |means| {
                means.mean_of("stowage", "completed")
                    / means.mean_of("static partitions", "completed")
            },
            limit: None,
        },
        Target {
            name: "idle while work waits, %",
            bound: TargetBound::AtMost(10.0),
            value: |means| means.mean_of("stowage", "idle"),
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

/// GPUs of each node, and whose it is where the pool is partitioned.
const NODES: [(u32, Team); 5] = [
    (4, Team::Inference),
    (4, Team::Training),
    (4, Team::Experiments),
    (2, Team::Inference),
    (2, Team::Training),
];
/// VRAM of each GPU; a pod gets nine tenths of it, which the policy's headroom leaves.
const GPU_VRAM: Bytes = Bytes::gib(80);
const POD_VRAM: Bytes = Bytes::gib(72);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Team {
    Inference,
    Training,
    Experiments,
}

pub(crate) enum Timer {
    Minute,
    /// A job of the day's list comes.
    JobArrives(usize),
    Job(JobTimer),
    /// The pod has waited until the next look, if it still waits.
    RecheckWaiting(PodUid),
}

impl Team {
    pub const ALL: [Self; 3] = [Self::Inference, Self::Training, Self::Experiments];

    /// Also its namespace, and its tenant of the policy.
    pub fn name(self) -> &'static str {
        ["inference", "training", "experiments"][self as usize]
    }
}

impl From<JobTimer> for Timer {
    fn from(timer: JobTimer) -> Self {
        Self::Job(timer)
    }
}

fn share_of_contested(means: &Means<'_>, figure: &str) -> f64 {
    means.mean_of("stowage", figure) / means.mean_of("stowage", "contested").max(f64::MIN_POSITIVE)
}

fn policy() -> Policy {
    shipped_policy(
        "three-teams",
        include_str!("../../../../../policies/three-teams/policy.yaml"),
    )
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let stock =
        |preempting| KubeSchedulerBaseline::new(ScoringStrategy::MostAllocated, preempting, seed);
    let scheduler: Box<dyn FleetScheduler> = match variant {
        1 => Box::new(stock(PreemptionMode::Never).partitioned()),
        2 => Box::new(stock(PreemptionMode::LowerPriority)),
        _ => Box::new(Stowage::new(policy())),
    };
    let priorities = if variant == 3 {
        PriorityScheme::ByTeam
    } else {
        PriorityScheme::ByGuarantee
    };
    let stage = Stage::new(machines(), scheduler, seed);
    let pool = Pool::new(stage, policy(), priorities, seed);
    // The short part is the late afternoon, when inference is at its peak and the second campaign comes.
    let (begins, hours) = if input.is_short { (16, 4) } else { (6, 24) };
    let mut played = pool.play(begins, hours);
    if variant != 0 {
        played.notes.clear();
    }
    played
}

fn machines() -> Machines {
    let spec = |(n, (gpus, team)): (usize, &(u32, Team))| {
        let labels = [("gpu-pool", "shared"), ("team", team.name())];
        MachineSpec {
            name: NodeName::parse(&format!("node-{n}")).expect("a digit is a name"),
            labels: labels
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            gpu: GpuModel::parse("A100-80GB").expect("it is a plain word"),
            gpus: *gpus,
            vram: GPU_VRAM,
            page_cache: Bytes::gib(300),
        }
    };
    Machines::new(NODES.iter().enumerate().map(spec), LoadingSpeeds::default())
}
