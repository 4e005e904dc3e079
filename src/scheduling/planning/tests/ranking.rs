//! Pods share a ranking of the nodes only if every node scores the same for both.

use super::*;
use crate::ids::ModelId;
use crate::vocabulary::model_tier::{ModelTier, NodeModel};

/// A pod with 30 GiB of VRAM, of which so many are KV cache.
fn of_model(kv_cache: u64) -> Demand {
    let model = ModelId::parse("org/model").ok();
    Demand {
        model,
        kv_cache: Some(Bytes::gib(kv_cache)),
        ..job(30)
    }
}

/// Node `stored` has the model on disk, of unknown size, and two empty GPUs; on node `tight` the VRAM fits better.
fn stored_or_tight() -> LedgerCluster {
    let mut cluster = LedgerCluster::new(&[("stored", 2), ("tight", 1)]);
    cluster.bound("resident", "tight", 0, job(40));
    let model = NodeModel {
        model: ModelId::parse("org/model").unwrap(),
        tier: ModelTier::Disk,
        bytes: Bytes::ZERO,
    };
    let sampled = cluster.ledger().now();
    let reading = NodeReading {
        sampled,
        holdings: [model].into_iter().collect(),
        ..NodeReading::default()
    };
    cluster
        .ledger_mut()
        .take_reading(&node("stored"), reading.into());
    cluster
}

#[test]
fn pods_that_differ_only_in_kv_cache_are_ranked_by_the_weights_that_each_loads() {
    let placed_alone = |kv_cache| {
        let mut cluster = stored_or_tight();
        cluster.add_gated("pod", of_model(kv_cache));
        cluster.plan()
    };
    assert_eq!(
        placed_alone(0),
        ["pod on stored"],
        "30 GiB of weights take longest over the network"
    );
    assert_eq!(
        placed_alone(29),
        ["pod on tight"],
        "1 GiB of weights loads fast anywhere"
    );
    let mut cluster = stored_or_tight();
    cluster.add_gated("heavy", of_model(0));
    cluster.advance(1);
    cluster.add_gated("light", of_model(29));
    assert_eq!(cluster.plan(), ["heavy on stored", "light on tight"]);
}

#[test]
fn a_lower_priority_does_not_take_what_a_higher_one_evicts_least_for() {
    let mut cluster = LedgerCluster::new(&[("n", 2)]);
    cluster.bound("small", "n", 0, job(30));
    cluster.bound("large", "n", 1, shared(60, 0));
    cluster.add_gated("low", job(40));
    cluster.add_gated("high", shared(50, 100));
    assert_eq!(
        cluster.plan(),
        ["high on n after small", "low waits: insufficient-vram"]
    );
}
