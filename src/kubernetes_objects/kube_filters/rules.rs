//! Taints and tolerations, and affinities to nodes and to other pods.
//!
//! Preferences filter nothing and are left out.

use super::MAX_RULES;
use crate::disruption_budget::parse_selector;
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodAffinityTerm, PodSpec,
    Taint as ApiTaint, Toleration as ApiToleration,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::kube_filters::node::{
    NodeTerm, Taint, TaintEffect, Toleration, TolerationRule,
};
use stowage_scheduling::kube_filters::requirements::{
    AntiAffinity, NamespaceScope, UnsupportedRule,
};
use stowage_scheduling::vocabulary::label_selector::{Requirement, Rule, Selector, UnreadableRule};

/// The only field of a node that an affinity can name.
const NODE_NAME: &str = "metadata.name";

/// A node's taint; `None` for an effect that filters no pods.
pub fn taint(found: &ApiTaint) -> Option<Taint> {
    let value = found.value.clone().unwrap_or_default();
    Some(Taint {
        key: found.key.clone(),
        value,
        effect: effect(&found.effect)?,
    })
}

/// A pod's toleration; `None` for one that, as far as it is understood, tolerates nothing.
pub fn toleration(found: &ApiToleration) -> Option<Toleration> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let rule = match found.operator.as_deref() {
        None | Some("" | "Equal") => TolerationRule::Equal(text(&found.value)),
        Some("Exists") => TolerationRule::Exists,
        Some(_) => return None,
    };
    let effect = match found.effect.as_deref() {
        None | Some("") => None,
        Some(named) => Some(effect(named)?),
    };
    Some(Toleration {
        key: text(&found.key),
        rule,
        effect,
    })
}

/// The pod's required node affinity. With a term that cannot be parsed the set of matching nodes is unknown.
pub fn node_affinity(spec: &PodSpec) -> (Option<Vec<NodeTerm>>, Option<UnsupportedRule>) {
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|node| {
        node.required_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let Some(required) = required else {
        return (None, None);
    };
    match node_terms(required) {
        Ok(terms) => (Some(terms), None),
        Err(_) => (None, Some(UnsupportedRule::Unreadable)),
    }
}

/// Terms of which a node must match one.
pub(crate) fn node_terms(selector: &NodeSelector) -> Result<Vec<NodeTerm>, UnreadableRule> {
    selector.node_selector_terms.iter().map(node_term).collect()
}

pub(crate) fn requires_inter_pod_affinity(spec: &PodSpec) -> bool {
    requires_pod_affinity(spec) || anti_affinity_terms(spec).next().is_some()
}

pub(crate) fn requires_pod_affinity(spec: &PodSpec) -> bool {
    let near = spec
        .affinity
        .iter()
        .flat_map(|affinity| &affinity.pod_affinity);
    let mut near = near
        .flat_map(|near| &near.required_during_scheduling_ignored_during_execution)
        .flatten();
    near.next().is_some()
}

/// The pod's required pod anti-affinity. With too many rules it may exclude any pod, each topology once.
pub fn anti_affinities(pod: &Pod) -> Arc<[Arc<AntiAffinity>]> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let terms = || pod.spec.iter().flat_map(anti_affinity_terms);
    if pod
        .spec
        .as_ref()
        .is_none_or(|spec| count_anti_affinity_rules(spec) <= MAX_RULES)
    {
        return terms()
            .map(|term| Arc::new(anti_affinity(term, namespace)))
            .collect();
    }
    let is_own = |term: &PodAffinityTerm| {
        term.namespace_selector.is_none()
            && term.namespaces.iter().flatten().all(|one| one == namespace)
    };
    let scope = match terms().all(is_own) {
        true => NamespaceScope::Of(BTreeSet::from([namespace.to_owned()])),
        false => NamespaceScope::Selected,
    };
    let topologies: BTreeSet<&String> = terms().map(|term| &term.topology_key).collect();
    let any = |topology: &String| AntiAffinity {
        scope: scope.clone(),
        selector: Selector::EVERYTHING,
        topology: topology.clone(),
    };
    topologies
        .into_iter()
        .map(|topology| Arc::new(any(topology)))
        .collect()
}

/// Labels, names and values in the pod's required pod anti-affinity.
pub(crate) fn count_anti_affinity_rules(spec: &PodSpec) -> usize {
    let in_term = |term: &PodAffinityTerm| {
        let selector = term.label_selector.as_ref();
        let labels = selector
            .and_then(|selector| selector.match_labels.as_ref())
            .map_or(0, BTreeMap::len);
        let expressions = selector
            .iter()
            .flat_map(|selector| &selector.match_expressions)
            .flatten();
        let values = expressions
            .map(|one| 1 + one.values.as_ref().map_or(0, Vec::len))
            .sum::<usize>();
        1 + labels + values + term.namespaces.as_ref().map_or(0, Vec::len)
    };
    anti_affinity_terms(spec).map(in_term).sum()
}

fn anti_affinity_terms(spec: &PodSpec) -> impl Iterator<Item = &PodAffinityTerm> {
    let far = spec
        .affinity
        .iter()
        .flat_map(|affinity| &affinity.pod_anti_affinity);
    far.flat_map(|far| &far.required_during_scheduling_ignored_during_execution)
        .flatten()
}

/// A required anti-affinity term. A selector that cannot be parsed may match any pod.
fn anti_affinity(term: &PodAffinityTerm, own_namespace: &str) -> AntiAffinity {
    let named: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
    let scope = match (&term.namespace_selector, named.is_empty()) {
        (Some(_), _) => NamespaceScope::Selected,
        (None, true) => NamespaceScope::Of(BTreeSet::from([own_namespace.to_owned()])),
        (None, false) => NamespaceScope::Of(named),
    };
    let found = term.label_selector.as_ref();
    let selector = found.map_or(Selector::Nothing, |found| {
        parse_selector(found).unwrap_or(Selector::EVERYTHING)
    });
    AntiAffinity {
        scope,
        selector,
        topology: term.topology_key.clone(),
    }
}

fn node_term(term: &NodeSelectorTerm) -> Result<NodeTerm, UnreadableRule> {
    let labels = term
        .match_expressions
        .iter()
        .flatten()
        .map(requirement)
        .collect::<Result<_, _>>()?;
    let name = term
        .match_fields
        .iter()
        .flatten()
        .map(name_rule)
        .collect::<Result<_, _>>()?;
    Ok(NodeTerm { labels, name })
}

fn name_rule(rule: &NodeSelectorRequirement) -> Result<Rule, UnreadableRule> {
    let Requirement { key, rule } = requirement(rule)?;
    match (&*key, &rule) {
        (NODE_NAME, Rule::In(_) | Rule::NotIn(_)) => Ok(rule),
        _ => Err(UnreadableRule::Field { key }),
    }
}

fn requirement(rule: &NodeSelectorRequirement) -> Result<Requirement, UnreadableRule> {
    Requirement::parse(
        &rule.key,
        &rule.operator,
        rule.values.as_deref().unwrap_or_default(),
    )
}

fn effect(name: &str) -> Option<TaintEffect> {
    match name {
        "NoSchedule" => Some(TaintEffect::NoSchedule),
        "NoExecute" => Some(TaintEffect::NoExecute),
        _ => None,
    }
}
