//! Device plugin pods in enforce mode: where they fit, what is counted, which pods may be evicted for them, and that their
//! Bindings name no GPUs.

use crate::served::{
    Served, ServedCluster, pod, policy_without_engines, preempt_args, uid_of, with_priority,
};
use serde_json::{Value, json};
use stowage_kubernetes_objects as objects;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::policy::{Policy, Pool, Tenant};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::cluster_share::TenantLimit;
use stowage_scheduling::vocabulary::node::NodeKind;

pub const GPU: &str = "nvidia.com/gpu";

/// A node on which a device plugin offers so many of a resource.
pub fn plugin_node(name: &str, resource: &str, count: u32) -> Value {
    let amounts =
        json!({ resource: count.to_string(), "cpu": "64", "memory": "512Gi", "pods": "110" });
    json!({
        "kind": "Node",
        "metadata": { "name": name, "labels": { "pool": name } },
        "status": { "allocatable": amounts, "capacity": amounts },
    })
}

/// A pod that asks for them.
pub fn pod_requesting(name: &str, resource: &str, count: u32) -> Value {
    let mut pod = pod(name, "1Gi");
    pod["spec"]["containers"][0]["resources"]["limits"] = json!({ resource: count.to_string() });
    pod
}

pub fn bound_to(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeName"] = json!(node);
    pod
}

fn cluster(nodes: &[(&str, u32)], policy: Policy) -> ServedCluster {
    let mut cluster = ServedCluster::with_gpus(&[]);
    cluster.nodes = nodes
        .iter()
        .map(|(name, gpus)| plugin_node(name, GPU, *gpus))
        .collect();
    cluster.policy = policy;
    cluster
}

fn refusals(served: &Served, pod: &Value, nodes: &[&str]) -> Value {
    let answer = served.filter(pod, nodes);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["FailedAndUnresolvableNodes"].take()
}

fn rank(served: &Served, pod: &Value, nodes: &[&str]) -> Vec<String> {
    let mut scores = served.prioritize(pod, nodes);
    scores.sort_by_key(|(_, score)| -score);
    scores.into_iter().map(|(host, _)| host).collect()
}

#[test]
fn vram_and_device_pods_fit_their_own_nodes_only_with_a_fixed_phrase() {
    let mut cluster = ServedCluster::with_gpus(&[("stowage", 2)]);
    cluster.nodes.push(plugin_node("plugin", GPU, 2));
    let served = cluster.serve();
    let nodes = ["stowage", "plugin"];
    let (vram, gpu) = (pod("vram", "10Gi"), pod_requesting("gpu", GPU, 1));
    assert_eq!(served.filter_passed(&vram, &nodes), ["stowage"]);
    assert_eq!(served.filter_passed(&gpu, &nodes), ["plugin"]);
    assert_eq!(
        refusals(&served, &vram, &["plugin"])["plugin"],
        "a device plugin allocates the node's GPUs"
    );
    assert_eq!(
        refusals(&served, &gpu, &["stowage"])["stowage"],
        "Stowage allocates the node's GPUs"
    );
    assert_eq!(
        served.bind(&gpu, "stowage"),
        "conflict: Stowage allocates the node's GPUs"
    );
    assert!(!served.is_bound_to(&gpu, "stowage"));
}

impl Served {
    fn is_waiting(&self, pod: &Value) -> bool {
        self.pod_state(pod)
            .is_some_and(|entry| entry.node().is_none())
    }
}

#[test]
fn an_invalid_device_pod_is_refused_with_its_phrase_and_an_event() {
    let served = cluster(&[("a", 8)], policy_without_engines()).serve();
    let mut several = pod_requesting("several", GPU, 1);
    several["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] = json!("1");
    let mut both = pod_requesting("both", GPU, 1);
    both["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"] = json!("1Gi");
    for (pod, phrase) in [
        (&several, "pod asks for several of nvidia.com/*"),
        (&both, "pod asks for stowage.dev/vram and for nvidia.com/*"),
    ] {
        assert_eq!(refusals(&served, pod, &["a"])["a"], phrase);
    }
    assert!(
        served
            .events()
            .iter()
            .all(|(_, kind, _)| *kind == PodEventReason::InvalidRequest)
    );
    assert_eq!(served.events().len(), 2);
    let mut neither = pod_requesting("neither", GPU, 1);
    neither["spec"]["containers"][0]["resources"]["limits"] = json!({ "cpu": "1" });
    assert_eq!(served.filter(&neither, &["a"]).status, 422);
}

#[test]
fn devices_are_counted_per_node_and_resource_including_foreign_pods() {
    let other = bound_to(pod_requesting("other", GPU, 3), "a");
    let pair = pod_requesting("pair", GPU, 2);
    let mut cluster = cluster(&[("a", 4), ("b", 8)], policy_without_engines())
        .with([other.clone(), pair.clone()]);
    cluster
        .nodes
        .push(plugin_node("mig", "nvidia.com/mig-1g.10gb", 7));
    let served = cluster.serve();
    let nodes = ["a", "b", "mig"];
    let refused = refusals(&served, &pod_requesting("nine", GPU, 9), &nodes);
    assert_eq!(
        refused["b"],
        "the device plugin offers too few GPUs on the node"
    );
    assert_eq!(served.filter_passed(&pair, &nodes), ["b"]);
    assert_eq!(
        refusals(&served, &pair, &["a"])["a"],
        "the device plugin has no GPU left on the node now"
    );
    assert_eq!(
        served.filter_passed(
            &pod_requesting("slice", "nvidia.com/mig-1g.10gb", 7),
            &nodes
        ),
        ["mig"]
    );
    assert_eq!(
        served.bind(&pair, "a"),
        "conflict: another pod took the GPU in the meantime"
    );
    served.delete(&other);
    assert_eq!(served.bind(&pair, "a"), "");
    assert!(served.is_bound_to(&pair, "a"));
    assert_eq!(
        refusals(&served, &pod_requesting("three", GPU, 3), &["a"])["a"],
        "the device plugin has no GPU left on the node now"
    );
    assert_eq!(audit(served.service.cluster().ledger()), []);
}

#[test]
fn the_node_with_the_fewest_devices_left_is_first_without_a_soft_reservation() {
    let served = cluster(&[("a", 8), ("b", 2), ("c", 4)], policy_without_engines())
        .with([bound_to(pod_requesting("there", GPU, 3), "c")])
        .serve();
    let nodes = ["a", "b", "c"];
    let one = pod_requesting("one", GPU, 1);
    assert_eq!(served.filter_passed(&one, &nodes), ["c", "b", "a"]);
    assert_eq!(rank(&served, &one, &nodes), ["c", "b", "a"]);
    assert_eq!(served.soft_reservation_node(&one), None);
    // The next pod is not steered around it: the scheduler counts devices itself.
    assert_eq!(
        rank(&served, &pod_requesting("two", GPU, 1), &nodes),
        ["c", "b", "a"]
    );
}

#[test]
fn a_node_with_idle_engines_ranks_before_one_with_full_engines() {
    let mut policy = Policy::default();
    policy.telemetry.fresh = Millis::seconds(24 * 3600);
    let served = cluster(&[("busy", 2), ("calm", 4)], policy).serve();
    for (node, usage) in [("busy", 0.95), ("calm", 0.1)] {
        let mut report = crate::served::report(node, "boot", 1, 2);
        let engine = |gpu: u32| {
            json!({
                "pod": "uid-x", "engine": "vllm", "gpus": [crate::served::gpu_uuid(node, gpu)], "state": "serving",
                "waiting": 0, "kvCacheUsage": usage,
            })
        };
        report["engines"] = json!([engine(0), engine(1)]);
        assert_eq!(served.report(report).status, 200);
    }
    let nodes = ["busy", "calm"];
    assert_eq!(
        rank(&served, &pod_requesting("one", GPU, 1), &nodes),
        ["calm", "busy"]
    );
    assert_eq!(
        served.filter_passed(&pod_requesting("two", GPU, 2), &["busy"]),
        ["busy"],
        "a hint refuses nobody"
    );
}

#[test]
fn a_device_pods_binding_names_no_gpus_and_the_pod_is_neither_unplaced_nor_charged_vram() {
    let mut one = pod_requesting("one", GPU, 1);
    one["metadata"]["annotations"] =
        json!({ "stowage.dev/devices": "GPU-forged", "stowage.dev/gpus": "2" });
    let served = cluster(&[("a", 2)], policy_without_engines())
        .with([one.clone()])
        .serve();
    assert_eq!(served.filter_passed(&one, &["a"]), ["a"]);
    assert_eq!(served.bind(&one, "a"), "");
    let (order, _) = served.control_plane.orders.lock()[0].clone();
    let binding = objects::binding(
        &order.key,
        &order.uid,
        &order.demand,
        &order.placement,
        Some("nvidia.com/gpu"),
        &LeaderEpoch::new("lease", 1, "nonce"),
    );
    let expected = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": { "name": "one", "namespace": "default", "uid": "uid-one" },
        "target": { "kind": "Node", "name": "a" },
    });
    assert_eq!(serde_json::to_value(binding).unwrap(), expected);
    assert_eq!(served.observe_pod(&bound_to(one.clone(), "a")), None);
    let ledger = served.service.cluster();
    let totals = ledger.ledger().totals();
    assert_eq!(
        (
            totals.bound,
            totals.unplaced,
            totals.reservations,
            totals.soft_reservations
        ),
        (1, 0, 0, 0)
    );
    assert_eq!(
        ledger.ledger().requested_on(&NodeName::parse("a").unwrap()),
        Bytes::ZERO
    );
    assert_eq!(
        ledger.ledger().pod_state(&uid_of(&one)).unwrap().devices(),
        None
    );
    drop(ledger);
    assert!(served.events().is_empty());
    assert_eq!(served.bind(&one, "a"), "", "it is idempotent");
    assert_eq!(served.control_plane.orders.lock().len(), 1);
}

fn pools_and_tenants() -> Policy {
    let pool = Pool {
        selector: [("pool".to_owned(), "serving-only".to_owned())].into(),
        allocator: NodeKind::DevicePlugin,
        classes: Some(vec!["serving".into()]),
        ..Pool::new("serving-only")
    };
    let tenant = Tenant {
        limit: TenantLimit {
            milli_gpus: Some(2000),
            ..TenantLimit::default()
        },
        ..Tenant::new("default", &["default"])
    };
    let policy = policy_without_engines();
    policy
        .with_tenants(vec![tenant])
        .unwrap()
        .with_pools(vec![pool])
        .unwrap()
}

#[test]
fn pools_accept_their_classes_and_tenants_stay_within_their_limits() {
    let (harvest, one) = (
        with_priority(pod_requesting("harvest", GPU, 1), -5),
        pod_requesting("one", GPU, 1),
    );
    let cluster = cluster(&[("serving-only", 4), ("z", 4)], pools_and_tenants());
    let served = cluster.with([harvest.clone(), one.clone()]).serve();
    let nodes = ["serving-only", "z"];
    assert_eq!(
        refusals(&served, &harvest, &["serving-only"])["serving-only"],
        "the node's pool does not admit the pod's class"
    );
    assert_eq!(served.filter_passed(&harvest, &nodes), ["z"]);
    assert_eq!(served.bind(&harvest, "z"), "");
    let two = pod_requesting("two", GPU, 2);
    assert_eq!(
        refusals(&served, &two, &nodes)["z"],
        "the limit of the pod's tenant is reached"
    );
    assert_eq!(
        served.bind(&two, "z"),
        "conflict: the tenant's limit was reached"
    );
    assert!(served.is_waiting(&two));
    assert_eq!(served.bind(&one, "z"), "");
}

fn preempt_answer(served: &Served, pod: &Value, nodes: &[(&str, &[&Value])]) -> Value {
    let answer = served.post("/scheduler/preempt", preempt_args(pod, nodes));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["NodeNameToMetaVictims"].take()
}

#[test]
fn preempt_keeps_the_cheapest_allowed_candidate_with_the_schedulers_victims() {
    let there = |name: &str, node: &str, count, rank| {
        bound_to(with_priority(pod_requesting(name, GPU, count), rank), node)
    };
    let (served_low, low, lower) = (
        there("s", "a", 2, 1),
        there("l", "b", 2, -1),
        there("m", "c", 1, -3),
    );
    let lowest = there("n", "c", 1, -4);
    let served = cluster(&[("a", 2), ("b", 2), ("c", 2)], policy_without_engines())
        .with([
            served_low.clone(),
            low.clone(),
            lower.clone(),
            lowest.clone(),
        ])
        .serve();
    let high = with_priority(pod_requesting("high", GPU, 2), 100);
    let offered: [(&str, &[&Value]); 3] = [
        ("a", &[&served_low]),
        ("b", &[&low]),
        ("c", &[&lower, &lowest]),
    ];
    let answer = preempt_answer(&served, &high, &offered);
    let victims = json!([{ "UID": "uid-m" }, { "UID": "uid-n" }]);
    assert_eq!(
        answer,
        json!({ "c": { "Pods": victims, "NumPDBViolations": 0 } })
    );
    assert!(served.control_plane.holds.lock().is_empty());
    assert_eq!(served.service.cluster().ledger().totals().reservations, 0);
    // A serving pod is not preemptible, whatever the scheduler thinks.
    assert_eq!(preempt_answer(&served, &high, &offered[..1]), json!({}));
    // One of the two would free too little, and an empty answer is an error of the whole preemption.
    assert_eq!(
        preempt_answer(&served, &high, &[("c", &[&lower])]),
        json!({})
    );
    assert_eq!(preempt_answer(&served, &high, &[("c", &[])]), json!({}));
    let equal = with_priority(pod_requesting("equal", GPU, 2), -1);
    assert_eq!(
        preempt_answer(&served, &equal, &[("b", &[&low])]),
        json!({})
    );
    let mut modest = high.clone();
    modest["spec"]["preemptionPolicy"] = json!("Never");
    assert_eq!(preempt_answer(&served, &modest, &offered), json!({}));
}

#[test]
fn fewer_budget_violations_are_preferred_to_a_lower_eviction_cost() {
    let there = |name: &str, node: &str, rank| {
        bound_to(with_priority(pod_requesting(name, GPU, 2), rank), node)
    };
    let (dear, cheap) = (there("dear", "a", -1), there("cheap", "b", -9));
    let served = cluster(&[("a", 2), ("b", 2)], policy_without_engines())
        .with([dear.clone(), cheap.clone()])
        .serve();
    let mut request = preempt_args(
        &with_priority(pod_requesting("high", GPU, 2), 9),
        &[("a", &[&dear]), ("b", &[&cheap])],
    );
    request["NodeNameToMetaVictims"]["b"]["NumPDBViolations"] = json!(1);
    let answer = served.post("/scheduler/preempt", request).json()["NodeNameToMetaVictims"].take();
    assert_eq!(
        answer,
        json!({ "a": { "Pods": [{ "UID": "uid-dear" }], "NumPDBViolations": 0 } })
    );
}

#[test]
fn victims_without_gpus_are_left_to_the_scheduler() {
    let low = bound_to(with_priority(pod_requesting("low", GPU, 2), -1), "a");
    let mut foreign_pod = pod("foreign", "1Gi");
    foreign_pod["spec"]["containers"][0]["resources"] = json!({});
    let high = with_priority(pod_requesting("high", GPU, 1), 100);
    let served = cluster(&[("a", 2)], policy_without_engines())
        .with([low.clone()])
        .serve();
    let victims = json!([{ "UID": "uid-low" }, { "UID": "uid-foreign" }]);
    let answer = preempt_answer(&served, &high, &[("a", &[&low, &foreign_pod])]);
    assert_eq!(
        answer,
        json!({ "a": { "Pods": victims, "NumPDBViolations": 0 } })
    );
}

#[test]
fn a_tenant_at_its_limit_preempts_only_its_own() {
    let there = |name: &str, namespace: &str, node: &str| {
        let mut pod = bound_to(with_priority(pod_requesting(name, GPU, 2), -1), node);
        pod["metadata"]["namespace"] = json!(namespace);
        pod
    };
    let (own, foreign) = (
        there("own", "default", "a"),
        there("foreign", "others", "b"),
    );
    let served = cluster(&[("a", 2), ("b", 2)], pools_and_tenants())
        .with([own.clone(), foreign.clone()])
        .serve();
    let high = with_priority(pod_requesting("high", GPU, 2), 100);
    assert_eq!(
        preempt_answer(&served, &high, &[("b", &[&foreign])]),
        json!({})
    );
    let answer = preempt_answer(&served, &high, &[("a", &[&own]), ("b", &[&foreign])]);
    assert_eq!(
        answer,
        json!({ "a": { "Pods": [{ "UID": "uid-own" }], "NumPDBViolations": 0 } })
    );
}
