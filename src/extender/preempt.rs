//! `preempt`: of the nodes the scheduler could preempt on, the one where the cheapest pods leave, and room held there.
//!
//! The scheduler's candidates come from a dry run of its own filters, which count the node's sum. Stowage chooses its
//! own victims: on the GPUs the pod needs, and enough of them that the scheduler's sum works out too. Where a device plugin
//! hands the GPUs out it cannot, and [`narrow`] chooses among the scheduler's.

use super::filter::{VerbRequest, asking};
use super::preempt_device_plugin::{self, narrow};
use super::request::BadRequest;
use super::wire::{AnsweredVictim, AnsweredVictims, OfferedNode, PreemptionArgs, PreemptionResult};
use super::{Extender, shadow};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::kubernetes::objects;
use crate::kubernetes::port::{PodEvent, PodEventReason, StatusChange};
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

/// What pods that ask for no VRAM may take to leave; theirs is not in the ledger. Kubernetes' default.
const OTHERS_GRACE: Millis = Millis::seconds(30);

/// The nodes that were offered, with all that their price depends on.
struct OfferedCandidates {
    rooms: Vec<PreemptionCandidate>,
    /// Of each, victims of the scheduler's own that ask for no VRAM: it needs their CPU or memory.
    others: BTreeMap<NodeName, Vec<String>>,
    violate_budgets: ViolateBudgets,
}

/// Whose preemption it is, and the books it is judged by.
struct PreemptionRequest<'a> {
    ledger: &'a Ledger,
    uid: &'a PodUid,
    preemptor: Preemptor,
    /// What it asks for beside GPUs.
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
        count("none", "already-holds");
        return Ok(PreemptionResult::default());
    };
    // The search may take a while on a large cluster; the threads that answer filter are not for that.
    let demand = asking.demand.clone();
    let found = tokio::task::spawn_blocking(move || cheapest(offers, &demand)).await;
    let Some((others, mut victims)) = found.ok().flatten() else {
        count("none", "no-candidate");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    };
    let leaves_nobody = victims.victims.is_empty() && others.is_empty();
    if leaves_nobody && victims.awaited.is_empty() {
        // Room has come since it was refused: whoever finds that wakes it, and nobody is evicted.
        count("none", "fits-now");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    }
    if !others.is_empty() {
        victims.longest_grace = victims.longest_grace.max(OTHERS_GRACE);
    }
    if !reserve(extender, &asking, &victims).await {
        count("none", "not-held");
        leave_to_planner(extender, &asking.uid);
        return Ok(PreemptionResult::default());
    }
    if leaves_nobody {
        // The scheduler takes a node without victims as an error of the whole preemption.
        count("none", "awaited");
        return Ok(PreemptionResult::default());
    }
    count("held", "");
    Ok(answer(others, &victims))
}

/// Where the nodes' sums are all too small the scheduler never asks `filter`, and nothing but this says that the pod waits.
fn leave_to_planner(extender: &Extender, uid: &PodUid) {
    let mut ledger = extender.service.ledger();
    if ledger.pod_state(uid).is_some_and(|entry| entry.refused().is_none()) {
        ledger.note_refused(uid, None);
    }
}

/// The offered nodes as the ledger sees them, or `None` if the pod has room of its own already. Brings `asking` to the policy
/// that they are seen by.
fn offers(
    extender: &Extender,
    asking: &mut VerbRequest,
    pod: &Pod,
    offered: &[OfferedNode<'_>],
) -> Option<OfferedCandidates> {
    let kube_filters = extender.service.kube_filters().snapshot();
    // The scheduler may have seen the pod before the watch here did.
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
    // Where the scheduler itself would evict nobody, it has another reason not to go.
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
            // Nobody knows what it would free, nor whether it may be evicted: not on this node.
            None if ledger.pod_state(&uid).is_some() => return None,
            None => others.push((*victim).to_owned()),
        }
    }
    let mut shortfall = Shortfall::of(residents.iter());
    // No more is missing than the node falls short by: what the scheduler's victims free beyond is nobody's need.
    let missing = ledger.pod_state(uid)?.demand.vram().minus(ledger.sum_left_on(&node));
    shortfall.vram = shortfall.vram.min(missing);
    let lack =
        question.shortfall(&node, &AssumedNodeChange { leaving: &[], coming: ledger.coming_to(&node) });
    let HostResources { cpu, memory } = shortfall.host_resources;
    shortfall.host_resources = HostResources { cpu: cpu.min(lack.cpu), memory: memory.min(lack.memory) };
    room.shortfall = shortfall;
    // What the scheduler's victims overdraw, and none of them that Stowage knows of does, the others must.
    let known = known_violations(&room, &residents);
    room.violations = u32::try_from(offered.pdb_violations).unwrap_or(0).saturating_sub(known);
    if others.is_empty() {
        room.violations = 0;
    }
    Some((room, others))
}

/// The scheduler evicts pods of one node: a group with members on others stays.
fn keep_whole_groups(room: &mut PreemptionCandidate) {
    let is_gone = |uid: &PodUid| room.candidates.iter().any(|resident| resident.uid == *uid);
    let is_here: Vec<bool> = room.gangs.iter().map(|gang| gang.members.iter().all(is_gone)).collect();
    room.candidates.retain(|resident| resident.gang.is_none_or(|gang| is_here[usize::from(gang)]));
}

/// By how much the budgets that are known are overdrawn if these leave.
fn known_violations(room: &PreemptionCandidate, residents: &[PotentialVictim]) -> u32 {
    let leaves =
        |candidate: &&PotentialVictim| residents.iter().any(|resident| resident.uid == candidate.uid);
    let covered = room.candidates.iter().filter(leaves).flat_map(|candidate| &candidate.budgets);
    let mut counts = vec![0u32; room.budgets.len()];
    covered.for_each(|budget| counts[usize::from(*budget)] += 1);
    counts.iter().zip(&room.budgets).map(|(count, allowed)| count.saturating_sub(*allowed)).sum()
}

/// Least price, then the node's name; the sets that overdraw no disruption budget first, and others only where the policy lets
/// them be.
fn cheapest(offers: OfferedCandidates, demand: &Demand) -> Option<(Vec<String>, VictimSet)> {
    let OfferedCandidates { rooms, mut others, violate_budgets } = offers;
    let by = |rules| evicting::cheapest(&rooms, demand, rules, SearchEffort::default());
    let found = match violate_budgets {
        ViolateBudgets::Never => by(BudgetRules::Keep),
        ViolateBudgets::WhenNothingElse => by(BudgetRules::Keep).or_else(|| by(BudgetRules::Violate)),
    }?;
    Some((others.remove(&found.node).unwrap_or_default(), found))
}

/// Takes the hold: first in the ledger, so that nobody else can have the room, then on the pod, so that it survives a
/// restart. Without both nobody is evicted.
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
            warn!(pod = %key, %error, "the hold could not be written; nobody is evicted");
            extender.service.ledger().release_reservation(&uid);
        }
        // The write may have taken so long that the room was given up meanwhile.
        let stands =
            extender.service.ledger().pod_state(&uid).is_some_and(|entry| entry.reservation().is_some());
        if !stands {
            // It may have been written although nobody said so.
            let ended =
                extender.control_plane.write_status(&key, &uid, &StatusChange::end_reservation()).await;
            if let Err(error) = ended {
                warn!(pod = %key, %error, "the hold's condition may stand until its deadline");
            }
            return false;
        }
        let gpus = reservation.devices.iter().map(GpuUuid::as_str).collect::<Vec<_>>().join(", ");
        let text = format!(
            "{} pod(s) leave {} for this pod; it gets {gpus}",
            reservation.victims.len(),
            reservation.node
        );
        let (node, leaving, exact) = (&reservation.node, &reservation.victims, victims.exact);
        info!(pod = %key, %node, victims = ?leaving, exact, %policy, "room held");
        extender.control_plane.record_event(PodEvent { key, uid, kind: PodEventReason::RoomHeld, text });
        true
    };
    // The write goes on if the scheduler hangs up: the ledger must not hold what the pod does not say.
    writes.spawn(task).await.unwrap_or(false)
}

/// The hold and the policy it was made by; `None` if the room, or the policy that `version` names, changed meanwhile: the
/// victims were chosen by the rules of before.
fn reserve_in_ledger(
    extender: &Extender,
    uid: &PodUid,
    victims: &VictimSet,
    version: u64,
) -> Option<(Reservation, Digest)> {
    let mut ledger = extender.service.ledger();
    let policy = ledger.policy().clone();
    // It was another one, too, if it began to shadow just before the offers were taken.
    if policy.version != version || policy.mode == Mode::Shadow {
        info!(policy = %policy.digest, "the policy changed while a price was found");
        return None;
    }
    // One budget for all evictions; within it the planner may find another node.
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
            info!(%conflict, "the room changed while its price was found");
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
