//! A pod's classification: its class, the rule that matched, its tenant, and the policy version.

use super::explanation::{
    ClassPart, Condition, PassedOver, PolicyPart, RequestPart, SparePart, TenantPart,
};
use super::facts::Facts;
use super::pod_access::PodAccess;
use crate::policy::{
    Class, ExpressionPod, LabelExpression, Match, NamespaceSelector, Policy, Preemptibility,
    SpareRule, UnmetCondition,
};
use crate::units::Bytes;
use crate::vocabulary::classification::{ClassId, PodTraits};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use std::ops::RangeInclusive;

pub fn request_part(demand: &Demand) -> RequestPart {
    RequestPart {
        vram_bytes: requested_vram(demand),
        bytes_per_gpu: demand.per_gpu,
        gpus: demand.gpus,
        device_resource: match &demand.ask {
            GpuRequest::Plugin { resource, .. } => Some(resource.to_string()),
            GpuRequest::Vram | GpuRequest::Claims => None,
        },
        sharing: demand.sharing,
        kv_cache_bytes: demand.kv_cache,
        model: demand.model.clone(),
        priority: demand.priority,
        may_preempt: demand.may_preempt,
    }
}

/// The VRAM that the manifest requests; split over several GPUs it is rounded up.
pub(crate) fn requested_vram(demand: &Demand) -> Bytes {
    match demand.traits.vram {
        Bytes::ZERO => demand.vram(),
        requested => requested.min(demand.vram()),
    }
}

pub fn class_part(facts: &Facts) -> ClassPart {
    let (policy, demand) = (&facts.policy, facts.demand());
    let (class, subject) = (
        policy.class(demand.class),
        ExpressionPod::new(&demand.traits),
    );
    let before = (0..demand.class.index()).map(ClassId::from_index);
    let redacted = |condition| match facts.reader {
        PodAccess::All => condition,
        PodAccess::Namespace | PodAccess::Own => redact(condition),
    };
    let mut because: Vec<Condition> = conditions(class, &subject, &demand.traits)
        .into_iter()
        .map(redacted)
        .collect();
    because.extend(
        policy
            .open_window(&class.when)
            .map(|window| window_condition(window.to_string(), "it is open")),
    );
    ClassPart {
        name: class.name.clone(),
        because,
        passed_over: before
            .filter_map(|class| passed_over(policy, class, &subject, &demand.traits))
            .map(|PassedOver { class, unmet }| PassedOver {
                class,
                unmet: redacted(unmet),
            })
            .collect(),
        engine: class.engine,
        kv_cache_limit_percent: class.limits.kv_cache,
        queue_limit: class.limits.queue,
        shares_with: class.shares_with.clone(),
        pools: class.pools.clone(),
        preemptible: class.eviction == Preemptibility::ForHigherPriority,
    }
}

pub fn tenant_part(facts: &Facts) -> Option<TenantPart> {
    let tenant = facts.policy.tenant(facts.demand().tenant?)?;
    Some(TenantPart {
        name: tenant.name.clone(),
        used: facts.used.into(),
        guarantee: tenant.guarantee.into(),
        limit: tenant.ceiling().into(),
        left: facts.allowance.into(),
        borrowing: tenant.borrowing,
        weight: tenant.weight,
        share_millionths: tenant.dominant_share(facts.used, facts.cluster_capacity),
    })
}

/// The GPUs kept free of pods of its class, by rule; empty if its class is not preemptible.
pub fn spare_parts(facts: &Facts) -> Vec<SparePart> {
    let (policy, demand) = (&facts.policy, facts.demand());
    if !policy.is_preemptible(demand.class) || demand.is_allocated_externally() {
        return Vec::new();
    }
    let part = |(rule_index, (rule, free)): (usize, &(SpareRule, Option<u32>))| SparePart {
        rule: rule.to_string(),
        keeps: rule.gpus,
        free: *free,
        kept_from_pod: demand.kept.contains(rule_index),
        window: policy
            .open_window(&rule.when)
            .or(rule.when.first())
            .map(ToString::to_string),
    };
    facts.spare.iter().enumerate().map(part).collect()
}

pub fn policy_part(facts: &Facts) -> PolicyPart {
    let policy = &facts.policy;
    PolicyPart {
        digest: policy.digest.to_string(),
        version: policy.version,
        mode: policy.mode,
    }
}

fn passed_over(
    policy: &Policy,
    class: ClassId,
    subject: &ExpressionPod<'_>,
    traits: &PodTraits,
) -> Option<PassedOver> {
    let (unmet, class) = (policy.unmet_condition(class, subject), policy.class(class));
    let windows = || {
        class
            .when
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("; ")
    };
    let unmet = match unmet {
        Some(unmet) => condition(&class.matches, unmet, subject, traits),
        // It matches, and was passed over all the same: it is closed.
        None => window_condition((!class.when.is_empty()).then(windows)?, "none is open"),
    };
    Some(PassedOver {
        class: class.name.clone(),
        unmet,
    })
}

/// The condition without what may name other pods; readers who may see all pods may see the policy.
fn redact(condition: Condition) -> Condition {
    match &*condition.field {
        "namespaces" | "expression" => Condition {
            wants: "as the policy says".into(),
            ..condition
        },
        _ => condition,
    }
}

/// The condition on the time that the class's windows set.
fn window_condition(wants: String, has: &str) -> Condition {
    Condition {
        field: "when".into(),
        wants,
        has: has.into(),
    }
}

/// All conditions that the class sets.
fn conditions(class: &Class, subject: &ExpressionPod<'_>, traits: &PodTraits) -> Vec<Condition> {
    let matches = &class.matches;
    let set = [
        (UnmetCondition::Sharing, matches.sharing.is_some()),
        (UnmetCondition::Priority, matches.priority.is_some()),
        (
            UnmetCondition::PriorityClass,
            !matches.priority_classes.is_empty(),
        ),
        (UnmetCondition::Namespace, !matches.namespaces.is_empty()),
        (
            UnmetCondition::NamespaceSelector,
            matches.namespace_selector.is_some(),
        ),
        (UnmetCondition::Labels, !matches.labels.is_empty()),
        (
            UnmetCondition::LabelExpressions,
            !matches.match_expressions.is_empty(),
        ),
        (UnmetCondition::Resources, !matches.resources.is_empty()),
        (UnmetCondition::Expression, matches.expression.is_some()),
    ];
    let set = set.into_iter().filter(|(_, is_set)| *is_set);
    set.map(|(which, _)| condition(matches, which, subject, traits))
        .collect()
}

fn condition(
    matches: &Match,
    which: UnmetCondition,
    subject: &ExpressionPod<'_>,
    traits: &PodTraits,
) -> Condition {
    let (field, wants, has) = match which {
        UnmetCondition::Sharing => (
            "sharing",
            matches.sharing.map(sharing_text).unwrap_or_default().into(),
            sharing_text(traits.sharing).into(),
        ),
        UnmetCondition::Priority => (
            "priority",
            matches.priority.as_ref().map(range).unwrap_or_default(),
            traits.priority.to_string(),
        ),
        UnmetCondition::PriorityClass => (
            "priorityClasses",
            any_of(&matches.priority_classes),
            or_none(&traits.priority_class),
        ),
        UnmetCondition::Namespace => (
            "namespaces",
            any_of(&matches.namespaces),
            traits.namespace.clone(),
        ),
        UnmetCondition::NamespaceSelector => (
            "namespaceSelector",
            matches
                .namespace_selector
                .as_ref()
                .map(selector)
                .unwrap_or_default(),
            format!("namespace {}", traits.namespace),
        ),
        UnmetCondition::Labels => labels(matches, traits),
        UnmetCondition::LabelExpressions => expressions(matches, traits),
        UnmetCondition::Resources => {
            let has: Vec<&str> = traits.resources.iter().map(String::as_str).collect();
            (
                "resources",
                any_of(&matches.resources),
                or_none(&has.join(", ")),
            )
        }
        UnmetCondition::Expression | UnmetCondition::ExpressionFailed => {
            expression(matches, subject)
        }
    };
    Condition {
        field: field.into(),
        wants,
        has,
    }
}

/// Names the labels that are missing or different.
fn labels(matches: &Match, traits: &PodTraits) -> (&'static str, String, String) {
    let is_met = |(key, value): &(&String, &String)| traits.labels.get(*key) == Some(*value);
    let (met, unmet): (Vec<_>, Vec<_>) = matches.labels.iter().partition(is_met);
    let meant = if unmet.is_empty() { met } else { unmet };
    let wants: Vec<String> = meant
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let has = meant.iter().map(|(key, _)| match traits.labels.get(*key) {
        Some(value) => format!("{key}={value}"),
        None => format!("no label {key}"),
    });
    (
        "labels",
        wants.join(", "),
        has.collect::<Vec<_>>().join(", "),
    )
}

/// Names the expressions that are not met, or all if they are.
fn expressions(matches: &Match, traits: &PodTraits) -> (&'static str, String, String) {
    let is_met = |expression: &&LabelExpression| expression.matches(&traits.labels);
    let (met, unmet): (Vec<_>, Vec<_>) = matches.match_expressions.iter().partition(is_met);
    let meant = if unmet.is_empty() { met } else { unmet };
    let wants: Vec<String> = meant.iter().map(ToString::to_string).collect();
    let has = meant
        .iter()
        .map(|LabelExpression { key, .. }| match traits.labels.get(key) {
            Some(value) => format!("{key}={value}"),
            None => format!("no label {key}"),
        });
    (
        "matchExpressions",
        wants.join(", "),
        has.collect::<Vec<_>>().join(", "),
    )
}

fn selector(selector: &NamespaceSelector) -> String {
    let labels = selector
        .match_labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"));
    labels
        .chain(selector.match_expressions.iter().map(ToString::to_string))
        .collect::<Vec<_>>()
        .join(", ")
}

fn expression(matches: &Match, subject: &ExpressionPod<'_>) -> (&'static str, String, String) {
    let Some(expression) = &matches.expression else {
        return ("expression", String::new(), String::new());
    };
    let has = match expression.holds_for(subject) {
        Ok(true) => "it is true".into(),
        Ok(false) => "it is false".into(),
        Err(cause) => format!("it fails on this pod: {cause}"),
    };
    ("expression", expression.text().into(), has)
}

pub fn sharing_text(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::Shared => "shared",
        Sharing::Exclusive => "exclusive",
    }
}

fn range(range: &RangeInclusive<i32>) -> String {
    match (*range.start(), *range.end()) {
        (least, i32::MAX) => format!("{least} or more"),
        (i32::MIN, most) => format!("{most} or less"),
        (least, most) => format!("{least} to {most}"),
    }
}

fn any_of(names: &[String]) -> String {
    match names {
        [one] => one.clone(),
        several => format!("any of {}", several.join(", ")),
    }
}

fn or_none(text: &str) -> String {
    if text.is_empty() {
        "none".into()
    } else {
        text.into()
    }
}
