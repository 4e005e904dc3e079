//! Pods and nodes as a plan of capacity takes them: a pod without its present place, and a node as a kind of node.

use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::BTreeSet;
use std::sync::Arc;
use stowage_kubernetes_objects::{IdentityError, plugin_devices};
use stowage_kubernetes_objects::{
    asks_for_gpu, demand, devices_from_labels, is_finished, kube_filters, node_signs, pod_key,
    uses_claims_only,
};
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::kube_filters::{Requirements, UnsupportedRule};
use stowage_scheduling::policy::{NodeRules, Policy};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::{MAX_GPUS, RequestError};
use stowage_scheduling::vocabulary::device_plugin::PluginDevices;
use stowage_scheduling::vocabulary::node_signs::{NodeLabel, NodeWarning};
use stowage_sizing::capacity_plan::gpu_types::GpuType;
use stowage_sizing::capacity_plan::question::{
    HOSTNAME, NodeTemplate, PodToPlace, TemplateGpu, TemplateHost,
};
use stowage_sizing::capacity_plan::shorthand::node_name;

/// What a pod is to a plan.
#[derive(Debug)]
pub enum PlannedPod {
    ToPlace {
        pod: Box<PodToPlace>,
        /// Rules of it that no plan knows.
        dropped: Vec<DroppedRule>,
    },
    /// It requests no GPU, has ended, or is being deleted.
    Irrelevant,
    /// kube-scheduler allocates its devices by its claims.
    UsesClaims,
    /// Its name or its request cannot be understood.
    Unidentified(IdentityError),
    Invalid(RequestError),
}

/// A rule of a pod that no plan takes into account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum DroppedRule {
    #[error("required pod affinity")]
    PodAffinity,
    #[error("topologySpreadConstraints with DoNotSchedule")]
    TopologySpread,
    #[error("a volume that may be bound to nodes")]
    Volumes,
    /// The nodes of a plan have names of their own.
    #[error("a selector of one node by its name")]
    NodeName,
}

/// A node that is no kind of node for GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeTemplateError {
    #[error(
        "it shows no GPU: no labels nvidia.com/gpu.count and nvidia.com/gpu.memory, and nvidia.com/* is not allocatable; add the labels, or \
         describe the nodes as gpus=8,gpu=A100-80GB"
    )]
    NoGpu,
    #[error("its label {0} cannot be right")]
    Label(NodeLabel),
    /// Something else than Stowage and the device plugins that it serves hands out its GPUs.
    #[error("{0}")]
    OtherOwner(NodeWarning),
}

/// The pod, wherever it is now. `source` says where it comes from.
pub fn pod_to_place(pod: &Pod, workload: usize, source: Arc<str>, policy: &Policy) -> PlannedPod {
    if is_finished(pod) || pod.metadata.deletion_timestamp.is_some() {
        return PlannedPod::Irrelevant;
    }
    if uses_claims_only(pod) {
        return PlannedPod::UsesClaims;
    }
    if !asks_for_gpu(pod) {
        return PlannedPod::Irrelevant;
    }
    let key = match pod_key(pod) {
        Ok(key) => key,
        Err(error) => return PlannedPod::Unidentified(error),
    };
    let demand = match demand(pod, policy) {
        Ok(demand) => demand,
        Err(error) => return PlannedPod::Invalid(error),
    };
    let mut requirements = kube_filters::successor_requirements(pod);
    let dropped = drop_unsupported_rules(pod, &mut requirements);
    PlannedPod::ToPlace {
        pod: Box::new(PodToPlace {
            key,
            workload,
            source,
            demand,
            requirements,
        }),
        dropped,
    }
}

/// Takes the rules that no plan knows out of the requirements, and names them. A plan knows required anti-affinity, and a gate
/// is for the time before.
fn drop_unsupported_rules(pod: &Pod, requirements: &mut Requirements) -> Vec<DroppedRule> {
    let [affinity, spread, volumes] = kube_filters::rules_of_running_clusters(pod);
    // Volumes are where the pod is now, or nowhere yet.
    let volumes = volumes || !requirements.claims.is_empty();
    requirements.claims = Arc::default();
    if requirements
        .unsupported
        .is_some_and(|rule| rule != UnsupportedRule::Unreadable)
    {
        requirements.unsupported = None;
    }
    let rules = [
        (affinity, DroppedRule::PodAffinity),
        (spread, DroppedRule::TopologySpread),
        (volumes, DroppedRule::Volumes),
        (remove_node_names(requirements), DroppedRule::NodeName),
    ];
    rules
        .into_iter()
        .filter(|(is_there, _)| *is_there)
        .map(|(_, rule)| rule)
        .collect()
}

/// Whether there were rules about the node's name: its label for the host, or the field itself.
fn remove_node_names(requirements: &mut Requirements) -> bool {
    let mut is_bound = requirements.node_selector.remove(HOSTNAME).is_some();
    let Some(terms) = &mut requirements.node_affinity else {
        return is_bound;
    };
    for term in terms.iter_mut() {
        let before = term.labels.len();
        term.labels
            .retain(|requirement| requirement.key != HOSTNAME);
        is_bound |= term.labels.len() < before || !std::mem::take(&mut term.name).is_empty();
    }
    // Any node matches a term that was about names alone.
    if is_bound && terms.iter().any(|term| term.labels.is_empty()) {
        requirements.node_affinity = None;
    }
    is_bound
}

/// The kind of node that such a node is: with labels of these keys only, and without a name of its own.
pub fn node_template(
    node: &Node,
    labels: &BTreeSet<&str>,
    rules: &NodeRules,
) -> Result<NodeTemplate, NodeTemplateError> {
    let (labelled, plugin) = (devices_from_labels(node), plugin_devices(node));
    let offered: u32 = plugin.values().copied().max().unwrap_or(0);
    let owner = rules
        .other_allocator(&node_signs(node, &labelled))
        .filter(|_| labelled != Ok(None));
    let devices = match (labelled, owner) {
        (labelled, _) if offered > 0 => labelled.unwrap_or_default(),
        (_, Some(owner)) => return Err(NodeTemplateError::OtherOwner(owner)),
        (Err(label), None) => return Err(NodeTemplateError::Label(label)),
        (Ok(devices), None) => devices,
    };
    let devices = devices.unwrap_or_default();
    let gpus = if devices.is_empty() {
        offered.min(MAX_GPUS)
    } else {
        devices.len() as u32
    };
    if gpus == 0 {
        return Err(NodeTemplateError::NoGpu);
    }
    let gpu = match devices.first() {
        Some(device) => template_gpu(device.model.clone(), device.total),
        None => template_gpu(
            GpuModel::parse("unknown").map_err(|_| NodeTemplateError::NoGpu)?,
            Bytes::ZERO,
        ),
    };
    let machine = kube_filters::filter_node(node);
    let node_labels = node.metadata.labels.iter().flatten();
    let kept_labels = node_labels.filter(|(key, _)| labels.contains(key.as_str()));
    Ok(NodeTemplate {
        name: node_name(&gpu.name),
        gpus,
        gpu,
        geometry: None,
        plugin_devices: Some(plugin).filter(|devices: &PluginDevices| !devices.is_empty()),
        labels: kept_labels
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
        taints: machine
            .iter()
            .flat_map(|machine| machine.taints.iter().cloned())
            .collect(),
        host: match machine {
            Some(machine) if machine.pods > 0 => TemplateHost::Observed {
                allocatable: machine.allocatable,
                pods: machine.pods,
            },
            // Without a status nothing is known.
            _ => TemplateHost::Described {
                cpu: None,
                memory: None,
            },
        },
        max_nodes: None,
    })
}

fn template_gpu(model: GpuModel, total: Bytes) -> TemplateGpu {
    let gpu_type = GpuType::find(model.as_str()).ok();
    let name = gpu_type.map_or_else(|| model.to_string(), |gpu_type| gpu_type.name.to_owned());
    TemplateGpu {
        name,
        model,
        total,
        gpu_type,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn planned(spec: Value) -> PlannedPod {
        let pod = json!({ "metadata": { "name": "p" }, "spec": spec });
        pod_to_place(
            &serde_json::from_value(pod).unwrap(),
            0,
            "test".into(),
            &Policy::default(),
        )
    }

    fn containers(limits: Value) -> Value {
        json!([{ "name": "c", "resources": { "limits": limits } }])
    }

    #[test]
    fn a_pod_is_planned_without_the_rules_that_no_plan_knows_and_they_are_named() {
        let claim = json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "v" } }]);
        let spec = json!({ "containers": containers(json!({ "stowage.dev/vram": "1Gi" })), "volumes": claim });
        let PlannedPod::ToPlace { pod, dropped } = planned(spec) else {
            panic!("it asks for VRAM")
        };
        assert_eq!(
            (pod.requirements.claims.len(), dropped),
            (0, vec![DroppedRule::Volumes])
        );
        let spread =
            json!([{ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule" }]);
        let spec = json!({
            "containers": containers(json!({ "stowage.dev/vram": "1Gi" })), "topologySpreadConstraints": spread
        });
        let PlannedPod::ToPlace { pod, dropped } = planned(spec) else {
            panic!("it asks for VRAM")
        };
        assert_eq!(
            (pod.requirements.unsupported, dropped),
            (None, vec![DroppedRule::TopologySpread])
        );
    }

    #[test]
    fn required_anti_affinity_is_planned_and_required_affinity_is_named() {
        let term =
            json!([{ "labelSelector": { "matchLabels": { "app": "x" } }, "topologyKey": "zone" }]);
        let found = |kind: &str| {
            let required =
                json!({ kind: { "requiredDuringSchedulingIgnoredDuringExecution": term } });
            let limits = containers(json!({ "stowage.dev/vram": "1Gi" }));
            planned(json!({ "containers": limits, "affinity": required }))
        };
        let PlannedPod::ToPlace { pod, dropped } = found("podAntiAffinity") else {
            panic!("it asks for VRAM")
        };
        assert_eq!(
            (
                pod.requirements.repels.len(),
                pod.requirements.unsupported,
                dropped
            ),
            (1, None, vec![])
        );
        let PlannedPod::ToPlace { pod, dropped } = found("podAffinity") else {
            panic!("it asks for VRAM")
        };
        assert_eq!(
            (pod.requirements.unsupported, dropped),
            (None, vec![DroppedRule::PodAffinity])
        );
    }

    #[test]
    fn a_pod_that_is_bound_to_a_node_by_name_may_go_to_any() {
        let found = |rules: Value| {
            let mut spec =
                json!({ "containers": containers(json!({ "stowage.dev/vram": "1Gi" })) });
            spec.as_object_mut()
                .unwrap()
                .extend(rules.as_object().unwrap().clone());
            let PlannedPod::ToPlace { pod, dropped } = planned(spec) else {
                panic!("it asks for VRAM")
            };
            assert_eq!(dropped, [DroppedRule::NodeName]);
            pod.requirements
        };
        let by_label =
            found(json!({ "nodeSelector": { "kubernetes.io/hostname": "a", "zone": "b" } }));
        assert_eq!(
            by_label.node_selector.into_iter().collect::<Vec<_>>(),
            [("zone".into(), "b".into())]
        );
        let affinity = |term: Value| {
            let required = json!({ "nodeSelectorTerms": [term] });
            found(
                json!({ "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } } }),
            )
        };
        let host = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["a"] });
        let zone = json!({ "key": "zone", "operator": "Exists" });
        let name = json!({ "key": "metadata.name", "operator": "In", "values": ["a"] });
        assert_eq!(
            affinity(json!({ "matchExpressions": [host] })).node_affinity,
            None
        );
        assert_eq!(
            affinity(json!({ "matchFields": [name] })).node_affinity,
            None
        );
        let both = affinity(json!({ "matchExpressions": [host, zone] }))
            .node_affinity
            .unwrap();
        assert_eq!(both[0].labels.len(), 1);
    }

    #[test]
    fn a_node_whose_label_cannot_be_right_is_no_kind_of_node_and_its_label_is_named() {
        for (label, value) in [
            ("nvidia.com/gpu.memory", "42505273344"),
            ("nvidia.com/gpu.memory", "17592186044416"),
            ("nvidia.com/gpu.count", "0"),
        ] {
            let mut labels =
                json!({ "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920" });
            labels[label] = json!(value);
            let node =
                serde_json::from_value(json!({ "metadata": { "name": "n", "labels": labels } }))
                    .unwrap();
            let refused = node_template(&node, &BTreeSet::new(), &NodeRules::default())
                .expect_err(value)
                .to_string();
            assert!(
                refused.contains(label) && refused.contains(value),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_node_whose_gpus_another_plugin_hands_out_is_no_kind_of_node_and_the_resource_is_named() {
        for resource in ["volcano.sh/vgpu-memory", "example.com/gpu-slice"] {
            let labels = json!({ "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920" });
            let status = json!({ "allocatable": { resource: "4" } });
            let node = json!({ "metadata": { "name": "n", "labels": labels }, "status": status });
            let node = serde_json::from_value(node).unwrap();
            let refused = node_template(&node, &BTreeSet::new(), &NodeRules::default())
                .expect_err(resource)
                .to_string();
            assert!(refused.contains(resource), "{refused}");
        }
    }

    #[test]
    fn pods_without_a_gpu_and_invalid_ones_are_told_apart() {
        assert!(matches!(
            planned(json!({ "containers": [] })),
            PlannedPod::Irrelevant
        ));
        let claims = json!({ "containers": [], "resourceClaims": [{ "name": "gpu" }] });
        assert!(matches!(planned(claims), PlannedPod::UsesClaims));
        let half = json!({ "containers": containers(json!({ "stowage.dev/vram": "0.5" })) });
        assert!(matches!(
            planned(half),
            PlannedPod::Invalid(RequestError::Quantity { .. })
        ));
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
        let kind = node_template(
            &node(labels, allocatable),
            &BTreeSet::from(["zone"]),
            &NodeRules::default(),
        )
        .unwrap();
        assert_eq!(
            (kind.gpus, &*kind.gpu.name, kind.labels.len()),
            (4, "A100-80GB", 1)
        );
        assert_eq!(kind.plugin_devices.unwrap().len(), 1);
        assert!(matches!(
            kind.host,
            TemplateHost::Observed { pods: 110, .. }
        ));
        let none = node(json!({}), json!({ "cpu": "8" }));
        assert_eq!(
            node_template(&none, &BTreeSet::new(), &NodeRules::default()),
            Err(NodeTemplateError::NoGpu)
        );
    }
}
