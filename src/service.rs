//! What the edges of one running Stowage share: the ledger and the stock view behind their locks, the judge of pods, the clock, whether to act, the metrics.
//!
//! It starts nothing and decides nothing; `serve` and `demo` put it together.

mod judge;
mod standing;

pub use standing::{PolicyStanding, RefusedPolicy, Standing};

use crate::scheduling::ledger::{Judgements, Ledger};
use crate::scheduling::memo::Memo;
use crate::scheduling::policy::{Judgement, Policy, Traits};
use crate::scheduling::stock::StockView;
use crate::telemetry::Metrics;
use crate::units::{Millis, Moment};
use judge::{Judge, Remembered};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::watch;

pub struct Service {
    ledger: Mutex<Ledger>,
    stock: Mutex<StockView>,
    memo: Mutex<Memo>,
    judge: Judge,
    pub clock: Clock,
    pub gate: Gate,
    pub standing: PolicyStanding,
    pub metrics: Metrics,
}

impl Service {
    pub fn new(policy: Policy) -> Arc<Self> {
        Self::by(Clock::start(), policy)
    }

    /// One for which no time passes but what a test lets pass.
    #[cfg(test)]
    pub fn with_stopped_clock(policy: Policy) -> Arc<Self> {
        let clock = Clock::start();
        Self::by(Clock { stopped_at: Some(clock.now()), ..clock }, policy)
    }

    fn by(clock: Clock, policy: Policy) -> Arc<Self> {
        let (policy, metrics) = (Arc::new(policy), Metrics::new());
        metrics.policy.set_in_force(&policy);
        Arc::new(Self {
            judge: Judge::of(policy.clone()),
            ledger: Mutex::new(Ledger::new(policy)),
            stock: Mutex::default(),
            memo: Mutex::default(),
            gate: Gate::default(),
            standing: PolicyStanding::new(clock.now()),
            clock,
            metrics,
        })
    }

    /// The books, which take this for the present. Take them for one call or a few; never across an await.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        let mut ledger = self.ledger.lock();
        ledger.set_now(self.now());
        ledger
    }

    /// The cluster as the stock scheduler's filters see it. Whoever asks about many nodes takes a snapshot, and never asks for
    /// the ledger while this is locked, or the other way round.
    pub fn stock(&self) -> MutexGuard<'_, StockView> {
        self.stock.lock()
    }

    /// Verdicts that are still good. Take a page out of it, and put it back: nobody looks at nodes while this is locked.
    pub fn memo(&self) -> MutexGuard<'_, Memo> {
        self.memo.lock()
    }

    /// What the policy in force makes of a pod.
    pub fn judge(&self, traits: &Traits) -> Judgement {
        self.judge.judge(traits)
    }

    /// Brings another policy into force, in one step; the pods are judged by it beforehand, so that nobody waits for that.
    /// Takes a while on a large cluster: not for a thread that answers requests.
    pub fn set_policy(&self, policy: Policy) {
        let traits = self.ledger().to_judge();
        let mut judged = Judgements::default();
        for traits in traits {
            judged.entry(traits).or_insert_with_key(|traits| policy.judge(traits));
        }
        let remembered = Remembered::of(&judged);
        let mut ledger = self.ledger();
        ledger.set_policy(policy, &judged);
        let policy = ledger.policy().clone();
        // Under the lock, all of it: two that change the policy at once must not leave a mixture.
        self.metrics.policy.set_in_force(&policy);
        self.standing.set_in_force(self.now());
        self.judge.set(policy, remembered);
    }

    pub fn now(&self) -> Moment {
        self.clock.now()
    }
}

/// A monotonic clock for the core, and its relation to wall time for what is written down.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    started: Instant,
    #[cfg(test)]
    stopped_at: Option<Moment>,
}

impl Clock {
    fn start() -> Self {
        Self {
            started: Instant::now(),
            #[cfg(test)]
            stopped_at: None,
        }
    }

    pub fn now(&self) -> Moment {
        #[cfg(test)]
        if let Some(at) = self.stopped_at {
            return at;
        }
        Moment(self.started.elapsed().as_millis() as u64) + BEFORE_START
    }

    /// The wall time of a moment, as far as this machine's wall clock can be trusted right now.
    pub fn to_wall(&self, moment: Moment) -> jiff::Timestamp {
        let ahead = i128::from(moment.0) - i128::from(self.now().0);
        let ahead = jiff::SignedDuration::from_millis(ahead.clamp(-MAX_MILLIS, MAX_MILLIS) as i64);
        jiff::Timestamp::now().saturating_add(ahead).expect("a duration in milliseconds always adds")
    }

    /// The moment of a wall time; what has passed already is now.
    pub fn to_moment(&self, wall: jiff::Timestamp) -> Moment {
        let ahead = wall.duration_since(jiff::Timestamp::now()).as_millis().clamp(0, MAX_MILLIS);
        self.now() + Millis(ahead as u64)
    }
}

/// The clock does not begin at zero: a pod that has run for days must be known to have, in the first second too. No minimum
/// runtime is longer than a year.
const BEFORE_START: Millis = Millis::seconds(365 * 24 * 3600);

/// A year: nothing Stowage writes down lasts longer.
const MAX_MILLIS: i128 = 365 * 24 * 3600 * 1000;

/// Whether this replica has seen the cluster, and whether it is the one that acts.
#[derive(Debug, Default)]
pub struct Gate {
    /// How often the cluster had to be listed anew because this replica began to lead. What was listed in an earlier term
    /// does not count.
    term: watch::Sender<u64>,
    /// One more than the term whose lists the ledger holds; zero before the first.
    synced: AtomicU64,
    leading: AtomicBool,
    stopping: AtomicBool,
}

impl Gate {
    /// The watches have delivered everything once, and the ledger holds it.
    pub fn set_synced(&self) {
        self.set_synced_in(*self.term.borrow());
    }

    /// The same, by lists that all began in this term or a later one.
    pub fn set_synced_in(&self, term: u64) {
        self.synced.fetch_max(term + 1, Ordering::AcqRel);
    }

    /// Who begins to lead lists everything anew first: a watch whose connection died silently may not have shown what the
    /// last leader bound. Lists that are on their way will do.
    pub fn set_leading(&self, leading: bool) {
        if leading && !self.is_leading() && self.is_synced() {
            self.term.send_modify(|term| *term += 1);
        }
        self.leading.store(leading, Ordering::Release);
    }

    /// The term, and whenever it changes: the watches list anew then.
    pub fn terms(&self) -> watch::Receiver<u64> {
        self.term.subscribe()
    }

    pub fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    pub fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Acquire) > *self.term.borrow()
    }

    pub fn is_leading(&self) -> bool {
        self.leading.load(Ordering::Acquire)
    }

    /// Whether questions are answered and writes are made.
    pub fn is_open(&self) -> bool {
        self.is_synced() && self.is_leading()
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Why the gate is shut, for a person.
    pub fn reason_shut(&self) -> Option<&'static str> {
        match (self.is_synced(), self.is_leading()) {
            (false, _) => Some("the watches have not synced yet"),
            (_, false) => Some("this replica does not lead: its kube-scheduler does not hold the Lease"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_is_listed_anew_by_who_begins_to_lead_and_has_lists_already() {
        let gate = Gate::default();
        let (terms, term) = (gate.terms(), || *gate.terms().borrow());
        gate.set_leading(true);
        assert_eq!((term(), gate.is_open()), (0, false), "the first lists are on their way");
        gate.set_synced_in(0);
        gate.set_leading(true);
        assert_eq!((term(), gate.is_open()), (0, true), "who goes on leading lists nothing");
        gate.set_leading(false);
        gate.set_leading(true);
        assert_eq!((term(), gate.is_open()), (1, false));
        assert!(terms.has_changed().unwrap());
        gate.set_synced_in(0);
        assert!(!gate.is_open(), "these lists began before");
        gate.set_synced_in(1);
        assert!(gate.is_open());
    }

    #[test]
    fn a_pod_that_ran_for_a_month_before_this_process_began_has_run_for_a_month() {
        let (now, month) = (Clock::start().now(), Millis::seconds(30 * 24 * 3600));
        assert_eq!(now.since(now.before(month)), month);
    }
}
