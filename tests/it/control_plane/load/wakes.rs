//! How soon a refused pod is bound when VRAM becomes free, while a thousand bound pods change all the time.

use super::{ALWAYS, BindingTimes, H100, MIB, create_all};
use crate::control_plane::fleet::{GpuNode, node, pod};
use crate::control_plane::processes::eventually;
use crate::control_plane::world::RealControlPlane;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

const BOUND: usize = 1_000;
/// Period in which a kubelet writes once to each of the bound pods: a kubelet writes something every ten seconds.
const CHANGE_PERIOD: Duration = Duration::from_secs(10);
const WRITES_AT_ONCE: usize = 8;
const NODES: usize = 10;
const ROUNDS: usize = 5;
/// Wait until a pod that others requeue all the time is deep in its back-off, which ends at ten seconds.
const BACKOFF_WAIT: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of some minutes; prints a distribution"]
async fn refused_pods_are_requeued_under_load() {
    let nodes: Vec<GpuNode> = (0..NODES)
        .map(|i| node(&format!("w{i}"), 1, MIB, H100))
        .collect();
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;
    let bindings = BindingTimes::watch(world.client.clone());
    let restless = change_bound_pods(&world).await;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        took.extend(time_to_requeue(&world, &nodes, &bindings, round).await);
        println!("round {round}: {:?}", &took[took.len() - NODES..]);
        world.check();
    }
    restless.abort();
    took.sort_unstable();
    let at = |part: f64| took[((took.len() - 1) as f64 * part).round() as usize].as_secs_f64();
    let within = took
        .iter()
        .filter(|took| **took <= Duration::from_secs(2))
        .count();
    println!(
        "| waits | within 2 s | p50 s | p90 s | p99 s | longest s | filter calls |\n|---|---|---|---|---|---|---|\n\
         | {} | {within} | {:.2} | {:.2} | {:.2} | {:.2} | {} |",
        took.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        world
            .count("stowage_answers_total", "verb=\"filter\"")
            .await,
    );
}

/// A thousand bound pods of which a kubelet writes something every ten seconds.
async fn change_bound_pods(world: &RealControlPlane) -> JoinHandle<()> {
    let name = |i: usize| format!("restless-{i:04}");
    let pod = |i| -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": name(i) },
            "spec": { "nodeName": format!("w{}", i % NODES), "containers": [{ "name": "c", "image": "i" }] },
        }))
        .unwrap()
    };
    create_all(&world.client, (0..BOUND).map(pod).collect(), 8).await;
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    let places = Arc::new(Semaphore::new(WRITES_AT_ONCE));
    tokio::spawn(async move {
        let mut ticks = tokio::time::interval(CHANGE_PERIOD / BOUND as u32);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for write in 0.. {
            ticks.tick().await;
            // An API server that is slower than this is not to be buried.
            let place = places.clone().acquire_owned().await.unwrap();
            let (api, name) = (api.clone(), name(write % BOUND));
            tokio::spawn(async move {
                let _place = place;
                let said = json!({ "status": { "message": format!("write {write}") } });
                // Should one fail, the next does.
                let _ = api
                    .patch_status(&name, &PatchParams::default(), &Patch::Merge(said))
                    .await;
            });
        }
    })
}

/// The time from the release of each node's unaccounted VRAM until the pod that waits for it is bound. It includes the wait for
/// the agent's next report, up to a second.
async fn time_to_requeue(
    world: &RealControlPlane,
    nodes: &[GpuNode],
    bindings: &BindingTimes,
    round: usize,
) -> Vec<Duration> {
    nodes
        .iter()
        .for_each(|node| world.set_unaccounted_mib(&node.uuid(0), 60 << 10));
    eventually("the strangers' memory is believed", async || {
        let ledger = world.ledger().await?;
        let taken = |node: &Value| {
            node["gpus"][0]["unaccounted_vram"]
                .as_u64()
                .unwrap_or_default()
                > 0
        };
        ledger["snapshot"]["nodes"]
            .as_array()?
            .iter()
            .all(taken)
            .then_some(())
    })
    .await;
    let late = |node: &GpuNode| format!("late-{round}-{}", node.name);
    let pods = nodes.iter().map(|node| {
        let mut late = pod(&late(node), 40, &json!({}), "stowage-opportunistic");
        let host = BTreeMap::from([("kubernetes.io/hostname".to_owned(), node.name.clone())]);
        late.spec.as_mut().unwrap().node_selector = Some(host);
        late
    });
    create_all(&world.client, pods.collect(), 8).await;
    tokio::time::sleep(BACKOFF_WAIT).await;
    let mut took = Vec::new();
    for node in nodes {
        let started = Instant::now();
        assert_eq!(bindings.of(&late(node)), None, "it was refused");
        world.set_unaccounted_mib(&node.uuid(0), 0);
        let bound = eventually("the pod is bound", async || bindings.of(&late(node))).await;
        took.push(bound - started);
    }
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    for node in nodes {
        api.delete(&late(node), &DeleteParams::default().grace_period(0))
            .await
            .unwrap();
    }
    took
}
