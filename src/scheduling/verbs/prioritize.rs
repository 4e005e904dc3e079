//! The `prioritize` verb: a rank for each of the nodes that passed filter.

use super::input::changes;
use super::request::{DecisionView, VerbRequest};
use crate::placing::rank::{ScheduleAttempt, Shortlist, shortlist};
use serde::{Deserialize, Serialize};

/// kube-scheduler asks how good these nodes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrioritizeAsked(pub VerbRequest);

/// The decision: all nodes that fit, best first. [`filter::offer_of`](super::filter::offer_of) records the first of them.
pub fn prioritize<'a>(
    view: &DecisionView,
    names: impl ExactSizeIterator<Item = &'a str>,
) -> Shortlist {
    let attempt = ScheduleAttempt {
        limit: names.len().max(1),
        ..view.attempt()
    };
    shortlist(&view.snapshot, &view.request.demand, names, attempt)
}

changes! { cluster, PrioritizeAsked(request) -> DecisionView { DecisionView::take(cluster, request) } }
