//! Pods and nodes for tests of plans, in few words.

use super::question::{CapacityQuestion, NodeTemplate, PodToPlace, TemplateGpu, TemplateHost};
use crate::capacity_plan::geometry::Geometry;
use crate::capacity_plan::gpu_types::GpuType;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, PodKey};
use stowage_scheduling::kube_filters::{Requirements, ResourceList};
use stowage_scheduling::policy::{Class, Policy};
use stowage_scheduling::testkit::{demand_of, reclassified};
use stowage_scheduling::units::{Bytes, MilliCpu, Percent};
use stowage_scheduling::vocabulary::classification::PodTraits;
use stowage_scheduling::vocabulary::demand::{
    ContainerRequest, Demand, PluginAmount, PodRequest, Sharing,
};
use stowage_scheduling::vocabulary::headroom::Headroom;

/// The built-in policy without headroom, with these classes before its own: each takes the pods of its label `class`.
pub fn policy(classes: &[(&str, Option<&[&str]>)]) -> Policy {
    let class = |(name, shares_with): &(&str, Option<&[&str]>)| {
        let mut class = Class::new(name);
        class.matches.labels = BTreeMap::from([("class".into(), (*name).into())]);
        class.shares_with =
            shares_with.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
        class
    };
    let built_in = Policy::default();
    let all = classes
        .iter()
        .map(class)
        .chain(built_in.classes().iter().cloned())
        .collect();
    let mut policy = built_in.with_classes(all).unwrap();
    policy.settings.headroom = Headroom::uniform(Percent::default());
    policy
}

/// A pod of so many GiB on each of so many GPUs.
pub fn pod(name: &str, gib: u64, gpus: u32, sharing: Sharing) -> PodToPlace {
    pod_with_demand(name, demand_of(gib << 30, gpus, sharing, 0))
}

/// Pod that shares one GPU, with so many GiB.
pub fn shared_pod(name: &str, gib: u64) -> PodToPlace {
    pod(name, gib, 1, Sharing::Shared)
}

/// The pod with the label `class`.
pub fn with_class(pod: PodToPlace, class: &str, policy: &Policy) -> PodToPlace {
    let traits = PodTraits {
        labels: BTreeMap::from([("class".into(), class.into())]),
        ..(*pod.demand.traits).clone()
    };
    PodToPlace {
        demand: reclassified(pod.demand, traits, policy),
        ..pod
    }
}

/// Pod that requests GPUs of a device plugin.
pub fn plugin_pod(name: &str, resource: &str, count: u32) -> PodToPlace {
    let amount = count.to_string();
    let containers = [ContainerRequest {
        plugin: PluginAmount::One {
            resource,
            amount: &amount,
        },
        ..ContainerRequest::plain("main")
    }];
    let request = PodRequest {
        resources: &BTreeSet::from([resource]),
        ..PodRequest::plain("default", &containers)
    };
    pod_with_demand(
        name,
        Demand::from_pod(&request, &Policy::default()).unwrap(),
    )
}

/// The pod with a CPU request, in cores.
pub fn with_cpu(mut pod: PodToPlace, cores: u64) -> PodToPlace {
    pod.requirements.amounts = ResourceList {
        cpu: MilliCpu(cores * 1000),
        ..ResourceList::default()
    };
    pod
}

/// Nodes of so many GPUs of so many GiB.
pub fn nodes(gpus: u32, gib: u64) -> NodeTemplate {
    NodeTemplate {
        name: "node".into(),
        gpus,
        gpu: TemplateGpu {
            name: "test".into(),
            model: GpuModel::parse("test").unwrap(),
            total: Bytes::gib(gib),
            gpu_type: None,
        },
        geometry: None,
        plugin_devices: None,
        labels: BTreeMap::new(),
        taints: Vec::new(),
        host: TemplateHost::Described {
            cpu: None,
            memory: None,
        },
        max_nodes: None,
    }
}

/// Nodes of so many GPUs of a known type, each cut into the MIG slices of `mig`.
pub fn nodes_with_gpu(gpus: u32, gpu: &str, mig: Option<&str>) -> NodeTemplate {
    let known = GpuType::find(gpu).unwrap();
    NodeTemplate {
        gpu: TemplateGpu {
            name: known.name.into(),
            model: known.model(),
            total: known.total(),
            gpu_type: Some(known),
        },
        geometry: mig.map(|text| Geometry::parse(text, known).unwrap()),
        ..nodes(gpus, 1)
    }
}

/// Question in which each pod is a workload of its own.
pub fn question(
    policy: Policy,
    pods: impl IntoIterator<Item = PodToPlace>,
    node_kinds: impl IntoIterator<Item = NodeTemplate>,
) -> CapacityQuestion {
    let pods = pods
        .into_iter()
        .enumerate()
        .map(|(workload, pod)| PodToPlace { workload, ..pod })
        .collect();
    let node_kinds = node_kinds.into_iter().enumerate();
    let named = |(place, kind): (usize, NodeTemplate)| match place {
        0 => kind,
        _ => NodeTemplate {
            name: format!("{}-{place}", kind.name),
            ..kind
        },
    };
    CapacityQuestion {
        policy: Arc::new(policy),
        pods,
        node_kinds: node_kinds.map(named).collect(),
    }
}

fn pod_with_demand(name: &str, demand: Demand) -> PodToPlace {
    PodToPlace {
        key: PodKey::parse("default", name).unwrap(),
        workload: 0,
        source: format!("test: Pod default/{name}").into(),
        demand,
        requirements: Requirements {
            namespace: "default".into(),
            ..Requirements::default()
        },
    }
}
