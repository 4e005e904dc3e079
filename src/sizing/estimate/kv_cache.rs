//! The KV cache on each GPU: what a token leaves in each layer, for as many tokens as a layer looks back at.
//!
//! As vLLM sizes it (`v1/kv_cache_interface.py`): blocks of 16 tokens; a layer with a sliding window keeps the window and, while
//! it reads a prompt, one step's tokens more; a recurrent layer keeps one state for each sequence. Layers of several kinds are padded.

use super::architecture::ModelArchitecture;
use super::mixer::Mixer;
use super::{
    KvCacheSize, PartName, VramPart, Workload, saturating_bytes, saturating_product,
    with_thousands_separators,
};
use serde::Serialize;
use std::collections::BTreeMap;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvCacheDtype {
    /// As the model's file says; 16 bits if it says nothing.
    Auto,
    /// 16 bits.
    Bf16,
    Fp8,
}

/// Tokens in a block of the KV cache: vLLM's default.
const BLOCK_TOKENS: u64 = 16;

/// KV cache bytes of tokens and sequences on each GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvCache {
    /// Bytes of one token in all layers without a window.
    full_attention: u128,
    /// Bytes of one token in the layers with a window, by its size in tokens.
    windows: BTreeMap<u64, u128>,
    /// Bytes of one sequence in recurrent layers, whatever its length.
    recurrent_state: u128,
}

impl KvCache {
    pub fn for_model(model: &ModelArchitecture, workload: &Workload) -> Self {
        let element = match workload.kv_cache_dtype {
            KvCacheDtype::Fp8 => 1,
            KvCacheDtype::Auto if model.quantization.fp8_kv_cache => 1,
            KvCacheDtype::Auto | KvCacheDtype::Bf16 => 2,
        };
        let gpus = workload.tensor_parallel;
        let mut cache = Self {
            full_attention: 0,
            windows: BTreeMap::new(),
            recurrent_state: 0,
        };
        // Layers by what they look back at.
        let mut counts = BTreeMap::<Option<u64>, u128>::new();
        for layer in &model.layers {
            match layer.mixer {
                Mixer::None => {}
                Mixer::Attention(one) => {
                    let token = one.cached_elements_on(gpus).saturating_mul(element.into());
                    let sum = match one.window {
                        Some(window) => cache.windows.entry(window).or_default(),
                        None => &mut cache.full_attention,
                    };
                    *sum = sum.saturating_add(token);
                    *counts.entry(one.window).or_default() += 1;
                }
                Mixer::Latent(one) => {
                    cache.full_attention = cache
                        .full_attention
                        .saturating_add(saturating_product(&[one.cached_elements(), element]))
                        .saturating_add(one.index_bytes.into());
                }
                Mixer::Recurrent(one) => {
                    cache.recurrent_state = cache
                        .recurrent_state
                        .saturating_add(one.state_bytes_on(gpus))
                }
            }
        }
        cache.pad(&counts);
        cache
    }

    /// Pads as vLLM's `_get_kv_cache_groups_uniform_page_size` does: layers of a kind are in groups as large as the rarest kind, or
    /// as the most frequent one if it is less than half as many more.
    fn pad(&mut self, counts: &BTreeMap<Option<u64>, u128>) {
        let (Some(least), Some(most)) = (counts.values().min(), counts.values().max()) else {
            return;
        };
        let group = if most * 2 < least * 3 { *most } else { *least };
        let padded = |bytes: u128, kind: Option<u64>| match counts.get(&kind) {
            Some(layers) => bytes.saturating_mul(layers.next_multiple_of(group)) / layers,
            None => bytes,
        };
        self.full_attention = padded(self.full_attention, None);
        for (window, bytes) in &mut self.windows {
            *bytes = padded(*bytes, Some(*window));
        }
    }

    /// Whether every token costs the same.
    pub(crate) fn is_uniform(&self) -> bool {
        self.windows.is_empty() && self.recurrent_state == 0
    }

    fn bytes_per_token(&self) -> u128 {
        self.windows
            .values()
            .copied()
            .fold(self.full_attention, u128::saturating_add)
    }

    /// Bytes of one sequence of so many tokens. `step` is the number of tokens of a prefill step; 0 once the prompt is read.
    fn sequence_bytes(&self, tokens: u64, step: u64) -> u128 {
        let bytes_of_blocks = |bytes: u128, tokens: u64| {
            bytes.saturating_mul(
                tokens
                    .div_ceil(BLOCK_TOKENS)
                    .saturating_mul(BLOCK_TOKENS)
                    .into(),
            )
        };
        let windows = self.windows.iter();
        let windows = windows.map(|(window, bytes)| {
            bytes_of_blocks(*bytes, tokens.min(window.saturating_add(step)))
        });
        windows.fold(
            bytes_of_blocks(self.full_attention, tokens).saturating_add(self.recurrent_state),
            u128::saturating_add,
        )
    }

    /// Bytes of one sequence of full length during prefill: the minimum with which an engine starts.
    pub fn min_bytes(&self, workload: &Workload) -> u128 {
        self.sequence_bytes(workload.context, workload.max_num_batched_tokens)
    }

    /// Bytes of all sequences at full length, one of them during prefill.
    fn total_bytes(&self, workload: &Workload) -> u128 {
        let others = u128::from(workload.sequences.saturating_sub(1));
        self.sequence_bytes(workload.context, 0)
            .saturating_mul(others)
            .saturating_add(self.min_bytes(workload))
    }

    pub fn size(&self, workload: &Workload) -> KvCacheSize {
        KvCacheSize {
            bytes_per_token: saturating_bytes(self.bytes_per_token()),
            bytes_per_token_beyond_windows: saturating_bytes(self.full_attention),
            state_bytes_per_sequence: saturating_bytes(self.recurrent_state),
            bytes_per_sequence: saturating_bytes(self.sequence_bytes(workload.context, 0)),
            bytes: saturating_bytes(self.total_bytes(workload)),
        }
    }

    pub fn part(&self, workload: &Workload) -> VramPart {
        let tokens = format!(
            "{} × {} tokens",
            workload.sequences,
            with_thousands_separators(workload.context.into())
        );
        let mut formula = format!("{tokens} × {}", saturating_bytes(self.full_attention));
        for (window, of_token) in &self.windows {
            formula += &format!(
                " + the last {} × {}",
                with_thousands_separators((*window).into()),
                saturating_bytes(*of_token)
            );
        }
        if self.recurrent_state > 0 {
            formula += &format!(
                " + {} of state for each sequence",
                saturating_bytes(self.recurrent_state)
            );
        }
        VramPart {
            part: PartName::KvCache,
            bytes: saturating_bytes(self.total_bytes(workload)),
            formula,
            source: "Kwon et al. 2023, §3; vLLM kv_cache_interface.py",
        }
    }
}
