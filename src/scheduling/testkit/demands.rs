//! Demands of pods, with and without a policy that classifies them.

use crate::engines::Engine;
use crate::policy::Policy;
use crate::units::{Bytes, Millis};
use crate::vocabulary::classification::{Classification, PodTraits};
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use crate::vocabulary::spare::SpareSet;
use std::sync::Arc;

/// A demand of `per_gpu` bytes on each of `gpus` GPUs, classified by the default policy, by its priority alone.
pub fn demand_of(per_gpu: u64, gpus: u32, sharing: Sharing, priority: i32) -> Demand {
    let traits = PodTraits {
        priority,
        sharing,
        ..PodTraits::default()
    };
    let Classification {
        class,
        terms,
        tenant,
        version,
    } = Policy::default().classify(&traits);
    Demand {
        ask: GpuRequest::Vram,
        per_gpu: Bytes(per_gpu),
        gpus,
        sharing,
        traits: Arc::new(traits),
        class,
        terms,
        tenant,
        classified_by: version,
        priority,
        may_preempt: true,
        host_resources: HostResources::default(),
        grace: Millis::seconds(30),
        model: None,
        kv_cache: None,
        weights: None,
        kept: SpareSet::NONE,
        expected: Default::default(),
        models: Arc::default(),
        wish: None,
        containers: Arc::new([]),
        images: Arc::default(),
        engine: Engine::default(),
    }
}

/// The demand with these traits, as the policy classifies it.
pub fn reclassified(mut demand: Demand, traits: PodTraits, policy: &Policy) -> Demand {
    demand.reclassify(policy.classify(&traits));
    Demand {
        traits: Arc::new(traits),
        ..demand
    }
}

/// The demand of a pod of that namespace, as the policy classifies it.
pub fn with_namespace(demand: Demand, namespace: &str, policy: &Policy) -> Demand {
    let traits = PodTraits {
        namespace: namespace.into(),
        ..(*demand.traits).clone()
    };
    reclassified(demand, traits, policy)
}
