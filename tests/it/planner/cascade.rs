//! Six full nodes and one preemptor: with an extender that refuses while its victims terminate, kube-scheduler goes on to the
//! next node, and the next, and drains all six.

use super::world::{PlannerCluster, gated, job, machine, serving, with_slow_termination};
use serde_json::Value;
use stowage_lab::demo::machine::DemoMachine;

const SIX: [DemoMachine; 6] = [
    machine("a", 2),
    machine("b", 2),
    machine("c", 2),
    machine("d", 2),
    machine("e", 2),
    machine("f", 2),
];

/// Two jobs of 50 GiB on each node: 22 are free on each GPU, 44 on a node.
async fn full() -> PlannerCluster {
    let world = PlannerCluster::new(&SIX).await;
    for number in 0..12 {
        world.create(with_slow_termination(job(&format!("job-{number:02}"), 50)));
    }
    world
        .wait_until("all jobs run", |world| {
            world.pods().iter().all(|name| {
                world
                    .pod(name)
                    .is_some_and(|pod| pod["status"]["phase"] == "Running")
            })
        })
        .await;
    world
}

async fn assert_one_pod_is_evicted(newcomer: Value) {
    let world = full().await;
    world.create(newcomer);
    world.wait_until_bound("serving").await;
    world.wait_for_reports().await;
    assert_eq!(world.pods().len(), 12, "eleven jobs and the one who asked");
    assert!(
        world.terminating_pods().is_empty(),
        "{:?}",
        world.terminating_pods()
    );
    // One, until the pod was bound.
    world.wait_for_writes("reservation", 2).await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pod_is_evicted_when_the_scheduler_preempts_for_the_nodes_sum() {
    assert_one_pod_is_evicted(serving("serving", 60)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pod_is_evicted_when_the_node_has_enough_vram_but_no_gpu_has() {
    assert_one_pod_is_evicted(serving("serving", 40)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_pod_is_evicted_for_a_gated_pod() {
    assert_one_pod_is_evicted(gated(serving("serving", 60))).await;
}
