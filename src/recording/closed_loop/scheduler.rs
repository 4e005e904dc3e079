//! What Stowage decides in a loop, by the functions that decide in the service: `filter` and `bind` for a pod that is asked about,
//! the planner's run for pods that wait, and relief for engines under pressure.

use super::demand::RecordedBinding;
use super::stage::{ClosedLoop, Event, ROUND};
use std::collections::BTreeSet;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{AssumedNodeChange, FilterReason, FilterVerdict};
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::placing::learned::PackingModel;
use stowage_scheduling::planning::{PlanStep, PlannedPlacement, loans_to_end, plan};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked};
use stowage_scheduling::verbs::binding::{BindingAnswer, BindingAnswered, BindingStage};
use stowage_scheduling::verbs::filter::{self, FilterAsked};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::{PackingModelLearned, Tick};
use stowage_scheduling::verbs::wait::{
    EvictionsOrdered, NoPlacementFound, PodEvicted, PodRequeued, ReservePlaces, TakePending,
};
use stowage_scheduling::vocabulary::node::Node;

/// Pods of one planning run.
const PODS_PER_RUN: usize = 2048;
/// A soft reservation lasts no longer: a Binding that took more was about more than this question.
const LONGEST_DELAY: Millis = Millis::seconds(2);

impl ClosedLoop<'_> {
    /// kube-scheduler asks about a pod that has no node, and binds it to the one that is ranked first, as long after that as it
    /// took in the recording: meanwhile it asks about others. A pod that is refused everywhere is the planner's.
    pub(super) fn ask(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid).filter(|pod| pod.place.is_none()) else {
            return;
        };
        let delay = pod.recorded.bind_delay().min(LONGEST_DELAY);
        self.note_came(uid);
        if let Some(node) = self.best(uid) {
            self.at(self.now() + delay, Event::Binds(uid.clone(), node));
        }
    }

    /// The pod is bound there, or goes back to kube-scheduler's queue.
    pub(super) fn take_offer(&mut self, uid: &PodUid, node: &NodeName) {
        let waits = self.pods.get(uid).is_some_and(|pod| pod.place.is_none());
        if waits && !self.bind(uid, node) {
            self.at(self.now() + ROUND, Event::Asks(uid.clone()));
        }
    }

    /// What is done once a second: what is due, relief, the planner's run, and learning.
    pub(super) fn round(&mut self) {
        let now = self.now();
        self.cluster.apply(Tick {
            now,
            is_leading: true,
        });
        self.relieve();
        let over = loans_to_end(&self.cluster, &self.ordered, &BTreeSet::new());
        over.into_iter().for_each(|loan| self.evict(&loan.uid));
        self.plan();
        if let Some(history) = self.cluster.demand_to_learn() {
            let snapshot = self.cluster.snapshot();
            let model = PackingModel::learn(&history, snapshot.nodes().iter().map(Node::node_gpus));
            drop(snapshot);
            self.cluster.apply(PackingModelLearned(model));
        }
    }

    /// The node that filter ranks first, of those that kube-scheduler's own filters accept; `None` if the pod fits nowhere.
    fn best(&mut self, uid: &PodUid) -> Option<NodeName> {
        let state = self.cluster.pod_state(uid)?;
        let reservation = state.reservation().cloned();
        let waiting = ObservedWaiting {
            reservation,
            ..ObservedWaiting::default()
        };
        let (key, demand) = (state.key.clone(), state.demand.clone());
        let request = VerbRequest {
            uid: uid.clone(),
            key,
            demand,
            waiting,
            disruption: None,
        };
        let view = self.cluster.apply(FilterAsked(request));
        let filters = self.cluster.kube_filters().snapshot();
        let query = filters
            .wants(uid)
            .map(|wants| filters.ask(Some(uid), wants));
        let may_pass = |node: &&Node| {
            let verdict = query
                .as_ref()
                .map(|query| query.verdict(&node.name, &AssumedNodeChange::default()));
            match verdict {
                // A node that no watch showed refuses nothing, and what is not known here counts as met.
                None | Some(FilterVerdict::Accepts | FilterVerdict::Unsupported(_)) => true,
                Some(FilterVerdict::Rejects(why)) => why == FilterReason::UnknownNode,
            }
        };
        let names: Vec<&str> = view
            .snapshot
            .nodes()
            .iter()
            .filter(may_pass)
            .map(|node| node.name.as_str())
            .collect();
        let mut scores = self
            .scores
            .take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter::filter(&view, names.iter().copied(), &mut scores);
        self.scores.put(scores);
        let Some(best) = list.best.first() else {
            self.cluster.apply(filter::refused(&view, &list));
            return None;
        };
        self.cluster.apply(filter::offered(&view, best));
        Some(view.snapshot.nodes()[best.node].name.clone())
    }

    /// Whether the pod gets GPUs there: then its Binding is written.
    fn bind(&mut self, uid: &PodUid, node: &NodeName) -> bool {
        let Some(asked) = BindAsked::of(&self.cluster, uid, node) else {
            return false;
        };
        let Ok(BindAnswer::Write(decision)) = self.cluster.apply(asked) else {
            return false;
        };
        let (placement, devices) = (decision.placement.clone(), decision.placement.recorded());
        self.cluster.apply(BindingAnswered {
            uid: uid.clone(),
            placement,
            stage: BindingStage::Request {
                is_new: decision.is_new,
            },
            answer: BindingAnswer::Written,
            latest_landing: Millis::default(),
        });
        let now = self.now();
        if let Some(pod) = self.pods.get(uid) {
            let first = self.tally.pods.entry(pod.root.clone()).or_default();
            first.place.get_or_insert(RecordedBinding {
                at: now,
                node: node.clone(),
                devices: devices.clone(),
            });
        }
        self.settle(uid, node.clone(), devices);
        true
    }

    /// The planner's run, and what follows from each reservation.
    fn plan(&mut self) {
        let pending = self.cluster.apply(TakePending {
            limit: PODS_PER_RUN,
        });
        if !pending.is_empty() {
            let kube_filters = self.cluster.kube_filters().snapshot();
            let generation = self.cluster.generation();
            for step in plan(self.cluster.scratch(), &kube_filters, &pending) {
                match step {
                    PlanStep::Place(places) => self.reserve(places, generation),
                    PlanStep::Wake { uid, .. } => {
                        self.cluster.apply(PodRequeued(uid.clone()));
                        self.ask(&uid);
                    }
                    PlanStep::Wait { uid, .. } => {
                        self.cluster.apply(NoPlacementFound { uid, generation })
                    }
                }
            }
        }
        for held in self
            .cluster
            .reservation_status()
            .into_iter()
            .filter(|held| held.is_free)
        {
            self.bind(&held.uid, &held.reservation.node);
        }
    }

    fn reserve(&mut self, places: Vec<PlannedPlacement>, generation: u64) {
        if self
            .cluster
            .apply(ReservePlaces {
                places: places.clone(),
                generation,
            })
            .is_err()
        {
            return;
        }
        for place in places {
            let remaining = self
                .cluster
                .reservation_of(&place.uid)
                .map(|status| status.remaining);
            // Of the others nothing but their memory is there.
            remaining
                .iter()
                .flatten()
                .for_each(|victim| self.evict(&victim.uid));
        }
    }

    fn evict(&mut self, victim: &PodUid) {
        if !self.cluster.is_leaving(victim) && self.ordered.insert(victim.clone()) {
            self.cluster.apply(PodEvicted(victim.clone()));
            self.leave(victim);
        }
    }

    /// Evicts neighbors of engines under pressure.
    fn relieve(&mut self) {
        for relief in self.pressure.look(&self.cluster, &BTreeSet::new()) {
            if self.cluster.may_order(std::slice::from_ref(&relief.uid))
                && !self.ordered.contains(&relief.uid)
            {
                self.cluster
                    .apply(EvictionsOrdered(vec![relief.uid.clone()]));
                self.evict(&relief.uid);
            }
        }
    }
}
