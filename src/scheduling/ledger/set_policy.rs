//! Another policy for the same books.
//!
//! Judging every pod anew may take a while, and nobody should wait for it: [`Ledger::to_classify`] gives out what they show,
//! someone judges them beside the lock, and [`Ledger::set_policy`] changes everything in one step, judging itself only who came
//! in between. So every decision is made by one policy or by the other.

use super::Ledger;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::classification::{Classification, PodTraits};
use crate::units::Moment;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What pods that show the same are judged to be.
pub type Classifications = FxHashMap<Arc<PodTraits>, Classification>;

impl Ledger {
    /// What all pods show.
    pub fn to_classify(&self) -> Vec<Arc<PodTraits>> {
        self.pod_states.in_no_order().map(|(_, pod_state)| pod_state.demand.traits.clone()).collect()
    }

    /// `policy` is in force from here on, with a new version. What is bound stays bound, whatever it says; it counts as what it
    /// is now. `classified` may lack some.
    pub(in crate::scheduling) fn set_policy(&mut self, mut policy: Policy, classified: &Classifications) {
        let version = self.policy.version + 1;
        policy.version = version;
        self.pod_states.change_each(|pod_state| {
            let demand = &mut pod_state.demand;
            let known =
                classified.get(&demand.traits).map(|judgement| Classification { version, ..*judgement });
            demand.take(known.unwrap_or_else(|| policy.classify(&demand.traits)));
        });
        let before = std::mem::replace(&mut self.policy, Arc::new(policy));
        self.ordered.move_to(&before, &self.policy);
        // They name tenants of the old policy.
        self.reserved.clear();
        self.take_packing();
        // The sums are by tenants of the old policy.
        self.usage.clear();
        let names: Vec<NodeName> = self.node_states.keys().cloned().collect();
        for name in &names {
            self.node_states.get_mut(name).expect("it was just listed").usage.clear();
        }
        self.aging.clear();
        for name in &names {
            let node_state = self.node_states.get_mut(name).expect("it was just listed");
            node_state.admission = self.policy.admission(&node_state.labels);
            self.note_age(name);
            self.refresh(name);
        }
        self.requeue_all();
    }

    /// The labels of a node, by which it is in a pool.
    #[cfg(test)]
    pub(in crate::scheduling) fn set_labels(&mut self, name: &NodeName, labels: BTreeMap<String, String>) {
        self.share_labels(name, Arc::new(labels));
    }

    /// The same, of labels that others keep, too.
    pub(in crate::scheduling) fn share_labels(
        &mut self,
        name: &NodeName,
        labels: Arc<BTreeMap<String, String>>,
    ) {
        let policy = self.policy.clone();
        let Some(node_state) =
            self.node_states.get_mut(name).filter(|node_state| node_state.labels != labels)
        else {
            return;
        };
        node_state.admission = policy.admission(&labels);
        node_state.labels = labels;
        self.refresh(name);
    }

    /// Since when a bound pod runs, if that is longer than this ledger knows of it.
    pub(super) fn has_run_since(&mut self, uid: &PodUid, started: Moment) {
        use super::PodPhase;
        if let Some(PodPhase::Bound(bound)) =
            self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
        {
            bound.started = bound.started.min(started);
        }
        self.note_disruption_info(uid);
    }
}
