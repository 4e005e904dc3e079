//! GPUs by their memory as NVML reports it, and whether an estimate fits on one beside Stowage's headroom.

use super::{Estimate, PartName, pod};
use crate::units::Bytes;
use serde::Serialize;

/// A GPU's name, in short, and its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSize {
    pub name: String,
    pub memory_bytes: Bytes,
}

/// Name and MiB, as `nvidia-smi --query-gpu=name,memory.total` prints them; with ECC on where a GPU has it. In order of memory.
const KNOWN: [(&str, u64); 11] = [
    ("T4", 15_360),
    ("A10", 23_028),
    ("L4", 23_034),
    ("RTX-4090", 24_564),
    ("A100-40GB", 40_960),
    ("L40S", 46_068),
    ("H100-80GB", 81_559),
    ("A100-80GB", 81_920),
    ("H100-NVL", 95_830),
    ("H200", 143_771),
    ("B200", 183_359),
];

/// What is allocatable of a GPU by default: all but a tenth.
const ALLOCATABLE_PERCENT: u64 = 90;

pub fn known() -> impl Iterator<Item = GpuSize> {
    KNOWN.into_iter().map(|(name, mib)| GpuSize { name: name.into(), memory_bytes: Bytes::mib(mib) })
}

/// An estimate on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuFit {
    #[serde(flatten)]
    pub gpu: GpuSize,
    pub fits: bool,
    /// How many such engines one GPU holds; with tensor parallelism, how many shares of one.
    pub engines: u64,
    /// What a pod has to ask for on each GPU so that its engine has the estimated KV cache there.
    pub vram_per_gpu_bytes: Bytes,
    /// What it is told for `--gpu-memory-utilization`, in hundredths: Stowage rounds down.
    pub fraction_percent: u64,
    /// The KV cache that its engine has there with that fraction, which does not cover the CUDA context.
    pub kv_cache_bytes: Bytes,
}

impl GpuFit {
    pub fn of(estimate: &Estimate, gpu: GpuSize) -> Self {
        let memory = gpu.memory_bytes.0.max(1);
        let counted = estimate.bytes_of(PartName::KvCache) + beside(estimate);
        let hundredths = (u128::from(counted.0) * 100).div_ceil(memory.into());
        let share = (u128::from(memory) * hundredths).div_ceil(100);
        let asked = pod::per_gpu(estimate).max(pod::whole_gib(super::bytes(share)));
        let engines = memory / 100 * ALLOCATABLE_PERCENT / asked.0.max(1);
        let fraction_percent = (u128::from(asked.0.min(memory)) * 100 / u128::from(memory)) as u64;
        let usable = Bytes(memory / 100 * fraction_percent);
        Self {
            fits: engines > 0,
            engines,
            vram_per_gpu_bytes: asked,
            fraction_percent,
            kv_cache_bytes: usable.minus(beside(estimate)),
            gpu,
        }
    }
}

/// What an engine counts towards its fraction beside its KV cache.
fn beside(estimate: &Estimate) -> Bytes {
    estimate.fixed_bytes().minus(estimate.bytes_of(PartName::CudaContext))
}
