//! What earlier versions left on an API server is understood: the objects that `control_plane/recording.rs` recorded, one folder
//! for each version, read by the code of today.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use stowage_kubernetes_objects::{self as objects, Gates, ReservationMessage};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::ledger::ObservedPhase;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::Sharing;

/// The version whose objects are recorded. After its release, a new one gets a folder of its own beside it.
pub const VERSION: &str = "v0.4.0";

/// Has a folder for each version.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/upgrade")
}

/// The recorded objects of a version, by name.
pub fn recorded(version: &str) -> BTreeMap<String, Value> {
    let files = std::fs::read_dir(folder().join(version))
        .unwrap()
        .map(|file| file.unwrap().path());
    let read = |file: PathBuf| {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        (
            name,
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap(),
        )
    };
    files.map(read).collect()
}

/// All that were recorded, the current one among them.
fn versions() -> Vec<BTreeMap<String, Value>> {
    let folders = std::fs::read_dir(folder())
        .unwrap()
        .map(|folder| folder.unwrap().file_name());
    let names: Vec<String> = folders.map(|name| name.into_string().unwrap()).collect();
    assert!(names.contains(&VERSION.to_owned()), "{names:?}");
    names.iter().map(|name| recorded(name)).collect()
}

fn pod(objects: &BTreeMap<String, Value>, name: &str) -> Pod {
    serde_json::from_value(objects[&format!("pod-{name}")].clone()).unwrap()
}

/// The GPUs of the recorded nodes, of 81,559 MiB each.
fn gpu(node: &str, index: u32) -> GpuUuid {
    let node = match node {
        "node-a" => "344bda1d",
        "node-b" => "344bda1e",
        "node-c" => "344bda1f",
        _ => "344bda20",
    };
    GpuUuid::parse(&format!("GPU-{node}-0000-4000-8000-{index:012x}")).unwrap()
}

#[test]
fn bound_pods_keep_their_gpus_and_what_they_were_granted() {
    let whole = (81_559u64 << 20) - (81_559u64 << 20).div_ceil(10);
    for version in versions() {
        for (name, node, gpus, granted, sharing) in [
            ("bound-shared", "node-a", 1, 20 << 30, Sharing::Shared),
            ("bound-over-two", "node-b", 2, 40 << 30, Sharing::Shared),
            ("bound-exclusive", "node-c", 1, whole, Sharing::Exclusive),
            ("bound-planned", "node-a", 1, 10 << 30, Sharing::Shared),
        ] {
            let pod = pod(&version, name);
            assert_eq!(objects::granted(&pod), Some(Bytes(granted)), "{name}");
            let observed =
                objects::observation(&pod, &Policy::default(), None, jiff::Timestamp::UNIX_EPOCH);
            let observed = observed.unwrap();
            let ObservedPhase::Bound {
                node: on, devices, ..
            } = observed.state
            else {
                panic!("{name}")
            };
            let expected: Vec<GpuUuid> = (0..gpus).map(|index| gpu(node, index)).collect();
            assert_eq!(
                (on.as_str(), devices.as_deref()),
                (node, Some(&expected[..])),
                "{name}"
            );
            assert_eq!(
                (observed.demand.gpus, observed.demand.sharing),
                (gpus, sharing),
                "{name}"
            );
        }
    }
}

#[test]
fn a_reservation_is_found_until_it_has_ended() {
    for version in versions() {
        let victim = pod(&version, "evicted");
        let reserved = ReservationMessage::read(&pod(&version, "reserved-for-victims")).unwrap();
        assert_eq!(reserved.node.as_str(), "node-d");
        assert_eq!(
            reserved.devices,
            objects::recorded_devices(&victim).unwrap()
        );
        let victims: Vec<&str> = reserved.victims.iter().map(|uid| uid.as_str()).collect();
        assert_eq!(victims, [victim.metadata.uid.as_deref().unwrap()]);
        let lease = version["lease"]["metadata"]["uid"].as_str().unwrap();
        assert!(
            reserved
                .epoch
                .unwrap()
                .to_string()
                .starts_with(&format!("{lease}/0/"))
        );

        assert_eq!(
            ReservationMessage::read(&pod(&version, "reservation-ended")),
            None
        );
    }
}

#[test]
fn gates_and_nominations_of_earlier_versions_are_read() {
    for version in versions() {
        let nominated = objects::nominated_node(&pod(&version, "nominated"));
        assert_eq!(nominated.as_ref().map(|node| node.as_str()), Some("node-a"));
        for (name, ours, others) in [
            ("without-a-place", true, false),
            ("plan-preempting", false, true),
            ("bound-planned", false, false),
        ] {
            assert_eq!(
                objects::gates(&pod(&version, name)),
                Gates {
                    has_planner_gate: ours,
                    has_other_gates: others
                },
                "{name}"
            );
        }
    }
}

/// A condition that is not known any more would stay on its pod forever, and an annotation would mean nothing.
#[test]
fn every_condition_and_annotation_is_one_that_is_still_known() {
    use stowage_kubernetes_objects::{binding_annotations, user_annotations};
    let annotations = [
        user_annotations::GPUS,
        user_annotations::EXCLUSIVE,
        binding_annotations::DEVICES,
        binding_annotations::GRANTED,
        binding_annotations::EXCLUSIVE,
        binding_annotations::MEMORY_FRACTION,
        binding_annotations::VISIBLE_DEVICES,
        binding_annotations::LEADER_EPOCH,
    ];
    for version in versions() {
        let mut conditions = 0;
        for (name, object) in version.iter().filter(|(name, _)| name.starts_with("pod-")) {
            let kinds = object["status"]["conditions"]
                .as_array()
                .into_iter()
                .flatten();
            for kind in kinds.filter_map(|condition| condition["type"].as_str()) {
                let is_ours = kind.starts_with("stowage.dev/");
                assert!(
                    !is_ours || objects::CONDITIONS.contains(&kind),
                    "{name}: {kind}"
                );
                conditions += usize::from(is_ours);
            }
            let keys = object["metadata"]["annotations"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, _)| key);
            for key in keys.filter(|key| key.starts_with("stowage.dev/")) {
                assert!(annotations.contains(&key.as_str()), "{name}: {key}");
            }
        }
        assert!(conditions > 8, "{conditions} conditions are recorded");
    }
}

#[test]
fn a_ledger_is_rebuilt_from_recorded_objects() {
    for version in versions() {
        let left = [
            "bound-shared",
            "bound-over-two",
            "bound-exclusive",
            "reserved-for-victims",
            "evicted",
        ];
        let pods = left.map(|name| version[&format!("pod-{name}")].clone());
        let nodes = version
            .iter()
            .filter(|(_, object)| object["kind"] == "Node")
            .map(|(_, node)| node.clone());
        let items: Vec<Value> = nodes.chain(pods).collect();
        assert_eq!(items.len(), 4 + left.len());
        let folder = tempfile::tempdir().unwrap();
        let dump = folder.path().join("cluster.json");
        std::fs::write(
            &dump,
            json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string(),
        )
        .unwrap();
        for (pod, node, index) in [
            ("shared", "node-a", 0),
            ("over-two", "node-b", 1),
            ("exclusive", "node-c", 0),
        ] {
            let explained = explain(&dump, pod);
            assert!(
                explained.contains(gpu(node, index).as_str()),
                "{pod}: {explained}"
            );
        }
        let reserved = ReservationMessage::read(&pod(&version, "reserved-for-victims")).unwrap();
        let explained = explain(&dump, "preemptor");
        assert!(
            explained.contains(reserved.devices[0].as_str()),
            "{explained}"
        );
    }
}

/// What `stowage explain` prints of a pod; whether it fits is the exit code, and does not matter here.
fn explain(dump: &Path, pod: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let output = command
        .args(["explain", &format!("default/{pod}"), "--cluster"])
        .arg(dump)
        .output()
        .unwrap();
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}
