//! Filter beside an idle planner, and beside one with fifty thousand pending gated pods: the code that `stowage serve` runs, in
//! one process, the two in turn.

#[path = "../common/cluster.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod requests;

use crate::samples::Samples;
use parking_lot::Mutex;
use requests::BenchCluster;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::kube_filters::Requirements;
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use stowage_scheduling::policy::{Planning, Policy};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::observe::{FilterPod, FilterPodObserved, PodDeleted, PodObserved};
use stowage_scheduling::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::wire::ExtenderArgs;
use stowage_server::extender::{Extender, filter};
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::kubernetes::tick;
use stowage_server::service::ServerState;

const NODES: usize = 5000;
const GATED: usize = 50_000;
const ROUNDS: usize = 10;
const FILTERS: usize = 120;
/// Interval of filters: that of a busy kube-scheduler; all of them take longer than the interval between two planner runs.
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);
/// Kinds of pods that wait.
const KINDS: usize = 20;

pub fn time_filter_beside_planner() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let mut policy = Policy::default();
    policy.planning = Planning {
        max_gated_time: Millis::seconds(1_000_000),
        ..Planning::default()
    };
    let cluster = BenchCluster::new(NODES, FILTERS);
    let service = ServerState::new(policy);
    let mut index = ClusterIndex::default();
    let dump = Dump::from_text(cluster.dump(), Path::new("bench"));
    let control_plane =
        Arc::new(DumpControlPlane::load(&dump, &service, &mut index).expect("the dump is one"));
    drop(dump);
    let extender = Extender::new(
        service.clone(),
        control_plane.clone(),
        RequestLimits::default(),
    );
    runtime.spawn(tick::run(
        service.clone(),
        Arc::new(Mutex::new(index)),
        control_plane,
    ));
    let (mut idle, mut busy) = (Samples::default(), Samples::default());
    for round in 0..2 * ROUNDS {
        let samples = if round % 2 == 0 { &mut idle } else { &mut busy };
        if round % 2 == 1 {
            (0..GATED).for_each(|n| add_gated_pod(&service, n));
        }
        // Long enough for the planner to be in a run.
        std::thread::sleep(Duration::from_millis(600));
        for n in 0..FILTERS {
            let body = cluster.filter_body(n);
            let start = Instant::now();
            filter_once(&extender, &body);
            samples.add(start.elapsed());
            std::thread::sleep(REQUEST_INTERVAL.saturating_sub(start.elapsed()));
        }
        if round % 2 == 1 {
            assert!(
                service.cluster().ledger().pending_count() >= GATED * 9 / 10,
                "they still wait"
            );
            (0..GATED).for_each(|n| release_pod(&service, n));
        }
    }
    let runs = service
        .metrics
        .planner
        .runs
        .with_label_values(&["limited"])
        .get()
        + service
            .metrics
            .planner
            .runs
            .with_label_values(&["complete"])
            .get();
    let longest = service.metrics.planner.run_seconds.get_sample_sum() / runs.max(1) as f64;
    println!(
        "filter at {NODES} nodes beside a planner: idle p50 {:.2} ms, p90 {:.2} ms; {GATED} gated pods p50 {:.2} ms, p90 {:.2} ms; p90 {:.2} ×; {runs} runs of {:.0} ms on average",
        idle.percentile(50) / 1000.0,
        idle.percentile(90) / 1000.0,
        busy.percentile(50) / 1000.0,
        busy.percentile(90) / 1000.0,
        busy.percentile(90) / idle.percentile(90),
        longest * 1000.0,
    );
    runtime.shutdown_background();
}

fn filter_once(extender: &Extender, body: &[u8]) {
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
    let nodes = args.request_nodes().expect("nodes").expect("names");
    let answer = filter::filter(extender, &args, &nodes).expect("an answer");
    requests::passed_names(&answer.to_json());
}

fn uid(n: usize) -> PodUid {
    PodUid::parse(&format!("{n:08x}-0000-4000-9000-000000000000")).expect("a UID")
}

/// A pod behind the planner's gate that fits nowhere, and for which no pod may be evicted.
fn add_gated_pod(service: &ServerState, n: usize) {
    let vram = ((40u64 << 30) + ((n % KINDS) as u64 * (1 << 28))).to_string();
    let containers = [ContainerRequest {
        vram: Some(&vram),
        ..ContainerRequest::plain("main")
    }];
    let request = PodRequest {
        priority: -1000,
        ..PodRequest::plain("llm", &containers)
    };
    let mut ledger = service.cluster();
    let demand =
        Demand::from_pod(&request, ledger.ledger().policy()).expect("a pod that can be understood");
    let waiting = ObservedWaiting {
        gate: SchedulingGate::Planned,
        ..ObservedWaiting::default()
    };
    let key = PodKey::parse("llm", &format!("gated-{n}")).expect("a name");
    ledger.apply(PodObserved(PodObservation {
        uid: uid(n),
        key,
        demand,
        state: ObservedPhase::Waiting(waiting),
        observed: None,
    }));
    drop(ledger);
    let pod = FilterPod::Waiting(Requirements::default());
    service
        .cluster()
        .apply(FilterPodObserved { uid: uid(n), pod });
}

fn release_pod(service: &ServerState, n: usize) {
    service.cluster().apply(PodDeleted(uid(n)));
}
