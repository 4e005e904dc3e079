//! Of places that are otherwise equal, the one whose engines have more KV cache to spare wins.

use super::best_fit;
use crate::ids::NodeName;
use crate::placing::rank::{ScheduleAttempt, shortlist};
use crate::placing::snapshot::Snapshot;
use crate::policy::Policy;
use crate::testkit::{demand_of, unit_gpu};
use crate::units::{Bytes, Percent};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::headroom::Headroom;
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::{EngineLoad, Freshness};
use proptest::prelude::*;

/// A GPU of 100 bytes, of which an engine has 40, with its KV cache in use to `kv` and `queue` requests waiting.
fn gpu(kv: u8, queue: u32) -> Gpu {
    let mut gpu = Gpu::from_device(&unit_gpu(0, 0), &Headroom::uniform(Percent::default()));
    gpu.charge(Bytes(40), Sharing::Shared);
    gpu.engine_load = EngineLoad::new(Percent::new(kv), Some(queue));
    gpu
}

fn node(name: &str, gpus: Vec<Gpu>) -> Node {
    let name = NodeName::parse(name).unwrap();
    Node {
        gpus: gpus.into(),
        freshness: Freshness::Fresh,
        ..Node::from_name(name)
    }
}

#[test]
fn of_gpus_with_equal_vram_at_66_and_2_percent_the_emptier_cache_wins() {
    // A serving pod: it joins no GPU with a KV cache above 90 %.
    let (policy, demand) = (Policy::default(), demand_of(10, 1, Sharing::Shared, 0));
    assert_eq!(
        best_fit(&[gpu(66, 0), gpu(2, 0)], &demand),
        Some(GpuSet::single(1))
    );
    let snapshot = Snapshot::new(
        1,
        1,
        vec![node("a", vec![gpu(66, 0)]), node("b", vec![gpu(2, 0)])],
    );
    let attempt = ScheduleAttempt::unreserved(&policy);
    let best = shortlist(&snapshot, &demand, ["a", "b"].into_iter(), attempt).best;
    assert_eq!(best.first().map(|candidate| candidate.node_index), Some(1));
}

/// How near the engines of a GPU are to a limit of a serving pod.
fn nearness((kv, queue): (u8, u32)) -> f64 {
    (f64::from(kv) / 90.0).max(f64::from(queue) / 32.0)
}

fn loads(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<(u8, u32)>> {
    prop::collection::vec(
        (0u8..=90, prop_oneof![3 => Just(0u32), 1 => 0u32..=32]),
        count,
    )
}

proptest! {
    /// Everything else equal, no choice of GPUs of one node has fuller engines than another.
    #[test]
    fn pack_never_takes_a_fuller_gpu_where_all_else_is_equal(loads in loads(1..9), wanted in 1u32..4) {
        let gpus: Vec<Gpu> = loads.iter().map(|(kv, queue)| gpu(*kv, *queue)).collect();
        let demand = demand_of(10, wanted, Sharing::Shared, 0);
        let Some(chosen) = best_fit(&gpus, &demand) else {
            prop_assert!(loads.len() < wanted as usize);
            return Ok(());
        };
        let fullest = chosen.iter().map(|place| nearness(loads[place])).fold(0.0, f64::max);
        let left = (0..loads.len()).filter(|place| !chosen.contains(*place)).map(|place| nearness(loads[place]));
        prop_assert!(left.fold(f64::INFINITY, f64::min) >= fullest - 0.001, "{chosen:?} of {loads:?}");
    }

    /// Everything else equal, no node with fuller engines comes before another.
    #[test]
    fn rank_never_prefers_a_fuller_node_where_all_else_is_equal(loads in loads(1..12)) {
        let name = |place: usize| format!("n-{place:02}");
        let nodes = loads.iter().enumerate();
        let nodes = nodes.map(|(place, (kv, queue))| node(&name(place), vec![gpu(*kv, *queue)])).collect();
        let (snapshot, policy) = (Snapshot::new(1, 1, nodes), Policy::default());
        let attempt = ScheduleAttempt { limit: loads.len(), ..ScheduleAttempt::unreserved(&policy) };
        let names = snapshot.nodes().iter().map(|node| node.name.as_str());
        let best = shortlist(&snapshot, &demand_of(10, 1, Sharing::Shared, 0), names, attempt).best;
        let order: Vec<f64> = best.iter().map(|candidate| nearness(loads[candidate.node_index])).collect();
        prop_assert!(order.len() == loads.len());
        prop_assert!(order.windows(2).all(|pair| pair[0] <= pair[1] + 0.001), "{order:?}");
    }

    /// However well it fits: a GPU whose engines are nearly full comes after one whose engines are not half as near to a limit.
    #[test]
    fn near_the_limit_the_emptier_cache_outweighs_packing(
        full in 81u8..=90, calm in 0u8..=40, tight in 0u64..30, roomy in 0u64..30,
    ) {
        let charged = |mut gpu: Gpu, more: u64| { gpu.charged += Bytes(more); gpu };
        let gpus = [charged(gpu(full, 0), tight), charged(gpu(calm, 0), roomy)];
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        prop_assert_eq!(best_fit(&gpus, &demand), Some(GpuSet::single(1)));
        let (snapshot, policy) = (Snapshot::new(1, 1, vec![node("a", vec![gpus[0]]), node("b", vec![gpus[1]])]), Policy::default());
        let best = shortlist(&snapshot, &demand, ["a", "b"].into_iter(), ScheduleAttempt::unreserved(&policy)).best;
        prop_assert_eq!(best[0].node_index, 1);
    }
}
