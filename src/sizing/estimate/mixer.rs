//! The part of a layer that mixes tokens: attention with heads (MHA, GQA, MQA), latent attention (MLA), or a recurrent state
//! (Mamba, gated delta net). Each says how many weights one GPU holds, what a token and a sequence leave in the cache, and how
//! wide its activations are.
//!
//! The shapes are those of Hugging Face transformers' modules and of vLLM's `mamba_utils.py`.

use super::config::{ConfigError, Fields};
use super::family::{AttentionKind, Family, HeadNorms, RecurrentKind};
use super::saturating_product;

/// Number of weights on one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Weights of matrices, which a quantization shrinks.
    pub quantizable: u128,
    /// Norms, biases, routers and convolutions, which no quantization shrinks.
    pub unquantized: u128,
}

impl Parameters {
    pub fn total(self) -> u128 {
        self.quantizable.saturating_add(self.unquantized)
    }

    pub fn plus(self, other: Self) -> Self {
        Self {
            quantizable: self.quantizable.saturating_add(other.quantizable),
            unquantized: self.unquantized.saturating_add(other.unquantized),
        }
    }
}

/// One GPU's share of a count, rounded up.
pub(super) fn per_gpu_share(count: u128, gpus: u64) -> u128 {
    count.div_ceil(u128::from(gpus.max(1)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// The layer is feed-forward only.
    None,
    Attention(Attention),
    Latent(LatentAttention),
    Recurrent(Recurrent),
}

/// Attention with keys and values for each KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    /// Sliding window in tokens; `None` for full attention.
    pub window: Option<u64>,
    /// The query projection is twice as wide, for a gate.
    has_gate: bool,
    qkv_bias: bool,
    out_bias: bool,
    /// Number of elements of its norms or sinks.
    norms: u64,
}

/// Attention over one compressed vector for each token (DeepSeek's MLA).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentAttention {
    pub heads: u64,
    /// Rank of the compressed query; `None` if it is not compressed.
    query_rank: Option<u64>,
    /// Rank of the compressed keys and values.
    pub kv_rank: u64,
    /// The part of a key that carries the position, shared by all heads.
    pub rope_dim: u64,
    nope_dim: u64,
    value_dim: u64,
}

/// A state of fixed size for each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recurrent {
    /// Heads, or channels, that are split over GPUs.
    pub heads: u64,
    linear: u128,
    plain: u128,
    /// Elements of the convolution's state of a sequence.
    conv_state: u128,
    /// Elements of the recurrent state, and how many bytes each takes.
    state: u128,
    state_bytes: u64,
    /// Elements of its widest activation for a token.
    width: u64,
}

impl Attention {
    pub fn read(
        fields: &Fields<'_>,
        family: &Family,
        window: Option<u64>,
    ) -> Result<Self, ConfigError> {
        let hidden = fields.required_number("hidden_size")?;
        let heads = fields.required_number("num_attention_heads")?;
        let kv_heads = match family.attention {
            AttentionKind::MultiQuery if fields.flag("multi_query", true)? => 1,
            _ => fields
                .optional_number("num_key_value_heads")?
                .unwrap_or(heads),
        };
        if kv_heads > heads || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a number that divides num_attention_heads, which is {heads}");
            return Err(fields.field_error("num_key_value_heads", expected));
        }
        let head_dim = match fields.optional_number("head_dim")? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!(
                    "a number that divides hidden_size, which is {hidden}; or add head_dim"
                );
                return Err(fields.field_error("num_attention_heads", expected));
            }
        };
        let of_head = || 2u64.saturating_mul(head_dim);
        let norms = match family.head_norms {
            HeadNorms::None => 0,
            HeadNorms::PerHead => of_head(),
            HeadNorms::PerHeadIfSet if fields.flag("use_qk_norm", false)? => of_head(),
            HeadNorms::PerHeadIfSet => 0,
            HeadNorms::AcrossHeads => (heads + kv_heads).saturating_mul(head_dim),
            HeadNorms::Sinks => heads,
        };
        let qkv_bias = fields.flag("attention_bias", family.qkv_bias)?;
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            window,
            has_gate: family.attention == AttentionKind::GatedHeads,
            qkv_bias,
            out_bias: qkv_bias && family.out_bias,
            norms,
        })
    }

    /// KV heads on each GPU. Where there are fewer heads than GPUs, each GPU holds a whole one.
    pub(crate) fn kv_heads_on(&self, gpus: u64) -> u64 {
        self.kv_heads.div_ceil(gpus.max(1))
    }

    fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let queries =
            saturating_product(&[self.heads, self.head_dim, if self.has_gate { 2 } else { 1 }]);
        let keys_and_values = saturating_product(&[2, self.kv_heads_on(gpus), self.head_dim]);
        let outputs = saturating_product(&[self.heads, self.head_dim]);
        let wide =
            per_gpu_share(queries.saturating_add(outputs), gpus).saturating_add(keys_and_values);
        let biases = if self.qkv_bias {
            per_gpu_share(queries, gpus).saturating_add(keys_and_values)
        } else {
            0
        };
        let out_bias = if self.out_bias { hidden } else { 0 };
        Parameters {
            quantizable: wide.saturating_mul(hidden.into()),
            unquantized: biases
                .saturating_add(out_bias.into())
                .saturating_add(self.norms.into()),
        }
    }
}

impl LatentAttention {
    pub fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            heads: fields.required_number("num_attention_heads")?,
            query_rank: fields.optional_number("q_lora_rank")?,
            kv_rank: fields.required_number("kv_lora_rank")?,
            rope_dim: fields.required_number("qk_rope_head_dim")?,
            nope_dim: fields.required_number("qk_nope_head_dim")?,
            value_dim: fields.required_number("v_head_dim")?,
        })
    }

    /// Elements that one token leaves in the KV cache, on every GPU alike.
    pub fn cached_elements(&self) -> u64 {
        self.kv_rank.saturating_add(self.rope_dim)
    }

    /// Down-projections are on every GPU; what is after them is split by heads.
    fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let query_dim = self.nope_dim.saturating_add(self.rope_dim);
        let (down, up) = match self.query_rank {
            Some(rank) => (
                saturating_product(&[hidden, rank]),
                saturating_product(&[rank, self.heads, query_dim]),
            ),
            None => (0, saturating_product(&[hidden, self.heads, query_dim])),
        };
        let kv_down = saturating_product(&[hidden, self.cached_elements()]);
        let kv_up = saturating_product(&[
            self.kv_rank,
            self.heads,
            self.nope_dim.saturating_add(self.value_dim),
        ]);
        let out = saturating_product(&[self.heads, self.value_dim, hidden]);
        let split = per_gpu_share(up.saturating_add(kv_up).saturating_add(out), gpus);
        Parameters {
            quantizable: down.saturating_add(kv_down).saturating_add(split),
            unquantized: u128::from(self.query_rank.unwrap_or(0)) + u128::from(self.kv_rank),
        }
    }
}

impl Recurrent {
    pub fn read(fields: &Fields<'_>, family: &Family) -> Result<Self, ConfigError> {
        let hidden = fields.required_number("hidden_size")?;
        let state_bytes = state_bytes(fields, family)?;
        let read = match family.recurrent {
            RecurrentKind::None => {
                Err(fields.field_error("layer_types", "layers with attention only"))
            }
            RecurrentKind::Mamba1 => Self::mamba1(fields, hidden),
            RecurrentKind::Mamba2 => Self::mamba2(fields, hidden),
            RecurrentKind::GatedDeltaNet => Self::gated_delta_net(fields, hidden),
        };
        read.map(|read| Self {
            state_bytes,
            ..read
        })
    }

    fn mamba1(fields: &Fields<'_>, hidden: u64) -> Result<Self, ConfigError> {
        let inner = fields
            .required_number("mamba_expand")?
            .saturating_mul(hidden);
        let state = fields.required_number("mamba_d_state")?;
        let kernel = fields.required_number("mamba_d_conv")?;
        // `auto` is text, and means this.
        let is_auto = fields.text("mamba_dt_rank").is_ok();
        let rank = if is_auto {
            hidden.div_ceil(16)
        } else {
            fields.required_number("mamba_dt_rank")?
        };
        let projected = rank.saturating_add(2 * state);
        Ok(Self {
            heads: inner,
            linear: [
                saturating_product(&[hidden, 2, inner]),
                saturating_product(&[inner, projected]),
                saturating_product(&[rank, inner]),
                saturating_product(&[inner, hidden]),
            ]
            .into_iter()
            .fold(0, u128::saturating_add),
            // Convolution with bias, dt's bias, A, D, and three norms.
            plain: saturating_product(&[inner, kernel.saturating_add(state).saturating_add(3)])
                .saturating_add(projected.into()),
            conv_state: saturating_product(&[inner, kernel - 1]),
            state: saturating_product(&[inner, state]),
            state_bytes: HALF_BYTES,
            width: inner.saturating_mul(2),
        })
    }

    fn mamba2(fields: &Fields<'_>, hidden: u64) -> Result<Self, ConfigError> {
        let heads = fields.first_number_required(&["mamba_n_heads", "mamba_num_heads"])?;
        let head_dim = match fields.text("mamba_d_head") {
            Ok(Some(_)) => (fields
                .required_number("mamba_expand")?
                .saturating_mul(hidden)
                / heads)
                .max(1),
            _ => fields.first_number_required(&["mamba_d_head", "mamba_head_dim"])?,
        };
        let groups = fields.first_number_required(&["mamba_n_groups", "n_groups"])?;
        let state = fields.first_number_required(&["mamba_d_state", "ssm_state_size"])?;
        let kernel = fields.first_number_required(&["mamba_d_conv", "conv_kernel"])?;
        let inner = heads.saturating_mul(head_dim);
        let conv = inner.saturating_add(groups.saturating_mul(state).saturating_mul(2));
        let projected = inner.saturating_add(conv).saturating_add(heads);
        Ok(Self {
            heads,
            linear: saturating_product(&[hidden, projected])
                .saturating_add(saturating_product(&[inner, hidden])),
            // Convolution with bias, dt's bias, A and D by head, and a norm.
            plain: saturating_product(&[conv, kernel.saturating_add(1)])
                .saturating_add(saturating_product(&[3, heads]))
                .saturating_add(inner.into()),
            conv_state: saturating_product(&[conv, kernel - 1]),
            state: saturating_product(&[inner, state]),
            state_bytes: HALF_BYTES,
            width: projected,
        })
    }

    fn gated_delta_net(fields: &Fields<'_>, hidden: u64) -> Result<Self, ConfigError> {
        let key_heads = fields.required_number("linear_num_key_heads")?;
        let heads = fields.required_number("linear_num_value_heads")?;
        let key_dim = fields.required_number("linear_key_head_dim")?;
        let value_dim = fields.required_number("linear_value_head_dim")?;
        let kernel = fields.required_number("linear_conv_kernel_dim")?;
        let keys = key_heads.saturating_mul(key_dim);
        let values = heads.saturating_mul(value_dim);
        let conv = keys.saturating_mul(2).saturating_add(values);
        let projected = conv
            .saturating_add(values)
            .saturating_add(heads.saturating_mul(2));
        Ok(Self {
            heads,
            linear: saturating_product(&[hidden, projected])
                .saturating_add(saturating_product(&[values, hidden])),
            // Convolution, dt's bias and A by head, and a norm of a head's size.
            plain: saturating_product(&[conv, kernel])
                .saturating_add(saturating_product(&[2, heads]))
                .saturating_add(value_dim.into()),
            conv_state: saturating_product(&[conv, kernel - 1]),
            state: saturating_product(&[heads, value_dim, key_dim]),
            state_bytes: HALF_BYTES,
            width: projected,
        })
    }

    /// Bytes of one sequence's state on each GPU. The convolution's state has the model's 16 bits.
    pub(crate) fn state_bytes_on(&self, gpus: u64) -> u128 {
        let conv = per_gpu_share(self.conv_state, gpus).saturating_mul(HALF_BYTES.into());
        conv.saturating_add(per_gpu_share(self.state, gpus).saturating_mul(self.state_bytes.into()))
    }
}

/// Bytes of a 16-bit element.
const HALF_BYTES: u64 = 2;

/// Bytes of an element of the recurrent state: 16 bits, unless the file or the family has 32.
fn state_bytes(fields: &Fields<'_>, family: &Family) -> Result<u64, ConfigError> {
    let dtype = match fields.text("mamba_ssm_dtype")? {
        Some(dtype) => Some(dtype),
        None => fields.text("mamba_ssm_cache_dtype")?,
    };
    let is_wide = dtype.map_or(family.has_32_bit_state, |dtype| dtype == "float32");
    Ok(if is_wide { 2 * HALF_BYTES } else { HALF_BYTES })
}

impl Mixer {
    /// Parameters on each of so many GPUs.
    pub fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        match self {
            Self::None => Parameters::default(),
            Self::Attention(attention) => attention.parameters(hidden, gpus),
            Self::Latent(latent) => latent.parameters(hidden, gpus),
            Self::Recurrent(one) => Parameters {
                quantizable: per_gpu_share(one.linear, gpus),
                unquantized: per_gpu_share(one.plain, gpus),
            },
        }
    }

    /// Activation elements of one token on each GPU: input and output.
    pub fn activation_width(&self, gpus: u64) -> u128 {
        match self {
            Self::None => 0,
            Self::Attention(one) => {
                let queries = saturating_product(&[2, one.heads, one.head_dim]);
                per_gpu_share(queries, gpus).saturating_add(saturating_product(&[
                    2,
                    one.kv_heads_on(gpus),
                    one.head_dim,
                ]))
            }
            // Queries, keys and values of all heads, decompressed, and the output.
            Self::Latent(one) => {
                let of_head = 2
                    * (u128::from(one.nope_dim)
                        + u128::from(one.rope_dim)
                        + u128::from(one.value_dim));
                per_gpu_share(of_head.saturating_mul(one.heads.into()), gpus)
            }
            Self::Recurrent(one) => per_gpu_share(one.width.into(), gpus),
        }
    }
}
