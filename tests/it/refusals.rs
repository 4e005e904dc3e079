//! Answers that fit kube-scheduler's behavior: refusals that never change, a short list, one top score, soft reservations that
//! keep two pods apart, and reservations of VRAM for a pod that waits.

use crate::served::{
    Served, ServedCluster, bound_on, eventually, gpu_report, pod, preempt_args, report, uid_of,
    with_exclusive_gpu, with_gpu_count, with_priority,
};
use serde_json::{Value, json};
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, PodPhase};
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::observe::PodObserved;
use stowage_scheduling::verbs::tick::Tick;
use stowage_scheduling::verbs::wait::{EvictionsOrdered, ReleaseReservation, Reserve};
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::service::ServerState;

const NODES: [&str; 12] = [
    "n01", "n02", "n03", "n04", "n05", "n06", "n07", "n08", "n09", "n10", "n11", "n12",
];

fn equal_nodes() -> ServedCluster {
    ServedCluster::with_gpus(&NODES.map(|name| (name, 1)))
}

fn top(scores: &[(String, i64)]) -> &str {
    &scores.iter().max_by_key(|(_, score)| score).unwrap().0
}

#[test]
fn the_same_refused_request_gets_byte_identical_answers_while_free_vram_changes() {
    let nodes = ["node-a", "node-b", "node-x"];
    let small: Vec<Value> = (0..6)
        .map(|n| pod(&format!("small-{n}"), &format!("{}Gi", n + 1)))
        .collect();
    let cluster = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)])
        .with(small.iter().cloned())
        .with(["node-a", "node-b"].into_iter().flat_map(|node| {
            [0, 1].map(|gpu| {
                bound_on(
                    pod(&format!("{node}-{gpu}"), "20Gi"),
                    node,
                    &[gpu],
                    20 << 30,
                )
            })
        }));
    let served = cluster.serve();
    let large = pod("large", "60Gi");
    let first = served.filter(&large, &nodes);
    let refused = &first.json()["FailedAndUnresolvableNodes"];
    assert_eq!(refused["node-a"], "no GPU can take the pod now");
    let mut figures = vec![served.events().pop().unwrap().2];
    for (round, small) in small.iter().enumerate() {
        let node = nodes[round % 2];
        let free = served.charged(node);
        assert_eq!(served.bind(small, node), "");
        assert_ne!(served.charged(node), free);
        assert_eq!(served.filter(&large, &nodes), first, "after a bind");
        figures.push(served.events().pop().unwrap().2);
        let mut shrunk = report(node, "boot", 10 * round as u64 + 2, 2);
        (0..2)
            .for_each(|gpu| shrunk["gpus"][gpu]["reservedBytes"] = json!((round as u64 + 1) << 30));
        assert_eq!(served.report(shrunk.clone()).status, 200);
        assert_eq!(served.filter(&large, &nodes), first, "after a report");
        // Engines that are busy on some nodes and not on others: the scheduler counts nodes by phrase.
        shrunk["sequence"] = json!(10 * round + 3);
        let busy = |gpu: &str| {
            json!({
                "pod": "uid-x", "engine": "vllm", "gpus": [gpu], "state": "serving", "waiting": 0,
                "kvCacheUsage": (if round % 2 == 0 { 0.5 } else { 0.99 }),
            })
        };
        shrunk["engines"] = json!([
            busy(&format!("GPU-{node}-0")),
            busy(&format!("GPU-{node}-1"))
        ]);
        assert_eq!(served.report(shrunk.clone()).status, 200);
        assert_eq!(
            served.filter(&large, &nodes),
            first,
            "after a KV cache has filled up"
        );
        // A cache that was full is empty when three readings say so.
        shrunk["engines"] = json!([]);
        for sequence in 4..7 {
            shrunk["sequence"] = json!(10 * round + sequence);
            assert_eq!(served.report(shrunk.clone()).status, 200);
        }
    }
    served.delete(&small[0]);
    assert_eq!(served.filter(&large, &nodes), first, "after a pod has left");
    assert!(
        figures.windows(2).any(|pair| pair[0] != pair[1]),
        "the figures are for people: {figures:?}"
    );
}

#[test]
fn every_reason_is_a_fixed_phrase_in_the_unresolvable_nodes() {
    let mut cluster = ServedCluster::with_gpus(&[
        ("full", 1),
        ("owned", 1),
        ("single", 1),
        ("small", 2),
        ("sick", 1),
    ])
    .with([
        bound_on(pod("tenant", "70Gi"), "full", &[0], 70 << 30),
        bound_on(
            with_exclusive_gpu(pod("owner", "1Gi")),
            "owned",
            &[0],
            72 << 30,
        ),
    ]);
    let plugin = json!({ "kind": "Node", "metadata": { "name": "plugin" }, "status": { "allocatable": { "nvidia.com/gpu": "8" } } });
    cluster.nodes.extend([plugin, crate::served::node("bare")]);
    let served = cluster.serve();
    let mut sick = report("sick", "boot", 2, 1);
    sick["gpus"][0]["health"] = json!("lost");
    let mut small = report("small", "boot", 2, 2);
    (0..2).for_each(|gpu| small["gpus"][gpu]["totalBytes"] = json!(8u64 << 30));
    assert_eq!(served.report(json!([sick, small])).json()["accepted"], 2);
    let nodes = [
        "full", "owned", "single", "small", "sick", "plugin", "bare", "nowhere",
    ];
    let refusals = |pod: Value, nodes: &[&str]| {
        let answer = served.filter(&pod, nodes).json();
        assert_eq!(answer["NodeNames"], json!([]));
        let keys: Vec<&String> = answer.as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            ["FailedAndUnresolvableNodes", "NodeNames"],
            "never FailedNodes, never Error"
        );
        answer["FailedAndUnresolvableNodes"].clone()
    };
    assert_eq!(
        refusals(with_gpu_count(pod("pair", "40Gi"), 2), &nodes),
        json!({
            "full": "too few GPUs on the node",
            "owned": "too few GPUs on the node",
            "single": "too few GPUs on the node",
            "small": "no GPU is large enough",
            "sick": "no healthy GPU",
            "plugin": "a device plugin allocates the node's GPUs",
            "bare": "no GPU known on the node",
            "nowhere": "node unknown to Stowage",
        })
    );
    let taken = "no GPU can take the pod now";
    assert_eq!(
        refusals(pod("one", "40Gi"), &nodes[..2]),
        json!({ "full": taken, "owned": taken })
    );
    let owner = with_exclusive_gpu(pod("own", "40Gi"));
    assert_eq!(
        refusals(owner, &nodes[..2]),
        json!({ "full": taken, "owned": taken })
    );
    for code in [
        "insufficient-vram",
        "no-empty-gpu",
        "too-few-gpus",
        "too-large",
        "no-healthy-gpu",
        "device-plugin-node",
        "no-gpus",
        "unknown-node",
    ] {
        assert!(
            served.metric(&format!("stowage_nodes_rejected_total{{code=\"{code}\"}}")) > 0,
            "{code}"
        );
    }
}

#[test]
fn a_shortlist_of_four_doubles_without_the_node_that_just_failed_when_the_pod_comes_back() {
    let llm = pod("llm", "40Gi");
    let served = equal_nodes().with([llm.clone()]).serve();
    let mut failed: Vec<String> = Vec::new();
    for expected in [4, 8, 11] {
        let passed = served.filter_passed(&llm, &NODES);
        assert_eq!(passed.len(), expected, "{passed:?}");
        if let Some(just_failed) = failed.last() {
            assert!(
                !passed.contains(just_failed),
                "{just_failed} failed a moment ago: {passed:?}"
            );
        }
        let names: Vec<&str> = passed.iter().map(String::as_str).collect();
        failed.push(top(&served.prioritize(&llm, &names)).to_owned());
    }
}

#[test]
fn a_node_that_just_failed_is_passed_again_when_there_is_no_other() {
    let llm = pod("llm", "40Gi");
    let served = equal_nodes().with([llm.clone()]).serve();
    for _ in 0..3 {
        assert_eq!(served.filter_passed(&llm, &["n05"]), ["n05"]);
    }
    assert_eq!(served.bind(&llm, "n05"), "");
}

#[test]
fn an_all_refused_filter_does_not_double_the_shortlist() {
    let llm = pod("llm", "40Gi");
    let served = equal_nodes().with([llm.clone()]).serve();
    for _ in 0..5 {
        assert_eq!(served.filter_passed(&llm, &["nowhere"]), [""; 0]);
    }
    assert_eq!(served.filter_passed(&llm, &NODES).len(), 4);
}

#[test]
fn with_a_shortlist_of_one_filter_makes_the_soft_reservation() {
    let mut cluster = equal_nodes().with([pod("first", "40Gi"), pod("second", "40Gi")]);
    cluster.policy.scoring.shortlist = 1;
    let served = cluster.serve();
    let [first, second] = ["first", "second"].map(|name| pod(name, "40Gi"));
    assert_eq!(served.filter_passed(&first, &NODES), ["n01"]);
    assert_eq!(served.soft_reservation_node(&first).as_deref(), Some("n01"));
    assert_eq!(
        served.filter_passed(&second, &NODES),
        ["n02"],
        "the first has not been bound yet"
    );
    assert_eq!(
        (served.bind(&first, "n01"), served.bind(&second, "n02")),
        (String::new(), String::new())
    );
    assert_eq!(served.soft_reservation_node(&first), None);
}

#[test]
fn a_single_passing_node_gets_a_soft_reservation_because_prioritize_is_skipped() {
    let served = equal_nodes().serve();
    assert_eq!(
        served.filter_passed(&pod("first", "40Gi"), &["n03"]),
        ["n03"]
    );
    assert_eq!(
        served
            .soft_reservation_node(&pod("first", "40Gi"))
            .as_deref(),
        Some("n03")
    );
    let passed = served.filter_passed(&pod("second", "40Gi"), &["n03", "n04"]);
    assert_eq!(
        passed,
        ["n04", "n03"],
        "it still fits on both, and n03 is spoken for"
    );
}

#[test]
fn several_passing_nodes_get_no_soft_reservation_before_prioritize() {
    let served = equal_nodes().serve();
    let llm = pod("llm", "40Gi");
    let passed = served.filter_passed(&llm, &NODES);
    assert_eq!(
        (passed.len(), served.soft_reservation_node(&llm)),
        (4, None)
    );
    let names: Vec<&str> = passed.iter().map(String::as_str).collect();
    let scores = served.prioritize(&llm, &names);
    assert_eq!(
        served.soft_reservation_node(&llm).as_deref(),
        Some(top(&scores))
    );
}

#[test]
fn prioritize_gives_one_node_the_top_score_and_each_later_node_less() {
    let tenants = [
        ("n02", "30Gi"),
        ("n03", "20Gi"),
        ("n04", "10Gi"),
        ("n05", "70Gi"),
    ];
    let tenant = |(node, vram): (&str, &str)| {
        let gib: u64 = vram.trim_end_matches("Gi").parse().unwrap();
        bound_on(pod(&format!("tenant-{node}"), vram), node, &[0], gib << 30)
    };
    let served = equal_nodes().with(tenants.map(tenant)).serve();
    let scores = served.prioritize(
        &pod("llm", "40Gi"),
        &["n05", "n01", "n04", "n02", "n03", "n99"],
    );
    let expected = [
        ("n05", 0),
        ("n01", 7),
        ("n04", 8),
        ("n02", 10),
        ("n03", 9),
        ("n99", 0),
    ];
    assert_eq!(
        scores,
        expected.map(|(name, score)| (name.to_owned(), score))
    );
    // Twelve that are all alike: still one top, and nothing below zero.
    let scores = served.prioritize(&pod("tiny", "1Gi"), &NODES);
    let mut steps: Vec<i64> = scores.iter().map(|(_, score)| *score).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    assert_eq!(steps, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]);
}

#[test]
fn a_soft_reservation_steers_the_second_pod_elsewhere_and_expires() {
    let served = equal_nodes().serve();
    let [first, second, third] = ["first", "second", "third"].map(|name| pod(name, "40Gi"));
    assert_eq!(top(&served.prioritize(&first, &["n01", "n02"])), "n01");
    assert_eq!(
        served.pod_state(&first),
        None,
        "prioritize alone enters nobody into the ledger"
    );
    served.filter_passed(&first, &["n01", "n02"]);
    let first_choice = top(&served.prioritize(&first, &["n01", "n02"])).to_owned();
    served.filter_passed(&second, &["n01", "n02"]);
    let second_choice = top(&served.prioritize(&second, &["n01", "n02"])).to_owned();
    assert_ne!(first_choice, second_choice);
    // Both have a soft reservation, which is never a refusal.
    assert_eq!(served.filter_passed(&third, &["n01", "n02"]).len(), 2);
    served.service.cluster().apply(Tick {
        now: Moment(u64::MAX),
        is_leading: true,
    });
    assert_eq!(
        (
            served.soft_reservation_node(&first),
            served.soft_reservation_node(&second)
        ),
        (None, None)
    );
}

#[test]
fn a_soft_reservation_lasts_as_long_as_the_policy_says() {
    for seconds in [2, 30] {
        let mut cluster = equal_nodes();
        cluster.policy.scoring.soft_reservation_lifetime = Millis::seconds(seconds);
        let (served, llm) = (cluster.serve(), pod("llm", "40Gi"));
        let before = served.service.now();
        served.filter_passed(&llm, &["n01"]);
        let after = served.service.now();
        let hint_at = |now| {
            served.service.cluster().apply(Tick {
                now,
                is_leading: true,
            });
            served.soft_reservation_node(&llm)
        };
        let (shorter, longer) = (Millis(seconds * 1000 - 1), Millis(seconds * 1000 + 1));
        assert_eq!(
            hint_at(before + shorter).as_deref(),
            Some("n01"),
            "{seconds} s"
        );
        assert_eq!(hint_at(after + longer), None, "{seconds} s");
    }
}

#[test]
fn a_pod_that_fits_beside_a_soft_reservation_is_not_steered_away() {
    let served = equal_nodes()
        .with([bound_on(pod("tenant", "1Gi"), "n02", &[0], 1 << 30)])
        .serve();
    served.filter_passed(&pod("first", "30Gi"), &["n02"]);
    assert_eq!(
        served
            .soft_reservation_node(&pod("first", "30Gi"))
            .as_deref(),
        Some("n02")
    );
    assert_eq!(
        served.filter_passed(&pod("second", "30Gi"), &["n01", "n02"])[0],
        "n02"
    );
}

/// A node of two GPUs, each with an opportunistic pod of 50 GiB, and one more node that is full of services.
fn two_full_nodes() -> (Served, [Value; 2]) {
    let victims = [0, 1].map(|gpu| {
        bound_on(
            with_priority(pod(&format!("batch-{gpu}"), "50Gi"), -10),
            "node-a",
            &[gpu],
            50 << 30,
        )
    });
    let serving = [0, 1].map(|gpu| {
        bound_on(
            pod(&format!("serving-{gpu}"), "50Gi"),
            "node-b",
            &[gpu],
            50 << 30,
        )
    });
    let cluster = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)])
        .with(victims.clone())
        .with(serving)
        .with([
            with_priority(pod("urgent", "60Gi"), 1000),
            pod("rival", "60Gi"),
        ]);
    (cluster.serve(), victims)
}

fn preempt(served: &Served, pod: &Value, offered: &[(&str, &[&Value])]) -> Value {
    let answer = served.post("/scheduler/preempt", preempt_args(pod, offered));
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["NodeNameToMetaVictims"].take()
}

#[test]
fn preempt_answers_one_node_and_reserves_it() {
    let (served, victims) = two_full_nodes();
    let (urgent, rival) = (
        with_priority(pod("urgent", "60Gi"), 1000),
        pod("rival", "60Gi"),
    );
    let serving = pod("serving-0", "50Gi");
    let offered: [(&str, &[&Value]); 2] = [("node-a", &[&victims[0]]), ("node-b", &[&serving])];
    assert_eq!(
        served.filter_passed(&urgent, &["node-a", "node-b"]),
        [""; 0]
    );
    let chosen = preempt(&served, &urgent, &offered);
    assert_eq!(
        chosen,
        json!({ "node-a": { "Pods": [{ "UID": "uid-batch-0" }], "NumPDBViolations": 0 } })
    );
    let held = served.control_plane.holds.lock().clone();
    let (key, reservation) = &held[0];
    let reservation = reservation.as_ref().unwrap();
    assert_eq!(
        (key.to_string().as_str(), reservation.node.as_str()),
        ("default/urgent", "node-a")
    );
    assert_eq!(reservation.devices[0].as_str(), "GPU-node-a-0");

    let told = (
        "urgent".to_owned(),
        PodEventReason::Reserved,
        "Reserved GPU-node-a-0 on node node-a; evicting 1 pod.".to_owned(),
    );
    assert!(served.events().contains(&told), "{:?}", served.events());

    // While the victim terminates.
    assert_eq!(
        preempt(&served, &urgent, &offered),
        json!({}),
        "for a pod that holds room: no candidates"
    );
    assert_eq!(
        preempt(&served, &urgent, &[("node-a", &[&victims[1]])]),
        json!({})
    );
    let refused = served.filter(&urgent, &["node-a"]).json();
    assert_eq!(
        refused["FailedAndUnresolvableNodes"]["node-a"],
        "waiting for preempted pods to terminate"
    );
    assert_eq!(
        served.bind(&urgent, "node-a"),
        "conflict: preempted pods have not terminated yet"
    );

    // The victim is gone when the agent has reported after its end; the VRAM is still reserved.
    served.delete(&victims[0]);
    assert_eq!(
        served.bind(&urgent, "node-a"),
        "conflict: preempted pods have not terminated yet"
    );
    assert_eq!(served.report(report("node-a", "boot", 2, 2)).status, 200);
    assert_eq!(served.charged("node-a"), [Bytes::gib(60), Bytes::gib(50)]);
    assert_eq!(served.filter_passed(&rival, &["node-a"]), [""; 0]);
    assert_eq!(
        served.bind(&rival, "node-a"),
        "conflict: another pod took the GPU in the meantime"
    );
    assert_eq!(preempt(&served, &urgent, &offered), json!({}));
    assert_eq!(
        served.filter_passed(&urgent, &["node-b", "node-a"]),
        ["node-a"]
    );
    assert_eq!(served.bind(&urgent, "node-a"), "");
    assert_eq!(
        served.pod_state(&urgent).unwrap().devices().unwrap()[0].as_str(),
        "GPU-node-a-0"
    );
    assert_eq!(served.charged("node-a"), [Bytes::gib(60), Bytes::gib(50)]);
}

#[test]
fn preempt_never_evicts_a_non_preemptible_pod_or_one_of_equal_or_higher_priority() {
    let (served, victims) = two_full_nodes();
    let serving = pod("serving-0", "50Gi");
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    assert_eq!(
        preempt(&served, &urgent, &[("node-b", &[&serving])]),
        json!({}),
        "a service"
    );
    let peer = with_priority(pod("peer", "60Gi"), -10);
    assert_eq!(
        preempt(&served, &peer, &[("node-a", &[&victims[0]])]),
        json!({}),
        "of its own priority"
    );
    let mut meek = with_priority(pod("meek", "60Gi"), 1000);
    meek["spec"]["preemptionPolicy"] = json!("Never");
    assert_eq!(
        preempt(&served, &meek, &[("node-a", &[&victims[0]])]),
        json!({})
    );
    assert_eq!(served.control_plane.holds.lock().len(), 0);
}

/// Bound through this replica, and not shown by the watch yet.
fn just_bound(served: &Served, pod: &Value, node: &str) {
    served
        .control_plane
        .binds
        .lock()
        .push_back(BindOutcome::Written);
    assert_eq!(served.filter_passed(pod, &[node]), [node]);
    assert_eq!(served.bind(pod, node), "");
}

#[test]
fn protection_in_a_request_counts_before_the_watch_shows_it() {
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let batch = |name: &str| with_priority(pod(name, "50Gi"), -10);
    let mut kept = batch("kept");
    kept["metadata"]["annotations"] = json!({ "karpenter.sh/do-not-disrupt": "true" });
    for (victim, is_chosen) in [(batch("plain"), true), (kept, false)] {
        let served = ServedCluster::with_gpus(&[("node-a", 1)])
            .with([urgent.clone()])
            .serve();
        just_bound(&served, &victim, "node-a");
        let chosen = preempt(&served, &urgent, &[("node-a", &[&victim])]);
        assert_eq!(chosen != json!({}), is_chosen, "{victim}");
    }
}

#[test]
fn a_group_in_a_request_counts_before_the_watch_shows_it() {
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let [mut here, mut there] = ["here", "there"].map(|name| with_priority(pod(name, "50Gi"), -10));
    for is_group in [false, true] {
        for member in [&mut here, &mut there] {
            member["metadata"]["labels"] = if is_group {
                json!({ "stowage.dev/group": "g" })
            } else {
                json!({})
            };
        }
        let served = ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 1)])
            .with([urgent.clone()])
            .serve();
        just_bound(&served, &here, "node-a");
        just_bound(&served, &there, "node-b");
        let chosen = preempt(&served, &urgent, &[("node-a", &[&here])]);
        assert_eq!(
            chosen == json!({}),
            is_group,
            "kube-scheduler evicts on one node, and the group is on two"
        );
    }
}

#[test]
fn the_watch_takes_precedence_over_a_later_request() {
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let mut outdated = with_priority(pod("batch", "50Gi"), -10);
    outdated["metadata"]["annotations"] = json!({ "karpenter.sh/do-not-disrupt": "true" });
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([urgent.clone()])
        .serve();
    let current = with_priority(pod("batch", "50Gi"), -10);
    served.observe_pod(&current);
    just_bound(&served, &outdated, "node-a");
    assert_ne!(
        preempt(&served, &urgent, &[("node-a", &[&current])]),
        json!({})
    );
}

#[test]
fn evictions_by_the_scheduler_count_in_the_eviction_rates() {
    let (served, victims) = two_full_nodes();
    // Nine of the ten evictions that one node allows within a minute.
    let earlier = vec![uid_of(&victims[1]); 9];
    served
        .service
        .cluster()
        .apply(EvictionsOrdered(earlier.clone()));
    let [urgent, next] = ["urgent", "next"].map(|name| with_priority(pod(name, "60Gi"), 1000));
    assert_ne!(
        preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
        json!({})
    );
    assert_eq!(
        preempt(&served, &next, &[("node-a", &[&victims[1]])]),
        json!({})
    );
    assert!(served.pod_state(&next).unwrap().reservation().is_none());
}

#[test]
fn a_reservation_that_cannot_be_written_evicts_no_pod() {
    let (served, victims) = two_full_nodes();
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    *served.control_plane.hold_fails.lock() = true;
    assert_eq!(
        preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
        json!({})
    );
    assert!(served.pod_state(&urgent).unwrap().reservation().is_none());
    *served.control_plane.hold_fails.lock() = false;
    assert_ne!(
        preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
        json!({})
    );
}

#[test]
fn a_reservation_released_while_its_condition_is_written_evicts_no_pod() {
    let (served, victims) = two_full_nodes();
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let uid = uid_of(&urgent);
    during_condition_write(&served, move |service| {
        service.cluster().apply(ReleaseReservation(uid))
    });
    assert_eq!(
        preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
        json!({})
    );
    assert!(served.pod_state(&urgent).unwrap().reservation().is_none());
    assert_eq!(
        served.control_plane.holds.lock().len(),
        1,
        "its end is left to the planner"
    );
}

fn during_condition_write(served: &Served, what: impl FnOnce(&ServerState) + Send + 'static) {
    let service = served.service.clone();
    *served.control_plane.meanwhile.lock() = Some(Box::new(move || what(&service)));
}

#[test]
fn a_reservation_observed_by_the_watch_is_kept_although_its_write_got_no_answer() {
    let (served, victims) = two_full_nodes();
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let uid = uid_of(&urgent);
    *served.control_plane.hold_fails.lock() = true;
    during_condition_write(&served, move |service| {
        let mut cluster = service.cluster();
        let pod = cluster.ledger().pod_state(&uid).unwrap().clone();
        let waiting = ObservedWaiting {
            reservation: pod.reservation().cloned(),
            ..ObservedWaiting::default()
        };
        cluster.apply(PodObserved(PodObservation {
            uid,
            key: pod.key,
            demand: pod.demand,
            state: ObservedPhase::Waiting(waiting),
            observed: Some(ObservedDisruptionInfo::default()),
        }));
    });
    assert_ne!(
        preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
        json!({})
    );
    assert!(
        served.pod_state(&urgent).unwrap().reservation().is_some(),
        "the planner may evict for it already"
    );
}

#[test]
fn a_failed_write_of_an_earlier_reservation_does_not_release_the_current_one() {
    for hold_fails in [true, false] {
        let (served, victims) = two_full_nodes();
        let urgent = with_priority(pod("urgent", "60Gi"), 1000);
        let (uid, other) = (uid_of(&urgent), uid_of(&victims[1]));
        *served.control_plane.hold_fails.lock() = hold_fails;
        during_condition_write(&served, move |service| {
            let mut cluster = service.cluster();
            let earlier = cluster
                .ledger()
                .pod_state(&uid)
                .unwrap()
                .reservation()
                .unwrap()
                .clone();
            cluster.apply(ReleaseReservation(uid.clone()));
            assert!(!earlier.victims.contains(&other));
            let devices = cluster
                .ledger()
                .pod_state(&other)
                .unwrap()
                .devices()
                .unwrap()
                .clone();
            let reservation = Reservation {
                devices,
                victims: [other].into(),
                ..earlier
            };
            cluster.apply(Reserve { uid, reservation }).unwrap();
        });
        assert_eq!(
            preempt(&served, &urgent, &[("node-a", &[&victims[0]])]),
            json!({})
        );
        let reservation = served.pod_state(&urgent).unwrap().reservation().cloned();
        assert_eq!(
            reservation.map(|it| it.victims),
            Some([uid_of(&victims[1])].into())
        );
        let ended = served
            .control_plane
            .holds
            .lock()
            .iter()
            .filter(|(_, written)| written.is_none())
            .count();
        assert_eq!(ended, 0);
    }
}

#[test]
fn a_bound_pod_passes_on_its_own_node_only() {
    let served = equal_nodes().with([pod("llm", "72Gi")]).serve();
    let llm = pod("llm", "72Gi");
    assert_eq!(served.bind(&llm, "n07"), "");
    assert_eq!(
        served.filter_passed(&llm, &NODES),
        ["n07"],
        "its Binding was lost to the scheduler, not to us"
    );
    assert!(matches!(served.phase(&llm), PodPhase::Bound(_)));
    assert!(
        served
            .service
            .cluster()
            .ledger()
            .pod_state(&uid_of(&llm))
            .is_some()
    );
    eventually("nothing is left open", || {
        served.charged("n07") == [Bytes::gib(72)]
    });
    let one_more = json!({ "node": "n07", "bootId": "boot", "sequence": 2, "gpus": [gpu_report("n07", 0), gpu_report("n07", 1)] });
    assert_eq!(served.report(one_more).status, 200);
    assert_eq!(
        served.filter_passed(&pod("next", "72Gi"), &["n07"]),
        ["n07"]
    );
}
