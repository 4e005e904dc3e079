//! The Kubernetes edge against the stand-in API server, over loopback HTTP.

mod binding;
mod budgets;
mod leading;
mod namespaces;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane};
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::control_loop::{PodEvent, PodEventReason, StatusChange};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::{PodPhase, PodState};
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::binding::{BindingFailed, BindingWritten};
use stowage_scheduling::verbs::wait::Reserve;
use stowage_scheduling::vocabulary::node::Node;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::kubernetes;
use stowage_server::kubernetes::events::EventRecorder;
use stowage_server::kubernetes::{ApiControlPlane, CDI_KIND, ClusterOptions, LeadWith, LeaseName};
use stowage_server::service::ServerState;
use stowage_server::service::Tenure;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::served::{gpu_labels, policy_without_engines};

/// Longer than anything here takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(90);
/// A new leader waits no longer than these tests need, and an answer on a busy machine takes no longer than that.
const WRITE_TIMES: WriteTimes = WriteTimes {
    client: Duration::from_secs(5),
    ..WriteTimes::from_deadline(Duration::from_millis(100))
};

struct TestReplica {
    service: Arc<ServerState>,
    control_plane: Arc<dyn ControlPlane>,
    tasks: JoinSet<()>,
    shutdown: CancellationToken,
}

impl TestReplica {
    fn start(server: &ApiServer, name: &str, lead_with: LeadWith) -> Self {
        let service = ServerState::new(policy_without_engines());
        let shutdown = CancellationToken::new();
        let options = ClusterOptions {
            times: WRITE_TIMES,
            ..ClusterOptions::new(lead_with, name.into())
        };
        let client = server.client(name).unwrap();
        let (control_plane, tasks) =
            kubernetes::start(client, service.clone(), options, shutdown.clone());
        Self {
            service,
            control_plane,
            tasks,
            shutdown,
        }
    }

    async fn acting(server: &ApiServer) -> Self {
        let replica = Self::start(server, "stowage", LeadWith::FromTheStart);
        eventually("the gate opens", || replica.service.leadership.is_open()).await;
        replica
    }

    async fn stop(mut self) {
        self.shutdown.cancel();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
    }

    /// Waits for the pod to be in the ledger, then assumes it. What the extender does before it binds.
    async fn assume(&self, name: &str, node: &str) -> BindOrder {
        eventually("the pod is seen", || self.phase(name).is_some()).await;
        let mut ledger = self.service.cluster();
        let (uid, entry) = ledger
            .ledger()
            .pod_states()
            .into_iter()
            .find(|(_, entry)| &*entry.key.name == name)
            .unwrap();
        let (uid, entry) = (uid.clone(), entry.clone());
        let asked = BindAsked::for_pod(ledger.ledger(), &uid, &node_name(node)).unwrap();
        let Ok(BindAnswer::Write(BindDecision {
            placement,
            epoch,
            is_new: true,
            ..
        })) = ledger.apply(asked)
        else {
            panic!("{name} was assumed before")
        };
        let policy = ledger.ledger().policy().digest;
        let (key, demand) = (entry.key, entry.demand);
        BindOrder {
            key,
            uid,
            demand,
            placement,
            shows_reservation: false,
            policy,
            epoch,
            legacy_runtime: false,
        }
    }

    async fn bind(&self, name: &str, node: &str) -> BindOrder {
        let order = self.assume(name, node).await;
        assert_eq!(self.control_plane.bind(&order).await, BindOutcome::Written);
        let placement = &order.placement;
        self.service.cluster().apply(BindingWritten {
            uid: order.uid.clone(),
            node: placement.node.clone(),
            devices: Some(placement.devices.clone()),
        });
        order
    }

    /// What becomes of a Binding that the API server does not answer in time.
    async fn bind_without_answer(
        &self,
        server: &ApiServer,
        order: &BindOrder,
        fault: InjectedFault,
    ) -> BindOutcome {
        let bind = Duration::from_millis(300);
        let (told, _) = EventRecorder::new(self.service.clone());
        let times = WriteTimes {
            client: bind,
            ..WRITE_TIMES
        };
        let client = server.client("stowage").unwrap();
        let hasty =
            ApiControlPlane::new(client, self.service.clone(), told, CDI_KIND.into(), times);
        server.faults().fail_next(Operation::Binding, 1, fault);
        let outcome = hasty.bind(order).await;
        // If the limit passed before the request was sent, no request met the fault.
        server.faults().clear();
        outcome
    }

    fn phase(&self, name: &str) -> Option<PodPhase> {
        let ledger = self.service.cluster();
        ledger
            .ledger()
            .pod_states()
            .into_values()
            .find(|entry| &*entry.key.name == name)
            .map(|entry| entry.phase.clone())
    }

    /// The pods in the ledger, without what may be lost (soft reservations, refusals) and what is each replica's own (since when
    /// a pod waits and until when its reservation lasts, on its own clock).
    fn pod_states(&self) -> BTreeMap<PodUid, PodState> {
        let timeless = |entry: &PodState| {
            let mut entry = entry.clone();
            match &mut entry.phase {
                PodPhase::Waiting(waiting) => {
                    waiting.offered = None;
                    (waiting.refused, waiting.since, waiting.failed_attempt) =
                        (None, Moment(0), None);
                    (waiting.unplaced_since, waiting.reserved_since) = (None, None);
                    waiting
                        .reservation
                        .iter_mut()
                        .for_each(|reservation| reservation.deadline = Moment(0));
                }
                PodPhase::Bound(bound) => (bound.since, bound.started) = (Moment(0), Moment(0)),
                PodPhase::Assumed(_) => {}
            }
            entry
        };
        let ledger = self.service.cluster();
        ledger
            .ledger()
            .pod_states()
            .into_iter()
            .map(|(uid, entry)| (uid.clone(), timeless(entry)))
            .collect()
    }

    /// What is left of each GPU; generations count changes, and those were others.
    fn nodes(&self) -> Vec<Node> {
        let snapshot = self.service.cluster().snapshot();
        snapshot
            .nodes()
            .iter()
            .map(|node| Node {
                generation: 0,
                ..node.clone()
            })
            .collect()
    }

    fn events(&self, kind: PodEventReason, outcome: &str) -> u64 {
        self.service
            .metrics
            .events
            .with_label_values(&[kind.into_str(), outcome])
            .get()
    }
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
        .unwrap_or_else(|_| panic!("timed out: {what}"));
}

async fn server_with_nodes(names: &[&str]) -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    for name in names {
        server
            .create(
                "nodes",
                json!({ "metadata": { "name": name, "labels": gpu_labels(2) } }),
            )
            .unwrap();
    }
    server
}

fn create_pod(server: &ApiServer, name: &str, gib: u64) {
    create_pod_with_priority(server, name, gib, 0);
}

fn create_pod_with_priority(server: &ApiServer, name: &str, gib: u64, priority: i32) {
    let limits = json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") } });
    let spec = json!({
        "schedulerName": "stowage",
        "priority": priority,
        "containers": [{ "name": "engine", "image": "engine", "resources": limits }],
    });
    server
        .create(
            "pods",
            json!({ "metadata": { "name": name }, "spec": spec }),
        )
        .unwrap();
}

fn bind_without_stowage(server: &ApiServer, name: &str, node: &str) {
    server
        .bind(
            &format!("pods/default/{name}"),
            &json!({ "target": { "name": node } }),
        )
        .unwrap();
}

fn finish(server: &ApiServer, name: &str) {
    server
        .patch_status(
            &format!("pods/default/{name}"),
            &json!({ "status": { "phase": "Succeeded" } }),
        )
        .unwrap();
}

fn node_name(name: &str) -> NodeName {
    NodeName::parse(name).unwrap()
}

fn reserved_condition(server: &ApiServer, name: &str) -> Option<Value> {
    let pod = server.get(&format!("pods/default/{name}"))?;
    let conditions = pod["status"]["conditions"].as_array()?;
    conditions
        .iter()
        .find(|condition| condition["type"] == "stowage.dev/Reserved")
        .cloned()
}

fn advertised(server: &ApiServer, node: &str) -> Option<String> {
    let node = server.get(&format!("nodes/{node}"))?;
    node["status"]["capacity"]["stowage.dev/vram"]
        .as_str()
        .map(str::to_owned)
}

#[tokio::test]
async fn a_restart_rebuilds_the_lost_ledger() {
    let server = server_with_nodes(&["a", "b"]).await;
    let before = TestReplica::acting(&server).await;
    for name in ["one", "done", "late", "unplanned", "holds", "waits", "gone"] {
        create_pod(&server, name, 20);
    }
    create_pod_with_priority(&server, "two", 20, -1);
    before.bind("one", "a").await;
    let two = before.bind("two", "a").await;
    before.bind("done", "b").await;
    finish(&server, "done");
    bind_without_stowage(&server, "unplanned", "b");
    eventually("the pod is seen", || before.phase("gone").is_some()).await;
    server.delete_now("pods/default/gone").unwrap();
    create_pod(&server, "gone", 30);
    // Written, and the answer is lost with the process.
    let late = before.assume("late", "b").await;
    while server.get("pods/default/late").unwrap()["spec"]["nodeName"].is_null() {
        let outcome = before
            .bind_without_answer(&server, &late, InjectedFault::AnswersLate(TEST_TIMEOUT))
            .await;
        assert!(matches!(outcome, BindOutcome::Unknown { .. }));
    }
    // No pod is evicted meanwhile, however long this takes.
    server
        .faults()
        .fail_next(Operation::Eviction, 1000, InjectedFault::TooManyRequests);
    // A pod that waits for `two` to terminate.
    let holder = before.assume("holds", "a").await;
    before
        .service
        .cluster()
        .apply(BindingFailed(holder.uid.clone()));
    let reservation = Reservation {
        node: node_name("a"),
        devices: two.placement.devices.clone(),
        victims: [two.uid.clone()].into(),
        deadline: before.service.now() + Millis::seconds(300),
    };
    before
        .service
        .cluster()
        .apply(Reserve {
            uid: holder.uid.clone(),
            reservation: reservation.clone(),
        })
        .unwrap();
    before
        .control_plane
        .write_status(
            &holder.key,
            &holder.uid,
            &StatusChange::reservation(reservation.clone()),
        )
        .await
        .unwrap();
    eventually("everything is seen", || {
        let bound = |name| matches!(before.phase(name), Some(PodPhase::Bound(_)));
        let is_shown = before
            .service
            .cluster()
            .ledger()
            .reservation_status_of(&holder.uid)
            .is_some_and(|held| held.is_in_condition);
        bound("late")
            && bound("unplanned")
            && is_shown
            && before.phase("done").is_none()
            && before.pod_states().len() == 7
    })
    .await;

    let after = TestReplica::acting(&server).await;
    assert_eq!(after.pod_states(), before.pod_states());
    assert_eq!(after.nodes(), before.nodes());
    assert_eq!(audit(after.service.cluster().ledger()), []);
    let deadline = |replica: &TestReplica| {
        let ledger = replica.service.cluster();
        let deadline = ledger
            .ledger()
            .pod_state(&holder.uid)
            .unwrap()
            .reservation()
            .unwrap()
            .deadline;
        replica.service.clock.to_wall(deadline).as_second()
    };
    assert!((deadline(&after) - deadline(&before)).abs() <= 1);
    before.stop().await;
    after.stop().await;
}

#[tokio::test]
async fn a_watch_that_fell_behind_relists_and_releases_deleted_pods() {
    let server = server_with_nodes(&["a", "b"]).await;
    let replica = TestReplica::acting(&server).await;
    create_pod(&server, "gone", 20);
    create_pod(&server, "kept", 20);
    replica.bind("gone", "a").await;
    replica.bind("kept", "a").await;
    let lists = server.calls().count_by("stowage", "list", "pods");
    // Without a pause between: the watches learn of the deletions only by listing.
    server.delete_now("pods/default/gone").unwrap();
    server.delete_now("nodes/b").unwrap();
    server.compact();
    eventually("the deletions are seen", || {
        replica.phase("gone").is_none() && replica.nodes().len() == 1
    })
    .await;
    assert!(server.calls().count_by("stowage", "list", "pods") > lists);
    assert!(matches!(replica.phase("kept"), Some(PodPhase::Bound(_))));
    assert_eq!(audit(replica.service.cluster().ledger()), []);
    replica.stop().await;
}

#[tokio::test]
async fn capacity_is_patched_and_kept_except_on_device_plugin_nodes() {
    let server = server_with_nodes(&["a", "plugin"]).await;
    let offers = json!({ "status": { "allocatable": { "nvidia.com/gpu": "2" } } });
    server.patch_status("nodes/plugin", &offers).unwrap();
    server
        .create("nodes", json!({ "metadata": { "name": "no-gpus" } }))
        .unwrap();
    server
        .faults()
        .fail_next(Operation::NodeStatus, 1, InjectedFault::Fails);
    let replica = TestReplica::acting(&server).await;
    let whole = replica.nodes()[0].capacity().0.to_string();
    assert_eq!(whole, (2 * (81920u64 << 20) / 10 * 9).to_string());
    eventually("capacity is advertised", || {
        advertised(&server, "a").as_ref() == Some(&whole)
    })
    .await;
    // As a kubelet does when it starts with an empty device-plugin folder.
    server
        .patch_status(
            "nodes/a",
            &json!({ "status": { "capacity": { "stowage.dev/vram": "0" } } }),
        )
        .unwrap();
    eventually("capacity is advertised again", || {
        advertised(&server, "a").as_ref() == Some(&whole)
    })
    .await;
    assert_eq!(
        (
            advertised(&server, "plugin"),
            advertised(&server, "no-gpus")
        ),
        (None, None)
    );
    replica.stop().await;
}

#[tokio::test]
async fn a_replica_that_does_not_lead_writes_nothing() {
    let server = server_with_nodes(&["a"]).await;
    create_pod(&server, "unplanned", 20);
    bind_without_stowage(&server, "unplanned", "a");
    let lease = LeaseName::for_kube_scheduler();
    let replica = TestReplica::start(
        &server,
        "stowage",
        LeadWith::KubeScheduler {
            lease,
            hostname: "stowage-0".into(),
        },
    );
    eventually("the unplanned pod is observed", || {
        replica.phase("unplanned").is_some()
    })
    .await;
    eventually("the Lease is looked for twice", || {
        server.calls().count("get", "leases") >= 2
    })
    .await;
    let wrote = |verb| {
        server
            .calls()
            .all()
            .iter()
            .any(|(call, _)| call.verb == verb)
    };
    assert!(!wrote("create") && !wrote("patch") && !wrote("update"));
    // It begins to lead, and says what stands.
    replica.stop().await;
    let replica = TestReplica::acting(&server).await;
    eventually("the Event is there", || {
        replica.events(PodEventReason::Unplaced, "published") == 1
    })
    .await;
    let event = &server.list("events")[0];
    assert_eq!(
        (event["reason"].as_str(), event["type"].as_str()),
        (Some("StowageUnplaced"), Some("Warning"))
    );
    assert_eq!(event["regarding"]["name"], "unplanned");
    replica.stop().await;
}

#[tokio::test]
async fn a_refused_pod_gets_one_event_however_often_it_is_refused() {
    let server = server_with_nodes(&["a"]).await;
    let replica = TestReplica::acting(&server).await;
    create_pod(&server, "p", 500);
    eventually("the pod is seen", || replica.phase("p").is_some()).await;
    let (uid, entry) = replica.pod_states().pop_first().unwrap();
    for free in 0..100 {
        let text = format!("no GPU has 500 GiB free: the best has {free}");
        let notice = PodEvent {
            key: entry.key.clone(),
            uid: uid.clone(),
            kind: PodEventReason::Unschedulable,
            text,
        };
        replica.control_plane.record_event(notice);
    }
    eventually("the Event is published", || {
        replica.events(PodEventReason::Unschedulable, "published") == 1
    })
    .await;
    assert_eq!(
        replica.events(PodEventReason::Unschedulable, "suppressed"),
        99
    );
    assert_eq!(server.list("events").len(), 1);
    replica.stop().await;
}

#[tokio::test]
async fn a_reservation_not_made_by_the_leader_is_cleared_with_an_event_and_keeps_other_conditions()
{
    let server = server_with_nodes(&["a"]).await;
    let replica = TestReplica::acting(&server).await;
    create_pod(&server, "p", 20);
    let ready =
        json!({ "status": { "conditions": [{ "type": "PodScheduled", "status": "False" }] } });
    server.patch_status("pods/default/p", &ready).unwrap();
    let order = replica.assume("p", "a").await;
    replica
        .service
        .cluster()
        .apply(BindingFailed(order.uid.clone()));
    // The leader did not make it: it shows as one of an earlier leader's that was written too late.
    let reservation = Reservation {
        node: node_name("a"),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [].into(),
        deadline: replica.service.now(),
    };
    let other = PodUid::parse("another").unwrap();
    let refused = replica
        .control_plane
        .write_status(
            &order.key,
            &other,
            &StatusChange::reservation(reservation.clone()),
        )
        .await;
    assert!(refused.is_err(), "another pod of that name is left alone");
    assert_eq!(reserved_condition(&server, "p"), None);
    replica
        .control_plane
        .write_status(
            &order.key,
            &order.uid,
            &StatusChange::reservation(reservation),
        )
        .await
        .unwrap();
    eventually("the condition is cleared", || {
        reserved_condition(&server, "p").unwrap()["status"] == "False"
    })
    .await;
    eventually("it is told", || {
        replica.events(PodEventReason::ReservationEnded, "published") >= 1
    })
    .await;
    let pod: Pod =
        serde_json::from_value(Value::clone(&server.get("pods/default/p").unwrap())).unwrap();
    let conditions = pod.status.unwrap().conditions.unwrap();
    assert!(
        conditions
            .iter()
            .any(|condition| condition.type_ == "PodScheduled"),
        "{conditions:?}"
    );
    replica.stop().await;
}
