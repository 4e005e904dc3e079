//! The `filter` verb: which of the named nodes fit the pod, shortened to the best few.
//!
//! [`FilterAsked`] adds the pod to the ledger and takes the view; [`filter`] decides on it; [`FilterDecided`] records what the
//! pod was answered.

use super::request::{DecisionView, VerbRequest};
use super::{Change, Cluster};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::placing::rank::{Candidate, Shortlist};
use crate::placing::score_cache::CachedScores;
use crate::placing::snapshot::NodeSet;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// kube-scheduler asks on which nodes the pod fits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterAsked(pub VerbRequest);

/// The pod was answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterDecided {
    pub uid: PodUid,
    pub answer: FilterAnswer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FilterAnswer {
    /// These GPUs are softly reserved for it: its only node, or the one that is ranked first.
    Offered {
        node: NodeName,
        devices: Arc<[GpuUuid]>,
    },
    /// None of the nodes fits; `None` if it is not known which they were.
    Refused {
        #[serde(rename = "asked")]
        queried_nodes: Option<NodeSet>,
    },
}

/// The decision: the best of the named nodes, and why each other one does not fit. `scores` are the cached scores of this pod's
/// demand on this snapshot.
pub fn filter<'a>(
    view: &DecisionView,
    names: impl ExactSizeIterator<Item = &'a str>,
    scores: &mut CachedScores,
) -> Shortlist {
    scores.shortlist(&view.snapshot, &view.request.demand, names, view.attempt())
}

/// The input that records a filter answer. With one node in it kube-scheduler skips prioritize, so the soft reservation
/// is made here; with more, prioritize makes it.
pub fn decision_of(view: &DecisionView, list: &Shortlist) -> Option<FilterDecided> {
    match list.best[..] {
        [] => Some(refusal_of(view, list)),
        [only] => Some(offer_of(view, &only)),
        _ => None,
    }
}

/// None of the named nodes fits.
pub fn refusal_of(view: &DecisionView, list: &Shortlist) -> FilterDecided {
    let named_nodes = view.snapshot.node_set(list.known_node_indices());
    FilterDecided {
        uid: view.request.uid.clone(),
        answer: FilterAnswer::Refused {
            queried_nodes: Some(named_nodes),
        },
    }
}

/// The candidate's GPUs are softly reserved.
pub fn offer_of(view: &DecisionView, candidate: &Candidate) -> FilterDecided {
    let node = &view.snapshot.nodes()[candidate.node_index];
    let answer = FilterAnswer::Offered {
        node: node.name.clone(),
        devices: node.uuids(candidate.gpus),
    };
    FilterDecided {
        uid: view.request.uid.clone(),
        answer,
    }
}

impl Change for FilterAsked {
    type Output = DecisionView;

    fn apply_to(self, cluster: &mut Cluster) -> DecisionView {
        let Self(request) = self;
        request.record_in(&mut cluster.ledger);
        let (tries, just_failed) = cluster.ledger.begin_attempt(&request.uid);
        DecisionView {
            tries,
            just_failed,
            ..DecisionView::take(cluster, request)
        }
    }
}

impl Change for FilterDecided {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        match self.answer {
            FilterAnswer::Offered { node, devices } => {
                cluster.ledger.reserve_softly(&self.uid, &node, &devices)
            }
            FilterAnswer::Refused { queried_nodes } => {
                cluster.ledger.record_refusal(&self.uid, queried_nodes)
            }
        }
    }
}
