//! One `stowage serve` with very many nodes and pods: `cargo bench --features jemalloc --bench scale [-- NODES [PODS]] [tenants]`, by
//! default 65,000 and 1,000,000. With `tenants` the pods belong to forty of them, and 20,000 more wait behind the planner's gate, which
//! plans all the time.
//!
//! An API server's stand-in lists them (`api_server`), so that memory is that of a replica in a cluster. Printed are: memory, with
//! nodes only and with the pods; how long it is from the start of a replica to its first answer, and of a fail-over, from the
//! Lease; and what a filter about one node takes at most while something else happens: nothing, a scrape, each operator's
//! page, a change of policy, another label of a namespace, reports of agents. Beside each is what it takes while nothing happens
//! for as long: a shared machine holds requests up by itself. `cargo bench --features jemalloc --bench verbs` has requests about all
//! nodes, beside their floor.

mod api_server;
#[path = "../common/cluster.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod cluster;
#[path = "../common/connection.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod connection;
mod filters;
#[path = "../reports/node.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod node;
#[path = "../common/samples.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod samples;
#[path = "../common/server.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod server;

use cluster::BenchCluster;
use connection::KeepAliveConnection;
use filters::FilterLoad;
use node::{CacheUsage, ReportingNode};
use samples::Samples;
use server::ServeProcess;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const NODES: usize = 65_000;
const PODS: usize = 1_000_000;
const TENANTS: usize = 40;
const GATED: usize = 20_000;
/// Time for which filters are measured while nothing else happens.
const QUIET_TIME: Duration = Duration::from_secs(20);
/// Pages about the whole cluster.
const PAGES: [&str; 6] = [
    "/metrics",
    "/v1/fleet",
    "/v1/models",
    "/v1/explain?pod=default/too-large",
    "/debug/snapshot",
    "/debug/reports",
];
const CHANGES: usize = 3;
/// Name of a class, and value of the label of the namespaces whose pods belong to it.
const LABELLED_CLASS: &str = "labelled";
/// Number of agents whose reports are timed one after the other on one connection.
const TIMED_AGENTS: usize = 2000;
/// Reports per second of each agent in a large cluster.
const REPORTS_PER_AGENT_AND_SECOND: f64 = 0.1;
/// Reports of each agent while all of them are timed.
const ROUNDS: u32 = 3;
/// Number of connections that all agents share.
const CONNECTIONS: usize = 8;
/// Age at which a reading is stale, for agents that report every ten seconds.
const STALE_TIME: Duration = Duration::from_secs(90);
const STEP_TIMEOUT: Duration = Duration::from_secs(600);

fn main() {
    if let Ok(asked) = std::env::var(api_server::CLUSTER_VARIABLE) {
        return api_server::serve(&asked);
    }
    let asked: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|arg| arg.parse().ok())
        .collect();
    let nodes = asked.first().copied().unwrap_or(NODES);
    let pods = asked.get(1).copied().unwrap_or(PODS.min(nodes * 16));
    let (tenants, gated) = if std::env::args().any(|arg| arg == "tenants") {
        (TENANTS, GATED)
    } else {
        (0, 0)
    };
    let world = ClusterSize {
        nodes,
        pods,
        tenants,
        gated,
    };
    println!("{nodes} nodes × 8 GPUs, {pods} pods, {tenants} tenants, {gated} gated pods");
    // It ends before anything is timed.
    let empty = {
        let replica = Replica::start(
            ClusterSize {
                pods: 0,
                gated: 0,
                ..world
            },
            LeadWith::KubeScheduler,
        );
        replica.process.resident_mib()
    };
    let replica = Replica::start(world, LeadWith::KubeScheduler);
    memory(&replica, empty, nodes, pods);
    let cluster = BenchCluster::new(nodes, 0);
    let asking = FilterLoad::new(&cluster, &replica.process.addresses[0]);
    println!("\n{}", filters::HEADING);
    asking.row("nothing", || std::thread::sleep(QUIET_TIME));
    report_once(&replica, &asking);
    all_report(&replica, &asking);
    pages(&replica, &asking);
    policy_changes(&replica, &asking);
    namespace_labels(&replica, &asking);
    lock_waits(&replica);
    println!("\nat most resident: {} MiB", replica.process.peak_mib());
    fail_over(&replica);
    println!(
        "at most resident, after a fail-over: {} MiB",
        replica.process.peak_mib()
    );
    // The capacity of each node, and little else unless pods are planned.
    let written = (replica.written("nodes"), replica.written("others"));
    assert!(
        written.0 == nodes && (gated > 0 || written.1 <= 10),
        "{written:?} objects are written"
    );
    println!("{} writes to {nodes} nodes", replica.written("node-writes"));
    drop(replica);
    fail_over(&Replica::start(world, LeadWith::Lease));
}

/// Size of the cluster that the API server lists.
#[derive(Debug, Clone, Copy)]
struct ClusterSize {
    nodes: usize,
    pods: usize,
    tenants: usize,
    gated: usize,
}

/// Lease that says which replica leads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum LeadWith {
    KubeScheduler,
    Lease,
}

impl LeadWith {
    fn flag(self) -> &'static str {
        match self {
            Self::KubeScheduler => "--lead-with=kube-scheduler",
            Self::Lease => "--lead-with=lease",
        }
    }

    fn lease(self) -> &'static str {
        match self {
            Self::KubeScheduler => api_server::KUBE_SCHEDULER_LEASE,
            Self::Lease => "stowage",
        }
    }
}

/// A `stowage serve` that leads, and the API server that it reads.
struct Replica {
    process: ServeProcess,
    api: String,
    _api_server: ServeProcess,
    folder: tempfile::TempDir,
    world: ClusterSize,
    lead_with: LeadWith,
}

impl Replica {
    fn start(world: ClusterSize, lead_with: LeadWith) -> Self {
        let ClusterSize {
            nodes,
            pods,
            tenants,
            gated,
        } = world;
        let this = std::env::current_exe().expect("this program has a path");
        let mut api_server = Command::new(this);
        let api_server = ServeProcess::start(
            api_server.env(
                api_server::CLUSTER_VARIABLE,
                format!("{nodes}/{pods}/{tenants}/{gated}"),
            ),
            &["API server: http://"],
        );
        let (api, folder) = (
            api_server.addresses[0].clone(),
            tempfile::tempdir().expect("a folder"),
        );
        write(&folder.path().join("kubeconfig"), &kubeconfig(&api));
        write(&folder.path().join("policy.yaml"), &policy(0, tenants));
        let started = Instant::now();
        let process = ServeProcess::start(
            Command::new(env!("CARGO_BIN_EXE_stowage"))
                .args([
                    "serve",
                    "--listen",
                    "127.0.0.1:0",
                    "--agents",
                    "127.0.0.1:0",
                    "--admin",
                    "127.0.0.1:0",
                ])
                .args([
                    "--identity",
                    api_server::REPLICA,
                    "--agents-auth",
                    "none",
                    "--kubeconfig",
                ])
                .arg(folder.path().join("kubeconfig"))
                .arg(lead_with.flag())
                .arg("--policy")
                .arg(folder.path().join("policy.yaml"))
                .env("RUST_LOG", "stowage_server::serve=info,warn"),
            &[
                "the scheduler: http://",
                "agents: http://",
                "operators: http://",
            ],
        );
        let replica = Self {
            process,
            api,
            _api_server: api_server,
            folder,
            world,
            lead_with,
        };
        wait_until(|| replica.is_open());
        println!(
            "from its start to the first answer: {:.1} s",
            started.elapsed().as_secs_f64()
        );
        replica
    }

    fn is_open(&self) -> bool {
        self.readiness().starts_with("ok\n")
    }

    /// What it has written, as `api_server` counts it.
    fn written(&self, what: &str) -> usize {
        get(&self.api, &format!("/bench/written/{what}"))
            .parse()
            .expect("a number")
    }

    /// For how many seconds the Lease has had its holder.
    fn held_for(&self) -> f64 {
        let lease = self.lead_with.lease();
        let held: f64 = get(&self.api, &format!("/bench/held/{lease}"))
            .parse()
            .expect("a number");
        held / 1e3
    }

    fn readiness(&self) -> String {
        get(&self.process.addresses[2], "/readyz")
    }
}

fn memory(replica: &Replica, empty: u64, nodes: usize, pods: usize) {
    let all = replica.process.resident_mib();
    let kib = |mib: u64, count: usize| mib as f64 * 1024.0 / count.max(1) as f64;
    println!(
        "resident memory of `stowage serve`: {empty} MiB with nodes only, {:.2} KiB each; {all} MiB with all pods, {:.2} KiB each; at \
         most {} MiB",
        kib(empty, nodes),
        kib(all.saturating_sub(empty), pods),
        replica.process.peak_mib()
    );
}

fn report_once(replica: &Replica, asking: &FilterLoad<'_>) {
    let nodes = asking.cluster.nodes().min(TIMED_AGENTS);
    let mut agents: Vec<ReportingNode> = (0..nodes)
        .map(|place| ReportingNode::new(place, 0))
        .collect();
    let mut connection = KeepAliveConnection::connect(&replica.process.addresses[1]);
    // The first reports say what the devices are.
    let first: Vec<Vec<u8>> = agents
        .iter_mut()
        .map(|agent| agent.next(CacheUsage::Jittering))
        .collect();
    asking.row("first reports", || post_all(&mut connection, &first));
    let next: Vec<Vec<u8>> = agents
        .iter_mut()
        .map(|agent| agent.next(CacheUsage::Jittering))
        .collect();
    let (before, started) = (replica.process.cpu(), Instant::now());
    post_all(&mut connection, &next);
    let (cpu, wall) = (replica.process.cpu() - before, started.elapsed());
    let cost = cpu.as_secs_f64() / nodes as f64;
    asking.row("reports", || {
        post_all(
            &mut connection,
            &agents
                .iter_mut()
                .map(|agent| agent.next(CacheUsage::Jittering))
                .collect::<Vec<_>>(),
        )
    });
    println!(
        "\na report of many in a row costs {:.0} µs of CPU and takes {:.0} µs\n",
        cost * 1e6,
        wall.as_secs_f64() * 1e6 / nodes as f64
    );
    println!("{}", filters::HEADING);
}

/// All agents report, each once in ten seconds. They share a few connections: from one address there are no ports for more than
/// some 28,000.
fn all_report(replica: &Replica, asking: &FilterLoad<'_>) {
    let nodes = asking.cluster.nodes();
    // Their agents have started again since the reports before.
    let mut agents: Vec<ReportingNode> = (0..nodes)
        .map(|place| ReportingNode::new(place, 1))
        .collect();
    let round = Duration::from_secs_f64(1.0 / REPORTS_PER_AGENT_AND_SECOND);
    let before = replica.process.resident_mib();
    // Each node's capacity is written once: the agents say another than the nodes. They report on meanwhile, so that no reading
    // is stale when they are timed.
    let mut written = 0;
    wait_until(|| {
        report_in_rounds(&mut agents, 1, round, &replica.process.addresses[1]);
        let earlier = std::mem::replace(&mut written, replica.written("node-writes"));
        earlier == written && replica.written("nodes") == nodes
    });
    let after = replica.process.resident_mib();
    let (latencies, cpu, took, reported) = asking.row("all agents report", || {
        let (before, started) = (replica.process.cpu(), Instant::now());
        let latencies = report_in_rounds(&mut agents, ROUNDS, round, &replica.process.addresses[1]);
        (
            latencies,
            replica.process.cpu() - before,
            started.elapsed(),
            Instant::now(),
        )
    });
    println!(
        "\n{} reports of {nodes} agents, each once in {:.0} s: {:.2} cores, answered after {:.2} ms (p50), {:.1} ms (p99), {:.0} ms (the \
         longest, from when it was due); they take resident memory from {before} to {after} MiB\n",
        latencies.count(),
        round.as_secs_f64(),
        cpu.as_secs_f64() / took.as_secs_f64(),
        latencies.percentile(50) / 1e3,
        latencies.percentile(99) / 1e3,
        latencies.longest() / 1e3,
    );
    println!("{}", filters::HEADING);
    // Those that were reported first are stale first. What follows is timed when all of them are.
    let sleep_until =
        |time: Instant| std::thread::sleep(time.saturating_duration_since(Instant::now()));
    sleep_until(reported + STALE_TIME - round);
    asking.row("all readings become stale", || {
        sleep_until(reported + STALE_TIME + Duration::from_secs(5))
    });
}

/// Every agent reports once in each round. How long each answer took from when the report was due.
fn report_in_rounds(
    agents: &mut [ReportingNode],
    rounds: u32,
    round: Duration,
    address: &str,
) -> Samples {
    let each = agents.len().div_ceil(CONNECTIONS);
    let started = Instant::now();
    let mut all = Samples::default();
    std::thread::scope(|threads| {
        let parts: Vec<_> = agents
            .chunks_mut(each)
            .map(|agents| {
                threads.spawn(move || {
                    let (mut samples, mut connection) =
                        (Samples::default(), KeepAliveConnection::connect(address));
                    let count = agents.len();
                    for nth in 0..rounds as usize * count {
                        let report = agents[nth % count].next(CacheUsage::Jittering);
                        let due = started + round.mul_f64(nth as f64 / count as f64);
                        std::thread::sleep(due.saturating_duration_since(Instant::now()));
                        post_all(&mut connection, std::slice::from_ref(&report));
                        samples.add(due.elapsed());
                    }
                    samples
                })
            })
            .collect();
        for part in parts {
            all.append(part.join().expect("every report is accepted"));
        }
    });
    all
}

fn post_all(connection: &mut KeepAliveConnection, reports: &[Vec<u8>]) {
    for report in reports {
        let answer = connection.post("/v1/reports", report, None);
        assert!(
            answer.starts_with(br#"{"accepted":1"#),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    }
}

fn pages(replica: &Replica, asking: &FilterLoad<'_>) {
    for page in PAGES {
        let bytes = asking.row(page, || read(&replica.process.addresses[2], page));
        assert!(bytes > 100, "{page}");
    }
}

fn policy_changes(replica: &Replica, asking: &FilterLoad<'_>) {
    for change in 1..=CHANGES {
        asking.row("a policy change", || {
            let before = in_force(replica);
            write(
                &replica.folder.path().join("policy.yaml"),
                &policy(change, replica.world.tenants),
            );
            wait_until(|| in_force(replica) != before);
        });
    }
}

/// The label decides the class of every pod in the namespace: of all pods, or of a tenant's.
fn namespace_labels(replica: &Replica, asking: &FilterLoad<'_>) {
    let cluster = BenchCluster::new(replica.world.nodes, 0).with_tenants(replica.world.tenants);
    let page = format!(
        "/v1/explain?pod={}/{}",
        cluster.namespace_of(0),
        cluster::resident_name(0)
    );
    let is_labelled = || {
        let explanation: serde_json::Value =
            serde_json::from_str(&get(&replica.process.addresses[2], &page))
                .expect("the pod is explained");
        explanation["class"]["name"] == LABELLED_CLASS
    };
    for (value, wanted) in [(LABELLED_CLASS, true), ("other", false)] {
        assert_ne!(is_labelled(), wanted);
        asking.row("another label of a namespace", || {
            request("PUT", &replica.api, &format!("/bench/label/{value}"));
            wait_until(|| is_labelled() == wanted);
        });
    }
}

/// The service's own measure: what of the time of all these filters was the ledger's lock.
fn lock_waits(replica: &Replica) {
    let page = get(&replica.process.addresses[2], "/metrics");
    let count = |series: &str| -> u64 {
        let of_this = page
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        of_this
            .and_then(|count| count.parse().ok())
            .expect("the page counts them")
    };
    let all = count("stowage_ledger_lock_wait_seconds_count");
    let longer_than = |bound: &str| {
        all - count(&format!(
            "stowage_ledger_lock_wait_seconds_bucket{{le=\"{bound}\"}}"
        ))
    };
    println!(
        "\nof {all} filters {} waited for the ledger's lock for longer than 2 ms, {} for longer than 10 ms",
        longer_than("0.002"),
        longer_than("0.01")
    );
}

/// Every change concerns every pod and every node. Tenants have guarantees, which their pods exceed by far.
fn policy(number: usize, tenants: usize) -> String {
    let tenant = |i| {
        let name = cluster::tenant_name(i);
        format!(
            "  - {{name: {name}, namespaces: [{name}], guarantee: {{vram: {}Gi}}}}\n",
            10 + i * 15
        )
    };
    let tenants = match tenants {
        0 => String::new(),
        some => format!("tenants:\n{}", (0..some).map(tenant).collect::<String>()),
    };
    let (label, preemptible) = (api_server::NAMESPACE_LABEL, !tenants.is_empty());
    let stale = STALE_TIME.as_secs();
    format!(
        "kind: SchedulingPolicy\ntelemetry: {{fresh: 30s, stale: {stale}s, smoothing: 45s}}\n\
         classes:\n  - name: {LABELLED_CLASS}\n    engine: false\n    match: {{namespaceSelector: {{matchLabels: {{{label}: {LABELLED_CLASS}}}}}}}\n  \
         - name: class-{number}\n    engine: false\n    match: {{expression: \"pod.vram > {number} * 1024\"}}\n    \
         preemptible: {preemptible}\n  - name: rest\n    engine: false\n{tenants}"
    )
}

fn in_force(replica: &Replica) -> String {
    let page = get(&replica.process.addresses[2], "/debug/policy");
    page.split("\"digest\":")
        .nth(1)
        .map(|digest| digest.chars().take(24).collect())
        .expect("a digest")
}

/// The Lease passes to another replica and comes back: kube-scheduler's at once, Stowage's own when it has run out. From then on
/// this replica lists the cluster while it waits until nothing of the other can land any more, which depends on no size; after
/// that its watch has to catch up.
fn fail_over(replica: &Replica) {
    let lease = replica.lead_with.lease();
    let hold = |name: &str| {
        drop(request(
            "PUT",
            &replica.api,
            &format!("/bench/holder/{lease}/{name}"),
        ))
    };
    hold("another_1");
    wait_until(|| !replica.is_open());
    if replica.lead_with == LeadWith::KubeScheduler {
        hold(&format!("{}_2", api_server::REPLICA));
    }
    wait_until(|| replica.readiness().contains("is about to lead"));
    wait_until(|| !replica.readiness().contains("is about to lead"));
    let led = replica.held_for();
    wait_until(|| replica.is_open());
    println!(
        "fail-over ({}), from the Lease on: it leads after {led:.1} s, and answers after {:.1} s",
        replica.lead_with.flag(),
        replica.held_for()
    );
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < STEP_TIMEOUT, "it takes too long");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn get(address: &str, path: &str) -> String {
    let answer = request("GET", address, path);
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
    body.to_owned()
}

/// Reads an answer and returns its length in bytes.
fn read(address: &str, path: &str) -> usize {
    let mut stream = send("GET", address, path);
    let (mut part, mut length) = (vec![0; 1 << 20], 0);
    loop {
        match stream.read(&mut part).expect("the answer") {
            0 => return length,
            more => length += more,
        }
    }
}

fn request(method: &str, address: &str, path: &str) -> String {
    let mut answer = String::new();
    send(method, address, path)
        .read_to_string(&mut answer)
        .expect("text");
    answer
}

fn send(method: &str, address: &str, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the address listens");
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream
        .write_all(head.as_bytes())
        .expect("the request is sent");
    stream
}

fn write(path: &Path, text: &str) {
    // Beside it first, so that no half of it is read.
    let beside = path.with_extension("new");
    std::fs::write(&beside, text)
        .and_then(|()| std::fs::rename(&beside, path))
        .expect("the file is written");
}

fn kubeconfig(api: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: bench\ncontexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]\n\
         clusters: [{{name: bench, cluster: {{server: 'http://{api}'}}}}]\nusers: [{{name: bench, user: {{token: none}}}}]\n"
    )
}
