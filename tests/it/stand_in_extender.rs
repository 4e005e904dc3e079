//! A scripted extender for tests: any answer, well-formed or not, over a bare socket.
//!
//! It knows nothing of Stowage. By default it passes every node, scores all alike and binds as requested.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What goes back over the wire.
#[derive(Debug, Clone)]
pub struct ScriptedAnswer {
    pub status: u16,
    pub body: String,
    pub content_type: String,
    pub chunked: bool,
    pub delay: Duration,
    pub closes: bool,
}

impl ScriptedAnswer {
    pub fn ok(body: impl ToString) -> Self {
        Self {
            status: 200,
            body: body.to_string(),
            content_type: "application/json".into(),
            chunked: false,
            delay: Duration::ZERO,
            closes: false,
        }
    }
}

/// One request as it came.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    pub verb: String,
    pub headers: Vec<(String, String)>,
    pub body: Value,
}

type ExtenderScript = dyn Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync;

pub struct ScriptedExtender {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
    task: JoinHandle<()>,
}

impl ScriptedExtender {
    pub async fn start(
        script: impl Fn(&RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<RecordedRequest>>>::default();
        let (script, log): (Arc<ExtenderScript>, _) = (Arc::new(script), requests.clone());
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, script.clone(), log.clone()));
            }
        });
        Self {
            address,
            requests,
            task,
        }
    }

    pub fn url_prefix(&self) -> String {
        format!("http://{}/scheduler", self.address)
    }

    pub fn requests(&self, verb: &str) -> Vec<RecordedRequest> {
        self.requests
            .lock()
            .unwrap()
            .iter()
            .filter(|request| request.verb == verb)
            .cloned()
            .collect()
    }
}

impl Drop for ScriptedExtender {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    stream: TcpStream,
    script: Arc<ExtenderScript>,
    log: Arc<Mutex<Vec<RecordedRequest>>>,
) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read(&mut stream).await {
        log.lock().unwrap().push(request.clone());
        let answer = script(&request);
        tokio::time::sleep(answer.delay).await;
        if answer.closes || stream.write_all(&encode(&answer)).await.is_err() {
            return;
        }
    }
}

async fn read(stream: &mut BufReader<TcpStream>) -> Option<RecordedRequest> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            text => lines.push(text.to_owned()),
        }
    }
    let path = lines.first()?.split(' ').nth(1)?.to_owned();
    let split = |line: &String| {
        line.split_once(": ")
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    let headers: Vec<_> = lines[1..].iter().filter_map(split).collect();
    let length = headers
        .iter()
        .find(|(name, _)| name == "Content-Length")?
        .1
        .parse()
        .ok()?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    let verb = path.rsplit('/').next()?.to_owned();
    Some(RecordedRequest {
        verb,
        headers,
        body: serde_json::from_slice(&body).ok()?,
    })
}

fn encode(answer: &ScriptedAnswer) -> Vec<u8> {
    let ScriptedAnswer {
        status,
        body,
        content_type,
        ..
    } = answer;
    let head = format!("HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n");
    let rest = match (answer.chunked, *status) {
        (_, 204) => "\r\n".to_owned(),
        (true, _) => format!(
            "Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        ),
        (false, _) => format!("Content-Length: {}\r\n\r\n{body}", body.len()),
    };
    (head + &rest).into_bytes()
}

/// The default script: every node passes, all score alike, bind does as requested.
pub fn accept_all(api: &ApiServer, request: &RecordedRequest) -> ScriptedAnswer {
    match request.verb.as_str() {
        "filter" => ScriptedAnswer::ok(filter_answer(request, |_| true)),
        "prioritize" => ScriptedAnswer::ok(json!([])),
        "preempt" => ScriptedAnswer::ok(
            json!({"NodeNameToMetaVictims": request.body["NodeNameToMetaVictims"]}),
        ),
        _ => bind(api, request, request.body["Node"].as_str().unwrap()),
    }
}

/// A filter answer in the mode of the request.
pub fn filter_answer(request: &RecordedRequest, keeps: impl Fn(&str) -> bool) -> Value {
    match &request.body["NodeNames"] {
        Value::Array(names) => {
            let kept: Vec<&Value> = names
                .iter()
                .filter(|name| keeps(name.as_str().unwrap()))
                .collect();
            json!({"NodeNames": kept})
        }
        _ => {
            let kept = |node: &&Value| keeps(node["metadata"]["name"].as_str().unwrap());
            let items: Vec<&Value> = request.body["Nodes"]["items"]
                .as_array()
                .unwrap()
                .iter()
                .filter(kept)
                .collect();
            json!({"Nodes": {"metadata": {}, "items": items}})
        }
    }
}

/// The names a filter request asks about, in either mode.
pub fn requested_nodes(request: &RecordedRequest) -> Vec<String> {
    let names = |values: &Vec<Value>, name: fn(&Value) -> &Value| {
        values
            .iter()
            .map(|value| name(value).as_str().unwrap().to_owned())
            .collect()
    };
    match &request.body["NodeNames"] {
        Value::Array(values) => names(values, |value| value),
        _ => names(request.body["Nodes"]["items"].as_array().unwrap(), |node| {
            &node["metadata"]["name"]
        }),
    }
}

/// Binds through the API server, as an extender must.
pub fn bind(api: &ApiServer, request: &RecordedRequest, node: &str) -> ScriptedAnswer {
    let text = |field: &str| request.body[field].as_str().unwrap().to_owned();
    let binding = json!({
        "metadata": {"name": text("PodName"), "uid": text("PodUID")},
        "target": {"kind": "Node", "name": node},
    });
    let bound = api.bind(
        &format!("pods/{}/{}", text("PodNamespace"), text("PodName")),
        &binding,
    );
    ScriptedAnswer::ok(
        json!({"Error": bound.err().map(|error| error.to_string()).unwrap_or_default()}),
    )
}
