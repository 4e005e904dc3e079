//! The part of a layer that mixes tokens: attention with heads (MHA, GQA, MQA), latent attention (MLA), or a recurrent state
//! (Mamba, gated delta net). Each says how many weights one GPU holds, what a token and a sequence leave in the cache, and how
//! wide its activations are.
//!
//! The shapes are those of Hugging Face transformers' modules and of vLLM's `mamba_utils.py`.

use super::config::{ConfigError, Fields};
use super::family::{AttentionKind, Family, HeadNorms, RecurrentKind};
use super::product;

/// Number of weights on one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Weights of matrices, which a quantization shrinks.
    pub linear: u128,
    /// Norms, biases, routers and convolutions, which no quantization shrinks.
    pub plain: u128,
}

impl Parameters {
    pub fn total(self) -> u128 {
        self.linear.saturating_add(self.plain)
    }

    pub fn plus(self, other: Self) -> Self {
        Self {
            linear: self.linear.saturating_add(other.linear),
            plain: self.plain.saturating_add(other.plain),
        }
    }
}

/// One GPU's share of a count, rounded up.
pub(super) fn share(count: u128, gpus: u64) -> u128 {
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
    gated: bool,
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
        let hidden = fields.number("hidden_size")?;
        let heads = fields.number("num_attention_heads")?;
        let kv_heads = match family.attention {
            AttentionKind::MultiQuery if fields.flag("multi_query", true)? => 1,
            _ => fields.number_at("num_key_value_heads")?.unwrap_or(heads),
        };
        if kv_heads > heads || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a number that divides num_attention_heads, which is {heads}");
            return Err(fields.refuse("num_key_value_heads", expected));
        }
        let head_dim = match fields.number_at("head_dim")? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!(
                    "a number that divides hidden_size, which is {hidden}; or add head_dim"
                );
                return Err(fields.refuse("num_attention_heads", expected));
            }
        };
        let of_head = || 2u64.saturating_mul(head_dim);
        let norms = match family.head_norms {
            HeadNorms::None => 0,
            HeadNorms::OfHead => of_head(),
            HeadNorms::IfSet if fields.flag("use_qk_norm", false)? => of_head(),
            HeadNorms::IfSet => 0,
            HeadNorms::OfAllHeads => (heads + kv_heads).saturating_mul(head_dim),
            HeadNorms::Sinks => heads,
        };
        let qkv_bias = fields.flag("attention_bias", family.qkv_bias)?;
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            window,
            gated: family.attention == AttentionKind::GatedHeads,
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
        let queries = product(&[self.heads, self.head_dim, if self.gated { 2 } else { 1 }]);
        let keys_and_values = product(&[2, self.kv_heads_on(gpus), self.head_dim]);
        let outputs = product(&[self.heads, self.head_dim]);
        let wide = share(queries.saturating_add(outputs), gpus).saturating_add(keys_and_values);
        let biases = if self.qkv_bias {
            share(queries, gpus).saturating_add(keys_and_values)
        } else {
            0
        };
        let out_bias = if self.out_bias { hidden } else { 0 };
        Parameters {
            linear: wide.saturating_mul(hidden.into()),
            plain: biases
                .saturating_add(out_bias.into())
                .saturating_add(self.norms.into()),
        }
    }
}

impl LatentAttention {
    pub fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            heads: fields.number("num_attention_heads")?,
            query_rank: fields.number_at("q_lora_rank")?,
            kv_rank: fields.number("kv_lora_rank")?,
            rope_dim: fields.number("qk_rope_head_dim")?,
            nope_dim: fields.number("qk_nope_head_dim")?,
            value_dim: fields.number("v_head_dim")?,
        })
    }

    /// Elements that one token leaves in the KV cache, on every GPU alike.
    pub fn cached(&self) -> u64 {
        self.kv_rank.saturating_add(self.rope_dim)
    }

    /// Down-projections are on every GPU; what is after them is split by heads.
    fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let query_dim = self.nope_dim.saturating_add(self.rope_dim);
        let (down, up) = match self.query_rank {
            Some(rank) => (
                product(&[hidden, rank]),
                product(&[rank, self.heads, query_dim]),
            ),
            None => (0, product(&[hidden, self.heads, query_dim])),
        };
        let kv_down = product(&[hidden, self.cached()]);
        let kv_up = product(&[
            self.kv_rank,
            self.heads,
            self.nope_dim.saturating_add(self.value_dim),
        ]);
        let out = product(&[self.heads, self.value_dim, hidden]);
        let split = share(up.saturating_add(kv_up).saturating_add(out), gpus);
        Parameters {
            linear: down.saturating_add(kv_down).saturating_add(split),
            plain: u128::from(self.query_rank.unwrap_or(0)) + u128::from(self.kv_rank),
        }
    }
}

impl Recurrent {
    pub fn read(fields: &Fields<'_>, family: &Family) -> Result<Self, ConfigError> {
        let hidden = fields.number("hidden_size")?;
        let state_bytes = state_bytes(fields, family)?;
        let read = match family.recurrent {
            RecurrentKind::None => Err(fields.refuse("layer_types", "layers with attention only")),
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
        let inner = fields.number("mamba_expand")?.saturating_mul(hidden);
        let state = fields.number("mamba_d_state")?;
        let kernel = fields.number("mamba_d_conv")?;
        // `auto` is text, and means this.
        let is_auto = fields.text("mamba_dt_rank").is_ok();
        let rank = if is_auto {
            hidden.div_ceil(16)
        } else {
            fields.number("mamba_dt_rank")?
        };
        let projected = rank.saturating_add(2 * state);
        Ok(Self {
            heads: inner,
            linear: [
                product(&[hidden, 2, inner]),
                product(&[inner, projected]),
                product(&[rank, inner]),
                product(&[inner, hidden]),
            ]
            .into_iter()
            .fold(0, u128::saturating_add),
            // Convolution with bias, dt's bias, A, D, and three norms.
            plain: product(&[inner, kernel.saturating_add(state).saturating_add(3)])
                .saturating_add(projected.into()),
            conv_state: product(&[inner, kernel - 1]),
            state: product(&[inner, state]),
            state_bytes: HALF,
            width: inner.saturating_mul(2),
        })
    }

    fn mamba2(fields: &Fields<'_>, hidden: u64) -> Result<Self, ConfigError> {
        let heads = fields.number_of(&["mamba_n_heads", "mamba_num_heads"])?;
        let head_dim = match fields.text("mamba_d_head") {
            Ok(Some(_)) => (fields.number("mamba_expand")?.saturating_mul(hidden) / heads).max(1),
            _ => fields.number_of(&["mamba_d_head", "mamba_head_dim"])?,
        };
        let groups = fields.number_of(&["mamba_n_groups", "n_groups"])?;
        let state = fields.number_of(&["mamba_d_state", "ssm_state_size"])?;
        let kernel = fields.number_of(&["mamba_d_conv", "conv_kernel"])?;
        let inner = heads.saturating_mul(head_dim);
        let conv = inner.saturating_add(groups.saturating_mul(state).saturating_mul(2));
        let projected = inner.saturating_add(conv).saturating_add(heads);
        Ok(Self {
            heads,
            linear: product(&[hidden, projected]).saturating_add(product(&[inner, hidden])),
            // Convolution with bias, dt's bias, A and D by head, and a norm.
            plain: product(&[conv, kernel.saturating_add(1)])
                .saturating_add(product(&[3, heads]))
                .saturating_add(inner.into()),
            conv_state: product(&[conv, kernel - 1]),
            state: product(&[inner, state]),
            state_bytes: HALF,
            width: projected,
        })
    }

    fn gated_delta_net(fields: &Fields<'_>, hidden: u64) -> Result<Self, ConfigError> {
        let key_heads = fields.number("linear_num_key_heads")?;
        let heads = fields.number("linear_num_value_heads")?;
        let key_dim = fields.number("linear_key_head_dim")?;
        let value_dim = fields.number("linear_value_head_dim")?;
        let kernel = fields.number("linear_conv_kernel_dim")?;
        let keys = key_heads.saturating_mul(key_dim);
        let values = heads.saturating_mul(value_dim);
        let conv = keys.saturating_mul(2).saturating_add(values);
        let projected = conv
            .saturating_add(values)
            .saturating_add(heads.saturating_mul(2));
        Ok(Self {
            heads,
            linear: product(&[hidden, projected]).saturating_add(product(&[values, hidden])),
            // Convolution, dt's bias and A by head, and a norm of a head's size.
            plain: product(&[conv, kernel])
                .saturating_add(product(&[2, heads]))
                .saturating_add(value_dim.into()),
            conv_state: product(&[conv, kernel - 1]),
            state: product(&[heads, value_dim, key_dim]),
            state_bytes: HALF,
            width: projected,
        })
    }

    /// Bytes of one sequence's state on each GPU. The convolution's state has the model's 16 bits.
    pub(crate) fn state_on(&self, gpus: u64) -> u128 {
        let conv = share(self.conv_state, gpus).saturating_mul(HALF.into());
        conv.saturating_add(share(self.state, gpus).saturating_mul(self.state_bytes.into()))
    }
}

/// Bytes of a 16-bit element.
const HALF: u64 = 2;

/// Bytes of an element of the recurrent state: 16 bits, unless the file or the family has 32.
fn state_bytes(fields: &Fields<'_>, family: &Family) -> Result<u64, ConfigError> {
    let dtype = match fields.text("mamba_ssm_dtype")? {
        Some(dtype) => Some(dtype),
        None => fields.text("mamba_ssm_cache_dtype")?,
    };
    let is_wide = dtype.map_or(family.wide_state, |dtype| dtype == "float32");
    Ok(if is_wide { 2 * HALF } else { HALF })
}

impl Mixer {
    /// Parameters on each of so many GPUs.
    pub fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        match self {
            Self::None => Parameters::default(),
            Self::Attention(attention) => attention.parameters(hidden, gpus),
            Self::Latent(latent) => latent.parameters(hidden, gpus),
            Self::Recurrent(one) => Parameters {
                linear: share(one.linear, gpus),
                plain: share(one.plain, gpus),
            },
        }
    }

    /// Activation elements of one token on each GPU: input and output.
    pub fn width(&self, gpus: u64) -> u128 {
        match self {
            Self::None => 0,
            Self::Attention(one) => {
                let queries = product(&[2, one.heads, one.head_dim]);
                share(queries, gpus).saturating_add(product(&[
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
                share(of_head.saturating_mul(one.heads.into()), gpus)
            }
            Self::Recurrent(one) => share(one.width.into(), gpus),
        }
    }
}
