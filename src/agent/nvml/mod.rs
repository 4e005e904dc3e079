//! The node's GPUs.

use crate::report::{GpuReport, Missing};
use std::time::Instant;

/// Who can tell what the node's GPUs are doing. It may block for as long as the driver does.
pub trait GpuSource: Send {
    /// The GPUs now, or why they cannot be told.
    fn sample(&mut self) -> Result<GpuSample, String>;
}

/// The node's GPUs at one moment, by index, a MIG slice behind the GPU it is cut from. No process has its pod yet.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSample {
    pub gpus: Vec<GpuReport>,
    /// Figures that could not be read.
    pub missing: Vec<Missing>,
    pub taken: Instant,
}
