//! What samples of a window say, folded while they are read: by hour of day (UTC) a histogram of fixed steps, and the exact peak. A
//! gap is a gap, and an impossible value is one.

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

/// Compute of a GPU, the better measure first.
pub const COMPUTE: [Quantity; 2] = [Quantity::Active, Quantity::Utilization];
/// From so many seconds of samples on a figure is believed.
pub const DAY_S: i64 = 86_400;
/// More buckets than any distribution here has: 1 TiB of VRAM.
const MAX_BUCKETS: f64 = 4096.0;
/// Seconds that can be; beyond, sums of them might not be.
const TIMES: std::ops::Range<i64> = 0..1 << 40;

impl Quantity {
    /// The step of a histogram: values within one count as the highest of them.
    fn step(self) -> f64 {
        match self {
            Self::Vram => 256.0,
            Self::Active | Self::KvUsage => 0.01,
            _ => 1.0,
        }
    }

    /// The most that it can be.
    pub fn most(self) -> f64 {
        match self {
            Self::Active | Self::KvUsage => 1.0,
            Self::Utilization => 100.0,
            // 16 TiB. Blank values of DCGM are beyond.
            Self::Vram => f64::from(1 << 24),
            _ => (1u64 << 40) as f64,
        }
    }
}

/// A quantity over the window.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    hours: [BTreeMap<u16, u32>; 24],
    pub peak: f64,
    /// Number of steps of the window at which there was a value.
    pub steps: i64,
    /// How often a counter rose.
    pub rises: u64,
    /// The GPUs or engines that had values.
    pub devices: BTreeSet<Arc<str>>,
}

impl Samples {
    /// The value that so many per cent of the samples do not exceed; of one hour of the day, or of all.
    pub fn quantile(&self, quantity: Quantity, percent: f64, hour: Option<usize>) -> Option<f64> {
        let mut all: BTreeMap<u16, u32> = BTreeMap::new();
        for hour in hour.map_or(0..24, |hour| hour..hour + 1) {
            for (bucket, count) in &self.hours[hour] {
                *all.entry(*bucket).or_default() += count;
            }
        }
        let rank = f64::from(all.values().sum::<u32>()) * percent / 100.0;
        let mut below = 0.0;
        let bucket = all.into_iter().find_map(|(bucket, count)| {
            below += f64::from(count);
            (below >= rank).then_some(bucket)
        })?;
        Some((f64::from(bucket) * quantity.step()).min(self.peak))
    }
}

/// What GPUs compute, whoever has them.
#[derive(Debug, Clone, Default)]
pub struct GpuSamples {
    /// By hour of day: samples at which a GPU computed nothing.
    pub idle: [u64; 24],
    /// UUIDs of the GPUs.
    pub gpus: BTreeSet<Arc<str>>,
}

/// All that was measured.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// By the index of the workload.
    pub workloads: BTreeMap<(usize, Quantity), Samples>,
    /// By how it is measured.
    pub gpus: BTreeMap<Quantity, GpuSamples>,
    /// First and last second of the window.
    pub window: Option<(i64, i64)>,
    /// Seconds from one sample to the next.
    pub step: Option<i64>,
    /// Samples that cannot be, and such that several series have.
    pub impossible: u64,
    pub duplicates: u64,
}

/// Samples of one GPU or engine.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub quantity: Quantity,
    /// The GPU's UUID, or the engine's pod.
    pub device: Arc<str>,
    /// The workload whose figure it is.
    pub workload: Option<usize>,
    /// Seconds and values.
    pub samples: Vec<(i64, f64)>,
}

/// By time: the highest value, and whose it is; `Err` if it is of several.
type Merged = BTreeMap<i64, (f64, Result<Option<usize>, ()>)>;

/// The series of one answer. Several of one device, as several exporters have them, become one.
#[derive(Debug, Default)]
pub struct Answer(BTreeMap<(Quantity, Arc<str>), Merged>);

impl Answer {
    pub fn add(&mut self, series: Series, usage: &mut Usage) {
        let (quantity, own) = (series.quantity, series.workload);
        let merged = self.0.entry((quantity, series.device)).or_default();
        for (time, value) in series.samples {
            if !(0.0..=quantity.most()).contains(&value) || !TIMES.contains(&time) {
                usage.impossible += 1;
                continue;
            }
            let Some((most, owner)) = merged.get_mut(&time) else {
                merged.insert(time, (value, Ok(own)));
                continue;
            };
            usage.duplicates += 1;
            *most = most.max(value);
            *owner = match (*owner, own) {
                (Ok(Some(one)), Some(other)) if one != other => Err(()),
                (Ok(None), own) => Ok(own),
                (before, _) => before,
            };
        }
    }

    pub fn fold(self, usage: &mut Usage) {
        let mut times: BTreeMap<(usize, Quantity), BTreeSet<i64>> = BTreeMap::new();
        for ((quantity, device), merged) in self.0 {
            let mut before: Option<(i64, f64)> = None;
            for (time, (value, owner)) in merged {
                let hour = (time.rem_euclid(DAY_S) / 3600) as usize;
                let (first, last) = usage.window.unwrap_or((time, time));
                usage.window = Some((first.min(time), last.max(time)));
                let distance = before.map(|(before, _)| time - before);
                usage.step = usage.step.into_iter().chain(distance).min();
                if let Ok(Some(workload)) = owner {
                    let samples = usage.workloads.entry((workload, quantity)).or_default();
                    let bucket = (value / quantity.step()).ceil().min(MAX_BUCKETS);
                    *samples.hours[hour].entry(bucket as u16).or_default() += 1;
                    samples.peak = samples.peak.max(value);
                    samples.devices.insert(device.clone());
                    samples.rises += u64::from(before.is_some_and(|before| value > before.1));
                    times.entry((workload, quantity)).or_default().insert(time);
                }
                if COMPUTE.contains(&quantity) {
                    let gpus = usage.gpus.entry(quantity).or_default();
                    gpus.gpus.insert(device.clone());
                    gpus.idle[hour] += u64::from(value < quantity.step());
                }
                before = Some((time, value));
            }
        }
        for (key, times) in times {
            usage.workloads.entry(key).or_default().steps += times.len() as i64;
        }
    }
}

impl Usage {
    /// What GPUs compute, by the measure that more of them have.
    pub fn gpu_samples(&self) -> Option<&GpuSamples> {
        self.gpus.values().max_by_key(|samples| samples.gpus.len())
    }

    /// Seconds of the window.
    pub fn window_s(&self) -> i64 {
        let length = self.window.map(|(first, last)| last - first);
        length.map_or(0, |length| length + self.step.unwrap_or(0))
    }

    /// Hours for which a GPU computes nothing at this hour of a day, all GPUs together; `None` if nobody measured a whole day.
    pub fn idle_gpu_hours(&self, hour: usize) -> Option<f64> {
        let samples = self.gpu_samples()?;
        let days = self.window_s() as f64 / DAY_S as f64;
        let idle_s = samples.idle[hour] as f64 * self.step.unwrap_or(0) as f64;
        (days >= 1.0).then_some(idle_s / 3600.0 / days)
    }

    /// Seconds of the window for which there are samples.
    pub fn covered_s(&self, samples: &Samples) -> i64 {
        (samples.steps * self.step.unwrap_or(0)).min(self.window_s())
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
            workload,
            samples: samples.collect(),
        }
    }

    fn folded(all: impl IntoIterator<Item = Series>) -> Usage {
        let (mut usage, mut answer) = (Usage::default(), Answer::default());
        all.into_iter().for_each(|one| answer.add(one, &mut usage));
        answer.fold(&mut usage);
        usage
    }

    #[test]
    fn quantiles_are_never_below_the_truth_and_the_peak_is_exact() {
        let values: Vec<f64> = (1..=100).map(|at| f64::from(at) * 10.5).collect();
        let usage = folded([series(Quantity::Vram, Some(0), &values)]);
        let vram = &usage.workloads[&(0, Quantity::Vram)];
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
        assert_eq!((gpus.gpus.len(), gpus.idle[0]), (1, 1));
        assert_eq!(usage.workloads[&(0, Quantity::Utilization)].steps, 2);
        assert!(usage.duplicates > 0);
    }

    #[test]
    fn gpus_without_a_sample_are_not_taken_for_idle() {
        let mut some = series(Quantity::Utilization, None, &[0.0; 48]);
        some.samples.retain(|(time, _)| time / 3600 % 24 == 3);
        let busy = [50.0; 48];
        let mut other = series(Quantity::Utilization, None, &busy);
        other.device = "GPU-2".into();
        let usage = folded([some, other]);
        let hours = [2, 3].map(|hour| usage.idle_gpu_hours(hour).unwrap());
        assert_eq!(hours, [0.0, 1.0]);
        let short = folded([series(Quantity::Utilization, None, &[0.0; 23])]);
        assert_eq!(short.idle_gpu_hours(0), None);
    }

    #[test]
    fn a_figure_of_two_workloads_is_of_neither() {
        let of = |workload| series(Quantity::Vram, Some(workload), &[100.0]);
        assert!(folded([of(0), of(1)]).workloads.is_empty());
    }

    #[test]
    fn impossible_values_and_gaps_are_no_samples() {
        let values = [f64::NAN, -1.0, 1.2, 9.2e18, 0.5];
        let mut kv = series(Quantity::KvUsage, Some(0), &values);
        kv.samples.extend([(i64::MAX, 0.5), (-1, 0.5)]);
        let usage = folded([kv]);
        assert_eq!(
            (
                usage.impossible,
                usage.workloads[&(0, Quantity::KvUsage)].steps
            ),
            (6, 1)
        );
        let vram = folded([series(Quantity::Vram, Some(0), &[1e14])]);
        assert_eq!((vram.impossible, vram.workloads.len()), (1, 0));
    }

    #[test]
    fn a_counter_that_starts_again_has_not_risen() {
        let preempts = |values: &[f64]| {
            folded([series(Quantity::Preemptions, Some(0), values)]).workloads
                [&(0, Quantity::Preemptions)]
                .rises
                > 0
        };
        assert!(!preempts(&[7.0, 7.0, 0.0, 0.0]) && preempts(&[7.0, 0.0, 1.0]));
    }
}
