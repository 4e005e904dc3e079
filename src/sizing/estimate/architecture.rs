//! A model as its layers: made of a file's fields and its family's row, checked once.

use super::checkpoint::Checkpoint;
use super::config::{Config, ConfigError, Fields};
use super::family::{CAUTIONS, ENCODERS, FLOAT32, Family, WeightNote, WindowOrder};
use super::feed_forward::{FeedForward, FeedForwardRule};
use super::mixer::{Attention, LatentAttention, Mixer, Parameters, Recurrent};
use super::quantization::{Precision, Quantization};
use super::{
    MAX_GPUS_PER_POD, WorkloadError, saturating_product, weights, with_thousands_separators,
};
use stowage_policy_file::diagnostic::quoted;

/// Architecture of a model, as far as its VRAM depends on it.
#[derive(Debug, Clone)]
pub struct ModelArchitecture {
    pub model_type: String,
    pub hidden: u64,
    pub vocab: u64,
    /// The input embedding is also the output projection, and in memory once.
    pub has_tied_embeddings: bool,
    pub layers: Vec<Layer>,
    /// Maximum number of tokens in its context, if the file gives it.
    pub max_context: Option<u64>,
    pub quantization: Quantization,
    /// Its weights, if its files are there.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// Those of its notes that depend on where its weights are from.
    weight_notes: Vec<WeightNote>,
    /// What the estimate leaves out.
    pub notes: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
    /// Precisions of its matrices, in their order.
    pub precisions: Vec<Precision>,
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
        let (mut notes, mut weight_notes) = (Vec::new(), Vec::new());
        // In a multimodal model, the language model.
        let mut fields = whole.clone();
        while let Some(inner) = language_model(&fields)? {
            fields = inner;
        }
        if !fields.path_of("").is_empty() || whole.has("vision_config") || whole.has("audio_config")
        {
            weight_notes.push(ENCODERS);
        }
        let named = fields.text("model_type")?.or(whole.text("model_type")?);
        let model_type = named.unwrap_or("unknown").to_owned();
        let (family, is_known) = Family::find(&model_type);
        if !is_known {
            notes.push(format!(
                "the architecture {} is not known here: it is counted as Llama with the sizes in the file",
                quoted(&model_type)
            ));
        }
        // Mamba2's heads are of its states.
        let has_attention =
            fields.has("num_attention_heads") && fields.name("num_attention_heads") != "num_heads";
        if !has_attention && fields.has("state_size") {
            return Err(ConfigError::Unsupported {
                field: fields.path_of("model_type"),
                model_type,
                reason: "it has no attention, and its state is not counted",
            });
        }
        if whole.flag("is_encoder_decoder", false)? {
            notes.push(
                "only the decoder is counted, without what it keeps of the encoder's output".into(),
            );
        }
        let cautions = CAUTIONS.iter().filter(|(field, _)| {
            let is_windowed = *field == "attention_chunk_size" && fields.has("sliding_window");
            fields.has(field)
                && !is_windowed
                && !matches!(fields.optional_count(field), Ok(Some(0)))
        });
        weight_notes.extend(cautions.map(|(_, caution)| *caution));
        let fields = fields.with_defaults(family.defaults);
        let max_context = fields.optional_number("max_position_embeddings")?;
        if [fields.text("torch_dtype")?, fields.text("dtype")?].contains(&Some("float32")) {
            weight_notes.push(FLOAT32);
        }
        let quantized = match fields.has("quantization_config") {
            true => &fields,
            false => &whole,
        };
        let quantization = Quantization::read(quantized, precision)?;
        notes.extend(weight_notes.iter().map(|note| note.counted.to_owned()));
        notes.extend(quantization.notes());
        let layers = build_layers(&fields, family, &mut notes)?;
        notes.extend(list_notes(&fields, layers.len()));
        let hidden = fields.required_number("hidden_size")?;
        let mut model = Self {
            model_type,
            hidden,
            vocab: fields.required_number("vocab_size")?,
            has_tied_embeddings: fields.flag(
                "tie_word_embeddings",
                whole.flag("tie_word_embeddings", family.ties_embeddings)?,
            )?,
            layers,
            max_context,
            quantization,
            checkpoint: None,
            weight_notes,
            notes,
        };
        model.read_precisions();
        Ok(model)
    }

    /// Gives each matrix its precision.
    fn read_precisions(&mut self) {
        let mut layers = std::mem::take(&mut self.layers);
        let mut is_kept = false;
        for (index, layer) in layers.iter_mut().enumerate() {
            let matrices = self.layer_parameters(layer, 1, (1, 1)).matrices;
            let precisions = matrices
                .iter()
                .map(|matrix| self.quantization.precision_of(index, matrix));
            layer.precisions = precisions.collect();
            is_kept |= layer
                .precisions
                .iter()
                .any(|precision| *precision != self.quantization.precision);
        }
        self.layers = layers;
        if is_kept {
            let name = self.quantization.precision.name;
            let by = match self.quantization.unread_names().next() {
                Some(_) => "",
                None => ": the file names them",
            };
            self.notes
                .push(format!("some modules are not in {name}{by}"));
        }
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

    /// Takes the weights from the checkpoint instead of counting them, unless it has none or another precision than its own was
    /// requested.
    pub fn with_checkpoint(mut self, checkpoint: Checkpoint) -> Self {
        if self.quantization.is_overridden() {
            return self;
        }
        let (found, expected, unit) = match checkpoint.parameters() {
            Some(stored) => (stored, self.counted_parameters(), "parameters"),
            None => {
                let counted = weights::counted_bytes(&self, 1, (1, 1));
                (checkpoint.bytes, counted, "bytes")
            }
        };
        if found < expected / 2 {
            self.notes.push(format!(
                "the checkpoint has {} {unit}, the configuration says {}: is a file missing?",
                with_thousands_separators(found),
                with_thousands_separators(expected)
            ));
        }
        if checkpoint.bytes == 0 {
            return self;
        }
        for note in &self.weight_notes {
            let instead = match checkpoint.is_as_stored {
                true => note.stored,
                false => note.loaded,
            };
            self.notes
                .retain(|one| one != note.counted && one != instead);
            if !instead.is_empty() {
                self.notes.push(instead.to_owned());
            }
        }
        self.checkpoint = Some(checkpoint);
        self
    }

    /// Whether an engine loads the tensor of this name: neither layers for multi-token prediction, nor a tied output projection.
    pub fn loads(&self, tensor: &str) -> bool {
        let mut parts = tensor.split('.');
        let is_extra = parts.clone().any(|part| part == "mtp")
            || self.has_tied_embeddings && parts.clone().any(|part| part == "lm_head");
        let is_language = !["vision", "visual", "audio"]
            .iter()
            .any(|other| tensor.contains(other));
        let layer = parts
            .find(|part| *part == "layers")
            .and_then(|_| parts.next());
        let layer = layer.and_then(|layer| layer.parse::<usize>().ok());
        let is_beyond = is_language && layer.is_some_and(|layer| layer >= self.layers.len());
        !is_extra && !is_beyond
    }

    /// Number of all its parameters.
    pub fn parameters(&self) -> u128 {
        let stored = self.checkpoint.as_ref().and_then(Checkpoint::parameters);
        stored.unwrap_or_else(|| self.counted_parameters())
    }

    fn counted_parameters(&self) -> u128 {
        let layers = self.layers.iter();
        let layers = layers.map(|layer| self.layer_parameters(layer, 1, (1, 1)).total());
        layers.fold(self.embeddings(1), u128::saturating_add)
    }

    /// Number of parameters that one token passes through.
    pub fn active_parameters(&self) -> u128 {
        let unused = self.layers.iter().filter_map(|layer| {
            let experts = layer.feed_forward.experts()?;
            let each = experts.weights(self.hidden, 1, (1, 1)) / u128::from(experts.count);
            Some(each.saturating_mul((experts.count - experts.used_per_token).into()))
        });
        self.parameters()
            .saturating_sub(unused.fold(0, u128::saturating_add))
    }

    /// Parameters of a layer on each GPU; `multiples` are what its experts' sizes are rounded up to.
    pub(crate) fn layer_parameters(
        &self,
        layer: &Layer,
        gpus: u64,
        multiples: (u64, u64),
    ) -> Parameters {
        let mixer = layer.mixer.parameters(self.hidden, gpus);
        let mut parameters = mixer.plus(layer.feed_forward.parameters(self.hidden, gpus));
        // Two norms, as most have.
        parameters.unquantized = parameters
            .unquantized
            .saturating_add(saturating_product(&[2, self.hidden]));
        if let Some(experts) = layer.feed_forward.experts() {
            let matrices = experts.matrices(self.hidden, gpus, multiples);
            parameters.matrices.extend(matrices);
        }
        parameters
    }

    /// Embeddings, output projection and last norm on each GPU: no quantization touches them.
    pub fn embeddings(&self, gpus: u64) -> u128 {
        let matrices = if self.has_tied_embeddings { 1 } else { 2 };
        saturating_product(&[matrices, self.vocab, self.hidden])
            .div_ceil(gpus.max(1).into())
            .saturating_add(self.hidden.into())
    }
}

/// The fields of the language model in a larger one.
fn language_model<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, ConfigError> {
    const NAMES: [&str; 5] = [
        "thinker_config",
        "text_config",
        "llm_config",
        "language_config",
        "decoder",
    ];
    for name in NAMES {
        if let Some(inner) = fields.object(name)? {
            return Ok(Some(inner));
        }
    }
    Ok(None)
}

/// Sizes that a file may list by layer, and what else it may.
const SIZES_BY_LAYER: [&str; 8] = [
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
];
const LISTS_BY_LAYER: [&str; 3] = ["moe_layer_freq", "mlp_layer_types", "hybrid_layer_pattern"];

/// Notes about lists that are not followed, or are too short or too long.
fn list_notes(fields: &Fields<'_>, layers: usize) -> Vec<String> {
    let list = |name: &&'static str| Some((*name, fields.list(name).ok()??));
    let sizes: Vec<_> = SIZES_BY_LAYER.iter().filter_map(list).collect();
    let differs = sizes
        .iter()
        .any(|(_, each)| each.iter().any(|size| Some(size) != each.first()));
    let note = differs.then(|| "sizes that differ by layer are counted as the largest".to_owned());
    let lists = LISTS_BY_LAYER.iter().filter_map(list).chain(sizes);
    let uneven = lists.filter(|(_, each)| each.len() != layers);
    note.into_iter()
        .chain(uneven.map(|(name, each)| {
            let name = fields.path_of(fields.name(name));
            let count = each.len();
            let values = if count == 1 { "value" } else { "values" };
            format!("`{name}` has {count} {values} for {layers} layers")
        }))
        .collect()
}

fn build_layers(
    fields: &Fields<'_>,
    family: &Family,
    notes: &mut Vec<String>,
) -> Result<Vec<Layer>, ConfigError> {
    let kinds = layer_kinds(fields, family, notes)?;
    let rule = FeedForwardRule::read(fields, family)?;
    let window = fields.optional_number("sliding_window")?;
    // Every layer of a kind is alike.
    let has = |kind: LayerKind| kinds.contains(&kind);
    let attention = |window| match fields.has("kv_lora_rank") {
        true => LatentAttention::read(fields).map(Mixer::Latent),
        false => Attention::read(fields, family, window).map(Mixer::Attention),
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
    // Where a layer may be feed-forward only, each has one part: a mixer or a feed-forward network.
    let is_single_part = has(LayerKind::Dense) || has(LayerKind::Experts);
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
            precisions: Vec::new(),
        }
    };
    Ok(kinds.iter().enumerate().map(layer).collect())
}

/// Kind of each layer: as the file lists it, or by the rule that its fields or its family give.
fn layer_kinds(
    fields: &Fields<'_>,
    family: &Family,
    notes: &mut Vec<String>,
) -> Result<Vec<LayerKind>, ConfigError> {
    if let Some(types) = fields.texts("layer_types")? {
        let count = fields.optional_number("num_hidden_layers")?;
        if types.is_empty()
            || types.len() as u64 > MAX_LAYERS
            || count.is_some_and(|n| n != types.len() as u64)
        {
            let of = count.map_or("1 or more".into(), |count| count.to_string());
            let expected = format!("a type for each of {of} layers");
            return Err(fields.field_error("layer_types", expected));
        }
        let has_window = fields.optional_number("sliding_window")?.is_some();
        let has_recurrent = Recurrent::is_described(fields);
        let mut kind = |text: &&str| match *text {
            "full_attention" | "attention" => LayerKind::Full,
            "sliding_attention" if has_window => LayerKind::Sliding,
            "linear_attention" | "mamba" if has_recurrent => LayerKind::Recurrent,
            "mlp" => LayerKind::Dense,
            "moe" => LayerKind::Experts,
            other => {
                let other = quoted(other);
                let note = format!("layers of the type {other} are counted as attention to all");
                if !notes.contains(&note) && notes.len() < MAX_NOTES {
                    notes.push(note);
                }
                LayerKind::Full
            }
        };
        return Ok(types.iter().map(&mut kind).collect());
    }
    if fields.has("hybrid_override_pattern") {
        return kinds_from_pattern(fields);
    }
    let count = fields.required_number("num_hidden_layers")?;
    if count > MAX_LAYERS {
        return Err(fields.field_error(
            "num_hidden_layers",
            format!("a whole number from 1 to {MAX_LAYERS}"),
        ));
    }
    let kind = kind_by_index(fields, family, notes)?;
    Ok((0..count).map(kind).collect())
}

/// Maximum number of notes about types of layers.
const MAX_NOTES: usize = 16;

fn kinds_from_pattern(fields: &Fields<'_>) -> Result<Vec<LayerKind>, ConfigError> {
    let expected =
        "a letter for each layer: M for Mamba, * for attention, - for feed-forward, E for experts";
    let invalid = || fields.field_error("hybrid_override_pattern", expected);
    let pattern = fields
        .text("hybrid_override_pattern")?
        .ok_or_else(invalid)?;
    let layers = pattern.len() as u64;
    let count = fields.optional_number("num_hidden_layers")?;
    if layers == 0 || layers > MAX_LAYERS || count.is_some_and(|count| count != layers) {
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
    notes: &mut Vec<String>,
) -> Result<Box<dyn Fn(u64) -> LayerKind>, ConfigError> {
    let full_if = |is_full: bool, other| if is_full { LayerKind::Full } else { other };
    if let Some(period) = fields.optional_number("attn_layer_period")? {
        let offset = fields.optional_count("attn_layer_offset")?.unwrap_or(0);
        return Ok(Box::new(move |index| {
            full_if(index % period == offset, LayerKind::Recurrent)
        }));
    }
    if fields.has("attn_layer_indices") {
        let indices = fields.indices("attn_layer_indices")?;
        return Ok(Box::new(move |index| {
            full_if(indices.contains(&index), LayerKind::Recurrent)
        }));
    }
    if fields.has("linear_num_value_heads") {
        let every = fields
            .optional_number("full_attention_interval")?
            .unwrap_or(1);
        return Ok(Box::new(move |index| {
            full_if((index + 1).is_multiple_of(every), LayerKind::Recurrent)
        }));
    }
    let has_window = fields.optional_number("sliding_window")?.is_some()
        && fields.flag("use_sliding_window", family.windows != WindowOrder::Last)?;
    if !has_window {
        return Ok(Box::new(|_| LayerKind::Full));
    }
    if fields.has("hybrid_layer_pattern") {
        let windows = fields.indices("hybrid_layer_pattern")?;
        return Ok(Box::new(move |index| {
            full_if(windows.get(index as usize) != Some(&1), LayerKind::Sliding)
        }));
    }
    let all_but = |every: u64| -> Box<dyn Fn(u64) -> LayerKind> {
        Box::new(move |index| full_if((index + 1).is_multiple_of(every), LayerKind::Sliding))
    };
    Ok(
        match (
            fields.optional_number("sliding_window_pattern"),
            family.windows,
        ) {
            (Ok(Some(every)), _) | (_, WindowOrder::AllBut(every)) => all_but(every),
            (_, WindowOrder::All) => Box::new(|_| LayerKind::Sliding),
            (_, WindowOrder::Last) => {
                let first = fields
                    .optional_count("max_window_layers")?
                    .unwrap_or_default();
                Box::new(move |index| full_if(index < first, LayerKind::Sliding))
            }
            (_, WindowOrder::None) => {
                notes.push(
                    "its sliding window is not counted: the KV cache is an upper bound".into(),
                );
                Box::new(|_| LayerKind::Full)
            }
        },
    )
}
