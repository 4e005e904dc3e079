//! Limits of connections to an address: how long each step may take, and how many there may be.
//!
//! Each address has numbers of its own; the times are the same for all. The process' file descriptors bound the sum
//! ([`ConnectionLimits::fit_to`]). Nothing here reads or writes.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// For a TLS handshake.
    pub handshake: Duration,
    /// From the handshake to the first byte of a request.
    pub first_byte: Duration,
    /// From a head's first byte to its last.
    pub head: Duration,
    /// Between two requests. Go's client and the agents keep an idle connection for 90 s: a server that closes sooner closes
    /// connections that are about to be used.
    pub idle: Duration,
    /// While the client reads none of its answer.
    pub write: Duration,
    /// For a request and its answer as a whole: no page and no verb takes longer, even over a slow port-forward.
    pub request: Duration,
    /// From one source, on each address. Agents behind one NAT count as one source.
    pub per_source: usize,
    /// In all, on the scheduler's address. kube-scheduler had 29 binds in progress at the most.
    pub scheduler: usize,
    /// Each agent has one, in clusters three times the size that Kubernetes supports.
    pub agents: usize,
    pub operators: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            first_byte: Duration::from_secs(10),
            head: Duration::from_secs(10),
            idle: Duration::from_secs(100),
            write: Duration::from_secs(20),
            request: Duration::from_secs(300),
            per_source: 256,
            scheduler: 512,
            agents: 16_384,
            operators: 512,
        }
    }
}

/// For the API server's connections, files, timers and the listeners themselves.
const RESERVED_DESCRIPTORS: (u64, u64) = (64, 1024);

impl ConnectionLimits {
    /// Reduces the limits to what a process with this many descriptors can have beside its own needs: half of a small number is
    /// kept back, 1,024 of a large one. The two small addresses get at most a quarter of the rest each.
    pub fn fit_to(mut self, descriptors: u64) -> Self {
        let reserve = (descriptors / 2).clamp(RESERVED_DESCRIPTORS.0, RESERVED_DESCRIPTORS.1);
        let available = usize::try_from(descriptors.saturating_sub(reserve))
            .unwrap_or(usize::MAX)
            .max(3);
        let quarter = (available / 4).max(1);
        self.scheduler = self.scheduler.min(quarter);
        self.operators = self.operators.min(quarter);
        self.agents = self.agents.min(available - self.scheduler - self.operators);
        self
    }
}

/// Raises this process' limit of descriptors as far as allowed, and returns it; `None` for no limit.
pub(crate) fn raise_descriptor_limit() -> Option<u64> {
    let before = getrlimit(Resource::Nofile);
    if before.current != before.maximum {
        let raised = Rlimit {
            current: before.maximum,
            maximum: before.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!("the limit on open files stays as it is: {error}");
        }
    }
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_many_descriptors_the_limits_stay_as_they_are() {
        let limits = ConnectionLimits::default();
        assert_eq!(limits.fit_to(1 << 20), limits);
    }

    #[test]
    fn the_sum_of_all_addresses_leaves_descriptors_for_the_process_itself() {
        for descriptors in [70, 100, 128, 1024, 4096, 20_000] {
            let limits = ConnectionLimits::default().fit_to(descriptors);
            let sum = limits.scheduler + limits.agents + limits.operators;
            let reserve = (descriptors / 2).clamp(64, 1024);
            assert!(
                sum as u64 + reserve <= descriptors.max(reserve + 3),
                "{descriptors}: {limits:?}"
            );
            assert!(
                limits.scheduler > 0 && limits.operators > 0 && limits.agents > 0,
                "{descriptors}: {limits:?}"
            );
        }
    }
}
