//! A report's engines alone, as the autoscaler counts them.

use super::{EngineReport, EngineState};
use crate::ids::NodeName;
use crate::scheduling::autoscaling::{EngineFigures, EngineSample, Permille};
use crate::units::Millis;
use serde::Deserialize;

/// What of a report is read for them: parsing the rest of thousands of reports would cost more than all else.
#[derive(Debug, Deserialize)]
pub struct ReportedEngines {
    #[serde(default)]
    pub engines: Vec<EngineReport>,
}

impl EngineReport {
    /// This engine, if its model is known, in a report of `node` that is `age` old. Figures that are older than `stale` count as
    /// none.
    pub fn sample(self, node: &NodeName, age: Millis, stale: Millis) -> Option<EngineSample> {
        let is_old = age + self.age_millis >= stale;
        let kv_cache = match self.preempting {
            true => Some(Permille::FULL),
            false => self.kv_cache_usage.and_then(Permille::from_share),
        };
        let figures = match self.state {
            EngineState::Draining => EngineFigures::Draining,
            EngineState::Serving if !is_old => {
                EngineFigures::Serving { kv_cache, waiting: self.waiting, running: self.running }
            }
            EngineState::Starting | EngineState::Loading if !is_old => EngineFigures::Starting,
            EngineState::Sleeping if !is_old => EngineFigures::Asleep,
            _ => EngineFigures::Silent,
        };
        let (node, is_heard) = (node.clone(), age < stale);
        Some(EngineSample { node, is_heard, pod: self.pod, model: self.model?, figures })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figures(engine: serde_json::Value, age: u64) -> Option<EngineFigures> {
        let mut report = json!({ "pod": "p", "engine": "vllm", "gpus": [], "model": "m" });
        report.as_object_mut().unwrap().extend(engine.as_object().unwrap().clone());
        let report: ReportedEngines = serde_json::from_value(json!({ "engines": [report] })).unwrap();
        let node = NodeName::parse("a").unwrap();
        let sample = |one: EngineReport| one.sample(&node, Millis(age), Millis::seconds(30));
        let sample = report.engines.into_iter().find_map(sample);
        sample.map(|sample| sample.figures)
    }

    #[test]
    fn old_figures_and_engines_that_do_not_answer_are_unknown_and_not_idle() {
        let serving = json!({ "state": "serving", "kvCacheUsage": 0.5, "waiting": 2, "ageMillis": 5000 });
        let known =
            EngineFigures::Serving { kv_cache: Permille::from_share(0.5), waiting: Some(2), running: None };
        assert_eq!(figures(serving.clone(), 20_000), Some(known));
        assert_eq!(figures(serving, 25_000), Some(EngineFigures::Silent));
        assert_eq!(figures(json!({ "state": "unreachable" }), 0), Some(EngineFigures::Silent));
        assert_eq!(figures(json!({ "state": "of a later version" }), 0), Some(EngineFigures::Silent));
        assert_eq!(figures(json!({ "state": "sleeping" }), 0), Some(EngineFigures::Asleep));
        assert_eq!(figures(json!({ "state": "serving", "model": null }), 0), None);
    }

    #[test]
    fn an_engine_that_interrupts_its_own_requests_is_full() {
        let preempting = json!({ "state": "serving", "kvCacheUsage": 0.5, "preempting": true });
        let Some(EngineFigures::Serving { kv_cache, .. }) = figures(preempting, 0) else { panic!() };
        assert_eq!(kv_cache, Some(Permille::FULL));
    }
}
