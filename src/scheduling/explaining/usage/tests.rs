//! What the cluster's usage counts, one figure at a time.

use super::*;
use crate::explaining::fleet::Fleet;
use crate::explaining::fleet::history::FleetSums;
use crate::policy::{Policy, Tenant};
use crate::testkit::{LedgerCluster, demand_of, with_namespace};
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn tenants() -> Policy {
    let guarantee = TenantUsage {
        vram: Bytes::gib(20),
        milli_gpus: u64::MAX,
    };
    let limit = TenantLimit {
        vram: Some(Bytes::gib(60)),
        milli_gpus: None,
    };
    let chat = Tenant {
        guarantee,
        limit,
        ..Tenant::new("chat", &["chat"])
    };
    let gpus_only = TenantUsage {
        vram: Bytes(u64::MAX),
        milli_gpus: 1000,
    };
    let search = Tenant {
        guarantee: gpus_only,
        ..Tenant::new("search", &["search"])
    };
    Policy::default().with_tenants(vec![chat, search]).unwrap()
}

fn demand(gib: u64, namespace: &str, priority: i32) -> Demand {
    with_namespace(
        demand_of(gib * GIB, 1, Sharing::Shared, priority),
        namespace,
        &tenants(),
    )
}

fn total(usage: &ClusterUsage) -> (Bytes, u64, u64) {
    let classes = &usage.classes;
    (
        classes.iter().map(|class| class.allocated).sum(),
        classes.iter().map(|class| class.bound).sum(),
        classes.iter().map(|class| class.pending).sum(),
    )
}

#[test]
fn each_class_and_tenant_has_what_its_pods_have() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(tenants(), &[("a", 2)]);
    cluster.add_running(
        "p",
        ("a", 0),
        demand(30, "chat", 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    cluster.add_running(
        "q",
        ("a", 1),
        demand(10, "search", 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    cluster.add_gated("r", demand(5, "chat", 0));
    cluster.advance(7);
    let usage = usage(cluster.ledger());
    assert_eq!(total(&usage), (Bytes::gib(40), 2, 1));
    let oldest = usage.classes.iter().map(|class| class.oldest_pending).max();
    assert_eq!(oldest, Some(Millis::seconds(7)));
    let [chat, search] = &usage.tenants[..] else {
        panic!("{usage:?}")
    };
    assert_eq!(
        (chat.allocated, chat.borrowed, chat.pending),
        (Bytes::gib(30), Bytes::gib(10), 1)
    );
    assert_eq!(
        (chat.guarantee, chat.limit),
        (Some(Bytes::gib(20)), Some(Bytes::gib(60)))
    );
    assert_eq!(
        (search.allocated, search.borrowed),
        (Bytes::gib(10), Bytes::ZERO)
    );
    assert_eq!(
        (search.guarantee, search.limit),
        (None, None),
        "its guarantee is in GPUs"
    );
    assert_eq!(usage.oldest_reservation, Millis::default());
}

#[test]
fn a_reservation_ages_until_it_ends_and_counts_as_allocated() {
    use crate::testkit::{gpu_at, node, uid};
    use crate::vocabulary::placement::Reservation;
    let mut cluster = LedgerCluster::with_policy_and_nodes(tenants(), &[("a", 1)]);
    cluster.add_waiting("p", demand(30, "chat", 0));
    let reservation = Reservation {
        node: node("a"),
        devices: [gpu_at("a", 0)].into(),
        victims: [].into(),
        deadline: cluster.ledger().now() + Millis::seconds(60),
    };
    cluster
        .ledger_mut()
        .reserve(&uid("p"), reservation)
        .unwrap();
    cluster.advance(9);
    let reserved = usage(cluster.ledger());
    assert_eq!(reserved.oldest_reservation, Millis::seconds(9));
    assert_eq!(total(&reserved), (Bytes::gib(30), 0, 1));
    cluster.advance(120);
    let over = usage(cluster.ledger());
    assert_eq!(
        (over.oldest_reservation, total(&over)),
        (Millis::default(), (Bytes::ZERO, 0, 1))
    );
}

#[test]
fn a_pod_is_pending_since_its_first_refusal_or_since_it_was_observed_gated() {
    use crate::testkit::uid;
    let mut cluster = LedgerCluster::with_policy_and_nodes(tenants(), &[("a", 1)]);
    cluster.add_waiting("p", demand(30, "chat", 0));
    cluster.add_gated("q", demand(30, "chat", 0));
    let begun = cluster.ledger().now();
    let since = |cluster: &LedgerCluster, name: &str| {
        cluster
            .ledger()
            .pod_state(&uid(name))
            .unwrap()
            .unplaced_since()
    };
    assert_eq!(
        (since(&cluster, "p"), since(&cluster, "q")),
        (None, Some(begun))
    );
    cluster.advance(5);
    cluster.ledger_mut().record_refusal(&uid("p"), None);
    cluster.advance(5);
    cluster.ledger_mut().record_refusal(&uid("p"), None);
    // Its gate is lifted, and it is seen again.
    cluster.add_waiting("q", demand(30, "chat", 0));
    let first = begun + Millis::seconds(5);
    assert_eq!(
        (since(&cluster, "p"), since(&cluster, "q")),
        (Some(first), Some(begun))
    );
    assert_eq!(
        usage(cluster.ledger())
            .classes
            .iter()
            .map(|class| class.oldest_pending)
            .max(),
        Some(Millis::seconds(10))
    );
}

#[test]
fn each_gpu_shows_what_the_decisions_see() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(tenants(), &[("a", 2)]);
    cluster.add_running(
        "p",
        ("a", 1),
        demand(30, "chat", 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    let seen: Vec<_> = nodes(cluster.ledger())
        .flat_map(|(node, _)| {
            devices(node).map(|one| (one.device.index, one.gpu.charged, one.gpu.residents))
        })
        .collect();
    assert_eq!(seen, [(0, Bytes::ZERO, 0), (1, Bytes::gib(30), 1)]);
}

proptest! {
    /// The count beside it goes over the steps and knows no ledger.
    #[test]
    fn classes_and_tenants_add_up_to_the_whole(
        pods in prop::collection::vec((1u64..8, 0usize..3, 0i32..3, 0u32..4, prop::bool::ANY), 0..24),
    ) {
        let mut cluster = LedgerCluster::with_policy_and_nodes(tenants(), &[("a", 4)]);
        let (mut whole, mut by_tenant, mut waiting) = (Bytes::ZERO, [Bytes::ZERO; 2], 0);
        for (n, (gib, namespace, priority, gpu, is_bound)) in pods.into_iter().enumerate() {
            let demand = demand(gib, ["chat", "search", "none"][namespace], priority * 1_000_000);
            let name = format!("p{n}");
            if is_bound {
                cluster.add_running(&name, ("a", gpu), demand, None, ObservedDisruptionInfo::default());
                whole += Bytes::gib(gib);
                if let Some(sum) = by_tenant.get_mut(namespace) {
                    *sum += Bytes::gib(gib);
                }
            } else {
                cluster.add_waiting(&name, demand);
                waiting += 1;
            }
        }
        let usage = usage(cluster.ledger());
        let (allocated, _, pending) = total(&usage);
        prop_assert_eq!((allocated, pending), (whole, waiting));
        prop_assert_eq!(cluster.ledger().totals().charged, whole);
        prop_assert_eq!(FleetSums::from_ledger(cluster.ledger()), FleetSums::from_fleet(&Fleet::from_ledger(cluster.ledger(), 0)));
        prop_assert_eq!([usage.tenants[0].allocated, usage.tenants[1].allocated], by_tenant);
    }
}
