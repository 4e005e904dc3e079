//! What Stowage writes on a real API server, as a version of it leaves it behind: one story in which it writes everything, and the
//! objects that show it, in `tests/fixtures/VERSION`. A later version reads them ([`crate::upgrade`]).
//!
//! `STOWAGE_BLESS=1` records them again. Without it, what is written now is compared with what is recorded.

mod normal;
mod versions;

use super::fleet::{node, pod};
use super::processes::{TEST_TIMEOUT, eventually};
use super::world::RealControlPlane;
use super::{events_of_stowage, gated, key, name_of, submit};
use crate::upgrade::{self, VERSION};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use stowage_kubernetes_objects::port::{ControlPlane, WriteTimes};
use stowage_kubernetes_objects::{self as objects, ReservationMessage};
use stowage_lab::demo::termination;
use stowage_scheduling::control_loop::{EvictionCondition, PlanState, StatusChange};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::kubernetes;
use stowage_server::kubernetes::events::EventRecorder;
use stowage_server::kubernetes::{ApiControlPlane, CDI_KIND};
use stowage_server::service::ServerState;
use versions::PodVersions;

/// The one Lease that the shipped role lets Stowage write.
const LEASE: &str = "stowage-scheduler";
const H100: &str = "NVIDIA-H100-80GB-HBM3";
/// A gate that nobody lifts: neither the scheduler nor the planner writes to the pod.
const FOREIGN_GATE: &str = "example.com/quota";

/// By the name of its file.
type Recording = BTreeMap<String, Value>;

#[tokio::test(flavor = "multi_thread")]
async fn what_stowage_writes_is_what_is_recorded() {
    let nodes = [("node-a", 1), ("node-b", 2), ("node-c", 1), ("node-d", 2)];
    let nodes = nodes
        .map(|(name, gpus)| node(name, gpus, 81_559, H100))
        .to_vec();
    let lease = format!("kube-system/{LEASE}");
    let serve = [
        "--lead-with",
        "lease",
        "--lease",
        &lease,
        "--identity",
        "stowage-0",
        "--write-deadline",
        "1s",
    ];
    let Some(mut world) = RealControlPlane::start_all(nodes, &serve).await else {
        return;
    };
    let versions = PodVersions::start(world.client.clone());
    // The Lease is Stowage's here.
    world
        .begin_scheduling_with_change(|config| {
            config["leaderElection"] = json!({ "leaderElect": false })
        })
        .await;

    let mut recording = Recording::new();
    pods_are_bound(&world, &versions, &mut recording).await;
    a_pod_is_evicted_for_another(&world, &versions, &mut recording).await;
    pods_are_planned(&world, &versions, &mut recording).await;
    the_other_conditions(&world, &mut recording).await;
    what_is_not_on_pods(&world, &mut recording).await;
    world.check();
    compare_or_bless(normal::normalized(recording));
}

/// For this node only.
fn on(mut pod: Pod, node: &str) -> Pod {
    let selector = BTreeMap::from([("kubernetes.io/hostname".to_owned(), node.to_owned())]);
    pod.spec.as_mut().unwrap().node_selector = Some(selector);
    pod
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .is_some_and(|spec| spec.node_name.is_some())
}

fn has_condition(pod: &Pod, kind: &str) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten();
    conditions
        .into_iter()
        .any(|condition| condition.type_ == kind)
}

/// Bindings: on one GPU, over two, and on a GPU of its own.
async fn pods_are_bound(
    world: &RealControlPlane,
    versions: &PodVersions,
    recording: &mut Recording,
) {
    let serving = |name, gib, annotations: Value| pod(name, gib, &annotations, "stowage-serving");
    let pods = [
        on(serving("shared", 20, json!({})), "node-a"),
        on(
            serving("over-two", 40, json!({ "stowage.dev/gpus": "2" })),
            "node-b",
        ),
        on(
            serving("exclusive", 30, json!({ "stowage.dev/exclusive": "true" })),
            "node-c",
        ),
    ];
    submit(&world.client, &pods).await;
    for name in ["shared", "over-two", "exclusive"] {
        recording.insert(
            format!("pod-bound-{name}"),
            versions.first("is bound", name, is_bound).await,
        );
    }
}

/// A reservation with its victim, the eviction, and the Events of both. The node's sum would do, so kube-scheduler evicts nobody:
/// of 71.7 GiB on each GPU 11.7 and 16.7 are free.
async fn a_pod_is_evicted_for_another(
    world: &RealControlPlane,
    versions: &PodVersions,
    recording: &mut Recording,
) {
    let victim = pod(
        "victim",
        55,
        &json!({ termination::TERMINATION_MILLIS: "4000" }),
        "stowage-opportunistic",
    );
    let serving = |name, gib| on(pod(name, gib, &json!({}), "stowage-serving"), "node-d");
    // One after the other, so that each run has them on the same GPUs.
    for pod in [serving("neighbor", 60), on(victim, "node-d")] {
        submit(&world.client, std::slice::from_ref(&pod)).await;
        versions.first("is bound", name_of(&pod), is_bound).await;
    }
    submit(&world.client, &[serving("preemptor", 25)]).await;
    let waits_for_it = |pod: &Pod| {
        ReservationMessage::read(pod).is_some_and(|message| !message.victims.is_empty())
    };
    let reserved = versions
        .first("has a reservation with victims", "preemptor", waits_for_it)
        .await;
    let leaves = |pod: &Pod| {
        pod.metadata.deletion_timestamp.is_some()
            && has_condition(pod, objects::DISRUPTION_TARGET_CONDITION)
    };
    let victim = versions.first("is evicted", "victim", leaves).await;
    recording.insert("pod-reserved-for-victims".into(), reserved);
    recording.insert("pod-evicted".into(), victim);
    versions.first("is bound", "preemptor", is_bound).await;
    // A refusal has an Event, too: it is no GPU that is large enough, on a node whose sum would do.
    submit(
        &world.client,
        &[on(
            pod("too-large", 75, &json!({}), "stowage-serving"),
            "node-b",
        )],
    )
    .await;
    for (name, kind) in [
        ("preemptor", "Normal"),
        ("victim", "Warning"),
        ("too-large", "Warning"),
    ] {
        let event = eventually("each of the three has its Event", async || {
            let events = events_of_stowage(&world.client, name).await;
            events
                .into_iter()
                .find(|event| event.type_.as_deref() == Some(kind))
        });
        recording.insert(
            format!("event-{name}"),
            serde_json::to_value(event.await).unwrap(),
        );
    }
}

/// Under the gate: nominated and touched in one write; bound; and one without a place.
async fn pods_are_planned(
    world: &RealControlPlane,
    versions: &PodVersions,
    recording: &mut Recording,
) {
    let serving = |name, gib| gated(on(pod(name, gib, &json!({}), "stowage-serving"), "node-a"));
    submit(
        &world.client,
        &[serving("planned", 10), serving("without-a-place", 75)],
    )
    .await;
    let is_nominated = |pod: &Pod| {
        objects::nominated_node(pod).is_some() && has_condition(pod, objects::PLACED_CONDITION)
    };
    recording.insert(
        "pod-nominated".into(),
        versions
            .first("is nominated", "planned", is_nominated)
            .await,
    );
    recording.insert(
        "pod-bound-planned".into(),
        versions.first("is bound", "planned", is_bound).await,
    );
    let is_told = |pod: &Pod| has_condition(pod, objects::PLACED_CONDITION);
    recording.insert(
        "pod-without-a-place".into(),
        versions
            .first("is told that it has no place", "without-a-place", is_told)
            .await,
    );
}

/// Conditions that a short story does not meet, written by the same code with the same rights.
async fn the_other_conditions(world: &RealControlPlane, recording: &mut Recording) {
    let client = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
        .await
        .unwrap();
    let service = ServerState::new(Policy::default());
    service.lead_from_the_start();
    let (events, _) = EventRecorder::new(service.clone());
    let times = WriteTimes::from_deadline(TEST_TIMEOUT);
    let control_plane =
        ApiControlPlane::new(client, service.clone(), events, CDI_KIND.into(), times);
    let node = NodeName::parse("node-a").unwrap();
    let reservation = Reservation {
        node: node.clone(),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [].into(),
        deadline: service.now() + Millis::seconds(60),
    };
    let why = || "no GPU can take the pod now".into();
    for (name, changes) in [
        (
            "reservation-ended",
            vec![
                StatusChange::reservation(reservation),
                StatusChange::end_reservation(),
            ],
        ),
        (
            "eviction-cancelled",
            vec![StatusChange::eviction(EvictionCondition::Cancelled)],
        ),
        (
            "plan-preempting",
            vec![StatusChange::plan(PlanState::Preempting {
                node: node.clone(),
            })],
        ),
        (
            "plan-gate-removed",
            vec![StatusChange::plan(PlanState::GateRemoved { why: why() })],
        ),
        (
            "plan-rejected",
            vec![StatusChange::plan(PlanState::Rejected { node, why: why() })],
        ),
        ("requeued", vec![StatusChange::requeue()]),
    ] {
        let uid = waits(&world.client, name).await;
        for change in changes {
            control_plane
                .write_status(&key(name), &uid, &change)
                .await
                .unwrap();
        }
        let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
        let pod = serde_json::to_value(pods.get(name).await.unwrap()).unwrap();
        recording.insert(format!("pod-{name}"), pod);
    }
}

/// A pod that asks for VRAM and that nobody places.
async fn waits(client: &Client, name: &str) -> PodUid {
    let mut pod = pod(name, 10, &json!({}), "stowage-serving");
    let gates = serde_json::from_value(json!([{ "name": FOREIGN_GATE }])).unwrap();
    pod.spec.as_mut().unwrap().scheduling_gates = Some(gates);
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let created = pods.create(&PostParams::default(), &pod).await.unwrap();
    PodUid::parse(&created.metadata.uid.unwrap()).unwrap()
}

async fn what_is_not_on_pods(world: &RealControlPlane, recording: &mut Recording) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    for node in nodes.list(&ListParams::default()).await.unwrap().items {
        let name = node.metadata.name.clone().unwrap();
        recording.insert(name, serde_json::to_value(node).unwrap());
    }
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), "kube-system");
    recording.insert(
        "lease".into(),
        serde_json::to_value(leases.get(LEASE).await.unwrap()).unwrap(),
    );
}

fn compare_or_bless(recording: Recording) {
    let folder = upgrade::folder().join(VERSION);
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        for (name, object) in &recording {
            let text = serde_json::to_string_pretty(object).unwrap() + "\n";
            std::fs::write(folder.join(format!("{name}.json")), text).unwrap();
        }
        println!(
            "{} objects are recorded in {}",
            recording.len(),
            folder.display()
        );
        return;
    }
    let recorded = upgrade::recorded(VERSION);
    let names = |objects: &Recording| objects.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(
        names(&recording),
        names(&recorded),
        "STOWAGE_BLESS=1 records them again"
    );
    for (name, object) in &recording {
        assert_eq!(
            normal::written(object),
            normal::written(&recorded[name]),
            "{name}: STOWAGE_BLESS=1 records it"
        );
    }
}
