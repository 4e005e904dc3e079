//! The contract with pods and nodes: the keys and their meaning, and the conversion between Kubernetes objects and the core's
//! types.
//!
//! The only place that knows both sides. It decides nothing and sends no request.

pub mod admission;
mod audited_pod;
mod binding;
mod conditions;
mod disruption_budget;
mod disruption_info;
mod gpu_models;
mod images;
pub mod kube_filters;
mod node_signs;
pub mod port;
pub mod pruning;
mod reservation;
mod resource_slice;
mod storage;
mod watch_pauses;

pub use audited_pod::{audited_binding, audited_reservation, has_started};
pub use binding::{IN_MEMORY_CDI_KIND, binding, nri_keys};
pub(crate) use conditions::wakeable_request;
pub use conditions::{
    CONDITIONS, DISRUPTION_TARGET_CONDITION, Gates, PLACED_CONDITION, PLAN_GATE,
    WAKEABLE_CONDITION, disruption_target_condition, gates, nominated_node, placed_condition,
    planner_gate_removal, wakeable_condition,
};
pub use disruption_budget::budget;
pub(crate) use disruption_info::is_mirror;
pub use disruption_info::{
    member_without_placement, observed_disruption_info as disruption, workload,
};
pub use images::{engine, node_images, start_progress};
pub use node_signs::{
    devices_from_labels, feature_discovery, node_signs, plugin_devices, resources,
    with_recorded_uuids,
};
pub use reservation::{
    REQUEUED_CONDITION, RESERVED_CONDITION, ReservationMessage, requeued_condition,
    reservation_ended_condition,
};
pub use resource_slice::device_slice;
pub use storage::StorageResource;
pub use watch_pauses::with_growing_pauses;

use k8s_openapi::api::core::v1::{Container, Node, Pod, PodCondition, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, InvalidName, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use stowage_scheduling::policy::expression::is_within_bounds;
use stowage_scheduling::policy::{Mode, Policy};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::classification::{Classification, PodTraits};
use stowage_scheduling::vocabulary::demand::{
    ContainerRequest, ContainerRole, Demand, MAX_ANNOTATIONS, MAX_GPUS, MAX_GRACE_PERIOD,
    PluginAmount, PodRequest, RequestError, Sharing,
};
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::node::NodeIdentity;
use stowage_scheduling::vocabulary::placement::Reservation;

/// The extended resource that a pod requests and a node advertises.
pub const VRAM: &str = "stowage.dev/vram";

/// Annotations a user sets on a pod.
pub mod user_annotations {
    pub const GPUS: &str = "stowage.dev/gpus";
    pub const EXCLUSIVE: &str = "stowage.dev/exclusive";
    pub const MODEL: &str = "stowage.dev/model";
    pub const KV_CACHE: &str = "stowage.dev/kv-cache";
    /// On a bound pod: its engine is to wake, or is awake. Any text; a new one for each request.
    pub const WAKE_REQUESTED: &str = "stowage.dev/wake-requested";
    /// What KServe downloads for the pod: it names the model if it is one of the Hugging Face hub.
    pub(crate) const KSERVE_SOURCE: &str =
        "internal.serving.kserve.io/storage-initializer-sourceuri";
    /// Labels that name the model where no annotation does: llm-d's and KServe's.
    pub(crate) const MODEL_LABELS: [&str; 2] =
        ["llm-d.ai/model", "serving.kserve.io/inferenceservice"];
}

/// Annotations Stowage writes into a Binding.
pub mod binding_annotations {
    pub const DEVICES: &str = "stowage.dev/devices";
    pub const GRANTED: &str = "stowage.dev/vram-granted";
    /// `true` if the pod has its GPUs to itself, `false` if it shares them.
    pub const EXCLUSIVE: &str = "stowage.dev/exclusive-granted";
    pub const MEMORY_FRACTION: &str = "stowage.dev/gpu-memory-fraction";
    /// Suffix of a container's name, where several containers request VRAM: that container's part of the pod's fraction.
    pub(crate) const CONTAINER_FRACTION_SUFFIX: &str = ".container.stowage.dev/gpu-memory-fraction";
    pub const VISIBLE_DEVICES: &str = "stowage.dev/visible-devices";
    /// The leader that wrote the Binding, as `LEASE-UID/TRANSITIONS/NONCE`.
    pub const LEADER_EPOCH: &str = "stowage.dev/leader-epoch";
    /// UIDs of the engines that lend to the pod, comma-separated; missing if it borrows nothing.
    pub const BORROWED_FROM: &str = "stowage.dev/borrowed-from";
    /// What sets the containers' VRAM limits, if they have any: `gpu-fractioning`.
    pub const VRAM_LIMITS: &str = "stowage.dev/vram-limits";
    pub(crate) const BY_FRACTIONING: &str = "gpu-fractioning";
    /// Prefix of a container's name: the devices that the NVIDIA NRI plugin injects into it.
    pub const NRI_PREFIX: &str = "nvidia.cdi.k8s.io/container.";
    /// Prefix of a container's name: what gpu-fractioning gives it, by the four suffixes.
    pub(crate) const LIMITS_PREFIX: &str = "nvidia.com/container.";
    pub(crate) const LIMITED_DEVICES_SUFFIX: &str = ".gpus.devices";
    pub(crate) const COMPUTE_MODE_SUFFIX: &str = ".gpu-compute.mode";
    /// VRAM on each GPU that is always there for the container: the driver ends a borrower for it.
    pub(crate) const VRAM_REQUEST_SUFFIX: &str = ".gpu-memory.request";
    /// VRAM on each GPU beyond which the container gets none.
    pub(crate) const VRAM_LIMIT_SUFFIX: &str = ".gpu-memory.limit";
}

/// The annotation of what stands for an object that is larger than Stowage reads. Nobody can write it: no key in Kubernetes has a
/// blank.
pub(crate) const BEYOND_BOUND: &str = "Stowage: beyond bound";

/// The annotation with the length of those that are dropped. Nobody can write it, either.
pub(crate) const DROPPED_BYTES: &str = "Stowage: dropped bytes";

/// Whether an object is a stand-in for one beyond its bound, of which little more than its name is known.
pub fn is_stand_in(metadata: &ObjectMeta) -> bool {
    metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(BEYOND_BOUND))
}

/// Kubernetes' default for pods without one.
const DEFAULT_GRACE_SECONDS: i64 = 30;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    #[error("the pod has no metadata.{0}")]
    Missing(&'static str),
    #[error(transparent)]
    Invalid(#[from] InvalidName),
}

/// A pod's UID, and its namespace and name.
pub fn identity(pod: &Pod) -> Result<(PodUid, PodKey), IdentityError> {
    let uid = pod
        .metadata
        .uid
        .as_deref()
        .ok_or(IdentityError::Missing("uid"))?;
    Ok((PodUid::parse(uid)?, pod_key(pod)?))
}

/// A pod's namespace and name, for a pod that may not have been created yet.
pub fn pod_key(pod: &Pod) -> Result<PodKey, IdentityError> {
    let name = pod
        .metadata
        .name
        .as_deref()
        .ok_or(IdentityError::Missing("name"))?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    Ok(PodKey::parse(namespace, name)?)
}

/// A pod's demand.
pub fn demand(pod: &Pod, policy: &Policy) -> Result<Demand, RequestError> {
    classified_demand(pod, |traits| policy.classify(traits))
}

/// A pod's demand, classified by `classify`, which may have the classification cached.
pub fn classified_demand(
    pod: &Pod,
    classify: impl FnOnce(&PodTraits) -> Classification,
) -> Result<Demand, RequestError> {
    if is_stand_in(&pod.metadata) {
        return Err(RequestError::TooLarge);
    }
    check_requests_equal_limits(pod)?;
    let demand = with_pod_request(pod, |request| Demand::from_request(request, classify))?;
    let (images, engine) = (images::pod_images(pod), images::engine(pod));
    let wish = kube_filters::gpu_wish(pod).map(Arc::new);
    check_annotation_size(pod, &demand)?;
    // No expression would hold for it, and its labels are its owner's choice.
    if has_no_node(pod) && !is_within_bounds(&demand.traits) {
        return Err(RequestError::TooLarge);
    }
    Ok(Demand {
        models: gpu_models::gpu_models(pod),
        wish,
        images,
        engine,
        ..demand
    })
}

/// Of extended resources Kubernetes takes no request without an equal limit. What the API server stored is equal; a file may differ.
fn check_requests_equal_limits(pod: &Pod) -> Result<(), RequestError> {
    for (_, container) in pod.spec.iter().flat_map(containers) {
        let Some(resources) = &container.resources else {
            continue;
        };
        let limits = resources.limits.as_ref();
        let of_gpus = resources
            .requests
            .iter()
            .flatten()
            .filter(|(name, _)| *name == VRAM || PluginResource::is_plugin_resource(name));
        for (name, request) in of_gpus {
            let (request, limit) = (Some(request), limits.and_then(|limits| limits.get(name)));
            let bytes = |amount: Option<&Quantity>| Bytes::parse_quantity(&amount?.0).ok();
            if request != limit && (bytes(request).is_none() || bytes(request) != bytes(limit)) {
                return Err(RequestError::UnequalRequest {
                    container: container.name.clone(),
                    resource: name.clone(),
                });
            }
        }
    }
    Ok(())
}

/// Whether a pod without a node can take the annotations of its Binding. Those of one that has a node may have them already.
fn check_annotation_size(pod: &Pod, demand: &Demand) -> Result<(), RequestError> {
    let annotations = pod
        .metadata
        .annotations
        .iter()
        .flatten()
        .filter(|_| has_no_node(pod));
    let length = |(key, value): (&String, &String)| match key == DROPPED_BYTES {
        true => value.parse().unwrap_or(0),
        false => key.len() + value.len(),
    };
    let bytes: usize = annotations.map(length).sum();
    let added = binding::max_added_bytes(demand);
    if bytes == 0 || demand.is_allocated_externally() || bytes + added <= MAX_ANNOTATIONS {
        return Ok(());
    }
    Err(RequestError::Annotations { bytes, added })
}

/// The demand of a pod whose devices kube-scheduler allocates by its claims.
pub fn claims_demand(pod: &Pod, classify: impl FnOnce(&PodTraits) -> Classification) -> Demand {
    let demand = with_pod_request(pod, |request| Demand::from_claims(request, classify));
    Demand {
        images: images::pod_images(pod),
        engine: images::engine(pod),
        ..demand
    }
}

/// Whether the pod names ResourceClaims and requests no GPU in any other way: fit is kube-scheduler's alone.
pub fn uses_claims_only(pod: &Pod) -> bool {
    let mut claims = pod
        .spec
        .iter()
        .flat_map(|spec| &spec.resource_claims)
        .flatten();
    claims.next().is_some() && !asks_for_gpu(pod)
}

/// Whether any container asks for `stowage.dev/vram`.
pub fn asks_for_vram(pod: &Pod) -> bool {
    pod.spec
        .iter()
        .flat_map(containers)
        .any(|(_, container)| requested_amount(container, VRAM).is_some())
}

/// Whether the pod names a resource of GPUs and asks for none of it: kube-scheduler asks Stowage all the same, by the name alone.
pub fn requests_zero_gpus(pod: &Pod) -> bool {
    let is_gpu = |name: &str| name == VRAM || PluginResource::is_plugin_resource(name);
    let mut named = pod
        .spec
        .iter()
        .flat_map(containers)
        .flat_map(|(_, container)| named_resources(container));
    named.any(is_gpu) && !asks_for_gpu(pod)
}

/// Whether the pod has ended, so that its GPUs are free.
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether the pod is being deleted and has no node: kube-scheduler ignores it from then on, whatever finalizers keep it.
pub fn is_deleted_without_node(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() && has_no_node(pod)
}

/// Whether the pod may still get a node.
pub fn is_pending(pod: &Pod) -> bool {
    has_no_node(pod) && !is_finished(pod) && pod.metadata.deletion_timestamp.is_none()
}

fn has_no_node(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .is_none_or(str::is_empty)
}

/// A pod as the ledger takes it, or `None` if it requests no GPU or cannot be identified. `reservation` is the one that its
/// condition describes.
///
/// A pending pod with an invalid request is left out: the answer to its filter request has the reason. A bound one counts with
/// the most that it could mean. How long it has run is computed by wall time, `now`.
pub fn observation(
    pod: &Pod,
    policy: &Policy,
    reservation: Option<Reservation>,
    now: jiff::Timestamp,
) -> Option<PodObservation> {
    classified_observation(
        pod,
        policy,
        &|traits| policy.classify(traits),
        reservation,
        now,
    )
}

/// A pod as the ledger takes it, classified by `classify`, which may have the classification cached.
pub fn classified_observation(
    pod: &Pod,
    policy: &Policy,
    classify: &dyn Fn(&PodTraits) -> Classification,
    reservation: Option<Reservation>,
    now: jiff::Timestamp,
) -> Option<PodObservation> {
    if !asks_for_gpu(pod) || is_finished(pod) {
        return None;
    }
    let (uid, key) = identity(pod).ok()?;
    let observed = Some(disruption_info::observed_disruption_info(pod, now));
    let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) else {
        let demand = waiting_demand(pod, policy.mode, classify)?;
        let reservation = reservation.filter(|_| !demand.is_allocated_externally());
        let mut waiting = ObservedWaiting {
            reservation,
            ..waiting(pod)
        };
        if waiting.gate == SchedulingGate::Planned && !uses_served_scheduler(pod, policy) {
            waiting.gate = SchedulingGate::Others;
        }
        let state = ObservedPhase::Waiting(waiting);
        return Some(PodObservation {
            uid,
            key,
            demand,
            state,
            observed,
        });
    };
    let node = NodeName::parse(node).ok()?;
    let demand =
        classified_demand(pod, classify).unwrap_or_else(|_| classified_worst_case(pod, classify));
    // A device plugin's GPUs are not recorded: such an annotation was not written by Stowage.
    let devices = recorded_devices(pod).filter(|_| !demand.is_allocated_externally());
    let demand = devices.as_ref().map_or(demand.clone(), |devices| {
        with_granted_amounts(pod, demand, devices)
    });
    let running_for = pod
        .status
        .as_ref()
        .and_then(|status| status.start_time.as_ref())
        .map(|start| elapsed_since(start.0, now));
    let state = ObservedPhase::Bound {
        node,
        devices,
        starting: is_starting(pod),
        ran: running_for,
    };
    Some(PodObservation {
        uid,
        key,
        demand,
        state,
        observed,
    })
}

/// Whether the pod's scheduler asks Stowage. Another one would place the pod where it likes once its gate is lifted.
fn uses_served_scheduler(pod: &Pod, policy: &Policy) -> bool {
    let scheduler = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduler_name.as_deref())
        .unwrap_or_default();
    scheduler.is_empty()
        || policy
            .planning
            .scheduler_names
            .iter()
            .any(|name| name == scheduler)
}

/// What keeps a pending pod from the scheduler, and where it is nominated; without its reservation.
pub fn waiting(pod: &Pod) -> ObservedWaiting {
    let Gates {
        has_planner_gate: ours,
        has_other_gates: others,
    } = gates(pod);
    let gate = match (ours, others) {
        (_, true) => SchedulingGate::Others,
        (true, false) => SchedulingGate::Planned,
        (false, false) => SchedulingGate::Open,
    };
    ObservedWaiting {
        reservation: None,
        gate,
        nominated: nominated_node(pod),
    }
}

/// The most that a pod could mean, for a pod that must be counted although its request is invalid.
pub fn worst_case(pod: &Pod, policy: &Policy) -> Demand {
    classified_worst_case(pod, |traits| policy.classify(traits))
}

/// The largest demand that a pod could mean. What its Binding recorded counts before annotations that were edited since.
fn classified_worst_case(pod: &Pod, classify: impl FnOnce(&PodTraits) -> Classification) -> Demand {
    let gpus = recorded_devices(pod).map(|devices| devices.len().to_string());
    with_pod_request(pod, |request| {
        let gpus = gpus.as_deref().or(request.gpus);
        let exclusive = annotation(pod, binding_annotations::EXCLUSIVE).or(request.exclusive);
        Demand::worst_case_classified(
            &PodRequest {
                gpus,
                exclusive,
                ..*request
            },
            classify,
        )
    })
}

/// The demand of a pending pod. In shadow mode an invalid request of a pod that uses a device plugin passes as well.
fn waiting_demand(
    pod: &Pod,
    mode: Mode,
    classify: &dyn Fn(&PodTraits) -> Classification,
) -> Option<Demand> {
    match classified_demand(pod, classify) {
        Ok(demand) => Some(demand),
        Err(_) if mode == Mode::Shadow => {
            Some(classified_worst_case(pod, classify)).filter(Demand::is_allocated_externally)
        }
        Err(_) => None,
    }
}

fn elapsed_since(start: jiff::Timestamp, now: jiff::Timestamp) -> Millis {
    Millis(u64::try_from(now.duration_since(start).as_millis()).unwrap_or(0))
}

/// Whether a bound pod's engine may be starting: the pod is not ready, and none of its containers has been restarted. A
/// container that has failed once profiles memory again at any time; waiting for it would close the GPU to engine starts for
/// ever. A pod without a status is on no real node.
fn is_starting(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let is_ready =
        |condition: &PodCondition| condition.type_ == "Ready" && condition.status == "True";
    let was_restarted = status
        .container_statuses
        .iter()
        .flatten()
        .any(|container| container.restart_count > 0);
    !status.conditions.iter().flatten().any(is_ready) && !was_restarted
}

/// The GPUs that its Binding recorded, if the record is readable. A list longer than a node's GPUs was not written by Stowage.
pub fn recorded_devices(pod: &Pod) -> Option<Arc<[GpuUuid]>> {
    let names = || annotation(pod, binding_annotations::DEVICES).map(|text| text.split(','));
    if names()?.nth(MAX_GPUS as usize).is_some() {
        return None;
    }
    names()?
        .map(|uuid| GpuUuid::parse(uuid.trim()).ok())
        .collect()
}

/// Whether its Binding says how much VRAM the driver keeps for its containers and lets them have.
pub(crate) fn has_vram_limits(pod: &Pod) -> bool {
    annotation(pod, binding_annotations::VRAM_LIMITS) == Some(binding_annotations::BY_FRACTIONING)
}

/// Whether its Binding says that engines lend it its VRAM.
pub fn borrows(pod: &Pod) -> bool {
    annotation(pod, binding_annotations::BORROWED_FROM).is_some_and(|lenders| !lenders.is_empty())
}

/// The VRAM its Binding granted it, over all its GPUs.
pub fn granted(pod: &Pod) -> Option<Bytes> {
    Bytes::parse_quantity(annotation(pod, binding_annotations::GRANTED)?).ok()
}

/// The VRAM limits that its Binding wrote for gpu-fractioning, on each of its GPUs, over its containers; `None` if it wrote none.
pub fn written_limit(pod: &Pod) -> Option<Bytes> {
    let limits = pod
        .metadata
        .annotations
        .iter()
        .flatten()
        .filter(|(key, _)| {
            key.starts_with(binding_annotations::LIMITS_PREFIX)
                && key.ends_with(binding_annotations::VRAM_LIMIT_SUFFIX)
        });
    let limits = limits.filter_map(|(_, value)| Bytes::parse_quantity(value).ok());
    limits.reduce(|sum, limit| sum + limit)
}

/// Whether any container asks a device plugin for a GPU.
pub fn asks_device_plugin(pod: &Pod) -> bool {
    pod.spec.iter().flat_map(containers).any(|(_, container)| {
        requested_resources(container).any(PluginResource::is_plugin_resource)
    })
}

/// Whether the pod requests a GPU in either way, so that the ledger tracks it.
pub fn asks_for_gpu(pod: &Pod) -> bool {
    asks_for_vram(pod) || asks_device_plugin(pod)
}

/// Whether its Binding granted it exclusive GPUs; `None` if the Binding does not say, as one written by an older version.
pub(crate) fn granted_exclusive(pod: &Pod) -> Option<bool> {
    annotation(pod, binding_annotations::EXCLUSIVE)?
        .parse()
        .ok()
}

/// The demand of a bound pod, with the amounts that its Binding granted, whatever its annotations were edited to since.
fn with_granted_amounts(pod: &Pod, demand: Demand, devices: &[GpuUuid]) -> Demand {
    let (gpus, granted) = (devices.len() as u32, granted(pod));
    // Without a record, a pod is exclusive if anything indicates it: it was granted more than it requested, or it requests it
    // now.
    let may_be_exclusive = || {
        let requested = annotation(pod, user_annotations::EXCLUSIVE);
        granted.is_some_and(|granted| granted > demand.vram())
            || requested.is_some_and(|text| text != "false")
    };
    match (
        granted_exclusive(pod).unwrap_or_else(may_be_exclusive),
        granted,
    ) {
        (true, _) => {
            let per_gpu = demand.vram().split(gpus);
            Demand {
                gpus,
                per_gpu,
                sharing: Sharing::Exclusive,
                ..demand
            }
        }
        (false, Some(granted)) => Demand {
            gpus,
            per_gpu: granted.split(gpus),
            sharing: Sharing::Shared,
            ..demand
        },
        (false, None) => demand,
    }
}

/// The Node object, and the machine it stands for; `None` for an object without a UID.
pub fn node_identity(node: &Node) -> Option<NodeIdentity> {
    let info = node
        .status
        .as_ref()
        .and_then(|status| status.node_info.as_ref());
    let ids = info.map(|info| [info.system_uuid.as_str(), info.machine_id.as_str()]);
    // Some firmware has zeros, or ones, for a UUID that nobody set.
    let is_set = |id: &&str| !id.chars().all(|c| "0fF-".contains(c));
    let machine = ids
        .filter(|ids| ids.iter().any(is_set))
        .map(|ids| ids.join("/").into());
    let created = node
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|created| created.0.as_second());
    Some(NodeIdentity {
        uid: node.metadata.uid.as_deref()?.into(),
        machine,
        created,
    })
}

fn with_pod_request<R>(pod: &Pod, use_request: impl FnOnce(&PodRequest<'_>) -> R) -> R {
    static NO_LABELS: BTreeMap<String, String> = BTreeMap::new();
    let spec = pod.spec.as_ref();
    let resources = spec
        .into_iter()
        .flat_map(containers)
        .flat_map(|(_, container)| requested_resources(container))
        .collect();
    let containers: Vec<ContainerRequest<'_>> = spec
        .into_iter()
        .flat_map(containers)
        .map(|(role, container)| container_request(role, container))
        .collect();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&NO_LABELS);
    let label = |key: &&str| labels.get(*key).map(String::as_str);
    let source =
        annotation(pod, user_annotations::KSERVE_SOURCE).filter(|uri| uri.starts_with("hf://"));
    let grace = spec
        .and_then(|s| s.termination_grace_period_seconds)
        .unwrap_or(DEFAULT_GRACE_SECONDS);
    use_request(&PodRequest {
        namespace: pod.metadata.namespace.as_deref().unwrap_or("default"),
        labels,
        priority_class: spec.and_then(|s| s.priority_class_name.as_deref()),
        priority: spec.and_then(|s| s.priority).unwrap_or(0),
        may_preempt: spec.and_then(|s| s.preemption_policy.as_deref()) != Some("Never"),
        grace: Millis::seconds(grace.try_into().unwrap_or(0)).min(MAX_GRACE_PERIOD),
        containers: &containers,
        gpus: annotation(pod, user_annotations::GPUS),
        exclusive: annotation(pod, user_annotations::EXCLUSIVE),
        model: annotation(pod, user_annotations::MODEL)
            .or(source)
            .or_else(|| user_annotations::MODEL_LABELS.iter().find_map(label)),
        kv_cache: annotation(pod, user_annotations::KV_CACHE),
        service_account: spec.and_then(|s| s.service_account_name.as_deref()),
        resources: &resources,
    })
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = (ContainerRole, &Container)> {
    let init = spec.init_containers.iter().flatten().map(|container| {
        match container.restart_policy.as_deref() {
            Some("Always") => (ContainerRole::Sidecar, container),
            _ => (ContainerRole::Init, container),
        }
    });
    init.chain(
        spec.containers
            .iter()
            .map(|container| (ContainerRole::Main, container)),
    )
}

fn container_request(role: ContainerRole, container: &Container) -> ContainerRequest<'_> {
    ContainerRequest {
        name: &container.name,
        role,
        vram: requested_amount(container, VRAM),
        plugin: plugin_amount(container),
        cpu: amount(container, "cpu"),
        memory: amount(container, "memory"),
    }
}

/// The request, or the limit it defaults to.
fn amount<'a>(container: &'a Container, resource: &str) -> Option<&'a str> {
    let resources = container.resources.as_ref()?;
    let find = |amounts: &'a Option<BTreeMap<String, Quantity>>| amounts.as_ref()?.get(resource);
    find(&resources.requests)
        .or_else(|| find(&resources.limits))
        .map(|quantity| quantity.0.as_str())
}

/// The requested amount of a resource; `None` if it is zero. What cannot be parsed may be any amount.
fn requested_amount<'a>(container: &'a Container, resource: &str) -> Option<&'a str> {
    amount(container, resource).filter(|text| Bytes::parse_quantity(text) != Ok(Bytes::ZERO))
}

fn plugin_amount(container: &Container) -> PluginAmount<'_> {
    let resources: BTreeSet<&str> = requested_resources(container)
        .filter(|resource| PluginResource::is_plugin_resource(resource))
        .collect();
    let Some(resource) = resources.first().copied() else {
        return PluginAmount::None;
    };
    let amount = amount(container, resource).unwrap_or_default();
    match resources.len() {
        1 => PluginAmount::One { resource, amount },
        _ => PluginAmount::Several { resource, amount },
    }
}

/// Names of the resources that a container requests.
fn requested_resources(container: &Container) -> impl Iterator<Item = &str> {
    named_resources(container).filter(|name| requested_amount(container, name).is_some())
}

/// Names of the resources that a container lists, also with an amount of zero.
fn named_resources(container: &Container) -> impl Iterator<Item = &str> {
    let lists = container
        .resources
        .iter()
        .flat_map(|resources| [&resources.requests, &resources.limits]);
    lists.flatten().flat_map(BTreeMap::keys).map(String::as_str)
}

fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

#[cfg(test)]
mod tests;
