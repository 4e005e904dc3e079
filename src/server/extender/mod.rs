//! The HTTP edge: kube-scheduler's four verbs, the agents' reports, and the operators' pages.
//!
//! A verb parses its wire form ([`wire`]), calls the core and the ledger, and answers. In shadow mode it records what it would
//! have answered and lets kube-scheduler's choice through ([`shadow`]). No decision is made here, no Kubernetes object is
//! fetched here, and nothing here waits for the API server except the one write of a bind or a reservation.

pub mod autoscaling;
pub mod bind;
pub mod bundle;
pub(crate) mod certificate_reload;
pub mod explain;
pub mod filter;
pub mod fleet;
pub mod models;
pub mod operators;
pub mod page;
pub mod page_auth;
pub mod preempt;
pub mod prioritize;
pub mod reports;
pub mod request;
pub mod server;
pub mod shadow;
pub mod tls;
pub mod token_reviews;
mod webhook;
pub mod wire;

use crate::service::{BundleSource, ServerState};
use std::sync::Arc;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_telemetry::devices::GpuSeries;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// State shared by all handlers.
#[derive(Clone)]
pub struct Extender {
    pub state: Arc<ServerState>,
    pub control_plane: Arc<dyn ControlPlane>,
    pub board: Arc<reports::Board>,
    pub agent_auth: reports::AgentAuth,
    pub page_auth: page_auth::PageAuth,
    /// Slots for large pages that are rendered at one time.
    pub pages: operators::PageLimits,
    /// Whether the metrics name each GPU.
    pub gpu_series: GpuSeries,
    /// The cluster as it changes, for those who watch it.
    pub live: Arc<fleet::live::LiveFleet>,
    /// Bytes of report bodies in progress.
    pub report_bodies: Arc<reports::ReportBodies>,
    /// Decisions that were recorded and not answered, in shadow mode.
    pub journal: Arc<shadow::ShadowJournal>,
    /// How many replicas each model needs.
    pub autoscaling: Arc<autoscaling::ModelAutoscaling>,
    /// Writes in progress. They outlive the connection that requested them, and shutdown waits for them.
    pub writes: TaskTracker,
    /// Open Bindings that are read or written again at one time.
    pub settling_slots: Arc<Semaphore>,
    /// The source of bundles, if there is a flight recorder.
    pub bundles: Option<Arc<dyn BundleSource>>,
    pub limits: request::RequestLimits,
}

impl Extender {
    /// An extender that accepts reports from any client: for loopback.
    pub fn new(
        state: Arc<ServerState>,
        control_plane: Arc<dyn ControlPlane>,
        limits: request::RequestLimits,
    ) -> Self {
        Self {
            state,
            control_plane,
            board: Arc::default(),
            agent_auth: reports::AgentAuth::Anyone,
            page_auth: page_auth::PageAuth::Anyone,
            pages: operators::PageLimits::default(),
            gpu_series: GpuSeries::default(),
            live: Arc::default(),
            report_bodies: Arc::default(),
            journal: Arc::default(),
            autoscaling: Arc::default(),
            writes: TaskTracker::new(),
            settling_slots: Arc::new(Semaphore::new(bind::MAX_CONCURRENT_SETTLING)),
            bundles: None,
            limits,
        }
    }

    /// Takes reports only from authenticated agents.
    pub fn with_agent_auth(self, agent_auth: reports::AgentAuth) -> Self {
        Self { agent_auth, ..self }
    }

    /// Sets whether the metrics name each GPU.
    pub(crate) fn with_gpu_series(self, gpu_series: GpuSeries) -> Self {
        Self { gpu_series, ..self }
    }

    /// Serves bundles from this source.
    pub(crate) fn with_bundles(self, bundles: Option<Arc<dyn BundleSource>>) -> Self {
        Self { bundles, ..self }
    }

    /// Serves pages only to clients that may see them.
    pub fn with_page_auth(self, page_auth: page_auth::PageAuth) -> Self {
        Self { page_auth, ..self }
    }
}
