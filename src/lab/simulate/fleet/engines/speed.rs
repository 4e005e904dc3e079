//! What a step of an engine costs: the GPU's data sheet, the model's shape, and constants fitted to published figures.
//!
//! Times are in seconds, speeds per second, as floating-point numbers: the model is an estimate and accounts for nothing.

pub(crate) use stowage_scheduling::contention::GpuSpeed;

use stowage_scheduling::contention::{Contention, EngineWork, STEP_OVERHEAD_S};
use stowage_scheduling::units::Bytes;

/// What tensor parallelism adds to a step for each layer: two all-reduces over NVLink.
pub(crate) const SYNC_PER_LAYER_S: f64 = 55e-6;
/// What a request spends outside of the engine's steps until its first token is out: HTTP, tokenisation, streaming.
pub(crate) const FIRST_TOKEN_OVERHEAD_S: f64 = 0.02;

/// How much an engine does at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    /// Tokens of prompts in a step, beside those that decode (`--max-num-batched-tokens`).
    pub tokens: f64,
    /// Requests (`--max-num-seqs`).
    pub requests: f64,
}

impl Batching {
    /// vLLM's default (`EngineArgs`, for its API server): more on a GPU of 70 GiB or more that is no A100.
    pub fn default_on(gpu: &GpuSpeed) -> Self {
        if gpu.memory >= Bytes::gib(70) && !gpu.product.starts_with("A100") {
            Self {
                tokens: 8192.0,
                requests: 1024.0,
            }
        } else {
            Self {
                tokens: 2048.0,
                requests: 256.0,
            }
        }
    }
}

/// What of a model's architecture counts for memory and time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelShape {
    pub name: &'static str,
    /// Those that each token passes: for a mixture of experts, the active ones.
    pub parameters: f64,
    /// In memory, of all parameters.
    pub weights: Bytes,
    pub layers: u32,
    /// Key and value of one token in all layers, over all GPUs together.
    pub kv_per_token: Bytes,
}

impl ModelShape {
    /// Weights of two bytes and a KV cache of `2 · layers · kv_heads · head_dim · 2` bytes a token.
    pub const fn bf16(
        name: &'static str,
        millions: u64,
        layers: u32,
        kv_heads: u64,
        head_dim: u64,
    ) -> Self {
        Self {
            name,
            parameters: millions as f64 * 1e6,
            weights: Bytes(millions * 2_000_000),
            layers,
            kv_per_token: Bytes(2 * layers as u64 * kv_heads * head_dim * 2),
        }
    }

    /// Weights and KV cache in one byte each.
    #[cfg(test)]
    pub(crate) const fn in_fp8(self) -> Self {
        Self {
            weights: Bytes(self.weights.0 / 2),
            kv_per_token: Bytes(self.kv_per_token.0 / 2),
            ..self
        }
    }

    pub(crate) const LLAMA_70B: Self = Self::bf16("llama-3.1-70b", 70_554, 80, 8, 128);
    pub(crate) const QWEN_32B: Self = Self::bf16("qwen3-32b", 32_762, 64, 8, 128);
    pub(crate) const QWEN_14B: Self = Self::bf16("qwen2.5-14b", 14_770, 48, 8, 128);
    #[cfg(test)]
    pub(crate) const PHI_4: Self = Self::bf16("phi-4", 14_660, 40, 10, 128);
    pub(crate) const LLAMA_2_13B: Self = Self::bf16("llama-2-13b", 13_016, 40, 40, 128);
    pub const LLAMA_8B: Self = Self::bf16("llama-3.1-8b", 8_030, 32, 8, 128);
    pub(crate) const QWEN_7B: Self = Self::bf16("qwen2.5-7b", 7_616, 28, 4, 128);
    pub(crate) const LLAMA_3B: Self = Self::bf16("llama-3.2-3b", 3_213, 28, 8, 128);
    pub(crate) const LLAMA_1B: Self = Self::bf16("llama-3.2-1b", 1_236, 16, 8, 64);
}

/// A decode step, linear in what it works on, and how fast prompts are read, with the whole GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Seconds of a step that are neither memory nor compute: launches, sampling.
    launch_s: f64,
    /// Seconds in which the weights are read, once a step.
    weights_s: f64,
    /// Seconds in which several GPUs exchange results.
    links_s: f64,
    /// Seconds for each request that decodes: the compute of one token.
    pub per_request_s: f64,
    /// Seconds for each token in the KV cache of those requests: it is read once a step.
    pub per_kv_token_s: f64,
    /// Prompt tokens a second when nothing else runs.
    prefill_rate: f64,
}

impl StepCost {
    pub fn new(model: &ModelShape, gpu: &GpuSpeed, gpus: u32) -> Self {
        let gpus_f = f64::from(gpus.max(1));
        let token_s = gpu.compute_s(2.0 * model.parameters / gpus_f);
        let links = if gpus > 1 {
            f64::from(model.layers) * SYNC_PER_LAYER_S
        } else {
            0.0
        };
        Self {
            launch_s: STEP_OVERHEAD_S,
            weights_s: gpu.memory_s(model.weights.0 as f64 / gpus_f),
            links_s: links,
            per_request_s: token_s,
            per_kv_token_s: gpu.memory_s(model.kv_per_token.0 as f64 / gpus_f),
            prefill_rate: 1.0 / token_s,
        }
    }

    /// Seconds of a step.
    pub(crate) fn step_s(&self, decoding: f64, kv_tokens: f64, under: &Contention) -> f64 {
        under.overhead * self.launch_s
            + under.memory * self.weights_s
            + under.overhead * self.links_s
            + under.compute * self.per_request_s * decoding
            + under.memory * self.per_kv_token_s * kv_tokens
    }

    /// Such a step as its engine's neighbors have to share the GPU with: how often there is one, and the share of the SMs.
    pub(crate) fn work(
        &self,
        decoding: f64,
        kv_tokens: f64,
        (busy, sms): (f64, f64),
    ) -> EngineWork {
        EngineWork {
            overhead_s: self.launch_s + self.links_s,
            memory_s: self.weights_s + self.per_kv_token_s * kv_tokens,
            compute_s: self.per_request_s * decoding,
            busy,
            sms,
        }
    }

    /// Prompt tokens a second.
    pub(crate) fn prefill_rate(&self, under: &Contention) -> f64 {
        self.prefill_rate / under.compute
    }
}
