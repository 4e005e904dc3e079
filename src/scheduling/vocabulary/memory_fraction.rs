//! The share of a GPU's memory that an engine is told to use, as Stowage writes it on a pod: `--gpu-memory-utilization` of vLLM.
//!
//! Rounded down, because engines refuse to start when asked for more than is free, and never to zero, which they refuse as well.

use crate::units::Bytes;
use std::fmt;

/// A share of 1, in ten-thousandths: on the largest GPU of today, a step is 30 MiB.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct MemoryFraction(u16);

/// What a container's process takes of each GPU before it computes anything: whoever opens a GPU pays for that.
pub(crate) const LEAST_PER_GPU: Bytes = Bytes::mib(256);

/// What an engine's process has of its VRAM limit that the engine does not count: CUDA's context, graphs, buffers of collectives.
const LEAST_BESIDE_ENGINE: Bytes = Bytes::gib(1);
const PERCENT_BESIDE_ENGINE: u64 = 8;

/// The fraction that is a whole GPU.
const PARTS_PER_GPU: u16 = 10_000;

impl MemoryFraction {
    pub const ZERO: Self = Self(0);

    /// `part` of a GPU's memory, at most all of it.
    pub fn new(part: Bytes, total: Bytes) -> Self {
        let parts =
            (u128::from(part.0) * u128::from(PARTS_PER_GPU)).checked_div(u128::from(total.0));
        let least = u16::from(part > Bytes::ZERO && total > Bytes::ZERO);
        Self(
            parts
                .map_or(0, |parts| parts.min(PARTS_PER_GPU.into()) as u16)
                .max(least),
        )
    }

    /// What Stowage wrote: `0.8517`, or `0.85` up to version 0.3.
    pub fn parse(text: &str) -> Option<Self> {
        let (whole, part) = text.split_once('.')?;
        let whole = ["0", "1"].iter().position(|one| *one == whole)? as u16;
        let step = match part.len() {
            2 => 100,
            4 => 1,
            _ => return None,
        };
        let part: u16 = part.parse().ok().filter(|_| !part.starts_with('+'))?;
        Some(whole * PARTS_PER_GPU + part * step)
            .filter(|parts| *parts <= PARTS_PER_GPU)
            .map(Self)
    }

    pub const fn ten_thousandths(self) -> u16 {
        self.0
    }

    /// The fraction of a VRAM limit that an engine may plan with, where CUDA reports the limit as the GPU's size: its process takes
    /// some of it beside what the engine counts.
    pub fn of_limit(limit: Bytes) -> Self {
        let beside = LEAST_BESIDE_ENGINE
            .0
            .max(limit.0 / 100 * PERCENT_BESIDE_ENGINE);
        let half = Self(PARTS_PER_GPU / 2);
        Self::new(limit.minus(Bytes(beside)), limit).max(half)
    }

    /// The fraction of one container, which requests `vram` of the pod's `all`.
    pub fn for_container(self, vram: Bytes, all: Bytes) -> Self {
        let parts = (u128::from(vram.0) * u128::from(self.0)).checked_div(u128::from(all.0));
        Self(
            parts
                .map_or(0, |parts| parts.min(self.0.into()) as u16)
                .max(self.0.min(1)),
        )
    }

    /// The largest GPU of which `part` is this fraction; `None` for zero.
    pub(crate) fn largest_total(self, part: Bytes) -> Option<Bytes> {
        let total =
            (u128::from(part.0) * u128::from(PARTS_PER_GPU)).checked_div(u128::from(self.0))?;
        Some(Bytes(u64::try_from(total).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for MemoryFraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:04}",
            self.0 / PARTS_PER_GPU,
            self.0 % PARTS_PER_GPU
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_engine_within_a_limit_plans_with_what_its_process_leaves_of_it() {
        let of = |limit| MemoryFraction::of_limit(limit).to_string();
        let limits = [1, 2, 4, 8, 20, 40, 130].map(Bytes::gib);
        let fractions = [
            "0.5000", "0.5000", "0.7500", "0.8750", "0.9200", "0.9200", "0.9200",
        ];
        assert_eq!(limits.map(of), fractions);
        assert_eq!(of(Bytes::ZERO), "0.5000");
    }

    #[test]
    fn a_fraction_has_four_decimals_is_rounded_down_and_never_zero() {
        let text = |part, total| MemoryFraction::new(part, total).to_string();
        let h100 = Bytes::mib(81_559);
        assert_eq!(text(Bytes::gib(40), h100), "0.5022");
        assert_eq!(text(Bytes::mib(256), h100), "0.0031");
        assert_eq!(text(Bytes::gib(1), Bytes::mib(183_359)), "0.0055");
        assert_eq!(text(h100, h100), "1.0000");
        assert_eq!(
            text(Bytes::gib(90), h100),
            "1.0000",
            "no more than there is"
        );
        assert_eq!(text(Bytes::mib(32), Bytes::gib(320)), "0.0001");
        assert_eq!(text(Bytes(1), h100), "0.0001");
        assert_eq!(
            [text(Bytes::ZERO, h100), text(Bytes::gib(1), Bytes::ZERO)],
            ["0.0000"; 2]
        );
    }

    #[test]
    fn fractions_of_this_and_of_earlier_versions_are_read() {
        let parts = |text| MemoryFraction::parse(text).map(|fraction| fraction.0);
        assert_eq!(
            ["0.8517", "0.85", "0.0001", "1.00", "1.0000"].map(parts),
            [8517, 8500, 1, 10_000, 10_000].map(Some)
        );
        for odd in [
            "", "85", "0.855", "0.x5", "2.00", "1.50", "1.0001", "-0.5", "-0.50", "+0.50", "0.+5",
            "0.85170", "0.85.17",
        ] {
            assert_eq!(parts(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn containers_have_parts_of_their_pods_fraction() {
        let gib = Bytes::gib;
        let whole = MemoryFraction::new(gib(48), Bytes::mib(81_559));
        let parts = [32, 10, 6].map(|vram| whole.for_container(gib(vram), gib(48)).to_string());
        assert_eq!(
            (whole.to_string(), parts),
            (
                "0.6026".into(),
                ["0.4017", "0.1255", "0.0753"].map(String::from)
            )
        );
        assert_eq!(whole.for_container(gib(49), gib(48)), whole);
        assert_eq!(
            [
                whole.for_container(Bytes(1), gib(48)),
                MemoryFraction::ZERO.for_container(gib(1), gib(48))
            ]
            .map(|part| part.0),
            [1, 0]
        );
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back_and_is_never_more_than_granted(part in 0u64..1 << 40, total in 1u64..1 << 40) {
            let fraction = MemoryFraction::new(Bytes(part), Bytes(total));
            prop_assert_eq!(MemoryFraction::parse(&fraction.to_string()), Some(fraction));
            if u128::from(part) * 10_000 >= u128::from(total) {
                let used = u128::from(total) * u128::from(fraction.0) / 10_000;
                prop_assert!(used <= u128::from(part));
                prop_assert!(part > total || fraction.largest_total(Bytes(part)).unwrap().0 >= total);
            }
        }

        #[test]
        fn the_parts_of_a_fraction_add_up_to_no_more(asked in prop::collection::vec(32u64..1 << 17, 1..8), total in 1u64..1 << 20) {
            let all: u64 = asked.iter().sum();
            let whole = MemoryFraction::new(Bytes::mib(all), Bytes::mib(total.max(all)));
            let parts: u64 = asked.iter().map(|vram| u64::from(whole.for_container(Bytes::mib(*vram), Bytes::mib(all)).0)).sum();
            prop_assert!(parts <= u64::from(whole.0));
        }
    }
}
