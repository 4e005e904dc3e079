//! Reads one GPU and its MIG slices through NVML.
//!
//! Each figure may fail alone: it is then left out, and reported if an operator can do something about it. A GPU must say which it
//! is, its size and its processes: unless an error there is known to be harmless, the GPU is failing. Only an error that says
//! the GPU itself is gone ends the reading.

use super::compute_instance;
use super::health;
use super::{Failures, NvmlOptions};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{ComputeMode as Mode, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use std::collections::BTreeMap;
use std::path::Path;
use stowage_report::{
    DeviceNumbers, GpuReport, MissingPart, PciAddress, ProcessReport, ReportPart,
};
use stowage_scheduling::ids::{GpuModel, GpuUuid};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::health::{ComputeMode, Health};
use stowage_telemetry::agent::SensorReading;

/// Reads one GPU.
pub(crate) struct GpuReader<'a> {
    pub options: &'a NvmlOptions,
    /// The GPU and its slices as they were last read.
    pub before: &'a [GpuReport],
    pub missing: &'a mut Vec<MissingPart>,
    pub failures: &'a mut Failures,
}

/// Total, the driver's reserve, and what is allocated beyond it.
struct GpuMemory {
    total: Bytes,
    reserved: Bytes,
    used: Option<Bytes>,
    /// Total and reserve are those of the last report.
    is_remembered: bool,
}

/// The slices of a GPU in MIG mode.
enum Slices {
    /// It is not in MIG mode.
    NotPartitioned,
    Partitioned(Vec<GpuReport>),
}

impl GpuReader<'_> {
    /// The GPU, then its slices; none if its size is unknown. An error means that the GPU cannot be read at all.
    pub fn read(&mut self, device: &Device<'_>, index: u32) -> Result<Vec<GpuReport>, NvmlError> {
        let uuid = uuid(device)?;
        let memory = self.read_memory(device, &uuid, self.options.gpu_memory)?;
        let slices = self.read_slices(device, &uuid, index)?;
        let Some(memory) = memory else {
            return Ok(Vec::new());
        };
        let mut gpu = self.build_report(device, uuid, index, memory)?;
        let mut cut = match slices {
            Slices::NotPartitioned => {
                self.read_processes(device, &mut gpu)?;
                Vec::new()
            }
            Slices::Partitioned(cut) => {
                // In MIG mode all processes run on slices, and are listed there.
                gpu.processes = Some(Vec::new());
                if cut.is_empty() {
                    health::fault_without_slices().mark(&mut gpu);
                }
                cut
            }
        };
        gpu.compute_mode = compute_mode(device, self.options.mps)?;
        for slice in &mut cut {
            (slice.numbers.minor, slice.compute_mode) = (gpu.numbers.minor, gpu.compute_mode);
        }
        let compute_mode_fault = gpu
            .compute_mode
            .and_then(ComputeMode::fault)
            .map(health::GpuFault::draining);
        for fault in health::read_faults(device)?
            .into_iter()
            .chain(compute_mode_fault)
        {
            std::iter::once(&mut gpu)
                .chain(&mut cut)
                .for_each(|report| fault.mark(report));
        }
        cut.insert(0, gpu);
        Ok(cut)
    }

    fn read_slices(
        &mut self,
        device: &Device<'_>,
        parent: &GpuUuid,
        index: u32,
    ) -> Result<Slices, NvmlError> {
        let max_count = match device.mig_mode().and_then(|mode| match mode.current {
            0 => Ok(None),
            _ => device.mig_device_count().map(Some),
        }) {
            Ok(Some(most)) => most,
            Ok(None) => return Ok(Slices::NotPartitioned),
            Err(error) if health::is_gone(&error) => return Err(error),
            Err(error) => return Ok(self.slices_before(parent, &error)),
        };
        let (mut slices, mut failed) = (Vec::new(), None);
        for mig_index in 0..max_count {
            let slice = match device.mig_device_by_index(mig_index) {
                // The count is the GPU's maximum: some places may be empty.
                Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
                slice => slice,
            };
            match slice.and_then(|slice| self.read_slice(&slice, parent, index, mig_index)) {
                Ok(slice) => slices.extend(slice),
                Err(error) if health::is_gone(&error) => return Err(error),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            self.keep_slices(&mut slices, parent, &error);
        }
        Ok(Slices::Partitioned(slices))
    }

    /// A GPU that was partitioned and does not answer now stays partitioned; one that never was has no MIG.
    fn slices_before(&mut self, parent: &GpuUuid, error: &NvmlError) -> Slices {
        let mut kept = Vec::new();
        if !health::is_harmless(error) {
            self.failures.insert(
                parent.clone(),
                format!("NVML does not say whether it has slices: {error}"),
            );
            self.keep_slices(&mut kept, parent, error);
        }
        if kept.is_empty() {
            Slices::NotPartitioned
        } else {
            Slices::Partitioned(kept)
        }
    }

    /// Adds the slices that were there and are not in `cut`: they cannot be read now.
    fn keep_slices(&mut self, cut: &mut Vec<GpuReport>, parent: &GpuUuid, error: &NvmlError) {
        let reason = format!("slices of {parent}: {error}");
        for slice in self
            .before
            .iter()
            .filter(|gpu| gpu.parent.as_ref() == Some(parent))
        {
            if cut.iter().all(|read| read.uuid != slice.uuid) {
                self.failures.insert(slice.uuid.clone(), reason.clone());
                cut.push(without_figures(slice));
            }
        }
        self.record_missing(ReportPart::Gpus, reason);
    }

    fn read_slice(
        &mut self,
        slice: &Device<'_>,
        parent: &GpuUuid,
        index: u32,
        mig_index: u32,
    ) -> Result<Option<GpuReport>, NvmlError> {
        let uuid = uuid(slice)?;
        let Some(memory) = self.read_memory(slice, &uuid, None)? else {
            return Ok(None);
        };
        let is_shared_already = memory.is_remembered;
        let mut report = self.build_report(slice, uuid, index, memory)?;
        report.parent = Some(parent.clone());
        report.numbers.mig_index = Some(mig_index);
        self.read_processes(slice, &mut report)?;
        if report.model == unknown_model() {
            // Its name alone shows which part of its memory is its own.
            self.record_failure(
                &report.uuid,
                format!("slice {} of {parent} has no name", report.uuid),
            );
        } else if !is_shared_already {
            compute_instance::share_memory(&mut report);
        }
        Ok(Some(report))
    }

    /// Builds the report of a GPU or slice, without health and processes.
    fn build_report(
        &mut self,
        device: &Device<'_>,
        uuid: GpuUuid,
        index: u32,
        memory: GpuMemory,
    ) -> Result<GpuReport, NvmlError> {
        let utilization = unless_gone(device.utilization_rates())?;
        let name = unless_gone(device.name())?.map(|name| model_from_name(&name));
        let before = self
            .before
            .iter()
            .find(|gpu| gpu.uuid == uuid)
            .map(|gpu| gpu.model.clone());
        Ok(GpuReport {
            uuid,
            index,
            model: name.or(before).unwrap_or_else(unknown_model),
            parent: None,
            total_bytes: memory.total,
            reserved_bytes: memory.reserved,
            used_bytes: memory.used,
            utilization_percent: utilization.map(|rates| rates.gpu.min(100) as u8),
            activity: None,
            health: Health::Healthy,
            health_reason: None,
            failing_millis: None,
            recovered_millis: None,
            numa_node: None,
            compute_mode: None,
            nvlink_island: None,
            processes: None,
            cgroups: Vec::new(),
            numbers: DeviceNumbers {
                minor: device.minor_number().ok(),
                pci: device
                    .pci_info()
                    .ok()
                    .and_then(|pci| PciAddress::parse(&pci.bus_id)),
                ..DeviceNumbers::default()
            },
        })
    }

    /// The memory as read; else the configured size; else the last one. Without any of them the GPU cannot be reported.
    fn read_memory(
        &mut self,
        device: &Device<'_>,
        uuid: &GpuUuid,
        configured: Option<Bytes>,
    ) -> Result<Option<GpuMemory>, NvmlError> {
        let (reason, is_harmless) = match device.memory_info() {
            Ok(info) if info.total > 0 => {
                return Ok(Some(plausible_memory(info.total, info.reserved, info.used)));
            }
            Ok(_) => ("it says 0 bytes".into(), true),
            Err(error) if health::is_gone(&error) => return Err(error),
            Err(error) => (error.to_string(), health::is_harmless(&error)),
        };
        let reason = format!(
            "the memory of {uuid}: {reason}; if it never says, give its size with --gpu-memory"
        );
        if configured.is_none() || !is_harmless {
            self.record_failure(uuid, reason);
        }
        let before = self.before.iter().find(|gpu| gpu.uuid == *uuid);
        let size = configured.map(|total| (total, Bytes::ZERO));
        let size = size.or_else(|| before.map(|gpu| (gpu.total_bytes, gpu.reserved_bytes)));
        Ok(size.map(|(total, reserved)| GpuMemory {
            total,
            reserved,
            used: None,
            is_remembered: true,
        }))
    }

    fn read_processes(
        &mut self,
        device: &Device<'_>,
        report: &mut GpuReport,
    ) -> Result<(), NvmlError> {
        match processes(device) {
            Ok((processes, gpu_instance)) => {
                (report.processes, report.numbers.gpu_instance) = (Some(processes), gpu_instance);
            }
            Err(error) if health::is_gone(&error) => return Err(error),
            Err(error) => {
                let reason = format!("the processes of {}: {error}", report.uuid);
                // An agent may not be allowed to see them, and many may start while they are listed.
                let is_harmless = health::is_harmless(&error)
                    || matches!(
                        error,
                        NvmlError::NoPermission | NvmlError::InsufficientSize(_)
                    );
                if !is_harmless {
                    self.failures.insert(report.uuid.clone(), reason.clone());
                }
                self.record_missing(ReportPart::Processes, reason);
            }
        }
        Ok(())
    }

    /// A part that the GPU must have cannot be read, for a reason that is not known to be harmless.
    fn record_failure(&mut self, uuid: &GpuUuid, reason: String) {
        self.failures.insert(uuid.clone(), reason.clone());
        self.record_missing(ReportPart::Gpus, reason);
    }

    fn record_missing(&mut self, part: ReportPart, reason: String) {
        self.missing.push(MissingPart { part, reason });
    }
}

/// The GPU's last reading, without the figures that change from one sample to the next.
pub(crate) fn without_figures(before: &GpuReport) -> GpuReport {
    GpuReport {
        used_bytes: None,
        utilization_percent: None,
        processes: None,
        ..before.clone()
    }
}

/// What a GPU's sensors say. A driver that does not know one of them leaves it out; zero would be a reading.
pub fn sensors(device: &Device<'_>) -> SensorReading {
    SensorReading {
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        power_milliwatts: device.power_usage().ok(),
    }
}

/// The NUMA node of the CPUs next to the GPU. NVML's own call for it answers only where a GPU is itself a NUMA node.
pub fn numa_node(device: &Device<'_>, sys: &Path) -> Option<u32> {
    let bus_id = device.pci_info().ok()?.bus_id.to_ascii_lowercase();
    // NVML writes the domain with eight digits, the kernel with four.
    let address = bus_id.get(bus_id.len().checked_sub("0000:00:00.0".len())?..)?;
    let file = sys.join("bus/pci/devices").join(address).join("numa_node");
    // A machine without NUMA says -1.
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

pub(crate) fn uuid(device: &Device<'_>) -> Result<GpuUuid, NvmlError> {
    // A GPU with an invalid UUID cannot be reported, and cannot be distinguished from others.
    GpuUuid::parse(&device.uuid()?).map_err(|_| NvmlError::Unknown)
}

/// How many processes may use it; `None` if it has no such mode. The one process of an MPS daemon is of all its clients.
fn compute_mode(device: &Device<'_>, mps: bool) -> Result<Option<ComputeMode>, NvmlError> {
    match device.compute_mode() {
        Ok(Mode::Default) => Ok(Some(ComputeMode::Default)),
        Ok(Mode::ExclusiveProcess) if mps => Ok(Some(ComputeMode::Default)),
        // The thread mode of old drivers also has one process at most.
        Ok(Mode::ExclusiveProcess | Mode::ExclusiveThread) => {
            Ok(Some(ComputeMode::ExclusiveProcess))
        }
        Ok(Mode::Prohibited) => Ok(Some(ComputeMode::Prohibited)),
        Err(error) if health::is_gone(&error) => Err(error),
        Err(error) if health::is_harmless(&error) => Ok(None),
        Err(_) => Ok(Some(ComputeMode::Unknown)),
    }
}

/// A product name as labels have it, with `-` for spaces.
fn model_from_name(name: &str) -> GpuModel {
    let words: Vec<&str> = name
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect();
    GpuModel::parse(&words.join("-")).unwrap_or_else(|_| unknown_model())
}

fn unknown_model() -> GpuModel {
    GpuModel::parse("unknown").expect("a word is a name")
}

/// Figures that contradict the total are left out: one of them would have the whole report rejected.
fn plausible_memory(total: u64, reserved: u64, used: u64) -> GpuMemory {
    GpuMemory {
        total: Bytes(total),
        reserved: Bytes(if reserved <= total { reserved } else { 0 }),
        used: Some(Bytes(used)).filter(|used| used.0 <= total),
        is_remembered: false,
    }
}

/// All processes with memory on the device, once each: a process may be in several of the driver's lists. Also the GPU instance in
/// which they run.
fn processes(device: &Device<'_>) -> Result<(Vec<ProcessReport>, Option<u32>), NvmlError> {
    let mut found: BTreeMap<u32, Option<Bytes>> = BTreeMap::new();
    let mut gpu_instance = None;
    let compute = device.running_compute_processes()?;
    let mps = empty_if_unsupported(retry_if_short(|| device.mps_running_compute_processes()))?;
    let graphics = empty_if_unsupported(device.running_graphics_processes())?;
    for process in compute.into_iter().chain(mps).chain(graphics) {
        let used = process_memory(&process);
        found
            .entry(process.pid)
            .and_modify(|largest| *largest = used.max(*largest))
            .or_insert(used);
        gpu_instance = gpu_instance.or(process.gpu_instance_id);
    }
    let process = |(pid, used_bytes)| ProcessReport {
        pid,
        used_bytes,
        pod: None,
        container: None,
    };
    Ok((found.into_iter().map(process).collect(), gpu_instance))
}

fn process_memory(process: &ProcessInfo) -> Option<Bytes> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(Bytes(bytes)),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Older drivers and some GPUs have no such list.
fn empty_if_unsupported(
    list: Result<Vec<ProcessInfo>, NvmlError>,
) -> Result<Vec<ProcessInfo>, NvmlError> {
    match list {
        Err(error) if health::is_harmless(&error) => Ok(Vec::new()),
        list => list,
    }
}

/// A process that starts between the count and the list leaves too little space for the list.
fn retry_if_short<T>(call: impl Fn() -> Result<T, NvmlError>) -> Result<T, NvmlError> {
    match call() {
        Err(NvmlError::InsufficientSize(_)) => call(),
        answer => answer,
    }
}

/// A figure that may be missing, except because the GPU is gone.
fn unless_gone<T>(figure: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match figure {
        Err(error) if health::is_gone(&error) => Err(error),
        figure => Ok(figure.ok()),
    }
}
