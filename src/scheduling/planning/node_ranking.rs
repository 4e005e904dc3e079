//! The nodes in order for equal pods. A thousand replicas request the same of every node; the nodes are ranked once, and after
//! each placement only that node is examined again.

use super::PlanView;
use super::step_budget::StepBudget;
use crate::ids::PodUid;
use crate::kube_filters::{
    AssumedNodeChange, FilterQuery, FilterSnapshot, FilterVerdict, Requirements, UnsupportedRule,
};
use crate::ledger::{Ledger, PendingPod, WaitKind};
use crate::placing::fit::Misfit;
use crate::placing::rank;
use crate::placing::rank::Score;
use crate::placing::snapshot::NodeSet;
use crate::vocabulary::demand::{Demand, DemandKey};
use crate::vocabulary::gpu::GpuSet;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The signature of a pod: pods whose signatures are alike may have the same places, and evict the same pods for them.
#[derive(Debug, Clone)]
pub(crate) struct PodSignature {
    key: DemandKey,
    /// The demand of any of the pods: only what the key, the tenant, the priority and the right to preempt say of it counts.
    demand: Demand,
    /// The requirements that kube-scheduler's filters check.
    wants: Option<Arc<Requirements>>,
    /// The nodes that the latest filter request named.
    asked: Option<Arc<NodeSet>>,
}

/// How one node suits equal pods.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NodeFit {
    Free(Score, GpuSet),
    /// The node would fit, but has not enough free now.
    Full(Misfit),
    /// Kube-scheduler's filters reject the node, or the filter request did not name it.
    Shut,
    /// It is unknown what kube-scheduler's filters would answer.
    Unsupported(UnsupportedRule),
}

#[derive(Debug)]
pub(crate) struct NodeRanking {
    signature: PodSignature,
    /// How each node suits the pods, by its index in the snapshot.
    gpu_candidates: Vec<NodeFit>,
    free: BTreeSet<(Score, usize)>,
    full: BTreeSet<usize>,
    unsupported: BTreeSet<usize>,
}

impl PodSignature {
    pub fn of(pod: &PendingPod, ledger: &Ledger, kube_filters: &FilterSnapshot) -> Self {
        let asked = match &pod.way {
            WaitKind::Gated => None,
            WaitKind::Refused { asked } | WaitKind::OnItsWay { asked } => asked.clone(),
        };
        let demand = ledger.beside_spare(&pod.demand);
        Self {
            asked,
            ..Self::successor_of(&demand, kube_filters.wants(&pod.uid).cloned())
        }
    }

    /// The signature of the pod that its controller creates in place of an evicted one.
    pub(crate) fn successor_of(demand: &Demand, wants: Option<Arc<Requirements>>) -> Self {
        Self {
            key: DemandKey::of(demand),
            demand: demand.clone(),
            wants,
            asked: None,
        }
    }

    pub fn is_like(&self, other: &Self) -> bool {
        let rights = |Demand {
                          tenant,
                          priority,
                          may_preempt,
                          ..
                      }: &Demand| (*tenant, *priority, *may_preempt);
        self.key == other.key
            && rights(&self.demand) == rights(&other.demand)
            && self.wants == other.wants
            && self.asked == other.asked
    }

    pub fn demand(&self) -> &Demand {
        &self.demand
    }

    pub fn question<'a>(&'a self, kube_filters: &'a FilterSnapshot) -> Option<FilterQuery<'a>> {
        self.wants
            .as_ref()
            .map(|wants| kube_filters.ask(None, wants))
    }

    /// Whether the pods may be placed on a node that changes so first. The names of the latest filter request are what the
    /// scheduler itself found; a node may have changed since, so a refusal by our own check wins.
    pub fn admits(
        &self,
        place: usize,
        seeing: &PlanView<'_>,
        question: Option<&FilterQuery<'_>>,
        beside: &AssumedNodeChange<'_>,
    ) -> Result<(), NodeFit> {
        let node = &seeing.snapshot.nodes()[place];
        // Nodes were added or removed since the pod asked: the names say nothing of these.
        let asked = self
            .asked
            .as_ref()
            .filter(|asked| seeing.snapshot.is_current(asked));
        if asked.is_some_and(|asked| !seeing.snapshot.contains(asked, place)) {
            return Err(NodeFit::Shut);
        }
        let verdict = question.map_or(
            FilterVerdict::Unsupported(UnsupportedRule::UnknownPod),
            |question| question.verdict(&node.name, beside),
        );
        match verdict {
            FilterVerdict::Accepts => Ok(()),
            FilterVerdict::Rejects(_) => Err(NodeFit::Shut),
            // The victims may be why the scheduler asked about this node: then the names say nothing of the node without them.
            FilterVerdict::Unsupported(_) if asked.is_some() && beside.leaving.is_empty() => Ok(()),
            FilterVerdict::Unsupported(unsupported) => Err(NodeFit::Unsupported(unsupported)),
        }
    }
}

impl NodeRanking {
    /// A ranking that is stopped has examined some of the nodes only.
    pub fn new(
        signature: PodSignature,
        seeing: &PlanView<'_>,
        kube_filters: &FilterSnapshot,
        pace: &StepBudget<'_>,
    ) -> Self {
        let nodes = seeing.snapshot.nodes().len();
        let mut ranking = Self {
            signature: signature.clone(),
            gpu_candidates: vec![NodeFit::Shut; nodes],
            free: BTreeSet::new(),
            full: BTreeSet::new(),
            unsupported: BTreeSet::new(),
        };
        let question = signature.question(kube_filters);
        for (place, (node, coming)) in seeing
            .ledger
            .coming_by_node()
            .enumerate()
            .take_while(|_| pace.goes_on(1))
        {
            debug_assert_eq!(node, &seeing.snapshot.nodes()[place].name);
            ranking.look_at(place, coming, seeing, question.as_ref());
        }
        ranking
    }

    pub(crate) fn is_for(&self, signature: &PodSignature) -> bool {
        self.signature.is_like(signature)
    }

    /// Examines again a node that has changed.
    pub(crate) fn look_again_at(
        &mut self,
        place: usize,
        seeing: &PlanView<'_>,
        kube_filters: &FilterSnapshot,
    ) {
        let signature = self.signature.clone();
        let coming = seeing
            .ledger
            .coming_to(&seeing.snapshot.nodes()[place].name);
        self.look_at(
            place,
            coming,
            seeing,
            signature.question(kube_filters).as_ref(),
        );
    }

    /// Indices in the snapshot and the GPUs there, best first.
    pub fn free(&self) -> impl Iterator<Item = (usize, GpuSet)> {
        self.free
            .iter()
            .filter_map(|(_, place)| match self.gpu_candidates[*place] {
                NodeFit::Free(_, gpus) => Some((*place, gpus)),
                _ => None,
            })
    }

    /// Indices in the snapshot of nodes with an unknown verdict.
    pub fn unsupported(&self) -> impl Iterator<Item = usize> {
        self.unsupported.iter().copied()
    }

    pub(crate) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn count_full(&self) -> u32 {
        self.full.len() as u32
    }

    pub(crate) fn first_full(&self) -> Option<Misfit> {
        self.full
            .first()
            .and_then(|place| match self.gpu_candidates[*place] {
                NodeFit::Full(misfit) => Some(misfit),
                _ => None,
            })
    }

    pub(crate) fn first_unsupported(&self) -> Option<UnsupportedRule> {
        self.unsupported
            .first()
            .and_then(|place| match self.gpu_candidates[*place] {
                NodeFit::Unsupported(unsupported) => Some(unsupported),
                _ => None,
            })
    }

    fn look_at(
        &mut self,
        place: usize,
        coming: &[PodUid],
        seeing: &PlanView<'_>,
        question: Option<&FilterQuery<'_>>,
    ) {
        match self.gpu_candidates[place] {
            NodeFit::Free(score, _) => self.free.remove(&(score, place)),
            NodeFit::Full(_) => self.full.remove(&place),
            NodeFit::Unsupported(_) => self.unsupported.remove(&place),
            NodeFit::Shut => false,
        };
        let beside = AssumedNodeChange {
            leaving: &[],
            coming,
        };
        let admitted = self.signature.admits(place, seeing, question, &beside);
        let gpu_candidate = || {
            rank::score_node(
                seeing.snapshot,
                place,
                &self.signature.demand,
                seeing.ledger.policy(),
            )
        };
        self.gpu_candidates[place] = match admitted.map(|()| gpu_candidate()) {
            Err(gpu_candidate) => gpu_candidate,
            Ok(Ok((score, gpus))) => NodeFit::Free(score, gpus),
            Ok(Err(misfit)) => NodeFit::Full(misfit),
        };
        match self.gpu_candidates[place] {
            NodeFit::Free(score, _) => self.free.insert((score, place)),
            NodeFit::Full(_) => self.full.insert(place),
            NodeFit::Unsupported(_) => self.unsupported.insert(place),
            NodeFit::Shut => false,
        };
    }
}
