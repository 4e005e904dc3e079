//! Recent demand, and the packing model that is learned from it. Nothing is learned here: a caller that has the time takes the
//! demand history, and brings a packing model.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use crate::placing::learned::{DemandHistory, DemandShape, PackingModel};
use crate::placing::snapshot::{RetiredSummaries, Snapshot};
use crate::policy::{LearningMode, PackingPolicy, PackingRules};
use crate::vocabulary::demand::{Demand, HostResources};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Recent demand, and the packing model in force. The history is shared with copies and with the learning thread.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct PackingState {
    history: Arc<DemandHistory>,
    model: Arc<PackingModel>,
}

impl PackingState {
    /// A state without a learned model, which will remember `window` arrivals.
    pub(super) fn with_window(window: u16) -> Self {
        Self {
            history: Arc::new(DemandHistory::with_window(window)),
            model: Arc::default(),
        }
    }

    /// A copy with the model and without the history: what arrives on a copy of the ledger is no demand.
    pub(super) fn scratch(&self) -> Self {
        Self {
            history: Arc::default(),
            model: self.model.clone(),
        }
    }

    pub(super) fn model(&self) -> &Arc<PackingModel> {
        &self.model
    }

    fn set_next_model(&mut self, model: PackingModel) {
        let generation = self.model.generation() + 1;
        self.model = Arc::new(model.with_generation(generation));
    }
}

impl Ledger {
    /// The demand seen recently.
    pub fn demand_history(&self) -> &Arc<DemandHistory> {
        &self.packing.history
    }

    /// The packing model in force.
    pub fn packing_model(&self) -> &PackingModel {
        &self.packing.model
    }

    /// The demand to learn a packing model from, if that is due: pods that were refused and still wait included.
    pub fn demand_to_learn(&self) -> Option<DemandHistory> {
        self.is_packing_model_due()
            .then(|| self.demand_with_waiting())
    }

    /// The demand seen recently, with the pods that were refused and still wait.
    fn demand_with_waiting(&self) -> DemandHistory {
        let refused = self
            .waiting_pods
            .refused()
            .filter_map(|uid| self.pod_states.get(uid));
        let refused = refused.filter(|pod_state| {
            pod_state.refusal().is_some() && !pod_state.demand.is_allocated_externally()
        });
        DemandHistory::clone(&self.packing.history)
            .with_waiting(refused.map(|pod_state| pod_state.demand.vram()).sum())
    }

    /// Whether the policy packs by a learned model, and enough pods have come to learn it again.
    fn is_packing_model_due(&self) -> bool {
        self.is_packing_learned() && self.packing.history.is_due(self.packing.model.learned_at())
    }

    /// Whether the policy packs by a model that is learned again and again.
    fn is_packing_learned(&self) -> bool {
        let PackingRules {
            policy, learning, ..
        } = self.policy.packing;
        policy == PackingPolicy::Learned && learning == LearningMode::Continuous
    }

    /// From now on placements are scored by this model, unless the policy has changed while it was learned, and asks for none.
    pub(crate) fn set_packing_model(&mut self, packing_model: PackingModel) {
        if self.is_packing_learned() {
            self.replace_packing_model(packing_model);
        }
    }

    /// Puts the model of a copy of the snapshot in force, with the summaries of nodes made by it. Whether these are made, and when the
    /// copy was made, makes no difference to any decision.
    pub(crate) fn install_packing_model(&mut self, summarized: Snapshot) -> RetiredSummaries {
        if !self.is_packing_learned() {
            return summarized.into_summaries();
        }
        self.packing
            .set_next_model(summarized.packing_model().clone());
        self.node_states
            .install_packing_model(self.packing.model.clone(), summarized)
    }

    fn replace_packing_model(&mut self, packing_model: PackingModel) {
        self.packing.set_next_model(packing_model);
        self.node_states
            .set_packing_model(self.packing.model.clone());
    }

    /// Applies the policy's packing rules: the window of the history, and no model where it packs by best fit.
    pub(super) fn apply_packing_policy(&mut self) {
        Arc::make_mut(&mut self.packing.history).set_window(self.policy.packing.window);
        if self.policy.packing.policy == PackingPolicy::BestFit && self.packing.model.is_learned() {
            self.replace_packing_model(PackingModel::default());
        }
    }

    /// CPU and memory that a node has left, without all pods that are observed to be bound there; `None` if that is not known.
    /// Pods that are assumed there are subtracted here.
    pub(crate) fn set_free_host(&mut self, name: &NodeName, free_host: Option<HostResources>) {
        self.node_states
            .set_free_host(name, free_host, &self.pod_states);
    }

    /// Counts the demand of a pod that was never observed before.
    pub(super) fn count_arrival(&mut self, uid: &PodUid, demand: &Demand) {
        if !self.pod_states.contains(uid)
            && let Some(demand_shape) = DemandShape::from_demand(demand)
        {
            Arc::make_mut(&mut self.packing.history).record_arrival(demand_shape);
        }
    }

    /// Counts a pod that is gone: as departed, or as turned away if it was refused.
    pub(super) fn count_departure(&mut self, pod_state: &PodState) {
        if pod_state.demand.is_allocated_externally() {
            return;
        }
        if pod_state.bound().is_some() {
            Arc::make_mut(&mut self.packing.history).record_departure();
        } else if pod_state.refusal().is_some() {
            Arc::make_mut(&mut self.packing.history).record_unmet_demand(pod_state.demand.vram());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ObservedPhase, ObservedWaiting, PodObservation};
    use super::*;
    use crate::ids::PodKey;
    use crate::policy::{Class, Match, NamespaceSelector, Policy};
    use crate::testkit::{LedgerCluster, demand_of, reclassified};
    use crate::verbs::namespaces::NamespaceObserved;
    use crate::verbs::tick::{PackingModelLearned, PackingModelPrepared, PolicySet};
    use crate::vocabulary::classification::PodTraits;
    use crate::vocabulary::demand::Sharing;
    use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
    use crate::vocabulary::node::Node;

    #[test]
    fn a_refused_pod_counts_as_turned_away_while_it_waits_and_when_it_gives_up() {
        let mut ledger = Ledger::default();
        let uids = ["a", "b"].map(|name| PodUid::parse(name).unwrap());
        for uid in &uids {
            let (key, demand) = (
                PodKey::parse("llm", uid.as_str()).unwrap(),
                demand_of(10, 1, Sharing::Shared, 0),
            );
            let state = ObservedPhase::Waiting(ObservedWaiting::default());
            ledger.observe_pod(PodObservation {
                uid: uid.clone(),
                key,
                demand,
                state,
                observed: None,
            });
        }
        assert_eq!(
            ledger.demand_with_waiting().unmet_ratio(),
            0.0,
            "no pod was refused"
        );
        ledger.record_refusal(&uids[0], None);
        assert_eq!(ledger.demand_with_waiting().unmet_ratio(), 0.5, "it waits");
        ledger.release(&uids[0]);
        assert_eq!(
            (
                ledger.demand_history().unmet_ratio(),
                ledger.demand_with_waiting().unmet_ratio()
            ),
            (0.5, 0.5),
            "it gave up"
        );
        ledger.release(&uids[1]);
        assert_eq!(
            ledger.demand_with_waiting().unmet_ratio(),
            0.5,
            "it was never refused"
        );
    }

    /// A node, and what is learned of ten pods that wait.
    fn learned() -> (LedgerCluster, PackingModel) {
        let mut cluster = LedgerCluster::new(&[("a", 4)]);
        (1..=10).for_each(|n| {
            cluster.add_waiting(
                &format!("p-{n}"),
                demand_of(n * (7 << 30), 1, Sharing::Shared, 0),
            )
        });
        let demand_history = cluster
            .ledger()
            .demand_to_learn()
            .expect("ten pods are enough");
        let snapshot = cluster.snapshot();
        let model = PackingModel::learn(
            &demand_history,
            snapshot.nodes().iter().map(Node::node_gpus),
        );
        (cluster, model)
    }

    #[test]
    fn a_learned_model_takes_effect_only_if_the_policy_still_packs_by_it() {
        let best_fit = PackingRules {
            policy: PackingPolicy::BestFit,
            ..PackingRules::default()
        };
        let frozen = PackingRules {
            learning: LearningMode::Frozen,
            ..PackingRules::default()
        };
        for (packing, takes_effect) in [
            (PackingRules::default(), true),
            (best_fit, false),
            (frozen, false),
        ] {
            for is_prepared in [false, true] {
                let (mut cluster, model) = learned();
                let snapshot = Snapshot::clone(&cluster.snapshot())
                    .with_packing_model(Arc::new(model.clone()));
                let mut policy = Policy::default();
                policy.settings.packing = packing;
                cluster.apply(PolicySet {
                    policy,
                    prepared: None,
                });
                match is_prepared {
                    true => drop(cluster.apply(PackingModelPrepared(snapshot))),
                    false => cluster.apply(PackingModelLearned(model)),
                }
                let is_learned = cluster.snapshot().packing_model().is_learned();
                assert_eq!(
                    is_learned, takes_effect,
                    "{packing:?}, prepared: {is_prepared}"
                );
            }
        }
    }

    #[test]
    fn a_prepared_model_summarizes_again_nodes_that_changed_with_a_namespace_label() {
        let selector = NamespaceSelector {
            match_labels: [("team".into(), "a".into())].into(),
            ..Default::default()
        };
        let own = Class {
            matches: Match {
                namespace_selector: Some(selector),
                ..Match::default()
            },
            shares_with: Some(Vec::new()),
            ..Class::new("own")
        };
        let policy = Policy::default()
            .with_classes(vec![own, Class::new("rest")])
            .unwrap();
        let mut cluster = LedgerCluster::with_policy_and_nodes(policy.clone(), &[("a", 4)]);
        let traits = PodTraits {
            namespace: "chat".into(),
            ..PodTraits::default()
        };
        let demand = reclassified(demand_of(20 << 30, 1, Sharing::Shared, 0), traits, &policy);
        cluster.add_running(
            "one",
            ("a", 0),
            demand,
            None,
            ObservedDisruptionInfo::default(),
        );
        let model = learned().1;
        let before = cluster.snapshot();
        let prepared = Snapshot::clone(&before).with_packing_model(Arc::new(model));
        prepared.summarize_nodes();
        let labels = Arc::new([("team".to_owned(), "a".to_owned())].into());
        cluster.apply(NamespaceObserved {
            name: "chat".into(),
            labels,
        });
        drop(cluster.apply(PackingModelPrepared(prepared)));
        let now = cluster.snapshot();
        assert_eq!(now.generations(), before.generations());
        assert_ne!(
            now.nodes()[0],
            before.nodes()[0],
            "the pod shares its GPU with no other class now"
        );
        let anew = now.packing_model().node_summary(now.nodes()[0].node_gpus());
        assert_eq!(format!("{:?}", now.node_summary(0)), format!("{anew:?}"));
    }
}
