//! `/v1/explain` and `stowage explain`: the shape of the answer, errors with a remedy, and exit codes.

use crate::client::{Client, NOBODYS};
use crate::running_demo::RunningDemo;
use crate::served::{ServedCluster, bound_on, pod, with_priority};
use serde_json::{Value, json};
use std::process::{Command, Output};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Millis;

fn served() -> crate::served::Served {
    let job = with_priority(bound_on(pod("job", "60Gi"), "node-a", &[0], 60 << 30), -10);
    ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 1)])
        .with([job, pod("large", "100Gi"), pod("small", "40Gi")])
        .serve()
}

fn command(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stowage"))
        .arg("explain")
        .args(arguments)
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn the_answer_has_the_documented_shape() {
    let served = served();
    let answer = Client::connect(served.operators).get("/v1/explain?pod=default/large");
    assert_eq!(
        (answer.status, answer.content_type.as_str()),
        (200, "application/json")
    );
    let explanation = answer.json();
    assert_eq!(explanation["verdict"], "does-not-fit");
    assert_eq!(
        explanation["pod"],
        json!({ "namespace": "default", "name": "large" })
    );
    assert_eq!(explanation["request"]["vramBytes"], json!(100u64 << 30));
    assert_eq!(explanation["class"]["name"], "serving");
    assert_eq!(
        explanation["class"]["passedOver"][0]["unmet"]["field"],
        "sharing"
    );
    assert_eq!(explanation["stage"]["state"], "waiting");
    assert_eq!(
        explanation["counts"],
        json!({ "nodes": 2, "gpus": 2, "fit": 0, "refused": 2 })
    );
    let impasse = &explanation["impasse"];
    assert_eq!(impasse["code"], "no-gpu-large-enough");
    assert_eq!(impasse["needsBytes"], json!(100u64 << 30));
    assert!(
        impasse["text"]
            .as_str()
            .unwrap()
            .contains("can allocate 72.0 GiB"),
        "{impasse}"
    );
    let remedies = explanation["remedies"].as_array().unwrap();
    assert!(
        remedies
            .iter()
            .all(|remedy| remedy["change"] != "no-gpu-large-enough"),
        "{remedies:?}"
    );
    let node = &explanation["nodes"][0];
    assert_eq!(node["misfit"]["code"], "too-large");
    assert!(node["reportAgeMillis"].is_u64(), "{node}");
    let obstacle = &node["gpus"][0]["obstacles"][0];
    assert_eq!(obstacle["code"], "too-small");
    assert_eq!(obstacle["shortBytes"], json!(28u64 << 30));
    let occupants = |node: &Value| node["gpus"][0]["occupants"].clone();
    let job = explanation["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(occupants)
        .find(|o| *o != json!([]))
        .unwrap();
    assert_eq!(
        (&job[0]["pod"]["name"], &job[0]["class"]),
        (&json!("job"), &json!("opportunistic"))
    );
}

#[test]
fn a_pod_on_an_over_allocated_gpu_is_explained_with_the_other_pod() {
    let two = ["early", "late"].map(|name| bound_on(pod(name, "60Gi"), "node-a", &[0], 60 << 30));
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).with(two).serve();
    let ask = || {
        Client::connect(served.operators)
            .get("/v1/explain?pod=default/late")
            .json()
    };
    assert!(ask()["conflicts"].is_null());
    let now = served.service.now();
    for now in [now, now + Millis::seconds(60)] {
        let due = served.service.over_allocations().due(now);
        let devices = |name: &NodeName| {
            served
                .service
                .cluster()
                .ledger()
                .node(name)
                .unwrap()
                .devices
                .clone()
        };
        let nodes: Vec<_> = due
            .into_iter()
            .map(|name| (name.clone(), devices(&name)))
            .collect();
        served.service.over_allocations().check_nodes(&nodes, now);
    }
    let conflict = &ask()["conflicts"][0];
    assert_eq!(
        (&conflict["kind"], &conflict["node"]),
        (&json!("overcommitted"), &json!("node-a"))
    );
    let printed = command(&[
        "default/late",
        "--server",
        &format!("http://{}", served.operators),
    ]);
    let printed = String::from_utf8(printed.stdout).unwrap();
    let is_told = |text: &str| {
        ["default/early", "default/late", "120.0 GiB"]
            .iter()
            .all(|part| text.contains(part))
    };
    assert!(
        is_told(conflict["text"].as_str().unwrap()) && is_told(&printed),
        "{conflict} {printed}"
    );
}

#[test]
fn an_explanation_does_not_change_the_ledger() {
    let served = served();
    let before = served.ledger();
    for query in [
        "pod=large",
        "pod=small&all=true",
        "pod=job&node=node-b",
        "pod=nobody",
    ] {
        Client::connect(served.operators).get(&format!("/v1/explain?{query}"));
    }
    assert_eq!(served.ledger(), before);
}

#[test]
fn requests_that_cannot_be_explained_get_the_reason() {
    let served = served();
    let asked = |query: &str| {
        let answer = Client::connect(served.operators).get(&format!("/v1/explain{query}"));
        (answer.status, answer.text().to_owned())
    };
    let (status, text) = asked("?pod=default/nobody");
    assert_eq!(status, 404);
    assert!(
        text.contains("no pod default/nobody") && text.contains("kubectl -n default"),
        "{text}"
    );
    assert_eq!(asked("?pod=default/").0, 400);
    assert_eq!(asked("?pod=small&node=%20").0, 400);
    assert_eq!(asked("").0, 400);
    assert_eq!(asked("?pod=small&nodes=x").0, 400);
}

#[test]
fn the_explain_command_prints_the_services_answer() {
    let served = served();
    let server = format!("http://{}", served.operators);
    let large = command(&["large", "--server", &server]);
    let text = String::from_utf8(large.stdout.clone()).unwrap();
    assert_eq!(large.status.code(), Some(1), "{}", stderr(&large));
    assert!(
        text.starts_with("default/large fits on none of 2 nodes.\n"),
        "{text}"
    );
    let small = command(&["default/small", "--server", &server, "--json"]);
    assert_eq!(small.status.code(), Some(0));
    assert_eq!(
        serde_json::from_slice::<Value>(&small.stdout).unwrap()["verdict"],
        "fits"
    );
    let nobody = command(&["nobody", "--server", &server]);
    assert_eq!((nobody.status.code(), nobody.stdout.len()), (Some(2), 0));
    assert!(
        stderr(&nobody).starts_with("error: Stowage knows no pod default/nobody."),
        "{}",
        stderr(&nobody)
    );
}

#[test]
fn the_explain_command_shows_the_best_nodes_or_all_or_one() {
    let names: Vec<String> = (0..30).map(|n| format!("node-{n:02}")).collect();
    let nodes: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let served = ServedCluster::with_gpus(&nodes)
        .with([pod("small", "40Gi")])
        .serve();
    let server = format!("http://{}", served.operators);
    let shown = |flags: &[&str]| -> Vec<String> {
        let output = command(&[&["small", "--server", &server, "--json"], flags].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let explanation: Value = serde_json::from_slice(&output.stdout).unwrap();
        let nodes = explanation["nodes"].as_array().unwrap().iter();
        nodes
            .map(|node| node["name"].as_str().unwrap().to_owned())
            .collect()
    };
    assert!(shown(&[]).len() < 30, "{:?}", shown(&[]));
    let mut all = shown(&["--all"]);
    all.sort_unstable();
    assert_eq!(all, names);
    assert_eq!(shown(&["--node", "node-29"]), ["node-29"]);
    assert_eq!(
        command(&["small", "--server", &server, "--all", "--node", "node-29"])
            .status
            .code(),
        Some(2)
    );
}

#[test]
fn a_missing_server_and_a_missing_pod_have_different_errors() {
    let output = command(&["x", "--server", &format!("http://127.0.0.1:{NOBODYS}")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("no answer from http://") && stderr(&output).contains("--admin")
    );
    let output = command(&["x", "--server", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("write http://HOST:PORT"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_dump_is_explained_offline_and_by_any_policy() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mut node = crate::served::node("node-a");
    node["metadata"]["labels"] = crate::served::gpu_labels(1);
    let mut odd = pod("odd", "40Gi");
    odd["metadata"]["annotations"]["stowage.dev/gpus"] = json!("many");
    let mut plain = pod("plain", "1Gi");
    plain["spec"]["containers"][0]["resources"] = json!({});
    let items = [node, pod("llm", "70Gi"), odd, plain];
    let dump = write(
        "dump.json",
        json!({ "kind": "List", "items": items }).to_string(),
    );
    let asked = |arguments: &[&str]| {
        let output = command(&[arguments, &["--cluster", &dump]].concat());
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stdout.clone()).unwrap(),
            stderr(&output),
        )
    };
    assert_eq!(asked(&["llm"]).0, 0);
    let narrow = write(
        "policy.yaml",
        "kind: SchedulingPolicy\nheadroom: {default: 20%}\n".into(),
    );
    let (code, text, _) = asked(&["llm", "--policy", &narrow]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("request 64Gi of stowage.dev/vram instead of 70Gi"),
        "{text}"
    );
    let (code, _, text) = asked(&["odd"]);
    assert!(
        code == 2 && text.contains("cannot be understood") && text.contains("\"many\""),
        "{text}"
    );
    let (code, _, text) = asked(&["plain"]);
    assert!(
        code == 2 && text.contains("asks for stowage.dev/vram"),
        "{text}"
    );
    let (code, _, text) = asked(&["nobody"]);
    assert!(
        code == 2 && text.contains("no pod default/nobody"),
        "{text}"
    );
    let broken = write(
        "broken.yaml",
        "kind: SchedulingPolicy\nheadrom: {}\n".into(),
    );
    assert_eq!(asked(&["llm", "--policy", &broken]).0, 2);
}

#[test]
fn of_a_cordoned_node_it_says_what_the_page_about_draining_quotes() {
    let node = json!({
        "kind": "Node",
        "metadata": {"name": "node-a", "labels": {
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920",
        }},
        "spec": {"unschedulable": true},
        "status": {"allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110"}},
    });
    let dump = json!({ "kind": "List", "apiVersion": "v1", "items": [node, pod("llm", "40Gi")] });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cluster.json");
    std::fs::write(&file, dump.to_string()).unwrap();
    let output = command(&["llm", "--cluster", file.to_str().unwrap()]);
    let told = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(output.status.code(), Some(1), "{told}{}", stderr(&output));
    let page = include_str!("../../docs/use/run-day.md");
    let section = page.split("\n## Drain a node\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let quoted = "the node is cordoned";
    assert!(told.contains(quoted), "{told}");
    assert!(section.contains(&format!("`{quoted}`")), "{section}");
}

/// The demo, because its agents read latencies off engines' pages, and evictions happen there.
#[test]
fn it_says_of_the_demos_lender_borrower_and_slowed_engine_what_they_have() {
    let page = include_str!("../../docs/use/lending.md");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut blocks = page
        .split("```text\n")
        .map(|block| block.split("```").next().unwrap());
    let shown = blocks.find(|block| block.starts_with("lending ")).unwrap();
    let shown: Vec<String> = shown.split("\n\n").map(words).collect();
    let demo = RunningDemo::start();
    let explained = ["summarizer", "archive-1"].map(|pod| {
        let output = command(&[pod, "--server", &demo.operators]);
        assert!(output.status.success(), "{}", stderr(&output));
        words(&String::from_utf8(output.stdout).unwrap())
    });
    for (said, part) in explained.iter().zip(&shown) {
        assert!(said.contains(part), "{part}\nis not in\n{said}");
    }
    assert_eq!(shown.len(), 2);
    let slowed = command(&["chat", "--server", &demo.operators]);
    let slowed = words(&String::from_utf8(slowed.stdout).unwrap());
    for part in [
        "interactive, 20.0 GiB, priority 2000, 12.0 ms of 15.0 ms a token (12.0 ms expected), has requests 100 % of the time)",
        "serving, 24.0 GiB, priority 1000, 14.0 ms a token (13.7 ms expected), has requests 100 % of the time)",
    ] {
        assert!(slowed.contains(part), "{part}\nis not in\n{slowed}");
    }
}
