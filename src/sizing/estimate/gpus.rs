//! GPUs by their memory as NVML reports it, and whether an estimate fits on one beside Stowage's headroom.

use super::{Estimate, PartName, pod};
use crate::capacity_plan::gpu_types::{GPU_TYPES, GpuType};
use serde::Serialize;
use stowage_scheduling::units::Bytes;

/// A GPU's name, in short, and its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSize {
    pub name: String,
    pub memory_bytes: Bytes,
}

/// Allocatable share of a GPU in per cent, with the default headroom of a tenth.
const ALLOCATABLE_PERCENT: u64 = 90;

impl GpuSize {
    pub fn from_type(gpu: &GpuType) -> Self {
        Self {
            name: gpu.name.into(),
            memory_bytes: gpu.total(),
        }
    }
}

/// GPU types that a capacity plan knows by name, in order of memory.
pub fn known_gpus() -> impl Iterator<Item = GpuSize> {
    GPU_TYPES.iter().map(GpuSize::from_type)
}

/// Fit of an estimate on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFit {
    #[serde(flatten)]
    pub gpu: GpuSize,
    pub fits: bool,
    /// Number of such engines on one GPU; with tensor parallelism, of shares of one.
    pub engines: u64,
    /// VRAM that a pod must request on each GPU so that its engine has the estimated KV cache there.
    pub vram_per_gpu_bytes: Bytes,
    /// The value that it gets for `--gpu-memory-utilization`, in hundredths, rounded down.
    pub fraction_percent: u64,
    /// KV cache of its engine with that fraction, which does not cover the CUDA context.
    pub kv_cache_bytes: Bytes,
}

impl GpuFit {
    pub fn new(estimate: &Estimate, gpu: GpuSize) -> Self {
        let memory = gpu.memory_bytes.0.max(1);
        let counted_bytes = estimate.bytes_of(PartName::KvCache) + fixed_counted_bytes(estimate);
        let hundredths = (u128::from(counted_bytes.0) * 100).div_ceil(memory.into());
        let share = (u128::from(memory) * hundredths).div_ceil(100);
        let requested = pod::requested_per_gpu(estimate)
            .max(pod::round_up_to_gib(super::saturating_bytes(share)));
        let engines = memory / 100 * ALLOCATABLE_PERCENT / requested.0.max(1);
        let fraction_percent =
            (u128::from(requested.0.min(memory)) * 100 / u128::from(memory)) as u64;
        let usable = Bytes(memory / 100 * fraction_percent);
        Self {
            fits: engines > 0,
            engines,
            vram_per_gpu_bytes: requested,
            fraction_percent,
            kv_cache_bytes: usable.minus(fixed_counted_bytes(estimate)),
            gpu,
        }
    }
}

/// Bytes that an engine counts towards its fraction, without the KV cache.
fn fixed_counted_bytes(estimate: &Estimate) -> Bytes {
    estimate
        .fixed_bytes()
        .minus(estimate.bytes_of(PartName::CudaContext))
}
