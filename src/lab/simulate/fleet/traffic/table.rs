//! A strict parser of the tables that traces of serving come as: a line of column names in any order, then rows of as many
//! fields; no quotes. Errors name the file, the line, the column and the way out.

/// A file as it was read, with its name for messages.
#[derive(Debug, Clone, Copy)]
pub struct TrafficText<'a> {
    pub file: &'a str,
    pub text: &'a str,
}

/// What is wrong with a trace of serving, and the way out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TrafficError {
    #[error("{file} is empty; it should begin with a line of column names. Fetch it again")]
    Empty { file: String },
    #[error("{file} has column names and no rows below them; fetch it again")]
    NoRows { file: String },
    #[error("{file}, line 1: there is no column {column:?} among {found}; add it, or give another file")]
    MissingColumn { file: String, column: &'static str, found: String },
    #[error(
        "{file}, line {line}: {found} fields under {columns} columns; write one for each, without commas or quotes in it"
    )]
    FieldCount { file: String, line: usize, found: usize, columns: usize },
    #[error("{file}, line {line}: {column} is {text:?}; write a number, such as 1409 or 7.2")]
    NoNumber { file: String, line: usize, column: &'static str, text: String },
    #[error("{file}, line {line}: {column} is {text}, less than nothing; write 0 or more")]
    Negative { file: String, line: usize, column: &'static str, text: String },
    #[error("{file}, line {line}: {column} is {text}; write at most {most}")]
    TooLarge { file: String, line: usize, column: &'static str, text: String, most: f64 },
    #[error("{file}, line {line}: {column} is {text}; write a whole number")]
    NotWhole { file: String, line: usize, column: &'static str, text: String },
    #[error("{file} has no row whose service is {service}; it has {found}")]
    NoService { file: String, service: &'static str, found: String },
    #[error("{file}, line {line}: service is {text:?}; write code or conv")]
    UnknownService { file: String, line: usize, text: String },
    #[error(
        "{file}, line {line}: {column} {at} of {service} is there before, at line {first}; keep one of the two"
    )]
    Twice { file: String, line: usize, first: usize, column: &'static str, at: u64, service: &'static str },
    #[error(
        "{file}: {column} {at} of {service} is missing, the first of {missing}; add the rows, or ask for gaps to be filled from the \
         rows beside them"
    )]
    Gap { file: String, column: &'static str, at: u64, missing: usize, service: &'static str },
    #[error(
        "{file}, line {line}: offset_ms is {at}, after {before} in the row above; sort the rows of a service by time"
    )]
    Backwards { file: String, line: usize, at: u64, before: u64 },
    #[error(
        "{file}, line {line}: {requests} requests with {prompt} prompt and {output} output tokens; a request has at least one of each, \
         and no request has none"
    )]
    Tokens { file: String, line: usize, requests: f64, prompt: f64, output: f64 },
}

/// One file's rows.
#[derive(Debug)]
pub(super) struct Table<'a> {
    pub file: &'a str,
    columns: Vec<&'a str>,
    rows: Vec<Row<'a>>,
}

#[derive(Debug)]
pub(super) struct Row<'a> {
    file: &'a str,
    /// The first line of a file is line 1.
    pub line: usize,
    fields: Vec<&'a str>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Column {
    name: &'static str,
    place: usize,
}

impl<'a> Table<'a> {
    pub fn read(source: TrafficText<'a>) -> Result<Self, TrafficError> {
        let TrafficText { file, text } = source;
        // A byte order mark, which a spreadsheet may have added.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let Some((_, head)) = lines.next() else { return Err(TrafficError::Empty { file: file.into() }) };
        let columns: Vec<&str> = head.split(',').map(str::trim).collect();
        let row = |(place, text): (usize, &'a str)| {
            let fields: Vec<&str> = text.split(',').map(str::trim).collect();
            let (line, found, columns) = (place + 1, fields.len(), columns.len());
            match found == columns {
                true => Ok(Row { file, line, fields }),
                false => Err(TrafficError::FieldCount { file: file.into(), line, found, columns }),
            }
        };
        let rows = lines.map(row).collect::<Result<Vec<_>, _>>()?;
        if rows.is_empty() {
            return Err(TrafficError::NoRows { file: file.into() });
        }
        Ok(Self { file, columns, rows })
    }

    pub fn column(&self, name: &'static str) -> Result<Column, TrafficError> {
        let place = self.columns.iter().position(|column| *column == name);
        place.map(|place| Column { name, place }).ok_or_else(|| TrafficError::MissingColumn {
            file: self.file.into(),
            column: name,
            found: self.columns.join(", "),
        })
    }

    /// A column that not every trace has.
    pub fn column_if_any(&self, name: &'static str) -> Option<Column> {
        self.column(name).ok()
    }

    pub fn rows(&self) -> &[Row<'a>] {
        &self.rows
    }
}

impl<'a> Row<'a> {
    pub fn text(&self, column: Column) -> &'a str {
        self.fields[column.place]
    }

    /// From 0 to `most`.
    pub fn number(&self, column: Column, most: f64) -> Result<f64, TrafficError> {
        let (file, line, text) = (self.file.to_owned(), self.line, self.text(column).to_owned());
        let column = column.name;
        match text.parse::<f64>() {
            Ok(number) if !number.is_finite() => Err(TrafficError::NoNumber { file, line, column, text }),
            Ok(number) if number < 0.0 => Err(TrafficError::Negative { file, line, column, text }),
            Ok(number) if number > most => Err(TrafficError::TooLarge { file, line, column, text, most }),
            Ok(number) => Ok(number),
            Err(_) => Err(TrafficError::NoNumber { file, line, column, text }),
        }
    }

    pub fn whole(&self, column: Column, most: u64) -> Result<u64, TrafficError> {
        let number = self.number(column, most as f64)?;
        if number.fract() != 0.0 {
            let (file, line, text) = (self.file.to_owned(), self.line, self.text(column).to_owned());
            return Err(TrafficError::NotWhole { file, line, column: column.name, text });
        }
        Ok(number as u64)
    }

    pub fn service(&self, column: Column) -> Result<super::Service, TrafficError> {
        match self.text(column) {
            "code" => Ok(super::Service::Code),
            "conv" => Ok(super::Service::Conversation),
            text => Err(TrafficError::UnknownService {
                file: self.file.into(),
                line: self.line,
                text: text.into(),
            }),
        }
    }
}
