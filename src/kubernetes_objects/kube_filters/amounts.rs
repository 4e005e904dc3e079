//! Resource quantities of pods and nodes, added up as kube-scheduler does.
//!
//! A container that was resized in place counts with the largest of its request, its allocation and its running resources. For
//! pod-level resources that are resized in place only the spec is used.

use super::super::{VRAM, containers};
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Node, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use stowage_scheduling::kube_filters::resources::{
    AmountsByResource, CPU, ContainerResourceList, ResourceList,
};
use stowage_scheduling::units::{Bytes, MilliCpu, QuantityError};
use stowage_scheduling::vocabulary::demand::ContainerRole;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;

type Quantities = BTreeMap<String, Quantity>;

/// The resource name for the number of pods that a node takes.
const PODS: &str = "pods";

/// A node's allocatable resources, and how many pods it takes. A quantity that cannot be parsed counts as none.
pub fn node_amounts(node: &Node) -> (ResourceList, u64) {
    let allocatable = node
        .status
        .iter()
        .flat_map(|status| &status.allocatable)
        .flatten();
    let mut named = AmountsByResource::new();
    for (name, quantity) in allocatable.filter(|(name, _)| is_kube_resource(name)) {
        named.insert(name, amount(name, &quantity.0).unwrap_or(0));
    }
    let pods = named.remove(PODS).unwrap_or(0);
    (ResourceList::from_amounts(&named), pods)
}

/// A pod's resources. A quantity that cannot be parsed counts as more than any node has.
pub fn pod_amounts(pod: &Pod) -> ResourceList {
    let Some(spec) = &pod.spec else {
        return ResourceList::default();
    };
    let amounts = |(role, container)| ContainerResourceList {
        role,
        amounts: container_amounts(pod, role, container),
    };
    let containers: Vec<_> = containers(spec).map(amounts).collect();
    let pod_level = spec.resources.as_ref().map(requested).unwrap_or_default();
    ResourceList::for_pod(&containers, &pod_level, &named_amounts(&spec.overhead))
}

fn container_amounts<'a>(
    pod: &'a Pod,
    role: ContainerRole,
    container: &'a Container,
) -> AmountsByResource<'a> {
    let requested = container
        .resources
        .as_ref()
        .map(requested)
        .unwrap_or_default();
    let Some(status) = status_of(pod, role, container) else {
        return requested;
    };
    let running = status
        .resources
        .as_ref()
        .map(|resources| named_amounts(&resources.requests))
        .unwrap_or_default();
    let granted = larger(running, named_amounts(&status.allocated_resources));
    // A resize that is infeasible on the node does not count.
    if is_resize_infeasible(pod) {
        granted
    } else {
        larger(requested, granted)
    }
}

/// An init container that has ended takes nothing, so its status is ignored.
fn status_of<'a>(
    pod: &'a Pod,
    role: ContainerRole,
    container: &Container,
) -> Option<&'a ContainerStatus> {
    let status = pod.status.as_ref()?;
    let statuses = match role {
        ContainerRole::Main => &status.container_statuses,
        ContainerRole::Sidecar => &status.init_container_statuses,
        ContainerRole::Init => return None,
    };
    statuses
        .iter()
        .flatten()
        .find(|status| status.name == container.name)
}

fn is_resize_infeasible(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten();
    let is_pending = |type_: &str, reason: Option<&str>| {
        type_ == "PodResizePending" && reason == Some("Infeasible")
    };
    conditions
        .into_iter()
        .any(|condition| is_pending(&condition.type_, condition.reason.as_deref()))
}

fn larger<'a>(
    mut one: AmountsByResource<'a>,
    other: AmountsByResource<'a>,
) -> AmountsByResource<'a> {
    for (name, amount) in other {
        let largest = one.entry(name).or_default();
        *largest = amount.max(*largest);
    }
    one
}

/// The requests, and the limits that a missing request defaults to.
fn requested(resources: &ResourceRequirements) -> AmountsByResource<'_> {
    let mut requested = named_amounts(&resources.limits);
    requested.extend(named_amounts(&resources.requests));
    requested
}

fn named_amounts(quantities: &Option<Quantities>) -> AmountsByResource<'_> {
    let classified = quantities
        .iter()
        .flatten()
        .filter(|(name, _)| is_kube_resource(name));
    classified
        .map(|(name, quantity)| (name.as_str(), amount(name, &quantity.0).unwrap_or(u64::MAX)))
        .collect()
}

/// Whether kube-scheduler's own filters check the resource: GPUs and their memory are left to the ledger.
fn is_kube_resource(resource: &str) -> bool {
    resource != VRAM && !PluginResource::is_plugin_resource(resource)
}

/// A quantity in thousandths of a core, whole bytes or pieces, by the resource's name.
pub fn amount(name: &str, text: &str) -> Result<u64, QuantityError> {
    match name {
        CPU => MilliCpu::parse_quantity(text).map(|cpu| cpu.0),
        _ => Bytes::parse_quantity_rounding_up(text).map(|bytes| bytes.0),
    }
}
