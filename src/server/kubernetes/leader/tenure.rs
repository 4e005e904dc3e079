//! Tenure: when a replica may act and as which epoch, given the Lease's term and when it began. Pure.

use super::{LeaseTerm, safe_duration};
use crate::service::Tenure;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::units::{Millis, Moment};

/// How long the predecessor's writes can land, and what makes this leader's epoch unique.
#[derive(Debug, Clone)]
pub(crate) struct Succession {
    /// Longest time from the beginning of a write to its taking effect.
    max_write_delay: Millis,
    /// Distinguishes this process in its epochs.
    nonce: String,
}

impl Succession {
    pub fn new(landing: Millis, nonce: &str) -> Self {
        Self {
            max_write_delay: landing,
            nonce: nonce.into(),
        }
    }

    /// The moment from which no write can land of a leader that may have renewed a Lease of this duration until `renewed`.
    pub(crate) fn end_of_writes_after_renewal(&self, renewed: Moment, duration: Millis) -> Moment {
        self.end_of_writes_after_send(renewed + safe_duration(duration))
    }

    /// The moment from which no write can land of a leader that began its last write at `sent` or before.
    pub(crate) fn end_of_writes_after_send(&self, sent: Moment) -> Moment {
        sent + self.max_write_delay
    }

    pub fn tenure(&self, term: &LeaseTerm, from: Moment, until: Moment, now: Moment) -> Tenure {
        match () {
            () if now >= until => Tenure::Standby,
            () if now < from => Tenure::AwaitingEarlierWrites { from },
            () => Tenure::Leading {
                epoch: self.epoch(term),
                until,
            },
        }
    }

    fn epoch(&self, term: &LeaseTerm) -> LeaderEpoch {
        LeaderEpoch::new(&term.lease, term.transitions, &self.nonce)
    }

    /// The tenure of a replica that needs no Lease, because it is the only one. From `from` on no write of an earlier process
    /// can land any more.
    pub fn tenure_without_lease(&self, from: Moment, now: Moment) -> Tenure {
        let no_lease = LeaseTerm {
            lease: "no-lease".into(),
            transitions: 0,
            holder: None,
        };
        self.tenure(&no_lease, from, Moment(u64::MAX), now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sole_replica_waits_for_the_last_landing_and_leads_without_end() {
        let succession = Succession::new(Millis::seconds(4), "nonce");
        let started = Moment(1_000_000);
        let from = succession.end_of_writes_after_send(started);
        assert_eq!(
            succession.tenure_without_lease(from, started),
            Tenure::AwaitingEarlierWrites {
                from: started + Millis::seconds(4)
            }
        );
        assert_eq!(
            succession.tenure_without_lease(from, Moment(from.0 - 1)),
            Tenure::AwaitingEarlierWrites { from }
        );
        let led = succession.tenure_without_lease(from, from);
        assert!(
            matches!(
                led,
                Tenure::Leading {
                    until: Moment(u64::MAX),
                    ..
                }
            ),
            "{led:?}"
        );
        assert_eq!(
            succession.tenure_without_lease(from, from + Millis::seconds(1_000_000)),
            led,
            "the epoch stays the same"
        );
        assert_eq!(
            succession.tenure_without_lease(started, started),
            led,
            "a cluster without a predecessor is led at once"
        );
    }
}
