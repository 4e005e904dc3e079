//! What a pod costs each process, and how many pods a second are bound: planned, filtered, and without Stowage.
//!
//! The agents have reported once, and the policy believes that for an hour: what Stowage spends is spent on the pods.

use super::{ALWAYS, BindingTimes, H100, MIB, create_all, delete_all};
use crate::control_plane::fleet::{GpuNode, node, pod};
use crate::control_plane::processes::{TestProcess, eventually, own_cpu_time};
use crate::control_plane::world::{RealControlPlane, SCHEDULER_CONFIG};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::time::{Duration, Instant};
use stowage_kubernetes_objects as objects;

const PODS: usize = 600;
const CLIENTS: usize = 8;
const ROUNDS: usize = 2;
const POLICY: &str = "kind: SchedulingPolicy\ntelemetry: {fresh: 1h, stale: 2h}\n";
/// Wait after the last Binding: kube-scheduler writes its Events after the Bindings.
const EVENT_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadKind {
    Planned,
    Filtered,
    WithoutStowage,
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of some minutes; prints a table"]
async fn pods_a_second_at_a_thousand_nodes() {
    pods_a_second(1_000).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of some minutes; prints a table"]
async fn pods_a_second_at_five_thousand_nodes() {
    pods_a_second(5_000).await;
}

async fn pods_a_second(nodes: usize) {
    let nodes: Vec<GpuNode> = (0..nodes)
        .map(|i| node(&format!("n{i:04}"), 8, MIB, H100))
        .collect();
    let policy = tempfile::tempdir().unwrap();
    std::fs::write(policy.path().join("policy.yaml"), POLICY).unwrap();
    let policy = [
        "--policy",
        policy.path().to_str().unwrap(),
        "--gpu-metrics=false",
    ];
    let serve: Vec<&str> = ALWAYS.into_iter().chain(policy).collect();
    let Some(mut world) =
        RealControlPlane::start_all_with_report_interval(Duration::from_secs(4), nodes, &serve)
            .await
    else {
        return;
    };
    world.begin_scheduling().await;
    world.stop_kubelets();
    world.stop_agents();
    println!(
        "{}; milliseconds of CPU time for each pod:",
        world.versions()
    );
    println!(
        "| round | way | created in s | bound in s | pods/s | API server | etcd | scheduler | Stowage | the clients | filter | prioritize |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    for round in 0..ROUNDS {
        for way in [
            LoadKind::Planned,
            LoadKind::Filtered,
            LoadKind::WithoutStowage,
        ] {
            let line = measure(&mut world, way, round).await;
            println!("| {round} | {way:?} | {line}");
        }
    }
}

async fn measure(world: &mut RealControlPlane, way: LoadKind, round: usize) -> String {
    restart_scheduler(world, way).await;
    let prefix = format!("{}-{round}-", format!("{way:?}").to_lowercase());
    let pods: Vec<Pod> = (0..PODS)
        .map(|i| pod_requesting(&format!("{prefix}{i:04}"), way))
        .collect();
    let bindings = BindingTimes::watch(world.client.clone());
    let answers = async |world: &RealControlPlane, verb: &str| {
        world
            .count("stowage_answers_total", &format!("verb=\"{verb}\""))
            .await
    };
    let before = (
        answers(world, "filter").await,
        answers(world, "prioritize").await,
    );
    let spent_before = CpuTimes::of(world);
    let started = Instant::now();
    create_all(&world.client, pods, CLIENTS).await;
    let created = started.elapsed();
    let last = eventually("all are bound", async || {
        world.check();
        bindings.last(&prefix, PODS)
    })
    .await;
    let bound = last - started;
    tokio::time::sleep(EVENT_DELAY).await;
    let spent = CpuTimes::of(world).since(&spent_before);
    let after = (
        answers(world, "filter").await,
        answers(world, "prioritize").await,
    );
    delete_all(world).await;
    format!(
        "{:.2} | {:.2} | {:.0} | {spent} | {} | {} |",
        created.as_secs_f64(),
        bound.as_secs_f64(),
        PODS as f64 / bound.as_secs_f64(),
        after.0 - before.0,
        after.1 - before.1
    )
}

/// The CPU time of each process.
struct CpuTimes([Duration; 5]);

impl CpuTimes {
    fn of(world: &RealControlPlane) -> Self {
        let of = |process: &Option<TestProcess>| process.as_ref().expect("it runs").cpu_time();
        let (scheduler, stowage) = (of(&world.scheduler), of(&world.stowage));
        Self([
            world.apiserver.cpu_time(),
            world.etcd.cpu_time(),
            scheduler,
            stowage,
            own_cpu_time(),
        ])
    }

    fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - before.0[i]))
    }
}

impl std::fmt::Display for CpuTimes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of_a_pod = self
            .0
            .map(|time| format!("{:.2}", time.as_secs_f64() * 1e3 / PODS as f64));
        f.write_str(&of_a_pod.join(" | "))
    }
}

/// The clock starts when the scheduler has bound a pod: it leads, and its caches are warm.
async fn restart_scheduler(world: &mut RealControlPlane, way: LoadKind) {
    world
        .scheduler
        .take()
        .into_iter()
        .for_each(TestProcess::kill);
    world.start_scheduler_with_change(SCHEDULER_CONFIG, |config| {
        // Enough for each way: what is measured is not a client's own limit.
        config["clientConnection"]["qps"] = json!(5000);
        config["clientConnection"]["burst"] = json!(10000);
        // Its predecessor's Lease is not waited for.
        config["leaderElection"] = json!({ "leaderElect": false });
        if way == LoadKind::WithoutStowage {
            config.as_object_mut().unwrap().remove("extenders");
        }
    });
    let bindings = BindingTimes::watch(world.client.clone());
    create_all(
        &world.client,
        vec![pod_requesting("probe", LoadKind::WithoutStowage)],
        1,
    )
    .await;
    eventually("the scheduler is at work", async || bindings.of("probe")).await;
    delete_all(world).await;
}

fn pod_requesting(name: &str, way: LoadKind) -> Pod {
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
