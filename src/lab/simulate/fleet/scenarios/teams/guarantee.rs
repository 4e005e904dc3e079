//! How long pods within their team's guarantee wait until they are bound, or until pods are evicted for them, while GPUs of one
//! node are free or borrowed by pods that may be evicted; and for how long no scheduler could have helped.

use super::Timer;
use crate::simulate::fleet::machines::Machine;
use crate::simulate::fleet::scenarios::quantile;
use crate::simulate::fleet::stage::Stage;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{GpuUuid, PodUid};
use stowage_scheduling::policy::{Policy, Preemptibility};
use stowage_scheduling::units::{Millis, Moment};

/// The longest that the stage lets pass between two rounds of a scheduler.
const MAX_ROUND_INTERVAL: Millis = Millis::seconds(5);
/// How often it is checked what keeps a pod waiting.
pub const CHECK_INTERVAL: Millis = Millis::seconds(1);

/// What is between a pod and GPUs of one node, the least of all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// GPUs are free, or their pods leave for it.
    None,
    /// Pods that borrow, and may be evicted for it.
    Borrowers,
    /// Pods that borrow, and have not run for their class's `minRuntime`.
    TooYoung,
    /// Pods that borrow, and are of a class that is never evicted, or not of lower priority.
    NeverEvicted,
    /// What is free or borrowed is not on one node.
    Scattered,
}

#[derive(Debug, Default)]
pub(crate) struct Guarantees {
    waiting: BTreeMap<PodUid, Moment>,
    /// GPUs whose pods were evicted: when they were asked to leave, and when they are gone.
    vacated: BTreeMap<GpuUuid, (Moment, Moment)>,
    /// For how long each that waits had no GPUs to be had.
    excused_time: BTreeMap<PodUid, Millis>,
    wait_seconds: Vec<f64>,
    /// Time in which pods waited, by what was between.
    obstacles: BTreeMap<Obstacle, Millis>,
}

impl Guarantees {
    pub fn start_waiting(&mut self, uid: &PodUid, now: Moment) {
        self.waiting.insert(uid.clone(), now);
    }

    /// A pod is asked to leave these GPUs.
    pub(crate) fn record_vacating(
        &mut self,
        devices: &[GpuUuid],
        requested_at: Moment,
        gone: Moment,
    ) {
        self.vacated.extend(
            devices
                .iter()
                .map(|device| (device.clone(), (requested_at, gone))),
        );
    }

    /// The pod is bound: it waited until the GPUs' pods were asked to leave, or until now if they were free.
    pub fn record_bound(&mut self, uid: &PodUid, devices: &[GpuUuid], now: Moment) {
        let Some(created) = self.waiting.remove(uid) else {
            return;
        };
        let vacated = devices.iter().filter_map(|device| self.vacated.get(device));
        let requested_at = vacated
            .filter(|(_, gone)| *gone > created)
            .map(|(requested_at, _)| *requested_at)
            .max();
        self.record_wait(uid, requested_at.unwrap_or(now).since(created).0);
    }

    /// The pod is not wanted any more, or the day ends.
    pub fn stop_waiting(&mut self, uid: &PodUid, now: Moment) {
        if let Some(created) = self.waiting.remove(uid) {
            self.record_wait(uid, now.since(created).0);
        }
    }

    fn record_wait(&mut self, uid: &PodUid, millis: u64) {
        let excused = self.excused_time.remove(uid).unwrap_or_default();
        self.wait_seconds
            .push(millis.saturating_sub(excused.0) as f64 / 1000.0);
    }

    pub fn is_waiting(&self, uid: &PodUid) -> bool {
        self.waiting.contains_key(uid)
    }

    /// The pod has waited for so long, with this between it and its GPUs.
    pub fn record_obstacle(&mut self, uid: &PodUid, time: Millis, obstacle: Obstacle) {
        let of = self.obstacles.entry(obstacle).or_default();
        *of = *of + time;
        if !matches!(obstacle, Obstacle::None | Obstacle::Borrowers) {
            let excused = self.excused_time.entry(uid.clone()).or_default();
            *excused = *excused + time;
        }
    }

    pub fn finish(&mut self, now: Moment) {
        let waiting: Vec<PodUid> = self.waiting.keys().cloned().collect();
        waiting.iter().for_each(|uid| self.stop_waiting(uid, now));
    }

    /// Those that were met within a cycle, in hundredths; the 99th percentile and the longest, in seconds.
    pub fn figures(&mut self) -> [f64; 3] {
        let met = self
            .wait_seconds
            .iter()
            .filter(|seconds| **seconds * 1000.0 <= MAX_ROUND_INTERVAL.0 as f64)
            .count() as f64;
        let share = 100.0 * met / self.wait_seconds.len().max(1) as f64;
        [
            share,
            quantile(&mut self.wait_seconds, 0.99),
            quantile(&mut self.wait_seconds, 1.0),
        ]
    }

    pub fn summary(&self) -> String {
        let minutes_of = |obstacle| {
            self.obstacles
                .get(&obstacle)
                .map_or(0, |time| time.0 / 60_000)
        };
        format!(
            "{} pods within a guarantee waited, in minutes: {} for borrowers younger than minRuntime, {} for borrowers that are \
             never evicted, {} because what was free or borrowed was not on one node, {} although there was room, {} although \
             borrowers could have been evicted",
            self.wait_seconds.len(),
            minutes_of(Obstacle::TooYoung),
            minutes_of(Obstacle::NeverEvicted),
            minutes_of(Obstacle::Scattered),
            minutes_of(Obstacle::None),
            minutes_of(Obstacle::Borrowers),
        )
    }
}

/// What keeps the pod from GPUs now. `borrowing` are the pods beyond their teams' guarantees.
pub fn obstacle(
    uid: &PodUid,
    stage: &Stage<'_, Timer>,
    policy: &Policy,
    borrowing: &BTreeSet<PodUid>,
) -> Obstacle {
    let Some(pod) = stage.pod(uid) else {
        return Obstacle::None;
    };
    let obstacle_of = |other: &PodUid| {
        let Some(resident) = stage.pod(other) else {
            return Obstacle::None;
        };
        let class = resident
            .spec
            .demand(policy)
            .ok()
            .map(|demand| policy.class(demand.class));
        let is_never_evicted = class.is_none_or(|class| class.eviction == Preemptibility::Never);
        let min_runtime = class.map(|class| class.min_runtime).unwrap_or_default();
        let ran = resident
            .binding
            .as_ref()
            .map(|bound| stage.now().since(bound.since))
            .unwrap_or_default();
        match () {
            () if resident.terminating_since.is_some()
                && resident.evicted_for.as_ref() == Some(uid) =>
            {
                Obstacle::None
            }
            () if resident.terminating_since.is_some() => Obstacle::Scattered,
            () if !borrowing.contains(other) => Obstacle::Scattered,
            () if is_never_evicted || resident.spec.priority >= pod.spec.priority => {
                Obstacle::NeverEvicted
            }
            () if ran < min_runtime => Obstacle::TooYoung,
            () => Obstacle::Borrowers,
        }
    };
    let on_node = stage.machines.iter().map(|machine| {
        let mut gpus: Vec<Obstacle> = machine
            .gpus
            .iter()
            .map(|gpu| {
                gpu.pods
                    .keys()
                    .map(obstacle_of)
                    .max()
                    .unwrap_or(Obstacle::None)
            })
            .collect();
        let free = machine
            .gpus
            .iter()
            .zip(&mut gpus)
            .filter(|(gpu, _)| gpu.pods.is_empty());
        free.take(reserved_free_gpus(machine, uid, stage))
            .for_each(|(_, obstacle)| *obstacle = Obstacle::Scattered);
        gpus.sort_unstable();
        gpus.get(pod.spec.gpus as usize - 1)
            .copied()
            .unwrap_or(Obstacle::Scattered)
    });
    on_node.min().unwrap_or(Obstacle::Scattered)
}

/// Free GPUs that pods with several keep while others leave for them here.
fn reserved_free_gpus(machine: &Machine, uid: &PodUid, stage: &Stage<'_, Timer>) -> usize {
    let mut cleared: BTreeMap<&PodUid, usize> = BTreeMap::new();
    for gpu in &machine.gpus {
        let leaves_for = |pod: &PodUid| stage.pod(pod)?.evicted_for.as_ref();
        let waiting = gpu
            .pods
            .keys()
            .find_map(leaves_for)
            .filter(|pod| *pod != uid);
        waiting
            .into_iter()
            .for_each(|pod| *cleared.entry(pod).or_default() += 1);
    }
    let left = |(pod, cleared): (&PodUid, usize)| {
        let waiting = stage.pod(pod).filter(|pod| pod.binding.is_none())?;
        Some((waiting.spec.gpus as usize).saturating_sub(cleared))
    };
    cleared.into_iter().filter_map(left).sum()
}
