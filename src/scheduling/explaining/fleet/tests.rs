//! What the view of the fleet says of nodes, GPUs, pods and tenants.

use super::history::FleetSums;
use super::*;
use crate::explaining::testkit::{ExplainedCluster, TestPod, name, pod};
use crate::policy::Tenant;
use crate::units::Millis;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::disruption_info::DisruptionInfo;

/// The view, whose sums are those that are made without one.
fn fleet(cluster: &ExplainedCluster, most_pending: usize) -> Fleet {
    let fleet = Fleet::from_ledger(cluster.cluster.ledger(), most_pending);
    assert_eq!(
        FleetSums::from_ledger(cluster.cluster.ledger()),
        FleetSums::from_fleet(&fleet)
    );
    fleet
}

#[test]
fn a_pod_is_shown_on_its_gpus_with_what_it_has_and_what_was_measured() {
    let mut cluster = ExplainedCluster::new(Policy::default())
        .with_node("a", 2)
        .with_running(&pod("chat", "40Gi"), "a", &[1]);
    cluster.report("a", &[(1, 70, 3)], &[]);
    let fleet = fleet(&cluster, 10);
    let [node] = &fleet.nodes[..] else {
        panic!("{fleet:?}")
    };
    let [idle, busy] = &node.gpus[..] else {
        panic!("{node:?}")
    };
    assert_eq!(
        (idle.allocated_bytes, idle.used_bytes, idle.queue),
        (Bytes::ZERO, Some(Bytes::ZERO), Some(0))
    );
    assert_eq!(
        (busy.allocated_bytes, busy.used_bytes),
        (Bytes::gib(40), Some(Bytes::gib(40)))
    );
    assert_eq!(
        (busy.kv_cache_percent, busy.queue),
        (Percent::new(70), Some(3))
    );
    assert_eq!(
        busy.allocatable_bytes,
        Bytes::gib(72),
        "a tenth is headroom"
    );
    let [chat] = &node.pods[..] else {
        panic!("{node:?}")
    };
    assert_eq!(
        (&*chat.pod.name, &chat.gpus[..], chat.phase),
        ("chat", &[1][..], OccupantPhase::Bound)
    );
    assert_eq!(
        fleet.now.since(chat.started.unwrap()),
        Millis::seconds(3600)
    );
}

#[test]
fn a_pod_with_limits_in_force_shows_the_least_of_them_and_its_use() {
    let chat = TestPod {
        gpus: Some(2),
        ..pod("chat", "80Gi")
    };
    let mut cluster = ExplainedCluster::new(Policy::default())
        .with_node("a", 2)
        .with_running(&chat, "a", &[0, 1]);
    cluster.report("a", &[], &[]);
    let shown = |cluster: &ExplainedCluster| {
        let chat = &fleet(cluster, 10).nodes[0].pods[0];
        (chat.limit_bytes, chat.used_bytes)
    };
    assert_eq!(shown(&cluster), (None, None));
    let limits = [Some(Bytes::gib(80)), Some(Bytes::gib(40))];
    cluster.report_limits("a", &chat, &limits);
    assert_eq!(shown(&cluster), (limits[1], Some(Bytes::gib(40))));
}

#[test]
fn of_pods_that_wait_the_first_by_priority_and_by_time_are_listed_and_all_are_counted() {
    let mut cluster = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    for (index, priority) in [0, 5, 0, 5].into_iter().enumerate() {
        let mut waiting = pod(&format!("w{index}"), "100Gi");
        waiting.priority = priority;
        cluster.add_waiting(&waiting);
        cluster.advance(Millis::seconds(1));
    }
    let fleet = fleet(&cluster, 3);
    let listed: Vec<&str> = fleet
        .pending
        .iter()
        .map(|pending| &*pending.pod.name)
        .collect();
    assert_eq!((listed, fleet.pending_count), (vec!["w1", "w3", "w0"], 4));
    assert_eq!(fleet.now.since(fleet.pending[0].since), Millis::seconds(3));
}

#[test]
fn classes_and_tenants_have_what_their_pods_have() {
    let guarantee = TenantUsage {
        vram: Bytes::gib(40),
        milli_gpus: u64::MAX,
    };
    let limit = TenantLimit {
        vram: None,
        milli_gpus: Some(3000),
    };
    let policy = Policy::default()
        .with_tenants(vec![Tenant {
            guarantee,
            limit,
            ..Tenant::new("team", &["team"])
        }])
        .unwrap();
    let mut batch = pod("batch", "10Gi");
    batch.priority = -5;
    let mut cluster = ExplainedCluster::new(policy)
        .with_node("a", 2)
        .with_running(&batch, "a", &[0]);
    let mut exclusive = pod("alone", "20Gi");
    exclusive.exclusive = true;
    cluster.add_bound_with(&exclusive, "a", &[1], DisruptionInfo::default());
    cluster.add_waiting(&pod("waits", "100Gi"));
    let fleet = fleet(&cluster, 10);
    let class = |name: &str| {
        fleet
            .classes
            .iter()
            .find(|class| class.name == name)
            .unwrap()
    };
    let batch = class("opportunistic");
    assert_eq!(
        (batch.preemptible, batch.allocated_bytes, batch.pods),
        (true, Bytes::gib(10), 1)
    );
    // The whole GPU, as the ledger charges it.
    let charged: Bytes = fleet.nodes[0]
        .gpus
        .iter()
        .map(|gpu| gpu.allocated_bytes)
        .sum();
    let allocated: Bytes = fleet
        .classes
        .iter()
        .map(|class| class.allocated_bytes)
        .sum();
    assert_eq!((charged, allocated), (Bytes::gib(82), Bytes::gib(82)));
    let [team] = &fleet.tenants[..] else {
        panic!("{fleet:?}")
    };
    assert_eq!(
        (team.guarantee_bytes, team.guarantee_milli_gpus),
        (Some(Bytes::gib(40)), None)
    );
    assert_eq!(
        (team.limit_bytes, team.limit_milli_gpus, team.pending),
        (None, Some(3000), 1)
    );
    assert_eq!(team.used_bytes, Bytes::gib(82));
}

#[test]
fn nothing_that_did_not_change_differs_a_second_later_and_it_survives_json() {
    let mut cluster = ExplainedCluster::new(Policy::default())
        .with_node("a", 2)
        .with_running(&pod("chat", "40Gi"), "a", &[1]);
    cluster.add_waiting(&pod("waits", "100Gi"));
    let before = fleet(&cluster, 10);
    cluster.advance(Millis::seconds(1));
    let after = fleet(&cluster, 10);
    assert_ne!(before.now, after.now);
    assert_eq!(
        before,
        Fleet {
            now: before.now,
            ..after.clone()
        }
    );
    let text = serde_json::to_string(&after).unwrap();
    assert_eq!(serde_json::from_str::<Fleet>(&text).unwrap(), after);
}

#[test]
fn a_node_without_gpus_and_pods_is_not_shown() {
    let cluster = ExplainedCluster::new(Policy::default())
        .with_unreported_node("cpu")
        .with_node("a", 1);
    let fleet = fleet(&cluster, 10);
    assert_eq!(
        fleet
            .nodes
            .iter()
            .map(|node| &node.name)
            .collect::<Vec<_>>(),
        [&name("a")]
    );
}
