//! VRAM that becomes free without any API event, and many pods that wait for it.

use super::world::{PlannerCluster, machine};
use serde_json::{Value, json};
use stowage_lab::demo::engines::{FakeEngine, FakeEngineLoad};
use stowage_lab::demo::scheduler::observations::Verb;

const CALM: FakeEngineLoad = FakeEngineLoad {
    kv_percent: 20,
    waiting: 0,
    running: 2,
};
const BUSY: FakeEngineLoad = FakeEngineLoad {
    kv_percent: 97,
    waiting: 50,
    running: 8,
};
const WAITING: usize = 200;

fn pod(name: &str, gib: u64, port: Option<u16>) -> Value {
    let mut pod = super::world::serving(name, gib);
    if let Some(port) = port {
        pod["metadata"]["annotations"]["stowage.dev/metrics-port"] = json!(port.to_string());
    }
    pod
}

fn kv_percent(world: &PlannerCluster) -> Option<u8> {
    let snapshot = world.setup().stowage.state.cluster().snapshot();
    snapshot.node("a")?.gpus[0]
        .engine_load
        .kv_cache
        .map(|percent| percent.get())
}

/// Beside the engine, one of them fits.
#[tokio::test(flavor = "multi_thread")]
async fn one_freed_gpu_requeues_one_of_two_hundred_refused_pods() {
    let world = PlannerCluster::new(&[machine("a", 1)]).await;
    let engine = FakeEngine::start(world.setup().api.clone(), "engine", "m", CALM)
        .await
        .unwrap();
    world.create(pod("engine", 40, Some(engine.port())));
    world
        .wait_until("the engine serves", |world| kv_percent(world) == Some(20))
        .await;
    engine.set_load(BUSY);
    world
        .wait_until("its cache is seen to fill up", |world| {
            kv_percent(world) == Some(97)
        })
        .await;
    let late: Vec<String> = (0..WAITING)
        .map(|number| format!("late-{number:03}"))
        .collect();
    late.iter()
        .for_each(|name| world.create(pod(name, 20, None)));
    world
        .wait_until("all are refused", |world| {
            late.iter().all(|name| world.is_refused(name))
        })
        .await;
    world.wait_until_scheduler_is_idle().await;
    let filters =
        |world: &PlannerCluster| world.setup().scheduler.observations().count(Verb::Filter);
    let asked = filters(&world);
    world.wait_for_reports().await;
    let told = |world: &PlannerCluster| (world.writes("requeue"), world.writes("nomination"));
    assert_eq!(told(&world), (0, 0), "what was full stays full");
    assert!(filters(&world) <= asked + 1, "refused pods are left alone");
    let asked = filters(&world);

    engine.set_load(CALM);
    let is_bound = |world: &PlannerCluster| {
        late.iter()
            .filter(|name| world.node_of(name).is_some())
            .count()
    };
    world
        .wait_until("one of them is bound", |world| is_bound(world) == 1)
        .await;
    world.wait_for_writes("nomination", 1).await;
    world.wait_for_reports().await;
    assert_eq!(
        told(&world),
        (0, 1),
        "one is nominated and touched, in one write"
    );
    let chosen = late
        .iter()
        .find(|name| world.node_of(name).is_some())
        .unwrap();
    println!(
        "{WAITING} refused by {asked} filter calls; one slot: {} more, {chosen} bound",
        filters(&world) - asked
    );
    let [.., (Verb::Filter, 1), (Verb::Bind, 1)] = world.calls(chosen)[..] else {
        panic!("{:?}", world.calls(chosen))
    };
    world.stop().await;
}
