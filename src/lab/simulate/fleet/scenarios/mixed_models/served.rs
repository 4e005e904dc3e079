//! One model of the pool: its pods by the autoscaler's word, and the engines in them.

use super::catalog::ServedModel;
use super::{REPLICA_TIMING, SLO, Timer};
use crate::simulate::fleet::engines::Engine;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::replicas::{ReplicaSet, ServingDay, ShippedScaler, devices};
use crate::simulate::fleet::stage::Stage;
use std::collections::{BTreeMap, VecDeque};
use stowage_scheduling::contention::Contention;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::AutoscalingRules;
use stowage_scheduling::units::{Bytes, Micros, Moment, Percent};
use stowage_scheduling::vocabulary::latency::EngineLatency;
use stowage_scheduling::vocabulary::node_reading::EngineLoad;

pub struct PooledModel<'m> {
    model: &'m ServedModel,
    pub day: ServingDay<ShippedScaler>,
    pub replicas: ReplicaSet,
    /// What its engines took for a token in each of the last steps, and whether they had requests.
    latest: BTreeMap<PodUid, VecDeque<(Option<f64>, bool)>>,
}

/// Steps over which agents take their means.
const LATENCY_STEPS: usize = 30;

impl<'m> PooledModel<'m> {
    pub fn new(model: &'m ServedModel, rules: AutoscalingRules, exclusive: bool) -> Self {
        let day = ServingDay::new(
            model.engine,
            model.traffic.clone(),
            SLO,
            ShippedScaler::new(rules),
            Moment(0),
        );
        let ServedModel {
            id,
            weights,
            gpus,
            grant,
            ..
        } = model;
        let vram = grant.times(u64::from(*gpus));
        let pod = PodSpec::serving("models", id.clone(), *weights, vram);
        let replicas = ReplicaSet::new(
            PodSpec {
                gpus: *gpus,
                is_exclusive: exclusive,
                ..pod
            },
            REPLICA_TIMING,
        );
        Self {
            model,
            day,
            replicas,
            latest: BTreeMap::new(),
        }
    }

    /// Submits as many pods as its busy stretches need.
    pub fn create(&mut self, stage: &mut Stage<'_, Timer>) {
        self.replicas.create(stage, self.model.engines);
    }

    /// Traffic goes on to `at`, and then the autoscaler has as many pods as it wants.
    pub fn follow_traffic(
        &mut self,
        stage: &mut Stage<'_, Timer>,
        at: Moment,
        contention: &BTreeMap<PodUid, Contention>,
    ) {
        let contention = |uid: &PodUid| contention.get(uid).copied().unwrap_or(Contention::ALONE);
        self.replicas
            .reconcile(stage, &mut self.day, at, contention);
    }

    /// What its engines' metrics pages say is in the agents' next reports.
    pub fn report_load(&self, stage: &mut Stage<'_, Timer>) {
        for (uid, engine) in self.engines() {
            let kv_cache = Percent::from_share(engine.kv_occupancy());
            stage.set_load(
                uid,
                EngineLoad::new(kv_cache, Some(engine.waiting().round() as u32)),
            );
        }
    }

    /// How long its engines take is in the agents' next reports, as means over half a minute.
    pub fn report_latencies(&mut self, stage: &mut Stage<'_, Timer>) {
        let steps: Vec<_> = self
            .engines()
            .map(|(uid, engine)| (uid.clone(), (engine.tpot_s(), engine.running() > 0.5)))
            .collect();
        self.latest
            .retain(|uid, _| steps.iter().any(|(other, _)| other == uid));
        for (uid, step) in steps {
            let latest = self.latest.entry(uid.clone()).or_default();
            latest.push_back(step);
            if latest.len() > LATENCY_STEPS {
                latest.pop_front();
            }
            let measured: Vec<f64> = latest.iter().filter_map(|(tpot_s, _)| *tpot_s).collect();
            let mean = measured.iter().sum::<f64>() / measured.len() as f64;
            let busy = latest.iter().filter(|(_, has_requests)| *has_requests);
            stage.set_latency(EngineLatency {
                pod: uid,
                time_per_token: Micros::from_seconds(mean).map(Micros::rounded),
                time_to_first_token: None,
                busy: Percent::from_share(busy.count() as f64 / latest.len() as f64),
            });
        }
    }

    /// What its engines have of their GPUs, if they allocate their KV caches as they fill. Answers the pods that the driver ended.
    pub fn report_held(&self, stage: &mut Stage<'_, Timer>) -> Vec<PodUid> {
        let ServedModel {
            weights,
            gpus,
            grant,
            engine,
            ..
        } = self.model;
        let fixed = weights.split(*gpus) + engine.profile_run_bytes;
        let held = |engine: &Engine| {
            let kv_cache = grant.minus(fixed).0 as f64 * engine.kv_occupancy();
            (fixed + Bytes(kv_cache as u64)).min(*grant)
        };
        let engines: Vec<_> = self
            .engines()
            .map(|(uid, engine)| (uid, held(engine)))
            .collect();
        let ended = engines
            .into_iter()
            .map(|(uid, held)| stage.set_held(uid, held));
        ended.flatten().collect()
    }

    pub fn engines(&self) -> impl Iterator<Item = (&PodUid, &Engine)> {
        self.replicas
            .pods()
            .filter_map(|(uid, id)| Some((uid, self.day.engine(id)?)))
    }

    pub fn has_replica(&self, uid: &PodUid) -> bool {
        self.replicas.pods().any(|(one, _)| one == uid)
    }

    pub fn is_placed(&self, stage: &Stage<'_, Timer>) -> bool {
        self.replicas
            .pods()
            .any(|(uid, _)| !devices(stage, uid).is_empty())
    }

    /// Requests that broke a bound, or are too long for their engine.
    pub fn late(&self) -> f64 {
        let tally = &self.day.tally;
        tally.latencies.ttft_violations + tally.latencies.tpot_violations + tally.refused
    }
}
