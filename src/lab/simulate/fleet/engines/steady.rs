//! What one engine comes to at a constant load, solved: for sizing, and as an oracle of the engine that is stepped.

use super::engine::Prefill;
use super::requests::kv_tokens;
use super::spec::EngineSpec;
use super::speed::FIRST_TOKEN_OVERHEAD_S;
use stowage_scheduling::contention::Contention;

/// An engine at a load that it keeps up with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SteadyState {
    pub running: f64,
    /// From 0 to 1.
    pub kv_occupancy: f64,
    pub ttft_s: f64,
    pub tpot_s: f64,
}

/// The steady state of an engine; `None` where requests of that size come faster than they are served, or do not fit.
pub(crate) fn steady_state(
    spec: &EngineSpec,
    per_s: f64,
    prompt: f64,
    output: f64,
    under: &Contention,
) -> Option<SteadyState> {
    let cost = &spec.cost;
    let rate = cost.prefill_rate(under);
    let prefill = per_s * prompt / rate;
    if !spec.fits(prompt, output) || prefill >= 1.0 {
        return None;
    }
    // Little's law for those that decode: R = λ·o·(fixed + slope·R)/(1 − φ).
    let context = kv_tokens(prompt, output);
    let fixed = cost.step_s(0.0, 0.0, under);
    let slope = under.step_s(0.0, cost.per_kv_token_s * context, cost.per_request_s);
    let demand = per_s * output / (1.0 - prefill);
    let left = 1.0 - demand * slope;
    if left <= 0.0 {
        return None;
    }
    let decoding = demand * fixed / left;
    let step_s = cost.step_s(decoding, decoding * context, under);
    let reader = Prefill {
        step_s,
        rate,
        busy_share: prefill,
        tokens_per_step: spec.batching.tokens,
    };
    let prefill_s = reader.latency_s(prompt, decoding);
    let prefilling = per_s * prefill_s;
    let running = decoding + prefilling;
    let fits = running <= spec.batching.requests && running * context <= spec.kv_capacity;
    let kv = (prefilling * prompt + decoding * context) / spec.kv_capacity;
    (fits && prefill <= spec.max_prefill_share(step_s, under)).then_some(SteadyState {
        running,
        kv_occupancy: kv,
        ttft_s: prefill_s + FIRST_TOKEN_OVERHEAD_S,
        tpot_s: step_s / (1.0 - prefill),
    })
}

/// The most requests a second that one engine keeps up with alone.
pub(crate) fn max_rate_per_s(spec: &EngineSpec, prompt: f64, output: f64) -> f64 {
    let (mut keeps_up, mut does_not) = (
        0.0,
        spec.cost.prefill_rate(&Contention::ALONE) / prompt.max(1.0),
    );
    // Halved so often, the rest is below what a float shows.
    for _ in 0..60 {
        let middle = (keeps_up + does_not) / 2.0;
        match steady_state(spec, middle, prompt, output, &Contention::ALONE) {
            Some(_) => keeps_up = middle,
            None => does_not = middle,
        }
    }
    keeps_up
}
