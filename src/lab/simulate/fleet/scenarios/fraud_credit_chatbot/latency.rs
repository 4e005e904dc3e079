//! How long an inference of fraud detection takes, from its arrival to its answer, alone on its GPU or beside engines.
//!
//! A queue on one GPU: inferences come as a Poisson process and are done one after the other. An engine beside them is asked by
//! another Poisson process, once a second in its hours, and is busy from a request's first step to its last. Time slices are shorter than steps, so a process
//! that has work has an equal part of the GPU at any time ([`contention`]): beside a busy engine an inference takes 2.3 times as
//! long, and waits for no step to end.
//!
//! An engine reads at most 2,048 prompt tokens a step (`--max-num-batched-tokens`), with the constants of [`StepCost`]. For an 8B
//! model on an A100 a step without prompts takes 11 ms, and one with 2,048 tokens of prompts 190 ms.

use crate::simulate::fleet::engines::speed::StepCost;
use crate::simulate::fleet::engines::{Batching, GpuSpeed, ModelShape};
use crate::simulate::fleet::scenarios::{mean, quantile};
use crate::simulate::fleet::traffic::RequestSize;
use std::collections::{BTreeMap, VecDeque};
use stowage_scheduling::contention::{ComputeSharing, Contention, EngineWork, contention};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit::random::Random;

/// Fraud detection: mean milliseconds between two inferences, and the range of one that has the GPU to itself.
const MEAN_INFERENCE_GAP_MS: f64 = 1000.0 / 15.0;
const INFERENCE_MS: (f64, f64) = (10.0, 15.0);
const REQUEST_SIZE: RequestSize = RequestSize::CONVERSATION;

/// A GPU and what asks its processes.
pub(crate) struct GpuQueue {
    draws: Random,
    engines: BTreeMap<PodUid, Engine>,
    /// Milliseconds since it began to serve, and when the next inference comes: never without fraud detection.
    now: f64,
    next: f64,
    waiting: VecDeque<f64>,
    /// What the inference under way still takes of the whole GPU; 0 if there is none.
    left: f64,
    /// Milliseconds that each inference took.
    took: Vec<f64>,
}

/// What engines report of the time that was served last.
pub(crate) struct Served {
    /// Mean milliseconds of the inferences that ended; `None` if none did.
    pub mean_ms: Option<f64>,
    /// The shares of the time for which fraud detection had work, and each engine beside it.
    pub fraud_busy: f64,
    pub busy: BTreeMap<PodUid, f64>,
}

impl GpuQueue {
    pub fn new(seed: u64, has_fraud: bool) -> Self {
        let mut draws = Random::seeded(seed, 9);
        let first = exponential(MEAN_INFERENCE_GAP_MS, &mut draws);
        Self {
            next: if has_fraud { first } else { f64::INFINITY },
            draws,
            engines: BTreeMap::new(),
            now: 0.0,
            waiting: VecDeque::new(),
            left: 0.0,
            took: Vec::new(),
        }
    }

    /// Serves for so many milliseconds with the engines of these pods, each asked at such gaps on average.
    pub fn serve(&mut self, ms: f64, gaps_ms: &BTreeMap<PodUid, f64>) -> Served {
        let (now, draws) = (self.now, &mut self.draws);
        self.engines.retain(|uid, _| gaps_ms.contains_key(uid));
        for (uid, gap_ms) in gaps_ms {
            let engine = self.engines.entry(uid.clone());
            let engine = engine.or_insert_with(|| Engine::new(now, *gap_ms, draws));
            engine.mean_gap_ms = *gap_ms;
        }
        let (end, before) = (now + ms, self.took.len());
        let mut busy_ms = vec![0.0; 1 + gaps_ms.len()];
        while self.now < end {
            self.begin_work();
            let engines = || self.engines.values();
            let left = || std::iter::once(self.left).chain(engines().map(|one| one.left));
            let busy = || left().filter(|left| *left > 0.0);
            let slowdown = slowdown(busy().count());
            let arrivals = engines().map(|engine| engine.next_request);
            let ends = busy().map(|left| self.now + left * slowdown);
            let until = arrivals.chain(ends).fold(self.next.min(end), f64::min);
            let passed = until - self.now;
            for (sum, left) in busy_ms.iter_mut().zip(left()) {
                *sum += if left > 0.0 { passed } else { 0.0 };
            }
            self.work(passed / slowdown, until);
        }
        let took = &self.took[before..];
        let mut shares = busy_ms.into_iter().map(|busy| busy / ms);
        Served {
            mean_ms: (!took.is_empty()).then(|| mean(took)),
            fraud_busy: shares.next().unwrap_or(0.0),
            busy: self.engines.keys().cloned().zip(shares).collect(),
        }
    }

    /// Takes what has come by now.
    fn begin_work(&mut self) {
        while self.next <= self.now {
            self.waiting.push_back(self.next);
            self.next += exponential(MEAN_INFERENCE_GAP_MS, &mut self.draws);
        }
        if self.left == 0.0 && !self.waiting.is_empty() {
            let more = (INFERENCE_MS.1 - INFERENCE_MS.0) * self.draws.unit_interval();
            self.left = INFERENCE_MS.0 + more;
        }
        for engine in self.engines.values_mut() {
            engine.arrive(self.now, &mut self.draws);
            engine.go_on();
        }
    }

    /// Does so many milliseconds of everyone's work, until then.
    fn work(&mut self, done: f64, until: f64) {
        self.now = until;
        for engine in self.engines.values_mut() {
            engine.left = after(engine.left, done);
        }
        if self.left > 0.0 {
            self.left = after(self.left, done);
            if self.left == 0.0 {
                let came = self.waiting.pop_front();
                self.took.extend(came.map(|came| until - came));
            }
        }
    }

    /// The median and the 99th percentile in milliseconds.
    pub fn quantiles(&mut self) -> [f64; 2] {
        [0.5, 0.99].map(|share| quantile(&mut self.took, share))
    }
}

/// By how much each of so many processes that have work takes longer.
fn slowdown(busy: usize) -> f64 {
    let all = contention(
        &vec![EngineWork::job(1.0); busy],
        ComputeSharing::TimeSlicing,
    );
    all.first().map_or(1.0, |under| under.compute)
}

/// What is left, without what rounding leaves: after a day, a time in milliseconds has a step of 1.5e-8.
fn after(left: f64, done: f64) -> f64 {
    if left - done > 1e-6 { left - done } else { 0.0 }
}

struct Engine {
    cost: StepCost,
    mean_gap_ms: f64,
    /// When its next request comes.
    next_request: f64,
    /// Tokens of prompts that are not read yet, by request.
    prompts: VecDeque<f64>,
    /// Tokens that each request still gets.
    decoding: Vec<f64>,
    /// Milliseconds that the step under way still takes of the whole GPU; 0 if there is none.
    left: f64,
}

impl Engine {
    fn new(now: f64, mean_gap_ms: f64, draws: &mut Random) -> Self {
        Self {
            cost: StepCost::new(&ModelShape::LLAMA_8B, &GpuSpeed::A100, 1),
            mean_gap_ms,
            next_request: now + exponential(mean_gap_ms, draws),
            prompts: VecDeque::new(),
            decoding: Vec::new(),
            left: 0.0,
        }
    }

    fn arrive(&mut self, now: f64, draws: &mut Random) {
        while self.next_request <= now {
            self.prompts.push_back(REQUEST_SIZE.prompt);
            self.next_request += exponential(self.mean_gap_ms, draws);
        }
    }

    /// Begins a step, if none is under way and there is something to do.
    fn go_on(&mut self) {
        if self.left == 0.0 && !(self.prompts.is_empty() && self.decoding.is_empty()) {
            self.left = self.step();
        }
    }

    /// Does a step, and answers how many milliseconds it took.
    fn step(&mut self) -> f64 {
        let decoding = self.decoding.len() as f64;
        let kv_tokens = decoding * (REQUEST_SIZE.prompt + REQUEST_SIZE.output / 2.0);
        self.decoding.iter_mut().for_each(|left| *left -= 1.0);
        self.decoding.retain(|left| *left > 0.0);
        let mut free_tokens = Batching::default_on(&GpuSpeed::A100).tokens - decoding;
        let mut tokens = 0.0;
        while let Some(prompt) = self.prompts.front_mut().filter(|_| free_tokens > 0.0) {
            let read = prompt.min(free_tokens);
            (*prompt, free_tokens, tokens) = (*prompt - read, free_tokens - read, tokens + read);
            if *prompt <= 0.0 {
                self.prompts.pop_front();
                self.decoding.push(REQUEST_SIZE.output);
            }
        }
        let alone = &Contention::ALONE;
        let step_s = self.cost.step_s(decoding, kv_tokens, alone);
        1000.0 * (step_s + tokens / self.cost.prefill_rate(alone))
    }
}

fn exponential(mean: f64, draws: &mut Random) -> f64 {
    -(1.0 - draws.unit_interval()).ln() * mean
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::contention::SWITCH_OVERHEAD;
    use stowage_scheduling::testkit::uid;

    /// These engines with a request a second each.
    fn busy(engines: &[&str]) -> BTreeMap<PodUid, f64> {
        engines.iter().map(|name| (uid(name), 1000.0)).collect()
    }

    #[test]
    fn an_inference_takes_turns_with_engines_and_waits_hardly_at_all_alone() {
        let of = |engines: usize| {
            let mut gpu = GpuQueue::new(42, true);
            gpu.serve(1.2e6, &busy(&["a", "b"][..engines]));
            gpu.quantiles()
        };
        let ([p50, p99], [beside_p50, beside], [_, beside_two]) = (of(0), of(1), of(2));
        assert!((12.0..14.0).contains(&p50) && p99 < 45.0, "{p50} {p99}");
        assert!(
            beside_p50 > 2.0 * p50 && beside > 2.0 * p99 && beside_two > beside,
            "{beside_p50} {beside} {beside_two}"
        );
    }

    #[test]
    fn an_engine_that_stays_keeps_its_requests_and_one_that_comes_has_none() {
        let mut gpu = GpuQueue::new(42, true);
        gpu.serve(6e4, &busy(&["leaves", "stays"]));
        let before = gpu.engines[&uid("stays")].decoding.len();
        let served = gpu.serve(1.0, &busy(&["comes", "stays"]));
        assert!(before > 0 && gpu.engines[&uid("stays")].decoding.len() >= before - 1);
        assert_eq!(
            served.busy.keys().collect::<Vec<_>>(),
            [&uid("comes"), &uid("stays")]
        );
        assert_eq!(
            (served.busy[&uid("comes")], served.busy[&uid("stays")]),
            (0.0, 1.0)
        );
    }

    #[test]
    fn an_inference_beside_a_busy_engine_takes_as_long_as_the_share_of_the_gpu_says() {
        assert_eq!([0, 1].map(slowdown), [1.0, 1.0]);
        assert_eq!(slowdown(2), 2.0 * (1.0 + SWITCH_OVERHEAD));
        assert_eq!(slowdown(3), 3.0 * (1.0 + SWITCH_OVERHEAD));
    }

    #[test]
    fn a_step_of_prompts_is_as_long_as_their_compute() {
        let mut engine = Engine::new(0.0, 1000.0, &mut Random::seeded(1, 1));
        engine.prompts = VecDeque::from([REQUEST_SIZE.prompt, REQUEST_SIZE.prompt]);
        let first = engine.step();
        assert!((185.0..200.0).contains(&first), "{first}");
        assert_eq!((engine.prompts.len(), engine.decoding.len()), (1, 1));
    }
}
