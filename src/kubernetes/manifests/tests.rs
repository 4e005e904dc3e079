//! Which pods manifests make, and what a mistake in one says.

use super::{ManifestError, ManifestPods, Manifests};

fn pods(text: &str) -> ManifestPods {
    Manifests::of(text, "m.yaml").unwrap().pods().unwrap()
}

fn names(text: &str) -> Vec<String> {
    pods(text).pods.iter().map(|pod| pod.pod.metadata.name.clone().unwrap()).collect()
}

fn error(text: &str) -> ManifestError {
    match Manifests::of(text, "m.yaml") {
        Ok(manifests) => manifests.pods().unwrap_err(),
        Err(error) => error,
    }
}

const TEMPLATE: &str = "{metadata: {labels: {app: x}}, spec: {containers: [{name: c}]}}";

#[test]
fn each_workload_makes_as_many_pods_as_run_at_once() {
    let text = format!(
        "{{kind: Pod, metadata: {{name: pod}}, spec: {{containers: []}}}}
---
{{kind: Deployment, metadata: {{name: dep, namespace: team}}, spec: {{replicas: 2, template: {TEMPLATE}}}}}
---
{{kind: StatefulSet, metadata: {{name: set}}, spec: {{template: {TEMPLATE}}}}}
---
{{kind: Job, metadata: {{name: job}}, spec: {{parallelism: 3, completions: 2, template: {TEMPLATE}}}}}
---
{{kind: CronJob, metadata: {{name: cron}}, spec: {{jobTemplate: {{spec: {{template: {TEMPLATE}}}}}}}}}
---
{{kind: Service, metadata: {{name: svc}}, spec: {{}}}}
---
"
    );
    assert_eq!(names(&text), ["pod", "dep-0", "dep-1", "set-0", "job-0", "job-1", "cron-0"]);
    let found = pods(&text).pods;
    assert_eq!(&*found[1].source, "m.yaml: Deployment team/dep");
    assert_eq!(found[1].pod.metadata.namespace.as_deref(), Some("team"));
    assert_eq!(found[1].pod.metadata.labels.as_ref().unwrap()["app"], "x");
    assert_eq!((found[1].workload, found[2].workload, found[3].workload), (1, 1, 2));
}

#[test]
fn a_group_is_a_leader_and_its_workers() {
    let text = format!(
        "kind: LeaderWorkerSet
metadata: {{name: big}}
spec:
  replicas: 2
  leaderWorkerTemplate: {{size: 3, workerTemplate: {TEMPLATE}}}
"
    );
    assert_eq!(names(&text), ["big-0", "big-1", "big-0-1", "big-0-2", "big-1-1", "big-1-2"]);
    let text = format!(
        "kind: JobSet
metadata: {{name: set}}
spec: {{replicatedJobs: [{{name: w, replicas: 2, template: {{spec: {{parallelism: 2, template: {TEMPLATE}}}}}}}]}}
"
    );
    assert_eq!(names(&text), ["set-0-w-0", "set-0-w-1", "set-1-w-0", "set-1-w-1"]);
}

#[test]
fn json_lists_and_yaml_lists_are_read_alike() {
    let yaml = format!(
        "kind: List\nitems: [{{kind: ReplicaSet, metadata: {{name: r}}, spec: {{template: {TEMPLATE}}}}}]\n"
    );
    let json = r#"{"kind": "List", "items": [{"kind": "ReplicaSet", "metadata": {"name": "r"},
        "spec": {"template": {"spec": {"containers": []}}}}]}"#;
    assert_eq!(names(&yaml), names(json));
}

#[test]
fn a_pod_whose_workload_is_there_too_is_counted_once() {
    let text = format!(
        "{{kind: Deployment, metadata: {{name: dep}}, spec: {{replicas: 1, template: {TEMPLATE}}}}}
---
kind: Pod
metadata:
  name: dep-5f6-abc
  labels: {{pod-template-hash: 5f6}}
  ownerReferences: [{{kind: ReplicaSet, name: dep-5f6, controller: true}}]
spec: {{containers: []}}
---
kind: Pod
metadata: {{name: other, ownerReferences: [{{kind: ReplicaSet, name: gone-1, controller: true}}]}}
spec: {{containers: []}}
"
    );
    assert_eq!(names(&text), ["dep-0", "other"]);
}

#[test]
fn priorities_come_from_the_priority_classes_among_the_objects() {
    let pod = |class: &str| {
        format!("{{kind: Pod, metadata: {{name: p}}, spec: {{priorityClassName: {class}, containers: []}}}}")
    };
    let class = "{kind: PriorityClass, metadata: {name: high}, value: 1000}";
    let text = [class, &pod("high"), &pod("system-node-critical")].join("\n---\n");
    let found = pods(&text);
    let priorities: Vec<_> = found.pods.iter().map(|pod| pod.pod.spec.as_ref().unwrap().priority).collect();
    assert_eq!((priorities, found.warnings.len()), (vec![Some(1000), Some(2_000_001_000)], 0));
    let warnings = pods(&pod("low")).warnings;
    assert!(warnings[0].contains("PriorityClass low is not among the manifests"), "{warnings:?}");
}

#[test]
fn a_kind_whose_pods_are_not_known_is_named_if_it_asks_for_gpus() {
    let ask = "spec: {predictor: {model: {resources: {limits: {stowage.dev/vram: 40Gi}}}}}";
    let found = pods(&format!("{{kind: InferenceService, metadata: {{name: i}}, {ask}}}"));
    assert!(
        found.pods.is_empty() && found.warnings[0].starts_with("m.yaml: InferenceService default/i: "),
        "{found:?}"
    );
    assert!(pods("{kind: ConfigMap, metadata: {name: c}}").warnings.is_empty());
}

#[test]
fn a_mistake_names_the_file_the_object_and_the_field() {
    let text = error(
        "{kind: Deployment, metadata: {name: d}, spec: {replicas: many, template: {spec: {containers: []}}}}",
    );
    assert_eq!(
        text.to_string(),
        "m.yaml: Deployment default/d: replicas is \"many\"; write a whole number of at most 100000"
    );
    let text = error("{kind: Pod, metadata: {name: p}, spec: {containers: [{name: 7}]}}").to_string();
    assert!(text.starts_with("m.yaml: Pod default/p: spec.containers[0].name: "), "{text}");
    let text = error("metadata: {name: p}").to_string();
    assert!(text.contains("m.yaml: object 0 has no `kind`"), "{text}");
    let text = error("kind: Pod\n  metadata: {").to_string();
    assert!(text.starts_with("m.yaml: ") && text.contains("line 2"), "{text}");
    let many = error(
        "{kind: ReplicaSet, metadata: {name: r}, spec: {replicas: 1000000, template: {spec: {containers: []}}}}",
    );
    assert!(many.to_string().contains("at most 100000"), "{many}");
}

#[test]
fn a_directory_is_read_in_order_of_name_and_one_without_manifests_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Manifests::read(folder.path()), Err(ManifestError::NoFiles { .. })));
    for (file, name) in [("b.yaml", "second"), ("a.json", "first"), ("c.txt", "not read")] {
        let text =
            format!(r#"{{"kind": "Pod", "metadata": {{"name": "{name}"}}, "spec": {{"containers": []}}}}"#);
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let found = Manifests::read(folder.path()).unwrap().pods().unwrap();
    let names: Vec<_> = found.pods.iter().map(|pod| pod.pod.metadata.name.clone().unwrap()).collect();
    assert_eq!(names, ["first", "second"]);
    let missing = Manifests::read(&folder.path().join("nope.yaml")).unwrap_err().to_string();
    assert!(missing.contains("nope.yaml") && missing.contains("write -"), "{missing}");
}
