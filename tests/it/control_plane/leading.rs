//! Leadership: Stowage acts as long as its own kube-scheduler holds the Lease, and no longer.

use super::fleet::{node, pod};
use super::processes::eventually;
use super::world::{Ports, RealControlPlane, http_request};
use super::{submit, wait_until_all_bound};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use serde_json::json;
use std::time::Instant;

pub const LEASE: &str = "kube-system/stowage-scheduler";

/// Arguments of a Stowage whose kube-scheduler runs on this machine.
pub fn serve_beside_its_scheduler() -> Vec<String> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    [
        "--lead-with",
        "kube-scheduler",
        "--lease",
        LEASE,
        "--identity",
        host.trim(),
    ]
    .map(str::to_owned)
    .to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn stowage_acts_while_its_kube_scheduler_leads_and_stops_before_the_lease_expires() {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let serve = |identity| {
        [
            "--lead-with",
            "kube-scheduler",
            "--lease",
            LEASE,
            "--identity",
            identity,
        ]
    };
    let nodes = vec![node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let Some(mut world) = RealControlPlane::start_all(nodes, &serve(host.trim())).await else {
        return;
    };
    let standby = Ports::free();
    let _standby = world.serve("standby", standby, &serve("another-host"));
    eventually("the ledger is complete", async || {
        world.check();
        let (status, text) = world.get("/readyz").await?;
        (status == 200 && text.contains("does not lead")).then_some(())
    })
    .await;
    assert_eq!(try_to_bind(world.ports).await, Some(503));

    world.begin_scheduling().await;
    eventually("the gate opens", async || {
        (try_to_bind(world.ports).await? == 200).then_some(())
    })
    .await;
    submit(
        &world.client,
        &[pod("first", 20, &json!({}), "stowage-serving")],
    )
    .await;
    wait_until_all_bound(&mut world, 1).await;
    // Its neighbor does not lead.
    eventually("the other replica refuses", async || {
        let status = try_to_bind(standby).await?;
        assert_eq!(status, 503);
        Some(())
    })
    .await;

    world.scheduler.take().expect("it runs").kill();
    let killed = Instant::now();
    // When the last was sent that was let through.
    let mut last = jiff::Timestamp::now();
    eventually("the gate shuts", async || {
        let sent = jiff::Timestamp::now();
        let status = try_to_bind(world.ports).await?;
        if status == 200 {
            last = sent;
        }
        (status == 503).then_some(())
    })
    .await;
    let passes_on = lease_passes_on(&world.client).await;
    println!(
        "killed, no bind {:.1?} later, the lease could pass on at {passes_on}",
        killed.elapsed()
    );
    assert!(
        last < passes_on,
        "one was let through at {last}, the lease could pass on at {passes_on}"
    );
    submit(
        &world.client,
        &[pod("second", 20, &json!({}), "stowage-serving")],
    )
    .await;

    world.start_scheduler();
    wait_until_all_bound(&mut world, 2).await;
}

/// A bind of a pod that is not there: 503 while the gate is shut, 200 with an error while it is open.
async fn try_to_bind(ports: Ports) -> Option<u16> {
    let body =
        json!({ "PodName": "none", "PodNamespace": "default", "PodUID": "none", "Node": "a" });
    let (status, text) = http_request(
        "POST",
        &format!("http://127.0.0.1:{}/scheduler/bind", ports.verbs),
        &body.to_string(),
    )
    .await?;
    assert!(
        status != 200 || text.contains("unknown to Stowage"),
        "{text}"
    );
    Some(status)
}

/// The earliest moment at which another scheduler may take the Lease. The clock is this machine's for all of them.
async fn lease_passes_on(client: &Client) -> jiff::Timestamp {
    let (namespace, name) = LEASE.split_once('/').unwrap();
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let lease = leases.get(name).await.unwrap().spec.unwrap();
    let seconds = lease.lease_duration_seconds.unwrap();
    lease.renew_time.unwrap().0 + jiff::SignedDuration::from_secs(seconds.into())
}
