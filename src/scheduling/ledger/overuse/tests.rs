//! Pods over their grants: when their owners are told, when they are evicted, and what an agent cannot bring about.

use super::*;
use crate::policy::{Class, EvictionRates, Policy, Protection};
use crate::testkit::{LedgerCluster, demand_of, node, uid};
use crate::verbs::Cluster;
use crate::verbs::observe::{PodDeleted, ReadingReported};
use crate::verbs::tick::{PolicySet, TakeOveruse};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, Replacement,
};
use crate::vocabulary::node_reading::NodeReading;

fn evicting() -> Policy {
    let mut policy = Policy::default();
    policy.overuse = OveruseRule::Evict;
    policy
}

/// Another policy of this process, in force.
fn set_to(version: u64, mut policy: Policy) -> PolicySet {
    policy.version = version;
    PolicySet {
        policy,
        prepared: None,
    }
}

fn with_class(policy: Policy, name: &str, change: fn(&mut Class)) -> Policy {
    let mut classes = policy.classes().to_vec();
    classes
        .iter_mut()
        .filter(|class| class.name == name)
        .for_each(change);
    policy.with_classes(classes).unwrap()
}

fn disruption_info(info: DisruptionInfo) -> ObservedDisruptionInfo {
    ObservedDisruptionInfo {
        disruption_info: info,
        ..ObservedDisruptionInfo::default()
    }
}

/// Node `n` with two GPUs, and a pod with a grant of 10 GiB on one of them.
fn cluster(policy: Policy, name: &str, priority: i32) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 2)]);
    add(&mut cluster, name, priority, DisruptionInfo::default());
    cluster
}

fn add(cluster: &mut LedgerCluster, name: &str, priority: i32, info: DisruptionInfo) {
    let demand = demand_of(10 << 30, 1, Sharing::Shared, priority);
    cluster.add_running(
        name,
        ("n", 0),
        demand,
        Some(Millis::seconds(600)),
        disruption_info(info),
    );
}

fn over(pod: &str, used_gib: u64) -> OverGrant {
    OverGrant {
        pod: uid(pod),
        granted: Bytes::gib(10),
        used: Bytes::gib(used_gib),
        ungranted: None,
    }
}

fn report(cluster: &mut LedgerCluster, over_grant: &[OverGrant]) {
    let reading = NodeReading {
        sampled: cluster.ledger().now(),
        over_grant: over_grant.to_vec(),
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: node("n"),
        reading: reading.into(),
    });
}

/// What is due, in words.
fn due(cluster: &mut Cluster) -> Vec<String> {
    let said = |step: OveruseStep| match step.action {
        OveruseAction::Announce { evicted_in } => {
            let (used, granted) = (step.used.0 >> 30, step.granted.0 >> 30);
            let (lasted, left) = (step.duration.0 / 1000, evicted_in.0 / 1000);
            format!(
                "{} told: {used} of {granted} for {lasted} s, {left} s left",
                step.uid
            )
        }
        OveruseAction::Evict => format!("{} evicted", step.uid),
    };
    cluster.apply(TakeOveruse).into_iter().map(said).collect()
}

/// One report a second that says this, and what becomes due when.
fn watch(cluster: &mut LedgerCluster, seconds: u64, over_grant: &[OverGrant]) -> Vec<String> {
    let mut all = Vec::new();
    for second in 1..=seconds {
        cluster.advance(1);
        report(cluster, over_grant);
        all.extend(
            due(cluster)
                .into_iter()
                .map(|what| format!("{second}: {what}")),
        );
    }
    all
}

#[test]
fn a_pod_over_its_grant_is_announced_and_then_evicted() {
    let mut cluster = cluster(evicting(), "job", -5);
    let told = watch(&mut cluster, 130, &[over("job", 12)]);
    assert_eq!(
        told,
        [
            "61: job told: 12 of 10 for 60 s, 60 s left",
            "121: job evicted"
        ]
    );
}

#[test]
fn by_default_a_pod_over_its_grant_is_only_reported() {
    let mut cluster = cluster(Policy::default(), "job", -5);
    assert_eq!(
        watch(&mut cluster, 300, &[over("job", 70)]),
        Vec::<String>::new()
    );
    assert_eq!(
        cluster
            .ledger()
            .overuse_of(&uid("job"))
            .map(Overuse::excess),
        Some(Bytes::gib(60))
    );
}

#[test]
fn a_pod_of_a_protected_class_is_evicted_only_if_its_class_says_so() {
    let mut protected = cluster(evicting(), "chat", 100);
    assert_eq!(
        watch(&mut protected, 300, &[over("chat", 70)]),
        Vec::<String>::new()
    );
    let own = with_class(Policy::default(), "serving", |class| {
        class.overuse = Some(OveruseRule::Evict);
        class.overuse_after = Some(Millis::seconds(10));
    });
    let mut own = cluster(own, "chat", 100);
    let told = watch(&mut own, 25, &[over("chat", 70)]);
    assert_eq!(
        told,
        [
            "11: chat told: 70 of 10 for 10 s, 10 s left",
            "21: chat evicted"
        ]
    );
}

#[test]
fn a_report_without_the_pod_or_a_pause_between_reports_restarts_the_time() {
    let mut cluster = cluster(evicting(), "job", -5);
    assert_eq!(
        watch(&mut cluster, 59, &[over("job", 12)]),
        Vec::<String>::new()
    );
    report(&mut cluster, &[]);
    assert_eq!(
        watch(&mut cluster, 60, &[over("job", 12)]),
        Vec::<String>::new()
    );
    cluster.advance(6);
    assert_eq!(
        due(&mut cluster),
        Vec::<String>::new(),
        "nothing fresh is known"
    );
    assert_eq!(
        watch(&mut cluster, 60, &[over("job", 12)]),
        Vec::<String>::new()
    );
    assert_eq!(watch(&mut cluster, 1, &[over("job", 12)]).len(), 1);
}

#[test]
fn a_pod_that_keeps_to_its_grant_after_it_was_told_stays() {
    let mut cluster = cluster(evicting(), "job", -5);
    assert_eq!(watch(&mut cluster, 100, &[over("job", 12)]).len(), 1);
    assert_eq!(watch(&mut cluster, 200, &[]), Vec::<String>::new());
    assert_eq!(cluster.ledger().overuse_of(&uid("job")), None);
}

#[test]
fn agents_reports_of_other_nodes_pods_and_of_lower_grants_are_ignored() {
    let mut cluster = cluster(evicting(), "job", -5);
    cluster.add_waiting("waits", demand_of(10 << 30, 1, Sharing::Shared, -5));
    let small = OverGrant {
        granted: Bytes::gib(1),
        used: Bytes::gib(9),
        ..over("job", 9)
    };
    let claims = [over("nobody", 70), over("waits", 70), small];
    assert_eq!(watch(&mut cluster, 300, &claims), Vec::<String>::new());
    assert!(
        cluster.ledger().overuse.nodes.is_empty(),
        "nothing is remembered of them"
    );
}

#[test]
fn the_same_sample_counts_once_and_an_old_one_not_at_all() {
    let quick = with_class(evicting(), "opportunistic", |class| {
        class.overuse_after = Some(Millis::default())
    });
    let mut cluster = cluster(quick, "job", -5);
    cluster.advance(1);
    (0..10).for_each(|_| report(&mut cluster, &[over("job", 12)]));
    assert_eq!(
        due(&mut cluster),
        Vec::<String>::new(),
        "one sample is no proof"
    );
    let old = cluster.ledger().now().before(Millis::seconds(10));
    for _ in 0..5 {
        let reading = NodeReading {
            sampled: old,
            over_grant: vec![over("job", 12)],
            ..NodeReading::default()
        };
        cluster.apply(ReadingReported {
            node: node("n"),
            reading: reading.into(),
        });
    }
    assert_eq!(cluster.ledger().overuse_of(&uid("job")), None);
    assert_eq!(watch(&mut cluster, 3, &[over("job", 12)]).len(), 1);
}

#[test]
fn an_agent_that_accuses_every_pod_is_bounded_by_the_eviction_rates() {
    let mut policy = evicting();
    policy.preemption.evictions_per_minute = EvictionRates {
        cluster: 60,
        node: 2,
        tenant: 30,
    };
    let mut cluster = cluster(policy, "job-0", -5);
    let names: Vec<String> = (0..6).map(|n| format!("job-{n}")).collect();
    names
        .iter()
        .for_each(|name| add(&mut cluster, name, -5, DisruptionInfo::default()));
    let claims: Vec<OverGrant> = names.iter().map(|name| over(name, 70)).collect();
    let evicted = |all: &[String]| all.iter().filter(|what| what.ends_with("evicted")).count();
    let all = watch(&mut cluster, 300, &claims);
    assert_eq!(
        evicted(&all[..8]),
        2,
        "six were told, and two are evicted: {all:?}"
    );
    assert_eq!(evicted(&all), 6, "two a minute from the third on: {all:?}");
    let named = |name: &String| {
        all.iter()
            .any(|what| what.ends_with(&format!("{name} evicted")))
    };
    assert!(
        names.iter().all(named),
        "those that stay do not keep the others from their turn: {all:?}"
    );
}

#[test]
fn members_of_groups_and_protected_pods_are_only_reported() {
    let group = GroupKey {
        namespace: "ns".into(),
        kind: GroupKind::SchedulingGroup,
        name: "g".into(),
    };
    let member = DisruptionInfo {
        group: Some(group),
        ..DisruptionInfo::default()
    };
    let mut cluster = cluster(evicting(), "job", -5);
    add(&mut cluster, "a", -5, member.clone());
    add(&mut cluster, "b", -5, member);
    add(
        &mut cluster,
        "kept",
        -5,
        DisruptionInfo {
            do_not_disrupt: true,
            ..DisruptionInfo::default()
        },
    );
    add(
        &mut cluster,
        "queued",
        -5,
        DisruptionInfo {
            queue_managed: true,
            ..DisruptionInfo::default()
        },
    );
    let replacement = Replacement::Static;
    add(
        &mut cluster,
        "static",
        -5,
        DisruptionInfo {
            replacement,
            ..DisruptionInfo::default()
        },
    );
    let claims = ["a", "kept", "queued", "static"].map(|name| over(name, 12));
    assert_eq!(watch(&mut cluster, 200, &claims), Vec::<String>::new());
    let ignoring = with_class(evicting(), "opportunistic", |class| {
        class.do_not_disrupt = Protection::Ignore
    });
    cluster.apply(set_to(1, ignoring));
    let told = watch(&mut cluster, 1, &claims);
    assert!(
        matches!(&told[..], [one] if one.starts_with("1: kept told")),
        "{told:?}"
    );
}

#[test]
fn a_policy_that_only_reports_again_takes_the_announcement_back() {
    let mut cluster = cluster(evicting(), "job", -5);
    assert_eq!(watch(&mut cluster, 100, &[over("job", 12)]).len(), 1);
    // Another class evicts, so that pods are looked at all the same.
    let reporting = with_class(Policy::default(), "batch", |class| {
        class.overuse = Some(OveruseRule::Evict)
    });
    cluster.apply(set_to(1, reporting));
    assert_eq!(
        watch(&mut cluster, 100, &[over("job", 12)]),
        Vec::<String>::new()
    );
    cluster.apply(set_to(2, evicting()));
    let told = watch(&mut cluster, 59, &[over("job", 12)]);
    assert!(
        matches!(&told[..], [one] if one.starts_with("1: job told")),
        "a new announcement: {told:?}"
    );
}

#[test]
fn overuse_of_gone_pods_is_forgotten_and_the_rest_survives_an_export() {
    let mut cluster = cluster(evicting(), "job", -5);
    assert_eq!(watch(&mut cluster, 100, &[over("job", 12)]).len(), 1);
    let stored = serde_json::to_string(&cluster.export()).unwrap();
    let mut loaded = Cluster::load(serde_json::from_str(&stored).unwrap()).unwrap();
    assert_eq!(loaded.ledger().overuse, cluster.ledger().overuse);
    cluster.apply(PodDeleted(uid("job")));
    loaded.apply(PodDeleted(uid("job")));
    assert!(cluster.ledger().overuse.nodes.is_empty() && loaded.ledger().overuse.nodes.is_empty());
}
