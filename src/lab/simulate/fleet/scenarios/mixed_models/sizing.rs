//! A workload and the scheduler that places it: pools of any size, and the smallest that suffices.

use super::catalog::{Grants, ServedModel, catalog, machines, most};
use super::jobs::JOBS;
use super::pool::{Compute, Pool};
use super::served::Served;
use super::sums::Sums;
use super::{MORE_REPLICAS, MOST_LATE};
use crate::simulate::fleet::scenarios::endless_jobs::EndlessJobs;
use crate::simulate::fleet::scenarios::shipped;
use crate::simulate::fleet::schedulers::{
    FleetScheduler, Placing, Preempting, StockScheduler, Stowage,
};
use crate::simulate::fleet::stage::Stage;
use stowage_scheduling::policy::AutoscalingRules;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Bytes;

/// What places the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placer {
    Stowage,
    /// Stowage whose agents report no KV caches and queues.
    KvBlind,
    /// kube-scheduler, for engines that have their GPUs to themselves.
    WholeGpus,
}

pub(crate) struct Sizing {
    placer: Placer,
    seed: u64,
    minutes: usize,
    models: Vec<ServedModel>,
    rollouts: Vec<usize>,
    /// GPUs whose VRAM all models' engines take with right-sized grants, less the headroom.
    pub least: usize,
}

impl Sizing {
    pub fn new(placer: Placer, seed: u64, models: usize, minutes: usize) -> Self {
        let shared = catalog(seed, models, minutes, Grants::RightSized);
        let granted: Bytes = shared
            .iter()
            .map(|model| model.grant.times((model.gpus * model.engines).into()))
            .sum();
        let least = granted.0.div_ceil(most().0) as usize;
        let models = match placer {
            Placer::WholeGpus => catalog(seed, models, minutes, Grants::WholeGpus),
            Placer::Stowage | Placer::KvBlind => shared,
        };
        let mut rollouts: Vec<usize> = (0..models.len()).collect();
        Random::seeded(seed, 7).shuffle(&mut rollouts);
        Self {
            placer,
            seed,
            minutes,
            models,
            rollouts,
            least,
        }
    }

    pub fn requests(&self) -> f64 {
        self.models
            .iter()
            .map(|model| model.traffic.requests())
            .sum()
    }

    /// A pool of so many GPUs, played to the end, with jobs in what the engines leave of it.
    pub fn played(&self, gpus: usize, compute: Compute) -> Pool<'_> {
        let mut pool = self.pool(gpus, compute, EndlessJobs::new(Some(JOBS), self.seed));
        pool.play(self.minutes, &self.rollouts, None);
        pool
    }

    /// The fewest GPUs on which all models have a place and enough requests are in time; the most that were tried, as an error, if
    /// they do not suffice.
    pub(crate) fn gpus_needed(&self) -> Result<usize, usize> {
        let most_late = MOST_LATE * self.requests();
        let suffices = |gpus| {
            let no_jobs = EndlessJobs::new(None, self.seed);
            self.pool(gpus, Compute::Shared, no_jobs).play(
                self.minutes,
                &self.rollouts,
                Some(most_late),
            )
        };
        let gpus = |model: &ServedModel| (model.gpus * model.engines) as usize;
        let least = match self.placer {
            Placer::WholeGpus => self.models.iter().map(gpus).sum(),
            Placer::Stowage | Placer::KvBlind => self.least,
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

    fn pool(&self, gpus: usize, compute: Compute, jobs: EndlessJobs) -> Pool<'_> {
        let policy = shipped(
            "mixed-models",
            include_str!("../../../../../../policies/mixed-models/policy.yaml"),
        );
        let rules = |model: &ServedModel| AutoscalingRules {
            min_replicas: model.engines,
            max_replicas: model.engines + MORE_REPLICAS,
            ..policy.autoscaling.of(&model.id)
        };
        let scheduler: Box<dyn FleetScheduler> = match self.placer {
            Placer::Stowage | Placer::KvBlind => Box::new(Stowage::new(policy.clone())),
            Placer::WholeGpus => Box::new(StockScheduler::new(
                Placing::MostAllocated,
                Preempting::Never,
                self.seed,
            )),
        };
        let stage = Stage::new(machines(gpus, &self.models), scheduler, self.seed);
        let served = self.models.iter().map(|model| {
            let is_alone = self.placer == Placer::WholeGpus;
            Served::new(model, rules(model), is_alone)
        });
        let sums = Sums::of(&self.models);
        Pool::new(
            stage,
            served.collect(),
            jobs,
            sums,
            self.placer == Placer::Stowage,
            compute,
        )
    }
}
