//! Stowage's own Lease: when to take it, when to renew it, and how long it can be relied on. Pure.
//!
//! A write of this replica counts from when it was sent, another replica's from when it was seen: both err towards no leader.
//! Two candidates are ordered by the Lease's resourceVersion, which the caller passes on; therefore a rival that is outwaited
//! cannot have renewed between the last read and the write.

use super::tenure::Succession;
use super::{LeaseReading, LeaseTerm, safe_duration};
use crate::service::Tenure;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use stowage_scheduling::units::{Millis, Moment};

/// Kubernetes components' own default: long enough to outlive a busy API server, short enough to wait for.
const LEASE_DURATION: Millis = Millis::seconds(15);
/// The duration of a Lease that was given up, as client-go writes it.
const RELEASED_LEASE_SECONDS: i32 = 1;

#[derive(Debug)]
pub(crate) struct LeaseCandidate {
    /// Unique to this process; a replica of the same name has another.
    identity: String,
    succession: Succession,
    /// Another replica's latest renewal, and when it was seen.
    rival: Option<(LeaseReading, Moment)>,
    safe_until: Option<Moment>,
    /// When this replica may act once it holds the Lease: no write of the previous holder can land any more.
    may_act_from: Moment,
    term: Option<LeaseTerm>,
}

impl LeaseCandidate {
    pub fn new(identity: String, succession: Succession) -> Self {
        Self {
            identity,
            succession,
            rival: None,
            safe_until: None,
            may_act_from: Moment::default(),
            term: None,
        }
    }

    /// What to write after `lease` was read at `now` (`None` if there is none); `None` while another replica holds it.
    pub fn step(
        &mut self,
        lease: Option<&Lease>,
        now: Moment,
        wall: jiff::Timestamp,
    ) -> Option<LeaseSpec> {
        let Some(lease) = lease else {
            // The previous holder of a deleted Lease may not have noticed yet.
            self.may_act_from = self
                .succession
                .end_of_writes_after_renewal(now, LEASE_DURATION);
            return Some(self.acquired(0, wall));
        };
        let reading = LeaseReading::from_lease(lease);
        let spec = lease.spec.clone().unwrap_or_default();
        let next = spec.lease_transitions.unwrap_or(0).saturating_add(1);
        match reading.holder.as_deref() {
            Some(holder) if holder == self.identity => Some(renewed(&spec, wall)),
            None => {
                self.may_act_from = match spec.lease_duration_seconds {
                    // Its holder had stopped writing before it gave the Lease up.
                    Some(RELEASED_LEASE_SECONDS) => self.succession.end_of_writes_after_send(now),
                    // Someone else has cleared it, and the holder may not have noticed yet.
                    _ => self
                        .succession
                        .end_of_writes_after_renewal(now, LEASE_DURATION),
                };
                Some(self.acquired(next, wall))
            }
            Some(_) => {
                (self.safe_until, self.term) = (None, None);
                self.may_act_from = self.outwaited(reading, now)?;
                Some(self.acquired(next, wall))
            }
        }
    }

    /// Records that a write sent at `sent` succeeded, and the Lease since.
    pub fn record_write(&mut self, sent: Moment, lease: &Lease) {
        self.rival = None;
        self.term = Some(LeaseReading::from_lease(lease).term);
        self.safe_until = Some(sent + safe_duration(LEASE_DURATION));
    }

    pub fn tenure(&self, now: Moment) -> Tenure {
        match (&self.term, self.safe_until) {
            (Some(term), Some(until)) => {
                self.succession.tenure(term, self.may_act_from, until, now)
            }
            _ => Tenure::Standby,
        }
    }

    /// Gives the Lease up. Returns what to write if this replica holds it.
    pub(crate) fn resign(&mut self, lease: &LeaseSpec) -> Option<LeaseSpec> {
        (self.safe_until, self.term) = (None, None);
        let is_ours = lease.holder_identity.as_deref() == Some(self.identity.as_str());
        // As client-go releases it: without a holder, and expiring at once.
        is_ours.then(|| LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(RELEASED_LEASE_SECONDS),
            ..lease.clone()
        })
    }

    /// The moment from which no write of the rival can land; `None` until its latest renewal has been seen for its whole duration.
    fn outwaited(&mut self, reading: LeaseReading, now: Moment) -> Option<Moment> {
        match &self.rival {
            Some((rival, seen_at)) if *rival == reading => {
                let from = self
                    .succession
                    .end_of_writes_after_renewal(*seen_at, rival.duration);
                (now >= *seen_at + rival.duration).then_some(from)
            }
            _ => {
                self.rival = Some((reading, now));
                None
            }
        }
    }

    fn acquired(&self, transitions: i32, wall: jiff::Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some((LEASE_DURATION.0 / 1000) as i32),
            acquire_time: Some(MicroTime(wall)),
            renew_time: Some(MicroTime(wall)),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }
}

fn renewed(lease: &LeaseSpec, wall: jiff::Timestamp) -> LeaseSpec {
    LeaseSpec {
        renew_time: Some(MicroTime(wall)),
        lease_duration_seconds: Some((LEASE_DURATION.0 / 1000) as i32),
        ..lease.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn wall(seconds: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(seconds).unwrap()
    }

    /// What a write may take in these tests.
    const LANDING: Millis = Millis::seconds(4);

    fn candidate(identity: &str) -> LeaseCandidate {
        LeaseCandidate::new(identity.into(), Succession::new(LANDING, identity))
    }

    fn taken(step: Option<LeaseSpec>) -> Lease {
        stored(step.expect("the Lease can be taken"))
    }

    fn stored(spec: LeaseSpec) -> Lease {
        let metadata = ObjectMeta {
            uid: Some("lease-uid".into()),
            ..ObjectMeta::default()
        };
        Lease {
            metadata,
            spec: Some(spec),
        }
    }

    fn spec(lease: &Lease) -> &LeaseSpec {
        lease.spec.as_ref().unwrap()
    }

    fn leads(candidate: &LeaseCandidate, second: u64) -> bool {
        matches!(candidate.tenure(at(second)), Tenure::Leading { .. })
    }

    /// It renews its Lease for so long that nothing of before can land any more.
    fn established(
        candidate: &mut LeaseCandidate,
        seconds: std::ops::RangeInclusive<u64>,
    ) -> Lease {
        let mut lease = None;
        for second in seconds {
            let renewed =
                taken(candidate.step(lease.as_ref(), at(second), wall(1000 + second as i64)));
            candidate.record_write(at(second), &renewed);
            lease = Some(renewed);
        }
        lease.unwrap()
    }

    #[test]
    fn a_created_lease_is_acted_on_once_nothing_of_a_holder_that_lost_it_can_land() {
        let mut a = candidate("a");
        let lease = taken(a.step(None, at(0), wall(1000)));
        assert_eq!(spec(&lease).holder_identity.as_deref(), Some("a"));
        assert_eq!(
            a.tenure(at(0)),
            Tenure::Standby,
            "not before the write went through"
        );
        a.record_write(at(0), &lease);
        assert_eq!(
            a.tenure(at(9)),
            Tenure::AwaitingEarlierWrites { from: at(14) }
        );
        assert_eq!(
            a.tenure(at(10)),
            Tenure::Standby,
            "not renewed for ten seconds: five before it can be taken"
        );
        let renewed = taken(a.step(Some(&lease), at(12), wall(1012)));
        a.record_write(at(12), &renewed);
        assert!(!leads(&a, 13) && leads(&a, 14) && leads(&a, 21) && !leads(&a, 22));
    }

    #[test]
    fn a_rival_is_outwaited_by_our_clock_and_taken_over_from_once() {
        let (mut a, mut b) = (candidate("a"), candidate("b"));
        let held = established(&mut a, 0..=20);
        assert_eq!(
            b.step(Some(&held), at(100), wall(5)),
            None,
            "whatever the wall clocks say"
        );
        assert_eq!(b.step(Some(&held), at(114), wall(5)), None);
        let renewed = taken(a.step(Some(&held), at(21), wall(1002)));
        assert_eq!(
            b.step(Some(&renewed), at(115), wall(5)),
            None,
            "a renewal starts it again"
        );
        assert_eq!(b.step(Some(&renewed), at(129), wall(5)), None);
        let stolen = taken(b.step(Some(&renewed), at(130), wall(5)));
        assert_eq!(spec(&stolen).holder_identity.as_deref(), Some("b"));
        assert_eq!(spec(&stolen).lease_transitions, Some(1));
        b.record_write(at(130), &stolen);
        a.record_write(at(21), &renewed);
        assert_eq!(a.step(Some(&stolen), at(22), wall(1022)), None);
        assert!(
            !leads(&a, 22),
            "a candidate that sees another holder stops at once"
        );
    }

    #[test]
    fn a_rivals_lease_is_acted_on_once_no_write_of_the_rival_can_land() {
        let (mut a, mut b) = (candidate("a"), candidate("b"));
        let held = established(&mut a, 0..=20);
        // Seen renewed at 100 s: relied on until 110 s, and what was sent then may land until 114 s.
        assert_eq!(b.step(Some(&held), at(100), wall(5)), None);
        let stolen = taken(b.step(Some(&held), at(115), wall(5)));
        b.record_write(at(115), &stolen);
        assert!(leads(&b, 115));
        let slow = LeaseCandidate::new("b".into(), Succession::new(Millis::seconds(30), "b"));
        let mut b = slow;
        assert_eq!(b.step(Some(&held), at(100), wall(5)), None);
        let stolen = taken(b.step(Some(&held), at(115), wall(5)));
        b.record_write(at(115), &stolen);
        assert_eq!(
            b.tenure(at(115)),
            Tenure::AwaitingEarlierWrites { from: at(140) }
        );
    }

    #[test]
    fn a_replica_of_the_same_name_is_a_rival() {
        let (mut before, mut after) = (candidate("stowage-0_1"), candidate("stowage-0_2"));
        let held = established(&mut before, 0..=20);
        assert_eq!(after.step(Some(&held), at(21), wall(1021)), None);
    }

    #[test]
    fn a_renewal_keeps_when_it_was_acquired_and_the_epoch() {
        let mut a = candidate("a");
        let held = taken(a.step(None, at(0), wall(1000)));
        a.record_write(at(0), &held);
        let epoch = a.tenure(at(0));
        let renewed = taken(a.step(Some(&held), at(2), wall(1002)));
        assert_eq!(spec(&renewed).acquire_time, Some(MicroTime(wall(1000))));
        assert_eq!(spec(&renewed).renew_time, Some(MicroTime(wall(1002))));
        assert_eq!(spec(&renewed).lease_transitions, Some(0));
        a.record_write(at(2), &renewed);
        assert_eq!(a.tenure(at(2)).epoch(), epoch.epoch());
    }

    #[test]
    fn a_lease_that_was_given_up_is_taken_at_once_and_acted_on_after_the_last_landing() {
        let mut a = candidate("a");
        let held = established(&mut a, 0..=20);
        let released = stored(a.resign(spec(&held)).unwrap());
        assert!(!leads(&a, 21));
        let mut b = candidate("b");
        let lease = taken(b.step(Some(&released), at(21), wall(1001)));
        assert_eq!(spec(&lease).holder_identity.as_deref(), Some("b"));
        assert_eq!(spec(&lease).lease_duration_seconds, Some(15));
        b.record_write(at(21), &lease);
        assert!(!leads(&b, 24) && leads(&b, 25));
        assert_eq!(
            a.resign(spec(&lease)),
            None,
            "what is another's is not given up"
        );
    }

    #[test]
    fn a_lease_whose_holder_someone_cleared_is_acted_on_once_the_holder_must_have_noticed() {
        let (mut a, mut b) = (candidate("a"), candidate("b"));
        let held = established(&mut a, 0..=20);
        let cleared = stored(LeaseSpec {
            holder_identity: Some(String::new()),
            ..spec(&held).clone()
        });
        let lease = taken(b.step(Some(&cleared), at(21), wall(1001)));
        b.record_write(at(21), &lease);
        assert!(leads(&a, 25), "it has not read the Lease since");
        b.record_write(at(30), &lease);
        assert!(!leads(&b, 34) && leads(&b, 35));
    }
}
