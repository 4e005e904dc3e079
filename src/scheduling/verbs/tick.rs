//! What changes without an object of the cluster: time, leadership, the policy and the packing model.

use super::input::changes;
use crate::ids::{LeaderEpoch, PodUid};
use crate::ledger::{ExpiryResult, OveruseStep, PreparedPolicy, RetiredPolicy};
use crate::placing::learned::PackingModel;
use crate::placing::snapshot::{RetiredSummaries, Snapshot};
use crate::policy::Policy;
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

/// The first few of the deadlines that a [`Tick`] is about. When thousands pass at once, such as those of readings whose agents
/// cannot reach this replica, a request waits for a few and not for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartOfTick {
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
    /// The prepared form of the policy. It follows from the rest, so it is not stored.
    #[serde(skip)]
    pub prepared: Option<PreparedPolicy>,
}

impl From<PreparedPolicy> for PolicySet {
    fn from(prepared: PreparedPolicy) -> Self {
        Self {
            policy: Policy::clone(prepared.policy()),
            prepared: Some(prepared),
        }
    }
}

/// The packing model was learned again from the demand history.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PackingModelLearned(pub PackingModel);

/// A learned packing model, prepared: a snapshot with that model, by which its nodes are summarized beside the lock. It is
/// recorded as [`PackingModelLearned`].
#[derive(Debug)]
pub struct PackingModelPrepared(pub Snapshot);

/// Hands out what is due about pods that use more VRAM than they were granted. Only a leader asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeOveruse;

changes! { cluster,
    ClockAdvanced(now) -> () { cluster.ledger.set_now(now) }
    /// Pods whose reservations ended.
    Tick { now, is_leading } -> Vec<PodUid> {
        if is_leading {
            return cluster.ledger.expire(now);
        }
        cluster.ledger.expire_except_reservations(now);
        Vec::new()
    }
    PartOfTick { now, is_leading } -> ExpiryResult { cluster.ledger.expire_few(now, is_leading) }
    /// All of it counts as done.
    TakeOveruse {} -> Vec<OveruseStep> { cluster.ledger.take_overuse_steps() }
    LeadershipBegan(epoch) -> () { cluster.ledger.begin_leading(epoch) }
    LeadershipEnded {} -> () { cluster.ledger.stop_leading() }
    /// To be dropped beside the lock.
    PolicySet { policy, prepared } -> RetiredPolicy {
        match prepared {
            Some(prepared) => cluster.ledger.install_policy(prepared),
            None => cluster.ledger.set_policy(policy),
        }
    }
    /// To be dropped beside the lock.
    PackingModelPrepared(snapshot) -> RetiredSummaries { cluster.ledger.install_packing_model(snapshot) }
    PackingModelLearned(model) -> () { cluster.ledger.set_packing_model(model) }
}

#[cfg(test)]
mod tests {
    use crate::ledger::Ledger;
    use crate::testkit::{LedgerCluster, demand_of, gpu_at, node, uid};
    use crate::units::Millis;
    use crate::vocabulary::demand::Sharing;

    #[test]
    fn partial_ticks_together_expire_what_one_tick_does_and_each_expires_little() {
        const PODS: usize = 40;
        let mut cluster = LedgerCluster::new(&[("a", 8)]);
        for n in 0..PODS {
            let name = format!("p-{n}");
            cluster.add_waiting(&name, demand_of(1 << 30, 1, Sharing::Shared, 0));
            cluster
                .ledger
                .reserve_softly(&uid(&name), &node("a"), &[gpu_at("a", n as u32 % 8)]);
        }
        let softly_reserved = |ledger: &Ledger| {
            let pods = ledger.pods_in_no_order();
            pods.filter(|(_, pod)| pod.soft_reservation().is_some())
                .count()
        };
        assert_eq!(softly_reserved(&cluster.ledger), PODS);
        let now = cluster.ledger().now() + Millis::seconds(3600);
        let (mut at_once, mut in_parts) = (cluster.ledger.clone(), cluster.ledger.clone());
        at_once.expire(now);
        let mut left = PODS;
        while in_parts.expire_few(now, true).may_be_more {
            let before = std::mem::replace(&mut left, softly_reserved(&in_parts));
            assert!(
                left < before && before - left < PODS / 2,
                "{before} before, {left} after"
            );
        }
        assert_eq!(
            [softly_reserved(&at_once), softly_reserved(&in_parts)],
            [0, 0]
        );
        assert_eq!(at_once.snapshot().nodes(), in_parts.snapshot().nodes());
    }
}
