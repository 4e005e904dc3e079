//! A large vLLM's metrics, as two benches read them.

use std::fmt::Write;

/// Number of lines: those of a vLLM with data-parallel ranks and a few adapters.
pub const METRICS_PAGE_LINES: usize = 2000;

/// The gauges of two ranks, among the histograms of both; filled up to [`METRICS_PAGE_LINES`].
pub fn metrics_page() -> String {
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
        line.write_fmt(text)
            .expect("a string takes what is written");
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
    for bucket in 0..(METRICS_PAGE_LINES - 14).div_ceil(rows) {
        for (name, rank) in histograms.iter().flat_map(|name| [(name, 0), (name, 1)]) {
            let (le, count) = (0.001 * f64::from(1 << (bucket % 16)), 7 * bucket);
            line(format_args!(
                "{name}_bucket{{engine=\"{rank}\",le=\"{le}\",{MODEL}}} {count}.0"
            ));
        }
    }
    lines.truncate(METRICS_PAGE_LINES);
    lines.join("\n") + "\n"
}
