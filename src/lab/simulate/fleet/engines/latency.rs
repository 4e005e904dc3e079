//! How long requests took: a histogram, and how many broke their bounds.

/// Each bucket is so much wider than the one before: a quantile is at most 5 % off.
const BUCKET_RATIO: f64 = 1.05;
/// The lower end of the first bucket, in seconds.
const FIRST_BUCKET_S: f64 = 1e-4;
/// Up to 3 × 10⁵ seconds.
const BUCKETS: usize = 448;

/// Amounts of requests by seconds, in buckets of 5 %.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyHistogram {
    buckets: Vec<f64>,
    count: f64,
    sum_s: f64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self {
            buckets: vec![0.0; BUCKETS],
            count: 0.0,
            sum_s: 0.0,
        }
    }
}

impl LatencyHistogram {
    pub fn add(&mut self, seconds: f64, requests: f64) {
        if !(seconds.is_finite() && requests > 0.0) {
            return;
        }
        let index = (seconds / FIRST_BUCKET_S).max(1.0).ln() / BUCKET_RATIO.ln();
        self.buckets[(index as usize).min(BUCKETS - 1)] += requests;
        self.count += requests;
        self.sum_s += seconds * requests;
    }

    pub fn merge(&mut self, other: &Self) {
        self.buckets
            .iter_mut()
            .zip(&other.buckets)
            .for_each(|(mine, more)| *mine += more);
        self.count += other.count;
        self.sum_s += other.sum_s;
    }

    pub fn count(&self) -> f64 {
        self.count
    }

    /// `None` if there was no request.
    #[cfg(test)]
    pub(crate) fn mean_s(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum_s / self.count)
    }

    /// Seconds within which this share of the requests was done: the upper end of a bucket.
    pub(crate) fn quantile_s(&self, share: f64) -> Option<f64> {
        let wanted = self.count * share.clamp(0.0, 1.0);
        let mut below = 0.0;
        let is_reached = |(_, requests): &(usize, &f64)| {
            below += **requests;
            below > 0.0 && below >= wanted * (1.0 - 1e-12)
        };
        let (index, _) = self.buckets.iter().enumerate().find(is_reached)?;
        Some(FIRST_BUCKET_S * BUCKET_RATIO.powi(index as i32 + 1))
    }
}

/// Bounds that a request is to meet, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slo {
    /// Time to first token: from the request's arrival, waiting included.
    pub ttft_s: f64,
    /// Time per output token, first token apart.
    pub tpot_s: f64,
}

/// Latencies, and how many requests broke their bounds. A request whose two bounds are broken counts in both.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SloTally {
    pub ttft: LatencyHistogram,
    pub tpot: LatencyHistogram,
    pub ttft_violations: f64,
    pub tpot_violations: f64,
}

impl SloTally {
    /// Requests that got their first token.
    pub(crate) fn first_tokens(&mut self, slo: &Slo, ttft_s: f64, requests: f64) {
        self.ttft.add(ttft_s, requests);
        if ttft_s > slo.ttft_s {
            self.ttft_violations += requests;
        }
    }

    /// Requests that got their last.
    pub fn completed(&mut self, slo: &Slo, tpot_s: f64, requests: f64) {
        self.tpot.add(tpot_s, requests);
        if tpot_s > slo.tpot_s {
            self.tpot_violations += requests;
        }
    }

    pub fn merge(&mut self, other: &Self) {
        self.ttft.merge(&other.ttft);
        self.tpot.merge(&other.tpot);
        self.ttft_violations += other.ttft_violations;
        self.tpot_violations += other.tpot_violations;
    }

    /// The share of requests whose first token came in time; 1 if there was none.
    #[cfg(test)]
    pub(crate) fn attained(&self) -> f64 {
        if self.ttft.count() > 0.0 {
            1.0 - self.ttft_violations / self.ttft.count()
        } else {
            1.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_bucket_and_weigh_requests() {
        let mut latencies = LatencyHistogram::default();
        assert_eq!(
            (latencies.quantile_s(0.99), latencies.mean_s()),
            (None, None)
        );
        (1..=1000).for_each(|n| latencies.add(f64::from(n) / 1000.0, 1.0));
        for share in [0.01, 0.5, 0.99, 1.0] {
            let quantile = latencies.quantile_s(share).unwrap();
            assert!(
                (share..=share * BUCKET_RATIO * 1.01).contains(&quantile),
                "{share}: {quantile}"
            );
        }
        latencies.add(100.0, 9000.0);
        assert!(latencies.quantile_s(0.5).unwrap() >= 100.0);
        assert!((latencies.mean_s().unwrap() - 90.05).abs() < 0.01);
    }

    #[test]
    fn a_bound_is_broken_by_what_is_beyond_it_and_each_request_counts_once() {
        let slo = Slo {
            ttft_s: 1.0,
            tpot_s: 0.05,
        };
        let mut tally = SloTally::default();
        tally.first_tokens(&slo, 1.0, 3.0);
        tally.first_tokens(&slo, 1.1, 1.0);
        tally.completed(&slo, 0.06, 2.0);
        assert_eq!(
            (
                tally.ttft_violations,
                tally.tpot_violations,
                tally.attained()
            ),
            (1.0, 2.0, 0.75)
        );
        let mut both = tally.clone();
        both.merge(&tally);
        assert_eq!(
            (both.ttft.count(), both.ttft_violations, both.attained()),
            (8.0, 2.0, 0.75)
        );
    }
}
