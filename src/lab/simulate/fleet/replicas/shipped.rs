//! The autoscaler that ships, on the figures of modeled engines.

use super::scaler::{ObservedReplicas, Scaler, ScalingDecision};
use stowage_scheduling::autoscaling::{DesiredReplicas, ModelScaling};
use stowage_scheduling::policy::AutoscalingRules;
use stowage_scheduling::units::Moment;

/// [`ModelScaling`] with a policy's rules of one model.
#[derive(Debug, Clone)]
pub(crate) struct ShippedScaler {
    rules: AutoscalingRules,
    scaling: ModelScaling,
    /// The latest answer, with its reasons.
    pub latest: Option<DesiredReplicas>,
}

impl ShippedScaler {
    /// `rules` are those of the model: `policy.autoscaling.of(model)`.
    pub fn new(rules: AutoscalingRules) -> Self {
        Self {
            rules,
            scaling: ModelScaling::default(),
            latest: None,
        }
    }
}

impl Scaler for ShippedScaler {
    fn decide(&mut self, observed: &ObservedReplicas, now: Moment) -> ScalingDecision {
        let desired = self.scaling.decide(&self.rules, &observed.load(), now);
        let wanted = ScalingDecision {
            replicas: desired.replicas,
            wake: desired.wake,
        };
        self.latest = Some(desired);
        wanted
    }
}
