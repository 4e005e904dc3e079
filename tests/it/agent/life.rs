//! How an agent starts, stops and keeps running: signals, a driver that hangs, a readable log.

use super::world::{AgentNode, StubEngine, agents_url, engine_at, gpu, reported_until, script};
use mock_nvml::NvmlScript;
use serde_json::Value;

const VLLM: &str = include_str!("../../fixtures/engines/vllm-0.12.txt");

#[test]
fn either_signal_stops_the_agent_cleanly() {
    let world = AgentNode::with_gpus([gpu("a")]);
    for name in ["TERM", "INT"] {
        let extender = world.extender();
        let agent = world.start(&agents_url(&extender));
        reported_until(&extender, "it reports", |report| {
            report["gpus"][0]["uuid"] == "GPU-a"
        });
        agent.signal(name);
        let (status, lines) = agent.wait_for_exit();
        assert_eq!(status.code(), Some(0), "{name}");
        assert!(lines.last().unwrap().contains("stopped"), "{lines:?}");
    }
}

#[test]
fn a_hanging_driver_loses_its_own_figures_and_delays_neither_reports_nor_the_stop() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let engine = StubEngine::serving(&world, VLLM);
    world.pod("llama", |pod| engine_at(pod, engine.port));
    let extender = world.extender();
    let agent = world.start(&agents_url(&extender));
    let serves = |report: &Value| report["engines"][0]["state"] == "serving";
    reported_until(&extender, "all is well", |report| {
        serves(report) && report["gpus"][0].is_object()
    });
    let hanging = NvmlScript {
        hangs: true,
        ..script([gpu("a")])
    };
    world.set_nvml_script(&hanging);
    let is_blind =
        |report: &Value| report["gpus"].is_null() && report["missing"][0]["part"] == "gpus";
    let report = reported_until(
        &extender,
        "its figures are missing, and the engine's are not",
        |report| is_blind(report) && serves(report),
    );
    assert!(
        report["missing"][0]["reason"]
            .as_str()
            .unwrap()
            .contains("the driver does not answer"),
        "{report:#}"
    );
    world.set_nvml_script(&script([gpu("a")]));
    reported_until(&extender, "it has come back", |report| {
        report["gpus"][0].is_object()
    });
    world.set_nvml_script(&hanging);
    reported_until(&extender, "it hangs again", is_blind);
    agent.signal("TERM");
    let (status, _) = agent.wait_for_exit();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn missing_sources_are_logged_on_change_and_not_each_round() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let extender = world.extender();
    let agent = world.start(&agents_url(&extender));
    reported_until(&extender, "it reports", |report| {
        report["gpus"][0].is_object()
    });
    world.set_nvml_script(&NvmlScript {
        hangs: true,
        ..script([gpu("a")])
    });
    let first = reported_until(&extender, "it hangs", |report| report["gpus"].is_null());
    let later =
        |report: &Value| report["sequence"].as_u64() > first["sequence"].as_u64().map(|s| s + 5);
    reported_until(&extender, "it hangs on", later);
    world.set_nvml_script(&script([gpu("a")]));
    reported_until(&extender, "it has come back", |report| {
        report["missing"].is_null()
    });
    agent.signal("TERM");
    let (_, lines) = agent.wait_for_exit();
    let said = lines.iter().filter(|line| line.contains("missing: GPUs"));
    let said: Vec<bool> = said
        .map(|line| line.contains("no longer missing"))
        .collect();
    assert!(
        said.len() >= 2 && said.iter().is_sorted_by(|one, next| one != next),
        "each change once: {lines:#?}"
    );
}
