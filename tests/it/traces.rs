//! Spans for OpenTelemetry: what a collector on loopback receives of a pod's way, and that nothing depends on the collector.

use crate::client::{Client, NOBODYS};
use crate::process::{RunningServe, eventually, json_dump};
use crate::served::{self, args, bind_args, bound_on, pod, preempt_args, with_priority};
use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Attribute;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::Arc;
use tokio::runtime::Runtime;

const UID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

/// A collector that keeps the spans it was sent, with its runtime.
struct StandInCollector {
    endpoint: String,
    spans: Arc<Mutex<Vec<Span>>>,
    resources: Arc<Mutex<Vec<BTreeMap<String, String>>>>,
    _runtime: Runtime,
}

impl StandInCollector {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let (spans, resources) = (
            Arc::new(Mutex::new(Vec::new())),
            Arc::new(Mutex::new(Vec::new())),
        );
        let (kept, kept_resources) = (spans.clone(), resources.clone());
        let take = async move |body: Bytes| {
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            for of_resource in request.resource_spans {
                kept_resources
                    .lock()
                    .push(attributes(&of_resource.resource.unwrap().attributes));
                kept.lock().extend(
                    of_resource
                        .scope_spans
                        .into_iter()
                        .flat_map(|scope| scope.spans),
                );
            }
        };
        let router = Router::new().route("/v1/traces", post(take));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(async {
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router)
                .await
                .unwrap()
        });
        Self {
            endpoint,
            spans,
            resources,
            _runtime: runtime,
        }
    }

    fn spans(&self, name: &str) -> Vec<Span> {
        self.spans
            .lock()
            .iter()
            .filter(|span| span.name == name)
            .cloned()
            .collect()
    }

    fn span(&self, name: &str) -> Span {
        let found = self.spans(name);
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found.into_iter().next().unwrap()
    }
}

fn attributes(of: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Attribute| match value {
        Attribute::StringValue(text) => text.clone(),
        Attribute::IntValue(number) => number.to_string(),
        other => panic!("{other:?}"),
    };
    let one =
        |pair: &KeyValue| Some((pair.key.clone(), text(pair.value.as_ref()?.value.as_ref()?)));
    of.iter().filter_map(one).collect()
}

fn call(serve: &RunningServe, verb: &str, body: &serde_json::Value) -> serde_json::Value {
    let answer =
        Client::connect(serve.scheduler).post(&format!("/scheduler/{verb}"), body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn metric(serve: &RunningServe, sample: &str) -> f64 {
    let page = Client::connect(serve.operators).get_page("/metrics");
    let text = page.text();
    let line = text.lines().find_map(|line| line.strip_prefix(sample));
    line.unwrap_or_else(|| panic!("no {sample} in {text}"))
        .trim()
        .parse()
        .unwrap()
}

#[test]
fn all_calls_about_a_pod_are_one_trace_with_their_decisions_and_writes_below_them() {
    let folder = tempfile::tempdir().unwrap();
    let collector = StandInCollector::start();
    let mut llm = pod("llm", "40Gi");
    llm["metadata"]["uid"] = json!(UID);
    let dump = json_dump(&folder);
    let mut cluster: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&dump).unwrap()).unwrap();
    let items = cluster["items"].as_array_mut().unwrap();
    items
        .iter_mut()
        .filter(|item| item["metadata"]["name"] == "llm")
        .for_each(|item| *item = llm.clone());
    std::fs::write(&dump, cluster.to_string()).unwrap();
    let serve = RunningServe::serve_with(&dump, &["--otlp-endpoint", &collector.endpoint]);
    let nodes = ["node-a", "node-b"];
    call(&serve, "filter", &args(&llm, &nodes));
    call(&serve, "prioritize", &args(&llm, &nodes));
    let bound = call(&serve, "bind", &bind_args(&llm, "node-b"));
    assert_eq!(bound["Error"], "");
    eventually("the collector has the spans", || {
        !collector.spans("bind").is_empty()
    });

    let trace = UID.replace('-', "");
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    for span in collector.spans.lock().iter() {
        assert_eq!(hex(&span.trace_id), trace, "{}", span.name);
        assert!(
            span.end_time_unix_nano >= span.start_time_unix_nano,
            "{}",
            span.name
        );
    }
    for verb in ["filter", "prioritize", "bind"] {
        let root = collector.span(verb);
        assert!(root.parent_span_id.is_empty(), "{verb}");
        let of_pod = attributes(&root.attributes);
        assert_eq!(of_pod["k8s.pod.name"], "llm");
        assert_eq!(of_pod["k8s.pod.uid"], UID);
        assert_eq!(of_pod["k8s.namespace.name"], "default");
        let below: Vec<Span> = collector.spans("decide");
        let below = below
            .iter()
            .filter(|step| step.parent_span_id == root.span_id);
        assert_eq!(below.count(), 1, "{verb} has one decision");
    }
    let bind = collector.span("bind");
    assert_eq!(attributes(&bind.attributes)["k8s.node.name"], "node-b");
    let write = collector.span("write Binding");
    assert_eq!(write.parent_span_id, bind.span_id);
    assert!(write.start_time_unix_nano >= bind.start_time_unix_nano);
    assert!(write.end_time_unix_nano <= bind.end_time_unix_nano);
    let written = attributes(&write.attributes);
    assert_eq!(
        (&*written["k8s.node.name"], &*written["stowage.outcome"]),
        ("node-b", "written")
    );
    let resource = collector.resources.lock()[0].clone();
    assert_eq!(resource["service.name"], "stowage");
    assert!(resource.contains_key("service.instance.id"), "{resource:?}");
    let count = collector.spans.lock().len() as f64;
    eventually("they are counted", || {
        metric(&serve, "stowage_trace_spans_exported_total") >= count
    });
    assert_eq!(
        metric(
            &serve,
            r#"stowage_trace_spans_dropped_total{reason="queue-full"}"#
        ),
        0.0
    );
}

#[test]
fn a_preemption_is_traced_to_the_reservation_that_it_writes() {
    let folder = tempfile::tempdir().unwrap();
    let collector = StandInCollector::start();
    let mut node = served::node("node-a");
    node["metadata"]["labels"] = served::gpu_labels(1);
    let mut victim = bound_on(
        with_priority(pod("batch", "60Gi"), -10),
        "node-a",
        &[0],
        60 << 30,
    );
    // Labels show only the index of a GPU.
    victim["metadata"]["annotations"]["stowage.dev/devices"] = json!("index-0");
    let urgent = with_priority(pod("urgent", "60Gi"), 1000);
    let dump = folder.path().join("dump.json");
    let items = json!({ "kind": "List", "items": [node, victim, urgent] });
    std::fs::write(&dump, items.to_string()).unwrap();
    let serve = RunningServe::serve_with(&dump, &["--otlp-endpoint", &collector.endpoint]);
    call(&serve, "filter", &args(&urgent, &["node-a"]));
    let answer = call(
        &serve,
        "preempt",
        &preempt_args(&urgent, &[("node-a", &[&victim])]),
    );
    assert!(
        answer["NodeNameToMetaVictims"]["node-a"].is_object(),
        "{answer}"
    );
    eventually("the collector has the spans", || {
        !collector.spans("preempt").is_empty()
    });
    let preempt = collector.span("preempt");
    let written = collector.span("write reservation");
    assert_eq!(written.parent_span_id, preempt.span_id);
    assert_eq!(attributes(&written.attributes)["k8s.node.name"], "node-a");
    let decisions = collector.spans("decide");
    let of = |call: &Span| {
        let below = decisions
            .iter()
            .find(|step| step.parent_span_id == call.span_id);
        attributes(&below.expect("a decision").attributes)
    };
    assert_eq!(of(&preempt)["stowage.victims"], "1");
    let filter = collector.span("filter");
    assert!(
        of(&filter).contains_key("stowage.refusal"),
        "{:?}",
        of(&filter)
    );
    assert_eq!(filter.trace_id, preempt.trace_id);
}

#[test]
fn without_a_collector_calls_are_answered_and_dropped_spans_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let closed = format!("http://127.0.0.1:{NOBODYS}");
    let serve = RunningServe::serve_with(&json_dump(&folder), &["--otlp-endpoint", &closed]);
    let dropped = || {
        metric(
            &serve,
            r#"stowage_trace_spans_dropped_total{reason="export-failed"}"#,
        )
    };
    let llm = pod("llm", "40Gi");
    let mut before = 0.0;
    for _ in 0..2 {
        let answer = call(&serve, "filter", &args(&llm, &["node-a", "node-b"]));
        assert_eq!(answer["NodeNames"].as_array().unwrap().len(), 2, "{answer}");
        eventually("the spans are given up", || dropped() > before);
        before = dropped();
    }
    assert_eq!(
        call(&serve, "bind", &bind_args(&llm, "node-b"))["Error"],
        ""
    );
    let line = serve.wait_for_line("spans are dropped");
    assert!(line.contains("nothing else is affected"), "{line}");
    // The log goes on with the binding, and has no second line of this kind before it.
    let again = serve.read_lines_until(" bound");
    assert!(
        !again.iter().any(|line| line.contains("spans are dropped")),
        "{again:?}"
    );
}
