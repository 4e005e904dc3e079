//! Why a pod's request cannot be understood.

use super::requested::LONGEST_CONTAINER_NAME;
use super::{MAX_ANNOTATIONS, MAX_GPUS};
use crate::coded::coded;
use crate::units::{Bytes, QuantityError};
use crate::vocabulary::memory_fraction::LEAST_PER_GPU;

coded! {
    /// Why a pod cannot be understood. The text of [`RequestError::phrase`] never changes between two calls; the figures
    /// are in `Display`.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RequestError: &'static str {
        "no-vram" NoVram,
            "the pod asks for no stowage.dev/vram, and no device plugin for a GPU; list those resources, and \
         no others, under the extender's managedResources"
            => "pod asks for no stowage.dev/vram";
        "bad-quantity" Quantity { what: &'static str, text: String, error: QuantityError },
            "{what} is {text:?}: {error}"
            => "pod has a quantity that cannot be read";
        "unequal-request" UnequalRequest { container: String, resource: String },
            "the request of the container {container} and its limit differ in {resource}, which the API server refuses: write it under \
         resources.limits alone"
            => "a container's request and limit of a GPU resource differ";
        "both-ways" BothWays,
            "the pod asks for stowage.dev/vram and for nvidia.com/*; ask for one of them"
            => "pod asks for stowage.dev/vram and for nvidia.com/*";
        "several-resources" SeveralResources,
            "the pod asks for several of nvidia.com/*; ask for one resource, and as many of it as it needs"
            => "pod asks for several of nvidia.com/*";
        "bad-gpus" Gpus { text: String },
            "the annotation stowage.dev/gpus is {text:?}; write a whole number from 1 to {MAX_GPUS}"
            => "annotation stowage.dev/gpus is not a number of GPUs";
        "bad-exclusive" Exclusive { text: String },
            "the annotation stowage.dev/exclusive is {text:?}; write \"true\" or \"false\""
            => "annotation stowage.dev/exclusive is neither true nor false";
        "kv-cache-above-vram" KvCacheAboveVram { kv_cache: Bytes, vram: Bytes },
            "the annotation stowage.dev/kv-cache asks for {kv_cache} of the pod's {vram}; it is a part of it"
            => "annotation stowage.dev/kv-cache is more than stowage.dev/vram";
        "too-little-vram" TooLittleVram { container: String, vram: Bytes, gpus: u32, least: Bytes },
            "the container {container} asks for {vram} on {gpus} of the node's GPUs, and takes at least {LEAST_PER_GPU} of each: ask for \
         at least {least} (stowage.dev/gpus says on how many)"
            => "a container asks for too little stowage.dev/vram";
        "container-name" ContainerName { length: usize },
            "a container that asks for stowage.dev/vram has a name of {length} bytes; at most {LONGEST_CONTAINER_NAME} have a place in \
         the annotation that says its fraction"
            => "a container's name is too long";
        "annotations" Annotations { bytes: usize, added: usize },
            "the pod's annotations have {bytes} bytes, and its Binding may add {added}; the API server refuses every later write of \
         a pod with more than {MAX_ANNOTATIONS}: keep what is large in a ConfigMap"
            => "the pod's annotations leave no place for those of its Binding";
        "too-large" TooLarge,
            "the pod is larger than Stowage reads: it has more than 64 KiB of labels, more than 256 KiB of annotations, selectors, \
         ports and the like, or more than some 70 containers and volumes"
            => "the pod is larger than Stowage reads";
        "bad-model" Model(error: crate::ids::InvalidName),
            "the model's name is not usable: {error}"
            => "the model's name is not usable";
    }
}

impl RequestError {
    /// The text that kube-scheduler writes into the pod's condition. It has no figures: a text that changed would requeue the pod
    /// again and again.
    pub fn phrase(&self) -> &'static str {
        self.entry()
    }
}

impl From<crate::ids::InvalidName> for RequestError {
    fn from(error: crate::ids::InvalidName) -> Self {
        Self::Model(error)
    }
}
