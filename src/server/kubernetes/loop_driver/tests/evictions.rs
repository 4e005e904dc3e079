//! Which pods are evicted, how often an eviction is retried, and when it is called off.

use super::*;
use stowage_scheduling::control_loop::{EvictionTask, WriteOutcome};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey};
use stowage_scheduling::planning::is_relief_due;
use stowage_scheduling::policy::{
    ConflictRule, EvictionRates, Mode, OveruseRule, Preemptibility, WhenIncomplete,
    built_in_classes,
};
use stowage_scheduling::units::{Bytes, Percent};
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingFailed;
use stowage_scheduling::verbs::observe::ReadingReported;
use stowage_scheduling::verbs::wait::{EvictionsOrdered, ReleaseReservation};
use stowage_scheduling::vocabulary::node_reading::{
    EngineLoad, GpuReading, NodeReading, OverGrant,
};

fn refuse_for_now(bench: &PlannerFixture, name: &str) {
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert(name.into(), EvictionOutcome::TryLater { after: None });
}

#[tokio::test]
async fn a_cordoned_node_gets_no_more_evictions_and_the_reservation_there_ends() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    refuse_for_now(&bench, "job");
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    let mut cordoned = node("n");
    cordoned["spec"] = json!({ "unschedulable": true });
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(cordoned).unwrap());
    bench.advance_seconds(1);
    let written = bench.tick().await;
    assert_eq!(written[..1], ["serving: end hold, clear nomination"]);
    let later = bench.written_within(15).await;
    assert!(
        written
            .iter()
            .chain(&later)
            .all(|write| !write.contains("evict")),
        "{written:?} {later:?}"
    );
    assert_eq!(
        later.iter().filter(|write| *write == "job: stays").count(),
        1,
        "{later:?}"
    );
}

/// An earlier leader may have ordered the eviction.
#[tokio::test]
async fn a_pod_that_shows_an_eviction_which_nobody_wants_is_told_that_it_stays() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut job = bound("job", "n", 60, -10);
    job["status"]["conditions"] = json!([evicted("True")]);
    bench.take_over(job.clone());
    assert_eq!(
        bench.written_within(9).await,
        Vec::<String>::new(),
        "it may leave yet"
    );
    assert_eq!(bench.written_within(30).await, ["job: stays"]);
    job["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    bench.show(job);
    assert_eq!(
        bench.written_within(30).await,
        Vec::<String>::new(),
        "it leaves"
    );
}

#[tokio::test]
async fn no_more_than_some_conditions_are_corrected_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    for n in 0..40 {
        let mut job = bound(&format!("job-{n:02}"), "n", 1, -10);
        job["status"]["conditions"] = json!([evicted("True")]);
        bench.show(job);
    }
    bench.tick().await;
    bench.advance_seconds(10);
    assert_eq!(bench.tick().await.len(), 32);
    assert_eq!(
        bench.tick().await.len(),
        8,
        "those that had no turn do not wait longer"
    );
}

#[tokio::test]
async fn a_pod_whose_eviction_is_tried_again_is_not_told_that_it_stays_until_its_reservation_ends()
{
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    refuse_for_now(&bench, "job");
    let mut written = Vec::new();
    while bench.state.cluster().ledger().totals().reservations > 0 || written.is_empty() {
        written.extend(bench.written_within(1).await);
        assert!(!written.contains(&"job: stays".to_owned()), "{written:?}");
    }
    bench.recorder.eviction_outcomes.lock().clear();
    let later = bench.written_within(12).await;
    assert!(
        later.contains(&"job: stays".to_owned()),
        "{written:?} {later:?}"
    );
}

#[tokio::test]
async fn a_pod_whose_eviction_was_not_requested_gets_no_condition_that_it_stays() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    let mut tainted = node("n");
    tainted["spec"] = json!({ "taints": [{ "key": "maintenance", "effect": "NoSchedule" }] });
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(tainted).unwrap());
    assert_eq!(
        bench.written_within(15).await[..1],
        ["serving: end hold, clear nomination"]
    );
    assert!(
        !bench
            .written_within(15)
            .await
            .contains(&"job: stays".to_owned())
    );
}

/// Two pods were granted the node's GPU, of which one has not started and shows that it is evicted for that.
#[tokio::test]
async fn a_pod_that_is_evicted_to_end_a_conflict_is_told_that_it_stays_once_the_conflict_is_over() {
    let mut policy = Policy::default();
    policy.conflicts = ConflictRule::EvictUnstarted;
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    let granted = |name: &str, phase: &str| {
        let mut pod = bound(name, "n", 60, -10);
        pod["metadata"]["annotations"]["stowage.dev/gpu-memory-fraction"] = json!("0.75");
        pod["status"]["phase"] = json!(phase);
        pod
    };
    bench.show(granted("first", "Running"));
    let mut second = granted("second", "Pending");
    second["status"]["conditions"] = json!([evicted("True")]);
    bench.show(second);
    let now = bench.state.cluster().ledger().now();
    let devices = bench
        .state
        .cluster()
        .snapshot()
        .node("n")
        .unwrap()
        .devices
        .clone();
    let nodes = [(NodeName::parse("n").unwrap(), devices)];
    for seconds in 0..20 {
        bench
            .state
            .over_allocations()
            .check_nodes(&nodes, now + Millis::seconds(seconds));
    }
    assert_eq!(
        bench
            .state
            .over_allocations()
            .victims(now + Millis::seconds(20))
            .len(),
        1
    );
    assert!(
        !bench
            .written_within(20)
            .await
            .contains(&"second: stays".to_owned()),
        "it is to leave"
    );
    bench.delete("first");
    bench
        .state
        .over_allocations()
        .check_nodes(&nodes, now + Millis::seconds(21));
    assert!(
        bench
            .written_within(15)
            .await
            .contains(&"second: stays".to_owned())
    );
}

#[tokio::test]
async fn a_late_refusal_of_an_eviction_ends_no_reservation_that_evicts_nobody() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    bench
        .state
        .cluster()
        .apply(ReleaseReservation(uid("serving")));
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(node("m")).unwrap());
    let mut written = bench.written_within(3).await;
    assert!(
        written.iter().any(|write| write.contains("nominate m")),
        "{written:?}"
    );
    let (key, victim) = (PodKey::parse("default", "job").unwrap(), uid("job"));
    let outcome = EvictionOutcome::Refused {
        message: "forbidden".into(),
    };
    let task = EvictionTask::Reservation {
        preemptor: uid("serving"),
    };
    let now = bench.planner.now();
    bench.planner.control_loop.handle_write_outcome(
        WriteOutcome::Evicted {
            key,
            uid: victim,
            task,
            outcome,
        },
        now,
    );
    written = bench.settle().await;
    assert_eq!(written, Vec::<String>::new());
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 1);
}

#[tokio::test]
async fn a_refusal_that_comes_while_the_preemptor_is_being_bound_counts_once_its_binding_has_failed()
 {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(waiting("serving", 50, 100));
    bench.refuse(waiting("serving", 50, 100));
    bench.advance_seconds(5);
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    // As if its answer were still to come.
    bench
        .planner
        .control_loop
        .begin_eviction(&uid("serving"), &uid("job"));
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(node("m")).unwrap());
    let key = PodKey::parse("default", "serving").unwrap();
    let asked = BindAsked {
        uid: uid("serving"),
        key,
        node: NodeName::parse("m").unwrap(),
    };
    bench.state.cluster().apply(asked).unwrap();
    let (key, task) = (
        PodKey::parse("default", "job").unwrap(),
        EvictionTask::Reservation {
            preemptor: uid("serving"),
        },
    );
    let outcome = EvictionOutcome::Refused {
        message: "forbidden".into(),
    };
    let now = bench.planner.now();
    bench.planner.control_loop.handle_write_outcome(
        WriteOutcome::Evicted {
            key,
            uid: uid("job"),
            task,
            outcome,
        },
        now,
    );
    bench.state.cluster().apply(BindingFailed(uid("serving")));
    let written = bench.written_within(25).await;
    assert!(
        written.contains(&"serving: nominate m, touch".to_owned()),
        "{written:?}"
    );
    assert!(
        !written.contains(&"job: evict Preempted".to_owned()),
        "{written:?}"
    );
}

/// The only GPU of the node is under lasting pressure, from an engine beside two jobs.
fn pressed(policy: Policy) -> PlannerFixture {
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    bench.show(bound("engine", "n", 30, 100));
    bench.show(bound("small", "n", 10, -10));
    bench.show(bound("large", "n", 20, -10));
    bench
}

fn report_pressure(bench: &PlannerFixture) {
    report_load(bench, 97);
}

/// So much of the engine's KV cache is in use.
fn report_load(bench: &PlannerFixture, kv_cache: u8) {
    let load = EngineLoad::new(Percent::new(kv_cache), Some(0));
    let uuid = GpuUuid::from_index(0);
    let gpu = GpuReading {
        uuid,
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: load,
    };
    let mut cluster = bench.state.cluster();
    let sampled = cluster.ledger().now();
    cluster.apply(ReadingReported {
        node: NodeName::parse("n").unwrap(),
        reading: NodeReading {
            sampled,
            gpus: vec![gpu],
            ..NodeReading::default()
        }
        .into(),
    });
}

/// Ten seconds of pressure, and the writes during them.
async fn press(bench: &mut PlannerFixture) -> Vec<String> {
    let mut written = Vec::new();
    for _ in 0..5 {
        bench.advance_seconds(2);
        report_pressure(bench);
        written.extend(bench.tick().await);
    }
    written
}

#[tokio::test]
async fn the_eviction_of_a_protected_neighbor_is_retried_with_back_off_and_another_is_tried() {
    let mut bench = pressed(Policy::default());
    refuse_for_now(&bench, "small");
    refuse_for_now(&bench, "large");
    let mut asked = Vec::new();
    for _ in 0..60 {
        asked.extend(press(&mut bench).await);
    }
    let times = |name: &str| asked.iter().filter(|write| *write == name).count();
    let (small, large) = (
        times("small: evict EnginePressure"),
        times("large: evict EnginePressure"),
    );
    assert_eq!(small + large, asked.len(), "{asked:?}");
    assert_eq!(
        asked[..2],
        ["small: evict EnginePressure", "large: evict EnginePressure"]
    );
    assert!(
        (3..=6).contains(&small) && (3..=6).contains(&large),
        "in ten minutes: {asked:?}"
    );
}

#[tokio::test]
async fn relief_counts_towards_the_eviction_limits() {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 1,
        node: 1,
        tenant: 1,
    };
    let mut bench = pressed(policy);
    bench
        .state
        .cluster()
        .apply(EvictionsOrdered(vec![uid("large")]));
    let mut written = press(&mut bench).await;
    written.extend(press(&mut bench).await);
    assert_eq!(written, Vec::<String>::new());
}

#[tokio::test]
async fn an_eviction_that_is_not_allowed_at_the_moment_does_not_count_towards_the_limits() {
    let mut policy = evicting_overuse();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 1,
        node: 1,
        tenant: 1,
    };
    let mut bench = pressed(policy.clone());
    refuse_for_now(&bench, "small");
    let mut written = Vec::new();
    for _ in 0..4 {
        written.extend(press(&mut bench).await);
    }
    assert_eq!(
        written[..2],
        ["small: evict EnginePressure", "large: evict EnginePressure"]
    );

    let mut bench = overusing(policy);
    refuse_for_now(&bench, "job");
    assert_eq!(
        report_use(&mut bench, 150, 12).await,
        ["job: evict Overuse"]
    );
    assert!(
        bench
            .state
            .cluster()
            .ledger()
            .is_within_eviction_rates(&[uid("job")])
    );
}

fn of_a_pair(name: &str, pod: Value) -> Value {
    let mut pod = pod;
    let annotations = pod["metadata"]["annotations"].clone();
    pod["metadata"]["labels"]["stowage.dev/group"] = json!("pair");
    pod["metadata"]["annotations"]["stowage.dev/group-min"] = json!("2");
    assert!(
        annotations["stowage.dev/devices"].is_string(),
        "{name} is bound"
    );
    pod
}

/// One of two is bound, and the other was not bound in time.
async fn broken_pair(rates: EvictionRates) -> PlannerFixture {
    let mut policy = Policy::default();
    policy.planning.groups.when_incomplete = WhenIncomplete::Evict;
    policy.preemption.evictions_per_minute = rates;
    let mut bench = PlannerFixture::with_policy(policy, &["n", "m"]);
    bench.show(member("a", 50, "pair", 2));
    bench.show(member("b", 50, "pair", 2));
    bench.tick().await;
    bench.show(of_a_pair("a", bound("a", "m", 50, 100)));
    let mut released = bench.pod("b");
    released["spec"]["schedulingGates"] = Value::Null;
    bench.show(released);
    bench
}

fn evictions_of(name: &str, written: &[String]) -> usize {
    written
        .iter()
        .filter(|write| *write == &format!("{name}: evict GroupIncomplete"))
        .count()
}

#[tokio::test]
async fn the_eviction_of_an_orphaned_member_is_retried_for_a_limited_time() {
    let mut bench = broken_pair(EvictionRates::default()).await;
    refuse_for_now(&bench, "a");
    bench.advance_seconds(31);
    assert_eq!(evictions_of("a", &bench.tick().await), 1);
    assert_eq!(evictions_of("a", &bench.tick().await), 0, "not at once");
    let mut written = Vec::new();
    for _ in 0..65 {
        bench.advance_seconds(10);
        written.extend(bench.tick().await);
    }
    assert!(
        (50..=60).contains(&evictions_of("a", &written)),
        "{written:?}"
    );
    assert_eq!(
        written.iter().filter(|write| *write == "a: stays").count(),
        1
    );
    bench.advance_seconds(20);
    assert_eq!(evictions_of("a", &bench.tick().await), 0);
}

#[tokio::test]
async fn the_eviction_of_an_orphaned_member_waits_for_the_eviction_limits() {
    let mut bench = broken_pair(EvictionRates {
        cluster: 1,
        node: 1,
        tenant: 1,
    })
    .await;
    bench.show(bound("other", "n", 10, -10));
    bench.advance_seconds(31);
    bench
        .state
        .cluster()
        .apply(EvictionsOrdered(vec![uid("other")]));
    assert_eq!(evictions_of("a", &bench.tick().await), 0);
    bench.advance_seconds(61);
    assert_eq!(evictions_of("a", &bench.tick().await), 1);
}

#[tokio::test]
async fn a_group_that_is_complete_after_all_keeps_its_members() {
    let mut bench = broken_pair(EvictionRates::default()).await;
    refuse_for_now(&bench, "a");
    bench.advance_seconds(31);
    bench.tick().await;
    bench.show(of_a_pair("b", bound("b", "n", 50, 100)));
    bench.advance_seconds(20);
    assert_eq!(evictions_of("a", &bench.tick().await), 0);
}

fn report_overuse(bench: &PlannerFixture, used_gib: u64) {
    let (granted, used) = (Bytes::gib(10), Bytes::gib(used_gib));
    let over = (used > granted).then(|| OverGrant {
        pod: uid("job"),
        granted,
        used,
        ungranted: None,
    });
    let sampled = bench.state.cluster().ledger().now();
    let reading = NodeReading {
        sampled,
        over_grant: over.into_iter().collect(),
        ..NodeReading::default()
    };
    bench.state.cluster().apply(ReadingReported {
        node: NodeName::parse("n").unwrap(),
        reading: reading.into(),
    });
}

/// One report a second for so long, in which the job uses 12 of its 10 GiB or less, and the writes.
async fn report_use(bench: &mut PlannerFixture, seconds: u64, used_gib: u64) -> Vec<String> {
    let mut written = Vec::new();
    for _ in 0..seconds {
        bench.advance_seconds(1);
        report_overuse(bench, used_gib);
        written.extend(bench.tick().await);
    }
    written
}

fn overusing(policy: Policy) -> PlannerFixture {
    let mut bench = PlannerFixture::with_policy(policy, &["n"]);
    bench.show(bound("job", "n", 10, -10));
    bench
}

fn evicting_overuse() -> Policy {
    let mut policy = Policy::default();
    policy.overuse = OveruseRule::Evict;
    policy
}

#[tokio::test]
async fn a_pod_over_its_grant_gets_an_event_and_is_evicted_later() {
    let mut bench = overusing(evicting_overuse());
    assert_eq!(report_use(&mut bench, 100, 12).await, Vec::<String>::new());
    assert_eq!(bench.recorder.event_reasons(), ["StowageOveruse"]);
    assert_eq!(report_use(&mut bench, 30, 12).await, ["job: evict Overuse"]);
    let evictions = &bench.state.metrics.planner.overuse_evictions;
    assert_eq!(evictions.with_label_values(&["written"]).get(), 1);
}

/// One report a second for so long, in which each pod uses 12 GiB of a GPU that nobody gave it, and the writes.
async fn report_ungranted(
    bench: &mut PlannerFixture,
    pods: &[(&str, &str)],
    seconds: u64,
) -> Vec<String> {
    let ungranted = |(namespace, pod): &(&str, &str)| OverGrant {
        pod: uid(pod),
        granted: Bytes::ZERO,
        used: Bytes::gib(12),
        ungranted: PodKey::parse(namespace, pod).ok(),
    };
    let mut written = Vec::new();
    for _ in 0..seconds {
        bench.advance_seconds(1);
        let over_grant = pods.iter().map(ungranted).collect();
        let sampled = bench.state.cluster().ledger().now();
        let reading = NodeReading {
            sampled,
            over_grant,
            ..NodeReading::default()
        }
        .into();
        bench.state.cluster().apply(ReadingReported {
            node: NodeName::parse("n").unwrap(),
            reading,
        });
        written.extend(bench.tick().await);
    }
    written
}

/// Node `n`, where nobody but Stowage gives GPUs, and another one.
fn with_ungranted(policy: Policy, pods: Vec<Value>) -> PlannerFixture {
    let mut bench = PlannerFixture::with_policy(policy, &["n", "other"]);
    let labels = |label: &str| Arc::new([(label.to_owned(), String::new())].into());
    let namespaces = [
        ("default", "any"),
        ("kube-system", "any"),
        ("monitoring", "stowage.dev/all-gpus"),
    ];
    let namespaces = namespaces.map(|(name, label)| (name.to_owned(), labels(label)));
    bench.state.record_namespaces(namespaces.into());
    pods.into_iter().for_each(|pod| bench.show(pod));
    bench
}

/// A pod that runs there, and requests this.
fn requesting(limits: Value, namespace: &str, name: &str, node: &str) -> Value {
    let mut pod = bound(name, node, 1, 0);
    pod["metadata"]["namespace"] = json!(namespace);
    pod["metadata"]["annotations"] = json!({});
    pod["spec"]["containers"][0]["resources"] = json!({ "limits": limits });
    pod
}

#[tokio::test]
async fn pods_that_were_given_no_gpu_are_evicted_if_the_policy_says_so() {
    let mut policy = Policy::default();
    policy.ungranted = OveruseRule::Evict;
    policy.preemption.evictions_per_minute.node = 1;
    let plain =
        |namespace: &str, name: &str, node: &str| requesting(json!({}), namespace, name, node);
    let both = [("default", "ghost"), ("default", "spook")];
    let pods = both.map(|(namespace, name)| plain(namespace, name, "n"));
    let mut bench = with_ungranted(policy.clone(), pods.into());
    // What an agent claims of pods that are not there counts within no rate.
    let told = [
        &[("default", "elsewhere"), ("default", "nobody")],
        &both[..],
    ]
    .concat();
    bench.show(plain("default", "elsewhere", "other"));
    assert_eq!(
        report_ungranted(&mut bench, &told, 119).await,
        Vec::<String>::new()
    );
    assert_eq!(
        report_ungranted(&mut bench, &told, 50).await,
        ["ghost: evict Ungranted"],
        "as the rate allows"
    );
    assert_eq!(
        report_ungranted(&mut bench, &told, 30).await,
        ["spook: evict Ungranted"]
    );
    assert_eq!(
        report_ungranted(&mut bench, &told, 300).await,
        Vec::<String>::new(),
        "they may be leaving"
    );
    assert_eq!(
        bench.recorder.event_reasons(),
        Vec::<String>::new(),
        "agents' reports have told it already"
    );
}

#[tokio::test]
async fn pods_that_may_have_gpus_are_not_evicted_for_it() {
    let mut policy = Policy::default();
    policy.ungranted = OveruseRule::Evict;
    let cases = [
        (
            "by default",
            Policy::default(),
            requesting(json!({}), "default", "ghost", "n"),
        ),
        (
            "of another node",
            policy.clone(),
            requesting(json!({}), "default", "ghost", "other"),
        ),
        ("with a grant", policy.clone(), bound("ghost", "n", 10, 0)),
        // Its plugin may be restarting: until it is back, the node's GPUs are only Stowage's.
        (
            "of a plugin",
            policy.clone(),
            requesting(json!({ "nvidia.com/gpu": "1" }), "default", "ghost", "n"),
        ),
        (
            "of an administrator",
            policy.clone(),
            requesting(json!({}), "monitoring", "ghost", "n"),
        ),
        (
            "of the system",
            policy.clone(),
            requesting(json!({}), "kube-system", "ghost", "n"),
        ),
        (
            "of a namespace whose labels are not known",
            policy,
            requesting(json!({}), "new", "ghost", "n"),
        ),
    ];
    for (which, policy, pod) in cases {
        let namespace = pod["metadata"]["namespace"].as_str().unwrap().to_owned();
        let mut bench = with_ungranted(policy, vec![pod]);
        assert_eq!(
            report_ungranted(&mut bench, &[(&namespace, "ghost")], 200).await,
            [""; 0],
            "{which}"
        );
    }
}

#[tokio::test]
async fn by_default_a_pod_over_its_grant_is_not_evicted() {
    let mut bench = overusing(Policy::default());
    assert_eq!(report_use(&mut bench, 200, 12).await, Vec::<String>::new());
}

#[tokio::test]
async fn an_eviction_for_overuse_that_a_budget_refuses_is_tried_again_and_taken_back_when_the_pod_keeps_to_its_grant()
 {
    let mut bench = overusing(evicting_overuse());
    refuse_for_now(&bench, "job");
    let tried = report_use(&mut bench, 250, 12).await;
    assert_eq!(
        tried,
        [
            "job: evict Overuse",
            "job: evict Overuse",
            "job: evict Overuse"
        ]
    );
    assert_eq!(report_use(&mut bench, 15, 8).await, ["job: stays"]);
    assert_eq!(report_use(&mut bench, 100, 8).await, Vec::<String>::new());
}

#[tokio::test]
async fn an_eviction_for_overuse_that_waits_to_be_sent_is_dropped_if_the_policy_only_reports_by_then()
 {
    let mut shadow = evicting_overuse();
    shadow.mode = Mode::Shadow;
    for policy in [Policy::default(), shadow] {
        let mut bench = overusing(evicting_overuse());
        assert_eq!(report_use(&mut bench, 119, 12).await, Vec::<String>::new());
        for _ in 0..5 {
            bench.advance_seconds(1);
            report_overuse(&bench, 12);
            bench.begin_tick();
            if bench.planner.control_loop.is_writing() {
                break;
            }
        }
        assert!(
            bench.planner.control_loop.is_writing(),
            "it is to be evicted now"
        );
        bench.state.set_policy(policy);
        assert_eq!(bench.settle().await, Vec::<String>::new());
    }
}

fn evictions(written: &[String]) -> Vec<&String> {
    written
        .iter()
        .filter(|write| write.contains("evict"))
        .collect()
}

/// The eviction of a job waits to be sent, for the reservation of a pod with a higher priority.
async fn waiting_to_evict() -> PlannerFixture {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    bench.begin_tick();
    bench
}

#[tokio::test]
async fn an_eviction_that_waits_to_be_sent_is_dropped_once_its_reservation_has_ended() {
    let ends: [fn(&mut PlannerFixture); 3] = [
        |bench| bench.delete("serving"),
        |bench| bench.advance_seconds(300),
        |bench| {
            bench
                .state
                .cluster()
                .apply(ReleaseReservation(uid("serving")))
        },
    ];
    for end in ends {
        let mut bench = waiting_to_evict().await;
        end(&mut bench);
        assert_eq!(evictions(&bench.settle().await), Vec::<&String>::new());
    }
}

#[tokio::test]
async fn an_eviction_that_waits_to_be_sent_is_dropped_in_shadow_mode_and_sent_after_it() {
    let mut bench = waiting_to_evict().await;
    let mut shadow = Policy::default();
    shadow.mode = Mode::Shadow;
    bench.state.set_policy(shadow);
    assert_eq!(bench.settle().await, Vec::<String>::new());
    bench.state.set_policy(Policy::default());
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
}

#[tokio::test]
async fn an_eviction_that_waits_to_be_sent_is_dropped_if_the_policy_protects_the_pod_by_then() {
    let mut bench = waiting_to_evict().await;
    let mut classes = built_in_classes();
    classes
        .iter_mut()
        .for_each(|class| class.eviction = Preemptibility::Never);
    bench
        .state
        .set_policy(Policy::default().with_classes(classes).unwrap());
    assert_eq!(bench.settle().await, Vec::<String>::new());
    let written = bench.tick().await;
    assert!(
        written.contains(&"serving: end hold, clear nomination".to_owned()),
        "{written:?}"
    );
    assert_eq!(evictions(&written), Vec::<&String>::new());
}

#[tokio::test]
async fn the_eviction_of_a_neighbor_that_waits_to_be_sent_is_dropped_once_the_pressure_is_over() {
    let mut bench = pressed(Policy::default());
    for _ in 0..6 {
        bench.advance_seconds(2);
        report_pressure(&bench);
        bench.begin_tick();
        bench.finish_pressure_check().await;
        if bench.planner.control_loop.is_writing() {
            break;
        }
    }
    assert!(
        bench.planner.control_loop.is_writing(),
        "a neighbor is to be evicted now"
    );
    bench.advance_seconds(1);
    report_load(&bench, 10);
    assert_eq!(bench.settle().await, Vec::<String>::new());
    assert_eq!(
        press(&mut bench).await,
        ["small: evict EnginePressure"],
        "the pressure is back, and the pod can be evicted"
    );
}

#[tokio::test]
async fn no_neighbor_is_evicted_for_a_stale_pressure_reading() {
    let mut bench = pressed(Policy::default());
    report_pressure(&bench);
    let is_due = |bench: &PlannerFixture| {
        is_relief_due(
            bench.state.cluster().ledger(),
            &uid("small"),
            &GpuUuid::from_index(0),
        )
    };
    assert!(is_due(&bench));
    bench.advance_seconds(300);
    assert!(!is_due(&bench));
    report_pressure(&bench);
    assert!(is_due(&bench));
}

#[tokio::test]
async fn the_eviction_of_an_orphaned_member_that_waits_to_be_sent_is_dropped_once_its_group_is_whole()
 {
    let mut bench = broken_pair(EvictionRates::default()).await;
    bench.advance_seconds(31);
    bench.begin_tick();
    bench.show(of_a_pair("b", bound("b", "n", 50, 100)));
    assert_eq!(evictions_of("a", &bench.settle().await), 0);
}

#[tokio::test]
async fn a_pod_that_the_policy_does_not_evict_any_more_for_overuse_is_told_that_it_stays() {
    let mut bench = overusing(evicting_overuse());
    refuse_for_now(&bench, "job");
    assert_eq!(
        report_use(&mut bench, 130, 12).await,
        ["job: evict Overuse"]
    );
    bench.state.set_policy(Policy::default());
    assert_eq!(report_use(&mut bench, 15, 12).await, ["job: stays"]);
}
