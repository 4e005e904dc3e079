//! A model as its layers: made of a file's fields and its family's row, checked once.

use super::config::{Config, ConfigError, Fields};
use super::family::{AttentionKind, Family, LayerOrder, find_family};
use super::feed_forward::{FeedForward, FeedForwardRule};
use super::mixer::{Attention, LatentAttention, Mixer, Parameters, Recurrent};
use super::quantization::{Precision, Quantization};
use super::{MAX_GPUS_PER_POD, WorkloadError, saturating_product};

/// Architecture of a model, as far as its VRAM depends on it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelArchitecture {
    pub model_type: String,
    pub hidden: u64,
    pub vocab: u64,
    /// Number of learned position embeddings.
    learned_positions: u64,
    /// The input embedding is also the output projection, and in memory once.
    pub has_tied_embeddings: bool,
    pub layers: Vec<Layer>,
    /// Maximum number of tokens in its context, if the file gives it.
    pub max_context: Option<u64>,
    pub quantization: Quantization,
    /// What the estimate leaves out.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
    /// Number of elements of its norms.
    norms: u64,
}

/// Maximum number of layers: ten times as many as the deepest known model.
const MAX_LAYERS: u64 = 2048;

/// Kind of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerKind {
    Full,
    Sliding,
    Recurrent,
    /// Feed-forward only.
    Dense,
    /// Experts only.
    Experts,
}

impl ModelArchitecture {
    /// Reads the model that a file describes.
    pub fn read(config: &Config) -> Result<Self, ConfigError> {
        Self::read_with_precision(config, None)
    }

    /// Reads a model with its weights in this precision instead of the file's.
    pub fn read_with_precision(
        config: &Config,
        precision: Option<Precision>,
    ) -> Result<Self, ConfigError> {
        Self::from_fields(config.fields(), precision).map_err(|error| config.with_line(error))
    }

    fn from_fields(whole: Fields<'_>, precision: Option<Precision>) -> Result<Self, ConfigError> {
        let mut notes = Vec::new();
        // In a multimodal model, the language model.
        let text = whole.object("text_config")?.or(whole.object("llm_config")?);
        let fields = match &text {
            Some(text) => text.clone(),
            None => whole.clone(),
        };
        if text.is_some() || whole.has("vision_config") || whole.has("audio_config") {
            notes.push("encoders of images and sound are not counted".into());
        }
        let named = fields.text("model_type")?;
        let named = named.map(|name| (name, fields.path_of("model_type")));
        let (model_type, field) = match (named, &text) {
            (Some(named), _) => named,
            (None, Some(_)) => (
                whole.text("model_type")?.unwrap_or_default(),
                whole.path_of("model_type"),
            ),
            (None, None) => {
                return Err(fields.field_error("model_type", "the name of an architecture"));
            }
        };
        let family = find_family(model_type, field)?;
        let fields = fields.for_family(family.field_names, family.defaults);
        let max_context = fields.optional_number("max_position_embeddings")?;
        if fields
            .optional_count("num_nextn_predict_layers")?
            .is_some_and(|layers| layers > 0)
        {
            notes.push(
                "layers for multi-token prediction are not counted: engines load them on request"
                    .into(),
            );
        }
        if [fields.text("torch_dtype")?, fields.text("dtype")?].contains(&Some("float32")) {
            notes.push("the file says float32; engines load it in 16 bits".into());
        }
        let quantized = match &text {
            Some(text) if text.has("quantization_config") => text,
            _ => &whole,
        };
        let quantization = Quantization::read(quantized, precision)?;
        notes.extend(quantization.notes());
        Ok(Self {
            model_type: model_type.to_owned(),
            hidden: fields.required_number("hidden_size")?,
            vocab: fields.required_number("vocab_size")?,
            learned_positions: match family.extra_positions {
                Some(more) => fields
                    .required_number("max_position_embeddings")?
                    .saturating_add(more),
                None => 0,
            },
            has_tied_embeddings: fields.flag(
                "tie_word_embeddings",
                whole.flag("tie_word_embeddings", family.ties_embeddings)?,
            )?,
            layers: build_layers(&fields, family)?,
            max_context,
            quantization,
            notes,
        })
    }

    /// Whether all heads can be split equally over so many GPUs.
    pub(crate) fn check_split(&self, tensor_parallel: u64) -> Result<(), WorkloadError> {
        let splits = |gpus: u64, (heads, kv_heads): (u64, u64)| {
            let is_kv_split = kv_heads.is_multiple_of(gpus) || gpus.is_multiple_of(kv_heads.max(1));
            (heads.is_multiple_of(gpus), is_kv_split)
        };
        let all = self.head_counts();
        let is_possible = |gpus: u64| {
            all.iter()
                .all(|(_, heads, kv_heads)| splits(gpus, (*heads, *kv_heads)) == (true, true))
        };
        let gpus = tensor_parallel.max(1);
        for (what, heads, kv_heads) in &all {
            let (what, heads) = match splits(gpus, (*heads, *kv_heads)) {
                (true, true) => continue,
                (false, _) => (*what, *heads),
                (true, false) => ("KV heads", *kv_heads),
            };
            let possible = (1..=MAX_GPUS_PER_POD)
                .filter(|gpus| is_possible(*gpus))
                .collect();
            return Err(WorkloadError::HeadsNotSplit {
                what,
                heads,
                tensor_parallel,
                possible,
            });
        }
        Ok(())
    }

    /// Distinct head counts of its layers: what they are, how many, and how many KV heads.
    fn head_counts(&self) -> Vec<(&'static str, u64, u64)> {
        let mut all = Vec::new();
        for layer in &self.layers {
            let heads = match layer.mixer {
                Mixer::None => continue,
                Mixer::Attention(one) => ("attention heads", one.heads, one.kv_heads),
                Mixer::Latent(one) => ("attention heads", one.heads, 1),
                Mixer::Recurrent(one) => ("heads of its recurrent layers", one.heads, 1),
            };
            if !all.contains(&heads) {
                all.push(heads);
            }
        }
        all
    }

    /// Number of all its parameters.
    pub fn parameters(&self) -> u128 {
        self.count_parameters(|experts| experts.weights(self.hidden, 1, (1, 1)))
    }

    /// Number of parameters that one token passes through.
    pub fn active_parameters(&self) -> u128 {
        self.count_parameters(|experts| {
            experts.weights(self.hidden, 1, (1, 1)) / u128::from(experts.count)
                * u128::from(experts.used_per_token)
        })
    }

    fn count_parameters(&self, of_experts: impl Fn(&super::feed_forward::Experts) -> u128) -> u128 {
        let of_layer = |layer: &Layer| {
            let experts = layer.feed_forward.experts().map_or(0, &of_experts);
            self.layer_parameters(layer, 1)
                .total()
                .saturating_add(experts)
        };
        let layers = self
            .layers
            .iter()
            .map(of_layer)
            .fold(0, u128::saturating_add);
        self.embeddings(1).saturating_add(layers)
    }

    /// Parameters of a layer on each GPU, without its experts' matrices.
    pub(crate) fn layer_parameters(&self, layer: &Layer, gpus: u64) -> Parameters {
        let norms = Parameters {
            quantizable: 0,
            unquantized: layer.norms.into(),
        };
        let mixer = layer.mixer.parameters(self.hidden, gpus);
        mixer
            .plus(layer.feed_forward.parameters(self.hidden, gpus))
            .plus(norms)
    }

    /// Embeddings, output projection and last norm on each GPU: no quantization touches them.
    pub fn embeddings(&self, gpus: u64) -> u128 {
        let matrices = if self.has_tied_embeddings { 1 } else { 2 };
        let tokens =
            saturating_product(&[matrices, self.vocab, self.hidden]).div_ceil(gpus.max(1).into());
        tokens
            .saturating_add(saturating_product(&[self.learned_positions, self.hidden]))
            .saturating_add(self.hidden.into())
    }
}

fn build_layers(fields: &Fields<'_>, family: &Family) -> Result<Vec<Layer>, ConfigError> {
    let kinds = layer_kinds(fields, family)?;
    let rule = FeedForwardRule::read(fields, family)?;
    let norms = family
        .norms
        .saturating_mul(fields.required_number("hidden_size")?);
    let window = fields.optional_number("sliding_window")?;
    // Every layer of a kind is alike.
    let has = |kind: LayerKind| kinds.contains(&kind);
    let attention = |window| match family.attention {
        AttentionKind::Latent => LatentAttention::read(fields).map(Mixer::Latent),
        _ => Attention::read(fields, family, window).map(Mixer::Attention),
    };
    let full = if has(LayerKind::Full) {
        attention(None)?
    } else {
        Mixer::None
    };
    let sliding = match (has(LayerKind::Sliding), window) {
        (false, _) => Mixer::None,
        (true, Some(_)) => attention(window)?,
        (true, None) => return Err(fields.field_error("sliding_window", "the tokens of a window")),
    };
    let recurrent = match has(LayerKind::Recurrent) {
        true => Mixer::Recurrent(Recurrent::read(fields, family)?),
        false => Mixer::None,
    };
    // In a family with a letter for each layer, a layer has one part: a mixer or a feed-forward network.
    let is_single_part = family.layers == LayerOrder::Letters;
    let layer = |(index, kind): (usize, &LayerKind)| {
        let mixer = match kind {
            LayerKind::Full => full,
            LayerKind::Sliding => sliding,
            LayerKind::Recurrent => recurrent,
            LayerKind::Dense | LayerKind::Experts => Mixer::None,
        };
        let feed_forward = match kind {
            LayerKind::Dense => rule.dense.map_or(FeedForward::None, FeedForward::Dense),
            LayerKind::Experts => rule.experts.map_or(FeedForward::None, FeedForward::Experts),
            _ if is_single_part => FeedForward::None,
            _ => rule.for_layer(index as u64),
        };
        Layer {
            mixer,
            feed_forward,
            norms,
        }
    };
    Ok(kinds.iter().enumerate().map(layer).collect())
}

/// Kind of each layer: as the file lists it, or by the family's order.
fn layer_kinds(fields: &Fields<'_>, family: &Family) -> Result<Vec<LayerKind>, ConfigError> {
    for name in ["layer_types", "layers_block_type"] {
        if let Some(types) = fields.texts(name)? {
            let count = fields.optional_number("num_hidden_layers")?;
            if types.is_empty()
                || types.len() as u64 > MAX_LAYERS
                || count.is_some_and(|n| n != types.len() as u64)
            {
                let of = count.map_or("1 or more".into(), |count| count.to_string());
                return Err(fields.field_error(name, format!("a type for each of {of} layers")));
            }
            return types
                .iter()
                .map(|text| listed_kind(fields, name, text))
                .collect();
        }
    }
    if family.layers == LayerOrder::Letters {
        return kinds_from_pattern(fields);
    }
    let count = fields.required_number("num_hidden_layers")?;
    if count > MAX_LAYERS {
        return Err(fields.field_error(
            "num_hidden_layers",
            format!("a whole number from 1 to {MAX_LAYERS}"),
        ));
    }
    let kind = kind_by_index(fields, family)?;
    Ok((0..count).map(kind).collect())
}

fn listed_kind(
    fields: &Fields<'_>,
    name: &'static str,
    text: &str,
) -> Result<LayerKind, ConfigError> {
    match text {
        "full_attention" | "attention" => Ok(LayerKind::Full),
        "sliding_attention" => Ok(LayerKind::Sliding),
        "linear_attention" | "mamba" => Ok(LayerKind::Recurrent),
        "mlp" => Ok(LayerKind::Dense),
        "moe" => Ok(LayerKind::Experts),
        _ => Err(fields.field_error(
            name,
            "types among full_attention, sliding_attention, linear_attention, mamba, mlp and moe",
        )),
    }
}

fn kinds_from_pattern(fields: &Fields<'_>) -> Result<Vec<LayerKind>, ConfigError> {
    let expected =
        "a letter for each layer: M for Mamba, * for attention, - for feed-forward, E for experts";
    let invalid = || fields.field_error("hybrid_override_pattern", expected);
    let pattern = fields
        .text("hybrid_override_pattern")?
        .ok_or_else(invalid)?;
    if pattern.is_empty() || pattern.len() as u64 > MAX_LAYERS {
        return Err(invalid());
    }
    let kind = |letter: char| match letter {
        'M' => Ok(LayerKind::Recurrent),
        '*' => Ok(LayerKind::Full),
        '-' => Ok(LayerKind::Dense),
        'E' => Ok(LayerKind::Experts),
        _ => Err(invalid()),
    };
    pattern.chars().map(kind).collect()
}

/// The rule that gives a layer's kind by its index.
fn kind_by_index(
    fields: &Fields<'_>,
    family: &Family,
) -> Result<Box<dyn Fn(u64) -> LayerKind>, ConfigError> {
    let has_window = fields.optional_number("sliding_window")?.is_some();
    let either = |is_first: bool, first, second| if is_first { first } else { second };
    Ok(match family.layers {
        LayerOrder::AllFull | LayerOrder::Letters => Box::new(|_| LayerKind::Full),
        LayerOrder::AllSliding => {
            Box::new(move |_| either(has_window, LayerKind::Sliding, LayerKind::Full))
        }
        LayerOrder::SlidingLast => {
            let is_used = has_window && fields.flag("use_sliding_window", false)?;
            let first = fields
                .optional_count("max_window_layers")?
                .unwrap_or_default();
            Box::new(move |index| {
                either(
                    is_used && index >= first,
                    LayerKind::Sliding,
                    LayerKind::Full,
                )
            })
        }
        LayerOrder::FullEvery(default_interval) => {
            let every = fields
                .optional_number("sliding_window_pattern")?
                .unwrap_or(default_interval);
            let is_full = move |index: u64| !has_window || (index + 1).is_multiple_of(every);
            Box::new(move |index| either(is_full(index), LayerKind::Full, LayerKind::Sliding))
        }
        LayerOrder::AttentionEvery(default_interval) => {
            let every = fields
                .optional_number("full_attention_interval")?
                .unwrap_or(default_interval);
            Box::new(move |index| {
                either(
                    (index + 1).is_multiple_of(every),
                    LayerKind::Full,
                    LayerKind::Recurrent,
                )
            })
        }
        LayerOrder::AttentionPeriod => {
            let period = fields.required_number("attn_layer_period")?;
            let offset = fields.optional_count("attn_layer_offset")?.unwrap_or(0);
            Box::new(move |index| {
                either(
                    index % period == offset,
                    LayerKind::Full,
                    LayerKind::Recurrent,
                )
            })
        }
        LayerOrder::AttentionIndices => {
            let indices = fields.indices("attn_layer_indices")?;
            Box::new(move |index| {
                either(
                    indices.contains(&index),
                    LayerKind::Full,
                    LayerKind::Recurrent,
                )
            })
        }
    })
}
