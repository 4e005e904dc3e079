//! Removes one obstacle at a time, on every node that does not fit, and asks the core again.

use super::{RemedyChange, candidate_on, fitting_gpus};
use crate::explaining::facts::{Facts, GpuOccupants, NodeDetails};
use crate::explaining::nodes::NodeOutline;
use crate::explaining::obstacle::{Obstacle, obstacles};
use crate::ledger::OccupantPhase;
use crate::placing::fit::{Misfit, check_node_admission};
use crate::reasons::{
    FitWithoutReason, LIFTS, Lift, PodsToName, without_gpu_reason, without_reason_if,
};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::ClusterCopy;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::{EngineLoad, Freshness};

/// How many of the nodes that the same change helps are compared to find the nearest.
const MAX_COMPARED_NODES: usize = 16;

/// The nodes that a change helps, nearest first.
#[derive(Default)]
struct HelpedNodes {
    fits: Vec<(usize, GpuSet)>,
    nodes: u32,
}

pub fn single_obstacle_remedies(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
) -> Vec<RemedyChange> {
    let gate = find_helped_nodes(without_start_gate, facts, outline);
    let pressure = find_helped_nodes(without_limits, facts, outline);
    let first = [
        free_vram(facts, outline),
        start_agent(cluster, facts, outline),
        wait_for_start_gate(cluster, facts, &gate),
        wait_for_engines(cluster, facts, &pressure),
    ];
    let others = LIFTS.iter().map(|(code, removal)| {
        lift_remedy(
            code,
            removal,
            cluster,
            facts,
            &find_helped_nodes(removal.apply, facts, outline),
        )
    });
    first.into_iter().chain(others).flatten().collect()
}

fn find_helped_nodes(
    apply: fn(&Node, &Demand) -> Option<(Node, Demand)>,
    facts: &Facts,
    outline: &NodeOutline,
) -> HelpedNodes {
    let mut found = HelpedNodes::default();
    for (node_index, _) in outline.refused_and_queried(facts) {
        let changed = apply(&facts.snapshot.nodes()[node_index], facts.demand());
        let Some(gpus) =
            changed.and_then(|(node, demand)| fitting_gpus(&node, &demand, facts.allowance))
        else {
            continue;
        };
        found.nodes += 1;
        if found.fits.len() < MAX_COMPARED_NODES {
            found.fits.push((node_index, gpus));
        }
    }
    found
}

fn without_start_gate(node: &Node, demand: &Demand) -> Option<(Node, Demand)> {
    without_gpu_reason(node, demand, |gpu| gpu.starting = false)
}

fn without_limits(node: &Node, demand: &Demand) -> Option<(Node, Demand)> {
    let is_busy = node
        .gpus
        .iter()
        .any(|gpu| demand.terms.is_exceeded_by(gpu.engine_load));
    without_reason_if(is_busy, node, demand, |_, demand| {
        demand.terms = ClassTerms {
            kv_cache_limit: None,
            queue_limit: None,
            ..demand.terms
        };
    })
}

/// The remedy that removes one reason, for the nearest node that it helps.
fn lift_remedy(
    code: &str,
    removal: &Lift,
    cluster: &ClusterCopy,
    facts: &Facts,
    found: &HelpedNodes,
) -> Option<RemedyChange> {
    let (node_index, gpus) = *found.fits.first()?;
    let node = &facts.snapshot.nodes()[node_index];
    let details = NodeDetails::collect(cluster.ledger(), &node.name);
    let occupants = details.occupants_of(&node.devices, gpus, facts);
    let by = match removal.names {
        PodsToName::Nobody => Vec::new(),
        PodsToName::Residents => {
            occupants.names_where(|one| one.phase != OccupantPhase::SoftlyReserved)
        }
        PodsToName::Excluding => occupants.pods_excluding(facts.demand()),
    };
    let is_lost = gpus
        .iter()
        .any(|gpu_index| node.gpus[gpu_index].health == Health::Lost);
    let gpu_candidate = candidate_on(node, gpus);
    let action = (removal.action)(&FitWithoutReason {
        node: &node.name,
        gpus: &gpu_candidate.to_string(),
        fits: &gpu_candidate.fits(),
        are_several: gpu_candidate.gpus.len() > 1,
        class: &facts.policy.class(facts.demand().class).name,
        pool: details.pool.as_deref(),
        by: &by,
        state: if is_lost { "lost" } else { "draining" },
    });
    Some(RemedyChange::Lift {
        reason: code.into(),
        action,
        gpu_candidate,
        by,
        nodes: found.nodes,
    })
}

/// The node where the last obstructing engine finishes starting soonest.
fn wait_for_start_gate(
    cluster: &ClusterCopy,
    facts: &Facts,
    found: &HelpedNodes,
) -> Option<RemedyChange> {
    let mut gate = |(node_index, gpus): &(usize, GpuSet)| {
        let node = &facts.snapshot.nodes()[*node_index];
        let details = NodeDetails::collect(cluster.ledger(), &node.name);
        let starting = gpus
            .iter()
            .filter(|gpu_index| node.gpus[*gpu_index].starting)
            .collect();
        let (by, opens_in) = details
            .occupants_of(&node.devices, starting, facts)
            .starting_pods();
        (opens_in, by, candidate_on(node, *gpus))
    };
    let gates: Vec<_> = found.fits.iter().map(&mut gate).collect();
    let first = gates
        .into_iter()
        .min_by_key(|(opens_in, ..)| opens_in.unwrap_or(Millis(u64::MAX)));
    first.map(
        |(opens_in_millis, by, gpu_candidate)| RemedyChange::WaitForStartGate {
            gpu_candidate,
            by,
            opens_in_millis,
        },
    )
}

/// The node where the busiest of the obstructing engines has the least load.
fn wait_for_engines(
    cluster: &ClusterCopy,
    facts: &Facts,
    found: &HelpedNodes,
) -> Option<RemedyChange> {
    let demand = facts.demand();
    let nodes = facts.snapshot.nodes();
    let engine_load = |(node_index, gpus): &(usize, GpuSet)| {
        let each = gpus
            .iter()
            .map(|gpu| nodes[*node_index].gpus[gpu].engine_load);
        each.filter(|engine_load| demand.terms.is_exceeded_by(*engine_load))
            .fold(EngineLoad::NONE, EngineLoad::combined_with)
    };
    let figures = |gpu_candidate: &&(usize, GpuSet)| {
        let engine_load = engine_load(gpu_candidate);
        (
            engine_load.occupancy().map(Percent::get),
            engine_load.queue,
            gpu_candidate.0,
        )
    };
    let calmest = found.fits.iter().min_by_key(figures)?;
    let node = &nodes[calmest.0];
    let details = NodeDetails::collect(cluster.ledger(), &node.name);
    let busy = calmest.1.iter().filter(|gpu_index| {
        demand
            .terms
            .is_exceeded_by(node.gpus[*gpu_index].engine_load)
    });
    let by = details
        .occupants_of(&node.devices, busy.collect(), facts)
        .names_where(|gpu_occupant| {
            gpu_occupant.has_engine && gpu_occupant.phase != OccupantPhase::SoftlyReserved
        });
    let (kv_cache, queue) = (engine_load(calmest).occupancy(), engine_load(calmest).queue);
    Some(RemedyChange::WaitForEngines {
        by,
        gpu_candidate: candidate_on(node, calmest.1),
        kv_cache_percent: kv_cache
            .filter(|kv| demand.terms.kv_cache_limit.is_some_and(|limit| *kv > limit)),
        kv_cache_limit_percent: demand.terms.kv_cache_limit,
        queue: queue.filter(|queue| demand.terms.queue_limit.is_some_and(|limit| *queue > limit)),
        queue_limit: demand.terms.queue_limit,
    })
}

/// The node that lacks the least VRAM, if nothing else is missing.
fn free_vram(facts: &Facts, outline: &NodeOutline) -> Option<RemedyChange> {
    let demand = facts.demand();
    let nodes = facts.snapshot.nodes();
    let offer = |node_index: usize| {
        let node = &nodes[node_index];
        check_node_admission(node, demand).ok()?;
        let short = |(gpu_index, gpu): (usize, &Gpu)| match &obstacles(
            gpu,
            demand,
            GpuOccupants::none(facts),
        )[..]
        {
            [] => Some((Bytes::ZERO, gpu_index)),
            [Obstacle::InsufficientVram { short_bytes, .. }] => Some((*short_bytes, gpu_index)),
            _ => None,
        };
        let mut short: Vec<(Bytes, usize)> =
            node.gpus.iter().enumerate().filter_map(short).collect();
        short.sort_unstable();
        let wanted = short.get(..demand.gpus as usize)?;
        let missing: Bytes = wanted.iter().map(|(bytes, _)| *bytes).sum();
        (missing > Bytes::ZERO).then(|| {
            (
                missing,
                node_index,
                wanted.iter().map(|(_, gpu_index)| *gpu_index).collect(),
            )
        })
    };
    let offers = outline
        .refused_and_queried(facts)
        .filter_map(|(node_index, _)| offer(node_index));
    let (short_bytes, node_index, gpus): (Bytes, usize, GpuSet) =
        offers.min_by_key(|(missing, node_index, _)| (*missing, *node_index))?;
    let node = &nodes[node_index];
    let is_allowed = crate::placing::fit::is_allowed(facts.allowance, &node.gpus, demand, gpus);
    is_allowed.then(|| RemedyChange::FreeVram {
        gpu_candidate: candidate_on(node, gpus),
        short_bytes,
    })
}

/// Nodes without a report, or without one that is recent enough for the policy; of those that have never reported, only ones
/// that show by other means that they have GPUs: most nodes without a report have none.
fn start_agent(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
) -> Option<RemedyChange> {
    if facts.demand().is_allocated_externally() {
        return None;
    }
    let lacks_report = |misfit: &Misfit| {
        matches!(
            misfit,
            Misfit::NoGpus | Misfit::NoFreshReport | Misfit::UnreadableLabel
        )
    };
    let nodes = facts.snapshot.nodes();
    let shows_gpus = |node_index: &usize| {
        let node = &nodes[*node_index];
        node.freshness != Freshness::Unreported
            || !node.warnings.is_empty()
            || cluster.ledger().has_gpu_label(&node.name)
    };
    let without_report = outline
        .refused_and_queried(facts)
        .filter(|(_, misfit)| lacks_report(misfit));
    let all: Vec<usize> = without_report
        .map(|(node_index, _)| node_index)
        .filter(shows_gpus)
        .collect();
    let Some(first) = all.iter().min().map(|node_index| &nodes[*node_index]) else {
        let is_any_known = nodes
            .iter()
            .any(|node| !node.gpus.is_empty() || !node.plugin.is_empty());
        return (!is_any_known && !nodes.is_empty()).then_some(RemedyChange::LabelGpuNodes);
    };
    Some(RemedyChange::StartAgent {
        node: first.name.clone(),
        nodes: all.len() as u32,
        freshness: first.freshness,
    })
}
