//! Which pod a process belongs to, and what follows where that is not as intended.

use super::world::fake_kubelet::pod_with_devices;
use super::world::{AgentNode, GIB, agents_url, bound_to, busy, gpu, reported_until, uid};
use crate::served::{Served, eventually};
use serde_json::{Value, json};
use stowage_scheduling::control_loop::PodEventReason;

/// The pod of the first process of the first GPU.
fn owner(report: &Value) -> &Value {
    &report["gpus"][0]["processes"][0]["pod"]
}

#[test]
fn a_process_is_attributed_by_cgroup_before_its_pod_is_known() {
    let world = AgentNode::with_gpus([busy("a", &[(10, 10)])]);
    let foreign_pod = json!({ "metadata": { "uid": "0e5c2a4b-93d1-4f7e-8a06-5b1d2c3e4f50" } });
    world.add_process_of_pod(10, &foreign_pod);
    let report = world.report_until(&[], |report| owner(report).is_string());
    assert_eq!(owner(&report), uid(&foreign_pod));
}

#[test]
fn the_cgroup_of_a_container_says_what_it_uses_and_its_limit() {
    let world = AgentNode::with_gpus([busy("a", &[(10, 10)])]);
    let llama = world.pod("llama", |pod| {
        bound_to(pod, "GPU-a", 20 * GIB);
        for (container, limit) in [("engine", "16384Mi"), ("draft", "4096Mi")] {
            let key = format!("nvidia.com/container.{container}.gpu-memory.limit");
            pod["metadata"]["annotations"][key] = json!(limit);
        }
    });
    world.add_process_of_pod(10, &llama);
    let root = world.folder().join("cgroups");
    let path = std::fs::read_to_string(world.folder().join("proc/10/cgroup")).unwrap();
    let folder = root.join(path.trim_end().trim_start_matches("0::/"));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(root.join("cgroup.controllers"), "cpu memory dmem\n").unwrap();
    for (file, gib) in [("dmem.current", 12), ("dmem.max", 20), ("dmem.min", 20)] {
        let text = format!("nvidia/0000:00:00.0/vidmem {}\n", gib * GIB);
        std::fs::write(folder.join(file), text).unwrap();
    }
    let more = ["--cgroup-root", root.to_str().unwrap()];
    let report = world.report_until(&more, |report| owner(report).is_string());
    let said = json!([{
        "pod": uid(&llama), "usedBytes": 12 * GIB, "limitBytes": 20 * GIB, "guaranteedBytes": 20 * GIB,
        "writtenBytes": 20 * GIB,
    }]);
    assert_eq!(report["gpus"][0]["cgroups"], said);
    assert_eq!(
        report["isolation"],
        json!({ "cgroupVersion": 2, "dmem": true })
    );
}

#[test]
fn a_process_without_a_pod_cgroup_is_attributed_by_gpu_allocation() {
    let mut world = AgentNode::with_gpus([busy("a", &[(10, 10)]), busy("b", &[(11, 10)])]);
    let plugin = |pod: &mut Value| {
        pod["spec"]["containers"][0]["resources"]["limits"] = json!({ "nvidia.com/gpu": "1" });
    };
    let llama = world.pod("llama", plugin);
    [10, 11]
        .into_iter()
        .for_each(|pid| world.add_process(pid, "0::/\n"));
    world.kubelet.set_answer(Ok(vec![pod_with_devices(
        "default",
        "llama",
        "nvidia.com/gpu",
        &["GPU-a"],
    )]));
    let report = world.report_until(&[], |report| owner(report).is_string());
    assert_eq!(owner(&report), uid(&llama));
    assert_eq!(
        report["gpus"][1]["processes"],
        json!([{ "pid": 11, "usedBytes": 10 * GIB }]),
        "nobody's"
    );
}

/// The Event of a finding, which is counted once however often it is reported.
fn recorded_event(
    world: &AgentNode,
    extender: &Served,
    kind: &str,
) -> (String, PodEventReason, String) {
    let _agent = world.start(&agents_url(extender));
    let is_repeated = |report: &Value| {
        report["findings"][0]["kind"] == kind
            && report["sequence"]
                .as_u64()
                .is_some_and(|sequence| sequence > 5)
    };
    reported_until(extender, "it is found", is_repeated);
    eventually("its pod is told", || !extender.events().is_empty());
    let counted = || extender.metric(&format!("stowage_agent_findings_total{{kind=\"{kind}\"}}"));
    // A report without its GPUs finds nothing; the next one that finds it has found it again.
    let without_gpus = || extender.metric("stowage_agent_missing_parts_total{part=\"gpus\"}");
    let (counted, without_gpus) = (counted(), without_gpus());
    assert!(
        (1..=1 + without_gpus).contains(&counted),
        "{counted} times, {without_gpus} without GPUs"
    );
    extender.events().swap_remove(0)
}

#[test]
fn a_pod_on_another_gpu_than_assigned_is_found_and_reported() {
    let world = AgentNode::with_gpus([gpu("a"), busy("b", &[(10, 10)])]);
    let llama = world.pod("llama", |pod| bound_to(pod, "GPU-a", 20 * GIB));
    world.add_process_of_pod(10, &llama);
    let (name, kind, text) = recorded_event(&world, &world.extender(), "drift");
    assert_eq!((name.as_str(), kind), ("llama", PodEventReason::Drift));
    assert!(
        text.contains("run on GPU-b") && text.contains("recorded GPU-a"),
        "{text}"
    );
}

#[test]
fn a_pod_that_uses_more_vram_than_granted_is_found_and_reported() {
    let world = AgentNode::with_gpus([busy("a", &[(10, 24)])]);
    let llama = world.pod("llama", |pod| bound_to(pod, "GPU-a", 20 * GIB));
    world.add_process_of_pod(10, &llama);
    let (name, kind, text) = recorded_event(&world, &world.extender(), "over-grant");
    assert_eq!((name.as_str(), kind), ("llama", PodEventReason::OverGrant));
    assert!(
        text.contains("24.0 GiB") && text.contains("20.0 GiB"),
        "{text}"
    );
}
