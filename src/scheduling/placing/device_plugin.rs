//! Fit and score of nodes whose GPUs a device plugin hands out: the kubelet picks the GPU, so both are of whole nodes.

use super::engine_load_cost::EngineLoadCost;
use super::fit::Misfit;
use super::rank::{ScoreParts, WHOLE_PART, share_of_one_more, time_to_ready_part};
use super::start_model::StartModel;
use crate::policy::Policy;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::device_plugin::{Ask, PluginResource};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node::{Node, NodeKind};

/// Whether a node has `asked` devices left, if `leaving` of those in use were free.
pub fn has_devices(
    node: &Node,
    resource: &PluginResource,
    asked: u32,
    leaving: u32,
) -> Result<(), Misfit> {
    let share = node.share_of(resource);
    let allocatable = share.map_or(0, |share| share.allocatable);
    if allocatable == 0 && node.kind == NodeKind::Dra {
        // A DeviceClass may stand for the resource: kube-scheduler has found devices for it, or would not ask.
        return Ok(());
    }
    if allocatable < asked {
        return Err(Misfit::TooFewDevices { allocatable, asked });
    }
    let used = share.map_or(0, |share| share.used).saturating_sub(leaving);
    let left = allocatable.saturating_sub(used);
    if left < asked {
        Err(Misfit::DevicesInUse {
            left,
            allocatable,
            asked,
        })
    } else {
        Ok(())
    }
}

/// The score's parts for a pod that asks for `count` devices of a node. KV headroom is that of the calmest GPU an agent reports,
/// because the pod may get any; neither good nor bad where no agent does.
pub fn parts(node: &Node, demand: &Demand, starts: &StartModel, policy: &Policy) -> ScoreParts {
    let Ask::Plugin { resource, count } = &demand.ask else {
        return ScoreParts::default();
    };
    ScoreParts {
        packing: left_over(node, resource, *count),
        kv_headroom: least_loaded(node, demand).part(),
        time_to_ready: time_to_ready_part(node, GpuSet::EMPTY, demand, starts, policy),
        topology: if *count < 2 || is_one_island(node) {
            0
        } else {
            WHOLE_PART
        },
        spread: match &demand.model {
            Some(model) if policy.scoring.weights.spread > 0 => {
                share_of_one_more(node.replicas_of(model))
            }
            _ => 0,
        },
        // What depends on the GPU is not known before the kubelet picks it.
        ..ScoreParts::default()
    }
}

/// Of the node's devices, the part that would stay free.
fn left_over(node: &Node, resource: &PluginResource, count: u32) -> u32 {
    let Some(share) = node.share_of(resource) else {
        return 0;
    };
    let left = u64::from(share.left().saturating_sub(count));
    (left * u64::from(WHOLE_PART) / u64::from(share.allocatable.max(1))) as u32
}

/// The load of the GPU with the least.
pub(crate) fn least_loaded(node: &Node, demand: &Demand) -> EngineLoadCost {
    EngineLoadCost::least(node.gpus.iter(), demand)
}

/// Whether an agent says that all GPUs of the node reach each other over NVLink.
fn is_one_island(node: &Node) -> bool {
    let first = node.gpus.first().and_then(|gpu| gpu.island);
    first.is_some() && node.gpus.iter().all(|gpu| gpu.island == first)
}
