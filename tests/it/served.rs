//! A Stowage on a test cluster, served over loopback: the extender's own router and listeners, with a control plane that answers
//! as a test sets it.
//!
//! Nothing here runs in the background but the two listeners: soft reservations and reservations last until a test lets them
//! expire.

mod objects;

pub use objects::*;

use crate::client::{Client, HttpAnswer};
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stowage_kubernetes_objects::port::{
    AgentAuthority, BindOrder, BindOutcome, ControlPlane, IsDue, PageAuthority,
};
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, PodEventReason,
    ReservationChange, StatusChange,
};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::ledger::{PodPhase, PodState};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::extender::page_auth::PageAuth;
use stowage_server::extender::reports::{AgentAuth, TokenGuard};
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server::{Endpoint, Endpoints};
use stowage_server::extender::{Extender, server};
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::kubernetes::observed::ActivityRecordingControlPlane;
use stowage_server::service::{ServerState, TimeSource};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Each GPU of a test's cluster: 80 GiB, of which 72 GiB are allocatable (10 % headroom).
pub const GPU_BYTES: u64 = 80 << 30;

pub type ReadOutcome = Result<Option<FreshPod>, ControlPlaneError>;

/// The dump's control plane, except where a test has written down what happens instead.
pub struct ScriptedControlPlane {
    dump: DumpControlPlane,
    pub binds: Mutex<VecDeque<BindOutcome>>,
    pub reads: Mutex<VecDeque<ReadOutcome>>,
    /// So many Bindings and reads panic before one is answered.
    pub panics: Mutex<usize>,
    /// A bind is answered when it gets a permit.
    pub permits: Semaphore,
    /// Every Binding that was to be written, and what became of it once that is known.
    pub orders: Mutex<Vec<(BindOrder, Option<BindOutcome>)>>,
    pub holds: Mutex<Vec<(PodKey, Option<Reservation>)>>,
    pub events: Mutex<Vec<PodEvent>>,
    pub hold_fails: Mutex<bool>,
    /// Happens while the next condition of a reservation is being written.
    pub meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl ScriptedControlPlane {
    async fn bind(&self, order: &BindOrder) -> BindOutcome {
        let place = {
            let mut orders = self.orders.lock();
            orders.push((order.clone(), None));
            orders.len() - 1
        };
        self.permits.acquire().await.unwrap().forget();
        self.panic_if_scripted();
        let scripted = self.binds.lock().pop_front();
        let outcome = match scripted {
            Some(outcome) => outcome,
            None => self.dump.bind(order).await,
        };
        self.orders.lock()[place].1 = Some(outcome.clone());
        outcome
    }
}

impl ScriptedControlPlane {
    fn panic_if_scripted(&self) {
        let panics = {
            let mut left = self.panics.lock();
            let panics = *left > 0;
            *left -= usize::from(panics);
            panics
        };
        assert!(!panics, "panics as the test has told it");
    }
}

impl ControlPlane for ScriptedControlPlane {
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        self.bind(order).boxed()
    }

    fn read_pod<'a>(&'a self, key: &'a PodKey) -> BoxFuture<'a, ReadOutcome> {
        async {
            self.panic_if_scripted();
            let scripted = self.reads.lock().pop_front();
            match scripted {
                Some(outcome) => outcome,
                None => self.dump.read_pod(key).await,
            }
        }
        .boxed()
    }

    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        if let Some(reservation) = &change.reservation {
            let meanwhile = self.meanwhile.lock().take();
            if let Some(meanwhile) = meanwhile {
                meanwhile();
            }
            if *self.hold_fails.lock() {
                let error = ControlPlaneError::Unknown("no answer".into());
                return futures::future::ready(Err(error)).boxed();
            }
            let reservation = match reservation {
                ReservationChange::Set(reservation) => Some(reservation.clone()),
                ReservationChange::Ended => None,
            };
            self.holds.lock().push((key.clone(), reservation));
        }
        self.dump.write_status(key, uid, change)
    }

    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        why: &'a EvictionReason,
        is_due: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        self.dump.evict(key, uid, why, is_due)
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        self.dump.remove_scheduling_gate(key, uid)
    }

    fn record_event(&self, notice: PodEvent) {
        self.events.lock().push(notice);
    }
}

/// The default policy, but that no class is of engines and a report stays fresh for a day: pods that no kubelet runs never
/// get through their start, and agents here report once. What either does to others has tests of its own.
pub fn policy_without_engines() -> Policy {
    let mut policy = Policy::default();
    policy.telemetry.fresh = Millis::seconds(24 * 3600);
    policy.telemetry.stale = Millis::seconds(48 * 3600);
    let mut classes = policy.classes().to_vec();
    classes.iter_mut().for_each(|class| class.engine = false);
    policy
        .with_classes(classes)
        .expect("the default classes are valid")
}

/// What a test starts from.
pub struct ServedCluster {
    pub nodes: Vec<Value>,
    pub pods: Vec<Value>,
    pub policy: Policy,
    pub limits: RequestLimits,
    pub time: TimeSource,
    /// Reviews tokens; without it every client may report.
    pub authority: Option<Arc<dyn AgentAuthority>>,
    /// Reviews access to pages; without it every client may read all.
    pub pages: Option<Arc<dyn PageAuthority>>,
    gpus: Vec<(String, u32)>,
}

impl ServedCluster {
    /// Nodes whose agents report this many GPUs.
    pub fn with_gpus(gpus: &[(&str, u32)]) -> Self {
        Self {
            nodes: gpus.iter().map(|(name, _)| node(name)).collect(),
            pods: Vec::new(),
            policy: policy_without_engines(),
            limits: RequestLimits::default(),
            time: TimeSource::SYSTEM,
            authority: None,
            pages: None,
            gpus: gpus
                .iter()
                .map(|(name, gpus)| ((*name).to_owned(), *gpus))
                .collect(),
        }
    }

    pub fn with(mut self, pods: impl IntoIterator<Item = Value>) -> Self {
        self.pods.extend(pods);
        self
    }

    pub fn serve(self) -> Served {
        let items: Vec<&Value> = self.nodes.iter().chain(&self.pods).collect();
        let dump = Dump::from_text(
            json!({ "kind": "List", "items": items }).to_string(),
            Path::new("test"),
        );
        let service = ServerState::with_time_source(self.time, self.policy);
        let mut index = ClusterIndex::default();
        let control_plane = Arc::new(ScriptedControlPlane {
            dump: DumpControlPlane::load(&dump, &service, &mut index).unwrap(),
            binds: Mutex::default(),
            reads: Mutex::default(),
            panics: Mutex::default(),
            permits: Semaphore::new(Semaphore::MAX_PERMITS),
            orders: Mutex::default(),
            holds: Mutex::default(),
            events: Mutex::default(),
            hold_fails: Mutex::default(),
            meanwhile: Mutex::default(),
        });
        let agent_auth = self.authority.map_or(AgentAuth::Anyone, |authority| {
            AgentAuth::Token(TokenGuard::new(authority, service.clone()))
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let page_auth = {
            let _inside = runtime.enter();
            self.pages.map_or(PageAuth::Anyone, |authority| {
                PageAuth::new(authority, service.clone())
            })
        };
        // As `stowage serve` has it: what is written is among the decisions that the page lists.
        let observed = ActivityRecordingControlPlane::new(control_plane.clone(), service.clone());
        let extender = Extender::new(service.clone(), observed, self.limits)
            .with_agent_auth(agent_auth)
            .with_page_auth(page_auth);
        let (endpoints, [scheduler, agents, operators]) = endpoints();
        let stop = CancellationToken::new();
        let serving = runtime.spawn(server::serve(extender.clone(), endpoints, stop.clone()));
        let served = Served {
            service,
            index: Mutex::new(index),
            control_plane,
            extender,
            scheduler,
            agents,
            operators,
            stop,
            serving: Some(serving),
            runtime,
        };
        let reports: Vec<Value> = self
            .gpus
            .iter()
            .map(|(node, gpus)| report(node, "boot", 1, *gpus))
            .collect();
        // A batch has at most a mebibyte.
        for batch in reports.chunks(256) {
            assert_eq!(served.report(Value::from(batch.to_vec())).status, 200);
        }
        served
    }
}

/// Plain addresses on loopback: the scheduler's, the agents', the operators'.
pub fn endpoints() -> (Endpoints, [SocketAddr; 3]) {
    let listeners = [(); 3].map(|()| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        listener
    });
    let addresses = [0, 1, 2].map(|place: usize| listeners[place].local_addr().unwrap());
    let [scheduler, agents, operators] = listeners.map(Endpoint::plain);
    (
        Endpoints {
            webhook: None,
            scheduler,
            agents,
            operators,
        },
        addresses,
    )
}

pub struct Served {
    pub service: Arc<ServerState>,
    pub index: Mutex<ClusterIndex>,
    pub control_plane: Arc<ScriptedControlPlane>,
    pub extender: Extender,
    pub scheduler: SocketAddr,
    pub agents: SocketAddr,
    pub operators: SocketAddr,
    stop: CancellationToken,
    serving: Option<tokio::task::JoinHandle<std::io::Result<()>>>,
    runtime: Runtime,
}

impl Served {
    pub fn client(&self) -> Client<std::net::TcpStream> {
        Client::connect(self.scheduler)
    }

    /// Over a connection of its own.
    pub fn post(&self, path: &str, body: Value) -> HttpAnswer {
        self.client().post(path, body.to_string())
    }

    /// As an agent, or as several in one batch.
    pub fn report(&self, body: Value) -> HttpAnswer {
        Client::connect(self.agents).post("/v1/reports", body.to_string())
    }

    pub fn filter(&self, pod: &Value, nodes: &[&str]) -> HttpAnswer {
        self.post("/scheduler/filter", args(pod, nodes))
    }

    /// The nodes that pass.
    pub fn filter_passed(&self, pod: &Value, nodes: &[&str]) -> Vec<String> {
        let answer = self.filter(pod, nodes);
        assert_eq!(answer.status, 200, "{}", answer.text());
        serde_json::from_value(answer.json()["NodeNames"].take()).unwrap()
    }

    /// Host and score, in the order of the answer.
    pub fn prioritize(&self, pod: &Value, nodes: &[&str]) -> Vec<(String, i64)> {
        let answer = self.post("/scheduler/prioritize", args(pod, nodes));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let scores = answer.json();
        let score = |one: &Value| {
            (
                one["Host"].as_str().unwrap().to_owned(),
                one["Score"].as_i64().expect("an integer"),
            )
        };
        scores.as_array().unwrap().iter().map(score).collect()
    }

    /// The answer's error; empty if the pod is bound.
    pub fn bind(&self, pod: &Value, node: &str) -> String {
        let answer = self.post("/scheduler/bind", bind_args(pod, node));
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["Error"].as_str().unwrap().to_owned()
    }

    /// Makes a pod known, as its watch would.
    pub fn observe_pod(&self, pod: &Value) -> Option<PodEvent> {
        self.index
            .lock()
            .apply_pod(&self.service, &serde_json::from_value(pod.clone()).unwrap())
    }

    pub fn delete(&self, pod: &Value) {
        self.index
            .lock()
            .delete_pod(&self.service, &serde_json::from_value(pod.clone()).unwrap());
    }

    pub fn pod_state(&self, pod: &Value) -> Option<PodState> {
        self.service
            .cluster()
            .ledger()
            .pod_state(&uid_of(pod))
            .cloned()
    }

    pub fn phase(&self, pod: &Value) -> PodPhase {
        self.pod_state(pod).expect("the ledger knows the pod").phase
    }

    pub fn is_bound_to(&self, pod: &Value, node: &str) -> bool {
        matches!(self.phase(pod), PodPhase::Bound(bound) if bound.node.as_str() == node)
    }

    pub fn soft_reservation_node(&self, pod: &Value) -> Option<String> {
        self.pod_state(pod)?
            .soft_reservation()
            .map(|soft_reservation| soft_reservation.node.to_string())
    }

    /// What is charged on each GPU of a node.
    pub fn charged(&self, node: &str) -> Vec<Bytes> {
        let ledger = self.service.cluster();
        assert_eq!(audit(ledger.ledger()), []);
        let name = stowage_scheduling::ids::NodeName::parse(node).unwrap();
        ledger
            .ledger()
            .node(&name)
            .unwrap()
            .gpus
            .iter()
            .map(|gpu| gpu.charged)
            .collect()
    }

    /// The ledger as operators see it: every pod, every GPU, every generation.
    pub fn ledger(&self) -> String {
        let answer = Client::connect(self.operators).get_page("/debug/snapshot");
        assert_eq!(answer.status, 200);
        answer.text().to_owned()
    }

    /// A counter by its line in the metrics' text, such as `stowage_answers_total{code="none",outcome="bound",verb="bind"}`.
    pub fn metric(&self, series: &str) -> u64 {
        sample(
            Client::connect(self.operators).get_page("/metrics").text(),
            series,
        )
    }

    /// The same where a test has shortened the limits of connections: on a busy machine its own would exceed them.
    pub fn metric_without_limits(&self, series: &str) -> u64 {
        sample(&self.service.metrics.render(), series)
    }

    pub fn bad_requests(&self, verb: &str, code: &str) -> u64 {
        self.metric(&format!(
            "stowage_bad_requests_total{{code=\"{code}\",verb=\"{verb}\"}}"
        ))
    }

    pub fn events(&self) -> Vec<(String, PodEventReason, String)> {
        let events = self.control_plane.events.lock();
        events
            .iter()
            .map(|n| (n.key.name.to_string(), n.kind, n.text.clone()))
            .collect()
    }

    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// What the accepted Bindings allocate on each GPU: summed here, from nothing but the orders.
    pub fn bound_vram_by_gpu(
        &self,
        is_counted: impl Fn(&BindOrder) -> bool,
    ) -> BTreeMap<String, u64> {
        let mut promised = BTreeMap::new();
        for (order, outcome) in self.control_plane.orders.lock().iter() {
            if *outcome == Some(BindOutcome::Written) && is_counted(order) {
                for device in order.placement.devices.iter() {
                    let part = order.placement.granted.0 / order.placement.devices.len() as u64;
                    *promised.entry(device.to_string()).or_default() += part;
                }
            }
        }
        promised
    }

    pub fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(future)
    }

    pub fn begin_stop(&self) {
        self.stop.cancel();
    }

    /// Stops, and answers when everything has ended.
    pub fn stop(&mut self) {
        self.begin_stop();
        if let Some(serving) = self.serving.take() {
            self.runtime.block_on(serving).unwrap().unwrap();
        }
    }
}

fn sample(metrics: &str, series: &str) -> u64 {
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map_or(0, |count| count.parse().unwrap())
}

/// Polls until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(
            started.elapsed() < crate::client::TEST_TIMEOUT,
            "it never came that {what}"
        );
        std::thread::park_timeout(std::time::Duration::from_millis(1));
    }
}
