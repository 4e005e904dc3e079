//! Which pods are woken when a reading shows free VRAM.

use super::*;
use crate::ledger::SchedulingGate;

#[test]
fn as_many_refused_pods_are_requeued_as_would_fit() {
    let mut bench = MeasurementFixture::new();
    bench.observe_bound("other", 85, Some(&["GPU-b"]), false);
    bench.read([(70, &[]), (85, &[("other", 85)])]);
    (0..3).for_each(|_| bench.read([(70, &[]), (85, &[("other", 85)])]));
    for name in ["a", "b", "c"] {
        let demand = bench.wait(name, 40, if name == "c" { 7 } else { 0 });
        assert_eq!(
            bench.verdict(&demand).unwrap_err().code(),
            "insufficient-vram"
        );
        let snapshot = bench.ledger.snapshot();
        bench
            .ledger
            .ledger_mut()
            .record_refusal(&uid(name), Some(snapshot.node_set([0].into_iter())));
    }
    let woken = |bench: &mut MeasurementFixture| apply_plan(bench.ledger.ledger_mut());
    bench.pass(2);
    assert!(woken(&mut bench).is_empty(), "nothing has changed");
    bench.read([(0, &[]), (85, &[("other", 85)])]);
    assert_eq!(
        woken(&mut bench),
        [uid("c")],
        "two engines cannot start there at once, and the first comes first"
    );
    assert!(
        woken(&mut bench).is_empty(),
        "the free VRAM is for the pod that was woken"
    );
    bench.ledger.ledger_mut().release_reservation(&uid("c"));
    bench.ledger.ledger_mut().begin_attempt(&uid("c"));
    bench.pass(4);
    bench.read([(0, &[]), (85, &[("other", 85)])]);
    assert_eq!(
        woken(&mut bench),
        [uid("a")],
        "a pod that has asked is not on its way any more"
    );
    bench.ledger.ledger_mut().begin_attempt(&uid("a"));
    bench.ledger.ledger_mut().begin_attempt(&uid("b"));
    assert!(
        woken(&mut bench).is_empty(),
        "a pod that asks does not wait to be woken"
    );
}

#[test]
fn refused_pods_take_turns() {
    let mut bench = MeasurementFixture::new();
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        bench.wait(name, 95, 0);
        let snapshot = bench.ledger.snapshot();
        bench
            .ledger
            .ledger_mut()
            .record_refusal(&uid(name), Some(snapshot.node_set([0].into_iter())));
    }
    bench.pass(2);
    let mut look = || {
        bench
            .ledger
            .ledger_mut()
            .pending(2)
            .into_iter()
            .map(|pending| pending.uid)
            .collect::<BTreeSet<_>>()
    };
    let looks: Vec<BTreeSet<PodUid>> = (0..5).map(|_| look()).collect();
    let round: Vec<PodUid> = names
        .iter()
        .cycle()
        .take(10)
        .map(|name| uid(name))
        .collect();
    assert_eq!(
        looks,
        round
            .chunks(2)
            .map(|two| two.iter().cloned().collect())
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_pod_that_waits_when_a_replica_begins_to_lead_may_have_been_refused_before() {
    let mut bench = MeasurementFixture::new();
    bench.wait("old", 20, 0);
    bench.ledger.ledger_mut().presume_all_refused();
    bench.pass(2);
    assert_eq!(apply_plan(bench.ledger.ledger_mut()), [uid("old")]);
}

#[test]
fn gated_pods_that_are_not_placed_leave_their_turn_to_those_behind_them() {
    let mut bench = MeasurementFixture::new();
    let names: Vec<String> = (0..60).map(|n| format!("gated-{n:02}")).collect();
    for name in &names {
        let demand = bench.wait(name, 95, 0);
        let waiting = ObservedWaiting {
            gate: SchedulingGate::Planned,
            ..ObservedWaiting::default()
        };
        bench.ledger.ledger_mut().observe_pod(PodObservation {
            uid: uid(name),
            key: key(name),
            demand,
            state: ObservedPhase::Waiting(waiting),
            observed: None,
        });
    }
    let mut observation = BTreeSet::new();
    for _ in 0..20 {
        bench.pass(2);
        let generation = bench.ledger.ledger().generation();
        for pod in bench.ledger.ledger_mut().pending(4) {
            bench
                .ledger
                .ledger_mut()
                .record_no_placement(&pod.uid, generation);
            observation.insert(pod.uid);
        }
    }
    assert_eq!(
        observation.len(),
        names.len(),
        "twenty looks at four each are enough for sixty"
    );
}
