//! What a step of an engine costs: the GPU's data sheet, the model's shape, and constants fitted to published figures.
//!
//! Times are in seconds, speeds per second, as floating-point numbers: the model is an estimate and accounts for nothing.

use stowage_scheduling::units::Bytes;

/// The share of its data sheet's memory bandwidth that a GPU reaches while it decodes.
pub(crate) const BANDWIDTH_REACHED: f64 = 0.85;
/// The share of its data sheet's dense FLOP/s that it reaches while it prefills.
pub(crate) const FLOPS_REACHED: f64 = 0.58;
/// What every step takes besides the GPU's work: scheduling, launches, sampling.
pub(crate) const STEP_OVERHEAD_S: f64 = 1.5e-3;
/// What tensor parallelism adds to a step for each layer: two all-reduces over NVLink.
pub(crate) const SYNC_PER_LAYER_S: f64 = 55e-6;
/// What a request spends outside of the engine's steps until its first token is out: HTTP, tokenisation, streaming.
pub(crate) const FIRST_TOKEN_OVERHEAD_S: f64 = 0.02;

/// A GPU's data sheet, dense and without sparsity. Several GPUs of an engine are linked by NVLink.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSpeed {
    pub name: &'static str,
    pub memory: Bytes,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Floating-point operations a second in the weights' type.
    pub flops: f64,
    /// What vLLM's server takes by default on it; see [`Batching`].
    pub batching: Batching,
}

/// How much an engine does at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Batching {
    /// Tokens of prompts in a step, beside those that decode (`--max-num-batched-tokens`).
    pub tokens: f64,
    /// Requests (`--max-num-seqs`).
    pub requests: f64,
}

impl Batching {
    /// vLLM's default on a GPU of 70 GiB or more that is no A100, and on others (`EngineArgs`, for its API server).
    pub const LARGE: Self = Self {
        tokens: 8192.0,
        requests: 1024.0,
    };
    pub const SMALL: Self = Self {
        tokens: 2048.0,
        requests: 256.0,
    };
}

impl GpuSpeed {
    pub const H100: Self = Self {
        name: "H100-SXM",
        memory: Bytes::gib(80),
        bandwidth: 3.35e12,
        flops: 989e12,
        batching: Batching::LARGE,
    };
    pub const H200: Self = Self {
        name: "H200-SXM",
        memory: Bytes::gib(141),
        bandwidth: 4.8e12,
        flops: 989e12,
        batching: Batching::LARGE,
    };
    pub const A100: Self = Self {
        name: "A100-SXM-80GB",
        memory: Bytes::gib(80),
        bandwidth: 2.039e12,
        flops: 312e12,
        batching: Batching::SMALL,
    };
    #[cfg(test)]
    pub(crate) const A100_PCIE: Self = Self {
        name: "A100-PCIe-80GB",
        memory: Bytes::gib(80),
        bandwidth: 1.935e12,
        flops: 312e12,
        batching: Batching::SMALL,
    };
    #[cfg(test)]
    pub(crate) const A100_40GB: Self = Self {
        name: "A100-SXM-40GB",
        memory: Bytes::gib(40),
        bandwidth: 1.555e12,
        flops: 312e12,
        batching: Batching::SMALL,
    };

    /// This GPU with weights of one byte a parameter: tensor cores are twice as fast on them, from Hopper on.
    #[cfg(test)]
    pub(crate) const fn with_fp8(self) -> Self {
        Self {
            flops: 2.0 * self.flops,
            ..self
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

/// A decode step, linear in what it works on, and how fast prompts are read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// Seconds of a step without requests: overhead, the weights, the links.
    pub fixed_s: f64,
    /// Seconds for each request that decodes: the compute of one token.
    pub per_request_s: f64,
    /// Seconds for each token in the KV cache of those requests: it is read once a step.
    pub per_kv_token_s: f64,
    /// Prompt tokens a second when nothing else runs.
    pub prefill_rate: f64,
}

impl StepCost {
    pub fn new(model: &ModelShape, gpu: &GpuSpeed, gpus: u32) -> Self {
        let gpus_f = f64::from(gpus.max(1));
        let bandwidth = gpus_f * gpu.bandwidth * BANDWIDTH_REACHED;
        let token_s = 2.0 * model.parameters / (gpus_f * gpu.flops * FLOPS_REACHED);
        let links = if gpus > 1 {
            f64::from(model.layers) * SYNC_PER_LAYER_S
        } else {
            0.0
        };
        Self {
            fixed_s: STEP_OVERHEAD_S + model.weights.0 as f64 / bandwidth + links,
            per_request_s: token_s,
            per_kv_token_s: model.kv_per_token.0 as f64 / bandwidth,
            prefill_rate: 1.0 / token_s,
        }
    }

    /// How long a step takes with the whole GPU.
    pub(crate) fn step_s(&self, decoding: f64, kv_tokens: f64) -> f64 {
        self.fixed_s + self.per_request_s * decoding + self.per_kv_token_s * kv_tokens
    }
}
