//! Nodes whose GPUs are not alike: their labels describe one of them, and a pod that names GPUs by a label gets such.

use super::*;
use stowage_scheduling::ids::{GpuModel, GpuUuid, NodeName};
use stowage_scheduling::placing::fit::fit;
use stowage_scheduling::reasons::Misfit;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked};
use stowage_scheduling::verbs::observe::DevicesReported;
use stowage_scheduling::vocabulary::gpu::{Device, Health};

const A100: (&str, u64) = ("NVIDIA-A100-80GB", 81_920);
const RTX: (&str, u64) = ("NVIDIA-RTX-4090", 24_564);

/// A node with these GPUs, and labels that describe the last of them.
fn with_gpus(gpus: &[(&str, u64)]) -> PlannerFixture {
    let mut bench = PlannerFixture::new(&["n"]);
    let (product, mib) = gpus[gpus.len() - 1];
    let mut labelled = node("n");
    labelled["metadata"]["labels"] = json!({
        "nvidia.com/gpu.count": gpus.len().to_string(), "nvidia.com/gpu.memory": mib.to_string(),
        "nvidia.com/gpu.product": product, "nvidia.com/gpu.family": "ampere", "nvidia.com/gpu.compute.major": "8",
    });
    labelled["status"]["allocatable"]["stowage.dev/vram"] = json!("400Gi");
    bench
        .index
        .apply_node(&bench.state, &serde_json::from_value(labelled).unwrap());
    let device = |(index, (model, mib)): (u32, &(&str, u64))| Device {
        uuid: GpuUuid::parse(&format!("GPU-{index}")).unwrap(),
        index,
        model: GpuModel::parse(model).unwrap(),
        parent: None,
        total: Bytes::mib(*mib),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    };
    let devices = (0..).zip(gpus).map(device).collect();
    let reported = DevicesReported {
        node: NodeName::parse("n").unwrap(),
        devices,
        are_all: true,
    };
    bench.state.cluster().apply(reported).unwrap();
    bench
}

fn selecting(mut pod: Value, key: &str, value: &str) -> Value {
    pod["spec"]["nodeSelector"] = json!({ key: value });
    pod
}

fn requiring(mut pod: Value, key: &str, operator: &str, values: &[&str]) -> Value {
    let rule = json!({ "key": key, "operator": operator, "values": values });
    let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [rule] }] });
    pod["spec"]["affinity"] =
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": terms } });
    pod
}

/// The GPUs that the pod gets when it is bound, or `None` if none fits.
fn bound_to(bench: &mut PlannerFixture, pod: Value) -> Option<Vec<String>> {
    let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
    bench.show(pod);
    let mut cluster = bench.state.cluster();
    let snapshot = cluster.snapshot();
    let demand = cluster
        .ledger()
        .pod_state(&uid(&name))
        .unwrap()
        .demand
        .clone();
    let fits = fit(snapshot.node("n").unwrap(), &demand).is_ok();
    let key = stowage_scheduling::ids::PodKey::parse("default", &name).unwrap();
    let node = NodeName::parse("n").unwrap();
    let answer = cluster.apply(BindAsked {
        uid: uid(&name),
        key,
        node,
    });
    let devices = match answer {
        Ok(BindAnswer::Write(decision)) => decision.placement.devices,
        _ => {
            assert!(!fits, "filter and bind agree");
            return None;
        }
    };
    assert!(fits, "filter and bind agree");
    Some(devices.iter().map(GpuUuid::to_string).collect())
}

#[tokio::test]
async fn a_pod_that_names_a_gpu_by_a_label_gets_that_one_or_none() {
    let asks: [&dyn Fn(Value) -> Value; 5] = [
        &|pod| selecting(pod, "nvidia.com/gpu.product", "NVIDIA-A100-80GB"),
        &|pod| requiring(pod, "nvidia.com/gpu.product", "In", &["NVIDIA-A100-80GB"]),
        &|pod| requiring(pod, "nvidia.com/gpu.memory", "Gt", &["70000"]),
        &|pod| selecting(pod, "nvidia.com/gpu.memory", "81920"),
        &|pod| selecting(pod, "nvidia.com/gpu.family", "ampere"),
    ];
    for ask in asks {
        let mut bench = with_gpus(&[RTX, A100]);
        assert_eq!(
            bound_to(&mut bench, ask(waiting("first", 20, 0))).as_deref(),
            Some(&["GPU-1".into()][..])
        );
        assert_eq!(
            bound_to(&mut bench, ask(waiting("second", 60, 0))),
            None,
            "the other one is not asked for"
        );
        assert_eq!(
            bound_to(&mut bench, waiting("any", 20, 0)).as_deref(),
            Some(&["GPU-0".into()][..])
        );
    }
}

#[tokio::test]
async fn the_planner_places_a_pod_on_the_gpu_that_it_names_and_evicts_for_that_one_only() {
    let mut bench = with_gpus(&[RTX, A100]);
    let ask = |pod| selecting(pod, "nvidia.com/gpu.product", "NVIDIA-A100-80GB");
    let on = |mut pod: Value, gpu: &str| {
        pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(gpu);
        pod
    };
    bench.show(on(bound("cheap", "n", 20, -20), "GPU-0"));
    bench.show(on(bound("in-the-way", "n", 60, -10), "GPU-1"));
    bench.show(ask(gated("serving", 20, 100)));
    assert_eq!(bench.tick().await, ["serving: hold n, making room"]);
    assert_eq!(bench.tick().await, ["in-the-way: evict Preempted"]);
    let devices = reservation_for(&bench, "serving").devices;
    assert_eq!(
        devices.iter().map(GpuUuid::to_string).collect::<Vec<_>>(),
        ["GPU-1"]
    );
}

#[tokio::test]
async fn where_all_gpus_of_a_node_are_alike_its_labels_say_it_all() {
    // What GPU feature discovery says of the node is not what its agent reports.
    let mut bench = with_gpus(&[RTX, RTX]);
    let pod = selecting(
        waiting("a", 20, 0),
        "nvidia.com/gpu.product",
        "NVIDIA-GeForce-RTX-4090",
    );
    assert!(bound_to(&mut bench, pod).is_some());
}

#[tokio::test]
async fn a_pod_over_several_gpus_gets_only_such_as_it_names() {
    let mut bench = with_gpus(&[A100, RTX, A100]);
    let two = |name: &str| {
        let mut pod = selecting(
            waiting(name, 40, 0),
            "nvidia.com/gpu.product",
            "NVIDIA-A100-80GB",
        );
        pod["metadata"]["annotations"] = json!({ "stowage.dev/gpus": "2" });
        pod
    };
    assert_eq!(bound_to(&mut bench, two("a")).unwrap(), ["GPU-0", "GPU-2"]);
    let mut three = two("b");
    three["metadata"]["annotations"] = json!({ "stowage.dev/gpus": "3" });
    assert_eq!(bound_to(&mut bench, three), None);
}

#[tokio::test]
async fn a_refusal_says_that_the_pod_names_other_gpus() {
    let bench = with_gpus(&[RTX, A100]);
    let pod = selecting(
        waiting("a", 20, 0),
        "nvidia.com/gpu.product",
        "NVIDIA-H100-80GB-HBM3",
    );
    let pod = serde_json::from_value(pod).unwrap();
    let demand = objects::classified_demand(&pod, |traits| bench.state.classify(traits)).unwrap();
    let snapshot = bench.state.cluster().snapshot();
    let misfit = fit(snapshot.node("n").unwrap(), &demand).unwrap_err();
    assert_eq!(
        misfit,
        Misfit::OtherGpus {
            wanted: 0,
            asked: 1
        }
    );
    assert!(
        misfit
            .to_string()
            .ends_with("of this node's unlike GPUs 0 are"),
        "{misfit}"
    );
}
