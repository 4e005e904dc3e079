//! The planner's writes in progress: many at once, but for each pod one after the other, in the order in which they were
//! requested.
//!
//! Two patches of one pod's status that are sent at once may arrive in any order, and the last one wins: a reservation that was
//! written and released would be back. The queue does not know what a write means.

use super::write::{PlannerWrite, WriteOutcome, perform};
use crate::service::Service;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::ids::PodUid;
use tokio::sync::Semaphore;
use tokio::task::{Id, JoinSet};

/// Limit for all pods together: enough to keep an API server busy, and few beside its other load.
const AT_ONCE: usize = 32;
/// Of those, writes that can wait: an eviction or a nomination finds a place beside any number of explanations of other pods.
const CAN_WAIT_AT_ONCE: usize = 24;
/// Limit of pods with a write in progress or waiting for its turn. Beyond it only writes that a reservation needs are added: a
/// pending pod's condition can wait.
const MANY: usize = 1024;

pub struct Writes {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    under_way: JoinSet<Option<WriteOutcome>>,
    /// The writes in progress.
    about: FxHashMap<Id, PlannerWrite>,
    /// The writes behind a pod's write in progress. They have not begun.
    next: BTreeMap<PodUid, VecDeque<PlannerWrite>>,
    places: Arc<Semaphore>,
    /// Limits the writes that can wait: each takes one of these first, then a place.
    waiting: Arc<Semaphore>,
}

impl Writes {
    pub fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            service,
            control_plane,
            under_way: JoinSet::new(),
            about: FxHashMap::default(),
            next: BTreeMap::new(),
            places: Arc::new(Semaphore::new(AT_ONCE)),
            waiting: Arc::new(Semaphore::new(CAN_WAIT_AT_ONCE)),
        }
    }

    /// Sends the write after all earlier writes of this pod.
    pub fn add(&mut self, write: PlannerWrite) {
        match self.next.get_mut(write.uid()) {
            Some(queue) => queue.push_back(write),
            None => {
                self.next.insert(write.uid().clone(), VecDeque::new());
                self.begin(write);
            }
        }
    }

    /// Whether a write that can wait should be postponed.
    pub(crate) fn are_too_many(&self) -> bool {
        self.about.len() >= MANY
    }

    /// Whether any write of the pod is in progress or queued.
    pub fn concern(&self, uid: &PodUid) -> bool {
        self.next.contains_key(uid)
    }

    /// The result of the next write that ends. Never ends while none is in progress.
    pub async fn next(&mut self) -> WriteOutcome {
        loop {
            let Some(done) = self.under_way.join_next_with_id().await else {
                return std::future::pending().await;
            };
            let (id, outcome) = done.unwrap_or_else(|error| (error.id(), None));
            let Some(write) = self.about.remove(&id) else {
                continue;
            };
            match self.next.get_mut(write.uid()).and_then(VecDeque::pop_front) {
                Some(next) => self.begin(next),
                None => drop(self.next.remove(write.uid())),
            }
            return outcome.unwrap_or_else(|| write.broken_off());
        }
    }

    /// Drops all writes that wait for another one of their pod.
    pub(crate) fn forget_what_is_to_come(&mut self) {
        self.next.values_mut().for_each(VecDeque::clear);
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    fn begin(&mut self, write: PlannerWrite) {
        let about = write.clone();
        let (service, control_plane) = (self.service.clone(), self.control_plane.clone());
        let (places, waiting) = (self.places.clone(), self.waiting.clone());
        let task = self.under_way.spawn(async move {
            let _waiting = match write.can_wait() {
                true => Some(waiting.acquire_owned().await.ok()?),
                false => None,
            };
            let _place = places.acquire_owned().await.ok()?;
            Some(perform(write, &service, &*control_plane).await)
        });
        self.about.insert(task.id(), about);
    }
}

#[cfg(test)]
mod tests {
    use super::super::write::StatusPurpose;
    use super::*;
    use crate::kubernetes::testing::Recorder;
    use stowage_kubernetes_objects::port::{ControlPlaneError, StatusChange};
    use stowage_scheduling::ids::{NodeName, PodKey};
    use stowage_scheduling::policy::Policy;
    use tokio::sync::oneshot;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    fn key(name: &str) -> PodKey {
        PodKey::parse("default", name).unwrap()
    }

    fn status(name: &str, change: StatusChange) -> PlannerWrite {
        PlannerWrite::Status {
            key: key(name),
            uid: uid(name),
            change,
            purpose: StatusPurpose::Wake,
        }
    }

    fn nominate(name: &str, node: &str) -> PlannerWrite {
        status(name, StatusChange::nominate(NodeName::parse(node).unwrap()))
    }

    fn touch(name: &str) -> PlannerWrite {
        status(name, StatusChange::touch())
    }

    fn writes() -> (Arc<Recorder>, Writes) {
        let recorder = Arc::new(Recorder::default());
        let service = Service::with_stopped_clock(Policy::default());
        (recorder.clone(), Writes::new(service, recorder))
    }

    /// The next change of a status is answered when the test answers, or panics if the test drops the sender.
    fn stall(recorder: &Recorder) -> oneshot::Sender<()> {
        let (answer, stalled) = oneshot::channel();
        *recorder.stall.lock() = Some(stalled);
        answer
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn writes_of_one_pod_keep_their_order_and_those_of_others_run_meanwhile() {
        let (recorder, mut writes) = writes();
        let answer = stall(&recorder);
        writes.add(nominate("a", "n"));
        // It has begun, before another takes the answer that the test keeps back.
        while recorder.stall.lock().is_some() {
            tokio::task::yield_now().await;
        }
        writes.add(touch("a"));
        writes.add(nominate("a", "m"));
        writes.add(touch("b"));
        writes.next().await;
        assert_eq!(recorder.written(), ["b: touch"]);
        answer.send(()).unwrap();
        for _ in 0..3 {
            writes.next().await;
        }
        assert_eq!(
            recorder.written(),
            ["a: nominate n", "a: touch", "a: nominate m"]
        );
        assert!(writes.is_empty() && !writes.concern(&uid("a")));
    }

    #[tokio::test]
    async fn a_write_that_a_reservation_needs_does_not_wait_behind_those_that_can_wait() {
        let (recorder, mut writes) = writes();
        *recorder.slow.lock() = true;
        for n in 0..200 {
            writes.add(touch(&format!("pod-{n:03}")));
        }
        let (change, purpose) = (StatusChange::touch(), StatusPurpose::AbandonReservation);
        writes.add(PlannerWrite::Status {
            key: key("urgent"),
            uid: uid("urgent"),
            change,
            purpose,
        });
        while !writes.is_empty() {
            writes.next().await;
        }
        let written = recorder.written();
        let place = written
            .iter()
            .position(|write| write.starts_with("urgent"))
            .unwrap();
        assert!(
            written.len() == 201 && place <= 2 * CAN_WAIT_AT_ONCE,
            "it is number {place}"
        );
    }

    #[tokio::test]
    async fn a_write_that_panics_does_not_block_the_next_one() {
        let (recorder, mut writes) = writes();
        drop(stall(&recorder));
        writes.add(nominate("a", "n"));
        writes.add(nominate("a", "m"));
        let outcome = writes.next().await;
        let WriteOutcome::Status {
            written: Err(ControlPlaneError::Unknown(_)),
            ..
        } = outcome
        else {
            panic!("it may have been written: {outcome:?}")
        };
        assert!(writes.concern(&uid("a")));
        writes.next().await;
        assert!(!writes.concern(&uid("a")));
        assert_eq!(recorder.written(), ["a: nominate m"]);
    }

    #[tokio::test]
    async fn queued_writes_are_dropped_when_the_replica_stops_leading() {
        let (recorder, mut writes) = writes();
        writes.add(nominate("a", "n"));
        writes.add(nominate("a", "m"));
        writes.forget_what_is_to_come();
        writes.next().await;
        assert!(writes.is_empty() && !writes.concern(&uid("a")));
        assert_eq!(recorder.written(), ["a: nominate n"]);
    }
}
