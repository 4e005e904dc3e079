//! Loans: what lenders do not use and which pods may have it; pods that ask to wake, and loans that end, as the planner sees them; and
//! [`PodLoan`], which explains a loan to people and decides nothing.

use super::lender::Recovery;
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::ledger::node_state::unaccounted_vram::gpu_reading;
use crate::ledger::node_state::{NodeState, ResidentPod};
use crate::ledger::pod_state::PodState;
use crate::ledger::pod_states::PodStates;
use crate::ledger::{KeepReason, Ledger};
use crate::policy::Policy;
use crate::units::{Bytes, Millis};
use crate::vocabulary::demand::{Demand, MAX_BORROWER_GRACE_PERIOD};
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::node_reading::{Freshness, NodeReading};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

impl NodeState {
    /// Adds what lenders do not use to what pods that may borrow can have. Nothing, unless the figures are fresh and the node
    /// advertises it: kube-scheduler would not bind a pod that it cannot see room for. Nor where a GPU is reserved for a pod
    /// that cannot borrow there: borrowers are charged in full, so that it would not find what was kept for it.
    pub(in crate::ledger::node_state) fn add_lendable(
        &self,
        gpus: &mut [Gpu],
        pod_states: &PodStates,
        policy: &Policy,
        except: Option<&PodUid>,
    ) {
        if self.freshness != Freshness::Fresh || self.lending.lenders.is_empty() {
            return;
        }
        let lent = self.lent();
        let whole: Bytes = gpus.iter().map(|gpu| gpu.capacity).sum();
        let shown = self.lending.advertised;
        let shown = shown.map_or(lent, |advertised| advertised.minus(whole).min(lent));
        if shown == Bytes::ZERO {
            return;
        }
        let reserved = self.reserved_gpus(pod_states, policy, except);
        for (gpu_index, gpu) in gpus.iter_mut().enumerate() {
            let lenders = self
                .lenders_on(gpu_index)
                .filter(|(resident, _)| self.may_lend_more(resident));
            let (mut lendable, mut below, mut is_within_limits) = (Bytes::ZERO, None, false);
            for (resident, kept) in lenders.filter(|(resident, kept)| *kept < resident.per_gpu) {
                lendable += resident.per_gpu.minus(kept);
                below = below.into_iter().chain([resident.priority]).min();
                is_within_limits |= self.is_recovered_by_driver(resident);
            }
            let needs_it =
                |borrows_at: Option<i32>| borrows_at.is_none_or(|priority| Some(priority) >= below);
            if reserved
                .iter()
                .any(|(gpu_set, borrows_at)| gpu_set.contains(gpu_index) && needs_it(*borrows_at))
            {
                continue;
            }
            let uuid = &self.devices[gpu_index].uuid;
            let hidden = self.lending.hidden.iter().find(|(gpu, _)| gpu == uuid);
            // What is known to be in use beside all grants is subtracted already.
            let hidden = hidden.map_or(Bytes(u64::MAX), |(_, hidden)| *hidden);
            let hidden = hidden.minus(self.unaccounted_on(gpu_index).believed());
            gpu.lendable = lendable.minus(hidden).min(shown);
            if gpu.lendable > Bytes::ZERO {
                gpu.lends_below = below.unwrap_or_default();
                gpu.lends_within_limits = is_within_limits;
            }
        }
    }

    /// VRAM that the node's engines lend, used or not.
    pub(in crate::ledger) fn lent(&self) -> Bytes {
        let on = |gpu_index| {
            self.lenders_on(gpu_index)
                .map(|(resident, kept)| resident.per_gpu.minus(kept))
                .sum()
        };
        match self.lending.lenders.is_empty() {
            true => Bytes::ZERO,
            false => (0..self.devices.len()).map(on).sum::<Bytes>(),
        }
    }

    /// The lenders of which a demand borrows on these GPUs; none if its VRAM is free without them.
    pub(in crate::ledger) fn lenders_for(
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
        let borrowed = chosen
            .iter()
            .filter(|gpu_index| gpus[*gpu_index].free() < demand.per_gpu);
        let mut lenders: Vec<PodUid> = borrowed
            .flat_map(|gpu_index| {
                self.lenders_on(gpu_index)
                    .map(|(resident, _)| resident.uid.clone())
            })
            .collect();
        lenders.sort_unstable();
        lenders.dedup();
        lenders.into()
    }

    /// Whether a lender lends to pods that come now. Where the driver is not known to keep limits, one that would take its VRAM back
    /// by it lends nothing more; what it lent has limits already.
    fn may_lend_more(&self, resident: &ResidentPod) -> bool {
        let unused = self.lending.lent_by(&resident.uid);
        !resident.is_leaving
            && unused.is_some_and(|unused| !unused.is_silent)
            && (self.keeps_vram_limits() || !self.is_recovered_by_driver(resident))
    }

    fn is_recovered_by_driver(&self, resident: &ResidentPod) -> bool {
        let unused = self.lending.lent_by(&resident.uid);
        unused.is_some_and(|unused| unused.recovery == Recovery::ByDriver)
    }

    /// The pods that lend on a GPU, and what each keeps of it.
    fn lenders_on(&self, gpu_index: usize) -> impl Iterator<Item = (&ResidentPod, Bytes)> {
        let here = self
            .residents()
            .iter()
            .filter(move |resident| resident.gpus.contains(gpu_index));
        here.filter_map(move |resident| Some((resident, self.kept_by(resident, gpu_index)?)))
    }

    /// VRAM in use on each GPU with a loan that no process explains: pods may still come to use what they were granted, but a
    /// lender only what it keeps.
    pub(super) fn hidden_use(&self, reading: &NodeReading) -> Vec<(GpuUuid, Bytes)> {
        if self.lending.lenders.is_empty() {
            return Vec::new();
        }
        let mut hidden = Vec::new();
        for gpu_index in 0..self.devices.len() {
            let uuid = &self.devices[gpu_index].uuid;
            if self.lenders_on(gpu_index).next().is_none() {
                continue;
            }
            let Some(observed) = gpu_reading(reading, gpu_index, uuid) else {
                continue;
            };
            let Some(used) = observed.used else { continue };
            let attributed: Bytes = observed.attributed.iter().map(|(_, bytes)| *bytes).sum();
            let capacity = self.capacity_of(gpu_index);
            let unused_grant = |resident: &ResidentPod| {
                let most = self.kept_by(resident, gpu_index);
                let most = most.unwrap_or_else(|| resident.allocated_on(gpu_index, capacity));
                most.minus(observed.attributed_to(&resident.uid).unwrap_or_default())
            };
            let bound_before = |resident: &&ResidentPod| {
                resident
                    .bound_since
                    .is_some_and(|since| since <= reading.sampled)
            };
            let here = self
                .residents()
                .iter()
                .filter(|resident| resident.gpus.contains(gpu_index));
            let growing: Bytes = here.filter(bound_before).map(unused_grant).sum();
            hidden.push((uuid.clone(), used.minus(attributed).minus(growing)));
        }
        hidden
    }
}

/// Whether a pod may have VRAM that is lent: its class may, and nothing that is known of it would keep it from being evicted
/// alone.
pub(in crate::ledger::node_state) fn may_borrow(
    demand: &Demand,
    pod_state: Option<&PodState>,
    policy: &Policy,
) -> bool {
    let stays = |pod_state| borrowing_obstacle(demand, pod_state, policy).is_some();
    let most = policy.class(demand.class).max_borrowed;
    demand.terms.borrows
        && most.is_none_or(|most| demand.vram() <= most)
        && !pod_state.is_some_and(stays)
}

/// The reason, if any, why a pod could not be evicted alone and soon when a lender asks.
fn borrowing_obstacle(
    demand: &Demand,
    pod_state: &PodState,
    policy: &Policy,
) -> Option<KeepReason> {
    let info = &pod_state.disruption_info;
    if info.is_static() {
        return Some(KeepReason::Static);
    }
    if let Some(group) = &info.group {
        return Some(KeepReason::Group(group.clone()));
    }
    if info.queue_managed {
        return Some(KeepReason::QueueManaged);
    }
    let class = policy.class(demand.class);
    let grace = class.eviction_grace_period(demand.grace);
    if grace > MAX_BORROWER_GRACE_PERIOD {
        return Some(KeepReason::Grace { grace });
    }
    (info.do_not_disrupt && class.honors_do_not_disrupt()).then_some(KeepReason::DoNotDisrupt)
}

impl Ledger {
    /// The demand with the word whether the pod may borrow: one that could not be evicted when a lender asks borrows nothing.
    pub(in crate::ledger) fn as_borrower(&self, uid: &PodUid, mut demand: Demand) -> Demand {
        demand.terms.borrows = may_borrow(&demand, self.pod_states.get(uid), &self.policy);
        demand
    }

    /// What the node advertises as `stowage.dev/vram`.
    pub(crate) fn set_advertised(&mut self, name: &NodeName, advertised: Option<Bytes>) {
        if self
            .node_states
            .get_mut(name)
            .is_some_and(|node_state| node_state.set_advertised(advertised))
        {
            self.node_states
                .refresh_view(name, &self.pod_states, &self.policy);
        }
    }
}

/// A pod that is to wake, or may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WakeStatus {
    pub uid: PodUid,
    pub key: PodKey,
    /// What its annotation says.
    pub request: Option<Arc<str>>,
    /// The request that its condition answers.
    pub answered_request: Option<Arc<str>>,
    /// Its whole grant is free: no borrower has any of it, and none will.
    pub is_wakeable: bool,
    /// Borrowers that are still on its GPUs.
    pub borrowers: usize,
}

impl Ledger {
    /// The pods whose condition does not answer their latest wake request, or the end of it, in order of node and UID.
    pub fn unanswered_wakes(&self) -> Vec<WakeStatus> {
        let nodes = self
            .node_states
            .with_loans()
            .filter_map(|name| self.node_states.get(name));
        nodes
            .flat_map(|node_state| {
                node_state
                    .unanswered_wakes()
                    .map(move |resident| (node_state, resident))
            })
            .filter_map(|(node_state, resident)| self.build_wake_status(node_state, resident))
            .collect()
    }

    /// The wake status of a pod that is to wake, or may; `None` for any other.
    pub fn wake_status(&self, uid: &PodUid) -> Option<WakeStatus> {
        let node_state = self.node_states.get(self.pod_states.get(uid)?.node()?)?;
        let resident = node_state
            .resident_of(uid)
            .filter(|resident| resident.is_waking)?;
        self.build_wake_status(node_state, resident)
    }

    /// Whether a bound pod's engine that sleeps may wake now: nothing of its grant is lent, and nothing will be. A pod of a class
    /// that lends has to ask, and to be told. `None` for a pod that is not bound.
    pub(crate) fn may_wake(&self, uid: &PodUid) -> Option<bool> {
        let pod_state = self.pod_states.get(uid)?;
        let wake = &pod_state.bound()?.wake;
        let resident = self.node_states.get(pod_state.node()?)?.resident_of(uid)?;
        Some(
            !(resident.lends_asleep || resident.is_waking)
                || wake.request.is_some() && wake.request == wake.answered_request,
        )
    }

    fn build_wake_status(
        &self,
        node_state: &NodeState,
        resident: &ResidentPod,
    ) -> Option<WakeStatus> {
        let pod_state = self.pod_states.get(&resident.uid)?;
        let wake = &pod_state.bound()?.wake;
        Some(WakeStatus {
            uid: resident.uid.clone(),
            key: pod_state.key.clone(),
            request: wake.request.clone(),
            answered_request: wake.answered_request.clone(),
            is_wakeable: node_state.is_wakeable(
                resident,
                self.policy.planning.lending.margin,
                self.now,
            ),
            borrowers: node_state.count_borrowers_beside(resident),
        })
    }

    /// Recalls what these pods lent before they ask for it, or ends the recall.
    pub(crate) fn set_recalled(&mut self, pods: &[PodUid], is_recalled: bool) {
        for uid in pods {
            let Some(name) = self
                .pod_states
                .get(uid)
                .and_then(|pod_state| pod_state.node())
                .cloned()
            else {
                continue;
            };
            let node_state = self.node_states.get_mut(&name);
            if node_state.is_some_and(|node_state| node_state.set_recalled(uid, is_recalled)) {
                self.node_states
                    .refresh_view(&name, &self.pod_states, &self.policy);
            }
        }
    }

    /// Nodes with engines that sleep and lend, or may come to, in order of name.
    pub(crate) fn nodes_with_lenders(&self) -> impl Iterator<Item = &NodeState> {
        self.node_states
            .with_lenders()
            .filter_map(|name| self.node_states.existing(name))
    }

    /// Nodes with pods that borrow, or that are to wake, in order of name.
    pub(crate) fn nodes_with_loans(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.node_states
            .with_loans()
            .filter_map(|name| Some((name, self.node_states.get(name)?)))
    }
}

/// A pod's part in lending: borrower, or one of the stages of a lender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "stage"
)]
pub enum LoanStage {
    /// Its VRAM is lent: it is evicted when an engine beside it is to wake.
    Borrows,
    /// It sleeps, and lends so much of each of its GPUs, used or not.
    Lends { bytes_per_gpu: Bytes },
    /// It sleeps, and lends after that time at the earliest.
    Sleeps { lends_in_millis: Millis },
    /// It does not use so much of each of its GPUs, and lends that: it takes it back by allocating it.
    LendsUnused { bytes_per_gpu: Bytes },
    /// It does not use so much of each of its GPUs, and lends no more of that now: a pod beside it has no VRAM limits, the node's
    /// condition is not `True`, or the agent is silent.
    KeepsUnused { bytes_per_gpu: Bytes },
    /// It does not use so much of each of its GPUs, and lends that after that time at the earliest.
    Steadies {
        bytes_per_gpu: Bytes,
        lends_in_millis: Millis,
    },
    /// It sleeps, and got back what it lent, because its model is in demand.
    Recalled,
    /// It asked to wake, and its condition does not say yet that it may.
    WaitsToWake,
    /// It may wake.
    MayWake,
}

/// A bound pod's part in lending, and the pods on the other side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLoan {
    pub stage: LoanStage,
    /// What its annotation says.
    pub request: Option<Arc<str>>,
    /// For a pod that borrows, the pods on its GPUs that may lend; for any other, the pods that borrow there.
    pub others: Vec<PodKey>,
    /// What pods borrow on its GPUs.
    pub borrowed: Bytes,
    /// All of its grant is free, and stays so.
    pub is_free: bool,
}

impl Ledger {
    /// A bound pod's part in lending; `None` if it has none.
    pub(crate) fn loan_of(&self, uid: &PodUid) -> Option<PodLoan> {
        let pod_state = self.pod_states.get(uid)?;
        let node_state = self.node_states.get(pod_state.node()?)?;
        let stage = self.loan_stage(node_state, pod_state, uid)?;
        let resident = node_state.resident_of(uid)?;
        let is_other = |other: &&ResidentPod| match stage {
            LoanStage::Borrows => other.lends(),
            _ => other.borrows,
        };
        let beside = node_state
            .residents()
            .iter()
            .filter(|other| other.gpus.intersects(resident.gpus));
        let others = beside.filter(|other| other.uid != *uid).filter(is_other);
        let keys = others.filter_map(|other| Some(self.pod_states.get(&other.uid)?.key.clone()));
        Some(PodLoan {
            stage,
            request: pod_state
                .bound()
                .and_then(|bound| bound.wake.request.clone()),
            others: keys.collect(),
            borrowed: resident
                .gpus
                .iter()
                .map(|gpu_index| node_state.borrowed_on(gpu_index))
                .sum(),
            is_free: node_state.is_wakeable(
                resident,
                self.policy.planning.lending.margin,
                self.now,
            ),
        })
    }

    pub(in crate::ledger) fn loan_stage(
        &self,
        node_state: &NodeState,
        pod_state: &PodState,
        uid: &PodUid,
    ) -> Option<LoanStage> {
        if pod_state.borrows() {
            return Some(LoanStage::Borrows);
        }
        let wake = &pod_state.bound()?.wake;
        if wake.is_waking() {
            let waits = wake.request.is_some() && wake.request != wake.answered_request;
            return Some(if waits {
                LoanStage::WaitsToWake
            } else {
                LoanStage::MayWake
            });
        }
        let resident = node_state
            .resident_of(uid)
            .filter(|resident| resident.lends())?;
        let lender = node_state.lending.lenders.get(uid)?;
        if lender.is_recalled {
            return Some(LoanStage::Recalled);
        }
        let unused = lender.unused.as_ref()?;
        let lent = unused.kept.iter();
        let lent = lent.map(|(_, kept)| resident.per_gpu.minus(*kept));
        // One that uses all of its grant has no part in it.
        if unused.recovery == Recovery::ByDriver
            && lent.clone().all(|lent| lent == Bytes::ZERO)
            && node_state.count_borrowers_beside(resident) == 0
        {
            return None;
        }
        let bytes_per_gpu = lent.min().unwrap_or_default();
        let rules = &self.policy.planning.lending;
        let after = match unused.recovery {
            Recovery::OnRequest => rules.after,
            Recovery::ByDriver => rules.unused_after,
        };
        let pause = lender.lending_pause(self.now, after);
        let lends_in_millis = (unused.since + pause).since(self.now);
        let is_limited = || {
            let mut gpus = resident.gpus.iter();
            gpus.all(|gpu_index| node_state.has_limits_throughout(gpu_index))
        };
        Some(match (unused.recovery, unused.lends) {
            (Recovery::OnRequest, true) => LoanStage::Lends { bytes_per_gpu },
            (Recovery::OnRequest, false) => LoanStage::Sleeps { lends_in_millis },
            (Recovery::ByDriver, true) if node_state.may_lend_more(resident) && is_limited() => {
                LoanStage::LendsUnused { bytes_per_gpu }
            }
            (Recovery::ByDriver, true) => LoanStage::KeepsUnused { bytes_per_gpu },
            (Recovery::ByDriver, false) => LoanStage::Steadies {
                bytes_per_gpu,
                lends_in_millis,
            },
        })
    }

    /// Whether a pod's class may borrow, and then what keeps the pod itself from it, if anything does.
    pub(crate) fn borrowing_of(&self, pod_state: &PodState) -> Option<Option<KeepReason>> {
        let may = pod_state.demand.terms.borrows;
        may.then(|| borrowing_obstacle(&pod_state.demand, pod_state, &self.policy))
    }
}
