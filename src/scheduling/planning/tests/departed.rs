//! Pods that have ended, and whose memory the latest reading still shows: it becomes free without an eviction.

use super::*;
use crate::ledger::{ObservedPhase, ObservedWaiting};
use crate::units::Bytes;
use crate::verbs::observe::{PodDeleted, ReadingReported};

impl LedgerCluster {
    /// Its agent reports what these pods have, each on the node's GPU of that place.
    fn report(&mut self, on: &str, gpus: &[&[(&str, u64)]]) {
        let gpu = |(index, pods): (usize, &&[(&str, u64)])| GpuReading {
            uuid: gpu_at(on, index as u32),
            used: Some(Bytes::gib(pods.iter().map(|(_, gib)| gib).sum())),
            attributed: pods
                .iter()
                .map(|(name, gib)| (uid(name), Bytes::gib(*gib)))
                .collect(),
            engine_load: EngineLoad::NONE,
        };
        let gpus = gpus.iter().enumerate().map(gpu).collect();
        let reading = NodeReading {
            sampled: self.ledger().now(),
            gpus,
            ..NodeReading::default()
        };
        self.apply(ReadingReported {
            node: node(on),
            reading: reading.into(),
        });
    }
}

/// A pod has ended on the first GPU, and another runs on the second.
fn one_ended() -> LedgerCluster {
    let mut cluster = LedgerCluster::new(&[("n", 2)]);
    cluster.bound("ended", "n", 0, job(60));
    cluster.bound("job", "n", 1, job(60));
    cluster.report("n", &[&[("ended", 60)], &[("job", 60)]]);
    cluster.apply(PodDeleted(uid("ended")));
    cluster
}

#[test]
fn no_pod_is_evicted_while_memory_of_a_pod_that_has_ended_becomes_free() {
    let mut cluster = one_ended();
    cluster.add_gated("serving", shared(50, 100));
    assert_eq!(cluster.plan(), ["serving waits: insufficient-vram"]);
    cluster.advance(1);
    cluster.report("n", &[&[], &[("job", 60)]]);
    assert_eq!(cluster.plan(), ["serving on n"]);
}

#[test]
fn memory_of_ended_pods_counts_as_free_when_victims_are_chosen() {
    let mut cluster = one_ended();
    cluster.bound("low", "n", 0, shared(10, -20));
    cluster.add_gated("serving", shared(70, 100));
    assert_eq!(apply_plan(cluster.ledger_mut()), [uid("serving")]);
    let reserved = cluster
        .ledger()
        .reservation_status_of(&uid("serving"))
        .unwrap();
    assert_eq!(*reserved.reservation.victims, [uid("ended"), uid("low")]);
    let remaining: Vec<&PodUid> = reserved
        .remaining
        .iter()
        .map(|victim| &victim.uid)
        .collect();
    assert_eq!(remaining, [&uid("low")]);
    cluster.add_gated("next", shared(50, 100));
    assert_eq!(
        cluster.plan(),
        ["next on n after job"],
        "its memory is promised once"
    );
}

/// The ledger has seen the pod end, and then a reservation of another leader lists it as a victim. VRAM that is attributed to a
/// pod without a grant does not become free with it.
#[test]
fn memory_of_a_pod_that_has_ended_counts_once_however_often_it_is_named() {
    let mut cluster = one_ended();
    let reservation = Reservation {
        node: node("n"),
        devices: [gpu_at("n", 0)].into(),
        victims: [uid("ended")].into(),
        deadline: cluster.ledger().now() + Millis::seconds(20),
    };
    let waiting = ObservedWaiting {
        reservation: Some(reservation),
        ..ObservedWaiting::default()
    };
    cluster.observe(
        "other",
        shared(10, 100),
        ObservedPhase::Waiting(waiting),
        None,
    );
    assert!(
        cluster
            .ledger()
            .reservation_status_of(&uid("other"))
            .is_some()
    );
    cluster.apply(PodDeleted(uid("other")));
    cluster.bound("low", "n", 0, shared(10, -20));
    for _ in 0..3 {
        cluster.advance(1);
        cluster.report("n", &[&[("ended", 60), ("no-grant", 15)], &[("job", 60)]]);
    }
    cluster.add_gated("serving", shared(50, 100));
    assert_eq!(apply_plan(cluster.ledger_mut()), [uid("serving")]);
    let reserved = cluster
        .ledger()
        .reservation_status_of(&uid("serving"))
        .unwrap();
    assert_eq!(*reserved.reservation.victims, [uid("ended"), uid("low")]);
}

#[test]
fn memory_that_stays_after_its_pod_has_ended_is_not_waited_for() {
    let mut cluster = one_ended();
    for _ in 0..32 {
        cluster.advance(1);
        cluster.report("n", &[&[("ended", 60)], &[("job", 60)]]);
    }
    cluster.add_gated("serving", shared(50, 100));
    assert_eq!(cluster.plan(), ["serving on n after job"]);
}

/// A pod that was deleted by force runs on for the grace in its spec, and what it uses may grow to its grant again.
#[test]
fn a_pod_that_has_ended_keeps_its_grant_as_long_as_its_processes_are_seen() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    for (demand, wanted) in [
        (
            demand_of(70 << 30, 1, Sharing::Exclusive, 0),
            demand_of(1 << 30, 1, Sharing::Shared, 100),
        ),
        (
            demand_of(70 << 30, 1, Sharing::Exclusive, 0),
            demand_of(1 << 30, 1, Sharing::Exclusive, 100),
        ),
        (shared(40, 0), shared(40, 100)),
    ] {
        cluster.bound("ended", "n", 0, demand);
        cluster.advance(1);
        cluster.report("n", &[&[("ended", 1)]]);
        cluster.apply(PodDeleted(uid("ended")));
        cluster.add_gated("next", wanted);
        for _ in 0..30 {
            assert_eq!(cluster.plan(), ["next waits: insufficient-vram"]);
            cluster.advance(1);
            cluster.report("n", &[&[("ended", 1)]]);
        }
        cluster.advance(1);
        cluster.report("n", &[&[]]);
        assert_eq!(cluster.plan(), ["next on n"]);
        cluster.apply(PodDeleted(uid("next")));
    }
}
