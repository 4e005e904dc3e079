//! What a pod has to say so that it gets what was estimated: its limit, its annotations and the engine's arguments.

use super::architecture::ModelArchitecture;
use super::kv_cache::KvCacheDtype;
use super::{Estimate, PartName, Workload};
use serde::Serialize;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::units::text::format_quantity;

/// The lines of a pod that an estimate decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodLines {
    /// The limit `stowage.dev/vram`: the pod's total over all its GPUs.
    pub vram: String,
    /// The annotation `stowage.dev/kv-cache`: the part of it that is KV cache.
    pub kv_cache: String,
    /// The annotation `stowage.dev/gpus`; 1 needs none.
    pub gpus: u64,
    /// The engine's arguments, for which the estimate holds.
    pub args: Vec<String>,
}

const GIB: u64 = 1 << 30;

/// Rounds up to a whole GiB, saturated at 64 bits.
pub(crate) fn round_up_to_gib(bytes: Bytes) -> Bytes {
    Bytes(bytes.0.checked_next_multiple_of(GIB).unwrap_or(u64::MAX))
}

/// VRAM that the pod requests on each GPU, whichever GPU it is.
pub fn requested_per_gpu(estimate: &Estimate) -> Bytes {
    round_up_to_gib(estimate.per_gpu_bytes)
}

impl PodLines {
    /// Lines for an estimate, with `per_gpu` on each GPU: [`requested_per_gpu`], or the request for certain GPUs.
    pub fn for_estimate(
        model: &ModelArchitecture,
        estimate: &Estimate,
        workload: &Workload,
        per_gpu: Bytes,
    ) -> Self {
        let gpus = workload.tensor_parallel;
        let kv_cache = round_up_to_gib(estimate.bytes_of(PartName::KvCache).times(gpus));
        Self::new(per_gpu.times(gpus), kv_cache, model, workload)
    }

    /// Lines for these amounts, each the sum over all GPUs.
    pub fn new(
        vram: Bytes,
        kv_cache: Bytes,
        model: &ModelArchitecture,
        workload: &Workload,
    ) -> Self {
        let gpus = workload.tensor_parallel;
        let mut args = vec![
            "--gpu-memory-utilization=$(GPU_MEMORY_FRACTION)".to_owned(),
            format!("--max-model-len={}", workload.context),
            format!("--max-num-seqs={}", workload.max_num_seqs),
            format!(
                "--max-num-batched-tokens={}",
                workload.max_num_batched_tokens
            ),
        ];
        if gpus > 1 {
            args.push(format!("--tensor-parallel-size={gpus}"));
        }
        if model.quantization.is_quantized_on_load() {
            args.push(format!(
                "--quantization={}",
                model.quantization.precision.name
            ));
        }
        match workload.kv_cache_dtype {
            KvCacheDtype::Fp8 => args.push("--kv-cache-dtype=fp8".into()),
            KvCacheDtype::Bf16 if model.quantization.fp8_kv_cache => {
                args.push("--kv-cache-dtype=bfloat16".into());
            }
            KvCacheDtype::Auto | KvCacheDtype::Bf16 => {}
        }
        if !workload.cuda_graphs {
            args.push("--enforce-eager".into());
        }
        Self {
            vram: format_quantity(vram),
            kv_cache: format_quantity(kv_cache),
            gpus,
            args,
        }
    }
}
