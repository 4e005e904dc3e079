//! Whether the kube-scheduler in the same pod holds its Lease, by this process' monotonic clock. Pure.
//!
//! The Lease is read again and again. A renewal that appears between two reads was made after the first of them was sent,
//! whatever the network did to either, so its time counts from that moment: too early, never too late. Wall clocks are not
//! compared; `renewTime` only shows whether there was a renewal.
//!
//! A term begins with the first read that shows it. Its predecessor may have seen a renewal until then, so it may have sent
//! writes for as long as it could rely on that, and those may land for a while: this replica acts in the term from then on.

use super::tenure::Succession;
use super::{LeaseReading, LeaseTerm};
use crate::service::{Tenure, host_of_holder};
use stowage_scheduling::units::Moment;

#[derive(Debug)]
pub(crate) struct SchedulerLease {
    /// The prefix of its identity `<hostname>_<uuid>`; the containers of a pod share the hostname.
    hostname: String,
    succession: Succession,
    /// The latest successful read: what it showed, and when it was sent.
    last_read: Option<(LeaseReading, Moment)>,
    safe_until: Option<Moment>,
    /// The term in which it holds the Lease now, and when this replica may begin to act in it.
    term: Option<(LeaseTerm, Moment)>,
}

impl SchedulerLease {
    pub fn new(hostname: String, succession: Succession) -> Self {
        Self {
            hostname,
            succession,
            last_read: None,
            safe_until: None,
            term: None,
        }
    }

    /// Applies a read that was sent and answered at these times; `None` if there is no such Lease.
    pub fn apply_read(
        &mut self,
        reading: Option<LeaseReading>,
        sent_at: Moment,
        answered_at: Moment,
    ) {
        let last_read = self.last_read.take();
        let Some(reading) = reading else {
            (self.safe_until, self.term) = (None, None);
            return;
        };
        if !self.is_held_here(&reading) {
            (self.safe_until, self.term) = (None, None);
        } else {
            if self
                .term
                .as_ref()
                .is_none_or(|(term, _)| *term != reading.term)
            {
                let previous_duration = last_read
                    .as_ref()
                    .map_or(reading.duration, |(before, _)| before.duration);
                let longest = previous_duration.max(reading.duration);
                let from = self
                    .succession
                    .end_of_writes_after_renewal(answered_at, longest);
                (self.term, self.safe_until) = (Some((reading.term.clone(), from)), None);
            }
            if let Some((_, previous_sent_at)) = last_read.filter(|(before, _)| *before != reading)
            {
                // The age of what the first read shows is unknown: it takes a change to lead.
                self.safe_until = Some(previous_sent_at + super::safe_duration(reading.duration));
            }
        }
        self.last_read = Some((reading, sent_at));
    }

    pub fn tenure(&self, now: Moment) -> Tenure {
        match (&self.term, self.safe_until) {
            (Some((term, from)), Some(until)) => self.succession.tenure(term, *from, until, now),
            _ => Tenure::Standby,
        }
    }

    fn is_held_here(&self, reading: &LeaseReading) -> bool {
        let Some(holder) = reading.holder.as_deref() else {
            return false;
        };
        host_of_holder(holder) == self.hostname
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::units::Millis;

    /// What a write may take in these tests.
    const LANDING: Millis = Millis::seconds(4);

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn held_in(term: i32, holder: &str, renewed: i64) -> Option<LeaseReading> {
        let renewed = Some(jiff::Timestamp::from_second(renewed).unwrap());
        let term = LeaseTerm {
            lease: "lease-uid".into(),
            transitions: term,
            holder: Some(holder.into()),
        };
        Some(LeaseReading {
            holder: Some(holder.into()),
            term,
            renewed_at: renewed,
            duration: Millis::seconds(15),
        })
    }

    fn held_by(holder: &str, renewed: i64) -> Option<LeaseReading> {
        held_in(1, holder, renewed)
    }

    fn neighbor() -> SchedulerLease {
        SchedulerLease::new("stowage-0".into(), Succession::new(LANDING, "nonce"))
    }

    /// A read that is answered in the second in which it is sent.
    fn poll(lease: &mut SchedulerLease, reading: Option<LeaseReading>, second: u64) {
        lease.apply_read(reading, at(second), at(second));
    }

    fn leads(lease: &SchedulerLease, second: u64) -> bool {
        matches!(lease.tenure(at(second)), Tenure::Leading { .. })
    }

    /// It has held the Lease for so long that nothing of an earlier term can land any more.
    fn established() -> SchedulerLease {
        let mut lease = neighbor();
        (0..20).for_each(|second| {
            poll(
                &mut lease,
                held_by("stowage-0_1b2c", second as i64 / 2),
                second,
            )
        });
        lease
    }

    #[test]
    fn the_first_read_does_not_lead_and_a_renewal_does() {
        let mut lease = neighbor();
        for second in 0..20 {
            poll(&mut lease, held_by("stowage-0_1b2c", 100), second);
            assert!(!leads(&lease, second), "it may be as old as it likes");
        }
        poll(&mut lease, held_by("stowage-0_1b2c", 102), 20);
        assert!(leads(&lease, 20));
    }

    #[test]
    fn without_a_renewal_it_ends_a_third_before_the_lease_can_pass_on() {
        let mut lease = established();
        poll(&mut lease, held_by("stowage-0_1b2c", 102), 20);
        // Renewed after the read at 19 s, so it may pass on at 34 s and not before.
        for second in 21..40 {
            poll(&mut lease, held_by("stowage-0_1b2c", 102), second);
            assert_eq!(
                leads(&lease, second),
                (20..29).contains(&second),
                "{second} s"
            );
        }
    }

    #[test]
    fn reads_that_fail_change_nothing() {
        let mut lease = established();
        poll(&mut lease, held_by("stowage-0_1b2c", 102), 21);
        // Five reads fail. The renewal that the next one shows may have been made right after the read before them.
        poll(&mut lease, held_by("stowage-0_1b2c", 104), 27);
        assert!(leads(&lease, 30));
        assert!(!leads(&lease, 31));
    }

    #[test]
    fn another_holder_a_released_lease_and_a_missing_one_end_it_at_once() {
        let term = LeaseTerm {
            lease: "lease-uid".into(),
            transitions: 1,
            holder: None,
        };
        let released = Some(LeaseReading {
            holder: None,
            term,
            renewed_at: None,
            duration: Millis::seconds(1),
        });
        for next in [
            held_by("stowage-1_9f", 103),
            held_by("other-stowage-0_9f", 103),
            released,
            None,
        ] {
            let mut lease = established();
            assert!(leads(&lease, 20));
            poll(&mut lease, next.clone(), 20);
            assert!(!leads(&lease, 20), "{next:?}");
        }
    }

    #[test]
    fn a_new_term_is_acted_in_once_no_write_of_the_previous_term_can_land() {
        let mut lease = SchedulerLease::new("node_a".into(), Succession::new(LANDING, "nonce"));
        poll(&mut lease, held_in(1, "node_b_77", 100), 0);
        // A hostname may contain the separator. The read was sent at 1 s and answered at 3 s: the predecessor may have renewed
        // until then, may have relied on that for ten seconds, and what it sent last may take four more.
        lease.apply_read(held_in(2, "node_a_78", 115), at(1), at(3));
        for second in 3..30 {
            poll(
                &mut lease,
                held_in(2, "node_a_78", 115 + second as i64 / 2),
                second,
            );
            let tenure = lease.tenure(at(second));
            match second {
                ..17 => assert!(
                    matches!(tenure, Tenure::AwaitingEarlierWrites { .. }),
                    "{second} s: {tenure:?}"
                ),
                _ => assert!(
                    matches!(tenure, Tenure::Leading { .. }),
                    "{second} s: {tenure:?}"
                ),
            }
        }
    }

    #[test]
    fn a_scheduler_that_restarts_begins_a_term_of_its_own() {
        let mut lease = established();
        let before = lease.tenure(at(19));
        poll(&mut lease, held_in(2, "stowage-0_ffff", 102), 20);
        assert!(!leads(&lease, 21));
        (21..40).for_each(|second| {
            poll(
                &mut lease,
                held_in(2, "stowage-0_ffff", second as i64 + 90),
                second,
            )
        });
        assert_ne!(lease.tenure(at(39)).epoch(), before.epoch());
    }
}
