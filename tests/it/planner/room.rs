//! Preemption for a serving pod where the node's sum is enough and no single GPU is: kube-scheduler never preempts for it.

use super::world::{
    PlannerCluster, gated, job, machine, names, serving, with_slow_termination,
    with_termination_on_request,
};
use serde_json::Value;
use stowage_lab::demo::scheduler::observations::Verb;

/// 22 GiB are free on the first GPU, 7 on the second.
async fn filled(hardness: fn(Value) -> Value) -> PlannerCluster {
    let world = PlannerCluster::new(&[machine("a", 2)]).await;
    let pods = [job("large", 50), job("medium", 40), job("small", 25)].map(hardness);
    world.fill(pods).await;
    assert_ne!(world.devices_of("large"), world.devices_of("small"));
    assert_eq!(world.devices_of("medium"), world.devices_of("small"));
    world
}

async fn assert_only_the_cheapest_is_evicted(world: PlannerCluster, newcomer: Value) {
    let freed = world.devices_of("small");
    world.create(newcomer);
    world.wait_until_bound("serving").await;
    assert_eq!(world.devices_of("serving"), freed);
    world.wait_for_reports().await;
    assert_eq!(world.pods(), names(["large", "medium", "serving"]));
    assert_eq!(world.terminating_pods(), names([]));
    world.wait_for_writes("reservation", 2).await;
    assert_eq!(world.reservation_count(), 0);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cheapest_pod_is_evicted_and_the_preemptor_is_bound_on_its_gpu() {
    let world = filled(|pod| pod).await;
    assert_only_the_cheapest_is_evicted(world, serving("serving", 26)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_victims_are_awaited_and_no_other_pod_is_evicted_meanwhile() {
    let world = filled(with_slow_termination).await;
    assert_only_the_cheapest_is_evicted(world, serving("serving", 26)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gated_pod_gets_its_reservation_before_the_scheduler_sees_it() {
    let world = filled(with_slow_termination).await;
    let freed = world.devices_of("small");
    world.create(gated(serving("serving", 26)));
    world.wait_until_bound("serving").await;
    assert_eq!(world.devices_of("serving"), freed);
    assert_eq!(world.calls("serving"), [(Verb::Filter, 1), (Verb::Bind, 1)]);
    assert_eq!(world.pods(), names(["large", "medium", "serving"]));
    world.stop().await;
}

/// The scheduler's own victims are two small ones, of one CPU each; one that is as large as both costs less, and CPU is not
/// what is missing.
#[tokio::test(flavor = "multi_thread")]
async fn when_the_scheduler_preempts_no_more_pods_are_evicted_than_needed() {
    let world = PlannerCluster::new(&[machine("a", 2)]).await;
    world
        .fill(["first", "second"].map(|name| serving(name, 60)))
        .await;
    world
        .fill([
            job("medium", 11),
            job("small-1", 4),
            job("small-2", 4),
            job("small-3", 4),
        ])
        .await;
    let freed = world.devices_of("medium");
    world.create(serving("serving", 9));
    world.wait_until_bound("serving").await;
    assert_eq!(world.devices_of("serving"), freed);
    world.wait_for_reports().await;
    assert_eq!(
        world.pods(),
        names([
            "first", "second", "serving", "small-1", "small-2", "small-3"
        ])
    );
    world.stop().await;
}

/// Others wait for it, and its owner says how long. The node's sum is enough: kube-scheduler, which deletes its victims itself,
/// evicts none.
#[tokio::test(flavor = "multi_thread")]
async fn a_victim_has_its_own_grace_period_and_at_most_that_of_its_class() {
    for (own, given) in [(90, 90), (0, 1), (2 * 3600, 600), (31_536_000, 600)] {
        let world = PlannerCluster::new(&[machine("a", 2)]).await;
        let slow = ["one", "other"].map(|name| {
            let mut slow = with_termination_on_request(job(name, 40));
            slow["spec"]["terminationGracePeriodSeconds"] = own.into();
            slow
        });
        world.fill(slow).await;
        world.create(serving("serving", 60));
        let victim = world
            .wait_for("a job leaves", |world| {
                world.terminating_pods().into_iter().next()
            })
            .await;
        assert_eq!(
            world.pod(&victim).unwrap()["metadata"]["deletionGracePeriodSeconds"],
            given
        );
        world.stop().await;
    }
}
