//! The part of an engine's report that is read again and again: by every scrape, and whenever replicas are counted.

use super::{EngineReport, EngineState};
use stowage_scheduling::autoscaling::{EngineFigures, EngineSample, Permille};
use stowage_scheduling::ids::{ModelId, NodeName, PodUid};
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::latency::Latency;

/// An engine whose model is known, as its agent last reported it.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineSummary {
    pub pod: PodUid,
    pub model: ModelId,
    pub state: EngineState,
    /// 0 to 1.
    pub kv_cache_usage: Option<f64>,
    /// It interrupted requests of its own for lack of KV cache: it is full, whatever `kv_cache_usage` says.
    pub preempting: bool,
    pub waiting: Option<u64>,
    pub running: Option<u64>,
    pub tokens_per_second: Option<f64>,
    pub prompt_tokens_per_second: Option<f64>,
    pub time_per_token: Option<Latency>,
    pub time_to_first_token: Option<Latency>,
    /// Age of these figures when the report was sent.
    pub age_millis: Millis,
}

impl EngineSummary {
    /// The summary of an engine; `None` if its model is not known.
    pub fn from_report(engine: &EngineReport) -> Option<Self> {
        Some(Self {
            pod: engine.pod.clone(),
            model: engine.model.clone()?,
            state: engine.state,
            kv_cache_usage: engine.kv_cache_usage,
            preempting: engine.preempting,
            waiting: engine.waiting,
            running: engine.running,
            tokens_per_second: engine.tokens_per_second,
            prompt_tokens_per_second: engine.prompt_tokens_per_second,
            time_per_token: engine.time_per_token,
            time_to_first_token: engine.time_to_first_token,
            age_millis: engine.age_millis,
        })
    }

    /// The summary with the names of an earlier one where they are equal, so that equal names share their memory from report to
    /// report.
    pub fn sharing_names_with(self, earlier: Option<&Self>) -> Self {
        let Some(earlier) = earlier else { return self };
        Self {
            pod: shared_or_new(self.pod, &earlier.pod),
            model: shared_or_new(self.model, &earlier.model),
            ..self
        }
    }

    /// As the autoscaler counts it, in a report of `node` that is `age` old. Figures that are older than `stale` count as none.
    pub fn sample(&self, node: &NodeName, age: Millis, stale: Millis) -> EngineSample {
        let is_old = age + self.age_millis >= stale;
        let kv_cache = match self.preempting {
            true => Some(Permille::FULL),
            false => self.kv_cache_usage.and_then(Permille::from_share),
        };
        let figures = match self.state {
            EngineState::Draining => EngineFigures::Draining,
            EngineState::Serving if !is_old => EngineFigures::Serving {
                kv_cache,
                waiting: self.waiting,
                running: self.running,
            },
            EngineState::Starting | EngineState::Loading if !is_old => EngineFigures::Starting,
            EngineState::Sleeping if !is_old => EngineFigures::Asleep,
            _ => EngineFigures::Silent,
        };
        let (node, is_heard) = (node.clone(), age < stale);
        EngineSample {
            node,
            is_report_fresh: is_heard,
            pod: self.pod.clone(),
            model: self.model.clone(),
            figures,
        }
    }
}

fn shared_or_new<N: PartialEq + Clone>(name: N, earlier: &N) -> N {
    if name == *earlier {
        earlier.clone()
    } else {
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figures(engine: serde_json::Value, age: u64) -> Option<EngineFigures> {
        let mut report = json!({ "pod": "p", "engine": "vllm", "gpus": [], "model": "m" });
        report
            .as_object_mut()
            .unwrap()
            .extend(engine.as_object().unwrap().clone());
        let report: EngineReport = serde_json::from_value(report).unwrap();
        let node = NodeName::parse("a").unwrap();
        EngineSummary::from_report(&report).map(|engine| {
            engine
                .sample(&node, Millis(age), Millis::seconds(30))
                .figures
        })
    }

    #[test]
    fn old_figures_and_engines_that_do_not_answer_are_unknown_and_not_idle() {
        let serving =
            json!({ "state": "serving", "kvCacheUsage": 0.5, "waiting": 2, "ageMillis": 5000 });
        let serving_figures = EngineFigures::Serving {
            kv_cache: Permille::from_share(0.5),
            waiting: Some(2),
            running: None,
        };
        assert_eq!(figures(serving.clone(), 20_000), Some(serving_figures));
        assert_eq!(figures(serving, 25_000), Some(EngineFigures::Silent));
        assert_eq!(
            figures(json!({ "state": "unreachable" }), 0),
            Some(EngineFigures::Silent)
        );
        assert_eq!(
            figures(json!({ "state": "of a later version" }), 0),
            Some(EngineFigures::Silent)
        );
        assert_eq!(
            figures(json!({ "state": "sleeping" }), 0),
            Some(EngineFigures::Asleep)
        );
        assert_eq!(
            figures(json!({ "state": "serving", "model": null }), 0),
            None
        );
    }

    #[test]
    fn an_engine_that_interrupts_its_own_requests_is_full() {
        let preempting = json!({ "state": "serving", "kvCacheUsage": 0.5, "preempting": true });
        let Some(EngineFigures::Serving { kv_cache, .. }) = figures(preempting, 0) else {
            panic!()
        };
        assert_eq!(kv_cache, Some(Permille::FULL));
    }
}
