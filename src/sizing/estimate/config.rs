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
    #[error("{0}; hf_quant_config.json has it")]
    Beside(Box<Self>),
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
    #[error("models of the type {} cannot be estimated: {reason}", quoted(.model_type))]
    Unsupported {
        field: String,
        model_type: String,
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
            | Self::Unsupported { field, .. } => Some(field),
            Self::Syntax { .. } | Self::NotAnObject { .. } | Self::At { .. } | Self::Beside(_) => {
                None
            }
        }
    }
}

/// A parsed `config.json` with its text.
#[derive(Debug, Clone)]
pub struct Config {
    text: String,
    fields: Map<String, Value>,
    /// Its quantization is of another file.
    is_quantized_beside: bool,
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
            Value::Object(fields) => Ok(Self {
                text,
                fields,
                is_quantized_beside: false,
            }),
            other => Err(ConfigError::NotAnObject {
                found: json_type(&other),
            }),
        }
    }

    /// The metadata of a file that has no text.
    pub(crate) fn from_fields(fields: Map<String, Value>) -> Self {
        Self {
            text: Value::Object(fields.clone()).to_string(),
            fields,
            is_quantized_beside: false,
        }
    }

    /// Adds what a `hf_quant_config.json` beside the file says, unless the file has a quantization itself.
    pub fn add_quantization(&mut self, text: &str) -> Result<(), ConfigError> {
        let beside = Self::parse(text)?;
        let has_own = |fields: &Map<String, Value>| {
            fields
                .get("quantization_config")
                .is_some_and(|own| !own.is_null())
        };
        let inner = self.fields.values().filter_map(Value::as_object);
        if has_own(&self.fields) || inner.into_iter().any(has_own) {
            return Ok(());
        }
        let Some(quantization) = beside.fields.get("quantization").and_then(Value::as_object)
        else {
            return Err(beside
                .fields()
                .field_error("quantization", "an object with quant_algo"));
        };
        let mut quantization = quantization.clone();
        quantization.insert("quant_method".into(), "modelopt".into());
        self.fields
            .insert("quantization_config".into(), quantization.into());
        self.is_quantized_beside = true;
        Ok(())
    }

    pub fn fields(&self) -> Fields<'_> {
        Fields {
            map: &self.fields,
            path: String::new(),
            defaults: &[],
        }
    }

    /// The error with the line of its field, or of the object that lacks the field.
    pub fn with_line(&self, error: ConfigError) -> ConfigError {
        match error.field() {
            Some(field) if self.is_quantized_beside && field.starts_with("quantization_config") => {
                ConfigError::Beside(Box::new(error))
            }
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

/// Usual names of fields, and the others that files have for the same.
const OTHER_NAMES: &[(&str, &[&str])] = &[
    ("hidden_size", &["n_embd", "d_model", "dim"]),
    (
        "num_hidden_layers",
        &[
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "num_decoder_layers",
        ],
    ),
    (
        "num_attention_heads",
        &[
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "attention_heads",
        ],
    ),
    (
        "num_key_value_heads",
        &[
            "n_head_kv",
            "num_kv_heads",
            "n_kv_heads",
            "multi_query_group_num",
        ],
    ),
    ("head_dim", &["kv_channels", "attention_head_dim", "d_kv"]),
    (
        "intermediate_size",
        &[
            "n_inner",
            "ffn_dim",
            "d_ff",
            "ffn_hidden_size",
            "decoder_ffn_dim",
        ],
    ),
    (
        "max_position_embeddings",
        &[
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "seq_length",
            "max_sequence_length",
        ],
    ),
    (
        "num_experts",
        &["num_local_experts", "n_routed_experts", "moe_num_experts"],
    ),
    (
        "num_experts_per_tok",
        &[
            "moe_topk",
            "top_k_experts",
            "moe_top_k",
            "moe_k",
            "num_experts_per_token",
        ],
    ),
    ("moe_intermediate_size", &["expert_ffn_hidden_size"]),
    ("dense_intermediate_size", &["intermediate_size_mlp"]),
    (
        "shared_intermediate_size",
        &["shared_expert_intermediate_size", "share_expert_dim"],
    ),
    (
        "moe_layer_freq",
        &["decoder_sparse_step", "interleave_moe_layer_step"],
    ),
    ("sliding_window_pattern", &["_sliding_window_pattern"]),
    ("mamba_n_heads", &["mamba_num_heads"]),
    ("mamba_d_head", &["mamba_head_dim"]),
    ("mamba_n_groups", &["n_groups"]),
    ("mamba_d_state", &["ssm_state_size"]),
    ("mamba_d_conv", &["conv_kernel"]),
    ("mamba_ssm_dtype", &["mamba_ssm_cache_dtype"]),
    ("layer_types", &["layers_block_type"]),
    ("bits", &["w_bit"]),
    ("group_size", &["q_group_size"]),
];

/// Fields of one object of the file, by their usual names.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object, with a dot at its end; empty for the whole file.
    path: String,
    /// Values that files of the family leave out, as its code in transformers has them.
    defaults: &'static [(&'static str, u64)],
}

impl<'a> Fields<'a> {
    /// The fields with a family's defaults.
    pub(crate) fn with_defaults(self, defaults: &'static [(&'static str, u64)]) -> Self {
        Self { defaults, ..self }
    }

    /// Name that the file has for the field.
    pub fn name(&self, usual: &'static str) -> &'static str {
        let others = OTHER_NAMES.iter().find(|(name, _)| *name == usual);
        let others = others.map_or(&[][..], |(_, others)| others);
        let all = std::iter::once(&usual).chain(others);
        all.copied()
            .find(|name| self.get(name).is_some())
            .unwrap_or(usual)
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
        self.optional_number(usual)?.ok_or_else(|| {
            self.field_error(usual, format!("a whole number from 1 to {MAX_NUMBER}"))
        })
    }

    /// Whole number of at least 1, if the field is there: 0 stands for none.
    pub(crate) fn optional_number(&self, usual: &'static str) -> Result<Option<u64>, ConfigError> {
        Ok(self.optional_count(usual)?.filter(|number| *number > 0))
    }

    /// Whole number of at least 0, if the field is there.
    pub(crate) fn optional_count(&self, usual: &'static str) -> Result<Option<u64>, ConfigError> {
        let name = self.name(usual);
        let Some(value) = self.get(name) else {
            return Ok(self.default(usual));
        };
        let whole = |value: &Value| {
            // Some files write 4096.0.
            let whole = value
                .as_f64()
                .filter(|number| number.fract() == 0.0 && *number >= 0.0);
            value.as_u64().or(whole.map(|number| number as u64))
        };
        // Of a size for each layer, what a layer takes at most.
        let number = match value.as_array() {
            Some(each) => each
                .iter()
                .try_fold(None, |most, value| Some(most.max(Some(whole(value)?))))
                .flatten(),
            None => whole(value),
        };
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

    /// Whole number of at least 0, if the field is there and is one.
    pub fn count(&self, usual: &'static str) -> Option<u64> {
        self.optional_count(usual).unwrap_or_default()
    }

    pub fn flag(&self, name: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(name) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.invalid(name, value, "true or false")),
        }
    }

    pub fn text(&self, usual: &'static str) -> Result<Option<&'a str>, ConfigError> {
        let name = self.name(usual);
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let text = value.as_str().filter(|_| !is_non_finite(value));
        text.map(Some)
            .ok_or_else(|| self.invalid(name, value, "a text in quotes"))
    }

    pub fn list(&self, usual: &'static str) -> Result<Option<&'a [Value]>, ConfigError> {
        let name = self.name(usual);
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
                    defaults: &[],
                }))
            }
            None => Err(self.invalid(name, value, "an object in braces")),
        }
    }

    /// The objects within this one with their names, in order.
    pub fn objects(&self) -> impl Iterator<Item = (&'a str, Fields<'a>)> {
        let inner = self
            .map
            .iter()
            .filter_map(|(name, value)| Some((name, value.as_object()?)));
        let path = self.path.clone();
        inner.map(move |(name, map)| {
            let fields = Fields {
                map,
                path: format!("{path}{name}."),
                defaults: &[],
            };
            (name.as_str(), fields)
        })
    }

    pub fn has(&self, usual: &'static str) -> bool {
        self.get(self.name(usual)).is_some()
    }
}
