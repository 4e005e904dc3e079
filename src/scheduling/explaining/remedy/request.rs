//! Changes of the pod's request that would make it fit: less VRAM, another number of GPUs, sharing with other pods. A changed
//! request may belong to another class, so it is reclassified.

use super::{RemedyChange, best_placement, candidate_on, fitting_gpus, needs_empty_gpus};
use crate::explaining::classification::requested_vram;
use crate::explaining::facts::Facts;
use crate::placing::fit::{check_node_admission, is_usable};
use crate::policy::Policy;
use crate::units::Bytes;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::gpu::Gpu;
use std::cmp::Reverse;
use std::sync::Arc;

/// Numbers of GPUs that engines can be split over: heads and layers are powers of two more often than not.
const GPU_COUNTS: [u32; 5] = [1, 2, 4, 8, 16];

pub(crate) fn other_requests(facts: &Facts) -> impl Iterator<Item = RemedyChange> {
    // It is unknown how much of a GPU a device is.
    let asks_vram = !facts.demand().is_allocated_externally();
    let all = asks_vram.then(|| [request_less(facts), change_gpu_count(facts), share(facts)]);
    all.into_iter().flatten().flatten()
}

/// The largest amount that fits somewhere now, in whole units that a person would write.
fn request_less(facts: &Facts) -> Option<RemedyChange> {
    let demand = facts.demand();
    let nodes = facts
        .queried_indices()
        .map(|node_index| (node_index, &facts.snapshot.nodes()[node_index]));
    let offers = nodes
        .filter(|(_, node)| check_node_admission(node, demand).is_ok())
        .filter_map(|(node_index, node)| {
            Some((max_free_per_gpu(&node.gpus, demand)?, Reverse(node_index)))
        });
    let (per_gpu, Reverse(node_index)) = offers.max()?;
    let most = per_gpu
        .times(demand.gpus.into())
        .min(facts.allowance.vram.unwrap_or(Bytes(u64::MAX)));
    let vram = rounded_down(most);
    let requested = requested_vram(demand);
    if vram == Bytes::ZERO
        || vram >= requested
        || demand.kv_cache.is_some_and(|kv_cache| kv_cache > vram)
    {
        return None;
    }
    let less = with_request(demand, &facts.policy, vram, demand.gpus, demand.sharing);
    let node = &facts.snapshot.nodes()[node_index];
    let gpus = fitting_gpus(node, &less, facts.allowance)?;
    Some(RemedyChange::RequestLess {
        gpu_candidate: candidate_on(node, gpus),
        vram_bytes: vram,
        instead_of_bytes: requested,
    })
}

/// The VRAM that is free on each of the GPUs, if as many are chosen as the demand wants, whatever its size.
fn max_free_per_gpu(gpus: &[Gpu], demand: &Demand) -> Option<Bytes> {
    let is_usable = |gpu: &&Gpu| {
        is_usable(gpu, demand)
            && gpu.admits(demand)
            && !gpu.exclusive
            && (!needs_empty_gpus(demand) || gpu.residents == 0)
    };
    let mut free: Vec<Bytes> = gpus.iter().filter(is_usable).map(Gpu::free).collect();
    free.sort_unstable_by_key(|free| Reverse(*free));
    free.get((demand.gpus as usize).checked_sub(1)?).copied()
}

/// Whole GiB, or whole MiB below one.
fn rounded_down(bytes: Bytes) -> Bytes {
    let unit = if bytes >= Bytes::gib(1) {
        1 << 30
    } else {
        1 << 20
    };
    Bytes(bytes.0 / unit * unit)
}

/// The next larger number of GPUs over which the pod fits, or the next smaller one.
fn change_gpu_count(facts: &Facts) -> Option<RemedyChange> {
    let demand = facts.demand();
    let vram = requested_vram(demand);
    let more = GPU_COUNTS.into_iter().filter(|count| *count > demand.gpus);
    let fewer = GPU_COUNTS
        .into_iter()
        .rev()
        .filter(|count| *count < demand.gpus);
    more.chain(fewer).find_map(|gpus| {
        let other = with_request(demand, &facts.policy, vram, gpus, demand.sharing);
        let (node_index, chosen) = best_placement(facts, &other, facts.allowance)?;
        let gpu_candidate = candidate_on(&facts.snapshot.nodes()[node_index], chosen);
        Some(RemedyChange::ChangeGpuCount {
            gpu_candidate,
            gpus,
            instead_of: demand.gpus,
        })
    })
}

fn share(facts: &Facts) -> Option<RemedyChange> {
    let demand = facts.demand();
    if !needs_empty_gpus(demand) {
        return None;
    }
    let shared = with_request(
        demand,
        &facts.policy,
        requested_vram(demand),
        demand.gpus,
        Sharing::Shared,
    );
    let (node_index, gpus) = best_placement(facts, &shared, facts.allowance)?;
    Some(RemedyChange::Share {
        gpu_candidate: candidate_on(&facts.snapshot.nodes()[node_index], gpus),
    })
}

/// The demand of the pod with this request instead, reclassified.
fn with_request(
    demand: &Demand,
    policy: &Policy,
    vram: Bytes,
    gpus: u32,
    sharing: Sharing,
) -> Demand {
    let traits = PodTraits {
        vram,
        gpus,
        sharing,
        ..(*demand.traits).clone()
    };
    reclassified(
        Demand {
            per_gpu: vram.split(gpus),
            gpus,
            sharing,
            ..demand.clone()
        },
        traits,
        policy,
    )
}

/// The demand of the pod with a request for this many devices, reclassified.
pub fn with_devices(
    demand: &Demand,
    policy: &Policy,
    resource: &PluginResource,
    count: u32,
) -> Demand {
    let traits = PodTraits {
        gpus: count,
        ..(*demand.traits).clone()
    };
    let ask = GpuRequest::Plugin {
        resource: resource.clone(),
        count,
    };
    reclassified(
        Demand {
            ask,
            gpus: count,
            ..demand.clone()
        },
        traits,
        policy,
    )
}

/// The demand of the pod with another priority, reclassified.
pub(crate) fn with_priority(demand: &Demand, policy: &Policy, priority: i32) -> Demand {
    let traits = PodTraits {
        priority,
        ..(*demand.traits).clone()
    };
    reclassified(
        Demand {
            priority,
            may_preempt: true,
            ..demand.clone()
        },
        traits,
        policy,
    )
}

fn reclassified(mut demand: Demand, traits: PodTraits, policy: &Policy) -> Demand {
    demand.reclassify(policy.classify(&traits));
    demand.traits = Arc::new(traits);
    demand
}
