//! Figures of the pages that engines of the world print, and the reason why a page of no engine has none.

use super::{Histogram, parse_page};

/// A page's figures in one line, or why it has none.
fn described(page: &str) -> String {
    let path = format!(
        "{}/tests/fixtures/engines/{page}.txt",
        env!("CARGO_WORKSPACE_DIR")
    );
    let page = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let figures = match parse_page(&page, None) {
        Ok(figures) => figures,
        Err(reason) => return reason.to_string(),
    };
    let mut said = figures.engine.name().to_owned();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            said.push_str(&format!(" {name}={value}"));
        }
    };
    add("model", figures.model.map(|model| model.to_string()));
    add("kv", figures.kv_cache_usage.map(|share| share.to_string()));
    add(
        "tokens",
        figures.kv_cache_tokens.map(|tokens| tokens.to_string()),
    );
    add(
        "waiting",
        figures.waiting.map(|waiting| waiting.to_string()),
    );
    add(
        "running",
        figures.running.map(|running| running.to_string()),
    );
    add(
        "preemptions",
        figures.preemptions.map(|count| count.to_string()),
    );
    add(
        "generated",
        figures.generated_tokens.map(|count| count.to_string()),
    );
    let latency = |histogram: &Option<Histogram>| {
        let histogram = histogram.as_ref()?;
        let bounds = histogram.buckets.iter().map(|(bound, _)| (*bound, 0.0));
        let before = Histogram {
            buckets: bounds.collect(),
            ..Histogram::default()
        };
        let latency = histogram.since(&before)?;
        let p99 = latency.p99.map_or("?".into(), |p99| p99.to_string());
        Some(format!("{}/{p99}", latency.mean))
    };
    add(
        "prompts",
        figures.prompt_tokens.map(|count| count.to_string()),
    );
    add("per-token", latency(&figures.time_per_token));
    add("first-token", latency(&figures.time_to_first_token));
    figures
        .problems
        .iter()
        .for_each(|problem| said.push_str(&format!("; {problem}")));
    said
}

#[test]
fn every_recorded_metrics_page_is_parsed_or_rejected_with_a_reason() {
    let opt =
        "model=facebook/opt-125m kv=0 tokens=116496 waiting=0 running=0 preemptions=0 generated=7";
    let ranks = |waiting, running, kv| {
        format!(
            "vllm model=Qwen/Qwen3-32B kv={kv} tokens=152064 waiting={waiting} running={running} generated=84211"
        )
    };
    for (page, expected) in [
        ("aphrodite", format!("aphrodite {opt}")),
        ("vllm-datadog", format!("vllm {opt}")),
        // Its usage is a share, whatever its name says; it prints no queue.
        ("dynamo-0.5-kvstats", "dynamo kv=0.00007755545084364712".into()),
        ("dynamo-worker", "dynamo kv=0.98 waiting=9 running=14".into()),
        (
            "dynamo-datadog",
            "dynamo; dynamo_component_gpu_cache_usage_percent is 3.14, which cannot be; \
             dynamo_component_inflight_requests is 3.14, which cannot be"
                .into(),
        ),
        ("empty", "the page is empty".into()),
        ("llama-cpp-old", "llama.cpp kv=0.93 waiting=0 running=1 generated=3469 prompts=6886".into()),
        (
            "nim-1.x",
            "nim model=meta/llama-3.1-8b-instruct kv=0.0002848191398461977 waiting=0 running=1 generated=174 prompts=109".into(),
        ),
        ("prodstack-router", "the page of the router of vLLM's production stack, which is no engine".into()),
        (
            "ray-2.32-vllm",
            "ray-serve model=neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8 kv=0.00005882698982295764 \
             waiting=0 running=0 generated=300"
                .into(),
        ),
        ("ray-2.52-vllm", "ray-serve model=qwen3 kv=0.98 waiting=7 running=3".into()),
        (
            "scalellm-210",
            "no metric of a known engine; first line: \"# TYPE request_status_total counter\"".into(),
        ),
        ("sglang-0.3.5", "sglang model=meta-llama/Llama-3.2-3B tokens=570979 prompts=230794".into()),
        (
            "sglang-0.5.10",
            "sglang model=facebook/opt-125m kv=0.25 tokens=430839 waiting=0 running=0 preemptions=0 generated=32".into(),
        ),
        // 212 requests wait for KV cache before they are in its queue; the 8 whose KV cache is on its way have theirs.
        (
            "sglang-0.5.23-decode",
            "sglang model=Qwen/Qwen3-32B kv=0.97 tokens=443000 waiting=212 running=96".into(),
        ),
        // Its counters have a series for streamed requests and one for the others.
        ("sglang-0.5.23-latencies", "sglang model=Qwen/Qwen3-4B generated=34205 prompts=335872 per-token=8.6 ms/14.6 ms first-token=65.0 ms/191.4 ms".into()),
        ("smg-813", "the page of SGLang's model gateway, which is no engine".into()),
        (
            "trtllm-5560",
            "trtllm-serve model=deepseek-ai/DeepSeek-V3-0324 waiting=0 running=1 generated=81896".into(),
        ),
        // It has both names of the time per token.
        ("vllm-0.11", "vllm model=Qwen/Qwen3-4B kv=0.0743 waiting=0 running=2 generated=36684 prompts=335872 per-token=9.2 ms/41.3 ms first-token=67.0 ms/239.3 ms".into()),
        ("vllm-0.33-latencies", "vllm model=Qwen/Qwen3-4B kv=0.0743 waiting=0 running=2 generated=36684 prompts=335872 per-token=9.2 ms/41.3 ms first-token=67.0 ms/239.3 ms".into()),
        ("vllm-0.2.7", "vllm model=facebook/opt-125m kv=0 waiting=0 running=0".into()),
        (
            "vllm-0.33-rust",
            "vllm model=served-model-metrics kv=0 waiting=0 running=0 preemptions=3 generated=99".into(),
        ),
        (
            "vllm-0.8-prodstack318",
            "vllm model=Qwen/Qwen2.5-Coder-32B-Instruct kv=0 waiting=0 running=0".into(),
        ),
        ("vllm-dp-rank0", ranks(0, 0, 0.0)),
        ("vllm-dp-rank1", ranks(40, 31, 0.99)),
        ("vllm-dp2-gaie2950", "vllm model=deepseek-v4-flash-w8a8-mtp running=0".into()),
        ("vllm-loaded", ranks(5, 31, 0.91)),
    ] {
        assert_eq!(described(page), expected, "{page}");
    }
}

#[test]
fn queues_that_wait_for_a_peer_or_for_kv_cache_are_part_of_the_queue() {
    let waiting = |page: &str| parse_page(page.as_bytes(), None).unwrap().waiting;
    let prefill = "sglang:num_queue_reqs 3\nsglang:num_prefill_bootstrap_queue_reqs 40\n";
    assert_eq!(waiting(prefill), Some(43));
    assert_eq!(
        waiting("sglang:num_queue_reqs 3\nsglang:num_prefill_prealloc_queue_reqs 2\n"),
        Some(5)
    );
    let ranks = "sglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"0\"} 1\nsglang:num_queue_reqs{dp_rank=\"0\",tp_rank=\"1\"} 1\n\
        sglang:num_decode_prealloc_queue_reqs{dp_rank=\"0\",tp_rank=\"0\",priority=\"\"} 7\n\
        sglang:num_decode_prealloc_queue_reqs{dp_rank=\"0\",tp_rank=\"0\",priority=\"5\"} 4\n\
        sglang:num_decode_prealloc_queue_reqs{dp_rank=\"1\",tp_rank=\"0\",priority=\"\"} 2\n";
    assert_eq!(waiting(ranks), Some(10));
    assert_eq!(
        waiting("sglang:num_queue_reqs 3\nsglang:num_decode_prealloc_queue_reqs NaN\n"),
        None
    );
    assert_eq!(
        waiting("sglang:num_queue_reqs NaN\nsglang:num_decode_prealloc_queue_reqs 4\n"),
        None
    );
}

#[test]
fn replicas_of_one_page_have_a_kv_cache_and_a_queue_each() {
    let page: String = [("a", 0.1, 2), ("b", 0.7, 3)]
        .map(|(worker, kv, waiting)| {
            format!(
                "ray_vllm_kv_cache_usage_perc{{WorkerId=\"{worker}\",engine=\"0\"}} {kv}\n\
                 ray_vllm_num_requests_waiting{{WorkerId=\"{worker}\",engine=\"0\"}} {waiting}\n"
            )
        })
        .concat();
    let figures = parse_page(page.as_bytes(), None).unwrap();
    assert_eq!(
        (figures.kv_cache_usage, figures.waiting),
        (Some(0.7), Some(5))
    );
}

#[test]
fn names_without_a_prefix_are_an_engines_only_together() {
    let engine =
        |page: &str| parse_page(page.as_bytes(), None).map(|figures| figures.engine.name());
    assert_eq!(
        engine("gpu_cache_usage_perc 0.5\nnum_requests_waiting 0\n"),
        Ok("nim")
    );
    assert!(
        engine("num_requests_running 3\nnum_requests_waiting 0\n").is_err(),
        "any server may print these"
    );
    assert!(engine("generation_tokens_total 3\nup 1\n").is_err());
    assert_eq!(
        engine("gpu_cache_usage_perc 0.5\nnum_requests_waiting 0\nvllm:num_requests_running 1\n"),
        Ok("vllm")
    );
}

#[test]
fn a_gateway_that_prints_its_engines_figures_is_no_engine() {
    for page in [
        "vllm:num_requests_running{server=\"http://10.0.0.5:8000\"} 3\nvllm:current_qps{server=\"http://10.0.0.5:8000\"} 1\n",
        "inference_pool_average_kv_cache_utilization{name=\"pool\"} 0.2\ninference_pool_average_queue_size{name=\"pool\"} 0\n",
        "sglang:num_running_reqs 0\nsmg_http_requests_total 5\n",
    ] {
        let reason = parse_page(page.as_bytes(), None).unwrap_err().to_string();
        assert!(reason.ends_with(", which is no engine"), "{reason}");
    }
}
