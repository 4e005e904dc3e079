//! What sharing a GPU costs, beside published measurements: NVIDIA's "Interpreting GPU Sharing Results" (Dynamo's documentation),
//! Qwen3-4B on A100 40 GB, 2,048 tokens in and 256 out, one engine a GPU or two. `docs/inside/fleet-simulator.md` prints the same
//! figures.
//!
//! The benchmark is a closed loop of equal requests: clients finish together, and their prompts are read one after the other. A
//! fluid knows no such bursts, so it is replayed request by request here, with [`StepCost`] and [`contention`]. One constant,
//! `SWITCH_OVERHEAD`, is fitted, to the time-slicing rows of 2, 8 and 32 requests; all others are those of `published.md`. The
//! rows of 4 and 16 requests, all rows of SM sharing and of one engine, and the whole node are only checked.

use super::speed::{FIRST_TOKEN_OVERHEAD_S, StepCost};
use super::*;
use std::collections::VecDeque;
use stowage_scheduling::contention::{ComputeSharing, contention};
use stowage_scheduling::units::Bytes;

const PAGE: &str = include_str!("../../../../../docs/inside/fleet-simulator.md");
/// Of the published figure, either way; times to first token are as near as they come.
const THROUGHPUT: f64 = 0.10;
const TIME_PER_TOKEN: f64 = 0.15;

const MODEL: ModelShape = ModelShape::bf16("qwen3-4b", 4_022, 36, 8, 128);
/// With the chat template, more than a step reads.
const PROMPT: f64 = 2060.0;
/// Of a prompt that is in the prefix cache, its last block.
const CACHED_PROMPT: f64 = 16.0;
const OUTPUT: f64 = 256.0;
/// `--max-num-seqs`, as the benchmark's manifests have it.
const MAX_REQUESTS: usize = 32;

struct Mode {
    name: &'static str,
    engines: usize,
    sharing: ComputeSharing,
    /// `--gpu-memory-utilization` of what the engine takes for the GPU's memory.
    grant_mib: f64,
    /// By requests on the GPU, from 2 to 32: tokens a second, ms to first token and ms a token, both medians.
    published: [(usize, [f64; 3]); 5],
    /// Tokens a second of eight GPUs, with 1 to 32 requests for each model.
    node: [f64; 6],
}

const MODES: [Mode; 3] = [
    Mode {
        name: "alone",
        engines: 1,
        sharing: ComputeSharing::Exclusive,
        grant_mib: 0.85 * 39.5 * 1024.0,
        published: [
            (2, [227.5, 48.6, 8.61]),
            (4, [429.1, 49.0, 9.13]),
            (8, [671.2, 331.5, 11.00]),
            (16, [929.2, 431.0, 15.56]),
            (32, [1141.8, 481.8, 26.20]),
        ],
        node: [891.0, 1820.0, 3433.0, 5370.0, 7434.0, 9134.0],
    },
    Mode {
        name: "time-slicing",
        engines: 2,
        sharing: ComputeSharing::TimeSlicing,
        grant_mib: 0.85 * 20_070.0,
        published: [
            (2, [101.1, 216.0, 19.0]),
            (4, [193.0, 374.0, 19.3]),
            (8, [343.9, 571.0, 21.1]),
            (16, [572.0, 731.0, 25.2]),
            (32, [831.4, 777.0, 35.6]),
        ],
        node: [809.0, 1544.0, 2751.0, 4576.0, 6651.0, 7544.0],
    },
    Mode {
        name: "SM sharing",
        engines: 2,
        sharing: ComputeSharing::SmSharing,
        grant_mib: 0.40 * 39.5 * 1024.0,
        published: [
            (2, [144.4, 185.0, 13.2]),
            (4, [259.2, 347.0, 14.1]),
            (8, [456.1, 549.0, 15.4]),
            (16, [722.8, 739.0, 19.3]),
            (32, [1003.4, 786.0, 28.9]),
        ],
        node: [1155.0, 2074.0, 3649.0, 5782.0, 8027.0, 9059.0],
    },
];

struct Request {
    asked_s: f64,
    prompt_left: f64,
    tokens: f64,
    first_s: f64,
}

/// One engine beside others like it that do the same.
struct Replay<'m> {
    mode: &'m Mode,
    spec: EngineSpec,
    now_s: f64,
    /// Asked, and not in the engine.
    waiting: VecDeque<Request>,
    running: Vec<Request>,
}

impl<'m> Replay<'m> {
    fn new(mode: &'m Mode) -> Self {
        let grant = Bytes((mode.grant_mib * 1048576.0) as u64);
        Self {
            mode,
            spec: EngineSpec::new(&MODEL, &GpuSpeed::A100_40GB, 1, grant).unwrap(),
            now_s: 0.0,
            waiting: VecDeque::new(),
            running: Vec::new(),
        }
    }

    /// So many clients an engine, each of which asks again when it is answered: tokens a second of the GPU, ms to first token and
    /// ms a token, both medians.
    fn play(mut self, clients: usize) -> [f64; 3] {
        let (requests, cached) = (requests(clients), self.cached_prompts(clients));
        let prompt = |index| {
            if index < cached {
                CACHED_PROMPT
            } else {
                PROMPT
            }
        };
        let ask = |asked_s, index| Request {
            asked_s,
            prompt_left: prompt(index),
            tokens: 0.0,
            first_s: 0.0,
        };
        self.waiting
            .extend((0..clients).map(|index| ask(index as f64 * 1e-4, index)));
        let (mut asked, mut ttft_ms, mut tpot_ms) = (clients, Vec::new(), Vec::new());
        while ttft_ms.len() < requests {
            for done in self.step() {
                let end_s = self.now_s + FIRST_TOKEN_OVERHEAD_S / 2.0;
                ttft_ms.push(1e3 * (done.first_s - done.asked_s));
                tpot_ms.push(1e3 * (end_s - done.first_s) / (OUTPUT - 1.0));
                if asked < requests {
                    self.waiting.push_back(ask(end_s, asked));
                    asked += 1;
                }
            }
        }
        let seconds = self.now_s + FIRST_TOKEN_OVERHEAD_S / 2.0;
        let tokens = (self.mode.engines * requests) as f64 * OUTPUT;
        [tokens / seconds, median(ttft_ms), median(tpot_ms)]
    }

    /// Prompts that the prefix cache has from the point before, which asks for the same list from its beginning; all or none of
    /// them, for what is used in order and does not fit is gone before it comes again.
    fn cached_prompts(&self, clients: usize) -> usize {
        let before = clients / 2;
        let seen = requests(before) + warm_up(before);
        if before > 0 && seen as f64 * (PROMPT + OUTPUT) <= self.spec.kv_capacity {
            seen - warm_up(clients)
        } else {
            0
        }
    }

    /// A step of the engine, as vLLM fills it: those that decode, then prompts in their order. Answers those that are done.
    fn step(&mut self) -> Vec<Request> {
        let arrived = |request: &Request| request.asked_s + FIRST_TOKEN_OVERHEAD_S / 2.0;
        if let (true, Some(first)) = (self.running.is_empty(), self.waiting.front()) {
            self.now_s = self.now_s.max(arrived(first));
        }
        let decodes: Vec<bool> = self
            .running
            .iter()
            .map(|one| one.prompt_left == 0.0)
            .collect();
        let decoding = decodes.iter().filter(|decodes| **decodes).count() as f64;
        let context = requests::kv_tokens(PROMPT, OUTPUT);
        let fits = (self.spec.kv_capacity / context) as usize;
        let mut budget = self.spec.batching.tokens - decoding;
        let mut read = 0.0;
        for index in 0..MAX_REQUESTS.min(fits) {
            if index == self.running.len() {
                let next = self
                    .waiting
                    .pop_front_if(|one| arrived(one) <= self.now_s && budget > 0.0);
                let Some(next) = next else { break };
                self.running.push(next);
            }
            let request = &mut self.running[index];
            let part = request.prompt_left.min(budget);
            (request.prompt_left, budget, read) =
                (request.prompt_left - part, budget - part, read + part);
        }
        self.now_s += step_s(self.mode, &self.spec.cost, (decoding, context), read);
        for (index, request) in self.running.iter_mut().enumerate() {
            if decodes.get(index) == Some(&true) {
                request.tokens += 1.0;
            } else if request.prompt_left == 0.0 {
                (request.tokens, request.first_s) =
                    (1.0, self.now_s + FIRST_TOKEN_OVERHEAD_S / 2.0);
            }
        }
        self.running
            .extract_if(.., |one| one.tokens >= OUTPUT)
            .collect()
    }
}

/// Seconds of a step beside engines that always do the same.
fn step_s(mode: &Mode, cost: &StepCost, (decoding, context): (f64, f64), read: f64) -> f64 {
    let kv_tokens = decoding * context;
    let work = cost.work(decoding, kv_tokens, (1.0, 1.0 / mode.engines as f64));
    let under = contention(&vec![work; mode.engines], mode.sharing)[0];
    cost.step_s(decoding, kv_tokens, &under) + read / cost.prefill_rate(&under)
}

/// What the benchmark asks at a point of its sweep, after a warm-up.
fn requests(clients: usize) -> usize {
    (10 * clients).max(40)
}

fn warm_up(clients: usize) -> usize {
    (2 * clients).min(16)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

fn off(published: f64, modeled: f64) -> f64 {
    (modeled / published - 1.0).abs()
}

fn cell(published: f64, modeled: f64) -> String {
    let decimals = (2 - published.log10().floor() as i32).max(0) as usize;
    format!("{published:.decimals$} → {modeled:.decimals$}")
}

fn assert_on_page(rows: &[String]) {
    let missing: Vec<&str> = rows
        .iter()
        .map(String::as_str)
        .filter(|row| !PAGE.contains(row))
        .collect();
    assert!(
        missing.is_empty(),
        "fleet-simulator.md lacks:\n{}",
        missing.join("\n")
    );
}

#[test]
fn sharing_a_gpu_costs_what_was_measured() {
    let (mut rows, mut worst) = (Vec::new(), [0.0_f64; 3]);
    for mode in &MODES {
        for (requests, published) in mode.published {
            let modeled = Replay::new(mode).play(requests / mode.engines);
            let [throughput, ttft, tpot] =
                [0, 1, 2].map(|figure| off(published[figure], modeled[figure]));
            assert!(
                throughput < THROUGHPUT && tpot < TIME_PER_TOKEN,
                "{}, {requests}: {modeled:?}, published {published:?}",
                mode.name
            );
            let [rate, first, token] =
                [0, 1, 2].map(|figure| cell(published[figure], modeled[figure]));
            rows.push(format!(
                "| {} | {requests} | {rate} | {token} | {first} |",
                mode.name
            ));
            worst = [
                worst[0].max(throughput),
                worst[1].max(tpot),
                worst[2].max(ttft),
            ];
        }
    }
    let [rate, token, first] = worst.map(|off| (100.0 * off).ceil());
    rows.push(format!("throughputs are within {rate} %, times per token within {token} %, times to first token within {first} %"));
    assert_on_page(&rows);
}

#[test]
fn a_node_with_two_engines_a_gpu_has_the_throughput_that_was_measured() {
    let row = |mode: &Mode| {
        let cells = mode
            .node
            .iter()
            .zip([1, 2, 4, 8, 16, 32])
            .map(|(published, clients)| {
                let modeled = 8.0 * Replay::new(mode).play(clients)[0];
                assert!(
                    off(*published, modeled) < THROUGHPUT,
                    "{}, {clients}: {modeled}, published {published}",
                    mode.name
                );
                cell(*published, modeled)
            });
        format!(
            "| {} | {} |",
            mode.name,
            cells.collect::<Vec<_>>().join(" | ")
        )
    };
    assert_on_page(&MODES.iter().map(row).collect::<Vec<_>>());
}
