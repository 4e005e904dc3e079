//! How long an inference of fraud detection takes, from its arrival to its answer, alone on its GPU or beside engines.
//!
//! A queue on one GPU: inferences come as a Poisson process and are done one after the other. An engine beside them is asked by
//! another Poisson process, and is busy from a request's first step to its last. A process that has work has the GPU in turn, for
//! one inference or one step, which is not interrupted:
//!
//! ```text
//! step = fixed + decoding · per request + KV tokens · per KV token + prompt tokens ÷ prefill rate
//! ```
//!
//! with at most 2,048 prompt tokens a step (`--max-num-batched-tokens`), and the constants of [`StepCost`]. For an 8B model on an
//! A100 a step without prompts takes 11 ms, and one with 2,048 tokens of prompts 190 ms. A GPU that switches within a step, by
//! time slices of a few milliseconds, would answer sooner and take twice as long for each inference instead.

use crate::simulate::fleet::engines::speed::StepCost;
use crate::simulate::fleet::engines::{GpuSpeed, ModelShape};
use crate::simulate::fleet::scenarios::quantile;
use crate::simulate::fleet::traffic::RequestSize;
use std::collections::{BTreeMap, VecDeque};
use stowage_scheduling::testkit::random::Random;

/// Fraud detection: mean milliseconds between two inferences, and the range of one that has the GPU to itself.
const MEAN_INFERENCE_GAP_MS: f64 = 1000.0 / 15.0;
const INFERENCE_MS: (f64, f64) = (10.0, 15.0);
/// Milliseconds between two requests of an engine, on average.
const MEAN_REQUEST_GAP_MS: f64 = 1000.0;
const REQUEST_SIZE: RequestSize = RequestSize::CONVERSATION;

/// The median and the 99th percentile in milliseconds. `hours_by_neighbors` are hours by the number of engines beside.
pub(crate) fn quantiles(
    hours_by_neighbors: &BTreeMap<usize, f64>,
    inferences: usize,
    seed: u64,
) -> [f64; 2] {
    let mut draws = Random::seeded(seed, 9);
    let hours: f64 = hours_by_neighbors.values().sum();
    let mut took = Vec::new();
    for (engines, time) in hours_by_neighbors {
        took.extend(inference_latencies(
            *engines,
            (inferences as f64 * time / hours) as usize,
            &mut draws,
        ));
    }
    [0.5, 0.99].map(|share| quantile(&mut took, share))
}

/// Milliseconds that each of so many inferences took beside so many engines.
fn inference_latencies(engines: usize, inferences: usize, draws: &mut Random) -> Vec<f64> {
    let mut engines: Vec<Engine> = (0..engines).map(|_| Engine::new(draws)).collect();
    let (mut now, mut next) = (0.0, exponential(MEAN_INFERENCE_GAP_MS, draws));
    let mut waiting: VecDeque<f64> = VecDeque::new();
    let mut took = Vec::with_capacity(inferences);
    // Whose turn it is: 0 is fraud detection's.
    let mut turn = 0;
    while took.len() < inferences {
        while next <= now {
            waiting.push_back(next);
            next += exponential(MEAN_INFERENCE_GAP_MS, draws);
        }
        engines
            .iter_mut()
            .for_each(|engine| engine.arrive(now, draws));
        let participants = engines.len() + 1;
        let has_work = |participant: &usize| match participant.checked_sub(1) {
            None => !waiting.is_empty(),
            Some(engine) => engines[engine].has_work(),
        };
        let Some(participant) = (turn..turn + participants)
            .map(|index| index % participants)
            .find(has_work)
        else {
            now = engines
                .iter()
                .map(|engine| engine.next_request)
                .fold(next, f64::min);
            continue;
        };
        turn = (participant + 1) % participants;
        match participant.checked_sub(1) {
            Some(engine) => now += engines[engine].step(),
            None => {
                now += INFERENCE_MS.0 + (INFERENCE_MS.1 - INFERENCE_MS.0) * draws.unit_interval();
                took.extend(waiting.pop_front().map(|came| now - came));
            }
        }
    }
    took
}

struct Engine {
    cost: StepCost,
    /// When its next request comes.
    next_request: f64,
    /// Tokens of prompts that are not read yet, by request.
    prompts: VecDeque<f64>,
    /// Tokens that each request still gets.
    decoding: Vec<f64>,
}

impl Engine {
    fn new(draws: &mut Random) -> Self {
        Self {
            cost: StepCost::new(&ModelShape::LLAMA_8B, &GpuSpeed::A100, 1),
            next_request: exponential(MEAN_REQUEST_GAP_MS, draws),
            prompts: VecDeque::new(),
            decoding: Vec::new(),
        }
    }

    fn arrive(&mut self, now: f64, draws: &mut Random) {
        while self.next_request <= now {
            self.prompts.push_back(REQUEST_SIZE.prompt);
            self.next_request += exponential(MEAN_REQUEST_GAP_MS, draws);
        }
    }

    fn has_work(&self) -> bool {
        !self.prompts.is_empty() || !self.decoding.is_empty()
    }

    /// Does a step, and answers how many milliseconds it took.
    fn step(&mut self) -> f64 {
        let decoding = self.decoding.len() as f64;
        let kv_tokens = decoding * (REQUEST_SIZE.prompt + REQUEST_SIZE.output / 2.0);
        self.decoding.iter_mut().for_each(|left| *left -= 1.0);
        self.decoding.retain(|left| *left > 0.0);
        let mut free_tokens = GpuSpeed::A100.batching.tokens - decoding;
        let mut tokens = 0.0;
        while let Some(prompt) = self.prompts.front_mut().filter(|_| free_tokens > 0.0) {
            let read = prompt.min(free_tokens);
            (*prompt, free_tokens, tokens) = (*prompt - read, free_tokens - read, tokens + read);
            if *prompt <= 0.0 {
                self.prompts.pop_front();
                self.decoding.push(REQUEST_SIZE.output);
            }
        }
        1000.0 * (self.cost.step_s(decoding, kv_tokens) + tokens / self.cost.prefill_rate)
    }
}

fn exponential(mean: f64, draws: &mut Random) -> f64 {
    -(1.0 - draws.unit_interval()).ln() * mean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inference_waits_for_steps_beside_an_engine_and_hardly_at_all_alone() {
        let of = |engines: usize| quantiles(&BTreeMap::from([(engines, 1.0)]), 20_000, 42);
        let ([p50, p99], [_, beside], [_, beside_two]) = (of(0), of(1), of(2));
        assert!((12.0..14.0).contains(&p50) && p99 < 45.0, "{p50} {p99}");
        assert!(
            beside > 2.0 * p99 && beside_two > beside,
            "{beside} {beside_two}"
        );
    }

    #[test]
    fn a_step_of_prompts_is_as_long_as_their_compute() {
        let mut engine = Engine::new(&mut Random::seeded(1, 1));
        engine.prompts = VecDeque::from([REQUEST_SIZE.prompt, REQUEST_SIZE.prompt]);
        let first = engine.step();
        assert!((185.0..200.0).contains(&first), "{first}");
        assert_eq!((engine.prompts.len(), engine.decoding.len()), (1, 1));
    }
}
