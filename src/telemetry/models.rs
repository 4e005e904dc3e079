//! Families about each model: its engines by state, and how busy they are, from the agents' latest reports.
//!
//! Which models there are, pods say; so a pod's author could make as many series as pods. The [`MAX_MODELS`] models with the most
//! engines have series, and the others are counted.

use super::family::{Families, Sampled, known, open};
use super::scrape::Scrape;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use stowage_report::{EngineState, EngineSummary};
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::units::Micros;
use stowage_scheduling::vocabulary::latency::Latency;

/// Many times the models that a cluster serves; ten series each are few enough for Prometheus.
pub const MAX_MODELS: usize = 500;

const STATES: [&str; 5] = ["resident", "asleep", "loading", "draining", "unreachable"];

#[derive(Debug, Clone, Default, PartialEq)]
struct ModelFigures {
    engines: u64,
    /// By [`STATES`].
    replicas: [u64; STATES.len()],
    /// How many serving engines say it, their sum and their maximum.
    kv_cache: (u64, f64, f64),
    waiting: Option<u64>,
    running: Option<u64>,
    tokens_per_second: Option<f64>,
    prompt_tokens_per_second: Option<f64>,
    /// Of the slowest serving engine.
    time_per_token: Option<Micros>,
    time_to_first_token: Option<Micros>,
}

type Figure = fn(&ModelFigures) -> Option<f64>;

pub struct ModelMetrics {
    replicas: Sampled,
    kv_cache: Sampled,
    kv_cache_max: Sampled,
    waiting: Sampled,
    running: Sampled,
    tokens: Sampled,
    prompt_tokens: Sampled,
    time_per_token: Sampled,
    time_to_first_token: Sampled,
    not_exported: Sampled,
}

impl ModelMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let model = || open("model", "the 500 models with the most engines");
        Self {
            replicas: families.sampled(
                "stowage_model_replicas",
                "Engines of a model, by state.",
                [model(), known("state", STATES)],
            ),
            kv_cache: families.sampled(
                "stowage_model_kv_cache_usage_ratio",
                "Share of the KV cache in use, the mean over a model's serving engines that report it.",
                [model()],
            ),
            kv_cache_max: families.sampled(
                "stowage_model_kv_cache_usage_max_ratio",
                "Share of the KV cache in use on the fullest of a model's serving engines.",
                [model()],
            ),
            waiting: families.sampled(
                "stowage_model_waiting_requests",
                "Requests that wait in the queues of a model's serving engines.",
                [model()],
            ),
            running: families.sampled(
                "stowage_model_running_requests",
                "Requests that a model's serving engines process.",
                [model()],
            ),
            tokens: families.sampled(
                "stowage_model_tokens_per_second",
                "Tokens that a model's serving engines generate per second, of those that report it.",
                [model()],
            ),
            prompt_tokens: families.sampled(
                "stowage_model_prompt_tokens_per_second",
                "Tokens of prompts that a model's serving engines process per second, of those that report it.",
                [model()],
            ),
            time_per_token: families.sampled(
                "stowage_model_time_per_token_seconds",
                "From one output token of a request to the next, over half a minute: the slowest of a model's serving engines.",
                [model()],
            ),
            time_to_first_token: families.sampled(
                "stowage_model_time_to_first_token_seconds",
                "From a request's arrival to its first token, over half a minute: the slowest of a model's serving engines.",
                [model()],
            ),
            not_exported: families.sampled(
                "stowage_models_not_exported",
                "Models with engines that have no series of their own, because 500 others have more engines.",
                [],
            ),
        }
    }

    pub fn write<'e>(
        &self,
        scrape: &mut Scrape<'_>,
        engines: impl IntoIterator<Item = &'e EngineSummary>,
    ) -> io::Result<()> {
        let (models, not_exported) = most_used(by_model(engines));
        let replicas = models.iter().flat_map(|(model, figures)| {
            let states = STATES.iter().zip(figures.replicas);
            states.map(move |(state, count)| ([model.as_str(), *state], count as f64))
        });
        scrape.write_samples(&self.replicas, replicas)?;
        let figures: [(&Sampled, Figure); 8] = [
            (&self.kv_cache, |one| {
                (one.kv_cache.0 > 0).then(|| one.kv_cache.1 / one.kv_cache.0 as f64)
            }),
            (&self.kv_cache_max, |one| {
                (one.kv_cache.0 > 0).then_some(one.kv_cache.2)
            }),
            (&self.waiting, |one| one.waiting.map(|count| count as f64)),
            (&self.running, |one| one.running.map(|count| count as f64)),
            (&self.tokens, |one| one.tokens_per_second),
            (&self.prompt_tokens, |one| one.prompt_tokens_per_second),
            (&self.time_per_token, |one| {
                one.time_per_token.map(Micros::as_seconds)
            }),
            (&self.time_to_first_token, |one| {
                one.time_to_first_token.map(Micros::as_seconds)
            }),
        ];
        for (family, figure) in figures {
            let samples = models
                .iter()
                .filter_map(|(model, one)| Some(([model.as_str()], figure(one)?)));
            scrape.write_samples(family, samples)?;
        }
        scrape.write_value(&self.not_exported, not_exported as f64)
    }
}

fn by_model<'e>(
    engines: impl IntoIterator<Item = &'e EngineSummary>,
) -> BTreeMap<&'e ModelId, ModelFigures> {
    let mut models: BTreeMap<&ModelId, ModelFigures> = BTreeMap::new();
    for engine in engines {
        models.entry(&engine.model).or_default().add_engine(engine);
    }
    models
}

/// The models with the most engines, in order of name, and how many are left out.
fn most_used(models: BTreeMap<&ModelId, ModelFigures>) -> (Vec<(&ModelId, ModelFigures)>, usize) {
    let mut models: Vec<_> = models.into_iter().collect();
    let left_out = models.len().saturating_sub(MAX_MODELS);
    if left_out > 0 {
        models.sort_by_key(|(model, figures)| (Reverse(figures.engines), *model));
        models.truncate(MAX_MODELS);
        models.sort_by_key(|(model, _)| *model);
    }
    (models, left_out)
}

impl ModelFigures {
    fn add_engine(&mut self, engine: &EngineSummary) {
        self.engines += 1;
        if let Some(index) = state_index(engine.state) {
            self.replicas[index] += 1;
        }
        // What sleeps, loads or drains takes no requests.
        if engine.state != EngineState::Serving {
            return;
        }
        if let Some(usage) = engine.kv_cache_usage {
            let (count, sum, most) = self.kv_cache;
            self.kv_cache = (count + 1, sum + usage, most.max(usage));
        }
        add_to(&mut self.waiting, engine.waiting);
        add_to(&mut self.running, engine.running);
        add_rate(&mut self.tokens_per_second, engine.tokens_per_second);
        add_rate(
            &mut self.prompt_tokens_per_second,
            engine.prompt_tokens_per_second,
        );
        let mean = |latency: Option<Latency>| latency.map(|latency| latency.mean);
        self.time_per_token = self.time_per_token.max(mean(engine.time_per_token));
        self.time_to_first_token = self
            .time_to_first_token
            .max(mean(engine.time_to_first_token));
    }
}

fn add_rate(sum: &mut Option<f64>, more: Option<f64>) {
    if let Some(more) = more {
        *sum = Some(sum.unwrap_or(0.0) + more);
    }
}

fn add_to(sum: &mut Option<u64>, more: Option<u64>) {
    if let Some(more) = more {
        *sum = Some(sum.unwrap_or(0).saturating_add(more));
    }
}

/// The index of a state in [`STATES`]; `None` for a state that a later version's agent reports.
fn state_index(state: EngineState) -> Option<usize> {
    Some(match state {
        EngineState::Serving => 0,
        EngineState::Sleeping => 1,
        EngineState::Starting | EngineState::Loading => 2,
        EngineState::Draining => 3,
        EngineState::Unreachable => 4,
        EngineState::Other => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::PodUid;
    use stowage_scheduling::units::Millis;

    fn engine(model: &str, state: EngineState, usage: Option<f64>) -> EngineSummary {
        EngineSummary {
            pod: PodUid::parse("p").unwrap(),
            model: ModelId::parse(model).unwrap(),
            state,
            kv_cache_usage: usage,
            preempting: false,
            waiting: Some(2),
            running: None,
            tokens_per_second: usage.map(|usage| usage * 100.0),
            prompt_tokens_per_second: usage.map(|usage| usage * 1000.0),
            time_per_token: usage.map(|usage| Latency {
                mean: Micros((usage * 20_000.0) as u64),
                p99: None,
            }),
            time_to_first_token: None,
            age_millis: Millis(0),
        }
    }

    fn metrics_text(engines: &[EngineSummary]) -> String {
        let mut families = Families::new();
        let metrics = ModelMetrics::new(&mut families);
        let mut text = Vec::new();
        metrics.write(&mut Scrape::new(&mut text), engines).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_models_figures_are_those_of_its_serving_engines() {
        let text = metrics_text(&[
            engine("m", EngineState::Serving, Some(0.25)),
            engine("m", EngineState::Serving, Some(0.75)),
            engine("m", EngineState::Serving, None),
            engine("m", EngineState::Sleeping, Some(0.0)),
            engine("m", EngineState::Other, Some(1.0)),
        ]);
        for line in [
            "stowage_model_replicas{model=\"m\",state=\"resident\"} 3\n",
            "stowage_model_replicas{model=\"m\",state=\"asleep\"} 1\n",
            "stowage_model_replicas{model=\"m\",state=\"loading\"} 0\n",
            "stowage_model_kv_cache_usage_ratio{model=\"m\"} 0.5\n",
            "stowage_model_kv_cache_usage_max_ratio{model=\"m\"} 0.75\n",
            "stowage_model_waiting_requests{model=\"m\"} 6\n",
            "stowage_model_tokens_per_second{model=\"m\"} 100\n",
            "stowage_model_prompt_tokens_per_second{model=\"m\"} 1000\n",
            "stowage_model_time_per_token_seconds{model=\"m\"} 0.015\n",
            "stowage_models_not_exported 0\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        assert!(
            !text.contains("stowage_model_running_requests{"),
            "none says it: unknown is not zero"
        );
    }

    #[test]
    fn pods_that_name_very_many_models_make_no_more_series() {
        let hostile =
            (0..3000).map(|n| engine(&format!("made-up-{n:04}"), EngineState::Serving, Some(0.5)));
        let served = (0..2).map(|_| engine("served", EngineState::Serving, Some(0.5)));
        let text = metrics_text(&hostile.chain(served).collect::<Vec<_>>());
        assert_eq!(
            text.matches("stowage_model_kv_cache_usage_ratio{").count(),
            MAX_MODELS
        );
        assert!(
            text.contains("{model=\"served\"}"),
            "it has the most engines"
        );
        assert!(
            text.contains("stowage_models_not_exported 2501\n"),
            "{text}"
        );
    }
}
