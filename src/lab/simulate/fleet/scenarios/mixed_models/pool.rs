//! The pool that serves a catalogue: each model's replicas by the autoscaler's word, one rollout after the other, engines that share
//! their GPUs' compute, and the sums.

use super::catalogue::ServedModel;
use super::sums::{GpuUse, Sums, busy};
use super::{DRAIN, SLO, STEP, Timer, WARM_UP};
use crate::ids::{GpuUuid, PodUid};
use crate::lab::simulate::fleet::engines::Engine;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::replicas::{
    Replica, ReplicaId, ReplicaState, Replicas, ServingDay, ShippedScaler,
};
use crate::lab::simulate::fleet::stage::{Happening, START, Stage, StagePod};
use crate::scheduling::policy::AutoscalingRules;
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::units::{Millis, Moment, Percent};
use std::collections::BTreeMap;

/// How long one more replica takes, by what replicas have taken.
const READY_IN: Millis = Millis::seconds(40);
/// Traffic begins when the first replicas have had time to start.
const BEGINS: Moment = Moment(START.0 + WARM_UP.0);

pub struct Pool<'m> {
    pub stage: Stage<'static, Timer>,
    pub served: Vec<Served<'m>>,
    /// Whether agents report KV caches and queues.
    reports_load: bool,
    exclusive: bool,
    came: ReplicaId,
    pub sums: Sums,
}

/// A model and its pods.
pub struct Served<'m> {
    model: &'m ServedModel,
    pub day: ServingDay<ShippedScaler>,
    pods: BTreeMap<PodUid, ReplicaPod>,
}

struct ReplicaPod {
    id: ReplicaId,
    /// When it is gone at the latest, if it is let go.
    let_go: Option<Moment>,
    /// It takes this one's place when it is ready.
    replaces: Option<PodUid>,
}

impl<'m> Pool<'m> {
    pub fn new(
        stage: Stage<'static, Timer>,
        models: &'m [ServedModel],
        rules: impl Fn(&ServedModel) -> AutoscalingRules,
        reports_load: bool,
        exclusive: bool,
    ) -> Self {
        let served = |model: &'m ServedModel| {
            let scaler = ShippedScaler::new(rules(model));
            let day = ServingDay::new(model.engine, model.traffic.clone(), SLO, scaler, Moment(0));
            Served { model, day, pods: BTreeMap::new() }
        };
        let served = models.iter().map(served).collect();
        Self { stage, served, reports_load, exclusive, came: 0, sums: Sums::of(models) }
    }

    /// Plays so many minutes of traffic, or until more than `most_late` requests are late or a model has no place when traffic
    /// begins. `order` is that of rollouts, which are spread over the time.
    pub fn play(&mut self, minutes: usize, order: &[usize], most_late: Option<f64>) -> bool {
        (0..self.served.len()).for_each(|model| self.create(model, None));
        self.stage.at(BEGINS, Timer::Step);
        let length = Millis::seconds(60 * minutes as u64);
        for (n, model) in order.iter().enumerate() {
            let at = length.0 * (n as u64 + 1) / (order.len() as u64 + 1);
            self.stage.at(BEGINS + Millis(at), Timer::Rollout(*model));
        }
        while let Some(happened) = self.stage.next(BEGINS + length) {
            let now = self.stage.now();
            match happened {
                Happening::Timer(Timer::Step) => {
                    self.step(now);
                    let fails = |most| self.late() > most || self.sums.placed < self.served.len();
                    if most_late.is_some_and(fails) {
                        return false;
                    }
                }
                Happening::Timer(Timer::Rollout(model)) => self.roll_out(model),
                Happening::Bound(uid) if now >= BEGINS => self.note_bound(&uid),
                Happening::Ready(uid) => self.replace(&uid, now),
                Happening::Bound(_) | Happening::Leaving(_) | Happening::Gone(_) => {}
            }
        }
        most_late.is_none_or(|most| self.late() + self.waiting() <= most)
    }

    /// Requests that broke a bound, or are too long for their engine.
    pub fn late(&self) -> f64 {
        let late = |served: &Served<'_>| {
            let tally = &served.day.tally;
            tally.latencies.ttft_violations + tally.latencies.tpot_violations + tally.refused
        };
        self.served.iter().map(late).sum()
    }

    /// Requests that have no first token yet.
    pub fn waiting(&self) -> f64 {
        self.served.iter().map(|served| served.day.waiting()).sum()
    }

    fn create(&mut self, model: usize, replaces: Option<PodUid>) {
        let served = &mut self.served[model];
        let ServedModel { id, weights, gpus, grant, .. } = served.model;
        let vram = grant.times(u64::from(*gpus));
        let pod = PodSpec {
            gpus: *gpus,
            exclusive: self.exclusive,
            ..PodSpec::serving("models", id.clone(), *weights, vram)
        };
        let uid = self.stage.submit(pod);
        served.pods.insert(uid, ReplicaPod { id: self.came, let_go: None, replaces });
        self.came += 1;
    }

    /// A new version of the model: a pod for each of its pods.
    fn roll_out(&mut self, model: usize) {
        let stays = |(_, pod): &(&PodUid, &ReplicaPod)| pod.let_go.is_none() && pod.replaces.is_none();
        let old: Vec<PodUid> =
            self.served[model].pods.iter().filter(stays).map(|(uid, _)| uid.clone()).collect();
        old.into_iter().for_each(|uid| self.create(model, Some(uid)));
    }

    fn replace(&mut self, uid: &PodUid, now: Moment) {
        let Some(served) = self.served.iter_mut().find(|served| served.pods.contains_key(uid)) else {
            return;
        };
        let replaces = served.pods.get_mut(uid).and_then(|pod| pod.replaces.take());
        let Some(replaces) = replaces else { return };
        let Some(old) = served.pods.get_mut(&replaces) else { return };
        old.let_go.get_or_insert(now + DRAIN);
    }

    fn step(&mut self, now: Moment) {
        let used = self.use_by_gpu();
        self.sums.count(now.since(BEGINS), &self.stage, &used);
        for model in 0..self.served.len() {
            self.step_model(model, now, &used);
        }
        if now == BEGINS {
            let has_place = |served: &&Served<'_>| served.pods.keys().any(|uid| self.bound(uid).is_some());
            self.sums.placed = self.served.iter().filter(has_place).count();
        }
        self.stage.at(now + STEP, Timer::Step);
    }

    fn step_model(&mut self, model: usize, now: Moment, used: &BTreeMap<GpuUuid, GpuUse>) {
        let served = &self.served[model];
        let up: Vec<Replica> =
            served.pods.iter().filter_map(|(uid, pod)| self.replica(served, uid, pod, used)).collect();
        let ready = up.iter().filter(|replica| replica.state == ReplicaState::Ready).count() as u32;
        let starting = self.starting(served);
        let replicas = Replicas { up: &up, starting: starting.len() as u32, ready_in: READY_IN };
        let there = ready + replicas.starting;
        let served = &mut self.served[model];
        let wanted = served.day.tick(Moment(now.since(BEGINS).0), &replicas).replicas;
        (there..wanted).for_each(|_| self.create(model, None));
        self.let_go(model, starting, there.saturating_sub(wanted) as usize, now);
        self.remove_drained(model, now);
        if self.reports_load {
            for (uid, pod) in &self.served[model].pods {
                let engine = self.served[model].day.engine(pod.id);
                let load = |engine: &Engine| {
                    let kv_cache = Percent::from_share(engine.kv_occupancy());
                    EngineLoad::of(kv_cache, Some(engine.waiting().round() as u32))
                };
                engine.into_iter().for_each(|engine| self.stage.set_load(uid, load(engine)));
            }
        }
    }

    fn bound(&self, uid: &PodUid) -> Option<&StagePod> {
        self.stage.pod(uid).filter(|pod| pod.bound.is_some())
    }

    fn devices(&self, uid: &PodUid) -> &[GpuUuid] {
        self.bound(uid).and_then(|pod| pod.bound.as_ref()).map_or(&[], |bound| &bound.devices)
    }

    /// What the engines on each GPU do.
    fn use_by_gpu(&self) -> BTreeMap<GpuUuid, GpuUse> {
        let mut sums: BTreeMap<GpuUuid, GpuUse> = BTreeMap::new();
        for served in &self.served {
            for (uid, pod) in &served.pods {
                let Some(engine) = served.day.engine(pod.id) else { continue };
                for device in self.devices(uid) {
                    let sum = sums.entry(device.clone()).or_default();
                    sum.busy += busy(engine.running());
                    sum.running += engine.running();
                }
            }
        }
        sums
    }

    /// A replica whose engine answers, with its share of compute: engines with something to do take turns.
    fn replica(
        &self,
        served: &Served<'_>,
        uid: &PodUid,
        pod: &ReplicaPod,
        used: &BTreeMap<GpuUuid, GpuUse>,
    ) -> Option<Replica> {
        self.stage.pod(uid)?.ready?;
        let own = served.day.engine(pod.id).map_or(0.0, |engine| busy(engine.running()));
        let others = |device| (used.get(device).map_or(0.0, |used| used.busy) - own).max(0.0);
        let most = self.devices(uid).iter().map(others).fold(0.0, f64::max);
        let state = if pod.let_go.is_some() { ReplicaState::Terminating } else { ReplicaState::Ready };
        Some(Replica { id: pod.id, state, share: 1.0 / (1.0 + most) })
    }

    /// Those that are pending or load and take no other's place, the youngest first.
    fn starting(&self, served: &Served<'_>) -> Vec<PodUid> {
        let starts = |uid: &PodUid| self.stage.pod(uid).is_some_and(|pod| pod.ready.is_none());
        let new = served.pods.iter().filter(|(uid, pod)| pod.replaces.is_none() && starts(uid));
        let mut all: Vec<(ReplicaId, PodUid)> = new.map(|(uid, pod)| (pod.id, uid.clone())).collect();
        all.sort_by(|a, b| b.cmp(a));
        all.into_iter().map(|(_, uid)| uid).collect()
    }

    /// As a ReplicaSet does: those that do not answer yet go first, then those with the fewest requests.
    fn let_go(&mut self, model: usize, starting: Vec<PodUid>, count: usize, now: Moment) {
        let served = &mut self.served[model];
        let mut left = count;
        for uid in starting.into_iter().take(count) {
            served.pods.remove(&uid);
            self.stage.finish(&uid);
            left -= 1;
        }
        for id in served.day.idlest().into_iter().take(left) {
            let pod = served.pods.values_mut().find(|pod| pod.id == id && pod.let_go.is_none());
            pod.into_iter().for_each(|pod| pod.let_go = Some(now + DRAIN));
        }
    }

    fn remove_drained(&mut self, model: usize, now: Moment) {
        let served = &mut self.served[model];
        let is_over = |pod: &ReplicaPod| {
            let is_idle = served.day.engine(pod.id).is_none_or(Engine::is_idle);
            pod.let_go.is_some_and(|by| is_idle || by <= now)
        };
        let over: Vec<PodUid> =
            served.pods.iter().filter(|(_, pod)| is_over(pod)).map(|(uid, _)| uid.clone()).collect();
        for uid in over {
            served.pods.remove(&uid);
            self.stage.finish(&uid);
        }
    }

    /// How full the fullest engine is on the GPUs that a pod was just bound to.
    fn note_bound(&mut self, uid: &PodUid) {
        let devices = self.devices(uid);
        let mut fullest = 0.0f64;
        for served in &self.served {
            for (other, pod) in served.pods.iter().filter(|(other, _)| *other != uid) {
                let Some(engine) = served.day.engine(pod.id) else { continue };
                if self.devices(other).iter().any(|device| devices.contains(device)) {
                    fullest = fullest.max(engine.kv_occupancy());
                }
            }
        }
        self.sums.note_placement(fullest);
    }
}
