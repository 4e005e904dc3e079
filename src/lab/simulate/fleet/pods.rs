//! A pod of a simulated fleet: what its manifest says, and what its work needs. Where it is, and what became of it, is the
//! stage's.

use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{ModelId, OwnerUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::demand::{
    ContainerRequest, DEFAULT_GRACE_PERIOD, Demand, PodRequest, RequestError,
};
use stowage_scheduling::vocabulary::image::ImageId;

/// What a pod's manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSpec {
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    pub priority: i32,
    /// Over all its GPUs.
    pub vram: Bytes,
    pub gpus: u32,
    pub is_exclusive: bool,
    pub model: Option<ModelId>,
    /// What its model weighs; the rest of its VRAM is KV cache.
    pub weights: Bytes,
    /// The image of its engine, and what that weighs; `None` if every node has it.
    pub image: Option<Image>,
    pub grace: Millis,
    /// Its controller.
    pub owner: Option<OwnerUid>,
}

/// A container image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Image {
    pub name: String,
    pub size: Bytes,
}

impl PodSpec {
    /// A pod of priority 0 on one GPU, without a model.
    pub fn plain(namespace: &str, vram: Bytes) -> Self {
        Self {
            namespace: namespace.into(),
            labels: BTreeMap::new(),
            priority: 0,
            vram,
            gpus: 1,
            is_exclusive: false,
            model: None,
            weights: Bytes::ZERO,
            image: None,
            grace: DEFAULT_GRACE_PERIOD,
            owner: None,
        }
    }

    /// A pod that serves a model, with KV cache beside the weights.
    pub fn serving(namespace: &str, model: ModelId, weights: Bytes, vram: Bytes) -> Self {
        Self {
            model: Some(model),
            weights,
            priority: 1000,
            ..Self::plain(namespace, vram)
        }
    }

    /// VRAM on each of its GPUs.
    pub fn vram_per_gpu(&self) -> Bytes {
        Bytes(self.vram.0.div_ceil(u64::from(self.gpus.max(1))))
    }

    /// The manifest, read as the extender reads it.
    pub fn demand(&self, policy: &Policy) -> Result<Demand, RequestError> {
        let (vram, gpus) = (self.vram.0.to_string(), self.gpus.to_string());
        let kv_cache = self.vram.minus(self.weights).0.to_string();
        let containers = [ContainerRequest {
            vram: Some(&vram),
            ..ContainerRequest::plain("main")
        }];
        let demand = Demand::from_pod(
            &PodRequest {
                labels: &self.labels,
                priority: self.priority,
                grace: self.grace,
                gpus: Some(&gpus),
                exclusive: self.is_exclusive.then_some("true"),
                model: self.model.as_ref().map(ModelId::as_str),
                kv_cache: (self.weights > Bytes::ZERO).then_some(kv_cache.as_str()),
                resources: &BTreeSet::from(["stowage.dev/vram"]),
                ..PodRequest::plain(&self.namespace, &containers)
            },
            policy,
        )?;
        let image = self
            .image
            .as_ref()
            .and_then(|image| ImageId::from_reference(&image.name));
        Ok(Demand {
            images: image.into_iter().collect(),
            ..demand
        })
    }
}
