//! One history's cluster: its parts, the order of what happens in a step, and the end, when all is quiet.

mod agents;
mod binding_writes;
mod budgets;
mod disturbances;
mod late_reservations;
mod nodes;
mod observations;
mod pods;
pub mod policies;
mod quiet;
mod replica_writes;
mod replicas;
mod scheduling;
mod terms;
mod victims;

use super::clock::{self, HOSTS};
use super::fates::{RequestFaults, random_duration};
use super::fault::FaultKind;
use super::machines::Machines;
use super::oracle::pod_name;
use super::panics;
use super::planted::PlantedBug;
use super::schedulers::SchedulerLease;
use super::tally::FaultTally;
use super::{History, HistoryRun};
use crate::demo::api_server::ApiServer;
use agents::NodeAgent;
use budgets::Budget;
use late_reservations::LateReservations;
use parking_lot::Mutex;
use pods::RecreatedPod;
use policies::PolicyFiles;
use replica_writes::ReplicaWrites;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::testkit::random::Random;
use stowage_server::service::{ServerState, SimulatedThreads};
use terms::ActingTerm;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use victims::Victims;

/// More than twice what histories without a bug come to, with all requests that are under way.
const MAX_TASKS: usize = 250;
const MEAN_STEP: Duration = Duration::from_millis(400);
/// Longer than everything that a history leaves behind: the latest landing of a write, a reservation's and a gate's deadline.
const QUIET_PERIOD: Duration = Duration::from_secs(150);
/// GPUs of each node.
pub const GPUS: usize = 2;

/// Purposes of a seed's dice.
mod purpose {
    pub const WORLD: u64 = 0;
    pub const KINDS: u64 = 1;
    pub(crate) const MACHINES: u64 = 2;
    pub const AGENTS: u64 = 3;
}

/// What decides which replica acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeadershipMode {
    KubeScheduler,
    OwnLease,
}

/// What some histories have.
#[derive(Debug, Clone, Copy)]
struct HistoryFeatures {
    /// Pods whose starts are held back.
    has_engines: bool,
    has_groups: bool,
    has_budget: bool,
    /// A pod that asks for no GPU changes all the time, as one of thousands does in a large cluster: no watch of pods is silent.
    is_never_silent: bool,
}

/// One process of Stowage.
struct RunningReplica {
    /// Its name at the API server.
    client: String,
    state: Arc<ServerState>,
    /// Its two addresses, without a network.
    scheduler_router: axum::Router,
    agent_router: axum::Router,
    tasks: JoinSet<()>,
    threads: SimulatedThreads,
    /// Its next plans take minutes.
    is_planning_slowly: Arc<AtomicBool>,
    shutdown: CancellationToken,
    started: Instant,
}

/// What tasks of the schedulers tell the world.
#[derive(Default)]
struct TaskReports {
    /// Calls of kube-schedulers that were lost, given up or repeated.
    lost_calls: u64,
    /// Requests that were answered.
    answers: BTreeMap<&'static str, u64>,
    lines: Vec<String>,
    violations: Vec<String>,
    /// Victims that `preempt` named: by UID, with the priority of the pod for which.
    preempted_victims: Vec<(String, i64, String)>,
    /// How many victims of one `preempt` answer the budget guards, with the preemptor's name.
    guarded_victims: Vec<(usize, String)>,
    /// Requests for Bindings that were answered with success.
    reported_bindings: Vec<ReportedBinding>,
}

/// kube-scheduler was told that this pod is bound.
struct ReportedBinding {
    pod: String,
    uid: String,
    node: String,
}

pub(crate) struct FaultyCluster {
    history: History,
    api: Arc<ApiServer>,
    dice: Random,
    mode: LeadershipMode,
    times: WriteTimes,
    has_proxy: bool,
    has_agents: bool,
    features: HistoryFeatures,
    nodes: usize,
    /// When each node comes back, where it is gone, and when it came.
    node_returns_at: Vec<Option<Instant>>,
    nodes_created_at: Vec<Instant>,
    budget: Budget,
    started_at: Instant,
    replicas: [Option<RunningReplica>; 2],
    /// When it starts again, where it does not run.
    replica_returns_at: [Option<Instant>; 2],
    reconnects: Vec<(Instant, String)>,
    /// When each replica's token that is refused is renewed.
    token_renewals: Vec<(Instant, String)>,
    watch_resumes: Vec<(Instant, String, &'static str)>,
    schedulers: Option<SchedulerLease>,
    machines: Machines,
    agents: Vec<NodeAgent>,
    /// Agents of machines that go on without their Nodes.
    orphaned_agents: Vec<NodeAgent>,
    policies: PolicyFiles,
    next_leadership_change: Instant,
    /// Whether the quiet period has begun: nothing fails any more.
    is_quiet: bool,
    processes_started: usize,
    pods_created: usize,
    /// Pods that were seen bound, by UID, and where.
    observed_placements: BTreeMap<String, String>,
    /// When each pod was first observed bound, by UID.
    bound_at: BTreeMap<String, Instant>,
    observed_reservations: BTreeSet<(String, Vec<String>)>,
    observed_over_allocations: BTreeSet<String>,
    victims: Victims,
    late_reservations: LateReservations,
    /// The API server's version up to which pods' writes have been looked at.
    checked_revision: u64,
    last_check: Instant,
    /// By UID, when each pod was found to be gone.
    deleted_at: BTreeMap<String, Instant>,
    /// Which replica acted at the last look.
    last_acting_term: Option<ActingTerm>,
    reported_bindings: Vec<ReportedBinding>,
    writes: Arc<ReplicaWrites>,
    recreated: VecDeque<RecreatedPod>,
    tally: FaultTally,
    lines: Vec<String>,
    violations: Vec<String>,
    task_reports: Arc<Mutex<TaskReports>>,
}

impl FaultyCluster {
    pub fn new(history: History) -> Self {
        clock::start_history();
        let seed = history.seed;
        let api = Arc::new(ApiServer::in_process(clock::wall));
        let mut kinds = Random::seeded(seed, purpose::KINDS);
        let mode = if kinds.below(2) == 0 {
            LeadershipMode::KubeScheduler
        } else {
            LeadershipMode::OwnLease
        };
        let times =
            WriteTimes::from_deadline(Duration::from_secs(if kinds.below(3) == 0 { 2 } else { 5 }));
        let has_proxy = kinds.below(4) == 0 && !history.without.contains(&FaultKind::ProxyDelay);
        let has_agents = kinds.below(3) > 0;
        let nodes = 2 + kinds.below(2);
        let features = HistoryFeatures {
            has_engines: kinds.below(3) == 0,
            has_groups: kinds.below(3) == 0,
            has_budget: kinds.below(3) == 0,
            is_never_silent: kinds.below(3) == 0,
        };
        let fates = RequestFaults {
            seed,
            times,
            has_proxy,
            without: history.without.clone(),
        };
        api.faults().set_source(fates.into_source());
        let schedulers =
            (mode == LeadershipMode::KubeScheduler).then(|| SchedulerLease::start(&api));
        let began = Instant::now();
        let mut world = Self {
            dice: Random::seeded(seed, purpose::WORLD),
            machines: Machines::new(Random::seeded(seed, purpose::MACHINES)),
            agents: (0..nodes).map(|node| NodeAgent::new(node, seed)).collect(),
            orphaned_agents: Vec::new(),
            history,
            api,
            mode,
            times,
            has_proxy,
            has_agents,
            features,
            nodes,
            node_returns_at: vec![None; nodes],
            nodes_created_at: vec![began; nodes],
            budget: Budget::with_min_available(1 + kinds.below(2)),
            started_at: began,
            replicas: [None, None],
            replica_returns_at: [Some(began); 2],
            reconnects: Vec::new(),
            token_renewals: Vec::new(),
            watch_resumes: Vec::new(),
            schedulers,
            policies: PolicyFiles::new(features),
            next_leadership_change: began + Duration::from_secs(20),
            is_quiet: false,
            processes_started: 0,
            pods_created: 0,
            observed_placements: BTreeMap::new(),
            bound_at: BTreeMap::new(),
            observed_reservations: BTreeSet::new(),
            observed_over_allocations: BTreeSet::new(),
            victims: Victims::default(),
            late_reservations: LateReservations::default(),
            checked_revision: 0,
            last_check: began,
            deleted_at: BTreeMap::new(),
            last_acting_term: None,
            reported_bindings: Vec::new(),
            writes: Arc::default(),
            recreated: VecDeque::new(),
            tally: FaultTally::default(),
            lines: Vec::new(),
            violations: Vec::new(),
            task_reports: Arc::default(),
        };
        (0..nodes).for_each(|n| world.create_node(n));
        if features.has_budget {
            world.create_budget();
        }
        world.log(format!(
            "{mode:?}, {nodes} nodes, writes within {:?}, proxy: {has_proxy}, agents: {has_agents}, {features:?}",
            times.client
        ));
        world
    }

    pub async fn play(mut self) -> HistoryRun {
        let changing = self
            .features
            .is_never_silent
            .then(|| AbortOnDropHandle::new(pods::keep_changing(&self.api)));
        let mut steps = 0;
        while steps < self.history.steps && self.violations.is_empty() {
            steps += 1;
            self.restore_connections_and_replicas();
            self.recreate_nodes();
            (0..2).for_each(|_| self.create_drawn_pods());
            self.edit_and_recreate_pods();
            self.schedule(2);
            self.run_pods(true);
            self.disturb_watches();
            self.disturb_agents();
            self.disturb_replicas();
            self.disturb_nodes();
            if Instant::now() >= self.next_leadership_change {
                self.change_leadership().await;
            }
            self.wait_step().await;
        }
        if self.violations.is_empty() {
            self.run_quiet_period().await;
        }
        drop(changing);
        self.into_run()
    }

    fn into_run(mut self) -> HistoryRun {
        self.tally.histories = 1;
        self.tally.leadership_changes = self.transitions();
        self.tally.simulated = self.started_at.elapsed();
        for (operation, fault) in self.api.faults().applied_faults() {
            if let Some(kind) = super::fates::fault_kind(operation, fault, self.times) {
                self.tally.count_fault(kind);
            }
        }
        for replica in std::mem::take(&mut self.replicas).into_iter().flatten() {
            self.record_audit(&replica);
            replicas::kill_process(&self.api, replica);
        }
        self.lines.push(format!("the end: {}", self.fingerprint()));
        HistoryRun {
            tally: self.tally,
            lines: self.lines,
            violations: self.violations,
        }
    }

    /// Lets a random time pass, and checks what happened.
    async fn wait_step(&mut self) {
        let gap = self
            .dice
            .exponential(MEAN_STEP.as_millis() as f64)
            .0
            .clamp(1, 2000);
        tokio::time::sleep(Duration::from_millis(gap)).await;
        self.advance_and_check();
    }

    /// Advances what happens beside the drawn events, and checks everything.
    fn advance_and_check(&mut self) {
        let can_act = [0, 1].map(|host| self.scheduler_can_act(host));
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.advance(&self.api, can_act);
        }
        let pods = self.pods().into_iter();
        self.machines
            .advance(&pods.filter(|pod| self.has_machine(pod)).collect::<Vec<_>>());
        self.run_disruption_controller();
        self.check_processes();
        self.check_policies();
        self.send_agent_reports();
        self.observe();
        // Not before: what is deleted has been seen.
        self.delete_lost_pods();
    }

    /// Whatever happens, nothing panics, a replica's tasks go on until it is told to stop, and it has few things to do at once.
    fn check_processes(&mut self) {
        if let Some(panic) = panics::take_first() {
            self.fail(format!("a panic at {panic}"));
        }
        let ended = |replica: &mut RunningReplica| {
            replica
                .tasks
                .try_join_next()
                .map(|_| replica.client.clone())
        };
        if let Some(client) = self.replicas.iter_mut().flatten().find_map(ended) {
            self.fail(format!("a task of {client} ended, and nobody told it to"));
        }
        let tasks = tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks();
        self.tally.max_tasks = self.tally.max_tasks.max(tasks);
        if tasks > MAX_TASKS {
            self.fail(format!("{tasks} tasks run at once"));
        }
    }

    /// Whether this fault happens now that its dice have fallen: not if the history is played without it. Counts it.
    fn try_inject(&mut self, kind: FaultKind) -> bool {
        let happens = !self.history.without.contains(&kind);
        if happens {
            self.tally.count_fault(kind);
        }
        happens
    }

    fn acting_replica(&self) -> Option<usize> {
        let is_acting = |replica: &Option<RunningReplica>| {
            replica
                .as_ref()
                .is_some_and(|replica| replica.state.leadership.is_open())
        };
        self.replicas.iter().position(is_acting)
    }

    /// Whether a host's scheduler runs and reaches the API server; a pod is cut off as a whole.
    fn scheduler_can_act(&self, host: usize) -> bool {
        let is_cut_off =
            |client: &String| self.reconnects.iter().any(|(_, cut_off)| cut_off == client);
        self.replicas[host]
            .as_ref()
            .is_some_and(|replica| !is_cut_off(&replica.client))
    }

    fn transitions(&self) -> u64 {
        match &self.schedulers {
            Some(schedulers) => schedulers.transitions(),
            None => {
                let lease = self.api.get("leases/stowage/stowage");
                lease
                    .and_then(|lease| lease["spec"]["leaseTransitions"].as_u64())
                    .unwrap_or(0)
            }
        }
    }

    /// A digest of all objects as they are in the end.
    fn fingerprint(&self) -> String {
        use sha2::{Digest, Sha256};
        let mut digest = Sha256::new();
        for kind in ["nodes", "pods", "events", "leases"] {
            self.api
                .list(kind)
                .iter()
                .for_each(|object| digest.update(object.to_string()));
        }
        digest
            .finalize()
            .iter()
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn log(&mut self, what: String) {
        self.lines
            .push(format!("{} {what}", timestamp(self.started_at)));
    }
}

/// How far the history is.
fn timestamp(began: Instant) -> String {
    format!("{:>8.3} s", began.elapsed().as_secs_f64())
}

pub fn node_name(n: usize) -> String {
    format!("n{n}")
}
