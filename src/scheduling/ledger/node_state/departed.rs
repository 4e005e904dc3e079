//! Pods that have ended on a node and whose GPU memory may still be in use: the driver frees it after the API server has deleted
//! the pod.

use super::NodeState;
use super::unaccounted_vram::observation;
use crate::ids::{GpuUuid, PodUid};
use crate::ledger::pod_state::PodState;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node_reading::{Freshness, NodeReading};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A pod that has ended here.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct DepartedPod {
    uid: PodUid,
    at: Moment,
    /// The GPUs on which it borrowed from sleeping engines; none, if it did not.
    borrowed: Arc<[GpuUuid]>,
    /// The others that it had, and what was granted to it on each.
    #[serde(default)]
    had: Arc<[GpuUuid]>,
    #[serde(default)]
    granted: Bytes,
}

/// Pods of a node that may end between two reports.
const MAX_DEPARTED: usize = 256;

/// Agents report every second: one that has not by then is not there.
const FIRST_REPORT_WITHIN: Millis = Millis::seconds(10);

impl NodeState {
    /// A pod has ended here. Where no agent has ever reported, none will say that its memory is free: then its end has to do.
    pub(in crate::ledger) fn note_departed(
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

    /// A pod ended here before this ledger began, unless its end is known. If there is an agent, it will report soon.
    pub(in crate::ledger) fn note_missed(&mut self, uid: &PodUid, at: Moment) {
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
        self.departed.retain(|known| known.uid != departed.uid);
        self.departed.truncate(MAX_DEPARTED - 1);
        self.departed.insert(0, departed);
    }

    /// What a pod that has ended keeps of a GPU as long as processes of it are seen there, however little they use: a pod that was
    /// deleted by force runs on for its grace, and may use its grant again.
    pub(super) fn kept_by_departed(&self, uid: &PodUid, place: usize) -> Bytes {
        let device = &self.devices[place];
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
    pub(in crate::ledger) fn lingering(
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
            let used_on = |place: usize| {
                let observation = observation(reading?, place, &self.devices[place].uuid)?;
                Some(
                    observation
                        .attributed_to(&departed.uid)?
                        .max(self.kept_by_departed(&departed.uid, place)),
                )
            };
            let used = (0..self.devices.len()).filter_map(|place| Some((place, used_on(place)?)));
            let gpus: GpuSet = used.clone().map(|(place, _)| place).collect();
            let least = used
                .map(|(_, used)| used)
                .min()
                .filter(|least| *least > Bytes::ZERO)?;
            self.resident_of(&departed.uid)
                .is_none()
                .then_some((&departed.uid, gpus, least))
        })
    }

    /// Forgets pods that a reading shows to be gone.
    pub(super) fn look_after_departed(&mut self, reading: &NodeReading) {
        self.departed
            .retain(|departed| reading.sampled < departed.at || reading.shows(&departed.uid));
    }

    /// Whether a pod that has ended here may still have memory: nothing that was sampled since says otherwise, or it is seen
    /// there still.
    pub(in crate::ledger) fn may_have_memory(&self, uid: &PodUid, now: Moment) -> bool {
        let is_seen = || {
            self.believed_reading()
                .is_some_and(|reading| reading.shows(uid))
        };
        let awaits_a_reading =
            |at: Moment| self.freshness != Freshness::Unreported || now < at + FIRST_REPORT_WITHIN;
        let departed = self.departed.iter().find(|departed| departed.uid == *uid);
        departed.is_some_and(|departed| awaits_a_reading(departed.at)) || is_seen()
    }
}
