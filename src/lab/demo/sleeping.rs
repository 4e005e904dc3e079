//! How the demo's engines sleep: annotations that the stand-in engines and the simulated GPUs obey. No real node knows them.

use super::api_server::ApiServer;
use super::change_tracker::GpuView;
use super::vram;
use serde_json::{Value, json};

/// The engine of a pod that has it sleeps, as vLLM does at level 1.
pub const ASLEEP: &str = "demo.stowage.dev/asleep";

/// The engine failed to wake and starts again: its page says that it is awake, and it has no memory yet.
pub(crate) const STARTS_AGAIN: &str = "demo.stowage.dev/starts-again";

/// Bytes of each GPU that an engine keeps while it sleeps: its CUDA context, and what it cannot free.
pub const SLEEPING_VRAM_BYTES: u64 = 2 << 30;

pub(super) fn is_asleep(pod: &Value) -> bool {
    pod["metadata"]["annotations"][ASLEEP].is_string()
}

/// Whether the engine's metrics page says that it sleeps.
pub(super) fn reports_asleep(pod: &Value) -> bool {
    is_asleep(pod) && !pod["metadata"]["annotations"][STARTS_AGAIN].is_string()
}

/// Wakes the engine of a pod as vLLM wakes: it allocates all that it was granted at once, and fails where others have it.
pub(super) fn try_wake(api: &ApiServer, engine: &str, gpus: &[GpuView]) -> bool {
    let fits = vram::lacking(api, gpus, engine, |granted| granted) == Some(0);
    let awake = json!({"metadata": {"annotations": {ASLEEP: null}}});
    fits && api.patch(&format!("pods/default/{engine}"), &awake).is_ok()
}
