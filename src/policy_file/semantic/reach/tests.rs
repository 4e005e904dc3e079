//! The answer "never" against a search: of many pods that were tried, none may reach a class that is said to be unreachable.

use super::*;
use proptest::prelude::*;
use stowage_scheduling::policy::{Class, ExpressionPod, LabelExpression, NamespaceSelector};
use stowage_scheduling::vocabulary::classification::PodTraits;

fn draft(matches: Match) -> DraftClass {
    DraftClass {
        class: Class {
            matches,
            ..Class::new("x")
        },
        written_index: Some(0),
    }
}

fn names(all: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
    proptest::sample::subsequence(all, 0..=all.len())
        .prop_map(|some| some.into_iter().map(str::to_owned).collect())
}

fn any_match() -> impl Strategy<Value = Match> {
    let sharing = proptest::option::weighted(
        0.3,
        proptest::sample::select(vec![Sharing::Exclusive, Sharing::Shared]),
    );
    let priority = proptest::option::weighted(
        0.5,
        (-3i32..3, -3i32..3).prop_map(|(a, b)| a.min(b)..=a.max(b)),
    );
    let labels = proptest::option::weighted(0.3, proptest::sample::select(vec!["1", "2"]));
    let namespaces = names(&["a", "b", "*", "a*", "*b"]);
    let expression = proptest::option::weighted(0.4, expression());
    let selector = proptest::option::weighted(0.3, expression_of("n"));
    (
        sharing,
        priority,
        names(&["p", "q"]),
        namespaces,
        labels,
        names(&["r", "s"]),
        expression,
        selector,
    )
        .prop_map(
            |(
                sharing,
                priority,
                priority_classes,
                namespaces,
                label,
                resources,
                expression,
                selector,
            )| {
                Match {
                    match_expressions: expression.into_iter().collect(),
                    namespace_selector: selector.map(|expression| NamespaceSelector {
                        match_expressions: vec![expression],
                        ..NamespaceSelector::default()
                    }),
                    sharing,
                    priority,
                    priority_classes,
                    namespaces,
                    labels: label
                        .map(|value| ("l".to_owned(), value.to_owned()))
                        .into_iter()
                        .collect(),
                    resources,
                    expression: None,
                }
            },
        )
}

fn expression() -> impl Strategy<Value = LabelExpression> {
    expression_of("l")
}

fn expression_of(key: &'static str) -> impl Strategy<Value = LabelExpression> {
    use stowage_scheduling::policy::LabelOperator::{DoesNotExist, Exists, In, NotIn};
    let values = proptest::sample::subsequence(vec!["1", "2"], 1..=2);
    (
        proptest::sample::select(vec![In, NotIn, Exists, DoesNotExist]),
        values,
    )
        .prop_map(move |(operator, values)| {
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
        })
}

/// The labels that the namespace of a pod may have; `None` if they are unknown.
fn namespaces() -> [Option<BTreeMap<String, String>>; 4] {
    let labelled = |value: &str| Some(BTreeMap::from([("n".to_owned(), value.to_owned())]));
    [None, Some(BTreeMap::new()), labelled("1"), labelled("2")]
}

/// One of every kind of pod that the matches above can tell apart.
fn pods() -> Vec<PodTraits> {
    let mut pods = Vec::new();
    for namespace in ["a", "b", "ab"] {
        for priority_class in ["", "p", "q"] {
            for priority in -4..=3 {
                for sharing in [Sharing::Exclusive, Sharing::Shared] {
                    for label in [None, Some("1"), Some("2")] {
                        for resources in [&[] as &[&str], &["r"], &["s"], &["r", "s"]] {
                            pods.push(PodTraits {
                                namespace: namespace.into(),
                                priority_class: priority_class.into(),
                                priority,
                                sharing,
                                labels: label
                                    .map(|value| ("l".into(), value.into()))
                                    .into_iter()
                                    .collect(),
                                resources: resources.iter().map(|&name| name.into()).collect(),
                                ..PodTraits::default()
                            });
                        }
                    }
                }
            }
        }
    }
    pods
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_class_that_is_said_to_be_unreachable_takes_no_pod(
        earlier in proptest::collection::vec(any_match(), 1..6),
        last in any_match(),
    ) {
        let earlier: Vec<DraftClass> = earlier.into_iter().map(draft).collect();
        if takers(&earlier, &last).is_some() {
            for pod in pods() {
                let subject = ExpressionPod::new(&pod);
                for labels in namespaces() {
                    let selects = |one: &Match| {
                        one.namespace_selector.as_ref().zip(labels.as_ref()).is_some_and(|(one, labels)| one.matches(labels))
                    };
                    let accepts = |one: &Match| one.accepts(&subject, selects(one));
                    let taken = earlier.iter().any(|one| accepts(&one.class.matches));
                    prop_assert!(taken || !accepts(&last), "{pod:?} in {labels:?}");
                }
            }
        }
    }
}

#[test]
fn several_classes_together_can_take_all() {
    let of = |namespace: &str| Match {
        namespaces: vec![namespace.into()],
        ..Match::default()
    };
    let both = Match {
        namespaces: vec!["a".into(), "b".into()],
        ..Match::default()
    };
    assert_eq!(
        takers(&[draft(of("a")), draft(of("b"))], &both),
        Some([0, 1].into())
    );
    assert_eq!(takers(&[draft(of("a"))], &both), None);
    let range = |range| Match {
        priority: Some(range),
        ..Match::default()
    };
    assert_eq!(
        takers(
            &[draft(range(i32::MIN..=-1)), draft(range(0..=i32::MAX))],
            &of("a")
        ),
        Some([0, 1].into())
    );
    assert_eq!(
        takers(
            &[draft(range(i32::MIN..=-1)), draft(range(1..=i32::MAX))],
            &of("a")
        ),
        None
    );
}
