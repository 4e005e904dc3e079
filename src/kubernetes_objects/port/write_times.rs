//! How long each part of a write may take, and when it can land at the latest. Every deadline of a write is derived from here.
//!
//! ```text
//!  checked ──────────────► sent ─────────────► received ─────────────► given up ─────► committed
//!  against the Lease's     by the client's     by TCP_USER_TIMEOUT     by the server's  by the store,
//!  end                     deadline                                    `timeout`        if it had begun
//! ```
//!
//! Three things are not bounded by any of these: a proxy in front of the API server that buffers a request for longer than its
//! client lives, an API server that stalls between receiving a request and reading it, and a process here that stalls between
//! the check and the first byte. The audit of bound pods reports writes that land even later.

use std::time::Duration;

/// The time of a write unless `--write-deadline` sets another.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);

/// A store that has begun to commit finishes well within a fifth of the whole request's time.
const COMMIT_DIVISOR: u32 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteTimes {
    /// From the check against the Lease's end until the client gives up and closes the connection.
    pub client: Duration,
    /// How long the kernel keeps sending what the client has written (`TCP_USER_TIMEOUT`).
    pub transport: Duration,
    /// How long the API server works on a request (its `timeout` parameter), from receiving it.
    pub server: Duration,
    /// How long a commit takes that had begun by then.
    pub commit: Duration,
}

impl WriteTimes {
    /// The times of a write whose parts all follow from one deadline.
    pub const fn from_deadline(deadline: Duration) -> Self {
        let commit = Duration::from_nanos(deadline.as_nanos() as u64 / COMMIT_DIVISOR as u64);
        Self {
            client: deadline,
            transport: deadline,
            server: deadline,
            commit,
        }
    }

    /// The longest time from the check against the Lease's end to a write's commit, whatever its answer.
    pub fn max_commit_delay(self) -> Duration {
        self.client + self.transport + self.server + self.commit
    }
}

impl Default for WriteTimes {
    fn default() -> Self {
        Self::from_deadline(DEFAULT_DEADLINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_write_counts_towards_its_commit_delay() {
        let times = WriteTimes::default();
        assert_eq!(times.max_commit_delay(), Duration::from_secs(16));
        let parts = [times.client, times.transport, times.server, times.commit];
        assert!(parts.iter().all(|part| !part.is_zero()));
        assert_eq!(parts.iter().sum::<Duration>(), times.max_commit_delay());
    }
}
