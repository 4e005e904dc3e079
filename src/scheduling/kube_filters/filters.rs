//! The verdict of kube-scheduler's filters on one pod and one node, filter by filter.
//!
//! The order is by how useful the reason is: what no eviction changes comes before what is merely in use. A refusal is certain;
//! an unknown verdict matters only if no filter refuses.

use super::node::{FilterNode, TaintEffect, UNSCHEDULABLE_TAINT};
use super::requirements::{Requirements, UnsupportedRule};
use super::resources::HostPort;
use super::resources::{CPU, EPHEMERAL_STORAGE, MEMORY, RequestedSums};
use super::volumes::{MIN_ATTACH_LIMIT, VolumeRules};
use crate::coded::coded;
use crate::units::text::format_quantity;
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
        "tainted" Tainted { key: String, effect: TaintEffect },
            "{}", taint_text(key, *effect)
            => false;
        "not-selected" NotSelected,
            "the node does not match the pod's node selector or required node affinity"
            => false;
        "insufficient-allocatable" InsufficientAllocatable { resource: Arc<str>, asked: u64, allocatable: u64 },
            "the pod asks for {}, and the node has {} in all", amount_of_resource(resource, *asked), format_amount(resource, *allocatable)
            => false;
        "too-many-pods" TooManyPods { allowed: u64 },
            "the node allows {} and has that many", plural(*allowed, "pod")
            => true;
        "insufficient-free" InsufficientFree { resource: Arc<str>, asked: u64, left: u64 },
            "the pod asks for {}, and the node has {} left", amount_of_resource(resource, *asked), format_amount(resource, *left)
            => true;
        "volume-elsewhere" VolumeElsewhere,
            "a volume of the pod cannot be used on the node, or none can be provisioned there"
            => false;
        // Never of a verdict on one node, because the claim may be about to be seen.
        "no-claim" NoClaim { claim: Arc<str> },
            "the persistent volume claim {claim} of the pod does not exist"
            => false;
        "host-port-in-use" HostPortInUse { port: HostPort },
            "the host port {port} of the node is in use"
            => true;
    }
}

/// The pods that are or will be on the node, as far as one verdict is concerned.
pub(super) struct NodeOccupancy<'a, P> {
    pub machine: &'a FilterNode,
    pub requested: &'a RequestedSums,
    pub ports: P,
    /// What the pod's volumes ask of the node.
    pub volumes: &'a VolumeRules<'a>,
    /// Volumes of the pods that are or will be there.
    pub attached: usize,
    /// A rule of those pods that is not supported.
    pub unsupported: Option<UnsupportedRule>,
}

fn taint_text(key: &str, effect: TaintEffect) -> String {
    match key {
        UNSCHEDULABLE_TAINT => "the node is cordoned".into(),
        _ => format!("the node has the taint {key}:{effect}, which the pod does not tolerate"),
    }
}

/// `64 CPU`, `60Gi of ephemeral-storage`, `2 of rdma/ib`.
fn amount_of_resource(resource: &str, requested: u64) -> String {
    match resource {
        CPU => format!("{} CPU", format_amount(resource, requested)),
        _ => format!("{} of {resource}", format_amount(resource, requested)),
    }
}

/// The amount of a resource as manifests write it: `500m`, `60Gi`, `2`.
fn format_amount(resource: &str, amount: u64) -> String {
    match resource {
        CPU if amount.is_multiple_of(1000) => (amount / 1000).to_string(),
        CPU => format!("{amount}m"),
        MEMORY | EPHEMERAL_STORAGE => format_quantity(Bytes(amount)),
        _ if resource.starts_with(HUGE_PAGES_PREFIX) => format_quantity(Bytes(amount)),
        _ => amount.to_string(),
    }
}

/// Prefix of the resources of huge pages.
const HUGE_PAGES_PREFIX: &str = "hugepages-";

pub(super) fn run_filters<'a, P>(
    pod: &Requirements,
    occupancy: NodeOccupancy<'a, P>,
) -> FilterVerdict
where
    P: Iterator<Item = &'a HostPort> + Clone,
{
    let NodeOccupancy {
        machine,
        requested: taken,
        ports,
        volumes,
        attached,
        unsupported,
    } = occupancy;
    let reason = reject_by_node(pod, volumes, machine)
        .or_else(|| reject_by_resources(pod, machine, taken))
        .or_else(|| reject_by_ports(pod, ports));
    let may_lack_attachments =
        !pod.claims.is_empty() && attached + pod.claims.len() > MIN_ATTACH_LIMIT;
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
fn reject_by_node(
    pod: &Requirements,
    volumes: &VolumeRules<'_>,
    machine: &FilterNode,
) -> Option<FilterReason> {
    if let Some(taint) = machine.first_untolerated_taint(&pod.tolerations) {
        return Some(FilterReason::Tainted {
            key: taint.key.clone(),
            effect: taint.effect,
        });
    }
    if !pod.matches_node(machine) {
        return Some(FilterReason::NotSelected);
    }
    if !volumes.accept(machine) {
        return Some(FilterReason::VolumeElsewhere);
    }
    let mut amounts = pod.amounts.nonzero();
    amounts.find_map(|(resource, asked)| {
        let allocatable = machine.allocatable.get(resource);
        let too_small = || FilterReason::InsufficientAllocatable {
            resource: resource.into(),
            asked,
            allocatable,
        };
        (asked > allocatable).then(too_small)
    })
}

/// NodeResourcesFit. A resource that the pod does not request may be overcommitted.
fn reject_by_resources(
    pod: &Requirements,
    machine: &FilterNode,
    taken: &RequestedSums,
) -> Option<FilterReason> {
    if taken.pods >= machine.pods {
        return Some(FilterReason::TooManyPods {
            allowed: machine.pods,
        });
    }
    let mut amounts = pod.amounts.nonzero();
    amounts.find_map(|(resource, asked)| {
        let left = machine
            .allocatable
            .get(resource)
            .saturating_sub(taken.get(resource));
        (asked > left).then(|| FilterReason::InsufficientFree {
            resource: resource.into(),
            asked,
            left,
        })
    })
}

/// NodePorts.
fn reject_by_ports<'a>(
    pod: &Requirements,
    taken: impl Iterator<Item = &'a HostPort> + Clone,
) -> Option<FilterReason> {
    let is_taken = |port: &&HostPort| taken.clone().any(|other| port.conflicts_with(other));
    pod.ports
        .iter()
        .find(is_taken)
        .map(|port| FilterReason::HostPortInUse { port: port.clone() })
}
