//! A generated day, so that every scenario runs without a trace.

use super::RequestSize;
use super::day::{DayOfTraffic, MINUTES, Minute};
use stowage_scheduling::testkit::random::Random;

/// What the numbers drawn here are for; see [`Random::seeded`].
const PURPOSE: u64 = 65;
/// The night's rate as a share of the peak's: about that of the quietest hour of a service that writes code.
const NIGHT: f64 = 0.06;
/// Hours at which work begins and ends, and how many each takes to.
const BEGINS: f64 = 8.0;
const ENDS: f64 = 19.0;
const TAKES: f64 = 1.2;
/// A minute is off the curve by up to this share of it.
const NOISE: f64 = 0.15;

/// A day of a service that people use at work, with a night: two logistic curves, a dip at noon, and noise by minute. Its busiest
/// minute brings `peak_per_s` requests a second.
pub(crate) fn working_day(seed: u64, peak_per_s: f64, size: RequestSize) -> DayOfTraffic {
    let mut random = Random::seeded(seed, PURPOSE);
    let minute = |minute: usize| {
        let noise = 1.0 + NOISE * (2.0 * random.share() - 1.0);
        Minute {
            requests: busy(minute as f64 / 60.0) * noise,
            prompt: size.prompt,
            output: size.output,
        }
    };
    let day = DayOfTraffic::new((0..MINUTES).map(minute).collect()).expect("a day has minutes");
    day.with_peak(peak_per_s)
}

/// The curve at an hour, as a share of its highest.
fn busy(hour: f64) -> f64 {
    let logistic = |from: f64| 1.0 / (1.0 + (-(hour - from) * 4.0 / TAKES).exp());
    let noon = 0.15 * (-((hour - 12.7) / 0.6).powi(2)).exp();
    let work = logistic(BEGINS) * (1.0 - logistic(ENDS)) * (1.0 - noon);
    NIGHT + (1.0 - NIGHT) * work
}
