//! Hostile files: whatever numbers and shapes a `config.json` has, it is read or refused, and what is read is summed without
//! overflow. Of sound ones, more of anything never takes less.

use super::architecture::ModelArchitecture;
use super::config::Config;
use super::family::FAMILIES;
use super::gpus::{GpuFit, known_gpus};
use super::kv_cache::KvCacheDtype;
use super::pod::PodLines;
use super::quantization::Precision;
use super::right_size::{Observation, RightSize};
use super::{Bytes, Estimate, Workload};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A file with what any family asks for.
fn sound() -> Value {
    json!({
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": false, "attention_bias": true, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "attn_layer_period": 2,
        "attn_layer_offset": 1, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_n_groups": 1, "hybrid_override_pattern": "M*-E", "attn_layer_indices": [1],
        "n_embd": 64, "n_layer": 4, "n_head": 8, "n_inner": 128, "n_positions": 256, "ffn_dim": 128,
    })
}

/// Fields that a sound file needs not have.
const OPTIONAL: [&str; 16] = [
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "layer_types",
    "use_qk_norm",
    "num_local_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "mlp_only_layers",
    "full_attention_interval",
    "quantization_config",
    "text_config",
    "mlp_bias",
    "mamba_ssm_dtype",
];

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        8 => prop::sample::select(&[1u64, 2, 4, 8, 16, 64, 1000, 1 << 20, 1 << 32][..]).prop_map(Value::from),
        1 => any::<u64>().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => "[M*E\\-]{0,9}".prop_map(Value::from),
        1 => Just(Value::Null),
        1 => prop::collection::vec("full_attention|sliding_attention|mamba|x", 0..5).prop_map(Value::from),
        1 => Just(json!({"quant_method": "gptq", "bits": 4, "group_size": 1u64 << 40, "ignore": ["model.layers.99999999999999999999.mlp"]})),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop::collection::vec(inner, 0..3).prop_map(Value::from)
    })
}

/// A known `model_type`, or one of a model that nobody knows.
fn any_family() -> impl Strategy<Value = &'static str> {
    let names = FAMILIES
        .iter()
        .flat_map(|family| family.names.iter().copied());
    prop::sample::select(names.chain(["new"]).collect::<Vec<_>>())
}

/// A sound file of some family, with a few fields of any value.
fn any_file() -> impl Strategy<Value = String> {
    let family = any_family();
    let sound_fields: Vec<String> = sound().as_object().unwrap().keys().cloned().collect();
    let field = prop_oneof![
        prop::sample::select(sound_fields),
        prop::sample::select(&OPTIONAL[..]).prop_map(str::to_owned),
    ];
    (family, prop::collection::vec((field, any_value()), 0..6)).prop_map(|(family, fields)| {
        let mut file = sound();
        fields
            .into_iter()
            .for_each(|(name, value)| file[name] = value);
        file["model_type"] = family.into();
        file.to_string()
    })
}

fn any_workload() -> impl Strategy<Value = Workload> {
    let size = || prop_oneof![1u64..10_000, any::<u64>()];
    let gpus = prop_oneof![9 => prop::sample::select(&[1u64, 2, 4][..]), 1 => any::<u64>()];
    let dtype =
        prop::sample::select(&[KvCacheDtype::Auto, KvCacheDtype::Bf16, KvCacheDtype::Fp8][..]);
    (size(), size(), gpus, size(), size(), dtype, any::<bool>()).prop_map(
        |(
            context,
            sequences,
            tensor_parallel,
            max_num_seqs,
            max_num_batched_tokens,
            kv_cache_dtype,
            cuda_graphs,
        )| {
            Workload {
                context,
                sequences,
                tensor_parallel,
                max_num_seqs,
                max_num_batched_tokens,
                kv_cache_dtype,
                cuda_graphs,
            }
        },
    )
}

/// A sound file of a dense model, by its sizes.
fn dense(layers: u64, heads: u64, kv_heads: u64, head_dim: u64, inner: u64) -> String {
    let file = json!({
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": heads * head_dim, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads * kv_heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    });
    file.to_string()
}

fn model(file: &str, precision: Option<Precision>) -> ModelArchitecture {
    ModelArchitecture::read_with_precision(&Config::parse(file).unwrap(), precision).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn a_sound_file_is_read_in_every_family(family in any_family()) {
        let mut file = sound();
        file["model_type"] = family.into();
        let model = ModelArchitecture::read(&Config::parse(&file.to_string()).unwrap());
        prop_assert!(model.is_ok(), "{}: {:?}", family, model);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,80}|[{}\\[\\]\":,a-zNI0-9. \\\\-]{0,80}") {
        let _ = Config::parse(&text);
    }

    #[test]
    fn a_file_nested_deeply_is_refused(depth in 200usize..5000) {
        let [objects, lists] = ["{\"a\":", "["].map(|open| Config::parse(&open.repeat(depth)));
        prop_assert!(objects.is_err() && lists.is_err());
    }

    #[test]
    fn no_file_and_no_workload_overflow(
        file in any_file(),
        workload in any_workload(),
        usage: f64,
        reserved in any::<Option<u64>>(),
        tokens in any::<Option<u64>>(),
    ) {
        let Ok(model) = ModelArchitecture::read(&Config::parse(&file).unwrap()) else { return Ok(()) };
        let Ok(estimate) = Estimate::for_model(&model, &workload) else { return Ok(()) };
        prop_assert!(estimate.active_parameters <= estimate.parameters);
        let sum: Bytes = estimate.parts.iter().map(|part| part.bytes).sum();
        prop_assert_eq!(sum, estimate.per_gpu_bytes);
        for gpu in known_gpus() {
            let fit = GpuFit::new(&estimate, gpu);
            let _ = PodLines::for_estimate(&model, &estimate, &workload, fit.vram_per_gpu_bytes);
        }
        let seen = Observation {
            reserved: reserved.map(Bytes),
            kv_cache_usage: Some(usage),
            kv_cache_tokens: tokens,
            ..Observation::default()
        };
        if let Ok(size) = RightSize::new(&model, &workload, &estimate, &seen) {
            prop_assert!(size.kv_cache_used_bytes <= size.kv_cache_bytes);
        }
    }

    /// Sizes that are each allowed, and together are more than 64 bits count.
    #[test]
    fn sizes_at_their_limit_are_counted_or_refused(
        family in any_family(),
        at_limit in prop::collection::vec(any::<bool>(), sound().as_object().unwrap().len()),
        limit in prop::sample::select(&[1u64 << 16, 1 << 31, 1 << 32][..]),
    ) {
        let mut file = sound();
        let numbers = file.as_object_mut().unwrap().iter_mut().filter(|(_, value)| value.is_u64());
        for ((name, value), is_at_limit) in numbers.zip(at_limit) {
            if is_at_limit && !["num_hidden_layers", "n_layer"].contains(&name.as_str()) {
                *value = limit.into();
            }
        }
        file["model_type"] = family.into();
        let Ok(model) = ModelArchitecture::read(&Config::parse(&file.to_string()).unwrap()) else { return Ok(()) };
        if let Ok(estimate) = Estimate::for_model(&model, &Workload::default()) {
            prop_assert!(estimate.total_bytes < Bytes(u64::MAX) && estimate.parameters < u64::MAX);
        }
    }

    #[test]
    fn more_of_anything_never_takes_less(
        (layers, heads, kv_heads) in (1u64..40, 1u64..12, 1u64..12),
        (head_dim, inner) in (8u64..256, 8u64..20_000),
        (context, sequences) in (1u64..100_000, 1u64..100),
    ) {
        let workload = Workload { context, sequences, ..Workload::default() };
        let file = dense(layers, heads, kv_heads, head_dim, inner);
        let bytes = |file: &str, workload: &Workload| {
            Estimate::for_model(&model(file, None), workload).unwrap().per_gpu_bytes
        };
        let least = bytes(&file, &workload);
        prop_assert!(bytes(&dense(layers + 1, heads, kv_heads, head_dim, inner), &workload) > least);
        prop_assert!(bytes(&dense(layers, heads, kv_heads, head_dim, inner + 8), &workload) > least);
        let more = Workload { sequences: sequences + 1, ..workload };
        prop_assert!(bytes(&file, &more) > least);
        let longer = Workload { context: context + 16, ..workload };
        prop_assert!(bytes(&file, &longer) > least);
        let int4 = model(&file, Some(Precision::INT4));
        prop_assert!(Estimate::for_model(&int4, &workload).unwrap().per_gpu_bytes < least);
        let halves = Workload { kv_cache_dtype: KvCacheDtype::Fp8, ..workload };
        prop_assert!(bytes(&file, &halves) < least);
    }

    #[test]
    fn shares_over_gpus_add_up_to_the_whole_and_little_more(
        (layers, heads, head_dim, inner) in (1u64..20, 1u64..9, 8u64..200, 64u64..20_000),
    ) {
        // Eight KV heads can be split over 2, 4 and 8.
        let model = model(&dense(layers, heads, 8, head_dim, inner), None);
        let whole = super::weights::bytes_per_gpu(&model, 1).0;
        for gpus in [2, 4, 8] {
            let shares = super::weights::bytes_per_gpu(&model, gpus).0 * gpus;
            // Norms are on every GPU, and every division is rounded up.
            let norms = (2 * layers + 1) * heads * head_dim * 2 * gpus;
            prop_assert!(shares >= whole);
            prop_assert!(shares <= whole + norms + 64 * gpus * (layers + 1), "{} of {}", shares, whole);
        }
    }
}
