//! The requests in one engine, and what happens to them in a stretch of time.

use super::EngineSpec;
use super::outcome::{AbortedRequests, StepOutcome};
use super::requests::{Queue, Requests, kv_tokens};
use super::speed::FIRST_TOKEN_OVERHEAD_S;
use stowage_scheduling::autoscaling::{EngineFigures, Permille};
use stowage_scheduling::contention::{Contention, EngineWork};

/// A stretch is cut into parts of at most this many seconds, within which rates do not change.
const MAX_SUBSTEP_S: f64 = 1.0;
/// Where requests wait for room, a part is so much shorter than a request decodes: what one leaves free, the next one takes. Of
/// those parts there are at most [`MAX_FINE_SUBSTEPS`] in one of the others.
const FINE_SUBSTEPS_PER_DECODE: f64 = 10.0;
const MAX_FINE_SUBSTEPS: f64 = 25.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineState {
    Serving,
    /// It finishes what it has and takes no more.
    Draining,
    Asleep,
}

/// One engine. Its clock starts at 0 and counts what it is stepped by.
#[derive(Debug, Clone, PartialEq)]
pub struct Engine {
    pub spec: EngineSpec,
    state: EngineState,
    now_s: f64,
    waiting: Queue,
    prefilling: f64,
    decoding: f64,
    /// Mean size of those that prefill and decode.
    prompt: f64,
    output: f64,
    /// Seconds for a token of those that decode.
    tpot_s: Option<f64>,
}

/// An engine with requests in it does not sleep.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{requests:.1} requests are in the engine; drain it before it sleeps")]
pub struct EngineBusy {
    pub requests: f64,
}

impl Engine {
    pub fn new(spec: EngineSpec) -> Self {
        Self {
            spec,
            state: EngineState::Serving,
            now_s: 0.0,
            waiting: Queue::default(),
            prefilling: 0.0,
            decoding: 0.0,
            prompt: 1.0,
            output: 1.0,
            tpot_s: None,
        }
    }

    pub fn state(&self) -> EngineState {
        self.state
    }

    pub fn waiting(&self) -> f64 {
        self.waiting.count()
    }

    /// Requests that prefill or decode: what an engine reports as running.
    pub fn running(&self) -> f64 {
        self.prefilling + self.decoding
    }

    pub fn is_idle(&self) -> bool {
        self.waiting() + self.running() < 0.01
    }

    /// Tokens in the KV cache.
    pub(crate) fn kv_tokens(&self) -> f64 {
        self.prefilling * self.prompt + self.kv_of_decoding()
    }

    fn kv_of_decoding(&self) -> f64 {
        self.decoding * (self.prompt + self.output / 2.0)
    }

    /// What its neighbors have to share each of its GPUs with, where so much of the SMs is its own.
    pub(crate) fn work(&self, sms: f64) -> EngineWork {
        let busy = busy_share(self.running());
        self.spec
            .cost
            .work(self.decoding, self.kv_of_decoding(), (busy, sms))
    }

    /// The share of the KV cache that is in use.
    pub(crate) fn kv_occupancy(&self) -> f64 {
        (self.kv_tokens() / self.spec.kv_capacity).clamp(0.0, 1.0)
    }

    /// KV tokens that are neither used nor reserved, less what those that wait will take; 0 if the engine takes no requests.
    pub(crate) fn free_kv_tokens(&self, prompt: f64, output: f64) -> f64 {
        if self.state != EngineState::Serving {
            return 0.0;
        }
        let room =
            self.spec.max_concurrent_requests(prompt, output) - self.running() - self.waiting();
        let free =
            self.spec.kv_capacity - self.reserved() - self.waiting() * kv_tokens(prompt, output);
        free.min(room * kv_tokens(prompt, output)).max(0.0)
    }

    /// What its metrics page says.
    pub fn reported_figures(&self) -> EngineFigures {
        match self.state {
            EngineState::Asleep => EngineFigures::Asleep,
            EngineState::Draining => EngineFigures::Draining,
            EngineState::Serving => EngineFigures::Serving {
                kv_cache: Permille::from_share(self.kv_occupancy()),
                waiting: Some(self.waiting().round() as u64),
                running: Some(self.running().round() as u64),
            },
        }
    }

    pub fn drain(&mut self) {
        if self.state == EngineState::Serving {
            self.state = EngineState::Draining;
        }
    }

    pub fn sleep(&mut self) -> Result<(), EngineBusy> {
        if !self.is_idle() {
            return Err(EngineBusy {
                requests: self.waiting() + self.running(),
            });
        }
        self.state = EngineState::Asleep;
        Ok(())
    }

    /// It serves; how long waking takes is the owner's to count.
    pub fn wake(&mut self) {
        self.state = EngineState::Serving;
    }

    /// Seconds that its requests take for a token now; `None` without any that decodes.
    pub fn tpot_s(&self) -> Option<f64> {
        self.tpot_s
    }

    /// Takes all requests out, as when the engine is killed.
    pub fn abandon(&mut self) -> AbortedRequests {
        let waiting = self.waiting.take_all(self.now_s);
        let running = Requests::new(self.running(), self.prompt, self.output);
        (self.prefilling, self.decoding) = (0.0, 0.0);
        AbortedRequests { waiting, running }
    }

    /// `seconds` pass, over which `arrivals` come evenly, beside neighbors on its GPUs. What comes to an engine that does not
    /// serve waits.
    pub fn step(&mut self, seconds: f64, arrivals: Requests, under: &Contention) -> StepOutcome {
        let mut outcome = StepOutcome::default();
        let parts = (seconds / MAX_SUBSTEP_S).ceil().max(1.0);
        let part_s = seconds / parts;
        let fits = self.spec.fits(arrivals.prompt, arrivals.output);
        if !fits {
            outcome.refused = arrivals.count;
        }
        for _ in 0..parts as usize {
            if fits {
                self.waiting.push(self.now_s, arrivals.scaled(1.0 / parts));
            }
            if self.state == EngineState::Asleep || part_s <= 0.0 {
                self.now_s += part_s;
                continue;
            }
            let fine = self.substeps(part_s, under);
            for _ in 0..fine as usize {
                self.now_s += part_s / fine;
                self.run_substep(part_s / fine, under, &mut outcome);
                outcome.busy_share += busy_share(self.running()) / (parts * fine);
            }
        }
        outcome
    }

    /// Tokens that running requests have, or may have kept for them until they are done.
    fn reserved(&self) -> f64 {
        self.running() * kv_tokens(self.prompt, self.output)
    }

    /// Seconds of a decode step.
    fn step_s(&self, under: &Contention) -> f64 {
        self.spec
            .cost
            .step_s(self.decoding, self.kv_of_decoding(), under)
    }

    /// Into how many parts a part is cut, so that a full engine is kept full.
    fn substeps(&self, part_s: f64, under: &Contention) -> f64 {
        let kv_left = self.spec.kv_capacity
            - self.reserved()
            - self.waiting() * kv_tokens(self.prompt, self.output);
        let slots_left = self.spec.batching.requests - self.running() - self.waiting();
        if kv_left > 0.0 && slots_left > 0.0 {
            return 1.0;
        }
        (part_s * FINE_SUBSTEPS_PER_DECODE / (self.step_s(under) * self.output.max(1.0)))
            .ceil()
            .clamp(1.0, MAX_FINE_SUBSTEPS)
    }

    fn run_substep(&mut self, part_s: f64, under: &Contention, outcome: &mut StepOutcome) {
        let step_s = self.step_s(under);
        let alone_step_s = self.step_s(&Contention::ALONE);
        let rate = self.spec.cost.prefill_rate(under);
        let started_s = self.now_s - part_s;
        let admitted = self.admit(
            started_s,
            rate * part_s * self.spec.max_prefill_share(step_s, under),
        );
        let prompt_tokens: f64 = admitted
            .iter()
            .map(|(_, group)| group.count * group.prompt)
            .sum();
        let busy_with_prefill = prompt_tokens / (rate * part_s);
        let arrived: Requests = admitted
            .iter()
            .fold(Requests::default(), |sum, (_, group)| sum.plus(*group));
        let prefill = Prefill {
            step_s,
            rate,
            busy_share: busy_with_prefill,
            tokens_per_step: self.spec.batching.tokens,
        };
        for (waited_s, group) in &admitted {
            let ttft_s =
                waited_s + prefill.latency_s(group.prompt, self.decoding) + FIRST_TOKEN_OVERHEAD_S;
            outcome.first_tokens.push((ttft_s, group.count));
        }
        // Those that prefill take the time that it takes without the way to the client, so that rates and times agree.
        let prefill_s = prefill.latency_s(
            if arrived.count > 0.0 {
                arrived.prompt
            } else {
                self.prompt
            },
            self.decoding,
        );
        let decoded = flow(self.prefilling, arrived.count, part_s, prefill_s);
        let tpot_s = step_s / (1.0 - busy_with_prefill);
        let done = flow(
            self.decoding,
            decoded.outflow,
            part_s,
            tpot_s * self.output.max(1.0),
        );
        (self.prefilling, self.decoding) = (decoded.remaining, done.remaining);
        outcome.prompt_tokens += prompt_tokens;
        outcome.output_tokens += done.outflow * self.output;
        self.tpot_s = (self.decoding > 0.0).then_some(tpot_s);
        if done.outflow > 0.0 {
            outcome.completed.push((tpot_s, done.outflow));
            let alone = self.spec.cost.prefill_rate(&Contention::ALONE);
            let alone_s = alone_step_s / (1.0 - prompt_tokens / (alone * part_s));
            if tpot_s > 2.0 * alone_s {
                outcome.slowed += done.outflow;
            }
        }
    }

    /// Takes from the queue what the KV cache, the number of sequences and the time for prompts have room for.
    fn admit(&mut self, started_s: f64, prompt_tokens: f64) -> Vec<(f64, Requests)> {
        let mut admitted = Vec::new();
        let mut tokens = prompt_tokens;
        loop {
            let kv = self.spec.kv_capacity - self.reserved();
            let slots = self.spec.batching.requests - self.running();
            let inside = admitted
                .iter()
                .fold(Requests::default(), |sum: Requests, (_, group)| {
                    sum.plus(*group)
                });
            let room = |group: &Requests| {
                let kv = kv - inside.count * kv_tokens(inside.prompt, inside.output);
                let by_kv = kv / kv_tokens(group.prompt, group.output);
                by_kv
                    .min(slots - inside.count)
                    .min(tokens / group.prompt)
                    .max(0.0)
            };
            let Some((waited_s, group)) = self.waiting.pop(started_s, room) else {
                break;
            };
            tokens -= group.count * group.prompt;
            admitted.push((waited_s, group));
        }
        let new = admitted
            .iter()
            .fold(Requests::default(), |sum, (_, group)| sum.plus(*group));
        let all = Requests {
            count: self.running(),
            prompt: self.prompt,
            output: self.output,
            waited_s: 0.0,
        }
        .plus(new);
        if all.count > 0.0 {
            (self.prompt, self.output) = (all.prompt, all.output);
        }
        admitted
    }
}

/// How prompts are read in a part of a stretch.
pub(super) struct Prefill {
    /// Seconds of a decode step, beside which prompts are read.
    pub step_s: f64,
    /// Prompt tokens a second.
    pub rate: f64,
    /// The share of the time that it takes.
    pub busy_share: f64,
    /// Prompt tokens in a step.
    pub tokens_per_step: f64,
}

impl Prefill {
    /// From admission to the first token: half of the step under way, a wait for prompts before it (M/D/1), its own tokens, and
    /// the steps of those that decode beside it.
    pub(crate) fn latency_s(&self, prompt: f64, decoding: f64) -> f64 {
        let own_s = prompt / self.rate;
        let under_way_s = decoding.min(1.0) * self.step_s / 2.0;
        let before_s = self.busy_share / (2.0 * (1.0 - self.busy_share)) * own_s;
        under_way_s + before_s + own_s + (prompt / self.tokens_per_step).max(1.0) * self.step_s
    }
}

/// The share of its time for which an engine has something to do: in which a Poisson number of requests is not zero.
pub(crate) fn busy_share(running: f64) -> f64 {
    1.0 - (-running).exp()
}

/// What is left of a stock and what has left it.
struct Flow {
    remaining: f64,
    outflow: f64,
}

/// A stock that each thing leaves after `stay_s` on average, while `inflow` comes evenly: the solution of `x' = in − x / stay`.
fn flow(stock: f64, inflow: f64, part_s: f64, stay_s: f64) -> Flow {
    let stays = (-part_s / stay_s).exp();
    let left = stock * stays + inflow * (stay_s / part_s) * (1.0 - stays);
    Flow {
        remaining: left,
        outflow: (stock + inflow - left).max(0.0),
    }
}
