//! Of places that are otherwise equal, the one whose engines have more KV cache to spare wins.

use crate::ids::NodeName;
use crate::scheduling::placing::pack;
use crate::scheduling::placing::rank::{ScheduleAttempt, shortlist};
use crate::scheduling::placing::snapshot::Snapshot;
use crate::scheduling::policy::Policy;
use crate::scheduling::testkit::{demand_of, unit_gpu};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::scheduling::vocabulary::headroom::Headroom;
use crate::scheduling::vocabulary::node::Node;
use crate::scheduling::vocabulary::node_reading::{EngineLoad, Freshness};
use crate::units::{Bytes, Percent};

/// A GPU of 100 bytes, of which an engine has 40, with its KV cache in use to `kv` and `queue` requests waiting.
fn gpu(kv: u8, queue: u32) -> Gpu {
    let mut gpu = Gpu::of(&unit_gpu(0, 0), &Headroom::all(Percent::default()));
    gpu.charge(Bytes(40), Sharing::Shared);
    gpu.engine_load = EngineLoad::of(Percent::new(kv), Some(queue));
    gpu
}

fn node(name: &str, gpus: Vec<Gpu>) -> Node {
    let name = NodeName::parse(name).unwrap();
    Node { gpus: gpus.into(), freshness: Freshness::Fresh, ..Node::named(name) }
}

#[test]
fn of_gpus_with_equal_vram_at_66_and_2_percent_the_emptier_cache_wins() {
    // A serving pod: it joins no GPU with a KV cache above 90 %.
    let (policy, demand) = (Policy::default(), demand_of(10, 1, Sharing::Shared, 0));
    assert_eq!(pack::choose(&[gpu(66, 0), gpu(2, 0)], &demand, GpuSet::ALL), Some(GpuSet::one(1)));
    let snapshot = Snapshot::new(1, 1, vec![node("a", vec![gpu(66, 0)]), node("b", vec![gpu(2, 0)])]);
    let attempt = ScheduleAttempt::unreserved(&policy);
    let best = shortlist(&snapshot, &demand, ["a", "b"].into_iter(), attempt).best;
    assert_eq!(best.first().map(|candidate| candidate.node), Some(1));
}
