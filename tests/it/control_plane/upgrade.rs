//! An upgrade and a step back, before a real API server: an earlier version's binary and today's beside each other, one acting.

use super::fleet::{FleetAgents, node, pod};
use super::processes::eventually;
use super::world::{Ports, RealControlPlane};
use super::{
    annotation, assert_no_gpu_is_allocated_twice, charged, name_of, pods, submit,
    wait_until_all_bound,
};
use crate::needs;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;
use stowage_kubernetes_objects::ReservationMessage;
use stowage_lab::demo::termination;

/// Names the binary of an earlier version.
const PREVIOUS: &str = "STOWAGE_PREVIOUS";
/// The one Lease that the shipped role lets Stowage write.
const LEASE: &str = "kube-system/stowage-scheduler";
/// Interval of the agents' reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

fn serve(identity: &str) -> [&str; 8] {
    [
        "--lead-with",
        "lease",
        "--lease",
        LEASE,
        "--identity",
        identity,
        "--write-deadline",
        "1s",
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_takes_over_from_the_previous_one_and_hands_back() {
    let Some(previous) = std::env::var_os(PREVIOUS).map(PathBuf::from) else {
        needs::report_skipped(format_args!("{PREVIOUS} names no earlier version's binary"));
        return;
    };
    let nodes = vec![node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &serve("never")).await else {
        return;
    };
    world.stowage.take().expect("it runs").kill();
    let old = world.ports;
    world.stowage = Some(world.serve_by(&previous, "old", old, &serve("old")));
    world
        .begin_scheduling_with_change(|config| {
            config["leaderElection"] = json!({ "leaderElect": false })
        })
        .await;

    // 71.7 GiB of each GPU are allocatable.
    let filler = |name, gib| pod(name, gib, &json!({}), "stowage-serving");
    submit(&world.client, &[filler("first", 60), filler("second", 40)]).await;
    wait_until_all_bound(&mut world, 2).await;
    // It takes so long to leave that its successor is bound by the new version.
    let victim = pod(
        "victim",
        30,
        &json!({ termination::TERMINATION_MILLIS: "60000" }),
        "stowage-opportunistic",
    );
    submit(&world.client, &[victim]).await;
    wait_until_all_bound(&mut world, 3).await;
    submit(&world.client, &[filler("preemptor", 25)]).await;
    let reserved = eventually("the old version has reserved", async || {
        reservation(&world, "preemptor").await
    })
    .await;

    let new = Ports::free();
    let _reports = FleetAgents::start(REPORT_INTERVAL, nodes.clone(), vec![new]);
    let today = world.serve("new", new, &serve("new"));
    let before = charged(&world.ledger().await.unwrap());
    world.ports = new;
    eventually("the new version has the old one's ledger", async || {
        Some(charged(&world.ledger().await?)).filter(|ledger| *ledger == before)
    })
    .await;
    world.stowage.replace(today).expect("it runs").kill();
    world.scheduler.take().expect("it runs").kill();
    world
        .begin_scheduling_with_change(|config| {
            config["leaderElection"] = json!({ "leaderElect": false })
        })
        .await;
    all_bound_among(&mut world, "preemptor").await;
    let found = pods(&world.client).await;
    let preemptor = found
        .iter()
        .find(|pod| name_of(pod) == "preemptor")
        .unwrap();
    assert_eq!(
        annotation(preemptor, "stowage.dev/devices"),
        Some(reserved.as_str()),
        "the reservation is kept to"
    );
    assert_no_gpu_is_allocated_twice(&found, &nodes);

    // And back: what the new version wrote is understood by the old one.
    let after = charged(&world.ledger().await.unwrap());
    world.ports = old;
    let again = world.serve_by(&previous, "old-again", old, &serve("old"));
    eventually("the old version has the new one's ledger", async || {
        Some(charged(&world.ledger().await?)).filter(|ledger| *ledger == after)
    })
    .await;
    world.stowage.replace(again).expect("it runs").kill();
    println!(
        "taken over and given back: {} GPUs charged alike",
        after.len()
    );
}

/// The device that the pod's reservation names.
async fn reservation(world: &RealControlPlane, name: &str) -> Option<String> {
    let pods = pods(&world.client).await;
    let message = ReservationMessage::read(pods.iter().find(|pod| name_of(pod) == name)?)?;
    let devices: Vec<Value> = message.devices.iter().map(|device| json!(device)).collect();
    devices.first()?.as_str().map(str::to_owned)
}

async fn all_bound_among(world: &mut RealControlPlane, name: &str) {
    let is_bound = |pod: &&Pod| {
        name_of(pod) == name
            && pod
                .spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.is_some())
    };
    eventually("it is bound", async || {
        world.check();
        pods(&world.client).await.iter().find(is_bound).map(|_| ())
    })
    .await;
}
