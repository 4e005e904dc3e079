//! Observed starts of one kind, and the factors that fit them.
//!
//! A start takes `transfer × a + init × b`: both parts by the policy's speeds, `a` and `b` to be found. The fit minimizes relative
//! errors, counts outliers less, and begins with one factor for both: all engines of one size, say, do not tell `a` from `b`.

use crate::units::Millis;
use crate::vocabulary::start_time::{StartFactors, TimeFactor};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// One observed start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartSample {
    /// By the policy's speeds: the part that depends on bytes, and the rest.
    pub transfer: Millis,
    pub init: Millis,
    pub observed: Millis,
    pub namespace: Arc<str>,
}

/// The latest starts of one kind, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct StartSamples(Vec<StartSample>);

/// How much what is known beforehand counts, in samples: starts vary by a fifth of their time, policies are off by their whole.
const HOLD: f64 = 0.05;
/// Errors beyond this share of the expected time count less and less.
const OUTLIER: f64 = 0.5;
/// After so many rounds the fit moves by less than a thousandth.
const ROUNDS: usize = 12;

impl StartSamples {
    /// Adds a start and keeps `limit` at most. Of the namespace with the most samples the oldest goes, so that no namespace can
    /// push out what others have observed.
    pub(crate) fn add(&mut self, sample: StartSample, limit: usize) {
        self.0.push(sample);
        if self.0.len() > limit {
            let count = |namespace: &str| {
                self.0
                    .iter()
                    .filter(|one| &*one.namespace == namespace)
                    .count()
            };
            let counts: Vec<usize> = self.0.iter().map(|one| count(&one.namespace)).collect();
            let most = counts.iter().max().copied().unwrap_or_default();
            let oldest = counts
                .iter()
                .position(|count| *count == most)
                .unwrap_or_default();
            self.0.remove(oldest);
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The factors that fit best, near `known` where that is open; `None` with fewer than `least` samples.
    pub(crate) fn fit(&self, known: StartFactors, least: usize) -> Option<StartFactors> {
        if self.0.len() < least {
            return None;
        }
        let known = [known.transfer, known.init].map(|factor| f64::from(factor.0) / 1000.0);
        let common = (0..ROUNDS).fold(1.0, |common, _| self.refit_common(common, known));
        // As long as nothing says otherwise, both parts are off by the same.
        let about = known.map(|factor| limited(factor * common));
        let found = (0..ROUNDS).fold(about, |found, _| self.refit(found, about));
        let [transfer, init] = found.map(|factor| TimeFactor((factor * 1000.0).round() as u32));
        Some(StartFactors {
            transfer,
            init,
            samples: self.0.len() as u16,
        })
    }

    /// One round of weighted least squares for a factor of both parts, with weights by the one of the round before.
    fn refit_common(&self, before: f64, known: [f64; 2]) -> f64 {
        let [mut observed, mut expected] = [HOLD / before; 2];
        for sample in &self.0 {
            let [transfer, init, time] = sample.limited();
            let one = known[0] * transfer + known[1] * init;
            // No time was expected, and no factor of nothing is another time.
            if one < 1.0 {
                continue;
            }
            let weight = weight(time, before * one);
            observed += weight * one * time;
            expected += weight * one * one;
        }
        observed / expected
    }

    /// The same for both factors, near `about`.
    fn refit(&self, before: [f64; 2], about: [f64; 2]) -> [f64; 2] {
        // The normal equations: [[tt, ti], [ti, ii]] × [a, b] = [ty, iy].
        let [mut tt, mut ii] = about.map(|factor| HOLD / (factor * factor));
        let [mut ty, mut iy] = about.map(|factor| HOLD / factor);
        let mut ti = 0.0;
        for sample in &self.0 {
            let [transfer, init, time] = sample.limited();
            let weight = weight(time, (before[0] * transfer + before[1] * init).max(1.0));
            tt += weight * transfer * transfer;
            ti += weight * transfer * init;
            ii += weight * init * init;
            ty += weight * transfer * time;
            iy += weight * init * time;
        }
        // Positive, because of what is known beforehand.
        let determinant = tt * ii - ti * ti;
        let found = [
            (ty * ii - iy * ti) / determinant,
            (iy * tt - ty * ti) / determinant,
        ];
        // If one factor is at its limit, the other one fits the rest.
        match found.map(limited) {
            [a, _] if a != found[0] => [a, limited((iy - ti * a) / ii)],
            [_, b] if b != found[1] => [limited((ty - ti * b) / tt), b],
            both => both,
        }
    }
}

impl StartSample {
    /// Both parts and the observed time in milliseconds, that within what factors may say.
    fn limited(&self) -> [f64; 3] {
        let [transfer, init, observed] =
            [self.transfer, self.init, self.observed].map(|time| time.0 as f64);
        let whole = (transfer + init).max(1.0);
        let (low, high) = TimeFactor::LIMITS;
        let [low, high] = [low, high].map(|limit| whole * f64::from(limit.0) / 1000.0);
        [transfer, init, observed.clamp(low, high)]
    }
}

/// How much a start counts that was expected to take `expected`: errors are relative, and outliers count less.
fn weight(observed: f64, expected: f64) -> f64 {
    let error = ((observed - expected) / expected).abs();
    OUTLIER / error.max(OUTLIER) / (expected * expected)
}

fn limited(factor: f64) -> f64 {
    let (low, high) = TimeFactor::LIMITS;
    factor.clamp(f64::from(low.0) / 1000.0, f64::from(high.0) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(namespace: &str, transfer: u64, init: u64, observed: u64) -> StartSample {
        let [transfer, init, observed] = [transfer, init, observed].map(Millis::seconds);
        StartSample {
            transfer,
            init,
            observed,
            namespace: namespace.into(),
        }
    }

    fn samples(of: impl IntoIterator<Item = StartSample>) -> StartSamples {
        let mut samples = StartSamples::default();
        of.into_iter().for_each(|one| samples.add(one, 24));
        samples
    }

    fn expected(factors: StartFactors, transfer: u64, init: u64) -> f64 {
        (factors.transfer.of(Millis::seconds(transfer)).0
            + factors.init.of(Millis::seconds(init)).0) as f64
            / 1000.0
    }

    #[test]
    fn two_sizes_tell_a_slow_network_from_a_slow_start() {
        let sizes = || [10, 40, 160].into_iter().cycle().take(24);
        let slow_network = sizes().map(|transfer| sample("a", transfer, 20, 3 * transfer + 20));
        let found = samples(slow_network).fit(StartFactors::PRIOR, 3).unwrap();
        assert!((2900..=3000).contains(&found.transfer.0), "{found:?}");
        assert!((1000..=1100).contains(&found.init.0), "{found:?}");
        let slow_start = sizes().map(|transfer| sample("a", transfer, 20, transfer + 60));
        let found = samples(slow_start).fit(StartFactors::PRIOR, 3).unwrap();
        assert!((1000..=1100).contains(&found.transfer.0), "{found:?}");
        assert!((2900..=3000).contains(&found.init.0), "{found:?}");
    }

    #[test]
    fn one_size_is_predicted_whichever_part_is_slow() {
        let found = samples(vec![sample("a", 30, 20, 150); 10])
            .fit(StartFactors::PRIOR, 3)
            .unwrap();
        let time = expected(found, 30, 20);
        assert!((148.0..=151.0).contains(&time), "{time}");
    }

    #[test]
    fn a_start_a_hundred_times_as_long_hardly_counts() {
        let mut all = vec![sample("a", 30, 20, 100); 8];
        all.push(sample("a", 30, 20, 5000));
        let time = expected(samples(all).fit(StartFactors::PRIOR, 3).unwrap(), 30, 20);
        assert!((100.0..=110.0).contains(&time), "{time}");
    }

    #[test]
    fn factors_stay_within_their_limits_and_few_samples_say_nothing() {
        let absurd = [0, u64::MAX / 2000].map(|observed| sample("a", 30, 20, observed));
        assert_eq!(samples(absurd.clone()).fit(StartFactors::PRIOR, 3), None);
        for one in absurd {
            let found = samples([one.clone()]).fit(StartFactors::PRIOR, 1).unwrap();
            let (low, high) = TimeFactor::LIMITS;
            for factor in [found.transfer, found.init] {
                assert!((low..=high).contains(&factor), "{found:?} of {one:?}");
            }
        }
        let nothing = sample("a", 0, 0, 0);
        assert_eq!(
            samples([nothing]).fit(StartFactors::PRIOR, 1).unwrap(),
            StartFactors {
                samples: 1,
                ..StartFactors::PRIOR
            }
        );
    }

    #[test]
    fn a_namespace_that_floods_the_samples_pushes_out_its_own() {
        let honest = (0..8).map(|_| sample("honest", 30, 20, 50));
        let flood = (0..1000).map(|_| sample("flood", 30, 20, 500));
        let all = samples(honest.chain(flood));
        assert_eq!(all.len(), 24);
        assert_eq!(
            all.0
                .iter()
                .filter(|one| &*one.namespace == "honest")
                .count(),
            8
        );
    }
}
