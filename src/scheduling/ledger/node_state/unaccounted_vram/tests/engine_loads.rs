//! What readings of engines change of what decisions see.

use super::*;
use crate::policy::UnknownLoadRule;

fn load(kv: u8, queue: u32) -> EngineLoad {
    EngineLoad::new(Percent::new(kv), Some(queue))
}

fn read(bench: &mut MeasurementFixture, on_a: EngineLoad) {
    bench.read_with([(30, &[("engine", 30)]), (0, &[])], on_a);
}

fn with_engine() -> MeasurementFixture {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
    bench
}

fn generation(bench: &mut MeasurementFixture) -> u64 {
    bench.ledger.snapshot().node("n").unwrap().generation
}

#[test]
fn figures_that_jitter_change_nothing_that_decisions_see() {
    let mut bench = with_engine();
    read(&mut bench, load(50, 4));
    let before = generation(&mut bench);
    for second in 0..100u32 {
        read(
            &mut bench,
            load(46 + (second * 7 % 9) as u8, 3 + second % 3),
        );
    }
    assert_eq!(generation(&mut bench), before);
    (0..10).for_each(|_| read(&mut bench, load(90, 4)));
    assert_ne!(generation(&mut bench), before, "what lasts is seen");
}

#[test]
fn a_refused_pod_stays_refused_while_the_cache_jitters_about_its_limit() {
    let mut bench = with_engine();
    bench.observe_bound("other", 85, Some(&["GPU-b"]), false);
    let serving = bench.wait("serving", 20, 0);
    let read = |bench: &mut MeasurementFixture, on_a| {
        bench.read_with([(30, &[("engine", 30)]), (85, &[("other", 85)])], on_a);
        bench.verdict(&serving).map_err(|misfit| misfit.phrase())
    };
    let refusal = Err("no GPU can take the pod now");
    assert_eq!(read(&mut bench, load(92, 0)), refusal, "the limit is 90 %");
    let jitter = [88, 93, 86, 92, 89, 94, 87, 90, 91, 85];
    let answers: Vec<_> = (0..100)
        .map(|n| read(&mut bench, load(jitter[n % 10], 0)))
        .collect();
    assert!(answers.iter().all(|answer| *answer == refusal));
    assert!(
        (0..60).any(|_| read(&mut bench, load(80, 0)).is_ok()),
        "when it is really emptier it is not"
    );
}

#[test]
fn an_engine_that_interrupts_its_own_requests_takes_no_pod_whatever_its_gauge_says() {
    let mut bench = with_engine();
    bench.observe_bound("other", 85, Some(&["GPU-b"]), false);
    let serving = bench.wait("serving", 20, 0);
    let read = |bench: &mut MeasurementFixture, on_a| {
        bench.read_with([(30, &[("engine", 30)]), (85, &[("other", 85)])], on_a);
        bench.verdict(&serving).map_err(|misfit| misfit.code())
    };
    assert_eq!(read(&mut bench, load(63, 0)), Ok(()));
    assert_eq!(
        read(
            &mut bench,
            EngineLoad {
                preempting: true,
                ..load(63, 0)
            }
        ),
        Err("engines-busy")
    );
    assert_eq!(read(&mut bench, load(63, 0)), Ok(()));
}

#[test]
fn of_two_gpus_read_at_66_and_2_percent_bind_takes_the_second() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
    bench.observe_bound("other", 30, Some(&["GPU-b"]), false);
    bench.read_with(
        [(30, &[("engine", 30)]), (30, &[("other", 30)])],
        load(66, 0),
    );
    assert_eq!(bench.bind("newcomer", 20, 0), ["GPU-b"]);
}

#[test]
fn the_averages_are_stored_with_the_ledger() {
    let mut bench = with_engine();
    (0..20).for_each(|n| read(&mut bench, load(30 + n, n.into())));
    let ledger: &Ledger = bench.ledger.ledger();
    let mut loaded = crate::proptests::stored_and_loaded(ledger);
    let average = |ledger: &Ledger| ledger.smoothed_load(&node(), &gpu("GPU-a")).copied();
    assert!(average(ledger).is_some_and(|average| average.kv_cache() > Percent::new(40)));
    assert_eq!(average(&loaded), average(ledger));
    assert_eq!(loaded.snapshot(), bench.ledger.snapshot());
}

/// What decisions see of `GPU-a`, on which a pod's engine cannot be read, beside an engine that says `known`.
fn beside_unread(
    bench: &mut MeasurementFixture,
    pod: &str,
    declares_port: bool,
    known: EngineLoad,
) -> EngineLoad {
    for _ in 0..3 {
        bench.pass(1);
        let gpu_reading = |uuid: &str, engine_load| GpuReading {
            uuid: gpu(uuid),
            used: Some(Bytes::gib(30)),
            attributed: vec![(uid(pod), Bytes::gib(30))],
            engine_load,
        };
        let unread = UnreadPod {
            pod: uid(pod),
            gpus: [gpu("GPU-a")].into(),
            declares_port,
        };
        let reading = NodeReading {
            sampled: bench.now,
            gpus: vec![
                gpu_reading("GPU-a", known),
                gpu_reading("GPU-b", EngineLoad::NONE),
            ],
            unread: vec![unread],
            ..NodeReading::default()
        };
        bench
            .ledger
            .ledger_mut()
            .take_reading(&node(), reading.into());
    }
    let snapshot = bench.ledger.snapshot();
    let gpus = &snapshot.node("n").unwrap().gpus;
    assert_eq!(
        gpus[1].engine_load,
        EngineLoad::NONE,
        "it is on the other GPU"
    );
    gpus[0].engine_load
}

#[test]
fn a_gpu_whose_pod_may_run_an_engine_that_cannot_be_read_has_an_unknown_load() {
    let mut bench = with_engine();
    let none = EngineLoad::NONE;
    assert_eq!(
        beside_unread(&mut bench, "engine", false, none),
        EngineLoad::UNKNOWN,
        "its class runs engines"
    );
    assert_eq!(
        beside_unread(&mut bench, "foreign", false, none),
        EngineLoad::UNKNOWN,
        "nobody knows its class"
    );
    let busy = beside_unread(&mut bench, "engine", false, load(97, 3));
    assert_eq!(
        busy,
        EngineLoad {
            partial: true,
            ..load(97, 3)
        },
        "what is known counts"
    );
}

#[test]
fn a_pod_of_a_class_without_engines_that_serves_nothing_has_no_kv_cache() {
    let mut bench = MeasurementFixture::new();
    let batch = demand(30, -1, bench.ledger.ledger().policy());
    let devices = Some(vec![gpu("GPU-a")].into());
    let state = ObservedPhase::Bound {
        node: node(),
        devices,
        starting: false,
        ran: None,
    };
    bench.ledger.observe("batch", batch, state, None);
    assert_eq!(
        beside_unread(&mut bench, "batch", false, EngineLoad::NONE),
        EngineLoad::NONE
    );
    assert_eq!(
        beside_unread(&mut bench, "batch", true, EngineLoad::NONE),
        EngineLoad::UNKNOWN,
        "it serves something"
    );
}

#[test]
fn a_class_may_keep_away_from_engines_that_do_not_say_how_busy_they_are() {
    for rule in [UnknownLoadRule::Accept, UnknownLoadRule::Refuse] {
        let policy = Policy::default();
        let mut classes = policy.classes().to_vec();
        classes
            .iter_mut()
            .for_each(|class| class.limits.unknown_load = rule);
        let mut bench = MeasurementFixture::with(policy.with_classes(classes).unwrap());
        bench.observe_bound("engine", 30, Some(&["GPU-a"]), false);
        bench.observe_bound("other", 85, Some(&["GPU-b"]), false);
        let serving = bench.wait("serving", 20, 0);
        beside_unread(&mut bench, "engine", false, EngineLoad::NONE);
        let expected = match rule {
            UnknownLoadRule::Accept => Ok(()),
            UnknownLoadRule::Refuse => Err(Misfit::UnknownLoad {
                unknown: 1,
                asked: 1,
            }),
        };
        assert_eq!(bench.verdict(&serving), expected);
        beside_unread(&mut bench, "engine", false, load(97, 0));
        let code = bench.verdict(&serving).map_err(|misfit| misfit.code());
        assert_eq!(code, Err("engines-busy"), "what is known comes first");
    }
}
