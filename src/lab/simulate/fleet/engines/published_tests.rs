//! The model beside published measurements; `published.md` has the sources and prints the same figures.
//!
//! Times per token and throughputs are held within [`RATES`], times to first token, which depend on the client and on how
//! requests happen to meet, within [`FIRST_TOKENS`].

use super::*;
use stowage_scheduling::contention::Contention;
use stowage_scheduling::units::Bytes;

/// Of the published figure, either way.
const RATES: f64 = 0.16;
const FIRST_TOKENS: f64 = 0.40;

const TABLE: &str = include_str!("published.md");

/// Requests of ShareGPT in Llama's tokens, as a run of the same benchmark reports them: prompt and output.
const SHAREGPT: (f64, f64) = (213.0, 214.0);
/// The same prompts, answered by phi-4.
const SHAREGPT_PHI_4: (f64, f64) = (215.0, 98.0);

/// Nine tenths of a GPU, as vLLM grants itself.
fn engine(model: &ModelShape, gpu: &GpuSpeed, gpus: u32) -> EngineSpec {
    EngineSpec::new(model, gpu, gpus, Bytes(gpu.memory.0 / 10 * 9)).unwrap()
}

struct Figure {
    what: &'static str,
    published: f64,
    modeled: f64,
    tolerance: f64,
}

fn rate(what: &'static str, published: f64, modeled: f64) -> Figure {
    Figure {
        what,
        published,
        modeled,
        tolerance: RATES,
    }
}

fn first_token(what: &'static str, published: f64, modeled: f64) -> Figure {
    Figure {
        what,
        published,
        modeled,
        tolerance: FIRST_TOKENS,
    }
}

/// Each figure is within its tolerance, and the table shows it as it is.
fn check(figures: &[Figure]) {
    let off = |figure: &&Figure| (figure.modeled / figure.published - 1.0).abs() > figure.tolerance;
    let rows = |figures: Vec<&Figure>| {
        figures
            .into_iter()
            .map(Figure::row)
            .collect::<Vec<_>>()
            .join("\n")
    };
    let wrong = rows(figures.iter().filter(off).collect());
    assert!(wrong.is_empty(), "beyond the tolerance:\n{wrong}");
    let missing = rows(
        figures
            .iter()
            .filter(|figure| !TABLE.contains(&figure.row()))
            .collect(),
    );
    assert!(missing.is_empty(), "published.md lacks:\n{missing}");
}

impl Figure {
    /// A row of the table, with three digits of what is modeled.
    fn row(&self) -> String {
        let decimals = (2 - self.modeled.abs().log10().floor() as i32).max(0) as usize;
        let off = 100.0 * (self.modeled / self.published - 1.0);
        format!(
            "| {} | {} | {:.decimals$} | {off:+.0} % |",
            self.what, self.published, self.modeled
        )
    }
}

fn mean(samples: &[(f64, f64)]) -> f64 {
    let requests: f64 = samples.iter().map(|(_, requests)| requests).sum();
    samples
        .iter()
        .map(|(seconds, requests)| seconds * requests)
        .sum::<f64>()
        / requests
}

/// A batch of 8 that is read at once and written in step: 32 tokens in, 128 out. In seconds.
fn batch_of_8(spec: &EngineSpec) -> f64 {
    let (cost, alone) = (&spec.cost, &Contention::ALONE);
    let first_s = cost.step_s(0.0, 0.0, alone) + 8.0 * 32.0 / cost.prefill_rate(alone);
    first_s + 127.0 * cost.step_s(8.0, 8.0 * (32.0 + 64.0), alone)
}

/// Mean time to first token and mean time per output token.
struct Served {
    ttft_s: f64,
    tpot_s: f64,
}

/// So many requests at a steady rate, and until all but the last are done.
fn served(spec: EngineSpec, (prompt, output): (f64, f64), requests: f64, per_s: f64) -> Served {
    let mut engine = Engine::new(spec);
    let mut all = engine.step(
        requests / per_s,
        Requests::new(requests, prompt, output),
        &Contention::ALONE,
    );
    while engine.waiting() + engine.running() > 1.0 {
        let more = engine.step(1.0, Requests::default(), &Contention::ALONE);
        all.first_tokens.extend(more.first_tokens);
        all.completed.extend(more.completed);
    }
    Served {
        ttft_s: mean(&all.first_tokens),
        tpot_s: mean(&all.completed),
    }
}

/// Requests that come at once, in requests a second until the last is done.
fn burst(spec: EngineSpec, (prompt, output): (f64, f64), requests: f64) -> f64 {
    let mut engine = Engine::new(spec);
    let mut seconds = 0.0;
    let mut arrivals = Requests::new(requests, prompt, output);
    while seconds == 0.0 || engine.waiting() + engine.running() > 1.0 {
        engine.step(0.1, std::mem::take(&mut arrivals), &Contention::ALONE);
        seconds += 0.1;
    }
    requests / seconds
}

/// So many clients, each of which asks again when it is answered: throughput in output tokens a second, time per output token,
/// and the rest of a client's time, which is its wait for the first.
fn clients(spec: EngineSpec, (prompt, output): (f64, f64), clients: f64) -> (f64, Served) {
    let mut engine = Engine::new(spec);
    let mut arrivals = Requests::new(clients, prompt, output);
    let mut second_half: Vec<(f64, f64)> = Vec::new();
    for step in 0..8000 {
        let outcome = engine.step(0.1, arrivals, &Contention::ALONE);
        arrivals = Requests::new(outcome.completions(), prompt, output);
        if step >= 4000 {
            second_half.extend(outcome.completed);
        }
    }
    let per_s = second_half
        .iter()
        .map(|(_, requests)| requests)
        .sum::<f64>()
        / 400.0;
    let tpot_s = mean(&second_half);
    (
        per_s * output,
        Served {
            ttft_s: clients / per_s - output * tpot_s,
            tpot_s,
        },
    )
}

#[test]
fn vllm_s_own_latency_tests_on_three_gpus() {
    let (small, large) = (&ModelShape::LLAMA_8B, &ModelShape::LLAMA_70B);
    let ms = |model, gpu, gpus| batch_of_8(&engine(model, gpu, gpus)) * 1e3;
    check(&[
        rate(
            "8B, 1 × A100, batch of 8, ms",
            1579.27,
            ms(small, &GpuSpeed::A100, 1),
        ),
        rate(
            "70B, 4 × A100, batch of 8, ms",
            3990.59,
            ms(large, &GpuSpeed::A100, 4),
        ),
        rate(
            "8B, 1 × H100, batch of 8, ms",
            997.54,
            ms(small, &GpuSpeed::H100, 1),
        ),
        rate(
            "70B, 4 × H100, batch of 8, ms",
            2444.47,
            ms(large, &GpuSpeed::H100, 4),
        ),
        rate(
            "8B, 1 × H200, batch of 8, ms",
            834.06,
            ms(small, &GpuSpeed::H200, 1),
        ),
        rate(
            "70B, 4 × H200, batch of 8, ms",
            2075.08,
            ms(large, &GpuSpeed::H200, 4),
        ),
    ]);
}

#[test]
fn vllm_s_own_throughput_tests_on_three_gpus() {
    let (small, large) = (&ModelShape::LLAMA_8B, &ModelShape::LLAMA_70B);
    let per_s = |model, gpu, gpus| burst(engine(model, gpu, gpus), SHAREGPT, 200.0);
    check(&[
        rate(
            "8B, 1 × A100, 200 at once, requests/s",
            11.0567,
            per_s(small, &GpuSpeed::A100, 1),
        ),
        rate(
            "70B, 4 × A100, 200 at once, requests/s",
            4.78859,
            per_s(large, &GpuSpeed::A100, 4),
        ),
        rate(
            "8B, 1 × H100, 200 at once, requests/s",
            19.5005,
            per_s(small, &GpuSpeed::H100, 1),
        ),
        rate(
            "70B, 4 × H100, 200 at once, requests/s",
            8.86239,
            per_s(large, &GpuSpeed::H100, 4),
        ),
        rate(
            "8B, 1 × H200, 200 at once, requests/s",
            21.8334,
            per_s(small, &GpuSpeed::H200, 1),
        ),
        rate(
            "70B, 4 × H200, 200 at once, requests/s",
            9.74671,
            per_s(large, &GpuSpeed::H200, 4),
        ),
    ]);
}

#[test]
fn vllm_s_own_serving_tests_at_one_request_a_second() {
    let large = |gpu| served(engine(&ModelShape::LLAMA_70B, gpu, 4), SHAREGPT, 200.0, 1.0);
    let (h100, h200) = (large(&GpuSpeed::H100), large(&GpuSpeed::H200));
    check(&[
        rate(
            "70B, 4 × H100, 1 request/s, ms a token",
            19.39,
            h100.tpot_s * 1e3,
        ),
        first_token(
            "70B, 4 × H100, 1 request/s, ms to first token",
            62.4149,
            h100.ttft_s * 1e3,
        ),
        rate(
            "70B, 4 × H200, 1 request/s, ms a token",
            16.5538,
            h200.tpot_s * 1e3,
        ),
        first_token(
            "70B, 4 × H200, 1 request/s, ms to first token",
            65.8942,
            h200.ttft_s * 1e3,
        ),
    ]);
}

#[test]
fn a_14b_model_on_one_a100_at_one_and_at_four_requests_a_second() {
    let phi_4 = |per_s| {
        served(
            engine(&ModelShape::PHI_4, &GpuSpeed::A100_PCIE, 1),
            SHAREGPT_PHI_4,
            200.0,
            per_s,
        )
    };
    let (one, four) = (phi_4(1.0), phi_4(4.0));
    check(&[
        rate(
            "phi-4, 1 × A100 PCIe, 1 request/s, ms a token",
            22.4824,
            one.tpot_s * 1e3,
        ),
        first_token(
            "phi-4, 1 × A100 PCIe, 1 request/s, ms to first token",
            67.1317,
            one.ttft_s * 1e3,
        ),
        rate(
            "phi-4, 1 × A100 PCIe, 4 requests/s, ms a token",
            28.3271,
            four.tpot_s * 1e3,
        ),
        first_token(
            "phi-4, 1 × A100 PCIe, 4 requests/s, ms to first token",
            78.5488,
            four.ttft_s * 1e3,
        ),
    ]);
}

#[test]
fn one_client_and_a_few_of_recent_versions() {
    let a100 = |n| {
        clients(
            engine(&ModelShape::LLAMA_8B, &GpuSpeed::A100_40GB, 1),
            (1024.0, 128.0),
            n,
        )
    };
    // The prompts of that benchmark are short; its page does not say how short.
    let h100 = |n| {
        clients(
            engine(&ModelShape::LLAMA_8B, &GpuSpeed::H100, 1),
            (100.0, 128.0),
            n,
        )
    };
    let (alone, eight) = (a100(1.0), a100(8.0));
    check(&[
        rate(
            "8B, 1 × A100 40 GB, 1 client, tokens/s while it decodes",
            75.0,
            1.0 / alone.1.tpot_s,
        ),
        rate(
            "8B, 1 × A100 40 GB, 8 clients to 1, throughput",
            6.6,
            eight.0 / alone.0,
        ),
        rate(
            "8B, 1 × H100, 1 client, ms a token",
            6.48,
            h100(1.0).1.tpot_s * 1e3,
        ),
        rate(
            "8B, 1 × H100, 4 clients, ms a token",
            6.59,
            h100(4.0).1.tpot_s * 1e3,
        ),
    ]);
}

/// An engine of NVIDIA's, not vLLM, up to and far beyond what its KV cache holds.
#[test]
fn a_70b_model_in_fp8_on_two_h100_from_one_client_to_250() {
    let spec = engine(
        &ModelShape::LLAMA_70B.in_fp8(),
        &GpuSpeed {
            // Tensor cores are twice as fast on one byte, from Hopper on.
            flops: 2.0 * GpuSpeed::H100.flops,
            ..GpuSpeed::H100
        },
        2,
    );
    let run = |n| clients(spec, (5000.0, 500.0), n);
    let (one, five, more, many, full) = (run(1.0), run(5.0), run(25.0), run(50.0), run(250.0));
    let ms = |served: &Served| served.tpot_s * 1e3;
    check(&[
        rate("70B fp8, 2 × H100, 1 client, ms a token", 18.58, ms(&one.1)),
        rate(
            "70B fp8, 2 × H100, 5 clients, ms a token",
            21.83,
            ms(&five.1),
        ),
        rate(
            "70B fp8, 2 × H100, 25 clients, ms a token",
            38.75,
            ms(&more.1),
        ),
        rate(
            "70B fp8, 2 × H100, 50 clients, ms a token",
            59.73,
            ms(&many.1),
        ),
        rate(
            "70B fp8, 2 × H100, 250 clients, ms a token",
            93.2,
            ms(&full.1),
        ),
        rate("70B fp8, 2 × H100, 1 client, tokens/s", 51.67, one.0),
        rate("70B fp8, 2 × H100, 5 clients, tokens/s", 218.48, five.0),
        rate("70B fp8, 2 × H100, 25 clients, tokens/s", 623.4, more.0),
        rate("70B fp8, 2 × H100, 50 clients, tokens/s", 814.37, many.0),
        rate("70B fp8, 2 × H100, 250 clients, tokens/s", 920.12, full.0),
        first_token(
            "70B fp8, 2 × H100, 5 clients, s to first token",
            0.5467,
            five.1.ttft_s,
        ),
        first_token(
            "70B fp8, 2 × H100, 25 clients, s to first token",
            0.688_69,
            more.1.ttft_s,
        ),
        first_token(
            "70B fp8, 2 × H100, 50 clients, s to first token",
            0.834_51,
            many.1.ttft_s,
        ),
        first_token(
            "70B fp8, 2 × H100, 250 clients, s to first token",
            88.605,
            full.1.ttft_s,
        ),
    ]);
}
