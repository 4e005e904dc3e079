//! A trial's end as a report: which pods are on which GPU, and how much of each is allocated.

use super::device_plugin::{PluginGpu, PluginNode, PluginPlan};
use super::question::{NodeTemplate, PodToPlace};
use super::report::{GpuPlan, GpuSharing, NodePlan, OneMore, PodOnGpu};
use super::trial::{Trial, TrialNode, TrialSetting, gpu_indices};
use std::collections::BTreeMap;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::classification::ClassSet;
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::gpu::Gpu;
use stowage_scheduling::vocabulary::node::{Node, NodeKind};

/// One whole GPU in the unit of shares: millionths.
const WHOLE_SHARE: u64 = 1_000_000;

/// Plans of all nodes of a trial; the plugin's nodes come first.
pub fn layout(setting: &TrialSetting<'_>, trial: &Trial<'_>, plugin: &PluginPlan) -> Vec<NodePlan> {
    let nodes = trial.nodes().iter().enumerate();
    let plan = |(node_index, node): (usize, &TrialNode)| match plugin.nodes.get(node_index) {
        Some(planned) => plugin_node(setting, node, planned),
        None => stowage_node(setting, trial, node),
    };
    nodes.map(plan).collect()
}

/// Idle percentage with one GPU more; `None` if the plan has no GPU.
pub fn one_more(setting: &TrialSetting<'_>, layout: &[NodePlan], gpus: u32) -> Option<OneMore> {
    let allocated: u64 = layout
        .iter()
        .flat_map(|node| allocated_shares(setting, node))
        .sum();
    // Rounded to the nearest.
    let idle = |of: u64| {
        (WHOLE_SHARE - (allocated / of.max(1)).min(WHOLE_SHARE) + WHOLE_SHARE / 200) * 100
            / WHOLE_SHARE
    };
    let percent = |of: u64| u8::try_from(idle(of)).unwrap_or(100);
    let count = u64::from(gpus);
    (gpus > 0).then(|| OneMore {
        gpus: gpus + 1,
        idle_percent_now: percent(count),
        idle_percent_then: percent(count + 1),
    })
}

/// Allocated share of each of the node's GPUs, in millionths.
fn allocated_shares(setting: &TrialSetting<'_>, node: &NodePlan) -> Vec<u64> {
    let mut slices_by_gpu: BTreeMap<u32, Vec<&GpuPlan>> = BTreeMap::new();
    node.gpus
        .iter()
        .for_each(|gpu| slices_by_gpu.entry(gpu.gpu).or_default().push(gpu));
    let template = setting
        .question
        .node_kinds
        .iter()
        .find(|kind| kind.name == node.kind);
    let share = |slices: &Vec<&GpuPlan>| match node.allocator {
        NodeKind::Stowage => {
            let sum = |of: &dyn Fn(&GpuPlan) -> Bytes| {
                slices.iter().map(|slice| of(slice)).sum::<Bytes>()
            };
            scaled_share(
                sum(&|slice| slice.allocated_bytes),
                sum(&|slice| slice.allocatable_bytes),
                WHOLE_SHARE,
            )
        }
        NodeKind::DevicePlugin | NodeKind::Dra => slices
            .iter()
            .map(|slice| slice_share(slice, template))
            .sum(),
    };
    let shares: Vec<u64> = slices_by_gpu.values().map(share).collect();
    // Of a node that was observed it is not known which of its GPUs are in use: all count.
    match shares.is_empty() {
        true => vec![WHOLE_SHARE * template.map_or(0, |kind| u64::from(kind.gpus))],
        false => shares,
    }
}

/// A slice's share of its GPU, by memory slices, in millionths.
fn slice_share(slice: &GpuPlan, template: Option<&NodeTemplate>) -> u64 {
    let Some(profile) = &slice.mig else {
        return WHOLE_SHARE;
    };
    let family = template.and_then(|kind| kind.gpu.gpu_type?.family());
    let sizes =
        family.and_then(|family| Some((family.slot(profile)?.slices, family.memory_slices())));
    match sizes {
        Some((slices, of)) if !slice.pods.is_empty() => {
            WHOLE_SHARE * u64::from(slices) / u64::from(of.max(1))
        }
        _ => 0,
    }
}

fn stowage_node(setting: &TrialSetting<'_>, trial: &Trial<'_>, trial_node: &TrialNode) -> NodePlan {
    let kind = setting.template(trial_node.template);
    let node = trial.cluster.ledger().node(&trial_node.name);
    let gpus = node.map_or_else(Vec::new, |node| {
        let mut pods_by_gpu: Vec<Vec<usize>> = vec![Vec::new(); node.gpus.len()];
        let placed = trial
            .placements()
            .iter()
            .filter(|(_, placement)| placement.node == trial_node.name);
        for (pod_index, placement) in placed {
            gpu_indices(&node.devices, &placement.devices)
                .into_iter()
                .for_each(|gpu| pods_by_gpu[gpu].push(*pod_index));
        }
        pods_by_gpu
            .iter()
            .enumerate()
            .map(|(gpu, pods)| gpu_plan(setting, kind, node, gpu, pods))
            .collect()
    });
    NodePlan {
        node: trial_node.name.clone(),
        kind: kind.name.clone(),
        allocator: trial_node.allocator,
        gpus,
        pods: Vec::new(),
    }
}

fn gpu_plan(
    setting: &TrialSetting<'_>,
    kind: &NodeTemplate,
    node: &Node,
    gpu_index: usize,
    pods: &[usize],
) -> GpuPlan {
    let gpu = &node.gpus[gpu_index];
    let slices = kind.slices_per_gpu();
    let profile = kind
        .geometry
        .as_ref()
        .and_then(|geometry| geometry.profiles().nth(gpu_index % slices as usize));
    GpuPlan {
        gpu: gpu_index as u32 / slices,
        mig: profile.map(str::to_owned),
        allocatable_bytes: gpu.capacity,
        allocated_bytes: gpu.charged,
        allocated_percent: percent(gpu.charged, gpu.capacity),
        sharing: sharing(setting, gpu, pods),
        pods: pods
            .iter()
            .map(|pod| pod_on_gpu(setting, setting.pod(*pod), gpu.capacity))
            .collect(),
    }
}

fn sharing(setting: &TrialSetting<'_>, gpu: &Gpu, pods: &[usize]) -> GpuSharing {
    let classes = setting.question.policy.classes().len();
    let all_classes: ClassSet = (0..classes)
        .map(stowage_scheduling::vocabulary::classification::ClassId::from_index)
        .collect();
    let excludes_all = |pod: &usize| {
        all_classes
            .difference(setting.pod(*pod).demand.terms.class_exclusions)
            .is_empty()
    };
    match pods {
        [] => GpuSharing::Empty,
        _ if gpu.exclusive || setting.pod(pods[0]).demand.sharing == Sharing::Exclusive => {
            GpuSharing::Exclusive
        }
        _ if pods.iter().any(excludes_all) => GpuSharing::ClassAlone,
        _ => GpuSharing::Shared,
    }
}

fn pod_on_gpu(setting: &TrialSetting<'_>, pod: &PodToPlace, capacity: Bytes) -> PodOnGpu {
    PodOnGpu {
        pod: pod.key.clone(),
        class: setting.question.policy.class(pod.demand.class).name.clone(),
        vram_bytes: pod.demand.per_gpu,
        percent: percent(pod.demand.per_gpu, capacity),
    }
}

fn plugin_node(
    setting: &TrialSetting<'_>,
    trial_node: &TrialNode,
    planned: &PluginNode,
) -> NodePlan {
    let kind = setting.template(planned.template);
    let gpus = planned
        .gpus
        .iter()
        .enumerate()
        .flat_map(|(gpu, card)| plugin_gpu_plans(setting, gpu as u32, card));
    let pods: Vec<usize> = if planned.gpus.is_empty() {
        planned.pods.clone()
    } else {
        Vec::new()
    };
    NodePlan {
        node: trial_node.name.clone(),
        kind: kind.name.clone(),
        allocator: trial_node.allocator,
        gpus: gpus.collect(),
        pods: pods
            .into_iter()
            .map(|pod| setting.pod(pod).key.clone())
            .collect(),
    }
}

fn plugin_gpu_plans(setting: &TrialSetting<'_>, gpu: u32, card: &PluginGpu) -> Vec<GpuPlan> {
    let devices = card.0.iter();
    let plan = devices.map(|(device, pod)| GpuPlan {
        gpu,
        mig: device.profile().map(str::to_owned),
        allocatable_bytes: Bytes::ZERO,
        allocated_bytes: Bytes::ZERO,
        allocated_percent: 100,
        sharing: GpuSharing::DevicePlugin,
        pods: vec![PodOnGpu {
            vram_bytes: Bytes::ZERO,
            percent: 100,
            ..pod_on_gpu(setting, setting.pod(*pod), Bytes::ZERO)
        }],
    });
    plan.collect()
}

fn percent(part_of: Bytes, whole: Bytes) -> u8 {
    u8::try_from(scaled_share(part_of, whole, 100)).unwrap_or(100)
}

/// `part / whole` in units of `1 / of`, rounded down.
fn scaled_share(part: Bytes, whole: Bytes, of: u64) -> u64 {
    let share = u128::from(part.0) * u128::from(of) / u128::from(whole.0.max(1));
    u64::try_from(share).unwrap_or(u64::MAX)
}
