//! The model that a command line names: a folder of its files, some of them, standard input, or one that is built in.

use crate::cli::standard_input::is_standard_input;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use stowage_agent::models::weights::{MAX_INDEX, WeightFormat, WeightIndex, is_below};
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::architecture::ModelArchitecture;
use stowage_sizing::estimate::checkpoint::Checkpoint;
use stowage_sizing::estimate::config::{Config, ConfigError};
use stowage_sizing::estimate::quantization::Precision;
use stowage_sizing::estimate::shipped::{MODELS, ShippedModel};
use stowage_sizing::estimate::{Estimate, PartName, Workload};

const CONFIG: &str = "config.json";
const QUANTIZATION: &str = "hf_quant_config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum size of a config.json: the largest known one has a few hundred KiB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
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
    /// Its weights and their index, by their names.
    weights: BTreeMap<String, PathBuf>,
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
        if files.config.is_none() && !files.format().is_some_and(is_gguf) {
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

    fn names(&self) -> BTreeSet<String> {
        self.weights.keys().cloned().collect()
    }

    fn format(&self) -> Option<&'static WeightFormat> {
        WeightFormat::of_folder(&self.names())
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
        let is_index = name == INDEX || is_named && name.ends_with(".index.json");
        let extensions = [".safetensors", ".gguf", ".bin"];
        // Of a folder: what is loaded beside a model is no model.
        let is_beside = !is_named && (name.starts_with("adapter") || name.contains("mmproj"));
        if !is_beside && (is_index || extensions.iter().any(|known| name.ends_with(known))) {
            let name = if is_index { INDEX.to_owned() } else { name };
            let other = self.weights.insert(name, path.clone());
            if let Some(other) = other.filter(|other| *other != path) {
                bail!(
                    "{} and {} have one name; give the files of one model",
                    other.display(),
                    path.display()
                );
            }
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

    fn read(&self, precision: Option<Precision>) -> Result<(String, ModelArchitecture)> {
        let format = self.format();
        // What is beside a GGUF file may be of another program.
        if let Some(gguf) = format.filter(|format| is_gguf(format)) {
            return self.read_gguf(gguf, precision);
        }
        let path = self.config.as_ref().context(CONFIG)?;
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
        let model = read.map_err(|error| placed(&name, &error))?;
        let model = match format.filter(|format| format.index == Some(INDEX)) {
            Some(safetensors) if !model.quantization.is_overridden() => {
                self.with_safetensors(model, safetensors)?
            }
            _ => model,
        };
        Ok((name, model))
    }

    /// The model with the weights of its files, as far as they are there.
    fn with_safetensors(
        &self,
        mut model: ModelArchitecture,
        format: &WeightFormat,
    ) -> Result<ModelArchitecture> {
        let (files, total) = match self.weights.get(INDEX) {
            Some(path) => {
                let index = read_index(path)?;
                let total = index.total_size().filter(|total| *total > 0);
                let shards = index.shards.iter();
                (
                    shards.map(|shard| path.with_file_name(shard)).collect(),
                    total,
                )
            }
            None => (self.whole_sets(format)?.concat(), None),
        };
        let is_indexed = self.weights.contains_key(INDEX);
        let missing = files
            .iter()
            .filter(|file| is_indexed && !file.is_file())
            .count();
        if missing > 0 {
            let instead = match total {
                Some(_) => "its total_size is taken",
                None => "the weights are counted",
            };
            model.notes.push(format!(
                "{missing} of {} files of the index are not here: {instead}",
                files.len()
            ));
            return Ok(match total {
                Some(total) => model.with_checkpoint(Checkpoint::from_total(total)),
                None => model,
            });
        }
        let mut checkpoint = Checkpoint::default();
        for path in &files {
            let (file, length) = open(path)?;
            let added = checkpoint.add_safetensors(file, length, |tensor| model.loads(tensor));
            added.with_context(|| path.display().to_string())?;
        }
        let bytes = checkpoint.bytes;
        let is_far = |total: &u128| bytes > 0 && bytes.abs_diff(*total) > total / 1000;
        if let Some(total) = total.map(u128::from).filter(is_far) {
            model.notes.push(format!(
                "the index says {total} bytes, and the files' headers {bytes}: these count"
            ));
        }
        Ok(model.with_checkpoint(checkpoint))
    }

    /// The files that an engine loads without an index, each set with all its parts.
    fn whole_sets(&self, format: &WeightFormat) -> Result<Vec<Vec<PathBuf>>> {
        let names = self.names();
        let sets = format.shard_sets(&names).into_iter().map(|set| {
            let paths: Vec<PathBuf> = set
                .files
                .iter()
                .map(|name| self.weights[*name].clone())
                .collect();
            if let Some(missing) = set.missing() {
                bail!(
                    "{}: {} of its {} files are given, without {missing}; give all of them, or their folder",
                    paths[0].display(),
                    paths.len(),
                    set.total
                );
            }
            Ok(paths)
        });
        sets.collect()
    }

    /// The model of GGUF files, which have their configuration in them.
    fn read_gguf(
        &self,
        format: &WeightFormat,
        precision: Option<Precision>,
    ) -> Result<(String, ModelArchitecture)> {
        let sets = self.whole_sets(format)?;
        let [files] = &sets[..] else {
            bail!(
                "{} files are GGUF, and each is a model: give one of them by name, such as {}",
                sets.len(),
                sets[0][0].display()
            );
        };
        let mut checkpoint = Checkpoint::default();
        let mut first = None;
        for path in files {
            let (file, length) = open(path)?;
            let name = path.display().to_string();
            let added = checkpoint.add_gguf(file, length);
            let config = added.with_context(|| name.clone())?;
            let parts = config.fields().count("split.count").unwrap_or(1).max(1);
            ensure!(
                parts == files.len() as u64,
                "{name}: {} of its {parts} files are given; give all of them under their own names, or their folder",
                files.len()
            );
            first.get_or_insert((name, config));
        }
        let (name, config) = first.context("no file of weights")?;
        let read = ModelArchitecture::read_with_precision(&config, precision);
        let model = read.map_err(|error| placed(&name, &error))?;
        Ok((name, model.with_checkpoint(checkpoint)))
    }
}

fn is_gguf(format: &WeightFormat) -> bool {
    format.extension == ".gguf"
}

fn read_index(path: &Path) -> Result<WeightIndex> {
    let name = path.display();
    let (file, length) = open(path)?;
    ensure!(
        length <= MAX_INDEX,
        "{name} is larger than {}: that is no index",
        Bytes(MAX_INDEX)
    );
    let index = WeightIndex::read(file.take(MAX_INDEX))
        .with_context(|| format!("{name}: this is no index; download it again"))?;
    if let Some(shard) = index.shards.iter().find(|shard| !is_below(shard)) {
        bail!("{name}: {shard:?} is not the name of a file beside it; download it again");
    }
    Ok(index)
}

/// The folder that a file is in.
fn folder_of(file: &Path) -> &Path {
    let parent = file
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
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
