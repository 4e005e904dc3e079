//! Any policy that a file can express, stored and loaded again, rendered and parsed again, is the same policy.
//!
//! The policies are generated from the schema, so a new setting is covered as soon as it is declared.

use super::format::{TextFormat, format_duration, format_quantity, format_speed};
use super::parse::{Draft, render};
use super::shape::{Field, Requirement, SHAPES, SchemaShape};
use super::{digest, file};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeSet;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::classification::PodTraits;
use stowage_scheduling::vocabulary::demand::Sharing;

/// Names of the built-in classes, so that a class can name another.
const NAMES: [&str; 4] = ["dedicated", "opportunistic", "batch", "serving"];
const EXPRESSIONS: [&str; 3] = [
    "pod.gpus > 1",
    "pod.namespace == 'batch' && pod.vram >= 1024",
    "'a' in pod.labels && pod.labels['a'] == 'b'",
];

/// Anything that a shape allows.
fn values(shape: &SchemaShape) -> BoxedStrategy<Json> {
    match shape {
        SchemaShape::Fields(fields) => some_of(fields),
        SchemaShape::Table { values: value, .. } => {
            let entries = vec((select(vec!["a", "A100", "h100-sxm"]), values(value)), 0..3);
            entries
                .prop_map(|all| {
                    all.into_iter()
                        .map(|(key, value)| (key.to_owned(), value))
                        .collect::<Map<_, _>>()
                })
                .prop_map(Json::Object)
                .boxed()
        }
        SchemaShape::List(item) => vec(values(item), 0..4).prop_map(Json::Array).boxed(),
        SchemaShape::Enum(words) => select(words.clone()).prop_map(Json::from).boxed(),
        SchemaShape::Text { format, .. } => {
            texts(format.expect("every text of a policy has a format"))
        }
        SchemaShape::Integer { at_least, at_most } => {
            let (least, most) = (
                i64::try_from(*at_least).unwrap(),
                i64::try_from(*at_most).unwrap(),
            );
            (least..=most).prop_map(Json::from).boxed()
        }
        SchemaShape::Boolean => any::<bool>().prop_map(Json::from).boxed(),
    }
}

fn some_of(fields: &[Field]) -> BoxedStrategy<Json> {
    let field = |field: &Field| {
        let name = field.name.clone();
        let value = if name == "name" || field.requirement == Requirement::Always {
            values(&field.shape).prop_map(Some).boxed()
        } else {
            option::of(values(&field.shape)).boxed()
        };
        value.prop_map(move |value| Some((name.clone(), value?)))
    };
    let each: Vec<_> = fields.iter().map(field).collect();
    each.prop_map(|entries| Json::Object(entries.into_iter().flatten().collect()))
        .boxed()
}

fn texts(format: TextFormat) -> BoxedStrategy<Json> {
    match format {
        TextFormat::Percent { at_most } => {
            (0..=at_most).prop_map(|n| json!(format!("{n}%"))).boxed()
        }
        TextFormat::Duration => (0..=365 * 86_400_000u64)
            .prop_map(|n| format_duration(Millis(n)).into())
            .boxed(),
        TextFormat::Quantity => (0..=1u64 << 60)
            .prop_map(|n| format_quantity(Bytes(n)).into())
            .boxed(),
        TextFormat::Speed => (1..=1u64 << 60)
            .prop_map(|n| format_speed(Bytes(n)).into())
            .boxed(),
        TextFormat::Cel => select(EXPRESSIONS.to_vec()).prop_map(Json::from).boxed(),
        TextFormat::MigProfile => Just(json!("3g.40gb")).boxed(),
        TextFormat::ResourcePattern => select(vec!["example.com/gpu", "example.com/*"])
            .prop_map(Json::from)
            .boxed(),
        TextFormat::NamePattern => select(vec!["dedicated", "b*", "*ving", "*"])
            .prop_map(Json::from)
            .boxed(),
        TextFormat::Weekdays => select(vec!["mon", "mon-fri", "fri-mon"])
            .prop_map(Json::from)
            .boxed(),
        TextFormat::TimeOfDay => (0..=96u16)
            .prop_map(|n| format!("{:02}:{:02}", n / 4, n % 4 * 15).into())
            .boxed(),
        TextFormat::GpuModel => select(vec!["H100", "a100"]).prop_map(Json::from).boxed(),
        TextFormat::TimeZone => select(vec!["UTC", "Europe/Berlin"])
            .prop_map(Json::from)
            .boxed(),
        TextFormat::Timestamp => Just(json!("2026-11-23T22:00:00+01:00")).boxed(),
        TextFormat::Name
        | TextFormat::Subdomain
        | TextFormat::QualifiedName
        | TextFormat::LabelValue => select(NAMES.to_vec()).prop_map(Json::from).boxed(),
    }
}

/// A policy that the schema allows and that makes sense: each name once, a catch-all class, each namespace of one tenant.
fn policies() -> impl Strategy<Value = Policy> {
    values(&SHAPES.policy).prop_map(|mut file| {
        let pools: Vec<Json> = file["nodePools"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|pool| pool["name"].clone())
            .collect();
        for list in ["classes", "tenants", "nodePools"] {
            let mut names = BTreeSet::new();
            if let Some(entries) = file.get_mut(list).and_then(Json::as_array_mut) {
                entries.retain(|entry| names.insert(entry["name"].to_string()));
                entries
                    .iter_mut()
                    .filter_map(Json::as_object_mut)
                    .for_each(|entry| make_sense(list, entry, &pools));
            }
        }
        let file: file::PolicySpec = serde_json::from_value(file).expect("the schema allows it");
        let mut policy = Draft::new(&file)
            .expect("the schema allows it")
            .finish()
            .expect("it makes sense");
        policy.version = 7;
        policy.digest = digest(&policy);
        // Of its windows, those of one time zone.
        let open = policy
            .windows()
            .filter(|window| window.time_zone == "UTC")
            .cloned()
            .collect();
        policy.with_open_windows(open)
    })
}

fn make_sense(list: &str, entry: &mut Map<String, Json>, pools: &[Json]) {
    let name = entry["name"].clone();
    if list == "classes" && name == "serving" {
        entry.remove("match");
        entry.remove("when");
    }
    if let Some(named) = entry.get_mut("pools").and_then(Json::as_array_mut) {
        named.retain(|name| pools.contains(name));
    }
    if list == "tenants" {
        let pattern = format!("{}*", name.as_str().unwrap_or_default());
        entry.insert("namespaces".into(), json!([name, pattern]));
    }
}

fn pods() -> impl Strategy<Value = PodTraits> {
    let name = || select(NAMES.to_vec()).prop_map(str::to_owned);
    let sharing = select(vec![Sharing::Shared, Sharing::Exclusive]);
    (
        name(),
        name(),
        name(),
        any::<i32>(),
        sharing,
        1u32..4,
        any::<u32>(),
    )
        .prop_map(
            |(namespace, priority_class, label, priority, sharing, gpus, vram)| PodTraits {
                namespace,
                labels: [("a".to_owned(), label.clone())].into(),
                priority_class,
                priority,
                sharing,
                resources: [label].into(),
                gpus,
                vram: Bytes(vram.into()),
                ..PodTraits::default()
            },
        )
}

proptest! {
    #[test]
    fn a_policy_that_is_stored_and_loaded_is_equal_and_classifies_the_same(policy in policies(), pod in pods()) {
        let stored = serde_json::to_string(&policy).unwrap();
        let loaded: Policy = serde_json::from_str(&stored).unwrap();
        prop_assert_eq!(&loaded, &policy, "{}", stored);
        prop_assert_eq!(loaded.classify(&pod), policy.classify(&pod));
        let labels = [("a".to_owned(), pod.labels["a"].clone())].into();
        prop_assert_eq!(loaded.admission(&labels), policy.admission(&labels));
    }

    #[test]
    fn a_policy_that_is_rendered_and_parsed_is_equal(policy in policies()) {
        let rendered = serde_json::to_string(&render(&policy)).unwrap();
        let file: file::PolicySpec = serde_json::from_str(&rendered).unwrap();
        let mut parsed = Draft::new(&file).expect("the schema allows it").finish().unwrap();
        (parsed.version, parsed.digest) = (policy.version, digest(&parsed));
        // A file does not say what time it is.
        let parsed = parsed.with_open_windows(policy.open_windows().clone());
        prop_assert_eq!(parsed, policy, "{}", rendered);
    }
}

#[test]
fn a_stored_policy_that_breaks_an_invariant_is_refused() {
    let mut stored = serde_json::to_value(Policy::default()).unwrap();
    stored["classes"].as_array_mut().unwrap().pop();
    let refused = serde_json::from_value::<Policy>(stored)
        .unwrap_err()
        .to_string();
    assert!(
        refused.starts_with("the last class, \"batch\", does not match every pod"),
        "{refused}"
    );
}
