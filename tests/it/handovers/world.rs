//! One seed's cluster, and its history.

mod disturbances;
mod observations;

use super::HandoverRun;
use super::fates::{self, between};
use super::oracle::{could_be_mended, held_twice, holds, name, promised_twice};
use super::schedulers::Schedulers;
use super::tally::HandoverTally;
use crate::served::{gpu_labels, without_engines};
use observations::audit;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use stowage::extender::request::RequestLimits;
use stowage::extender::wire::BindingArgs;
use stowage::extender::{Extender, bind};
use stowage::kubernetes;
use stowage::kubernetes::port::WriteTimes;
use stowage::kubernetes::{ClusterOptions, LeadWith, LeaseName};
use stowage::lab::demo::api_server::ApiServer;
use stowage::lab::simulate::random::Random;
use stowage::scheduling::policy::ConflictRule;
use stowage::service::{Service, TimeSource};
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

pub const HOSTS: [&str; 2] = ["stowage-a", "stowage-b"];
const NODES: usize = 2;
/// How long things happen, and how long it is quiet after that.
const HISTORY: Duration = Duration::from_secs(240);
const QUIET: Duration = Duration::from_secs(90);
const STEP: Duration = Duration::from_millis(400);
/// Pods that wait at once, at most.
const WAITING: usize = 16;

/// What decides which replica acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeadershipMode {
    KubeScheduler,
    OwnLease,
}

/// One process of Stowage.
struct RacingReplica {
    /// Its name at the API server.
    client: String,
    service: Arc<Service>,
    extender: Extender,
    tasks: JoinSet<()>,
    shutdown: CancellationToken,
}

pub struct HandoverCluster {
    api: Arc<ApiServer>,
    dice: Random,
    mode: LeadershipMode,
    times: WriteTimes,
    proxy: bool,
    began: Instant,
    replicas: [Option<RacingReplica>; 2],
    /// When it starts again, where it does not run.
    returns: [Option<Instant>; 2],
    reconnects: Vec<(Instant, String)>,
    resumes: Vec<(Instant, String, &'static str)>,
    schedulers: Option<Schedulers>,
    next_event: Instant,
    processes: usize,
    arrived: usize,
    /// Pods that were seen bound, and where.
    known: BTreeMap<String, String>,
    seen_holds: BTreeSet<(String, Vec<String>)>,
    leaving: BTreeSet<String>,
    twice: BTreeSet<String>,
    tally: HandoverTally,
    history: Vec<String>,
    broken: Vec<String>,
    /// A scheduler got the answer that a pod is bound that is not.
    lies: Arc<Mutex<Vec<String>>>,
}

/// Virtual: the runtime's clock stands still but for what its timers let pass.
fn time() -> TimeSource {
    static BASE: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    fn monotonic() -> Duration {
        Instant::now().into_std().saturating_duration_since(*BASE)
    }
    fn wall() -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH + jiff::SignedDuration::try_from(monotonic()).expect("it is short")
    }
    LazyLock::force(&BASE);
    TimeSource { monotonic, wall }
}

impl HandoverCluster {
    pub async fn new(seed: u64) -> Self {
        let api = Arc::new(ApiServer::start().await.unwrap());
        let mut dice = Random::seeded(seed, 0);
        for n in 0..NODES {
            create_node(&api, n);
        }
        let mode = if dice.below(2) == 0 { LeadershipMode::KubeScheduler } else { LeadershipMode::OwnLease };
        let times = WriteTimes::of(Duration::from_secs(if dice.below(3) == 0 { 2 } else { 5 }));
        let proxy = dice.below(3) == 0;
        fates::order(&api, &mut Random::seeded(seed, 1), times, proxy);
        let schedulers = (mode == LeadershipMode::KubeScheduler).then(|| Schedulers::start(&api));
        let began = Instant::now();
        let mut world = Self {
            api,
            dice,
            mode,
            times,
            proxy,
            began,
            replicas: [None, None],
            returns: [Some(began); 2],
            reconnects: Vec::new(),
            resumes: Vec::new(),
            schedulers,
            next_event: began + Duration::from_secs(20),
            processes: 0,
            arrived: 0,
            known: BTreeMap::new(),
            seen_holds: BTreeSet::new(),
            leaving: BTreeSet::new(),
            twice: BTreeSet::new(),
            tally: HandoverTally::default(),
            history: Vec::new(),
            broken: Vec::new(),
            lies: Arc::default(),
        };
        world.say(format!("{mode:?}, {times:?}, proxy: {proxy}"));
        world
    }

    pub async fn play(mut self) -> HandoverRun {
        while self.began.elapsed() < HISTORY && self.broken.is_empty() {
            self.bring_back();
            (0..2).for_each(|_| self.arrive());
            self.schedule(2);
            self.run_pods();
            self.disturb_watches();
            if Instant::now() >= self.next_event {
                self.happen().await;
            }
            self.step().await;
        }
        self.be_quiet().await;
        self.tally.hand_overs = self.transitions();
        self.tally.note_fates(&self.api.faults().met());
        for replica in std::mem::take(&mut self.replicas).into_iter().flatten() {
            self.note_audit(&replica);
            die(&self.api, replica);
        }
        HandoverRun { tally: self.tally, history: self.history, broken: self.broken }
    }

    /// Everything works again, nothing new comes, and what is on its way lands.
    async fn be_quiet(&mut self) {
        let quiet = Instant::now();
        self.say("from here on all is quiet".into());
        self.api.faults().clear();
        while quiet.elapsed() < QUIET && self.broken.is_empty() {
            self.reconnects.iter_mut().for_each(|(at, _)| *at = quiet);
            self.resumes.iter_mut().for_each(|(at, ..)| *at = quiet);
            self.returns.iter_mut().flatten().for_each(|at| *at = quiet);
            self.bring_back();
            self.schedule(2);
            self.run_pods();
            self.step().await;
        }
        let held_twice = held_twice(&self.api.list("pods"));
        if self.broken.is_empty() && !held_twice.is_empty() {
            self.broken.push(format!("held twice, and nobody ends it: {held_twice:?}"));
        }
        let mendable = could_be_mended(&self.api.list("pods"));
        if !mendable.is_empty() {
            self.broken.push(format!("promised twice, and nobody leaves: {mendable:?}"));
        }
        let twice = promised_twice(&self.api.list("pods"));
        let audits = self
            .acting()
            .map(|host| audit(self.replicas[host].as_ref().expect("it acts"), "stowage_gpu_conflicts"));
        if self.broken.is_empty() && !twice.is_empty() && audits.is_none_or(|found| found == 0) {
            self.broken.push(format!("promised twice, and not reported: {twice:?}"));
        }
    }

    /// Lets some time pass, and looks at what it brought.
    async fn step(&mut self) {
        let gap = self.dice.gap(STEP.as_millis() as f64).0.clamp(1, 2000);
        tokio::time::sleep(Duration::from_millis(gap)).await;
        let can_act = [0, 1].map(|host| self.scheduler_can_act(host));
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.pass(&self.api, can_act);
        }
        self.look();
    }

    // ---- what happens to pods ----

    fn arrive(&mut self) {
        if self.waiting().len() >= WAITING || self.dice.below(3) > 0 {
            return;
        }
        self.arrived += 1;
        let pod_name = format!("p{:03}", self.arrived);
        let gib = [10, 20, 40, 45, 60, 72][self.dice.below(6)];
        let mut annotations = json!({});
        let mut asked = gib;
        if self.dice.below(6) == 0 {
            annotations["stowage.dev/gpus"] = json!("2");
            asked = 2 * gib;
        }
        if self.dice.below(6) == 0 {
            annotations["stowage.dev/exclusive"] = json!("true");
        }
        let priority = [-10, -10, 0, 100, 200][self.dice.below(5)];
        let gates = if self.dice.below(5) < 2 { json!([{ "name": "stowage.dev/plan" }]) } else { json!([]) };
        let resources =
            json!({ "limits": { "stowage.dev/vram": format!("{asked}Gi") }, "requests": { "cpu": "1" } });
        let spec = json!({
            "schedulerName": "stowage", "priority": priority, "schedulingGates": gates,
            "terminationGracePeriodSeconds": 2,
            "containers": [{ "name": "engine", "image": "engine", "resources": resources }],
        });
        let pod = json!({ "metadata": { "name": pod_name, "annotations": annotations }, "spec": spec });
        self.api.create("pods", pod).unwrap();
    }

    fn waiting(&self) -> Vec<Arc<Value>> {
        let waits = |pod: &Arc<Value>| pod["spec"]["nodeName"].is_null();
        self.api.list("pods").into_iter().filter(waits).collect()
    }

    /// The schedulers ask for Bindings, on the node that is nominated or on any. The one that does not lead may ask, too: its
    /// last request may be late.
    fn schedule(&mut self, requests: usize) {
        let gated =
            |pod: &Value| pod["spec"]["schedulingGates"].as_array().is_some_and(|gates| !gates.is_empty());
        let ready: Vec<Arc<Value>> = self.waiting().into_iter().filter(|pod| !gated(pod)).collect();
        for _ in 0..requests {
            if ready.is_empty() {
                return;
            }
            let pod = ready[self.dice.below(ready.len())].clone();
            let nominated = pod["status"]["nominatedNodeName"].as_str().map(str::to_owned);
            let node = nominated.filter(|_| self.dice.below(5) > 0);
            let node = node.unwrap_or_else(|| node_name(self.dice.below(NODES)));
            let acting = self.acting().unwrap_or(0);
            let asked = if self.dice.below(5) == 0 { 1 - acting } else { acting };
            let Some(replica) = &self.replicas[asked] else { continue };
            tokio::spawn(ask(self.api.clone(), replica.extender.clone(), pod, node, self.lies.clone()));
        }
    }

    fn acting(&self) -> Option<usize> {
        let leads = |replica: &Option<RacingReplica>| {
            replica.as_ref().is_some_and(|replica| replica.service.gate.is_open())
        };
        self.replicas.iter().position(leads)
    }

    /// The kubelets: pods start, end, and terminate when they are deleted.
    fn run_pods(&mut self) {
        for pod in self.api.list("pods") {
            let path = format!("pods/default/{}", name(&pod));
            if pod["metadata"]["deletionTimestamp"].is_string() {
                if self.dice.below(4) == 0 {
                    self.api.delete_now(&path).unwrap();
                }
                continue;
            }
            if pod["spec"]["nodeName"].is_null() {
                continue;
            }
            match pod["status"]["phase"].as_str() {
                Some("Running") if self.dice.below(40) == 0 => self.api.delete(&path).unwrap(),
                Some("Running") => {}
                _ if self.dice.below(12) == 0 => {
                    let conditions = json!([{ "type": "Ready", "status": "True" }]);
                    let status = json!({ "phase": "Running", "conditions": conditions });
                    self.api.patch_status(&path, &json!({ "status": status })).unwrap();
                }
                _ => {}
            }
        }
    }

    // ---- what happens to replicas ----

    /// Whether a host's scheduler runs and reaches the API server; a pod is cut off as a whole.
    fn scheduler_can_act(&self, host: usize) -> bool {
        let is_cut_off = |client: &String| self.reconnects.iter().any(|(_, cut_off)| cut_off == client);
        self.replicas[host].as_ref().is_some_and(|replica| !is_cut_off(&replica.client))
    }

    fn transitions(&self) -> u64 {
        match &self.schedulers {
            Some(schedulers) => schedulers.transitions(),
            None => {
                let lease = self.api.get("leases/stowage/stowage");
                lease.and_then(|lease| lease["spec"]["leaseTransitions"].as_u64()).unwrap_or(0)
            }
        }
    }

    fn say(&mut self, what: String) {
        self.history.push(format!("{} {what}", self.at()));
    }

    fn at(&self) -> String {
        format!("{:>8.3} s", self.began.elapsed().as_secs_f64())
    }
}

/// One request of a scheduler's, and whether its answer is true.
async fn ask(
    api: Arc<ApiServer>,
    extender: Extender,
    pod: Arc<Value>,
    node: String,
    lies: Arc<Mutex<Vec<String>>>,
) {
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let args = BindingArgs {
        pod_name: name(&pod),
        pod_namespace: "default".into(),
        pod_uid: uid.clone(),
        node: node.clone(),
    };
    let Ok(answer) = bind::bind(&extender, &args).await else { return };
    let Some(now) = api.get(&format!("pods/default/{}", args.pod_name)) else { return };
    if answer.error.is_empty() && now["metadata"]["uid"] == uid && now["spec"]["nodeName"] != node {
        lies.lock().push(format!("{} was said to be bound to {node}, and is not", args.pod_name));
    }
}

/// The process is gone: it hears and sends nothing more.
fn die(api: &ApiServer, mut replica: RacingReplica) {
    api.connections().cut_off(&replica.client);
    replica.service.gate.set_stopping();
    replica.tasks.abort_all();
}

fn create_node(api: &ApiServer, n: usize) {
    let amounts = json!({ "cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "144Gi" });
    let status = json!({ "allocatable": amounts, "capacity": amounts });
    let node = json!({ "metadata": { "name": node_name(n), "labels": gpu_labels(2) }, "status": status });
    api.create("nodes", node).unwrap();
}

fn node_name(n: usize) -> String {
    format!("n{n}")
}
