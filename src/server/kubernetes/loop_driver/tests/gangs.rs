//! Pods that Kueue manages, and groups that other projects' keys name: PodGroups of Kubernetes and LeaderWorkerSets.

use super::*;
use stowage_policy_file::{self as policy_file, SourceText};
use stowage_scheduling::kube_filters::Requirements;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingFailed;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};
use stowage_scheduling::verbs::preempt::{OfferedNode, PreemptAsked, PreemptDecision, preempt};
use stowage_scheduling::verbs::request::VerbRequest;

fn policy_of(text: &str) -> Policy {
    policy_file::load(&[SourceText::new(
        "policy.yaml",
        format!("kind: SchedulingPolicy\n{text}"),
    )])
    .expect("the policy is sound")
    .policy
}

/// A replica of a Job that Kueue has admitted, on the only GPU of a node.
fn in_admitted_job(name: &str, node: &str, job: &str) -> Value {
    let mut pod = bound(name, node, 60, -10);
    pod["metadata"]["labels"] =
        json!({ "kueue.x-k8s.io/podset": "main", "batch.kubernetes.io/job-name": job });
    pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] = json!(format!("job-{job}"));
    pod
}

fn evicting_kueues_pods(nodes: &[&str]) -> PlannerFixture {
    PlannerFixture::with_policy(policy_of("preemption: {kueue: evict-pods}"), nodes)
}

/// Evictions that were written, in order of name.
fn evicted(written: &[String]) -> Vec<&str> {
    let mut names: Vec<&str> = written
        .iter()
        .filter_map(|write| write.split_once(": evict"))
        .map(|(name, _)| name)
        .collect();
    names.sort_unstable();
    names
}

#[tokio::test]
async fn a_pod_of_an_admitted_workload_is_evicted_where_the_policy_says_so() {
    let mut bench = evicting_kueues_pods(&["n"]);
    bench.show(in_admitted_job("train-0", "n", "train"));
    bench.show(gated("serving", 50, 100));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    assert_eq!(bench.tick().await, ["train-0: evict Preempted"]);
}

#[tokio::test]
async fn by_default_no_pod_that_kueue_manages_is_evicted() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(in_admitted_job("train-0", "n", "train"));
    bench.show(gated("serving", 50, 100));
    assert!(bench.tick().await.is_empty());
}

#[tokio::test]
async fn a_workload_of_kueue_is_evicted_whole_or_not_at_all() {
    let mut bench = evicting_kueues_pods(&["n", "m", "o"]);
    bench.show(in_admitted_job("train-0", "n", "train"));
    bench.show(in_admitted_job("train-1", "m", "train"));
    bench.show(in_admitted_job("other-0", "o", "other"));
    bench.show(gated("serving", 50, 100));
    assert_eq!(
        bench.tick().await,
        ["serving: hold o, making room"],
        "one pod restarts, not two"
    );
    assert_eq!(bench.tick().await, ["other-0: evict Preempted"]);
    bench.delete("other-0");
    bench.tick().await;
    bench.show(gated("second", 50, 100));
    bench.tick().await;
    assert_eq!(evicted(&bench.tick().await), ["train-0", "train-1"]);
}

#[tokio::test]
async fn an_ended_pod_that_kueues_finalizer_keeps_is_neither_waited_for_nor_evicted_again() {
    let mut bench = evicting_kueues_pods(&["n"]);
    bench.show(in_admitted_job("train-0", "n", "train"));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    assert_eq!(evicted(&bench.tick().await), ["train-0"]);
    let mut ended = bench.pod("train-0");
    ended["metadata"]["finalizers"] = json!(["kueue.x-k8s.io/managed"]);
    ended["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    ended["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    ended["status"]["phase"] = json!("Failed");
    bench.show(ended.clone());
    assert_eq!(
        bench.tick().await,
        ["serving: nominate n, placed", "serving: lift"]
    );
    // It shows itself again while the finalizer keeps it, and another pod looks for room.
    bench.show(ended);
    bench.show(gated("second", 50, 200));
    for _ in 0..3 {
        bench.advance_seconds(2);
        assert_eq!(evicted(&bench.tick().await), Vec::<&str>::new());
    }
}

fn in_pod_group(mut pod: Value, group: &str) -> Value {
    pod["spec"]["schedulingGroup"] = json!({ "podGroupName": group });
    pod
}

#[tokio::test]
async fn a_pod_group_of_kubernetes_is_never_evicted_in_part() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(in_pod_group(bound("a", "n", 60, -10), "train"));
    bench.show(in_pod_group(bound("b", "m", 60, -10), "train"));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    assert_eq!(evicted(&bench.tick().await), ["a", "b"]);
}

#[tokio::test]
async fn a_pod_group_of_kubernetes_with_a_protected_member_stays() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(in_pod_group(bound("a", "n", 60, -10), "train"));
    bench.show(in_pod_group(bound("b", "m", 60, 1000), "train"));
    bench.show(gated("serving", 50, 100));
    assert!(bench.tick().await.is_empty());
}

/// A pod of a LeaderWorkerSet group that kube-scheduler has asked about, without the planner's gate.
fn refused_worker(bench: &mut PlannerFixture, name: &str, size: u32) {
    let mut pod = waiting(name, 50, 100);
    pod["metadata"]["labels"] = json!({
        "leaderworkerset.sigs.k8s.io/name": "llama", "leaderworkerset.sigs.k8s.io/group-index": "0",
    });
    pod["metadata"]["annotations"] =
        json!({ "leaderworkerset.sigs.k8s.io/size": size.to_string() });
    bench.show(pod);
    let answer = FilterAnswer::Refused {
        queried_nodes: None,
    };
    bench.state.cluster().apply(FilterDecided {
        uid: uid(name),
        answer,
    });
}

#[tokio::test]
async fn no_pod_is_evicted_for_a_part_of_a_leader_worker_set_group() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(bound("chat", "m", 60, 1000));
    refused_worker(&mut bench, "leader", 2);
    refused_worker(&mut bench, "worker", 2);
    for _ in 0..5 {
        bench.advance_seconds(2);
        assert_eq!(bench.tick().await, Vec::<String>::new());
    }
}

#[tokio::test]
async fn a_leader_worker_set_group_without_the_gate_is_placed_as_a_whole() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(bound("job", "n", 60, -10));
    refused_worker(&mut bench, "leader", 2);
    bench.advance_seconds(2);
    assert_eq!(
        bench.tick().await,
        Vec::<String>::new(),
        "its worker is not there yet"
    );
    refused_worker(&mut bench, "worker", 2);
    let mut written = Vec::new();
    for _ in 0..4 {
        bench.advance_seconds(2);
        written.extend(bench.tick().await);
    }
    assert_eq!(evicted(&written), ["job"]);
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 2);
}

#[tokio::test]
async fn a_leader_without_workers_is_placed_alone_after_the_longest_gated_time() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    refused_worker(&mut bench, "leader", 2);
    bench.advance_seconds(2);
    assert_eq!(bench.tick().await, Vec::<String>::new());
    let mut written = Vec::new();
    for _ in 0..20 {
        bench.advance_seconds(2);
        written.extend(bench.tick().await);
    }
    assert_eq!(evicted(&written), ["job"]);
}

#[tokio::test]
async fn kube_scheduler_preempts_no_pod_for_a_part_of_a_leader_worker_set_group() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    refused_worker(&mut bench, "leader", 2);
    bench.show(waiting("single", 50, 100));
    let asked = |name: &str| {
        let demand = bench
            .state
            .cluster()
            .ledger()
            .pod_state(&uid(name))
            .unwrap()
            .demand
            .clone();
        let key = stowage_scheduling::ids::PodKey::parse("default", name).unwrap();
        let request = VerbRequest {
            uid: uid(name),
            key,
            demand,
            waiting: ObservedWaiting::default(),
            disruption: None,
        };
        let offered = vec![OfferedNode {
            node: "n".into(),
            victims: vec!["uid-job".into()],
            pdb_violations: 0,
        }];
        let wants = Requirements::default();
        let (_, view) = bench
            .state
            .cluster()
            .apply(PreemptAsked {
                request,
                wants,
                offered,
            })
            .unwrap();
        preempt(view)
    };
    assert_eq!(asked("leader"), PreemptDecision::NoCandidate);
    assert!(matches!(asked("single"), PreemptDecision::Evict { .. }));
}

#[tokio::test]
async fn a_member_whose_binding_is_under_way_leaves_with_its_group_once_it_is_bound() {
    let mut bench = PlannerFixture::with_policy(
        policy_of("planning: {groups: {whenIncomplete: evict}}"),
        &["n", "m"],
    );
    bench.show(member("a", 50, "pair", 2));
    bench.show(member("b", 50, "pair", 2));
    bench.tick().await;
    let node = bench
        .state
        .cluster()
        .ledger()
        .reservation_status_of(&uid("a"))
        .unwrap()
        .reservation
        .node;
    let asked = BindAsked {
        uid: uid("a"),
        key: stowage_scheduling::ids::PodKey::parse("default", "a").unwrap(),
        node,
    };
    let node = asked.node.clone();
    bench.state.cluster().apply(asked).unwrap();
    bench.advance_seconds(120);
    bench.tick().await;
    assert!(
        bench
            .recorder
            .event_reasons()
            .contains(&"StowageGroupFailed")
    );
    bench.show(bound("a", node.as_str(), 50, 100));
    let mut late = bench.pod("a");
    late["metadata"]["labels"]["stowage.dev/group"] = json!("pair");
    late["metadata"]["annotations"]["stowage.dev/group-min"] = json!("2");
    bench.show(late);
    assert_eq!(evicted(&bench.tick().await), ["a"]);
}

#[tokio::test]
async fn a_member_whose_binding_fails_after_its_group_gives_its_reservation_back() {
    let mut bench = PlannerFixture::with_policy(
        policy_of("planning: {groups: {whenIncomplete: evict}}"),
        &["n", "m"],
    );
    bench.show(bound("job", "n", 60, -10));
    bench.show(member("a", 50, "pair", 2));
    bench.show(member("b", 50, "pair", 2));
    let refused = EvictionOutcome::Refused {
        message: "forbidden".into(),
    };
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("job".into(), refused);
    bench.tick().await;
    let free = bench.state.cluster().ledger().reservation_statuses();
    let free = free
        .into_iter()
        .find(|one| one.reservation.victims.is_empty())
        .unwrap();
    let asked = BindAsked {
        uid: free.uid.clone(),
        key: free.key,
        node: free.reservation.node,
    };
    bench.state.cluster().apply(asked).unwrap();
    bench.tick().await;
    assert!(
        bench
            .recorder
            .event_reasons()
            .contains(&"StowageGroupFailed")
    );
    bench.state.cluster().apply(BindingFailed(free.uid));
    assert_eq!(
        bench.state.cluster().ledger().totals().reservations,
        1,
        "it has what it had"
    );
    bench.begin_tick();
    assert_eq!(bench.state.cluster().ledger().totals().reservations, 0);
}
