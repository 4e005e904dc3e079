//! The driver's figures (memory, processes, slices, links, health), from the library into the extender's ledger.

use super::world::{
    AgentNode, GIB, NODE, agents_url, bound_to, busy, gpu, gpu_reading, reported_until, script, uid,
};
use crate::served::{Served, eventually, pod};
use mock_nvml::{NvmlScript, ScriptedGpu, Slice, Xid};
use serde_json::{Value, json};
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::vocabulary::gpu::Health;

/// The health of a node's GPUs in the ledger, by UUID.
fn healths(extender: &Served) -> Vec<(String, Health)> {
    let ledger = extender.service.cluster();
    let node = ledger.ledger().node(&NodeName::parse(NODE).unwrap());
    node.iter()
        .flat_map(|node| node.devices.iter())
        .map(|device| (device.uuid.to_string(), device.health))
        .collect()
}

/// The GPU on which a pod ends up.
fn bound(extender: &Served, pod: &Value) -> String {
    assert_eq!(extender.filter_passed(pod, &[NODE]), [NODE]);
    assert_eq!(extender.bind(pod, NODE), "");
    extender.pod_state(pod).unwrap().devices().unwrap()[0].to_string()
}

#[test]
fn vram_of_pods_and_unowned_vram_are_charged_separately() {
    let world = AgentNode::with_gpus([ScriptedGpu {
        utilization: 73,
        ..busy("a", &[(10, 20), (11, 40)])
    }]);
    let llama = world.pod("llama", |pod| bound_to(pod, "GPU-a", 20 * GIB));
    world.add_process_of_pod(10, &llama);
    world.add_process(11, "0::/system.slice/a-notebook.service\n");
    let extender = world.extender();
    let _agent = world.start(&agents_url(&extender));
    let report = reported_until(&extender, "the agent reports", |report| {
        report["gpus"][0]["processes"][0]["pod"].is_string() && report["missing"].is_null()
    });
    let gpu = &report["gpus"][0];
    let of_llama = json!({ "pid": 10, "usedBytes": 20 * GIB, "pod": uid(&llama) });
    let of_nobody = json!({ "pid": 11, "usedBytes": 40 * GIB });
    assert_eq!(gpu["processes"], json!([of_llama, of_nobody]));
    assert_eq!(
        (&gpu["totalBytes"], &gpu["usedBytes"]),
        (&json!(80 * GIB), &json!(60 * GIB))
    );
    assert_eq!(
        (&gpu["model"], &gpu["utilizationPercent"]),
        (&json!("NVIDIA-H100-80GB-HBM3"), &json!(73))
    );
    assert_eq!(report["findings"], Value::Null);
    eventually("the ledger has it", || {
        gpu_reading(&extender, "GPU-a").is_some_and(|gpu| gpu.attributed.len() == 1)
    });
    // Of 80 GiB, 8 are headroom, 0.6 the driver's, 20 allocated, and 40 unaccounted.
    eventually("what nobody owns is believed", || {
        extender
            .filter_passed(&pod("large", "20Gi"), &[NODE])
            .is_empty()
    });
    assert_eq!(
        extender.filter_passed(&pod("small", "10Gi"), &[NODE]),
        [NODE]
    );
}

#[test]
fn mig_slices_are_listed_after_their_gpu() {
    let slice = |letter: &str| Slice {
        uuid: format!("MIG-{letter}"),
        ..Slice::default()
    };
    let with_process = Slice {
        processes: busy("x", &[(10, 4)]).processes,
        used: 4 * GIB,
        ..slice("x")
    };
    let slices = [(0, with_process), (3, slice("y"))].into();
    let world = AgentNode::with_gpus([
        ScriptedGpu {
            mig_enabled: true,
            slices,
            ..gpu("a")
        },
        gpu("b"),
    ]);
    let llama = world.pod("llama", |_| {});
    world.add_process_of_pod(10, &llama);
    let report = world.report_until(&[], |report| {
        report["gpus"][1]["processes"][0]["pod"].is_string()
    });
    let shown: Vec<_> = report["gpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| (&g["uuid"], &g["parent"]))
        .collect();
    let (a, none) = (json!("GPU-a"), Value::Null);
    let [x, y, b] = ["MIG-x", "MIG-y", "GPU-b"].map(|uuid| json!(uuid));
    assert_eq!(shown, [(&a, &none), (&x, &a), (&y, &a), (&b, &none)]);
    assert_eq!(report["gpus"][1]["processes"][0]["pod"], uid(&llama));
    let extender = world.extender();
    let _agent = world.start(&agents_url(&extender));
    eventually("the ledger has them", || {
        healths(&extender).iter().any(|(uuid, _)| uuid == "MIG-y")
            && gpu_reading(&extender, "MIG-x").is_some_and(|slice| slice.attributed.len() == 1)
    });
}

#[test]
fn gpus_that_reach_each_other_share_an_island() {
    let linked = |letter, nvlink| ScriptedGpu {
        nvlink,
        ..gpu(letter)
    };
    let world = AgentNode::with_gpus([
        linked("a", Some(1)),
        linked("b", None),
        linked("c", Some(1)),
    ]);
    let report = world.report_until(&[], |report| report["gpus"].is_array());
    let islands: Vec<_> = report["gpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|gpu| gpu["nvlinkIsland"].as_u64())
        .collect();
    assert_eq!(islands, [Some(0), None, Some(0)]);
}

#[test]
fn a_gpu_error_drains_the_gpu_and_a_program_error_does_not() {
    let world = AgentNode::with_gpus([gpu("a"), gpu("b")]);
    let small = pod("small", "10Gi");
    let extender = world.extender_with([small.clone()]);
    let agent = world.start(&agents_url(&extender));
    eventually("the ledger has both", || healths(&extender).len() == 2);
    // They are read in this order: once the second has had its effect, the first has had none.
    let xids = vec![Xid { gpu: 1, xid: 13 }, Xid { gpu: 0, xid: 48 }];
    world.set_nvml_script(&NvmlScript {
        xids,
        ..script([gpu("a"), gpu("b")])
    });
    let report = reported_until(&extender, "it drains", |r| {
        r["gpus"][0]["health"] == "draining"
    });
    assert!(
        report["gpus"][0]["healthReason"]
            .as_str()
            .unwrap()
            .contains("XID 48"),
        "{report:#}"
    );
    assert_eq!(report["gpus"][1]["health"], "healthy");
    assert!(
        agent
            .line_with("reports an error of a GPU")
            .contains("xid=13"),
        "both are logged"
    );
    assert_eq!(bound(&extender, &small), "GPU-b");
}

#[test]
fn a_dead_gpu_takes_no_new_pods_and_its_pods_get_an_event() {
    let world = AgentNode::with_gpus([gpu("a"), gpu("b")]);
    world.pod("llama", |pod| bound_to(pod, "GPU-a", 20 * GIB));
    world.pod("qwen", |pod| bound_to(pod, "GPU-b", 20 * GIB));
    let small = pod("small", "10Gi");
    let extender = world.extender_with([small.clone()]);
    let _agent = world.start(&agents_url(&extender));
    eventually("the ledger has both", || healths(&extender).len() == 2);
    world.set_nvml_script(&script([
        ScriptedGpu {
            lost: true,
            ..gpu("a")
        },
        gpu("b"),
    ]));
    let report = reported_until(&extender, "it is lost", |r| {
        r["gpus"][0]["health"] == "lost"
    });
    assert_eq!(
        report["gpus"][0]["totalBytes"],
        80 * GIB,
        "its size is remembered"
    );
    eventually("its pod is told", || !extender.events().is_empty());
    let events = extender.events();
    let [(name, PodEventReason::GpuLost, told)] = &events[..] else {
        panic!("{events:?}")
    };
    assert!(
        name == "llama" && told.contains("GPU-a is unhealthy"),
        "{told}"
    );
    assert_eq!(healths(&extender)[0], ("GPU-a".into(), Health::Lost));
    assert_eq!(bound(&extender, &small), "GPU-b");
}
