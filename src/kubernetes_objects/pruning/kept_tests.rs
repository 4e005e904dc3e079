//! What `objects` reads is kept: each object with all fields of its type set reads the same whole and pruned.
//!
//! Whoever reads another field, or another annotation, finds it missing here.

use super::kept::Resource;
use super::scanner::Scanner;
use crate::{self as objects, ReservationMessage, StorageResource, kube_filters};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::storage::v1::StorageClass;
use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::{Serialize, forward_to_deserialize_any};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::iter::once;
use std::path::Path;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::classification::PodTraits;

/// A value of any type, with each field set. `0`: the type that it is the text of.
#[derive(Clone, Copy)]
struct Full(&'static str);

const OBJECT: &str = "object";

impl<'de> IntoDeserializer<'de> for Full {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Full {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str(match self.0 {
            "Time" | "MicroTime" => "2026-03-01T10:00:00Z",
            _ => "1",
        })
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(true)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i32(1)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(1)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_f64(1.0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(Self(name))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(SeqDeserializer::new(once(self)))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(MapDeserializer::new(once(("x", Self("")))))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        // Of an object these are no text, but which type it is.
        let is_set = |field: &&&str| self.0 != OBJECT || !matches!(**field, "apiVersion" | "kind");
        visitor.visit_map(MapDeserializer::new(
            fields.iter().filter(is_set).map(|field| (*field, Self(""))),
        ))
    }

    forward_to_deserialize_any! {
        i8 i16 u8 u16 u32 u64 f32 char str string bytes byte_buf unit unit_struct tuple tuple_struct enum identifier ignored_any
    }
}

/// What is set here, and all that is not. Each item of a list gets it.
fn with_all(full: &Value, set: &Value) -> Value {
    match (full, set) {
        (Value::Object(full), Value::Object(set)) => {
            let mut all = full.clone();
            for (key, value) in set {
                all.insert(
                    key.clone(),
                    full.get(key)
                        .map_or(value.clone(), |full| with_all(full, value)),
                );
            }
            Value::Object(all)
        }
        (Value::Array(full), Value::Array(set)) => set
            .iter()
            .map(|item| with_all(full.first().unwrap_or(item), item))
            .collect(),
        (_, set) => set.clone(),
    }
}

/// Keys of labels and annotations that the code beside `pruning` names.
fn keys() -> BTreeSet<String> {
    let is_key = |text: &&str| {
        let is_key =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"./-".contains(&byte);
        text.contains('/') && text.bytes().all(is_key)
    };
    let mut keys = BTreeSet::new();
    for text in sources(Path::new(concat!(
        env!("CARGO_WORKSPACE_DIR"),
        "/src/kubernetes_objects"
    ))) {
        keys.extend(text.split('"').filter(is_key).map(str::to_owned));
    }
    keys
}

fn sources(folder: &Path) -> Vec<String> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if path.is_dir() && name != "pruning" {
            texts.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests.rs"
        {
            texts.push(fs::read_to_string(path).unwrap());
        }
    }
    texts
}

/// Fails if the object reads otherwise once it is pruned, or as well without one of these fields that are read.
fn reads_the_same<K>(plural: &str, set: &Value, fields: &[&str], read: impl Fn(&K) -> Vec<String>)
where
    K: DeserializeOwned + Serialize,
{
    let full = serde_json::to_value(K::deserialize(Full(OBJECT)).unwrap()).unwrap();
    let resource = Resource::from_path(&format!("/api/v1/{plural}")).unwrap();
    for value in ["1", "true", "2026-03-01T11:00:00Z"] {
        let mut all = full.clone();
        for key in keys() {
            all["metadata"]["annotations"][key] = json!(value);
        }
        let whole = with_all(&all, set).to_string();
        let pruned = Scanner::new(resource).feed(whole.as_bytes());
        assert!(pruned.len() < whole.len());
        let pruned: Value = serde_json::from_slice(&pruned).unwrap();
        let of = |object: &Value| read(&serde_json::from_value(object.clone()).unwrap());
        let found = of(&pruned);
        for (pruned, whole) in found
            .iter()
            .zip(&of(&serde_json::from_str(&whole).unwrap()))
        {
            assert_eq!(
                pruned, whole,
                "{plural}: a field that is read is not kept: see pruning/kept.rs"
            );
        }
        for field in fields {
            let (mut less, (parent, name)) = (pruned.clone(), field.rsplit_once('/').unwrap());
            let parent = less.pointer_mut(parent).unwrap().as_object_mut().unwrap();
            assert!(
                parent.remove(&name.replace("~1", "/")).is_some(),
                "{plural}: {field} is not kept"
            );
            assert_ne!(of(&less), found, "{plural}: nothing here reads {field}");
        }
    }
}

macro_rules! texts {
    ($($value:expr),* $(,)?) => { vec![$(format!("{}: {:?}", stringify!($value), $value)),*] };
}

#[test]
fn every_pod_field_that_is_read_is_kept() {
    let required =
        |terms: Value| json!({ "requiredDuringSchedulingIgnoredDuringExecution": terms });
    let term = json!({
        "matchExpressions": [{ "key": "zone", "operator": "In", "values": ["z"] }],
        "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n"] }],
    });
    let repelled = json!({ "topologyKey": "zone", "labelSelector": { "matchExpressions": [{ "key": "app", "operator": "Exists" }] } });
    let resources = |amounts: Value| json!({ "limits": amounts, "requests": amounts });
    let engine = json!({ "name": "engine", "resources": resources(json!({ "stowage.dev/vram": "40Gi", "cpu": "2" })), "ports": [{ "containerPort": 80 }] });
    let side = json!({ "name": "side", "restartPolicy": "Always", "resources": resources(json!({ "memory": "1Gi" })) });
    let pod = |phase: &str, node: Option<&str>, claims: Value| {
        json!({
            "metadata": {
                "name": "p", "namespace": "team", "uid": "u",
                "ownerReferences": [{ "kind": "ReplicaSet", "uid": "o", "controller": true }],
                "annotations": {
                    "stowage.dev/gpus": "1", "stowage.dev/exclusive": "false", "stowage.dev/kv-cache": "10Gi", "stowage.dev/model": "org/m",
                    "stowage.dev/devices": "GPU-1", "stowage.dev/vram-granted": "42949672960", "stowage.dev/exclusive-granted": "false",
                },
            },
            "spec": {
                "nodeName": node, "initContainers": [side], "containers": [engine], "resourceClaims": claims,
                "schedulingGates": [{ "name": objects::PLAN_GATE }],
                "affinity": {
                    "nodeAffinity": required(json!({ "nodeSelectorTerms": [term] })),
                    "podAffinity": required(json!([])), "podAntiAffinity": required(json!([repelled])),
                },
                "tolerations": [{ "key": "k", "operator": "Exists", "effect": "NoSchedule" }],
                "topologySpreadConstraints": [{ "whenUnsatisfiable": "DoNotSchedule" }],
            },
            "status": {
                "phase": phase, "conditions": [{ "type": "Ready", "status": "False" }],
                "containerStatuses": [{ "name": "engine", "allocatedResources": { "cpu": "3" } }], "initContainerStatuses": [{ "name": "side" }],
            },
        })
    };
    let policy = Policy::default();
    let now = "2026-03-01T12:00:00Z".parse().unwrap();
    let classify = |traits: &PodTraits| policy.classify(traits);
    let read = |pod: &Pod| {
        let (_, key) = objects::identity(pod).unwrap();
        objects::demand(pod, &policy).expect("what it asks for is read as a whole");
        texts![
            objects::identity(pod),
            objects::demand(pod, &policy),
            objects::claims_demand(pod, classify),
            objects::worst_case(pod, &policy),
            objects::observation(pod, &policy, None, now),
            objects::uses_claims_only(pod),
            objects::requests_zero_gpus(pod),
            objects::is_finished(pod),
            objects::is_pending(pod),
            objects::is_deleted_without_node(pod),
            objects::waiting(pod),
            objects::borrows(pod),
            objects::gates(pod),
            objects::nominated_node(pod),
            objects::wakeable_request(pod),
            objects::has_started(pod),
            objects::audited_binding(pod, &key),
            objects::start_progress(pod),
            objects::is_mirror(pod),
            objects::disruption(pod, now),
            objects::member_without_placement(pod),
            ReservationMessage::read(pod),
            kube_filters::footprint(pod),
            kube_filters::requirements(pod),
            kube_filters::names_one_node(pod),
            kube_filters::gpu_wish(pod),
            kube_filters::rules_of_running_clusters(pod),
            kube_filters::lasting_claims(pod),
        ]
    };
    let fields = [
        "/metadata/ownerReferences",
        "/metadata/annotations/stowage.dev~1wake-requested",
        "/spec/tolerations",
        "/spec/volumes",
        "/status/containerStatuses",
    ];
    for (phase, node) in [("Running", Some("n")), ("Pending", None)] {
        for claims in [json!([]), json!([{ "name": "c" }])] {
            reads_the_same("pods", &pod(phase, node, claims), &fields, read);
        }
    }
}

#[test]
fn every_node_field_that_is_read_is_kept() {
    let labels = json!({ "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81559", "nvidia.com/gpu.product": "H100" });
    let amounts = json!({ "cpu": "8", "pods": "110", "stowage.dev/vram": "1Gi", "nvidia.com/gpu": "2", "volcano.sh/vgpu-number": "1" });
    let node = json!({
        "metadata": { "name": "n", "uid": "u", "labels": labels },
        "spec": { "taints": [{ "key": "k", "effect": "NoSchedule" }] },
        "status": { "capacity": amounts, "allocatable": amounts, "images": [{ "names": ["i:1"], "sizeBytes": 7 << 30 }],
            "conditions": [{ "type": "gpu-fractioning.nvidia.com/Ready", "status": "True", "lastHeartbeatTime": null }] },
    });
    let fields = [
        "/spec/taints",
        "/status/images",
        "/status/nodeInfo",
        "/status/conditions",
    ];
    reads_the_same("nodes", &node, &fields, |node: &Node| {
        let labelled = objects::devices_from_labels(node);
        texts![
            objects::node_identity(node),
            objects::node_signs(node, &labelled),
            objects::plugin_devices(node),
            objects::node_images(node),
            objects::resources(node).collect::<Vec<_>>(),
            kube_filters::filter_node(node),
            labelled,
        ]
    });
}

#[test]
fn every_field_of_other_objects_that_is_read_is_kept() {
    let named = json!({ "metadata": { "name": "a", "namespace": "b" } });
    reads_the_same(
        "poddisruptionbudgets",
        &named,
        &[],
        |budget: &PodDisruptionBudget| texts![objects::budget(budget)],
    );
    reads_the_same("resourceslices", &named, &[], |slice: &ResourceSlice| {
        texts![objects::device_slice(slice)]
    });
    fn storage<K: StorageResource>(object: &K) -> Vec<String> {
        texts![object.key(), object.to_storage_object()]
    }
    reads_the_same(
        "persistentvolumeclaims",
        &named,
        &[],
        storage::<PersistentVolumeClaim>,
    );
    reads_the_same(
        "persistentvolumes",
        &named,
        &[],
        storage::<PersistentVolume>,
    );
    reads_the_same("storageclasses", &named, &[], storage::<StorageClass>);
}
