//! The `preempt` verb: of the nodes on which kube-scheduler could preempt, the one with the cheapest victims, and a reservation
//! there.
//!
//! kube-scheduler's candidates come from a dry run of its own filters, which count the sum of the node. Stowage chooses its own
//! victims: on the GPUs that the pod needs, and enough of them that kube-scheduler's sum is satisfied too. Where a device
//! plugin allocates the GPUs Stowage cannot choose them, and [`preempt_device_plugin`](super::preempt_device_plugin) chooses
//! among kube-scheduler's candidates.

use super::filter::{VerbRequest, asking};
use super::preempt_device_plugin::{self, narrow};
use super::request::BadRequest;
use super::wire::{AnsweredVictim, AnsweredVictims, OfferedNode, PreemptionArgs, PreemptionResult};
use super::{Extender, shadow};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::kubernetes::objects;
use crate::kubernetes::port::{PodEvent, PodEventReason, StatusChange, reserved_text};
use crate::scheduling::evicting;
use crate::scheduling::evicting::{BudgetRules, PreemptionCandidate, SearchEffort, Shortfall, VictimSet};
use crate::scheduling::kube_filters::{AssumedNodeChange, FilterQuery};
use crate::scheduling::ledger::PotentialVictim;
use crate::scheduling::ledger::{Ledger, Preemptor};
use crate::scheduling::policy::{Digest, Mode, ViolateBudgets};
use crate::scheduling::vocabulary::demand::{Demand, HostResources};
use crate::scheduling::vocabulary::placement::Reservation;
use crate::units::Millis;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::{info, warn};

/// Grace period assumed for pods that request no VRAM; they are not in the ledger. Kubernetes' default.
const OTHERS_GRACE: Millis = Millis::seconds(30);

/// The offered nodes, with everything that their eviction cost depends on.
struct OfferedCandidates {
    rooms: Vec<PreemptionCandidate>,
    /// For each node, those victims of kube-scheduler that request no VRAM: their CPU or memory is needed.
    others: BTreeMap<NodeName, Vec<String>>,
    violate_budgets: ViolateBudgets,
}

/// The preempting pod, and the ledger state that the decision is based on.
struct PreemptionRequest<'a> {
    ledger: &'a Ledger,
    uid: &'a PodUid,
    preemptor: Preemptor,
    /// CPU, memory and other resources that it requests besides GPUs.
    question: FilterQuery<'a>,
}

pub async fn preempt(extender: &Extender, args: &PreemptionArgs<'_>) -> Result<PreemptionResult, BadRequest> {
    let count =
        |outcome, code| extender.service.metrics.answers.with_label_values(&["preempt", outcome, code]).inc();
    let offered = args.offered().ok_or_else(|| {
        BadRequest::unprocessable(
            "no-candidates",
            "neither NodeNameToVictims nor NodeNameToMetaVictims is there",
        )
    })?;
    let mut asking = match asking(extender, &args.pod)? {
        Ok(asking) => asking,
        Err(unclear) => {
            let let_through = shadow::preempt_unclear(extender, &offered, &args.pod, &unclear);
            return Ok(let_through.unwrap_or_else(|| {
                unclear.tell(extender);
                count("none", unclear.error.code());
                PreemptionResult::default()
            }));
        }
    };
    let is_shadowing = extender.service.ledger().policy().mode == Mode::Shadow;
    if is_shadowing || asking.demand.asks_plugin() {
        let narrowed = narrow(extender, &asking, &offered);
        if narrowed.policy.mode == Mode::Shadow {
            return Ok(shadow::preempt(extender, &asking, &offered, &narrowed));
        }
        count(if narrowed.chosen.is_some() { "narrowed" } else { "none" }, narrowed.code);
        return Ok(preempt_device_plugin::answer(&offered, &narrowed));
    }
    if !asking.demand.may_preempt {
        count("none", "preemption-policy-never");
        return Ok(PreemptionResult::default());
    }
    let Some(offers) = offers(extender, &mut asking, &args.pod, &offered) else {
        count("none", "already-reserved");
        return Ok(PreemptionResult::default());
    };
    // The search may take a while on a large cluster, so it does not run on the threads that answer filter.
    let demand = asking.demand.clone();
    let found = tokio::task::spawn_blocking(move || cheapest(offers, &demand)).await;
    let Some((others, mut victims)) = found.ok().flatten() else {
        count("none", "no-candidate");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    };
    let leaves_nobody = victims.victims.is_empty() && others.is_empty();
    if leaves_nobody && victims.awaited.is_empty() {
        // VRAM has become free since the pod was rejected. The ledger wakes the pod when it notices; no pod is evicted.
        count("none", "fits-now");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    }
    if !others.is_empty() {
        victims.longest_grace = victims.longest_grace.max(OTHERS_GRACE);
    }
    if !reserve(extender, &asking, &victims).await {
        count("none", "not-reserved");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    }
    if leaves_nobody {
        // kube-scheduler treats a node without victims as an error of the whole preemption.
        count("none", "awaited");
        return Ok(PreemptionResult::default());
    }
    count("reserved", "");
    Ok(answer(others, &victims))
}

/// If the sum of every node is too small kube-scheduler never calls `filter`, and only this call shows that the pod is pending.
fn leave_to_planner(extender: &Extender, uid: &PodUid) {
    let mut ledger = extender.service.ledger();
    if ledger.pod_state(uid).is_some_and(|entry| entry.refused().is_none()) {
        ledger.note_refused(uid, None);
    }
}

/// The offered nodes as the ledger sees them, or `None` if the pod has a reservation already. Brings `asking` to the policy of
/// that view.
fn offers(
    extender: &Extender,
    asking: &mut VerbRequest,
    pod: &Pod,
    offered: &[OfferedNode<'_>],
) -> Option<OfferedCandidates> {
    let kube_filters = extender.service.kube_filters().snapshot();
    // kube-scheduler may have seen the pod before the watch here did.
    let wants = objects::kube_filters::requirements(pod);
    let mut ledger = extender.service.ledger();
    asking.come_under(ledger.policy());
    asking.enter(&mut ledger);
    if ledger.reserved_placement(&asking.uid).is_some() {
        return None;
    }
    ledger.note_offered_to_preempt(&asking.uid, offered.len());
    let uid = &asking.uid;
    let question = kube_filters.ask(None, &wants);
    let case = PreemptionRequest { ledger: &ledger, uid, preemptor: ledger.preemptor(uid), question };
    let violate_budgets = ledger.policy().violate_budgets;
    let mut offers = OfferedCandidates { rooms: Vec::new(), others: BTreeMap::new(), violate_budgets };
    for (room, others) in offered.iter().filter_map(|node| offer(&case, node)) {
        offers.others.insert(room.node.clone(), others);
        offers.rooms.push(room);
    }
    Some(offers)
}

fn offer(
    case: &PreemptionRequest<'_>,
    offered: &OfferedNode<'_>,
) -> Option<(PreemptionCandidate, Vec<String>)> {
    let PreemptionRequest { ledger, uid, preemptor, question } = case;
    let node = NodeName::parse(offered.node).ok()?;
    // If kube-scheduler itself would evict no pod, it rejects the node for another reason.
    if offered.victims.is_empty() {
        return None;
    }
    let mut room = ledger.candidate_for(preemptor, &node)?;
    keep_whole_groups(&mut room);
    let mut residents = Vec::new();
    let mut others = Vec::new();
    for victim in &offered.victims {
        let uid = PodUid::parse(victim).ok()?;
        match ledger.resident_on(&uid, &node) {
            Some(resident) => residents.push(resident),
            // What its eviction would free, and whether it is allowed, is unknown: skip this node.
            None if ledger.pod_state(&uid).is_some() => return None,
            None => others.push((*victim).to_owned()),
        }
    }
    let mut shortfall = Shortfall::of(residents.iter());
    // At most what the node falls short by: what kube-scheduler's victims free beyond that is not needed.
    let missing = ledger.pod_state(uid)?.demand.vram().minus(ledger.sum_left_on(&node));
    shortfall.vram = shortfall.vram.min(missing);
    let lack =
        question.shortfall(&node, &AssumedNodeChange { leaving: &[], coming: ledger.coming_to(&node) });
    let HostResources { cpu, memory } = shortfall.host_resources;
    shortfall.host_resources = HostResources { cpu: cpu.min(lack.cpu), memory: memory.min(lack.memory) };
    room.shortfall = shortfall;
    // Whatever kube-scheduler's victims must free, and none that Stowage knows frees, the chosen victims must free.
    let known = known_violations(&room, &residents);
    room.violations = u32::try_from(offered.pdb_violations).unwrap_or(0).saturating_sub(known);
    if others.is_empty() {
        room.violations = 0;
    }
    Some((room, others))
}

/// kube-scheduler evicts pods of one node: a group with members on other nodes is kept.
fn keep_whole_groups(room: &mut PreemptionCandidate) {
    let is_gone = |uid: &PodUid| room.candidates.iter().any(|resident| resident.uid == *uid);
    let is_here: Vec<bool> = room.gangs.iter().map(|gang| gang.members.iter().all(is_gone)).collect();
    room.candidates.retain(|resident| resident.gang.is_none_or(|gang| is_here[usize::from(gang)]));
}

/// By how much the known disruption budgets are exceeded if these pods are evicted.
fn known_violations(room: &PreemptionCandidate, residents: &[PotentialVictim]) -> u32 {
    let leaves =
        |candidate: &&PotentialVictim| residents.iter().any(|resident| resident.uid == candidate.uid);
    let covered = room.candidates.iter().filter(leaves).flat_map(|candidate| &candidate.budgets);
    let mut counts = vec![0u32; room.budgets.len()];
    covered.for_each(|budget| counts[usize::from(*budget)] += 1);
    counts.iter().zip(&room.budgets).map(|(count, allowed)| count.saturating_sub(*allowed)).sum()
}

/// Least eviction cost, then node name. Sets that violate no disruption budget come first; others are allowed only if the
/// policy permits it.
fn cheapest(offers: OfferedCandidates, demand: &Demand) -> Option<(Vec<String>, VictimSet)> {
    let OfferedCandidates { rooms, mut others, violate_budgets } = offers;
    let by = |rules| evicting::cheapest(&rooms, demand, rules, SearchEffort::default());
    let found = match violate_budgets {
        ViolateBudgets::Never => by(BudgetRules::Keep),
        ViolateBudgets::WhenNothingElse => by(BudgetRules::Keep).or_else(|| by(BudgetRules::Violate)),
    }?;
    Some((others.remove(&found.node).unwrap_or_default(), found))
}

/// Makes the reservation: first in the ledger, so that no other pod can get the VRAM, then on the pod, so that it survives a
/// restart. No pod is evicted unless both succeed.
async fn reserve(extender: &Extender, asking: &VerbRequest, victims: &VictimSet) -> bool {
    let (extender, uid, key) = (extender.clone(), asking.uid.clone(), asking.key.clone());
    let (victims, version) = (victims.clone(), asking.demand.classified_by);
    let writes = extender.writes.clone();
    let task = async move {
        let Some((reservation, policy)) = reserve_in_ledger(&extender, &uid, &victims, version) else {
            return false;
        };
        let written = extender
            .control_plane
            .write_status(&key, &uid, &StatusChange::reservation(reservation.clone()))
            .await;
        if let Err(error) = &written {
            warn!(pod = %key, %error, "could not write the reservation; no pod is evicted");
            extender.service.ledger().release_reservation(&uid);
        }
        // The write may have taken so long that the reservation was released meanwhile.
        let stands =
            extender.service.ledger().pod_state(&uid).is_some_and(|entry| entry.reservation().is_some());
        if !stands {
            // It may have been written although no answer said so.
            let ended =
                extender.control_plane.write_status(&key, &uid, &StatusChange::end_reservation()).await;
            if let Err(error) = ended {
                warn!(pod = %key, %error, "could not clear the condition of a reservation; it may stay until its deadline");
            }
            return false;
        }
        let text = reserved_text(&reservation);
        let (node, leaving, exact) = (&reservation.node, &reservation.victims, victims.exact);
        info!(pod = %key, %node, victims = ?leaving, exact, %policy, "GPUs reserved");
        extender.control_plane.record_event(PodEvent { key, uid, kind: PodEventReason::Reserved, text });
        true
    };
    // The write continues if kube-scheduler disconnects: the ledger must not keep a reservation that the pod does not show.
    writes.spawn(task).await.unwrap_or(false)
}

/// The reservation and the policy it was made by; `None` if the free VRAM, or the policy that `version` names, changed
/// meanwhile: the victims were chosen by the previous rules.
fn reserve_in_ledger(
    extender: &Extender,
    uid: &PodUid,
    victims: &VictimSet,
    version: u64,
) -> Option<(Reservation, Digest)> {
    let mut ledger = extender.service.ledger();
    let policy = ledger.policy().clone();
    // The version also differs if shadow mode began just before the offers were read.
    if policy.version != version || policy.mode == Mode::Shadow {
        info!(policy = %policy.digest, "the policy changed while a price was found");
        return None;
    }
    // One limit for all evictions; within it the planner may find another node.
    if !ledger.may_order(&victims.all_victims()) {
        info!(node = %victims.node, "enough pods were evicted within the minute");
        return None;
    }
    let node = ledger.node(&victims.node)?;
    let devices: Option<Arc<[GpuUuid]>> =
        victims.gpus.iter().map(|place| node.devices.get(place).map(|device| device.uuid.clone())).collect();
    let deadline = extender.service.now() + victims.longest_grace + policy.reservation_slack;
    let reservation = Reservation {
        node: victims.node.clone(),
        devices: devices?,
        victims: victims.all_victims().into(),
        deadline,
    };
    match ledger.reserve(uid, reservation.clone()) {
        Ok(()) => {
            ledger.note_ordered(&victims.all_victims());
            victims.victims.iter().for_each(|victim| ledger.note_evicted(victim));
            Some((reservation, policy.digest))
        }
        Err(conflict) => {
            info!(%conflict, "the node changed during the search for victims");
            None
        }
    }
}

fn answer(others: Vec<String>, victims: &VictimSet) -> PreemptionResult {
    let chosen = victims.victims.iter().map(|uid| uid.to_string());
    let pods = chosen.chain(others).map(|uid| AnsweredVictim { uid }).collect();
    let answered = AnsweredVictims { pods, num_pdb_violations: victims.eviction_cost.violations.into() };
    PreemptionResult { node_name_to_meta_victims: BTreeMap::from([(victims.node.to_string(), answered)]) }
}
