//! A seeded random number generator, so that a run is reproducible byte for byte. Used by the simulators and by all other code
//! that draws from a seed.
//!
//! SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): one word of state, an addition and a mix per number, no bad seeds, and so
//! short that no later version of a dependency draws other numbers. Simulations need no more; secrets would.

use crate::units::Millis;

/// An odd number near 2⁶⁴ over the golden ratio: added again and again, it gives every word once before it repeats one.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The dice for one purpose of a run. Each purpose has its own, so that drawing more numbers for one changes nothing for the
    /// others.
    pub fn seeded(seed: u64, purpose: u64) -> Self {
        Self(mix(seed).wrapping_add(mix(purpose.wrapping_add(STEP))))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// One of `0..bound`; 0 for a bound of 0. The high part of a product, so that no division is needed; the bias is less than
    /// one in 2⁴⁰ for any list that fits memory.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Every order as likely as any other (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// Evenly from 0 up to, but not, 1: as many steps as a `f64` has there.
    pub fn unit_interval(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The time until the next of events that come by chance, one every `mean`: exponential, rounded to whole milliseconds.
    pub fn exponential(&mut self, mean: f64) -> Millis {
        Millis((-(1.0 - self.unit_interval()).ln() * mean).round() as u64)
    }

    /// From `least` to `most`, each factor as likely as any other.
    pub fn log_uniform(&mut self, least: Millis, most: Millis) -> Millis {
        let (least, most) = (least.0 as f64, most.0 as f64);
        Millis((least * (most / least).powf(self.unit_interval())).round() as u64)
    }
}

/// The SplitMix64 finalizer: a bijection of 64-bit words.
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_paper_s_reference() {
        let mut random = Random(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn purposes_of_one_seed_and_seeds_of_one_purpose_roll_apart() {
        let first = |seed, purpose| Random::seeded(seed, purpose).next_u64();
        assert_eq!(first(42, 0), first(42, 0));
        assert_ne!(first(42, 0), first(42, 1));
        assert_ne!(first(42, 0), first(43, 0));
        assert_ne!(first(0, 1), first(1, 0));
    }

    #[test]
    fn gaps_have_their_mean_and_factors_are_even() {
        let mut random = Random::seeded(42, 0);
        let mean = (0..20_000)
            .map(|_| random.exponential(5000.0).0)
            .sum::<u64>()
            / 20_000;
        assert!((4900..5100).contains(&mean), "{mean}");
        let (least, most) = (Millis(100), Millis(10_000));
        let drawn: Vec<u64> = (0..20_000)
            .map(|_| random.log_uniform(least, most).0)
            .collect();
        assert!(drawn.iter().all(|millis| (100..=10_000).contains(millis)));
        let below_the_middle = drawn.iter().filter(|millis| **millis < 1000).count();
        assert!(
            (9_700..10_300).contains(&below_the_middle),
            "{below_the_middle}"
        );
    }

    #[test]
    fn below_meets_all_and_nothing_beyond() {
        let mut random = Random::seeded(7, 0);
        let mut met = [0; 3];
        (0..300).for_each(|_| met[random.below(3)] += 1);
        assert!(met.iter().all(|count| *count > 60), "{met:?}");
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn a_shuffle_keeps_every_item_and_produces_every_order() {
        let mut random = Random::seeded(7, 0);
        let mut met = std::collections::BTreeMap::new();
        for _ in 0..600 {
            let mut items = [1, 2, 3];
            random.shuffle(&mut items);
            *met.entry(items).or_insert(0) += 1;
        }
        assert!(
            met.len() == 6 && met.values().all(|count| *count > 60),
            "{met:?}"
        );
        assert!(met.keys().all(|items| items.iter().sum::<i32>() == 6));
    }
}
