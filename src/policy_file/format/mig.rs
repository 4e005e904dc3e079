//! The known MIG profiles, and where each can be placed on its GPU.
//!
//! Source: NVIDIA's MIG user guide, "Supported MIG Profiles", and the placements that `nvidia-smi mig -lgipp` prints. A GPU has
//! memory slices in a row; each profile takes some adjacent ones, beginning at certain places only. That decides which profiles
//! fit together: two `3g` fill an A100 although one compute slice is left.

use super::Malformed;
use crate::nearest::nearest;

/// Where a profile can begin, and how many memory slices it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub starts: &'static [u8],
    pub slices: u8,
}

const fn slot(starts: &'static [u8], slices: u8) -> Slot {
    Slot { starts, slices }
}

// On GPUs with 7 compute and 8 memory slices.
const ONE: Slot = slot(&[0, 1, 2, 3, 4, 5, 6], 1);
const ONE_WITH_DOUBLE_MEMORY: Slot = slot(&[0, 2, 4, 6], 2);
const TWO: Slot = slot(&[0, 2, 4], 2);
const THREE: Slot = slot(&[0, 4], 4);
const FOUR: Slot = slot(&[0], 4);
const SEVEN: Slot = slot(&[0], 8);
const SEVENTHS: [Slot; 6] = [ONE, ONE_WITH_DOUBLE_MEMORY, TWO, THREE, FOUR, SEVEN];

// On GPUs with 4 of each.
const QUARTERS: [Slot; 3] = [slot(&[0, 1, 2, 3], 1), slot(&[0, 2], 2), slot(&[0], 4)];

/// The profiles of one kind of GPU, with their slots in the same order.
#[derive(Debug)]
pub struct Family {
    pub gpu: &'static str,
    profiles: &'static [&'static str],
    slots: &'static [Slot],
}

macro_rules! seventh {
    ($gpu:literal, $($profile:literal)+) => {
        Family { gpu: $gpu, profiles: &[$($profile),+], slots: &SEVENTHS }
    };
}

macro_rules! quarter {
    ($gpu:literal, $($profile:literal)+) => {
        Family { gpu: $gpu, profiles: &[$($profile),+], slots: &QUARTERS }
    };
}

/// All GPUs with MIG, in the order of their release.
pub const FAMILIES: [Family; 11] = [
    seventh!("A100 40 GB", "1g.5gb" "1g.10gb" "2g.10gb" "3g.20gb" "4g.20gb" "7g.40gb"),
    quarter!("A30", "1g.6gb" "2g.12gb" "4g.24gb"),
    seventh!("A100 or H100 80 GB", "1g.10gb" "1g.20gb" "2g.20gb" "3g.40gb" "4g.40gb" "7g.80gb"),
    seventh!("H100 94 GB", "1g.12gb" "1g.24gb" "2g.24gb" "3g.47gb" "4g.47gb" "7g.94gb"),
    seventh!("H100 or GH200 96 GB", "1g.12gb" "1g.24gb" "2g.24gb" "3g.48gb" "4g.48gb" "7g.96gb"),
    seventh!("H200", "1g.18gb" "1g.35gb" "2g.35gb" "3g.71gb" "4g.71gb" "7g.141gb"),
    seventh!("GH200 144 GB", "1g.18gb" "1g.36gb" "2g.36gb" "3g.72gb" "4g.72gb" "7g.144gb"),
    seventh!("B200", "1g.23gb" "1g.45gb" "2g.45gb" "3g.90gb" "4g.90gb" "7g.180gb"),
    seventh!("GB200", "1g.23gb" "1g.47gb" "2g.47gb" "3g.93gb" "4g.93gb" "7g.186gb"),
    seventh!("B300", "1g.34gb" "1g.67gb" "2g.67gb" "3g.135gb" "4g.135gb" "7g.269gb"),
    quarter!("RTX PRO 6000", "1g.24gb" "2g.48gb" "4g.96gb"),
];

/// Marks the one slice of a GPU that has the media engines.
const WITH_MEDIA: &str = "+me";

/// How many compute slices a profile takes: 3 for `3g.40gb`.
pub fn compute_slices(profile: &str) -> Option<u32> {
    profile.split_once("g.")?.0.parse().ok()
}

impl Family {
    /// The family that [`Family::gpu`] names.
    pub fn for_gpu(gpu: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|family| family.gpu == gpu)
    }

    /// All profiles of this GPU, without their variants with media engines.
    pub fn profiles(&self) -> &'static [&'static str] {
        self.profiles
    }

    /// How many memory slices the GPU has: as many as its largest profile takes.
    pub fn memory_slices(&self) -> u8 {
        self.slots
            .iter()
            .map(|slot| slot.slices)
            .max()
            .unwrap_or_default()
    }

    /// How many compute slices the GPU has: as many as its largest profile takes.
    pub fn compute_slices(&self) -> u32 {
        self.profiles
            .iter()
            .filter_map(|profile| compute_slices(profile))
            .max()
            .unwrap_or_default()
    }

    /// `None` if this GPU has no such profile.
    pub fn slot(&self, profile: &str) -> Option<Slot> {
        let profile = profile.strip_suffix(WITH_MEDIA).unwrap_or(profile);
        let index = self.profiles.iter().position(|one| *one == profile)?;
        self.slots.get(index).copied()
    }

    /// Whether one GPU can be partitioned into all of these at once.
    pub fn can_be_partitioned_into(&self, profiles: &[&str]) -> bool {
        let media = profiles
            .iter()
            .filter(|profile| profile.ends_with(WITH_MEDIA))
            .count();
        let slots: Option<Vec<Slot>> = profiles.iter().map(|profile| self.slot(profile)).collect();
        // No GPU has more than eight slices; the search below tries each order of places.
        slots.is_some_and(|mut slots| {
            slots.sort_by_key(|slot| std::cmp::Reverse(slot.slices));
            media <= 1 && slots.len() <= 8 && can_place_all(&slots, 0)
        })
    }
}

/// Whether all slots can be placed beside the memory slices in `taken`, a bit for each.
fn can_place_all(slots: &[Slot], taken: u32) -> bool {
    let Some((slot, others)) = slots.split_first() else {
        return true;
    };
    let size = (1u32 << slot.slices) - 1;
    let free = slot
        .starts
        .iter()
        .map(|start| size << start)
        .filter(|mask| taken & mask == 0);
    free.into_iter()
        .any(|mask| can_place_all(others, taken | mask))
}

/// Checks that some GPU has this MIG profile.
pub fn check_profile(text: &str) -> Result<(), Malformed> {
    if FAMILIES.iter().any(|family| family.slot(text).is_some()) {
        return Ok(());
    }
    let all_profiles: Vec<&str> = FAMILIES
        .iter()
        .flat_map(|family| family.profiles)
        .copied()
        .collect();
    let help = match nearest(text, &all_profiles) {
        Some(near) => format!("did you mean `{near}`?"),
        None => {
            "`nvidia-smi mig -lgip` lists what a GPU can be cut into; without `mig` any cut is taken".into()
        }
    };
    Err(Malformed::new("not a MIG profile of any GPU", help))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn possible(profiles: &[&str]) -> bool {
        FAMILIES
            .iter()
            .any(|family| family.can_be_partitioned_into(profiles))
    }

    #[test]
    fn only_geometries_of_the_hardware_are_possible() {
        for geometry in [
            &["3g.40gb", "3g.40gb"] as &[&str],
            &["1g.10gb"; 7],
            &["1g.20gb"; 4],
            &["4g.40gb", "3g.40gb"],
            &["4g.40gb", "2g.20gb", "1g.10gb"],
            &["2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb"],
            &["1g.10gb", "3g.40gb", "2g.20gb"],
            &["1g.10gb+me", "1g.10gb"],
            &["2g.12gb", "1g.6gb", "1g.6gb"],
            &[],
        ] {
            assert!(possible(geometry), "{geometry:?}");
        }
        for geometry in [
            &["2g.20gb"; 4] as &[&str],
            &["4g.40gb", "4g.40gb"],
            &["3g.40gb", "3g.40gb", "1g.10gb"],
            &["1g.10gb"; 8],
            &["7g.80gb", "1g.10gb"],
            &["3g.40gb", "3g.20gb"],
            &["1g.10gb+me", "1g.10gb+me"],
            &["1g.10gb"; 4000],
        ] {
            assert!(!possible(geometry), "{:?}", geometry.first());
        }
    }

    #[test]
    fn a_misspelled_profile_suggests_the_right_one() {
        assert_eq!(
            check_profile("3g.40g").unwrap_err().help,
            "did you mean `3g.40gb`?"
        );
        assert!(check_profile("3g.71gb").is_ok() && check_profile("whole").is_err());
    }

    #[test]
    fn a_family_has_the_slices_that_its_largest_profile_takes() {
        let slices = |gpu| {
            Family::for_gpu(gpu).map(|family| (family.compute_slices(), family.memory_slices()))
        };
        assert_eq!(slices("A100 or H100 80 GB"), Some((7, 8)));
        assert_eq!(slices("A30"), Some((4, 4)));
        assert_eq!(slices("L40S"), None);
    }

    #[test]
    fn each_family_has_a_slot_for_each_profile() {
        assert!(
            FAMILIES
                .iter()
                .all(|family| family.profiles.len() == family.slots.len())
        );
    }
}
