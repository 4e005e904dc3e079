//! The models of the engines on one node, by GPU: which are loaded, which sleep, and which sleeping engines a new pod may wake
//! in place of a start of its own.
//!
//! What an agent reported ([`EngineReading`]) is not what a decision reads ([`ReusableEngineSet`]): that has only the few engines
//! that sleep and may be taken over, so that nodes without any cost a decision nothing.

use super::demand::Demand;
use super::gpu::GpuSet;
use super::model_tier::bloom_bit;
use crate::ids::{GpuUuid, ModelId, PodUid};
use crate::units::Moment;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What an engine has done with its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineModelState {
    /// It starts, or reads the weights.
    Loading,
    /// The weights are on its GPUs.
    Resident,
    /// The weights are off its GPUs.
    Asleep(SleepLevel),
}

/// How deep an engine sleeps, by vLLM's count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepLevel {
    /// Level 1: the weights are in host memory.
    WeightsOffloaded,
    /// Level 2, or one that is not known: the weights are gone, and a wake reads them from where their files are.
    WeightsDiscarded,
}

impl SleepLevel {
    /// The level that an agent reports. One that this version does not know may have dropped the weights.
    pub fn from_reported(level: Option<u8>) -> Self {
        if level == Some(1) {
            Self::WeightsOffloaded
        } else {
            Self::WeightsDiscarded
        }
    }

    /// vLLM's number for it.
    pub fn number(self) -> u8 {
        match self {
            Self::WeightsOffloaded => 1,
            Self::WeightsDiscarded => 2,
        }
    }
}

/// One engine and its model, as the node's agent reported them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineReading {
    pub pod: PodUid,
    pub model: ModelId,
    /// Empty if the agent does not know where it runs.
    pub gpus: Arc<[GpuUuid]>,
    pub state: EngineModelState,
    /// The namespace whose new pods may take it over, if its pod's labels allow that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reusable_in: Option<Arc<str>>,
    /// When its figures were right, on the receiver's clock.
    #[serde(default)]
    #[serde(rename = "seen")]
    pub observed_at: Moment,
}

impl EngineReading {
    /// Gives it the names that an earlier reading of the same engine has, so that equal names are in memory once.
    pub fn share_names_with(&mut self, earlier: &Self) {
        if self.pod == earlier.pod {
            self.pod = earlier.pod.clone();
        }
        if self.model == earlier.model {
            self.model = earlier.model.clone();
        }
        if self.gpus == earlier.gpus {
            self.gpus = earlier.gpus.clone();
        }
        if self.reusable_in == earlier.reusable_in {
            self.reusable_in.clone_from(&earlier.reusable_in);
        }
    }
}

/// A sleeping engine that a new pod of its model may wake, on exactly these GPUs of its node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReusableEngine {
    pub model: ModelId,
    /// The namespace whose pods may.
    pub namespace: Arc<str>,
    pub gpus: GpuSet,
    pub level: SleepLevel,
}

impl ReusableEngine {
    /// Whether a pod with this demand may wake it, wherever there is room. An engine over two GPUs serves no pod that asks for
    /// one.
    pub fn is_usable_by(&self, demand: &Demand) -> bool {
        demand.model.as_ref() == Some(&self.model)
            && self.gpus.len() == demand.gpus
            && *self.namespace == *demand.traits.namespace
    }
}

/// The sleeping engines of a node that new pods may wake. Cheap to clone, and most often empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Vec<ReusableEngine>")]
pub struct ReusableEngineSet {
    /// A bit for each model, as in [`NodeModelSet`](super::model_tier::NodeModelSet).
    model_bits: u64,
    list: Arc<[ReusableEngine]>,
}

impl ReusableEngineSet {
    /// The engines that a pod with this demand may wake. A pod that asks a device plugin gets a GPU of the kubelet's choice.
    pub(crate) fn usable_by<'a>(
        &'a self,
        demand: &'a Demand,
    ) -> impl Iterator<Item = &'a ReusableEngine> {
        let is_marked = demand
            .model
            .as_ref()
            .is_some_and(|model| self.model_bits & bloom_bit(model) != 0);
        let list = if is_marked && !demand.is_allocated_externally() {
            &*self.list
        } else {
            &[]
        };
        list.iter().filter(|engine| engine.is_usable_by(demand))
    }

    /// The one that sleeps least deep of those that a pod with this demand may wake on exactly these GPUs.
    pub fn best_on<'a>(&'a self, gpus: GpuSet, demand: &'a Demand) -> Option<&'a ReusableEngine> {
        self.usable_by(demand)
            .filter(|engine| engine.gpus == gpus)
            .min_by_key(|engine| engine.level)
    }

    /// This set without the engine that a pod with this demand wakes on these GPUs, if it wakes one.
    pub(crate) fn without_engine_on(self, gpus: GpuSet, demand: &Demand) -> Self {
        let index = self
            .best_on(gpus, demand)
            .and_then(|engine| self.list.iter().position(|one| one == engine));
        let Some(index) = index else { return self };
        let mut remaining = self.list.to_vec();
        remaining.remove(index);
        remaining.into()
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &ReusableEngine> {
        self.list.iter()
    }

    /// This set, if it has these engines; else a new one. What decisions read again and again stays where it is.
    pub(crate) fn reuse_or_replace(&self, engines: Vec<ReusableEngine>) -> Self {
        if *self.list == *engines {
            self.clone()
        } else {
            engines.into()
        }
    }
}

impl From<Vec<ReusableEngine>> for ReusableEngineSet {
    fn from(list: Vec<ReusableEngine>) -> Self {
        Self {
            model_bits: list
                .iter()
                .fold(0, |marks, engine| marks | bloom_bit(&engine.model)),
            list: list.into(),
        }
    }
}

impl Serialize for ReusableEngineSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.list.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::demand_of;
    use crate::vocabulary::demand::Sharing;

    fn engine(model: &str, gpus: GpuSet, level: SleepLevel) -> ReusableEngine {
        ReusableEngine {
            model: ModelId::parse(model).unwrap(),
            namespace: "".into(),
            gpus,
            level,
        }
    }

    #[test]
    fn only_an_engine_of_the_pods_model_namespace_and_number_of_gpus_suits() {
        let demand = Demand {
            model: ModelId::parse("m").ok(),
            ..demand_of(1, 1, Sharing::Shared, 0)
        };
        let namespace: Arc<str> = demand.traits.namespace.as_str().into();
        let own = ReusableEngine {
            namespace: namespace.clone(),
            ..engine("m", GpuSet::single(3), SleepLevel::WeightsOffloaded)
        };
        let deeper = ReusableEngine {
            level: SleepLevel::WeightsDiscarded,
            ..own.clone()
        };
        let others = [
            ReusableEngine {
                model: ModelId::parse("n").unwrap(),
                ..own.clone()
            },
            ReusableEngine {
                namespace: "elsewhere".into(),
                ..own.clone()
            },
            ReusableEngine {
                gpus: GpuSet::first(2),
                ..own.clone()
            },
        ];
        let set: ReusableEngineSet = others
            .iter()
            .cloned()
            .chain([deeper, own.clone()])
            .collect::<Vec<_>>()
            .into();
        assert_eq!(set.usable_by(&demand).count(), 2);
        assert_eq!(
            set.best_on(GpuSet::single(3), &demand),
            Some(&own),
            "the one that sleeps least deep"
        );
        assert_eq!(set.best_on(GpuSet::single(2), &demand), None);
        let nameless = Demand {
            model: None,
            ..demand
        };
        assert_eq!(set.usable_by(&nameless).count(), 0);
    }

    #[test]
    fn a_level_that_is_not_known_counts_as_one_that_dropped_the_weights() {
        let levels = [None, Some(0), Some(1), Some(2), Some(255)]
            .map(|level| SleepLevel::from_reported(level).number());
        assert_eq!(levels, [2, 2, 1, 2, 2]);
    }
}
