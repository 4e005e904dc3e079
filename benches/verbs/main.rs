//! The verbs beside their floor: `cargo bench --features jemalloc --bench verbs [-- NODES…]`; or beside another build, as `beside` says;
//! or with the flight recorder and without, as `recorder` says.
//!
//! The floor parses the same bytes into the same types and writes an answer of the same size, without a decision. Both are
//! measured alternately in one run, so that other load on the machine affects both; the ratio is comparable between machines. In
//! process the two are function calls; over loopback each is a server process of its own, on the same HTTP stack, called by this
//! process over one kept-alive connection, as the scheduler does.

mod beside;
mod classes;
#[path = "../common/cluster.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod cluster;
#[path = "../common/connection.rs"]
mod connection;
mod http;
mod recorder;
mod report;
#[path = "../common/samples.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod samples;
#[path = "../common/server.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod server;

use cluster::BenchCluster;
use connection::KeepAliveConnection;
use report::VerbRow;
use samples::Samples;
use server::ServeProcess;
use std::hint::black_box;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Instant;
use stowage_scheduling::policy::Policy;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::wire::{BindingArgs, ExtenderArgs};
use stowage_server::extender::{Extender, bind, filter, prioritize};
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::service::ServerState;

/// Requests of each verb: p99 then rests on twenty of them.
const ROUNDS: usize = 2000;
/// Requests before these, not counted: connections open, caches fill, the allocator settles.
const WARM_UP: usize = 100;
/// Number of nodes beyond which there are fewer rounds, over loopback only: a request takes tens of milliseconds.
const LARGE_CLUSTER_NODES: usize = 5000;
/// Counted and uncounted requests on a large cluster.
const ROUNDS_ON_LARGE_CLUSTERS: (usize, usize) = (300, 20);
const FLOOR_VARIABLE: &str = "STOWAGE_BENCH_FLOOR";

fn main() -> ExitCode {
    if std::env::var_os(FLOOR_VARIABLE).is_some() {
        http::serve_floor();
        return ExitCode::SUCCESS;
    }
    if std::env::args()
        .skip(1)
        .any(|argument| argument == "recorder")
    {
        let asked: Vec<usize> = std::env::args()
            .skip(1)
            .filter_map(|arg| arg.parse().ok())
            .collect();
        recorder::compare_with_none(if asked.is_empty() {
            &[1000, 5000]
        } else {
            &asked
        });
        return ExitCode::SUCCESS;
    }
    match beside::BesideArgs::parse(std::env::args().skip(1)) {
        Ok(Some(asked)) => asked.compare(),
        Ok(None) => {
            beside_floor();
            ExitCode::SUCCESS
        }
        Err(wrong) => {
            eprintln!("{wrong}");
            ExitCode::from(2)
        }
    }
}

fn beside_floor() {
    let asked: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|arg| arg.parse().ok())
        .collect();
    let sizes = if asked.is_empty() {
        vec![100, 1000, 5000]
    } else {
        asked
    };
    let folder = tempfile::tempdir().expect("a folder for the dump");
    for nodes in sizes {
        let (rounds, warm_up) = if nodes > LARGE_CLUSTER_NODES {
            ROUNDS_ON_LARGE_CLUSTERS
        } else {
            (ROUNDS, WARM_UP)
        };
        let cluster = BenchCluster::new(nodes, rounds + warm_up);
        println!(
            "\n{nodes} nodes × 8 GPUs, {} pods resident, all {nodes} names in each request unless it says one",
            cluster.resident()
        );
        report::header();
        if nodes <= LARGE_CLUSTER_NODES {
            in_process(&cluster).iter().for_each(VerbRow::print);
            classes::compare_with_default(&cluster);
        }
        let dump = folder.path().join("cluster.json");
        let file = std::fs::File::create(&dump).expect("the dump is created");
        cluster
            .write_dump(&mut std::io::BufWriter::new(file))
            .expect("the dump is written");
        over_loopback(&cluster, &dump, (rounds, warm_up));
    }
}

fn extender(cluster: &BenchCluster, policy: Policy) -> Extender {
    let service = ServerState::new(policy);
    let dump = Dump::from_text(cluster.dump(), Path::new("bench"));
    let control_plane = Arc::new(
        DumpControlPlane::load(&dump, &service, &mut ClusterIndex::default())
            .expect("the dump is one"),
    );
    Extender::new(service, control_plane, RequestLimits::default())
}

fn in_process(cluster: &BenchCluster) -> Vec<VerbRow> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let extender = extender(cluster, Policy::default());
    let filter = |body: &[u8]| {
        let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
        let nodes = args.request_nodes().expect("nodes").expect("names");
        filter::filter(&extender, &args, &nodes)
            .expect("an answer")
            .to_json()
    };
    let prioritize = |body: &[u8]| {
        let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
        let nodes = args.request_nodes().expect("nodes").expect("names");
        serde_json::to_vec(&prioritize::prioritize(&extender, &args, &nodes).expect("an answer"))
            .expect("JSON")
    };
    let bind = |body: &[u8]| {
        let args: BindingArgs = serde_json::from_slice(body).expect("a request");
        let answer = runtime
            .block_on(bind::bind(&extender, &args))
            .expect("an answer");
        serde_json::to_vec(&answer).expect("JSON")
    };
    let floor_of_args = |body: &[u8], answer: usize| {
        let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
        black_box(&args);
        serde_json::to_vec(&"x".repeat(answer.saturating_sub(2))).expect("JSON")
    };
    let floor_of_bind = |body: &[u8], answer: usize| {
        let args: BindingArgs = serde_json::from_slice(body).expect("a request");
        black_box(&args);
        serde_json::to_vec(&"x".repeat(answer.saturating_sub(2))).expect("JSON")
    };
    let mut rows = Rows::new("in process");
    for round in 0..ROUNDS + WARM_UP {
        let counts = round >= WARM_UP;
        let body = cluster.filter_body(round);
        let answer = rows
            .filter
            .pair(counts, || filter(&body), |size| floor_of_args(&body, size));
        let names = cluster::passed_names(&answer);
        let body = cluster.filter_body_of_new_pod(round);
        rows.one_name
            .pair(counts, || filter(&body), |size| floor_of_args(&body, size));
        let body = cluster.prioritize_body(round, &names);
        let answer = rows.prioritize.pair(
            counts,
            || prioritize(&body),
            |size| floor_of_args(&body, size),
        );
        let body = cluster.bind_body(round, &cluster::top_name(&answer));
        let answer = rows
            .bind
            .pair(counts, || bind(&body), |size| floor_of_bind(&body, size));
        cluster::assert_bound(&answer);
        let body = cluster.refused_body(round);
        let answer = rows
            .refused
            .pair(counts, || filter(&body), |size| floor_of_args(&body, size));
        cluster::assert_all_refused(&answer, cluster.nodes());
    }
    rows.finish()
}

fn over_loopback(cluster: &BenchCluster, dump: &Path, (rounds, warm_up): (usize, usize)) {
    let stowage = ServeProcess::start(
        Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--agents",
                "127.0.0.1:0",
            ])
            .args(["--admin", "127.0.0.1:0", "--cluster"])
            .arg(dump)
            .env("RUST_LOG", "stowage_server::serve=info,warn"),
        &["the scheduler: http://"],
    );
    let this = std::env::current_exe().expect("this program has a path");
    let floor = ServeProcess::start(
        Command::new(this).env(FLOOR_VARIABLE, "1"),
        &["floor: http://"],
    );
    let at_start = stowage.resident_mib();
    let mut asked = KeepAliveConnection::connect(&stowage.addresses[0]);
    let mut floor = KeepAliveConnection::connect(&floor.addresses[0]);
    let mut rows = Rows::new("loopback");
    for round in 0..rounds + warm_up {
        let counts = round >= warm_up;
        let mut both = |row: &mut VerbRow, verb: &str, body: &[u8]| {
            let path = format!("/scheduler/{verb}");
            let (asked, floor) = (&mut asked, &mut floor);
            row.pair(
                counts,
                || asked.post(&path, body, None),
                |size| floor.post(&path, body, Some(size)),
            )
        };
        let answer = both(&mut rows.filter, "filter", &cluster.filter_body(round));
        let names = cluster::passed_names(&answer);
        both(
            &mut rows.one_name,
            "filter",
            &cluster.filter_body_of_new_pod(round),
        );
        let answer = both(
            &mut rows.prioritize,
            "prioritize",
            &cluster.prioritize_body(round, &names),
        );
        let answer = both(
            &mut rows.bind,
            "bind",
            &cluster.bind_body(round, &cluster::top_name(&answer)),
        );
        cluster::assert_bound(&answer);
        let answer = both(&mut rows.refused, "filter", &cluster.refused_body(round));
        cluster::assert_all_refused(&answer, cluster.nodes());
    }
    rows.finish().iter().for_each(VerbRow::print);
    println!(
        "resident memory of `stowage serve`: {at_start} MiB at start, {} MiB after",
        stowage.resident_mib()
    );
}

/// One row per verb.
struct Rows {
    filter: VerbRow,
    one_name: VerbRow,
    prioritize: VerbRow,
    bind: VerbRow,
    refused: VerbRow,
}

impl Rows {
    fn new(way: &'static str) -> Self {
        let row = |verb| VerbRow {
            way,
            verb,
            stowage: Samples::default(),
            floor: Samples::default(),
        };
        Self {
            filter: row("filter"),
            one_name: row("filter, one name"),
            prioritize: row("prioritize"),
            bind: row("bind"),
            refused: row("filter, all refused"),
        }
    }

    fn finish(self) -> Vec<VerbRow> {
        vec![
            self.filter,
            self.one_name,
            self.prioritize,
            self.bind,
            self.refused,
        ]
    }
}

impl VerbRow {
    /// Times the verb and then its floor, which gets the size of the verb's answer.
    fn pair(
        &mut self,
        counts: bool,
        verb: impl FnOnce() -> Vec<u8>,
        floor: impl FnOnce(usize) -> Vec<u8>,
    ) -> Vec<u8> {
        let started = Instant::now();
        let answer = verb();
        let verb_took = started.elapsed();
        let started = Instant::now();
        black_box(floor(answer.len()));
        let floor_took = started.elapsed();
        if counts {
            self.stowage.add(verb_took);
            self.floor.add(floor_took);
        }
        answer
    }
}
