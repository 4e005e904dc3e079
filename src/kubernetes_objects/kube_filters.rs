//! Pods and nodes as kube-scheduler's own filters see them: objects converted into the types of `scheduling::kube_filters`.
//!
//! A part of a pod that filters nodes and has no type there becomes an unsupported rule. What cannot be parsed is taken at its
//! worst: such a pod takes all of its node, such a rule is unsupported. GPUs and VRAM are left to the ledger.

mod amounts;
mod rules;

pub use amounts::amount;
pub(super) use rules::node_terms;

use super::{gates, is_finished, is_stand_in};
use k8s_openapi::api::core::v1::{Container, Node, Pod, PodSpec, Volume};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::kube_filters::node::{FilterNode, NodeTerm, Taint};
use stowage_scheduling::kube_filters::requirements::{
    NodeFootprint, Requirements, UnsupportedRule,
};
use stowage_scheduling::kube_filters::resources::ResourceList;
use stowage_scheduling::kube_filters::resources::{ANY_ADDRESS, HostPort};
use stowage_scheduling::vocabulary::gpu_wish::GpuSelector;
use stowage_scheduling::vocabulary::label_selector::Requirement;

/// Labels, names and values of one pod that are kept, and looked at for each node. An object may have a megabyte of them.
const MAX_RULES: usize = 1000;

/// A node, or `None` if it has no usable name.
pub fn filter_node(node: &Node) -> Option<FilterNode> {
    let name = NodeName::parse(node.metadata.name.as_deref()?).ok()?;
    let spec = node.spec.as_ref();
    let is_cordoned = spec.and_then(|spec| spec.unschedulable) == Some(true);
    let taints = spec
        .iter()
        .flat_map(|spec| &spec.taints)
        .flatten()
        .filter_map(rules::taint);
    let (allocatable, pods) = amounts::node_amounts(node);
    Some(FilterNode {
        name,
        labels: Arc::new(node.metadata.labels.clone().unwrap_or_default()),
        taints: taints
            .chain(is_cordoned.then(Taint::unschedulable))
            .collect(),
        allocatable,
        pods,
    })
}

/// What a pod takes of its node, or `None` if it has no node or has ended. A pod that is being deleted counts until it is gone.
pub fn footprint(pod: &Pod) -> Option<NodeFootprint> {
    let spec = pod.spec.as_ref().filter(|_| !is_finished(pod))?;
    Some(NodeFootprint {
        node: NodeName::parse(spec.node_name.as_deref()?).ok()?,
        amounts: amounts::pod_amounts(pod),
        ports: ports(spec).collect(),
        repels: rules::anti_affinities(pod),
        volumes: claims(pod).count().try_into().unwrap_or(u16::MAX),
        claims_devices: claims_devices(pod, spec),
    })
}

/// Whether the pod claims devices: by claims of its own, or by one that kube-scheduler made for an extended resource.
fn claims_devices(pod: &Pod, spec: &PodSpec) -> bool {
    let by_resource = pod
        .status
        .as_ref()
        .and_then(|status| status.extended_resource_claim_status.as_ref());
    let is_stand_in_pod = is_stand_in(&pod.metadata);
    spec.resource_claims.iter().flatten().next().is_some()
        || by_resource.is_some()
        || is_stand_in_pod
}

/// What a pod requires of a node.
pub fn requirements(pod: &Pod) -> Requirements {
    let preset = || {
        let node = pod.spec.as_ref()?.node_name.as_deref()?;
        (!node.is_empty()).then_some(UnsupportedRule::NodeNamePreset)
    };
    let requirements_of_successor = successor_requirements(pod);
    Requirements {
        unsupported: preset().or(requirements_of_successor.unsupported),
        ..requirements_of_successor
    }
}

/// What a bound pod required of its node, and its successor will require again.
pub fn successor_requirements(pod: &Pod) -> Requirements {
    let is_unread = is_stand_in(&pod.metadata)
        || pod
            .spec
            .as_ref()
            .is_some_and(|spec| count_rules(pod, spec) > MAX_RULES);
    if is_unread {
        // For those that come to its node after it.
        let amounts = ResourceList {
            others: Arc::default(),
            ..amounts::pod_amounts(pod)
        };
        let (repels, unsupported) = (
            rules::anti_affinities(pod),
            Some(UnsupportedRule::TooManyRules),
        );
        let requirements = Requirements {
            namespace: namespace(pod),
            amounts,
            repels,
            ..Requirements::default()
        };
        return Requirements {
            unsupported,
            ..requirements
        };
    }
    let Some(spec) = &pod.spec else {
        return Requirements::default();
    };
    let (node_affinity, unread) = rules::node_affinity(spec);
    Requirements {
        namespace: namespace(pod),
        labels: pod.metadata.labels.clone().unwrap_or_default(),
        amounts: amounts::pod_amounts(pod),
        ports: ports(spec).collect(),
        node_selector: spec.node_selector.clone().unwrap_or_default(),
        node_affinity,
        tolerations: spec
            .tolerations
            .iter()
            .flatten()
            .filter_map(rules::toleration)
            .collect(),
        repels: rules::anti_affinities(pod),
        claims: claims(pod).collect(),
        unsupported: unsupported(pod, spec).or(unread),
    }
}

/// Whether its node selector or its node affinity names a single node.
pub(crate) fn names_one_node(pod: &Pod) -> bool {
    selects_nodes(pod) && successor_requirements(pod).select_single_node()
}

/// What its node selector and its node affinity ask of GPUs.
pub fn gpu_wish(pod: &Pod) -> Option<GpuSelector> {
    if !selects_nodes(pod) {
        return None;
    }
    let Requirements {
        node_selector,
        node_affinity,
        ..
    } = successor_requirements(pod);
    let terms = node_affinity
        .unwrap_or_else(|| vec![NodeTerm::default()])
        .into_iter();
    GpuSelector::from_terms(terms.map(|NodeTerm { mut labels, .. }| {
        labels.extend(
            node_selector
                .iter()
                .map(|(key, value)| Requirement::equals(key, value)),
        );
        labels
    }))
}

fn selects_nodes(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .is_some_and(|spec| spec.node_selector.is_some() || spec.affinity.is_some())
}

fn namespace(pod: &Pod) -> String {
    pod.metadata
        .namespace
        .clone()
        .unwrap_or_else(|| "default".into())
}

/// Labels, names and values by which the pod and nodes or other pods are matched.
fn count_rules(pod: &Pod, spec: &PodSpec) -> usize {
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| {
        node.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let terms = required
        .into_iter()
        .flat_map(|required| &required.node_selector_terms);
    let in_terms: usize = terms
        .flat_map(|term| [&term.match_expressions, &term.match_fields])
        .flatten()
        .flatten()
        .map(|expression| 1 + expression.values.as_ref().map_or(0, Vec::len))
        .sum();
    let resources = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    let resources = resources.filter_map(|container| container.resources.as_ref());
    let resources = resources
        .flat_map(|resources| [&resources.limits, &resources.requests])
        .flatten();
    pod.metadata.labels.as_ref().map_or(0, BTreeMap::len)
        + spec.node_selector.as_ref().map_or(0, BTreeMap::len)
        + spec.tolerations.as_ref().map_or(0, Vec::len)
        + spec.volumes.as_ref().map_or(0, Vec::len)
        + ports(spec).count()
        + rules::count_anti_affinity_rules(spec)
        + resources.map(BTreeMap::len).sum::<usize>()
        + in_terms
}

/// Whether the pod requires other pods near it, spreads over a topology, and has volumes that may be bound to a place: rules
/// about what a cluster has already.
pub fn rules_of_running_clusters(pod: &Pod) -> [bool; 3] {
    let of = |rule: &dyn Fn(&PodSpec) -> bool| pod.spec.as_ref().is_some_and(rule);
    let has_volumes = |spec: &PodSpec| spec.volumes.iter().flatten().any(may_restrict_nodes);
    [
        of(&rules::requires_pod_affinity),
        of(&spreads),
        of(&has_volumes),
    ]
}

fn spreads(spec: &PodSpec) -> bool {
    let mut constraints = spec.topology_spread_constraints.iter().flatten();
    constraints.any(|constraint| constraint.when_unsatisfiable != "ScheduleAnyway")
}

/// The first part of the pod that filters nodes in a way not supported here.
fn unsupported(pod: &Pod, spec: &PodSpec) -> Option<UnsupportedRule> {
    if gates(pod).has_other_gates {
        Some(UnsupportedRule::SchedulingGate)
    } else if rules::requires_inter_pod_affinity(spec) {
        Some(UnsupportedRule::InterPodAffinity)
    } else if spreads(spec) {
        Some(UnsupportedRule::TopologySpread)
    } else if spec.resource_claims.iter().flatten().next().is_some() {
        Some(UnsupportedRule::ResourceClaims)
    } else if spec.volumes.iter().flatten().any(may_restrict_nodes) {
        Some(UnsupportedRule::Volumes)
    } else {
        None
    }
}

/// The pod's persistent volume claims, by name. One of a generic ephemeral volume is named after pod and volume.
fn claims(pod: &Pod) -> impl Iterator<Item = Arc<str>> {
    let volumes = pod.spec.iter().flat_map(|spec| &spec.volumes).flatten();
    volumes.filter_map(
        |volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some(claim.claim_name.as_str().into()),
            (None, Some(_)) => {
                Some(format!("{}-{}", pod.metadata.name.as_deref()?, volume.name).into())
            }
            (None, None) => None,
        },
    )
}

/// The claims that are there still when the pod is gone.
pub(crate) fn lasting_claims(pod: &Pod) -> Arc<[Arc<str>]> {
    let volumes = pod.spec.iter().flat_map(|spec| &spec.volumes).flatten();
    let claims = volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref());
    claims
        .map(|claim| claim.claim_name.as_str().into())
        .collect()
}

/// Whether a volume may restrict the pod's nodes: not if any node can provide it, nor if it has a claim, which is evaluated by
/// itself. Some disks can be mounted only once.
fn may_restrict_nodes(volume: &Volume) -> bool {
    let is_anywhere = volume.config_map.is_some()
        || volume.csi.is_some()
        || volume.downward_api.is_some()
        || volume.empty_dir.is_some()
        || volume.git_repo.is_some()
        || volume.host_path.is_some()
        || volume.image.is_some()
        || volume.nfs.is_some()
        || volume.persistent_volume_claim.is_some()
        || volume.ephemeral.is_some()
        || volume.projected.is_some()
        || volume.secret.is_some();
    !is_anywhere
}

/// Host ports of all containers that run at the same time.
fn ports(spec: &PodSpec) -> impl Iterator<Item = HostPort> {
    let is_on_host = spec.host_network == Some(true);
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|container| is_sidecar(container));
    let ports = sidecars
        .chain(&spec.containers)
        .flat_map(|container| &container.ports)
        .flatten();
    ports.filter_map(move |port| {
        // With `hostNetwork` every container port is a host port.
        let number = port
            .host_port
            .filter(|port| *port > 0)
            .or(is_on_host.then_some(port.container_port));
        let set = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        Some(HostPort {
            ip: set(&port.host_ip).unwrap_or_else(|| ANY_ADDRESS.into()),
            protocol: set(&port.protocol).unwrap_or_else(|| "TCP".into()),
            port: number
                .and_then(|port| port.try_into().ok())
                .filter(|port| *port > 0)?,
        })
    })
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

#[cfg(test)]
mod tests;
