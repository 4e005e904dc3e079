//! What was measured on a node, compared with what is allocated there.
//!
//! `free = total − driver's reserve − headroom − Σ max(reserved, attributed) − unexplained`: the ledger's sum counts the
//! allocations, and what is found here is what processes have beyond them. It changes no allocation.
//!
//! It may be that of a [`DepartedPod`]: the driver frees GPU memory after the API server has deleted the pod.

use super::{NodeState, ResidentPod};
use crate::ids::{GpuUuid, PodUid};
use crate::ledger::pod_state::PodState;
use crate::policy::{Policy, TelemetryRules};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::node_reading::{Freshness, GpuReading, NodeReading, UnreadPod};
use crate::vocabulary::smoothed_load::SmoothedLoad;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What readings in a row could not explain of a GPU's use. Believed is the least of the last three: an engine that starts
/// or a process that ends between two samples is over by then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UnaccountedVram {
    last: [Bytes; 3],
}

impl UnaccountedVram {
    fn add(&mut self, unexplained: Bytes) {
        self.last.rotate_right(1);
        self.last[0] = unexplained;
    }

    pub(super) fn believed(&self) -> Bytes {
        self.last.into_iter().min().unwrap_or_default()
    }
}

impl NodeState {
    /// How far the reading may be believed at `now`.
    pub(super) fn freshness_at(&self, now: Moment, rules: &TelemetryRules) -> Freshness {
        match self
            .reading
            .as_ref()
            .map(|reading| now.since(reading.sampled))
        {
            None => Freshness::Unreported,
            Some(age) if age < rules.fresh => Freshness::Fresh,
            Some(age) if age < rules.stale => Freshness::Stale,
            Some(_) => Freshness::Expired,
        }
    }

    /// When its freshness changes next, if it does.
    pub(in crate::ledger) fn ages_at(&self, rules: &TelemetryRules) -> Option<Moment> {
        let sampled = self.reading.as_ref()?.sampled;
        match self.freshness {
            Freshness::Fresh => Some(sampled + rules.fresh),
            Freshness::Stale => Some(sampled + rules.stale),
            Freshness::Unreported | Freshness::Expired => None,
        }
    }

    /// Forgets the reading. Returns when its freshness would have changed next.
    pub(in crate::ledger) fn forget_reading(&mut self, rules: &TelemetryRules) -> Option<Moment> {
        let due = self.ages_at(rules);
        self.reading = None;
        self.freshness = Freshness::Unreported;
        self.unaccounted.clear();
        self.engine_loads.clear();
        due
    }

    /// Adds what was measured, as far as it may be believed: VRAM used beyond the allocations, and the load of engines.
    pub(super) fn apply_measurements(&self, rules: &TelemetryRules, gpus: &mut [Gpu]) {
        for (index, (gpu, device)) in gpus.iter_mut().zip(self.devices.iter()).enumerate() {
            let margin = rules.margin.share_of(device.total);
            let observation = self
                .reading
                .as_ref()
                .and_then(|reading| gpu_reading(reading, index, &device.uuid));
            match (self.freshness, observation) {
                (Freshness::Unreported, _) => {}
                (Freshness::Fresh, Some(observation)) => {
                    gpu.unaccounted_vram =
                        self.unaccounted_vram(index, observation, gpu.capacity, margin);
                    gpu.engine_load = self
                        .smoothed_load(&device.uuid, index)
                        .map_or(observation.engine_load, SmoothedLoad::counted);
                }
                (Freshness::Stale, Some(observation)) => {
                    gpu.unaccounted_vram = self
                        .unaccounted_vram(index, observation, gpu.capacity, margin)
                        .max(margin);
                }
                (Freshness::Expired, _) | (_, None) => gpu.unaccounted_vram = margin,
            }
        }
    }

    /// VRAM of a GPU that is used although it is not allocated: by pods beyond their grant, by pods that have no grant here, and
    /// by processes of which no pod is known. A pod that has ended and still runs counts with its grant.
    fn unaccounted_vram(
        &self,
        gpu_index: usize,
        observation: &GpuReading,
        capacity: Bytes,
        margin: Bytes,
    ) -> Bytes {
        let used_beyond_grant = |(uid, attributed): &(PodUid, Bytes)| {
            let kept = self.kept_by_departed(uid, gpu_index).max(*attributed);
            kept.minus(self.allocated_to(uid, gpu_index, capacity))
        };
        let used_beyond_grant: Bytes = observation.attributed.iter().map(used_beyond_grant).sum();
        let lower_bound = if observation.used.is_none() {
            margin
        } else {
            Bytes::ZERO
        };
        (used_beyond_grant + self.unaccounted_on(gpu_index).believed()).max(lower_bound)
    }

    /// What a pod's processes have beyond its grant on each of these GPUs, at least.
    pub(in crate::ledger) fn used_beyond_grant(
        &self,
        uid: &PodUid,
        per_gpu: Bytes,
        gpus: GpuSet,
    ) -> Bytes {
        let Some(reading) = self.believed_reading() else {
            return Bytes::ZERO;
        };
        let on = |gpu_index: usize| {
            let observation = gpu_reading(reading, gpu_index, &self.devices[gpu_index].uuid)?;
            Some(observation.attributed_to(uid)?.minus(per_gpu))
        };
        gpus.iter()
            .map(|gpu_index| on(gpu_index).unwrap_or_default())
            .min()
            .unwrap_or_default()
    }

    /// VRAM of a GPU that a believed reading attributes to pods without an allocation on the node. Most often these have
    /// ended.
    pub(in crate::ledger) fn used_without_grant(&self, gpu_index: usize) -> Bytes {
        let reading = self.believed_reading();
        let observation = reading
            .and_then(|reading| gpu_reading(reading, gpu_index, &self.devices[gpu_index].uuid));
        let attributed = observation
            .into_iter()
            .flat_map(|observation| &observation.attributed);
        let ended = attributed.filter(|(uid, _)| self.resident_of(uid).is_none());
        ended
            .map(|(uid, used)| self.kept_by_departed(uid, gpu_index).max(*used))
            .sum()
    }

    /// What is allocated to a pod on a GPU; nothing, if it is not charged there.
    fn allocated_to(&self, uid: &PodUid, gpu_index: usize, capacity: Bytes) -> Bytes {
        self.resident_of(uid).map_or(Bytes::ZERO, |resident| {
            resident.allocated_on(gpu_index, capacity)
        })
    }

    /// How busy the engines on a GPU are, over its readings.
    pub(in crate::ledger) fn smoothed_load(
        &self,
        uuid: &GpuUuid,
        gpu_index: usize,
    ) -> Option<&SmoothedLoad> {
        find_near(&self.engine_loads, gpu_index, |(gpu, _)| gpu == uuid).map(|(_, load)| load)
    }

    pub(super) fn unaccounted_on(&self, gpu_index: usize) -> UnaccountedVram {
        let uuid = &self.devices[gpu_index].uuid;
        let found = find_near(&self.unaccounted, gpu_index, |(gpu, _)| gpu == uuid);
        found
            .map(|(_, unaccounted)| *unaccounted)
            .unwrap_or_default()
    }

    /// Takes a reading: which part of each GPU's use it leaves unexplained. Returns pods whose GPUs no record names, with the GPUs
    /// on which the reading shows them.
    pub(in crate::ledger) fn take_reading(
        &mut self,
        mut reading: Arc<NodeReading>,
        policy: &Policy,
    ) -> Vec<(PodUid, Arc<[GpuUuid]>)> {
        self.mark_unread_loads(&mut reading, policy);
        let mut unaccounted = Vec::with_capacity(self.devices.len());
        let mut engine_loads = Vec::with_capacity(self.devices.len());
        for (gpu_index, device) in self.devices.iter().enumerate() {
            let Some(observation) = gpu_reading(&reading, gpu_index, &device.uuid) else {
                continue;
            };
            let mut unaccounted_on_gpu = self.unaccounted_on(gpu_index);
            // A figure that is missing once takes nothing back.
            if let Some(used) = observation.used {
                unaccounted_on_gpu.add(self.unexplained_use(
                    gpu_index,
                    observation,
                    used,
                    reading.sampled,
                    policy,
                ));
            }
            unaccounted.push((device.uuid.clone(), unaccounted_on_gpu));
            let load = self.smoothed_load(&device.uuid, gpu_index).copied();
            let load = load.map(|mut load| {
                let smoothing = policy.telemetry.smoothing;
                load.add(
                    observation.engine_load,
                    reading.sampled,
                    smoothing,
                    policy.terms(),
                );
                load
            });
            let load = load.unwrap_or(SmoothedLoad::first(
                observation.engine_load,
                reading.sampled,
            ));
            engine_loads.push((device.uuid.clone(), load));
        }
        self.unaccounted = unaccounted;
        self.engine_loads = engine_loads;
        let located = self.locate_pods(&reading);
        self.forget_gone_pods(&reading);
        self.update_lenders(&reading, &policy.planning.lending);
        self.reading = Some(reading);
        located
    }

    /// Makes the load of each GPU unknown on which a pod is that may run an engine and of which none can be read. A pod of a class
    /// that runs no engines, and that serves nothing on any port, has no KV cache.
    fn mark_unread_loads(&self, reading: &mut Arc<NodeReading>, policy: &Policy) {
        let may_be_engine = |unread: &UnreadPod| {
            unread.declares_port
                || self
                    .resident_of(&unread.pod)
                    .is_none_or(|resident| policy.class(resident.class).engine)
        };
        if reading.unread.is_empty() {
            return;
        }
        let reading = Arc::make_mut(reading);
        reading.unread.retain(may_be_engine);
        for uuid in reading.unread.iter().flat_map(|unread| unread.gpus.iter()) {
            for gpu in reading.gpus.iter_mut().filter(|gpu| gpu.uuid == *uuid) {
                gpu.engine_load = gpu.engine_load.with_unread_engine();
            }
        }
    }

    /// Replaces the names in a reading by the shared strings that this node has already.
    pub(in crate::ledger) fn intern_names(&self, reading: &mut NodeReading) {
        for (gpu_index, gpu) in reading.gpus.iter_mut().enumerate() {
            if let Some(device) =
                find_near(&self.devices, gpu_index, |device| device.uuid == gpu.uuid)
            {
                gpu.uuid = device.uuid.clone();
            }
            for (uid, _) in &mut gpu.attributed {
                if let Some(resident) = self.resident_of(uid) {
                    *uid = resident.uid.clone();
                }
            }
        }
        for (uid, _) in &mut reading.in_flight {
            if let Some(resident) = self.resident_of(uid) {
                *uid = resident.uid.clone();
            }
        }
        let known_engines = self.reading.iter().flat_map(|previous| &previous.engines);
        for (engine, earlier_engine) in reading.engines.iter_mut().zip(known_engines) {
            engine.share_names_with(earlier_engine);
        }
        let unread = reading.unread.iter_mut().map(|unread| &mut unread.pod);
        for uid in reading.sleep.iter_mut().map(|(uid, _)| uid).chain(unread) {
            if let Some(resident) = self.resident_of(uid) {
                *uid = resident.uid.clone();
            }
        }
        if let Some(previous) = self
            .reading
            .as_ref()
            .filter(|previous| previous.holdings == reading.holdings)
        {
            reading.holdings = previous.holdings.clone();
        }
    }

    /// `max(0, used − Σ attributed − Σ max(0, reserved − attributed))`, the last sum over pods bound before the sample: a
    /// pod that does not use its whole grant yet explains nothing beyond what it has.
    fn unexplained_use(
        &self,
        gpu_index: usize,
        observation: &GpuReading,
        used: Bytes,
        sampled: Moment,
        policy: &Policy,
    ) -> Bytes {
        let attributed: Bytes = observation.attributed.iter().map(|(_, bytes)| *bytes).sum();
        let capacity = self.devices[gpu_index].capacity(&policy.headroom);
        let bound_before =
            |resident: &&ResidentPod| resident.bound_since.is_some_and(|since| since <= sampled);
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(gpu_index));
        let growth = here.filter(bound_before).map(|resident| {
            let reserved = resident.allocated_on(gpu_index, capacity);
            reserved.minus(observation.attributed_to(&resident.uid).unwrap_or_default())
        });
        used.minus(attributed).minus(growth.sum())
    }

    /// Pods of which no record names GPUs by UUID, and the GPUs on which the reading shows all of them.
    fn locate_pods(&self, reading: &NodeReading) -> Vec<(PodUid, Arc<[GpuUuid]>)> {
        let mut found = Vec::new();
        for resident in self.residents() {
            let Some(gpu_count) = resident.gpus_to_locate else {
                continue;
            };
            let gpus = reading
                .gpus
                .iter()
                .filter(|gpu| gpu.attributed_to(&resident.uid).is_some());
            let gpus: Vec<GpuUuid> = gpus.map(|gpu| gpu.uuid.clone()).collect();
            if gpus.len() >= gpu_count as usize && self.resolve(&gpus).is_some() {
                found.push((resident.uid.clone(), gpus.into()));
            }
        }
        found
    }
}

impl ResidentPod {
    pub(super) fn allocated_on(&self, gpu_index: usize, capacity: Bytes) -> Bytes {
        match self.sharing {
            _ if !self.gpus.contains(gpu_index) => Bytes::ZERO,
            Sharing::Shared => self.per_gpu,
            Sharing::Exclusive => capacity,
        }
    }
}

/// A reading's entry for a GPU, which most often has the same index in both lists.
pub(super) fn gpu_reading<'a>(
    reading: &'a NodeReading,
    gpu_index: usize,
    uuid: &GpuUuid,
) -> Option<&'a GpuReading> {
    find_near(&reading.gpus, gpu_index, |gpu| gpu.uuid == *uuid)
}

/// The element for which `is_it` holds: that at `likely_index` is tried first, then all.
pub(super) fn find_near<T>(
    all: &[T],
    likely_index: usize,
    is_it: impl Fn(&T) -> bool,
) -> Option<&T> {
    all.get(likely_index)
        .filter(|one| is_it(one))
        .or_else(|| all.iter().find(|one| is_it(one)))
}

/// A pod that has ended here.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct DepartedPod {
    uid: PodUid,
    at: Moment,
    /// The GPUs on which it borrowed from engines; none, if it did not.
    borrowed: Arc<[GpuUuid]>,
    /// The others that it had, and what was granted to it on each.
    #[serde(default)]
    had: Arc<[GpuUuid]>,
    #[serde(default)]
    granted: Bytes,
}

/// The most pods of a node that are remembered as ended, until a later reading shows nothing of them.
const MAX_DEPARTED: usize = 256;

/// How long to wait for a node's first report. Agents report every second: a node without a report by then has no agent.
const FIRST_REPORT_TIMEOUT: Millis = Millis::seconds(10);

impl NodeState {
    /// A pod has ended here. Where no agent has ever reported, none will say that its memory is free: then its end has to do.
    pub(in crate::ledger) fn record_departed(
        &mut self,
        uid: &PodUid,
        pod_state: &PodState,
        at: Moment,
    ) {
        if self.freshness != Freshness::Unreported {
            let devices = pod_state.devices().cloned().unwrap_or_default();
            let (borrowed, had) = if pod_state.borrows() {
                (devices, Arc::default())
            } else {
                (Arc::default(), devices)
            };
            let granted = match pod_state.demand.sharing {
                Sharing::Shared => pod_state.demand.per_gpu,
                Sharing::Exclusive => Bytes(u64::MAX),
            };
            self.add_departed(DepartedPod {
                uid: uid.clone(),
                at,
                borrowed,
                had,
                granted,
            });
        }
    }

    /// Records a pod that ended here before this ledger began, unless its end is recorded. If there is an agent, it will report soon.
    pub(in crate::ledger) fn record_missed_departure(&mut self, uid: &PodUid, at: Moment) {
        if !self.departed.iter().any(|departed| departed.uid == *uid) {
            let (uid, granted) = (uid.clone(), Bytes::ZERO);
            self.add_departed(DepartedPod {
                uid,
                at,
                borrowed: Arc::default(),
                had: Arc::default(),
                granted,
            });
        }
    }

    fn add_departed(&mut self, departed: DepartedPod) {
        // One that was missed may show once more and end again.
        self.departed.retain(|earlier| earlier.uid != departed.uid);
        self.departed.truncate(MAX_DEPARTED - 1);
        self.departed.insert(0, departed);
    }

    /// What a pod that has ended keeps of a GPU as long as processes of it are seen there, however little they use: a pod that was
    /// deleted by force runs on for its grace, and may use its grant again.
    pub(super) fn kept_by_departed(&self, uid: &PodUid, gpu_index: usize) -> Bytes {
        let device = &self.devices[gpu_index];
        let is_it =
            |departed: &&DepartedPod| departed.uid == *uid && departed.had.contains(&device.uuid);
        self.departed
            .iter()
            .find(is_it)
            .map_or(Bytes::ZERO, |departed| departed.granted.min(device.total))
    }

    /// Whether a pod that borrowed on this GPU and has ended may still have memory there.
    pub(super) fn may_be_occupied_by_borrowers(&self, gpu: &GpuUuid) -> bool {
        self.departed
            .iter()
            .any(|departed| departed.borrowed.contains(gpu))
    }

    /// Pods that have ended here since then, and whose memory a fresh reading still shows: on which GPUs, and how much they keep of
    /// each of them at least. Those that borrowed are left out: what they used was granted to others.
    pub(in crate::ledger) fn departed_with_memory(
        &self,
        since: Moment,
    ) -> impl Iterator<Item = (&PodUid, GpuSet, Bytes)> {
        let reading = self
            .reading
            .as_deref()
            .filter(|_| self.freshness == Freshness::Fresh);
        let ended = self
            .departed
            .iter()
            .filter(move |departed| departed.at >= since && departed.borrowed.is_empty());
        ended.filter_map(move |departed| {
            let used_on = |gpu_index: usize| {
                let observation = gpu_reading(reading?, gpu_index, &self.devices[gpu_index].uuid)?;
                Some(
                    observation
                        .attributed_to(&departed.uid)?
                        .max(self.kept_by_departed(&departed.uid, gpu_index)),
                )
            };
            let used = (0..self.devices.len())
                .filter_map(|gpu_index| Some((gpu_index, used_on(gpu_index)?)));
            let gpus: GpuSet = used.clone().map(|(gpu_index, _)| gpu_index).collect();
            let least = used
                .map(|(_, used)| used)
                .min()
                .filter(|least| *least > Bytes::ZERO)?;
            self.resident_of(&departed.uid)
                .is_none()
                .then_some((&departed.uid, gpus, least))
        })
    }

    /// Forgets departed pods of which this reading shows no memory any more.
    fn forget_gone_pods(&mut self, reading: &NodeReading) {
        self.departed.retain(|departed| {
            reading.sampled < departed.at || reading.has_processes_of(&departed.uid)
        });
    }

    /// Whether a pod that has ended here may still have memory: nothing that was sampled since says otherwise, or it is seen
    /// there still.
    pub(in crate::ledger) fn may_have_memory(&self, uid: &PodUid, now: Moment) -> bool {
        let is_in_reading = || {
            self.believed_reading()
                .is_some_and(|reading| reading.has_processes_of(uid))
        };
        let awaits_a_reading =
            |at: Moment| self.freshness != Freshness::Unreported || now < at + FIRST_REPORT_TIMEOUT;
        let departed = self.departed.iter().find(|departed| departed.uid == *uid);
        departed.is_some_and(|departed| awaits_a_reading(departed.at)) || is_in_reading()
    }
}

#[cfg(test)]
mod tests;
