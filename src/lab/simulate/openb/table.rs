//! A strict parser of comma-separated tables as traces have them: a line of column names, then rows of as many fields; no
//! quotes. Errors name the file, the line and the fix. The meaning of columns is not known here.

use super::TraceError;

/// One file: its name, for messages, and its rows.
#[derive(Debug)]
pub struct Table<'a> {
    pub file: &'a str,
    columns: Vec<&'a str>,
    rows: Vec<CsvRow<'a>>,
}

#[derive(Debug)]
pub struct CsvRow<'a> {
    file: &'a str,
    /// The first line of a file is line 1.
    pub line: usize,
    fields: Vec<&'a str>,
}

/// A column's index in its table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    name: &'static str,
    place: usize,
}

impl<'a> Table<'a> {
    pub fn read(file: &'a str, text: &'a str) -> Result<Self, TraceError> {
        // A byte order mark, which a spreadsheet may have added.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let Some((_, head)) = lines.next() else { return Err(TraceError::Empty { file: file.into() }) };
        let columns: Vec<&str> = head.split(',').map(str::trim).collect();
        let row = |(place, line): (usize, &'a str)| CsvRow::read(file, place + 1, line, columns.len());
        let rows: Vec<CsvRow<'a>> = lines.map(row).collect::<Result<_, _>>()?;
        if rows.is_empty() {
            return Err(TraceError::NoRows { file: file.into() });
        }
        Ok(Self { file, columns, rows })
    }

    pub fn column(&self, name: &'static str) -> Result<Column, TraceError> {
        self.column_if_any(name).ok_or_else(|| TraceError::MissingColumn {
            file: self.file.into(),
            column: name,
            found: self.columns.join(", "),
        })
    }

    pub fn column_if_any(&self, name: &'static str) -> Option<Column> {
        let place = self.columns.iter().position(|column| *column == name)?;
        Some(Column { name, place })
    }

    pub fn rows(&self) -> impl Iterator<Item = &CsvRow<'a>> {
        self.rows.iter()
    }
}

impl Column {
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl<'a> CsvRow<'a> {
    fn read(file: &'a str, line: usize, text: &'a str, columns: usize) -> Result<Self, TraceError> {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let found = fields.len();
        match found == columns {
            true => Ok(Self { file, line, fields }),
            false => Err(TraceError::FieldCount { file: file.into(), line, found, columns }),
        }
    }

    pub fn text(&self, column: Column) -> &'a str {
        self.fields[column.place]
    }

    /// A share in hundredths, with or without decimals.
    pub fn hundredths(&self, column: Column) -> Result<f64, TraceError> {
        let text = self.text(column);
        let share = text.parse::<f64>().ok().filter(|share| (0.0..=100.0).contains(share));
        share.ok_or_else(|| TraceError::NoShare {
            file: self.file.into(),
            line: self.line,
            column: column.name,
            text: text.into(),
        })
    }

    /// A whole number from 0 to `most`.
    pub fn number(&self, column: Column, most: u64) -> Result<u64, TraceError> {
        let text = self.text(column);
        let is_negative = text.strip_prefix('-').is_some_and(|rest| rest.parse::<f64>().is_ok());
        let (file, line) = (self.file.to_owned(), self.line);
        let (column, text) = (column.name, text.to_owned());
        match text.parse::<u64>() {
            Ok(number) if number <= most => Ok(number),
            Ok(_) => Err(TraceError::TooLarge { file, line, column, text, most }),
            Err(_) if is_negative => Err(TraceError::Negative { file, line, column, text }),
            Err(_) => Err(TraceError::NoNumber { file, line, column, text }),
        }
    }
}
