//! The model that a command line names: a file, a folder with one, standard input, or one that is built in.

use crate::cli::standard_input::is_standard_input;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::architecture::ModelArchitecture;
use stowage_sizing::estimate::config::Config;
use stowage_sizing::estimate::quantization::Precision;
use stowage_sizing::estimate::shipped::{MODELS, ShippedModel};
use stowage_sizing::estimate::{Estimate, PartName, Workload};

const CONFIG: &str = "config.json";
/// Maximum size of a config.json: the largest known one has a few hundred KiB, and a file of weights is rejected before it is read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The model and what it is called. With a precision, its weights are in that one.
pub fn find(
    config: Option<&Path>,
    model: Option<&str>,
    precision: Option<Precision>,
) -> Result<(String, ModelArchitecture)> {
    match (config, model) {
        (Some(path), _) => {
            let (name, text) = read_config(path)?;
            let read = Config::parse(&text)
                .and_then(|config| ModelArchitecture::read_with_precision(&config, precision));
            // A line stands behind the file without a blank.
            read.map(|model| (name.clone(), model)).map_err(|error| {
                let place = error.to_string();
                let between = if place.starts_with(|first: char| first.is_ascii_digit()) {
                    ":"
                } else {
                    ": "
                };
                anyhow::anyhow!("{name}{between}{place}")
            })
        }
        (None, Some(name)) => {
            let shipped = ShippedModel::find(name).context("--model")?;
            Ok((
                shipped.name.to_owned(),
                shipped
                    .read_with_precision(precision)
                    .with_context(|| shipped.name)?,
            ))
        }
        (None, None) => unreachable!("clap asks for one of them"),
    }
}

/// The file's name and its text.
fn read_config(path: &Path) -> Result<(String, String)> {
    if is_standard_input(path) {
        return Ok(("-".into(), read_text(std::io::stdin(), "-")?));
    }
    let file = if path.is_dir() {
        path.join(CONFIG)
    } else {
        path.to_owned()
    };
    let name = file.display().to_string();
    let opened = match File::open(&file) {
        Ok(opened) => opened,
        Err(error) if path.is_dir() && error.kind() == std::io::ErrorKind::NotFound => {
            bail!(
                "{} has no {CONFIG}; give the folder of a snapshot, with the model's files in it",
                path.display()
            )
        }
        Err(error) => {
            return Err(error).context(name.clone()).context(
                "CONFIG cannot be read; give a config.json, the folder that has it, or --model for one that is built in",
            );
        }
    };
    let text = read_text(opened, &name)?;
    Ok((name, text))
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
    String::from_utf8(bytes)
        .map_err(|_| anyhow::anyhow!("{name} is not text: give the model's {CONFIG}"))
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
