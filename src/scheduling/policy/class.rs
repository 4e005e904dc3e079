//! Classes: how pods are treated. A pod does not choose its class: the first class that matches its traits
//! ([`PodTraits`](crate::scheduling::vocabulary::classification::PodTraits)) has it.

use super::expression::{Expression, ExpressionPod};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::units::{Millis, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Class {
    pub name: String,
    pub matches: Match,
    pub eviction: Preemptibility,
    pub engine: bool,
    /// It is not placed on a GPU with a fuller KV cache.
    pub kv_cache_limit: Option<Percent>,
    /// It is not placed on a GPU with more waiting requests.
    pub queue_limit: Option<u32>,
    /// Names of the classes it shares a GPU with; `None` for all. Both sides must agree.
    pub shares_with: Option<Vec<String>>,
    pub start_gate: StartGate,
    /// Its pods are not evicted before they have run this long.
    pub min_runtime: Millis,
    /// What its pods need to finish, beyond their grace period.
    pub drain_time: Millis,
    /// Whether `karpenter.sh/do-not-disrupt: "true"` protects its pods from eviction.
    pub do_not_disrupt: Protection,
    /// Whether disruption budgets protect its pods from eviction.
    pub disruption_budgets: Protection,
    /// The maximum cost of the work that one of its pods loses; `None` for the policy's.
    pub lost_work_at_most: Option<Millis>,
}

/// How long a starting engine keeps others from starting on its GPUs. It opens earlier when the engine is ready, but not
/// before `at_least`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartGate {
    pub at_least: Millis,
    pub at_most: Millis,
}

/// Whether pods of higher priority may evict a class's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preemptibility {
    Never,
    ForHigherPriority,
}

/// Whether a tenant's own protection from eviction counts for pods of a preemptible class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    #[default]
    Honor,
    Ignore,
}

/// Every condition that is set must be met. The empty `Match` matches every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    pub sharing: Option<Sharing>,
    pub priority: Option<RangeInclusive<i32>>,
    /// Any of these; empty means any at all.
    pub priority_classes: Vec<String>,
    /// Any of these; empty means any at all.
    pub namespaces: Vec<String>,
    /// All of these.
    pub labels: BTreeMap<String, String>,
    /// Any of these requested by any container; empty means any at all.
    pub resources: Vec<String>,
    pub expression: Option<Expression>,
}

/// The condition of a [`Match`] that a pod does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unmet {
    Sharing,
    Priority,
    PriorityClass,
    Namespace,
    Labels,
    Resources,
    /// It says no.
    Expression,
    /// It fails on this pod, which counts as no.
    ExpressionFailed,
}

impl Unmet {
    /// In a person's words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Sharing => "its `sharing` is another",
            Self::Priority => "the pod's priority is not in its `priority`",
            Self::PriorityClass => "the pod's PriorityClass is not among its `priorityClasses`",
            Self::Namespace => "the pod's namespace is not among its `namespaces`",
            Self::Labels => "the pod lacks one of its `labels`",
            Self::Resources => "the pod asks for none of its `resources`",
            Self::Expression => "its `expression` says no",
            Self::ExpressionFailed => {
                "its `expression` fails on this pod, as when a label it reads is not there"
            }
        }
    }
}

impl Class {
    /// A class that matches every pod, runs engines with the usual limits, shares with all classes and is never evicted.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            matches: Match::default(),
            eviction: Preemptibility::Never,
            engine: true,
            kv_cache_limit: Percent::new(90),
            queue_limit: Some(32),
            shares_with: None,
            start_gate: StartGate::default(),
            min_runtime: Millis::default(),
            drain_time: Millis::default(),
            do_not_disrupt: Protection::default(),
            disruption_budgets: Protection::default(),
            lost_work_at_most: None,
        }
    }

    /// Whether `karpenter.sh/do-not-disrupt` protects its pods.
    pub fn honors_do_not_disrupt(&self) -> bool {
        self.do_not_disrupt == Protection::Honor
    }

    /// Whether disruption budgets protect its pods.
    pub fn honors_budgets(&self) -> bool {
        self.disruption_budgets == Protection::Honor
    }

    /// Whether it is willing to share a GPU with a class of that name.
    pub fn shares_with(&self, other: &str) -> bool {
        self.shares_with.as_ref().is_none_or(|names| names.iter().any(|name| name == other))
    }
}

impl Default for StartGate {
    /// Twice what loading should take, but no longer than ten minutes: by then an engine that is not ready never will be.
    fn default() -> Self {
        Self { at_least: Millis::default(), at_most: Millis::seconds(600) }
    }
}

impl Match {
    pub fn accepts(&self, pod: &ExpressionPod<'_>) -> bool {
        self.unmet_by(pod).is_none()
    }

    /// The first condition that the pod does not meet; cheap ones are checked first.
    pub fn unmet_by(&self, subject: &ExpressionPod<'_>) -> Option<Unmet> {
        let pod = subject.traits;
        let is_met = [
            (Unmet::Sharing, self.sharing.is_none_or(|sharing| sharing == pod.sharing)),
            (Unmet::Priority, self.priority.as_ref().is_none_or(|range| range.contains(&pod.priority))),
            (Unmet::PriorityClass, any_of(&self.priority_classes, &pod.priority_class)),
            (Unmet::Namespace, any_of(&self.namespaces, &pod.namespace)),
            (Unmet::Labels, self.labels.iter().all(|(key, value)| pod.labels.get(key) == Some(value))),
            (
                Unmet::Resources,
                self.resources.is_empty() || self.resources.iter().any(|name| pod.resources.contains(name)),
            ),
        ];
        let unmet = is_met.into_iter().find(|(_, met)| !met).map(|(condition, _)| condition);
        unmet.or_else(|| match self.expression.as_ref()?.holds_for(subject) {
            Ok(true) => None,
            Ok(false) => Some(Unmet::Expression),
            Err(_) => Some(Unmet::ExpressionFailed),
        })
    }
}

fn any_of(allowed: &[String], actual: &str) -> bool {
    allowed.is_empty() || allowed.iter().any(|one| one == actual)
}
