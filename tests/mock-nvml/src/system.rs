//! The exported functions that are not about one GPU: start and stop, the list of GPUs, events.

use crate::abi::{
    EVENT_XID, Handle, INVALID_ARGUMENT, NO_INSTANCE, NOT_SUPPORTED, NvmlEvent, TIMEOUT, code, put,
    put_text,
};
use crate::world::{NvmlState, world};
use std::ffi::{c_char, c_uint, c_ulonglong};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// How often a wait reads the script: well below any wait that the agent asks for.
const POLL: Duration = Duration::from_millis(5);

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> u32 {
    code(world().start())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> u32 {
    code(world().start())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> u32 {
    code(world().stop())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> u32 {
    code(
        world()
            .script()
            .and_then(|script| put_text(version, length, &script.driver_version)),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> u32 {
    let world = when_it_no_longer_hangs();
    code(world.script().and_then(|script| match script.count_error {
        Some(error) => Err(error),
        None => put(count, script.gpus.len() as c_uint),
    }))
}

/// The state as it is now, once the script lets the caller continue. Other threads may call meanwhile.
fn when_it_no_longer_hangs() -> MutexGuard<'static, NvmlState> {
    loop {
        let mut world = world();
        world.refresh();
        if !world.script().is_ok_and(|script| script.hangs) {
            return world;
        }
        drop(world);
        std::thread::sleep(POLL);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> u32 {
    let handle = world().open(index as usize, "nvmlDeviceGetHandleByIndex_v2");
    code(handle.and_then(|handle| put(device, handle)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetCreate(set: *mut Handle) -> u32 {
    let mut world = world();
    let created = world.script().map(drop).map(|()| world.new_set());
    code(created.and_then(|created| put(set, created)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: Handle) -> u32 {
    code(world().free_set(set))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Handle, types: *mut c_ulonglong) -> u32 {
    let supported = world()
        .gpu(device, "nvmlDeviceGetSupportedEventTypes")
        .map(drop);
    code(supported.and_then(|()| put(types, EVENT_XID)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: Handle, types: c_ulonglong, set: Handle) -> u32 {
    let mut world = world();
    let known = world.gpu(device, "nvmlDeviceRegisterEvents").map(drop);
    code(known.and_then(|()| match types {
        0 => Err(INVALID_ARGUMENT),
        types if types & !EVENT_XID != 0 => Err(NOT_SUPPORTED),
        _ => world.register(set, device),
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetWait_v2(
    set: Handle,
    event: *mut NvmlEvent,
    timeout_ms: c_uint,
) -> u32 {
    let until = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        let mut world = world();
        world.refresh();
        match world.next_event(set) {
            Err(error) => return error,
            Ok(Some((device, xid))) => return code(put(event, xid_event(device, xid))),
            Ok(None) if Instant::now() >= until => return TIMEOUT,
            Ok(None) => {
                drop(world);
                std::thread::sleep(POLL);
            }
        }
    }
}

fn xid_event(device: Handle, xid: u64) -> NvmlEvent {
    NvmlEvent {
        device,
        kind: EVENT_XID,
        data: xid,
        gpu_instance: NO_INSTANCE,
        compute_instance: NO_INSTANCE,
    }
}
