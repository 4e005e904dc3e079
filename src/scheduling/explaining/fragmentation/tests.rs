//! Fragmentation of small clusters, computed by hand.

use super::*;
use crate::testkit::{LedgerCluster, demand_of};
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;

const GIB: u64 = 1 << 30;

/// Under the default policy each GPU has 72 GiB for pods.
fn fragmented_gib(cluster: &LedgerCluster) -> u64 {
    fragmented_vram(cluster.ledger()).0 / GIB
}

#[test]
fn an_empty_history_calls_nothing_unusable() {
    let cluster = LedgerCluster::new(&[("a", 2)]);
    assert_eq!(fragmented_vram(cluster.ledger()), Bytes::ZERO);
}

#[test]
fn what_is_free_counts_by_the_share_of_pods_that_it_is_too_small_for() {
    let mut cluster = LedgerCluster::new(&[("a", 2)]);
    let shared = |gib: u64, gpus| demand_of(gib * GIB, gpus, Sharing::Shared, 0);
    // 72 + 72 GiB are free, and 40 GiB fit on either GPU.
    cluster.add_waiting("p", shared(40, 1));
    assert_eq!(fragmented_gib(&cluster), 0);
    // One of them runs: 32 + 72 are free. Of the 32 a pod of 40 GiB can use nothing.
    cluster.add_running(
        "p",
        ("a", 0),
        shared(40, 1),
        None,
        ObservedDisruptionInfo::default(),
    );
    assert_eq!(fragmented_gib(&cluster), 32);
    // Half of the pods now ask for 40 GiB on each of two GPUs: to them none of the 104 GiB is of use. (32 + 104) ÷ 2.
    cluster.add_waiting("q", shared(40, 2));
    assert_eq!(fragmented_gib(&cluster), 68);
    // And as many for 30 GiB on each of two, to which all 104 are: (32 + 104 + 0) ÷ 3.
    cluster.add_waiting("r", shared(30, 2));
    assert_eq!(
        fragmented_vram(cluster.ledger()),
        Bytes((32 + 104) * GIB / 3)
    );
}

#[test]
fn an_exclusive_pod_can_use_no_gpu_with_other_pods() {
    let mut cluster = LedgerCluster::new(&[("a", 2)]);
    cluster.add_running(
        "p",
        ("a", 0),
        demand_of(8 * GIB, 1, Sharing::Shared, 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    // 64 + 72 GiB are free, and 8 GiB fit anywhere.
    assert_eq!(fragmented_gib(&cluster), 0);
    cluster.add_waiting("q", demand_of(8 * GIB, 1, Sharing::Exclusive, 0));
    // To half of the pods the 64 GiB are of no use.
    assert_eq!(fragmented_gib(&cluster), 32);
}
