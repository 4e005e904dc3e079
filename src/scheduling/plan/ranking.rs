//! The nodes in order for pods of one kind. A thousand replicas ask the same of every node; they are ranked once, and after
//! each that is placed only its node is looked at again.

use crate::scheduling::device::GpuSet;
use crate::scheduling::fit::Misfit;
use crate::scheduling::ledger::{Pending, Way};
use crate::scheduling::node::Node;
use crate::scheduling::policy::Policy;
use crate::scheduling::rank::{self, Score};
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::{NodeSet, Snapshot};
use crate::scheduling::stock::{Freed, Requirements, StockView, Unjudged, Verdict};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What makes two pods of one kind, as far as their places are concerned.
#[derive(Debug, Clone)]
pub struct Kind {
    demand: Demand,
    wants: Option<Requirements>,
    asked: Option<Arc<NodeSet>>,
}

/// What the pod's kind finds on one node.
#[derive(Debug, Clone, Copy)]
pub enum Seat {
    Free(Score, GpuSet),
    /// The node would do, and has no room now.
    Full(Misfit),
    /// The stock filters refuse the node, or it was not among those that were asked about.
    Shut,
    /// Nobody can say what the stock filters would answer.
    Unjudged(Unjudged),
}

pub struct Ranking {
    kind: Kind,
    /// By place in the snapshot.
    seats: Vec<Seat>,
    free: BTreeSet<(Score, usize)>,
}

impl Kind {
    pub fn of(pod: &Pending, stock: &StockView) -> Self {
        let asked = match &pod.way {
            Way::Gated => None,
            Way::Refused { asked } | Way::OnItsWay { asked } => asked.clone(),
        };
        Self { demand: pod.demand.clone(), wants: stock.wants(&pod.uid).cloned(), asked }
    }

    fn is_like(&self, other: &Self) -> bool {
        let facts = |kind: &Self| {
            let Demand { per_gpu, gpus, sharing, class, tenant, priority, weights, .. } = kind.demand;
            (per_gpu, gpus, sharing, class, tenant, priority, weights)
        };
        facts(self) == facts(other)
            && self.demand.ask == other.demand.ask
            && self.demand.terms == other.demand.terms
            && self.demand.model == other.demand.model
            && self.wants == other.wants
            && self.asked == other.asked
    }

    /// Whether the pod may go to a node at all. The names of the latest filter request are what the scheduler itself found;
    /// since then a node may have changed, and an own check that says no is believed.
    pub fn admits(
        &self,
        snapshot: &Snapshot,
        place: usize,
        stock: &StockView,
        beside: &Freed,
    ) -> Result<(), Seat> {
        let node = &snapshot.nodes()[place];
        // Nodes have come or gone since the pod asked: what it asked about says nothing of these.
        let asked = self.asked.as_ref().filter(|asked| snapshot.is_current(asked));
        if asked.is_some_and(|asked| !snapshot.contains(asked, place)) {
            return Err(Seat::Shut);
        }
        let verdict = match &self.wants {
            Some(wants) => stock.verdict(wants, &node.name, beside),
            None => Verdict::CannotJudge(Unjudged::UnknownPod),
        };
        match verdict {
            Verdict::Accepts => Ok(()),
            Verdict::Refuses(_) => Err(Seat::Shut),
            Verdict::CannotJudge(_) if asked.is_some() => Ok(()),
            Verdict::CannotJudge(unjudged) => Err(Seat::Unjudged(unjudged)),
        }
    }
}

impl Ranking {
    pub fn new(kind: Kind, nodes: usize) -> Self {
        Self { kind, seats: vec![Seat::Shut; nodes], free: BTreeSet::new() }
    }

    pub fn is_for(&self, kind: &Kind) -> bool {
        self.kind.is_like(kind)
    }

    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// Looks at a node (again).
    pub fn look_at(
        &mut self,
        place: usize,
        snapshot: &Snapshot,
        stock: &StockView,
        beside: &Freed,
        policy: &Policy,
    ) {
        if let Seat::Free(score, _) = self.seats[place] {
            self.free.remove(&(score, place));
        }
        self.seats[place] = match self.kind.admits(snapshot, place, stock, beside) {
            Err(seat) => seat,
            Ok(()) => seat(&snapshot.nodes()[place], &self.kind.demand, policy),
        };
        if let Seat::Free(score, _) = self.seats[place] {
            self.free.insert((score, place));
        }
    }

    /// Places in the snapshot and the GPUs there, best first.
    pub fn free(&self) -> impl Iterator<Item = (usize, GpuSet)> {
        self.free.iter().filter_map(|(_, place)| match self.seats[*place] {
            Seat::Free(_, gpus) => Some((*place, gpus)),
            _ => None,
        })
    }

    /// Of each node, by its place.
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }
}

fn seat(node: &Node, demand: &Demand, policy: &Policy) -> Seat {
    match rank::seat(node, demand, policy) {
        Ok((score, gpus)) => Seat::Free(score, gpus),
        Err(misfit) => Seat::Full(misfit),
    }
}
