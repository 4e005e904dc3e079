//! The order of arrivals and the ranking of nodes, from a seed. The protocol of the published runs.

use super::placer::PodArrival;
use super::trace::WorkloadTrace;
use crate::simulate::openb::go_dice::GoRandom;
use stowage_scheduling::testkit::random::Random;

/// The requested share of the GPUs at the end, in percent.
pub const MAX_LOAD_PERCENT: u64 = 130;

/// Random streams beside the protocol, each with a seed of its own.
#[derive(Debug, Clone, Copy)]
pub enum RandomStream {
    /// For a policy that draws random numbers itself.
    Policy,
    /// For a load without end: which pods, when, and for how long.
    Draws,
    Gaps,
    Lifetimes,
}

impl RandomStream {
    pub fn seeded(self, seed: u64) -> Random {
        // The published figures were drawn with these.
        Random::seeded(seed, 16 + self as u64)
    }
}

/// Between the pods and the nodes the published runs drew ten more numbers, in the libraries that they are built on. With them
/// every run of a policy without random numbers has the published result, to the hundredth, seed by seed.
const UNUSED_DRAWS: usize = 10;

/// The arrivals of one seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrivals {
    pub seed: u64,
    /// As indices of the setting's pods.
    pub pods: Vec<usize>,
    /// Every node, in the order in which they win ties.
    pub ranks: Vec<usize>,
}

impl Arrivals {
    /// With the random numbers of the published runs, in the same order: an unused number, the pods, more pods or fewer,
    /// [`UNUSED_DRAWS`], the nodes.
    pub fn draw(setting: &WorkloadTrace, seed: u64) -> Self {
        let mut dice = GoRandom::seeded(seed);
        dice.int63();
        let mut pods: Vec<usize> = (0..setting.pods.len()).collect();
        dice.shuffle(&mut pods);
        adjust_to_load(setting, &mut pods, &mut dice);
        (0..UNUSED_DRAWS).for_each(|_| {
            dice.int63();
        });
        let mut by_name: Vec<usize> = (0..setting.nodes.len()).collect();
        by_name.sort_by_key(|site| &setting.nodes[*site].name);
        let mut ranks = vec![0; by_name.len()];
        let ranked = dice.permutation(by_name.len());
        ranked
            .into_iter()
            .zip(by_name)
            .for_each(|(rank, site)| ranks[rank] = site);
        Self { seed, pods, ranks }
    }

    pub fn iter(&self, setting: &WorkloadTrace) -> impl Iterator<Item = PodArrival> {
        let arrival = |(number, pod): (usize, &usize)| PodArrival {
            number,
            pod: *pod,
            kind: setting.pods[*pod].kind,
        };
        self.pods.iter().enumerate().map(arrival)
    }
}

/// Draws pods with replacement until the next one would request more than [`MAX_LOAD_PERCENT`]; removes pods from a trace that
/// requests more by itself. A pod with several GPUs is tried as if it requested one of them, as in the published runs.
fn adjust_to_load(setting: &WorkloadTrace, pods: &mut Vec<usize>, dice: &mut GoRandom) {
    let milli_gpus_of = |pod: usize| setting.kind_of(pod).milli_gpus();
    let mut requested: u64 = pods.iter().map(|pod| milli_gpus_of(*pod)).sum();
    let most = setting.capacity() * MAX_LOAD_PERCENT / 100;
    while requested > most {
        requested -= milli_gpus_of(pods.remove(dice.below(pods.len() as u32)));
    }
    let rows = setting.pods.len();
    // Pods without GPUs would be drawn forever.
    while setting
        .pods
        .iter()
        .any(|pod| setting.kinds[pod.kind].gpus > 0)
    {
        let drawn = dice.below(rows as u32);
        if requested + u64::from(setting.kind_of(drawn).milli_per_gpu) > most {
            return;
        }
        requested += milli_gpus_of(drawn);
        pods.push(drawn);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kind, setting};
    use super::*;
    use crate::simulate::openb::built_in;

    #[test]
    fn every_pod_arrives_once_and_then_some_again_until_the_load_is_reached() {
        let setting = setting(
            &[(64_000, 8)],
            &[kind(1000, 1, 1000), kind(1000, 1, 500), kind(1000, 0, 0)],
        );
        let arrivals = Arrivals::draw(&setting, 42);
        let mut first: Vec<usize> = arrivals.pods[..3].to_vec();
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2]);
        let requested: u64 = arrivals
            .pods
            .iter()
            .map(|pod| setting.kind_of(*pod).milli_gpus())
            .sum();
        // 130 % of eight GPUs.
        assert!((9_500..=10_400).contains(&requested), "{requested}");
        assert_eq!(arrivals, Arrivals::draw(&setting, 42));
        assert_ne!(arrivals, Arrivals::draw(&setting, 43));
    }

    #[test]
    fn pods_of_a_trace_that_requests_more_are_left_out() {
        let setting = WorkloadTrace::from_trace(&built_in::trace());
        let arrivals = Arrivals::draw(&setting, 42);
        assert!(arrivals.pods.len() < setting.pods.len());
        let mut ranks = arrivals.ranks.clone();
        ranks.sort_unstable();
        assert_eq!(ranks, (0..24).collect::<Vec<_>>());
        assert_ne!(ranks, arrivals.ranks);
    }

    #[test]
    fn pods_without_gpus_come_once() {
        let setting = setting(&[(64_000, 8)], &[kind(1000, 0, 0), kind(2000, 0, 0)]);
        assert_eq!(Arrivals::draw(&setting, 42).pods.len(), 2);
    }
}
