//! A pod's shorthand, parsed by the same function as a pod's manifest.

use crate::file::PodSketch;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::demand::{
    ContainerRequest, DEFAULT_GRACE_PERIOD, Demand, PluginAmount, PodRequest, RequestError,
};
use stowage_scheduling::vocabulary::device_plugin::PluginResource;

pub fn demand_from_shorthand(pod: &PodSketch, policy: &Policy) -> Result<Demand, RequestError> {
    let vram = pod.vram.map(|vram| vram.0.0.to_string());
    let kv_cache = pod.kv_cache.map(|kv_cache| kv_cache.0.0.to_string());
    let gpus = pod.gpus.map(|gpus| gpus.to_string());
    let exclusive = pod.exclusive.map(|exclusive| exclusive.to_string());
    let labels: BTreeMap<String, String> = pod
        .labels
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.0.clone()))
        .collect();
    let mut resources: BTreeSet<&str> = pod
        .resources
        .iter()
        .flatten()
        .map(|name| name.0.as_str())
        .collect();
    resources.extend(vram.is_some().then_some(VRAM));
    let devices = pod.gpus.unwrap_or(1).to_string();
    let plugin = resources
        .iter()
        .copied()
        .find(|name| PluginResource::is_plugin_resource(name));
    let container = ContainerRequest {
        vram: vram.as_deref(),
        plugin: plugin.map_or(PluginAmount::None, |resource| PluginAmount::One {
            resource,
            amount: &devices,
        }),
        ..ContainerRequest::plain("main")
    };
    Demand::from_pod(
        &PodRequest {
            namespace: pod
                .namespace
                .as_ref()
                .map_or("default", |name| name.0.as_str()),
            labels: &labels,
            priority_class: pod.priority_class.as_ref().map(|name| name.0.as_str()),
            priority: pod.priority.unwrap_or(0),
            may_preempt: true,
            grace: pod.grace.map_or(DEFAULT_GRACE_PERIOD, |grace| grace.0),
            containers: &[container],
            gpus: gpus.as_deref().filter(|_| plugin.is_none()),
            exclusive: exclusive.as_deref(),
            model: pod.model.as_deref(),
            kv_cache: kv_cache.as_deref(),
            service_account: pod.service_account.as_ref().map(|name| name.0.as_str()),
            resources: &resources,
        },
        policy,
    )
}

/// The resource name of VRAM.
const VRAM: &str = "stowage.dev/vram";
