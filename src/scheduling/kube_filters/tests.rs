//! Kube-scheduler's filters one by one, and when the view changes.

use super::node::{NodeTerm, ObjectLabels, Taint, TaintEffect, Toleration, TolerationRule};
use super::resources::HostPort;
use super::resources::{AmountsByResource, CPU};
use super::*;
use crate::testkit::{node, uid};
use crate::vocabulary::label_selector::{Requirement, Rule, Selector};

fn labels(pairs: &[(&str, &str)]) -> ObjectLabels {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn cpu(amount: u64) -> ResourceList {
    ResourceList::from_amounts(&AmountsByResource::from([(CPU, amount)]))
}

/// A node with 100 thousandths of a core, three pods at most, and its name as a label.
fn machine(name: &str) -> FilterNode {
    FilterNode {
        name: node(name),
        labels: Arc::new(labels(&[("host", name), ("zone", "z")])),
        taints: [].into(),
        allocatable: cpu(100),
        pods: 3,
    }
}

fn footprint(name: &str, amount: u64) -> NodeFootprint {
    NodeFootprint {
        node: node(name),
        amounts: cpu(amount),
        ports: [].into(),
        repels: [].into(),
        volumes: 0,
        claims_devices: false,
    }
}

fn requesting(amount: u64) -> Requirements {
    Requirements {
        namespace: "team".into(),
        amounts: cpu(amount),
        ..Requirements::default()
    }
}

fn view(machines: &[FilterNode]) -> ClusterFilters {
    let mut view = ClusterFilters::default();
    machines
        .iter()
        .cloned()
        .for_each(|machine| view.set_node(machine));
    view
}

fn verdict(view: &ClusterFilters, wants: &Requirements) -> FilterVerdict {
    view.snapshot().verdict(
        &uid("new"),
        wants,
        &node("a"),
        &AssumedNodeChange::default(),
    )
}

fn verdict_after(
    view: &ClusterFilters,
    wants: &Requirements,
    leaving: &[&str],
    coming: &[&str],
) -> FilterVerdict {
    let uids = |names: &[&str]| names.iter().map(|name| uid(name)).collect::<Vec<_>>();
    let (leaving, coming) = (uids(leaving), uids(coming));
    view.snapshot().verdict(
        &uid("new"),
        wants,
        &node("a"),
        &AssumedNodeChange {
            leaving: &leaving,
            coming: &coming,
        },
    )
}

fn code(verdict: &FilterVerdict) -> &'static str {
    match verdict {
        FilterVerdict::Accepts => "accepts",
        FilterVerdict::Rejects(reason) => reason.code(),
        FilterVerdict::Unsupported(unsupported) => unsupported.code(),
    }
}

#[test]
fn an_unknown_node_and_a_deleted_node_are_refused() {
    let mut view = view(&[]);
    assert_eq!(code(&verdict(&view, &requesting(1))), "unknown-node");
    view.set_node(machine("a"));
    assert_eq!(verdict(&view, &requesting(1)), FilterVerdict::Accepts);
    view.remove_node(&node("a"));
    assert_eq!(code(&verdict(&view, &requesting(1))), "unknown-node");
}

#[test]
fn pods_observed_before_their_node_count_once_it_is_observed() {
    let mut view = view(&[]);
    view.set_pod(uid("early"), footprint("a", 60));
    view.set_node(machine("a"));
    assert_eq!(
        verdict(&view, &requesting(50)),
        FilterVerdict::Rejects(FilterReason::InsufficientFree {
            resource: CPU.into(),
            asked: 50,
            left: 40
        })
    );
}

#[test]
fn resources_a_node_lacks_for_good_differ_from_resources_in_use() {
    let mut view = view(&[machine("a")]);
    view.set_pod(uid("x"), footprint("a", 60));
    let reason = |wants: &Requirements| match verdict(&view, wants) {
        FilterVerdict::Rejects(reason) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(&requesting(101)).code(), "insufficient-allocatable");
    assert_eq!(reason(&requesting(41)).code(), "insufficient-free");
}

#[test]
fn a_resource_that_the_pod_does_not_request_may_be_overcommitted() {
    let mut view = view(&[machine("a")]);
    view.set_pod(uid("x"), footprint("a", 1000));
    assert_eq!(verdict(&view, &requesting(0)), FilterVerdict::Accepts);
    assert_eq!(code(&verdict(&view, &requesting(1))), "insufficient-free");
}

#[test]
fn a_node_accepts_pods_up_to_its_pod_limit() {
    let mut view = view(&[machine("a")]);
    ["x", "y", "z"]
        .iter()
        .for_each(|name| view.set_pod(uid(name), footprint("a", 0)));
    assert_eq!(
        verdict(&view, &requesting(0)),
        FilterVerdict::Rejects(FilterReason::TooManyPods { allowed: 3 })
    );
    view.remove_pod(&uid("y"));
    assert_eq!(verdict(&view, &requesting(0)), FilterVerdict::Accepts);
}

#[test]
fn leaving_pods_free_their_resources_on_their_own_node_only() {
    let mut view = view(&[machine("a"), machine("b")]);
    view.set_pod(uid("x"), footprint("a", 60));
    view.set_pod(uid("y"), footprint("b", 60));
    assert_eq!(
        code(&verdict_after(&view, &requesting(50), &["y"], &[])),
        "insufficient-free"
    );
    assert_eq!(
        verdict_after(&view, &requesting(50), &["x"], &[]),
        FilterVerdict::Accepts
    );
    // An evicted pod counts until it is gone.
    assert_eq!(
        code(&verdict_after(&view, &requesting(50), &[], &[])),
        "insufficient-free"
    );
}

#[test]
fn pods_placed_earlier_take_resources_unless_they_are_already_counted() {
    let mut view = view(&[machine("a")]);
    view.set_pending(uid("first"), requesting(60));
    assert_eq!(
        code(&verdict_after(&view, &requesting(50), &[], &["first"])),
        "insufficient-free"
    );
    assert_eq!(
        verdict_after(&view, &requesting(40), &[], &["first"]),
        FilterVerdict::Accepts
    );
    view.set_pod(uid("first"), footprint("a", 60));
    assert_eq!(
        verdict_after(&view, &requesting(40), &[], &["first"]),
        FilterVerdict::Accepts
    );
    assert!(view.requirements_of(&uid("first")).is_none());
}

#[test]
fn a_pod_is_not_counted_ahead_of_itself() {
    let mut view = view(&[machine("a")]);
    view.set_pending(uid("new"), requesting(60));
    assert_eq!(
        verdict_after(&view, &requesting(60), &[], &["new"]),
        FilterVerdict::Accepts
    );
}

#[test]
fn an_unknown_neighbor_makes_the_verdict_unknown() {
    let view = view(&[machine("a")]);
    assert_eq!(
        code(&verdict_after(&view, &requesting(1), &[], &["ghost"])),
        "unknown-neighbor"
    );
}

#[test]
fn a_taint_excludes_a_pod_that_does_not_tolerate_it() {
    let taint = |effect| Taint {
        key: "gpu".into(),
        value: "h100".into(),
        effect,
    };
    let tolerating = |key: &str, rule: TolerationRule, effect| Requirements {
        tolerations: vec![Toleration {
            key: key.into(),
            rule,
            effect,
        }],
        ..requesting(1)
    };
    let equal = |value: &str| TolerationRule::Equal(value.into());
    let view = view(&[FilterNode {
        taints: [taint(TaintEffect::NoExecute)].into(),
        ..machine("a")
    }]);
    assert_eq!(code(&verdict(&view, &requesting(1))), "tainted");
    for (wants, expected) in [
        (tolerating("gpu", equal("h100"), None), "accepts"),
        (
            tolerating("gpu", equal("h100"), Some(TaintEffect::NoExecute)),
            "accepts",
        ),
        (
            tolerating("gpu", equal("h100"), Some(TaintEffect::NoSchedule)),
            "tainted",
        ),
        (tolerating("gpu", equal("a100"), None), "tainted"),
        (tolerating("gpu", TolerationRule::Exists, None), "accepts"),
        (tolerating("", TolerationRule::Exists, None), "accepts"),
        (tolerating("other", TolerationRule::Exists, None), "tainted"),
    ] {
        assert_eq!(code(&verdict(&view, &wants)), expected, "{wants:?}");
    }
}

#[test]
fn one_node_affinity_term_is_enough_and_an_empty_term_matches_nothing() {
    let view = view(&[machine("a")]);
    let term = |key: &str, value: &str| NodeTerm {
        labels: vec![Requirement::equals(key, value)],
        name: vec![],
    };
    let name = |name: &str| NodeTerm {
        labels: vec![],
        name: vec![Rule::In([name.to_owned()].into())],
    };
    let wants = |terms: Vec<NodeTerm>| Requirements {
        node_affinity: Some(terms),
        ..requesting(1)
    };
    for (terms, expected) in [
        (vec![term("host", "b"), term("zone", "z")], "accepts"),
        (vec![term("host", "b")], "not-selected"),
        (vec![name("a")], "accepts"),
        (vec![name("b")], "not-selected"),
        (
            vec![NodeTerm {
                name: name("b").name,
                ..term("zone", "z")
            }],
            "not-selected",
        ),
        (vec![NodeTerm::default()], "not-selected"),
        (vec![], "not-selected"),
    ] {
        assert_eq!(
            code(&verdict(&view, &wants(terms.clone()))),
            expected,
            "{terms:?}"
        );
    }
    let both = Requirements {
        node_selector: labels(&[("host", "b")]),
        ..wants(vec![term("zone", "z")])
    };
    assert_eq!(code(&verdict(&view, &both)), "not-selected");
}

#[test]
fn a_host_port_is_in_use_until_its_pod_leaves() {
    let port = HostPort {
        ip: "0.0.0.0".into(),
        protocol: "TCP".into(),
        port: 80,
    };
    let mut view = view(&[machine("a")]);
    view.set_pod(
        uid("x"),
        NodeFootprint {
            ports: [port.clone()].into(),
            ..footprint("a", 1)
        },
    );
    let wants = Requirements {
        ports: vec![port.clone()],
        ..requesting(1)
    };
    assert_eq!(
        verdict(&view, &wants),
        FilterVerdict::Rejects(FilterReason::HostPortInUse { port })
    );
    assert_eq!(
        verdict_after(&view, &wants, &["x"], &[]),
        FilterVerdict::Accepts
    );
    view.set_pending(uid("y"), wants.clone());
    assert_eq!(
        code(&verdict_after(&view, &wants, &["x"], &["y"])),
        "host-port-in-use"
    );
}

fn repelling(scope: &[&str], app: &str, topology: &str) -> Arc<[Arc<AntiAffinity>]> {
    let scope = NamespaceScope::Of(
        scope
            .iter()
            .map(|namespace| (*namespace).to_owned())
            .collect(),
    );
    let selector = Selector::from_labels(&labels(&[("app", app)]));
    [Arc::new(AntiAffinity {
        scope,
        selector,
        topology: topology.into(),
    })]
    .into()
}

#[test]
fn a_pods_anti_affinity_makes_the_verdict_unknown_in_its_topology_only() {
    let mut view = view(&[machine("a"), machine("b")]);
    let wants = Requirements {
        labels: labels(&[("app", "chat")]),
        ..requesting(1)
    };
    let on_b = |repels| NodeFootprint {
        repels,
        ..footprint("b", 1)
    };
    for (repels, expected) in [
        (
            repelling(&["team"], "chat", "zone"),
            "anti-affinity-of-another-pod",
        ),
        (
            repelling(&["other", "team"], "chat", "zone"),
            "anti-affinity-of-another-pod",
        ),
        (repelling(&["team"], "chat", "host"), "accepts"),
        (repelling(&["team"], "chat", "rack"), "accepts"),
        (repelling(&["team"], "batch", "zone"), "accepts"),
        (repelling(&["other"], "chat", "zone"), "accepts"),
    ] {
        view.set_pod(uid("x"), on_b(repels.clone()));
        assert_eq!(code(&verdict(&view, &wants)), expected, "{repels:?}");
    }
    view.set_pod(uid("x"), on_b(repelling(&["team"], "chat", "zone")));
    view.remove_pod(&uid("x"));
    assert_eq!(verdict(&view, &wants), FilterVerdict::Accepts);
}

#[test]
fn a_pod_placed_earlier_applies_its_anti_affinity() {
    let mut view = view(&[machine("a")]);
    let wants = Requirements {
        labels: labels(&[("app", "chat")]),
        ..requesting(1)
    };
    view.set_pending(
        uid("y"),
        Requirements {
            repels: repelling(&["team"], "chat", "rack"),
            ..requesting(1)
        },
    );
    assert_eq!(
        code(&verdict_after(&view, &wants, &[], &["y"])),
        "anti-affinity-of-another-pod"
    );
    assert_eq!(
        verdict_after(&view, &requesting(1), &[], &["y"]),
        FilterVerdict::Accepts
    );
}

#[test]
fn a_certain_refusal_goes_before_an_unknown_verdict() {
    let view = view(&[machine("a")]);
    let wants = |amount| Requirements {
        unsupported: Some(UnsupportedRule::Volumes),
        ..requesting(amount)
    };
    assert_eq!(code(&verdict(&view, &wants(1))), "volumes");
    assert_eq!(
        code(&verdict(&view, &wants(101))),
        "insufficient-allocatable"
    );
}

#[test]
fn a_pod_observed_on_another_node_left_the_first() {
    let mut view = view(&[machine("a"), machine("b")]);
    view.set_pod(uid("x"), footprint("a", 100));
    view.set_pod(uid("x"), footprint("b", 100));
    assert_eq!(verdict(&view, &requesting(100)), FilterVerdict::Accepts);
    assert_eq!(view.pods().collect::<Vec<_>>(), [&uid("x")]);
}

#[test]
fn a_snapshot_does_not_change_with_the_live_state() {
    let mut view = view(&[machine("a")]);
    view.set_pending(uid("new"), requesting(60));
    let before = view.snapshot();
    view.set_pod(uid("x"), footprint("a", 60));
    view.remove_pod(&uid("new"));
    let wants = before.requirements_of(&uid("new")).expect("it waited then");
    assert_eq!(
        before.verdict(
            &uid("new"),
            wants,
            &node("a"),
            &AssumedNodeChange::default()
        ),
        FilterVerdict::Accepts
    );
    assert_eq!(code(&verdict(&view, wants)), "insufficient-free");
}
