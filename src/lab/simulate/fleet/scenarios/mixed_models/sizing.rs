//! A workload and the scheduler that places it: pools of any size, and the smallest that suffices.

use super::catalog::{GrantSizing, ServedModel, allocatable_vram, catalog, machines};
use super::jobs::JOBS;
use super::pool::Pool;
use super::served::PooledModel;
use super::sums::PoolStatistics;
use super::{MAX_EXTRA_REPLICAS, MAX_LATE_SHARE};
use crate::simulate::fleet::scenarios::endless_jobs::EndlessJobs;
use crate::simulate::fleet::scenarios::shipped_policy;
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use crate::simulate::fleet::stage::Stage;
use crate::simulate::fleet::traffic::DayOfTraffic;
use stowage_scheduling::contention::ComputeSharing;
use stowage_scheduling::policy::{AutoscalingRules, Class, Policy, UnusedRule};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::classification::Isolation;

/// What a reader does not wait for, and four times what most of the models take alone.
const MAX_TIME_PER_TOKEN: Millis = Millis(40);

/// What places the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placer {
    Stowage,
    /// Stowage whose agents report no KV caches and queues.
    KvBlind,
    /// Stowage whose jobs borrow what engines do not use, on nodes that keep VRAM limits. The engines allocate their KV caches as
    /// they fill.
    Borrowing,
    /// Stowage whose engines have a limit on their time per token.
    Limited,
    /// Stowage on nodes where pods have a part of the SMs each, as large as their part of the VRAM.
    SmSharing,
    /// kube-scheduler, for engines that have their GPUs to themselves.
    WholeGpus,
}

impl Placer {
    /// How the pods on a GPU share its compute.
    pub fn sharing(self) -> ComputeSharing {
        match self {
            Self::Stowage | Self::KvBlind | Self::Borrowing | Self::Limited => {
                ComputeSharing::TimeSlicing
            }
            Self::SmSharing => ComputeSharing::SmSharing,
            Self::WholeGpus => ComputeSharing::Exclusive,
        }
    }
}

pub(crate) struct Sizing {
    placer: Placer,
    seed: u64,
    minutes: usize,
    models: Vec<ServedModel>,
    rollouts: Vec<usize>,
    /// GPUs whose VRAM all models' engines take with right-sized grants, less the headroom.
    pub min_gpus: usize,
}

impl Sizing {
    pub fn new(
        placer: Placer,
        seed: u64,
        models: usize,
        minutes: usize,
        days: &[DayOfTraffic],
    ) -> Self {
        let catalog = |grants| catalog(seed, models, minutes, days, grants);
        let shared = catalog(GrantSizing::RightSized);
        let granted: Bytes = shared
            .iter()
            .map(|model| model.grant.times((model.gpus * model.engines).into()))
            .sum();
        let least = granted.0.div_ceil(allocatable_vram().0) as usize;
        let models = match placer {
            Placer::WholeGpus => catalog(GrantSizing::WholeGpus),
            _ => shared,
        };
        let mut rollouts: Vec<usize> = (0..models.len()).collect();
        Random::seeded(seed, 7).shuffle(&mut rollouts);
        Self {
            placer,
            seed,
            minutes,
            models,
            rollouts,
            min_gpus: least,
        }
    }

    pub fn requests(&self) -> f64 {
        self.models
            .iter()
            .map(|model| model.traffic.requests())
            .sum()
    }

    /// A pool of so many GPUs, played to the end, with jobs in what the engines leave of it.
    pub fn play_pool(&self, gpus: usize, sharing: ComputeSharing) -> Pool<'_> {
        let mut pool = self.new_pool(gpus, sharing, EndlessJobs::new(Some(JOBS), self.seed));
        pool.play(self.minutes, &self.rollouts, None);
        pool
    }

    /// The fewest GPUs on which all models have a place and enough requests are in time; the most that were tried, as an error, if
    /// they do not suffice.
    pub(crate) fn gpus_needed(&self) -> Result<usize, usize> {
        let most_late = MAX_LATE_SHARE * self.requests();
        let suffices = |gpus| {
            let no_jobs = EndlessJobs::new(None, self.seed);
            self.new_pool(gpus, self.placer.sharing(), no_jobs).play(
                self.minutes,
                &self.rollouts,
                Some(most_late),
            )
        };
        let gpus = |model: &ServedModel| (model.gpus * model.engines) as usize;
        let least = match self.placer {
            Placer::WholeGpus => self.models.iter().map(gpus).sum(),
            _ => self.min_gpus,
        };
        let (mut too_few, mut enough) = (least - 1, least + least.div_ceil(8));
        // Pools that are too small show it when traffic begins, and cost little.
        while !suffices(enough) {
            if enough >= 4 * least {
                return Err(enough);
            }
            (too_few, enough) = (enough, enough + enough.div_ceil(8));
        }
        while enough - too_few > 1 {
            let middle = (too_few + enough) / 2;
            if suffices(middle) {
                enough = middle
            } else {
                too_few = middle
            }
        }
        Ok(enough)
    }

    fn new_pool(&self, gpus: usize, sharing: ComputeSharing, jobs: EndlessJobs) -> Pool<'_> {
        let policy = shipped_policy(
            "mixed-models",
            include_str!("../../../../../../policies/mixed-models/policy.yaml"),
        );
        let rules = |model: &ServedModel| AutoscalingRules {
            min_replicas: model.engines,
            max_replicas: model.engines + MAX_EXTRA_REPLICAS,
            ..policy.autoscaling.for_model(&model.id)
        };
        let scheduler: Box<dyn FleetScheduler> = match self.placer {
            Placer::Stowage | Placer::KvBlind | Placer::SmSharing => {
                Box::new(Stowage::new(policy.clone()))
            }
            Placer::Borrowing => Box::new(Stowage::new(lending(&policy))),
            Placer::Limited => Box::new(Stowage::new(limited(&policy))),
            Placer::WholeGpus => Box::new(KubeSchedulerBaseline::new(
                ScoringStrategy::MostAllocated,
                PreemptionMode::Never,
                self.seed,
            )),
        };
        let stage = Stage::new(machines(gpus, &self.models), scheduler, self.seed);
        let served = self.models.iter().map(|model| {
            let is_alone = self.placer == Placer::WholeGpus;
            PooledModel::new(model, rules(model), is_alone)
        });
        let sums = PoolStatistics::for_models(&self.models);
        Pool::new(
            stage,
            served.collect(),
            jobs,
            sums,
            (self.placer != Placer::KvBlind, self.placer),
            sharing,
        )
    }
}

/// The policy, where engines shall take no longer for a token.
fn limited(policy: &Policy) -> Policy {
    let classes = policy.classes().iter().map(|class| Class {
        max_time_per_token: class.engine.then_some(MAX_TIME_PER_TOKEN),
        ..class.clone()
    });
    policy
        .clone()
        .with_classes(classes.collect())
        .expect("the same classes")
}

/// The policy, where pods have VRAM limits and engines lend what they do not use.
fn lending(policy: &Policy) -> Policy {
    let classes = policy.classes().iter().map(|class| Class {
        isolation: Isolation::Preferred,
        unused: match class.name.as_str() {
            "serving" => UnusedRule::Lend,
            _ => class.unused,
        },
        ..class.clone()
    });
    let mut lending = policy
        .clone()
        .with_classes(classes.collect())
        .expect("the same classes");
    // Traffic changes by the minute here, and all of it lasts an hour.
    lending.planning.lending.unused_after = Millis::seconds(60);
    lending
}
