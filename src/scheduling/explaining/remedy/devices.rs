//! Remedies for a device plugin's pod: fewer devices, devices that are freed, or another node.

use super::request::with_devices;
use super::{GpuCandidate, RemedyChange, best_gpu_candidate, gpu_candidate};
use crate::ids::NodeName;
use crate::scheduling::explaining::facts::Facts;
use crate::scheduling::explaining::nodes::NodeOutline;
use crate::scheduling::placing::fit::{Misfit, check_node_admission};
use crate::scheduling::vocabulary::device_plugin::{Ask, PluginResource, PluginShare};
use std::cmp::Reverse;

pub fn other_devices(facts: &Facts, outline: &NodeOutline) -> Vec<RemedyChange> {
    let Ask::Plugin { resource, count } = &facts.demand().ask else { return Vec::new() };
    let all = [fewer(facts, resource, *count), free_some(facts, outline, resource, *count)];
    let too_many = too_many_for_any(facts, resource, *count);
    all.into_iter().flatten().chain(too_many).collect()
}

/// The greatest number of devices that a node has left.
fn fewer(facts: &Facts, resource: &PluginResource, asked: u32) -> Option<RemedyChange> {
    let open = facts.open_places().map(|place| &facts.snapshot.nodes()[place]);
    let open = open.filter(|node| check_node_admission(node, facts.demand()).is_ok());
    let most = open.filter_map(|node| node.share_of(resource)).map(PluginShare::left).max()?;
    let devices = most.min(asked - 1);
    let other = with_devices(facts.demand(), &facts.policy, resource, devices);
    let (place, gpus) = best_gpu_candidate(facts, &other, facts.allowance).filter(|_| devices > 0)?;
    let gpu_candidate = gpu_candidate(&facts.snapshot.nodes()[place], gpus);
    Some(RemedyChange::FewerDevices {
        gpu_candidate,
        resource: resource.to_string(),
        devices,
        instead_of: asked,
    })
}

/// The node where the fewest devices would have to be freed.
fn free_some(
    facts: &Facts,
    outline: &NodeOutline,
    resource: &PluginResource,
    asked: u32,
) -> Option<RemedyChange> {
    let lacking = |(place, misfit): (usize, Misfit)| match misfit {
        Misfit::DevicesInUse { left, .. } => Some((asked - left, place)),
        _ => None,
    };
    let (missing, place) = outline.refused_and_open(facts).filter_map(lacking).min()?;
    let gpu_candidate = GpuCandidate { node: facts.snapshot.nodes()[place].name.clone(), gpus: Vec::new() };
    Some(RemedyChange::FreeDevices { gpu_candidate, resource: resource.to_string(), missing })
}

/// No node offers as many devices, even without its pods.
fn too_many_for_any(facts: &Facts, resource: &PluginResource, asked: u32) -> Option<RemedyChange> {
    let offers = facts.snapshot.nodes().iter().map(|node| {
        let share = node.share_of(resource);
        (share.map_or(0, |share| share.allocatable), Reverse(&node.name))
    });
    let most: Option<(u32, Reverse<&NodeName>)> = offers.max().filter(|(most, _)| *most > 0);
    let node = most.map(|(_, Reverse(node))| node.clone());
    let most = most.map_or(0, |(most, _)| most);
    (most < asked).then(|| RemedyChange::NoNodeWithDevices {
        resource: resource.to_string(),
        asked,
        most,
        node,
    })
}
