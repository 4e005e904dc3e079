//! What is expected of a new engine by others of its model: how much of the time it will have requests, and how long its steps will
//! take. One whose model is new to its namespace is expected to have requests as the models there have on average, and steps as long as
//! its weights take to read. Where nothing is known, nothing better is expected than work all the time.

use super::Ledger;
use super::node_state::NodeState;
use crate::ids::{ModelId, NodeName, PodUid};
use crate::units::{Micros, Millis, Moment, Percent};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::latency::ExpectedWork;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// After that time nothing is left of what an engine had.
const WORK_MEMORY: Millis = Millis::seconds(3600);
/// Models of which it is known at most.
const MAX_MODELS: usize = 10_000;
/// What is expected goes in such steps of per cent, so that it changes seldom.
const STEP: u16 = 10;
/// A reading moves what is known of a model's steps by this part of the difference, and at most by this part of itself.
const READING_SHARE: i64 = 8;
/// A quarter, and four times, of what the weights take to read: further off is the size of the weights, not the engine.
const SLOWNESS: std::ops::RangeInclusive<i64> = 25_000..=400_000;

/// What engines showed lately, by namespace and model: what a tenant's engines say counts for its own pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ModelWork {
    models: Arc<BTreeMap<Arc<str>, BTreeMap<ModelId, Work>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Work {
    /// The most of the time that one had requests, in thousandths of a per cent, and when that was.
    busy: u32,
    at: Moment,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slowness: Option<Slowness>,
}

/// How long steps take beside what the weights take to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Slowness {
    /// In thousandths of a per cent.
    average: i64,
    /// What decisions count of it, in per cent.
    counted: u16,
}

impl Slowness {
    fn new(average: i64) -> Self {
        let average = average.clamp(*SLOWNESS.start(), *SLOWNESS.end());
        Self {
            average,
            counted: (average / 1000) as u16,
        }
    }

    fn updated(self, found: i64) -> Self {
        let most = self.average / READING_SHARE;
        let change = ((found - self.average) / READING_SHARE).clamp(-most, most);
        let next = Self::new(self.average + change);
        match next.counted.abs_diff(self.counted) < STEP {
            true => Self {
                counted: self.counted,
                ..next
            },
            false => next,
        }
    }
}

impl Work {
    /// What is left of the most, in thousandths of a per cent.
    fn busy_at(self, now: Moment) -> u32 {
        let age = now.since(self.at).0.min(WORK_MEMORY.0);
        (u64::from(self.busy) * (WORK_MEMORY.0 - age) / WORK_MEMORY.0) as u32
    }
}

impl ModelWork {
    fn record(
        &mut self,
        (namespace, model): (&Arc<str>, &ModelId),
        busy: Percent,
        slowness: Option<u16>,
        now: Moment,
    ) {
        let found = u32::from(busy.get()) * 1000;
        let known = self.get(namespace, model);
        if known.is_none() && !self.makes_place(now) {
            return;
        }
        let mut work = known.unwrap_or(Work {
            busy: found,
            at: now,
            slowness: None,
        });
        if found >= work.busy_at(now) {
            (work.busy, work.at) = (found, now);
        }
        let slowness = slowness.map(|percent| i64::from(percent) * 1000);
        work.slowness = match (work.slowness, slowness) {
            (Some(known), Some(found)) => Some(known.updated(found)),
            (known, found) => known.or(found.map(Slowness::new)),
        };
        if known != Some(work) {
            let models = Arc::make_mut(&mut self.models);
            let models = models.entry(namespace.clone()).or_default();
            models.insert(model.clone(), work);
        }
    }

    fn get(&self, namespace: &str, model: &ModelId) -> Option<Work> {
        self.models.get(namespace)?.get(model).copied()
    }

    /// Whether there is place for one more model, once those are forgotten of which nothing is left.
    fn makes_place(&mut self, now: Moment) -> bool {
        let count = |models: &BTreeMap<_, BTreeMap<_, _>>| {
            models.values().map(BTreeMap::len).sum::<usize>()
        };
        if count(&self.models) >= MAX_MODELS {
            let models = Arc::make_mut(&mut self.models);
            for models in models.values_mut() {
                models.retain(|_, work| now.since(work.at) < WORK_MEMORY);
            }
            models.retain(|_, models| !models.is_empty());
        }
        count(&self.models) < MAX_MODELS
    }

    fn expected(&self, namespace: &str, model: &ModelId, now: Moment) -> ExpectedWork {
        // What was an hour ago says nothing of now.
        let is_known = |work: &Work| now.since(work.at) < WORK_MEMORY;
        let known = self.get(namespace, model).filter(is_known);
        let others = self.models.get(namespace).into_iter().flatten();
        let others = others.map(|(_, work)| *work).filter(is_known);
        let most = match known {
            Some(work) => Some(work.busy_at(now)),
            None => mean(others.map(|work| work.busy_at(now))),
        };
        let busy = most.map(|most| most.div_ceil(1000).next_multiple_of(STEP.into()) as u8);
        ExpectedWork {
            busy: busy.and_then(Percent::new).unwrap_or(Percent::FULL),
            slowness: known
                .and_then(|work| work.slowness)
                .map_or(ExpectedWork::UNKNOWN.slowness, |slowness| slowness.counted),
        }
    }
}

fn mean(all: impl Iterator<Item = u32> + Clone) -> Option<u32> {
    let count = all.clone().count() as u64;
    let sum: u64 = all.map(u64::from).sum();
    sum.checked_div(count).map(|mean| mean as u32)
}

impl Ledger {
    /// Takes in what a node's latest reading says of the work of engines.
    pub(super) fn record_work(&mut self, node: &NodeName) {
        let node_state = self.node_states.get(node);
        let Some(node_state) = node_state.filter(|_| self.policy.has_latency_limits()) else {
            return;
        };
        let reading = node_state.believed_reading();
        for latency in reading.into_iter().flat_map(|reading| &reading.latencies) {
            let pod_state = self.pod_states.get(&latency.pod);
            let here = pod_state.filter(|pod_state| pod_state.node() == Some(node));
            let model = here.and_then(|here| here.demand.model.as_ref());
            if let Some(((here, model), busy)) = here.zip(model).zip(latency.busy) {
                let name = (&here.key.namespace, model);
                let slowness = node_state.slowness_of(latency);
                self.model_work.record(name, busy, slowness, self.now);
            }
        }
    }

    /// What is expected of a pod by others of its model.
    fn expected_work(&self, demand: &Demand) -> ExpectedWork {
        let model = demand.model.as_ref().filter(|_| demand.terms.engine);
        let model = model.filter(|_| self.policy.has_latency_limits());
        let namespace = &demand.traits.namespace;
        let expected = model.map(|model| self.model_work.expected(namespace, model, self.now));
        expected.unwrap_or_default()
    }

    /// What an engine is expected to take for a token beside those that have work now; `None` if that is unknown, or no class has limits.
    pub(super) fn expected_time_per_token(
        &self,
        node_state: &NodeState,
        uid: &PodUid,
        demand: &Demand,
    ) -> Option<Micros> {
        let has_limits = self.policy.has_latency_limits() && demand.terms.engine;
        let node_state = has_limits.then_some(node_state)?;
        node_state.expected_time_per_token(uid, self.expected_work(demand))
    }

    /// Engines of a node that beside nobody take longer for a token than their class allows, by more than a tenth: what they take, and
    /// the limit.
    pub fn engines_beyond_limits_alone(
        &self,
        node: &NodeName,
    ) -> impl Iterator<Item = (PodUid, Micros, Micros)> {
        let has_limits = self.policy.has_latency_limits();
        let node_state = self.node_states.get(node).filter(|_| has_limits);
        node_state.into_iter().flat_map(|node_state| {
            let reading = node_state.believed_reading();
            let latencies = reading.into_iter().flat_map(|reading| &reading.latencies);
            latencies.filter_map(|latency| {
                let class = self.pod_states.get(&latency.pod)?.demand.class;
                let limit = self.policy.class(class).latency_limits().time_per_token?;
                let is_beyond = |takes: Micros| takes.0 / 11 > limit.0 / 10;
                // Alone it takes no longer than it does.
                latency.time_per_token.filter(|takes| is_beyond(*takes))?;
                let alone = node_state.time_per_token_alone(latency)?;
                is_beyond(alone).then(|| (latency.pod.clone(), alone, limit))
            })
        })
    }

    /// The demand by which the pod is placed: whether it may borrow, and what is expected of it.
    pub(crate) fn for_placing(&self, uid: &PodUid, demand: Demand) -> Demand {
        Demand {
            expected: self.expected_work(&demand),
            ..self.as_borrower(uid, demand)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percent(n: u8) -> Percent {
        Percent::new(n).unwrap()
    }

    #[test]
    fn the_most_of_the_last_hour_counts_and_fades() {
        let model = ModelId::parse("org/m").unwrap();
        let mut work = ModelWork::default();
        let at = |minutes: u64| Moment(minutes * 60_000);
        let busy = |work: &ModelWork, minutes| work.expected("team", &model, at(minutes)).busy;
        assert_eq!(busy(&work, 0), Percent::FULL, "nothing is known");
        work.record((&"team".into(), &model), percent(63), None, at(0));
        assert_eq!(busy(&work, 0), percent(70));
        work.record((&"team".into(), &model), percent(5), None, at(30));
        assert_eq!(busy(&work, 30), percent(40), "half of it is left");
        work.record((&"team".into(), &model), percent(5), None, at(57));
        assert_eq!(busy(&work, 58), percent(10));
        assert_eq!(busy(&work, 57 + 60), Percent::FULL, "nobody says anything");
    }

    #[test]
    fn a_model_that_is_new_to_its_namespace_has_work_as_the_others_there_on_average() {
        let [one, two, new] = ["org/1", "org/2", "org/3"].map(|name| ModelId::parse(name).unwrap());
        let mut work = ModelWork::default();
        work.record((&"team".into(), &one), percent(90), Some(300), Moment(0));
        work.record((&"team".into(), &two), percent(0), None, Moment(0));
        let expected = ExpectedWork {
            busy: percent(50),
            slowness: 100,
        };
        assert_eq!(work.expected("team", &new, Moment(0)), expected);
        assert_eq!(
            work.expected("other", &new, Moment(0)),
            ExpectedWork::UNKNOWN
        );
    }

    #[test]
    fn steps_are_learned_soon_and_one_reading_far_off_hardly_counts() {
        let model = ModelId::parse("org/m").unwrap();
        let mut work = ModelWork::default();
        let slowness = |work: &ModelWork| work.expected("team", &model, Moment(0)).slowness;
        assert_eq!(slowness(&work), 100);
        work.record((&"team".into(), &model), percent(50), Some(300), Moment(0));
        assert_eq!(slowness(&work), 300);
        work.record((&"team".into(), &model), percent(50), Some(9000), Moment(0));
        assert_eq!(slowness(&work), 337);
        for _ in 0..30 {
            work.record((&"team".into(), &model), percent(50), Some(300), Moment(0));
        }
        let counted = slowness(&work);
        assert!((300..310).contains(&counted), "{counted}");
        for reading in 0..100 {
            let jitter = Some(295 + reading % 11);
            work.record((&"team".into(), &model), percent(50), jitter, Moment(0));
            assert_eq!(slowness(&work), counted, "no decision is made again");
        }
        work.record((&"team".into(), &model), percent(50), Some(0), Moment(0));
        assert!(slowness(&work) >= 260);
    }
}
