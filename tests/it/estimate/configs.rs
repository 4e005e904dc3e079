//! Published models' files against what is known of them (`tests/fixtures/estimate/configs/expected.csv`), and files of models
//! that nobody knows.

use super::command::{folder, path, stowage};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/estimate/configs")
}

fn published(name: &str) -> String {
    std::fs::read_to_string(configs().join(name).join("config.json")).unwrap()
}

/// The estimate of a model, whether it fits on a GPU or not.
fn counted(folder: &Path) -> Value {
    let said = stowage(&[path(folder), "-o", "json"]);
    assert!(matches!(said.code, 0 | 1), "{}", said.err);
    serde_json::from_str(&said.out).unwrap()
}

fn of_config(text: &str) -> Value {
    counted(folder(text).path())
}

fn notes(answer: &Value) -> String {
    answer["notes"].to_string()
}

#[test]
fn published_weights_and_kv_caches_are_met_within_five_percent() {
    let expected = std::fs::read_to_string(configs().join("expected.csv")).unwrap();
    let mut far = Vec::new();
    for row in expected.lines().skip(1) {
        let columns: Vec<&str> = row.split(',').collect();
        let answer = counted(&configs().join(columns[0]));
        let weights = answer["parts"][0]["bytes"].as_f64().unwrap() / f64::from(1 << 30);
        let token = answer["kvCache"]["bytesPerToken"].as_f64().unwrap();
        let figures = [(weights, columns[1]), (token, columns[2])];
        let published = figures.iter().filter(|(_, figure)| !figure.is_empty());
        assert!(published.clone().count() > 0, "{row}");
        for (counted, expected) in published {
            let expected: f64 = expected.parse().unwrap();
            if (counted / expected - 1.0).abs() > 0.05 {
                far.push(format!("{}: {counted}, expected {expected}", columns[0]));
            }
        }
    }
    assert!(far.is_empty(), "{}", far.join("\n"));
}

#[test]
fn a_quantization_in_a_file_of_its_own_is_read_unless_the_model_s_file_has_one() {
    let folder = folder(&published("meta-llama--Meta-Llama-3.1-8B"));
    let weights = |quantization: &str| {
        std::fs::write(folder.path().join("hf_quant_config.json"), quantization).unwrap();
        let said = stowage(&[path(folder.path()), "-o", "json"]);
        let answer: Value = serde_json::from_str(&said.out).unwrap_or_default();
        (answer["parts"][0]["bytes"].as_u64().unwrap_or(0), said.err)
    };
    // Embeddings keep 16 bits.
    let (fp8, _) = weights(r#"{"quantization": {"quant_algo": "FP8"}}"#);
    assert!(fp8 < 9 << 30, "{fp8}");
    let (skipping, _) =
        weights(r#"{"quantization": {"quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}}"#);
    assert_eq!(skipping - fp8, 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024));
    let (_, error) = weights(r#"{"quantization": {"quant_algo": "FP9"}}"#);
    assert!(
        error.contains("`quantization_config.quant_algo` is \"FP9\"; write FP8 or NVFP4")
            && error.contains("hf_quant_config.json has it"),
        "{error}"
    );
    let (_, error) = weights("[]");
    assert!(
        error.contains("hf_quant_config.json: this is a JSON array"),
        "{error}"
    );
}

#[test]
fn a_field_of_zero_says_none() {
    let parameters = |answer: &Value| answer["parameters"].as_u64().unwrap();
    let minimax = of_config(&published("MiniMaxAI--MiniMax-M2.5"));
    assert_eq!(parameters(&minimax) / 100_000_000, 2286, "no shared expert");
    let mistral = published("mistralai--Mixtral-8x7B-v0.1");
    let without = mistral.replace("\"sliding_window\": null", "\"sliding_window\": 0");
    assert_ne!(mistral, without);
    assert_eq!(
        of_config(&without)["kvCache"],
        of_config(&mistral)["kvCache"]
    );
    let llama = published("meta-llama--Meta-Llama-3.1-8B");
    let without = llama.replacen('{', "{\"num_experts\": 0, \"head_dim\": 0, ", 1);
    assert_eq!(of_config(&without)["parts"], of_config(&llama)["parts"]);
}

#[test]
fn parameters_are_those_that_the_makers_publish() {
    for (name, billions) in [
        ("MiniMaxAI--MiniMax-M3", 426.0),
        ("XiaomiMiMo--MiMo-V2-Flash", 309.0),
        ("Qwen--Qwen3-235B-A22B", 235.0),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", 32.8),
        ("deepseek-ai--DeepSeek-V3.2", 671.0),
        ("deepseek-ai--DeepSeek-V4-Flash", 284.0),
        ("google--gemma-4-26B-A4B", 25.2),
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", 108.0),
        ("meta-llama--Meta-Llama-3.1-405B", 405.9),
        ("meta-llama--Meta-Llama-3.1-70B", 70.6),
        ("mlc--gemma3_1b_it", 1.0),
        ("mlc--gpt2", 0.124),
        ("mlc--internlm2_5_7b", 7.74),
        ("mlc--ministral3_3b_2512", 3.4),
        ("mlc--phi-2", 2.78),
        ("mlc--stablelm", 2.8),
        ("moonshotai--Kimi-K2-Instruct", 1026.0),
        ("stepfun-ai--Step-3.7-Flash", 196.0),
        ("zai-org--GLM-4.5-Air", 106.0),
        ("zai-org--GLM-5", 744.0),
        ("zai-org--GLM-5.2-FP8", 744.0),
    ] {
        let answer = counted(&configs().join(name));
        let counted = answer["parameters"].as_f64().unwrap() / 1e9;
        assert!((counted / billions - 1.0).abs() < 0.05, "{name}: {counted}");
    }
}

#[test]
fn a_model_that_nobody_knows_is_counted_by_its_common_fields_with_a_caution() {
    let llama = published("meta-llama--Meta-Llama-3.1-8B");
    let unknown = of_config(&llama.replace("\"llama\"", "\"newcomer\""));
    assert_eq!(unknown["parts"], of_config(&llama)["parts"]);
    let caution = notes(&unknown);
    assert!(
        caution.contains("`newcomer` is not known here: it is counted as Llama"),
        "{caution}"
    );
    // Other names of the same sizes, and latent attention by its fields.
    let gpt = of_config(
        r#"{"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432,
            "ffn_hidden_size": 16384}"#,
    );
    assert_eq!(gpt["kvCache"]["bytesPerToken"], 2 * 32 * 4096 * 2);
    let latent =
        of_config(&published("deepseek-ai--DeepSeek-V3").replace("\"deepseek_v3\"", "\"v9\""));
    assert_eq!(latent["kvCache"]["bytesPerToken"], 70_272);
    // What is not understood is counted as what takes most.
    let layers = llama.replacen(
        '{',
        &format!(
            "{{\"layer_types\": [{}], ",
            vec!["\"new_attention\""; 32].join(", ")
        ),
        1,
    );
    let layers = of_config(&layers);
    assert_eq!(layers["kvCache"]["bytesPerToken"], 131_072);
    assert!(notes(&layers).contains("`new_attention` are counted as attention to all"));
    // A size that is missing has no value that could stand for it.
    let lacking = stowage(&[path(
        folder(&llama.replace("num_hidden_layers", "depth")).path(),
    )]);
    assert!(
        lacking.code == 2 && lacking.err.contains("`num_hidden_layers` is missing"),
        "{}",
        lacking.err
    );
}
