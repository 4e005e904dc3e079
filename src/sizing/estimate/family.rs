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

/// A note about weights that are counted, and what is to be said instead of those that files have: by their headers, or all of them
/// as they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightNote {
    pub counted: &'static str,
    pub loaded: &'static str,
    pub stored: &'static str,
}

impl WeightNote {
    /// The same note wherever the weights are from.
    const fn always(text: &'static str) -> Self {
        Self::of_files(text, text)
    }

    const fn of_files(counted: &'static str, files: &'static str) -> Self {
        Self {
            counted,
            loaded: files,
            stored: files,
        }
    }

    /// For tensors that only a file's header tells apart.
    const fn unless_stored(text: &'static str) -> Self {
        Self {
            stored: "the weights are counted with tensors that engines do not load, as they are stored",
            ..Self::always(text)
        }
    }
}

pub const ENCODERS: WeightNote = WeightNote::of_files(
    "encoders of images and sound are not counted",
    "of encoders of images and sound only the weights are counted",
);
pub const FLOAT32: WeightNote =
    WeightNote::unless_stored("the file says float32; engines load it in 16 bits");

/// What a file's field says and the count leaves out.
pub const CAUTIONS: &[(&str, WeightNote)] = &[
    (
        "attention_chunk_size",
        WeightNote::always(
            "attention in chunks is counted as attention to all: the KV cache is an upper bound",
        ),
    ),
    (
        "compress_ratios",
        WeightNote::of_files(
            "compressed attention is counted as attention to all, and its compressors not at all",
            "compressed attention is counted as attention to all: the KV cache is an upper bound",
        ),
    ),
    (
        "num_kv_shared_layers",
        WeightNote::always(
            "layers that share a KV cache are counted as if each had one: an upper bound",
        ),
    ),
    (
        "num_nextn_predict_layers",
        WeightNote::unless_stored(
            "layers for multi-token prediction are not counted: engines load them on request",
        ),
    ),
    (
        "sparse_attention_config",
        WeightNote::of_files(
            "the index of its sparse attention is not counted",
            "of the index of its sparse attention only the weights are counted",
        ),
    ),
    (
        "index_head_dim",
        WeightNote::of_files(
            "the weights of its sparse attention's index are not counted",
            "",
        ),
    ),
    (
        "hidden_size_per_layer_input",
        WeightNote::of_files("embeddings for each layer are not counted", ""),
    ),
    (
        "ssm.conv_kernel",
        WeightNote::always(
            "recurrent layers are not read from a GGUF file: they are counted as attention to all",
        ),
    ),
];

/// Architectures of GGUF files whose name is not that of a family without punctuation.
const GGUF_NAMES: [(&str, &str); 4] = [
    ("command-r", "cohere"),
    ("deepseek2", "deepseek_v3"),
    ("granitehybrid", "granitemoehybrid"),
    ("phi2", "phi"),
];

impl Family {
    /// The family of a `model_type`; for one that is not known, Llama and `false`.
    pub fn find(model_type: &str) -> (&'static Self, bool) {
        let known = FAMILIES
            .iter()
            .find(|family| family.names.contains(&model_type));
        (known.unwrap_or(&LLAMA), known.is_some())
    }

    /// The `model_type` of a GGUF file's architecture: `qwen3_moe` of `qwen3moe`, `gemma3_text` of `gemma3`.
    pub(crate) fn model_type_of_gguf(architecture: &str) -> &str {
        let plain = |name: &str| name.replace(['-', '_'], "");
        let architecture_plain = plain(architecture);
        let is_same =
            |name: &&&str| architecture_plain == plain(name.strip_suffix("_text").unwrap_or(name));
        let other = GGUF_NAMES.iter().find(|(gguf, _)| *gguf == architecture);
        let mut names = FAMILIES.iter().flat_map(|family| family.names);
        other
            .map(|(_, name)| *name)
            .or_else(|| names.find(is_same).copied())
            .unwrap_or(architecture)
    }
}
