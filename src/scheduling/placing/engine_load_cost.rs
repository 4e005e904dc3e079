//! What the load of the engines on a GPU costs a demand: nothing up to half of a limit of the demand's class, the whole part at
//! the limit, and ever more steeply between them.

use super::rank::WHOLE_PART;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::Gpu;
use serde::Serialize;

/// How near the engines of a GPU are to a limit of the demand's class, in thousandths of that limit. Less is better.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct EngineLoadCost(u16);

/// Thousandths of a limit.
const AT_LIMIT: u16 = 1000;
/// The weight of one step in [`ScoreParts::kv_headroom`](super::rank::ScoreParts).
const STEP: u32 = WHOLE_PART / 8;

impl EngineLoadCost {
    /// Of GPUs without engines, and for classes without limits.
    pub const NONE: Self = Self(0);

    /// Some engine does not say how busy it is: half of the whole part, as at six sevenths of a limit.
    pub const UNKNOWN: Self = Self(854);

    /// What joining the engines on the calmest of these GPUs costs, whichever it will be. Of none, nothing is known.
    pub fn least<'a>(gpus: impl Iterator<Item = &'a Gpu>, demand: &Demand) -> Self {
        let unknown = if has_limits(demand) {
            Self::UNKNOWN
        } else {
            Self::NONE
        };
        gpus.map(|gpu| Self::of(gpu, demand))
            .min()
            .unwrap_or(unknown)
    }

    /// What joining the engines on `gpu` costs. The fuller of KV cache and queue counts.
    #[inline]
    pub fn of(gpu: &Gpu, demand: &Demand) -> Self {
        if !has_limits(demand) {
            return Self::NONE;
        }
        let ClassTerms {
            kv_cache_limit,
            queue_limit,
            ..
        } = demand.terms;
        let load = gpu.engine_load;
        let full = load.occupancy().zip(kv_cache_limit);
        let long = load.queue.zip(queue_limit);
        let measured = full
            .map(|(kv, limit)| Self::share(kv.get().into(), limit.get().into()))
            .max(long.map(|(queue, limit)| Self::share(queue, limit)))
            .unwrap_or_default();
        let is_silent =
            full.is_none() && kv_cache_limit.is_some() || long.is_none() && queue_limit.is_some();
        if is_silent || load.partial {
            measured.max(Self::UNKNOWN)
        } else {
            measured
        }
    }

    fn share(measured: u32, limit: u32) -> Self {
        let thousandths =
            (u64::from(measured) * u64::from(AT_LIMIT)).div_ceil(u64::from(limit.max(1)));
        Self(thousandths.min(AT_LIMIT.into()) as u16)
    }

    /// What is to be said against the GPU, up to [`WHOLE_PART`]: the square of the share of the limit's upper half that is in
    /// use. Up to half of the limit packing decides, and the exact load only between places that are packed equally well.
    pub fn part(self) -> u32 {
        let beyond = u32::from(self.0.saturating_sub(AT_LIMIT / 2));
        beyond.pow(2) / (u32::from(AT_LIMIT / 2).pow(2) / WHOLE_PART)
    }

    /// The part in eighths. Between GPUs of one node a step outweighs the packing cost; within a step the packing cost decides
    /// first. The first step ends at two thirds of the limit.
    pub fn step(self) -> u8 {
        (self.part() / STEP) as u8
    }
}

#[inline]
fn has_limits(demand: &Demand) -> bool {
    demand.terms.kv_cache_limit.is_some() || demand.terms.queue_limit.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_rises_ever_more_steeply_to_the_limit() {
        let part = |kv: u32| EngineLoadCost::share(kv, 90).part();
        assert_eq!(
            [0, 2, 22, 45, 66, 81, 90, 97].map(part),
            [0, 0, 0, 0, 219, 640, 1000, 1000]
        );
        let steps = [0, 45, 60, 61, 66, 90].map(|kv| EngineLoadCost::share(kv, 90).step());
        assert_eq!(steps, [0, 0, 0, 1, 1, 8]);
        assert!((0..100).all(|kv| part(kv) <= part(kv + 1)));
        let rise: Vec<u32> = (0..9)
            .map(|ten| part(10 * ten + 10) - part(10 * ten))
            .collect();
        assert!(rise.is_sorted(), "{rise:?}");
        assert!(EngineLoadCost::UNKNOWN.part().abs_diff(WHOLE_PART / 2) <= 1);
        assert_eq!(EngineLoadCost::share(u32::MAX, 1).part(), WHOLE_PART);
        assert_eq!(
            [
                EngineLoadCost::share(0, 0).part(),
                EngineLoadCost::share(1, 0).part()
            ],
            [0, WHOLE_PART]
        );
    }
}
