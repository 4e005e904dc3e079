//! What changes without an object of the cluster: time, leadership, the policy and the packing model.

use super::{Change, Cluster};
use crate::ids::{LeaderEpoch, PodUid};
use crate::scheduling::ledger::{Classifications, OveruseStep};
use crate::scheduling::placing::learned::PackingModel;
use crate::scheduling::policy::Policy;
use crate::units::Moment;
use serde::{Deserialize, Serialize};

/// The present. It never goes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockAdvanced(pub Moment);

/// Deadlines up to now have passed: soft reservations, reservations, start gates and readings expire. Reservations stay on a
/// replica that does not lead, until the API server shows that the leader has ended them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tick {
    pub now: Moment,
    pub is_leading: bool,
}

/// This replica leads, and has listed everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeadershipBegan(pub LeaderEpoch);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeadershipEnded;

/// Another policy is in force.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PolicySet {
    pub policy: Policy,
    /// How it classifies the known pods, as far as that was computed beforehand. It follows from the policy, so it is not stored.
    #[serde(skip)]
    pub classified: Classifications,
}

/// What free VRAM is worth was learned anew from the demand history.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PackingModelLearned(pub PackingModel);

/// Hands out what is due about pods that use more VRAM than they were granted. Only a leader asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeOveruse;

impl Change for ClockAdvanced {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.set_now(self.0);
    }
}

impl Change for Tick {
    /// Pods whose reservations ended.
    type Output = Vec<PodUid>;

    fn apply_to(self, cluster: &mut Cluster) -> Vec<PodUid> {
        if self.is_leading {
            cluster.ledger.expire(self.now)
        } else {
            cluster.ledger.expire_except_reservations(self.now);
            Vec::new()
        }
    }
}

impl Change for TakeOveruse {
    /// All of it counts as done.
    type Output = Vec<OveruseStep>;

    fn apply_to(self, cluster: &mut Cluster) -> Vec<OveruseStep> {
        cluster.ledger.take_overuse()
    }
}

impl Change for LeadershipBegan {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.begin_leading(self.0);
    }
}

impl Change for LeadershipEnded {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.stop_leading();
    }
}

impl Change for PolicySet {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.set_policy(self.policy, &self.classified);
    }
}

impl Change for PackingModelLearned {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.ledger.set_packing_model(self.0);
    }
}
