//! Inference engines: everything that Stowage knows of one, in one declaration.
//!
//! [`declared`] is the table, and nothing but a table. From it derive what the scanner of metrics pages reads
//! (`engine_metrics` of the package `report`), where a node's agent looks for an engine, which engine a pod's label or image names, the
//! table in the docs and the list of the admission policy that completes pods. Pure: it knows no metrics page, no pod and no cluster.

pub mod declared;

#[cfg(test)]
mod tests;

pub use declared::{DECLARATIONS, Engine, GATEWAYS};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// All that is known of one engine.
#[derive(Debug)]
pub struct EngineDeclaration {
    pub engine: Engine,
    /// Its name in reports, in metrics, and as the label `llm-d.ai/engine-type`.
    pub name: &'static str,
    /// Other spellings of the label.
    pub spellings: &'static [&'static str],
    /// Parts of an image's reference that show it.
    pub images: &'static [&'static str],
    /// The ports of its metrics page by default, and the page's path.
    pub ports: &'static [u16],
    pub path: &'static str,
    /// Its health endpoint, if it has one.
    pub health: Option<HealthEndpoint>,
    /// Another endpoint tells the size of its KV cache: llama.cpp's `/props`.
    pub has_props_endpoint: bool,
    pub dialects: &'static [Dialect],
    /// The versions of which pages were read.
    pub versions: &'static str,
}

#[derive(Debug, Clone, Copy)]
pub struct HealthEndpoint {
    /// Its port; `None` for that of the metrics page.
    pub port: Option<u16>,
    pub path: &'static str,
}

/// Names by which an engine's metrics go. A version or a wrapper that renames all of them has a dialect of its own.
#[derive(Debug)]
pub struct Dialect {
    /// The prefix of all its names. Empty, if other servers may print the names as well.
    pub prefix: &'static str,
    /// Without these quantities a page is not in this dialect, whatever else it has; only for a dialect without a prefix.
    pub required: &'static [MetricQuantity],
    /// The label that names the model it serves, in the order of preference.
    pub model_labels: &'static [&'static str],
    /// Names without the prefix.
    pub metrics: &'static [(&'static str, MetricReading)],
}

/// A server in front of engines, whose page has their figures: it is no engine itself, and whoever counted it as one would count
/// them twice or on the wrong GPU.
#[derive(Debug)]
pub struct Gateway {
    pub name: &'static str,
    /// Metrics that no engine has.
    pub metrics: &'static [&'static str],
}

/// The meaning of a number on a metrics page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricQuantity {
    /// The share of the KV cache in use, 0 to 1, even where a name says `percent`: a percentage is out of range, and unknown.
    KvUsage,
    /// The KV cache usage under the name of earlier versions; both exist while one name replaces the other.
    KvUsageOldName,
    /// The most tokens that the current batch may grow to, and the most that any batch may: their ratio is the KV cache's
    /// usage.
    BatchTokens,
    BatchTokensLimit,
    Waiting,
    /// The waiting requests that wait for free KV cache or for a slot in the batch. Others wait for something that no GPU has more of.
    WaitingForCapacity,
    /// Beside those of [`Self::Waiting`]: requests that wait before that queue, for KV cache on a decoding engine or for the
    /// decoding engine that will take them over.
    WaitingToDecode,
    WaitingToPrefill,
    Running,
    /// How often the engine has interrupted a request of its own for lack of KV cache; it only rises.
    Preemptions,
    /// Tokens that it has generated; it only rises, with some engines when a request ends.
    GeneratedTokens,
    /// Tokens of prompts that it has processed; it only rises.
    PromptTokens,
    /// Tokens the KV cache holds.
    KvTokens,
    /// Blocks of the KV cache, and the tokens of one: their product is the number of tokens it holds.
    KvBlocks,
    BlockTokens,
    /// Sleep flags: it accepts requests; its weights are in host memory (level 1); nothing is kept (level 2).
    Awake,
    WeightsOffloaded,
    AllDiscarded,
}

/// How a metric's samples are read.
#[derive(Debug, Clone, Copy)]
pub enum MetricReading {
    /// The value is the quantity.
    Value(MetricQuantity),
    /// This label decides which quantity the value is; samples with other label values are ignored.
    ByLabel(&'static str, &'static [(&'static str, MetricQuantity)]),
    /// The labels are the quantity, and the value is always 1.
    Labels(&'static [(&'static str, MetricQuantity)]),
    /// A histogram in seconds; the name is without `_sum`, `_count` and `_bucket`.
    Histogram(MeasuredLatency),
}

/// What an engine measures of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeasuredLatency {
    /// From one output token of a request to the next.
    PerToken,
    /// The same under the name of earlier versions; both exist while one name replaces the other.
    PerTokenOldName,
    /// From the arrival of a request to its first token.
    ToFirstToken,
}

impl Engine {
    pub const ALL: [Self; DECLARATIONS.len()] = {
        let mut all = [Self::Other; DECLARATIONS.len()];
        let mut index = 0;
        while index < all.len() {
            all[index] = DECLARATIONS[index].engine;
            index += 1;
        }
        all
    };

    pub fn declaration(self) -> &'static EngineDeclaration {
        &DECLARATIONS[self as usize]
    }

    pub fn name(self) -> &'static str {
        self.declaration().name
    }

    /// The engine that a label or the reference of an image names.
    pub fn from_text(text: &str) -> Self {
        let text = text.to_ascii_lowercase();
        let is_named = |one: &&EngineDeclaration| {
            one.name == text || one.spellings.iter().any(|name| *name == text)
        };
        let by_image = |one: &&EngineDeclaration| one.images.iter().any(|part| text.contains(part));
        // An image of one of the later ones names the engine that it runs, too.
        let named = DECLARATIONS
            .iter()
            .find(is_named)
            .or_else(|| DECLARATIONS.iter().rev().find(by_image));
        named.map_or(Self::Other, |one| one.engine)
    }
}

impl Serialize for Engine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// By any of its names: a recording may have that of an earlier version, or an engine that only a later one knows.
impl<'de> Deserialize<'de> for Engine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::from_text(&Cow::<str>::deserialize(deserializer)?))
    }
}
