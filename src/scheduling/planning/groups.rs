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
const SETTLES: Millis = Millis::seconds(2);

/// How many pods of a group have placements, and the eviction limit that kept the next one from one.
type GroupShortfall = (usize, Option<EvictionLimit>);

/// The pods of a group that are placed on one node, by index, with their GPUs.
type NodeGpuCandidates = Vec<(usize, GpuSet)>;

impl PlanningState<'_> {
    pub(super) fn group_of(&self, uid: &PodUid) -> Option<GroupKey> {
        self.ledger
            .pod_state(uid)?
            .disruption_info
            .placed_with()
            .cloned()
    }

    /// The group with which the pod is planned, if it is planned with one.
    pub(super) fn planned_with(&self, pod: &PendingPod) -> Option<GroupKey> {
        let key = self.group_of(&pod.uid)?;
        let is_planned = match pod.way {
            WaitKind::Gated => true,
            WaitKind::Refused { .. } | WaitKind::OnItsWay { .. } => {
                key.kind.is_planned_without_gate() && !self.apart.contains(&key)
            }
        };
        is_planned.then_some(key)
    }

    /// The plan for the pending pods of the group; `None` if each is planned by itself.
    pub(super) fn group(&mut self, key: &GroupKey, reach: PlanReach) -> Option<PodResult> {
        let group = self.ledger.group(key);
        if self.is_planned_apart(&group) {
            self.apart.insert(key.clone());
            return None;
        }
        Some(self.whole_group(group, reach))
    }

    /// Whether the group's pods are planned one by one. Without the gate a group is planned whole only if it says its size, and its
    /// missing pods are waited for no longer than the policy keeps a pod behind the gate: a leader may have to be ready first.
    fn is_planned_apart(&self, group: &PodGroup) -> bool {
        if group
            .pending
            .iter()
            .any(|pod| matches!(pod.way, WaitKind::Gated))
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

    fn whole_group(&mut self, group: PodGroup, reach: PlanReach) -> PodResult {
        self.done
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
        if group.size.is_none() && youngest + SETTLES > self.ledger.now() {
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
        let is_for_others =
            self.ledger.policy().planning.groups.placement != GroupPlacement::OneIsland;
        match self.together(&group.pending, wanted.min(here) as usize, reach) {
            Ok(places) => PodResult::Done(vec![PlanStep::Place(places)]),
            Err(_) if reach == PlanReach::Free && is_for_others => PodResult::NeedsOthersToLeave,
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
    fn together(
        &mut self,
        pods: &[PendingPod],
        wanted: usize,
        reach: PlanReach,
    ) -> Result<Vec<PlannedPlacement>, GroupShortfall> {
        let places = match self.ledger.policy().planning.groups.placement {
            GroupPlacement::OneIsland => self.on_one_island(pods),
            GroupPlacement::FewestNodes => self.on_fewest_nodes(pods),
            GroupPlacement::Anywhere => Vec::new(),
        };
        let (places, why) = match self.ledger.policy().planning.groups.placement {
            GroupPlacement::OneIsland => (places, None),
            _ => self.anywhere(pods, places, reach),
        };
        if places.len() >= wanted {
            return Ok(places);
        }
        places
            .iter()
            .for_each(|place| self.release_reservation(place));
        let limit = match why {
            Some(WaitReason::EvictionLimit(limit)) => Some(limit),
            _ => None,
        };
        Err((places.len(), limit))
    }

    /// Adds places for the pods that have none yet, wherever it is best, by preemption where nothing is free.
    fn anywhere(
        &mut self,
        pods: &[PendingPod],
        mut places: Vec<PlannedPlacement>,
        reach: PlanReach,
    ) -> (Vec<PlannedPlacement>, Option<WaitReason>) {
        let placed: BTreeSet<PodUid> = places.iter().map(|place| place.uid.clone()).collect();
        for pod in pods.iter().filter(|pod| !placed.contains(&pod.uid)) {
            let signature = PodSignature::of(pod, &self.ledger, self.kube_filters);
            match self.place(pod, &signature, reach) {
                Ok(place) => places.push(place),
                // Equal pods will find nothing either, and a group that lacks one place may lack more.
                Err(why) => return (places, Some(why)),
            }
        }
        (places, None)
    }

    /// Uses the node that takes most of the pods, then the node that takes most of the remaining ones, as long as all pods find
    /// free GPUs.
    fn on_fewest_nodes(&mut self, pods: &[PendingPod]) -> Vec<PlannedPlacement> {
        let mut places = Vec::new();
        let mut rest: Vec<&PendingPod> = pods.iter().collect();
        while !rest.is_empty() {
            let Some((node, gpu_candidates)) = self.most_on_one_node(&rest) else {
                break;
            };
            let before = places.len();
            let snapshot = self.ledger.snapshot();
            let reserved = gpu_candidates
                .iter()
                .filter_map(|(pod, gpus)| self.reserve_at(rest[*pod], &snapshot, node, *gpus));
            places.extend(reserved);
            if places.len() == before {
                break;
            }
            let placed: BTreeSet<&PodUid> =
                places[before..].iter().map(|place| &place.uid).collect();
            rest.retain(|pod| !placed.contains(&pod.uid));
        }
        places
    }

    /// The node that takes most of the pods; among equals, the best for the first pod.
    fn most_on_one_node(&mut self, pods: &[&PendingPod]) -> Option<(usize, NodeGpuCandidates)> {
        let snapshot = self.ledger.snapshot();
        let mut best: Option<(usize, NodeGpuCandidates)> = None;
        for place in self.free_nodes(pods[0], &snapshot) {
            if !self.pace.goes_on(pods.len() as u64) {
                break;
            }
            let node = &snapshot.nodes()[place];
            let gpu_candidates = gpu_candidates(
                node,
                &self.ledger,
                snapshot.packing_model(),
                pods,
                GpuSet::ALL,
            );
            if gpu_candidates.len()
                > best
                    .as_ref()
                    .map_or(0, |(_, gpu_candidates)| gpu_candidates.len())
            {
                best = Some((place, gpu_candidates));
            }
        }
        best
    }

    /// All pods on one NVLink island of one node.
    fn on_one_island(&mut self, pods: &[PendingPod]) -> Vec<PlannedPlacement> {
        let snapshot = self.ledger.snapshot();
        let pods: Vec<&PendingPod> = pods.iter().collect();
        for place in self.free_nodes(pods[0], &snapshot) {
            if !self.pace.goes_on(pods.len() as u64) {
                break;
            }
            let node = &snapshot.nodes()[place];
            let on = |island| {
                gpu_candidates(node, &self.ledger, snapshot.packing_model(), &pods, island)
            };
            let whole = islands(node)
                .into_iter()
                .map(on)
                .filter(|chosen| chosen.len() == pods.len());
            // Of equals the first.
            let most_woken = whole.min_by_key(|chosen| Reverse(count_woken(node, &pods, chosen)));
            let Some(gpu_candidates) = most_woken else {
                continue;
            };
            let reserved: Vec<PlannedPlacement> = gpu_candidates
                .iter()
                .filter_map(|(pod, gpus)| self.reserve_at(pods[*pod], &snapshot, place, *gpus))
                .collect();
            if reserved.len() == pods.len() {
                return reserved;
            }
            reserved
                .iter()
                .for_each(|place| self.release_reservation(place));
        }
        Vec::new()
    }

    /// Nodes with a free place for the pod, best first.
    fn free_nodes(&mut self, pod: &PendingPod, snapshot: &Snapshot) -> Vec<usize> {
        let signature = PodSignature::of(pod, &self.ledger, self.kube_filters);
        let ranking = self.ranking(&signature, snapshot);
        ranking.free().map(|(place, _)| place).collect()
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
fn count_woken(node: &Node, pods: &[&PendingPod], chosen: &NodeGpuCandidates) -> usize {
    chosen
        .iter()
        .filter(|(pod, gpus)| node.reusable.on(*gpus, &pods[*pod].demand).is_some())
        .count()
}

/// GPUs of one node for as many of the pods as possible, one after the other. Each takes the engine that it may wake there, and
/// leaves the GPUs that are kept free.
fn gpu_candidates(
    node: &Node,
    ledger: &Ledger,
    packing_model: &PackingModel,
    pods: &[&PendingPod],
    allowed: GpuSet,
) -> NodeGpuCandidates {
    let mut gpus = node.gpus.to_vec();
    let mut reusable = node.reusable.clone();
    let mut free = ledger.free_for_spare();
    let mut gpu_candidates = NodeGpuCandidates::new();
    for (pod, demand) in pods.iter().map(|pod| &pod.demand).enumerate() {
        let demand = &*ledger.beside(&free, demand);
        let node_gpus = NodeGpus {
            gpus: &gpus,
            ..node.node_gpus()
        };
        let chosen = pack::choose_at(packing_model, node_gpus, demand, &reusable, allowed);
        let Some(chosen) = chosen else { continue };
        reusable = reusable.without_one_on(chosen, demand);
        for place in chosen.iter() {
            free.discount(std::mem::take(&mut gpus[place].spare));
            gpus[place].charge(demand.per_gpu, demand.sharing);
            gpus[place].starting |= demand.terms.engine;
            gpus[place].excluded_classes = gpus[place]
                .excluded_classes
                .with(demand.terms.class_exclusions);
        }
        gpu_candidates.push((pod, chosen));
    }
    gpu_candidates
}

/// A node's NVLink islands, in the order of their first GPUs.
fn islands(node: &Node) -> Vec<GpuSet> {
    let names: BTreeSet<u8> = node.gpus.iter().filter_map(|gpu| gpu.island).collect();
    let of = |name: u8| {
        node.gpus
            .iter()
            .enumerate()
            .filter(move |(_, gpu)| gpu.island == Some(name))
            .map(|(place, _)| place)
    };
    names.into_iter().map(|name| of(name).collect()).collect()
}
