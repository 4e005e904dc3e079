//! A policy as it is stored with the core's state: what it was made from. Everything that follows from that is computed again, so
//! that a stored policy keeps the invariants of one that was read from files.

use super::{Class, Digest, Policy, PolicyError, Pool, Settings, Tenant, Window};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::BTreeSet;

#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredPolicy {
    version: u64,
    digest: Digest,
    #[serde(flatten)]
    settings: Settings,
    classes: Vec<Class>,
    tenants: Vec<Tenant>,
    pools: Vec<Pool>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    open_windows: BTreeSet<Window>,
}

impl From<Policy> for StoredPolicy {
    fn from(policy: Policy) -> Self {
        let Policy {
            version,
            digest,
            settings,
            classes,
            tenants,
            pools,
            open: open_windows,
            ..
        } = policy;
        Self {
            version,
            digest,
            settings,
            classes,
            tenants,
            pools,
            open_windows,
        }
    }
}

impl TryFrom<StoredPolicy> for Policy {
    type Error = PolicyError;

    fn try_from(stored: StoredPolicy) -> Result<Self, PolicyError> {
        let StoredPolicy {
            version,
            digest,
            settings,
            classes,
            tenants,
            pools,
            open_windows,
        } = stored;
        let settings_only = Self {
            version,
            digest,
            settings,
            ..Self::default()
        };
        let policy = settings_only
            .with_classes(classes)?
            .with_tenants(tenants)?
            .with_pools(pools)?;
        Ok(policy.with_open_windows(open_windows))
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
        u64::from_str_radix(&text, 16)
            .map(Self)
            .map_err(de::Error::custom)
    }
}
