//! Agents' reports: taken whole or not at all, in their order, and refused with the place that is wrong.

use crate::client::Client;
use crate::served::{Cluster, GPU_BYTES, Served, gpu_report, on, pod, report};
use serde_json::{Value, json};

fn served() -> Served {
    Cluster::of(&[("node-a", 2)])
        .with([
            on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30),
            pod("small", "10Gi"),
            pod("vast", "9223372036854775807"),
        ])
        .serve()
}

fn outcomes(served: &Served, outcome: &str) -> u64 {
    served.metric(&format!("stowage_agent_reports_total{{outcome=\"{outcome}\"}}"))
}

/// A single report that is refused: with its status, its code, and nothing changed.
fn refused(served: &Served, status: u16, code: &str, report: &Value) -> String {
    let (books, count) = (served.books(), outcomes(served, code));
    let answer = served.report(report.clone());
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(outcomes(served, code), count + 1, "{code} is not counted");
    assert_eq!(served.bad_requests("reports", code), count + 1, "{code} is not counted as a bad request");
    assert_eq!(served.books(), books, "{code} changed the books");
    answer.json()["Error"].as_str().unwrap().to_owned()
}

fn with(mut report: Value, edit: impl FnOnce(&mut Value)) -> Value {
    edit(&mut report);
    report
}

#[test]
fn a_report_that_cannot_be_is_refused_with_its_reason() {
    let served = served();
    let good = || report("node-a", "boot", 2, 2);
    let error = refused(&served, 422, "unknown-node", &with(good(), |r| r["node"] = json!("node-z")));
    assert!(error.contains("no node \"node-z\""), "{error}");
    let twice = with(good(), |r| r["gpus"][1]["uuid"] = r["gpus"][0]["uuid"].clone());
    assert!(refused(&served, 422, "gpu-twice", &twice).contains("GPU-node-a-0 is listed twice"));
    let reserved = with(good(), |r| r["gpus"][1]["reservedBytes"] = json!(GPU_BYTES + 1));
    assert!(refused(&served, 422, "reserved-above-total", &reserved).contains("GPU-node-a-1"));
    let empty = with(good(), |r| r["gpus"][0]["totalBytes"] = json!(0));
    assert!(refused(&served, 422, "no-memory", &empty).contains("GPU-node-a-0 has no memory"));
    let many = with(good(), |r| r["gpus"] = (0..65).map(|gpu| gpu_report("node-a", gpu)).collect());
    assert!(refused(&served, 422, "too-many-gpus", &many).contains("at most 64"));
    assert_eq!(served.report(good()).json(), json!({ "accepted": 1, "dropped": 0 }));
}

#[test]
fn a_missing_or_wrong_field_of_a_report_is_named() {
    let served = served();
    for field in ["node", "bootId", "sequence", "gpus"] {
        let report = with(report("node-a", "boot", 2, 2), |r| drop(r.as_object_mut().unwrap().remove(field)));
        let error = refused(&served, 422, "malformed", &report);
        assert!(
            error.contains(&format!("missing field `{field}`")) && error.contains("line 1 column"),
            "{error}"
        );
    }
    for (field, value) in
        [("totalBytes", json!(-1)), ("index", json!("0")), ("health", json!("well")), ("uuid", json!(""))]
    {
        let report = with(report("node-a", "boot", 2, 2), |r| r["gpus"][1][field] = value);
        assert!(refused(&served, 422, "malformed", &report).contains("line 1 column"));
    }
}

#[test]
fn a_report_that_is_no_json_is_a_400() {
    let served = served();
    let books = served.books();
    for body in ["{\"node\": \n ]", "", "[{},"] {
        let answer = Client::connect(served.agents).post("/v1/reports", body);
        assert_eq!(answer.status, 400, "{body:?}: {}", answer.text());
        assert!(answer.text().contains("column"), "{}", answer.text());
    }
    assert_eq!(served.bad_requests("reports", "malformed"), 3);
    assert_eq!(served.books(), books);
}

#[test]
fn fields_of_a_later_version_are_taken_along() {
    let served = served();
    let later = with(report("node-a", "boot", 2, 3), |r| {
        r["driver"] = json!({ "version": "600.1" });
        r["gpus"][2]["temperature"] = json!(55);
    });
    assert_eq!(served.report(later).json(), json!({ "accepted": 1, "dropped": 0 }));
    assert_eq!(served.charged("node-a").len(), 3);
}

#[test]
fn old_and_replayed_reports_are_dropped_and_a_new_boot_starts_anew() {
    let served = served();
    let taken = json!({ "accepted": 1, "dropped": 0 });
    let dropped = json!({ "accepted": 0, "dropped": 1 });
    let send = |boot: &str, sequence, gpus| served.report(report("node-a", boot, sequence, gpus)).json();
    assert_eq!(send("boot", 5, 2), taken);
    let books = served.books();
    assert_eq!(send("boot", 5, 4), dropped, "replayed");
    assert_eq!(send("boot", 4, 4), dropped, "older");
    assert_eq!(served.books(), books);
    assert_eq!(send("boot-2", 1, 3), taken, "the agent has restarted");
    let books = served.books();
    assert_eq!(send("boot", 6, 4), dropped, "of the boot before");
    assert_eq!(served.books(), books);
    assert_eq!(outcomes(&served, "old"), 3);
    assert_eq!(served.charged("node-a").len(), 3);
}

#[test]
fn of_a_batch_the_good_ones_count() {
    let served = Cluster::of(&[("node-a", 1), ("node-b", 1)]).serve();
    let batch = json!([
        report("node-a", "boot", 2, 2),
        report("node-z", "boot", 2, 2),
        report("node-b", "boot", 1, 2),
        {}
    ]);
    let answer = served.report(batch);
    assert_eq!(answer.status, 200);
    let result = answer.json();
    assert_eq!((&result["accepted"], &result["dropped"]), (&json!(1), &json!(1)));
    let places: Vec<(&Value, &Value)> =
        result["refused"].as_array().unwrap().iter().map(|one| (&one["report"], &one["code"])).collect();
    assert_eq!(places, [(&json!(1), &json!("unknown-node")), (&json!(3), &json!("malformed"))]);
    assert_eq!((served.charged("node-a").len(), served.charged("node-b").len()), (2, 1));
}

#[test]
fn a_report_with_more_memory_than_there_is_in_the_world_breaks_nothing() {
    let served = served();
    let absurd = with(report("node-a", "boot", 2, 2), |r| {
        for gpu in [0, 1] {
            r["gpus"][gpu]["totalBytes"] = json!(u64::MAX);
        }
    });
    assert_eq!(served.report(absurd).status, 200);
    served.books();
    served.metric("stowage_nodes");
    assert_eq!(served.passed(&pod("vast", "9223372036854775807"), &["node-a"]), ["node-a"]);
    assert_eq!(served.bind(&pod("vast", "9223372036854775807"), "node-a"), "");
    assert_eq!(served.report(report("node-a", "boot", 3, 2)).status, 200);
    served.books();
}

#[test]
fn a_gpu_with_a_pod_that_is_reported_no_more_is_lost_and_keeps_its_charge() {
    let served = served();
    let without =
        json!({ "node": "node-a", "bootId": "boot", "sequence": 2, "gpus": [gpu_report("node-a", 1)] });
    assert_eq!(served.report(without).status, 200);
    assert_eq!(served.charged("node-a"), [stowage::units::Bytes::gib(40), stowage::units::Bytes::ZERO]);
    let small = pod("small", "10Gi");
    assert_eq!(served.passed(&small, &["node-a"]), ["node-a"]);
    assert_eq!(served.bind(&small, "node-a"), "");
    assert_eq!(
        served.entry(&small).unwrap().devices().unwrap()[0].as_str(),
        "GPU-node-a-1",
        "nothing new on a lost GPU"
    );
}
