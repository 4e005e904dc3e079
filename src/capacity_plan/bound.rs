//! A lower bound on the GPUs that hold some pods, whatever places them: what no arrangement can go below.
//!
//! For pods that ask for VRAM it is the bound L2 of Martello and Toth for bin packing (Knapsack Problems, 1990, chapter 8): of
//! pods over half a GPU no two share one, and what they leave holds only so much of the rest. Classes that share no GPU are
//! bounded apart, exclusive GPUs are counted. For device plugins slices are counted by memory, by compute and by profile. Nodes
//! are bounded by CPU, by memory, and by pods that take several GPUs of one node.

use super::device_plugin::{PluginDevice, asked};
use super::geometry::most_of;
use super::question::{CapacityQuestion, NodeTemplate, PodToPlace};
use crate::policy_file::format::mig::compute_slices;
use crate::scheduling::vocabulary::classification::{ClassId, ClassTerms};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::scheduling::vocabulary::device_plugin::PluginResource;
use crate::scheduling::vocabulary::headroom::Headroom;
use crate::units::{Bytes, plural};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What pods need at least.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LowerBound {
    pub gpus: u32,
    pub nodes: u32,
    /// What the number of GPUs follows from, for people.
    pub because: Vec<String>,
}

/// The bound for these pods of the question, by their places.
pub fn lower_bound(question: &CapacityQuestion, pods: &[usize]) -> LowerBound {
    let pods = pods.iter().map(|place| &question.pods[*place]);
    let (plugin, vram): (Vec<&PodToPlace>, Vec<&PodToPlace>) = pods.partition(|pod| pod.demand.asks_plugin());
    let kinds = &question.node_kinds;
    if kinds.is_empty() {
        return LowerBound::default();
    }
    let (of_vram, of_plugin) =
        (vram_bound(&vram, kinds, &question.policy.headroom), plugin_bound(&plugin, kinds));
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
    let capacity = kinds.iter().map(|kind| largest(kind, headroom)).max().unwrap_or_default();
    let slices = kinds.iter().map(NodeTemplate::slices_per_gpu).max().unwrap_or(1);
    let whole: u32 = of(pods, Sharing::Exclusive).map(|pod| pod.demand.gpus).sum();
    let shared: Vec<(u32, Bytes)> = groups(pods).iter().map(|group| group_bound(group, capacity)).collect();
    let needed = whole + shared.iter().map(|(gpus, _)| gpus).sum::<u32>();
    let gpus = needed.div_ceil(slices);
    let nodes = node_bound(pods, kinds).max(gpus.div_ceil(most_gpus(kinds)));
    let mut because = Vec::new();
    if whole > 0 {
        because.push(format!("{} asked for exclusively", plural(whole, "GPU")));
    }
    for (gpus, vram) in shared {
        because.push(format!("{vram} shared need {}", plural(gpus, "GPU")));
    }
    if slices > 1 {
        because.push(format!("a GPU is cut into {slices}"));
    }
    // Of one kind all nodes are full but one.
    let by_nodes = match kinds {
        [only] => (nodes.max(1) - 1) * only.gpus + 1,
        _ => nodes,
    };
    if by_nodes > gpus {
        because.push(format!("CPU, memory or pods over several GPUs need {}", plural(nodes, "node")));
    }
    LowerBound { gpus: gpus.max(by_nodes), nodes, because }
}

/// What pods may be allocated on the largest GPU of such a node, or on its largest slice.
fn largest(kind: &NodeTemplate, headroom: &Headroom) -> Bytes {
    let name = crate::ids::NodeName::parse("any").expect("it is a plain word");
    kind.devices(&name, 1).iter().map(|device| device.capacity(headroom)).max().unwrap_or_default()
}

fn most_gpus(kinds: &[NodeTemplate]) -> u32 {
    kinds.iter().map(|kind| kind.gpus).max().unwrap_or(1).max(1)
}

fn of<'p>(pods: &[&'p PodToPlace], sharing: Sharing) -> impl Iterator<Item = &'p PodToPlace> {
    pods.iter().copied().filter(move |pod| pod.demand.sharing == sharing)
}

/// Pods of classes of which some share a GPU with some.
struct Group {
    /// VRAM on each GPU, once for each.
    parts: Vec<Bytes>,
    /// No two of its pods share a GPU: it is one class, which does not even share with itself.
    is_alone: bool,
}

/// Pods that share GPUs, apart by classes between which nothing is shared.
fn groups(pods: &[&PodToPlace]) -> Vec<Group> {
    let mut terms: BTreeMap<usize, ClassTerms> = BTreeMap::new();
    for pod in of(pods, Sharing::Shared) {
        terms.insert(pod.demand.class.place(), pod.demand.terms);
    }
    let shares = |one: usize, other: usize| {
        !terms[&one].class_exclusions.contains(ClassId::at(other))
            && !terms[&other].class_exclusions.contains(ClassId::at(one))
    };
    let mut left: BTreeSet<usize> = terms.keys().copied().collect();
    let mut groups = Vec::new();
    while let Some(first) = left.pop_first() {
        let (mut group, mut open) = (BTreeSet::from([first]), vec![first]);
        while let Some(class) = open.pop() {
            let found: Vec<usize> = left.iter().copied().filter(|other| shares(class, *other)).collect();
            left.retain(|other| !found.contains(other));
            group.extend(&found);
            open.extend(found);
        }
        let is_alone = group.len() == 1 && !shares(first, first);
        let members = of(pods, Sharing::Shared).filter(|pod| group.contains(&pod.demand.class.place()));
        let parts = members.flat_map(|pod| (0..pod.demand.gpus).map(|_| pod.demand.per_gpu)).collect();
        groups.push(Group { parts, is_alone });
    }
    groups
}

/// GPUs that a group needs, and its VRAM.
fn group_bound(group: &Group, capacity: Bytes) -> (u32, Bytes) {
    let parts: Vec<u64> = group.parts.iter().map(|part| part.0).collect();
    let gpus = if group.is_alone { parts.len() as u32 } else { l2(&parts, capacity.0) };
    (gpus, group.parts.iter().copied().sum())
}

/// The bound L2: how many bins of that capacity hold these items at least. An item larger than a bin counts as a bin.
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
        let room = middle * u128::from(capacity) - sum(above_half, alone);
        let rest = sum(from.min(above_half), above_half).saturating_sub(room);
        large as u64 + rest.div_ceil(u128::from(capacity)) as u64
    };
    thresholds.map(bound).max().unwrap_or(0).try_into().unwrap_or(u32::MAX)
}

/// Nodes by CPU and memory, where all kinds say what they have, and by pods that take several GPUs of one node exclusively.
fn node_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> u32 {
    let counts: Vec<u64> = of(pods, Sharing::Exclusive).map(|pod| u64::from(pod.demand.gpus)).collect();
    let slices = kinds.iter().map(NodeTemplate::slices_per_gpu).max().unwrap_or(1);
    let by_gpus = l2(&counts, u64::from(most_gpus(kinds) * slices));
    let amount = |pod: &PodToPlace, name: &str| match name {
        "CPU" => pod.requirements.amounts.cpu.0,
        _ => pod.requirements.amounts.memory.0,
    };
    let by_host = ["CPU", "memory"].into_iter().filter_map(|name| {
        let limits: Option<Vec<u64>> =
            kinds.iter().map(|kind| kind.host_limits().get(name).copied()).collect();
        let most = limits?.into_iter().max()?;
        let asked: Vec<u64> = pods.iter().map(|pod| amount(pod, name)).filter(|amount| *amount > 0).collect();
        Some(l2(&asked, most))
    });
    by_host.chain([by_gpus]).max().unwrap_or(0)
}

fn plugin_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> LowerBound {
    if kinds.iter().any(|kind| kind.plugin_devices.is_some()) {
        return observed_bound(pods, kinds);
    }
    let (mut whole, mut slices): (u32, BTreeMap<String, u32>) = (0, BTreeMap::new());
    for (_, device, count) in pods.iter().filter_map(|pod| asked(pod)) {
        match device {
            PluginDevice::WholeGpu => whole = whole.saturating_add(count),
            PluginDevice::Slice(profile) => *slices.entry(profile).or_default() += count,
            PluginDevice::Other => {}
        }
    }
    // The kinds may differ in what they are cut into: the one that needs the fewest bounds all.
    let cut = kinds.iter().map(|kind| slice_bound(&slices, kind)).min().unwrap_or(0);
    let gpus = whole + cut;
    let nodes = gpus.div_ceil(most_gpus(kinds)).max(u32::from(!pods.is_empty()));
    let mut because = Vec::new();
    if whole > 0 {
        because.push(format!("{} asked of a device plugin", plural(whole, "GPU")));
    }
    if cut > 0 {
        let names: Vec<String> =
            slices.iter().map(|(profile, count)| format!("{profile} × {count}")).collect();
        because.push(format!("{} need {}", names.join(" + "), plural(cut, "GPU")));
    }
    LowerBound { gpus, nodes, because }
}

/// Nodes by what each offers of every resource: an observed plugin may offer a GPU several times over.
fn observed_bound(pods: &[&PodToPlace], kinds: &[NodeTemplate]) -> LowerBound {
    let mut wanted: BTreeMap<&PluginResource, u64> = BTreeMap::new();
    for (resource, _, count) in pods.iter().filter_map(|pod| asked(pod)) {
        *wanted.entry(resource).or_default() += u64::from(count);
    }
    // Of a described node it is not known here how it is cut: eight slices on each GPU are the most.
    let offers = |kind: &NodeTemplate, resource: &PluginResource| match &kind.plugin_devices {
        Some(devices) => devices.get(resource).copied().unwrap_or(0),
        None => kind.gpus * 8,
    };
    let most = |resource| kinds.iter().map(|kind| u64::from(offers(kind, resource))).max().unwrap_or(0);
    let of_each = wanted.iter().filter(|(resource, _)| most(resource) > 0);
    let nodes = of_each.map(|(resource, count)| count.div_ceil(most(resource))).max().unwrap_or(0);
    let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
    let least = kinds.iter().map(|kind| if kind.plugin_devices.is_some() { kind.gpus } else { 1 }).min();
    let because = (nodes > 0).then(|| format!("devices of a plugin need {}", plural(nodes, "node")));
    LowerBound { gpus: nodes * least.unwrap_or(1), nodes, because: because.into_iter().collect() }
}

/// GPUs that these slices need by memory slices, by compute slices and by each profile.
fn slice_bound(wanted: &BTreeMap<String, u32>, kind: &NodeTemplate) -> u32 {
    let Some(family) = kind.gpu.known.and_then(|gpu| gpu.family()) else { return 0 };
    let total =
        |size: &dyn Fn(&str) -> u32| wanted.iter().map(|(profile, count)| size(profile) * count).sum::<u32>();
    let memory = total(&|profile| family.slot(profile).map_or(0, |slot| u32::from(slot.slices)));
    let compute = total(&|profile| compute_slices(profile).unwrap_or(0));
    let by_profile = wanted.iter().map(|(profile, count)| {
        let most = match &kind.geometry {
            Some(geometry) => geometry.profiles().filter(|name| name == profile).count(),
            None => most_of(family, profile),
        };
        count.checked_div(most as u32).map_or(0, |_| count.div_ceil(most as u32))
    });
    let sums = [
        memory.div_ceil(u32::from(family.memory_slices()).max(1)),
        compute.div_ceil(family.compute_slices().max(1)),
    ];
    by_profile.chain(sums).max().unwrap_or(0)
}
