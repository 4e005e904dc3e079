//! A policy as it is stored with the core's state: what it was made from. Everything that follows from that is computed again, so
//! that a stored policy keeps the invariants of one that was read from files.

use super::{Class, Digest, Policy, PolicyError, Pool, Settings, Tenant};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredPolicy {
    version: u64,
    digest: Digest,
    #[serde(flatten)]
    settings: Settings,
    classes: Vec<Class>,
    tenants: Vec<Tenant>,
    pools: Vec<Pool>,
}

impl From<Policy> for StoredPolicy {
    fn from(policy: Policy) -> Self {
        let Policy { version, digest, settings, classes, tenants, pools, .. } = policy;
        Self { version, digest, settings, classes, tenants, pools }
    }
}

impl TryFrom<StoredPolicy> for Policy {
    type Error = PolicyError;

    fn try_from(stored: StoredPolicy) -> Result<Self, PolicyError> {
        let StoredPolicy { version, digest, settings, classes, tenants, pools } = stored;
        let bare = Self { version, digest, settings, ..Self::default() };
        bare.with_classes(classes)?.with_tenants(tenants)?.with_pools(pools)
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Self).map_err(de::Error::custom)
    }
}
