//! Pods that are useful only together: all of them are placed, or none.

use super::world::{PlannerCluster, gated, job, machine, serving};
use serde_json::{Value, json};

const TRIO: [&str; 3] = ["one", "two", "three"];

fn in_trio(mut pod: Value) -> Value {
    pod["metadata"]["labels"]["stowage.dev/group"] = json!("trio");
    pod["metadata"]["annotations"]["stowage.dev/group-min"] = json!("3");
    gated(pod)
}

fn all_bound(world: &PlannerCluster) -> bool {
    TRIO.iter().all(|name| world.node_of(name).is_some())
}

fn are_all_gated(world: &PlannerCluster) -> bool {
    TRIO.iter()
        .all(|name| world.is_gated(name) && world.node_of(name).is_none())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_three_waits_for_all_its_pods_and_reserves_nothing_meanwhile() {
    let world = PlannerCluster::new(&[machine("a", 2), machine("b", 1)]).await;
    world.fill([job("resident", 10)]).await;
    TRIO[..2]
        .iter()
        .for_each(|name| world.create(in_trio(job(name, 60))));
    world.wait_for_reports().await;
    assert!(TRIO[..2].iter().all(|name| world.is_gated(name)) && world.reservation_count() == 0);

    // Jobs may not preempt, and beside the resident the third does not fit if all GPUs are counted.
    world.fill([job("in-the-way", 30)]).await;
    world.create(in_trio(job(TRIO[2], 60)));
    world.wait_for_reports().await;
    world.wait_for_reports().await;
    assert!(
        are_all_gated(&world) && world.reservation_count() == 0,
        "two GPUs are free, and three are needed"
    );
    world.create(gated(job("single", 60)));
    world.wait_until_bound("single").await;
    world.setup().api.delete("pods/default/single").unwrap();

    for name in ["in-the-way", "resident"] {
        world
            .setup()
            .api
            .delete(&format!("pods/default/{name}"))
            .unwrap();
    }
    world.wait_until("all three are bound", all_bound).await;
    assert!(
        TRIO.iter()
            .all(|name| world.planned(name).as_deref() == Some("Nominated"))
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_are_evicted_for_a_whole_group_or_not_at_all() {
    let world = PlannerCluster::new(&[machine("a", 2), machine("b", 1)]).await;
    world.fill(["x", "y"].map(|name| job(name, 60))).await;
    world.fill([serving("stays", 60)]).await;
    TRIO.iter()
        .for_each(|name| world.create(in_trio(serving(name, 50))));
    world.wait_for_reports().await;
    world.wait_for_reports().await;
    assert!(
        are_all_gated(&world)
            && world.terminating_pods().is_empty()
            && world.reservation_count() == 0
    );
    assert_eq!(world.pods().len(), 6, "nobody left for two of three");

    world.setup().api.delete("pods/default/stays").unwrap();
    world.wait_until("all three are bound", all_bound).await;
    assert_eq!(
        world.pods(),
        super::world::names(TRIO),
        "x and y left for them"
    );
    world.stop().await;
}
