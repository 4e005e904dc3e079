//! When the API server was last heard of: whether what is known of the cluster can be taken for what is.
//!
//! A watch that shows nothing and one whose server is gone look alike for a minute; this tells them apart. Nothing here asks
//! anyone, and no decision reads it back.

use crate::units::{Millis, Moment};
use std::sync::atomic::{AtomicU64, Ordering};

/// By then a leader has stopped to act, since its Lease was not renewed, and an API server that restarts beside another is
/// back. A kubelet looks three times before it believes it.
const LOST_AFTER: Millis = Millis::seconds(15);

/// Never, in a process without an API server.
const NEVER: u64 = 0;

#[derive(Debug, Default)]
pub struct ApiServerContact(AtomicU64);

impl ApiServerContact {
    /// The API server answered something that was asked then, or showed something.
    pub fn heard(&self, at: Moment) {
        self.0.fetch_max(at.0, Ordering::AcqRel);
    }

    /// For how long nothing has been heard; `None` where nothing ever was.
    pub fn silence(&self, now: Moment) -> Option<Millis> {
        let last = self.0.load(Ordering::Acquire);
        (last != NEVER).then(|| now.since(Moment(last)))
    }

    /// The same, if it is long enough to call the API server gone.
    pub fn lost_for(&self, now: Moment) -> Option<Millis> {
        self.silence(now).filter(|silence| *silence > LOST_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_is_gone_when_it_has_been_silent_for_long_enough() {
        let (contact, at) = (ApiServerContact::default(), |seconds| Moment(0) + Millis::seconds(seconds));
        assert_eq!(contact.lost_for(at(1000)), None, "there is none");
        contact.heard(at(100));
        contact.heard(at(90));
        assert_eq!(contact.lost_for(at(115)), None);
        assert_eq!(contact.lost_for(at(116)), Some(Millis::seconds(16)));
        contact.heard(at(116));
        assert_eq!(contact.lost_for(at(116)), None);
    }
}
