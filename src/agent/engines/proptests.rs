//! Unknown is never zero: from any page to what a decision counts of the engine.

use super::address::{EngineEvidence, EngineQuery, MetricsAddress, Scheme};
use super::limits::EngineLimits;
use super::probe::{
    EngineFigures, EngineHealth, MetricsError, ProbeKind, ProbeResult, SecondProbe,
};
use super::watched::WatchedEngine;
use super::watched_tests::pod;
use http::uri::PathAndQuery;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::json;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use stowage_report::NodeReport;
use stowage_report::engine_metrics::parse_page;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node_reading::EngineLoad;
use tokio::time::Instant;

/// All lines of all pages in the fixtures.
static LINES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let folder = format!("{}/tests/fixtures/engines", env!("CARGO_WORKSPACE_DIR"));
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let lines = files.map(|file| std::fs::read_to_string(file).unwrap());
    let lines: BTreeSet<String> = lines
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    lines
        .into_iter()
        .filter(|line| !line.contains("_bucket"))
        .collect()
});

fn line() -> impl Strategy<Value = String> {
    let value = select(
        &[
            "0", "0.0", "1", "40", "0.99", "99", "-1", "NaN", "+Inf", "1e300", "", "x",
        ][..],
    );
    let damage = (
        any::<Index>(),
        select(&[' ', '"', '{', '}', 'x', '_', ':', '7', '#'][..]),
    );
    (
        any::<Index>(),
        prop::option::of(value),
        prop::option::weighted(0.2, damage),
    )
        .prop_map(|(place, value, damage)| {
            let mut line = place.get(&LINES).clone();
            if let (Some(value), Some((start, _))) = (value, line.rsplit_once(' ')) {
                line = format!("{start} {value}");
            }
            if let (Some((place, character)), false) = (damage, line.is_empty()) {
                let mut characters: Vec<char> = line.chars().collect();
                let place = place.index(characters.len());
                characters[place] = character;
                line = characters.into_iter().collect();
            }
            line
        })
}

/// Whether some line has one of these in its name, and a value of zero: the least that an idle engine says.
fn says_zero(page: &str, names: &[&str]) -> bool {
    page.lines().any(|line| {
        let name = line
            .trim_start()
            .split(['{', ' ', '\t'])
            .next()
            .unwrap_or_default();
        let value = line
            .split_whitespace()
            .next_back()
            .and_then(|value| value.parse::<f64>().ok());
        names.iter().any(|part| name.contains(part)) && value == Some(0.0)
    })
}

/// What a decision counts of a ready pod whose only page this is; `None` if the pod is reported as one that cannot be read.
fn load_of(page: &str, claim: EngineEvidence, health: EngineHealth) -> Option<EngineLoad> {
    let at = MetricsAddress {
        scheme: Scheme::Http,
        port: 8000,
        path: PathAndQuery::from_static("/metrics"),
    };
    let query = EngineQuery {
        engine: None,
        evidence: claim,
        addresses: vec![at.clone()],
        ports: vec![8000],
    };
    let now = Instant::now();
    let mut watched = WatchedEngine::new(query, now);
    let page = match parse_page(page.as_bytes(), None) {
        Ok(figures) => Ok(EngineFigures {
            address: at.clone(),
            figures,
        }),
        Err(reason) => Err(MetricsError::Unknown(at.clone(), reason)),
    };
    let kind = ProbeKind::Metrics(at.clone(), SecondProbe::Health(at));
    let answer = ProbeResult {
        sent_at: now,
        figures: page,
        health: Some(health),
        properties: None,
    };
    let limits = EngineLimits::default();
    watched.record(&kind, answer, &limits);
    let mut pod = pod(&[], &[], &[8000]);
    pod.is_ready = true;
    let gpu = GpuUuid::parse("GPU-a").unwrap();
    let engine = watched.report(&pod, vec![gpu], now, &limits)?;
    let report: NodeReport = serde_json::from_value(json!({
        "node": "n", "bootId": "b", "sequence": 1, "engines": [engine],
        "gpus": [{ "uuid": "GPU-a", "index": 0, "model": "H100", "totalBytes": 100, "usedBytes": 40,
            "processes": [{ "pid": 1, "usedBytes": 40, "pod": "uid-1" }] }],
    }))
    .unwrap();
    let reading = report.reading(Moment(0), Millis::seconds(5)).unwrap();
    Some(reading.gpus[0].engine_load)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_page_reads_as_idle_only_if_it_says_that_cache_and_queue_are_empty(
        lines in prop::collection::vec(line(), 0..12),
        is_declared: bool,
        health in select(&[EngineHealth::Ready, EngineHealth::Unclear][..]),
    ) {
        let page = lines.join("\n");
        let claim = if is_declared { EngineEvidence::Declared } else { EngineEvidence::Guessed };
        let load = load_of(&page, claim, health);
        let is_asleep = page.contains("sleep_state");
        if load == Some(EngineLoad::NONE) && !is_asleep {
            let kv = ["cache_usage", "token_usage", "kv_cache", "current_max_tokens"];
            let queues = ["waiting", "queue", "request_metrics", "deferred"];
            prop_assert!(says_zero(&page, &kv) && says_zero(&page, &queues), "{page}");
        }
    }

    #[test]
    fn a_page_that_is_not_recognised_is_never_idle(lines in prop::collection::vec("[a-z_:]{1,20}( [0-9.]{1,3})?", 0..12)) {
        let page = lines.join("\n");
        if parse_page(page.as_bytes(), None).is_err() {
            let load = load_of(&page, EngineEvidence::Declared, EngineHealth::Ready);
            prop_assert_eq!(load, Some(EngineLoad::UNKNOWN));
            prop_assert_eq!(load_of(&page, EngineEvidence::Guessed, EngineHealth::Unclear), None);
        }
    }
}
