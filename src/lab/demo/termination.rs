//! How slowly a pod of the demo terminates: annotations that the stand-in kubelets and the simulated GPUs obey. No real node
//! knows them. Slow victims are what races are made of.

use serde_json::Value;
use std::time::Duration;

/// From its deletion until its kubelet removes it, in milliseconds of this machine; without it, its grace period.
pub const TERMINATION_MILLIS: &str = "demo.stowage.dev/dying-ms";

/// How long its processes keep their GPU memory after the pod is gone, in milliseconds, or [`FOR_EVER`].
pub const MEMORY_DELAY_MILLIS: &str = "demo.stowage.dev/memory-stays-ms";

/// A process that hangs in the driver.
pub const FOR_EVER: &str = "for-ever";

/// `None`: as long as its grace period.
pub(super) fn termination_time(pod: &Value) -> Option<Duration> {
    duration(pod["metadata"]["annotations"][TERMINATION_MILLIS].as_str()?)
}

pub(super) fn memory_delay(pod: &Value) -> Duration {
    pod["metadata"]["annotations"][MEMORY_DELAY_MILLIS]
        .as_str()
        .and_then(duration)
        .unwrap_or_default()
}

fn duration(text: &str) -> Option<Duration> {
    if text == FOR_EVER {
        Some(Duration::MAX)
    } else {
        text.parse().ok().map(Duration::from_millis)
    }
}
