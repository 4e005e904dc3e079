//! The weights in a model's folder, and whether they are complete.
//!
//! The folder has Hugging Face's layout, whichever program wrote it: shards with an index that names them, shards with numbers
//! (`-00001-of-00004`), or single files. No weights file is opened here.

use super::walk::{ScanProblem, Walk, file_size};
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, BufReader, Read};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use stowage_scheduling::units::Bytes;

/// The largest public indexes name 280,000 tensors in 30 MB.
pub const MAX_INDEX: u64 = 64 << 20;

/// The largest public models have a few hundred shards.
const MAX_SHARDS: usize = 10_000;

/// The longest file name, in bytes, that file systems allow.
const MAX_NAME: usize = 255;

/// The longest string of an index, in bytes: a parser holds a string whole.
const MAX_STRING: usize = 64 << 10;

/// Formats in the order in which engines prefer them if a folder has more than one.
const FORMATS: [WeightFormat; 3] = [
    WeightFormat {
        index: Some("model.safetensors.index.json"),
        main: "model",
        extension: ".safetensors",
        others: Others::AreWeights,
    },
    WeightFormat {
        index: Some("pytorch_model.bin.index.json"),
        main: "pytorch_model",
        extension: ".bin",
        others: Others::AreNotWeights,
    },
    WeightFormat {
        index: None,
        main: "model",
        extension: ".gguf",
        others: Others::AreWeights,
    },
];

/// How the weights in a folder are stored, and which of its files have them.
#[derive(Debug)]
pub struct WeightFormat {
    pub index: Option<&'static str>,
    /// Name of the file, or prefix of the shards, that engines load without an index.
    main: &'static str,
    pub extension: &'static str,
    others: Others,
}

/// How to treat files with this extension and other names.
#[derive(Debug, PartialEq, Eq)]
enum Others {
    /// They are weights too.
    AreWeights,
    /// Other things are called `.bin` too: optimizers, training arguments.
    AreNotWeights,
}

/// The weights that are present.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelWeights {
    pub bytes: Bytes,
    /// The largest files, to sample the page cache with; none beyond what a scan keeps.
    pub files: Arc<[WeightFile]>,
    pub extent: WeightExtent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightFile {
    pub path: PathBuf,
    pub bytes: Bytes,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightExtent {
    Whole,
    #[default]
    Part,
}

impl WeightFormat {
    /// The format that engines load from a folder with files of these names; `None` if nothing in it is or names weights.
    pub fn of_folder(names: &BTreeSet<String>) -> Option<&'static Self> {
        FORMATS.iter().find(|format| {
            let has_index = format.index.is_some_and(|index| names.contains(index));
            has_index || !format.shard_sets(names).is_empty()
        })
    }

    /// The files that engines load without an index, those that belong together in one set.
    pub fn shard_sets<'a>(&self, names: &'a BTreeSet<String>) -> Vec<ShardSet<'a>> {
        let mut sets: BTreeMap<_, ShardSet<'a>> = BTreeMap::new();
        for name in names {
            let Some(stem) = name.strip_suffix(self.extension) else {
                continue;
            };
            let (stem, total) = shard(stem).unwrap_or((stem, 1));
            let set = sets.entry((stem, total)).or_default();
            set.files.push(name);
            set.total = total;
        }
        // Other programs' copies of the same weights, and adapters.
        let is_beside = |stem: &str| {
            ["consolidated", "adapter"]
                .iter()
                .any(|other| stem.starts_with(other))
        };
        if self.others == Others::AreNotWeights || sets.keys().any(|(stem, _)| *stem == self.main) {
            sets.retain(|(stem, _), _| *stem == self.main);
        } else if sets.keys().any(|(stem, _)| !is_beside(stem)) {
            sets.retain(|(stem, _), _| !is_beside(stem));
        }
        sets.into_values().collect()
    }
}

pub fn read_weights(folder: &Path, walk: &mut Walk) -> Option<ModelWeights> {
    let names = walk.entry_names(folder);
    let format = WeightFormat::of_folder(&names)?;
    Some(weights_of_format(format, folder, &names, walk))
}

fn weights_of_format(
    format: &WeightFormat,
    folder: &Path,
    names: &BTreeSet<String>,
    walk: &mut Walk,
) -> ModelWeights {
    if let Some(index) = format.index.filter(|index| names.contains(*index)) {
        let shards = shards(&folder.join(index), walk);
        // An index that cannot be parsed leaves open what is missing.
        let missing = if shards.is_some() {
            MissingFiles::None
        } else {
            MissingFiles::Some
        };
        let shards = shards.unwrap_or_else(|| files_by_name(format, names).0);
        return existing_weights(folder, shards, missing, walk);
    }
    let (files, missing) = files_by_name(format, names);
    existing_weights(folder, files, missing, walk)
}

/// Files that should be present and are known to be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MissingFiles {
    None,
    Some,
}

fn existing_weights(
    folder: &Path,
    names: BTreeSet<String>,
    missing: MissingFiles,
    walk: &mut Walk,
) -> ModelWeights {
    let expected_count = names.len();
    let mut files = Vec::with_capacity(expected_count);
    for name in names {
        let path = folder.join(&name);
        if !walk.has_time_for(&path) {
            break;
        }
        let size = is_below(&name).then(|| file_size(&path)).flatten();
        // An empty file is a download that has not begun.
        if let Some(size) = size.filter(|size| *size > 0) {
            files.push(WeightFile {
                path,
                bytes: Bytes(size),
            });
        }
    }
    let is_whole =
        files.len() == expected_count && expected_count > 0 && missing == MissingFiles::None;
    let bytes = files.iter().map(|file| file.bytes).sum();
    files.sort_unstable_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.path.cmp(&b.path)));
    files.truncate(walk.reserve_files(folder, files.len()));
    let extent = if is_whole {
        WeightExtent::Whole
    } else {
        WeightExtent::Part
    };
    ModelWeights {
        bytes,
        files: files.into(),
        extent,
    }
}

/// An index must not lead out of its folder.
pub fn is_below(name: &str) -> bool {
    Path::new(name)
        .components()
        .all(|part| matches!(part, Component::Normal(_)))
}

/// The files that an index names.
fn shards(index: &Path, walk: &mut Walk) -> Option<BTreeSet<String>> {
    let file = walk.open(index, MAX_INDEX)?;
    match WeightIndex::read(file) {
        Ok(index) => Some(index.shards),
        Err(error) => {
            walk.record_problem(ScanProblem::NoIndex {
                path: index.into(),
                reason: error.to_string(),
            });
            None
        }
    }
}

/// JSON without long strings; one is an error of reading.
struct ShortStrings<R> {
    inner: R,
    /// Bytes since the last quote.
    length: usize,
    is_escaped: bool,
}

impl<R: Read> Read for ShortStrings<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        for byte in &buffer[..count] {
            let is_plain = !std::mem::replace(&mut self.is_escaped, false);
            self.is_escaped = is_plain && *byte == b'\\';
            self.length = if is_plain && *byte == b'"' {
                0
            } else {
                self.length + 1
            };
            if self.length > MAX_STRING {
                return Err(io::Error::other(format!(
                    "it has a string longer than {MAX_STRING} bytes"
                )));
            }
        }
        Ok(count)
    }
}

/// What an index says of the weights.
#[derive(Debug, Deserialize)]
pub struct WeightIndex {
    /// Names of the files.
    #[serde(rename = "weight_map", deserialize_with = "values")]
    pub shards: BTreeSet<String>,
    #[serde(default)]
    metadata: Option<IndexMetadata>,
}

#[derive(Debug, Deserialize)]
struct IndexMetadata {
    /// Some have 1.2e11.
    #[serde(default)]
    total_size: Option<f64>,
}

impl WeightIndex {
    /// Holds no more of the index than the distinct names of its files.
    pub fn read(file: impl Read) -> Result<Self, serde_json::Error> {
        serde_json::from_reader(BufReader::new(ShortStrings {
            inner: file,
            length: 0,
            is_escaped: false,
        }))
    }

    /// Bytes of all tensors.
    pub fn total_size(&self) -> Option<u64> {
        let size = self.metadata.as_ref()?.total_size?;
        Some(size as u64)
    }
}

/// The values of a map from tensors to files, each once: the map itself would take a hundred times as much.
fn values<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    deserializer.deserialize_map(Tensors)
}

struct Tensors;

impl<'de> Visitor<'de> for Tensors {
    type Value = BTreeSet<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensors to files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut shards = BTreeSet::new();
        while let Some((IgnoredAny, file)) = map.next_entry::<_, String>()? {
            if file.len() > MAX_NAME {
                return Err(A::Error::custom(format_args!(
                    "it names a file of {} letters",
                    file.len()
                )));
            }
            shards.insert(file);
            if shards.len() > MAX_SHARDS {
                return Err(A::Error::custom(format_args!(
                    "it names more than {MAX_SHARDS} files"
                )));
            }
        }
        Ok(shards)
    }
}

/// The files of a format by their names alone, and whether shards are missing.
fn files_by_name(
    format: &WeightFormat,
    names: &BTreeSet<String>,
) -> (BTreeSet<String>, MissingFiles) {
    let selected = format.shard_sets(names);
    let missing = selected.iter().any(|set| set.files.len() < set.total);
    let files = selected
        .iter()
        .flat_map(|set| &set.files)
        .map(ToString::to_string)
        .collect();
    (
        files,
        if missing {
            MissingFiles::Some
        } else {
            MissingFiles::None
        },
    )
}

/// One file, or the shards that belong together.
#[derive(Debug, Default)]
pub struct ShardSet<'a> {
    pub files: Vec<&'a str>,
    pub total: usize,
}

impl ShardSet<'_> {
    /// Name of the first shard that is missing.
    pub fn missing(&self) -> Option<String> {
        let first = self.files.first();
        let first = first.filter(|_| self.files.len() < self.total)?;
        let (numbered, of_all) = first.rsplit_once("-of-")?;
        let (stem, number) = numbered.rsplit_once('-')?;
        let width = number.len();
        let mut names =
            (1..=self.total).map(|number| format!("{stem}-{number:0width$}-of-{of_all}"));
        names.find(|name| !self.files.contains(&name.as_str()))
    }
}

/// `model-00001-of-00004` as `model` and 4.
fn shard(stem: &str) -> Option<(&str, usize)> {
    let (numbered, total) = stem.rsplit_once("-of-")?;
    let (stem, number) = numbered.rsplit_once('-')?;
    let (number, total): (usize, usize) = (number.parse().ok()?, total.parse().ok()?);
    (1..=total).contains(&number).then_some((stem, total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::time::Instant;
    use tempfile::TempDir;

    /// A folder with these files of so many bytes, and an index over some of them.
    fn folder(files: &[(&str, u64)], indexed: Option<(&str, &[&str])>) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            File::create(folder.path().join(name))
                .unwrap()
                .set_len(*bytes)
                .unwrap();
        }
        if let Some((index, shards)) = indexed {
            let map: BTreeMap<String, &str> = shards
                .iter()
                .enumerate()
                .map(|(n, shard)| (format!("layer.{n}"), *shard))
                .collect();
            let index_text =
                serde_json::json!({ "metadata": { "total_size": 1e300 }, "weight_map": map })
                    .to_string();
            fs::write(folder.path().join(index), index_text).unwrap();
        }
        folder
    }

    fn seen(folder: &TempDir) -> (Option<(WeightExtent, u64)>, Vec<String>) {
        let mut walk = Walk::start(Instant::now());
        let weights = read_weights(folder.path(), &mut walk);
        (
            weights.map(|weights| (weights.extent, weights.bytes.0)),
            walk.reasons(),
        )
    }

    fn of(files: &[(&str, u64)]) -> Option<(WeightExtent, u64)> {
        let (weights, reasons) = seen(&folder(files, None));
        assert_eq!(reasons, [""; 0]);
        weights
    }

    const INDEX: &str = "model.safetensors.index.json";

    #[test]
    fn shards_of_an_index_are_whole_once_all_are_there() {
        let shards: &[&str] = &["a.safetensors", "b.safetensors", "a.safetensors"];
        let both = [
            ("a.safetensors", 10),
            ("b.safetensors", 20),
            ("consolidated.safetensors", 30),
            ("x.bin", 5),
        ];
        assert_eq!(
            seen(&folder(&both, Some((INDEX, shards)))),
            (Some((WeightExtent::Whole, 30)), vec![])
        );
        assert_eq!(
            seen(&folder(&both[..1], Some((INDEX, shards)))),
            (Some((WeightExtent::Part, 10)), vec![])
        );
        let begun = [("a.safetensors", 10), ("b.safetensors", 0)];
        assert_eq!(
            seen(&folder(&begun, Some((INDEX, shards)))),
            (Some((WeightExtent::Part, 10)), vec![])
        );
        assert_eq!(
            seen(&folder(&[], Some((INDEX, shards)))),
            (Some((WeightExtent::Part, 0)), vec![])
        );
        let bin = folder(
            &[("p.bin", 7)],
            Some(("pytorch_model.bin.index.json", &["p.bin"])),
        );
        assert_eq!(seen(&bin), (Some((WeightExtent::Whole, 7)), vec![]));
    }

    #[test]
    fn without_an_index_shards_count_themselves() {
        let (first, second) = (
            ("model-00001-of-00002.safetensors", 1),
            ("model-00002-of-00002.safetensors", 2),
        );
        assert_eq!(of(&[first, second]), Some((WeightExtent::Whole, 3)));
        assert_eq!(of(&[second]), Some((WeightExtent::Part, 2)));
        assert_eq!(
            of(&[("q4-00001-of-00003.gguf", 1), ("q4-00003-of-00003.gguf", 1)]),
            Some((WeightExtent::Part, 2))
        );
    }

    #[test]
    fn single_files_are_whole_and_what_is_loaded_twice_counts_once() {
        assert_eq!(
            of(&[("model.safetensors", 5), ("consolidated.safetensors", 5)]),
            Some((WeightExtent::Whole, 5))
        );
        assert_eq!(
            of(&[("weights.safetensors", 5), ("pytorch_model.bin", 6)]),
            Some((WeightExtent::Whole, 5))
        );
        assert_eq!(
            of(&[("Llama-Q4_K_M.gguf", 5)]),
            Some((WeightExtent::Whole, 5))
        );
        assert_eq!(
            of(&[("pytorch_model.bin", 6), ("training_args.bin", 1)]),
            Some((WeightExtent::Whole, 6))
        );
    }

    #[test]
    fn copies_and_adapters_are_no_weights_beside_a_model_s_own() {
        for (beside, bytes) in [
            ("consolidated.safetensors", 5),
            ("adapter_model.safetensors", 5),
            ("other.safetensors", 11),
        ] {
            assert_eq!(
                of(&[("weights.safetensors", 5), (beside, 6)]),
                Some((WeightExtent::Whole, bytes)),
                "{beside}"
            );
            assert_eq!(of(&[(beside, 6)]), Some((WeightExtent::Whole, 6)));
        }
    }

    #[test]
    fn a_folder_without_weights_has_no_model() {
        assert_eq!(
            of(&[
                ("config.json", 5),
                ("tokenizer.json", 5),
                ("training_args.bin", 1)
            ]),
            None
        );
    }

    #[test]
    fn a_link_to_nothing_to_itself_or_out_of_the_folder_is_a_missing_shard() {
        let folder = folder(
            &[("a", 10)],
            Some((
                INDEX,
                &["a", "dangling", "loop", "../a", "/dev/zero", "sub/dir"],
            )),
        );
        symlink("nowhere", folder.path().join("dangling")).unwrap();
        symlink("loop", folder.path().join("loop")).unwrap();
        assert_eq!(seen(&folder), (Some((WeightExtent::Part, 10)), vec![]));
    }

    #[test]
    fn an_invalid_index_is_reported_and_its_folder_counts_as_partial() {
        let many: Vec<String> = (0..=MAX_SHARDS)
            .map(|n| format!(r#""t{n}":"f{n}""#))
            .collect();
        let many = format!(r#"{{"weight_map":{{{}}}}}"#, many.join(","));
        for text in [
            "",
            "null",
            "{}",
            r#"{"weight_map":[]}"#,
            r#"{"weight_map":{"a":1}}"#,
            "\u{0}",
            &"[".repeat(9999),
            &many,
            &format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, "x".repeat(300)),
            // A parser would hold it.
            &format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, "\\\"".repeat(1 << 20)),
        ] {
            let folder = folder(&[("model-00001-of-00001.safetensors", 10)], None);
            fs::write(folder.path().join(INDEX), text).unwrap();
            let (weights, reasons) = seen(&folder);
            assert_eq!(weights, Some((WeightExtent::Part, 10)));
            assert!(
                reasons.len() == 1 && reasons[0].contains("is no index"),
                "{reasons:?}"
            );
        }
    }

    #[test]
    fn an_index_of_two_gigabytes_is_not_read() {
        let folder = folder(&[("model.safetensors", 10), (INDEX, 2 << 30)], None);
        let (weights, reasons) = seen(&folder);
        assert_eq!(weights, Some((WeightExtent::Part, 10)));
        assert!(
            reasons.len() == 1 && reasons[0].contains("larger than"),
            "{reasons:?}"
        );
    }

    #[test]
    fn numbers_that_do_not_add_up_are_part_of_a_name() {
        assert_eq!(shard("model-00001-of-00004"), Some(("model", 4)));
        for stem in [
            "model",
            "best-of-breed",
            "model-5-of-4",
            "model-0-of-0",
            "-of-",
            "a-99999999999999999999999-of-1",
        ] {
            assert_eq!(shard(stem), None, "{stem}");
        }
    }
}
