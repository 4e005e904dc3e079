//! How families of models differ from Llama where their files do not say it: a table, and nothing but a table.
//!
//! Most of a layer is told by the fields that a file has ([`super::architecture`] reads them). A row is only for what is not there:
//! defaults of its code in Hugging Face transformers, the order of its windows, two matrices instead of three.

/// What a family's files do not say.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `model_type` of its files.
    pub names: &'static [&'static str],
    pub windows: WindowOrder,
    /// Matrices of a feed-forward network: gate, up and down, or the last two.
    pub matrices: u64,
    /// The query projection is twice as wide, for a gate.
    pub has_query_gate: bool,
    /// The input embedding is the output projection, unless the file has `tie_word_embeddings`.
    pub ties_embeddings: bool,
    /// Bytes of an element of a recurrent state, unless the file says its type.
    pub state_bytes: u64,
    pub defaults: &'static [(&'static str, u64)],
}

/// Which layers have the window of `sliding_window`, where the file does not list them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowOrder {
    None,
    All,
    /// Layers from `max_window_layers` on, if `use_sliding_window` is set.
    Last,
    /// All but every n-th; n is `sliding_window_pattern`, or this.
    AllBut(u64),
}

const LLAMA: Family = Family {
    names: &[
        "bamba",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "exaone4",
        "glm4",
        "glm4_moe",
        "glm_moe_dsa",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "internlm2",
        "kimi_k2",
        "llama",
        "mimo_v2_flash",
        "minimax_m3",
        "ministral3",
        "mistral4",
        "olmo2",
        "olmo3",
        "olmoe",
        "stablelm",
        "step3p7",
    ],
    windows: WindowOrder::None,
    matrices: 3,
    has_query_gate: false,
    ties_embeddings: false,
    state_bytes: 2,
    defaults: &[],
};
const WINDOWED: Family = Family {
    windows: WindowOrder::All,
    ..LLAMA
};
const PLAIN: Family = Family {
    names: &["gpt_neox", "phi"],
    matrices: 2,
    ..LLAMA
};
const QWEN2: Family = Family {
    names: &["qwen2", "qwen2_moe"],
    windows: WindowOrder::Last,
    defaults: &[("max_window_layers", 28)],
    ..LLAMA
};
const GEMMA: Family = Family {
    names: &["gemma", "gemma4_text"],
    ties_embeddings: true,
    defaults: &[("head_dim", 256)],
    ..LLAMA
};
const GATED_DELTA_NET: Family = Family {
    names: &["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"],
    has_query_gate: true,
    defaults: &[("head_dim", 256), ("full_attention_interval", 4)],
    ..LLAMA
};

pub const FAMILIES: &[Family] = &[
    LLAMA,
    PLAIN,
    GEMMA,
    QWEN2,
    GATED_DELTA_NET,
    Family {
        names: &["phi3"],
        ..WINDOWED
    },
    Family {
        names: &["mistral", "mixtral"],
        defaults: &[("num_key_value_heads", 8)],
        ..WINDOWED
    },
    Family {
        names: &["starcoder2"],
        matrices: 2,
        ties_embeddings: true,
        ..WINDOWED
    },
    Family {
        names: &["gpt2", "gpt_bigcode", "opt"],
        ties_embeddings: true,
        ..PLAIN
    },
    Family {
        names: &["nemotron_h"],
        state_bytes: 4,
        defaults: &[("head_dim", 128)],
        ..PLAIN
    },
    Family {
        names: &["qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl"],
        defaults: &[("max_window_layers", 80)],
        ..QWEN2
    },
    Family {
        names: &["qwen3", "qwen3_vl_moe_text", "qwen3_vl_text"],
        defaults: &[("head_dim", 128), ("max_window_layers", 28)],
        ..QWEN2
    },
    // All its layers have the window, unless the file says something else.
    Family {
        names: &["qwen3_moe"],
        defaults: &[("head_dim", 128)],
        ..QWEN2
    },
    Family {
        names: &["minimax_m2", "seed_oss"],
        defaults: &[("head_dim", 128)],
        ..LLAMA
    },
    Family {
        names: &["llama4_text"],
        defaults: &[("n_shared_experts", 1)],
        ..LLAMA
    },
    Family {
        names: &["cohere", "smollm3"],
        ties_embeddings: true,
        ..LLAMA
    },
    Family {
        names: &["cohere2"],
        windows: WindowOrder::AllBut(4),
        ties_embeddings: true,
        ..LLAMA
    },
    Family {
        names: &["gemma2"],
        windows: WindowOrder::AllBut(2),
        ..GEMMA
    },
    Family {
        names: &["gemma3_text"],
        windows: WindowOrder::AllBut(6),
        defaults: &[
            ("vocab_size", 262_208),
            ("head_dim", 256),
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("max_position_embeddings", 131_072),
        ],
        ..GEMMA
    },
    Family {
        names: &["gpt_oss"],
        windows: WindowOrder::AllBut(2),
        defaults: &[("head_dim", 64)],
        ..LLAMA
    },
    Family {
        names: &["jamba"],
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
];

/// What a file's field says and the count leaves out, as a note.
pub const CAUTIONS: &[(&str, &str)] = &[
    (
        "attention_chunk_size",
        "attention in chunks is counted as attention to all: the KV cache is an upper bound",
    ),
    (
        "compress_ratios",
        "compressed attention is counted as attention to all, and its compressors not at all",
    ),
    (
        "num_kv_shared_layers",
        "layers that share a KV cache are counted as if each had one: an upper bound",
    ),
    (
        "sparse_attention_config",
        "the index of its sparse attention is not counted",
    ),
    (
        "hidden_size_per_layer_input",
        "embeddings for each layer are not counted",
    ),
];

impl Family {
    /// The family of a `model_type`; for one that is not known, Llama and `false`.
    pub fn find(model_type: &str) -> (&'static Self, bool) {
        let known = FAMILIES
            .iter()
            .find(|family| family.names.contains(&model_type));
        (known.unwrap_or(&LLAMA), known.is_some())
    }
}
