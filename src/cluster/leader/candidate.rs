//! Stowage's own Lease: when to take it, when to renew it, and how long it can be relied on. Pure.
//!
//! A write of ours counts from when it was sent, somebody else's from when we saw it: both err on the side of nobody
//! leading. Two candidates agree on a Lease by its resourceVersion; that is the caller's to pass on.

use super::{Reading, safe_duration};
use crate::units::{Millis, Moment};
use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// What Kubernetes' own components use: long enough to outlive a busy API server, short enough to wait for.
const DURATION_SECONDS: i32 = 15;

#[derive(Debug)]
pub struct Candidate {
    identity: String,
    /// Somebody else's latest renewal, and when we saw it.
    rival: Option<(Reading, Moment)>,
    until: Option<Moment>,
}

/// What to write now.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    Create(LeaseSpec),
    Replace(LeaseSpec),
    Wait,
}

impl Candidate {
    pub fn new(identity: String) -> Self {
        Self { identity, rival: None, until: None }
    }

    /// What to do about a Lease seen at `now`; `None` if there is none.
    pub fn step(&mut self, lease: Option<&LeaseSpec>, now: Moment, wall: jiff::Timestamp) -> Step {
        let Some(lease) = lease else { return Step::Create(self.acquired(0, wall)) };
        let reading = Reading::of(lease);
        let transitions = lease.lease_transitions.unwrap_or(0);
        match reading.holder.as_deref() {
            Some(holder) if holder == self.identity => Step::Replace(renewed(lease, wall)),
            None => Step::Replace(self.acquired(transitions.saturating_add(1), wall)),
            Some(_) => {
                self.until = None;
                match self.has_run_out(reading, now) {
                    true => Step::Replace(self.acquired(transitions.saturating_add(1), wall)),
                    false => Step::Wait,
                }
            }
        }
    }

    /// A write that was sent at `sent` went through.
    pub fn wrote(&mut self, sent: Moment) {
        self.rival = None;
        self.until = Some(sent + safe_duration(Millis::seconds(DURATION_SECONDS as u64)));
    }

    pub fn leads(&self, now: Moment) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Gives the Lease up. Answers what to write, if it is ours.
    pub fn resign(&mut self, lease: &LeaseSpec) -> Option<LeaseSpec> {
        self.until = None;
        let is_ours = lease.holder_identity.as_deref() == Some(self.identity.as_str());
        // As client-go releases it: nobody holds it, and it runs out at once.
        is_ours.then(|| LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            ..lease.clone()
        })
    }

    fn has_run_out(&mut self, reading: Reading, now: Moment) -> bool {
        match &self.rival {
            Some((known, seen)) if *known == reading => now >= *seen + known.duration,
            _ => {
                self.rival = Some((reading, now));
                false
            }
        }
    }

    fn acquired(&self, transitions: i32, wall: jiff::Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(DURATION_SECONDS),
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
        lease_duration_seconds: Some(DURATION_SECONDS),
        ..lease.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn wall(seconds: i64) -> jiff::Timestamp {
        jiff::Timestamp::from_second(seconds).unwrap()
    }

    fn taken(step: Step) -> LeaseSpec {
        match step {
            Step::Create(lease) | Step::Replace(lease) => lease,
            Step::Wait => panic!("it waits"),
        }
    }

    #[test]
    fn who_finds_no_lease_creates_it_and_leads_once_it_is_written() {
        let mut a = Candidate::new("a".into());
        let lease = taken(a.step(None, at(0), wall(1000)));
        assert_eq!(lease.holder_identity.as_deref(), Some("a"));
        assert!(!a.leads(at(0)), "not before the write went through");
        a.wrote(at(0));
        assert!(a.leads(at(9)));
        assert!(!a.leads(at(10)), "not renewed for ten seconds: five before anyone can take it");
    }

    #[test]
    fn a_rival_is_outwaited_by_our_clock_and_taken_over_from_once() {
        let mut a = Candidate::new("a".into());
        let held = taken(a.step(None, at(0), wall(1000)));
        let mut b = Candidate::new("b".into());
        assert_eq!(b.step(Some(&held), at(100), wall(5)), Step::Wait, "whatever the wall clocks say");
        assert_eq!(b.step(Some(&held), at(114), wall(5)), Step::Wait);
        let renewed = taken(a.step(Some(&held), at(20), wall(1002)));
        assert_eq!(b.step(Some(&renewed), at(115), wall(5)), Step::Wait, "a renewal starts it anew");
        assert_eq!(b.step(Some(&renewed), at(129), wall(5)), Step::Wait);
        let stolen = taken(b.step(Some(&renewed), at(130), wall(5)));
        assert_eq!((stolen.holder_identity.as_deref(), stolen.lease_transitions), (Some("b"), Some(1)));
        a.wrote(at(20));
        assert_eq!(a.step(Some(&stolen), at(22), wall(1022)), Step::Wait);
        assert!(!a.leads(at(22)), "who sees another holder stops at once");
    }

    #[test]
    fn a_renewal_keeps_when_it_was_acquired() {
        let mut a = Candidate::new("a".into());
        let held = taken(a.step(None, at(0), wall(1000)));
        let renewed = taken(a.step(Some(&held), at(2), wall(1002)));
        assert_eq!(renewed.acquire_time, Some(MicroTime(wall(1000))));
        assert_eq!(renewed.renew_time, Some(MicroTime(wall(1002))));
        assert_eq!(renewed.lease_transitions, Some(0));
    }

    #[test]
    fn a_lease_that_was_given_up_is_taken_at_once() {
        let mut a = Candidate::new("a".into());
        let held = taken(a.step(None, at(0), wall(1000)));
        a.wrote(at(0));
        let released = a.resign(&held).unwrap();
        assert!(!a.leads(at(1)));
        let mut b = Candidate::new("b".into());
        let lease = taken(b.step(Some(&released), at(1), wall(1001)));
        assert_eq!((lease.holder_identity.as_deref(), lease.lease_duration_seconds), (Some("b"), Some(15)));
        assert_eq!(a.resign(&lease), None, "what is another's is not given up");
    }
}
