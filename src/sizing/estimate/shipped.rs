//! Well-known models: the numbers of their `config.json`, as the files in `shipped/` have them.

use super::architecture::ModelArchitecture;
use super::config::{Config, ConfigError};
use super::quantization::Precision;
use stowage_policy_file::nearest::nearest;

/// A model by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShippedModel {
    pub name: &'static str,
    /// Its repository on Hugging Face.
    pub repository: &'static str,
    text: &'static str,
}

macro_rules! shipped {
    ($($name:literal $repository:literal)*) => {
        /// In order of name.
        pub const MODELS: &[ShippedModel] = &[$(ShippedModel {
            name: $name,
            repository: $repository,
            text: include_str!(concat!("shipped/", $name, ".json")),
        }),*];
    };
}

shipped! {
    "deepseek-v3" "deepseek-ai/DeepSeek-V3"
    "gemma-2-9b" "google/gemma-2-9b"
    "gemma-3-27b" "google/gemma-3-27b-it"
    "gpt-oss-120b" "openai/gpt-oss-120b"
    "gpt-oss-20b" "openai/gpt-oss-20b"
    "granite-4.0-h-small" "ibm-granite/granite-4.0-h-small"
    "jamba-1.5-mini" "ai21labs/AI21-Jamba-1.5-Mini"
    "llama-2-7b" "meta-llama/Llama-2-7b-hf"
    "llama-3.1-405b" "meta-llama/Llama-3.1-405B"
    "llama-3.1-405b-fp8" "RedHatAI/Meta-Llama-3.1-405B-Instruct-FP8-dynamic"
    "llama-3.1-70b" "meta-llama/Llama-3.1-70B"
    "llama-3.1-8b" "meta-llama/Llama-3.1-8B"
    "llama-3.3-70b-fp8" "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"
    "mistral-7b" "mistralai/Mistral-7B-v0.3"
    "mixtral-8x7b" "mistralai/Mixtral-8x7B-v0.1"
    "nemotron-h-8b" "nvidia/Nemotron-H-8B-Base-8K"
    "opt-13b" "facebook/opt-13b"
    "phi-4" "microsoft/phi-4"
    "qwen2.5-72b" "Qwen/Qwen2.5-72B"
    "qwen2.5-7b" "Qwen/Qwen2.5-7B"
    "qwen3-235b-a22b" "Qwen/Qwen3-235B-A22B"
    "qwen3-30b-a3b" "Qwen/Qwen3-30B-A3B"
    "qwen3-32b" "Qwen/Qwen3-32B"
    "qwen3-next-80b-a3b" "Qwen/Qwen3-Next-80B-A3B-Instruct"
}

/// Error: no model of this name is shipped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no model `{name}` is shipped{}; --list shows them, and a config.json of any other can be given as CONFIG",
    .near.map_or(String::new(), |near| format!("; did you mean `{near}`?"))
)]
pub struct UnknownModel {
    pub name: String,
    pub near: Option<&'static str>,
}

impl ShippedModel {
    /// Finds a model by name or repository.
    pub fn find(name: &str) -> Result<&'static Self, UnknownModel> {
        let is_named = |model: &&Self| {
            model.name.eq_ignore_ascii_case(name) || model.repository.eq_ignore_ascii_case(name)
        };
        MODELS.iter().find(is_named).ok_or_else(|| {
            let names: Vec<&'static str> = MODELS.iter().map(|model| model.name).collect();
            let near =
                nearest(name, &names).and_then(|near| names.iter().find(|name| **name == near));
            UnknownModel {
                name: name.to_owned(),
                near: near.copied(),
            }
        })
    }

    pub fn read(&self) -> Result<ModelArchitecture, ConfigError> {
        self.read_with_precision(None)
    }

    /// Reads the model with its weights in this precision instead of the file's.
    pub fn read_with_precision(
        &self,
        precision: Option<Precision>,
    ) -> Result<ModelArchitecture, ConfigError> {
        ModelArchitecture::read_with_precision(&Config::parse(self.text)?, precision)
    }
}
