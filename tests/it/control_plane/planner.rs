//! The planner beside the real scheduler: preemption on one GPU where the node's sum would do, six nodes that are not drained,
//! VRAM that becomes free without an API event, and pods that are planned before the scheduler sees them.

use super::fleet::{GpuNode, node, pod};
use super::journal::{ClusterJournal, PodChange};
use super::processes::eventually;
use super::world::RealControlPlane;
use super::{
    ALWAYS, annotation, assert_no_gpu_is_allocated_twice, gated, name_of, node_of, pods, submit,
    wait_until_all_bound,
};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Instant;
use stowage_kubernetes_objects as objects;
use stowage_lab::demo::termination;

const H100: &str = "NVIDIA-H100-80GB-HBM3";
const PCIE: &str = "NVIDIA-H100-PCIe";
const MIB: u64 = 81_559;

fn h100(name: &str, gpus: u32, model: &'static str) -> GpuNode {
    node(name, gpus, MIB, model)
}

/// For nodes with this model of GPU only.
fn on(mut pod: Pod, model: &str) -> Pod {
    let selector = BTreeMap::from([("nvidia.com/gpu.product".to_owned(), model.to_owned())]);
    pod.spec.as_mut().unwrap().node_selector = Some(selector);
    pod
}

fn job(name: &str, gib: u64) -> Pod {
    pod(
        name,
        gib,
        &json!({ termination::TERMINATION_MILLIS: "4000" }),
        "stowage-opportunistic",
    )
}

fn serving(name: &str, gib: u64) -> Pod {
    pod(name, gib, &json!({}), "stowage-serving")
}

async fn wait_until_bound(world: &mut RealControlPlane, name: &str) -> Pod {
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    eventually(&format!("{name} is bound"), async || {
        world.check();
        api.get(name)
            .await
            .ok()
            .filter(|pod| node_of(pod).is_some())
    })
    .await
}

async fn remaining(world: &RealControlPlane) -> Vec<String> {
    let mut names: Vec<String> = pods(&world.client)
        .await
        .iter()
        .map(|pod| name_of(pod).to_owned())
        .collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_cheapest_pods_of_one_gpu_are_evicted() {
    let mut nodes = vec![h100("sum", 2, PCIE)];
    nodes.extend(["n0", "n1", "n2", "n3", "n4", "n5"].map(|name| h100(name, 2, H100)));
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    let journal = ClusterJournal::start(world.client.clone());
    world.begin_scheduling().await;
    // 71.7 GiB of each GPU are allocatable: 21.7 are free on one, 6.7 on the other. Where reports come late a twentieth of the
    // GPU is kept back, and the same pod is evicted.
    for (n, (name, gib)) in [("large", 50), ("medium", 40), ("small", 25)]
        .into_iter()
        .enumerate()
    {
        submit(&world.client, &[on(job(name, gib), PCIE)]).await;
        wait_until_all_bound(&mut world, n + 1).await;
    }
    submit(
        &world.client,
        &(0..12)
            .map(|i| on(job(&format!("job-{i:02}"), 50), H100))
            .collect::<Vec<_>>(),
    )
    .await;
    wait_until_all_bound(&mut world, 15).await;

    submit(&world.client, &[on(serving("one-gpu", 25), PCIE)]).await;
    let on_freed = wait_until_bound(&mut world, "one-gpu").await;
    in_order(&journal, "one-gpu", "small").await;
    assert_eq!(
        journal.pods_with(|happening| *happening == PodChange::Leaving),
        ["small"]
    );
    let (_, _, of_small) = journal.binding_of("small").await;
    assert_eq!(
        annotation(&on_freed, "stowage.dev/devices"),
        Some(&*of_small["stowage.dev/devices"])
    );

    // By the planner, by the scheduler's preempt verb, and behind the gate: each time one of twelve.
    for (n, pod) in [
        serving("planner", 40),
        serving("verb", 60),
        gated(serving("gated", 60)),
    ]
    .into_iter()
    .enumerate()
    {
        let (name, pod) = (name_of(&pod).to_owned(), on(pod, H100));
        submit(&world.client, &[pod]).await;
        wait_until_bound(&mut world, &name).await;
        journal.binding_of(&name).await;
        let left = journal.pods_with(|happening| *happening == PodChange::Leaving);
        assert_eq!(left.len(), n + 2, "for {name}: {left:?}");
        in_order(&journal, &name, left.last().unwrap()).await;
    }
    assert_eq!(remaining(&world).await.len(), 15, "four left, four came");
    assert_no_gpu_is_allocated_twice(&pods(&world.client).await, &nodes);
    println!(
        "left, in order: {:?}; {}",
        journal.pods_with(|happening| *happening == PodChange::Leaving),
        world.versions()
    );
}

/// Reserved, victims marked, victims gone, bound.
async fn in_order(journal: &ClusterJournal, preemptor: &str, victim: &str) {
    let (bound, ..) = journal.binding_of(preemptor).await;
    let place = |pod: &str, is_it: &dyn Fn(&PodChange) -> bool| {
        journal
            .position_of(pod, is_it)
            .unwrap_or_else(|| panic!("{pod}: {:?}", journal.entries_of(pod)))
    };
    let held = place(preemptor, &|happening| {
        matches!(happening, PodChange::Holds(_))
    });
    let left = place(victim, &|happening| *happening == PodChange::Leaving);
    let gone = place(victim, &|happening| *happening == PodChange::Gone);
    assert!(
        held < left && left < gone && gone < bound,
        "{preemptor}: {held}, {left}, {gone}, {bound}"
    );
}

const REFUSED: usize = 200;

#[tokio::test(flavor = "multi_thread")]
async fn planned_pods_cost_one_filter_call_each_and_one_of_two_hundred_refused_is_requeued() {
    let nodes = vec![h100("a", 8, H100), h100("b", 8, H100), h100("w", 1, PCIE)];
    let Some(mut world) = RealControlPlane::start_all(nodes.clone(), &ALWAYS).await else {
        return;
    };
    let unaccounted = nodes[2].uuid(0);
    world.set_unaccounted_mib(&unaccounted, 60 << 10);
    world.begin_scheduling().await;

    submit(
        &world.client,
        &(0..32)
            .map(|i| gated(on(job(&format!("planned-{i:02}"), 30), H100)))
            .collect::<Vec<_>>(),
    )
    .await;
    let planned = wait_until_all_bound(&mut world, 32).await;
    let plan = |pod: &Pod| {
        let conditions = pod
            .status
            .as_ref()
            .unwrap()
            .conditions
            .as_ref()
            .unwrap()
            .iter();
        let plan = conditions
            .clone()
            .find(|condition| condition.type_ == objects::PLACED_CONDITION);
        plan.and_then(|condition| condition.reason.clone())
    };
    assert!(
        planned
            .iter()
            .all(|pod| plan(pod).as_deref() == Some("Nominated"))
    );
    let calls = async |world: &RealControlPlane, verb: &str| {
        world
            .count("stowage_answers_total", &format!("verb=\"{verb}\""))
            .await
    };
    assert_eq!(
        (
            calls(&world, "filter").await,
            calls(&world, "prioritize").await
        ),
        (32, 0)
    );
    let written = async |world: &RealControlPlane, kind: &str| {
        world
            .count(
                "stowage_api_server_writes_total",
                &format!("kind=\"{kind}\",outcome=\"written\""),
            )
            .await
    };
    for kind in ["nomination", "gate"] {
        // They are counted when their answers are in.
        eventually(kind, async || {
            (written(&world, kind).await >= 32).then_some(())
        })
        .await;
        assert_eq!(written(&world, kind).await, 32, "{kind}");
    }

    eventually("the ledger has the unaccounted VRAM", async || {
        let ledger = world.ledger().await?;
        let taken = &ledger["snapshot"]["nodes"]
            .as_array()?
            .iter()
            .find(|node| node["name"] == "w")?["gpus"][0]["unaccounted_vram"];
        (taken != &Value::Null && taken != &json!(0)).then_some(())
    })
    .await;
    submit(
        &world.client,
        &(0..REFUSED)
            .map(|i| on(job(&format!("late-{i:03}"), 40), PCIE))
            .collect::<Vec<_>>(),
    )
    .await;
    eventually("all are refused", async || {
        world.check();
        let refused = pods(&world.client)
            .await
            .iter()
            .filter(|pod| is_refused(pod))
            .count();
        (refused == REFUSED).then_some(())
    })
    .await;
    let before = calls(&world, "filter").await;
    world.set_unaccounted_mib(&unaccounted, 0);
    let freed = Instant::now();
    wait_until_all_bound(&mut world, 33).await;
    let took = freed.elapsed();
    // A pod whose back-off ends just then is retried by itself, and a pod whose refusal is in flight loses its nomination to it.
    let (nominations, wakes) = (
        written(&world, "nomination").await,
        written(&world, "requeue").await,
    );
    assert!(
        (32..=35).contains(&nominations) && wakes == 0,
        "{nominations} and {wakes}: a few are touched at most"
    );
    println!(
        "{REFUSED} refused by {} filter calls; room for one became free: bound {took:.1?} later, after {} more calls",
        before - 32,
        calls(&world, "filter").await - before
    );
}

fn is_refused(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten();
    conditions
        .into_iter()
        .any(|condition| condition.reason.as_deref() == Some("Unschedulable"))
}
