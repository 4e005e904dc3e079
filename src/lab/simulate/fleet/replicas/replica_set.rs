//! The pods of one model as a ReplicaSet and a rollout keep them: those that are missing are created, those that are too many are
//! let go, and a pod of a new version takes an old one's place when it is ready.

use super::{Replica, ReplicaId, ReplicaState, Replicas, Scaler, ServingDay};
use crate::simulate::fleet::engines::Engine;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::stage::Stage;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use stowage_scheduling::contention::Contention;
use stowage_scheduling::ids::{GpuUuid, PodUid};
use stowage_scheduling::units::{Millis, Moment};

pub struct ReplicaSet {
    template: PodSpec,
    pods: BTreeMap<PodUid, ReplicaPod>,
    /// Pods of an old version that are to be replaced, one after the other.
    outdated: Vec<PodUid>,
    next_id: ReplicaId,
    timing: ReplicaTiming,
}

#[derive(Debug, Clone, Copy)]
pub struct ReplicaTiming {
    /// How long one more replica takes, by what replicas have taken.
    pub ready_in: Millis,
    /// For how long a replica that is let go finishes its requests.
    pub drain_time: Millis,
}

struct ReplicaPod {
    id: ReplicaId,
    /// When it is gone at the latest, if it is let go.
    terminates_by: Option<Moment>,
    /// It takes this one's place when it is ready.
    replaces: Option<PodUid>,
}

impl ReplicaSet {
    pub fn new(template: PodSpec, timing: ReplicaTiming) -> Self {
        Self {
            template,
            pods: BTreeMap::new(),
            outdated: Vec::new(),
            next_id: 0,
            timing,
        }
    }

    /// Submits so many more pods.
    pub fn create<T>(&mut self, stage: &mut Stage<'_, T>, count: u32) {
        (0..count).for_each(|_| self.submit(stage, None));
    }

    fn submit<T>(&mut self, stage: &mut Stage<'_, T>, replaces: Option<PodUid>) {
        let uid = stage.submit(self.template.clone());
        self.pods.insert(
            uid,
            ReplicaPod {
                id: self.next_id,
                terminates_by: None,
                replaces,
            },
        );
        self.next_id += 1;
    }

    /// A new version is there: its pods are replaced, one after the other.
    pub(crate) fn start_rollout(&mut self) {
        self.outdated = self
            .pods
            .iter()
            .filter(|(_, pod)| pod.terminates_by.is_none())
            .map(|(uid, _)| uid.clone())
            .collect();
    }

    fn continue_rollout<T>(&mut self, stage: &mut Stage<'_, T>) {
        if self.pods.values().any(|pod| pod.replaces.is_some()) {
            return;
        }
        while let Some(old) = self.outdated.pop() {
            if self
                .pods
                .get(&old)
                .is_some_and(|pod| pod.terminates_by.is_none())
            {
                return self.submit(stage, Some(old));
            }
        }
    }

    /// The pod is ready, if it is one of these: the one that it replaces finishes its requests.
    pub fn handle_ready(&mut self, uid: &PodUid, now: Moment) {
        let Some(replaces) = self.pods.get_mut(uid).and_then(|pod| pod.replaces.take()) else {
            return;
        };
        let Some(old) = self.pods.get_mut(&replaces) else {
            return;
        };
        old.terminates_by
            .get_or_insert(now + self.timing.drain_time);
    }

    pub fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, ReplicaId)> {
        self.pods.iter().map(|(uid, pod)| (uid, pod.id))
    }

    /// Traffic goes on to `at`, and then there are as many pods as the autoscaler wants. `contention` is what a replica's
    /// neighbors cost it.
    pub fn reconcile<T>(
        &mut self,
        stage: &mut Stage<'_, T>,
        day: &mut ServingDay<impl Scaler>,
        at: Moment,
        contention: impl Fn(&PodUid) -> Contention,
    ) {
        let replica = |(uid, pod): (&PodUid, &ReplicaPod)| {
            stage.pod(uid)?.ready_at?;
            let state = if pod.terminates_by.is_some() {
                ReplicaState::Terminating
            } else {
                ReplicaState::Ready
            };
            Some(Replica {
                id: pod.id,
                state,
                contention: contention(uid),
            })
        };
        let up: Vec<Replica> = self.pods.iter().filter_map(replica).collect();
        let serving = up
            .iter()
            .filter(|replica| replica.state == ReplicaState::Ready)
            .count() as u32;
        let starting = self.starting(stage);
        let there = serving + starting.len() as u32;
        let replicas = Replicas {
            up: &up,
            starting: starting.len() as u32,
            ready_in: self.timing.ready_in,
        };
        let wanted = day.tick(at, &replicas).replicas;
        self.create(stage, wanted.saturating_sub(there));
        self.scale_down(stage, day, starting, there.saturating_sub(wanted) as usize);
        self.remove_drained(stage, day);
        self.continue_rollout(stage);
    }

    /// Those that are pending or load and take no other's place, the youngest first.
    fn starting<T>(&self, stage: &Stage<'_, T>) -> Vec<PodUid> {
        let starts = |uid: &PodUid| stage.pod(uid).is_some_and(|pod| pod.ready_at.is_none());
        let new = self
            .pods
            .iter()
            .filter(|(uid, pod)| pod.replaces.is_none() && starts(uid));
        let mut all: Vec<(Reverse<ReplicaId>, PodUid)> = new
            .map(|(uid, pod)| (Reverse(pod.id), uid.clone()))
            .collect();
        all.sort();
        all.into_iter().map(|(_, uid)| uid).collect()
    }

    /// Removes replicas: those that do not answer yet first, then those with the fewest requests.
    fn scale_down<T>(
        &mut self,
        stage: &mut Stage<'_, T>,
        day: &ServingDay<impl Scaler>,
        starting: Vec<PodUid>,
        count: usize,
    ) {
        let mut remaining = count;
        for uid in starting.into_iter().take(count) {
            self.pods.remove(&uid);
            stage.finish(&uid);
            remaining -= 1;
        }
        for id in day.by_fewest_requests().into_iter().take(remaining) {
            let pod = self
                .pods
                .values_mut()
                .find(|pod| pod.id == id && pod.terminates_by.is_none());
            pod.into_iter()
                .for_each(|pod| pod.terminates_by = Some(stage.now() + self.timing.drain_time));
        }
    }

    fn remove_drained<T>(&mut self, stage: &mut Stage<'_, T>, day: &ServingDay<impl Scaler>) {
        let is_over = |pod: &ReplicaPod| {
            let is_idle = day.engine(pod.id).is_none_or(Engine::is_idle);
            pod.terminates_by
                .is_some_and(|by| is_idle || by <= stage.now())
        };
        let over: Vec<PodUid> = self
            .pods
            .iter()
            .filter(|(_, pod)| is_over(pod))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in over {
            self.pods.remove(&uid);
            stage.finish(&uid);
        }
    }
}

/// The pod's GPUs; none while it is pending.
pub fn devices<'s, T>(stage: &'s Stage<'_, T>, uid: &PodUid) -> &'s [GpuUuid] {
    stage
        .pod(uid)
        .and_then(|pod| pod.binding.as_ref())
        .map_or(&[], |bound| &bound.devices)
}
