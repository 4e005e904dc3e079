//! The words of a manifest read: amounts summed up over a pod's containers as the scheduler does, and annotations. What a request
//! means is not known here.

use super::{
    ContainerRequest, ContainerRole, HostResources, MAX_GPUS, PluginAmount, PodRequest,
    RequestError, Sharing,
};
use crate::units::{Bytes, MilliCpu, Millis, QuantityError};
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::memory_fraction::LEAST_PER_GPU;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The GPUs, VRAM and KV cache that a pod requests, from Stowage or from a device plugin.
pub(super) struct RequestedGpus {
    pub ask: GpuRequest,
    pub vram: Bytes,
    pub gpus: u32,
    pub sharing: Sharing,
    pub kv_cache: Option<Bytes>,
}

impl RequestedGpus {
    pub fn from_pod(pod: &PodRequest<'_>, sharing: Sharing) -> Result<Self, RequestError> {
        let asks_vram = pod.containers.iter().any(|c| c.vram.is_some());
        match total_plugin_request(pod.containers) {
            PluginAmount::None => Self::from_vram_request(pod, sharing),
            _ if asks_vram => Err(RequestError::BothWays),
            PluginAmount::Several { .. } => Err(RequestError::SeveralResources),
            PluginAmount::One { resource, .. } => Self::from_plugin_request(pod, resource),
        }
    }

    fn from_vram_request(pod: &PodRequest<'_>, sharing: Sharing) -> Result<Self, RequestError> {
        let vram = total_vram(pod.containers)?;
        let gpus = parse_gpu_count(pod.gpus)?;
        validate_containers(pod.containers, gpus)?;
        let kv_cache = parse_kv_cache(pod.kv_cache, vram)?;
        Ok(Self {
            ask: GpuRequest::Vram,
            vram,
            gpus,
            sharing,
            kv_cache,
        })
    }

    fn from_plugin_request(pod: &PodRequest<'_>, resource: &str) -> Result<Self, RequestError> {
        let count = total_devices(pod.containers, resource)?;
        let resource = PluginResource::parse(resource).filter(|_| count > 0);
        let ask = GpuRequest::Plugin {
            resource: resource.ok_or(RequestError::NoVram)?,
            count,
        };
        // Of how much VRAM it is a part is unknown.
        let kv_cache =
            parse_optional_quantity(KV_CACHE, pod.kv_cache, Bytes::parse_quantity_rounding_up)?;
        Ok(Self {
            ask,
            vram: Bytes::ZERO,
            gpus: count,
            sharing: Sharing::Exclusive,
            kv_cache,
        })
    }

    /// All that a pod that cannot be understood could mean.
    pub fn worst_case(pod: &PodRequest<'_>) -> Self {
        let ask = worst_case_gpu_request(pod.containers);
        let (gpus, sharing) = match &ask {
            GpuRequest::Vram => (1, Sharing::Shared),
            GpuRequest::Plugin { count, .. } => (*count, Sharing::Exclusive),
            GpuRequest::Claims => (0, Sharing::Shared),
        };
        let vram = match total_vram(pod.containers) {
            Ok(vram) => vram,
            Err(RequestError::NoVram) => Bytes::ZERO,
            Err(_) => Bytes(u64::MAX),
        };
        Self {
            ask,
            vram,
            gpus,
            sharing,
            kv_cache: None,
        }
    }
}

/// What all containers together ask of device plugins; the amount is that of the first that asks.
fn total_plugin_request<'a>(containers: &[ContainerRequest<'a>]) -> PluginAmount<'a> {
    containers
        .iter()
        .fold(PluginAmount::None, |all, container| {
            match (all, container.plugin) {
                (all, PluginAmount::None) => all,
                (PluginAmount::None, one) => one,
                (PluginAmount::One { resource: a, .. }, PluginAmount::One { resource: b, .. })
                    if a == b =>
                {
                    all
                }
                (
                    PluginAmount::One { resource, amount }
                    | PluginAmount::Several { resource, amount },
                    _,
                ) => PluginAmount::Several { resource, amount },
            }
        })
}

fn total_devices(containers: &[ContainerRequest<'_>], resource: &str) -> Result<u32, RequestError> {
    let count = sum_over(containers, |container| match container.plugin {
        PluginAmount::One {
            resource: other,
            amount,
        }
        | PluginAmount::Several {
            resource: other,
            amount,
        } if other == resource => parse_bytes("nvidia.com/*", Some(amount)),
        _ => Ok(Bytes::ZERO),
    })?;
    Ok(u32::try_from(count.0).unwrap_or(u32::MAX))
}

fn worst_case_gpu_request(containers: &[ContainerRequest<'_>]) -> GpuRequest {
    let named = match total_plugin_request(containers) {
        PluginAmount::One { resource, .. } | PluginAmount::Several { resource, .. } => {
            Some(resource)
        }
        PluginAmount::None => None,
    };
    let asks_vram = containers.iter().any(|c| c.vram.is_some());
    let Some(resource) = named.filter(|_| !asks_vram) else {
        return GpuRequest::Vram;
    };
    match (
        PluginResource::parse(resource),
        total_devices(containers, resource),
    ) {
        (Some(resource), Ok(count)) => GpuRequest::Plugin { resource, count },
        _ => GpuRequest::Vram,
    }
}

/// The traits of a pod without its number of GPUs, VRAM and KV cache, which may be unreadable.
pub(super) fn pod_traits(pod: &PodRequest<'_>, sharing: Sharing) -> PodTraits {
    PodTraits {
        namespace: pod.namespace.into(),
        labels: pod.labels.clone(),
        priority_class: pod.priority_class.unwrap_or_default().into(),
        priority: pod.priority,
        sharing,
        resources: pod.resources.iter().map(|&name| name.into()).collect(),
        model: pod.model.unwrap_or_default().into(),
        service_account: pod.service_account.unwrap_or_default().into(),
        ..PodTraits::default()
    }
}

pub(super) fn vram_containers(containers: &[ContainerRequest<'_>]) -> Arc<[VramContainer]> {
    let vram_container = |c: &ContainerRequest<'_>| {
        let vram = parse_bytes("stowage.dev/vram", Some(c.vram?)).unwrap_or_default();
        Some(VramContainer {
            name: c.name.into(),
            vram,
        })
    };
    let requested = containers.iter().filter_map(vram_container);
    requested
        .filter(|container| container.vram > Bytes::ZERO)
        .collect()
}

pub(super) fn total_vram(containers: &[ContainerRequest<'_>]) -> Result<Bytes, RequestError> {
    if containers.iter().all(|c| c.vram.is_none()) {
        return Err(RequestError::NoVram);
    }
    let vram = sum_over(containers, |c| parse_bytes("stowage.dev/vram", c.vram))?;
    if vram == Bytes::ZERO {
        Err(RequestError::NoVram)
    } else {
        Ok(vram)
    }
}

/// Each container that asks opens each of the GPUs, and is told its fraction of them, which must have a place on the pod.
fn validate_containers(containers: &[ContainerRequest<'_>], gpus: u32) -> Result<(), RequestError> {
    for container in containers.iter().filter(|c| c.vram.is_some()) {
        let vram = parse_bytes("stowage.dev/vram", container.vram)?;
        let least = LEAST_PER_GPU.times(gpus.into());
        if vram < least {
            return Err(RequestError::TooLittleVram {
                container: container.name.into(),
                vram,
                gpus,
                least,
            });
        }
        if container.name.len() > LONGEST_CONTAINER_NAME {
            return Err(RequestError::ContainerName {
                length: container.name.len(),
            });
        }
    }
    Ok(())
}

/// More CPU or memory than any node has. Sums of it do not overflow.
const MORE_THAN_ANY_NODE: u64 = u64::MAX >> 16;

/// What kube-scheduler allocates: no amount of it makes a pod unreadable. An amount too large to count is more than any node has;
/// one that no API server stores, such as a negative one, is none: an eviction is never said to free it.
pub(super) fn total_host_resources(containers: &[ContainerRequest<'_>]) -> HostResources {
    let amount = |text: Option<&str>, parse: fn(&str) -> Result<u64, QuantityError>| {
        Bytes(match text.map_or(Ok(0), parse) {
            Ok(amount) => amount.min(MORE_THAN_ANY_NODE),
            Err(QuantityError::TooLarge) => MORE_THAN_ANY_NODE,
            Err(_) => 0,
        })
    };
    let cpu =
        |c: &ContainerRequest<'_>| amount(c.cpu, |text| Ok(MilliCpu::parse_quantity(text)?.0));
    let memory = |c: &ContainerRequest<'_>| {
        amount(c.memory, |text| {
            Ok(Bytes::parse_quantity_rounding_up(text)?.0)
        })
    };
    HostResources {
        cpu: MilliCpu(total_pod_request(containers.iter().map(|c| (c.role, cpu(c)))).0),
        memory: total_pod_request(containers.iter().map(|c| (c.role, memory(c)))),
    }
}

fn sum_over<'a>(
    containers: &[ContainerRequest<'a>],
    amount: impl Fn(&ContainerRequest<'a>) -> Result<Bytes, RequestError>,
) -> Result<Bytes, RequestError> {
    let part = |container| amount(container).map(|amount| (container.role, amount));
    let parts: Vec<_> = containers.iter().map(part).collect::<Result<_, _>>()?;
    Ok(total_pod_request(parts))
}

/// The scheduler's pod-request formula over one amount per container, in the order in which they start.
pub fn total_pod_request(parts: impl IntoIterator<Item = (ContainerRole, Bytes)>) -> Bytes {
    let (mut running, mut sidecars, mut init_peak) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
    for (role, amount) in parts {
        match role {
            ContainerRole::Main => running += amount,
            ContainerRole::Sidecar => {
                running += amount;
                sidecars += amount;
                init_peak = init_peak.max(sidecars);
            }
            ContainerRole::Init => init_peak = init_peak.max(sidecars + amount),
        }
    }
    running.max(init_peak)
}

pub(super) fn parse_gpu_count(text: Option<&str>) -> Result<u32, RequestError> {
    let Some(text) = text else { return Ok(1) };
    match text.parse() {
        Ok(gpus @ 1..=MAX_GPUS) => Ok(gpus),
        _ => Err(RequestError::Gpus { text: text.into() }),
    }
}

pub(super) fn parse_sharing(text: Option<&str>) -> Result<Sharing, RequestError> {
    match text {
        None | Some("false") => Ok(Sharing::Shared),
        Some("true") => Ok(Sharing::Exclusive),
        Some(text) => Err(RequestError::Exclusive { text: text.into() }),
    }
}

const KV_CACHE: &str = "the annotation stowage.dev/kv-cache";

pub(super) fn parse_kv_cache(
    text: Option<&str>,
    vram: Bytes,
) -> Result<Option<Bytes>, RequestError> {
    match parse_optional_quantity(KV_CACHE, text, Bytes::parse_quantity_rounding_up)? {
        Some(kv_cache) if kv_cache > vram => Err(RequestError::KvCacheAboveVram { kv_cache, vram }),
        kv_cache => Ok(kv_cache),
    }
}

fn parse_bytes(what: &'static str, text: Option<&str>) -> Result<Bytes, RequestError> {
    Ok(parse_optional_quantity(what, text, Bytes::parse_quantity)?.unwrap_or_default())
}

fn parse_optional_quantity<T>(
    what: &'static str,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, QuantityError>,
) -> Result<Option<T>, RequestError> {
    text.map(|text| {
        parse(text).map_err(|error| RequestError::Quantity {
            what,
            text: text.into(),
            error,
        })
    })
    .transpose()
}

/// Kubernetes' default `terminationGracePeriodSeconds`.
pub const DEFAULT_GRACE_PERIOD: Millis = Millis::seconds(30);

static NO_LABELS: BTreeMap<String, String> = BTreeMap::new();
static NO_RESOURCES: BTreeSet<&str> = BTreeSet::new();

impl<'a> ContainerRequest<'a> {
    /// A main container that asks for nothing.
    pub const fn plain(name: &'a str) -> Self {
        Self {
            name,
            role: ContainerRole::Main,
            vram: None,
            plugin: PluginAmount::None,
            cpu: None,
            memory: None,
        }
    }
}

impl<'a> PodRequest<'a> {
    /// A pod of priority 0 without labels and annotations.
    pub fn plain(namespace: &'a str, containers: &'a [ContainerRequest<'a>]) -> Self {
        Self {
            namespace,
            labels: &NO_LABELS,
            priority_class: None,
            priority: 0,
            may_preempt: true,
            grace: DEFAULT_GRACE_PERIOD,
            containers,
            gpus: None,
            exclusive: None,
            model: None,
            kv_cache: None,
            service_account: None,
            resources: &NO_RESOURCES,
        }
    }
}

/// The longest name for which the pod's annotations have a place: the prefix of a key, at most 253 bytes long, ends with
/// `.container.stowage.dev`.
pub(crate) const LONGEST_CONTAINER_NAME: usize = 253 - ".container.stowage.dev".len();

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Recorded")]
pub struct VramContainer {
    pub name: Arc<str>,
    /// Over all GPUs of the pod; zero if it is unknown.
    pub vram: Bytes,
}

/// The longest name with which `container.NAME.gpu-memory.request` is still the name of an annotation's key.
const LONGEST_LIMITED_NAME: usize = 63 - "container..gpu-memory.request".len();

impl VramContainer {
    /// Whether its VRAM limits can be written, by annotations with its name.
    pub(crate) fn can_be_limited(&self) -> bool {
        self.name.len() <= LONGEST_LIMITED_NAME && self.vram > Bytes::ZERO
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Recorded {
    Name(Arc<str>),
    Container { name: Arc<str>, vram: Bytes },
}

impl From<Recorded> for VramContainer {
    fn from(recorded: Recorded) -> Self {
        match recorded {
            Recorded::Name(name) => Self {
                name,
                vram: Bytes::ZERO,
            },
            Recorded::Container { name, vram } => Self { name, vram },
        }
    }
}

#[cfg(test)]
mod asking_container_tests {
    use super::*;

    #[test]
    fn containers_that_an_earlier_version_recorded_are_read() {
        let read = |text| serde_json::from_str::<Vec<VramContainer>>(text).unwrap();
        let [old, new] = [
            read(r#"["engine"]"#),
            read(r#"[{"name":"engine","vram":7}]"#),
        ];
        assert_eq!(
            (&*old[0].name, old[0].vram, new[0].vram),
            ("engine", Bytes::ZERO, Bytes(7))
        );
        assert_eq!(read(&serde_json::to_string(&new).unwrap()), new);
    }
}
