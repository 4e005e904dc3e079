//! Why a pod's request cannot be understood.

use super::MAX_GPUS;
use crate::units::{Bytes, QuantityError};

/// Why a pod cannot be understood. The text of [`RequestError::phrase`] never changes between two calls; the figures
/// are in `Display`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(
        "the pod asks for no stowage.dev/vram, and no device plugin for a GPU; list those resources, and \
         no others, under the extender's managedResources"
    )]
    NoVram,
    #[error(
        "stowage.dev/vram is 0; ask for what the engine reserves, such as 40Gi, or leave the resource out"
    )]
    ZeroVram,
    #[error("{what} is {text:?}: {error}")]
    Quantity { what: &'static str, text: String, error: QuantityError },
    #[error("the pod asks for stowage.dev/vram and for nvidia.com/*; ask for one of them")]
    BothWays,
    #[error("the pod asks for 0 of a device plugin's GPUs; ask for one or more, or leave the resource out")]
    ZeroDevices,
    #[error("the pod asks for several of nvidia.com/*; ask for one resource, and as many of it as it needs")]
    SeveralResources,
    #[error("the annotation stowage.dev/gpus is {text:?}; write a whole number from 1 to {MAX_GPUS}")]
    Gpus { text: String },
    #[error("the annotation stowage.dev/exclusive is {text:?}; write \"true\" or \"false\"")]
    Exclusive { text: String },
    #[error(
        "the annotation stowage.dev/kv-cache asks for {kv_cache} of the pod's {vram}; it is a part of it"
    )]
    KvCacheAboveVram { kv_cache: Bytes, vram: Bytes },
    #[error("the model's name is not usable: {0}")]
    Model(#[from] crate::ids::InvalidName),
}

impl RequestError {
    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoVram => "no-vram",
            Self::ZeroVram => "zero-vram",
            Self::Quantity { .. } => "bad-quantity",
            Self::BothWays => "both-ways",
            Self::ZeroDevices => "zero-devices",
            Self::SeveralResources => "several-resources",
            Self::Gpus { .. } => "bad-gpus",
            Self::Exclusive { .. } => "bad-exclusive",
            Self::KvCacheAboveVram { .. } => "kv-cache-above-vram",
            Self::Model(_) => "bad-model",
        }
    }

    /// What goes on the wire: the scheduler writes it into the pod's condition, and a text that changed
    /// would wake the pod again and again.
    pub fn phrase(&self) -> &'static str {
        match self {
            Self::NoVram => "pod asks for no stowage.dev/vram",
            Self::ZeroVram => "pod asks for zero stowage.dev/vram",
            Self::Quantity { .. } => "pod has a quantity that cannot be read",
            Self::BothWays => "pod asks for stowage.dev/vram and for nvidia.com/*",
            Self::ZeroDevices => "pod asks for zero nvidia.com/*",
            Self::SeveralResources => "pod asks for several of nvidia.com/*",
            Self::Gpus { .. } => "annotation stowage.dev/gpus is not a number of GPUs",
            Self::Exclusive { .. } => "annotation stowage.dev/exclusive is neither true nor false",
            Self::KvCacheAboveVram { .. } => "annotation stowage.dev/kv-cache is more than stowage.dev/vram",
            Self::Model(_) => "the model's name is not usable",
        }
    }
}
