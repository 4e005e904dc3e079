//! Classes: how pods are treated. A pod does not choose its class: the first class that matches its traits
//! ([`PodTraits`](crate::vocabulary::classification::PodTraits)) has it.

use super::Policy;
use super::eviction::OveruseRule;
use super::expression::{Expression, ExpressionPod};
use super::selection::{LabelExpression, NamespaceSelector, has_all_labels, pattern_matches};
use super::window::Window;
use crate::units::{Bytes, Micros, Millis, Percent, setting};
use crate::vocabulary::classification::{ComputeMode, Isolation};
use crate::vocabulary::demand::{Demand, PodRequest, RequestError, Sharing};
use crate::vocabulary::is_default;
use crate::vocabulary::latency::LatencyLimits;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Pods that are treated alike.
///
/// A class in a policy file may leave out any field but its name: it then has that of the class that it changes or, if it is new,
/// of [`Class::new`]. `#[serde(default)]` is for the schema, in which such a field is not required.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(description = "Pods that are treated alike.")]
pub struct Class {
    /// Shown in every decision and metric.
    #[schemars(extend("format" = "name"))]
    pub name: String,
    /// Which pods belong to it. Default: all that no earlier class has.
    #[serde(rename = "match", default)]
    pub matches: Match,
    /// The windows in which it takes pods. At other hours its pods are of the next class that matches. Default: always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<Window>,
    /// Whether its pods run an engine that profiles GPU memory at its start. Two that do so at the same time break each other,
    /// so they start one by one.
    #[serde(default)]
    pub engine: bool,
    /// Classes it shares a GPU with, if they allow it too. Default: all; `[]`: none.
    #[serde(rename = "mayShareWith")]
    #[schemars(extend("items" = {"format": "name", "type": "string"}))]
    pub shares_with: Option<Vec<String>>,
    #[serde(default)]
    pub limits: ClassLimits,
    /// Whether a new pod of the same model and namespace may wake one of its engines that sleeps, in place of a start of its own.
    #[serde(default)]
    pub reusable: bool,
    /// How long one of its engines may keep others from starting on its GPU.
    #[serde(default)]
    pub start_gate: StartGate,
    /// Whether pods of higher priority may evict its pods.
    #[serde(rename = "preemptible", with = "preemptible", default)]
    #[schemars(with = "bool")]
    pub eviction: Preemptibility,
    /// How long a pod runs before it may be evicted.
    #[serde(with = "setting::Duration", default)]
    pub min_runtime: Millis,
    /// The longest grace period with which one of its pods is evicted, from 1s to 1h: others wait for its GPUs, and the pod's own may
    /// be a year. It also bounds how long a pod that is being deleted is waited for: one that has been given longer is evicted.
    #[serde(with = "setting::Duration", default = "ten_minutes")]
    pub max_grace_period: Millis,
    /// How long its pods need to finish beyond their grace period.
    #[serde(with = "setting::Duration", default)]
    pub drain_time: Millis,
    /// Whether `karpenter.sh/do-not-disrupt: "true"` protects its pods from eviction. Any user who can annotate the pod can set
    /// this.
    #[serde(default)]
    pub do_not_disrupt: Protection,
    /// Whether disruption budgets protect its pods from eviction. Any user who can create a budget in the pod's namespace can
    /// use this.
    #[serde(default)]
    pub disruption_budgets: Protection,
    /// The maximum cost of the work that one of its pods loses since its last checkpoint.
    #[serde(with = "setting::Optional::<setting::Duration>", default)]
    pub max_lost_work: Option<Millis>,
    /// The node pools that its pods may be placed in, and nowhere else. Default: every node whose pool admits it.
    #[schemars(extend("items" = {"format": "name", "type": "string"}))]
    pub pools: Option<Vec<String>>,
    /// What happens to its pods that use more VRAM than they were granted. Default: the policy's `overuse` if the class is
    /// preemptible, otherwise `report`.
    pub overuse: Option<OveruseRule>,
    /// How long they do before they are told. Default: the policy's `overuseAfter`.
    #[serde(with = "setting::Optional::<setting::Duration>", default)]
    pub overuse_after: Option<Millis>,
    /// What becomes of the VRAM of its engines while they sleep.
    #[serde(default)]
    pub sleeping: SleepingRule,
    /// What becomes of VRAM that its engines do not use, awake or asleep, where the driver keeps VRAM limits.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unused: UnusedRule,
    /// The most VRAM that one of its pods may borrow, over all its GPUs: a pod that requests more borrows nothing. Default: any.
    #[serde(
        with = "setting::Optional::<setting::MemoryQuantity>",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub max_borrowed: Option<Bytes>,
    /// Whether the driver has to keep its pods within their VRAM.
    #[serde(default)]
    pub isolation: Isolation,
    /// The most that its engines shall take from one output token of a request to the next, as a mean over half a minute. A GPU takes
    /// no pod beside which they would take longer. Default: any time.
    #[serde(
        with = "setting::Optional::<setting::Duration>",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub max_time_per_token: Option<Millis>,
    /// The most that they shall take from a request's arrival to its first token, likewise.
    #[serde(
        with = "setting::Optional::<setting::Duration>",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub max_time_to_first_token: Option<Millis>,
    /// How its pods that have VRAM limits share a GPU's compute. Default: what gpu-fractioning does by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<ComputeMode>,
}

/// What becomes of an engine's VRAM while the engine sleeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SleepingRule {
    /// Its whole grant stays its own.
    #[default]
    Keep,
    /// What it does not use is lent to preemptible pods of lower priority. Before it wakes it asks, with the annotation
    /// `stowage.dev/wake-requested`, and waits for the condition `stowage.dev/Wakeable`.
    Lend,
}

/// What becomes of VRAM that an engine was granted and does not use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnusedRule {
    /// Its whole grant stays its own.
    #[default]
    Keep,
    /// It is lent to preemptible pods of lower priority that have VRAM limits, too. The engine takes it back by allocating it:
    /// the driver ends the borrower.
    Lend,
}

/// The maximum load of the engines on a GPU for a pod of this class to be placed there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClassLimits {
    /// Maximum KV cache usage.
    #[serde(with = "setting::Optional::<setting::Percentage<100>>", default)]
    pub kv_cache: Option<Percent>,
    /// Maximum number of waiting requests.
    pub queue: Option<u32>,
    /// Whether a pod may join engines that do not say how busy they are.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unknown_load: UnknownLoadRule,
}

/// What becomes of a GPU on which an engine, or a pod that may be one, does not say how busy it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UnknownLoadRule {
    /// It takes pods, and costs them half of what a GPU at the limit does.
    #[default]
    Accept,
    /// It takes no pod of the class.
    Refuse,
}

/// Bounds of the start gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct StartGate {
    /// It stays closed at least this long, however soon the engine is ready.
    #[serde(with = "setting::Duration")]
    pub min: Millis,
    /// It opens at the latest so long after the Binding, whatever the engine does. With `0s` there is none.
    #[serde(with = "setting::Duration")]
    pub max: Millis,
}

/// Whether pods of higher priority may evict a class's pods.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Preemptibility {
    #[default]
    Never,
    ForHigherPriority,
}

/// Policies write [`Preemptibility`] as a truth value.
mod preemptible {
    use super::Preemptibility;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Preemptibility, D::Error> {
        let is_preemptible = bool::deserialize(deserializer)?;
        Ok(if is_preemptible {
            Preemptibility::ForHigherPriority
        } else {
            Preemptibility::Never
        })
    }

    pub fn serialize<S: Serializer>(
        one: &Preemptibility,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bool(*one == Preemptibility::ForHigherPriority)
    }
}

/// Whether a tenant's own protection from eviction counts for pods of a preemptible class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protection {
    #[default]
    Honor,
    Ignore,
}

/// Which pods: all given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Match {
    /// In any of these. `*` stands for any text: `team-*`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("items" = {"format": "name-pattern", "type": "string"}))]
    pub namespaces: Vec<String>,
    /// In a namespace with such labels. While these are unknown, it does not match.
    pub namespace_selector: Option<NamespaceSelector>,
    /// With all of these.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    #[schemars(extend("additionalProperties" = {"format": "label-value", "type": "string"}))]
    pub labels: BTreeMap<String, String>,
    /// With labels that meet all of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelExpression>,
    /// With any of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("items" = {"format": "subdomain", "type": "string"}))]
    pub priority_classes: Vec<String>,
    #[serde(with = "PriorityRange")]
    pub priority: Option<RangeInclusive<i32>>,
    /// With a container that requests any of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("items" = {"format": "qualified-name", "type": "string"}))]
    pub resources: Vec<String>,
    /// Whether the pod requires exclusive GPUs.
    pub sharing: Option<Sharing>,
    /// A condition in CEL over `pod`: `namespace`, `labels`, `priority`, `priorityClass`, `resources`, `gpus`, `vram` and
    /// `kvCache` in MiB, `exclusive`, `model`, `serviceAccount`.
    #[schemars(with = "String", extend("format" = "cel"), length(max = 1024))]
    pub expression: Option<Expression>,
}

/// Inclusive at both ends.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PriorityRange {
    min: Option<i32>,
    max: Option<i32>,
}

impl PriorityRange {
    fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<RangeInclusive<i32>>, D::Error> {
        let range: Option<Self> = Deserialize::deserialize(deserializer)?;
        Ok(range.map(|range| range.min.unwrap_or(i32::MIN)..=range.max.unwrap_or(i32::MAX)))
    }

    fn serialize<S: Serializer>(
        range: &Option<RangeInclusive<i32>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let range = range.as_ref().map(|range| Self {
            min: Some(*range.start()).filter(|&least| least != i32::MIN),
            max: Some(*range.end()).filter(|&most| most != i32::MAX),
        });
        Serialize::serialize(&range, serializer)
    }
}

/// The condition of a [`Match`] that a pod does not meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnmetCondition {
    Sharing,
    Priority,
    PriorityClass,
    Namespace,
    /// The labels of the pod's namespace are others, or unknown.
    NamespaceSelector,
    Labels,
    LabelExpressions,
    Resources,
    /// It says no.
    Expression,
    /// It fails on this pod, which counts as no.
    ExpressionFailed,
}

impl UnmetCondition {
    /// In a person's words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Sharing => "the pod's sharing mode is not its `sharing`",
            Self::Priority => "the pod's priority is not in its `priority`",
            Self::PriorityClass => "the pod's PriorityClass is not among its `priorityClasses`",
            Self::Namespace => "the pod's namespace is not among its `namespaces`",
            Self::NamespaceSelector => "its `namespaceSelector` does not take the pod's namespace",
            Self::Labels => "the pod lacks one of its `labels`",
            Self::LabelExpressions => "the pod's labels do not meet its `matchExpressions`",
            Self::Resources => "the pod asks for none of its `resources`",
            Self::Expression => "its `expression` is false for the pod",
            Self::ExpressionFailed => {
                "its `expression` fails on this pod, as when a label it reads is not there"
            }
        }
    }
}

impl Class {
    /// A class that matches every pod, runs engines with the usual limits, shares with all classes and is never evicted.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            matches: Match::default(),
            when: Vec::new(),
            eviction: Preemptibility::Never,
            engine: true,
            reusable: false,
            limits: ClassLimits {
                kv_cache: Percent::new(90),
                queue: Some(32),
                ..ClassLimits::default()
            },
            shares_with: None,
            start_gate: StartGate::default(),
            min_runtime: Millis::default(),
            max_grace_period: ten_minutes(),
            drain_time: Millis::default(),
            do_not_disrupt: Protection::default(),
            disruption_budgets: Protection::default(),
            max_lost_work: None,
            sleeping: SleepingRule::default(),
            unused: UnusedRule::default(),
            max_borrowed: None,
            isolation: Isolation::default(),
            max_time_per_token: None,
            max_time_to_first_token: None,
            compute: None,
            pools: None,
            overuse: None,
            overuse_after: None,
        }
    }

    /// What its engines shall keep; what is no engine keeps no limit.
    pub fn latency_limits(&self) -> LatencyLimits {
        if !self.engine {
            return LatencyLimits::default();
        }
        LatencyLimits {
            time_per_token: self.max_time_per_token.map(Micros::from),
            time_to_first_token: self.max_time_to_first_token.map(Micros::from),
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

    /// Whether its pods may be placed in a pool of that name, or outside all pools, as far as the class says.
    pub fn may_be_placed_in(&self, pool: Option<&str>) -> bool {
        self.pools
            .as_ref()
            .is_none_or(|names| pool.is_some_and(|pool| names.iter().any(|name| name == pool)))
    }

    /// The grace period with which a pod is evicted whose own is `own`, from 1 s to the class's maximum. Never 0: the API server
    /// would delete the object at once, and its containers might go on.
    pub fn eviction_grace_period(&self, own: Millis) -> Millis {
        own.min(self.max_grace_period).max(Millis::seconds(1))
    }

    /// Whether it is willing to share a GPU with a class of that name.
    pub fn shares_with(&self, other: &str) -> bool {
        self.shares_with
            .as_ref()
            .is_none_or(|names| names.iter().any(|name| name == other))
    }
}

/// As long as the cluster autoscaler waits for a pod.
fn ten_minutes() -> Millis {
    Millis::seconds(600)
}

impl Default for StartGate {
    /// Twice what loading should take, but no longer than ten minutes: by then an engine that is not ready never will be.
    fn default() -> Self {
        Self {
            min: Millis::default(),
            max: Millis::seconds(600),
        }
    }
}

impl Match {
    /// Whether it takes a pod. `is_selected` says whether its `namespaceSelector` takes the pod's namespace.
    pub fn accepts(&self, pod: &ExpressionPod<'_>, is_selected: bool) -> bool {
        self.unmet_condition(pod, is_selected).is_none()
    }

    /// The first condition that the pod does not meet; cheap ones are checked first.
    pub fn unmet_condition(
        &self,
        expression_pod: &ExpressionPod<'_>,
        is_selected: bool,
    ) -> Option<UnmetCondition> {
        let pod = expression_pod.traits;
        let is_met = [
            (
                UnmetCondition::Sharing,
                self.sharing.is_none_or(|sharing| sharing == pod.sharing),
            ),
            (
                UnmetCondition::Priority,
                self.priority
                    .as_ref()
                    .is_none_or(|range| range.contains(&pod.priority)),
            ),
            (
                UnmetCondition::PriorityClass,
                is_allowed(&self.priority_classes, &pod.priority_class),
            ),
            (
                UnmetCondition::Namespace,
                self.namespaces.is_empty()
                    || self
                        .namespaces
                        .iter()
                        .any(|one| pattern_matches(one, &pod.namespace)),
            ),
            (
                UnmetCondition::NamespaceSelector,
                self.namespace_selector.is_none() || is_selected,
            ),
            (
                UnmetCondition::Labels,
                has_all_labels(&self.labels, &pod.labels),
            ),
            (
                UnmetCondition::LabelExpressions,
                self.match_expressions
                    .iter()
                    .all(|expression| expression.matches(&pod.labels)),
            ),
            (
                UnmetCondition::Resources,
                self.resources.is_empty()
                    || self
                        .resources
                        .iter()
                        .any(|name| pod.resources.contains(name)),
            ),
        ];
        let unmet = is_met
            .into_iter()
            .find(|(_, met)| !met)
            .map(|(condition, _)| condition);
        unmet.or_else(
            || match self.expression.as_ref()?.holds_for(expression_pod) {
                Ok(true) => None,
                Ok(false) => Some(UnmetCondition::Expression),
                Err(_) => Some(UnmetCondition::ExpressionFailed),
            },
        )
    }
}

fn is_allowed(allowed: &[String], actual: &str) -> bool {
    allowed.is_empty() || allowed.iter().any(|one| one == actual)
}

impl Demand {
    pub fn from_pod(pod: &PodRequest<'_>, policy: &Policy) -> Result<Self, RequestError> {
        Self::from_request(pod, |traits| policy.classify(traits))
    }

    /// [`Demand::worst_case_classified`] by a policy.
    pub fn worst_case(pod: &PodRequest<'_>, policy: &Policy) -> Self {
        Self::worst_case_classified(pod, |traits| policy.classify(traits))
    }
}
