//! The whole service in simulated time, broken on purpose: two replicas as they ship, a stand-in API server in the same process,
//! and a history that a seed draws.
//!
//! ```text
//!  seed ─► world ── pods arrive, end, are edited and recreated ──► API server ◄── requests with fates ── replicas (real)
//!            ├──── replicas die, stop, are cut off; clocks jump ──────────────────────────────────────────► │
//!            ├──── kube-schedulers ask filter, prioritize, preempt, bind ─────────────────────────────────► │
//!            ├──── machines (GPUs, processes) ──► agents, which die, lag, lie ── reports ─────────────────► │
//!            └──── oracle: objects and machines after every step
//! ```
//!
//! One thread and a virtual clock: tokio's paused one, which goes on when nothing is left to do at a moment. Plans and searches
//! run in turn with other tasks ([`stowage_server::service::HeavyWork`]), tasks that wait for the same thing wake in order
//! ([`stowage_server::service::ChangeCount`]), and the random numbers of retries are seeded. So a seed is a history, to the byte:
//! [`play`] twice gives the same text.
//!
//! [`fault`] lists what can go wrong, [`fates`] draws the outcomes of requests, `oracle` says what must not be, [`planted`] are
//! bugs that the oracle has to find, [`shrink`](mod@shrink) makes a failing history small, and [`campaign`] plays many seeds.

pub mod campaign;
mod clock;
mod fates;
pub mod fault;
mod machines;
mod oracle;
mod panics;
pub mod planted;
mod schedulers;
pub mod shrink;
pub mod tally;
mod world;

pub use world::policies::check_folder;

use fault::FaultKind;
use planted::PlantedBug;
use std::collections::BTreeSet;
use tally::FaultTally;
use world::FaultyCluster;

/// One simulated run: its seed, its length and its faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    pub seed: u64,
    /// Steps before the quiet period; [`DEFAULT_STEPS`] unless a history is shortened.
    pub steps: u64,
    /// Kinds of faults that are drawn and do not happen.
    pub without: BTreeSet<FaultKind>,
    /// A bug that is there on purpose.
    pub planted: Option<PlantedBug>,
}

/// Steps of a whole history: about four minutes of simulated time.
pub const DEFAULT_STEPS: u64 = 600;

impl History {
    pub fn from_seed(seed: u64) -> Self {
        Self {
            seed,
            steps: DEFAULT_STEPS,
            without: BTreeSet::new(),
            planted: None,
        }
    }

    /// The arguments of `stowage simulate faults` that play it again.
    pub fn arguments(&self) -> String {
        let mut text = format!("--seeds {}", self.seed);
        if self.steps != DEFAULT_STEPS {
            text += &format!(" --steps {}", self.steps);
        }
        if !self.without.is_empty() {
            let kinds: Vec<&str> = self.without.iter().map(|kind| kind.name()).collect();
            text += &format!(" --without {}", kinds.join(","));
        }
        text
    }
}

/// What came of one history.
#[derive(Debug)]
pub struct HistoryRun {
    pub tally: FaultTally,
    /// What happened, a line each, with its time.
    pub lines: Vec<String>,
    /// What should not have happened, in order.
    pub violations: Vec<String>,
}

/// Plays a history, on this thread.
pub fn play(history: &History) -> HistoryRun {
    // Backoffs of the Kubernetes client draw from it.
    fastrand::seed(history.seed);
    panics::reset();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime of one thread without I/O");
    runtime.block_on(async { FaultyCluster::new(history.clone()).play().await })
}
