//! The names that device plugins and DRA drivers give to GPUs and MIG slices.
//!
//! A name is understood only as one of a rule's forms: a number of another resource is no GPU's. What no rule understands is
//! reported, because its pod's memory would look like nobody's.

use stowage_report::GpuReport;
use stowage_scheduling::ids::GpuUuid;

/// A name of a GPU, or of a MIG slice of it, as understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DeviceId {
    /// By UUID, perhaps with the number of a share (`GPU-…-3` of HAMi and Volcano).
    Uuid(GpuUuid),
    /// By NVML's index, and the slice by its place: `deviceIDStrategy: index` of NVIDIA's device plugin.
    Index { gpu: u32, slice: Option<u32> },
    /// By the number of its device file, and the slice by its GPU instance: GKE's plugin, and DRA drivers.
    Minor { gpu: u32, slice: Option<u32> },
}

impl DeviceId {
    /// A device plugin's id, without the replica of a shared GPU (`::3`, `/vgpu3`).
    pub fn from_plugin(id: &str) -> Option<Self> {
        let without_replica = id.split("::").next()?;
        if without_replica.starts_with("GPU-") || without_replica.starts_with("MIG-") {
            return GpuUuid::parse(without_replica).ok().map(Self::Uuid);
        }
        match without_replica.strip_prefix("nvidia") {
            Some(file) => numbers(file.split("/vgpu").next()?, "/gi")
                .map(|(gpu, slice)| Self::Minor { gpu, slice }),
            None => numbers(without_replica, ":").map(|(gpu, slice)| Self::Index { gpu, slice }),
        }
    }

    /// A device of a DRA claim: `gpu-0`, or the UUID.
    pub(crate) fn from_claim(device: &str) -> Option<Self> {
        const UUID_LENGTH: usize = "GPU-00000000-0000-0000-0000-000000000000".len();
        match device
            .strip_prefix("gpu-")
            .and_then(|minor| minor.parse().ok())
        {
            Some(gpu) => Some(Self::Minor { gpu, slice: None }),
            None => GpuUuid::parse(device)
                .ok()
                .filter(|_| device.len() == UUID_LENGTH)
                .map(Self::Uuid),
        }
    }

    /// Whether it names this GPU or slice.
    pub fn matches(&self, gpu: &GpuReport) -> bool {
        let numbers = gpu.numbers;
        let (is_of_gpu, slice, slice_number) = match self {
            Self::Uuid(uuid) => return matches_uuid(uuid.as_str(), gpu.uuid.as_str()),
            Self::Index { gpu: index, slice } => (gpu.index == *index, slice, numbers.mig_index),
            // A driver that does not tell the number counts device files as it counts GPUs.
            Self::Minor { gpu: minor, slice } => (
                numbers.minor.unwrap_or(gpu.index) == *minor,
                slice,
                numbers.gpu_instance,
            ),
        };
        is_of_gpu && slice.is_some() == gpu.parent.is_some() && *slice == slice_number
    }
}

/// Whether a resource or a DRA driver (`gpu.nvidia.com`) is one of GPUs, so that its ids name them.
pub fn is_gpu_resource(name: &str) -> bool {
    name.starts_with("nvidia.com/") || name.contains("gpu")
}

/// A GPU's number, and a slice's after the separator.
fn numbers(text: &str, separator: &str) -> Option<(u32, Option<u32>)> {
    match text.split_once(separator) {
        None => Some((text.parse().ok()?, None)),
        Some((gpu, slice)) => Some((gpu.parse().ok()?, Some(slice.parse().ok()?))),
    }
}

/// DRA names are in lower case, and a share has a number after the UUID.
fn matches_uuid(id: &str, uuid: &str) -> bool {
    let Some((head, share)) = id.split_at_checked(uuid.len()) else {
        return false;
    };
    let is_share = share
        .strip_prefix('-')
        .is_some_and(|number| number.parse::<u32>().is_ok());
    head.eq_ignore_ascii_case(uuid) && (share.is_empty() || is_share)
}
