//! The name of a model. One model has several: `Qwen/Qwen3-32B`, `hf://Qwen/Qwen3-32B`, `qwen/qwen3-32b`, the path at which an
//! engine finds its files, and in labels, which cannot hold a `/`, `Qwen3-32B` or `Qwen-Qwen3-32B`.
//!
//! Names are equal if their canonical forms are. What leaves open which model it is stays a name of its own.

use super::{InvalidName, NameVisitor, validate_name};
use rustc_hash::FxHasher;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A model an engine serves, such as `meta-llama/Llama-3.1-8B`.
#[derive(Debug, Clone, schemars::JsonSchema)]
#[schemars(with = "String")]
pub struct ModelId {
    /// As it was written, for people.
    text: Arc<str>,
    canonical: Arc<str>,
}

impl ModelId {
    pub fn parse(text: &str) -> Result<Self, InvalidName> {
        validate_name("model id", text).map(|()| Self::from_text(text.into()))
    }

    /// The model of a pod or an engine; `None` for a path at which any model may be, such as KServe's `/mnt/models`.
    pub fn parse_unless_generic_path(text: &str) -> Result<Option<Self>, InvalidName> {
        let model = Self::parse(text)?;
        let last = model.canonical.rsplit('/').next();
        Ok(
            Some(model.clone())
                .filter(|_| !(model.is_path() && last.is_some_and(is_models_folder))),
        )
    }

    fn from_text(text: Arc<str>) -> Self {
        let canonical = match canonical(&text) {
            Cow::Borrowed(same) if same.len() == text.len() => text.clone(),
            other => other.into(),
        };
        Self { text, canonical }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The one of `candidates` that this is a short name of: without its organization, or joined to it by a mark that labels may hold.
    /// Itself if that leaves none or several, and at once if it has its organization.
    pub fn resolve_among<'a>(&'a self, candidates: impl IntoIterator<Item = &'a Self>) -> &'a Self {
        if self.has_organization() {
            return self;
        }
        let mut found: Option<&Self> = None;
        for model in candidates {
            if model == self
                || self.is_short_name_of(model) && found.is_some_and(|found| found != model)
            {
                return self;
            }
            found = found.or_else(|| self.is_short_name_of(model).then_some(model));
        }
        found.unwrap_or(self)
    }

    /// Bloom-filter bits of the names by which [`Self::resolve_among`] finds the model, whatever joins their parts: a short name,
    /// and the full name it stands for, have one in common.
    pub(crate) fn short_name_bits(&self) -> u64 {
        let mark = |name: &str| {
            let mut hasher = FxHasher::default();
            name.bytes().for_each(|byte| {
                hasher.write_u8(if matches!(byte, b'/' | b'_' | b'.') {
                    b'-'
                } else {
                    byte
                });
            });
            1 << (hasher.finish() % 64)
        };
        let name = self
            .canonical
            .split_once('/')
            .map_or(&*self.canonical, |(_, name)| name);
        mark(&self.canonical) | mark(name)
    }

    fn is_short_name_of(&self, model: &Self) -> bool {
        let Some((organization, name)) = model.canonical.split_once('/') else {
            return false;
        };
        let Some(front) = self
            .canonical
            .strip_suffix(name)
            .filter(|_| !model.is_path())
        else {
            return false;
        };
        front.is_empty() || front.strip_suffix(['-', '_', '.']) == Some(organization)
    }

    pub(crate) fn has_organization(&self) -> bool {
        self.canonical.contains('/')
    }

    fn is_path(&self) -> bool {
        self.canonical.starts_with('/') || self.canonical.contains("://")
    }
}

/// The form under which names are compared: of a model of the Hugging Face hub `organization/name` in lower case. Other stores
/// tell upper from lower case, and a revision of a file from another file.
fn canonical(text: &str) -> Cow<'_, str> {
    let text = text.trim_end_matches('/');
    let hub = ["hf://", "huggingface://", "https://huggingface.co/"];
    if let Some(name) = hub
        .iter()
        .find_map(|scheme| strip_prefix_ignoring_case(text, scheme))
    {
        return to_lowercase(name.split(['@', ':']).next().unwrap_or(name));
    }
    if text.contains("://") {
        return text.into();
    }
    if text.starts_with('/') {
        return model_of_path(text).unwrap_or(text.into());
    }
    match model_of_cache_folder(text) {
        Some(name) => name,
        None => match without_revision(text) {
            name if name.matches('/').count() > 1 => text.into(),
            name => to_lowercase(name),
        },
    }
}

/// The model whose files are in a folder of the hub's cache, or below one for models.
fn model_of_path(path: &str) -> Option<Cow<'_, str>> {
    let mut folders = path.split('/');
    if let Some(name) = folders.clone().find_map(|folder| {
        model_of_cache_folder(folder).filter(|_| folder.starts_with(CACHE_FOLDER_PREFIX))
    }) {
        return Some(name);
    }
    folders.by_ref().find(|folder| is_models_folder(folder))?;
    match folders.collect::<Vec<_>>()[..] {
        [name] => Some(to_lowercase(name)),
        [organization, name] if !is_models_folder(organization) => Some(to_lowercase(
            &path[path.len() - organization.len() - name.len() - 1..],
        )),
        _ => None,
    }
}

fn is_models_folder(folder: &str) -> bool {
    matches!(folder, "models" | "model" | "hub")
}

/// How the hub's client names the folders of its cache.
const CACHE_FOLDER_PREFIX: &str = "models--";

/// `organization--name`, with or without that: no name on the hub has two hyphens in a row.
fn model_of_cache_folder(folder: &str) -> Option<Cow<'_, str>> {
    let (organization, name) = folder
        .strip_prefix(CACHE_FOLDER_PREFIX)
        .unwrap_or(folder)
        .split_once("--")?;
    let is_one = !organization.is_empty()
        && !name.is_empty()
        && !name.contains("--")
        && !folder.contains('/');
    is_one.then(|| format!("{organization}/{name}").to_ascii_lowercase().into())
}

/// Behind a colon, a name of an engine's own may have a size or a precision, which is another model: `llama3:8b`.
fn without_revision(text: &str) -> &str {
    let is_commit = |text: &str| {
        (7..=40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    match text.split_once('@').or_else(|| {
        text.rsplit_once(':')
            .filter(|(_, rev)| *rev == "main" || is_commit(rev))
    }) {
        Some((name, _)) if !name.is_empty() => name,
        _ => text,
    }
}

fn strip_prefix_ignoring_case<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (front, rest) = text.split_at_checked(prefix.len())?;
    front
        .eq_ignore_ascii_case(prefix)
        .then_some(rest)
        .filter(|rest| !rest.is_empty())
}

fn to_lowercase(text: &str) -> Cow<'_, str> {
    match text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        true => text.to_ascii_lowercase().into(),
        false => text.into(),
    }
}

impl PartialEq for ModelId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.canonical, &other.canonical) || self.canonical == other.canonical
    }
}

impl Eq for ModelId {}

impl PartialOrd for ModelId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ModelId {
    fn cmp(&self, other: &Self) -> Ordering {
        self.canonical.cmp(&other.canonical)
    }
}

impl Hash for ModelId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.canonical.hash(state);
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for ModelId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_newtype_struct("ModelId", &*self.text)
    }
}

impl<'de> Deserialize<'de> for ModelId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_str(NameVisitor("model id"))
            .map(Self::from_text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(text: &str) -> ModelId {
        ModelId::parse(text).unwrap()
    }

    #[test]
    fn the_names_of_one_model_are_equal() {
        for name in [
            "qwen/qwen3-32b",
            "hf://Qwen/Qwen3-32B",
            "HF://qwen/Qwen3-32B:main",
            "hf://Qwen/Qwen3-32B@v1.0",
            "https://huggingface.co/Qwen/Qwen3-32B/",
            "Qwen/Qwen3-32B@refs/pr/7",
            "Qwen/Qwen3-32B:main",
            "Qwen/Qwen3-32B:9216db5781bf21249d130ec9da846c4624c16137",
            "models--Qwen--Qwen3-32B",
            "Qwen--Qwen3-32B",
            "/models/Qwen/Qwen3-32B",
            "/mnt/models/Qwen/Qwen3-32B/",
            "/root/.cache/huggingface/hub/models--Qwen--Qwen3-32B/snapshots/9216db5",
        ] {
            assert_eq!(model(name), model("Qwen/Qwen3-32B"), "{name}");
            assert_eq!(model(name).to_string(), name, "people see what they wrote");
        }
        assert_eq!(model("/mnt/models/Qwen3-32B"), model("Qwen3-32B"));
    }

    #[test]
    fn different_models_have_different_names() {
        let names = [
            "Qwen/Qwen3-32B",
            "other/Qwen3-32B",
            "Qwen3-32B",
            "Qwen-Qwen3-32B",
            "Qwen/Qwen3-32B-FP8",
            "Qwen/Qwen3-32B:Q4_K_M",
            "llama3:8b",
            "llama3:70b",
            "oci://registry/qwen:1",
            "oci://registry/qwen:2",
            "s3://Bucket/Qwen/Qwen3-32B",
            "s3://bucket/Qwen/Qwen3-32B",
            "/data/Qwen3-32B",
            "/mnt/models/a/b/c",
            "/mnt/models",
            "/",
            "@x",
        ];
        for (n, one) in names.iter().enumerate() {
            for other in &names[..n] {
                assert_ne!(model(one), model(other), "{one} {other}");
            }
        }
    }

    #[test]
    fn a_folder_in_which_any_model_may_be_names_none() {
        let named = |text| {
            ModelId::parse_unless_generic_path(text)
                .unwrap()
                .map(|model| model.to_string())
        };
        assert_eq!(
            ["/mnt/models", "/mnt/models/", "/models", "/model"].map(named),
            [const { None }; 4]
        );
        assert_eq!(named("/mnt/models/llama"), Some("/mnt/models/llama".into()));
        assert_eq!(named("models"), Some("models".into()));
        assert!(ModelId::parse_unless_generic_path("a b").is_err());
    }

    #[test]
    fn a_short_name_stands_for_the_only_model_that_it_can_be() {
        let known = [
            "Qwen/Qwen3-32B",
            "meta-llama/Llama-3.1-8B",
            "a/twice",
            "b/twice",
            "own",
            "c/own",
        ]
        .map(model);
        let among = |text: &str| model(text).resolve_among(&known).to_string();
        for (short, whole) in [
            ("Qwen3-32B", "Qwen/Qwen3-32B"),
            ("qwen3-32b", "Qwen/Qwen3-32B"),
            ("Qwen-Qwen3-32B", "Qwen/Qwen3-32B"),
            ("meta-llama_Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
            ("meta-llama.llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
            ("twice", "twice"),
            ("a-twice", "a/twice"),
            ("own", "own"),
            ("32B", "32B"),
            ("other-Qwen3-32B", "other-Qwen3-32B"),
            ("x/Qwen3-32B", "x/Qwen3-32B"),
        ] {
            assert_eq!(among(short), whole, "{short}");
        }
        let twice = [model("Qwen/Qwen3-32B"), model("qwen/qwen3-32b")];
        assert_eq!(
            model("qwen3-32b").resolve_among(&twice),
            &twice[0],
            "the same model twice is one"
        );
    }

    proptest! {
        #[test]
        fn a_model_of_the_hub_is_the_same_by_each_of_its_names(
            organization in "[a-zA-Z][a-zA-Z0-9.]{0,8}", name in "[a-zA-Z][a-zA-Z0-9.]{0,8}", other in "[a-z]{1,3}",
        ) {
            let whole = format!("{organization}/{name}");
            for text in [whole.to_uppercase(), format!("hf://{whole}:{other}"), format!("{whole}@{other}"), format!("models--{organization}--{name}")] {
                prop_assert_eq!(model(&text), model(&whole));
            }
            prop_assert_ne!(model(&format!("{organization}/{name}-{other}")), model(&whole));
            prop_assert_ne!(model(&format!("{organization}-{other}/{name}")), model(&whole));
            let known = [model(&whole)];
            for short in [model(&name), model(&format!("{organization}-{name}"))] {
                prop_assert_eq!(short.resolve_among(&known), &known[0]);
                prop_assert_ne!(short.short_name_bits() & known[0].short_name_bits(), 0);
            }
        }

        #[test]
        fn no_text_makes_the_name_panic(text in "\\PC{0,24}|(hf://|models--|/)?[a-z:/@-]{0,12}") {
            let _ = ModelId::parse(&text);
        }
    }
}
