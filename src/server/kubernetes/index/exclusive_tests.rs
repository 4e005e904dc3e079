//! Exclusivity over a restart: a pod that was granted whole GPUs keeps them, in the ledger that bound it and in one that is
//! built again from the pod object, under another headroom, too.

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Percent;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::observe::PodReleased;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::headroom::Headroom;

fn pod(name: &str, gib: u64, gpus: u32, exclusive: Option<bool>) -> Value {
    let mut annotations = json!({ "stowage.dev/gpus": gpus.to_string() });
    if let Some(exclusive) = exclusive {
        annotations["stowage.dev/exclusive"] = json!(exclusive.to_string());
    }
    json!({
        "metadata": { "name": name, "namespace": "team-a", "uid": name, "annotations": annotations },
        "spec": { "containers": [{
            "name": "engine",
            "resources": { "limits": { "stowage.dev/vram": format!("{gib}Gi") } },
        }] },
        "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

fn read<T: serde::de::DeserializeOwned>(object: &Value) -> T {
    serde_json::from_value(object.clone()).unwrap()
}

fn identity(pod: &Value) -> (PodUid, PodKey) {
    objects::identity(&read(pod)).unwrap()
}

fn uid(name: &str) -> PodUid {
    PodUid::parse(name).unwrap()
}

/// One replica and its index.
struct IndexedReplica {
    state: Arc<ServerState>,
    index: ClusterIndex,
}

impl IndexedReplica {
    /// One that sees node `a` with two GPUs of 80 GiB.
    fn new(headroom: u8) -> Self {
        let mut classes = Policy::default().classes().to_vec();
        classes.iter_mut().for_each(|class| class.engine = false);
        let mut policy = Policy::default().with_classes(classes).unwrap();
        policy.headroom = Headroom::uniform(Percent::new(headroom).unwrap());
        let mut replica = Self {
            state: ServerState::new(policy),
            index: ClusterIndex::default(),
        };
        let node = json!({ "metadata": { "name": "a", "labels": {
            "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
        } }, "status": {} });
        replica.index.replace_nodes(&replica.state, &[read(&node)]);
        replica
    }

    fn apply(&mut self, pod: &Value) -> Option<PodEvent> {
        self.index.apply_pod(&self.state, &read(pod))
    }

    /// Binds the pod to `a`, if it fits there. Returns the pod as the API server has it from then on.
    fn bind(&mut self, pod: &Value) -> Option<Value> {
        let bound = self.write(pod)?;
        let (pod_uid, devices) = (identity(pod).0, objects::recorded_devices(&read(&bound)));
        self.state.cluster().apply(BindingWritten {
            uid: pod_uid.clone(),
            node: NodeName::parse("a").unwrap(),
            devices,
        });
        Some(bound)
    }

    /// Binds a pod up to the Binding request, whose answer is still to come.
    fn write(&mut self, pod: &Value) -> Option<Value> {
        self.apply(pod);
        let node = NodeName::parse("a").unwrap();
        let (pod_uid, key) = identity(pod);
        let mut cluster = self.state.cluster();
        let demand = cluster.ledger().pod_state(&pod_uid)?.demand.clone();
        let asked = BindAsked::for_pod(cluster.ledger(), &pod_uid, &node)?;
        let Ok(BindAnswer::Write(BindDecision { placement, .. })) = cluster.apply(asked) else {
            return None;
        };
        let epoch = LeaderEpoch::new("lease", 1, "nonce");
        let binding = objects::binding(
            &key,
            &pod_uid,
            &demand,
            &placement,
            Some("nvidia.com/gpu"),
            &epoch,
        );
        let mut bound = pod.clone();
        bound["spec"]["nodeName"] = json!("a");
        for (annotation, value) in binding.metadata.annotations.unwrap() {
            bound["metadata"]["annotations"][annotation] = json!(value);
        }
        Some(bound)
    }

    fn demand(&self, name: &str) -> Option<Demand> {
        let demand = self
            .state
            .cluster()
            .ledger()
            .pod_state(&uid(name))
            .map(|entry| entry.demand.clone());
        // The policy version of the classification differs by process.
        demand.map(|demand| Demand {
            classified_by: 0,
            ..demand
        })
    }

    fn sharing(&self, name: &str) -> Sharing {
        self.demand(name).unwrap().sharing
    }
}

#[test]
fn a_pod_that_requested_a_whole_gpu_is_exclusive_after_a_restart() {
    // 10 % of headroom leave 72 of 80 GiB: the pod asks for all of them, so it is granted what it asked for.
    let mut before = IndexedReplica::new(10);
    let bound = before.bind(&pod("exclusive", 72, 1, Some(true))).unwrap();
    before.apply(&bound);
    assert_eq!(
        before.sharing("exclusive"),
        Sharing::Exclusive,
        "in the process that bound it"
    );
    // The policy leaves more of each GPU now: 4 GiB are beside the 72.
    let mut after = IndexedReplica::new(5);
    after.apply(&bound);
    assert_eq!(
        after.sharing("exclusive"),
        Sharing::Exclusive,
        "after a restart"
    );
    assert!(
        after.bind(&pod("second", 76, 1, Some(true))).is_some(),
        "the other GPU is free"
    );
    assert_eq!(
        after.bind(&pod("beside", 2, 1, None)),
        None,
        "nobody is bound beside an exclusive pod"
    );
}

#[test]
fn a_bound_pod_whose_annotation_is_edited_keeps_the_exclusivity_it_was_granted() {
    for granted in [true, false] {
        let mut before = IndexedReplica::new(10);
        let mut edited = before.bind(&pod("p", 40, 1, Some(granted))).unwrap();
        for now in [json!((!granted).to_string()), json!("perhaps"), Value::Null] {
            edited["metadata"]["annotations"]["stowage.dev/exclusive"] = now;
            let mut after = IndexedReplica::new(10);
            if edited["metadata"]["annotations"]["stowage.dev/exclusive"].is_null() {
                edited["metadata"]["annotations"]
                    .as_object_mut()
                    .unwrap()
                    .remove("stowage.dev/exclusive");
            }
            after.apply(&edited);
            let expected = if granted {
                Sharing::Exclusive
            } else {
                Sharing::Shared
            };
            assert_eq!(
                after.sharing("p"),
                expected,
                "{}",
                edited["metadata"]["annotations"]
            );
        }
    }
}

#[test]
fn a_pod_bound_by_an_older_version_is_exclusive_by_its_request_or_its_grant() {
    let mut before = IndexedReplica::new(10);
    for (asked, gib, expected) in [
        (Some(true), 72, Sharing::Exclusive),
        (Some(true), 40, Sharing::Exclusive),
        (Some(false), 72, Sharing::Shared),
        (None, 40, Sharing::Shared),
    ] {
        let mut bound = before.bind(&pod("p", gib, 1, asked)).unwrap();
        before.state.cluster().apply(PodReleased(uid("p")));
        bound["metadata"]["annotations"]
            .as_object_mut()
            .unwrap()
            .remove("stowage.dev/exclusive-granted");
        let mut after = IndexedReplica::new(5);
        after.apply(&bound);
        assert_eq!(after.sharing("p"), expected, "{asked:?} {gib}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Demands as a whole, not only the sums that follow from them. A pod asks for any amount or for exactly what its GPUs
    /// have, and the watch shows it before the answer to its Binding comes, or after.
    #[test]
    fn the_ledger_rebuilt_from_the_pods_has_the_demands_of_the_one_that_was_lost(
        pods in prop::collection::vec((0u64..80, 1u32..3, prop::option::of(any::<bool>()), any::<bool>()), 1..6),
        headroom in (0u8..5, 0u8..5),
    ) {
        let mut before = IndexedReplica::new(headroom.0 * 5);
        let mut bound = Vec::new();
        for (place, (gib, gpus, exclusive, watch_is_first)) in pods.into_iter().enumerate() {
            let (name, all) = (format!("pod-{place}"), u64::from(80 - headroom.0 * 4));
            let asked = pod(&name, if gib == 0 || gib > all { all * u64::from(gpus) } else { gib }, gpus, exclusive);
            let Some(pod) = before.write(&asked) else { continue };
            let ordered = before.demand(&name);
            if watch_is_first {
                before.apply(&pod);
            }
            let devices = objects::recorded_devices(&read(&pod));
            before.state.cluster().apply(BindingWritten { uid: uid(&name), node: NodeName::parse("a").unwrap(), devices });
            prop_assert_eq!(before.apply(&pod), None, "nothing was edited");
            prop_assert_eq!(before.demand(&name), ordered);
            bound.push((name, pod));
        }
        let mut after = IndexedReplica::new(headroom.1 * 5);
        let list: Vec<Pod> = bound.iter().map(|(_, pod)| read(pod)).collect();
        after.index.replace_pods(&after.state, &list);
        for (name, _) in &bound {
            prop_assert_eq!(after.demand(name), before.demand(name));
        }
    }
}
