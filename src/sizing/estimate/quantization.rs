//! How a model's weights are stored, from `quantization_config`: bytes for a parameter, and which modules keep their 16 bits.

use super::config::{ConfigError, Fields};
use std::collections::BTreeSet;
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

/// A part of a layer that a quantization may leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerPart {
    Mixer,
    FeedForward,
    Experts,
}

const LAYER_PARTS: [LayerPart; 3] = [LayerPart::Mixer, LayerPart::FeedForward, LayerPart::Experts];

/// How a model's weights are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    pub precision: Precision,
    /// Parts that keep 16 bits in all layers; then those that do in one layer.
    unquantized: BTreeSet<LayerPart>,
    unquantized_in: BTreeSet<(u64, LayerPart)>,
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

impl Quantization {
    /// All weights in one precision; embeddings and norms have 16 bits either way.
    pub(crate) fn uniform(precision: Precision) -> Self {
        Self {
            precision,
            unquantized: BTreeSet::new(),
            unquantized_in: BTreeSet::new(),
            fp8_kv_cache: false,
            precision_override: None,
        }
    }

    /// Reads `quantization_config` from its parent object. A `requested` precision replaces the file's, whose method may then be
    /// unknown; the modules that the file excludes from quantization are excluded all the same.
    pub fn read(fields: &Fields<'_>, requested: Option<Precision>) -> Result<Self, ConfigError> {
        let Some(fields) = fields.object("quantization_config")? else {
            let asked = requested.filter(|precision| *precision != Precision::HALF);
            let how = if asked == Some(Precision::FP8) {
                PrecisionOverride::OnLoad
            } else {
                PrecisionOverride::Checkpoint
            };
            let read = Self::uniform(asked.unwrap_or(Precision::HALF));
            return Ok(Self {
                precision_override: asked.map(|_| how),
                ..read
            });
        };
        if requested == Some(Precision::HALF) {
            return Ok(Self {
                precision_override: Some(PrecisionOverride::Checkpoint),
                ..Self::uniform(Precision::HALF)
            });
        }
        let from_file = Self::precision(&fields);
        let (precision, asked) = match (from_file, requested) {
            (own, None) => (own.map_err(with_flag_hint)?, None),
            // The file's own has its groups and scales.
            (Ok(own), Some(asked)) if own.name == asked.name => (own, None),
            (_, Some(asked)) => (asked, Some(PrecisionOverride::Checkpoint)),
        };
        let scheme = fields.object("kv_cache_scheme")?;
        let scheme_bits = scheme
            .map(|scheme| scheme.optional_count("num_bits"))
            .transpose()?
            .flatten();
        let modelopt_algorithm = fields.text("kv_cache_quant_algo").unwrap_or_default();
        let mut quantization = Self {
            precision_override: asked,
            ..Self::uniform(precision)
        };
        quantization.fp8_kv_cache = scheme_bits == Some(8)
            || modelopt_algorithm.is_some_and(|algo| algo.eq_ignore_ascii_case("fp8"));
        for list in [
            "modules_to_not_convert",
            "ignored_layers",
            "ignore",
            "exclude_modules",
        ] {
            fields
                .texts(list)?
                .unwrap_or_default()
                .into_iter()
                .for_each(|module| quantization.keep_in_16_bits(module));
        }
        Ok(quantization)
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
            "compressed-tensors" => compressed_tensors_precision(fields)?,
            "bitsandbytes"
                if fields.flag("load_in_8bit", false)?
                    || fields.flag("_load_in_8bit", false)? =>
            {
                Precision::INT8
            }
            "bitsandbytes" => Precision::NF4,
            other => {
                let near =
                    nearest(other, &METHODS).map_or(String::new(), |near| format!(" (`{near}`?)"));
                let expected = format!("one of {}{near}", METHODS.join(", "));
                return Err(fields.field_error("quant_method", expected));
            }
        })
    }

    /// Records a module that keeps 16 bits: of one layer, or, if the name is a pattern, of all.
    fn keep_in_16_bits(&mut self, module: &str) {
        let module = module
            .trim_start_matches("re:")
            .replace("\\.", ".")
            .to_ascii_lowercase();
        if OTHER_MODULES.iter().any(|word| module.contains(word)) {
            return;
        }
        let layer = module.split_once("layers.").map(|(_, rest)| rest);
        let digits = |rest: &str| {
            rest.chars()
                .take_while(char::is_ascii_digit)
                .collect::<String>()
        };
        let index = layer.and_then(|rest| digits(rest).parse::<u64>().ok());
        for part in parts_of_module(&module, layer) {
            match index {
                Some(index) => drop(self.unquantized_in.insert((index, *part))),
                None => drop(self.unquantized.insert(*part)),
            }
        }
    }

    /// Precision of a part of a layer.
    pub fn precision_of(&self, layer: u64, part: LayerPart) -> Precision {
        let is_kept =
            self.unquantized.contains(&part) || self.unquantized_in.contains(&(layer, part));
        if is_kept {
            Precision::HALF
        } else {
            self.precision
        }
    }

    /// Whether the engine needs `--quantization`: it loads the file's own precision without.
    pub(crate) fn is_quantized_on_load(&self) -> bool {
        self.precision_override == Some(PrecisionOverride::OnLoad)
    }

    /// Notes for the table.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let name = self.precision.name;
        let is_kept = !self.unquantized.is_empty() || !self.unquantized_in.is_empty();
        let kept = is_kept.then(|| format!("some modules are not in {name}: the file names them"));
        let other = (self.precision_override == Some(PrecisionOverride::Checkpoint)).then(|| {
            format!("the file's weights are not in {name}: give the engine a checkpoint whose weights are")
        });
        other.into_iter().chain(kept)
    }
}

/// Words in the names of modules that are no layers of the language model, though theirs have layers and attention, too.
const OTHER_MODULES: [&str; 10] = [
    "visual",
    "vision",
    "image",
    "audio",
    "speech",
    "sound",
    "multi_modal",
    "multimodal",
    "projector",
    "mtp",
];

/// Modules of a layer that keep 16 bits either way, or are so small beside its matrices that the rest does not follow them.
const SMALL_MODULES: [&str; 9] = [
    "gate",
    "router",
    "shared_expert_gate",
    "conv1d",
    "in_proj_a",
    "in_proj_b",
    "in_proj_ba",
    "x_proj",
    "dt_proj",
];

/// Parts of a layer that a module's name denotes. Modules outside layers keep 16 bits either way.
fn parts_of_module(module: &str, in_layer: Option<&str>) -> &'static [LayerPart] {
    let mut names = module
        .split('.')
        .map(|name| name.trim_matches(['*', '$', '^']));
    let last = names.rfind(|name| !name.is_empty()).unwrap_or_default();
    if SMALL_MODULES.contains(&last) || last.ends_with("norm") {
        return &[];
    }
    let is_whole = |rest: &str| {
        rest.trim_end_matches(['*', '.', '$'])
            .bytes()
            .all(|byte| byte.is_ascii_digit())
    };
    let has = |words: &[&str]| words.iter().any(|word| module.contains(word));
    if has(&["shared_expert"]) {
        &[LayerPart::FeedForward]
    } else if has(&["expert"]) {
        &[LayerPart::Experts]
    } else if has(&["attn", "attention", "mamba", "mixer"]) {
        &[LayerPart::Mixer]
    } else if has(&["mlp", "feed_forward"]) {
        &[LayerPart::FeedForward, LayerPart::Experts]
    } else if in_layer.is_some_and(|rest| !rest.is_empty() && is_whole(rest)) {
        &LAYER_PARTS
    } else {
        &[]
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
    let bits = fields.first_number_required(&["bits", "w_bit"])?;
    // −1 is one group for each channel, whose scales hardly count.
    let group = fields
        .first_number_required(&["group_size", "q_group_size"])
        .ok();
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
    match fields
        .text("quant_algo")?
        .unwrap_or_default()
        .to_ascii_uppercase()
        .as_str()
    {
        "FP8" => Ok(Precision::FP8),
        "NVFP4" => Ok(Precision::NVFP4),
        _ => Err(fields.field_error("quant_algo", "FP8 or NVFP4")),
    }
}

/// Precision of the first group: a file has several only for parts that hardly count.
fn compressed_tensors_precision(fields: &Fields<'_>) -> Result<Precision, ConfigError> {
    let missing = || fields.field_error("config_groups", "groups with `weights`");
    let groups = fields.object("config_groups")?.ok_or_else(missing)?;
    let group = groups.objects().next().ok_or_else(missing)?;
    let weights = group.object("weights")?.ok_or_else(missing)?;
    let bits = weights.required_number("num_bits")?;
    let group = weights.optional_number("group_size").unwrap_or_default();
    match (weights.text("type")?.unwrap_or("int"), bits) {
        ("float", 8) => Ok(Precision::FP8),
        ("float", 4) if group == Some(32) => Ok(Precision::MXFP4),
        ("float", 4) => Ok(Precision::NVFP4),
        ("int", 8) if group.is_none() => Ok(Precision::INT8),
        ("int", _) => grouped_precision(
            &weights,
            "num_bits",
            bits,
            group,
            !weights.flag("symmetric", true)?,
        ),
        _ => Err(weights.field_error("type", "int or float")),
    }
}
