//! What borrowers have beyond what there is, and when a pod that is to wake has its whole grant.

use super::super::unaccounted_vram::observation;
use super::super::{NodeState, ResidentPod};
use crate::ids::PodUid;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::node_reading::Freshness;

/// A replica that has just begun waits that long for a node's first report.
const FIRST_REPORT_WITHIN: Millis = Millis::seconds(10);

/// What is assumed of a lender of which nothing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    Asleep,
    Awake,
}

impl NodeState {
    /// By GPU, how much more than there is its pods are owed, as far as borrowers have it that stay, and those borrowers. Where a
    /// pod is to wake, a lender of which nothing is known counts as awake; elsewhere nothing is taken back for it.
    pub(crate) fn overdrawn(
        &self,
        stays: impl Fn(&ResidentPod) -> bool,
    ) -> Vec<(usize, Bytes, Vec<&ResidentPod>)> {
        let mut overdrawn = Vec::new();
        for place in 0..self.devices.len() {
            let here = || {
                self.residents()
                    .iter()
                    .filter(move |resident| resident.gpus.contains(place))
            };
            let borrowers: Vec<&ResidentPod> = here()
                .filter(|resident| resident.borrows && stays(resident))
                .collect();
            if borrowers.is_empty() {
                continue;
            }
            let unknown = match here().any(|resident| resident.is_waking) {
                true => Unknown::Awake,
                false => Unknown::Asleep,
            };
            let lent: Bytes = borrowers.iter().map(|borrower| borrower.per_gpu).sum();
            let beyond = (self.owed(place, unknown) + lent).minus(self.capacity_of(place));
            if beyond > Bytes::ZERO {
                overdrawn.push((place, beyond, borrowers));
            }
        }
        overdrawn
    }

    /// The pods here that wait for an answer to their request, or to its end, in order of UID.
    pub(in crate::ledger) fn wakes(&self) -> impl Iterator<Item = &ResidentPod> {
        self.residents()
            .iter()
            .filter(|resident| resident.is_unanswered)
    }

    /// The pod that needs what borrowers have of a GPU: one that is to wake, or else one that is recalled, or else one that lends,
    /// or else any.
    pub(crate) fn lender_in_need(&self, place: usize) -> Option<&ResidentPod> {
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(place) && !resident.borrows);
        here.max_by_key(|resident| {
            (
                resident.is_waking,
                self.is_recalled(&resident.uid),
                resident.lends,
            )
        })
    }

    /// Whether the whole grant of a pod that is to wake is free, and stays so: each of its GPUs has room for what all its pods are
    /// owed, borrowers included, and no borrower that has ended may have memory there still.
    pub(in crate::ledger) fn is_wakeable(
        &self,
        pod: &ResidentPod,
        margin: Bytes,
        now: Moment,
    ) -> bool {
        self.knows_processes(pod, now)
            && pod.gpus.iter().all(|place| {
                let lent = self.borrowed_on(place);
                let is_within = self.owed(place, Unknown::Awake) + lent <= self.capacity_of(place);
                (lent == Bytes::ZERO || is_within)
                    && !self.may_be_occupied_by_borrowers(&self.devices[place].uuid)
                    && !self.has_strangers(place, margin)
            })
    }

    /// Borrowers on the GPUs of a pod.
    pub(in crate::ledger) fn borrowers_beside(&self, pod: &ResidentPod) -> usize {
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.meets(pod.gpus));
        here.filter(|resident| resident.borrows).count()
    }

    pub(super) fn capacity_of(&self, place: usize) -> Bytes {
        self.charges.capacity_of(place)
    }

    pub(super) fn borrowed_on(&self, place: usize) -> Bytes {
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(place));
        here.filter(|resident| resident.borrows)
            .map(|resident| resident.per_gpu)
            .sum()
    }

    /// What the pods on a GPU that do not borrow may have of it at any time, without asking.
    fn owed(&self, place: usize, unknown: Unknown) -> Bytes {
        let capacity = self.capacity_of(place);
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(place));
        here.filter(|resident| !resident.borrows)
            .map(|resident| {
                self.owed_to(resident, place, unknown)
                    .min(resident.reserved_on(place, capacity))
            })
            .sum()
    }

    fn owed_to(&self, resident: &ResidentPod, place: usize, unknown: Unknown) -> Bytes {
        let whole = Bytes(u64::MAX);
        if !resident.lends || resident.is_waking {
            return whole;
        }
        let uuid = &self.devices[place].uuid;
        let lender = self.lending.lenders.get(&resident.uid);
        let is_believed = matches!(self.freshness, Freshness::Fresh | Freshness::Stale);
        if lender.is_some_and(|lender| lender.is_recalled) {
            return whole;
        }
        let sleep = lender.and_then(|lender| lender.sleep.as_ref());
        let kept = sleep.and_then(|sleep| Some((sleep.lends && is_believed, sleep.kept_of(uuid)?)));
        let is_awake = lender.is_some_and(|lender| lender.is_awake) && is_believed;
        match (kept, unknown) {
            (Some((true, kept)), _) | (Some((false, kept)), Unknown::Asleep) => kept,
            (None, Unknown::Asleep) if !is_awake => Bytes::ZERO,
            _ => whole,
        }
    }

    /// Whether a pod's GPUs are owed more than they have while borrowers are there.
    pub(super) fn is_lent_out(&self, pod: &ResidentPod) -> bool {
        pod.gpus.iter().any(|place| {
            let (lent, capacity) = (self.borrowed_on(place), self.capacity_of(place));
            let here = self.residents().iter().filter(|resident| !resident.borrows);
            let granted: Bytes = here
                .map(|resident| resident.reserved_on(place, capacity))
                .sum();
            lent > Bytes::ZERO && granted + lent > capacity
        })
    }

    /// Whether the node's processes are known, or no agent will say. A borrower may have ended before this ledger began.
    fn knows_processes(&self, pod: &ResidentPod, now: Moment) -> bool {
        let known_since = pod.bound.unwrap_or_default();
        match self.freshness {
            Freshness::Unreported => known_since + FIRST_REPORT_WITHIN <= now,
            Freshness::Fresh | Freshness::Stale => self
                .reading
                .as_ref()
                .is_some_and(|reading| known_since <= reading.sampled),
            Freshness::Expired => true,
        }
    }

    /// Whether pods that have nothing on a GPU are seen to use more of it than a margin: so much as a borrower has that ended
    /// before this ledger began, and not as little as an MPS server has, which stays.
    fn has_strangers(&self, place: usize, margin: Bytes) -> bool {
        let Some(reading) = self.believed_reading() else {
            return false;
        };
        let Some(observed) = observation(reading, place, &self.devices[place].uuid) else {
            return false;
        };
        let is_resident = |uid: &PodUid| {
            self.resident_of(uid)
                .is_some_and(|resident| resident.gpus.contains(place))
        };
        let strangers = observed
            .attributed
            .iter()
            .filter(|(uid, _)| !is_resident(uid));
        strangers.map(|(_, bytes)| *bytes).sum::<Bytes>() > margin
    }
}
