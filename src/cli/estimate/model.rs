//! The model that a command line names: a folder of its files, some of them, standard input, or one that is built in.

use crate::cli::standard_input::is_standard_input;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::architecture::ModelArchitecture;
use stowage_sizing::estimate::checkpoint::{Checkpoint, Index};
use stowage_sizing::estimate::config::{Config, ConfigError};
use stowage_sizing::estimate::quantization::Precision;
use stowage_sizing::estimate::shipped::{MODELS, ShippedModel};
use stowage_sizing::estimate::{Estimate, PartName, Workload};

const CONFIG: &str = "config.json";
const QUANTIZATION: &str = "hf_quant_config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of a config.json: the largest known one has a few hundred KiB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Maximum size of an index, which is read as a stream: the largest known ones have some 30 MiB.
const MAX_INDEX_BYTES: u64 = 512 << 20;
/// Maximum number of files that are looked at in a folder.
const MAX_FILES: usize = 10_000;

/// The model and what it is called. With a precision, its weights are in that one.
pub fn find(
    paths: &[PathBuf],
    model: Option<&str>,
    precision: Option<Precision>,
) -> Result<(String, ModelArchitecture)> {
    if let Some(name) = model {
        let shipped = ShippedModel::find(name).context("--model")?;
        let read = shipped.read_with_precision(precision);
        return Ok((shipped.name.to_owned(), read.with_context(|| shipped.name)?));
    }
    if let [path] = paths
        && is_standard_input(path)
    {
        let config = Config::parse(&read_text(std::io::stdin(), "-")?);
        let read =
            config.and_then(|config| ModelArchitecture::read_with_precision(&config, precision));
        return Ok(("-".into(), read.map_err(|error| placed("-", &error))?));
    }
    ModelFiles::find(paths)?.read(precision)
}

/// The error with its file; a line stands behind it without a blank.
fn placed(file: &str, error: &ConfigError) -> anyhow::Error {
    let error = error.to_string();
    let is_line = error.starts_with(|first: char| first.is_ascii_digit());
    anyhow!("{file}:{}{error}", if is_line { "" } else { " " })
}

/// Files of a model.
#[derive(Default)]
struct ModelFiles {
    config: Option<PathBuf>,
    index: Option<PathBuf>,
    safetensors: Vec<PathBuf>,
    gguf: Vec<PathBuf>,
}

impl ModelFiles {
    fn find(paths: &[PathBuf]) -> Result<Self> {
        let mut files = Self::default();
        for path in paths {
            // What is beside a config.json belongs to it.
            let is_config = path.file_name().is_some_and(|name| name == CONFIG);
            if path.is_dir() {
                files.add_folder(path)?;
            } else {
                files.add(path.clone(), true)?;
                if is_config && path.is_file() && paths.len() == 1 {
                    files.add_folder(folder_of(path))?;
                }
            }
        }
        let first = paths.first().context("CONFIG")?;
        if files.config.is_none() && files.gguf.is_empty() {
            let folder = if first.is_dir() {
                first
            } else {
                folder_of(first)
            };
            let beside = folder.join(CONFIG);
            ensure!(
                beside.is_file(),
                "{} has no {CONFIG}; give the folder of a snapshot, with the model's files in it",
                folder.display()
            );
            files.config = Some(beside);
        }
        Ok(files)
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let mut paths = Vec::new();
        for entry in entries {
            paths.push(entry.with_context(|| folder.display().to_string())?.path());
            ensure!(
                paths.len() <= MAX_FILES,
                "{} has more than {MAX_FILES} files; give the model's own folder",
                folder.display()
            );
        }
        paths.sort();
        let files = paths.into_iter().filter(|path| path.is_file());
        files.into_iter().try_for_each(|path| self.add(path, false))
    }

    /// Adds a file by its name; one that was given by name and has no other is a config.json.
    fn add(&mut self, path: PathBuf, is_named: bool) -> Result<()> {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.ends_with(".safetensors") {
            if is_named || !name.starts_with("adapter") {
                self.safetensors.push(path);
            }
        } else if name.ends_with(".gguf") {
            self.gguf.push(path);
        } else if name == INDEX || is_named && name.ends_with(".index.json") {
            self.index = Some(path);
        } else if is_named || name == CONFIG && self.config.is_none() {
            ensure!(
                self.config.is_none(),
                "{} and {} are both taken for a {CONFIG}; give one",
                self.config.take().unwrap_or_default().display(),
                path.display()
            );
            self.config = Some(path);
        }
        Ok(())
    }

    fn read(mut self, precision: Option<Precision>) -> Result<(String, ModelArchitecture)> {
        let mut checkpoint = Checkpoint::default();
        let Some(path) = &self.config else {
            return self.read_gguf(precision);
        };
        let name = path.display().to_string();
        let opened = open(path).with_context(|| {
            format!("{name}: CONFIG cannot be read; give a config.json, the folder that has it, or --model for one that is built in")
        })?;
        let mut config =
            Config::parse(&read_text(opened.0, &name)?).map_err(|error| placed(&name, &error))?;
        let beside = path.with_file_name(QUANTIZATION);
        if beside.is_file() {
            let name = beside.display().to_string();
            let added = config.add_quantization(&read_text(open(&beside)?.0, &name)?);
            added.map_err(|error| placed(&name, &error))?;
        }
        let read = ModelArchitecture::read_with_precision(&config, precision);
        let mut model = read.map_err(|error| placed(&name, &error))?;
        let index = self.read_index()?;
        let shards_are_there = self.take_shards(&index, &mut model)?;
        if shards_are_there {
            for path in &self.safetensors {
                let (file, length) = open(path)?;
                let added = checkpoint.add_safetensors(file, length, |tensor| model.loads(tensor));
                added.with_context(|| path.display().to_string())?;
            }
            let total = index.and_then(|index| index.total_size).map(u128::from);
            if let Some(total) =
                total.filter(|total| checkpoint.bytes.abs_diff(*total) > total / 1000)
            {
                model.notes.push(format!(
                    "the index says {total} bytes, and the files' headers {}: these count",
                    checkpoint.bytes
                ));
            }
        } else if let Some(total) = index.and_then(|index| index.total_size) {
            checkpoint = Checkpoint::from_total(total);
        }
        if checkpoint.bytes > 0 {
            model = model.with_checkpoint(checkpoint);
        } else if !self.gguf.is_empty() {
            return self.read_gguf(precision);
        }
        Ok((name, model))
    }

    fn read_index(&self) -> Result<Option<Index>> {
        let Some(path) = &self.index else {
            return Ok(None);
        };
        let name = || path.display().to_string();
        let (file, length) = open(path)?;
        ensure!(
            length <= MAX_INDEX_BYTES,
            "{} is larger than {}: that is no index",
            name(),
            Bytes(MAX_INDEX_BYTES)
        );
        let index = Index::read(file)
            .with_context(|| format!("{}: this is no index; download it again", name()))?;
        let is_name = |shard: &String| {
            Path::new(shard)
                .file_name()
                .is_some_and(|name| name == shard.as_str())
        };
        if let Some(shard) = index.shards.iter().find(|shard| !is_name(shard)) {
            bail!(
                "{}: {shard:?} is not the name of a file beside it; download it again",
                name()
            );
        }
        Ok(Some(index))
    }

    /// Chooses the files of the weights: those of the index. Whether all are there.
    fn take_shards(
        &mut self,
        index: &Option<Index>,
        model: &mut ModelArchitecture,
    ) -> Result<bool> {
        let name_of = |path: &PathBuf| {
            path.file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        };
        match (index, &self.index) {
            (Some(index), Some(path)) => {
                self.safetensors = index
                    .shards
                    .iter()
                    .map(|shard| path.with_file_name(shard))
                    .collect();
                let missing = self
                    .safetensors
                    .iter()
                    .filter(|shard| !shard.is_file())
                    .count();
                if missing > 0 {
                    model.notes.push(format!(
                        "{missing} of {} files of the index are not here: its total_size is taken",
                        self.safetensors.len()
                    ));
                }
                return Ok(missing == 0);
            }
            // Mistral's repositories have the same weights twice.
            _ if self
                .safetensors
                .iter()
                .any(|path| !name_of(path).starts_with("consolidated")) =>
            {
                self.safetensors
                    .retain(|path| !name_of(path).starts_with("consolidated"));
            }
            _ => {}
        }
        let parts = self
            .safetensors
            .iter()
            .filter_map(|path| part_count(&name_of(path)));
        check_parts(parts.max(), &self.safetensors)?;
        Ok(!self.safetensors.is_empty())
    }

    /// The model of GGUF files, which have their configuration in them.
    fn read_gguf(&self, precision: Option<Precision>) -> Result<(String, ModelArchitecture)> {
        let mut checkpoint = Checkpoint::default();
        let mut first = None;
        let mut parts = None;
        for path in &self.gguf {
            let (file, length) = open(path)?;
            let name = path.display().to_string();
            let config = checkpoint
                .add_gguf(file, length)
                .with_context(|| name.clone())?;
            let of_all = config
                .fields()
                .count("split.count")
                .filter(|count| *count > 1);
            ensure!(
                of_all.is_some() || self.gguf.len() == 1,
                "{} files are GGUF, and each is a model: give one of them by name, such as {name}",
                self.gguf.len()
            );
            parts = parts.max(of_all);
            first.get_or_insert((name, config));
        }
        check_parts(parts, &self.gguf)?;
        let (name, config) = first.context("no file of weights")?;
        let read = ModelArchitecture::read_with_precision(&config, precision);
        let model = read.map_err(|error| placed(&name, &error))?;
        Ok((name, model.with_checkpoint(checkpoint)))
    }
}

/// The folder that a file is in.
fn folder_of(file: &Path) -> &Path {
    let parent = file
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// The number of files that `model-00001-of-00003.safetensors` is one of.
fn part_count(name: &str) -> Option<u64> {
    let (_, count) = name.rsplit_once("-of-")?;
    count.split('.').next()?.parse().ok()
}

fn check_parts(of_all: Option<u64>, files: &[PathBuf]) -> Result<()> {
    let there = files.len() as u64;
    match of_all.filter(|count| *count != there) {
        Some(count) => bail!(
            "{}: {there} of its {count} files are given; give all of them, or their folder",
            files[0].display()
        ),
        None => Ok(()),
    }
}

/// A regular file and its length: a pipe would wait for its writer.
fn open(path: &Path) -> Result<(File, u64)> {
    let name = || path.display().to_string();
    let metadata = std::fs::metadata(path).with_context(name)?;
    if !metadata.is_file() {
        return Err(anyhow!(std::io::Error::from(ErrorKind::InvalidInput))
            .context(format!("{} is no file", name())));
    }
    Ok((File::open(path).with_context(name)?, metadata.len()))
}

fn read_text(source: impl Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    source
        .take(MAX_CONFIG_BYTES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| name.to_owned())?;
    if bytes.len() as u64 > MAX_CONFIG_BYTES {
        bail!(
            "{name} is larger than {}: that is no {CONFIG}",
            Bytes(MAX_CONFIG_BYTES)
        );
    }
    String::from_utf8(bytes).map_err(|_| anyhow!("{name} is not text: give the model's {CONFIG}"))
}

/// A model that is built in.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedModel {
    pub name: &'static str,
    pub repository: &'static str,
    pub parameters: u64,
    pub weights_bytes: Bytes,
    pub kv_cache_bytes_per_token: Bytes,
    pub max_context: Option<u64>,
}

pub fn list() -> Vec<ListedModel> {
    let listed = |shipped: &ShippedModel| {
        let model = shipped.read().expect("a test reads every one");
        let estimate =
            Estimate::for_model(&model, &Workload::default()).expect("one GPU needs no split");
        ListedModel {
            name: shipped.name,
            repository: shipped.repository,
            parameters: estimate.parameters,
            weights_bytes: estimate.bytes_of(PartName::Weights),
            kv_cache_bytes_per_token: estimate.kv_cache.bytes_per_token,
            max_context: model.max_context,
        }
    };
    MODELS.iter().map(listed).collect()
}
