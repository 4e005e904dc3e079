//! A redacted recording says none of the names, and replays as the original does.

use super::NameCollector;
use crate::frame::{FRAME_HEADER_BYTES, FrameHeader, MAGIC};
use crate::proptests::taken_inputs;
use crate::proptests::{entries, replay, written};
use proptest::prelude::*;
use serde_json::Value;
use std::sync::Arc;
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::policy::{
    Class, Expression, LabelExpression, LabelOperator, Match, Policy, Pool, Preemptibility, Tenant,
    built_in_classes,
};
use stowage_scheduling::testkit::demand_of;
use stowage_scheduling::testkit::numbered::{key, node_name, uid};
use stowage_scheduling::testkit::unit_gpu;
use stowage_scheduling::verbs::Input;
use stowage_scheduling::verbs::filter::FilterAsked;
use stowage_scheduling::verbs::observe::NodeObserved;
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::PolicySet;
use stowage_scheduling::vocabulary::classification::PodTraits;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::gpu_wish::GpuSelector;
use stowage_scheduling::vocabulary::label_selector::Requirement;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_signs::{NodeLabel, NodeSigns};

fn redacted(recording: &[u8]) -> Vec<u8> {
    let (mut seen, mut out) = (NameCollector::default(), Vec::new());
    seen.collect(recording).unwrap();
    seen.pseudonyms().write(recording, &mut out).unwrap();
    out
}

/// The text of all frames.
fn text(mut recording: &[u8]) -> String {
    let mut text = Vec::new();
    while let Some((head, rest)) = recording.split_first_chunk::<FRAME_HEADER_BYTES>() {
        recording = rest;
        if !head.starts_with(&MAGIC) {
            let frame = FrameHeader::read(head).unwrap();
            let (stored, rest) = recording.split_at(frame.stored);
            text.extend(frame.text(stored).unwrap());
            recording = rest;
        }
    }
    String::from_utf8(text).unwrap()
}

/// Every text of a recording, and every key.
fn texts(recording: &[u8]) -> Vec<String> {
    fn walk(value: Value, texts: &mut Vec<String>) {
        match value {
            Value::String(text) => texts.push(text),
            Value::Array(values) => values.into_iter().for_each(|value| walk(value, texts)),
            // A policy's headroom has a field `default`.
            Value::Object(values) => values
                .into_iter()
                .filter(|(key, _)| key != "headroom")
                .for_each(|(key, value)| {
                    texts.push(key);
                    walk(value, texts);
                }),
            _ => {}
        }
    }
    let mut texts = Vec::new();
    text(recording)
        .lines()
        .for_each(|line| walk(serde_json::from_str(line).unwrap(), &mut texts));
    texts
}

/// The names that the inputs of the property tests have.
fn names() -> Vec<String> {
    let pods = (0..8).flat_map(|pod| [key(pod).name.to_string(), uid(pod).to_string()]);
    let nodes = (0..3).flat_map(|node| {
        let gpus = (0..4).map(move |index| unit_gpu(node, index).uuid.to_string());
        gpus.chain([node_name(node).to_string()])
    });
    let others = [
        "default",
        "other-1",
        "other-2",
        "team",
        "data",
        "team/data",
        "own-1",
        "lease/1/nonce",
        "m",
    ];
    pods.chain(nodes).chain(others.map(String::from)).collect()
}

fn class(name: &str, matches: Match) -> Class {
    Class {
        matches,
        eviction: Preemptibility::ForHigherPriority,
        ..Class::new(name)
    }
}

/// A policy that asks of names what pseudonyms cannot answer.
fn policy_with_names() -> Policy {
    let expression = |text| Some(Expression::compile(text).unwrap());
    let mut classes = vec![
        class(
            "by-letters",
            Match {
                expression: expression("pod.namespace.startsWith('def') && pod.priority > 0"),
                ..Match::default()
            },
        ),
        class(
            "by-model",
            Match {
                expression: expression("pod.model.contains('m')"),
                ..Match::default()
            },
        ),
        class(
            "of-nobody",
            Match {
                namespaces: vec!["nobody-*".into()],
                ..Match::default()
            },
        ),
        Class {
            pools: Some(vec!["left".into()]),
            ..class(
                "by-pattern",
                Match {
                    namespaces: vec!["de*".into(), "elsewhere".into()],
                    ..Match::default()
                },
            )
        },
        class(
            "by-label",
            Match {
                match_expressions: vec![LabelExpression {
                    key: "team".into(),
                    operator: LabelOperator::NotIn,
                    values: vec!["search".into()],
                }],
                ..Match::default()
            },
        ),
    ];
    classes.extend(built_in_classes());
    let tenants = vec![
        Tenant::new("everyone", &["*"]),
        Tenant::new("ours", &["default", "oth*"]),
    ];
    let pool = Pool {
        selector: [("side".into(), "left".into())].into(),
        ..Pool::new("left")
    };
    let policy = Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_tenants(tenants)
        .unwrap();
    let mut policy = policy.with_pools(vec![pool]).unwrap();
    policy.version = 1000;
    policy
}

fn set(policy: Policy) -> String {
    let set: Input = PolicySet {
        policy,
        prepared: None,
    }
    .into();
    serde_json::to_string(&set).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn no_name_is_left_and_all_replays_as_before(
        inputs in taken_inputs(40), each_segment in 1usize..40, policy_at in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut inputs = inputs;
        if let Some(at) = policy_at {
            inputs.insert(at.index(inputs.len() + 1), set(policy_with_names()));
        }
        let recording = written(&entries(&inputs, each_segment), 7);
        let redacted = redacted(&recording);
        let texts = texts(&redacted);
        let left: Vec<&String> = texts.iter().filter(|text| names().contains(text)).collect();
        prop_assert!(left.is_empty(), "{:?}", left);
        let policy = ["by-letters", "everyone", "search", "startsWith", "side", "de*"];
        prop_assert!(texts.iter().all(|text| policy.iter().all(|name| !text.contains(name))));
        let [before, after] = [&recording, &redacted].map(|bytes| replay(bytes).map(|replay| replay.progress));
        prop_assert!(before.is_ok(), "{:?}", before);
        prop_assert_eq!(after, before);
    }

    #[test]
    fn a_recording_that_is_cut_is_redacted_up_to_there(inputs in taken_inputs(12), cut in any::<prop::sample::Index>()) {
        let recording = written(&entries(&inputs, 9), 4);
        let redacted = redacted(&recording[..cut.index(recording.len())]);
        prop_assert!(redacted.is_empty() || replay(&redacted).is_ok());
    }

    #[test]
    fn a_damaged_recording_is_redacted_up_to_the_damage(
        inputs in taken_inputs(12), changed in any::<prop::sample::Index>(), bit in 0u32..8,
    ) {
        let mut recording = written(&entries(&inputs, 9), 4);
        let at = changed.index(recording.len());
        recording[at] ^= 1 << bit;
        let redacted = redacted(&recording);
        prop_assert!(redacted.is_empty() || replay(&redacted).is_ok(), "bit {} of byte {}", bit, at);
    }
}

/// A model may be called after the registry it comes from, whose domain is one of those whose keys stay.
#[test]
fn a_name_in_a_known_domain_is_hidden_and_a_key_is_not() {
    let mut demand = demand_of(1, 1, Sharing::Shared, 0);
    demand.model = Some(ModelId::parse("models.nvidia.com/secret").unwrap());
    let labels = [
        (
            "apps.kubernetes.io/pod-index".into(),
            "values.k8s.io/secret".into(),
        ),
        ("keys.example.com/secret".into(), "a".into()),
    ];
    let resources = ["nvidia.com/gpu".into()].into();
    demand.traits = PodTraits {
        labels: labels.into(),
        resources,
        ..PodTraits::default()
    }
    .into();
    let (waiting, disruption) = (ObservedWaiting::default(), None);
    let asked: Input = FilterAsked(VerbRequest {
        uid: uid(0),
        key: key(0),
        demand,
        waiting,
        disruption,
    })
    .into();
    let recording = written(&entries(&[serde_json::to_string(&asked).unwrap()], 1000), 7);
    let redacted = redacted(&recording);
    let text = text(&redacted);
    assert!(!text.contains("secret"), "{text}");
    assert!(
        text.contains("apps.kubernetes.io/pod-index") && text.contains("nvidia.com/gpu"),
        "{text}"
    );
    let [before, after] = [&recording, &redacted].map(|bytes| replay(bytes).unwrap().progress);
    assert_eq!(after, before);
}

/// Whose a node's GPUs are depends on names of resources and labels, and on patterns of the policy.
#[test]
fn a_node_of_another_allocator_keeps_its_allocator() {
    let observed = |resource: &str, value: &str| -> Input {
        let changes = vec![NodeLabel {
            key: "nvidia.com/mig.config.state".into(),
            value: value.into(),
        }];
        let signs = NodeSigns {
            resources: [(resource.into(), true)].into(),
            changes,
            ..NodeSigns::default()
        };
        let labelled = Some(vec![unit_gpu(0, 0)]);
        NodeObserved {
            signs,
            labelled,
            ..NodeObserved::new(node_name(0), NodeKind::Stowage)
        }
        .into()
    };
    let mut policy = Policy::default();
    policy.version = 1000;
    policy.nodes.harmless_resources = vec!["secret.example.com/*".into()];
    policy.nodes.ignored_labels = vec!["nvidia.com/mig.config.state".into()];
    let (waiting, demand) = (
        ObservedWaiting::default(),
        demand_of(1, 1, Sharing::Shared, 0),
    );
    let asked = || -> Input {
        let (waiting, demand) = (waiting.clone(), demand.clone());
        FilterAsked(VerbRequest {
            uid: uid(0),
            key: key(0),
            demand,
            waiting,
            disruption: None,
        })
        .into()
    };
    let inputs = [observed("secret.example.com/gpu", "secret"), asked()];
    let mut inputs: Vec<String> = inputs
        .iter()
        .map(|input| serde_json::to_string(input).unwrap())
        .collect();
    inputs.push(set(policy));
    inputs.push(serde_json::to_string(&asked()).unwrap());
    let recording = written(&entries(&inputs, 2), 7);
    let redacted = redacted(&recording);
    assert!(!text(&redacted).contains("secret"), "{}", text(&redacted));
    let is_open = |bytes: &[u8]| {
        let mut replay = replay(bytes).unwrap();
        let snapshot = replay.cluster().unwrap().snapshot();
        snapshot.nodes()[0].warnings.is_empty()
    };
    assert!(
        is_open(&recording) && is_open(&redacted),
        "the policy knows the resource and the label to be harmless"
    );
}

#[test]
fn gpu_requirements_by_labels_are_kept() {
    let product = Requirement::equals("nvidia.com/gpu.product", "NVIDIA-A100-80GB");
    let wish = GpuSelector::from_terms([vec![product]]).map(Arc::new);
    let demand = Demand {
        wish,
        ..demand_of(1, 1, Sharing::Shared, 0)
    };
    let waiting = ObservedWaiting::default();
    let asked = VerbRequest {
        uid: uid(0),
        key: key(0),
        demand,
        waiting,
        disruption: None,
    };
    let input = serde_json::to_string(&Input::from(FilterAsked(asked))).unwrap();
    let redacted = redacted(&written(&entries(&[input], 1), 7));
    assert!(
        text(&redacted).contains("NVIDIA-A100-80GB"),
        "{}",
        text(&redacted)
    );
}

/// A redacted recording is redacted once more to what it is: its names are in order already.
#[test]
fn pseudonyms_are_the_same_whatever_the_names_were() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let inputs = proptest::strategy::Strategy::new_tree(&taken_inputs(60), &mut runner).unwrap();
    let recording = written(
        &entries(&proptest::strategy::ValueTree::current(&inputs), 1000),
        7,
    );
    let once = redacted(&recording);
    assert_eq!(text(&redacted(&once)), text(&once));
}
