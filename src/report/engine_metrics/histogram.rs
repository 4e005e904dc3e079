//! A latency from an engine's histogram: the mean and the 99th percentile of what it observed between two pages.

use super::figures::{MAX_COUNT, MetricsProblem, shortened};
use super::scan::Sample;
use stowage_scheduling::units::Micros;
use stowage_scheduling::vocabulary::latency::Latency;

/// No mean is less than the unit or more than a day.
pub const LATENCIES: std::ops::RangeInclusive<Micros> = Micros(1)..=Micros(86_400_000_000);

/// Observations in seconds since the engine started, over all its ranks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram {
    pub sum: f64,
    pub count: f64,
    /// How many are at most a bound, by rising bounds; without the infinite one.
    pub buckets: Vec<(f64, f64)>,
}

impl Histogram {
    /// Whether this may be the same process's histogram later than `earlier`: none of its counters fell.
    pub fn may_follow(&self, earlier: &Self) -> bool {
        self.sum >= earlier.sum && self.count >= earlier.count
    }

    /// What was observed since `earlier`; `None` if nothing was.
    pub fn since(&self, earlier: &Self) -> Option<Latency> {
        let (count, sum) = (self.count - earlier.count, self.sum - earlier.sum);
        // A sum that stands still is no measurement: nothing takes no time.
        if count <= 0.0 || sum <= 0.0 {
            return None;
        }
        let mean = Micros::from_seconds(sum / count)?;
        if !LATENCIES.contains(&mean) {
            return None;
        }
        Some(Latency {
            mean,
            p99: self.quantile_since(earlier, 0.99 * count),
        })
    }

    /// The value below which `wanted` of the observations since `earlier` are, as if those of a bucket were spread evenly over it.
    fn quantile_since(&self, earlier: &Self, wanted: f64) -> Option<Micros> {
        let is_same = |((now, _), (before, _)): (&(f64, f64), &(f64, f64))| now == before;
        if self.buckets.len() != earlier.buckets.len()
            || !self.buckets.iter().zip(&earlier.buckets).all(is_same)
        {
            return None;
        }
        let (mut lower, mut below) = (0.0, 0.0);
        for ((bound, now), (_, before)) in self.buckets.iter().zip(&earlier.buckets) {
            let up_to = now - before;
            // A bucket that falls, or has fewer than a smaller one, is no count.
            if up_to < below {
                return None;
            }
            if up_to >= wanted {
                let part = (wanted - below) / (up_to - below);
                return Micros::from_seconds(lower + (bound - lower) * part);
            }
            (lower, below) = (*bound, up_to);
        }
        None
    }
}

/// Engines have some twenty bounds.
pub(super) const MAX_BUCKETS: usize = 64;

/// A series of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Series {
    Sum,
    Count,
    Buckets,
}

/// A histogram while its page is read. Samples count whatever their labels: what is there twice changes no mean and no percentile.
#[derive(Debug, Default)]
pub(super) struct CollectedHistogram {
    sum: Option<f64>,
    count: Option<f64>,
    buckets: Vec<(f64, f64)>,
    /// Why it is not reliable.
    pub problem: Option<MetricsProblem>,
}

impl CollectedHistogram {
    pub fn add<T>(&mut self, metric: &'static str, series: Series, sample: &Sample<'_, T>) {
        if let Err(problem) = self.try_add(metric, series, sample) {
            self.problem.get_or_insert(problem);
        }
    }

    fn try_add<T>(
        &mut self,
        metric: &'static str,
        series: Series,
        sample: &Sample<'_, T>,
    ) -> Result<(), MetricsProblem> {
        let impossible = |value: &str| MetricsProblem::Impossible {
            metric,
            value: shortened(value),
        };
        let value = sample.value;
        let is_count = series == Series::Sum || value.fract() == 0.0;
        if !(0.0..=MAX_COUNT).contains(&value) || !is_count {
            return Err(impossible(&value.to_string()));
        }
        match series {
            Series::Sum => *self.sum.get_or_insert_default() += value,
            Series::Count => *self.count.get_or_insert_default() += value,
            Series::Buckets => {
                let Some(label) = sample.labels.get("le") else {
                    return Err(MetricsProblem::Garbled { metric });
                };
                let bound = label.value();
                match bound.parse::<f64>() {
                    Ok(f64::INFINITY) => {}
                    Ok(bound) if bound >= 0.0 => return self.add_bucket(metric, bound, value),
                    _ => return Err(impossible(&bound)),
                }
            }
        }
        Ok(())
    }

    fn add_bucket(
        &mut self,
        metric: &'static str,
        bound: f64,
        count: f64,
    ) -> Result<(), MetricsProblem> {
        let index = self.buckets.partition_point(|(one, _)| *one < bound);
        if let Some((_, sum)) = self.buckets.get_mut(index).filter(|(one, _)| *one == bound) {
            *sum += count;
        } else if self.buckets.len() < MAX_BUCKETS {
            self.buckets.insert(index, (bound, count));
        } else {
            return Err(MetricsProblem::TooManyBuckets { metric });
        }
        Ok(())
    }

    /// What it says, if it is whole.
    pub fn histogram(&self) -> Option<Histogram> {
        let is_reliable = self.problem.is_none();
        let (sum, count) = self.sum.zip(self.count).filter(|_| is_reliable)?;
        Some(Histogram {
            sum,
            count,
            buckets: self.buckets.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(sum: f64, count: f64, buckets: &[(f64, f64)]) -> Histogram {
        Histogram {
            sum,
            count,
            buckets: buckets.to_vec(),
        }
    }

    fn micros(latency: Option<Latency>) -> Option<(u64, Option<u64>)> {
        latency.map(|one| (one.mean.0, one.p99.map(|p99| p99.0)))
    }

    #[test]
    fn only_what_was_observed_between_two_pages_counts() {
        let slow = histogram(500.0, 100.0, &[(0.1, 0.0), (0.2, 0.0), (10.0, 100.0)]);
        let later = histogram(515.0, 200.0, &[(0.1, 50.0), (0.2, 100.0), (10.0, 200.0)]);
        assert_eq!(micros(later.since(&slow)), Some((150_000, Some(198_000))));
        assert_eq!(later.since(&later), None, "no request is not a fast one");
    }

    #[test]
    fn a_new_process_has_observed_nothing_since() {
        let before = histogram(500.0, 100.0, &[(0.1, 100.0)]);
        assert_eq!(histogram(1.0, 10.0, &[(0.1, 10.0)]).since(&before), None);
        let fewer = histogram(600.0, 90.0, &[(0.1, 90.0)]);
        assert_eq!(fewer.since(&before), None);
        for sum in [400.0, 500.0] {
            let no_longer = histogram(sum, 110.0, &[(0.1, 110.0)]);
            assert_eq!(no_longer.since(&before), None);
        }
    }

    #[test]
    fn a_percentile_needs_buckets_that_reach_it_and_rise() {
        let nothing = |bounds: &[f64]| {
            let buckets: Vec<_> = bounds.iter().map(|bound| (*bound, 0.0)).collect();
            histogram(0.0, 0.0, &buckets)
        };
        for (buckets, name) in [
            (&[][..], "none"),
            (&[(0.1, 50.0)], "beyond the last"),
            (
                &[(0.1, 60.0), (0.2, 50.0), (0.4, 100.0)],
                "a smaller bucket has more",
            ),
        ] {
            let bounds: Vec<_> = buckets.iter().map(|(bound, _)| *bound).collect();
            let latency = histogram(10.0, 100.0, buckets).since(&nothing(&bounds));
            assert_eq!(micros(latency), Some((100_000, None)), "{name}");
        }
        let others = histogram(10.0, 100.0, &[(0.1, 100.0)]).since(&nothing(&[0.2]));
        assert_eq!(micros(others), Some((100_000, None)), "other bounds");
    }
}
