//! When a victim counts as gone, and what leaves with it.

use super::*;

#[test]
fn a_victim_has_left_when_a_reading_shows_no_process_of_it() {
    let mut bench = MeasurementFixture::new();
    bench.bind("job", 80, -1);
    bench.bind("other", 80, -1);
    bench.read([(80, &[("job", 80)]), (80, &[("other", 80)])]);
    bench.wait("urgent", 60, 5);
    let reservation = bench.reservation_on_a([uid("job")], 60);
    bench
        .ledger
        .ledger_mut()
        .reserve(&uid("urgent"), reservation)
        .unwrap();
    bench.ledger.ledger_mut().release(&uid("job"));
    let verdict = |bench: &MeasurementFixture| {
        bench
            .ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1
    };
    assert_eq!(
        verdict(&bench),
        Err(Misfit::VictimsLeaving { remaining: 1 }),
        "its memory is not given back yet"
    );
    assert!(!bench.ledger.ledger().reservation_statuses()[0].is_free);
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    assert!(verdict(&bench).is_ok());
    assert!(bench.ledger.ledger().reservation_statuses()[0].is_free);
}

#[test]
fn an_unobserved_victim_has_left_when_a_reading_shows_nothing_of_it() {
    let mut bench = MeasurementFixture::new();
    bench.wait("urgent", 60, 5);
    bench.read([(80, &[("job", 80)]), (0, &[])]);
    let reservation = bench.reservation_on_a([uid("job")], 60);
    let waiting = ObservedWaiting {
        reservation: Some(reservation),
        ..ObservedWaiting::default()
    };
    let demand = bench
        .ledger
        .ledger()
        .pod_state(&uid("urgent"))
        .unwrap()
        .demand
        .clone();
    let (uid, key, state) = (
        uid("urgent"),
        key("urgent"),
        ObservedPhase::Waiting(waiting),
    );
    bench.ledger.ledger_mut().observe_pod(PodObservation {
        uid,
        key,
        demand,
        state,
        observed: None,
    });
    assert!(
        !bench.ledger.ledger().reservation_statuses()[0].is_free,
        "its process lives on"
    );
    bench.read([(0, &[]), (0, &[])]);
    assert!(bench.ledger.ledger().reservation_statuses()[0].is_free);
}

#[test]
fn an_unobserved_victim_is_waited_for_until_the_first_report_timeout() {
    let mut bench = MeasurementFixture::new();
    let demand = bench.wait("urgent", 60, 5);
    let reservation = bench.reservation_on_a([uid("job")], 60);
    let state = ObservedPhase::Waiting(ObservedWaiting {
        reservation: Some(reservation),
        ..ObservedWaiting::default()
    });
    bench.ledger.ledger_mut().observe_pod(PodObservation {
        uid: uid("urgent"),
        key: key("urgent"),
        demand,
        state,
        observed: None,
    });
    assert!(
        !bench.ledger.ledger().reservation_statuses()[0].is_free,
        "no reading yet"
    );
    bench.pass(9);
    assert!(!bench.ledger.ledger().reservation_statuses()[0].is_free);
    bench.pass(2);
    assert!(
        bench.ledger.ledger().reservation_statuses()[0].is_free,
        "there is no agent"
    );
}

#[test]
fn a_victim_that_ends_while_its_agent_is_silent_is_waited_for() {
    let mut bench = MeasurementFixture::new();
    bench.bind("job", 80, -1);
    bench.read([(80, &[("job", 80)]), (0, &[])]);
    bench.wait("urgent", 60, 5);
    let reservation = bench.reservation_on_a([uid("job")], 600);
    bench
        .ledger
        .ledger_mut()
        .reserve(&uid("urgent"), reservation)
        .unwrap();
    bench.pass(40);
    assert_eq!(
        bench.ledger.ledger().node(&node()).unwrap().freshness,
        Freshness::Expired
    );
    bench.ledger.ledger_mut().release(&uid("job"));
    bench.pass(60);
    assert!(
        !bench.ledger.ledger().reservation_statuses()[0].is_free,
        "no reading since it ended"
    );
    bench.read([(0, &[]), (0, &[])]);
    assert!(bench.ledger.ledger().reservation_statuses()[0].is_free);
}

#[test]
fn a_victim_without_memory_has_left_after_the_next_reading() {
    let mut bench = MeasurementFixture::new();
    bench.bind("job", 80, -1);
    bench.bind("other", 80, -1);
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    bench.wait("urgent", 60, 5);
    let reservation = bench.reservation_on_a([uid("job")], 60);
    bench
        .ledger
        .ledger_mut()
        .reserve(&uid("urgent"), reservation)
        .unwrap();
    bench.pass(1);
    bench.ledger.ledger_mut().release(&uid("job"));
    assert!(
        bench
            .ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1
            .is_err(),
        "it may have allocated since"
    );
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    assert!(
        bench
            .ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1
            .is_ok()
    );
}

#[test]
fn a_victims_use_beyond_its_grant_is_freed_with_it() {
    let mut bench = MeasurementFixture::new();
    bench.bind("greedy", 20, -1);
    bench.bind("other", 85, -1);
    bench.read([(24, &[("greedy", 24)]), (85, &[("other", 85)])]);
    let whole = bench.wait("whole", 90, 5);
    let candidate = bench
        .ledger
        .ledger()
        .candidates_for(&bench.ledger.ledger().preemptor(&uid("whole")), [&node()])
        .pop()
        .unwrap();
    let found = cheapest_victims(&candidate, &whole, BudgetRules::Keep).unwrap();
    assert_eq!(found.victims, [uid("greedy")]);
    let reservation = bench.reservation_on_a(found.victims, 60);
    assert_eq!(
        bench
            .ledger
            .ledger_mut()
            .reserve(&uid("whole"), reservation),
        Ok(())
    );
}

/// Its reservation was made while an agent repeated old figures, or none were known.
#[test]
fn a_reserved_gpu_is_not_free_while_a_pod_that_has_ended_has_what_the_reservation_needs() {
    let mut bench = MeasurementFixture::new();
    bench.read([(0, &[]), (0, &[])]);
    bench.wait("urgent", 60, 5);
    let reservation = bench.reservation_on_a([], 600);
    bench
        .ledger
        .ledger_mut()
        .reserve(&uid("urgent"), reservation)
        .unwrap();
    let verdict = |bench: &MeasurementFixture| {
        bench
            .ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1
    };
    assert!(verdict(&bench).is_ok());
    for (left, has_room) in [(40, false), (20, true), (31, false)] {
        bench.read([(left, &[("ended", left)]), (0, &[])]);
        assert_eq!(verdict(&bench).is_ok(), has_room, "{left}");
        assert_eq!(
            bench.ledger.ledger().reservation_statuses()[0].is_free,
            has_room,
            "{left}"
        );
    }
    assert!(
        bench
            .ledger
            .ledger_mut()
            .assume(&uid("urgent"), &node())
            .is_err()
    );
    bench.pass(40);
    assert_eq!(
        bench.ledger.ledger().node(&node()).unwrap().freshness,
        Freshness::Expired
    );
    assert!(
        verdict(&bench).is_ok(),
        "what nobody shows any more holds nothing back"
    );
    bench.read([(40, &[("ended", 40)]), (0, &[])]);
    assert!(verdict(&bench).is_err());
    bench.read([(0, &[]), (0, &[])]);
    assert!(matches!(
        bench.ledger.ledger_mut().assume(&uid("urgent"), &node()),
        Ok(AssumeResult::New(_))
    ));
}
