//! The core's invariants, each against an oracle that is written differently: brute force over all subsets, a full sort, a plain
//! map of allocations.
//!
//! [`choices`]: one placement; [`engine_loads`]: the same among busy engines; [`affinity`]: the same beside engines that sleep;
//! [`victims`]: one preemption. [`plans`]: a queue of pods; [`allowances`]: eviction limits.
//! [`tenants`]: quotas and class exclusions under policies that change. [`histories`]: any sequence of ledger steps; [`stored`]:
//! the same, with a ledger that is stored and loaded in between. [`lending`]: engines that sleep and wake while others have their
//! VRAM. [`liveness`]: victims that do not go. [`control_loop`]: writes that are lost or late. [`node_signs`]: what Node objects show of
//! their GPUs. [`together`]: all of that at once.

mod affinity;
mod allowances;
mod choices;
mod control_loop;
mod engine_loads;
mod histories;
mod lending;
mod liveness;
mod node_signs;
mod plans;
mod stored;
mod tenants;
mod together;
mod victims;

use super::ledger::Ledger;
use super::placing::pack;
use super::placing::snapshot::Snapshot;
use super::vocabulary::demand::{Demand, Sharing};
use super::vocabulary::gpu::{Device, Gpu, GpuSet};
use super::vocabulary::node::Node;
use super::vocabulary::node_reading::Freshness;
use crate::ids::NodeName;
use crate::placing::pack::NodeEvaluation;
use crate::testkit::{demand_of, unit_gpu};
use crate::units::Percent;
use crate::vocabulary::headroom::Headroom;
use proptest::prelude::*;

/// The ledger once it was stored as text and loaded.
pub(super) fn stored_and_loaded(ledger: &Ledger) -> Ledger {
    let stored = serde_json::to_string(&ledger.export()).unwrap();
    Ledger::load(
        ledger.policy().clone(),
        serde_json::from_str(&stored).unwrap(),
    )
    .unwrap()
}

/// Two ledgers know the same and show the same.
pub(super) fn assert_same(one: &mut Ledger, other: &mut Ledger) {
    let stored = |ledger: &Ledger| serde_json::to_string(&ledger.export()).unwrap();
    assert_eq!(stored(one), stored(other));
    assert_eq!(one.snapshot(), other.snapshot());
}

/// The GPUs that a demand gets by best fit, if enough have free VRAM.
fn best_fit(gpus: &[Gpu], demand: &Demand) -> Option<GpuSet> {
    pack::choose_by_cost(&NodeEvaluation::by_best_fit(gpus, demand), GpuSet::ALL)
        .map(|choice| choice.gpus)
}

/// A cluster of so many nodes with four empty GPUs each.
pub(super) fn cluster_of(nodes: u8) -> Snapshot {
    let node = |n: u8| {
        let devices: Vec<Device> = (0..4).map(|index| unit_gpu(n, index)).collect();
        let headroom = Headroom::uniform(Percent::default());
        Node {
            generation: u64::from(n) + 1,
            gpus: devices
                .iter()
                .map(|device| Gpu::from_device(device, &headroom))
                .collect(),
            devices: devices.into(),
            freshness: Freshness::Fresh,
            ..Node::from_name(NodeName::parse(&format!("n-{n}")).unwrap())
        }
    };
    Snapshot::new(1, 1, (0..nodes).map(node).collect())
}

pub(super) fn sharing() -> impl Strategy<Value = Sharing> {
    prop_oneof![4 => Just(Sharing::Shared), 1 => Just(Sharing::Exclusive)]
}

pub(super) fn demand() -> impl Strategy<Value = Demand> {
    (1u64..60, 1u32..4, sharing(), -3i32..3).prop_map(|(v, n, s, p)| demand_of(v, n, s, p))
}
