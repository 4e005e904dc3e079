//! Where a model's weights are on a node, and how long it takes from there until an engine answers.
//!
//! The time is bytes over the speed of the way they must go, and a start that no speed shortens.

use super::engine_model::SleepLevel;
use super::start_time::StartTime;
use crate::ids::ModelId;
use crate::units::{Bytes, Millis, setting};
use rustc_hash::FxBuildHasher;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use std::hash::BuildHasher;
use std::sync::Arc;

/// Where a model's weights are; the further down the list, the sooner an engine is ready.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum ModelTier {
    /// Some of its files; the rest must still be fetched.
    Partial,
    Disk,
    /// On disk, and in the kernel's page cache.
    PageCache,
    /// In host memory, held by an engine that sleeps.
    Sleeping,
    /// On its way into a GPU, read from disk a moment ago.
    Loading,
    /// In a GPU, read from disk before.
    Resident,
}

/// What a node has of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeModel {
    pub model: ModelId,
    pub tier: ModelTier,
    /// Bytes of weights there; 0 if that is not known.
    pub bytes: Bytes,
}

/// What a node has of models, in order of model; each once. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Vec<NodeModel>")]
pub struct NodeModelSet {
    /// A bit for each model. A decision asks thousands of nodes for one model, and most do not have it: there the list, which
    /// is far away in memory, is not looked at.
    model_bits: u64,
    /// A bit for each [short name](ModelId::resolve_among).
    short_name_bits: u64,
    list: Arc<[NodeModel]>,
}

impl NodeModelSet {
    /// Roughly how much memory it takes.
    pub fn approximate_bytes(&self) -> usize {
        self.list
            .iter()
            .map(|holding| size_of::<NodeModel>() + holding.model.as_str().len())
            .sum()
    }

    pub fn get(&self, model: &ModelId) -> Option<&NodeModel> {
        let list = if self.model_bits & bloom_bit(model) == 0 {
            &[]
        } else {
            &*self.list
        };
        list.iter().find(|holding| holding.model == *model)
    }

    pub fn iter(&self) -> impl Iterator<Item = &NodeModel> {
        self.list.iter()
    }

    /// All models, or none if no model has one of these [bits](ModelId::short_name_bits).
    pub fn may_match(&self, bits: u64) -> impl Iterator<Item = &ModelId> {
        let list = if self.short_name_bits & bits == 0 {
            &[]
        } else {
            &*self.list
        };
        list.iter().map(|holding| &holding.model)
    }
}

impl FromIterator<NodeModel> for NodeModelSet {
    fn from_iter<I: IntoIterator<Item = NodeModel>>(holdings: I) -> Self {
        let list: Arc<[NodeModel]> = holdings.into_iter().collect();
        let all = |mark: fn(&ModelId) -> u64| {
            list.iter()
                .fold(0, |marks, holding| marks | mark(&holding.model))
        };
        Self {
            model_bits: all(bloom_bit),
            short_name_bits: all(ModelId::short_name_bits),
            list,
        }
    }
}

impl From<Vec<NodeModel>> for NodeModelSet {
    fn from(holdings: Vec<NodeModel>) -> Self {
        holdings.into_iter().collect()
    }
}

impl Serialize for NodeModelSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.list.serialize(serializer)
    }
}

/// One of 64 bits; two models may have the same.
pub(super) fn bloom_bit(model: &ModelId) -> u64 {
    1 << (FxBuildHasher.hash_one(model) % 64)
}

/// How fast weights are loaded onto a GPU, to estimate when an engine will be ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct LoadingSpeeds {
    /// From a registry or object store to the node's disk.
    #[serde(with = "setting::Speed")]
    pub network: Bytes,
    /// From the node's disk.
    #[serde(with = "setting::Speed")]
    pub disk: Bytes,
    /// From the kernel's page cache.
    #[serde(with = "setting::Speed")]
    pub page_cache: Bytes,
    /// From host memory, where an engine that sleeps keeps them.
    #[serde(with = "setting::Speed")]
    pub wake: Bytes,
    /// The time that a wake takes besides that.
    #[serde(with = "setting::Duration")]
    pub wake_init: Millis,
    /// Container images from a registry, until their layers are unpacked.
    #[serde(with = "setting::Speed")]
    pub image_pull: Bytes,
    /// What an image weighs that no node lists.
    #[serde(with = "setting::MemoryQuantity")]
    pub image_size: Bytes,
    /// The time that an engine's start takes besides loading.
    #[serde(with = "setting::Duration")]
    pub init: Millis,
}

impl Default for LoadingSpeeds {
    /// Measured in public for safetensors on NVMe; a fast registry or a slow disk wants its own figures in the policy. Those of
    /// images are assumptions: layers are unpacked on few cores, which takes longer than the network.
    fn default() -> Self {
        let gb = |n: u64| Bytes(n * 1_000_000_000);
        Self {
            network: gb(1),
            disk: gb(3),
            page_cache: gb(5),
            wake: gb(20),
            wake_init: Millis(100),
            image_pull: Bytes(200_000_000),
            image_size: Bytes::gib(8),
            init: Millis::seconds(20),
        }
    }
}

/// From binding until the engine answers, on a node that has `holding` of its model and its images; `weights` is what the model
/// weighs where the node cannot tell.
pub fn time_to_ready(
    holding: Option<&NodeModel>,
    weights: Bytes,
    speeds: &LoadingSpeeds,
) -> Millis {
    engine_start_time(holding, weights, speeds).total()
}

/// The parts of [`time_to_ready`], without pulling images.
pub(crate) fn engine_start_time(
    holding: Option<&NodeModel>,
    weights: Bytes,
    speeds: &LoadingSpeeds,
) -> StartTime {
    let here = holding.map_or(Bytes::ZERO, |holding| holding.bytes);
    let whole = if here == Bytes::ZERO { weights } else { here };
    let (fetched, loaded, speed) = match holding.map(|holding| holding.tier) {
        None => (whole, whole, speeds.disk),
        Some(ModelTier::Partial) => (weights.minus(here), weights.max(here), speeds.disk),
        Some(ModelTier::Disk) => (Bytes::ZERO, whole, speeds.disk),
        // A pod that loads, runs or keeps the model has read its files; a new pod cannot take over another pod's memory.
        Some(
            ModelTier::PageCache | ModelTier::Sleeping | ModelTier::Loading | ModelTier::Resident,
        ) => (Bytes::ZERO, whole, speeds.page_cache),
    };
    let fetch = if fetched == Bytes::ZERO {
        Millis::default()
    } else {
        fetched.transfer_time(speeds.network)
    };
    StartTime {
        pull: Millis::default(),
        fetch,
        load: loaded.transfer_time(speed),
        init: speeds.init,
    }
}

/// Until an engine that sleeps on a GPU of this node answers, if it is woken now. One that dropped its weights reads them again,
/// but need not start.
pub(crate) fn time_to_wake(
    level: SleepLevel,
    holding: Option<&NodeModel>,
    weights: Bytes,
    speeds: &LoadingSpeeds,
) -> Millis {
    let here = holding.map_or(Bytes::ZERO, |holding| holding.bytes);
    match level {
        SleepLevel::WeightsOffloaded if here == Bytes::ZERO => {
            weights.transfer_time(speeds.wake) + speeds.wake_init
        }
        SleepLevel::WeightsOffloaded => here.transfer_time(speeds.wake) + speeds.wake_init,
        SleepLevel::WeightsDiscarded => {
            let no_start = LoadingSpeeds {
                init: speeds.wake_init,
                ..speeds.clone()
            };
            time_to_ready(holding, weights, &no_start)
        }
    }
}

/// Logarithm (base 2) of a time in seconds, so that times that are nearly equal compare as equal.
pub fn duration_bucket(time: Millis) -> u8 {
    (time.0 / 1000 + 1).ilog2() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(tier: ModelTier, gib: u64) -> NodeModel {
        NodeModel {
            model: ModelId::parse("m").unwrap(),
            tier,
            bytes: Bytes::gib(gib),
        }
    }

    #[test]
    fn the_nearer_the_weights_the_sooner_the_engine() {
        let speeds = LoadingSpeeds::default();
        let time =
            |holding: Option<NodeModel>| time_to_ready(holding.as_ref(), Bytes::gib(15), &speeds);
        let order = [
            time(Some(holding(ModelTier::Sleeping, 15))),
            time(Some(holding(ModelTier::Resident, 15))),
            time(Some(holding(ModelTier::Disk, 15))),
            time(Some(holding(ModelTier::Partial, 10))),
            time(None),
        ];
        assert!(order.is_sorted(), "{order:?}");
        // 15 GiB: 5.4 s from disk and 20 s of start; 16.1 s more over the network.
        assert_eq!(order[2], Millis(25_369));
        assert_eq!(order[4], Millis(41_476));
    }

    #[test]
    fn a_node_that_does_not_know_the_size_takes_the_pods_word() {
        let speeds = LoadingSpeeds::default();
        let unknown = Some(holding(ModelTier::Disk, 0));
        let known = Some(holding(ModelTier::Disk, 15));
        let time = |h: &Option<NodeModel>| time_to_ready(h.as_ref(), Bytes::gib(15), &speeds);
        assert_eq!(time(&unknown), time(&known));
    }

    #[test]
    fn a_wake_takes_less_than_a_start_and_least_where_the_weights_are_in_memory() {
        let speeds = LoadingSpeeds::default();
        let woken =
            |level, tier| time_to_wake(level, Some(&holding(tier, 15)), Bytes::gib(15), &speeds);
        let asleep = woken(SleepLevel::WeightsOffloaded, ModelTier::Sleeping);
        // 15 GiB at 20 GB/s, and the wake itself.
        assert_eq!(asleep, Millis(906));
        let discarded = woken(SleepLevel::WeightsDiscarded, ModelTier::Disk);
        // 5.4 s from disk, as at a start, but without its 20 s.
        assert_eq!(discarded, Millis(5_469));
        let nowhere = time_to_wake(SleepLevel::WeightsDiscarded, None, Bytes::gib(15), &speeds);
        assert!(nowhere > discarded && nowhere < time_to_ready(None, Bytes::gib(15), &speeds));
    }

    #[test]
    fn what_a_node_has_of_a_model_is_found_by_every_name_of_it() {
        let of = |text| ModelId::parse(text).unwrap();
        let disk = NodeModel {
            model: of("Qwen/Qwen3-32B"),
            ..holding(ModelTier::Disk, 60)
        };
        let set: NodeModelSet = [disk.clone()].into_iter().collect();
        for name in [
            "qwen/qwen3-32b",
            "hf://Qwen/Qwen3-32B",
            "Qwen--Qwen3-32B",
            "/models/Qwen/Qwen3-32B",
            "Qwen/Qwen3-32B@main",
        ] {
            assert_eq!(set.get(&of(name)), Some(&disk), "{name}");
        }
        assert_eq!(set.get(&of("other/Qwen3-32B")), None);
    }

    #[test]
    fn every_model_of_a_long_list_is_found_and_no_other() {
        let model = |n: usize| ModelId::parse(&format!("organization/model-{n}")).unwrap();
        let held = (0..100).map(|n| NodeModel {
            model: model(n),
            tier: ModelTier::Disk,
            bytes: Bytes(n as u64),
        });
        let holdings: NodeModelSet = held.collect();
        for n in 0..200 {
            assert_eq!(
                holdings.get(&model(n)).map(|holding| holding.bytes.0),
                (n < 100).then_some(n as u64)
            );
        }
        assert_eq!(NodeModelSet::default().get(&model(0)), None);
    }
}
