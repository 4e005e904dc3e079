//! Engines' figures, from their metrics pages into the extender's ledger.

use super::world::{
    AgentNode, GIB, StubEngine, agents_url, bound_to, engine_at, gpu, gpu_reading, reported_until,
};
use crate::client::NOBODYS;
use crate::served::eventually;
use serde_json::{Value, json};
use std::net::TcpListener;
use stowage_scheduling::units::Percent;
use stowage_scheduling::vocabulary::node_reading::EngineLoad;

const VLLM: &str = include_str!("../../fixtures/engines/vllm-0.12.txt");
const VLLM_ASLEEP: &str = include_str!("../../fixtures/engines/vllm-0.12-asleep.txt");
const SGLANG: &str = include_str!("../../fixtures/engines/sglang.txt");

/// The engine of the pod with this UID.
fn engine_of<'a>(report: &'a Value, pod: &Value) -> &'a Value {
    let engines = report["engines"].as_array();
    let found = engines
        .into_iter()
        .flatten()
        .find(|engine| engine["pod"] == pod["metadata"]["uid"]);
    found.unwrap_or(&Value::Null)
}

fn is_serving(report: &Value, pod: &Value) -> bool {
    engine_of(report, pod)["state"] == "serving"
}

#[test]
fn the_fullest_rank_and_the_summed_queues_of_an_engine_reach_the_ledger() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let engine = StubEngine::serving(&world, VLLM);
    let llama = world.pod("llama", |pod| {
        bound_to(pod, "GPU-a", 20 * GIB);
        engine_at(pod, engine.port);
    });
    let extender = world.extender();
    let _agent = world.start(&agents_url(&extender));
    let report = reported_until(&extender, "it serves", |report| is_serving(report, &llama));
    let shown = engine_of(&report, &llama);
    for (key, value) in [
        ("engine", json!("vllm")),
        ("gpus", json!(["GPU-a"])),
        ("model", json!("meta-llama/Llama-3.1-8B-Instruct")),
        ("kvCacheUsage", json!(0.6342857142857143)),
        ("kvCacheTokens", json!(877_008)),
        ("waiting", json!(3)),
        ("running", json!(21)),
        ("problem", Value::Null),
    ] {
        assert_eq!(shown[key], value, "{key}");
    }
    let full = EngineLoad::new(Percent::new(64), Some(3));
    eventually("the ledger has it", || {
        gpu_reading(&extender, "GPU-a").unwrap().engine_load == full
    });
    engine.set_metrics(VLLM_ASLEEP);
    eventually("asleep it is no neighbor", || {
        gpu_reading(&extender, "GPU-a").unwrap().engine_load == EngineLoad::NONE
    });
}

#[test]
fn an_engine_is_found_by_a_port_its_pod_declares() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let engine = StubEngine::serving(&world, SGLANG);
    let llama = world.pod("llama", |pod| {
        pod["spec"]["containers"][0]["ports"] = json!([{ "containerPort": engine.port }]);
    });
    let report = world.report_until(&[], |report| is_serving(report, &llama));
    let shown = engine_of(&report, &llama);
    assert_eq!(
        (&shown["engine"], &shown["kvCacheUsage"]),
        (&json!("sglang"), &json!(0.71))
    );
}

#[test]
fn a_dead_and_a_hanging_engine_do_not_delay_a_healthy_one() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let engine = StubEngine::serving(&world, VLLM);
    // The kernel accepts the connection, and no process ever reads from it.
    let hung = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = |port| move |pod: &mut Value| engine_at(pod, port);
    let good = world.pod("good", at(engine.port));
    let hung = world.pod("hung", at(hung.local_addr().unwrap().port()));
    let dead = world.pod("dead", at(NOBODYS));
    // A busy machine may keep any of the three waiting for as long as the hung one.
    let is_told = |report: &Value, pod, why| {
        engine_of(report, pod)["problem"]
            .as_str()
            .is_some_and(|problem| problem.contains(why))
    };
    let report = world.report_until(&[], |report| {
        is_serving(report, &good)
            && is_told(report, &hung, "has not answered in full")
            && is_told(report, &dead, "nothing listens")
    });
    for pod in [&hung, &dead] {
        let shown = engine_of(&report, pod);
        assert_eq!(
            (&shown["state"], &shown["kvCacheUsage"]),
            (&json!("starting"), &Value::Null)
        );
    }
}

#[test]
fn a_dead_engine_is_unreachable_and_its_gpus_load_unknown() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let engine = StubEngine::serving(&world, VLLM);
    let llama = world.pod("llama", |pod| {
        bound_to(pod, "GPU-a", 20 * GIB);
        engine_at(pod, engine.port);
    });
    let extender = world.extender();
    let _agent = world.start(&agents_url(&extender));
    reported_until(&extender, "it serves", |report| is_serving(report, &llama));
    engine.end(&world);
    reported_until(&extender, "it is away", |report| {
        engine_of(report, &llama)["state"] == "unreachable"
    });
    assert_eq!(
        gpu_reading(&extender, "GPU-a").unwrap().engine_load,
        EngineLoad::new(None, None)
    );
}
