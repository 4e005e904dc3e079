//! The planner's acts, one tick at a time, against a control plane that records each call.

mod deadlines;
mod evictions;
mod gangs;
mod gates;
mod limits;
mod reservations_observed;
mod runs;
mod told;
mod volumes;

use super::*;
use crate::kubernetes::index::ClusterIndex;
use crate::kubernetes::objects;
use crate::kubernetes::port::EvictionOutcome;
use crate::kubernetes::testing::Recorder;
use crate::scheduling::policy::Policy;
use crate::scheduling::verbs::filter::{FilterAnswer, FilterAsked, FilterDecided};
use crate::scheduling::verbs::request::VerbRequest;
use crate::scheduling::verbs::tick::Tick;
use crate::scheduling::vocabulary::placement::Reservation;
use crate::service::Tenure;
use crate::units::Millis;
use serde_json::{Value, json};

struct PlannerFixture {
    service: Arc<Service>,
    recorder: Arc<Recorder>,
    index: ClusterIndex,
    planner: Planner,
    pods: Vec<Value>,
}

impl PlannerFixture {
    /// Nodes with one 80 GiB GPU each, of which 72 GiB are allocatable.
    fn new(nodes: &[&str]) -> Self {
        Self::by(Policy::default(), nodes)
    }

    fn by(policy: Policy, nodes: &[&str]) -> Self {
        let service = Service::with_stopped_clock(policy);
        let recorder = Arc::new(Recorder::default());
        let mut index = ClusterIndex::default();
        let nodes = nodes.iter().map(|name| serde_json::from_value(node(name)).unwrap());
        index.reset_nodes(&service, &nodes.collect::<Vec<_>>());
        index.reset_pods(&service, &[]);
        service.lead_from_the_start();
        let planner = Planner::new(service.clone(), recorder.clone());
        Self { service, recorder, index, planner, pods: Vec::new() }
    }

    /// This replica begins to lead, and its lists show this pod as another leader left it.
    fn take_over(&mut self, pod: Value) {
        self.service.set_tenure(Tenure::Standby);
        self.show(pod);
        self.service.lead_from_the_start();
    }

    fn show(&mut self, pod: Value) {
        let read = serde_json::from_value(pod.clone()).unwrap();
        self.index.apply_pod(&self.service, &read);
        self.pods.retain(|known| known["metadata"]["name"] != pod["metadata"]["name"]);
        self.pods.push(pod);
    }

    fn pod(&self, name: &str) -> Value {
        self.pods.iter().find(|pod| pod["metadata"]["name"] == name).unwrap().clone()
    }

    /// kube-scheduler asks about the pod, which the watch need not have shown, and is told that no node fits.
    fn refuse(&mut self, pod: Value) {
        let pod = serde_json::from_value(pod).unwrap();
        let (uid, key) = objects::identity(&pod).unwrap();
        let demand = objects::classified_demand(&pod, |traits| self.service.classify(traits)).unwrap();
        let disruption = Some(objects::disruption(&pod, self.service.clock.wall()));
        let request =
            VerbRequest { uid: uid.clone(), key, demand, waiting: objects::waiting(&pod), disruption };
        let mut cluster = self.service.cluster();
        cluster.apply(FilterAsked(request));
        let snapshot = cluster.snapshot();
        let asked = Some(snapshot.set_of(0..snapshot.nodes().len()));
        cluster.apply(FilterDecided { uid, answer: FilterAnswer::Refused { asked } });
    }

    fn gone(&mut self, name: &str) {
        let pod = serde_json::from_value(self.pod(name)).unwrap();
        self.index.delete_pod(&self.service, &pod);
    }

    /// Advances the clock, which does not advance by itself.
    fn pass(&mut self, seconds: u64) {
        let mut ledger = self.service.cluster();
        let later = ledger.now() + Millis::seconds(seconds);
        let ended = ledger.apply(Tick { now: later, is_leading: true });
        drop(ledger);
        self.planner.end(ended, later);
    }

    fn released(&mut self) {
        let after = self.planner.unplannable_pods_after().cloned();
        let unplannable_pods = self.index.unplannable_pods_after(after.as_ref(), UNPLANNABLE_AT_ONCE);
        self.planner.released(unplannable_pods, self.planner.now());
    }

    /// One tick, without waiting for its writes.
    fn begin_tick(&mut self) {
        self.planner.tick(self.planner.now());
    }

    /// One tick with all that it writes, in words. The watch shows it at once.
    async fn tick(&mut self) -> Vec<String> {
        let mut written = self.tick_unseen().await;
        for line in &written {
            if let Some((name, node)) = nomination(line) {
                self.show_nominated(name, node);
            }
            if !*self.recorder.deaf.lock() {
                self.show_condition(line);
            }
        }
        self.planner.lift_gates(self.planner.now());
        written.extend(self.settle().await);
        written
    }

    /// What is written within so many seconds, a tick in each.
    async fn written_within(&mut self, seconds: u64) -> Vec<String> {
        let mut written = Vec::new();
        for _ in 0..seconds {
            self.pass(1);
            written.extend(self.tick().await);
        }
        written
    }

    /// One tick with all that it writes, of which the watch shows nothing yet.
    async fn tick_unseen(&mut self) -> Vec<String> {
        self.begin_tick();
        self.settle().await
    }

    /// Until the planning run has ended.
    async fn run_ends(&mut self) {
        while !self.planner.run.is_idle() {
            self.planner.go_on().await;
        }
    }

    /// Until the look for pressure has ended. What it orders waits to be sent.
    async fn look_ends(&mut self) {
        while !self.planner.pressure_look.is_idle() {
            self.planner.go_on().await;
        }
    }

    /// What is written until nothing is under way.
    async fn settle(&mut self) -> Vec<String> {
        self.planner.settle().await;
        self.recorder.written()
    }

    fn show_nominated(&mut self, name: &str, node: &str) {
        let mut pod = self.pod(name);
        pod["status"]["nominatedNodeName"] = json!(node);
        self.show(pod);
    }
}

impl PlannerFixture {
    /// The condition that the line is about, if it is about one.
    fn show_condition(&mut self, line: &str) {
        let Some((name, what)) = line.split_once(": ") else { return };
        let condition = if what.starts_with("hold") {
            let Some(written) = self.recorder.reservations.lock().get(name).cloned() else { return };
            let Reservation { node, devices, victims, deadline } = written;
            // The service's clock stands still, and is what deadlines are read by.
            let left = deadline.since(self.service.now());
            let deadline = jiff::Timestamp::now() + jiff::SignedDuration::from_millis(left.0 as i64);
            reserved(&json!({ "node": node, "devices": devices, "victims": victims, "deadline": deadline }))
        } else if what.starts_with("end hold") {
            json!({ "type": "stowage.dev/Reserved", "status": "False" })
        } else if what.starts_with("evict") {
            evicted("True")
        } else if what == "stays" {
            evicted("False")
        } else {
            return;
        };
        // Some tests forget the pods that they show.
        let Some(mut pod) = self.pods.iter().find(|pod| pod["metadata"]["name"] == name).cloned() else {
            return;
        };
        let mut conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.retain(|known| known["type"] != condition["type"]);
        conditions.push(condition);
        pod["status"]["conditions"] = conditions.into();
        self.show(pod);
    }
}

fn reserved(message: &Value) -> Value {
    json!({ "type": "stowage.dev/Reserved", "status": "True", "message": message.to_string() })
}

fn evicted(status: &str) -> Value {
    json!({ "type": "stowage.dev/DisruptionTarget", "status": status })
}

/// The pod and the node, if the line is about a nomination.
fn nomination(line: &str) -> Option<(&str, &str)> {
    let (name, what) = line.split_once(": ")?;
    let (_, node) = what.split_once("nominate ")?;
    Some((name, node.split(',').next()?))
}

fn node(name: &str) -> Value {
    let labels = json!({
        "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
    });
    let allocatable = json!({ "cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "72Gi" });
    json!({ "metadata": { "name": name, "labels": labels }, "status": { "allocatable": allocatable } })
}

/// A condition that reserves the node's only GPU for so long from now on, as the API server shows it.
fn reservation_observed(victims: &[&str], seconds: i64) -> Value {
    reservation_until(
        victims,
        &(jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds)).to_string(),
    )
}

fn reservation_until(victims: &[&str], deadline: &str) -> Value {
    let devices = [crate::ids::GpuUuid::from_index(0)];
    let message = json!({ "node": "n", "devices": devices, "victims": victims, "deadline": deadline });
    json!([reserved(&message)])
}

fn uid(name: &str) -> PodUid {
    PodUid::parse(&format!("uid-{name}")).unwrap()
}

fn waiting(name: &str, gib: u64, priority: i32) -> Value {
    let resources = json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") } });
    json!({
        "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "labels": {} },
        "spec": {
            "schedulerName": "stowage", "priority": priority,
            "containers": [{ "name": "engine", "resources": resources }],
        },
        "status": {},
    })
}

fn gated(name: &str, gib: u64, priority: i32) -> Value {
    let mut pod = waiting(name, gib, priority);
    pod["spec"]["schedulingGates"] = json!([{ "name": "stowage.dev/plan" }]);
    pod
}

fn bound(name: &str, node: &str, gib: u64, priority: i32) -> Value {
    let mut pod = waiting(name, gib, priority);
    pod["spec"]["nodeName"] = json!(node);
    pod["metadata"]["annotations"] =
        json!({ "stowage.dev/devices": "0", "stowage.dev/vram-granted": (gib << 30).to_string() });
    let devices = crate::ids::GpuUuid::from_index(0);
    pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(devices.as_str());
    pod
}

fn member(name: &str, gib: u64, group: &str, size: u32) -> Value {
    let mut pod = gated(name, gib, 100);
    pod["metadata"]["labels"]["stowage.dev/group"] = json!(group);
    pod["metadata"]["annotations"] = json!({ "stowage.dev/group-min": size.to_string() });
    pod
}

#[tokio::test]
async fn a_gated_pod_is_nominated_and_let_through() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 40, 0));
    assert_eq!(bench.tick().await, ["a: nominate n, placed", "a: lift"]);
    assert!(bench.tick().await.is_empty(), "the watch will show it");
    assert_eq!(bench.service.cluster().totals().reservations, 1, "the room is its own until it is bound");
}

#[tokio::test]
async fn a_pod_under_another_gate_too_is_left_alone() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 40, 0);
    pod["spec"]["schedulingGates"] = json!([{ "name": "stowage.dev/plan" }, { "name": "quota" }]);
    bench.show(pod);
    assert!(bench.tick().await.is_empty());
    assert_eq!(bench.service.cluster().totals().reservations, 0);
}

#[tokio::test]
async fn victims_are_evicted_once_the_reservation_is_written_and_the_pod_is_nominated_once_they_are_gone() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    assert!(bench.tick().await.is_empty(), "it has been told once");
    let mut leaving = bench.pod("job");
    leaving["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    leaving["metadata"]["deletionGracePeriodSeconds"] = json!(30);
    bench.show(leaving);
    assert!(bench.tick().await.is_empty(), "it takes its time");
    bench.gone("job");
    assert_eq!(bench.tick().await, ["serving: nominate n, placed", "serving: lift"]);
}

#[tokio::test]
async fn a_reservation_that_cannot_be_written_evicts_no_pod() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    *bench.recorder.deaf.lock() = true;
    assert_eq!(bench.tick().await, ["serving: hold n, making room", "serving: end hold, clear nomination"]);
    assert_eq!(bench.service.cluster().totals().reservations, 0);
    assert_eq!(bench.recorder.told(), ["StowageReserved", "StowageReservationEnded"]);
}

#[tokio::test]
async fn an_eviction_that_a_budget_refuses_is_retried_with_back_off() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.recorder.evictions.lock().insert("job".into(), EvictionOutcome::TryLater { after: None });
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    assert!(bench.tick().await.is_empty(), "not at once");
    bench.pass(1);
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    bench.pass(120);
    assert_eq!(bench.service.cluster().totals().reservations, 0, "and not forever");
    let written = bench.tick().await;
    assert!(written.contains(&"serving: end hold".to_owned()), "{written:?}");
}

#[tokio::test]
async fn an_eviction_that_is_refused_for_good_ends_the_reservation_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    let refused = EvictionOutcome::Refused { message: "forbidden".into() };
    bench.recorder.evictions.lock().insert("job".into(), refused);
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted", "serving: end hold, clear nomination"]);
    assert!(bench.written_within(15).await.contains(&"job: stays".to_owned()));
    assert_eq!(bench.service.cluster().totals().reservations, 0);
}

#[tokio::test]
async fn a_nomination_that_the_scheduler_clears_is_restored_three_times_and_no_more() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 40, 0));
    bench.tick().await;
    bench.show(waiting("a", 40, 0));
    let mut restored = 0;
    for _ in 0..20 {
        bench.pass(1);
        // What the scheduler clears at once no watch shows.
        let written = bench.tick_unseen().await;
        restored += written.iter().filter(|write| write.starts_with("a: nominate")).count();
    }
    assert_eq!(restored, 2, "beside the first");
}

#[tokio::test]
async fn a_gated_pod_without_a_place_is_let_through_after_half_a_minute_with_the_reason() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("chat", "n", 60, 1000));
    bench.show(gated("a", 50, 0));
    assert!(bench.tick().await.is_empty());
    bench.pass(31);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
    assert_eq!(bench.recorder.told(), ["StowagePlanFailed"]);
}

#[tokio::test]
async fn a_gated_pod_that_is_not_supported_is_let_through_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 50, 0);
    pod["spec"]["volumes"] = json!([{ "name": "data", "awsElasticBlockStore": { "volumeID": "disk" } }]);
    bench.show(pod);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn the_reservation_of_a_deleted_pod_is_released() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.tick().await;
    bench.gone("a");
    bench.show(gated("b", 50, 0));
    assert_eq!(bench.tick().await, ["b: nominate n, placed", "b: lift"]);
}

#[tokio::test]
async fn two_pods_that_want_one_gpu_do_not_both_get_it() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("first", 50, 100));
    bench.show(gated("second", 50, 100));
    let mut written = bench.tick().await;
    for _ in 0..3 {
        bench.pass(1);
        written.extend(bench.tick().await);
    }
    written.retain(|write| write.contains("hold"));
    assert_eq!(written, ["first: hold n, making room"]);
}

#[tokio::test]
async fn a_group_with_a_member_not_bound_in_time_is_released_with_one_event() {
    let mut bench = PlannerFixture::new(&["n", "m"]);
    bench.show(member("a", 50, "pair", 2));
    bench.show(member("b", 50, "pair", 2));
    let written = bench.tick().await;
    assert_eq!(written.iter().filter(|write| write.ends_with("lift")).count(), 2, "{written:?}");
    for name in ["a", "b"] {
        let mut released = bench.pod(name);
        released["spec"]["schedulingGates"] = Value::Null;
        bench.show(released);
    }
    bench.recorder.told();
    bench.pass(31);
    bench.tick().await;
    assert_eq!(bench.service.cluster().totals().reservations, 0);
    let told = bench.recorder.told();
    assert_eq!(told.iter().filter(|reason| **reason == "StowageGroupFailed").count(), 1, "{told:?}");
}

#[tokio::test]
async fn a_node_that_is_lost_after_the_eviction_leaves_no_reservation() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.tick().await;
    bench.tick().await;
    bench.gone("job");
    bench.index.reset_nodes(&bench.service, &[]);
    let written = bench.tick().await;
    assert!(written.iter().all(|write| !write.contains("nominate")), "{written:?}");
    bench.pass(120);
    assert_eq!(bench.service.cluster().totals().reservations, 0);
}

#[tokio::test]
async fn no_pod_is_evicted_that_would_not_terminate_in_time() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(bound("job", "n", 60, -10));
    bench.show(gated("serving", 50, 100));
    bench.recorder.evictions.lock().insert("job".into(), EvictionOutcome::TryLater { after: None });
    bench.tick().await;
    assert_eq!(bench.tick().await, ["job: evict Preempted"]);
    bench.pass(45);
    bench.recorder.evictions.lock().clear();
    let written = bench.tick().await;
    assert_eq!(written[..1], ["serving: end hold, clear nomination"]);
    assert!(written.iter().all(|write| !write.contains("evict")), "{written:?}");
    assert!(bench.written_within(15).await.contains(&"job: stays".to_owned()));
}

#[tokio::test]
async fn the_gate_of_an_unplannable_pod_is_lifted_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut other = gated("other", 40, 0);
    other["spec"]["containers"][0]["resources"] = json!({});
    let mut unclear = gated("unclear", 40, 0);
    unclear["metadata"]["annotations"] = json!({ "stowage.dev/gpus": "none" });
    bench.show(other.clone());
    bench.show(unclear);
    bench.released();
    let written = bench.tick().await;
    for line in ["other: released", "other: lift", "unclear: released", "unclear: lift"] {
        assert!(written.iter().any(|written| written == line), "{written:?}");
    }
    bench.released();
    assert!(bench.tick().await.is_empty(), "the watch will show it");
    bench.pass(11);
    bench.released();
    assert_eq!(bench.tick().await.len(), 4, "it did not");
    other["spec"]["schedulingGates"] = Value::Null;
    bench.show(other);
    bench.gone("unclear");
    assert!(bench.index.unplannable_pods_after(None, 1).is_empty());
}

#[tokio::test]
async fn b13_each_tick_handles_a_limited_number_of_unplannable_pods_in_turn() {
    let mut bench = PlannerFixture::new(&["n"]);
    for n in 0..UNPLANNABLE_AT_ONCE + 40 {
        let mut unplannable_pod = gated(&format!("unplannable-{n:03}"), 40, 0);
        unplannable_pod["spec"]["containers"][0]["resources"] = json!({});
        bench.show(unplannable_pod);
    }
    let lifted = |written: Vec<String>| written.iter().filter(|write| write.ends_with("lift")).count();
    let mut looks = Vec::new();
    for _ in 0..4 {
        bench.released();
        looks.push(lifted(bench.tick().await));
    }
    assert_eq!(looks, [UNPLANNABLE_AT_ONCE, 40, 0, 0]);
    bench.gone("unplannable-007");
    bench.released();
    assert_eq!(bench.planner.released.known(), UNPLANNABLE_AT_ONCE + 39, "a pod that is gone is forgotten");
}

#[tokio::test]
async fn a_gated_pod_that_asks_a_device_plugin_is_let_through_at_once() {
    let mut bench = PlannerFixture::new(&["n"]);
    let mut pod = gated("a", 40, 0);
    pod["spec"]["containers"][0]["resources"] = json!({ "limits": { "nvidia.com/gpu": "1" } });
    bench.show(pod);
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn in_shadow_mode_no_pod_stays_behind_the_gate() {
    let mut policy = Policy::default();
    policy.mode = Mode::Shadow;
    let mut bench = PlannerFixture::by(policy, &["n"]);
    bench.show(gated("a", 40, 0));
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}

#[tokio::test]
async fn a_deleted_pod_with_a_finalizer_gets_nothing_and_loses_its_reservation() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(gated("a", 50, 0));
    bench.tick().await;
    let mut ending = bench.pod("a");
    ending["metadata"]["deletionTimestamp"] = json!(jiff::Timestamp::now().to_string());
    ending["metadata"]["finalizers"] = json!(["batch.kubernetes.io/job-tracking"]);
    bench.show(ending);
    assert_eq!(bench.service.cluster().totals().reservations, 0);
    assert!(bench.tick().await.is_empty());
}
