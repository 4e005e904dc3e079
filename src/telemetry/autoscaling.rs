//! Metrics of how many replicas each model needs, for autoscalers. Of the models with the most replicas: a label for each of
//! thousands would be more series than an autoscaler reads.

use super::family::{Families, open};
use prometheus::core::Collector;
use prometheus::{IntGauge, IntGaugeVec};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use stowage_scheduling::autoscaling::DesiredReplicas;
use stowage_scheduling::ids::ModelId;

/// Models that are named.
pub const MAX_NAMED_MODELS: usize = 500;

pub struct AutoscalingMetrics {
    desired: IntGaugeVec,
    unnamed: IntGauge,
}

impl AutoscalingMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            desired: families.gauges(
                "stowage_model_desired_replicas",
                "Replicas that a model needs, those that sleep included.",
                [open("model", "the 500 models with the most replicas")],
            ),
            unnamed: families.gauge(
                "stowage_models_without_desired_replicas",
                "Models that stowage_model_desired_replicas does not name.",
            ),
        }
    }

    /// Sets the gauges to these models and no others. A model that stays is never missing from a scrape meanwhile.
    pub fn set(&self, desired: &BTreeMap<ModelId, DesiredReplicas>) {
        let mut named: Vec<_> = desired.iter().collect();
        named.sort_by_key(|(model, desired)| {
            (Reverse(desired.replicas.max(desired.current())), *model)
        });
        named.truncate(MAX_NAMED_MODELS);
        let named: BTreeMap<&str, u32> = named
            .into_iter()
            .map(|(model, desired)| (model.as_str(), desired.replicas))
            .collect();
        for family in self.desired.collect() {
            for metric in family.get_metric() {
                let model = metric
                    .get_label()
                    .first()
                    .map(|label| label.value().to_owned());
                if let Some(model) = model.filter(|model| !named.contains_key(model.as_str())) {
                    // Another evaluation may have removed it.
                    let _ = self.desired.remove_label_values(&[model.as_str()]);
                }
            }
        }
        for (model, replicas) in &named {
            self.desired
                .with_label_values(&[*model])
                .set(i64::from(*replicas));
        }
        self.unnamed
            .set(desired.len().saturating_sub(MAX_NAMED_MODELS) as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use stowage_scheduling::autoscaling::{EngineFigures, ModelLoad, ModelScaling};
    use stowage_scheduling::policy::AutoscalingRules;
    use stowage_scheduling::units::Moment;

    fn desired(replicas: u32) -> DesiredReplicas {
        let mut load = ModelLoad::default();
        (0..replicas).for_each(|_| load.add(EngineFigures::Silent));
        ModelScaling::default().decide(&AutoscalingRules::default(), &load, Moment(0))
    }

    #[test]
    fn the_models_with_the_most_replicas_are_named_and_those_that_are_gone_are_not() {
        let metrics = Metrics::new();
        let model = |n: u32| ModelId::parse(&format!("org/model-\"{n}")).unwrap();
        let all = (0..MAX_NAMED_MODELS as u32 + 50)
            .map(|n| (model(n), desired(if n < 50 { 1 } else { 2 })))
            .collect();
        metrics.autoscaling.set(&all);
        let text = metrics.render();
        assert_eq!(
            text.matches("\nstowage_model_desired_replicas{").count(),
            MAX_NAMED_MODELS
        );
        assert!(text.contains("\nstowage_models_without_desired_replicas 50\n"));
        assert!(!text.contains("model-\\\"49\""), "it has one replica only");
        metrics.autoscaling.set(&[(model(7), desired(3))].into());
        let text = metrics.render();
        assert_eq!(text.matches("\nstowage_model_desired_replicas{").count(), 1);
        assert!(
            text.contains("\nstowage_model_desired_replicas{model=\"org/model-\\\"7\"} 3\n"),
            "{text}"
        );
    }
}
