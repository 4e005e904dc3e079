//! The state that the edges of one running Stowage share: the cluster behind its lock, the pod classifier, the clock, leadership,
//! and the metrics.
//!
//! It starts nothing and decides nothing; `serve` and `demo` assemble it.

mod activity;
mod api_server_contact;
mod bundles;
mod change_count;
mod classifier;
mod cluster_guard;
mod heavy_work;
mod leadership;
pub(crate) mod niceness;
mod policy_status;
mod recording_tap;
mod refused_reads;
mod trouble;

pub(crate) use activity::{Activity, ActivityEntry, ActivityKind, RecentActivity};
pub(crate) use api_server_contact::ApiServerContact;
pub use bundles::BundleNames;
pub(crate) use bundles::BundleSource;
pub use change_count::{ChangeCount, SeenCount};
#[cfg(test)]
pub(crate) use cluster_guard::PODS_LOOKED_AT_UNDER_LOCK;
pub(crate) use cluster_guard::{ClusterGuard, SharedBooks, assert_not_held};
pub use heavy_work::{HeavyWork, SimulatedThreads, WorkPlace};
pub use leadership::{Leadership, Tenure};
pub use policy_status::PolicyStatus;
pub(crate) use policy_status::{RefusedPolicy, SharedPolicyStatus};
pub(crate) use recording_tap::{RecordingTap, Tapped};
pub(crate) use refused_reads::{ReadFailure, RefusedReads};
pub use stowage_telemetry::WorkKind;
pub(crate) use trouble::Trouble;

use classifier::{Classifier, Remembered};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use stowage_recording::answer::{Asked, Decision};
use stowage_scheduling::audit::conflicts::Conflicts;
use stowage_scheduling::ledger::{Ledger, PreparedPolicy};
use stowage_scheduling::placing::learned::PackingModel;
use stowage_scheduling::placing::score_cache::{CachedScores, ScoreCache};
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::{NamespaceLabels, Policy};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::namespaces::{
    NamespaceChange, NamespacesListed, NamespacesPrepared,
};
use stowage_scheduling::verbs::tick::{
    LeadershipBegan, LeadershipEnded, PackingModelLearned, PackingModelPrepared, PolicySet,
};
use stowage_scheduling::verbs::{Cluster, ClusterCopy, Input};
use stowage_scheduling::vocabulary::classification::{Classification, PodTraits};
use stowage_telemetry::Metrics;
use stowage_telemetry::traces::Traces;
use tokio::sync::watch;

pub struct Service {
    cluster: Mutex<Cluster>,
    score_cache: Mutex<ScoreCache>,
    conflicts: Mutex<Conflicts>,
    classify: Classifier,
    pub clock: Clock,
    pub leadership: Leadership,
    pub policy_status: SharedPolicyStatus,
    pub contact: ApiServerContact,
    pub refused_reads: RefusedReads,
    pub activity: RecentActivity,
    /// The reason why the agents' address has no certificate yet; `None` if it has one, or needs none.
    pub certificate: watch::Sender<Option<String>>,
    /// Whether a policy selects by the labels of namespaces, so that these are watched.
    namespaces_wanted: watch::Sender<bool>,
    /// Whether namespaces have been listed, and are watched since.
    namespaces_known: AtomicBool,
    /// How often a policy came into force that turns consolidation on or changes `schedulerNames`: pods have to be listed again.
    pub moving: ChangeCount,
    /// Where plans and searches run.
    pub heavy_work: HeavyWork,
    pub metrics: Metrics,
    traces: OnceLock<Traces>,
    /// The flight recorder's tap; empty unless [`ServerState::set_recording_tap`] was called.
    recording: OnceLock<RecordingTap>,
    /// How often the cluster or the continuous audit was locked.
    #[cfg(test)]
    locks: std::sync::atomic::AtomicU64,
}

impl Service {
    pub fn new(policy: Policy) -> Arc<Self> {
        Self::timed_by(TimeSource::SYSTEM, policy)
    }

    /// A state whose clock is driven from outside, such as by a simulation.
    pub fn timed_by(source: TimeSource, policy: Policy) -> Arc<Self> {
        Self::by(Clock::start(source), WorkPlace::OnThreads, policy)
    }

    /// In simulated time on one thread: the same events lead to the same history.
    pub fn simulated(source: TimeSource, work: WorkPlace, policy: Policy) -> Arc<Self> {
        Self::by(Clock::start(source), work, policy)
    }

    /// With a clock that stands still until a test advances it.
    #[cfg(test)]
    pub(crate) fn with_stopped_clock(policy: Policy) -> Arc<Self> {
        let clock = Clock::start(TimeSource::SYSTEM);
        Self::by(
            Clock {
                stopped_at: Some(clock.now()),
                ..clock
            },
            WorkPlace::OnThreads,
            policy,
        )
    }

    fn by(clock: Clock, work: WorkPlace, policy: Policy) -> Arc<Self> {
        let (policy, metrics) = (Arc::new(policy), Metrics::new());
        metrics.policy.set_in_force(&policy);
        let namespaces_wanted = watch::Sender::new(policy.reads_namespaces());
        Arc::new(Self {
            classify: Classifier::of(policy.clone()),
            cluster: Mutex::new(Cluster::new(policy)),
            score_cache: Mutex::default(),
            conflicts: Mutex::default(),
            leadership: Leadership::new(clock),
            policy_status: SharedPolicyStatus::new(clock.now()),
            contact: ApiServerContact::default(),
            refused_reads: RefusedReads::default(),
            activity: RecentActivity::default(),
            certificate: watch::Sender::default(),
            namespaces_wanted,
            namespaces_known: AtomicBool::default(),
            moving: ChangeCount::default(),
            heavy_work: HeavyWork::new(work, metrics.panics.clone()),
            clock,
            metrics,
            traces: OnceLock::new(),
            recording: OnceLock::new(),
            #[cfg(test)]
            locks: std::sync::atomic::AtomicU64::default(),
        })
    }

    /// All state that decisions are made on, with its time set to the present. Take it for one call or a few; never across an
    /// await. A panic under the lock discards the state.
    pub fn cluster(&self) -> ClusterGuard<'_> {
        self.count_lock();
        let mut cluster = ClusterGuard::new(self, self.cluster.lock());
        cluster.advance(self.now());
        cluster
    }

    /// A copy of the ledger to read, as it is now. The lock is released before this returns.
    pub(crate) fn ledger_to_read(&self) -> Ledger {
        self.cluster().ledger().to_read()
    }

    /// A copy of the ledger to plan on: GPU readings do not age there, the queue of waiting pods is empty, and it does not lead.
    pub(crate) fn scratch_ledger(&self) -> Ledger {
        self.cluster().ledger().scratch()
    }

    /// A copy of the whole cluster, to explain with it why pods are placed or not.
    pub fn cluster_to_explain(&self) -> ClusterCopy {
        self.cluster().copy()
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
        self.locks
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    #[cfg(not(test))]
    fn count_lock(&self) {}

    /// How often the cluster or the continuous audit was locked so far.
    #[cfg(test)]
    pub(crate) fn locks_taken(&self) -> u64 {
        self.locks.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Records spans; records nothing unless [`Self::set_traces`] was called.
    pub fn traces(&self) -> &Traces {
        self.traces.get_or_init(Traces::default)
    }

    /// Records spans from here on. Has no effect once spans were asked for: it belongs before the first request.
    pub(crate) fn trace_with(&self, traces: Traces) {
        let _ = self.traces.set(traces);
    }

    /// Records every change from the first checkpoint on. Has no effect if another tap is there.
    pub(crate) fn record_with(&self, tap: RecordingTap) {
        let _ = self.recording.set(tap);
    }

    /// The recorder's tap, if there is one.
    pub fn recording(&self) -> Option<&RecordingTap> {
        self.recording.get()
    }

    /// Brings the whole state to the recorder. The lock is held for a copy that shares what neither side changes.
    pub fn record_checkpoint(&self) {
        self.cluster().checkpoint();
    }

    /// Records a verb's answer, for a replay to compare. Does nothing if the verb's input was not recorded.
    pub(crate) fn record_answer(&self, asked: Option<Asked>, decision: impl FnOnce() -> Decision) {
        if let Some((asked, tap)) = asked.zip(self.recording.get()) {
            tap.answer(asked, decision());
        }
    }

    /// How the current policy classifies a pod.
    pub fn classify(&self, traits: &PodTraits) -> Classification {
        self.classify.classify(traits)
    }

    /// The policy in force, without the cluster's lock: for what is read before that is taken. A decision reads the cluster's.
    pub fn policy(&self) -> Arc<Policy> {
        self.classify.policy()
    }

    /// Sets another policy in one step. All that follows from it is computed beforehand, so that no request waits for that. Takes
    /// seconds on a large cluster; do not call it on a thread that answers requests.
    ///
    /// Answers `false`, and the policy before stays, if it asks for the labels of namespaces and these are not known.
    pub fn set_policy(&self, policy: Policy) -> bool {
        let copy = self.scratch_ledger();
        let mut prepared = PreparedPolicy::new(copy, policy);
        for _ in 0..CATCHING_UP {
            let copy = self.scratch_ledger();
            prepared = prepared.caught_up(copy);
        }
        let reads_namespaces = prepared.policy().reads_namespaces();
        let selections = prepared.policy().selections().clone();
        let remembered = Remembered::of(prepared.classified());
        let moves_pods = prepared.policy().planning.consolidation.is_some();
        let mut cluster = self.cluster();
        if reads_namespaces && !self.namespaces_known() {
            drop(cluster);
            self.want_namespaces(true);
            return false;
        }
        let begins_to_move =
            moves_pods && cluster.ledger().policy().planning.consolidation.is_none();
        let serves_others = cluster.ledger().policy().planning.scheduler_names
            != prepared.policy().planning.scheduler_names;
        let retired = cluster.apply_as(PolicySet::from(prepared), |set| {
            // What is prepared follows from the rest, and is much.
            PolicySet {
                policy: set.policy.clone(),
                prepared: None,
            }
            .into()
        });
        let policy = cluster.ledger().policy().clone();
        // All of it under the lock: two concurrent policy changes must not leave a mixture.
        self.metrics.policy.set_in_force(&policy);
        self.policy_status.set_in_force(self.now());
        self.classify.set(policy.clone(), remembered);
        if *policy.selections() != selections {
            // Labels changed since the pods were classified beforehand.
            let before = |namespace: &str| selections.get(namespace).copied().unwrap_or_default();
            self.classify.reclassify(policy.clone(), |namespace| {
                before(namespace) != policy.selection(namespace)
            });
        }
        drop(cluster);
        drop(retired);
        // It may not end the watch: another policy may be waiting for what it shows.
        if reads_namespaces {
            self.want_namespaces(true);
        }
        if begins_to_move || serves_others {
            self.moving.grow();
        }
        true
    }

    /// From here on placements are scored by this model. All nodes are summarized by it first, as they are in this snapshot, which
    /// is of this policy: do not call it on a thread that answers requests.
    pub fn set_packing_model(
        &self,
        snapshot: Arc<Snapshot>,
        policy: &Policy,
        packing_model: PackingModel,
    ) {
        let summarized = Snapshot::clone(&snapshot).with_packing_model(Arc::new(packing_model));
        summarized.sum_up();
        // Otherwise the first request about many nodes would have to score all of them.
        let demands = self.score_cache().demands();
        let scores = demands
            .iter()
            .map(|demand| CachedScores::of_all(&summarized, demand, policy));
        let scores: Vec<CachedScores> = scores.collect();
        // Before the ledger changes: it copies a snapshot that is still in use.
        drop(snapshot);
        let (retired, before, after) = {
            let mut cluster = self.cluster();
            let before = cluster.ledger().packing_model().generation();
            let retired = cluster.apply_as(PackingModelPrepared(summarized), |prepared| {
                PackingModelLearned(prepared.0.packing_model().clone()).into()
            });
            (
                retired,
                before,
                cluster.ledger().packing_model().generation(),
            )
        };
        drop(retired);
        // The ledger has not taken it if the policy packs by best fit by now.
        if after != before {
            scores
                .into_iter()
                .for_each(|scores| self.score_cache().put(scores.by_model(after)));
        }
        // So that the first request finds the nodes that have changed meanwhile summarized, too.
        let snapshot = self.cluster().snapshot();
        snapshot.sum_up();
    }

    /// Applies a change of namespaces' labels and reclassifies the pods of the namespaces for which `is_concerned`. The new
    /// classification is computed outside of the lock.
    pub(crate) fn apply_namespaces<C>(&self, change: C, is_concerned: impl Fn(&str) -> bool)
    where
        C: NamespaceChange + Clone + Into<Input>,
    {
        let mut prepared = NamespacesPrepared::new(change, self.scratch_ledger());
        for _ in 0..CATCHING_UP {
            if prepared.is_prepared() {
                prepared = prepared.caught_up(self.scratch_ledger());
            }
        }
        let mut cluster = self.cluster();
        let retired = cluster.apply_as(prepared, |prepared| prepared.change.clone().into());
        if retired.is_some() {
            // Under the lock, as another policy is set.
            self.classify
                .reclassify(cluster.ledger().policy().clone(), is_concerned);
        }
        drop(cluster);
        drop(retired);
    }

    /// Whether the policy in force asks for the labels of namespaces: without them it does not decide.
    pub fn reads_namespaces(&self) -> bool {
        self.cluster().ledger().policy().reads_namespaces()
    }

    /// Starts or ends the watch of namespaces, for a policy that is in force or shall be.
    pub fn want_namespaces(&self, is_wanted: bool) {
        self.namespaces_wanted
            .send_if_modified(|wanted| std::mem::replace(wanted, is_wanted) != is_wanted);
    }

    /// Whether namespaces are to be watched.
    pub(crate) fn namespaces_wanted(&self) -> watch::Receiver<bool> {
        self.namespaces_wanted.subscribe()
    }

    /// Records the labels of all namespaces, which are watched from here on.
    pub(crate) fn list_namespaces(&self, all: NamespaceLabels) {
        self.apply_namespaces(NamespacesListed(all), |_| true);
        self.namespaces_known.store(true, Ordering::Release);
    }

    /// Forgets the labels of namespaces, when they are no longer watched. Returns `false`, and keeps them, if the policy in force
    /// selects by them.
    pub(crate) fn forget_namespaces(&self) -> bool {
        let mut cluster = self.cluster();
        if cluster.ledger().policy().reads_namespaces() {
            return false;
        }
        self.namespaces_known.store(false, Ordering::Release);
        cluster.apply(NamespacesListed::default());
        true
    }

    /// Whether a policy with selectors of namespaces may come into force.
    pub fn namespaces_known(&self) -> bool {
        self.namespaces_known.load(Ordering::Acquire)
    }

    /// Sets what the Lease says of this replica. Lists from before it led do not make a new leader act.
    pub fn set_tenure(&self, tenure: Tenure) {
        if self.leadership.set_tenure(tenure) {
            return;
        }
        let mut cluster = self.cluster();
        if cluster.ledger().leader().is_some() {
            cluster.apply(LeadershipEnded);
        }
    }

    /// Records that everything has been listed in this list generation, and that what had happened to pods by this takeover is in the
    /// ledger. A leader adopts the reservations of its predecessors that pass the checks of a new reservation, and acts from now on.
    pub(crate) fn set_synced_in(&self, term: u64, takeover: u64) {
        let leadership = &self.leadership;
        // What an old watch still shows belongs to an earlier list generation: reservations are not adopted from it.
        let is_all = |_: &_| term >= leadership.term() && takeover >= leadership.takeover();
        if let Some(epoch) = leadership.epoch().filter(is_all) {
            self.cluster().apply(LeadershipBegan(epoch));
        }
        leadership.set_synced_in(term, takeover);
    }

    /// Makes this replica lead without a list: for a process without an API server, or a test in its place.
    pub fn lead_from_the_start(&self) {
        self.set_tenure(Tenure::without_end());
        self.set_synced_in(self.leadership.term(), self.leadership.takeover());
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

    /// The present wall time.
    pub fn wall(&self) -> jiff::Timestamp {
        (self.source.wall)()
    }

    /// The wall time of a moment, by this machine's current wall clock.
    pub fn to_wall(&self, moment: Moment) -> jiff::Timestamp {
        let ahead = i128::from(moment.0) - i128::from(self.now().0);
        let ahead = jiff::SignedDuration::from_millis(ahead.clamp(-MAX_MILLIS, MAX_MILLIS) as i64);
        (self.source.wall)()
            .saturating_add(ahead)
            .expect("a duration in milliseconds always adds")
    }

    /// The moment of a wall time; a wall time in the past is now.
    pub(crate) fn to_moment(self, wall: jiff::Timestamp) -> Moment {
        let ahead = wall
            .duration_since((self.source.wall)())
            .as_millis()
            .clamp(0, MAX_MILLIS);
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
    pub const SYSTEM: Self = Self {
        monotonic: since_boot,
        wall: jiff::Timestamp::now,
    };
}

/// The monotonic clock that continues while the machine is suspended, because a Lease expires meanwhile.
fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// How often a prepared policy catches up, outside of the lock, with what has changed meanwhile. The first preparation takes seconds on a
/// large cluster, in which thousands of pods and nodes change; in each one after it fewer do, and the last change under the lock.
const CATCHING_UP: usize = 4;

/// The clock does not begin at zero: a pod that has run for days must be known to have run for days in the first second too. No
/// minimum runtime is longer than a year.
const BEFORE_START: Millis = Millis::seconds(365 * 24 * 3600);

/// A year: nothing that Stowage writes is valid for longer.
const MAX_MILLIS: i128 = 365 * 24 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::LeaderEpoch;
    use stowage_scheduling::policy::{Class, Match, NamespaceSelector};
    use stowage_scheduling::verbs::namespaces::{NamespaceDeleted, NamespaceObserved};
    use stowage_telemetry::RecordingMetrics;

    #[test]
    fn a_pod_that_ran_for_a_month_before_this_process_began_has_run_for_a_month() {
        let (now, month) = (
            Clock::start(TimeSource::SYSTEM).now(),
            Millis::seconds(30 * 24 * 3600),
        );
        assert_eq!(now.since(now.before(month)), month);
    }

    #[test]
    fn a_replica_that_stays_on_standby_records_nothing() {
        let service = Service::with_stopped_clock(Policy::default());
        let (tap, _queue) = RecordingTap::new(RecordingMetrics::detached());
        service.record_with(tap);
        service.record_checkpoint();
        (0..10).for_each(|_| service.set_tenure(Tenure::Standby));
        assert_eq!(
            service.recording().unwrap().latest(),
            None,
            "nothing has changed"
        );
        service
            .cluster()
            .apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        (0..10).for_each(|_| service.set_tenure(Tenure::Standby));
        assert_eq!(
            service.recording().unwrap().latest(),
            Some(1),
            "it began to lead, and stopped"
        );
        assert_eq!(service.cluster().ledger().leader(), None);
    }

    fn selecting() -> Policy {
        let selector = NamespaceSelector {
            match_labels: [("team".into(), "a".into())].into(),
            ..Default::default()
        };
        let matches = Match {
            namespace_selector: Some(selector),
            ..Match::default()
        };
        let own = Class {
            matches,
            ..Class::named("own")
        };
        Policy::default()
            .with_classes(vec![own, Class::named("serving")])
            .unwrap()
    }

    fn labelled(namespaces: &[(&str, &str)]) -> NamespaceLabels {
        let labels = |team: &str| Arc::new([("team".to_owned(), team.to_owned())].into());
        namespaces
            .iter()
            .map(|(name, team)| ((*name).to_owned(), labels(team)))
            .collect()
    }

    fn class_in(service: &Service, namespace: &str) -> String {
        let traits = PodTraits {
            namespace: namespace.into(),
            ..PodTraits::default()
        };
        let classified = service.classify(&traits);
        let policy = service.cluster().ledger().policy().clone();
        assert_eq!(
            (classified.version, classified.class),
            (policy.version, policy.classify(&traits).class)
        );
        policy.class(classified.class).name.clone()
    }

    #[test]
    fn f_a_policy_with_selectors_comes_into_force_when_the_labels_of_namespaces_are_known() {
        let service = Service::with_stopped_clock(Policy::default());
        assert!(
            !*service.namespaces_wanted().borrow(),
            "nothing asks for them"
        );
        assert!(!service.set_policy(selecting()), "the policy before stays");
        assert!(!service.reads_namespaces());
        service.list_namespaces(labelled(&[("chat", "a"), ("jobs", "b")]));
        assert!(service.set_policy(selecting()));
        assert!(*service.namespaces_wanted().borrow());
        assert_eq!(
            [class_in(&service, "chat"), class_in(&service, "jobs")],
            ["own", "serving"]
        );
        assert!(!service.forget_namespaces(), "it is in force");
        service.set_policy(Policy::default());
        assert!(
            *service.namespaces_wanted().borrow(),
            "who reads policies knows whether another one waits"
        );
        service.want_namespaces(service.reads_namespaces());
        assert!(!*service.namespaces_wanted().borrow());
        assert!(service.forget_namespaces() && !service.set_policy(selecting()));
    }

    #[test]
    fn f_a_label_that_changes_classifies_the_pods_of_its_namespace_again_and_no_others() {
        let service = Service::with_stopped_clock(Policy::default());
        service.list_namespaces(labelled(&[("chat", "a"), ("jobs", "b")]));
        service.set_policy(selecting());
        let version = service.cluster().ledger().policy().version;
        assert_eq!(
            [class_in(&service, "chat"), class_in(&service, "jobs")],
            ["own", "serving"]
        );
        let observed = |name: &str, team: &str| {
            let labels = labelled(&[(name, team)]).remove(name).unwrap();
            service.apply_namespaces(
                NamespaceObserved {
                    name: name.into(),
                    labels,
                },
                |namespace| namespace == name,
            );
        };
        observed("jobs", "c");
        assert_eq!(
            service.cluster().ledger().policy().version,
            version,
            "no selector asks for it"
        );
        observed("jobs", "a");
        assert_eq!(service.cluster().ledger().policy().version, version + 1);
        assert_eq!(
            [class_in(&service, "chat"), class_in(&service, "jobs")],
            ["own", "own"]
        );
        service.apply_namespaces(NamespaceDeleted("chat".into()), |namespace| {
            namespace == "chat"
        });
        assert_eq!(
            [class_in(&service, "chat"), class_in(&service, "jobs")],
            ["serving", "own"]
        );
    }
}
