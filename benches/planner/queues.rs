//! Whole plans: a thousand gated pods onto a thousand nodes, a group of 250, and pods that cannot be made to fit; without the
//! API's part.

use crate::cluster::{FullCluster, GroupMembership, LARGE_CLUSTER_NODES};
use crate::samples::Samples;
use std::hint::black_box;
use std::time::{Duration, Instant};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::kube_filters::{
    ClusterFilters, FilterNode, FilterSnapshot, Requirements, ResourceList,
};
use stowage_scheduling::planning::{PlanStep, plan};
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::verbs::wait::TakePending;

const FIRST_POD: usize = 20_000_000;

/// How long other threads wait for the lock while a plan's copy of the ledger is made; and the cost of the first changes after
/// it, which copy what they change.
pub fn time_copies() {
    for nodes in [500, 1000] {
        let mut cluster = FullCluster::new(nodes, 100, (4, 14), 50);
        for n in 0..1000 {
            cluster.add_gated_pod(FIRST_POD + n, Bytes::gib(30), 0, GroupMembership::Alone);
        }
        let (mut copies, mut changes) = (Samples::default(), Samples::default());
        let mut start = Instant::now();
        for round in 0..21 {
            let scratch = black_box(cluster.ledger.ledger().scratch());
            copies.add(start.elapsed());
            start = Instant::now();
            for n in 0..100 {
                cluster.add_pending_pod(FIRST_POD + 2000 + round * 100 + n, Bytes::gib(30), 1, 0);
            }
            changes.add(start.elapsed());
            drop(scratch);
            start = Instant::now();
        }
        println!(
            "{nodes} nodes, {} residents, 1,000 gated: a plan's copy {:.0} µs p50, {:.0} µs p95; 100 new pods after it {:.0} µs",
            cluster.residents,
            copies.percentile(50),
            copies.percentile(95),
            changes.percentile(50),
        );
    }
}

pub fn time_plans() {
    one_kind_of_pod(1000, (8, 24));
    many_kinds_of_pods(1000, (8, 24));
    a_group();
    nothing_fits();
}

/// Times of plans on a very large cluster, with two pods on each GPU.
pub fn time_large() {
    one_kind_of_pod(LARGE_CLUSTER_NODES, (14, 18));
}

fn one_kind_of_pod(nodes: usize, sizes: (u64, u64)) {
    let mut cluster = FullCluster::new(nodes, 50, sizes, 44);
    for n in 0..1000 {
        cluster.add_gated_pod(FIRST_POD + n, Bytes::gib(30), 0, GroupMembership::Alone);
    }
    print_plan_time(
        &format!("1,000 gated pods of one kind, {nodes} nodes"),
        &mut cluster,
        1000,
    );
}

fn many_kinds_of_pods(nodes: usize, sizes: (u64, u64)) {
    let mut cluster = FullCluster::new(nodes, 50, sizes, 45);
    for n in 0..1000 {
        cluster.add_gated_pod(
            FIRST_POD + n,
            Bytes::gib(10 + n as u64 % 25),
            n as i32 % 4,
            GroupMembership::Alone,
        );
    }
    print_plan_time(
        &format!("1,000 gated pods of 100 kinds, {nodes} nodes"),
        &mut cluster,
        1000,
    );
}

fn a_group() {
    let mut cluster = FullCluster::new(500, 50, (8, 24), 46);
    for n in 0..250 {
        cluster.add_gated_pod(
            FIRST_POD + n,
            Bytes::gib(30),
            0,
            GroupMembership::InAGroupOf(250),
        );
    }
    print_plan_time("a group of 250, 500 nodes", &mut cluster, 250);
    let mut cluster = FullCluster::new(500, 97, (8, 24), 47);
    for n in 0..250 {
        cluster.add_gated_pod(
            FIRST_POD + n,
            Bytes::gib(60),
            100,
            GroupMembership::InAGroupOf(250),
        );
    }
    print_plan_time("a group of 250 for which others leave", &mut cluster, 250);
}

fn nothing_fits() {
    let mut cluster = FullCluster::new(500, 97, (8, 24), 48);
    for n in 0..250 {
        cluster.add_gated_pod(
            FIRST_POD + n,
            Bytes::gib(60),
            -1000,
            GroupMembership::InAGroupOf(250),
        );
    }
    print_plan_time("a group of 250 that cannot be made to fit", &mut cluster, 0);
    let mut cluster = FullCluster::new(500, 97, (8, 24), 49);
    for n in 0..250 {
        cluster.add_gated_pod(FIRST_POD + n, Bytes::gib(60), -1000, GroupMembership::Alone);
    }
    print_plan_time("250 pods that cannot be made to fit", &mut cluster, 0);
}

/// Prints the time of a plan, with the copy of the ledger that is made for it under the lock.
fn print_plan_time(what: &str, cluster: &mut FullCluster, expected: usize) {
    let kube_filters = kube_filters(cluster);
    cluster.ledger.snapshot();
    let start = Instant::now();
    let queue = cluster.ledger.apply(TakePending { limit: 1000 });
    let scratch = cluster.ledger.ledger().scratch();
    let copied = start.elapsed();
    let steps = black_box(plan(scratch, &kube_filters, &queue));
    let took = start.elapsed();
    let placed: usize = steps
        .iter()
        .map(|step| {
            if let PlanStep::Place(places) = step {
                places.len()
            } else {
                0
            }
        })
        .sum();
    assert!(
        placed >= expected * 9 / 10,
        "{placed} of {expected} were placed"
    );
    let millis = |time: Duration| time.as_secs_f64() * 1000.0;
    println!(
        "{what:<46}{:>8.0} ms, of it {:.1} ms for the queue and the copy; {placed} placed beside {}",
        millis(took),
        millis(copied),
        cluster.residents,
    );
}

/// Nodes with enough CPU for every pod.
pub fn kube_filters(cluster: &FullCluster) -> FilterSnapshot {
    let mut view = ClusterFilters::default();
    for name in &cluster.nodes {
        view.set_node(FilterNode {
            name: name.clone(),
            labels: Default::default(),
            taints: [].into(),
            allocatable: ResourceList {
                cpu: MilliCpu(1_000_000),
                memory: Bytes::gib(4096),
                ..ResourceList::default()
            },
            pods: 250,
        });
    }
    let waiting: Vec<PodUid> = cluster
        .ledger
        .ledger()
        .pod_states()
        .into_keys()
        .cloned()
        .collect();
    for uid in waiting {
        let amounts = ResourceList {
            cpu: MilliCpu(1000),
            memory: Bytes::gib(4),
            ..ResourceList::default()
        };
        view.set_pending(
            uid,
            Requirements {
                amounts,
                ..Requirements::default()
            },
        );
    }
    view.snapshot()
}
