//! One engine at a time starts on a GPU, and none where engines are full.

use super::*;

#[test]
fn two_engines_do_not_start_on_one_gpu_at_once() {
    let mut bench = MeasurementFixture::new();
    assert_eq!(bench.bind("first", 20, 0), ["GPU-a"]);
    assert_eq!(
        bench.bind("second", 20, 0),
        ["GPU-b"],
        "beside the first it would fit more tightly"
    );
    let third = bench.wait("third", 20, 0);
    let refused = Misfit::EngineStarting {
        starting: 2,
        asked: 1,
    };
    assert_eq!(bench.verdict(&third), Err(refused));
    assert_eq!(
        bench.bind("job", 20, -1),
        ["GPU-a"],
        "a class that is not of engines may join"
    );
    bench.observe_bound("first", 20, Some(&["GPU-a"]), false);
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_start_gate_opens_after_twice_the_time_the_start_should_take() {
    let mut bench = MeasurementFixture::new();
    bench.bind("first", 15, 0);
    bench.bind("second", 15, 0);
    let third = bench.wait("third", 20, 0);
    // 15 GiB: 16.1 s over the network, 5.4 s from disk, 20 s of start.
    bench.pass(82);
    assert!(matches!(
        bench.verdict(&third),
        Err(Misfit::EngineStarting { .. })
    ));
    bench.pass(1);
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_start_gate_opens_when_the_pod_is_released_or_its_binding_fails() {
    let mut bench = MeasurementFixture::new();
    bench.bind("first", 15, 0);
    bench.wait("second", 15, 0);
    bench
        .ledger
        .ledger_mut()
        .assume(&uid("second"), &node())
        .unwrap();
    let third = bench.wait("third", 20, 0);
    assert!(bench.verdict(&third).is_err());
    bench.ledger.ledger_mut().forget(&uid("second"));
    assert_eq!(bench.verdict(&third), Ok(()));
    bench
        .ledger
        .ledger_mut()
        .assume(&uid("second"), &node())
        .unwrap();
    bench.ledger.ledger_mut().release(&uid("first"));
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_gpu_with_full_engines_takes_no_pod_of_a_class_that_limits_load() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
    bench.observe_bound("other", 85, Some(&["GPU-b"]), false);
    let serving = bench.wait("serving", 20, 0);
    let job = bench.wait("job", 20, -1);
    let full = |kv, queue| EngineLoad::new(Percent::new(kv), Some(queue));
    let at = |bench: &mut MeasurementFixture, engine_load| {
        // Until the average has come there.
        for _ in 0..60 {
            bench.read_with(
                [(30, &[("engine", 30)]), (85, &[("other", 85)])],
                engine_load,
            );
        }
    };
    at(&mut bench, full(85, 0));
    assert_eq!(bench.verdict(&serving), Ok(()));
    assert_eq!(
        bench.verdict(&job).unwrap_err().code(),
        "engines-busy",
        "harvesting keeps further away"
    );
    at(&mut bench, full(91, 0));
    assert_eq!(bench.verdict(&serving).unwrap_err().code(), "engines-busy");
    at(&mut bench, full(10, 33));
    assert_eq!(bench.verdict(&serving).unwrap_err().code(), "engines-busy");
    at(&mut bench, EngineLoad::default());
    assert_eq!(
        bench.verdict(&serving),
        Ok(()),
        "what is not known is not held against it"
    );
}

#[test]
fn a_soft_reservation_of_an_engine_keeps_the_next_engine_off_its_gpu() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("tenant", 30, Some(&["GPU-a"]), false);
    let first = bench.wait("first", 20, 0);
    let second = bench.wait("second", 20, 0);
    let snapshot = bench.ledger.snapshot();
    let view = snapshot.node("n").unwrap();
    let gpu_candidate = fit(view, &first).unwrap();
    assert_eq!(
        gpu_candidate.iter().collect::<Vec<_>>(),
        [0],
        "beside the tenant it fits most tightly"
    );
    bench
        .ledger
        .ledger_mut()
        .reserve_softly(&uid("first"), &view.name, &view.uuids(gpu_candidate));
    let next = fit(bench.ledger.snapshot().node("n").unwrap(), &second).unwrap();
    assert_eq!(
        next.iter().collect::<Vec<_>>(),
        [1],
        "there it would have to wait for the first one's start"
    );
}

#[test]
fn no_engine_starts_on_a_gpu_reserved_for_an_engine() {
    let mut bench = MeasurementFixture::new();
    bench.bind("job", 60, -1);
    bench.bind("other", 85, -1);
    bench.wait("urgent", 40, 5);
    let reservation = bench.reservation_on_a([uid("job")], 60);
    bench
        .ledger
        .ledger_mut()
        .reserve(&uid("urgent"), reservation)
        .unwrap();
    let late = bench.wait("late", 10, 0);
    assert_eq!(bench.verdict(&late).unwrap_err().code(), "engine-starting");
    bench.ledger.ledger_mut().release(&uid("job"));
    assert!(
        bench
            .ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1
            .is_ok(),
        "its own start is not in its way"
    );
}
