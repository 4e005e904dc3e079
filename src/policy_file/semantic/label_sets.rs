//! What conditions on labels allow, key by key: exact, so that "takes all that this takes" and "no label meets both" are certain.

use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::policy::{LabelExpression, LabelOperator, Match, NamespaceSelector};

/// What one label may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AllowedLabel<'a> {
    may_be_missing: bool,
    values: AllowedValues<'a>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowedValues<'a> {
    Only(BTreeSet<&'a str>),
    AllBut(BTreeSet<&'a str>),
}

/// The allowed values of labels, by key; a label with another key may be anything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AllowedLabels<'a>(BTreeMap<&'a str, AllowedLabel<'a>>);

impl<'a> AllowedLabels<'a> {
    /// Labels of the pods that meet `labels` and `matchExpressions`.
    pub fn for_pods(matches: &'a Match) -> Self {
        Self::from_conditions(&matches.labels, &matches.match_expressions)
    }

    /// Labels of the namespaces that the selector matches.
    pub(crate) fn for_namespaces(selector: &'a NamespaceSelector) -> Self {
        Self::from_conditions(&selector.match_labels, &selector.match_expressions)
    }

    fn from_conditions(
        labels: &'a BTreeMap<String, String>,
        expressions: &'a [LabelExpression],
    ) -> Self {
        let equal = labels
            .iter()
            .map(|(key, value)| (key.as_str(), AllowedLabel::exactly(value)));
        let expressed = expressions
            .iter()
            .map(|one| (one.key.as_str(), AllowedLabel::from_expression(one)));
        let mut all: BTreeMap<&str, AllowedLabel<'a>> = BTreeMap::new();
        for (key, allowed) in equal.chain(expressed) {
            match all.get_mut(key) {
                Some(present) => *present = present.intersection(&allowed),
                None => drop(all.insert(key, allowed)),
            }
        }
        Self(all)
    }

    /// Whether all labels that meet `narrower` meet this as well.
    pub fn is_superset(&self, narrower: &Self) -> bool {
        self.0.iter().all(|(key, wide)| match narrower.0.get(key) {
            Some(narrow) => wide.is_superset(narrow),
            None => *wide == AllowedLabel::ANY,
        })
    }

    /// A key of which no value meets all conditions.
    pub fn impossible_key(&self) -> Option<&'a str> {
        self.0
            .iter()
            .find(|(_, allowed)| allowed.is_impossible())
            .map(|(key, _)| *key)
    }

    /// Whether some labels meet both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let both = |(key, one): (&&str, &AllowedLabel<'a>)| {
            other
                .0
                .get(key)
                .is_some_and(|two| one.intersection(two).is_impossible())
        };
        self.impossible_key().is_none()
            && other.impossible_key().is_none()
            && !self.0.iter().any(both)
    }
}

impl<'a> AllowedLabel<'a> {
    const ANY: Self = Self {
        may_be_missing: true,
        values: AllowedValues::AllBut(BTreeSet::new()),
    };

    fn exactly(value: &'a str) -> Self {
        Self {
            may_be_missing: false,
            values: AllowedValues::Only(BTreeSet::from([value])),
        }
    }

    fn from_expression(expression: &'a LabelExpression) -> Self {
        let named = || expression.values.iter().map(String::as_str).collect();
        let (may_be_missing, values) = match expression.operator {
            LabelOperator::In => (false, AllowedValues::Only(named())),
            LabelOperator::NotIn => (true, AllowedValues::AllBut(named())),
            LabelOperator::Exists => (false, AllowedValues::AllBut(BTreeSet::new())),
            LabelOperator::DoesNotExist => (true, AllowedValues::Only(BTreeSet::new())),
        };
        Self {
            may_be_missing,
            values,
        }
    }

    fn intersection(&self, other: &Self) -> Self {
        use AllowedValues::{AllBut, Only};
        let values = match (&self.values, &other.values) {
            (Only(a), Only(b)) => Only(a & b),
            (Only(some), AllBut(not)) | (AllBut(not), Only(some)) => Only(some - not),
            (AllBut(a), AllBut(b)) => AllBut(a | b),
        };
        Self {
            may_be_missing: self.may_be_missing && other.may_be_missing,
            values,
        }
    }

    fn is_superset(&self, narrower: &Self) -> bool {
        use AllowedValues::{AllBut, Only};
        let values = match (&self.values, &narrower.values) {
            (Only(wide), Only(narrow)) => narrow.is_subset(wide),
            (AllBut(not), Only(narrow)) => narrow.is_disjoint(not),
            (AllBut(not), AllBut(left_out)) => not.is_subset(left_out),
            // There is always another value.
            (Only(_), AllBut(_)) => false,
        };
        values && (self.may_be_missing || !narrower.may_be_missing)
    }

    fn is_impossible(&self) -> bool {
        !self.may_be_missing && self.values == AllowedValues::Only(BTreeSet::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn expressions() -> impl Strategy<Value = Vec<LabelExpression>> {
        let operator = proptest::sample::select(vec![
            LabelOperator::In,
            LabelOperator::NotIn,
            LabelOperator::Exists,
            LabelOperator::DoesNotExist,
        ]);
        let values = proptest::sample::subsequence(vec!["x", "y", "z"], 1..=2);
        let one = (proptest::sample::select(vec!["a", "b"]), operator, values).prop_map(
            |(key, operator, values)| {
                let values = values
                    .into_iter()
                    .filter(|_| operator.has_values())
                    .map(str::to_owned)
                    .collect();
                LabelExpression {
                    key: key.into(),
                    operator,
                    values,
                }
            },
        );
        proptest::collection::vec(one, 0..4)
    }

    /// Every label missing, one of the values that are named, or another.
    fn all_labels() -> Vec<BTreeMap<String, String>> {
        let values = [None, Some("x"), Some("y"), Some("z"), Some("other")];
        let labels = |a: Option<&str>, b: Option<&str>| {
            let pairs = [("a", a), ("b", b)].into_iter();
            pairs
                .filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())))
                .collect()
        };
        values
            .iter()
            .flat_map(|a| values.map(|b| labels(*a, b)))
            .collect()
    }

    proptest! {
        #[test]
        fn what_is_said_of_two_sets_of_conditions_is_what_trying_all_labels_shows(
            one in expressions(),
            two in expressions(),
        ) {
            let met = |all: &[LabelExpression], labels: &BTreeMap<String, String>| {
                all.iter().all(|expression| expression.matches(labels))
            };
            let (one, two) = (
                Match { match_expressions: one, ..Match::default() },
                Match { match_expressions: two, ..Match::default() },
            );
            let (wide, narrow) = (AllowedLabels::for_pods(&one), AllowedLabels::for_pods(&two));
            let (one, two) = (&one.match_expressions, &two.match_expressions);
            let tried = all_labels();
            prop_assert_eq!(narrow.impossible_key().is_some(), !tried.iter().any(|labels| met(two, labels)));
            prop_assert_eq!(wide.overlaps(&narrow), tried.iter().any(|labels| met(one, labels) && met(two, labels)));
            if narrow.impossible_key().is_none() {
                let holds = tried.iter().all(|labels| !met(two, labels) || met(one, labels));
                prop_assert_eq!(wide.is_superset(&narrow), holds);
            }
        }
    }
}
