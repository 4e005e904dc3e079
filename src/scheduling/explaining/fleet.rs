//! The whole cluster at one moment, for people who look at it: nodes with their GPUs and pods, pods that wait, and what classes
//! and tenants have. The operators' page, `stowage top` and their tests read it; no decision does.
//!
//! Times are moments of the replica's clock, with [`Fleet::now`] beside them, so that a part in which nothing happened is equal
//! to the same part a second ago, and only what changed has to be sent. A name that a user chose (pod, model, class, tenant) is
//! as the user wrote it: what shows it must escape it.
//!
//! It reads a copy of the ledger, so nothing waits for it. Its size follows the cluster's, but for the pods that wait, of which
//! the longest-waiting of the highest priority are listed and the others counted.

pub mod changes;
pub mod history;

use crate::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use crate::ledger::{
    Ledger, NodeState, Occupant, OccupantPhase, PodPhase, PodState, ReservationStatus,
    SchedulingGate,
};
use crate::policy::{Class, Policy};
use crate::units::{Bytes, Micros, Moment, Percent};
use crate::vocabulary::classification::{ClassId, TenantId};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::{Device, Gpu, Health};
use crate::vocabulary::node::{Node, NodeKind};
use crate::vocabulary::node_reading::{Freshness, GpuActivity, GpuReading};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The cluster at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fleet {
    /// The present, by the clock of all moments here.
    pub now: Moment,
    /// In the policy's order.
    pub classes: Vec<FleetClass>,
    /// In the policy's order.
    pub tenants: Vec<FleetTenant>,
    /// In order of name.
    pub nodes: Vec<FleetNode>,
    /// Pods without a node, the highest priority first, then those that wait longest.
    pub pending: Vec<FleetPendingPod>,
    /// Number of all pending pods, listed or not.
    pub pending_count: u64,
}

/// A class of the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetClass {
    pub name: String,
    /// Its pods may be evicted for others.
    pub preemptible: bool,
    /// What its pods have: bound or assumed.
    pub allocated_bytes: Bytes,
    pub pods: u64,
    pub pending: u64,
}

/// A tenant of the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetTenant {
    pub name: String,
    /// What its pods have: bound, assumed or reserved.
    pub used_bytes: Bytes,
    /// GPUs it uses, in thousandths: a pod counts by its part of each GPU's VRAM.
    pub used_milli_gpus: u64,
    /// `None` if its guarantee names GPUs only, or if it has none.
    pub guarantee_bytes: Option<Bytes>,
    pub guarantee_milli_gpus: Option<u64>,
    pub limit_bytes: Option<Bytes>,
    pub limit_milli_gpus: Option<u64>,
    pub pending: u64,
}

/// A node with GPUs, or with pods that ask for them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetNode {
    pub name: NodeName,
    pub kind: NodeKind,
    pub pool: Option<String>,
    /// How far what was measured on it can be believed.
    pub freshness: Freshness,
    /// The policy places nothing here without a recent report.
    pub closed: bool,
    /// In the node's order; a pod names them by their places in this list.
    pub gpus: Vec<FleetGpu>,
    /// In order of UID.
    pub pods: Vec<FleetPod>,
}

/// A GPU or MIG slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetGpu {
    pub uuid: GpuUuid,
    /// NVML's index on its node.
    pub index: u32,
    pub model: GpuModel,
    /// The GPU a MIG slice is cut from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<GpuUuid>,
    pub health: Health,
    pub total_bytes: Bytes,
    /// What pods may have: total, less the driver's reserve and the headroom.
    pub allocatable_bytes: Bytes,
    /// What pods and reservations have.
    pub allocated_bytes: Bytes,
    /// In use beyond what pods have.
    pub unaccounted_bytes: Bytes,
    /// What engines lend.
    pub lendable_bytes: Bytes,
    /// In use by all processes, as last measured; `None` if nothing was.
    pub used_bytes: Option<Bytes>,
    /// KV cache usage of the fullest engine on it, as last read: 0 without engines, `None` if it is unknown.
    pub kv_cache_percent: Option<Percent>,
    /// Requests that wait in the queues of its engines, likewise. Decisions use the average of some seconds.
    pub queue: Option<u32>,
    /// From one output token of a request to the next on the slowest of its engines, over half a minute; `None` if it is unknown.
    #[serde(default)]
    pub time_per_token_micros: Option<Micros>,
    /// How busy it is, by a fresh report.
    #[serde(default)]
    pub activity: GpuActivity,
    /// A pod has it for itself.
    pub exclusive: bool,
    /// An engine starts on it.
    pub starting: bool,
}

/// A pod on a node, or one that has something reserved there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetPod {
    pub uid: PodUid,
    pub pod: PodKey,
    pub class: String,
    pub tenant: Option<String>,
    pub priority: i32,
    pub model: Option<ModelId>,
    /// What it has on each of its GPUs; of an exclusive pod, what it asks for.
    pub bytes_per_gpu: Bytes,
    /// Places in the node's list of GPUs.
    pub gpus: Vec<usize>,
    pub phase: OccupantPhase,
    /// Its engine starts.
    pub starting: bool,
    /// It is being deleted.
    pub leaving: bool,
    /// When it started to run, if that is known.
    pub started: Option<Moment>,
    /// It uses VRAM that engines lend.
    pub borrows: bool,
    /// It runs an engine, or will.
    #[serde(default)]
    pub has_engine: bool,
    /// The least limit in force on one of its GPUs; `None` if none is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<Bytes>,
    /// The most that it uses of one of its GPUs, if a limit is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<Bytes>,
}

/// A pod without a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetPendingPod {
    pub uid: PodUid,
    pub pod: PodKey,
    pub class: String,
    pub tenant: Option<String>,
    pub priority: i32,
    pub model: Option<ModelId>,
    pub bytes_per_gpu: Bytes,
    pub gpus: u32,
    pub gate: SchedulingGate,
    /// When it began to wait.
    pub since: Moment,
    /// It was refused, and has not been placed since.
    pub refused: bool,
    pub reservation: Option<FleetReservation>,
}

/// VRAM that is kept for a pending pod while others leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetReservation {
    pub node: NodeName,
    pub gpus: Vec<GpuUuid>,
    /// Pods that are still there and leave for it.
    pub victims: Vec<PodKey>,
    pub deadline: Moment,
}

impl Fleet {
    /// The cluster as the ledger has it, with at most so many pods that wait.
    pub fn from_ledger(ledger: &Ledger, max_pending: usize) -> Self {
        let policy = &**ledger.policy();
        let mut classes = ClassSums::default();
        let mut waiting = Vec::new();
        for (uid, pod_state) in ledger.pods_in_no_order() {
            let sums = classes.sum_for(pod_state);
            match &pod_state.phase {
                PodPhase::Waiting(pod) => {
                    sums.pending += 1;
                    waiting.push((
                        Reverse(pod_state.demand.priority),
                        pod.since,
                        uid,
                        pod_state,
                    ));
                }
                PodPhase::Assumed(_) | PodPhase::Bound(_) => sums.pods += 1,
            }
        }
        let nodes: Vec<FleetNode> = ledger
            .node_views()
            .filter_map(|(_, node)| Self::node(ledger, node, &mut classes))
            .collect();
        let pending_count = waiting.len() as u64;
        waiting.sort_unstable_by_key(|(priority, since, uid, _)| (*priority, *since, *uid));
        waiting.truncate(max_pending);
        Self {
            now: ledger.now(),
            pending: waiting
                .into_iter()
                .map(|(.., uid, pod)| pending_pod(ledger, uid, pod))
                .collect(),
            pending_count,
            tenants: tenants(ledger, &classes),
            classes: classes.into_fleet_classes(policy),
            nodes,
        }
    }

    /// `None` for a node without GPUs and without pods that ask for them.
    fn node(ledger: &Ledger, node: &Node, classes: &mut ClassSums) -> Option<FleetNode> {
        let occupants = ledger.occupants_of(&node.name);
        if node.gpus.is_empty() && occupants.is_empty() {
            return None;
        }
        for occupant in &occupants {
            if matches!(
                occupant.phase,
                OccupantPhase::Bound | OccupantPhase::Assumed
            ) {
                let charges = occupant
                    .gpus
                    .iter()
                    .filter_map(|gpu_index| node.gpus.get(gpu_index));
                let charged = charges
                    .map(|gpu| gpu.charge_for(occupant.per_gpu, occupant.sharing))
                    .sum();
                classes.add(occupant.class, charged);
            }
        }
        Some(FleetNode {
            name: node.name.clone(),
            kind: node.kind,
            pool: ledger.pool_of(&node.name).map(|pool| pool.name.clone()),
            freshness: node.freshness,
            closed: node.closed,
            gpus: fleet_gpus(ledger, node).collect(),
            pods: occupants
                .into_iter()
                .map(|occupant| fleet_pod(ledger, &node.name, occupant))
                .collect(),
        })
    }
}

/// The GPUs of a node, in its order.
fn fleet_gpus<'l>(ledger: &'l Ledger, node: &'l Node) -> impl Iterator<Item = FleetGpu> + 'l {
    let reading = ledger.reading(&node.name);
    let measured = move |device: &Device| reading?.gpu(&device.uuid);
    let residents = ledger.node_state(&node.name).map(NodeState::residents);
    let somewhere = move || {
        let unplaced = residents.into_iter().flatten().filter(|one| !one.is_placed);
        unplaced.map(|one| (one.per_gpu, one.sharing))
    };
    node.gpus
        .iter()
        .zip(&*node.devices)
        .enumerate()
        .map(move |(index, (gpu, device))| {
            let allocated = allocated_on(gpu, somewhere());
            let on_it = residents.into_iter().flatten();
            let on_it = on_it.filter(|resident| resident.gpus.contains(index));
            let latencies = on_it.filter_map(|resident| reading?.latency_of(&resident.uid));
            FleetGpu {
                time_per_token_micros: latencies.filter_map(|one| one.time_per_token).max(),
                activity: reading
                    .filter(|_| node.freshness == Freshness::Fresh)
                    .and_then(|reading| reading.activities.get(&device.uuid).copied())
                    .unwrap_or_default(),
                ..fleet_gpu(gpu, device, measured(device), allocated)
            }
        })
}

/// What pods are shown to have of a GPU. Those that are `somewhere` on the node count on each of its GPUs, and could be more than
/// one has.
pub(super) fn allocated_on(gpu: &Gpu, somewhere: impl Iterator<Item = (Bytes, Sharing)>) -> Bytes {
    let somewhere: Bytes = somewhere
        .map(|(per_gpu, sharing)| gpu.charge_for(per_gpu, sharing))
        .sum();
    gpu.charged
        .min(gpu.capacity.max(gpu.charged.minus(somewhere)))
}

fn fleet_gpu(
    gpu: &Gpu,
    device: &Device,
    measured: Option<&GpuReading>,
    allocated_bytes: Bytes,
) -> FleetGpu {
    FleetGpu {
        uuid: device.uuid.clone(),
        index: device.index,
        model: device.model.clone(),
        parent: device.parent.clone(),
        health: gpu.health,
        total_bytes: device.total,
        allocatable_bytes: gpu.capacity,
        allocated_bytes,
        unaccounted_bytes: gpu.unaccounted_vram,
        lendable_bytes: gpu.lendable,
        used_bytes: measured.and_then(|gpu| gpu.used),
        kv_cache_percent: measured.and_then(|gpu| gpu.engine_load.occupancy()),
        queue: measured.and_then(|gpu| gpu.engine_load.queue),
        time_per_token_micros: None,
        activity: GpuActivity::default(),
        exclusive: gpu.exclusive,
        starting: gpu.starting,
    }
}

fn fleet_pod(ledger: &Ledger, node: &NodeName, occupant: Occupant) -> FleetPod {
    let pod_state = ledger.expect_pod(&occupant.uid);
    let demand = &pod_state.demand;
    let reading = ledger
        .node_state(node)
        .and_then(NodeState::believed_reading);
    let limits = reading.into_iter().flat_map(|reading| {
        let own = reading
            .limits
            .iter()
            .filter(|limit| limit.pod == occupant.uid);
        own.map(|limit| {
            let gpu = reading.gpu(&limit.gpu);
            (
                limit.limit,
                gpu.and_then(|gpu| gpu.attributed_to(&limit.pod)),
            )
        })
    });
    let (limits, used): (Vec<_>, Vec<_>) = limits.unzip();
    FleetPod {
        class: class_name(ledger.policy(), occupant.class),
        tenant: tenant_name(ledger.policy(), demand.tenant),
        model: demand.model.clone(),
        uid: occupant.uid,
        pod: occupant.key,
        priority: occupant.priority,
        bytes_per_gpu: occupant.per_gpu,
        gpus: occupant.gpus.iter().collect(),
        phase: occupant.phase,
        starting: occupant.starting_until.is_some(),
        leaving: pod_state.is_leaving(),
        started: pod_state.bound().map(|bound| bound.started),
        borrows: pod_state.borrows(),
        has_engine: occupant.has_engine,
        limit_bytes: limits.into_iter().flatten().min(),
        used_bytes: used.into_iter().flatten().max(),
    }
}

fn pending_pod(ledger: &Ledger, uid: &PodUid, pod_state: &PodState) -> FleetPendingPod {
    let demand = &pod_state.demand;
    let (gate, since) = match &pod_state.phase {
        PodPhase::Waiting(waiting) => (waiting.gate, waiting.since),
        // None of these is pending.
        PodPhase::Assumed(_) | PodPhase::Bound(_) => (SchedulingGate::Open, ledger.now()),
    };
    FleetPendingPod {
        uid: uid.clone(),
        pod: pod_state.key.clone(),
        class: class_name(ledger.policy(), demand.class),
        tenant: tenant_name(ledger.policy(), demand.tenant),
        priority: demand.priority,
        model: demand.model.clone(),
        bytes_per_gpu: demand.per_gpu,
        gpus: demand.gpus,
        gate,
        since,
        refused: pod_state
            .refusal()
            .is_some_and(|refused| !refused.is_supposed),
        reservation: ledger.reservation_status_of(uid).map(fleet_reservation),
    }
}

fn fleet_reservation(status: ReservationStatus) -> FleetReservation {
    FleetReservation {
        node: status.reservation.node,
        gpus: status.reservation.devices.to_vec(),
        victims: status
            .remaining
            .into_iter()
            .map(|victim| victim.key)
            .collect(),
        deadline: status.reservation.deadline,
    }
}

fn tenants(ledger: &Ledger, sums: &ClassSums) -> Vec<FleetTenant> {
    let policy = ledger.policy();
    let fleet_tenant = |id: TenantId| {
        let tenant = policy.tenant(id)?;
        let used = ledger.tenant_usage(id);
        // What is not limited is as much as can be written; a guarantee of nothing is none.
        let if_limited = |amount: u64| (amount != 0 && amount != u64::MAX).then_some(amount);
        Some(FleetTenant {
            name: tenant.name.clone(),
            used_bytes: used.vram,
            used_milli_gpus: used.milli_gpus,
            guarantee_bytes: if_limited(tenant.guarantee.vram.0).map(Bytes),
            guarantee_milli_gpus: if_limited(tenant.guarantee.milli_gpus),
            limit_bytes: tenant.limit.vram,
            limit_milli_gpus: tenant.limit.milli_gpus,
            pending: sums.pending_of(id),
        })
    };
    policy.tenant_ids().filter_map(fleet_tenant).collect()
}

fn class_name(policy: &Policy, class: ClassId) -> String {
    policy.class(class).name.clone()
}

fn tenant_name(policy: &Policy, tenant: Option<TenantId>) -> Option<String> {
    Some(policy.tenant(tenant?)?.name.clone())
}

/// What each class has, while it is counted.
#[derive(Debug, Default)]
struct ClassSums {
    by_class: BTreeMap<ClassId, ClassSum>,
    pending_by_tenant: BTreeMap<TenantId, u64>,
}

#[derive(Debug, Default)]
struct ClassSum {
    allocated: Bytes,
    pods: u64,
    pending: u64,
}

impl ClassSums {
    fn sum_for(&mut self, pod_state: &PodState) -> &mut ClassSum {
        if let (PodPhase::Waiting(_), Some(tenant)) = (&pod_state.phase, pod_state.demand.tenant) {
            *self.pending_by_tenant.entry(tenant).or_default() += 1;
        }
        self.by_class.entry(pod_state.demand.class).or_default()
    }

    fn add(&mut self, class: ClassId, charged: Bytes) {
        self.by_class.entry(class).or_default().allocated += charged;
    }

    fn pending_of(&self, tenant: TenantId) -> u64 {
        self.pending_by_tenant.get(&tenant).copied().unwrap_or(0)
    }

    /// Every class of the policy, with pods or without.
    fn into_fleet_classes(mut self, policy: &Policy) -> Vec<FleetClass> {
        let fleet_class = |(index, class): (usize, &Class)| {
            let id = ClassId::from_index(index);
            let sum = self.by_class.remove(&id).unwrap_or_default();
            FleetClass {
                name: class.name.clone(),
                preemptible: policy.is_preemptible(id),
                allocated_bytes: sum.allocated,
                pods: sum.pods,
                pending: sum.pending,
            }
        };
        policy
            .classes()
            .iter()
            .enumerate()
            .map(fleet_class)
            .collect()
    }
}

#[cfg(test)]
mod tests;
