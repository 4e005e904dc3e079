//! The trend of a model's load over the last minutes, and what it will be when a replica that starts now answers.

use super::load::ModelLoad;
use super::signals::Signal;
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use strum::VariantArray;

/// Over how long a trend is taken: long enough for eight evaluations of an HPA's fifteen seconds, short enough to follow a
/// morning's rise.
const TREND_WINDOW: Millis = Millis::seconds(120);
/// The youngest sample that a change is taken against: what has changed against younger ones only may be noise.
const MIN_AGE: Millis = Millis::seconds(30);
/// Samples of that age that a trend needs: a single one could be an accident.
const MIN_SAMPLES: usize = 2;
/// Samples closer than this add nothing, so that there are few however often the load is evaluated.
const MIN_SPACING: Millis = Millis(7500);

/// Loads of the last two minutes, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoadTrend {
    samples: VecDeque<LoadSample>,
    /// More replicas serve than before, and it is not seen yet what they make of the queue.
    is_settling: bool,
}

/// The sum of each signal, in order of declaration; `None` if a replica did not report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct LoadSample {
    at: Moment,
    sums: [Option<u64>; 3],
}

/// How far ahead a change counts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Horizon {
    /// How far ahead a rise counts: until a replica that starts now answers.
    pub rise: Millis,
    /// How far ahead a fall counts.
    pub fall: Millis,
}

impl LoadTrend {
    pub(super) fn add(&mut self, load: &ModelLoad, at: Moment) {
        while self
            .samples
            .front()
            .is_some_and(|first| at.since(first.at) > TREND_WINDOW)
        {
            self.samples.pop_front();
        }
        if self
            .samples
            .back()
            .is_some_and(|last| at.since(last.at) < MIN_SPACING)
        {
            return;
        }
        let sums = std::array::from_fn(|index| {
            let reported = Signal::VARIANTS[index].reported(load);
            (reported.replicas == load.serving).then_some(reported.sum)
        });
        self.samples.push_back(LoadSample { at, sums });
    }

    /// More replicas serve a queue: how it grew before says nothing about how it does now.
    pub(super) fn settle(&mut self) {
        self.samples.clear();
        self.is_settling = true;
    }

    /// Whether it is unknown yet what more replicas make of a signal.
    pub(super) fn is_settling(&self, now: Moment) -> bool {
        self.is_settling
            && self
                .samples
                .iter()
                .filter(|sample| now.since(sample.at) >= MIN_AGE)
                .count()
                < MIN_SAMPLES
    }

    /// What `sum` will be. It falls as far as it has fallen against every sample that is half a minute old. It rises as far as it
    /// has risen against every one of them, and no further than from the older half of the window to the younger: a jump is no
    /// trend, and noise goes both ways.
    pub(super) fn predicted(&self, signal: Signal, sum: u64, now: Moment, horizon: Horizon) -> u64 {
        let index = signal as usize;
        let all = self
            .samples
            .iter()
            .filter_map(|sample| Some((now.since(sample.at), sample.sums[index]?)));
        let all: Vec<(Millis, u64)> = all.filter(|(age, _)| *age <= TREND_WINDOW).collect();
        let old_samples = || all.iter().filter(|(age, _)| *age >= MIN_AGE);
        if old_samples().count() < MIN_SAMPLES {
            return sum;
        }
        let change = |ahead: Millis| {
            move |(age, before): &(Millis, u64)| {
                let change = i128::from(sum) - i128::from(*before);
                change * i128::from(ahead.0) / i128::from(age.0.max(1))
            }
        };
        let fall = old_samples()
            .map(change(horizon.fall))
            .max()
            .unwrap_or(0)
            .min(0);
        let rise = old_samples().map(change(horizon.rise)).min().unwrap_or(0);
        let change = if fall < 0 {
            fall
        } else {
            rise.min(between_halves(&all, horizon.rise)).max(0)
        };
        u64::try_from((i128::from(sum) + change).max(0)).unwrap_or(u64::MAX)
    }
}

/// The change within `ahead` by that from the median of the older half of the window to that of the younger.
fn between_halves(all: &[(Millis, u64)], ahead: Millis) -> i128 {
    let median = |is_older: bool| {
        let half = all
            .iter()
            .filter(|(age, _)| (age.0 * 2 >= TREND_WINDOW.0) == is_older);
        let (mut ages, mut sums): (Vec<u64>, Vec<u64>) =
            half.map(|(age, sum)| (age.0, *sum)).unzip();
        ages.sort_unstable();
        sums.sort_unstable();
        let middle = |values: &[u64]| values.get(values.len() / 2).copied().map(i128::from);
        middle(&ages).zip(middle(&sums))
    };
    let Some(((older, before), (younger, after))) = median(true).zip(median(false)) else {
        return 0;
    };
    (after - before) * i128::from(ahead.0) / (older - younger).max(1)
}
