//! How much of the cluster each class and tenant has, in VRAM and pods, and each GPU by itself. For gauges, and never for a
//! decision.
//!
//! Sums are made again of the pods each time, on a copy of the ledger. Of each pod counts what it takes or has reserved; so the
//! classes add up to the whole, and so do the tenants with what has none.

use crate::ledger::{Ledger, PodPhase, PodState, SchedulingGate, WaitingPod};
use crate::policy::Tenant;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::gpu::{Device, Gpu};
use crate::vocabulary::node::{Node, NodeKind};

/// The whole cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterUsage {
    /// In the policy's order.
    pub classes: Vec<ClassUsage>,
    /// In the policy's order.
    pub tenants: Vec<TenantShare>,
    /// Age of the oldest reservation; zero without one.
    pub oldest_reservation: Millis,
}

/// What the pods of a class have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClassUsage {
    pub name: String,
    /// VRAM of placed pods and of reservations.
    pub allocated: Bytes,
    /// The part of `allocated` that engines lend.
    pub borrowed: Bytes,
    pub bound: u64,
    /// Number of pods without a node that wait for Stowage only; assumed ones included.
    pub pending: u64,
    /// Age of the pending pod that has waited longest; zero without one.
    pub oldest_pending: Millis,
}

/// What the pods of a tenant have, and what it may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantShare {
    pub name: String,
    pub allocated: Bytes,
    /// `None` if its guarantee names GPUs only.
    pub guarantee: Option<Bytes>,
    /// What it has beyond its guarantee.
    pub borrowed: Bytes,
    pub limit: Option<Bytes>,
    pub pending: u64,
}

/// One GPU, or MIG slice.
#[derive(Debug, Clone, Copy)]
pub struct DeviceUsage<'l> {
    pub device: &'l Device,
    pub gpu: &'l Gpu,
}

/// Adds up what each class and tenant has.
pub fn usage(ledger: &Ledger) -> ClusterUsage {
    let (policy, now) = (ledger.policy(), ledger.now());
    let class = |name: &String| ClassUsage {
        name: name.clone(),
        ..ClassUsage::default()
    };
    let mut usage = ClusterUsage {
        classes: policy
            .classes()
            .iter()
            .map(|policy_class| class(&policy_class.name))
            .collect(),
        tenants: policy
            .tenants()
            .iter()
            .map(TenantShare::from_tenant)
            .collect(),
        oldest_reservation: Millis::default(),
    };
    for (uid, pod_state) in ledger.pods_in_no_order() {
        let vram = ledger.usage_of(uid).vram;
        let (demand, pending) = (&pod_state.demand, pending_since(pod_state));
        if let Some(class) = usage.classes.get_mut(demand.class.index()) {
            class.add(pod_state, vram, pending.map(|since| now.since(since)));
        }
        if let Some(tenant) = demand
            .tenant
            .and_then(|id| usage.tenants.get_mut(id.index()))
        {
            tenant.allocated += vram;
            tenant.pending += u64::from(pending.is_some());
        }
        if let Some(WaitingPod {
            reservation: Some(_),
            reserved_since: Some(since),
            ..
        }) = pod_state.waiting()
        {
            usage.oldest_reservation = usage.oldest_reservation.max(now.since(*since));
        }
    }
    usage
        .tenants
        .iter_mut()
        .for_each(TenantShare::update_borrowed);
    usage
}

/// The GPUs of a node, in its order.
pub fn devices(node: &Node) -> impl Iterator<Item = DeviceUsage<'_>> {
    node.devices
        .iter()
        .zip(&*node.gpus)
        .map(|(device, gpu)| DeviceUsage { device, gpu })
}

/// Every node that exists, in order of name, with the name of its pool.
pub fn nodes(ledger: &Ledger) -> impl Iterator<Item = (&Node, Option<&str>)> {
    let existing = ledger
        .all_node_states()
        .filter(|node_state| node_state.exists());
    existing.map(|node_state| {
        let node = node_state.view();
        (node, ledger.pool_of(&node.name).map(|pool| &*pool.name))
    })
}

impl DeviceUsage<'_> {
    /// VRAM that pods may be allocated; none where a DRA driver allocates it.
    pub fn allocatable(&self, node: &Node) -> Bytes {
        if node.kind == NodeKind::Dra {
            Bytes::ZERO
        } else {
            self.gpu.capacity
        }
    }
}

impl ClassUsage {
    fn add(&mut self, pod_state: &PodState, vram: Bytes, pending: Option<Millis>) {
        self.allocated += vram;
        if pod_state.borrows() {
            self.borrowed += vram;
        }
        self.bound += u64::from(matches!(pod_state.phase, PodPhase::Bound(_)));
        if let Some(age) = pending {
            self.pending += 1;
            self.oldest_pending = self.oldest_pending.max(age);
        }
    }
}

impl TenantShare {
    fn from_tenant(tenant: &Tenant) -> Self {
        // A guarantee that names GPUs only does not limit VRAM.
        let guarantee = Some(tenant.guarantee.vram).filter(|vram| vram.0 < u64::MAX);
        Self {
            name: tenant.name.clone(),
            allocated: Bytes::ZERO,
            guarantee,
            borrowed: Bytes::ZERO,
            limit: tenant.limit.vram,
            pending: 0,
        }
    }

    fn update_borrowed(&mut self) {
        self.borrowed = self
            .guarantee
            .map_or(Bytes::ZERO, |guarantee| self.allocated.minus(guarantee));
    }
}

/// When a pod began to wait for Stowage; `None` if it does not. A pod behind the gate of another waits for that one; and one that
/// asks a device plugin may be another scheduler's until it was refused here.
fn pending_since(pod_state: &PodState) -> Option<Moment> {
    let waiting = match &pod_state.phase {
        PodPhase::Waiting(waiting) => waiting,
        PodPhase::Assumed(assumed) => &assumed.before,
        PodPhase::Bound(_) => return None,
    };
    let is_ours = !pod_state.demand.is_allocated_externally() || waiting.unplaced_since.is_some();
    let is_pending = is_ours && waiting.gate != SchedulingGate::Others;
    is_pending.then(|| {
        waiting
            .unplaced_since
            .unwrap_or(waiting.since)
            .min(waiting.since)
    })
}

#[cfg(test)]
mod tests;
