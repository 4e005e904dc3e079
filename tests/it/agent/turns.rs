//! Pods that ask the agent for their turn to start, as their init containers do.

use super::world::{AgentNode, RunningAgent, agents_url, bound_to, gpu};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// An init container of a pod: it runs in the pod's cgroup from its first moment on.
fn request_turn(world: &AgentNode, pod: &Value, socket: &Path) -> Child {
    let mut container = Command::new("sh")
        .args([
            "-c",
            "read go && exec \"$0\" wait-turn --agent-limit 10m --socket \"$1\"",
        ])
        .arg(env!("CARGO_BIN_EXE_stowage"))
        .arg(socket)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    world.add_process_of_pod(container.id(), pod);
    container.stdin.take().unwrap().write_all(b"go\n").unwrap();
    container
}

/// What it says when it has ended.
fn output_of(mut container: Child) -> String {
    let mut text = String::new();
    container
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(container.wait().unwrap().code(), Some(0), "{text}");
    text
}

#[test]
fn two_pods_on_one_gpu_start_one_after_the_other() {
    let world = AgentNode::with_gpus([gpu("a"), gpu("b")]);
    let pod = |name, gpu| world.pod(name, |pod| bound_to(pod, gpu, 1 << 30));
    let [one, two, other] = [
        pod("one", "GPU-a"),
        pod("two", "GPU-a"),
        pod("other", "GPU-b"),
    ];
    let socket = world.folder().join("turns.sock");
    let extender = world.extender();
    let mut command = world.agent(&[
        "--interval",
        "100ms",
        "--extender",
        &agents_url(&extender),
        "--turns",
    ]);
    let agent = RunningAgent::start(command.arg(&socket));
    assert!(output_of(request_turn(&world, &one, &socket)).contains("this pod's turn"));
    let mut waiting = request_turn(&world, &two, &socket);
    agent.line_with("asks for its turn");
    agent.line_with("asks for its turn");
    assert!(
        output_of(request_turn(&world, &other, &socket)).contains("this pod's turn"),
        "on another GPU"
    );
    assert!(
        waiting.try_wait().unwrap().is_none(),
        "it asked before that one"
    );
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
    world.api.patch_status("pods/default/one", &ready).unwrap();
    assert!(output_of(waiting).contains("this pod's turn"));
}

#[test]
fn a_dead_agent_delays_no_pod() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let pod = |name| world.pod(name, |pod| bound_to(pod, "GPU-a", 1 << 30));
    let [one, two] = [pod("one"), pod("two")];
    let socket = world.folder().join("turns.sock");
    let extender = world.extender();
    let mut command = world.agent(&[
        "--interval",
        "100ms",
        "--extender",
        &agents_url(&extender),
        "--turns",
    ]);
    let agent = RunningAgent::start(command.arg(&socket));
    output_of(request_turn(&world, &one, &socket));
    let waiting = request_turn(&world, &two, &socket);
    agent.line_with("asks for its turn");
    agent.line_with("asks for its turn");
    agent.signal("KILL");
    output_of(waiting);
}

#[test]
fn a_pod_starts_without_an_agent_or_after_the_wait_limit() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("turns.sock");
    let waits = |limits: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        let output = command
            .args(["wait-turn", "--socket"])
            .arg(&socket)
            .args(limits)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(waits(&["--agent-limit", "100ms"]).contains("no agent answers"));
    let listener = UnixListener::bind(&socket).unwrap();
    assert!(
        waits(&["--limit", "100ms"]).contains("the limit has passed"),
        "it never answers"
    );
    drop(listener);
    assert!(
        waits(&["--agent-limit", "100ms"]).contains("no agent answers"),
        "the socket is left behind"
    );
}
