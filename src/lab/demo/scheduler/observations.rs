//! Records what the stand-in did, for tests and the demo: calls of the extender, outcomes, and its progress.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use tokio::sync::watch;
use tokio::time::Instant;

/// The extender's four verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    Filter,
    Prioritize,
    Preempt,
    Bind,
}

impl Verb {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Prioritize => "prioritize",
            Self::Preempt => "preempt",
            Self::Bind => "bind",
        }
    }
}

/// One call, recorded when it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtenderCall {
    pub verb: Verb,
    /// `namespace/name`.
    pub pod: String,
    /// The number of nodes in it.
    pub nodes: usize,
    pub at: Instant,
}

/// A pod's results so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodOutcome {
    /// Scheduling cycles.
    pub attempts: u32,
    /// The node according to the API server.
    pub node: Option<String>,
    /// The last failure: SchedulerError or Unschedulable, and the condition's text.
    pub reason: Option<&'static str>,
    pub message: Option<String>,
    /// How often victims were chosen for it.
    pub preemptions: u32,
}

/// The scheduler's progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SchedulerProgress {
    /// The latest resource version of a pod that it saw.
    pub pods_version: u64,
    /// The latest resource version of a node that it saw.
    pub nodes_version: u64,
    /// Nothing to do now: no pod to try, no bind in progress. Pods may wait for an event or for back-off to end.
    pub is_idle: bool,
    /// Counts steps, so that observers see each one.
    steps: u64,
}

#[derive(Debug, Default)]
struct ObservedResults {
    calls: Vec<ExtenderCall>,
    outcomes: BTreeMap<String, PodOutcome>,
}

#[derive(Debug, Default)]
pub struct SchedulerObservations {
    results: Mutex<ObservedResults>,
    progress: watch::Sender<SchedulerProgress>,
}

impl SchedulerObservations {
    pub fn calls(&self) -> Vec<ExtenderCall> {
        self.results.lock().calls.clone()
    }

    pub fn calls_for(&self, pod: &str) -> Vec<ExtenderCall> {
        self.results
            .lock()
            .calls
            .iter()
            .filter(|call| call.pod == pod)
            .cloned()
            .collect()
    }

    pub fn count(&self, verb: Verb) -> usize {
        self.results
            .lock()
            .calls
            .iter()
            .filter(|call| call.verb == verb)
            .count()
    }

    /// The result of the pod `namespace/name` so far.
    pub fn outcome(&self, pod: &str) -> PodOutcome {
        self.results
            .lock()
            .outcomes
            .get(pod)
            .cloned()
            .unwrap_or_default()
    }

    pub fn outcomes(&self) -> BTreeMap<String, PodOutcome> {
        self.results.lock().outcomes.clone()
    }

    pub fn progress(&self) -> SchedulerProgress {
        *self.progress.borrow()
    }

    /// Waits until `check` returns a value; it is called after each step of the scheduler.
    pub async fn until<T>(&self, mut check: impl FnMut(&Self) -> Option<T>) -> T {
        let mut progress = self.progress.subscribe();
        loop {
            if let Some(found) = check(self) {
                return found;
            }
            progress
                .changed()
                .await
                .expect("the observations own the sender");
        }
    }

    pub(super) fn record_call(&self, verb: Verb, pod: String, nodes: usize) {
        self.results.lock().calls.push(ExtenderCall {
            verb,
            pod,
            nodes,
            at: Instant::now(),
        });
        self.update_progress(|_| {});
    }

    pub(super) fn record_outcome(&self, pod: String, change: impl FnOnce(&mut PodOutcome)) {
        change(self.results.lock().outcomes.entry(pod).or_default());
        self.update_progress(|_| {});
    }

    /// A list is in order of names, not of versions: a later object may have an older version.
    pub(super) fn record_node_version(&self, version: u64) {
        self.update_progress(|progress| {
            progress.nodes_version = progress.nodes_version.max(version)
        });
    }

    pub(super) fn record_pod_version(&self, version: u64) {
        self.update_progress(|progress| progress.pods_version = progress.pods_version.max(version));
    }

    pub(super) fn update_progress(&self, change: impl FnOnce(&mut SchedulerProgress)) {
        self.progress.send_modify(|progress| {
            change(progress);
            progress.steps += 1;
        });
    }
}
