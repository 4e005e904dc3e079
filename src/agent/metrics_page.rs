//! `stowage agent --metrics-listen`: what the latest round found, for Prometheus.
//!
//! The page has figures of GPUs and engines and names no pod, so it asks for no token; a NetworkPolicy says who may connect. It
//! costs the node little whatever a client does: few connections at a time, each for one request and a few seconds.

use super::nvml::GpuSensors;
use super::publish::{PublishOutcome, PublishState};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stowage_report::NodeReport;
use stowage_telemetry::agent::AgentMetrics;
use stowage_telemetry::listening;
use stowage_telemetry::scrape::CONTENT_TYPE;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tracing::debug;

/// Connections at a time: two Prometheus servers, and a person with curl.
const MAX_CONNECTIONS: usize = 4;
/// A connection is over by then, whatever it does: a page has some kilobytes.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection waits for its turn before it is closed.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(2);
/// Connections that wait for their turn. Further ones are closed at once.
const MAX_QUEUED_CONNECTIONS: usize = 16;
/// Pause after a failed accept: if the process has no descriptor left, one is free once a connection has ended.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What the page shows.
#[derive(Default)]
pub(crate) struct MetricsPage {
    metrics: AgentMetrics,
    latest: Mutex<Option<Arc<LatestRound>>>,
    /// The reports counted for each replica: accepted, and failed.
    report_counts: Mutex<BTreeMap<String, (u64, u64)>>,
}

struct LatestRound {
    report: NodeReport,
    sensors: GpuSensors,
}

impl MetricsPage {
    /// Records the report of a finished round.
    pub(crate) fn record_round(&self, report: &NodeReport, sensors: GpuSensors, took: Duration) {
        self.metrics.round_seconds.observe(took.as_secs_f64());
        *self.latest.lock() = Some(Arc::new(LatestRound {
            report: report.clone(),
            sensors,
        }));
    }

    /// Counts how each replica answered its latest report.
    pub fn record_published(&self, state: &PublishState) {
        let mut counted = self.report_counts.lock();
        for (name, replica) in &state.replicas {
            let now = (replica.accepted, replica.failed);
            // A replica that did not have its turn yet has no news.
            if counted.insert(name.clone(), now) == Some(now) {
                continue;
            }
            self.metrics
                .reports
                .with_label_values(&[replica.latest.code()])
                .inc();
            if replica.latest == PublishOutcome::Accepted {
                let now = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default();
                self.metrics.last_accepted.set(now.as_secs_f64());
            }
        }
        counted.retain(|name, _| state.replicas.contains_key(name));
    }

    fn render_response(&self) -> Response {
        let latest = self.latest.lock().clone();
        let text = self.metrics.render(
            latest
                .as_deref()
                .map(|round| (&round.report, &round.sensors)),
        );
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
    }
}

/// Serves the metrics page until the future is dropped.
pub async fn serve(listener: TcpListener, metrics_page: Arc<MetricsPage>) {
    let router = Router::new()
        .route(
            "/metrics",
            get(move || async move { metrics_page.render_response() }),
        )
        .fallback(|| async {
            (
                StatusCode::NOT_FOUND,
                "this is the agent's address for /metrics\n",
            )
        });
    let router = match listener.local_addr() {
        Ok(address) => listening::with_browser_guard(router, address.ip()),
        Err(_) => router,
    };
    let (connection_permits, queue_permits) = (
        Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        Arc::new(Semaphore::new(MAX_QUEUED_CONNECTIONS)),
    );
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                debug!(%error, "no connection for metrics");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
                continue;
            }
        };
        let Ok(queued) = queue_permits.clone().try_acquire_owned() else {
            continue;
        };
        let (permits, router) = (connection_permits.clone(), router.clone());
        tokio::spawn(async move {
            let turn = tokio::time::timeout(QUEUE_TIMEOUT, permits.acquire_owned()).await;
            drop(queued);
            if let Ok(Ok(_turn)) = turn {
                // A client that is late loses its connection, and learns so.
                let _ = tokio::time::timeout(CONNECTION_TIMEOUT, serve_one_request(stream, router))
                    .await;
            }
        });
    }
}

async fn serve_one_request(stream: TcpStream, router: Router) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = connection.await {
        debug!(%error, "a scrape broke off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publish::ReplicaState;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn started() -> (std::net::SocketAddr, Arc<MetricsPage>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, page) = (
            listener.local_addr().unwrap(),
            Arc::new(MetricsPage::default()),
        );
        tokio::spawn(serve(listener, page.clone()));
        (address, page)
    }

    async fn get(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_silent_client_does_not_block_other_scrapes() {
        let (address, _page) = started().await;
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS - 1 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        for _ in 0..100 {
            let answer = get(address, "/metrics").await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
            assert!(
                answer.contains("version=0.0.4") && answer.contains("\nstowage_build_info{"),
                "{answer}"
            );
        }
        assert!(get(address, "/").await.starts_with("HTTP/1.1 404"));
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_closed() {
        let (address, _page) = started().await;
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS + MAX_QUEUED_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        // Which of them is accepted first is the kernel's choice: one more finds no turn.
        let mut late = TcpStream::connect(address).await.unwrap();
        let mut answer = Vec::new();
        let closed =
            tokio::time::timeout(Duration::from_secs(60), late.read_to_end(&mut answer)).await;
        assert!(closed.is_ok() && answer.is_empty(), "{answer:?}");
    }

    #[test]
    fn each_answer_of_a_replica_counts_once() {
        let page = MetricsPage::default();
        let count = |outcome: &str| page.metrics.reports.with_label_values(&[outcome]).get();
        let state = |latest: PublishOutcome, accepted, failed| PublishState {
            replicas: [(
                "a".to_owned(),
                ReplicaState {
                    latest,
                    accepted,
                    failed,
                },
            )]
            .into(),
            ..PublishState::default()
        };
        page.record_published(&state(PublishOutcome::Accepted, 1, 0));
        assert!(page.metrics.last_accepted.get() > 0.0);
        page.record_published(&state(PublishOutcome::Accepted, 1, 0));
        page.record_published(&state(
            PublishOutcome::Unreachable {
                reason: "gone".into(),
            },
            1,
            1,
        ));
        assert_eq!((count("accepted"), count("unreachable")), (1, 1));
    }
}
