//! Remedies for a device plugin's pod: fewer devices, devices that are freed, or another node.

use super::request::with_devices;
use super::{RemedyChange, RemedyPlacement, best_placement, candidate_on};
use crate::explaining::facts::Facts;
use crate::explaining::nodes::NodeOutline;
use crate::placing::fit::{Misfit, check_node_admission};
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource, PluginShare};

pub(crate) fn other_devices(facts: &Facts, outline: &NodeOutline) -> Vec<RemedyChange> {
    let GpuRequest::Plugin { resource, count } = &facts.demand().ask else {
        return Vec::new();
    };
    let all = [
        fewer_devices(facts, resource, *count),
        free_devices(facts, outline, resource, *count),
    ];
    all.into_iter().flatten().collect()
}

/// The greatest number of devices that a node has left.
fn fewer_devices(facts: &Facts, resource: &PluginResource, requested: u32) -> Option<RemedyChange> {
    let open = facts
        .queried_indices()
        .map(|node_index| &facts.snapshot.nodes()[node_index]);
    let open = open.filter(|node| check_node_admission(node, facts.demand()).is_ok());
    let most = open
        .filter_map(|node| node.plugin_share_of(resource))
        .map(PluginShare::available)
        .max()?;
    let devices = most.min(requested - 1);
    let other = with_devices(facts.demand(), &facts.policy, resource, devices);
    let (node_index, gpus) =
        best_placement(facts, &other, facts.allowance).filter(|_| devices > 0)?;
    let gpu_candidate = candidate_on(&facts.snapshot.nodes()[node_index], gpus);
    Some(RemedyChange::FewerDevices {
        gpu_candidate,
        resource: resource.to_string(),
        devices,
        instead_of: requested,
    })
}

/// The node where the fewest devices would have to be freed.
fn free_devices(
    facts: &Facts,
    outline: &NodeOutline,
    resource: &PluginResource,
    requested: u32,
) -> Option<RemedyChange> {
    let lacking = |(node_index, misfit)| {
        let Misfit::DevicesInUse { left, .. } = misfit else {
            return None;
        };
        Some((requested - left, node_index))
    };
    let (missing, node_index) = outline
        .refused_and_queried(facts)
        .filter_map(lacking)
        .min()?;
    let gpu_candidate = RemedyPlacement {
        node: facts.snapshot.nodes()[node_index].name.clone(),
        gpus: Vec::new(),
    };
    Some(RemedyChange::FreeDevices {
        gpu_candidate,
        resource: resource.to_string(),
        missing,
    })
}
