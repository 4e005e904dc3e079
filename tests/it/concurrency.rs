//! Many pods at once over loopback: no GPU is overallocated, no pod is bound twice, and the loser of a race gets an answer after
//! which the scheduler tries again.

use crate::client::Client;
use crate::served::{
    Served, ServedCluster, args, bind_args, pod, uid_of, with_exclusive_gpu, with_gpu_count,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::PodPhase;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};

/// More than the 29 binds in flight that were seen of the real scheduler.
const CLIENTS: usize = 40;

/// Allocatable VRAM of a GPU of 80 GiB.
const ALLOCATABLE_BYTES: u64 = 72 << 30;

const LOST_RACE: &str = "conflict: another pod took the GPU in the meantime";

/// One cycle of the scheduler's for one pod. `None` if no node passed.
fn attempt(client: &mut Client<TcpStream>, pod: &Value, nodes: &[&str]) -> Option<String> {
    let node = choose(client, pod, nodes)?;
    Some(bind(client, pod, &node))
}

/// Filter, and prioritize unless one node passed.
fn choose(client: &mut Client<TcpStream>, pod: &Value, nodes: &[&str]) -> Option<String> {
    let answer = client.post("/scheduler/filter", args(pod, nodes).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let passed: Vec<String> = serde_json::from_value(answer.json()["NodeNames"].take()).unwrap();
    if passed.len() < 2 {
        return passed.into_iter().next();
    }
    let names: Vec<&str> = passed.iter().map(String::as_str).collect();
    let scores = client
        .post("/scheduler/prioritize", args(pod, &names).to_string())
        .json();
    let best = scores
        .as_array()
        .unwrap()
        .iter()
        .max_by_key(|one| one["Score"].as_i64().unwrap());
    Some(best.unwrap()["Host"].as_str().unwrap().to_owned())
}

/// The error; empty if the pod is bound.
fn bind(client: &mut Client<TcpStream>, pod: &Value, node: &str) -> String {
    let answer = client.post("/scheduler/bind", bind_args(pod, node).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["Error"].as_str().unwrap().to_owned()
}

/// Runs `work` for every pod, from that many connections at once.
fn in_parallel(
    served: &Served,
    pods: &[Value],
    work: impl Fn(&mut Client<TcpStream>, &Value) + Sync,
) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                let mut client = served.client();
                while let Some(pod) = pods.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(&mut client, pod);
                }
            });
        }
    });
}

/// 25 nodes of 4 GPUs, five pods to a GPU and not one MiB for a sixth: exactly 500 pods fit.
struct FiveHundred {
    served: Served,
    nodes: Vec<String>,
    pods: Vec<Value>,
}

impl FiveHundred {
    fn new() -> Self {
        let nodes: Vec<String> = (0..25).map(|n| format!("node-{n:02}")).collect();
        let gpus: Vec<(&str, u32)> = nodes.iter().map(|name| (name.as_str(), 4)).collect();
        let pods: Vec<Value> = (0..500)
            .map(|n| pod(&format!("pod-{n:03}"), "14745Mi"))
            .collect();
        let served = ServedCluster::with_gpus(&gpus)
            .with(pods.iter().cloned())
            .serve();
        Self {
            served,
            nodes,
            pods,
        }
    }

    fn names(&self) -> Vec<&str> {
        self.nodes.iter().map(String::as_str).collect()
    }

    /// From the Bindings alone, and only then from the ledger.
    fn assert_all_bound_once(&self) {
        let orders = self.served.control_plane.orders.lock().clone();
        let mut seats: BTreeMap<String, u32> = BTreeMap::new();
        for (order, outcome) in &orders {
            assert_eq!(
                *outcome,
                Some(BindOutcome::Written),
                "every Binding was accepted"
            );
            for device in order.placement.devices.iter() {
                *seats.entry(device.to_string()).or_default() += 1;
            }
        }
        let mut bound: Vec<&str> = orders.iter().map(|(order, _)| order.uid.as_str()).collect();
        bound.sort_unstable();
        bound.dedup();
        assert_eq!(
            (orders.len(), bound.len()),
            (500, 500),
            "all, and none twice"
        );
        assert_eq!(seats.len(), 100);
        assert!(seats.values().all(|pods| *pods == 5), "{seats:?}");
        assert!(
            self.served
                .bound_vram_by_gpu(|_| true)
                .values()
                .all(|promised| *promised <= ALLOCATABLE_BYTES)
        );
        let ledger = self.served.service.cluster();
        assert_eq!(audit(ledger.ledger()), []);
        let totals = ledger.ledger().totals();
        assert_eq!(
            (
                totals.bound,
                totals.waiting,
                totals.assumed,
                totals.soft_reservations
            ),
            (500, 0, 0, 0)
        );
    }
}

#[test]
fn five_hundred_concurrent_pods_fill_a_cluster_of_exactly_that_size() {
    let cluster = FiveHundred::new();
    let nodes = cluster.names();
    in_parallel(&cluster.served, &cluster.pods, |client, pod| {
        loop {
            // As long as a pod waits there is a GPU for it: filter never refuses.
            match attempt(client, pod, &nodes)
                .expect("a seat is left")
                .as_str()
            {
                "" => break,
                LOST_RACE => {}
                other => panic!("no typed conflict: {other}"),
            }
        }
    });
    cluster.assert_all_bound_once();
}

#[test]
fn without_soft_reservations_the_loser_of_a_bind_race_gets_a_conflict_and_another_node() {
    let cluster = FiveHundred::new();
    let nodes = cluster.names();
    let mut waiting = cluster.pods.clone();
    let mut lost_races = 0;
    while !waiting.is_empty() {
        // A wave is sent to the same few nodes, and then to bind all at once.
        let wave: Vec<Value> = waiting.drain(..waiting.len().min(100)).collect();
        let mut client = cluster.served.client();
        let aimed: Vec<Value> = wave
            .into_iter()
            .map(|pod| {
                let node = choose(&mut client, &pod, &nodes).expect("a seat is left");
                // No soft reservation steers the next pod.
                let answer = FilterAnswer::Offered {
                    node: NodeName::parse(&node).unwrap(),
                    devices: std::sync::Arc::default(),
                };
                cluster.served.service.cluster().apply(FilterDecided {
                    uid: uid_of(&pod),
                    answer,
                });
                json!({ "pod": pod, "node": node })
            })
            .collect();
        let lost = parking_lot::Mutex::new(Vec::new());
        in_parallel(&cluster.served, &aimed, |client, aimed| {
            match bind(client, &aimed["pod"], aimed["node"].as_str().unwrap()).as_str() {
                "" => {}
                LOST_RACE => lost.lock().push(aimed["pod"].clone()),
                other => panic!("no typed conflict: {other}"),
            }
        });
        let lost = lost.into_inner();
        lost_races += lost.len();
        waiting.extend(lost);
    }
    assert!(lost_races > 100, "{lost_races}: the waves did not meet");
    let counted =
        "stowage_answers_total{code=\"insufficient-vram\",outcome=\"unbound\",verb=\"bind\"}";
    assert_eq!(cluster.served.metric(counted), lost_races as u64);
    cluster.assert_all_bound_once();
}

#[test]
fn one_pod_more_than_fits_is_refused() {
    let pods: Vec<Value> = (0..21)
        .map(|n| pod(&format!("pod-{n:02}"), "14745Mi"))
        .collect();
    let served = ServedCluster::with_gpus(&[("node-a", 4)])
        .with(pods.iter().cloned())
        .serve();
    let refused = AtomicUsize::new(0);
    in_parallel(&served, &pods, |client, pod| {
        loop {
            match attempt(client, pod, &["node-a"]).as_deref() {
                Some("") => break,
                Some(LOST_RACE) => {}
                Some(other) => panic!("no typed conflict: {other}"),
                None => {
                    refused.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
    });
    assert_eq!(refused.into_inner(), 1);
    assert_eq!(
        served.bound_vram_by_gpu(|_| true),
        (0..4)
            .map(|gpu| (crate::served::gpu_uuid("node-a", gpu), 5 * (14745 << 20)))
            .collect()
    );
}

#[test]
fn hundreds_of_concurrent_filters_and_binds_never_allocate_a_gpu_twice() {
    let names: Vec<String> = (0..6).map(|n| format!("node-{n}")).collect();
    let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
    let gpus: Vec<(&str, u32)> = nodes.iter().map(|name| (*name, 4)).collect();
    // Far more than fits, of every kind.
    let kinds: [fn(&str) -> Value; 5] = [
        |name| pod(name, "7Gi"),
        |name| pod(name, "33Gi"),
        |name| with_gpu_count(pod(name, "50Gi"), 2),
        |name| with_exclusive_gpu(pod(name, "20Gi")),
        |name| with_gpu_count(pod(name, "4Gi"), 4),
    ];
    let pods: Vec<Value> = (0..400)
        .map(|n| kinds[n % kinds.len()](&format!("pod-{n:03}")))
        .collect();
    let served = ServedCluster::with_gpus(&gpus)
        .with(pods.iter().cloned())
        .serve();
    let left = parking_lot::Mutex::new(Vec::new());
    in_parallel(&served, &pods, |client, pod| {
        for _ in 0..4 {
            match attempt(client, pod, &nodes).as_deref() {
                None => break,
                Some("") => {
                    assert_eq!(
                        audit(served.service.cluster().ledger()),
                        [],
                        "in the middle of it"
                    );
                    // Every third pod ends at once, and others replace it.
                    if pod["metadata"]["name"]
                        .as_str()
                        .unwrap()
                        .as_bytes()
                        .last()
                        .unwrap()
                        % 3
                        == 0
                    {
                        left.lock().push(pod["metadata"]["uid"].clone());
                        served.delete(pod);
                    }
                    break;
                }
                Some(LOST_RACE) => {}
                Some(other) => panic!("no typed conflict: {other}"),
            }
        }
    });
    let left = left.into_inner();
    let stayed = |uid: &str| !left.iter().any(|one| one == uid);
    let promised = served.bound_vram_by_gpu(|order| stayed(order.uid.as_str()));
    assert!(
        !left.is_empty() && promised.len() > 12,
        "{} left, {} GPUs in use",
        left.len(),
        promised.len()
    );
    assert!(
        promised.values().all(|bytes| *bytes <= ALLOCATABLE_BYTES),
        "{promised:?}"
    );
    let ledger = served.service.cluster();
    assert_eq!(audit(ledger.ledger()), []);
    assert_eq!(ledger.ledger().totals().assumed, 0);
    let booked: u64 = ledger.ledger().totals().charged.0;
    assert_eq!(
        booked,
        promised.values().sum::<u64>(),
        "the ledger holds what was written, and nothing else"
    );
    let bound = ledger
        .ledger()
        .pod_states()
        .values()
        .filter(|entry| matches!(entry.phase, PodPhase::Bound(_)))
        .count();
    let written = served
        .control_plane
        .orders
        .lock()
        .iter()
        .filter(|(order, _)| stayed(order.uid.as_str()))
        .count();
    assert_eq!(bound, written);
}

#[test]
fn one_pod_with_many_concurrent_binds_is_bound_once() {
    let llm = pod("llm", "40Gi");
    let served = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)])
        .with([llm.clone()])
        .serve();
    let answers = parking_lot::Mutex::new(Vec::new());
    let tries: Vec<Value> = (0..80)
        .map(|n| bind_args(&llm, ["node-a", "node-b"][n % 2]))
        .collect();
    in_parallel(&served, &tries, |client, body| {
        let answer = client.post("/scheduler/bind", body.to_string()).json();
        answers.lock().push((
            body["Node"].as_str().unwrap().to_owned(),
            answer["Error"].as_str().unwrap().to_owned(),
        ));
    });
    let home = served.pod_state(&llm).unwrap().node().unwrap().to_string();
    for (node, error) in answers.into_inner() {
        // A pod that is being bound elsewhere, or is bound elsewhere; where it is, always OK.
        let expected: &[&str] = if node == home {
            &[""]
        } else {
            &[
                "conflict: an earlier binding is not settled",
                "conflict: pod is bound to another node",
            ]
        };
        assert!(expected.contains(&error.as_str()), "{node}: {error}");
    }
    let orders = served.control_plane.orders.lock();
    let written = orders
        .iter()
        .filter(|(_, outcome)| *outcome == Some(BindOutcome::Written))
        .count();
    assert_eq!(written, 1);
    assert!(
        orders
            .iter()
            .all(|(order, _)| order.placement == orders[0].0.placement)
    );
}
