//! Finds the conflicts on one node: compares what its pods show with its GPUs. A pure function, which shares no arithmetic with
//! the ledger: a mistake there would have to be made twice to pass.

use super::audited_pod::{AuditedPod, Grant, ReservedShare};
use super::{OverAllocation, OverAllocationKind, Party, PartyRole};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::units::{Bytes, Moment};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::{Device, Health};
use std::collections::{BTreeMap, BTreeSet};

/// The pods of one node.
pub(crate) type NodePods = BTreeMap<PodUid, AuditedPod>;

/// A conflict as one check finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundOverAllocation {
    pub kind: OverAllocationKind,
    pub gpu: GpuUuid,
    /// The pods that were granted or keep a part of the GPU, in order of UID.
    pub parties: Vec<Party>,
    pub capacity: Option<Bytes>,
}

impl FoundOverAllocation {
    pub(crate) fn at_node(self, node: &NodeName) -> OverAllocation {
        let Self {
            kind,
            gpu,
            parties,
            capacity,
        } = self;
        OverAllocation {
            kind,
            node: node.clone(),
            gpu,
            parties,
            capacity,
        }
    }
}

/// A pod on a GPU, with the part that the check reads.
type PodsOnGpu<'a, T> = Vec<(&'a PodUid, &'a AuditedPod, &'a T)>;

/// One GPU, and the pods that were granted or keep a part of it.
#[derive(Default)]
struct AuditedGpu<'a> {
    /// `None` if the node does not list it.
    device: Option<&'a Device>,
    bound: PodsOnGpu<'a, Grant>,
    reservations: PodsOnGpu<'a, ReservedShare>,
}

/// Every conflict on a node with these GPUs, in order of GPU and kind. `devices` are as the node's agent reports them, or as
/// labels show them (then they are known by index alone), or empty.
pub(crate) fn find_over_allocations(
    devices: &[Device],
    pods: &NodePods,
    now: Moment,
) -> Vec<FoundOverAllocation> {
    let is_reported = devices.iter().any(|device| device.uuid.index().is_none());
    let mut found = Vec::new();
    for (name, gpu) in &pods_by_gpu(devices, pods, now) {
        match gpu.device {
            // Where only indices are known, it is unknown which GPU a UUID means.
            None if is_reported => found.extend(unknown_gpu(name, gpu)),
            None => found.extend(bound_over_allocation(name, gpu, None)),
            // Its pods keep their charge, and nothing on it runs as it should.
            Some(device) if device.health == Health::Lost => {}
            Some(device) => {
                let capacity =
                    Some(device.total.minus(device.reserved)).filter(|bytes| *bytes > Bytes::ZERO);
                let on_bound = bound_over_allocation(name, gpu, capacity);
                // Where bound pods already conflict, a reservation adds nothing.
                let is_sound = on_bound.is_none();
                found.extend(on_bound);
                found.extend(reservation_over_allocation(name, gpu, capacity, is_sound));
            }
        }
    }
    found
}

/// The pods by GPU, in order of the GPU's name.
fn pods_by_gpu<'a>(
    devices: &'a [Device],
    pods: &'a NodePods,
    now: Moment,
) -> BTreeMap<GpuUuid, AuditedGpu<'a>> {
    let mut gpus: BTreeMap<GpuUuid, AuditedGpu<'a>> = BTreeMap::new();
    for (uid, pod) in pods {
        let named: BTreeSet<&GpuUuid> = pod.gpus.iter().collect();
        let on: BTreeMap<&GpuUuid, Option<&Device>> = named
            .into_iter()
            .map(|name| {
                let mut meant = devices.iter().filter(|device| is_named(device, name));
                // A lost one may have had the index in an earlier machine.
                let present = meant.clone().find(|device| device.health != Health::Lost);
                let device = present.or_else(|| meant.next());
                (device.map_or(name, |device| &device.uuid), device)
            })
            .collect();
        for (name, device) in on {
            let gpu = gpus.entry(name.clone()).or_default();
            gpu.device = device;
            gpu.bound.extend(pod.grant().map(|grant| (uid, pod, grant)));
            gpu.reservations
                .extend(pod.active_reservation(now).map(|kept| (uid, pod, kept)));
        }
    }
    gpus
}

/// Whether `name` means this device, by its UUID or, without one, by its index.
fn is_named(device: &Device, name: &GpuUuid) -> bool {
    *name == device.uuid || (device.parent.is_none() && name.index() == Some(device.index))
}

/// Pods on a GPU that the node does not have.
fn unknown_gpu(name: &GpuUuid, gpu: &AuditedGpu<'_>) -> Option<FoundOverAllocation> {
    let parties = granted_parties(&gpu.bound);
    (!parties.is_empty()).then(|| FoundOverAllocation {
        kind: OverAllocationKind::UnknownGpu,
        gpu: name.clone(),
        parties,
        capacity: None,
    })
}

/// Conflicts of bound pods with each other.
fn bound_over_allocation(
    name: &GpuUuid,
    gpu: &AuditedGpu<'_>,
    capacity: Option<Bytes>,
) -> Option<FoundOverAllocation> {
    let parties = granted_parties(&gpu.bound);
    let kind = if gpu
        .bound
        .iter()
        .any(|(_, _, grant)| grant.sharing == Sharing::Exclusive)
    {
        // An exclusive pod was granted what was free, not what it requested: the sum says nothing.
        (parties.len() > 1).then_some(OverAllocationKind::ExclusiveShared)
    } else {
        let is_beyond = |borrows: bool| {
            let sum: Bytes = by_borrowing(&gpu.bound, borrows)
                .map(|(.., grant)| grant.per_gpu)
                .sum();
            capacity.is_some_and(|capacity| sum > capacity)
        };
        // How much a sleeping engine may lend shows in no record: neither the grants nor the loans may exceed the GPU.
        (is_beyond(false) || is_beyond(true)).then_some(OverAllocationKind::Overcommitted)
    };
    Some(FoundOverAllocation {
        kind: kind?,
        gpu: name.clone(),
        parties,
        capacity,
    })
}

/// Conflicts of reservations with each other, and with the bound pods that stay: those that are no victim of a reservation on
/// this GPU.
fn reservation_over_allocation(
    name: &GpuUuid,
    gpu: &AuditedGpu<'_>,
    capacity: Option<Bytes>,
    bound_is_sound: bool,
) -> Option<FoundOverAllocation> {
    let capacity = capacity?;
    if gpu.reservations.is_empty() {
        return None;
    }
    let reservations = reserving_parties(&gpu.reservations, capacity);
    let is_exclusive = reservations.iter().any(|party| party.role.is_exclusive());
    let kept: Bytes = reservations.iter().map(|party| party.bytes).sum();
    if reservations.len() > 1 && (is_exclusive || kept > capacity) {
        let kind = OverAllocationKind::ReservationsOverlap;
        return Some(FoundOverAllocation {
            kind,
            gpu: name.clone(),
            parties: reservations,
            capacity: Some(capacity),
        });
    }
    let leave: BTreeSet<&PodUid> = gpu
        .reservations
        .iter()
        .flat_map(|(_, _, kept)| kept.victims.iter())
        .collect();
    // What is lent comes back to its lender, not to a reservation.
    let lenders_and_others: PodsOnGpu<'_, Grant> =
        by_borrowing(&gpu.bound, false).copied().collect();
    let stay: Vec<Party> = granted_parties(&lenders_and_others)
        .into_iter()
        .filter(|party| !leave.contains(&party.uid))
        .collect();
    let stays: Bytes = stay.iter().map(|party| party.bytes).sum();
    let is_exclusive = is_exclusive || stay.iter().any(|party| party.role.is_exclusive());
    if !bound_is_sound || stay.is_empty() || !(is_exclusive || kept + stays > capacity) {
        return None;
    }
    let mut parties = [reservations, stay].concat();
    parties.sort_by(|a, b| a.uid.cmp(&b.uid));
    Some(FoundOverAllocation {
        kind: OverAllocationKind::ReservationOverBound,
        gpu: name.clone(),
        parties,
        capacity: Some(capacity),
    })
}

/// The pods that borrow, or those that do not.
fn by_borrowing<'a, 'b>(
    bound: &'b PodsOnGpu<'a, Grant>,
    borrows: bool,
) -> impl Iterator<Item = &'b (&'a PodUid, &'a AuditedPod, &'a Grant)> {
    bound
        .iter()
        .filter(move |(.., grant)| grant.borrows == borrows)
}

fn granted_parties(bound: &PodsOnGpu<'_, Grant>) -> Vec<Party> {
    let party = |(uid, pod, grant): &(&PodUid, &AuditedPod, &Grant)| {
        let role = if grant.sharing == Sharing::Exclusive {
            PartyRole::Exclusive
        } else {
            PartyRole::Shares
        };
        Party {
            uid: (*uid).clone(),
            key: pod.key.clone(),
            bytes: grant.per_gpu,
            role,
        }
    };
    bound.iter().map(party).collect()
}

fn reserving_parties(reservations: &PodsOnGpu<'_, ReservedShare>, capacity: Bytes) -> Vec<Party> {
    let party = |(uid, pod, kept): &(&PodUid, &AuditedPod, &ReservedShare)| {
        let (bytes, role) = match kept.sharing {
            Sharing::Exclusive => (capacity, PartyRole::HoldsExclusive),
            Sharing::Shared => (kept.per_gpu, PartyRole::Holds),
        };
        Party {
            uid: (*uid).clone(),
            key: pod.key.clone(),
            bytes,
            role,
        }
    };
    reservations.iter().map(party).collect()
}
