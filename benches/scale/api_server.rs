//! A stand-in API server with very many nodes and pods, as a process of its own: it makes the pages of its lists as they are
//! asked for, so that it needs no memory for them and little time. Of what is written, it keeps the capacity of nodes and shows it;
//! the rest is accepted and forgotten. Watches stay open; that of pods shows one that changes, as there always is one in a cluster
//! of this size. `/bench/holder/LEASE/NAME` sets the holder of a Lease; `/bench/held/LEASE` says for how many milliseconds it has
//! had its holder; `/bench/label/VALUE` labels the first namespace. `/bench/written/WHAT` counts what was written.

use crate::cluster::{BenchCluster, NODE_VRAM, ObjectTemplate, node_index};
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, patch, post, put};
use axum::{Json, Router};
use futures::StreamExt;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Environment variable that makes this program the API server of a cluster: `NODES/PODS/TENANTS/GATED`.
pub const CLUSTER_VARIABLE: &str = "STOWAGE_BENCH_CLUSTER";
/// Name of the Lease that is renewed all the time.
pub const KUBE_SCHEDULER_LEASE: &str = "kube-scheduler";
/// Interval of the changes of a pod.
const POD_CHANGE_INTERVAL: Duration = Duration::from_millis(100);
/// The label of namespaces that a policy selects by.
pub const NAMESPACE_LABEL: &str = "bench";
/// The host name with which `stowage serve` looks for itself in the Lease.
pub const REPLICA: &str = "bench-0";

struct ApiServer {
    cluster: BenchCluster,
    /// Number of bound pods; then of those with the planner's gate.
    pods: usize,
    gated: usize,
    node: ObjectTemplate,
    pod: ObjectTemplate,
    /// Leases by name.
    leases: Mutex<BTreeMap<String, HeldLease>>,
    /// The label of the first namespace; it has none while it is empty.
    label: watch::Sender<String>,
    started: Instant,
    nodes: Mutex<WrittenNodes>,
    /// Paths of other objects that were written.
    written: Mutex<BTreeSet<String>>,
}

/// What was written to nodes, and the watches that show it.
#[derive(Default)]
struct WrittenNodes {
    /// VRAM that nodes advertise, by index.
    vram: BTreeMap<usize, u64>,
    writes: usize,
    watches: Vec<UnboundedSender<Bytes>>,
}

impl ApiServer {
    fn store(&self, mut lease: Value) -> Value {
        let holder = |lease: &Value| lease["spec"]["holderIdentity"].clone();
        let name = lease["metadata"]["name"]
            .as_str()
            .expect("a Lease has a name")
            .to_owned();
        lease["metadata"]["uid"] = json!("lease");
        let mut leases = self.leases.lock();
        let before = leases
            .get(&name)
            .filter(|held| holder(&held.lease) == holder(&lease));
        let since = before.map_or_else(Instant::now, |held| held.since);
        leases.insert(
            name,
            HeldLease {
                lease: lease.clone(),
                since,
            },
        );
        lease
    }

    /// The resourceVersion now: in every millisecond something changes.
    fn revision(&self) -> u128 {
        100 + self.started.elapsed().as_millis()
    }

    fn write_node(&self, place: usize, out: &mut Vec<u8>) -> io::Result<()> {
        let vram = self
            .nodes
            .lock()
            .vram
            .get(&place)
            .copied()
            .unwrap_or(NODE_VRAM);
        self.cluster.write_node(&self.node, place, vram, out)
    }

    /// The node advertises this VRAM from now on, and the watches show it.
    fn advertise(&self, place: usize, vram: u64) -> Value {
        let mut node = Vec::new();
        self.cluster
            .write_node(&self.node, place, vram, &mut node)
            .expect("memory takes what is written");
        let mut node: Value = serde_json::from_slice(&node).expect("a template is JSON");
        let mut nodes = self.nodes.lock();
        nodes.vram.insert(place, vram);
        nodes.writes += 1;
        node["metadata"]["resourceVersion"] = json!(self.revision().to_string());
        let event = Bytes::from(format!("{}\n", json!({"type": "MODIFIED", "object": node})));
        nodes
            .watches
            .retain(|watch| watch.unbounded_send(event.clone()).is_ok());
        node
    }

    /// The first namespace, with the label that it has.
    fn first_namespace(&self) -> Value {
        let label = self.label.borrow();
        let labels = if label.is_empty() {
            json!({})
        } else {
            json!({NAMESPACE_LABEL: *label})
        };
        json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": {
                "name": self.cluster.namespace_of(0), "uid": "namespace", "labels": labels,
                "resourceVersion": self.revision().to_string(),
            },
        })
    }
}

struct HeldLease {
    lease: Value,
    /// Since when it has had its holder.
    since: Instant,
}

#[derive(Deserialize)]
struct ListQuery {
    limit: Option<usize>,
    #[serde(rename = "continue")]
    from: Option<usize>,
    watch: Option<bool>,
}

/// Serves until it is killed.
pub fn serve(description: &str) {
    let sizes: Vec<usize> = description
        .split('/')
        .map(|size| size.parse().expect("a number"))
        .collect();
    let [nodes, pods, tenants, gated] = sizes[..] else {
        panic!("four numbers: {description}")
    };
    let cluster = BenchCluster::new(nodes, 0).with_tenants(tenants);
    let server = Arc::new(ApiServer {
        node: cluster.node_template(),
        pod: cluster.resident_template(),
        cluster,
        pods,
        gated,
        leases: Mutex::new([(KUBE_SCHEDULER_LEASE.to_owned(), kube_scheduler_lease())].into()),
        label: watch::Sender::default(),
        started: Instant::now(),
        nodes: Mutex::default(),
        written: Mutex::default(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port");
        eprintln!(
            "API server: http://{}",
            listener.local_addr().expect("an address")
        );
        axum::serve(listener, router(server))
            .await
            .expect("it serves");
    });
}

fn router(server: Arc<ApiServer>) -> Router {
    Router::new()
        .route("/api/v1/nodes", get(nodes))
        .route("/api/v1/nodes/{name}/status", patch(node_status))
        .route("/api/v1/pods", get(pods))
        .route("/api/v1/namespaces", get(namespaces))
        .route(
            "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
            post(store_lease),
        )
        .route(
            "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}",
            get(lease).put(store_lease),
        )
        .route("/bench/holder/{lease}/{name}", put(hold))
        .route("/bench/held/{lease}", get(held))
        .route("/bench/label/{value}", put(label))
        .route("/bench/written/{what}", get(written))
        .route(
            "/apis/resource.k8s.io/v1",
            any(async || StatusCode::NOT_FOUND),
        )
        .fallback(any(everything_else))
        .with_state(server)
}

async fn nodes(State(server): State<Arc<ApiServer>>, Query(query): Query<ListQuery>) -> Response {
    if query.watch == Some(true) {
        let (watch, events) = unbounded();
        server.nodes.lock().watches.push(watch);
        return Body::from_stream(events.map(Ok::<_, Infallible>)).into_response();
    }
    list(
        "Node",
        &query,
        server.revision(),
        server.cluster.nodes(),
        |place, out| server.write_node(place, out),
    )
}

async fn node_status(
    State(server): State<Arc<ApiServer>>,
    Path(name): Path<String>,
    Json(patch): Json<Value>,
) -> Response {
    let place = node_index(&name).filter(|place| *place < server.cluster.nodes());
    let vram = patch["status"]["capacity"]["stowage.dev/vram"]
        .as_str()
        .and_then(|vram| vram.parse().ok());
    match (place, vram) {
        (Some(place), Some(vram)) => json_of(&server.advertise(place, vram)),
        _ => StatusCode::BAD_REQUEST.into_response(),
    }
}

async fn pods(State(server): State<Arc<ApiServer>>, Query(query): Query<ListQuery>) -> Response {
    let page = |place: usize, out: &mut Vec<u8>| match place.checked_sub(server.pods) {
        None => server.cluster.write_resident(&server.pod, place, out),
        Some(0) => out.write_all(oversized_pod().to_string().as_bytes()),
        Some(nth) => out.write_all(server.cluster.gated_pod(nth).to_string().as_bytes()),
    };
    if query.watch == Some(true) {
        return watch_changing_pod(server.clone());
    }
    list(
        "Pod",
        &query,
        server.revision(),
        server.pods + 1 + server.gated,
        page,
    )
}

fn list(
    kind: &str,
    query: &ListQuery,
    revision: u128,
    count: usize,
    write: impl Fn(usize, &mut Vec<u8>) -> io::Result<()>,
) -> Response {
    let from = query.from.unwrap_or(0);
    let to = count.min(from + query.limit.unwrap_or(count));
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if to < count {
        metadata["continue"] = json!(to.to_string());
    }
    let mut page =
        format!(r#"{{"kind":"{kind}List","apiVersion":"v1","metadata":{metadata},"items":["#)
            .into_bytes();
    for place in from..to {
        if place > from {
            page.push(b',');
        }
        write(place, &mut page).expect("memory takes what is written");
    }
    page.extend_from_slice(b"]}");
    ([(header::CONTENT_TYPE, "application/json")], page).into_response()
}

/// Only the first is shown: no selector concerns the others.
async fn namespaces(
    State(server): State<Arc<ApiServer>>,
    Query(query): Query<ListQuery>,
) -> Response {
    if query.watch == Some(true) {
        return watch_namespace_label(server);
    }
    let page =
        |_, out: &mut Vec<u8>| out.write_all(server.first_namespace().to_string().as_bytes());
    list("PartialObjectMetadata", &query, server.revision(), 1, page)
}

/// A watch of namespaces, of which the first shows what it is labelled.
fn watch_namespace_label(server: Arc<ApiServer>) -> Response {
    let changes = futures::stream::unfold(server.label.subscribe(), move |mut changes| {
        let server = server.clone();
        async move {
            changes.changed().await.ok()?;
            let event = json!({"type": "MODIFIED", "object": server.first_namespace()});
            Some((
                Ok::<_, Infallible>(Bytes::from(format!("{event}\n"))),
                changes,
            ))
        }
    });
    Body::from_stream(changes).into_response()
}

/// Pod that waits because no GPU is large enough.
fn oversized_pod() -> Value {
    let limits = json!({"stowage.dev/vram": "1Ti"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "too-large", "namespace": "default", "uid": "too-large", "resourceVersion": "1"},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]},
    })
}

/// A watch of pods, of which one that requests no GPU changes.
fn watch_changing_pod(server: Arc<ApiServer>) -> Response {
    let changes = futures::stream::unfold(
        tokio::time::interval(POD_CHANGE_INTERVAL),
        move |mut interval| {
            let server = server.clone();
            async move {
                interval.tick().await;
                let metadata = json!({
                    "name": "changing", "namespace": "default", "uid": "changing",
                    "resourceVersion": server.revision().to_string(),
                });
                let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}});
                let event = format!("{}\n", json!({"type": "MODIFIED", "object": pod}));
                Some((Ok::<_, Infallible>(Bytes::from(event)), interval))
            }
        },
    );
    Body::from_stream(changes).into_response()
}

/// Answers a watch of objects that never change.
fn watch_nothing() -> Response {
    Body::from_stream(futures::stream::pending::<Result<Bytes, Infallible>>()).into_response()
}

/// Lease that the replica's kube-scheduler holds.
fn kube_scheduler_lease() -> HeldLease {
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": KUBE_SCHEDULER_LEASE, "namespace": "kube-system", "uid": "lease"},
        "spec": {"holderIdentity": format!("{REPLICA}_1"), "leaseTransitions": 1, "leaseDurationSeconds": 15},
    });
    HeldLease {
        lease,
        since: Instant::now(),
    }
}

async fn lease(
    State(server): State<Arc<ApiServer>>,
    Path((_, name)): Path<(String, String)>,
) -> Response {
    let Some(mut lease) = server
        .leases
        .lock()
        .get(&name)
        .map(|held| held.lease.clone())
    else {
        let absent = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
        return (StatusCode::NOT_FOUND, json_of(&absent)).into_response();
    };
    if name == KUBE_SCHEDULER_LEASE {
        // It is renewed all the time.
        lease["spec"]["renewTime"] = json!(jiff::Timestamp::now());
    }
    json_of(&lease)
}

/// A replica takes its own Lease, or renews it.
async fn store_lease(State(server): State<Arc<ApiServer>>, Json(lease): Json<Value>) -> Response {
    json_of(&server.store(lease))
}

async fn hold(State(server): State<Arc<ApiServer>>, Path((lease, name)): Path<(String, String)>) {
    let mut lease = server.leases.lock()[&lease].lease.clone();
    lease["spec"]["holderIdentity"] = json!(name);
    lease["spec"]["leaseTransitions"] =
        json!(lease["spec"]["leaseTransitions"].as_u64().unwrap_or(0) + 1);
    server.store(lease);
}

async fn label(State(server): State<Arc<ApiServer>>, Path(value): Path<String>) {
    server.label.send_replace(value);
}

async fn held(State(server): State<Arc<ApiServer>>, Path(lease): Path<String>) -> String {
    server.leases.lock()[&lease]
        .since
        .elapsed()
        .as_millis()
        .to_string()
}

/// How many objects were written: nodes, or others. `node-writes` is how often a node was.
async fn written(State(server): State<Arc<ApiServer>>, Path(what): Path<String>) -> String {
    match &*what {
        "nodes" => server.nodes.lock().vram.len().to_string(),
        "node-writes" => server.nodes.lock().writes.to_string(),
        _ => server.written.lock().len().to_string(),
    }
}

/// Lists of other kinds are empty, and writes succeed.
async fn everything_else(
    State(server): State<Arc<ApiServer>>,
    request: axum::extract::Request,
) -> Response {
    if request.method() != axum::http::Method::GET {
        server
            .written
            .lock()
            .insert(request.uri().path().to_owned());
        let status =
            json!({"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Success"});
        return (
            StatusCode::CREATED,
            [(header::CONTENT_TYPE, "application/json")],
            status.to_string(),
        )
            .into_response();
    }
    if request
        .uri()
        .query()
        .is_some_and(|query| query.contains("watch="))
    {
        return watch_nothing();
    }
    json_of(
        &json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "100"}, "items": []}),
    )
}

fn json_of(value: &Value) -> Response {
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}
