//! Every expression of the dashboard and the left side of every alert, asked of a real Prometheus that scrapes a cluster and a
//! node's agent: each has data, with the labels that its legend or its words name.
//!
//! The cluster is the demo's stand-ins around the whole service, and one node more whose agent is the command itself, over a
//! scripted driver. What an expression is about happens: engines with load start, a pod fits nowhere, the service keeps a
//! certificate, and a GPU node joins without an agent.

use super::prometheus::{RunningPrometheus, ScrapeTarget};
use super::rules::{alerts, recorded};
use super::{dashboard, rules::Alert};
use crate::agent::world::{AgentNode, NODE, RunningAgent, gpu};
use crate::certificates::create_empty;
use crate::served::{eventually, gpu_labels, node};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use stowage_lab::demo::engines::{FakeEngine, FakeEngineLoad};
use stowage_lab::demo::machine::DemoMachine;
use stowage_lab::demo::setup::Setup;
use stowage_policy_file::{SourceText, load};
use stowage_scheduling::policy::Policy;
use stowage_server::kubernetes::certificates::{self, CertificateOptions, CertificateSettings};
use tokio::runtime::Runtime;

/// Longest wait for data in Prometheus: a busy machine takes a while for each scrape and each step of the cluster.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(240);

const POLICY: &str = "\
apiVersion: stowage.dev/v1alpha1
kind: SchedulingPolicy
# A busy machine makes reports late.
telemetry: {fresh: 60s, stale: 120s}
tenants:
  - {name: search, namespaces: [default], guarantee: {vram: 72Gi}, limit: {vram: 288Gi}}
  - {name: research, namespaces: [research], guarantee: {vram: 72Gi}}
autoscaling:
  models:
    llama-8b: {minReplicas: 1, maxReplicas: 8}
";

const fn machine(node: &'static str) -> DemoMachine {
    DemoMachine {
        node,
        model: "H100",
        gpu_count: 2,
        gib_per_gpu: 80,
        models: &[],
    }
}

/// A cluster that is scraped.
struct ScrapedCluster {
    engines: Vec<FakeEngine>,
    agents_page: SocketAddr,
    _agent: RunningAgent,
    _node: AgentNode,
    setup: Setup,
    runtime: Runtime,
}

impl ScrapedCluster {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let setup = runtime
            .block_on(Setup::with_policy(policy(), &[machine("node-b")]))
            .unwrap();
        keeps_a_certificate(&setup, &runtime);
        let node = AgentNode::with_gpus([gpu("a")]);
        setup
            .api
            .create("nodes", machine(NODE).node_object())
            .unwrap();
        node.set_api_server(&setup.api.uri().to_string());
        let reports_to = format!("http://{}", setup.stowage.addresses.agents);
        let arguments = ["--extender", &reports_to, "--metrics-listen", "127.0.0.1:0"];
        let agent = RunningAgent::start(&mut node.agent(&arguments));
        let says = agent.line_with("metrics: http://");
        let agents_page = says
            .split("http://")
            .nth(1)
            .unwrap()
            .split('/')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        Self {
            engines: Vec::new(),
            agents_page,
            _agent: agent,
            _node: node,
            setup,
            runtime,
        }
    }

    /// As a Prometheus finds them by the manifests.
    fn targets(&self) -> [ScrapeTarget<'static>; 2] {
        let operators = self.setup.stowage.addresses.operators;
        [
            ScrapeTarget {
                job: "stowage",
                address: operators,
                labels: json!({}),
            },
            ScrapeTarget {
                job: "stowage-agent",
                address: self.agents_page,
                labels: json!({ "node": NODE }),
            },
        ]
    }

    /// What the expressions are about. Called once both pages are scraped, so that counters are seen to rise.
    fn lives(&mut self) {
        for name in ["llama-8b-1", "llama-8b-2"] {
            let load = FakeEngineLoad {
                kv_percent: 60,
                waiting: 3,
                running: 12,
            };
            let engine = FakeEngine::start(self.setup.api.clone(), name, "llama-8b", load);
            let engine = self.runtime.block_on(engine).unwrap();
            self.create(pod(name, 20, Some(engine.port())));
            self.engines.push(engine);
        }
        // A node has that much, and no GPU of it.
        self.create(pod("vast", 100, None));
        let mut late = node("node-without-agent");
        late["metadata"]["labels"] = gpu_labels(2);
        // Nothing is placed where no agent would ever report it.
        late["spec"] = json!({ "unschedulable": true });
        self.setup.api.create("nodes", late).unwrap();
    }

    fn create(&self, pod: Value) {
        self.setup.api.create("pods", pod).unwrap();
    }
}

fn policy() -> Policy {
    load(&[SourceText::new("policy.yaml", POLICY)])
        .unwrap()
        .policy
}

/// As `serve --agents-tls-secret` does.
fn keeps_a_certificate(setup: &Setup, runtime: &Runtime) {
    create_empty(&setup.api);
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let options = CertificateOptions {
        webhook_configuration: None,
        secret: "kube-system/stowage-agents-tls".parse().unwrap(),
        config_map: "kube-system/stowage-agents-ca".parse().unwrap(),
        settings: CertificateSettings {
            dns_names: vec!["127.0.0.1".into()],
            lifetime: 90 * DAY,
            ca_lifetime: 365 * DAY,
            publication_delay: Duration::from_secs(1),
        },
        read_interval: Duration::from_millis(200),
    };
    let _inside = runtime.enter();
    let client = setup.api.client("stowage").unwrap();
    let keeping = certificates::run(
        client,
        setup.stowage.state.clone(),
        options,
        vec!["agents"],
        |_| Ok(()),
    );
    drop(runtime.spawn(keeping));
}

/// With a port it is an engine, which says when it is ready.
fn pod(name: &str, gib: u64, port: Option<u16>) -> Value {
    let mut container = json!({
        "name": "engine", "image": "vllm/vllm-openai:v0.12.0",
        "resources": { "limits": { "stowage.dev/vram": format!("{gib}Gi") } },
    });
    let mut annotations = json!({});
    if let Some(port) = port {
        container["readinessProbe"] = json!({ "httpGet": { "path": "/health", "port": port } });
        annotations["stowage.dev/model"] = json!("llama-8b");
        annotations["stowage.dev/metrics-port"] = json!(port.to_string());
    }
    json!({
        "metadata": { "name": name, "namespace": "default", "annotations": annotations },
        "spec": { "schedulerName": "stowage", "containers": [container] },
    })
}

/// An expression that must have data.
struct Asked {
    /// Whose it is.
    of: String,
    expression: String,
    /// Labels that its series must have, because its legend or its words name them.
    labels: BTreeSet<String>,
}

impl Asked {
    fn all() -> Vec<Self> {
        let panels = dashboard::targets().into_iter().map(|target| Self {
            of: format!("panel {:?}", target.panel),
            expression: substituted(&target.expression),
            labels: between(&target.legend, "{{", "}}"),
        });
        let alerts = alerts().into_iter().map(
            |Alert {
                 name, left, rule, ..
             }| Self {
                of: format!("alert {name}"),
                expression: left,
                labels: words(&rule)
                    .flat_map(|text| between(text, "{{ $labels.", " "))
                    .collect(),
            },
        );
        panels.chain(alerts).collect()
    }

    /// NaN is no figure: Grafana draws nothing for it.
    fn has_data(&self, prometheus: &RunningPrometheus) -> bool {
        let samples = prometheus.query(&self.expression);
        for sample in &samples {
            for label in &self.labels {
                assert!(
                    sample.labels.contains_key(label),
                    "{}: no {label} in {:?}",
                    self.of,
                    sample.labels
                );
            }
        }
        samples.iter().any(|sample| sample.value.is_finite())
    }
}

fn words(rule: &Value) -> impl Iterator<Item = &str> {
    rule["annotations"]
        .as_object()
        .unwrap()
        .values()
        .map(|text| text.as_str().unwrap())
}

/// What stands between the two, each time.
fn between(text: &str, begin: &str, end: &str) -> BTreeSet<String> {
    let parts = text.split(begin).skip(1);
    parts
        .map(|rest| rest.split(end).next().unwrap().trim().to_owned())
        .collect()
}

/// As Grafana puts values into an expression before it asks.
fn substituted(expression: &str) -> String {
    let variables = [
        ("$__rate_interval", "5m"),
        ("$__interval", "1m"),
        ("$__range", "15m"),
    ];
    let asked = variables
        .iter()
        .fold(expression.to_owned(), |text, (name, value)| {
            text.replace(name, value)
        });
    assert!(
        !asked.contains('$'),
        "this test has no value for a variable of {asked}"
    );
    asked
}

#[test]
fn every_expression_of_the_dashboard_and_of_the_alerts_has_data() {
    let mut cluster = ScrapedCluster::start();
    let targets = cluster.targets();
    let Some(prometheus) = RunningPrometheus::start(&targets) else {
        return;
    };
    eventually("both pages are scraped", || {
        prometheus.query("up == 1").len() == targets.len()
    });
    cluster.lives();

    let mut without = Asked::all();
    let asked = without.len();
    assert!(asked > 60, "{asked}");
    let started = Instant::now();
    loop {
        without.retain(|asked| !asked.has_data(&prometheus));
        if without.is_empty() {
            break;
        }
        if started.elapsed() > SCRAPE_TIMEOUT {
            let missing = without
                .iter()
                .map(|asked| format!("{}: {}\n", asked.of, asked.expression));
            panic!(
                "{} of {asked} expressions have no data:\n{}",
                without.len(),
                missing.collect::<String>()
            );
        }
        std::thread::park_timeout(Duration::from_millis(500));
    }
    rules_are_sound(&prometheus);
    cluster.runtime.block_on(cluster.setup.stop()).unwrap();
}

/// Each rule is evaluated without an error. The alert about the node without an agent has begun, and no critical one has.
fn rules_are_sound(prometheus: &RunningPrometheus) {
    let rules = prometheus.rules();
    assert_eq!(rules.len(), alerts().len() + recorded().len());
    for rule in &rules {
        assert_eq!(
            rule["health"], "ok",
            "{}: {}",
            rule["name"], rule["lastError"]
        );
    }
    let active = |is_it: fn(&Value) -> bool| {
        let rules = prometheus.rules().into_iter();
        let active = rules.filter(|rule| rule["type"] == "alerting" && rule["state"] != "inactive");
        active
            .filter(is_it)
            .map(|rule| rule["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    eventually("the missing agent is noticed", || {
        active(|rule| rule["name"] == "StowageAgentMissing").len() == 1
    });
    let mut critical = Vec::new();
    let started = Instant::now();
    while started.elapsed() < SCRAPE_TIMEOUT {
        critical = active(|rule| rule["labels"]["severity"] == "critical");
        if critical.is_empty() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(500));
    }
    panic!("critical alerts of a cluster that is well: {critical:?}");
}

#[test]
fn labels_are_found_in_legends_and_in_the_words_of_an_alert() {
    assert_eq!(
        between("{{node}} GPU {{ gpu }}, mean", "{{", "}}"),
        ["gpu", "node"].map(str::to_owned).into()
    );
    let text = "GPU {{ $labels.gpu }} of {{ $labels.node }} is {{ $value }}";
    assert_eq!(
        between(text, "{{ $labels.", " "),
        ["gpu", "node"].map(str::to_owned).into()
    );
    assert_eq!(between("none", "{{", "}}"), BTreeSet::new());
}
