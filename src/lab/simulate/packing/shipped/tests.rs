//! Stowage on small clusters: the ledger is right after every event, and agrees with the flat cluster.

use super::*;
use crate::simulate::openb::{Qos, built_in};
use crate::simulate::packing::arrivals::Arrivals;
use crate::simulate::packing::run::PackingRun;
use crate::simulate::packing::testing::{kind, setting};
use stowage_scheduling::audit::ledger::audit;

fn audited(shipped: &StowagePlacer<'_>) {
    let violations = audit(shipped.cluster.ledger());
    assert!(violations.is_empty(), "{violations:?}");
}

/// Thousandths of GPUs that are allocated by the ledger, rounded.
fn promised(shipped: &StowagePlacer<'_>) -> u64 {
    let totals = shipped.cluster.ledger().totals();
    let gpu = totals.capacity.0 / totals.gpus;
    (totals.charged.0 * 1000 + gpu / 2) / gpu
}

#[test]
fn the_ledger_adds_up_after_every_event_and_agrees_with_the_flat_cluster() {
    let setting = WorkloadTrace::from_trace(&built_in::trace());
    for eviction in [SimulatedEviction::Never, SimulatedEviction::BestEffortPods] {
        let arrivals = Arrivals::draw(&setting, 42);
        let mut world = PackingRun::new(&setting, &arrivals.ranks, None);
        let mut shipped = StowagePlacer::new(
            &setting,
            &arrivals.ranks,
            eviction,
            CpuRule::default(),
            DemandKnowledge::Learned,
        );
        let mut evicted = 0;
        for arrival in arrivals.iter(&setting) {
            evicted += world.admit(arrival, &mut shipped).evicted.len();
            // Some of those before it end.
            if arrival.number % 8 == 7 {
                world.end(arrival.number / 2, &mut shipped);
            }
            audited(&shipped);
            assert_eq!(promised(&shipped), world.cluster.allocated());
        }
        assert_eq!(evicted > 0, eviction == SimulatedEviction::BestEffortPods);
    }
}

#[test]
fn a_pod_is_placed_only_where_the_kube_filters_accept_it() {
    let picky = PodKind {
        models: [false, true].into(),
        ..kind(1000, 1, 500)
    };
    let setting = setting(&[(500, 1), (8000, 1)], &[kind(1000, 1, 500), picky]);
    let cluster = SimulatedCluster::new(&setting, &[0, 1]);
    let mut shipped = StowagePlacer::new(
        &setting,
        &[0, 1],
        SimulatedEviction::Never,
        CpuRule::default(),
        DemandKnowledge::Learned,
    );
    let place = |shipped: &mut StowagePlacer<'_>, kind| {
        shipped
            .place(
                &cluster,
                PodArrival {
                    number: kind,
                    pod: kind,
                    kind,
                },
            )
            .map(|placed| placed.placement.node)
    };
    assert_eq!(place(&mut shipped, 0), Some(1));
    assert_eq!(place(&mut shipped, 1), None);
    assert!(
        shipped
            .cluster
            .ledger()
            .pod_state(&super::ledger::uid(1))
            .is_none()
    );
}

/// Two best-effort pods on one node with 8 CPUs and two GPUs, then a serving pod: its node and its victims.
fn third_of(kinds: [PodKind; 3]) -> (Option<usize>, Vec<usize>) {
    let mut setting = setting(&[(8000, 2)], &kinds);
    for (pod, qos) in [
        (0, Qos::BestEffort),
        (1, Qos::BestEffort),
        (2, Qos::LatencySensitive),
    ] {
        setting.pods[pod].qos = Some(qos);
    }
    let mut world = PackingRun::new(&setting, &[0], None);
    let mut shipped = StowagePlacer::new(
        &setting,
        &[0],
        SimulatedEviction::BestEffortPods,
        CpuRule::default(),
        DemandKnowledge::Learned,
    );
    let mut outcomes = (0..3).map(|pod| {
        world.admit(
            PodArrival {
                number: pod,
                pod,
                kind: pod,
            },
            &mut shipped,
        )
    });
    let last = outcomes.nth(2).unwrap();
    audited(&shipped);
    (last.node, last.evicted)
}

#[test]
fn a_victim_frees_its_cpu_too() {
    // One with little CPU, and one with most of it; neither leaves enough of the GPU for another.
    let kinds = [kind(1000, 1, 600), kind(6000, 1, 900), kind(5000, 1, 700)];
    assert_eq!(third_of(kinds), (Some(0), vec![1]));
}

#[test]
fn pods_on_cpus_alone_leave_where_nothing_but_cpu_is_lacking() {
    let kinds = [kind(6000, 0, 0), kind(1000, 1, 400), kind(3000, 1, 400)];
    assert_eq!(third_of(kinds), (Some(0), vec![0]));
}
