//! A stand-in for the Kubernetes API server: as much of it as clients of pods, nodes and Leases can observe.
//!
//! Objects live in memory as JSON with one global resource version; lists, watches, patches, bindings and
//! evictions behave as the real server's do, refusals included. Callers are not authenticated, though
//! tokens can be issued and reviewed; whole objects are not validated; there is no field ownership.
//!
//! ```text
//! routes ── HTTP to operation ──► write, pods ──► store (objects, versions, log) ──► watch ── events to HTTP
//!   └─ delivery: late, twice or unanswered, by faults, held_requests and connections
//! ```

mod budgets;
pub mod calls;
pub mod connections;
mod defaults;
mod delivery;
pub mod error;
pub mod faults;
pub mod held_requests;
mod pages;
mod patch;
mod pods;
mod resource;
mod routes;
mod selector;
mod store;
mod tokens;
mod watch;
mod write;

use calls::ApiCallCounts;
use connections::ConnectionFaults;
use error::ApiError;
use faults::InjectedFaults;
use held_requests::HeldRequests;
use jiff::Timestamp;
use pages::PagedListStore;
use parking_lot::Mutex;
use patch::PatchKind;
use resource::RequestTarget;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use store::{ObjectKey, Store};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_server::service::ChangeCount;
use tokens::{TokenNode, Tokens};
use tokio::sync::watch as channel;
use tokio_util::sync::{CancellationToken, DropGuard};
use write::ObjectPart;

/// State shared by the routes and the handle. The lock is never held across an await.
struct ServerState {
    store: Mutex<Store>,
    revisions: channel::Sender<u64>,
    /// Wakes the watches.
    writes: ChangeCount,
    /// The server's present time.
    clock: fn() -> Timestamp,
    calls: ApiCallCounts,
    connections: ConnectionFaults,
    faults: InjectedFaults,
    held_requests: HeldRequests,
    paged_lists: PagedListStore,
    tokens: Tokens,
    stop: CancellationToken,
}

impl ServerState {
    /// Runs a write and notifies the watches.
    fn write<T>(
        &self,
        operation: impl FnOnce(&mut Store) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut store = self.store.lock();
        let result = operation(&mut store);
        let revision = store.revision();
        drop(store);
        if self
            .revisions
            .send_if_modified(|current| std::mem::replace(current, revision) != revision)
        {
            self.writes.increment();
        }
        result
    }
}

/// An object before a write and after it; `None` before its creation and after its deletion.
pub(crate) type ObjectWrite = (Option<Arc<Value>>, Option<Arc<Value>>);

/// A running server on a loopback port of its own; dropping it stops it.
///
/// The helpers below act in the process, past HTTP and the counters. They name objects `nodes/a`,
/// `pods/default/a`, and kinds `pods` or `pods/default`.
pub struct ApiServer {
    shared: Arc<ServerState>,
    router: axum::Router,
    /// `None` without a network.
    address: Option<SocketAddr>,
    _stop: DropGuard,
}

impl ApiServer {
    pub async fn start() -> std::io::Result<Self> {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let mut this = Self::in_process(Timestamp::now);
        this.address = Some(listener.local_addr()?);
        let stopped = this.shared.stop.clone().cancelled_owned();
        let serving = axum::serve(listener, this.router.clone()).with_graceful_shutdown(stopped);
        tokio::spawn(async move { serving.await });
        Ok(this)
    }

    /// A server without a network, for [`Self::in_process_client`]; `clock` gives its present time.
    pub fn in_process(clock: fn() -> Timestamp) -> Self {
        let stop = CancellationToken::new();
        let shared = Arc::new(ServerState {
            store: Mutex::default(),
            revisions: channel::Sender::new(0),
            writes: ChangeCount::default(),
            clock,
            calls: ApiCallCounts::default(),
            connections: ConnectionFaults::default(),
            faults: InjectedFaults::default(),
            held_requests: HeldRequests::default(),
            paged_lists: PagedListStore::default(),
            tokens: Tokens::default(),
            stop: stop.clone(),
        });
        let router = axum::Router::new()
            .fallback(routes::handle)
            .layer(axum::extract::DefaultBodyLimit::disable())
            .with_state(shared.clone());
        Self {
            shared,
            router,
            address: None,
            _stop: stop.drop_guard(),
        }
    }

    pub fn uri(&self) -> http::Uri {
        let uri = format!("http://{}", self.address.expect("it has a network"));
        uri.parse().expect("a socket address makes a URI")
    }

    /// A client of this server; `name` is its User-Agent, by which the counters distinguish clients.
    pub fn client(&self, name: &str) -> kube::Result<kube::Client> {
        self.client_with_timeouts(name, WriteTimes::default())
    }

    /// A client of this server with a time limit for its writes; `name` is its User-Agent.
    pub fn client_with_timeouts(
        &self,
        name: &str,
        times: WriteTimes,
    ) -> kube::Result<kube::Client> {
        let mut config = kube::Config::new(self.uri());
        if let Ok(name) = http::HeaderValue::from_str(name) {
            config.headers.push((http::header::USER_AGENT, name));
        }
        // As Stowage's own client: a refused request is visible as refused.
        stowage_server::kubernetes::connect::client(
            config,
            times,
            stowage_kubernetes_objects::pruning::ResponseMode::Whole,
        )
    }

    /// What answers requests, without a network.
    pub fn router(&self) -> axum::Router {
        self.router.clone()
    }

    /// A client without a network: its requests go to `server`, which wraps [`Self::router`].
    pub(crate) fn in_process_client(
        &self,
        name: &str,
        times: WriteTimes,
        server: axum::Router,
    ) -> kube::Client {
        let name = http::HeaderValue::from_str(name).expect("a name that a header can carry");
        let service = tower::ServiceBuilder::new()
            .map_request(move |mut request: http::Request<kube::client::Body>| {
                request
                    .headers_mut()
                    .insert(http::header::USER_AGENT, name.clone());
                stowage_server::kubernetes::connect::with_server_timeout(request, times.server)
            })
            .service(server);
        kube::Client::new(service, "default")
    }

    pub fn calls(&self) -> &ApiCallCounts {
        &self.shared.calls
    }

    pub fn faults(&self) -> &InjectedFaults {
        &self.shared.faults
    }

    /// Requests that faults hold up until they are released.
    pub fn held_requests(&self) -> &HeldRequests {
        &self.shared.held_requests
    }

    pub fn connections(&self) -> &ConnectionFaults {
        &self.shared.connections
    }

    /// Creates an object of a kind: `create("pods", …)`; without a namespace, in `default`.
    pub fn create(&self, kind: &str, object: Value) -> Result<Arc<Value>, ApiError> {
        let target = RequestTarget::from_short(kind).ok_or_else(ApiError::no_such_path)?;
        self.shared
            .write(|store| write::create(store, &target, object, (self.shared.clock)()))
    }

    pub fn get(&self, object: &str) -> Option<Arc<Value>> {
        self.shared
            .store
            .lock()
            .get(&key(object).ok()?)
            .ok()
            .cloned()
    }

    pub fn list(&self, kind: &str) -> Vec<Arc<Value>> {
        let Some(target) = RequestTarget::from_short(kind) else {
            return Vec::new();
        };
        let selector = selector::ListSelector::new(&target.namespace, "", "");
        let store = self.shared.store.lock();
        store
            .list(target.resource)
            .filter(|object| selector.matches(object))
            .cloned()
            .collect()
    }

    /// Deletes as `kubectl delete` does: a bound pod terminates until its kubelet removes it.
    pub fn delete(&self, object: &str) -> Result<(), ApiError> {
        self.delete_with(object, &json!({}))
    }

    /// Deletes at once, even if a kubelet still runs it.
    pub fn delete_now(&self, object: &str) -> Result<(), ApiError> {
        self.delete_with(object, &json!({"gracePeriodSeconds": 0}))
    }

    /// A strategic merge patch of everything but the status.
    pub fn patch(&self, object: &str, patch: &Value) -> Result<Arc<Value>, ApiError> {
        self.patch_part(object, ObjectPart::Main, patch)
    }

    /// A strategic merge patch of the status: `{"status": {…}}`.
    pub fn patch_status(&self, object: &str, patch: &Value) -> Result<Arc<Value>, ApiError> {
        self.patch_part(object, ObjectPart::Status, patch)
    }

    /// Binds a pod without a scheduler.
    pub fn bind(&self, pod: &str, binding: &Value) -> Result<(), ApiError> {
        let key = key(pod)?;
        self.shared
            .write(|store| pods::bind(store, &key, binding, (self.shared.clock)()))
    }

    /// A token of a service account (`namespace/name`), made for a pod on `node` and for one audience.
    pub fn issue_token(&self, account: &str, node: Option<&str>, audience: &str) -> String {
        let token_node = |name: &str| {
            let uid = self
                .get(&format!("nodes/{name}"))
                .and_then(|node| node["metadata"]["uid"].as_str().map(str::to_owned));
            TokenNode {
                name: name.to_owned(),
                uid,
            }
        };
        self.shared.tokens.issue(
            account,
            node.map(token_node),
            audience,
            (self.shared.clock)().as_second(),
        )
    }

    /// Lets a service account (`namespace/name`) `get` something: a path such as `/metrics`, or the pods of a namespace.
    pub fn allow(&self, account: &str, what: &str) {
        self.shared.tokens.allow(account, what);
    }

    /// The token has expired, or its pod is gone.
    pub fn revoke_token(&self, token: &str) {
        self.shared.tokens.revoke(token);
    }

    /// The global resource version.
    pub fn revision(&self) -> u64 {
        self.shared.store.lock().revision()
    }

    /// Each write of the kind after this version, in order. Writes that the log has forgotten are missing.
    pub(crate) fn writes_after(&self, kind: &str, revision: u64) -> Vec<ObjectWrite> {
        let Some(target) = RequestTarget::from_short(kind) else {
            return Vec::new();
        };
        let store = self.shared.store.lock();
        let changes = store
            .retained_changes_after(revision)
            .filter(|change| change.resource == target.resource);
        changes
            .map(|change| (change.before.clone(), change.after.clone()))
            .collect()
    }

    /// The global resource version, after each write.
    pub fn subscribe(&self) -> channel::Receiver<u64> {
        self.shared.revisions.subscribe()
    }

    /// Waits until `check` returns a value; it is called after each write.
    pub async fn until<T>(&self, mut check: impl FnMut(&Self) -> Option<T>) -> T {
        let mut revisions = self.subscribe();
        loop {
            if let Some(found) = check(self) {
                return found;
            }
            revisions
                .changed()
                .await
                .expect("the handle keeps the sender");
        }
    }

    /// Forgets the change log: watches that resume from before get 410, and so do lists that are half read.
    pub fn compact(&self) {
        self.shared.store.lock().compact();
        self.shared.paged_lists.expire();
    }

    fn delete_with(&self, object: &str, options: &Value) -> Result<(), ApiError> {
        let key = key(object)?;
        self.shared
            .write(|store| write::delete(store, &key, options, (self.shared.clock)()))
            .map(drop)
    }

    fn patch_part(
        &self,
        object: &str,
        part: ObjectPart,
        patch: &Value,
    ) -> Result<Arc<Value>, ApiError> {
        let key = key(object)?;
        self.shared
            .write(|store| write::patch(store, &key, part, PatchKind::Strategic, patch))
    }
}

fn key(object: &str) -> Result<ObjectKey, ApiError> {
    let target = RequestTarget::from_short(object).ok_or_else(ApiError::no_such_path)?;
    let name = target.name.ok_or_else(ApiError::no_such_path)?;
    Ok(ObjectKey {
        resource: target.resource,
        namespace: target.namespace,
        name,
    })
}
