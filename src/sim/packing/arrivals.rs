//! Who comes in which order, and which node is ranked before which: what a seed says. The protocol of the published runs.

use super::kinds::Setting;
use super::placer::Arrival;
use crate::sim::random::Random;

/// So many hundredths of the GPUs are asked for in the end.
pub const LAST_LOAD: u64 = 130;

/// What is rolled, each with dice of its own.
#[derive(Debug, Clone, Copy)]
pub enum Dice {
    Shuffle,
    Draws,
    Ranks,
    /// Of a policy that rolls dice itself.
    Policy,
    Gaps,
    Lifetimes,
}

impl Dice {
    pub fn of(self, seed: u64) -> Random {
        // Apart from the preemption simulator's, which are the first nine.
        Random::seeded(seed, 16 + self as u64)
    }
}

/// One seed's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrivals {
    pub seed: u64,
    /// By their places in the setting's pods.
    pub pods: Vec<usize>,
    /// Every site, in the order in which they win ties.
    pub ranks: Vec<usize>,
}

impl Arrivals {
    /// All pods, shuffled, then pods drawn with replacement until the next one would ask for more than [`LAST_LOAD`]. Of a
    /// trace that asks for more by itself the last are left out.
    pub fn shuffled(setting: &Setting, seed: u64) -> Self {
        let mut pods: Vec<usize> = (0..setting.pods.len()).collect();
        shuffle(&mut pods, &mut Dice::Shuffle.of(seed));
        let mut draws = Dice::Draws.of(seed);
        let count = pods.len();
        let drawn = std::iter::from_fn(|| (count > 0).then(|| draws.below(count)));
        let mut asked = 0;
        let most = setting.capacity() * LAST_LOAD / 100;
        let is_within = |pod: &usize| {
            asked += setting.kind_of(*pod).milli_gpus();
            asked <= most
        };
        // Who never asks for a GPU would be drawn for ever.
        let asks = setting.pods.iter().any(|pod| setting.kinds[pod.kind].gpus > 0);
        let drawn = drawn.take_while(|_| asks);
        let pods = pods.into_iter().chain(drawn).take_while(is_within).collect();
        Self { pods, ..Self::in_order(setting, seed, Vec::new()) }
    }

    /// The pods in an order that somebody wrote down.
    pub fn in_order(setting: &Setting, seed: u64, pods: Vec<usize>) -> Self {
        let mut ranks: Vec<usize> = (0..setting.sites.len()).collect();
        shuffle(&mut ranks, &mut Dice::Ranks.of(seed));
        Self { seed, pods, ranks }
    }

    pub fn iter(&self, setting: &Setting) -> impl Iterator<Item = Arrival> {
        let arrival =
            |(number, pod): (usize, &usize)| Arrival { number, pod: *pod, kind: setting.pods[*pod].kind };
        self.pods.iter().enumerate().map(arrival)
    }
}

/// Every order as likely as any other (Fisher and Yates).
fn shuffle(list: &mut [usize], dice: &mut Random) {
    for last in (1..list.len()).rev() {
        list.swap(last, dice.below(last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kind, setting};
    use super::*;
    use crate::sim::openb::built_in;

    #[test]
    fn everyone_comes_once_and_then_some_again_until_the_load_is_reached() {
        let setting = setting(&[(64_000, 8)], &[kind(1000, 1, 1000), kind(1000, 1, 500), kind(1000, 0, 0)]);
        let arrivals = Arrivals::shuffled(&setting, 42);
        let mut first: Vec<usize> = arrivals.pods[..3].to_vec();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2]);
        let asked: u64 = arrivals.pods.iter().map(|pod| setting.kind_of(*pod).milli_gpus()).sum();
        // 130 % of eight GPUs; the one that would pass it does not come.
        assert!((9_500..=10_400).contains(&asked), "{asked}");
        assert_eq!(arrivals, Arrivals::shuffled(&setting, 42));
        assert_ne!(arrivals, Arrivals::shuffled(&setting, 43));
    }

    #[test]
    fn a_trace_that_asks_for_more_is_cut() {
        let setting = Setting::of(&built_in::trace());
        let arrivals = Arrivals::shuffled(&setting, 42);
        assert!(arrivals.pods.len() < setting.pods.len());
        let mut ranks = arrivals.ranks.clone();
        ranks.sort_unstable();
        assert_eq!(ranks, (0..24).collect::<Vec<_>>());
        assert_ne!(ranks, arrivals.ranks);
    }

    #[test]
    fn pods_without_gpus_come_once() {
        let setting = setting(&[(64_000, 8)], &[kind(1000, 0, 0), kind(2000, 0, 0)]);
        assert_eq!(Arrivals::shuffled(&setting, 42).pods.len(), 2);
    }
}
