//! The GPU types that a plan knows by name: how much memory each has, and its MIG slices. Data, and how a name is found in it.
//!
//! Sources. `total`: what NVML answers and `nvidia-smi` prints for the whole card with ECC as it is delivered; GPU feature
//! discovery puts the same number into `nvidia.com/gpu.memory`. `product`: its label `nvidia.com/gpu.product` of the usual form
//! factor. Memory of slices: what `nvidia-smi mig -lgip` prints, at the multiple of 64 MiB that it is; where an A100 and an H100
//! differ, each has its own. Nothing here knows where profiles can be placed: that is `policy_file::format::mig`.

use stowage_policy_file::format::mig::Family;
use stowage_policy_file::nearest::nearest;
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::units::Bytes;

/// A GPU as its vendor sells it.
#[derive(Debug, PartialEq, Eq)]
pub struct GpuType {
    /// As people write it.
    pub name: &'static str,
    product: &'static str,
    total_mib: u64,
    mig: Option<Mig>,
}

#[derive(Debug, PartialEq, Eq)]
struct Mig {
    /// Names the [`Family`].
    family: &'static str,
    /// Profiles with the memory of a slice in MiB; empty if it is not known.
    slices: &'static [(&'static str, u64)],
}

const fn without_mig(name: &'static str, product: &'static str, total_mib: u64) -> GpuType {
    GpuType {
        name,
        product,
        total_mib,
        mig: None,
    }
}

const fn with_mig(
    name: &'static str,
    product: &'static str,
    total_mib: u64,
    family: &'static str,
    slices: &'static [(&'static str, u64)],
) -> GpuType {
    GpuType {
        name,
        product,
        total_mib,
        mig: Some(Mig { family, slices }),
    }
}

/// Known GPU types by memory, smallest first; of equal ones the older first.
pub(crate) const GPU_TYPES: [GpuType; 14] = [
    without_mig("T4-16GB", "Tesla-T4", 15_360),
    without_mig("A10-24GB", "NVIDIA-A10", 23_028),
    without_mig("A10G-24GB", "NVIDIA-A10G", 23_028),
    without_mig("L4-24GB", "NVIDIA-L4", 23_034),
    without_mig("RTX-4090-24GB", "NVIDIA-GeForce-RTX-4090", 24_564),
    with_mig(
        "A30-24GB",
        "NVIDIA-A30",
        24_576,
        "A30",
        &[("1g.6gb", 5_952), ("2g.12gb", 11_968), ("4g.24gb", 24_000)],
    ),
    with_mig(
        "A100-40GB",
        "NVIDIA-A100-SXM4-40GB",
        40_960,
        "A100 40 GB",
        &[
            ("1g.5gb", 4_864),
            ("1g.10gb", 9_984),
            ("2g.10gb", 9_984),
            ("3g.20gb", 20_096),
            ("4g.20gb", 20_096),
            ("7g.40gb", 40_448),
        ],
    ),
    without_mig("L40S-48GB", "NVIDIA-L40S", 46_068),
    with_mig(
        "H100-80GB",
        "NVIDIA-H100-80GB-HBM3",
        81_559,
        "A100 or H100 80 GB",
        &[
            ("1g.10gb", 9_984),
            ("1g.20gb", 20_096),
            ("2g.20gb", 20_096),
            ("3g.40gb", 40_448),
            ("4g.40gb", 40_448),
            ("7g.80gb", 81_152),
        ],
    ),
    with_mig(
        "A100-80GB",
        "NVIDIA-A100-SXM4-80GB",
        81_920,
        "A100 or H100 80 GB",
        &[
            ("1g.10gb", 9_728),
            ("1g.20gb", 19_968),
            ("2g.20gb", 19_968),
            ("3g.40gb", 40_192),
            ("4g.40gb", 40_192),
            ("7g.80gb", 80_896),
        ],
    ),
    with_mig("H100-94GB", "NVIDIA-H100-NVL", 95_830, "H100 94 GB", &[]),
    with_mig(
        "RTX-PRO-6000-96GB",
        "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        97_887,
        "RTX PRO 6000",
        &[
            ("1g.24gb", 24_192),
            ("2g.48gb", 48_512),
            ("4g.96gb", 97_280),
        ],
    ),
    with_mig(
        "H200-141GB",
        "NVIDIA-H200",
        143_771,
        "H200",
        &[
            ("1g.18gb", 16_384),
            ("1g.35gb", 33_280),
            ("2g.35gb", 33_280),
            ("3g.71gb", 71_424),
            ("4g.71gb", 71_424),
            ("7g.141gb", 143_360),
        ],
    ),
    with_mig("B200-180GB", "NVIDIA-B200", 183_359, "B200", &[]),
];

/// Product labels of other form factors, and what GKE calls a type, if that is neither its name nor its product.
const OTHER_NAMES: [(&str, &str); 5] = [
    ("NVIDIA-A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA-A100-80GB-PCIe", "A100-80GB"),
    ("NVIDIA-H100-PCIe", "H100-80GB"),
    ("nvidia-tesla-a100", "A100-40GB"),
    ("nvidia-h100-mega-80gb", "H100-80GB"),
];

/// Why a text names no GPU type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownGpuType {
    #[error("{name:?} is one of {}: write which", .candidates.join(", "))]
    Ambiguous {
        name: String,
        candidates: Vec<&'static str>,
    },
    #[error("{name:?} is not a GPU type known here; did you mean {near}?")]
    Misspelled { name: String, near: &'static str },
    #[error(
        "{name:?} is not a GPU type known here; give its memory beside the name, such as vram=24Gi, or one of {}",
        known_names().join(", ")
    )]
    Unknown { name: String },
}

impl GpuType {
    /// Finds a type by its name, by the part of the name before the size if that is unambiguous, or by a product label.
    pub fn find(text: &str) -> Result<&'static Self, UnknownGpuType> {
        let wanted = normalize(text);
        let mut others = OTHER_NAMES.iter();
        let other = others.find(|(other, _)| normalize(other) == wanted);
        let wanted = other.map_or(wanted, |(_, name)| normalize(name));
        let is_it = |one: &&Self| {
            [one.name, one.product]
                .iter()
                .any(|name| normalize(name) == wanted)
        };
        if let Some(found) = GPU_TYPES.iter().find(is_it) {
            return Ok(found);
        }
        let short = |one: &&Self| {
            one.name
                .rsplit_once('-')
                .is_some_and(|(short, _)| normalize(short) == wanted)
        };
        let candidates: Vec<&'static Self> = GPU_TYPES.iter().filter(short).collect();
        match candidates[..] {
            [only] => return Ok(only),
            [_, _, ..] => {
                let candidates = candidates.iter().map(|one| one.name).collect();
                return Err(UnknownGpuType::Ambiguous {
                    name: text.into(),
                    candidates,
                });
            }
            [] => {}
        }
        match nearest(text, &known_names())
            .and_then(|near| known_names().into_iter().find(|name| *name == near))
        {
            Some(near) => Err(UnknownGpuType::Misspelled {
                name: text.into(),
                near,
            }),
            None => Err(UnknownGpuType::Unknown { name: text.into() }),
        }
    }

    /// Memory as NVML reports it.
    pub fn total(&self) -> Bytes {
        Bytes::mib(self.total_mib)
    }

    pub fn model(&self) -> GpuModel {
        GpuModel::parse(self.product).expect("a product label is a name")
    }

    /// Where its MIG profiles can be placed; `None` if it has no MIG.
    pub fn family(&self) -> Option<&'static Family> {
        Family::for_gpu(self.mig.as_ref()?.family)
    }

    /// Memory of a slice of that profile; `None` if it is not known. A `+me` suffix (media engines) makes no difference.
    pub fn slice_memory(&self, profile: &str) -> Option<Bytes> {
        let plain = profile.split_once('+').map_or(profile, |(plain, _)| plain);
        let slices = self.mig.as_ref()?.slices;
        slices
            .iter()
            .find(|(name, _)| *name == plain)
            .map(|(_, mib)| Bytes::mib(*mib))
    }
}

fn known_names() -> Vec<&'static str> {
    GPU_TYPES.iter().map(|one| one.name).collect()
}

/// The name without separators, in upper case: neither counts in a comparison.
fn normalize(text: &str) -> String {
    text.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_uppercase())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Result<&'static str, String> {
        GpuType::find(text)
            .map(|found| found.name)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_type_is_found_by_its_name_in_any_spelling_and_by_its_product() {
        assert_eq!(name("A100-80GB").as_deref(), Ok("A100-80GB"));
        assert_eq!(name("a100 80gb").as_deref(), Ok("A100-80GB"));
        assert_eq!(name("NVIDIA-H100-80GB-HBM3").as_deref(), Ok("H100-80GB"));
        assert_eq!(name("l40s").as_deref(), Ok("L40S-48GB"));
        assert_eq!(name("NVIDIA A100 80GB PCIe").as_deref(), Ok("A100-80GB"));
        for (other, own) in OTHER_NAMES {
            assert_eq!(name(other).as_deref(), Ok(own));
        }
    }

    #[test]
    fn a_name_that_is_no_types_says_what_to_write() {
        let error = |text| name(text).unwrap_err();
        assert_eq!(
            error("A100"),
            "\"A100\" is one of A100-40GB, A100-80GB: write which"
        );
        assert!(
            error("A100-81GB").contains("did you mean A100-80GB?"),
            "{}",
            error("A100-81GB")
        );
        assert!(error("voodoo").contains("vram=24Gi"), "{}", error("voodoo"));
    }

    #[test]
    fn every_mig_row_names_a_family_and_has_all_its_profiles_or_none() {
        for gpu in &GPU_TYPES {
            let Some(mig) = &gpu.mig else { continue };
            let family = gpu
                .family()
                .unwrap_or_else(|| panic!("{}: no family {}", gpu.name, mig.family));
            let sized: Vec<&str> = mig.slices.iter().map(|(profile, _)| *profile).collect();
            assert!(
                sized.is_empty() || sized == family.profiles(),
                "{}: {sized:?}",
                gpu.name
            );
            assert!(
                mig.slices
                    .iter()
                    .all(|(_, mib)| mib.is_multiple_of(64) && *mib < gpu.total_mib)
            );
        }
    }

    #[test]
    fn types_stand_in_order_of_size() {
        assert!(GPU_TYPES.is_sorted_by_key(|gpu| gpu.total_mib));
    }

    #[test]
    fn a_slice_has_the_memory_of_its_own_gpu() {
        let slice = |gpu, profile| GpuType::find(gpu).unwrap().slice_memory(profile);
        assert_eq!(slice("A100-80GB", "3g.40gb"), Some(Bytes::mib(40_192)));
        assert_eq!(slice("H100-80GB", "1g.10gb+me"), Some(Bytes::mib(9_984)));
        assert_eq!(slice("B200", "1g.23gb"), None);
        assert_eq!(slice("L40S", "1g.10gb"), None);
    }
}
