//! A pod that preempts: what is the same for it on every node, worked out once, and which pods may be evicted for it.

use super::Ledger;
use super::pod_state::PodState;
use super::refused_evictions::EvictionRefusal;
use super::tenant_usage::TenantShares;
use crate::ids::{ModelId, PodUid};
use crate::kube_filters::FilterSnapshot;
use crate::kube_filters::volumes::VolumeIndex;
use crate::ledger::TenantQuota;
use crate::policy::{KueueRule, Preemptibility};
use crate::units::{Millis, plural};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::{GroupKey, Replacement};
use crate::vocabulary::model_tier::NodeModel;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The end of a grace period is told by the API server's clock, to the second.
pub(super) const CLOCKS_DIFFER: Millis = Millis::seconds(5);

/// Of each model, what is nearest to a GPU on any node.
pub(crate) type NearestModels = Arc<FxHashMap<ModelId, NodeModel>>;

/// A pod that preempts, as every node sees it, at the moment at which this was made.
#[derive(Debug, Default)]
pub struct Preemptor {
    uid: Option<PodUid>,
    tenancy: TenantShares,
    /// Victims of other pods' reservations: their VRAM is not available a second time.
    spoken_for: BTreeSet<PodUid>,
    nearest_models: NearestModels,
    /// By which it is known whose volumes are on one node.
    volumes: Arc<VolumeIndex>,
    quota: TenantQuota,
    /// Its victims are placed elsewhere: whose quota they use does not matter, nor whether the pod may preempt.
    moves: bool,
    /// It is for a reservation that an earlier leader made: its victims may have begun to leave.
    adopts: bool,
}

impl Preemptor {
    /// The same preemptor, if every victim fits on another node.
    pub(crate) fn moving(self) -> Self {
        Self {
            tenancy: TenantShares::off(),
            moves: true,
            ..self
        }
    }

    /// The same preemptor, to which the filters' view shows volumes.
    pub(crate) fn beside_volumes(self, kube_filters: &FilterSnapshot) -> Self {
        Self {
            volumes: kube_filters.volumes().clone(),
            ..self
        }
    }

    /// The same preemptor, for a reservation that it has already.
    pub(super) fn adopting(self) -> Self {
        Self {
            adopts: true,
            ..self
        }
    }

    /// `None` for one of no pod.
    pub(crate) fn uid(&self) -> Option<&PodUid> {
        self.uid.as_ref()
    }

    pub(crate) fn tenancy(&self) -> &TenantShares {
        &self.tenancy
    }

    /// Victims of other pods' reservations, in order of UID.
    pub(crate) fn spoken_for(&self) -> &BTreeSet<PodUid> {
        &self.spoken_for
    }

    /// Where the model is nearest to a GPU, on any node.
    pub(crate) fn nearest(&self, model: &ModelId) -> Option<&NodeModel> {
        self.nearest_models.get(model)
    }

    /// Whether what replaces the pod could run on its node only, as far as is known.
    pub(crate) fn would_strand(&self, pod_state: &PodState) -> bool {
        let info = &pod_state.disruption_info;
        info.replacement == Replacement::SameNode
            || self
                .volumes
                .are_on_one_node(&pod_state.key.namespace, &info.claims)
    }

    pub(crate) fn quota(&self) -> TenantQuota {
        self.quota
    }

    pub(super) fn moves(&self) -> bool {
        self.moves
    }

    pub(super) fn adopts(&self) -> bool {
        self.adopts
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
        self.preemptor_by(uid, self.nearest_models())
    }

    /// One of no pod, by which evictions are priced.
    pub(crate) fn pricing_preemptor(&self) -> Preemptor {
        Preemptor {
            nearest_models: self.nearest_models(),
            ..Preemptor::default()
        }
    }

    /// The same, for a caller that knows already where models are.
    pub(crate) fn preemptor_by(&self, uid: &PodUid, nearest_models: NearestModels) -> Preemptor {
        Preemptor {
            nearest_models,
            ..self.preemptor_without_cost(uid)
        }
    }

    /// The same, by which nothing is priced.
    pub(crate) fn preemptor_without_cost(&self, uid: &PodUid) -> Preemptor {
        let others = self
            .pod_states
            .reservations()
            .filter(|(other, ..)| *other != uid);
        Preemptor {
            uid: Some(uid.clone()),
            tenancy: self.tenancy(uid),
            spoken_for: others
                .flat_map(|(.., reservation)| reservation.victims.iter().cloned())
                .collect(),
            nearest_models: NearestModels::default(),
            volumes: Arc::default(),
            quota: self.tenant_quota(uid),
            moves: false,
            adopts: false,
        }
    }

    /// Why a pod is not evicted for one that would use that much; `None` if it may be evicted. Its group is not considered.
    pub(crate) fn keep_reason(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        preemptor: &Demand,
        wanted: TenantUsage,
        by: &Preemptor,
    ) -> Option<KeepReason> {
        let keep_reason = self.own_keep_reason(pod_state, preemptor);
        keep_reason
            .or_else(|| {
                by.spoken_for
                    .contains(uid)
                    .then_some(KeepReason::VictimOfAnother)
            })
            .or_else(|| {
                self.is_kept_by_tenant(uid, pod_state, wanted, &by.tenancy)
                    .then_some(KeepReason::Tenant)
            })
    }

    /// What the policy and the pod itself say.
    pub(crate) fn own_keep_reason(
        &self,
        pod_state: &PodState,
        preemptor: &Demand,
    ) -> Option<KeepReason> {
        let class = self.policy.class(pod_state.demand.class);
        let Some(bound) = pod_state.bound() else {
            return Some(KeepReason::NotBound);
        };
        let ran = self.now.since(bound.started);
        let reasons = [
            (!self.stays(pod_state), KeepReason::Deleting),
            (pod_state.disruption_info.is_static(), KeepReason::Static),
            (class.eviction == Preemptibility::Never, KeepReason::Class),
            (
                pod_state.demand.priority >= preemptor.priority,
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

    /// How a pod that is being deleted leaves, if it is one.
    pub(crate) fn departure_of(&self, pod_state: &PodState) -> Option<Departure> {
        let by = pod_state.bound()?.leaving?;
        let longest = self.policy.class(pod_state.demand.class).max_grace_period;
        Some(if by > self.now + longest + CLOCKS_DIFFER {
            Departure::Late
        } else if self.now <= by + self.policy.preemption.reservation_slack {
            Departure::Soon(by.since(self.now))
        } else {
            Departure::Stuck
        })
    }

    /// Whether the pod has its GPUs until it is evicted: it is bound, and not being deleted, or with more time than its class allows.
    pub fn stays(&self, pod_state: &PodState) -> bool {
        pod_state.bound().is_some()
            && matches!(self.departure_of(pod_state), None | Some(Departure::Late))
    }

    /// Whether the pod is being deleted, and is waited for.
    pub(crate) fn leaves_soon(&self, uid: &PodUid) -> bool {
        let departure = self
            .pod_state(uid)
            .and_then(|pod_state| self.departure_of(pod_state));
        matches!(departure, Some(Departure::Soon(_)))
    }

    /// Of each model, what is nearest to a GPU. Looks at every node.
    pub(crate) fn nearest_models(&self) -> NearestModels {
        let mut nearest_models: FxHashMap<ModelId, NodeModel> = FxHashMap::default();
        let rank = |holding: &NodeModel| (holding.tier, holding.bytes);
        for holding in self
            .node_states
            .all_existing()
            .flat_map(|node_state| node_state.view().holdings.iter())
        {
            match nearest_models.get_mut(&holding.model) {
                Some(known) if rank(known) >= rank(holding) => {}
                Some(known) => *known = holding.clone(),
                None => {
                    nearest_models.insert(holding.model.clone(), holding.clone());
                }
            }
        }
        Arc::new(nearest_models)
    }
}
