//! What engines that started on one node have taught of it: the samples of each kind of start, and the factors that fit them; and
//! whose did not become ready.

use super::super::start_samples::{StartSample, StartSamples};
use crate::ids::GpuUuid;
use crate::scheduling::vocabulary::start_time::{NodeStartFactors, StartFactors, StartKind};
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kinds of starts that are remembered of a node; of the others the one that was observed longest ago is forgotten.
const KINDS: usize = 8;
/// Samples of each.
const SAMPLES: usize = 12;
/// One start may be an accident.
const LEAST_SAMPLES: usize = 2;
/// For how long starts that came to nothing count.
const FAILED_WITHIN: Millis = Millis::seconds(3600);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::scheduling) struct NodeStarts {
    /// The latest observed last.
    samples: Vec<(StartKind, StartSamples)>,
    factors: NodeStartFactors,
    #[serde(default)]
    failed: Vec<FailedStarts>,
}

/// A tenant by its name, or a namespace without one: whose starts count together.
pub(in crate::scheduling) type Starter<'a> = (bool, &'a str);

/// For how long engines of one starter that did not become ready have kept others from starting on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FailedStarts {
    gpu: GpuUuid,
    is_tenant: bool,
    name: String,
    /// The first of them ended then.
    since: Moment,
    held: Millis,
}

impl FailedStarts {
    fn is_of(&self, starter: Starter<'_>) -> bool {
        (self.is_tenant, &*self.name) == starter
    }
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

    /// An engine did not become ready, and has kept others from starting on these GPUs for so long.
    pub(in crate::scheduling) fn note_failed(
        &mut self,
        starter: Starter<'_>,
        gpus: &[GpuUuid],
        held: Millis,
        now: Moment,
    ) {
        self.failed.retain(|failed| now.since(failed.since) < FAILED_WITHIN);
        for gpu in gpus {
            match self.failed.iter_mut().find(|failed| failed.gpu == *gpu && failed.is_of(starter)) {
                Some(failed) => failed.held = failed.held + held,
                None => {
                    let (is_tenant, name) = (starter.0, starter.1.into());
                    self.failed.push(FailedStarts { gpu: gpu.clone(), is_tenant, name, since: now, held });
                }
            }
        }
    }

    /// For how long engines of the starter that did not become ready have kept others from one of these GPUs, or from any if
    /// none is named.
    pub(in crate::scheduling) fn failed(
        &self,
        starter: Starter<'_>,
        gpus: &[GpuUuid],
        now: Moment,
    ) -> Millis {
        let is_meant = |failed: &&FailedStarts| {
            failed.is_of(starter)
                && now.since(failed.since) < FAILED_WITHIN
                && (gpus.is_empty() || gpus.contains(&failed.gpu))
        };
        self.failed.iter().filter(is_meant).map(|failed| failed.held).max().unwrap_or_default()
    }
}
