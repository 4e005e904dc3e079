//! The command line forgives: what an SRE types who knows kubectl is understood, and a mistake says what to write.

use crate::process::json_dump;
use crate::served::{self, ServedCluster, pod};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use stowage_server::service::Tenure;

struct StowageOutput {
    code: i32,
    out: String,
    err: String,
}

fn stowage(arguments: &[&str]) -> StowageOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let ran = command
        .args(arguments)
        .env("KUBECONFIG", "/nonexistent")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    StowageOutput {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

#[test]
fn explain_takes_pods_as_kubectl_does_and_prints_what_is_asked_for() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([pod("llm", "40Gi")])
        .serve();
    let server = format!("http://{}", served.operators);
    for named in [
        &["llm"][..],
        &["pod/llm"],
        &["default/llm"],
        &["-n", "default", "llm"],
    ] {
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
    assert!(
        said.code != 0 && said.err.contains("name one namespace"),
        "{}",
        said.err
    );
}

#[test]
fn a_request_to_the_wrong_address_names_that_address() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    let said = stowage(&[
        "explain",
        "llm",
        "--server",
        &format!("http://{}", served.scheduler),
    ]);
    assert!(
        said.err.contains("the scheduler's address") && said.err.contains("--admin"),
        "{}",
        said.err
    );
    let mut client = crate::client::Client::connect(served.operators);
    let lost = client.get("/v1/explian");
    assert!(
        lost.status == 404 && lost.text().contains("/v1/explain"),
        "{}",
        lost.text()
    );
    let lacking = client.get("/v1/explain");
    let text = lacking.text();
    assert!(
        lacking.status == 400
            && text.contains("pod=NAMESPACE/NAME")
            && text.contains("missing field"),
        "{text}"
    );
}

#[test]
fn a_standby_names_the_leader() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([pod("llm", "40Gi")])
        .serve();
    let server = format!("http://{}", served.operators);
    let asked = || stowage(&["explain", "llm", "--server", &server]);
    let before = asked();
    assert!(
        before.out.contains("kube-scheduler has not asked"),
        "{}",
        before.out
    );
    served.service.set_tenure(Tenure::Standby);
    let nowhere = asked();
    assert!(
        nowhere.out.contains("on standby") && nowhere.out.contains("no replica"),
        "{}",
        nowhere.out
    );
    served
        .service
        .leadership
        .set_holder(Some("stowage-5d9c_0123-4567"));
    let said = asked();
    let text = said.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        text.contains("ask the leader, stowage-5d9c: without --server"),
        "{text}"
    );
    assert!(
        !text.contains("has not asked"),
        "what the leader knows is not denied: {text}"
    );
    let json = stowage(&["explain", "llm", "--server", &server, "-o", "json"]).out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&json["standby"]["leader"], &json["remedies"]),
        (&json!("stowage-5d9c"), &json!([]))
    );
}

/// What the command says when it reads this from standard input.
fn stowage_reading(input: &[u8], arguments: &[&str]) -> StowageOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let pipes = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = pipes
        .args(arguments)
        .env("KUBECONFIG", "/nonexistent")
        .spawn()
        .unwrap();
    // A command that reads nothing closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input);
    let ran = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    StowageOutput {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

#[test]
fn a_cluster_comes_from_standard_input_and_pods_that_it_cannot_use_are_named() {
    let bad = {
        let mut bad = pod("bad", "1.5");
        bad["metadata"]["namespace"] = json!("team-x");
        bad
    };
    let node = {
        let mut node = served::node("node-a");
        node["metadata"]["labels"] = served::gpu_labels(1);
        node
    };
    let dump = json!({ "items": [node, pod("llm", "40Gi"), bad] }).to_string();
    let said = stowage_reading(dump.as_bytes(), &["explain", "llm", "--cluster", "-"]);
    assert!(
        said.code == 0 && said.out.starts_with("default/llm fits"),
        "{}{}",
        said.out,
        said.err
    );
    assert!(
        said.err
            .contains("1 pod of the dump cannot be understood and is left out"),
        "{}",
        said.err
    );
    assert!(said.err.contains("team-x/bad: "), "{}", said.err);
    let policy = "apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\n";
    let folder = tempfile::tempdir().unwrap();
    let (file, cluster) = (
        folder.path().join("policy.yaml"),
        folder.path().join("cluster.json"),
    );
    std::fs::write(&file, policy).unwrap();
    std::fs::write(&cluster, &dump).unwrap();
    let [file, cluster] = [&file, &cluster].map(|path| path.to_str().unwrap());
    let diff = stowage_reading(
        dump.as_bytes(),
        &["policy", "diff", file, file, "--cluster", "-"],
    );
    assert!(
        diff.code == 0 && diff.err.contains("team-x/bad: "),
        "{}{}",
        diff.out,
        diff.err
    );
    assert!(
        diff.out.contains("0 of 1 pod change, and 0 nodes"),
        "{}",
        diff.out
    );
    let on = &["explain", "llm", "--cluster", cluster, "--policy", "-"];
    assert_eq!(stowage_reading(policy.as_bytes(), on).code, 0);
    let twice = stowage(&["explain", "llm", "--cluster", "-", "--policy", "-"]);
    assert!(
        twice.code == 2 && twice.err.contains("--cluster and --policy are both -"),
        "{}",
        twice.err
    );
    let twice = stowage(&["policy", "check", "-", "-"]);
    assert!(
        twice.code == 2 && twice.err.contains("PATH and PATH are both -"),
        "{}",
        twice.err
    );
}

#[test]
fn a_flag_that_would_have_no_effect_is_refused() {
    let (at, policy) = (
        ["--at", "2026-07-01T12:00:00Z"],
        ["--policy", "policies/night-pool"],
    );
    for (what, flag) in [
        (["--server", "http://127.0.0.1:1"], at),
        (["--server", "http://127.0.0.1:1"], policy),
        (["--bundle", "recording"], policy),
    ] {
        let said = stowage(&[&["explain", "llm"][..], &what, &flag].concat());
        let is_named = said.err.contains("cannot be used with") && said.err.contains(flag[0]);
        assert!(
            said.code == 2 && is_named,
            "{what:?} {flag:?}: {}",
            said.err
        );
    }
    let said = stowage(&[&["explain", "llm"][..], &at].concat());
    assert!(
        said.code == 2 && said.err.contains("--bundle"),
        "{}",
        said.err
    );
}

#[test]
fn policy_windows_are_evaluated_at_the_requested_time() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = folder.path().join("cluster.json");
    let mut job = pod("job", "40Gi");
    (job["metadata"]["namespace"], job["spec"]["priority"]) = (json!("jobs"), json!(-10));
    let node = {
        let mut node = served::node("node-a");
        node["metadata"]["labels"] = served::gpu_labels(1);
        node
    };
    std::fs::write(&cluster, json!({ "items": [node, job] }).to_string()).unwrap();
    let cluster = cluster.to_str().unwrap();
    let class = |at: &str| {
        let on = [
            "--cluster",
            cluster,
            "--policy",
            "policies/night-pool",
            "-o",
            "json",
        ];
        let said = stowage(&[&["explain", "jobs/job", "--at", at][..], &on].concat());
        let explained: Value =
            serde_json::from_str(&said.out).unwrap_or_else(|_| panic!("{}", said.err));
        explained["class"]["name"].clone()
    };
    assert_eq!(
        [
            class("2026-11-23T12:00:00+01:00"),
            class("2026-11-23T20:00:00+01:00")
        ],
        ["job", "night-job"]
    );
}

#[test]
fn an_unanswered_question_and_a_negative_answer_have_different_exit_codes() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([pod("large", "100Gi")])
        .serve();
    let server = format!("http://{}", served.operators);
    assert_eq!(stowage(&["explain", "large", "--server", &server]).code, 1);
    assert_eq!(stowage(&["models", "nowhere", "--server", &server]).code, 1);
    let (closed, missing) = ("http://127.0.0.1:1", "/nonexistent");
    for no_answer in [
        &["explain", "absent", "--server", &server][..],
        &["explain", "large", "--server", closed],
        &[
            "explain",
            "large",
            "--server",
            "https://127.0.0.1:1",
            "--kubeconfig",
            missing,
        ],
        &["explain", "large", "--cluster", missing],
        &["explain", "a/b/c"],
        &["explain", "large", "--node", "not a name"],
        &["models", "--server", closed],
        &[
            "models",
            "--server",
            "https://127.0.0.1:1",
            "--kubeconfig",
            missing,
        ],
        &["policy", "check", missing],
        &["policy", "show", missing],
        &["policy", "test", missing],
        &[
            "policy",
            "diff",
            "policies/three-teams",
            "policies/three-teams",
            "--cluster",
            missing,
        ],
        &[
            "policy",
            "diff",
            "policies/three-teams",
            "policies/three-teams",
            "--cluster",
            "Cargo.toml",
        ],
        &["replay", missing],
        &["replay", missing, "--policy", "policies/three-teams"],
        &["explain", "large", "--sever", &server],
    ] {
        let said = stowage(no_answer);
        assert!(
            said.code == 2 && said.err.starts_with("error: "),
            "{no_answer:?}: {} {}",
            said.code,
            said.err
        );
    }
}

#[test]
fn every_command_that_checks_documents_its_exit_codes() {
    for command in [
        &[][..],
        &["serve"],
        &["agent"],
        &["assess"],
        &["estimate"],
        &["explain"],
        &["models"],
        &["preflight"],
        &["uninstall"],
        &["demo"],
        &["policy", "check"],
        &["policy", "test"],
        &["policy", "diff"],
        &["policy", "show"],
    ] {
        let said = stowage(&[command, &["--help"]].concat());
        assert!(
            said.code == 0 && said.out.contains("Exit codes: 0 "),
            "{command:?}: {}",
            said.out
        );
    }
}

#[test]
fn a_misspelled_argument_gets_a_suggestion() {
    for (slip, meant) in [
        (&["explian", "llm"][..], "'explain'"),
        (&["explain", "llm", "--sever", "x"], "'--server'"),
        (&["explain", "llm", "-o", "jsn"], "json"),
        (&["serve", "--polcy", "x"], "'--policy'"),
        (&["serve", "--log-format", "jsno"], "json"),
        (&["policy", "chek", "x"], "'check'"),
        (&["serve", "--listen", "9444"], "HOST:PORT"),
        (&["serve", "--write-deadline", "5"], "5s"),
        (&["serve", "--cdi-kind", "gpu"], "runtime.nvidia.com/gpu"),
        (
            &["serve", "--cdi-kind", "vendor/gpu=0"],
            "runtime.nvidia.com/gpu",
        ),
        (
            &["serve", "--record", "here", "--record-age", "5s"],
            "from 1m on, such as 1h",
        ),
        (
            &["serve", "--record", "here", "--record-size", "7"],
            "7 is not in 8..",
        ),
        (&["serve", "--record-age", "2h"], "--record <DIR>"),
        (&["completion", "bsh"], "bash"),
    ] {
        let said = stowage(slip);
        assert!(
            said.code == 2 && said.err.contains(meant),
            "{slip:?}: {}",
            said.err
        );
    }
    let version = stowage(&["version"]).out;
    assert!(
        version.starts_with("stowage ") && version == stowage(&["--version"]).out,
        "{version}"
    );
}

#[test]
fn a_malformed_report_is_refused_with_the_place_in_the_document() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    let report = r#"{"node": "node-a", "ageMillis": 0, "gpus": [], "processes": [], "engines": [{"pod": "u"}]}"#;
    let answer = crate::client::Client::connect(served.agents).post("/v1/reports", report);
    assert!(
        answer.status == 422 && answer.text().contains("engines[0]: "),
        "{}",
        answer.text()
    );
}

#[test]
fn a_file_that_is_missing_is_named_with_its_option() {
    let said = stowage(&["serve", "--kubeconfig", "nope"]);
    assert!(said.err.contains("--kubeconfig nope: "), "{}", said.err);
}

#[test]
fn names_are_addresses_too_and_the_log_can_be_json_without_color() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args([
            "serve",
            "--listen",
            "localhost:0",
            "--agents",
            "localhost:0",
            "--admin",
            "localhost:0",
        ])
        .args(["--log-format", "json", "--cluster"])
        .arg(json_dump(&folder))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let _ = child.kill();
    let _ = child.wait();
    let event: Value =
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert!(
        event["timestamp"].is_string()
            && event["level"].is_string()
            && event["message"].is_string(),
        "{line}"
    );
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let script = stowage(&["completion", "bash"]);
    assert!(
        script.code == 0 && script.out.contains("uninstall") && script.out.contains("estimate")
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("man");
    assert_eq!(stowage(&["man", path.to_str().unwrap()]).code, 0);
    for page in [
        "stowage.1",
        "stowage-estimate.1",
        "stowage-serve.1",
        "stowage-policy-check.1",
    ] {
        let text = std::fs::read_to_string(path.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}");
    }
    let taken = folder.path().join("file");
    std::fs::write(&taken, "").unwrap();
    let said = stowage(&["man", taken.to_str().unwrap()]);
    assert!(said.code != 0 && said.err.contains("DIR"), "{}", said.err);
}
