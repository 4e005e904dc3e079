//! The known architectures, by `model_type`: a table, and nothing but a table.
//!
//! A row says how a family's layers differ from Llama's, as its code in Hugging Face transformers has them; sizes are in the file
//! itself. A new family that is made of known parts is a row here and a model in the tests. [`super::architecture`] reads rows.

use super::config::ConfigError;
use stowage_policy_file::nearest::nearest;

/// How a family's layers are built.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    pub name: &'static str,
    /// Kind of its attention.
    pub attention: AttentionKind,
    /// Kind of its layers without attention.
    pub recurrent: RecurrentKind,
    pub layers: LayerOrder,
    pub feed_forward: FeedForwardKind,
    /// Whether a file may describe experts.
    pub may_have_experts: bool,
    /// Biases of the query, key and value projections, unless the file has `attention_bias`.
    pub qkv_bias: bool,
    /// A bias of the output projection wherever the other three have one.
    pub out_bias: bool,
    pub head_norms: HeadNorms,
    /// Vectors of the hidden size that normalize each layer; a layer norm with a bias counts twice.
    pub norms: u64,
    /// The input embedding is the output projection, unless the file has `tie_word_embeddings`.
    pub ties_embeddings: bool,
    /// Learned embeddings of positions, beyond `max_position_embeddings` by this many.
    pub extra_positions: Option<u64>,
    /// Pairs of a usual field name and the name in files of the family.
    pub field_names: &'static [(&'static str, &'static str)],
    /// Recurrent states have 32 bits, unless the file says something else.
    pub has_32_bit_state: bool,
    /// Values of fields that its files leave out.
    pub defaults: &'static [(&'static str, u64)],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Keys and values of their own for each of the KV heads: MHA, GQA and MQA.
    Heads,
    /// Keys and values for each KV head, and a gate as wide as the queries.
    GatedHeads,
    /// One KV head, if `multi_query` is set.
    MultiQuery,
    /// One compressed vector for keys and values of all heads: MLA.
    Latent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentKind {
    None,
    Mamba1,
    Mamba2,
    GatedDeltaNet,
}

/// Order of the kinds of layers where the file does not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerOrder {
    AllFull,
    /// All have a window if the file has `sliding_window`.
    AllSliding,
    /// Layers from `max_window_layers` on have one if `use_sliding_window` is set.
    SlidingLast,
    /// Every n-th is full, and the others have a window; n is `sliding_window_pattern`, or this.
    FullEvery(u64),
    /// Every n-th has attention, and the others are recurrent; n is `full_attention_interval`, or this.
    AttentionEvery(u64),
    /// One in `attn_layer_period` has attention, the first at `attn_layer_offset`.
    AttentionPeriod,
    /// Those in `attn_layer_indices` have attention.
    AttentionIndices,
    /// A letter each in `hybrid_override_pattern`. A layer is one thing: recurrent, attention, or feed-forward.
    Letters,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// Three matrices: gate, up and down.
    Gated,
    /// Two matrices: up and down.
    Plain,
    /// Two matrices, with biases.
    PlainBiased,
    /// Three matrices; those of experts have biases.
    GatedBiasedExperts,
}

/// Norms inside attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNorms {
    None,
    /// One vector for queries and one for keys, of a head's size.
    PerHead,
    /// One vector for queries and one for keys, of all heads' size.
    AcrossHeads,
    /// [`HeadNorms::PerHead`] if `use_qk_norm` is set.
    PerHeadIfSet,
    /// One number for each head: gpt-oss' attention sinks.
    Sinks,
}

const LLAMA: Family = Family {
    name: "llama",
    attention: AttentionKind::Heads,
    recurrent: RecurrentKind::None,
    layers: LayerOrder::AllFull,
    feed_forward: FeedForwardKind::Gated,
    may_have_experts: false,
    qkv_bias: false,
    out_bias: true,
    head_norms: HeadNorms::None,
    norms: 2,
    ties_embeddings: false,
    extra_positions: None,
    field_names: &[],
    has_32_bit_state: false,
    defaults: &[],
};
const MIXTRAL: Family = Family {
    name: "mixtral",
    may_have_experts: true,
    layers: LayerOrder::AllSliding,
    defaults: KV_HEADS_8,
    ..LLAMA
};
const QWEN2: Family = Family {
    name: "qwen2",
    qkv_bias: true,
    out_bias: false,
    layers: LayerOrder::SlidingLast,
    defaults: &[("max_window_layers", 28)],
    ..LLAMA
};
const QWEN2_VL: Family = Family {
    name: "qwen2_vl",
    defaults: &[("max_window_layers", 80)],
    ..QWEN2
};
const QWEN3: Family = Family {
    name: "qwen3",
    head_norms: HeadNorms::PerHead,
    layers: LayerOrder::SlidingLast,
    defaults: &[("head_dim", 128), ("max_window_layers", 28)],
    ..LLAMA
};
const GEMMA: Family = Family {
    name: "gemma",
    ties_embeddings: true,
    defaults: &[("head_dim", 256)],
    ..LLAMA
};
const GEMMA3: Family = Family {
    name: "gemma3_text",
    norms: 4,
    head_norms: HeadNorms::PerHead,
    layers: LayerOrder::FullEvery(6),
    defaults: &[
        ("vocab_size", 262_208),
        ("head_dim", 256),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ],
    ..GEMMA
};
const COHERE: Family = Family {
    name: "cohere",
    norms: 1,
    head_norms: HeadNorms::PerHeadIfSet,
    ties_embeddings: true,
    ..LLAMA
};
const DEEPSEEK: Family = Family {
    name: "deepseek_v3",
    attention: AttentionKind::Latent,
    may_have_experts: true,
    ..LLAMA
};
const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    attention: AttentionKind::GatedHeads,
    recurrent: RecurrentKind::GatedDeltaNet,
    layers: LayerOrder::AttentionEvery(4),
    head_norms: HeadNorms::PerHead,
    may_have_experts: true,
    defaults: &[("head_dim", 256)],
    ..LLAMA
};
const BAMBA: Family = Family {
    name: "bamba",
    recurrent: RecurrentKind::Mamba2,
    layers: LayerOrder::AttentionIndices,
    ..LLAMA
};

const KV_HEADS_8: &[(&str, u64)] = &[("num_key_value_heads", 8)];

/// Known families in order of name.
pub const FAMILIES: &[Family] = &[
    BAMBA,
    COHERE,
    Family {
        name: "cohere2",
        layers: LayerOrder::FullEvery(4),
        head_norms: HeadNorms::None,
        ..COHERE
    },
    Family {
        name: "deepseek_v2",
        ..DEEPSEEK
    },
    DEEPSEEK,
    GEMMA,
    Family {
        name: "gemma2",
        norms: 4,
        layers: LayerOrder::FullEvery(2),
        ..GEMMA
    },
    GEMMA3,
    Family {
        name: "glm4",
        norms: 4,
        qkv_bias: true,
        out_bias: false,
        ..LLAMA
    },
    Family {
        name: "glm4_moe",
        may_have_experts: true,
        out_bias: false,
        head_norms: HeadNorms::PerHeadIfSet,
        ..LLAMA
    },
    Family {
        name: "gpt_bigcode",
        attention: AttentionKind::MultiQuery,
        feed_forward: FeedForwardKind::PlainBiased,
        qkv_bias: true,
        norms: 4,
        ties_embeddings: true,
        extra_positions: Some(0),
        field_names: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
        ],
        ..LLAMA
    },
    Family {
        name: "gpt_oss",
        may_have_experts: true,
        feed_forward: FeedForwardKind::GatedBiasedExperts,
        qkv_bias: true,
        head_norms: HeadNorms::Sinks,
        layers: LayerOrder::FullEvery(2),
        defaults: &[("head_dim", 64)],
        ..LLAMA
    },
    Family {
        name: "granite",
        ..LLAMA
    },
    Family {
        name: "granitemoe",
        may_have_experts: true,
        ..LLAMA
    },
    Family {
        name: "granitemoehybrid",
        may_have_experts: true,
        ..BAMBA
    },
    Family {
        name: "jamba",
        recurrent: RecurrentKind::Mamba1,
        layers: LayerOrder::AttentionPeriod,
        may_have_experts: true,
        defaults: &[
            ("num_key_value_heads", 8),
            ("num_experts", 16),
            ("expert_layer_period", 2),
            ("expert_layer_offset", 1),
            ("attn_layer_period", 8),
            ("attn_layer_offset", 4),
            ("mamba_d_state", 16),
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
        ],
        ..LLAMA
    },
    Family {
        name: "kimi_k2",
        ..DEEPSEEK
    },
    LLAMA,
    Family {
        name: "minimax_m2",
        may_have_experts: true,
        head_norms: HeadNorms::AcrossHeads,
        defaults: &[("head_dim", 128), ("num_key_value_heads", 8)],
        ..LLAMA
    },
    Family {
        name: "mistral",
        layers: LayerOrder::AllSliding,
        defaults: KV_HEADS_8,
        ..LLAMA
    },
    MIXTRAL,
    Family {
        name: "nemotron_h",
        recurrent: RecurrentKind::Mamba2,
        layers: LayerOrder::Letters,
        feed_forward: FeedForwardKind::Plain,
        may_have_experts: true,
        norms: 1,
        has_32_bit_state: true,
        defaults: &[("head_dim", 128)],
        ..LLAMA
    },
    Family {
        name: "olmo2",
        head_norms: HeadNorms::AcrossHeads,
        ..LLAMA
    },
    Family {
        name: "olmoe",
        may_have_experts: true,
        head_norms: HeadNorms::AcrossHeads,
        ..LLAMA
    },
    Family {
        name: "opt",
        feed_forward: FeedForwardKind::PlainBiased,
        qkv_bias: true,
        norms: 4,
        ties_embeddings: true,
        extra_positions: Some(2),
        field_names: &[("intermediate_size", "ffn_dim")],
        ..LLAMA
    },
    Family {
        name: "phi3",
        layers: LayerOrder::AllSliding,
        ..LLAMA
    },
    QWEN2,
    Family {
        name: "qwen2_5_vl",
        ..QWEN2_VL
    },
    Family {
        name: "qwen2_5_vl_text",
        ..QWEN2_VL
    },
    Family {
        name: "qwen2_moe",
        may_have_experts: true,
        ..QWEN2
    },
    QWEN2_VL,
    QWEN3,
    Family {
        name: "qwen3_5_moe_text",
        ..QWEN3_NEXT
    },
    Family {
        name: "qwen3_5_text",
        may_have_experts: false,
        ..QWEN3_NEXT
    },
    // All its layers have the window, unless the file says something else.
    Family {
        name: "qwen3_moe",
        may_have_experts: true,
        defaults: &[("head_dim", 128)],
        ..QWEN3
    },
    QWEN3_NEXT,
    Family {
        name: "qwen3_vl_moe_text",
        may_have_experts: true,
        ..QWEN3
    },
    Family {
        name: "qwen3_vl_text",
        ..QWEN3
    },
    Family {
        name: "seed_oss",
        qkv_bias: true,
        out_bias: false,
        defaults: &[("head_dim", 128)],
        ..LLAMA
    },
    Family {
        name: "smollm3",
        ties_embeddings: true,
        ..LLAMA
    },
    Family {
        name: "starcoder2",
        feed_forward: FeedForwardKind::PlainBiased,
        qkv_bias: true,
        norms: 4,
        ties_embeddings: true,
        layers: LayerOrder::AllSliding,
        ..LLAMA
    },
];

/// Families that are known but made of parts that are not counted here, with the reason.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("bert", "it is an encoder and keeps no KV cache"),
    (
        "deepseek_v32",
        "its sparse attention keeps an index beside the KV cache, in a layout of the engine's own",
    ),
    (
        "deepseek_v4",
        "its compressed sparse attention keeps caches in layouts of the engine's own",
    ),
    (
        "falcon_h1",
        "its layers run attention and Mamba side by side",
    ),
    ("falcon_mamba", "it has no attention"),
    (
        "gemma3n_text",
        "its layers share caches, and parts of its embeddings stay off the GPU",
    ),
    (
        "gemma4_text",
        "its full and sliding layers have heads of different sizes",
    ),
    (
        "kimi_linear",
        "its linear attention (KDA) is not counted yet",
    ),
    ("lfm2", "its short convolutions are not counted yet"),
    ("llama4_text", "its chunked attention is not counted yet"),
    ("mamba", "it has no attention"),
    ("mamba2", "it has no attention"),
    ("minimax", "its lightning attention is not counted yet"),
    ("t5", "it has an encoder beside its decoder"),
    ("zamba2", "its layers share attention blocks"),
];

/// Finds the family by `model_type`; `field` is the path of the field that names it.
pub fn find_family(model_type: &str, field: String) -> Result<&'static Family, ConfigError> {
    if let Some(family) = FAMILIES.iter().find(|family| family.name == model_type) {
        return Ok(family);
    }
    if let Some((model_type, reason)) = UNSUPPORTED.iter().find(|(name, _)| *name == model_type) {
        return Err(ConfigError::Unsupported {
            field,
            model_type,
            reason,
        });
    }
    let known: Vec<&'static str> = FAMILIES.iter().map(|family| family.name).collect();
    let near = nearest(model_type, &known).map(str::to_owned);
    Err(ConfigError::UnknownArchitecture {
        field,
        found: model_type.to_owned(),
        near,
        known,
    })
}
