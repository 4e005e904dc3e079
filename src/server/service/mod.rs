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
mod failure_streak;
mod heavy_work;
mod leadership;
pub(crate) mod niceness;
mod policy_status;
mod recording_tap;
mod refused_reads;

pub(crate) use activity::{Activity, ActivityEntry, ActivityKind, RecentActivity};
pub(crate) use api_server_contact::ApiServerContact;
pub use bundles::BundleNames;
pub(crate) use bundles::BundleSource;
pub use change_count::{ChangeCount, ChangeReceiver};
#[cfg(test)]
pub(crate) use cluster_guard::PODS_VISITED_UNDER_LOCK;
pub(crate) use cluster_guard::{ClusterGuard, SharedCluster, assert_cluster_unlocked};
pub(crate) use failure_streak::FailureStreak;
pub use heavy_work::{HeavyWork, SimulatedThreads, WorkExecutor};
pub use leadership::{Leadership, Tenure, host_of_holder};
pub use policy_status::PolicyStatus;
pub(crate) use policy_status::{RejectedPolicy, SharedPolicyStatus};
pub(crate) use recording_tap::{RecordingTap, TapMessage};
pub(crate) use refused_reads::{ReadFailure, RefusedReads};
pub use stowage_telemetry::WorkKind;

use classifier::{CachedClassifications, Classifier};
use parking_lot::{Mutex, MutexGuard};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use stowage_recording::answer::{AnsweredInput, Decision};
use stowage_scheduling::audit::conflicts::OverAllocationAudit;
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

/// The runtime class of pods that name none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DefaultRuntimeClass {
    /// Whether the cluster has it is not known yet.
    #[default]
    Unknown,
    /// The cluster has none, or none is to be named.
    None,
    Named(String),
}

pub struct ServerState {
    cluster: Mutex<Cluster>,
    score_cache: Mutex<ScoreCache>,
    over_allocations: Mutex<OverAllocationAudit>,
    classifier: Classifier,
    pub clock: Clock,
    pub leadership: Leadership,
    pub policy_status: SharedPolicyStatus,
    pub api_server_contact: ApiServerContact,
    pub refused_reads: RefusedReads,
    pub activity: RecentActivity,
    /// The reason why the agents' address has no certificate yet; `None` if it has one, or needs none.
    pub missing_certificate_reason: watch::Sender<Option<String>>,
    /// What the webhook adds to pods that name no runtime class.
    pub default_runtime_class: watch::Sender<DefaultRuntimeClass>,
    /// Whether a policy selects by the labels of namespaces, so that these are watched.
    namespaces_wanted: watch::Sender<bool>,
    /// Whether namespaces have been listed, and are watched since.
    namespaces_listed: AtomicBool,
    /// How often a policy came into force that turns consolidation on or changes `schedulerNames`: pods have to be listed again.
    pub pod_relists: ChangeCount,
    /// Where plans and searches run.
    pub heavy_work: HeavyWork,
    pub metrics: Metrics,
    traces: OnceLock<Traces>,
    /// The flight recorder's tap; empty unless [`ServerState::set_recording_tap`] was called.
    recording_tap: OnceLock<RecordingTap>,
    /// How often the cluster or the continuous audit was locked.
    #[cfg(test)]
    locks: std::sync::atomic::AtomicU64,
}

impl ServerState {
    pub fn new(policy: Policy) -> Arc<Self> {
        Self::with_time_source(TimeSource::SYSTEM, policy)
    }

    /// A state whose clock is driven from outside, such as by a simulation.
    pub fn with_time_source(source: TimeSource, policy: Policy) -> Arc<Self> {
        Self::with_clock(Clock::start(source), WorkExecutor::OnThreads, policy)
    }

    /// In simulated time on one thread: the same events lead to the same history.
    pub fn simulated(source: TimeSource, work: WorkExecutor, policy: Policy) -> Arc<Self> {
        Self::with_clock(Clock::start(source), work, policy)
    }

    /// With a clock that stands still until a test advances it.
    #[cfg(test)]
    pub(crate) fn with_stopped_clock(policy: Policy) -> Arc<Self> {
        let clock = Clock::start(TimeSource::SYSTEM);
        Self::with_clock(
            Clock {
                stopped_at: Some(clock.now()),
                ..clock
            },
            WorkExecutor::OnThreads,
            policy,
        )
    }

    fn with_clock(clock: Clock, work: WorkExecutor, policy: Policy) -> Arc<Self> {
        let (policy, metrics) = (Arc::new(policy), Metrics::new());
        metrics.policy.set_in_force(&policy);
        let namespaces_wanted = watch::Sender::new(policy.depends_on_namespace_labels());
        Arc::new(Self {
            classifier: Classifier::new(policy.clone()),
            cluster: Mutex::new(Cluster::new(policy)),
            score_cache: Mutex::default(),
            over_allocations: Mutex::default(),
            leadership: Leadership::new(clock),
            policy_status: SharedPolicyStatus::new(clock.now()),
            api_server_contact: ApiServerContact::default(),
            refused_reads: RefusedReads::default(),
            activity: RecentActivity::default(),
            missing_certificate_reason: watch::Sender::default(),
            default_runtime_class: watch::Sender::default(),
            namespaces_wanted,
            namespaces_listed: AtomicBool::default(),
            pod_relists: ChangeCount::default(),
            heavy_work: HeavyWork::new(work, metrics.panics.clone()),
            clock,
            metrics,
            traces: OnceLock::new(),
            recording_tap: OnceLock::new(),
            #[cfg(test)]
            locks: std::sync::atomic::AtomicU64::default(),
        })
    }

    /// All state that decisions are made on, with its time set to the present. Take it for one call or a few; never across an
    /// await. A panic under the lock discards the state.
    pub fn cluster(&self) -> ClusterGuard<'_> {
        self.count_lock();
        let mut cluster = ClusterGuard::new(self, self.cluster.lock());
        cluster.set_time(self.now());
        cluster
    }

    /// A copy of the ledger to read, as it is now. The lock is released before this returns.
    pub(crate) fn ledger_copy(&self) -> Ledger {
        self.cluster().ledger().read_copy()
    }

    /// A copy of the ledger to plan on: GPU readings do not age there, the queue of waiting pods is empty, and it does not lead.
    pub(crate) fn scratch_ledger(&self) -> Ledger {
        self.cluster().ledger().scratch()
    }

    /// A copy of the whole cluster, to explain with it why pods are placed or not.
    pub fn cluster_copy(&self) -> ClusterCopy {
        self.cluster().copy()
    }

    /// Cached fit-and-score results. Take one entry out, use it, and put it back; do not evaluate nodes while this is locked.
    pub fn score_cache(&self) -> MutexGuard<'_, ScoreCache> {
        self.score_cache.lock()
    }

    /// The continuous audit: what the watches show of allocated GPUs. Take no other lock while this is held.
    pub fn over_allocations(&self) -> MutexGuard<'_, OverAllocationAudit> {
        self.count_lock();
        self.over_allocations.lock()
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
    pub(crate) fn set_traces(&self, traces: Traces) {
        let _ = self.traces.set(traces);
    }

    /// Records every change from the first checkpoint on. Has no effect if another tap is there.
    pub(crate) fn set_recording_tap(&self, tap: RecordingTap) {
        let _ = self.recording_tap.set(tap);
    }

    /// The recorder's tap, if there is one.
    pub fn recording_tap(&self) -> Option<&RecordingTap> {
        self.recording_tap.get()
    }

    /// Brings the whole state to the recorder. The lock is held for a copy that shares what neither side changes.
    pub fn record_checkpoint(&self) {
        self.cluster().record_checkpoint();
    }

    /// Records a verb's answer, for a replay to compare. Does nothing if the verb's input was not recorded.
    pub(crate) fn record_answer(
        &self,
        recorded_input: Option<AnsweredInput>,
        decision: impl FnOnce() -> Decision,
    ) {
        if let Some((recorded_input, tap)) = recorded_input.zip(self.recording_tap.get()) {
            tap.record_answer(recorded_input, decision());
        }
    }

    /// How the current policy classifies a pod.
    pub fn classify(&self, traits: &PodTraits) -> Classification {
        self.classifier.classify(traits)
    }

    /// The policy in force, without the cluster's lock: for what is read before that is taken. A decision reads the cluster's.
    pub fn policy(&self) -> Arc<Policy> {
        self.classifier.policy()
    }

    /// Sets another policy in one step. All that follows from it is computed beforehand, so that no request waits for that. Takes
    /// seconds on a large cluster; do not call it on a thread that answers requests.
    ///
    /// Answers `false`, and the policy before stays, if it asks for the labels of namespaces and these are not known.
    pub fn set_policy(&self, policy: Policy) -> bool {
        let copy = self.scratch_ledger();
        let mut prepared = PreparedPolicy::new(copy, policy);
        for _ in 0..CATCH_UP_ROUNDS {
            let copy = self.scratch_ledger();
            prepared = prepared.caught_up(copy);
        }
        let reads_namespaces = prepared.policy().depends_on_namespace_labels();
        let selections = prepared.policy().namespace_selections().clone();
        let cached = CachedClassifications::from_classified(prepared.classified());
        let moves_pods = prepared.policy().planning.consolidation.is_some();
        let mut cluster = self.cluster();
        if reads_namespaces && !self.namespaces_listed() {
            drop(cluster);
            self.want_namespaces(true);
            return false;
        }
        let begins_to_move =
            moves_pods && cluster.ledger().policy().planning.consolidation.is_none();
        let changes_schedulers = cluster.ledger().policy().planning.scheduler_names
            != prepared.policy().planning.scheduler_names;
        let retired = cluster.apply_recorded_as(PolicySet::from(prepared), |set| {
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
        self.classifier.set(policy.clone(), cached);
        if *policy.namespace_selections() != selections {
            // Labels changed since the pods were classified beforehand.
            let before = |namespace: &str| selections.get(namespace).copied().unwrap_or_default();
            self.classifier.reclassify(policy.clone(), |namespace| {
                before(namespace) != policy.namespace_selection(namespace)
            });
        }
        drop(cluster);
        drop(retired);
        // It may not end the watch: another policy may be waiting for what it shows.
        if reads_namespaces {
            self.want_namespaces(true);
        }
        if begins_to_move || changes_schedulers {
            self.pod_relists.increment();
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
        let prepared = Snapshot::clone(&snapshot).with_packing_model(Arc::new(packing_model));
        prepared.summarize_nodes();
        // Otherwise the first request about many nodes would have to score all of them.
        let demands = self.score_cache().demands();
        let scores = demands
            .iter()
            .map(|demand| CachedScores::for_all_nodes(&prepared, demand, policy));
        let scores: Vec<CachedScores> = scores.collect();
        // Before the ledger changes: it copies a snapshot that is still in use.
        drop(snapshot);
        let (retired, before, after) = {
            let mut cluster = self.cluster();
            let before = cluster.ledger().packing_model().generation();
            let retired = cluster.apply_recorded_as(PackingModelPrepared(prepared), |prepared| {
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
                .for_each(|scores| self.score_cache().put(scores.with_model_generation(after)));
        }
        // So that the first request finds the nodes that have changed meanwhile summarized, too.
        let snapshot = self.cluster().snapshot();
        snapshot.summarize_nodes();
    }

    /// Applies a change of namespaces' labels and reclassifies the pods of the namespaces for which `is_concerned`. The new
    /// classification is computed outside of the lock.
    pub(crate) fn apply_namespaces<C>(&self, change: C, is_concerned: impl Fn(&str) -> bool)
    where
        C: NamespaceChange + Clone + Into<Input>,
    {
        let mut prepared = NamespacesPrepared::new(change, self.scratch_ledger());
        for _ in 0..CATCH_UP_ROUNDS {
            if prepared.is_prepared() {
                prepared = prepared.caught_up(self.scratch_ledger());
            }
        }
        let mut cluster = self.cluster();
        let retired =
            cluster.apply_recorded_as(prepared, |prepared| prepared.change.clone().into());
        if retired.is_some() {
            // Under the lock, as another policy is set.
            self.classifier
                .reclassify(cluster.ledger().policy().clone(), is_concerned);
        }
        drop(cluster);
        drop(retired);
    }

    /// Whether the policy in force asks for the labels of namespaces: without them it does not decide.
    pub fn reads_namespaces(&self) -> bool {
        self.cluster()
            .ledger()
            .policy()
            .depends_on_namespace_labels()
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
    pub(crate) fn record_namespaces(&self, all: NamespaceLabels) {
        self.apply_namespaces(NamespacesListed(all), |_| true);
        self.namespaces_listed.store(true, Ordering::Release);
    }

    /// Forgets the labels of namespaces, when they are no longer watched. Returns `false`, and keeps them, if the policy in force
    /// selects by them.
    pub(crate) fn forget_namespaces(&self) -> bool {
        let mut cluster = self.cluster();
        if cluster.ledger().policy().depends_on_namespace_labels() {
            return false;
        }
        self.namespaces_listed.store(false, Ordering::Release);
        cluster.apply(NamespacesListed::default());
        true
    }

    /// Whether a policy with selectors of namespaces may come into force.
    pub fn namespaces_listed(&self) -> bool {
        self.namespaces_listed.load(Ordering::Acquire)
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
    pub(crate) fn record_synced(&self, list_generation: u64, takeover: u64) {
        let leadership = &self.leadership;
        // What an old watch still shows belongs to an earlier list generation: reservations are not adopted from it.
        let is_current = |_: &_| {
            list_generation >= leadership.list_generation() && takeover >= leadership.takeover()
        };
        if let Some(epoch) = leadership.epoch().filter(is_current) {
            self.cluster().apply(LeadershipBegan(epoch));
        }
        leadership.record_synced(list_generation, takeover);
    }

    /// Makes this replica lead without a list: for a process without an API server, or a test in its place.
    pub fn lead_from_the_start(&self) {
        self.set_tenure(Tenure::without_end());
        self.record_synced(
            self.leadership.list_generation(),
            self.leadership.takeover(),
        );
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
        Moment(elapsed.as_millis() as u64) + TIME_AT_START
    }

    /// The present wall time.
    pub fn wall(&self) -> jiff::Timestamp {
        (self.source.wall)()
    }

    /// The wall time of a moment, by this machine's current wall clock.
    pub fn to_wall(&self, moment: Moment) -> jiff::Timestamp {
        let ahead = i128::from(moment.0) - i128::from(self.now().0);
        let ahead = jiff::SignedDuration::from_millis(
            ahead.clamp(-MAX_OFFSET_MILLIS, MAX_OFFSET_MILLIS) as i64,
        );
        (self.source.wall)()
            .saturating_add(ahead)
            .expect("a duration in milliseconds always adds")
    }

    /// The moment of a wall time; a wall time in the past is now.
    pub(crate) fn to_moment(self, wall: jiff::Timestamp) -> Moment {
        let ahead = wall
            .duration_since((self.source.wall)())
            .as_millis()
            .clamp(0, MAX_OFFSET_MILLIS);
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
const CATCH_UP_ROUNDS: usize = 4;

/// The clock does not begin at zero: a pod that has run for days must be known to have run for days in the first second too. No
/// minimum runtime is longer than a year.
const TIME_AT_START: Millis = Millis::seconds(365 * 24 * 3600);

/// A year: nothing that Stowage writes is valid for longer.
const MAX_OFFSET_MILLIS: i128 = 365 * 24 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::LeaderEpoch;
    use stowage_scheduling::policy::{Class, Match, NamespaceSelector};
    use stowage_scheduling::verbs::namespaces::{NamespaceDeleted, NamespaceObserved};
    use stowage_telemetry::RecordingMetrics;

    #[test]
    fn a_runtime_longer_than_this_process_is_kept() {
        let (now, month) = (
            Clock::start(TimeSource::SYSTEM).now(),
            Millis::seconds(30 * 24 * 3600),
        );
        assert_eq!(now.since(now.before(month)), month);
    }

    #[test]
    fn a_replica_that_stays_on_standby_records_nothing() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (tap, _queue) = RecordingTap::new(RecordingMetrics::detached());
        state.set_recording_tap(tap);
        state.record_checkpoint();
        (0..10).for_each(|_| state.set_tenure(Tenure::Standby));
        assert_eq!(
            state.recording_tap().unwrap().last_recorded(),
            None,
            "nothing has changed"
        );
        state
            .cluster()
            .apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        (0..10).for_each(|_| state.set_tenure(Tenure::Standby));
        assert_eq!(
            state.recording_tap().unwrap().last_recorded(),
            Some(1),
            "it began to lead, and stopped"
        );
        assert_eq!(state.cluster().ledger().leader(), None);
    }

    fn policy_with_namespace_selector() -> Policy {
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
            ..Class::new("own")
        };
        Policy::default()
            .with_classes(vec![own, Class::new("serving")])
            .unwrap()
    }

    fn namespace_labels(namespaces: &[(&str, &str)]) -> NamespaceLabels {
        let labels = |team: &str| Arc::new([("team".to_owned(), team.to_owned())].into());
        namespaces
            .iter()
            .map(|(name, team)| ((*name).to_owned(), labels(team)))
            .collect()
    }

    fn class_in(state: &ServerState, namespace: &str) -> String {
        let traits = PodTraits {
            namespace: namespace.into(),
            ..PodTraits::default()
        };
        let classified = state.classify(&traits);
        let policy = state.cluster().ledger().policy().clone();
        assert_eq!(
            (classified.version, classified.class),
            (policy.version, policy.classify(&traits).class)
        );
        policy.class(classified.class).name.clone()
    }

    #[test]
    fn a_policy_with_namespace_selectors_waits_until_namespaces_are_listed() {
        let state = ServerState::with_stopped_clock(Policy::default());
        assert!(
            !*state.namespaces_wanted().borrow(),
            "nothing asks for them"
        );
        assert!(
            !state.set_policy(policy_with_namespace_selector()),
            "the policy before stays"
        );
        assert!(!state.reads_namespaces());
        state.record_namespaces(namespace_labels(&[("chat", "a"), ("jobs", "b")]));
        assert!(state.set_policy(policy_with_namespace_selector()));
        assert!(*state.namespaces_wanted().borrow());
        assert_eq!(
            [class_in(&state, "chat"), class_in(&state, "jobs")],
            ["own", "serving"]
        );
        assert!(!state.forget_namespaces(), "it is in force");
        state.set_policy(Policy::default());
        assert!(
            *state.namespaces_wanted().borrow(),
            "who reads policies knows whether another one waits"
        );
        state.want_namespaces(state.reads_namespaces());
        assert!(!*state.namespaces_wanted().borrow());
        assert!(state.forget_namespaces() && !state.set_policy(policy_with_namespace_selector()));
    }

    #[test]
    fn a_changed_namespace_label_reclassifies_only_the_pods_of_that_namespace() {
        let state = ServerState::with_stopped_clock(Policy::default());
        state.record_namespaces(namespace_labels(&[("chat", "a"), ("jobs", "b")]));
        state.set_policy(policy_with_namespace_selector());
        let version = state.cluster().ledger().policy().version;
        assert_eq!(
            [class_in(&state, "chat"), class_in(&state, "jobs")],
            ["own", "serving"]
        );
        let observed = |name: &str, team: &str| {
            let labels = namespace_labels(&[(name, team)]).remove(name).unwrap();
            state.apply_namespaces(
                NamespaceObserved {
                    name: name.into(),
                    labels,
                },
                |namespace| namespace == name,
            );
        };
        observed("jobs", "c");
        assert_eq!(
            state.cluster().ledger().policy().version,
            version,
            "no selector asks for it"
        );
        observed("jobs", "a");
        assert_eq!(state.cluster().ledger().policy().version, version + 1);
        assert_eq!(
            [class_in(&state, "chat"), class_in(&state, "jobs")],
            ["own", "own"]
        );
        state.apply_namespaces(NamespaceDeleted("chat".into()), |namespace| {
            namespace == "chat"
        });
        assert_eq!(
            [class_in(&state, "chat"), class_in(&state, "jobs")],
            ["serving", "own"]
        );
    }
}
