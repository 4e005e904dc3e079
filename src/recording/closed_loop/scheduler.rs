//! What Stowage decides in a loop, as the service decides it: the verbs for a pod that is asked about, and the core's control loop
//! for all that wait. Here is only what the API server and kube-scheduler make of it.

use super::demand::RecordedBinding;
use super::stage::{ClosedLoop, LoopEvent, ROUND_INTERVAL};
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
const TICKS_PER_ROUND: usize = 5;
/// Longest delay until a Binding, the life of a soft reservation: one that took longer was not only about this request.
const MAX_BIND_DELAY: Millis = Millis::seconds(2);

impl ClosedLoop<'_> {
    /// kube-scheduler asks about a pod that has no node, and binds it to the one that is ranked first, as long after that as it
    /// took in the recording: meanwhile it asks about others. A pod that is refused everywhere is the planner's.
    pub(super) fn schedule(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid).filter(|pod| pod.placement.is_none()) else {
            return;
        };
        let delay = pod.recorded.bind_delay().min(MAX_BIND_DELAY);
        self.record_arrival(uid);
        if let Some(node) = self.best_node(uid) {
            self.schedule_event(self.now() + delay, LoopEvent::Binds(uid.clone(), node));
        }
    }

    /// Binds the pod to the node, or returns it to kube-scheduler's queue.
    pub(super) fn bind_or_requeue(&mut self, uid: &PodUid, node: &NodeName) {
        let waits = self
            .pods
            .get(uid)
            .is_some_and(|pod| pod.placement.is_none());
        if waits && !self.bind(uid, node) {
            self.schedule_event(
                self.now() + ROUND_INTERVAL,
                LoopEvent::SchedulingStarts(uid.clone()),
            );
        }
    }

    /// One second of the service: due events, the planner's runs with what follows from them, and learning.
    pub(super) fn round(&mut self) {
        let now = self.now();
        for _ in 0..TICKS_PER_ROUND {
            self.control_loop.tick(now, true, EdgeFacts::default());
            if !self.commit_writes() {
                break;
            }
        }
        let cluster = &mut self.control_loop.cluster_access;
        if let Some(history) = cluster.ledger().demand_to_learn() {
            let snapshot = cluster.snapshot();
            let model = PackingModel::learn(&history, snapshot.nodes().iter().map(Node::node_gpus));
            drop(snapshot);
            cluster.apply(PackingModelLearned(model));
        }
    }

    /// Commits all pending writes at once. Returns whether there was one.
    fn commit_writes(&mut self) -> bool {
        let (now, mut is_written) = (self.now(), false);
        while let Some(write) = self.control_loop.next_write(now) {
            is_written = true;
            self.commit(&write);
            self.control_loop.complete_write(write, now);
        }
        is_written
    }

    /// Effects of a write on the API server and kube-scheduler.
    fn commit(&mut self, write: &PodWrite) {
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
                self.observe_waiting(uid);
                if matches!(purpose, StatusPurpose::Release { .. }) {
                    self.remove_gate(uid);
                } else if change.requeue.is_some() {
                    self.retry(uid);
                }
            }
            PodWrite::RemoveGate { uid, .. } => self.remove_gate(uid),
            PodWrite::Evict { uid, .. } => self.terminate(uid),
        }
    }

    fn remove_gate(&mut self, uid: &PodUid) {
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.gate = SchedulingGate::Open;
            self.observe_waiting(uid);
            self.retry(uid);
        }
    }

    /// Schedules a pod again: on the node to which it is nominated, or else on any.
    fn retry(&mut self, uid: &PodUid) {
        let nominated = self.pods.get(uid).and_then(|pod| pod.nominated.clone());
        if !nominated.is_some_and(|node| self.bind(uid, &node)) {
            self.schedule(uid);
        }
    }

    /// The node that filter ranks first, of those that kube-scheduler's own filters accept; `None` if the pod fits nowhere.
    fn best_node(&mut self, uid: &PodUid) -> Option<NodeName> {
        let cluster = &mut self.control_loop.cluster_access;
        let request = cluster.request_of(uid)?;
        let (snapshot, filters) = (cluster.snapshot(), cluster.kube_filters().snapshot());
        let query = filters
            .requirements_of(uid)
            .map(|wants| filters.query(Some(uid), wants));
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
        let cluster = &mut self.control_loop.cluster_access;
        let Some(decision) = cluster.allocate(uid, node) else {
            return false;
        };
        let (placement, devices) = (
            decision.placement.clone(),
            decision.placement.recorded_gpus(),
        );
        cluster.apply(BindingAnswered {
            uid: uid.clone(),
            placement,
            stage: BindingStage::Request {
                is_new: decision.is_new,
            },
            answer: BindingAnswer::Written,
            max_commit_delay: Millis::default(),
        });
        let now = self.now();
        if let Some(pod) = self.pods.get(uid) {
            let first = self.tally.pods.entry(pod.recorded_uid.clone()).or_default();
            first.binding.get_or_insert(RecordedBinding {
                at: now,
                node: node.clone(),
                devices: devices.clone(),
            });
        }
        self.record_bound(uid, node.clone(), devices);
        true
    }
}
