//! When two demands are equal for a node: the one key under which results of fit and score are shared.

use super::{Demand, HostResources, Sharing};
use crate::engines::Engine;
use crate::ids::{GpuModel, ModelId};
use crate::units::Bytes;
use crate::vocabulary::classification::{ClassId, ClassTerms, Isolation};
use crate::vocabulary::device_plugin::GpuRequest;
use crate::vocabulary::gpu_wish::GpuSelector;
use crate::vocabulary::image::ImageId;
use crate::vocabulary::latency::ExpectedWork;
use crate::vocabulary::spare::SpareSet;
use std::sync::Arc;

/// All of a demand that fit and score may read. Of two demands with equal keys, every node gives both the same GPUs and the same
/// score. What depends on the pod beyond that (its tenant's limit, its right to preempt) is not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DemandKey {
    ask: GpuRequest,
    per_gpu: Bytes,
    gpus: u32,
    sharing: Sharing,
    class: ClassId,
    terms: ClassTerms,
    /// Whether it can have VRAM limits, if its class requires them or it may borrow.
    can_have_vram_limits: bool,
    host_resources: HostResources,
    /// The model, and the size of its weights. A pod without a model loads nothing: its KV cache is just VRAM.
    model: Option<(ModelId, Bytes)>,
    /// The namespace of a pod with a model: a sleeping engine may be woken for pods of its namespace only.
    namespace: Option<Arc<str>>,
    models: Arc<[GpuModel]>,
    wish: Option<Arc<GpuSelector>>,
    borrower_priority: Option<i32>,
    kept: SpareSet,
    expected: ExpectedWork,
    /// The weights that it reads in each step, if its class limits how long that takes.
    weights_per_gpu: Option<Bytes>,
    /// What has to be pulled where it is missing.
    images: Arc<[ImageId]>,
    /// Engines differ in how long they take to start; without a model none is known.
    engine: Engine,
}

impl DemandKey {
    /// Names every field of [`Demand`]: to add one is to decide here whether nodes are told apart by it.
    pub fn from_demand(demand: &Demand) -> Self {
        let Demand {
            ask,
            per_gpu,
            gpus,
            sharing,
            class,
            terms,
            host_resources,
            model,
            models,
            wish,
            kept,
            expected,
            images,
            engine,
            // Part of the key as the size of the model's weights.
            kv_cache: _,
            weights: _,
            // A node sees only their result, the class and its terms, and the namespace.
            traits,
            classified_by: _,
            // For limits and evictions.
            tenant: _,
            may_preempt: _,
            // For a pod that may borrow: an engine lends to pods of lower priority only.
            priority,
            // Whether their limits can be written.
            containers: _,
            // For the pod's own end.
            grace: _,
        } = demand;
        Self {
            ask: ask.clone(),
            per_gpu: *per_gpu,
            gpus: *gpus,
            sharing: *sharing,
            class: *class,
            terms: *terms,
            can_have_vram_limits: terms.isolation != Isolation::Required && !terms.borrows
                || demand.can_have_vram_limits(),
            host_resources: *host_resources,
            model: model.clone().map(|model| (model, demand.weights())),
            namespace: model.as_ref().map(|_| traits.namespace.as_str().into()),
            borrower_priority: terms.borrows.then_some(*priority),
            models: models.clone(),
            wish: wish.clone(),
            kept: *kept,
            weights_per_gpu: terms.max_time_per_token.map(|_| demand.weights_per_gpu()),
            expected: *expected,
            images: images.clone(),
            engine: if model.is_some() {
                *engine
            } else {
                Engine::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::demand_of;
    use crate::units::MilliCpu;
    use crate::vocabulary::classification::PodTraits;
    use crate::vocabulary::demand::VramContainer;
    use crate::vocabulary::label_selector::Requirement;

    #[test]
    fn demands_that_a_node_may_tell_apart_have_different_keys() {
        let model = |name| ModelId::parse(name).ok();
        let base = Demand {
            model: model("org/a"),
            ..demand_of(40 << 30, 1, Sharing::Shared, 0)
        };
        let others = [
            Demand {
                per_gpu: Bytes::gib(41),
                ..base.clone()
            },
            Demand {
                gpus: 2,
                ..base.clone()
            },
            Demand {
                sharing: Sharing::Exclusive,
                ..base.clone()
            },
            Demand {
                class: ClassId::from_index(63),
                ..base.clone()
            },
            Demand {
                terms: ClassTerms {
                    queue_limit: Some(77),
                    ..base.terms
                },
                ..base.clone()
            },
            Demand {
                terms: ClassTerms {
                    isolation: Isolation::Required,
                    ..base.terms
                },
                ..base.clone()
            },
            Demand {
                terms: ClassTerms {
                    isolation: Isolation::Required,
                    ..base.terms
                },
                containers: [VramContainer {
                    name: "c".repeat(35).into(),
                    vram: Bytes::gib(40),
                }]
                .into(),
                ..base.clone()
            },
            Demand {
                host_resources: HostResources {
                    cpu: MilliCpu(1),
                    ..HostResources::default()
                },
                ..base.clone()
            },
            Demand {
                model: model("org/b"),
                ..base.clone()
            },
            Demand {
                model: None,
                ..base.clone()
            },
            Demand {
                traits: Arc::new(PodTraits {
                    namespace: "elsewhere".into(),
                    ..(*base.traits).clone()
                }),
                ..base.clone()
            },
            Demand {
                kv_cache: Some(Bytes::gib(1)),
                ..base.clone()
            },
            Demand {
                weights: Some(Bytes::gib(1)),
                ..base.clone()
            },
            Demand {
                kept: [0].into_iter().collect(),
                ..base.clone()
            },
            Demand {
                wish: GpuSelector::from_terms([vec![Requirement::equals(
                    "nvidia.com/gpu.product",
                    "H100",
                )]])
                .map(Arc::new),
                ..base.clone()
            },
            Demand {
                images: [ImageId::from_reference("engine:1").unwrap()].into(),
                ..base.clone()
            },
            Demand {
                engine: Engine::Vllm,
                ..base.clone()
            },
        ];
        for (n, other) in others.iter().enumerate() {
            assert_ne!(
                DemandKey::from_demand(other),
                DemandKey::from_demand(&base),
                "{n}"
            );
        }
    }

    #[test]
    fn demands_that_no_node_tells_apart_share_a_key() {
        let base = demand_of(40 << 30, 1, Sharing::Shared, 0);
        let without_model = Demand {
            kv_cache: Some(Bytes::gib(1)),
            ..base.clone()
        };
        let of_an_engine = Demand {
            engine: Engine::Vllm,
            ..base.clone()
        };
        let urgent = Demand {
            priority: 7,
            may_preempt: false,
            ..base.clone()
        };
        assert_eq!(
            [without_model, of_an_engine, urgent].map(|other| DemandKey::from_demand(&other)),
            [(); 3].map(|()| DemandKey::from_demand(&base))
        );
    }
}
