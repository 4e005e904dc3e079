//! Which pods are chosen as victims by what their objects show: who runs them, where a replacement could run, and whether they
//! are Ready.

use super::*;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use stowage_kubernetes_objects::kube_filters;
use stowage_scheduling::ledger::KeepReason;
use stowage_scheduling::policy::EvictionRates;
use stowage_scheduling::verbs::preempt::{OfferedNode, PreemptAsked, PreemptDecision, preempt};
use stowage_scheduling::verbs::wait::{EvictionRefused, ExtendReservation};

/// A Job's pod of 60 GiB on the node's only GPU.
fn job(name: &str, node: &str) -> Value {
    bound(name, node, 60, -10)
}

fn with(mut pod: Value, path: &str, value: Value) -> Value {
    let (parent, key) = path.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    pod
}

fn mirror(mut pod: Value) -> Value {
    pod["metadata"]["annotations"]["kubernetes.io/config.mirror"] = json!("abc");
    pod
}

fn owned_by(pod: Value, kind: &str) -> Value {
    let owner = json!({ "apiVersion": "v1", "kind": kind, "name": "owner", "uid": "uid-owner", "controller": true });
    with(pod, "/metadata/ownerReferences", json!([owner]))
}

/// The names of the pods that are evicted in the ticks of some seconds.
async fn evicted(bench: &mut PlannerFixture) -> Vec<String> {
    let mut written = bench.tick().await;
    written.extend(bench.written_within(5).await);
    written
        .iter()
        .filter_map(|line| Some(line.split_once(": evict")?.0.to_owned()))
        .collect()
}

/// The pods that are evicted if kube-scheduler offers all pods of the node.
fn preempted(
    bench: &mut PlannerFixture,
    asks: &Value,
    node: &str,
    victims: &[&str],
) -> Vec<String> {
    bench.refuse(asks.clone());
    let pod = serde_json::from_value(asks.clone()).unwrap();
    let (uid, key) = objects::identity(&pod).unwrap();
    let request = VerbRequest {
        uid: uid.clone(),
        key,
        demand: objects::classified_demand(&pod, |traits| bench.state.classify(traits)).unwrap(),
        waiting: objects::waiting(&pod),
        disruption: None,
    };
    let victims = victims.iter().map(|name| format!("uid-{name}")).collect();
    let offered = vec![OfferedNode {
        node: node.into(),
        victims,
        pdb_violations: 0,
    }];
    let wants = kube_filters::requirements(&pod);
    let asked = PreemptAsked {
        request,
        wants,
        offered,
    };
    let (_, view) = bench.state.cluster().apply(asked).unwrap();
    match preempt(view) {
        PreemptDecision::Evict { victims, .. } => {
            victims.evicted().map(|uid| uid.to_string()).collect()
        }
        PreemptDecision::NoCandidate | PreemptDecision::FitsNow => Vec::new(),
    }
}

#[tokio::test]
async fn the_mirror_of_a_static_pod_is_never_evicted() {
    let shown: [&dyn Fn(Value) -> Value; 2] = [&mirror, &|pod| owned_by(mirror(pod), "Node")];
    for show in shown {
        let mut bench = PlannerFixture::new(&["n"]);
        bench.show(show(job("static", "n")));
        let serving = gated("serving", 50, 100);
        bench.show(serving);
        assert!(evicted(&mut bench).await.is_empty());
        assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
        let asks = waiting("asks", 50, 100);
        assert!(preempted(&mut bench, &asks, "n", &["static"]).is_empty());
    }
}

#[tokio::test]
async fn no_pod_is_evicted_in_vain_beside_a_static_pod() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(mirror(bound("static", "n", 30, -10)));
    bench.show(bound("job", "n", 30, -10));
    bench.show(gated("serving", 60, 100));
    assert!(evicted(&mut bench).await.is_empty());
    let asks = waiting("asks", 60, 100);
    assert!(preempted(&mut bench, &asks, "n", &["static", "job"]).is_empty());
    bench.show(gated("smaller", 40, 100));
    assert_eq!(evicted(&mut bench).await, ["job"], "alone it is enough");
}

#[tokio::test]
async fn of_equal_victims_the_one_whose_replacement_can_run_elsewhere_goes() {
    let hostname = |pod| {
        with(
            pod,
            "/spec/nodeSelector",
            json!({ "kubernetes.io/hostname": "a" }),
        )
    };
    let affinity = |kind: &str, term: Value| {
        let terms = json!({ "nodeSelectorTerms": [{ kind: [term] }] });
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": terms } })
    };
    let by_name = json!({ "key": "metadata.name", "operator": "In", "values": ["a"] });
    let by_label = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["a"] });
    let by_field = |pod| {
        with(
            pod,
            "/spec/affinity",
            affinity("matchFields", by_name.clone()),
        )
    };
    let by_expression = |pod| {
        with(
            pod,
            "/spec/affinity",
            affinity("matchExpressions", by_label.clone()),
        )
    };
    let pinned: [&dyn Fn(Value) -> Value; 4] = [&hostname, &by_field, &by_expression, &|pod| {
        owned_by(pod, "DaemonSet")
    }];
    for pin in pinned {
        for (on, other) in [("a", "b"), ("b", "a")] {
            let mut bench = PlannerFixture::new(&["a", "b"]);
            bench.show(pin(job("pinned", on)));
            bench.show(owned_by(job("movable", other), "ReplicaSet"));
            bench.show(gated("serving", 50, 100));
            assert_eq!(evicted(&mut bench).await, ["movable"], "pinned is on {on}");
        }
    }
}

#[tokio::test]
async fn a_pod_whose_affinity_names_several_nodes_or_a_zone_costs_no_more_than_another() {
    let values = |key: &str, values: &[&str]| {
        let expression = json!({ "key": key, "operator": "In", "values": values });
        let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [expression] }] });
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": terms } })
    };
    for affinity in [
        values("kubernetes.io/hostname", &["a", "b"]),
        values("topology.kubernetes.io/zone", &["a"]),
    ] {
        let mut bench = PlannerFixture::new(&["a", "b"]);
        bench.show(with(job("free", "a"), "/spec/affinity", affinity));
        bench.show(job("other", "b"));
        bench.show(gated("serving", 50, 100));
        assert_eq!(
            evicted(&mut bench).await,
            ["free"],
            "the first node by name"
        );
    }
}

#[tokio::test]
async fn a_pod_whose_volume_is_on_its_node_goes_after_one_whose_volume_is_not() {
    let mut bench = PlannerFixture::new(&["a", "b"]);
    let claimed = |pod, claim: &str| {
        let volume = json!({ "name": "data", "persistentVolumeClaim": { "claimName": claim } });
        with(pod, "/spec/volumes", json!([volume]))
    };
    bench.show(claimed(job("pinned", "a"), "local"));
    bench.show(claimed(job("movable", "b"), "remote"));
    for (name, host) in [("local", Some("a")), ("remote", None)] {
        let claim = json!({
            "metadata": {
                "name": name, "namespace": "default",
                "annotations": { "pv.kubernetes.io/bind-completed": "yes" },
            },
            "spec": { "volumeName": name },
            "status": { "phase": "Bound" },
        });
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
        bench.index.apply_storage(&bench.state, &claim);
        let expression =
            json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": host.as_slice() });
        let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [expression] }] });
        let mut volume = json!({ "metadata": { "name": name }, "spec": {} });
        if host.is_some() {
            volume["spec"]["nodeAffinity"] = json!({ "required": terms });
        }
        let volume: PersistentVolume = serde_json::from_value(volume).unwrap();
        bench.index.apply_storage(&bench.state, &volume);
    }
    bench.show(gated("serving", 50, 100));
    assert_eq!(evicted(&mut bench).await, ["movable"]);
}

/// A budget over the pods of `app: victim` that allows no disruption.
fn budget(policy: Option<&str>, healthy: i32, desired: i32) -> PodDisruptionBudget {
    let mut spec = json!({ "selector": { "matchLabels": { "app": "victim" } } });
    if let Some(policy) = policy {
        spec["unhealthyPodEvictionPolicy"] = json!(policy);
    }
    let status = json!({
        "observedGeneration": 1, "disruptionsAllowed": 0,
        "currentHealthy": healthy, "desiredHealthy": desired, "expectedPods": 1,
    });
    let metadata = json!({ "name": "budget", "namespace": "default", "generation": 1 });
    serde_json::from_value(json!({ "metadata": metadata, "spec": spec, "status": status })).unwrap()
}

fn in_state(name: &str, phase: &str, ready: &str) -> Value {
    let pod = with(
        job(name, "n"),
        "/metadata/labels",
        json!({ "app": "victim" }),
    );
    let ready = json!({ "type": "Ready", "status": ready });
    with(
        pod,
        "/status",
        json!({ "phase": phase, "conditions": [ready] }),
    )
}

#[tokio::test]
async fn a_pod_that_is_not_ready_may_be_evicted_as_its_budget_says_of_unhealthy_pods() {
    for (policy, healthy, desired, phase, ready, may_go) in [
        (None, 0, 1, "Running", "False", false),
        (None, 1, 1, "Running", "False", true),
        (None, 0, 0, "Running", "False", false),
        (Some("IfHealthyBudget"), 0, 1, "Running", "False", false),
        (Some("IfHealthyBudget"), 2, 1, "Running", "False", true),
        (Some("AlwaysAllow"), 0, 1, "Running", "False", true),
        (Some("AlwaysAllow"), 0, 1, "Running", "Unknown", true),
        (Some("AlwaysAllow"), 0, 1, "Running", "True", false),
        (Some("IfHealthyBudget"), 1, 1, "Running", "True", false),
        (Some("Sometimes"), 0, 1, "Running", "False", false),
        // The Eviction API asks no budget about a pod that has not begun to run.
        (None, 0, 1, "Pending", "False", true),
    ] {
        let case = format!("{policy:?}, {healthy} of {desired}, {phase}, {ready}");
        let mut bench = PlannerFixture::new(&["n"]);
        bench
            .index
            .apply_budget(&bench.state, &budget(policy, healthy, desired));
        bench.show(in_state("victim", phase, ready));
        let asks = waiting("asks", 50, 100);
        let expected: &[&str] = if may_go { &["uid-victim"] } else { &[] };
        assert_eq!(
            preempted(&mut bench, &asks, "n", &["victim"]),
            expected,
            "{case}"
        );
        bench.show(gated("serving", 50, 200));
        assert_eq!(evicted(&mut bench).await.len(), expected.len(), "{case}");
    }
}

#[tokio::test]
async fn a_pod_that_two_budgets_cover_stays_whatever_they_say_of_unhealthy_pods() {
    let mut bench = PlannerFixture::new(&["n"]);
    for name in ["one", "two"] {
        let mut budget = budget(Some("AlwaysAllow"), 0, 1);
        budget.metadata.name = Some(name.into());
        bench.index.apply_budget(&bench.state, &budget);
    }
    bench.show(in_state("victim", "Running", "False"));
    bench.show(gated("serving", 50, 200));
    assert!(evicted(&mut bench).await.is_empty());
}

#[tokio::test]
async fn a_budget_that_protects_a_pod_is_named_with_the_disruptions_that_it_allows() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.index.apply_budget(&bench.state, &budget(None, 1, 1));
    bench.show(in_state("victim", "Running", "True"));
    bench.refuse(waiting("asks", 50, 100));
    let cluster = bench.state.cluster();
    let demand = &cluster.ledger().pod_state(&uid("asks")).unwrap().demand;
    let kept = cluster.ledger().keep_reason_of(
        &cluster.ledger().preemptor(&uid("asks")),
        demand,
        &uid("victim"),
    );
    assert_eq!(
        kept.map(|kept| kept.to_string()).as_deref(),
        Some("PodDisruptionBudget default/budget covers it and allows 0 disruptions now")
    );
}

/// Anyone may write an owner: otherwise a pod that names a Node would never be evicted.
#[tokio::test]
async fn a_pod_that_only_names_a_node_as_its_owner_is_a_victim_as_any_other() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(owned_by(job("claims", "n"), "Node"));
    bench.show(gated("serving", 50, 100));
    assert_eq!(evicted(&mut bench).await, ["claims"]);
}

fn refuse_for_good(bench: &PlannerFixture, name: &str) {
    let refused = EvictionOutcome::Refused {
        message: "admission webhook \"keeper\" denied it".into(),
    };
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert(name.into(), refused);
}

fn evictions_in(written: &[String]) -> Vec<&str> {
    written
        .iter()
        .filter(|line| line.contains(": evict"))
        .map(String::as_str)
        .collect()
}

#[tokio::test]
async fn a_victim_whose_eviction_is_refused_is_replaced_at_once() {
    let mut bench = PlannerFixture::new(&["a", "b", "c"]);
    ["a", "b", "c"]
        .into_iter()
        .for_each(|node| bench.show(job(&format!("on-{node}"), node)));
    bench.show(gated("serving", 50, 100));
    refuse_for_good(&bench, "on-a");
    refuse_for_good(&bench, "on-b");
    let mut written = bench.tick().await;
    written.extend(bench.written_within(5).await);
    let tried = [
        "on-a: evict Preempted",
        "on-b: evict Preempted",
        "on-c: evict Preempted",
    ];
    assert_eq!(evictions_in(&written), tried, "{written:?}");
    let key = stowage_scheduling::ids::PodKey::parse("default", "serving").unwrap();
    let cluster = bench.state.cluster();
    let demand = &cluster
        .ledger()
        .pod_state(&cluster.ledger().uid_of(&key).unwrap())
        .unwrap()
        .demand;
    let kept = cluster.ledger().keep_reason_of(
        &cluster.ledger().preemptor(&uid("serving")),
        demand,
        &uid("on-a"),
    );
    assert!(
        kept.unwrap()
            .to_string()
            .contains("admission webhook \"keeper\" denied it")
    );
}

#[tokio::test]
async fn refused_evictions_do_not_use_up_the_eviction_rates() {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 1,
        node: 1,
        tenant: 1,
    };
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    ["a", "b", "c"]
        .into_iter()
        .for_each(|name| bench.show(bound(name, "n", 24, -10)));
    bench.show(gated("serving", 20, 100));
    refuse_for_good(&bench, "a");
    refuse_for_good(&bench, "b");
    let mut written = bench.tick().await;
    written.extend(bench.written_within(5).await);
    let tried = [
        "a: evict Preempted",
        "b: evict Preempted",
        "c: evict Preempted",
    ];
    assert_eq!(evictions_in(&written), tried, "{written:?}");
}

#[tokio::test]
async fn a_refused_victim_is_tried_again_with_growing_pauses_if_no_other_would_do() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(job("job", "n"));
    bench.show(gated("serving", 50, 100));
    refuse_for_good(&bench, "job");
    let mut written = bench.tick().await;
    written.extend(bench.written_within(600).await);
    let times = evictions_in(&written).len();
    assert!((4..=7).contains(&times), "{times} within ten minutes");
    bench.recorder.eviction_outcomes.lock().clear();
    let later = bench.written_within(600).await;
    assert_eq!(
        evictions_in(&later)[..1],
        ["job: evict Preempted"],
        "and in the end it may go"
    );
}

#[tokio::test]
async fn a_victim_whose_eviction_gets_no_answer_in_time_is_replaced() {
    let mut bench = PlannerFixture::new(&["a", "b"]);
    ["a", "b"]
        .into_iter()
        .for_each(|node| bench.show(job(&format!("on-{node}"), node)));
    bench.show(gated("serving", 50, 100));
    let unanswered = EvictionOutcome::Unknown {
        message: "failed calling webhook".into(),
    };
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("on-a".into(), unanswered);
    let mut written = bench.tick().await;
    written.extend(bench.written_within(45).await);
    assert_eq!(
        evictions_in(&written).last(),
        Some(&"on-b: evict Preempted"),
        "{written:?}"
    );
}

/// The pod, deleted with so many seconds to end.
fn deleted(mut pod: Value, grace: i64) -> Value {
    let ends = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(grace);
    pod["metadata"]["deletionTimestamp"] = json!(ends.to_string());
    pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
    pod
}

#[tokio::test]
async fn a_pod_deleted_with_a_longer_grace_than_its_class_may_have_is_a_victim_like_any_other() {
    for grace in [700, 172_800, 31_536_000] {
        let mut bench = PlannerFixture::new(&["n"]);
        bench.show(deleted(job("job", "n"), grace));
        bench.show(gated("serving", 50, 100));
        assert_eq!(evicted(&mut bench).await, ["job"], "{grace} s");
        bench.show(deleted(job("job", "n"), 30));
        assert!(
            evicted(&mut bench).await.is_empty(),
            "it leaves in time now"
        );
        bench.delete("job");
        assert!(
            bench
                .tick()
                .await
                .contains(&"serving: nominate n, placed".to_owned()),
            "{grace} s"
        );
    }
}

#[tokio::test]
async fn a_pod_that_leaves_in_time_by_itself_is_waited_for() {
    for grace in [30, 300, 590] {
        let mut bench = PlannerFixture::new(&["n"]);
        bench.show(deleted(job("job", "n"), grace));
        bench.show(gated("serving", 50, 100));
        assert!(evicted(&mut bench).await.is_empty(), "{grace} s");
        assert_eq!(
            bench.state.cluster().ledger().totals().reservations,
            1,
            "{grace} s"
        );
    }
}

#[tokio::test]
async fn a_pod_deleted_for_good_by_its_owner_keeps_no_budget_and_no_group_from_its_eviction() {
    let mut bench = PlannerFixture::new(&["n"]);
    let everything = json!({ "metadata": { "name": "all", "namespace": "default" },
        "spec": { "maxUnavailable": 0, "selector": {} }, "status": { "disruptionsAllowed": 0 } });
    let everything: PodDisruptionBudget = serde_json::from_value(everything).unwrap();
    bench.index.apply_budget(&bench.state, &everything);
    let mut leaving = job("leaving", "n");
    leaving["metadata"]["labels"]["stowage.dev/group"] = json!("pair");
    let mut staying = bound("staying", "n", 4, -10);
    staying["metadata"]["labels"]["stowage.dev/group"] = json!("pair");
    bench.show(deleted(leaving, 31_536_000));
    bench.show(staying);
    bench.show(gated("serving", 50, 100));
    assert_eq!(
        evicted(&mut bench).await,
        ["leaving"],
        "the Eviction API asks no budget about it"
    );
}

#[tokio::test]
async fn a_victim_that_kube_scheduler_deletes_with_its_own_long_grace_is_told_to_end_sooner() {
    let mut bench = PlannerFixture::new(&["n"]);
    let year = |pod| {
        with(
            pod,
            "/spec/terminationGracePeriodSeconds",
            json!(31_536_000),
        )
    };
    bench.show(year(job("job", "n")));
    bench.show(waiting("serving", 50, 100));
    bench.refuse(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    let cluster = bench.state.cluster();
    let until = cluster.ledger().now() + Millis::seconds(630);
    drop(cluster);
    bench.state.cluster().apply(ExtendReservation {
        uid: uid("serving"),
        until,
    });
    let mut shown = waiting("serving", 50, 100);
    shown["status"]["conditions"] = reservation_observed(&["uid-job"], 640);
    bench.show(shown);
    bench.tick().await;
    bench.show(deleted(year(job("job", "n")), 31_536_000));
    assert_eq!(evicted(&mut bench).await, ["job"]);
}

/// Why the pod is kept from `serving`, and for how many seconds more.
fn refusal_of(bench: &PlannerFixture, name: &str) -> Option<(String, u64)> {
    let cluster = bench.state.cluster();
    let demand = &cluster.ledger().pod_state(&uid("serving")).unwrap().demand;
    match cluster.ledger().keep_reason_of(
        &cluster.ledger().preemptor(&uid("serving")),
        demand,
        &uid(name),
    )? {
        KeepReason::EvictionRefused { why, again } => Some((why.to_string(), again.0 / 1000)),
        _ => None,
    }
}

#[tokio::test]
async fn a_refusal_that_another_eviction_met_is_counted_once() {
    for others in [&["on-a"][..], &["on-a", "on-a"], &["on-a", "on-b"]] {
        let mut bench = PlannerFixture::new(&["a", "b"]);
        ["a", "b"]
            .into_iter()
            .for_each(|node| bench.show(job(&format!("on-{node}"), node)));
        bench.show(gated("serving", 50, 100));
        bench
            .recorder
            .eviction_outcomes
            .lock()
            .insert("on-a".into(), EvictionOutcome::TryLater { after: None });
        bench.tick().await;
        assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
        for name in others {
            bench
                .state
                .cluster()
                .apply(EvictionRefused::new(uid(name), "a webhook"));
        }
        bench.written_within(3).await;
        let told = Some(("a webhook".to_owned(), 27));
        assert!(
            others.iter().all(|name| refusal_of(&bench, name) == told),
            "{:?}",
            refusal_of(&bench, "on-a")
        );
    }
}

/// The pod as its owner shows it: it is not to be disrupted.
fn protected(mut pod: Value) -> Value {
    pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] = json!("true");
    pod
}

#[tokio::test]
async fn an_eviction_that_was_asked_for_counts_whatever_its_victim_shows_after_it() {
    for (outcome, counts) in [
        (EvictionOutcome::Evicted, true),
        (
            EvictionOutcome::Unknown {
                message: "no answer".into(),
            },
            true,
        ),
        (
            EvictionOutcome::Refused {
                message: "a webhook".into(),
            },
            false,
        ),
    ] {
        let mut policy = Policy::default();
        policy.preemption.evictions_per_minute = EvictionRates {
            cluster: 1,
            node: 1,
            tenant: 1,
        };
        let mut bench = PlannerFixture::with_policy(policy, &["a", "b"]);
        ["a", "b"]
            .into_iter()
            .for_each(|node| bench.show(job(&format!("on-{node}"), node)));
        bench.show(gated("serving", 50, 100));
        bench
            .recorder
            .eviction_outcomes
            .lock()
            .insert("on-a".into(), outcome.clone());
        let mut written = bench.tick().await;
        written.extend(bench.tick().await);
        bench.show(protected(job("on-a", "a")));
        written.extend(bench.written_within(20).await);
        let all = ["on-a: evict Preempted", "on-b: evict Preempted"];
        let mut asked = evictions_in(&written);
        // No watch shows that a pod leaves: it is told again.
        asked.dedup();
        assert_eq!(asked, all[..if counts { 1 } else { 2 }], "{outcome:?}");
        written.extend(bench.written_within(45).await);
        assert!(
            evictions_in(&written).contains(&all[1]),
            "{outcome:?}: {written:?}"
        );
    }
}

#[tokio::test]
async fn a_victim_whose_eviction_was_never_sent_is_not_recorded_as_refused() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(job("job", "n"));
    bench.show(waiting("serving", 50, 100));
    bench.refuse(waiting("serving", 50, 100));
    reserve_as_the_preempt_verb(&bench, "serving", "job");
    *bench.recorder.is_unreachable.lock() = true;
    let written = bench.written_within(45).await;
    assert_eq!(
        (evictions_in(&written), refusal_of(&bench, "job")),
        (vec![], None)
    );
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}

#[tokio::test]
async fn a_new_leader_waits_for_a_victim_that_its_predecessor_told_to_end_sooner() {
    for (ended_ago, grace, waits) in [
        (3_600, 30, true),
        (5, 600, true),
        (-20, 30, true),
        (3_600, 700, false),
    ] {
        let mut bench = PlannerFixture::new(&["n"]);
        let mut leaving = deleted(job("job", "n"), -ended_ago);
        leaving["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        bench.take_over(leaving);
        bench.show(gated("serving", 50, 100));
        let asked = evicted(&mut bench).await;
        assert_eq!(asked.is_empty(), waits, "{ended_ago}, {grace}");
        assert_eq!(
            bench.state.cluster().ledger().totals().reservations,
            1,
            "{ended_ago}, {grace}"
        );
    }
}
