//! The part of a layer that mixes tokens: attention with heads (MHA, GQA, MQA), latent attention (MLA), or a recurrent state
//! (Mamba, gated delta net). Each says how many weights one GPU holds, what a token and a sequence leave in the cache, and how
//! wide its activations are.
//!
//! The shapes are those of Hugging Face transformers' modules and of vLLM's `mamba_utils.py`.

use super::config::{ConfigError, Fields};
use super::family::Family;
use super::saturating_product;

/// Weights on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Matrices, which a quantization shrinks.
    pub matrices: Vec<Matrix>,
    /// Norms, routers and convolutions, which no quantization shrinks.
    pub unquantized: u128,
}

/// One matrix of a layer, by the names that checkpoints have for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Matrix {
    /// Names of the module that it is in, within its layer.
    blocks: &'static [&'static str],
    names: &'static [&'static str],
    pub parameters: u128,
}

impl Matrix {
    pub(super) fn new(
        blocks: &'static [&'static str],
        names: &'static [&'static str],
        parameters: u128,
    ) -> Self {
        Self {
            blocks,
            names,
            parameters,
        }
    }

    /// Names that it may have within its layer.
    pub(super) fn modules(&self) -> impl Iterator<Item = String> {
        let named = |block| self.names.iter().map(move |name| format!("{block}.{name}"));
        self.blocks.iter().flat_map(named)
    }
}

impl Parameters {
    pub fn total(&self) -> u128 {
        let matrices = self.matrices.iter().map(|matrix| matrix.parameters);
        matrices.fold(self.unquantized, u128::saturating_add)
    }

    pub fn plus(mut self, other: Self) -> Self {
        self.matrices.extend(other.matrices);
        self.unquantized = self.unquantized.saturating_add(other.unquantized);
        self
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
    /// Size of a head's values, where it is another one than of its keys.
    value_dim: u64,
    /// The query projection is twice as wide, for a gate.
    has_gate: bool,
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
    /// Bytes of a token in the index of a sparse attention, beside the cache.
    pub index_bytes: u64,
}

/// A state of fixed size for each sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recurrent {
    /// Heads, or channels, that are split over GPUs.
    pub heads: u64,
    /// Parameters of its input and output projections, and of all else.
    input: u128,
    output: u128,
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
    /// Reads the heads of all layers, or of those with this window, whose fields may have names of their own.
    pub fn read(
        fields: &Fields<'_>,
        family: &Family,
        window: Option<u64>,
    ) -> Result<Self, ConfigError> {
        let [own_heads, own_kv_heads, own_dim, own_value_dim] = match window {
            Some(_) => [
                "swa_num_attention_heads",
                "swa_num_key_value_heads",
                "swa_head_dim",
                "swa_v_head_dim",
            ],
            None => ["", "num_global_key_value_heads", "global_head_dim", ""],
        };
        let either = |own, usual| match fields.optional_number(own)? {
            Some(number) => Ok(Some(number)),
            None => fields.optional_number(usual),
        };
        let hidden = fields.required_number("hidden_size")?;
        let heads = match fields.optional_number(own_heads)? {
            Some(heads) => heads,
            None => fields.required_number("num_attention_heads")?,
        };
        let kv_heads = match either(own_kv_heads, "num_key_value_heads")? {
            Some(kv_heads) => kv_heads,
            None if fields.flag("multi_query", false)? => 1,
            None => heads,
        };
        if kv_heads > heads || !heads.is_multiple_of(kv_heads) {
            let expected = format!("a number that divides num_attention_heads, which is {heads}");
            return Err(fields.field_error("num_key_value_heads", expected));
        }
        let head_dim = match either(own_dim, "head_dim")? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!(
                    "a number that divides hidden_size, which is {hidden}; or add head_dim"
                );
                return Err(fields.field_error("num_attention_heads", expected));
            }
        };
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            value_dim: either(own_value_dim, "v_head_dim")?.unwrap_or(head_dim),
            window,
            has_gate: fields.flag("attn_output_gate", family.has_query_gate)?,
        })
    }

    /// KV heads on each GPU. Where there are fewer heads than GPUs, each GPU holds a whole one.
    pub(crate) fn kv_heads_on(&self, gpus: u64) -> u64 {
        self.kv_heads.div_ceil(gpus.max(1))
    }

    /// Elements that one token leaves in the KV cache on each GPU.
    pub(crate) fn cached_elements_on(&self, gpus: u64) -> u128 {
        let of_head = u128::from(self.head_dim) + u128::from(self.value_dim);
        of_head.saturating_mul(self.kv_heads_on(gpus).into())
    }

    fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let gates = if self.has_gate { 2 } else { 1 };
        let kv_heads = self.kv_heads_on(gpus);
        let heads = |of_each: &[u64]| per_gpu_share(saturating_product(of_each), gpus);
        let of =
            |names, wide: u128| Matrix::new(ATTENTION, names, wide.saturating_mul(hidden.into()));
        Parameters {
            matrices: vec![
                of(
                    &["q_proj", "qkv_proj"],
                    heads(&[self.heads, self.head_dim, gates]),
                ),
                of(
                    &["k_proj", "qkv_proj"],
                    saturating_product(&[kv_heads, self.head_dim]),
                ),
                of(
                    &["v_proj", "qkv_proj"],
                    saturating_product(&[kv_heads, self.value_dim]),
                ),
                of(
                    &["o_proj", "out_proj", "dense"],
                    heads(&[self.heads, self.value_dim]),
                ),
            ],
            unquantized: 0,
        }
    }
}

/// Names of the module that has a layer's attention.
const ATTENTION: &[&str] = &["self_attn", "attention", "attn", "mixer"];

impl LatentAttention {
    pub fn read(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        Ok(Self {
            heads: fields.required_number("num_attention_heads")?,
            query_rank: fields.optional_number("q_lora_rank")?,
            kv_rank: fields.required_number("kv_lora_rank")?,
            rope_dim: fields.required_number("qk_rope_head_dim")?,
            nope_dim: fields.required_number("qk_nope_head_dim")?,
            value_dim: fields.required_number("v_head_dim")?,
            // vLLM's DeepseekV32IndexerCache: keys of 8 bits, and a scale of 4 bytes for 128 of them.
            index_bytes: fields
                .optional_number("index_head_dim")?
                .map_or(0, |dim| dim + 4 * dim.div_ceil(128)),
        })
    }

    /// Elements that one token leaves in the KV cache, on every GPU alike.
    pub fn cached_elements(&self) -> u64 {
        self.kv_rank.saturating_add(self.rope_dim)
    }

    /// Down-projections are on every GPU; what is after them is split by heads.
    fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        let query_dim = self.nope_dim.saturating_add(self.rope_dim);
        let of = |names, count| Matrix::new(ATTENTION, names, count);
        let by_heads = |from: u64, of_head: u64| {
            per_gpu_share(saturating_product(&[from, self.heads, of_head]), gpus)
        };
        let mut matrices = match self.query_rank {
            Some(rank) => vec![
                of(&["q_a_proj"], saturating_product(&[hidden, rank])),
                of(&["q_b_proj"], by_heads(rank, query_dim)),
            ],
            None => vec![of(&["q_proj"], by_heads(hidden, query_dim))],
        };
        let keys_and_values = self.nope_dim.saturating_add(self.value_dim);
        matrices.extend([
            of(
                &["kv_a_proj_with_mqa"],
                saturating_product(&[hidden, self.cached_elements()]),
            ),
            of(&["kv_b_proj"], by_heads(self.kv_rank, keys_and_values)),
            of(&["o_proj"], by_heads(hidden, self.value_dim)),
        ]);
        Parameters {
            matrices,
            unquantized: u128::from(self.query_rank.unwrap_or(0)) + u128::from(self.kv_rank),
        }
    }
}

impl Recurrent {
    pub fn read(fields: &Fields<'_>, family: &Family) -> Result<Self, ConfigError> {
        let hidden = fields.required_number("hidden_size")?;
        let state_bytes = state_bytes(fields, family)?;
        let read = if fields.has("linear_num_value_heads") {
            Self::gated_delta_net(fields, hidden)
        } else if fields.has("mamba_n_heads") {
            Self::mamba2(fields, hidden)
        } else {
            Self::mamba1(fields, hidden)
        };
        read.map(|read| Self {
            state_bytes,
            ..read
        })
    }

    /// Whether the file describes recurrent layers that are understood.
    pub fn is_described(fields: &Fields<'_>) -> bool {
        ["linear_num_value_heads", "mamba_n_heads", "mamba_d_state"]
            .into_iter()
            .any(|field| fields.has(field))
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
            input: saturating_product(&[hidden, 2, inner])
                .saturating_add(saturating_product(&[inner, projected]))
                .saturating_add(saturating_product(&[rank, inner])),
            output: saturating_product(&[inner, hidden]),
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
        let heads = fields.required_number("mamba_n_heads")?;
        let head_dim = match fields.text("mamba_d_head") {
            Ok(Some(_)) => (fields
                .required_number("mamba_expand")?
                .saturating_mul(hidden)
                / heads)
                .max(1),
            _ => fields.required_number("mamba_d_head")?,
        };
        let groups = fields.required_number("mamba_n_groups")?;
        let state = fields.required_number("mamba_d_state")?;
        let kernel = fields.required_number("mamba_d_conv")?;
        let inner = heads.saturating_mul(head_dim);
        let conv = inner.saturating_add(groups.saturating_mul(state).saturating_mul(2));
        let projected = inner.saturating_add(conv).saturating_add(heads);
        Ok(Self {
            heads,
            input: saturating_product(&[hidden, projected]),
            output: saturating_product(&[inner, hidden]),
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
            input: saturating_product(&[hidden, projected]),
            output: saturating_product(&[values, hidden]),
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

/// Names of the module that has a layer's recurrent part.
const RECURRENT: &[&str] = &["linear_attn", "mamba", "mixer"];
/// Bytes of a 16-bit element.
const HALF_BYTES: u64 = 2;

/// Bytes of an element of the recurrent state: of the type in the file, or the family's.
fn state_bytes(fields: &Fields<'_>, family: &Family) -> Result<u64, ConfigError> {
    let dtype = fields.text("mamba_ssm_dtype")?;
    Ok(match dtype {
        Some("float32") => 2 * HALF_BYTES,
        Some(_) => HALF_BYTES,
        None => family.state_bytes,
    })
}

impl Mixer {
    /// Parameters on each of so many GPUs.
    pub fn parameters(&self, hidden: u64, gpus: u64) -> Parameters {
        match self {
            Self::None => Parameters::default(),
            Self::Attention(attention) => attention.parameters(hidden, gpus),
            Self::Latent(latent) => latent.parameters(hidden, gpus),
            Self::Recurrent(one) => Parameters {
                matrices: vec![
                    Matrix::new(
                        RECURRENT,
                        &["in_proj", "in_proj_qkv", "in_proj_qkvz"],
                        per_gpu_share(one.input, gpus),
                    ),
                    Matrix::new(RECURRENT, &["out_proj"], per_gpu_share(one.output, gpus)),
                ],
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
