//! What sleeping engines lend, and who may have it.

use super::super::unaccounted_vram::observation;
use super::super::{NodeState, ResidentPod};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::pod_state::PodState;
use crate::ledger::pod_states::PodStates;
use crate::ledger::{KeepReason, Ledger};
use crate::policy::Policy;
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, LONGEST_WAIT};
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::node_reading::{Freshness, NodeReading};
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
        if lent == Bytes::ZERO
            || self
                .lending
                .advertised
                .is_some_and(|advertised| advertised < whole + lent)
        {
            return;
        }
        let reserved = self.reserved_places(pod_states, policy, except);
        for (place, gpu) in gpus.iter_mut().enumerate() {
            let lenders = self
                .lenders_on(place)
                .filter(|(resident, _)| self.may_lend_more(resident));
            let (mut lendable, mut below) = (Bytes::ZERO, None);
            for (resident, kept) in lenders {
                lendable += resident.per_gpu.minus(kept);
                below = below.into_iter().chain([resident.priority]).min();
            }
            let needs_it =
                |borrows_at: Option<i32>| borrows_at.is_none_or(|priority| Some(priority) >= below);
            if reserved
                .iter()
                .any(|(places, borrows_at)| places.contains(place) && needs_it(*borrows_at))
            {
                continue;
            }
            let uuid = &self.devices[place].uuid;
            let hidden = self.lending.hidden.iter().find(|(gpu, _)| gpu == uuid);
            // What is known to be in use beside all grants is subtracted already.
            let hidden = hidden.map_or(Bytes(u64::MAX), |(_, hidden)| *hidden);
            gpu.lendable = lendable.minus(hidden.minus(self.unaccounted_on(place).believed()));
            gpu.lends_below = below
                .filter(|_| gpu.lendable > Bytes::ZERO)
                .unwrap_or_default();
        }
    }

    /// VRAM that the node's engines lend, used or not.
    pub(in crate::ledger) fn lent(&self) -> Bytes {
        let on = |place| {
            self.lenders_on(place)
                .map(|(resident, kept)| resident.per_gpu.minus(kept))
                .sum()
        };
        match self.lending.lenders.is_empty() {
            true => Bytes::ZERO,
            false => (0..self.devices.len()).map(on).sum::<Bytes>(),
        }
    }

    /// The lenders of which a demand borrows on these GPUs; none if its VRAM is free without them.
    pub(in crate::ledger) fn lenders_to(
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
            .filter(|place| gpus[*place].free() < demand.per_gpu);
        let mut lenders: Vec<PodUid> = borrowed
            .flat_map(|place| {
                self.lenders_on(place)
                    .map(|(resident, _)| resident.uid.clone())
            })
            .collect();
        lenders.sort_unstable();
        lenders.dedup();
        lenders.into()
    }

    fn may_lend_more(&self, resident: &ResidentPod) -> bool {
        let sleep = self
            .lending
            .lenders
            .get(&resident.uid)
            .and_then(|lender| lender.sleep.as_ref());
        !resident.is_leaving && sleep.is_some_and(|sleep| !sleep.is_silent)
    }

    /// The pods that lend on a GPU, and what each keeps of it.
    pub(super) fn lenders_on(&self, place: usize) -> impl Iterator<Item = (&ResidentPod, Bytes)> {
        let uuid = &self.devices[place].uuid;
        let here = self
            .residents()
            .iter()
            .filter(move |resident| resident.gpus.contains(place));
        here.filter_map(|resident| Some((resident, self.lending.kept(&resident.uid, uuid)?)))
    }

    /// VRAM in use on each GPU with a loan that no process explains: pods may still come to use what they were granted, but a
    /// lender only what it keeps.
    pub(super) fn hidden_use(&self, reading: &NodeReading) -> Vec<(GpuUuid, Bytes)> {
        if self.lending.lenders.is_empty() {
            return Vec::new();
        }
        let mut hidden = Vec::new();
        for place in 0..self.devices.len() {
            let uuid = &self.devices[place].uuid;
            if self.lenders_on(place).next().is_none() {
                continue;
            }
            let Some(observed) = observation(reading, place, uuid) else {
                continue;
            };
            let Some(used) = observed.used else { continue };
            let attributed: Bytes = observed.attributed.iter().map(|(_, bytes)| *bytes).sum();
            let capacity = self.capacity_of(place);
            let growing = |resident: &ResidentPod| {
                let most = self.lending.kept(&resident.uid, uuid);
                let most = most.unwrap_or_else(|| resident.reserved_on(place, capacity));
                most.minus(observed.attributed_to(&resident.uid).unwrap_or_default())
            };
            let bound_before = |resident: &&ResidentPod| {
                resident.bound.is_some_and(|since| since <= reading.sampled)
            };
            let here = self
                .residents()
                .iter()
                .filter(|resident| resident.gpus.contains(place));
            let growing: Bytes = here.filter(bound_before).map(growing).sum();
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
    let stays = |pod_state| kept_from_borrowing(demand, pod_state, policy).is_some();
    demand.terms.borrows && !pod_state.is_some_and(stays)
}

/// What would keep a pod from being evicted alone, and soon, when a lender asks.
pub(super) fn kept_from_borrowing(
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
    let grace = class.grace_period(demand.grace);
    if grace > LONGEST_WAIT {
        return Some(KeepReason::Grace { grace });
    }
    (info.do_not_disrupt && class.honors_do_not_disrupt()).then_some(KeepReason::DoNotDisrupt)
}

impl Ledger {
    /// The demand as the pod may be placed by it: one that could not be evicted when a lender asks borrows nothing.
    pub(crate) fn as_borrower(&self, uid: &PodUid, mut demand: Demand) -> Demand {
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
