//! The cost of classification: the same requests to a Stowage with the default policy and to one with fifty classes of CEL rules,
//! alternately in one process.
//!
//! The rules are the most expensive ones possible: only an expression in each, so that no cheap condition decides earlier, and
//! the pod's own class is last or nearly last as often as first. Every eighth request is the first of its kind and is evaluated
//! against all of them.

use crate::cluster::BenchCluster;
use crate::samples::Samples;
use crate::{ROUNDS, WARM_UP, extender};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stowage_policy_file::{SourceText, load};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::classification::PodTraits;
use stowage_server::extender::wire::ExtenderArgs;
use stowage_server::extender::{Extender, filter};

const CLASSES: usize = 50;
/// Kinds of pods: each class has five of its own.
const KINDS: usize = CLASSES * 5;
/// How often the policy is changed to learn what that takes.
const CHANGES: usize = 5;

pub fn compare_with_default(cluster: &BenchCluster) {
    let default = extender(cluster, Policy::default());
    let ruled = extender(cluster, policy_with_classes());
    let (mut by_default, mut by_rules) = (Samples::default(), Samples::default());
    for round in 0..ROUNDS + WARM_UP {
        let body = cluster.filter_body_with_labels(round, &labels(round % KINDS));
        let time = |extender: &Extender, samples: &mut Samples| {
            let started = Instant::now();
            let answer = ask(extender, &body);
            let took = started.elapsed();
            if round >= WARM_UP {
                samples.add(took);
            }
            answer
        };
        // The first of the two finds the request body in no cache, so they take turns.
        let (one, other) = match round % 2 {
            0 => (time(&default, &mut by_default), time(&ruled, &mut by_rules)),
            _ => (time(&ruled, &mut by_rules), time(&default, &mut by_default)),
        };
        assert_eq!(
            one, other,
            "the rules say what a pod is, and not where it fits"
        );
    }
    assert_classified(&ruled);
    report(&by_default, &by_rules);
    report_classifying(&ruled);
    report_change(&default, cluster);
}

fn ask(extender: &Extender, body: &[u8]) -> Vec<u8> {
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).expect("a request");
    let nodes = args.request_nodes().expect("nodes").expect("names");
    filter::filter(extender, &args, &nodes)
        .expect("an answer")
        .to_json()
}

fn labels(kind: usize) -> BTreeMap<String, String> {
    let labels = [
        ("app", "llm".into()),
        ("team", format!("t{}", kind % CLASSES)),
        ("variant", kind.to_string()),
    ];
    labels
        .map(|(key, value): (&str, String)| (key.to_owned(), value))
        .into()
}

/// Policy with many classes, as an administrator would write it.
fn policy_with_classes() -> Policy {
    let class = |n: usize| {
        let rule =
            format!("pod.labels['team'] == 't{n}' && pod.vram < 40 * 1024 && !pod.exclusive");
        format!("  - {{name: team-{n}, engine: false, match: {{expression: \"{rule}\"}}}}\n")
    };
    let text = format!(
        "kind: SchedulingPolicy\nclasses:\n{}",
        (0..CLASSES).map(class).collect::<String>()
    );
    load(&[SourceText::new("policy.yaml", text)])
        .expect("the policy is one")
        .policy
}

/// Each class accepts its own pods.
fn assert_classified(extender: &Extender) {
    let ledger = extender.state.cluster();
    let class = |traits: &PodTraits| {
        ledger
            .ledger()
            .policy()
            .class(ledger.ledger().policy().classify(traits).class)
            .name
            .clone()
    };
    let asked = ledger
        .ledger()
        .pod_states()
        .into_values()
        .filter(|entry| entry.demand.traits.labels.contains_key("team"));
    let mut classes: Vec<String> = asked
        .map(|entry| {
            let traits = &entry.demand.traits;
            let class = class(traits);
            assert_eq!(
                class.strip_prefix("team-"),
                traits.labels["team"].strip_prefix('t')
            );
            class
        })
        .collect();
    classes.sort_unstable();
    classes.dedup();
    assert_eq!(classes.len(), CLASSES);
}

fn report(by_default: &Samples, by_rules: &Samples) {
    let (p50, p99) = (by_default.percentile(50), by_default.percentile(99));
    let (ruled50, ruled99) = (by_rules.percentile(50), by_rules.percentile(99));
    println!(
        "filter in process, {KINDS} kinds of pods: default policy p50 {p50:.0} µs, p99 {p99:.0} µs; {CLASSES} classes with \
         CEL rules p50 {ruled50:.0} µs, p99 {ruled99:.0} µs: × {:.3} p50, × {:.2} p99",
        ruled50 / p50,
        ruled99 / p99
    );
}

/// Prints how much longer the first pod of its kind waits: for its classification.
fn report_classifying(extender: &Extender) {
    let policy = extender.state.cluster().ledger().policy().clone();
    let mut samples = Samples::default();
    for kind in 0..KINDS {
        let traits = PodTraits {
            labels: labels(kind),
            ..PodTraits::default()
        };
        let started = Instant::now();
        let classification = policy.classify(&traits);
        samples.add(started.elapsed());
        assert_eq!(
            policy.class(classification.class).name,
            format!("team-{}", kind % CLASSES)
        );
    }
    println!(
        "a kind of pod classified for the first time: p50 {:.0} µs, p99 {:.0} µs",
        samples.percentile(50),
        samples.percentile(99)
    );
}

/// How long a change of policy takes, and the longest that a filter waits for its answer meanwhile.
fn report_change(extender: &Extender, cluster: &BenchCluster) {
    let mut changes = Samples::default();
    let is_over = AtomicBool::new(false);
    let body = cluster.filter_body_with_labels(0, &labels(0));
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let started = Instant::now();
                ask(extender, &body);
                longest = longest.max(started.elapsed());
            }
            longest
        });
        for change in 0..CHANGES {
            let policy = if change % 2 == 0 {
                policy_with_classes()
            } else {
                Policy::default()
            };
            let started = Instant::now();
            extender.state.set_policy(policy);
            changes.add(started.elapsed());
        }
        is_over.store(true, Ordering::Relaxed);
        let longest = asking.join().expect("every filter is answered");
        println!(
            "a change of policy, all pods classified again: {:.0} ms; the longest answer of a filter meanwhile: {:.0} ms",
            changes.percentile(50) / 1e3,
            longest.as_secs_f64() * 1e3
        );
    });
}
