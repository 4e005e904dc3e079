//! Pods and nodes as a plan of capacity takes them: a pod without its present place, and a node as a kind of node.

use super::{Unidentified, plugin_devices};
use super::{
    asks_by_claims, asks_for_gpu, demand, devices_from_labels, identity_of_name, is_finished, kube_filters,
};
use crate::capacity_plan::gpu_types::GpuType;
use crate::capacity_plan::question::{NodeTemplate, PodToPlace, TemplateGpu, TemplateHost};
use crate::capacity_plan::shorthand::node_name;
use crate::ids::GpuModel;
use crate::scheduling::kube_filters::UnsupportedRule;
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::demand::{MAX_GPUS, RequestError};
use crate::scheduling::vocabulary::device_plugin::PluginDevices;
use crate::units::Bytes;
use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What a pod is to a plan.
#[derive(Debug)]
pub enum PlannedPod {
    ToPlace {
        pod: Box<PodToPlace>,
        /// A rule of it that no plan knows.
        unjudged: Option<UnsupportedRule>,
    },
    /// It requests no GPU, has ended, or is being deleted.
    Irrelevant,
    /// kube-scheduler allocates its devices by its claims.
    ByClaims,
    /// Its name or its request cannot be understood.
    Unidentified(Unidentified),
    Invalid(RequestError),
}

/// A node that is no kind of node for GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoTemplate {
    #[error(
        "it shows no GPU: no labels nvidia.com/gpu.count and nvidia.com/gpu.memory, and nvidia.com/* is not allocatable; add the labels, or \
         describe the nodes as gpus=8,gpu=A100-80GB"
    )]
    NoGpu,
    #[error("its label nvidia.com/gpu.product cannot be read")]
    Product,
}

/// The pod, wherever it is now. `source` says where it comes from.
pub fn pod_to_place(pod: &Pod, workload: usize, source: Arc<str>, policy: &Policy) -> PlannedPod {
    if is_finished(pod) || pod.metadata.deletion_timestamp.is_some() {
        return PlannedPod::Irrelevant;
    }
    if asks_by_claims(pod) {
        return PlannedPod::ByClaims;
    }
    if !asks_for_gpu(pod) {
        return PlannedPod::Irrelevant;
    }
    let key = match identity_of_name(pod) {
        Ok(key) => key,
        Err(error) => return PlannedPod::Unidentified(error),
    };
    let demand = match demand(pod, policy) {
        Ok(demand) => demand,
        Err(error) => return PlannedPod::Invalid(error),
    };
    let mut requirements = kube_filters::successor_requirements(pod);
    // Volumes are where the pod is now, or nowhere yet.
    let volumes = (!requirements.claims.is_empty()).then_some(UnsupportedRule::Volumes);
    requirements.claims = Arc::default();
    let unjudged = requirements.unjudged.filter(|rule| *rule != UnsupportedRule::Unreadable);
    if unjudged.is_some() {
        requirements.unjudged = None;
    }
    let unjudged = unjudged.filter(|rule| *rule != UnsupportedRule::SchedulingGate).or(volumes);
    PlannedPod::ToPlace {
        pod: Box::new(PodToPlace { key, workload, source, demand, requirements }),
        unjudged,
    }
}

/// The kind of node that such a node is: with labels of these keys only, and without a name of its own.
pub fn node_template(node: &Node, labels: &BTreeSet<&str>) -> Result<NodeTemplate, NoTemplate> {
    let (devices, plugin) = (devices_from_labels(node).unwrap_or_default(), plugin_devices(node));
    let offered: u32 = plugin.values().copied().max().unwrap_or(0);
    let gpus = if devices.is_empty() { offered.min(MAX_GPUS) } else { devices.len() as u32 };
    if gpus == 0 {
        return Err(NoTemplate::NoGpu);
    }
    let gpu = match devices.first() {
        Some(device) => template_gpu(device.model.clone(), device.total),
        None => template_gpu(GpuModel::parse("unknown").map_err(|_| NoTemplate::Product)?, Bytes::ZERO),
    };
    let machine = kube_filters::machine(node);
    let own = node.metadata.labels.iter().flatten();
    let kept = own.filter(|(key, _)| labels.contains(key.as_str()));
    Ok(NodeTemplate {
        name: node_name(&gpu.name),
        gpus,
        gpu,
        geometry: None,
        plugin_devices: Some(plugin).filter(|devices: &PluginDevices| !devices.is_empty()),
        labels: kept.map(|(key, value)| (key.clone(), value.clone())).collect(),
        taints: machine.iter().flat_map(|machine| machine.taints.iter().cloned()).collect(),
        host: match machine {
            Some(machine) if machine.pods > 0 => {
                TemplateHost::Observed { allocatable: machine.allocatable, pods: machine.pods }
            }
            // Without a status nothing is known.
            _ => TemplateHost::Described { cpu: None, memory: None },
        },
        at_most: None,
    })
}

fn template_gpu(model: GpuModel, total: Bytes) -> TemplateGpu {
    let known = GpuType::find(model.as_str()).ok();
    let name = known.map_or_else(|| model.to_string(), |known| known.name.to_owned());
    TemplateGpu { name, model, total, known }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn planned(spec: Value) -> PlannedPod {
        let pod = json!({ "metadata": { "name": "p" }, "spec": spec });
        pod_to_place(&serde_json::from_value(pod).unwrap(), 0, "test".into(), &Policy::default())
    }

    fn containers(limits: Value) -> Value {
        json!([{ "name": "c", "resources": { "limits": limits } }])
    }

    #[test]
    fn a_pod_is_planned_without_the_rules_that_no_plan_knows_and_they_are_named() {
        let claim = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "v" } }]);
        let spec =
            json!({ "containers": containers(json!({ "stowage.dev/vram": "1Gi" })), "volumes": claim });
        let PlannedPod::ToPlace { pod, unjudged } = planned(spec) else { panic!("it asks for VRAM") };
        assert_eq!((pod.requirements.claims.len(), unjudged), (0, Some(UnsupportedRule::Volumes)));
        let spread = json!([{ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule" }]);
        let spec = json!({
            "containers": containers(json!({ "stowage.dev/vram": "1Gi" })), "topologySpreadConstraints": spread
        });
        let PlannedPod::ToPlace { pod, unjudged } = planned(spec) else { panic!("it asks for VRAM") };
        assert_eq!((pod.requirements.unjudged, unjudged), (None, Some(UnsupportedRule::TopologySpread)));
    }

    #[test]
    fn pods_without_a_gpu_and_invalid_ones_are_told_apart() {
        assert!(matches!(planned(json!({ "containers": [] })), PlannedPod::Irrelevant));
        let claims = json!({ "containers": [], "resourceClaims": [{ "name": "gpu" }] });
        assert!(matches!(planned(claims), PlannedPod::ByClaims));
        let half = json!({ "containers": containers(json!({ "stowage.dev/vram": "0.5" })) });
        assert!(matches!(planned(half), PlannedPod::Invalid(RequestError::Quantity { .. })));
    }

    #[test]
    fn a_node_is_a_kind_by_its_gpus_and_the_labels_that_matter() {
        let node = |labels: Value, allocatable: Value| -> Node {
            let node = json!({ "metadata": { "name": "n", "labels": labels }, "status": { "allocatable": allocatable } });
            serde_json::from_value(node).unwrap()
        };
        let labels = json!({
            "nvidia.com/gpu.count": "4", "nvidia.com/gpu.memory": "81920", "zone": "a", "rack": "7",
            "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
        });
        let allocatable = json!({ "cpu": "8", "pods": "110", "nvidia.com/gpu": "4" });
        let kind = node_template(&node(labels, allocatable), &BTreeSet::from(["zone"])).unwrap();
        assert_eq!((kind.gpus, &*kind.gpu.name, kind.labels.len()), (4, "A100-80GB", 1));
        assert_eq!(kind.plugin_devices.unwrap().len(), 1);
        assert!(matches!(kind.host, TemplateHost::Observed { pods: 110, .. }));
        let none = node(json!({}), json!({ "cpu": "8" }));
        assert_eq!(node_template(&none, &BTreeSet::new()), Err(NoTemplate::NoGpu));
    }
}
