//! Which pods a class and a tenant of a file take: patterns of namespaces, expressions over labels, and what the linter knows
//! of them.

use super::*;
use stowage_scheduling::vocabulary::classification::PodTraits;

fn of_kind(text: &str) -> SourceText {
    SourceText::new("policy.yaml", format!("{text}\nkind: SchedulingPolicy\n"))
}

fn codes(text: &str) -> Vec<&'static str> {
    match load(&[of_kind(text)]) {
        Ok(loaded) => loaded.warnings.iter().map(|one| one.code).collect(),
        Err(found) => found.iter().map(|one| one.code).collect(),
    }
}

fn policy(text: &str) -> Policy {
    let loaded = load(&[of_kind(text)]);
    loaded
        .unwrap_or_else(|found| {
            panic!(
                "{:?}",
                found.iter().map(|one| &one.message).collect::<Vec<_>>()
            )
        })
        .policy
}

fn pod(namespace: &str, labels: &[(&str, &str)]) -> PodTraits {
    let labels = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect();
    PodTraits {
        namespace: namespace.into(),
        labels,
        ..PodTraits::default()
    }
}

fn class_of<'a>(policy: &'a Policy, pod: &PodTraits) -> &'a str {
    &policy.class(policy.classify(pod).class).name
}

#[test]
fn a_pattern_matches_namespaces_exactly() {
    let policy =
        policy("classes: [{name: team, match: {namespaces: ['team-*', '*-x-*', plain]}}]\n");
    for namespace in ["team-a", "team-", "a-x-b", "plain"] {
        assert_eq!(
            class_of(&policy, &pod(namespace, &[])),
            "team",
            "{namespace}"
        );
    }
    for namespace in ["team", "a-team-b", "ax-b", "plain-2", "default"] {
        assert_eq!(
            class_of(&policy, &pod(namespace, &[])),
            "serving",
            "{namespace}"
        );
    }
}

#[test]
fn a_namespace_belongs_to_the_tenant_that_names_it_then_to_the_first_pattern() {
    let policy = policy(
        "tenants:\n- {name: all, namespaces: ['team-*']}\n- {name: a, namespaces: [team-a]}\n\
         - {name: late, namespaces: ['*-b', c]}\n",
    );
    let tenant = |namespace: &str| {
        let id = policy.classify(&pod(namespace, &[])).tenant;
        id.and_then(|id| policy.tenant(id))
            .map(|tenant| tenant.name.clone())
    };
    assert_eq!(tenant("team-a").as_deref(), Some("a"));
    assert_eq!(tenant("team-b").as_deref(), Some("all"));
    assert_eq!(tenant("x-b").as_deref(), Some("late"));
    assert_eq!(tenant("c").as_deref(), Some("late"));
    assert_eq!(tenant("d"), None);
}

#[test]
fn label_operators_mean_what_they_mean_in_kubernetes() {
    for (expression, taken, left) in [
        (
            "{key: tier, operator: In, values: [a, b]}",
            &[Some("a"), Some("b")][..],
            &[Some("c"), None][..],
        ),
        (
            "{key: tier, operator: NotIn, values: [a, b]}",
            &[Some("c"), None],
            &[Some("a"), Some("b")],
        ),
        (
            "{key: tier, operator: Exists}",
            &[Some("a"), Some("")],
            &[None],
        ),
        (
            "{key: tier, operator: DoesNotExist}",
            &[None],
            &[Some("a"), Some("")],
        ),
    ] {
        let policy = policy(&format!(
            "classes: [{{name: own, match: {{matchExpressions: [{expression}]}}}}]\n"
        ));
        let class = |value: &Option<&str>| {
            let labels: Vec<(&str, &str)> = value.iter().map(|value| ("tier", *value)).collect();
            class_of(&policy, &pod("default", &labels)).to_owned()
        };
        assert!(
            taken.iter().all(|value| class(value) == "own"),
            "{expression}"
        );
        assert!(
            left.iter().all(|value| class(value) == "serving"),
            "{expression}"
        );
    }
}

#[test]
fn unsatisfiable_and_empty_selectors_are_rejected() {
    let matches = |conditions: &str| {
        codes(&format!(
            "classes: [{{name: own, match: {{{conditions}}}}}]\n"
        ))
    };
    for broken in [
        "{key: a, operator: In}",
        "{key: a, operator: NotIn, values: []}",
        "{key: a, operator: Exists, values: [b]}",
        "{key: a, operator: DoesNotExist, values: [b]}",
    ] {
        assert_eq!(
            matches(&format!("matchExpressions: [{broken}]")),
            ["selector-values"],
            "{broken}"
        );
    }
    assert_eq!(
        matches("matchExpressions: [{key: a, operator: Gt, values: ['1']}]"),
        ["unknown-word"]
    );
    assert_eq!(matches("matchExpressions: []"), ["empty-condition"]);
    assert_eq!(matches("namespaces: ['Team-*']"), ["malformed"]);
    let never = "labels: {a: x}, matchExpressions: [{key: a, operator: NotIn, values: [x]}]";
    assert_eq!(matches(never), ["no-pod-matches"]);
}

#[test]
fn classes_shadowed_by_patterns_or_expressions_are_reported() {
    let pair = |first: &str, second: &str| {
        codes(&format!(
            "classes: [{{name: one, match: {{{first}}}}}, {{name: two, match: {{{second}}}}}]\n"
        ))
    };
    let one = "matchExpressions: [{key: a, operator: ";
    assert_eq!(
        pair("namespaces: ['team-*']", "namespaces: [team-a, 'team-b-*']"),
        ["unreachable-class"]
    );
    assert_eq!(
        pair("namespaces: ['team-*']", "namespaces: [team-a, other]"),
        [""; 0]
    );
    assert_eq!(
        pair("namespaces: ['team-a*']", "namespaces: ['team-*']"),
        [""; 0]
    );
    assert_eq!(
        pair(&format!("{one}Exists}}]"), "labels: {a: x}"),
        ["unreachable-class"]
    );
    assert_eq!(
        pair(&format!("{one}In, values: [x, y]}}]"), "labels: {a: x}"),
        ["unreachable-class"]
    );
    assert_eq!(
        pair(
            &format!("{one}In, values: [x, y]}}]"),
            &format!("{one}Exists}}]")
        ),
        [""; 0]
    );
    assert_eq!(
        pair(&format!("{one}NotIn, values: [x]}}]"), "labels: {a: y}"),
        ["unreachable-class"]
    );
    assert_eq!(
        pair(&format!("{one}NotIn, values: [x]}}]"), "labels: {b: y}"),
        [""; 0]
    );
    assert_eq!(
        pair(
            &format!("{one}NotIn, values: [x]}}]"),
            &format!("{one}DoesNotExist}}]")
        ),
        ["unreachable-class"]
    );
}

#[test]
fn a_namespace_selector_matches_nothing_while_labels_are_unknown() {
    let text = "classes: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n\
                tenants: [{name: t, namespaceSelector: {matchExpressions: [{key: team, operator: Exists}]}}]\n";
    let policy = policy(text);
    assert_eq!(
        class_of(&policy, &pod("default", &[("team", "a")])),
        "serving"
    );
    assert_eq!(policy.classify(&pod("default", &[])).tenant, None);
    assert_eq!(
        codes("classes: [{name: own, match: {namespaceSelector: {}}}]\n"),
        ["empty-condition"]
    );
}

#[test]
fn shown_selectors_parse_again_and_name_their_origin() {
    let text = "classes:\n- name: own\n  match:\n    namespaces: ['team-*']\n    matchExpressions:\n    - {key: a, operator: Exists}\n    \
                - {key: b, operator: In, values: ['1']}\ntenants:\n- name: t\n  namespaceSelector: {matchLabels: {team: t}}\n";
    let files = [SourceText::new(
        "0.yaml",
        format!("{text}kind: SchedulingPolicy\n"),
    )];
    let loaded = load(&files).unwrap();
    let shown = loaded.show(&files);
    for (line, place) in [
        ("namespaces: [\"team-*\"]", 4),
        ("- key: a", 6),
        ("- key: b", 7),
        ("values: [\"1\"]", 7),
        ("team: t", 10),
    ] {
        let found = shown
            .lines()
            .find(|shown| shown.trim_start().starts_with(line));
        assert!(
            found.is_some_and(|found| found.ends_with(&format!("# 0.yaml:{place}"))),
            "{line}: {shown}"
        );
    }
    let again = load(&[SourceText::new("shown.yaml", shown.as_str())]).unwrap();
    assert_eq!(again.policy.digest, loaded.policy.digest, "{shown}");
}

/// A class that holds at night leaves the same pods to a later one by day: that one is reached, and its owner said so.
#[test]
fn an_open_window_may_make_pods_of_a_later_class_preemptible() {
    let by_day = "- {name: by-day, match: {priorityClasses: [jobs]}}";
    let night = "[{from: \"20:00\", to: \"06:00\", timeZone: UTC}]";
    let taken = |when: &str| {
        let at_night =
            format!("name: at-night, match: {{priorityClasses: [jobs]}}, preemptible: true{when}");
        codes(&format!("classes:\n- {{{at_night}}}\n{by_day}\n"))
    };
    assert_eq!(taken(&format!(", when: {night}")), [""; 0]);
    assert!(taken("").contains(&"serving-could-be-victim"));
}
