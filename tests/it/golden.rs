//! Each recorded request of the real scheduler, and small hand-written ones, against the answer that is committed for it.
//!
//! A golden file holds the answer to the byte: status, type, length, body, and the Binding that was written, if one
//! was. `STOWAGE_BLESS=1` writes them again; read what changed before you commit it.
//!
//! Most recorded pods ask for `nvidia.com/gpu` beside the managed resource, which Stowage refuses by design, and they
//! count in MiB. Each is sent a second time as it was meant (`NAME.as-meant.json`): without the one and with the unit
//! of the other, so that the real scheduler's shapes meet a decision, too.

use crate::client::{Client, HttpAnswer};
use crate::recorded;
use crate::served::{Served, ServedCluster, bound_on, pod, with_exclusive_gpu, with_gpu_count};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::path::PathBuf;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::LeaderEpoch;

const RECORDED_NAMES: [&str; 15] = [
    "bind",
    "bind-error",
    "filter-all-unresolvable",
    "filter-cached",
    "filter-default-profile",
    "filter-error",
    "filter-multi-container-init",
    "filter-nominated-node",
    "filter-resource-claim",
    "filter-retry-with-condition",
    "filter-uncached",
    "preempt-full-victims",
    "preempt-meta-victims",
    "prioritize-cached",
    "prioritize-uncached",
];

const HANDWRITTEN_NAMES: [&str; 10] = [
    "bind",
    "bind-unknown-pod",
    "filter-names",
    "filter-one-fits",
    "filter-refused",
    "filter-whole-nodes",
    "preempt-full-victims",
    "preempt-meta-victims",
    "prioritize-names",
    "prioritize-whole-nodes",
];

#[derive(Deserialize)]
struct Fixture<'a> {
    verb: String,
    #[serde(borrow)]
    request: &'a RawValue,
    #[serde(default)]
    http: Value,
}

#[test]
fn every_recorded_request_gets_its_committed_answer() {
    for name in RECORDED_NAMES {
        let text = recorded::text(&format!("{name}.json"));
        let fixture: Fixture<'_> = serde_json::from_str(&text).unwrap();
        let body = compact(fixture.request.get());
        let sent = fixture.http["headers"]["Content-Length"].as_str().unwrap();
        assert_eq!(
            body.len().to_string(),
            sent,
            "{name}: these are not the bytes the scheduler sent"
        );
        let body = body.replace("example.com/vram", objects::VRAM);
        check(&format!("recorded/{name}"), &fixture.verb, &body);
        let meant = as_meant(serde_json::from_str(&body).unwrap()).to_string();
        if meant.len() != body.len() {
            check(&format!("recorded/{name}.as-meant"), &fixture.verb, &meant);
        }
    }
}

#[test]
fn every_recorded_file_is_checked() {
    assert_eq!(recorded::json("about.json")["kubeScheduler"], "v1.36.2");
    let files = std::fs::read_dir(recorded::folder()).unwrap();
    let mut names: Vec<String> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .filter_map(|name| name.strip_suffix(".json").map(str::to_owned))
        .filter(|name| name != "about" && name != "answer-shapes")
        .collect();
    names.sort();
    assert_eq!(names, RECORDED_NAMES);
}

#[test]
fn handwritten_requests_get_their_committed_answers() {
    for name in HANDWRITTEN_NAMES {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures")
            .join(format!("{name}.json"));
        let text = std::fs::read_to_string(path).unwrap();
        let fixture: Fixture<'_> = serde_json::from_str(&text).unwrap();
        check(
            &format!("own/{name}"),
            &fixture.verb,
            &compact(fixture.request.get()),
        );
    }
}

#[test]
fn whole_nodes_that_pass_are_returned_unchanged() {
    // Odd on purpose: spaces, escapes, an order of keys of its own.
    let raw = r#"{ "metadata" : {"managedFields":[ {"manager":"kübelet\u0041"} ], "name":"node-a"},"status":{"x":1.50}}"#;
    let pod = pod("llm", "40Gi").to_string();
    let body = format!(
        r#"{{"Pod":{pod},"Nodes":{{"items":[{raw},{{"metadata":{{"name":"node-z"}}}}]}},"NodeNames":null}}"#
    );
    let answer = quiet().serve().client().post("/scheduler/filter", body);
    let expected = r#"{"Nodes":{"apiVersion":"v1","kind":"NodeList","items":["#.to_owned() + raw;
    assert_eq!(answer.status, 200);
    assert!(answer.text().starts_with(&expected), "{}", answer.text());
}

/// Sends the request to the cluster it is made for, and compares.
fn check(name: &str, verb: &str, body: &str) {
    let served = match verb {
        "preempt" => full_of_victims(&serde_json::from_str(body).unwrap()).serve(),
        _ => quiet().serve(),
    };
    let answer = Client::connect(served.scheduler).post(&format!("/scheduler/{verb}"), body);
    compare(name, &golden(&served, &answer));
}

fn golden(served: &Served, answer: &HttpAnswer) -> String {
    let mut lines = vec![
        format!("  \"status\": {}", answer.status),
        format!("  \"contentType\": {}", json!(answer.content_type)),
        format!("  \"contentLength\": {}", answer.body.len()),
        format!("  \"body\": {}", answer.text()),
    ];
    for (order, _) in served.control_plane.orders.lock().iter() {
        let binding = objects::binding(
            &order.key,
            &order.uid,
            &order.demand,
            &order.placement,
            Some("nvidia.com/gpu"),
            &LeaderEpoch::new("lease", 1, "nonce"),
        );
        lines.push(format!(
            "  \"binding\": {}",
            serde_json::to_string(&binding).unwrap()
        ));
    }
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

fn compare(name: &str, actual: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(format!("{name}.json"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, actual).unwrap();
        return;
    }
    let expected = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; STOWAGE_BLESS=1 writes it", path.display()));
    assert_eq!(
        actual, expected,
        "{name}: not the committed answer; STOWAGE_BLESS=1 writes it again"
    );
}

/// The cluster for filter, prioritize and bind:
///
/// ```text
///  node-a  4 GPUs   1: 40 GiB allocated
///  node-b  4 GPUs   0: 30 GiB allocated
///  node-c  2 GPUs   0: exclusive   1: 70 GiB allocated
/// ```
fn quiet() -> ServedCluster {
    let mut llm = pod("llm-0", "24Gi");
    llm["metadata"]["uid"] = json!("2251aa96-c531-460c-97b3-d10d372251c1");
    // node-b has one GPU too few for it.
    let mut too_late = with_gpu_count(pod("binderr", "284Gi"), 4);
    too_late["metadata"]["uid"] = json!("3472ed7b-7260-441b-8d2f-d4dc85bca8b3");
    ServedCluster::with_gpus(&[("node-a", 4), ("node-b", 4), ("node-c", 2)]).with([
        bound_on(pod("tenant-a", "40Gi"), "node-a", &[1], 40 << 30),
        bound_on(pod("tenant-b", "30Gi"), "node-b", &[0], 30 << 30),
        bound_on(
            with_exclusive_gpu(pod("owner-c", "10Gi")),
            "node-c",
            &[0],
            72 << 30,
        ),
        bound_on(pod("tenant-c", "70Gi"), "node-c", &[1], 70 << 30),
        llm,
        too_late,
        with_gpu_count(with_exclusive_gpu(pod("pair", "100Gi")), 2),
    ])
}

/// What preempt is asked about: the victims of the request, opportunistic, each filling two GPUs of its node.
fn full_of_victims(request: &Value) -> ServedCluster {
    let whole = request["NodeNameToVictims"].as_object();
    let nodes = whole
        .or(request["NodeNameToMetaVictims"].as_object())
        .unwrap();
    let mut urgent = request["Pod"].clone();
    urgent["kind"] = json!("Pod");
    let mut pods = vec![urgent];
    for (node, victims) in nodes {
        for (place, victim) in victims["Pods"].as_array().unwrap().iter().enumerate() {
            let gpus = [place as u32 * 2, place as u32 * 2 + 1];
            let mut pod = with_gpu_count(pod(&format!("victim-{node}-{place}"), "144Gi"), 2);
            pod["metadata"]["uid"] = victim
                .get("UID")
                .unwrap_or(&victim["metadata"]["uid"])
                .clone();
            pods.push(bound_on(
                crate::served::with_priority(pod, -10),
                node,
                &gpus,
                144 << 30,
            ));
        }
    }
    // No GPU is free beside them: where one is free, no pod is evicted.
    let size = |node: &&str| {
        nodes.get(*node).map_or(2, |victims| {
            victims["Pods"].as_array().unwrap().len() as u32 * 2
        })
    };
    let sizes = ["node-a", "node-b", "node-c"].map(|node| (node, size(&node)));
    ServedCluster::with_gpus(&sizes).with(pods)
}

/// The request without `nvidia.com/gpu`, and with its VRAM in MiB.
fn as_meant(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            for (key, field) in fields.iter_mut() {
                if key == "limits" || key == "requests" {
                    let amounts = field.as_object_mut().unwrap();
                    amounts.remove("nvidia.com/gpu");
                    if let Some(vram) = amounts.get_mut(objects::VRAM) {
                        *vram = json!(format!("{}Mi", vram.as_str().unwrap()));
                    }
                } else if !key.starts_with("f:") {
                    *field = as_meant(field.take());
                }
            }
        }
        Value::Array(items) => items
            .iter_mut()
            .for_each(|item| *item = as_meant(item.take())),
        _ => {}
    }
    value
}

/// JSON as a program writes it, without the white space that is there for people.
fn compact(json: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    let keep = |c: &char| {
        let blank = !in_string && c.is_ascii_whitespace();
        in_string ^= *c == '"' && !escaped;
        escaped = in_string && *c == '\\' && !escaped;
        !blank
    };
    json.chars().filter(keep).collect()
}
