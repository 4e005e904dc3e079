//! `-o` and standard output: how a command prints its answer, and how wide; the same for all commands.

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ColumnConstraint, Table, Width};
use serde::Serialize;
use std::io::Write;
use unicode_width::UnicodeWidthStr;

#[derive(Debug, Clone, Copy, Args)]
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

    /// Prints the answer: as data, or its text for a screen.
    pub fn print<T: Serialize>(
        &self,
        answer: &T,
        text: impl FnOnce(&T, Columns) -> String,
    ) -> Result<()> {
        let printed = match self.output {
            Format::Text if !self.json => return print(&text(answer, Columns::for_stdout())),
            Format::Yaml => {
                serde_saphyr::to_string(answer).context("the answer cannot be written as YAML")?
            }
            Format::Text | Format::Json => serde_json::to_string_pretty(answer)?,
        };
        print(&(printed.trim_end().to_owned() + "\n"))
    }
}

/// Prints on standard output.
pub fn print(text: &str) -> Result<()> {
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// The columns of the screen; `None` for a file or a pipe, where a line is as long as what it says.
#[derive(Debug, Clone, Copy)]
pub struct Columns(pub Option<usize>);

/// A paragraph's width without a screen, and the most on one: longer lines are hard to read.
const PARAGRAPH: usize = 80;
const WIDEST_PARAGRAPH: usize = 100;
/// Spaces between two columns of a table, and where that makes it too wide.
const GAPS: [usize; 2] = [2, 1];

impl Columns {
    /// Those of standard output: what COLUMNS says, or the terminal has.
    pub fn for_stdout() -> Self {
        let named = std::env::var("COLUMNS").ok();
        let named = named.and_then(|columns| columns.parse().ok());
        let terminal = || terminal_size::terminal_size_of(std::io::stdout());
        let columns = named.or_else(|| terminal().map(|(width, _)| width.0.into()));
        Self(columns.filter(|columns| *columns > 0))
    }

    /// Those of a paragraph that stands beside its title.
    pub fn paragraph(self) -> Self {
        let width = self.0.unwrap_or(PARAGRAPH);
        Self(Some(width.min(WIDEST_PARAGRAPH)))
    }

    /// Those that an indentation leaves.
    pub fn beside(self, indent: usize) -> Self {
        Self(self.0.map(|width| width.saturating_sub(indent)))
    }

    /// The text with its wide lines broken between words. What follows the mark of a list's line stays beside it.
    pub fn wrap(self, text: &str) -> String {
        let broken = |line: &str| {
            let body = line.trim_start_matches([' ', '-', '→']);
            let mark = &line[..line.len() - body.len()];
            let beside = self.beside(mark.width());
            let text = beside.table(&[], [vec![body.to_owned()]], &[]);
            format!(
                "{mark}{}\n",
                text.trim_end()
                    .replace('\n', &format!("\n{:1$}", "", mark.width()))
            )
        };
        let line = |line: &str| match self.0 {
            Some(width) if line.width() > width => broken(line),
            _ => format!("{line}\n"),
        };
        text.lines().map(line).collect()
    }

    /// A table without lines between its cells; `right` are the columns of numbers, which are not broken, and of text no word is.
    /// Where that leaves no room for a row, each is a list.
    pub fn table(
        self,
        header: &[&str],
        rows: impl IntoIterator<Item = Vec<String>>,
        right: &[usize],
    ) -> String {
        let with_units = |row: Vec<String>| row.iter().map(|cell| beside_units(cell)).collect();
        let rows: Vec<Vec<String>> = rows.into_iter().map(with_units).collect();
        let count = rows.iter().map(Vec::len).max().unwrap_or(0);
        let count = count.max(header.len());
        // The widest line of a column, or its widest part that stays whole.
        let widest = |column: usize, is_broken: bool| {
            let cells = rows
                .iter()
                .filter_map(|row| Some(row.get(column)?.as_str()));
            let cells = cells.map(|cell| (cell, is_broken && !right.contains(&column)));
            let title = header.get(column).map(|title| (*title, is_broken));
            let parts = cells.chain(title).flat_map(|(text, is_broken)| {
                text.split(move |c| c == '\n' || is_broken && c == ' ')
            });
            parts.map(UnicodeWidthStr::width).max().unwrap_or(0)
        };
        let whole: Vec<usize> = (0..count).map(|column| widest(column, false)).collect();
        let least: Vec<usize> = (0..count).map(|column| widest(column, true)).collect();
        let fitting = match self.0 {
            None => Some((whole, GAPS[0])),
            Some(width) => GAPS.into_iter().find_map(|gap| {
                let room = width.checked_sub(gap * count.saturating_sub(1))?;
                Some((share(room, &whole, &least)?, gap))
            }),
        };
        let (widths, gap) = match fitting {
            Some(fitting) => fitting,
            None if header.is_empty() => (least, GAPS[0]),
            None => {
                let list = |row: Vec<String>| {
                    let titles = header.iter().map(ToString::to_string);
                    let pairs = titles.zip(row).map(|(title, cell)| vec![title, cell]);
                    let pairs: Vec<Vec<String>> = pairs.collect();
                    self.table(&[], pairs, &[])
                };
                return rows.into_iter().map(list).collect::<Vec<_>>().join("\n");
            }
        };
        let mut table = Table::new();
        table.load_style(NOTHING);
        if !header.is_empty() {
            table.set_header(header);
        }
        table.add_rows(rows);
        for ((index, column), width) in table.column_iter_mut().enumerate().zip(widths) {
            let gap = gap as u16;
            column.set_padding((0, gap));
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(width as u16 + gap)));
            if right.contains(&index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines = table
            .lines()
            .map(|line| line.trim_end().replace(NO_BREAK, " ") + "\n");
        lines.collect()
    }
}

/// A space at which no line ends.
const NO_BREAK: &str = "\u{a0}";

/// The text with its figures beside their units.
fn beside_units(text: &str) -> String {
    const UNITS: [&str; 5] = ["%", "KiB", "MiB", "GiB", "TiB"];
    let glue = |text: String, unit| text.replace(&format!(" {unit}"), &format!("{NO_BREAK}{unit}"));
    UNITS.into_iter().fold(text.to_owned(), glue)
}

/// The widths of columns that have `room` together: at least what each cannot do without, and at most all that it has.
fn share(room: usize, whole: &[usize], least: &[usize]) -> Option<Vec<usize>> {
    let mut left = room.checked_sub(least.iter().sum())?;
    let mut widths = least.to_vec();
    let mut by_need: Vec<usize> = (0..widths.len()).collect();
    by_need.sort_by_key(|column| whole[*column] - least[*column]);
    for (place, column) in by_need.iter().enumerate() {
        let more = (whole[*column] - least[*column]).min(left / (by_need.len() - place));
        widths[*column] += more;
        left -= more;
    }
    Some(widths)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Vec<String>> {
        [
            [
                "gke-pool-a-3f9d2a1c-x7kp",
                "40.0 GiB",
                "team-a/llama (serving) 40.0 GiB, team-a/embedder",
            ],
            ["node-b", "1,440.0 GiB", "free"],
        ]
        .map(|row| row.map(str::to_owned).to_vec())
        .to_vec()
    }

    fn table(width: Option<usize>) -> String {
        Columns(width).table(&["NODE", "VRAM THERE", "PODS"], rows(), &[1])
    }

    #[test]
    fn a_table_keeps_to_the_screen_and_breaks_no_word_and_no_figure() {
        let whole = table(None);
        assert_eq!(
            whole.lines().count(),
            3,
            "without a screen a row is a line: {whole}"
        );
        for width in 31..120 {
            let text = table(Some(width));
            assert!(
                text.lines().all(|line| line.width() <= width),
                "{width}:\n{text}"
            );
            for part in [
                "gke-pool-a-3f9d2a1c-x7kp",
                " 40.0 GiB",
                "1,440.0 GiB",
                "team-a/embedder",
            ] {
                assert!(text.contains(part), "{width}: {part}\n{text}");
            }
        }
    }

    #[test]
    fn where_a_row_has_no_room_it_is_a_list() {
        let list = "NODE        node-b\nVRAM THERE  1,440.0 GiB\nPODS        free\n";
        assert!(table(Some(38)).ends_with(list), "{}", table(Some(38)));
    }

    #[test]
    fn a_paragraph_breaks_between_words_and_stays_beside_its_mark() {
        let text = "one two three\n  - four five six seven\n";
        assert_eq!(
            Columns(Some(12)).wrap(text),
            "one two\nthree\n  - four\n    five six\n    seven\n"
        );
        let figures = "of 40.0 GiB 9 %";
        assert_eq!(Columns(Some(10)).wrap(figures), "of\n40.0 GiB\n9 %\n");
        assert_eq!(Columns(None).wrap(text), text);
        assert_eq!(
            Columns(Some(4)).wrap("a-long-word"),
            "a-long-word\n",
            "no word is broken"
        );
    }
}
