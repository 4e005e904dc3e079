//! Both sides of a preemption. The search is [`crate::evicting`]'s.
//!
//! - [`Preemptor`]: what is the same for the pod that preempts on every node, worked out once, and which pods may be evicted for it;
//! - [`PotentialVictim`]: what a pod has on its node, and what becomes free with it. A reservation is checked by the same arithmetic
//!   that a search for victims uses.

use super::evictions::EvictionRefusal;
use super::node_state::NodeState;
use super::pod_state::PodState;
use super::quotas::{QuotaStatus, TenantShares};
use super::{Ledger, TenantQuota};
use crate::ids::{ModelId, NodeName, PodUid};
use crate::kube_filters::FilterSnapshot;
use crate::kube_filters::volumes::VolumeIndex;
use crate::policy::{KueueRule, Preemptibility};
use crate::units::{Bytes, Millis, Percent, plural};
use crate::vocabulary::classification::{ClassId, ClassSet, TenantId};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::disruption_info::{GroupKey, Replacement};
use crate::vocabulary::gpu::{ClassExclusion, Gpu, GpuSet};
use crate::vocabulary::is_default;
use crate::vocabulary::model_tier::NodeModel;
use crate::vocabulary::node_reading::EngineLoad;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Clock skew that is tolerated: the API server tells the end of a grace period by its own clock, to the second.
pub(super) const CLOCK_SKEW_ALLOWANCE: Millis = Millis::seconds(5);

/// The copy of each model that is nearest to a GPU, over all nodes.
pub(crate) type NearestModels = Arc<FxHashMap<ModelId, NodeModel>>;

/// The pod that preempts, with what is the same for it on every node, as of when this was made.
#[derive(Debug, Default)]
pub struct Preemptor {
    uid: Option<PodUid>,
    tenant_shares: TenantShares,
    /// Victims of other pods' reservations: their VRAM is not available a second time.
    victims_of_others: BTreeSet<PodUid>,
    nearest_models: NearestModels,
    /// Which pods have volumes that only one node reaches.
    volumes: Arc<VolumeIndex>,
    quota: TenantQuota,
    /// Its victims are moved to other nodes: whose quota they use does not matter, nor whether the pod may preempt.
    is_moving_victims: bool,
    /// It is for a reservation that an earlier leader made: its victims may have begun to leave.
    is_adopting: bool,
}

impl Preemptor {
    /// This preemptor, on the condition that every victim fits on another node.
    pub(crate) fn with_moved_victims(self) -> Self {
        Self {
            tenant_shares: TenantShares::disabled(),
            is_moving_victims: true,
            ..self
        }
    }

    /// This preemptor, with the volumes of the filters' view.
    pub(crate) fn with_volumes(self, kube_filters: &FilterSnapshot) -> Self {
        Self {
            volumes: kube_filters.volumes().clone(),
            ..self
        }
    }

    /// This preemptor, for a reservation that an earlier leader made for it.
    pub(super) fn for_adoption(self) -> Self {
        Self {
            is_adopting: true,
            ..self
        }
    }

    /// The pod's UID; `None` for a preemptor that only prices evictions.
    pub(crate) fn uid(&self) -> Option<&PodUid> {
        self.uid.as_ref()
    }

    pub(crate) fn tenant_shares(&self) -> &TenantShares {
        &self.tenant_shares
    }

    /// Victims of other pods' reservations, in order of UID.
    pub(crate) fn victims_of_others(&self) -> &BTreeSet<PodUid> {
        &self.victims_of_others
    }

    /// Where the model is nearest to a GPU, on any node.
    pub(crate) fn nearest_holding(&self, model: &ModelId) -> Option<&NodeModel> {
        self.nearest_models.get(model)
    }

    /// Whether what replaces the pod could run on its node only, as far as is known.
    pub(crate) fn would_strand(&self, pod_state: &PodState) -> bool {
        let info = &pod_state.disruption_info;
        info.replacement == Replacement::SameNode
            || self
                .volumes
                .has_single_node_volume(&pod_state.key.namespace, &info.claims)
    }

    pub(crate) fn quota(&self) -> TenantQuota {
        self.quota
    }

    pub(super) fn is_moving_victims(&self) -> bool {
        self.is_moving_victims
    }

    pub(super) fn is_adopting(&self) -> bool {
        self.is_adopting
    }
}

/// Why a pod is not evicted for another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeepReason {
    #[error("it is not bound yet")]
    NotBound,
    #[error("its GPUs are unknown")]
    Unplaced,
    #[error("it is already being deleted")]
    Deleting,
    #[error("another pod's reservation already evicts it")]
    VictimOfAnother,
    #[error("its priority is not lower")]
    Priority,
    #[error(
        "it is a static pod: the kubelet runs it from a file, and an eviction would free nothing"
    )]
    Static,
    #[error("its class is not preemptible")]
    Class,
    #[error("it has run for {} s of the {} s that its class gives it", ran.0 / 1000, least.0 / 1000)]
    MinRuntime { ran: Millis, least: Millis },
    #[error("karpenter.sh/do-not-disrupt is set on it")]
    DoNotDisrupt,
    #[error("Kueue manages it")]
    QueueManaged,
    #[error("it may take {} s to end after it is told to", grace.0 / 1000)]
    Grace { grace: Millis },
    #[error("its eviction was refused, and is tried again in {} s: {why}", again.0.div_ceil(1000))]
    EvictionRefused { why: Arc<str>, again: Millis },
    #[error("its tenant's guarantee protects it")]
    Tenant,
    #[error("PodDisruptionBudget {name} covers it and allows {} now", plural(*allowed, "disruption"))]
    Budget { name: String, allowed: u32 },
    #[error("several PodDisruptionBudgets cover it, and the Eviction API evicts no such pod")]
    Budgets,
    #[error("a member of its {0} cannot be evicted, and a group is evicted together or not at all")]
    Group(GroupKey),
}

/// Whether a pod that is being deleted may be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    /// Its VRAM becomes free; that may take so long.
    Soon(Millis),
    /// It has been given longer than its class allows. It is a victim like one that stays: an eviction makes the time shorter. The
    /// Eviction API asks no disruption budget about a pod that is being deleted.
    Late,
    /// Its grace period is long over, and something keeps it.
    Stuck,
}

impl Ledger {
    /// A pod that waits, as a preemptor.
    pub fn preemptor(&self, uid: &PodUid) -> Preemptor {
        self.preemptor_with_models(uid, self.nearest_models())
    }

    /// A preemptor without a pod, to price evictions with.
    pub(crate) fn pricing_preemptor(&self) -> Preemptor {
        Preemptor {
            nearest_models: self.nearest_models(),
            ..Preemptor::default()
        }
    }

    /// A waiting pod as a preemptor, for a caller that has the nearest models already.
    pub(crate) fn preemptor_with_models(
        &self,
        uid: &PodUid,
        nearest_models: NearestModels,
    ) -> Preemptor {
        Preemptor {
            nearest_models,
            ..self.preemptor_without_cost(uid)
        }
    }

    /// A waiting pod as a preemptor that prices no eviction.
    pub(crate) fn preemptor_without_cost(&self, uid: &PodUid) -> Preemptor {
        let others = self
            .pod_states
            .reservations()
            .filter(|(other, ..)| *other != uid);
        Preemptor {
            uid: Some(uid.clone()),
            tenant_shares: self.tenant_shares(uid),
            victims_of_others: others
                .flat_map(|(.., reservation)| reservation.victims.iter().cloned())
                .collect(),
            nearest_models: NearestModels::default(),
            volumes: Arc::default(),
            quota: self.tenant_quota(uid),
            is_moving_victims: false,
            is_adopting: false,
        }
    }

    /// Why a pod may not be evicted for `preemptor`, which requests `requested`; `None` if it may be. Its group is not considered.
    pub(crate) fn keep_reason(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        demand: &Demand,
        requested: TenantUsage,
        preemptor: &Preemptor,
    ) -> Option<KeepReason> {
        let keep_reason = self.intrinsic_keep_reason(pod_state, demand);
        keep_reason
            .or_else(|| {
                preemptor
                    .victims_of_others
                    .contains(uid)
                    .then_some(KeepReason::VictimOfAnother)
            })
            .or_else(|| {
                self.is_kept_by_tenant(uid, pod_state, requested, &preemptor.tenant_shares)
                    .then_some(KeepReason::Tenant)
            })
    }

    /// The part of [`Self::keep_reason`] that follows from the policy and the pod itself.
    pub(crate) fn intrinsic_keep_reason(
        &self,
        pod_state: &PodState,
        demand: &Demand,
    ) -> Option<KeepReason> {
        let class = self.policy.class(pod_state.demand.class);
        let Some(bound) = pod_state.bound() else {
            return Some(KeepReason::NotBound);
        };
        let ran = self.now.since(bound.started);
        let reasons = [
            (!self.is_staying(pod_state), KeepReason::Deleting),
            (pod_state.disruption_info.is_static(), KeepReason::Static),
            (class.eviction == Preemptibility::Never, KeepReason::Class),
            (
                pod_state.demand.priority >= demand.priority,
                KeepReason::Priority,
            ),
            (
                pod_state.disruption_info.do_not_disrupt && class.honors_do_not_disrupt(),
                KeepReason::DoNotDisrupt,
            ),
            (self.is_left_to_kueue(pod_state), KeepReason::QueueManaged),
            (
                ran < class.min_runtime,
                KeepReason::MinRuntime {
                    ran,
                    least: class.min_runtime,
                },
            ),
        ];
        let refusal = || {
            bound
                .eviction_refusal
                .as_ref()
                .filter(|refusal| refusal.until > self.now)
        };
        reasons
            .into_iter()
            .find(|(applies, _)| *applies)
            .map(|(_, why)| why)
            .or_else(|| {
                let EvictionRefusal { why, until, .. } = &**refusal()?;
                Some(KeepReason::EvictionRefused {
                    why: why.clone(),
                    again: until.since(self.now),
                })
            })
    }

    /// Whether Kueue alone decides about the pod.
    pub(crate) fn is_left_to_kueue(&self, pod_state: &PodState) -> bool {
        pod_state.disruption_info.queue_managed
            && self.policy.preemption.kueue == KueueRule::HandsOff
    }

    /// How a pod that is being deleted leaves; `None` if it is not being deleted.
    pub(crate) fn departure_of(&self, pod_state: &PodState) -> Option<Departure> {
        let by = pod_state.bound()?.leaving?;
        let longest = self.policy.class(pod_state.demand.class).max_grace_period;
        Some(if by > self.now + longest + CLOCK_SKEW_ALLOWANCE {
            Departure::Late
        } else if self.now <= by + self.policy.preemption.reservation_slack {
            Departure::Soon(by.since(self.now))
        } else {
            Departure::Stuck
        })
    }

    /// Whether the pod has its GPUs until it is evicted: it is bound, and not being deleted, or with more time than its class allows.
    pub fn is_staying(&self, pod_state: &PodState) -> bool {
        pod_state.bound().is_some()
            && matches!(self.departure_of(pod_state), None | Some(Departure::Late))
    }

    /// Whether the pod is being deleted, and is waited for.
    pub(crate) fn is_leaving_soon(&self, uid: &PodUid) -> bool {
        let departure = self
            .pod_state(uid)
            .and_then(|pod_state| self.departure_of(pod_state));
        matches!(departure, Some(Departure::Soon(_)))
    }

    /// The copy of each model that is nearest to a GPU. Reads every node.
    pub(crate) fn nearest_models(&self) -> NearestModels {
        let mut nearest_models: FxHashMap<ModelId, NodeModel> = FxHashMap::default();
        let rank = |holding: &NodeModel| (holding.tier, holding.bytes);
        for holding in self
            .node_states
            .all_existing()
            .flat_map(|node_state| node_state.view().holdings.iter())
        {
            match nearest_models.get_mut(&holding.model) {
                Some(nearest) if rank(nearest) >= rank(holding) => {}
                Some(nearest) => *nearest = holding.clone(),
                None => {
                    nearest_models.insert(holding.model.clone(), holding.clone());
                }
            }
        }
        Arc::new(nearest_models)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PotentialVictim {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub per_gpu: Bytes,
    /// VRAM that its processes use beyond its grant, on each of its GPUs at least.
    pub used_beyond_grant: Bytes,
    pub sharing: Sharing,
    /// For how much of the time it has work, as far as that is known.
    pub busy: Percent,
    pub priority: i32,
    pub class: ClassId,
    /// Its tenant: an eviction counts as that tenant's.
    pub tenant: Option<TenantId>,
    pub host_resources: HostResources,
    /// How long it may take to terminate.
    pub grace: Millis,
    pub eviction_cost: PodEvictionCost,
    pub deletion_cost: i32,
    pub quota_status: QuotaStatus,
    /// What its eviction gives back of the quota of the preemptor's tenant.
    pub returned_quota: TenantUsage,
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
    pub(crate) fn potential_victim_on(
        &self,
        uid: &PodUid,
        node: &NodeName,
    ) -> Option<PotentialVictim> {
        self.potential_victim(uid, self.pod_states.get(uid)?, self.node_states.get(node)?)
    }

    /// A pod as a potential victim on this node, without its eviction cost; `None` if it is not placed there.
    pub(crate) fn potential_victim(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
    ) -> Option<PotentialVictim> {
        let charge = node_state
            .charge_of(pod_state)
            .filter(|charge| charge.is_placed)?;
        Some(self.potential_victim_at(uid, pod_state, node_state, charge.gpus))
    }

    pub(crate) fn potential_victim_at(
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
            busy: node_state
                .resident_of(uid)
                .map_or(Percent::FULL, |resident| node_state.busy_of(resident)),
            priority: pod_state.demand.priority,
            class: pod_state.demand.class,
            tenant: pod_state.demand.tenant,
            host_resources: pod_state.demand.host_resources,
            grace: self.termination_time(pod_state),
            eviction_cost: PodEvictionCost::default(),
            deletion_cost: pod_state.disruption_info.deletion_cost,
            quota_status: QuotaStatus::Borrowed { spared: 0 },
            returned_quota: TenantUsage::default(),
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
            .departed_with_memory(since)
            .map(|(uid, gpus, used)| PotentialVictim {
                uid: uid.clone(),
                gpus,
                per_gpu: Bytes::ZERO,
                used_beyond_grant: used,
                busy: Percent::FULL,
                sharing: Sharing::Shared,
                priority: i32::MIN,
                class: ClassId::default(),
                tenant: None,
                host_resources: HostResources::default(),
                grace: Millis::default(),
                eviction_cost: PodEvictionCost::default(),
                deletion_cost: 0,
                quota_status: QuotaStatus::Borrowed { spared: 0 },
                returned_quota: TenantUsage::default(),
                budgets: Vec::new(),
                gang: None,
                has_ended: true,
            })
    }

    /// The grace period with which the pod is evicted.
    pub fn eviction_grace(&self, pod_state: &PodState) -> Millis {
        self.policy
            .class(pod_state.demand.class)
            .eviction_grace_period(pod_state.demand.grace)
    }

    /// How long a pod may take to terminate: its grace period and its class's drain time.
    pub(crate) fn termination_time(&self, pod_state: &PodState) -> Millis {
        self.eviction_grace(pod_state) + self.policy.class(pod_state.demand.class).drain_time
    }
}

/// What a pod's eviction gives back of the quota of the preemptor's tenant.
pub(crate) fn returned_quota(
    pod_state: &PodState,
    used: TenantUsage,
    preemptor: &Demand,
) -> TenantUsage {
    let is_same_tenant =
        pod_state.demand.tenant.is_some() && pod_state.demand.tenant == preemptor.tenant;
    if is_same_tenant {
        used
    } else {
        TenantUsage::default()
    }
}

/// Admits the classes that no remaining pod excludes.
pub(crate) fn recompute_class_exclusions(
    class_exclusions: &[ClassExclusion],
    gpus: &mut [Gpu],
    has_left: impl Fn(&PodUid) -> bool,
) {
    if class_exclusions.is_empty() {
        return;
    }
    gpus.iter_mut()
        .for_each(|gpu| gpu.excluded_classes = ClassSet::NONE);
    for class_exclusion in class_exclusions
        .iter()
        .filter(|class_exclusion| !has_left(&class_exclusion.uid))
    {
        class_exclusion.gpus.iter().for_each(|index| {
            gpus[index].excluded_classes =
                gpus[index].excluded_classes.union(class_exclusion.classes)
        });
    }
}

/// Removes a pod: its allocation becomes free, its usage beyond that is given back, and a GPU without pods has no busy engine.
pub fn discharge(gpus: &mut [Gpu], victim: &PotentialVictim) {
    for index in victim.gpus.iter() {
        let gpu = &mut gpus[index];
        if !victim.has_ended {
            gpu.discharge(victim.per_gpu, victim.sharing, victim.busy);
        }
        gpu.unaccounted_vram = gpu.unaccounted_vram.minus(victim.used_beyond_grant);
        if gpu.residents == 0 {
            gpu.engine_load = EngineLoad::NONE;
            gpu.starting = false;
        }
    }
}
