//! The commands that ask a running service, with nothing but a kubeconfig: they find the leader by its Lease and reach it through
//! the API server.

use crate::served::{Served, ServedCluster, endpoints, eventually, pod};
use crate::tls::{Ca, TlsFixture};
use futures::{SinkExt, StreamExt};
use http::HeaderValue;
use http::header::SEC_WEBSOCKET_PROTOCOL;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use stowage_server::extender::server;
use stowage_server::extender::tls::{ServerFiles, load_server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

/// What the API server says to a port-forward.
#[derive(Clone)]
enum ForwardAnswer {
    Forwards(SocketAddr),
    Refuses(u16, &'static str),
    /// The pod's network has nothing at the port.
    ClosedPort,
}

/// What the API server says.
#[derive(Clone)]
struct Answers {
    lease: (u16, Value),
    ca: String,
    forward: ForwardAnswer,
    /// The end of the pod to which it forwards.
    end: CancellationToken,
}

/// A service with TLS behind an API server that knows a Lease, a ConfigMap and a port-forward.
struct World {
    _served: Served,
    files: TlsFixture,
    answers: Arc<Mutex<Answers>>,
    api_server: SocketAddr,
    /// The paths that were asked for.
    asked: Arc<Mutex<Vec<String>>>,
}

fn lease(holder: &str) -> (u16, Value) {
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "stowage-scheduler" },
        "spec": { "holderIdentity": holder },
    });
    (200, lease)
}

fn failure(code: u16, message: &str) -> Value {
    let reason = if code == 403 { "Forbidden" } else { "NotFound" };
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code })
}

impl World {
    fn start() -> Self {
        let served = ServedCluster::with_gpus(&[("node-a", 1)])
            .with([pod("llm", "40Gi")])
            .serve();
        let (ca, files) = (Ca::new("stowage-agents-ca"), TlsFixture::new());
        let identity = ca.issue_for("stowage-agents.kube-system.svc");
        let (cert, key) = (
            files.write("tls.crt", &identity.cert),
            files.write("tls.key", &identity.key),
        );
        let (mut endpoints, [.., operators]) = endpoints();
        endpoints.operators.tls = Some(load_server(&ServerFiles { cert, key }).unwrap());
        served.spawn(server::serve(
            served.extender.clone(),
            endpoints,
            CancellationToken::new(),
        ));
        let answers = Arc::new(Mutex::new(Answers {
            lease: lease("stowage-5d9c_0123-4567"),
            ca: ca.pem.clone(),
            forward: ForwardAnswer::Forwards(operators),
            end: CancellationToken::new(),
        }));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let listener = served.run(TcpListener::bind("127.0.0.1:0")).unwrap();
        let api_server = listener.local_addr().unwrap();
        served.spawn(answer_all(listener, answers.clone(), asked.clone()));
        Self {
            _served: served,
            files,
            answers,
            api_server,
            asked,
        }
    }

    /// A kubeconfig whose current context leads nowhere, and whose context `llm` leads to the API server.
    fn kubeconfig(&self) -> String {
        let cluster =
            |name: &str, server: &str| json!({ "name": name, "cluster": { "server": server } });
        let context =
            |name: &str| json!({ "name": name, "context": { "cluster": name, "user": "me" } });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "nowhere",
            "clusters": [cluster("nowhere", "http://127.0.0.1:1"), cluster("llm", &format!("http://{}", self.api_server))],
            "contexts": [context("nowhere"), context("llm")],
            "users": [{ "name": "me", "user": { "token": "mine" } }],
        });
        let path = self.files.write("kubeconfig", &config.to_string());
        path.to_str().unwrap().to_owned()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        command
            .args(arguments)
            .env("KUBECONFIG", self.kubeconfig())
            .env_remove("STOWAGE_SERVER");
        command
    }

    /// Exit code and all that is said.
    fn says(&self, arguments: &[&str]) -> (i32, String) {
        said(&mut self.command(arguments))
    }

    fn refuses(&self, change: impl FnOnce(&mut Answers), parts: &[&str]) {
        let before = self.answers.lock().unwrap().clone();
        change(&mut self.answers.lock().unwrap());
        let (code, text) = self.says(&["explain", "llm", "--context", "llm"]);
        *self.answers.lock().unwrap() = before;
        for part in parts {
            assert!(code == 2 && text.contains(part), "{part:?}: {code} {text}");
        }
    }
}

fn said(command: &mut Command) -> (i32, String) {
    let ran = command.output().unwrap();
    let text = String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap();
    (ran.status.code().unwrap(), text)
}

async fn answer_all(
    listener: TcpListener,
    answers: Arc<Mutex<Answers>>,
    asked: Arc<Mutex<Vec<String>>>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        let answers = answers.lock().unwrap().clone();
        tokio::spawn(answer(stream, answers, asked.clone()));
    }
}

async fn answer(mut stream: TcpStream, answers: Answers, asked: Arc<Mutex<Vec<String>>>) {
    let mut head = [0; 4096];
    let end = loop {
        let read = stream.peek(&mut head).await.unwrap();
        let end = head[..read].windows(4).position(|part| part == b"\r\n\r\n");
        match end {
            Some(end) => break end + 4,
            None if read == 0 => return,
            None => tokio::task::yield_now().await,
        }
    };
    let line = String::from_utf8_lossy(&head[..end]).into_owned();
    let path = line.split(' ').nth(1).unwrap().to_owned();
    asked.lock().unwrap().push(path.clone());
    let (code, body) = if path.contains("/portforward") {
        match answers.forward {
            ForwardAnswer::Refuses(code, message) => (code, failure(code, message)),
            open => return forward(stream, open, answers.end).await,
        }
    } else if path.contains("/leases/") {
        answers.lease
    } else {
        let map = json!({ "metadata": { "name": "stowage-agents-ca" }, "data": { "ca.crt": answers.ca } });
        (200, map)
    };
    stream.read_exact(&mut head[..end]).await.unwrap();
    let body = body.to_string();
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {code} Said\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    let _ = stream.write_all(answer.as_bytes()).await;
}

const PORT: u16 = 9445;

/// As the kubelet does it: two channels for the port, of which each begins with its number.
#[expect(clippy::result_large_err, reason = "the type is the library's")]
async fn forward(stream: TcpStream, answer: ForwardAnswer, end: CancellationToken) {
    let socket = accept_hdr_async(stream, |_: &_, mut response: http::Response<()>| {
        let protocol = HeaderValue::from_static("v4.channel.k8s.io");
        response
            .headers_mut()
            .insert(SEC_WEBSOCKET_PROTOCOL, protocol);
        Ok(response)
    });
    let (mut to_client, mut from_client) = socket.await.unwrap().split();
    let [low, high] = PORT.to_le_bytes();
    for channel in [0, 1] {
        let begun = Message::binary(vec![channel, low, high]);
        to_client.send(begun).await.unwrap();
    }
    let ForwardAnswer::Forwards(address) = answer else {
        let text = b"\x01failed to connect to localhost:9445: connection refused";
        let _ = to_client.send(Message::binary(text.to_vec())).await;
        let _ = to_client.send(Message::Close(None)).await;
        return;
    };
    let (mut from_pod, mut to_pod) = TcpStream::connect(address).await.unwrap().into_split();
    let upwards = async {
        while let Some(Ok(Message::Binary(data))) = from_client.next().await {
            if data[0] == 0 && to_pod.write_all(&data[1..]).await.is_err() {
                return;
            }
        }
    };
    let downwards = async {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(read @ 1..) = from_pod.read(&mut buffer).await {
            let data = [&[0], &buffer[..read]].concat();
            if to_client.send(Message::binary(data)).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        _ = async { tokio::join!(upwards, downwards) } => {}
        () = end.cancelled() => {}
    }
}

#[test]
fn without_a_server_the_leader_is_asked_through_the_api_server() {
    let world = World::start();
    let (code, text) = world.says(&["explain", "llm", "--context", "llm"]);
    assert!(
        code == 0 && text.starts_with("default/llm fits"),
        "{code} {text}"
    );
    let asked = world.asked.lock().unwrap().join("\n");
    for path in [
        "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/stowage-scheduler",
        "/api/v1/namespaces/kube-system/pods/stowage-5d9c/portforward?&ports=9445",
    ] {
        assert!(asked.contains(path), "{path} in {asked}");
    }
    let (code, text) = world.says(&["top", "--once", "--context", "llm"]);
    assert!(code == 0 && text.contains("node-a"), "{code} {text}");
    let (code, text) = world.says(&["models", "--context", "llm"]);
    assert!(code == 1 && !text.contains("error"), "{code} {text}");
}

#[test]
fn a_page_in_a_browser_outlives_a_change_of_leader() {
    let world = World::start();
    let mut ui = world.command(&["ui", "--context", "llm"]);
    let mut ui = ui.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let out = BufReader::new(ui.stdout.take().unwrap()).read_line(&mut line);
    assert!(out.is_ok() && line.starts_with("Open http://"), "{line}");
    let mut answers = world.answers.lock().unwrap();
    answers.lease = lease("stowage-77aa_0123");
    std::mem::take(&mut answers.end).cancel();
    drop(answers);
    let url = line.trim().strip_prefix("Open http://").unwrap();
    let (host, path) = url.split_once('/').unwrap();
    let request =
        format!("GET /{path}v1/fleet HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let mut answer = String::new();
    eventually("the next leader answers", || {
        let mut stream = std::net::TcpStream::connect(host).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        answer.clear();
        stream.read_to_string(&mut answer).unwrap();
        answer.contains("200 OK")
    });
    let _ = ui.kill();
    let _ = ui.wait();
    assert!(answer.contains("node-a"), "{answer}");
    let asked = world.asked.lock().unwrap().join("\n");
    assert!(asked.contains("stowage-77aa/portforward"), "{asked}");
}

#[test]
fn each_way_in_which_a_forward_fails_is_told() {
    let world = World::start();
    let forbidden = "leases is forbidden: User \"jane\" cannot get resource";
    world.refuses(
        |answers| answers.lease = (404, failure(404, "leases \"stowage-scheduler\" not found")),
        &[
            "Lease kube-system/stowage-scheduler",
            "--server",
            "--context",
        ],
    );
    world.refuses(
        |answers| answers.lease = (403, failure(403, forbidden)),
        &[forbidden, "--server"],
    );
    world.refuses(
        |answers| answers.lease = lease(""),
        &["nobody holds", "get pods"],
    );
    world.refuses(
        |answers| {
            answers.forward = ForwardAnswer::Refuses(
                403,
                "pods is forbidden: cannot create resource \"pods/portforward\"",
            )
        },
        &["kube-system/stowage-5d9c", "pods/portforward"],
    );
    world.refuses(
        |answers| answers.forward = ForwardAnswer::Refuses(404, "pods \"stowage-5d9c\" not found"),
        &["\"stowage-5d9c\" not found", "Lease"],
    );
    world.refuses(
        |answers| answers.forward = ForwardAnswer::ClosedPort,
        &[
            "kube-system/stowage-5d9c",
            "failed to connect to localhost:9445",
        ],
    );
    let (code, text) = world.says(&["explain", "llm"]);
    assert!(
        code == 2 && text.contains("Connection refused"),
        "{code} {text}"
    );
    let (code, text) = world.says(&["top", "--once", "--context", "other"]);
    assert!(code == 2 && text.contains("other"), "{code} {text}");
    let mut without = world.command(&["models"]);
    let (code, text) = said(
        without
            .env("KUBECONFIG", "/nonexistent")
            .env("HOME", "/nonexistent"),
    );
    assert!(
        code == 2 && text.contains("--kubeconfig") && text.contains("--server http://"),
        "{code} {text}"
    );
}

#[test]
fn the_environment_names_the_server_and_a_flag_or_a_file_goes_before_it() {
    let world = World::start();
    let there = format!("http://{}", world._served.operators);
    let environment = |value: &str, arguments: &[&str]| {
        said(world.command(arguments).env("STOWAGE_SERVER", value))
    };
    let (code, text) = environment(&there, &["explain", "llm"]);
    assert!(
        code == 0 && text.starts_with("default/llm fits"),
        "{code} {text}"
    );
    let (code, text) = environment(
        "http://127.0.0.1:1",
        &["explain", "llm", "--server", &there],
    );
    assert!(code == 0, "{code} {text}");
    let (code, text) = environment("nonsense", &["explain", "llm", "--cluster", "/nonexistent"]);
    assert!(
        code == 2 && text.contains("/nonexistent") && !text.contains("cannot be used"),
        "{text}"
    );
    let (code, text) = environment("nonsense", &["explain", "llm"]);
    assert!(
        code == 2 && text.contains("STOWAGE_SERVER"),
        "{code} {text}"
    );
}
