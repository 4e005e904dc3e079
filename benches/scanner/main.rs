//! The scanner on a large vLLM page beside a naive line split: `cargo bench --bench scanner`.
//!
//! Both read the same page and must give the same figures before either is timed. They take turns in one run, so that what
//! the machine does meanwhile happens to both; the ratio is what travels.

use std::collections::HashMap;
use std::fmt::Write;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stowage::engine_metrics::{Engine, read};

/// What a vLLM with data-parallel ranks and a few adapters prints.
const LINES: usize = 2000;
/// Turns of each; the fastest counts, as the one the machine disturbed least.
const TURNS: usize = 200;
/// Readings in one turn: enough that the clock's own cost is lost in it.
const READINGS: u32 = 10;

fn main() {
    let page = page();
    assert_eq!(page.lines().count(), LINES);
    let figures = read(page.as_bytes(), None).expect("a page of vLLM");
    assert_eq!((figures.engine, figures.kv_cache_usage), (Engine::Vllm, Some(0.75)));
    assert_eq!((figures.waiting, figures.running), (Some(5), Some(36)));
    assert_eq!(figures.kv_cache_tokens, Some(2 * 438_608));
    assert_eq!(figures.problems, []);
    let naive = naive_figures(&page);
    assert_eq!(naive, (0.75, 5.0, 36.0));

    let (mut ours, mut theirs) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        ours = ours.min(timed(|| drop(black_box(read(black_box(page.as_bytes()), None)))));
        theirs = theirs.min(timed(|| {
            black_box(naive_figures(black_box(&page)));
        }));
    }
    let speed = |time: Duration| page.len() as f64 / time.as_secs_f64() / 1e6;
    println!("a vLLM page of {LINES} lines, {} bytes, to figures", page.len());
    println!("{:<24}{:>9.1} µs{:>9.0} MB/s", "the scanner", ours.as_secs_f64() * 1e6, speed(ours));
    println!("{:<24}{:>9.1} µs{:>9.0} MB/s", "a naive line split", theirs.as_secs_f64() * 1e6, speed(theirs));
    println!("{:<24}{:>9.1} ×", "ratio", theirs.as_secs_f64() / ours.as_secs_f64());
}

/// The time of one reading.
fn timed(mut read: impl FnMut()) -> Duration {
    let start = Instant::now();
    (0..READINGS).for_each(|_| read());
    start.elapsed() / READINGS
}

/// What one would write first: every line split and parsed into a map. KV usage, waiting, running.
fn naive_figures(page: &str) -> (f64, f64, f64) {
    let mut samples: HashMap<&str, Vec<f64>> = HashMap::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or(series);
        if let Ok(value) = value.parse::<f64>() {
            samples.entry(name).or_default().push(value);
        }
    }
    let of = |name: &str| samples.get(name).map_or(&[][..], |values| values);
    (
        of("vllm:kv_cache_usage_perc").iter().copied().fold(0.0, f64::max),
        of("vllm:num_requests_waiting").iter().sum(),
        of("vllm:num_requests_running").iter().sum(),
    )
}

/// The gauges of two ranks, among the histograms of both; filled up to [`LINES`].
fn page() -> String {
    const MODEL: &str = "model_name=\"meta-llama/Llama-3.1-8B-Instruct\"";
    let gauges = [
        ("vllm:num_requests_running", ["20.0", "16.0"]),
        ("vllm:num_requests_waiting", ["5.0", "0.0"]),
        ("vllm:kv_cache_usage_perc", ["0.75", "0.5"]),
    ];
    let histograms = [
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total",
    ];
    let mut lines = Vec::new();
    let mut line = |text: std::fmt::Arguments<'_>| {
        let mut line = String::new();
        line.write_fmt(text).expect("a string takes what is written");
        lines.push(line);
    };
    for (name, values) in gauges {
        line(format_args!("# HELP {name} What it says."));
        line(format_args!("# TYPE {name} gauge"));
        for (rank, value) in values.iter().enumerate() {
            line(format_args!("{name}{{engine=\"{rank}\",{MODEL}}} {value}"));
        }
    }
    for rank in 0..2 {
        line(format_args!(
            "vllm:cache_config_info{{block_size=\"16\",cache_dtype=\"auto\",engine=\"{rank}\",\
             kv_cache_size_tokens=\"438608\",num_gpu_blocks=\"27413\",sliding_window=\"None\"}} 1.0"
        ));
    }
    let rows = 2 * histograms.len();
    for bucket in 0..(LINES - 14).div_ceil(rows) {
        for (name, rank) in histograms.iter().flat_map(|name| [(name, 0), (name, 1)]) {
            let (le, count) = (0.001 * f64::from(1 << (bucket % 16)), 7 * bucket);
            line(format_args!("{name}_bucket{{engine=\"{rank}\",le=\"{le}\",{MODEL}}} {count}.0"));
        }
    }
    lines.truncate(LINES);
    lines.join("\n") + "\n"
}
