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
        added_by(EXPERTS, r#""re:.*layers\\.[12]\\..*\\.experts\\..*""#),
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
        attention_of(r#""gate", "proj", "self_at""#),
        0,
        "MiniMax-M2.5's gate is a router, not a gate_proj"
    );
}

#[test]
fn each_name_of_the_list_is_read() {
    for list in [
        "ignore",
        "llm_int8_skip_modules",
        "modules_to_not_convert",
        "exclude_modules",
        "ignored_layers",
    ] {
        let model = with_quantization(
            LLAMA_8B,
            &format!(
                r#"{{"quant_method": "bitsandbytes", "load_in_8bit": true, "{list}": ["self_attn"]}}"#
            ),
        );
        let all = with_quantization(
            LLAMA_8B,
            r#"{"quant_method": "bitsandbytes", "load_in_8bit": true}"#,
        );
        let added = weights::bytes_per_gpu(&model, 1).0 - weights::bytes_per_gpu(&all, 1).0;
        assert_eq!(added, 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024), "{list}");
    }
}

#[test]
fn every_group_has_its_own_precision_and_what_is_in_none_keeps_16_bits() {
    let matrices = |config: &str| {
        let model = with_quantization(LLAMA_8B, config);
        weights::bytes_per_gpu(&model, 1).0 - 2 * (2 * 128_256 * 4096 + 65 * 4096)
    };
    let attention = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024);
    let feed_forward = 32 * 3 * 4096 * 14_336;
    let group = |targets: &str, bits: u64| {
        format!(
            r#"{{"targets": [{targets}], "weights": {{"num_bits": {bits}, "type": "float", "group_size": 16}}}}"#
        )
    };
    let groups = |all: &[String]| {
        let all: Vec<String> = all
            .iter()
            .enumerate()
            .map(|(at, one)| format!("\"group_{at}\": {one}"))
            .collect();
        matrices(&format!(
            r#"{{"quant_method": "compressed-tensors", "config_groups": {{{}}}}}"#,
            all.join(", ")
        ))
    };
    let names = |text: &str| text.to_owned();
    // The one that names a module comes before the one for all, in either order.
    for all in [
        [group(r#""Linear""#, 4), group(r#""re:.*self_attn.*""#, 8)],
        [
            group(r#""re:.*self_attn.*""#, 8),
            group(&names(r#""Linear""#), 4),
        ],
    ] {
        assert_eq!(groups(&all), attention + feed_forward * 9 / 16);
    }
    assert_eq!(
        groups(&[group(r#""re:.*mlp.*""#, 4)]),
        attention * 2 + feed_forward * 9 / 16
    );
    // ModelOpt names each module with its algorithm.
    let layers: Vec<String> = (0..32)
        .flat_map(|layer| {
            ["gate", "up", "down"].map(|name| {
                format!(r#""model.layers.{layer}.mlp.{name}_proj": {{"quant_algo": "W4A16_NVFP4", "group_size": 16}}"#)
            })
        })
        .collect();
    let mixed = format!(
        r#"{{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {{
            "model.layers.0.self_attn.q_proj": {{"quant_algo": "FP8"}}, {}}}}}"#,
        layers.join(", ")
    );
    assert_eq!(
        matrices(&mixed),
        attention * 2 - 4096 * 4096 + feed_forward * 9 / 16
    );
}

#[test]
fn a_pattern_that_is_not_read_is_named_in_whichever_list_it_is() {
    let notes = |quantization: &str| with_quantization(LLAMA_8B, quantization).notes.join("; ");
    let group = |targets: &str| {
        notes(&format!(
            r#"{{"quant_method": "compressed-tensors", "config_groups": {{"group_0": {{"targets": [{targets}],
               "weights": {{"num_bits": 4, "type": "int", "group_size": 128}}}}}}}}"#
        ))
    };
    for unread in [
        group(r#""re:(""#),
        group(r#""re:.*mlp.*", "re:(""#),
        notes(r#"{"quant_method": "fp8", "ignore": ["re:(", "self_attn"]}"#),
    ] {
        assert!(
            unread.contains("`re:(` is no pattern that is read here")
                && !unread.contains("the file names them"),
            "{unread}"
        );
    }
    let named = group(r#""re:.*mlp.*""#);
    assert!(named.contains("the file names them"), "{named}");
}

#[test]
fn patterns_that_are_too_large_have_a_way_out() {
    let large = [r#""re:.*\\w{150}""#; 8].join(", ");
    for file in [
        format!(r#"{{"quant_method": "fp8", "ignore": ["lm_head", {large}]}}"#),
        format!(
            r#"{{"quant_method": "compressed-tensors", "config_groups": {{"group_0": {{"targets": [{large}],
               "weights": {{"num_bits": 8, "type": "float"}}}}}}}}"#
        ),
    ] {
        let file = quantized(&file);
        let text = message(read(&file));
        assert!(
            text.contains("fewer or simpler patterns, or say --quantization"),
            "{text}"
        );
        let halves = in_precision(&file, Precision::HALF);
        assert_eq!(halves.parameters(), 8_030_261_248);
    }
}

#[test]
fn groups_are_as_many_as_one_likes_and_their_precisions_are_not() {
    let groups = |count: usize, group_size: fn(usize) -> usize| {
        let groups: Vec<String> = (0..count)
            .map(|at| {
                let size = group_size(at);
                format!(
                    r#""group_{at}": {{"targets": ["re:.*layers\\.{at}\\.mlp.*"],
                       "weights": {{"num_bits": 4, "type": "int", "group_size": {size}}}}}"#
                )
            })
            .collect();
        let quantization = r#"{"quant_method": "compressed-tensors", "config_groups": {"#;
        quantized(&format!("{quantization}{}}}}}", groups.join(", ")))
    };
    let many = read(&groups(500, |_| 128)).unwrap();
    let feed_forward = 32 * 3 * 4096 * 14336_u64;
    let halves = read(LLAMA_8B).unwrap();
    let saved = weights::bytes_per_gpu(&halves, 1).0 - weights::bytes_per_gpu(&many, 1).0;
    assert_eq!(saved, feed_forward * 2 - feed_forward / 128 * 66);
    assert!(read(&groups(16, |at| at + 1)).is_ok());
    for count in [17, 3000] {
        let file = groups(count, |at| at + 1);
        let text = message(read(&file));
        assert!(
            text.contains("groups of at most 16 precisions, or say --quantization"),
            "{text}"
        );
        assert_eq!(
            in_precision(&file, Precision::INT4).quantization.precision,
            Precision::INT4
        );
    }
}
