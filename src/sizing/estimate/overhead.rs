//! What an engine needs beside weights and KV cache, on each GPU: the peak of its activations, buffers, CUDA graphs, and the CUDA
//! context.
//!
//! Each constant names the measurement it is from. They are vLLM's; other engines differ.

use super::architecture::ModelArchitecture;
use super::{
    PartName, VramPart, Workload, saturating_bytes, saturating_product, with_thousands_separators,
};
use stowage_scheduling::units::Bytes;

/// Bytes of the sampler's peak for each sequence and entry of the vocabulary: the logits in 16 and in 32 bits, and what sorting
/// them for top-p takes (values and indices, twice, and two more in 32 bits). Fitted to llm-d planner's measurements: those of
/// five models on one GPU are 38.4 to 38.9 with the hidden states in them. Its Mistral-Small-3.2-24B is not among them: 2.12 GiB
/// were measured, and this makes it 4.91.
const SAMPLER_BYTES_PER_LOGIT: u64 = 38;
/// Activations of the hidden size that are held for each token while the sampler runs, and while a layer does: the residual,
/// the hidden state, and in a layer its normalized copy.
const HELD_BESIDE_SAMPLER: u64 = 2;
const HELD_IN_LAYER: u64 = 3;
/// Bytes of an activation.
const ACTIVATION_BYTES: u64 = 2;

/// What vLLM's profile run finds: the higher of a layer's peak at the most tokens of a step, and the sampler's at the most
/// sequences. Neither depends on the context.
pub fn activations(model: &ModelArchitecture, workload: &Workload) -> VramPart {
    let tokens = workload.max_num_batched_tokens;
    let sequences = workload.max_num_seqs;
    let hidden_bytes =
        |held: u64| saturating_product(&[tokens, held, model.hidden, ACTIVATION_BYTES]);
    let sampler = saturating_product(&[sequences, model.vocab, SAMPLER_BYTES_PER_LOGIT])
        .saturating_add(hidden_bytes(HELD_BESIDE_SAMPLER));
    let widths = model.layers.iter().map(|layer| {
        let gpus = workload.tensor_parallel;
        layer
            .mixer
            .activation_width(gpus)
            .max(layer.feed_forward.width(model.hidden, gpus))
    });
    let widest = widths.max().unwrap_or_default();
    let layer = widest
        .saturating_mul(saturating_product(&[tokens, ACTIVATION_BYTES]))
        .saturating_add(hidden_bytes(HELD_IN_LAYER));
    let formula = if sampler >= layer {
        format!(
            "the sampler: {sequences} sequences × {} logits × {SAMPLER_BYTES_PER_LOGIT} B",
            with_thousands_separators(model.vocab.into())
        )
    } else {
        format!(
            "the widest layer: {} tokens × {} × {ACTIVATION_BYTES} B",
            with_thousands_separators(tokens.into()),
            with_thousands_separators(widest)
        )
    };
    VramPart {
        part: PartName::Activations,
        bytes: saturating_bytes(sampler.max(layer)),
        formula,
        source: "vLLM gpu_model_runner.py; llm-d planner's measurements",
    }
}

/// cuBLAS, attention kernels and, with several GPUs, NCCL: `non-torch forward increase memory` in vLLM's log. llm-d planner has
/// measured 0.13 and 0.14 GiB on one GPU, 0.54 and 0.55 on each of two.
pub(crate) fn engine_buffers(workload: &Workload) -> VramPart {
    let is_single_gpu = workload.tensor_parallel <= 1;
    let (size, formula) = if is_single_gpu {
        (144, "one GPU")
    } else {
        (564, "several GPUs, with NCCL")
    };
    VramPart {
        part: PartName::EngineBuffers,
        bytes: Bytes::mib(size),
        formula: format!("measured: {formula}"),
        source: "llm-d planner's measurements",
    }
}

/// CUDA graphs: −0.88 to 1.03 GiB in llm-d planner's measurements. Half a GiB is above seven of eight.
pub fn cuda_graphs(workload: &Workload) -> VramPart {
    let (size, formula) = if workload.cuda_graphs {
        (512, "a constant")
    } else {
        (0, "--enforce-eager")
    };
    VramPart {
        part: PartName::CudaGraphs,
        bytes: Bytes::mib(size),
        formula: formula.into(),
        source: "llm-d planner's measurements",
    }
}

/// The driver's memory for a process, with the kernels that it has loaded. vLLM does not count it towards
/// `--gpu-memory-utilization`; the agent, which reads NVML, does.
pub(crate) fn cuda_context() -> VramPart {
    VramPart {
        part: PartName::CudaContext,
        bytes: Bytes::mib(512),
        formula: "a constant".into(),
        source: "an assumption: no published measurement",
    }
}
