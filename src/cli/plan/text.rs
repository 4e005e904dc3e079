//! A plan of capacity for people: the number and its bound, who shares which GPU, what one more would be worth, and which pods
//! have no place.

use super::capacity::{CapacityAnswer, TypesAnswer};
use crate::cli::output::Columns;
use std::collections::BTreeMap;
use stowage_scheduling::units::{Bytes, has_or_have, plural};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_sizing::capacity_plan::report::{
    CapacityPlan, GpuPlan, GpuSharing, NodeKindPlan, NodePlan, NotHeldReason, OneMore, PodNotHeld,
    PodOnGpu,
};

/// The most rows of a table: more than a screen has, and programs get them all.
const MAX_ROWS: usize = 60;
/// The most names of a list; further ones are only counted.
const MAX_NAMES: usize = 6;

pub fn plan_text(answer: &CapacityAnswer, columns: Columns) -> String {
    let plan = &answer.plan;
    let mut text = summary(plan);
    if plan.gpus > 0 {
        text += &format!("{}\n\n{}", bound_text(plan), layout(plan, columns));
    }
    if let Some(one_more) = plan.one_more.filter(|_| plan.not_held.is_empty()) {
        text += &format!("\n{}\n", one_more_text(one_more));
    }
    if !plan.not_held.is_empty() {
        text += &format!("\n{}", not_held_text(&plan.not_held));
    }
    columns.wrap(&text)
}

pub fn types_text(answer: &TypesAnswer, columns: Columns) -> String {
    let rows = answer.types.iter().map(|one| {
        let Some(plan) = &one.plan else {
            let why = one.refused.clone().unwrap_or_default();
            return [
                vec![one.gpu_type.to_owned()],
                vec!["-".to_owned(); 4],
                vec![why],
            ]
            .concat();
        };
        let holds = match plan.not_held.first() {
            None => "all".to_owned(),
            Some(first) => format!("{} of {}; {} has no place", plan.held, plan.pods, first.pod),
        };
        let idle = plan
            .one_more
            .map_or_else(String::new, |now| format!("{} %", now.idle_percent_now));
        let numbers =
            [plan.gpus, plan.lower_bound.gpus, plan.nodes].map(|number| number.to_string());
        [
            vec![one.gpu_type.to_owned()],
            numbers.into(),
            vec![idle, holds],
        ]
        .concat()
    });
    let mut text = columns.table(
        &["TYPE", "GPUS", "BOUND", "NODES", "IDLE", "PODS HELD"],
        rows,
        &[1, 2, 3, 4],
    );
    text += &match answer.smallest {
        Some(smallest) => format!("\nThe smallest type that holds every pod is {smallest}.\n"),
        None => "\nNo type holds every pod; without --gpu-types and with gpu= in --nodes, each pod's reason is shown.\n".into(),
    };
    columns.wrap(&text)
}

/// `2 GPUs hold all 3 pods: 1 node of kind a100-80gb, with 2 of its 8 GPUs.`
fn summary(plan: &CapacityPlan) -> String {
    let pods = match plan.held == plan.pods {
        true if plan.pods == 1 => "the pod".to_owned(),
        true => format!("all {} pods", plan.pods),
        false => format!("{} of {}", plan.held, plural(plan.pods, "pod")),
    };
    if plan.gpus == 0 {
        return format!("No GPU holds any of {}.\n", plural(plan.pods, "pod"));
    }
    let hold = if plan.gpus == 1 { "holds" } else { "hold" };
    let kinds: Vec<String> = plan.node_kinds.iter().map(kind_text).collect();
    format!(
        "{} {hold} {pods}: {}.\n",
        plural(plan.gpus, "GPU"),
        kinds.join("; ")
    )
}

fn kind_text(kind: &NodeKindPlan) -> String {
    let NodeKindPlan {
        name,
        nodes,
        gpus,
        gpus_per_node,
        ..
    } = kind;
    let last = gpus - (nodes - 1) * gpus_per_node;
    let used = match (nodes, last == *gpus_per_node) {
        (_, true) => format!("{} each", plural(*gpus_per_node, "GPU")),
        (1, false) => format!("{last} of its {}", plural(*gpus_per_node, "GPU")),
        (_, false) => format!("{} each, {last} of the last", plural(*gpus_per_node, "GPU")),
    };
    let by = if kind.allocator == NodeKind::DevicePlugin {
        ", by the device plugin"
    } else {
        ""
    };
    let cut = kind
        .mig
        .as_ref()
        .map_or_else(String::new, |mig| format!(", each cut into {mig}"));
    format!("{} {name} ({used}{cut}{by})", plural(*nodes, "node"))
}

fn bound_text(plan: &CapacityPlan) -> String {
    let (least, because) = (plan.lower_bound.gpus, plan.lower_bound.because.join("; "));
    match plan.is_optimal {
        true => format!("That is optimal: no arrangement needs fewer ({because})."),
        false => {
            let is_mixed = plan
                .node_kinds
                .windows(2)
                .any(|two| two[0].name != two[1].name);
            let in_order = if is_mixed || plan.fewer_alone.is_some() {
                " with the kinds of nodes in the order given"
            } else {
                ""
            };
            let fewer = plan.fewer_alone.as_ref().map_or_else(String::new, |alone| {
                let by_plugin = plan
                    .node_kinds
                    .iter()
                    .any(|kind| kind.allocator == NodeKind::DevicePlugin);
                let which = if by_plugin {
                    "all pods that ask for VRAM"
                } else {
                    "all of them"
                };
                format!(
                    "\n{} of {} alone hold {which}.",
                    plural(alone.gpus, "GPU"),
                    alone.name
                )
            });
            format!(
                "The lower bound is {least} ({because}); {} is the smallest number that was found to hold them{in_order}.{fewer}",
                plan.gpus
            )
        }
    }
}

fn layout(plan: &CapacityPlan, columns: Columns) -> String {
    let rows: Vec<Vec<String>> = plan.layout.iter().flat_map(node_rows).collect();
    let more = rows.len().saturating_sub(MAX_ROWS);
    let shown = rows.into_iter().take(MAX_ROWS);
    let mut text = columns.table(&["NODE", "GPU", "USED", "ALLOCATED", "PODS"], shown, &[2]);
    if more > 0 {
        text += &format!("and {more} more; -o json shows all\n");
    }
    text
}

fn node_rows(node: &NodePlan) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = node.gpus.iter().map(|gpu| gpu_row(node, gpu)).collect();
    if !node.pods.is_empty() {
        let names = joined_names(node.pods.iter().map(ToString::to_string));
        rows.push(vec![
            node.node.to_string(),
            "any".into(),
            String::new(),
            "device plugin".into(),
            names,
        ]);
    }
    rows
}

fn gpu_row(node: &NodePlan, gpu: &GpuPlan) -> Vec<String> {
    let gpu_label = match &gpu.mig {
        Some(profile) => format!("{} {profile}", gpu.gpu),
        None => gpu.gpu.to_string(),
    };
    let allocated = match gpu.sharing {
        GpuSharing::DevicePlugin => "device plugin".to_owned(),
        _ => format!("{} of {}", gpu.allocated_bytes, gpu.allocatable_bytes),
    };
    vec![
        node.node.to_string(),
        gpu_label,
        format!("{} %", gpu.allocated_percent),
        allocated,
        pods_on_gpu(gpu),
    ]
}

fn pods_on_gpu(gpu: &GpuPlan) -> String {
    let vram = |pod: &PodOnGpu| match pod.vram_bytes {
        Bytes::ZERO => String::new(),
        vram => format!(" {vram}"),
    };
    let pods = joined_names(
        gpu.pods
            .iter()
            .map(|pod| format!("{} ({}){}", pod.pod, pod.class, vram(pod))),
    );
    match gpu.sharing {
        GpuSharing::Empty => "free".into(),
        GpuSharing::Exclusive => format!("{pods}, exclusively"),
        GpuSharing::ClassAlone => format!("{pods}, alone: its class shares with none"),
        GpuSharing::Shared | GpuSharing::DevicePlugin => pods,
    }
}

fn joined_names(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(MAX_NAMES);
    let mut shown: Vec<String> = names.take(MAX_NAMES).collect();
    shown.extend((more > 0).then(|| format!("and {more} more")));
    shown.join(", ")
}

/// The share of idle GPUs with one GPU more, as text.
fn one_more_text(one_more: OneMore) -> String {
    let OneMore {
        gpus,
        idle_percent_now,
        idle_percent_then,
    } = one_more;
    format!(
        "{} GPU is not needed: with it, {idle_percent_then} % of the GPUs would stand idle on average, however the pods are spread; now it \
         is {idle_percent_now} %.",
        ordinal(gpus)
    )
}

/// `A third`, `A 21st`.
fn ordinal(number: u32) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    match number {
        2 => "A second".into(),
        3 => "A third".into(),
        4 => "A fourth".into(),
        8 | 11 | 18 | 80..=89 => format!("An {number}{ending}"),
        _ => format!("A {number}{ending}"),
    }
}

/// Replicas with the same reasons are shown once.
fn not_held_text(pods: &[PodNotHeld]) -> String {
    let mut alike: BTreeMap<(&str, &str, &[NotHeldReason]), Vec<String>> = BTreeMap::new();
    for pod in pods {
        let key = (&*pod.source, &*pod.requests, &pod.reasons[..]);
        alike.entry(key).or_default().push(pod.pod.to_string());
    }
    let mut text = format!(
        "{} {} no place:\n",
        plural(pods.len(), "pod"),
        has_or_have(pods.len())
    );
    for ((source, requests, reasons), names) in alike {
        text += &format!(
            "{}  {requests}\n    from {source}\n",
            joined_names(names.into_iter())
        );
        for reason in reasons {
            let nodes = reason
                .nodes
                .as_ref()
                .map_or_else(String::new, |nodes| format!("{nodes}: "));
            text += &format!("    {nodes}{}\n      → {}\n", reason.text, reason.remedy);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinals_are_words_or_numbers_with_their_ending() {
        let all = [2, 3, 8, 11, 12, 21, 22, 23, 113].map(ordinal);
        let expected = [
            "A second", "A third", "An 8th", "An 11th", "A 12th", "A 21st", "A 22nd", "A 23rd",
            "A 113th",
        ];
        assert_eq!(all, expected);
    }
}
