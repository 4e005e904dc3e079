//! One model's engines under a day of traffic, with an autoscaler beside them. Pods are the owner's: it says which replicas
//! there are, and is told how many are wanted.

use super::scaler::{ObservedReplica, ObservedReplicas, SYNC_PERIOD, Scaler, ScalingDecision};
use crate::simulate::fleet::engines::{
    Engine, EngineSpec, EngineState, Requests, Slo, SloTally, split_arrivals,
};
use crate::simulate::fleet::traffic::DayOfTraffic;
use std::collections::BTreeMap;
use stowage_scheduling::contention::Contention;
use stowage_scheduling::units::{Millis, Moment};

/// A replica's name among those of its model; the owner gives it, and gives none twice.
pub(crate) type ReplicaId = u64;

/// What a replica does, as its owner says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaState {
    /// Its engine serves.
    Ready,
    /// It is being removed: it finishes what it has, and takes no more.
    Terminating,
    Asleep,
}

/// One replica whose engine is up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Replica {
    pub id: ReplicaId,
    pub state: ReplicaState,
    /// What its neighbors cost it.
    pub contention: Contention,
}

/// All replicas of the model at a moment.
#[derive(Debug, Clone, Copy)]
pub struct Replicas<'a> {
    pub up: &'a [Replica],
    /// Those that are pending or start.
    pub starting: u32,
    /// How long one more would take.
    pub ready_in: Millis,
}

/// Totals of a day so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ServingTally {
    pub arrived: f64,
    pub completed: f64,
    /// Of these, those that took more than twice as long for a token as beside no neighbor.
    pub slowed: f64,
    /// Requests that are longer than an engine's KV cache.
    pub refused: f64,
    /// Had begun on a replica that went away before they were done, and began again on another.
    pub restarted: f64,
    pub latencies: SloTally,
    /// The most requests that waited at once, in engines and for a replica.
    pub longest_queue: f64,
    /// Replicas that were ready, over time.
    pub replica_seconds: f64,
    /// Over time and replicas.
    pub kv_occupancy_seconds: f64,
    pub prompt_tokens: f64,
    pub output_tokens: f64,
}

/// A model, its traffic, its engines and its autoscaler.
pub struct ServingDay<S> {
    spec: EngineSpec,
    traffic: DayOfTraffic,
    slo: Slo,
    pub scaler: S,
    engines: BTreeMap<ReplicaId, Engine>,
    /// Requests that no replica has taken.
    unrouted: Requests,
    now: Moment,
    evaluated_at: Option<Moment>,
    last_decision: Option<ScalingDecision>,
    /// Seconds of a busy GPU since the last evaluation, and seconds.
    busy_seconds: BTreeMap<ReplicaId, (f64, f64)>,
    pub tally: ServingTally,
}

impl<S: Scaler> ServingDay<S> {
    /// It begins at `start`; requests come from then on.
    pub fn new(
        spec: EngineSpec,
        traffic: DayOfTraffic,
        slo: Slo,
        scaler: S,
        start: Moment,
    ) -> Self {
        Self {
            spec,
            traffic,
            slo,
            scaler,
            engines: BTreeMap::new(),
            unrouted: Requests::default(),
            now: start,
            evaluated_at: None,
            last_decision: None,
            busy_seconds: BTreeMap::new(),
            tally: ServingTally::default(),
        }
    }

    /// Time goes on to `now`, with the replicas as they were since the last call, and then they are `replicas`. The answer is the
    /// autoscaler's latest, a new one every [`SYNC_PERIOD`]. Steps of some seconds are meant; a step over several evaluations makes one.
    pub fn tick(&mut self, now: Moment, replicas: &Replicas<'_>) -> ScalingDecision {
        self.advance(now, replicas);
        self.sync_engines(replicas.up);
        match (self.last_decision, self.evaluated_at) {
            (Some(wanted), Some(at)) if now.since(at) < SYNC_PERIOD => wanted,
            _ => {
                let wanted = self.scaler.decide(&self.observed(replicas), now);
                self.busy_seconds.clear();
                (self.evaluated_at, self.last_decision) = (Some(now), Some(wanted));
                wanted
            }
        }
    }

    pub fn engine(&self, id: ReplicaId) -> Option<&Engine> {
        self.engines.get(&id)
    }

    /// Requests that wait, in engines and for a replica.
    pub fn waiting(&self) -> f64 {
        self.unrouted.count + self.engines.values().map(Engine::waiting).sum::<f64>()
    }

    pub fn running(&self) -> f64 {
        self.engines.values().map(Engine::running).sum()
    }

    /// The replicas that an owner would best remove, the one with the fewest requests first.
    pub(crate) fn by_fewest_requests(&self) -> Vec<ReplicaId> {
        let inside = |engine: &Engine| engine.waiting() + engine.running();
        let serving = self
            .engines
            .iter()
            .filter(|(_, engine)| engine.state() == EngineState::Serving);
        let mut order: Vec<(f64, ReplicaId)> =
            serving.map(|(id, engine)| (inside(engine), *id)).collect();
        order.sort_by(|(a, x), (b, y)| a.total_cmp(b).then(y.cmp(x)));
        order.into_iter().map(|(_, id)| id).collect()
    }

    fn advance(&mut self, now: Moment, replicas: &Replicas<'_>) {
        let seconds = now.since(self.now).0 as f64 / 1000.0;
        if seconds <= 0.0 {
            return;
        }
        let new = self.traffic.requests_between(self.now, now);
        self.tally.arrived += new.count;
        let mut arrivals = std::mem::take(&mut self.unrouted);
        arrivals.waited_s += seconds;
        let shares = split_arrivals(&arrivals.plus(new), self.engines.values());
        if shares.is_empty() {
            self.unrouted = arrivals.plus(new);
        }
        let contention: BTreeMap<ReplicaId, Contention> = replicas
            .up
            .iter()
            .map(|up| (up.id, up.contention))
            .collect();
        for (index, (id, engine)) in self.engines.iter_mut().enumerate() {
            let under = contention.get(id).unwrap_or(&Contention::ALONE);
            let part = shares.get(index).copied().unwrap_or(0.0);
            // What has waited for a replica comes with its age.
            let backlog = engine.step(0.0, arrivals.scaled(part), under);
            let outcome = engine.step(seconds, new.scaled(part), under);
            outcome.add_to(&mut self.tally.latencies, &self.slo);
            self.tally.refused += backlog.refused + outcome.refused;
            self.tally.completed += outcome.completions();
            self.tally.slowed += outcome.slowed;
            self.tally.prompt_tokens += outcome.prompt_tokens;
            self.tally.output_tokens += outcome.output_tokens;
            if engine.state() == EngineState::Serving {
                self.tally.replica_seconds += seconds;
                self.tally.kv_occupancy_seconds += seconds * engine.kv_occupancy();
                let (busy, of) = self.busy_seconds.entry(*id).or_default();
                (*busy, *of) = (*busy + outcome.busy_share * seconds, *of + seconds);
            }
        }
        self.now = now;
        self.tally.longest_queue = self.tally.longest_queue.max(self.waiting());
    }

    /// The engines are those of the replicas that are up.
    fn sync_engines(&mut self, up: &[Replica]) {
        let gone: Vec<ReplicaId> = self
            .engines
            .keys()
            .filter(|id| !up.iter().any(|replica| replica.id == **id))
            .copied()
            .collect();
        for id in gone {
            if let Some(mut engine) = self.engines.remove(&id) {
                let left = engine.abandon();
                self.tally.restarted += left.running.count;
                self.unrouted = self.unrouted.plus(left.waiting).plus(left.running);
            }
        }
        for replica in up {
            let engine = self
                .engines
                .entry(replica.id)
                .or_insert_with(|| Engine::new(self.spec));
            match replica.state {
                ReplicaState::Ready => engine.wake(),
                ReplicaState::Terminating => engine.drain(),
                // It sleeps as soon as it has nothing to do.
                ReplicaState::Asleep => {
                    engine.drain();
                    let _ = engine.sleep();
                }
            }
        }
    }

    fn observed(&self, replicas: &Replicas<'_>) -> ObservedReplicas {
        let replica = |(id, engine): (&ReplicaId, &Engine)| {
            let busy = self
                .busy_seconds
                .get(id)
                .map_or(0.0, |(busy, of)| busy / of);
            ObservedReplica {
                figures: engine.reported_figures(),
                busy_share: busy,
            }
        };
        let counts = |(_, engine): &(&ReplicaId, &Engine)| engine.state() != EngineState::Draining;
        ObservedReplicas {
            replicas: self.engines.iter().filter(counts).map(replica).collect(),
            starting: replicas.starting,
            ready_in: replicas.ready_in,
        }
    }
}
