//! Sends spans to a collector, by OTLP over HTTP. A decision hands its spans over to a bounded queue and goes on; a thread of its
//! own encodes and sends them. What does not fit into the queue, or is not taken, is dropped and counted.

use super::Traces;
use super::trace_id::PodTraceIds;
use crate::TraceMetrics;
use http::Uri;
use hyper_util::client::legacy::connect::Connect;
use opentelemetry::Context;
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// A busy kube-scheduler binds some hundreds of pods a second, with about ten spans each: a second of them, in some megabytes.
const QUEUE_CAPACITY: usize = 4096;
/// What the SDKs send at once by default.
const MAX_BATCH: usize = 512;
/// The longest time that a span waits for others to be sent with it.
const BATCH_LINGER: Duration = Duration::from_secs(1);
/// The time for one batch with its retries: the OTLP exporters' default.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time for the last batch of a process that stops. The binds in progress may take that long as well.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two log lines about a collector that takes nothing.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// What collectors listen on with gRPC, which this does not speak.
const GRPC_PORT: u16 = 4317;

/// Where spans go.
#[derive(Debug, Clone)]
pub struct Collector {
    /// With the path `/v1/traces` or another one.
    pub endpoint: Uri,
    /// This replica, among those of its service.
    pub instance: String,
}

/// The exporter's thread. Dropped, it sends what is queued and ends.
#[derive(Debug)]
pub struct ExporterThread {
    stop: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("--otlp-endpoint {endpoint}: {error}")]
    Exporter { endpoint: Uri, error: String },
    #[error("--otlp-endpoint: no thread for the exporter: {0}")]
    Thread(#[from] std::io::Error),
}

/// Starts to export to a collector over such connections.
pub fn start<C>(
    collector: Collector,
    connector: C,
    metrics: &TraceMetrics,
) -> Result<(Traces, ExporterThread), TraceError>
where
    C: Connect + Clone + std::fmt::Debug + Send + Sync + 'static,
{
    let resource = resource(&collector.instance);
    let exporter = exporter(&collector.endpoint, connector, &resource)?;
    let (sender, queue) = channel(QUEUE_CAPACITY);
    let processor = SpanQueue {
        sender,
        metrics: metrics.clone(),
    };
    let provider = SdkTracerProvider::builder()
        .with_id_generator(PodTraceIds::default())
        .with_span_processor(processor)
        .with_resource(resource)
        .build();
    let traces = Traces(Some(Arc::new(provider.tracer("stowage"))));
    let stop = CancellationToken::new();
    let outbox = SpanSender {
        exporter,
        metrics: metrics.clone(),
        endpoint: collector.endpoint,
        last_logged: None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let stopped = stop.clone();
    let thread = std::thread::Builder::new().name("traces".into());
    let thread = thread.spawn(move || runtime.block_on(outbox.run(queue, stopped)))?;
    Ok((
        traces,
        ExporterThread {
            stop,
            thread: Some(thread),
        },
    ))
}

/// Attributes of every span; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` count for more.
fn resource(instance: &str) -> Resource {
    let attributes = [
        opentelemetry::KeyValue::new("service.name", "stowage"),
        opentelemetry::KeyValue::new("service.version", crate::build_info::VERSION),
        opentelemetry::KeyValue::new("service.instance.id", instance.to_owned()),
    ];
    let detected = Resource::builder().build();
    let is_named = |name: &str| {
        let found = detected.iter().find(|(key, _)| key.as_str() == name);
        found.is_some_and(|(_, value)| !value.as_str().starts_with("unknown_service"))
    };
    let missing = attributes
        .into_iter()
        .filter(|attribute| !is_named(attribute.key.as_str()));
    Resource::builder().with_attributes(missing).build()
}

fn exporter<C>(
    endpoint: &Uri,
    connector: C,
    resource: &Resource,
) -> Result<SpanExporter, TraceError>
where
    C: Connect + Clone + std::fmt::Debug + Send + Sync + 'static,
{
    let client = HyperClient::new(connector, EXPORT_TIMEOUT, None);
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(client)
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(endpoint.to_string())
        .with_timeout(EXPORT_TIMEOUT)
        .build();
    let mut exporter = exporter.map_err(|error| TraceError::Exporter {
        endpoint: endpoint.clone(),
        error: error.to_string(),
    })?;
    exporter.set_resource(resource);
    Ok(exporter)
}

/// Takes each span that has ended. Never waits.
#[derive(Debug)]
struct SpanQueue {
    sender: Sender<SpanData>,
    metrics: TraceMetrics,
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if let Err(TrySendError::Full(_) | TrySendError::Closed(_)) = self.sender.try_send(span) {
            self.metrics
                .dropped
                .with_label_values(&["queue-full"])
                .inc();
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Sends batch after batch.
struct SpanSender {
    exporter: SpanExporter,
    metrics: TraceMetrics,
    endpoint: Uri,
    /// When a failure was logged last, while the collector takes nothing.
    last_logged: Option<Instant>,
}

impl SpanSender {
    async fn run(mut self, mut queue: Receiver<SpanData>, stop: CancellationToken) {
        while let Some(batch) = next_batch(&mut queue, &stop).await {
            self.send(batch, &stop).await;
        }
        let mut remaining = Vec::new();
        while let Ok(span) = queue.try_recv() {
            remaining.push(span);
        }
        if !remaining.is_empty() {
            self.send(remaining, &stop).await;
        }
    }

    async fn send(&mut self, batch: Vec<SpanData>, stop: &CancellationToken) {
        let count = batch.len() as u64;
        let too_long = async {
            tokio::select! {
                () = tokio::time::sleep(EXPORT_TIMEOUT) => EXPORT_TIMEOUT,
                () = async { stop.cancelled().await; tokio::time::sleep(SHUTDOWN_TIMEOUT).await } => SHUTDOWN_TIMEOUT,
            }
        };
        let failed = tokio::select! {
            exported = self.exporter.export(batch) => exported.err().map(|error| error.to_string()),
            after = too_long => Some(format!("no answer within {} s", after.as_secs())),
        };
        match failed {
            None => {
                self.metrics.exported.inc_by(count);
                if self.last_logged.take().is_some() {
                    info!(collector = %self.endpoint, "spans are exported again");
                }
            }
            Some(error) => {
                self.metrics
                    .dropped
                    .with_label_values(&["export-failed"])
                    .inc_by(count);
                self.log_failure(&error);
            }
        }
    }

    fn log_failure(&mut self, error: &str) {
        if self
            .last_logged
            .is_some_and(|logged_at| logged_at.elapsed() < LOG_INTERVAL)
        {
            return;
        }
        self.last_logged = Some(Instant::now());
        let hint = match self.endpoint.port_u16() {
            Some(GRPC_PORT) => {
                "; port 4317 is gRPC's, and this is OTLP over HTTP, by default on 4318"
            }
            _ => "",
        };
        warn!(
            collector = %self.endpoint,
            "spans are dropped, and nothing else is affected: {error}{hint}"
        );
    }
}

/// A full batch, or the spans that came within [`BATCH_LINGER`] of the first; `None` once the exporter stops.
async fn next_batch(
    queue: &mut Receiver<SpanData>,
    stop: &CancellationToken,
) -> Option<Vec<SpanData>> {
    let mut batch = Vec::new();
    tokio::select! {
        biased;
        () = stop.cancelled() => return None,
        received = queue.recv_many(&mut batch, MAX_BATCH) => if received == 0 { return None },
    }
    let linger = tokio::time::sleep(BATCH_LINGER);
    tokio::pin!(linger);
    while batch.len() < MAX_BATCH {
        let more = MAX_BATCH - batch.len();
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = &mut linger => break,
            received = queue.recv_many(&mut batch, more) => if received == 0 { break },
        }
    }
    Some(batch)
}

impl Drop for ExporterThread {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
