//! Pods as people write them: amounts of what Stowage does not allocate, amounts of zero, and annotations that are edited later.

use super::*;
use serde_json::{Value, json};
use stowage_scheduling::units::MilliCpu;

fn pod(annotations: Value, spec: Value) -> Pod {
    let metadata =
        json!({ "name": "p", "namespace": "default", "uid": "uid-p", "annotations": annotations });
    serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap()
}

fn container(limits: Value) -> Value {
    json!({ "name": "engine", "resources": { "limits": limits } })
}

fn read(spec: Value) -> Result<Demand, RequestError> {
    demand(&pod(json!({}), spec), &Policy::default())
}

#[test]
fn a_quantity_that_stowage_does_not_allocate_never_makes_a_pod_unreadable() {
    let asks = container(json!({ "stowage.dev/vram": "10Gi" }));
    let cases = [
        ("2.3Gi", 2_469_606_196),
        ("731815514666m", 731_815_515),
        ("100m", 1),
        ("0.5", 1),
        ("1e3", 1000),
        ("1E2", 100),
        // More than any node has.
        ("1Ei", (1 << 48) - 1),
        ("9e99", (1 << 48) - 1),
        ("1n", 1),
        // No API server stores these.
        ("-1Gi", 0),
        ("4 Gi", 0),
    ];
    for (text, bytes) in cases {
        let engine = container(
            json!({ "stowage.dev/vram": "10Gi", "memory": text, "ephemeral-storage": text }),
        );
        let other = json!({ "name": "proxy", "resources": { "requests": { "memory": text } } });
        for spec in [
            json!({ "containers": [engine] }),
            json!({ "containers": [asks, other] }),
            json!({ "containers": [asks], "initContainers": [other] }),
        ] {
            let demand = read(spec).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(
                (demand.per_gpu, demand.host_resources.memory),
                (Bytes::gib(10), Bytes(bytes)),
                "{text}"
            );
        }
        let others = json!({ "containers": [asks], "overhead": { "memory": text },
            "resources": { "limits": { "memory": text, "hugepages-2Mi": text } } });
        assert_eq!(read(others).unwrap().per_gpu, Bytes::gib(10), "{text}");
    }
}

#[test]
fn the_cpu_of_a_pod_rounds_up_to_thousandths_and_never_overflows() {
    let cpu = |text| {
        read(json!({ "containers": [container(json!({ "stowage.dev/vram": "10Gi", "cpu": text }))] }))
            .unwrap()
            .host_resources
            .cpu
    };
    assert_eq!(
        [cpu("0.5"), cpu("25390m"), cpu("100u")],
        [MilliCpu(500), MilliCpu(25_390), MilliCpu(1)]
    );
    let most = cpu("9e99");
    assert!(
        most > cpu("100k") && most.0.checked_mul(1000).is_some(),
        "sums of such pods have room: {most:?}"
    );
}

#[test]
fn zero_of_a_resource_is_no_request() {
    let vram = container(json!({ "stowage.dev/vram": "10Gi" }));
    let zero = |resource: &str, amount: &str| json!({ "name": "proxy", "resources": { "limits": { resource: amount } } });
    for (resource, amount) in [
        ("nvidia.com/gpu", "0"),
        ("nvidia.com/gpu", "0.0"),
        ("nvidia.com/gpu.shared", "0Gi"),
        ("nvidia.com/mig-1g.10gb", "0"),
        ("stowage.dev/vram", "0"),
    ] {
        let spec = json!({ "containers": [vram, zero(resource, amount)] });
        let demand = read(spec).unwrap_or_else(|error| panic!("{resource}: {amount}: {error}"));
        assert_eq!(
            (demand.vram(), demand.is_allocated_externally()),
            (Bytes::gib(10), false),
            "{resource}"
        );
        assert_eq!(
            demand.containers.len(),
            1,
            "the other container has no part: {resource}"
        );
        assert!(
            !demand.traits.resources.contains("nvidia.com/gpu"),
            "{:?}",
            demand.traits.resources
        );
        let init = json!({ "containers": [vram], "initContainers": [zero(resource, amount)] });
        assert_eq!(read(init).unwrap().vram(), Bytes::gib(10), "{resource}");
    }
    let both = json!({ "name": "engine", "resources": {
        "limits": { "stowage.dev/vram": "10Gi", "nvidia.com/gpu": "0" }, "requests": { "nvidia.com/gpu": "0" } } });
    assert_eq!(
        read(json!({ "containers": [both] })).unwrap().vram(),
        Bytes::gib(10)
    );
    let plugin = container(json!({ "nvidia.com/gpu": "1", "nvidia.com/mig-1g.10gb": "0" }));
    assert_eq!(read(json!({ "containers": [plugin] })).unwrap().gpus, 1);
}

#[test]
fn a_pod_that_asks_for_zero_of_everything_is_no_gpu_pod() {
    for resource in [
        "stowage.dev/vram",
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.10gb",
    ] {
        let pod = pod(
            json!({}),
            json!({ "containers": [container(json!({ resource: "0" }))] }),
        );
        assert!(!asks_for_gpu(&pod) && !uses_claims_only(&pod), "{resource}");
        assert_eq!(
            observation(&pod, &Policy::default(), None, jiff::Timestamp::UNIX_EPOCH),
            None
        );
    }
    // What cannot be read may be any amount.
    let pod = pod(
        json!({}),
        json!({ "containers": [container(json!({ "nvidia.com/gpu": "one" }))] }),
    );
    assert!(asks_for_gpu(&pod));
}

#[test]
fn a_bound_pod_with_an_invalid_request_keeps_class_model_and_grant_after_a_restart() {
    let bound = |edits: Value| {
        let mut annotations = json!({
            "stowage.dev/gpus": "2", "stowage.dev/model": "org/m", "stowage.dev/kv-cache": "10Gi",
            "stowage.dev/devices": "GPU-1,GPU-2", "stowage.dev/vram-granted": "42949672960",
            "stowage.dev/exclusive-granted": "false",
        });
        for (key, value) in edits.as_object().unwrap() {
            annotations[key] = value.clone();
        }
        let limits = json!({ "stowage.dev/vram": "40Gi", "memory": "3Gi", "cpu": "2" });
        let spec = json!({ "nodeName": "a", "priority": 7, "containers": [container(limits)] });
        let observed = observation(
            &pod(annotations, spec),
            &Policy::default(),
            None,
            jiff::Timestamp::UNIX_EPOCH,
        );
        observed.unwrap().demand
    };
    let before = bound(json!({}));
    assert_eq!(
        (before.per_gpu, before.gpus, before.traits.gpus),
        (Bytes::gib(20), 2, 2)
    );
    for (key, value) in [
        ("stowage.dev/gpus", "many"),
        ("stowage.dev/gpus", "0"),
        ("stowage.dev/exclusive", "perhaps"),
    ] {
        let after = bound(json!({ key: value }));
        assert_eq!(
            Demand {
                may_preempt: true,
                ..after
            },
            before,
            "{key}: {value}"
        );
    }
    for (key, value) in [
        ("stowage.dev/kv-cache", "much"),
        ("stowage.dev/kv-cache", "41Gi"),
    ] {
        let after = bound(json!({ key: value }));
        assert_eq!(
            (after.per_gpu, after.gpus, after.class),
            (before.per_gpu, before.gpus, before.class)
        );
        assert_eq!(
            (&after.model, after.traits.vram),
            (&before.model, before.traits.vram),
            "{key}: {value}"
        );
        assert_eq!(after.host_resources, before.host_resources);
    }
    let unnamed = bound(json!({ "stowage.dev/model": "a b" }));
    assert_eq!(
        (unnamed.per_gpu, unnamed.traits.gpus, unnamed.model),
        (Bytes::gib(20), 2, None)
    );
}

/// An earlier version bound it.
#[test]
fn a_bound_pod_below_todays_minimum_request_counts_with_its_grant() {
    let bound = |exclusive: &str, gpus: &str, devices: &str| {
        let annotations = json!({
            "stowage.dev/gpus": gpus, "stowage.dev/exclusive": exclusive, "stowage.dev/devices": devices,
            "stowage.dev/vram-granted": "536870912", "stowage.dev/exclusive-granted": exclusive,
        });
        let spec = json!({ "containers": [container(json!({ "stowage.dev/vram": "512Mi" }))] });
        assert!(demand(&pod(annotations.clone(), spec.clone()), &Policy::default()).is_err());
        let bound = pod(
            annotations,
            json!({ "nodeName": "a", "containers": spec["containers"] }),
        );
        observation(
            &bound,
            &Policy::default(),
            None,
            jiff::Timestamp::UNIX_EPOCH,
        )
        .unwrap()
        .demand
    };
    for (exclusive, sharing) in [("false", Sharing::Shared), ("true", Sharing::Exclusive)] {
        let has = bound(exclusive, "4", "GPU-1,GPU-2,GPU-3,GPU-4");
        assert_eq!(
            (has.per_gpu, has.gpus, has.sharing),
            (Bytes::mib(128), 4, sharing)
        );
        assert_eq!(
            (has.traits.gpus, has.traits.vram, has.containers.len()),
            (4, Bytes::mib(512), 1)
        );
    }
}

#[test]
fn the_planner_leaves_gated_pods_of_other_schedulers_alone() {
    let gate = |scheduler: Option<&str>, policy: &Policy| {
        let gates = json!([{ "name": "stowage.dev/plan" }]);
        let engine = container(json!({ "stowage.dev/vram": "20Gi" }));
        let spec =
            json!({ "schedulerName": scheduler, "schedulingGates": gates, "containers": [engine] });
        let observed = observation(
            &pod(json!({}), spec),
            policy,
            None,
            jiff::Timestamp::UNIX_EPOCH,
        )
        .unwrap();
        let ObservedPhase::Waiting(waiting) = observed.state else {
            panic!("it has no node")
        };
        waiting.gate
    };
    let mut policy = Policy::default();
    for ours in [Some("stowage"), Some("default-scheduler"), None] {
        assert_eq!(gate(ours, &policy), SchedulingGate::Planned, "{ours:?}");
    }
    for other in ["volcano", "kai-scheduler"] {
        assert_eq!(
            gate(Some(other), &policy),
            SchedulingGate::Others,
            "{other}"
        );
    }
    policy.settings.planning.scheduler_names = vec!["llm".into()];
    assert_eq!(
        [gate(Some("llm"), &policy), gate(Some("stowage"), &policy)],
        [SchedulingGate::Planned, SchedulingGate::Others]
    );
}

#[test]
fn the_model_of_kserves_pods_is_the_one_that_is_downloaded() {
    let labels = json!({ "serving.kserve.io/inferenceservice": "chat" });
    let named = |annotations: Value| {
        let metadata =
            json!({ "name": "p", "uid": "u", "annotations": annotations, "labels": labels });
        let spec = json!({ "containers": [container(json!({ "stowage.dev/vram": "20Gi" }))] });
        let pod = serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap();
        demand(&pod, &Policy::default())
            .unwrap()
            .model
            .map(|model| model.to_string())
    };
    let source = "internal.serving.kserve.io/storage-initializer-sourceuri";
    assert_eq!(
        named(json!({ source: "hf://org/m:main" })).as_deref(),
        Some("hf://org/m:main")
    );
    assert_eq!(
        named(json!({ source: "pvc://claim/m" })).as_deref(),
        Some("chat")
    );
    assert_eq!(
        named(json!({ source: "hf://org/m", "stowage.dev/model": "org/n" })).as_deref(),
        Some("org/n")
    );
    assert_eq!(
        named(json!({ "stowage.dev/model": "/mnt/models" })),
        None,
        "any model may be there"
    );
}

#[test]
fn a_pod_without_space_for_the_bindings_annotations_is_refused() {
    let asks = json!({ "containers": [container(json!({ "stowage.dev/vram": "10Gi" }))] });
    let read = |annotations: Value, spec: &Value| {
        demand(&pod(annotations, spec.clone()), &Policy::default())
    };
    let full = |bytes: usize| json!({ "a/a": "x".repeat(bytes - 3) });
    let many = |count: usize| -> Value {
        (0..count)
            .map(|n| (format!("a/{n:06}"), json!("x".repeat(92))))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let wide = json!({ "a/a": "ä".repeat(128 << 10) });
    for (annotations, bytes) in [
        (full(262_144), 262_144),
        (many(2620), 262_000),
        (wide, 262_147),
    ] {
        let error = read(annotations.clone(), &asks).unwrap_err();
        assert_eq!(error.code(), "annotations");
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
        let mut bound = asks.clone();
        bound["nodeName"] = json!("a");
        assert!(
            read(annotations, &bound).is_ok(),
            "what it has now may be Stowage's own"
        );
    }
    for annotations in [full(250_000), many(2500), json!({})] {
        assert!(read(annotations, &asks).is_ok());
    }
    let eight = json!({ "stowage.dev/gpus": "8", "a/a": "x".repeat(258_000) });
    assert!(read(full(258_000), &asks).is_ok());
    assert!(read(eight, &asks).is_err(), "its Binding names more GPUs");
}

/// Expressions are not evaluated for such a pod: it would be of no class that names it.
#[test]
fn a_waiting_pod_with_more_labels_than_expressions_are_evaluated_for_is_refused() {
    let read = |labels: usize, spec: Value| {
        let mut pod = pod(json!({}), spec);
        pod.metadata.labels = Some(
            (0..labels)
                .map(|n| (format!("l/{n:060}"), "x".repeat(60)))
                .collect(),
        );
        demand(&pod, &Policy::default())
    };
    let asks = || json!({ "containers": [container(json!({ "stowage.dev/vram": "10Gi" }))] });
    assert_eq!(read(600, asks()).unwrap_err().code(), "too-large");
    assert!(read(100, asks()).is_ok());
    let mut bound = asks();
    bound["nodeName"] = json!("a");
    assert!(read(600, bound).is_ok(), "it may have got them since");
}

#[test]
fn limits_are_kept_where_the_condition_is_true_and_unknown_is_no_limit() {
    let keeps = |conditions: serde_json::Value| {
        let node: Node = serde_json::from_value(json!({
            "metadata": { "name": "n" }, "status": { "conditions": conditions },
        }))
        .unwrap();
        node_signs(&node, &Ok(None)).keeps_vram_limits
    };
    let ready =
        |status: &str| json!({ "type": "gpu-fractioning.nvidia.com/Ready", "status": status });
    let kubelet = json!({ "type": "Ready", "status": "True" });
    assert!(keeps(json!([kubelet, ready("True")])));
    for conditions in [
        json!([]),
        json!(null),
        json!([kubelet]),
        json!([ready("False"), kubelet]),
        json!([ready("Unknown")]),
        json!([ready("true")]),
        json!([{ "type": "gpu-fractioning.nvidia.com/ready", "status": "True" }]),
    ] {
        assert!(!keeps(conditions.clone()), "{conditions}");
    }
}
