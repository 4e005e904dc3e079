//! Persistent volumes, claims and storage classes, converted into what kube-scheduler's filters make of them.

use super::kube_filters::node_terms;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, TopologySelectorTerm};
use k8s_openapi::api::storage::v1::StorageClass as ApiStorageClass;
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::kube_filters::node::NodeTerm;
use stowage_scheduling::kube_filters::volumes::{
    ClaimBinding, StorageClass, TopologyLabel, VolumeClaim, VolumeTopology,
};
use stowage_scheduling::kube_filters::{StorageKind, StorageObject};
use stowage_scheduling::vocabulary::label_selector::Requirement;

/// Set when claim and volume name each other.
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
/// kube-scheduler's choice, for the provisioner.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// What `storageClassName` was before Kubernetes 1.6, and still counts.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
/// Stands between the zones of a volume that can be used in several.
const BETWEEN_ZONES: &str = "__";

/// A kind of object of storage.
pub trait StorageResource {
    const KIND: StorageKind;

    /// The object's key: its name, of a claim `namespace/name`.
    fn key(&self) -> Option<Arc<str>>;

    fn to_storage_object(&self) -> StorageObject;
}

impl StorageResource for PersistentVolumeClaim {
    const KIND: StorageKind = StorageKind::Claim;

    fn key(&self) -> Option<Arc<str>> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or("default");
        Some(format!("{namespace}/{}", self.metadata.name.as_deref()?).into())
    }

    fn to_storage_object(&self) -> StorageObject {
        let modes = self
            .spec
            .iter()
            .flat_map(|spec| &spec.access_modes)
            .flatten();
        let of_one_pod = modes.into_iter().any(|mode| mode == "ReadWriteOncePod");
        StorageObject::Claim(VolumeClaim {
            binding: claim_binding(self),
            of_one_pod,
        })
    }
}

impl StorageResource for PersistentVolume {
    const KIND: StorageKind = StorageKind::Volume;

    fn key(&self) -> Option<Arc<str>> {
        Some(self.metadata.name.as_deref()?.into())
    }

    fn to_storage_object(&self) -> StorageObject {
        let affinity = self
            .spec
            .as_ref()
            .and_then(|spec| spec.node_affinity.as_ref());
        let terms = affinity
            .and_then(|affinity| affinity.required.as_ref())
            .map(node_terms);
        let unreadable = matches!(terms, Some(Err(_)));
        let zones = [TopologyLabel::Zone, TopologyLabel::Region]
            .into_iter()
            .filter_map(|label| {
                let labels = self.metadata.labels.as_ref()?;
                let text = label.names().iter().find_map(|name| labels.get(*name))?;
                Some((
                    label,
                    text.split(BETWEEN_ZONES).map(str::to_owned).collect(),
                ))
            });
        let terms = terms.and_then(Result::ok);
        StorageObject::Volume(VolumeTopology {
            terms,
            zones: zones.collect(),
            unreadable,
        })
    }
}

impl StorageResource for ApiStorageClass {
    const KIND: StorageKind = StorageKind::Class;

    fn key(&self) -> Option<Arc<str>> {
        Some(self.metadata.name.as_deref()?.into())
    }

    fn to_storage_object(&self) -> StorageObject {
        let topologies = self
            .allowed_topologies
            .as_ref()
            .filter(|terms| !terms.is_empty());
        StorageObject::Class(StorageClass {
            waits: self.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            provisions: self.provisioner != NO_PROVISIONER,
            topologies: topologies.map(|terms| terms.iter().map(topology_term).collect()),
        })
    }
}

fn claim_binding(claim: &PersistentVolumeClaim) -> ClaimBinding {
    let empty = BTreeMap::new();
    let annotations = claim.metadata.annotations.as_ref().unwrap_or(&empty);
    let is_lost = claim
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        == Some("Lost");
    if claim.metadata.deletion_timestamp.is_some() || is_lost {
        return ClaimBinding::Unusable;
    }
    let spec = claim.spec.as_ref();
    let text = |text: Option<&String>| {
        text.map(String::as_str)
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    match text(spec.and_then(|spec| spec.volume_name.as_ref())) {
        Some(volume) if annotations.contains_key(BIND_COMPLETED) => ClaimBinding::Bound {
            volume: volume.into(),
        },
        // kube-scheduler waits for the volume controller.
        Some(_) => ClaimBinding::Unusable,
        None => {
            let class = annotations
                .get(CLASS_ANNOTATION)
                .or(spec.and_then(|spec| spec.storage_class_name.as_ref()));
            let selected = annotations
                .get(SELECTED_NODE)
                .map(|name| NodeName::parse(name));
            ClaimBinding::Unbound {
                class: text(class).map(Into::into),
                selected_node: selected.and_then(Result::ok),
            }
        }
    }
}

fn topology_term(term: &TopologySelectorTerm) -> NodeTerm {
    let rules = term.match_label_expressions.iter().flatten();
    // An empty list of values matches nothing.
    let labels = rules.map(|rule| Requirement::one_of(&rule.key, &rule.values));
    NodeTerm {
        labels: labels.collect(),
        name: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn binding(claim: serde_json::Value) -> ClaimBinding {
        claim_binding(&serde_json::from_value(claim).unwrap())
    }

    #[test]
    fn a_claim_is_bound_only_when_the_volume_controller_says_so() {
        let bound = json!({ "pv.kubernetes.io/bind-completed": "yes" });
        let volume = json!({ "volumeName": "pv-1" });
        assert_eq!(
            binding(json!({ "metadata": { "annotations": bound }, "spec": volume })),
            ClaimBinding::Bound {
                volume: "pv-1".into()
            }
        );
        assert_eq!(
            binding(json!({ "metadata": {}, "spec": volume })),
            ClaimBinding::Unusable
        );
        let unbound = json!({
            "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "a" } },
            "spec": { "storageClassName": "disks" },
        });
        let selected_node = Some(NodeName::parse("a").unwrap());
        assert_eq!(
            binding(unbound),
            ClaimBinding::Unbound {
                class: Some("disks".into()),
                selected_node
            }
        );
        assert_eq!(
            binding(json!({ "metadata": {}, "spec": { "storageClassName": "" } })),
            ClaimBinding::Unbound {
                class: None,
                selected_node: None
            }
        );
        let lost = json!({ "metadata": { "annotations": bound }, "spec": volume, "status": { "phase": "Lost" } });
        assert_eq!(binding(lost), ClaimBinding::Unusable);
    }

    #[test]
    fn zones_of_a_volume_are_read_from_new_and_old_labels() {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": { "name": "pv", "labels": {
                "failure-domain.beta.kubernetes.io/zone": "a__b", "topology.kubernetes.io/region": "north",
            } },
        }))
        .unwrap();
        let StorageObject::Volume(topology) = volume.to_storage_object() else {
            panic!("it is a volume")
        };
        assert_eq!(
            topology.zones[&TopologyLabel::Zone],
            ["a", "b"].map(str::to_owned).into()
        );
        assert_eq!(
            topology.zones[&TopologyLabel::Region],
            ["north".to_owned()].into()
        );
    }
}
