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
    requirements: Option<Arc<Requirements>>,
    /// The nodes that the latest filter request named.
    named_nodes: Option<Arc<NodeSet>>,
}

/// How one node suits equal pods.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NodeFit {
    Free(Score, GpuSet),
    /// The node would fit, but has not enough free now.
    Full(Misfit),
    /// Kube-scheduler's filters reject the node, or the filter request did not name it.
    Rejected,
    /// It is unknown what kube-scheduler's filters would answer.
    Unsupported(UnsupportedRule),
}

#[derive(Debug)]
pub(crate) struct NodeRanking {
    signature: PodSignature,
    /// How each node suits the pods, by its index in the snapshot.
    fits: Vec<NodeFit>,
    free: BTreeSet<(Score, usize)>,
    full: BTreeSet<usize>,
    unsupported: BTreeSet<usize>,
}

impl PodSignature {
    pub fn new(pod: &PendingPod, ledger: &Ledger, kube_filters: &FilterSnapshot) -> Self {
        let named_nodes = match &pod.wait_kind {
            WaitKind::Gated => None,
            WaitKind::Refused {
                nodes: queried_nodes,
            }
            | WaitKind::Requeued {
                nodes: queried_nodes,
            } => queried_nodes.clone(),
        };
        let demand = ledger.with_spare_rules(&pod.demand);
        Self {
            named_nodes,
            ..Self::for_successor(&demand, kube_filters.requirements_of(&pod.uid).cloned())
        }
    }

    /// The signature of the pod that its controller creates in place of an evicted one.
    pub(crate) fn for_successor(demand: &Demand, requirements: Option<Arc<Requirements>>) -> Self {
        Self {
            key: DemandKey::from_demand(demand),
            demand: demand.clone(),
            requirements,
            named_nodes: None,
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
            && self.requirements == other.requirements
            && self.named_nodes == other.named_nodes
    }

    pub fn demand(&self) -> &Demand {
        &self.demand
    }

    pub fn filter_query<'a>(&'a self, kube_filters: &'a FilterSnapshot) -> Option<FilterQuery<'a>> {
        self.requirements
            .as_ref()
            .map(|wants| kube_filters.query(None, wants))
    }

    /// Whether the pods may be placed on a node that changes so first. The names of the latest filter request are what the
    /// scheduler itself found; a node may have changed since, so a refusal by our own check wins.
    pub fn admits(
        &self,
        index: usize,
        view: &PlanView<'_>,
        filter_query: Option<&FilterQuery<'_>>,
        assumed_change: &AssumedNodeChange<'_>,
    ) -> Result<(), NodeFit> {
        let node = &view.snapshot.nodes()[index];
        // Nodes were added or removed since the pod asked: the names say nothing of these.
        let named_nodes = self
            .named_nodes
            .as_ref()
            .filter(|named| view.snapshot.is_current(named));
        if named_nodes.is_some_and(|named| !view.snapshot.contains(named, index)) {
            return Err(NodeFit::Rejected);
        }
        let verdict = filter_query.map_or(
            FilterVerdict::Unsupported(UnsupportedRule::UnknownPod),
            |filter_query| filter_query.verdict(&node.name, assumed_change),
        );
        match verdict {
            FilterVerdict::Accepts => Ok(()),
            FilterVerdict::Rejects(_) => Err(NodeFit::Rejected),
            // The victims may be why the scheduler asked about this node: then the names say nothing of the node without them.
            FilterVerdict::Unsupported(_)
                if named_nodes.is_some() && assumed_change.leaving.is_empty() =>
            {
                Ok(())
            }
            FilterVerdict::Unsupported(unsupported) => Err(NodeFit::Unsupported(unsupported)),
        }
    }
}

impl NodeRanking {
    /// A ranking that is stopped has examined some of the nodes only.
    pub fn new(
        signature: PodSignature,
        view: &PlanView<'_>,
        kube_filters: &FilterSnapshot,
        step_budget: &StepBudget<'_>,
    ) -> Self {
        let nodes = view.snapshot.nodes().len();
        let mut ranking = Self {
            signature: signature.clone(),
            fits: vec![NodeFit::Rejected; nodes],
            free: BTreeSet::new(),
            full: BTreeSet::new(),
            unsupported: BTreeSet::new(),
        };
        let filter_query = signature.filter_query(kube_filters);
        for (index, (node, coming)) in view
            .ledger
            .incoming_pods_by_node()
            .enumerate()
            .take_while(|_| step_budget.spend_unless_stopped(1))
        {
            debug_assert_eq!(node, &view.snapshot.nodes()[index].name);
            ranking.evaluate_node(index, coming, view, filter_query.as_ref());
        }
        ranking
    }

    pub(crate) fn is_for(&self, signature: &PodSignature) -> bool {
        self.signature.is_like(signature)
    }

    /// Examines again a node that has changed.
    pub(crate) fn refresh_node(
        &mut self,
        index: usize,
        view: &PlanView<'_>,
        kube_filters: &FilterSnapshot,
    ) {
        let signature = self.signature.clone();
        let coming = view
            .ledger
            .incoming_pods(&view.snapshot.nodes()[index].name);
        self.evaluate_node(
            index,
            coming,
            view,
            signature.filter_query(kube_filters).as_ref(),
        );
    }

    /// Indices in the snapshot and the GPUs there, best first.
    pub fn free(&self) -> impl Iterator<Item = (usize, GpuSet)> {
        self.free
            .iter()
            .filter_map(|(_, index)| match self.fits[*index] {
                NodeFit::Free(_, gpus) => Some((*index, gpus)),
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
        self.full.first().and_then(|index| match self.fits[*index] {
            NodeFit::Full(misfit) => Some(misfit),
            _ => None,
        })
    }

    pub(crate) fn first_unsupported(&self) -> Option<UnsupportedRule> {
        self.unsupported
            .first()
            .and_then(|index| match self.fits[*index] {
                NodeFit::Unsupported(unsupported) => Some(unsupported),
                _ => None,
            })
    }

    fn evaluate_node(
        &mut self,
        index: usize,
        coming: &[PodUid],
        view: &PlanView<'_>,
        filter_query: Option<&FilterQuery<'_>>,
    ) {
        match self.fits[index] {
            NodeFit::Free(score, _) => self.free.remove(&(score, index)),
            NodeFit::Full(_) => self.full.remove(&index),
            NodeFit::Unsupported(_) => self.unsupported.remove(&index),
            NodeFit::Rejected => false,
        };
        let assumed_change = AssumedNodeChange {
            leaving: &[],
            coming,
        };
        let admitted = self
            .signature
            .admits(index, view, filter_query, &assumed_change);
        let score = || {
            rank::score_node(
                view.snapshot,
                index,
                &self.signature.demand,
                view.ledger.policy(),
            )
        };
        self.fits[index] = match admitted.map(|()| score()) {
            Err(fit) => fit,
            Ok(Ok((score, gpus))) => NodeFit::Free(score, gpus),
            Ok(Err(misfit)) => NodeFit::Full(misfit),
        };
        match self.fits[index] {
            NodeFit::Free(score, _) => self.free.insert((score, index)),
            NodeFit::Full(_) => self.full.insert(index),
            NodeFit::Unsupported(_) => self.unsupported.insert(index),
            NodeFit::Rejected => false,
        };
    }
}
