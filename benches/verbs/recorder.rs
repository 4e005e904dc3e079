//! The verbs with the flight recorder and without: `cargo bench --features jemalloc --bench verbs -- recorder [NODES…]`. Two Stowages in
//! one process over the same cluster are asked the same, alternately; one records into a directory. Other load on the machine affects
//! both, and the ratio is comparable between machines. The recorder's thread runs beside, as it does in the service.

use crate::cluster::{self, BenchCluster};
use crate::samples::Samples;
use crate::server::cpu_of_threads;
use crate::{ROUNDS, WARM_UP, extender};
use std::time::{Duration, Instant};
use stowage_scheduling::policy::Policy;
use stowage_server::extender::wire::{BindingArgs, ExtenderArgs};
use stowage_server::extender::{Extender, bind, filter, prioritize};
use stowage_server::flight_recorder::{FlightRecorder, RecordOptions, RingLimits};

const VERBS: [&str; 4] = ["filter", "prioritize", "bind", "filter, all refused"];
const CHECKPOINTS: usize = 20;
const RECORDER_THREAD: &str = "flight-recorder";
/// Limits of the recording, beyond what a run writes.
const LIMITS: RingLimits = RingLimits {
    max_bytes: 4 << 30,
    max_age: Duration::from_secs(3600),
};

pub fn compare_with_none(sizes: &[usize]) {
    for nodes in sizes {
        let cluster = BenchCluster::new(*nodes, ROUNDS + WARM_UP);
        compare(&cluster);
    }
}

fn compare(cluster: &BenchCluster) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let both = [
        extender(cluster, Policy::default()),
        extender(cluster, Policy::default()),
    ];
    let directory = tempfile::tempdir().expect("a directory to record into");
    let options = RecordOptions {
        directory: directory.path().to_owned(),
        limits: LIMITS,
    };
    let recorder =
        FlightRecorder::start(&options, &both[1].state).expect("the directory is writable");
    let is_recording = || {
        both[1]
            .state
            .recording_tap()
            .is_some_and(|tap| tap.is_recording())
    };
    while !is_recording() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut samples: [[Samples; 2]; 4] = Default::default();
    let cpu = || cpu_of_threads("self", RECORDER_THREAD);
    let mut cpu_before = cpu();
    for round in 0..ROUNDS + WARM_UP {
        if round == WARM_UP {
            cpu_before = cpu();
        }
        // The first of the two finds the request in no cache, so they take turns.
        let mut in_turn = |verb: usize, ask: &mut dyn FnMut(&Extender) -> Vec<u8>| {
            let mut answers = [Vec::new(), Vec::new()];
            for turn in 0..2 {
                let one = (round + turn) % 2;
                let started = Instant::now();
                answers[one] = ask(&both[one]);
                let took = started.elapsed();
                if round >= WARM_UP {
                    samples[verb][one].add(took);
                }
            }
            assert_eq!(
                answers[0], answers[1],
                "what is recorded is answered the same"
            );
            std::mem::take(&mut answers[0])
        };
        let body = cluster.filter_body(round);
        let answer = in_turn(0, &mut |one| ask_filter(one, &body));
        let body = cluster.prioritize_body(round, &cluster::passed_names(&answer));
        let answer = in_turn(1, &mut |one| ask_prioritize(one, &body));
        let body = cluster.bind_body(round, &cluster::top_name(&answer));
        let answer = in_turn(2, &mut |one| {
            let args: BindingArgs = serde_json::from_slice(&body).expect("a request");
            let answer = runtime.block_on(bind::bind(one, &args)).expect("an answer");
            serde_json::to_vec(&answer).expect("JSON")
        });
        cluster::assert_bound(&answer);
        let body = cluster.refused_body(round);
        let answer = in_turn(3, &mut |one| ask_filter(one, &body));
        cluster::assert_all_refused(&answer, cluster.nodes());
    }
    assert!(is_recording(), "the recorder kept up");
    // What is in the queue is written within that.
    std::thread::sleep(Duration::from_secs(2));
    let cpu = (cpu() - cpu_before).as_secs_f64() * 1e6 / ROUNDS as f64;
    let checkpoints = time_checkpoints(&both[1]);
    recorder.stop();
    print(cluster, &samples);
    println!(
        "the recorder's thread takes {cpu:.0} µs for these four calls: {:.2} % of one core at ten pods a second",
        cpu * 10.0 / 1e4
    );
    println!(
        "a checkpoint holds the lock for {:.0} µs, {:.0} µs at most of {CHECKPOINTS}",
        checkpoints.percentile(50),
        checkpoints.percentile(100)
    );
}

/// Times of checkpoints, each begun when the one before is written: until then changes copy what it shares.
fn time_checkpoints(extender: &Extender) -> Samples {
    let service = &extender.state;
    let written = || service.metrics.recording.bytes.get();
    let mut samples = Samples::default();
    for _ in 0..CHECKPOINTS {
        let before = written();
        let started = Instant::now();
        service.record_checkpoint();
        samples.add(started.elapsed());
        while written() == before {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    samples
}

fn print(cluster: &BenchCluster, samples: &[[Samples; 2]; 4]) {
    println!(
        "\n{} nodes × 8 GPUs, with the flight recorder and without, in process",
        cluster.nodes()
    );
    println!(
        "{:<20} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "", "p50 µs", "p99 µs", "none, p50", "none, p99", "× p50", "× p99"
    );
    for (verb, [without, with]) in VERBS.iter().zip(samples) {
        let [p50, p99, none50, none99] = [(with, 50), (with, 99), (without, 50), (without, 99)]
            .map(|(one, at)| one.percentile(at));
        println!(
            "{verb:<20} {p50:>10.0} {p99:>10.0} {none50:>10.0} {none99:>10.0} {:>8.3} {:>8.3}",
            p50 / none50,
            p99 / none99
        );
    }
}

fn ask_filter(extender: &Extender, body: &[u8]) -> Vec<u8> {
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
    let nodes = args.request_nodes().expect("nodes").expect("names");
    filter::filter(extender, &args, &nodes)
        .expect("an answer")
        .to_json()
}

fn ask_prioritize(extender: &Extender, body: &[u8]) -> Vec<u8> {
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
    let nodes = args.request_nodes().expect("nodes").expect("names");
    serde_json::to_vec(&prioritize::prioritize(extender, &args, &nodes).expect("an answer"))
        .expect("JSON")
}
