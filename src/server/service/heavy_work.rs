//! Where long computations run: plans, searches for victims, learning.
//!
//! A process runs them on threads of their own, beside the tasks that answer requests; those that no pod waits for step back
//! behind these. A simulation has one thread: there a computation is one more task of it, and takes as much simulated time as the
//! simulation says, so that it ends at the same place of the same history each time.
//!
//! A computation that panics is counted and logged here, and its caller gets an error in place of a result.

use super::niceness;
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use stowage_telemetry::WorkKind;
use tokio::runtime::Runtime;
use tokio::task::{AbortHandle, JoinHandle};

/// Threads for work that no pod waits for. As a static it is never dropped: what still runs when the process ends holds nothing up.
static BACKGROUND_RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut threads = tokio::runtime::Builder::new_current_thread();
    let threads = threads
        .max_blocking_threads(MAX_BACKGROUND_THREADS)
        .on_thread_start(niceness::lower_thread_priority);
    threads
        .build()
        .expect("it asks the system for nothing before the first work")
});

/// More than there are kinds of such work. What finds none free waits for one.
const MAX_BACKGROUND_THREADS: usize = 8;

/// Simulated time between two checks of `stop`: a stopped computation ends within a tenth of a second.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Default)]
pub enum WorkExecutor {
    /// On the runtime's threads for blocking work.
    #[default]
    OnThreads,
    /// In turn with the other tasks, each after a simulated time.
    Simulated(SimulatedThreads),
}

/// The threads of a simulated process.
#[derive(Clone)]
pub struct SimulatedThreads {
    duration_of: Arc<dyn Fn(WorkKind) -> Duration + Send + Sync>,
    running: Arc<AtomicUsize>,
    /// Handles of computations that may be unfinished.
    handles: Arc<Mutex<Vec<AbortHandle>>>,
}

impl SimulatedThreads {
    /// `duration_of` says for each computation how long it lasts.
    pub fn new(duration_of: impl Fn(WorkKind) -> Duration + Send + Sync + 'static) -> Self {
        Self {
            duration_of: Arc::new(duration_of),
            running: Arc::default(),
            handles: Arc::default(),
        }
    }

    /// Aborts all computations, as when the process is killed.
    pub fn abort_all(&self) {
        self.handles
            .lock()
            .drain(..)
            .for_each(|begun| begun.abort());
    }

    /// Spawns a computation that takes its simulated duration, or ends early once `stop` is set.
    fn spawn<T: Send + 'static>(
        &self,
        kind: WorkKind,
        stop: Arc<AtomicBool>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let mut remaining = (self.duration_of)(kind);
        let handle = tokio::spawn(async move {
            while !remaining.is_zero() && !stop.load(Ordering::Relaxed) {
                let next = remaining.min(STOP_POLL_INTERVAL);
                tokio::time::sleep(next).await;
                remaining -= next;
            }
            work()
        });
        let mut begun = self.handles.lock();
        begun.retain(|begun| !begun.is_finished());
        begun.push(handle.abort_handle());
        handle
    }

    /// The number of computations that delay the end of the process: a runtime does not end before its threads do.
    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for SimulatedThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedThreads")
            .field("at_work", &self.running)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct HeavyWork {
    executor: WorkExecutor,
    /// By kind.
    panics: IntCounterVec,
}

impl HeavyWork {
    pub fn new(executor: WorkExecutor, panics: IntCounterVec) -> Self {
        Self { executor, panics }
    }

    /// Begins a computation that a pod waits for. It goes on when the handle is dropped.
    pub fn spawn<T: Send + 'static>(
        &self,
        kind: WorkKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        self.spawn_stoppable(kind, Arc::default(), work)
    }

    /// Begins a computation that ends soon after `stop` is set; `work` has to check it. A simulated computation ends its wait then.
    pub(crate) fn spawn_stoppable<T: Send + 'static>(
        &self,
        kind: WorkKind,
        stop: Arc<AtomicBool>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let work = self.with_panic_count(kind, work);
        match &self.executor {
            WorkExecutor::OnThreads => tokio::task::spawn_blocking(work),
            WorkExecutor::Simulated(threads) => {
                let at_work = RunningGuard::begin(threads.running.clone());
                threads.spawn(kind, stop, move || {
                    let _at_work = at_work;
                    work()
                })
            }
        }
    }

    /// Begins a computation that no pod waits for: its thread steps back behind those that answer requests.
    pub(crate) fn spawn_in_background<T: Send + 'static>(
        &self,
        kind: WorkKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let work = self.with_panic_count(kind, work);
        match &self.executor {
            WorkExecutor::OnThreads => BACKGROUND_RUNTIME.spawn_blocking(work),
            WorkExecutor::Simulated(threads) => threads.spawn(kind, Arc::default(), work),
        }
    }

    /// Wraps `work` for a thread that exists already: a panic in it is counted and logged.
    pub fn with_panic_count<T, W>(&self, kind: WorkKind, work: W) -> impl FnOnce() -> T + use<T, W>
    where
        W: FnOnce() -> T,
    {
        let panics = self.panics.clone();
        move || {
            let _guard = PanicCounter { kind, panics };
            work()
        }
    }
}

struct PanicCounter {
    kind: WorkKind,
    panics: IntCounterVec,
}

impl Drop for PanicCounter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kind = self.kind.into_str();
            self.panics.with_label_values(&[kind]).inc();
            tracing::error!(
                kind,
                "Stowage panicked, which is a defect of its own; the lines above say where"
            );
        }
    }
}

/// Counts a simulated computation as running until it is dropped.
struct RunningGuard(Arc<AtomicUsize>);

impl RunningGuard {
    fn begin(at_work: Arc<AtomicUsize>) -> Self {
        at_work.fetch_add(1, Ordering::Relaxed);
        Self(at_work)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::niceness::{lowered_niceness, thread_niceness};
    use stowage_telemetry::Metrics;

    #[tokio::test]
    async fn background_work_runs_at_a_lower_priority() {
        let heavy_work = HeavyWork::new(WorkExecutor::OnThreads, Metrics::new().panics);
        let waited_for = heavy_work.spawn(WorkKind::Plan, thread_niceness);
        let background = heavy_work.spawn_in_background(WorkKind::Capacity, thread_niceness);
        assert_eq!(waited_for.await.unwrap(), thread_niceness());
        assert_eq!(background.await.unwrap(), lowered_niceness());
    }

    #[tokio::test]
    async fn a_panic_is_counted_by_kind() {
        let panics = Metrics::new().panics;
        let in_turn = WorkExecutor::Simulated(SimulatedThreads::new(|_| Duration::ZERO));
        for executor in [WorkExecutor::OnThreads, in_turn] {
            let heavy_work = HeavyWork::new(executor, panics.clone());
            let planned = heavy_work.spawn(WorkKind::Plan, || panic!("planted"));
            let estimated =
                heavy_work.spawn_in_background(WorkKind::Capacity, || panic!("planted"));
            assert!(
                planned.await.unwrap_err().is_panic() && estimated.await.unwrap_err().is_panic()
            );
        }
        let counted = |kind| panics.with_label_values(&[kind]).get();
        assert_eq!(["plan", "capacity", "page"].map(counted), [2, 2, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_simulated_computation_ends_after_its_duration_or_when_it_is_stopped() {
        let threads = SimulatedThreads::new(|kind| match kind {
            WorkKind::Plan => Duration::from_secs(300),
            _ => Duration::from_millis(250),
        });
        let heavy_work = HeavyWork::new(
            WorkExecutor::Simulated(threads.clone()),
            Metrics::new().panics,
        );
        let began = tokio::time::Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let plan = heavy_work.spawn_stoppable(WorkKind::Plan, stop.clone(), || "stopped");
        let search = heavy_work.spawn(WorkKind::Preempt, || "found");
        assert_eq!(threads.running(), 2);
        assert_eq!(
            (search.await.unwrap(), began.elapsed()),
            ("found", Duration::from_millis(250))
        );
        assert_eq!(threads.running(), 1);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(plan.await.unwrap(), "stopped");
        assert!(began.elapsed() <= Duration::from_millis(250) + STOP_POLL_INTERVAL);
        assert_eq!(threads.running(), 0);
    }
}
