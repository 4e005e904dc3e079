//! Tracks when the API server last answered: whether the known state of the cluster can be taken as current.
//!
//! A watch without changes and a watch whose server is gone look the same for a minute; this distinguishes them. Nothing here
//! sends a request, and no decision depends on it.

use std::sync::atomic::{AtomicU64, Ordering};
use stowage_scheduling::units::{Millis, Moment};

/// After this time a leader has stopped acting, because its Lease was not renewed, and an API server that restarts behind a
/// load balancer is back. A kubelet probes three times before it marks a pod unready.
const UNREACHABLE_AFTER: Millis = Millis::seconds(15);

/// When the API server last answered; never, in a process without an API server.
const NEVER: u64 = 0;

#[derive(Debug, Default)]
pub struct ApiServerContact(AtomicU64);

impl ApiServerContact {
    /// Records that the API server answered a request that was sent then, or sent a watch event.
    pub fn record_contact(&self, at: Moment) {
        self.0.fetch_max(at.0, Ordering::AcqRel);
    }

    /// How long the API server has been silent; `None` if it has never answered.
    pub fn silence(&self, now: Moment) -> Option<Millis> {
        let last = self.0.load(Ordering::Acquire);
        (last != NEVER).then(|| now.since(Moment(last)))
    }

    /// How long the API server has been silent, if that is long enough to call it unreachable.
    pub(crate) fn unreachable_for(&self, now: Moment) -> Option<Millis> {
        self.silence(now)
            .filter(|silence| *silence > UNREACHABLE_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_is_gone_when_it_has_been_silent_for_long_enough() {
        let (contact, at) = (ApiServerContact::default(), |seconds| {
            Moment(0) + Millis::seconds(seconds)
        });
        assert_eq!(contact.unreachable_for(at(1000)), None, "there is none");
        contact.record_contact(at(100));
        contact.record_contact(at(90));
        assert_eq!(contact.unreachable_for(at(115)), None);
        assert_eq!(contact.unreachable_for(at(116)), Some(Millis::seconds(16)));
        contact.record_contact(at(116));
        assert_eq!(contact.unreachable_for(at(116)), None);
    }
}
