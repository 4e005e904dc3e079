//! The planner's writes to pods, against the stand-in API server: evictions, one status write for any change, and the removal of
//! the gate.

use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionCondition, EvictionOutcome, EvictionReason, PlanState, PodEvent,
    PodEventReason, StatusChange,
};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::policy::{Class, Policy, Protection};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::observe::PodObserved;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::kubernetes::events::EventRecorder;
use stowage_server::kubernetes::{ApiControlPlane, CDI_KIND};
use stowage_server::service::ServerState;
use stowage_server::service::Tenure;
use tokio::sync::mpsc::Receiver;

/// Timeout of a write, far above what one takes on a busy machine: it never runs out before the test does.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a write that the API server does not answer: short, because the test waits for it.
const SHORT_WRITE_TIMEOUT: Duration = Duration::from_millis(300);

/// A leader, with nothing running beside it.
struct Leader {
    api: ApiServer,
    service: Arc<ServerState>,
    control_plane: ApiControlPlane,
    notices: Receiver<PodEvent>,
}

impl Leader {
    async fn start() -> Self {
        let api = ApiServer::start().await.unwrap();
        let service = ServerState::new(Policy::default());
        service.lead_from_the_start();
        let (told, notices) = EventRecorder::new(service.clone());
        let client = api.client("stowage").unwrap();
        let limits = WriteTimes::from_deadline(WRITE_TIMEOUT);
        let control_plane =
            ApiControlPlane::new(client, service.clone(), told, CDI_KIND.into(), limits);
        Self {
            api,
            service,
            control_plane,
            notices,
        }
    }

    /// The same leader's, for what is not answered.
    fn with_short_timeout(&self) -> ApiControlPlane {
        let (told, _) = EventRecorder::new(self.service.clone());
        let client = self.api.client("stowage").unwrap();
        let limits = WriteTimes::from_deadline(SHORT_WRITE_TIMEOUT);
        ApiControlPlane::new(client, self.service.clone(), told, CDI_KIND.into(), limits)
    }

    /// A pod that waits, under these gates.
    fn waiting(&self, name: &str, gates: &[&str]) -> PodUid {
        let gates: Vec<Value> = gates.iter().map(|gate| json!({ "name": gate })).collect();
        let container = json!({ "name": "c", "image": "i" });
        let pod = json!({
            "metadata": { "name": name, "labels": { "app": "a" } },
            "spec": { "containers": [container], "schedulingGates": gates },
        });
        let pod = self.api.create("pods", pod).unwrap();
        PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap()
    }

    fn running(&self, name: &str) -> PodUid {
        let uid = self.waiting(name, &[]);
        let path = format!("pods/default/{name}");
        self.api
            .bind(&path, &json!({ "target": { "kind": "Node", "name": "n" } }))
            .unwrap();
        let status =
            json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
        self.api
            .patch_status(&path, &json!({ "status": status }))
            .unwrap();
        uid
    }

    /// As the watch shows it.
    fn observe(&self, name: &str) {
        let mut pod = Value::clone(&self.pod(name));
        pod["spec"]["containers"][0]["resources"]["limits"] = json!({ "stowage.dev/vram": "1Gi" });
        let pod = serde_json::from_value(pod).unwrap();
        let seen = objects::observation(&pod, &Policy::default(), None, jiff::Timestamp::now());
        self.service
            .cluster()
            .apply(PodObserved(seen.expect("it is bound")));
    }

    fn pod(&self, name: &str) -> Arc<Value> {
        self.api.get(&format!("pods/default/{name}")).unwrap()
    }

    fn condition(&self, name: &str, kind: &str) -> Option<Value> {
        let pod = self.pod(name);
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions
            .find(|condition| condition["type"] == kind)
            .cloned()
    }

    async fn evict(&self, name: &str, uid: &PodUid) -> EvictionOutcome {
        self.control_plane
            .evict(&key(name), uid, &for_llama(), &|| true)
            .await
    }

    async fn write(
        &self,
        name: &str,
        uid: &PodUid,
        change: StatusChange,
    ) -> Result<(), ControlPlaneError> {
        self.control_plane
            .write_status(&key(name), uid, &change)
            .await
    }

    async fn remove_gate(&self, name: &str, uid: &PodUid) -> Result<(), ControlPlaneError> {
        self.control_plane
            .remove_scheduling_gate(&key(name), uid)
            .await
    }

    fn is_terminating(&self, name: &str) -> bool {
        self.pod(name)["metadata"]["deletionTimestamp"].is_string()
    }

    /// Over all reasons.
    fn evictions(&self) -> u64 {
        let of = |reason: &&str| {
            self.service
                .metrics
                .evictions
                .with_label_values(&[*reason])
                .get()
        };
        EvictionReason::CODES.iter().map(of).sum()
    }

    fn writes(&self, kind: &str, outcome: &str) -> u64 {
        self.service
            .metrics
            .writes
            .with_label_values(&[kind, outcome])
            .get()
    }
}

fn key(name: &str) -> PodKey {
    PodKey::parse("default", name).unwrap()
}

fn node(name: &str) -> NodeName {
    NodeName::parse(name).unwrap()
}

fn uid_of_another_pod() -> PodUid {
    PodUid::parse("another").unwrap()
}

fn for_llama() -> EvictionReason {
    EvictionReason::Preempted {
        by: PodKey::parse("team-a", "llama").unwrap(),
    }
}

#[tokio::test]
async fn an_eviction_is_explained_by_a_condition_and_an_event() {
    let mut leader = Leader::start().await;
    let uid = leader.running("victim");
    assert_eq!(leader.evict("victim", &uid).await, EvictionOutcome::Evicted);
    assert!(leader.is_terminating("victim"));
    let condition = leader
        .condition("victim", objects::DISRUPTION_TARGET_CONDITION)
        .unwrap();
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("True"), &json!("Preempted"))
    );
    // The owner of the victim need not be allowed to read team-a.
    let told = "Preempted by a pod of another namespace, which has a higher priority.";
    assert_eq!(condition["message"], told);
    let notice = leader.notices.try_recv().unwrap();
    assert_eq!(
        (notice.kind, notice.key, notice.uid),
        (PodEventReason::Evicted, key("victim"), uid)
    );
    assert_eq!(notice.text, told);
    assert_eq!(
        (
            leader.writes("evict", "written"),
            leader.writes("eviction-reason", "written")
        ),
        (1, 1)
    );
    assert_eq!(
        leader.evictions(),
        1,
        "an eviction is counted once, by its reason"
    );
    assert_eq!(leader.api.calls().reads_by("stowage"), 0);
}

#[tokio::test]
async fn a_deleted_pod_or_its_namesake_is_reported_as_gone_and_not_evicted() {
    let mut leader = Leader::start().await;
    leader.running("victim");
    assert_eq!(
        leader.evict("victim", &uid_of_another_pod()).await,
        EvictionOutcome::Gone
    );
    assert_eq!(
        leader.evict("nobody", &uid_of_another_pod()).await,
        EvictionOutcome::Gone
    );
    assert!(!leader.is_terminating("victim"));
    assert_eq!(
        leader.condition("victim", objects::DISRUPTION_TARGET_CONDITION),
        None
    );
    assert!(leader.notices.try_recv().is_err());
    assert_eq!(
        leader
            .write("victim", &uid_of_another_pod(), StatusChange::requeue())
            .await,
        Err(ControlPlaneError::Gone)
    );
    assert_eq!(
        leader
            .write("nobody", &uid_of_another_pod(), StatusChange::requeue())
            .await,
        Err(ControlPlaneError::Gone)
    );
    assert_eq!(
        leader.remove_gate("victim", &uid_of_another_pod()).await,
        Err(ControlPlaneError::Gone)
    );
    assert_eq!(
        leader.remove_gate("nobody", &uid_of_another_pod()).await,
        Err(ControlPlaneError::Gone)
    );
}

#[tokio::test]
async fn a_victim_is_evicted_even_if_its_condition_cannot_be_written_and_the_event_says_why() {
    let mut leader = Leader::start().await;
    let uid = leader.running("victim");
    leader
        .api
        .faults()
        .fail_next(Operation::PodStatus, 1, InjectedFault::Fails);
    assert_eq!(leader.evict("victim", &uid).await, EvictionOutcome::Evicted);
    assert!(leader.is_terminating("victim"));
    assert_eq!(
        leader.notices.try_recv().unwrap().kind,
        PodEventReason::Evicted
    );
}

#[tokio::test]
async fn the_condition_is_written_before_the_eviction_and_not_again_when_a_budget_refuses() {
    let mut leader = Leader::start().await;
    let uid = leader.running("victim");
    let budget = json!({
        "metadata": { "name": "pdb", "namespace": "default" },
        "spec": { "selector": { "matchLabels": { "app": "a" } } },
        "status": { "disruptionsAllowed": 0 },
    });
    leader.api.create("poddisruptionbudgets", budget).unwrap();
    assert_eq!(
        leader.evict("victim", &uid).await,
        EvictionOutcome::TryLater { after: None }
    );
    assert!(!leader.is_terminating("victim") && leader.notices.try_recv().is_err());
    let told = leader.pod("victim");
    assert_eq!(
        leader
            .condition("victim", objects::DISRUPTION_TARGET_CONDITION)
            .unwrap()["status"],
        "True",
        "told first"
    );
    assert_eq!(
        leader.evict("victim", &uid).await,
        EvictionOutcome::TryLater { after: None }
    );
    assert_eq!(
        leader.pod("victim")["metadata"]["resourceVersion"],
        told["metadata"]["resourceVersion"]
    );

    leader
        .api
        .patch_status(
            "poddisruptionbudgets/default/pdb",
            &json!({ "status": { "disruptionsAllowed": 1 } }),
        )
        .unwrap();
    assert_eq!(leader.evict("victim", &uid).await, EvictionOutcome::Evicted);
    assert_eq!(
        (
            leader.writes("evict", "later"),
            leader.writes("evict", "written")
        ),
        (2, 1)
    );
}

#[tokio::test]
async fn the_retry_after_of_the_api_server_is_passed_on() {
    let leader = Leader::start().await;
    let uid = leader.running("victim");
    let uncounted = json!({
        "metadata": { "name": "pdb", "namespace": "default", "generation": 2 },
        "spec": { "selector": {} },
        "status": { "disruptionsAllowed": 5, "observedGeneration": 1 },
    });
    leader
        .api
        .create("poddisruptionbudgets", uncounted)
        .unwrap();
    let after = Some(Duration::from_secs(10));
    assert_eq!(
        leader.evict("victim", &uid).await,
        EvictionOutcome::TryLater { after }
    );
}

/// It would add to the load that the API server refuses, and bypass a webhook that protects the pod.
#[tokio::test]
async fn a_pod_whose_class_ignores_budgets_is_not_deleted_because_its_eviction_is_throttled() {
    let leader = Leader::start().await;
    let uid = leader.running("victim");
    leader.observe("victim");
    let policy = Policy::default();
    let ignoring = |class: &Class| Class {
        disruption_budgets: Protection::Ignore,
        ..class.clone()
    };
    let classes = policy.classes().iter().map(ignoring).collect();
    leader
        .service
        .set_policy(policy.with_classes(classes).unwrap());
    for (fault, after) in [
        (InjectedFault::TooManyRequests, None),
        (InjectedFault::Throttles(7), Some(Duration::from_secs(7))),
    ] {
        leader.api.faults().fail_next(Operation::Eviction, 1, fault);
        assert_eq!(
            leader.evict("victim", &uid).await,
            EvictionOutcome::TryLater { after }
        );
        assert!(!leader.is_terminating("victim"), "{fault:?}");
    }
    let budget = json!({
        "metadata": { "name": "pdb", "namespace": "default" },
        "spec": { "selector": { "matchLabels": { "app": "a" } } },
        "status": { "disruptionsAllowed": 0 },
    });
    leader.api.create("poddisruptionbudgets", budget).unwrap();
    assert_eq!(
        leader.evict("victim", &uid).await,
        EvictionOutcome::Evicted,
        "that is what it ignores"
    );
}

#[tokio::test]
async fn each_eviction_response_maps_to_an_outcome() {
    let leader = Leader::start().await;
    let (uid, hasty) = (leader.running("victim"), leader.with_short_timeout());
    let evict_in_vain = async |fault| {
        leader.api.faults().fail_next(Operation::Eviction, 1, fault);
        let outcome = hasty
            .evict(&key("victim"), &uid, &for_llama(), &|| true)
            .await;
        assert!(
            matches!(outcome, EvictionOutcome::Unknown { .. }),
            "{fault:?}: {outcome:?}"
        );
        // If the limit passed before the request was sent, no request met the fault.
        leader.api.faults().clear();
    };
    evict_in_vain(InjectedFault::Hangs).await;
    assert!(!leader.is_terminating("victim"));
    for (fault, is_so) in [
        (
            InjectedFault::Fails,
            (|outcome| matches!(outcome, EvictionOutcome::Unknown { .. })) as fn(_) -> bool,
        ),
        (InjectedFault::TooManyRequests, |outcome| {
            outcome == EvictionOutcome::TryLater { after: None }
        }),
        // A conflict, and the pod is the one that was meant.
        (InjectedFault::Conflicts, |outcome| {
            outcome == EvictionOutcome::TryLater { after: None }
        }),
        (InjectedFault::Forbids, |outcome| {
            matches!(outcome, EvictionOutcome::Refused { .. })
        }),
    ] {
        leader.api.faults().fail_next(Operation::Eviction, 1, fault);
        let outcome = leader.evict("victim", &uid).await;
        assert!(is_so(outcome.clone()), "{fault:?}: {outcome:?}");
        assert!(!leader.is_terminating("victim"));
    }
    let condition = leader
        .condition("victim", objects::DISRUPTION_TARGET_CONDITION)
        .unwrap();
    assert_eq!(
        (&condition["status"], &condition["reason"]),
        (&json!("False"), &json!("Cancelled"))
    );
    // It is evicted all the same.
    let leaving = async {
        while !leader.is_terminating("victim") {
            evict_in_vain(InjectedFault::AnswersLate(WRITE_TIMEOUT)).await;
        }
    };
    tokio::time::timeout(crate::client::TEST_TIMEOUT, leaving)
        .await
        .expect("it is evicted");
}

#[tokio::test]
async fn a_status_change_is_one_write_and_keeps_other_writers_fields() {
    let leader = Leader::start().await;
    let uid = leader.waiting("p", &[objects::PLAN_GATE]);
    let reservation = Reservation {
        node: node("n"),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [].into(),
        deadline: leader.service.now() + Millis::seconds(60),
    };
    let before = leader.api.calls().count("patch", "pods/status");
    let placed = PlanState::Nominated { node: node("n") };
    let change = StatusChange::reservation(reservation)
        .and_nominate(node("n"))
        .and_requeue()
        .and_plan(placed);
    leader.write("p", &uid, change).await.unwrap();
    assert_eq!(leader.api.calls().count("patch", "pods/status"), before + 1);
    let pod = leader.pod("p");
    assert_eq!(pod["status"]["nominatedNodeName"], "n");
    for (kind, status) in [
        ("PodScheduled", "False"),
        (objects::RESERVED_CONDITION, "True"),
        (objects::PLACED_CONDITION, "True"),
        (objects::REQUEUED_CONDITION, "True"),
    ] {
        assert_eq!(
            leader.condition("p", kind).unwrap()["status"],
            status,
            "{kind}"
        );
    }

    leader
        .write("p", &uid, StatusChange::end_reservation())
        .await
        .unwrap();
    assert_eq!(
        leader.pod("p")["status"]["nominatedNodeName"],
        "n",
        "not named, not changed"
    );
    leader
        .write("p", &uid, StatusChange::clear_nomination())
        .await
        .unwrap();
    assert!(leader.pod("p")["status"]["nominatedNodeName"].is_null());
    assert_eq!(
        leader.condition("p", objects::RESERVED_CONDITION).unwrap()["status"],
        "False"
    );
    let told = EvictionCondition::Evicting(for_llama());
    leader
        .write("p", &uid, StatusChange::eviction(told))
        .await
        .unwrap();
    leader
        .write(
            "p",
            &uid,
            StatusChange::eviction(EvictionCondition::Cancelled),
        )
        .await
        .unwrap();
    assert_eq!(
        leader
            .condition("p", objects::DISRUPTION_TARGET_CONDITION)
            .unwrap()["status"],
        "False"
    );

    let writes = leader.api.calls().count("patch", "pods/status");
    leader
        .write("p", &uid, StatusChange::default())
        .await
        .unwrap();
    assert_eq!(
        leader.api.calls().count("patch", "pods/status"),
        writes,
        "nothing to write, nothing written"
    );
}

#[tokio::test]
async fn every_requeue_write_changes_the_pod() {
    let leader = Leader::start().await;
    let uid = leader.waiting("p", &[]);
    let mut versions = Vec::new();
    for _ in 0..3 {
        leader
            .write("p", &uid, StatusChange::requeue())
            .await
            .unwrap();
        versions.push(leader.pod("p")["metadata"]["resourceVersion"].clone());
    }
    versions.dedup();
    assert_eq!(
        (versions.len(), leader.writes("requeue", "written")),
        (3, 3)
    );
}

#[tokio::test]
async fn a_write_conflict_is_retried_once_and_its_result_reported() {
    let leader = Leader::start().await;
    let uid = leader.waiting("p", &[objects::PLAN_GATE]);
    leader
        .api
        .faults()
        .fail_next(Operation::PodStatus, 1, InjectedFault::Conflicts);
    leader
        .write("p", &uid, StatusChange::requeue())
        .await
        .unwrap();
    leader
        .api
        .faults()
        .fail_next(Operation::PodStatus, 2, InjectedFault::Conflicts);
    let twice = leader.write("p", &uid, StatusChange::requeue()).await;
    assert!(
        matches!(twice, Err(ControlPlaneError::Unknown(_))),
        "{twice:?}"
    );
    leader
        .api
        .faults()
        .fail_next(Operation::PodStatus, 1, InjectedFault::Hangs);
    let hung = leader
        .with_short_timeout()
        .write_status(&key("p"), &uid, &StatusChange::requeue())
        .await;
    assert!(
        matches!(hung, Err(ControlPlaneError::Unknown(_))),
        "{hung:?}"
    );
    // If the limit passed before the request was sent, no request met the fault.
    leader.api.faults().clear();
    leader
        .api
        .faults()
        .fail_next(Operation::PodStatus, 1, InjectedFault::Forbids);
    let forbidden = leader.write("p", &uid, StatusChange::requeue()).await;
    assert!(
        matches!(forbidden, Err(ControlPlaneError::Refused(_))),
        "{forbidden:?}"
    );

    leader
        .api
        .faults()
        .fail_next(Operation::Pod, 1, InjectedFault::Conflicts);
    leader.remove_gate("p", &uid).await.unwrap();
    assert_eq!(gates(&leader.pod("p")), [""; 0]);
}

fn gates(pod: &Value) -> Vec<&str> {
    let gates = pod["spec"]["schedulingGates"]
        .as_array()
        .into_iter()
        .flatten();
    gates.map(|gate| gate["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn only_our_scheduling_gate_is_removed_and_removing_it_twice_is_no_error() {
    let leader = Leader::start().await;
    for (name, others, left) in [
        ("first", vec![objects::PLAN_GATE, "quota"], vec!["quota"]),
        (
            "last",
            vec!["quota", "team", objects::PLAN_GATE],
            vec!["quota", "team"],
        ),
        ("only", vec![objects::PLAN_GATE], vec![]),
        ("none", vec!["quota"], vec!["quota"]),
    ] {
        let uid = leader.waiting(name, &others);
        for _ in 0..2 {
            leader.remove_gate(name, &uid).await.unwrap();
            assert_eq!(gates(&leader.pod(name)), left, "{name}");
        }
    }
    assert_eq!(leader.writes("gate", "written"), 8);
    assert_eq!(
        leader.api.calls().reads_by("stowage"),
        0,
        "one write each, and no read"
    );
}

#[tokio::test]
async fn a_replica_that_lost_leadership_writes_nothing() {
    let leader = Leader::start().await;
    let (victim, waits) = (
        leader.running("victim"),
        leader.waiting("waits", &[objects::PLAN_GATE]),
    );
    let version = leader.api.subscribe();
    let before = *version.borrow();
    leader.service.set_tenure(Tenure::Standby);
    assert_eq!(
        leader.evict("victim", &victim).await,
        EvictionOutcome::TryLater { after: None }
    );
    let written = leader
        .write("waits", &waits, StatusChange::nominate(node("n")))
        .await;
    assert!(
        matches!(written, Err(ControlPlaneError::Refused(_))),
        "{written:?}"
    );
    assert!(matches!(
        leader.remove_gate("waits", &waits).await,
        Err(ControlPlaneError::Refused(_))
    ));
    assert_eq!(*version.borrow(), before, "nothing was written");
}
