//! VRAM that sleeping engines lend: which engines sleep, what they lend, and what must be given back before one of them wakes.
//!
//! A lender's grant stays charged in full, and so does what a borrower has: for a pod that may not borrow nothing changes. For one
//! that may, [`NodeState::add_lendable`] adds to each GPU what its lenders do not use. So of each GPU
//!
//! - the grants of all pods that do not borrow are at most its capacity, whichever of them sleep or wake;
//! - when a pod borrows, all grants are at most its capacity, where a lender counts with what it keeps.
//!
//! An engine lends once reports have shown for a while that it sleeps and uses the same VRAM. It ends at once when it is to wake,
//! when a report shows it awake, and when it uses more; what borrowers have then beyond the capacity is [`NodeState::overdrawn`].
//! What is unknown (no report yet, an agent or an engine that is silent) lends nothing more, and takes nothing back.

use super::unaccounted_vram::observation;
use super::{NodeState, ResidentPod};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::ledger::Ledger;
use crate::scheduling::ledger::pod_states::PodStates;
use crate::scheduling::policy::{LendingRules, Policy};
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::scheduling::vocabulary::node_reading::{Freshness, NodeReading, SleepState};
use crate::units::{Bytes, Millis, Moment};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Reports in a row that show an engine asleep, before it lends: one may be late, or of the moment in which it goes to sleep.
const REPORTS: u32 = 3;

/// Within this time each loan that ended makes the engine sleep twice as long before the next one.
const REMEMBERED: Millis = Millis::seconds(3600);

/// More ended loans than that make no difference: the pause is longer than they are remembered.
const MOST_REMEMBERED: usize = 16;

/// A replica that has just begun waits that long for a node's first report.
const FIRST_REPORT_WITHIN: Millis = Millis::seconds(10);

/// What is known of the lenders of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct NodeLending {
    /// By pod of a class that lends.
    lenders: BTreeMap<PodUid, Lender>,
    /// Of each GPU with a loan, VRAM in use that would be hidden in the unused grant of a lender.
    hidden: Vec<(GpuUuid, Bytes)>,
    /// `stowage.dev/vram` in the node's capacity, if it is there.
    advertised: Option<Bytes>,
    /// Engines that woke over VRAM that they had lent, until they are taken out.
    #[serde(skip)]
    woken_over_loans: Vec<PodUid>,
}

/// What readings say of one engine.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Lender {
    /// `None` if it is awake, or to wake.
    sleep: Option<Sleep>,
    /// The last reading that says it shows it awake.
    is_awake: bool,
    /// It gets back what it lent, because it will be needed soon. It sleeps still, and has not asked.
    #[serde(default)]
    is_recalled: bool,
    /// When its latest loans ended, the oldest first.
    ended: Vec<Moment>,
}

/// An engine's sleep, as far as readings show it without a break.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Sleep {
    since: Moment,
    /// When the latest reading that shows it was sampled.
    last: Moment,
    reports: u32,
    /// What it keeps of each of its GPUs: more than it uses.
    kept: Vec<(GpuUuid, Bytes)>,
    lends: bool,
    /// The latest reading does not say whether it sleeps.
    is_silent: bool,
}

/// What is assumed of a lender of which nothing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    Asleep,
    Awake,
}

/// A pod that is to wake, or may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WakeStatus {
    pub uid: PodUid,
    pub key: PodKey,
    /// What its annotation says.
    pub request: Option<Arc<str>>,
    /// The request that its condition answers.
    pub told: Option<Arc<str>>,
    /// Its whole grant is free: no borrower has any of it, and none will.
    pub is_wakeable: bool,
    /// Borrowers that are still on its GPUs.
    pub borrowers: usize,
}

impl NodeLending {
    /// Answers whether that is new.
    pub(super) fn set_advertised(&mut self, advertised: Option<Bytes>) -> bool {
        std::mem::replace(&mut self.advertised, advertised) != advertised
    }

    /// What a pod keeps of a GPU while it lends.
    fn kept(&self, uid: &PodUid, gpu: &GpuUuid) -> Option<Bytes> {
        self.lenders.get(uid)?.sleep.as_ref().filter(|sleep| sleep.lends)?.kept_of(gpu)
    }
}

impl Sleep {
    fn kept_of(&self, gpu: &GpuUuid) -> Option<Bytes> {
        self.kept.iter().find(|(uuid, _)| uuid == gpu).map(|(_, kept)| *kept)
    }

    /// Whether it still uses no more than it keeps, and, as long as it does not lend, not much less either: an engine that goes
    /// to sleep gives its memory back step by step.
    fn goes_on_with(&self, used: &[(GpuUuid, Bytes)], margin: Bytes) -> bool {
        used.iter().all(|(gpu, used)| {
            self.kept_of(gpu)
                .is_some_and(|kept| *used <= kept && (self.lends || kept <= *used + margin.times(2)))
        })
    }
}

impl Lender {
    fn end_loan(&mut self) {
        if let Some(Sleep { lends: true, last, .. }) = self.sleep.take() {
            self.ended.push(last);
            let beyond = self.ended.len().saturating_sub(MOST_REMEMBERED);
            self.ended.drain(..beyond);
        }
    }

    /// How long it sleeps before it lends.
    fn pause(&self, now: Moment, rules: &LendingRules) -> Millis {
        let recent = self.ended.iter().filter(|ended| now.since(**ended) < REMEMBERED).count();
        rules.after.times(1 << recent)
    }

    fn see_asleep(&mut self, sampled: Moment, used: &[(GpuUuid, Bytes)], rules: &LendingRules) {
        self.is_awake = false;
        if !self.sleep.as_ref().is_some_and(|sleep| sleep.goes_on_with(used, rules.margin)) {
            self.end_loan();
            let kept = used.iter().map(|(gpu, used)| (gpu.clone(), *used + rules.margin)).collect();
            let (since, last) = (sampled, sampled);
            self.sleep = Some(Sleep { since, last, reports: 0, kept, lends: false, is_silent: false });
        }
        let pause = self.pause(sampled, rules);
        let Some(sleep) = &mut self.sleep else { return };
        sleep.reports = sleep.reports.saturating_add(1);
        (sleep.last, sleep.is_silent) = (sampled, false);
        sleep.lends |= sleep.reports >= REPORTS && sampled.since(sleep.since) >= pause;
    }
}

impl NodeState {
    /// Takes in what a reading says of the sleep of engines that lend.
    pub(super) fn watch_sleep(&mut self, reading: &NodeReading, rules: &LendingRules) {
        let mut lending = std::mem::take(&mut self.lending);
        for resident in self.residents().iter().filter(|resident| resident.lends) {
            let state = reading.sleep_of(&resident.uid);
            if state.is_none() && !lending.lenders.contains_key(&resident.uid) {
                continue;
            }
            let lender = lending.lenders.entry(resident.uid.clone()).or_default();
            let used = (state == Some(SleepState::Asleep)).then(|| self.used_by(resident, reading)).flatten();
            match (state, used) {
                (Some(SleepState::Awake), _) => {
                    let was_awake = std::mem::replace(&mut lender.is_awake, true);
                    lender.is_recalled = false;
                    lender.end_loan();
                    if !was_awake && self.is_lent_out(resident) {
                        lending.woken_over_loans.push(resident.uid.clone());
                    }
                }
                (Some(SleepState::Asleep), Some(used))
                    if !resident.is_waking
                        && !lender.is_recalled
                        && resident.sleeps_from <= reading.sampled =>
                {
                    lender.see_asleep(reading.sampled, &used, rules);
                }
                (Some(SleepState::Asleep), Some(_)) => lender.is_awake = false,
                (Some(SleepState::Asleep), None) | (None, _) => {
                    lender.sleep.iter_mut().for_each(|sleep| sleep.is_silent = true);
                }
            }
        }
        self.lending = lending;
        self.lending.hidden = self.hidden_use(reading);
    }

    /// Forgets the sleep of pods that do not lend any more. Follows every change of a pod here.
    pub(super) fn settle_lenders(&mut self) {
        if self.lending.lenders.is_empty() {
            return;
        }
        let mut lenders = std::mem::take(&mut self.lending.lenders);
        lenders.retain(|uid, _| self.resident_of(uid).is_some_and(|resident| resident.lends));
        for (uid, lender) in &mut lenders {
            if self.resident_of(uid).is_some_and(|resident| resident.is_waking) {
                lender.end_loan();
                lender.is_recalled = false;
            }
        }
        self.lending.lenders = lenders;
    }

    /// A pod whose engine sleeps gets back what it lent, or need not any more: then it begins to sleep anew. Answers whether that
    /// is new.
    fn set_recalled(&mut self, uid: &PodUid, is_recalled: bool) -> bool {
        let is_waking = self.resident_of(uid).is_none_or(|resident| resident.is_waking);
        let Some(lender) = self.lending.lenders.get_mut(uid) else { return false };
        let may_begin = lender.sleep.is_some() && !is_waking;
        if lender.is_recalled == is_recalled || is_recalled && !may_begin {
            return false;
        }
        lender.end_loan();
        lender.is_recalled = is_recalled;
        true
    }

    /// The pods here whose engines sleep and lend, or may come to, and whether each is recalled.
    pub(in crate::scheduling) fn sleeping_lenders(&self) -> impl Iterator<Item = (&PodUid, bool)> {
        let sleeping = self.lending.lenders.iter();
        let sleeping = sleeping.filter(|(_, lender)| lender.sleep.is_some() || lender.is_recalled);
        sleeping.map(|(uid, lender)| (uid, lender.is_recalled))
    }

    pub(in crate::scheduling) fn is_recalled(&self, uid: &PodUid) -> bool {
        self.lending.lenders.get(uid).is_some_and(|lender| lender.is_recalled)
    }

    /// Adds what lenders do not use to what pods that may borrow can have. Nothing, unless the figures are fresh and the node
    /// advertises it: kube-scheduler would not bind a pod that it cannot see room for. Nor where a GPU is reserved for a pod
    /// that cannot borrow there: borrowers are charged in full, so that it would not find what was kept for it.
    pub(super) fn add_lendable(&self, gpus: &mut [Gpu], pod_states: &PodStates, except: Option<&PodUid>) {
        if self.freshness != Freshness::Fresh || self.lending.lenders.is_empty() {
            return;
        }
        let lent = self.lent();
        let whole: Bytes = gpus.iter().map(|gpu| gpu.capacity).sum();
        if lent == Bytes::ZERO || self.lending.advertised.is_some_and(|advertised| advertised < whole + lent)
        {
            return;
        }
        let reserved = self.reserved_places(pod_states, except);
        for (place, gpu) in gpus.iter_mut().enumerate() {
            let lenders = self.lenders_on(place).filter(|(resident, _)| self.may_lend_more(resident));
            let (mut lendable, mut below) = (Bytes::ZERO, None);
            for (resident, kept) in lenders {
                lendable += resident.per_gpu.minus(kept);
                below = below.into_iter().chain([resident.priority]).min();
            }
            let needs_it =
                |borrows_at: Option<i32>| borrows_at.is_none_or(|priority| Some(priority) >= below);
            if reserved.iter().any(|(places, borrows_at)| places.contains(place) && needs_it(*borrows_at)) {
                continue;
            }
            let uuid = &self.devices[place].uuid;
            let hidden = self.lending.hidden.iter().find(|(gpu, _)| gpu == uuid);
            // What is known to be in use beside all grants is subtracted already.
            let hidden = hidden.map_or(Bytes(u64::MAX), |(_, hidden)| *hidden);
            gpu.lendable = lendable.minus(hidden.minus(self.unaccounted_on(place).believed()));
            gpu.lends_below = below.filter(|_| gpu.lendable > Bytes::ZERO).unwrap_or_default();
        }
    }

    /// VRAM that the node's engines lend, used or not.
    pub(in crate::scheduling::ledger) fn lent(&self) -> Bytes {
        let on = |place| self.lenders_on(place).map(|(resident, kept)| resident.per_gpu.minus(kept)).sum();
        match self.lending.lenders.is_empty() {
            true => Bytes::ZERO,
            false => (0..self.devices.len()).map(on).sum::<Bytes>(),
        }
    }

    /// The lenders of which a demand borrows on these GPUs; none if its VRAM is free without them.
    pub(in crate::scheduling::ledger) fn lenders_to(
        &self,
        uid: &PodUid,
        demand: &Demand,
        chosen: GpuSet,
        pod_states: &PodStates,
        policy: &Policy,
    ) -> Arc<[PodUid]> {
        if !demand.terms.borrows || self.lending.lenders.is_empty() {
            return Arc::default();
        }
        let gpus = self.gpus_without(uid, pod_states, policy);
        let borrowed = chosen.iter().filter(|place| gpus[*place].free() < demand.per_gpu);
        let mut lenders: Vec<PodUid> = borrowed
            .flat_map(|place| self.lenders_on(place).map(|(resident, _)| resident.uid.clone()))
            .collect();
        lenders.sort_unstable();
        lenders.dedup();
        lenders.into()
    }

    /// Whether anything here borrows, or waits for an answer to its request.
    pub(in crate::scheduling::ledger) fn has_loans(&self) -> bool {
        self.residents().iter().any(|resident| resident.borrows || resident.is_unanswered)
    }

    /// Engines that have woken over VRAM that they had lent, since this was last asked.
    pub(in crate::scheduling::ledger) fn take_woken_over_loans(&mut self) -> Vec<PodUid> {
        std::mem::take(&mut self.lending.woken_over_loans)
    }

    /// By GPU, how much more than there is its pods are owed, as far as borrowers have it that stay, and those borrowers. Where a
    /// pod is to wake, a lender of which nothing is known counts as awake; elsewhere nothing is taken back for it.
    pub(in crate::scheduling) fn overdrawn(&self) -> Vec<(usize, Bytes, Vec<&ResidentPod>)> {
        let mut overdrawn = Vec::new();
        for place in 0..self.devices.len() {
            let here = || self.residents().iter().filter(move |resident| resident.gpus.contains(place));
            let borrowers: Vec<&ResidentPod> =
                here().filter(|resident| resident.borrows && !resident.is_leaving).collect();
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
    pub(in crate::scheduling::ledger) fn wakes(&self) -> impl Iterator<Item = &ResidentPod> {
        self.residents().iter().filter(|resident| resident.is_unanswered)
    }

    /// The pod that needs what borrowers have of a GPU: one that is to wake, or else one that is recalled, or else one that lends,
    /// or else any.
    pub(in crate::scheduling) fn lender_in_need(&self, place: usize) -> Option<&ResidentPod> {
        let here =
            self.residents().iter().filter(|resident| resident.gpus.contains(place) && !resident.borrows);
        here.max_by_key(|resident| (resident.is_waking, self.is_recalled(&resident.uid), resident.lends))
    }

    /// Whether the whole grant of a pod that is to wake is free, and stays so: each of its GPUs has room for what all its pods are
    /// owed, borrowers included, and no borrower that has ended may have memory there still.
    pub(in crate::scheduling::ledger) fn is_wakeable(&self, pod: &ResidentPod, now: Moment) -> bool {
        self.knows_processes(pod, now)
            && pod.gpus.iter().all(|place| {
                let lent = self.borrowed_on(place);
                let is_within = self.owed(place, Unknown::Awake) + lent <= self.capacity_of(place);
                (lent == Bytes::ZERO || is_within)
                    && !self.may_be_occupied_by_borrowers(&self.devices[place].uuid)
                    && !self.has_strangers(place)
            })
    }

    /// Borrowers on the GPUs of a pod.
    pub(in crate::scheduling::ledger) fn borrowers_beside(&self, pod: &ResidentPod) -> usize {
        let here = self.residents().iter().filter(|resident| resident.gpus.meets(pod.gpus));
        here.filter(|resident| resident.borrows).count()
    }

    fn may_lend_more(&self, resident: &ResidentPod) -> bool {
        let sleep = self.lending.lenders.get(&resident.uid).and_then(|lender| lender.sleep.as_ref());
        !resident.is_leaving && sleep.is_some_and(|sleep| !sleep.is_silent)
    }

    /// The pods that lend on a GPU, and what each keeps of it.
    fn lenders_on(&self, place: usize) -> impl Iterator<Item = (&ResidentPod, Bytes)> {
        let uuid = &self.devices[place].uuid;
        let here = self.residents().iter().filter(move |resident| resident.gpus.contains(place));
        here.filter_map(|resident| Some((resident, self.lending.kept(&resident.uid, uuid)?)))
    }

    fn capacity_of(&self, place: usize) -> Bytes {
        self.charges.capacity_of(place)
    }

    fn borrowed_on(&self, place: usize) -> Bytes {
        let here = self.residents().iter().filter(|resident| resident.gpus.contains(place));
        here.filter(|resident| resident.borrows).map(|resident| resident.per_gpu).sum()
    }

    /// What the pods on a GPU that do not borrow may have of it at any time, without asking.
    fn owed(&self, place: usize, unknown: Unknown) -> Bytes {
        let capacity = self.capacity_of(place);
        let here = self.residents().iter().filter(|resident| resident.gpus.contains(place));
        here.filter(|resident| !resident.borrows)
            .map(|resident| self.owed_to(resident, place, unknown).min(resident.reserved_on(place, capacity)))
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
    fn is_lent_out(&self, pod: &ResidentPod) -> bool {
        pod.gpus.iter().any(|place| {
            let (lent, capacity) = (self.borrowed_on(place), self.capacity_of(place));
            let here = self.residents().iter().filter(|resident| !resident.borrows);
            let granted: Bytes = here.map(|resident| resident.reserved_on(place, capacity)).sum();
            lent > Bytes::ZERO && granted + lent > capacity
        })
    }

    /// What a pod uses of each of its GPUs; `None` if a process of it is missing on one.
    fn used_by(&self, resident: &ResidentPod, reading: &NodeReading) -> Option<Vec<(GpuUuid, Bytes)>> {
        let used = |place: usize| {
            let uuid = &self.devices[place].uuid;
            let used = observation(reading, place, uuid)?.attributed_to(&resident.uid)?;
            (used > Bytes::ZERO).then(|| (uuid.clone(), used))
        };
        resident.gpus.iter().map(used).collect()
    }

    /// VRAM in use on each GPU with a loan that no process explains: pods may still come to use what they were granted, but a
    /// lender only what it keeps.
    fn hidden_use(&self, reading: &NodeReading) -> Vec<(GpuUuid, Bytes)> {
        if self.lending.lenders.is_empty() {
            return Vec::new();
        }
        let mut hidden = Vec::new();
        for place in 0..self.devices.len() {
            let uuid = &self.devices[place].uuid;
            if self.lenders_on(place).next().is_none() {
                continue;
            }
            let Some(observed) = observation(reading, place, uuid) else { continue };
            let Some(used) = observed.used else { continue };
            let attributed: Bytes = observed.attributed.iter().map(|(_, bytes)| *bytes).sum();
            let capacity = self.capacity_of(place);
            let growing = |resident: &ResidentPod| {
                let most = self.lending.kept(&resident.uid, uuid);
                let most = most.unwrap_or_else(|| resident.reserved_on(place, capacity));
                most.minus(observed.attributed_to(&resident.uid).unwrap_or_default())
            };
            let bound_before =
                |resident: &&ResidentPod| resident.bound.is_some_and(|since| since <= reading.sampled);
            let here = self.residents().iter().filter(|resident| resident.gpus.contains(place));
            let growing: Bytes = here.filter(bound_before).map(growing).sum();
            hidden.push((uuid.clone(), used.minus(attributed).minus(growing)));
        }
        hidden
    }

    /// Whether the node's processes are known, or no agent will say. A borrower may have ended before this ledger began.
    fn knows_processes(&self, pod: &ResidentPod, now: Moment) -> bool {
        let known_since = pod.bound.unwrap_or_default();
        match self.freshness {
            Freshness::Unreported => known_since + FIRST_REPORT_WITHIN <= now,
            Freshness::Fresh | Freshness::Stale => {
                self.reading.as_ref().is_some_and(|reading| known_since <= reading.sampled)
            }
            Freshness::Expired => true,
        }
    }

    /// Whether a pod that has nothing on a GPU is seen there.
    fn has_strangers(&self, place: usize) -> bool {
        let Some(reading) = self.believed_reading() else { return false };
        let Some(observed) = observation(reading, place, &self.devices[place].uuid) else { return false };
        let is_resident =
            |uid: &PodUid| self.resident_of(uid).is_some_and(|resident| resident.gpus.contains(place));
        observed.attributed.iter().any(|(uid, _)| !is_resident(uid))
    }
}

impl Ledger {
    /// The demand as the pod may be placed by it: one that could not be evicted when a lender asks borrows nothing.
    pub(in crate::scheduling) fn as_borrower(&self, uid: &PodUid, mut demand: Demand) -> Demand {
        if demand.terms.borrows {
            let class = self.policy.class(demand.class);
            let stays = self.pod_states.get(uid).is_some_and(|pod_state| {
                let info = &pod_state.disruption_info;
                info.do_not_disrupt && class.honors_do_not_disrupt()
                    || info.queue_managed
                    || info.group.is_some()
            });
            demand.terms.borrows = !stays;
        }
        demand
    }

    /// The pods that have not been told what their request, or the end of it, asks for, in order of node and UID.
    pub fn open_wakes(&self) -> Vec<WakeStatus> {
        let nodes = self.node_states.with_loans().filter_map(|name| self.node_states.get(name));
        nodes
            .flat_map(|node_state| node_state.wakes().map(move |resident| (node_state, resident)))
            .filter_map(|(node_state, resident)| self.wake_status_at(node_state, resident))
            .collect()
    }

    /// How far a pod is that is to wake, or may; `None` for any other.
    pub fn wake_status(&self, uid: &PodUid) -> Option<WakeStatus> {
        let node_state = self.node_states.get(self.pod_states.get(uid)?.node()?)?;
        let resident = node_state.resident_of(uid).filter(|resident| resident.is_waking)?;
        self.wake_status_at(node_state, resident)
    }

    /// Whether a bound pod's engine that sleeps may wake now: nothing of its grant is lent, and nothing will be. A pod of a class
    /// that lends has to ask, and to be told. `None` for a pod that is not bound.
    pub fn may_wake(&self, uid: &PodUid) -> Option<bool> {
        let pod_state = self.pod_states.get(uid)?;
        let wake = &pod_state.bound()?.wake;
        let resident = self.node_states.get(pod_state.node()?)?.resident_of(uid)?;
        Some(!(resident.lends || resident.is_waking) || wake.request.is_some() && wake.request == wake.told)
    }

    fn wake_status_at(&self, node_state: &NodeState, resident: &ResidentPod) -> Option<WakeStatus> {
        let pod_state = self.pod_states.get(&resident.uid)?;
        let wake = &pod_state.bound()?.wake;
        Some(WakeStatus {
            uid: resident.uid.clone(),
            key: pod_state.key.clone(),
            request: wake.request.clone(),
            told: wake.told.clone(),
            is_wakeable: node_state.is_wakeable(resident, self.now),
            borrowers: node_state.borrowers_beside(resident),
        })
    }

    /// These pods get back what they lent before they ask for it, or need not any more.
    pub(in crate::scheduling) fn set_recalled(&mut self, pods: &[PodUid], is_recalled: bool) {
        for uid in pods {
            let Some(name) = self.pod_states.get(uid).and_then(|pod_state| pod_state.node()).cloned() else {
                continue;
            };
            let node_state = self.node_states.get_mut(&name);
            if node_state.is_some_and(|node_state| node_state.set_recalled(uid, is_recalled)) {
                self.node_states.refresh_view(&name, &self.pod_states, &self.policy);
            }
        }
    }

    /// VRAM that a node's sleeping engines lend, used or not: so much more than its GPUs have the node advertises.
    pub fn lent_on(&self, name: &NodeName) -> Bytes {
        self.node_states.get(name).map_or(Bytes::ZERO, NodeState::lent)
    }

    /// Nodes with pods that borrow, or that are to wake, in order of name.
    pub(in crate::scheduling) fn nodes_with_loans(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.node_states.with_loans().filter_map(|name| Some((name, self.node_states.get(name)?)))
    }

    /// What the node advertises as `stowage.dev/vram`.
    pub(in crate::scheduling) fn set_advertised(&mut self, name: &NodeName, advertised: Option<Bytes>) {
        if self.node_states.get_mut(name).is_some_and(|node_state| node_state.set_advertised(advertised)) {
            self.node_states.refresh_view(name, &self.pod_states, &self.policy);
        }
    }
}

#[cfg(test)]
mod tests;
