//! Metrics: the reference page is what the declarations say, names keep to Prometheus' conventions, promtool finds nothing wrong
//! with the pages, and scraping is bounded.

use crate::agent::world::{AgentNode, RunningAgent, gpu};
use crate::client::Client;
use crate::needs::skip_not_installed;
use crate::served::{Served, ServedCluster, bound_on, pod, report};
use mock_nvml::{ScriptedGpu, codes};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use stowage_scheduling::policy::Tenant;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use stowage_telemetry::agent::AgentMetrics;
use stowage_telemetry::devices::MAX_SERIES_PER_GPU;
use stowage_telemetry::family::{Family, FamilyKind};
use stowage_telemetry::{Metrics, reference};

#[test]
fn the_metrics_reference_matches_the_declarations() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/metrics.md");
    let generated = reference::markdown();
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&file, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        committed, generated,
        "STOWAGE_BLESS=1 writes docs/reference/metrics.md again"
    );
}

fn families() -> Vec<Family> {
    let (serve, agent) = (Metrics::new(), AgentMetrics::new());
    let all = serve.families().all().iter().chain(agent.families().all());
    all.map(|family| Family::clone(family)).collect()
}

#[test]
fn names_help_and_labels_keep_to_the_conventions() {
    let families = families();
    assert!(families.len() > 100, "{}", families.len());
    for Family {
        name,
        kind,
        help,
        labels,
    } in &families
    {
        assert!(
            name.starts_with("stowage_") || name.starts_with("process_"),
            "{name}"
        );
        assert!(help.ends_with('.'), "{name}: {help:?} is no sentence");
        assert_eq!(
            *kind == FamilyKind::Counter,
            name.ends_with("_total"),
            "{name}"
        );
        for bad in [
            "_count",
            "_sum",
            "_bucket",
            "_milliseconds",
            "_percent",
            "_mib",
            "_gib",
            "_minutes",
        ] {
            assert!(
                !name.ends_with(bad),
                "{name}: a base unit, and no suffix of Prometheus' own"
            );
        }
        let names: Vec<&str> = labels.iter().map(|label| label.name).collect();
        assert!(
            !names
                .iter()
                .any(|name| ["le", "quantile", "percentile"].contains(name)),
            "{name}: {names:?}"
        );
    }
}

#[test]
fn every_page_declares_a_name_once() {
    for families in [
        Metrics::new().families().all(),
        AgentMetrics::new().families().all(),
    ] {
        let mut names: Vec<_> = families.iter().map(|family| &family.name).collect();
        names.sort();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}

/// promtool's verdict; `None`, with a line that says so, where there is none.
fn promtool(page: &str) -> Option<(bool, String)> {
    let started = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut tool) = started else {
        skip_not_installed("promtool", "prometheus");
        return None;
    };
    tool.stdin
        .take()
        .unwrap()
        .write_all(page.as_bytes())
        .unwrap();
    let output = tool.wait_with_output().unwrap();
    Some((
        output.status.success(),
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap(),
    ))
}

fn assert_clean(page: &str) {
    if let Some((is_clean, said)) = promtool(page) {
        assert!(is_clean && said.is_empty(), "{said}");
    }
}

fn page(served: &Served) -> String {
    let answer = Client::connect(served.operators).get_page("/metrics");
    assert_eq!(
        (answer.status, answer.content_type.as_str()),
        (200, "text/plain; version=0.0.4; charset=utf-8")
    );
    answer.text().to_owned()
}

/// Two nodes, a bound pod, a refused one, and an engine of a model whose name is made to break a line.
fn busy() -> Served {
    let served = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)])
        .with([
            bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30),
            pod("small", "10Gi"),
            pod("vast", "900Gi"),
        ])
        .serve();
    let mut report = report("node-a", "boot", 2, 2);
    report["engines"] = json!([{
        "pod": "uid-tenant", "engine": "vllm", "gpus": ["GPU-node-a-0"], "state": "serving", "model": "a\"}\\,b=\"é",
        "kvCacheUsage": 0.5, "waiting": 3, "running": 7, "tokensPerSecond": 120.5,
        "promptTokensPerSecond": 900.0, "busy": 0.5, "timePerToken": { "meanMicros": 14_200, "p99Micros": 31_000 },
        "timeToFirstToken": { "meanMicros": 310_000 },
    }]);
    assert_eq!(
        served.report(report).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
    assert_eq!(
        served.filter_passed(&pod("vast", "900Gi"), &["node-a", "node-b"]),
        Vec::<String>::new()
    );
    assert_eq!(
        served
            .filter_passed(&pod("small", "10Gi"), &["node-a", "node-b"])
            .len(),
        2
    );
    assert_eq!(served.bind(&pod("small", "10Gi"), "node-b"), "");
    served
}

/// Families of what this cluster does not have.
const FAMILIES_WITHOUT_SAMPLES: [&str; 12] = [
    "stowage_certificate_expiry_timestamp_seconds",
    "stowage_engine_start_error_median_ratio",
    "stowage_engine_start_error_p90_ratio",
    "stowage_model_desired_replicas",
    "stowage_node_warnings",
    "stowage_pod_over_grant_bytes",
    "stowage_spare_gpus",
    "stowage_tenant_pending_pods",
    "stowage_tenant_vram_allocated_bytes",
    "stowage_tenant_vram_borrowed_bytes",
    "stowage_tenant_vram_guarantee_bytes",
    "stowage_tenant_vram_limit_bytes",
];

#[test]
fn the_metrics_page_has_every_family_and_passes_promtool() {
    let served = busy();
    let text = page(&served);
    assert_clean(&text);
    for line in [
        "stowage_gpu_vram_allocated_bytes{node=\"node-a\",gpu=\"GPU-node-a-0\"} 42949672960\n",
        "stowage_gpu_healthy{node=\"node-a\",gpu=\"GPU-node-a-1\"} 1\n",
        "stowage_node_info{node=\"node-b\",kind=\"stowage\",pool=\"none\"} 1\n",
        "stowage_class_pods{class=\"serving\",phase=\"bound\"} ",
        "stowage_evictions_total{reason=\"preemption\"} 0\n",
        "stowage_reservations 0\n",
        "stowage_reservation_age_seconds 0\n",
        "stowage_pod_placement_duration_seconds_count{class=\"",
        "stowage_oldest_pending_pod_age_seconds{class=\"",
        "stowage_vram_fragmented_bytes ",
        "stowage_ledger_lock_wait_seconds_count 2\n",
        "stowage_ledger_lock_hold_seconds_count 2\n",
        "stowage_model_replicas{model=\"a\\\"}\\\\,b=\\\"é\",state=\"resident\"} 1\n",
        "stowage_model_time_per_token_seconds{model=\"a\\\"}\\\\,b=\\\"é\"} 0.0142\n",
        "stowage_model_tokens_per_second{model=\"a\\\"}\\\\,b=\\\"é\"} 120.5\n",
        "process_resident_memory_bytes ",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let families = served.service.metrics.families();
    let declared: BTreeSet<&str> = families
        .all()
        .iter()
        .map(|family| family.name.as_str())
        .collect();
    let shown: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let absent: Vec<&str> = declared.difference(&shown).copied().collect();
    assert_eq!(absent, FAMILIES_WITHOUT_SAMPLES);
    assert!(shown.is_subset(&declared));
}

#[test]
fn the_figures_of_tenants_classes_and_the_cluster_are_those_of_their_pods() {
    let gib = |gib: u64| gib << 30;
    let tenant = |name: &str, namespace: &str, guarantee: u64, limit: u64| Tenant {
        guarantee: TenantUsage {
            vram: Bytes::gib(guarantee),
            milli_gpus: u64::MAX,
        },
        limit: TenantLimit {
            vram: Some(Bytes::gib(limit)),
            milli_gpus: None,
        },
        ..Tenant::new(name, &[namespace])
    };
    let tenants = vec![
        tenant("chat", "default", 30, 100),
        tenant("search", "search", 70, 200),
    ];
    let mut cluster = ServedCluster::with_gpus(&[("node-a", 2)]).with([
        bound_on(pod("large", "40Gi"), "node-a", &[0], gib(40)),
        bound_on(pod("small", "10Gi"), "node-a", &[0], gib(10)),
        pod("vast", "900Gi"),
    ]);
    cluster.policy = cluster.policy.with_tenants(tenants).unwrap();
    let served = cluster.serve();
    assert_eq!(
        served.filter_passed(&pod("vast", "900Gi"), &["node-a"]),
        Vec::<String>::new()
    );
    let text = page(&served);
    for (metric, amount) in [
        ("tenant_vram_allocated_bytes{tenant=\"chat\"}", gib(50)),
        ("tenant_vram_allocated_bytes{tenant=\"search\"}", 0),
        ("tenant_vram_guarantee_bytes{tenant=\"chat\"}", gib(30)),
        ("tenant_vram_guarantee_bytes{tenant=\"search\"}", gib(70)),
        ("tenant_vram_borrowed_bytes{tenant=\"chat\"}", gib(20)),
        ("tenant_vram_borrowed_bytes{tenant=\"search\"}", 0),
        ("tenant_vram_limit_bytes{tenant=\"chat\"}", gib(100)),
        ("tenant_vram_limit_bytes{tenant=\"search\"}", gib(200)),
        ("tenant_pending_pods{tenant=\"chat\"}", 1),
        ("tenant_pending_pods{tenant=\"search\"}", 0),
        ("class_vram_allocated_bytes{class=\"serving\"}", gib(50)),
        ("class_vram_borrowed_bytes{class=\"serving\"}", 0),
        ("vram_allocatable_bytes", 2 * gib(72)),
        ("vram_allocated_bytes", gib(50)),
        ("vram_lent_bytes", 0),
        (
            "gpu_vram_allocatable_bytes{node=\"node-a\",gpu=\"GPU-node-a-0\"}",
            gib(72),
        ),
        ("gpu_pods{node=\"node-a\",gpu=\"GPU-node-a-0\"}", 2),
        ("gpu_pods{node=\"node-a\",gpu=\"GPU-node-a-1\"}", 0),
        ("borrowing_pods", 0),
        ("dra_nodes", 0),
    ] {
        let line = format!("stowage_{metric} {amount}");
        assert!(text.lines().any(|found| found == line), "no {line}\n{text}");
    }
}

#[test]
fn a_binding_is_counted_with_its_pods_waiting_time() {
    let served = busy();
    let text = page(&served);
    let counts = text.lines().filter_map(|line| {
        let (_, count) = line
            .strip_prefix("stowage_pod_placement_duration_seconds_count{")?
            .split_once("} ")?;
        count.parse::<u64>().ok()
    });
    assert_eq!(
        counts.sum::<u64>(),
        1,
        "of the pod that was bound, and from the start of every class"
    );
    assert!(
        text.contains("stowage_oldest_pending_pod_age_seconds{"),
        "of the one that waits"
    );
}

#[test]
fn a_gpu_has_at_most_six_series() {
    let text = page(&busy());
    let of = |gpu: &str| {
        text.lines()
            .filter(|line| line.starts_with("stowage_") && line.contains(&format!("gpu=\"{gpu}\"")))
            .count()
    };
    for gpu in ["GPU-node-a-0", "GPU-node-a-1"] {
        assert_eq!(of(gpu), MAX_SERIES_PER_GPU, "{gpu}");
    }
}

#[test]
fn a_prometheus_that_scrapes_without_a_pause_is_bounded_and_delays_no_decision() {
    let served = busy();
    let scrape = |address: SocketAddr| {
        // A client that is turned away learns so by the status.
        let answer = Client::connect(address).get_page("/metrics");
        assert!([200, 503].contains(&answer.status), "{}", answer.status);
        answer.status
    };
    let answers: Vec<u16> = std::thread::scope(|threads| {
        let scrapers: Vec<_> = (0..20)
            .map(|_| {
                threads.spawn(|| {
                    (0..10)
                        .map(|_| scrape(served.operators))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        for _ in 0..10 {
            assert_eq!(
                served.filter_passed(&pod("vast", "900Gi"), &["node-a", "node-b"]),
                Vec::<String>::new()
            );
        }
        scrapers
            .into_iter()
            .flat_map(|scraper| scraper.join().unwrap())
            .collect()
    });
    assert_eq!(answers.len(), 200);
    let limited = answers.iter().filter(|status| **status == 503).count();
    assert!(limited < 200, "some are answered");
    assert_eq!(
        served.metric("stowage_requests_limited_total{address=\"operators\",limit=\"pages\"}"),
        limited as u64
    );
}

#[test]
fn agents_page_shows_what_the_driver_knows_and_promtool_finds_nothing_wrong() {
    let blind = ScriptedGpu {
        refuse: [("nvmlDeviceGetPowerUsage".to_owned(), codes::NOT_SUPPORTED)].into(),
        ..gpu("b")
    };
    let seeing = ScriptedGpu {
        temperature: 63,
        power_milliwatts: 412_500,
        utilization: 80,
        gpm: Some(["61".to_owned(), "NaN".to_owned()]),
        ..gpu("a")
    };
    let (zero, one) = (seeing.uuid.clone(), blind.uuid.clone());
    let world = AgentNode::with_gpus([seeing, blind]);
    let extender = world.extender();
    let url = format!("http://{}", extender.agents);
    let agent = RunningAgent::start(&mut world.agent(&[
        "--interval",
        "100ms",
        "--extender",
        &url,
        "--metrics-listen",
        "127.0.0.1:0",
    ]));
    let said = agent.line_with("metrics: http://");
    let address = said
        .split("http://")
        .nth(1)
        .unwrap()
        .split('/')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let mut text = String::new();
    crate::served::eventually(
        "the page shows an accepted report, and the GPUs of the latest",
        || {
            text = Client::connect(address).get("/metrics").text().to_owned();
            let accepted = "stowage_agent_sent_reports_total{outcome=\"accepted\"} ";
            text.lines().any(|line| {
                line.strip_prefix(accepted)
                    .is_some_and(|count| count != "0")
            }) && text.contains("\nstowage_agent_gpu_sm_activity_ratio{")
        },
    );
    assert_clean(&text);
    for line in [
        format!("stowage_agent_gpu_temperature_celsius{{gpu=\"{zero}\"}} 63\n"),
        format!("stowage_agent_gpu_power_watts{{gpu=\"{zero}\"}} 412.5\n"),
        format!("stowage_agent_gpu_utilization_ratio{{gpu=\"{zero}\"}} 0.8\n"),
        format!("stowage_agent_gpu_sm_activity_ratio{{gpu=\"{zero}\"}} 0.61\n"),
        format!("stowage_agent_gpu_temperature_celsius{{gpu=\"{one}\"}} 30\n"),
    ] {
        assert!(text.contains(&line), "{line}\n{text}");
    }
    for unknown in [
        format!("stowage_agent_gpu_power_watts{{gpu=\"{one}\"}}"),
        format!("stowage_agent_gpu_sm_activity_ratio{{gpu=\"{one}\"}}"),
        "stowage_agent_gpu_memory_bandwidth_ratio{".to_owned(),
    ] {
        assert!(!text.contains(&unknown), "{unknown} is not zero");
    }
}
