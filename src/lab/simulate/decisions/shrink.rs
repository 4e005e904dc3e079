//! Makes a failing sequence small: up to the step that fails, on few nodes, without the kinds of steps that have nothing to do
//! with it. It need not fail in the same way; any failure is worth looking at.

use super::step::StepKind;
use super::{DecisionSequence, play};

/// The smallest failing sequence that was found; a sequence that fails is the worst answer.
pub fn shrink(failing: &DecisionSequence) -> DecisionSequence {
    let mut smallest = failing.clone();
    let mut retain = |candidate: DecisionSequence| {
        if let Some((step, _)) = play(&candidate).broken {
            smallest = DecisionSequence {
                steps: candidate.steps.min(step + 1),
                ..candidate
            };
        }
        smallest.clone()
    };
    let mut known = retain(failing.clone());
    for nodes in [1, 2, 3, 4, 6, 8, 16] {
        if nodes < known.nodes {
            let fewer = retain(DecisionSequence {
                nodes,
                ..known.clone()
            });
            if fewer.nodes == nodes {
                known = fewer;
                break;
            }
        }
    }
    for kind in StepKind::ALL
        .iter()
        .filter(|kind| !failing.without.contains(kind))
    {
        let without = known.without.iter().chain([kind]).copied().collect();
        known = retain(DecisionSequence {
            without,
            ..known.clone()
        });
    }
    known
}
