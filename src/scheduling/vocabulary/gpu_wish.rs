//! What a pod asks of its GPUs by labels of nodes, checked on each GPU of a node whose GPUs are not alike: there a label describes
//! one of them. Where all are alike, the node's labels say it all, and kube-scheduler has compared them.
//!
//! The labels are those of GPU feature discovery. What is not known of a GPU is not held against it.

use super::gpu::{Device, Gpu};
use super::label_selector::{Requirement, Rule};
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

const PRODUCT: &str = "nvidia.com/gpu.product";
const MEMORY_MIB: &str = "nvidia.com/gpu.memory";
const FAMILY: &str = "nvidia.com/gpu.family";
const COMPUTE_MAJOR: &str = "nvidia.com/gpu.compute.major";
const COMPUTE_MINOR: &str = "nvidia.com/gpu.compute.minor";
/// Prefix of the labels of a MIG profile: `nvidia.com/mig-1g.10gb.count`.
const MIG_LABEL_PREFIX: &str = "nvidia.com/mig-";

/// Architectures as GPU feature discovery names them, with CUDA's compute capability and words of their products.
const FAMILIES: [(&str, u8, u8, &str); 10] = [
    ("pascal", 6, 0, "P100"),
    ("volta", 7, 0, "V100"),
    ("turing", 7, 5, "T4"),
    ("ampere", 8, 0, "A100 A800 A30"),
    ("ampere", 8, 6, "A2 A10 A10G A16 A40 A5000 A6000 3090"),
    ("ada-lovelace", 8, 9, "L4 L20 L40 L40S 4090"),
    ("hopper", 9, 0, "H20 H100 H200 H800 GH200"),
    ("blackwell", 10, 0, "B100 B200 GB200"),
    ("blackwell", 10, 3, "B300 GB300"),
    ("blackwell", 12, 0, "5090"),
];

/// Terms of which a GPU must match one, each with what it requires of GPUs. Other labels are of the whole node: they are left out.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GpuSelector(Vec<Vec<Requirement>>);

/// What GPU feature discovery would say of one GPU, if those of its node are not alike; nothing otherwise. Small: texts are
/// compared by their hashes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuTraits {
    product: u32,
    /// The MIG profile, of a slice.
    profile: Option<u32>,
    mib: u32,
    /// Index in [`FAMILIES`].
    family: Option<u8>,
}

impl GpuSelector {
    /// The selector of node-selector terms, of which a node must match one; `None` if one of them requires nothing of GPUs.
    pub fn from_terms(terms: impl IntoIterator<Item = Vec<Requirement>>) -> Option<Self> {
        let is_gpu_label = |one: &Requirement| {
            [PRODUCT, MEMORY_MIB, FAMILY, COMPUTE_MAJOR, COMPUTE_MINOR].contains(&&*one.key)
                || one.key.starts_with(MIG_LABEL_PREFIX)
        };
        let gpu_requirements = |term: Vec<Requirement>| -> Vec<Requirement> {
            term.into_iter().filter(is_gpu_label).collect()
        };
        let terms: Vec<Vec<Requirement>> = terms.into_iter().map(gpu_requirements).collect();
        (!terms.is_empty() && terms.iter().all(|term| !term.is_empty())).then_some(Self(terms))
    }

    /// Whether a GPU is one of those that are asked for, as far as it is known.
    pub fn matches(&self, gpu: GpuTraits) -> bool {
        gpu == GpuTraits::default()
            || self
                .0
                .iter()
                .any(|term| term.iter().all(|one| gpu.satisfies(one)))
    }
}

impl GpuTraits {
    /// Sets each GPU's traits, if the node's GPUs are not alike.
    pub(crate) fn assign_if_unlike(devices: &[Device], gpus: &mut [Gpu]) {
        if devices
            .windows(2)
            .any(|two| (&two[0].model, two[0].total) != (&two[1].model, two[1].total))
        {
            let traits = devices
                .iter()
                .map(|device| Self::from_device(device.model.as_str(), device.total));
            gpus.iter_mut()
                .zip(traits)
                .for_each(|(gpu, traits)| gpu.traits = traits);
        }
    }

    fn from_device(model: &str, total: Bytes) -> Self {
        let (product, profile) = parse_product(model);
        let mut words = model.split(['-', ' ', '_']);
        let family = words.find_map(|word| {
            let is_one =
                |(.., products): &(&str, u8, u8, &str)| products.split(' ').any(|one| one == word);
            FAMILIES.iter().position(is_one)
        });
        Self {
            product,
            profile,
            mib: (total.0 >> 20) as u32,
            family: family.map(|index| index as u8),
        }
    }

    fn satisfies(&self, Requirement { key, rule }: &Requirement) -> bool {
        let family = self.family.map(|index| FAMILIES[usize::from(index)]);
        let is = |number: u32| rule.holds_for(Some(&number.to_string()));
        match (key.as_str(), rule) {
            (PRODUCT, Rule::In(names)) => names.iter().any(|name| self.is_product(name)),
            (PRODUCT, Rule::NotIn(names)) => !names.iter().any(|name| self.is_product(name)),
            (MEMORY_MIB, _) => is(self.mib),
            (FAMILY, _) => family.is_none_or(|(name, ..)| rule.holds_for(Some(name))),
            (COMPUTE_MAJOR, _) => family.is_none_or(|(_, major, ..)| is(major.into())),
            (COMPUTE_MINOR, _) => family.is_none_or(|(_, _, minor, _)| is(minor.into())),
            // How many the node has, and how large they are, is the node's to say.
            _ => key
                .strip_prefix(MIG_LABEL_PREFIX)
                .and_then(|rest| rest.rsplit_once('.'))
                .is_none_or(|(profile, _)| {
                    (self.profile == Some(hash(profile))) != (*rule == Rule::DoesNotExist)
                }),
        }
    }

    /// A slice is of its GPU's product.
    fn is_product(&self, name: &str) -> bool {
        // GPU feature discovery adds that where GPUs are shared by time.
        let (product, profile) = parse_product(name.strip_suffix("-SHARED").unwrap_or(name));
        product == self.product && (profile.is_none() || profile == self.profile)
    }
}

/// The product, and the MIG profile of a slice.
fn parse_product(name: &str) -> (u32, Option<u32>) {
    let (product, profile) = name
        .split_once("-MIG-")
        .map_or((name, None), |(whole, cut)| (whole, Some(cut)));
    (hash(product), profile.map(hash))
}

/// FNV-1a. Labels have dashes for spaces.
fn hash(text: &str) -> u32 {
    text.replace(' ', "-")
        .bytes()
        .fold(0x811c_9dc5, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const A100: &str = "NVIDIA-A100-SXM4-80GB";

    fn traits(model: &str, mib: u64) -> GpuTraits {
        GpuTraits::from_device(model, Bytes::mib(mib))
    }

    fn selector(rules: &[(&str, &str, &[&str])]) -> GpuSelector {
        let rule = |(key, operator, values): &(&str, &str, &[&str])| {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            Requirement::parse(&format!("nvidia.com/{key}"), operator, &values).unwrap()
        };
        GpuSelector::from_terms([rules.iter().map(rule).collect()]).unwrap()
    }

    #[test]
    fn a_gpu_meets_what_its_own_label_would_say() {
        let (a100, rtx) = (
            traits(A100, 81_920),
            traits("NVIDIA GeForce RTX 4090", 24_564),
        );
        for (key, operator, values, of_a100, of_rtx) in [
            ("gpu.product", "In", &[A100][..], true, false),
            (
                "gpu.product",
                "In",
                &["NVIDIA-A100-SXM4-80GB-SHARED"],
                true,
                false,
            ),
            (
                "gpu.product",
                "In",
                &["NVIDIA-GeForce-RTX-4090"],
                false,
                true,
            ),
            ("gpu.product", "NotIn", &[A100], false, true),
            ("gpu.product", "Exists", &[], true, true),
            ("gpu.memory", "Gt", &["70000"], true, false),
            ("gpu.memory", "In", &["24564"], false, true),
            ("gpu.family", "In", &["ampere", "hopper"], true, false),
            ("gpu.family", "In", &["ada-lovelace"], false, true),
            ("gpu.compute.major", "In", &["8"], true, true),
            ("gpu.compute.minor", "Gt", &["5"], false, true),
            ("mig-1g.10gb.count", "Gt", &["0"], false, false),
        ] {
            let wish = selector(&[(key, operator, values)]);
            assert_eq!(
                (wish.matches(a100), wish.matches(rtx)),
                (of_a100, of_rtx),
                "{key} {operator} {values:?}"
            );
        }
    }

    #[test]
    fn a_slice_is_of_its_product_and_of_its_profile() {
        let (whole, slice) = (
            traits(A100, 81_920),
            traits("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 9_728),
        );
        let takes = |wish: GpuSelector| (wish.matches(whole), wish.matches(slice));
        assert_eq!(
            takes(selector(&[("gpu.product", "In", &[A100])])),
            (true, true)
        );
        assert_eq!(
            takes(selector(&[(
                "gpu.product",
                "In",
                &["NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"]
            )])),
            (false, true)
        );
        assert_eq!(
            takes(selector(&[(
                "gpu.product",
                "In",
                &["NVIDIA-A100-SXM4-80GB-MIG-2g.20gb"]
            )])),
            (false, false)
        );
        assert_eq!(
            takes(selector(&[("mig-1g.10gb.count", "Gt", &["0"])])),
            (false, true)
        );
        assert_eq!(
            takes(selector(&[("mig-2g.20gb.product", "Exists", &[])])),
            (false, false)
        );
        assert_eq!(
            takes(selector(&[("mig-1g.10gb.count", "DoesNotExist", &[])])),
            (true, false)
        );
    }

    #[test]
    fn what_is_not_known_of_a_gpu_is_not_held_against_it() {
        let odd = traits("Some-New-Accelerator", 100_000);
        assert!(selector(&[("gpu.family", "In", &["ampere"])]).matches(odd));
        assert!(!selector(&[("gpu.product", "In", &[A100])]).matches(odd));
        let nothing = GpuTraits::default();
        assert!(
            selector(&[("gpu.product", "In", &[A100])]).matches(nothing),
            "its node's GPUs are alike"
        );
    }

    #[test]
    fn one_term_is_enough_and_one_without_gpus_asks_for_none() {
        let is = |key: &str, value: &str| Requirement::equals(key, value);
        let product = || is("nvidia.com/gpu.product", A100);
        let (zone, size) = (
            is("topology.kubernetes.io/zone", "a"),
            is("nvidia.com/gpu.memory", "24564"),
        );
        assert_eq!(
            GpuSelector::from_terms([vec![product()], vec![zone.clone()]]),
            None
        );
        assert_eq!(GpuSelector::from_terms([vec![zone.clone()]]), None);
        assert_eq!(GpuSelector::from_terms([]), None);
        let either = GpuSelector::from_terms([vec![product(), zone], vec![size]]).unwrap();
        assert!(either.matches(traits(A100, 81_920)) && either.matches(traits("L4", 24_564)));
        assert!(!either.matches(traits("L4", 23_034)));
    }
}
