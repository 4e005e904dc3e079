//! Compares the bound with packings found by exhaustive search, and with policies' results.

use super::super::cluster::{SimulatedNode, SimulatedPlacement};
use super::super::testing::{kind, setting};
use super::*;
use crate::simulate::openb::built_in;
use crate::simulate::packing::trace::PodKind;
use crate::simulate::packing::{CpuRule, Replay, SimulatedEviction, TypicalPods, replay};
use proptest::prelude::*;
use stowage_scheduling::vocabulary::gpu::GpuSet;

/// The greatest allocation of these pods, in thousandths of GPUs; the first `placed` of them must all be placed.
fn best(setting: &WorkloadTrace, ranks: &[usize], pods: &[usize], placed: usize) -> Option<u64> {
    fn search(
        setting: &WorkloadTrace,
        cluster: &SimulatedCluster,
        pods: &[usize],
        placed: usize,
    ) -> Option<u64> {
        let Some((pod, rest)) = pods.split_first() else {
            return Some(cluster.allocated());
        };
        let kind = setting.kind_of(*pod);
        let without = if placed == 0 {
            search(setting, cluster, rest, 0)
        } else {
            None
        };
        let with = possible_placements(cluster, kind)
            .into_iter()
            .filter_map(|seat| {
                let mut cluster = cluster.clone();
                cluster.allocate(kind, seat);
                search(setting, &cluster, rest, placed.saturating_sub(1))
            });
        with.chain(without).max()
    }
    search(
        setting,
        &SimulatedCluster::new(setting, ranks),
        pods,
        placed,
    )
}

/// Every node and GPU on which it fits. Whole GPUs are all alike.
fn possible_placements(cluster: &SimulatedCluster, kind: &PodKind) -> Vec<SimulatedPlacement> {
    let on = |(rank, node): (usize, &SimulatedNode)| -> Vec<SimulatedPlacement> {
        let gpus = match kind.is_shared() {
            true => (0..node.gpus.len())
                .filter(|gpu| node.gpus[*gpu] >= kind.milli_per_gpu)
                .map(GpuSet::single)
                .collect(),
            false => vec![node.tightest_gpus(kind)],
        };
        let seats = gpus
            .into_iter()
            .map(|gpus| SimulatedPlacement { node: rank, gpus });
        if node.fits(kind) {
            seats.collect()
        } else {
            Vec::new()
        }
    };
    cluster.nodes().iter().enumerate().flat_map(on).collect()
}

/// Two nodes and a handful of kinds, some of which fit on only one of two models.
fn small() -> impl Strategy<Value = (WorkloadTrace, Vec<usize>)> {
    let size = prop_oneof![Just(1000u32), (1u32..=100).prop_map(|tens| tens * 10)];
    let one = (0u64..9, 0u32..=2, size, any::<bool>());
    let kinds = prop::collection::vec(one, 1..=4).prop_map(|kinds: Vec<(u64, u32, u32, bool)>| {
        let kind = |(cpu, gpus, milli, is_picky): (u64, u32, u32, bool)| {
            let milli = match gpus {
                0 => 0,
                1 => milli,
                _ => 1000,
            };
            PodKind {
                models: [true, !is_picky].into(),
                ..kind(cpu * 1000, gpus, milli)
            }
        };
        kinds.into_iter().map(kind).collect::<Vec<PodKind>>()
    });
    let nodes = prop::collection::vec((1u64..17, 1u32..=2), 1..=2);
    (
        nodes,
        kinds,
        prop::collection::vec(any::<prop::sample::Index>(), 1..=6),
    )
        .prop_map(|(nodes, kinds, pods)| {
            let nodes: Vec<(u64, u32)> = nodes
                .into_iter()
                .map(|(cpu, gpus)| (cpu * 1000, gpus))
                .collect();
            let mut setting = setting(&nodes, &kinds);
            if let Some(last) = setting.nodes.get_mut(1) {
                last.model = 1;
            }
            let pods = pods.into_iter().map(|pod| pod.index(kinds.len())).collect();
            (setting, pods)
        })
}

fn counted(setting: &WorkloadTrace, pods: &[usize]) -> Vec<f64> {
    let of = |kind| {
        pods.iter()
            .filter(|pod| setting.pods[**pod].kind == kind)
            .count() as f64
    };
    (0..setting.kinds.len()).map(of).collect()
}

proptest! {
    #[test]
    fn no_packing_passes_the_bound((setting, pods) in small(), placed in 0usize..=6) {
        let ranks: Vec<usize> = (0..setting.nodes.len()).collect();
        let placed = placed.min(pods.len());
        if let Some(best) = best(&setting, &ranks, &pods, placed) {
            let asked = DemandAtLoad { arrived: counted(&setting, &pods), placed: counted(&setting, &pods[..placed]) };
            let most = max_allocation(&setting, &asked).unwrap();
            prop_assert!(most * 1000.0 >= best as f64 - 1e-3, "{most} GPUs, where {best} thousandths are packed");
            let all: f64 = pods.iter().map(|pod| setting.kind_of(*pod).milli_gpus() as f64).sum();
            prop_assert!(most * 1000.0 <= all.min(setting.capacity() as f64) + 1e-3);
        }
    }
}

#[test]
fn the_bound_counts_only_parts_that_fit_on_one_gpu_together() {
    let demand = |came: &[f64], placed: &[f64]| DemandAtLoad {
        arrived: came.into(),
        placed: placed.into(),
    };
    // Parts of 600 thousandths are one to a GPU, those of 300 three, and one of each two.
    let setting = setting(&[(64_000, 2)], &[kind(0, 1, 600), kind(0, 1, 300)]);
    let most =
        |demand: DemandAtLoad| (max_allocation(&setting, &demand).unwrap() * 1e6).round() / 1e6;
    assert_eq!(most(demand(&[4.0, 0.0], &[0.0, 0.0])), 1.2);
    assert_eq!(most(demand(&[4.0, 1.0], &[0.0, 0.0])), 1.5);
    assert_eq!(most(demand(&[4.0, 9.0], &[0.0, 0.0])), 1.8);
    // A pod that must be placed may take what others would have used better.
    let single = self::setting(&[(64_000, 1)], &[kind(0, 1, 600), kind(0, 1, 1000)]);
    let most =
        |placed: f64| super::max_allocation(&single, &demand(&[1.0, 1.0], &[placed, 0.0])).unwrap();
    assert!((most(0.0) - 1.0).abs() < 1e-6 && (most(1.0) - 0.6).abs() < 1e-6);
}

#[test]
fn cpu_memory_and_models_bound_what_gpus_would_hold() {
    let demand = |came: f64| DemandAtLoad {
        arrived: vec![came],
        placed: vec![0.0],
    };
    let of = |kind: PodKind| max_allocation(&setting(&[(8000, 4)], &[kind]), &demand(9.0)).unwrap();
    assert!((of(kind(1000, 1, 1000)) - 4.0).abs() < 1e-6);
    assert!((of(kind(4000, 1, 1000)) - 2.0).abs() < 1e-6);
    assert!(
        (of(PodKind {
            memory: 1 << 40,
            ..kind(0, 1, 1000)
        }) - 1.0)
            .abs()
            < 1e-6
    );
    assert_eq!(
        of(PodKind {
            models: [false, true].into(),
            ..kind(0, 1, 1000)
        }),
        0.0
    );
}

fn played(
    setting: &WorkloadTrace,
    arrivals: &[Arrivals],
    policy: SimulatedPolicy,
) -> (PolicyUntilRefusal, Vec<Replay>) {
    let typical = TypicalPods::from_trace(setting);
    let mut beginning = PolicyUntilRefusal {
        policy,
        until: Vec::new(),
    };
    let mut replays = Vec::new();
    for arrivals in arrivals {
        let placer = policy.placer(
            setting,
            &typical,
            arrivals,
            SimulatedEviction::Never,
            CpuRule::default(),
        );
        let mut watched = RefusalRecorder::new(setting, placer);
        replays.push(replay(setting, arrivals, &typical, &mut watched));
        beginning.until.push(watched.until());
    }
    (beginning, replays)
}

#[test]
fn no_policy_exceeds_the_bound_for_policies_with_the_same_beginning() {
    let setting = WorkloadTrace::from_trace(&built_in::trace());
    let arrivals = [Arrivals::draw(&setting, 42), Arrivals::draw(&setting, 43)];
    let mean = |replays: &[Replay], load| {
        let of = replays
            .iter()
            .map(|replay| replay.curve.at(load).unwrap().allocated);
        of.sum::<f64>() / replays.len() as f64
    };
    for policy in SimulatedPolicy::ALL {
        let (beginning, replays) = played(&setting, &arrivals, policy);
        let bound = AllocationBound::from_runs(&setting, &arrivals, &[beginning])
            .unwrap()
            .unwrap();
        let came_to = [mean(&replays, 100), mean(&replays, 130)];
        let bounds = [
            (bound.at_100, bound.of_anybody_at_100),
            (bound.at_130, bound.of_anybody_at_130),
        ];
        for (came_to, (bound, choosy)) in came_to.into_iter().zip(bounds) {
            let (bound, choosy) = (bound.unwrap(), choosy.unwrap());
            assert!(
                came_to <= bound + 1e-6 && bound <= choosy + 1e-6,
                "{policy:?}: {came_to} {bound} {choosy}"
            );
            assert!(choosy <= 100.0 + 1e-6);
        }
    }
}

#[test]
fn the_bound_begins_as_the_policy_that_rejected_no_pod_for_longest() {
    let setting = setting(&[(64_000, 10)], &[kind(0, 1, 1000)]);
    let arrivals = [Arrivals {
        seed: 0,
        pods: vec![0; 13],
        ranks: vec![0],
    }];
    let beginning = |policy, placed| PolicyUntilRefusal {
        policy,
        until: vec![vec![placed]],
    };
    let beginnings = [
        beginning(SimulatedPolicy::Random, 7),
        beginning(SimulatedPolicy::Fgd, 9),
        beginning(SimulatedPolicy::BestFit, 9),
    ];
    let bound = AllocationBound::from_runs(&setting, &arrivals, &beginnings)
        .unwrap()
        .unwrap();
    assert_eq!(
        (bound.begins_as, bound.placed),
        (SimulatedPolicy::Fgd, 90.0)
    );
    assert!((bound.at_130.unwrap() - 100.0).abs() < 1e-6);
    assert_eq!(
        AllocationBound::from_runs(&setting, &arrivals, &[]),
        Ok(None)
    );
    assert_eq!(
        AllocationBound::from_runs(&setting, &[], &beginnings),
        Ok(None)
    );
}

#[test]
fn a_pod_that_fits_on_no_empty_node_does_not_end_the_beginning() {
    let kinds = [kind(0, 1, 1000), kind(99_000, 1, 1), kind(0, 1, 1000)];
    let setting = setting(&[(64_000, 2)], &kinds);
    let arrivals = [Arrivals {
        seed: 0,
        pods: vec![1, 0, 1, 2, 0, 2],
        ranks: vec![0],
    }];
    let (beginning, _) = played(&setting, &arrivals, SimulatedPolicy::BestFit);
    assert_eq!(beginning.until, [[4, 0, 4]]);
    let bound = AllocationBound::from_runs(&setting, &arrivals, &[beginning])
        .unwrap()
        .unwrap();
    assert_eq!(
        (bound.placed, bound.at_100.unwrap().round()),
        (100.0, 100.0)
    );
}

#[test]
fn a_rejected_pod_ends_the_beginning_of_kinds_that_accept_the_same_models() {
    let nowhere_else = PodKind {
        models: [true, false].into(),
        ..kind(0, 1, 1000)
    };
    let setting = setting(
        &[(64_000, 2)],
        &[nowhere_else, kind(0, 1, 500), kind(0, 1, 400)],
    );
    let arrivals = [Arrivals {
        seed: 0,
        pods: vec![0, 1, 0, 2, 1, 1],
        ranks: vec![0],
    }];
    let (beginning, _) = played(&setting, &arrivals, SimulatedPolicy::BestFit);
    assert_eq!(beginning.until, [[2, 4, 4]]);
}
