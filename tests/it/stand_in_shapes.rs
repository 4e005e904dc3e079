//! The stand-in scheduler against the recording: each odd answer must end as it did with kube-scheduler v1.36.2.

use crate::recorded;
use crate::stand_in_extender::{
    RecordedRequest, ScriptedAnswer, ScriptedExtender, accept_all, bind, filter_answer,
    requested_nodes,
};
use futures::future::{join, join_all};
use futures::stream::{self, StreamExt};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::scheduler::config::SchedulerConfig;
use stowage_lab::demo::scheduler::observations::Verb;
use stowage_lab::demo::scheduler::trial::{TrialResult, run_one};

/// The recorded pod of the one message that names a pod.
const POD: &str = "b42";
/// Recorded: 2 s of patience, answers after 3 s. Here so much patience that a busy machine is not mistaken for a silent extender, and
/// a late answer comes after everything is over.
const EXTENDER_TIMEOUT: Duration = Duration::from_secs(30);
const LATE_ANSWER_DELAY: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn every_recorded_answer_shape_has_its_recorded_outcome() {
    let recorded = recorded::json("answer-shapes.json");
    let cases = recorded["cases"].as_array().unwrap();
    let (mut fast, mut slow) = (Vec::new(), Vec::new());
    let mut replayed = 0;
    for case in cases {
        let modes = case
            .as_object()
            .unwrap()
            .iter()
            .filter(|(key, _)| key.starts_with("nodeCacheCapable"));
        for (mode, expected) in modes {
            replayed += 1;
            let replaying = async move {
                let replayed = replay(case, mode, expected).await;
                replayed
                    .err()
                    .map(|why| format!("{} [{mode}]: {why}", case["case"]))
            };
            match case["delaySeconds"].is_null() {
                true => fast.push(replaying),
                // They wait, all at once.
                false => slow.push(replaying),
            }
        }
    }
    let one_by_one = stream::iter(fast)
        .then(|replaying| replaying)
        .collect::<Vec<_>>();
    let (fast, slow) = join(one_by_one, join_all(slow)).await;
    let wrong: Vec<String> = fast.into_iter().chain(slow).flatten().collect();
    assert!(
        wrong.is_empty(),
        "{} of {replayed} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(replayed, cases.len() * 3);
}

async fn replay(case: &Value, mode: &str, expected: &Value) -> Result<(), String> {
    let api = Arc::new(ApiServer::start().await.unwrap());
    for number in 0..6 {
        let capacity = json!({"cpu": "64", "memory": "512Gi", "pods": "110"});
        let node = json!({"metadata": {"name": format!("n{number:04}")}, "status": {"capacity": capacity}});
        api.create("nodes", node).unwrap();
    }
    let (script_api, script_case) = (api.clone(), case.clone());
    let extender =
        ScriptedExtender::start(move |request| script(&script_api, &script_case, request)).await;
    let trial = tokio::time::timeout(
        LATE_ANSWER_DELAY / 2,
        run_one(&api, config(&extender, mode), pod()),
    );
    let trial = trial.await.map_err(|_| "did not end".to_owned())?.unwrap();
    compare(&trial, expected, &extender.url_prefix())
}

fn config(extender: &ScriptedExtender, mode: &str) -> SchedulerConfig {
    let mut config = SchedulerConfig::as_shipped(&extender.url_prefix());
    config.extender.timeout = EXTENDER_TIMEOUT;
    config.extender.weight = 1;
    config.extender.ignored_by_scheduler = true;
    config.extender.node_cache_capable = mode.contains("nodeCacheCapable:true");
    config.extender.ignorable = mode.contains("ignorable:true");
    config.initial_back_off = Duration::from_millis(5);
    config
}

fn pod() -> Value {
    let container = json!({"name": "c", "resources": {"limits": {"stowage.dev/vram": "1Gi"}}});
    json!({"metadata": {"name": POD}, "spec": {"schedulerName": "stowage", "containers": [container]}})
}

/// The recorded answer to the case's verb, the agreeable one to the others.
fn script(api: &ApiServer, case: &Value, request: &RecordedRequest) -> ScriptedAnswer {
    let is_about = case["verb"] == *request.verb;
    let mut answer = match case["errorField"].as_str().filter(|_| is_about) {
        Some(error) => ScriptedAnswer::ok(json!({"Error": error})),
        None => answer_for_setting(api, &case["dummySetting"], request),
    };
    if !is_about {
        return answer;
    }
    if let Some(body) = case["rawBody"].as_str() {
        answer.body = body.to_owned();
    }
    answer.status = case["httpStatus"]
        .as_u64()
        .map_or(200, |status| u16::try_from(status).unwrap());
    answer.delay = if case["delaySeconds"].is_null() {
        Duration::ZERO
    } else {
        LATE_ANSWER_DELAY
    };
    answer.closes = case["closesConnection"] == true;
    answer.chunked = case["chunked"] == true;
    if let Some(content_type) = case["contentType"].as_str() {
        answer.content_type = content_type.to_owned();
    }
    // A 'gzip' case is answered plainly: this client does not say that it accepts gzip.
    answer
}

fn answer_for_setting(
    api: &ApiServer,
    setting: &Value,
    request: &RecordedRequest,
) -> ScriptedAnswer {
    match request.verb.as_str() {
        "filter" if setting["deny"] == "*" => ScriptedAnswer::ok(filter_refusal(setting, request)),
        "filter" if setting["keep"].is_array() => {
            let kept = setting["keep"].as_array().unwrap();
            ScriptedAnswer::ok(filter_answer(request, |name| {
                kept.iter().any(|keep| keep == name)
            }))
        }
        // Recorded with one node left, which was not the one bound to.
        "filter" if setting["node"].is_string() => {
            ScriptedAnswer::ok(filter_answer(request, |name| name == "n0003"))
        }
        "bind" if setting["mode"] == "ok" => ScriptedAnswer::ok(json!({})),
        "bind" if setting["node"].is_string() => {
            bind(api, request, setting["node"].as_str().unwrap())
        }
        _ => accept_all(api, request),
    }
}

fn filter_refusal(setting: &Value, request: &RecordedRequest) -> Value {
    let message = setting["msg"].as_str().unwrap_or_default();
    let reasons: Value = requested_nodes(request)
        .into_iter()
        .map(|name| (name, json!(message)))
        .collect();
    let mut answer = filter_answer(request, |_| false);
    match setting["as"].as_str() {
        None => answer["FailedNodes"] = reasons,
        Some("unresolvable") => answer["FailedAndUnresolvableNodes"] = reasons,
        Some("both") => {
            answer["FailedNodes"] = reasons.clone();
            answer["FailedAndUnresolvableNodes"] = reasons;
        }
        Some(_) => {}
    }
    answer
}

fn compare(trial: &TrialResult, expected: &Value, url_prefix: &str) -> Result<(), String> {
    let same = |what: &str, found: &Value, wanted: &Value| {
        if found == wanted {
            Ok(())
        } else {
            Err(format!("{what}: {found}, recorded {wanted}"))
        }
    };
    same(
        "bound",
        &json!(trial.bound_node.is_some()),
        &expected["bound"],
    )?;
    same("reason", &json!(trial.reason), &expected["reason"])?;
    // The one recorded text with a node in it names the node the pod went to.
    let node = trial.bound_node.as_deref().unwrap_or("n0001");
    let prefix = url_prefix.trim_end_matches("/scheduler");
    let text = |text: &str| {
        text.replace("http://EXTENDER", prefix)
            .replace("n0001", node)
    };
    same(
        "message",
        &json!(trial.message),
        &json!(expected["message"].as_str().map(text)),
    )?;
    let found: Vec<&str> = trial.calls.iter().map(|verb| Verb::as_str(*verb)).collect();
    let wanted: Vec<&str> = expected["calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|verb| verb.as_str().unwrap())
        .collect();
    let retried = expected["reason"] == "SchedulerError" && expected["bound"] == false;
    if !retried {
        return same("calls", &json!(found), &json!(wanted));
    }
    let (first, again) = first_cycle(&wanted);
    let (found_first, found_again) = first_cycle(&found);
    same("first cycle", &json!(found_first), &json!(first))?;
    same("retried", &json!(found_again), &json!(again))
}

/// The calls before the second filter, and whether there was a second.
fn first_cycle<'a>(calls: &[&'a str]) -> (Vec<&'a str>, bool) {
    let second = calls
        .iter()
        .skip(1)
        .position(|verb| *verb == "filter")
        .map(|place| place + 1);
    (
        calls[..second.unwrap_or(calls.len())].to_vec(),
        second.is_some(),
    )
}
