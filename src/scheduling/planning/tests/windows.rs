//! A class that turns preemptible while a window is open, or back, moves no pod faster than the eviction limits.

use super::*;
use crate::policy::{Class, EvictionRates, Match, Preemptibility, Window};
use crate::testkit::with_namespace;

const NODES: [&str; 4] = ["a", "b", "c", "d"];

fn night() -> Window {
    serde_json::from_str(r#"{"from": "20:00", "to": "06:00", "timeZone": "Europe/Berlin"}"#)
        .unwrap()
}

/// Jobs may be evicted at night, and two pods a minute.
fn policy() -> Policy {
    let matches = || Match {
        namespaces: vec!["jobs".into()],
        ..Match::default()
    };
    let job = |name| Class {
        matches: matches(),
        engine: false,
        ..Class::new(name)
    };
    let at_night = Class {
        when: vec![night()],
        eviction: Preemptibility::ForHigherPriority,
        ..job("night-job")
    };
    let mut classes = vec![at_night, job("job")];
    classes.extend(Policy::default().classes().to_vec());
    let mut policy = Policy::default().with_classes(classes).unwrap();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 2,
        ..EvictionRates::default()
    };
    policy
}

fn at_night() -> Policy {
    policy().with_open_windows([night()].into())
}

/// A job on the only GPU of each node, and a replica that waits for each.
fn full(policy: Policy) -> LedgerCluster {
    let job = with_namespace(shared(60, 0), "jobs", &policy);
    let replica = with_namespace(shared(60, 100), "chat", &policy);
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &NODES.map(|name| (name, 1)));
    NODES
        .iter()
        .for_each(|name| cluster.bound(&format!("job-{name}"), name, 0, job.clone()));
    NODES
        .iter()
        .for_each(|name| cluster.add_gated(&format!("replica-{name}"), replica.clone()));
    cluster
}

fn classes(cluster: &LedgerCluster) -> Vec<&str> {
    let policy = cluster.ledger().policy();
    NODES
        .iter()
        .map(|name| {
            &*policy
                .class(
                    cluster
                        .ledger()
                        .expect_pod(&uid(&format!("job-{name}")))
                        .demand
                        .class,
                )
                .name
        })
        .collect()
}

fn evicted(cluster: &mut LedgerCluster) -> usize {
    cluster
        .plan()
        .iter()
        .filter(|step| step.contains(" after "))
        .count()
}

#[test]
fn a_window_that_opens_or_closes_moves_no_pod_and_evictions_keep_to_their_limits() {
    let mut cluster = full(policy());
    assert_eq!(evicted(&mut cluster), 0);
    assert_eq!(classes(&cluster), ["job"; 4]);
    let (version, digest) = (
        cluster.ledger().policy().version,
        cluster.ledger().policy().digest,
    );

    cluster.ledger_mut().set_policy(at_night());
    assert_eq!(classes(&cluster), ["night-job"; 4]);
    assert!(
        cluster.ledger().policy().version > version && cluster.ledger().policy().digest == digest
    );
    assert!(NODES.iter().all(|name| {
        cluster
            .ledger()
            .expect_pod(&uid(&format!("job-{name}")))
            .node()
            .is_some()
    }));
    assert_eq!(evicted(&mut cluster), 2, "as many as a minute allows");

    cluster.ledger_mut().set_policy(policy());
    assert_eq!(evicted(&mut cluster), 0, "back before any was evicted");
    assert_eq!(classes(&cluster), ["job"; 4]);
}

#[test]
fn windows_that_open_and_close_all_the_time_evict_no_more_than_the_limits_allow() {
    let mut cluster = full(policy());
    let mut evictions = 0;
    for n in 0..30 {
        let policy = if n % 2 == 0 { at_night() } else { policy() };
        cluster.ledger_mut().set_policy(policy);
        cluster.advance(2);
        for step in plan_steps(cluster.ledger_mut(), 64) {
            let PlanStep::Place(placements) = step else {
                continue;
            };
            for placement in placements {
                cluster
                    .ledger_mut()
                    .reserve(&placement.uid, placement.reservation.clone())
                    .unwrap();
                cluster
                    .ledger_mut()
                    .record_evictions(&placement.reservation.victims);
                evictions += placement.reservation.victims.len();
            }
        }
    }
    assert_eq!(evictions, 2);
}

#[test]
fn a_closed_class_takes_no_pod_and_the_next_one_does() {
    let policy = policy();
    let traits = crate::vocabulary::classification::PodTraits {
        namespace: "jobs".into(),
        ..Default::default()
    };
    let name = |policy: &Policy| policy.class(policy.classify(&traits).class).name.clone();
    assert_eq!(
        (name(&policy), name(&at_night())),
        ("job".into(), "night-job".into())
    );
    let other: Window =
        serde_json::from_str(r#"{"from": "20:00", "to": "06:00", "timeZone": "UTC"}"#).unwrap();
    assert_eq!(
        name(&policy.with_open_windows([other].into())),
        "job",
        "a window that the policy does not have"
    );
}
