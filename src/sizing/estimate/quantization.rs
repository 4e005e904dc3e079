//! How a model's weights are stored, from `quantization_config`: bytes for a parameter, and which modules keep their 16 bits.

use super::config::{ConfigError, Fields};
use super::mixer::Matrix;
use regex::{RegexBuilder, RegexSet, RegexSetBuilder};
use std::collections::BTreeSet;
use stowage_policy_file::diagnostic::quoted;
use stowage_policy_file::nearest::nearest;

/// Bytes per parameter, as a ratio of whole numbers: the values of a group with its scale and zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Precision {
    pub name: &'static str,
    bytes: u64,
    parameters: u64,
}

impl Precision {
    /// bf16 and fp16.
    pub const HALF: Self = Self {
        name: "16-bit",
        bytes: 2,
        parameters: 1,
    };
    pub const FP8: Self = Self {
        name: "fp8",
        bytes: 1,
        parameters: 1,
    };
    pub const INT8: Self = Self {
        name: "int8",
        bytes: 1,
        parameters: 1,
    };
    /// 128 × 128 values with a scale of 4 bytes: DeepSeek's.
    pub(crate) const FP8_BLOCKS: Self = Self {
        name: "fp8",
        bytes: 128 * 128 + 4,
        parameters: 128 * 128,
    };
    /// 32 values of 4 bits with a scale of 1 byte (OCP Microscaling Formats 1.0).
    pub const MXFP4: Self = Self {
        name: "mxfp4",
        bytes: 17,
        parameters: 32,
    };
    /// 16 values of 4 bits with a scale of 1 byte.
    pub const NVFP4: Self = Self {
        name: "nvfp4",
        bytes: 9,
        parameters: 16,
    };
    /// 64 values of 4 bits with a scale of 4 bytes.
    pub(crate) const NF4: Self = Self {
        name: "nf4",
        bytes: 36,
        parameters: 64,
    };
    /// AWQ's and GPTQ's usual groups.
    pub const INT4: Self = Self::grouped(4, 128, true);

    /// Integers of `bits` in groups with a scale of 16 bits and, if `zeros`, a zero point of `bits`.
    const fn grouped(bits: u64, group: u64, zeros: bool) -> Self {
        let in_bits = bits * group + 16 + if zeros { bits } else { 0 };
        let name = if bits == 8 { "int8" } else { "int4" };
        Self {
            name,
            bytes: in_bits,
            parameters: 8 * group,
        }
    }

    pub fn bytes_of(self, parameters: u128) -> u128 {
        parameters
            .saturating_mul(self.bytes.into())
            .div_ceil(self.parameters.into())
    }
}

/// How a model's weights are stored.
#[derive(Debug, Clone)]
pub struct Quantization {
    /// Precision of most modules.
    pub precision: Precision,
    /// Precision of the modules that no group names.
    others: Precision,
    groups: Vec<(ModuleNames, Precision)>,
    /// Modules that keep 16 bits.
    skipped: ModuleNames,
    /// The file asks for a KV cache of 8 bits.
    pub fp8_kv_cache: bool,
    /// Precision requested instead of the file's, if another was.
    precision_override: Option<PrecisionOverride>,
}

/// How an engine gets weights in a precision other than the file's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrecisionOverride {
    /// The engine quantizes 16-bit weights to fp8 while it loads the model.
    OnLoad,
    /// It loads another checkpoint, which has them so.
    Checkpoint,
}

const METHODS: [&str; 9] = [
    "fp8",
    "fbgemm_fp8",
    "compressed-tensors",
    "modelopt",
    "awq",
    "gptq",
    "auto-round",
    "mxfp4",
    "bitsandbytes",
];
/// Stands for a GGUF file's own types, of which its header says the bytes.
pub(super) const GGUF: &str = "gguf";

/// Lists of modules that keep 16 bits.
const SKIPPED: [&str; 5] = [
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "ignored_layers",
    "ignore",
    "exclude_modules",
];

impl Quantization {
    /// All weights in one precision; embeddings and norms have 16 bits either way.
    pub(crate) fn uniform(precision: Precision) -> Self {
        Self {
            precision,
            others: precision,
            groups: Vec::new(),
            skipped: ModuleNames::default(),
            fp8_kv_cache: false,
            precision_override: None,
        }
    }

    /// Reads `quantization_config` from its parent object. A `requested` precision replaces the file's, whose method may then be
    /// unknown; the modules that the file excludes from quantization are excluded all the same.
    pub fn read(fields: &Fields<'_>, requested: Option<Precision>) -> Result<Self, ConfigError> {
        let Some(fields) = fields.object("quantization_config")? else {
            let applied = requested.filter(|precision| *precision != Precision::HALF);
            let how = if applied == Some(Precision::FP8) {
                PrecisionOverride::OnLoad
            } else {
                PrecisionOverride::Checkpoint
            };
            return Ok(Self {
                precision_override: applied.map(|_| how),
                ..Self::uniform(applied.unwrap_or(Precision::HALF))
            });
        };
        if requested == Some(Precision::HALF) {
            return Ok(Self {
                precision_override: Some(PrecisionOverride::Checkpoint),
                ..Self::uniform(Precision::HALF)
            });
        }
        let mut read = match (Self::from_file(&fields), requested) {
            (own, None) => own.map_err(with_flag_hint)?,
            // The file's own has its groups and scales.
            (Ok(own), Some(precision)) if own.precision.name == precision.name => own,
            (_, Some(precision)) => Self {
                precision_override: Some(PrecisionOverride::Checkpoint),
                ..Self::uniform(precision)
            },
        };
        let scheme_bits = match fields.object("kv_cache_scheme") {
            Ok(Some(scheme)) => scheme.optional_count("num_bits")?,
            _ => None,
        };
        read.fp8_kv_cache = scheme_bits == Some(8)
            || ["kv_cache_scheme", "kv_cache_quant_algo"]
                .iter()
                .any(|name| {
                    let algorithm = fields.text(name).unwrap_or_default();
                    algorithm.is_some_and(|algorithm| algorithm.eq_ignore_ascii_case("fp8"))
                });
        for list in SKIPPED {
            let names = fields.texts(list)?.unwrap_or_default();
            let added = read.skipped.add(names.into_iter());
            let compiled = added.and_then(|()| read.skipped.compile());
            compiled.map_err(|expected| match fields.field_error(list, expected) {
                error if requested.is_none() => with_flag_hint(error),
                error => error,
            })?;
        }
        Ok(read)
    }

    /// What the file says, without what it skips.
    fn from_file(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let mut all = "config_groups";
        if !fields.has(all) {
            all = "quantized_layers";
        }
        let Some(by_name) = fields.object(all)? else {
            return Self::precision(fields).map(Self::uniform);
        };
        let mut read = Self::uniform(Precision::HALF);
        for (name, group) in by_name.objects() {
            let weights = group.object("weights")?;
            let precision = match &weights {
                Some(weights) => compressed_tensors_precision(weights)?,
                None if group.has("quant_algo") => modelopt_precision(&group)?,
                // Activations only.
                None => continue,
            };
            let usual = if weights.is_some() { "Linear" } else { name };
            let targets = group.texts("targets")?.unwrap_or(vec![usual]);
            if read.precision == Precision::HALF {
                read.precision = precision;
            }
            if targets.contains(&"Linear") {
                (read.precision, read.others) = (precision, precision);
            }
            let same = read
                .groups
                .iter()
                .position(|(_, known)| *known == precision);
            let at = same.unwrap_or(read.groups.len());
            if at == MAX_PRECISIONS {
                let expected = format!("groups of at most {MAX_PRECISIONS} precisions");
                return Err(fields.field_error(all, expected));
            }
            if same.is_none() {
                read.groups.push((ModuleNames::default(), precision));
            }
            read.groups[at]
                .0
                .add(targets.into_iter())
                .map_err(|expected| group.field_error("targets", expected))?;
        }
        let mut groups = read.groups.iter_mut();
        groups
            .try_for_each(|(names, _)| names.compile())
            .map_err(|expected| fields.field_error(all, expected))?;
        Ok(read)
    }

    fn precision(fields: &Fields<'_>) -> Result<Precision, ConfigError> {
        let method = fields
            .text("quant_method")?
            .ok_or_else(|| fields.field_error("quant_method", "a method"))?;
        Ok(match method {
            "fp8" if fields.has("weight_block_size") => Precision::FP8_BLOCKS,
            "fp8" | "fbgemm_fp8" => Precision::FP8,
            "modelopt" | "modelopt_fp4" => modelopt_precision(fields)?,
            "mxfp4" => Precision::MXFP4,
            "awq" | "gptq" | "auto-round" => integer_precision(fields)?,
            "compressed-tensors" => {
                return Err(fields.field_error("config_groups", "groups with `weights`"));
            }
            "bitsandbytes"
                if fields.flag("load_in_8bit", false)?
                    || fields.flag("_load_in_8bit", false)? =>
            {
                Precision::INT8
            }
            "bitsandbytes" => Precision::NF4,
            GGUF => Precision::HALF,
            other => {
                let near =
                    nearest(other, &METHODS).map_or(String::new(), |near| format!(" (`{near}`?)"));
                let expected = format!("one of {}{near}", METHODS.join(", "));
                return Err(fields.field_error("quant_method", expected));
            }
        })
    }

    /// Precision of a layer's matrix.
    pub fn precision_of(&self, layer: usize, matrix: &Matrix) -> Precision {
        if self.skipped.contain(layer, matrix) {
            return Precision::HALF;
        }
        let mut groups = self.groups.iter();
        groups
            .find(|(names, _)| names.contain(layer, matrix))
            .map_or(self.others, |(_, precision)| *precision)
    }

    /// Whether another precision than the file's was requested.
    pub fn is_overridden(&self) -> bool {
        self.precision_override.is_some()
    }

    /// Whether the engine needs `--quantization`: it loads the file's own precision without.
    pub(crate) fn is_quantized_on_load(&self) -> bool {
        self.precision_override == Some(PrecisionOverride::OnLoad)
    }

    /// Notes for the table.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let name = self.precision.name;
        let is_other = self.precision_override == Some(PrecisionOverride::Checkpoint);
        let other = is_other.then(|| {
            format!("the file's weights are not in {name}: give the engine a checkpoint whose weights are")
        });
        let unread = self.unread_names().map(|pattern| {
            format!(
                "{} is no pattern that is read here: what it names counts as not named",
                quoted(pattern)
            )
        });
        other.into_iter().chain(unread)
    }

    /// Of each list the first pattern that is none.
    pub(super) fn unread_names(&self) -> impl Iterator<Item = &String> {
        let groups = self.groups.iter().map(|(names, _)| names);
        groups
            .chain([&self.skipped])
            .filter_map(|names| names.unread.as_ref())
    }
}

/// Names of modules, and patterns of them, as loaders read them: what begins with `re:` is a regular expression that matches from
/// the name's start (compressed-tensors, vLLM); `*` stands for any text (ModelOpt); another is a name or a whole part of it.
#[derive(Debug, Clone, Default)]
struct ModuleNames {
    names: BTreeSet<String>,
    sources: Vec<String>,
    patterns: RegexSet,
    /// The first pattern that is none.
    unread: Option<String>,
}

/// Maximum number of precisions in a file's groups: more than anyone mixes, and each costs a search by every module.
const MAX_PRECISIONS: usize = 16;
/// Maximum number of patterns in a list, and of bytes that they take compiled.
const MAX_PATTERNS: usize = 4096;
const MAX_PATTERN_BYTES: usize = 4 << 20;
/// What stands before a layer's number in a module's name.
const ROOTS: [&str; 5] = [
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "backbone.layers",
    "transformer.h",
];

impl ModuleNames {
    /// Adds names; the error says what to write instead.
    fn add<'a>(&mut self, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
        for name in names {
            let pattern = match name.strip_prefix("re:") {
                Some(pattern) => format!("^(?:{pattern})"),
                None if name.contains('*') => {
                    let text = regex::escape(name).replace("\\*", ".*");
                    format!("^(?:.*\\.)?{text}(?:\\..*)?$")
                }
                None => {
                    let root = ROOTS.iter().find_map(|root| name.strip_prefix(root));
                    let name = root.map_or(name.to_owned(), |rest| format!("layers{rest}"));
                    self.names.insert(name);
                    continue;
                }
            };
            // Whether it can be read; with no space for more it is not compiled.
            match RegexBuilder::new(&pattern).size_limit(0).build() {
                Err(regex::Error::Syntax(_)) => {
                    self.unread.get_or_insert_with(|| name.to_owned());
                }
                _ if self.sources.len() < MAX_PATTERNS => self.sources.push(pattern),
                _ => return Err(format!("at most {MAX_PATTERNS} patterns")),
            }
        }
        Ok(())
    }

    /// Compiles the patterns once all are added.
    fn compile(&mut self) -> Result<(), String> {
        let set = RegexSetBuilder::new(&self.sources)
            .size_limit(MAX_PATTERN_BYTES)
            .build();
        self.patterns = set.map_err(|_| "fewer or simpler patterns".to_owned())?;
        Ok(())
    }

    fn contain(&self, layer: usize, matrix: &Matrix) -> bool {
        if self.names.is_empty() && self.patterns.is_empty() {
            return false;
        }
        matrix.modules().any(|module| {
            let name = format!("layers.{layer}.{module}");
            let starts = |text: &str| {
                let dots = text.match_indices('.').map(|(at, _)| at + 1);
                std::iter::once(0).chain(dots).collect::<Vec<_>>()
            };
            let is_named = !self.names.is_empty()
                && starts(&name).into_iter().any(|start| {
                    let rest = &name[start..];
                    let ends = rest.match_indices('.').map(|(at, _)| at);
                    ends.chain([rest.len()])
                        .any(|end| self.names.contains(&rest[..end]))
                });
            is_named
                || !self.patterns.is_empty()
                    && ROOTS
                        .iter()
                        .any(|root| self.patterns.is_match(&format!("{root}.{layer}.{module}")))
        })
    }
}

/// Adds `--quantization` as the remedy to an error about an unknown storage format.
fn with_flag_hint(error: ConfigError) -> ConfigError {
    match error {
        ConfigError::Invalid {
            field,
            found,
            expected,
        } => ConfigError::Invalid {
            field,
            found,
            expected: format!("{expected}, or say --quantization"),
        },
        other => other,
    }
}

fn integer_precision(fields: &Fields<'_>) -> Result<Precision, ConfigError> {
    let bits = fields.required_number("bits")?;
    // −1 is one group for each channel, whose scales hardly count.
    let group = fields.optional_number("group_size").unwrap_or_default();
    grouped_precision(fields, "bits", bits, group, true)
}

fn grouped_precision(
    fields: &Fields<'_>,
    name: &'static str,
    bits: u64,
    group: Option<u64>,
    zeros: bool,
) -> Result<Precision, ConfigError> {
    const WHOLE_CHANNEL: u64 = 1 << 16;
    match bits {
        4 | 8 => Ok(Precision::grouped(
            bits,
            group.unwrap_or(WHOLE_CHANNEL).min(WHOLE_CHANNEL),
            zeros,
        )),
        _ => Err(fields.field_error(name, "4 or 8")),
    }
}

fn modelopt_precision(fields: &Fields<'_>) -> Result<Precision, ConfigError> {
    let algorithm = fields.text("quant_algo")?.unwrap_or_default();
    match algorithm.to_ascii_uppercase().as_str() {
        algorithm if algorithm.starts_with("FP8") => Ok(Precision::FP8),
        algorithm if algorithm.ends_with("NVFP4") => Ok(Precision::NVFP4),
        algorithm if algorithm.starts_with("W4A16") => Ok(Precision::INT4),
        _ => Err(fields.field_error("quant_algo", "FP8 or NVFP4")),
    }
}

fn compressed_tensors_precision(weights: &Fields<'_>) -> Result<Precision, ConfigError> {
    let bits = weights.required_number("num_bits")?;
    let group = weights.optional_number("group_size").unwrap_or_default();
    match (weights.text("type")?.unwrap_or("int"), bits) {
        ("float", 8) => Ok(Precision::FP8),
        ("float", 4) if group == Some(32) => Ok(Precision::MXFP4),
        ("float", 4) => Ok(Precision::NVFP4),
        ("int", 8) if group.is_none() => Ok(Precision::INT8),
        ("int", _) => grouped_precision(
            weights,
            "num_bits",
            bits,
            group,
            !weights.flag("symmetric", true)?,
        ),
        _ => Err(weights.field_error("type", "int or float")),
    }
}
