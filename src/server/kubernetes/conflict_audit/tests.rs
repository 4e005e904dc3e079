//! What a replica reports of conflicts and what it does about them, by whether it leads and by the policy.

use super::*;
use crate::kubernetes::ClusterIndex;
use crate::kubernetes::testing::Recorder;
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use serde_json::json;
use std::panic::{AssertUnwindSafe, catch_unwind};
use stowage_scheduling::audit::conflicts::OverAllocationKind;
use stowage_scheduling::policy::Policy;

fn policy_with(rule: ConflictRule) -> Policy {
    let mut policy = Policy::default();
    policy.conflicts = rule;
    policy
}

fn node() -> Node {
    let labels = json!({
        "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
    });
    serde_json::from_value(json!({ "metadata": { "name": "n", "labels": labels } })).unwrap()
}

/// A pod on the node's one GPU, 60 GiB of 80.
fn pod(name: &str, phase: &str) -> Pod {
    let resources = json!({ "limits": { "stowage.dev/vram": "60Gi" } });
    let annotations = json!({
        "stowage.dev/devices": "index-0", "stowage.dev/gpu-memory-fraction": "0.75",
        "stowage.dev/vram-granted": (60u64 << 30).to_string(),
    });
    let pod = json!({
        "metadata": { "name": name, "uid": name, "annotations": annotations },
        "spec": { "nodeName": "n", "containers": [{ "name": "engine", "resources": resources }] },
        "status": { "phase": phase },
    });
    serde_json::from_value(pod).unwrap()
}

struct AuditFixture {
    audit: AllocationAudit,
    recorder: Arc<Recorder>,
    index: Arc<Mutex<ClusterIndex>>,
    now: Moment,
}

impl AuditFixture {
    fn with(rule: ConflictRule) -> Self {
        let state = ServerState::with_stopped_clock(policy_with(rule));
        let mut index = ClusterIndex::default();
        index.replace_nodes(&state, &[node()]);
        index.replace_pods(&state, &[]);
        state.record_synced(0, 0);
        let recorder = Arc::new(Recorder::default());
        let now = state.now();
        let (audit, index) = (
            AllocationAudit::new(state, recorder.clone()),
            Arc::new(Mutex::new(index)),
        );
        Self {
            audit,
            recorder,
            index,
            now,
        }
    }

    fn lead(&self) {
        self.audit.state.lead_from_the_start();
    }

    fn show(&mut self, name: &str, phase: &str) {
        self.index
            .lock()
            .apply_pod(&self.audit.state, &pod(name, phase));
        let record = FreshPod {
            uid: PodUid::parse(name).unwrap(),
            node: Some(NodeName::parse("n").unwrap()),
            devices: None,
            has_started: false,
            is_over: false,
            borrows: false,
            refusal: None,
        };
        self.recorder
            .pods_on_record
            .lock()
            .insert(name.into(), record);
    }

    /// Audits so many times, a second apart, and waits for the evictions.
    async fn run_rounds(&mut self, rounds: u64) {
        for _ in 0..rounds {
            self.now = self.now + Millis::seconds(1);
            let round = audit_due_nodes(&self.audit.state, self.now);
            self.audit.tick(round, self.now);
            while let Some(done) = self.audit.evictions.join_next().await {
                let (leaver, outcome) = done.unwrap();
                self.audit.record_outcome(&leaver, &outcome, self.now);
            }
        }
    }

    fn evictions(&self, outcome: &str) -> u64 {
        self.audit
            .state
            .metrics
            .over_allocations
            .evictions
            .with_label_values(&[outcome])
            .get()
    }
}

#[tokio::test]
async fn a_standby_only_counts_conflicts_and_reports_the_current_ones_when_it_leads() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.run_rounds(5).await;
    let text = bench.audit.state.metrics.render();
    assert!(
        text.contains("stowage_gpu_conflicts{kind=\"overcommitted\"} 1\n"),
        "{text}"
    );
    assert!(bench.recorder.event_reasons().is_empty() && bench.recorder.written().is_empty());
    bench.lead();
    bench.run_rounds(1).await;
    assert_eq!(
        bench.recorder.event_reasons(),
        ["StowageGpuConflict", "StowageGpuConflict"]
    );
    assert_eq!(bench.recorder.written(), ["b: evict GpuConflict"]);
    bench.run_rounds(1).await;
    assert!(bench.recorder.event_reasons().is_empty(), "it is told once");
    assert_eq!(bench.evictions("written"), 1);
}

#[tokio::test]
async fn no_pod_is_evicted_if_the_policy_only_reports_or_is_in_shadow_mode() {
    let mut bench = AuditFixture::with(ConflictRule::Report);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.run_rounds(5).await;
    assert_eq!(bench.recorder.event_reasons().len(), 2);
    assert!(bench.recorder.written().is_empty());
    let mut policy = policy_with(ConflictRule::EvictUnstarted);
    policy.mode = Mode::Shadow;
    bench.audit.state.set_policy(policy);
    bench.run_rounds(5).await;
    assert!(bench.recorder.written().is_empty());
}

#[tokio::test]
async fn an_eviction_that_fails_is_tried_again_after_a_pause_that_grows() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench
        .recorder
        .eviction_outcomes
        .lock()
        .insert("b".into(), EvictionOutcome::TryLater { after: None });
    bench.run_rounds(3).await;
    assert_eq!(bench.evictions("later"), 1);
    bench.run_rounds(19).await;
    assert_eq!(bench.evictions("later"), 1);
    bench.run_rounds(1).await;
    assert_eq!(bench.evictions("later"), 2);
    bench.run_rounds(39).await;
    assert_eq!(bench.evictions("later"), 2);
    bench.run_rounds(1).await;
    assert_eq!(bench.evictions("later"), 3);
}

#[tokio::test]
async fn no_pod_is_evicted_for_a_pod_that_a_fresh_read_does_not_show() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.recorder.pods_on_record.lock().remove("a");
    bench.run_rounds(5).await;
    assert!(bench.recorder.written().is_empty());
    assert_eq!(bench.evictions("over"), 1);
}

#[tokio::test]
async fn a_limit_of_evictions_is_no_failure_and_is_reported_once() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    let mut policy = policy_with(ConflictRule::EvictUnstarted);
    policy.preemption.evictions_per_minute.node = 0;
    bench.audit.state.set_policy(policy);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.run_rounds(200).await;
    assert_eq!(
        (bench.recorder.written(), bench.evictions("rate-limited")),
        (vec![], 1)
    );
    bench
        .audit
        .state
        .set_policy(policy_with(ConflictRule::EvictUnstarted));
    bench.run_rounds(2).await;
    assert_eq!(
        bench.recorder.written(),
        ["b: evict GpuConflict"],
        "as soon as the limit allows it"
    );
}

#[tokio::test]
async fn a_pod_that_has_ended_is_in_no_conflict() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.show("b", "Failed");
    bench.run_rounds(5).await;
    assert!(bench.recorder.event_reasons().is_empty());
    bench.show("c", "Running");
    bench.run_rounds(5).await;
    assert_eq!(bench.recorder.event_reasons().len(), 2);
    bench.show("a", "Succeeded");
    bench.run_rounds(1).await;
    assert_eq!(bench.audit.state.over_allocations().confirmed().count(), 0);
}

#[tokio::test]
async fn the_queue_of_reports_is_limited_and_dropped_ones_are_counted() {
    let mut bench = AuditFixture::with(ConflictRule::Report);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Running");
    bench.run_rounds(3).await;
    let over_allocation = bench
        .audit
        .state
        .over_allocations()
        .confirmed()
        .next()
        .unwrap()
        .clone();
    bench
        .audit
        .queue_reports(vec![over_allocation; MAX_UNREPORTED + 5]);
    assert_eq!(bench.audit.unreported.len(), MAX_UNREPORTED);
    let events = &bench.audit.state.metrics.events;
    assert_eq!(
        events
            .with_label_values(&["StowageGpuConflict", "dropped"])
            .get(),
        10
    );
    bench.recorder.event_reasons();
    bench.audit.record_events();
    assert_eq!(
        bench.recorder.event_reasons().len(),
        2 * MAX_REPORTS_PER_ROUND
    );
}

/// What becomes of the eviction of `b`, which is in conflict with `a`, after `change` to what reads of both show.
async fn evicted_after(change: impl FnOnce(&mut BTreeMap<String, FreshPod>)) -> (Vec<String>, u64) {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    change(&mut bench.recorder.pods_on_record.lock());
    bench.run_rounds(5).await;
    (bench.recorder.written(), bench.evictions("over"))
}

/// The watch that shows them there may be silent.
#[tokio::test]
async fn a_victim_is_evicted_only_if_fresh_reads_confirm_the_over_allocation() {
    let (written, over) = evicted_after(|_| ()).await;
    assert_eq!(
        (written.as_slice(), over),
        (["b: evict GpuConflict".to_owned()].as_slice(), 0)
    );
    for name in ["a", "b"] {
        let on_another = |record: &mut FreshPod| record.node = Some(NodeName::parse("m").unwrap());
        let unbound = |record: &mut FreshPod| record.node = None;
        let recreated = |record: &mut FreshPod| record.uid = PodUid::parse("recreated").unwrap();
        let over = |record: &mut FreshPod| record.is_over = true;
        let changes: [fn(&mut FreshPod); 4] = [on_another, unbound, recreated, over];
        for change in changes {
            let (written, over) =
                evicted_after(|records| change(records.get_mut(name).unwrap())).await;
            assert!(written.is_empty() && over > 0, "{name}: {written:?}");
        }
        let (written, over) = evicted_after(|records| drop(records.remove(name))).await;
        assert!(written.is_empty() && over > 0, "{name}: {written:?}");
    }
    let (written, over) =
        evicted_after(|records| records.get_mut("b").unwrap().has_started = true).await;
    assert!(written.is_empty() && over > 0, "{written:?}");
}

#[tokio::test]
async fn no_victim_is_evicted_while_the_pods_cannot_be_read() {
    let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
    bench.lead();
    bench.show("a", "Running");
    bench.show("b", "Pending");
    *bench.recorder.is_unreachable.lock() = true;
    bench.run_rounds(5).await;
    assert!(bench.recorder.written().is_empty() && bench.evictions("unknown") > 0);
    *bench.recorder.is_unreachable.lock() = false;
    bench.run_rounds(60).await;
    assert!(
        bench
            .recorder
            .written()
            .contains(&"b: evict GpuConflict".to_owned())
    );
}

#[tokio::test]
async fn a_pod_that_was_deleted_while_the_ledger_was_discarded_is_in_no_conflict_any_more() {
    let mut bench = AuditFixture::with(ConflictRule::Report);
    bench.show("a", "Running");
    bench.show("b", "Pending");
    bench.run_rounds(5).await;
    let count = |bench: &AuditFixture| {
        bench
            .audit
            .state
            .over_allocations()
            .count(OverAllocationKind::Overcommitted)
    };
    assert_eq!(count(&bench), 1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _cluster = bench.audit.state.cluster();
        panic!("in the middle of a change");
    }));
    assert!(panicked.is_err());
    {
        let mut index = bench.index.lock();
        index.replace_nodes(&bench.audit.state, &[node()]);
        index.replace_pods(&bench.audit.state, &[pod("a", "Running")]);
    }
    bench.run_rounds(5).await;
    assert_eq!(count(&bench), 0);
}

/// The API server may take long, and a second write follows a conflicting one.
#[tokio::test]
async fn a_victim_stays_if_it_starts_or_the_policy_changes_while_its_condition_is_written() {
    type Happens = fn(&ServerState, &mut ClusterIndex);
    let reports: Happens = |state, _| {
        state.set_policy(policy_with(ConflictRule::Report));
    };
    let in_shadow: Happens = |state, _| {
        let mut policy = policy_with(ConflictRule::EvictUnstarted);
        policy.mode = Mode::Shadow;
        state.set_policy(policy);
    };
    let starts: Happens = |state, index| {
        index.apply_pod(state, &pod("b", "Running"));
    };
    // No fresh read shows the pod that it would leave for now.
    let the_other_goes: Happens = |state, index| {
        let victims = state
            .over_allocations()
            .victims(state.now() + Millis::seconds(60));
        index.delete_pod(state, &pod(&victims[0].remaining_pod.name, "Running"));
    };
    for (at, change) in [reports, in_shadow, starts, the_other_goes]
        .into_iter()
        .enumerate()
    {
        let mut bench = AuditFixture::with(ConflictRule::EvictUnstarted);
        bench.lead();
        bench.show("a", "Running");
        bench.show("b", "Pending");
        bench.show("c", "Running");
        let (state, index) = (bench.audit.state.clone(), bench.index.clone());
        let happens = move || change(&state, &mut index.lock());
        *bench.recorder.during_next_eviction.lock() = Some(Box::new(happens));
        bench.run_rounds(5).await;
        assert!(bench.recorder.written().is_empty(), "{at}");
        assert_eq!(bench.evictions("called-off"), 1, "{at}");
    }
}
