//! What engines that started on one node have taught of it: the samples of each kind of start, and the factors that fit them; and
//! for how long each has kept others from starting.

use super::super::start_samples::{StartSample, StartSamples};
use crate::ids::{GpuUuid, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::start_time::{NodeStartFactors, StartFactors, StartKind};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kinds of starts that are remembered of a node; of the others the one that was observed longest ago is forgotten.
const KINDS: usize = 8;
/// Samples of each.
const SAMPLES: usize = 12;
/// One start may be an accident.
const LEAST_SAMPLES: usize = 2;
/// For how long the time counts that a start has kept others.
const COUNTS_FOR: Millis = Millis::seconds(3600);
/// As long as an engine at least, so that few are remembered.
const LEAST_HELD: Millis = Millis::seconds(1);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeStarts {
    /// The latest observed last.
    samples: Vec<(StartKind, StartSamples)>,
    factors: NodeStartFactors,
    #[serde(default)]
    past: Vec<PastStart>,
}

/// A tenant by its name, or a namespace without one: whose starts count together.
pub(crate) type Starter<'a> = (bool, &'a str);

/// For how long a pod's engine has kept others from starting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PastStart {
    uid: PodUid,
    gpus: Arc<[GpuUuid]>,
    is_tenant: bool,
    name: String,
    ended: Moment,
    held: Millis,
    is_ready: bool,
}

impl NodeStarts {
    pub(crate) fn factors(&self) -> &NodeStartFactors {
        &self.factors
    }

    /// An engine has started here; `known` is what the cluster knows of that kind.
    pub(crate) fn learn(&mut self, kind: StartKind, sample: StartSample, known: StartFactors) {
        let place = self.samples.iter().position(|(of, _)| *of == kind);
        let (_, mut samples) = place
            .map(|place| self.samples.remove(place))
            .unwrap_or((kind, StartSamples::default()));
        samples.add(sample, SAMPLES);
        let factors = samples.fit(known, LEAST_SAMPLES);
        self.samples.push((kind, samples));
        if self.samples.len() > KINDS {
            self.samples.remove(0);
        }
        let is_kept =
            |of: &StartKind| *of != kind && self.samples.iter().any(|(kept, _)| kept == of);
        let mut all: Vec<_> = self
            .factors
            .iter()
            .filter(|(of, _)| is_kept(of))
            .copied()
            .collect();
        all.extend(factors.map(|factors| (kind, factors)));
        all.sort_unstable_by_key(|(of, _)| *of);
        self.factors = Arc::from(all);
    }

    /// The pod's engine has kept others from starting on these GPUs for so long.
    pub(crate) fn note_past(
        &mut self,
        uid: &PodUid,
        (is_tenant, name): Starter<'_>,
        gpus: Arc<[GpuUuid]>,
        (held, ended): (Millis, Moment),
        is_ready: bool,
    ) {
        self.past
            .retain(|past| past.uid != *uid && ended.since(past.ended) < COUNTS_FOR);
        let (uid, name, held) = (uid.clone(), name.into(), held.max(LEAST_HELD));
        self.past.push(PastStart {
            uid,
            gpus,
            is_tenant,
            name,
            ended,
            held,
            is_ready,
        });
    }

    /// Whether the pod's engine counts as one that did not become ready.
    pub(crate) fn has_failed(&self, uid: &PodUid) -> bool {
        self.past
            .iter()
            .any(|past| past.uid == *uid && !past.is_ready)
    }

    /// It has become ready after all.
    pub(crate) fn note_ready(&mut self, uid: &PodUid) {
        self.past
            .iter_mut()
            .filter(|past| past.uid == *uid)
            .for_each(|past| past.is_ready = true);
    }

    /// For how long engines of the starter have kept others from one of these GPUs, or from any if none is named: those that did
    /// not become ready, and all.
    pub(crate) fn held(
        &self,
        starter: Starter<'_>,
        gpus: &[GpuUuid],
        now: Moment,
    ) -> (Millis, Millis) {
        let is_its = |past: &&PastStart| {
            (past.is_tenant, &*past.name) == starter && now.since(past.ended) < COUNTS_FOR
        };
        let its: Vec<&PastStart> = self.past.iter().filter(is_its).collect();
        let sum = |gpu: Option<&GpuUuid>, failed_only: bool| {
            let on_it = its
                .iter()
                .filter(|past| gpu.is_none_or(|gpu| past.gpus.contains(gpu)));
            let counted = on_it.filter(|past| !failed_only || !past.is_ready);
            counted.fold(Millis::default(), |sum, past| sum + past.held)
        };
        let longest = |failed_only| {
            let each = gpus.iter().map(|gpu| sum(Some(gpu), failed_only)).max();
            each.unwrap_or_else(|| sum(None, failed_only))
        };
        (longest(true), longest(false))
    }
}
