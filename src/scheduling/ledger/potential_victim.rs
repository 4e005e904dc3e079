//! A pod as a potential victim: what it has on its node, and what becomes free with it. A reservation is checked by the same
//! arithmetic that a search for victims uses.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::PodState;
use super::tenant_usage::QuotaStatus;
use crate::ids::{NodeName, PodUid};
use crate::units::{Bytes, Millis};
use crate::vocabulary::classification::{ClassId, ClassSet, TenantId};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::{ClassExclusion, Gpu, GpuSet};
use crate::vocabulary::is_default;
use crate::vocabulary::node_reading::EngineLoad;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PotentialVictim {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub per_gpu: Bytes,
    /// VRAM that its processes use beyond its grant, on each of its GPUs at least.
    pub used_beyond_grant: Bytes,
    pub sharing: Sharing,
    pub priority: i32,
    pub class: ClassId,
    /// Its tenant: an eviction counts as that tenant's.
    pub tenant: Option<TenantId>,
    pub host_resources: HostResources,
    /// How long it may take to terminate.
    pub grace: Millis,
    pub eviction_cost: PodEvictionCost,
    pub deletion_cost: i32,
    pub standing: QuotaStatus,
    /// What its eviction gives back of the quota of the preemptor's tenant.
    pub given_back: TenantUsage,
    /// The budgets that cover it, as indices into `PreemptionCandidate::budgets`.
    pub budgets: Vec<u16>,
    /// Its group, as an index into `PreemptionCandidate::gangs`.
    pub gang: Option<u16>,
    /// The pod has ended: nothing is allocated to it, and only its memory is there still.
    pub has_ended: bool,
}

/// What the eviction of one pod loses, by part, each in thousandths of a GPU-second.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub struct PodEvictionCost {
    /// Stopping it, and placing and starting it again.
    pub restart: u64,
    /// Work since its last checkpoint, up to the limit of its class.
    pub work: u64,
    /// Its GPUs while its model loads again, on the node where that is quickest.
    pub reload: u64,
    /// Its GPUs while it terminates: its grace period, and the extra time of its class.
    pub drain: u64,
    /// Requests in flight of its engine: their KV cache is lost.
    pub in_flight: u64,
    /// A surcharge because its owner has lost other pods to eviction recently.
    pub again: u64,
    /// Its GPUs while it waits for its node, the only one that its replacement could run on.
    #[serde(default, skip_serializing_if = "is_default")]
    pub stranded: u64,
}

impl PotentialVictim {
    pub fn vram(&self) -> Bytes {
        self.per_gpu.times(u64::from(self.gpus.len()))
    }
}

impl PodEvictionCost {
    pub fn total(&self) -> u64 {
        let Self {
            restart,
            work,
            reload,
            drain,
            in_flight,
            again,
            stranded,
        } = *self;
        [restart, work, reload, drain, in_flight, again, stranded]
            .into_iter()
            .fold(0, u64::saturating_add)
    }
}

impl Ledger {
    /// A pod as a potential victim on its node, if it is placed there.
    pub(crate) fn resident_on(&self, uid: &PodUid, node: &NodeName) -> Option<PotentialVictim> {
        self.resident(uid, self.pod_states.get(uid)?, self.node_states.get(node)?)
    }

    /// The same, without its price.
    pub(crate) fn resident(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
    ) -> Option<PotentialVictim> {
        let charge = node_state
            .charge_of(pod_state)
            .filter(|charge| charge.placed)?;
        Some(self.resident_at(uid, pod_state, node_state, charge.gpus))
    }

    pub(crate) fn resident_at(
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
                Sharing::Shared => {
                    node_state.used_beyond_grant(uid, pod_state.demand.per_gpu, gpus)
                }
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
            has_ended: false,
        }
    }

    /// Pods that have ended on the node, as victims that leave anyway: one of the next readings shows that their memory is free.
    /// One whose memory is there for longer than a reservation's slack is not waited for.
    pub(crate) fn ended_victims(
        &self,
        node_state: &NodeState,
    ) -> impl Iterator<Item = PotentialVictim> {
        let since = self.now.before(self.policy.preemption.reservation_slack);
        node_state
            .lingering(since)
            .map(|(uid, gpus, used)| PotentialVictim {
                uid: uid.clone(),
                gpus,
                per_gpu: Bytes::ZERO,
                used_beyond_grant: used,
                sharing: Sharing::Shared,
                priority: i32::MIN,
                class: ClassId::default(),
                tenant: None,
                host_resources: HostResources::default(),
                grace: Millis::default(),
                eviction_cost: PodEvictionCost::default(),
                deletion_cost: 0,
                standing: QuotaStatus::Borrowed { spared: 0 },
                given_back: TenantUsage::default(),
                budgets: Vec::new(),
                gang: None,
                has_ended: true,
            })
    }

    /// The grace period with which the pod is evicted.
    pub fn eviction_grace(&self, pod_state: &PodState) -> Millis {
        self.policy
            .class(pod_state.demand.class)
            .grace_period(pod_state.demand.grace)
    }

    /// How long a pod that is asked to leave may take.
    pub(crate) fn time_to_leave(&self, pod_state: &PodState) -> Millis {
        self.eviction_grace(pod_state) + self.policy.class(pod_state.demand.class).drain_time
    }
}

/// What a pod's eviction gives back of the quota of the preemptor's tenant.
pub(crate) fn given_back(
    pod_state: &PodState,
    used: TenantUsage,
    preemptor: &Demand,
) -> TenantUsage {
    let is_own = pod_state.demand.tenant.is_some() && pod_state.demand.tenant == preemptor.tenant;
    if is_own { used } else { TenantUsage::default() }
}

/// Admits the classes that no remaining pod excludes.
pub(crate) fn settle_class_exclusions(
    class_exclusions: &[ClassExclusion],
    state: &mut [Gpu],
    has_left: impl Fn(&PodUid) -> bool,
) {
    if class_exclusions.is_empty() {
        return;
    }
    state
        .iter_mut()
        .for_each(|gpu| gpu.excluded_classes = ClassSet::NONE);
    for class_exclusion in class_exclusions
        .iter()
        .filter(|class_exclusion| !has_left(&class_exclusion.uid))
    {
        class_exclusion.gpus.iter().for_each(|place| {
            state[place].excluded_classes =
                state[place].excluded_classes.with(class_exclusion.classes)
        });
    }
}

/// Removes a pod: its allocation becomes free, its usage beyond that is given back, and a GPU without pods has no busy engine.
pub fn discharge(state: &mut [Gpu], resident: &PotentialVictim) {
    for place in resident.gpus.iter() {
        let gpu = &mut state[place];
        if !resident.has_ended {
            gpu.discharge(resident.per_gpu, resident.sharing);
        }
        gpu.unaccounted_vram = gpu.unaccounted_vram.minus(resident.used_beyond_grant);
        if gpu.tenants == 0 {
            gpu.engine_load = EngineLoad::NONE;
            gpu.starting = false;
        }
    }
}
