//! Refused pods for which others may be evicted, as many as `preemption.evictionsPerMinute` allows by default: each pod that can
//! be placed within the minute's allowance is placed, and the rest wait with the true reason. The answer is asserted, then its
//! time is printed.
//!
//! And how long one run takes when fifty thousand pods wait, and how many runs a thousand pods of a hundred kinds need.

use crate::cluster::{FullCluster, GroupMembership, LARGE_CLUSTER_NODES};
use crate::queues::kube_filters;
use crate::samples::Samples;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::kube_filters::FilterSnapshot;
use stowage_scheduling::planning::{
    Plan, PlanBounds, PlanStep, WaitReason, plan_within, steps_of_run,
};
use stowage_scheduling::policy::{EvictionRates, Planning, Policy};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};
use stowage_scheduling::verbs::wait::{
    NoPlacementFound, PodRequeued, PutBack, ReservePlaces, TakePending,
};

const FIRST_POD: usize = 30_000_000;
const MAX_PLACEMENTS: usize = 256;
const PODS_PER_RUN: usize = 2048;
/// Interval of ticks, as in the service.
const TICK_INTERVAL: Millis = Millis(200);

pub fn time_limits() {
    time_refused("64 refused pods, 5,000 nodes, 80,000 pods", 5000, 64, 1, 60);
    time_refused("300 refused pods, 2,000 nodes", 2000, 300, 1, 60);
    time_refused(
        "300 refused pods of six GPUs, 2,000 nodes",
        2000,
        300,
        6,
        10,
    );
    time_many_waiting(5000);
    place_many_kinds(5000);
}

/// Times of the limits on a very large cluster.
pub fn time_large() {
    time_refused(
        "64 refused pods, 65,000 nodes, a million pods",
        LARGE_CLUSTER_NODES,
        64,
        1,
        60,
    );
    time_many_waiting(LARGE_CLUSTER_NODES);
    place_many_kinds(LARGE_CLUSTER_NODES);
}

fn time_many_waiting(nodes: usize) {
    run_while_many_wait("of one kind that fit nowhere", nodes, 1, -1000);
    run_while_many_wait("of 100 kinds that fit nowhere", nodes, 100, -1000);
    run_while_many_wait("of 100 kinds for which others could leave", nodes, 100, 100);
}

fn default_policy() -> Policy {
    let mut policy = Policy::default();
    // The bench measures runs: no pod's gate is to be lifted meanwhile.
    policy.planning = Planning {
        max_gated_time: Millis::seconds(1_000_000),
        ..Planning::default()
    };
    assert_eq!(
        policy.preemption.evictions_per_minute,
        EvictionRates {
            cluster: 60,
            node: 10,
            tenant: 30
        }
    );
    policy
}

/// Two jobs of 36 GiB on each GPU; one of them is enough for each GPU of a pod.
fn time_refused(what: &str, nodes: usize, pods: usize, gpus: u32, helped: usize) {
    let mut cluster = FullCluster::with_policy(default_policy(), nodes, 100, (36, 36), 51);
    let vram = Bytes::gib(30 * u64::from(gpus));
    let waiting: BTreeSet<PodUid> = (0..pods)
        .map(|n| cluster.add_pending_pod(FIRST_POD + n, vram, gpus, 100))
        .collect();
    let snapshot = cluster.ledger.snapshot();
    for uid in &waiting {
        cluster.ledger.apply(FilterDecided {
            uid: uid.clone(),
            answer: FilterAnswer::Refused {
                queried_nodes: Some(snapshot.node_set(0..nodes)),
            },
        });
    }
    drop(snapshot);
    cluster.advance(Millis::seconds(2));
    let kube_filters = kube_filters(&cluster);
    let (mut placed, mut told) = (BTreeSet::new(), BTreeMap::new());
    let (mut evicted, mut runs, mut took) = (0, Samples::default(), Duration::ZERO);
    while placed.len() + told.len() < pods {
        let (plan, time) = one_run(&mut cluster, &kube_filters);
        assert!(!plan.steps.is_empty(), "each run comes a step further");
        runs.add(time);
        took += time;
        for step in &plan.steps {
            match step {
                PlanStep::Place(places) => {
                    evicted += places
                        .iter()
                        .map(|place| place.reservation.victims.len())
                        .sum::<usize>();
                    placed.extend(places.iter().map(|place| place.uid.clone()));
                }
                PlanStep::Wait { uid, why, .. } => drop(told.insert(uid.clone(), *why)),
                PlanStep::Requeue { .. } => {}
            }
        }
        told.retain(|uid, _| !placed.contains(uid));
        apply_plan(&mut cluster, &plan);
        cluster.advance(TICK_INTERVAL);
    }
    assert!(evicted <= 60, "{evicted} pods are evicted within a minute");
    assert!(
        told.values()
            .all(|why| matches!(why, WaitReason::EvictionLimit(_))),
        "{:?}",
        told.values().next()
    );
    assert_eq!(placed.len(), helped, "{evicted} evicted");
    println!(
        "{what:<50}{} helped, {} wait for the next minute; {:.0} ms in all, the longest run {:.0} ms",
        placed.len(),
        told.len(),
        took.as_secs_f64() * 1000.0,
        runs.percentile(99) / 1000.0,
    );
}

/// Every run of some rounds in which nearly no pod finds a place; and for how long the ledger is locked for it.
fn run_while_many_wait(what: &str, nodes: usize, kinds: usize, priority: i32) {
    let mut cluster = FullCluster::with_policy(default_policy(), nodes, 100, (36, 36), 52);
    for n in 0..50_000 {
        // Of a whole GPU and less; nothing is free.
        let vram = Bytes((40 << 30) + ((n % kinds) as u64 * (1 << 28)));
        cluster.add_gated_pod(FIRST_POD + n, vram, priority, GroupMembership::Alone);
    }
    let kube_filters = kube_filters(&cluster);
    let (mut runs, mut locked, mut seen, mut steps) = (
        Samples::default(),
        Samples::default(),
        BTreeSet::new(),
        Samples::default(),
    );
    for _ in 0..60 {
        let start = Instant::now();
        let queue = cluster.ledger.apply(TakePending {
            limit: PODS_PER_RUN,
        });
        let scratch = cluster.ledger.ledger().scratch();
        locked.add(start.elapsed());
        let start = Instant::now();
        let plan = plan_within(scratch, &kube_filters, &queue, bounds(nodes));
        runs.add(start.elapsed());
        // Microseconds stand for steps here.
        steps.add(Duration::from_micros(plan.steps_spent));
        assert!(!plan.steps.is_empty() || queue.is_empty());
        let left_over: BTreeSet<&PodUid> = plan.unreached.iter().collect();
        seen.extend(
            queue
                .iter()
                .map(|pod| &pod.uid)
                .filter(|uid| !left_over.contains(uid))
                .cloned(),
        );
        apply_plan(&mut cluster, &plan);
        cluster.advance(TICK_INTERVAL);
    }
    println!(
        "50,000 gated pods {what}, {nodes} nodes: a run p50 {:.0} ms, longest {:.0} ms ({:.0} steps); ledger locked p50 {:.1} ms, longest {:.1} ms; {} of 50,000 looked at in 60 runs",
        runs.percentile(50) / 1000.0,
        runs.percentile(99) / 1000.0,
        steps.percentile(99),
        locked.percentile(50) / 1000.0,
        locked.percentile(99) / 1000.0,
        seen.len(),
    );
}

/// A thousand pods of a hundred kinds, each of which has a free place: run after run, until all have theirs.
fn place_many_kinds(nodes: usize) {
    let mut cluster = FullCluster::with_policy(default_policy(), nodes, 50, (14, 18), 45);
    for n in 0..1000 {
        cluster.add_gated_pod(
            FIRST_POD + n,
            Bytes::gib(10 + n as u64 % 25),
            n as i32 % 4,
            GroupMembership::Alone,
        );
    }
    let kube_filters = kube_filters(&cluster);
    let (mut placed, mut runs, mut took, mut count) = (0, Samples::default(), Duration::ZERO, 0);
    while placed < 1000 {
        let (plan, time) = one_run(&mut cluster, &kube_filters);
        assert!(!plan.steps.is_empty(), "each run comes a step further");
        (took, count) = (took + time, count + 1);
        runs.add(time);
        let places = |step: &PlanStep| {
            if let PlanStep::Place(places) = step {
                places.len()
            } else {
                0
            }
        };
        placed += plan.steps.iter().map(places).sum::<usize>();
        apply_plan(&mut cluster, &plan);
        cluster.advance(TICK_INTERVAL);
    }
    println!(
        "1,000 gated pods of 100 kinds, {nodes} nodes: {count} runs, {:.0} ms in all, the longest run {:.0} ms",
        took.as_secs_f64() * 1000.0,
        runs.percentile(99) / 1000.0,
    );
}

fn bounds(nodes: usize) -> PlanBounds<'static> {
    let steps = steps_of_run(nodes);
    PlanBounds {
        free_steps: steps,
        eviction_steps: steps,
        max_placements: MAX_PLACEMENTS,
        is_stopped: &|| false,
    }
}

fn one_run(cluster: &mut FullCluster, kube_filters: &FilterSnapshot) -> (Plan, Duration) {
    let start = Instant::now();
    let queue = cluster.ledger.apply(TakePending {
        limit: PODS_PER_RUN,
    });
    let scratch = cluster.ledger.ledger().scratch();
    let plan = plan_within(scratch, kube_filters, &queue, bounds(cluster.nodes.len()));
    (plan, start.elapsed())
}

/// Applies the plan as the planner does, without the writes to the API server.
fn apply_plan(cluster: &mut FullCluster, plan: &Plan) {
    let ledger = &mut cluster.ledger;
    let generation = ledger.ledger().generation();
    ledger.apply(PutBack(plan.unreached.clone()));
    for step in &plan.steps {
        match step {
            PlanStep::Place(places) => {
                let taken = ledger.apply(ReservePlaces {
                    placements: places.clone(),
                    generation,
                });
                taken.expect("nothing has changed since");
            }
            PlanStep::Requeue { uid, .. } => ledger.apply(PodRequeued(uid.clone())),
            PlanStep::Wait { uid, .. } => ledger.apply(NoPlacementFound {
                uid: uid.clone(),
                generation,
            }),
        }
    }
}
