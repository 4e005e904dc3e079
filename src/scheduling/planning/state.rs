//! The state between one pod of the queue and the next: the scratch ledger with the earlier reservations, and the rankings.

use super::node_ranking::{NodeRanking, PodSignature};
use super::preemption::{CandidateCache, NoEviction};
use super::step_budget::{PLACEMENT, POD, StepBudget};
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
const RANKED: usize = 400_000;
/// However large the cluster, alternating demands are not ranked each time: a run has steps for ten.
const LEAST_RANKINGS: usize = 16;
const MOST_RANKINGS: usize = 256;

pub(super) struct PlanningState<'a> {
    pub ledger: Ledger,
    pub kube_filters: &'a FilterSnapshot,
    pub pace: &'a StepBudget<'a>,
    /// Rankings by pod signature, the latest first.
    rankings: Vec<NodeRanking>,
    pub known: CandidateCache,
    /// Demands for which there is no free place, and why; as of the first such pod. Later reservations only make it harder.
    full: Vec<(PodSignature, WaitReason)>,
    /// The signatures among them for which no eviction helps, or none is allowed now.
    hopeless: Vec<(PodSignature, Option<EvictionLimit>)>,
    /// Demands that would not fit even on nodes with an unknown verdict.
    unfit: Vec<PodSignature>,
    /// Scopes reserved for pods that need a minute without another eviction there.
    pub reserved: Vec<(ScopeKey, PodUid)>,
    /// Members of groups that have been processed.
    pub done: BTreeSet<PodUid>,
    /// Groups without the gate whose pods are planned one by one.
    pub apart: BTreeSet<GroupKey>,
    /// Pods that will replace moved ones, by the pod for which those are moved. They have reservations, too.
    pub successors: BTreeMap<PodUid, Vec<PodUid>>,
    /// The number of pods that are placed, or requeued for a placement.
    pub places: usize,
    /// The first pods of the queue have been looked at: past the bounds no other is.
    pub is_begun: bool,
    /// The rank of the first pod that the plan did not reach.
    passed_over: Option<Rank>,
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
    pub rest: Vec<&'p PendingPod>,
    /// Pods of a lower priority than one that may evict: they are placed after it.
    pub below: Vec<&'p PendingPod>,
}

/// The result of planning one pod, or its group.
pub(super) enum PodResult {
    /// No step, if the result was given with another member of the group.
    Done(Vec<PlanStep>),
    /// There are no free GPUs for it: the pod is planned again after all others.
    NeedsOthersToLeave,
}

impl<'a> PlanningState<'a> {
    pub fn new(ledger: Ledger, kube_filters: &'a FilterSnapshot, pace: &'a StepBudget<'a>) -> Self {
        Self {
            ledger,
            kube_filters,
            pace,
            rankings: Vec::new(),
            known: CandidateCache::default(),
            full: Vec::new(),
            hopeless: Vec::new(),
            unfit: Vec::new(),
            reserved: Vec::new(),
            done: BTreeSet::new(),
            apart: BTreeSet::new(),
            successors: BTreeMap::new(),
            places: 0,
            is_begun: false,
            passed_over: None,
            nearest_models: None,
        }
    }

    /// Goes over the pods in their [`Turns`], and adds their steps to the plan. The first pod is looked at in any case; past the
    /// bounds only such as cost little.
    pub fn pass<'p>(
        &mut self,
        pods: &[&'p PendingPod],
        reach: PlanReach,
        (steps, places): (u64, usize),
        plan: &mut Plan,
    ) -> PassedPods<'p> {
        let until = self.pace.spent().saturating_add(steps);
        let PassedPods {
            mut rest,
            mut below,
        } = PassedPods::default();
        let (mut turns, mut evicts_from) = (Turns::of(pods, &self.ledger, steps), i32::MIN);
        let mut is_first = !self.is_begun;
        while let Some(pod) = turns.next(&self.ledger, self.pace.spent()) {
            // Where it would go, fewer or cheaper pods may be in the way of the one before it.
            if pod.demand.priority < evicts_from {
                below.push(pod);
                continue;
            }
            let signature = PodSignature::of(pod, &self.ledger, self.kube_filters);
            let (is_forced, is_full) = (std::mem::take(&mut is_first), self.places >= places);
            let has_steps =
                || self.pace.spent() < until || self.costs_little(pod, &signature, reach);
            // A known result of an equal pod applies to this one, too; that costs the pods before it nothing.
            if !is_forced
                && (is_full || !has_steps())
                && !self.is_known_to_wait(pod, &signature, reach)
            {
                self.passed_over.get_or_insert(rank(pod));
                plan.left_over.push(pod.uid.clone());
                continue;
            }
            match self.look(pod, &signature, reach) {
                None => {
                    plan.left_over
                        .extend([&pod.uid].into_iter().chain(turns.rest()).cloned());
                    plan.left_over
                        .extend(below.drain(..).map(|pod| pod.uid.clone()));
                    break;
                }
                Some(PodResult::Done(steps)) => plan.steps.extend(steps),
                Some(PodResult::NeedsOthersToLeave) => {
                    if self.ledger.may_evict_for(&pod.uid) {
                        evicts_from = evicts_from.max(pod.demand.priority);
                    }
                    rest.push(pod);
                }
            }
        }
        PassedPods { rest, below }
    }

    /// The plan for a pod, or for its group; `None` if the plan was stopped meanwhile.
    fn look(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> Option<PodResult> {
        let looked = self
            .pace
            .goes_on(POD)
            .then(|| self.look_at(pod, signature, reach))?;
        // A stopped search has examined some of the nodes only.
        self.pace.goes_on(0).then_some(looked)
    }

    /// Whether the nodes are ranked for equal pods, so that a free place costs no look at all of them. Of several kinds of pods a
    /// run ranks the nodes for some, and places all pods of these. None of another priority: one that is passed over may need the
    /// place.
    fn costs_little(&self, pod: &PendingPod, signature: &PodSignature, reach: PlanReach) -> bool {
        reach == PlanReach::Free
            && !pod.demand.asks_plugin()
            && self.group_of(&pod.uid).is_none()
            && self
                .passed_over
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
        if pod.demand.asks_plugin() || self.group_of(&pod.uid).is_some() {
            return false;
        }
        let is_supported = |why: &WaitReason| !matches!(why, WaitReason::UnsupportedFilter(_));
        let is_full = self
            .full
            .iter()
            .any(|(known, why)| is_supported(why) && known.is_like(signature));
        let is_hopeless = || {
            self.hopeless
                .iter()
                .any(|(known, _)| known.is_like(signature))
        };
        is_full && (reach == PlanReach::Free || is_hopeless())
    }

    fn look_at(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> PodResult {
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        match (pod.demand.asks_plugin(), self.planned_with(pod)) {
            // The kubelet picks its GPUs: nothing can be reserved, so the pod need not wait behind its gate.
            (true, _) if matches!(pod.way, WaitKind::Gated) => {
                return PodResult::Done(vec![PlanStep::Wait {
                    uid,
                    key,
                    why: WaitReason::DevicePlugin,
                }]);
            }
            (true, _) => {
                return PodResult::Done(self.devices(pod, signature).into_iter().collect());
            }
            (false, Some(_)) if reach == PlanReach::Free && self.done.contains(&uid) => {
                return PodResult::Done(Vec::new());
            }
            (false, Some(group)) => {
                if let Some(result) = self.group(&group, reach) {
                    return result;
                }
            }
            (false, None) => {}
        }
        let step = match self.place(pod, signature, reach) {
            Ok(place) => PlanStep::Place(vec![place]),
            // The scheduler evaluates what Stowage does not: it retries where VRAM is free.
            Err(WaitReason::UnsupportedFilter(_)) if self.would_fit_unsupported(pod, signature) => {
                self.places += 1;
                PlanStep::Wake { uid, key }
            }
            Err(_) if reach == PlanReach::Free => return PodResult::NeedsOthersToLeave,
            Err(why) => PlanStep::Wait { uid, key, why },
        };
        PodResult::Done(vec![step])
    }

    /// Whether a pending pod would fit on a node with an unknown verdict. Later reservations only make it harder.
    fn would_fit_unsupported(&mut self, pod: &PendingPod, signature: &PodSignature) -> bool {
        let is_unfit = |known: &PodSignature| known.is_like(signature);
        if !matches!(pod.way, WaitKind::Refused { .. }) || self.unfit.iter().any(is_unfit) {
            return false;
        }
        let (snapshot, pace) = (self.ledger.snapshot(), self.pace);
        let mut unsupported = self
            .ranking(signature, &snapshot)
            .unsupported()
            .take_while(|_| pace.goes_on(1));
        let fits =
            unsupported.any(|place| fit(&snapshot.nodes()[place], signature.demand()).is_ok());
        drop(unsupported);
        if !fits {
            self.unfit.push(signature.clone());
        }
        fits
    }

    /// A place for one pod, reserved on the scratch ledger; if `reach` allows, pods are evicted for it where nothing is free.
    pub fn place(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        reach: PlanReach,
    ) -> Result<PlannedPlacement, WaitReason> {
        self.free_place(pod, signature).or_else(|why| {
            if reach == PlanReach::Free || !self.ledger.may_evict_for(&pod.uid) {
                return Err(why);
            }
            self.place_of_others(pod, signature)
                .map_err(|limit| limit.map_or(why, WaitReason::EvictionLimit))
        })
    }

    /// A place that needs evictions; otherwise the eviction limit that prevents it, if one does.
    fn place_of_others(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, Option<EvictionLimit>> {
        self.pace.spend(self.hopeless.len() as u64 / 8);
        if let Some((_, limit)) = self
            .hopeless
            .iter()
            .find(|(known, _)| known.is_like(signature))
        {
            return Err(*limit);
        }
        let limit = match self.evicting(pod, signature) {
            Ok(place) => return Ok(place),
            Err(NoEviction::BecomesFree) => return Err(None),
            Err(NoEviction::NoVictims(limit)) => limit,
        };
        self.moving(pod, signature).ok_or_else(|| {
            self.hopeless.push((signature.clone(), limit));
            limit
        })
    }

    /// The best free place, reserved.
    fn free_place(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, WaitReason> {
        self.pace.spend(self.full.len() as u64 / 8);
        if let Some((_, why)) = self.full.iter().find(|(known, _)| known.is_like(signature)) {
            return Err(*why);
        }
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.allowance(&pod.uid, &pod.demand);
        let found = self.best_free(pod, signature, &snapshot, allowance);
        if let Some(place) =
            found.and_then(|(place, gpus)| self.reserve_at(pod, &snapshot, place, gpus))
        {
            return Ok(place);
        }
        let why = self.why(pod, signature, allowance);
        if found.is_none() {
            self.full.push((signature.clone(), why));
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
        let is_within = |(place, gpus): &(usize, GpuSet)| {
            is_allowed(
                allowance,
                &snapshot.nodes()[*place].gpus,
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
        place: usize,
        gpus: GpuSet,
    ) -> Option<PlannedPlacement> {
        let node = &snapshot.nodes()[place];
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
    pub fn reserve(&mut self, place: PlannedPlacement) -> Option<PlannedPlacement> {
        if !self.ledger.may_order(&place.reservation.victims) {
            return None;
        }
        place.take(&mut self.ledger).ok()?;
        self.ledger.note_ordered(&place.reservation.victims);
        self.pace.spend(PLACEMENT);
        self.places += 1;
        // With a group, its members on other nodes are evicted.
        for victim in place.reservation.victims.iter() {
            let node = self.ledger.pod_state(victim).and_then(PodState::node);
            if let Some(node) = node {
                self.known.forget_node(node);
            }
        }
        self.look_again(&place.reservation.node);
        Some(place)
    }

    /// Undoes [`Self::reserve`].
    pub(crate) fn release_reservation(&mut self, place: &PlannedPlacement) {
        self.ledger.release_reservation(&place.uid);
        self.places = self.places.saturating_sub(1);
        self.ledger.take_back_ordered(&place.reservation.victims);
        for successor in self.successors.remove(&place.uid).unwrap_or_default() {
            let released = self.ledger.release(&successor);
            let node = released
                .as_ref()
                .and_then(PodState::reservation)
                .map(|reservation| &reservation.node);
            if let Some(node) = node {
                self.look_again(node);
            }
        }
        self.full.clear();
        self.hopeless.clear();
        self.unfit.clear();
        self.known.forget();
        self.look_again(&place.reservation.node);
    }

    /// The nodes in order for equal pods.
    pub fn ranking(&mut self, signature: &PodSignature, snapshot: &Snapshot) -> &NodeRanking {
        self.pace.spend(self.rankings.len() as u64 / 8);
        if let Some(known) = self
            .rankings
            .iter()
            .position(|ranking| ranking.is_for(signature))
        {
            return &self.rankings[known];
        }
        let seeing = PlanView {
            ledger: &self.ledger,
            snapshot,
        };
        let ranking = NodeRanking::new(signature.clone(), &seeing, self.kube_filters, self.pace);
        let kept = (RANKED / snapshot.nodes().len().max(1)).clamp(LEAST_RANKINGS, MOST_RANKINGS);
        self.rankings.insert(0, ranking);
        self.rankings.truncate(kept);
        &self.rankings[0]
    }

    fn look_again(&mut self, node: &NodeName) {
        self.known.forget_node(node);
        let snapshot = self.ledger.snapshot();
        let Some(place) = snapshot.place_of(node.as_str()) else {
            return;
        };
        let seeing = PlanView {
            ledger: &self.ledger,
            snapshot: &snapshot,
        };
        self.pace.spend(self.rankings.len() as u64);
        for ranking in &mut self.rankings {
            ranking.look_again_at(place, &seeing, self.kube_filters);
        }
    }

    /// Why there is no free place for the pod; the node nearest to fitting gives the reason.
    fn why(
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
    fn devices(&mut self, pod: &PendingPod, signature: &PodSignature) -> Option<PlanStep> {
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        let is_due = matches!(pod.way, WaitKind::Refused { .. });
        let step = match self.take_devices(pod, signature) {
            Ok(()) => {
                self.places += usize::from(is_due);
                PlanStep::Wake { uid, key }
            }
            Err(why) => PlanStep::Wait { uid, key, why },
        };
        is_due.then_some(step)
    }

    fn take_devices(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<(), WaitReason> {
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.allowance(&pod.uid, &pod.demand);
        let found = self.best_free(pod, signature, &snapshot, allowance);
        let Some((place, _)) = found else {
            return Err(self.why(pod, signature, allowance));
        };
        let node = snapshot.nodes()[place].name.clone();
        drop(snapshot);
        if self.ledger.assume(&pod.uid, &node).is_err() {
            return Err(WaitReason::NoNode);
        }
        self.look_again(&node);
        Ok(())
    }
}
