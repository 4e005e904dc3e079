//! What `kubectl get nodes,pods,namespaces -A -o json` and a Prometheus print of the week as it is.

use super::catalog::{CONTEXT, KINDS, UTILIZATION_PERCENT};
use super::placement::{PlacedPod, machines};
use super::played::{SAMPLE_STEP, Sample};
use super::{AsItIs, AssessedWeek};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// 2026-11-16, a Monday, at 00:00 UTC, in seconds.
const START: u64 = 1_794_787_200;
/// Tokens of a block of vLLM's KV cache.
const BLOCK: u32 = 16;

/// The cluster.
pub fn dump(week: &AssessedWeek, as_it_is: &AsItIs) -> Value {
    let mut items: Vec<Value> = Vec::new();
    for (kind, nodes) in KINDS.iter().zip(week.nodes) {
        for node in 0..nodes {
            let gpus = kind.gpus.to_string();
            let amounts =
                json!({ "cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": gpus });
            let labels = json!({
                "nvidia.com/gpu.product": kind.product, "nvidia.com/gpu.count": gpus,
                "nvidia.com/gpu.memory": (kind.vram.0 >> 20).to_string(), "nvidia.com/gpu.replicas": "1",
            });
            let metadata = json!({ "name": format!("{}-{node}", kind.name), "labels": labels });
            let ready = json!([{ "type": "Ready", "status": "True" }]);
            let status =
                json!({ "allocatable": amounts, "capacity": amounts, "conditions": ready });
            items.push(json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status }));
        }
    }
    let namespaces: BTreeSet<&str> = week.workloads.iter().map(|one| one.of.namespace).collect();
    for name in namespaces {
        items
            .push(json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
    }
    items.extend(as_it_is.placed.iter().map(|pod| object(week, pod)));
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

fn object(week: &AssessedWeek, pod: &PlacedPod) -> Value {
    let of = week.workloads[pod.workload].of;
    let set = format!("{}-7c9d4b5f6", of.name);
    let (image, args) = match of.model() {
        None => ("example/main:1", Vec::new()),
        Some(model) => {
            let flags = [
                format!("--max-model-len={CONTEXT}"),
                format!("--tensor-parallel-size={}", of.gpus),
                format!("--gpu-memory-utilization=0.{UTILIZATION_PERCENT}"),
            ];
            let served = ["serve".to_owned(), model.repository.to_owned()];
            ("vllm/vllm-openai:v0.12.0", [&served[..], &flags].concat())
        }
    };
    let limits = json!({ "nvidia.com/gpu": of.gpus.to_string() });
    let requests = json!({ "nvidia.com/gpu": of.gpus.to_string(), "cpu": "2", "memory": "16Gi" });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": of.pod_name(pod.replica), "namespace": of.namespace, "uid": format!("{set}-{}", pod.replica),
            "labels": { "pod-template-hash": "7c9d4b5f6" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set, "controller": true }],
        },
        "spec": {
            "nodeName": pod.binding.as_ref().map(|bound| bound.node.as_str()),
            "containers": [{ "name": "main", "image": image, "args": args, "resources": { "limits": limits, "requests": requests } }],
        },
        "status": { "phase": "Running" },
    })
}

/// Answers to range queries.
pub fn metrics(week: &AssessedWeek, as_it_is: &AsItIs) -> Value {
    let mut series = Series::default();
    let mut idle: BTreeMap<String, String> = BTreeMap::new();
    for (kind, nodes) in KINDS.iter().zip(week.nodes) {
        for machine in machines(kind, kind.gpus * nodes).iter() {
            let gpus = machine.gpus.iter();
            idle.extend(gpus.map(|gpu| (gpu.uuid.to_string(), machine.spec.name.to_string())));
        }
    }
    let played = &as_it_is.played;
    let all = as_it_is.placed.iter().zip(&played.samples);
    for ((pod, samples), tokens) in all.zip(&played.kv_tokens) {
        let of = week.workloads[pod.workload].of;
        let name = of.pod_name(pod.replica);
        let used = (of.used().0 >> 20).to_string();
        for device in pod.devices() {
            let device = device.to_string();
            let node = idle.remove(&device).unwrap_or_default();
            let labels = [
                ("UUID", &*device),
                ("Hostname", &node),
                ("exported_namespace", of.namespace),
                ("exported_pod", &name),
            ];
            series.add("DCGM_FI_DEV_FB_USED", &labels, samples, |_| used.clone());
            let active = |sample: &Sample| format!("{:.4}", sample.active);
            series.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", &labels, samples, active);
        }
        let Some(tokens) = tokens else { continue };
        let model = of.model().map_or("", |model| model.repository);
        let labels = [
            ("namespace", of.namespace),
            ("pod", &name),
            ("model_name", model),
        ];
        let mut add =
            |name, value: fn(&Sample) -> String| series.add(name, &labels, samples, value);
        add("vllm:kv_cache_usage_perc", |sample| {
            format!("{:.4}", sample.kv_cache)
        });
        add("vllm:num_requests_running", |sample| {
            sample.running.round().to_string()
        });
        add("vllm:num_requests_waiting", |sample| {
            sample.waiting.round().to_string()
        });
        add("vllm:num_preemptions_total", |_| "0".into());
        let (block, blocks) = (BLOCK.to_string(), (tokens / f64::from(BLOCK)) as u64);
        let blocks = blocks.to_string();
        let config = [("block_size", &*block), ("num_gpu_blocks", &*blocks)];
        let labels = [&labels[..], &config].concat();
        series.add("vllm:cache_config_info", &labels, samples, |_| "1".into());
    }
    let none = vec![Sample::default(); played.samples.first().map_or(0, Vec::len)];
    for (device, node) in &idle {
        let labels = [("UUID", &**device), ("Hostname", node)];
        series.add("DCGM_FI_DEV_FB_USED", &labels, &none, |_| "1".into());
        series.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", &labels, &none, |_| {
            "0".into()
        });
    }
    json!([{ "status": "success", "data": { "resultType": "matrix", "result": series.0 } }])
}

#[derive(Default)]
struct Series(Vec<Value>);

impl Series {
    fn add(
        &mut self,
        name: &str,
        labels: &[(&str, &str)],
        samples: &[Sample],
        value: impl Fn(&Sample) -> String,
    ) {
        let labels = [&[("__name__", name)], labels].concat();
        let metric = labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), json!(value)));
        let values = (1..).zip(samples);
        let values = values
            .map(|(step, sample)| json!([START + step * SAMPLE_STEP.0 / 1000, value(sample)]));
        let metric: Map<String, Value> = metric.collect();
        let values: Vec<Value> = values.collect();
        self.0.push(json!({ "metric": metric, "values": values }));
    }
}
