//! What was measured on a node, held against what was promised there.
//!
//! `free = total − driver's reserve − headroom − Σ max(reserved, attributed) − unexplained`: the ledger's sum counts the
//! promises, and what is found here is what processes have beyond them. It changes no promise.

use super::book::{Book, Entries};
use super::entry::Phase;
use crate::ids::{GpuUuid, PodUid};
use crate::scheduling::device::{Device, Gpu};
use crate::scheduling::policy::{Policy, TelemetryRules};
use crate::scheduling::reading::{Freshness, GpuReading, Reading};
use crate::scheduling::request::Sharing;
use crate::units::{Bytes, Moment};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What readings in a row could not explain of a GPU's use. Believed is the least of the last three: an engine that starts
/// or a process that ends between two samples is over by then.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Unexplained {
    last: [Bytes; 3],
}

impl Unexplained {
    pub fn add(&mut self, rest: Bytes) {
        self.last.rotate_right(1);
        self.last[0] = rest;
    }

    pub fn believed(&self) -> Bytes {
        self.last.into_iter().min().unwrap_or_default()
    }
}

impl Book {
    /// How far the reading may be believed at `now`.
    pub fn freshness_at(&self, now: Moment, rules: &TelemetryRules) -> Freshness {
        match self.reading.as_ref().map(|reading| now.since(reading.sampled)) {
            None => Freshness::Unreported,
            Some(age) if age < rules.fresh => Freshness::Fresh,
            Some(age) if age < rules.stale => Freshness::Stale,
            Some(_) => Freshness::Expired,
        }
    }

    /// When it will be believed less than now.
    pub fn ages_at(&self, rules: &TelemetryRules) -> Option<Moment> {
        let sampled = self.reading.as_ref()?.sampled;
        match self.freshness {
            Freshness::Fresh => Some(sampled + rules.fresh),
            Freshness::Stale => Some(sampled + rules.stale),
            Freshness::Unreported | Freshness::Expired => None,
        }
    }

    /// Answers when the reading would have aged.
    pub fn forget_reading(&mut self, rules: &TelemetryRules) -> Option<Moment> {
        let due = self.ages_at(rules);
        self.reading = None;
        self.freshness = Freshness::Unreported;
        self.unexplained.clear();
        due
    }

    /// What was measured, as far as it may be believed: what is taken beyond the promises, and how busy the engines are.
    pub fn add_measured(&self, entries: &Entries, rules: &TelemetryRules, gpus: &mut [Gpu]) {
        for (gpu, device) in gpus.iter_mut().zip(self.devices.iter()) {
            let margin = rules.margin.of(device.total);
            let seen = self.reading.as_ref().and_then(|reading| reading.gpu(&device.uuid));
            match (self.freshness, seen) {
                (Freshness::Unreported, _) => {}
                (Freshness::Fresh, Some(seen)) => {
                    gpu.taken = self.taken(device, seen, entries, gpu.capacity, margin);
                    gpu.pressure = seen.pressure;
                }
                (Freshness::Stale, Some(seen)) => {
                    gpu.taken = self.taken(device, seen, entries, gpu.capacity, margin).max(margin);
                }
                (Freshness::Expired, _) | (_, None) => gpu.taken = margin,
            }
        }
    }

    /// VRAM of a GPU that is used although nobody was promised it: by pods beyond their promise, by pods that were
    /// promised nothing here, and by nobody that is known.
    fn taken(
        &self,
        device: &Device,
        seen: &GpuReading,
        entries: &Entries,
        capacity: Bytes,
        margin: Bytes,
    ) -> Bytes {
        let beyond = |(uid, attributed): &(PodUid, Bytes)| {
            attributed.minus(self.reserved_by(uid, &device.uuid, entries, capacity).unwrap_or_default())
        };
        let beyond: Bytes = seen.attributed.iter().map(beyond).sum();
        match (seen.used, self.unexplained.get(&device.uuid)) {
            (None, _) => beyond.max(margin),
            (Some(_), unexplained) => beyond + unexplained.map(Unexplained::believed).unwrap_or_default(),
        }
    }

    /// What a pod was promised on a GPU, if it is charged there.
    fn reserved_by(&self, uid: &PodUid, gpu: &GpuUuid, entries: &Entries, capacity: Bytes) -> Option<Bytes> {
        let entry = entries.get(uid)?;
        let charge = self.charge_of(entry)?;
        let place = self.devices.iter().position(|device| device.uuid == *gpu)?;
        charge.gpus.contains(place).then_some(match entry.demand.sharing {
            Sharing::Shared => entry.demand.per_gpu,
            Sharing::Exclusive => capacity,
        })
    }

    /// Takes in a reading: what of each GPU's use it leaves unexplained, and where it shows pods of which no record says on
    /// which GPUs they are.
    pub fn read(
        &mut self,
        reading: Reading,
        entries: &Entries,
        policy: &Policy,
    ) -> Vec<(PodUid, Arc<[GpuUuid]>)> {
        let mut unexplained = BTreeMap::new();
        for device in self.devices.iter() {
            let Some(seen) = reading.gpu(&device.uuid) else { continue };
            let Some(used) = seen.used else { continue };
            let rest = self.unexplained_of(device, seen, used, reading.sampled, entries, policy);
            let mut known = self.unexplained.remove(&device.uuid).unwrap_or_default();
            known.add(rest);
            unexplained.insert(device.uuid.clone(), known);
        }
        self.unexplained = unexplained;
        let found = self.locate(&reading, entries);
        self.reading = Some(reading);
        found
    }

    /// `max(0, used − Σ attributed − Σ max(0, reserved − attributed))`, the last sum over pods bound before the sample: a
    /// pod that has not allocated all it was promised explains nothing beyond what it has.
    fn unexplained_of(
        &self,
        device: &Device,
        seen: &GpuReading,
        used: Bytes,
        sampled: Moment,
        entries: &Entries,
        policy: &Policy,
    ) -> Bytes {
        let attributed: Bytes = seen.attributed.iter().map(|(_, bytes)| *bytes).sum();
        let capacity = device.capacity(policy.headroom);
        let growing = |uid: &PodUid| {
            let Phase::Bound(bound) = &entries[uid].phase else { return Bytes::ZERO };
            if bound.since > sampled {
                return Bytes::ZERO;
            }
            let reserved = self.reserved_by(uid, &device.uuid, entries, capacity).unwrap_or_default();
            reserved.minus(seen.attributed_to(uid).unwrap_or_default())
        };
        used.minus(attributed).minus(self.pods.iter().map(growing).sum())
    }

    /// Pods of which no record names GPUs by UUID, and the GPUs on which the reading shows all of them.
    fn locate(&self, reading: &Reading, entries: &Entries) -> Vec<(PodUid, Arc<[GpuUuid]>)> {
        let mut found = Vec::new();
        for uid in &self.pods {
            let entry = &entries[uid];
            let Phase::Bound(bound) = &entry.phase else { continue };
            if bound.is_recorded() || bound.located.is_some() || bound.node != self.view.name {
                continue;
            }
            let gpus = reading.gpus.iter().filter(|gpu| gpu.attributed_to(uid).is_some());
            let gpus: Vec<GpuUuid> = gpus.map(|gpu| gpu.uuid.clone()).collect();
            if gpus.len() >= entry.demand.gpus as usize && self.resolve(&gpus).is_some() {
                found.push((uid.clone(), gpus.into()));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests;
