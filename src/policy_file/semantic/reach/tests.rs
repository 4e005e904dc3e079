//! The answer "never" against a search: of many pods that were tried, none may reach a class that is said to be unreachable.

use super::*;
use crate::scheduling::policy::{Class, ExpressionPod};
use crate::scheduling::vocabulary::classification::PodTraits;
use proptest::prelude::*;

fn draft(matches: Match) -> DraftClass {
    DraftClass { class: Class { matches, ..Class::named("x") }, entry: Some(0) }
}

fn names(all: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
    proptest::sample::subsequence(all, 0..=all.len())
        .prop_map(|some| some.into_iter().map(str::to_owned).collect())
}

fn any_match() -> impl Strategy<Value = Match> {
    let sharing =
        proptest::option::weighted(0.3, proptest::sample::select(vec![Sharing::Exclusive, Sharing::Shared]));
    let priority =
        proptest::option::weighted(0.5, (-3i32..3, -3i32..3).prop_map(|(a, b)| a.min(b)..=a.max(b)));
    let labels = proptest::option::weighted(0.3, proptest::sample::select(vec!["1", "2"]));
    (sharing, priority, names(&["p", "q"]), names(&["a", "b"]), labels, names(&["r", "s"])).prop_map(
        |(sharing, priority, priority_classes, namespaces, label, resources)| Match {
            sharing,
            priority,
            priority_classes,
            namespaces,
            labels: label.map(|value| ("l".to_owned(), value.to_owned())).into_iter().collect(),
            resources,
            expression: None,
        },
    )
}

/// One of every kind of pod that the matches above can tell apart.
fn pods() -> Vec<PodTraits> {
    let mut pods = Vec::new();
    for namespace in ["a", "b", "c"] {
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
                                labels: label.map(|value| ("l".into(), value.into())).into_iter().collect(),
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
                let taken = earlier.iter().any(|one| one.class.matches.accepts(&subject));
                prop_assert!(taken || !last.accepts(&subject), "{pod:?}");
            }
        }
    }
}

#[test]
fn several_classes_together_can_take_all() {
    let of = |namespace: &str| Match { namespaces: vec![namespace.into()], ..Match::default() };
    let both = Match { namespaces: vec!["a".into(), "b".into()], ..Match::default() };
    assert_eq!(takers(&[draft(of("a")), draft(of("b"))], &both), Some([0, 1].into()));
    assert_eq!(takers(&[draft(of("a"))], &both), None);
    let range = |range| Match { priority: Some(range), ..Match::default() };
    assert_eq!(
        takers(&[draft(range(i32::MIN..=-1)), draft(range(0..=i32::MAX))], &of("a")),
        Some([0, 1].into())
    );
    assert_eq!(takers(&[draft(range(i32::MIN..=-1)), draft(range(1..=i32::MAX))], &of("a")), None);
}
