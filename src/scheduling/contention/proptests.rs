//! Whatever engines share a GPU.

use super::*;
use proptest::prelude::*;

fn engine() -> impl Strategy<Value = EngineWork> {
    (
        0.0..5e-3f64,
        1e-4..50e-3f64,
        0.0..50e-3f64,
        0.0..=1.0f64,
        0.05..=1.0f64,
    )
        .prop_map(|(overhead_s, memory_s, compute_s, busy, sms)| EngineWork {
            overhead_s,
            memory_s,
            compute_s,
            busy,
            sms,
        })
}

fn engines() -> impl Strategy<Value = Vec<EngineWork>> {
    proptest::collection::vec(engine(), 1..7)
}

fn sharing() -> impl Strategy<Value = ComputeSharing> {
    prop_oneof![
        Just(ComputeSharing::Exclusive),
        Just(ComputeSharing::TimeSlicing),
        Just(ComputeSharing::SmSharing)
    ]
}

proptest! {
    #[test]
    fn an_engine_with_the_whole_gpu_is_as_fast_as_alone(engine in engine(), sharing in sharing()) {
        let whole = EngineWork { sms: 1.0, ..engine };
        prop_assert_eq!(contention(&[whole], sharing), vec![Contention::ALONE]);
    }

    #[test]
    fn an_idle_neighbor_costs_nothing(engines in engines(), idle in engine(), sharing in sharing()) {
        let without = contention(&engines, sharing);
        let mut with = engines;
        with.push(EngineWork { busy: 0.0, ..idle });
        let mut beside = contention(&with, sharing);
        beside.pop();
        prop_assert_eq!(beside, without);
    }

    #[test]
    fn a_neighbor_that_joins_or_does_more_makes_nobody_faster(
        engines in engines(), joins in engine(), busier in 0.0..=1.0f64, times in 1.0..4.0f64, sharing in sharing(),
    ) {
        let steps = |engines: &[EngineWork]| {
            let under = contention(engines, sharing);
            engines.iter().zip(under).map(|(engine, under)| engine.step_s(&under)).collect::<Vec<f64>>()
        };
        let with = |neighbor: EngineWork| [&engines[..], &[neighbor]].concat();
        let more = EngineWork {
            memory_s: times * joins.memory_s,
            compute_s: times * joins.compute_s,
            busy: joins.busy + busier * (1.0 - joins.busy),
            ..joins
        };
        let (alone, beside, beside_more) = (steps(&engines), steps(&with(joins)), steps(&with(more)));
        for ((alone, beside), more) in alone.iter().zip(beside).zip(beside_more) {
            prop_assert!(*alone <= beside * (1.0 + 1e-12) && beside <= more * (1.0 + 1e-12), "{alone} {beside} {more}");
        }
    }

    #[test]
    fn equal_engines_are_slowed_alike_and_the_order_does_not_count(
        engines in engines(), equal in engine(), sharing in sharing(),
    ) {
        let all = [&[equal], &engines[..], &[equal]].concat();
        let there = contention(&all, sharing);
        let mut back = contention(&all.iter().rev().copied().collect::<Vec<_>>(), sharing);
        back.reverse();
        let near = |a: &Contention, b: &Contention| {
            [(a.overhead, b.overhead), (a.memory, b.memory), (a.compute, b.compute)]
                .iter()
                .all(|(a, b)| (a / b - 1.0).abs() < 1e-9)
        };
        prop_assert!(there.iter().zip(&back).all(|(a, b)| near(a, b)));
        prop_assert!(near(&there[0], &there[there.len() - 1]));
    }

    #[test]
    fn turns_add_up_to_at_most_the_whole_gpu(engines in engines()) {
        let busy: Vec<EngineWork> = engines.iter().map(|engine| EngineWork { busy: 1.0, ..*engine }).collect();
        let turns = contention(&busy, ComputeSharing::TimeSlicing);
        prop_assert!(turns.iter().map(|under| 1.0 / under.memory).sum::<f64>() <= 1.0 + 1e-9);
    }
}
