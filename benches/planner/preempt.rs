//! The `preempt` verb without its HTTP: how long it takes, and how long the ledger is locked for it.

use crate::cluster::{FullCluster, LARGE_CLUSTER_NODES};
use crate::samples::Samples;
use std::time::Instant;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::kube_filters::Requirements;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::preempt::{
    OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, preempt,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::wait::ReleaseReservation;

const FIRST_POD: usize = 40_000_000;
const ROUNDS: usize = 100;
/// kube-scheduler offers a tenth of the nodes: `minCandidateNodesPercentage` of its plugin DefaultPreemption.
const OFFERED_PERCENT: usize = 10;

pub fn time_preempt() {
    choose_among(1000);
    choose_among(5000);
}

/// Times of preempt on a very large cluster.
pub fn time_large() {
    choose_among(LARGE_CLUSTER_NODES);
}

/// Two jobs of 36 GiB on each GPU; one of them is enough.
fn choose_among(nodes: usize) {
    let mut cluster = FullCluster::new(nodes, 100, (36, 36), 53);
    let (mut whole, mut asking, mut deciding) =
        (Samples::default(), Samples::default(), Samples::default());
    let offered = offered_nodes(&mut cluster);
    for round in 0..ROUNDS {
        let uid = cluster.add_pending_pod(FIRST_POD + round, Bytes::gib(30), 1, 100);
        let state = cluster.ledger.ledger().pod_state(&uid).expect("it waits");
        let request = VerbRequest {
            uid: uid.clone(),
            key: state.key.clone(),
            demand: state.demand.clone(),
            waiting: ObservedWaiting::default(),
            disruption: None,
        };
        let (policy, wants) = (request.demand.classified_by, Requirements::default());
        // It begins at another node each time.
        let first = round * 997 % offered.len();
        let some = offered
            .iter()
            .cycle()
            .skip(first)
            .take(nodes / OFFERED_PERCENT)
            .cloned()
            .collect();
        let start = Instant::now();
        let view = cluster.ledger.apply(PreemptAsked {
            request,
            wants,
            offered: some,
        });
        asking.add(start.elapsed());
        let (_, view) = view.expect("it has no reservation");
        let PreemptDecision::Evict { victims, .. } = preempt(view) else {
            panic!("a victim is found")
        };
        assert_eq!(victims.victims.len(), 1, "{victims:?}");
        let decided = Instant::now();
        let made = cluster.ledger.apply(PreemptDecided {
            uid: uid.clone(),
            victims,
            policy,
        });
        deciding.add(decided.elapsed());
        whole.add(start.elapsed());
        made.expect("nothing has changed since");
        cluster.ledger.apply(ReleaseReservation(uid));
    }
    println!(
        "preempt, {} candidates of {nodes} nodes: p50 {:.1} ms, p99 {:.1} ms; of it the ledger locked {:.2} and {:.2} ms p50, {:.2} and {:.2} ms p99",
        nodes / OFFERED_PERCENT,
        whole.percentile(50) / 1000.0,
        whole.percentile(99) / 1000.0,
        asking.percentile(50) / 1000.0,
        deciding.percentile(50) / 1000.0,
        asking.percentile(99) / 1000.0,
        deciding.percentile(99) / 1000.0,
    );
}

/// kube-scheduler's candidates: each node with an evictable pod, and the first of these pods as victim.
fn offered_nodes(cluster: &mut FullCluster) -> Vec<OfferedNode> {
    let probe: PodUid = cluster.add_pending_pod(FIRST_POD - 1, Bytes::gib(30), 1, 100);
    let preemptor = cluster.ledger.ledger().preemptor(&probe);
    let candidates = cluster
        .ledger
        .ledger()
        .candidates_for(&preemptor, &cluster.nodes);
    let offered = candidates.iter().filter_map(|candidate| {
        let victim = candidate.potential_victims.first()?;
        let victims = vec![victim.uid.to_string()];
        Some(OfferedNode {
            node: candidate.node.to_string(),
            victims,
            pdb_violations: 0,
        })
    });
    offered.collect()
}
