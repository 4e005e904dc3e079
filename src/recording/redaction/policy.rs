//! A policy without names. Conditions over names that are no comparisons cannot be asked of pseudonyms: what a pattern takes is
//! listed, and whether a CEL expression holds is a label of each pod.

use super::serializer::Names;
use std::collections::BTreeMap;
use stowage_scheduling::policy::selection::is_pattern;
use stowage_scheduling::policy::{
    Class, Expression, LabelExpression, Match, ModelRules, NamespaceSelector, Policy, PolicyError,
    Pool, SpareRule, Tenant,
};

/// Replacement of the names and conditions of a policy.
pub(crate) trait PolicyNames: Names {
    /// Label, with the value `true`, of the pods for which the expression holds; `None` keeps the expression.
    fn expression(&self, expression: &Expression) -> Option<String>;

    /// Patterns that together match the pseudonyms of the namespaces that this pattern matches.
    fn namespace_pattern(&self, pattern: &str) -> Vec<String>;

    /// Pseudonyms of the extended resources that this pattern matches.
    fn resource_pattern(&self, pattern: &str) -> Vec<String>;
}

/// A name that no namespace has.
const NO_NAMESPACE: &str = "-";
/// The value of a label that stands for an expression that holds.
pub(crate) const HOLDS: &str = "true";

/// The policy with pseudonyms. Its version, digest and windows stay.
pub fn redacted(policy: &Policy, names: &dyn PolicyNames) -> Result<Policy, PolicyError> {
    let renamer = PolicyRenamer { names };
    let mut renamed = Policy::default();
    (renamed.version, renamed.digest) = (policy.version, policy.digest);
    renamed.settings = policy.settings.clone();
    let settings = &mut renamed.settings;
    for SpareRule { pool, .. } in &mut settings.planning.spare {
        *pool = renamer.optional(pool);
    }
    settings.planning.scheduler_names = renamer.all(&settings.planning.scheduler_names);
    settings.dra.gpu_drivers = renamer.all(&settings.dra.gpu_drivers);
    for patterns in [
        &mut settings.nodes.gpu_resources,
        &mut settings.nodes.harmless_resources,
    ] {
        *patterns = patterns
            .iter()
            .flat_map(|pattern| names.resource_pattern(pattern))
            .collect();
    }
    settings.nodes.ignored_labels = settings
        .nodes
        .ignored_labels
        .iter()
        .map(|key| renamer.key(key))
        .collect();
    settings.autoscaling.models = settings
        .autoscaling
        .models
        .iter()
        .map(|(model, rules)| (renamer.name(model), renamer.model(rules)))
        .collect();
    let renamed = renamed
        .with_classes(
            policy
                .classes()
                .iter()
                .map(|class| renamer.class(class))
                .collect(),
        )?
        .with_tenants(
            policy
                .tenants()
                .iter()
                .map(|tenant| renamer.tenant(tenant))
                .collect(),
        )?
        .with_pools(
            policy
                .pools()
                .iter()
                .map(|pool| renamer.pool(pool))
                .collect(),
        )?;
    Ok(renamed.with_open_windows(policy.open_windows().clone()))
}

struct PolicyRenamer<'a> {
    names: &'a dyn PolicyNames,
}

impl PolicyRenamer<'_> {
    fn name(&self, name: &str) -> String {
        self.names.name(name).into_owned()
    }

    fn key(&self, key: &str) -> String {
        self.names.key(key).into_owned()
    }

    fn all(&self, names: &[String]) -> Vec<String> {
        names.iter().map(|name| self.name(name)).collect()
    }

    fn optional(&self, name: &Option<String>) -> Option<String> {
        name.as_ref().map(|name| self.name(name))
    }

    fn labels(&self, labels: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        labels
            .iter()
            .map(|(key, value)| (self.key(key), self.name(value)))
            .collect()
    }

    fn expressions(&self, expressions: &[LabelExpression]) -> Vec<LabelExpression> {
        let renamed = |LabelExpression {
                           key,
                           operator,
                           values,
                       }: &LabelExpression| LabelExpression {
            key: self.key(key),
            operator: *operator,
            values: self.all(values),
        };
        expressions.iter().map(renamed).collect()
    }

    fn selector(&self, selector: &Option<NamespaceSelector>) -> Option<NamespaceSelector> {
        selector.as_ref().map(|selector| NamespaceSelector {
            match_labels: self.labels(&selector.match_labels),
            match_expressions: self.expressions(&selector.match_expressions),
        })
    }

    /// Pseudonyms of namespaces, for a list that means "any" when it is empty.
    fn narrowed(&self, namespaces: &[String]) -> Vec<String> {
        let renamed = self.namespaces(namespaces);
        match renamed.is_empty() && !namespaces.is_empty() {
            true => vec![NO_NAMESPACE.into()],
            false => renamed,
        }
    }

    fn namespaces(&self, namespaces: &[String]) -> Vec<String> {
        let renamed = |text: &String| match is_pattern(text) {
            true => self.names.namespace_pattern(text),
            false => vec![self.name(text)],
        };
        namespaces.iter().flat_map(renamed).collect()
    }

    fn class(&self, class: &Class) -> Class {
        Class {
            name: self.name(&class.name),
            matches: self.conditions(&class.matches),
            shares_with: class.shares_with.as_ref().map(|names| self.all(names)),
            pools: class.pools.as_ref().map(|names| self.all(names)),
            ..class.clone()
        }
    }

    fn conditions(&self, matches: &Match) -> Match {
        let mut labels = self.labels(&matches.labels);
        let replacement = matches
            .expression
            .as_ref()
            .map(|expression| (expression, self.names.expression(expression)));
        let expression = match replacement {
            Some((expression, None)) => Some(expression.clone()),
            Some((_, Some(label))) => {
                labels.insert(label, HOLDS.into());
                None
            }
            None => None,
        };
        Match {
            namespaces: self.narrowed(&matches.namespaces),
            namespace_selector: self.selector(&matches.namespace_selector),
            labels,
            match_expressions: self.expressions(&matches.match_expressions),
            priority_classes: self.all(&matches.priority_classes),
            priority: matches.priority.clone(),
            resources: matches
                .resources
                .iter()
                .map(|resource| self.key(resource))
                .collect(),
            sharing: matches.sharing,
            expression,
        }
    }

    fn model(&self, rules: &ModelRules) -> ModelRules {
        ModelRules {
            namespaces: self.narrowed(&rules.namespaces),
            ..rules.clone()
        }
    }

    fn tenant(&self, tenant: &Tenant) -> Tenant {
        Tenant {
            name: self.name(&tenant.name),
            namespaces: self.namespaces(&tenant.namespaces),
            namespace_selector: self.selector(&tenant.namespace_selector),
            ..tenant.clone()
        }
    }

    fn pool(&self, pool: &Pool) -> Pool {
        Pool {
            name: self.name(&pool.name),
            selector: self.labels(&pool.selector),
            classes: pool.classes.as_ref().map(|names| self.all(names)),
            ..pool.clone()
        }
    }
}
