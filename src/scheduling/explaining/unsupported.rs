//! What the planner does not support of a pending pod: on such nodes it evicts no pod for it, and nominates none.

use super::facts::Facts;
use crate::kube_filters::FilterVerdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A rule that the planner does not support: on these nodes it evicts no pod for this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnsupportedPart {
    /// A short name, as in docs/inside/planner.md.
    pub rule: String,
    pub text: String,
    pub nodes: u32,
}

/// The unsupported rules of a pending pod, in order of their names, with the number of nodes of each.
pub fn unsupported(facts: &Facts) -> Vec<UnsupportedPart> {
    let mut found = BTreeMap::new();
    for verdict in facts.filter_verdicts.values() {
        if let FilterVerdict::Unsupported(rule) = verdict {
            let new = || UnsupportedPart {
                rule: rule.code().into(),
                text: rule.to_string(),
                nodes: 0,
            };
            found.entry(rule.code()).or_insert_with(new).nodes += 1;
        }
    }
    found.into_values().collect()
}
