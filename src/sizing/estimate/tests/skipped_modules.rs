//! Which modules keep 16 bits: the file's names and patterns, as the loader reads them.

use super::*;

/// 4 layers of a model with experts, the first of them dense.
const EXPERTS: &str = r#"{"model_type": "deepseek_v3", "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048,
    "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1}"#;
const EXPERTS_BYTES: u64 = 3 * 8 * 3 * 512 * 256;
const SHARED_BYTES: u64 = 3 * 3 * 512 * 256;
const DENSE_BYTES: u64 = 3 * 512 * 2048;

fn with_quantization(file: &str, quantization: &str) -> ModelArchitecture {
    let field = format!("\"quantization_config\": {quantization}, \"model_type\"");
    read(&file.replacen("\"model_type\"", &field, 1)).unwrap()
}

/// Bytes that these skipped modules add to those of a model in 8 bits.
fn added_by(file: &str, skipped: &str) -> u64 {
    let bytes = |skipped: &str| {
        let model = with_quantization(
            file,
            &format!(r#"{{"quant_method": "fp8", "ignore": [{skipped}]}}"#),
        );
        weights::bytes_per_gpu(&model, 1).0
    };
    bytes(skipped) - bytes("")
}

#[test]
fn a_regex_matches_whole_names_of_modules_from_their_start() {
    // Kimi-K2.5's: the dense layer, and not the experts.
    assert_eq!(
        added_by(EXPERTS, r#""re:.*mlp\\.(gate|up|gate_up|down)_proj.*""#),
        DENSE_BYTES
    );
    assert_eq!(
        added_by(EXPERTS, r#""re:.*shared_experts.*""#),
        SHARED_BYTES
    );
    assert_eq!(
        added_by(EXPERTS, r#""re:.*\\.experts\\..*""#),
        EXPERTS_BYTES
    );
    assert_eq!(added_by(EXPERTS, r#""re:mlp.*", "re:experts""#), 0);
    assert_eq!(
        added_by(EXPERTS, r#""re:.*layers\\.[12]\\..*experts\\..*""#),
        EXPERTS_BYTES / 3 * 2
    );
}

#[test]
fn a_name_is_a_whole_part_of_a_modules_name_and_a_star_stands_for_any_text() {
    let attention_of = |names: &str| added_by(LLAMA_8B, names);
    let query = 4096 * 4096;
    let one_layer = query * 2 + 2 * 4096 * 1024;
    assert_eq!(
        attention_of(r#""model.layers.1.self_attn""#),
        one_layer,
        "not of layers 10 to 19"
    );
    assert_eq!(
        attention_of(r#""model.layers.1*.self_attn*""#),
        11 * one_layer
    );
    assert_eq!(attention_of(r#""model.layers.7.self_attn.q_proj""#), query);
    assert_eq!(attention_of(r#""q_proj""#), 32 * query);
    assert_eq!(
        attention_of(r#""gate", "proj", "attn""#),
        0,
        "MiniMax-M2.5's gate is a router, not a gate_proj"
    );
}
