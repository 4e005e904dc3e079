//! How long engines take to start: what was expected of each that was bound, what was observed, and what follows for the next.
//!
//! A start is expected when a pod is assumed, or when a watch shows a pod that waited on its node, so that a standby learns what
//! the leader learns. It ends when the watch shows the pod ready. Starts are not observed of a pod whose container was restarted,
//! that has no readiness or startup probe, or that became ready while no watch ran.
//!
//! What was learned is bounded and kept in memory alone. It changes when starts end, in [`Ledger::observe_start`].
//!
//! A start of one kind takes `transfer × a + init × b`: both parts by the policy's speeds, `a` and `b` to be found. The fit minimizes
//! relative errors, counts outliers less, and begins with one factor for both: all engines of one size, say, do not tell `a` from `b`.

use super::Ledger;
use crate::engines::Engine;
use crate::ids::{GpuModel, NodeName, PodUid};
use crate::placing::rank;
use crate::placing::start_model::{StartEstimate, StartModel};
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::image::{NodeImage, NodeImageSet, largest_images};
use crate::vocabulary::model_tier::LoadingSpeeds;
use crate::vocabulary::node::Node;
use crate::vocabulary::start_time::{StartFactors, StartKind, TimeFactor};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most kinds of starts, by kind of GPU, that are remembered; beyond that the kind observed longest ago is forgotten.
const MAX_KINDS: usize = 256;
/// The most samples of each kind.
const MAX_SAMPLES: usize = 24;
/// The fewest samples from which factors for other nodes are fitted.
const MIN_SAMPLES: usize = 3;
/// The most finished starts over which errors are computed.
const MAX_TIMED_STARTS: usize = 256;

/// The start of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStart {
    /// When the pod was bound.
    pub since: Moment,
    pub expected: StartEstimate,
    /// When its containers ran, so that its images were there.
    pulled: Option<Moment>,
    gpu: Option<GpuModel>,
    /// Once it is over, how long it took.
    pub took: Option<Millis>,
}

/// What a watch shows of a pod that starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StartProgress {
    /// Its containers run, and nothing but the pull of its images came before.
    Running,
    Ready,
    /// It teaches nothing: a container was restarted, the pod does not say when its engine answers, or no watch saw when it did.
    Untimed,
}

/// A start that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedStart {
    pub engine: Engine,
    /// When the pod was bound.
    pub expected: Millis,
    /// The start expected by the policy's speeds alone.
    pub prior: Millis,
    pub observed: Millis,
}

/// How far expected starts were off, in thousandths of what was observed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartErrors {
    pub starts: usize,
    pub expected: Percentiles,
    /// The errors of starts expected by the policy's speeds alone.
    pub prior: Percentiles,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    pub p50: u64,
    pub p90: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct StartTimes {
    model: Arc<StartModel>,
    kinds: Arc<Vec<ObservedKind>>,
    /// The latest last.
    timed: Arc<VecDeque<TimedStart>>,
}

/// One kind of start on one kind of GPU, on all nodes together.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ObservedKind {
    kind: StartKind,
    gpu: Option<GpuModel>,
    samples: StartSamples,
}

impl StartTimes {
    pub(super) fn model(&self) -> &Arc<StartModel> {
        &self.model
    }

    /// A copy with the model alone, to plan on: no start is observed on a copy.
    pub(super) fn scratch(&self) -> Self {
        Self {
            model: self.model.clone(),
            ..Self::default()
        }
    }

    /// Forgets what was learned relative to the policy's speeds, because these have changed.
    pub(super) fn forget(&mut self) {
        Arc::make_mut(&mut self.model).forget_factors();
        self.kinds = Arc::default();
    }

    /// Learns from one start. Returns the cluster's factors of that kind, as a prior for the node's own.
    fn learn(
        &mut self,
        kind: StartKind,
        gpu: Option<&GpuModel>,
        sample: StartSample,
    ) -> StartFactors {
        let kinds = Arc::make_mut(&mut self.kinds);
        let index = kinds.iter().position(|observed_kind| {
            observed_kind.kind == kind && observed_kind.gpu.as_ref() == gpu
        });
        let mut observed = match index {
            Some(index) => kinds.remove(index),
            None => ObservedKind {
                kind,
                gpu: gpu.cloned(),
                samples: StartSamples::default(),
            },
        };
        observed.samples.add(sample, MAX_SAMPLES);
        let fitted = observed.samples.fit(StartFactors::PRIOR, MIN_SAMPLES);
        kinds.push(observed);
        let forgotten = (kinds.len() > MAX_KINDS).then(|| kinds.remove(0));
        if let Some(ObservedKind { kind, gpu, .. }) = forgotten {
            Arc::make_mut(&mut self.model).set_factors(kind, gpu.as_ref(), None);
        }
        let cluster_factors = self.model.cluster_factors(kind, gpu);
        // Scores of this engine's pods are computed again for each change: small ones wait until they add up.
        if let Some(fitted) = fitted
            .filter(|fitted| cluster_factors.is_none_or(|in_force| in_force.is_far_from(fitted)))
        {
            Arc::make_mut(&mut self.model).set_factors(kind, gpu, Some(fitted));
        }
        fitted.or(cluster_factors).unwrap_or(StartFactors::PRIOR)
    }

    fn record(&mut self, start: TimedStart) {
        let timed = Arc::make_mut(&mut self.timed);
        timed.push_back(start);
        if timed.len() > MAX_TIMED_STARTS {
            timed.pop_front();
        }
    }
}

impl PodStart {
    /// What is expected of an engine that is bound to this node now; `None` if it would teach nothing.
    pub(super) fn expect(
        demand: &Demand,
        node: &Node,
        now: Moment,
        start_model: &StartModel,
        speeds: &LoadingSpeeds,
    ) -> Option<Arc<Self>> {
        // What a pod's model weighs that asks a device plugin is not known here, and what is no engine is ready before its model
        // is.
        let is_timed =
            demand.terms.engine && demand.model.is_some() && !demand.is_allocated_externally();
        let expected =
            is_timed.then(|| rank::estimate_start(node, demand, start_model, speeds))??;
        let gpu = node.gpu_model().cloned();
        Some(Arc::new(Self {
            since: now,
            expected,
            pulled: None,
            gpu,
            took: None,
        }))
    }

    /// This start, counted from a later Binding.
    pub(super) fn counted_from(&self, since: Moment) -> Self {
        Self {
            since,
            ..self.clone()
        }
    }

    /// The time that the images took, if it can be told apart, and the time that the engine took.
    fn parts(&self, now: Moment) -> (Option<Millis>, Millis) {
        let StartEstimate { time, missing, .. } = self.expected;
        match self.pulled {
            Some(pulled) if missing.count > 0 => {
                (Some(pulled.since(self.since)), now.since(pulled))
            }
            _ => (
                None,
                Millis(now.since(self.since).0.saturating_sub(time.pull.0)),
            ),
        }
    }
}

impl Ledger {
    /// How long engines take to start, as far as it was learned.
    pub fn start_model(&self) -> &Arc<StartModel> {
        self.start_times.model()
    }

    /// How far the latest starts were off.
    pub fn start_errors(&self) -> StartErrors {
        let timed = &self.start_times.timed;
        let errors = |estimate: fn(&TimedStart) -> Millis| {
            let mut errors: Vec<u64> = timed
                .iter()
                .map(|start| relative_error(estimate(start), start.observed))
                .collect();
            errors.sort_unstable();
            let at = |percent: usize| {
                errors
                    .get((errors.len() * percent).div_ceil(100).saturating_sub(1))
                    .copied()
                    .unwrap_or(0)
            };
            Percentiles {
                p50: at(50),
                p90: at(90),
            }
        };
        StartErrors {
            starts: timed.len(),
            expected: errors(|start| start.expected),
            prior: errors(|start| start.prior),
        }
    }

    /// Brings the ledger to what a watch shows of a pod's start. Returns the start if it is over by that.
    pub(crate) fn observe_start(
        &mut self,
        uid: &PodUid,
        progress: StartProgress,
    ) -> Option<TimedStart> {
        let now = self.now;
        let pod_state = self.pod_states.get(uid)?;
        let (start, node) = (pod_state.start.clone()?, pod_state.node()?.clone());
        if start.took.is_some() {
            return None;
        }
        let namespace = pod_state.key.namespace.clone();
        let next = match progress {
            StartProgress::Untimed => None,
            StartProgress::Running => Some(PodStart {
                pulled: start.pulled.or(Some(now)),
                ..(*start).clone()
            }),
            StartProgress::Ready => Some(PodStart {
                took: Some(now.since(start.since)),
                ..(*start).clone()
            }),
        };
        if next.as_ref() != Some(&*start) {
            self.pod_states
                .edit_without_move(uid, |pod_state| pod_state.start = next.map(Arc::new));
        }
        (progress == StartProgress::Ready).then(|| self.learn_start(&node, &start, &namespace))
    }

    fn learn_start(
        &mut self,
        node: &NodeName,
        start: &PodStart,
        namespace: &Arc<str>,
    ) -> TimedStart {
        let (expected, now) = (start.expected, self.now);
        let (pull, engine) = start.parts(now);
        let sample = |transfer, init, observed| StartSample {
            transfer,
            init,
            observed,
            namespace: namespace.clone(),
        };
        // The size of an image that is only assumed says nothing of the speed.
        if let Some(pull) = pull.filter(|_| !expected.missing.is_assumed) {
            let sample = sample(expected.prior.pull, Millis::default(), pull);
            self.learn_sample(node, StartKind::Pull, None, sample);
        }
        let mut timed_engine = Engine::default();
        if let Some(StartKind::Engine(engine_kind, path)) = expected.kind {
            timed_engine = engine_kind;
            let sample = sample(expected.prior.transfer(), expected.prior.init, engine);
            self.learn_sample(
                node,
                StartKind::Engine(engine_kind, path),
                start.gpu.as_ref(),
                sample,
            );
        }
        self.node_states
            .refresh_view(node, &self.pod_states, &self.policy);
        let timed = TimedStart {
            engine: timed_engine,
            expected: expected.time.total(),
            prior: expected.prior.total(),
            observed: now.since(start.since),
        };
        self.start_times.record(timed);
        timed
    }

    fn learn_sample(
        &mut self,
        node: &NodeName,
        kind: StartKind,
        gpu: Option<&GpuModel>,
        sample: StartSample,
    ) {
        let cluster_factors = self.start_times.learn(kind, gpu, sample.clone());
        if let Some(node_state) = self.node_states.existing_mut(node) {
            node_state.learn_start(kind, sample, cluster_factors);
        }
    }

    /// The images on a node that exists; `None` if it lists none.
    pub(crate) fn observe_images(&mut self, name: &NodeName, images: Option<Vec<NodeImage>>) {
        let Some(node_state) = self.node_states.existing_mut(name) else {
            return;
        };
        let images = images.map(largest_images);
        let now = images.as_deref().unwrap_or_default();
        let before = node_state.images().clone();
        let is_other = before.is_known() != images.is_some()
            || self
                .start_times
                .model
                .images()
                .would_change(before.iter(), now);
        if !is_other {
            return;
        }
        Arc::make_mut(&mut self.start_times.model)
            .images_mut()
            .replace(before.iter(), now);
        let set = images.map(|images| images.iter().map(|image| image.image).collect());
        if node_state.set_images(NodeImageSet::from(set)) {
            self.node_states
                .refresh_view(name, &self.pod_states, &self.policy);
        }
    }
}

/// The error of an expected time, in thousandths of the observed one.
fn relative_error(expected: Millis, observed: Millis) -> u64 {
    let off = u128::from(expected.0.abs_diff(observed.0)) * 1000 / u128::from(observed.0.max(1));
    off.min(u64::MAX.into()) as u64
}

/// One observed start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StartSample {
    /// By the policy's speeds: the part that depends on bytes, and the rest.
    pub transfer: Millis,
    pub init: Millis,
    pub observed: Millis,
    pub namespace: Arc<str>,
}

/// The latest starts of one kind, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct StartSamples(Vec<StartSample>);

/// Weight of the prior, in samples: starts vary by a fifth of their time, policies may be off by all of it.
const PRIOR_WEIGHT: f64 = 0.05;
/// Errors beyond this share of the expected time count less and less.
const OUTLIER_THRESHOLD: f64 = 0.5;
/// After so many rounds the fit moves by less than a thousandth.
const FIT_ROUNDS: usize = 12;

impl StartSamples {
    /// Adds a start and keeps `limit` at most. Of the namespace with the most samples the oldest goes, so that no namespace can
    /// push out what others have observed.
    pub(crate) fn add(&mut self, sample: StartSample, limit: usize) {
        self.0.push(sample);
        if self.0.len() > limit {
            let count = |namespace: &str| {
                self.0
                    .iter()
                    .filter(|one| &*one.namespace == namespace)
                    .count()
            };
            let counts: Vec<usize> = self.0.iter().map(|one| count(&one.namespace)).collect();
            let most = counts.iter().max().copied().unwrap_or_default();
            let oldest = counts
                .iter()
                .position(|count| *count == most)
                .unwrap_or_default();
            self.0.remove(oldest);
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The factors that fit best, near `prior` where that is open; `None` with fewer than `min_samples` samples.
    pub(crate) fn fit(&self, prior: StartFactors, min_samples: usize) -> Option<StartFactors> {
        if self.0.len() < min_samples {
            return None;
        }
        let prior_factors = [prior.transfer, prior.init].map(|factor| f64::from(factor.0) / 1000.0);
        let common =
            (0..FIT_ROUNDS).fold(1.0, |common, _| self.refit_common(common, prior_factors));
        // As long as nothing says otherwise, both parts are off by the same.
        let center = prior_factors.map(|factor| clamped_factor(factor * common));
        let found = (0..FIT_ROUNDS).fold(center, |found, _| self.refit(found, center));
        let [transfer, init] = found.map(|factor| TimeFactor((factor * 1000.0).round() as u32));
        Some(StartFactors {
            transfer,
            init,
            samples: self.0.len() as u16,
        })
    }

    /// One round of weighted least squares for a factor of both parts, with weights by the one of the round before.
    fn refit_common(&self, before: f64, prior_factors: [f64; 2]) -> f64 {
        let [mut observed, mut expected] = [PRIOR_WEIGHT / before; 2];
        for sample in &self.0 {
            let [transfer, init, time] = sample.clamped();
            let one = prior_factors[0] * transfer + prior_factors[1] * init;
            // No time was expected, and no factor of nothing is another time.
            if one < 1.0 {
                continue;
            }
            let weight = sample_weight(time, before * one);
            observed += weight * one * time;
            expected += weight * one * one;
        }
        observed / expected
    }

    /// One round of weighted least squares for both factors, near `about`.
    fn refit(&self, before: [f64; 2], about: [f64; 2]) -> [f64; 2] {
        // The normal equations: [[tt, ti], [ti, ii]] × [a, b] = [ty, iy].
        let [mut tt, mut ii] = about.map(|factor| PRIOR_WEIGHT / (factor * factor));
        let [mut ty, mut iy] = about.map(|factor| PRIOR_WEIGHT / factor);
        let mut ti = 0.0;
        for sample in &self.0 {
            let [transfer, init, time] = sample.clamped();
            let weight = sample_weight(time, (before[0] * transfer + before[1] * init).max(1.0));
            tt += weight * transfer * transfer;
            ti += weight * transfer * init;
            ii += weight * init * init;
            ty += weight * transfer * time;
            iy += weight * init * time;
        }
        // Positive, because of what is known beforehand.
        let determinant = tt * ii - ti * ti;
        let found = [
            (ty * ii - iy * ti) / determinant,
            (iy * tt - ty * ti) / determinant,
        ];
        // If one factor is at its limit, the other one fits the rest.
        match found.map(clamped_factor) {
            [a, _] if a != found[0] => [a, clamped_factor((iy - ti * a) / ii)],
            [_, b] if b != found[1] => [clamped_factor((ty - ti * b) / tt), b],
            both => both,
        }
    }
}

impl StartSample {
    /// Both parts and the observed time in milliseconds, that within what factors may say.
    fn clamped(&self) -> [f64; 3] {
        let [transfer, init, observed] =
            [self.transfer, self.init, self.observed].map(|time| time.0 as f64);
        let whole = (transfer + init).max(1.0);
        let (low, high) = TimeFactor::LIMITS;
        let [low, high] = [low, high].map(|limit| whole * f64::from(limit.0) / 1000.0);
        [transfer, init, observed.clamp(low, high)]
    }
}

/// How much a start counts that was expected to take `expected`: errors are relative, and outliers count less.
fn sample_weight(observed: f64, expected: f64) -> f64 {
    let error = ((observed - expected) / expected).abs();
    OUTLIER_THRESHOLD / error.max(OUTLIER_THRESHOLD) / (expected * expected)
}

fn clamped_factor(factor: f64) -> f64 {
    let (low, high) = TimeFactor::LIMITS;
    factor.clamp(f64::from(low.0) / 1000.0, f64::from(high.0) / 1000.0)
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod start_samples_tests {
    use super::*;

    fn sample(namespace: &str, transfer: u64, init: u64, observed: u64) -> StartSample {
        let [transfer, init, observed] = [transfer, init, observed].map(Millis::seconds);
        StartSample {
            transfer,
            init,
            observed,
            namespace: namespace.into(),
        }
    }

    fn samples(of: impl IntoIterator<Item = StartSample>) -> StartSamples {
        let mut samples = StartSamples::default();
        of.into_iter().for_each(|one| samples.add(one, 24));
        samples
    }

    fn expected(factors: StartFactors, transfer: u64, init: u64) -> f64 {
        (factors.transfer.apply_to(Millis::seconds(transfer)).0
            + factors.init.apply_to(Millis::seconds(init)).0) as f64
            / 1000.0
    }

    #[test]
    fn models_of_several_sizes_tell_slow_transfer_from_slow_init() {
        let sizes = || [10, 40, 160].into_iter().cycle().take(24);
        let slow_network = sizes().map(|transfer| sample("a", transfer, 20, 3 * transfer + 20));
        let found = samples(slow_network).fit(StartFactors::PRIOR, 3).unwrap();
        assert!((2900..=3000).contains(&found.transfer.0), "{found:?}");
        assert!((1000..=1100).contains(&found.init.0), "{found:?}");
        let slow_start = sizes().map(|transfer| sample("a", transfer, 20, transfer + 60));
        let found = samples(slow_start).fit(StartFactors::PRIOR, 3).unwrap();
        assert!((1000..=1100).contains(&found.transfer.0), "{found:?}");
        assert!((2900..=3000).contains(&found.init.0), "{found:?}");
    }

    #[test]
    fn one_size_is_predicted_whichever_part_is_slow() {
        let found = samples(vec![sample("a", 30, 20, 150); 10])
            .fit(StartFactors::PRIOR, 3)
            .unwrap();
        let time = expected(found, 30, 20);
        assert!((148.0..=151.0).contains(&time), "{time}");
    }

    #[test]
    fn a_start_a_hundred_times_as_long_hardly_counts() {
        let mut all = vec![sample("a", 30, 20, 100); 8];
        all.push(sample("a", 30, 20, 5000));
        let time = expected(samples(all).fit(StartFactors::PRIOR, 3).unwrap(), 30, 20);
        assert!((100.0..=110.0).contains(&time), "{time}");
    }

    #[test]
    fn factors_stay_within_their_limits_and_few_samples_say_nothing() {
        let absurd = [0, u64::MAX / 2000].map(|observed| sample("a", 30, 20, observed));
        assert_eq!(samples(absurd.clone()).fit(StartFactors::PRIOR, 3), None);
        for one in absurd {
            let found = samples([one.clone()]).fit(StartFactors::PRIOR, 1).unwrap();
            let (low, high) = TimeFactor::LIMITS;
            for factor in [found.transfer, found.init] {
                assert!((low..=high).contains(&factor), "{found:?} of {one:?}");
            }
        }
        let nothing = sample("a", 0, 0, 0);
        assert_eq!(
            samples([nothing]).fit(StartFactors::PRIOR, 1).unwrap(),
            StartFactors {
                samples: 1,
                ..StartFactors::PRIOR
            }
        );
    }

    #[test]
    fn a_namespace_that_floods_the_samples_pushes_out_its_own() {
        let honest = (0..8).map(|_| sample("honest", 30, 20, 50));
        let flood = (0..1000).map(|_| sample("flood", 30, 20, 500));
        let all = samples(honest.chain(flood));
        assert_eq!(all.len(), 24);
        assert_eq!(
            all.0
                .iter()
                .filter(|one| &*one.namespace == "honest")
                .count(),
            8
        );
    }
}
