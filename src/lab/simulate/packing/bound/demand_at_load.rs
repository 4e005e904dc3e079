//! How many pods of each kind had arrived at a load: beside the cluster, the limit of what can be allocated.
//!
//! A figure at a load is a mean over events and seeds. The maximum of a linear program is concave in its right-hand sides, so
//! the bound of the mean counts is above the mean of the bounds, and one program serves all seeds.

use super::ArrivalsUntilRefusal;
use crate::simulate::packing::arrivals::Arrivals;
use crate::simulate::packing::curve;
use crate::simulate::packing::placer::PodArrival;
use crate::simulate::packing::trace::WorkloadTrace;

/// Pods by kind, as indices of the setting's kinds: means, so fractions too.
#[derive(Debug, Clone, PartialEq)]
pub struct DemandAtLoad {
    pub arrived: Vec<f64>,
    /// Pods of each kind that were placed, whatever arrived later.
    pub placed: Vec<f64>,
}

impl DemandAtLoad {
    /// Means over the events at which the requested share rounds to this percentage of the GPUs; `None` if there are none. By
    /// seed: the arrivals, and until when each kind's pods were all placed.
    pub fn mean_at(
        setting: &WorkloadTrace,
        arrivals: &[Arrivals],
        until: &[ArrivalsUntilRefusal],
        load: u64,
    ) -> Option<Self> {
        let runs = arrivals.iter().zip(until);
        let per_seed: Vec<Self> = runs
            .filter_map(|(arrivals, until)| Self::for_seed(setting, arrivals, until, load))
            .collect();
        let mean = |counts: fn(&Self) -> &[f64]| -> Vec<f64> {
            let sum = |kind: usize| per_seed.iter().map(|one| counts(one)[kind]).sum::<f64>();
            (0..setting.kinds.len())
                .map(|kind| sum(kind) / per_seed.len() as f64)
                .collect()
        };
        (!per_seed.is_empty()).then(|| Self {
            arrived: mean(|one| &one.arrived),
            placed: mean(|one| &one.placed),
        })
    }

    fn for_seed(
        setting: &WorkloadTrace,
        arrivals: &Arrivals,
        until: &ArrivalsUntilRefusal,
        load: u64,
    ) -> Option<Self> {
        let mut requested = 0;
        let at_load = |arrival: PodArrival| {
            requested += setting.kinds[arrival.kind].milli_gpus();
            curve::load_percent(requested, setting.capacity()) == load
        };
        let is_at: Vec<bool> = arrivals.iter(setting).map(at_load).collect();
        let events = is_at.iter().filter(|is_at| **is_at).count() as f64;
        let mut left = events;
        let none = vec![0.0; setting.kinds.len()];
        let mut counts = Self {
            arrived: none.clone(),
            placed: none,
        };
        for (PodArrival { number, kind, .. }, is_at) in arrivals.iter(setting).zip(is_at) {
            // A pod has arrived at every event from its own on.
            counts.arrived[kind] += left / events;
            if number < until[kind] {
                counts.placed[kind] += left / events;
            }
            left -= if is_at { 1.0 } else { 0.0 };
        }
        (events > 0.0).then_some(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{kind, setting};
    use super::*;

    #[test]
    fn a_pod_between_two_events_of_a_load_counts_from_the_later_one_on() {
        // 0.1 GPUs of ten are a hundredth; the third pod asks for nothing, and comes at 1 % too.
        let setting = setting(
            &[(1000, 10)],
            &[kind(1, 1, 50), kind(1, 1, 500), kind(1, 0, 0)],
        );
        let arrivals = Arrivals {
            seed: 0,
            pods: vec![0, 0, 2, 1, 0],
            ranks: vec![0],
        };
        let at = |load, until| {
            DemandAtLoad::mean_at(
                &setting,
                std::slice::from_ref(&arrivals),
                &[vec![until; 3]],
                load,
            )
        };
        // 50 rounds up to 1 %, as do 100 and 100.
        let first = at(1, 2).unwrap();
        assert_eq!(first.arrived, [1.0 + 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        assert_eq!(first.placed, [1.0 + 2.0 / 3.0, 0.0, 0.0]);
        assert_eq!(at(6, 5).unwrap().arrived, [2.0, 1.0, 1.0]);
        assert_eq!(at(3, 5), None);
    }

    #[test]
    fn the_mean_is_over_the_seeds_that_have_the_load() {
        let setting = setting(&[(1000, 1)], &[kind(1, 1, 1000), kind(1, 1, 500)]);
        let of = |pods: &[usize]| Arrivals {
            seed: 0,
            pods: pods.to_vec(),
            ranks: vec![0],
        };
        let arrivals = [of(&[0]), of(&[1, 1]), of(&[1])];
        let until = [vec![1, 1], vec![0, 1], vec![1, 1]];
        let demand = DemandAtLoad::mean_at(&setting, &arrivals, &until, 100).unwrap();
        assert_eq!(
            (demand.arrived, demand.placed),
            (vec![0.5, 1.0], vec![0.5, 0.5])
        );
    }
}
