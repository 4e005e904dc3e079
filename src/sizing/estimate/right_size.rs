//! An estimate against a running engine: how much of what a pod has reserved is in use, and what it could ask for instead.
//!
//! An engine takes its KV cache when it starts and keeps it, full or not, so what its processes have says nothing: what counts is
//! how full the cache is. One look is one moment. The advice leaves a margin for others, and says that it saw only this one.

use super::architecture::ModelArchitecture;
use super::kv_cache::KvCache;
use super::pod::{PodLines, round_up_to_gib};
use super::{Estimate, PartName, Workload, saturating_bytes, with_thousands_separators};
use serde::Serialize;
use stowage_scheduling::units::Bytes;

/// Observation of a running engine. All amounts are sums over its GPUs, in bytes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observation {
    /// VRAM that the pod was granted.
    pub reserved: Option<Bytes>,
    /// VRAM that its processes use, as an agent measured it.
    pub used: Option<Bytes>,
    /// The share of its KV cache that is in use, 0 to 1.
    pub kv_cache_usage: Option<f64>,
    /// Capacity of its KV cache in tokens.
    pub kv_cache_tokens: Option<u64>,
    pub running: Option<u64>,
    /// Requests that wait for KV cache.
    pub waiting: Option<u64>,
    /// It interrupts its own requests for lack of KV cache.
    pub preempting: bool,
}

/// What a pod has, and what it should request.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RightSize {
    pub advice: Advice,
    pub reserved_bytes: Option<Bytes>,
    /// VRAM that its processes use.
    pub used_bytes: Option<Bytes>,
    pub kv_cache_bytes: Bytes,
    pub kv_cache_usage: f64,
    pub kv_cache_used_bytes: Bytes,
    /// VRAM without the free part of the KV cache.
    pub needed_bytes: Bytes,
    /// `needed_bytes` with a margin: what the pod's lines request.
    pub needed_with_margin_bytes: Bytes,
    pub running: Option<u64>,
    pub waiting: Option<u64>,
    /// Why, in a sentence.
    pub reason: String,
    /// Pod lines to change; `None` if none is to be changed.
    pub pod: Option<PodLines>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Advice {
    Shrink,
    Grow,
    Keep,
}

/// Why nothing can be advised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RightSizeError {
    #[error(
        "the engine does not say how full its KV cache is; vLLM does, with vllm:kv_cache_usage_perc on its metrics page"
    )]
    Usage,
    #[error(
        "neither the size of its KV cache nor of its memory is known: name what the pod asks for with --reserved, or observe \
         the pod through `stowage serve`"
    )]
    Size,
}

/// Margin on the KV cache in use, in per cent.
const MARGIN_PERCENT: u64 = 25;
/// Usage of the KV cache beyond which an engine begins to preempt requests.
const FULL_USAGE: f64 = 0.9;
/// Minimum change in per cent: less is not worth a restart.
const MIN_CHANGE_PERCENT: u64 = 10;

impl RightSize {
    pub fn new(
        model: &ModelArchitecture,
        workload: &Workload,
        estimate: &Estimate,
        observation: &Observation,
    ) -> Result<Self, RightSizeError> {
        let usage = observation
            .kv_cache_usage
            .filter(|usage| usage.is_finite())
            .ok_or(RightSizeError::Usage)?;
        let usage = usage.clamp(0.0, 1.0);
        let gpus = workload.tensor_parallel;
        let cache = KvCache::for_model(model, workload);
        let estimated = estimate.fixed_bytes().times(gpus);
        let cache_bytes =
            kv_cache_bytes(&cache, workload, estimate, observation).ok_or(RightSizeError::Size)?;
        // What was measured is better known than what was estimated, unless it is less than any engine has.
        let fixed = observation
            .used
            .map(|used| used.minus(cache_bytes))
            .filter(|fixed| fixed.0 >= estimated.0 / 2);
        let fixed = fixed.unwrap_or(estimated);
        let used = fraction_of(cache_bytes, usage);
        let is_full = observation.preempting
            || usage >= FULL_USAGE && observation.waiting.is_some_and(|waiting| waiting > 0);
        let min_cache = saturating_bytes(cache.min_bytes(workload)).times(gpus);
        let target_cache = match is_full {
            // How much more it needs cannot be seen: what was asked for, or the margin.
            true => with_margin(cache_bytes).max(estimate.bytes_of(PartName::KvCache).times(gpus)),
            false => with_margin(used),
        }
        .max(min_cache);
        let needed = fixed + used;
        let per_gpu = round_up_to_gib((fixed + target_cache).split(gpus.clamp(1, 64) as u32));
        let recommended = per_gpu.times(gpus);
        let reserved = observation
            .reserved
            .or(observation.used)
            .unwrap_or(fixed + cache_bytes);
        let advice = advice(reserved, recommended, is_full);
        let reason = reason(
            advice,
            usage,
            is_full,
            (target_cache == min_cache).then_some(workload.context),
            observation,
        );
        let pod = (advice != Advice::Keep)
            .then(|| PodLines::new(recommended, round_up_to_gib(target_cache), model, workload));
        Ok(Self {
            advice,
            reserved_bytes: observation.reserved,
            used_bytes: observation.used,
            kv_cache_bytes: cache_bytes,
            kv_cache_usage: usage,
            kv_cache_used_bytes: used,
            needed_bytes: needed,
            needed_with_margin_bytes: recommended,
            running: observation.running,
            waiting: observation.waiting,
            reason,
            pod,
        })
    }
}

/// Size of the engine's KV cache: by its tokens, or else its memory without the fixed part.
fn kv_cache_bytes(
    cache: &KvCache,
    workload: &Workload,
    estimate: &Estimate,
    observation: &Observation,
) -> Option<Bytes> {
    let gpus = workload.tensor_parallel;
    let by_tokens = || {
        let of_token = estimate.kv_cache.bytes_per_token.times(gpus);
        observation
            .kv_cache_tokens
            .map(|tokens| of_token.times(tokens))
    };
    let by_memory = || {
        let has = observation.used.or(observation.reserved)?;
        Some(has.minus(estimate.fixed_bytes().times(gpus)))
    };
    // Engines count tokens of windows and states each in its own way.
    if cache.is_uniform() {
        by_tokens().or_else(by_memory)
    } else {
        by_memory().or_else(by_tokens)
    }
}

fn advice(reserved: Bytes, recommended: Bytes, is_full: bool) -> Advice {
    let least = reserved.0 / 100 * MIN_CHANGE_PERCENT;
    match is_full {
        true if recommended > reserved => Advice::Grow,
        false if reserved.minus(recommended).0 > least => Advice::Shrink,
        false if recommended.minus(reserved).0 > least => Advice::Grow,
        _ => Advice::Keep,
    }
}

/// Reason for the advice. `least`: the advice is the minimum, one sequence of so many tokens.
fn reason(
    advice: Advice,
    usage: f64,
    is_full: bool,
    least: Option<u64>,
    observation: &Observation,
) -> String {
    let percent = (usage * 100.0).round();
    let cache = format!("its KV cache is {percent} % full");
    match (advice, least) {
        _ if is_full => {
            let waiting = observation.waiting.unwrap_or(0);
            let what = if observation.preempting {
                "it interrupts requests".into()
            } else {
                format!("{waiting} requests wait")
            };
            format!("{cache} and {what}: how much more it needs cannot be seen")
        }
        (Advice::Keep, _) => format!("{cache}, and a change would be less than a tenth"),
        (Advice::Shrink | Advice::Grow, Some(tokens)) => format!(
            "{cache}; the least is room for one sequence of {} tokens, without which an engine does not start",
            with_thousands_separators(tokens.into())
        ),
        (Advice::Shrink, None) => format!("{cache}, and a quarter more than it uses is left to it"),
        (Advice::Grow, None) => format!("{cache}, and it has less than a quarter more than that"),
    }
}

fn with_margin(amount: Bytes) -> Bytes {
    amount + Bytes(amount.0 / 100 * MARGIN_PERCENT)
}

/// A fraction from 0 to 1 of an amount; the fraction is rounded up to thousandths.
fn fraction_of(amount: Bytes, share: f64) -> Bytes {
    let thousandths = (share * 1000.0).ceil() as u128;
    saturating_bytes(u128::from(amount.0) * thousandths / 1000)
}
