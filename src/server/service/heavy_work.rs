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
static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    let mut threads = tokio::runtime::Builder::new_current_thread();
    let threads = threads
        .max_blocking_threads(BACKGROUND_THREADS)
        .on_thread_start(niceness::step_back);
    threads
        .build()
        .expect("it asks the system for nothing before the first work")
});

/// More than there are kinds of such work. What finds none free waits for one.
const BACKGROUND_THREADS: usize = 8;

/// Simulated time between two checks of `stop`: a stopped computation ends within a tenth of a second.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Default)]
pub enum WorkPlace {
    /// On the runtime's threads for blocking work.
    #[default]
    OnThreads,
    /// In turn with the other tasks, each after a simulated time.
    InTurn(SimulatedThreads),
}

/// The threads of a simulated process.
#[derive(Clone)]
pub struct SimulatedThreads {
    lasts: Arc<dyn Fn(WorkKind) -> Duration + Send + Sync>,
    at_work: Arc<AtomicUsize>,
    /// Of computations that may be unfinished.
    begun: Arc<Mutex<Vec<AbortHandle>>>,
}

impl SimulatedThreads {
    /// `lasts` says for each computation how long it lasts.
    pub fn new(lasts: impl Fn(WorkKind) -> Duration + Send + Sync + 'static) -> Self {
        Self {
            lasts: Arc::new(lasts),
            at_work: Arc::default(),
            begun: Arc::default(),
        }
    }

    /// Aborts all computations, as when the process is killed.
    pub fn kill(&self) {
        self.begun.lock().drain(..).for_each(|begun| begun.abort());
    }

    /// Spawns a computation that takes its simulated duration, or ends early once `stop` is set.
    fn begin<T: Send + 'static>(
        &self,
        kind: WorkKind,
        stop: Arc<AtomicBool>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let mut left = (self.lasts)(kind);
        let handle = tokio::spawn(async move {
            while !left.is_zero() && !stop.load(Ordering::Relaxed) {
                let next = left.min(LOOK_EVERY);
                tokio::time::sleep(next).await;
                left -= next;
            }
            work()
        });
        let mut begun = self.begun.lock();
        begun.retain(|begun| !begun.is_finished());
        begun.push(handle.abort_handle());
        handle
    }

    /// The number of computations that delay the end of the process: a runtime does not end before its threads do.
    pub fn at_work(&self) -> usize {
        self.at_work.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for SimulatedThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedThreads")
            .field("at_work", &self.at_work)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct HeavyWork {
    place: WorkPlace,
    /// By kind.
    panics: IntCounterVec,
}

impl HeavyWork {
    pub fn new(place: WorkPlace, panics: IntCounterVec) -> Self {
        Self { place, panics }
    }

    /// Begins a computation that a pod waits for. It goes on when the handle is dropped.
    pub fn begin<T: Send + 'static>(
        &self,
        kind: WorkKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        self.begin_until(kind, Arc::default(), work)
    }

    /// Begins a computation that ends soon after `stop` is set; `work` has to check it. A simulated computation ends its wait then.
    pub(crate) fn begin_until<T: Send + 'static>(
        &self,
        kind: WorkKind,
        stop: Arc<AtomicBool>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let work = self.counted(kind, work);
        match &self.place {
            WorkPlace::OnThreads => tokio::task::spawn_blocking(work),
            WorkPlace::InTurn(threads) => {
                let at_work = AtWork::begin(threads.at_work.clone());
                threads.begin(kind, stop, move || {
                    let _at_work = at_work;
                    work()
                })
            }
        }
    }

    /// Begins a computation that no pod waits for: its thread steps back behind those that answer requests.
    pub(crate) fn begin_in_background<T: Send + 'static>(
        &self,
        kind: WorkKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let work = self.counted(kind, work);
        match &self.place {
            WorkPlace::OnThreads => BACKGROUND.spawn_blocking(work),
            WorkPlace::InTurn(threads) => threads.begin(kind, Arc::default(), work),
        }
    }

    /// Wraps `work` for a thread that exists already: a panic in it is counted and logged.
    pub fn counted<T, W>(&self, kind: WorkKind, work: W) -> impl FnOnce() -> T + use<T, W>
    where
        W: FnOnce() -> T,
    {
        let panics = self.panics.clone();
        move || {
            let _guard = CountPanic { kind, panics };
            work()
        }
    }
}

struct CountPanic {
    kind: WorkKind,
    panics: IntCounterVec,
}

impl Drop for CountPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kind = self.kind.label();
            self.panics.with_label_values(&[kind]).inc();
            tracing::error!(
                kind,
                "Stowage panicked, which is a defect of its own; the lines above say where"
            );
        }
    }
}

/// Counts a simulated computation as running until it is dropped.
struct AtWork(Arc<AtomicUsize>);

impl AtWork {
    fn begin(at_work: Arc<AtomicUsize>) -> Self {
        at_work.fetch_add(1, Ordering::Relaxed);
        Self(at_work)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::niceness::{of_this_thread, stepped_back};
    use stowage_telemetry::Metrics;

    #[tokio::test]
    async fn what_no_pod_waits_for_steps_back() {
        let heavy_work = HeavyWork::new(WorkPlace::OnThreads, Metrics::new().panics);
        let waited_for = heavy_work.begin(WorkKind::Plan, of_this_thread);
        let background = heavy_work.begin_in_background(WorkKind::Capacity, of_this_thread);
        assert_eq!(waited_for.await.unwrap(), of_this_thread());
        assert_eq!(background.await.unwrap(), stepped_back());
    }

    #[tokio::test]
    async fn a_panic_is_counted_by_kind() {
        let panics = Metrics::new().panics;
        let in_turn = WorkPlace::InTurn(SimulatedThreads::new(|_| Duration::ZERO));
        for place in [WorkPlace::OnThreads, in_turn] {
            let heavy_work = HeavyWork::new(place, panics.clone());
            let planned = heavy_work.begin(WorkKind::Plan, || panic!("planted"));
            let looked = heavy_work.begin_in_background(WorkKind::Capacity, || panic!("planted"));
            assert!(planned.await.unwrap_err().is_panic() && looked.await.unwrap_err().is_panic());
        }
        let counted = |kind| panics.with_label_values(&[kind]).get();
        assert_eq!(["plan", "capacity", "page"].map(counted), [2, 2, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_simulated_computation_lasts_as_long_as_it_is_said_to_or_until_it_is_stopped() {
        let threads = SimulatedThreads::new(|kind| match kind {
            WorkKind::Plan => Duration::from_secs(300),
            _ => Duration::from_millis(250),
        });
        let heavy_work = HeavyWork::new(WorkPlace::InTurn(threads.clone()), Metrics::new().panics);
        let began = tokio::time::Instant::now();
        let stop = Arc::new(AtomicBool::new(false));
        let plan = heavy_work.begin_until(WorkKind::Plan, stop.clone(), || "stopped");
        let search = heavy_work.begin(WorkKind::Preempt, || "found");
        assert_eq!(threads.at_work(), 2);
        assert_eq!(
            (search.await.unwrap(), began.elapsed()),
            ("found", Duration::from_millis(250))
        );
        assert_eq!(threads.at_work(), 1);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(plan.await.unwrap(), "stopped");
        assert!(began.elapsed() <= Duration::from_millis(250) + LOOK_EVERY);
        assert_eq!(threads.at_work(), 0);
    }
}
