//! What samples of a window say, folded while they are read: by hour of day a histogram of fixed steps, and the exact peak. A gap is
//! a gap, and an impossible value is one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a sample measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// MiB in use on one GPU.
    Vram,
    /// Per cent of the time for which any kernel runs on a GPU.
    Utilization,
    /// The share of the time for which a GPU's engine computes, 0 to 1.
    Active,
    /// 0 to 1.
    KvUsage,
    Waiting,
    Running,
    /// Tokens that the KV cache holds.
    KvTokens,
    /// A counter that only rises, but for restarts.
    Preemptions,
}

/// More buckets than any distribution here has: 1 TiB of VRAM.
const MAX_BUCKETS: f64 = 4096.0;

impl Quantity {
    /// The step of a histogram: values within one are not told apart, and count as the highest of them.
    fn step(self) -> f64 {
        match self {
            Self::Vram => 256.0,
            Self::Active | Self::KvUsage => 0.01,
            _ => 1.0,
        }
    }

    fn most(self) -> f64 {
        match self {
            Self::Active | Self::KvUsage => 1.0,
            Self::Utilization => 100.0,
            Self::Vram => f64::from(1 << 23),
            // Blank values of DCGM are beyond.
            _ => (1u64 << 50) as f64,
        }
    }

    pub fn is_of_gpus(self) -> bool {
        self <= Self::Active
    }
}

/// A quantity over the window.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    hours: [BTreeMap<u16, u32>; 24],
    pub peak: f64,
    /// Number of steps of the window at which there was a value.
    pub steps: u64,
    /// How often a counter rose.
    rises: u64,
}

impl Samples {
    fn add(&mut self, quantity: Quantity, hour: usize, value: f64) {
        let bucket = (value / quantity.step()).ceil().min(MAX_BUCKETS) as u16;
        *self.hours[hour].entry(bucket).or_default() += 1;
        self.peak = self.peak.max(value);
    }

    /// The value that so many per cent of the samples do not exceed; of one hour of the day, or of all.
    pub fn quantile(&self, quantity: Quantity, percent: f64, hour: Option<usize>) -> Option<f64> {
        let hours = self.hours.iter().enumerate();
        let mut all: BTreeMap<u16, u64> = BTreeMap::new();
        for (_, buckets) in hours.filter(|(at, _)| hour.is_none_or(|hour| hour == *at)) {
            for (bucket, count) in buckets {
                *all.entry(*bucket).or_default() += u64::from(*count);
            }
        }
        let total: u64 = all.values().sum();
        let rank = (total as f64 * percent / 100.0).ceil().max(1.0);
        let mut below = 0;
        let bucket = all.into_iter().find_map(|(bucket, count)| {
            below += count;
            (below as f64 >= rank).then_some(bucket)
        })?;
        Some((f64::from(bucket) * quantity.step()).min(self.peak))
    }
}

/// One hour of the day, over all GPUs and days.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IdleSamples {
    /// Samples at which a GPU computed nothing.
    pub idle: u64,
    pub all: u64,
}

#[derive(Debug, Clone, Default)]
pub struct GpuSamples {
    pub hours: [IdleSamples; 24],
    /// UUIDs of GPUs with a figure.
    pub gpus: BTreeSet<Arc<str>>,
}

/// All that was measured.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// By the index of the workload.
    pub workloads: BTreeMap<(usize, Quantity), Samples>,
    /// What GPUs compute, by how it is measured.
    pub gpus: BTreeMap<Quantity, GpuSamples>,
    /// First and last second of the window, where it is not the samples' own.
    pub window: Option<(i64, i64)>,
    seen: Option<(i64, i64)>,
    /// Seconds from one sample to the next.
    pub step: Option<i64>,
    /// Samples that cannot be, and such that several series have.
    pub impossible: u64,
    pub duplicates: u64,
}

/// Samples of one GPU, slice or engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub quantity: Quantity,
    /// The GPU's UUID, or the engine's pod.
    pub device: Arc<str>,
    /// A slice has no figure of its GPU.
    pub is_slice: bool,
    /// The workload whose figure it is.
    pub workload: Option<usize>,
    /// Seconds and values.
    pub samples: Vec<(i64, f64)>,
}

/// By time: the highest value, and whose it is; `Err` if it is of several.
type Merged = BTreeMap<i64, (f64, Result<Option<usize>, ()>)>;

/// The series of one answer. Several of one device, as several exporters have them, become one.
#[derive(Debug, Default)]
pub struct Answer(BTreeMap<(Quantity, bool, Arc<str>), Merged>);

impl Answer {
    pub fn add(&mut self, series: Series, usage: &mut Usage) {
        let Series {
            quantity, workload, ..
        } = series;
        let key = (quantity, series.is_slice, series.device);
        let merged = self.0.entry(key).or_default();
        for (time, value) in series.samples {
            if !(0.0..=quantity.most()).contains(&value) {
                usage.impossible += 1;
                continue;
            }
            let owner = workload;
            let entry = merged.entry(time).or_insert((value, Ok(None)));
            usage.duplicates += u64::from(entry.1 != Ok(None));
            entry.0 = entry.0.max(value);
            entry.1 = match (entry.1, owner) {
                (Ok(Some(one)), Some(other)) if one != other => Err(()),
                (Ok(None), owner) => Ok(owner),
                (before, _) => before,
            };
        }
    }

    /// Folds the answer in. `hour_of` is the hour of day of a second.
    pub fn fold(self, usage: &mut Usage, hour_of: impl Fn(i64) -> usize) {
        let mut steps: BTreeMap<(usize, Quantity), BTreeSet<i64>> = BTreeMap::new();
        for ((quantity, is_slice, device), merged) in self.0 {
            let mut before: Option<(i64, f64)> = None;
            for (time, (value, owner)) in merged {
                let hour = hour_of(time) % 24;
                let (first, last) = usage.seen.unwrap_or((time, time));
                usage.seen = Some((first.min(time), last.max(time)));
                let distance = before.map(|(before, _)| time - before);
                usage.step = usage.step.into_iter().chain(distance).min();
                if let Ok(Some(workload)) = owner {
                    let samples = usage.workloads.entry((workload, quantity)).or_default();
                    samples.add(quantity, hour, value);
                    samples.rises += u64::from(before.is_some_and(|(_, before)| value > before));
                    steps.entry((workload, quantity)).or_default().insert(time);
                }
                if matches!(quantity, Quantity::Utilization | Quantity::Active) && !is_slice {
                    let gpus = usage.gpus.entry(quantity).or_default();
                    gpus.gpus.insert(device.clone());
                    gpus.hours[hour].all += 1;
                    gpus.hours[hour].idle += u64::from(value < quantity.step());
                }
                before = Some((time, value));
            }
        }
        for (key, times) in steps {
            usage.workloads.entry(key).or_default().steps += times.len() as u64;
        }
    }
}

impl Usage {
    pub fn of(&self, workload: usize, quantity: Quantity) -> Option<&Samples> {
        self.workloads.get(&(workload, quantity))
    }

    /// What the workload computes, by the better of two measures.
    pub fn compute(&self, workload: usize) -> Option<(Quantity, &Samples)> {
        let measures = [Quantity::Active, Quantity::Utilization];
        measures
            .into_iter()
            .find_map(|quantity| Some((quantity, self.of(workload, quantity)?)))
    }

    /// What GPUs compute, by the measure that more of them have.
    pub fn gpu_samples(&self) -> Option<&GpuSamples> {
        self.gpus.values().max_by_key(|samples| samples.gpus.len())
    }

    /// Whether the engine interrupted requests for lack of KV cache.
    pub fn preempts(&self, workload: usize) -> bool {
        self.of(workload, Quantity::Preemptions)
            .is_some_and(|samples| samples.rises > 0)
    }

    /// Seconds of the window.
    pub fn window_s(&self) -> i64 {
        let step = self.step.unwrap_or(0);
        let (first, last) = self.window.or(self.seen).unwrap_or((0, -step));
        last - first + step
    }

    /// Seconds of the window for which there are samples.
    pub fn covered_s(&self, samples: &Samples) -> i64 {
        (samples.steps as i64 * self.step.unwrap_or(0)).min(self.window_s())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(quantity: Quantity, workload: Option<usize>, values: &[f64]) -> Series {
        let samples = (0..).map(|at| at * 3600).zip(values.iter().copied());
        Series {
            quantity,
            device: "GPU-1".into(),
            is_slice: false,
            workload,
            samples: samples.collect(),
        }
    }

    fn folded(all: impl IntoIterator<Item = Series>) -> Usage {
        let (mut usage, mut answer) = (Usage::default(), Answer::default());
        all.into_iter().for_each(|one| answer.add(one, &mut usage));
        answer.fold(&mut usage, |second| (second / 3600) as usize);
        usage
    }

    #[test]
    fn quantiles_are_never_below_the_truth_and_the_peak_is_exact() {
        let values: Vec<f64> = (1..=100).map(|at| f64::from(at) * 10.5).collect();
        let usage = folded([series(Quantity::Vram, Some(0), &values)]);
        let vram = usage.of(0, Quantity::Vram).unwrap();
        assert_eq!(vram.peak, 1050.0);
        assert_eq!(vram.quantile(Quantity::Vram, 50.0, None), Some(768.0));
        assert_eq!(vram.quantile(Quantity::Vram, 100.0, None), Some(1050.0));
        assert_eq!(vram.quantile(Quantity::Vram, 50.0, Some(23)), Some(512.0));
        assert_eq!(usage.covered_s(vram), 360_000);
    }

    #[test]
    fn three_exporters_of_one_gpu_are_one() {
        let one = || series(Quantity::Utilization, Some(0), &[0.0, 40.0]);
        let usage = folded([
            one(),
            one(),
            series(Quantity::Utilization, None, &[0.0, 40.0]),
        ]);
        let gpus = usage.gpu_samples().unwrap();
        assert_eq!(
            (gpus.gpus.len(), gpus.hours[0].all, gpus.hours[0].idle),
            (1, 1, 1)
        );
        assert_eq!(usage.of(0, Quantity::Utilization).unwrap().steps, 2);
        assert!(usage.duplicates > 0);
    }

    #[test]
    fn a_figure_of_two_workloads_is_of_neither() {
        let of = |workload| series(Quantity::Vram, Some(workload), &[100.0]);
        assert!(folded([of(0), of(1)]).workloads.is_empty());
    }

    #[test]
    fn impossible_values_and_gaps_are_no_samples() {
        let values = [f64::NAN, -1.0, 1.2, 9.2e18, 0.5];
        let usage = folded([series(Quantity::KvUsage, Some(0), &values)]);
        assert_eq!(
            (
                usage.impossible,
                usage.of(0, Quantity::KvUsage).unwrap().steps
            ),
            (4, 1)
        );
    }

    #[test]
    fn a_counter_that_starts_again_has_not_risen() {
        let preempts =
            |values: &[f64]| folded([series(Quantity::Preemptions, Some(0), values)]).preempts(0);
        assert!(!preempts(&[7.0, 7.0, 0.0, 0.0]) && preempts(&[7.0, 0.0, 1.0]));
    }
}
