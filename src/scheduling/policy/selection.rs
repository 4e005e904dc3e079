//! Patterns of names, and expressions over labels: how a class and a tenant say which namespaces and labels they mean.
//!
//! Expressions follow Kubernetes' `labels.Requirement`, in the form in which manifests write it. A form that means nothing, such
//! as `In` without values, takes nothing here; `policy_file` refuses it where it is written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Any text, empty or not, in a pattern.
const WILDCARD: u8 = b'*';

/// Whether a text is a pattern: anything else means itself.
pub fn is_pattern(text: &str) -> bool {
    text.as_bytes().contains(&WILDCARD)
}

/// Whether a pattern takes a name. `*` takes any text, every other character itself. Linear in the product of the lengths at
/// worst, and both are names.
///
/// If `name` is a pattern itself, the answer is whether `pattern` takes all that it takes: no name contains `*`, so that only a
/// `*` of `pattern` takes one.
pub fn pattern_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut pattern_index, mut name_index) = (0, 0);
    // The last `*`, and where in the name the rest of the pattern was tried.
    let mut retry: Option<(usize, usize)> = None;
    while name_index < name.len() {
        match pattern.get(pattern_index) {
            Some(&WILDCARD) => {
                retry = Some((pattern_index, name_index));
                pattern_index += 1;
            }
            Some(c) if *c == name[name_index] => {
                (pattern_index, name_index) = (pattern_index + 1, name_index + 1)
            }
            _ => match &mut retry {
                Some((star, tried)) => {
                    *tried += 1;
                    (pattern_index, name_index) = (*star + 1, *tried);
                }
                None => return false,
            },
        }
    }
    pattern[pattern_index..].iter().all(|c| *c == WILDCARD)
}

/// Whether some name is taken by both patterns.
pub fn patterns_overlap(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    // Whether the first `i` characters of one and the first `j` of the other can take the same text, row by row.
    let mut previous_row: Vec<bool> = Vec::new();
    for i in 0..=a.len() {
        let mut row = vec![false; b.len() + 1];
        for j in 0..=b.len() {
            let (up, left) = (i > 0 && previous_row[j], j > 0 && row[j - 1]);
            row[j] = match (
                i.checked_sub(1).map(|i| a[i]),
                j.checked_sub(1).map(|j| b[j]),
            ) {
                (None, None) => true,
                // It takes nothing, or what the other ends with.
                (Some(WILDCARD), _) | (_, Some(WILDCARD)) => up || left,
                (Some(c), Some(d)) => c == d && previous_row[j - 1],
                _ => false,
            };
        }
        previous_row = row;
    }
    previous_row.last().copied().unwrap_or_default()
}

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LabelExpression {
    /// The label's key.
    #[schemars(extend("format" = "qualified-name"))]
    pub key: String,
    pub operator: LabelOperator,
    /// For `In` and `NotIn`: one or more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("items" = {"format": "label-value", "type": "string"}))]
    pub values: Vec<String>,
}

/// What a label's value must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LabelOperator {
    /// One of the values.
    In,
    /// None of the values, or the label is missing.
    NotIn,
    /// Any, but the label is there.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

impl LabelExpression {
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            LabelOperator::In => value.is_some_and(|value| self.values.contains(value)),
            LabelOperator::NotIn => value.is_none_or(|value| !self.values.contains(value)),
            LabelOperator::Exists => value.is_some(),
            LabelOperator::DoesNotExist => value.is_none(),
        }
    }
}

/// As `kubectl` writes a selector: `tier in (a, b)`, `!tier`.
impl fmt::Display for LabelExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            operator,
            values,
        } = self;
        match operator {
            LabelOperator::In => write!(f, "{key} in ({})", values.join(", ")),
            LabelOperator::NotIn => write!(f, "{key} notin ({})", values.join(", ")),
            LabelOperator::Exists => f.write_str(key),
            LabelOperator::DoesNotExist => write!(f, "!{key}"),
        }
    }
}

impl LabelOperator {
    /// Whether values belong to it.
    pub fn has_values(self) -> bool {
        matches!(self, Self::In | Self::NotIn)
    }
}

/// Namespaces by their labels: all conditions must hold. While the labels of a namespace are unknown, it takes it not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct NamespaceSelector {
    /// With all of these labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    #[schemars(extend("additionalProperties" = {"format": "label-value", "type": "string"}))]
    pub match_labels: BTreeMap<String, String>,
    /// With labels that meet all of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelExpression>,
}

impl NamespaceSelector {
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        has_all_labels(&self.match_labels, labels)
            && self
                .match_expressions
                .iter()
                .all(|expression| expression.matches(labels))
    }
}

/// Whether each of the `required` labels is among `labels`.
pub(crate) fn has_all_labels(
    required: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> bool {
    required
        .iter()
        .all(|(key, value)| labels.get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All texts of four letters at most, of which a pattern is evaluated one by one.
    fn texts() -> Vec<String> {
        let mut all = vec![String::new()];
        for length in 0..4 {
            let longest: Vec<String> = all
                .iter()
                .filter(|text| text.len() == length)
                .cloned()
                .collect();
            all.extend(
                longest
                    .iter()
                    .flat_map(|text| ["a", "b"].map(|letter| format!("{text}{letter}"))),
            );
        }
        all
    }

    /// Whether the pattern matches, by trying every length of what each `*` takes.
    fn takes_slowly(pattern: &str, name: &str) -> bool {
        match pattern.strip_prefix('*') {
            Some(rest) => (0..=name.len()).any(|cut| takes_slowly(rest, &name[cut..])),
            None if pattern.is_empty() => name.is_empty(),
            None => name.starts_with(&pattern[..1]) && takes_slowly(&pattern[1..], &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn a_pattern_takes_what_trying_every_length_takes(pattern in "[ab*]{0,5}", name in "[ab]{0,6}") {
            prop_assert_eq!(pattern_matches(&pattern, &name), takes_slowly(&pattern, &name));
        }

        #[test]
        fn a_pattern_that_takes_another_takes_all_that_this_takes(wide in "[ab*]{0,4}", narrow in "[ab*]{0,4}") {
            let all = texts();
            if pattern_matches(&wide, &narrow) {
                prop_assert!(all.iter().all(|text| !pattern_matches(&narrow, text) || pattern_matches(&wide, text)));
            }
        }

        #[test]
        fn two_patterns_overlap_if_a_text_is_found_that_both_take(a in "[ab*]{0,3}", b in "[ab*]{0,3}") {
            // Each has two letters at most between its `*`, or three and no `*`: a text of four is enough.
            let found = texts().iter().any(|text| pattern_matches(&a, text) && pattern_matches(&b, text));
            prop_assert_eq!(patterns_overlap(&a, &b), found);
        }
    }
}
