//! Pending pods as the planner works them off: which are due, what became of each, their reservations, and the evictions for
//! them.

use super::input::changes;
use super::{Change, Cluster};
use crate::ids::PodUid;
use crate::ledger::evictions::{EvictionLimit, ScopeKey};
use crate::ledger::{AllocationFailure, Ledger, PendingPod};
pub(crate) use crate::planning::LoansRecalled;
use crate::planning::{EvictionRight, PlannedPlacement};
use crate::units::Moment;
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Hands out pods that are due, at most `limit` of the refused and as many of the gated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakePending {
    pub limit: usize,
}

/// These pods were handed out and nothing was decided about them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutBack(pub Vec<PodUid>);

/// The pod was nominated or touched, so that kube-scheduler tries it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRequeued(pub PodUid);

/// There was no placement for the pod in the cluster of this generation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoPlacementFound {
    pub uid: PodUid,
    pub generation: u64,
}

/// The placements of one plan step, all or none: of one pod, or of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservePlaces {
    #[serde(rename = "places")]
    pub placements: Vec<PlannedPlacement>,
    /// The generation that was planned on.
    pub generation: u64,
}

/// Why no pod has a reservation from a plan step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepRefusal {
    /// Others were evicted since the plan was begun, or the policy allows fewer evictions.
    #[error("{0}")]
    EvictionLimit(EvictionLimit),
    #[error("the policy moves no pods any more")]
    ConsolidationOff,
    #[error("{0}")]
    AssumeFailed(#[from] AllocationFailure),
}

/// A previous leader or process may have refused every pending pod. Recordings of earlier builds have it in place of
/// [`MayBeRefused`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllMayBeRefused;

/// Pods that a previous leader or process may have refused, as [`Ledger::possibly_refused_pods`] found them in a copy. A request
/// waits for a few of them and not for all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MayBeRefused {
    pub pods: Vec<PodUid>,
    /// The copy is of then: what this process has refused since stands.
    pub then: Moment,
}

/// GPUs are kept for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    pub uid: PodUid,
    pub reservation: Reservation,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseReservation(pub PodUid);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtendReservation {
    pub uid: PodUid,
    pub until: Moment,
}

/// Hands out the pods whose reservations were made by another leader and could not be adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeUnknownReservations;

/// These evictions count within the eviction rates from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionsOrdered(pub Vec<PodUid>);

/// These evictions were not made, and count no longer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionsNotMade(pub Vec<PodUid>);

/// The pod was evicted; its owner has lost one more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodEvicted(pub PodUid);

/// The pod was to be evicted, and stays because of what it is: nobody's eviction of it would have done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionRefused {
    uid: PodUid,
    why: String,
}

impl EvictionRefused {
    /// An eviction that was refused with this message, cut to what a person reads: a webhook writes what it likes.
    pub fn new(uid: PodUid, why: &str) -> Self {
        const MAX_MESSAGE_BYTES: usize = 256;
        Self {
            uid,
            why: why[..why.floor_char_boundary(MAX_MESSAGE_BYTES)].into(),
        }
    }
}

/// Evictions for the pod did not lead to its binding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionFailed(pub PodUid);

/// A scope's whole minute of evictions is kept for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeReserved {
    pub scope: ScopeKey,
    pub uid: PodUid,
}

changes! { cluster,
    TakePending { limit } -> Vec<PendingPod> { cluster.ledger.pending(limit) }
    PutBack(pods) -> () { cluster.ledger.put_back(&pods) }
    PodRequeued(uid) -> () { cluster.ledger.record_requeue(&uid) }
    NoPlacementFound { uid, generation } -> () { cluster.ledger.record_no_placement(&uid, generation) }
    AllMayBeRefused {} -> () { cluster.ledger.presume_all_refused() }
    MayBeRefused { pods, then } -> () { pods.iter().for_each(|uid| cluster.ledger.presume_refused(uid, then)) }
    Reserve { uid, reservation } -> Result<(), AllocationFailure> { cluster.ledger.reserve(&uid, reservation) }
    ReleaseReservation(uid) -> () { cluster.ledger.release_reservation(&uid) }
    ExtendReservation { uid, until } -> () { cluster.ledger.extend_reservation(&uid, until) }
    TakeUnknownReservations {} -> BTreeSet<PodUid> { cluster.ledger.take_unknown_reservations() }
    EvictionsOrdered(pods) -> () { cluster.ledger.record_evictions(&pods) }
    EvictionsNotMade(pods) -> () { cluster.ledger.take_back_evictions(&pods) }
    PodEvicted(uid) -> () { cluster.ledger.record_owner_eviction(&uid) }
    EvictionRefused { uid, why } -> () { cluster.ledger.record_eviction_refusal(&uid, &why) }
    EvictionFailed(uid) -> () { cluster.ledger.record_failed_eviction(&uid) }
    ScopeReserved { scope, uid } -> () { cluster.ledger.reserve_scope(scope, &uid) }
    LoansRecalled { end, begin } -> () {
        cluster.ledger.set_recalled(&end, false);
        cluster.ledger.set_recalled(&begin, true);
    }
}

impl Change for ReservePlaces {
    /// A placement because of which the step is refused, by its index, and why.
    type Output = Result<(), (usize, StepRefusal)>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let Self {
            placements,
            generation,
        } = self;
        let ledger = &mut cluster.ledger;
        let checked = check_step(ledger, &placements).map_err(|refusal| (0, refusal));
        let result = checked.and_then(|()| reserve_all(ledger, &placements));
        match result {
            Ok(()) => placements
                .iter()
                .for_each(|placement| ledger.record_evictions(&placement.reservation.victims)),
            Err(_) => placements
                .iter()
                .for_each(|placement| ledger.record_no_placement(&placement.uid, generation)),
        }
        result
    }
}

/// Whether the policy in force lets the victims of a step be evicted: all together, as they were planned.
fn check_step(ledger: &Ledger, placements: &[PlannedPlacement]) -> Result<(), StepRefusal> {
    let is_moving = placements
        .iter()
        .any(|placement| placement.by == EvictionRight::Moves);
    if is_moving && ledger.policy().planning.consolidation.is_none() {
        return Err(StepRefusal::ConsolidationOff);
    }
    let victims: BTreeSet<&PodUid> = placements
        .iter()
        .flat_map(|placement| placement.reservation.victims.iter())
        .collect();
    let victims: Vec<PodUid> = victims.into_iter().cloned().collect();
    ledger
        .eviction_limit(&victims)
        .map_or(Ok(()), |limit| Err(StepRefusal::EvictionLimit(limit)))
}

/// Takes all placements, or none.
fn reserve_all(
    ledger: &mut Ledger,
    placements: &[PlannedPlacement],
) -> Result<(), (usize, StepRefusal)> {
    for (index, placement) in placements.iter().enumerate() {
        if let Err(reason) = placement.reserve_in(ledger) {
            placements[..index]
                .iter()
                .for_each(|reserved| ledger.release_reservation(&reserved.uid));
            return Err((index, reason.into()));
        }
    }
    Ok(())
}
