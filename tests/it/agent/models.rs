//! Models on the node's disks and in its engines.

use super::world::{AgentNode, GIB, StubEngine, engine_at, gpu};
use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;

const VLLM: &str = include_str!("../../fixtures/engines/vllm-0.12.txt");
/// The model that page is of.
const CACHED_MODEL: &str = "meta-llama/Llama-3.1-8B-Instruct";

/// Lays files down as the hub's client does: blobs, and a snapshot of links to them.
fn fetched(cache: &Path, model: &str, files: &[(&str, usize)]) {
    let folder = cache.join(format!("models--{}", model.replace('/', "--")));
    let snapshot = folder.join("snapshots").join("c0ffee");
    [&folder.join("blobs"), &folder.join("refs"), &snapshot]
        .iter()
        .for_each(|folder| std::fs::create_dir_all(folder).unwrap());
    std::fs::write(folder.join("refs/main"), "c0ffee").unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.join("blobs").join(name), vec![7; *bytes]).unwrap();
        symlink(Path::new("../../blobs").join(name), snapshot.join(name)).unwrap();
    }
}

/// Tier, bytes and source of a model.
fn found<'a>(report: &'a Value, model: &str) -> (&'a str, u64, &'a str) {
    let models = report["models"].as_array().unwrap();
    let found = models
        .iter()
        .find(|found| found["model"] == model)
        .unwrap_or_else(|| panic!("{report:#}"));
    (
        found["tier"].as_str().unwrap(),
        found["bytes"].as_u64().unwrap(),
        found["source"].as_str().unwrap(),
    )
}

#[test]
fn a_model_is_reported_as_loaded_complete_or_partial() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let cache = world.folder().join("hub");
    fetched(
        &cache,
        "org/whole",
        &[("model.safetensors", 9000), ("config.json", 10)],
    );
    fetched(
        &cache,
        "org/part",
        &[("model-00001-of-00002.safetensors", 5000)],
    );
    fetched(&cache, CACHED_MODEL, &[("model.safetensors", 7000)]);
    let images = json!([{ "names": ["r.io/org/image:1"], "sizeBytes": 3 * GIB }]);
    world
        .api
        .patch_status("nodes/node-a", &json!({ "status": { "images": images } }))
        .unwrap();
    let engine = StubEngine::serving(&world, VLLM);
    world.pod("llama", |pod| engine_at(pod, engine.port));
    let arguments = ["--hf-cache", cache.to_str().unwrap()];
    let is_held = |report: &Value| {
        let models = report["models"].as_array();
        ["engine", "image"]
            .iter()
            .all(|by| models.is_some_and(|all| all.iter().any(|m| m["source"] == *by)))
    };
    let report = world.report_until(&arguments, |report| {
        is_held(report) && report["missing"].is_null()
    });
    let (tier, bytes, source) = found(&report, "org/whole");
    assert!(
        matches!(tier, "disk" | "page-cache"),
        "the kernel may or may not keep what was just written: {tier}"
    );
    assert_eq!((bytes, source), (9000, "huggingface"));
    assert_eq!(found(&report, "org/part"), ("partial", 5000, "huggingface"));
    assert_eq!(
        found(&report, CACHED_MODEL),
        ("resident", 7000, "engine"),
        "the disk knows what it weighs"
    );
    assert_eq!(
        found(&report, "oci://r.io/org/image:1"),
        ("disk", 3 * GIB, "image")
    );
}

#[test]
fn a_mounted_folder_without_models_yet_is_not_missing() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let home = world.folder().join("models");
    std::fs::create_dir(&home).unwrap();
    for cache in [home.join("hub"), home.clone()] {
        world.report_until(&["--hf-cache", cache.to_str().unwrap()], |report| {
            report["gpus"].is_array() && report["missing"].is_null()
        });
    }
}

#[test]
fn a_missing_model_cache_is_named_and_the_rest_is_reported() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let nowhere = world.folder().join("nowhere");
    let report = world.report_until(&["--hf-cache", nowhere.to_str().unwrap()], |report| {
        report["missing"][0]["part"] == "models"
    });
    assert!(
        report["missing"][0]["reason"]
            .as_str()
            .unwrap()
            .contains("nowhere"),
        "{report:#}"
    );
    assert_eq!(report["gpus"][0]["uuid"], json!("GPU-a"));
}
