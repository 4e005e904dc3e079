//! What the schema lets through and what it tells; every schema of our own is one that is read here.

use super::*;
use crate::diagnostic::Diagnostic;
use crate::source::{FileId, PolicySources, SourceText};
use crate::tree;

fn check_text(text: &str) -> Vec<Diagnostic> {
    let text = match text.contains("kind: SchedulingPolicy") {
        true => text.to_owned(),
        false => format!("{text}kind: SchedulingPolicy\n"),
    };
    let files = [SourceText::new("policy.yaml", text.as_str())];
    let (documents, broken) = tree::read(text.as_bytes(), FileId::at(0), &mut 1000);
    assert_eq!(broken, []);
    check(
        &documents[0],
        &SHAPES.policy,
        "a policy",
        &PolicySources::new(&files),
    )
}

/// Codes, and for each the text it marks.
fn problems(text: &str) -> Vec<(&'static str, String)> {
    check_text(text)
        .iter()
        .map(|one| (one.code, text[one.span.range()].to_owned()))
        .collect()
}

fn helps(text: &str) -> Vec<String> {
    check_text(text)
        .into_iter()
        .filter_map(|one| one.help)
        .collect()
}

#[test]
fn a_mistake_in_an_expression_is_marked_inside_its_text() {
    let text = "classes:\n- name: a\n  match:\n    expression: >-\n      pod.gpus > 1 &&\n      pod.prority == 'x'\n";
    assert_eq!(problems(text), [("expression", "prority".to_owned())]);
    let text = "classes: [{name: a, match: {expression: 'pod.labels[''a''] == team'}}]\n";
    assert_eq!(problems(text), [("expression", "team".to_owned())]);
}

#[test]
fn every_schema_of_ours_is_understood() {
    assert!(SHAPES.policy.field("classes").is_some());
    assert!(SHAPES.test.field("cases").is_some());
    let pods = SHAPES
        .test
        .field("cluster")
        .and_then(|cluster| cluster.shape.field("pods"))
        .unwrap();
    let SchemaShape::List(pod) = &pods.shape else {
        panic!("{pods:?}")
    };
    assert!(pod.field("on").is_some() && pod.field("priority").is_some());
}

#[test]
fn the_schema_has_the_defaults_in_force() {
    let schema = policy_schema();
    let default = |place: &str| {
        schema
            .pointer(&format!("{place}/default"))
            .and_then(serde_json::Value::as_str)
    };
    assert_eq!(default("/properties/mode"), Some("enforce"));
    assert_eq!(default("/$defs/Headroom/properties/default"), Some("10%"));
    assert_eq!(default("/$defs/StartGateSpec/properties/max"), Some("10m"));
    assert_eq!(
        default("/$defs/EvictionCosts/properties/maxLostWork"),
        Some("1h")
    );
    assert_eq!(
        schema.pointer("/$defs/Weights/properties/kvHeadroom/default"),
        Some(&40.into())
    );
}

#[test]
fn all_problems_are_found_at_once_where_they_stand() {
    let text = "mode: sahdow\nheadroom: {defualt: 10%}\nscoring: {shortlist: 0}\nclasses:\n- match: {namespaces: chat}\n";
    let expected = [
        ("unknown-word", "sahdow"),
        ("unknown-field", "defualt"),
        ("out-of-range", "0"),
        ("wrong-type", "chat"),
        ("missing-field", "match: {namespaces: chat}"),
    ];
    assert_eq!(
        problems(text),
        expected.map(|(code, at)| (code, at.to_owned()))
    );
}

#[test]
fn each_mistake_has_its_own_help() {
    for (text, help) in [
        ("headroom: {default: 10}\n", "did you mean `10%`?"),
        ("telemetry: {fresh: 5}\n", "did you mean `5s`?"),
        (
            "startGate: {max: 10min}\n",
            "write whole numbers with ms, s, m, h or d, such as `30s` or `1h30m`",
        ),
        ("classes: [{name: a, preemptible: yes}]\n", "write `true`"),
        ("classes: [{name: 7}]\n", "put it in quotes: `\"7\"`"),
        (
            "classes: [{name: a, priority: {min: 1}}]\n",
            "it belongs under `classes[].match`; check the indentation",
        ),
        (
            "guarantee: {gpus: 1}\n",
            "it belongs under `tenants[]`; check the indentation",
        ),
        (
            "classes:\n",
            "take the line away for the default, or write `[]` for an empty list",
        ),
        (
            "tenants: [{name: a, weight: '3'}]\n",
            "take the quotes away: `3`",
        ),
        ("loading: {disk: 3GB}\n", "did you mean `3GB/s`?"),
    ] {
        assert_eq!(helps(text), [help], "{text}");
    }
}

#[test]
fn what_the_format_allows_passes() {
    let text = "
apiVersion: stowage.dev/v1alpha1
kind: SchedulingPolicy
mode: enforce
headroom: {default: 10%, models: {H100: 8%}}
telemetry: {fresh: 5s, stale: 30s, smoothing: 10s, margin: 5%, expired: ledger-only, lostAfter: 30s}
loading: {network: 1GB/s, disk: 3GB/s, pageCache: 5GB/s, init: 20s}
startGate: {max: 10m}
scoring:
  shortlist: 4
  softReservationLifetime: 2s
  weights: {packing: 1, kvHeadroom: 40, timeToReady: 20, interference: 0, topology: 5, spread: 0}
preemption: {reservationSlack: 30s, costs: {perPod: 60s, maxLostWork: 1h}}
classes:
  - name: chat
    match:
      namespaces: [chat]
      labels: {app: chat}
      priorityClasses: [high]
      priority: {min: 0, max: 1000}
      resources: [nvidia.com/gpu]
      sharing: exclusive
      expression: \"pod.labels['team'] == 'x' && pod.vram > 40 * 1024\"
    engine: true
    mayShareWith: [serving]
    limits: {kvCache: 90%, queue: 32}
    startGate: {min: 0s, max: 10m}
    preemptible: false
    minRuntime: 0s
    drainTime: 0s
    doNotDisrupt: honor
    disruptionBudgets: ignore
tenants:
  - name: training
    namespaces: [training]
    guarantee: {vram: 640Gi, gpus: 8}
    limit: {vram: 1280Gi, gpus: 16}
    borrowing: allowed
    reclaim: allowed
    weight: 1
nodePools:
  - name: a100
    selector: {gpu-pool: a100}
    allocator: stowage
    classes: [fraud]
    mig: [3g.40gb, 3g.40gb]
    capacity: {gpus: 2, vram: 160Gi}
";
    assert_eq!(problems(text), []);
}
