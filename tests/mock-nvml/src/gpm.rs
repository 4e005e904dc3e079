//! The exported functions of GPM: samples, and what was between two of them.

use crate::abi::{
    ARGUMENT_VERSION_MISMATCH, GPM_DRAM_BANDWIDTH, GPM_SM, GPM_VERSION, GpmMetric,
    GpmMetricsHeader, GpmSupport, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, SUCCESS, code, put,
};
use crate::world::{said, world};

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmQueryDeviceSupport(device: Handle, support: *mut GpmSupport) -> u32 {
    let world = world();
    // SAFETY: a caller gives a struct with its version filled in; null is refused by `as_mut`.
    let asked = unsafe { support.as_mut() }.ok_or(INVALID_ARGUMENT);
    code(asked.and_then(|support| {
        check_version(support.version)?;
        let gpu = world.gpu(device, "nvmlGpmQueryDeviceSupport")?;
        support.is_supported = u32::from(gpu.gpm.is_some());
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleAlloc(sample: *mut Handle) -> u32 {
    let mut world = world();
    let allocated = world.script().map(drop).map(|()| world.new_sample());
    code(allocated.and_then(|allocated| put(sample, allocated)))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleFree(sample: Handle) -> u32 {
    code(world().free_sample(sample))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmSampleGet(device: Handle, sample: Handle) -> u32 {
    let mut world = world();
    let gpu = world.gpu(device, "nvmlGpmSampleGet");
    let supported = gpu.and_then(|gpu| said(gpu.gpm.as_ref()).map(drop));
    code(supported.and_then(|()| world.fill_sample(sample, device)))
}

/// The script's figures, whenever the samples were taken.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlGpmMetricsGet(request: *mut GpmMetricsHeader) -> u32 {
    // SAFETY: a caller gives a struct with its head filled in; null is refused by `as_ref`.
    let Some(head) = (unsafe { request.as_ref() }) else {
        return INVALID_ARGUMENT;
    };
    let (count, samples) = (head.count as usize, [head.before, head.after]);
    let world = world();
    let figures = check_version(head.version).and_then(|()| {
        let [before, after] = samples.map(|sample| world.sampled(sample));
        let (before, after) = (before?, after?);
        let gpu = world.gpu(after, "nvmlGpmMetricsGet")?;
        match before == after {
            true => said(gpu.gpm.as_ref()),
            false => Err(INVALID_ARGUMENT),
        }
    });
    code(figures.map(|[sm, bandwidth]| {
        // SAFETY: the caller says that `count` metrics follow the head.
        let metrics =
            unsafe { std::slice::from_raw_parts_mut(request.add(1).cast::<GpmMetric>(), count) };
        for metric in metrics {
            let figure = match metric.metric {
                GPM_SM => sm.parse().ok(),
                GPM_DRAM_BANDWIDTH => bandwidth.parse().ok(),
                _ => None,
            };
            metric.answer = figure.map_or(NOT_SUPPORTED, |_| SUCCESS);
            metric.value = figure.unwrap_or_default();
        }
    }))
}

fn check_version(version: u32) -> Result<(), u32> {
    match version {
        GPM_VERSION => Ok(()),
        _ => Err(ARGUMENT_VERSION_MISMATCH),
    }
}
