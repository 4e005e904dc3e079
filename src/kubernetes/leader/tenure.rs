//! When a replica may act, and as which epoch: what follows from a Lease once it is known which term of it began when. Pure.

use super::{LeaseTerm, safe_duration};
use crate::ids::LeaderEpoch;
use crate::service::Tenure;
use crate::units::{Millis, Moment};
use std::time::Duration;

/// What a new leader has to know of how its predecessor writes, and what makes its own epoch unlike all others.
#[derive(Debug, Clone)]
pub struct Succession {
    /// How long after it was begun a write can land at the latest.
    landing: Millis,
    /// Of this process.
    nonce: String,
}

impl Succession {
    pub fn new(landing: Millis, nonce: &str) -> Self {
        Self { landing, nonce: nonce.into() }
    }

    /// From when on nothing can land of a leader that may have renewed a Lease of this duration until `renewed`.
    pub fn after_a_renewal_at(&self, renewed: Moment, duration: Millis) -> Moment {
        self.after_a_last_send_at(renewed + safe_duration(duration))
    }

    /// The same of one that began its last write at `sent` or before.
    pub fn after_a_last_send_at(&self, sent: Moment) -> Moment {
        sent + self.landing
    }

    pub fn tenure(&self, term: &LeaseTerm, from: Moment, until: Moment, now: Moment) -> Tenure {
        match () {
            () if now >= until => Tenure::Standby,
            () if now < from => Tenure::Succeeding { from },
            () => Tenure::Leading { epoch: self.epoch(term), until },
        }
    }

    fn epoch(&self, term: &LeaseTerm) -> LeaderEpoch {
        LeaderEpoch::new(&term.lease, term.transitions, &self.nonce)
    }

    /// Of a replica that needs no Lease, because there is no other; what a process before it sent lands within `landed`.
    pub fn alone(&self, now: Moment, landed: Duration) -> Tenure {
        let no_lease = LeaseTerm { lease: "no-lease".into(), transitions: 0, holder: None };
        self.tenure(&no_lease, now + Millis(landed.as_millis() as u64), Moment(u64::MAX), now)
    }
}
