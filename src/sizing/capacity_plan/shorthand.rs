//! A kind of node in one line: `gpus=8,gpu=A100-80GB,cpu=96,memory=1Ti,label=pool=bank`.
//!
//! What is not said of a node is never short, except the GPUs: how many there are and how much memory they have must be known.

use super::geometry::{Geometry, GeometryError};
use super::gpu_types::{GpuType, UnknownGpuType};
use super::question::{NodeTemplate, TemplateGpu, TemplateHost};
use std::collections::BTreeMap;
use stowage_policy_file::nearest::nearest;
use stowage_scheduling::ids::{GpuModel, InvalidName, NodeName};
use stowage_scheduling::units::text::{Malformed, check_unit};
use stowage_scheduling::units::{Bytes, MilliCpu, QuantityError};
use stowage_scheduling::vocabulary::demand::MAX_GPUS;

/// Keys of the shorthand, in the order of the help text.
const KEYS: [&str; 8] = [
    "gpus", "gpu", "vram", "cpu", "memory", "label", "count", "name",
];
/// Maximum length of a kind's name in bytes, so that it is still a valid node name with a number appended.
const MAX_NAME_LENGTH: usize = 100;

/// A kind of node as it was written. Its GPU may be given later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeShorthand {
    gpus: u32,
    gpu: Option<String>,
    vram: Option<Bytes>,
    cpu: Option<MilliCpu>,
    memory: Option<Bytes>,
    labels: BTreeMap<String, String>,
    count: Option<u32>,
    name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeShorthandError {
    #[error("{part:?} is no KEY=VALUE; write such as gpus=8,gpu=A100-80GB")]
    NotKeyValue { part: String },
    #[error("{key:?} is not a key; {}", key_suggestion(.key))]
    UnknownKey { key: String },
    #[error("{key} stands there twice; write it once")]
    DuplicateKey { key: &'static str },
    #[error("{key} is {text:?}; write {expected}")]
    Value {
        key: &'static str,
        text: String,
        expected: &'static str,
    },
    #[error("{key} is {text:?}: {error}")]
    Quantity {
        key: &'static str,
        text: String,
        error: QuantityError,
    },
    #[error("{key} is {text:?}, {}; {}", .problem.is, .problem.help)]
    NoUnit {
        key: &'static str,
        text: String,
        problem: Malformed,
    },
    #[error("it does not say how many GPUs a node has; add gpus=8")]
    NoGpus,
    #[error(
        "it does not say which GPU the nodes have; add gpu=A100-80GB, or its memory as vram=80Gi"
    )]
    NoGpu,
    #[error("gpu: {0}")]
    Gpu(#[from] UnknownGpuType),
    #[error("{0}")]
    Name(#[from] InvalidName),
    #[error("--mig: {0}")]
    Geometry(#[from] GeometryError),
    #[error(
        "--mig: where GPU {gpu:?} can be cut is not known; name a known GPU, such as A100-80GB, or leave --mig out"
    )]
    UnknownGeometry { gpu: String },
    #[error(
        "--mig: how much memory a slice {profile} of {gpu} has is not known here; leave --mig out, which pods that ask a device plugin for slices do \
         not need, or describe a slice as a GPU, with the memory that nvidia-smi mig -lgip prints as vram="
    )]
    UnknownSlice { gpu: String, profile: String },
    #[error(
        "--mig: {geometry} has {slices} of memory, and vram= says that the GPU has {vram}; leave vram= out, or name the GPU that has that much"
    )]
    SlicesTooLarge {
        geometry: String,
        slices: Bytes,
        vram: Bytes,
    },
}

fn key_suggestion(key: &str) -> String {
    match nearest(key, &KEYS) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("the keys are {}", KEYS.join(", ")),
    }
}

/// Rejects an amount that has lost its unit, and none at all.
fn check_amount(key: &'static str, text: &str, bytes: Bytes) -> Result<Bytes, NodeShorthandError> {
    if bytes == Bytes::ZERO {
        let expected = "an amount above 0, such as 80Gi";
        return Err(NodeShorthandError::Value {
            key,
            text: text.into(),
            expected,
        });
    }
    check_unit(text).map_err(|problem| NodeShorthandError::NoUnit {
        key,
        text: text.into(),
        problem,
    })?;
    Ok(bytes)
}

impl NodeShorthand {
    pub fn parse(text: &str) -> Result<Self, NodeShorthandError> {
        let mut shorthand = Self::default();
        let mut keys_set: Vec<&'static str> = Vec::new();
        for part in text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty())
        {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| NodeShorthandError::NotKeyValue { part: part.into() })?;
            let (key, value) = (key.trim(), value.trim());
            let known_key = KEYS.iter().find(|candidate| **candidate == key);
            let key =
                *known_key.ok_or_else(|| NodeShorthandError::UnknownKey { key: key.into() })?;
            if key != "label" && keys_set.contains(&key) {
                return Err(NodeShorthandError::DuplicateKey { key });
            }
            keys_set.push(key);
            shorthand.set(key, value)?;
        }
        if shorthand.gpus == 0 {
            Err(NodeShorthandError::NoGpus)
        } else {
            Ok(shorthand)
        }
    }

    /// Whether it says which GPU its nodes have.
    pub fn names_gpu(&self) -> bool {
        self.gpu.is_some() || self.vram.is_some()
    }

    /// The shorthand with another GPU type.
    pub fn with_gpu(self, gpu: &GpuType) -> Self {
        Self {
            gpu: Some(gpu.name.into()),
            vram: None,
            ..self
        }
    }

    /// The kind of node, each of its GPUs cut as `mig` says.
    pub fn template(&self, mig: Option<&str>) -> Result<NodeTemplate, NodeShorthandError> {
        let gpu = self.template_gpu()?;
        let geometry = mig.map(|mig| geometry(mig, &gpu));
        let labels = self.labels_with(&gpu);
        Ok(NodeTemplate {
            name: self.name.clone().unwrap_or_else(|| node_name(&gpu.name)),
            gpus: self.gpus,
            geometry: geometry.transpose()?,
            gpu,
            plugin_devices: None,
            labels,
            taints: Vec::new(),
            host: TemplateHost::Described {
                cpu: self.cpu,
                memory: self.memory,
            },
            max_nodes: self.count,
        })
    }

    fn set(&mut self, key: &'static str, text: &str) -> Result<(), NodeShorthandError> {
        let quantity = |error| NodeShorthandError::Quantity {
            key,
            text: text.into(),
            error,
        };
        let value = |expected| NodeShorthandError::Value {
            key,
            text: text.into(),
            expected,
        };
        match key {
            "gpus" => {
                let count = text
                    .parse()
                    .ok()
                    .filter(|count| (1..=MAX_GPUS).contains(count));
                self.gpus = count.ok_or_else(|| value("a whole number from 1 to 64"))?;
            }
            "gpu" => self.gpu = Some(GpuModel::parse(text)?.to_string()),
            "vram" => {
                self.vram = Some(check_amount(
                    key,
                    text,
                    Bytes::parse_quantity(text).map_err(quantity)?,
                )?)
            }
            "cpu" => self.cpu = Some(MilliCpu::parse_quantity(text).map_err(quantity)?),
            "memory" => {
                self.memory = Some(check_amount(
                    key,
                    text,
                    Bytes::parse_quantity_rounding_up(text).map_err(quantity)?,
                )?);
            }
            "label" => {
                let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
                let (key, value) =
                    pair.ok_or_else(|| value("KEY=VALUE, such as label=pool=bank"))?;
                self.labels.insert(key.into(), value.into());
            }
            "count" => {
                let count = text.parse().ok().filter(|count| *count > 0);
                self.count = Some(
                    count.ok_or_else(|| value("a whole number, the most nodes there can be"))?,
                );
            }
            _ => {
                let name = NodeName::parse(text)?.to_string();
                let is_short = name.len() <= MAX_NAME_LENGTH;
                self.name = Some(
                    Some(name)
                        .filter(|_| is_short)
                        .ok_or_else(|| value("a shorter name"))?,
                );
            }
        }
        Ok(())
    }

    fn template_gpu(&self) -> Result<TemplateGpu, NodeShorthandError> {
        let found = self.gpu.as_deref().map(GpuType::find);
        match (found, self.vram) {
            (None, None) => Err(NodeShorthandError::NoGpu),
            (Some(Ok(gpu_type)), vram) => Ok(TemplateGpu {
                name: gpu_type.name.into(),
                model: gpu_type.model(),
                total: vram.unwrap_or(gpu_type.total()),
                gpu_type: Some(gpu_type),
            }),
            // With its memory any GPU will do.
            (_, Some(total)) => {
                let name = self.gpu.clone().unwrap_or_else(|| "gpu".into());
                Ok(TemplateGpu {
                    model: GpuModel::parse(&name)?,
                    name,
                    total,
                    gpu_type: None,
                })
            }
            (Some(Err(error)), None) => Err(error.into()),
        }
    }

    /// The labels, and those that nodes with such GPUs always have.
    fn labels_with(&self, gpu: &TemplateGpu) -> BTreeMap<String, String> {
        let standard_labels = [
            ("kubernetes.io/os", "linux".to_owned()),
            ("kubernetes.io/arch", "amd64".to_owned()),
            ("nvidia.com/gpu.present", "true".to_owned()),
            ("nvidia.com/gpu.product", gpu.model.to_string()),
            ("nvidia.com/gpu.count", self.gpus.to_string()),
            ("nvidia.com/gpu.memory", (gpu.total.0 >> 20).to_string()),
        ];
        let mut labels: BTreeMap<String, String> = standard_labels
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        labels.extend(self.labels.clone());
        labels
    }
}

/// Parses a geometry; rejects slices of unknown memory, and slices with more memory than the GPU.
fn geometry(mig: &str, gpu: &TemplateGpu) -> Result<Geometry, NodeShorthandError> {
    let gpu_type = gpu
        .gpu_type
        .ok_or_else(|| NodeShorthandError::UnknownGeometry {
            gpu: gpu.name.clone(),
        })?;
    let geometry = Geometry::parse(mig, gpu_type)?;
    let slice = |profile: &str| {
        let unknown = || NodeShorthandError::UnknownSlice {
            gpu: gpu.name.clone(),
            profile: profile.into(),
        };
        gpu_type.slice_memory(profile).ok_or_else(unknown)
    };
    let slices: Bytes = geometry
        .profiles()
        .map(slice)
        .collect::<Result<Vec<Bytes>, _>>()?
        .into_iter()
        .sum();
    match slices > gpu.total {
        true => {
            let geometry = geometry.to_string();
            Err(NodeShorthandError::SlicesTooLarge {
                geometry,
                slices,
                vram: gpu.total,
            })
        }
        false => Ok(geometry),
    }
}

/// A valid node name made of a GPU type: `a100-80gb`.
pub fn node_name(gpu: &str) -> String {
    let plain = gpu.chars().map(|c| {
        if c.is_ascii_alphanumeric() {
            c.to_ascii_lowercase()
        } else {
            '-'
        }
    });
    let name: String = plain.take(MAX_NAME_LENGTH).collect();
    if name.is_empty() { "node".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let parsed = NodeShorthand::parse(text).and_then(|nodes| nodes.template(None));
        parsed.unwrap_err().to_string()
    }

    #[test]
    fn a_line_describes_a_kind_of_node() {
        let text = "gpus=8, gpu=A100-80GB, cpu=96, memory=1Ti, label=pool=bank, label=zone=a, count=4, name=bank";
        let found = NodeShorthand::parse(text)
            .unwrap()
            .template(Some("3g.40gb,3g.40gb"))
            .unwrap();
        assert_eq!(
            (found.gpus, &*found.name, found.max_nodes),
            (8, "bank", Some(4))
        );
        assert_eq!(found.gpu.total, Bytes::gib(80));
        assert_eq!(
            (&*found.labels["pool"], &*found.labels["zone"]),
            ("bank", "a")
        );
        assert_eq!(
            found.labels["nvidia.com/gpu.product"],
            "NVIDIA-A100-SXM4-80GB"
        );
        assert_eq!(found.geometry.unwrap().to_string(), "3g.40gb × 2");
        let host = TemplateHost::Described {
            cpu: Some(MilliCpu(96_000)),
            memory: Some(Bytes::gib(1024)),
        };
        assert_eq!(found.host, host);
    }

    #[test]
    fn an_unknown_gpu_is_described_by_its_memory() {
        let found = NodeShorthand::parse("gpus=1,gpu=my-gpu,vram=24Gi")
            .unwrap()
            .template(None)
            .unwrap();
        assert_eq!(
            (&*found.gpu.name, found.gpu.total, &*found.name),
            ("my-gpu", Bytes::gib(24), "my-gpu")
        );
        let cut = NodeShorthand::parse("gpus=1,vram=24Gi")
            .unwrap()
            .template(Some("1g.6gb"));
        assert!(cut.unwrap_err().to_string().contains("such as A100-80GB"));
    }

    #[test]
    fn slices_of_unknown_memory_or_with_more_than_the_gpu_are_refused() {
        let refused = |nodes: &str, mig: &str| {
            NodeShorthand::parse(nodes)
                .unwrap()
                .template(Some(mig))
                .unwrap_err()
                .to_string()
        };
        let unknown = refused("gpus=8,gpu=B200", "1g.23gb,1g.23gb");
        assert!(
            unknown.contains("a slice 1g.23gb of B200-180GB")
                && unknown.contains("leave --mig out"),
            "{unknown}"
        );
        assert!(refused("gpus=8,gpu=H100-94GB", "3g.47gb").contains("describe a slice as a GPU"));
        let large = refused("gpus=8,gpu=A100-80GB,vram=40Gi", "3g.40gb,3g.40gb");
        assert!(
            large.contains("3g.40gb × 2 has 78.5 GiB of memory")
                && large.contains("leave vram= out"),
            "{large}"
        );
        assert!(
            NodeShorthand::parse("gpus=8,gpu=A100-80GB,vram=40Gi")
                .unwrap()
                .template(Some("3g.40gb"))
                .is_ok()
        );
    }

    #[test]
    fn a_mistake_says_what_to_write() {
        assert_eq!(
            error("gpuz=8,gpu=A100-80GB"),
            "\"gpuz\" is not a key; did you mean gpus?"
        );
        assert!(error("color=red,gpus=8").contains("the keys are gpus, gpu, vram"));
        assert_eq!(
            error("gpu=A100-80GB"),
            "it does not say how many GPUs a node has; add gpus=8"
        );
        assert!(error("gpus=8").contains("add gpu=A100-80GB"));
        assert!(error("gpus=0,gpu=L4").contains("from 1 to 64"));
        assert!(error("gpus=8,gpu=A100").contains("A100-40GB, A100-80GB: write which"));
        assert_eq!(
            error("gpus=8,gpus=4,gpu=L4"),
            "gpus stands there twice; write it once"
        );
        assert!(
            error("gpus=8,gpu=L4,memory=lots").contains("memory is \"lots\": it is not a quantity")
        );
        assert!(error("gpus=8,gpu=L4,label=x").contains("label=pool=bank"));
        assert!(error("8").contains("KEY=VALUE"));
    }
}
