//! The declarations of all engines.
//!
//! A new engine is a variant and a row here, and a page in `tests/fixtures/engines` with its figures in a test. The docs, the
//! reference of metrics and the admission policy that completes pods have lists of engines that tests compare with this one.

use super::MeasuredLatency::{PerToken, PerTokenOldName, ToFirstToken};
use super::MetricQuantity::*;
use super::MetricReading::{self, ByLabel, Histogram, Labels, Value};
use super::{Dialect, EngineDeclaration, Gateway, HealthEndpoint};

/// An inference engine. The list is closed, so that no pod can make it grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    Vllm,
    Sglang,
    TrtllmServe,
    Triton,
    Lmdeploy,
    Tgi,
    LlamaCpp,
    Aphrodite,
    RayServe,
    Nim,
    Dynamo,
    /// None of these, or not known which.
    #[default]
    Other,
}

const DEFAULT_HEALTH: Option<HealthEndpoint> = Some(HealthEndpoint {
    port: None,
    path: "/health",
});

/// Default fields of an engine's declaration.
const DEFAULTS: EngineDeclaration = EngineDeclaration {
    engine: Engine::Other,
    name: "other",
    spellings: &[],
    images: &[],
    ports: &[],
    path: "/metrics",
    health: DEFAULT_HEALTH,
    has_props_endpoint: false,
    dialects: &[],
    versions: "",
};

const DEFAULT_DIALECT: Dialect = Dialect {
    prefix: "",
    required: &[],
    model_labels: &["model_name"],
    metrics: &[],
};

/// In the order in which engines are tried on a page that several have written to, and in that of [`Engine`]. Those that wrap
/// others come last: Dynamo forwards its worker's own page beside its own, and the worker reports more.
pub static DECLARATIONS: [EngineDeclaration; 12] = [
    EngineDeclaration {
        engine: Engine::Vllm,
        name: "vllm",
        images: &["vllm"],
        ports: &[8000],
        dialects: &[Dialect {
            prefix: "vllm:",
            metrics: VLLM_METRICS,
            ..DEFAULT_DIALECT
        }],
        versions: "0.2.7, 0.8, 0.10, 0.12, 0.33",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Sglang,
        name: "sglang",
        images: &["sglang"],
        ports: &[30000],
        dialects: &[Dialect {
            prefix: "sglang:",
            // The latter up to 0.3.
            model_labels: &["model_name", "name"],
            metrics: &[
                // The maximum over the pools of full attention, sliding windows and Mamba.
                ("token_usage", Value(KvUsage)),
                ("num_queue_reqs", Value(Waiting)),
                ("num_decode_prealloc_queue_reqs", Value(WaitingToDecode)),
                // The former name of the latter. Requests of the queues `transfer` and `inflight` have their KV cache.
                ("num_prefill_prealloc_queue_reqs", Value(WaitingToPrefill)),
                ("num_prefill_bootstrap_queue_reqs", Value(WaitingToPrefill)),
                ("num_running_reqs", Value(Running)),
                ("max_total_num_tokens", Value(KvTokens)),
                // A gauge of the last batch, in versions before the counter; it rises as well.
                ("num_retracted_reqs", Value(Preemptions)),
                ("num_retracted_requests_total", Value(Preemptions)),
                // Its gauge `gen_throughput` is of one batch, and stays where it was once there is none.
                ("generation_tokens_total", Value(GeneratedTokens)),
                ("prompt_tokens_total", Value(PromptTokens)),
                // Up to 0.4.4 it had `time_per_output_token_seconds`, which averages over the whole request at each token.
                ("inter_token_latency_seconds", Histogram(PerToken)),
                ("time_to_first_token_seconds", Histogram(ToFirstToken)),
            ],
            ..DEFAULT_DIALECT
        }],
        versions: "0.3.5, 0.5.10, 0.5.23, also disaggregated",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::TrtllmServe,
        name: "trtllm-serve",
        spellings: &["trtllm", "trt-llm", "tensorrt-llm"],
        images: &["trtllm", "trt-llm", "tensorrt-llm", "tensorrt_llm"],
        ports: &[8000],
        path: "/prometheus/metrics",
        dialects: &[
            Dialect {
                prefix: "trtllm_",
                metrics: &[
                    ("kv_cache_utilization", Value(KvUsage)),
                    ("num_requests_waiting", Value(Waiting)),
                    ("num_requests_running", Value(Running)),
                    ("kv_cache_max_blocks", Value(KvBlocks)),
                    ("kv_cache_tokens_per_block", Value(BlockTokens)),
                    ("generation_tokens_total", Value(GeneratedTokens)),
                    ("prompt_tokens_total", Value(PromptTokens)),
                    // Both when a request ends.
                    ("time_per_output_token_seconds", Histogram(PerToken)),
                    ("time_to_first_token_seconds", Histogram(ToFirstToken)),
                ],
                ..DEFAULT_DIALECT
            },
            Dialect {
                prefix: "pytrtllm:",
                metrics: &[
                    ("num_requests_waiting", Value(Waiting)),
                    ("num_requests_running", Value(Running)),
                    ("generation_tokens_total", Value(GeneratedTokens)),
                ],
                ..DEFAULT_DIALECT
            },
        ],
        versions: "of 2026; `pytrtllm:` of 2025",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Triton,
        name: "triton",
        spellings: &["triton-tensorrt-llm", "triton-trtllm"],
        images: &["tritonserver"],
        // Its metrics have a port of their own.
        ports: &[8002],
        health: Some(HealthEndpoint {
            port: Some(8000),
            path: "/v2/health/ready",
        }),
        dialects: &[Dialect {
            prefix: "nv_trt_llm_",
            // Its label `model` names a step of the pipeline, such as `tensorrt_llm`.
            model_labels: &[],
            metrics: &[
                (
                    "kv_cache_block_metrics",
                    ByLabel(
                        "kv_cache_block_type",
                        &[
                            ("fraction", KvUsage),
                            ("max", KvBlocks),
                            ("tokens_per", BlockTokens),
                        ],
                    ),
                ),
                (
                    "request_metrics",
                    ByLabel(
                        "request_type",
                        &[("waiting", Waiting), ("scheduled", Running)],
                    ),
                ),
            ],
            ..DEFAULT_DIALECT
        }],
        versions: "of 2026, with TensorRT-LLM",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Lmdeploy,
        name: "lmdeploy",
        images: &["lmdeploy"],
        ports: &[23333],
        health: None,
        dialects: &[Dialect {
            prefix: "lmdeploy:",
            metrics: COMMON_METRICS,
            ..DEFAULT_DIALECT
        }],
        versions: "of 2026",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Tgi,
        name: "tgi",
        spellings: &["text-generation-inference"],
        images: &["text-generation-inference", "/tgi"],
        // As its image starts it, and as many charts do, because port 80 needs a privilege.
        ports: &[80, 8080],
        dialects: &[Dialect {
            prefix: "tgi_",
            model_labels: &[],
            metrics: &[
                ("batch_current_max_tokens", Value(BatchTokens)),
                ("batch_max_total_tokens", Value(BatchTokensLimit)),
                ("queue_size", Value(Waiting)),
                ("batch_current_size", Value(Running)),
                // The sum of a histogram over ended requests: it has no counter of its own.
                ("request_generated_tokens_sum", Value(GeneratedTokens)),
            ],
            ..DEFAULT_DIALECT
        }],
        versions: "of 2026",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::LlamaCpp,
        name: "llama.cpp",
        spellings: &["llamacpp", "llama-cpp", "llama-server"],
        images: &["llama.cpp", "llama-cpp"],
        ports: &[8080],
        has_props_endpoint: true,
        dialects: &[Dialect {
            prefix: "llamacpp:",
            model_labels: &[],
            metrics: &[
                // Newer versions do not report it. `kv_cache_tokens` beside it is what is used, not what there is.
                ("kv_cache_usage_ratio", Value(KvUsage)),
                ("requests_deferred", Value(Waiting)),
                ("requests_processing", Value(Running)),
                ("tokens_predicted_total", Value(GeneratedTokens)),
                ("prompt_tokens_total", Value(PromptTokens)),
            ],
            ..DEFAULT_DIALECT
        }],
        versions: "with and without `kv_cache_usage_ratio`",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Aphrodite,
        name: "aphrodite",
        spellings: &["aphrodite-engine"],
        images: &["aphrodite"],
        ports: &[2242],
        dialects: &[Dialect {
            prefix: "aphrodite:",
            metrics: VLLM_METRICS,
            ..DEFAULT_DIALECT
        }],
        versions: "0.24, and one with both names of the usage",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::RayServe,
        name: "ray-serve",
        spellings: &["ray", "ray-serve-llm", "ray-llm"],
        images: &["ray-llm"],
        // That of Ray's own metrics, as KubeRay sets it.
        ports: &[8080],
        health: None,
        dialects: &[
            Dialect {
                prefix: "ray_vllm:",
                metrics: VLLM_METRICS,
                ..DEFAULT_DIALECT
            },
            Dialect {
                prefix: "ray_vllm_",
                metrics: VLLM_METRICS,
                ..DEFAULT_DIALECT
            },
        ],
        versions: "2.32, 2.52, with vLLM",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Nim,
        name: "nim",
        spellings: &["nvidia-nim", "nim-llm"],
        images: &["nvcr.io/nim/"],
        ports: &[8000],
        path: "/v1/metrics",
        health: Some(HealthEndpoint {
            port: None,
            path: "/v1/health/ready",
        }),
        dialects: &[Dialect {
            required: &[KvUsage, Waiting],
            metrics: COMMON_METRICS,
            ..DEFAULT_DIALECT
        }],
        versions: "1.x; later ones print vLLM's page",
        ..DEFAULTS
    },
    EngineDeclaration {
        engine: Engine::Dynamo,
        name: "dynamo",
        images: &["dynamo"],
        // A worker has none unless DYN_SYSTEM_PORT sets one: 9090 is what its operator sets, 8081 what its guides use.
        ports: &[9090, 8081],
        health: None,
        dialects: &[Dialect {
            prefix: "dynamo_",
            model_labels: &["model"],
            // `component_total_blocks` is not read: nothing on the page gives the tokens of a block.
            metrics: &[
                ("component_gpu_cache_usage_percent", Value(KvUsage)),
                (
                    "component_kvstats_gpu_cache_usage_percent",
                    Value(KvUsageOldName),
                ),
                ("frontend_queued_requests", Value(Waiting)),
                ("component_queue_depth", Value(Waiting)),
                ("frontend_inflight_requests", Value(Running)),
                ("component_inflight_requests", Value(Running)),
            ],
            ..DEFAULT_DIALECT
        }],
        versions: "0.5, 1.6",
        ..DEFAULTS
    },
    EngineDeclaration {
        health: None,
        ..DEFAULTS
    },
];

/// vLLM's metrics, which engines that are made from it have under prefixes of their own.
const VLLM_METRICS: &[(&str, MetricReading)] = &[
    ("kv_cache_usage_perc", Value(KvUsage)),
    // Up to 0.9.1 alone, from 0.9.2 to 0.11 beside the new name.
    ("gpu_cache_usage_perc", Value(KvUsageOldName)),
    ("num_requests_waiting", Value(Waiting)),
    // It sums to the former; since 0.12.
    (
        "num_requests_waiting_by_reason",
        ByLabel("reason", &[("capacity", WaitingForCapacity)]),
    ),
    ("num_requests_running", Value(Running)),
    // The counter's name as the page has it, and as a collector of the newer format writes it.
    ("num_preemptions_total", Value(Preemptions)),
    ("num_preemptions", Value(Preemptions)),
    ("generation_tokens_total", Value(GeneratedTokens)),
    ("generation_tokens", Value(GeneratedTokens)),
    ("prompt_tokens_total", Value(PromptTokens)),
    ("prompt_tokens", Value(PromptTokens)),
    // Per step, which yields more than a token where it speculates; since 0.10.2. The former name was there up to 0.11.
    ("inter_token_latency_seconds", Histogram(PerToken)),
    ("time_per_output_token_seconds", Histogram(PerTokenOldName)),
    ("time_to_first_token_seconds", Histogram(ToFirstToken)),
    // If cache groups have blocks of several sizes the product is not the number of tokens: newer versions have a label for it.
    (
        "cache_config_info",
        Labels(&[
            ("kv_cache_size_tokens", KvTokens),
            ("num_gpu_blocks", KvBlocks),
            ("block_size", BlockTokens),
        ]),
    ),
    (
        "engine_sleep_state",
        ByLabel(
            "sleep_state",
            &[
                ("awake", Awake),
                ("weights_offloaded", WeightsOffloaded),
                ("discard_all", AllDiscarded),
            ],
        ),
    ),
];

/// The metrics of earlier versions of vLLM that other engines have as well.
const COMMON_METRICS: &[(&str, MetricReading)] = &[
    ("gpu_cache_usage_perc", Value(KvUsage)),
    ("num_requests_waiting", Value(Waiting)),
    ("num_requests_running", Value(Running)),
    ("generation_tokens_total", Value(GeneratedTokens)),
    ("prompt_tokens_total", Value(PromptTokens)),
    ("time_per_output_token_seconds", Histogram(PerToken)),
    ("time_to_first_token_seconds", Histogram(ToFirstToken)),
];

pub static GATEWAYS: [Gateway; 3] = [
    Gateway {
        name: "the router of vLLM's production stack",
        metrics: &["vllm:healthy_pods_total", "vllm:current_qps"],
    },
    Gateway {
        name: "SGLang's model gateway",
        metrics: &[
            "sglang_cache_hit_rate",
            "smg_http_requests_total",
            "smg_router_requests_total",
        ],
    },
    Gateway {
        name: "an endpoint picker of the inference gateway",
        metrics: &[
            "inference_pool_average_kv_cache_utilization",
            "inference_pool_ready_pods",
            "inference_extension_scheduler_attempts_total",
        ],
    },
];
