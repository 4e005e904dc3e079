//! Two Stowages, each beside its own kube-scheduler, while processes of the control plane and of both replicas are killed
//! (`SIGKILL`) and held up (`SIGSTOP`) at random times: no GPU is promised twice, and when that ends whatever fits is bound.
//!
//! `KUBEBUILDER_ASSETS=… cargo test --test it control_plane::killings -- --ignored --nocapture` takes ten minutes;
//! `STOWAGE_KILLINGS_MINUTES` and `STOWAGE_KILLINGS_SEED` change that and the order of events. Times between events are real: the
//! same seed is the same order of kills, not the same run.

use super::fleet::{GpuNode, node, pod};
use super::leading::LEASE;
use super::processes::{TestProcess, eventually};
use super::world::{Ports, RealControlPlane, SCHEDULER_CONFIG};
use super::{annotation, assert_no_gpu_is_allocated_twice, name_of, node_of, submit};
use crate::needs;
use fastrand::Rng;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stowage_kubernetes_objects::{PLAN_GATE, ReservationMessage};

/// The names of two hosts: a kube-scheduler's identity begins with the name of its own.
const HOSTS: [&str; 2] = ["replica-a", "replica-b"];
const MAX_PODS: usize = 40;
/// Longer than a Lease lasts.
const MAX_PAUSE_MS: u64 = 25_000;

/// One replica: Stowage and the kube-scheduler that asks it.
struct Replica {
    ports: Ports,
    stowage: TestProcess,
    scheduler: TestProcess,
}

impl Replica {
    fn start(world: &RealControlPlane, host: &'static str) -> Self {
        let ports = Ports::free();
        let serve = [
            "--lead-with",
            "kube-scheduler",
            "--lease",
            LEASE,
            "--identity",
            host,
        ];
        let stowage = world.serve(&format!("stowage-{host}"), ports, &serve);
        let config = world.configured(SCHEDULER_CONFIG, |config| {
            let address = format!("http://127.0.0.1:{}/scheduler", ports.verbs);
            config["extenders"][0]["urlPrefix"] = address.into();
        });
        // Each reads its own file whenever it starts.
        let file = world.folder().join(format!("{host}.json"));
        std::fs::rename(config, &file).unwrap();
        let mut command = on_host(host);
        command.arg(world.command("kube-scheduler").get_program());
        command
            .arg("--config")
            .arg(file)
            .arg("--secure-port=0")
            .arg("--v=2");
        let scheduler = TestProcess::start(
            &format!("kube-scheduler-{host}"),
            &mut command,
            world.folder(),
        );
        Self {
            ports,
            stowage,
            scheduler,
        }
    }
}

/// Runs what follows as on a machine of that name; the process is that of the program itself.
fn on_host(host: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--uts", "sh", "-c", "hostname \"$0\" && exec \"$@\"", host]);
    command
}

fn number_from_env(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}: a number"))
    })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "ten minutes of kills at random times"]
async fn no_gpu_is_allocated_twice_whatever_process_is_killed_or_paused() {
    if !on_host("replica")
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        needs::report_skipped(format_args!(
            "`unshare --uts` is not permitted here: two schedulers need two names of hosts"
        ));
        return;
    }
    let seed =
        number_from_env("STOWAGE_KILLINGS_SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    let minutes = number_from_env("STOWAGE_KILLINGS_MINUTES").unwrap_or(10);
    println!("STOWAGE_KILLINGS_SEED={seed} STOWAGE_KILLINGS_MINUTES={minutes}");
    let nodes = vec![
        node("a", 4, 81_559, "NVIDIA-H100-80GB-HBM3"),
        node("b", 4, 81_559, "NVIDIA-H100-80GB-HBM3"),
    ];
    let Some(mut world) =
        RealControlPlane::start_all(nodes.clone(), &["--lead-with", "lease", "--lease", LEASE])
            .await
    else {
        return;
    };
    world.stowage.take().expect("it runs").kill();
    let mut replicas = HOSTS.map(|host| Replica::start(&world, host));
    world.report_to(
        nodes.clone(),
        replicas.iter().map(|replica| replica.ports).collect(),
    );

    let users = tokio::spawn(churn_pods(world.client.clone(), Rng::with_seed(seed)));
    let looks = Arc::<AtomicU64>::default();
    let watched = tokio::spawn(watch(world.client.clone(), nodes.clone(), looks.clone()));
    let ends = Instant::now() + Duration::from_secs(60 * minutes);
    let mut random = Rng::with_seed(seed ^ 0x6b69_6c6c);
    let mut events = 0;
    while Instant::now() < ends {
        tokio::time::sleep(Duration::from_millis(random.u64(1_000..12_000))).await;
        tokio::task::block_in_place(|| inject_failure(&mut world, &mut replicas, &mut random));
        revive(&mut world, &mut replicas);
        events += 1;
        assert!(!watched.is_finished(), "{:?}", watched.await);
    }
    users.abort();
    watched.abort();
    assert!(watched.await.unwrap_err().is_cancelled());
    println!(
        "{events} kills and pauses, {} looks at the pods",
        looks.load(Ordering::Relaxed)
    );

    // Everything runs again. What is left of the users goes, and what comes now fits.
    world.restart_kubelets();
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    eventually("all pods are gone", async || {
        revive(&mut world, &mut replicas);
        let pods = api.list(&ListParams::default()).await.ok()?;
        for pod in &pods {
            let _ = api
                .delete(name_of(pod), &DeleteParams::default().grace_period(0))
                .await;
        }
        pods.items.is_empty().then_some(())
    })
    .await;
    world.restart_kubelets();
    let last: Vec<Pod> = (0..16)
        .map(|n| {
            planned(
                pod(&format!("last-{n}"), 30, &json!({}), "stowage-serving"),
                n % 2 == 0,
            )
        })
        .collect();
    submit(&world.client, &last).await;
    let all = eventually("all that fits is bound", async || {
        revive(&mut world, &mut replicas);
        let pods = api.list(&ListParams::default()).await.ok()?.items;
        pods.iter()
            .all(|pod| node_of(pod).is_some())
            .then_some(pods)
    })
    .await;
    check(&all, &nodes);
    assert_eq!(all.len(), last.len());
    eventually("no reservation outlives its pod's wait", async || {
        let pods = api.list(&ListParams::default()).await.ok()?;
        pods.iter()
            .all(|pod| ReservationMessage::read(pod).is_none())
            .then_some(())
    })
    .await;
    for Replica { ports, .. } in &replicas {
        world.ports = *ports;
        eventually(
            "the ledgers of both add up, and have these pods alone",
            async || {
                let ledger = world.ledger().await?;
                let bound = world.count("stowage_ledger_pods", "bound").await;
                (ledger["violations"] == json!([]) && bound == 16).then_some(())
            },
        )
        .await;
    }
}

/// A kube-apiserver that finds no etcd when it starts ends, and so does a kube-scheduler that loses the Lease. Stowage never ends
/// by itself.
fn revive(world: &mut RealControlPlane, replicas: &mut [Replica; 2]) {
    [&mut world.etcd, &mut world.apiserver]
        .into_iter()
        .for_each(TestProcess::revive);
    for replica in replicas {
        replica.scheduler.revive();
        replica.stowage.check();
    }
}

/// Kills or holds up one process, or two at once.
fn inject_failure(world: &mut RealControlPlane, replicas: &mut [Replica; 2], random: &mut Rng) {
    let is_api = {
        let [a, b] = replicas;
        let mut processes = [
            ("etcd", &mut world.etcd),
            ("kube-apiserver", &mut world.apiserver),
            ("stowage a", &mut a.stowage),
            ("stowage b", &mut b.stowage),
            ("kube-scheduler a", &mut a.scheduler),
            ("kube-scheduler b", &mut b.scheduler),
        ];
        random.shuffle(&mut processes);
        let count = if random.u8(..3) == 0 { 2 } else { 1 };
        let struck = &mut processes[..count];
        let plans: Vec<(bool, Duration)> = struck
            .iter()
            .map(|_| {
                (
                    random.bool(),
                    Duration::from_millis(random.u64(..MAX_PAUSE_MS)),
                )
            })
            .collect();
        std::thread::scope(|scope| {
            for ((name, process), (kills, time)) in struck.iter_mut().zip(plans) {
                println!(
                    "{name} {} {time:.1?}",
                    if kills {
                        "is killed, and starts after"
                    } else {
                        "is held up for"
                    }
                );
                scope.spawn(move || {
                    if kills {
                        process.restart(time / 5)
                    } else {
                        process.pause(time)
                    }
                });
            }
        });
        struck
            .iter()
            .any(|(name, _)| ["etcd", "kube-apiserver"].contains(name))
    };
    if is_api {
        // A write of the stand-in kubelets that failed is not repeated.
        world.restart_kubelets();
    }
}

/// Users create and delete pods of all kinds.
async fn churn_pods(client: Client, mut random: Rng) {
    let api: Api<Pod> = Api::default_namespaced(client);
    for number in 0.. {
        tokio::time::sleep(Duration::from_millis(random.u64(100..700))).await;
        // While the API server is away there is nothing to do.
        let Ok(pods) = api.list(&ListParams::default()).await else {
            continue;
        };
        if pods.items.len() < MAX_PODS && random.u8(..5) > 0 {
            let class = if random.bool() {
                "stowage-serving"
            } else {
                "stowage-opportunistic"
            };
            let annotations = match random.u8(..6) {
                0 => json!({ "stowage.dev/exclusive": "true" }),
                1 => json!({ "stowage.dev/gpus": "2" }),
                _ => json!({}),
            };
            let new = pod(
                &format!("pod-{number}"),
                random.u64(4..60),
                &annotations,
                class,
            );
            let _ = api
                .create(&PostParams::default(), &planned(new, random.bool()))
                .await;
        } else if let Some(pod) = random.choice(&pods.items) {
            let _ = api.delete(name_of(pod), &DeleteParams::default()).await;
        }
    }
}

/// The pod, behind the planner's gate or not.
fn planned(mut pod: Pod, is_planned: bool) -> Pod {
    if is_planned {
        let gates: Value = json!([{ "name": PLAN_GATE }]);
        pod.spec.as_mut().unwrap().scheduling_gates = serde_json::from_value(gates).unwrap();
    }
    pod
}

/// Looks at all pods again and again, and counts how often.
async fn watch(client: Client, nodes: Vec<GpuNode>, looks: Arc<AtomicU64>) {
    let api: Api<Pod> = Api::default_namespaced(client);
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if let Ok(pods) = api.list(&ListParams::default()).await {
            check(&pods.items, &nodes);
            looks.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn check(pods: &[Pod], nodes: &[GpuNode]) {
    let bound: Vec<Pod> = pods
        .iter()
        .filter(|pod| node_of(pod).is_some())
        .cloned()
        .collect();
    for pod in &bound {
        assert!(
            annotation(pod, "stowage.dev/devices").is_some(),
            "{} is bound without GPUs",
            name_of(pod)
        );
    }
    assert_no_gpu_is_allocated_twice(&bound, nodes);
}
