//! `-o`: how a command prints its answer, the same for all commands that have one.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
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
    /// Whether the answer is printed for programs.
    pub fn is_data(&self) -> bool {
        self.json || self.output != Format::Text
    }

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

/// A table without lines between its cells; `right` are the columns of numbers.
pub fn table_lines(
    header: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
    right: &[usize],
) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.to_vec());
    for column in right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.add_rows(rows);
    table
        .lines()
        .map(|line| {
            line.strip_prefix(' ')
                .unwrap_or(&line)
                .trim_end()
                .to_owned()
                + "\n"
        })
        .collect()
}
