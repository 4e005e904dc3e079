//! What a pod that asks for VRAM needs beside and did not say: the operations of the policies `stowage-pod-defaults` and
//! `stowage-pod-runtime-class` (manifests/components/pod-defaults), in their order; and those of `stowage-debug-defaults`.

use super::pod::Texts;
use super::{AdmittedContainer, AdmittedMetadata, AdmittedPod, Text};
use serde::Serialize;
use serde_json::{Value, json};
use stowage_scheduling::engines::{DECLARATIONS, Engine};

const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
const FRACTION: &str = "GPU_MEMORY_FRACTION";
const ENGINE_TYPE: &str = "llm-d.ai/engine-type";
const MIRROR: &str = "kubernetes.io/config.mirror";

/// One operation of a JSON patch (RFC 6902); all of them add.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PatchOp {
    pub op: &'static str,
    pub path: String,
    pub value: Value,
}

fn add(path: impl ToString, value: Value) -> PatchOp {
    PatchOp {
        op: "add",
        path: path.to_string(),
        value,
    }
}

/// What is added to a new pod; nothing to one that asks for no VRAM, is a static pod's mirror or has opted out by its label. That a
/// namespace has opted out is for the caller to know. `runtime_class` is the class for pods that name none, if the cluster has it.
pub fn defaults(pod: &AdmittedPod<'_>, runtime_class: Option<&str>) -> Vec<PatchOp> {
    let value = |all: &'_ Option<Texts<'_>>, key| all.as_ref()?.get(key).map(|one| one.to_string());
    let AdmittedMetadata {
        labels,
        annotations,
    } = &pod.metadata;
    if !pod.asks_for_vram() || pod.has_opted_out() || value(annotations, MIRROR).is_some() {
        return Vec::new();
    }
    let is_unsaid = |field: &Option<Text<'_>>, default| match field.as_deref() {
        None | Some("") => true,
        Some(said) => said == default,
    };
    let mut ops = Vec::new();
    if is_unsaid(&pod.spec.scheduler_name, "default-scheduler") {
        ops.push(add("/spec/schedulerName", json!("stowage")));
    }
    ops.extend(variables(pod));
    if let Some(engine) = engine(pod).filter(|_| value(labels, ENGINE_TYPE).is_none()) {
        ops.extend(labels.is_none().then(|| add("/metadata/labels", json!({}))));
        let path = format!("/metadata/labels/{}", ENGINE_TYPE.replace('/', "~1"));
        ops.push(add(path, json!(engine)));
    }
    let class = runtime_class.filter(|_| is_unsaid(&pod.spec.runtime_class_name, ""));
    ops.extend(class.map(|name| add("/spec/runtimeClassName", json!(name))));
    ops
}

/// What is added to the containers that `kubectl debug` brings into a pod that asks for VRAM, which was `before`: one that does not say
/// which GPUs it sees, sees none.
pub fn debug_defaults(pod: &AdmittedPod<'_>, before: &AdmittedPod<'_>) -> Vec<PatchOp> {
    if !pod.asks_for_vram() || pod.has_opted_out() {
        return Vec::new();
    }
    let was_there = |one: &AdmittedContainer<'_>| {
        let mut debug = before.spec.ephemeral_containers.iter().flatten();
        debug.any(|old| *old.name == *one.name)
    };
    let (mut none, mut devices) = (Vec::new(), Vec::new());
    let debug = pod.spec.ephemeral_containers.iter().flatten();
    for (n, one) in debug.enumerate() {
        if was_there(one) || one.has_variable(DEVICES) {
            continue;
        }
        let env = format!("/spec/ephemeralContainers/{n}/env");
        devices.push(add(
            format!("{env}/0"),
            json!({ "name": DEVICES, "value": "void" }),
        ));
        if one.env.as_ref().is_none_or(Vec::is_empty) {
            none.push(add(env, json!([])));
        }
    }
    [none, devices].concat()
}

/// In front of each container's own variables, so that these may refer to it.
fn variables(pod: &AdmittedPod<'_>) -> Vec<PatchOp> {
    let (mut none, mut devices, mut fractions) = (Vec::new(), Vec::new(), Vec::new());
    let from = |key: &str| json!({ "fieldRef": { "fieldPath": format!("metadata.annotations['{key}']") } });
    let asking = pod
        .containers()
        .filter(|(_, one)| one.asks_for_vram())
        .count();
    for (path, one) in pod.containers() {
        let (env, first) = (format!("{path}/env"), format!("{path}/env/0"));
        if one.env.as_ref().is_none_or(Vec::is_empty) {
            none.push(add(env, json!([])));
        }
        if !one.has_variable(DEVICES) {
            let variable = match one.asks_for_vram() {
                true => {
                    json!({ "name": DEVICES, "valueFrom": from("stowage.dev/visible-devices") })
                }
                false => json!({ "name": DEVICES, "value": "void" }),
            };
            devices.push(add(&first, variable));
        }
        if one.asks_for_vram() && !one.has_variable(FRACTION) {
            // Where several containers ask, each has a fraction of its own: told the pod's, each would use all of it.
            let key = match asking {
                1 => "stowage.dev/gpu-memory-fraction".to_owned(),
                _ => format!("{}.container.stowage.dev/gpu-memory-fraction", &*one.name),
            };
            fractions.push(add(
                &first,
                json!({ "name": FRACTION, "valueFrom": from(&key) }),
            ));
        }
    }
    [none, devices, fractions].concat()
}

/// By the image of the first container that asks for VRAM and has a port: one without may be a batch job that only uses the
/// engine's library.
fn engine(pod: &AdmittedPod<'_>) -> Option<&'static str> {
    let serves =
        |one: &AdmittedContainer<'_>| one.ports.as_ref().is_some_and(|ports| !ports.is_empty());
    let (_, one) = pod
        .containers()
        .find(|(_, one)| one.asks_for_vram() && serves(one))?;
    let image = one.image.as_deref()?;
    let mut engines = DECLARATIONS
        .iter()
        .rev()
        .filter(|one| one.engine != Engine::Other);
    let named = engines.find(|one| one.images.iter().any(|part| image.contains(part)))?;
    Some(named.name)
}

/// Carries the operations out on the pod's JSON.
pub fn patch(pod: &mut Value, ops: &[PatchOp]) {
    for PatchOp { path, value, .. } in ops {
        let (parent, key) = path.rsplit_once('/').unwrap_or_default();
        match pod.pointer_mut(parent) {
            Some(Value::Array(list)) => list.insert(0, value.clone()),
            Some(parent) => parent[key.replace("~1", "/")] = value.clone(),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::path::Path;

    fn ops(pod: &str, class: Option<&str>) -> Vec<PatchOp> {
        defaults(&serde_json::from_str(pod).unwrap(), class)
    }

    /// Each operation as `PATH = VALUE`.
    fn added(pod: &str, class: Option<&str>) -> Vec<String> {
        let ops = ops(pod, class).into_iter();
        ops.map(|op| {
            let field = op
                .value
                .pointer("/valueFrom/fieldRef/fieldPath")
                .and_then(Value::as_str);
            let variable = field.or(op.value["value"].as_str());
            let value = match variable {
                Some(value) => format!("{} <- {value}", op.value["name"].as_str().unwrap()),
                None => op.value.to_string(),
            };
            format!("{} {} = {value}", op.op, op.path)
        })
        .collect()
    }

    const DEVICES_FIELD: &str =
        "NVIDIA_VISIBLE_DEVICES <- metadata.annotations['stowage.dev/visible-devices']";

    #[test]
    fn a_pod_gets_what_it_did_not_say_in_the_policies_order() {
        let asks = r#""resources": {"limits": {"stowage.dev/vram": "40Gi"}}"#;
        let pod = format!(
            r#"{{"metadata": {{}}, "spec": {{"schedulerName": "default-scheduler",
            "initContainers": [{{"name": "fetch"}}, {{"name": "proxy", "env": [{{"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}}]}}],
            "containers": [{{"name": "engine", "image": "vllm/vllm-openai:v0.20.0", "ports": [{{"containerPort": 8000}}], {asks}}},
                {{"name": "side", "env": [{{"name": "A", "value": "\"b\""}}]}}]}}}}"#
        );
        assert_eq!(
            added(&pod, Some("nvidia")),
            [
                r#"add /spec/schedulerName = "stowage""#,
                "add /spec/containers/0/env = []",
                "add /spec/initContainers/0/env = []",
                &format!("add /spec/containers/0/env/0 = {DEVICES_FIELD}"),
                "add /spec/containers/1/env/0 = NVIDIA_VISIBLE_DEVICES <- void",
                "add /spec/initContainers/0/env/0 = NVIDIA_VISIBLE_DEVICES <- void",
                "add /spec/containers/0/env/0 = GPU_MEMORY_FRACTION <- metadata.annotations['stowage.dev/gpu-memory-fraction']",
                "add /metadata/labels = {}",
                r#"add /metadata/labels/llm-d.ai~1engine-type = "vllm""#,
                r#"add /spec/runtimeClassName = "nvidia""#,
            ]
        );
        let mut patched = serde_json::from_str(&pod).unwrap();
        patch(&mut patched, &ops(&pod, None));
        let names = |at: &str| -> Vec<String> {
            let env = patched
                .pointer(at)
                .and_then(Value::as_array)
                .unwrap()
                .iter();
            env.map(|one| one["name"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(names("/spec/containers/0/env"), [FRACTION, DEVICES]);
        assert_eq!(names("/spec/containers/1/env"), [DEVICES, "A"]);
        assert_eq!(patched["metadata"]["labels"][ENGINE_TYPE], "vllm");
    }

    #[test]
    fn what_a_user_wrote_stays_and_what_is_not_asked_for_is_not_added() {
        let pod = |metadata: &str, spec: &str, amount: &str| {
            format!(
                r#"{{"metadata": {{{metadata}}}, "spec": {{{spec} "containers": [{{"name": "a", "image": "x/sglang",
                "ports": [{{}}], "env": [{{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}}, {{"name": "GPU_MEMORY_FRACTION"}}],
                "resources": {{"requests": {{"stowage.dev/vram": "{amount}"}}}}}}]}}}}"#
            )
        };
        let said = r#""schedulerName": "volcano", "runtimeClassName": "nvidia-cdi","#;
        let label = r#""labels": {"llm-d.ai/engine-type": "own"}"#;
        assert_eq!(added(&pod(label, said, "40Gi"), Some("nvidia")), [""; 0]);
        let engine = r#"add /metadata/labels/llm-d.ai~1engine-type = "sglang""#;
        assert_eq!(
            added(&pod(r#""labels": {"a": "b"}"#, said, "0.5Gi"), None),
            [engine]
        );
        for amount in ["0", "0Gi", "0e3", "-1Gi"] {
            assert_eq!(
                added(&pod("", "", amount), Some("nvidia")),
                [""; 0],
                "{amount}"
            );
        }
        let opted_out = r#""labels": {"stowage.dev/pod-defaults": "false"}"#;
        let mirror = r#""annotations": {"kubernetes.io/config.mirror": "m"}"#;
        for metadata in [opted_out, mirror] {
            assert_eq!(
                added(&pod(metadata, "", "40Gi"), Some("nvidia")),
                [""; 0],
                "{metadata}"
            );
        }
    }

    #[test]
    fn each_of_several_containers_that_ask_has_its_own_fraction() {
        let one = |name| {
            format!(
                r#"{{"name": "{name}", "resources": {{"limits": {{"stowage.dev/vram": "1Gi"}}}}}}"#
            )
        };
        let pod = format!(
            r#"{{"spec": {{"schedulerName": "stowage", "containers": [{}, {}]}}}}"#,
            one("a"),
            one("b")
        );
        let fraction = |index, name| {
            format!(
                "add /spec/containers/{index}/env/0 = \
                GPU_MEMORY_FRACTION <- metadata.annotations['{name}.container.stowage.dev/gpu-memory-fraction']"
            )
        };
        assert_eq!(added(&pod, None)[4..], [fraction(0, "a"), fraction(1, "b")]);
    }

    /// The committed pods are what a real API server made of the examples.
    #[test]
    fn the_examples_become_what_the_policies_make_of_them() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (name, example, template) in [
            ("pod", "pod", ""),
            ("deployment", "deployment", "/spec/template"),
            (
                "leader",
                "leaderworkerset",
                "/spec/leaderWorkerTemplate/leaderTemplate",
            ),
            (
                "worker",
                "leaderworkerset",
                "/spec/leaderWorkerTemplate/workerTemplate",
            ),
            (
                "jobset",
                "jobset",
                "/spec/replicatedJobs/0/template/spec/template",
            ),
        ] {
            let text =
                std::fs::read_to_string(root.join(format!("manifests/examples/{example}.yaml")))
                    .unwrap();
            let object = serde_saphyr::from_multiple::<Value>(&text)
                .unwrap()
                .swap_remove(0);
            let mut made = object.pointer(template).unwrap().clone();
            let ops = defaults(&AdmittedPod::deserialize(&made).unwrap(), Some("nvidia"));
            patch(&mut made, &ops);
            let golden = std::fs::read_to_string(
                root.join(format!("tests/golden/pod-defaults/{name}.json")),
            )
            .unwrap();
            // The API server completes a reference to a field.
            let golden = golden.replace("\"apiVersion\": \"v1\",\n", "");
            let golden: Value = serde_json::from_str(&golden).unwrap();
            assert_eq!(made["metadata"]["labels"], golden["labels"], "{name}");
            for field in ["schedulerName", "runtimeClassName"] {
                assert_eq!(made["spec"][field], golden["spec"][field], "{name}");
            }
            for list in ["containers", "initContainers"] {
                let env = |pod: &Value| -> Vec<Value> {
                    let all = pod["spec"][list].as_array().into_iter().flatten();
                    all.map(|one| one["env"].clone()).collect()
                };
                assert_eq!(env(&made), env(&golden), "{name}");
            }
        }
    }
}
