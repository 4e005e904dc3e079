//! A plain HorizontalPodAutoscaler on GPU utilization, as a baseline. Utilization is the share of time in which a kernel runs, and
//! one request in a batching engine keeps a kernel running: the counter is full long before the engine is, and nearly full at
//! night.

use super::scaler::{ObservedReplicas, Scaler, ScalingDecision};
use std::collections::VecDeque;
use stowage_scheduling::autoscaling::EngineFigures;
use stowage_scheduling::units::{Millis, Moment};

/// `--horizontal-pod-autoscaler-tolerance`, its default.
const TOLERANCE: f64 = 0.1;
/// `behavior.scaleDown.stabilizationWindowSeconds`, its default.
const STABILIZATION_WINDOW: Millis = Millis::seconds(300);
/// `behavior.scaleUp`, its default: so many pods, or twice as many as there are, in 15 seconds.
const SCALE_UP_PODS: u32 = 4;

/// An HPA (autoscaling/v2) with the default behavior and one `Pods` metric. It wakes nothing.
#[derive(Debug, Clone)]
pub(crate) struct UtilizationScaler {
    /// `averageValue`, from 0 to 1.
    target: f64,
    min: u32,
    max: u32,
    /// What was recommended within the stabilisation window.
    recommendations: VecDeque<(Moment, u32)>,
}

impl UtilizationScaler {
    pub fn new(target: f64, min: u32, max: u32) -> Self {
        Self {
            target,
            min,
            max: max.max(min),
            recommendations: VecDeque::new(),
        }
    }

    /// `ceil(current × metric / target)`, unless that is within the tolerance. A pod that is not ready counts as idle on the way
    /// up; on the way down it does not count.
    fn recommend(&self, observed: &ObservedReplicas) -> u32 {
        let serves = |figures| {
            matches!(
                figures,
                EngineFigures::Serving { .. } | EngineFigures::Silent
            )
        };
        let busy = observed
            .replicas
            .iter()
            .filter(|replica| serves(replica.figures))
            .map(|replica| replica.busy_share);
        let (ready, sum) = busy.fold((0u32, 0.0), |(ready, sum), busy| (ready + 1, sum + busy));
        let current = observed.count();
        if ready == 0 {
            return current;
        }
        let ratio_for = |pods: u32| sum / f64::from(pods) / self.target;
        let is_beyond_tolerance = |ratio: f64| (ratio - 1.0).abs() > TOLERANCE;
        let up = (sum / f64::from(ready) / self.target) > 1.0 && observed.starting > 0;
        let pods = if up { ready + observed.starting } else { ready };
        let ratio = ratio_for(pods);
        // With the pods that start it may be too little for more.
        if !is_beyond_tolerance(ratio_for(ready))
            || !is_beyond_tolerance(ratio)
            || up && ratio < 1.0
        {
            return current;
        }
        let wanted = (ratio * f64::from(pods) - 1e-9).ceil().max(0.0) as u32;
        // Pods without a metric are no reason to remove any beyond what the ready ones ask for, nor to add any.
        if ratio < 1.0 {
            wanted.min(current)
        } else {
            wanted.max(current)
        }
    }
}

impl Scaler for UtilizationScaler {
    fn decide(&mut self, observed: &ObservedReplicas, now: Moment) -> ScalingDecision {
        let current = observed.count();
        let recommended = self.recommend(observed);
        if self.recommendations.is_empty() {
            // An HPA begins with what it finds.
            self.recommendations.push_back((now, current));
        }
        while self
            .recommendations
            .front()
            .is_some_and(|(at, _)| now.since(*at) > STABILIZATION_WINDOW)
        {
            self.recommendations.pop_front();
        }
        self.recommendations.push_back((now, recommended));
        let highest = self
            .recommendations
            .iter()
            .map(|(_, replicas)| *replicas)
            .max()
            .unwrap_or(recommended);
        let stabilized = if recommended < current {
            highest.min(current)
        } else {
            recommended
        };
        let step = stabilized.min((current + SCALE_UP_PODS).max(2 * current));
        ScalingDecision {
            replicas: step.clamp(self.min, self.max),
            wake: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scaler::ObservedReplica;
    use super::*;

    fn observed(busy: &[f64], starting: u32) -> ObservedReplicas {
        let figures = EngineFigures::Serving {
            kv_cache: None,
            waiting: None,
            running: None,
        };
        let replicas = busy
            .iter()
            .map(|busy| ObservedReplica {
                figures,
                busy_share: *busy,
            })
            .collect();
        ObservedReplicas {
            replicas,
            starting,
            ready_in: Millis::seconds(60),
        }
    }

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn first(busy: &[f64], starting: u32) -> u32 {
        UtilizationScaler::new(0.8, 1, 50)
            .decide(&observed(busy, starting), at(0))
            .replicas
    }

    #[test]
    fn the_number_is_the_hpa_s() {
        assert_eq!(first(&[0.8; 4], 0), 4);
        assert_eq!(first(&[0.87; 4], 0), 4, "within the tolerance");
        assert_eq!(first(&[1.0; 4], 0), 5);
        assert_eq!(first(&[1.0; 40], 0), 50);
        assert_eq!(first(&[1.0; 80], 0), 50, "the most there may be");
        assert_eq!(
            first(&[1.0; 4], 1),
            5,
            "4 busy and 1 that starts are what is asked for"
        );
        assert_eq!(
            first(&[1.0; 4], 4),
            8,
            "those that start are no reason for more, nor for less"
        );
        assert_eq!(first(&[], 3), 3, "without a metric nothing changes");
    }

    #[test]
    fn it_falls_to_the_most_of_the_last_five_minutes() {
        let mut scaler = UtilizationScaler::new(0.8, 1, 50);
        assert_eq!(scaler.decide(&observed(&[0.8; 8], 0), at(0)).replicas, 8);
        for seconds in (15..=300).step_by(15) {
            assert_eq!(
                scaler.decide(&observed(&[0.2; 8], 0), at(seconds)).replicas,
                8,
                "{seconds}"
            );
        }
        assert_eq!(scaler.decide(&observed(&[0.2; 8], 0), at(315)).replicas, 2);
        assert_eq!(scaler.decide(&observed(&[0.0; 2], 0), at(700)).replicas, 1);
    }

    #[test]
    fn what_it_finds_at_first_holds_for_the_window() {
        let mut scaler = UtilizationScaler::new(0.8, 1, 50);
        assert_eq!(scaler.decide(&observed(&[0.0; 6], 0), at(0)).replicas, 6);
        assert_eq!(scaler.decide(&observed(&[0.0; 6], 0), at(315)).replicas, 1);
    }

    #[test]
    fn it_rises_by_four_or_to_twice_as_many() {
        let mut scaler = UtilizationScaler::new(0.1, 1, 1000);
        assert_eq!(scaler.decide(&observed(&[1.0; 1], 0), at(0)).replicas, 5);
        assert_eq!(scaler.decide(&observed(&[1.0; 10], 0), at(15)).replicas, 20);
    }
}
