//! Limits on the time, size and frequency of everything that an engine can cost its node's agent.

use super::counter_window::RATE_WINDOW;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineLimits {
    /// Timeout for a connection. Short, because a pod is on this very node.
    pub connect_timeout: Duration,
    /// Timeout for one answer, from the first byte of the request to the last of the body.
    pub response_timeout: Duration,
    /// A round waits this long for its requests; later answers are used in the next round.
    pub round_timeout: Duration,
    /// Maximum bytes of an answer.
    pub max_page_bytes: usize,
    /// Bytes above which a page is medium: [`EngineLimits::concurrent_medium_pages`] of them are read at a time.
    pub medium_page_bytes: usize,
    pub concurrent_medium_pages: usize,
    /// Bytes above which a page is large: one of them is read at a time, so that hostile pods' answers do not add up.
    pub large_page_bytes: usize,
    /// Figures older than this are not reported any more.
    pub max_age: Duration,
    /// Rates and latencies are of this time, once the engine is known for so long. The core takes it to be no longer than the default.
    pub rate_window: Duration,
    /// How long an engine counts as full after it has interrupted a request of its own.
    pub preempting_for: Duration,
    /// Addresses tried in one round at a pod that may be no engine.
    pub probes_per_round: usize,
    /// The longest pause between two attempts at a pod that is an engine.
    pub max_engine_backoff: Duration,
    /// The longest pause between two rounds of attempts at a pod that may be none.
    pub max_guess_backoff: Duration,
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_millis(300),
            // Within the second until the next round.
            response_timeout: Duration::from_millis(800),
            // An engine answers in some ten milliseconds. One that hangs must not delay the node's report for long.
            round_timeout: Duration::from_millis(250),
            // Fifty times what a large engine prints.
            max_page_bytes: 8 << 20,
            // A full node has 250 pods: 16 MiB of small pages, 16 of medium ones and 8 of a large one are less than the
            // agent may use.
            medium_page_bytes: 64 << 10,
            concurrent_medium_pages: 16,
            large_page_bytes: 1 << 20,
            // After the first of these times the extender treats a report as stale, and after the second as missing.
            max_age: Duration::from_secs(30),
            rate_window: RATE_WINDOW,
            // One that lacks room goes on interrupting; between two interruptions some steps of all its requests pass.
            preempting_for: Duration::from_secs(10),
            probes_per_round: 2,
            // An engine is found within this time of its first answer.
            max_engine_backoff: Duration::from_secs(2),
            max_guess_backoff: Duration::from_secs(15),
        }
    }
}
