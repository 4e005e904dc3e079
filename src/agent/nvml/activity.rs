//! Reads how busy GPUs are (NVML's GPM, on Hopper and newer): the share of time in which their SMs have work, and of their memory
//! bandwidth.
//!
//! Both are means over the time from one sample to the next. Samples borrow the library, so a thread holds them. It takes one of each
//! GPU when a session asks, which reads everything else meanwhile. What cannot be read is unknown, and makes no GPU unhealthy.

use super::gpu;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::{GpmSample, Nvml as Library};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::Percent;
use stowage_scheduling::vocabulary::node_reading::GpuActivity;

/// Samples of one GPU have to be a tenth of a second apart, and a driver needs some time for all GPUs.
const MIN_WINDOW: Duration = Duration::from_millis(200);
/// How long a session waits for figures once it has read all others, so that it stays within its part of the round.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(50);

pub(crate) type Activities = BTreeMap<GpuUuid, GpuActivity>;

/// Asks its thread, which ends once this is dropped.
#[derive(Debug)]
pub(crate) struct ActivityReader {
    /// When, and for how many GPUs. One may wait, so that a driver that hangs is not asked for all that was missed.
    requests: SyncSender<(Instant, u32)>,
    answers: Receiver<(Instant, Activities)>,
}

/// The samples that the next ones are compared with.
type Samples<'l> = BTreeMap<GpuUuid, GpmSample<'l>>;

impl ActivityReader {
    /// `None` if the library has no GPM, or no thread can be started.
    pub fn start(library: Arc<Library>) -> Option<Self> {
        let functions = library.lib();
        // Dropping a sample would panic because the second symbol is missing.
        if functions.nvmlGpmSampleAlloc.is_err() || functions.nvmlGpmSampleFree.is_err() {
            return None;
        }
        let (requests, requested) = sync_channel(1);
        let (answer, answers) = channel();
        let read = move || answer_requests(&library, &requested, &answer);
        let thread = std::thread::Builder::new()
            .name("nvml-activity".into())
            .spawn(read);
        thread.ok().map(|_| Self { requests, answers })
    }

    /// Asks for the first `count` GPUs. Answers to earlier questions came too late.
    pub fn ask(&self, now: Instant, count: u32) {
        self.answers.try_iter().for_each(drop);
        // If a question waits, this one has no answer.
        let _ = self.requests.try_send((now, count));
    }

    /// What was asked for at that time; nothing if it takes too long.
    pub fn answer(&self, asked_at: Instant) -> Activities {
        let answer = self.answers.recv_timeout(ANSWER_TIMEOUT).ok();
        answer
            .filter(|(of, _)| *of == asked_at)
            .map_or(Activities::new(), |(_, activities)| activities)
    }
}

fn answer_requests(
    library: &Library,
    requests: &Receiver<(Instant, u32)>,
    answers: &Sender<(Instant, Activities)>,
) {
    let (mut before, mut sampled_at) = (Samples::new(), None::<Instant>);
    for (asked_at, count) in requests {
        let mut activities = Activities::new();
        // A question may have waited.
        let now = Instant::now();
        if sampled_at.is_none_or(|sampled_at| now - sampled_at >= MIN_WINDOW) {
            let samples = samples(library, count);
            activities.extend(samples.iter().filter_map(|(gpu, sample)| {
                Some((gpu.clone(), activity(library, before.get(gpu)?, sample)?))
            }));
            (before, sampled_at) = (samples, Some(now));
        }
        if answers.send((asked_at, activities)).is_err() {
            return;
        }
    }
}

/// A sample of each GPU that gives one; none does before Hopper.
fn samples(library: &Library, count: u32) -> Samples<'_> {
    let sample = |index| {
        let device = library.device_by_index(index)?;
        match device.gpm_support()? {
            true => Ok((gpu::uuid(&device)?, device.gpm_sample()?)),
            false => Err(NvmlError::NotSupported),
        }
    };
    (0..count).flat_map(sample).collect()
}

/// How busy a GPU was between two samples.
fn activity<'l>(
    library: &'l Library,
    before: &GpmSample<'l>,
    after: &GpmSample<'l>,
) -> Option<GpuActivity> {
    let metrics = [GpmMetricId::SmUtil, GpmMetricId::DramBwUtil];
    let results = gpm_metrics_get(library, before, after, &metrics).ok()?;
    let mut percents = results
        .into_iter()
        .map(|result| Percent::from_share(result.ok()?.value / 100.0));
    GpuActivity::new(percents.next().flatten(), percents.next().flatten())
}
