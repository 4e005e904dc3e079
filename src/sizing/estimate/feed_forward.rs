//! The part of a layer that works on each token by itself: dense, or experts of which each token uses a few.

use super::config::{ConfigError, Fields};
use super::family::{Family, FeedForwardKind, RecurrentKind};
use super::mixer::{Parameters, per_gpu_share};
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
    bias: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub count: u64,
    /// Number of experts that each token uses.
    pub used_per_token: u64,
    pub intermediate: u64,
    /// Intermediate size of the shared experts together, which every token uses; 0 if there are none.
    shared_intermediate: u64,
    /// Whether a gate weights the shared experts.
    has_shared_gate: bool,
    /// Size of the space that experts work in, if it is smaller than the hidden size.
    latent_size: Option<u64>,
    matrices: u64,
    bias: bool,
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
}

impl FeedForwardRule {
    pub fn read(fields: &Fields<'_>, family: &Family) -> Result<Self, ConfigError> {
        let (matrices, bias) = match family.feed_forward {
            FeedForwardKind::Gated => (3, false),
            FeedForwardKind::GatedBiasedExperts => (3, true),
            FeedForwardKind::Plain => (2, false),
            FeedForwardKind::PlainBiased => (2, true),
        };
        let experts = Experts::read(fields, family, matrices, bias)?;
        let inner = match (fields.optional_number("intermediate_size")?, &experts) {
            (Some(inner), _) => Some(inner),
            // gpt_bigcode's default.
            (None, None) if family.feed_forward == FeedForwardKind::PlainBiased => {
                Some(fields.required_number("hidden_size")?.saturating_mul(4))
            }
            (None, None) => Some(fields.required_number("intermediate_size")?),
            (None, Some(_)) => None,
        };
        let bias = fields.flag("mlp_bias", bias && experts.is_none())?;
        let (period, offset) = match fields.optional_number("expert_layer_period")? {
            Some(period) => (
                period,
                fields.optional_count("expert_layer_offset")?.unwrap_or(0),
            ),
            // Counted from 1: of 2, the second, the fourth and so on.
            None => match fields
                .first_count(&["decoder_sparse_step", "moe_layer_freq"])?
                .unwrap_or(1)
            {
                0 => (1, 0),
                step => (step, step - 1),
            },
        };
        Ok(Self {
            dense: inner.map(|intermediate| Dense {
                intermediate,
                matrices,
                bias,
            }),
            experts,
            first_expert_layer: fields.optional_count("first_k_dense_replace")?.unwrap_or(0),
            period,
            offset,
            dense_layers: fields.indices("mlp_only_layers")?,
        })
    }

    /// Feed-forward network of a layer, by index from 0. A dense layer needs `intermediate_size`.
    pub fn for_layer(&self, layer: u64) -> FeedForward {
        let has_experts = layer >= self.first_expert_layer
            && layer % self.period == self.offset % self.period
            && !self.dense_layers.contains(&layer);
        match (self.experts, self.dense) {
            (Some(experts), _) if has_experts => FeedForward::Experts(experts),
            (Some(experts), None) => FeedForward::Experts(experts),
            (_, dense) => dense.map_or(FeedForward::None, FeedForward::Dense),
        }
    }
}

impl Experts {
    /// Reads the experts; `None` for a file without.
    fn read(
        fields: &Fields<'_>,
        family: &Family,
        matrices: u64,
        bias: bool,
    ) -> Result<Option<Self>, ConfigError> {
        const COUNTS: [&str; 3] = ["num_local_experts", "num_experts", "n_routed_experts"];
        let count = fields
            .first_count(&COUNTS)?
            .filter(|count| *count > 0 && family.may_have_experts);
        let Some(count) = count else { return Ok(None) };
        let intermediate = match fields.optional_number("moe_intermediate_size")? {
            Some(inner) => inner,
            None => fields.required_number("intermediate_size")?,
        };
        let used = fields.first_number_required(&["num_experts_per_tok", "moe_topk"])?;
        if used > count {
            let expected = format!("at most the number of experts, which is {count}");
            return Err(fields.field_error("num_experts_per_tok", expected));
        }
        let shared_gate = fields.optional_number("shared_expert_intermediate_size")?;
        let each_shared = fields
            .optional_number("moe_shared_expert_intermediate_size")?
            .unwrap_or(intermediate);
        let shared = match (
            shared_gate,
            fields.optional_number("shared_intermediate_size")?,
        ) {
            (Some(shared), _) | (None, Some(shared)) => shared,
            (None, None) => fields
                .optional_count("n_shared_experts")?
                .unwrap_or(0)
                .saturating_mul(each_shared),
        };
        let latent = match family.recurrent {
            RecurrentKind::Mamba2 => fields.optional_number("moe_latent_size")?,
            _ => None,
        };
        let shared_gate = shared_gate.is_some();
        Ok(Some(Self {
            count,
            used_per_token: used,
            intermediate,
            shared_intermediate: shared,
            has_shared_gate: shared_gate,
            latent_size: latent,
            matrices,
            bias,
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

    /// Parameters on each GPU beside the experts' matrices: router, shared experts, projections into the latent space.
    fn other_parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let biases = saturating_product(&[
            self.count,
            hidden.saturating_add((self.matrices - 1) * self.intermediate),
        ]);
        let biases = if self.bias {
            biases.saturating_add(self.count.into())
        } else {
            0
        };
        let gate = if self.has_shared_gate { hidden } else { 0 };
        let latent = saturating_product(&[2, hidden, self.latent_size.unwrap_or(0)]);
        Parameters {
            quantizable: per_gpu_share(
                saturating_product(&[self.matrices, hidden, self.shared_intermediate]),
                gpus,
            )
            .saturating_add(latent),
            unquantized: saturating_product(&[hidden, self.count])
                .saturating_add(per_gpu_share(biases, gpus))
                .saturating_add(gate.into()),
        }
    }
}

impl FeedForward {
    /// Parameters on each GPU, without the experts' matrices.
    pub fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        match self {
            Self::None => Parameters::default(),
            Self::Dense(one) => {
                let biases = u128::from((one.matrices - 1).saturating_mul(one.intermediate));
                Parameters {
                    quantizable: per_gpu_share(
                        saturating_product(&[one.matrices, hidden, one.intermediate]),
                        gpus,
                    ),
                    unquantized: if one.bias {
                        per_gpu_share(biases, gpus).saturating_add(hidden.into())
                    } else {
                        0
                    },
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
