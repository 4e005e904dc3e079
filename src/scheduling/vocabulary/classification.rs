//! What a pod shows of itself to be judged by, and what it is judged to be.

use super::demand::Sharing;
use crate::scheduling::policy::class::{ClassId, ClassTerms};
use crate::scheduling::policy::tenant::TenantId;
use crate::units::Bytes;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// All that classes and tenants may look at. Annotations and the name are left out: labels, namespaces and priorities can
/// be guarded by admission, and replicas of one workload are judged once.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct PodTraits {
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    /// Empty if it has none.
    pub priority_class: String,
    pub priority: i32,
    pub sharing: Sharing,
    /// Names of the resources its containers ask for.
    pub resources: BTreeSet<String>,
    pub gpus: u32,
    /// Over all its GPUs.
    pub vram: Bytes,
    pub kv_cache: Bytes,
    /// Empty if it names none.
    pub model: String,
    /// Empty if it names none.
    pub service_account: String,
}

impl Default for PodTraits {
    /// A pod of which nothing is known, on one GPU that it shares.
    fn default() -> Self {
        Self {
            namespace: "default".into(),
            labels: BTreeMap::new(),
            priority_class: String::new(),
            priority: 0,
            sharing: Sharing::Shared,
            resources: BTreeSet::new(),
            gpus: 1,
            vram: Bytes::ZERO,
            kv_cache: Bytes::ZERO,
            model: String::new(),
            service_account: String::new(),
        }
    }
}

/// What a policy says a pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classification {
    pub class: ClassId,
    pub terms: ClassTerms,
    pub tenant: Option<TenantId>,
    /// [`super::Policy::version`] of the policy that says so.
    pub version: u64,
}
