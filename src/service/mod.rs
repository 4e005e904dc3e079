//! The state that the edges of one running Stowage share: the cluster behind its lock, the pod classifier, the clock, leadership, and the metrics.
//!
//! It starts nothing and decides nothing; `serve` and `demo` assemble it.

mod api_server_contact;
mod classifier;
mod cluster_guard;
mod leadership;
mod policy_status;

pub use api_server_contact::ApiServerContact;
pub use cluster_guard::ClusterGuard;
pub use leadership::{Leadership, Tenure};
pub use policy_status::{PolicyStanding, PolicyStatus, RefusedPolicy};

use crate::scheduling::audit::conflicts::Conflicts;
use crate::scheduling::ledger::Classifications;
use crate::scheduling::placing::score_cache::ScoreCache;
use crate::scheduling::policy::Policy;
use crate::scheduling::verbs::Cluster;
use crate::scheduling::verbs::tick::{ClockAdvanced, LeadershipBegan, LeadershipEnded, PolicySet};
use crate::scheduling::vocabulary::classification::{Classification, PodTraits};
use crate::telemetry::Metrics;
use crate::units::{Millis, Moment};
use classifier::{Classifier, Remembered};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::time::Duration;

pub struct Service {
    cluster: Mutex<Cluster>,
    score_cache: Mutex<ScoreCache>,
    conflicts: Mutex<Conflicts>,
    classify: Classifier,
    pub clock: Clock,
    pub gate: Leadership,
    pub standing: PolicyStanding,
    pub contact: ApiServerContact,
    pub metrics: Metrics,
    /// How often the cluster or the continuous audit was locked.
    #[cfg(test)]
    locks: std::sync::atomic::AtomicU64,
}

impl Service {
    pub fn new(policy: Policy) -> Arc<Self> {
        Self::timed_by(TimeSource::SYSTEM, policy)
    }

    /// With a clock that is driven from outside, such as by a simulation.
    pub fn timed_by(source: TimeSource, policy: Policy) -> Arc<Self> {
        Self::by(Clock::start(source), policy)
    }

    /// With a clock that stands still until a test advances it.
    #[cfg(test)]
    pub fn with_stopped_clock(policy: Policy) -> Arc<Self> {
        let clock = Clock::start(TimeSource::SYSTEM);
        Self::by(Clock { stopped_at: Some(clock.now()), ..clock }, policy)
    }

    fn by(clock: Clock, policy: Policy) -> Arc<Self> {
        let (policy, metrics) = (Arc::new(policy), Metrics::new());
        metrics.policy.set_in_force(&policy);
        Arc::new(Self {
            classify: Classifier::of(policy.clone()),
            cluster: Mutex::new(Cluster::new(policy)),
            score_cache: Mutex::default(),
            conflicts: Mutex::default(),
            gate: Leadership::new(clock),
            standing: PolicyStanding::new(clock.now()),
            contact: ApiServerContact::default(),
            clock,
            metrics,
            #[cfg(test)]
            locks: std::sync::atomic::AtomicU64::default(),
        })
    }

    /// All state that decisions are made on, with its time set to the present. Take it for one call or a few; never across an
    /// await. A panic under the lock discards the state.
    pub fn cluster(&self) -> ClusterGuard<'_> {
        self.count_lock();
        let mut cluster = ClusterGuard::new(self, self.cluster.lock());
        cluster.apply(ClockAdvanced(self.now()));
        cluster
    }

    /// Cached fit-and-score results. Take one entry out, use it, and put it back; do not evaluate nodes while this is locked.
    pub fn score_cache(&self) -> MutexGuard<'_, ScoreCache> {
        self.score_cache.lock()
    }

    /// The continuous audit: what the watches show of allocated GPUs. Take no other lock while this is held.
    pub fn conflicts(&self) -> MutexGuard<'_, Conflicts> {
        self.count_lock();
        self.conflicts.lock()
    }

    #[cfg(test)]
    fn count_lock(&self) {
        self.locks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    #[cfg(not(test))]
    fn count_lock(&self) {}

    /// How often the cluster or the continuous audit was locked so far.
    #[cfg(test)]
    pub fn locks_taken(&self) -> u64 {
        self.locks.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// How the current policy classifies a pod.
    pub fn classify(&self, traits: &PodTraits) -> Classification {
        self.classify.classify(traits)
    }

    /// The policy in force, without the cluster's lock: for what is read before that is taken. A decision reads the cluster's.
    pub fn policy(&self) -> Arc<Policy> {
        self.classify.policy()
    }

    /// Sets another policy in one step. All pods are classified by it beforehand, so that no request waits for that. Takes a
    /// while on a large cluster; do not call it on a thread that answers requests.
    pub fn set_policy(&self, policy: Policy) {
        let traits = self.cluster().to_classify();
        let mut classified = Classifications::default();
        for traits in traits {
            classified.entry(traits).or_insert_with_key(|traits| policy.classify(traits));
        }
        let remembered = Remembered::of(&classified);
        let mut cluster = self.cluster();
        cluster.apply(PolicySet { policy, classified });
        let policy = cluster.policy().clone();
        // All of it under the lock: two concurrent policy changes must not leave a mixture.
        self.metrics.policy.set_in_force(&policy);
        self.standing.set_in_force(self.now());
        self.classify.set(policy, remembered);
    }

    /// Sets what the Lease says of this replica. A new leader relists before it acts.
    pub fn set_tenure(&self, tenure: Tenure) {
        if !self.gate.set_tenure(tenure) {
            self.cluster().apply(LeadershipEnded);
        }
    }

    /// Records that everything has been listed in this term. A leader adopts the reservations of its predecessors that pass the
    /// checks of a new reservation, and acts from now on.
    pub fn set_synced_in(&self, term: u64) {
        // What an old watch still shows belongs to an earlier term, and its list is not the one to adopt reservations from.
        if let Some(epoch) = self.gate.epoch().filter(|_| term >= self.gate.term()) {
            self.cluster().apply(LeadershipBegan(epoch));
        }
        self.gate.set_synced_in(term);
    }

    /// Makes this replica lead without a list: for a process without an API server, or a test in its place.
    pub fn lead_from_the_start(&self) {
        self.set_tenure(Tenure::without_end());
        self.set_synced_in(self.gate.term());
    }

    pub fn now(&self) -> Moment {
        self.clock.now()
    }
}

/// A monotonic clock for the core, and its relation to wall time for what is written down.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    source: TimeSource,
    started: Duration,
    #[cfg(test)]
    stopped_at: Option<Moment>,
}

impl Clock {
    fn start(source: TimeSource) -> Self {
        Self {
            source,
            started: (source.monotonic)(),
            #[cfg(test)]
            stopped_at: None,
        }
    }

    pub fn now(&self) -> Moment {
        #[cfg(test)]
        if let Some(at) = self.stopped_at {
            return at;
        }
        let elapsed = (self.source.monotonic)().saturating_sub(self.started);
        Moment(elapsed.as_millis() as u64) + BEFORE_START
    }

    /// The wall time of a moment, by this machine's current wall clock.
    pub fn to_wall(&self, moment: Moment) -> jiff::Timestamp {
        let ahead = i128::from(moment.0) - i128::from(self.now().0);
        let ahead = jiff::SignedDuration::from_millis(ahead.clamp(-MAX_MILLIS, MAX_MILLIS) as i64);
        (self.source.wall)().saturating_add(ahead).expect("a duration in milliseconds always adds")
    }

    /// The moment of a wall time; a wall time in the past is now.
    pub fn to_moment(&self, wall: jiff::Timestamp) -> Moment {
        let ahead = wall.duration_since((self.source.wall)()).as_millis().clamp(0, MAX_MILLIS);
        self.now() + Millis(ahead as u64)
    }
}

/// The source of a clock's time.
#[derive(Debug, Clone, Copy)]
pub struct TimeSource {
    /// It never goes back. Only differences count.
    pub monotonic: fn() -> Duration,
    pub wall: fn() -> jiff::Timestamp,
}

impl TimeSource {
    pub const SYSTEM: Self = Self { monotonic: since_boot, wall: jiff::Timestamp::now };
}

/// The monotonic clock that continues while the machine is suspended, because a Lease expires meanwhile.
fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The clock does not begin at zero: a pod that has run for days must be known to have run for days in the first second too. No
/// minimum runtime is longer than a year.
const BEFORE_START: Millis = Millis::seconds(365 * 24 * 3600);

/// A year: nothing that Stowage writes is valid for longer.
const MAX_MILLIS: i128 = 365 * 24 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_ran_for_a_month_before_this_process_began_has_run_for_a_month() {
        let (now, month) = (Clock::start(TimeSource::SYSTEM).now(), Millis::seconds(30 * 24 * 3600));
        assert_eq!(now.since(now.before(month)), month);
    }
}
