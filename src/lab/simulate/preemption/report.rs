//! Compares runs under several orders and seeds.

use super::orders::VictimOrder;
use super::tally::{GpuTime, PreemptionTally};
use super::workload::Workload;
use serde::Serialize;

/// One run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RunOutcome {
    pub order: VictimOrder,
    pub seed: u64,
    pub tally: PreemptionTally,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub seeds: Vec<u64>,
    pub nodes: usize,
    pub gpus: u64,
    /// In the order of [`VictimOrder::ALL`].
    pub results: Vec<OrderLine>,
}

/// One order over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OrderLine {
    pub order: VictimOrder,
    pub lost_gpu_hours: Spread,
    /// Relative to the loss of Stowage's order with the same seed, over the seeds in which that loses anything.
    pub lost_times_ours: Option<Spread>,
    /// Lost work alone, without the time to load again, which every victim loses whatever the order.
    pub work_gpu_hours: Spread,
    pub work_times_ours: Option<Spread>,
    pub victims: Spread,
    pub arrivals: Spread,
    pub admitted: Spread,
    pub preempted_for: Spread,
    /// Of all GPUs, in hundredths.
    pub used_percent: Spread,
    /// The same, less what was lost.
    pub kept_percent: Spread,
    /// Searches that reached their limit before they were complete, over all seeds.
    pub cut_short: u64,
    /// What the machines found wrong with placements and evictions, over all seeds.
    pub broken_promises: u64,
}

/// A figure over several seeds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    /// The standard deviation of a sample; 0 of a single seed.
    pub deviation: f64,
}

impl Spread {
    pub fn of(figures: impl Iterator<Item = f64>) -> Self {
        let figures: Vec<f64> = figures.collect();
        let count = figures.len() as f64;
        let mean = figures.iter().sum::<f64>() / count.max(1.0);
        let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
        let deviation = if figures.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        Self { mean, deviation }
    }
}

impl Report {
    /// Over all orders and seeds.
    pub fn broken_promises(&self) -> u64 {
        self.results.iter().map(|line| line.broken_promises).sum()
    }

    /// Compares all orders on workloads of one cluster; the same whatever the order in which the runs ended.
    pub fn of(workloads: &[Workload], outcomes: &[RunOutcome]) -> Self {
        let mut seeds: Vec<u64> = workloads.iter().map(|workload| workload.seed).collect();
        seeds.sort_unstable();
        let first = workloads.first();
        let (nodes, gpus) = first.map_or((0, 0), |first| (first.nodes.len(), first.gpus()));
        let hours = first.map_or(0.0, |first| first.extent.counted.0 as f64 / 3_600_000.0);
        let line = |order| OrderLine::of(order, outcomes, &seeds, gpus as f64 * hours);
        Self { results: VictimOrder::ALL.into_iter().map(line).collect(), seeds, nodes, gpus }
    }
}

impl OrderLine {
    fn of(order: VictimOrder, outcomes: &[RunOutcome], seeds: &[u64], gpu_hours: f64) -> Self {
        let tally = |order: VictimOrder, seed: u64| {
            outcomes.iter().find(|one| one.order == order && one.seed == seed).map(|one| one.tally)
        };
        let over_seeds = |figure: &dyn Fn(PreemptionTally) -> f64| {
            Spread::of(seeds.iter().filter_map(|seed| Some(figure(tally(order, *seed)?))))
        };
        let ratio = |seed: &u64, part: fn(&PreemptionTally) -> GpuTime| {
            let hours = |order: VictimOrder| Some(part(&tally(order, *seed)?).hours());
            let ours = hours(VictimOrder::Stowage).filter(|ours| *ours > 0.0)?;
            Some(hours(order)? / ours)
        };
        let times_ours = |part: fn(&PreemptionTally) -> GpuTime| {
            let ratios: Vec<f64> = seeds.iter().filter_map(|seed| ratio(seed, part)).collect();
            (!ratios.is_empty()).then(|| Spread::of(ratios.into_iter()))
        };
        let sum = |count: fn(PreemptionTally) -> u64| {
            seeds.iter().filter_map(|seed| tally(order, *seed)).map(count).sum()
        };
        Self {
            order,
            lost_gpu_hours: over_seeds(&|tally| tally.lost().hours()),
            lost_times_ours: times_ours(PreemptionTally::lost),
            work_gpu_hours: over_seeds(&|tally| tally.lost_work.hours()),
            work_times_ours: times_ours(|tally| tally.lost_work),
            victims: over_seeds(&|tally| tally.victims as f64),
            arrivals: over_seeds(&|tally| tally.arrivals as f64),
            admitted: over_seeds(&|tally| tally.admitted as f64),
            preempted_for: over_seeds(&|tally| tally.preempted_for as f64),
            used_percent: over_seeds(&|tally| 100.0 * tally.used.hours() / gpu_hours),
            kept_percent: over_seeds(&|tally| {
                100.0 * (tally.used.hours() - tally.lost().hours()) / gpu_hours
            }),
            cut_short: sum(|tally| tally.cut_short),
            broken_promises: sum(|tally| tally.broken_promises),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_that_of_a_sample() {
        let spread = Spread::of([2.0, 4.0, 6.0].into_iter());
        assert_eq!((spread.mean, spread.deviation), (4.0, 2.0));
        assert_eq!(Spread::of([5.0].into_iter()), Spread { mean: 5.0, deviation: 0.0 });
    }
}
