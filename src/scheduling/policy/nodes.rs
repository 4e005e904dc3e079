//! Which nodes' GPUs are Stowage's to allocate: by what their Node objects show, and by which DRA drivers hand out GPUs.

use super::selection::pattern_matches;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::node_signs::{NodeSigns, NodeWarning};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What keeps Stowage's pods away from a node. Resources count where a node has any of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NodeRules {
    /// Extended resources by which something else than Stowage hands out NVIDIA GPUs. `nvidia.com/gpu`, `nvidia.com/gpu.shared`
    /// and `nvidia.com/mig-*` always do.
    #[schemars(extend("items" = {"format": "resource-pattern", "type": "string"}))]
    pub gpu_resources: Vec<String>,
    /// Extended resources that stand for no NVIDIA GPU, whatever their names say and `gpuResources` takes.
    #[schemars(extend("items" = {"format": "resource-pattern", "type": "string"}))]
    pub harmless_resources: Vec<String>,
    /// Labels that count as missing: of changes of MIG layouts and drivers, and of GPU feature discovery.
    #[schemars(extend("items" = {"format": "qualified-name", "type": "string"}))]
    pub ignored_labels: Vec<String>,
}

impl NodeRules {
    /// The warnings about a node with these devices, first those that keep pods away.
    pub fn warnings(
        &self,
        signs: &NodeSigns,
        devices: &[Device],
        is_reported: bool,
    ) -> Arc<[NodeWarning]> {
        let is_counted = |key: &str| !self.ignored_labels.iter().any(|ignored| ignored == key);
        let changes = signs.changes.iter().filter(|label| is_counted(&label.key));
        let labels = signs
            .label_warning(devices, is_reported)
            .filter(|warning| match warning {
                NodeWarning::UnreadableLabel { label } | NodeWarning::IgnoredLabel { label } => {
                    is_counted(&label.key)
                }
                _ => true,
            });
        // Without a GPU of its own, a node has nothing that could be handed out twice.
        let other_allocator = self.other_allocator(signs).filter(|_| !devices.is_empty());
        let changes = changes.map(|label| NodeWarning::GpusChanging {
            label: label.clone(),
        });
        other_allocator
            .into_iter()
            .chain(changes)
            .chain(labels)
            .collect()
    }

    /// The resource by which something else hands out the node's GPUs; if there is none, one of which that is unknown.
    pub fn other_allocator(&self, signs: &NodeSigns) -> Option<NodeWarning> {
        let is_in = |patterns: &[String], name: &str| {
            patterns
                .iter()
                .any(|pattern| pattern_matches(pattern, name))
        };
        let not_harmless = || {
            signs
                .resources
                .iter()
                .filter(|(name, _)| !is_in(&self.harmless_resources, name))
        };
        let declared = not_harmless().find(|(name, _)| is_in(&self.gpu_resources, name));
        let declared = declared.map(|(name, _)| NodeWarning::OtherAllocator {
            resource: name.clone(),
        });
        let unknown = || not_harmless().find(|(_, suggests_gpu)| **suggests_gpu);
        declared.or_else(|| {
            unknown().map(|(name, _)| NodeWarning::UnknownResource {
                resource: name.clone(),
            })
        })
    }
}

impl Default for NodeRules {
    /// The resources of HAMi, vGPU managers, Volcano, Alibaba Cloud, Koordinator, Elastic GPU, Tencent Cloud, TensorFusion, Run:ai
    /// and AMD; and those of integrated graphics and of network cards.
    fn default() -> Self {
        let all = |patterns: &[&str]| {
            patterns
                .iter()
                .map(|pattern| (*pattern).to_owned())
                .collect()
        };
        Self {
            gpu_resources: all(&[
                "nvidia.com/*gpu*",
                "volcano.sh/*gpu*",
                "aliyun.com/*gpu*",
                "koordinator.sh/*gpu*",
                "elasticgpu.io/*",
                "tencent.com/vcuda*",
                "tke.cloud.tencent.com/*gpu*",
                "tensor-fusion.ai/*",
                "run.ai/*",
                "amd.com/gpu*",
            ]),
            harmless_resources: all(&[
                "gpu.intel.com/*",
                "nvidia.com/hostdev*",
                "nvidia.com/*rdma*",
                "nvidia.com/*sriov*",
                "nvidia.com/*mlnx*",
                "nvidia.com/*nic*",
                "nvidia.com/*roce*",
                "nvidia.com/*switchdev*",
                "nvidia.com/bf*",
            ]),
            ignored_labels: Vec::new(),
        }
    }
}

/// Dynamic resource allocation (DRA): kube-scheduler allocates the devices that drivers publish as ResourceSlices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct DraRules {
    /// Drivers whose devices are GPUs: Stowage allocates nothing on a node for which one of them publishes a device. Slices of
    /// other drivers do not matter.
    #[schemars(extend("items" = {"format": "subdomain", "type": "string"}))]
    pub gpu_drivers: Vec<String>,
}

impl DraRules {
    pub(crate) fn is_gpu_driver(&self, driver: &str) -> bool {
        self.gpu_drivers
            .iter()
            .any(|gpu_driver| gpu_driver == driver)
    }
}

impl Default for DraRules {
    fn default() -> Self {
        Self {
            gpu_drivers: vec!["gpu.nvidia.com".into()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::h100;
    use crate::units::Bytes;
    use crate::vocabulary::node_signs::NodeLabel;

    fn signs(resources: &[&str]) -> NodeSigns {
        let resources = resources
            .iter()
            .map(|name| (Arc::from(*name), name.contains("gpu")))
            .collect();
        NodeSigns {
            resources,
            ..NodeSigns::default()
        }
    }

    fn warnings(rules: &NodeRules, signs: &NodeSigns, is_reported: bool) -> Vec<&'static str> {
        let devices = [h100("n", 0), h100("n", 1)];
        rules
            .warnings(signs, &devices, is_reported)
            .iter()
            .map(NodeWarning::code)
            .collect()
    }

    #[test]
    fn a_known_allocator_is_named_before_an_unknown_one_and_a_harmless_resource_is_never_named() {
        let rules = NodeRules::default();
        let both = signs(&[
            "example.com/gpu",
            "gpu.intel.com/i915",
            "volcano.sh/vgpu-number",
        ]);
        let resource = "volcano.sh/vgpu-number".into();
        assert_eq!(
            rules.other_allocator(&both),
            Some(NodeWarning::OtherAllocator { resource })
        );
        let text = rules.other_allocator(&both).unwrap().to_string();
        assert!(
            text.contains("volcano.sh/vgpu-number") && text.contains("nodes.harmlessResources"),
            "{text}"
        );
        let harmless = NodeRules {
            harmless_resources: vec!["volcano.sh/*".into(), "*.intel.com/*".into()],
            ..NodeRules::default()
        };
        let text = harmless.other_allocator(&both).unwrap().to_string();
        assert!(
            text.contains("example.com/gpu") && text.contains("nodes.gpuResources"),
            "{text}"
        );
        let known = NodeRules {
            gpu_resources: vec!["example.com/fpga".into()],
            ..harmless
        };
        assert_eq!(
            known
                .other_allocator(&signs(&["example.com/fpga"]))
                .unwrap()
                .code(),
            "other-allocator"
        );
    }

    #[test]
    fn a_node_without_gpus_is_nobodys() {
        let rules = NodeRules::default();
        assert!(
            rules
                .warnings(&signs(&["amd.com/gpu"]), &[], false)
                .is_empty()
        );
        assert_eq!(
            warnings(&rules, &signs(&["amd.com/gpu"]), false),
            ["other-allocator"]
        );
    }

    #[test]
    fn labels_that_contradict_nvml_are_reported_and_do_not_count() {
        let rules = NodeRules::default();
        let labelled = |gpus, memory| NodeSigns {
            labelled: Some((gpus, memory)),
            ..NodeSigns::default()
        };
        let told = ["contradicted-labels"];
        assert_eq!(warnings(&rules, &labelled(4, Bytes::gib(80)), true), told);
        assert_eq!(warnings(&rules, &labelled(2, Bytes::gib(40)), true), told);
        assert!(
            warnings(&rules, &labelled(2, Bytes::gib(79)), true).is_empty(),
            "NVML keeps some for itself"
        );
        assert!(
            warnings(&rules, &labelled(4, Bytes::gib(40)), false).is_empty(),
            "nothing says otherwise"
        );
        let slices = [gpu_with_parent()];
        let signs = labelled(1, Bytes::gib(80));
        assert!(
            rules.warnings(&signs, &slices, true).is_empty(),
            "labels of a card that is cut"
        );
    }

    fn gpu_with_parent() -> Device {
        Device {
            parent: Some(h100("n", 1).uuid),
            total: Bytes::gib(10),
            ..h100("n", 0)
        }
    }

    #[test]
    fn a_label_that_cannot_be_right_is_told_even_where_nvml_counts_unless_the_policy_ignores_it() {
        let label = NodeLabel {
            key: "nvidia.com/gpu.memory".into(),
            value: "42505273344".into(),
        };
        let signs = NodeSigns {
            unreadable: Some(label),
            ..NodeSigns::default()
        };
        let rules = NodeRules::default();
        assert_eq!(warnings(&rules, &signs, false), ["unreadable-label"]);
        assert_eq!(warnings(&rules, &signs, true), ["ignored-label"]);
        let text = rules.warnings(&signs, &[], false)[0].to_string();
        assert!(text.contains("nvidia.com/gpu.memory=42505273344"), "{text}");
        let ignoring = NodeRules {
            ignored_labels: vec!["nvidia.com/gpu.memory".into()],
            ..rules
        };
        assert!(warnings(&ignoring, &signs, false).is_empty());
    }
}
