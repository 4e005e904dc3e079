//! The memory of MIG compute instances (`1c.3g.40gb`): those of one GPU instance share its memory, and NVML shows all of it for each.
//!
//! Each counts the part of the memory that it has of the compute slices, so that the parts add up to no more than the GPU instance
//! has, whichever of them exist. What is used beyond the other instances' parts counts as used here: no more is free in a part
//! than in the whole.

use stowage_report::GpuReport;
use stowage_scheduling::units::Bytes;

/// Gives a compute instance its part of the memory that was read for the whole GPU instance. Other slices stay as they are.
pub(crate) fn share_memory(slice: &mut GpuReport) {
    let Some((part, of)) = compute_share(slice.model.as_str()) else {
        return;
    };
    let (total, reserved) = (slice.total_bytes, slice.reserved_bytes);
    let share = |bytes: u64| u128::from(bytes) * part;
    slice.total_bytes = Bytes((share(total.0) / of) as u64);
    slice.reserved_bytes = Bytes(share(reserved.0).div_ceil(of) as u64).min(slice.total_bytes);
    let own_usage: Bytes = slice
        .processes
        .iter()
        .flatten()
        .filter_map(|process| process.used_bytes)
        .sum();
    let others_memory = total
        .minus(reserved)
        .minus(slice.total_bytes.minus(slice.reserved_bytes));
    slice.used_bytes = slice.used_bytes.map(|used| {
        used.minus(others_memory)
            .max(own_usage)
            .min(slice.total_bytes)
    });
}

/// How many of how many compute slices: of `…MIG-1c.3g.40gb` one of three. `None` if it has all of its GPU instance.
fn compute_share(model: &str) -> Option<(u128, u128)> {
    let mut profile = model.rsplit_once("MIG-")?.1.split('.');
    let mut count = |unit| profile.next()?.strip_suffix(unit)?.parse::<u128>().ok();
    let (part, of) = (count('c')?, count('g')?);
    (part <= of && of > 0).then_some((part, of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_shows_which_part_of_a_gpu_instance_a_compute_instance_has() {
        let parts = [
            "1c.3g.40gb",
            "2c.3g.40gb+me",
            "1c.7g.80gb",
            "3g.40gb",
            "1g.10gb+me",
            "c.3g",
            "4c.3g.40gb",
            "",
        ];
        let expected = [
            Some((1, 3)),
            Some((2, 3)),
            Some((1, 7)),
            None,
            None,
            None,
            None,
            None,
        ];
        assert_eq!(
            parts.map(|profile| compute_share(&format!("NVIDIA-H100-MIG-{profile}"))),
            expected
        );
        assert_eq!(compute_share("NVIDIA-H100-80GB-HBM3"), None);
    }
}
