//! The state between one pod of the queue and the next: the scratch ledger with the earlier reservations, and the rankings.

use super::node_ranking::{NodeRanking, PodSignature};
use super::preemption::{CandidateCache, NoEviction};
use super::step_budget::{PLACEMENT_STEPS, POD_STEPS, StepBudget};
use super::turns::{Rank, Turns, rank};
use super::{EvictionRight, Plan, PlanStep, PlanView, PlannedPlacement, WaitReason};
use crate::evicting::EvictionCost;
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::FilterSnapshot;
use crate::ledger::evictions::{EvictionLimit, ScopeKey};
use crate::ledger::{Ledger, NearestModels, PendingPod, PodState, WaitKind};
use crate::placing::fit::{fit, is_allowed};
use crate::placing::snapshot::Snapshot;
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::placement::Reservation;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Nodes in all cached rankings together: a ranking of 5,000 nodes takes about half a megabyte. With more distinct demands than
/// fit, some are ranked again.
const MAX_RANKED_NODES: usize = 400_000;
/// However large the cluster, alternating demands are not ranked each time: a run has steps for ten.
const MIN_RANKINGS: usize = 16;
const MAX_RANKINGS: usize = 256;

pub(super) struct PlanningState<'a> {
    pub ledger: Ledger,
    pub kube_filters: &'a FilterSnapshot,
    pub step_budget: &'a StepBudget<'a>,
    /// Rankings by pod signature, the latest first.
    rankings: Vec<NodeRanking>,
    pub candidate_cache: CandidateCache,
    /// Demands for which there is no free place, and why; as of the first such pod. Later reservations only make it harder.
    no_free_placement: Vec<(PodSignature, WaitReason)>,
    /// The signatures among them for which no eviction helps, or none is allowed now.
    hopeless: Vec<(PodSignature, Option<EvictionLimit>)>,
    /// Demands that would not fit even on nodes with an unknown verdict.
    unfit: Vec<PodSignature>,
    /// Scopes reserved for pods that need a minute without another eviction there.
    pub reserved_scopes: Vec<(ScopeKey, PodUid)>,
    /// Members of groups that have been processed.
    pub processed_members: BTreeSet<PodUid>,
    /// Groups without the gate whose pods are planned one by one.
    pub planned_pod_by_pod: BTreeSet<GroupKey>,
    /// Pods that will replace moved ones, by the pod for which those are moved. They have reservations, too.
    pub successors: BTreeMap<PodUid, Vec<PodUid>>,
    /// The number of pods that are placed, or requeued for a placement.
    pub placement_count: usize,
    /// The first pods of the queue have been looked at: past the bounds no other is.
    pub has_begun: bool,
    /// The rank of the first pod that the plan did not reach.
    first_unreached: Option<Rank>,
    /// The nearest tier of each model to a GPU: no plan changes that.
    pub nearest_models: Option<NearestModels>,
}

/// How far the planner may go to place a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlanReach {
    /// Free GPUs, and requeues.
    Free,
    /// Evictions, too.
    Evictions,
}

/// Pods for which a pass has made no step.
#[derive(Default)]
pub(super) struct PassedPods<'p> {
    /// Pods that need evictions; empty if the pass may evict.
    pub needing_evictions: Vec<&'p PendingPod>,
    /// Pods of a lower priority than one that may evict: they are placed after it.
    pub lower_priority: Vec<&'p PendingPod>,
}

/// The result of planning one pod, or its group.
pub(super) enum PodResult {
    /// No step, if the result was given with another member of the group.
    Done(Vec<PlanStep>),
    /// There are no free GPUs for it: the pod is planned again after all others.
    NeedsEvictions,
}

impl<'a> PlanningState<'a> {
    pub fn new(ledger: Ledger, kube_filters: &'a FilterSnapshot, pace: &'a StepBudget<'a>) -> Self {
        Self {
            ledger,
            kube_filters,
            step_budget: pace,
            rankings: Vec::new(),
            candidate_cache: CandidateCache::default(),
            no_free_placement: Vec::new(),
            hopeless: Vec::new(),
            unfit: Vec::new(),
            reserved_scopes: Vec::new(),
            processed_members: BTreeSet::new(),
            planned_pod_by_pod: BTreeSet::new(),
            successors: BTreeMap::new(),
            placement_count: 0,
            has_begun: false,
            first_unreached: None,
            nearest_models: None,
        }
    }

    /// Goes over the pods in their [`Turns`], and adds their steps to the plan. The first pod is looked at in any case; past the
    /// bounds only such as cost little.
    pub fn run_pass<'p>(
        &mut self,
        pods: &[&'p PendingPod],
        reach: PlanReach,
        (steps, max_placements): (u64, usize),
        plan: &mut Plan,
    ) -> PassedPods<'p> {
        let step_limit = self.step_budget.spent().saturating_add(steps);
        let PassedPods {
            mut needing_evictions,
            mut lower_priority,
        } = PassedPods::default();
        let (mut turns, mut evicts_from) = (Turns::new(pods, &self.ledger, steps), i32::MIN);
        let mut is_first = !self.has_begun;
        while let Some(pod) = turns.next(&self.ledger, self.step_budget.spent()) {
            // Where it would go, fewer or cheaper pods may be in the way of the one before it.
            if pod.demand.priority < evicts_from {
                lower_priority.push(pod);
                continue;
            }
            let signature = PodSignature::new(pod, &self.ledger, self.kube_filters);
            let (is_forced, is_full) = (
                std::mem::take(&mut is_first),
                self.placement_count >= max_placements,
            );
            let has_steps = || {
                self.step_budget.spent() < step_limit
                    || self.is_cheap_to_place(pod, &signature, reach)
            };
            // A known result of an equal pod applies to this one, too; that costs the pods before it nothing.
            if !is_forced
                && (is_full || !has_steps())
                && !self.is_known_to_wait(pod, &signature, reach)
            {
                self.first_unreached.get_or_insert(rank(pod));
                plan.unreached.push(pod.uid.clone());
                continue;
            }
            match self.plan_pod_unless_stopped(pod, &signature, reach) {
                None => {
                    plan.unreached
                        .extend([&pod.uid].into_iter().chain(turns.remaining()).cloned());
                    plan.unreached
                        .extend(lower_priority.drain(..).map(|pod| pod.uid.clone()));
                    break;
                }
                Some(PodResult::Done(steps)) => plan.steps.extend(steps),
                Some(PodResult::NeedsEvictions) => {
                    if self.ledger.may_evict_for(&pod.uid) {
                        evicts_from = evicts_from.max(pod.demand.priority);
                    }
                    needing_evictions.push(pod);
                }
            }
        }
        PassedPods {
            needing_evictions,
            lower_priority,
        }
    }

    /// The plan for a pod, or for its group; `None` if the plan was stopped meanwhile.
    fn plan_pod_unless_stopped(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> Option<PodResult> {
        let result = self
            .step_budget
            .spend_unless_stopped(POD_STEPS)
            .then(|| self.plan_pod(pod, signature, reach))?;
        // A stopped search has examined some of the nodes only.
        self.step_budget.spend_unless_stopped(0).then_some(result)
    }

    /// Whether the nodes are ranked for equal pods, so that a free place costs no look at all of them. Of several kinds of pods a
    /// run ranks the nodes for some, and places all pods of these. None of another priority: one that is passed over may need the
    /// place.
    fn is_cheap_to_place(
        &self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> bool {
        reach == PlanReach::Free
            && !pod.demand.is_allocated_externally()
            && self.group_key_of(&pod.uid).is_none()
            && self
                .first_unreached
                .is_none_or(|passed_over| passed_over == rank(pod))
            && self
                .rankings
                .iter()
                .any(|ranking| ranking.is_for(signature))
    }

    /// Whether planning the pod would only repeat that equal pods cannot be placed.
    fn is_known_to_wait(
        &self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> bool {
        if pod.demand.is_allocated_externally() || self.group_key_of(&pod.uid).is_some() {
            return false;
        }
        let is_supported = |why: &WaitReason| !matches!(why, WaitReason::UnsupportedFilter(_));
        let is_full = self
            .no_free_placement
            .iter()
            .any(|(other, why)| is_supported(why) && other.is_like(signature));
        let is_hopeless = || {
            self.hopeless
                .iter()
                .any(|(other, _)| other.is_like(signature))
        };
        is_full && (reach == PlanReach::Free || is_hopeless())
    }

    fn plan_pod(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> PodResult {
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        match (
            pod.demand.is_allocated_externally(),
            self.planned_group(pod),
        ) {
            // The kubelet picks its GPUs: nothing can be reserved, so the pod need not wait behind its gate.
            (true, _) if matches!(pod.wait_kind, WaitKind::Gated) => {
                return PodResult::Done(vec![PlanStep::Wait {
                    uid,
                    key,
                    why: WaitReason::DevicePlugin,
                }]);
            }
            (true, _) => {
                return PodResult::Done(self.plan_devices(pod, signature).into_iter().collect());
            }
            (false, Some(_))
                if reach == PlanReach::Free && self.processed_members.contains(&uid) =>
            {
                return PodResult::Done(Vec::new());
            }
            (false, Some(group)) => {
                if let Some(result) = self.plan_group(&group, reach) {
                    return result;
                }
            }
            (false, None) => {}
        }
        let step = match self.place_pod(pod, signature, reach) {
            Ok(placement) => PlanStep::Place(vec![placement]),
            // The scheduler evaluates what Stowage does not: it retries where VRAM is free.
            Err(WaitReason::UnsupportedFilter(_)) if self.would_fit_unsupported(pod, signature) => {
                self.placement_count += 1;
                PlanStep::Requeue { uid, key }
            }
            Err(_) if reach == PlanReach::Free => return PodResult::NeedsEvictions,
            Err(why) => PlanStep::Wait { uid, key, why },
        };
        PodResult::Done(vec![step])
    }

    /// Whether a pending pod would fit on a node with an unknown verdict. Later reservations only make it harder.
    fn would_fit_unsupported(&mut self, pod: &PendingPod, signature: &PodSignature) -> bool {
        let is_unfit = |other: &PodSignature| other.is_like(signature);
        if !matches!(pod.wait_kind, WaitKind::Refused { .. }) || self.unfit.iter().any(is_unfit) {
            return false;
        }
        let (snapshot, step_budget) = (self.ledger.snapshot(), self.step_budget);
        let mut unsupported = self
            .ranking(signature, &snapshot)
            .unsupported()
            .take_while(|_| step_budget.spend_unless_stopped(1));
        let fits =
            unsupported.any(|index| fit(&snapshot.nodes()[index], signature.demand()).is_ok());
        drop(unsupported);
        if !fits {
            self.unfit.push(signature.clone());
        }
        fits
    }

    /// A place for one pod, reserved on the scratch ledger; if `reach` allows, pods are evicted for it where nothing is free.
    pub fn place_pod(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> Result<PlannedPlacement, WaitReason> {
        self.place_on_free(pod, signature).or_else(|why| {
            if reach == PlanReach::Free || !self.ledger.may_evict_for(&pod.uid) {
                return Err(why);
            }
            self.place_by_eviction(pod, signature)
                .map_err(|limit| limit.map_or(why, WaitReason::EvictionLimit))
        })
    }

    /// A place that needs evictions; otherwise the eviction limit that prevents it, if one does.
    fn place_by_eviction(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, Option<EvictionLimit>> {
        self.step_budget.spend(self.hopeless.len() as u64 / 8);
        if let Some((_, limit)) = self
            .hopeless
            .iter()
            .find(|(other, _)| other.is_like(signature))
        {
            return Err(*limit);
        }
        let limit = match self.place_by_preemption(pod, signature) {
            Ok(placement) => return Ok(placement),
            Err(NoEviction::BecomesFree) => return Err(None),
            Err(NoEviction::NoVictims(limit)) => limit,
        };
        self.place_by_moving(pod, signature).ok_or_else(|| {
            self.hopeless.push((signature.clone(), limit));
            limit
        })
    }

    /// The best free place, reserved.
    fn place_on_free(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, WaitReason> {
        self.step_budget
            .spend(self.no_free_placement.len() as u64 / 8);
        if let Some((_, why)) = self
            .no_free_placement
            .iter()
            .find(|(other, _)| other.is_like(signature))
        {
            return Err(*why);
        }
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.tenant_allowance(&pod.uid, &pod.demand);
        let found = self.best_free(pod, signature, &snapshot, allowance);
        if let Some(placement) =
            found.and_then(|(index, gpus)| self.reserve_at(pod, &snapshot, index, gpus))
        {
            return Ok(placement);
        }
        let why = self.wait_reason(pod, signature, allowance);
        if found.is_none() {
            self.no_free_placement.push((signature.clone(), why));
        }
        Err(why)
    }

    /// The best free place within what the pod's tenant may still take.
    fn best_free(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        snapshot: &Snapshot,
        allowance: TenantLimit,
    ) -> Option<(usize, GpuSet)> {
        let is_within = |(index, gpus): &(usize, GpuSet)| {
            is_allowed(
                allowance,
                &snapshot.nodes()[*index].gpus,
                &pod.demand,
                *gpus,
            )
        };
        self.ranking(signature, snapshot).free().find(is_within)
    }

    /// Reserves these GPUs, which are free.
    pub(crate) fn reserve_at(
        &mut self,
        pod: &PendingPod,
        snapshot: &Snapshot,
        index: usize,
        gpus: GpuSet,
    ) -> Option<PlannedPlacement> {
        let node = &snapshot.nodes()[index];
        let reservation = Reservation {
            node: node.name.clone(),
            devices: gpus
                .iter()
                .map(|gpu| node.devices[gpu].uuid.clone())
                .collect(),
            victims: Arc::new([]),
            deadline: self.ledger.now() + self.ledger.policy().preemption.reservation_slack,
        };
        self.reserve(PlannedPlacement {
            uid: pod.uid.clone(),
            key: pod.key.clone(),
            reservation,
            eviction_cost: EvictionCost::default(),
            exact: true,
            by: EvictionRight::Preemption,
        })
    }

    /// Takes a placement's reservation on the scratch ledger; `None` if a limit of evictions or the ledger refuses it.
    pub fn reserve(&mut self, placement: PlannedPlacement) -> Option<PlannedPlacement> {
        if !self
            .ledger
            .is_within_eviction_rates(&placement.reservation.victims)
        {
            return None;
        }
        placement.reserve_in(&mut self.ledger).ok()?;
        self.ledger.record_evictions(&placement.reservation.victims);
        self.step_budget.spend(PLACEMENT_STEPS);
        self.placement_count += 1;
        // With a group, its members on other nodes are evicted.
        for victim in placement.reservation.victims.iter() {
            let node = self.ledger.pod_state(victim).and_then(PodState::node);
            if let Some(node) = node {
                self.candidate_cache.forget_node(node);
            }
        }
        self.refresh_rankings(&placement.reservation.node);
        Some(placement)
    }

    /// Undoes [`Self::reserve`].
    pub(crate) fn release_reservation(&mut self, placement: &PlannedPlacement) {
        self.ledger.release_reservation(&placement.uid);
        self.placement_count = self.placement_count.saturating_sub(1);
        self.ledger
            .take_back_evictions(&placement.reservation.victims);
        for successor in self.successors.remove(&placement.uid).unwrap_or_default() {
            let released = self.ledger.release(&successor);
            let node = released
                .as_ref()
                .and_then(PodState::reservation)
                .map(|reservation| &reservation.node);
            if let Some(node) = node {
                self.refresh_rankings(node);
            }
        }
        self.no_free_placement.clear();
        self.hopeless.clear();
        self.unfit.clear();
        self.candidate_cache.forget();
        self.refresh_rankings(&placement.reservation.node);
    }

    /// The nodes in order for equal pods.
    pub fn ranking(&mut self, signature: &PodSignature, snapshot: &Snapshot) -> &NodeRanking {
        self.step_budget.spend(self.rankings.len() as u64 / 8);
        if let Some(index) = self
            .rankings
            .iter()
            .position(|ranking| ranking.is_for(signature))
        {
            return &self.rankings[index];
        }
        let view = PlanView {
            ledger: &self.ledger,
            snapshot,
        };
        let ranking = NodeRanking::new(
            signature.clone(),
            &view,
            self.kube_filters,
            self.step_budget,
        );
        let max_rankings =
            (MAX_RANKED_NODES / snapshot.nodes().len().max(1)).clamp(MIN_RANKINGS, MAX_RANKINGS);
        self.rankings.insert(0, ranking);
        self.rankings.truncate(max_rankings);
        &self.rankings[0]
    }

    fn refresh_rankings(&mut self, node: &NodeName) {
        self.candidate_cache.forget_node(node);
        let snapshot = self.ledger.snapshot();
        let Some(index) = snapshot.index_of(node.as_str()) else {
            return;
        };
        let view = PlanView {
            ledger: &self.ledger,
            snapshot: &snapshot,
        };
        self.step_budget.spend(self.rankings.len() as u64);
        for ranking in &mut self.rankings {
            ranking.refresh_node(index, &view, self.kube_filters);
        }
    }

    /// Why there is no free place for the pod; the node nearest to fitting gives the reason.
    fn wait_reason(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        allowance: TenantLimit,
    ) -> WaitReason {
        let snapshot = self.ledger.snapshot();
        let ranking = self.ranking(signature, &snapshot);
        match (ranking.first_full(), ranking.first_unsupported()) {
            _ if ranking.has_free() && allowance != TenantLimit::default() => {
                WaitReason::TenantLimit {
                    vram: pod.demand.vram(),
                }
            }
            (Some(nearest), _) => WaitReason::InsufficientVram {
                nodes: ranking.count_full(),
                nearest,
            },
            (None, Some(unsupported)) => WaitReason::UnsupportedFilter(unsupported),
            (None, None) => WaitReason::NoNode,
        }
    }

    /// A node whose device plugin has what the pod requests, counted as used on the scratch ledger. No step for a pod that is
    /// being bound.
    fn plan_devices(&mut self, pod: &PendingPod, signature: &PodSignature) -> Option<PlanStep> {
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        let is_refused = matches!(pod.wait_kind, WaitKind::Refused { .. });
        let step = match self.assume_devices(pod, signature) {
            Ok(()) => {
                self.placement_count += usize::from(is_refused);
                PlanStep::Requeue { uid, key }
            }
            Err(why) => PlanStep::Wait { uid, key, why },
        };
        is_refused.then_some(step)
    }

    fn assume_devices(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<(), WaitReason> {
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.tenant_allowance(&pod.uid, &pod.demand);
        let found = self.best_free(pod, signature, &snapshot, allowance);
        let Some((index, _)) = found else {
            return Err(self.wait_reason(pod, signature, allowance));
        };
        let node = snapshot.nodes()[index].name.clone();
        drop(snapshot);
        if self.ledger.assume(&pod.uid, &node).is_err() {
            return Err(WaitReason::NoNode);
        }
        self.refresh_rankings(&node);
        Ok(())
    }
}
