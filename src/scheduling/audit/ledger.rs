//! The audit of the ledger: recomputes its sums from nothing but the pods, and compares them with what the ledger says.
//!
//! It shares no arithmetic with the ledger: a mistake there would have to be made twice to pass.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, PodState};
use crate::units::{Bytes, plural};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::gpu::{Device, Health};
use crate::vocabulary::node::Node;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A violated invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Violation {
    #[error("{node} {gpu}: {reserved} of {capacity} are allocated")]
    OverPromised {
        node: NodeName,
        gpu: GpuUuid,
        reserved: Bytes,
        capacity: Bytes,
    },
    #[error("{node} {gpu}: {pod} is exclusive and shares the GPU with {}", plural(*others, "pod"))]
    ExclusiveShared {
        node: NodeName,
        gpu: GpuUuid,
        pod: PodKey,
        others: usize,
    },
    #[error("{node} {gpu}: the ledger has {recorded} allocated, the pods add up to {added_up}")]
    ChargesDiffer {
        node: NodeName,
        gpu: GpuUuid,
        recorded: Bytes,
        added_up: Bytes,
    },
    #[error("{node} {resource}: the ledger has {recorded} in use, the pods add up to {added_up}")]
    DevicesDiffer {
        node: NodeName,
        resource: PluginResource,
        recorded: u32,
        added_up: u32,
    },
    #[error("{node}: the ledger has pods that ask for {recorded}, the pods add up to {added_up}")]
    AskedForDiffers {
        node: NodeName,
        recorded: Bytes,
        added_up: Bytes,
    },
    #[error("the ledger has {recorded:?} as what all nodes have, they add up to {added_up:?}")]
    WholeDiffers {
        recorded: TenantUsage,
        added_up: TenantUsage,
    },
    #[error("the ledger has {} in {group}, {shown} show that they are", plural(*recorded, "pod"))]
    GroupsDiffer {
        group: GroupKey,
        recorded: usize,
        shown: usize,
    },
}

/// A node's GPUs.
#[derive(Clone, Copy)]
struct NodeGpus<'a> {
    name: &'a NodeName,
    devices: &'a [Device],
    /// The agent has listed all that there are: others are lost.
    are_all: bool,
}

/// One pod's charge on one GPU.
struct GpuCharge<'a> {
    pod_state: &'a PodState,
    amount: Bytes,
    is_placed: bool,
}

/// Every violated invariant, in order of node and GPU. Pods that another scheduler bound without naming GPUs are charged, but
/// Stowage did not allocate that VRAM: they cannot violate an invariant.
pub fn audit(ledger: &Ledger) -> Vec<Violation> {
    let all = ledger.pod_states();
    let mut by_node: BTreeMap<&NodeName, BTreeMap<&PodUid, &PodState>> = BTreeMap::new();
    for (uid, pod_state) in &all {
        for node in pod_state
            .node()
            .into_iter()
            .chain(pod_state.reservation().map(|reservation| &reservation.node))
        {
            by_node.entry(node).or_default().insert(uid, pod_state);
        }
    }
    let mut violations = Vec::new();
    for (name, node) in ledger.node_views() {
        let pod_states = by_node.remove(name).unwrap_or_default();
        let gpus = NodeGpus {
            name,
            devices: &node.devices,
            are_all: ledger.lists_all_devices(name),
        };
        for (index, device) in node.devices.iter().enumerate() {
            let capacity = device.capacity(&ledger.policy().headroom);
            let parts: Vec<GpuCharge<'_>> = pod_states
                .values()
                .filter_map(|pod_state| charge_on(pod_state, gpus, device, capacity))
                .collect();
            let reserved = reserved_vram(&pod_states, gpus, device, capacity);
            let added_up = parts.iter().map(|part| part.amount).sum::<Bytes>() + reserved;
            let recorded = node.gpus[index].charged;
            if recorded != added_up {
                let gpu = device.uuid.clone();
                violations.push(Violation::ChargesDiffer {
                    node: name.clone(),
                    gpu,
                    recorded,
                    added_up,
                });
            }
            if device.health != Health::Lost {
                check_capacity(name, device, capacity, &parts, &mut violations);
            }
        }
        check_devices(name, node, &pod_states, &mut violations);
        check_asked_for(ledger, name, &pod_states, &mut violations);
    }
    check_groups(ledger, &all, &mut violations);
    check_cluster_capacity(ledger, &mut violations);
    violations
}

fn check_cluster_capacity(ledger: &Ledger, violations: &mut Vec<Violation>) {
    let existing = ledger
        .node_views()
        .filter(|(name, _)| ledger.has_node(name));
    let (recorded, added_up) = (
        ledger.cluster_total(),
        existing.map(|(_, node)| node.quota_capacity()).sum(),
    );
    if recorded != added_up {
        violations.push(Violation::WholeDiffers { recorded, added_up });
    }
}

/// Checks that what the node's pods ask for together agrees with what kube-scheduler counts.
fn check_asked_for(
    ledger: &Ledger,
    name: &NodeName,
    pod_states: &BTreeMap<&PodUid, &PodState>,
    violations: &mut Vec<Violation>,
) {
    let here = pod_states
        .values()
        .filter(|pod_state| pod_state.node() == Some(name));
    let requested = here.map(|pod_state| {
        pod_state
            .demand
            .per_gpu
            .times(u64::from(pod_state.demand.gpus))
    });
    let (recorded, added_up) = (ledger.requested_on(name), requested.sum());
    if recorded != added_up {
        violations.push(Violation::AskedForDiffers {
            node: name.clone(),
            recorded,
            added_up,
        });
    }
}

/// Checks that the group index agrees with what the pods show.
fn check_groups(
    ledger: &Ledger,
    all: &BTreeMap<&PodUid, &PodState>,
    violations: &mut Vec<Violation>,
) {
    let mut shown: BTreeMap<&GroupKey, BTreeSet<&PodUid>> = BTreeMap::new();
    for (uid, pod_state) in all {
        if let Some(group) = &pod_state.disruption_info.group {
            shown.entry(group).or_default().insert(uid);
        }
    }
    for (group, recorded) in ledger.groups() {
        let shown = shown.remove(group).unwrap_or_default();
        if !recorded.iter().eq(shown.iter().copied()) {
            let (group, recorded) = (group.clone(), recorded.len());
            violations.push(Violation::GroupsDiffer {
                group,
                recorded,
                shown: shown.len(),
            });
        }
    }
    violations.extend(
        shown
            .into_iter()
            .map(|(group, shown)| Violation::GroupsDiffer {
                group: group.clone(),
                recorded: 0,
                shown: shown.len(),
            }),
    );
}

fn check_capacity(
    name: &NodeName,
    device: &Device,
    capacity: Bytes,
    parts: &[GpuCharge<'_>],
    violations: &mut Vec<Violation>,
) {
    let placed: Vec<&GpuCharge<'_>> = parts.iter().filter(|part| part.is_placed).collect();
    let (node, gpu) = (|| name.clone(), || device.uuid.clone());
    // What pods borrow is charged to engines, too. How much these may lend only reports show, so that here neither the
    // lenders' promises nor the loans may exceed the GPU.
    for borrows in [false, true] {
        let alike = placed
            .iter()
            .filter(|part| part.pod_state.borrows() == borrows);
        let reserved: Bytes = alike.map(|part| part.amount).sum();
        if reserved > capacity {
            violations.push(Violation::OverPromised {
                node: node(),
                gpu: gpu(),
                reserved,
                capacity,
            });
        }
    }
    let exclusive = placed
        .iter()
        .find(|part| part.pod_state.demand.sharing == Sharing::Exclusive);
    if let Some(part) = exclusive.filter(|_| placed.len() > 1) {
        let pod = part.pod_state.key.clone();
        violations.push(Violation::ExclusiveShared {
            node: node(),
            gpu: gpu(),
            pod,
            others: placed.len() - 1,
        });
    }
}

/// Checks a device plugin's node: each resource that the node or a pod there names.
fn check_devices(
    name: &NodeName,
    node: &Node,
    pod_states: &BTreeMap<&PodUid, &PodState>,
    violations: &mut Vec<Violation>,
) {
    let mut added_up: BTreeMap<PluginResource, u32> = node
        .plugin
        .iter()
        .map(|share| (share.resource.clone(), 0))
        .collect();
    for pod_state in pod_states
        .values()
        .filter(|pod_state| pod_state.node() == Some(name))
    {
        if let GpuRequest::Plugin { resource, count } = &pod_state.demand.ask {
            let sum = added_up.entry(resource.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
    }
    for (resource, added_up) in added_up {
        let recorded = node
            .plugin
            .iter()
            .find(|share| share.resource == resource)
            .map_or(0, |share| share.used);
        if recorded != added_up {
            violations.push(Violation::DevicesDiffer {
                node: name.clone(),
                resource,
                recorded,
                added_up,
            });
        }
    }
}

fn charge_on<'a>(
    pod_state: &'a PodState,
    node: NodeGpus<'_>,
    device: &Device,
    capacity: Bytes,
) -> Option<GpuCharge<'a>> {
    if pod_state.node() != Some(node.name) || pod_state.demand.is_allocated_externally() {
        return None;
    }
    let named = pod_state
        .devices()
        .map(|uuids| uuids.iter().collect::<Vec<_>>())
        .unwrap_or_default();
    let mut distinct: Vec<&GpuUuid> = named
        .iter()
        .filter_map(|uuid| {
            let found = node.devices.iter().find(|device| is_named(device, uuid));
            found
                .map(|device| &device.uuid)
                .or_else(|| node.has_lost(uuid).then_some(*uuid))
        })
        .collect();
    distinct.sort_unstable();
    distinct.dedup();
    let is_placed = !named.is_empty() && distinct.len() == named.len();
    if is_placed && !distinct.contains(&&device.uuid) {
        return None;
    }
    let amount = if pod_state.demand.sharing == Sharing::Exclusive {
        capacity
    } else {
        pod_state.demand.per_gpu
    };
    // Where an agent found a foreign pod is where it counts, but Stowage did not allocate that VRAM.
    Some(GpuCharge {
        pod_state,
        amount,
        is_placed: is_placed && pod_state.recorded_devices().is_some(),
    })
}

/// VRAM that reservations keep of this GPU beyond what their victims still occupy there. A reservation with a GPU that no longer
/// exists keeps nothing.
fn reserved_vram(
    pod_states: &BTreeMap<&PodUid, &PodState>,
    node: NodeGpus<'_>,
    device: &Device,
    capacity: Bytes,
) -> Bytes {
    let exists = |uuid: &GpuUuid| node.devices.iter().any(|device| is_named(device, uuid));
    let holders = pod_states
        .values()
        .filter_map(|pod_state| Some((pod_state, pod_state.reservation()?)));
    let here = holders.filter(|(_, reservation)| {
        reservation.node == *node.name
            && reservation
                .devices
                .iter()
                .any(|uuid| is_named(device, uuid))
            && reservation.devices.iter().all(exists)
    });
    here.map(|(holder, reservation)| {
        let wanted = |pod_state: &PodState| match pod_state.demand.sharing {
            Sharing::Exclusive => capacity,
            Sharing::Shared => pod_state.demand.per_gpu,
        };
        let victims = reservation
            .victims
            .iter()
            .filter_map(|uid| pod_states.get(uid));
        // A victim of which it is not certain on which GPUs it is is counted on all of them, as everywhere.
        let still_there = victims.filter_map(|victim| charge_on(victim, node, device, capacity));
        wanted(holder).minus(still_there.map(|part| part.amount).sum())
    })
    .sum()
}

impl NodeGpus<'_> {
    /// Whether the GPU is none of those that the node has, and none that was cut. A slice may be of any card.
    fn has_lost(&self, uuid: &GpuUuid) -> bool {
        let is_card = uuid.index().is_none() && !uuid.is_slice();
        let is_cut = |device: &Device| device.parent.as_ref() == Some(uuid);
        self.are_all && is_card && !self.devices.iter().any(is_cut)
    }
}

/// Whether `name` means this device, by its UUID or, without one, by its index, which a lost device does not bear any more.
fn is_named(device: &Device, name: &GpuUuid) -> bool {
    let bears_index = device.parent.is_none() && device.health != Health::Lost;
    *name == device.uuid || (bears_index && name.index() == Some(device.index))
}
