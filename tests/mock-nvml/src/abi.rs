//! NVML's C interface as far as it is mocked: return codes and structs, laid out as NVIDIA documents them.
//!
//! Written down here rather than taken from the crate under test, so that the two check each other.

use std::ffi::{c_char, c_longlong, c_uint, c_ulonglong};

pub const SUCCESS: u32 = 0;
pub const UNINITIALIZED: u32 = 1;
pub const INVALID_ARGUMENT: u32 = 2;
pub const NOT_SUPPORTED: u32 = 3;
pub const NO_PERMISSION: u32 = 4;
pub const NOT_FOUND: u32 = 6;
pub const INSUFFICIENT_SIZE: u32 = 7;
pub const DRIVER_NOT_LOADED: u32 = 9;
pub const TIMEOUT: u32 = 10;
pub const FUNCTION_NOT_FOUND: u32 = 13;
pub const GPU_IS_LOST: u32 = 15;
pub const RESET_REQUIRED: u32 = 16;
pub const LIB_RM_VERSION_MISMATCH: u32 = 18;
pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
pub const UNKNOWN: u32 = 999;

/// `NVML_VALUE_NOT_AVAILABLE`, as the memory of a process.
pub const NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;
/// The instance of a process outside MIG.
pub const NO_INSTANCE: c_uint = c_uint::MAX;
/// `nvmlEventTypeXidCriticalError`.
pub const EVENT_XID: c_ulonglong = 8;
/// `NVML_P2P_CAPS_INDEX_NVLINK`.
pub const P2P_NVLINK: c_uint = 2;
pub const P2P_OK: c_uint = 0;
pub const P2P_NOT_SUPPORTED: c_uint = 5;
/// `NVML_FI_DEV_REMAPPED_PENDING` and `_FAILURE`.
pub const FIELD_REMAP_PENDING: c_uint = 144;
pub const FIELD_REMAP_FAILURE: c_uint = 145;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
pub const VALUE_UNSIGNED_INT: c_uint = 1;

/// `NVML_GPM_METRIC_SM_UTIL` and `_DRAM_BW_UTIL`.
pub const GPM_SM: c_uint = 2;
pub const GPM_DRAM_BANDWIDTH: c_uint = 10;
/// `NVML_GPM_SUPPORT_VERSION` and `NVML_GPM_METRICS_GET_VERSION`.
pub const GPM_VERSION: c_uint = 1;

/// A device, event set or sample: opaque to callers, and here never a pointer to anything.
pub type Handle = usize;

#[repr(C)]
pub struct NvmlMemory {
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

/// `NVML_STRUCT_VERSION(Memory, 2)`.
pub const MEMORY_VERSION: c_uint = size_of::<NvmlMemory>() as c_uint | 2 << 24;

#[repr(C)]
pub struct ProcessEntry {
    pub pid: c_uint,
    pub used: c_ulonglong,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

#[repr(C)]
pub struct Utilization {
    pub gpu: c_uint,
    pub memory: c_uint,
}

#[repr(C)]
pub struct Pci {
    pub bus_id_legacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_sub_system_id: c_uint,
    pub bus_id: [c_char; 32],
}

#[repr(C)]
pub struct FieldValue {
    pub field: c_uint,
    pub scope: c_uint,
    pub timestamp: c_longlong,
    pub latency: c_longlong,
    pub value_type: c_uint,
    pub answer: c_uint,
    /// A union of eight bytes; an unsigned int lies in its first four.
    pub value: c_ulonglong,
}

#[repr(C)]
pub struct NvmlEvent {
    pub device: Handle,
    pub kind: c_ulonglong,
    pub data: c_ulonglong,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

#[repr(C)]
pub struct GpmSupport {
    pub version: c_uint,
    pub is_supported: c_uint,
}

/// What is asked of two samples; `count` metrics follow it.
#[repr(C)]
pub struct GpmMetricsHeader {
    pub version: c_uint,
    pub count: c_uint,
    pub before: Handle,
    pub after: Handle,
}

#[repr(C)]
pub struct GpmMetric {
    pub metric: c_uint,
    pub answer: c_uint,
    /// In percent, of those that are shares.
    pub value: f64,
    /// Two names and a unit; null here.
    pub names: [*const c_char; 3],
}

/// Writes `value` where a caller asked for it.
pub fn put<T>(place: *mut T, value: T) -> Result<(), u32> {
    if place.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller of NVML gives a place for a value of this type; it is not null.
    unsafe { place.write(value) };
    Ok(())
}

/// Writes `text` and its final zero into a buffer of `room` bytes.
pub fn put_text(place: *mut c_char, room: c_uint, text: &str) -> Result<(), u32> {
    if place.is_null() || text.contains('\0') {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= room as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        // SAFETY: the caller says that `room` bytes lie there, and there are no more than that.
        unsafe { place.add(at).write(byte as c_char) };
    }
    Ok(())
}

/// A result as the code that C callers get.
pub fn code(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(SUCCESS)
}
