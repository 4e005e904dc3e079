//! The `preempt` verb on the wire: reads the pod and kube-scheduler's candidates, asks the core, writes the reservation to the
//! pod, and answers the one node with the cheapest victims.

use super::filter::read_pod;
use super::request::BadRequest;
use super::wire::{AnsweredVictim, AnsweredVictims, PreemptionArgs, PreemptionResult};
use super::{Extender, shadow};
use crate::service::{ClusterGuard, WorkKind};
use std::collections::BTreeMap;
use stowage_kubernetes_objects as objects;
use stowage_recording::answer::Decision;
use stowage_scheduling::control_loop::{
    ControlPlaneError, PodEvent, PodEventReason, StatusChange, reserved_text,
};
use stowage_scheduling::evicting::VictimSet;
use stowage_scheduling::ids::{PodUid, comma_separated};
use stowage_scheduling::ledger::PodState;
use stowage_scheduling::policy::Mode;
use stowage_scheduling::verbs::preempt::{
    LeftToPlanner, OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, ReservationMade,
    preempt as decide,
};
use stowage_scheduling::verbs::preempt_device_plugin::{NarrowAsked, NarrowedCandidates};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::wait::ReleaseReservation;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_telemetry::NO_CODE;
use stowage_telemetry::traces::PodSpan;
use tracing::{info, warn};

pub async fn preempt(
    extender: &Extender,
    args: &PreemptionArgs<'_>,
) -> Result<PreemptionResult, BadRequest> {
    let count = |outcome, code| {
        extender
            .state
            .metrics
            .answers
            .with_label_values(&["preempt", outcome, code])
            .inc()
    };
    let offered = args.offered().ok_or_else(|| {
        BadRequest::unprocessable(
            "no-candidates",
            "neither NodeNameToVictims nor NodeNameToMetaVictims is there",
        )
    })?;
    let request = match read_pod(extender, &args.pod)? {
        Ok(request) => request,
        Err(invalid) => {
            let let_through = shadow::preempt_invalid(extender, &offered, &args.pod, &invalid);
            return Ok(let_through.unwrap_or_else(|| {
                invalid.record_event(extender);
                count("none", invalid.error.code());
                PreemptionResult::default()
            }));
        }
    };
    let is_shadowing = extender.state.cluster().ledger().policy().mode == Mode::Shadow;
    if is_shadowing || request.demand.is_allocated_externally() {
        let query = NarrowAsked {
            request: request.clone(),
            offered: offered.clone(),
        };
        let (narrowed, recorded_input) = {
            let mut cluster = extender.state.cluster();
            (cluster.apply(query), cluster.last_recorded_input())
        };
        extender
            .state
            .record_answer(recorded_input, || Decision::Narrow(narrowed.clone()));
        if narrowed.policy.mode == Mode::Shadow {
            return Ok(shadow::preempt(extender, &request, &offered, &narrowed));
        }
        match narrowed.chosen_index {
            Some(_) => count("narrowed", NO_CODE),
            None => count("none", narrowed.code),
        }
        return Ok(narrowed_answer(&offered, &narrowed));
    }
    if !request.demand.may_preempt {
        count("none", "preemption-policy-never");
        return Ok(PreemptionResult::default());
    }
    let wants = objects::kube_filters::requirements(&args.pod);
    let query = PreemptAsked {
        request,
        wants,
        offered,
    };
    let (view, recorded_input) = {
        let mut cluster = extender.state.cluster();
        (cluster.apply(query), cluster.last_recorded_input())
    };
    let Some((request, view)) = view else {
        extender
            .state
            .record_answer(recorded_input, || Decision::Preempt(None));
        count("none", "already-reserved");
        return Ok(PreemptionResult::default());
    };
    // The search may take a while on a large cluster, so it does not run on the threads that answer filter.
    let step = extender.state.traces().step("decide");
    let decision = extender
        .state
        .heavy_work
        .spawn(WorkKind::Preempt, move || decide(view))
        .await;
    if let Ok(decision) = &decision {
        extender
            .state
            .record_answer(recorded_input, || Decision::Preempt(Some(decision.clone())));
    }
    let leave_to_planner = |code| {
        count("none", code);
        extender
            .state
            .cluster()
            .apply(LeftToPlanner(request.uid.clone()));
        Ok(PreemptionResult::default())
    };
    let (victims, other_victims) = match decision {
        Ok(PreemptDecision::NoCandidate) => return leave_to_planner("no-candidate"),
        Ok(PreemptDecision::FitsNow) => return leave_to_planner("fits-now"),
        Ok(PreemptDecision::Evict {
            victims,
            victims_without_vram: others,
        }) => (victims, others),
        Err(_) => return leave_to_planner("panic"),
    };
    step.set_node(&victims.node);
    step.set("stowage.victims", victims.victims.len() as i64);
    drop(step);
    if !reserve(extender, &request, &victims).await {
        return leave_to_planner("not-reserved");
    }
    if victims.victims.is_empty() && other_victims.is_empty() {
        // kube-scheduler treats a node without victims as an error of the whole preemption.
        count("none", "awaited");
        return Ok(PreemptionResult::default());
    }
    count("reserved", NO_CODE);
    Ok(answer(other_victims, &victims))
}

/// Makes the reservation: first in the ledger, so that no other pod can get the VRAM, then on the pod, so that it survives a
/// restart. No pod is evicted unless both succeed.
async fn reserve(extender: &Extender, request: &VerbRequest, victims: &VictimSet) -> bool {
    let (extender, uid, key) = (extender.clone(), request.uid.clone(), request.key.clone());
    let (victims, policy) = (victims.clone(), request.demand.classified_by);
    let writes = extender.writes.clone();
    let task = async move {
        let decided = PreemptDecided {
            uid: uid.clone(),
            victims: victims.clone(),
            policy,
        };
        let made = extender.state.cluster().apply(decided);
        let ReservationMade {
            reservation,
            policy,
        } = match made {
            Ok(made) => made,
            Err(reason) => {
                info!(pod = %key, node = %victims.node, %reason, "no reservation");
                return false;
            }
        };
        let span = extender
            .state
            .traces()
            .write("write reservation", &uid, &key);
        span.set_node(&reservation.node);
        let change = StatusChange::reservation(reservation.clone());
        let written = span
            .instrument(extender.control_plane.write_status(&key, &uid, &change))
            .await;
        if written.is_err() {
            span.fail("not-written");
        }
        drop(span);
        // A statement of its own, so that the lock is released with it.
        let settled =
            confirm_reservation(&mut extender.state.cluster(), &uid, &reservation, written);
        if let Err(reason) = settled {
            warn!(pod = %key, node = %reservation.node, reason, "the reservation is given up; no pod is evicted");
            // If it was written all the same, the planner ends it as long as the pod shows it: a write here could end another one,
            // made meanwhile.
            return false;
        }
        let text = reserved_text(&reservation);
        let (node, leaving, exact) = (&reservation.node, &reservation.victims, victims.exact);
        info!(pod = %key, %node, victims = %comma_separated(leaving.iter()), exact, %policy, "GPUs reserved");
        extender.control_plane.record_event(PodEvent {
            key,
            uid,
            kind: PodEventReason::Reserved,
            text,
        });
        true
    };
    // The write continues if kube-scheduler disconnects: the ledger must not keep a reservation that the pod does not show.
    writes
        .spawn(PodSpan::current().instrument(task))
        .await
        .unwrap_or(false)
}

/// Whether the reservation stands after its write was answered, or why not. The write may have taken so long that the reservation
/// was released meanwhile, and another one made; or the watch may have shown it although no answer came, so that the planner
/// evicts for it already.
fn confirm_reservation(
    cluster: &mut ClusterGuard<'_>,
    uid: &PodUid,
    reservation: &Reservation,
    written: Result<(), ControlPlaneError>,
) -> Result<(), String> {
    let current = cluster
        .ledger()
        .pod_state(uid)
        .and_then(PodState::reservation);
    if !current.is_some_and(|present| present.is_same(reservation)) {
        return Err("it was released while it was written".to_owned());
    }
    let error = match written {
        Ok(()) => return Ok(()),
        Err(ControlPlaneError::Unknown(_))
            if cluster.ledger().shows_reservation(uid, reservation) =>
        {
            return Ok(());
        }
        Err(error) => error,
    };
    cluster.apply(ReleaseReservation(uid.clone()));
    Err(error.to_string())
}

fn answer(others: Vec<String>, victims: &VictimSet) -> PreemptionResult {
    let chosen = victims.victims.iter().map(|uid| uid.to_string());
    let pods = chosen
        .chain(others)
        .map(|uid| AnsweredVictim { uid })
        .collect();
    let answered = AnsweredVictims {
        pods,
        num_pdb_violations: victims.eviction_cost.violations.into(),
    };
    PreemptionResult {
        node_name_to_meta_victims: BTreeMap::from([(victims.node.to_string(), answered)]),
    }
}

/// The chosen node with kube-scheduler's own victims.
fn narrowed_answer(offered: &[OfferedNode], narrowed: &NarrowedCandidates) -> PreemptionResult {
    let answered = narrowed.chosen_index.map(|index| {
        let OfferedNode {
            node,
            victims,
            pdb_violations,
        } = &offered[index];
        let pods = victims
            .iter()
            .map(|uid| AnsweredVictim { uid: uid.clone() })
            .collect();
        (
            node.clone(),
            AnsweredVictims {
                pods,
                num_pdb_violations: *pdb_violations,
            },
        )
    });
    PreemptionResult {
        node_name_to_meta_victims: BTreeMap::from_iter(answered),
    }
}
