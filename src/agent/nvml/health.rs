//! Health of a GPU: which driver error codes, memory errors and pending resets make it draining or lost.
//!
//! Classification only; events are read in [`super::xids`]. The GPU's own state is read each time, so it ends when the GPU has
//! been reset. An event's state lasts until NVML is opened again, because nothing reports its end.

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{
    NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_report::GpuReport;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::vocabulary::health::Health;

/// Why a GPU is not healthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuFault {
    pub health: Health,
    pub reason: String,
}

/// The worst event of each GPU since NVML was opened. Shared with the thread that reads events.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpuFaults(Arc<Mutex<BTreeMap<GpuUuid, GpuFault>>>);

impl GpuFault {
    pub fn draining(reason: impl Into<String>) -> Self {
        Self {
            health: Health::Draining,
            reason: reason.into(),
        }
    }

    pub fn lost(reason: impl Into<String>) -> Self {
        Self {
            health: Health::Lost,
            reason: reason.into(),
        }
    }

    /// What a call's error says about the GPU, if anything.
    pub(crate) fn from_error(error: &NvmlError) -> Option<Self> {
        is_gone(error).then(|| Self::lost(error.to_string()))
    }

    /// Writes it into the report, unless the report has something as bad already.
    pub fn mark(&self, report: &mut GpuReport) {
        if self.health > report.health {
            report.health = self.health;
            report.health_reason = Some(self.reason.clone());
        }
    }
}

impl GpuFaults {
    pub fn get(&self, gpu: &GpuUuid) -> Option<GpuFault> {
        self.0.lock().get(gpu).cloned()
    }

    pub fn record(&self, gpu: GpuUuid, fault: GpuFault) {
        let mut faults = self.0.lock();
        let worst = faults.entry(gpu).or_insert_with(|| fault.clone());
        if fault.health > worst.health {
            *worst = fault;
        }
    }
}

/// Answers to a call for a GPU's memory, processes or slices that say nothing against it: the driver or the GPU has no such
/// figure. The list is the short one. Any other error may be the first sign of a dead GPU, which often answers "unknown error".
pub fn is_harmless(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)
    )
}

/// The documented errors after which no work can continue on this GPU.
pub fn is_gone(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::GpuLost
            | NvmlError::ResetRequired
            | NvmlError::IrqIssue
            | NvmlError::InsufficientPower
    )
}

/// The fault of a GPU in MIG mode without slices: it runs nothing itself.
pub(crate) fn fault_without_slices() -> GpuFault {
    GpuFault::draining(
        "MIG mode is on and it has no slices; create some with nvidia-smi mig, or turn the mode off",
    )
}

/// Faults of the GPU's memory: ECC errors, row remapping, retired pages. None if it has no counters.
pub fn read_faults(device: &Device<'_>) -> Result<Vec<GpuFault>, NvmlError> {
    let mut faults = Vec::new();
    match device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile) {
        Err(error) if is_gone(&error) => return Err(error),
        Ok(count @ 1..) => {
            faults.push(GpuFault::draining(format!(
                "{count} uncorrectable ECC errors; reset it when it is idle"
            )));
        }
        _ => {}
    }
    if is_field_set(device, NVML_FI_DEV_REMAPPED_FAILURE) {
        faults.push(GpuFault::lost(
            "a row of its memory could not be remapped; have it replaced",
        ));
    }
    if is_field_set(device, NVML_FI_DEV_REMAPPED_PENDING) {
        faults.push(GpuFault::draining(
            "rows of its memory wait to be remapped; reset it when it is idle",
        ));
    }
    if device.are_pages_pending_retired().unwrap_or(false) {
        faults.push(GpuFault::draining(
            "pages of its memory wait to be retired; reset it when it is idle",
        ));
    }
    Ok(faults)
}

fn is_field_set(device: &Device<'_>, id: u32) -> bool {
    let values = device.field_values_for(&[FieldId(id)]).unwrap_or_default();
    let value = values
        .into_iter()
        .next()
        .and_then(Result::ok)
        .and_then(|sample| sample.value.ok());
    matches!(value, Some(SampleValue::U32(1..) | SampleValue::U64(1..)))
}

/// The effect of an XID on its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum XidEffect {
    /// A program caused it, and only that program ends.
    EndsProgram,
    /// Informational: its subject is reported elsewhere.
    Informational,
    /// Running work may continue; the GPU needs a reset or an inspection.
    DrainsGpu,
    /// No work on it can be expected to continue.
    LosesGpu,
}

/// From NVIDIA's catalog of XID errors. Programs' own errors are those that NVIDIA's device plugin ignores, and related ones;
/// unlisted ones drain, as the plugin takes a GPU out for them.
const XIDS: [(u64, XidEffect, &str); 30] = [
    (8, XidEffect::EndsProgram, "the GPU stopped processing"),
    (13, XidEffect::EndsProgram, "graphics engine exception"),
    (31, XidEffect::EndsProgram, "memory page fault"),
    (32, XidEffect::EndsProgram, "corrupted push buffer"),
    (43, XidEffect::EndsProgram, "the GPU stopped processing"),
    (
        45,
        XidEffect::EndsProgram,
        "clean-up after an earlier error",
    ),
    (48, XidEffect::DrainsGpu, "double-bit ECC error"),
    (
        61,
        XidEffect::DrainsGpu,
        "warning of the internal microcontroller",
    ),
    (
        62,
        XidEffect::LosesGpu,
        "the internal microcontroller halted",
    ),
    // A pending reset is read from the GPU itself, and ends with the reset.
    (
        63,
        XidEffect::Informational,
        "a memory row is to be remapped, or a page retired",
    ),
    (
        64,
        XidEffect::DrainsGpu,
        "a memory row could not be remapped, or a page not retired",
    ),
    (65, XidEffect::EndsProgram, "video processor exception"),
    (68, XidEffect::EndsProgram, "video processor exception"),
    (69, XidEffect::EndsProgram, "graphics engine class error"),
    // Programs on one GPU do not use NVLink: they may continue.
    (74, XidEffect::DrainsGpu, "NVLink error"),
    (79, XidEffect::LosesGpu, "the GPU has fallen off the bus"),
    (92, XidEffect::DrainsGpu, "many single-bit ECC errors"),
    (
        93,
        XidEffect::Informational,
        "the InfoROM is being written too often",
    ),
    // Only the program that hit it ends; the row is reported as one to be remapped.
    (94, XidEffect::Informational, "contained ECC error"),
    (95, XidEffect::LosesGpu, "uncontained ECC error"),
    (109, XidEffect::EndsProgram, "context switch timeout"),
    (110, XidEffect::LosesGpu, "security fault"),
    (
        119,
        XidEffect::LosesGpu,
        "the GPU system processor does not answer",
    ),
    (120, XidEffect::LosesGpu, "the GPU system processor failed"),
    (
        121,
        XidEffect::Informational,
        "corrected error of the link to the CPU",
    ),
    (
        137,
        XidEffect::EndsProgram,
        "a program reached for another's memory over NVLink",
    ),
    (140, XidEffect::LosesGpu, "unrecovered ECC error"),
    (
        141,
        XidEffect::EndsProgram,
        "a program's fabric memory failed",
    ),
    (143, XidEffect::LosesGpu, "the GPU could not be initialized"),
    // Follows the causing error, which has its own entry.
    (
        154,
        XidEffect::Informational,
        "what is needed to recover has changed",
    ),
];

/// The name of an XID, for logs.
pub(crate) fn xid_name(xid: u64) -> &'static str {
    xid_entry(xid).map_or("not in the table", |(_, _, name)| name)
}

/// The effect of an XID on its GPU's health, if any.
pub(crate) fn fault_from_xid(xid: u64) -> Option<GpuFault> {
    let (meaning, name) = (
        xid_entry(xid).map_or(XidEffect::DrainsGpu, |(_, meaning, _)| *meaning),
        xid_name(xid),
    );
    match meaning {
        XidEffect::EndsProgram | XidEffect::Informational => None,
        XidEffect::DrainsGpu => Some(GpuFault::draining(format!(
            "XID {xid}: {name}; once it has been seen to, restart the agent"
        ))),
        XidEffect::LosesGpu => Some(GpuFault::lost(format!(
            "XID {xid}: {name}; once it has been reset, restart the agent"
        ))),
    }
}

fn xid_entry(xid: u64) -> Option<&'static (u64, XidEffect, &'static str)> {
    XIDS.iter().find(|(listed, ..)| *listed == xid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health_after(xid: u64) -> Health {
        fault_from_xid(xid).map_or(Health::Healthy, |fault| fault.health)
    }

    #[test]
    fn a_fault_of_a_program_does_not_take_its_gpu_out() {
        for xid in [13, 31, 43, 45, 68, 109, 63, 94] {
            assert_eq!(health_after(xid), Health::Healthy, "XID {xid}");
        }
    }

    #[test]
    fn faults_of_the_gpu_drain_it_or_lose_it() {
        for xid in [48, 64, 74, 92, 4711] {
            assert_eq!(health_after(xid), Health::Draining, "XID {xid}");
        }
        for xid in [79, 95, 119, 120] {
            assert_eq!(health_after(xid), Health::Lost, "XID {xid}");
        }
    }

    #[test]
    fn each_xid_is_listed_once() {
        assert!(XIDS.is_sorted_by(|one, next| one.0 < next.0));
    }

    #[test]
    fn the_worst_fault_of_a_gpu_stays() {
        let (faults, gpu) = (GpuFaults::default(), GpuUuid::parse("GPU-a").unwrap());
        faults.record(gpu.clone(), GpuFault::draining("first"));
        faults.record(gpu.clone(), GpuFault::lost("second"));
        faults.record(gpu.clone(), GpuFault::draining("third"));
        assert_eq!(faults.get(&gpu), Some(GpuFault::lost("second")));
    }
}
