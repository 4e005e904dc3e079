//! The `bind` verb: allocates GPUs to the pod under the lock, before its Binding is written. [`binding`](super::binding) tells
//! what follows from the write.

use super::{Change, Cluster};
use crate::ids::{LeaderEpoch, NodeName, PodKey, PodUid};
use crate::ledger::{AllocationFailure, AssumeResult, Ledger};
use crate::policy::{Digest, Mode};
use crate::units::Millis;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::placement::Placement;
use serde::{Deserialize, Serialize};

/// kube-scheduler asks to bind the pod to the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindAsked {
    pub uid: PodUid,
    pub key: PodKey,
    pub node: NodeName,
}

/// A Binding to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindDecision {
    pub placement: Placement,
    pub demand: Demand,
    /// The pod has a reservation, which is over with the Binding.
    pub is_reserved: bool,
    /// The pod's condition shows the reservation, or may: a write ends it.
    pub shows_reservation: bool,
    /// The policy of the decision.
    pub policy: Digest,
    /// The epoch of the decision; `None` for a replica that does not lead.
    pub epoch: Option<LeaderEpoch>,
    /// The GPUs are allocated by this request, not by an earlier one whose Binding may still be written.
    pub is_new: bool,
    /// An engine of its model sleeps on its GPUs that it may wake.
    pub wakes_engine: bool,
    /// Time since the pod was first refused, or first seen behind the planner's gate; zero if it never was.
    pub unplaced_time: Millis,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart where it is made"
)]
pub enum BindAnswer {
    Write(BindDecision),
    AlreadyBound,
}

impl BindAsked {
    /// The request for a pod of the ledger; `None` if it is not there.
    pub fn for_pod(ledger: &Ledger, uid: &PodUid, node: &NodeName) -> Option<Self> {
        let key = ledger.pod_state(uid)?.key.clone();
        Some(Self {
            uid: uid.clone(),
            key,
            node: node.clone(),
        })
    }
}

impl Change for BindAsked {
    type Output = Result<BindAnswer, AllocationFailure>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let ledger = &mut cluster.ledger;
        let pod = ledger
            .pod_state(&self.uid)
            .filter(|pod| pod.key == self.key);
        let pod = pod.ok_or(AllocationFailure::UnknownPod)?;
        let policy = ledger.policy();
        if policy.mode == Mode::Shadow
            && pod.node().is_none()
            && !pod.demand.is_allocated_externally()
        {
            return Err(AllocationFailure::InShadow);
        }
        let now = ledger.now();
        let (demand, policy) = (pod.demand.clone(), policy.digest);
        let is_reserved = pod.reservation().is_some();
        let shows_reservation = ledger.may_show_reservation(&self.uid);
        let unplaced_time = pod
            .unplaced_since()
            .map_or(Millis::default(), |since| now.since(since));
        let (placement, is_new) = match ledger.assume(&self.uid, &self.node)? {
            AssumeResult::Bound => return Ok(BindAnswer::AlreadyBound),
            AssumeResult::New(placement) => (placement, true),
            AssumeResult::InFlight(placement) => (placement, false),
        };
        let wakes_engine = ledger.has_wakeable_engine(&self.uid);
        let epoch = ledger.leader().cloned();
        let decision = BindDecision {
            placement,
            demand,
            is_reserved,
            shows_reservation,
            policy,
            epoch,
            is_new,
            wakes_engine,
            unplaced_time,
        };
        cluster.bindings.begin_write(&self.uid);
        Ok(BindAnswer::Write(decision))
    }
}
