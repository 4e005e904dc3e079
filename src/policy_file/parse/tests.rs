//! What files say and what the policy then is; a policy written out is the same policy.

use super::*;
use crate::shape::SHAPES;
use crate::source::FileId;
use crate::{merge, tree};
use stowage_scheduling::policy::{
    ConflictRule, Consolidation, GroupPlacement, Mode, ViolateBudgets,
};
use stowage_scheduling::units::{Millis, Percent};

fn file(text: &str) -> file::PolicySpec {
    let (documents, _) = tree::read(text.as_bytes(), FileId::at(0), &mut 1000);
    let (merged, _) = merge::merge(documents, &SHAPES.policy);
    serde_json::from_value(merged.to_json()).unwrap()
}

fn lowered(text: &str) -> Policy {
    Draft::new(&file(text)).unwrap().finish().unwrap()
}

const RICH: &str = "
mode: shadow
headroom: {default: 12%, models: {H100: 8%}}
telemetry: {fresh: 4s, expired: refuse}
loading: {network: 1.5GB/s}
startGate: {max: 5m}
scoring: {shortlist: 7, weights: {packing: 3}}
preemption: {costs: {perPod: 2m, perRequest: 3s}, violateBudgets: when-nothing-else, evictionsPerMinute: {node: 2}}
conflicts: evict-unstarted
planning: {maxGatedTime: 45s, groups: {placement: one-island}, pressure: {queue: {high: 99}}, consolidation: {enabled: true}}
classes:
- name: chat
  match: {namespaces: [chat], priority: {min: 5}, expression: pod.gpus > 1}
  mayShareWith: [serving]
  startGate: {min: 1s}
- name: batch
  preemptible: true
  maxLostWork: 5m
  doNotDisrupt: ignore
  disruptionBudgets: ignore
- name: serving
  limits: {queue: 5}
tenants:
- {name: a, namespaces: [a], guarantee: {vram: 40Gi}, limit: {gpus: 4}}
- {name: b, namespaces: [b], borrowing: never, weight: 3}
nodePools:
- {name: p, selector: {x: y}, allocator: device-plugin, classes: [chat], mig: [], capacity: {gpus: 2}}
";

#[test]
fn the_empty_policy_is_the_default_policy() {
    assert_eq!(lowered("{}"), Policy::default());
}

#[test]
fn written_settings_apply_and_the_rest_are_defaults() {
    let policy = lowered(RICH);
    assert_eq!(
        (policy.mode, policy.headroom.default.get()),
        (Mode::Shadow, 12)
    );
    assert_eq!(
        (policy.telemetry.fresh, policy.telemetry.stale),
        (Millis::seconds(4), Millis::seconds(30))
    );
    assert_eq!(
        (
            policy.scoring.weights.packing,
            policy.scoring.weights.kv_headroom
        ),
        (3, 40)
    );
    assert_eq!(policy.loading.network, Bytes(1_500_000_000));
    assert_eq!(policy.preemption.costs.per_pod, Millis::seconds(120));
    assert_eq!(policy.preemption.costs.per_request, Millis::seconds(3));
    assert_eq!(
        policy.preemption.violate_budgets,
        ViolateBudgets::WhenNothingElse
    );
    assert_eq!(policy.conflicts, ConflictRule::EvictUnstarted);
    assert_eq!(
        (
            policy.preemption.evictions_per_minute.cluster,
            policy.preemption.evictions_per_minute.node
        ),
        (60, 2)
    );
    assert_eq!(policy.planning.max_gated_time, Millis::seconds(45));
    assert_eq!(policy.planning.groups.placement, GroupPlacement::OneIsland);
    let pressure = policy.planning.pressure.unwrap();
    assert_eq!(
        (
            pressure.queue.high,
            pressure.queue.low,
            pressure.kv_cache.high.get()
        ),
        (99, 16, 95)
    );
    assert_eq!(
        policy.planning.consolidation,
        Some(Consolidation::default())
    );
    assert_eq!(
        lowered("planning: {pressure: {enabled: false}}")
            .planning
            .pressure,
        None
    );
    let batch = policy
        .classes()
        .iter()
        .find(|class| class.name == "batch")
        .unwrap();
    assert_eq!(batch.max_lost_work, Some(Millis::seconds(300)));
    assert!(!batch.honors_do_not_disrupt() && !batch.honors_budgets());
    let a = &policy.tenants()[0];
    assert_eq!(
        (a.guarantee.vram, a.guarantee.milli_gpus),
        (Bytes::gib(40), u64::MAX)
    );
    assert_eq!((a.limit.vram, a.limit.milli_gpus), (None, Some(4000)));
}

#[test]
fn custom_classes_precede_built_in_ones_which_keep_their_order() {
    let policy = lowered(RICH);
    let names: Vec<&str> = policy
        .classes()
        .iter()
        .map(|class| class.name.as_str())
        .collect();
    assert_eq!(
        names,
        ["chat", "dedicated", "opportunistic", "batch", "serving"]
    );
    let class = |name: &str| policy.class(policy.class_named(name).unwrap());
    let default = Policy::default();
    let batch = default.class(default.class_named("batch").unwrap());
    assert_eq!(class("batch").matches, batch.matches);
    assert_eq!(
        class("batch").eviction,
        stowage_scheduling::policy::Preemptibility::ForHigherPriority
    );
    assert_eq!(
        (
            class("serving").limits.queue,
            class("serving").limits.kv_cache
        ),
        (Some(5), Percent::new(90))
    );
    assert_eq!(class("serving").start_gate.max, Millis::seconds(300));
    assert_eq!(class("chat").start_gate.min, Millis::seconds(1));
}

#[test]
fn a_policy_written_out_in_full_is_the_same_policy() {
    for text in ["{}", RICH] {
        let policy = lowered(text);
        let written = serde_json::to_string(&render(&policy)).unwrap();
        let file: file::PolicySpec = serde_json::from_str(&written).unwrap();
        assert_eq!(Draft::new(&file).unwrap().finish().unwrap(), policy);
    }
}
