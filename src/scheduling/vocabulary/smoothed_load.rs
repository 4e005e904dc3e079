//! How busy the engines on a GPU are, smoothed: what decisions count of a series of readings.
//!
//! A KV cache goes up and down by some per cent from second to second, and a decision that followed each of them would be made
//! again every second. Three rules take the noise out:
//!
//! - An average over the policy's time constant, corrected by its trend: an average of a cache that fills lags behind it.
//! - A reading far from the average does not move it; three of them in a row, on one side, begin a new average. After nothing,
//!   neither cache nor queue, the first of them does: an engine has started there, and what was before says nothing of it.
//! - What decisions count follows the average only when that has moved by a step, upwards earlier than downwards, or beyond a
//!   limit of a class.
//!
//! Integers only, so that every machine and every replay counts the same.

use super::classification::ClassTerms;
use super::node_reading::EngineLoad;
use crate::units::{Millis, Moment, Percent};
use serde::{Deserialize, Serialize};

/// The load of the engines on one GPU, over its readings until now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmoothedLoad {
    /// The latest reading.
    sampled: Moment,
    /// In thousandths of a per cent.
    kv_cache: Option<MovingAverage>,
    /// In thousandths of a request.
    queue: Option<MovingAverage>,
    counted: EngineLoad,
}

/// An average that weighs readings less the older they are, and the same average of that: the two differ by what the first lags
/// behind a steady rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct MovingAverage {
    once: i64,
    twice: i64,
    /// Readings in a row far above the average, or, negative, far below.
    outliers: i8,
}

/// Averages and trends are kept in thousandths.
const UNIT: i64 = 1000;
/// So many readings in a row far on one side of the average are no noise.
const OUTLIERS_TO_RESTART: i8 = 3;
/// A reading so many points of KV cache from the average is far from it.
const KV_OUTLIER_DISTANCE: i64 = 20 * UNIT;
/// A reading so many requests and half of the average from a queue's average is far from it.
const QUEUE_OUTLIER_DISTANCE: i64 = 8 * UNIT;
/// A lag behind the trend of no more than this is noise.
const KV_NOISE: i64 = 2 * UNIT;
const QUEUE_NOISE: i64 = UNIT;
/// The step of what is counted of a KV cache, in points upwards and downwards.
const KV_STEP: (u8, u8) = (4, 6);
/// Longer than any time constant that makes a difference; keeps the arithmetic within its bounds.
const MAX_TIME_CONSTANT_MILLIS: u64 = 24 * 3_600_000;

impl SmoothedLoad {
    /// The first reading counts as it is.
    pub fn first(engine_load: EngineLoad, sampled: Moment) -> Self {
        Self {
            sampled,
            kv_cache: engine_load
                .kv_cache
                .map(|kv| MovingAverage::first(thousandths(kv.get().into()))),
            queue: engine_load
                .queue
                .map(|queue| MovingAverage::first(thousandths(queue))),
            counted: engine_load,
        }
    }

    /// Takes in the next reading. What a reading does not say is unknown at once, and restarts when it is said again. What is
    /// beyond the limits of any of these classes counts so.
    pub fn add(
        &mut self,
        engine_load: EngineLoad,
        sampled: Moment,
        time_constant: Millis,
        classes: &[ClassTerms],
    ) {
        let elapsed = sampled.since(self.sampled);
        self.sampled = self.sampled.max(sampled);
        // An average from so long ago says nothing of now; without a time constant, none does.
        if elapsed >= time_constant.times(3) {
            *self = Self::first(engine_load, self.sampled);
            return;
        }
        let weight = Weight {
            elapsed,
            time_constant,
        };
        let outliers = if self.is_zero() {
            1
        } else {
            OUTLIERS_TO_RESTART
        };
        let kv_cache = engine_load.kv_cache.map(|kv| i64::from(kv.get()) * UNIT);
        self.kv_cache = MovingAverage::updated(self.kv_cache, kv_cache, weight, outliers, |_| {
            KV_OUTLIER_DISTANCE
        });
        let queue = engine_load.queue.map(thousandths);
        let queue_far = |average| QUEUE_OUTLIER_DISTANCE + average / 2;
        self.queue = MovingAverage::updated(self.queue, queue, weight, outliers, queue_far);
        let current = EngineLoad {
            kv_cache: self.kv_cache(),
            queue: self
                .queue
                .map(|average| requests(average.trend_corrected(QUEUE_NOISE))),
            ..engine_load
        };
        let stepped = EngineLoad {
            kv_cache: current
                .kv_cache
                .map(|now| step_kv(self.counted.kv_cache, now)),
            queue: current.queue.map(|now| step_queue(self.counted.queue, now)),
            ..engine_load
        };
        let is_beyond =
            |terms: &ClassTerms| terms.is_exceeded_by(current) && !terms.is_exceeded_by(stepped);
        self.counted = if classes.iter().any(is_beyond) {
            current
        } else {
            stepped
        };
    }

    /// Whether no engine was there, or none that had a request.
    fn is_zero(&self) -> bool {
        [self.kv_cache, self.queue]
            .into_iter()
            .flatten()
            .all(MovingAverage::is_zero)
    }

    /// What decisions count.
    pub fn counted(&self) -> EngineLoad {
        self.counted
    }

    /// The average KV cache in use, rounded up.
    pub fn kv_cache(&self) -> Option<Percent> {
        self.kv_cache
            .map(|average| percent(average.trend_corrected(KV_NOISE)))
    }

    /// Change of the average a minute, in points of KV cache.
    pub(crate) fn kv_cache_trend(&self, time_constant: Millis) -> Option<i32> {
        let average = self.kv_cache?;
        let minute = i128::from(average.once - average.twice) * 60_000;
        let points = minute / (i128::from(time_constant.0.max(1)) * i128::from(UNIT));
        Some(points.clamp(i32::MIN.into(), i32::MAX.into()) as i32)
    }
}

/// How much of the way to a new reading an average goes.
#[derive(Debug, Clone, Copy)]
struct Weight {
    elapsed: Millis,
    time_constant: Millis,
}

impl Weight {
    /// The part of `difference` by which an average moves, rounded away from zero, so that it arrives where its readings stay.
    fn apply_to(self, difference: i64) -> i64 {
        let (elapsed, constant) = (
            self.elapsed.0.min(MAX_TIME_CONSTANT_MILLIS),
            self.time_constant.0.min(MAX_TIME_CONSTANT_MILLIS),
        );
        let whole = i128::from(elapsed + constant).max(1);
        let part = (i128::from(difference.unsigned_abs()) * i128::from(elapsed)).div_euclid(whole)
            + i128::from(elapsed > 0 && difference != 0);
        let part = i64::try_from(part)
            .unwrap_or(i64::MAX)
            .min(difference.abs());
        part * difference.signum()
    }
}

impl MovingAverage {
    fn first(value: i64) -> Self {
        Self {
            once: value,
            twice: value,
            outliers: 0,
        }
    }

    fn updated(
        previous: Option<Self>,
        value: Option<i64>,
        weight: Weight,
        // So many of them in a row begin a new average.
        outliers: i8,
        far: impl Fn(i64) -> i64,
    ) -> Option<Self> {
        let value = value?;
        let Some(mut average) = previous else {
            return Some(Self::first(value));
        };
        let difference = value - average.once;
        if difference.abs() < far(average.once) {
            average.outliers = 0;
            average.once += weight.apply_to(difference);
            average.twice += weight.apply_to(average.once - average.twice);
            return Some(average);
        }
        average.outliers = match difference > 0 {
            true => average.outliers.max(0) + 1,
            false => average.outliers.min(0) - 1,
        };
        Some(if average.outliers.abs() < outliers {
            average
        } else {
            Self::first(value)
        })
    }

    fn is_zero(self) -> bool {
        self.once == 0 && self.twice == 0
    }

    /// The average, with what it lags behind its trend beyond `noise`.
    fn trend_corrected(self, noise: i64) -> i64 {
        let lag = self.once - self.twice;
        (self.once + lag.signum() * (lag.abs() - noise).max(0)).max(0)
    }
}

fn thousandths(count: u32) -> i64 {
    i64::from(count) * UNIT
}

fn percent(thousandths: i64) -> Percent {
    let whole = thousandths.clamp(0, 100 * UNIT) as u64;
    Percent::new(whole.div_ceil(UNIT as u64) as u8).unwrap_or(Percent::FULL)
}

fn requests(thousandths: i64) -> u32 {
    u32::try_from(thousandths.unsigned_abs().div_ceil(UNIT as u64)).unwrap_or(u32::MAX)
}

fn step_kv(counted: Option<Percent>, now: Percent) -> Percent {
    let Some(counted) = counted else { return now };
    let (up, down) = KV_STEP;
    let is_moved = now.get() >= counted.get() + up || now.get() + down <= counted.get();
    if is_moved || now.get() == 0 {
        now
    } else {
        counted
    }
}

/// The steps of a queue grow with it: one and a quarter of it upwards, two and a quarter of it downwards.
fn step_queue(counted: Option<u32>, now: u32) -> u32 {
    let Some(counted) = counted else { return now };
    let quarter = counted / 4;
    let is_moved =
        now >= counted.saturating_add(1 + quarter) || now.saturating_add(2 + quarter) <= counted;
    if is_moved || now == 0 { now } else { counted }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEN_SECONDS: Millis = Millis::seconds(10);

    fn load(kv: u8, queue: u32) -> EngineLoad {
        EngineLoad::new(Percent::new(kv), Some(queue))
    }

    /// After these readings, one a second.
    fn after(readings: impl IntoIterator<Item = EngineLoad>) -> SmoothedLoad {
        let mut readings = readings.into_iter().zip(0..);
        let (first, _) = readings.next().unwrap();
        let mut smoothed = SmoothedLoad::first(first, Moment(0));
        for (reading, second) in readings {
            smoothed.add(reading, Moment(second * 1000), TEN_SECONDS, &[]);
        }
        smoothed
    }

    fn counted(readings: impl IntoIterator<Item = (u8, u32)>) -> (u8, u32) {
        let counted = after(readings.into_iter().map(|(kv, queue)| load(kv, queue))).counted();
        (counted.kv_cache.unwrap().get(), counted.queue.unwrap())
    }

    #[test]
    fn the_first_reading_counts_as_it_is() {
        assert_eq!(after([load(66, 3)]).counted(), load(66, 3));
        assert_eq!(
            after([EngineLoad::default()]).counted(),
            EngineLoad::default()
        );
    }

    #[test]
    fn one_outlier_changes_nothing_and_three_in_a_row_count() {
        assert_eq!(counted([(20, 0), (97, 40), (20, 0)]), (20, 0));
        assert_eq!(counted([(20, 0), (97, 40), (97, 40)]), (20, 0));
        assert_eq!(counted([(20, 0), (97, 40), (97, 40), (97, 40)]), (97, 40));
        assert_eq!(counted([(97, 40), (20, 0), (20, 0), (20, 0)]), (20, 0));
        assert_eq!(
            counted([(50, 0), (97, 0), (2, 0), (97, 0), (2, 0), (97, 0)]),
            (50, 0),
            "up and down"
        );
    }

    #[test]
    fn after_nothing_a_reading_far_from_it_counts_as_it_is() {
        assert_eq!(
            counted([(0, 0), (97, 40)]),
            (97, 40),
            "an engine has started, or has its first requests"
        );
        assert_eq!(counted([(0, 0), (0, 0), (35, 0), (36, 0)]), (35, 0));
        assert_eq!(
            after([load(0, 0), load(35, 0)]).kv_cache(),
            Percent::new(35)
        );
        assert_eq!(
            counted([(20, 0), (0, 0), (20, 0)]),
            (20, 0),
            "one reading of nothing is an outlier, as any other"
        );
    }

    #[test]
    fn noise_around_a_steady_load_moves_nothing_that_is_counted() {
        let noise = [0, 6, 2, 8, 3, 9, 1, 5, 7, 4];
        let readings = (0..600).map(|n| (41 + noise[n % 10], noise[(n * 3) % 10] as u32));
        let mut smoothed = SmoothedLoad::first(load(45, 4), Moment(0));
        let mut changes = 0;
        for ((kv, queue), second) in readings.zip(1..) {
            let before = smoothed.counted();
            smoothed.add(load(kv, queue), Moment(second * 1000), TEN_SECONDS, &[]);
            changes += usize::from(smoothed.counted() != before);
        }
        assert!(changes <= 2, "{changes}");
    }

    #[test]
    fn a_cache_that_fills_is_counted_without_the_lag_of_an_average() {
        let filling = after((0..=60).map(|second| load(20 + second, 0)));
        let average = filling.kv_cache().unwrap().get();
        assert!((77..=80).contains(&average), "{average}");
        let trend = filling.kv_cache_trend(TEN_SECONDS).unwrap();
        assert!((55..=61).contains(&trend), "a point a second: {trend}");
        assert!(filling.counted().kv_cache.unwrap().get().abs_diff(80) <= 6);
        let draining = after((0..=60).map(|second| load(80 - second, 0)));
        assert!(draining.kv_cache_trend(TEN_SECONDS).unwrap() < -55);
    }

    #[test]
    fn what_is_not_said_is_unknown_at_once_and_begins_anew() {
        let silent = EngineLoad::new(None, None);
        assert_eq!(after([load(60, 3), silent]).counted(), silent);
        assert_eq!(
            after([load(60, 3), silent, load(10, 1)]).counted(),
            load(10, 1)
        );
        let full = EngineLoad {
            preempting: true,
            ..load(60, 3)
        };
        assert_eq!(
            after([load(60, 3), full]).counted().occupancy(),
            Some(Percent::FULL)
        );
    }

    #[test]
    fn what_is_beyond_a_limit_counts_so_however_little_it_is() {
        let terms = ClassTerms {
            kv_cache_limit: Percent::new(90),
            queue_limit: Some(32),
            ..ClassTerms::default()
        };
        let mut smoothed = SmoothedLoad::first(load(89, 0), Moment(0));
        let mut read = |second: u64, kv: u8| {
            smoothed.add(load(kv, 0), Moment(second * 1000), TEN_SECONDS, &[terms]);
            smoothed.counted().kv_cache.unwrap().get()
        };
        assert_eq!((1..60).map(|second| read(second, 91)).last(), Some(91));
        assert_eq!(
            (60..120).map(|second| read(second, 86)).last(),
            Some(91),
            "it is not far below"
        );
        assert_eq!((120..180).map(|second| read(second, 85)).last(), Some(85));
    }

    #[test]
    fn after_a_silence_the_next_reading_counts_as_it_is() {
        let mut smoothed = SmoothedLoad::first(load(90, 30), Moment(0));
        smoothed.add(load(5, 0), Moment(30_000), TEN_SECONDS, &[]);
        assert_eq!(smoothed.counted(), load(5, 0));
        smoothed.add(load(90, 30), Moment(30_000), Millis(0), &[]);
        assert_eq!(smoothed.counted(), load(90, 30), "nothing is smoothed");
        smoothed.add(load(5, 0), Moment(1000), TEN_SECONDS, &[]);
        assert_eq!(
            smoothed.counted(),
            load(90, 30),
            "one from before changes nothing"
        );
    }

    #[test]
    fn an_idle_engine_comes_to_nothing() {
        let readings = [(4, 1)].into_iter().chain(std::iter::repeat_n((0, 0), 400));
        assert_eq!(counted(readings), (0, 0));
    }

    proptest! {
        /// Whatever is read, in whatever intervals: what is counted is within what was read, and a reading that stays is arrived
        /// at to within a step.
        #[test]
        fn what_is_counted_arrives_at_a_load_that_stays(
            readings in prop::collection::vec((0u8..=100, any::<u32>(), 0u64..100_000), 1..30),
            constant in prop_oneof![Just(0), Just(10_000), any::<u64>()],
            kv in 0u8..=100, queue in 0u32..1000,
        ) {
            let mut now = 0;
            let mut smoothed = SmoothedLoad::first(load(readings[0].0, readings[0].1), Moment(now));
            for (kv, queue, elapsed) in readings {
                now += elapsed;
                smoothed.add(load(kv, queue), Moment(now), Millis(constant), &[]);
                prop_assert!(smoothed.counted().kv_cache.is_some() && smoothed.counted().queue.is_some());
            }
            for _ in 0..400 {
                now += 3_600_000;
                smoothed.add(load(kv, queue), Moment(now), Millis(constant.min(600_000)), &[]);
            }
            let counted = smoothed.counted();
            let (up, down) = KV_STEP;
            let reached = counted.kv_cache.unwrap().get();
            prop_assert!(reached < kv + down && kv < reached + up, "{reached} for {kv}");
            let reached = counted.queue.unwrap();
            prop_assert!(reached < queue + 2 + reached / 4 && queue < reached + 1 + reached / 4, "{reached} for {queue}");
        }
    }
}
