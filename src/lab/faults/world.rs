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
use super::fates::{Fates, between};
use super::fault::FaultKind;
use super::machines::Machines;
use super::oracle::name;
use super::panics;
use super::planted::PlantedBug;
use super::schedulers::Schedulers;
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
use stowage_server::service::{Service, SimulatedThreads};
use terms::ActingTerm;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use victims::Victims;

/// More than twice what histories without a bug come to, with all requests that are under way.
const MOST_TASKS: usize = 250;
const STEP: Duration = Duration::from_millis(400);
/// Longer than everything that a history leaves behind: the latest landing of a write, a reservation's and a gate's deadline.
const QUIET: Duration = Duration::from_secs(150);
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
struct WorldFeatures {
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
    service: Arc<Service>,
    /// Its two addresses, without a network.
    verbs: axum::Router,
    reports: axum::Router,
    tasks: JoinSet<()>,
    threads: SimulatedThreads,
    /// Its next plans take minutes.
    plans_for_long: Arc<AtomicBool>,
    shutdown: CancellationToken,
    started: Instant,
}

/// What tasks of the schedulers tell the world.
#[derive(Default)]
struct TaskNotes {
    /// Calls of kube-schedulers that were lost, given up or repeated.
    lost_calls: u64,
    /// Requests that were answered.
    answers: BTreeMap<&'static str, u64>,
    lines: Vec<String>,
    broken: Vec<String>,
    /// Victims that `preempt` named: by UID, with the priority of the pod for which.
    named: Vec<(String, i64, String)>,
    /// How many victims of one `preempt` answer the budget guards, with the preemptor's name.
    guarded: Vec<(usize, String)>,
    /// Requests for Bindings that were answered with success.
    claims: Vec<BoundClaim>,
}

/// kube-scheduler was told that this pod is bound.
struct BoundClaim {
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
    features: WorldFeatures,
    nodes: usize,
    /// When each node comes back, where it is gone, and when it came.
    node_returns: Vec<Option<Instant>>,
    created: Vec<Instant>,
    budget: Budget,
    began: Instant,
    replicas: [Option<RunningReplica>; 2],
    /// When it starts again, where it does not run.
    returns: [Option<Instant>; 2],
    reconnects: Vec<(Instant, String)>,
    /// When each replica's token that is refused is renewed.
    renewals: Vec<(Instant, String)>,
    resumes: Vec<(Instant, String, &'static str)>,
    schedulers: Option<Schedulers>,
    machines: Machines,
    agents: Vec<NodeAgent>,
    /// Agents of machines that go on without their Nodes.
    agents_left: Vec<NodeAgent>,
    policies: PolicyFiles,
    next_event: Instant,
    /// Whether the quiet period has begun: nothing fails any more.
    is_quiet: bool,
    processes: usize,
    arrived: usize,
    /// Pods that were seen bound, by UID, and where.
    known: BTreeMap<String, String>,
    /// When each pod was first observed bound, by UID.
    bound_at: BTreeMap<String, Instant>,
    seen_holds: BTreeSet<(String, Vec<String>)>,
    twice: BTreeSet<String>,
    victims: Victims,
    late_reservations: LateReservations,
    /// The API server's version up to which pods' writes have been looked at.
    looked_at: u64,
    last_look: Instant,
    /// By UID, when each pod was found to be gone.
    gone_at: BTreeMap<String, Instant>,
    /// Which replica acted at the last look.
    acted: Option<ActingTerm>,
    claims: Vec<BoundClaim>,
    writes: Arc<ReplicaWrites>,
    recreated: VecDeque<RecreatedPod>,
    tally: FaultTally,
    lines: Vec<String>,
    broken: Vec<String>,
    task_notes: Arc<Mutex<TaskNotes>>,
}

impl FaultyCluster {
    pub fn new(history: History) -> Self {
        clock::begin();
        let seed = history.seed;
        let api = Arc::new(ApiServer::in_process(clock::wall));
        let mut kinds = Random::seeded(seed, purpose::KINDS);
        let mode = if kinds.below(2) == 0 {
            LeadershipMode::KubeScheduler
        } else {
            LeadershipMode::OwnLease
        };
        let times = WriteTimes::of(Duration::from_secs(if kinds.below(3) == 0 { 2 } else { 5 }));
        let has_proxy = kinds.below(4) == 0 && !history.without.contains(&FaultKind::ProxyDelay);
        let has_agents = kinds.below(3) > 0;
        let nodes = 2 + kinds.below(2);
        let features = WorldFeatures {
            has_engines: kinds.below(3) == 0,
            has_groups: kinds.below(3) == 0,
            has_budget: kinds.below(3) == 0,
            is_never_silent: kinds.below(3) == 0,
        };
        let fates = Fates {
            seed,
            times,
            has_proxy,
            without: history.without.clone(),
        };
        api.faults().draw(fates.source());
        let schedulers = (mode == LeadershipMode::KubeScheduler).then(|| Schedulers::start(&api));
        let began = Instant::now();
        let mut world = Self {
            dice: Random::seeded(seed, purpose::WORLD),
            machines: Machines::new(Random::seeded(seed, purpose::MACHINES)),
            agents: (0..nodes).map(|node| NodeAgent::new(node, seed)).collect(),
            agents_left: Vec::new(),
            history,
            api,
            mode,
            times,
            has_proxy,
            has_agents,
            features,
            nodes,
            node_returns: vec![None; nodes],
            created: vec![began; nodes],
            budget: Budget::keeping(1 + kinds.below(2)),
            began,
            replicas: [None, None],
            returns: [Some(began); 2],
            reconnects: Vec::new(),
            renewals: Vec::new(),
            resumes: Vec::new(),
            schedulers,
            policies: PolicyFiles::new(features),
            next_event: began + Duration::from_secs(20),
            is_quiet: false,
            processes: 0,
            arrived: 0,
            known: BTreeMap::new(),
            bound_at: BTreeMap::new(),
            seen_holds: BTreeSet::new(),
            twice: BTreeSet::new(),
            victims: Victims::default(),
            late_reservations: LateReservations::default(),
            looked_at: 0,
            last_look: began,
            gone_at: BTreeMap::new(),
            acted: None,
            claims: Vec::new(),
            writes: Arc::default(),
            recreated: VecDeque::new(),
            tally: FaultTally::default(),
            lines: Vec::new(),
            broken: Vec::new(),
            task_notes: Arc::default(),
        };
        (0..nodes).for_each(|n| world.create_node(n));
        if features.has_budget {
            world.create_budget();
        }
        world.say(format!(
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
        while steps < self.history.steps && self.broken.is_empty() {
            steps += 1;
            self.bring_back();
            self.bring_nodes_back();
            (0..2).for_each(|_| self.arrive());
            self.meddle_with_pods();
            self.schedule(2);
            self.run_pods(true);
            self.disturb_watches();
            self.disturb_agents();
            self.disturb_replicas();
            self.disturb_nodes();
            if Instant::now() >= self.next_event {
                self.change_leadership().await;
            }
            self.step().await;
        }
        if self.broken.is_empty() {
            self.be_quiet().await;
        }
        drop(changing);
        self.end()
    }

    fn end(mut self) -> HistoryRun {
        self.tally.histories = 1;
        self.tally.hand_overs = self.transitions();
        self.tally.simulated = self.began.elapsed();
        for (operation, fault) in self.api.faults().met() {
            if let Some(kind) = super::fates::kind_of(operation, fault, self.times) {
                self.tally.note(kind);
            }
        }
        for replica in std::mem::take(&mut self.replicas).into_iter().flatten() {
            self.note_audit(&replica);
            replicas::die(&self.api, replica);
        }
        self.lines.push(format!("the end: {}", self.fingerprint()));
        HistoryRun {
            tally: self.tally,
            lines: self.lines,
            broken: self.broken,
        }
    }

    /// Lets a random time pass, and checks what happened.
    async fn step(&mut self) {
        let gap = self.dice.gap(STEP.as_millis() as f64).0.clamp(1, 2000);
        tokio::time::sleep(Duration::from_millis(gap)).await;
        self.go_on();
    }

    /// Advances what happens beside the drawn events, and checks everything.
    fn go_on(&mut self) {
        let can_act = [0, 1].map(|host| self.scheduler_can_act(host));
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.pass(&self.api, can_act);
        }
        let pods = self.pods().into_iter();
        self.machines
            .pass(&pods.filter(|pod| self.has_machine(pod)).collect::<Vec<_>>());
        self.control_budget();
        self.check_processes();
        self.watch_policies();
        self.report();
        self.look();
        // Not before: what is deleted has been seen.
        self.collect_pods();
    }

    /// Whatever happens, nothing panics, a replica's tasks go on until it is told to stop, and it has few things to do at once.
    fn check_processes(&mut self) {
        if let Some(panic) = panics::take() {
            self.break_with(format!("a panic at {panic}"));
        }
        let ended = |replica: &mut RunningReplica| {
            replica
                .tasks
                .try_join_next()
                .map(|_| replica.client.clone())
        };
        if let Some(client) = self.replicas.iter_mut().flatten().find_map(ended) {
            self.break_with(format!("a task of {client} ended, and nobody told it to"));
        }
        let tasks = tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks();
        self.tally.most_tasks = self.tally.most_tasks.max(tasks);
        if tasks > MOST_TASKS {
            self.break_with(format!("{tasks} tasks run at once"));
        }
    }

    /// Whether this fault happens now that its dice have fallen: not if the history is played without it. Counts it.
    fn happens(&mut self, kind: FaultKind) -> bool {
        let happens = !self.history.without.contains(&kind);
        if happens {
            self.tally.note(kind);
        }
        happens
    }

    fn acting(&self) -> Option<usize> {
        let leads = |replica: &Option<RunningReplica>| {
            replica
                .as_ref()
                .is_some_and(|replica| replica.service.leadership.is_open())
        };
        self.replicas.iter().position(leads)
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

    fn say(&mut self, what: String) {
        self.lines.push(format!("{} {what}", at(self.began)));
    }
}

/// How far the history is.
fn at(began: Instant) -> String {
    format!("{:>8.3} s", began.elapsed().as_secs_f64())
}

pub fn node_name(n: usize) -> String {
    format!("n{n}")
}
