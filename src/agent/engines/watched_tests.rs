//! When an engine is probed and what is reported of it, without a network: answers and times are arguments.

use super::address::{
    AddressOwner, EngineEvidence, MAX_ENGINE_PORTS, METRICS_PATH, METRICS_PORT, MetricsAddress,
    Scheme, engine_query,
};
use super::fetch::FetchError;
use super::limits::EngineLimits;
use super::probe::{
    EngineFigures, EngineHealth, EngineProbe, MetricsError, ProbeKind, ProbeResult, SecondProbe,
};
use super::watched::WatchedEngine;
use crate::pods::PodOnNode;
use http::{StatusCode, Uri};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use stowage_report::engine_metrics::{Engine, parse_page};
use stowage_report::{EngineReport, EngineState};
use stowage_scheduling::engines::DECLARATIONS;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::units::Millis;
use tokio::time::Instant;

const IP: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

pub(super) fn pod(
    labels: &[(&str, &str)],
    annotations: &[(&str, &str)],
    ports: &[u16],
) -> PodOnNode {
    let map = |pairs: &[(&str, &str)]| {
        pairs
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect()
    };
    PodOnNode {
        uid: PodUid::parse("uid-1").unwrap(),
        key: PodKey::parse("default", "engine-1").unwrap(),
        ip: Some(IP),
        labels: map(labels),
        annotations: map(annotations),
        ports: ports.to_vec(),
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

fn addresses(pod: &PodOnNode, owner: AddressOwner) -> Vec<String> {
    let sought = engine_query(pod, owner).unwrap();
    sought
        .addresses
        .iter()
        .map(|address| format!("{}{}", address.port, address.path))
        .collect()
}

#[test]
fn a_pods_own_metrics_address_has_precedence_over_engines_defaults() {
    let prometheus = [("prometheus.io/port", "9400"), ("prometheus.io/path", "/m")];
    let own = [
        (METRICS_PORT, "9000"),
        (METRICS_PATH, "/own"),
        prometheus[0],
        prometheus[1],
    ];
    let sglang = [("llm-d.ai/engine-type", "sglang")];
    let of = |labels: &[_], annotations: &[_], ports: &[u16]| {
        addresses(&pod(labels, annotations, ports), AddressOwner::Pod)
    };
    assert_eq!(of(&sglang, &own, &[8000]), ["9000/own"]);
    assert_eq!(
        of(&sglang, &prometheus, &[8000])[..4],
        ["9400/m", "30000/metrics", "9400/metrics", "8000/metrics"]
    );
    assert_eq!(
        of(&[("llm-d.ai/engine-type", "trtllm-serve")], &[], &[]),
        ["8000/prometheus/metrics"]
    );
    assert_eq!(
        of(&sglang, &[(METRICS_PATH, "/own")], &[30000, 30001]),
        ["30000/own", "30001/own"]
    );
    let guesses = of(&[], &[], &[7777]);
    assert_eq!(
        guesses[..4],
        [
            "7777/metrics",
            "7777/prometheus/metrics",
            "7777/v1/metrics",
            "8000/metrics"
        ]
    );
    for one in &DECLARATIONS {
        assert!(
            one.ports
                .iter()
                .all(|port| guesses.contains(&format!("{port}{}", one.path))),
            "{}",
            one.name
        );
    }
}

#[test]
fn a_port_that_another_pod_may_have_is_not_guessed() {
    assert_eq!(
        addresses(&pod(&[], &[], &[7777]), AddressOwner::Shared),
        ["7777/metrics", "7777/prometheus/metrics", "7777/v1/metrics"]
    );
    assert_eq!(
        addresses(&pod(&[], &[], &[]), AddressOwner::Shared),
        [""; 0]
    );
}

#[test]
fn an_invalid_annotation_is_reported() {
    for (key, value) in [
        (METRICS_PORT, "0"),
        (METRICS_PORT, "65536"),
        (METRICS_PORT, "http"),
        (METRICS_PORT, "8000,"),
        (METRICS_PORT, "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17"),
        (METRICS_PATH, "metrics"),
        (METRICS_PATH, "/a b"),
    ] {
        let error = engine_query(&pod(&[], &[(key, value)], &[]), AddressOwner::Pod)
            .unwrap_err()
            .to_string();
        assert!(error.contains(key) && error.contains(value), "{error}");
    }
}

/// An engine under watch, and a clock.
struct Story {
    pod: PodOnNode,
    watched: WatchedEngine,
    limits: EngineLimits,
    now: Instant,
}

impl Story {
    fn new(pod: PodOnNode) -> Self {
        let now = Instant::now();
        let sought = engine_query(&pod, AddressOwner::Pod).unwrap();
        Self {
            watched: WatchedEngine::new(sought, now),
            pod,
            limits: EngineLimits::default(),
            now,
        }
    }

    fn declared() -> Self {
        Self::new(pod(&[("llm-d.ai/engine-type", "vllm")], &[], &[]))
    }

    fn later(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
    }

    fn due(&mut self) -> Option<EngineProbe> {
        self.watched
            .next_probe(&self.pod, IP, self.now, &self.limits)
    }

    fn answer(&mut self, page: Result<&str, MetricsError>, health: Option<EngineHealth>) {
        let visit = self.due().expect("it is time to ask");
        let at = match &visit.probe_kind {
            ProbeKind::Metrics(address, _) => address.clone(),
            ProbeKind::Search(addresses) => addresses[0].clone(),
        };
        let page = page.map(|page| EngineFigures {
            address: at,
            figures: parse_page(page.as_bytes(), None).unwrap(),
        });
        let answer = ProbeResult {
            sent_at: self.now,
            figures: page,
            health,
            properties: None,
        };
        self.watched.record(&visit.probe_kind, answer, &self.limits);
    }

    fn report(&self) -> EngineReport {
        let report = self
            .watched
            .report(&self.pod, Vec::new(), self.now, &self.limits);
        report.expect("it is known for an engine")
    }

    fn state(&self) -> EngineState {
        self.report().state
    }
}

const PAGE: &str = "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting 3\n";

fn uri() -> Uri {
    Uri::from_static("http://127.0.0.1:8000/metrics")
}

fn refused() -> MetricsError {
    FetchError::Refused(uri()).into()
}

fn timed_out() -> MetricsError {
    FetchError::TimedOut(uri(), Duration::from_millis(800)).into()
}

fn not_ready() -> MetricsError {
    FetchError::Status(uri(), StatusCode::SERVICE_UNAVAILABLE).into()
}

#[test]
fn an_engine_starts_loads_serves_and_drains() {
    let mut story = Story::declared();
    assert_eq!(story.state(), EngineState::Starting);
    story.answer(Err(refused()), Some(EngineHealth::Unclear));
    assert_eq!(story.state(), EngineState::Starting);
    story.later(2000);
    story.answer(Err(not_ready()), Some(EngineHealth::NotReady));
    assert_eq!(story.state(), EngineState::Loading);
    story.later(2000);
    story.answer(Ok(PAGE), Some(EngineHealth::NotReady));
    assert_eq!(
        story.state(),
        EngineState::Loading,
        "a page alone does not make it ready"
    );
    story.later(1000);
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    assert_eq!(story.state(), EngineState::Serving);
    assert_eq!(story.report().kv_cache_usage, Some(0.5));
    story.later(1000);
    story.answer(
        Ok("vllm:engine_sleep_state{sleep_state=\"discard_all\"} 1\n"),
        None,
    );
    assert_eq!(
        (story.state(), story.report().sleep_level),
        (EngineState::Sleeping, Some(2))
    );
    story.pod.is_terminating = true;
    assert_eq!(story.state(), EngineState::Draining);
}

#[test]
fn health_is_asked_until_it_serves_and_again_when_its_metrics_fail() {
    let mut story = Story::declared();
    let asks_health = |story: &mut Story| match story.due().expect("it is time").probe_kind {
        ProbeKind::Metrics(_, SecondProbe::Health(address)) => {
            address.port == 8000 && address.path == "/health"
        }
        _ => false,
    };
    assert!(asks_health(&mut story));
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    assert!(!asks_health(&mut story));
    story.answer(Err(timed_out()), None);
    story.later(1000);
    assert!(asks_health(&mut story));
    story.answer(Ok(PAGE), Some(EngineHealth::Unclear));
    assert!(
        !asks_health(&mut story),
        "an engine without a health page serves if its metrics are there"
    );
    assert_eq!(story.state(), EngineState::Serving);
}

#[test]
fn figures_of_an_engine_that_hangs_grow_old_and_are_dropped() {
    let mut story = Story::declared();
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    for _ in 0..15 {
        story.later(2000);
        story.answer(Err(timed_out()), Some(EngineHealth::Unclear));
    }
    let report = story.report();
    assert_eq!(
        (report.state, report.kv_cache_usage),
        (EngineState::Serving, Some(0.5))
    );
    assert_eq!(report.age_millis, Millis(30_000));
    assert!(
        report
            .problem
            .unwrap()
            .contains("has not answered in full within 800ms")
    );
    story.later(1);
    let report = story.report();
    assert_eq!(
        (report.state, report.kv_cache_usage),
        (EngineState::Unreachable, None)
    );
    assert_eq!((report.waiting, report.age_millis), (None, Millis(0)));
    assert_eq!(report.engine, "vllm");
}

#[test]
fn an_engine_whose_port_is_closed_is_unreachable_at_once() {
    let mut story = Story::declared();
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    story.later(1000);
    story.answer(Err(refused()), None);
    let report = story.report();
    assert_eq!(
        (report.state, report.kv_cache_usage),
        (EngineState::Unreachable, Some(0.5))
    );
    assert_eq!(report.age_millis, Millis(1000));
    assert!(
        report
            .problem
            .unwrap()
            .contains("nothing listens at http://127.0.0.1:8000/metrics")
    );
}

#[test]
fn figures_of_the_previous_process_are_not_reported_for_the_next() {
    let mut story = Story::declared();
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    story.later(1000);
    story.answer(Err(not_ready()), None);
    assert_eq!(
        (story.state(), story.report().kv_cache_usage),
        (EngineState::Loading, None)
    );
}

/// A page of vLLM: what its requests took for `tokens` so far, in seconds by its name, and how many it works on.
fn page_with_latencies(seconds: f64, tokens: u64, running: u64) -> String {
    format!(
        "{PAGE}vllm:num_requests_running {running}\n\
         vllm:inter_token_latency_seconds_sum {seconds}\n\
         vllm:inter_token_latency_seconds_count {tokens}\n\
         vllm:inter_token_latency_seconds_bucket{{le=\"+Inf\"}} {tokens}\n"
    )
}

#[test]
fn a_latency_is_that_of_the_requests_between_two_pages() {
    let mut story = Story::declared();
    let mut second = |seconds, tokens, running| {
        let page = page_with_latencies(seconds, tokens, running);
        story.answer(Ok(&page), Some(EngineHealth::Ready));
        let report = story.report();
        story.later(1000);
        let mean = report.time_per_token.map(|latency| latency.mean.0);
        (mean, report.busy, report.problem)
    };
    assert_eq!(second(900.0, 100, 2), (None, None, None));
    assert_eq!(second(902.0, 200, 2), (Some(20_000), Some(1.0), None));
    assert_eq!(second(902.0, 200, 0), (Some(20_000), Some(0.5), None));
}

#[test]
fn latencies_in_milliseconds_are_left_out_and_the_report_says_so() {
    let mut story = Story::declared();
    for second in 0..3u32 {
        let page = page_with_latencies(f64::from(second) * 2000.0, second.into(), 2);
        story.answer(Ok(&page), Some(EngineHealth::Ready));
        story.later(1000);
    }
    let report = story.report();
    assert_eq!(report.time_per_token, None);
    let problem = report.problem.unwrap();
    assert!(problem.contains("not in seconds"), "{problem}");
}

#[test]
fn an_engine_without_metrics_serves_if_it_says_so() {
    let mut story = Story::declared();
    let not_found = FetchError::Status(uri(), StatusCode::NOT_FOUND);
    story.answer(Err(not_found.into()), Some(EngineHealth::Ready));
    let report = story.report();
    assert_eq!(
        (report.state, report.kv_cache_usage),
        (EngineState::Serving, None)
    );
    assert!(report.problem.unwrap().contains("stowage.dev/metrics-path"));
}

#[test]
fn a_guessed_engine_is_probed_at_few_ports_with_backoff() {
    let mut story = Story::new(pod(&[], &[], &[7777]));
    let mut asked = 0;
    let start = story.now;
    let mut ports = Vec::new();
    while story.now < start + Duration::from_secs(60) {
        if let Some(visit) = story.due() {
            let ProbeKind::Search(addresses) = &visit.probe_kind else {
                panic!("{visit:?}")
            };
            assert!(addresses.len() <= 2, "{addresses:?}");
            asked += addresses.len();
            ports.extend(
                addresses
                    .iter()
                    .map(|address: &MetricsAddress| address.port),
            );
            story.answer(Err(refused()), None);
        }
        story.later(1000);
    }
    assert_eq!(ports[..6], [7777, 7777, 7777, 8000, 30000, 8000]);
    // Every address each second would be some 900.
    assert!((30..=70).contains(&asked), "{asked}");
    assert_eq!(
        story
            .watched
            .report(&story.pod, Vec::new(), story.now, &story.limits),
        None
    );
}

#[test]
fn a_pod_that_becomes_ready_is_asked_at_once() {
    let mut story = Story::new(pod(&[], &[], &[]));
    for _ in 0..100 {
        if story.due().is_some() {
            story.answer(Err(refused()), None);
        }
        story.later(100);
    }
    assert_eq!(story.due(), None);
    story.pod.is_ready = true;
    assert!(story.due().is_some());
}

#[test]
fn a_found_engine_is_probed_at_its_address() {
    let mut story = Story::new(pod(&[], &[], &[7777]));
    story.answer(Ok(PAGE), None);
    assert_eq!(
        story.state(),
        EngineState::Loading,
        "whether it is ready is still to be asked"
    );
    story.later(1000);
    let probe_kind = story.due().unwrap().probe_kind;
    assert!(
        matches!(probe_kind, ProbeKind::Metrics(at, SecondProbe::Health(_)) if at.port == 7777)
    );
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    assert_eq!(story.state(), EngineState::Serving);
}

#[test]
fn a_named_engine_on_another_port_is_found_by_the_ports_the_pod_declares() {
    let mut story = Story::new(pod(&[("llm-d.ai/engine-type", "vllm")], &[], &[9999]));
    story.answer(Err(refused()), Some(EngineHealth::Unclear));
    let probe_kind = story
        .due()
        .expect("the next address waits for nothing")
        .probe_kind;
    assert!(matches!(probe_kind, ProbeKind::Metrics(at, _) if at.port == 9999));
    assert_eq!(
        story
            .watched
            .report(&story.pod, Vec::new(), story.now, &story.limits)
            .unwrap()
            .engine,
        "vllm"
    );
}

#[test]
fn a_model_the_page_does_not_name_is_the_one_the_pod_names() {
    let mut story = Story::new(pod(
        &[
            ("llm-d.ai/engine-type", "llama.cpp"),
            ("llm-d.ai/model", "other"),
        ],
        &[("stowage.dev/model", "org/model")],
        &[],
    ));
    story.answer(
        Ok("llamacpp:requests_processing 1\n"),
        Some(EngineHealth::Ready),
    );
    let report = story.report();
    assert_eq!(report.model.unwrap().as_str(), "org/model");
    assert_eq!(report.engine, Engine::LlamaCpp.name());
}

#[test]
fn an_engine_is_probed_at_its_new_address() {
    let mut story = Story::declared();
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    let moved = pod(&[], &[(METRICS_PORT, "9000")], &[]);
    let now = story.now;
    story
        .watched
        .set_query(engine_query(&moved, AddressOwner::Pod).unwrap(), now);
    assert_eq!(story.state(), EngineState::Starting);
    assert!(
        matches!(story.due().unwrap().probe_kind, ProbeKind::Metrics(at, _) if at.port == 9000)
    );
    assert_eq!(
        engine_query(&moved, AddressOwner::Pod).unwrap().evidence,
        EngineEvidence::Declared
    );
}

#[test]
fn results_from_an_old_address_are_ignored() {
    let mut story = Story::declared();
    let (old, asked) = (story.due().unwrap().probe_kind, story.now);
    story.later(100);
    let moved = pod(&[], &[(METRICS_PORT, "9000")], &[]);
    story
        .watched
        .set_query(engine_query(&moved, AddressOwner::Pod).unwrap(), story.now);
    let ProbeKind::Metrics(at, _) = old.clone() else {
        panic!("it is declared")
    };
    let page = Ok(EngineFigures {
        address: at,
        figures: parse_page(PAGE.as_bytes(), None).unwrap(),
    });
    let late = ProbeResult {
        sent_at: asked,
        figures: page,
        health: Some(EngineHealth::Ready),
        properties: None,
    };
    story.watched.record(&old, late, &story.limits);
    assert_eq!(story.state(), EngineState::Starting);
    assert!(
        matches!(story.due().unwrap().probe_kind, ProbeKind::Metrics(at, _) if at.port == 9000)
    );
}

#[test]
fn an_engine_that_interrupts_its_own_requests_is_full_for_ten_seconds() {
    let mut story = Story::declared();
    let page = |preemptions: u64| format!("{PAGE}vllm:num_preemptions_total {preemptions}\n");
    let mut read = |preemptions: u64, later: u64| {
        story.later(later);
        story.answer(Ok(&page(preemptions)), Some(EngineHealth::Ready));
        story.report().preempting
    };
    assert!(!read(17, 0), "they may be long ago");
    assert!(!read(17, 1000));
    assert!(read(18, 1000));
    assert!(read(18, 9000), "the next one may follow");
    assert!(!read(18, 2000));
    assert!(!read(2, 1000), "a new process counts from the start");
    assert!(read(3, 1000));
}

#[test]
fn an_engine_without_a_preemption_counter_is_not_preempting() {
    let mut story = Story::declared();
    story.answer(Ok(PAGE), Some(EngineHealth::Ready));
    story.later(1000);
    story.answer(
        Ok(&format!("{PAGE}vllm:num_preemptions_total 5\n")),
        Some(EngineHealth::Ready),
    );
    assert!(!story.report().preempting);
}

#[test]
fn probed_ports_of_a_pod_are_limited() {
    let many: Vec<u16> = (40_000..40_100).collect();
    let sought = engine_query(&pod(&[], &[], &many), AddressOwner::Pod).unwrap();
    assert_eq!(sought.ports, many[..MAX_ENGINE_PORTS]);
    let beyond = 40_000 + MAX_ENGINE_PORTS as u16;
    assert!(sought.addresses.iter().all(|address| address.port < beyond));
}

#[test]
fn the_annotations_that_kserve_writes_are_read_as_prometheus_own() {
    let annotations = [
        ("prometheus.kserve.io/port", "8085"),
        ("prometheus.kserve.io/path", "/m"),
    ];
    assert_eq!(
        addresses(&pod(&[], &annotations, &[]), AddressOwner::Shared)[0],
        "8085/m"
    );
    let https = [
        ("prometheus.io/port", "9000"),
        ("prometheus.io/scheme", "https"),
    ];
    let sought = engine_query(&pod(&[], &https, &[]), AddressOwner::Pod).unwrap();
    assert_eq!(
        (sought.addresses[0].port, sought.addresses[0].scheme),
        (9000, Scheme::Https)
    );
}

#[test]
fn a_healthy_sidecar_is_not_the_engine_that_is_found_behind_it() {
    let mut story = Story::new(pod(&[("llm-d.ai/engine-type", "vllm")], &[], &[8000, 9999]));
    let not_found = || MetricsError::from(FetchError::Status(uri(), StatusCode::NOT_FOUND));
    story.answer(Err(not_found()), Some(EngineHealth::Ready));
    assert_eq!(story.state(), EngineState::Serving);
    story.answer(Err(refused()), Some(EngineHealth::Unclear));
    assert_eq!(
        story.state(),
        EngineState::Serving,
        "another port is closed"
    );
    assert!(
        story.report().problem.unwrap().contains("answers 404"),
        "the more telling answer"
    );
    while story.report().kv_cache_usage.is_none() {
        story.later(1000);
        let found = story.due().is_some_and(
            |visit| matches!(visit.probe_kind, ProbeKind::Metrics(at, _) if at.port == 9999 && at.path == "/metrics"),
        );
        match found {
            true => story.answer(Ok(PAGE), Some(EngineHealth::NotReady)),
            false if story.due().is_some() => {
                story.answer(Err(not_found()), Some(EngineHealth::Unclear))
            }
            false => {}
        }
    }
    assert_eq!(story.state(), EngineState::Loading, "its own health counts");
}

#[test]
fn the_most_informative_error_is_reported() {
    let answers = |status| MetricsError::from(FetchError::Status(uri(), status));
    for refusal in [StatusCode::UNAUTHORIZED, StatusCode::TEMPORARY_REDIRECT] {
        let mut story = Story::new(pod(&[("llm-d.ai/engine-type", "vllm")], &[], &[8000]));
        story.answer(Err(answers(refusal)), Some(EngineHealth::Ready));
        story.later(5000);
        story.answer(
            Err(answers(StatusCode::NOT_FOUND)),
            Some(EngineHealth::Ready),
        );
        let problem = story.report().problem.unwrap();
        assert!(problem.contains(refusal.as_str()), "{problem}");
    }
}
