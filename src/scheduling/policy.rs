//! The validated policy: what the cluster's owner decides. Parsing and diagnostics live elsewhere; whatever
//! is here has been checked already.
//!
//! A pod does not choose its class. It shows what it is (priority, PriorityClass, labels, namespace, whether it
//! wants a GPU to itself) and the first class that matches takes it.

use super::loading::LoadingSpeeds;
use super::reading::Pressure;
use super::request::Sharing;
use crate::units::{Millis, Percent};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The share of every GPU that is never handed out: what CUDA contexts and fragmentation inside the
    /// driver take beyond what engines ask for. The usual advice is 10 to 15 %.
    pub headroom: Percent,
    /// How many nodes a filter answer passes on. Four leave the scheduler's other plugins a choice and cost it
    /// four scorings instead of a thousand.
    pub shortlist: u16,
    /// How long a hint steers other pods around the GPUs that were just offered to someone. Longer than the
    /// way from filter to bind, shorter than anyone would notice.
    pub hint_lifetime: Millis,
    /// What a hold may last beyond its victims' grace period, for the driver to give the memory back and the
    /// scheduler to come round again.
    pub hold_slack: Millis,
    pub telemetry: TelemetryRules,
    pub loading: LoadingSpeeds,
    /// The longest an engine may keep others from starting on its GPU. It opens earlier: when the engine is ready, or after
    /// twice the time it should take.
    pub start_gate: Millis,
    classes: Vec<Class>,
}

/// How far agents' readings are believed as they age.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TelemetryRules {
    /// Younger than this it is used as it is: five samples at one a second.
    pub fresh: Millis,
    /// Younger than this it is stale: the ledger decides, less a margin. Older, it has expired.
    pub stale: Millis,
    /// The part of a GPU that nobody is promised while nobody sees what is on it.
    pub margin: Percent,
    pub expired: ExpiredRule,
}

/// What to do with a node whose agent has fallen silent, or never spoke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpiredRule {
    /// Place by what was promised.
    LedgerOnly,
    /// Place nothing there.
    Refuse,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    pub name: String,
    pub matches: Match,
    pub eviction: Eviction,
    pub terms: Terms,
}

/// What a class asks of a GPU beside room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// It profiles the GPU's memory at its start: two that do so at once break each other.
    pub engine: bool,
    /// It joins no GPU with a fuller KV cache.
    pub kv_cache_limit: Option<Percent>,
    /// It joins no GPU with more requests waiting.
    pub queue_limit: Option<u32>,
}

impl Terms {
    /// Whether engines on a GPU are busier than these terms allow. What is not known is not held against a GPU.
    pub fn exceeded_by(&self, pressure: Pressure) -> bool {
        above(pressure.kv_cache, self.kv_cache_limit) || above(pressure.queue, self.queue_limit)
    }
}

fn above<T: PartialOrd>(measured: Option<T>, limit: Option<T>) -> bool {
    measured.zip(limit).is_some_and(|(measured, limit)| measured > limit)
}

/// Whether a pod of higher priority may take a class's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    Never,
    ForHigherPriority,
}

/// Every condition that is set must hold. The empty `Match` takes every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    pub sharing: Option<Sharing>,
    pub priority: Option<RangeInclusive<i32>>,
    /// Any of these; empty means any at all.
    pub priority_classes: Vec<String>,
    /// Any of these; empty means any at all.
    pub namespaces: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// A class by its place in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClassId(u16);

/// What a pod shows of itself to be classified by.
#[derive(Debug, Clone, Copy)]
pub struct Traits<'a> {
    pub namespace: &'a str,
    pub labels: &'a BTreeMap<String, String>,
    pub priority_class: Option<&'a str>,
    pub priority: i32,
    pub sharing: Sharing,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error(
        "the last class, {last:?}, does not match every pod; end the list with a class without conditions"
    )]
    NoCatchAll { last: String },
    #[error("a policy needs at least one class and at most {}", u16::MAX)]
    ClassCount,
    #[error("the shortlist is 0; pass on at least one node")]
    EmptyShortlist,
}

impl Policy {
    /// This policy with other classes, in the order in which they are tried.
    pub fn with_classes(self, classes: Vec<Class>) -> Result<Self, PolicyError> {
        let last = classes.last().ok_or(PolicyError::ClassCount)?;
        if last.matches != Match::default() {
            return Err(PolicyError::NoCatchAll { last: last.name.clone() });
        }
        if classes.len() > usize::from(u16::MAX) {
            return Err(PolicyError::ClassCount);
        }
        if self.shortlist == 0 {
            return Err(PolicyError::EmptyShortlist);
        }
        Ok(Self { classes, ..self })
    }

    /// In the order in which they are tried.
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    pub fn classify(&self, pod: Traits<'_>) -> ClassId {
        let place = self.classes.iter().position(|class| class.matches.accepts(pod));
        ClassId(place.expect("the last class matches every pod") as u16)
    }

    /// The class of that id. Ids are only ever made by [`Policy::classify`]; one that an earlier, longer policy
    /// gave out falls to the last class.
    pub fn class(&self, id: ClassId) -> &Class {
        self.classes.get(usize::from(id.0)).or(self.classes.last()).expect("a policy has a class")
    }
}

impl Default for Policy {
    /// Right for a newcomer: whoever wants a GPU to itself has it, negative priority means "may be evicted",
    /// and everything else is a service that nobody may push out.
    fn default() -> Self {
        let class =
            |name: &str, matches, eviction, terms| Class { name: name.into(), matches, eviction, terms };
        let terms = |engine, kv_cache, queue| Terms {
            engine,
            kv_cache_limit: Percent::new(kv_cache),
            queue_limit: Some(queue),
        };
        Self {
            headroom: const { Percent::new(10).unwrap() },
            shortlist: 4,
            hint_lifetime: Millis::seconds(2),
            hold_slack: Millis::seconds(30),
            telemetry: TelemetryRules::default(),
            loading: LoadingSpeeds::default(),
            start_gate: Millis::seconds(600),
            classes: vec![
                class(
                    "dedicated",
                    Match {
                        sharing: Some(Sharing::Exclusive),
                        priority: Some(0..=i32::MAX),
                        ..Match::default()
                    },
                    Eviction::Never,
                    Terms { engine: true, ..Terms::default() },
                ),
                class(
                    "opportunistic",
                    Match { priority: Some(i32::MIN..=-1), ..Match::default() },
                    Eviction::ForHigherPriority,
                    // Where the engines have little to spare, harvesting would cost their users.
                    terms(false, 80, 8),
                ),
                class(
                    "batch",
                    Match { priority_classes: vec!["stowage-batch".into()], ..Match::default() },
                    Eviction::Never,
                    terms(false, 90, 32),
                ),
                class("serving", Match::default(), Eviction::Never, terms(true, 90, 32)),
            ],
        }
    }
}

impl Default for TelemetryRules {
    fn default() -> Self {
        Self {
            fresh: Millis::seconds(5),
            stale: Millis::seconds(30),
            margin: const { Percent::new(5).unwrap() },
            expired: ExpiredRule::LedgerOnly,
        }
    }
}

impl Match {
    fn accepts(&self, pod: Traits<'_>) -> bool {
        self.sharing.is_none_or(|sharing| sharing == pod.sharing)
            && self.priority.as_ref().is_none_or(|range| range.contains(&pod.priority))
            && any_of(&self.priority_classes, pod.priority_class.unwrap_or_default())
            && any_of(&self.namespaces, pod.namespace)
            && self.labels.iter().all(|(key, value)| pod.labels.get(key) == Some(value))
    }
}

fn any_of(allowed: &[String], actual: &str) -> bool {
    allowed.is_empty() || allowed.iter().any(|one| one == actual)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class_of(priority: i32, priority_class: Option<&str>, sharing: Sharing) -> String {
        let policy = Policy::default();
        let labels = BTreeMap::new();
        let pod = Traits { namespace: "default", labels: &labels, priority_class, priority, sharing };
        policy.class(policy.classify(pod)).name.clone()
    }

    #[test]
    fn the_default_classes_follow_what_a_pod_shows() {
        assert_eq!(class_of(0, None, Sharing::Shared), "serving");
        assert_eq!(class_of(-10, None, Sharing::Shared), "opportunistic");
        assert_eq!(class_of(-10, None, Sharing::Exclusive), "opportunistic");
        assert_eq!(class_of(0, Some("stowage-batch"), Sharing::Shared), "batch");
        assert_eq!(class_of(5, None, Sharing::Exclusive), "dedicated");
    }

    #[test]
    fn a_policy_without_a_last_resort_is_refused() {
        let only_jobs = Class {
            name: "jobs".into(),
            matches: Match { namespaces: vec!["jobs".into()], ..Match::default() },
            eviction: Eviction::Never,
            terms: Terms::default(),
        };
        let refused = Policy::default().with_classes(vec![only_jobs]);
        assert_eq!(refused, Err(PolicyError::NoCatchAll { last: "jobs".into() }));
    }
}
