//! A pod as what could leave its node: what it holds there, and what comes free with it. A reservation is checked by the same
//! arithmetic that a search for victims uses.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::PodState;
use super::tenant_usage::QuotaStatus;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::vocabulary::classification::{ClassId, ClassSet, TenantId};
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::scheduling::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::scheduling::vocabulary::gpu::{ClassExclusion, Gpu, GpuSet};
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::units::{Bytes, Millis};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PotentialVictim {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub per_gpu: Bytes,
    /// What its processes have beyond that, on each of its GPUs at least.
    pub used_beyond_grant: Bytes,
    pub sharing: Sharing,
    pub priority: i32,
    pub class: ClassId,
    /// Whose it is: its eviction counts as that tenant's.
    pub tenant: Option<TenantId>,
    pub host_resources: HostResources,
    /// How long it may take to leave.
    pub grace: Millis,
    pub eviction_cost: PodEvictionCost,
    pub deletion_cost: i32,
    pub standing: QuotaStatus,
    /// What it gives back of what the tenant of the one who asks may have.
    pub given_back: TenantUsage,
    /// The budgets that cover it, by their place in `PreemptionCandidate::budgets`.
    pub budgets: Vec<u16>,
    /// Its group, by its place in `PreemptionCandidate::gangs`.
    pub gang: Option<u16>,
}

/// What the eviction of one pod loses, part by part, each in thousandths of a GPU for a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodEvictionCost {
    /// To stop, and to be placed and started again.
    pub restart: u64,
    /// Work since its last checkpoint, up to what its class lets count.
    pub work: u64,
    /// Its GPUs while its model loads again, where that is quickest.
    pub reload: u64,
    /// Its GPUs while it leaves: its grace period, and what its class needs beyond.
    pub drain: u64,
    /// Requests its engine works on: their KV cache goes with it.
    pub in_flight: u64,
    /// Its owner has lost others to eviction lately.
    pub again: u64,
}

impl PotentialVictim {
    pub fn vram(&self) -> Bytes {
        self.per_gpu.times(u64::from(self.gpus.len()))
    }
}

impl PodEvictionCost {
    pub fn total(&self) -> u64 {
        let Self { restart, work, reload, drain, in_flight, again } = *self;
        [restart, work, reload, drain, in_flight, again].into_iter().fold(0, u64::saturating_add)
    }
}

impl Ledger {
    /// A pod as part of what its node holds, if it is placed there.
    pub fn resident_on(&self, uid: &PodUid, node: &NodeName) -> Option<PotentialVictim> {
        self.resident(uid, self.pod_states.get(uid)?, self.node_states.get(node)?)
    }

    /// The same, without its price.
    pub(in crate::scheduling) fn resident(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
    ) -> Option<PotentialVictim> {
        let charge = node_state.charge_of(pod_state).filter(|charge| charge.placed)?;
        Some(self.resident_at(uid, pod_state, node_state, charge.gpus))
    }

    pub(in crate::scheduling) fn resident_at(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
        gpus: GpuSet,
    ) -> PotentialVictim {
        PotentialVictim {
            uid: uid.clone(),
            gpus,
            per_gpu: pod_state.demand.per_gpu,
            // A pod that has its GPUs to itself has all of them: nothing of theirs is beyond it.
            used_beyond_grant: match pod_state.demand.sharing {
                Sharing::Shared => node_state.used_beyond_grant(uid, pod_state.demand.per_gpu, gpus),
                Sharing::Exclusive => Bytes::ZERO,
            },
            sharing: pod_state.demand.sharing,
            priority: pod_state.demand.priority,
            class: pod_state.demand.class,
            tenant: pod_state.demand.tenant,
            host_resources: pod_state.demand.host_resources,
            grace: self.time_to_leave(pod_state),
            eviction_cost: PodEvictionCost::default(),
            deletion_cost: pod_state.disruption_info.deletion_cost,
            standing: QuotaStatus::Borrowed { spared: 0 },
            given_back: TenantUsage::default(),
            budgets: Vec::new(),
            gang: None,
        }
    }

    /// How long a pod that is asked to leave may take.
    pub(in crate::scheduling) fn time_to_leave(&self, pod_state: &PodState) -> Millis {
        pod_state.demand.grace + self.policy.class(pod_state.demand.class).drain_time
    }
}

/// What a pod gives back of what the tenant of the one who asks may have.
pub(in crate::scheduling) fn given_back(
    pod_state: &PodState,
    used: TenantUsage,
    preemptor: &Demand,
) -> TenantUsage {
    let is_own = pod_state.demand.tenant.is_some() && pod_state.demand.tenant == preemptor.tenant;
    if is_own { used } else { TenantUsage::default() }
}

/// Lets in whom nobody bars any more.
pub fn settle_class_exclusions(
    class_exclusions: &[ClassExclusion],
    state: &mut [Gpu],
    has_left: impl Fn(&PodUid) -> bool,
) {
    if class_exclusions.is_empty() {
        return;
    }
    state.iter_mut().for_each(|gpu| gpu.excluded_classes = ClassSet::NONE);
    for class_exclusion in class_exclusions.iter().filter(|class_exclusion| !has_left(&class_exclusion.uid)) {
        class_exclusion.gpus.iter().for_each(|place| {
            state[place].excluded_classes = state[place].excluded_classes.with(class_exclusion.classes)
        });
    }
}

/// The resident leaves: what it was promised is free, what it had beyond that is given back, and where nobody is left no
/// engine is busy.
pub fn discharge(state: &mut [Gpu], resident: &PotentialVictim) {
    for place in resident.gpus.iter() {
        let gpu = &mut state[place];
        gpu.discharge(resident.per_gpu, resident.sharing);
        gpu.unaccounted_vram = gpu.unaccounted_vram.minus(resident.used_beyond_grant);
        if gpu.tenants == 0 {
            gpu.engine_load = EngineLoad::NONE;
            gpu.starting = false;
        }
    }
}
