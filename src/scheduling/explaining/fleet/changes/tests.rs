//! What changes between two views of the fleet say, one kind of change at a time.

use super::*;
use crate::explaining::testkit::{ExplainedCluster, name, pod};
use crate::policy::Policy;
use crate::units::Millis;
use crate::verbs::observe::{NodeDeleted, PodDeleted};
use crate::vocabulary::gpu::Health;
use proptest::prelude::*;
use serde_json::json;

/// Applies changes as a client does: to the view as JSON, and without the code that finds them.
fn apply(fleet: &mut Value, changes: &Value) {
    for part in ["now", "classes", "tenants", "pending", "pendingCount"] {
        if let Some(new) = changes.get(part) {
            fleet[part] = new.clone();
        }
    }
    let list = |of: &Value, name: &str| {
        of.get(name)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    let mut nodes: BTreeMap<String, Value> = list(fleet, "nodes")
        .into_iter()
        .map(|node| (node["name"].as_str().unwrap().into(), node))
        .collect();
    for gone in list(changes, "gone") {
        nodes.remove(gone.as_str().unwrap()).expect("it was there");
    }
    for node in list(changes, "nodes") {
        nodes.insert(node["name"].as_str().unwrap().into(), node);
    }
    for change in list(changes, "changed") {
        let node = nodes
            .get_mut(change["name"].as_str().unwrap())
            .expect("it is there");
        merge(node, &change["node"]);
        for (gpu_index, fields) in change["gpus"].as_object().into_iter().flatten() {
            merge(
                &mut node["gpus"][gpu_index.parse::<usize>().unwrap()],
                fields,
            );
        }
        let mut pods: BTreeMap<String, Value> = list(node, "pods")
            .into_iter()
            .map(|pod| (pod["uid"].as_str().unwrap().into(), pod))
            .collect();
        for left in list(&change, "left") {
            pods.remove(left.as_str().unwrap()).expect("it was there");
        }
        pods.extend(
            list(&change, "pods")
                .into_iter()
                .map(|pod| (pod["uid"].as_str().unwrap().into(), pod)),
        );
        node["pods"] = pods.into_values().collect();
    }
    fleet["nodes"] = nodes.into_values().collect();
}

fn merge(into: &mut Value, fields: &Value) {
    for (name, value) in fields.as_object().into_iter().flatten() {
        into[name] = value.clone();
    }
}

/// What may happen to the cluster between two views.
#[derive(Debug, Clone)]
enum FleetEvent {
    Time(u64),
    Report {
        node: usize,
        gpu: usize,
        kv: u8,
        queue: u32,
    },
    Arrives {
        pod: usize,
        gib: u64,
        priority: i32,
    },
    Runs {
        pod: usize,
        gib: u64,
        node: usize,
        gpu: usize,
        starting: bool,
    },
    Leaves {
        pod: usize,
    },
    Gpus {
        node: usize,
        count: usize,
        is_well: bool,
    },
    Deleted {
        node: usize,
    },
}

const NODES: usize = 3;
const GPUS: usize = 2;

fn fleet_event() -> impl Strategy<Value = FleetEvent> {
    let (node, gpu, pod) = (0..NODES, 0..GPUS, 0..6_usize);
    prop_oneof![
        (1..40_u64).prop_map(FleetEvent::Time),
        (node.clone(), gpu.clone(), 0..=100_u8, 0..5_u32).prop_map(|(node, gpu, kv, queue)| {
            FleetEvent::Report {
                node,
                gpu,
                kv,
                queue,
            }
        }),
        (pod.clone(), 1..90_u64, -5..5_i32).prop_map(|(pod, gib, priority)| FleetEvent::Arrives {
            pod,
            gib,
            priority
        }),
        (pod.clone(), 1..20_u64, node.clone(), gpu, any::<bool>()).prop_map(
            |(pod, gib, node, gpu, starting)| FleetEvent::Runs {
                pod,
                gib,
                node,
                gpu,
                starting
            }
        ),
        pod.prop_map(|pod| FleetEvent::Leaves { pod }),
        (node.clone(), 1..=GPUS + 1, any::<bool>()).prop_map(|(node, count, is_well)| {
            FleetEvent::Gpus {
                node,
                count,
                is_well,
            }
        }),
        node.prop_map(|node| FleetEvent::Deleted { node }),
    ]
}

fn apply_event(cluster: &mut ExplainedCluster, what: FleetEvent) {
    let node_name = |node: usize| format!("node-{node}");
    let sketch = |number: usize, gib: u64| pod(&format!("pod-{number}"), &format!("{gib}Gi"));
    let gpus = |cluster: &ExplainedCluster, node: usize| {
        cluster
            .cluster
            .ledger()
            .node(&name(&node_name(node)))
            .map_or(0, |node| node.devices.len())
    };
    match what {
        FleetEvent::Time(seconds) => cluster.advance(Millis::seconds(seconds)),
        FleetEvent::Report {
            node,
            gpu,
            kv,
            queue,
        } if gpu < gpus(cluster, node) => {
            cluster.report(&node_name(node), &[(gpu, kv, queue)], &[]);
        }
        FleetEvent::Arrives { pod, gib, priority } => {
            let mut pod = sketch(pod, gib);
            pod.priority = priority;
            cluster.add_waiting(&pod);
        }
        FleetEvent::Runs {
            pod,
            gib,
            node,
            gpu,
            starting,
        } if gpu < gpus(cluster, node) => {
            cluster.add_bound(&sketch(pod, gib), &node_name(node), &[gpu], starting);
        }
        FleetEvent::Leaves { pod } => cluster.cluster.apply(PodDeleted(sketch(pod, 1).uid())),
        FleetEvent::Gpus {
            node,
            count,
            is_well,
        } => {
            cluster.cluster.ledger_mut().set_node(
                &name(&node_name(node)),
                Default::default(),
                None,
            );
            let last = if is_well {
                Health::Healthy
            } else {
                Health::Lost
            };
            let mut health = vec![Health::Healthy; count];
            health[count - 1] = last;
            cluster.devices(&node_name(node), &health);
        }
        FleetEvent::Deleted { node } => cluster.cluster.apply(NodeDeleted(name(&node_name(node)))),
        FleetEvent::Report { .. } | FleetEvent::Runs { .. } => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn changes_applied_one_after_the_other_make_the_latest_view(
        steps in prop::collection::vec(prop::collection::vec(fleet_event(), 0..4), 1..12),
    ) {
        let mut cluster = (0..NODES).fold(ExplainedCluster::new(Policy::default()), |cluster, node| {
            cluster.with_node(&format!("node-{node}"), GPUS)
        });
        let mut before = Fleet::from_ledger(cluster.cluster.ledger(), 4);
        let mut client = json!(before);
        for step in steps {
            step.into_iter().for_each(|what| apply_event(&mut cluster, what));
            let after = Fleet::from_ledger(cluster.cluster.ledger(), 4);
            let changes = FleetChanges::between(&before, &after);
            prop_assert_eq!(changes.is_empty(), before == Fleet { now: before.now, ..after.clone() });
            apply(&mut client, &json!(changes));
            prop_assert_eq!(&client, &json!(after));
            before = after;
        }
    }
}

#[test]
fn of_a_gpu_with_another_load_only_that_is_listed() {
    let mut cluster = ExplainedCluster::new(Policy::default())
        .with_node("a", 2)
        .with_running(&pod("chat", "40Gi"), "a", &[1]);
    cluster.report("a", &[(1, 70, 3)], &[]);
    let before = Fleet::from_ledger(cluster.cluster.ledger(), 10);
    cluster.report("a", &[(1, 70, 9)], &[]);
    let changes = FleetChanges::between(&before, &Fleet::from_ledger(cluster.cluster.ledger(), 10));
    let now = before.now;
    assert_eq!(
        json!(changes),
        json!({ "now": now, "changed": [{ "name": "a", "gpus": { "1": { "queue": 9 } } }] })
    );
}
