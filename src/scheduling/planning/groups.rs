//! Places the pods of a group: all that the group needs, or none.
//!
//! The pods of a LeaderWorkerSet group that says its size are planned like this once the scheduler has refused them, without the
//! planner's gate: what the scheduler itself has bound counts as placed.
//!
//! A group that cannot be placed whole reserves nothing. If the policy wants the group close together, only free places are
//! tried; only if it may be anywhere, or on as few nodes as possible, are pods evicted for it.

use super::node_ranking::PodSignature;
use super::state::{PlanReach, PlanningState, PodResult};
use super::{PlanStep, PlannedPlacement, WaitReason};
use crate::ids::PodUid;
use crate::ledger::evictions::EvictionLimit;
use crate::ledger::{Ledger, PendingPod, PodGroup, WaitKind};
use crate::placing::learned::{NodeGpus, PackingModel};
use crate::placing::pack;
use crate::placing::snapshot::Snapshot;
use crate::policy::GroupPlacement;
use crate::units::Millis;
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node::Node;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// How long a group that does not declare its size must not have grown before it counts as whole: controllers create the pods of a
/// group one after the other.
const SETTLE_TIME: Millis = Millis::seconds(2);

/// How many pods of a group have placements, and the eviction limit that kept the next one from one.
type GroupShortfall = (usize, Option<EvictionLimit>);

/// The pods of a group that are placed on one node, by index, with their GPUs.
type NodeAssignments = Vec<(usize, GpuSet)>;

impl PlanningState<'_> {
    pub(super) fn group_key_of(&self, uid: &PodUid) -> Option<GroupKey> {
        self.ledger
            .pod_state(uid)?
            .disruption_info
            .placement_group()
            .cloned()
    }

    /// The group with which the pod is planned, if it is planned with one.
    pub(super) fn planned_group(&self, pod: &PendingPod) -> Option<GroupKey> {
        let key = self.group_key_of(&pod.uid)?;
        let is_planned = match pod.wait_kind {
            WaitKind::Gated => true,
            WaitKind::Refused { .. } | WaitKind::Requeued { .. } => {
                key.kind.is_planned_without_gate() && !self.planned_pod_by_pod.contains(&key)
            }
        };
        is_planned.then_some(key)
    }

    /// The plan for the pending pods of the group; `None` if each is planned by itself.
    pub(super) fn plan_group(&mut self, key: &GroupKey, reach: PlanReach) -> Option<PodResult> {
        let group = self.ledger.group(key);
        if self.is_planned_pod_by_pod(&group) {
            self.planned_pod_by_pod.insert(key.clone());
            return None;
        }
        Some(self.plan_whole_group(group, reach))
    }

    /// Whether the group's pods are planned one by one. Without the gate a group is planned whole only if it says its size, and its
    /// missing pods are waited for no longer than the policy keeps a pod behind the gate: a leader may have to be ready first.
    fn is_planned_pod_by_pod(&self, group: &PodGroup) -> bool {
        if group
            .pending
            .iter()
            .any(|pod| matches!(pod.wait_kind, WaitKind::Gated))
        {
            return false;
        }
        let longest = self.ledger.policy().planning.max_gated_time;
        let has_waited = group
            .pending
            .iter()
            .any(|pod| pod.since + longest <= self.ledger.now());
        let present = (group.pending.len() as u32).saturating_add(group.placed);
        group.pending.is_empty() || group.size.is_none_or(|size| present < size && has_waited)
    }

    fn plan_whole_group(&mut self, group: PodGroup, reach: PlanReach) -> PodResult {
        self.processed_members
            .extend(group.pending.iter().map(|pod| pod.uid.clone()));
        let here = group.pending.len() as u32;
        let wanted = match group.size {
            Some(size) => size.saturating_sub(group.placed).max(1),
            None => here,
        };
        let youngest = group
            .pending
            .iter()
            .map(|pod| pod.since)
            .max()
            .unwrap_or_default();
        if group.size.is_none() && youngest + SETTLE_TIME > self.ledger.now() {
            return PodResult::Done(Vec::new());
        }
        // A member may have ended and be deleted since: what has begun waits for the others only as long as they may come yet.
        let longest = self.ledger.policy().planning.max_gated_time;
        let is_whole = here >= wanted || group.has_begun && youngest + longest <= self.ledger.now();
        if !is_whole {
            return PodResult::Done(waiting(
                &group.pending,
                WaitReason::GroupIncomplete { here, wanted },
            ));
        }
        let may_evict = self.ledger.policy().planning.groups.placement != GroupPlacement::OneIsland;
        match self.place_group(&group.pending, wanted.min(here) as usize, reach) {
            Ok(placements) => PodResult::Done(vec![PlanStep::Place(placements)]),
            Err(_) if reach == PlanReach::Free && may_evict => PodResult::NeedsEvictions,
            Err((placed, limit)) => {
                let too_large = WaitReason::GroupTooLarge {
                    placed: placed as u32,
                    wanted,
                };
                PodResult::Done(waiting(
                    &group.pending,
                    limit.map_or(too_large, WaitReason::EvictionLimit),
                ))
            }
        }
    }

    /// Places for at least `wanted` of the pods. Otherwise how many have places, and the eviction limit that kept the next one
    /// from a place.
    fn place_group(
        &mut self,
        pods: &[PendingPod],
        wanted: usize,
        reach: PlanReach,
    ) -> Result<Vec<PlannedPlacement>, GroupShortfall> {
        let placements = match self.ledger.policy().planning.groups.placement {
            GroupPlacement::OneIsland => self.place_on_one_island(pods),
            GroupPlacement::FewestNodes => self.place_on_fewest_nodes(pods),
            GroupPlacement::Anywhere => Vec::new(),
        };
        let (placements, why) = match self.ledger.policy().planning.groups.placement {
            GroupPlacement::OneIsland => (placements, None),
            _ => self.place_anywhere(pods, placements, reach),
        };
        if placements.len() >= wanted {
            return Ok(placements);
        }
        placements
            .iter()
            .for_each(|placement| self.release_reservation(placement));
        let limit = match why {
            Some(WaitReason::EvictionLimit(limit)) => Some(limit),
            _ => None,
        };
        Err((placements.len(), limit))
    }

    /// Adds places for the pods that have none yet, wherever it is best, by preemption where nothing is free.
    fn place_anywhere(
        &mut self,
        pods: &[PendingPod],
        mut placements: Vec<PlannedPlacement>,
        reach: PlanReach,
    ) -> (Vec<PlannedPlacement>, Option<WaitReason>) {
        let placed: BTreeSet<PodUid> = placements
            .iter()
            .map(|placement| placement.uid.clone())
            .collect();
        for pod in pods.iter().filter(|pod| !placed.contains(&pod.uid)) {
            let signature = PodSignature::new(pod, &self.ledger, self.kube_filters);
            match self.place_pod(pod, &signature, reach) {
                Ok(placement) => placements.push(placement),
                // Equal pods will find nothing either, and a group that lacks one place may lack more.
                Err(why) => return (placements, Some(why)),
            }
        }
        (placements, None)
    }

    /// Uses the node that takes most of the pods, then the node that takes most of the remaining ones, as long as all pods find
    /// free GPUs.
    fn place_on_fewest_nodes(&mut self, pods: &[PendingPod]) -> Vec<PlannedPlacement> {
        let mut placements = Vec::new();
        let mut remaining: Vec<&PendingPod> = pods.iter().collect();
        while !remaining.is_empty() {
            let Some((node, assignments)) = self.most_on_one_node(&remaining) else {
                break;
            };
            let before = placements.len();
            let snapshot = self.ledger.snapshot();
            let reserved = assignments
                .iter()
                .filter_map(|(pod, gpus)| self.reserve_at(remaining[*pod], &snapshot, node, *gpus));
            placements.extend(reserved);
            if placements.len() == before {
                break;
            }
            let placed: BTreeSet<&PodUid> = placements[before..]
                .iter()
                .map(|placement| &placement.uid)
                .collect();
            remaining.retain(|pod| !placed.contains(&pod.uid));
        }
        placements
    }

    /// The node that takes most of the pods; among equals, the best for the first pod.
    fn most_on_one_node(&mut self, pods: &[&PendingPod]) -> Option<(usize, NodeAssignments)> {
        let snapshot = self.ledger.snapshot();
        let mut best: Option<(usize, NodeAssignments)> = None;
        for index in self.free_nodes(pods[0], &snapshot) {
            if !self.step_budget.spend_unless_stopped(pods.len() as u64) {
                break;
            }
            let node = &snapshot.nodes()[index];
            let assignments = assign_pods(
                node,
                &self.ledger,
                snapshot.packing_model(),
                pods,
                GpuSet::ALL,
            );
            if assignments.len()
                > best
                    .as_ref()
                    .map_or(0, |(_, assignments)| assignments.len())
            {
                best = Some((index, assignments));
            }
        }
        best
    }

    /// All pods on one NVLink island of one node.
    fn place_on_one_island(&mut self, pods: &[PendingPod]) -> Vec<PlannedPlacement> {
        let snapshot = self.ledger.snapshot();
        let pods: Vec<&PendingPod> = pods.iter().collect();
        for index in self.free_nodes(pods[0], &snapshot) {
            if !self.step_budget.spend_unless_stopped(pods.len() as u64) {
                break;
            }
            let node = &snapshot.nodes()[index];
            let assign_on =
                |island| assign_pods(node, &self.ledger, snapshot.packing_model(), &pods, island);
            let whole = islands(node)
                .into_iter()
                .map(assign_on)
                .filter(|chosen| chosen.len() == pods.len());
            // Of equals the first.
            let most_woken = whole.min_by_key(|chosen| Reverse(count_woken(node, &pods, chosen)));
            let Some(assignments) = most_woken else {
                continue;
            };
            let reserved: Vec<PlannedPlacement> = assignments
                .iter()
                .filter_map(|(pod, gpus)| self.reserve_at(pods[*pod], &snapshot, index, *gpus))
                .collect();
            if reserved.len() == pods.len() {
                return reserved;
            }
            reserved
                .iter()
                .for_each(|placement| self.release_reservation(placement));
        }
        Vec::new()
    }

    /// Nodes with a free place for the pod, best first.
    fn free_nodes(&mut self, pod: &PendingPod, snapshot: &Snapshot) -> Vec<usize> {
        let signature = PodSignature::new(pod, &self.ledger, self.kube_filters);
        let ranking = self.ranking(&signature, snapshot);
        ranking.free().map(|(index, _)| index).collect()
    }
}

fn waiting(pods: &[PendingPod], why: WaitReason) -> Vec<PlanStep> {
    pods.iter()
        .map(|pod| PlanStep::Wait {
            uid: pod.uid.clone(),
            key: pod.key.clone(),
            why,
        })
        .collect()
}

/// How many of the pods are placed where they may wake an engine.
fn count_woken(node: &Node, pods: &[&PendingPod], chosen: &NodeAssignments) -> usize {
    chosen
        .iter()
        .filter(|(pod, gpus)| node.reusable.best_on(*gpus, &pods[*pod].demand).is_some())
        .count()
}

/// GPUs of one node for as many of the pods as possible, one after the other. Each takes the engine that it may wake there, and
/// leaves the GPUs that are kept free.
fn assign_pods(
    node: &Node,
    ledger: &Ledger,
    packing_model: &PackingModel,
    pods: &[&PendingPod],
    allowed: GpuSet,
) -> NodeAssignments {
    let mut gpus = node.gpus.to_vec();
    let mut reusable = node.reusable.clone();
    let mut free_spare = ledger.free_for_spare();
    let mut assignments = NodeAssignments::new();
    for (pod, demand) in pods.iter().map(|pod| &pod.demand).enumerate() {
        let demand = &*ledger.with_spare_rules_for(&free_spare, demand);
        let node_gpus = NodeGpus {
            gpus: &gpus,
            ..node.node_gpus()
        };
        let chosen =
            pack::choose_unsummarized(packing_model, node_gpus, demand, &reusable, allowed);
        let Some(chosen) = chosen else { continue };
        reusable = reusable.without_engine_on(chosen, demand);
        for index in chosen.iter() {
            free_spare.remove(std::mem::take(&mut gpus[index].spare));
            gpus[index].charge(demand.per_gpu, demand.sharing);
            gpus[index].starting |= demand.terms.engine;
            gpus[index].excluded_classes = gpus[index]
                .excluded_classes
                .union(demand.terms.class_exclusions);
        }
        assignments.push((pod, chosen));
    }
    assignments
}

/// A node's NVLink islands, in the order of their first GPUs.
fn islands(node: &Node) -> Vec<GpuSet> {
    let names: BTreeSet<u8> = node.gpus.iter().filter_map(|gpu| gpu.island).collect();
    let gpus_of = |name: u8| {
        node.gpus
            .iter()
            .enumerate()
            .filter(move |(_, gpu)| gpu.island == Some(name))
            .map(|(index, _)| index)
    };
    names
        .into_iter()
        .map(|name| gpus_of(name).collect())
        .collect()
}
