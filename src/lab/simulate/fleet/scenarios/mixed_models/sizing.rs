//! A workload and who places it: pools of any size, and the smallest that suffices.

use super::catalogue::{Grants, ServedModel, catalogue, machines, most};
use super::pool::Pool;
use super::{MOST_LATE, MOST_REPLICAS, env};
use crate::lab::simulate::fleet::scenarios::shipped;
use crate::lab::simulate::fleet::schedulers::{FleetScheduler, Placing, Preempting, StockScheduler, Stowage};
use crate::lab::simulate::fleet::stage::Stage;
use crate::lab::simulate::random::Random;
use crate::scheduling::policy::AutoscalingRules;
use crate::units::Bytes;

/// Who places the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placer {
    Stowage,
    /// Stowage whose agents report no KV caches and queues.
    KvBlind,
    /// kube-scheduler, for engines that have their GPUs to themselves.
    WholeGpus,
}

pub struct Sizing {
    placer: Placer,
    seed: u64,
    minutes: usize,
    models: Vec<ServedModel>,
    rollouts: Vec<usize>,
    /// GPUs whose VRAM one replica of each model takes with right-sized grants, less the headroom.
    pub least: usize,
}

impl Sizing {
    pub fn new(placer: Placer, seed: u64, models: usize, minutes: usize) -> Self {
        let shared = catalogue(seed, models, minutes, Grants::RightSized);
        let granted: Bytes = shared.iter().map(|model| model.grant.times(model.gpus.into())).sum();
        let least = granted.0.div_ceil(most().0) as usize;
        let models = match placer {
            Placer::WholeGpus => catalogue(seed, models, minutes, Grants::WholeGpus),
            Placer::Stowage | Placer::KvBlind => shared,
        };
        let mut rollouts: Vec<usize> = (0..models.len()).collect();
        Random::seeded(seed, 7).shuffle(&mut rollouts);
        Self { placer, seed, minutes, models, rollouts, least }
    }

    pub fn requests(&self) -> f64 {
        self.models.iter().map(|model| model.traffic.requests()).sum()
    }

    /// A pool of so many GPUs, played to the end.
    pub fn played(&self, gpus: usize) -> Pool<'_> {
        let mut pool = self.pool(gpus);
        pool.play(self.minutes, &self.rollouts, None);
        pool
    }

    /// The fewest GPUs on which all models have a place and enough requests are in time.
    pub fn gpus_needed(&self) -> usize {
        let most_late = MOST_LATE * self.requests();
        let suffices = |gpus| self.pool(gpus).play(self.minutes, &self.rollouts, Some(most_late));
        let gpus = |model: &ServedModel| model.gpus as usize;
        let whole: usize = self.models.iter().map(gpus).sum();
        let (mut too_few, mut enough) = match self.placer {
            Placer::WholeGpus => (whole - 1, 2 * whole),
            Placer::Stowage | Placer::KvBlind => (self.least - 1, 2 * self.least),
        };
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few).div_ceil(3).min(enough - too_few - 1);
            if suffices(middle) { enough = middle } else { too_few = middle }
        }
        enough
    }

    fn pool(&self, gpus: usize) -> Pool<'_> {
        let mut policy = shipped("default", include_str!("../../../../../../policies/default/policy.yaml"));
        if env("LATENCY", 0.0) > 0.0 {
            policy = shipped(
                "latency-first",
                include_str!("../../../../../../policies/latency-first/policy.yaml"),
            );
        }
        let rules = |model: &ServedModel| AutoscalingRules {
            max_replicas: MOST_REPLICAS,
            kv_cache: crate::units::Percent::new(env("KVT", 70.0) as u8).unwrap(),
            ..policy.autoscaling.of(&model.id)
        };
        let scheduler: Box<dyn FleetScheduler> = match self.placer {
            Placer::Stowage | Placer::KvBlind => Box::new(Stowage::new(policy.clone())),
            Placer::WholeGpus => {
                Box::new(StockScheduler::new(Placing::MostAllocated, Preempting::Never, self.seed))
            }
        };
        let stage = Stage::new(machines(gpus, &self.models), scheduler, self.seed);
        let (reports_load, exclusive) = (self.placer == Placer::Stowage, self.placer == Placer::WholeGpus);
        Pool::new(stage, &self.models, rules, reports_load, exclusive)
    }
}
