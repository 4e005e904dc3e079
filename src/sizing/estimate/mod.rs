//! Estimates how much VRAM an engine needs to serve a model, from the headers of its checkpoint and its Hugging Face `config.json`.
//!
//! No weights are read, no GPU is asked. What cannot be told from the files (the engine's own memory) comes from constants that name
//! the measurement they are from. `docs/use/estimate.md` has the formulas and their sources.
//!
//! The steps: [`config`] reads the configuration, with lines from `json_lines`; [`architecture`] makes layers of its fields
//! ([`mixer`], [`feed_forward`]), and of what [`family`] knows that files do not say; [`checkpoint`] reads headers; [`weights`] with
//! [`quantization`], [`kv_cache`] and [`overhead`] count bytes; here they are summed. [`pod`] makes a pod's lines of the sum, and
//! [`right_size`] compares it with what a running engine shows. [`shipped`] has well-known models, [`gpus`] known GPUs.
//!
//! No file is opened here, and no page fetched. Every number in a file may be hostile: arithmetic is in 128 bits and saturates.

pub mod architecture;
pub mod checkpoint;
pub mod config;
pub mod family;
pub(crate) mod feed_forward;
pub mod gpus;
mod json_lines;
pub mod kv_cache;
pub(crate) mod mixer;
pub mod overhead;
pub mod pod;
pub mod quantization;
pub mod right_size;
pub mod shipped;
pub mod weights;

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

use architecture::ModelArchitecture;
use kv_cache::{KvCache, KvCacheDtype};
use serde::Serialize;
use stowage_scheduling::units::Bytes;

/// What the engine serves, and over how many GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Workload {
    /// Tokens of one sequence, prompt and answer: `--max-model-len`.
    pub context: u64,
    /// Number of sequences of that length whose KV cache is held at once.
    pub sequences: u64,
    /// GPUs of one node that share each layer: `--tensor-parallel-size`.
    pub tensor_parallel: u64,
    /// Sequences that the engine may run at once, whatever their length: `--max-num-seqs`.
    pub max_num_seqs: u64,
    /// Tokens of one step: `--max-num-batched-tokens`.
    pub max_num_batched_tokens: u64,
    pub kv_cache_dtype: KvCacheDtype,
    /// Whether CUDA graphs are captured: not with `--enforce-eager`.
    pub cuda_graphs: bool,
}

impl Default for Workload {
    /// KV cache for 16 sequences of 8,192 tokens. Of vLLM's own defaults, which depend on the GPU, the sequences are those of GPUs
    /// below 70 GiB, and a step's tokens those of larger ones.
    fn default() -> Self {
        Self {
            context: 8192,
            sequences: 16,
            tensor_parallel: 1,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            kv_cache_dtype: KvCacheDtype::Auto,
            cuda_graphs: true,
        }
    }
}

/// The VRAM of one engine.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Estimate {
    /// All weights of the model.
    pub parameters: u64,
    /// Parameters that one token passes through; fewer than all in a model with experts.
    pub active_parameters: u64,
    /// Uses of VRAM on one GPU, in the order of the table.
    pub parts: Vec<VramPart>,
    pub per_gpu_bytes: Bytes,
    /// Sum over all GPUs.
    pub total_bytes: Bytes,
    pub kv_cache: KvCacheSize,
    /// What the estimate leaves out or assumes about this model.
    pub notes: Vec<String>,
}

/// One use of VRAM, on each GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VramPart {
    pub part: PartName,
    pub bytes: Bytes,
    /// The formula with its numbers.
    pub formula: String,
    /// Where the formula, or its constant, is from.
    pub source: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartName {
    Weights,
    KvCache,
    Activations,
    EngineBuffers,
    CudaGraphs,
    CudaContext,
}

/// Size of the KV cache on each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvCacheSize {
    /// Bytes of one token in all layers with attention.
    pub bytes_per_token: Bytes,
    /// Bytes of one token in the layers without a sliding window: the cost of each token once all windows are full.
    pub bytes_per_token_beyond_windows: Bytes,
    /// Bytes of one sequence whatever its length: states of Mamba and of linear attention.
    pub state_bytes_per_sequence: Bytes,
    pub bytes_per_sequence: Bytes,
    pub bytes: Bytes,
}

/// Why a model cannot be served with this workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    #[error(
        "{heads} {what} cannot be split over {tensor_parallel} GPUs; this model can be over {}",
        listed(.possible)
    )]
    HeadsNotSplit {
        what: &'static str,
        heads: u64,
        tensor_parallel: u64,
        possible: Vec<u64>,
    },
    #[error(
        "that is more than 1 EiB, which no machine has: check --context and --sequences, and the sizes in the model's config.json"
    )]
    TooLarge,
}

fn listed(numbers: &[u64]) -> String {
    numbers
        .iter()
        .map(u64::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Maximum number of GPUs of a pod, all on one node: the pod contract's limit.
pub const MAX_GPUS_PER_POD: u64 = 64;

/// 1 EiB: more than any machine has, and small enough that sums and roundings are exact.
const MAX_BYTES: Bytes = Bytes(1 << 60);

impl Estimate {
    /// VRAM of one engine that serves `model` with this workload.
    pub fn for_model(
        model: &ModelArchitecture,
        workload: &Workload,
    ) -> Result<Self, WorkloadError> {
        model.check_split(workload.tensor_parallel)?;
        let cache = KvCache::for_model(model, workload);
        let parts = [
            weights::part(model, workload),
            cache.part(workload),
            overhead::activations(model, workload),
            overhead::engine_buffers(workload),
            overhead::cuda_graphs(workload),
            overhead::cuda_context(),
        ];
        let per_gpu = parts.iter().map(|part| part.bytes).sum::<Bytes>();
        let total = per_gpu.times(workload.tensor_parallel);
        if total > MAX_BYTES || saturating_bytes(model.parameters()) > MAX_BYTES {
            return Err(WorkloadError::TooLarge);
        }
        Ok(Self {
            parameters: saturating_bytes(model.parameters()).0,
            active_parameters: saturating_bytes(model.active_parameters()).0,
            parts: parts.into(),
            per_gpu_bytes: per_gpu,
            total_bytes: total,
            kv_cache: cache.size(workload),
            notes: model.notes.clone(),
        })
    }

    /// Bytes of one part on each GPU.
    pub fn bytes_of(&self, name: PartName) -> Bytes {
        self.parts
            .iter()
            .filter(|part| part.part == name)
            .map(|part| part.bytes)
            .sum()
    }

    /// Bytes on each GPU without the KV cache.
    pub fn fixed_bytes(&self) -> Bytes {
        self.per_gpu_bytes.minus(self.bytes_of(PartName::KvCache))
    }
}

/// Product of the factors, saturated at [`u128::MAX`].
pub(crate) fn saturating_product(factors: &[u64]) -> u128 {
    factors.iter().fold(1, |product: u128, factor| {
        product.saturating_mul(u128::from(*factor))
    })
}

/// Converts to bytes, saturated at 64 bits: more than any GPU has.
pub(crate) fn saturating_bytes(count: u128) -> Bytes {
    Bytes(u64::try_from(count).unwrap_or(u64::MAX))
}

/// A number as people write it: `8,030,261,248`.
pub fn with_thousands_separators(number: u128) -> String {
    let digits = number.to_string();
    let first = digits.len() % 3;
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && at % 3 == first {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
