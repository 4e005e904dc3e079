//! What the shipped admission policies make of a new pod, for those who have no API server to ask: the webhook that completes pods
//! before Kubernetes 1.36, and `stowage preflight`.
//!
//! No Kubernetes types: a parsed pod takes twenty times the memory of its text, and the API server sends many.

mod defaults;
mod pod;
mod rules;

pub use defaults::{PatchOp, debug_defaults, defaults, patch};
pub use pod::{AdmittedContainer, AdmittedMetadata, AdmittedPod, AdmittedSpec, Text};
pub use rules::{Creator, NamespaceFacts, Refusal, refusals};
