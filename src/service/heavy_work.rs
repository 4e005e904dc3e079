//! Where long computations run: plans, searches for victims, learning.
//!
//! A process runs them on threads of their own, beside the tasks that answer requests; those that no pod waits for step back
//! behind these. A simulation has one thread: there a computation is one more task of it, and takes as much simulated time as the
//! simulation says, so that it ends at the same place of the same history each time.
//!
//! A computation that panics is counted and logged here, and its caller gets an error in place of a result.

use super::niceness;
use crate::telemetry::WorkKind;
use prometheus::IntCounterVec;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Threads for what nobody waits for. As a static it is never dropped: what still runs when the process ends holds nothing up.
static BACKGROUND: LazyLock<Runtime> = LazyLock::new(|| {
    let mut threads = tokio::runtime::Builder::new_current_thread();
    let threads = threads.max_blocking_threads(BACKGROUND_THREADS).on_thread_start(niceness::step_back);
    threads.build().expect("it asks the system for nothing before the first work")
});

/// More than there are kinds of such work. What finds none free waits for one.
const BACKGROUND_THREADS: usize = 8;

#[derive(Debug, Clone, Copy, Default)]
pub enum WorkPlace {
    /// On the runtime's threads for blocking work.
    #[default]
    OnThreads,
    /// In turn with the other tasks, after a time that is drawn for each.
    InTurn { lasts: fn() -> Duration },
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
        let work = self.counted(kind, work);
        match self.place {
            WorkPlace::OnThreads => tokio::task::spawn_blocking(work),
            WorkPlace::InTurn { lasts } => in_turn(lasts(), work),
        }
    }

    /// Begins a computation that no pod waits for: its thread steps back behind those that answer requests.
    pub fn begin_in_background<T: Send + 'static>(
        &self,
        kind: WorkKind,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let work = self.counted(kind, work);
        match self.place {
            WorkPlace::OnThreads => BACKGROUND.spawn_blocking(work),
            WorkPlace::InTurn { lasts } => in_turn(lasts(), work),
        }
    }

    /// The same work, for a thread that is there already: if it panics, that is counted and logged.
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

fn in_turn<T: Send + 'static>(lasts: Duration, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(async move {
        tokio::time::sleep(lasts).await;
        work()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::niceness::{of_this_thread, stepped_back};
    use crate::telemetry::Metrics;

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
        for place in [WorkPlace::OnThreads, WorkPlace::InTurn { lasts: || Duration::ZERO }] {
            let heavy_work = HeavyWork::new(place, panics.clone());
            let planned = heavy_work.begin(WorkKind::Plan, || panic!("planted"));
            let looked = heavy_work.begin_in_background(WorkKind::Capacity, || panic!("planted"));
            assert!(planned.await.unwrap_err().is_panic() && looked.await.unwrap_err().is_panic());
        }
        let counted = |kind| panics.with_label_values(&[kind]).get();
        assert_eq!(["plan", "capacity", "page"].map(counted), [2, 2, 0]);
    }
}
