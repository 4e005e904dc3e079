//! One session of NVML's library, and samples of all GPUs through it.
//!
//! Ends with the first error that concerns NVML as a whole. [`super::gpu`] reads one GPU; the parent decides when to open
//! again.

use super::activity::ActivityReader;
use super::gpu::{self, GpuReader};
use super::health::{GpuFault, GpuFaults};
use super::xids::XidWatch;
use super::{Failures, GpuHistory, GpuSensors, LastReports, NvmlOptions, NvmlProblem, islands};
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml as Library};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use stowage_report::{GpuReport, MissingPart, ReportPart};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::Moment;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::health::AnswerAges;

#[derive(Debug)]
pub(crate) struct Session {
    library: Arc<Library>,
    faults: GpuFaults,
    watch: Option<XidWatch>,
    activity: Option<ActivityReader>,
    placements: BTreeMap<GpuUuid, GpuPlacement>,
}

/// Where a GPU is attached: does not change while the node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GpuPlacement {
    index: u32,
    numa_node: Option<u32>,
    island: Option<u32>,
}

pub fn open(options: &NvmlOptions) -> Result<Session, NvmlProblem> {
    let library = options
        .library
        .as_deref()
        .unwrap_or(Path::new(super::DRIVER_LIBRARY));
    let opened = Library::builder().lib_path(library.as_os_str()).init();
    let library = opened.map_err(|cause| NvmlProblem::from_error(cause, options))?;
    if library.lib().nvmlShutdown.is_err() {
        // Dropping it would panic because this symbol is missing.
        std::mem::forget(library);
        return Err(NvmlProblem::NotNvml {
            library: options.library_name(),
            symbol: "nvmlShutdown".into(),
        });
    }
    let library = Arc::new(library);
    Ok(Session {
        activity: ActivityReader::start(Arc::clone(&library)),
        library,
        faults: GpuFaults::default(),
        watch: None,
        placements: BTreeMap::new(),
    })
}

impl Session {
    /// All GPUs, and what could not be read. An error means that NVML must be opened again.
    pub fn sample(
        &mut self,
        options: &NvmlOptions,
        history: &mut GpuHistory,
        now: Moment,
    ) -> Result<(Vec<GpuReport>, GpuSensors, Vec<MissingPart>), NvmlError> {
        let library = Arc::clone(&self.library);
        let count = library.device_count()?;
        let asked_at = Instant::now();
        self.activity
            .iter()
            .for_each(|activity| activity.ask(asked_at, count));
        let GpuHistory {
            last_reports: last, ..
        } = history;
        let (mut missing, mut failures) = (Vec::new(), Failures::new());
        let mut read: BTreeMap<u32, Vec<GpuReport>> = BTreeMap::new();
        let mut failed = Vec::new();
        let mut devices = Vec::new();
        for index in 0..count {
            let before = last.get(&index).map_or(&[][..], Vec::as_slice);
            let mut reader = GpuReader {
                options,
                before,
                missing: &mut missing,
                failures: &mut failures,
            };
            let device = library.device_by_index(index);
            match device
                .and_then(|device| reader.read(&device, index).map(|reports| (device, reports)))
            {
                Ok((device, reports)) => {
                    devices.extend(reports.first().map(|gpu| (gpu.uuid.clone(), index, device)));
                    read.insert(index, reports);
                }
                Err(error) if is_driver_wide(&error) => return Err(error),
                Err(error) => failed.push((index, error)),
            }
        }
        let sensors = devices
            .iter()
            .map(|(uuid, _, device)| (uuid.clone(), gpu::sensors(device)))
            .collect();
        self.update_placements(&devices, &options.sys);
        drop_duplicate_uuids(&mut read, &mut missing);
        let mut reports = self.complete_reports(read, last);
        let mut kept = substitute_failed(failed, &reports, last, &mut missing, &mut failures);
        kept.iter_mut().for_each(|report| self.mark(report));
        reports.extend(kept);
        reports.sort_by_key(|gpu| gpu.index);
        last.retain(|index, _| *index < count);
        history.record_answers(&mut reports, &failures, now);
        let activity = self.activity.as_ref();
        let mut activities = activity.map_or(BTreeMap::new(), |reader| reader.answer(asked_at));
        for report in &mut reports {
            report.activity = activities.remove(&report.uuid);
        }
        Ok((reports, sensors, missing))
    }

    /// Reads links and NUMA nodes again if there is a new GPU, and watches for its errors.
    fn update_placements(&mut self, devices: &[(GpuUuid, u32, Device<'_>)], sys: &Path) {
        let is_known = |(uuid, index, _): &(GpuUuid, u32, Device<'_>)| {
            self.placements
                .get(uuid)
                .is_some_and(|placement| placement.index == *index)
        };
        if devices.iter().all(is_known) {
            return;
        }
        let islands = islands::nvlink_islands(devices.len(), |one, other| {
            are_linked(&devices[one].2, &devices[other].2)
        });
        for ((uuid, index, device), island) in devices.iter().zip(islands) {
            let numa_node = gpu::numa_node(device, sys);
            self.placements.insert(
                uuid.clone(),
                GpuPlacement {
                    index: *index,
                    numa_node,
                    island,
                },
            );
        }
        let indices = devices.iter().map(|(_, index, _)| *index).collect();
        // The old watch ends first, or each event would be read by only one of them.
        self.watch = None;
        self.watch = XidWatch::start(Arc::clone(&self.library), indices, self.faults.clone());
    }

    /// The reports, completed with what is known of the GPUs from before; stores them.
    fn complete_reports(
        &self,
        read: BTreeMap<u32, Vec<GpuReport>>,
        last: &mut LastReports,
    ) -> Vec<GpuReport> {
        let mut all = Vec::new();
        for (index, mut reports) in read {
            let Some(uuid) = reports.first().map(|gpu| gpu.uuid.clone()) else {
                continue;
            };
            let placement = self.placements.get(&uuid);
            for report in &mut reports {
                report.numa_node = placement.and_then(|placement| placement.numa_node);
                report.nvlink_island = placement
                    .and_then(|placement| placement.island)
                    .filter(|_| report.parent.is_none());
                self.mark(report);
            }
            last.insert(index, reports.clone());
            all.extend(reports);
        }
        all
    }

    /// A slice has the faults of the GPU it is cut from.
    fn mark(&self, report: &mut GpuReport) {
        let fault = self
            .faults
            .get(report.parent.as_ref().unwrap_or(&report.uuid));
        fault.iter().for_each(|fault| fault.mark(report));
    }
}

impl GpuHistory {
    /// Records how NVML has answered for each GPU and slice, and writes it into the reports.
    fn record_answers(&mut self, reports: &mut [GpuReport], failures: &Failures, now: Moment) {
        let mut answers = std::mem::take(&mut self.answers);
        for report in reports {
            let failure = failures.get(&report.uuid);
            let state = answers
                .remove(&report.uuid)
                .unwrap_or_default()
                .next(failure.is_none(), now);
            let AnswerAges { failing, recovered } = state.ages(now);
            (report.failing_millis, report.recovered_millis) = (failing, recovered);
            if let Some(reason) = failure {
                GpuFault::draining(reason).mark(report);
            }
            self.answers.insert(report.uuid.clone(), state);
        }
    }
}

fn are_linked(one: &Device<'_>, other: &Device<'_>) -> bool {
    one.p2p_status(other, P2pCapabilitiesIndex::NvLink)
        .is_ok_and(|status| status == P2pStatus::Ok)
}

/// Errors of the driver rather than of one GPU.
fn is_driver_wide(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch
    )
}

/// Drops GPUs whose UUID has appeared before: one that appears twice would have the whole report rejected.
fn drop_duplicate_uuids(read: &mut BTreeMap<u32, Vec<GpuReport>>, missing: &mut Vec<MissingPart>) {
    let mut uuids = BTreeSet::new();
    for (index, reports) in read.iter_mut() {
        reports.retain(|gpu| {
            let is_new = uuids.insert(gpu.uuid.clone());
            if !is_new {
                let reason = format!(
                    "{} appears twice; the one at index {index} is left out",
                    gpu.uuid
                );
                missing.push(MissingPart {
                    part: ReportPart::Gpus,
                    reason,
                });
            }
            is_new
        });
    }
}

/// GPUs that could not be read, with their last reading.
fn substitute_failed(
    failed: Vec<(u32, NvmlError)>,
    reports: &[GpuReport],
    last: &LastReports,
    missing: &mut Vec<MissingPart>,
    failures: &mut Failures,
) -> Vec<GpuReport> {
    let reported: BTreeSet<&GpuUuid> = reports.iter().map(|gpu| &gpu.uuid).collect();
    let mut all = Vec::new();
    for (index, error) in failed {
        let before = last.get(&index).map_or(&[][..], Vec::as_slice);
        let kept = before.iter().filter(|gpu| !reported.contains(&gpu.uuid));
        let kept: Vec<GpuReport> = kept.map(|gpu| substitute(gpu, &error)).collect();
        failures.extend(kept.iter().map(|gpu| {
            (
                gpu.uuid.clone(),
                format!("NVML does not answer for it: {error}"),
            )
        }));
        let name = kept
            .first()
            .map_or("it was never read, so it is left out".into(), |gpu| {
                gpu.uuid.to_string()
            });
        missing.push(MissingPart {
            part: ReportPart::Gpus,
            reason: format!("GPU {index} ({name}): {error}"),
        });
        all.extend(kept);
    }
    all
}

fn substitute(before: &GpuReport, error: &NvmlError) -> GpuReport {
    let mut report = gpu::without_figures(before);
    if let Some(fault) = GpuFault::from_error(error) {
        report.health = Health::Healthy;
        fault.mark(&mut report);
    }
    report
}
