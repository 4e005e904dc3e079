//! One pod's claim to room that others have: what it brings to every node, worked out once, and who may leave for it.

use super::Ledger;
use super::pod_state::{BoundPod, PodPhase, PodState};
use super::tenant_usage::{TenantHold, TenantShares};
use crate::ids::{ModelId, PodUid};
use crate::scheduling::ledger::TenantQuota;
use crate::scheduling::policy::Preemptibility;
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::disruption_info::GroupKey;
use crate::scheduling::vocabulary::model_tier::NodeModel;
use crate::units::Millis;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Of each model, what is nearest to a GPU on any node.
pub type NearestModels = Arc<FxHashMap<ModelId, NodeModel>>;

/// What one pod that wants room brings to every node. It is of the moment at which it was made.
#[derive(Debug, Default)]
pub struct Preemptor {
    pub(in crate::scheduling) uid: Option<PodUid>,
    pub tenancy: TenantShares,
    /// Victims of other pods' holds: their room is not to be had a second time.
    pub(in crate::scheduling) spoken_for: BTreeSet<PodUid>,
    pub(in crate::scheduling) nearest_models: NearestModels,
    pub(in crate::scheduling) tenant: TenantQuota,
    /// Nobody loses its place: whose share it lives on does not matter, nor whether the pod preempts.
    pub(in crate::scheduling) moves: bool,
    /// It is for a hold that an earlier leader made: its victims may have begun to leave.
    pub(in crate::scheduling) adopts: bool,
}

impl Preemptor {
    /// The same preemptor, if every victim fits on another node.
    pub fn moving(self) -> Self {
        Self { tenancy: TenantShares::off(), moves: true, ..self }
    }

    pub(in crate::scheduling) fn adopting(self) -> Self {
        Self { adopts: true, ..self }
    }
}

/// Why a pod does not leave for another.
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
    #[error("its class is not preemptible")]
    Class,
    #[error("it has run for {} s of the {} s that its class gives it", ran.0 / 1000, least.0 / 1000)]
    MinRuntime { ran: Millis, least: Millis },
    #[error("karpenter.sh/do-not-disrupt is set on it")]
    DoNotDisrupt,
    #[error("Kueue manages it")]
    QueueManaged,
    #[error("its tenant's guarantee protects it")]
    Tenant,
    #[error("a member of its {0} cannot be evicted, and a group is evicted together or not at all")]
    Group(GroupKey),
}

/// Whether a pod that is being deleted may be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::scheduling) enum Departure {
    /// Its room is on its way; it may take so long.
    Soon(Millis),
    /// Its grace is long over: something keeps it, and nobody knows for how long.
    Stuck,
}

impl Ledger {
    /// The claim of a pod that waits.
    pub fn preemptor(&self, uid: &PodUid) -> Preemptor {
        self.preemptor_by(uid, self.nearest_models())
    }

    /// The same, for one who knows already where models are.
    pub fn preemptor_by(&self, uid: &PodUid, nearest_models: NearestModels) -> Preemptor {
        Preemptor { nearest_models, ..self.preemptor_without_cost(uid) }
    }

    /// The same, by which nothing is priced.
    pub(in crate::scheduling) fn preemptor_without_cost(&self, uid: &PodUid) -> Preemptor {
        let reservations = self.deadlines.iter().filter(|(_, holder)| holder != uid);
        let reservations = reservations.filter_map(|(_, holder)| self.pod_states.get(holder)?.reservation());
        Preemptor {
            uid: Some(uid.clone()),
            tenancy: self.tenancy(uid),
            spoken_for: reservations.flat_map(|reservation| reservation.victims.iter().cloned()).collect(),
            nearest_models: NearestModels::default(),
            tenant: self.tenant_quota(uid),
            moves: false,
            adopts: false,
        }
    }

    /// Why a pod does not leave for one that would use that much; `None` if it may be evicted. Its group is not asked.
    pub(in crate::scheduling) fn keep_reason(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        preemptor: &Demand,
        wanted: TenantUsage,
        claim: &Preemptor,
    ) -> Option<KeepReason> {
        let keep_reason = self.own_keep_reason(pod_state, preemptor);
        keep_reason.or_else(|| claim.spoken_for.contains(uid).then_some(KeepReason::VictimOfAnother)).or_else(
            || {
                let goes = match claim.tenancy.bond(uid, pod_state) {
                    TenantHold::Loose => true,
                    TenantHold::Borrowed => claim.tenancy.may_reclaim(wanted),
                    TenantHold::Kept => false,
                };
                (!goes).then_some(KeepReason::Tenant)
            },
        )
    }

    /// What the policy and the pod itself say.
    pub(in crate::scheduling) fn own_keep_reason(
        &self,
        pod_state: &PodState,
        preemptor: &Demand,
    ) -> Option<KeepReason> {
        let class = self.policy.class(pod_state.demand.class);
        let PodPhase::Bound(bound) = &pod_state.phase else { return Some(KeepReason::NotBound) };
        let ran = self.now.since(bound.started);
        let reasons = [
            (bound.leaving.is_some(), KeepReason::Deleting),
            (class.eviction == Preemptibility::Never, KeepReason::Class),
            (pod_state.demand.priority >= preemptor.priority, KeepReason::Priority),
            (
                pod_state.disruption_info.do_not_disrupt && class.honors_do_not_disrupt(),
                KeepReason::DoNotDisrupt,
            ),
            (pod_state.disruption_info.queue_managed, KeepReason::QueueManaged),
            (ran < class.min_runtime, KeepReason::MinRuntime { ran, least: class.min_runtime }),
        ];
        reasons.into_iter().find(|(applies, _)| *applies).map(|(_, why)| why)
    }

    pub(in crate::scheduling) fn departure(&self, bound: &BoundPod) -> Option<Departure> {
        let by = bound.leaving?;
        let is_soon = self.now <= by + self.policy.reservation_slack;
        Some(if is_soon { Departure::Soon(by.since(self.now)) } else { Departure::Stuck })
    }

    /// How a pod that is being deleted leaves, if it is one.
    pub(in crate::scheduling) fn departure_of(&self, pod_state: &PodState) -> Option<Departure> {
        match &pod_state.phase {
            PodPhase::Bound(bound) => self.departure(bound),
            _ => None,
        }
    }

    /// Looks at every node.
    pub fn nearest_models(&self) -> NearestModels {
        let mut nearest_models: FxHashMap<ModelId, NodeModel> = FxHashMap::default();
        let rank = |holding: &NodeModel| (holding.tier, holding.bytes);
        for holding in self
            .node_states
            .values()
            .filter(|node_state| node_state.exists)
            .flat_map(|node_state| node_state.view.holdings.iter())
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
