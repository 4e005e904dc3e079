//! Where models are: `/v1/models` and `stowage models`; and the way of a pod to the GPU on which an engine of its model sleeps.

use crate::client::{Client, NOBODYS};
use crate::served::{Served, ServedCluster, gpu_uuid, pod, report};
use serde_json::{Value, json};
use std::process::{Command, Output};
use stowage_kubernetes_objects::port::BindOutcome;

const MODEL: &str = "meta-llama/Llama-3.1-8B";

/// Of a launcher, which asks for no GPU.
fn engine(pod: &str, node: &str, gpu: u32, state: Value) -> Value {
    let mut engine = json!({
        "pod": pod, "engine": "vllm", "gpus": [gpu_uuid(node, gpu)], "state": "serving", "model": MODEL, "ageMillis": 200,
    });
    state
        .as_object()
        .unwrap()
        .iter()
        .for_each(|(key, value)| engine[key] = value.clone());
    engine
}

fn asleep(pod: &str, node: &str, gpu: u32) -> Value {
    engine(
        pod,
        node,
        gpu,
        json!({ "state": "sleeping", "sleepLevel": 1, "reusableIn": "default" }),
    )
}

fn with_engines(report: Value, engines: Value, tier: Option<&str>) -> Value {
    let files = |tier| json!([{ "model": MODEL, "tier": tier, "bytes": 15_u64 << 30, "source": "huggingface" }]);
    let mut report = report;
    report["sequence"] = json!(report["sequence"].as_u64().unwrap() + 1);
    report["engines"] = engines;
    report["models"] = tier.map_or(json!([]), files);
    report
}

fn report_engines(served: &Served, node: &str, gpus: u32, engines: Value, tier: Option<&str>) {
    let answer = served.report(with_engines(report(node, "boot", 1, gpus), engines, tier));
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn served() -> Served {
    let served =
        ServedCluster::with_gpus(&[("node-a", 4), ("node-b", 4), ("node-c", 1), ("node-d", 1)])
            .serve();
    report_engines(&served, "node-a", 4, json!([]), Some("disk"));
    let engines = json!([
        asleep("launcher", "node-b", 3),
        engine("serving", "node-b", 0, json!({}))
    ]);
    report_engines(&served, "node-b", 4, engines, Some("resident"));
    served
}

fn get(served: &Served, query: &str) -> (u16, Value) {
    let answer = Client::connect(served.operators).get(&format!("/v1/models{query}"));
    let body = String::from_utf8_lossy(&answer.body).into_owned();
    (
        answer.status,
        serde_json::from_str(&body).unwrap_or(Value::String(body)),
    )
}

fn llama(name: &str) -> Value {
    let mut pod = pod(name, "20Gi");
    pod["metadata"]["annotations"] = json!({ "stowage.dev/model": MODEL });
    pod
}

#[test]
fn the_answer_names_every_place_with_its_state_and_the_time_until_it_answers() {
    let (status, located) = get(&served(), "?model=meta-llama%2FLlama-3.1-8B");
    assert_eq!(status, 200, "{located}");
    assert_eq!(
        (&located["model"], &located["weightsBytes"]),
        (&json!(MODEL), &json!(15_u64 << 30))
    );
    let counts = json!({
        "resident": 1, "asleep": 1, "loading": 0, "pageCache": 0, "disk": 1, "partial": 0, "absent": 2, "unknown": 0,
    });
    assert_eq!(located["counts"], counts);
    // 16.1 s over the network, 5.4 s from disk, 20 s of start.
    assert_eq!(located["absentReadyInMillis"], json!(41_476));
    let places = located["places"].as_array().unwrap();
    let said: Vec<Value> = places
        .iter()
        .map(|place| {
            json!([
                place["node"],
                place["state"],
                place["readyInMillis"],
                place["podUid"],
                place["sleepLevel"]
            ])
        })
        .collect();
    assert_eq!(
        said,
        [
            json!(["node-a", "disk", 25_369, null, null]),
            json!(["node-b", "asleep", 906, "launcher", 1]),
            json!(["node-b", "resident", 0, "serving", null]),
        ]
    );
    assert_eq!(places[1]["gpus"], json!([gpu_uuid("node-b", 3)]));
    assert_eq!(places[1]["reusableIn"], "default");
    assert!(
        places[1]["ageMillis"].as_u64().unwrap() >= 200,
        "{}",
        places[1]
    );
}

#[test]
fn without_a_model_all_are_listed_with_their_counts() {
    let served = served();
    let (status, list) = get(&served, "");
    assert_eq!(status, 200, "{list}");
    assert_eq!(list["models"][0]["model"], MODEL);
    assert_eq!(list["models"][0]["counts"]["asleep"], 1);
    assert_eq!(
        (list["models"].as_array().unwrap().len(), &list["next"]),
        (1, &Value::Null)
    );
    let (status, nowhere) = get(&served, "?model=nobody/has-it");
    assert_eq!(
        (status, &nowhere["places"], &nowhere["counts"]["absent"]),
        (200, &json!([]), &json!(4))
    );
    assert_eq!(
        nowhere["absentReadyInMillis"],
        Value::Null,
        "nobody knows what it weighs"
    );
}

#[test]
fn a_page_has_no_more_entries_than_asked_for_and_says_where_the_next_begins() {
    let names: Vec<String> = (0..20).map(|node| format!("node-{node:02}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    let served = ServedCluster::with_gpus(&gpus).serve();
    for name in &names {
        report_engines(&served, name, 1, json!([]), Some("disk"));
    }
    let (mut seen, mut after) = (Vec::new(), String::new());
    for _ in 0..20 {
        let (_, page) = get(&served, &format!("?model={MODEL}&limit=6{after}"));
        let places = page["places"].as_array().unwrap();
        assert!((1..=6).contains(&places.len()), "{page}");
        assert_eq!(page["counts"]["disk"], 20, "the counts are of all pages");
        seen.extend(
            places
                .iter()
                .map(|place| place["node"].as_str().unwrap().to_owned()),
        );
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(seen, names);
}

#[test]
fn models_of_a_hostile_agent_are_limited_per_page() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    let mut many = with_engines(report("node-a", "boot", 1, 1), json!([]), None);
    let models =
        (0..4096).map(|n| json!({ "model": format!("m{n:04}"), "tier": "disk", "source": "x" }));
    many["models"] = models.collect();
    assert_eq!(served.report(many).status, 200);
    let (_, list) = get(&served, "");
    assert_eq!(
        (list["models"].as_array().unwrap().len(), &list["next"]),
        (1000, &json!("m0999"))
    );
    let (_, list) = get(&served, "?limit=10000&after=m0999");
    assert_eq!(
        (list["models"].as_array().unwrap().len(), &list["next"]),
        (3096, &Value::Null)
    );
    assert_eq!(list["models"][0]["model"], "m1000");

    let server = format!("http://{}", served.operators);
    let page = ["--server", &server, "--limit", "2", "--after", "m0999"];
    let printed = command(&page);
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(
        ["m1000", "m1001", "More with --after m1001"]
            .iter()
            .all(|part| text.contains(part)),
        "{text}"
    );
    assert!(!text.contains("m1002"), "{text}");
    let list: Value =
        serde_json::from_slice(&command(&[&page[..], &["-o", "json"]].concat()).stdout).unwrap();
    assert_eq!(
        (list["models"].as_array().unwrap().len(), &list["next"]),
        (2, &json!("m1001"))
    );
}

#[test]
fn a_request_that_makes_no_sense_gets_the_reason() {
    let served = served();
    for query in [
        "?limit=0",
        "?limit=10001",
        "?limit=-1",
        "?limit=many",
        "?model=",
        "?model=a%20b",
        "?model=a%00b",
        "?pod=x",
    ] {
        let (status, text) = get(&served, query);
        assert_eq!(status, 400, "{query}: {text}");
    }
    let (status, _) = get(&served, &format!("?model={}", "x".repeat(254)));
    assert_eq!(status, 400);
    let (status, _) = get(&served, "?model=m&after=%0A");
    assert_eq!(status, 400);
    let (status, evil) = get(&served, "?model=%3Cscript%3E..%2F..%2Fetc%2Fpasswd");
    assert_eq!(
        (status, &evil["model"]),
        (200, &json!("<script>../../etc/passwd")),
        "a name like any other, as JSON"
    );
}

#[test]
fn the_answer_changes_nothing() {
    let served = served();
    let before = served.ledger();
    for query in ["", "?model=x", "?limit=1"] {
        get(&served, query);
    }
    assert_eq!(served.ledger(), before);
}

#[test]
fn a_new_pod_gets_the_gpu_with_a_sleeping_engine_of_its_model() {
    let served = served();
    let nodes = ["node-a", "node-b", "node-c", "node-d"];
    let pod = llama("new");
    served.observe_pod(&pod);
    assert_eq!(served.filter_passed(&pod, &nodes)[0], "node-b");
    let explained = Client::connect(served.operators)
        .get("/v1/explain?pod=new&node=node-b")
        .json();
    let gpu = &explained["nodes"][0]["gpus"][3];
    assert_eq!(
        (&gpu["chosen"], &gpu["wake"]["wokenInMillis"]),
        (&json!(true), &json!(906)),
        "{gpu}"
    );
    assert!(
        gpu["wake"]["loadedInMillis"].as_u64().unwrap() > 20_000,
        "{gpu}"
    );
    // The dump does not have a pod that came later.
    served
        .control_plane
        .binds
        .lock()
        .push_back(BindOutcome::Written);
    assert_eq!(served.bind(&pod, "node-b"), "");
    let orders = served.control_plane.orders.lock();
    assert_eq!(
        orders[0]
            .0
            .placement
            .devices
            .iter()
            .map(|gpu| gpu.as_str())
            .collect::<Vec<_>>(),
        [gpu_uuid("node-b", 3)]
    );
}

#[test]
fn an_old_agents_report_makes_no_engine_reusable() {
    let served = served();
    let mut old = asleep("launcher", "node-b", 3);
    old.as_object_mut().unwrap().remove("reusableIn");
    let mut without = with_engines(report("node-b", "boot", 1, 4), json!([old]), None);
    without["sequence"] = json!(9);
    assert_eq!(served.report(without).status, 200);
    let (_, located) = get(&served, &format!("?model={MODEL}"));
    let asleep = located["places"]
        .as_array()
        .unwrap()
        .iter()
        .find(|place| place["state"] == "asleep")
        .unwrap();
    assert_eq!(asleep["reusableIn"], Value::Null);
    let pod = llama("new");
    served.observe_pod(&pod);
    assert_eq!(
        served.filter_passed(&pod, &["node-a", "node-b"])[0],
        "node-a",
        "its files are there"
    );
}

fn command(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stowage"))
        .arg("models")
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn the_models_command_prints_the_services_answer() {
    let served = served();
    let server = format!("http://{}", served.operators);
    let text = |output: &Output| String::from_utf8(output.stdout.clone()).unwrap();
    let one = command(&[MODEL, "--server", &server]);
    assert_eq!(
        one.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&one.stderr)
    );
    let printed = text(&one);
    assert!(
        printed.starts_with(
            "meta-llama/Llama-3.1-8B: 15.0 GiB of weights; 1 resident, 1 asleep, 1 disk;"
        ),
        "{printed}"
    );
    assert!(printed.contains("asleep (level 1), reusable"), "{printed}");
    let all = command(&["--server", &server, "-o", "json"]);
    let list: Value = serde_json::from_slice(&all.stdout).unwrap();
    assert_eq!(
        (all.status.code(), &list["models"][0]["model"]),
        (Some(0), &json!(MODEL))
    );
    assert_eq!(
        command(&["nobody/has-it", "--server", &server])
            .status
            .code(),
        Some(1)
    );
    let away = command(&["--server", &format!("http://127.0.0.1:{NOBODYS}")]);
    assert_eq!((away.status.code(), away.stdout.len()), (Some(2), 0));
    assert!(String::from_utf8_lossy(&away.stderr).contains("no answer from http://"));
}
