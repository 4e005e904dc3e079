//! What a new leader does about its predecessor's writes that it has not observed: Bindings and reservations that are written
//! late, and lists that began before it led. Two replicas of the real service, one stand-in API server.
//!
//! Whether a GPU is overallocated is read off the API server's objects and nothing else.

use crate::served::{gpu_labels, policy_without_engines};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{DelayStage, InjectedFault, Operation};
use stowage_scheduling::ids::PodUid;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::wire::BindingArgs;
use stowage_server::extender::{Extender, bind};
use stowage_server::kubernetes;
use stowage_server::kubernetes::{ClusterOptions, LeadWith, LeaseName};
use stowage_server::service::ServerState;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// Longer than a Lease, a hand-over and anything else here takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
/// A write lands within three seconds or never.
const WRITE_TIMES: WriteTimes = WriteTimes::from_deadline(Duration::from_secs(1));
const LEASE: &str = "leases/stowage/stowage";
/// Allocatable VRAM of a GPU of 80 GiB.
const ALLOCATABLE_BYTES: u64 = 72 << 30;

/// One of two that follow each other by a Lease of their own.
struct LeasedReplica {
    name: &'static str,
    service: Arc<ServerState>,
    extender: Extender,
    tasks: JoinSet<()>,
}

impl LeasedReplica {
    fn start(server: &ApiServer, name: &'static str) -> Self {
        Self::start_with(server, name, WRITE_TIMES)
    }

    fn start_with(server: &ApiServer, name: &'static str, times: WriteTimes) -> Self {
        let service = ServerState::new(policy_without_engines());
        let lead_with = LeadWith::Lease {
            lease: LeaseName::for_stowage("stowage"),
            identity: name.into(),
        };
        let options = ClusterOptions {
            times,
            ..ClusterOptions::new(lead_with, name.into())
        };
        let client = server.client_with_timeouts(name, times).unwrap();
        let (control_plane, tasks) =
            kubernetes::start(client, service.clone(), options, CancellationToken::new());
        let extender = Extender::new(service.clone(), control_plane, RequestLimits::default());
        Self {
            name,
            service,
            extender,
            tasks,
        }
    }

    async fn start_leading(server: &ApiServer, name: &'static str) -> Self {
        let replica = Self::start(server, name);
        replica.wait_until_leading().await;
        replica
    }

    async fn wait_until_leading(&self) {
        eventually("the replica acts", || self.service.leadership.is_open()).await;
    }

    async fn wait_until_observed(&self, pod: &Value) {
        eventually("the pod is seen", || {
            self.service
                .cluster()
                .ledger()
                .pod_state(&uid(pod))
                .is_some()
        })
        .await;
    }

    /// Binds as the scheduler does; the answer is for the caller.
    fn bind(&self, pod: &Value) -> JoinHandle<String> {
        let (extender, pod) = (self.extender.clone(), pod.clone());
        tokio::spawn(async move {
            let args = BindingArgs {
                pod_name: pod["metadata"]["name"].as_str().unwrap().into(),
                pod_namespace: "default".into(),
                pod_uid: uid(&pod).to_string(),
                node: "n".into(),
            };
            bind::bind(&extender, &args).await.unwrap().error.to_owned()
        })
    }

    /// A busy machine may take longer than a write's second: kube-scheduler asks again, and is refused until that write is settled.
    async fn wait_until_bound(&self, pod: &Value) {
        self.wait_until_observed(pod).await;
        let mut refusals = BTreeSet::new();
        let binding = async {
            loop {
                match self.bind(pod).await.unwrap() {
                    bound if bound.is_empty() => return,
                    refused => drop(refusals.insert(refused)),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let bound = tokio::time::timeout(TEST_TIMEOUT, binding).await;
        assert!(bound.is_ok(), "{}: {refusals:?}", pod["metadata"]["name"]);
    }

    /// The process ends at once and sends nothing more. Its Lease is given up, as if it had still come to that: the next one
    /// need not wait for it to run out.
    async fn kill(mut self, server: &ApiServer) {
        server.connections().cut_off(self.name);
        self.service.leadership.set_stopping();
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        let given_up = json!({ "spec": { "holderIdentity": "", "leaseDurationSeconds": 1 } });
        server.patch(LEASE, &given_up).unwrap();
    }
}

/// One node.
async fn server(gpus: u32) -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    let allocatable =
        json!({ "cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "144Gi" });
    let status = json!({ "allocatable": allocatable, "capacity": { "stowage.dev/vram": "144Gi" } });
    server
        .create(
            "nodes",
            json!({ "metadata": { "name": "n", "labels": gpu_labels(gpus) }, "status": status }),
        )
        .unwrap();
    server
}

/// A pod that takes more than half of the GPU.
fn create(server: &ApiServer, name: &str, priority: i32) -> Value {
    create_with(server, name, priority, &json!([]))
}

/// One that the planner places.
fn create_gated(server: &ApiServer, name: &str, priority: i32) -> Value {
    create_with(
        server,
        name,
        priority,
        &json!([{ "name": "stowage.dev/plan" }]),
    )
}

fn create_with(server: &ApiServer, name: &str, priority: i32, gates: &Value) -> Value {
    let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" }, "requests": { "cpu": "1" } });
    let container = json!({ "name": "engine", "image": "engine", "resources": resources });
    let spec = json!({
        "schedulerName": "stowage", "priority": priority, "containers": [container], "schedulingGates": gates,
    });
    let pod = server
        .create(
            "pods",
            json!({ "metadata": { "name": name }, "spec": spec }),
        )
        .unwrap();
    Value::clone(&pod)
}

/// One that a leader has bound to the node's GPU.
fn create_bound(server: &ApiServer, name: &str) {
    let annotations = json!({ "stowage.dev/devices": "index-0", "stowage.dev/vram-granted": (40u64 << 30).to_string() });
    let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
    let container = json!({ "name": "engine", "image": "engine", "resources": resources });
    let spec = json!({ "schedulerName": "stowage", "nodeName": "n", "containers": [container] });
    let metadata = json!({ "name": name, "annotations": annotations });
    server
        .create("pods", json!({ "metadata": metadata, "spec": spec }))
        .unwrap();
}

fn uid(pod: &Value) -> PodUid {
    PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap()
}

/// The overallocated GPUs, with their pods.
fn gpus_allocated_twice(server: &ApiServer) -> BTreeMap<String, Vec<String>> {
    let mut promises: BTreeMap<String, (u64, Vec<String>)> = BTreeMap::new();
    for pod in server.list("pods") {
        let written = &pod["metadata"]["annotations"];
        let (Some(devices), Some(granted)) = (
            written["stowage.dev/devices"].as_str(),
            written["stowage.dev/vram-granted"].as_str(),
        ) else {
            continue;
        };
        for device in devices.split(',') {
            let gpu = format!("{}/{device}", pod["spec"]["nodeName"].as_str().unwrap());
            let (sum, pods) = promises.entry(gpu).or_default();
            *sum += granted.parse::<u64>().unwrap();
            pods.push(pod["metadata"]["name"].as_str().unwrap().to_owned());
        }
    }
    let too_much = promises
        .into_iter()
        .filter(|(_, (sum, _))| *sum > ALLOCATABLE_BYTES);
    too_much.map(|(gpu, (_, pods))| (gpu, pods)).collect()
}

fn reservation_for(server: &ApiServer, name: &str) -> Option<String> {
    let pod = server.get(&format!("pods/default/{name}"))?;
    let mut conditions = pod["status"]["conditions"].as_array()?.iter();
    let reservation = conditions.find(|condition| condition["type"] == "stowage.dev/Reserved")?;
    Some(reservation["status"].as_str()?.to_owned())
}

/// Polls. There is no notification of a change of leadership or of the ledger.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let looking = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, looking)
        .await
        .unwrap_or_else(|_| panic!("it never came that {what}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_bound_while_the_next_leader_lists_is_not_allocated_again() {
    let server = server(1).await;
    let (x, y) = (create(&server, "x", 0), create(&server, "y", 0));
    let a = LeasedReplica::start_leading(&server, "a").await;
    // B's list shows the cluster as of now, whenever its pages come in.
    server.faults().fail_next_from(
        "b",
        Operation::ListPods,
        1,
        InjectedFault::AnswersWhenReleased,
    );
    server.connections().pause_watches("b", "pods");
    let b = LeasedReplica::start(&server, "b");
    server
        .held_requests()
        .until_held("b", Operation::ListPods, "")
        .await;
    a.wait_until_bound(&y).await;
    a.kill(&server).await;
    eventually("b leads", || b.service.metrics.leading.get() == 1).await;
    server.held_requests().release("b", Operation::ListPods);
    b.wait_until_leading().await;
    let answer = b.bind(&x).await.unwrap();
    assert_eq!(
        gpus_allocated_twice(&server),
        BTreeMap::new(),
        "b's answer was {answer:?}"
    );
    assert_ne!(answer, "", "y has the GPU");
}

/// The list that it made in its wait does not have it, and its watch does not show it.
#[tokio::test(flavor = "multi_thread")]
async fn a_binding_committed_after_the_next_leaders_list_is_observed_before_it_acts() {
    // On a machine that stands still for longer than the next leader waits, it does not land in that wait: once more.
    for _ in 0..20 {
        if lands_while_next_leader_waits().await {
            return;
        }
    }
    panic!("the next leader never waited for it");
}

/// Whether it did. If so, it was known.
async fn lands_while_next_leader_waits() -> bool {
    let server = server(1).await;
    let x = create(&server, "x", 0);
    let a = LeasedReplica::start_leading(&server, "a").await;
    // It waits for long enough that all of this happens meanwhile.
    let b = LeasedReplica::start_with(&server, "b", WriteTimes::default());
    let leadership = &b.service.leadership;
    eventually("b has listed", || leadership.is_synced()).await;
    let before = leadership.list_generation();
    a.kill(&server).await;
    let listed = || {
        leadership.is_awaiting_earlier_writes()
            && leadership.list_generation() > before
            && leadership.is_synced()
    };
    eventually("b has listed in its wait", listed).await;
    server.connections().pause_watches("b", "pods");
    // The pod is bound by its creation here, since no write of A would wait for what B does.
    create_bound(&server, "y");
    let has_landed = leadership.is_awaiting_earlier_writes();
    if has_landed {
        b.wait_until_leading().await;
        let answer = b.bind(&x).await.unwrap();
        assert_eq!(
            gpus_allocated_twice(&server),
            BTreeMap::new(),
            "b's answer was {answer:?}"
        );
        assert_ne!(answer, "", "y has the GPU");
    }
    has_landed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_binding_of_a_dead_leader_is_written_before_the_next_leader_acts_or_never() {
    let server = server(1).await;
    let (x, y) = (create(&server, "x", 0), create(&server, "y", 0));
    let a = LeasedReplica::start_leading(&server, "a").await;
    let b = LeasedReplica::start(&server, "b");
    eventually("b has listed", || b.service.leadership.is_synced()).await;
    a.wait_until_observed(&y).await;
    // The API server has accepted it, and is slow.
    server.faults().fail_next_from(
        "a",
        Operation::Binding,
        1,
        InjectedFault::CommitsWhenReleased(DelayStage::Queue),
    );
    let lost = a.bind(&y);
    server
        .held_requests()
        .until_held("a", Operation::Binding, "y")
        .await;
    a.kill(&server).await;
    b.wait_until_leading().await;
    b.wait_until_bound(&x).await;
    let landed = server.held_requests().release("a", Operation::Binding);
    if landed > 0 {
        let node = |server: &ApiServer| {
            server.get("pods/default/y").unwrap()["spec"]["nodeName"].is_string()
        };
        server.until(|server| node(server).then_some(())).await;
    }
    assert_eq!(
        gpus_allocated_twice(&server),
        BTreeMap::new(),
        "{landed} Binding landed after b had acted"
    );
    assert_ne!(lost.await.unwrap(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_reservation_of_a_dead_leader_on_reserved_gpus_is_ended() {
    let server = server(1).await;
    let a = LeasedReplica::start_leading(&server, "a").await;
    let job = create(&server, "job", -10);
    a.wait_until_bound(&job).await;
    let running =
        json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
    server
        .patch_status("pods/default/job", &json!({ "status": running }))
        .unwrap();
    // A proxy buffers it: no timeout limits when it lands.
    server.faults().fail_next_from(
        "a",
        Operation::PodStatus,
        1,
        InjectedFault::CommitsWhenReleased(DelayStage::Network),
    );
    let late = create_gated(&server, "late", 100);
    server
        .held_requests()
        .until_held("a", Operation::PodStatus, "late")
        .await;
    a.kill(&server).await;

    create_gated(&server, "first", 200);
    let b = LeasedReplica::start_leading(&server, "b").await;
    eventually("b holds the GPU for the first", || {
        reservation_for(&server, "first").as_deref() == Some("True")
    })
    .await;
    assert_eq!(reservation_for(&server, "late"), None);
    assert_eq!(server.held_requests().release("a", Operation::PodStatus), 1);
    let is_held = || {
        b.service
            .cluster()
            .ledger()
            .pod_state(&uid(&late))
            .is_some_and(|entry| entry.reservation().is_some())
    };
    let is_ended = || reservation_for(&server, "late").as_deref() == Some("False");
    eventually("b has seen the late hold", || is_held() || is_ended()).await;
    let holds = b.service.cluster().ledger().totals().reservations;
    assert!(!is_held(), "b adopted it: {holds} holds on one GPU");
    assert_eq!(
        (holds, reservation_for(&server, "first").as_deref()),
        (1, Some("True"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_binds_without_an_answer_start_one_read_loop() {
    let server = server(2).await;
    let (p, q) = (create(&server, "p", 0), create(&server, "q", 0));
    let replica = LeasedReplica::start_leading(&server, "a").await;
    replica.wait_until_observed(&p).await;
    replica.wait_until_observed(&q).await;
    server.faults().fail_next_from(
        "a",
        Operation::GetPod,
        1000,
        InjectedFault::AnswersWhenReleased,
    );
    server
        .faults()
        .fail_next_from("a", Operation::Binding, 1000, InjectedFault::Fails);
    for _ in 0..5 {
        assert_ne!(replica.bind(&p).await.unwrap(), "");
    }
    server
        .held_requests()
        .until_held("a", Operation::GetPod, "p")
        .await;
    // Every loop reads the other pod first, and this pod after that.
    assert_ne!(replica.bind(&q).await.unwrap(), "");
    let mut reads = Vec::new();
    // A read is given up after a second, and made again.
    eventually("both are read at once", || {
        reads = server.held_requests().object_names("a", Operation::GetPod);
        ["p", "q"]
            .iter()
            .all(|name| reads.iter().any(|pod| pod == name))
    })
    .await;
    assert_eq!(
        reads.iter().filter(|pod| *pod == "p").count(),
        1,
        "{reads:?}"
    );
}

/// An API server that answers no reads for a while would otherwise get one of each open Binding at once, and again every few seconds.
#[tokio::test(flavor = "multi_thread")]
async fn open_bindings_are_read_a_few_at_a_time_until_all_are_settled() {
    const PODS: u32 = 40;
    const AT_ONCE: usize = 16;
    let server = server(PODS).await;
    let pods: Vec<Value> = (0..PODS)
        .map(|n| create(&server, &format!("p{n:02}"), 0))
        .collect();
    let replica = LeasedReplica::start_leading(&server, "a").await;
    server.faults().fail_next_from(
        "a",
        Operation::GetPod,
        1000,
        InjectedFault::AnswersWhenReleased,
    );
    server
        .faults()
        .fail_next_from("a", Operation::Binding, PODS as usize, InjectedFault::Fails);
    for pod in &pods {
        replica.wait_until_observed(pod).await;
        assert_ne!(replica.bind(pod).await.unwrap(), "");
    }
    let at_once = || {
        server
            .held_requests()
            .object_names("a", Operation::GetPod)
            .len()
    };
    let mut most = 0;
    eventually("as many are read as may be", || {
        most = most.max(at_once());
        most >= AT_ONCE
    })
    .await;
    // Longer than the first pauses of all of them.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        most = most.max(at_once());
    }
    // One that the replica has given up counts until the server sees its connection close, which on a busy machine it may see late.
    assert!(
        (AT_ONCE..pods.len()).contains(&most),
        "{most} are read at once"
    );
    server.faults().clear();
    server.held_requests().release_all();
    eventually("all are settled", || {
        replica.service.cluster().unsettled_bindings() == 0
    })
    .await;
    assert_eq!(gpus_allocated_twice(&server), BTreeMap::new());
    let is_bound = |pod: &Value| pod["spec"]["nodeName"].is_string();
    assert_eq!(
        server
            .list("pods")
            .iter()
            .filter(|pod| is_bound(pod))
            .count(),
        PODS as usize
    );
}
