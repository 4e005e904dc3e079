//! One model of the pool: its pods by the autoscaler's word, and the engines in them.

use super::catalogue::ServedModel;
use super::sums::GpuUse;
use super::{DRAIN, SLO, Timer};
use crate::ids::{GpuUuid, PodUid};
use crate::lab::simulate::fleet::engines::Engine;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::replicas::{
    Replica, ReplicaId, ReplicaState, Replicas, ServingDay, ShippedScaler,
};
use crate::lab::simulate::fleet::stage::Stage;
use crate::scheduling::policy::AutoscalingRules;
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::units::{Millis, Moment, Percent};
use std::collections::BTreeMap;

/// How long one more replica takes, by what replicas have taken.
const READY_IN: Millis = Millis::seconds(40);

pub struct Served<'m> {
    model: &'m ServedModel,
    exclusive: bool,
    pub day: ServingDay<ShippedScaler>,
    pods: BTreeMap<PodUid, ReplicaPod>,
    came: ReplicaId,
}

struct ReplicaPod {
    id: ReplicaId,
    /// When it is gone at the latest, if it is let go.
    let_go: Option<Moment>,
    /// It takes this one's place when it is ready.
    replaces: Option<PodUid>,
}

impl<'m> Served<'m> {
    pub fn new(model: &'m ServedModel, rules: AutoscalingRules, exclusive: bool) -> Self {
        let day =
            ServingDay::new(model.engine, model.traffic.clone(), SLO, ShippedScaler::new(rules), Moment(0));
        Self { model, exclusive, day, pods: BTreeMap::new(), came: 0 }
    }

    /// Submits one more pod.
    pub fn create(&mut self, stage: &mut Stage<'_, Timer>, replaces: Option<PodUid>) {
        let ServedModel { id, weights, gpus, grant, .. } = self.model;
        let vram = grant.times(u64::from(*gpus));
        let pod = PodSpec {
            gpus: *gpus,
            exclusive: self.exclusive,
            ..PodSpec::serving("models", id.clone(), *weights, vram)
        };
        self.pods.insert(stage.submit(pod), ReplicaPod { id: self.came, let_go: None, replaces });
        self.came += 1;
    }

    /// A new version of the model is there: a new pod for each of its pods.
    pub fn roll_out(&mut self, stage: &mut Stage<'_, Timer>) {
        let stays = |(_, pod): &(&PodUid, &ReplicaPod)| pod.let_go.is_none() && pod.replaces.is_none();
        let old: Vec<PodUid> = self.pods.iter().filter(stays).map(|(uid, _)| uid.clone()).collect();
        old.into_iter().for_each(|uid| self.create(stage, Some(uid)));
    }

    /// The pod is ready, if it is this model's: the one that it replaces finishes its requests.
    pub fn replace(&mut self, uid: &PodUid, now: Moment) {
        let Some(replaces) = self.pods.get_mut(uid).and_then(|pod| pod.replaces.take()) else { return };
        let Some(old) = self.pods.get_mut(&replaces) else { return };
        old.let_go.get_or_insert(now + DRAIN);
    }

    /// Traffic goes on to `at`, and then the autoscaler has as many pods as it wants.
    pub fn step(&mut self, stage: &mut Stage<'_, Timer>, at: Moment, used: &BTreeMap<GpuUuid, GpuUse>) {
        let up: Vec<Replica> =
            self.pods.iter().filter_map(|(uid, pod)| self.replica(stage, uid, pod, used)).collect();
        let ready = up.iter().filter(|replica| replica.state == ReplicaState::Ready).count() as u32;
        let starting = self.starting(stage);
        let replicas = Replicas { up: &up, starting: starting.len() as u32, ready_in: READY_IN };
        let there = ready + replicas.starting;
        let wanted = self.day.tick(at, &replicas).replicas;
        (there..wanted).for_each(|_| self.create(stage, None));
        self.let_go(stage, starting, there.saturating_sub(wanted) as usize);
        self.remove_drained(stage);
    }

    /// What its engines' metrics pages say is in the agents' next reports.
    pub fn report(&self, stage: &mut Stage<'_, Timer>) {
        for (uid, engine) in self.engines() {
            let kv_cache = Percent::from_share(engine.kv_occupancy());
            stage.set_load(uid, EngineLoad::of(kv_cache, Some(engine.waiting().round() as u32)));
        }
    }

    pub fn engines(&self) -> impl Iterator<Item = (&PodUid, &Engine)> {
        self.pods.iter().filter_map(|(uid, pod)| Some((uid, self.day.engine(pod.id)?)))
    }

    pub fn has_place(&self, stage: &Stage<'_, Timer>) -> bool {
        self.pods.keys().any(|uid| !devices(stage, uid).is_empty())
    }

    /// Requests that broke a bound, or are too long for their engine.
    pub fn late(&self) -> f64 {
        let tally = &self.day.tally;
        tally.latencies.ttft_violations + tally.latencies.tpot_violations + tally.refused
    }

    /// A replica whose engine answers, with its share of compute: engines with something to do take turns.
    fn replica(
        &self,
        stage: &Stage<'_, Timer>,
        uid: &PodUid,
        pod: &ReplicaPod,
        used: &BTreeMap<GpuUuid, GpuUse>,
    ) -> Option<Replica> {
        stage.pod(uid)?.ready?;
        let own = self.day.engine(pod.id).map_or(0.0, |engine| GpuUse::of(engine).busy);
        let others = |device| (used.get(device).map_or(0.0, |used| used.busy) - own).max(0.0);
        let most = devices(stage, uid).iter().map(others).fold(0.0, f64::max);
        let state = if pod.let_go.is_some() { ReplicaState::Terminating } else { ReplicaState::Ready };
        Some(Replica { id: pod.id, state, share: 1.0 / (1.0 + most) })
    }

    /// Those that are pending or load and take no other's place, the youngest first.
    fn starting(&self, stage: &Stage<'_, Timer>) -> Vec<PodUid> {
        let starts = |uid: &PodUid| stage.pod(uid).is_some_and(|pod| pod.ready.is_none());
        let new = self.pods.iter().filter(|(uid, pod)| pod.replaces.is_none() && starts(uid));
        let mut all: Vec<(ReplicaId, PodUid)> = new.map(|(uid, pod)| (pod.id, uid.clone())).collect();
        all.sort_by(|a, b| b.cmp(a));
        all.into_iter().map(|(_, uid)| uid).collect()
    }

    /// As a ReplicaSet does: those that do not answer yet go first, then those with the fewest requests.
    fn let_go(&mut self, stage: &mut Stage<'_, Timer>, starting: Vec<PodUid>, count: usize) {
        let mut left = count;
        for uid in starting.into_iter().take(count) {
            self.pods.remove(&uid);
            stage.finish(&uid);
            left -= 1;
        }
        for id in self.day.idlest().into_iter().take(left) {
            let pod = self.pods.values_mut().find(|pod| pod.id == id && pod.let_go.is_none());
            pod.into_iter().for_each(|pod| pod.let_go = Some(stage.now() + DRAIN));
        }
    }

    fn remove_drained(&mut self, stage: &mut Stage<'_, Timer>) {
        let is_over = |pod: &ReplicaPod| {
            let is_idle = self.day.engine(pod.id).is_none_or(Engine::is_idle);
            pod.let_go.is_some_and(|by| is_idle || by <= stage.now())
        };
        let over: Vec<PodUid> =
            self.pods.iter().filter(|(_, pod)| is_over(pod)).map(|(uid, _)| uid.clone()).collect();
        for uid in over {
            self.pods.remove(&uid);
            stage.finish(&uid);
        }
    }
}

/// The pod's GPUs; none while it is pending.
pub fn devices<'s>(stage: &'s Stage<'_, Timer>, uid: &PodUid) -> &'s [GpuUuid] {
    stage.pod(uid).and_then(|pod| pod.bound.as_ref()).map_or(&[], |bound| &bound.devices)
}
