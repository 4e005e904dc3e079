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
use crate::ledger::evictions::{EvictionAllowance, EvictionLimit, OversizedSets, ScopeKey};
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
    candidates: ExaminedCandidates,
}

/// `None` for a node where evicting every pod would not be enough, or that would not accept the pod even then.
type ExaminedCandidates = BTreeMap<NodeName, Option<ExaminedCandidate<Rc<PreemptionCandidate>>>>;

/// Finds nodes for equal pods without their evictable pods, one by one.
pub(super) struct CandidateFinder<'l> {
    ledger: &'l Ledger,
    snapshot: &'l Snapshot,
    signature: &'l PodSignature,
    preemptor: &'l Preemptor,
    filter_query: Option<FilterQuery<'l>>,
    survey: CandidateSurvey<'l>,
}

/// The candidates for one pod: each node is examined once, and then taken from the cache.
struct CachedCandidates<'l, 'k> {
    finder: CandidateFinder<'l>,
    pod: &'l PendingPod,
    cached: &'k mut ExaminedCandidates,
    /// `None`: the current eviction limits do not matter.
    allowance: Option<EvictionAllowance<'l>>,
    step_budget: &'l StepBudget<'l>,
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

    fn is_for(&self, signature: &PodSignature) -> bool {
        self.signature
            .as_ref()
            .is_some_and(|other| other.is_like(signature))
    }

    /// The cache, without what does not hold for a pod of this signature.
    fn for_signature(
        self,
        signature: &PodSignature,
        ledger: &Ledger,
        preemptor: &Preemptor,
    ) -> Self {
        if !self.is_for(signature) {
            let cost_bounds = ledger.cost_bounds(preemptor, signature.demand());
            return Self {
                signature: Some(signature.clone()),
                cost_bounds,
                candidates: ExaminedCandidates::new(),
            };
        }
        // As a tenant's use grows, its pods are spared less, on every node. A cost bound stays below that; a known candidate's
        // cost does not.
        let candidates = if ledger.policy().tenants().is_empty() {
            self.candidates
        } else {
            ExaminedCandidates::new()
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
            filter_query,
            ..
        } = self;
        let view = PlanView { ledger, snapshot };
        let leaving: Vec<PodUid> = candidate
            .potential_victims
            .iter()
            .chain(&candidate.awaited)
            .map(|resident| resident.uid.clone())
            .collect();
        let index = snapshot.index_of(node.as_str())?;
        let coming = ledger.incoming_pods(node);
        let assumed_change = AssumedNodeChange {
            leaving: &leaving,
            coming,
        };
        signature
            .admits(index, &view, filter_query.as_ref(), &assumed_change)
            .ok()?;
        let assumed_change = AssumedNodeChange {
            leaving: &[],
            coming,
        };
        let shortfall = filter_query
            .as_ref()
            .map(|filter_query| filter_query.shortfall(node, &assumed_change));
        candidate.shortfall.host_resources = shortfall.unwrap_or_default();
        Some(candidate)
    }

    /// Whether kube-scheduler's filters accept the pod once the victims are gone. Requests other than CPU and memory are not in
    /// the cost, so that the search does not see them.
    fn is_enough(&self, set: &VictimSet) -> bool {
        let view = PlanView {
            ledger: self.ledger,
            snapshot: self.snapshot,
        };
        let (leaving, coming) = (set.all_victims(), self.ledger.incoming_pods(&set.node));
        let assumed_change = AssumedNodeChange {
            leaving: &leaving,
            coming,
        };
        let admits = |index| {
            self.signature
                .admits(index, &view, self.filter_query.as_ref(), &assumed_change)
                .is_ok()
        };
        self.snapshot
            .index_of(set.node.as_str())
            .is_some_and(admits)
    }
}

impl CandidateSource for CachedCandidates<'_, '_> {
    type Candidate = Rc<PreemptionCandidate>;

    fn examine(&mut self, node: &NodeName) -> Option<ExaminedCandidate<Rc<PreemptionCandidate>>> {
        let Self { finder, cached, .. } = self;
        if let Some(examined) = cached.get_mut(node) {
            let (floor, candidate) = examined.as_mut()?;
            finder.survey.refresh_budgets(Rc::make_mut(candidate));
            return Some((*floor, Rc::clone(candidate)));
        }
        let examined = finder
            .candidate(node)
            .and_then(|candidate| evicting::examined(candidate, finder.signature.demand()));
        let examined = examined.map(|(floor, candidate)| (floor, Rc::new(candidate)));
        cached.insert(node.clone(), examined.clone());
        examined
    }

    /// Until a step is undone, reservations only grow and budgets only shrink: a candidate becomes no cheaper. (A search that is
    /// cut short may end with another set for it, because it starts elsewhere.)
    fn record_lower_bound(&mut self, node: &NodeName, least: Option<EvictionCost>) {
        if let Some(examined) = self.cached.get_mut(node) {
            *examined = examined
                .take()
                .zip(least)
                .map(|((_, candidate), least)| (least, candidate));
        }
    }

    fn allowance(&self) -> Option<EvictionAllowance<'_>> {
        self.allowance
    }

    fn accepts(&mut self, set: &VictimSet) -> bool {
        let Self { finder, pod, .. } = self;
        let can_be_reserved = |reservation: Reservation| {
            finder
                .ledger
                .check_reservation(finder.preemptor, &pod.uid, &reservation)
                .is_ok()
        };
        finder.is_enough(set) && reservation_for(finder.ledger, set).is_some_and(can_be_reserved)
    }

    fn may_continue(&mut self, steps: u32) -> bool {
        self.step_budget.spend_unless_stopped(steps.into())
    }
}

impl PlanningState<'_> {
    /// The node with the cheapest victims that may be evicted now, reserved on the scratch ledger. Otherwise the eviction limit
    /// that prevents it, if one does.
    ///
    /// A place for which only the memory of pods that have ended is missing is not reserved: until it is free, a pod of higher
    /// priority may come.
    pub(super) fn place_by_preemption(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Result<PlannedPlacement, NoEviction> {
        let preemptor = self.preemptor(pod);
        self.prepare_candidate_cache(signature, &preemptor);
        let reserved = self
            .ledger
            .scopes_reserved_for_others(&pod.uid, pod.demand.priority);
        // A set larger than a limit is evicted only if no set within the limit would do.
        for larger in [OversizedSets::Refused, OversizedSets::AloneInAMinute] {
            let VictimSearchResult { set, is_limited } =
                self.search(pod, signature, &preemptor, Some((larger, &reserved)));
            if set.as_ref().is_some_and(|set| self.becomes_free(set)) {
                return Err(NoEviction::BecomesFree);
            }
            if let Some(placement) =
                set.and_then(|set| self.reserve_set(pod, &set, EvictionRight::Preemption))
            {
                return Ok(placement);
            }
            if !is_limited {
                return Err(NoEviction::NoVictims(None));
            }
        }
        let set = self.search(pod, signature, &preemptor, None).set;
        let set = set.ok_or(NoEviction::NoVictims(None))?;
        match self.ledger.exceeded_limit(&set.all_victims(), &reserved) {
            // A search that is cut short may miss it.
            None => self
                .reserve_set(pod, &set, EvictionRight::Preemption)
                .ok_or(NoEviction::NoVictims(None)),
            Some((scope, limit)) => {
                if limit.needs_empty_minute() {
                    self.ledger.reserve_scope(scope.clone(), &pod.uid);
                    self.reserved_scopes.push((scope, pod.uid.clone()));
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
            .preemptor_with_models(&pod.uid, nearest_models)
            .with_volumes(self.kube_filters)
    }

    fn prepare_candidate_cache(&mut self, signature: &PodSignature, preemptor: &Preemptor) {
        let cache = std::mem::take(&mut self.candidate_cache);
        if !cache.is_for(signature) {
            self.spend_on_all_nodes();
        }
        self.candidate_cache = cache.for_signature(signature, &self.ledger, preemptor);
    }

    fn spend_on_all_nodes(&mut self) {
        let nodes = self.ledger.snapshot().nodes().len();
        self.step_budget.spend(nodes as u64);
    }

    /// The cheapest set, or the cheapest of those that may be evicted now.
    fn search(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        preemptor: &Preemptor,
        limits: Option<(OversizedSets, &BTreeSet<ScopeKey>)>,
    ) -> VictimSearchResult {
        let snapshot = self.ledger.snapshot();
        let mut cache = std::mem::take(&mut self.candidate_cache);
        let candidates = CachedCandidates {
            finder: self.finder(signature, &snapshot, signature.demand(), preemptor),
            pod,
            cached: &mut cache.candidates,
            allowance: limits
                .map(|(larger, reserved)| self.ledger.eviction_allowance(larger, reserved)),
            step_budget: self.step_budget,
        };
        let cost_bounds = cache.cost_bounds.iter().cloned();
        let result = evicting::find_among(
            cost_bounds,
            signature.demand(),
            BudgetRules::Keep,
            SearchEffort::default(),
            candidates,
        );
        self.candidate_cache = cache;
        result
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
        self.finder(signature, &snapshot, &pod.demand, &preemptor)
            .is_enough(set)
            .then_some(())?;
        self.reserve_set(pod, set, EvictionRight::Moves)
    }

    pub(super) fn finder<'l>(
        &'l self,
        signature: &'l PodSignature,
        snapshot: &'l Snapshot,
        demand: &'l Demand,
        preemptor: &'l Preemptor,
    ) -> CandidateFinder<'l> {
        let (filter_query, survey) = (
            signature.filter_query(self.kube_filters),
            self.ledger.survey(preemptor, demand),
        );
        CandidateFinder {
            ledger: &self.ledger,
            snapshot,
            signature,
            preemptor,
            filter_query,
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
