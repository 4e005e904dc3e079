//! One engine at a steady load, when it is full, slowed, asleep or gone.

use super::engine::{Engine, EngineState};
use super::*;
use stowage_scheduling::autoscaling::{EngineFigures, Permille};
use stowage_scheduling::contention::{ComputeSharing, Contention, EngineWork, contention};
use stowage_scheduling::units::Bytes;

fn spec() -> EngineSpec {
    EngineSpec::new(&ModelShape::LLAMA_8B, &GpuSpeed::H100, 1, Bytes::gib(72)).unwrap()
}

/// What a minute of an engine looks like after five of the same load.
struct Steady {
    engine: Engine,
    completed_per_s: f64,
    ttft_s: f64,
    tpot_s: f64,
    busy: f64,
}

fn mean(samples: &[(f64, f64)]) -> f64 {
    let sum = |of: fn(&(f64, f64)) -> f64| samples.iter().map(of).sum::<f64>();
    sum(|(seconds, requests)| seconds * requests) / sum(|(_, requests)| *requests)
}

fn steady(spec: EngineSpec, per_s: f64, under: &Contention) -> Steady {
    let mut engine = Engine::new(spec);
    engine.step(300.0, Requests::new(per_s * 300.0, 1000.0, 200.0), under);
    let outcome = engine.step(60.0, Requests::new(per_s * 60.0, 1000.0, 200.0), under);
    Steady {
        completed_per_s: outcome.completions() / 60.0,
        ttft_s: mean(&outcome.first_tokens),
        tpot_s: mean(&outcome.completed),
        busy: outcome.busy_share,
        engine,
    }
}

#[test]
fn steady_load_conserves_requests_and_obeys_littles_law() {
    for per_s in [0.1, 1.0, 5.0, 10.0] {
        let steady = steady(spec(), per_s, &Contention::ALONE);
        assert!(
            (steady.completed_per_s / per_s - 1.0).abs() < 0.001,
            "{per_s}: {}",
            steady.completed_per_s
        );
        assert!(
            steady.engine.waiting() < 0.01,
            "{per_s}: {}",
            steady.engine.waiting()
        );
        let inside_s = steady.ttft_s - super::speed::FIRST_TOKEN_OVERHEAD_S + 200.0 * steady.tpot_s;
        let by_little = per_s * inside_s;
        assert!(
            (steady.engine.running() / by_little - 1.0).abs() < 0.005,
            "{per_s}: {by_little}"
        );
    }
}

#[test]
fn the_engine_comes_to_what_the_solved_state_says() {
    let most = max_rate_per_s(&spec(), 1000.0, 200.0);
    let beside = beside_a_job(ComputeSharing::SmSharing);
    for (share, under) in [
        (0.05, Contention::ALONE),
        (0.3, Contention::ALONE),
        (0.7, Contention::ALONE),
        (0.95, Contention::ALONE),
        (0.05, beside),
        (0.4, beside),
    ] {
        let solved = steady_state(&spec(), share * most, 1000.0, 200.0, &under).unwrap();
        let stepped = steady(spec(), share * most, &under);
        let near = |a: f64, b: f64, what: &str| {
            assert!(
                (a / b - 1.0).abs() < 0.02,
                "{share} {what}: {a}, {b} solved"
            )
        };
        near(stepped.engine.running(), solved.running, "running");
        near(stepped.engine.kv_occupancy(), solved.kv_occupancy, "KV");
        near(stepped.ttft_s, solved.ttft_s, "TTFT");
        near(stepped.tpot_s, solved.tpot_s, "TPOT");
    }
    assert_eq!(
        steady_state(&spec(), 1.01 * most, 1000.0, 200.0, &Contention::ALONE),
        None
    );
    let beyond = steady(spec(), 1.1 * most, &Contention::ALONE);
    assert!(
        beyond.engine.waiting() > 1.0 && beyond.completed_per_s < 1.05 * most,
        "{}",
        beyond.completed_per_s
    );
}

#[test]
fn rounding_at_the_front_of_a_queue_keeps_nothing_waiting() {
    let mut engine = Engine::new(spec());
    engine.step(1.0, Requests::new(1e-12, 1000.0, 200.0), &Contention::ALONE);
    let outcome = engine.step(10.0, Requests::new(50.0, 1000.0, 200.0), &Contention::ALONE);
    assert!(
        (outcome.admitted() - 50.0).abs() < 1e-6 && engine.waiting() < 1e-6,
        "{}",
        engine.waiting()
    );
}

#[test]
fn latencies_and_occupancy_rise_with_the_load() {
    let all: Vec<Steady> = [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0]
        .map(|per_s| steady(spec(), per_s, &Contention::ALONE))
        .into();
    for pair in all.windows(2) {
        let [less, more] = pair else { unreachable!() };
        assert!(more.ttft_s >= less.ttft_s && more.tpot_s > less.tpot_s);
        assert!(more.engine.kv_occupancy() > less.engine.kv_occupancy());
        assert!(more.busy >= less.busy);
    }
}

#[test]
fn the_utilization_counter_is_near_full_with_a_few_requests() {
    let (few, many) = (
        steady(spec(), 1.5, &Contention::ALONE),
        steady(spec(), 12.0, &Contention::ALONE),
    );
    assert!(
        few.busy > 0.85 && few.engine.kv_occupancy() < 0.02,
        "{} {}",
        few.busy,
        few.engine.kv_occupancy()
    );
    assert!(many.busy > 0.999 && many.engine.kv_occupancy() < 0.3);
}

#[test]
fn a_full_kv_cache_makes_requests_wait_and_is_never_more_than_full() {
    // 20,000 tokens: 18 requests of 1,100.
    let small = EngineSpec {
        kv_capacity: 20_000.0,
        ..spec()
    };
    let mut engine = Engine::new(small);
    for _ in 0..60 {
        engine.step(
            10.0,
            Requests::new(100.0, 1000.0, 200.0),
            &Contention::ALONE,
        );
        assert!(
            engine.kv_tokens() <= 20_000.0 + 1e-6,
            "{}",
            engine.kv_tokens()
        );
    }
    assert!(engine.running() < 18.2 && engine.waiting() > 100.0);
    assert!(engine.kv_occupancy() > 0.9, "{}", engine.kv_occupancy());
    let outcome = engine.step(10.0, Requests::default(), &Contention::ALONE);
    let first = outcome.first_tokens[0].0;
    assert!(
        first > 30.0,
        "the oldest have waited since long ago: {first} s"
    );
}

/// What an engine feels beside a job that always has a kernel on its GPU.
fn beside_a_job(sharing: ComputeSharing) -> Contention {
    let engine = Engine::new(spec()).work(0.5);
    contention(&[engine, EngineWork::job(0.5)], sharing)[0]
}

#[test]
fn an_engine_that_takes_turns_with_a_job_takes_more_than_twice_as_long() {
    let under = beside_a_job(ComputeSharing::TimeSlicing);
    let (alone, shared) = (
        steady(spec(), 0.2, &Contention::ALONE),
        steady(spec(), 0.2, &under),
    );
    let slower = shared.tpot_s / alone.tpot_s;
    assert!((2.25..2.4).contains(&slower), "{slower}");
    assert!(shared.ttft_s > 1.3 * alone.ttft_s);
    let throughput = |under| {
        let mut engine = Engine::new(spec());
        engine.step(120.0, Requests::new(9000.0, 1000.0, 200.0), under);
        engine.step(60.0, Requests::default(), under).completions() / 60.0
    };
    let ratio = throughput(&Contention::ALONE) / throughput(&under);
    assert!((2.1..2.5).contains(&ratio), "{ratio}");
}

#[test]
fn beside_a_job_an_engine_s_overhead_goes_on_where_they_share_the_sms() {
    let alone = steady(spec(), 0.2, &Contention::ALONE).tpot_s;
    let [sliced, shared] = [ComputeSharing::TimeSlicing, ComputeSharing::SmSharing]
        .map(|sharing| steady(spec(), 0.2, &beside_a_job(sharing)).tpot_s / alone);
    assert!(
        (1.7..1.9).contains(&shared) && shared < sliced,
        "{shared} {sliced}"
    );
}

#[test]
fn what_is_too_long_for_the_cache_is_refused() {
    let mut engine = Engine::new(EngineSpec {
        kv_capacity: 1000.0,
        ..spec()
    });
    let outcome = engine.step(1.0, Requests::new(3.0, 900.0, 200.0), &Contention::ALONE);
    assert_eq!(
        (outcome.refused, engine.waiting() + engine.running()),
        (3.0, 0.0)
    );
}

#[test]
fn an_engine_drains_sleeps_and_wakes() {
    let mut engine = Engine::new(spec());
    let arrivals = Requests::new(20.0, 1000.0, 200.0);
    engine.step(1.0, arrivals, &Contention::ALONE);
    let error = engine.sleep().unwrap_err().to_string();
    assert!(error.contains("drain it before it sleeps"), "{error}");
    engine.drain();
    assert_eq!(
        (engine.state(), engine.free_kv_tokens(1000.0, 200.0)),
        (EngineState::Draining, 0.0)
    );
    assert_eq!(engine.reported_figures(), EngineFigures::Draining);
    engine.step(60.0, Requests::default(), &Contention::ALONE);
    engine.sleep().unwrap();
    assert_eq!(
        engine.step(60.0, Requests::default(), &Contention::ALONE),
        StepOutcome::default()
    );
    assert_eq!(engine.reported_figures(), EngineFigures::Asleep);
    engine.wake();
    assert_eq!(
        engine.reported_figures(),
        EngineFigures::Serving {
            kv_cache: Permille::from_share(0.0),
            waiting: Some(0),
            running: Some(0)
        }
    );
}

#[test]
fn what_a_killed_engine_had_is_handed_back_with_its_age() {
    let mut engine = Engine::new(EngineSpec {
        kv_capacity: 20_000.0,
        ..spec()
    });
    engine.step(
        10.0,
        Requests::new(200.0, 1000.0, 200.0),
        &Contention::ALONE,
    );
    let (waiting, running) = (engine.waiting(), engine.running());
    let left = engine.abandon();
    assert!(
        (left.waiting.count - waiting).abs() < 1e-6 && (left.running.count - running).abs() < 1e-6
    );
    assert!(
        left.waiting.waited_s > 1.0 && (left.running.prompt - 1000.0).abs() < 1e-6,
        "{left:?}"
    );
    assert!(engine.is_idle());
}

#[test]
fn a_grant_without_room_for_the_cache_is_refused_with_what_is_missing() {
    let error =
        EngineSpec::new(&ModelShape::LLAMA_70B, &GpuSpeed::H100, 1, Bytes::gib(72)).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("llama-3.1-70b on 1 GPUs needs more than 133.4 GiB on each"),
        "{text}"
    );
    let four = EngineSpec::new(&ModelShape::LLAMA_70B, &GpuSpeed::H100, 4, Bytes::gib(72)).unwrap();
    // 4 × (72 − 2) GiB less 131.4 GiB of weights, at 320 KiB a token.
    assert!(
        (480_000.0..490_000.0).contains(&four.kv_capacity),
        "{}",
        four.kv_capacity
    );
    assert_eq!(four.start_bytes, Bytes::gib(72));
}

#[test]
fn known_kv_caches_and_weights() {
    let kib = |shape: ModelShape| shape.kv_per_token.0 as f64 / 1024.0;
    assert_eq!(kib(ModelShape::LLAMA_8B), 128.0);
    assert_eq!(kib(ModelShape::LLAMA_70B), 320.0);
    assert_eq!(kib(ModelShape::QWEN_7B), 56.0);
    assert_eq!(kib(ModelShape::QWEN_32B), 256.0);
    assert_eq!(ModelShape::LLAMA_8B.weights.to_string(), "15.0 GiB");
    assert_eq!(ModelShape::LLAMA_70B.weights.to_string(), "131.4 GiB");
}

#[test]
fn the_balancer_fills_the_emptier_engine_and_none_that_drains() {
    let (mut full, idle, mut draining) = (
        Engine::new(spec()),
        Engine::new(spec()),
        Engine::new(spec()),
    );
    full.step(
        30.0,
        Requests::new(300.0, 1000.0, 200.0),
        &Contention::ALONE,
    );
    draining.drain();
    let arrivals = Requests::new(10.0, 1000.0, 200.0);
    let shares = split_arrivals(&arrivals, [&full, &idle, &draining]);
    assert!(
        shares[1] > shares[0] && shares[0] > 0.0 && shares[2] == 0.0,
        "{shares:?}"
    );
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    assert!(split_arrivals(&arrivals, [&draining]).is_empty());
    // Both are full: the shorter queue gets more.
    let mut longer = Engine::new(spec());
    full.step(
        30.0,
        Requests::new(9000.0, 1000.0, 200.0),
        &Contention::ALONE,
    );
    longer.step(
        30.0,
        Requests::new(19_000.0, 1000.0, 200.0),
        &Contention::ALONE,
    );
    let shares = split_arrivals(&arrivals, [&full, &longer]);
    assert!(shares[0] > shares[1] && shares[1] > 0.0, "{shares:?}");
}
