//! The Kubernetes edge: brings the API server's state into the ledger, and writes decisions back.
//!
//! ```text
//!  pods, nodes ─► watch ─► index ─► ledger, filters (in: everything, by watches)
//!  budgets, slices, ┤        │
//!  volumes, claims, │        │
//!  namespaces ──────┘        │
//!                            │
//!               tick ────────┤                      (time: reservations expire; the planner)
//!     packing_learner ───────┤                      (the packing model)
//!      conflict_audit ───────┤                      (allocations that conflict)
//!            capacity ───────┘─► nodes/status
//!  api ─► pods/binding, pods/status, pods/eviction  (out: one write each; a gate is lifted from the pod itself)
//!  events ─► events.k8s.io                          (out: Events, never waited for)
//!  leader ─► leadership                             (whether any of this may act)
//!  certificates ◄─► Secret, ConfigMap              (the agents' address' certificate)
//!  token_review ─► authentication.k8s.io            (whose token: read only)
//!  access_review ─► authorization.k8s.io            (access to a page: read only)
//!  uninstall ─► pods, nodes                         (by the command of that name, when the service is gone)
//! ```
//!
//! Nothing here decides where a pod goes, and nothing here is an HTTP server. The request path has no list, and no read except
//! the one that settles a write whose answer was lost.

pub(crate) mod access_review;
pub mod api;
pub mod capacity;
pub mod certificates;
pub(crate) mod conflict_audit;
pub mod connect;
pub mod dump;
pub mod events;
pub mod index;
pub mod leader;
mod liveness;
mod loop_driver;
pub mod manifests;
pub mod observed;
mod packing_learner;
mod page_retry;
mod request;
pub mod runtime_class;
#[cfg(test)]
pub(crate) mod testing;
pub mod tick;
pub(crate) mod token_review;
pub mod uninstall;
pub mod watch;

pub use access_review::AccessReviews;
pub use api::ApiControlPlane;
pub use connect::connect;
pub use index::ClusterIndex;
pub use leader::{LeadWith, LeaseName};
pub use token_review::{AgentAccount, TokenReviews};

use crate::service::ServerState;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Client;
use observed::ActivityRecordingControlPlane;
use parking_lot::Mutex;
use std::sync::Arc;
use stowage_kubernetes_objects::port::{ControlPlane, WriteTimes};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use watch::WatchFeed;

/// Vendor and class in CDI names, unless `--cdi-kind` sets another.
pub const CDI_KIND: &str = stowage_kubernetes_objects::IN_MEMORY_CDI_KIND;

#[derive(Debug, Clone)]
pub struct ClusterOptions {
    pub lead_with: LeadWith,
    /// This replica's name, in Events.
    pub identity: String,
    pub cdi_kind: String,
    /// How long writes may take, and so how long a new leader waits for those of its predecessor.
    pub times: WriteTimes,
    /// Distinguishes this process from every other, in its leader epochs.
    pub nonce: String,
}

impl ClusterOptions {
    pub fn new(lead_with: LeadWith, identity: String) -> Self {
        let (cdi_kind, times) = (CDI_KIND.into(), WriteTimes::default());
        Self {
            lead_with,
            identity,
            cdi_kind,
            times,
            nonce: leader::nonce(),
        }
    }
}

/// Starts all tasks that run beside the request path. A task ends at `shutdown` and not before; one that ends earlier has
/// panicked.
///
/// Shut the HTTP side down first: its requests in progress need leadership, and the Lease is given up here.
pub fn start(
    client: Client,
    state: Arc<ServerState>,
    options: ClusterOptions,
    shutdown: CancellationToken,
) -> (Arc<dyn ControlPlane>, JoinSet<()>) {
    let ClusterOptions {
        lead_with,
        identity,
        cdi_kind,
        times,
        nonce,
    } = options;
    let (event_recorder, event_queue) = events::EventRecorder::new(state.clone());
    let writer = Arc::new(ApiControlPlane::new(
        client.clone(),
        state.clone(),
        event_recorder,
        cdi_kind,
        times,
    ));
    let control_plane: Arc<dyn ControlPlane> =
        ActivityRecordingControlPlane::new(writer, state.clone());
    let index = Arc::new(Mutex::new(ClusterIndex::default()));
    let feed = WatchFeed {
        state: state.clone(),
        index: index.clone(),
        control_plane: control_plane.clone(),
    };
    let mut tasks = JoinSet::new();
    let mut run = |task: BoxFuture<'static, ()>| {
        let shutdown = shutdown.clone();
        tasks.spawn(async move {
            shutdown.run_until_cancelled(task).await;
        });
    };
    run(Box::pin(liveness::run(client.clone(), state.clone())));
    run(Box::pin(watch::pods(client.clone(), feed.clone())));
    run(Box::pin(watch::nodes(client.clone(), feed.clone())));
    run(Box::pin(watch::budgets(client.clone(), feed.clone())));
    run(Box::pin(watch::namespaces(client.clone(), feed.clone())));
    run(Box::pin(watch::slices(client.clone(), feed.clone())));
    run(Box::pin(watch::storage::<PersistentVolumeClaim>(
        client.clone(),
        feed.clone(),
        watch::CLAIMS,
    )));
    run(Box::pin(watch::storage::<PersistentVolume>(
        client.clone(),
        feed.clone(),
        watch::VOLUMES,
    )));
    run(Box::pin(watch::storage::<StorageClass>(
        client.clone(),
        feed,
        watch::STORAGE_CLASSES,
    )));
    run(Box::pin(tick::run(
        state.clone(),
        index.clone(),
        control_plane.clone(),
    )));
    run(Box::pin(conflict_audit::run(
        state.clone(),
        control_plane.clone(),
    )));
    run(Box::pin(capacity::run(
        client.clone(),
        state.clone(),
        index,
        times,
    )));
    run(Box::pin(events::publish(
        client.clone(),
        state.clone(),
        identity,
        event_queue,
    )));
    // It handles the shutdown itself, because it has a Lease to give up.
    tasks.spawn(leader::run(
        client, state, lead_with, times, nonce, shutdown,
    ));
    (control_plane, tasks)
}
