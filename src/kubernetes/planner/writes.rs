//! The planner's writes in progress: many at once, but for each pod one after the other, in the order in which they were
//! requested.
//!
//! Two patches of one pod's status that are sent at once may arrive in any order, and the last one wins: a reservation that was
//! written and released would be back. The queue does not know what is written.

use super::outcome::WriteOutcome;
use crate::ids::PodUid;
use futures::FutureExt;
use futures::future::BoxFuture;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::{Id, JoinSet};

/// Limit for all pods together: enough to keep an API server busy, and few beside its other load.
const AT_ONCE: usize = 32;
/// Limit of writes in progress and queued. Beyond it only writes that a reservation needs are added: a pending pod's condition
/// can wait.
const MANY: usize = 1024;

type PendingWrite = BoxFuture<'static, Option<WriteOutcome>>;

#[derive(Debug)]
pub struct Writes {
    under_way: JoinSet<Option<WriteOutcome>>,
    /// The pods of the writes in progress.
    about: FxHashMap<Id, PodUid>,
    /// The queue behind a pod's write in progress.
    next: BTreeMap<PodUid, WriteQueue>,
    places: Arc<Semaphore>,
}

/// Writes that have not begun.
#[derive(Default)]
struct WriteQueue(VecDeque<PendingWrite>);

impl std::fmt::Debug for WriteQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to come", self.0.len())
    }
}

impl Default for Writes {
    fn default() -> Self {
        let places = Arc::new(Semaphore::new(AT_ONCE));
        Self { under_way: JoinSet::new(), about: FxHashMap::default(), next: BTreeMap::new(), places }
    }
}

impl Writes {
    /// Runs the write after all earlier writes of this pod.
    pub fn add(&mut self, about: PodUid, act: impl Future<Output = Option<WriteOutcome>> + Send + 'static) {
        match self.next.get_mut(&about) {
            Some(queue) => queue.0.push_back(act.boxed()),
            None => {
                self.next.insert(about.clone(), WriteQueue::default());
                self.begin(about, act.boxed());
            }
        }
    }

    /// Whether a write that can wait should be postponed.
    pub fn are_too_many(&self) -> bool {
        self.about.len() >= MANY
    }

    /// Whether any write of the pod is in progress or queued.
    pub fn concern(&self, uid: &PodUid) -> bool {
        self.next.contains_key(uid)
    }

    /// The result of the next write that ends. Never ends while none is in progress.
    pub async fn next(&mut self) -> Option<WriteOutcome> {
        let Some(done) = self.under_way.join_next_with_id().await else {
            return std::future::pending().await;
        };
        let (id, outcome) = done.unwrap_or_else(|error| (error.id(), None));
        if let Some(about) = self.about.remove(&id) {
            match self.next.get_mut(&about).and_then(|queue| queue.0.pop_front()) {
                Some(act) => self.begin(about, act),
                None => drop(self.next.remove(&about)),
            }
        }
        outcome
    }

    /// Drops all writes that have not begun.
    pub fn forget_what_is_to_come(&mut self) {
        self.next.values_mut().for_each(|queue| queue.0.clear());
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    fn begin(&mut self, about: PodUid, act: PendingWrite) {
        let places = self.places.clone();
        let task = self.under_way.spawn(async move {
            let _place = places.acquire_owned().await.ok()?;
            act.await
        });
        self.about.insert(task.id(), about);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use tokio::sync::oneshot;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn writes_of_one_pod_keep_their_order_and_those_of_others_run_meanwhile() {
        let done = Arc::new(Mutex::new(Vec::new()));
        let (open, opened) = oneshot::channel::<()>();
        let mut writes = Writes::default();
        let note = |name: &'static str| {
            let done = done.clone();
            async move {
                done.lock().push(name);
                None
            }
        };
        let slow = {
            let note = note("hold");
            async move {
                let _ = opened.await;
                note.await
            }
        };
        writes.add(uid("a"), slow);
        writes.add(uid("a"), note("end hold"));
        writes.add(uid("a"), note("again"));
        writes.add(uid("b"), note("of another"));
        writes.next().await;
        assert_eq!(*done.lock(), ["of another"]);
        open.send(()).unwrap();
        for _ in 0..3 {
            writes.next().await;
        }
        assert_eq!(*done.lock(), ["of another", "hold", "end hold", "again"]);
        assert!(writes.is_empty() && !writes.concern(&uid("a")));
    }

    #[tokio::test]
    async fn a_write_that_panics_does_not_block_the_next_one() {
        let mut writes = Writes::default();
        writes.add(uid("a"), async { panic!("in a test") });
        writes.add(uid("a"), async { None });
        writes.next().await;
        assert!(writes.concern(&uid("a")));
        writes.next().await;
        assert!(!writes.concern(&uid("a")));
    }

    #[tokio::test]
    async fn queued_writes_are_dropped_when_the_replica_stops_leading() {
        let mut writes = Writes::default();
        writes.add(uid("a"), async { None });
        writes.add(uid("a"), async { panic!("it was forgotten") });
        writes.forget_what_is_to_come();
        writes.next().await;
        assert!(writes.is_empty() && !writes.concern(&uid("a")));
    }
}
