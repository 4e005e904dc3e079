//! `-o`: how a command prints its answer, the same for all commands that have one.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

#[derive(Debug, Args)]
pub struct OutputArgs {
    /// How to print the answer
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,

    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    #[value(alias = "table")]
    Text,
    Json,
    Yaml,
}

impl OutputArgs {
    /// The answer as data, with a line break at its end; `None` if it is for people.
    pub fn data(&self, answer: &impl Serialize) -> Result<Option<String>> {
        let text = match self.output {
            Format::Text if !self.json => return Ok(None),
            Format::Yaml => {
                serde_saphyr::to_string(answer).context("the answer cannot be written as YAML")?
            }
            Format::Text | Format::Json => serde_json::to_string_pretty(answer)?,
        };
        Ok(Some(text.trim_end().to_owned() + "\n"))
    }
}
