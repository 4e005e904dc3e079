//! Requests of pods that say nothing of themselves, for callers to fill in what theirs say. What a request means is not known
//! here.

use super::{ContainerRequest, ContainerRole, PluginAmount, PodRequest};
use crate::units::Millis;
use std::collections::{BTreeMap, BTreeSet};

/// What Kubernetes gives a pod that says nothing (`terminationGracePeriodSeconds`).
pub const DEFAULT_GRACE: Millis = Millis::seconds(30);

static NO_LABELS: BTreeMap<String, String> = BTreeMap::new();
static NO_RESOURCES: BTreeSet<&str> = BTreeSet::new();

impl<'a> ContainerRequest<'a> {
    /// A main container that asks for nothing.
    pub const fn plain(name: &'a str) -> Self {
        Self {
            name,
            role: ContainerRole::Main,
            vram: None,
            plugin: PluginAmount::None,
            cpu: None,
            memory: None,
        }
    }
}

impl<'a> PodRequest<'a> {
    /// A pod of priority 0 without labels and annotations.
    pub fn plain(namespace: &'a str, containers: &'a [ContainerRequest<'a>]) -> Self {
        Self {
            namespace,
            labels: &NO_LABELS,
            priority_class: None,
            priority: 0,
            may_preempt: true,
            grace: DEFAULT_GRACE,
            containers,
            gpus: None,
            exclusive: None,
            model: None,
            kv_cache: None,
            service_account: None,
            resources: &NO_RESOURCES,
        }
    }
}
