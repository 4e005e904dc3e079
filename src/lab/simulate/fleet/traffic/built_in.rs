//! A generated day, so that every scenario runs without a trace.

use super::RequestSize;
use super::day::{DayOfTraffic, MINUTES, Minute};
use stowage_scheduling::testkit::random::Random;

/// What the numbers drawn here are for; see [`Random::seeded`].
const PURPOSE: u64 = 65;
/// The night's rate as a share of the peak's: about that of the quietest hour of a service that writes code.
const NIGHT_SHARE: f64 = 0.06;
/// Hours at which work begins and ends, and how many each takes to.
const WORK_START_HOUR: f64 = 8.0;
const WORK_END_HOUR: f64 = 19.0;
const RAMP_HOURS: f64 = 1.2;
/// A minute is off the curve by up to this share of it.
const NOISE: f64 = 0.15;

/// A day of a service that people use at work, with a night: two logistic curves, a dip at noon, and noise by minute. Its busiest
/// minute brings `peak_per_s` requests a second.
pub(crate) fn working_day(seed: u64, peak_per_s: f64, size: RequestSize) -> DayOfTraffic {
    let mut random = Random::seeded(seed, PURPOSE);
    let minute = |minute: usize| {
        let noise = 1.0 + NOISE * (2.0 * random.unit_interval() - 1.0);
        Minute {
            requests: daily_curve(minute as f64 / 60.0) * noise,
            prompt: size.prompt,
            output: size.output,
        }
    };
    let day = DayOfTraffic::new((0..MINUTES).map(minute).collect()).expect("a day has minutes");
    day.with_peak(peak_per_s)
}

/// The curve at an hour, as a share of its highest.
fn daily_curve(hour: f64) -> f64 {
    let logistic = |from: f64| 1.0 / (1.0 + (-(hour - from) * 4.0 / RAMP_HOURS).exp());
    let noon = 0.15 * (-((hour - 12.7) / 0.6).powi(2)).exp();
    let work = logistic(WORK_START_HOUR) * (1.0 - logistic(WORK_END_HOUR)) * (1.0 - noon);
    NIGHT_SHARE + (1.0 - NIGHT_SHARE) * work
}
