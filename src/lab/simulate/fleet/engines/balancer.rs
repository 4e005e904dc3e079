//! A load balancer that sends each request to the engine with the most free KV cache: as a fluid, in proportion to it.

use super::engine::{Engine, EngineState};
use super::requests::Requests;

/// Which share of the arrivals each engine gets; they add up to 1. Where no engine has any room, the shares are as the queues
/// are short. Empty if none serves.
pub fn split_arrivals<'a>(
    arrivals: &Requests,
    engines: impl IntoIterator<Item = &'a Engine>,
) -> Vec<f64> {
    let engines: Vec<&Engine> = engines.into_iter().collect();
    let free = engines
        .iter()
        .map(|engine| engine.free_kv_tokens(arrivals.prompt, arrivals.output));
    let weights = normalize(free.collect());
    if !weights.is_empty() {
        return weights;
    }
    let serves = |engine: &Engine| engine.state() == EngineState::Serving;
    let short = engines.iter().map(|engine| {
        if serves(engine) {
            1.0 / (1.0 + engine.waiting())
        } else {
            0.0
        }
    });
    normalize(short.collect())
}

fn normalize(weights: Vec<f64>) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    if sum > 0.0 {
        weights.into_iter().map(|weight| weight / sum).collect()
    } else {
        Vec::new()
    }
}
