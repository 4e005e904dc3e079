//! The declarations agree with each other.

use super::{DECLARATIONS, Engine};
use std::collections::BTreeSet;

#[test]
fn an_engine_is_known_by_a_label_or_by_its_image() {
    for (text, engine) in [
        ("vllm", Engine::Vllm),
        ("docker.io/vllm/vllm-openai:v0.33.0", Engine::Vllm),
        ("nvcr.io/nvidia/ai-dynamo/vllm-runtime:1", Engine::Dynamo),
        (
            "nvcr.io/nvidia/tensorrt-llm/release:1.2",
            Engine::TrtllmServe,
        ),
        (
            "nvcr.io/nvidia/tritonserver:26.01-trtllm-python-py3",
            Engine::Triton,
        ),
        ("nvcr.io/nim/meta/llama-3.1-8b-instruct:1.8", Engine::Nim),
        ("rayproject/ray-llm:2.52.0-py311-cu128", Engine::RayServe),
        ("alpindale/aphrodite-openai:latest", Engine::Aphrodite),
        ("lmsysorg/sglang", Engine::Sglang),
        (
            "ghcr.io/huggingface/text-generation-inference:3",
            Engine::Tgi,
        ),
        ("Llama-CPP", Engine::LlamaCpp),
        ("postgis", Engine::Other),
        ("engine:1", Engine::Other),
    ] {
        assert_eq!(Engine::from_text(text), engine, "{text}");
    }
}

#[test]
fn an_engine_of_an_earlier_or_a_later_version_is_read_back() {
    for (text, engine) in [
        ("\"trt-llm\"", Engine::TrtllmServe),
        ("\"llama-cpp\"", Engine::LlamaCpp),
        ("\"other\"", Engine::Other),
        ("\"of-a-later-version\"", Engine::Other),
    ] {
        assert_eq!(serde_json::from_str::<Engine>(text).unwrap(), engine);
    }
    for engine in Engine::ALL {
        let text = serde_json::to_string(&engine).unwrap();
        assert_eq!(serde_json::from_str::<Engine>(&text).unwrap(), engine);
    }
}

#[test]
fn every_engine_has_one_declaration_and_names_of_its_own() {
    let mut names = BTreeSet::new();
    let mut prefixes = BTreeSet::new();
    for (index, one) in DECLARATIONS.iter().enumerate() {
        assert_eq!(one.engine as usize, index, "{}", one.name);
        assert!(
            one.spellings
                .iter()
                .chain([&one.name])
                .all(|name| names.insert(*name)),
            "{}",
            one.name
        );
        assert!(
            one.path.starts_with('/')
                && one.health.is_none_or(|health| health.path.starts_with('/'))
        );
        for dialect in one.dialects {
            assert!(prefixes.insert(dialect.prefix), "{}", dialect.prefix);
            assert!(
                dialect.prefix.is_empty() != dialect.required.is_empty(),
                "{}",
                one.name
            );
        }
    }
}
