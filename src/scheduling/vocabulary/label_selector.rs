//! Label selectors: which labels a set of requirements takes.
//!
//! What kube-scheduler, disruption budgets and affinities require of labels, once. The rules are Kubernetes' `labels.Requirement`; how a
//! null or unreadable selector counts is decided by the code that reads one, because it differs by use. Nothing here knows
//! whose labels they are.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// All of its requirements must hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Selector {
    /// A null selector: takes no labels at all, not even none.
    Nothing,
    /// With no requirements it takes everything.
    All(Vec<Requirement>),
}

/// What one key of the labels must be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Requirement {
    pub key: String,
    pub rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Rule {
    In(BTreeSet<String>),
    /// A missing key is in no set.
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
    /// A label that is no whole number is neither above nor below.
    Above(i64),
    Below(i64),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableRule {
    #[error(
        "the operator of {key} is {operator:?}; there are In, NotIn, Exists and DoesNotExist, and for nodes Gt and Lt"
    )]
    Operator { key: String, operator: String },
    #[error("{key} has {count} values after {operator}, which takes {expected}")]
    Values {
        key: String,
        operator: String,
        count: usize,
        expected: &'static str,
    },
    #[error("{key} is compared with {value:?}; Gt and Lt take a whole number")]
    Number { key: String, value: String },
    #[error("matchFields does not support {key}; it takes metadata.name with In or NotIn")]
    Field { key: String },
}

impl Selector {
    pub const EVERYTHING: Self = Self::All(Vec::new());

    /// The selector of `matchLabels`.
    pub fn from_labels(labels: &BTreeMap<String, String>) -> Self {
        Self::All(
            labels
                .iter()
                .map(|(key, value)| Requirement::equals(key, value))
                .collect(),
        )
    }

    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        match self {
            Self::Nothing => false,
            Self::All(requirements) => requirements
                .iter()
                .all(|requirement| requirement.holds_in(labels)),
        }
    }
}

impl Requirement {
    pub fn equals(key: &str, value: &str) -> Self {
        Self {
            key: key.into(),
            rule: Rule::In(BTreeSet::from([value.to_owned()])),
        }
    }

    /// Without values it holds nowhere.
    pub fn one_of(key: &str, values: &[String]) -> Self {
        Self {
            key: key.into(),
            rule: Rule::In(values.iter().cloned().collect()),
        }
    }

    /// Reads `key`, `operator`, `values` as Kubernetes writes them.
    pub fn parse(key: &str, operator: &str, values: &[String]) -> Result<Self, UnreadableRule> {
        let check_count = |is_right: bool, expected| match is_right {
            true => Ok(()),
            false => Err(UnreadableRule::Values {
                key: key.into(),
                operator: operator.into(),
                count: values.len(),
                expected,
            }),
        };
        let set = || {
            check_count(!values.is_empty(), "one or more")
                .map(|()| values.iter().cloned().collect())
        };
        let number =
            || check_count(values.len() == 1, "one").and_then(|()| whole_number(key, &values[0]));
        let rule = match operator {
            "In" => Rule::In(set()?),
            "NotIn" => Rule::NotIn(set()?),
            "Exists" => check_count(values.is_empty(), "none").map(|()| Rule::Exists)?,
            "DoesNotExist" => {
                check_count(values.is_empty(), "none").map(|()| Rule::DoesNotExist)?
            }
            "Gt" => Rule::Above(number()?),
            "Lt" => Rule::Below(number()?),
            _ => {
                return Err(UnreadableRule::Operator {
                    key: key.into(),
                    operator: operator.into(),
                });
            }
        };
        Ok(Self {
            key: key.into(),
            rule,
        })
    }

    pub fn holds_in(&self, labels: &BTreeMap<String, String>) -> bool {
        self.rule
            .holds_for(labels.get(&self.key).map(String::as_str))
    }
}

impl Rule {
    /// Whether it holds for the key's value, or for its absence.
    pub fn holds_for(&self, value: Option<&str>) -> bool {
        let number = || value.and_then(|value| value.parse::<i64>().ok());
        match self {
            Self::In(set) => value.is_some_and(|value| set.contains(value)),
            Self::NotIn(set) => value.is_none_or(|value| !set.contains(value)),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::Above(bound) => number().is_some_and(|number| number > *bound),
            Self::Below(bound) => number().is_some_and(|number| number < *bound),
        }
    }
}

fn whole_number(key: &str, value: &str) -> Result<i64, UnreadableRule> {
    value.parse().map_err(|_| UnreadableRule::Number {
        key: key.into(),
        value: value.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(operator: &str, values: &[&str]) -> Rule {
        let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        Requirement::parse("key", operator, &values).unwrap().rule
    }

    #[test]
    fn each_operator_reads_a_value_and_its_absence_as_kubernetes_does() {
        for (operator, values, held, not_held) in [
            (
                "In",
                &["a", "b"][..],
                &[Some("a"), Some("b")][..],
                &[Some("c"), Some(""), None][..],
            ),
            (
                "NotIn",
                &["a", "b"],
                &[Some("c"), Some(""), None],
                &[Some("a"), Some("b")],
            ),
            ("Exists", &[], &[Some("a"), Some("")], &[None]),
            ("DoesNotExist", &[], &[None], &[Some("a"), Some("")]),
            (
                "Gt",
                &["7"],
                &[Some("8"), Some("100")],
                &[Some("7"), Some("-8"), Some("x"), Some("8.5"), None],
            ),
            (
                "Lt",
                &["7"],
                &[Some("6"), Some("-100")],
                &[Some("7"), Some("8"), Some(""), None],
            ),
        ] {
            let rule = rule(operator, values);
            assert!(
                held.iter().all(|value| rule.holds_for(*value)),
                "{operator}"
            );
            assert!(
                not_held.iter().all(|value| !rule.holds_for(*value)),
                "{operator}"
            );
        }
    }

    #[test]
    fn an_unreadable_rule_says_which_key_and_what_would_be_right() {
        let parse = |operator: &str, values: &[&str]| {
            let values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
            Requirement::parse("disk", operator, &values)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            parse("Near", &[]),
            "the operator of disk is \"Near\"; there are In, NotIn, Exists and DoesNotExist, and for nodes Gt and Lt"
        );
        assert_eq!(
            parse("In", &[]),
            "disk has 0 values after In, which takes one or more"
        );
        assert_eq!(
            parse("Exists", &["a"]),
            "disk has 1 values after Exists, which takes none"
        );
        assert_eq!(
            parse("Gt", &["1", "2"]),
            "disk has 2 values after Gt, which takes one"
        );
        assert_eq!(
            parse("Lt", &["ten"]),
            "disk is compared with \"ten\"; Gt and Lt take a whole number"
        );
    }

    #[test]
    fn an_empty_selector_takes_everything_and_a_null_one_nothing() {
        let (none, some) = (
            BTreeMap::new(),
            BTreeMap::from([("app".to_owned(), "a".to_owned())]),
        );
        assert!(Selector::EVERYTHING.matches(&none) && Selector::EVERYTHING.matches(&some));
        assert!(!Selector::Nothing.matches(&none) && !Selector::Nothing.matches(&some));
    }

    #[test]
    fn all_requirements_must_hold() {
        let selector = Selector::from_labels(&BTreeMap::from([
            ("app".to_owned(), "a".to_owned()),
            ("tier".to_owned(), "b".to_owned()),
        ]));
        let labels = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        assert!(selector.matches(&labels(&[("app", "a"), ("tier", "b"), ("other", "c")])));
        assert!(!selector.matches(&labels(&[("app", "a")])));
    }
}
