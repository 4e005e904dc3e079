//! Agents' reports: accepted whole or not at all, in their order, and refused with the position of the error.

use crate::client::{Client, post_head};
use crate::served::{
    GPU_BYTES, Served, ServedCluster, args, bound_on, gpu_report, node, pod, report, with_gpu_count,
};
use serde_json::{Value, json};
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::classification::Isolation;
use stowage_server::service::Tenure;

fn served() -> Served {
    ServedCluster::with_gpus(&[("node-a", 2)])
        .with([
            bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30),
            pod("small", "10Gi"),
            pod("vast", "9223372036854775807"),
        ])
        .serve()
}

fn outcomes(served: &Served, outcome: &str) -> u64 {
    served.metric(&format!(
        "stowage_agent_reports_total{{outcome=\"{outcome}\"}}"
    ))
}

/// A single report that is refused: with its status, its code, and nothing changed.
fn expect_refusal(served: &Served, status: u16, code: &str, report: &Value) -> String {
    let (ledger, count) = (served.ledger(), outcomes(served, code));
    let answer = served.report(report.clone());
    assert_eq!(answer.status, status, "{}", answer.text());
    assert_eq!(outcomes(served, code), count + 1, "{code} is not counted");
    assert_eq!(
        served.bad_requests("reports", code),
        count + 1,
        "{code} is not counted as a bad request"
    );
    assert_eq!(served.ledger(), ledger, "{code} changed the ledger");
    answer.json()["Error"].as_str().unwrap().to_owned()
}

fn edited(mut report: Value, edit: impl FnOnce(&mut Value)) -> Value {
    edit(&mut report);
    report
}

#[test]
fn a_gpu_that_could_not_be_read_is_not_lost() {
    let tenant = bound_on(pod("tenant", "40Gi"), "node-a", &[2], 40 << 30);
    let mut cluster = ServedCluster::with_gpus(&[]).with([tenant]);
    cluster.nodes.push(node("node-a"));
    let served = cluster.serve();
    let mut unread = report("node-a", "boot", 1, 2);
    unread["missing"] = json!([{ "part": "gpus", "reason": "GPU 2: no answer" }]);
    assert_eq!(served.report(unread).status, 200);
    assert_eq!(
        served.charged("node-a"),
        [Bytes::gib(40); 2],
        "it may have any name"
    );
    assert_eq!(served.report(report("node-a", "boot", 2, 2)).status, 200);
    assert_eq!(
        served.charged("node-a"),
        [Bytes::ZERO; 2],
        "it is lost, with its pod"
    );
    assert_eq!(served.report(report("node-a", "boot", 3, 3)).status, 200);
    assert_eq!(
        served.charged("node-a"),
        [Bytes::ZERO, Bytes::ZERO, Bytes::gib(40)]
    );
}

#[test]
fn an_impossible_report_is_refused_with_its_reason() {
    let served = served();
    let good = || report("node-a", "boot", 2, 2);
    let error = expect_refusal(
        &served,
        422,
        "unknown-node",
        &edited(good(), |r| r["node"] = json!("node-z")),
    );
    assert!(error.contains("no node \"node-z\""), "{error}");
    let twice = edited(good(), |r| {
        r["gpus"][1]["uuid"] = r["gpus"][0]["uuid"].clone()
    });
    assert!(
        expect_refusal(&served, 422, "gpu-twice", &twice).contains("GPU-node-a-0 is listed twice")
    );
    let reserved = edited(good(), |r| {
        r["gpus"][1]["reservedBytes"] = json!(GPU_BYTES + 1)
    });
    assert!(
        expect_refusal(&served, 422, "reserved-above-total", &reserved).contains("GPU-node-a-1")
    );
    let empty = edited(good(), |r| r["gpus"][0]["totalBytes"] = json!(0));
    assert!(
        expect_refusal(&served, 422, "no-memory", &empty).contains("GPU-node-a-0 has no memory")
    );
    let many = edited(good(), |r| {
        r["gpus"] = (0..65).map(|gpu| gpu_report("node-a", gpu)).collect()
    });
    assert!(expect_refusal(&served, 422, "too-many-gpus", &many).contains("at most 64"));
    assert_eq!(
        served.report(good()).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
}

#[test]
fn impossible_figures_are_refused_with_their_place() {
    let served = served();
    let good = || report("node-a", "boot", 2, 2);
    let engine = |edit: &dyn Fn(&mut Value)| {
        let mut engine =
            json!({ "pod": "uid-tenant", "engine": "vllm", "gpus": [], "state": "serving" });
        edit(&mut engine);
        edited(good(), |r| r["engines"] = json!([engine]))
    };
    let long = "x".repeat(1025);
    let cases: Vec<(&str, &str, Value)> = vec![
        (
            "used-above-total",
            "gpus[1]: GPU GPU-node-a-1",
            edited(good(), |r| r["gpus"][1]["usedBytes"] = json!(GPU_BYTES + 1)),
        ),
        (
            "bad-utilization",
            "gpus[0]: GPU GPU-node-a-0 is busy to 101 %",
            edited(good(), |r| r["gpus"][0]["utilizationPercent"] = json!(101)),
        ),
        (
            "bad-utilization",
            "gpus[1]: GPU GPU-node-a-1 is busy to 120 %",
            edited(good(), |r| {
                r["gpus"][1]["activity"] = json!({ "smPercent": 3, "memoryBandwidthPercent": 120 })
            }),
        ),
        (
            "bad-uuid",
            "gpus[0]: index-0",
            edited(good(), |r| r["gpus"][0]["uuid"] = json!("index-0")),
        ),
        (
            "bad-uuid",
            "gpus[1]: a,b",
            edited(good(), |r| r["gpus"][1]["uuid"] = json!("a,b")),
        ),
        (
            "bad-kv-usage",
            "engines[0]: the KV cache of pod uid-tenant",
            engine(&|e| e["kvCacheUsage"] = json!(1.01)),
        ),
        (
            "bad-kv-usage",
            "engines[0]",
            engine(&|e| e["kvCacheUsage"] = json!(-0.1)),
        ),
        (
            "bad-kv-usage",
            "engines[0]",
            engine(&|e| e["kvCacheUsage"] = json!(1e300)),
        ),
        (
            "bad-busy-share",
            "engines[0]: pod uid-tenant",
            engine(&|e| e["busy"] = json!(2)),
        ),
        (
            "bad-latency",
            "engines[0]: pod uid-tenant",
            engine(&|e| e["timePerToken"] = json!({ "meanMicros": 0 })),
        ),
        (
            "bad-token-rate",
            "engines[0]: pod uid-tenant",
            engine(&|e| e["promptTokensPerSecond"] = json!(-1)),
        ),
        (
            "no-reason",
            "`missing` does not say why",
            edited(good(), |r| r["gpus"] = Value::Null),
        ),
        (
            "too-aged",
            "3601 s old",
            edited(good(), |r| r["ageMillis"] = json!(3_601_000)),
        ),
        (
            "too-long",
            "bootId is 129 bytes",
            edited(good(), |r| r["bootId"] = json!("x".repeat(129))),
        ),
        (
            "too-long",
            "gpus[1].healthReason",
            edited(good(), |r| r["gpus"][1]["healthReason"] = json!(long)),
        ),
        (
            "too-long",
            "engines[0].engine",
            engine(&|e| e["engine"] = json!(long)),
        ),
        (
            "too-long",
            "engines[0].problem",
            engine(&|e| e["problem"] = json!(long)),
        ),
        (
            "too-long",
            "models[0].source",
            edited(good(), |r| {
                r["models"] = json!([{ "model": "m", "tier": "disk", "source": long }])
            }),
        ),
        (
            "too-long",
            "missing[0].reason",
            edited(good(), |r| {
                r["missing"] = json!([{ "part": "pods", "reason": long }])
            }),
        ),
        (
            "too-many",
            "4097 processes; at most 4096",
            edited(good(), |r| {
                r["gpus"][0]["processes"] = (0..4000).map(|pid| json!({ "pid": pid })).collect();
                r["gpus"][1]["processes"] = (0..97).map(|pid| json!({ "pid": pid })).collect();
            }),
        ),
        (
            "too-many",
            "513 engines",
            edited(engine(&|_| {}), |r| {
                r["engines"] = (0..513).map(|_| r["engines"][0].clone()).collect()
            }),
        ),
        (
            "too-many",
            "4097 models",
            edited(good(), |r| {
                let model = json!({ "model": "m", "tier": "disk", "source": "huggingface" });
                r["models"] = (0..4097).map(|_| model.clone()).collect();
            }),
        ),
        (
            "too-many-gpus",
            "lists 129 GPUs",
            edited(good(), |r| {
                r["gpus"] = (0..129).map(|gpu| gpu_report("node-a", gpu)).collect()
            }),
        ),
    ];
    for (code, text, report) in cases {
        let error = expect_refusal(&served, 422, code, &report);
        assert!(
            error.contains("node node-a") && error.contains(text),
            "{code}: {error}"
        );
    }
    let nobody = engine(&|engine| engine["pod"] = json!("two words"));
    assert!(expect_refusal(&served, 422, "malformed", &nobody).contains("pod UID"));
    let at_the_edge = edited(engine(&|engine| engine["kvCacheUsage"] = json!(1.0)), |r| {
        r["gpus"][0]["usedBytes"] = json!(GPU_BYTES);
        r["gpus"][0]["utilizationPercent"] = json!(100);
        r["gpus"][0]["activity"] = json!({ "smPercent": 100, "tensorPercent": 7 });
        r["ageMillis"] = json!(3_600_000);
    });
    assert_eq!(
        served.report(at_the_edge).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
}

#[test]
fn a_report_without_gpus_keeps_the_known_gpus() {
    let served = served();
    let missing = json!([{ "part": "gpus", "reason": "the driver does not answer" }, { "part": "owners", "reason": "no /proc" }]);
    let blind = edited(report("node-a", "boot", 2, 0), |r| {
        r["gpus"] = Value::Null;
        r["missing"] = missing.clone();
    });
    let ledger = served.ledger();
    assert_eq!(
        served.report(blind).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
    assert_eq!(served.ledger(), ledger);
    for part in ["gpus", "owners"] {
        assert_eq!(
            served.metric(&format!(
                "stowage_agent_missing_parts_total{{part=\"{part}\"}}"
            )),
            1
        );
    }
    let foreign_pod = edited(report("node-z", "boot", 2, 0), |r| {
        r["gpus"] = Value::Null;
        r["missing"] = missing;
    });
    expect_refusal(&served, 422, "unknown-node", &foreign_pod);
}

#[test]
fn reports_and_verbs_have_separate_addresses() {
    let served = served();
    let answer = served.post("/v1/reports", report("node-a", "boot", 2, 1));
    assert_eq!(answer.status, 404);
    assert!(
        answer.text().contains("--agents") && answer.text().contains("9446"),
        "{}",
        answer.text()
    );
    let mut agents = Client::connect(served.agents);
    let answer = agents.post(
        "/scheduler/filter",
        args(&pod("small", "10Gi"), &["node-a"]).to_string(),
    );
    assert_eq!(answer.status, 404);
    assert!(answer.text().contains("--listen"), "{}", answer.text());
    assert_eq!(agents.get("/v1/reports").status, 405);
    assert_eq!(served.charged("node-a").len(), 2);
}

#[test]
fn a_truncated_report_and_one_of_seventy_megabytes_are_refused() {
    let served = served();
    let ledger = served.ledger();
    let whole = report("node-a", "boot", 2, 1).to_string();
    let answer = Client::connect(served.agents).post("/v1/reports", &whole[..whole.len() / 2]);
    assert_eq!(answer.status, 400, "{}", answer.text());
    let mut client = Client::connect(served.agents);
    client
        .write(post_head("/v1/reports", "Content-Length: 73400320").as_bytes())
        .unwrap();
    let answer = client.read_answer().unwrap();
    assert_eq!(answer.status, 413, "{}", answer.text());
    assert_eq!(served.bad_requests("reports", "too-large"), 1);
    assert_eq!(served.ledger(), ledger);
}

#[test]
fn operators_see_each_nodes_latest_report_and_how_old_it_is() {
    let served = ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 2)]).serve();
    let bytes = served.metric("stowage_agent_report_bytes_total");
    let later =
        edited(
            report("node-a", "boot", 7, 1),
            |r| r["models"] = json!([{ "model": "m", "tier": "disk", "source": "huggingface" }]),
        );
    assert_eq!(served.report(later.clone()).status, 200);
    let mut operators = Client::connect(served.operators);
    let board = operators.get_page("/debug/reports").json();
    assert_eq!(board["node-a"]["report"]["sequence"], 7);
    assert_eq!(board["node-a"]["report"]["models"][0]["model"], "m");
    assert_eq!(
        board["node-b"]["report"]["gpus"].as_array().unwrap().len(),
        2
    );
    assert!(board["node-b"]["receivedMillisAgo"].is_u64());
    assert_eq!(board.as_object().unwrap().len(), 2);
    assert_eq!(
        served.metric("stowage_agent_report_bytes_total"),
        bytes + later.to_string().len() as u64
    );
    let ages = |operators: &mut Client<_>| {
        operators
            .get_page("/metrics")
            .text()
            .matches("stowage_node_report_age_seconds{")
            .count()
    };
    assert_eq!(ages(&mut operators), 2);
    for name in ["node-a", "node-b"] {
        served.index.lock().delete_node(
            &served.service,
            &serde_json::from_value(node(name)).unwrap(),
        );
    }
    assert_eq!(
        operators.get_page("/debug/reports").json(),
        json!({}),
        "nodes that are gone"
    );
    assert_eq!(ages(&mut operators), 0);
}

#[test]
fn the_leader_records_events_for_what_an_agent_found() {
    let tenant = bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30);
    let other = bound_on(pod("other", "40Gi"), "node-b", &[0], 40 << 30);
    let served = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 1)])
        .with([tenant, other, pod("small", "10Gi")])
        .serve();
    let finding = |pod: &str| {
        json!([
            { "kind": "drift", "pod": pod, "recorded": ["GPU-made-up"], "actual": ["GPU-node-a-1"] },
            { "kind": "over-grant", "pod": pod, "grantedBytes": 40u64 << 30, "usedBytes": 44u64 << 30 },
        ])
    };
    let told = |sequence: u64, pod: &str| {
        let before = served.events().len();
        let report = edited(report("node-a", "boot", sequence, 2), |r| {
            r["findings"] = finding(pod)
        });
        assert_eq!(
            served.report(report).json(),
            json!({ "accepted": 1, "dropped": 0 })
        );
        served.events().split_off(before)
    };
    assert_eq!(told(2, "uid-other"), [], "a pod of another node");
    assert_eq!(told(3, "uid-small"), [], "a pod of no node");
    assert_eq!(told(4, "uid-nobody"), [], "no pod");
    let events = told(5, "uid-tenant");
    let [(drifts, drift, drift_text), (overs, over_grant, over_text)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((drifts.as_str(), *drift), ("tenant", PodEventReason::Drift));
    assert!(
        drift_text.contains("run on GPU-node-a-1") && drift_text.contains("recorded GPU-node-a-0"),
        "{drift_text}"
    );
    assert_eq!(
        (overs.as_str(), *over_grant),
        ("tenant", PodEventReason::OverGrant)
    );
    assert!(
        over_text.contains("44.0 GiB") && over_text.contains("40.0 GiB"),
        "{over_text}"
    );
    served.service.set_tenure(Tenure::Standby);
    assert_eq!(told(6, "uid-tenant"), [], "the other replica tells it");
    // Four pods had each, and it still stands for the last.
    for kind in ["drift", "over-grant"] {
        assert_eq!(
            served.metric(&format!("stowage_agent_findings_total{{kind=\"{kind}\"}}")),
            4,
            "{kind}"
        );
    }
}

#[test]
fn a_pod_whose_limit_is_not_in_force_is_told_after_three_reports_in_a_row() {
    let tenant = bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30);
    let told = |isolation: Isolation, reports: &[(Option<u64>, u64)]| {
        let mut cluster = ServedCluster::with_gpus(&[("node-a", 1)]).with([tenant.clone()]);
        let mut classes = cluster.policy.classes().to_vec();
        classes
            .iter_mut()
            .for_each(|class| class.isolation = isolation);
        cluster.policy = cluster.policy.with_classes(classes).unwrap();
        let served = cluster.serve();
        let mut texts = Vec::new();
        for (sequence, (written, limit)) in (2..).zip(reports) {
            let report = edited(report("node-a", "boot", sequence, 1), |report| {
                let cgroup =
                    json!({ "pod": "uid-tenant", "limitBytes": limit, "writtenBytes": written });
                report["gpus"][0]["cgroups"] = json!([cgroup]);
            });
            let before = served.events().len();
            let answer = served.report(report).json();
            assert_eq!(answer, json!({ "accepted": 1, "dropped": 0 }));
            let events = served.events().split_off(before);
            texts.push(events.into_iter().next().map(|(name, kind, text)| {
                assert_eq!(
                    (name.as_str(), kind),
                    ("tenant", PodEventReason::LimitNotKept)
                );
                text
            }));
        }
        texts
    };
    let written = Some(40 << 30);
    let (kept, larger, none) = (40 << 30, 50 << 30, 80 << 30);
    let reports = [kept + (1 << 20), none, none, kept, none, none, none, larger];
    let texts = told(Isolation::Preferred, &reports.map(|limit| (written, limit)));
    assert!(texts[..6].iter().all(Option::is_none), "{texts:?}");
    let text = |place: usize| texts[place].clone().unwrap();
    assert!(text(6).contains("no limit is in force") && text(6).contains("wrote 40.0 GiB"));
    assert!(
        text(7).contains("a limit of 50.0 GiB is in force"),
        "{}",
        text(7)
    );
    let never = |isolation, written| {
        let texts = told(isolation, &[(written, none); 4]);
        assert!(texts.iter().all(Option::is_none), "{texts:?}");
    };
    never(Isolation::Preferred, None);
    never(Isolation::None, written);
}

#[test]
fn an_engine_that_keeps_its_limit_beside_nobody_is_told_once() {
    let engine = bound_on(pod("engine", "40Gi"), "node-a", &[0], 40 << 30);
    let mut cluster = ServedCluster::with_gpus(&[("node-a", 1)]).with([engine]);
    let mut classes = cluster.policy.classes().to_vec();
    for class in &mut classes {
        (class.engine, class.max_time_per_token) = (true, Some(Millis(40)));
    }
    cluster.policy = cluster.policy.with_classes(classes).unwrap();
    let served = cluster.serve();
    for sequence in 2..5 {
        let report = edited(report("node-a", "boot", sequence, 1), |report| {
            report["engines"] = json!([{
                "pod": "uid-engine", "gpus": ["GPU-node-a-0"], "engine": "vllm", "state": "serving", "ageMillis": 0,
                "timePerToken": {"meanMicros": 62_000},
            }]);
        });
        assert_eq!(served.report(report).json()["accepted"], 1);
    }
    let events = served.events();
    let [(name, PodEventReason::LatencyLimitTooLow, text), ..] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(name, "engine");
    assert!(
        text.contains("takes 62.0 ms for a token on node-a, and its class allows 40.0 ms"),
        "{text}"
    );
}

#[test]
fn a_pod_that_uses_a_gpu_without_an_allocation_gets_an_event() {
    let bound = |name: &str, node: &str, limits: Value| {
        edited(pod(name, "1Gi"), |pod| {
            pod["spec"]["nodeName"] = json!(node);
            pod["spec"]["containers"][0]["resources"]["limits"] = limits;
        })
    };
    let mut cluster = ServedCluster::with_gpus(&[
        ("node-a", 2),
        ("node-b", 1),
        ("plugins", 1),
        ("volcanos", 1),
    ])
    .with([
        bound("sneaks", "node-a", json!({})),
        bound("preset", "node-a", json!({ "nvidia.com/gpu": "1" })),
        bound("unplaced", "node-a", json!({ "stowage.dev/vram": "1Gi" })),
        bound("elsewhere", "node-b", json!({})),
        bound("plugin", "plugins", json!({ "nvidia.com/gpu": "1" })),
        bound("sidecar", "plugins", json!({})),
        bound("vgpu", "volcanos", json!({ "volcano.sh/vgpu-number": "1" })),
    ]);
    for (node, resource) in [(2, "nvidia.com/gpu"), (3, "volcano.sh/vgpu-number")] {
        cluster.nodes[node]["status"] =
            json!({ "capacity": { resource: "1" }, "allocatable": { resource: "1" } });
    }
    let served = cluster.serve();
    let told = |node: &str, sequence: u64| -> Vec<String> {
        let before = served.events().len();
        let names = [
            "sneaks",
            "preset",
            "unplaced",
            "elsewhere",
            "plugin",
            "sidecar",
            "vgpu",
            "nobody",
        ];
        let unrecorded = names.map(|name| {
            let gpu = format!("GPU-{node}-0");
            json!({ "pod": format!("uid-{name}"), "namespace": "default", "name": name, "gpus": [gpu] })
        });
        let report = edited(report(node, "boot", sequence, 1), |r| {
            r["unrecorded"] = json!(unrecorded)
        });
        assert_eq!(
            served.report(report).json(),
            json!({ "accepted": 1, "dropped": 0 })
        );
        let events = served.events().split_off(before).into_iter();
        let of_kind = events.filter(|(_, kind, _)| *kind == PodEventReason::Ungranted);
        of_kind
            .map(|(name, _, text)| format!("{name} {}", text.contains(&format!("GPU-{node}-0"))))
            .collect()
    };
    assert_eq!(
        told("node-a", 2),
        ["sneaks true", "preset true"],
        "the third has an Event of its own"
    );
    assert_eq!(
        told("node-b", 2),
        ["elsewhere true"],
        "an agent names pods of its own node only"
    );
    assert_eq!(
        told("plugins", 2),
        [""; 0],
        "the device plugin gave them theirs"
    );
    assert_eq!(told("volcanos", 2), [""; 0], "another allocator did");
    served.service.set_tenure(Tenure::Standby);
    assert_eq!(told("node-a", 3), [""; 0], "the other replica tells it");
    let bad = edited(report("node-a", "boot", 4, 1), |r| {
        r["unrecorded"] =
            json!([{ "pod": "uid-sneaks", "namespace": "a/b", "name": "", "gpus": [] }]);
    });
    assert_eq!(
        served.report(bad).status,
        200,
        "a name that cannot be one names nobody"
    );
}

#[test]
fn the_pods_of_a_lost_gpu_get_one_event_that_names_the_gpu_and_the_cause() {
    let tenants = (0..4).map(|gpu| {
        bound_on(
            pod(&format!("tenant-{gpu}"), "20Gi"),
            "node-a",
            &[gpu],
            20 << 30,
        )
    });
    let pair = bound_on(
        with_gpu_count(pod("pair", "20Gi"), 2),
        "node-a",
        &[0, 1],
        20 << 30,
    );
    let served = ServedCluster::with_gpus(&[("node-a", 5), ("node-b", 1)])
        .with(tenants)
        .with([
            pair,
            bound_on(pod("elsewhere", "20Gi"), "node-b", &[0], 20 << 30),
        ])
        .serve();
    assert_eq!(served.events(), [], "the first report has lost nothing");
    let changed = |sequence: u64| {
        edited(report("node-a", "boot", sequence, 5), |r| {
            let gpus = r["gpus"].as_array_mut().unwrap();
            gpus[1]["health"] = json!("lost");
            gpus[1]["healthReason"] = json!("XID 79");
            gpus[2]["totalBytes"] = json!(GPU_BYTES / 2);
            let slice = json!({ "uuid": "MIG-3", "index": 3, "model": "H100-MIG-3g.40gb", "parent": "GPU-node-a-3", "totalBytes": GPU_BYTES / 2 });
            gpus.push(slice);
            gpus.remove(0);
        })
    };
    assert_eq!(served.report(changed(2)).status, 200);
    let mut events = served.events();
    events.sort();
    let [pair, zero, one, two, three] = &events[..] else {
        panic!("{events:?}")
    };
    let says = |notice: &(String, PodEventReason, String), name: &str, parts: &[&str]| {
        assert_eq!(
            (notice.0.as_str(), notice.1),
            (name, PodEventReason::GpuLost)
        );
        parts
            .iter()
            .for_each(|part| assert!(notice.2.contains(part), "{} does not say {part}", notice.2));
    };
    says(
        zero,
        "tenant-0",
        &["On node-a: GPU GPU-node-a-0 is gone", "Delete the pod"],
    );
    says(one, "tenant-1", &["GPU GPU-node-a-1 is unhealthy: XID 79"]);
    says(
        two,
        "tenant-2",
        &["GPU GPU-node-a-2 has shrunk from 80.0 GiB to 40.0 GiB"],
    );
    says(
        three,
        "tenant-3",
        &["GPU GPU-node-a-3 has been partitioned into MIG slices"],
    );
    says(
        pair,
        "pair",
        &["GPU-node-a-0 is gone", "; GPU GPU-node-a-1 is unhealthy"],
    );
    assert_eq!(served.report(changed(3)).status, 200);
    assert_eq!(served.events().len(), 5, "nothing has changed since");
}

#[test]
fn a_missing_or_wrong_field_of_a_report_is_named() {
    let served = served();
    for field in ["node", "bootId", "sequence", "gpus"] {
        let report = edited(report("node-a", "boot", 2, 2), |r| {
            drop(r.as_object_mut().unwrap().remove(field))
        });
        let error = expect_refusal(&served, 422, "malformed", &report);
        assert!(
            error.contains(&format!("missing field `{field}`")) && error.contains("line 1 column"),
            "{error}"
        );
    }
    for (field, value) in [
        ("totalBytes", json!(-1)),
        ("index", json!("0")),
        ("uuid", json!("")),
    ] {
        let report = edited(report("node-a", "boot", 2, 2), |r| {
            r["gpus"][1][field] = value
        });
        assert!(expect_refusal(&served, 422, "malformed", &report).contains("line 1 column"));
    }
}

#[test]
fn a_report_that_is_no_json_is_a_400() {
    let served = served();
    let ledger = served.ledger();
    for body in ["{\"node\": \n ]", "", "[{},"] {
        let answer = Client::connect(served.agents).post("/v1/reports", body);
        assert_eq!(answer.status, 400, "{body:?}: {}", answer.text());
        assert!(answer.text().contains("column"), "{}", answer.text());
    }
    assert_eq!(served.bad_requests("reports", "malformed"), 3);
    assert_eq!(served.ledger(), ledger);
}

#[test]
fn unknown_fields_of_a_later_version_are_accepted() {
    let served = served();
    let later = edited(report("node-a", "boot", 2, 3), |r| {
        r["driver"] = json!({ "version": "600.1" });
        r["gpus"][2]["temperature"] = json!(55);
    });
    assert_eq!(
        served.report(later).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
    assert_eq!(served.charged("node-a").len(), 3);
}

#[test]
fn old_and_replayed_reports_are_dropped_and_a_new_boot_id_restarts_the_count() {
    let served = served();
    let taken = json!({ "accepted": 1, "dropped": 0 });
    let dropped = json!({ "accepted": 0, "dropped": 1 });
    let send =
        |boot: &str, sequence, gpus| served.report(report("node-a", boot, sequence, gpus)).json();
    assert_eq!(send("boot", 5, 2), taken);
    let ledger = served.ledger();
    assert_eq!(send("boot", 5, 4), dropped, "replayed");
    assert_eq!(send("boot", 4, 4), dropped, "older");
    assert_eq!(served.ledger(), ledger);
    assert_eq!(send("boot-2", 1, 3), taken, "the agent has restarted");
    let ledger = served.ledger();
    assert_eq!(send("boot", 6, 4), dropped, "of the boot before");
    assert_eq!(served.ledger(), ledger);
    assert_eq!(outcomes(&served, "old"), 3);
    assert_eq!(served.charged("node-a").len(), 3);
}

#[test]
fn racing_reports_of_one_node_end_with_the_latest() {
    const SENDERS: u64 = 4;
    const LAST: u64 = 200;
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    std::thread::scope(|scope| {
        for sender in 1..=SENDERS {
            let served = &served;
            scope.spawn(move || {
                let mut client = Client::connect(served.agents);
                for sequence in (sender..=LAST).step_by(SENDERS as usize) {
                    let gpus = 1 + (sequence % 8) as u32;
                    let body = report("node-a", "racing", sequence, gpus).to_string();
                    assert_eq!(client.post("/v1/reports", body).status, 200);
                }
            });
        }
    });
    let board = Client::connect(served.operators)
        .get_page("/debug/reports")
        .json();
    assert_eq!(board["node-a"]["report"]["sequence"], LAST);
    assert_eq!(
        served.charged("node-a").len() as u64,
        1 + LAST % 8,
        "the ledger is as the board"
    );
    assert_eq!(
        outcomes(&served, "accepted") + outcomes(&served, "old"),
        1 + LAST
    );
}

#[test]
fn the_valid_reports_of_a_batch_count() {
    let served = ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 1)]).serve();
    let batch = json!([
        report("node-a", "boot", 2, 2),
        report("node-z", "boot", 2, 2),
        report("node-b", "boot", 1, 2),
        {}
    ]);
    let answer = served.report(batch);
    assert_eq!(answer.status, 200);
    let result = answer.json();
    assert_eq!(
        (&result["accepted"], &result["dropped"]),
        (&json!(1), &json!(1))
    );
    let places: Vec<(&Value, &Value)> = result["refused"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (&one["report"], &one["code"]))
        .collect();
    assert_eq!(
        places,
        [
            (&json!(1), &json!("unknown-node")),
            (&json!(3), &json!("malformed"))
        ]
    );
    assert_eq!(
        (
            served.charged("node-a").len(),
            served.charged("node-b").len()
        ),
        (2, 1)
    );
}

#[test]
fn a_report_with_absurdly_much_memory_breaks_nothing() {
    let served = served();
    let absurd = edited(report("node-a", "boot", 2, 2), |r| {
        for gpu in [0, 1] {
            r["gpus"][gpu]["totalBytes"] = json!(u64::MAX);
        }
    });
    assert_eq!(served.report(absurd).status, 200);
    served.ledger();
    served.metric("stowage_nodes");
    assert_eq!(
        served.filter_passed(&pod("vast", "9223372036854775807"), &["node-a"]),
        ["node-a"]
    );
    assert_eq!(
        served.bind(&pod("vast", "9223372036854775807"), "node-a"),
        ""
    );
    assert_eq!(served.report(report("node-a", "boot", 3, 2)).status, 200);
    served.ledger();
}

#[test]
fn a_gpu_with_a_pod_that_is_no_longer_reported_is_lost_and_keeps_its_charge() {
    let served = served();
    let without = json!({ "node": "node-a", "bootId": "boot", "sequence": 2, "gpus": [gpu_report("node-a", 1)] });
    assert_eq!(served.report(without).status, 200);
    assert_eq!(
        served.charged("node-a"),
        [
            stowage_scheduling::units::Bytes::gib(40),
            stowage_scheduling::units::Bytes::ZERO
        ]
    );
    let small = pod("small", "10Gi");
    assert_eq!(served.filter_passed(&small, &["node-a"]), ["node-a"]);
    assert_eq!(served.bind(&small, "node-a"), "");
    assert_eq!(
        served.pod_state(&small).unwrap().devices().unwrap()[0].as_str(),
        "GPU-node-a-1",
        "nothing new on a lost GPU"
    );
}
