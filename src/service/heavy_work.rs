//! Where long computations run: plans, searches for victims, learning.
//!
//! A process runs them on threads of their own, beside the tasks that answer requests; those that no pod waits for step back behind
//! these. A simulation has one thread: there a computation is one more task of it, and takes as much simulated time as the
//! simulation says, so that it ends at the same place of the same history each time.

use super::niceness;
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
pub enum HeavyWork {
    /// On the runtime's threads for blocking work.
    #[default]
    OnThreads,
    /// In turn with the other tasks, after a time that is drawn for each.
    InTurn { lasts: fn() -> Duration },
}

impl HeavyWork {
    /// Begins a computation that a pod waits for. It goes on when the handle is dropped.
    pub fn begin<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        match self {
            Self::OnThreads => tokio::task::spawn_blocking(work),
            Self::InTurn { lasts } => in_turn(lasts(), work),
        }
    }

    /// Begins a computation that no pod waits for: its thread steps back behind those that answer requests.
    pub fn begin_in_background<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        match self {
            Self::OnThreads => BACKGROUND.spawn_blocking(work),
            Self::InTurn { lasts } => in_turn(lasts(), work),
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

    #[tokio::test]
    async fn what_no_pod_waits_for_steps_back() {
        let waited_for = HeavyWork::OnThreads.begin(of_this_thread);
        let background = HeavyWork::OnThreads.begin_in_background(of_this_thread);
        assert_eq!(waited_for.await.unwrap(), of_this_thread());
        assert_eq!(background.await.unwrap(), stepped_back());
    }
}
