//! What one pod asks for: the manifest's words as they came ([`PodRequest`]), and what they mean ([`Demand`]).
//!
//! The sum over a pod's containers is the scheduler's own: containers and side-cars run together, an init
//! container runs beside the side-cars started before it, and the larger of the two is what the pod needs.
//! No Kubernetes type is named here; the edges fill in a [`PodRequest`] from theirs, or one that says nothing ([`PodRequest::plain`]).

mod key;
mod request_error;
mod requested;

pub(crate) use key::DemandKey;
pub use request_error::RequestError;
pub use requested::{DEFAULT_GRACE_PERIOD, VramContainer, total_pod_request};
use requested::{
    RequestedGpus, parse_gpu_count, parse_kv_cache, parse_sharing, pod_traits,
    total_host_resources, total_vram, vram_containers,
};

use super::classification::{ClassId, ClassTerms, Classification, Isolation, PodTraits, TenantId};
use super::device_plugin::GpuRequest;
use super::gpu_wish::GpuSelector;
use super::image::ImageId;
use super::is_default;
use super::latency::ExpectedWork;
use super::memory_fraction::MemoryFraction;
use super::spare::SpareSet;
use crate::engines::Engine;
use crate::ids::{GpuModel, ModelId};
use crate::units::{Bytes, MilliCpu, Millis};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The most GPUs (or MIG slices) one node may have, and so the most one pod may ask for: sets of them are 64-bit masks.
pub const MAX_GPUS: u32 = 64;

/// Bytes of the keys and values of all annotations that an object may have. A Binding may add more, and its pod is then one that
/// can be deleted, and neither evicted nor given a status.
pub const MAX_ANNOTATIONS: usize = 256 << 10;

/// The longest grace period that counts, and that a class may give: Kubernetes lets a pod's owner ask for any.
pub const MAX_GRACE_PERIOD: Millis = Millis::seconds(3600);

/// The longest grace period of a pod that may borrow: an engine that wakes waits no longer for its VRAM.
pub const MAX_BORROWER_GRACE_PERIOD: Millis = Millis::seconds(600);

/// A pod's manifest, as far as placing it is concerned, in its own words.
#[derive(Debug, Clone, Copy)]
pub struct PodRequest<'a> {
    pub namespace: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub priority_class: Option<&'a str>,
    pub priority: i32,
    /// False for `preemptionPolicy: Never`.
    pub may_preempt: bool,
    pub grace: Millis,
    /// Init containers first, as they run.
    pub containers: &'a [ContainerRequest<'a>],
    /// The annotation `stowage.dev/gpus`.
    pub gpus: Option<&'a str>,
    /// The annotation `stowage.dev/exclusive`.
    pub exclusive: Option<&'a str>,
    /// The annotation `stowage.dev/model`, or the label that stands in for it.
    pub model: Option<&'a str>,
    /// The annotation `stowage.dev/kv-cache`.
    pub kv_cache: Option<&'a str>,
    pub service_account: Option<&'a str>,
    /// Names of what its containers ask for.
    pub resources: &'a BTreeSet<&'a str>,
}

#[derive(Debug, Clone, Copy)]
pub struct ContainerRequest<'a> {
    pub name: &'a str,
    pub role: ContainerRole,
    /// `stowage.dev/vram`.
    pub vram: Option<&'a str>,
    pub plugin: PluginAmount<'a>,
    pub cpu: Option<&'a str>,
    pub memory: Option<&'a str>,
}

/// What a container asks a device plugin for (`nvidia.com/gpu`, `.shared`, `nvidia.com/mig-*`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PluginAmount<'a> {
    #[default]
    None,
    One {
        resource: &'a str,
        amount: &'a str,
    },
    /// Several resources at once, of which this is the first.
    Several {
        resource: &'a str,
        amount: &'a str,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerRole {
    Main,
    Init,
    /// An init container with `restartPolicy: Always`.
    Sidecar,
}

/// Whether a pod's GPUs may have other pods on them.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// It asks for a part of a GPU's memory.
    Shared,
    /// It wants its GPUs to itself.
    Exclusive,
}

/// What one pod asks for, understood, and what the policy makes of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    pub ask: GpuRequest,
    /// VRAM on each of its GPUs; none, if a device plugin hands them out.
    pub per_gpu: Bytes,
    /// Over how many GPUs of one node, 1 to [`MAX_GPUS`]; of a device plugin, as many as it asks for.
    pub gpus: u32,
    /// Devices of a plugin are always charged whole to the pod's tenant: [`Sharing::Exclusive`].
    pub sharing: Sharing,
    /// What it shows of itself.
    pub traits: Arc<PodTraits>,
    pub class: ClassId,
    /// Its class's.
    pub terms: ClassTerms,
    pub tenant: Option<TenantId>,
    /// `Policy::version` of the policy that classified it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub classified_by: u64,
    pub priority: i32,
    pub may_preempt: bool,
    /// What it takes on its node beside the GPU.
    pub host_resources: HostResources,
    pub grace: Millis,
    pub model: Option<ModelId>,
    /// The part of its VRAM that is KV cache.
    pub kv_cache: Option<Bytes>,
    /// What its model weighs, where that is not the pod's to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<Bytes>,
    /// The rules of `planning.spare` whose last free GPUs it may not take, at the moment of a decision; none in what is stored.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kept: SpareSet,
    /// What is expected of it at the moment of a decision; nothing is known of it in what is stored.
    #[serde(skip)]
    pub expected: ExpectedWork,
    /// GPU models that it may run on, as far as it names them; none named means any. kube-scheduler filters out
    /// nodes with others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub models: Arc<[GpuModel]>,
    /// What it asks of its GPUs by labels of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wish: Option<Arc<GpuSelector>>,
    /// The containers that ask for VRAM; they share the pod's GPUs.
    pub containers: Arc<[VramContainer]>,
    /// The images of its containers, in order, each once.
    #[serde(default, skip_serializing_if = "is_default")]
    pub images: Arc<[ImageId]>,
    /// The inference engine that it runs, as far as it shows.
    #[serde(default, skip_serializing_if = "is_default")]
    pub engine: Engine,
}

fn readable_model(pod: &PodRequest<'_>) -> Option<ModelId> {
    ModelId::parse_unless_generic_path(pod.model?)
        .ok()
        .flatten()
}

/// CPU and host memory. Stowage does not place by them, but an eviction must free what the scheduler counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HostResources {
    pub cpu: MilliCpu,
    pub memory: Bytes,
}

impl Demand {
    /// Whether the driver keeps the pod within its VRAM on a node that can: its class has it so, it shares its GPUs, and the limits
    /// of all its containers can be written.
    pub(crate) fn can_have_vram_limits(&self) -> bool {
        self.sharing == Sharing::Shared
            && self.ask == GpuRequest::Vram
            && self.terms.isolation != Isolation::None
            && self.containers.iter().all(VramContainer::can_be_limited)
    }

    /// The VRAM limit of one of its containers on each GPU.
    pub fn limit_of(&self, container: &VramContainer) -> Bytes {
        Bytes(container.vram.0 / u64::from(self.gpus.max(1)))
    }

    /// What each of its containers may plan with of its VRAM limit.
    pub(crate) fn fraction_of_limit(&self) -> MemoryFraction {
        let limits = self.containers.iter().map(|one| self.limit_of(one));
        MemoryFraction::of_limit(limits.min().unwrap_or(self.per_gpu))
    }

    /// The demand of a pod that can be understood; `classify` says its class and tenant.
    pub fn from_request(
        pod: &PodRequest<'_>,
        classify: impl FnOnce(&PodTraits) -> Classification,
    ) -> Result<Self, RequestError> {
        let sharing = parse_sharing(pod.exclusive)?;
        let requested = RequestedGpus::from_pod(pod, sharing)?;
        let RequestedGpus {
            vram,
            gpus,
            kv_cache,
            ..
        } = requested;
        let model = pod
            .model
            .map(ModelId::parse_unless_generic_path)
            .transpose()?
            .flatten();
        let host_resources = total_host_resources(pod.containers);
        let traits = PodTraits {
            gpus,
            vram,
            kv_cache: kv_cache.unwrap_or_default(),
            ..pod_traits(pod, sharing)
        };
        Ok(Self {
            model,
            host_resources,
            ..Self::from_requested_gpus(requested, pod, traits, classify)
        })
    }

    /// The demand of a pod whose devices kube-scheduler allocates for its ResourceClaims: no VRAM and no GPUs. A model's name that
    /// cannot be read counts as none.
    pub fn from_claims(
        pod: &PodRequest<'_>,
        classify: impl FnOnce(&PodTraits) -> Classification,
    ) -> Self {
        let requested = RequestedGpus {
            ask: GpuRequest::Claims,
            vram: Bytes::ZERO,
            gpus: 0,
            sharing: Sharing::Shared,
            kv_cache: None,
        };
        let model = readable_model(pod);
        Self {
            model,
            ..Self::from_requested_gpus(requested, pod, pod_traits(pod, Sharing::Shared), classify)
        }
    }

    /// What to charge for a pod that is bound although it cannot be understood: all it could mean. A readable amount counts in
    /// full on every GPU; an unreadable one takes the GPUs whole. Of a device plugin's resources the first it names counts: the
    /// kubelet counts them all, and the scheduler asks about no node where one is short. Each part that can be read counts as it
    /// is, so that one edit that cannot be read does not make it another pod to the policy.
    pub fn worst_case_classified(
        pod: &PodRequest<'_>,
        classify: impl FnOnce(&PodTraits) -> Classification,
    ) -> Self {
        let vram = total_vram(pod.containers).unwrap_or_default();
        let requested = RequestedGpus {
            kv_cache: parse_kv_cache(pod.kv_cache, vram).unwrap_or_default(),
            ..RequestedGpus::worst_case(pod)
        };
        let traits = PodTraits {
            gpus: parse_gpu_count(pod.gpus).unwrap_or(1),
            vram,
            kv_cache: requested.kv_cache.unwrap_or_default(),
            ..pod_traits(pod, parse_sharing(pod.exclusive).unwrap_or(Sharing::Shared))
        };
        let model = readable_model(pod);
        let host_resources = total_host_resources(pod.containers);
        let demand = Self::from_requested_gpus(requested, pod, traits, classify);
        Self {
            model,
            host_resources,
            may_preempt: false,
            ..demand
        }
    }

    /// The demand of a pod without a model, CPU and memory.
    fn from_requested_gpus(
        RequestedGpus {
            ask,
            vram,
            gpus,
            sharing,
            kv_cache,
        }: RequestedGpus,
        pod: &PodRequest<'_>,
        traits: PodTraits,
        classify: impl FnOnce(&PodTraits) -> Classification,
    ) -> Self {
        let Classification {
            class,
            terms,
            tenant,
            version: classified_by,
        } = classify(&traits);
        Self {
            ask,
            // Of a plugin, a pod that cannot be understood may ask for no device.
            per_gpu: vram.split(gpus.max(1)),
            gpus,
            sharing,
            traits: Arc::new(traits),
            class,
            terms,
            tenant,
            classified_by,
            priority: pod.priority,
            may_preempt: pod.may_preempt,
            host_resources: HostResources::default(),
            grace: pod.grace,
            model: None,
            kv_cache,
            weights: None,
            kept: SpareSet::NONE,
            expected: ExpectedWork::UNKNOWN,
            models: Arc::default(),
            wish: None,
            containers: vram_containers(pod.containers),
            images: Arc::default(),
            engine: Engine::default(),
        }
    }

    /// Replaces class, terms and tenant by those that another policy gives the pod.
    pub fn reclassify(&mut self, classification: Classification) {
        let Classification {
            class,
            terms,
            tenant,
            version,
        } = classification;
        (self.class, self.terms, self.tenant, self.classified_by) = (class, terms, tenant, version);
    }

    /// What its model weighs: what some node knows, or, as far as the pod says, all of its VRAM that is not KV cache.
    pub fn weights(&self) -> Bytes {
        self.weights
            .unwrap_or_else(|| self.vram().minus(self.kv_cache.unwrap_or_default()))
    }

    /// Its model's weights on each of its GPUs.
    pub fn weights_per_gpu(&self) -> Bytes {
        self.weights().split(self.gpus.max(1))
    }

    /// Whether it is the same request, whatever images it has by now: those of a pod that runs may be changed.
    pub(crate) fn is_same_request(&self, other: &Self) -> bool {
        self == other
            || *self
                == Self {
                    images: self.images.clone(),
                    engine: self.engine,
                    ..other.clone()
                }
    }

    /// Whether something other than Stowage allocates its GPUs: a device plugin, or kube-scheduler for its ResourceClaims.
    pub fn is_allocated_externally(&self) -> bool {
        self.ask != GpuRequest::Vram
    }

    /// VRAM over all its GPUs.
    pub fn vram(&self) -> Bytes {
        self.per_gpu.times(u64::from(self.gpus))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use crate::vocabulary::device_plugin::PluginResource;

    fn container(role: ContainerRole, vram: Option<&'static str>) -> ContainerRequest<'static> {
        ContainerRequest {
            name: "engine",
            role,
            vram,
            plugin: PluginAmount::None,
            cpu: Some("1"),
            memory: Some("1Gi"),
        }
    }

    fn demand(
        edit: impl FnOnce(&mut PodRequest<'_>),
        containers: &[ContainerRequest<'_>],
    ) -> Result<Demand, RequestError> {
        let labels = BTreeMap::new();
        let mut pod = PodRequest {
            namespace: "default",
            labels: &labels,
            priority_class: None,
            priority: 0,
            may_preempt: true,
            grace: Millis::seconds(30),
            containers: &[],
            gpus: None,
            exclusive: None,
            model: None,
            kv_cache: None,
            service_account: None,
            resources: &BTreeSet::new(),
        };
        edit(&mut pod);
        Demand::from_pod(&PodRequest { containers, ..pod }, &Policy::default())
    }

    #[test]
    fn containers_add_up_and_an_init_container_counts_only_where_it_needs_more() {
        use ContainerRole::{Init, Main, Sidecar};
        let sum = |containers: &[_]| demand(|_| {}, containers).unwrap().per_gpu;
        let c = container;
        let gib = Bytes::gib;
        assert_eq!(
            sum(&[
                c(Init, Some("8Gi")),
                c(Main, Some("16Gi")),
                c(Main, Some("4Gi"))
            ]),
            gib(20)
        );
        assert_eq!(
            sum(&[
                c(Init, Some("30Gi")),
                c(Main, Some("16Gi")),
                c(Main, Some("4Gi"))
            ]),
            gib(30)
        );
        assert_eq!(
            sum(&[
                c(Sidecar, Some("5Gi")),
                c(Init, Some("18Gi")),
                c(Main, Some("16Gi"))
            ]),
            gib(23)
        );
        assert_eq!(
            sum(&[
                c(Init, Some("18Gi")),
                c(Sidecar, Some("5Gi")),
                c(Main, Some("16Gi"))
            ]),
            gib(21)
        );
    }

    #[test]
    fn vram_is_the_pods_total_and_is_split_over_its_gpus_rounded_up() {
        let split = demand(
            |p| p.gpus = Some("3"),
            &[container(ContainerRole::Main, Some("1000000000"))],
        )
        .unwrap();
        assert_eq!(
            (split.per_gpu, split.gpus, split.vram()),
            (Bytes(333_333_334), 3, Bytes(1_000_000_002))
        );
    }

    #[test]
    fn what_cannot_be_understood_is_refused_with_its_reason() {
        let main = |vram| [container(ContainerRole::Main, vram)];
        let one = PluginAmount::One {
            resource: "nvidia.com/gpu",
            amount: "1",
        };
        let plugin = [ContainerRequest {
            plugin: one,
            ..main(Some("1Gi"))[0]
        }];
        let code = |result: Result<Demand, RequestError>| result.unwrap_err().code();
        assert_eq!(code(demand(|_| {}, &main(None))), "no-vram");
        assert_eq!(code(demand(|_| {}, &main(Some("0")))), "no-vram");
        assert_eq!(code(demand(|_| {}, &main(Some("0.5")))), "bad-quantity");
        assert_eq!(code(demand(|_| {}, &main(Some("9e99")))), "bad-quantity");
        assert_eq!(code(demand(|_| {}, &plugin)), "both-ways");
        assert_eq!(
            code(demand(|_| {}, &main(Some("40000")))),
            "too-little-vram"
        );
        for (gpus, vram, per_gpu) in [
            (None, "255Mi", None),
            (None, "256Mi", Some(256)),
            (Some("8"), "256Mi", None),
            (Some("8"), "2047Mi", None),
            (Some("8"), "2Gi", Some(256)),
            (Some("64"), "15Gi", None),
        ] {
            let asked = demand(|p| p.gpus = gpus, &main(Some(vram)));
            let got = asked
                .as_ref()
                .map_or_else(|error| Err(error.code()), |demand| Ok(demand.per_gpu));
            assert_eq!(
                got,
                per_gpu.map(Bytes::mib).ok_or("too-little-vram"),
                "{vram} on {gpus:?}"
            );
        }
        let one_of_two = [
            main(Some("40Gi"))[0],
            ContainerRequest {
                name: "second",
                ..main(Some("256Mi"))[0]
            },
        ];
        let said = demand(|p| p.gpus = Some("8"), &one_of_two)
            .unwrap_err()
            .to_string();
        assert!(
            [
                "second",
                "256.0 MiB",
                "8 of",
                "at least 2.0 GiB",
                "stowage.dev/gpus"
            ]
            .iter()
            .all(|part| said.contains(part)),
            "{said}"
        );
        let longest = "c".repeat(253 - ".container.stowage.dev".len());
        let named = |name| {
            [ContainerRequest {
                name,
                ..main(Some("1Gi"))[0]
            }]
        };
        assert!(demand(|_| {}, &named(&longest)).is_ok());
        assert_eq!(
            code(demand(|_| {}, &named(&format!("{longest}c")))),
            "container-name"
        );
        assert_eq!(
            code(demand(|p| p.gpus = Some("0"), &main(Some("1Gi")))),
            "bad-gpus"
        );
        assert_eq!(
            code(demand(|p| p.gpus = Some("65"), &main(Some("1Gi")))),
            "bad-gpus"
        );
        assert_eq!(
            code(demand(|p| p.exclusive = Some("yes"), &main(Some("1Gi")))),
            "bad-exclusive"
        );
        assert_eq!(
            code(demand(|p| p.kv_cache = Some("2Gi"), &main(Some("1Gi")))),
            "kv-cache-above-vram"
        );
    }

    fn plugin(
        role: ContainerRole,
        resource: &'static str,
        amount: &'static str,
    ) -> ContainerRequest<'static> {
        ContainerRequest {
            plugin: PluginAmount::One { resource, amount },
            ..container(role, None)
        }
    }

    #[test]
    fn devices_of_a_plugin_add_up_as_the_scheduler_adds_them_up() {
        use ContainerRole::{Init, Main, Sidecar};
        let c = |role, amount| plugin(role, "nvidia.com/gpu", amount);
        let count = |containers: &[_]| demand(|_| {}, containers).unwrap().gpus;
        assert_eq!(count(&[c(Init, "1"), c(Main, "2"), c(Main, "3")]), 5);
        assert_eq!(count(&[c(Init, "8"), c(Main, "2"), c(Main, "3")]), 8);
        assert_eq!(count(&[c(Sidecar, "1"), c(Init, "4"), c(Main, "2")]), 5);
        assert_eq!(
            count(&[container(Main, None), c(Main, "1k")]),
            1000,
            "more than any node has is a demand"
        );
    }

    #[test]
    fn a_pod_that_asks_a_plugin_has_no_vram_and_shows_what_it_asks_for() {
        let asked = demand(
            |p| (p.gpus, p.kv_cache, p.exclusive) = (Some("7"), Some("2Gi"), Some("false")),
            &[plugin(ContainerRole::Main, "nvidia.com/mig-3g.40gb", "2")],
        );
        let demand = asked.unwrap();
        let resource = PluginResource::parse("nvidia.com/mig-3g.40gb").unwrap();
        assert_eq!(demand.ask, GpuRequest::Plugin { resource, count: 2 });
        assert_eq!(
            (demand.vram(), demand.gpus, demand.sharing),
            (Bytes::ZERO, 2, Sharing::Exclusive)
        );
        assert_eq!((demand.traits.gpus, demand.traits.vram), (2, Bytes::ZERO));
        assert_eq!(
            (demand.traits.kv_cache, demand.traits.sharing),
            (Bytes::gib(2), Sharing::Shared)
        );
    }

    #[test]
    fn what_a_plugin_cannot_be_asked_for_is_refused_with_its_reason() {
        use ContainerRole::Main;
        let code = |containers: &[_]| demand(|_| {}, containers).unwrap_err().code();
        let (gpu, shared) = ("nvidia.com/gpu", "nvidia.com/gpu.shared");
        assert_eq!(code(&[plugin(Main, gpu, "0")]), "no-vram");
        assert_eq!(code(&[plugin(Main, gpu, "0.5")]), "bad-quantity");
        assert_eq!(
            code(&[plugin(Main, gpu, "1"), plugin(Main, shared, "1")]),
            "several-resources"
        );
        let both = PluginAmount::Several {
            resource: gpu,
            amount: "1",
        };
        assert_eq!(
            code(&[ContainerRequest {
                plugin: both,
                ..container(Main, None)
            }]),
            "several-resources"
        );
        assert_eq!(
            code(&[plugin(Main, gpu, "1"), container(Main, Some("1Gi"))]),
            "both-ways"
        );
    }
}
