//! Which pods manifests make, and what a mistake in one says.

use super::{ManifestError, ManifestPods, Manifests};

fn pods(text: &str) -> ManifestPods {
    Manifests::parse(text, "m.yaml").unwrap().pods().unwrap()
}

fn names(text: &str) -> Vec<String> {
    pods(text)
        .pods
        .iter()
        .map(|pod| pod.pod.metadata.name.clone().unwrap())
        .collect()
}

fn error(text: &str) -> ManifestError {
    match Manifests::parse(text, "m.yaml") {
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
    assert_eq!(
        names(&text),
        ["pod", "dep-0", "dep-1", "set-0", "job-0", "job-1", "cron-0"]
    );
    let found = pods(&text).pods;
    assert_eq!(&*found[1].source, "m.yaml:3: Deployment team/dep");
    assert_eq!(found[1].pod.metadata.namespace.as_deref(), Some("team"));
    assert_eq!(found[1].pod.metadata.labels.as_ref().unwrap()["app"], "x");
    assert_eq!(
        (found[1].workload, found[2].workload, found[3].workload),
        (1, 1, 2)
    );
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
    assert_eq!(
        names(&text),
        ["big-0", "big-1", "big-0-1", "big-0-2", "big-1-1", "big-1-2"]
    );
    let text = format!(
        "kind: JobSet
metadata: {{name: set}}
spec: {{replicatedJobs: [{{name: w, replicas: 2, template: {{spec: {{parallelism: 2, template: {TEMPLATE}}}}}}}]}}
"
    );
    assert_eq!(
        names(&text),
        ["set-0-w-0", "set-0-w-1", "set-1-w-0", "set-1-w-1"]
    );
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

/// An object of that kind and name, made by another.
fn owned(kind: &str, name: &str, owner: &str, spec: &str) -> String {
    let (owner_kind, owner_name) = owner.split_once('/').unwrap();
    let by = format!("{{kind: {owner_kind}, name: {owner_name}, controller: true}}");
    format!("{{kind: {kind}, metadata: {{name: {name}, ownerReferences: [{by}]}}, spec: {spec}}}")
}

#[test]
fn what_a_workload_made_is_counted_with_it_however_many_owners_are_between() {
    let set = format!("{{replicas: 2, template: {TEMPLATE}}}");
    let pod = "{containers: []}";
    let text = [
        format!(
            "{{kind: LeaderWorkerSet, metadata: {{name: big}}, spec: {{leaderWorkerTemplate: {{size: 3, workerTemplate: {TEMPLATE}}}}}}}"
        ),
        owned("StatefulSet", "big", "LeaderWorkerSet/big", &set),
        owned("Pod", "big-0", "StatefulSet/big", pod),
        owned("StatefulSet", "big-0", "Pod/big-0", &set),
        owned("Pod", "big-0-1", "StatefulSet/big-0", pod),
    ];
    assert_eq!(
        names(&text.join("\n---\n")),
        ["big-0", "big-0-1", "big-0-2"]
    );
    // Without the first of them, what the leader's Pod owns is counted beside it.
    assert_eq!(
        names(&text[2..].join("\n---\n")),
        ["big-0", "big-0-0", "big-0-1"]
    );
    let ring = [
        owned("Pod", "a", "Pod/b", pod),
        owned("Pod", "b", "Pod/a", pod),
    ];
    assert_eq!(names(&ring.join("\n---\n")), ["a", "b"]);
}

#[test]
fn what_an_unknown_kind_made_counts_and_the_kind_is_not_called_left_out() {
    let text = [
        "{kind: InferenceService, metadata: {name: i}, spec: {limits: {stowage.dev/vram: 40Gi}}}"
            .to_owned(),
        owned(
            "Deployment",
            "d",
            "InferenceService/i",
            &format!("{{template: {TEMPLATE}}}"),
        ),
        owned("Pod", "static", "Node/node-1", "{containers: []}"),
        "{kind: Node, metadata: {name: node-1}}".to_owned(),
    ];
    let found = pods(&text.join("\n---\n"));
    assert_eq!(
        (found.pods.len(), found.warnings.len()),
        (2, 0),
        "{found:?}"
    );
}

#[test]
fn jobs_that_have_ended_or_are_suspended_are_left_out_with_a_note() {
    let template = "{spec: {containers: [{name: c, resources: {limits: {nvidia.com/gpu: 1}}}]}}";
    let job = |name: &str, spec: &str, status: &str| {
        format!(
            "{{kind: Job, metadata: {{name: {name}}}, spec: {{{spec}template: {template}}}, status: {status}}}"
        )
    };
    let text = [
        job("runs", "", "{}"),
        job(
            "done",
            "",
            "{conditions: [{type: Complete, status: 'True'}]}",
        ),
        job("held", "suspend: true, ", "{}"),
        job(
            "again",
            "suspend: false, ",
            "{conditions: [{type: Failed, status: 'False'}]}",
        ),
    ];
    let found = pods(&text.join("\n---\n"));
    assert_eq!(names(&text.join("\n---\n")), ["runs-0", "again-0"]);
    assert!(
        found.warnings[0].starts_with("m.yaml:3: Job default/done: it has ended"),
        "{found:?}"
    );
    assert!(
        found.warnings[1].contains("Job default/held: it is suspended"),
        "{found:?}"
    );
}

#[test]
fn a_daemon_set_is_named_for_any_resource_of_nvidias_and_not_for_a_label() {
    let of = |container: &str, rest: &str| {
        format!(
            "{{kind: DaemonSet, metadata: {{name: d}}, spec: {{template: {{spec: {{containers: [{container}]{rest}}}}}}}}}"
        )
    };
    let shared = of(
        "{name: c, resources: {limits: {nvidia.com/gpu.shared: 1}}}",
        "",
    );
    assert!(pods(&shared).warnings[0].contains("a DaemonSet has a pod on each node"));
    let labelled = of(
        "{name: c}",
        ", nodeSelector: {nvidia.com/gpu.present: 'true'}",
    );
    assert!(pods(&labelled).warnings.is_empty());
}

#[test]
fn an_object_is_found_by_the_line_on_which_its_document_begins() {
    let sources = |text: &str| -> Vec<String> {
        pods(text)
            .pods
            .iter()
            .map(|pod| pod.source.split(": ").next().unwrap().to_owned())
            .collect()
    };
    let pod = "kind: Pod\nmetadata: {name: p}\nspec: {containers: []}\n";
    let text = format!(
        "# none\n---\n# a comment\n{pod}---\n---\n# empty\n--- # one more\n{pod}...\n{pod}"
    );
    assert_eq!(sources(&text), ["m.yaml:4", "m.yaml:11", "m.yaml:15"]);
    let json = r#"{"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}}"#;
    assert_eq!(
        sources(&format!("{json}\n\n{json} {json}")),
        ["m.yaml:1", "m.yaml:3", "m.yaml:3"]
    );
    assert_eq!(sources(&format!("kind: List\nitems: [{json}]")), ["m.yaml"]);
}

#[test]
fn a_list_as_an_api_server_gives_it_and_a_list_in_a_list_are_read() {
    let pod = |kind: &str| {
        format!(r#"{{{kind}"metadata": {{"name": "p"}}, "spec": {{"containers": []}}}}"#)
    };
    assert_eq!(
        names(&format!(r#"{{"kind": "PodList", "items": [{}]}}"#, pod(""))),
        ["p"]
    );
    let inner = format!(
        r#"{{"kind": "List", "items": [{}]}}"#,
        pod(r#""kind": "Pod", "#)
    );
    assert_eq!(
        names(&format!(r#"{{"kind": "List", "items": [{inner}]}}"#)),
        ["p"]
    );
}

#[test]
fn priorities_come_from_the_priority_classes_among_the_objects() {
    let pod = |class: &str| {
        format!(
            "{{kind: Pod, metadata: {{name: p}}, spec: {{priorityClassName: {class}, containers: []}}}}"
        )
    };
    let class = "{kind: PriorityClass, metadata: {name: high}, value: 1000}";
    let text = [class, &pod("high"), &pod("system-node-critical")].join("\n---\n");
    let found = pods(&text);
    let priorities: Vec<_> = found
        .pods
        .iter()
        .map(|pod| pod.pod.spec.as_ref().unwrap().priority)
        .collect();
    assert_eq!(
        (priorities, found.warnings.len()),
        (vec![Some(1000), Some(2_000_001_000)], 0)
    );
    let warnings = pods(&pod("low")).warnings;
    assert!(
        warnings[0].contains("PriorityClass low is not among the manifests"),
        "{warnings:?}"
    );
}

#[test]
fn a_kind_whose_pods_are_not_known_is_named_if_it_asks_for_gpus() {
    let ask = "spec: {predictor: {model: {resources: {limits: {stowage.dev/vram: 40Gi}}}}}";
    let found = pods(&format!(
        "{{kind: InferenceService, metadata: {{name: i}}, {ask}}}"
    ));
    assert!(
        found.pods.is_empty()
            && found.warnings[0].starts_with("m.yaml:1: InferenceService default/i: "),
        "{found:?}"
    );
    assert!(
        pods("{kind: ConfigMap, metadata: {name: c}}")
            .warnings
            .is_empty()
    );
}

#[test]
fn a_mistake_names_the_file_the_object_and_the_field() {
    let text = error(
        "{kind: Deployment, metadata: {name: d}, spec: {replicas: many, template: {spec: {containers: []}}}}",
    );
    assert_eq!(
        text.to_string(),
        "m.yaml:1: Deployment default/d: replicas is \"many\"; write a whole number of at most 20000"
    );
    let text =
        error("{kind: Pod, metadata: {name: p}, spec: {containers: [{name: 7}]}}").to_string();
    assert!(
        text.starts_with("m.yaml:1: Pod default/p: spec.containers[0].name: "),
        "{text}"
    );
    let text = error("metadata: {name: p}").to_string();
    assert!(text.contains("m.yaml: object 0 has no `kind`"), "{text}");
    let text = error("kind: Pod\n  metadata: {").to_string();
    assert!(
        text.starts_with("m.yaml: ") && text.contains("line 2"),
        "{text}"
    );
    let many = error(
        "{kind: ReplicaSet, metadata: {name: r}, spec: {replicas: 1000000, template: {spec: {containers: []}}}}",
    );
    assert!(many.to_string().contains("at most 20000"), "{many}");
}

#[test]
fn a_directory_is_read_in_order_of_name_and_one_without_manifests_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(
        Manifests::read(folder.path()),
        Err(ManifestError::NoFiles { .. })
    ));
    for (file, name) in [
        ("b.yaml", "second"),
        ("a.json", "first"),
        ("c.txt", "not read"),
    ] {
        let text = format!(
            r#"{{"kind": "Pod", "metadata": {{"name": "{name}"}}, "spec": {{"containers": []}}}}"#
        );
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let found = Manifests::read(folder.path()).unwrap().pods().unwrap();
    let names: Vec<_> = found
        .pods
        .iter()
        .map(|pod| pod.pod.metadata.name.clone().unwrap())
        .collect();
    assert_eq!(names, ["first", "second"]);
    let missing = Manifests::read(&folder.path().join("nope.yaml"))
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("nope.yaml") && missing.contains("write -"),
        "{missing}"
    );
}
