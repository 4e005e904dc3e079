//! The exported functions that are about one GPU or MIG slice.

use crate::abi::{
    ARGUMENT_VERSION_MISMATCH, FIELD_REMAP_FAILURE, FIELD_REMAP_PENDING, FieldValue, Handle,
    INSUFFICIENT_SIZE, INVALID_ARGUMENT, MEMORY_VERSION, NO_INSTANCE, NOT_AVAILABLE, NOT_SUPPORTED,
    NvmlMemory, P2P_NOT_SUPPORTED, P2P_NVLINK, P2P_OK, Pci, ProcessEntry, SUCCESS, Utilization,
    VALUE_UNSIGNED_INT, code, put, put_text,
};
use crate::script::{GpuProcess, ScriptedGpu};
use crate::world::{HandleTarget, place_of, said, world};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUUID(device: Handle, text: *mut c_char, length: c_uint) -> u32 {
    code(
        world()
            .target(device, "nvmlDeviceGetUUID")
            .and_then(|target| match target {
                HandleTarget::Gpu(gpu) => put_text(text, length, &gpu.uuid),
                HandleTarget::Slice { slice, .. } => put_text(text, length, &slice.uuid),
            }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetName(device: Handle, text: *mut c_char, length: c_uint) -> u32 {
    code(
        world()
            .target(device, "nvmlDeviceGetName")
            .and_then(|target| match target {
                HandleTarget::Gpu(gpu) => put_text(text, length, &gpu.name),
                HandleTarget::Slice { slice, .. } => put_text(text, length, &slice.name),
            }),
    )
}

/// The numbers in it are not scripted: the agent reads the bus id.
const NO_PCI: Pci = Pci {
    bus_id_legacy: [0; 16],
    domain: 0,
    bus: 0,
    device: 0,
    pci_device_id: 0,
    pci_sub_system_id: 0,
    bus_id: [0; 32],
};

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: *mut Pci) -> u32 {
    code(
        world()
            .gpu(device, "nvmlDeviceGetPciInfo_v3")
            .and_then(|gpu| {
                let mut bus_id = [0; 32];
                for (to, from) in bus_id.iter_mut().take(31).zip(gpu.pci_bus_id.bytes()) {
                    *to = from as c_char;
                }
                put(pci, Pci { bus_id, ..NO_PCI })
            }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut NvmlMemory) -> u32 {
    // SAFETY: a caller gives a struct with its version filled in; null is refused by `as_ref`.
    let version = unsafe { memory.as_ref() }.map(|memory| memory.version);
    code(
        world()
            .target(device, "nvmlDeviceGetMemoryInfo_v2")
            .and_then(|target| {
                let (total, reserved, used) = match target {
                    HandleTarget::Gpu(gpu) => (gpu.total, gpu.reserved, gpu.used),
                    HandleTarget::Slice { slice, .. } => (slice.total, slice.reserved, slice.used),
                };
                let free = total.saturating_sub(reserved).saturating_sub(used);
                match version {
                    Some(MEMORY_VERSION) => put(
                        memory,
                        NvmlMemory {
                            version: MEMORY_VERSION,
                            total,
                            reserved,
                            free,
                            used,
                        },
                    ),
                    Some(_) => Err(ARGUMENT_VERSION_MISMATCH),
                    None => Err(INVALID_ARGUMENT),
                }
            }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetUtilizationRates(device: Handle, rates: *mut Utilization) -> u32 {
    let gpu = world()
        .gpu(device, "nvmlDeviceGetUtilizationRates")
        .map(|gpu| gpu.utilization);
    code(gpu.and_then(|gpu| put(rates, Utilization { gpu, memory: 0 })))
}

/// `NVML_TEMPERATURE_GPU`, the only sensor that there is.
const GPU_SENSOR: u32 = 0;

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTemperature(device: Handle, sensor: u32, celsius: *mut u32) -> u32 {
    let gpu = world()
        .gpu(device, "nvmlDeviceGetTemperature")
        .map(|gpu| gpu.temperature);
    code(gpu.and_then(|now| {
        if sensor == GPU_SENSOR {
            put(celsius, now)
        } else {
            Err(INVALID_ARGUMENT)
        }
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: *mut u32) -> u32 {
    let gpu = world()
        .gpu(device, "nvmlDeviceGetPowerUsage")
        .map(|gpu| gpu.power_milliwatts);
    code(gpu.and_then(|now| put(milliwatts, now)))
}

/// Which of the three lists of processes is asked for.
#[derive(Clone, Copy)]
enum ProcessList {
    Compute,
    Mps,
    Graphics,
}

impl ProcessList {
    fn has(self, process: &GpuProcess) -> bool {
        match self {
            Self::Compute => !process.mps && (!process.graphics || process.both),
            Self::Mps => process.mps,
            Self::Graphics => process.graphics,
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    entries: *mut ProcessEntry,
) -> u32 {
    code(list(
        device,
        "nvmlDeviceGetComputeRunningProcesses_v3",
        ProcessList::Compute,
        count,
        entries,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    entries: *mut ProcessEntry,
) -> u32 {
    code(list(
        device,
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ProcessList::Mps,
        count,
        entries,
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    entries: *mut ProcessEntry,
) -> u32 {
    code(list(
        device,
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        ProcessList::Graphics,
        count,
        entries,
    ))
}

/// NVML's protocol: `count` is the capacity of the caller's array and is set to the number of entries; too small an array is an
/// error that returns the number to the caller.
fn list(
    device: Handle,
    function: &str,
    list: ProcessList,
    count: *mut c_uint,
    entries: *mut ProcessEntry,
) -> Result<(), u32> {
    let world = world();
    let (processes, instance) = match world.target(device, function)? {
        HandleTarget::Gpu(gpu) => (&gpu.processes, NO_INSTANCE),
        HandleTarget::Slice { slice, place, .. } => {
            (&slice.processes, slice.gpu_instance.unwrap_or(place))
        }
    };
    let found: Vec<&GpuProcess> = processes
        .iter()
        .filter(|process| list.has(process))
        .collect();
    // SAFETY: a caller passes its array's capacity; null is refused by `as_ref`.
    let room = *unsafe { count.as_ref() }.ok_or(INVALID_ARGUMENT)? as usize;
    put(count, found.len() as c_uint)?;
    if room < found.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, process) in found.iter().enumerate() {
        // SAFETY: the caller says that its array has more than `at` entries; a null pointer is refused by `put`.
        put(unsafe { entries.add(at) }, entry(process, instance))?;
    }
    Ok(())
}

fn entry(process: &GpuProcess, gpu_instance: c_uint) -> ProcessEntry {
    let used = process.used.unwrap_or(NOT_AVAILABLE);
    ProcessEntry {
        pid: process.pid,
        used,
        gpu_instance,
        compute_instance: NO_INSTANCE,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMinorNumber(device: Handle, minor: *mut c_uint) -> u32 {
    let (world, function) = (world(), "nvmlDeviceGetMinorNumber");
    let number = world
        .gpu(device, function)
        .map(|gpu| gpu.minor.unwrap_or(place_of(device)));
    code(number.and_then(|number| put(minor, number)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetComputeMode(device: Handle, mode: *mut c_uint) -> u32 {
    let scripted = world()
        .gpu(device, "nvmlDeviceGetComputeMode")
        .map(|gpu| gpu.compute_mode);
    code(scripted.and_then(|scripted| put(mode, scripted)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigMode(
    device: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> u32 {
    let mode = world()
        .gpu(device, "nvmlDeviceGetMigMode")
        .map(|gpu| c_uint::from(gpu.mig_enabled));
    code(mode.and_then(|mode| put(current, mode).and_then(|()| put(pending, mode))))
}

/// What an H100 answers, however many slices it has.
const MOST_SLICES: c_uint = 7;

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: *mut c_uint) -> u32 {
    let known = world()
        .gpu(device, "nvmlDeviceGetMaxMigDeviceCount")
        .map(drop);
    code(known.and_then(|()| put(count, MOST_SLICES)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Handle,
    index: c_uint,
    slice: *mut Handle,
) -> u32 {
    let handle = world().open_slice(device, index, "nvmlDeviceGetMigDeviceHandleByIndex");
    code(handle.and_then(|handle| put(slice, handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    slice: Handle,
    device: *mut Handle,
) -> u32 {
    code(
        world()
            .target(slice, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
            .and_then(|target| match target {
                HandleTarget::Gpu(_) => Err(INVALID_ARGUMENT),
                HandleTarget::Slice { parent, .. } => put(device, parent),
            }),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetP2PStatus(
    one: Handle,
    other: Handle,
    index: c_uint,
    status: *mut c_uint,
) -> u32 {
    let function = "nvmlDeviceGetP2PStatus";
    let world = world();
    let linked = world.gpu(one, function).and_then(|one| {
        let other = world.gpu(other, function)?;
        Ok(index == P2P_NVLINK && one.nvlink.is_some() && one.nvlink == other.nvlink)
    });
    code(linked.and_then(|linked| put(status, if linked { P2P_OK } else { P2P_NOT_SUPPORTED })))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: Handle,
    _error_type: c_uint,
    _counter: c_uint,
    count: *mut c_ulonglong,
) -> u32 {
    let errors = world()
        .gpu(device, "nvmlDeviceGetTotalEccErrors")
        .and_then(|gpu| said(gpu.ecc_errors));
    code(errors.and_then(|errors| put(count, errors)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(
    device: Handle,
    pending: *mut c_uint,
) -> u32 {
    let world = world();
    let answer = world.gpu(device, "nvmlDeviceGetRetiredPagesPendingStatus");
    code(
        answer
            .and_then(|gpu| said(gpu.retirement_pending))
            .and_then(|is| put(pending, is.into())),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetFieldValues(
    device: Handle,
    count: c_int,
    fields: *mut FieldValue,
) -> u32 {
    let world = world();
    code(
        world
            .gpu(device, "nvmlDeviceGetFieldValues")
            .and_then(|gpu| {
                let count = usize::try_from(count)
                    .ok()
                    .filter(|count| *count > 0)
                    .ok_or(INVALID_ARGUMENT)?;
                if fields.is_null() {
                    return Err(INVALID_ARGUMENT);
                }
                // SAFETY: the caller says that `count` structs lie there, and it is not null.
                let fields = unsafe { std::slice::from_raw_parts_mut(fields, count) };
                fields.iter_mut().for_each(|field| fill(field, gpu));
                Ok(())
            }),
    )
}

fn fill(field: &mut FieldValue, gpu: &ScriptedGpu) {
    let value = match field.field {
        FIELD_REMAP_PENDING => gpu.remap_pending,
        FIELD_REMAP_FAILURE => gpu.remap_failed,
        _ => None,
    };
    field.value_type = VALUE_UNSIGNED_INT;
    field.answer = if value.is_some() {
        SUCCESS
    } else {
        NOT_SUPPORTED
    };
    field.value = value.unwrap_or_default().into();
}
