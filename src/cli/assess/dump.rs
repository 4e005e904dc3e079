//! A cluster as it is: what pods have of the GPUs of its nodes, as a dump shows it. And each pod once more, with another request.

use super::nodes::{DRA_DRIVER, MIG_PREFIX, NodeGpus, Published, publish, slices_of_gpu};
use crate::cli::plan::objects::{PlannedPod, pod_to_place};
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::feature_discovery::{COUNT, MEMORY_MIB, PRODUCT};
use stowage_kubernetes_objects::{VRAM, user_annotations};
use stowage_scheduling::policy::{NamespaceLabels, Policy};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::MAX_GPUS;
use stowage_server::kubernetes::dump::Dump;
use stowage_sizing::assess::need::Workload;
use stowage_sizing::capacity_plan::question::PodToPlace;

/// KAI's annotations of a pod with a part of a GPU: MiB, or a share.
const MEMORY: &str = "gpu-memory";
const FRACTION: &str = "gpu-fraction";
const CUT: &str = "MIG slices stay as they are cut";

/// How a pod has GPUs, as [`Workload`] says.
pub struct Ask {
    pub gpus: u32,
    pub part: f64,
    pub kept: Option<String>,
}

/// A device of a claim.
enum Device {
    Gpu,
    /// A MIG profile.
    Slice(String),
    /// Some of the capacity of a GPU that has others beside.
    Share,
}

/// What an allocated claim has.
struct Claim {
    devices: Vec<Device>,
    /// Pods that have them together.
    sharers: u32,
}

#[derive(Default)]
pub struct Cluster {
    pub nodes: BTreeMap<String, (Node, NodeGpus)>,
    /// Pods on nodes that have or request GPUs in any way.
    pub pods: Vec<Pod>,
    /// Such pods that are on no node, and nodes of whose GPUs nothing can be read.
    pub unbound: Vec<String>,
    pub unread: Vec<String>,
    pub namespaces: NamespaceLabels,
    /// By namespace and name.
    claims: BTreeMap<(String, String), Claim>,
}

pub fn read(path: &Path) -> Result<Cluster> {
    let mut cluster = Cluster::default();
    let (mut nodes, mut dra) = (Vec::new(), BTreeMap::<String, Published>::new());
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
                    cluster.pods.push(pod);
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
                let node = spec["nodeName"].as_str().unwrap_or_default();
                if spec["driver"] == DRA_DRIVER {
                    publish(&spec, dra.entry(node.into()).or_default());
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    for node in nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        let published = dra.remove(&name).unwrap_or_default();
        match NodeGpus::read(&node, &published) {
            Some(gpus) => drop(cluster.nodes.insert(name, (node, gpus))),
            None => {
                let mut offered = objects::plugin_devices(&node).into_values();
                cluster
                    .unread
                    .extend(offered.any(|count| count > 0).then_some(name));
            }
        }
    }
    // Administrators watch GPUs that others have, and not every claim is for GPUs.
    let has_device = |claims: Vec<&Claim>| claims.iter().any(|one| !one.devices.is_empty());
    let mut pods = std::mem::take(&mut cluster.pods);
    pods.retain(|pod| !is_by_claims(pod) || cluster.claims_of(pod).is_none_or(has_device));
    let is_bound = |pod: &Pod| {
        pod.spec
            .as_ref()
            .is_some_and(|spec| spec.node_name.is_some())
    };
    let (bound, unbound): (Vec<Pod>, Vec<Pod>) = pods.into_iter().partition(is_bound);
    let names = unbound.into_iter().filter_map(|pod| pod.metadata.name);
    cluster.unbound = names.collect();
    cluster.pods = bound;
    Ok(cluster)
}

/// How many devices a pod has by its claims, what part of a GPU each is, and why they stay as they are.
fn by_claims(claims: &[&Claim], node: &NodeGpus) -> Option<(u32, f64, Option<String>)> {
    let part = |device: &Device| match device {
        Device::Gpu => Some(1.0),
        Device::Slice(profile) => Some(1.0 / f64::from(slices_of_gpu(profile, node.gpu.gpu_type)?)),
        Device::Share => None,
    };
    let of = |claim: &Claim| {
        let parts: Option<Vec<f64>> = claim.devices.iter().map(part).collect();
        Some(parts?.into_iter().sum::<f64>() / f64::from(claim.sharers))
    };
    let parts: Option<Vec<f64>> = claims.iter().map(|claim| of(claim)).collect();
    let all: f64 = parts?.into_iter().sum();
    let mut devices = claims.iter().flat_map(|claim| &claim.devices);
    let count = devices.clone().count() as u32;
    let is_cut = devices.any(|device| matches!(device, Device::Slice(_)));
    let is_shared = claims.iter().any(|claim| claim.sharers > 1);
    let shared = is_shared.then(|| "a claim of several pods gives it a part of a GPU".to_owned());
    let kept = if is_cut { Some(CUT.into()) } else { shared };
    Some((count, all / f64::from(count), kept))
}

fn is_by_claims(pod: &Pod) -> bool {
    !is_fraction(pod) && objects::uses_claims_only(pod)
}

/// Whether nothing says that the node's kubelet is gone.
pub fn is_ready(node: &Node) -> bool {
    let status = node.status.iter();
    let mut all = status.flat_map(|status| status.conditions.iter().flatten());
    !all.any(|one| one.type_ == "Ready" && one.status != "True")
}

fn has_gpu(pod: &Pod) -> bool {
    let is_gone = objects::is_finished(pod) || pod.metadata.deletion_timestamp.is_some();
    // KAI's pod that holds a GPU for others asks for it, and has the label alone.
    let labels = pod.metadata.labels.as_ref();
    let is_group = labels.is_some_and(|labels| labels.contains_key("runai-gpu-group"));
    let is_annotated = annotation(pod, MEMORY)
        .or(annotation(pod, FRACTION))
        .is_some();
    let is_group = is_group && !is_annotated;
    let asks = objects::asks_for_gpu(pod) && !is_group || objects::uses_claims_only(pod);
    !is_gone && (asks || is_fraction(pod))
}

fn is_fraction(pod: &Pod) -> bool {
    [MEMORY, FRACTION].iter().any(|key| kai(pod, key).is_some())
}

fn annotation<'p>(pod: &'p Pod, key: &str) -> Option<&'p String> {
    pod.metadata.annotations.as_ref()?.get(key)
}

/// The number in an annotation of KAI, NaN if it is none. Whoever requests GPUs has them, whatever is annotated.
fn kai(pod: &Pod, key: &str) -> Option<f64> {
    let text = annotation(pod, key).filter(|_| !objects::asks_for_gpu(pod))?;
    let number = text.parse().ok().filter(|number: &f64| number.is_finite());
    Some(number.unwrap_or(f64::NAN))
}

impl Cluster {
    fn add_claim(&mut self, claim: &Value) {
        let (metadata, status) = (&claim["metadata"], &claim["status"]);
        let Some(results) = status["allocation"]["devices"]["results"].as_array() else {
            return;
        };
        let is_gpu = |one: &&Value| one["driver"] == DRA_DRIVER && one["adminAccess"] != true;
        let device = |one: &Value| {
            let name = one["device"].as_str().unwrap_or_default();
            let slice = name.split_once("-mig-").map(|(_, slice)| slice);
            match slice.and_then(|slice| slice.split('-').next()) {
                _ if one.get("shareID").or(one.get("consumedCapacity")).is_some() => Device::Share,
                // Names have no dots.
                Some(profile) => Device::Slice(profile.replacen('g', "g.", 1)),
                None => Device::Gpu,
            }
        };
        let pods = status["reservedFor"].as_array().map_or(0, Vec::len);
        let found = Claim {
            devices: results.iter().filter(is_gpu).map(device).collect(),
            sharers: pods.max(1) as u32,
        };
        let name = |key| metadata[key].as_str().unwrap_or_default().to_owned();
        self.claims.insert((name("namespace"), name("name")), found);
    }

    /// `None` if the dump does not show all its claims, or one has nothing yet.
    fn claims_of(&self, pod: &Pod) -> Option<Vec<&Claim>> {
        let made = pod
            .status
            .iter()
            .flat_map(|status| &status.resource_claim_statuses);
        let made: BTreeMap<_, _> = made
            .flatten()
            .map(|one| (&one.name, &one.resource_claim_name))
            .collect();
        let named = pod.spec.as_ref()?.resource_claims.iter().flatten();
        let named = named.map(|one| match &one.resource_claim_name {
            Some(name) => Some(name),
            None => made.get(&one.name)?.as_ref(),
        });
        // A pod may name a claim twice.
        let names: Option<BTreeSet<&String>> = named.collect();
        let (_, namespace, _) = workload(pod);
        let claim = |name: &String| self.claims.get(&(namespace.clone(), name.clone()));
        names?.into_iter().map(claim).collect()
    }

    pub fn node_of(&self, pod: &Pod) -> Option<&NodeGpus> {
        let name = pod.spec.as_ref()?.node_name.as_ref()?;
        Some(&self.nodes.get(name)?.1)
    }

    /// How many GPUs the pod has, what part of each, and why it stays on them; `None` if that cannot be read.
    pub fn ask(&self, pod: &Pod, policy: &Policy) -> Option<Ask> {
        let node = self.node_of(pod)?;
        let total = node.gpu.total.0 as f64;
        let mib = f64::from(1 << 20) / total;
        let shares = 1.0 / f64::from(node.shares);
        let parts = [
            ("KAI", kai(pod, MEMORY), mib),
            ("KAI", kai(pod, FRACTION), 1.0),
            ("HAMi", limit(pod, "nvidia.com/gpumem"), mib),
            ("HAMi", limit(pod, "nvidia.com/gpumem-percentage"), 0.01),
        ];
        let mut parts = parts.into_iter();
        let named = parts.find_map(|(by, amount, unit)| Some((by, amount? * unit)));
        let has_slice = limits(pod).any(|(name, _)| name.starts_with(MIG_PREFIX));
        let by = |by: &str| Some(format!("{by} gives it a part of a GPU"));
        let (gpus, part, kept) = if is_by_claims(pod) {
            by_claims(&self.claims_of(pod)?, node)?
        } else {
            let by_plugin = objects::demand(pod, policy);
            let gpus = match is_fraction(pod) {
                true => kai(pod, "gpu-fraction-num-devices").unwrap_or(1.0) as u32,
                false => by_plugin.as_ref().ok()?.gpus,
            };
            let (part, kept) = match (named, by_plugin) {
                (Some((who, part)), _) => (part, by(who)),
                (None, Ok(demand)) if objects::asks_for_vram(pod) => {
                    (demand.per_gpu.0 as f64 / total, by("Stowage"))
                }
                _ if node.mig_gpus == node.gpus || has_slice => {
                    (1.0 / f64::from(node.slices), Some(CUT.into()))
                }
                // Without an amount it allocates all of a GPU's memory.
                _ if node.is_hami => (1.0, Some("HAMi hands out its GPU".into())),
                _ if node.shares == 1 => (1.0, None),
                _ => (shares, by("time-slicing, or what else shares GPUs,")),
            };
            (gpus, part, kept)
        };
        let mut owners = pod.metadata.owner_references.iter().flatten();
        let is_daemon = owners.any(|owner| owner.kind == "DaemonSet");
        let daemon = is_daemon.then(|| "it runs on each node".to_owned());
        let no_memory = (total == 0.0).then(|| "the memory of its GPU is not known".to_owned());
        let kept = kept.or(daemon).or(no_memory);
        // Without a total no amount is a part.
        let part = if part.is_infinite() { shares } else { part };
        let is_possible = part > 0.0 && part <= 1.0 && (1..=MAX_GPUS).contains(&gpus);
        is_possible.then_some(Ask { gpus, part, kept })
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
            labels.insert(MEMORY_MIB.into(), (gpus.gpu.total.0 >> 20).to_string());
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

/// The number in a limit, NaN if it is none.
fn limit(pod: &Pod, name: &str) -> Option<f64> {
    let (_, amount) = limits(pod).find(|(known, _)| *known == name)?;
    let amount = Bytes::parse_quantity(&amount.0);
    Some(amount.map_or(f64::NAN, |amount| amount.0 as f64))
}

/// Kind, namespace and name of what makes the pod again; the pod itself, if nothing does.
pub fn workload(pod: &Pod) -> (String, String, String) {
    let own = pod.metadata.name.clone().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let (kind, name) = objects::workload(pod).unwrap_or(("Pod", &own));
    (kind.to_owned(), namespace.to_owned(), name.to_owned())
}
