//! The formulas against numbers counted by hand. What others have published is compared in `tests/it/estimate.rs`.

mod mistakes;
mod right_size;
mod skipped_modules;

use super::architecture::ModelArchitecture;
use super::config::{Config, ConfigError};
use super::gpus::{GpuFit, GpuSize};
use super::kv_cache::{KvCache, KvCacheDtype};
use super::pod::PodLines;
use super::quantization::Precision;
use super::shipped::{MODELS, ShippedModel};
use super::*;

const LLAMA_8B: &str = r#"{
  "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8
}"#;

fn read(text: &str) -> Result<ModelArchitecture, ConfigError> {
    ModelArchitecture::read(&Config::parse(text)?)
}

/// Llama-3.1-8B's file with this in place of that.
fn llama_with(from: &str, to: &str) -> Result<ModelArchitecture, ConfigError> {
    assert!(LLAMA_8B.contains(from));
    read(&LLAMA_8B.replace(from, to))
}

fn message<T: std::fmt::Debug>(read: Result<T, ConfigError>) -> String {
    read.unwrap_err().to_string()
}

fn shipped(name: &str) -> ModelArchitecture {
    ShippedModel::find(name).unwrap().read().unwrap()
}

fn in_precision(text: &str, precision: Precision) -> ModelArchitecture {
    ModelArchitecture::read_with_precision(&Config::parse(text).unwrap(), Some(precision)).unwrap()
}

/// Llama-3.1-8B's file with this `quantization_config`.
fn quantized(config: &str) -> String {
    LLAMA_8B.replace(
        "\"model_type\"",
        &format!("\"quantization_config\": {config}, \"model_type\""),
    )
}

fn workload_on(gpus: u64) -> Workload {
    Workload {
        tensor_parallel: gpus,
        ..Workload::default()
    }
}

fn estimate(model: &ModelArchitecture, workload: &Workload) -> Estimate {
    Estimate::for_model(model, workload).unwrap()
}

fn kib(n: u64) -> Bytes {
    Bytes(n << 10)
}

#[test]
fn parameters_are_counted_to_the_last_one() {
    let mut inexact = Vec::new();
    // As the safetensors of the models' repositories count them.
    for (name, count) in [
        ("llama-2-7b", 6_738_415_616_u64),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_248_023_552),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-2-9b", 9_241_705_984),
        ("phi-4", 14_659_507_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ] {
        let counted = shipped(name).parameters();
        if counted != count.into() {
            inexact.push(name);
        }
        let ratio = counted as f64 / count as f64;
        assert!((ratio - 1.0).abs() < 0.001, "{name}: {counted}");
    }
    // Biases of Qwen2.5 and gpt-oss, norms of Qwen3's heads and two more of Gemma's layers are not counted.
    let with_more = [
        "qwen2.5-7b",
        "qwen2.5-72b",
        "qwen3-32b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "gemma-2-9b",
        "gpt-oss-20b",
        "gpt-oss-120b",
    ];
    assert_eq!(inexact, with_more);
}

#[test]
fn families_without_a_shipped_model_are_counted_too() {
    // Rounded as the safetensors of the named repositories say.
    for (repository, billions, text) in [
        (
            "allenai/OLMo-2-1124-7B",
            7.299,
            r#"{"model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
                "num_hidden_layers": 32, "num_attention_heads": 32}"#,
        ),
        (
            "allenai/OLMoE-1B-7B-0924",
            6.919,
            r#"{"model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
                "num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}"#,
        ),
        (
            "microsoft/Phi-3-mini-4k-instruct",
            3.821,
            r#"{"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}"#,
        ),
        (
            "deepseek-ai/DeepSeek-V2-Lite",
            15.706,
            r#"{"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
                "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512,
                "q_lora_rank": null, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}"#,
        ),
        (
            "Qwen/Qwen2.5-1.5B",
            1.544,
            r#"{"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
                "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
                "tie_word_embeddings": true}"#,
        ),
    ] {
        let counted = read(text).unwrap().parameters() as f64 / 1e9;
        assert!(
            (counted - billions).abs() < 0.002,
            "{repository}: {counted}"
        );
    }
}

#[test]
fn the_kv_cache_per_token_depends_on_the_kind_of_attention() {
    for (name, bytes_per_token) in [
        ("llama-2-7b", kib(512)),
        ("llama-3.1-8b", kib(128)),
        ("llama-3.1-70b", kib(320)),
        ("qwen2.5-7b", kib(56)),
        ("qwen3-32b", kib(256)),
        ("opt-13b", kib(800)),
        // 61 layers, a vector of 512 and a key of 64.
        ("deepseek-v3", Bytes(61 * 576 * 2)),
        // 12 of 48 layers have attention, 4 of 32, and 4 of 52.
        ("qwen3-next-80b-a3b", Bytes(12 * 2 * 2 * 256 * 2)),
        ("jamba-1.5-mini", Bytes(4 * 2 * 8 * 128 * 2)),
        ("nemotron-h-8b", Bytes(4 * 2 * 8 * 128 * 2)),
    ] {
        let size = estimate(&shipped(name), &workload_on(1)).kv_cache;
        assert_eq!(size.bytes_per_token, bytes_per_token, "{name}");
        assert_eq!(
            size.bytes_per_token_beyond_windows, bytes_per_token,
            "{name}"
        );
    }
}

#[test]
fn tensor_parallelism_splits_heads_and_repeats_what_has_none() {
    let llama = shipped("llama-3.1-70b");
    let of_token = |gpus| {
        estimate(&llama, &workload_on(gpus))
            .kv_cache
            .bytes_per_token
    };
    assert_eq!(
        (of_token(1), of_token(4), of_token(8)),
        (kib(320), kib(80), kib(40))
    );
    assert_eq!(
        of_token(16),
        kib(40),
        "each GPU holds a whole one of 8 KV heads"
    );
    let deepseek = shipped("deepseek-v3");
    let of_token = |gpus| {
        estimate(&deepseek, &workload_on(gpus))
            .kv_cache
            .bytes_per_token
    };
    assert_eq!(of_token(1), of_token(8), "a compressed vector has no heads");
    let weights = |gpus| weights::bytes_per_gpu(&deepseek, gpus).0;
    assert!(weights(8) * 8 > weights(1), "down-projections are on each");
    assert!(weights(8) * 8 < weights(1) / 100 * 102);
}

#[test]
fn heads_that_cannot_be_split_are_refused_with_the_numbers_that_can() {
    let refused = |name: &str, gpus| {
        Estimate::for_model(&shipped(name), &workload_on(gpus))
            .unwrap_err()
            .to_string()
    };
    let text = refused("llama-3.1-8b", 3);
    assert_eq!(
        text,
        "32 attention heads cannot be split over 3 GPUs; this model can be over 1, 2, 4, 8, 16, 32"
    );
    let text = refused("phi-4", 4);
    assert!(
        text.starts_with("10 KV heads cannot be split over 4 GPUs")
            && text.ends_with("1, 2, 5, 10, 20, 40")
    );
    assert!(refused("qwen3-next-80b-a3b", 64).contains("can be over 1, 2, 4, 8, 16"));
}

#[test]
fn a_sliding_window_caps_what_its_layers_keep() {
    let gemma = shipped("gemma-3-27b");
    let size = |context| {
        let workload = Workload {
            context,
            sequences: 2,
            ..Workload::default()
        };
        estimate(&gemma, &workload).kv_cache
    };
    // 10 of 62 layers see everything; a token takes 8 KiB in each. The engine groups layers by ten, and the last group of the
    // other 52 is as large as the others.
    let (short, long) = (size(1024), size(32_768));
    assert_eq!(short.bytes_per_sequence, kib(8 * 70 * 1024));
    assert_eq!(long.bytes_per_sequence, kib(8 * (10 * 32_768 + 60 * 1024)));
    let reading = kib(8 * 60 * 8192);
    assert_eq!(
        long.bytes,
        long.bytes_per_sequence.times(2) + reading,
        "one of two is being read"
    );
    assert_eq!(
        short.bytes,
        short.bytes_per_sequence.times(2),
        "it is no longer than its window"
    );
    let mistral = r#"{"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "sliding_window": 4096}"#;
    let size = estimate(&read(mistral).unwrap(), &workload_on(1)).kv_cache;
    assert_eq!(
        (size.bytes_per_token, size.bytes_per_token_beyond_windows),
        (kib(128), Bytes(0))
    );
}

#[test]
fn groups_of_layers_of_several_kinds_are_padded_to_one_size() {
    let layers_held = |full: usize, sliding: usize| {
        let kinds = [
            vec!["\"full_attention\""; full],
            vec!["\"sliding_attention\""; sliding],
        ];
        let file = format!(
            r#"{{"model_type": "gpt_oss", "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 512,
                "num_attention_heads": 8, "sliding_window": 128, "layer_types": [{}]}}"#,
            kinds.concat().join(", ")
        );
        let size = estimate(&read(&file).unwrap(), &workload_on(1)).kv_cache;
        size.bytes_per_token.0 / (2 * 8 * 64 * 2)
    };
    // Alike, a few more of one kind, and a kind of which there is little.
    assert_eq!(layers_held(12, 12), 24);
    assert_eq!(layers_held(13, 12), 26);
    assert_eq!(layers_held(5, 26), 5 + 30);
    assert_eq!(layers_held(26, 0), 26);
    assert_eq!(layers_held(0, 26), 26);
}

#[test]
fn a_recurrent_state_is_the_same_for_every_context_and_split_by_heads() {
    let state = |name: &str, gpus| {
        estimate(&shipped(name), &workload_on(gpus))
            .kv_cache
            .state_bytes_per_sequence
            .0
    };
    // 28 layers of 8,192 channels: 3 inputs of the convolution and 16 of the state.
    assert_eq!(state("jamba-1.5-mini", 1), 28 * 8192 * (3 + 16) * 2);
    // 36 layers: 8,192 channels of the convolution, and 32 heads of 128 by 128.
    assert_eq!(
        state("qwen3-next-80b-a3b", 1),
        36 * (8192 * 3 + 32 * 128 * 128) * 2
    );
    assert_eq!(
        state("qwen3-next-80b-a3b", 4) * 4,
        state("qwen3-next-80b-a3b", 1)
    );
    // 24 layers; the state has 32 bits.
    assert_eq!(
        state("nemotron-h-8b", 1),
        24 * (10_240 * 3 * 2 + 8192 * 128 * 4)
    );
}

#[test]
fn a_kv_cache_of_8_bits_is_half_as_large_and_a_file_may_ask_for_it() {
    let fp8 = Workload {
        kv_cache_dtype: KvCacheDtype::Fp8,
        ..Workload::default()
    };
    let of_token = |model: &ModelArchitecture, workload: &Workload| {
        estimate(model, workload).kv_cache.bytes_per_token
    };
    let llama = read(LLAMA_8B).unwrap();
    assert_eq!(of_token(&llama, &fp8), kib(64));
    let asks = llama_with(
        "\"model_type\"",
        r#""quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, "model_type""#,
    );
    let asks = asks.unwrap();
    assert_eq!(of_token(&asks, &Workload::default()), kib(64));
    let explicit = Workload {
        kv_cache_dtype: KvCacheDtype::Bf16,
        ..Workload::default()
    };
    assert_eq!(of_token(&asks, &explicit), kib(128));
}

#[test]
fn every_quantization_has_its_bytes_for_a_parameter() {
    for (config, thousandths) in [
        (r#"{"quant_method": "fp8"}"#, 1000),
        (
            r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#,
            1000,
        ),
        (r#"{"quant_method": "fbgemm_fp8"}"#, 1000),
        (
            r#"{"quant_method": "awq", "bits": 4, "group_size": 128}"#,
            519,
        ),
        (
            r#"{"quant_method": "gptq", "bits": 4, "group_size": 32}"#,
            578,
        ),
        (
            r#"{"quant_method": "gptq", "bits": 8, "group_size": -1}"#,
            1000,
        ),
        (r#"{"quant_method": "mxfp4"}"#, 531),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#,
            562,
        ),
        (r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#, 1000),
        (
            r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#,
            562,
        ),
        (
            r#"{"quant_method": "bitsandbytes", "load_in_8bit": true}"#,
            1000,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
               {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": true}}}}"#,
            515,
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
               {"num_bits": 8, "type": "float"}}}}"#,
            1000,
        ),
    ] {
        let model = llama_with(
            "\"model_type\"",
            &format!(r#""quantization_config": {config}, "model_type""#),
        );
        let bytes = model.unwrap().quantization.precision.bytes_of(1_000_000);
        assert_eq!(bytes / 1000, thousandths, "{config}");
    }
}

#[test]
fn modules_that_are_not_quantized_keep_16_bits() {
    let weights = |list: &str| {
        let config = format!(
            r#""quantization_config": {{"quant_method": "fp8", "modules_to_not_convert": {list}}}, "model_type""#
        );
        weights::bytes_per_gpu(&llama_with("\"model_type\"", &config).unwrap(), 1).0
    };
    let attention = 32 * (4096 * (2 * 4096 + 2 * 1024));
    let layer = attention / 32 + 3 * 4096 * 14_336;
    let all = weights(r#"["lm_head", "model.layers.0.mlp.gate", "re:.*router"]"#);
    assert_eq!(weights(r#"["model.layers.*.self_attn"]"#), all + attention);
    assert_eq!(
        weights(r#"["re:.*self_attn.*", "model.layers.1.self_attn.q_proj"]"#),
        all + attention
    );
    assert_eq!(
        weights(r#"["model.layers.7.self_attn.q_proj"]"#),
        all + 4096 * 4096
    );
    assert_eq!(
        weights(r#"["model.layers.0", "model.layers.31"]"#),
        all + 2 * layer
    );
}

#[test]
fn modules_beside_the_language_models_layers_and_small_ones_keep_nothing_in_16_bits() {
    let names = [
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.mlp.linear_fc1",
        "vision_tower.transformer.layers.0.attention.q_proj",
        "model.vision_tower.vision_model.encoder.layers.7.mlp.fc1",
        "re:.*vision_model.*",
        "audio_tower.layers.3.self_attn.q_proj",
        "multi_modal_projector.linear_1",
        "mtp.layers.0.self_attn.q_proj",
        "model.layers.1.linear_attn.conv1d",
        "model.layers.1.linear_attn.in_proj_ba",
        "model.layers.1.linear_attn.in_proj_a",
        "re:.*linear_attn.conv1d$",
        "re:.*mlp.gate$",
        "model.layers.2.post_attention_layernorm",
        "model.layers.2.self_attn.q_norm",
        "lm_head",
    ];
    let all = read(&quantized(r#"{"quant_method": "fp8"}"#)).unwrap();
    for name in names {
        let file = quantized(&format!(
            r#"{{"quant_method": "fp8", "modules_to_not_convert": ["{name}"]}}"#
        ));
        let model = read(&file).unwrap();
        assert_eq!(
            weights::bytes_per_gpu(&model, 1),
            weights::bytes_per_gpu(&all, 1),
            "{name}"
        );
        assert!(model.notes.is_empty(), "{name}: {:?}", model.notes);
    }
}

#[test]
fn another_quantization_than_the_files_can_be_asked_for() {
    let halves = weights::bytes_per_gpu(&read(LLAMA_8B).unwrap(), 1).0;
    let eighths = weights::bytes_per_gpu(&in_precision(LLAMA_8B, Precision::FP8), 1).0;
    let smaller = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096;
    assert_eq!(
        halves - eighths,
        smaller,
        "embeddings and norms keep 16 bits"
    );
}

#[test]
fn a_quantization_that_is_not_known_has_a_way_out() {
    for (config, problem) in [
        (
            r#"{"quant_method": "hqq"}"#,
            "`quantization_config.quant_method` is \"hqq\"",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 3}"#,
            "`quantization_config.bits` is 3; write 4 or 8",
        ),
    ] {
        let file = quantized(config);
        let text = message(read(&file));
        assert!(
            text.contains(problem) && text.ends_with("or say --quantization"),
            "{text}"
        );
        let model = in_precision(&file, Precision::INT4);
        assert_eq!(
            weights::bytes_per_gpu(&model, 1),
            weights::bytes_per_gpu(&in_precision(LLAMA_8B, Precision::INT4), 1)
        );
        assert!(
            model.notes[0].contains("not in int4: give the engine a checkpoint"),
            "{:?}",
            model.notes
        );
    }
}

#[test]
fn asking_for_the_files_own_quantization_changes_nothing_and_for_none_leaves_nothing_of_it() {
    let gpt = ShippedModel::find("gpt-oss-20b").unwrap();
    let own = gpt.read().unwrap();
    let asked = gpt.read_with_precision(Some(Precision::MXFP4)).unwrap();
    assert_eq!(
        (asked.layers, asked.notes),
        (own.layers.clone(), own.notes.clone())
    );
    assert!(
        own.notes.iter().any(|note| note.contains("not in mxfp4")),
        "{:?}",
        own.notes
    );
    let halves = gpt.read_with_precision(Some(Precision::HALF)).unwrap();
    assert!(
        halves.notes.iter().all(|note| !note.contains("mxfp4")),
        "{:?}",
        halves.notes
    );
    assert!(
        halves
            .notes
            .iter()
            .any(|note| note.contains("not in 16-bit")),
        "{:?}",
        halves.notes
    );
    // Blocks have scales, which plain fp8 has not.
    let blocks = quantized(r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#);
    assert_eq!(
        in_precision(&blocks, Precision::FP8).quantization.precision,
        Precision::FP8_BLOCKS
    );
}

#[test]
fn a_pods_lines_make_the_engine_load_what_was_counted() {
    let lines = |model: &ModelArchitecture, kv_cache_dtype| {
        let workload = Workload {
            kv_cache_dtype,
            ..Workload::default()
        };
        let estimate = estimate(model, &workload);
        PodLines::for_estimate(
            model,
            &estimate,
            &workload,
            pod::requested_per_gpu(&estimate),
        )
        .args
        .join(" ")
    };
    let plain = read(LLAMA_8B).unwrap();
    let fp8 = in_precision(LLAMA_8B, Precision::FP8);
    assert!(lines(&fp8, KvCacheDtype::Auto).contains("--quantization=fp8"));
    assert!(fp8.notes.is_empty(), "{:?}", fp8.notes);
    for model in [
        &plain,
        &in_precision(LLAMA_8B, Precision::INT4),
        &in_precision(LLAMA_8B, Precision::HALF),
    ] {
        assert!(!lines(model, KvCacheDtype::Auto).contains("--quantization"));
    }
    let own = read(&quantized(
        r#"{"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}"#,
    ))
    .unwrap();
    assert!(
        !lines(&own, KvCacheDtype::Auto).contains("--quantization"),
        "the file says it"
    );
    assert!(lines(&own, KvCacheDtype::Bf16).contains("--kv-cache-dtype=bfloat16"));
    assert!(
        !lines(&plain, KvCacheDtype::Bf16).contains("--kv-cache-dtype"),
        "16 bits are its own"
    );
}

#[test]
fn layers_without_a_window_are_as_many_as_the_familys_default_says() {
    let windows = |name: &str, layers: u64| {
        let file = format!(
            r#"{{"model_type": "{name}", "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 512,
                "num_hidden_layers": {layers}, "num_attention_heads": 8, "num_key_value_heads": 8,
                "sliding_window": 128, "use_sliding_window": true}}"#
        );
        let model = read(&file).unwrap();
        let has_window = |layer: &&architecture::Layer| matches!(layer.mixer, mixer::Mixer::Attention(one) if one.window.is_some());
        model.layers.iter().filter(has_window).count()
    };
    assert_eq!(
        (
            windows("qwen2", 32),
            windows("qwen3", 32),
            windows("qwen2_5_vl_text", 84)
        ),
        (4, 4, 4)
    );
    assert_eq!(windows("qwen2", 24), 0);
}

#[test]
fn the_language_model_of_a_larger_one_is_read_and_the_rest_is_noted() {
    let inner = LLAMA_8B.replace("128256", "1.5");
    let text = message(read(&format!(
        r#"{{"model_type": "mistral3", "text_config": {inner}}}"#
    )));
    assert!(
        text.starts_with("2: `text_config.vocab_size` is 1.5"),
        "{text}"
    );
    let whole = read(&format!(
        r#"{{"model_type": "mistral3", "text_config": {LLAMA_8B}}}"#
    ))
    .unwrap();
    assert_eq!(whole.parameters(), 8_030_261_248);
    assert!(
        whole
            .notes
            .iter()
            .any(|note| note.contains("images and sound")),
        "{:?}",
        whole.notes
    );
}

#[test]
fn the_sampler_or_the_widest_layer_is_the_peak() {
    let llama = read(LLAMA_8B).unwrap();
    let peak = |max_num_seqs, max_num_batched_tokens| {
        let workload = Workload {
            max_num_seqs,
            max_num_batched_tokens,
            ..Workload::default()
        };
        let part = overhead::activations(&llama, &workload);
        (part.bytes.0, part.formula)
    };
    let (sampler, formula) = peak(1024, 8192);
    assert!(formula.starts_with("the sampler"), "{formula}");
    assert_eq!(sampler, 38 * 1024 * 128_256 + 2 * 2 * 8192 * 4096);
    let (layer, formula) = peak(8, 8192);
    assert!(formula.starts_with("the widest layer"), "{formula}");
    assert_eq!(layer, 8192 * 2 * (3 * 14_336 + 3 * 4096));
}

#[test]
fn the_pods_lines_ask_for_whole_gib_over_all_gpus() {
    let model = shipped("llama-3.1-70b");
    let workload = workload_on(4);
    let estimate = estimate(&model, &workload);
    let lines = PodLines::for_estimate(
        &model,
        &estimate,
        &workload,
        pod::requested_per_gpu(&estimate),
    );
    let gib = estimate.per_gpu_bytes.0.div_ceil(1 << 30) * 4;
    assert_eq!((lines.vram, lines.gpus), (format!("{gib}Gi"), 4));
    assert_eq!(lines.kv_cache, "40Gi", "16 × 8192 × 320 KiB");
    assert!(
        lines.args.contains(&"--tensor-parallel-size=4".to_owned()),
        "{:?}",
        lines.args
    );
    assert_eq!(
        lines.args[0],
        "--gpu-memory-utilization=$(GPU_MEMORY_FRACTION)"
    );
}

#[test]
fn a_gpu_takes_an_estimate_beside_its_headroom() {
    let estimate = estimate(&read(LLAMA_8B).unwrap(), &workload_on(1));
    let asked = pod::requested_per_gpu(&estimate).0 >> 30;
    let gpu = |gib| GpuSize {
        name: "a".into(),
        memory_bytes: Bytes::gib(gib),
    };
    assert!(
        !GpuFit::new(&estimate, gpu(asked)).fits,
        "a tenth is headroom"
    );
    let fit = GpuFit::new(&estimate, gpu(80));
    assert_eq!((fit.fits, fit.engines), (true, 72 / asked));
    assert_eq!(
        (fit.vram_per_gpu_bytes, fit.fraction_percent),
        (Bytes::gib(asked), asked * 100 / 80)
    );
    let told = Bytes(80 * (1 << 30) / 100 * fit.fraction_percent);
    assert_eq!(
        fit.kv_cache_bytes,
        told.minus(estimate.fixed_bytes()) + Bytes::mib(512)
    );
}

#[test]
fn a_pod_requests_more_where_the_rounded_fraction_is_too_small() {
    let estimate = estimate(&read(LLAMA_8B).unwrap(), &workload_on(1));
    let counted = estimate.bytes_of(PartName::KvCache);
    for gib in 40..200 {
        let fit = GpuFit::new(
            &estimate,
            GpuSize {
                name: "a".into(),
                memory_bytes: Bytes::gib(gib),
            },
        );
        assert!(
            fit.kv_cache_bytes >= counted,
            "{gib}: {}",
            fit.kv_cache_bytes
        );
        assert!(fit.vram_per_gpu_bytes >= pod::requested_per_gpu(&estimate));
        assert!(
            fit.vram_per_gpu_bytes.0
                <= pod::requested_per_gpu(&estimate).0 + (gib << 30) / 100 + (1 << 30)
        );
    }
}

#[test]
fn every_shipped_model_is_read_and_found_by_either_name() {
    let mut names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
    let listed = names.clone();
    names.sort_unstable();
    assert_eq!(names, listed, "in order of name");
    for model in MODELS {
        let read = model
            .read()
            .unwrap_or_else(|error| panic!("{}: {error}", model.name));
        assert!(read.max_context.is_some(), "{}", model.name);
        assert_eq!(
            ShippedModel::find(&model.repository.to_lowercase()),
            Ok(model)
        );
    }
    let error = ShippedModel::find("lama-3.1-8b").unwrap_err().to_string();
    assert!(error.contains("did you mean `llama-3.1-8b`?"), "{error}");
}

#[test]
fn what_is_counted_as_the_largest_or_not_at_all_is_noted() {
    for (field, value, note) in [
        (
            "intermediate_size",
            "[14336, 8192]",
            "counted as the largest",
        ),
        ("num_key_value_heads", "[8, 4, 8]", "counted as the largest"),
        (
            "num_key_value_heads",
            "[8, 8]",
            "`num_key_value_heads` has 2 values for 32 layers",
        ),
        (
            "mlp_layer_types",
            "[\"dense\"]",
            "`mlp_layer_types` has 1 value for 32 layers",
        ),
        ("index_head_dim", "128", "index are not counted"),
        ("attention_chunk_size", "8192", "attention in chunks"),
    ] {
        let with = |value: &str| {
            let other = LLAMA_8B.replacen(&format!("\"{field}\""), "\"was\"", 1);
            read(&other.replacen('{', &format!("{{\"{field}\": {value}, "), 1))
                .unwrap()
                .notes
                .join("; ")
        };
        assert!(with(value).contains(note), "{field}: {}", with(value));
        let without = if value.starts_with('[') {
            let one = if value.contains('"') {
                "\"dense\""
            } else {
                "8"
            };
            format!("[{}]", [one; 32].join(", "))
        } else {
            "0".into()
        };
        assert_eq!(with(&without), "", "{field}");
    }
    let both = llama_with(
        "\"model_type\"",
        "\"attention_chunk_size\": 8192, \"sliding_window\": 8192, \"model_type\"",
    );
    let notes = both.unwrap().notes.join("; ");
    assert!(!notes.contains("in chunks"), "{notes}");
}

#[test]
fn an_estimate_beyond_any_machine_is_refused() {
    let huge = read(
        &LLAMA_8B
            .replace("14336", "4294967296")
            .replace("4096", "4294967296"),
    )
    .unwrap();
    assert_eq!(
        Estimate::for_model(&huge, &workload_on(1)),
        Err(WorkloadError::TooLarge)
    );
    let norms = r#"{"model_type": "olmo2", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4294967296, "num_key_value_heads": 4294967296,
        "head_dim": 4294967296, "attention_bias": true}"#;
    assert_eq!(
        Estimate::for_model(&read(norms).unwrap(), &workload_on(1)),
        Err(WorkloadError::TooLarge)
    );
    let model = read(LLAMA_8B).unwrap();
    let long = Workload {
        context: u64::MAX,
        sequences: u64::MAX,
        ..Workload::default()
    };
    let refused = Estimate::for_model(&model, &long).unwrap_err().to_string();
    assert!(
        refused.contains("no machine has: check --context"),
        "{refused}"
    );
}

#[test]
fn a_uniform_cache_has_neither_windows_nor_states() {
    let is_uniform = |name: &str| KvCache::for_model(&shipped(name), &workload_on(1)).is_uniform();
    assert!(is_uniform("llama-2-7b") && is_uniform("deepseek-v3"));
    assert!(!is_uniform("gemma-3-27b") && !is_uniform("jamba-1.5-mini"));
}

#[test]
fn numbers_are_grouped_by_threes() {
    for (number, text) in [
        (0, "0"),
        (999, "999"),
        (1000, "1,000"),
        (8_030_261_248, "8,030,261,248"),
    ] {
        assert_eq!(with_thousands_separators(number), text);
    }
}
