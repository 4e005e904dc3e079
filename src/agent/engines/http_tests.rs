//! Rounds over real loopback HTTP, at engines that behave and at pods that do not.

use super::EngineWatcher;
use super::address::{METRICS_PATH, METRICS_PORT};
use super::limits::EngineLimits;
use crate::pods::PodOnNode;
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::stream;
use parking_lot::Mutex;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use stowage_report::{EngineReport, EngineState, GpuReport, ProcessReport};
use stowage_scheduling::ids::{GpuUuid, PodKey, PodUid};
use stowage_scheduling::units::Millis;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

macro_rules! page {
    ($name:literal) => {
        include_str!(concat!(
            env!("CARGO_WORKSPACE_DIR"),
            "/tests/fixtures/engines/",
            $name,
            ".txt"
        ))
    };
}

/// Limits that a busy machine does not exceed, so that no delay is taken for an engine's fault; every round probes.
fn patient() -> EngineLimits {
    EngineLimits {
        connect_timeout: Duration::from_secs(20),
        response_timeout: Duration::from_secs(60),
        round_timeout: Duration::from_secs(60),
        max_engine_backoff: Duration::ZERO,
        max_guess_backoff: Duration::ZERO,
        ..EngineLimits::default()
    }
}

fn pod(name: &str, port: Option<u16>) -> PodOnNode {
    PodOnNode {
        uid: PodUid::parse(name).unwrap(),
        key: PodKey::parse("default", name).unwrap(),
        ip: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        labels: BTreeMap::new(),
        annotations: port
            .map(|port| (METRICS_PORT.to_owned(), port.to_string()))
            .into_iter()
            .collect(),
        ports: Vec::new(),
        containers: BTreeMap::new(),
        is_too_large: false,
        written_limit: None,
        devices: None,
        granted_vram: None,
        wants_gpu: true,
        is_terminating: false,
        is_ready: false,
    }
}

struct StubServer {
    port: u16,
    task: JoinHandle<()>,
    shutdown: oneshot::Sender<()>,
}

async fn serve(router: Router) -> StubServer {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    let (shutdown, told) = oneshot::channel::<()>();
    let told = async { told.await.expect("a server is kept to the end of its test") };
    let task = tokio::spawn(async {
        axum::serve(listener, service)
            .with_graceful_shutdown(told)
            .await
            .unwrap()
    });
    StubServer {
        port,
        task,
        shutdown,
    }
}

impl StubServer {
    /// Until its port and its connections are closed.
    async fn stop(self) {
        self.shutdown.send(()).unwrap();
        self.task.await.unwrap();
    }
}

/// An engine whose pages a test may change; every other path is answered 404.
#[derive(Clone, Default)]
struct StubPages(Arc<Mutex<BTreeMap<&'static str, (u16, String)>>>);

impl StubPages {
    fn set(&self, path: &'static str, status: u16, body: &str) -> &Self {
        self.0.lock().insert(path, (status, body.to_owned()));
        self
    }

    async fn serve(&self) -> StubServer {
        let pages = self.clone();
        serve(Router::new().fallback(move |uri: Uri| async move { pages.answer(&uri) })).await
    }

    fn answer(&self, uri: &Uri) -> Response {
        match self.0.lock().get(uri.path()) {
            Some((status, body)) => {
                (StatusCode::from_u16(*status).unwrap(), body.clone()).into_response()
            }
            None => StatusCode::NOT_FOUND.into_response(),
        }
    }
}

async fn round(engines: &mut EngineWatcher, pods: &[PodOnNode]) -> Vec<EngineReport> {
    engines.round(pods, &[]).await.engines
}

/// The report of the only pod.
async fn only(engines: &mut EngineWatcher, pod: &PodOnNode) -> EngineReport {
    let mut reports = round(engines, std::slice::from_ref(pod)).await;
    assert_eq!(reports.len(), 1, "{reports:?}");
    reports.remove(0)
}

#[tokio::test]
async fn an_engine_is_followed_from_its_start_to_its_end() {
    let pages = StubPages::default();
    let server = pages.serve().await;
    let (mut engines, mut pod) = (
        EngineWatcher::new(patient()),
        pod("engine", Some(server.port)),
    );
    assert_eq!(only(&mut engines, &pod).await.state, EngineState::Starting);
    pages.set("/health", 503, "");
    assert_eq!(only(&mut engines, &pod).await.state, EngineState::Loading);
    pages.set("/metrics", 200, page!("vllm-0.12"));
    assert_eq!(only(&mut engines, &pod).await.state, EngineState::Loading);
    pages.set("/health", 200, "");
    let report = only(&mut engines, &pod).await;
    assert_eq!(
        (report.state, report.engine.as_str()),
        (EngineState::Serving, "vllm")
    );
    assert_eq!(
        report.model.unwrap().as_str(),
        "meta-llama/Llama-3.1-8B-Instruct"
    );
    assert_eq!(
        (report.kv_cache_usage, report.kv_cache_tokens),
        (Some(0.6342857142857143), Some(877_008))
    );
    assert_eq!(
        (report.waiting, report.running, report.problem),
        (Some(3), Some(21), None)
    );
    pages.set("/metrics", 200, page!("vllm-0.12-asleep"));
    let report = only(&mut engines, &pod).await;
    assert_eq!(
        (report.state, report.sleep_level),
        (EngineState::Sleeping, Some(1))
    );
    pod.is_terminating = true;
    assert_eq!(only(&mut engines, &pod).await.state, EngineState::Draining);
    pod.is_terminating = false;
    server.stop().await;
    let mut report = only(&mut engines, &pod).await;
    for _ in 0..10 {
        if report.state == EngineState::Unreachable {
            break;
        }
        // The first request may have gone down a connection that was just being closed.
        report = only(&mut engines, &pod).await;
    }
    assert_eq!(
        (report.state, report.sleep_level),
        (EngineState::Unreachable, Some(1)),
        "with its last figures"
    );
    assert!(report.problem.unwrap().contains("nothing listens"));
    assert_eq!(round(&mut engines, &[]).await, []);
}

#[tokio::test]
async fn an_engine_is_found_on_a_port_its_pod_declares() {
    let pages = StubPages::default();
    let server = pages
        .set("/metrics", 200, page!("sglang"))
        .set("/health", 200, "")
        .serve()
        .await;
    let mut pod = pod("engine", None);
    pod.ports = vec![server.port];
    let (recorded, seen) = (
        GpuUuid::parse("GPU-a").unwrap(),
        GpuUuid::parse("GPU-b").unwrap(),
    );
    pod.devices = Some(vec![recorded.clone()]);
    let mut engines = EngineWatcher::new(patient());
    let report = only(&mut engines, &pod).await;
    assert_eq!(
        (report.engine.as_str(), report.gpus),
        ("sglang", vec![recorded])
    );
    let report = engines
        .round(&[pod.clone()], &[gpu(seen.as_str(), &[("engine", None)])])
        .await
        .engines;
    assert_eq!(
        (report[0].state, &report[0].gpus),
        (EngineState::Serving, &vec![seen])
    );
}

#[tokio::test]
async fn a_pod_without_an_engine_is_not_reported() {
    let mut unlabelled_pod = pod("foreign", None);
    // No process of a test listens there.
    unlabelled_pod.ip = Some(IpAddr::V4(Ipv4Addr::new(127, 83, 21, 7)));
    let no_gpu = PodOnNode {
        wants_gpu: false,
        ..pod("no-gpu", Some(1))
    };
    let mut engines = EngineWatcher::new(patient());
    for _ in 0..10 {
        assert_eq!(
            round(&mut engines, &[unlabelled_pod.clone(), no_gpu.clone()]).await,
            []
        );
    }
}

#[tokio::test]
async fn llama_cpp_reports_its_kv_cache_size_on_another_endpoint() {
    let pages = StubPages::default();
    pages
        .set("/health", 503, "{\"error\":{}}")
        .set("/metrics", 503, "{\"error\":{}}");
    let server = pages.serve().await;
    let (mut engines, pod) = (
        EngineWatcher::new(patient()),
        pod("engine", Some(server.port)),
    );
    assert_eq!(only(&mut engines, &pod).await.state, EngineState::Loading);
    pages
        .set("/metrics", 200, page!("llama-cpp"))
        .set("/health", 200, "{\"status\":\"ok\"}");
    pages.set(
        "/props",
        200,
        r#"{"default_generation_settings":{"n_ctx":8192,"id":0},"total_slots":4,"model_path":"m"}"#,
    );
    assert_eq!(only(&mut engines, &pod).await.kv_cache_tokens, None);
    let report = only(&mut engines, &pod).await;
    assert_eq!(
        (report.state, report.kv_cache_tokens),
        (EngineState::Serving, None),
        "its slots may share one"
    );
    pages.set(
        "/props",
        200,
        r#"{"default_generation_settings":{"n_ctx":8192},"total_slots":1}"#,
    );
    assert_eq!(
        only(&mut engines, &pod).await.kv_cache_tokens,
        None,
        "it is asked once"
    );
    let mut engines = EngineWatcher::new(patient());
    for _ in 0..2 {
        only(&mut engines, &pod).await;
    }
    assert_eq!(only(&mut engines, &pod).await.kv_cache_tokens, Some(8192));
}

#[tokio::test]
async fn an_answer_that_is_no_metrics_page_is_reported_as_such() {
    let pages = StubPages::default();
    let server = pages.serve().await;
    let (mut engines, mut pod) = (
        EngineWatcher::new(patient()),
        pod("engine", Some(server.port)),
    );
    pod.annotations
        .insert(METRICS_PATH.into(), "/metrics".into());
    for (status, body, shown) in [
        (
            200,
            "<!DOCTYPE html><html>Sign in</html>",
            "no metric of a known engine; first line: \"<!DOCTYPE html>",
        ),
        (200, "", "the page is empty"),
        (302, "", "answers 302 Found; redirects are not followed"),
        (
            404,
            "",
            "answers 404 Not Found; say where its metrics are with the annotation",
        ),
        (501, "", "started with --metrics"),
        (
            500,
            "vllm:kv_cache_usage_perc 0.5\n",
            "answers 500 Internal Server Error",
        ),
    ] {
        pages.set("/metrics", status, body);
        let report = only(&mut engines, &pod).await;
        let problem = report.problem.unwrap();
        assert!(problem.contains(shown), "{problem}");
        assert_eq!(
            (report.state, report.kv_cache_usage),
            (EngineState::Starting, None),
            "{problem}"
        );
    }
    pages.set("/health", 200, "");
    for (value, shown) in [("NaN", "NaN"), ("-1", "-1"), ("1e300", "1000000")] {
        pages.set(
            "/metrics",
            200,
            &format!("vllm:num_requests_waiting {value}\nvllm:num_requests_running 2\n"),
        );
        let report = only(&mut engines, &pod).await;
        assert_eq!((report.waiting, report.running), (None, Some(2)));
        assert!(
            report
                .problem
                .unwrap()
                .starts_with(&format!("vllm:num_requests_waiting is {shown}"))
        );
    }
}

#[tokio::test]
async fn a_metrics_page_is_cut_at_eight_mebibytes() {
    const CHUNK: &[u8] = &[b'a'; 1 << 20];
    let sent = Arc::new(AtomicUsize::new(0));
    let count = sent.clone();
    let endless = move || async move {
        Body::from_stream(stream::iter(0..500).map(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Infallible>(CHUNK)
        }))
    };
    let announced = || async {
        let body = Body::from_stream(stream::pending::<Result<&[u8], Infallible>>());
        Response::builder()
            .header("content-length", 500 << 20)
            .body(body)
            .unwrap()
    };
    use futures::StreamExt;
    let endless = serve(Router::new().route("/metrics", get(endless))).await;
    let announced = serve(Router::new().route("/metrics", get(announced))).await;
    let mut engines = EngineWatcher::new(patient());
    let pods = [
        pod("announced", Some(announced.port)),
        pod("endless", Some(endless.port)),
    ];
    for report in round(&mut engines, &pods).await {
        let problem = report.problem.unwrap();
        assert!(
            problem.contains("answers more than 8.0 MiB, which is no metrics page"),
            "{problem}"
        );
    }
    // What was read, and what the two sockets hold; not the rest.
    let sent = sent.load(Ordering::Relaxed);
    assert!((8..100).contains(&sent), "{sent} MiB were sent");
}

#[tokio::test]
async fn a_slow_metrics_page_times_out() {
    let drip = || async {
        // A byte of a good page at a time, forever.
        let bytes = stream::unfold(page!("vllm-0.12").bytes().cycle(), |mut bytes| async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            bytes
                .next()
                .map(|byte| (Ok::<_, Infallible>(vec![byte]), bytes))
        });
        Body::from_stream(bytes)
    };
    let server = serve(Router::new().route("/metrics", get(drip))).await;
    let limits = EngineLimits {
        response_timeout: Duration::from_millis(100),
        ..patient()
    };
    let report = only(
        &mut EngineWatcher::new(limits),
        &pod("engine", Some(server.port)),
    )
    .await;
    assert_eq!(report.kv_cache_usage, None);
    let problem = report.problem.unwrap();
    assert!(
        problem.contains("has not answered in full within 100ms"),
        "{problem}"
    );
}

#[tokio::test]
async fn an_engine_that_hangs_delays_no_other() {
    let hung = serve(Router::new().fallback(std::future::pending::<()>)).await;
    let pages = StubPages::default();
    let good = pages.set("/metrics", 200, page!("triton")).serve().await;
    // The hung one's answer would come long after the test has failed.
    let limits = EngineLimits {
        response_timeout: Duration::from_secs(600),
        round_timeout: Duration::from_millis(50),
        ..patient()
    };
    let mut engines = EngineWatcher::new(limits);
    let pods = [pod("good", Some(good.port)), pod("hung", Some(hung.port))];
    let rounds = async {
        loop {
            let reports = round(&mut engines, &pods).await;
            assert_eq!(reports[1].state, EngineState::Starting);
            if reports[0].state == EngineState::Serving && reports[0].age_millis > Millis(0) {
                return reports;
            }
        }
    };
    let reports = tokio::time::timeout(Duration::from_secs(120), rounds)
        .await
        .expect("rounds that end");
    assert_eq!(
        (reports[0].kv_cache_usage, reports[0].kv_cache_tokens),
        (Some(0.4375), Some(6272 * 64))
    );
}

#[tokio::test]
async fn a_page_whose_last_line_may_be_cut_is_read_to_the_line_before() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let _ = connection.read(&mut [0; 1024]).await;
            // Neither a length nor chunks: the end of the connection is the end of the page, of "… 12" here.
            let page =
                b"HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_running 7\nvllm:num_requests_waiting 1";
            let _ = connection.write_all(page).await;
        }
    });
    let report = only(
        &mut EngineWatcher::new(patient()),
        &pod("engine", Some(port)),
    )
    .await;
    assert_eq!((report.running, report.waiting), (Some(7), None));
}

#[tokio::test]
async fn connections_are_kept_between_rounds() {
    let peers = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = peers.clone();
    let server = serve(Router::new().fallback(
        move |ConnectInfo(peer): ConnectInfo<SocketAddr>| async move {
            seen.lock().insert(peer);
            page!("lmdeploy")
        },
    ))
    .await;
    let (mut opened, pod) = (Vec::new(), pod("engine", Some(server.port)));
    // Two in the first round, for metrics and health. On a machine that stands still between two rounds for as long as a
    // connection may lie idle it takes more, which does not happen in series after series.
    while opened.last().is_none_or(|opened| *opened > 2) {
        assert!(opened.len() < 5, "{opened:?} connections");
        peers.lock().clear();
        let mut engines = EngineWatcher::new(patient());
        for _ in 0..20 {
            only(&mut engines, &pod).await;
        }
        opened.push(peers.lock().len());
    }
}

#[tokio::test]
async fn an_unreadable_metrics_port_is_reported_with_the_remedy() {
    let mut pod = pod("engine", Some(1));
    pod.annotations.insert(METRICS_PORT.into(), "http".into());
    let report = only(&mut EngineWatcher::new(patient()), &pod).await;
    assert_eq!(
        (report.state, report.engine.as_str()),
        (EngineState::Starting, "unknown")
    );
    assert!(
        report
            .problem
            .unwrap()
            .contains("\"http\"; write a port from 1 to 65535")
    );
}

/// A pod of its own address, on which stub engines listen at the same ports as other pods'.
async fn serve_pages(pages: &[(&'static str, u16, &str)]) -> StubServer {
    let stub = StubPages::default();
    for (path, status, body) in pages {
        stub.set(path, *status, body);
    }
    stub.serve().await
}

fn reported(reports: &[EngineReport]) -> Vec<(&str, Option<f64>, Option<u64>)> {
    reports
        .iter()
        .map(|report| {
            (
                report.engine.as_str(),
                report.kv_cache_usage,
                report.waiting,
            )
        })
        .collect()
}

#[tokio::test]
async fn each_port_of_a_pod_that_answers_is_an_engine_of_its_own() {
    let idle = serve_pages(&[
        ("/metrics", 200, page!("vllm-dp-rank0")),
        ("/health", 200, ""),
    ])
    .await;
    let full = serve_pages(&[
        ("/metrics", 200, page!("vllm-dp-rank1")),
        ("/health", 200, ""),
    ])
    .await;
    for labels in [
        BTreeMap::new(),
        BTreeMap::from([("llm-d.ai/engine-type".into(), "vllm".into())]),
    ] {
        let pod = PodOnNode {
            ports: vec![idle.port, full.port],
            labels,
            ..pod("dp", None)
        };
        let mut engines = EngineWatcher::new(patient());
        let mut reports = Vec::new();
        for _ in 0..10 {
            reports = round(&mut engines, std::slice::from_ref(&pod)).await;
        }
        let mut said = reported(&reports);
        said.sort_by_key(|(_, _, waiting)| *waiting);
        assert_eq!(
            said,
            [("vllm", Some(0.0), Some(0)), ("vllm", Some(0.99), Some(40))]
        );
    }
}

#[tokio::test]
async fn a_sidecar_that_is_healthy_hides_no_engine() {
    let sidecar = serve_pages(&[("/health", 200, "")]).await;
    let envoy = serve_pages(&[
        ("/health", 200, ""),
        ("/metrics", 200, "envoy_requests_total 5\n"),
    ])
    .await;
    let engine = serve_pages(&[
        ("/metrics", 200, page!("vllm-loaded")),
        ("/health", 200, ""),
    ])
    .await;
    for other in [sidecar.port, envoy.port] {
        for labels in [
            BTreeMap::new(),
            BTreeMap::from([("llm-d.ai/engine-type".into(), "vllm".into())]),
        ] {
            let pod = PodOnNode {
                ports: vec![other, engine.port],
                labels,
                ..pod("sidecar", None)
            };
            let mut engines = EngineWatcher::new(patient());
            let mut reports = Vec::new();
            for _ in 0..10 {
                reports = round(&mut engines, std::slice::from_ref(&pod)).await;
            }
            assert_eq!(reported(&reports), [("vllm", Some(0.91), Some(5))]);
        }
    }
}

#[tokio::test]
async fn an_engine_whose_page_is_at_another_path_is_found() {
    for (path, health, page, engine) in [
        ("/v1/metrics", "/v1/health/ready", page!("nim-1.x"), "nim"),
        ("/v1/metrics", "/health", page!("vllm-loaded"), "vllm"),
        (
            "/prometheus/metrics",
            "/health",
            page!("trtllm-serve"),
            "trtllm-serve",
        ),
    ] {
        let server = serve_pages(&[(path, 200, page), (health, 200, "")]).await;
        let pod = PodOnNode {
            ports: vec![server.port],
            ..pod("engine", None)
        };
        let mut engines = EngineWatcher::new(patient());
        let mut reports = Vec::new();
        for _ in 0..10 {
            reports = round(&mut engines, std::slice::from_ref(&pod)).await;
        }
        let said: Vec<_> = reports
            .iter()
            .map(|report| (report.engine.as_str(), report.state))
            .collect();
        assert_eq!(said, [(engine, EngineState::Serving)], "{path}");
    }
}

/// A server with a certificate that nobody has signed; it asks for one of its client, if it is so told.
async fn serve_tls(page: &'static str, asks_for_certificate: bool) -> u16 {
    use rustls::crypto::ring::default_provider;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, ServerConfig};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let made = rcgen::generate_simple_self_signed(["engine".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .unwrap();
    let builder = if asks_for_certificate {
        builder.with_client_cert_verifier(verifier)
    } else {
        builder.with_no_client_auth()
    };
    let config = builder.with_single_cert(vec![certificate], key).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (connection, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut connection) = acceptor.accept(connection).await else {
                    return;
                };
                let mut request = [0; 1024];
                let read = connection.read(&mut request).await.unwrap_or_default();
                let is_page = request[..read].starts_with(b"GET /metrics ");
                let body = if is_page { page } else { "" };
                let head = format!(
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                    body.len()
                );
                let _ = connection.write_all(head.as_bytes()).await;
                let _ = connection.write_all(body.as_bytes()).await;
                let _ = connection.shutdown().await;
            });
        }
    });
    port
}

#[tokio::test]
async fn an_engine_behind_tls_is_read_whoever_signed_its_certificate() {
    let port = serve_tls(page!("vllm-loaded"), false).await;
    let guessed = PodOnNode {
        ports: vec![port],
        ..pod("guessed", None)
    };
    let mut annotated = pod("annotated", None);
    annotated
        .annotations
        .insert("prometheus.io/port".into(), port.to_string());
    annotated
        .annotations
        .insert("prometheus.io/scheme".into(), "https".into());
    for pod in [pod("declared", Some(port)), guessed, annotated] {
        let mut engines = EngineWatcher::new(patient());
        let mut reports = Vec::new();
        for _ in 0..5 {
            reports = round(&mut engines, std::slice::from_ref(&pod)).await;
        }
        assert_eq!(
            reported(&reports),
            [("vllm", Some(0.91), Some(5))],
            "{}",
            pod.key
        );
        assert_eq!(
            (reports[0].state, &reports[0].problem),
            (EngineState::Serving, &None)
        );
    }
}

#[tokio::test]
async fn an_engine_that_requires_a_client_certificate_is_reported() {
    let port = serve_tls("", true).await;
    let report = only(
        &mut EngineWatcher::new(patient()),
        &pod("engine", Some(port)),
    )
    .await;
    let problem = report.problem.unwrap();
    assert!(
        problem.contains("TLS") && problem.contains("ertificate"),
        "{problem}"
    );
}

#[tokio::test]
async fn a_port_that_breaks_off_is_not_taken_for_one_behind_tls() {
    use tokio::io::AsyncReadExt;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (mut connection, _) = listener.accept().await.unwrap();
            let _ = connection.read(&mut [0; 1024]).await;
        }
    });
    let report = only(
        &mut EngineWatcher::new(patient()),
        &pod("engine", Some(port)),
    )
    .await;
    let problem = report.problem.unwrap();
    assert!(
        problem.contains("http://") && problem.contains("broke off"),
        "{problem}"
    );
}

#[tokio::test]
async fn a_page_never_overrides_the_model_that_its_pod_names() {
    let served = page!("vllm-loaded").replace("Qwen/Qwen3-32B", "/mnt/models");
    let server = serve_pages(&[("/metrics", 200, &served), ("/health", 200, "")]).await;
    let mut engine = pod("engine", Some(server.port));
    assert_eq!(
        only(&mut EngineWatcher::new(patient()), &engine)
            .await
            .model
            .unwrap()
            .as_str(),
        "/mnt/models"
    );
    engine
        .labels
        .insert("llm-d.ai/model".into(), "qwen3".into());
    assert_eq!(
        only(&mut EngineWatcher::new(patient()), &engine)
            .await
            .model
            .unwrap()
            .as_str(),
        "qwen3"
    );
    engine
        .annotations
        .insert("stowage.dev/model".into(), "Qwen/Qwen3-32B".into());
    assert_eq!(
        only(&mut EngineWatcher::new(patient()), &engine)
            .await
            .model
            .unwrap()
            .as_str(),
        "Qwen/Qwen3-32B"
    );
}

#[tokio::test]
async fn a_pod_with_a_gpu_of_which_no_engine_can_be_read_is_named() {
    let unknown = serve_pages(&[("/", 200, "Ollama is running")]).await;
    let router = serve_pages(&[("/metrics", 200, page!("prodstack-router"))]).await;
    let gpu = GpuUuid::parse("GPU-a").unwrap();
    let known = |name: &str, ports: Vec<u16>| PodOnNode {
        ports,
        devices: Some(vec![gpu.clone()]),
        is_ready: true,
        ..pod(name, None)
    };
    let silent = PodOnNode {
        ip: Some(IpAddr::V4(Ipv4Addr::new(127, 83, 21, 7))),
        ..known("silent", Vec::new())
    };
    let starting = PodOnNode {
        is_ready: false,
        ..known("starting", Vec::new())
    };
    let elsewhere = PodOnNode {
        devices: None,
        ..known("elsewhere", Vec::new())
    };
    let pods = [
        known("ollama", vec![unknown.port]),
        known("router", vec![router.port]),
        silent,
        starting,
        elsewhere,
    ];
    let mut engines = EngineWatcher::new(patient());
    let mut found = engines.round(&pods, &[]).await;
    for _ in 0..20 {
        found = engines.round(&pods, &[]).await;
    }
    assert_eq!(found.engines, []);
    let said: Vec<_> = found
        .unread
        .iter()
        .map(|one| (one.pod.as_str(), one.declares_port, &one.gpus))
        .collect();
    let on = vec![gpu.clone()];
    assert_eq!(
        said,
        [
            ("ollama", true, &on),
            ("router", true, &on),
            ("silent", false, &on)
        ]
    );
    let reason = |index: usize| &*found.unread[index].reason;
    assert!(
        reason(1).contains("vLLM's production stack, which is no engine"),
        "{}",
        reason(1)
    );
    assert!(reason(2).contains("nothing listens at"), "{}", reason(2));
}

/// A GPU with processes: of each the pod, and the container.
fn gpu(uuid: &str, processes: &[(&str, Option<&str>)]) -> GpuReport {
    let mut gpu: GpuReport = serde_json::from_value(
        json!({ "uuid": uuid, "index": 0, "model": "H100", "totalBytes": 1 }),
    )
    .unwrap();
    let process = |(pod, container): &(&str, Option<&str>)| ProcessReport {
        pid: 1,
        used_bytes: None,
        pod: PodUid::parse(pod).ok(),
        container: container.map(Arc::from),
    };
    gpu.processes = Some(processes.iter().map(process).collect());
    gpu
}

async fn two_loaded_engines() -> [StubServer; 2] {
    let pages = [
        ("/metrics", 200, page!("vllm-loaded")),
        ("/health", 200, ""),
    ];
    [serve_pages(&pages).await, serve_pages(&pages).await]
}

/// After enough rounds to find both, the port and the GPUs of each engine of a pod whose ports two containers declare.
async fn engines_on(
    servers: &[StubServer; 2],
    gpus: &[GpuReport],
) -> Vec<(Option<u16>, Vec<String>)> {
    let ports = servers.iter().map(|server| server.port).collect();
    let containers = servers
        .iter()
        .zip(["one", "two"])
        .map(|(server, name)| (server.port, name.into()))
        .collect();
    let pod = PodOnNode {
        ports,
        containers,
        ..pod("double", None)
    };
    let mut engines = EngineWatcher::new(patient());
    let mut reports = Vec::new();
    for _ in 0..5 {
        reports = engines
            .round(std::slice::from_ref(&pod), gpus)
            .await
            .engines;
    }
    let on = |report: &EngineReport| report.gpus.iter().map(ToString::to_string).collect();
    reports
        .iter()
        .map(|report| (report.port, on(report)))
        .collect()
}

#[tokio::test]
async fn a_proxy_before_an_engine_does_not_double_its_queue() {
    let servers = two_loaded_engines().await;
    let on_a = || vec!["GPU-a".to_owned()];
    for (engine, container) in [(0, "one"), (1, "two")] {
        let gpus = [gpu("GPU-a", &[("double", Some(container))])];
        assert_eq!(
            engines_on(&servers, &gpus).await,
            [(Some(servers[engine].port), on_a())],
            "{container}"
        );
    }
    let unsaid = engines_on(&servers, &[gpu("GPU-a", &[("double", None)])]).await;
    assert_eq!(
        unsaid.len(),
        2,
        "which of them is the proxy is not known: {unsaid:?}"
    );
}

#[tokio::test]
async fn engines_of_several_containers_are_on_the_gpus_of_their_own_processes() {
    let servers = two_loaded_engines().await;
    let mut ports = servers
        .iter()
        .map(|server| Some(server.port))
        .collect::<Vec<_>>();
    ports.sort();
    let (a, b) = (
        gpu("GPU-a", &[("double", Some("one"))]),
        gpu("GPU-b", &[("double", Some("two"))]),
    );
    let of = |engines: Vec<(Option<u16>, Vec<String>)>| {
        assert_eq!(
            engines.iter().map(|(port, _)| *port).collect::<Vec<_>>(),
            ports
        );
        let on = |server: &StubServer| {
            engines
                .iter()
                .find(|(port, _)| *port == Some(server.port))
                .unwrap()
                .1
                .join(",")
        };
        servers.each_ref().map(on)
    };
    assert_eq!(
        of(engines_on(&servers, &[a.clone(), b.clone()]).await),
        ["GPU-a", "GPU-b"]
    );
    let c = gpu("GPU-c", &[("double", Some("a worker without a port"))]);
    assert_eq!(
        of(engines_on(&servers, &[a.clone(), b.clone(), c]).await),
        ["GPU-a,GPU-c", "GPU-b,GPU-c"],
        "either may be the engine of which the worker is a part"
    );
    let both = gpu("GPU-b", &[("double", Some("one")), ("double", Some("two"))]);
    assert_eq!(
        of(engines_on(&servers, &[a, both]).await),
        ["GPU-a,GPU-b", "GPU-b"]
    );
    let unsaid = [
        gpu("GPU-a", &[("double", None)]),
        gpu("GPU-b", &[("double", None)]),
    ];
    assert_eq!(
        of(engines_on(&servers, &unsaid).await),
        ["GPU-a,GPU-b", "GPU-a,GPU-b"]
    );
}

#[tokio::test]
async fn two_engines_with_like_figures_stay_two() {
    let page = |tokens: u64, waiting: u64, kv: f64| {
        format!(
            "vllm:generation_tokens_total{{model_name=\"m\"}} {tokens}\nvllm:num_requests_waiting{{model_name=\"m\"}} {waiting}\n\
             vllm:kv_cache_usage_perc{{model_name=\"m\"}} {kv}\n"
        )
    };
    let (one, other) = (StubPages::default(), StubPages::default());
    let mut servers = Vec::new();
    for (pages, tokens) in [(&one, 1000), (&other, 1020)] {
        servers.push(
            pages
                .set("/metrics", 200, &page(tokens, 3, 0.5))
                .set("/health", 200, "")
                .serve()
                .await,
        );
    }
    let ports = servers.iter().map(|server| server.port).collect();
    let pod = PodOnNode {
        ports,
        ..pod("ranks", None)
    };
    let mut engines = EngineWatcher::new(patient());
    for tokens in [2000, 3000, 4000] {
        round(&mut engines, std::slice::from_ref(&pod)).await;
        one.set("/metrics", 200, &page(tokens, 3, 0.5));
        other.set("/metrics", 200, &page(tokens + 20, 4, 0.52));
    }
    let reports = round(&mut engines, &[pod]).await;
    let waiting: BTreeSet<_> = reports.iter().map(|report| report.waiting).collect();
    assert_eq!(waiting, [Some(3), Some(4)].into(), "queues add up");
}

#[tokio::test]
async fn the_ports_that_an_annotation_lists_are_engines_from_the_start() {
    let engine = serve_pages(&[
        ("/metrics", 200, page!("vllm-loaded")),
        ("/health", 200, ""),
    ])
    .await;
    let mut pod = pod("listed", None);
    // Nothing listens at the other one yet.
    pod.annotations
        .insert(METRICS_PORT.into(), format!("{}, 1", engine.port));
    let mut engines = EngineWatcher::new(patient());
    round(&mut engines, std::slice::from_ref(&pod)).await;
    let reports = round(&mut engines, std::slice::from_ref(&pod)).await;
    let said: Vec<_> = reports
        .iter()
        .map(|report| (report.port, report.state))
        .collect();
    assert_eq!(
        said,
        [
            (None, EngineState::Starting),
            (Some(engine.port), EngineState::Serving)
        ]
    );
}
