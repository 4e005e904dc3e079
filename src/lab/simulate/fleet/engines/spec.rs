//! What one engine can do with the GPUs and the memory that it is granted.

use super::speed::{Batching, GpuSpeed, ModelShape, StepCost};
use stowage_scheduling::contention::Contention;
use stowage_scheduling::units::Bytes;

/// On every GPU: CUDA's context, and activations and graphs for a batch of the default size.
pub const CONTEXT: Bytes = Bytes::mib(512);
pub(crate) const ACTIVATIONS: Bytes = Bytes::mib(1536);

/// One engine: its memory and its speed. How long it takes to become ready is not here: that is a matter of the node it starts on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineSpec {
    pub gpus: u32,
    /// Over all its GPUs.
    pub weights: Bytes,
    /// What is left for the KV cache, in tokens, over all its GPUs. At least 1.
    pub kv_capacity: f64,
    pub cost: StepCost,
    pub batching: Batching,
    /// On each GPU: what must be free when it starts. It is the whole grant, for an engine measures what a batch takes with a
    /// dummy batch (its profile run) and gives the rest to the KV cache; nothing else may start on the GPU meanwhile.
    pub start_bytes: Bytes,
    /// On each GPU, of that: what the profile run touches besides the weights.
    pub profile_run_bytes: Bytes,
}

/// A grant that leaves no token for the KV cache.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{model} on {gpus} GPUs needs more than {needs} on each, and is granted {grant}; grant more, or take more GPUs"
)]
pub struct DoesNotFit {
    pub model: &'static str,
    pub gpus: u32,
    pub needs: Bytes,
    pub grant: Bytes,
}

impl EngineSpec {
    /// An engine with `grant` of memory on each of its GPUs and vLLM's defaults otherwise.
    pub fn new(
        model: &ModelShape,
        gpu: &GpuSpeed,
        gpus: u32,
        grant: Bytes,
    ) -> Result<Self, DoesNotFit> {
        let gpus = gpus.max(1);
        let profile_run = CONTEXT + ACTIVATIONS;
        let needs = model.weights.split(gpus) + profile_run;
        let kv = grant.minus(needs).times(gpus.into());
        let kv_capacity = (kv.0 / model.kv_per_token.0.max(1)) as f64;
        if kv_capacity < 1.0 {
            return Err(DoesNotFit {
                model: model.name,
                gpus,
                needs,
                grant,
            });
        }
        Ok(Self {
            gpus,
            weights: model.weights,
            kv_capacity,
            cost: StepCost::new(model, gpu, gpus),
            batching: Batching::default_on(gpu),
            start_bytes: grant,
            profile_run_bytes: profile_run,
        })
    }

    /// The most of an engine's time that prefill may take: a step has room for so many prompt tokens beside those that decode.
    pub(crate) fn max_prefill_share(&self, step_s: f64, under: &Contention) -> f64 {
        let chunk_s = self.batching.tokens / self.cost.prefill_rate(under);
        chunk_s / (chunk_s + step_s)
    }

    /// Requests of a kind that fit at once.
    pub(crate) fn max_concurrent_requests(&self, prompt: f64, output: f64) -> f64 {
        self.batching
            .requests
            .min(self.kv_capacity / super::requests::kv_tokens(prompt, output))
    }

    /// Whether a request fits an idle engine to its last token.
    pub fn fits(&self, prompt: f64, output: f64) -> bool {
        prompt + output <= self.kv_capacity
    }
}
