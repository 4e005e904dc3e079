//! The first use of the command: a single report on a bare machine, and wrong flags.

use super::world::{AgentNode, busy, engine_at, gpu, stowage_agent, text};
use crate::client::NOBODYS;
use crate::served::eventually;
use axum::Json;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::process::Output;
use tokio::net::TcpListener;

/// A sentence or two on one line of a wide terminal, not an essay.
const LONGEST_LINE: usize = 240;

fn runs(arguments: &[&str]) -> Output {
    stowage_agent().args(arguments).output().unwrap()
}

/// Exit code and what stands on stderr.
fn fails(arguments: &[&str]) -> (i32, String) {
    let output = runs(arguments);
    assert_eq!(text(&output.stdout), "", "errors go to stderr");
    (
        output.status.code().unwrap(),
        text(&output.stderr).to_owned(),
    )
}

#[test]
fn on_a_bare_machine_every_missing_source_is_reported_with_its_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (library, socket, proc) = (
        nowhere("libnvidia-ml.so.1"),
        nowhere("kubelet.sock"),
        nowhere("proc"),
    );
    let bare = [
        "--once",
        "--node",
        "bare",
        "--nvml-lib",
        &library,
        "--pod-resources",
        &socket,
        "--proc",
        &proc,
    ];
    let mut printed = String::new();
    eventually("it has asked for the driver", || {
        let output = runs(&bare);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), ""));
        printed = text(&output.stdout).to_owned();
        !printed.contains("the driver does not answer")
    });
    assert!(printed.starts_with("Node bare\n"), "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    let says = |start: &str, parts: &[&str]| {
        let is_it =
            |line: &&&str| line.starts_with(start) && parts.iter().all(|part| line.contains(part));
        assert_eq!(
            lines.iter().filter(is_it).count(),
            1,
            "{start} {parts:?} once in\n{printed}"
        );
    };
    says("Missing: GPUs: no NVIDIA driver", &[&library, "--nvml-lib"]);
    says(
        "Missing: pods of this node: there is no kubeconfig",
        &["--kubeconfig"],
    );
    says(
        "Missing: the pods of processes: there is no socket of a kubelet",
        &[&socket, "--pod-resources"],
    );
    says(
        "Missing: the pods of processes: there is no ",
        &[&proc, "--proc"],
    );
    let longest = lines.iter().map(|line| line.len()).max().unwrap();
    assert!(
        longest < LONGEST_LINE + folder.path().as_os_str().len(),
        "{printed}"
    );
    let report: Value =
        serde_json::from_slice(&runs(&[&bare[..], &["--json"]].concat()).stdout).unwrap();
    let parts: Vec<&str> = report["missing"]
        .as_array()
        .unwrap()
        .iter()
        .map(|missing| missing["part"].as_str().unwrap())
        .collect();
    assert_eq!(
        (&report["gpus"], &parts[..]),
        (&Value::Null, &["pods", "gpus", "owners", "owners"][..])
    );
}

#[test]
fn a_missing_library_does_not_keep_the_agent_from_the_other_sources() {
    let world = AgentNode::with_gpus([gpu("a")]);
    std::fs::remove_file(world.library()).unwrap();
    world.pod("llama", |pod| engine_at(pod, NOBODYS));
    let report = world.report_until(&[], |report| report["engines"][0].is_object());
    assert_eq!(
        (&report["gpus"], report["missing"][0]["part"].as_str()),
        (&Value::Null, Some("gpus"))
    );
}

#[test]
fn a_broken_kubeconfig_of_the_environment_is_reported_in_one_line() {
    let world = AgentNode::with_gpus([gpu("a")]);
    for broken in ["[", "kind: Config"] {
        std::fs::write(world.kubeconfig(), broken).unwrap();
        let mut look = stowage_agent();
        let look = look.args(["--once", "--nvml-lib"]).arg(world.library());
        let output = look.env("KUBECONFIG", world.kubeconfig()).output().unwrap();
        assert!(output.status.success());
        let printed = text(&output.stdout);
        let is_it = |line: &str| line.contains("KUBECONFIG") && line.ends_with("--kubeconfig FILE");
        assert_eq!(
            printed.lines().filter(|line| is_it(line)).count(),
            1,
            "{printed}"
        );
    }
}

#[test]
fn a_refusing_or_unreachable_api_server_is_reported_with_its_root_cause() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let reason = |report: &Value| {
        report["missing"][0]["reason"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let no = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden",
        "message": "pods is forbidden: the agent may not list them",
    });
    let router = axum::Router::new().fallback(|| async { (StatusCode::FORBIDDEN, Json(no)) });
    let listener = world
        .runtime
        .block_on(TcpListener::bind("127.0.0.1:0"))
        .unwrap();
    let address = listener.local_addr().unwrap();
    let refusing = world
        .runtime
        .spawn(async { axum::serve(listener, router).await.unwrap() });
    world.set_api_server(&format!("http://{address}"));
    world.report_until(&[], |report| {
        reason(report).contains("the agent may not list them")
    });
    refusing.abort();
    assert!(world.runtime.block_on(refusing).unwrap_err().is_cancelled());
    world.report_until(&[], |report| {
        let parts = [0, 1].map(|place: usize| &report["missing"][place]["part"]);
        reason(report).contains("refused") && parts == ["pods", "models"]
    });
}

#[test]
fn wrong_flags_are_refused_with_the_error_and_its_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    let cases: [(i32, &[&str], &[&str]); 14] = [
        (
            1,
            &[],
            &["no extender to report to", "--extender https://HOST:PORT"],
        ),
        (
            2,
            &["--extender", "stowage:9446"],
            &["neither https:// nor http://", "such as https://"],
        ),
        (
            2,
            &["--extender", "https://stowage/v1"],
            &["more than a host and a port"],
        ),
        (
            1,
            &["--extender", "https://stowage"],
            &["https://stowage:9446", "give --ca FILE"],
        ),
        (
            1,
            &["--extender", "http://10.0.0.1", "--token-file", nowhere],
            &["in the clear", "https://"],
        ),
        (
            1,
            &["--once", "--node", "Node_A"],
            &["--node", "\"Node_A\"", "kubectl get nodes"],
        ),
        (1, &["--once", "--node", "a b"], &["--node", "\"a b\""]),
        (
            1,
            &["--once", "--kubeconfig", nowhere],
            &["--kubeconfig", nowhere, "No such file"],
        ),
        (2, &["--interval", "5"], &["--interval", "`5s`"]),
        (
            2,
            &["--interval", "16s"],
            &["--interval", "from 100ms to 15s"],
        ),
        (2, &["--gpu-memory", "much"], &["--gpu-memory", "much"]),
        (2, &["--json"], &["--once"]),
        (2, &["--once", "--json", "--print"], &["--json", "--print"]),
        (2, &["--extenders", "x"], &["--extender"]),
    ];
    for (code, arguments, parts) in cases {
        let (ended, error) = fails(arguments);
        assert_eq!(ended, code, "{arguments:?}: {error}");
        assert!(error.starts_with("error: "), "{error}");
        parts.iter().for_each(|part| {
            assert!(
                error.contains(part),
                "{arguments:?}: {error} does not say {part}"
            )
        });
        let longest = error.lines().map(str::len).max().unwrap();
        assert!(longest < LONGEST_LINE, "{error}");
    }
}

#[test]
fn a_single_report_without_the_ca_fails_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("ca.crt");
    let nowhere = nowhere.to_str().unwrap();
    let output = runs(&["--once", "--extender", "https://stowage", "--ca", nowhere]);
    let (code, error) = (output.status.code(), text(&output.stderr));
    assert!(
        code == Some(1) && error.contains(nowhere),
        "{code:?}: {error}"
    );
    assert!(
        error.contains("error: no extender accepted the report"),
        "{error}"
    );
}

#[test]
fn a_single_report_that_no_server_accepts_fails_with_the_reason() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let dead = format!("http://127.0.0.1:{NOBODYS}");
    let mut error = String::new();
    eventually(
        "what it saw is printed all the same, and nobody listens there",
        || {
            let output = world
                .agent(&["--once", "--extender", &dead])
                .output()
                .unwrap();
            assert_eq!(output.status.code(), Some(1));
            error = text(&output.stderr).to_owned();
            text(&output.stdout).contains("GPU-a") && error.contains("refused")
        },
    );
    let lines: Vec<&str> = error.lines().collect();
    let [why, end] = &lines[..] else {
        panic!("{error}")
    };
    assert!(why.contains(&dead), "{error}");
    assert_eq!(*end, "error: no extender accepted the report");
}

#[test]
fn help_names_every_source_the_agent_has() {
    let output = runs(&["--help"]);
    let help = text(&output.stdout);
    for flag in [
        "--node",
        "--extender",
        "--ca",
        "--token-file",
        "--interval",
        "--nvml-lib",
        "--gpu-memory",
        "--pod-resources",
        "--proc",
        "--cgroup-root",
        "--hf-cache",
        "--kserve-models",
        "--kubeconfig",
        "--once",
        "--print",
        "--json",
    ] {
        assert!(help.contains(flag), "{flag} is not in\n{help}");
    }
    assert!(
        help.lines().all(|line| line.chars().count() <= 100),
        "{help}"
    );
}

#[test]
fn the_tables_name_pods_and_unowned_memory() {
    let world = AgentNode::with_gpus([busy("a", &[(10, 10), (11, 2)])]);
    let llama = world.pod("llama", |_| {});
    world.add_process_of_pod(10, &llama);
    world.add_process(11, "0::/system.slice/x.service\n");
    let tables = || {
        let output = world.agent(&["--once", "--print"]).output().unwrap();
        assert!(output.status.success());
        text(&output.stdout).to_owned()
    };
    let mut printed = String::new();
    eventually("the pods are listed, and nothing is late", || {
        printed = tables();
        printed.contains("default/llama 10.0 GiB") && !printed.contains("Missing")
    });
    assert!(printed.contains("no pod 2.0 GiB"), "{printed}");
}
