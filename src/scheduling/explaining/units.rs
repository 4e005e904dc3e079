//! Figures as a person reads and writes them.

use super::explanation::ShareAmount;
use crate::units::Bytes;
pub use crate::units::human_duration;

/// A quantity as Kubernetes writes it, in the largest unit that is exact.
pub fn format_quantity(bytes: Bytes) -> String {
    let units = [
        (1u64 << 40, "Ti"),
        (1 << 30, "Gi"),
        (1 << 20, "Mi"),
        (1 << 10, "Ki"),
    ];
    let exact = units
        .into_iter()
        .find(|(unit, _)| bytes.0 > 0 && bytes.0.is_multiple_of(*unit));
    exact.map_or_else(
        || bytes.0.to_string(),
        |(unit, name)| format!("{}{name}", bytes.0 / unit),
    )
}

/// `0.125`, `2`.
pub fn format_gpus(milli: u64) -> String {
    match milli % 1000 {
        0 => (milli / 1000).to_string(),
        part => format!("{}.{part:03}", milli / 1000),
    }
}

/// `2.0 GiB and 0.5 GPUs`; `if_unbounded` is the text for a missing bound.
pub fn format_share(amount: ShareAmount, if_unbounded: &str) -> String {
    let vram = amount.vram_bytes.map(|vram| vram.to_string());
    let gpus = amount.milli_gpus.map(|milli| {
        format!(
            "{} GPU{}",
            format_gpus(milli),
            if milli == 1000 { "" } else { "s" }
        )
    });
    match (vram, gpus) {
        (None, None) => if_unbounded.into(),
        (Some(one), None) | (None, Some(one)) => one,
        (Some(vram), Some(gpus)) => format!("{vram} and {gpus}"),
    }
}

/// `GPU 2`, `GPUs 0, 1 and 3`.
pub(crate) fn gpu_list(indices: &[u32]) -> String {
    let names: Vec<String> = indices.iter().map(u32::to_string).collect();
    match &names[..] {
        [one] => format!("GPU {one}"),
        [first @ .., last] => format!("GPUs {} and {last}", first.join(", ")),
        [] => "no GPU".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Millis;

    #[test]
    fn durations_and_quantities_are_formatted_for_people() {
        let lengths = [1_234, 59_000, 180_000, 7_500_000, 400_000_000]
            .map(|millis| human_duration(Millis(millis)));
        assert_eq!(lengths, ["1.2 s", "59 s", "3 min", "2 h 5 min", "4 days"]);
        let sizes = [
            Bytes::gib(40),
            Bytes::mib(1536),
            Bytes(1000),
            Bytes::ZERO,
            Bytes::gib(2048),
        ]
        .map(format_quantity);
        assert_eq!(sizes, ["40Gi", "1536Mi", "1000", "0", "2Ti"]);
        assert_eq!([500, 2000, 1250].map(format_gpus), ["0.500", "2", "1.250"]);
        assert_eq!(
            [gpu_list(&[2]), gpu_list(&[0, 1, 3])],
            ["GPU 2", "GPUs 0, 1 and 3"]
        );
    }
}
