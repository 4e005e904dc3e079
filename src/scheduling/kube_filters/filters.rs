//! The verdict of kube-scheduler's filters on one pod and one node, filter by filter.
//!
//! The order is by how useful the reason is: what no eviction changes comes before what is merely in use. A refusal is certain;
//! an unknown verdict matters only if no filter refuses.

use super::node::{Effect, FilterNode};
use super::requirements::{Requirements, UnsupportedRule};
use super::resources::HostPort;
use super::resources::{CPU, EPHEMERAL_STORAGE, MEMORY, RequestedSums};
use super::volumes::{ATTACHED_ANYWHERE, VolumeRules};
use crate::coded::coded;
use crate::units::text::quantity_text;
use crate::units::{Bytes, plural};
use serde::Serialize;
use std::sync::Arc;

/// What kube-scheduler would answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FilterVerdict {
    Accepts,
    Rejects(FilterReason),
    /// No known filter refuses, but a rule is not understood here: no pod is evicted for this.
    Unsupported(UnsupportedRule),
}

coded! {
    /// The filter that refuses, with its figures. CPU is in thousandths of a core, other resources in bytes or pieces; texts have
    /// them as manifests do. With it goes whether another node of the kind would do.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize)]
    #[serde(rename_all = "kebab-case", tag = "code")]
    pub enum FilterReason: bool {
        "unknown-node" UnknownNode,
            "the API server has shown no node with this name"
            => false;
        "tainted" Tainted { key: String, effect: Effect },
            "the node has the taint {key}:{effect}, which the pod does not tolerate"
            => false;
        "not-selected" NotSelected,
            "the node does not match the pod's node selector or required node affinity"
            => false;
        "insufficient-allocatable" InsufficientAllocatable { resource: Arc<str>, asked: u64, allocatable: u64 },
            "the pod asks for {}, and the node has {} in all", of_resource(resource, *asked), amount(resource, *allocatable)
            => false;
        "too-many-pods" TooManyPods { allowed: u64 },
            "the node allows {} and has that many", plural(*allowed, "pod")
            => true;
        "insufficient-free" InsufficientFree { resource: Arc<str>, asked: u64, left: u64 },
            "the pod asks for {}, and the node has {} left", of_resource(resource, *asked), amount(resource, *left)
            => true;
        "volume-elsewhere" VolumeElsewhere,
            "a volume of the pod cannot be used on the node, or none can be provisioned there"
            => false;
        "host-port-in-use" HostPortInUse { port: HostPort },
            "the host port {port} of the node is in use"
            => true;
    }
}

/// The pods that are or will be on the node, as far as one verdict is concerned.
pub(super) struct NodeOccupancy<'a, P> {
    pub machine: &'a FilterNode,
    pub taken: &'a RequestedSums,
    pub ports: P,
    /// What the pod's volumes ask of the node.
    pub volumes: &'a VolumeRules<'a>,
    /// Volumes of the pods that are or will be there.
    pub attached: usize,
    /// A rule of those pods that is not supported.
    pub unsupported: Option<UnsupportedRule>,
}

/// `64 CPU`, `60Gi of ephemeral-storage`, `2 of rdma/ib`.
fn of_resource(resource: &str, asked: u64) -> String {
    match resource {
        CPU => format!("{} CPU", amount(resource, asked)),
        _ => format!("{} of {resource}", amount(resource, asked)),
    }
}

/// The amount of a resource as manifests write it: `500m`, `60Gi`, `2`.
fn amount(resource: &str, amount: u64) -> String {
    match resource {
        CPU if amount.is_multiple_of(1000) => (amount / 1000).to_string(),
        CPU => format!("{amount}m"),
        MEMORY | EPHEMERAL_STORAGE => quantity_text(Bytes(amount)),
        _ if resource.starts_with(HUGE_PAGES) => quantity_text(Bytes(amount)),
        _ => amount.to_string(),
    }
}

/// Prefix of the resources of huge pages.
const HUGE_PAGES: &str = "hugepages-";

pub(super) fn classify<'a, P>(pod: &Requirements, present: NodeOccupancy<'a, P>) -> FilterVerdict
where
    P: Iterator<Item = &'a HostPort> + Clone,
{
    let NodeOccupancy {
        machine,
        taken,
        ports,
        volumes,
        attached,
        unsupported,
    } = present;
    let reason = by_the_node_alone(pod, volumes, machine)
        .or_else(|| by_resources(pod, machine, taken))
        .or_else(|| by_ports(pod, ports));
    let may_lack_attachments =
        !pod.claims.is_empty() && attached + pod.claims.len() > ATTACHED_ANYWHERE;
    let attach_limit = may_lack_attachments.then_some(UnsupportedRule::AttachLimit);
    let unsupported = pod
        .unsupported
        .or(volumes.unsupported())
        .or(unsupported)
        .or(attach_limit);
    match (reason, unsupported) {
        (Some(reason), _) => FilterVerdict::Rejects(reason),
        (None, Some(unsupported)) => FilterVerdict::Unsupported(unsupported),
        (None, None) => FilterVerdict::Accepts,
    }
}

/// NodeUnschedulable, TaintToleration, NodeAffinity, VolumeBinding, VolumeZone, and NodeResourcesFit on an empty node.
fn by_the_node_alone(
    pod: &Requirements,
    volumes: &VolumeRules<'_>,
    machine: &FilterNode,
) -> Option<FilterReason> {
    if let Some(taint) = machine.untolerated(&pod.tolerations) {
        return Some(FilterReason::Tainted {
            key: taint.key.clone(),
            effect: taint.effect,
        });
    }
    if !pod.selects(machine) {
        return Some(FilterReason::NotSelected);
    }
    if !volumes.take(machine) {
        return Some(FilterReason::VolumeElsewhere);
    }
    let mut asked = pod.amounts.named();
    asked.find_map(|(resource, asked)| {
        let allocatable = machine.allocatable.of_resource(resource);
        let too_small = || FilterReason::InsufficientAllocatable {
            resource: resource.into(),
            asked,
            allocatable,
        };
        (asked > allocatable).then(too_small)
    })
}

/// NodeResourcesFit. A resource that the pod does not request may be overcommitted.
fn by_resources(
    pod: &Requirements,
    machine: &FilterNode,
    taken: &RequestedSums,
) -> Option<FilterReason> {
    if taken.pods >= machine.pods {
        return Some(FilterReason::TooManyPods {
            allowed: machine.pods,
        });
    }
    let mut asked = pod.amounts.named();
    asked.find_map(|(resource, asked)| {
        let left = machine
            .allocatable
            .of_resource(resource)
            .saturating_sub(taken.of_resource(resource));
        (asked > left).then(|| FilterReason::InsufficientFree {
            resource: resource.into(),
            asked,
            left,
        })
    })
}

/// NodePorts.
fn by_ports<'a>(
    pod: &Requirements,
    taken: impl Iterator<Item = &'a HostPort> + Clone,
) -> Option<FilterReason> {
    let is_taken = |port: &&HostPort| taken.clone().any(|other| port.conflicts_with(other));
    pod.ports
        .iter()
        .find(is_taken)
        .map(|port| FilterReason::HostPortInUse { port: port.clone() })
}
