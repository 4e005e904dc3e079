//! Free VRAM that the current mix of demands cannot use, as FGD measures it (Weng, Yang et al., USENIX ATC 2023, §3): the
//! expectation over a pod drawn from the last ones that came. For a gauge, and never for a decision.
//!
//! To a pod that does not fit a node, all that is free there is of no use; to one that fits, what is free on the GPUs of which
//! each has too little for it. A cluster may be full without being fragmented, and half empty and of no use to most.

use super::usage::nodes;
use crate::ledger::Ledger;
use crate::placing::learned::DemandShape;
use crate::units::Bytes;
use crate::vocabulary::demand::{HostResources, Sharing};
use crate::vocabulary::gpu::{Gpu, Health};
use crate::vocabulary::node::{Node, NodeKind};

/// VRAM that is free and that pods like the latest could not use; nothing as long as none has come.
///
/// Costs a step for each GPU and each kind of demand that is remembered, of which a policy keeps a few thousand at most.
pub fn fragmented_vram(ledger: &Ledger) -> Bytes {
    let history = ledger.demand_history();
    let mut unusable: u128 = 0;
    for (node, _) in
        nodes(ledger).filter(|(node, _)| node.kind == NodeKind::Stowage && !node.closed)
    {
        let free: Bytes = node.gpus.iter().map(free_vram).sum();
        if free == Bytes::ZERO {
            continue;
        }
        for (shape, count) in history.demand_shapes() {
            unusable += u128::from(free.minus(usable_vram(node, shape)).0) * u128::from(count);
        }
    }
    let pods = history.len().max(1) as u128;
    Bytes(u64::try_from(unusable / pods).unwrap_or(u64::MAX))
}

/// The free VRAM on the GPUs of a node that a pod of this shape could use.
fn usable_vram(node: &Node, shape: &DemandShape) -> Bytes {
    if node
        .free_host
        .is_some_and(|free| exceeds(shape.host_resources, free))
    {
        return Bytes::ZERO;
    }
    let (mut fitting, mut free) = (0, Bytes::ZERO);
    for (gpu, device) in node.gpus.iter().zip(&*node.devices) {
        let may_run = shape.models.is_empty() || shape.models.contains(&device.model);
        let fits = free_vram(gpu) >= shape.per_gpu
            && (shape.sharing == Sharing::Shared || gpu.residents == 0);
        if may_run && fits {
            fitting += 1;
            free += free_vram(gpu);
        }
    }
    if fitting < shape.gpus {
        Bytes::ZERO
    } else {
        free
    }
}

fn exceeds(requested: HostResources, free: HostResources) -> bool {
    requested.cpu > free.cpu || requested.memory > free.memory
}

/// Free VRAM of a GPU; zero if it takes no pods.
fn free_vram(gpu: &Gpu) -> Bytes {
    let is_open = gpu.health == Health::Healthy && !gpu.exclusive;
    if is_open { gpu.free() } else { Bytes::ZERO }
}

#[cfg(test)]
mod tests;
