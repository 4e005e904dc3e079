//! Metrics of pods that use more VRAM than they were granted. They name the pods, the worst ones only: a label for each pod of a
//! cluster whose agents err would be more series than Prometheus can take.

use crate::ids::PodKey;
use crate::units::Bytes;
use prometheus::core::Collector;
use prometheus::{IntGauge, IntGaugeVec, Opts, Registry};
use std::cmp::Reverse;

/// Pods that are named.
const NAMED: usize = 100;

pub struct OveruseMetrics {
    excess: IntGaugeVec,
    pods: IntGauge,
    unnamed: IntGauge,
}

impl OveruseMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let excess = Opts::new(
            "stowage_pod_over_grant_bytes",
            "VRAM that a pod uses beyond its grant; of at most 100 pods, those with the most.",
        );
        let excess = IntGaugeVec::new(excess, &["namespace", "pod"]).expect("the name and labels are valid");
        let gauge = |name: &str, help: &str| IntGauge::new(name, help).expect("the name is valid");
        let pods = gauge("stowage_pods_over_grant", "Pods that use more VRAM than they were granted.");
        let unnamed = gauge(
            "stowage_pods_over_grant_unnamed",
            "Pods over their grant that stowage_pod_over_grant_bytes does not name.",
        );
        keep(Box::new(excess.clone()));
        keep(Box::new(pods.clone()));
        keep(Box::new(unnamed.clone()));
        Self { excess, pods, unnamed }
    }

    /// Sets the gauges to these pods, each with what it uses beyond its grant.
    pub fn set<'a>(&self, over: impl Iterator<Item = (&'a PodKey, Bytes)>) {
        let mut over: Vec<(&PodKey, Bytes)> = over.collect();
        over.sort_unstable_by_key(|(key, excess)| (Reverse(*excess), *key));
        self.excess.reset();
        for (key, excess) in over.iter().take(NAMED) {
            let gauge = self.excess.with_label_values(&[&*key.namespace, &*key.name]);
            gauge.set(i64::try_from(excess.0).unwrap_or(i64::MAX));
        }
        self.pods.set(over.len() as i64);
        self.unnamed.set(over.len().saturating_sub(NAMED) as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::{Encoder, TextEncoder};

    fn rendered(registry: &Registry) -> String {
        let mut text = Vec::new();
        TextEncoder::new().encode(&registry.gather(), &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn the_worst_hundred_pods_are_named_and_the_others_counted() {
        let registry = Registry::new();
        let metrics = OveruseMetrics::new(&registry);
        let keys: Vec<PodKey> = (0..103).map(|n| PodKey::parse("team", &format!("p{n}")).unwrap()).collect();
        metrics.set(keys.iter().zip(1..).map(|(key, gib)| (key, Bytes::gib(gib))));
        let text = rendered(&registry);
        assert_eq!(text.matches("stowage_pod_over_grant_bytes{").count(), 100);
        assert!(!text.contains("pod=\"p2\"") && text.contains("pod=\"p3\""), "{text}");
        assert!(
            text.contains("stowage_pods_over_grant 103\n")
                && text.contains("stowage_pods_over_grant_unnamed 3\n")
        );
        metrics.set(std::iter::empty());
        let text = rendered(&registry);
        assert!(
            !text.contains("stowage_pod_over_grant_bytes{") && text.contains("stowage_pods_over_grant 0\n")
        );
    }
}
