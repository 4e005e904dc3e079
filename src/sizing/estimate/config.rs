//! A `config.json` as text: its fields, each read with its type, and mistakes named by field or by line and column.
//!
//! What a field means for a model is not known here.

use super::json_lines;
use serde_json::{Map, Value};
use stowage_policy_file::diagnostic::{escape_control_characters, quoted};
use stowage_policy_file::nearest::nearest;

/// Why a file cannot be read as a model's configuration. Each text says what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{line}:{column}: this is not JSON: {problem}")]
    Syntax {
        line: usize,
        column: usize,
        problem: String,
    },
    /// Another error with the line that it is about.
    #[error("{line}: {error}")]
    At { line: usize, error: Box<Self> },
    #[error("this is a JSON {found}, not an object; a model's config.json begins with `{{`")]
    NotAnObject { found: &'static str },
    #[error("`{field}` is missing{}", .near.as_ref().map_or(
        "; add it, or take config.json from the model's repository".to_owned(),
        |near| format!("; there is {}: is that it?", quoted(near)),
    ))]
    Missing { field: String, near: Option<String> },
    #[error("`{field}` is {found}; write {expected}")]
    Invalid {
        field: String,
        found: String,
        expected: String,
    },
    #[error(
        "{} {} is not known{}; known are {}",
        .field,
        quoted(.found),
        .near.as_ref().map_or(String::new(), |near| format!("; did you mean `{near}`?")),
        .known.join(", ")
    )]
    UnknownArchitecture {
        field: String,
        found: String,
        near: Option<String>,
        known: Vec<&'static str>,
    },
    #[error("models of the type `{model_type}` cannot be estimated: {reason}")]
    Unsupported {
        field: String,
        model_type: &'static str,
        reason: &'static str,
    },
}

/// Maximum of any number in a file, more than any model has. Products of a few of them stay within 128 bits.
const MAX_NUMBER: u64 = 1 << 32;
/// Maximum length of a value in a message, in characters: enough to recognize it.
const MAX_SHOWN_CHARS: usize = 60;

impl ConfigError {
    /// Path of the field that the error is about: the names of the objects around it, joined by dots.
    fn field(&self) -> Option<&str> {
        match self {
            Self::Missing { field, .. }
            | Self::Invalid { field, .. }
            | Self::UnknownArchitecture { field, .. }
            | Self::Unsupported { field, .. } => Some(field),
            Self::Syntax { .. } | Self::NotAnObject { .. } | Self::At { .. } => None,
        }
    }
}

/// A parsed `config.json` with its text.
#[derive(Debug, Clone)]
pub struct Config {
    text: String,
    fields: Map<String, Value>,
}

impl Config {
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        // Editors on Windows begin a file with a mark of its encoding.
        let text = without_non_finite(text.strip_prefix('\u{feff}').unwrap_or(text));
        let value: Value = serde_json::from_str(&text).map_err(|error| {
            let problem = error.to_string();
            let problem = problem
                .split(" at line ")
                .next()
                .unwrap_or_default()
                .to_owned();
            ConfigError::Syntax {
                line: error.line(),
                column: error.column(),
                problem,
            }
        })?;
        match value {
            Value::Object(fields) => Ok(Self { text, fields }),
            other => Err(ConfigError::NotAnObject {
                found: json_type(&other),
            }),
        }
    }

    pub fn fields(&self) -> Fields<'_> {
        Fields {
            map: &self.fields,
            path: String::new(),
            family_names: &[],
            defaults: &[],
        }
    }

    /// The error with the line of its field, or of the object that lacks the field.
    pub fn with_line(&self, error: ConfigError) -> ConfigError {
        match error.field() {
            Some(field) => ConfigError::At {
                line: json_lines::line_of(&self.text, field),
                error: Box::new(error),
            },
            None => error,
        }
    }
}

fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// What Python writes and JSON does not have, and the text that stands for it here: as long, so that places stay as they are, and
/// with a character that no field has.
const NON_FINITE: [(&str, &str); 3] = [
    ("NaN", "\"\u{7f}\""),
    ("Infinity", "\"\u{7f}     \""),
    ("-Infinity", "\"\u{7f}      \""),
];

fn is_non_finite(value: &Value) -> bool {
    value
        .as_str()
        .is_some_and(|text| text.starts_with('\u{7f}'))
}

/// The text with placeholder strings instead of `NaN` and `Infinity`, which Python writes.
fn without_non_finite(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['"', 'N', 'I', '-']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match NON_FINITE.iter().find(|(word, _)| rest.starts_with(word)) {
            Some((word, instead)) => {
                out.push_str(instead);
                word.len()
            }
            None => {
                let taken = if rest.starts_with('"') {
                    string_length(rest)
                } else {
                    1
                };
                out.push_str(&rest[..taken]);
                taken
            }
        };
        rest = &rest[taken..];
    }
    out.push_str(rest);
    out
}

/// Text of a value as its file has it.
fn source_text(value: &Value) -> String {
    let text = value.to_string();
    NON_FINITE
        .iter()
        .fold(text, |text, (word, instead)| text.replace(instead, word))
}

/// Length of the string literal at the start of a text, including quotes; the whole text if the literal does not end.
pub(super) fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'"' if !escaped => return at + 1,
            b'\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

/// Fields of one object of the file. They are looked up by the usual names, which a family may map to names of its own.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object, with a dot at its end; empty for the whole file.
    path: String,
    /// Pairs of a usual name and the name in files of the family.
    family_names: &'static [(&'static str, &'static str)],
    /// Values that files of the family leave out, as its code in transformers has them.
    defaults: &'static [(&'static str, u64)],
}

impl<'a> Fields<'a> {
    /// The fields with a family's names and defaults.
    pub(crate) fn for_family(
        self,
        names: &'static [(&'static str, &'static str)],
        defaults: &'static [(&'static str, u64)],
    ) -> Self {
        Self {
            family_names: names,
            defaults,
            ..self
        }
    }

    fn name(&self, usual: &'static str) -> &'static str {
        self.family_names
            .iter()
            .find(|(name, _)| *name == usual)
            .map_or(usual, |(_, family_name)| family_name)
    }

    fn default(&self, usual: &str) -> Option<u64> {
        self.defaults
            .iter()
            .find(|(name, _)| *name == usual)
            .map(|(_, value)| *value)
    }

    /// Value of the field; `None` if it is missing or `null`.
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn invalid(&self, name: &str, value: &Value, expected: impl Into<String>) -> ConfigError {
        let text = source_text(value);
        let found = match text.char_indices().nth(MAX_SHOWN_CHARS) {
            Some((end, _)) => escape_control_characters(&text[..end]) + "…",
            None => escape_control_characters(&text),
        };
        ConfigError::Invalid {
            field: self.path_of(name),
            found,
            expected: expected.into(),
        }
    }

    fn missing(&self, name: &str) -> ConfigError {
        if let Some(null) = self.map.get(name).filter(|value| value.is_null()) {
            return self.invalid(
                name,
                null,
                "a value, or take config.json from the model's repository",
            );
        }
        let names: Vec<&String> = self.map.keys().collect();
        let near = nearest(name, &names).map(str::to_owned);
        ConfigError::Missing {
            field: self.path_of(name),
            near,
        }
    }

    /// Path of a field: the names of the objects around it, joined by dots.
    pub fn path_of(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Error about this field's value, or that it is missing.
    pub fn field_error(&self, usual: &'static str, expected: impl Into<String>) -> ConfigError {
        let name = self.name(usual);
        match self.get(name) {
            Some(value) => self.invalid(name, value, expected),
            None => self.missing(name),
        }
    }

    /// Whole number of at least 1; an error if it is missing.
    pub fn required_number(&self, usual: &'static str) -> Result<u64, ConfigError> {
        self.optional_number(usual)?
            .ok_or_else(|| self.missing(self.name(usual)))
    }

    /// Whole number of at least 1, if the field is there.
    pub(crate) fn optional_number(&self, usual: &'static str) -> Result<Option<u64>, ConfigError> {
        match self.optional_count(usual)? {
            Some(0) => {
                Err(self.field_error(usual, format!("a whole number from 1 to {MAX_NUMBER}")))
            }
            number => Ok(number),
        }
    }

    /// Whole number of at least 0, if the field is there.
    pub(crate) fn optional_count(&self, usual: &'static str) -> Result<Option<u64>, ConfigError> {
        let name = self.name(usual);
        let Some(value) = self.get(name) else {
            return Ok(self.default(usual));
        };
        // Some files write 4096.0.
        let whole = || {
            value
                .as_f64()
                .filter(|number| number.fract() == 0.0 && *number >= 0.0)
        };
        let number = value
            .as_u64()
            .or_else(|| whole().map(|number| number as u64));
        number
            .filter(|number| *number <= MAX_NUMBER)
            .map(Some)
            .ok_or_else(|| {
                self.invalid(
                    name,
                    value,
                    format!("a whole number from 0 to {MAX_NUMBER}"),
                )
            })
    }

    /// Count in the first of these fields that is there.
    pub fn first_count(&self, names: &[&'static str]) -> Result<Option<u64>, ConfigError> {
        for name in names {
            if let Some(count) = self.optional_count(name)? {
                return Ok(Some(count));
            }
        }
        Ok(None)
    }

    /// Number of at least 1 in the first of these fields that is there; an error that names the first field if none is.
    pub fn first_number_required(&self, names: &[&'static str]) -> Result<u64, ConfigError> {
        for name in names {
            if let Some(number) = self.optional_number(name)? {
                return Ok(number);
            }
        }
        Err(self.missing(names[0]))
    }

    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.invalid(name, value, "true or false")),
        }
    }

    pub fn text(&self, name: &'static str) -> Result<Option<&'a str>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let text = value.as_str().filter(|_| !is_non_finite(value));
        text.map(Some)
            .ok_or_else(|| self.invalid(name, value, "a text in quotes"))
    }

    pub fn list(&self, name: &'static str) -> Result<Option<&'a [Value]>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_array() {
            Some(list) => Ok(Some(list)),
            None => Err(self.invalid(name, value, "a list in brackets")),
        }
    }

    /// A list of texts.
    pub fn texts(&self, name: &'static str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(list) = self.list(name)? else {
            return Ok(None);
        };
        let text = |value: &'a Value| {
            value
                .as_str()
                .ok_or_else(|| self.invalid(name, value, "texts in quotes in its list"))
        };
        list.iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    /// Layer indices in a list; empty if the field is missing.
    pub fn indices(&self, name: &'static str) -> Result<Vec<u64>, ConfigError> {
        let list = self.list(name)?.unwrap_or_default();
        let index = |value: &'a Value| {
            value
                .as_u64()
                .ok_or_else(|| self.invalid(name, value, "indices of layers"))
        };
        list.iter().map(index).collect()
    }

    /// Fields of an object within this one, by their usual names.
    pub fn object(&self, name: &'static str) -> Result<Option<Fields<'a>>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_object() {
            Some(map) => {
                let path = format!("{}{name}.", self.path);
                Ok(Some(Fields {
                    map,
                    path,
                    family_names: &[],
                    defaults: &[],
                }))
            }
            None => Err(self.invalid(name, value, "an object in braces")),
        }
    }

    /// The objects within this one, in order.
    pub fn objects(&self) -> impl Iterator<Item = Fields<'a>> {
        let inner = self
            .map
            .iter()
            .filter_map(|(name, value)| Some((name, value.as_object()?)));
        let path = self.path.clone();
        inner.map(move |(name, map)| Fields {
            map,
            path: format!("{path}{name}."),
            family_names: &[],
            defaults: &[],
        })
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}
