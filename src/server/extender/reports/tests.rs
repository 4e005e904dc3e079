//! What the guard remembers of tokens, and what `check` makes of reports.

use super::auth::{AgentReviewResult, BOUNDS, TokenGuard};
use super::validate::check;
use super::*;
use crate::extender::token_reviews::{BAD_FOR, GOOD_FOR};
use crate::service::Service;
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
            Service::with_stopped_clock(Policy::default()),
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
async fn what_was_found_out_about_a_token_is_remembered_and_that_nothing_was_is_not() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    for (token, expected, times) in [
        ("good", "accepted", 1),
        ("bad", "invalid-token", 1),
        ("ending", "accepted", 3),
        ("away", "token-unchecked", 3),
        ("panic", "token-unchecked", 3),
    ] {
        for _ in 0..3 {
            assert_eq!(
                code(&guard.verdict(token, AGENT).await),
                expected,
                "{token}"
            );
        }
        assert_eq!(asked.times(token), times, "{token}");
    }
    assert!(BAD_FOR < GOOD_FOR, "what was wrong may be put right");
}

#[tokio::test]
async fn of_many_who_show_one_token_one_asks_even_if_it_goes_away() {
    let (asked, guard) = TokenRecorder::guard(0);
    let first = guard.verdict("good", AGENT).now_or_never();
    assert_eq!(
        first, None,
        "nobody has answered yet, and the one who asked is gone"
    );
    let waiting = (0..10).map(|_| guard.verdict("good", AGENT));
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
async fn s3_who_makes_up_tokens_neither_fills_the_memory_nor_pushes_agents_out() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    assert_eq!(code(&guard.verdict("good", AGENT).await), "accepted");
    let mut outcomes = std::collections::BTreeMap::<_, u64>::new();
    for n in 0..20_000 {
        *outcomes
            .entry(code(&guard.verdict(&format!("bad-{n}"), ATTACKER).await))
            .or_default() += 1;
    }
    let burst = BOUNDS.per_source.burst;
    assert_eq!(
        outcomes,
        [("invalid-token", burst), ("token-crowded", 20_000 - burst)].into()
    );
    assert_eq!(guard.reviews.remembered(), [1, burst as usize, 0]);
    assert_eq!(code(&guard.verdict("good", AGENT).await), "accepted");
    assert_eq!(asked.times("good"), 1);
    assert_eq!(
        code(&guard.verdict("good-2", AGENT).await),
        "accepted",
        "another source's new token"
    );
}

#[tokio::test]
async fn s3_from_however_many_sources_the_api_server_is_asked_at_one_pace() {
    let (asked, guard) = TokenRecorder::guard(Semaphore::MAX_PERMITS);
    for n in 0..3 * BOUNDS.in_all.burst as u32 {
        let source = Ipv4Addr::from(0x0a00_0000 + n).into();
        let _ = guard.verdict(&format!("bad-{n}"), source).await;
    }
    assert_eq!(asked.tokens.lock().len(), BOUNDS.in_all.burst as usize);
}

#[tokio::test]
async fn s3_a_question_that_nobody_waits_for_any_more_is_not_asked() {
    let (asked, guard) = TokenRecorder::guard(0);
    let mut waiting: Vec<_> = (0..BOUNDS.at_once + 10)
        .map(|n| Box::pin(guard_of(&guard, format!("bad-{n}"))))
        .collect();
    for question in &mut waiting {
        assert_eq!(futures::poll!(question), std::task::Poll::Pending);
    }
    until(|| asked.tokens.lock().len() == BOUNDS.at_once).await;
    drop(waiting);
    until(|| guard.reviews.remembered()[2] <= BOUNDS.at_once).await;
    asked.permits.add_permits(Semaphore::MAX_PERMITS / 2);
    until(|| guard.reviews.remembered()[2] == 0).await;
    assert_eq!(
        asked.tokens.lock().len(),
        BOUNDS.at_once,
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

async fn guard_of(guard: &TokenGuard, token: String) -> AgentReviewResult {
    guard.verdict(&token, AGENT).await
}

#[tokio::test]
async fn s3_a_token_that_is_too_long_is_refused_unasked() {
    let (asked, guard) = TokenRecorder::guard(0);
    let long = "x".repeat(2049);
    assert_eq!(
        guard
            .verdict(&long, AGENT)
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
fn a_gpu_for_which_nvml_fails_is_draining_then_lost_and_takes_pods_after_as_long_without_a_failure()
{
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
