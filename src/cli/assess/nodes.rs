//! How a node hands out its GPUs: by a device plugin, whole, in shares or in slices, by HAMi or by a DRA driver. What cannot be read
//! is not guessed.

use k8s_openapi::api::core::v1::Node;
use serde_json::Value;
use std::collections::BTreeMap;
use stowage_kubernetes_objects::feature_discovery::{COUNT, MEMORY_MIB, PRODUCT};
use stowage_kubernetes_objects::plugin_devices;
use stowage_policy_file::format::mig::{FAMILIES, Family};
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::MAX_GPUS;
use stowage_sizing::capacity_plan::gpu_types::GpuType;
use stowage_sizing::capacity_plan::question::TemplateGpu;

pub const MIG_PREFIX: &str = "nvidia.com/mig-";
pub const DRA_DRIVER: &str = "gpu.nvidia.com";
const REPLICAS: &str = "nvidia.com/gpu.replicas";
const HAMI_REGISTER: &str = "hami.io/node-nvidia-register";
/// GKE's labels, which has no GPU feature discovery by default.
const GKE_GPU: &str = "cloud.google.com/gke-accelerator";
const GKE_CLIENTS: &str = "cloud.google.com/gke-max-shared-clients-per-gpu";
const GKE_PARTITION: &str = "cloud.google.com/gke-gpu-partition-size";
/// More slices or shares than a node has.
const MAX_DEVICES: u32 = 1 << 16;

pub struct NodeGpus {
    /// Physical GPUs, and how many of them are cut into slices.
    pub gpus: u32,
    pub mig_gpus: u32,
    /// Slices or shares that one GPU is handed out as.
    pub slices: u32,
    pub shares: u32,
    /// Whether HAMi hands them out.
    pub is_hami: bool,
    /// Without memory where nothing says which GPU it is, or its GPUs are not alike.
    pub gpu: TemplateGpu,
}

/// GPUs that a DRA driver publishes on one node, by UUID: the name of the model, and whether it hands the GPU out as a whole.
pub type Published = BTreeMap<String, (String, bool)>;

/// Adds the GPUs of a ResourceSlice.
pub fn publish(spec: &Value, found: &mut Published) {
    for device in spec["devices"].as_array().into_iter().flatten() {
        // v1beta1 has a level more.
        let of = device.get("basic").unwrap_or(device);
        let text = |key: &str| of["attributes"][key]["string"].as_str();
        let (is_whole, uuid) = match text("type") {
            Some("gpu") => (true, text("uuid").or(device["name"].as_str())),
            Some("mig") => (false, text("parentUUID")),
            _ => continue,
        };
        let new = || (text("productName").unwrap_or_default().to_owned(), false);
        let uuid = uuid.unwrap_or_default().to_owned();
        found.entry(uuid).or_insert_with(new).1 |= is_whole;
    }
}

/// What device plugins offer on a node.
struct Offered {
    /// GPUs, or shares of GPUs.
    whole: u32,
    slices: u32,
    /// Shares of one GPU or slice.
    shares: u32,
}

/// What is said of the GPUs of a node.
struct Listed {
    /// GPUs; slices, if the product is one.
    count: u32,
    /// GPUs that are cut into slices.
    cut: u32,
    /// As feature discovery writes it; empty if it is not known, or not one for all.
    product: String,
}

fn label<'n>(node: &'n Node, key: &str) -> Option<&'n str> {
    Some(node.metadata.labels.as_ref()?.get(key)?)
}

fn number(node: &Node, key: &str) -> Option<u32> {
    label(node, key)?.parse().ok()
}

fn hami_register(node: &Node) -> Option<&String> {
    node.metadata.annotations.as_ref()?.get(HAMI_REGISTER)
}

impl Offered {
    fn read(node: &Node) -> Self {
        let (mut whole, mut slices) = (0u32, 0u32);
        for (name, count) in plugin_devices(node) {
            let is_slice = name.as_str().starts_with(MIG_PREFIX);
            let sum = if is_slice { &mut slices } else { &mut whole };
            *sum = sum.saturating_add(count.min(MAX_DEVICES));
        }
        let shares = number(node, REPLICAS).or(number(node, GKE_CLIENTS));
        Self {
            whole,
            slices,
            shares: shares.unwrap_or(1).clamp(1, MAX_DEVICES),
        }
    }
}

impl Listed {
    /// By feature discovery, or else a DRA driver, HAMi, or GKE.
    fn read(node: &Node, published: &Published, offered: &Offered) -> Option<Self> {
        let register = hami_register(node);
        let labelled = || label(node, PRODUCT).unwrap_or_default().to_owned();
        let by_plugin = offered.whole / offered.shares;
        let mut cut = 0;
        let (count, product) = if let Some(count) = number(node, COUNT) {
            if by_plugin > count && register.is_none() {
                // Labels that say how GPUs are shared are then those of one model of several.
                number(node, REPLICAS).filter(|shares| *shares > 0 && offered.slices == 0)?;
                (by_plugin, String::new())
            } else {
                (count, labelled())
            }
        } else if !published.is_empty() {
            cut = published.values().filter(|(_, whole)| !whole).count() as u32;
            let names = published.values().map(|(name, _)| name);
            (published.len() as u32, one_product(names))
        } else if let Some(register) = register {
            let names = registered_by_hami(register)?;
            (names.len() as u32, one_product(names.iter()))
        } else if let Some(name) = label(node, GKE_GPU) {
            let short = name.trim_start_matches("nvidia-");
            let short = short.trim_start_matches("tesla-");
            let known = GpuType::find(name).or_else(|_| GpuType::find(short));
            let model = known.map_or_else(|_| short.to_owned(), |gpu| gpu.model().to_string());
            let size = label(node, GKE_PARTITION).map(|size| format!("-MIG-{size}"));
            (by_plugin, model + &size.unwrap_or_default())
        } else {
            (by_plugin, labelled())
        };
        Some(Self {
            count,
            cut,
            product,
        })
    }
}

/// The product of GPUs with these names, if all have one.
fn one_product<'n>(mut names: impl Iterator<Item = &'n String>) -> String {
    let first = names.next().cloned().unwrap_or_default();
    match names.all(|name| *name == first) {
        true => first.replace(' ', "-"),
        false => String::new(),
    }
}

impl NodeGpus {
    /// `None` if the node has no GPUs, or it cannot be read how many.
    pub fn read(node: &Node, published: &Published) -> Option<Self> {
        let offered = Offered::read(node);
        let listed = Listed::read(node, published, &offered)?;
        let product = listed.product.trim_end_matches("-SHARED");
        let (model, profile) = product.split_once("-MIG-").unwrap_or((product, ""));
        let gpu_type = GpuType::find(model).ok();
        let memory = number(node, MEMORY_MIB).filter(|_| !product.is_empty());
        let total = memory.map(|mib| Bytes::mib(mib.into()));
        let total = gpu_type.map(GpuType::total).or(total);
        let unknown = |_| GpuModel::parse("unknown").expect("a plain word");
        let model = GpuModel::parse(model).unwrap_or_else(unknown);
        let (gpus, mig_gpus, slices) = match (profile, offered.slices) {
            ("", 0) => (listed.count, listed.cut, 1),
            ("", slices) => {
                let mig_gpus = listed.count.saturating_sub(offered.whole / offered.shares);
                (listed.count, mig_gpus, slices / mig_gpus.max(1))
            }
            // The label counts slices.
            _ => {
                let per_gpu = slices_of_gpu(profile, gpu_type)?;
                let gpus = listed.count.div_ceil(per_gpu);
                (gpus, gpus, per_gpu * offered.shares)
            }
        };
        let is_hami = hami_register(node).is_some();
        // HAMi offers each GPU several times, and no label says so.
        let times = offered.whole.checked_div(gpus.saturating_sub(mig_gpus));
        let times = times.filter(|_| is_hami).unwrap_or(1);
        (1..=MAX_GPUS).contains(&gpus).then(|| Self {
            gpus,
            mig_gpus: mig_gpus.min(gpus),
            slices: slices.max(1),
            shares: offered.shares.max(times),
            is_hami,
            gpu: TemplateGpu {
                name: model.to_string(),
                total: total.unwrap_or_default(),
                model,
                gpu_type,
            },
        })
    }
}

/// The GPUs' names, in either of the forms of HAMi's register.
fn registered_by_hami(register: &str) -> Option<Vec<String>> {
    let names: Option<Vec<String>> = match serde_json::from_str::<Vec<Value>>(register) {
        Ok(devices) => {
            let name = |device: &Value| Some(device["type"].as_str()?.to_owned());
            devices.iter().map(name).collect()
        }
        // Before 2.8.
        Err(_) => {
            let devices = register.trim_end_matches(':').split(':');
            let name = |device: &str| {
                let fields: Vec<&str> = device.split(',').collect();
                matches!(fields.len(), 7 | 9).then(|| fields[4].to_owned())
            };
            devices.map(name).collect()
        }
    };
    // HAMi writes the vendor once more before NVML's name.
    let plain = |name: String| name.trim_start_matches("NVIDIA-").to_owned();
    Some(names?.into_iter().map(plain).collect())
}

/// Into how many slices of that profile a GPU can be cut; one of an unknown type, if all GPUs with such a profile agree.
pub fn slices_of_gpu(profile: &str, gpu: Option<&GpuType>) -> Option<u32> {
    // The media engines are there once.
    if profile.ends_with(".me") {
        return Some(1);
    }
    let own = gpu.and_then(GpuType::family);
    let is_it = |family: &&Family| own.is_none_or(|own| own.gpu == family.gpu);
    let slots = FAMILIES.iter().filter(is_it);
    let mut counts = slots.filter_map(|family| Some(family.slot(profile)?.starts.len() as u32));
    let first = counts.next()?;
    counts.all(|other| other == first).then_some(first)
}
