//! A lower bound on the GPUs that hold some pods, whatever places them: what no arrangement can go below.
//!
//! For pods that ask for VRAM it is the bound L2 of Martello and Toth for bin packing (Knapsack Problems, 1990, chapter 8): of
//! pods over half a GPU no two share one, and what they leave holds only so much of the rest. Classes that share no GPU are
//! bounded apart, exclusive GPUs are counted; slices of several sizes are bounded by the pods that fit on none below a size. For
//! device plugins slices are counted by memory, by compute and by profile. Nodes are
//! bounded by CPU, memory and other resources, and by pods that take several GPUs of one node.

use super::device_plugin::{PluginDevice, requested_devices};
use super::geometry::max_slices;
use super::question::{CapacityQuestion, NodeTemplate, PodToPlace};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use stowage_policy_file::format::mig::compute_slices;
use stowage_scheduling::units::{Bytes, plural};
use stowage_scheduling::vocabulary::classification::{ClassId, ClassTerms};
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::headroom::Headroom;

/// Lower bound on the nodes and GPUs that the pods need.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LowerBound {
    pub gpus: u32,
    pub nodes: u32,
    /// What the number of GPUs follows from, for people.
    pub because: Vec<String>,
}

/// Lower bound for these pods, by index in the question.
pub fn lower_bound(question: &CapacityQuestion, pods: &[usize]) -> LowerBound {
    lower_bound_with_kinds(&question.node_kinds, question, pods)
}

/// Lower bound with these kinds of nodes instead of the question's.
pub fn lower_bound_with_kinds(
    kinds: &[NodeTemplate],
    question: &CapacityQuestion,
    pods: &[usize],
) -> LowerBound {
    let pods = pods.iter().map(|index| &question.pods[*index]);
    let (plugin, vram): (Vec<&PodToPlace>, Vec<&PodToPlace>) =
        pods.partition(|pod| pod.demand.is_allocated_externally());
    if kinds.is_empty() {
        return LowerBound::default();
    }
    let (of_vram, of_plugin) = (
        vram_bound(&vram, kinds, &question.policy.headroom),
        plugin_bound(&plugin, kinds),
    );
    LowerBound {
        gpus: of_vram.gpus + of_plugin.gpus,
        nodes: of_vram.nodes + of_plugin.nodes,
        because: [of_vram.because, of_plugin.because].concat(),
    }
}

fn vram_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate], headroom: &Headroom) -> LowerBound {
    if pods.is_empty() {
        return LowerBound::default();
    }
    let sizes: Vec<Vec<Bytes>> = kinds
        .iter()
        .map(|kind| slice_capacities(kind, headroom))
        .collect();
    let distinct_sizes: BTreeSet<Bytes> = sizes.iter().flatten().copied().collect();
    let tier = |size: &Bytes| {
        tier_bound(
            pods,
            &sizes,
            *size,
            distinct_sizes.range(..*size).next_back().copied(),
        )
    };
    // On a tie the bound over all pods wins: its tier comes first.
    let by_tiers = distinct_sizes
        .iter()
        .rev()
        .map(tier)
        .max_by_key(|(gpus, _)| *gpus);
    let (mut gpus, mut because) = by_tiers.unwrap_or_default();
    let (by_sum, total) = sum_bound(pods, &sizes);
    if by_sum > gpus {
        (gpus, because) = (
            by_sum,
            vec![format!("{total} shared need {}", plural(by_sum, "GPU"))],
        );
    }
    let nodes = node_bound(pods, kinds).max(gpus.div_ceil(max_gpus_per_node(kinds)));
    let by_nodes = gpus_of_nodes(nodes, kinds);
    if by_nodes > gpus {
        because.push(nodes_reason(nodes));
    }
    LowerBound {
        gpus: gpus.max(by_nodes),
        nodes,
        because,
    }
}

/// GPUs for the pods that fit on no slice below that size, by the slices of a GPU that they fit on; and why.
fn tier_bound(
    pods: &[&PodToPlace],
    kinds: &[Vec<Bytes>],
    size: Bytes,
    smaller: Option<Bytes>,
) -> (u32, Vec<String>) {
    let is_tight = |pod: &&&PodToPlace| smaller.is_none_or(|smaller| pod.demand.per_gpu > smaller);
    let pods: Vec<&PodToPlace> = pods.iter().filter(is_tight).copied().collect();
    let capacity = kinds.iter().flatten().max().copied().unwrap_or_default();
    let slices = kinds
        .iter()
        .map(|sizes| sizes.iter().filter(|other| **other >= size).count())
        .max();
    let slices = slices.unwrap_or(1).max(1) as u32;
    let exclusive_gpus: u32 = with_sharing(&pods, Sharing::Exclusive)
        .map(|pod| pod.demand.gpus)
        .sum();
    let shared: Vec<(u32, Bytes)> = sharing_groups(&pods)
        .iter()
        .map(|group| group_bound(group, capacity))
        .collect();
    let needed = exclusive_gpus + shared.iter().map(|(gpus, _)| gpus).sum::<u32>();
    let is_cut = kinds.iter().any(|sizes| sizes.len() > 1);
    let what = if is_cut { "slice" } else { "GPU" };
    let mut because = Vec::new();
    if exclusive_gpus > 0 {
        because.push(format!(
            "{} asked for exclusively",
            plural(exclusive_gpus, what)
        ));
    }
    for (gpus, vram) in shared {
        because.push(format!("{vram} shared need {}", plural(gpus, what)));
    }
    if is_cut {
        let size_note = if smaller.is_some() {
            format!(" of {size} or more")
        } else {
            String::new()
        };
        because.push(format!("a GPU has {}{size_note}", plural(slices, "slice")));
    }
    (needed.div_ceil(slices), because)
}

/// GPUs needed by the sum of shared VRAM, as if it could be split at will; and that sum.
fn sum_bound(pods: &[&PodToPlace], kinds: &[Vec<Bytes>]) -> (u32, Bytes) {
    let vram_per_gpu: u128 = kinds
        .iter()
        .map(|sizes| sizes.iter().map(|size| u128::from(size.0)).sum())
        .max()
        .unwrap_or(0);
    let total: Bytes = with_sharing(pods, Sharing::Shared)
        .map(|pod| pod.demand.vram())
        .sum();
    (
        u128::from(total.0)
            .div_ceil(vram_per_gpu.max(1))
            .try_into()
            .unwrap_or(u32::MAX),
        total,
    )
}

/// Allocatable VRAM of each slice of a GPU of this kind, or of the whole GPU.
fn slice_capacities(kind: &NodeTemplate, headroom: &Headroom) -> Vec<Bytes> {
    let name = stowage_scheduling::ids::NodeName::parse("any").expect("it is a plain word");
    kind.devices(&name, 1)
        .iter()
        .map(|device| device.capacity(headroom))
        .collect()
}

/// GPUs of so many nodes: with one kind of node all are full but one.
fn gpus_of_nodes(nodes: u32, kinds: &[NodeTemplate]) -> u32 {
    match (nodes, kinds) {
        (1.., [only]) => (nodes - 1) * only.gpus + 1,
        _ => nodes,
    }
}

fn nodes_reason(nodes: u32) -> String {
    format!(
        "CPU, memory and the like, or pods over several GPUs, need {}",
        plural(nodes, "node")
    )
}

fn max_gpus_per_node(kinds: &[NodeTemplate]) -> u32 {
    kinds.iter().map(|kind| kind.gpus).max().unwrap_or(1).max(1)
}

fn with_sharing<'p>(
    pods: &[&'p PodToPlace],
    sharing: Sharing,
) -> impl Iterator<Item = &'p PodToPlace> {
    pods.iter()
        .copied()
        .filter(move |pod| pod.demand.sharing == sharing)
}

/// Pods of classes that share GPUs with each other, directly or through a third class.
struct SharingGroup {
    /// VRAM requested on each GPU, one entry for each GPU.
    parts: Vec<Bytes>,
    /// The group is one class that excludes itself: each of its pods has its GPUs alone.
    excludes_itself: bool,
}

/// Partitions pods that share GPUs into groups of classes; classes of different groups never share a GPU.
fn sharing_groups(pods: &[&PodToPlace]) -> Vec<SharingGroup> {
    let mut terms: BTreeMap<usize, ClassTerms> = BTreeMap::new();
    for pod in with_sharing(pods, Sharing::Shared) {
        terms.insert(pod.demand.class.index(), pod.demand.terms);
    }
    let may_share = |one: usize, other: usize| {
        !terms[&one]
            .class_exclusions
            .contains(ClassId::from_index(other))
            && !terms[&other]
                .class_exclusions
                .contains(ClassId::from_index(one))
    };
    let mut unassigned: BTreeSet<usize> = terms.keys().copied().collect();
    let mut groups = Vec::new();
    while let Some(first) = unassigned.pop_first() {
        let (mut group, mut open) = (BTreeSet::from([first]), vec![first]);
        while let Some(class) = open.pop() {
            let found: Vec<usize> = unassigned
                .iter()
                .copied()
                .filter(|other| may_share(class, *other))
                .collect();
            unassigned.retain(|other| !found.contains(other));
            group.extend(&found);
            open.extend(found);
        }
        let is_alone = group.len() == 1 && !may_share(first, first);
        let members = with_sharing(pods, Sharing::Shared)
            .filter(|pod| group.contains(&pod.demand.class.index()));
        let parts = members
            .flat_map(|pod| (0..pod.demand.gpus).map(|_| pod.demand.per_gpu))
            .collect();
        groups.push(SharingGroup {
            parts,
            excludes_itself: is_alone,
        });
    }
    groups
}

/// GPUs that a group needs, and its VRAM.
fn group_bound(group: &SharingGroup, capacity: Bytes) -> (u32, Bytes) {
    let parts: Vec<u64> = group.parts.iter().map(|part| part.0).collect();
    let gpus = if group.excludes_itself {
        parts.len() as u32
    } else {
        l2(&parts, capacity.0)
    };
    (gpus, group.parts.iter().copied().sum())
}

/// How many bins of that capacity hold these items at least: the bound L2, and that no bin has more than `n` items of over an
/// `n + 1`th of it. An item larger than a bin counts as a bin.
pub(super) fn l2(items: &[u64], capacity: u64) -> u32 {
    if capacity == 0 {
        return items.len() as u32;
    }
    let mut sorted: Vec<u64> = items.iter().map(|item| (*item).min(capacity)).collect();
    sorted.sort_unstable();
    let sums: Vec<u128> = std::iter::once(0)
        .chain(sorted.iter().scan(0u128, |sum, item| {
            *sum += u128::from(*item);
            Some(*sum)
        }))
        .collect();
    let sum = |from: usize, to: usize| sums[to] - sums[from];
    let above_half = sorted.partition_point(|item| *item <= capacity / 2);
    let thresholds = sorted[..above_half].iter().copied().chain([0]);
    let bound = |least: u64| {
        let (from, alone) = (
            sorted.partition_point(|item| *item < least),
            sorted.partition_point(|item| *item <= capacity - least),
        );
        let alone = alone.max(above_half);
        let (large, middle) = (sorted.len() - above_half, (alone - above_half) as u128);
        let free = middle * u128::from(capacity) - sum(above_half, alone);
        let remaining = sum(from.min(above_half), above_half).saturating_sub(free);
        large as u64 + remaining.div_ceil(u128::from(capacity)) as u64
    };
    let by_l2 = thresholds.map(bound).max().unwrap_or(0);
    by_l2
        .max(count_bound(&sorted, capacity))
        .try_into()
        .unwrap_or(u32::MAX)
}

/// Bins by counting: of items larger than an `n + 1`th of a bin, at most `n` fit into one. `sorted` ascends.
fn count_bound(sorted: &[u64], capacity: u64) -> u64 {
    let bound = |most: u64| {
        let is_small =
            |item: &u64| u128::from(*item) * u128::from(most + 1) <= u128::from(capacity);
        let large = (sorted.len() - sorted.partition_point(is_small)) as u64;
        (large.div_ceil(most), large)
    };
    // With all items counted, more to a bin only lowers it.
    let mut best = 0;
    for (bins, large) in (1..=sorted.len() as u64).map(bound) {
        best = best.max(bins);
        if large == sorted.len() as u64 {
            break;
        }
    }
    best
}

/// Nodes by pods that take several GPUs of one node exclusively, and by what pods ask for beside GPUs.
fn node_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> u32 {
    let counts: Vec<u64> = with_sharing(pods, Sharing::Exclusive)
        .map(|pod| u64::from(pod.demand.gpus))
        .collect();
    let slices = kinds
        .iter()
        .map(NodeTemplate::slices_per_gpu)
        .max()
        .unwrap_or(1);
    l2(&counts, u64::from(max_gpus_per_node(kinds) * slices)).max(host_bound(pods, kinds))
}

/// Nodes by CPU, memory and other resources, and by the number of pods, where all kinds say what they have.
fn host_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> u32 {
    let most = |limit: &dyn Fn(&NodeTemplate) -> Option<u64>| {
        kinds
            .iter()
            .map(limit)
            .collect::<Option<Vec<u64>>>()?
            .into_iter()
            .max()
    };
    let mut requested: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (name, amount) in pods
        .iter()
        .flat_map(|pod| pod.requirements.amounts.nonzero())
    {
        requested.entry(name).or_default().push(amount);
    }
    let by_resource = requested
        .iter()
        .filter_map(|(name, amounts)| Some(l2(amounts, most(&|kind| kind.allocatable_of(name))?)));
    let by_number = most(&|kind| kind.host.pods()).map(|most| l2(&vec![1; pods.len()], most));
    by_resource.chain(by_number).max().unwrap_or(0)
}

fn plugin_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> LowerBound {
    if kinds.iter().any(|kind| kind.plugin_devices.is_some()) {
        return observed_plugin_bound(pods, kinds);
    }
    let (mut whole, mut slices): (u32, BTreeMap<String, u32>) = (0, BTreeMap::new());
    for (_, device, count) in pods.iter().filter_map(|pod| requested_devices(pod)) {
        match device {
            PluginDevice::WholeGpu => whole = whole.saturating_add(count),
            PluginDevice::Slice(profile) => *slices.entry(profile).or_default() += count,
            PluginDevice::Other => {}
        }
    }
    // The kinds may differ in what they are cut into: the one that needs the fewest bounds all.
    let cut = kinds
        .iter()
        .map(|kind| slice_bound(&slices, kind))
        .min()
        .unwrap_or(0);
    let gpus = whole + cut;
    let counts = pods.iter().filter_map(|pod| match requested_devices(pod)? {
        (_, PluginDevice::WholeGpu, count) => Some(u64::from(count)),
        _ => None,
    });
    let by_gpus = l2(&counts.collect::<Vec<_>>(), max_gpus_per_node(kinds).into());
    let nodes = gpus
        .div_ceil(max_gpus_per_node(kinds))
        .max(by_gpus)
        .max(host_bound(pods, kinds));
    let nodes = nodes.max(u32::from(!pods.is_empty()));
    let mut because = Vec::new();
    if whole > 0 {
        because.push(format!("{} asked of a device plugin", plural(whole, "GPU")));
    }
    if cut > 0 {
        let names: Vec<String> = slices
            .iter()
            .map(|(profile, count)| format!("{profile} × {count}"))
            .collect();
        because.push(format!("{} need {}", names.join(" + "), plural(cut, "GPU")));
    }
    let by_nodes = gpus_of_nodes(nodes, kinds);
    if by_nodes > gpus {
        because.push(nodes_reason(nodes));
    }
    LowerBound {
        gpus: gpus.max(by_nodes),
        nodes,
        because,
    }
}

/// Lower bound where nodes were observed: by the count of each resource, because a plugin may offer one GPU several times over.
fn observed_plugin_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> LowerBound {
    let mut requested: BTreeMap<&PluginResource, Vec<u64>> = BTreeMap::new();
    for (resource, _, count) in pods.iter().filter_map(|pod| requested_devices(pod)) {
        requested.entry(resource).or_default().push(count.into());
    }
    // How a described node is cut is not known here: assume eight slices on each GPU, the maximum.
    let offers = |kind: &NodeTemplate, resource: &PluginResource| match &kind.plugin_devices {
        Some(devices) => devices.get(resource).copied().unwrap_or(0),
        None => kind.gpus * 8,
    };
    let of_each = requested.iter().filter_map(|(resource, counts)| {
        let offered = kinds
            .iter()
            .map(|kind| (kind, u64::from(offers(kind, resource))))
            .filter(|(_, offered)| *offered > 0);
        let most = offered.clone().map(|(_, offered)| offered).max()?;
        let total: u64 = counts.iter().sum();
        // The kind that offers a GPU most often bounds all.
        let gpus = offered
            .map(|(kind, offered)| (total * u64::from(kind.gpus)).div_ceil(offered))
            .min()?;
        Some((l2(counts, most), u32::try_from(gpus).unwrap_or(u32::MAX)))
    });
    let (by_devices, gpus) = of_each.fold((0, 0), |(nodes, gpus), one| {
        (nodes.max(one.0), gpus.max(one.1))
    });
    let nodes = by_devices.max(host_bound(pods, kinds));
    let least = kinds
        .iter()
        .map(|kind| {
            if kind.plugin_devices.is_some() {
                kind.gpus
            } else {
                1
            }
        })
        .min();
    let gpus = gpus.max(nodes * least.unwrap_or(1));
    let because = (nodes > 0).then(|| match nodes > by_devices {
        true => nodes_reason(nodes),
        false => format!(
            "devices of a plugin need {} on {}",
            plural(gpus, "GPU"),
            plural(nodes, "node")
        ),
    });
    LowerBound {
        gpus,
        nodes,
        because: because.into_iter().collect(),
    }
}

/// GPUs that these slices need by memory slices, by compute slices and by each profile.
fn slice_bound(requested: &BTreeMap<String, u32>, kind: &NodeTemplate) -> u32 {
    let Some(family) = kind.gpu.gpu_type.and_then(|gpu| gpu.family()) else {
        return 0;
    };
    let total = |size: &dyn Fn(&str) -> u32| {
        requested
            .iter()
            .map(|(profile, count)| size(profile) * count)
            .sum::<u32>()
    };
    let memory = total(&|profile| {
        family
            .slot(profile)
            .map_or(0, |slot| u32::from(slot.slices))
    });
    let compute = total(&|profile| compute_slices(profile).unwrap_or(0));
    let by_profile = requested.iter().map(|(profile, count)| {
        let most = match &kind.geometry {
            Some(geometry) => geometry.profiles().filter(|name| name == profile).count(),
            None => max_slices(family, profile),
        };
        count
            .checked_div(most as u32)
            .map_or(0, |_| count.div_ceil(most as u32))
    });
    let sums = [
        memory.div_ceil(u32::from(family.memory_slices()).max(1)),
        compute.div_ceil(family.compute_slices().max(1)),
    ];
    by_profile.chain(sums).max().unwrap_or(0)
}
