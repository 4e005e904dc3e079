//! What the driver keeps a bound pod within: granted, in force and in use.

use super::explanation::{GpuLimitPart, LimitsPart};
use crate::ids::PodUid;
use crate::ledger::{Ledger, NodeState, PodState};
use crate::vocabulary::classification::Isolation;
use crate::vocabulary::demand::Sharing;

/// `None` unless the pod is bound, and either its class asks for limits or some are in force.
pub(crate) fn limits_in_force(
    ledger: &Ledger,
    uid: &PodUid,
    entry: &PodState,
) -> Option<LimitsPart> {
    let node = ledger.node(&entry.bound()?.node)?;
    let reading = ledger
        .node_state(&node.name)
        .and_then(NodeState::believed_reading);
    let demand = &entry.demand;
    let here = node.devices.iter().zip(node.gpus.iter());
    let here = here.filter(|(device, _)| {
        let own = entry.devices().map_or(&[][..], |devices| devices);
        own.contains(&device.uuid)
    });
    let gpus = here.map(|(device, gpu)| {
        let limit = reading.and_then(|reading| reading.limit_of(uid, &device.uuid));
        GpuLimitPart {
            uuid: device.uuid.clone(),
            index: device.index,
            granted_bytes: gpu.charge_for(demand.per_gpu, demand.sharing),
            total_bytes: device.total,
            limit_bytes: limit.and_then(|limit| limit.limit),
            guaranteed_bytes: limit.and_then(|limit| limit.guaranteed),
            used_bytes: reading.and_then(|reading| reading.gpu(&device.uuid)?.attributed_to(uid)),
        }
    });
    let mut gpus: Vec<GpuLimitPart> = gpus.collect();
    let asks = demand.terms.isolation != Isolation::None && demand.sharing == Sharing::Shared;
    let is_known = gpus.iter().any(|gpu| gpu.limit_bytes.is_some());
    let node_keeps_none = asks && !node.keeps_vram_limits;
    if node_keeps_none && !is_known {
        gpus.clear();
    }
    (asks || is_known).then_some(LimitsPart {
        node_keeps_none,
        gpus,
    })
}
