//! The metric names of each inference engine: a table, and nothing but a table.
//!
//! A new engine, or a new version's new name, is a row here and a page in `tests/fixtures/engines`. [`super::figures`] turns
//! rows into figures.

/// An inference engine whose metrics are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    Vllm,
    Sglang,
    TrtllmServe,
    Triton,
    Lmdeploy,
    Tgi,
    LlamaCpp,
    Dynamo,
}

impl Engine {
    pub const ALL: [Self; 8] = [
        Self::Vllm,
        Self::Sglang,
        Self::TrtllmServe,
        Self::Triton,
        Self::Lmdeploy,
        Self::Tgi,
        Self::LlamaCpp,
        Self::Dynamo,
    ];

    /// Its name in a report.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TrtllmServe => "trtllm-serve",
            Self::Triton => "triton",
            Self::Lmdeploy => "lmdeploy",
            Self::Tgi => "tgi",
            Self::LlamaCpp => "llama.cpp",
            Self::Dynamo => "dynamo",
        }
    }

    /// The engine named by a pod's label `llm-d.ai/engine-type`, in any of the spellings in use.
    pub fn from_label(text: &str) -> Option<Self> {
        Some(match text.to_ascii_lowercase().as_str() {
            "vllm" => Self::Vllm,
            "sglang" => Self::Sglang,
            "trtllm-serve" | "trtllm" | "tensorrt-llm" => Self::TrtllmServe,
            "triton" | "triton-tensorrt-llm" | "triton-trtllm" => Self::Triton,
            "lmdeploy" => Self::Lmdeploy,
            "tgi" | "text-generation-inference" => Self::Tgi,
            "llama.cpp" | "llamacpp" | "llama-cpp" | "llama-server" => Self::LlamaCpp,
            "dynamo" => Self::Dynamo,
            _ => return None,
        })
    }
}

/// The meaning of a number on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricQuantity {
    /// The share of the KV cache in use.
    KvUsage,
    /// The same under the name of earlier versions; both exist while one name replaces the other.
    KvUsageFormerly,
    /// The most tokens that the current batch may grow to, and the most that any batch may: their ratio is the KV cache's
    /// usage.
    BatchTokens,
    BatchTokensLimit,
    Waiting,
    /// Of these, the requests that wait for room in the KV cache or the batch. Others wait for something that no GPU has more of.
    WaitingForCapacity,
    Running,
    /// How often the engine has interrupted a request of its own for lack of KV cache; it only rises.
    Preemptions,
    /// Tokens that it has generated; it only rises, with some engines when a request ends.
    GeneratedTokens,
    /// Tokens the KV cache holds.
    KvTokens,
    /// Blocks of the KV cache, and the tokens of one: their product is the number of tokens it holds.
    KvBlocks,
    BlockTokens,
    /// Sleep flags: it accepts requests; its weights are in host memory (level 1); nothing is kept (level 2).
    Awake,
    WeightsOffloaded,
    AllDiscarded,
}

impl MetricQuantity {
    pub const COUNT: usize = Self::AllDiscarded as usize + 1;

    pub fn kind(self) -> ValueRange {
        match self {
            Self::KvUsage | Self::KvUsageFormerly => ValueRange::Share,
            Self::Awake | Self::WeightsOffloaded | Self::AllDiscarded => ValueRange::Flag,
            _ => ValueRange::Count,
        }
    }

    /// The name in a problem if it was computed.
    pub fn derived_name(self) -> &'static str {
        match self {
            Self::KvTokens => "the KV cache's blocks times the tokens of one",
            _ => "the KV cache's usage",
        }
    }
}

/// The values that a quantity may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueRange {
    Share,
    Count,
    Flag,
}

/// How a metric's samples are read.
#[derive(Debug, Clone, Copy)]
pub enum MetricReading {
    /// The value is the quantity.
    Value(MetricQuantity),
    /// This label decides which quantity the value is; samples with other label values are ignored.
    ByLabel(&'static str, &'static [(&'static str, MetricQuantity)]),
    /// The labels are the quantity, and the value is always 1.
    Labels(&'static [(&'static str, MetricQuantity)]),
}

#[derive(Debug)]
pub struct Dialect {
    pub engine: Engine,
    /// The prefix of its metrics' names. No other engine has it.
    pub prefix: &'static str,
    /// The label that names the model it serves.
    pub model_label: Option<&'static str>,
    pub metrics: &'static [(&'static str, MetricReading)],
}

/// Labels that distinguish units with a KV cache and a queue of their own: data-parallel ranks (`engine`, `dp_rank`), workers,
/// models of one Triton. Samples that differ only in other labels are views of the same, such as those of each tensor-parallel
/// rank.
pub const RANK_LABELS: [&str; 5] = ["engine", "dp_rank", "worker_id", "model", "version"];

use MetricQuantity::*;
use MetricReading::{ByLabel, Labels, Value};

/// In the order in which engines are tried on a page that several have written to. Dynamo forwards its worker's own page beside
/// its own: it is last, because the worker reports more.
pub static DIALECTS: [Dialect; 8] = [
    Dialect {
        engine: Engine::Vllm,
        prefix: "vllm:",
        model_label: Some("model_name"),
        metrics: &[
            ("vllm:kv_cache_usage_perc", Value(KvUsage)),
            // Up to 0.9.1 alone, from 0.9.2 to 0.11 beside the new name.
            ("vllm:gpu_cache_usage_perc", Value(KvUsageFormerly)),
            ("vllm:num_requests_waiting", Value(Waiting)),
            // It sums to the former; since 0.12.
            ("vllm:num_requests_waiting_by_reason", ByLabel("reason", &[("capacity", WaitingForCapacity)])),
            ("vllm:num_requests_running", Value(Running)),
            // The counter's name as the page has it, and as a collector of the newer format writes it.
            ("vllm:num_preemptions_total", Value(Preemptions)),
            ("vllm:num_preemptions", Value(Preemptions)),
            ("vllm:generation_tokens_total", Value(GeneratedTokens)),
            ("vllm:generation_tokens", Value(GeneratedTokens)),
            // If cache groups have blocks of several sizes the product is not the number of tokens: newer versions have a label
            // for it.
            (
                "vllm:cache_config_info",
                Labels(&[
                    ("kv_cache_size_tokens", KvTokens),
                    ("num_gpu_blocks", KvBlocks),
                    ("block_size", BlockTokens),
                ]),
            ),
            (
                "vllm:engine_sleep_state",
                ByLabel(
                    "sleep_state",
                    &[
                        ("awake", Awake),
                        ("weights_offloaded", WeightsOffloaded),
                        ("discard_all", AllDiscarded),
                    ],
                ),
            ),
        ],
    },
    Dialect {
        engine: Engine::Sglang,
        prefix: "sglang:",
        model_label: Some("model_name"),
        metrics: &[
            ("sglang:token_usage", Value(KvUsage)),
            ("sglang:num_queue_reqs", Value(Waiting)),
            ("sglang:num_running_reqs", Value(Running)),
            ("sglang:max_total_num_tokens", Value(KvTokens)),
            // Its gauge `sglang:gen_throughput` is of one batch, and stays where it was once there is none.
            ("sglang:generation_tokens_total", Value(GeneratedTokens)),
        ],
    },
    Dialect {
        engine: Engine::TrtllmServe,
        prefix: "trtllm_",
        model_label: Some("model_name"),
        metrics: &[
            ("trtllm_kv_cache_utilization", Value(KvUsage)),
            ("trtllm_num_requests_waiting", Value(Waiting)),
            ("trtllm_num_requests_running", Value(Running)),
            ("trtllm_kv_cache_max_blocks", Value(KvBlocks)),
            ("trtllm_kv_cache_tokens_per_block", Value(BlockTokens)),
            ("trtllm_generation_tokens_total", Value(GeneratedTokens)),
        ],
    },
    Dialect {
        engine: Engine::Triton,
        prefix: "nv_trt_llm_",
        // Its label `model` names a step of the pipeline, such as `tensorrt_llm`.
        model_label: None,
        metrics: &[
            (
                "nv_trt_llm_kv_cache_block_metrics",
                ByLabel(
                    "kv_cache_block_type",
                    &[("fraction", KvUsage), ("max", KvBlocks), ("tokens_per", BlockTokens)],
                ),
            ),
            (
                "nv_trt_llm_request_metrics",
                ByLabel("request_type", &[("waiting", Waiting), ("scheduled", Running)]),
            ),
        ],
    },
    Dialect {
        engine: Engine::Lmdeploy,
        prefix: "lmdeploy:",
        model_label: Some("model_name"),
        metrics: &[
            ("lmdeploy:gpu_cache_usage_perc", Value(KvUsage)),
            ("lmdeploy:num_requests_waiting", Value(Waiting)),
            ("lmdeploy:num_requests_running", Value(Running)),
            ("lmdeploy:generation_tokens_total", Value(GeneratedTokens)),
        ],
    },
    Dialect {
        engine: Engine::Tgi,
        prefix: "tgi_",
        model_label: None,
        metrics: &[
            ("tgi_batch_current_max_tokens", Value(BatchTokens)),
            ("tgi_batch_max_total_tokens", Value(BatchTokensLimit)),
            ("tgi_queue_size", Value(Waiting)),
            ("tgi_batch_current_size", Value(Running)),
            // The sum of a histogram over ended requests: it has no counter of its own.
            ("tgi_request_generated_tokens_sum", Value(GeneratedTokens)),
        ],
    },
    Dialect {
        engine: Engine::LlamaCpp,
        prefix: "llamacpp:",
        model_label: None,
        // It no longer reports its KV cache's usage; another of its pages has the size.
        metrics: &[
            ("llamacpp:requests_deferred", Value(Waiting)),
            ("llamacpp:requests_processing", Value(Running)),
            ("llamacpp:tokens_predicted_total", Value(GeneratedTokens)),
        ],
    },
    Dialect {
        engine: Engine::Dynamo,
        prefix: "dynamo_",
        model_label: Some("model"),
        // `dynamo_component_total_blocks` is not read: nothing on the page gives the tokens of a block.
        metrics: &[
            ("dynamo_component_gpu_cache_usage_percent", Value(KvUsage)),
            ("dynamo_frontend_queued_requests", Value(Waiting)),
            ("dynamo_frontend_inflight_requests", Value(Running)),
        ],
    },
];
