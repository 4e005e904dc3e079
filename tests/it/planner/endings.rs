//! Interruptions between a reservation and its Binding: victims that do not terminate, victims whose memory stays in use, a pod
//! that is deleted, a planner that dies.

use super::world::{
    PlannerCluster, gated, job, machine, names, serving, with_termination_on_request,
};
use serde_json::{Value, json};
use std::time::Duration;
use stowage_kubernetes_objects::DISRUPTION_TARGET_CONDITION;
use stowage_lab::demo::agents::DemoAgents;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use stowage_lab::demo::stowage::Stowage;
use stowage_lab::demo::termination;
use stowage_scheduling::policy::Policy;
use stowage_server::service::{ServerState, Tenure};

/// The one on `a` has the lower priority, and is the cheaper.
async fn two_nodes(on_a: impl Fn(Value) -> Value) -> PlannerCluster {
    let world = PlannerCluster::with_short_deadlines(&[machine("a", 1), machine("b", 1)]).await;
    for (name, node, priority) in [("on-a", "a", -20), ("on-b", "b", -10)] {
        let label = json!({ "metadata": { "labels": { "host": node } } });
        world
            .setup()
            .api
            .patch(&format!("nodes/{node}"), &label)
            .unwrap();
        let mut pod = job(name, 60);
        pod["spec"]["priority"] = json!(priority);
        pod["spec"]["nodeSelector"] = json!({ "host": node });
        world
            .fill([if node == "a" { on_a(pod) } else { pod }])
            .await;
    }
    world
}

/// It dies when the test says so, and its processes live on for so long.
fn with_lingering_memory(pod: Value, memory_stays: &str) -> Value {
    let mut pod = with_termination_on_request(pod);
    pod["metadata"]["annotations"][termination::MEMORY_DELAY_MILLIS] = json!(memory_stays);
    pod
}

/// A finalizer that is never removed.
fn with_finalizer(mut pod: Value) -> Value {
    pod["metadata"]["finalizers"] = json!(["example.com/never"]);
    pod
}

#[tokio::test(flavor = "multi_thread")]
async fn a_victim_that_never_terminates_is_abandoned_and_another_node_is_used() {
    for gate in [gated, |pod| pod] {
        let world = two_nodes(with_finalizer).await;
        world.create(gate(serving("serving", 50)));
        world
            .wait_until("the one on a is told to leave", |world| {
                world.terminating_pods().contains("on-a")
            })
            .await;
        assert_eq!(world.wait_until_bound("serving").await, "b");
        assert_eq!(world.pods(), names(["on-a", "serving"]));
        world
            .wait_until("nothing is held", |world| world.reservation_count() == 0)
            .await;
        world.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vram_is_not_allocated_while_a_dead_victims_process_still_runs() {
    let world = two_nodes(|pod| with_lingering_memory(pod, termination::FOR_EVER)).await;
    // A process that no agent has reported leaves no trace, so the agents report first.
    world.wait_for_reports().await;
    world.create(gated(serving("serving", 50)));
    world
        .wait_until("the one on a is told to leave", |world| {
            world.terminating_pods().contains("on-a")
        })
        .await;
    world.finish_termination();
    assert_eq!(
        world.wait_until_bound("serving").await,
        "b",
        "nobody goes where the memory is taken"
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vram_is_allocated_when_the_report_shows_it_free() {
    let world = PlannerCluster::new(&[machine("a", 1)]).await;
    world
        .fill([with_lingering_memory(job("victim", 60), "10000")])
        .await;
    world.wait_for_reports().await;
    world.create(gated(serving("serving", 50)));
    world
        .wait_until("the victim is told to leave", |world| {
            world.terminating_pods().contains("victim")
        })
        .await;
    world.finish_termination();
    let used = |world: &PlannerCluster| {
        let snapshot = world.setup().stowage.state.cluster().snapshot();
        snapshot
            .node("a")
            .is_some_and(|node| node.gpus[0].unaccounted_vram.0 > 0)
    };
    world
        .wait_until("its memory is seen without it", used)
        .await;
    assert!(world.is_gated("serving") && world.node_of("serving").is_none());
    world.wait_until_bound("serving").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_the_preemptor_ends_its_reservation_and_keeps_victims_not_yet_evicted() {
    let world = PlannerCluster::new(&[machine("a", 1)]).await;
    world.fill([job("one", 35), job("two", 35)]).await;
    // The first eviction succeeds; every later one is refused because of a disruption budget.
    let faults = world.setup().api.faults();
    faults.fail_next(
        Operation::Eviction,
        1,
        InjectedFault::AnswersLate(Duration::ZERO),
    );
    faults.fail_next(Operation::Eviction, 10_000, InjectedFault::TooManyRequests);
    world.create(gated(serving("serving", 60)));
    world
        .wait_until("one is gone", |world| world.pods().len() == 2)
        .await;
    assert_eq!(world.reservation_count(), 1, "the other is still asked");
    world
        .setup()
        .api
        .delete_now("pods/default/serving")
        .unwrap();
    world
        .wait_until("nothing is held", |world| world.reservation_count() == 0)
        .await;
    faults.clear();
    world.wait_for_reports().await;
    assert_eq!(
        (world.pods().len(), world.terminating_pods()),
        (1, names([]))
    );
    world.create(job("next", 35));
    world.wait_until_bound("next").await;
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_victim_is_not_evicted_if_its_preemptor_goes_while_the_victims_condition_is_written() {
    let world = PlannerCluster::new(&[machine("a", 1)]).await;
    world.fill([job("one", 60)]).await;
    let api = &world.setup().api;
    // The first write shows the reservation, the second one tells the victim.
    api.faults().fail_next_from(
        "stowage",
        Operation::PodStatus,
        1,
        InjectedFault::AnswersLate(Duration::ZERO),
    );
    api.faults().fail_next_from(
        "stowage",
        Operation::PodStatus,
        1,
        InjectedFault::AnswersWhenReleased,
    );
    world.create(gated(serving("serving", 60)));
    api.held_requests()
        .until_held("stowage", Operation::PodStatus, "one")
        .await;
    api.delete_now("pods/default/serving").unwrap();
    world
        .wait_until("nothing is held", |world| world.reservation_count() == 0)
        .await;
    assert_eq!(
        api.held_requests().release("stowage", Operation::PodStatus),
        1
    );
    let is_told = |world: &PlannerCluster, status: &str| {
        let condition = world.condition("one", DISRUPTION_TARGET_CONDITION);
        condition.is_some_and(|condition| condition["status"] == status)
    };
    world
        .wait_until("the victim is told that it stays", |world| {
            is_told(world, "False")
        })
        .await;
    assert_eq!(
        (world.pods(), world.terminating_pods()),
        (names(["one"]), names([]))
    );
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_planner_finishes_after_a_crash_between_eviction_and_binding() {
    for gate in [gated, |pod| pod] {
        let world = PlannerCluster::new(&[machine("a", 2)]).await;
        world
            .fill([job("large", 50), job("small", 40)].map(with_termination_on_request))
            .await;
        world.create(gate(serving("serving", 40)));
        world
            .wait_until("a victim is told to leave", |world| {
                !world.terminating_pods().is_empty()
            })
            .await;
        let world = world.restart().await;
        let leaving = world.finish_termination();
        world.wait_until_bound("serving").await;
        let stays: Vec<&str> = ["large", "small"]
            .into_iter()
            .filter(|name| !leaving.contains(*name))
            .collect();
        assert_eq!(
            world.pods(),
            names([stays[0], "serving"]),
            "nobody else leaves"
        );
        world
            .wait_until("nothing is held", |world| world.reservation_count() == 0)
            .await;
        world.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn losing_the_lease_stops_the_planner_and_regaining_it_lets_it_finish() {
    let world = PlannerCluster::new(&[machine("a", 2)]).await;
    world
        .fill([job("large", 50), job("small", 40)].map(with_termination_on_request))
        .await;
    world.create(gated(serving("serving", 40)));
    world
        .wait_until("a victim is told to leave", |world| {
            !world.terminating_pods().is_empty()
        })
        .await;
    let service = &world.setup().stowage.state;
    service.set_tenure(Tenure::Standby);
    world.finish_termination();
    world.wait_for_reports().await;
    assert!(world.is_gated("serving"), "who does not lead tells nobody");
    service.set_tenure(Tenure::without_end());
    world.wait_until_bound("serving").await;
    assert_eq!(world.pods().len(), 2);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_takes_over_finishes_a_preemption_of_the_first() {
    let world = PlannerCluster::new(&[machine("a", 2)]).await;
    let api = &world.setup().api;
    let second = Stowage::start(api, Policy::default(), None).unwrap();
    let set_leading = |service: &ServerState, leads: bool| {
        service.set_tenure(if leads {
            Tenure::without_end()
        } else {
            Tenure::Standby
        });
    };
    let (first_leads, second_leads) = (&world.setup().stowage.state, &second.state);
    world
        .wait_until("the second knows the cluster", |_| {
            second_leads.leadership.is_open()
        })
        .await;
    set_leading(second_leads, false);
    let _agents = DemoAgents::start(&[machine("a", 2)], api, second.addresses.agents).unwrap();
    let written = |kind: &str| {
        second
            .state
            .metrics
            .writes
            .with_label_values(&[kind, "written"])
            .get()
    };

    world
        .fill([job("large", 50), job("small", 40)].map(with_termination_on_request))
        .await;
    world.create(gated(serving("serving", 40)));
    world
        .wait_until("a victim is told to leave", |world| {
            !world.terminating_pods().is_empty()
        })
        .await;
    set_leading(first_leads, false);
    let leaving = world.finish_termination();
    assert_eq!(
        ["evict", "reservation", "nomination", "gate"].map(written),
        [0; 4]
    );
    set_leading(second_leads, true);
    world
        .wait_until("the pod is let through", |world| !world.is_gated("serving"))
        .await;
    assert_eq!(world.planned("serving").as_deref(), Some("Nominated"));
    assert_eq!(world.writes("gate"), 0, "it was the second that did it");
    let stays: Vec<&str> = ["large", "small"]
        .into_iter()
        .filter(|name| !leaving.contains(*name))
        .collect();
    assert_eq!(
        world.pods(),
        names([stays[0], "serving"]),
        "nobody else leaves"
    );
    assert_eq!(second.state.cluster().ledger().totals().reservations, 1);

    // The scheduler asks the first.
    set_leading(second_leads, false);
    set_leading(first_leads, true);
    world.wait_until_bound("serving").await;
    world
        .wait_until("nothing is held by either", |world| {
            world.reservation_count() == 0
                && second.state.cluster().ledger().totals().reservations == 0
        })
        .await;
    second.stop().await.unwrap();
    world.stop().await;
}
