//! The node's models put together: folders, engines, and the best of both.

use super::*;
use proptest::prelude::*;
use serde_json::json;
use std::fs;

fn engine(model: Option<&str>, state: &str, level: Option<u8>) -> EngineReport {
    serde_json::from_value(json!({
        "pod": "p", "engine": "vllm", "gpus": [], "state": state, "model": model, "sleepLevel": level,
    }))
    .unwrap()
}

fn model(name: &str, tier: ModelTier, bytes: u64, source: &str) -> ModelReport {
    ModelReport {
        model: ModelId::parse(name).unwrap(),
        tier,
        bytes: Bytes(bytes),
        source: source.into(),
    }
}

#[test]
fn the_tier_of_an_engines_model_follows_its_state() {
    for (state, level, tier) in [
        ("serving", None, Some(ModelTier::Resident)),
        ("draining", None, Some(ModelTier::Resident)),
        ("loading", None, Some(ModelTier::Loading)),
        ("sleeping", Some(1), Some(ModelTier::Sleeping)),
        ("sleeping", Some(2), None),
        ("sleeping", None, None),
        ("starting", None, None),
        ("unreachable", None, None),
    ] {
        let held = loaded_by_engines(&[engine(Some("llama"), state, level)]);
        let expected: Vec<_> = tier
            .map(|tier| model("llama", tier, 0, "engine"))
            .into_iter()
            .collect();
        assert_eq!(held, expected, "{state}");
    }
    assert_eq!(loaded_by_engines(&[engine(None, "serving", None)]), []);
}

#[test]
fn a_model_found_twice_has_the_nearer_tier_and_the_size_on_disk() {
    let merged = merge_models([
        model("b", ModelTier::Disk, 10, "kserve"),
        model("a", ModelTier::Partial, 3, "huggingface"),
        model("b", ModelTier::Resident, 0, "engine"),
        model("a", ModelTier::Sleeping, 0, "engine"),
        model("c", ModelTier::Partial, 3, "huggingface"),
        model("c", ModelTier::Partial, 7, "kserve"),
    ]);
    assert_eq!(
        merged,
        [
            model("a", ModelTier::Sleeping, 0, "engine"),
            model("b", ModelTier::Resident, 10, "engine"),
            model("c", ModelTier::Partial, 7, "kserve"),
        ],
        "a part does not tell what the whole weighs"
    );
}

fn any_model() -> impl Strategy<Value = ModelReport> {
    let tier = prop::sample::select(vec![
        ModelTier::Partial,
        ModelTier::Disk,
        ModelTier::PageCache,
        ModelTier::Sleeping,
        ModelTier::Resident,
    ]);
    ("[ab]", tier, 0u64..3, "[xy]")
        .prop_map(|(name, tier, bytes, source)| model(&name, tier, bytes, &source))
}

proptest! {
    #[test]
    fn what_is_merged_is_the_same_in_any_order(
        (models, shuffled) in prop::collection::vec(any_model(), 0..8)
            .prop_flat_map(|models| (Just(models.clone()), Just(models).prop_shuffle())),
    ) {
        let one = merge_models(models.clone());
        prop_assert_eq!(&one, &merge_models(shuffled));
        for report in &one {
            let best = models.iter().filter(|model| model.model == report.model).map(|model| model.tier).max();
            prop_assert_eq!(Some(report.tier), best);
        }
        prop_assert!(one.windows(2).all(|pair| pair[0].model < pair[1].model));
    }
}

fn put(folder: &std::path::Path, path: &str, text: &str) {
    let path = folder.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn sources_are_combined_and_a_failing_one_hides_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    put(
        folder.path(),
        "hf/models--org--a/snapshots/c/model.safetensors",
        "12345",
    );
    put(folder.path(), "hf/models--org--a/refs/main", "c");
    put(
        folder.path(),
        "kserve/models/b/model-00001-of-00002.safetensors",
        "123",
    );
    let mut source = NodeModels::new(vec![path("missing"), path("hf")], vec![path("kserve")]);
    let scan = source.models();
    let [b, a] = &scan.models[..] else {
        panic!("{scan:?}")
    };
    assert!(
        matches!(a.tier, ModelTier::Disk | ModelTier::PageCache),
        "the file system decides what it tells"
    );
    assert_eq!(*a, model("org/a", a.tier, 5, "huggingface"));
    assert_eq!(*b, model("b", ModelTier::Partial, 3, "kserve"));
    assert!(
        scan.problems.len() == 1 && scan.problems[0].contains("missing"),
        "{:?}",
        scan.problems
    );
}

#[test]
fn folders_are_scanned_every_half_minute() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("models")).unwrap();
    let mut source = NodeModels::new(vec![], vec![folder.path().into()]);
    let (now, clock) = (Instant::now(), SystemTime::now());
    assert_eq!(source.models_at(now, clock).models, []);
    put(folder.path(), "models/a/model.gguf", "1");
    assert_eq!(
        source
            .models_at(now + MODEL_SCAN_INTERVAL - Duration::from_millis(1), clock)
            .models,
        []
    );
    assert_eq!(
        source
            .models_at(now + MODEL_SCAN_INTERVAL, clock)
            .models
            .len(),
        1
    );
}

#[test]
fn default_caches_are_the_folders_that_exist() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join(".cache/huggingface/hub");
    fs::create_dir_all(&home).unwrap();
    let variable = |name: &str| match name {
        "HOME" => Some(folder.path().into()),
        "XDG_CACHE_HOME" => Some(folder.path().join(".cache").into()),
        "HF_HOME" => Some("/nonexistent".into()),
        _ => None,
    };
    assert_eq!(default_hugging_face_caches(variable), [home]);
    assert!(default_hugging_face_caches(|_| None).is_empty());
}
