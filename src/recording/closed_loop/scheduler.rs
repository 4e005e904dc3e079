//! What Stowage decides in a loop, as the service decides it: the verbs for a pod that is asked about, and the core's control loop
//! for all that wait. Here is only what the API server and kube-scheduler make of it.

use super::demand::RecordedBinding;
use super::stage::{ClosedLoop, Event, ROUND};
use stowage_scheduling::control_loop::{EdgeFacts, NominationChange, PodWrite, StatusPurpose};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{AssumedNodeChange, FilterReason, FilterVerdict};
use stowage_scheduling::ledger::SchedulingGate;
use stowage_scheduling::placing::learned::PackingModel;
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::binding::{BindingAnswer, BindingAnswered, BindingStage};
use stowage_scheduling::verbs::tick::PackingModelLearned;
use stowage_scheduling::vocabulary::node::Node;

/// Number of ticks in a round of one second, as in the service. What follows from a write follows in a later tick.
const TICKS_OF_ROUND: usize = 5;
/// Longest delay until a Binding, the life of a soft reservation: one that took longer was not only about this request.
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

    /// Binds the pod to the node, or returns it to kube-scheduler's queue.
    pub(super) fn take_offer(&mut self, uid: &PodUid, node: &NodeName) {
        let waits = self.pods.get(uid).is_some_and(|pod| pod.place.is_none());
        if waits && !self.bind(uid, node) {
            self.at(self.now() + ROUND, Event::Asks(uid.clone()));
        }
    }

    /// One second of the service: due events, the planner's runs with what follows from them, and learning.
    pub(super) fn round(&mut self) {
        let now = self.now();
        for _ in 0..TICKS_OF_ROUND {
            self.control_loop.tick(now, true, EdgeFacts::default());
            if !self.carry_out() {
                break;
            }
        }
        let cluster = &mut self.control_loop.books;
        if let Some(history) = cluster.ledger().demand_to_learn() {
            let snapshot = cluster.snapshot();
            let model = PackingModel::learn(&history, snapshot.nodes().iter().map(Node::node_gpus));
            drop(snapshot);
            cluster.apply(PackingModelLearned(model));
        }
    }

    /// Commits all pending writes at once. Returns whether there was one.
    fn carry_out(&mut self) -> bool {
        let (now, mut is_written) = (self.now(), false);
        while let Some(write) = self.control_loop.next_write(now) {
            is_written = true;
            self.land(&write);
            self.control_loop.landed(write, now);
        }
        is_written
    }

    /// Effects of a write on the API server and kube-scheduler.
    fn land(&mut self, write: &PodWrite) {
        match write {
            PodWrite::Status {
                uid,
                change,
                purpose,
                ..
            } => {
                let Some(pod) = self.pods.get_mut(uid) else {
                    return;
                };
                match &change.nomination {
                    Some(NominationChange::To(node)) => pod.nominated = Some(node.clone()),
                    Some(NominationChange::Cleared) => pod.nominated = None,
                    None => {}
                }
                self.show_waiting(uid);
                if matches!(purpose, StatusPurpose::Release { .. }) {
                    self.lift_gate(uid);
                } else if change.touch.is_some() {
                    self.retry(uid);
                }
            }
            PodWrite::LiftGate { uid, .. } => self.lift_gate(uid),
            PodWrite::Evict { uid, .. } => self.leave(uid),
        }
    }

    fn lift_gate(&mut self, uid: &PodUid) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.gate = SchedulingGate::Open;
            self.show_waiting(uid);
            self.retry(uid);
        }
    }

    /// Schedules a pod again: on the node to which it is nominated, or else on any.
    fn retry(&mut self, uid: &PodUid) {
        let nominated = self.pods.get(uid).and_then(|pod| pod.nominated.clone());
        if !nominated.is_some_and(|node| self.bind(uid, &node)) {
            self.ask(uid);
        }
    }

    /// The node that filter ranks first, of those that kube-scheduler's own filters accept; `None` if the pod fits nowhere.
    fn best(&mut self, uid: &PodUid) -> Option<NodeName> {
        let cluster = &mut self.control_loop.books;
        let request = cluster.request_of(uid)?;
        let (snapshot, filters) = (cluster.snapshot(), cluster.kube_filters().snapshot());
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
        let names: Vec<&str> = snapshot
            .nodes()
            .iter()
            .filter(may_pass)
            .map(|node| node.name.as_str())
            .collect();
        cluster.best_node(request, names.into_iter(), &mut self.scores)
    }

    /// Allocates GPUs on the node and writes the Binding. Returns whether there were enough.
    fn bind(&mut self, uid: &PodUid, node: &NodeName) -> bool {
        let cluster = &mut self.control_loop.books;
        let Some(decision) = cluster.allocate(uid, node) else {
            return false;
        };
        let (placement, devices) = (decision.placement.clone(), decision.placement.recorded());
        cluster.apply(BindingAnswered {
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
}
