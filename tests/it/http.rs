//! Invalid requests: each gets its status and a text that names the position, changes nothing, is counted, and the next valid one
//! is answered.

use crate::client::{Client, HttpAnswer, post_head};
use crate::served::{
    Served, ServedCluster, args, bind_args, bound_on, eventually, pod, preempt_args, report,
    uid_of, with_priority,
};
use serde_json::{Value, json};
use std::net::TcpStream;
use std::time::Duration;
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::control_loop::PodEventReason;
use stowage_server::extender::request::RequestLimits;
use stowage_server::service::Tenure;

const VERBS: [&str; 4] = ["filter", "prioritize", "preempt", "bind"];

fn served() -> Served {
    served_within(RequestLimits::default())
}

fn served_within(limits: RequestLimits) -> Served {
    let mut cluster = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)]).with([
        bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30),
        pod("waiting", "20Gi"),
    ]);
    cluster.limits = limits;
    cluster.serve()
}

/// Sends an invalid request and checks everything that must be true afterwards.
fn refuses(
    served: &Served,
    verb: &str,
    status: u16,
    code: &str,
    send: impl FnOnce(&mut Client<TcpStream>) -> HttpAnswer,
) -> HttpAnswer {
    let (ledger, count) = (served.ledger(), served.bad_requests(verb, code));
    let answer = send(&mut served.client());
    assert_eq!(answer.status, status, "{verb} {code}: {}", answer.text());
    assert!(answer.json()["Error"].is_string(), "{}", answer.text());
    assert_eq!(
        served.bad_requests(verb, code),
        count + 1,
        "{verb} {code} is not counted"
    );
    assert_eq!(served.ledger(), ledger, "{verb} {code} changed the ledger");
    assert_eq!(
        served.filter_passed(&pod("waiting", "20Gi"), &["node-a"]),
        ["node-a"]
    );
    answer
}

fn body_is_refused(served: &Served, verb: &str, status: u16, code: &str, body: &str) -> String {
    let path = format!("/scheduler/{verb}");
    let answer = refuses(served, verb, status, code, |client| {
        client.post(&path, body)
    });
    answer.json()["Error"].as_str().unwrap().to_owned()
}

#[test]
fn malformed_json_is_a_400_that_names_line_and_column() {
    let served = served();
    for verb in VERBS {
        let error = body_is_refused(&served, verb, 400, "malformed", "{\n  \"Pod\": {],\n}");
        assert!(error.contains("line 2 column 11"), "{error}");
        let error = body_is_refused(&served, verb, 400, "malformed", "");
        assert!(error.contains("EOF"), "{error}");
        body_is_refused(&served, verb, 400, "malformed", "[]");
    }
}

#[test]
fn a_field_that_is_missing_or_of_the_wrong_type_is_named() {
    let served = served();
    let error = body_is_refused(
        &served,
        "filter",
        400,
        "malformed",
        r#"{"NodeNames":["node-a"]}"#,
    );
    assert!(error.contains("`Pod`"), "{error}");
    let error = body_is_refused(
        &served,
        "bind",
        400,
        "malformed",
        r#"{"PodName":"waiting","PodNamespace":"default"}"#,
    );
    assert!(error.contains("`PodUID`"), "{error}");
    let mut list = pod("waiting", "20Gi");
    list["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"] = json!([20]);
    let error = body_is_refused(
        &served,
        "filter",
        400,
        "malformed",
        &args(&list, &["node-a"]).to_string(),
    );
    assert!(error.contains("invalid type: sequence"), "{error}");
    let nameless =
        json!({ "Pod": pod("waiting", "20Gi"), "Nodes": { "items": [{ "metadata": {} }] } });
    let error = body_is_refused(&served, "filter", 400, "malformed", &nameless.to_string());
    assert!(error.contains("`name`"), "{error}");
}

#[test]
fn a_pod_without_a_uid_or_a_name_is_a_422() {
    let served = served();
    for (part, text) in [("uid", "no metadata.uid"), ("name", "no metadata.name")] {
        let mut pod = pod("waiting", "20Gi");
        pod["metadata"].as_object_mut().unwrap().remove(part);
        for verb in ["filter", "prioritize"] {
            let body = args(&pod, &["node-a"]).to_string();
            let error = body_is_refused(&served, verb, 422, "unidentified-pod", &body);
            assert!(error.contains(text), "{error}");
        }
        let body = json!({ "Pod": pod, "NodeNameToMetaVictims": {} }).to_string();
        body_is_refused(&served, "preempt", 422, "unidentified-pod", &body);
    }
    for part in ["PodUID", "PodName", "PodNamespace"] {
        let mut args = bind_args(&pod("waiting", "20Gi"), "node-a");
        args[part] = json!("");
        body_is_refused(&served, "bind", 422, "unidentified-pod", &args.to_string());
    }
    let nowhere = bind_args(&pod("waiting", "20Gi"), "");
    body_is_refused(&served, "bind", 422, "bad-node-name", &nowhere.to_string());
}

#[test]
fn a_request_that_names_no_nodes_is_a_422() {
    let served = served();
    let pod = pod("waiting", "20Gi");
    for verb in ["filter", "prioritize"] {
        let body = json!({ "Pod": pod, "Nodes": null, "NodeNames": null }).to_string();
        let error = body_is_refused(&served, verb, 422, "no-nodes", &body);
        assert!(error.contains("neither Nodes nor NodeNames"), "{error}");
    }
    let body =
        json!({ "Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": null }).to_string();
    body_is_refused(&served, "preempt", 422, "no-candidates", &body);
}

#[test]
fn a_pod_that_asks_for_no_vram_is_a_422() {
    let served = served();
    let mut pod = pod("plain", "1");
    pod["spec"]["containers"][0]["resources"] = json!({ "limits": { "cpu": "1" } });
    for verb in ["filter", "prioritize"] {
        let error = body_is_refused(
            &served,
            verb,
            422,
            "no-vram",
            &args(&pod, &["node-a"]).to_string(),
        );
        assert!(
            error.contains("managedResources"),
            "it says the way out: {error}"
        );
    }
    body_is_refused(
        &served,
        "preempt",
        422,
        "no-vram",
        &preempt_args(&pod, &[]).to_string(),
    );
    assert_eq!(
        served.bind(&pod, "node-a"),
        "conflict: pod unknown to Stowage or gone"
    );
}

#[test]
fn a_pod_that_asks_for_zero_vram_fits_everywhere_and_is_bound_without_a_gpu() {
    let served = served();
    let mut pod = pod("none", "0");
    for resource in ["stowage.dev/vram", "nvidia.com/gpu"] {
        pod["spec"]["containers"][0]["resources"] = json!({ "limits": { resource: "0" } });
        assert_eq!(
            served.filter_passed(&pod, &["node-a", "node-z"]),
            ["node-a", "node-z"],
            "{resource}"
        );
        let ranked = served.prioritize(&pod, &["node-a", "node-z"]);
        assert_eq!(
            ranked
                .iter()
                .map(|(node, _)| node.as_str())
                .collect::<Vec<_>>(),
            ["node-a", "node-z"]
        );
        let answer = served.post("/scheduler/preempt", preempt_args(&pod, &[]));
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({ "NodeNameToMetaVictims": {} }))
        );
    }
    let before = served.charged("node-a");
    served
        .control_plane
        .binds
        .lock()
        .push_back(BindOutcome::Written);
    assert_eq!(served.bind(&pod, "node-a"), "");
    let order = served.control_plane.orders.lock().last().unwrap().0.clone();
    assert!(
        order.demand.is_allocated_externally() && order.placement.devices.is_empty(),
        "a plain Binding: {order:?}"
    );
    assert_eq!(served.charged("node-a"), before);
}

#[test]
fn absurd_quantities_are_refused_everywhere_with_a_fixed_phrase_and_an_event() {
    let served = served();
    let unreadable = "pod has a quantity that cannot be read";
    let cases = [
        ("9e99", "bad-quantity", unreadable),
        ("18446744073709551616", "bad-quantity", unreadable),
        ("0.5", "bad-quantity", unreadable),
        ("40 GiB", "bad-quantity", unreadable),
        ("", "bad-quantity", unreadable),
        ("-1", "bad-quantity", unreadable),
    ];
    for (quantity, code, phrase) in cases {
        let (ledger, events) = (served.ledger(), served.events().len());
        let pod = with_priority(pod("absurd", quantity), 5);
        let answer = served.filter(&pod, &["node-a", "node-z"]);
        let refused = json!({ "NodeNames": [], "FailedAndUnresolvableNodes": { "node-a": phrase, "node-z": phrase } });
        assert_eq!(
            (answer.status, answer.json()),
            (200, refused),
            "{quantity:?}"
        );
        let (name, kind, text) = served.events().swap_remove(events);
        assert_eq!(
            (name.as_str(), kind),
            ("absurd", PodEventReason::InvalidRequest)
        );
        assert!(text.contains("stowage.dev/vram is"), "{text}");
        assert_eq!(
            served.prioritize(&pod, &["node-a", "node-b"]),
            [("node-a".into(), 0), ("node-b".into(), 0)]
        );
        let tenant = crate::served::pod("tenant", "40Gi");
        let answer = served.post(
            "/scheduler/preempt",
            preempt_args(&pod, &[("node-a", &[&tenant])]),
        );
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({ "NodeNameToMetaVictims": {} }))
        );
        assert_eq!(
            served.bind(&pod, "node-a"),
            "conflict: pod unknown to Stowage or gone"
        );
        assert_eq!(served.ledger(), ledger, "{quantity:?} changed the ledger");
        let counted =
            format!("stowage_answers_total{{code=\"{code}\",outcome=\"refused\",verb=\"filter\"}}");
        assert!(served.metric(&counted) > 0, "{counted}");
    }
    // More than any GPU has, and yet a number: it is known, and fits nowhere.
    let huge = pod("huge", "9223372036854775807");
    assert_eq!(served.filter_passed(&huge, &["node-a"]), [""; 0]);
    assert_eq!(
        served.bind(&huge, "node-a"),
        "conflict: the node's GPUs have changed"
    );
}

#[test]
fn a_body_over_the_limit_is_a_413_whether_it_is_announced_or_streamed() {
    let limits = RequestLimits {
        body: 4096,
        ..RequestLimits::default()
    };
    let served = served_within(limits);
    for path in ["filter", "prioritize", "preempt", "bind"] {
        let answer = refuses(&served, path, 413, "too-large", |client| {
            client
                .write(post_head(&format!("/scheduler/{path}"), "Content-Length: 4097").as_bytes())
                .unwrap();
            client.read_answer().unwrap()
        });
        assert!(
            answer
                .text()
                .contains("larger than 4096 bytes; raise --body-limit"),
            "{}",
            answer.text()
        );
        refuses(&served, path, 413, "too-large", |client| {
            client
                .write(
                    post_head(&format!("/scheduler/{path}"), "Transfer-Encoding: chunked")
                        .as_bytes(),
                )
                .unwrap();
            for _ in 0..5 {
                client
                    .write(format!("3e8\r\n{}\r\n", " ".repeat(1000)).as_bytes())
                    .unwrap();
            }
            client.read_answer().unwrap()
        });
    }
    let at_the_limit = format!(
        "{:4096}",
        args(&pod("waiting", "20Gi"), &["node-a"]).to_string()
    );
    assert_eq!(
        served
            .client()
            .post("/scheduler/filter", at_the_limit)
            .status,
        200
    );
}

#[test]
fn a_streamed_body_within_the_limit_is_accepted() {
    let served = served();
    let body = args(&pod("waiting", "20Gi"), &["node-a"]).to_string();
    let mut client = served.client();
    client
        .write(post_head("/scheduler/filter", "Transfer-Encoding: chunked").as_bytes())
        .unwrap();
    for part in body.as_bytes().chunks(100) {
        client
            .write(&[format!("{:x}\r\n", part.len()).as_bytes(), part, b"\r\n"].concat())
            .unwrap();
    }
    client.write(b"0\r\n\r\n").unwrap();
    assert_eq!(client.read_answer().unwrap().status, 200);
}

#[test]
fn a_client_that_sends_too_slowly_gets_a_408() {
    let limits = RequestLimits {
        body_time: Duration::from_millis(100),
        ..RequestLimits::default()
    };
    let served = served_within(limits);
    let answer = refuses(&served, "filter", 408, "too-slow", |client| {
        client
            .write(post_head("/scheduler/filter", "Content-Length: 1000000").as_bytes())
            .unwrap();
        // The stream's own time limit sets the pace: a byte, a check for an answer, a byte.
        client
            .stream()
            .set_read_timeout(Some(Duration::from_millis(5)))
            .unwrap();
        eventually("the answer is there", || {
            let _ = client.write(b" ");
            client.has_answer()
        });
        client
            .stream()
            .set_read_timeout(Some(crate::client::TEST_TIMEOUT))
            .unwrap();
        client.read_answer().unwrap()
    });
    assert!(
        answer.text().contains("did not arrive within 0.1 s"),
        "{}",
        answer.text()
    );
}

#[test]
fn a_client_that_hangs_up_in_the_middle_of_its_body_changes_nothing() {
    let served = served();
    let ledger = served.ledger();
    let mut client = served.client();
    client
        .write(post_head("/scheduler/bind", "Content-Length: 1000").as_bytes())
        .unwrap();
    client.write(br#"{"PodName":"waiting""#).unwrap();
    drop(client);
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        served.filter_passed(&pod("waiting", "20Gi"), &["node-a"]),
        ["node-a"]
    );
}

#[test]
fn an_unknown_path_is_a_404_and_a_wrong_method_a_405() {
    let served = served();
    let ledger = served.ledger();
    let mut client = served.client();
    let answer = client.post("/scheduler/score", "{}");
    assert_eq!(answer.status, 404);
    assert!(
        answer
            .text()
            .contains("filter, prioritize, prioritize-claims, preempt and bind")
    );
    assert_eq!(client.get("/scheduler/filter").status, 405);
    assert_eq!(client.post("/", "{}").status, 404);
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        client
            .post(
                "/scheduler/filter",
                args(&pod("waiting", "20Gi"), &["node-a"]).to_string()
            )
            .status,
        200
    );
    let mut operators = Client::connect(served.operators);
    assert_eq!(operators.post("/metrics", "").status, 405);
    assert_eq!(
        operators.post("/scheduler/filter", "{}").status,
        404,
        "the verbs are on the scheduler's address only"
    );
    assert_eq!(
        served.client().get("/metrics").status,
        404,
        "the pages are on the operators' address only"
    );
}

#[test]
fn a_bind_to_an_unknown_node_is_a_typed_conflict() {
    let served = served();
    let waiting = pod("waiting", "20Gi");
    let ledger = served.ledger();
    assert_eq!(
        served.bind(&waiting, "node-z"),
        "conflict: node unknown to Stowage"
    );
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        served.metric(
            "stowage_answers_total{code=\"unknown-node\",outcome=\"unbound\",verb=\"bind\"}"
        ),
        1
    );
    assert_eq!(served.bind(&waiting, "node-a"), "");
}

#[test]
fn a_bind_of_an_unknown_pod_is_a_typed_conflict() {
    let served = served();
    let ledger = served.ledger();
    let mut other_uid = pod("waiting", "20Gi");
    other_uid["metadata"]["uid"] = json!("uid-of-its-successor");
    let mut other_name = pod("impostor", "20Gi");
    other_name["metadata"]["uid"] = json!("uid-waiting");
    for foreign_pod in [pod("foreign", "20Gi"), other_uid, other_name] {
        assert_eq!(
            served.bind(&foreign_pod, "node-a"),
            "conflict: pod unknown to Stowage or gone"
        );
    }
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        served.control_plane.orders.lock().len(),
        0,
        "nothing was written"
    );
    assert_eq!(
        served.metric(
            "stowage_answers_total{code=\"unknown-pod\",outcome=\"unbound\",verb=\"bind\"}"
        ),
        3
    );
    assert_eq!(served.bind(&pod("waiting", "20Gi"), "node-a"), "");
}

#[test]
fn a_replica_that_may_not_act_answers_503_and_changes_nothing() {
    let served = served();
    let waiting = pod("waiting", "20Gi");
    let good: [(&str, Value); 4] = [
        ("filter", args(&waiting, &["node-a"])),
        ("prioritize", args(&waiting, &["node-a"])),
        ("preempt", preempt_args(&waiting, &[("node-a", &[])])),
        ("bind", bind_args(&waiting, "node-a")),
    ];
    served.service.set_tenure(Tenure::Standby);
    let ledger = served.ledger();
    for (verb, body) in good {
        let answer = served.post(&format!("/scheduler/{verb}"), body);
        assert_eq!(answer.status, 503);
        assert!(answer.text().contains("does not lead"), "{}", answer.text());
        assert_eq!(served.bad_requests(verb, "unavailable"), 1);
    }
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        Client::connect(served.operators).get("/readyz").status,
        200,
        "it stands by"
    );
    assert_eq!(
        served.report(report("node-a", "boot", 2, 2)).status,
        200,
        "and it takes reports"
    );
    served.service.lead_from_the_start();
    assert_eq!(served.filter_passed(&waiting, &["node-a"]), ["node-a"]);
}

#[test]
fn an_annotation_edited_after_the_bind_changes_nothing_and_gets_one_event() {
    let served = served();
    let waiting = pod("waiting", "20Gi");
    assert_eq!(served.bind(&waiting, "node-b"), "");
    let bound = bound_on(waiting.clone(), "node-b", &[0], 20 << 30);
    assert_eq!(served.observe_pod(&bound), None);
    let ledger = served.ledger();
    let mut edited = bound.clone();
    edited["metadata"]["annotations"]["stowage.dev/devices"] = json!("GPU-node-b-1");
    edited["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!("1");
    for _ in 0..3 {
        let notice = served.observe_pod(&edited).unwrap();
        assert_eq!(notice.kind, PodEventReason::EditIgnored);
        assert!(
            notice.text.contains("charged on GPU-node-b-0 of node-b"),
            "{}",
            notice.text
        );
    }
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        served.metric("stowage_pod_warnings_total{warning=\"devices-edited\"}"),
        1
    );
    let mut removed = bound;
    removed["metadata"]["annotations"] = json!({});
    assert_eq!(
        served.observe_pod(&removed).unwrap().kind,
        PodEventReason::EditIgnored
    );
    assert_eq!(served.ledger(), ledger);
    assert_eq!(
        served.pod_state(&waiting).unwrap().devices().unwrap()[0].as_str(),
        "GPU-node-b-0"
    );
    assert!(
        served
            .service
            .cluster()
            .ledger()
            .pod_state(&uid_of(&waiting))
            .is_some()
    );
    assert_eq!(
        served.filter_passed(&pod("next", "60Gi"), &["node-b"]),
        ["node-b"]
    );
}

#[test]
fn every_operator_page_of_fixed_size_has_a_content_length() {
    let served = served();
    let mut client = Client::connect(served.operators);
    for (path, status) in [
        ("/healthz", 200),
        ("/readyz", 200),
        ("/debug/policy", 200),
        ("/x", 404),
    ] {
        assert_eq!(client.get(path).status, status, "{path}");
    }
    assert_eq!(
        client.get_page("/debug/snapshot").json()["violations"],
        json!([])
    );
}
