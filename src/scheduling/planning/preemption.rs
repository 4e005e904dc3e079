//! Finds victims for a pod for which no GPUs are free.

use super::node_ranking::PodSignature;
use super::state::PlanningState;
use super::step_budget::StepBudget;
use super::{EvictionRight, PlanView, PlannedPlacement};
use crate::evicting;
use crate::evicting::CandidateSurvey;
use crate::evicting::{
    BudgetRules, CandidateSource, EvictionCost, ExaminedCandidate, NodeCostBound,
    PreemptionCandidate, SearchEffort, VictimSearchResult, VictimSet,
};
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::{AssumedNodeChange, FilterQuery};
use crate::ledger::evictions::{EvictionAllowance, EvictionLimit, LargerSets, ScopeKey};
use crate::ledger::{Ledger, PendingPod, Preemptor};
use crate::placing::snapshot::Snapshot;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::placement::Reservation;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Search results for equal pods, as long as they hold: equal pods that follow each other examine the same nodes.
#[derive(Debug, Default)]
pub(super) struct CandidateCache {
    signature: Option<PodSignature>,
    /// Lower bounds as of the first search for such a pod. Later reservations make no node cheaper.
    cost_bounds: Vec<NodeCostBound>,
    candidates: KnownCandidates,
}

/// `None` for a node where evicting every pod would not be enough, or that would not accept the pod even then.
type KnownCandidates = BTreeMap<NodeName, Option<ExaminedCandidate<Rc<PreemptionCandidate>>>>;

/// Finds nodes for equal pods without their evictable pods, one by one.
pub(super) struct CandidateFinder<'l> {
    ledger: &'l Ledger,
    snapshot: &'l Snapshot,
    signature: &'l PodSignature,
    preemptor: &'l Preemptor,
    question: Option<FilterQuery<'l>>,
    survey: CandidateSurvey<'l>,
}

/// The candidates for one pod: each node is examined once, and then taken from the cache.
struct CachedCandidates<'l, 'k> {
    looking: CandidateFinder<'l>,
    pod: &'l PendingPod,
    candidates: &'k mut KnownCandidates,
    /// `None`: the current eviction limits do not matter.
    allowance: Option<EvictionAllowance<'l>>,
    pace: &'l StepBudget<'l>,
}

/// Why no pod is evicted for another.
pub(super) enum NoEviction {
    /// Pods have ended, and their memory is all that is missing: one of the next readings shows that it is free.
    BecomesFree,
    /// No set of victims would do, or the limit keeps them from being evicted now.
    NoVictims(Option<EvictionLimit>),
}

impl CandidateCache {
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn forget_node(&mut self, node: &NodeName) {
        self.candidates.remove(node);
    }

    fn is_of(&self, signature: &PodSignature) -> bool {
        self.signature
            .as_ref()
            .is_some_and(|known| known.is_like(signature))
    }

    /// The cache, without what does not hold for a pod of this signature.
    fn for_signature(
        self,
        signature: &PodSignature,
        ledger: &Ledger,
        preemptor: &Preemptor,
    ) -> Self {
        if !self.is_of(signature) {
            let cost_bounds = ledger.cost_bounds(preemptor, signature.demand());
            return Self {
                signature: Some(signature.clone()),
                cost_bounds,
                candidates: KnownCandidates::new(),
            };
        }
        // As a tenant's use grows, its pods are spared less, on every node. A cost bound stays below that; a known candidate's
        // cost does not.
        let candidates = if ledger.policy().tenants().is_empty() {
            self.candidates
        } else {
            KnownCandidates::new()
        };
        Self { candidates, ..self }
    }
}

impl CandidateFinder<'_> {
    pub fn candidate(&mut self, node: &NodeName) -> Option<PreemptionCandidate> {
        let mut candidate = self.survey.candidate(node)?;
        let Self {
            ledger,
            snapshot,
            signature,
            question,
            ..
        } = self;
        let seeing = PlanView { ledger, snapshot };
        let leaving: Vec<PodUid> = candidate
            .potential_victims
            .iter()
            .chain(&candidate.awaited)
            .map(|resident| resident.uid.clone())
            .collect();
        let place = snapshot.place_of(node.as_str())?;
        let coming = ledger.coming_to(node);
        let beside = AssumedNodeChange {
            leaving: &leaving,
            coming,
        };
        signature
            .admits(place, &seeing, question.as_ref(), &beside)
            .ok()?;
        let beside = AssumedNodeChange {
            leaving: &[],
            coming,
        };
        let lack = question
            .as_ref()
            .map(|question| question.shortfall(node, &beside));
        candidate.shortfall.host_resources = lack.unwrap_or_default();
        Some(candidate)
    }

    /// Whether kube-scheduler's filters accept the pod once the victims are gone. Requests other than CPU and memory are not in
    /// the cost, so that the search does not see them.
    fn is_enough(&self, set: &VictimSet) -> bool {
        let seeing = PlanView {
            ledger: self.ledger,
            snapshot: self.snapshot,
        };
        let (leaving, coming) = (set.all_victims(), self.ledger.coming_to(&set.node));
        let beside = AssumedNodeChange {
            leaving: &leaving,
            coming,
        };
        let admits = |place| {
            self.signature
                .admits(place, &seeing, self.question.as_ref(), &beside)
                .is_ok()
        };
        self.snapshot
            .place_of(set.node.as_str())
            .is_some_and(admits)
    }
}

impl CandidateSource for CachedCandidates<'_, '_> {
    type Candidate = Rc<PreemptionCandidate>;

    fn look(&mut self, node: &NodeName) -> Option<ExaminedCandidate<Rc<PreemptionCandidate>>> {
        let Self {
            looking,
            candidates,
            ..
        } = self;
        if let Some(known) = candidates.get_mut(node) {
            let (floor, candidate) = known.as_mut()?;
            looking.survey.allow(Rc::make_mut(candidate));
            return Some((*floor, Rc::clone(candidate)));
        }
        let found = looking
            .candidate(node)
            .and_then(|candidate| evicting::seen(candidate, looking.signature.demand()));
        let found = found.map(|(floor, candidate)| (floor, Rc::new(candidate)));
        candidates.insert(node.clone(), found.clone());
        found
    }

    /// Until a step is undone, reservations only grow and budgets only shrink: a candidate becomes no cheaper. (A search that is
    /// cut short may end with another set for it, because it starts elsewhere.)
    fn learn(&mut self, node: &NodeName, least: Option<EvictionCost>) {
        if let Some(known) = self.candidates.get_mut(node) {
            *known = known
                .take()
                .zip(least)
                .map(|((_, candidate), least)| (least, candidate));
        }
    }

    fn allowance(&self) -> Option<EvictionAllowance<'_>> {
        self.allowance
    }

    fn accepts(&mut self, set: &VictimSet) -> bool {
        let Self { looking, pod, .. } = self;
        let can_be_held = |reservation: Reservation| {
            looking
                .ledger
                .check_reservation(looking.preemptor, &pod.uid, &reservation)
                .is_ok()
        };
        looking.is_enough(set) && reservation_for(looking.ledger, set).is_some_and(can_be_held)
    }

    fn goes_on(&mut self, steps: u32) -> bool {
        self.pace.goes_on(steps.into())
    }
}

impl PlanningState<'_> {
    /// The node with the cheapest victims that may be evicted now, reserved on the scratch ledger. Otherwise the eviction limit
    /// that prevents it, if one does.
    ///
    /// A place for which only the memory of pods that have ended is missing is not reserved: until it is free, a pod of higher
    /// priority may come.
    pub(super) fn evicting(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, NoEviction> {
        let preemptor = self.preemptor(pod);
        self.know(signature, &preemptor);
        let reserved = self.ledger.reserved_from(&pod.uid, pod.demand.priority);
        // A set larger than a limit is evicted only if no set within the limit would do.
        for larger in [LargerSets::Refused, LargerSets::AloneInAMinute] {
            let VictimSearchResult { set, is_limited } =
                self.search(pod, signature, &preemptor, Some((larger, &reserved)));
            if set.as_ref().is_some_and(|set| self.becomes_free(set)) {
                return Err(NoEviction::BecomesFree);
            }
            if let Some(place) =
                set.and_then(|set| self.reserve_set(pod, &set, EvictionRight::Preemption))
            {
                return Ok(place);
            }
            if !is_limited {
                return Err(NoEviction::NoVictims(None));
            }
        }
        let set = self.search(pod, signature, &preemptor, None).set;
        let set = set.ok_or(NoEviction::NoVictims(None))?;
        match self.ledger.exceeded_by(&set.all_victims(), &reserved) {
            // A search that is cut short may miss it.
            None => self
                .reserve_set(pod, &set, EvictionRight::Preemption)
                .ok_or(NoEviction::NoVictims(None)),
            Some((scope, limit)) => {
                if limit.needs_an_empty_minute() {
                    self.ledger.reserve_scope(scope.clone(), &pod.uid);
                    self.reserved.push((scope, pod.uid.clone()));
                }
                Err(NoEviction::NoVictims(Some(limit)))
            }
        }
    }

    fn becomes_free(&self, set: &VictimSet) -> bool {
        let has_ended = |uid: &PodUid| self.ledger.pod_state(uid).is_none();
        set.evicted().next().is_none()
            && !set.awaited.is_empty()
            && set.awaited.iter().all(has_ended)
    }

    pub(super) fn preemptor(&mut self, pod: &PendingPod) -> Preemptor {
        if self.nearest_models.is_none() {
            self.spend_on_all_nodes();
        }
        let nearest_models = self
            .nearest_models
            .get_or_insert_with(|| self.ledger.nearest_models())
            .clone();
        self.ledger
            .preemptor_by(&pod.uid, nearest_models)
            .beside_volumes(self.kube_filters)
    }

    fn know(&mut self, signature: &PodSignature, preemptor: &Preemptor) {
        let known = std::mem::take(&mut self.known);
        if !known.is_of(signature) {
            self.spend_on_all_nodes();
        }
        self.known = known.for_signature(signature, &self.ledger, preemptor);
    }

    fn spend_on_all_nodes(&mut self) {
        let nodes = self.ledger.snapshot().nodes().len();
        self.pace.spend(nodes as u64);
    }

    /// The cheapest set, or the cheapest of those that may be evicted now.
    fn search(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        preemptor: &Preemptor,
        now: Option<(LargerSets, &BTreeSet<ScopeKey>)>,
    ) -> VictimSearchResult {
        let snapshot = self.ledger.snapshot();
        let mut known = std::mem::take(&mut self.known);
        let candidates = CachedCandidates {
            looking: self.looking(signature, &snapshot, signature.demand(), preemptor),
            pod,
            candidates: &mut known.candidates,
            allowance: now
                .map(|(larger, reserved)| self.ledger.eviction_allowance(larger, reserved)),
            pace: self.pace,
        };
        let cost_bounds = known.cost_bounds.iter().cloned();
        let found = evicting::find_among(
            cost_bounds,
            signature.demand(),
            BudgetRules::Keep,
            SearchEffort::default(),
            candidates,
        );
        self.known = known;
        found
    }

    /// The place of this set, whose victims are evicted by this right.
    fn reserve_set(
        &mut self,
        pod: &PendingPod,
        set: &VictimSet,
        by: EvictionRight,
    ) -> Option<PlannedPlacement> {
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        let reservation = reservation_for(&self.ledger, set)?;
        let (eviction_cost, exact) = (set.eviction_cost, set.exact);
        self.reserve(PlannedPlacement {
            uid,
            key,
            reservation,
            eviction_cost,
            exact,
            by,
        })
    }

    pub(super) fn reserve_set_by_moving(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        set: &VictimSet,
    ) -> Option<PlannedPlacement> {
        let snapshot = self.ledger.snapshot();
        let preemptor = Preemptor::default();
        self.looking(signature, &snapshot, &pod.demand, &preemptor)
            .is_enough(set)
            .then_some(())?;
        self.reserve_set(pod, set, EvictionRight::Moves)
    }

    pub(super) fn looking<'l>(
        &'l self,
        signature: &'l PodSignature,
        snapshot: &'l Snapshot,
        demand: &'l Demand,
        preemptor: &'l Preemptor,
    ) -> CandidateFinder<'l> {
        let (question, survey) = (
            signature.question(self.kube_filters),
            self.ledger.survey(preemptor, demand),
        );
        CandidateFinder {
            ledger: &self.ledger,
            snapshot,
            signature,
            preemptor,
            question,
            survey,
        }
    }
}

fn reservation_for(ledger: &Ledger, set: &VictimSet) -> Option<Reservation> {
    let node = ledger.node(&set.node)?;
    Some(Reservation {
        node: set.node.clone(),
        devices: set
            .gpus
            .iter()
            .map(|gpu| node.devices[gpu].uuid.clone())
            .collect(),
        victims: set.all_victims().into(),
        deadline: ledger.now() + set.longest_grace + ledger.policy().preemption.reservation_slack,
    })
}
