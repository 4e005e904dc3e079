//! What else of a cluster an installation depends on: what a dump has of it, what is missing, and what no dump shows.

use super::nodes::Owner;
use super::pods::Verdict;
use super::{Gap, Group, gap};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ledger::GPU_LABELS;
use stowage_scheduling::units::plural;
use stowage_server::kubernetes::dump::{Dump, DumpError};

/// The runtime class of the shipped manifests.
pub const RUNTIME_CLASS: &str = "nvidia";
const DRIVER_LABEL: &str = "nvidia.com/cuda.driver-version.full";
/// The first minor version whose API server completes pods.
const COMPLETING: u32 = 36;
/// Parts of the images of what hands out or measures GPUs.
const GPU_IMAGES: [&str; 5] = [
    "device-plugin",
    "dcgm",
    "gpu-feature-discovery",
    "dra-driver",
    "hami",
];
/// Switches of a ClusterPolicy, and what one that is not there means.
const SWITCHES: [(&str, bool); 6] = [
    ("driver.enabled", true),
    ("toolkit.enabled", true),
    ("devicePlugin.enabled", true),
    ("dcgmExporter.enabled", true),
    ("cdi.enabled", true),
    ("cdi.nriPluginEnabled", false),
];
/// A dump without one of these kinds does not say whether there is none.
const KINDS: [(&str, &str); 7] = [
    ("Node", "nodes"),
    ("Pod", "pods -A"),
    ("Namespace", "namespaces"),
    ("DaemonSet", "daemonsets -A"),
    ("RuntimeClass", "runtimeclasses"),
    ("ResourceSlice", "resourceslices"),
    ("ClusterPolicy", "clusterpolicies.nvidia.com"),
];
/// What no dump shows, and how to find it.
const NEVER_SHOWN: [(&str, &str); 8] = [
    ("the API server's version", "kubectl version"),
    (
        "templates that name their node: their pods would be refused if they ask for a GPU under NVIDIA's runtime class",
        "kubectl get deployments,statefulsets,daemonsets,jobs,cronjobs -A -o yaml | grep nodeName:",
    ),
    (
        "on a node: the mode of NVIDIA's container toolkit",
        "grep -n mode /etc/nvidia-container-runtime/config.toml",
    ),
    (
        "on a node: whether NVIDIA's is the default runtime",
        "containerd config dump | grep default_runtime_name",
    ),
    (
        "on a node: NRI plugins",
        "ls /opt/nri/plugins /etc/nri/conf.d",
    ),
    ("on a node: CDI specifications", "nvidia-ctk cdi list"),
    (
        "on a node: the driver",
        "nvidia-smi --query-gpu=driver_version --format=csv",
    ),
    (
        "on a node: GPUs, engines and models as an agent reports them",
        "stowage agent --once",
    ),
];

/// Exempts the pods of a namespace.
pub fn label_command(namespace: &str) -> String {
    format!("kubectl label namespace {namespace} stowage.dev/all-gpus=allowed")
}

#[derive(Default)]
pub struct Facts {
    pub nodes: Vec<Node>,
    pub slices: Vec<ResourceSlice>,
    /// By kind and name.
    others: BTreeMap<String, BTreeMap<String, Value>>,
}

pub fn has_agent_label(node: &Node) -> bool {
    let mut labels = node.metadata.labels.iter().flatten();
    labels.any(|(key, value)| GPU_LABELS.contains(&key.as_str()) && value == "true")
}

impl Facts {
    pub fn read(dumps: &[Dump]) -> Result<Self, DumpError> {
        let mut facts = Self::default();
        for dump in dumps {
            dump.for_each_raw(|kind, item| {
                match kind {
                    "Node" => facts.nodes.push(item.parse()?),
                    "ResourceSlice" => facts.slices.push(item.parse()?),
                    "Namespace" | "DaemonSet" | "RuntimeClass" | "ClusterPolicy" => {
                        let object: Value = item.parse()?;
                        // Others have a kind of that name, too.
                        if kind == "ClusterPolicy" && object["apiVersion"] != "nvidia.com/v1" {
                            return Ok(());
                        }
                        let [namespace, name] = ["namespace", "name"]
                            .map(|key| object["metadata"][key].as_str().unwrap_or_default());
                        let name = [namespace, name].join("/");
                        facts
                            .others
                            .entry(kind.into())
                            .or_default()
                            .insert(name, object);
                    }
                    "Pod" => drop(facts.others.entry(kind.into()).or_default()),
                    _ => {}
                }
                Ok(())
            })?;
        }
        Ok(facts)
    }

    fn of_kind(&self, kind: &str) -> impl Iterator<Item = (&str, &Value)> {
        let all = self.others.get(kind).into_iter().flatten();
        all.map(|(name, object)| (name.trim_start_matches('/'), object))
    }

    /// `None` if the dump does not show the namespace.
    pub fn namespace_labels(&self, name: &str) -> Option<&Value> {
        let namespace = self.others.get("Namespace")?.get(&format!("/{name}"))?;
        Some(&namespace["metadata"]["labels"])
    }

    pub fn has_runtime_class(&self) -> bool {
        self.of_kind("RuntimeClass")
            .any(|(name, _)| name == RUNTIME_CLASS)
    }

    pub fn found(&self) -> Vec<String> {
        let mut versions = BTreeMap::<String, usize>::new();
        for node in &self.nodes {
            let info = node
                .status
                .as_ref()
                .and_then(|status| status.node_info.as_ref());
            let info = info.map(|info| {
                format!(
                    "kubelet {}, {}",
                    info.kubelet_version, info.container_runtime_version
                )
            });
            let driver = node
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(DRIVER_LABEL));
            for version in info
                .into_iter()
                .chain(driver.map(|version| format!("driver {version}")))
            {
                *versions.entry(version).or_default() += 1;
            }
        }
        let mut found: Vec<String> = versions
            .into_iter()
            .map(|(version, nodes)| format!("{version}: {}", plural(nodes, "node")))
            .collect();
        let classes = self.of_kind("RuntimeClass");
        found.extend(
            classes
                .map(|(name, class)| format!("RuntimeClass {name}: handler {}", class["handler"])),
        );
        found.extend(self.of_kind("ClusterPolicy").map(|(name, object)| {
            let switch = |(name, default): (&str, bool)| {
                let said = object.pointer(&format!("/spec/{}", name.replace('.', "/")));
                let value = said.and_then(Value::as_bool).unwrap_or(default);
                format!("{name} {value}")
            };
            format!("ClusterPolicy {name}: {}", SWITCHES.map(switch).join(", "))
        }));
        found.extend(self.of_kind("DaemonSet").filter_map(|(name, set)| {
            let image = set
                .pointer("/spec/template/spec/containers/0/image")?
                .as_str()?;
            let is_about_gpus = GPU_IMAGES.iter().any(|part| image.contains(part));
            is_about_gpus.then(|| format!("DaemonSet {name}: {image}"))
        }));
        found
    }

    pub fn unknown(&self) -> Vec<Gap> {
        let is_absent = |(kind, _): &(&str, &str)| match *kind {
            "Node" => self.nodes.is_empty(),
            "ResourceSlice" => self.slices.is_empty(),
            kind => !self.others.contains_key(kind),
        };
        let absent = KINDS.into_iter().filter(is_absent);
        let absent = absent.map(|(kind, name)| {
            gap(
                format!("the dump has no {kind}"),
                format!("kubectl get {name} -o json"),
            )
        });
        absent
            .chain(NEVER_SHOWN.map(|(what, command)| gap(what, command)))
            .collect()
    }

    pub fn missing(&self, workloads: &[Group<Verdict>], nodes: &[Group<Owner>]) -> Vec<Gap> {
        let mut missing = Vec::new();
        if self.others.contains_key("RuntimeClass") && !self.has_runtime_class() {
            let class = r#"{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClass","metadata":{"name":"nvidia"},"handler":"nvidia"}"#;
            missing.push(gap(
                "the runtime class nvidia",
                format!("kubectl apply -f - <<< '{class}'"),
            ));
        }
        let sets = workloads
            .iter()
            .filter(|one| one.names[0].starts_with("DaemonSet "));
        let remedies = sets.flat_map(|one| one.remedies.iter().map(|remedy| &remedy.command));
        let labels: BTreeSet<&String> = remedies.filter(|one| one.contains(" label ")).collect();
        let exempt = |command| gap("the exemption of DaemonSets that see all GPUs", command);
        missing.extend(labels.into_iter().map(exempt));
        let minor = |node: &Node| {
            let version = &node.status.as_ref()?.node_info.as_ref()?.kubelet_version;
            version.split('.').nth(1)?.parse::<u32>().ok()
        };
        if self
            .nodes
            .iter()
            .filter_map(minor)
            .any(|minor| minor < COMPLETING)
        {
            missing.push(gap(
                "by its kubelets the API server is older than 1.36, whose policies complete pods: a webhook does",
                "kubectl apply -k manifests/overlays/webhook",
            ));
        }
        let served = nodes.iter().filter(|one| one.verdict == Owner::Stowage);
        let served: Vec<&String> = served.flat_map(|one| &one.names).collect();
        let mut without = |what: &str, command: &str, has: &dyn Fn(&Node) -> bool| {
            let lacking = self.nodes.iter().filter(|node| !has(node));
            let names = lacking.filter_map(|node| node.metadata.name.as_ref());
            let names: Vec<&str> = names
                .filter(|name| served.contains(name))
                .map(String::as_str)
                .collect();
            if !names.is_empty() {
                missing.push(gap(what, command.replace("NODES", &names.join(" "))));
            }
        };
        without(
            "a label by which the agent runs there",
            "kubectl label nodes NODES nvidia.com/gpu.present=true",
            &has_agent_label,
        );
        without(
            "a taint that keeps the default scheduler away, once Stowage runs",
            "kubectl taint nodes NODES nvidia.com/gpu=present:NoSchedule",
            &|node| {
                let mut taints = node.spec.iter().flat_map(|spec| &spec.taints).flatten();
                taints.any(|taint| taint.effect == "NoSchedule")
            },
        );
        missing
    }
}
