//! Whatever comes: nothing is lost, nothing is more than full, and more load is never less.

use super::*;
use proptest::prelude::*;
use stowage_scheduling::contention::Contention;
use stowage_scheduling::units::Bytes;

/// Seconds, requests in them, their prompts and outputs, and what the neighbors cost.
type Stretch = (f64, f64, f64, f64, Contention);

fn stretch() -> impl Strategy<Value = Stretch> {
    (
        0.1..90.0f64,
        0.0..500.0f64,
        1.0..6000.0f64,
        1.0..1500.0f64,
        contention(),
    )
}

fn contention() -> impl Strategy<Value = Contention> {
    (1.0..8.0f64, 1.0..8.0f64, 1.0..20.0f64).prop_map(|(overhead, memory, compute)| Contention {
        overhead,
        memory,
        compute,
    })
}

fn spec(kv_capacity: f64) -> EngineSpec {
    let spec = EngineSpec::new(&ModelShape::LLAMA_8B, &GpuSpeed::A100, 1, Bytes::gib(72)).unwrap();
    EngineSpec {
        kv_capacity,
        ..spec
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn requests_in_are_done_or_refused_or_inside(
        kv_capacity in 100.0..500_000.0f64,
        stretches in proptest::collection::vec(stretch(), 1..12),
    ) {
        let mut engine = Engine::new(spec(kv_capacity));
        let (mut came, mut gone, mut admitted) = (0.0, 0.0, 0.0);
        for (seconds, count, prompt, output, under) in stretches {
            let outcome = engine.step(seconds, Requests::new(count, prompt, output), &under);
            came += count;
            gone += outcome.refused + outcome.completions();
            admitted += outcome.admitted();
            let inside = engine.waiting() + engine.running();
            prop_assert!((came - gone - inside).abs() < 1e-6 * (1.0 + came), "{came} came, {gone} left, {inside} inside");
            prop_assert!(engine.kv_tokens() <= kv_capacity * (1.0 + 1e-9));
            prop_assert!(engine.running() <= engine.spec.batching.requests + 1e-6);
            prop_assert!((0.0..=1.0 + 1e-9).contains(&outcome.busy_share));
            prop_assert!(outcome.first_tokens.iter().all(|(ttft_s, n)| *ttft_s > 0.0 && *n >= 0.0));
            prop_assert!(outcome.completed.iter().all(|(tpot_s, _)| tpot_s.is_finite() && *tpot_s > 0.0));
        }
        prop_assert!(admitted <= came + 1e-6);
        let left = engine.abandon();
        let handed_back = left.waiting.count + left.running.count;
        prop_assert!((came - gone - handed_back).abs() < 1e-6 * (1.0 + came));
    }

    #[test]
    fn more_requests_are_never_fewer_completed_nor_fewer_inside(
        per_s in 0.01..30.0f64, more in 1.0..3.0f64, prompt in 1.0..3000.0f64, output in 1.0..600.0f64,
    ) {
        let run = |per_s: f64| {
            let mut engine = Engine::new(spec(400_000.0));
            let outcome = engine.step(300.0, Requests::new(per_s * 300.0, prompt, output), &Contention::ALONE);
            (outcome.completions(), engine.waiting() + engine.running())
        };
        let ((done, inside), (more_done, more_inside)) = (run(per_s), run(per_s * more));
        // A full engine is stepped in finer parts than one that is not: the two differ by a fraction of a per cent.
        prop_assert!(more_done >= done * 0.99, "{done} then {more_done}");
        prop_assert!(more_inside >= inside * 0.99, "{inside} then {more_inside}");
    }

    #[test]
    fn time_may_be_cut_anywhere_at_whole_seconds(
        seconds in 2..40u32, cut in 1..39u32, count in 0.0..100.0f64,
    ) {
        let cut = cut.min(seconds - 1);
        let arrivals = Requests::new(count, 800.0, 150.0);
        let (mut whole, mut parts) = (Engine::new(spec(100_000.0)), Engine::new(spec(100_000.0)));
        let of = |part: u32| arrivals.scaled(f64::from(part) / f64::from(seconds));
        let at_once = whole.step(seconds.into(), arrivals, &Contention::ALONE).completions();
        let first = parts.step(cut.into(), of(cut), &Contention::ALONE).completions();
        let rest = parts.step((seconds - cut).into(), of(seconds - cut), &Contention::ALONE).completions();
        prop_assert!((at_once - first - rest).abs() < 1e-6);
        prop_assert!((whole.running() - parts.running()).abs() < 1e-6);
    }

    #[test]
    fn a_split_adds_up_to_one(loads in proptest::collection::vec(0.0..3000.0f64, 1..8)) {
        let engines: Vec<Engine> = loads.iter().map(|count| {
            let mut engine = Engine::new(spec(50_000.0));
            engine.step(20.0, Requests::new(*count, 800.0, 150.0), &Contention::ALONE);
            engine
        }).collect();
        let shares = split_arrivals(&Requests::new(10.0, 800.0, 150.0), &engines);
        prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(shares.iter().all(|share| *share >= 0.0));
    }
}
