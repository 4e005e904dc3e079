//! The stage of a pod: pending, with a reservation, being bound, or bound.

use super::explanation::{BoundStartPart, PodStage, PodVerdict, Reason, RefusedPart};
use super::facts::Facts;
use super::loans::pod_loan;
use crate::ids::GpuUuid;
use crate::ledger::{BoundPod, FilterRefusal, PendingPod, PodPhase, WaitKind, WaitingPod};
use crate::planning::{PlanBounds, PlanStep, WaitReason, plan_within, steps_of_run};
use crate::units::{Bytes, Millis, Moment};
use crate::verbs::ClusterCopy;
use crate::vocabulary::node::Node;
use crate::vocabulary::placement::Reservation;

pub fn stage(facts: &Facts) -> PodStage {
    match &facts.entry.phase {
        PodPhase::Bound(bound) => bound_stage(facts, bound),
        PodPhase::Assumed(assumed) => PodStage::Assumed {
            node: assumed.placement.node.clone(),
            gpus: assumed.placement.devices.to_vec(),
            granted_bytes: assumed.placement.granted,
        },
        PodPhase::Waiting(waiting) => match &waiting.reservation {
            Some(reservation) => reserved_stage(facts, reservation),
            None => waiting_stage(facts, waiting),
        },
    }
}

/// Why the planner would not place the group of a pod that waits, if it were first in the queue; `None` if it would, if there is no
/// group that it plans, or if that takes more steps than a run has.
pub fn group_obstacle(cluster: &ClusterCopy, facts: &Facts) -> Option<Reason> {
    let group = facts.entry.disruption_info.placement_group()?;
    let waits = facts.entry.waiting()?.reservation.is_none();
    let pending = waits.then(|| cluster.ledger().group(group).pending)?;
    let is_gated =
        |pod: &PendingPod| pod.uid == facts.uid && matches!(pod.wait_kind, WaitKind::Gated);
    let is_gated = pending.iter().any(is_gated);
    let steps = steps_of_run(facts.snapshot.nodes().len());
    let bounds = PlanBounds {
        free_steps: steps,
        eviction_steps: steps,
        ..PlanBounds::NONE
    };
    let (scratch, filters) = (cluster.ledger().scratch(), cluster.kube_filters());
    let plan = plan_within(scratch, filters, &pending, bounds);
    plan.steps.into_iter().find_map(|step| match step {
        PlanStep::Wait { uid, why, .. } if uid == facts.uid => {
            // Other reasons are of a pod that is planned by itself.
            let is_of_group = match why {
                WaitReason::GroupIncomplete { .. } | WaitReason::GroupTooLarge { .. } => true,
                WaitReason::EvictionLimit(_) => is_gated,
                _ => false,
            };
            is_of_group.then(|| Reason {
                code: why.code().into(),
                text: why.to_string(),
            })
        }
        _ => None,
    })
}

pub fn verdict(facts: &Facts, fitting: u32) -> PodVerdict {
    match &facts.entry.phase {
        PodPhase::Bound(_) => PodVerdict::Bound,
        PodPhase::Assumed(_) => PodVerdict::Assumed,
        // As soon as the VRAM is free, the pod fits.
        PodPhase::Waiting(_) if fitting > 0 => PodVerdict::Fits,
        PodPhase::Waiting(waiting) if waiting.reservation.is_some() => PodVerdict::Reserved,
        PodPhase::Waiting(_) => PodVerdict::DoesNotFit,
    }
}

fn bound_stage(facts: &Facts, bound: &BoundPod) -> PodStage {
    let gate: Option<Moment> = facts.entry.starting;
    let gpus: Option<Vec<GpuUuid>> = match &facts.reserved_placement {
        // By index only, where no agent has reported yet.
        Some((_, Ok(_))) => facts.entry.devices().map(|devices| devices.to_vec()),
        _ => None,
    };
    PodStage::Bound {
        node: bound.node.clone(),
        gpus,
        granted_bytes: charged_vram(facts),
        running_for_millis: facts.now.since(bound.started),
        start_gate_opens_in_millis: gate.map(|gate| gate.since(facts.now)),
        gate_time_taken_millis: Some(facts.gate_time_taken)
            .filter(|taken| *taken > Millis::default()),
        start: facts.entry.start.as_ref().map(|start| BoundStartPart {
            expected_millis: start.expected.time.total(),
            policy_millis: start.expected.prior.total(),
            took_millis: start.took,
        }),
        loan: pod_loan(facts),
        limits: facts.limits.clone(),
    }
}

/// What the pod is charged: whole GPUs that it has exclusively.
fn charged_vram(facts: &Facts) -> Bytes {
    let demand = facts.demand();
    let on = |node: &Node| match &facts.reserved_placement {
        // Of GPUs that are lost it is not known what they have.
        Some((_, Ok(gpus)))
            if facts.entry.devices().is_some() && gpus.iter().count() == demand.gpus as usize =>
        {
            gpus.iter()
                .map(|gpu_index| node.gpus[gpu_index].charge_for(demand.per_gpu, demand.sharing))
                .sum()
        }
        _ => demand.vram(),
    };
    facts
        .entry
        .node()
        .and_then(|node| facts.snapshot.node(node.as_str()))
        .map_or(demand.vram(), on)
}

fn reserved_stage(facts: &Facts, reservation: &Reservation) -> PodStage {
    PodStage::Reserved {
        node: reservation.node.clone(),
        gpus: reservation.devices.to_vec(),
        victims: facts.names(&facts.victims),
        victims_left: facts.victims_left,
        deadline_in_millis: reservation.deadline.since(facts.now),
    }
}

fn waiting_stage(facts: &Facts, waiting: &WaitingPod) -> PodStage {
    let refused = |refused: &FilterRefusal| RefusedPart {
        ago_millis: facts.now.since(refused.at),
        asked_about: facts.queried_count(),
        requeues: refused.requeues,
        failed_requeues: waiting.failed_requeues,
        supposed: refused.is_supposed,
    };
    PodStage::Waiting {
        offered_node: waiting.offered.clone(),
        soft_reservation_ends_in_millis: waiting
            .soft_reservation
            .as_ref()
            .map(|soft_reservation| soft_reservation.expires.since(facts.now)),
        attempts: waiting.tries,
        refused: waiting.refused.as_ref().map(refused),
        preemption_candidates: waiting.offered_to_preempt,
        gate: waiting.gate,
        failed_attempts: waiting
            .failed_attempt
            .map_or(0, |failed_attempt| failed_attempt.times),
    }
}
