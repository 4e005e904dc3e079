//! Classes: what a pod is to the cluster, and what follows from it. A pod does not choose its class; it shows what it is
//! ([`PodTraits`](crate::scheduling::vocabulary::classification::PodTraits)), and the first class that matches takes it.

use super::expression::{Expression, ExpressionPod};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::units::{Millis, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Class {
    pub name: String,
    pub matches: Match,
    pub eviction: Preemptibility,
    pub engine: bool,
    /// It joins no GPU with a fuller KV cache.
    pub kv_cache_limit: Option<Percent>,
    /// It joins no GPU with more requests waiting.
    pub queue_limit: Option<u32>,
    /// Names of the classes it shares a GPU with; `None` for all. Both sides must agree.
    pub shares_with: Option<Vec<String>>,
    pub start_gate: StartGate,
    /// Nobody evicts its pods before they have run so long.
    pub min_runtime: Millis,
    /// What its pods need to leave, beyond their grace period.
    pub drain_time: Millis,
    /// What `karpenter.sh/do-not-disrupt: "true"` on one of its pods counts for.
    pub do_not_disrupt: Protection,
    /// What the disruption budgets that cover its pods count for.
    pub disruption_budgets: Protection,
    /// The most that work lost by its pods counts for; `None` for what the policy says of all.
    pub max_lost_work: Option<Millis>,
}

/// How long an engine that starts keeps others from starting on its GPUs. It opens earlier when the engine is
/// ready, but not before `min`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartGate {
    pub min: Millis,
    pub max: Millis,
}

/// Whether a pod of higher priority may take a class's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preemptibility {
    Never,
    ForHigherPriority,
}

/// Whether what a tenant says against an eviction keeps a pod whose class may be evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    #[default]
    Honor,
    Ignore,
}

/// Every condition that is set must hold. The empty `Match` takes every pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Match {
    pub sharing: Option<Sharing>,
    pub priority: Option<RangeInclusive<i32>>,
    /// Any of these; empty means any at all.
    pub priority_classes: Vec<String>,
    /// Any of these; empty means any at all.
    pub namespaces: Vec<String>,
    /// All of these.
    pub labels: BTreeMap<String, String>,
    /// Any of these asked for by any container; empty means any at all.
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
    /// A class that takes every pod, is an engine with the usual limits, shares with everyone and is never evicted.
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
            max_lost_work: None,
        }
    }

    /// Whether `karpenter.sh/do-not-disrupt` keeps its pods.
    pub fn honors_do_not_disrupt(&self) -> bool {
        self.do_not_disrupt == Protection::Honor
    }

    /// Whether disruption budgets keep its pods.
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
        Self { min: Millis::default(), max: Millis::seconds(600) }
    }
}

impl Match {
    pub fn accepts(&self, pod: &ExpressionPod<'_>) -> bool {
        self.unmet_by(pod).is_none()
    }

    /// The first condition the pod does not meet; the cheap ones are looked at first.
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
