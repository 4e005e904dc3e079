//! Families about pods that use more VRAM than they were granted. They name the pods, the worst ones only: a label for each pod of
//! a cluster whose agents err would be more series than Prometheus can take.

use super::family::{Families, Sampled, open};
use super::scrape::Scrape;
use super::usage::bytes;
use std::cmp::Reverse;
use std::io;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::units::Bytes;

/// Pods that are named.
const MAX_NAMED_PODS: usize = 100;

pub struct OveruseMetrics {
    excess: Sampled,
    pods: Sampled,
    unnamed: Sampled,
}

impl OveruseMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let bound = "the 100 pods with the most";
        Self {
            excess: families.sampled(
                "stowage_pod_over_grant_bytes",
                "VRAM that a pod uses beyond its grant; of at most 100 pods, those with the most.",
                [open("namespace", bound), open("pod", bound)],
            ),
            pods: families.sampled(
                "stowage_pods_over_grant",
                "Pods that use more VRAM than they were granted.",
                [],
            ),
            unnamed: families.sampled(
                "stowage_pods_over_grant_unnamed",
                "Pods over their grant that stowage_pod_over_grant_bytes does not name.",
                [],
            ),
        }
    }

    /// `over`: these pods, each with what it uses beyond its grant.
    pub fn write<'a>(
        &self,
        scrape: &mut Scrape<'_>,
        over: impl Iterator<Item = (&'a PodKey, Bytes)>,
    ) -> io::Result<()> {
        let mut overusing: Vec<(&PodKey, Bytes)> = over.collect();
        overusing.sort_unstable_by_key(|(key, excess)| (Reverse(*excess), *key));
        let named = overusing.iter().take(MAX_NAMED_PODS);
        scrape.write_samples(
            &self.excess,
            named.map(|(key, excess)| ([&*key.namespace, &*key.name], bytes(*excess))),
        )?;
        scrape.write_value(&self.pods, overusing.len() as f64)?;
        scrape.write_value(
            &self.unnamed,
            overusing.len().saturating_sub(MAX_NAMED_PODS) as f64,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_hundred_pods_are_named_and_the_others_counted() {
        let metrics = OveruseMetrics::new(&mut Families::new());
        let keys: Vec<PodKey> = (0..103)
            .map(|n| PodKey::parse("team", &format!("p{n}")).unwrap())
            .collect();
        let rendered = |over: Vec<(&PodKey, Bytes)>| {
            let mut text = Vec::new();
            metrics
                .write(&mut Scrape::new(&mut text), over.into_iter())
                .unwrap();
            String::from_utf8(text).unwrap()
        };
        let text = rendered(
            keys.iter()
                .zip(1..)
                .map(|(key, gib)| (key, Bytes::gib(gib)))
                .collect(),
        );
        assert_eq!(text.matches("stowage_pod_over_grant_bytes{").count(), 100);
        assert!(
            !text.contains("pod=\"p2\"") && text.contains("pod=\"p3\""),
            "{text}"
        );
        assert!(
            text.contains("stowage_pods_over_grant 103\n")
                && text.contains("stowage_pods_over_grant_unnamed 3\n")
        );
        let text = rendered(Vec::new());
        assert!(
            !text.contains("stowage_pod_over_grant_bytes{")
                && text.contains("stowage_pods_over_grant 0\n")
        );
    }
}
