//! A Node object that is deleted and created again under its name: what was known of the old machine is not taken for true of
//! the new one, and what was allocated on it stays charged until its pods are gone.

use super::*;
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::observe::{DevicesReported, PodReleased};
use stowage_scheduling::vocabulary::gpu::{Device, Health};

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn pod(name: &str, gib: u64) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "team-a", "uid": name },
        "spec": { "containers": [{
            "name": "engine",
            "resources": { "limits": { "stowage.dev/vram": format!("{gib}Gi") } },
        }] },
    })
}

fn node(uid: &str, machine: Option<&str>, labelled: bool) -> Node {
    let info = machine.map(|machine| json!({ "machineID": machine, "systemUUID": machine }));
    let labels = match labelled {
        true => json!({
            "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
        }),
        false => json!({}),
    };
    let mut node =
        json!({ "metadata": { "name": "a", "uid": uid, "labels": labels }, "status": {} });
    if let Some(info) = info {
        node["status"]["nodeInfo"] = info;
        for field in [
            "architecture",
            "bootID",
            "containerRuntimeVersion",
            "kernelVersion",
            "kubeProxyVersion",
            "kubeletVersion",
            "operatingSystem",
            "osImage",
        ] {
            node["status"]["nodeInfo"][field] = json!("");
        }
    }
    read(node)
}

fn a() -> NodeName {
    NodeName::parse("a").unwrap()
}

struct ReplacedNodeFixture {
    state: Arc<ServerState>,
    index: ClusterIndex,
}

impl ReplacedNodeFixture {
    /// Node `a`, whose agent has reported `GPU-OLD-0` and `GPU-OLD-1`, and one pod bound to the first of them.
    fn new(machine: Option<&str>) -> Self {
        let mut classes = Policy::default().classes().to_vec();
        classes.iter_mut().for_each(|class| class.engine = false);
        let policy = Policy::default().with_classes(classes).unwrap();
        let mut bench = Self {
            state: ServerState::new(policy),
            index: ClusterIndex::default(),
        };
        bench
            .index
            .apply_node(&bench.state, &node("node-uid-1", machine, false));
        bench.report("OLD");
        assert_eq!(
            bench.place_next("resident", 60).as_deref(),
            Some("GPU-OLD-0")
        );
        bench
    }

    fn report(&self, generation: &str) {
        let device = |index| Device {
            uuid: GpuUuid::parse(&format!("GPU-{generation}-{index}")).unwrap(),
            ..stowage_kubernetes_objects::devices_from_labels(&node("", None, true))
                .unwrap()
                .unwrap()[index as usize]
                .clone()
        };
        self.state
            .cluster()
            .apply(DevicesReported {
                node: a(),
                devices: [device(0), device(1)].into(),
                are_all: true,
            })
            .unwrap();
    }

    /// The GPU that the next pod gets on `a`.
    fn place_next(&mut self, name: &str, gib: u64) -> Option<String> {
        self.index.apply_pod(&self.state, &read(pod(name, gib)));
        let uid = PodUid::parse(name).unwrap();
        let mut cluster = self.state.cluster();
        let asked = BindAsked::for_pod(cluster.ledger(), &uid, &a())?;
        let Ok(BindAnswer::Write(BindDecision { placement, .. })) = cluster.apply(asked) else {
            return None;
        };
        cluster.apply(BindingWritten {
            uid: uid.clone(),
            node: a(),
            devices: placement.recorded_gpus(),
        });
        assert_eq!(audit(cluster.ledger()), []);
        Some(placement.devices[0].to_string())
    }

    fn devices(&self) -> Vec<(String, Health)> {
        let cluster = self.state.cluster();
        cluster
            .ledger()
            .node(&a())
            .unwrap()
            .devices
            .iter()
            .map(|one| (one.uuid.to_string(), one.health))
            .collect()
    }
}

#[test]
fn a_placeholder_firmware_uuid_identifies_no_machine() {
    let machine = |id| {
        objects::node_identity(&node("uid", Some(id), false))
            .unwrap()
            .machine
    };
    for unset in [
        "00000000-0000-0000-0000-000000000000",
        "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
        "",
    ] {
        assert_eq!(machine(unset), None, "{unset}");
    }
    assert!(machine("ffffffff-ffff-ffff-ffff-fffffffffff1").is_some());
}

#[test]
fn a_node_recreated_under_its_name_does_not_keep_its_old_gpus() {
    for is_seen_to_go in [true, false] {
        let mut bench = ReplacedNodeFixture::new(Some("machine-1"));
        let old = node("node-uid-1", Some("machine-1"), false);
        if is_seen_to_go {
            bench.index.delete_node(&bench.state, &old);
        }
        bench
            .index
            .apply_node(&bench.state, &node("node-uid-2", Some("machine-2"), false));
        let lost = ("GPU-OLD-0".to_owned(), Health::Lost);
        assert_eq!(
            bench.devices(),
            std::slice::from_ref(&lost),
            "its pod stays charged until it is gone"
        );
        assert_eq!(
            bench.place_next("next", 10),
            None,
            "nobody knows the new machine's GPUs yet"
        );
        bench.report("NEW");
        assert!(bench.place_next("next", 60).unwrap().starts_with("GPU-NEW"));
        bench
            .state
            .cluster()
            .apply(PodReleased(PodUid::parse("resident").unwrap()));
        bench.report("NEW");
        assert_eq!(
            bench.devices().len(),
            2,
            "what was lost goes with its last pod"
        );
    }
}

#[test]
fn a_pod_bound_by_index_is_on_the_new_machines_gpu_of_that_index() {
    let mut bench = ReplacedNodeFixture::new(Some("machine-1"));
    bench
        .state
        .cluster()
        .apply(PodReleased(PodUid::parse("resident").unwrap()));
    bench
        .index
        .apply_node(&bench.state, &node("node-uid-2", Some("machine-2"), true));
    assert_eq!(bench.place_next("by-index", 60).as_deref(), Some("index-0"));
    bench.report("NEW");
    assert_eq!(bench.place_next("beside", 60).as_deref(), Some("GPU-NEW-1"));
    bench
        .state
        .cluster()
        .apply(PodReleased(PodUid::parse("beside").unwrap()));
    // Its kubelet starts what is bound to the node: the pod gets the first GPU again, which is another one.
    bench
        .index
        .apply_node(&bench.state, &node("node-uid-3", Some("machine-3"), true));
    bench.report("NEWEST");
    assert_eq!(
        bench.place_next("next", 60).as_deref(),
        Some("GPU-NEWEST-1")
    );
    assert_eq!(bench.place_next("last", 60), None);
}

#[test]
fn labels_of_a_recreated_node_are_ignored_while_pods_of_the_old_one_are_charged() {
    let mut bench = ReplacedNodeFixture::new(None);
    // The same machine may have registered again: then `index-0` would be `GPU-OLD-0`, where a pod runs.
    bench
        .index
        .apply_node(&bench.state, &node("node-uid-2", None, true));
    assert_eq!(bench.place_next("next", 10), None);
    bench
        .state
        .cluster()
        .apply(PodReleased(PodUid::parse("resident").unwrap()));
    bench
        .index
        .apply_node(&bench.state, &node("node-uid-2", None, true));
    assert_eq!(bench.place_next("later", 10).as_deref(), Some("index-0"));
}

#[test]
fn a_machine_that_registers_again_keeps_its_gpus() {
    let mut bench = ReplacedNodeFixture::new(Some("machine-1"));
    bench
        .index
        .apply_node(&bench.state, &node("node-uid-2", Some("machine-1"), false));
    assert_eq!(bench.place_next("next", 60).as_deref(), Some("GPU-OLD-1"));
    assert_eq!(bench.place_next("third", 60), None);
}
