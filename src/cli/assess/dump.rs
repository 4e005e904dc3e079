//! A cluster as it is: how its nodes hand out GPUs and what pods have of them, as a dump shows it. And each pod once more, with
//! another request.

use crate::cli::plan::objects::{PlannedPod, pod_to_place};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::feature_discovery::{COUNT, MEMORY_MIB, PRODUCT};
use stowage_kubernetes_objects::{VRAM, user_annotations};
use stowage_policy_file::format::mig::compute_slices;
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::policy::{NamespaceLabels, Policy};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::MAX_GPUS;
use stowage_server::kubernetes::dump::Dump;
use stowage_sizing::assess::need::Workload;
use stowage_sizing::capacity_plan::gpu_types::GpuType;
use stowage_sizing::capacity_plan::question::{PodToPlace, TemplateGpu};

const MIG_PREFIX: &str = "nvidia.com/mig-";
/// GKE's labels, which has no GPU feature discovery by default.
const GKE_GPU: &str = "cloud.google.com/gke-accelerator";
const GKE_CLIENTS: &str = "cloud.google.com/gke-max-shared-clients-per-gpu";
const DRA_DRIVER: &str = "gpu.nvidia.com";
/// More slices or shares than a node has.
const MAX_DEVICES: u32 = 1 << 16;
/// Compute slices of most GPUs.
const COMPUTE_SLICES: u32 = 7;

/// How a node hands out its GPUs.
pub struct NodeGpus {
    /// Physical GPUs, and how many of them are cut into slices.
    pub gpus: u32,
    mig_gpus: u32,
    /// Slices or shares that one GPU is handed out as.
    slices: u32,
    shares: u32,
    /// Without memory where nothing says which GPU it is.
    pub gpu: TemplateGpu,
}

/// How a pod has GPUs, as [`Workload`] says.
pub struct Ask {
    pub gpus: u32,
    pub part: f64,
    pub kept: Option<String>,
}

#[derive(Default)]
pub struct Cluster {
    pub nodes: BTreeMap<String, (Node, NodeGpus)>,
    /// Pods on nodes that have or request GPUs in any way.
    pub pods: Vec<Pod>,
    /// Such pods that are on no node.
    pub unbound: Vec<String>,
    pub namespaces: NamespaceLabels,
    /// Devices of claims by namespace and name of a pod that has them: how many, whether one is a slice, and by how many pods at most
    /// one is shared.
    claimed: BTreeMap<(String, String), (u32, bool, u32)>,
}

pub fn read(path: &Path) -> Result<Cluster> {
    let mut cluster = Cluster::default();
    let (mut nodes, mut dra) = (Vec::new(), BTreeMap::<String, Vec<Value>>::new());
    Dump::read(path)?.for_each_raw(|kind, item| {
        match kind {
            "Node" => nodes.push(item.parse::<Node>()?),
            "Pod" => {
                let mut pod: Pod = item.parse()?;
                // Most of what a pod weighs, and none of it decides anything here.
                for container in pod.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
                    container.env = None;
                }
                pod.metadata.managed_fields = None;
                if has_gpu(&pod) {
                    let is_bound = pod
                        .spec
                        .as_ref()
                        .is_some_and(|spec| spec.node_name.is_some());
                    match is_bound {
                        true => cluster.pods.push(pod),
                        false => cluster.unbound.extend(pod.metadata.name),
                    }
                }
            }
            "Namespace" => {
                let metadata = item.parse::<Namespace>()?.metadata;
                let labels = Arc::new(metadata.labels.unwrap_or_default());
                let named = metadata.name.map(|name| (name, labels));
                cluster.namespaces.extend(named);
            }
            "ResourceClaim" => cluster.add_claim(&item.parse()?),
            "ResourceSlice" => {
                let spec = item.parse::<Value>()?["spec"].take();
                let devices = spec["devices"].as_array().cloned().unwrap_or_default();
                let node = spec["nodeName"].as_str().unwrap_or_default();
                if spec["driver"] == DRA_DRIVER {
                    dra.entry(node.into()).or_default().extend(devices);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    for mut node in nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        add_labels(&mut node, dra.get(&name).map_or(&[], Vec::as_slice));
        let gpus = node_gpus(&node);
        if gpus.gpus > 0 {
            cluster.nodes.insert(name, (node, gpus));
        }
    }
    Ok(cluster)
}

/// Whether nothing says that the node's kubelet is gone.
pub fn is_ready(node: &Node) -> bool {
    let status = node.status.iter();
    let mut all = status.flat_map(|status| status.conditions.iter().flatten());
    !all.any(|one| one.type_ == "Ready" && one.status != "True")
}

fn has_gpu(pod: &Pod) -> bool {
    let is_gone = objects::is_finished(pod) || pod.metadata.deletion_timestamp.is_some();
    let is_fraction = ["gpu-fraction", "gpu-memory"]
        .iter()
        .any(|key| kai(pod, key).is_some());
    // KAI's pod that holds a GPU for others asks for it, and has the label alone.
    let labels = pod.metadata.labels.as_ref();
    let is_group = labels.is_some_and(|labels| labels.contains_key("runai-gpu-group"));
    let asks = objects::asks_for_gpu(pod) && !is_group || objects::uses_claims_only(pod);
    !is_gone && (is_fraction || asks)
}

/// The number in an annotation of KAI, NaN if it is none.
fn kai(pod: &Pod, key: &str) -> Option<f64> {
    let text = pod.metadata.annotations.as_ref()?.get(key)?;
    Some(text.parse().unwrap_or(f64::NAN))
}

/// Labels as GPU feature discovery writes them, where only the DRA driver, HAMi or GKE shows the GPUs.
fn add_labels(node: &mut Node, devices: &[Value]) {
    let attributes = devices.iter().map(|device| match &device["basic"] {
        // v1beta1 has a level more.
        Value::Object(basic) => &basic["attributes"],
        _ => &device["attributes"],
    });
    let gpus = attributes.filter(|attributes| attributes["type"]["string"] == "gpu");
    let by_dra = gpus.filter_map(|gpu| gpu["productName"]["string"].as_str());
    let annotations = node.metadata.annotations.as_ref();
    let register = annotations.and_then(|all| all.get("hami.io/node-nvidia-register"));
    let register = register.and_then(|text| serde_json::from_str::<Vec<Value>>(text).ok());
    let by_hami = register
        .iter()
        .flatten()
        .filter_map(|gpu| gpu["type"].as_str());
    // HAMi writes the vendor once more before NVML's name.
    let by_hami = by_hami.map(|name| name.trim_start_matches("NVIDIA-"));
    let offered = objects::plugin_devices(node);
    let offered: u32 = offered
        .values()
        .map(|count| (*count).min(MAX_DEVICES))
        .sum();
    let mut names: Vec<String> = by_dra
        .chain(by_hami)
        .map(|name| name.replace(' ', "-"))
        .collect();
    let labels = node.metadata.labels.get_or_insert_default();
    if let Some(name) = labels.get(GKE_GPU) {
        let clients = labels.get(GKE_CLIENTS).and_then(|text| text.parse().ok());
        let name = name
            .trim_start_matches("nvidia-")
            .trim_start_matches("tesla-");
        let count = offered / clients.unwrap_or(1).max(1);
        names.extend((0..count).map(|_| name.to_owned()));
    }
    let first = names.first().filter(|_| !labels.contains_key(COUNT));
    if let Some(name) = first {
        let known = GpuType::find(name).ok();
        labels.insert(COUNT.into(), names.len().to_string());
        labels.insert(PRODUCT.into(), known.map_or(&**name, |it| it.name).into());
        labels.extend(known.map(|it| (MEMORY_MIB.into(), (it.total().0 >> 20).to_string())));
    }
}

fn node_gpus(node: &Node) -> NodeGpus {
    let labels = node.metadata.labels.iter().flatten();
    let labels: BTreeMap<&str, &str> = labels.map(|(key, value)| (&**key, &**value)).collect();
    let number = |key| labels.get(key).and_then(|text| text.parse::<u32>().ok());
    let offered = objects::plugin_devices(node);
    let sum = |is_slice: bool| {
        let of = offered
            .iter()
            .filter(|(name, _)| name.as_str().starts_with(MIG_PREFIX) == is_slice);
        of.map(|(_, count)| (*count).min(MAX_DEVICES)).sum::<u32>()
    };
    let (whole, slices) = (sum(false), sum(true));
    let product = labels
        .get(PRODUCT)
        .unwrap_or(&"")
        .trim_end_matches("-SHARED");
    let (model, profile) = product.split_once("-MIG-").unwrap_or((product, ""));
    let gpu_type = GpuType::find(model).ok();
    let memory = number(MEMORY_MIB).map(|mib| Bytes::mib(mib.into()));
    let unknown = || GpuModel::parse("unknown").expect("a plain word");
    let model = GpuModel::parse(model).unwrap_or_else(|_| unknown());
    let gpu = TemplateGpu {
        name: model.to_string(),
        total: gpu_type.map(GpuType::total).or(memory).unwrap_or_default(),
        model,
        gpu_type,
    };
    let shares = number("nvidia.com/gpu.replicas").or(number(GKE_CLIENTS));
    let shares = shares.unwrap_or(1).clamp(1, MAX_DEVICES);
    let is_possible = |count: &u32| (1..=MAX_GPUS).contains(count);
    let count = number(COUNT).unwrap_or(whole / shares);
    let (gpus, mig_gpus, slices) = match (profile, slices) {
        ("", 0) => (count, 0, 1),
        ("", slices) => {
            let mig_gpus = count.saturating_sub(whole / shares);
            (count, mig_gpus, slices / mig_gpus.max(1))
        }
        _ => {
            let family = gpu_type.and_then(GpuType::family);
            let all = family.map_or(COMPUTE_SLICES, |family| family.compute_slices());
            let each = (all / compute_slices(profile).unwrap_or(1).max(1)).max(1);
            (count.div_ceil(each), count.div_ceil(each), each * shares)
        }
    };
    let gpus = Some(gpus).filter(is_possible).unwrap_or(0);
    let mig_gpus = mig_gpus.min(gpus);
    NodeGpus {
        gpus,
        mig_gpus,
        slices: slices.max(1),
        // HAMi offers each GPU several times, and no label says so.
        shares: shares.max(whole / (gpus - mig_gpus).max(1)),
        gpu,
    }
}

impl Cluster {
    fn add_claim(&mut self, claim: &Value) {
        let status = &claim["status"];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let mut devices = list(&status["allocation"]["devices"]["results"]);
        devices.retain(|one| one["driver"] == DRA_DRIVER);
        let is_slice = |one: &Value| {
            one["device"]
                .as_str()
                .is_some_and(|it| it.contains("-mig-"))
        };
        let pods = list(&status["reservedFor"]);
        let name = |of: &Value, key| of[key].as_str().unwrap_or_default().to_owned();
        for pod in &pods {
            let key = (name(&claim["metadata"], "namespace"), name(pod, "name"));
            let (count, has_slice, most) = self.claimed.entry(key).or_default();
            *count += devices.len() as u32;
            *has_slice |= devices.iter().any(is_slice);
            *most = (pods.len() as u32).max(*most);
        }
    }

    pub fn node_of(&self, pod: &Pod) -> Option<&NodeGpus> {
        let name = pod.spec.as_ref()?.node_name.as_ref()?;
        Some(&self.nodes.get(name)?.1)
    }

    /// How many GPUs the pod has, what part of each, and why it stays on them; `None` if that cannot be read.
    pub fn ask(&self, pod: &Pod, policy: &Policy) -> Option<Ask> {
        let node = self.node_of(pod)?;
        let total = node.gpu.total.0 as f64;
        let by = |by: &str| Some(format!("{by} gives it a part of a GPU"));
        let slice = || Some("MIG slices stay as they are cut".to_owned());
        let (slices, shares) = (1.0 / f64::from(node.slices), 1.0 / f64::from(node.shares));
        let amount = |name| {
            let (_, amount) = limits(pod).find(|(known, _)| *known == name)?;
            Some(amount.0.parse().unwrap_or(f64::NAN))
        };
        let of_mib = |mib: f64| mib * (1u64 << 20) as f64 / total;
        let by_kai = kai(pod, "gpu-memory").map(of_mib);
        let by_hami = amount("nvidia.com/gpumem").map(of_mib);
        let percentage = amount("nvidia.com/gpumem-percentage");
        let by_hami = by_hami.or(percentage.map(|percent: f64| percent / 100.0));
        let (gpus, part, kept) = if let Some(part) = by_kai.or(kai(pod, "gpu-fraction")) {
            let gpus = kai(pod, "gpu-fraction-num-devices").unwrap_or(1.0);
            (gpus as u32, part, by("KAI"))
        } else if objects::uses_claims_only(pod) {
            let (_, namespace, _) = workload(pod);
            let key = (namespace, pod.metadata.name.clone()?);
            match *self.claimed.get(&key)? {
                (gpus, true, _) => (gpus, slices, slice()),
                (gpus, false, 1) => (gpus, 1.0, None),
                (gpus, false, pods) => (gpus, 1.0 / f64::from(pods), by("a claim of several pods")),
            }
        } else {
            let demand = objects::demand(pod, policy).ok()?;
            let is_slice = limits(pod).any(|(name, _)| name.starts_with(MIG_PREFIX));
            let is_slice = is_slice || node.mig_gpus == node.gpus;
            let (part, kept) = match by_hami {
                _ if objects::asks_for_vram(pod) => {
                    (demand.per_gpu.0 as f64 / total, by("Stowage"))
                }
                Some(part) => (part, by("HAMi")),
                None if is_slice => (slices, slice()),
                None if node.shares == 1 => (1.0, None),
                None => (shares, by("time-slicing, or what else shares GPUs,")),
            };
            (demand.gpus, part, kept)
        };
        let owners = pod.metadata.owner_references.iter().flatten();
        let is_daemon = owners.into_iter().any(|owner| owner.kind == "DaemonSet");
        let daemon = is_daemon.then(|| "it runs on each node".to_owned());
        let no_memory = "the memory of its GPU is not known".to_owned();
        let no_memory = (total == 0.0).then_some(no_memory);
        let part = if total == 0.0 { shares } else { part };
        let is_possible = part > 0.0 && part <= 1.0 && (1..=MAX_GPUS).contains(&gpus);
        is_possible.then(|| Ask {
            gpus,
            part,
            kept: kept.or(daemon).or(no_memory),
        })
    }

    /// Nodes as if anyone could hand out their GPUs, without those that are cut into slices.
    pub fn whole_nodes(&self) -> Vec<(String, Node)> {
        let is_whole = |node: &Node, gpus: &NodeGpus| {
            gpus.gpus > gpus.mig_gpus && gpus.gpu.total > Bytes::ZERO && is_ready(node)
        };
        let whole = self.nodes.iter();
        let whole = whole.filter(|(_, (node, gpus))| is_whole(node, gpus));
        let whole = whole.map(|(name, (node, gpus))| {
            let mut node = node.clone();
            let labels = node.metadata.labels.get_or_insert_default();
            labels.insert(COUNT.into(), (gpus.gpus - gpus.mig_gpus).to_string());
            labels.insert(PRODUCT.into(), gpus.gpu.model.to_string());
            (format!("Node {name}"), node)
        });
        whole.collect()
    }

    /// The pod with so much VRAM on each of its GPUs, or with GPUs of its own, on the GPU model that it has.
    pub fn place(
        &self,
        pod: &Pod,
        one: &Workload,
        per_gpu: Option<Bytes>,
        policy: &Policy,
    ) -> Option<PodToPlace> {
        let mut pod = pod.clone();
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(user_annotations::GPUS.into(), one.gpus.to_string());
        annotations.insert(
            user_annotations::EXCLUSIVE.into(),
            per_gpu.is_none().to_string(),
        );
        let spec = pod.spec.as_mut()?;
        spec.resource_claims = None;
        let selector = spec.node_selector.get_or_insert_default();
        selector.extend(
            one.gpu
                .as_ref()
                .map(|gpu| (PRODUCT.into(), gpu.model.to_string())),
        );
        let inits = spec.init_containers.iter_mut().flatten();
        for container in inits.chain(&mut spec.containers) {
            let resources = container.resources.get_or_insert_default();
            for amounts in [&mut resources.limits, &mut resources.requests] {
                let amounts = amounts.get_or_insert_default();
                amounts.retain(|name, _| name != VRAM && !name.starts_with("nvidia.com/"));
            }
        }
        // How containers share the pod's GPUs makes no difference to a plan.
        let resources = spec
            .containers
            .first_mut()?
            .resources
            .get_or_insert_default();
        let vram = per_gpu.unwrap_or(Bytes::gib(1)).times(one.gpus.into());
        let limits = resources.limits.get_or_insert_default();
        limits.insert(VRAM.into(), Quantity(vram.0.to_string()));
        to_place(&pod, policy)
    }
}

fn to_place(pod: &Pod, policy: &Policy) -> Option<PodToPlace> {
    match pod_to_place(pod, 0, "dump".into(), policy) {
        PlannedPod::ToPlace { pod, .. } => Some(*pod),
        _ => None,
    }
}

/// An opportunistic job that requests so much VRAM.
pub fn job(vram: Bytes, policy: &Policy) -> Result<PodToPlace> {
    let container =
        json!({ "name": "job", "resources": { "limits": { VRAM: vram.0.to_string() } } });
    let pod = json!({ "metadata": { "name": "job" }, "spec": { "priority": -10, "containers": [container] } });
    to_place(&serde_json::from_value(pod)?, policy).context("no pod can request that")
}

fn limits(pod: &Pod) -> impl Iterator<Item = (&String, &Quantity)> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let resources = containers.filter_map(|one| one.resources.as_ref());
    resources.flat_map(|resources| resources.limits.iter().flatten())
}

/// Kind, namespace and name of what makes the pod again; the pod itself, if nothing does.
pub fn workload(pod: &Pod) -> (String, String, String) {
    let own = pod.metadata.name.clone().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let (kind, name) = objects::workload(pod).unwrap_or(("Pod", &own));
    (kind.to_owned(), namespace.to_owned(), name.to_owned())
}
