//! Fit, pack and rank against brute force.

use super::{best_fit, demand};

use crate::ids::NodeName;
use crate::placing::fit::{Misfit, evictions_could_resolve, fit};
use crate::placing::learned::PackingModel;
use crate::placing::pack;
use crate::placing::pack::GpuChoice;
use crate::placing::pack::NodeEvaluation;
use crate::placing::rank::{ReservedPlacement, ScheduleAttempt, shortlist};
use crate::placing::snapshot::Snapshot;
use crate::policy::{Policy, Weights};
use crate::testkit::{demand_of, unit_gpu};
use crate::units::{Bytes, Percent};
use crate::vocabulary::classification::ClassSet;
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::headroom::Headroom;
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::{EngineLoad, Freshness};
use crate::vocabulary::spare::SpareSet;
use proptest::prelude::*;

pub(super) fn gpu() -> impl Strategy<Value = Gpu> {
    let health = prop_oneof![6 => Just(Health::Healthy), 1 => Just(Health::Draining), 1 => Just(Health::Lost)];
    let engine_load = (prop::option::of(0u8..=100), prop::option::of(0u32..50))
        .prop_map(|(kv, queue)| EngineLoad::new(kv.and_then(Percent::new), queue));
    let engine_load = prop_oneof![3 => Just(EngineLoad::NONE), 1 => Just(EngineLoad::default()), 3 => engine_load];
    let rarely = || proptest::bool::weighted(0.2);
    let flags = (
        any::<bool>(),
        rarely(),
        rarely(),
        rarely(),
        (rarely(), rarely(), rarely()),
    );
    let taken = prop_oneof![3 => Just(0u64), 1 => 0u64..90];
    let island = prop::option::of(0u8..2);
    (
        0u64..80,
        0u64..80,
        0u64..40,
        0u16..3,
        flags,
        health,
        (engine_load, island),
        taken,
    )
        .prop_map(
            |(
                capacity,
                charged,
                softly_reserved,
                residents,
                (
                    exclusive,
                    slice,
                    starting,
                    engine_softly_reserved,
                    (is_barred, is_hint_barred, exclusive_process),
                ),
                health,
                (engine_load, island),
                taken,
            )| Gpu {
                capacity: Bytes(capacity),
                charged: Bytes(if residents == 0 {
                    0
                } else {
                    charged.min(capacity)
                }),
                softly_reserved: Bytes(softly_reserved),
                engine_softly_reserved,
                excluded_by_soft_reservations: if is_hint_barred {
                    ClassSet::ALL
                } else {
                    ClassSet::NONE
                },
                residents,
                exclusive: exclusive && residents == 1,
                starting,
                unaccounted_vram: Bytes(taken),
                lendable: Bytes::ZERO,
                lends_below: 0,
                lends_within_limits: false,
                engine_load,
                neighbors: NeighborRoom {
                    busy: residents * 100,
                    room: match is_hint_barred && starting {
                        true => 60,
                        false => NeighborRoom::EMPTY.room,
                    },
                    micros_per_gib: None,
                },
                excluded_classes: if is_barred && residents > 0 {
                    ClassSet::ALL
                } else {
                    ClassSet::NONE
                },
                slice,
                island,
                health,
                exclusive_process,
                spare: SpareSet::NONE,
                traits: Default::default(),
            },
        )
}

pub(super) fn node(name: &str, gpus: Vec<Gpu>) -> Node {
    let name = NodeName::parse(name).unwrap();
    Node {
        gpus: gpus.into(),
        freshness: Freshness::Fresh,
        ..Node::from_name(name)
    }
}

/// Every set of exactly `size` of the first `n` indices.
fn subsets(n: usize, size: u32) -> impl Iterator<Item = Vec<usize>> {
    (0u32..1 << n)
        .filter(move |bits| bits.count_ones() == size)
        .map(move |bits| (0..n).filter(|i| bits >> i & 1 == 1).collect())
}

/// Whether a GPU fits, written again from the definition.
pub(super) fn has_free_vram_by_definition(gpu: &Gpu, demand: &Demand) -> bool {
    let alone_if_wanted = demand.sharing == Sharing::Shared || gpu.residents == 0;
    let nobody_wants_to_be_alone = !gpu.exclusive;
    let enough = gpu.charged.0 + gpu.unaccounted_vram.0 + demand.per_gpu.0 <= gpu.capacity.0;
    let whole_if_many = demand.gpus == 1 || !gpu.slice;
    let willing_to_share = gpu.excluded_classes.is_empty();
    let one_starts_at_a_time = !demand.terms.engine || !gpu.starting;
    let kv_is_low = match (gpu.engine_load.kv_cache, demand.terms.kv_cache_limit) {
        (Some(kv), Some(limit)) => kv.get() <= limit.get(),
        _ => true,
    };
    let queue_is_short = match (gpu.engine_load.queue, demand.terms.queue_limit) {
        (Some(queue), Some(limit)) => queue <= limit,
        _ => true,
    };
    let leaves_time = i16::from(demand.expected.busy.get()) <= gpu.neighbors.room;
    let mode_lets_it = !gpu.exclusive_process || demand.sharing == Sharing::Exclusive;
    gpu.health == Health::Healthy
        && mode_lets_it
        && leaves_time
        && alone_if_wanted
        && nobody_wants_to_be_alone
        && enough
        && whole_if_many
        && willing_to_share
        && one_starts_at_a_time
        && kv_is_low
        && queue_is_short
}

/// What the engine load says against the GPU, of 1,000, and how near it is to a limit, in thousandths.
fn load_by_definition(gpu: &Gpu, demand: &Demand) -> (u64, u64) {
    let parts = [
        (
            demand.terms.kv_cache_limit.map(|p| u32::from(p.get())),
            gpu.engine_load.kv_cache.map(|p| u32::from(p.get())),
        ),
        (demand.terms.queue_limit, gpu.engine_load.queue),
    ];
    let near = |(limit, measured): (Option<u32>, Option<u32>)| match (limit, measured) {
        (None, _) => 0.0,
        (Some(_), None) => 854.0,
        (Some(limit), Some(measured)) => (f64::from(measured) / f64::from(limit) * 1000.0)
            .ceil()
            .min(1000.0),
    };
    let has_limit = parts.iter().any(|(limit, _)| limit.is_some());
    let some_are_silent = if gpu.engine_load.partial && has_limit {
        854.0
    } else {
        0.0
    };
    let nearest = parts.into_iter().map(near).fold(some_are_silent, f64::max);
    (
        ((nearest - 500.0).max(0.0).powi(2) / 250.0) as u64,
        nearest as u64,
    )
}

proptest! {
    #[test]
    fn pack_chooses_as_brute_force_does(gpus in prop::collection::vec(gpu(), 0..8), demand in demand()) {
        let cost = |set: &Vec<usize>| {
            let taken = |g: &usize| gpus[*g].engine_softly_reserved && demand.terms.engine || gpus[*g].excluded_by_soft_reservations.contains(demand.class) || match demand.sharing {
                Sharing::Shared => gpus[*g].charged.0 + gpus[*g].unaccounted_vram.0 + gpus[*g].softly_reserved.0 + demand.per_gpu.0 > gpus[*g].capacity.0,
                Sharing::Exclusive => gpus[*g].softly_reserved.0 > 0,
            };
            let contended = set.iter().filter(|g| taken(g)).count();
            let mut each: Vec<_> = set.iter().map(|g| {
                let left = gpus[*g].capacity.0 - gpus[*g].charged.0 - gpus[*g].unaccounted_vram.0 - demand.per_gpu.0;
                let (part, near) = load_by_definition(&gpus[*g], &demand);
                (taken(g), part / 125, left, near, *g)
            }).collect();
            each.sort_unstable();
            let islands: Vec<_> = set.iter().map(|g| gpus[*g].island).collect();
            let is_together = set.len() == 1 || islands.iter().all(|island| island.is_some() && *island == islands[0]);
            (contended, !is_together, each)
        };
        let best = subsets(gpus.len(), demand.gpus)
            .filter(|set| set.iter().all(|g| has_free_vram_by_definition(&gpus[*g], &demand)))
            .min_by_key(cost);
        let chosen = best_fit(&gpus, &demand);
        prop_assert_eq!(chosen.map(|set| set.iter().collect::<Vec<_>>()), best);
    }

    #[test]
    fn a_choice_is_the_same_when_it_is_asked_again(
        gpus in prop::collection::vec(gpu(), 0..8), demand in demand()
    ) {
        let (packing_model, node) = (PackingModel::default(), node("n", gpus.clone()));
        let node_summary = packing_model.node_summary(node.node_gpus());
        let [alone, alike] = [NodeEvaluation::by_best_fit(&gpus, &demand), NodeEvaluation::by_model(&packing_model, &node_summary, &demand)];
        let chosen = pack::choose_by_cost(&alone, GpuSet::ALL);
        prop_assert_eq!(chosen, pack::choose_by_cost(&alike, GpuSet::ALL));
        for evaluation in [alone, alike] {
            prop_assert_eq!(chosen, chosen.map(|choice| GpuChoice::for_gpus(&evaluation, choice.gpus)));
        }
    }

    #[test]
    fn a_node_is_refused_exactly_when_no_set_of_gpus_fits(
        gpus in prop::collection::vec(gpu(), 0..8), demand in demand()
    ) {
        let possible = subsets(gpus.len(), demand.gpus)
            .any(|set| set.iter().all(|g| has_free_vram_by_definition(&gpus[*g], &demand)));
        let emptied: Vec<Gpu> = gpus
            .iter()
            .map(|gpu| Gpu { charged: Bytes::ZERO, residents: 0, exclusive: false, excluded_classes: ClassSet::NONE, neighbors: NeighborRoom::EMPTY, ..*gpu })
            .collect();
        let possible_if_empty = subsets(gpus.len(), demand.gpus)
            .any(|set| set.iter().all(|g| has_free_vram_by_definition(&emptied[*g], &demand)));
        match fit(&node("n", gpus.clone()), &demand) {
            Ok(_) => prop_assert!(possible),
            Err(misfit) => {
                prop_assert!(!possible, "{}", misfit);
                prop_assert_eq!(evictions_could_resolve(&gpus, &demand), possible_if_empty, "{:?}", misfit);
                let is_about_pods = matches!(misfit, Misfit::InsufficientVram { .. } | Misfit::NoEmptyGpu { .. });
                prop_assert!(possible_if_empty || !is_about_pods, "{:?}", misfit);
            }
        }
    }

    #[test]
    fn the_shortlist_is_the_head_of_a_full_sort(
        cluster in prop::collection::vec(prop::collection::vec(gpu(), 1..4), 1..12),
        demand in demand(), limit in 1usize..6, failed in 0usize..12, seed: u64,
        (packing, kv_headroom, topology) in prop_oneof![Just((1, 40, 5)), (0u16..10, 0u16..100, 0u16..10)],
    ) {
        let mut policy = Policy::default();
        policy.scoring.weights = Weights { packing, kv_headroom, topology, ..policy.scoring.weights };
        let names: Vec<String> = (0..cluster.len()).map(|i| format!("n{:02}", (i * 7 + seed as usize % 5) % 100)).collect();
        let nodes: Vec<Node> = cluster.iter().zip(&names).map(|(gpus, name)| node(name, gpus.clone())).collect();
        let snapshot = Snapshot::new(1, 1, nodes);
        let failed = NodeName::parse(&names[failed % names.len()]).unwrap();
        let attempt = ScheduleAttempt {
            limit, just_failed: Some(&failed), reserved_placement: None, policy: &policy, allowance: TenantLimit::default(),
        };
        let list = shortlist(&snapshot, &demand, names.iter().map(String::as_str), attempt);

        let mut all: Vec<_> = snapshot.nodes().iter().filter_map(|node| {
            let gpus = fit(node, &demand).ok()?;
            let contended = gpus.iter().any(|g| pack::is_contended(&node.gpus[g], &demand));
            let (part, near) = gpus.iter().map(|g| load_by_definition(&node.gpus[g], &demand)).max().unwrap();
            let left: u64 = gpus.iter().map(|g| node.gpus[g].free().0 - demand.per_gpu.0).sum();
            let whole: u64 = gpus.iter().map(|g| node.gpus[g].capacity.0).sum();
            // These nodes differ in nothing else than packing, KV headroom and topology.
            let islands: Vec<_> = gpus.iter().map(|g| node.gpus[g].island).collect();
            let is_together = islands.len() == 1 || islands.iter().all(|island| island.is_some() && *island == islands[0]);
            let apart = if is_together { 0 } else { 1000 };
            let cost = u64::from(kv_headroom) * part + u64::from(packing) * (left * 1000 / whole.max(1)) + u64::from(topology) * apart;
            Some((node.name == failed, contended, cost, left, near, node.free(), node.name.clone()))
        }).collect();
        all.sort();
        all.truncate(limit);
        if all.len() > 1 { all.retain(|(just_failed, ..)| !just_failed); }
        let best: Vec<_> = list.best.iter().map(|c| snapshot.nodes()[c.node_index].name.clone()).collect();
        prop_assert_eq!(best, all.into_iter().map(|(.., name)| name).collect::<Vec<_>>());

        // The order in which the scheduler names the nodes changes nothing.
        let mut turned = names.clone();
        turned.rotate_left(seed as usize % names.len());
        let again = shortlist(&snapshot, &demand, turned.iter().map(String::as_str), attempt);
        let gpu_candidates = |list: &crate::placing::rank::Shortlist| list.best.iter().map(|c| (c.node_index, c.gpus, c.score)).collect::<Vec<_>>();
        prop_assert_eq!(gpu_candidates(&again), gpu_candidates(&list));
    }
}

#[test]
fn a_refusal_phrase_never_contains_a_figure() {
    let misfits = [
        Misfit::NoGpus,
        Misfit::InsufficientVram {
            per_gpu: Bytes(7),
            asked: 3,
            fitting: 1,
            most_free: Bytes(5),
        },
        Misfit::TooLarge {
            per_gpu: Bytes(7),
            asked: 3,
            large_enough: 1,
            largest: Bytes(5),
        },
        Misfit::VictimsLeaving { remaining: 4 },
    ];
    assert!(
        misfits
            .iter()
            .all(|misfit| !misfit.phrase().contains(|c: char| c.is_ascii_digit()))
    );
}

#[test]
fn a_pods_own_reservation_goes_before_a_better_node_and_one_that_did_not_just_fail() {
    let gpu = |charged: u64| {
        let mut gpu = Gpu::from_device(&unit_gpu(0, 0), &Headroom::uniform(Percent::default()));
        gpu.charge(Bytes(charged), Sharing::Shared);
        gpu
    };
    let (demand, policy) = (demand_of(10, 1, Sharing::Shared, 0), Policy::default());
    let snapshot = Snapshot::new(
        1,
        1,
        vec![node("tight", vec![gpu(60)]), node("roomy", vec![gpu(1)])],
    );
    let roomy = NodeName::parse("roomy").unwrap();
    let reserved_placement = ReservedPlacement {
        node: &roomy,
        verdict: Ok(GpuSet::single(0)),
    };
    let best = |reserved_placement: Option<ReservedPlacement<'_>>| {
        let attempt = ScheduleAttempt {
            limit: 1,
            just_failed: reserved_placement.map(|own| own.node),
            reserved_placement,
            policy: &policy,
            allowance: TenantLimit::default(),
        };
        let list = shortlist(&snapshot, &demand, ["tight", "roomy"].into_iter(), attempt);
        list.best
            .iter()
            .map(|candidate| snapshot.nodes()[candidate.node_index].name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(best(None), ["tight"]);
    assert_eq!(best(Some(reserved_placement)), ["roomy"]);
}
