//! What a Node object shows of its GPUs beside their list: resources of other allocators, labels that cannot be believed, and
//! GPUs that are being changed.

use super::tests::{IndexFixture, node, read};
use k8s_openapi::api::core::v1::Node;
use serde_json::json;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::placing::fit::fit;
use stowage_scheduling::testkit::demand_of;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::gpu::GpuSet;

fn name() -> NodeName {
    NodeName::parse("a").unwrap()
}

/// Node `a` with two GPUs and these amounts in its capacity.
fn with_resources(resources: &[(&str, &str)]) -> Node {
    let amounts: serde_json::Map<_, _> = resources
        .iter()
        .map(|(resource, amount)| (resource.to_string(), json!(amount)))
        .collect();
    let status = read(json!({ "capacity": amounts, "allocatable": amounts }));
    Node {
        status: Some(status),
        ..node("a", 2)
    }
}

/// Node `a` with two GPUs and these labels beside or instead of its own; those without a value are taken away.
fn with_labels(labels: &[(&str, Option<&str>)]) -> Node {
    let mut shown = node("a", 2);
    let all = shown.metadata.labels.as_mut().unwrap();
    for (key, value) in labels {
        match value {
            Some(value) => drop(all.insert(key.to_string(), value.to_string())),
            None => drop(all.remove(*key)),
        }
    }
    shown
}

/// Whether a pod of 1 GiB fits on the node, as it is shown.
fn takes_pods(bench: &mut IndexFixture, shown: &Node) -> bool {
    bench.index.apply_node(&bench.state, shown);
    let snapshot = bench.state.cluster().snapshot();
    fit(
        snapshot.node("a").unwrap(),
        &demand_of(1 << 30, 1, Sharing::Shared, 0),
    )
    .is_ok()
}

#[test]
fn a_node_whose_gpus_another_plugin_hands_out_takes_no_pod() {
    let mut bench = IndexFixture::new();
    for resource in [
        "nvidia.com/a100",
        "nvidia.com/vgpu",
        "nvidia.com/vgpu-number",
        "nvidia.com/gpumem",
        "volcano.sh/vgpu-memory",
        "aliyun.com/gpu-mem",
        "koordinator.sh/gpu-memory",
        "elasticgpu.io/gpu-memory",
        "tencent.com/vcuda-core",
        "tensor-fusion.ai/index_0",
        "run.ai/reserved",
        "amd.com/gpu",
        "example.com/fast-GPU",
        "smarter-devices/nvidia0",
    ] {
        assert!(
            !takes_pods(&mut bench, &with_resources(&[(resource, "2")])),
            "{resource}"
        );
        assert!(
            !takes_pods(
                &mut bench,
                &with_resources(&[("cpu", "8"), (resource, "x")])
            ),
            "{resource}"
        );
        assert!(
            takes_pods(&mut bench, &with_resources(&[(resource, "0")])),
            "{resource} is of a removed plugin"
        );
    }
}

#[test]
fn resources_that_are_no_nvidia_gpu_leave_the_node_to_stowage() {
    let mut bench = IndexFixture::new();
    for resource in [
        "cpu",
        "hugepages-2Mi",
        "gpu.intel.com/i915",
        "nvidia.com/hostdev",
        "nvidia.com/sriov_rdma_vf",
        "rdma/hca_shared_devices_a",
        "stowage.dev/vram",
        "node.kubernetes.io/gpu-slots",
    ] {
        assert!(
            takes_pods(&mut bench, &with_resources(&[(resource, "2")])),
            "{resource}"
        );
    }
}

#[test]
fn a_node_whose_gpus_or_driver_are_being_changed_takes_no_pod() {
    let mut bench = IndexFixture::new();
    for (label, value) in [
        ("nvidia.com/mig.config.state", "pending"),
        ("nvidia.com/mig.config.state", "rebooting"),
        ("nvidia.com/mig.config.state", "failed"),
        ("nvidia.com/mig.config.state", "a-state-of-tomorrow"),
        ("nvidia.com/vgpu.config.state", "pending"),
        (
            "nvidia.com/gpu.deploy.device-plugin",
            "paused-for-mig-change",
        ),
        (
            "nvidia.com/gpu.deploy.dcgm-exporter",
            "on-demand_paused-for-driver-upgrade",
        ),
        ("nvidia.com/gpu-driver-upgrade-state", "cordon-required"),
        (
            "nvidia.com/gpu-driver-upgrade-state",
            "wait-for-jobs-required",
        ),
        (
            "nvidia.com/gpu-driver-upgrade-state",
            "pod-deletion-required",
        ),
        ("nvidia.com/gpu-driver-upgrade-state", "uncordon-required"),
        ("nvidia.com/gpu-driver-upgrade-state", "upgrade-failed"),
        ("nvidia.com/gpu-driver-upgrade-state", "half-done"),
    ] {
        assert!(
            !takes_pods(&mut bench, &with_labels(&[(label, Some(value))])),
            "{label}: {value}"
        );
    }
    for (label, value) in [
        ("nvidia.com/mig.config.state", "success"),
        ("nvidia.com/gpu-driver-upgrade-state", "upgrade-done"),
        ("nvidia.com/gpu-driver-upgrade-state", "upgrade-required"),
        ("nvidia.com/gpu-driver-upgrade-state", ""),
        ("nvidia.com/gpu.deploy.device-plugin", "false"),
        ("nvidia.com/gpu.deploy.driver", "pre-installed"),
    ] {
        assert!(
            takes_pods(&mut bench, &with_labels(&[(label, Some(value))])),
            "{label}: {value}"
        );
    }
}

#[test]
fn no_figure_comes_from_a_label_that_cannot_be_right() {
    const MEMORY: &str = "nvidia.com/gpu.memory";
    const COUNT: &str = "nvidia.com/gpu.count";
    for (label, value) in [
        (MEMORY, Some("42505273344")),
        (MEMORY, Some("41943040")),
        (MEMORY, Some("80")),
        (MEMORY, Some("0")),
        (MEMORY, Some("-1")),
        (MEMORY, Some("40536MiB")),
        (MEMORY, Some("40536.0")),
        (MEMORY, Some("18446744073709551615")),
        (MEMORY, Some("17592186044416")),
        (MEMORY, Some("")),
        (MEMORY, None),
        (COUNT, Some("0")),
        (COUNT, Some("-2")),
        (COUNT, Some("65")),
        (COUNT, Some("99999999999999999999")),
        (COUNT, Some("two")),
        (COUNT, None),
        ("nvidia.com/gpu.product", Some("a\nb")),
    ] {
        let mut bench = IndexFixture::new();
        bench.index.delete_node(&bench.state, &node("a", 2));
        assert!(
            !takes_pods(&mut bench, &with_labels(&[(label, value)])),
            "{label}: {value:?}"
        );
        let cluster = bench.state.cluster();
        assert_eq!(
            cluster.ledger().node(&name()).unwrap().capacity(),
            Bytes::ZERO,
            "{label}: {value:?}"
        );
    }
}

#[test]
fn a_label_that_becomes_unreadable_closes_the_node_to_new_pods_until_it_is_right_again() {
    let mut bench = IndexFixture::new();
    assert!(takes_pods(&mut bench, &node("a", 2)));
    assert!(!takes_pods(
        &mut bench,
        &with_labels(&[("nvidia.com/gpu.memory", Some("85899345920"))])
    ));
    assert!(takes_pods(&mut bench, &node("a", 2)));
}

#[test]
fn pods_that_are_bound_stay_charged_while_another_plugin_or_a_change_keeps_new_ones_away() {
    for shown in [
        with_resources(&[("volcano.sh/vgpu-memory", "81559")]),
        with_labels(&[("nvidia.com/mig.config.state", Some("pending"))]),
    ] {
        let mut bench = IndexFixture::new();
        bench.apply(&super::tests::bound("p", "1", 40, "a", Some("index-1")));
        assert!(!takes_pods(&mut bench, &shown));
        assert_eq!(bench.charged(), [Bytes::ZERO, Bytes::gib(40)]);
        assert!(takes_pods(&mut bench, &node("a", 2)));
        assert_eq!(bench.charged(), [Bytes::ZERO, Bytes::gib(40)]);
    }
}

#[test]
fn a_bound_pods_gpus_are_known_after_the_node_was_anothers() {
    let mut bench = IndexFixture::new();
    takes_pods(
        &mut bench,
        &with_resources(&[("nvidia.com/vgpu-number", "20")]),
    );
    bench.apply(&super::tests::bound("p", "1", 40, "a", Some("index-0")));
    let devices = bench
        .state
        .cluster()
        .ledger()
        .node(&name())
        .unwrap()
        .devices
        .len();
    assert_eq!(
        (devices, bench.charged()),
        (2, [Bytes::gib(40), Bytes::ZERO])
    );
    let snapshot = bench.state.cluster().snapshot();
    assert_eq!(snapshot.node("a").unwrap().uuids(GpuSet::ALL).len(), 2);
}
