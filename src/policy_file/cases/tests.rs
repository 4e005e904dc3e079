//! Cases that pass, cases that fail, and invalid clusters.

use super::*;
use stowage_scheduling::policy::{Class, Match, Preemptibility, Tenant};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::classification::Isolation;
use stowage_scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};

fn test(text: serde_json::Value) -> PolicyTest {
    serde_json::from_value(text).unwrap()
}

/// One custom class before the built-in ones, and two tenants.
fn policy() -> Policy {
    let chat = Class {
        matches: Match {
            namespaces: vec!["chat".into()],
            ..Match::default()
        },
        shares_with: Some(vec!["chat".into()]),
        ..Class::new("chat")
    };
    let jobs = Class {
        matches: Match {
            namespaces: vec!["jobs".into()],
            ..Match::default()
        },
        eviction: Preemptibility::ForHigherPriority,
        min_runtime: stowage_scheduling::units::Millis::seconds(600),
        engine: false,
        ..Class::new("jobs")
    };
    let mut classes = vec![chat, jobs];
    classes.extend(Policy::default().classes().to_vec());
    let half = TenantUsage {
        vram: Bytes::gib(72),
        milli_gpus: u64::MAX,
    };
    let tenants = vec![
        Tenant {
            guarantee: half,
            ..Tenant::new("talk", &["chat"])
        },
        Tenant::new("work", &["jobs"]),
    ];
    Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_tenants(tenants)
        .unwrap()
}

fn cluster() -> serde_json::Value {
    serde_json::json!({
        "nodes": [
            {"name": "a", "gpus": [{"model": "A100", "memory": "80Gi", "count": 2}]},
            {"name": "b", "gpus": [{"memory": "80Gi", "kvCache": "97%", "queue": 40}], "models": {"m": "disk"}},
        ],
        "pods": [
            {"name": "old", "namespace": "jobs", "priority": -1, "vram": "60Gi", "node": "a", "on": [0]},
            {"name": "young", "namespace": "jobs", "priority": -1, "vram": "60Gi", "node": "a", "on": [1], "runningFor": "1m"},
        ],
    })
}

fn outcome(case: serde_json::Value) -> Vec<Difference> {
    let test =
        test(serde_json::json!({"kind": "PolicyTest", "cluster": cluster(), "cases": [case]}));
    run(&policy(), &test).unwrap().remove(0).differences
}

#[test]
fn a_case_that_holds_has_no_differences() {
    let differences = outcome(serde_json::json!({
        "name": "the old job leaves for the chatbot",
        "pod": {"name": "bot", "namespace": "chat", "priority": 10, "vram": "40Gi"},
        "expect": {
            "class": "chat", "tenant": "talk", "nodes": [],
            "refused": {"a": "insufficient-vram", "b": "engines-busy"}, "victims": ["old"],
        },
    }));
    assert_eq!(differences, []);
    let small = outcome(serde_json::json!({
        "name": "a small one fits on an empty GPU",
        "pod": {"name": "bot", "namespace": "other", "vram": "8Gi"},
        "expect": {"class": "serving", "nodes": ["a"], "gpus": [0], "refused": {"b": "engines-busy"}, "victims": []},
    }));
    assert_eq!(small, []);
}

#[test]
fn each_unmet_expectation_is_reported_with_its_reason() {
    let differences = outcome(serde_json::json!({
        "name": "all wrong",
        "pod": {"name": "bot", "namespace": "other", "vram": "70Gi"},
        "expect": {
            "class": "chat", "tenant": "talk", "nodes": ["a"], "gpus": [1],
            "refused": {"a": "too-large", "c": "insufficient-vram"}, "victims": ["old"],
        },
    }));
    let what: Vec<&str> = differences
        .iter()
        .map(|difference| difference.what)
        .collect();
    assert_eq!(
        what,
        [
            "class", "tenant", "nodes", "gpus", "refused", "refused", "victims"
        ]
    );
    assert_eq!(
        differences[0].because,
        ["chat does not match: the pod's namespace is not among its `namespaces`"]
    );
    assert!(
        differences[2].because[0].starts_with("a: the pod requests 70.0 GiB on 1 GPU"),
        "{:?}",
        differences[2]
    );
    assert_eq!(differences[5].found, "c: no such node");
}

#[test]
fn an_invalid_test_cluster_is_rejected_with_its_place() {
    let refused = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut cluster = cluster();
        edit(&mut cluster);
        let case =
            serde_json::json!({"name": "x", "pod": {"name": "p", "vram": "1Gi"}, "expect": {}});
        let test =
            test(serde_json::json!({"kind": "PolicyTest", "cluster": cluster, "cases": [case]}));
        run(&policy(), &test).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&|cluster| cluster["pods"][0]["node"] = "z".into()),
        "cluster.pods: old is on z, which is not among cluster.nodes"
    );
    assert_eq!(
        refused(&|cluster| cluster["pods"][0]["on"] = serde_json::json!([7])),
        "cluster.pods: old is on GPU 7 of a, which has 2; they are counted from 0"
    );
    assert!(
        refused(&|cluster| cluster["nodes"][1]["name"] = "a".into()).contains("stands there twice")
    );
    assert!(
        refused(&|cluster| cluster["pods"][1]["name"] = "old".into())
            .contains("stands there twice")
    );
    assert!(
        refused(&|cluster| cluster["pods"][0]["on"] = serde_json::json!([0, 1]))
            .contains("is on 2 GPUs and requests 1")
    );
}

#[test]
fn an_invalid_pod_is_reported_or_expected() {
    let case = |expect: serde_json::Value| {
        outcome(
            serde_json::json!({"name": "x", "pod": {"name": "p", "vram": "1Gi", "gpus": 0}, "expect": expect}),
        )
    };
    assert_eq!(case(serde_json::json!({"refused": {"a": "bad-gpus"}})), []);
    assert_eq!(
        case(serde_json::json!({"nodes": ["a"]}))[0].found,
        "bad-gpus"
    );
}

#[test]
fn two_policies_are_compared_pod_by_pod_and_the_same_one_changes_nothing() {
    let test = test(serde_json::json!({"kind": "PolicyTest", "cluster": cluster(), "cases": []}));
    let ledger = |policy: &Policy| cluster::build(test.cluster.as_ref().unwrap(), policy).unwrap();
    assert_eq!(
        compare(&mut ledger(&policy()), &mut ledger(&policy())),
        PolicyComparison {
            pods: 2,
            ..Default::default()
        }
    );
    let comparison = compare(&mut ledger(&Policy::default()), &mut ledger(&policy()));
    let classes: Vec<_> = comparison
        .changes
        .iter()
        .map(|change| (change.old.class.as_str(), change.new.class.as_str()))
        .collect();
    assert_eq!(
        classes,
        [("opportunistic", "jobs"), ("opportunistic", "jobs")]
    );
    assert_eq!(comparison.changes[0].new.tenant.as_deref(), Some("work"));
    assert_eq!(comparison.changes[0].node.as_deref(), Some("a"));
}

#[test]
fn no_pod_is_evicted_for_a_pod_beyond_its_tenants_limit() {
    let limit = TenantLimit {
        vram: Some(Bytes::gib(30)),
        milli_gpus: None,
    };
    let policy = policy()
        .with_tenants(vec![Tenant {
            limit,
            ..Tenant::new("talk", &["jobs"])
        }])
        .unwrap();
    let case = serde_json::json!({
        "name": "beyond its limit",
        "pod": {"name": "next", "namespace": "jobs", "priority": 10, "vram": "40Gi"},
        "expect": {"nodes": [], "victims": []},
    });
    let test =
        test(serde_json::json!({"kind": "PolicyTest", "cluster": cluster(), "cases": [case]}));
    assert_eq!(run(&policy, &test).unwrap().remove(0).differences, []);
}

#[test]
fn a_case_may_set_the_age_of_a_nodes_report() {
    let case = |age: &str, expired: &str, expect: serde_json::Value| {
        let mut policy = policy();
        policy.telemetry.expired = serde_json::from_value(expired.into()).unwrap();
        let test = test(serde_json::json!({
            "kind": "PolicyTest",
            "cluster": {"nodes": [{"name": "a", "gpus": [{"memory": "80Gi", "kvCache": "97%"}], "reportAge": age}]},
            "cases": [{"name": age, "pod": {"name": "p", "vram": "60Gi"}, "expect": expect}],
        }));
        run(&policy, &test).unwrap().remove(0).differences
    };
    let refused = |code: &str| serde_json::json!({"nodes": [], "refused": {"a": code}});
    // Full engines count while the report is fresh; what happens once it has expired is the policy's.
    assert_eq!(case("1s", "refuse", refused("engines-busy")), []);
    assert_eq!(case("40s", "refuse", refused("no-fresh-report")), []);
    assert_eq!(
        case(
            "40s",
            "ledger-only",
            serde_json::json!({"nodes": ["a"], "refused": {}})
        ),
        []
    );
    assert_eq!(
        case("40s", "refuse", serde_json::json!({"nodes": ["a"]}))[0]
            .because
            .len(),
        1
    );
}

#[test]
fn a_case_may_say_where_the_driver_keeps_limits() {
    let mut classes = policy().classes().to_vec();
    for class in &mut classes {
        class.isolation = Isolation::Required;
    }
    let policy = policy().with_classes(classes).unwrap();
    let nodes = serde_json::json!([
        {"name": "a", "gpus": [{"memory": "80Gi"}], "vramLimits": true},
        {"name": "b", "gpus": [{"memory": "80Gi"}]},
    ]);
    let test = test(serde_json::json!({
        "kind": "PolicyTest",
        "cluster": {"nodes": nodes},
        "cases": [{
            "name": "limits",
            "pod": {"name": "p", "vram": "20Gi"},
            "expect": {"nodes": ["a"], "refused": {"b": "no-vram-limits"}},
        }],
    }));
    assert_eq!(run(&policy, &test).unwrap().remove(0).differences, []);
}

#[test]
fn a_stale_report_leaves_the_margin_unallocated() {
    let differences = |age: &str| {
        let test = test(serde_json::json!({
            "kind": "PolicyTest",
            "cluster": {"nodes": [{"name": "a", "gpus": [{"memory": "80Gi"}], "reportAge": age}]},
            "cases": [{"name": age, "pod": {"name": "p", "vram": "70Gi"}, "expect": {"nodes": ["a"]}}],
        }));
        run(&policy(), &test).unwrap().remove(0).differences
    };
    assert_eq!(differences("2s"), []);
    assert!(
        differences("20s")[0].because[0].contains("68.0 GiB"),
        "{:?}",
        differences("20s")
    );
}

#[test]
fn unexpected_victims_are_reported_with_the_cost_of_each_set() {
    let differences = |victims: serde_json::Value| {
        outcome(serde_json::json!({
            "name": "who leaves",
            "pod": {"name": "bot", "namespace": "chat", "priority": 10, "vram": "40Gi"},
            "expect": {"victims": victims},
        }))
    };
    let wrong = differences(serde_json::json!(["young"])).remove(0);
    assert_eq!(
        (wrong.expected.as_str(), wrong.found.as_str()),
        ("[young]", "[old]")
    );
    let because = wrong.because.join("\n");
    assert!(
        because.contains("old on a, priority -1, loses "),
        "{because}"
    );
    assert!(
        because.contains(
            "young cannot be evicted: it has run for 60 s of the 600 s that its class gives it"
        ),
        "{because}"
    );
    let unknown = differences(serde_json::json!(["nobody"]))
        .remove(0)
        .because
        .join("\n");
    assert!(
        unknown.contains("nobody is not among cluster.pods"),
        "{unknown}"
    );
    let none = differences(serde_json::json!([]))
        .remove(0)
        .because
        .join("\n");
    assert!(
        none.contains("the pod fits nowhere unless others leave"),
        "{none}"
    );
}

#[test]
fn a_class_may_be_restricted_to_pools() {
    let files = [crate::SourceText::new(
        "policy.yaml",
        "kind: SchedulingPolicy\n\
         nodePools: [{name: gold, selector: {pool: gold}}, {name: iron, selector: {pool: iron}}]\n\
         classes: [{name: batch-only, match: {namespaces: [jobs]}, pools: [iron]}]\n",
    )];
    let loaded = crate::load(&files).unwrap_or_else(|found| panic!("{found:?}"));
    let test = test(serde_json::json!({
        "kind": "PolicyTest",
        "cluster": {"nodes": [
            {"name": "g", "labels": {"pool": "gold"}, "gpus": [{}]},
            {"name": "i", "labels": {"pool": "iron"}, "gpus": [{}]},
            {"name": "n", "gpus": [{}]},
        ]},
        "cases": [
            {"name": "kept in", "pod": {"name": "p", "namespace": "jobs", "vram": "8Gi"},
             "expect": {"class": "batch-only", "nodes": ["i"], "refused": {"g": "class-kept-in-pools", "n": "class-kept-in-pools"}}},
            {"name": "free", "pod": {"name": "p", "vram": "8Gi"}, "expect": {"class": "serving", "nodes": ["g", "i", "n"]}},
        ],
    }));
    for case in run(&loaded.policy, &test).unwrap() {
        assert_eq!(case.differences, [], "{}", case.case);
    }
}
