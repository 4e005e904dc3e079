//! Checks expressions over labels and selectors of namespaces: values where the operator takes them, and labels that some object
//! can have.

use super::label_sets::AllowedLabels;
use super::span;
use crate::diagnostic::{Diagnostic, quoted};
use crate::tree::YamlNode;
use stowage_scheduling::policy::{LabelExpression, LabelOperator, Match, NamespaceSelector};

/// The labels of a class's pods. `entry` is its `match`.
pub fn check_pod_labels(matches: &Match, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    check_expressions(&matches.match_expressions, entry, found);
    check_contradiction(&AllowedLabels::for_pods(matches), entry, "pod", found);
}

/// The labels of namespaces. `entry` is the class's `match`, or the tenant.
pub(crate) fn check_namespace_selector(
    selector: Option<&NamespaceSelector>,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let (Some(selector), Some(entry)) = (selector, entry.get("namespaceSelector")) else {
        return;
    };
    check_expressions(&selector.match_expressions, entry, found);
    check_contradiction(
        &AllowedLabels::for_namespaces(selector),
        entry,
        "namespace",
        found,
    );
    if *selector == NamespaceSelector::default() {
        found.push(
            Diagnostic::error("empty-condition", entry.span, "`namespaceSelector` says nothing of a namespace")
                .help("give it `matchLabels` or `matchExpressions`, or take it away: `namespaces: ['*']` is any namespace"),
        );
    }
}

fn check_expressions(all: &[LabelExpression], entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let Some(list) = entry.get("matchExpressions") else {
        return;
    };
    if list.items().is_empty() {
        found.push(
            Diagnostic::error("empty-condition", list.span, "`matchExpressions` is empty")
                .help("take the line away, or name a `key` and an `operator`"),
        );
    }
    for (expression, node) in all.iter().zip(list.items()) {
        let (operator, count) = (expression.operator, expression.values.len());
        if operator.has_values() == (count > 0) {
            continue;
        }
        let word = node
            .get("operator")
            .and_then(YamlNode::text)
            .unwrap_or_default();
        let (message, help) = match operator {
            LabelOperator::In | LabelOperator::NotIn => (
                format!("`{word}` has no values"),
                format!("add `values: [...]`: `{word}` compares with one or more"),
            ),
            LabelOperator::Exists | LabelOperator::DoesNotExist => (
                format!("`{word}` has values"),
                format!("take `values` away, or write `In`: `{word}` compares with none"),
            ),
        };
        found.push(
            Diagnostic::error("selector-values", span(node, &["operator"]), message).help(help),
        );
    }
}

fn check_contradiction(
    allowed: &AllowedLabels<'_>,
    entry: &YamlNode,
    of: &str,
    found: &mut Vec<Diagnostic>,
) {
    let Some(key) = allowed.impossible_key() else {
        return;
    };
    // `In` without values is reported as such.
    if found
        .last()
        .is_some_and(|last| last.code == "selector-values")
    {
        return;
    }
    let message = format!(
        "no {of} has a label {} that meets all of these conditions",
        quoted(key)
    );
    found.push(
        Diagnostic::error("no-pod-matches", entry.span, message)
            .help("take one of them away: all conditions must hold for one object"),
    );
}
