//! What engines that started on one node have taught of it: the samples of each kind of start, and the factors that fit them.

use super::super::start_samples::{StartSample, StartSamples};
use crate::scheduling::vocabulary::start_time::{NodeStartFactors, StartFactors, StartKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kinds of starts that are remembered of a node; of the others the one that was observed longest ago is forgotten.
const KINDS: usize = 8;
/// Samples of each.
const SAMPLES: usize = 12;
/// One start may be an accident.
const LEAST_SAMPLES: usize = 2;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeStarts {
    /// The latest observed last.
    samples: Vec<(StartKind, StartSamples)>,
    factors: NodeStartFactors,
}

impl NodeStarts {
    pub(in crate::scheduling) fn factors(&self) -> &NodeStartFactors {
        &self.factors
    }

    /// An engine has started here; `known` is what the cluster knows of that kind.
    pub(in crate::scheduling) fn learn(&mut self, kind: StartKind, sample: StartSample, known: StartFactors) {
        let place = self.samples.iter().position(|(of, _)| *of == kind);
        let (_, mut samples) =
            place.map(|place| self.samples.remove(place)).unwrap_or((kind, StartSamples::default()));
        samples.add(sample, SAMPLES);
        let factors = samples.fit(known, LEAST_SAMPLES);
        self.samples.push((kind, samples));
        if self.samples.len() > KINDS {
            self.samples.remove(0);
        }
        let is_kept = |of: &StartKind| *of != kind && self.samples.iter().any(|(kept, _)| kept == of);
        let mut all: Vec<_> = self.factors.iter().filter(|(of, _)| is_kept(of)).copied().collect();
        all.extend(factors.map(|factors| (kind, factors)));
        all.sort_unstable_by_key(|(of, _)| *of);
        self.factors = Arc::from(all);
    }
}
