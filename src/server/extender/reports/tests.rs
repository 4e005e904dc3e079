//! What the guard remembers of tokens, and what `check` makes of reports.

use super::auth::{AgentReviewResult, REVIEW_BOUNDS, TokenGuard};
use super::validate::check;
use super::*;
use crate::extender::token_reviews::{ACCEPTED_TTL, REJECTED_TTL};
use crate::service::ServerState;
use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use parking_lot::Mutex;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use stowage_kubernetes_objects::port::{AgentAuthority, AgentIdentity, AgentNode, AuthError};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::gpu::Health;
use tokio::sync::Semaphore;

/// Knows tokens by what they begin with, and counts what it is asked.
struct TokenRecorder {
    tokens: Mutex<Vec<String>>,
    permits: Semaphore,
}

impl AgentAuthority for TokenRecorder {
    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<AgentIdentity, AuthError>> {
        self.tokens.lock().push(token.into());
        async move {
            self.permits.acquire().await.unwrap().forget();
            let node = AgentNode {
                name: NodeName::parse("node-a").unwrap(),
                uid: None,
                issued: None,
            };
            match token.split('-').next().unwrap() {
                "good" => Ok(AgentIdentity {
                    node,
                    remaining: None,
                }),
                "ending" => Ok(AgentIdentity {
                    node,
                    remaining: Some(Millis(0)),
                }),
                "away" => Err(AuthError::Unavailable("no answer".into())),
                "panic" => panic!("on purpose"),
                _ => Err(AuthError::Invalid("unknown".into())),
            }
        }
        .boxed()
    }
}

impl TokenRecorder {
    fn guard(permits: usize) -> (Arc<Self>, Arc<TokenGuard>) {
        let asked = Arc::new(Self {
            tokens: Mutex::default(),
            permits: Semaphore::new(permits),
        });
        let guard = TokenGuard::new(
            asked.clone(),
            ServerState::with_stopped_clock(Policy::default()),
        );
        (asked, guard)
    }

    fn times(&self, token: &str) -> usize {
        self.tokens
            .lock()
            .iter()
            .filter(|asked| *asked == token)
            .count()
    }
}

const AGENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const ATTACKER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

fn code(verdict: &AgentReviewResult) -> &'static str {
    verdict.as_ref().err().map_or("accepted", AuthError::code)
}

#[tokio::test]
async fn review_answers_are_cached_and_failed_reviews_are_not() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    for (token, expected, times) in [
        ("good", "accepted", 1),
        ("bad", "invalid-token", 1),
        ("ending", "accepted", 3),
        ("away", "token-unchecked", 3),
        ("panic", "token-unchecked", 3),
    ] {
        for _ in 0..3 {
            assert_eq!(code(&guard.review(token, AGENT).await), expected, "{token}");
        }
        assert_eq!(asked.times(token), times, "{token}");
    }
    assert!(
        REJECTED_TTL < ACCEPTED_TTL,
        "what was wrong may be put right"
    );
}

#[tokio::test]
async fn concurrent_requests_with_one_token_share_one_review() {
    let (asked, guard) = TokenRecorder::guard(0);
    let first = guard.review("good", AGENT).now_or_never();
    assert_eq!(
        first, None,
        "nobody has answered yet, and the one who asked is gone"
    );
    let waiting = (0..10).map(|_| guard.review("good", AGENT));
    let answer = async {
        tokio::task::yield_now().await;
        asked.permits.add_permits(1);
    };
    let (verdicts, ()) = futures::join!(join_all(waiting), answer);
    assert!(
        verdicts.iter().all(|verdict| code(verdict) == "accepted"),
        "{verdicts:?}"
    );
    assert_eq!(asked.times("good"), 1);
}

#[tokio::test]
async fn invented_tokens_do_not_crowd_out_agents() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    assert_eq!(code(&guard.review("good", AGENT).await), "accepted");
    let mut outcomes = std::collections::BTreeMap::<_, u64>::new();
    for n in 0..20_000 {
        *outcomes
            .entry(code(&guard.review(&format!("bad-{n}"), ATTACKER).await))
            .or_default() += 1;
    }
    let burst = REVIEW_BOUNDS.per_source.burst;
    assert_eq!(
        outcomes,
        [("invalid-token", burst), ("token-crowded", 20_000 - burst)].into()
    );
    assert_eq!(guard.reviews.cached_counts(), [1, burst as usize, 0]);
    assert_eq!(code(&guard.review("good", AGENT).await), "accepted");
    assert_eq!(asked.times("good"), 1);
    assert_eq!(
        code(&guard.review("good-2", AGENT).await),
        "accepted",
        "another source's new token"
    );
}

#[tokio::test]
async fn reviews_from_all_sources_share_one_rate_limit() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    for n in 0..3 * REVIEW_BOUNDS.total.burst as u32 {
        let source = Ipv4Addr::from(0x0a00_0000 + n).into();
        let _ = guard.review(&format!("bad-{n}"), source).await;
    }
    assert_eq!(
        asked.tokens.lock().len(),
        REVIEW_BOUNDS.total.burst as usize
    );
}

#[tokio::test]
async fn a_review_that_no_request_waits_for_is_dropped() {
    let (asked, guard) = TokenRecorder::guard(0);
    let mut waiting: Vec<_> = (0..REVIEW_BOUNDS.max_concurrent + 10)
        .map(|n| Box::pin(review_result(&guard, format!("bad-{n}"))))
        .collect();
    for question in &mut waiting {
        assert_eq!(futures::poll!(question), std::task::Poll::Pending);
    }
    until(|| asked.tokens.lock().len() == REVIEW_BOUNDS.max_concurrent).await;
    drop(waiting);
    until(|| guard.reviews.cached_counts()[2] <= REVIEW_BOUNDS.max_concurrent).await;
    asked.permits.add_permits(Semaphore::MAX_PERMITS / 2);
    until(|| guard.reviews.cached_counts()[2] == 0).await;
    assert_eq!(
        asked.tokens.lock().len(),
        REVIEW_BOUNDS.max_concurrent,
        "the ten had no turn"
    );
}

async fn until(is_so: impl Fn() -> bool) {
    let becoming = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), becoming)
        .await
        .expect("it comes");
}

async fn review_result(guard: &TokenGuard, token: String) -> AgentReviewResult {
    guard.review(&token, AGENT).await
}

#[tokio::test]
async fn a_token_that_is_too_long_is_rejected_without_a_review() {
    let (asked, guard) = TokenRecorder::guard(0);
    let long = "x".repeat(2049);
    assert_eq!(
        guard
            .review(&long, AGENT)
            .now_or_never()
            .map(|verdict| code(&verdict)),
        Some("malformed-token")
    );
    assert_eq!(asked.times(&long), 0);
}

fn report(edit: impl FnOnce(&mut Value)) -> NodeReport {
    let mut report = json!({
        "node": "node-a", "bootId": "boot", "sequence": 1,
        "gpus": [
            { "uuid": "GPU-0", "index": 0, "model": "H100", "totalBytes": 80u64 << 30 },
            { "uuid": "MIG-1", "index": 1, "model": "H100", "parent": "GPU-1", "totalBytes": 40u64 << 30 },
            { "uuid": "GPU-1", "index": 1, "model": "H100", "totalBytes": 80u64 << 30 },
        ],
        "engines": [{ "pod": "uid", "engine": "vllm", "state": "serving", "gpus": ["GPU-0", "GPU-9", "GPU-0", "GPU-1"] }],
    });
    edit(&mut report);
    serde_json::from_value(report).unwrap()
}

fn engine_gpus(report: NodeReport) -> Vec<String> {
    check(report).unwrap().engines[0]
        .gpus
        .iter()
        .map(GpuUuid::to_string)
        .collect()
}

#[test]
fn an_engine_keeps_the_gpus_that_its_report_lists_each_once() {
    assert_eq!(engine_gpus(report(|_| {})), ["GPU-0", "GPU-1"]);
    let unseen = report(|report| {
        report["gpus"] = Value::Null;
        report["missing"] = json!([{ "part": "gpus", "reason": "the driver is gone" }]);
    });
    assert_eq!(
        engine_gpus(unseen),
        ["GPU-0", "GPU-9", "GPU-0", "GPU-1"],
        "nobody knows better"
    );
}

const LOST_AFTER: Millis = Millis::seconds(30);

#[test]
fn a_gpu_with_nvml_failures_drains_is_lost_and_recovers() {
    let health = |field: &str, millis: u64| {
        let report = report(|report| report["gpus"][0][field] = json!(millis));
        validate::devices(&report, LOST_AFTER).unwrap()[0].health
    };
    assert_eq!(
        [0, 29_999, 30_000].map(|age| health("failingMillis", age)),
        [Health::Draining, Health::Draining, Health::Lost]
    );
    assert_eq!(
        [0, 29_999, 30_000].map(|age| health("recoveredMillis", age)),
        [Health::Draining, Health::Draining, Health::Healthy]
    );
    let worse = report(|report| {
        report["gpus"][0]["health"] = json!("lost");
        report["gpus"][0]["failingMillis"] = json!(0);
        report["gpus"][1]["health"] = json!("a-word-of-a-later-version");
    });
    let devices = validate::devices(&worse, LOST_AFTER).unwrap();
    assert_eq!(
        (devices[0].health, devices[1].health),
        (Health::Lost, Health::Draining)
    );
}

#[test]
fn a_compute_mode_without_processes_or_of_a_later_version_takes_no_pods() {
    let device = |mode: &str| {
        let report = report(|report| report["gpus"][0]["computeMode"] = json!(mode));
        let device = validate::devices(&report, LOST_AFTER).unwrap().remove(0);
        (device.health, device.exclusive_process)
    };
    assert_eq!(device("default"), (Health::Healthy, false));
    assert_eq!(device("exclusive-process"), (Health::Healthy, true));
    assert_eq!(
        ["prohibited", "exclusive-context"].map(device),
        [(Health::Draining, false); 2]
    );
}

#[test]
fn slices_are_placed_on_and_the_gpu_they_are_cut_from_is_not() {
    let devices = validate::devices(&report(|_| {}), LOST_AFTER).unwrap();
    let uuids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
    assert_eq!(uuids, ["GPU-0", "MIG-1"]);
}

proptest! {
    /// Every number a share or a percentage can be taken for, and whether it is one.
    #[test]
    fn shares_and_percentages_outside_their_range_are_refused(
        usage in prop::num::f64::NORMAL | prop::num::f64::ZERO | prop::num::f64::SUBNORMAL,
        percent in any::<u8>(),
        used in any::<u64>(),
        total in 1u64..,
    ) {
        let with = |path: &str, value: Value| check(report(|report| *report.pointer_mut(path).unwrap() = value));
        let kv = with("/engines/0", json!({
            "pod": "uid", "engine": "vllm", "state": "serving", "gpus": [], "kvCacheUsage": usage,
        }));
        prop_assert_eq!(kv.is_ok(), (0.0..=1.0).contains(&usage));
        let gpu = with("/gpus/0", json!({
            "uuid": "GPU-0", "index": 0, "model": "H100",
            "totalBytes": total, "usedBytes": used, "utilizationPercent": percent,
        }));
        prop_assert_eq!(gpu.is_ok(), used <= total && percent <= 100);
    }
}
