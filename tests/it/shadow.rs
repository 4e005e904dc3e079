//! Shadow mode, as the scheduler and operators see it: everything passes, the decision that enforcement would have made is
//! recorded, and nothing is reserved, reported on pods or written but plain Bindings.

use crate::client::{Client, TEST_TIMEOUT};
use crate::device_plugin::{GPU, bound_to, plugin_node, pod_requesting};
use crate::served::{
    Served, ServedCluster, pod, policy_without_engines, preempt_args, with_priority,
};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::kubelet;
use stowage_lab::demo::kubelet::Kubelet;
use stowage_lab::demo::scheduler::StandInScheduler;
use stowage_lab::demo::scheduler::config::SchedulerConfig;
use stowage_lab::demo::scheduler::observations::Verb;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::ledger::PodPhase;
use stowage_scheduling::policy::{Digest, Mode, Policy, Pool};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::verbs::wait::TakePending;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::shadow::NO_VRAM_IN_SHADOW;
use stowage_server::extender::{Extender, server};
use stowage_server::kubernetes;
use stowage_server::kubernetes::{ClusterOptions, LeadWith};
use stowage_server::service::ServerState;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

fn in_shadow_mode(mut policy: Policy) -> Policy {
    policy.mode = Mode::Shadow;
    policy.digest = Digest(0xabc);
    policy
}

fn cluster(nodes: &[(&str, u32)]) -> ServedCluster {
    let mut cluster = ServedCluster::with_gpus(&[]);
    cluster.nodes = nodes
        .iter()
        .map(|(name, gpus)| plugin_node(name, GPU, *gpus))
        .collect();
    cluster.policy = in_shadow_mode(policy_without_engines());
    cluster
}

impl Served {
    fn shadow(&self, verb: &str, outcome: &str) -> u64 {
        self.metric(&format!(
            "stowage_shadow_decisions_total{{outcome=\"{outcome}\",verb=\"{verb}\"}}"
        ))
    }

    /// Verb, outcome, what would have been and what was, in order.
    fn journal(&self) -> Vec<[String; 4]> {
        let records = Client::connect(self.operators).get("/debug/shadow").json();
        let of = |record: &Value, part: &str| record[part].as_str().unwrap().to_owned();
        let row = |record: &Value| {
            assert_eq!(
                (of(record, "policy"), record.as_object().unwrap().len()),
                ("0000000000000abc".into(), 8)
            );
            ["verb", "outcome", "would", "did"].map(|part| of(record, part))
        };
        records.as_array().unwrap().iter().map(row).collect()
    }
}

#[test]
fn filter_passes_every_node_and_records_what_it_would_have_refused() {
    let there = bound_to(pod_requesting("there", GPU, 2), "b");
    let served = cluster(&[("a", 2), ("b", 2)]).with([there]).serve();
    let one = pod_requesting("one", GPU, 1);
    assert_eq!(
        served.filter_passed(&one, &["a", "b", "unknown"]),
        ["a", "b", "unknown"]
    );
    assert_eq!(served.filter_passed(&one, &["a"]), ["a"]);
    assert_eq!(
        served.filter_passed(&pod_requesting("nine", GPU, 9), &["a", "b"]),
        ["a", "b"]
    );
    let whole = ["a", "b"].map(|name| json!({ "metadata": { "name": name, "x": 1.50 } }));
    let request = json!({ "Pod": one, "Nodes": { "items": whole }, "NodeNames": null });
    let answer = served.post("/scheduler/filter", request).json();
    assert_eq!(
        (&answer["Nodes"]["items"], &answer["NodeNames"]),
        (&json!(whole), &Value::Null)
    );
    assert_eq!(answer["FailedAndUnresolvableNodes"], json!({}));
    let expected = [
        [
            "filter",
            "different",
            "a; refused: 1 × devices-in-use, 1 × unknown-node",
            "3 nodes passed on",
        ],
        ["filter", "same", "a", "1 node passed on"],
        [
            "filter",
            "would-reject",
            "no node; refused: 2 × too-few-devices",
            "2 nodes passed on",
        ],
        [
            "filter",
            "different",
            "a; refused: 1 × devices-in-use",
            "2 nodes passed on",
        ],
    ];
    assert_eq!(served.journal(), expected);
    let counts =
        ["different", "same", "would-reject"].map(|outcome| served.shadow("filter", outcome));
    assert_eq!(counts, [2, 1, 1]);
    assert!(served.events().is_empty(), "nobody was refused");
    assert_eq!(served.soft_reservation_node(&one), None);
}

#[test]
fn prioritize_leaves_the_order_to_the_scheduler() {
    let served = cluster(&[("a", 8), ("b", 2)]).serve();
    let scores = served.prioritize(&pod_requesting("one", GPU, 1), &["a", "b"]);
    assert_eq!(scores, [("a".to_owned(), 0), ("b".to_owned(), 0)]);
    assert_eq!(
        served.journal(),
        [["prioritize", "would-rank", "b, a", "all nodes scored 0"]]
    );
}

#[test]
fn preempt_answers_the_candidates_as_offered_in_either_form() {
    let there = |name: &str, node: &str, rank| {
        bound_to(with_priority(pod_requesting(name, GPU, 2), rank), node)
    };
    let (low, parse) = (there("low", "a", -1), there("lower", "b", -2));
    let served = cluster(&[("a", 2), ("b", 2)])
        .with([low.clone(), parse.clone()])
        .serve();
    let high = with_priority(pod_requesting("high", GPU, 2), 9);
    let offered: [(&str, &[&Value]); 2] = [("a", &[&low]), ("b", &[&parse])];
    let victims = |name: &str, budgets| json!({ "Pods": [{ "UID": format!("uid-{name}") }], "NumPDBViolations": budgets });
    let expected =
        json!({ "NodeNameToMetaVictims": { "a": victims("low", 0), "b": victims("lower", 0) } });
    assert_eq!(
        served
            .post("/scheduler/preempt", preempt_args(&high, &offered))
            .json(),
        expected
    );
    let whole = json!({ "a": { "Pods": [low], "NumPDBViolations": 3 } });
    let request = json!({ "Pod": high, "NodeNameToVictims": whole, "NodeNameToMetaVictims": null });
    let expected = json!({ "NodeNameToMetaVictims": { "a": victims("low", 3) } });
    assert_eq!(served.post("/scheduler/preempt", request).json(), expected);
    let equal = with_priority(pod_requesting("equal", GPU, 2), -2);
    served.post("/scheduler/preempt", preempt_args(&equal, &offered[1..]));
    let expected = [
        ["preempt", "would-narrow", "b", "2 candidates as offered"],
        [
            "preempt",
            "would-not-preempt",
            "no candidate: no-candidate",
            "1 candidate as offered",
        ],
        [
            "preempt",
            "would-not-preempt",
            "no candidate: no-candidate",
            "1 candidate as offered",
        ],
    ];
    assert_eq!(served.journal(), expected);
    assert!(served.control_plane.holds.lock().is_empty());
    assert_eq!(served.service.cluster().ledger().totals().reservations, 0);
}

#[test]
fn bind_writes_the_schedulers_choice_whatever_the_ledger_says() {
    let there = bound_to(pod_requesting("there", GPU, 2), "b");
    let [same, other, full, gone] =
        ["same", "other", "full", "gone"].map(|name| pod_requesting(name, GPU, 1));
    let huge = pod_requesting("huge", GPU, 9);
    let pods = [&there, &same, &other, &full, &gone, &huge].map(Clone::clone);
    let served = cluster(&[("a", 8), ("b", 2), ("c", 4)]).with(pods).serve();
    // It would have packed each of them onto the smaller node.
    for pod in [&same, &other, &huge] {
        served.filter_passed(pod, &["a", "c"]);
    }
    for (pod, node) in [
        (&same, "c"),
        (&other, "a"),
        (&huge, "a"),
        (&full, "b"),
        (&gone, "unheard-of"),
    ] {
        assert_eq!(served.bind(pod, node), "");
        assert!(served.is_bound_to(pod, node));
    }
    assert!(
        served
            .control_plane
            .orders
            .lock()
            .iter()
            .all(|(order, _)| order.placement.devices.is_empty())
    );
    let expected = [
        ["bind", "same", "c", "c"],
        ["bind", "different", "c", "a"],
        ["bind", "would-reject", "no node", "a"],
        ["bind", "not-asked", "not asked", "b"],
        ["bind", "not-asked", "not asked", "unheard-of"],
    ];
    assert_eq!(served.journal()[3..], expected);
    assert_eq!(
        served.bind(&same, "c"),
        "",
        "idempotent, and written down once"
    );
    assert_eq!(served.shadow("bind", "same"), 1);
    let ledger = served.service.cluster();
    assert_eq!(audit(ledger.ledger()), []);
    assert_eq!(
        (
            ledger.ledger().totals().unplaced,
            ledger.ledger().totals().bound
        ),
        (0, 6)
    );
}

#[test]
fn a_pod_that_asks_for_vram_is_refused_at_each_verb() {
    let vram = pod("vram", "10Gi");
    let mut cluster = ServedCluster::with_gpus(&[("stowage", 2)]).with([vram.clone()]);
    cluster.policy = in_shadow_mode(policy_without_engines());
    let served = cluster.serve();
    let answer = served.filter(&vram, &["stowage"]).json();
    assert_eq!(answer["NodeNames"], json!([]));
    assert_eq!(
        answer["FailedAndUnresolvableNodes"],
        json!({ "stowage": NO_VRAM_IN_SHADOW })
    );
    let unplannable_pod = bound_to(pod("unplannable", "10Gi"), "stowage");
    let preempt = served.post(
        "/scheduler/preempt",
        preempt_args(&vram, &[("stowage", &[&unplannable_pod])]),
    );
    assert_eq!(preempt.json(), json!({ "NodeNameToMetaVictims": {} }));
    assert_eq!(served.bind(&vram, "stowage"), NO_VRAM_IN_SHADOW);
    assert!(matches!(served.phase(&vram), PodPhase::Waiting(_)));
    assert!(served.control_plane.orders.lock().is_empty());
    assert_eq!(
        (
            served.shadow("filter", "refused"),
            served.shadow("preempt", "refused")
        ),
        (1, 1)
    );
}

#[test]
fn an_invalid_pod_passes_and_is_bound_in_shadow_mode() {
    let mut odd = pod_requesting("odd", GPU, 1);
    odd["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] = json!("1");
    odd["metadata"]["annotations"]["stowage.dev/exclusive"] = json!("perhaps");
    let served = cluster(&[("a", 2)]).with([odd.clone()]).serve();
    assert_eq!(served.observe_pod(&odd), None);
    assert_eq!(served.filter_passed(&odd, &["a"]), ["a"]);
    // Its watch shows it again, between filter and bind.
    assert_eq!(served.observe_pod(&odd), None);
    assert_eq!(served.bind(&odd, "a"), "");
    let mut both = odd.clone();
    both["metadata"]["name"] = json!("both");
    both["metadata"]["uid"] = json!("uid-both");
    both["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"] = json!("1Gi");
    let refused = served.filter(&both, &["a"]).json()["FailedAndUnresolvableNodes"].take();
    assert!(refused["a"].is_string(), "it would get no VRAM: {refused}");
    assert_eq!(served.shadow("filter", "would-reject"), 1);
}

#[test]
fn a_policy_that_switches_to_enforcing_takes_effect_at_once() {
    let served = cluster(&[("a", 2), ("b", 8)])
        .with([bound_to(pod_requesting("there", GPU, 2), "a")])
        .serve();
    let one = pod_requesting("one", GPU, 1);
    assert_eq!(served.filter_passed(&one, &["a", "b"]), ["a", "b"]);
    served.service.set_policy(policy_without_engines());
    assert_eq!(served.filter_passed(&one, &["a", "b"]), ["b"]);
    assert_eq!(served.journal().len(), 1);
}

#[test]
fn a_pod_refused_in_shadow_mode_is_retried_when_the_policy_enforces() {
    let vram = pod("vram", "10Gi");
    let mut cluster = ServedCluster::with_gpus(&[("stowage", 2)]).with([vram.clone()]);
    cluster.policy = in_shadow_mode(policy_without_engines());
    let served = cluster.serve();
    assert!(served.filter_passed(&vram, &["stowage"]).is_empty());
    served.service.set_policy(policy_without_engines());
    let mut ledger = served.service.cluster();
    let later = ledger.ledger().now() + Millis::seconds(5);
    ledger.apply(ClockAdvanced(later));
    let due = ledger.apply(TakePending { limit: 64 });
    assert_eq!(
        due.iter()
            .map(|pending| pending.uid.as_str())
            .collect::<Vec<_>>(),
        ["uid-vram"]
    );
}

// ---- with the stand-in scheduler ----

/// Stowage beside the stand-in scheduler, both over the stand-in API server.
struct ShadowSetup {
    api: Arc<ApiServer>,
    service: Arc<ServerState>,
    extender: Extender,
    scheduler: StandInScheduler,
    _kubelet: Kubelet,
    _tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Drop for ShadowSetup {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Which pods the scheduler brings to Stowage.
const UNUSED_RESOURCE: &str = "example.com/nothing";

impl ShadowSetup {
    /// Four nodes of 4, 6, 8 and 10 GPUs.
    async fn start(policy: Policy, managed: &str) -> Self {
        let api = Arc::new(ApiServer::start().await.unwrap());
        for (name, gpus) in [("n0", 4), ("n1", 6), ("n2", 8), ("n3", 10)] {
            api.create("nodes", plugin_node(name, GPU, gpus)).unwrap();
        }
        let service = ServerState::new(policy);
        let stop = CancellationToken::new();
        let options = ClusterOptions::new(LeadWith::FromTheStart, "stowage".into());
        let client = api.client("stowage").unwrap();
        let (control_plane, tasks) =
            kubernetes::start(client, service.clone(), options, stop.clone());
        // A call that comes before is refused, and not recorded.
        let synced = async {
            while !service.leadership.is_synced() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, synced)
            .await
            .expect("the cluster is listed");
        let extender = Extender::new(service.clone(), control_plane, RequestLimits::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let router = server::scheduler_router(extender.clone());
        let serving = async move {
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router)
                .await
                .unwrap()
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(serving));
        let mut config = SchedulerConfig::as_shipped(&format!("http://{address}/scheduler"));
        config.initial_back_off = Duration::from_millis(5);
        config.extender.timeout = Duration::from_secs(30);
        config.extender.managed_resource = managed.to_owned();
        let fast = kubelet::KubeletConfig {
            grace_second: Duration::from_millis(1),
            ..kubelet::KubeletConfig::default()
        };
        let kubelet = Kubelet::start(api.client("kubelet").unwrap(), fast);
        let scheduler = StandInScheduler::start(api.client("scheduler").unwrap(), config);
        Self {
            api,
            service,
            extender,
            scheduler,
            _kubelet: kubelet,
            _tasks: tasks,
            stop,
        }
    }

    async fn bind(&self, name: &str, gpus: u32, rank: i32) -> String {
        let mut pod = with_priority(pod_requesting(name, GPU, gpus), rank);
        pod["metadata"].as_object_mut().unwrap().remove("uid");
        self.api.create("pods", pod).unwrap();
        let node = || {
            let pod = self.api.get(&format!("pods/default/{name}"))?;
            Some(pod["spec"]["nodeName"].as_str()?.to_owned())
        };
        let settled = async {
            let bound = self.api.until(|_| node()).await;
            // It is bound before the extender's answer; the code that bound it records it between the two.
            let seen = self.scheduler.observations();
            let pod = format!("default/{name}");
            seen.until(|seen| {
                (seen.outcome(&pod).node.is_some() && seen.progress().is_idle).then_some(())
            })
            .await;
            bound
        };
        tokio::time::timeout(Duration::from_secs(60), settled)
            .await
            .expect("it is bound in time")
    }

    /// Pods of one to three GPUs, then one that needs another's place. No two have the same cost, so that the victim depends on
    /// no clock: between equals the scheduler compares the start times.
    async fn all(&self) -> Vec<String> {
        let mut nodes = Vec::new();
        for number in 0..13 {
            let rank = -1 - i32::try_from(number).unwrap();
            nodes.push(
                self.bind(&format!("pod-{number}"), 1 + number % 3, rank)
                    .await,
            );
        }
        nodes.push(self.bind("last", 4, 100).await);
        nodes
    }

    fn shadow(&self, verb: &str) -> u64 {
        let of = |outcome: &str| {
            self.service
                .metrics
                .shadow
                .with_label_values(&[verb, outcome])
                .get()
        };
        [
            "same",
            "different",
            "would-reject",
            "would-rank",
            "would-narrow",
            "would-not-preempt",
            "not-asked",
            "refused",
        ]
        .into_iter()
        .map(of)
        .sum()
    }
}

#[tokio::test]
async fn in_shadow_mode_every_pod_is_placed_as_without_stowage() {
    let without = ShadowSetup::start(policy_without_engines(), UNUSED_RESOURCE).await;
    let alone = without.all().await;
    assert_eq!(
        without.scheduler.observations().calls().len(),
        0,
        "it decided alone"
    );
    let beside = ShadowSetup::start(in_shadow_mode(policy_without_engines()), GPU).await;
    assert_eq!(beside.all().await, alone);

    let seen = beside.scheduler.observations();
    assert_eq!(beside.shadow("filter"), seen.count(Verb::Filter) as u64);
    assert_eq!(
        beside.shadow("prioritize"),
        seen.count(Verb::Prioritize) as u64
    );
    assert_eq!(beside.shadow("preempt"), seen.count(Verb::Preempt) as u64);
    assert_eq!(beside.shadow("bind"), 14);
    // The last pod may be retried while its victim is still there.
    assert!(seen.count(Verb::Preempt) > 0);
    let differing = beside
        .service
        .metrics
        .shadow
        .with_label_values(&["bind", "different"])
        .get();
    assert!(differing > 0, "it would have packed them otherwise");
    let recorded = beside.extender.journal.records().len();
    assert_eq!(recorded, seen.calls().len());
    // Of all that Stowage can write, it wrote Bindings, and they say nothing of GPUs.
    let calls = beside.api.calls();
    assert_eq!(calls.count_by("stowage", "create", "pods/binding"), 14);
    let writes = ["create", "patch", "update", "delete"];
    let wrote = |resource| {
        writes
            .iter()
            .map(|verb| calls.count_by("stowage", verb, resource))
            .sum::<u64>()
    };
    assert_eq!(
        (
            wrote("pods/status"),
            wrote("nodes/status"),
            wrote("events"),
            wrote("pods")
        ),
        (0, 0, 0, 0)
    );
    for pod in beside.api.list("pods") {
        assert!(
            pod["metadata"]["annotations"]
                .as_object()
                .is_none_or(|annotations| annotations.is_empty())
        );
    }
}

#[tokio::test]
async fn in_enforce_mode_the_same_pods_are_packed_and_victims_evicted() {
    let pool = Pool {
        selector: [("pool".to_owned(), "n3".to_owned())].into(),
        classes: Some(vec!["serving".into()]),
        ..Pool::new("kept-free")
    };
    let beside = ShadowSetup::start(
        policy_without_engines().with_pools(vec![pool]).unwrap(),
        GPU,
    )
    .await;
    let mut nodes = Vec::new();
    for number in 0..9 {
        nodes.push(beside.bind(&format!("pod-{number}"), 2, -1).await);
    }
    nodes.sort();
    assert_eq!(
        nodes,
        ["n0", "n0", "n1", "n1", "n1", "n2", "n2", "n2", "n2"],
        "none on the pool that is not theirs"
    );
    assert_eq!(beside.bind("serving", 10, 5).await, "n3");
    let high = beside.bind("high", 3, 100).await;
    assert_ne!(high, "n3", "nobody may take the place of serving");
    // It may be retried while its victims are still there.
    assert!(
        beside
            .scheduler
            .observations()
            .outcome("default/high")
            .preemptions
            > 0
    );
    assert_eq!(
        beside.api.list("pods").len(),
        9,
        "two left for it, of eleven"
    );
    assert_eq!(
        (
            beside.shadow("bind"),
            audit(beside.service.cluster().ledger())
        ),
        (0, vec![])
    );
}
