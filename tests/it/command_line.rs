//! The command line forgives: what an SRE types who knows kubectl is understood, and a mistake says what to write.

use crate::process::json_dump;
use crate::served::{ServedCluster, pod};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

struct Said {
    code: i32,
    out: String,
    err: String,
}

fn stowage(arguments: &[&str]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let ran = command.args(arguments).env("KUBECONFIG", "/nonexistent").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said { code: ran.status.code().unwrap(), out: text(ran.stdout), err: text(ran.stderr) }
}

#[test]
fn explain_takes_pods_as_kubectl_does_and_prints_what_is_asked_for() {
    let served = ServedCluster::of(&[("node-a", 1)]).with([pod("llm", "40Gi")]).serve();
    let server = format!("http://{}", served.operators);
    for named in [&["llm"][..], &["pod/llm"], &["default/llm"], &["-n", "default", "llm"]] {
        let said = stowage(&[&["explain", "--server", &server], named].concat());
        assert!(
            said.code == 0 && said.out.starts_with("default/llm fits"),
            "{named:?}: {}{}",
            said.out,
            said.err
        );
    }
    let json = stowage(&["explain", "llm", "--server", &server, "-o", "json"]).out;
    let yaml = stowage(&["explain", "llm", "--server", &server, "-o", "yaml"]).out;
    let json: Value = serde_json::from_str(&json).unwrap();
    let yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(json["verdict"], yaml["verdict"]);
    let said = stowage(&["explain", "team-b/llm", "-n", "team-a"]);
    assert!(said.code != 0 && said.err.contains("name one namespace"), "{}", said.err);
}

#[test]
fn the_wrong_address_says_which_one_it_is() {
    let served = ServedCluster::of(&[("node-a", 1)]).serve();
    let said = stowage(&["explain", "llm", "--server", &format!("http://{}", served.scheduler)]);
    assert!(said.err.contains("the scheduler's address") && said.err.contains("--admin"), "{}", said.err);
    let mut client = crate::client::Client::connect(served.operators);
    let lost = client.get("/v1/explian");
    assert!(lost.status == 404 && lost.text().contains("/v1/explain"), "{}", lost.text());
    let lacking = client.get("/v1/explain");
    let text = lacking.text();
    assert!(
        lacking.status == 400 && text.contains("pod=NAMESPACE/NAME") && text.contains("missing field"),
        "{text}"
    );
}

#[test]
fn a_malformed_report_is_refused_with_the_place_in_the_document() {
    let served = ServedCluster::of(&[("node-a", 1)]).serve();
    let report =
        r#"{"node": "node-a", "ageMillis": 0, "gpus": [], "processes": [], "engines": [{"pod": "u"}]}"#;
    let answer = crate::client::Client::connect(served.agents).post("/v1/reports", report);
    assert!(answer.status == 422 && answer.text().contains("engines[0]: "), "{}", answer.text());
}

#[test]
fn a_file_that_is_missing_is_named_with_its_option() {
    let said = stowage(&["serve", "--kubeconfig", "nope"]);
    assert!(said.err.contains("--kubeconfig nope: "), "{}", said.err);
}

#[test]
fn names_are_addresses_too_and_the_log_can_be_json_without_colour() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["serve", "--listen", "localhost:0", "--agents", "localhost:0", "--admin", "localhost:0"])
        .args(["--log-format", "json", "--cluster"])
        .arg(json_dump(&folder))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let _ = child.kill();
    let _ = child.wait();
    let event: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert!(
        event["timestamp"].is_string() && event["level"].is_string() && event["message"].is_string(),
        "{line}"
    );
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let script = stowage(&["completion", "bash"]);
    assert!(script.code == 0 && script.out.contains("uninstall") && script.out.contains("explain"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("man");
    assert_eq!(stowage(&["man", path.to_str().unwrap()]).code, 0);
    for page in ["stowage.1", "stowage-serve.1", "stowage-policy-check.1"] {
        let text = std::fs::read_to_string(path.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
    let taken = folder.path().join("file");
    std::fs::write(&taken, "").unwrap();
    let said = stowage(&["man", taken.to_str().unwrap()]);
    assert!(said.code != 0 && said.err.contains("DIR"), "{}", said.err);
}
