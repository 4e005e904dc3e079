//! The figures of a replay: the allocated share, and the fragmented part of the rest, over the requested share so far. The mean
//! over all events at which the load rounds to a whole percent, as in the published runs.

use super::arrivals::MAX_LOAD_PERCENT;
use crate::simulate::openb::WHOLE_GPU;

/// The allocated and the fragmented share by load, from 0 % to [`MAX_LOAD_PERCENT`].
#[derive(Debug, Clone, PartialEq)]
pub struct AllocationCurve {
    capacity: u64,
    requested: u64,
    levels: Vec<LoadLevel>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct LoadLevel {
    events: u64,
    /// Sums over events: thousandths of GPUs, and GPUs.
    allocated: u64,
    fragmented: f64,
}

/// Figures at one load, in percent of all GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub load: u64,
    pub allocated: f64,
    pub fragmented: f64,
}

impl AllocationCurve {
    /// An empty curve of a cluster with this many thousandths of GPUs.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity: capacity.max(1),
            requested: 0,
            levels: vec![LoadLevel::default(); MAX_LOAD_PERCENT as usize + 1],
        }
    }

    /// Records the state after an arrival that requests this many thousandths of GPUs.
    pub fn record(&mut self, requested: u64, allocated: u64, fragmented_gpus: f64) {
        self.requested += requested;
        if let Some(level) = self
            .levels
            .get_mut(load_percent(self.requested, self.capacity) as usize)
        {
            level.events += 1;
            level.allocated += allocated;
            level.fragmented += fragmented_gpus;
        }
    }

    /// `None` for a load at which no pod arrived.
    pub fn at(&self, load: u64) -> Option<Point> {
        let level = self
            .levels
            .get(load as usize)
            .filter(|level| level.events > 0)?;
        let events = level.events as f64;
        let hundredth = self.capacity as f64 / 100.0;
        Some(Point {
            load,
            allocated: level.allocated as f64 / events / hundredth,
            fragmented: level.fragmented * f64::from(WHOLE_GPU) / events / hundredth,
        })
    }

    pub fn points(&self) -> impl Iterator<Item = Point> {
        (0..=MAX_LOAD_PERCENT).filter_map(|load| self.at(load))
    }
}

/// The requested share of the capacity in percent, rounded.
pub fn load_percent(requested: u64, capacity: u64) -> u64 {
    let capacity = capacity.max(1);
    (requested * 100 + capacity / 2) / capacity
}

/// The mean over curves, at each load that any of them has.
pub fn mean(curves: &[&AllocationCurve]) -> Vec<Point> {
    let at = |load: u64| {
        let points: Vec<Point> = curves.iter().filter_map(|curve| curve.at(load)).collect();
        let mean = |of: fn(&Point) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
        (!points.is_empty()).then(|| Point {
            load,
            allocated: mean(|point| point.allocated),
            fragmented: mean(|point| point.fragmented),
        })
    };
    (0..=MAX_LOAD_PERCENT).filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_s_figure_is_the_mean_over_the_events_that_round_to_it() {
        let mut curve = AllocationCurve::new(10_000);
        curve.record(40, 40, 1.0);
        // 0.9 % and 1.4 % round to 1.
        curve.record(50, 90, 2.0);
        curve.record(50, 90, 4.0);
        assert_eq!(
            curve.at(0),
            Some(Point {
                load: 0,
                allocated: 0.4,
                fragmented: 10.0
            })
        );
        assert_eq!(
            curve.at(1),
            Some(Point {
                load: 1,
                allocated: 0.9,
                fragmented: 30.0
            })
        );
        assert_eq!(curve.at(2), None);
        assert_eq!(curve.points().count(), 2);
    }

    #[test]
    fn the_mean_is_over_those_that_have_the_load() {
        let (mut one, mut two) = (AllocationCurve::new(10_000), AllocationCurve::new(10_000));
        one.record(100, 100, 0.0);
        two.record(100, 50, 0.0);
        two.record(100, 150, 0.0);
        let allocated: Vec<(u64, f64)> = mean(&[&one, &two])
            .iter()
            .map(|p| (p.load, p.allocated))
            .collect();
        assert_eq!(allocated, [(1, 0.75), (2, 1.5)]);
    }
}
