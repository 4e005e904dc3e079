//! Replicas without a cluster: each that is wanted is up after a fixed time, and each that is not is gone when it has drained or
//! its grace period is over. For tests, and for runs in which GPUs are never short.

use super::scaler::{Scaler, ScalingDecision};
use super::serving_day::{Replica, ReplicaId, ReplicaState, Replicas, ServingDay};
use stowage_scheduling::contention::Contention;
use stowage_scheduling::units::{Millis, Moment};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimulatedReplicas {
    /// From being wanted to ready.
    pub start_time: Millis,
    /// For how long a replica that is removed may finish its requests.
    pub grace: Millis,
    up: Vec<Replica>,
    /// Until when each that terminates may stay.
    terminating: Vec<(ReplicaId, Moment)>,
    /// When each that starts will be ready.
    starting: Vec<(ReplicaId, Moment)>,
    next_id: ReplicaId,
}

impl SimulatedReplicas {
    /// A set of which `ready` replicas are ready at once.
    pub fn new(ready: u32, start: Millis, grace: Millis) -> Self {
        let up = (0..u64::from(ready)).map(ready_replica).collect();
        Self {
            start_time: start,
            grace,
            up,
            terminating: Vec::new(),
            starting: Vec::new(),
            next_id: ready.into(),
        }
    }

    pub fn ready(&self) -> u32 {
        self.up
            .iter()
            .filter(|replica| replica.state == ReplicaState::Ready)
            .count() as u32
    }

    pub fn starting(&self) -> u32 {
        self.starting.len() as u32
    }

    /// One step of a day and of its replicas: what is wanted is begun, what is in excess terminates.
    pub fn tick<S: Scaler>(&mut self, day: &mut ServingDay<S>, now: Moment) -> ScalingDecision {
        let (ready, remaining): (Vec<_>, Vec<_>) =
            self.starting.drain(..).partition(|(_, at)| *at <= now);
        self.starting = remaining;
        self.up
            .extend(ready.into_iter().map(|(id, _)| ready_replica(id)));
        self.remove_drained(day, now);
        let there = Replicas {
            up: &self.up,
            starting: self.starting(),
            ready_in: self.start_time,
        };
        let wanted = day.tick(now, &there);
        while self.ready() + self.starting() < wanted.replicas {
            self.starting.push((self.next_id, now + self.start_time));
            self.next_id += 1;
        }
        // A ReplicaSet removes pods that are not ready before others.
        while self.ready() + self.starting() > wanted.replicas && self.starting.pop().is_some() {}
        let excess = self.ready().saturating_sub(wanted.replicas) as usize;
        for id in day.by_fewest_requests().into_iter().take(excess) {
            let replica = self.up.iter_mut().find(|replica| replica.id == id);
            if let Some(replica) = replica {
                replica.state = ReplicaState::Terminating;
                self.terminating.push((id, now + self.grace));
            }
        }
        wanted
    }

    fn remove_drained<S: Scaler>(&mut self, day: &ServingDay<S>, now: Moment) {
        let is_idle = |id: ReplicaId| day.engine(id).is_none_or(|engine| engine.is_idle());
        let (gone, remaining): (Vec<_>, Vec<_>) = self
            .terminating
            .drain(..)
            .partition(|(id, until)| *until <= now || is_idle(*id));
        self.terminating = remaining;
        self.up
            .retain(|replica| !gone.iter().any(|(id, _)| *id == replica.id));
    }
}

fn ready_replica(id: ReplicaId) -> Replica {
    Replica {
        id,
        state: ReplicaState::Ready,
        contention: Contention::ALONE,
    }
}
