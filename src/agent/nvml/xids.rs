//! Reads the driver's error events (XIDs) on a thread of its own, because waiting for them blocks.
//!
//! [`super::health`] decides what an event means for a GPU.

use super::health::{self, GpuFaults};
use nvml_wrapper::Nvml as Library;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::struct_wrappers::event::EventData;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::Duration;
use stowage_scheduling::ids::GpuUuid;

/// Duration of one wait: how long the thread, and with it the library, may outlive its watch.
const EVENT_WAIT_MS: u32 = 250;
/// Pause after an error other than a timeout: a wait that fails at once must not become a busy loop.
const ERROR_PAUSE: Duration = Duration::from_secs(1);

/// Reads events until it is dropped, and at most one wait longer.
#[derive(Debug)]
pub(crate) struct XidWatch {
    /// Dropped with the watch, which the thread notices.
    _alive: Sender<()>,
}

impl XidWatch {
    /// `None` if the library has no events, or no thread can be started: then only the GPUs' own state is known.
    pub fn start(library: Arc<Library>, indices: Vec<u32>, faults: GpuFaults) -> Option<Self> {
        let functions = library.lib();
        // Dropping a set would panic because the second symbol is missing.
        if functions.nvmlEventSetCreate.is_err() || functions.nvmlEventSetFree.is_err() {
            return None;
        }
        let (alive, ended) = channel();
        let read = move || read_events(&library, indices, &faults, &ended);
        let thread = std::thread::Builder::new()
            .name("nvml-events".into())
            .spawn(read);
        thread.ok().map(|_| Self { _alive: alive })
    }
}

fn read_events(library: &Library, indices: Vec<u32>, faults: &GpuFaults, ended: &Receiver<()>) {
    let Some(set) = event_set_for(library, indices) else {
        return;
    };
    while ended.try_recv() == Err(TryRecvError::Empty) {
        match set.wait(EVENT_WAIT_MS) {
            Ok(event) => record_event(&event, faults),
            Err(NvmlError::Timeout) => {}
            Err(error) => {
                tracing::debug!(%error, "waiting for NVML's events failed");
                if ended.recv_timeout(ERROR_PAUSE) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
            }
        }
    }
}

/// A set with all GPUs that can be registered. A failed registration invalidates the whole set, so it begins again without that
/// GPU.
fn event_set_for(library: &Library, mut indices: Vec<u32>) -> Option<EventSet<'_>> {
    while !indices.is_empty() {
        let set = library.create_event_set().ok()?;
        match indices.iter().try_fold(set, |set, index| {
            register(library, *index, set).ok_or(*index)
        }) {
            Ok(set) => return Some(set),
            Err(failed) => indices.retain(|index| *index != failed),
        }
    }
    None
}

fn register<'a>(library: &'a Library, index: u32, set: EventSet<'a>) -> Option<EventSet<'a>> {
    let device = library.device_by_index(index).ok()?;
    device
        .register_events(EventTypes::CRITICAL_XID_ERROR, set)
        .ok()
}

fn record_event(event: &EventData<'_>, faults: &GpuFaults) {
    let xid = match event.event_data {
        Some(XidError::Value(xid)) => xid,
        Some(XidError::Unknown) | None => return,
    };
    // A GPU that is gone may not even return its name; its own reading reports that it is gone.
    let Some(gpu) = event
        .device
        .uuid()
        .ok()
        .and_then(|uuid| GpuUuid::parse(&uuid).ok())
    else {
        return;
    };
    tracing::warn!(%gpu, xid, what = health::xid_name(xid), "the driver reports an error of a GPU");
    if let Some(fault) = health::fault_from_xid(xid) {
        faults.record(gpu, fault);
    }
}
