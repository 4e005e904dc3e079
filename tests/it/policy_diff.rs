//! What `stowage policy diff` prints of a cluster: by workload, so that a fleet fits on a screen.

use crate::served;
use serde_json::{Value, json};
use std::process::Command;

const HEADER: &str = "apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\n";

/// Of the namespace, named and owned as a controller's pods are.
fn pods(kind: &str, name: &str, count: usize) -> impl Iterator<Item = Value> {
    let (kind, name) = (kind.to_owned(), name.to_owned());
    (0..count).map(move |number| {
        let mut pod = served::pod(&format!("{name}-5d9c-{number:05}"), "40Gi");
        let owner = match kind.as_str() {
            "Deployment" => ("ReplicaSet", format!("{name}-5d9c")),
            kind => (kind, name.clone()),
        };
        pod["metadata"]["namespace"] = json!("team-a");
        if owner.0 == "ReplicaSet" {
            pod["metadata"]["labels"]["pod-template-hash"] = json!("5d9c");
        }
        if owner.0 != "Pod" {
            pod["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": owner.0, "name": owner.1, "uid": owner.1, "controller": true,
            }]);
        }
        pod
    })
}

fn diff(
    pods: impl Iterator<Item = Value>,
    nodes: usize,
    policies: [&str; 2],
    more: &[&str],
) -> String {
    let nodes = (0..nodes).map(|number| {
        let mut node = served::node(&format!("node-{number}"));
        node["metadata"]["labels"] = served::gpu_labels(1);
        node
    });
    let items: Vec<Value> = nodes.chain(pods).collect();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let [old, new] = policies.map(|policy| format!("{HEADER}{policy}"));
    let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
    stowage
        .args(["policy", "diff"])
        .args([write("old.yaml", &old), write("new.yaml", &new)]);
    stowage.arg("--cluster").arg(write(
        "cluster.json",
        &json!({ "items": items }).to_string(),
    ));
    let output = stowage.args(more).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

const NIGHTLY: &str =
    "classes: [{name: nightly, match: {namespaces: [team-a]}, preemptible: true}]\n";

#[test]
fn sixty_pods_of_three_workloads_are_a_dozen_lines() {
    let sixty = || {
        let [chat, train] =
            [("Deployment", "chat"), ("Job", "train")].map(|(kind, name)| pods(kind, name, 20));
        chat.chain(train).chain(pods("StatefulSet", "search", 20))
    };
    let told = diff(sixty(), 2, ["", NIGHTLY], &[]);
    for workload in [
        "Deployment team-a/chat",
        "Job team-a/train",
        "StatefulSet team-a/search",
    ] {
        assert!(told.contains(&format!("{workload}, 20 pods\n")), "{told}");
    }
    assert_eq!(
        told.matches("20  class serving → nightly\n").count(),
        3,
        "{told}"
    );
    assert_eq!(
        told.matches("20  may be evicted no → yes\n").count(),
        3,
        "{told}"
    );
    assert!(
        told.ends_with("60 of 60 pods change, and 0 nodes\n"),
        "{told}"
    );
    assert!(told.lines().count() <= 13, "{told}");
    let json: Value =
        serde_json::from_str(&diff(sixty(), 2, ["", NIGHTLY], &["-o", "json"])).unwrap();
    assert_eq!(json["changes"].as_array().unwrap().len(), 60);
}

#[test]
fn pods_that_nothing_controls_stand_by_themselves() {
    let told = diff(pods("Pod", "note", 2), 2, ["", NIGHTLY], &[]);
    for pod in ["team-a/note-5d9c-00000", "team-a/note-5d9c-00001"] {
        assert!(told.contains(&format!("{pod}, waiting\n")), "{told}");
    }
    assert!(
        !told.contains("Deployment") && told.contains("    class serving → nightly\n"),
        "{told}"
    );
}

#[test]
fn nodes_that_change_alike_are_one_entry_and_no_line_is_wider_than_a_terminal() {
    let refuse = "telemetry: {expired: refuse}\n";
    let told = diff(pods("Deployment", "chat", 9), 40, ["", refuse], &[]);
    assert!(told.starts_with("40 nodes: node-0, node-1, "), "{told}");
    assert!(
        told.contains("\n    9  could go to no node any more\n"),
        "{told}"
    );
    assert!(
        told.ends_with("9 of 9 pods change, and 40 nodes\n"),
        "{told}"
    );
    for line in told.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn a_node_that_a_policy_closes_says_why() {
    let refuse = "telemetry: {expired: refuse}\n";
    let told = diff(pods("Pod", "note", 1), 1, ["", refuse], &[]);
    assert!(
        told.contains("closed: no fresh report (telemetry.expired: refuse)\n"),
        "{told}"
    );
    let told = diff(pods("Pod", "note", 1), 1, [refuse, "mode: shadow\n"], &[]);
    assert!(
        told.contains("    - ") && told.contains("telemetry.expired: refuse"),
        "{told}"
    );
}
