//! VRAM that engines lend: which do not use what they were granted, what they lend, and how they get it back.
//!
//! An engine that sleeps gets it back before it wakes, because it asks ([`Recovery::OnRequest`]). Where the driver keeps VRAM
//! limits, an engine of a class that lends what it does not use takes it back by allocating it, awake or asleep: the driver ends a
//! borrower at that moment ([`Recovery::ByDriver`]). It lends so only on GPUs all of whose pods have limits.
//!
//! A lender's grant stays charged in full, and so does what a borrower has: for a pod that may not borrow, nothing of
//! the grant is free. For one that may, [`NodeState::add_lendable`] adds to each GPU what its lenders do not use. So of each GPU
//!
//! - the grants of all pods that do not borrow are at most its capacity, whichever of them sleep or wake;
//! - when a pod borrows, all grants are at most its capacity, where a lender counts with what it keeps.
//!
//! An engine lends once reports have shown for a while that it sleeps, or is awake, and uses the same VRAM. That ends at once when it
//! is to wake, when it wakes or uses more, and when reports show that it is gone, as one is that restarts; what
//! borrowers have then beyond the capacity is [`NodeState::over_allocations`]. What is unknown (no report yet, an agent or an engine
//! that is silent) lends nothing more, and takes nothing back.
//!
//! [`lender`] has the state of one of them. [`loans`] says which pods may have what is lent, and reports loans to the planner and to people.

mod lender;
mod loans;

use super::unaccounted_vram::gpu_reading;
use super::{NodeState, ResidentPod};
use crate::ids::{GpuUuid, PodUid};
use crate::policy::LendingRules;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::node_reading::{Freshness, NodeReading, SleepState};
use lender::{Lender, MIN_REPORTS, Recovery, UnusedGrant};
pub(crate) use loans::PodLoan;
pub(super) use loans::may_borrow;
pub use loans::{LoanStage, WakeStatus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The state of the lenders of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct NodeLending {
    /// By pod of a class that lends.
    lenders: BTreeMap<PodUid, Lender>,
    /// For each GPU with a loan, VRAM in use that would be hidden in the unused grant of a lender.
    hidden: Vec<(GpuUuid, Bytes)>,
    /// `stowage.dev/vram` in the node's capacity, if it is there.
    advertised: Option<Bytes>,
    /// Loans that engines ended without asking, until they are taken out.
    #[serde(skip)]
    ended_unasked: LoansEndedUnasked,
}

/// Loans that engines ended without asking.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoansEndedUnasked {
    /// Pods whose engines woke although their VRAM is lent out, and may have failed for want of it.
    pub woken: Vec<PodUid>,
    /// How many engines used more than they keep, while others have what they lend: the driver gives it back to them.
    pub taken_back: u32,
}

impl NodeLending {
    /// Sets what the node advertises. Returns whether that has changed.
    pub(super) fn set_advertised(&mut self, advertised: Option<Bytes>) -> bool {
        std::mem::replace(&mut self.advertised, advertised) != advertised
    }

    /// What a pod does not use, while it lends that.
    fn lent_by(&self, uid: &PodUid) -> Option<&UnusedGrant> {
        self.lenders
            .get(uid)?
            .unused
            .as_ref()
            .filter(|unused| unused.lends)
    }
}

impl NodeState {
    /// Updates the lenders from what a reading says of their engines' sleep.
    pub(super) fn update_lenders(&mut self, reading: &NodeReading, rules: &LendingRules) {
        let mut lending = std::mem::take(&mut self.lending);
        for resident in self.residents().iter().filter(|resident| resident.lends()) {
            let state = reading.sleep_of(&resident.uid);
            let is_recorded = || lending.lenders.contains_key(&resident.uid);
            if state.is_none() && !is_recorded() && self.count_borrowers_beside(resident) == 0 {
                continue;
            }
            let lender = lending.lenders.entry(resident.uid.clone()).or_default();
            let is_gone =
                state.is_none() && self.shows_no_use_of(resident, lender, reading, rules.margin);
            lender.gone = if is_gone {
                lender.gone.saturating_add(1)
            } else {
                0
            };
            let is_measured = reading.unmeasured.binary_search(&resident.uid).is_err();
            let used = state.filter(|_| is_measured);
            let used = used.and_then(|_| self.measured_use(resident, reading));
            let may_lend = !resident.is_waking
                && !lender.is_recalled
                && resident.sleep_counts_from <= reading.sampled;
            match (state, used) {
                (Some(SleepState::Awake), Some(used)) if resident.lends_unused && may_lend => {
                    lender.is_awake = true;
                    let is_ended = lender.observe_use(reading.sampled, &used, rules);
                    if is_ended && self.is_lent_out(resident) {
                        let mut gpus = resident.gpus.iter();
                        match gpus.all(|gpu_index| self.has_limits_throughout(gpu_index)) {
                            true => lending.ended_unasked.taken_back += 1,
                            false => lending.ended_unasked.woken.push(resident.uid.clone()),
                        }
                    }
                }
                // Its use is unknown, and it does not ask: nothing is taken back.
                (Some(SleepState::Awake), None)
                    if resident.lends_unused
                        && may_lend
                        && lender.recovery() != Some(Recovery::OnRequest) =>
                {
                    lender.observe_nothing();
                }
                (Some(SleepState::Awake | SleepState::Starting), _) => {
                    let was_awake = std::mem::replace(&mut lender.is_awake, true);
                    lender.is_recalled = false;
                    lender.end_loan();
                    if !was_awake && resident.lends_asleep && self.is_lent_out(resident) {
                        lending.ended_unasked.woken.push(resident.uid.clone());
                    }
                }
                (Some(SleepState::Asleep), Some(used)) if may_lend && resident.lends_asleep => {
                    lender.observe_asleep(reading.sampled, &used, rules);
                }
                (Some(SleepState::Asleep), Some(used)) if may_lend => {
                    lender.is_awake = false;
                    let is_ended = lender.observe_use(reading.sampled, &used, rules);
                    let is_taken_back = is_ended && self.is_lent_out(resident);
                    lending.ended_unasked.taken_back += u32::from(is_taken_back);
                }
                (Some(SleepState::Asleep), Some(_)) => lender.is_awake = false,
                // It has restarted, and needs its whole grant to load its model again: nobody can ask for it then.
                (None, _) if lender.gone >= MIN_REPORTS => {
                    lender.is_awake = true;
                    lender.end_loan();
                }
                (Some(SleepState::Asleep), None) | (None, _) => lender.observe_nothing(),
            }
        }
        self.lending = lending;
        self.lending.hidden = self.hidden_use(reading);
    }

    /// Forgets the sleep of pods that do not lend any more. Follows every change of a pod here.
    pub(super) fn forget_former_lenders(&mut self) {
        if self.lending.lenders.is_empty() {
            return;
        }
        let mut lenders = std::mem::take(&mut self.lending.lenders);
        lenders.retain(|uid, _| self.resident_of(uid).is_some_and(ResidentPod::lends));
        for (uid, lender) in &mut lenders {
            let Some(resident) = self.resident_of(uid) else {
                continue;
            };
            if resident.is_waking {
                lender.end_loan();
                lender.is_recalled = false;
            }
            if !resident.lends_unused && lender.recovery() == Some(Recovery::ByDriver) {
                lender.end_loan();
            }
        }
        self.lending.lenders = lenders;
    }

    /// A pod whose engine sleeps gets back what it lent, or need not any more: then it begins to sleep again. Returns whether that
    /// is new.
    fn set_recalled(&mut self, uid: &PodUid, is_recalled: bool) -> bool {
        let is_waking = self
            .resident_of(uid)
            .is_none_or(|resident| resident.is_waking);
        let Some(lender) = self.lending.lenders.get_mut(uid) else {
            return false;
        };
        let may_begin = lender.is_asleep() && !is_waking;
        if lender.is_recalled == is_recalled || is_recalled && !may_begin {
            return false;
        }
        lender.end_loan();
        lender.is_recalled = is_recalled;
        true
    }

    /// The pods here whose engines sleep and lend, or may come to, and whether each is recalled.
    pub(crate) fn sleeping_lenders(&self) -> impl Iterator<Item = (&PodUid, bool)> {
        let sleeping = self.lending.lenders.iter();
        let sleeping = sleeping.filter(|(_, lender)| lender.is_asleep() || lender.is_recalled);
        sleeping.map(|(uid, lender)| (uid, lender.is_recalled))
    }

    pub(in crate::ledger) fn has_sleeping_lenders(&self) -> bool {
        self.sleeping_lenders().next().is_some()
    }

    /// Whether engines on a GPU can take back what they lend by allocating it. All pods there must have limits: the driver ends
    /// none that has none, and gives back none's VRAM.
    fn has_limits_throughout(&self, gpu_index: usize) -> bool {
        let here = self.residents().iter();
        let mut here = here.filter(|resident| resident.gpus.contains(gpu_index));
        here.all(|resident| resident.has_vram_limits)
    }

    /// What a pod keeps of a GPU while it lends.
    fn kept_by(&self, resident: &ResidentPod, gpu_index: usize) -> Option<Bytes> {
        let unused = self.lending.lent_by(&resident.uid)?;
        let kept = unused.kept_of(&self.devices[gpu_index].uuid);
        kept.filter(|_| self.is_recoverable(unused, gpu_index))
    }

    /// Whether an engine on a GPU gets back what it lends there when it needs it.
    fn is_recoverable(&self, unused: &UnusedGrant, gpu_index: usize) -> bool {
        unused.recovery == Recovery::OnRequest || self.has_limits_throughout(gpu_index)
    }

    pub(crate) fn is_recalled(&self, uid: &PodUid) -> bool {
        self.lending
            .lenders
            .get(uid)
            .is_some_and(|lender| lender.is_recalled)
    }

    /// Whether anything here borrows, or waits for an answer to its request.
    pub(in crate::ledger) fn has_loans(&self) -> bool {
        self.residents()
            .iter()
            .any(|resident| resident.borrows || resident.has_unanswered_wake)
    }

    /// Takes the loans that engines ended without asking, since the last call.
    pub(in crate::ledger) fn take_loans_ended_unasked(&mut self) -> LoansEndedUnasked {
        std::mem::take(&mut self.lending.ended_unasked)
    }

    /// What a pod uses of each of its GPUs; `None` if a process of it is missing on one.
    fn measured_use(
        &self,
        resident: &ResidentPod,
        reading: &NodeReading,
    ) -> Option<Vec<(GpuUuid, Bytes)>> {
        let use_on = |gpu_index: usize| {
            let uuid = &self.devices[gpu_index].uuid;
            let used = gpu_reading(reading, gpu_index, uuid)?.attributed_to(&resident.uid)?;
            (used > Bytes::ZERO).then(|| (uuid.clone(), used))
        };
        resident.gpus.iter().map(use_on).collect()
    }

    /// Whether a reading shows that an engine is gone from its GPUs: no process of it, and not as much VRAM in use that is
    /// nobody's as it had. An agent that cannot tell whose memory it is shows nothing.
    fn shows_no_use_of(
        &self,
        resident: &ResidentPod,
        lender: &Lender,
        reading: &NodeReading,
        margin: Bytes,
    ) -> bool {
        resident
            .bound_since
            .is_some_and(|since| since <= reading.sampled)
            && resident.gpus.iter().all(|gpu_index| {
                let uuid = &self.devices[gpu_index].uuid;
                let Some(observed) = gpu_reading(reading, gpu_index, uuid) else {
                    return false;
                };
                let kept = lender
                    .unused
                    .as_ref()
                    .and_then(|unused| unused.kept_of(uuid));
                let had = kept.map_or(margin, |kept| kept.minus(margin));
                let attributed: Bytes = observed.attributed.iter().map(|(_, bytes)| *bytes).sum();
                observed.attributed_to(&resident.uid).unwrap_or_default() == Bytes::ZERO
                    && observed
                        .used
                        .is_some_and(|used| used.minus(attributed) < had)
            })
    }
}

/// How long a replica that has just started waits for a node's first report. Agents report every second.
const FIRST_REPORT_TIMEOUT: Millis = Millis::seconds(10);

/// How a lender of which nothing is known counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnknownLender {
    Asleep,
    Awake,
}

impl NodeState {
    /// The GPUs that are over-allocated: index, VRAM beyond the capacity, and the borrowers that stay and have it. Where a pod is
    /// to wake, a lender of which nothing is known counts as awake; elsewhere nothing is taken back for it.
    pub(crate) fn over_allocations(
        &self,
        stays: impl Fn(&ResidentPod) -> bool,
    ) -> Vec<(usize, Bytes, Vec<&ResidentPod>)> {
        let mut over_allocations = Vec::new();
        for gpu_index in 0..self.devices.len() {
            let here = || {
                self.residents()
                    .iter()
                    .filter(move |resident| resident.gpus.contains(gpu_index))
            };
            let borrowers: Vec<&ResidentPod> = here()
                .filter(|resident| resident.borrows && stays(resident))
                .collect();
            if borrowers.is_empty() {
                continue;
            }
            let unknown = match here().any(|resident| resident.is_waking) {
                true => UnknownLender::Awake,
                false => UnknownLender::Asleep,
            };
            let lent: Bytes = borrowers.iter().map(|borrower| borrower.per_gpu).sum();
            let beyond = (self.owed(gpu_index, unknown) + lent).minus(self.capacity_of(gpu_index));
            if beyond > Bytes::ZERO {
                over_allocations.push((gpu_index, beyond, borrowers));
            }
        }
        over_allocations
    }

    /// The pods here that wait for an answer to their request, or to its end, in order of UID.
    pub(in crate::ledger) fn unanswered_wakes(&self) -> impl Iterator<Item = &ResidentPod> {
        self.residents()
            .iter()
            .filter(|resident| resident.has_unanswered_wake)
    }

    /// The pods that need what borrowers have of a GPU: those that are to wake, or else those that are recalled, or else those whose
    /// loan ended last, or else those that are awake, or else any. Several if nothing tells which of them it is.
    pub(crate) fn pods_in_need(&self, gpu_index: usize) -> Vec<&ResidentPod> {
        let need = |resident: &ResidentPod| {
            let lender = self.lending.lenders.get(&resident.uid);
            let ended = lender.filter(|lender| !lender.is_lending());
            (
                resident.is_waking,
                self.is_recalled(&resident.uid),
                ended.and_then(|lender| lender.ended.last()),
                lender.is_some_and(|lender| lender.is_awake),
            )
        };
        let here = || {
            let on_gpu = |resident: &&ResidentPod| resident.gpus.contains(gpu_index);
            let residents = self.residents().iter().filter(on_gpu);
            residents.filter(|resident| !resident.borrows)
        };
        let most = here().map(need).max();
        here()
            .filter(|resident| Some(need(resident)) == most)
            .collect()
    }

    /// Whether the whole grant of a pod that is to wake is free, and stays so: each of its GPUs has room for what all its pods are
    /// owed, borrowers included, and no borrower that has ended may have memory there still.
    pub(in crate::ledger) fn is_wakeable(
        &self,
        pod: &ResidentPod,
        margin: Bytes,
        now: Moment,
    ) -> bool {
        self.has_reading_since_bound(pod, now)
            && pod.gpus.iter().all(|gpu_index| {
                let lent = self.borrowed_on(gpu_index);
                let is_within = self.owed(gpu_index, UnknownLender::Awake) + lent
                    <= self.capacity_of(gpu_index);
                (lent == Bytes::ZERO || is_within)
                    && !self.may_be_occupied_by_borrowers(&self.devices[gpu_index].uuid)
                    && !self.has_nonresident_use(gpu_index, margin)
            })
    }

    /// The number of borrowers on the GPUs of a pod.
    pub(in crate::ledger) fn count_borrowers_beside(&self, pod: &ResidentPod) -> usize {
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.intersects(pod.gpus));
        here.filter(|resident| resident.borrows).count()
    }

    fn capacity_of(&self, gpu_index: usize) -> Bytes {
        self.charges.capacity_of(gpu_index)
    }

    fn borrowed_on(&self, gpu_index: usize) -> Bytes {
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(gpu_index));
        here.filter(|resident| resident.borrows)
            .map(|resident| resident.per_gpu)
            .sum()
    }

    /// VRAM of a GPU that its pods that do not borrow may use at any time without asking.
    fn owed(&self, gpu_index: usize, unknown: UnknownLender) -> Bytes {
        let capacity = self.capacity_of(gpu_index);
        let here = self
            .residents()
            .iter()
            .filter(|resident| resident.gpus.contains(gpu_index));
        here.filter(|resident| !resident.borrows)
            .map(|resident| {
                self.owed_to(resident, gpu_index, unknown)
                    .min(resident.allocated_on(gpu_index, capacity))
            })
            .sum()
    }

    fn owed_to(&self, resident: &ResidentPod, gpu_index: usize, unknown: UnknownLender) -> Bytes {
        let whole = Bytes(u64::MAX);
        if !resident.lends() || resident.is_waking {
            return whole;
        }
        let uuid = &self.devices[gpu_index].uuid;
        let lender = self.lending.lenders.get(&resident.uid);
        let is_believed = matches!(self.freshness, Freshness::Fresh | Freshness::Stale);
        if lender.is_some_and(|lender| lender.is_recalled) {
            return whole;
        }
        let unused = lender.and_then(|lender| lender.unused.as_ref());
        if unused.is_some_and(|unused| !self.is_recoverable(unused, gpu_index)) {
            return whole;
        }
        let kept =
            unused.and_then(|unused| Some((unused.lends && is_believed, unused.kept_of(uuid)?)));
        let is_awake = lender.is_some_and(|lender| lender.is_awake) && is_believed;
        match (kept, unknown) {
            (Some((true, kept)), _) | (Some((false, kept)), UnknownLender::Asleep) => kept,
            (None, UnknownLender::Asleep) if !is_awake => Bytes::ZERO,
            _ => whole,
        }
    }

    /// Whether a pod's GPUs are owed more than they have while borrowers are there.
    fn is_lent_out(&self, pod: &ResidentPod) -> bool {
        pod.gpus.iter().any(|gpu_index| {
            let (lent, capacity) = (self.borrowed_on(gpu_index), self.capacity_of(gpu_index));
            let here = self.residents().iter().filter(|resident| !resident.borrows);
            let granted: Bytes = here
                .map(|resident| resident.allocated_on(gpu_index, capacity))
                .sum();
            lent > Bytes::ZERO && granted + lent > capacity
        })
    }

    /// Whether the node's processes are known, or no agent will say. A borrower may have ended before this ledger began.
    fn has_reading_since_bound(&self, pod: &ResidentPod, now: Moment) -> bool {
        let known_since = pod.bound_since.unwrap_or_default();
        match self.freshness {
            Freshness::Unreported => known_since + FIRST_REPORT_TIMEOUT <= now,
            Freshness::Fresh | Freshness::Stale => self
                .reading
                .as_ref()
                .is_some_and(|reading| known_since <= reading.sampled),
            Freshness::Expired => true,
        }
    }

    /// Whether pods that have nothing on a GPU are seen to use more of it than a margin: so much as a borrower has that ended
    /// before this ledger began, and not as little as an MPS server has, which stays.
    fn has_nonresident_use(&self, gpu_index: usize, margin: Bytes) -> bool {
        let Some(reading) = self.believed_reading() else {
            return false;
        };
        let Some(observed) = gpu_reading(reading, gpu_index, &self.devices[gpu_index].uuid) else {
            return false;
        };
        let is_resident = |uid: &PodUid| {
            self.resident_of(uid)
                .is_some_and(|resident| resident.gpus.contains(gpu_index))
        };
        let nonresidents = observed
            .attributed
            .iter()
            .filter(|(uid, _)| !is_resident(uid));
        nonresidents.map(|(_, bytes)| *bytes).sum::<Bytes>() > margin
    }
}

#[cfg(test)]
mod tests;
