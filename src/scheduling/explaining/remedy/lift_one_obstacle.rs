//! Removes one obstacle at a time, on every node that does not fit, and asks the core again.

use super::{RemedyChange, gpu_candidate, gpu_candidates};
use crate::explaining::facts::{Facts, GpuOccupants, NodeDetails};
use crate::explaining::nodes::NodeOutline;
use crate::explaining::obstacle::{Obstacle, obstacles};
use crate::ledger::OccupantPhase;
use crate::placing::fit::{Misfit, check_node_admission};
use crate::reasons::{LIFTS, Lift, LiftedPlace, Named, lifted_from_gpus, lifted_if};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::ClusterCopy;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::{EngineLoad, Freshness};

/// How many of the nodes that the same change helps are compared to find the nearest.
const COMPARED: usize = 16;

/// The nodes that a change helps, nearest first.
#[derive(Default)]
struct LiftedNodes {
    gpu_candidates: Vec<(usize, GpuSet)>,
    nodes: u32,
}

pub fn lifted(cluster: &ClusterCopy, facts: &Facts, outline: &NodeOutline) -> Vec<RemedyChange> {
    let gate = find(without_start_gate, facts, outline);
    let pressure = find(without_limits, facts, outline);
    let first = [
        free_more(facts, outline),
        start_agent(cluster, facts, outline),
        earliest_start_gate(cluster, facts, &gate),
        calmest(cluster, facts, &pressure),
    ];
    let others = LIFTS.iter().map(|(code, lift)| {
        told(
            code,
            lift,
            cluster,
            facts,
            &find(lift.apply, facts, outline),
        )
    });
    first.into_iter().chain(others).flatten().collect()
}

fn find(
    apply: fn(&Node, &Demand) -> Option<(Node, Demand)>,
    facts: &Facts,
    outline: &NodeOutline,
) -> LiftedNodes {
    let mut found = LiftedNodes::default();
    for (place, _) in outline.refused_and_open(facts) {
        let lifted = apply(&facts.snapshot.nodes()[place], facts.demand());
        let Some(gpus) =
            lifted.and_then(|(node, demand)| gpu_candidates(&node, &demand, facts.allowance))
        else {
            continue;
        };
        found.nodes += 1;
        if found.gpu_candidates.len() < COMPARED {
            found.gpu_candidates.push((place, gpus));
        }
    }
    found
}

fn without_start_gate(node: &Node, demand: &Demand) -> Option<(Node, Demand)> {
    lifted_from_gpus(node, demand, |gpu| gpu.starting = false)
}

fn without_limits(node: &Node, demand: &Demand) -> Option<(Node, Demand)> {
    let is_busy = node
        .gpus
        .iter()
        .any(|gpu| demand.terms.exceeded_by(gpu.engine_load));
    lifted_if(is_busy, node, demand, |_, demand| {
        demand.terms = ClassTerms {
            kv_cache_limit: None,
            queue_limit: None,
            ..demand.terms
        };
    })
}

/// The remedy that removes one reason, for the nearest node that it helps.
fn told(
    code: &str,
    lift: &Lift,
    cluster: &ClusterCopy,
    facts: &Facts,
    found: &LiftedNodes,
) -> Option<RemedyChange> {
    let (place, gpus) = *found.gpu_candidates.first()?;
    let node = &facts.snapshot.nodes()[place];
    let known = NodeDetails::take(cluster.ledger(), &node.name);
    let there = known.on(&node.devices, gpus, facts);
    let by = match lift.names {
        Named::Nobody => Vec::new(),
        Named::Residents => there.named(|one| one.presence != OccupantPhase::SoftlyReserved),
        Named::Excluding => there.excluding(facts.demand()),
    };
    let is_lost = gpus
        .iter()
        .any(|place| node.gpus[place].health == Health::Lost);
    let gpu_candidate = gpu_candidate(node, gpus);
    let action = (lift.action)(&LiftedPlace {
        node: &node.name,
        gpus: &gpu_candidate.to_string(),
        fits: &gpu_candidate.fits(),
        are_several: gpu_candidate.gpus.len() > 1,
        class: &facts.policy.class(facts.demand().class).name,
        pool: known.pool.as_deref(),
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
fn earliest_start_gate(
    cluster: &ClusterCopy,
    facts: &Facts,
    found: &LiftedNodes,
) -> Option<RemedyChange> {
    let mut gate = |(place, gpus): &(usize, GpuSet)| {
        let node = &facts.snapshot.nodes()[*place];
        let known = NodeDetails::take(cluster.ledger(), &node.name);
        let starting = gpus
            .iter()
            .filter(|place| node.gpus[*place].starting)
            .collect();
        let (by, opens_in) = known.on(&node.devices, starting, facts).starting();
        (opens_in, by, gpu_candidate(node, *gpus))
    };
    let gates: Vec<_> = found.gpu_candidates.iter().map(&mut gate).collect();
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
fn calmest(cluster: &ClusterCopy, facts: &Facts, found: &LiftedNodes) -> Option<RemedyChange> {
    let demand = facts.demand();
    let nodes = facts.snapshot.nodes();
    let engine_load = |(place, gpus): &(usize, GpuSet)| {
        let each = gpus.iter().map(|gpu| nodes[*place].gpus[gpu].engine_load);
        each.filter(|engine_load| demand.terms.exceeded_by(*engine_load))
            .fold(EngineLoad::NONE, EngineLoad::beside)
    };
    let figures = |gpu_candidate: &&(usize, GpuSet)| {
        let engine_load = engine_load(gpu_candidate);
        (
            engine_load.occupancy().map(Percent::get),
            engine_load.queue,
            gpu_candidate.0,
        )
    };
    let calmest = found.gpu_candidates.iter().min_by_key(figures)?;
    let node = &nodes[calmest.0];
    let known = NodeDetails::take(cluster.ledger(), &node.name);
    let busy = calmest
        .1
        .iter()
        .filter(|place| demand.terms.exceeded_by(node.gpus[*place].engine_load));
    let by = known
        .on(&node.devices, busy.collect(), facts)
        .named(|gpu_occupant| {
            gpu_occupant.engine && gpu_occupant.presence != OccupantPhase::SoftlyReserved
        });
    let (kv_cache, queue) = (engine_load(calmest).occupancy(), engine_load(calmest).queue);
    Some(RemedyChange::WaitForEngines {
        by,
        gpu_candidate: gpu_candidate(node, calmest.1),
        kv_cache_percent: kv_cache
            .filter(|kv| demand.terms.kv_cache_limit.is_some_and(|limit| *kv > limit)),
        kv_cache_limit_percent: demand.terms.kv_cache_limit,
        queue: queue.filter(|queue| demand.terms.queue_limit.is_some_and(|limit| *queue > limit)),
        queue_limit: demand.terms.queue_limit,
    })
}

/// The node that lacks the least VRAM, if nothing else is missing.
fn free_more(facts: &Facts, outline: &NodeOutline) -> Option<RemedyChange> {
    let demand = facts.demand();
    let nodes = facts.snapshot.nodes();
    let offer = |place: usize| {
        let node = &nodes[place];
        check_node_admission(node, demand).ok()?;
        let short = |(place, gpu): (usize, &Gpu)| match &obstacles(
            gpu,
            demand,
            GpuOccupants::nobody(facts),
        )[..]
        {
            [] => Some((Bytes::ZERO, place)),
            [Obstacle::InsufficientVram { short_bytes, .. }] => Some((*short_bytes, place)),
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
                place,
                wanted.iter().map(|(_, place)| *place).collect(),
            )
        })
    };
    let offers = outline
        .refused_and_open(facts)
        .filter_map(|(place, _)| offer(place));
    let (short_bytes, place, gpus): (Bytes, usize, GpuSet) =
        offers.min_by_key(|(missing, place, _)| (*missing, *place))?;
    let node = &nodes[place];
    let is_allowed = crate::placing::fit::is_allowed(facts.allowance, &node.gpus, demand, gpus);
    is_allowed.then(|| RemedyChange::FreeVram {
        gpu_candidate: gpu_candidate(node, gpus),
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
    let unseen = |misfit: &Misfit| {
        matches!(
            misfit,
            Misfit::NoGpus | Misfit::NoFreshReport | Misfit::UnreadableLabel
        )
    };
    let nodes = facts.snapshot.nodes();
    let shows_gpus = |place: &usize| {
        let node = &nodes[*place];
        node.freshness != Freshness::Unreported
            || !node.warnings.is_empty()
            || cluster.ledger().shows_gpus(&node.name)
    };
    let unseen = outline
        .refused_and_open(facts)
        .filter(|(_, misfit)| unseen(misfit));
    let all: Vec<usize> = unseen.map(|(place, _)| place).filter(shows_gpus).collect();
    let Some(first) = all.iter().min().map(|place| &nodes[*place]) else {
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
