//! `stowage uninstall` before a real API server: nothing named `stowage` is left but what the page names.

use super::fleet::{node, pod};
use super::processes::{CommandOutput, eventually, run};
use super::world::{RealControlPlane, manifest, yaml};
use super::{ALWAYS, gated, submit, wait_until_all_bound};
use serde_json::{Value, json};
use std::process::Command;

/// What docs/start/upgrade-and-removal.md says stays: of pods what their owners wrote and the Binding's annotations, and Events, which
/// expire.
const NAMED_BY_THE_PAGE: [&str; 2] = ["Pod", "Event"];

#[tokio::test(flavor = "multi_thread")]
async fn after_removal_nothing_is_left_that_the_page_does_not_name() {
    let nodes = vec![node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let Some(mut world) = RealControlPlane::start_all(nodes, &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;
    let never_fits = gated(pod("waits", 900, &json!({}), "stowage-serving"));
    submit(
        &world.client,
        &[pod("runs", 28, &json!({}), "stowage-serving"), never_fits],
    )
    .await;
    wait_until_all_bound(&mut world, 1).await;
    eventually(
        "the planner has written why the gated pod waits",
        async || {
            let waits = get(&world, &["pod", "waits"]);
            condition_types(&waits)
                .contains(&"stowage.dev/Placed".to_owned())
                .then_some(())
        },
    )
    .await;

    let own = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"stowage-0","namespace":"kube-system",
        "labels":{"app.kubernetes.io/name":"stowage"}},"spec":{"containers":[{"name":"c","image":"i"}]}}"#;
    assert!(world.apply(own, &[]).is_success);
    let refused = uninstall(&world, &[]);
    assert!(
        !refused.is_success
            && refused
                .output
                .contains("Stowage still runs: kube-system/stowage-0"),
        "{}",
        refused.output
    );
    let deleted = world.kubectl(&["delete", "pod", "-n", "kube-system", "stowage-0", "--force"]);
    assert!(deleted.is_success, "{}", deleted.output);
    // A label is anybody's, and a Lease is whose who renews it.
    assert!(
        world
            .apply(&own.replace("kube-system", "default"), &[])
            .is_success
    );
    let refused = uninstall(&world, &[]);
    let renews = "still renews the Lease kube-system/stowage-scheduler";
    assert!(
        !refused.is_success && refused.output.contains(renews),
        "{}",
        refused.output
    );

    world.stowage.take().expect("it runs").kill();
    world.scheduler.take().expect("it runs").kill();
    let deleted = world.kubectl(&["delete", "-k", manifest("base").to_str().unwrap()]);
    assert!(deleted.is_success, "{}", deleted.output);
    a_reservation_of_a_leader_that_was_killed(&world).await;

    let shown = uninstall(&world, &["--dry-run"]);
    assert!(
        shown.is_success && shown.output.contains("Would remove:"),
        "{}",
        shown.output
    );
    assert_eq!(
        vram_of(&get(&world, &["node", "a"])),
        ["allocatable", "capacity"],
        "nothing was changed"
    );

    let removed = uninstall(&world, &[]);
    println!("{}", removed.output);
    assert!(removed.is_success, "{}", removed.output);
    assert!(
        removed
            .output
            .contains("Running on GPUs that Stowage chose: 1 pod (default: 1)."),
        "{}",
        removed.output
    );
    assert!(
        removed
            .output
            .contains("no scheduler will place them: 1 pod (default: 1)"),
        "{}",
        removed.output
    );
    assert!(vram_of(&get(&world, &["node", "a"])).is_empty());
    let waits = get(&world, &["pod", "waits"]);
    assert_eq!(waits["spec"]["schedulingGates"], Value::Null);
    assert_eq!(waits["status"]["nominatedNodeName"], Value::Null);
    assert!(
        !condition_types(&waits)
            .iter()
            .any(|one| one.starts_with("stowage.dev/")),
        "{waits}"
    );
    let runs = get(&world, &["pod", "runs"]);
    let devices = &runs["metadata"]["annotations"]["stowage.dev/devices"];
    assert!(
        devices.is_string(),
        "a container that restarts reads its GPUs again"
    );

    let left = objects_that_name_stowage(&world);
    let unnamed: Vec<&String> = left
        .iter()
        .filter(|one| !NAMED_BY_THE_PAGE.iter().any(|kind| one.starts_with(kind)))
        .collect();
    assert!(unnamed.is_empty(), "{unnamed:?}");
    let again = uninstall(&world, &[]);
    assert!(
        again
            .output
            .starts_with("Nothing of Stowage is left on nodes and pods."),
        "{}",
        again.output
    );
}

fn uninstall(world: &RealControlPlane, flags: &[&str]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    run(command
        .arg("uninstall")
        .arg("--kubeconfig")
        .arg(world.admin())
        .args(flags))
}

/// As it lies in the API server when nobody is left who would end it.
async fn a_reservation_of_a_leader_that_was_killed(world: &RealControlPlane) {
    let patch = json!({ "status": { "nominatedNodeName": "a", "conditions": [
        { "type": "stowage.dev/Reserved", "status": "True", "message": "{}", "reason": "WaitingForVictims" },
    ] } });
    let patch = patch.to_string();
    // The admission policies are deleted, and the API server stops enforcing them within seconds.
    eventually("its status can be written", async || {
        let flags = [
            "patch",
            "pod",
            "waits",
            "--subresource=status",
            "--type=strategic",
            "-p",
            &patch,
        ];
        world.kubectl(&flags).is_success.then_some(())
    })
    .await;
}

fn get(world: &RealControlPlane, what: &[&str]) -> Value {
    let ran = world.kubectl(&[&["get", "-o", "json"], what].concat());
    assert!(ran.is_success, "{what:?}: {}", ran.output);
    let lines = ran
        .output
        .lines()
        .filter(|line| !line.starts_with("Warning: "));
    yaml(&lines.collect::<Vec<_>>().join("\n"))
}

fn condition_types(pod: &Value) -> Vec<String> {
    let conditions = pod["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    conditions
        .iter()
        .map(|one| one["type"].as_str().unwrap().to_owned())
        .collect()
}

/// The lists in which the node has VRAM.
fn vram_of(node: &Value) -> Vec<&'static str> {
    let has = |list: &&str| node["status"][list].get("stowage.dev/vram").is_some();
    ["allocatable", "capacity"]
        .into_iter()
        .filter(has)
        .collect()
}

/// Every object of every kind that can be listed, with `stowage` anywhere in it but in the record of who wrote which field.
fn objects_that_name_stowage(world: &RealControlPlane) -> Vec<String> {
    let kinds = world.kubectl(&["api-resources", "--verbs=list", "-o", "name"]);
    assert!(kinds.is_success, "{}", kinds.output);
    let kinds: Vec<&str> = kinds
        .output
        .lines()
        .filter(|kind| kind.contains(|c: char| c.is_alphabetic()))
        .collect();
    assert!(kinds.len() > 40, "{kinds:?}");
    let all = get(world, &[&kinds.join(","), "--all-namespaces"]);
    let names = |object: &Value| {
        let text = object.to_string();
        text.contains("stowage").then(|| {
            format!(
                "{} {}",
                object["kind"].as_str().unwrap(),
                object["metadata"]["name"]
            )
        })
    };
    all["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(names)
        .collect()
}
