//! The steps that can happen to a ledger, drawn at random, and the names that they use.

use crate::ids::{ModelId, PodUid};
use crate::proptests::sharing;
use crate::testkit::{gpu_at, unit_gpu};
use crate::units::{Bytes, MilliCpu, Moment, Percent};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::PluginResource;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::model_tier::NodeModelSet;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use proptest::prelude::*;
use std::collections::BTreeMap;

pub use crate::testkit::numbered::{key, node_name, uid};

/// A step that can happen to a ledger.
#[derive(Debug, Clone)]
pub(crate) enum LedgerStep {
    Arrive(u8, u64, u32, Sharing, i32),
    /// A pod that requests devices of a plugin.
    ArriveForDevices(u8, u32, i32),
    Offer(u8, u8),
    Assume(u8, u8),
    Confirm(u8),
    Forget(u8),
    Release(u8),
    Hold(u8, u8),
    BoundByOthers(u8, u8),
    Started(u8),
    /// The pod shows a group, a protection, or its deletion.
    Show(u8, Option<u8>, bool, bool),
    Read(u8, u64, Vec<(u8, u8, u64)>, Vec<u64>),
    Tick(u64),
    LoseGpu(u8),
    RemoveNode(u8),
    AddNode(u8),
    /// The node becomes a device plugin's, even with pods on it.
    GiveToPlugin(u8),
    /// The free CPU of a node.
    Spare(u8, u64),
    /// The packing model is learned from the arrivals so far.
    Learn,
}

pub fn step() -> impl Strategy<Value = LedgerStep> {
    let pod = 0u8..14;
    let node = 0u8..3;
    prop_oneof![
        6 => (pod.clone(), 1u64..80, 1u32..3, sharing(), -3i32..4).prop_map(|(p, v, n, s, q)| LedgerStep::Arrive(p, v, n, s, q)),
        3 => (pod.clone(), 1u32..4, -3i32..4).prop_map(|(p, n, q)| LedgerStep::ArriveForDevices(p, n, q)),
        2 => (pod.clone(), node.clone()).prop_map(|(p, n)| LedgerStep::Offer(p, n)),
        8 => (pod.clone(), node.clone()).prop_map(|(p, n)| LedgerStep::Assume(p, n)),
        6 => pod.clone().prop_map(LedgerStep::Confirm),
        2 => pod.clone().prop_map(LedgerStep::Forget),
        2 => pod.clone().prop_map(LedgerStep::Release),
        4 => (pod.clone(), node.clone()).prop_map(|(p, n)| LedgerStep::Hold(p, n)),
        1 => (pod.clone(), node.clone()).prop_map(|(p, n)| LedgerStep::BoundByOthers(p, n)),
        3 => (pod.clone(), prop::option::of(0u8..3), proptest::bool::weighted(0.2), proptest::bool::weighted(0.3))
            .prop_map(|(p, group, is_kept, is_leaving)| LedgerStep::Show(p, group, is_kept, is_leaving)),
        3 => pod.clone().prop_map(LedgerStep::Started),
        4 => (
            node.clone(),
            0u64..40_000,
            prop::collection::vec((pod.clone(), 0u8..3, 0u64..120), 0..6),
            prop::collection::vec(0u64..110, 3),
        ).prop_map(|(node, age, attributed, used)| LedgerStep::Read(node, age, attributed, used)),
        2 => (1u64..40_000).prop_map(LedgerStep::Tick),
        1 => node.clone().prop_map(LedgerStep::LoseGpu),
        1 => node.clone().prop_map(LedgerStep::RemoveNode),
        1 => node.clone().prop_map(LedgerStep::GiveToPlugin),
        2 => node.clone().prop_map(LedgerStep::AddNode),
        1 => (node, 0u64..8).prop_map(|(node, cpu)| LedgerStep::Spare(node, cpu)),
        1 => Just(LedgerStep::Learn),
    ]
}

/// A demand of a pod that loads a model.
pub fn loading(demand: Demand) -> Demand {
    Demand {
        model: ModelId::parse("org/model").ok(),
        ..demand
    }
}

/// The one thing in which a demand differs from another.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DemandChange {
    KvCache(u64),
    Weights(u64),
    Cpu(u64),
    QueueLimit(u32),
    NoModel,
    /// Nothing that a node tells apart.
    Priority(i32),
}

pub(crate) fn demand_change() -> impl Strategy<Value = DemandChange> {
    prop_oneof![
        3 => (1u64..40).prop_map(DemandChange::KvCache),
        1 => (1u64..200).prop_map(DemandChange::Weights),
        2 => (1u64..8000).prop_map(DemandChange::Cpu),
        1 => (0u32..4).prop_map(DemandChange::QueueLimit),
        1 => Just(DemandChange::NoModel),
        1 => (1i32..4).prop_map(DemandChange::Priority),
    ]
}

impl DemandChange {
    pub fn apply_to(self, demand: &Demand) -> Demand {
        let mut demand = demand.clone();
        match self {
            Self::KvCache(bytes) => demand.kv_cache = Some(Bytes(bytes)),
            Self::Weights(bytes) => demand.weights = Some(Bytes(bytes)),
            Self::Cpu(milli) => demand.host_resources.cpu = MilliCpu(milli),
            Self::QueueLimit(limit) => demand.terms.queue_limit = Some(limit),
            Self::NoModel => demand.model = None,
            Self::Priority(priority) => demand.priority = priority,
        }
        demand
    }
}

/// The number of devices that a plugin offers on a node.
pub const DEVICES: u32 = 4;

pub fn gpu() -> PluginResource {
    PluginResource::parse("nvidia.com/gpu").unwrap()
}

pub fn devices(node: u8, gpus: u32) -> Vec<Device> {
    (0..gpus)
        .map(|index| Device {
            reserved: Bytes(2),
            ..unit_gpu(node, index)
        })
        .collect()
}

/// A possible report of an agent: which pod uses how much of which GPU, and the VRAM in use of each GPU.
pub fn reading(
    node: u8,
    sampled: Moment,
    attributed: &[(u8, u8, u64)],
    used: &[u64],
) -> NodeReading {
    let gpu = |(index, used): (usize, &u64)| {
        let on_it = attributed
            .iter()
            .filter(|(_, gpu, _)| usize::from(*gpu) == index);
        let sums: BTreeMap<PodUid, u64> =
            on_it.fold(BTreeMap::new(), |mut sums, (pod, _, bytes)| {
                *sums.entry(uid(*pod)).or_default() += bytes;
                sums
            });
        GpuReading {
            uuid: gpu_at(node, index),
            // The driver does not always say.
            used: (*used < 105).then_some(Bytes(*used)),
            attributed: sums
                .into_iter()
                .map(|(uid, bytes)| (uid, Bytes(bytes)))
                .collect(),
            engine_load: EngineLoad::new(Percent::new((used % 101) as u8), None),
        }
    };
    NodeReading {
        sampled,
        gpus: used.iter().enumerate().map(gpu).collect(),
        holdings: NodeModelSet::default(),
        ..NodeReading::default()
    }
}
