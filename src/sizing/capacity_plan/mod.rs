//! How many GPUs some pods need: the fewest hypothetical nodes that hold them under a policy, with a lower bound beside it, and
//! who shares which GPU.
//!
//! [`question`] is what is asked, [`shorthand`] a kind of node in one line; [`gpu_types`] and [`geometry`] are data about GPUs
//! and the check of a MIG geometry. A [`trial`] places pods on some nodes through the core's own entry point, in one of the
//! [`order`]s; [`search`] looks for the fewest GPUs by trials; [`device_plugin`] does so for pods that a device plugin serves;
//! [`bound`] says what no arrangement goes below. [`layout`] and [`report`] are the answer, [`obstacle`] is why a pod has no
//! place. Pure: no clock, no file, no Kubernetes type; and no rule of its own about which GPU takes which pod.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod bound;
mod device_plugin;
pub mod geometry;
pub mod gpu_types;
mod layout;
mod obstacle;
mod order;
pub mod question;
pub mod report;
mod search;
pub mod shorthand;
mod trial;

pub use bound::LowerBound;
pub use order::PlacingOrder;

use device_plugin::{PluginObstacle, PluginPlan};
use question::{CapacityQuestion, PodToPlace};
use report::{CapacityPlan, FewerAlone, NodeKindPlan, NodePlan, NotHeldReason, PodNotHeld};
use search::{Fleet, Search, SearchResult};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::units::{Bytes, plural};
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::device_plugin::GpuRequest;
use stowage_scheduling::vocabulary::node::NodeKind;
use trial::{CandidateNodes, Obstacle, Obstacles, Trial, TrialSetting};

/// The most copies that are tried.
const MAX_COPIES: u64 = 100_000;

/// The fewest GPUs that hold the pods, as far as they can be held.
pub fn plan(question: &CapacityQuestion) -> CapacityPlan {
    let setting = TrialSetting::new(question);
    let all = 0..question.pods.len();
    let (by_plugin, by_vram): (Vec<usize>, Vec<usize>) =
        all.partition(|index| question.pods[*index].demand.is_allocated_externally());
    let plugin = device_plugin::plan(&setting, &by_plugin);
    let mut not_held: Vec<PodNotHeld> = Vec::new();
    for (index, obstacles) in &plugin.not_held {
        not_held.push(plugin_pod_not_held(&setting, *index, obstacles));
    }
    let (possible, impossible) = partition_placeable(&setting, &by_vram);
    not_held.extend(
        impossible
            .iter()
            .map(|(index, why)| vram_pod_not_held(&setting, *index, why)),
    );

    let least = bound::lower_bound(question, &possible).gpus;
    let mut search = Search::new(
        &setting,
        &plugin,
        &possible,
        max_gpus_by_kind(&setting, &plugin, &possible),
    );
    let found = search.run(least);
    not_held.extend(
        found
            .not_held
            .iter()
            .map(|(index, why)| vram_pod_not_held(&setting, *index, why)),
    );
    let mut plan = build_plan(&setting, &plugin, &search, &found, not_held);
    if plan.not_held.is_empty() && !plan.is_optimal && !possible.is_empty() {
        plan.fewer_alone = fewer_alone(&setting, &search, &found.fleet, &possible);
    }
    plan
}

/// How many copies of a pod fit on so many GPUs of each kind, beside the question's pods that Stowage places.
pub fn copies_beside(question: &CapacityQuestion, fleet: &[u32], copy: &PodToPlace) -> u32 {
    let kinds = question.node_kinds.iter().zip(fleet);
    let most = kinds.map(|(kind, gpus)| {
        let each = kind.gpu.total.0 / copy.demand.per_gpu.0.max(1 << 20);
        each.saturating_mul(u64::from(*gpus))
    });
    let most = most.sum::<u64>().min(MAX_COPIES) as usize;
    let own = question.pods.len();
    let mut question = question.clone();
    question
        .pods
        .extend(std::iter::repeat_n(copy, most).cloned());
    let setting = TrialSetting::new(&question);
    let mut trial = Trial::new(&setting);
    for (kind, gpus) in fleet.iter().enumerate() {
        trial.add_nodes(kind, *gpus);
    }
    let by_vram = (0..own).filter(|index| !setting.pod(*index).demand.is_allocated_externally());
    let indices: Vec<usize> = by_vram.collect();
    for index in PlacingOrder::ExclusiveFirst.arrange(&question.pods, &indices) {
        // One without a place takes none from the copies.
        let _ = trial.place(index, CandidateNodes::Any);
    }
    let fits = |index: &usize| trial.place(*index, CandidateNodes::Any).is_ok();
    (own..own + most).take_while(fits).count() as u32
}

fn build_plan(
    setting: &TrialSetting<'_>,
    plugin: &PluginPlan,
    search: &Search<'_>,
    found: &SearchResult,
    not_held: Vec<PodNotHeld>,
) -> CapacityPlan {
    let question = setting.question;
    let (trial, _) = search.trial(&found.fleet, found.order);
    let layout = layout::layout(setting, &trial, plugin);
    let held: Vec<usize> = trial.placements().keys().copied().collect();
    let asks_vram = held
        .iter()
        .any(|index| !question.pods[*index].demand.is_allocated_externally());
    let node_kinds = node_kinds(setting, plugin, &found.fleet, &layout);
    let (gpus, nodes) = (
        node_kinds.iter().map(|kind| kind.gpus).sum(),
        node_kinds.iter().map(|kind| kind.nodes).sum(),
    );
    let lower_bound = bound::lower_bound(question, &held);
    CapacityPlan {
        pods: question.pods.len(),
        held: held.len(),
        gpus,
        nodes,
        is_optimal: !held.is_empty() && gpus == lower_bound.gpus,
        fewer_alone: None,
        lower_bound,
        order: asks_vram.then_some(found.order),
        one_more: layout::one_more(setting, &layout, gpus),
        node_kinds,
        layout,
        not_held,
    }
}

/// Kind of node that by itself holds all pods that request VRAM on the fewest GPUs, if these are fewer than with all kinds in
/// the order given.
fn fewer_alone(
    setting: &TrialSetting<'_>,
    search: &Search<'_>,
    fleet: &Fleet,
    pods: &[usize],
) -> Option<FewerAlone> {
    let kinds = 0..setting.question.node_kinds.len();
    let mut fewest = kinds.clone().map(|kind| fleet.gpus(kind)).sum();
    let mut found = None;
    if kinds.len() < 2 {
        return None;
    }
    for kind in kinds {
        let only = [setting.template(kind).clone()];
        let least = bound::lower_bound_with_kinds(&only, setting.question, pods).gpus;
        if let Some(gpus) = search.fewest_alone(kind, least, fewest) {
            fewest = gpus;
            found = Some(FewerAlone {
                name: setting.template(kind).name.clone(),
                gpus,
            });
        }
    }
    found
}

/// Splits pods into those that an empty node of some kind takes, and those that none takes, with the obstacle for each kind.
fn partition_placeable(
    setting: &TrialSetting<'_>,
    pods: &[usize],
) -> (Vec<usize>, Vec<(usize, Obstacles)>) {
    let mut by_workload: BTreeMap<usize, Obstacles> = BTreeMap::new();
    let kinds = setting.question.node_kinds.len();
    let mut obstacles_of = |index: usize| -> Obstacles {
        let obstacles = by_workload
            .entry(setting.pod(index).workload)
            .or_insert_with(|| {
                let each =
                    (0..kinds).map(|kind| Some((kind, lasting_obstacle(setting, index, kind)?)));
                // One kind of node that takes it is enough.
                each.collect::<Option<Obstacles>>().unwrap_or_default()
            });
        obstacles.clone()
    };
    let (mut possible, mut impossible) = (Vec::new(), Vec::new());
    for index in pods {
        match obstacles_of(*index) {
            why if why.is_empty() && kinds > 0 => possible.push(*index),
            why => impossible.push((*index, why)),
        }
    }
    (possible, impossible)
}

/// Obstacle for which an empty node of the kind never takes the pod, whatever other nodes there are.
fn lasting_obstacle(setting: &TrialSetting<'_>, index: usize, kind: usize) -> Option<Obstacle> {
    let mut trial = Trial::new(setting);
    trial.add_nodes(kind, setting.template(kind).gpus);
    let obstacles = trial.place(index, CandidateNodes::Any).err()?;
    obstacles.into_values().find(Obstacle::is_lasting)
}

/// Maximum number of GPUs to try, by kind of node: one node for each pod and for each GPU that the policy keeps free suffices,
/// except where a tenant may only have a share of them.
fn max_gpus_by_kind(setting: &TrialSetting<'_>, plugin: &PluginPlan, pods: &[usize]) -> Vec<u32> {
    let spare: u32 = setting
        .question
        .policy
        .planning
        .spare
        .iter()
        .map(|rule| rule.gpus)
        .fold(0, u32::saturating_add);
    let nodes = (pods.len() as u32).saturating_add(spare);
    let max_gpus = |(kind, template): (usize, &question::NodeTemplate)| {
        let plugin_nodes = plugin
            .nodes
            .iter()
            .filter(|node| node.template == kind)
            .count() as u32;
        let max_nodes = template
            .max_nodes
            .map_or(nodes, |most| nodes.min(most.saturating_sub(plugin_nodes)));
        if pods.is_empty() {
            0
        } else {
            max_nodes.saturating_mul(template.gpus)
        }
    };
    setting
        .question
        .node_kinds
        .iter()
        .enumerate()
        .map(max_gpus)
        .collect()
}

fn vram_pod_not_held(
    setting: &TrialSetting<'_>,
    index: usize,
    obstacles: &Obstacles,
) -> PodNotHeld {
    let (pod, policy) = (setting.pod(index), &setting.question.policy);
    let reason = |(kind, obstacle): (&usize, &Obstacle)| NotHeldReason {
        nodes: Some(setting.template(*kind).name.clone()),
        code: obstacle.code().into(),
        text: obstacle.describe(),
        remedy: obstacle.remedy(pod, setting.template(*kind), policy),
    };
    pod_not_held(pod, obstacles.iter().map(reason).collect())
}

fn plugin_pod_not_held(
    setting: &TrialSetting<'_>,
    index: usize,
    obstacles: &[(usize, PluginObstacle)],
) -> PodNotHeld {
    let (pod, policy) = (setting.pod(index), &setting.question.policy);
    let reason = |(kind, obstacle): &(usize, PluginObstacle)| {
        let template = setting.template(*kind);
        let (code, remedy) = match obstacle {
            PluginObstacle::Placing(obstacle) => {
                (obstacle.code(), obstacle.remedy(pod, template, policy))
            }
            PluginObstacle::NoSuchDevice { .. } => (
                "no-such-device",
                device_plugin::device_remedy(pod, template),
            ),
            PluginObstacle::TooFew { .. } => (
                "too-few-devices",
                "give nodes with more GPUs, or ask for fewer".into(),
            ),
            PluginObstacle::AllInUse { .. } => ("all-in-use", "raise count in --nodes".into()),
        };
        let (code, text) = (code.into(), obstacle.to_string());
        NotHeldReason {
            nodes: Some(template.name.clone()),
            code,
            text,
            remedy,
        }
    };
    pod_not_held(pod, obstacles.iter().map(reason).collect())
}

fn pod_not_held(pod: &PodToPlace, reasons: Vec<NotHeldReason>) -> PodNotHeld {
    let (source, requests) = (pod.source.to_string(), requests(&pod.demand));
    PodNotHeld {
        pod: pod.key.clone(),
        source,
        requests,
        reasons,
    }
}

/// Request as text: `40.0 GiB on 1 GPU`, `2 of nvidia.com/gpu`.
fn requests(demand: &Demand) -> String {
    match &demand.ask {
        GpuRequest::Plugin { resource, count } => format!("{count} of {resource}"),
        GpuRequest::Claims => "devices by its claims".into(),
        GpuRequest::Vram => {
            let whole = if demand.sharing == Sharing::Exclusive {
                ", exclusively"
            } else {
                ""
            };
            let each = if demand.gpus == 1 { "" } else { "each of " };
            format!(
                "{} on {each}{}{whole}",
                demand.per_gpu,
                plural(demand.gpus, "GPU")
            )
        }
    }
}

fn node_kinds(
    setting: &TrialSetting<'_>,
    plugin: &PluginPlan,
    fleet: &Fleet,
    layout: &[NodePlan],
) -> Vec<NodeKindPlan> {
    let mut plans = Vec::new();
    for (kind, template) in setting.question.node_kinds.iter().enumerate() {
        let plugin_nodes = plugin
            .nodes
            .iter()
            .filter(|node| node.template == kind)
            .count() as u32;
        let stowage_gpus = fleet.gpus(kind);
        let both = [
            (
                NodeKind::Stowage,
                stowage_gpus.div_ceil(template.gpus),
                stowage_gpus,
            ),
            (
                NodeKind::DevicePlugin,
                plugin_nodes,
                plugin.gpus_of_kind(setting, kind),
            ),
        ];
        for (allocator, nodes, gpus) in both.into_iter().filter(|(_, nodes, _)| *nodes > 0) {
            let planned_nodes = layout
                .iter()
                .filter(|node| node.kind == template.name && node.allocator == allocator);
            let allocatable_sizes: BTreeSet<Bytes> = planned_nodes
                .flat_map(|node| &node.gpus)
                .map(|gpu| gpu.allocatable_bytes)
                .collect();
            plans.push(NodeKindPlan {
                name: template.name.clone(),
                gpu: template.gpu.name.clone(),
                allocator,
                nodes,
                gpus,
                gpus_per_node: template.gpus,
                allocatable_bytes: allocatable_sizes.last().copied().unwrap_or_default(),
                mig: template.geometry.clone(),
            });
        }
    }
    plans
}

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod testkit;
#[cfg(test)]
mod tests;
