//! Pods with the scheduling gate `stowage.dev/plan`: planned, nominated, released from the gate and bound.

use super::world::{PlannerCluster, gated, job, machine, names, serving, with_slow_termination};
use serde_json::{Value, json};
use stowage_lab::demo::scheduler::observations::Verb;

#[tokio::test(flavor = "multi_thread")]
async fn each_planned_pod_costs_the_scheduler_one_filter_call_for_one_node() {
    let world = PlannerCluster::new(&[machine("a", 4), machine("b", 4)]).await;
    let pods: Vec<String> = (0..16)
        .map(|number| format!("planned-{number:02}"))
        .collect();
    pods.iter()
        .for_each(|name| world.create(gated(job(name, 30))));
    for name in &pods {
        world.wait_until_bound(name).await;
        assert_eq!(
            world.calls(name),
            [(Verb::Filter, 1), (Verb::Bind, 1)],
            "{name}"
        );
        assert_eq!(world.planned(name).as_deref(), Some("Nominated"));
        assert!(!world.is_gated(name));
    }
    world.wait_for_writes("nomination", 16).await;
    world.wait_for_writes("gate", 16).await;
    // Whatever follows from a Binding has been written by then.
    world.wait_for_reports().await;
    let kinds = [
        "bind",
        "nomination",
        "gate",
        "reservation",
        "plan",
        "requeue",
    ];
    assert_eq!(kinds.map(|kind| world.writes(kind)), [16, 16, 16, 0, 0, 0]);
    world.stop().await;
}

/// The job on `a` has a lower priority than the one on `b`, and is the cheaper.
async fn cheap_victim_on_a_expensive_on_b() -> PlannerCluster {
    let world = PlannerCluster::new(&[machine("a", 1), machine("b", 1)]).await;
    for (name, node, priority) in [("cheap", "a", -20), ("dear", "b", -10)] {
        world
            .setup()
            .api
            .patch(
                &format!("nodes/{node}"),
                &json!({ "metadata": { "labels": { "host": node } } }),
            )
            .unwrap();
        let mut pod = with_slow_termination(job(name, 60));
        pod["spec"]["priority"] = json!(priority);
        pod["spec"]["nodeSelector"] = json!({ "host": node });
        world.fill([pod]).await;
    }
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cheaper_pod_is_evicted_if_no_filter_refuses() {
    let world = cheap_victim_on_a_expensive_on_b().await;
    world.create(gated(serving("serving", 50)));
    assert_eq!(world.wait_until_bound("serving").await, "a");
    assert_eq!(world.pods(), names(["dear", "serving"]));
    world.stop().await;
}

async fn assert_node_a_is_skipped(spoil: impl Fn(&PlannerCluster, &mut Value)) {
    for gate in [gated, |pod| pod] {
        let world = cheap_victim_on_a_expensive_on_b().await;
        let mut pod = gate(serving("serving", 50));
        spoil(&world, &mut pod);
        // The node's watch and the pod's are two: what the node is now has to be known before the pod comes.
        world.setup().wait_for_scheduler_to_observe_nodes().await;
        world.wait_for_reports().await;
        world.create(pod);
        assert_eq!(world.wait_until_bound("serving").await, "b");
        world.wait_for_reports().await;
        assert_eq!(
            (world.pods(), world.terminating_pods()),
            (names(["cheap", "serving"]), names([]))
        );
        world.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_evicted_on_a_node_whose_taint_excludes_the_preemptor() {
    assert_node_a_is_skipped(|world, _| {
        let taint = json!({ "key": "reserved", "value": "yes", "effect": "NoSchedule" });
        world
            .setup()
            .api
            .patch("nodes/a", &json!({ "spec": { "taints": [taint] } }))
            .unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_evicted_on_a_node_whose_cpu_would_not_suffice_afterwards() {
    assert_node_a_is_skipped(|world, pod| {
        let few =
            json!({ "status": { "capacity": { "cpu": "8" }, "allocatable": { "cpu": "8" } } });
        world.setup().api.patch_status("nodes/a", &few).unwrap();
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("16");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_evicted_on_a_node_that_a_selector_excludes() {
    assert_node_a_is_skipped(|_, pod| pod["spec"]["nodeSelector"] = json!({ "host": "b" })).await;
}

/// Stowage does not know where its volume can be mounted: the scheduler decides.
#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_evicted_for_a_pod_with_a_volume_and_its_gate_is_removed_without_a_nomination() {
    let world = cheap_victim_on_a_expensive_on_b().await;
    let mut pod = gated(serving("serving", 50));
    pod["spec"]["volumes"] =
        json!([{ "name": "weights", "persistentVolumeClaim": { "claimName": "weights" } }]);
    pod["spec"]["preemptionPolicy"] = json!("Never");
    world.create(pod);
    world
        .wait_until("it is released", |world| {
            world.planned("serving").as_deref() == Some("GateRemoved")
        })
        .await;
    world
        .wait_until("the scheduler refuses it", |world| {
            world.is_refused("serving")
        })
        .await;
    world.wait_for_reports().await;
    assert_eq!(
        (world.pods(), world.terminating_pods()),
        (names(["cheap", "dear", "serving"]), names([]))
    );
    assert_eq!(
        (
            world.writes("nomination"),
            world.writes("reservation"),
            world.reservation_count()
        ),
        (0, 0, 0)
    );
    world.stop().await;
}
