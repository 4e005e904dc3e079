//! A day of one service's traffic, minute by minute.

use super::RequestSize;
use crate::simulate::fleet::engines::Requests;
use stowage_scheduling::units::{Millis, Moment};

pub const MINUTES: usize = 1440;
const MINUTE_S: f64 = 60.0;

/// What one minute brings.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Minute {
    pub requests: f64,
    /// Tokens of a request, on average; at least 1 where there is a request.
    pub prompt: f64,
    pub output: f64,
}

/// A day of traffic. After its last minute comes its first again.
#[derive(Debug, Clone, PartialEq)]
pub struct DayOfTraffic {
    /// The day's minutes; there is at least one.
    minutes: Vec<Minute>,
}

impl DayOfTraffic {
    /// `None` without a minute.
    pub fn new(minutes: Vec<Minute>) -> Option<Self> {
        (!minutes.is_empty()).then_some(Self { minutes })
    }

    pub fn minutes(&self) -> &[Minute] {
        &self.minutes
    }

    /// This day with `factor` times as many requests of the same sizes.
    pub fn scaled(mut self, factor: f64) -> Self {
        self.minutes
            .iter_mut()
            .for_each(|minute| minute.requests *= factor);
        self
    }

    /// Scaled so that its busiest minute brings so many requests a second.
    pub(crate) fn with_peak(self, per_s: f64) -> Self {
        let peak = self.peak_per_s();
        if peak > 0.0 {
            self.scaled(per_s / peak)
        } else {
            self
        }
    }

    pub fn requests(&self) -> f64 {
        self.minutes.iter().map(|minute| minute.requests).sum()
    }

    /// Tokens of a request, on average; `None` without a request.
    pub(crate) fn mean_size(&self) -> Option<RequestSize> {
        let requests = self.requests();
        let mean = |tokens: fn(&Minute) -> f64| {
            let all = self.minutes.iter();
            let sums = all.map(|minute| minute.requests * tokens(minute));
            sums.sum::<f64>() / requests
        };
        (requests > 0.0).then(|| RequestSize {
            prompt: mean(|minute| minute.prompt),
            output: mean(|minute| minute.output),
        })
    }

    pub(crate) fn mean_per_s(&self) -> f64 {
        self.requests() / self.length().0 as f64 * 1000.0
    }

    pub(crate) fn peak_per_s(&self) -> f64 {
        self.minutes
            .iter()
            .map(|minute| minute.requests)
            .fold(0.0, f64::max)
            / MINUTE_S
    }

    pub fn length(&self) -> Millis {
        Millis::seconds(60).times(self.minutes.len() as u64)
    }

    /// What the minute at that time brings.
    pub fn minute_at(&self, now: Moment) -> Minute {
        self.minutes[(now.0 / 60_000) as usize % self.minutes.len()]
    }

    /// What comes from one moment to another, if a minute's requests come evenly.
    pub fn requests_between(&self, from: Moment, to: Moment) -> Requests {
        let mut sum = Requests::default();
        let mut at = from;
        while at < to {
            let end = Moment((at.0 / 60_000 + 1) * 60_000).min(to);
            let minute = self.minute_at(at);
            let part = end.since(at).0 as f64 / 60_000.0;
            sum = sum.plus(Requests::new(
                minute.requests * part,
                minute.prompt,
                minute.output,
            ));
            at = end;
        }
        sum
    }
}
