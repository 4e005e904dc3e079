//! A strict parser of comma-separated tables as traces have them: a line of column names in any order, then rows of as many
//! fields; no quotes. Errors name the file, the line, the column and the way out. The meaning of columns is not known here.

/// A file's name, for messages, and its text.
#[derive(Debug, Clone, Copy)]
pub struct TraceText<'a> {
    pub file: &'a str,
    pub text: &'a str,
}

/// What is wrong with a table, and the way out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TableError {
    #[error("{file} is empty; it should begin with a line of column names. Fetch it again")]
    Empty { file: String },
    #[error("{file} has column names and no rows below them; fetch it again")]
    NoRows { file: String },
    #[error(
        "{file}, line 1: there is no column {column:?} among {found}; add it, or give another file"
    )]
    MissingColumn {
        file: String,
        column: &'static str,
        found: String,
    },
    #[error(
        "{file}, line {line}: {found} fields under {columns} columns; write one for each, without commas or quotes in it"
    )]
    FieldCount {
        file: String,
        line: usize,
        found: usize,
        columns: usize,
    },
    #[error("{file}, line {line}: {column} is {text:?}; write {wanted}")]
    NoNumber {
        file: String,
        line: usize,
        column: &'static str,
        text: String,
        wanted: &'static str,
    },
    #[error("{file}, line {line}: {column} is {text}, less than nothing; write 0 or more")]
    Negative {
        file: String,
        line: usize,
        column: &'static str,
        text: String,
    },
    #[error("{file}, line {line}: {column} is {text}; write at most {most}")]
    TooLarge {
        file: String,
        line: usize,
        column: &'static str,
        text: String,
        most: f64,
    },
    #[error("{file}, line {line}: {column} is {text}; write a whole number")]
    NotWhole {
        file: String,
        line: usize,
        column: &'static str,
        text: String,
    },
}

/// One file's rows.
#[derive(Debug)]
pub struct Table<'a> {
    pub file: &'a str,
    columns: Vec<&'a str>,
    rows: Vec<TableRow<'a>>,
}

#[derive(Debug)]
pub struct TableRow<'a> {
    pub file: &'a str,
    /// The first line of a file is line 1.
    pub line: usize,
    fields: Vec<&'a str>,
}

/// A column's index in its table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    name: &'static str,
    index: usize,
}

/// The largest number below which every whole number is an `f64`: 2^53.
const MAX_EXACT_INTEGER: f64 = 9_007_199_254_740_992.0;

impl<'a> Table<'a> {
    pub fn read(source: TraceText<'a>) -> Result<Self, TableError> {
        let TraceText { file, text } = source;
        // A byte order mark, which a spreadsheet may have added.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        let Some((_, head)) = lines.next() else {
            return Err(TableError::Empty { file: file.into() });
        };
        let columns: Vec<&str> = head.split(',').map(str::trim).collect();
        let row =
            |(index, line): (usize, &'a str)| TableRow::read(file, index + 1, line, columns.len());
        let rows: Vec<TableRow<'a>> = lines.map(row).collect::<Result<_, _>>()?;
        if rows.is_empty() {
            return Err(TableError::NoRows { file: file.into() });
        }
        Ok(Self {
            file,
            columns,
            rows,
        })
    }

    pub fn column(&self, name: &'static str) -> Result<Column, TableError> {
        self.column_if_any(name)
            .ok_or_else(|| TableError::MissingColumn {
                file: self.file.into(),
                column: name,
                found: self.columns.join(", "),
            })
    }

    pub fn columns<const N: usize>(
        &self,
        names: [&'static str; N],
    ) -> Result<[Column; N], TableError> {
        let found: Vec<Column> = names
            .into_iter()
            .map(|name| self.column(name))
            .collect::<Result<_, _>>()?;
        Ok(found
            .try_into()
            .expect("as many columns were found as were named"))
    }

    /// A column that not every trace has.
    pub(crate) fn column_if_any(&self, name: &'static str) -> Option<Column> {
        let index = self.columns.iter().position(|column| *column == name)?;
        Some(Column { name, index })
    }

    pub fn rows(&self) -> &[TableRow<'a>] {
        &self.rows
    }
}

impl Column {
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl<'a> TableRow<'a> {
    fn read(file: &'a str, line: usize, text: &'a str, columns: usize) -> Result<Self, TableError> {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let found = fields.len();
        match found == columns {
            true => Ok(Self { file, line, fields }),
            false => Err(TableError::FieldCount {
                file: file.into(),
                line,
                found,
                columns,
            }),
        }
    }

    pub fn text(&self, column: Column) -> &'a str {
        self.fields[column.index]
    }

    /// From 0 to `most`.
    pub fn number(&self, column: Column, most: f64) -> Result<f64, TableError> {
        self.finite(column, most, "a number, such as 1409 or 7.2")
    }

    /// A whole number from 0 to `most`.
    pub fn whole(&self, column: Column, most: u64) -> Result<u64, TableError> {
        let text = self.text(column);
        if let Some(number) = text.parse().ok().filter(|number| *number <= most) {
            return Ok(number);
        }
        // What remains is wrong, or written like 3.0 or 1e3.
        let number = self.finite(column, MAX_EXACT_INTEGER.min(most as f64), "a whole number")?;
        if number.fract() != 0.0 {
            let (file, text) = (self.file.into(), text.into());
            return Err(TableError::NotWhole {
                file,
                line: self.line,
                column: column.name,
                text,
            });
        }
        Ok(number as u64)
    }

    fn finite(&self, column: Column, most: f64, wanted: &'static str) -> Result<f64, TableError> {
        let (file, line, text) = (
            self.file.to_owned(),
            self.line,
            self.text(column).to_owned(),
        );
        let column = column.name;
        match text.parse::<f64>() {
            Ok(number) if !number.is_finite() => Err(TableError::NoNumber {
                file,
                line,
                column,
                text,
                wanted,
            }),
            Ok(number) if number < 0.0 => Err(TableError::Negative {
                file,
                line,
                column,
                text,
            }),
            Ok(number) if number > most => Err(TableError::TooLarge {
                file,
                line,
                column,
                text,
                most,
            }),
            Ok(number) => Ok(number),
            Err(_) => Err(TableError::NoNumber {
                file,
                line,
                column,
                text,
                wanted,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str, most: u64) -> Result<u64, String> {
        let text = format!("a,b\n{text},x\n");
        let table = Table::read(TraceText {
            file: "t.csv",
            text: &text,
        })
        .unwrap();
        let [column] = table.columns(["a"]).unwrap();
        table.rows()[0]
            .whole(column, most)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_whole_number_is_exact_however_it_is_written() {
        let most = u64::MAX;
        assert_eq!(whole("18446744073709551615", most), Ok(most));
        assert_eq!(whole("3.0", most), Ok(3));
        assert_eq!(whole("1e3", most), Ok(1000));
    }

    #[test]
    fn what_is_no_whole_number_within_bounds_is_named() {
        for (text, wanted) in [
            ("many", "t.csv, line 2: a is \"many\"; write a whole number"),
            ("inf", "t.csv, line 2: a is \"inf\"; write a whole number"),
            ("1.5", "t.csv, line 2: a is 1.5; write a whole number"),
            (
                "-0.5",
                "t.csv, line 2: a is -0.5, less than nothing; write 0 or more",
            ),
            ("8", "t.csv, line 2: a is 8; write at most 7"),
            (
                "99999999999999999999",
                "t.csv, line 2: a is 99999999999999999999; write at most 7",
            ),
        ] {
            assert_eq!(whole(text, 7), Err(wanted.into()));
        }
        // Beyond 2^53 it might be another number.
        assert!(
            whole("1e17", u64::MAX)
                .unwrap_err()
                .contains("write at most 9007199254740992")
        );
    }
}
