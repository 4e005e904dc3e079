//! What a policy classifies a pod by, and the class and tenant that it has then.

use super::demand::Sharing;
use super::is_default;
use super::node_reading::EngineLoad;
use crate::units::{Bytes, Micros, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The most classes a policy may have: sets of them are 64-bit masks on every GPU.
pub const MAX_CLASSES: usize = 64;

/// The most tenants a policy may have.
pub(crate) const MAX_TENANTS: usize = u16::MAX as usize;

/// All that classes and tenants may look at. Annotations and the name are left out: labels, namespaces and priorities can
/// be guarded by admission, and replicas of one workload are classified once.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// `Policy::version` of the policy that says so.
    pub version: u64,
}

/// What a class asks of a GPU beside free VRAM, as decisions read it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassTerms {
    /// It profiles the GPU's memory at its start: two that do so at once break each other.
    pub engine: bool,
    pub kv_cache_limit: Option<Percent>,
    pub queue_limit: Option<u32>,
    /// It joins no engine that does not say how busy it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_unknown_load: bool,
    /// Whether the driver has to keep its pods within their VRAM.
    #[serde(default, skip_serializing_if = "is_default")]
    pub isolation: Isolation,
    /// How its pods share a GPU's compute where that can be said of each container.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compute: Option<ComputeMode>,
    /// The most that its engines shall take from one output token of a request to the next.
    #[serde(default, skip_serializing_if = "is_default")]
    pub max_time_per_token: Option<Micros>,
    /// It is kept in node pools: on a node that does not admit it, that is why.
    #[serde(default)]
    pub confined: bool,
    /// The classes it shares no GPU with, or that share none with it.
    pub class_exclusions: ClassSet,
    /// Its pods may have VRAM that engines lend.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub borrows: bool,
}

impl ClassTerms {
    /// Whether engines on a GPU are busier than these terms allow, or do not say how busy they are where the terms do not allow
    /// that.
    pub fn is_exceeded_by(&self, engine_load: EngineLoad) -> bool {
        exceeds(engine_load.occupancy(), self.kv_cache_limit)
            || exceeds(engine_load.queue, self.queue_limit)
            || self.rejects_unknown(engine_load)
    }

    /// Whether these terms refuse a load because it is not known. One that is too old to count is the policy's `telemetry` to
    /// judge.
    pub fn rejects_unknown(&self, engine_load: EngineLoad) -> bool {
        self.refuses_unknown_load && engine_load.partial
    }
}

fn exceeds<T: PartialOrd>(measured: Option<T>, limit: Option<T>) -> bool {
    measured
        .zip(limit)
        .is_some_and(|(measured, limit)| measured > limit)
}

/// Whether the driver has to keep the pods of a class within the VRAM that they were granted. It can where gpu-fractioning is
/// ready, on whole GPUs; a pod that has its GPUs exclusively needs no such limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// They are placed only where it does.
    Required,
    /// It does where it can.
    Preferred,
    /// It does not.
    #[default]
    None,
}

/// How containers share a GPU's compute, in gpu-fractioning's words.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum ComputeMode {
    /// They take turns.
    TimeSlicing,
    /// Their kernels run beside each other, by an MPS server.
    SmSharing,
}

/// A class, by its index in its policy.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u8")]
pub struct ClassId(u8);

/// The class of a stored state that no policy has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("class {0}: a policy has at most {MAX_CLASSES}")]
pub struct NoSuchClass(u8);

/// A set of a policy's classes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClassSet(#[serde(with = "super::bits")] u64);

impl TryFrom<u8> for ClassId {
    type Error = NoSuchClass;

    fn try_from(index: u8) -> Result<Self, NoSuchClass> {
        if usize::from(index) < MAX_CLASSES {
            Ok(Self(index))
        } else {
            Err(NoSuchClass(index))
        }
    }
}

impl ClassId {
    /// The class at this index of its policy, of which there are at most [`MAX_CLASSES`].
    pub fn from_index(index: usize) -> Self {
        debug_assert!(index < MAX_CLASSES);
        Self(index as u8)
    }

    pub fn index(self) -> usize {
        self.0.into()
    }
}

impl ClassSet {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(u64::MAX);

    pub fn contains(self, class: ClassId) -> bool {
        self.0 >> class.0 & 1 == 1
    }

    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<ClassId> for ClassSet {
    fn from_iter<I: IntoIterator<Item = ClassId>>(classes: I) -> Self {
        Self(classes.into_iter().fold(0, |set, class| set | 1 << class.0))
    }
}

/// A tenant, by its index in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantId(u16);

impl TenantId {
    /// The tenant at this index of its policy, of which there are at most [`MAX_TENANTS`].
    pub fn from_index(index: usize) -> Self {
        debug_assert!(index < MAX_TENANTS);
        Self(index as u16)
    }

    pub fn index(self) -> usize {
        self.0.into()
    }
}
