//! Classifies pods by the current policy, outside the ledger's lock, and caches the results: the replicas of a workload have
//! the same traits, and kube-scheduler asks several times for each pod.
//!
//! A classification may be outdated by the time the ledger is locked. It carries the policy version, and the holder of the lock
//! classifies again if the version differs.

use dashmap::DashMap;
use parking_lot::RwLock;
use rustc_hash::FxBuildHasher;
use std::sync::Arc;
use stowage_scheduling::ledger::Classifications;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::classification::{Classification, PodTraits};

/// Cached kinds of pods; some megabytes. A cluster with more kinds classifies some of them again.
const MAX_CACHED_KINDS: usize = 8192;
/// Maximum bytes of text by which a kind is cached: forty labels of the usual length. A pod's author may write a megabyte of
/// them; such a pod is classified each time.
const MAX_KEY_BYTES: usize = 2048;

pub(crate) struct Classifier {
    in_force: RwLock<Arc<ActivePolicy>>,
}

/// A policy and the classifications it has produced.
struct ActivePolicy {
    policy: Arc<Policy>,
    cached: DashMap<PodTraits, Classification, FxBuildHasher>,
}

/// A cache filled for a policy before that policy is set, so that the first request after a policy change waits no longer than
/// any other.
pub struct CachedClassifications(DashMap<PodTraits, Classification, FxBuildHasher>);

impl CachedClassifications {
    pub fn from_classified(classified: &Classifications) -> Self {
        let cached = classified
            .iter()
            .filter(|(traits, _)| is_cacheable(traits))
            .take(MAX_CACHED_KINDS);
        Self(
            cached
                .map(|(traits, classification)| (PodTraits::clone(traits), *classification))
                .collect(),
        )
    }
}

impl Classifier {
    pub fn new(policy: Arc<Policy>) -> Self {
        Self {
            in_force: RwLock::new(Arc::new(ActivePolicy {
                policy,
                cached: DashMap::default(),
            })),
        }
    }

    pub fn set(&self, policy: Arc<Policy>, cached: CachedClassifications) {
        *self.in_force.write() = Arc::new(ActivePolicy {
            policy,
            cached: cached.0,
        });
    }

    /// Sets a new version of the policy in force, and drops the cached classifications of the namespaces for which `is_concerned`.
    pub(crate) fn reclassify(&self, policy: Arc<Policy>, is_concerned: impl Fn(&str) -> bool) {
        let before = self.in_force.read().clone();
        let unaffected = before
            .cached
            .iter()
            .filter(|cached| !is_concerned(&cached.key().namespace));
        let cached = unaffected
            .map(|cached| (cached.key().clone(), *cached.value()))
            .collect();
        *self.in_force.write() = Arc::new(ActivePolicy { policy, cached });
    }

    /// The policy by which pods are classified now. One that is about to be replaced may still be answered.
    pub fn policy(&self) -> Arc<Policy> {
        self.in_force.read().policy.clone()
    }

    pub fn classify(&self, traits: &PodTraits) -> Classification {
        let in_force = self.in_force.read().clone();
        let version = in_force.policy.version;
        if let Some(cached) = in_force.cached.get(traits) {
            return Classification { version, ..*cached };
        }
        let classification = in_force.policy.classify(traits);
        if !is_cacheable(traits) {
            return classification;
        }
        if in_force.cached.len() >= MAX_CACHED_KINDS {
            in_force.cached.clear();
        }
        in_force.cached.insert(traits.clone(), classification);
        classification
    }
}

fn is_cacheable(traits: &PodTraits) -> bool {
    let labels = traits
        .labels
        .iter()
        .flat_map(|(key, value)| [key.len(), value.len()]);
    labels
        .chain(traits.resources.iter().map(String::len))
        .sum::<usize>()
        <= MAX_KEY_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::policy::{Class, Match};

    /// For policies in which pods of that namespace have a class of their own.
    fn policy(version: u64, namespace: &str) -> Arc<Policy> {
        let own = Class {
            matches: Match {
                namespaces: vec![namespace.into()],
                ..Match::default()
            },
            ..Class::new("own")
        };
        let mut policy = Policy::default()
            .with_classes(vec![own, Class::new("serving")])
            .unwrap();
        policy.version = version;
        Arc::new(policy)
    }

    fn pod(namespace: &str) -> PodTraits {
        PodTraits {
            namespace: namespace.into(),
            ..PodTraits::default()
        }
    }

    fn class_of(policy: &Policy, classification: Classification) -> (String, u64) {
        (
            policy.class(classification.class).name.clone(),
            classification.version,
        )
    }

    #[test]
    fn a_new_policy_does_not_use_the_classifications_of_the_old_one() {
        let (first, second) = (policy(1, "chat"), policy(2, "search"));
        let classify = Classifier::new(first.clone());
        for _ in 0..2 {
            assert_eq!(
                class_of(&first, classify.classify(&pod("chat"))),
                ("own".into(), 1)
            );
        }
        classify.set(
            second.clone(),
            CachedClassifications::from_classified(&Classifications::default()),
        );
        for _ in 0..2 {
            assert_eq!(
                class_of(&second, classify.classify(&pod("chat"))),
                ("serving".into(), 2)
            );
            assert_eq!(
                class_of(&second, classify.classify(&pod("search"))),
                ("own".into(), 2)
            );
        }
    }

    #[test]
    fn classifications_made_in_advance_get_the_new_policys_version() {
        let classified: Classifications = [(
            Arc::new(pod("chat")),
            policy(0, "chat").classify(&pod("chat")),
        )]
        .into_iter()
        .collect();
        let in_force = policy(7, "chat");
        let classify = Classifier::new(policy(6, "search"));
        classify.set(
            in_force.clone(),
            CachedClassifications::from_classified(&classified),
        );
        assert_eq!(
            class_of(&in_force, classify.classify(&pod("chat"))),
            ("own".into(), 7)
        );
    }

    #[test]
    fn a_pod_with_very_many_labels_is_classified_and_not_cached() {
        let policy = policy(1, "chat");
        let labels = (0..10_000)
            .map(|n| (format!("label-{n}"), "x".repeat(63)))
            .collect();
        let large = PodTraits {
            labels,
            ..pod("chat")
        };
        let classify = Classifier::new(policy.clone());
        assert_eq!(
            class_of(&policy, classify.classify(&large)),
            ("own".into(), 1)
        );
        classify.classify(&pod("chat"));
        assert_eq!(classify.in_force.read().cached.len(), 1);
        let classified: Classifications = [(Arc::new(large), policy.classify(&pod("chat")))]
            .into_iter()
            .collect();
        assert!(
            CachedClassifications::from_classified(&classified)
                .0
                .is_empty()
        );
    }

    #[test]
    fn more_kinds_than_are_cached_are_classified_all_the_same() {
        let policy = policy(1, "chat");
        let classify = Classifier::new(policy.clone());
        for n in 0..MAX_CACHED_KINDS + 10 {
            classify.classify(&pod(&format!("team-{n}")));
        }
        assert!(classify.in_force.read().cached.len() <= MAX_CACHED_KINDS);
        assert_eq!(
            class_of(&policy, classify.classify(&pod("chat"))),
            ("own".into(), 1)
        );
    }
}
