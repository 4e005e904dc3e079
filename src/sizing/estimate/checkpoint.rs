//! What a checkpoint's files say of its weights in their headers: safetensors and GGUF. The weights themselves are not read.
//!
//! A header may be hostile: it is read as a stream, no size in it is allocated, and what it says is checked against the file's length.

use super::config::Config;
use super::family::Family;
use super::quantization::GGUF;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use std::fmt;
use std::io::{BufReader, Error, ErrorKind, Read, copy, sink};
use stowage_policy_file::diagnostic::quoted;

/// Weights of a checkpoint, by its files' headers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    pub files: u64,
    /// Bytes of all its tensors.
    pub bytes: u128,
    /// Bytes of those that an engine loads; of them, those of 32 bits or more.
    loaded: u128,
    wide: u128,
    /// Bytes that the wide ones take in 16 bits.
    narrowed: u128,
    elements: u128,
    /// Some tensors have several parameters in an element.
    is_packed: bool,
    /// Tensors that no engine loads are counted too, and all as they are stored.
    pub(crate) is_as_stored: bool,
}

/// Why a file is no checkpoint. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("it ends within its header: download it again")]
    Truncated,
    #[error("{0}")]
    Unreadable(Error),
    #[error("it is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`")]
    LfsPointer,
    #[error("it is no {format} file, or not a whole one: {problem}; download it again")]
    Invalid {
        format: &'static str,
        problem: String,
    },
}

impl From<Error> for CheckpointError {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Unreadable(error),
        }
    }
}

fn safetensors_error(problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Invalid {
        format: "safetensors",
        problem: problem.into(),
    }
}

fn gguf_error(problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Invalid {
        format: "GGUF",
        problem: problem.into(),
    }
}

impl Checkpoint {
    /// Weights of which only the total is known.
    pub fn from_total(bytes: u64) -> Self {
        let bytes = bytes.into();
        Self {
            bytes,
            loaded: bytes,
            is_packed: true,
            is_as_stored: true,
            ..Self::default()
        }
    }

    /// Bytes that an engine holds: what is in 32 bits throughout is loaded in 16.
    pub(crate) fn loaded_bytes(&self) -> u128 {
        match self.wide.saturating_mul(2) > self.loaded {
            true => self.loaded - self.wide + self.narrowed,
            false => self.loaded,
        }
    }

    /// Number of parameters, unless they are packed.
    pub(crate) fn parameters(&self) -> Option<u128> {
        (!self.is_packed).then_some(self.elements)
    }

    fn add(&mut self, kind: ElementType, elements: u128, bytes: u64, loads: bool) {
        self.bytes += u128::from(bytes);
        if !loads {
            return;
        }
        self.loaded += u128::from(bytes);
        self.elements = self.elements.saturating_add(elements);
        self.is_packed |= kind == ElementType::Packed;
        if kind == ElementType::WideFloat {
            self.wide += u128::from(bytes);
            self.narrowed = self.narrowed.saturating_add(elements.saturating_mul(2));
        }
    }

    /// Adds a safetensors file of this length. `loads` says whether an engine loads a tensor of this name.
    pub fn add_safetensors(
        &mut self,
        mut file: impl Read,
        length: u64,
        loads: impl Fn(&str) -> bool,
    ) -> Result<(), CheckpointError> {
        /// The format's own limit.
        const MAX_HEADER_BYTES: u64 = 100_000_000;
        let mut first = [0; 8];
        file.read_exact(&mut first)?;
        if &first == b"version " {
            return Err(CheckpointError::LfsPointer);
        }
        let header = u64::from_le_bytes(first);
        let most = MAX_HEADER_BYTES.min(length.saturating_sub(8));
        if header > most {
            return Err(safetensors_error(format!(
                "its first 8 bytes announce a header of {header} bytes, and at most {most} are possible"
            )));
        }
        let data = length - 8 - header;
        let mut ranges = Vec::new();
        let mut read = serde_json::Deserializer::from_reader(BufReader::new(file.take(header)));
        let visitor = Tensors(|name: &str, tensor: Tensor| {
            let (start, end) = tensor.data_offsets;
            let Some(bytes) = end.checked_sub(start).filter(|_| end <= data) else {
                return Err(format!("{} ends beyond the file", quoted(name)));
            };
            let bits = element_bits(&tensor.dtype);
            let of_shape = bits.map(|bits| tensor.shape.0.saturating_mul(bits.into()).div_ceil(8));
            if of_shape.is_some_and(|of_shape| of_shape != u128::from(bytes)) {
                return Err(format!("{} has another size than its shape", quoted(name)));
            }
            ranges.push((start, end));
            let kind = ElementType::of(&tensor.dtype, bits);
            self.add(kind, tensor.shape.0, bytes, loads(name));
            Ok(())
        });
        read.deserialize_map(visitor)
            .and_then(|()| read.end())
            .map_err(|error| safetensors_error(error.to_string()))?;
        let (at, is_dense) = end_of(&mut ranges).map_err(safetensors_error)?;
        if !is_dense {
            return Err(safetensors_error("its tensors leave a gap"));
        }
        if at != data {
            return Err(safetensors_error(format!(
                "{} bytes belong to no tensor",
                data - at
            )));
        }
        self.files += 1;
        Ok(())
    }

    /// Adds a GGUF file of this length; its metadata is the model's configuration.
    pub fn add_gguf(&mut self, file: impl Read, length: u64) -> Result<Config, CheckpointError> {
        let mut gguf = Gguf(BufReader::new(file.take(MAX_GGUF_HEADER_BYTES)), 0);
        match gguf.bytes()? {
            [b'G', b'G', b'U', b'F'] => {}
            [b'v', b'e', b'r', b's'] => return Err(CheckpointError::LfsPointer),
            _ => return Err(gguf_error("it does not begin with GGUF")),
        }
        let version = gguf.u32()?;
        if !(2..=3).contains(&version) {
            return Err(gguf_error(format!("version {version} is not known")));
        }
        let (tensors, entries) = (gguf.u64()?, gguf.u64()?);
        let mut metadata = gguf.metadata(entries)?;
        let (mut bytes_of_all, mut ranges) = (0, Vec::new());
        let mut is_quantized = false;
        for _ in 0..tensors {
            let name = gguf.string()?;
            let mut elements = 1_u128;
            for _ in 0..gguf.u32()? {
                elements = elements.saturating_mul(gguf.u64()?.into());
            }
            let kind = gguf.u32()?;
            let offset = gguf.u64()?;
            let Some((_, block, bytes)) = GGML_TYPES.iter().find(|(known, ..)| *known == kind)
            else {
                return Err(gguf_error(format!(
                    "{} has the unknown type {kind}",
                    quoted(&name)
                )));
            };
            if elements == 0 {
                return Err(gguf_error(format!("{} has no elements", quoted(&name))));
            }
            let bytes = elements
                .div_ceil((*block).into())
                .saturating_mul((*bytes).into());
            let bytes = u64::try_from(bytes).ok();
            let Some((bytes, end)) =
                bytes.and_then(|bytes| Some((bytes, offset.checked_add(bytes)?)))
            else {
                return Err(gguf_error(format!(
                    "{} is larger than any file",
                    quoted(&name)
                )));
            };
            bytes_of_all += u128::from(bytes);
            ranges.push((offset, end));
            is_quantized |= *block > 1;
            self.add(ElementType::Plain, elements, bytes, true);
        }
        let data = length.saturating_sub(gguf.1);
        let (end, _) = end_of(&mut ranges).map_err(gguf_error)?;
        if bytes_of_all.max(end.into()) > data.into() {
            return Err(gguf_error(format!(
                "its tensors have {} bytes, and {data} are there",
                bytes_of_all.max(end.into())
            )));
        }
        if is_quantized {
            metadata.insert("quantization_config".into(), json!({"quant_method": GGUF}));
        }
        self.is_as_stored = true;
        self.files += 1;
        Ok(Config::from_fields(metadata))
    }
}

/// The end of the last range, and whether there are no gaps between them.
fn end_of(ranges: &mut [(u64, u64)]) -> Result<(u64, bool), String> {
    ranges.sort_unstable();
    let (mut at, mut is_dense) = (0, true);
    for (start, end) in ranges {
        if *start < at {
            return Err(format!("its tensors overlap at byte {start}"));
        }
        is_dense &= *start == at;
        at = *end;
    }
    Ok((at, is_dense))
}

/// A tensor in a safetensors header.
#[derive(Deserialize)]
struct Tensor {
    dtype: String,
    shape: Product,
    data_offsets: (u64, u64),
}

/// The product of a list, which is not kept.
struct Product(u128);

impl<'de> Deserialize<'de> for Product {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Factors;
        impl<'de> Visitor<'de> for Factors {
            type Value = Product;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of sizes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut factors: A) -> Result<Product, A::Error> {
                let mut product = 1_u128;
                while let Some(factor) = factors.next_element::<u64>()? {
                    product = product.saturating_mul(factor.into());
                }
                Ok(Product(product))
            }
        }
        deserializer.deserialize_seq(Factors)
    }
}

/// Hands each tensor of a header to its function.
struct Tensors<F>(F);

impl<'de, F: FnMut(&str, Tensor) -> Result<(), String>> Visitor<'de> for Tensors<F> {
    type Value = ();
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let tensor = map.next_value::<Tensor>()?;
            (self.0)(&name, tensor).map_err(A::Error::custom)?;
        }
        Ok(())
    }
}

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ElementType {
    Plain,
    /// 32 bits or more, which an engine loads in 16.
    WideFloat,
    /// Several parameters in one element, or a type that is not known.
    Packed,
}

impl ElementType {
    fn of(dtype: &str, bits: Option<u64>) -> Self {
        let is_float = dtype.contains('F');
        match bits {
            Some(32..) if is_float => Self::WideFloat,
            // Positions, masks and the like.
            Some(64..) => Self::Plain,
            Some(8..) if is_float || dtype == "BOOL" => Self::Plain,
            _ => Self::Packed,
        }
    }
}

/// Bits of a safetensors type; `None` for one that is not known.
fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// Types of GGUF's tensors: number, elements of a block, and its bytes.
const GGML_TYPES: [(u32, u32, u32); 34] = [
    (0, 1, 4),
    (1, 1, 2),
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (9, 32, 36),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
    (15, 256, 292),
    (16, 256, 66),
    (17, 256, 74),
    (18, 256, 98),
    (19, 256, 50),
    (20, 32, 18),
    (21, 256, 110),
    (22, 256, 82),
    (23, 256, 136),
    (24, 1, 1),
    (25, 1, 2),
    (26, 1, 4),
    (27, 1, 8),
    (28, 1, 8),
    (29, 256, 56),
    (30, 1, 2),
    (34, 256, 54),
    (35, 256, 66),
    (39, 32, 17),
    (40, 64, 36),
    (41, 128, 18),
];

/// Names of a GGUF file's metadata, after its architecture, and of the same in a `config.json`.
const GGUF_FIELDS: &[(&str, &str)] = &[
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("context_length", "max_position_embeddings"),
    ("vocab_size", "vocab_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.value_length", "v_head_dim"),
    ("attention.key_length_mla", "key_length_mla"),
    ("attention.value_length_mla", "value_length_mla"),
    ("attention.q_lora_rank", "q_lora_rank"),
    ("attention.kv_lora_rank", "kv_lora_rank"),
    ("attention.sliding_window", "sliding_window"),
    ("rope.dimension_count", "qk_rope_head_dim"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    (
        "expert_shared_feed_forward_length",
        "shared_intermediate_size",
    ),
    ("expert_shared_count", "n_shared_experts"),
    ("leading_dense_block_count", "first_k_dense_replace"),
    ("nextn_predict_layers", "num_nextn_predict_layers"),
    ("ssm.conv_kernel", "ssm.conv_kernel"),
    ("split.count", "split.count"),
];

/// More than the largest vocabularies take.
const MAX_GGUF_HEADER_BYTES: u64 = 256 << 20;
/// Maximum length of a name or a value that is kept, in bytes, and of a list of numbers.
const MAX_KEPT: u64 = 4096;

/// A GGUF header, and how many bytes of it have been read.
struct Gguf<R>(R, u64);

impl<R: Read> Gguf<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], CheckpointError> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        self.1 += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, CheckpointError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, CheckpointError> {
        self.bytes().map(u64::from_le_bytes)
    }

    fn skip(&mut self, count: u64) -> Result<(), CheckpointError> {
        let skipped = copy(&mut self.0.by_ref().take(count), &mut sink())?;
        self.1 += skipped;
        if skipped == count {
            Ok(())
        } else {
            Err(CheckpointError::Truncated)
        }
    }

    /// A text; of a long one only its beginning.
    fn string(&mut self) -> Result<String, CheckpointError> {
        let length = self.u64()?;
        let kept = length.min(MAX_KEPT);
        let mut text = Vec::new();
        self.0.by_ref().take(kept).read_to_end(&mut text)?;
        self.1 += text.len() as u64;
        self.skip(length - text.len() as u64)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// A value of this type: of a list of texts how many there are, of a long list its beginning.
    fn value(&mut self, kind: u32, is_within_list: bool) -> Result<Value, CheckpointError> {
        Ok(match kind {
            0 | 7 => self.bytes::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            6 => self.u32().map(|_| Value::Null)?,
            8 => self.string()?.into(),
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.bytes()?).into(),
            12 => self.u64().map(|_| Value::Null)?,
            9 if !is_within_list => {
                let (kind, count) = (self.u32()?, self.u64()?);
                let mut numbers = Vec::new();
                for at in 0..count {
                    let value = self.value(kind, true)?;
                    if value.is_number() && at < MAX_KEPT {
                        numbers.push(value);
                    }
                }
                match numbers.is_empty() {
                    true => count.into(),
                    false => numbers.into(),
                }
            }
            _ => return Err(gguf_error(format!("a value has the unknown type {kind}"))),
        })
    }

    /// The metadata as fields of a `config.json`.
    fn metadata(&mut self, entries: u64) -> Result<Map<String, Value>, CheckpointError> {
        let mut fields = Map::new();
        let mut vocabulary = Value::Null;
        for _ in 0..entries {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind, false)?;
            let name = key.split_once('.').map_or(key.as_str(), |(_, rest)| rest);
            let known = GGUF_FIELDS
                .iter()
                .find(|(gguf, _)| *gguf == name || *gguf == key);
            match (key.as_str(), known) {
                ("general.architecture", _) => {
                    let name = value.as_str().map(Family::model_type_of_gguf);
                    fields.insert("model_type".into(), name.into());
                }
                ("tokenizer.ggml.tokens", _) => vocabulary = value,
                (_, Some((_, field))) => {
                    fields.insert((*field).to_owned(), value);
                }
                _ => {}
            }
        }
        fields.entry("vocab_size").or_insert(vocabulary);
        let number = |fields: &Map<String, Value>, name| fields.get(name).and_then(Value::as_u64);
        if fields.contains_key("kv_lora_rank") {
            let keys = number(&fields, "key_length_mla").or(number(&fields, "head_dim"));
            let nope = keys.zip(number(&fields, "qk_rope_head_dim"));
            if let Some((keys, rope)) = nope {
                fields.insert("qk_nope_head_dim".into(), keys.saturating_sub(rope).into());
            }
            if let Some(values) = number(&fields, "value_length_mla") {
                fields.insert("v_head_dim".into(), values.into());
            }
        }
        Ok(fields)
    }
}
