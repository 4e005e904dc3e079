//! Two measurements beside the real scheduler, run by hand in a release build (`cargo test --release --test it
//! control_plane::load -- --ignored --nocapture`): how soon a refused pod is bound when VRAM becomes free while a thousand others
//! change all the time, and how many pods a second are bound when they are planned, when they are filtered, and without Stowage.

use super::fleet::{GpuNode, node, pod};
use super::processes::eventually;
use super::world::{RealControlPlane, SCHEDULER_CONFIG};
use super::{ALWAYS, node_of};
use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage::kubernetes::objects;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

const H100: &str = "NVIDIA-H100-80GB-HBM3";
const MIB: u64 = 81_559;

/// When each pod was first seen with a node.
struct BindingTimes {
    seen: Arc<Mutex<BTreeMap<String, Instant>>>,
    task: JoinHandle<()>,
}

impl BindingTimes {
    fn watch(client: Client) -> Self {
        let seen: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
        let noted = seen.clone();
        let task = tokio::spawn(async move {
            let pods: Api<Pod> = Api::default_namespaced(client);
            let mut events = watcher(pods, watcher::Config::default()).default_backoff().boxed();
            while let Some(event) = events.next().await {
                if let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event
                    && node_of(&pod).is_some()
                {
                    let name = pod.metadata.name.unwrap_or_default();
                    noted.lock().entry(name).or_insert_with(Instant::now);
                }
            }
        });
        Self { seen, task }
    }

    fn of(&self, name: &str) -> Option<Instant> {
        self.seen.lock().get(name).copied()
    }

    fn last(&self, prefix: &str, count: usize) -> Option<Instant> {
        let seen = self.seen.lock();
        let of_prefix: Vec<Instant> =
            seen.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, at)| *at).collect();
        (of_prefix.len() >= count).then(|| of_prefix.into_iter().max()).flatten()
    }
}

impl Drop for BindingTimes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn create_all(client: &Client, pods: Vec<Pod>, clients: usize) {
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    stream::iter(pods)
        .for_each_concurrent(clients, |pod| {
            let api = api.clone();
            async move { drop(api.create(&PostParams::default(), &pod).await.unwrap()) }
        })
        .await;
}

async fn delete_all(world: &RealControlPlane) {
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    api.delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default()).await.unwrap();
    eventually("all pods are gone, from the books too", async || {
        let none = api.list(&ListParams::default()).await.ok()?.items.is_empty();
        (none && world.count("stowage_ledger_pods", "bound").await == 0).then_some(())
    })
    .await;
}

// ---- how soon a refused pod is bound ----

const BOUND: usize = 1_000;
const EVERY: Duration = Duration::from_secs(10);
const WRITES_AT_ONCE: usize = 8;
const NODES: usize = 10;
const ROUNDS: usize = 5;
/// Until a pod that others wake all the time is deep in its back-off, which ends at ten seconds.
const REFUSED_FOR: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of some minutes; prints a distribution"]
async fn wakes_under_load() {
    let nodes: Vec<GpuNode> = (0..NODES).map(|i| node(&format!("w{i}"), 1, MIB, H100)).collect();
    let Some(mut world) = RealControlPlane::at_work(nodes.clone(), &ALWAYS).await else { return };
    world.begin_scheduling().await;
    let bindings = BindingTimes::watch(world.client.clone());
    let restless = restless(&world).await;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        took.extend(freed(&world, &nodes, &bindings, round).await);
        println!("round {round}: {:?}", &took[took.len() - NODES..]);
        world.check();
    }
    restless.abort();
    took.sort_unstable();
    let at = |part: f64| took[((took.len() - 1) as f64 * part).round() as usize].as_secs_f64();
    let within = took.iter().filter(|took| **took <= Duration::from_secs(2)).count();
    println!(
        "| waits | within 2 s | p50 s | p90 s | p99 s | longest s | filter calls |\n|---|---|---|---|---|---|---|\n\
         | {} | {within} | {:.2} | {:.2} | {:.2} | {:.2} | {} |",
        took.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        world.count("stowage_answers_total", "verb=\"filter\"").await,
    );
}

/// A thousand bound pods of which a kubelet writes something every ten seconds.
async fn restless(world: &RealControlPlane) -> JoinHandle<()> {
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
        let mut ticks = tokio::time::interval(EVERY / BOUND as u32);
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
                let _ = api.patch_status(&name, &PatchParams::default(), &Patch::Merge(said)).await;
            });
        }
    })
}

/// The time from the release of each node's unaccounted VRAM until the pod that waits for it is bound. It includes the wait for
/// the agent's next report, up to a second.
async fn freed(
    world: &RealControlPlane,
    nodes: &[GpuNode],
    bindings: &BindingTimes,
    round: usize,
) -> Vec<Duration> {
    nodes.iter().for_each(|node| world.occupy(&node.uuid(0), 60 << 10));
    eventually("the strangers' memory is believed", async || {
        let books = world.books().await?;
        let taken = |node: &Value| node["gpus"][0]["unaccounted_vram"].as_u64().unwrap_or_default() > 0;
        books["snapshot"]["nodes"].as_array()?.iter().all(taken).then_some(())
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
    tokio::time::sleep(REFUSED_FOR).await;
    let mut took = Vec::new();
    for node in nodes {
        let started = Instant::now();
        assert_eq!(bindings.of(&late(node)), None, "it was refused");
        world.occupy(&node.uuid(0), 0);
        let bound = eventually("the pod is bound", async || bindings.of(&late(node))).await;
        took.push(bound - started);
    }
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    for node in nodes {
        api.delete(&late(node), &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    took
}

// ---- how many pods a second are bound ----

const LARGE: usize = 1_000;
const PODS: usize = 600;
const CLIENTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadKind {
    Planned,
    Filtered,
    WithoutStowage,
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of some minutes; prints a table"]
async fn pods_a_second_at_a_thousand_nodes() {
    let nodes: Vec<GpuNode> = (0..LARGE).map(|i| node(&format!("n{i:04}"), 8, MIB, H100)).collect();
    // Fresh is what is younger than five seconds; a report a second from each would take a core of this machine.
    let Some(mut world) = RealControlPlane::reporting(Duration::from_secs(4), nodes, &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;
    world.stop_kubelets();
    println!("{}", world.versions());
    println!(
        "| round | way | pods | created in s | bound in s | pods/s | filter | prioritize |\n|---|---|---|---|---|---|---|---|"
    );
    for round in 0..2 {
        for way in [LoadKind::Planned, LoadKind::Filtered, LoadKind::WithoutStowage] {
            let line = measure(&mut world, way, round).await;
            println!("| {round} | {way:?} | {line}");
        }
    }
}

async fn measure(world: &mut RealControlPlane, way: LoadKind, round: usize) -> String {
    restart_scheduler(world, way).await;
    let prefix = format!("{}-{round}-", format!("{way:?}").to_lowercase());
    let pods: Vec<Pod> = (0..PODS).map(|i| asks(&format!("{prefix}{i:04}"), way)).collect();
    let bindings = BindingTimes::watch(world.client.clone());
    let answers = async |world: &RealControlPlane, verb: &str| {
        world.count("stowage_answers_total", &format!("verb=\"{verb}\"")).await
    };
    let before = (answers(world, "filter").await, answers(world, "prioritize").await);
    let started = Instant::now();
    create_all(&world.client, pods, CLIENTS).await;
    let created = started.elapsed();
    let last = eventually("all are bound", async || {
        world.check();
        bindings.last(&prefix, PODS)
    })
    .await;
    let bound = last - started;
    let after = (answers(world, "filter").await, answers(world, "prioritize").await);
    delete_all(world).await;
    format!(
        "{PODS} | {:.2} | {:.2} | {:.0} | {} | {} |",
        created.as_secs_f64(),
        bound.as_secs_f64(),
        PODS as f64 / bound.as_secs_f64(),
        after.0 - before.0,
        after.1 - before.1
    )
}

/// The clock starts when the scheduler has bound a pod: it leads, and its caches are warm.
async fn restart_scheduler(world: &mut RealControlPlane, way: LoadKind) {
    world.scheduler.take().into_iter().for_each(|scheduler| scheduler.kill());
    world.start_scheduler_but(SCHEDULER_CONFIG, |config| {
        // Enough for each way: what is measured is not a client's own limit.
        config["clientConnection"]["qps"] = json!(5000);
        config["clientConnection"]["burst"] = json!(10000);
        if way == LoadKind::WithoutStowage {
            config.as_object_mut().unwrap().remove("extenders");
        }
    });
    let bindings = BindingTimes::watch(world.client.clone());
    create_all(&world.client, vec![asks("probe", LoadKind::WithoutStowage)], 1).await;
    eventually("the scheduler is at work", async || bindings.of("probe")).await;
    delete_all(world).await;
}

fn asks(name: &str, way: LoadKind) -> Pod {
    let mut pod = pod(name, 10, &json!({}), "stowage-opportunistic");
    let spec = pod.spec.as_mut().unwrap();
    match way {
        LoadKind::Planned => {
            let gates = json!([{ "name": objects::PLAN_GATE }]);
            spec.scheduling_gates = Some(serde_json::from_value(gates).unwrap());
        }
        LoadKind::Filtered => {}
        // No other client may bind a pod that requests VRAM.
        LoadKind::WithoutStowage => spec.containers[0].resources.as_mut().unwrap().limits = None,
    }
    pod
}
