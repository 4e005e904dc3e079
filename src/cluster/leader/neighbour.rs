//! Whether the kube-scheduler beside us holds its Lease, judged by our own monotonic clock. Pure.
//!
//! The Lease is looked at again and again. A renewal that shows between two looks was made after the first of them was
//! asked for, whatever the network did to either, so that moment is where its time is counted from: too early, never
//! too late. Wall clocks are not compared; `renewTime` only says whether there was a renewal.

use super::{Reading, safe_duration};
use crate::units::{Millis, Moment};

/// How long a replica that has just become the leader leaves the cluster alone. A scheduler that is told to stop gives its
/// Lease up at once, and the Binding that its Stowage was writing then may take as long as a write may take.
pub const HANDOVER: Millis = Millis::seconds(5);

#[derive(Debug)]
pub struct Neighbour {
    /// What its identity begins with: `<hostname>_<uuid>`, and our pod's hostname is its own.
    hostname: String,
    /// The latest look that succeeded: what was seen, and when it was asked for.
    last: Option<(Reading, Moment)>,
    until: Option<Moment>,
    /// When it was first seen to hold the Lease, without a break since.
    since: Option<Moment>,
}

impl Neighbour {
    pub fn new(hostname: String) -> Self {
        Self { hostname, last: None, until: None, since: None }
    }

    /// What a look showed that was asked for at `asked`; `None` if there is no such Lease.
    pub fn see(&mut self, reading: Option<Reading>, asked: Moment) {
        let last = self.last.take();
        let Some(reading) = reading else {
            (self.until, self.since) = (None, None);
            return;
        };
        if !self.holds(&reading) {
            (self.until, self.since) = (None, None);
        } else {
            self.since.get_or_insert(asked);
            if let Some((_, asked_before)) = last.filter(|(before, _)| *before != reading) {
                // Nobody knows how old what the first look shows is: it takes a change to lead.
                self.until = Some(asked_before + safe_duration(reading.duration));
            }
        }
        self.last = Some((reading, asked));
    }

    pub fn leads(&self, now: Moment) -> bool {
        let handed_over = self.since.is_some_and(|since| since + HANDOVER <= now);
        handed_over && self.until.is_some_and(|until| now < until)
    }

    fn holds(&self, reading: &Reading) -> bool {
        let Some(holder) = reading.holder.as_deref() else { return false };
        holder.rsplit_once('_').map_or(holder, |(hostname, _)| hostname) == self.hostname
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn held_by(holder: &str, renewed: i64) -> Option<Reading> {
        let renewed = Some(jiff::Timestamp::from_second(renewed).unwrap());
        Some(Reading { holder: Some(holder.into()), renewed, duration: Millis::seconds(15) })
    }

    fn neighbour() -> Neighbour {
        Neighbour::new("stowage-0".into())
    }

    #[test]
    fn the_first_look_does_not_lead_and_a_renewal_does() {
        let mut lease = neighbour();
        lease.see(held_by("stowage-0_1b2c", 100), at(0));
        assert!(!lease.leads(at(0)), "it may be as old as it likes");
        lease.see(held_by("stowage-0_1b2c", 100), at(1));
        assert!(!lease.leads(at(6)));
        lease.see(held_by("stowage-0_1b2c", 102), at(6));
        assert!(lease.leads(at(6)));
    }

    #[test]
    fn without_a_renewal_it_ends_a_third_before_the_lease_can_pass_on() {
        let mut lease = neighbour();
        lease.see(held_by("stowage-0_1b2c", 100), at(0));
        lease.see(held_by("stowage-0_1b2c", 102), at(3));
        // Renewed after the look at 0 s, so it may pass on at 15 s and not before.
        for second in 4..20 {
            lease.see(held_by("stowage-0_1b2c", 102), at(second));
            assert_eq!(lease.leads(at(second)), (5..10).contains(&second), "{second} s");
        }
    }

    #[test]
    fn looks_that_fail_move_nothing() {
        let mut lease = neighbour();
        lease.see(held_by("stowage-0_1b2c", 100), at(0));
        lease.see(held_by("stowage-0_1b2c", 102), at(1));
        // Five looks fail. The renewal the sixth shows may have been made right after the second.
        lease.see(held_by("stowage-0_1b2c", 104), at(7));
        assert!(lease.leads(at(10)));
        assert!(!lease.leads(at(11)));
    }

    #[test]
    fn another_holder_a_released_lease_and_a_missing_one_end_it_at_once() {
        let released = Some(Reading { holder: None, renewed: None, duration: Millis::seconds(1) });
        for next in [held_by("stowage-1_9f", 103), held_by("other-stowage-0_9f", 103), released, None] {
            let mut lease = neighbour();
            lease.see(held_by("stowage-0_1b2c", 100), at(0));
            lease.see(held_by("stowage-0_1b2c", 102), at(1));
            assert!(lease.leads(at(6)));
            lease.see(next.clone(), at(7));
            assert!(!lease.leads(at(7)), "{next:?}");
        }
    }

    #[test]
    fn a_takeover_leads_once_what_the_other_was_writing_is_written() {
        let mut lease = Neighbour::new("node_a".into());
        lease.see(held_by("node_b_77", 100), at(0));
        // A hostname may contain the separator.
        lease.see(held_by("node_a_78", 115), at(1));
        assert!(!lease.leads(at(5)));
        assert!(lease.leads(at(6)));
    }
}
