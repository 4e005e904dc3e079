//! The time to score a large cluster: `cargo bench --bench packing [-- NODES]`.
//!
//! By the packing model and by best fit, in one run and on the same nodes. Cold: no such demand was filtered before, and each
//! node is evaluated. Warm: one node has changed since. First: no node was evaluated since the packing model changed, for any
//! demand. The answers are compared: cached results must equal fresh ones.

#[path = "../common/samples.rs"]
#[expect(dead_code, reason = "one thread takes these times")]
mod samples;

use samples::Samples;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;
use stowage_scheduling::ids::{GpuModel, GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use stowage_scheduling::placing::learned::PackingModel;
use stowage_scheduling::placing::rank;
use stowage_scheduling::placing::rank::{ScheduleAttempt, Score, shortlist};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, MilliCpu, Millis};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::observe::{
    DevicesReported, FreeHostKnown, NodeObserved, PodObserved,
};
use stowage_scheduling::verbs::tick::PackingModelLearned;
use stowage_scheduling::vocabulary::demand::{
    ContainerRequest, ContainerRole, Demand, HostResources, PluginAmount, PodRequest,
};
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::node::{Node, NodeKind};

const GPUS: u32 = 8;
const ROUNDS: usize = 300;
/// The requests of pods, in GiB on one GPU: sizes that do not fill a GPU by chance.
const SIZES: [u64; 8] = [6, 10, 14, 18, 24, 30, 40, 60];

fn main() {
    let asked = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let mut cluster = PackedCluster::new(asked.unwrap_or(5000));
    let names: Vec<String> = cluster.nodes.iter().map(NodeName::to_string).collect();
    println!("{} nodes × {GPUS} GPUs, {} pods", names.len(), cluster.pods);
    println!("{:<32}{:>12}{:>12}", "", "p50", "p99");
    cluster.measure("best fit", &names);
    cluster.learn();
    cluster.measure("what free VRAM is worth", &names);
}

struct PackedCluster {
    ledger: Cluster,
    nodes: Vec<NodeName>,
    pods: usize,
}

impl PackedCluster {
    /// Each GPU about half full, each another way.
    fn new(nodes: usize) -> Self {
        let mut ledger = Cluster::new(Arc::new(Policy::default()));
        let name = |n| NodeName::parse(&format!("node-{n:05}")).expect("a name");
        let mut cluster = Self {
            nodes: (0..nodes).map(name).collect(),
            ledger: Cluster::default(),
            pods: 0,
        };
        for (n, name) in cluster.nodes.iter().enumerate() {
            ledger.apply(NodeObserved::new(name.clone(), NodeKind::Stowage));
            ledger
                .apply(DevicesReported {
                    node: name.clone(),
                    devices: (0..GPUS).map(|gpu| device(n, gpu)).collect(),
                    are_all: true,
                })
                .expect("eight GPUs");
            let left = HostResources {
                cpu: MilliCpu(4000 + n as u64 * 997 % 90_000),
                memory: Bytes::gib(500),
            };
            ledger.apply(FreeHostKnown {
                node: name.clone(),
                free_host: Some(left),
            });
        }
        cluster.ledger = ledger;
        for n in 0..nodes * GPUS as usize {
            let demand = demand(SIZES[n * 5 % SIZES.len()]);
            let place = cluster.nodes[n % nodes].clone();
            cluster.place(&demand, &place);
        }
        cluster
    }

    fn place(&mut self, demand: &Demand, node: &NodeName) {
        let uid = PodUid::parse(&format!("pod-{}", self.pods)).expect("a UID");
        self.pods += 1;
        self.ledger.apply(PodObserved(PodObservation {
            key: PodKey::parse("llm", uid.as_str()).expect("a key"),
            uid: uid.clone(),
            demand: demand.clone(),
            state: ObservedPhase::Waiting(ObservedWaiting::default()),
            observed: None,
        }));
        let asked = BindAsked::for_pod(self.ledger.ledger(), &uid, node).expect("it waits");
        if self.ledger.apply(asked).is_ok() {
            let devices = self
                .ledger
                .ledger()
                .pod_state(&uid)
                .and_then(|entry| entry.devices().cloned());
            self.ledger.apply(BindingWritten {
                uid: uid.clone(),
                node: node.clone(),
                devices,
            });
        }
    }

    fn learn(&mut self) {
        let snapshot = self.ledger.snapshot();
        let start = Instant::now();
        let packing_model = PackingModel::learn(
            self.ledger.ledger().demand_history(),
            snapshot.nodes().iter().map(Node::node_gpus),
        );
        println!(
            "{:<32}{:>9.0} µs",
            "learning, off the request path",
            start.elapsed().as_secs_f64() * 1e6
        );
        assert!(packing_model.is_learned());
        drop(snapshot);
        self.ledger.apply(PackingModelLearned(packing_model));
    }

    fn measure(&mut self, policy_name: &str, names: &[String]) {
        let [mut first, mut scoring, mut cold, mut warm, mut pass] =
            [(); 5].map(|()| Samples::default());
        let mut score_cache = ScoreCache::default();
        let demand = demand(10);
        for round in 0..ROUNDS {
            let snapshot = self.ledger.snapshot();
            let policy = self.ledger.ledger().policy().clone();
            let again = Snapshot::clone(&snapshot)
                .with_packing_model(Arc::new(snapshot.packing_model().clone()));
            first.add(timed(|| best_of_all(&again, &demand, &policy)));
            scoring.add(timed(|| best_of_all(&snapshot, &demand, &policy)));
            let fresh = shortlist(&again, &demand, asked(names), attempt(&policy));
            let remembered =
                score_cache.shortlist(&snapshot, &demand, asked(names), attempt(&policy));
            assert_eq!(
                fresh, remembered,
                "what is remembered is what is found again"
            );
            cold.add(timed(|| {
                shortlist(&snapshot, &demand, asked(names), attempt(&policy))
            }));
            drop(snapshot);
            let node = self.nodes[round * 17 % self.nodes.len()].clone();
            let cpu = MilliCpu(5000 + round as u64);
            self.ledger.apply(FreeHostKnown {
                node: node.clone(),
                free_host: Some(HostResources {
                    cpu,
                    memory: Bytes::gib(500),
                }),
            });
            let snapshot = self.ledger.snapshot();
            warm.add(timed(|| {
                score_cache.shortlist(&snapshot, &demand, asked(names), attempt(&policy))
            }));
            pass.add(timed(|| score_cache.best(&snapshot, &demand, &policy)));
        }
        println!("{policy_name}");
        for (what, samples) in [
            ("scoring, first", &first),
            ("scoring, cold", &scoring),
            ("scoring, warm", &pass),
            ("with every name looked up, cold", &cold),
            ("with every name looked up, warm", &warm),
        ] {
            println!(
                "  {what:<30}{:>9.0} µs{:>9.0} µs",
                samples.percentile(50),
                samples.percentile(99)
            );
        }
    }
}

fn asked(names: &[String]) -> impl ExactSizeIterator<Item = &str> {
    names.iter().map(String::as_str)
}

fn attempt(policy: &Policy) -> ScheduleAttempt<'_> {
    ScheduleAttempt {
        limit: 4,
        ..ScheduleAttempt::unreserved(policy)
    }
}

/// The best node, computed without any cache.
fn best_of_all(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
    let mut best: Option<(Score, usize)> = None;
    for place in 0..snapshot.nodes().len() {
        let Ok((score, _)) = rank::score_node(snapshot, place, demand, policy) else {
            continue;
        };
        if best.is_none_or(|(best, _)| score < best) {
            best = Some((score, place));
        }
    }
    best.map(|(_, place)| place)
}

fn timed<T>(work: impl FnOnce() -> T) -> std::time::Duration {
    let start = Instant::now();
    black_box(work());
    start.elapsed()
}

fn device(node: usize, index: u32) -> Device {
    Device {
        uuid: GpuUuid::parse(&format!("GPU-{node}-{index}")).expect("a UUID"),
        index,
        model: GpuModel::parse("NVIDIA-H100-80GB-HBM3").expect("a model"),
        parent: None,
        total: Bytes::gib(80),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: Some(0),
    }
}

fn demand(gib: u64) -> Demand {
    let vram = format!("{gib}Gi");
    let container = ContainerRequest {
        name: "job",
        role: ContainerRole::Main,
        vram: Some(&vram),
        plugin: PluginAmount::None,
        cpu: Some("4"),
        memory: Some("16Gi"),
    };
    let pod = PodRequest {
        namespace: "llm",
        labels: &Default::default(),
        priority_class: Some("stowage-batch"),
        priority: 0,
        may_preempt: false,
        grace: Millis::seconds(30),
        containers: &[container],
        gpus: None,
        exclusive: None,
        model: None,
        kv_cache: None,
        service_account: None,
        resources: &Default::default(),
    };
    Demand::from_pod(&pod, &Policy::default()).expect("a sound request")
}
