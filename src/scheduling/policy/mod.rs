//! The validated policy: what the cluster's owner decides. `policy_file` parses files and reports their mistakes; everything here
//! has been checked.
//!
//! [`settings`] are the settings of the whole cluster, in sections: [`scoring`], [`eviction`], [`planning`], [`nodes`]. [`class`] says
//! what a pod is by its traits ([`PodTraits`], [`expression`]), [`tenant`] which share of the cluster a team has, [`pool`] what a node is
//! for, and [`window`] at which hours any of it holds. [`selection`] is how classes and tenants name namespaces and labels, and
//! [`namespaces`] what follows from the labels of namespaces.

pub mod autoscaling;
pub mod class;
pub mod eviction;
pub mod expression;
pub mod namespaces;
pub mod nodes;
pub mod planning;
pub mod pool;
pub mod scoring;
pub mod selection;
pub mod settings;
mod stored;
pub mod tenant;
pub mod window;

pub use autoscaling::{AutoscalingRules, ModelRules, Reserve, ScaleDown, ScaleUp};
pub(crate) use class::UnknownLoadRule;
pub use class::{
    Class, ClassLimits, Match, Preemptibility, Protection, SleepingRule, StartGate, UnmetCondition,
    UnusedRule,
};
pub use eviction::{ConflictRule, EvictionCosts, EvictionRates, OveruseRule, ViolateBudgets};
pub(crate) use eviction::{KueueRule, PreemptionRules};
pub use expression::{Expression, ExpressionError, ExpressionPod};
pub use namespaces::NamespaceLabels;
pub(crate) use namespaces::NamespaceSelection;
pub(crate) use nodes::DraRules;
pub use nodes::NodeRules;
pub use planning::SpareRule;
pub use planning::{
    Consolidation, CountThreshold, GroupPlacement, GroupRules, PercentageThreshold, Planning,
    WhenIncomplete,
};
pub(crate) use planning::{LendingRules, PressureRules};
pub use pool::Pool;
pub(crate) use pool::{PoolAdmission, PoolId};
pub use scoring::PackingPolicy;
pub use scoring::Weights;
pub(crate) use scoring::{LearningMode, PackingRules};
pub(crate) use scoring::{PartAndWeight, ScoreParts, Scoring};
pub use selection::{LabelExpression, LabelOperator, NamespaceSelector};
pub use settings::{ExpiredRule, Mode, Settings, TelemetryRules};
pub use tenant::{Borrowing, Reclaim, Tenant};
pub use window::{TimeOfDay, Weekdays, Window};

use super::vocabulary::classification::{
    ClassId, ClassSet, ClassTerms, Classification, MAX_CLASSES, MAX_TENANTS, PodTraits, TenantId,
};
use super::vocabulary::demand::Sharing;
use super::vocabulary::node::NodeKind;
use super::vocabulary::spare::{MAX_SPARE_RULES, SpareSet};
use crate::ids::GpuModel;
use crate::units::{Millis, Percent};
use namespaces::NamespaceSelections;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use stored::StoredPolicy;

/// A policy reads like its [`Settings`]: `policy.telemetry` is `policy.settings.telemetry`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredPolicy", into = "StoredPolicy")]
pub struct Policy {
    /// Sequence number of the policy in this process; rises with every change. A pod that was classified under another is classified again.
    pub version: u64,
    /// Identifies its content, for people: equal policies have equal digests.
    pub digest: Digest,
    pub settings: Settings,
    classes: Vec<Class>,
    /// The terms of each class, as decisions read them.
    terms: Vec<ClassTerms>,
    tenants: Vec<Tenant>,
    /// The tenant of each namespace that a tenant lists by name.
    tenants_by_namespace: BTreeMap<String, TenantId>,
    /// The tenants' patterns of namespace names, in order of tenants.
    tenant_patterns: Vec<(String, TenantId)>,
    pools: Vec<Pool>,
    /// The classes that may be placed in each pool.
    classes_by_pool: Vec<ClassSet>,
    /// The classes that may be placed on nodes of no pool.
    classes_outside_pools: ClassSet,
    /// Follows from the labels of namespaces, which are no part of what a policy's files say.
    namespace_selections: NamespaceSelections,
    /// The windows that are open now.
    open: BTreeSet<Window>,
    /// The classes that have windows, of which none is open.
    closed_classes: ClassSet,
}

/// The first 64 bits of a hash over a policy's settings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub u64);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error(
        "the last class, {last:?}, does not match every pod; end the list with a class without conditions"
    )]
    NoCatchAll { last: String },
    #[error("a policy needs at least one class and at most {MAX_CLASSES}; this one has {count}")]
    ClassCount { count: usize },
    #[error("the policy has no class {name:?}")]
    UnknownClass { name: String },
    #[error("the policy has no node pool {name:?}")]
    UnknownPool { name: String },
    #[error("two of the policy's {what} are called {name:?}")]
    SameName { what: &'static str, name: String },
    #[error("the namespace {namespace:?} is of two tenants")]
    SharedNamespace { namespace: String },
    #[error("a policy has at most {MAX_TENANTS} tenants and as many pools")]
    TooMany,
    #[error("the last class, {last:?}, has windows: outside of them no class would take its pods")]
    LastHasWindows { last: String },
}

impl Policy {
    /// This policy with other settings.
    pub fn with_settings(self, settings: Settings) -> Self {
        Self { settings, ..self }
    }

    /// This policy without limits on latency, for placements in which no load is known.
    pub fn without_latency_limits(mut self) -> Self {
        for class in &mut self.classes {
            (class.max_time_per_token, class.max_time_to_first_token) = (None, None);
        }
        for terms in &mut self.terms {
            terms.max_time_per_token = None;
        }
        self
    }

    /// This policy with other classes, in the order in which they are tried. Set pools after them: they name classes.
    pub fn with_classes(self, classes: Vec<Class>) -> Result<Self, PolicyError> {
        if classes.is_empty() || classes.len() > MAX_CLASSES {
            return Err(PolicyError::ClassCount {
                count: classes.len(),
            });
        }
        let last = classes.last().expect("there is one");
        if last.matches != Match::default() {
            return Err(PolicyError::NoCatchAll {
                last: last.name.clone(),
            });
        }
        if !last.when.is_empty() {
            return Err(PolicyError::LastHasWindows {
                last: last.name.clone(),
            });
        }
        check_unique("classes", classes.iter().map(|class| &class.name))?;
        let named = classes
            .iter()
            .flat_map(|class| class.shares_with.iter().flatten());
        if let Some(name) = named
            .into_iter()
            .find(|name| classes.iter().all(|class| class.name != **name))
        {
            return Err(PolicyError::UnknownClass { name: name.clone() });
        }
        let terms = classes
            .iter()
            .map(|class| class_terms(class, &classes))
            .collect();
        let (unconfined, selected) = (
            ClassSet::ALL.difference(classes_kept_out(&classes, None)),
            NamespaceSelections::default(),
        );
        let open = self.open.clone();
        Ok(Self {
            classes,
            terms,
            classes_outside_pools: unconfined,
            namespace_selections: selected,
            ..self
        }
        .with_open_windows(open))
    }

    /// This policy at a time at which these windows are open; windows that it does not have are left out.
    pub fn with_open_windows(self, open: BTreeSet<Window>) -> Self {
        let open: BTreeSet<Window> = self
            .windows()
            .filter(|window| open.contains(*window))
            .cloned()
            .collect();
        let is_closed = |class: &Class| {
            !class.when.is_empty() && !class.when.iter().any(|window| open.contains(window))
        };
        let closed = self
            .classes
            .iter()
            .enumerate()
            .filter(|(_, class)| is_closed(class));
        let closed = closed
            .map(|(class_index, _)| ClassId::from_index(class_index))
            .collect();
        Self {
            open,
            closed_classes: closed,
            ..self
        }
    }

    /// The windows of all its classes and rules; one that several have, several times.
    pub fn windows(&self) -> impl Iterator<Item = &Window> {
        let spare = self.planning.spare.iter().flat_map(|rule| &rule.when);
        self.classes
            .iter()
            .flat_map(|class| &class.when)
            .chain(spare)
    }

    /// The windows that are open now. None is, until the edge has said which ([`Policy::with_open_windows`]).
    pub fn open_windows(&self) -> &BTreeSet<Window> {
        &self.open
    }

    /// The window of these that is open, the first if several are.
    pub(crate) fn open_window<'a>(&self, windows: &'a [Window]) -> Option<&'a Window> {
        windows.iter().find(|window| self.open.contains(*window))
    }

    /// Whether a class has windows, of which none is open: it takes no pod now.
    pub fn is_closed(&self, class: ClassId) -> bool {
        self.closed_classes.contains(class)
    }

    /// This policy with other tenants.
    pub fn with_tenants(self, tenants: Vec<Tenant>) -> Result<Self, PolicyError> {
        if tenants.len() > MAX_TENANTS {
            return Err(PolicyError::TooMany);
        }
        check_unique("tenants", tenants.iter().map(|tenant| &tenant.name))?;
        let (mut tenant_of, mut patterns) = (BTreeMap::new(), Vec::new());
        for (index, tenant) in tenants.iter().enumerate() {
            for namespace in &tenant.namespaces {
                if selection::is_pattern(namespace) {
                    patterns.push((namespace.clone(), TenantId::from_index(index)));
                } else if tenant_of
                    .insert(namespace.clone(), TenantId::from_index(index))
                    .is_some()
                {
                    return Err(PolicyError::SharedNamespace {
                        namespace: namespace.clone(),
                    });
                }
            }
        }
        Ok(Self {
            tenants,
            tenants_by_namespace: tenant_of,
            tenant_patterns: patterns,
            namespace_selections: NamespaceSelections::default(),
            ..self
        })
    }

    /// This policy with other node pools, in the order in which they are tried.
    pub fn with_pools(self, pools: Vec<Pool>) -> Result<Self, PolicyError> {
        if pools.len() > MAX_TENANTS {
            return Err(PolicyError::TooMany);
        }
        check_unique("node pools", pools.iter().map(|pool| &pool.name))?;
        let named = self
            .classes
            .iter()
            .flat_map(|class| class.pools.iter().flatten());
        if let Some(name) = named
            .into_iter()
            .find(|name| pools.iter().all(|pool| pool.name != **name))
        {
            return Err(PolicyError::UnknownPool { name: name.clone() });
        }
        let admitted = pools
            .iter()
            .map(|pool| self.classes_admitted_by(pool))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            pools,
            classes_by_pool: admitted,
            ..self
        })
    }

    fn classes_admitted_by(&self, pool: &Pool) -> Result<ClassSet, PolicyError> {
        let id = |name: &String| {
            self.class_named(name)
                .ok_or_else(|| PolicyError::UnknownClass { name: name.clone() })
        };
        let named = pool
            .classes
            .as_ref()
            .map(|names| names.iter().map(id).collect::<Result<ClassSet, _>>());
        let named = named.transpose()?.unwrap_or(ClassSet::ALL);
        Ok(named.difference(classes_kept_out(&self.classes, Some(&pool.name))))
    }

    /// The classes, in the order in which they are tried.
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    /// Whether decisions read what pods on a GPU leave to each other of its time.
    pub(crate) fn counts_neighbors(&self) -> bool {
        self.has_latency_limits() || self.scoring.weights.interference > 0
    }

    /// Whether a class limits how long its engines take.
    pub(crate) fn has_latency_limits(&self) -> bool {
        let mut classes = self.classes.iter();
        classes.any(|class| !class.latency_limits().is_none())
    }

    /// The terms of each class, as decisions read them.
    pub fn terms(&self) -> &[ClassTerms] {
        &self.terms
    }

    /// Whether any class shares no GPU with some other.
    pub(crate) fn has_class_exclusions(&self) -> bool {
        self.terms
            .iter()
            .any(|terms| !terms.class_exclusions.is_empty())
    }

    pub fn class_named(&self, name: &str) -> Option<ClassId> {
        self.classes
            .iter()
            .position(|class| class.name == name)
            .map(ClassId::from_index)
    }

    pub fn tenants(&self) -> &[Tenant] {
        &self.tenants
    }

    pub(crate) fn tenant_ids(&self) -> impl Iterator<Item = TenantId> + use<> {
        (0..self.tenants.len()).map(TenantId::from_index)
    }

    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// What a pod is: the first class that matches it and is not closed, and its tenant.
    pub fn classify(&self, pod: &PodTraits) -> Classification {
        let expression_pod = ExpressionPod::new(pod);
        let selected = self.namespace_selection(&pod.namespace).classes;
        let mut classes = self.classes.iter().enumerate();
        let accepts = |(index, class): &(usize, &Class)| {
            let id = ClassId::from_index(*index);
            !self.is_closed(id)
                && class
                    .matches
                    .accepts(&expression_pod, selected.contains(id))
        };
        let (index, _) = classes
            .find(accepts)
            .expect("the last class matches every pod, at any time");
        Classification {
            class: ClassId::from_index(index),
            terms: self.terms[index],
            tenant: self.tenant_of(&pod.namespace),
            version: self.version,
        }
    }

    /// The condition of a class that the pod does not meet.
    pub fn unmet_condition(
        &self,
        class: ClassId,
        pod: &ExpressionPod<'_>,
    ) -> Option<UnmetCondition> {
        let is_selected = self
            .namespace_selection(&pod.traits.namespace)
            .classes
            .contains(class);
        self.class(class).matches.unmet_condition(pod, is_selected)
    }

    /// The class of that id. Ids are only ever made by [`Policy::classify`]; one that an earlier, longer policy gave out falls to
    /// the last class.
    pub fn class(&self, id: ClassId) -> &Class {
        self.classes
            .get(id.index())
            .or(self.classes.last())
            .expect("a policy has a class")
    }

    /// What happens to pods of the class that use more than their grant, and after how long. Only the class itself can say that
    /// pods which are never preempted are evicted for it.
    pub(crate) fn overuse_of(&self, class: &Class) -> (OveruseRule, Millis) {
        let default = match class.eviction {
            Preemptibility::Never => OveruseRule::Report,
            Preemptibility::ForHigherPriority => self.overuse,
        };
        (
            class.overuse.unwrap_or(default),
            class.overuse_after.unwrap_or(self.overuse_after),
        )
    }

    /// The tenant of that id; `None` for one of an earlier policy.
    pub fn tenant(&self, id: TenantId) -> Option<&Tenant> {
        self.tenants.get(id.index())
    }

    /// The pool of a node with these labels, the first that selects it, and what may be placed there.
    pub fn admission(&self, labels: &BTreeMap<String, String>) -> PoolAdmission {
        match self.pools.iter().position(|pool| pool.selects(labels)) {
            Some(index) => PoolAdmission {
                pool: Some(PoolId(index as u16)),
                classes: self.classes_by_pool[index],
            },
            None => PoolAdmission {
                pool: None,
                classes: self.classes_outside_pools,
            },
        }
    }

    pub fn pool(&self, id: PoolId) -> Option<&Pool> {
        self.pools.get(id.index())
    }

    /// Whether pods of higher priority may evict the pods of a class.
    pub fn is_preemptible(&self, class: ClassId) -> bool {
        self.class(class).eviction == Preemptibility::ForHigherPriority
    }

    /// Whether a rule of `planning.spare` holds now.
    pub(crate) fn is_in_force(&self, rule: &SpareRule) -> bool {
        rule.when.is_empty() || self.open_window(&rule.when).is_some()
    }

    /// The rules of `planning.spare` that are in force now, with their indices.
    pub(crate) fn spare_rules_now(&self) -> impl Iterator<Item = (usize, &SpareRule)> {
        let rules = self.planning.spare.iter().enumerate().take(MAX_SPARE_RULES);
        rules.filter(|(_, rule)| self.is_in_force(rule))
    }

    /// The rules of `planning.spare` in force for which GPUs of that model on nodes of that pool count.
    pub(crate) fn spare_rules_for(&self, pool: Option<PoolId>, model: &GpuModel) -> SpareSet {
        let pool = pool
            .and_then(|id| self.pool(id))
            .map(|pool| pool.name.as_str());
        self.spare_rules_now()
            .filter(|(_, rule)| rule.covers(pool, model))
            .map(|(rule_index, _)| rule_index)
            .collect()
    }

    /// What allocates a node's GPUs, by the node and by its pool: Stowage only if neither names another.
    pub fn allocator_of(&self, observed: NodeKind, admission: PoolAdmission) -> NodeKind {
        let declared = admission
            .pool
            .and_then(|id| self.pool(id))
            .map(|pool| pool.allocator);
        match declared {
            Some(allocator @ (NodeKind::DevicePlugin | NodeKind::Dra)) => allocator,
            Some(NodeKind::Stowage) | None => observed,
        }
    }
}

fn check_unique<'a>(
    what: &'static str,
    names: impl Iterator<Item = &'a String>,
) -> Result<(), PolicyError> {
    let mut names: Vec<&String> = names.collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(PolicyError::SameName {
            what,
            name: pair[0].clone(),
        }),
        None => Ok(()),
    }
}

/// The classes that are kept in other pools than this one; `None` for the nodes of no pool.
fn classes_kept_out(classes: &[Class], pool: Option<&str>) -> ClassSet {
    let kept_out = classes
        .iter()
        .enumerate()
        .filter(|(_, class)| !class.may_be_placed_in(pool));
    kept_out
        .map(|(class_index, _)| ClassId::from_index(class_index))
        .collect()
}

fn class_terms(class: &Class, classes: &[Class]) -> ClassTerms {
    let class_exclusions = |(index, other): (usize, &Class)| {
        let both_agree = class.shares_with(&other.name) && other.shares_with(&class.name);
        (!both_agree).then_some(ClassId::from_index(index))
    };
    ClassTerms {
        engine: class.engine,
        kv_cache_limit: class.limits.kv_cache,
        queue_limit: class.limits.queue,
        refuses_unknown_load: class.limits.unknown_load == UnknownLoadRule::Refuse,
        isolation: class.isolation,
        compute: class.compute,
        max_time_per_token: class.latency_limits().time_per_token,
        confined: class.pools.is_some(),
        class_exclusions: classes
            .iter()
            .enumerate()
            .filter_map(class_exclusions)
            .collect(),
        borrows: class.eviction == Preemptibility::ForHigherPriority
            && classes.iter().any(|lender| {
                lender.sleeping == SleepingRule::Lend || lender.unused == UnusedRule::Lend
            }),
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Deref for Policy {
    type Target = Settings;
    fn deref(&self) -> &Settings {
        &self.settings
    }
}

impl DerefMut for Policy {
    fn deref_mut(&mut self) -> &mut Settings {
        &mut self.settings
    }
}

impl Default for Policy {
    /// Right for a new user: a pod that requires exclusive GPUs gets them, a pod of negative priority may be evicted, and every
    /// other pod is a service that is never evicted.
    fn default() -> Self {
        let without_classes = Self {
            version: 0,
            digest: Digest::default(),
            settings: Settings::default(),
            classes: Vec::new(),
            terms: Vec::new(),
            tenants: Vec::new(),
            tenants_by_namespace: BTreeMap::new(),
            tenant_patterns: Vec::new(),
            pools: Vec::new(),
            classes_by_pool: Vec::new(),
            classes_outside_pools: ClassSet::ALL,
            namespace_selections: NamespaceSelections::default(),
            open: BTreeSet::new(),
            closed_classes: ClassSet::NONE,
        };
        without_classes
            .with_classes(built_in_classes())
            .expect("the built-in classes are valid")
    }
}

/// `dedicated`, `opportunistic`, `batch` and, for all else, `serving`.
pub fn built_in_classes() -> Vec<Class> {
    vec![
        Class {
            matches: Match {
                sharing: Some(Sharing::Exclusive),
                priority: Some(0..=i32::MAX),
                ..Match::default()
            },
            limits: ClassLimits::default(),
            ..Class::new("dedicated")
        },
        Class {
            matches: Match {
                priority: Some(i32::MIN..=-1),
                ..Match::default()
            },
            eviction: Preemptibility::ForHigherPriority,
            engine: false,
            // If the engines have little to spare, opportunistic pods would slow them down.
            limits: ClassLimits {
                kv_cache: Percent::new(80),
                queue: Some(8),
                ..ClassLimits::default()
            },
            ..Class::new("opportunistic")
        },
        Class {
            matches: Match {
                priority_classes: vec!["stowage-batch".into()],
                ..Match::default()
            },
            engine: false,
            ..Class::new("batch")
        },
        Class::new("serving"),
    ]
}

#[cfg(test)]
mod tests;
