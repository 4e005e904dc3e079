//! Pending pods as the planner works them off: which are due, what became of each, their reservations, and the evictions for
//! them.

use super::{Change, Cluster};
use crate::ids::PodUid;
use crate::scheduling::ledger::eviction_allowance::ScopeKey;
use crate::scheduling::ledger::{AssumeConflict, PendingPod};
pub use crate::scheduling::planning::LoansRecalled;
use crate::scheduling::planning::PlannedPlacement;
use crate::scheduling::vocabulary::placement::Reservation;
use crate::units::Moment;
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
    pub places: Vec<PlannedPlacement>,
    /// The generation that was planned on.
    pub generation: u64,
}

/// A previous leader or process may have refused every pending pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllMayBeRefused;

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

/// The pod was evicted; its owner has lost one more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodEvicted(pub PodUid);

/// Evictions for the pod did not lead to its binding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionFailed(pub PodUid);

/// A scope's whole minute of evictions is kept for the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeReserved {
    pub scope: ScopeKey,
    pub uid: PodUid,
}

impl Change for TakePending {
    type Output = Vec<PendingPod>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        cluster.ledger.pending(self.limit)
    }
}

impl Change for PutBack {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.put_back(&self.0);
    }
}

impl Change for PodRequeued {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.note_woken(&self.0);
    }
}

impl Change for NoPlacementFound {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.note_no_placement(&self.uid, self.generation);
    }
}

impl Change for ReservePlaces {
    /// The first placement that the ledger refuses, by its index, and why. Then no pod has a reservation from this step.
    type Output = Result<(), (usize, AssumeConflict)>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let Self { places, generation } = self;
        let ledger = &mut cluster.ledger;
        for (index, place) in places.iter().enumerate() {
            if let Err(conflict) = place.take(ledger) {
                places[..index].iter().for_each(|reserved| ledger.release_reservation(&reserved.uid));
                places.iter().for_each(|place| ledger.note_no_placement(&place.uid, generation));
                return Err((index, conflict));
            }
        }
        places.iter().for_each(|place| ledger.note_ordered(&place.reservation.victims));
        Ok(())
    }
}

impl Change for AllMayBeRefused {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.suppose_all_refused();
    }
}

impl Change for Reserve {
    type Output = Result<(), AssumeConflict>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        cluster.ledger.reserve(&self.uid, self.reservation)
    }
}

impl Change for ReleaseReservation {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.release_reservation(&self.0);
    }
}

impl Change for ExtendReservation {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.extend_reservation(&self.uid, self.until);
    }
}

impl Change for TakeUnknownReservations {
    type Output = BTreeSet<PodUid>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        cluster.ledger.take_unknown_reservations()
    }
}

impl Change for EvictionsOrdered {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.note_ordered(&self.0);
    }
}

impl Change for PodEvicted {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.note_evicted(&self.0);
    }
}

impl Change for EvictionFailed {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.note_failed_eviction(&self.0);
    }
}

impl Change for LoansRecalled {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.set_recalled(&self.end, false);
        cluster.ledger.set_recalled(&self.begin, true);
    }
}

impl Change for ScopeReserved {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.reserve_scope(self.scope, &self.uid);
    }
}
