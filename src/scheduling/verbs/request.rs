//! The pod of a request, and the view that its decision is made on.

use super::Cluster;
use crate::ids::{NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, ObservedPhase, ObservedWaiting, PodObservation};
use crate::placing::fit::Misfit;
use crate::placing::rank::ScheduleAttempt;
use crate::placing::snapshot::Snapshot;
use crate::policy::Policy;
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::vocabulary::gpu::GpuSet;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The shortlist doubles with every attempt that did not lead to a bind, at most this many times: with four nodes at first, 256
/// nodes are enough for other plugins to find one they accept.
const MAX_DOUBLINGS: u32 = 6;

/// The pod that kube-scheduler asks about, as the request shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbRequest {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub waiting: ObservedWaiting,
    /// What its eviction depends on: the request may come before the watch shows the pod. `None` if that was not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disruption: Option<ObservedDisruptionInfo>,
}

/// Cluster and pod, all of one moment and one policy.
#[derive(Debug, Clone)]
pub struct DecisionView {
    /// The pod, classified by the policy of this view.
    pub request: VerbRequest,
    pub snapshot: Arc<Snapshot>,
    /// The GPUs that are the pod's already, on which node, or why they are not free yet.
    pub reserved_placement: Option<(NodeName, Result<GpuSet, Misfit>)>,
    pub policy: Arc<Policy>,
    /// What the pod's tenant may still use.
    pub allowance: TenantLimit,
    /// How often the pod came back unbound.
    pub tries: u32,
    /// The node it came back from a moment ago.
    pub just_failed: Option<NodeName>,
}

impl VerbRequest {
    /// Adds the pod to the ledger. If the policy has changed since the pod was read, classifies the pod by the new one.
    pub(super) fn record_in(&self, ledger: &mut Ledger) {
        let observation = PodObservation {
            uid: self.uid.clone(),
            key: self.key.clone(),
            demand: self.demand.clone(),
            state: ObservedPhase::Waiting(self.waiting.clone()),
            // That is for what the watch shows.
            observed: None,
        };
        ledger.observe_request(observation, self.disruption.as_ref());
    }

    /// Classifies the pod by `policy` if it was classified by another one.
    pub(super) fn reclassify_by(&mut self, policy: &Policy) {
        if self.demand.classified_by != policy.version {
            self.demand.reclassify(policy.classify(&self.demand.traits));
        }
    }
}

impl DecisionView {
    /// The view of this moment. The ledger keeps no trace of the question.
    pub fn take(cluster: &mut Cluster, mut request: VerbRequest) -> Self {
        let ledger = &mut cluster.ledger;
        let policy = ledger.policy().clone();
        request.reclassify_by(&policy);
        let snapshot = ledger.snapshot();
        request.demand.resolve_model_name(&snapshot);
        request.demand.resolve_weights(&snapshot);
        request.demand = ledger.for_placing(&request.uid, request.demand);
        request.demand.kept = ledger.spare_rules_against(&request.demand);
        Self {
            reserved_placement: ledger.reserved_placement(&request.uid),
            allowance: ledger.tenant_allowance(&request.uid, &request.demand),
            snapshot,
            policy,
            tries: 0,
            just_failed: None,
            request,
        }
    }

    /// The scheduling attempt with the policy's shortlist, doubled for each earlier attempt that did not lead to a bind.
    pub fn attempt(&self) -> ScheduleAttempt<'_> {
        let first = ScheduleAttempt::new(
            &self.policy,
            self.reserved_placement.as_ref(),
            self.allowance,
        );
        ScheduleAttempt {
            limit: first.limit << self.tries.min(MAX_DOUBLINGS),
            just_failed: self.just_failed.as_ref(),
            ..first
        }
    }
}
