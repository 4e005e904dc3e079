//! The part of a layer that works on each token by itself: dense, or experts of which each token uses a few.

use super::config::{ConfigError, Fields};
use super::family::Family;
use super::mixer::{Matrix, Parameters, per_gpu_share};
use super::saturating_product;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    None,
    Dense(Dense),
    Experts(Experts),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    pub intermediate: u64,
    matrices: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub count: u64,
    /// Number of experts that each token uses.
    pub used_per_token: u64,
    pub intermediate: u64,
    /// Intermediate size of the shared experts together, which every token uses; 0 if there are none.
    shared_intermediate: u64,
    /// Size of the space that experts work in, if it is smaller than the hidden size.
    latent_size: Option<u64>,
    matrices: u64,
}

/// Rule for which layers have experts, and the shapes of both kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FeedForwardRule {
    pub dense: Option<Dense>,
    pub experts: Option<Experts>,
    /// Layers before this index are dense.
    first_expert_layer: u64,
    /// One layer in this many has experts; `offset` is the index of such a layer.
    period: u64,
    offset: u64,
    dense_layers: Vec<u64>,
    /// Whether each layer has experts, where the file lists it.
    listed: Vec<bool>,
}

impl FeedForwardRule {
    pub fn read(fields: &Fields<'_>, family: &Family) -> Result<Self, ConfigError> {
        // Where the inner size has the name of GPT-2's or OPT's, there is no gate either.
        let is_plain = ["n_inner", "ffn_dim", "n_embd"]
            .iter()
            .any(|name| fields.has(name));
        let matrices = if is_plain { 2 } else { family.matrices };
        let experts = Experts::read(fields, matrices)?;
        let inner = match fields.optional_number("dense_intermediate_size")? {
            Some(inner) => Some(inner),
            None => fields.optional_number("intermediate_size")?,
        };
        let inner = match inner {
            None if is_plain => Some(fields.required_number("hidden_size")?.saturating_mul(4)),
            None if experts.is_none() => Some(fields.required_number("intermediate_size")?),
            inner => inner,
        };
        let mut listed = match fields.texts("mlp_layer_types")? {
            Some(types) => types.iter().map(|kind| *kind != "dense").collect(),
            None => Vec::new(),
        };
        // Counted from 1: of 2, the second, the fourth and so on.
        let step = match fields.list("moe_layer_freq") {
            Ok(Some(_)) => {
                let layers = fields.indices("moe_layer_freq")?;
                listed = layers.iter().map(|layer| *layer > 0).collect();
                1
            }
            _ => fields.optional_number("moe_layer_freq")?.unwrap_or(1),
        };
        let (period, offset) = match fields.optional_number("expert_layer_period")? {
            Some(period) => (
                period,
                fields.optional_count("expert_layer_offset")?.unwrap_or(0),
            ),
            None => (step, step - 1),
        };
        Ok(Self {
            dense: inner.map(|intermediate| Dense {
                intermediate,
                matrices,
            }),
            experts,
            first_expert_layer: fields.optional_count("first_k_dense_replace")?.unwrap_or(0),
            period,
            offset,
            dense_layers: fields.indices("mlp_only_layers")?,
            listed,
        })
    }

    /// Feed-forward network of a layer, by index from 0. A dense layer needs `intermediate_size`.
    pub fn for_layer(&self, layer: u64) -> FeedForward {
        let is_among = || {
            layer >= self.first_expert_layer
                && layer % self.period == self.offset % self.period
                && !self.dense_layers.contains(&layer)
        };
        let listed = usize::try_from(layer)
            .ok()
            .and_then(|at| self.listed.get(at));
        let has_experts = listed.copied().unwrap_or_else(is_among);
        match (self.experts, self.dense) {
            (Some(experts), _) if has_experts => FeedForward::Experts(experts),
            (Some(experts), None) => FeedForward::Experts(experts),
            (_, dense) => dense.map_or(FeedForward::None, FeedForward::Dense),
        }
    }
}

impl Experts {
    /// Reads the experts; `None` for a file without.
    fn read(fields: &Fields<'_>, matrices: u64) -> Result<Option<Self>, ConfigError> {
        let is_beside_dense = fields.flag("enable_moe_block", true)?;
        let count = fields.optional_number("num_experts")?;
        let Some(count) = count.filter(|count| *count > 1 && is_beside_dense) else {
            return Ok(None);
        };
        let intermediate = match fields.optional_number("moe_intermediate_size")? {
            Some(inner) => inner,
            None => fields.required_number("intermediate_size")?,
        };
        let used = fields.required_number("num_experts_per_tok")?;
        if used > count {
            let expected = format!("at most the number of experts, which is {count}");
            return Err(fields.field_error("num_experts_per_tok", expected));
        }
        let each_shared = fields
            .optional_number("moe_shared_expert_intermediate_size")?
            .unwrap_or(intermediate);
        let shared = match fields.optional_number("shared_intermediate_size")? {
            Some(shared) => shared,
            // Gemma 4's experts stand beside a dense network.
            None if fields.has("enable_moe_block") => {
                fields.required_number("intermediate_size")?
            }
            None => fields
                .optional_count("n_shared_experts")?
                .unwrap_or(0)
                .saturating_mul(each_shared),
        };
        Ok(Some(Self {
            count,
            used_per_token: used,
            intermediate,
            shared_intermediate: shared,
            latent_size: fields.optional_number("moe_latent_size")?,
            matrices,
        }))
    }

    /// Number of weights in the experts' matrices on each GPU, with dimensions rounded up to multiples that an engine's kernels need.
    pub fn weights(&self, hidden: u64, gpus: u64, multiples: (u64, u64)) -> u128 {
        let hidden = self
            .latent_size
            .unwrap_or(hidden)
            .next_multiple_of(multiples.0);
        let inner = self
            .intermediate
            .div_ceil(gpus.max(1))
            .next_multiple_of(multiples.1);
        saturating_product(&[self.count, self.matrices, hidden, inner])
    }

    /// The experts' matrices on each GPU.
    pub fn matrices(&self, hidden: u64, gpus: u64, multiples: (u64, u64)) -> Vec<Matrix> {
        let all = self.weights(hidden, gpus, multiples);
        matrices_of(EXPERTS, self.matrices, all / u128::from(self.matrices))
    }

    /// Parameters on each GPU beside the experts' matrices: router, shared experts, projections into the latent space.
    fn other_parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let shared = saturating_product(&[hidden, self.shared_intermediate]);
        let latent = saturating_product(&[2, hidden, self.latent_size.unwrap_or(0)]);
        let mut matrices = matrices_of(SHARED, self.matrices, per_gpu_share(shared, gpus));
        matrices.push(Matrix::new(
            DENSE,
            &["fc1_latent_proj", "fc2_latent_proj"],
            latent,
        ));
        Parameters {
            matrices,
            unquantized: saturating_product(&[hidden, self.count]),
        }
    }
}

/// Names of the modules that have a layer's matrices.
const DENSE: &[&str] = &["mlp", "feed_forward", "mixer"];
const SHARED: &[&str] = &[
    "mlp.shared_experts",
    "mlp.shared_expert",
    "mixer.shared_experts",
    "feed_forward.shared_expert",
];
/// One expert stands for all.
const EXPERTS: &[&str] = &[
    "mlp.experts.0",
    "block_sparse_moe.experts.0",
    "mixer.experts.0",
    "feed_forward.experts.0",
];

fn matrices_of(blocks: &'static [&'static str], count: u64, parameters: u128) -> Vec<Matrix> {
    const NAMES: [&[&str]; 3] = [
        &["down_proj", "w2", "fc2"],
        &["up_proj", "gate_up_proj", "w3", "fc1"],
        &["gate_proj", "gate_up_proj", "w1"],
    ];
    let names = NAMES.iter().take(count as usize);
    names
        .map(|names| Matrix::new(blocks, names, parameters))
        .collect()
}

impl FeedForward {
    /// Parameters on each GPU, without the experts' matrices.
    pub fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        match self {
            Self::None => Parameters::default(),
            Self::Dense(one) => {
                let each = saturating_product(&[hidden, one.intermediate]);
                Parameters {
                    matrices: matrices_of(DENSE, one.matrices, per_gpu_share(each, gpus)),
                    unquantized: 0,
                }
            }
            Self::Experts(experts) => experts.other_parameters(hidden, gpus),
        }
    }

    /// Experts of the layer; `None` if it has none.
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Experts(experts) => Some(experts),
            Self::None | Self::Dense(_) => None,
        }
    }

    /// Activation elements of one token on each GPU: the output of the first matrices and the input of the last one; with experts,
    /// for each expert that the token uses, and its output.
    pub fn width(&self, hidden: u64, gpus: u64) -> u128 {
        let inner =
            |matrices: u64, size: u64| per_gpu_share(saturating_product(&[matrices, size]), gpus);
        match self {
            Self::None => 0,
            Self::Dense(one) => inner(one.matrices, one.intermediate),
            Self::Experts(one) => {
                let first = inner(one.matrices - 1, one.intermediate);
                let out = first.max(one.latent_size.unwrap_or(hidden).into());
                let of_each = out.saturating_add(inner(1, one.intermediate));
                of_each
                    .saturating_mul(one.used_per_token.into())
                    .saturating_add(inner(one.matrices, one.shared_intermediate))
            }
        }
    }
}
