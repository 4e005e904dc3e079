//! Where long computations run: plans, searches for victims, learning.
//!
//! A process runs them on threads of their own, beside the tasks that answer requests. A simulation has one thread: there a
//! computation is one more task of it, and takes as much simulated time as the simulation says, so that it ends at the same place
//! of the same history each time.

use std::time::Duration;
use tokio::task::JoinHandle;

#[derive(Debug, Clone, Copy, Default)]
pub enum HeavyWork {
    /// On the runtime's threads for blocking work.
    #[default]
    OnThreads,
    /// In turn with the other tasks, after a time that is drawn for each.
    InTurn { lasts: fn() -> Duration },
}

impl HeavyWork {
    /// Begins a computation. It goes on when the handle is dropped.
    pub fn begin<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        match self {
            Self::OnThreads => tokio::task::spawn_blocking(work),
            Self::InTurn { lasts } => {
                let lasts = lasts();
                tokio::spawn(async move {
                    tokio::time::sleep(lasts).await;
                    work()
                })
            }
        }
    }
}
