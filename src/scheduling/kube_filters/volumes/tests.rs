//! What claims and their volumes ask of a node, and what is not supported.

use crate::kube_filters::requirements::{NodeFootprint, Requirements};
use crate::kube_filters::volumes::*;
use crate::kube_filters::{
    AssumedNodeChange, ClusterFilters, FilterReason, FilterVerdict, ResourceList,
};
use crate::testkit::{node, uid};
use crate::vocabulary::label_selector::Requirement;

const ZONE: &str = "topology.kubernetes.io/zone";

/// Nodes `east` and `west`, in zones of their names, and `bare`, without labels.
fn filters() -> ClusterFilters {
    let mut filters = ClusterFilters::default();
    for name in ["east", "west", "bare"] {
        let labels = if name == "bare" {
            Default::default()
        } else {
            [(ZONE.to_owned(), name.to_owned())].into()
        };
        filters.set_node(FilterNode {
            name: node(name),
            labels: Arc::new(labels),
            taints: Arc::default(),
            allocatable: ResourceList::default(),
            pods: 110,
        });
    }
    filters
}

fn term(label: &str, value: &str) -> NodeTerm {
    NodeTerm {
        labels: vec![Requirement::equals(label, value)],
        name: Vec::new(),
    }
}

fn claim(filters: &mut ClusterFilters, binding: ClaimBinding) {
    filters.set_storage(
        "team/data".into(),
        StorageObject::Claim(VolumeClaim {
            binding,
            of_one_pod: false,
        }),
    );
}

fn bound(filters: &mut ClusterFilters, topology: VolumeTopology) {
    claim(
        filters,
        ClaimBinding::Bound {
            volume: "pv".into(),
        },
    );
    filters.set_storage("pv".into(), StorageObject::Volume(topology));
}

fn unbound(filters: &mut ClusterFilters, class: StorageClass, selected_node: Option<NodeName>) {
    claim(
        filters,
        ClaimBinding::Unbound {
            class: Some("disks".into()),
            selected_node,
        },
    );
    filters.set_storage("disks".into(), StorageObject::Class(class));
}

const WAITS: StorageClass = StorageClass {
    waits: true,
    provisions: true,
    topologies: None,
};

/// `+` accepts, `-` refuses because of a volume, and otherwise what is not supported; for east, west and bare.
fn verdicts(filters: &ClusterFilters) -> [String; 3] {
    let wants = Requirements {
        namespace: "team".into(),
        claims: ["data".into()].into(),
        ..Requirements::default()
    };
    let query = filters.query(None, &wants);
    ["east", "west", "bare"].map(|name| {
        match query.verdict(&node(name), &AssumedNodeChange::default()) {
            FilterVerdict::Accepts => "+".into(),
            FilterVerdict::Rejects(FilterReason::VolumeElsewhere) => "-".into(),
            FilterVerdict::Rejects(other) => panic!("{other}"),
            FilterVerdict::Unsupported(rule) => rule.code().to_owned(),
        }
    })
}

#[test]
fn a_bound_claim_goes_where_its_volume_is() {
    let mut filters = filters();
    bound(&mut filters, VolumeTopology::default());
    assert_eq!(verdicts(&filters), ["+", "+", "+"]);
    bound(
        &mut filters,
        VolumeTopology {
            terms: Some(vec![term(ZONE, "west")]),
            ..VolumeTopology::default()
        },
    );
    assert_eq!(verdicts(&filters), ["-", "+", "-"]);
    let zones = BTreeMap::from([(
        TopologyLabel::Zone,
        ["east", "north"].map(str::to_owned).into(),
    )]);
    bound(
        &mut filters,
        VolumeTopology {
            zones,
            ..VolumeTopology::default()
        },
    );
    assert_eq!(
        verdicts(&filters),
        ["+", "-", "+"],
        "a node in no zone is kept out by none"
    );
}

#[test]
fn an_unbound_claim_goes_where_its_class_provisions() {
    let mut filters = filters();
    unbound(&mut filters, WAITS, None);
    assert_eq!(verdicts(&filters), ["+", "+", "+"]);
    let in_east = StorageClass {
        topologies: Some(vec![term(ZONE, "east")]),
        ..WAITS
    };
    unbound(&mut filters, in_east, None);
    assert_eq!(verdicts(&filters), ["+", "-", "-"]);
    unbound(&mut filters, WAITS, Some(node("bare")));
    assert_eq!(
        verdicts(&filters),
        ["-", "-", "+"],
        "its volume is being made for that node"
    );
}

#[test]
fn what_is_not_supported_is_named() {
    let mut filters = filters();
    assert_eq!(
        verdicts(&filters),
        ["volume-unknown"; 3],
        "the claim was not shown"
    );
    claim(
        &mut filters,
        ClaimBinding::Bound {
            volume: "pv".into(),
        },
    );
    assert_eq!(
        verdicts(&filters),
        ["volume-unknown"; 3],
        "its volume was not shown"
    );
    claim(
        &mut filters,
        ClaimBinding::Unbound {
            class: Some("disks".into()),
            selected_node: None,
        },
    );
    assert_eq!(
        verdicts(&filters),
        ["volume-unknown"; 3],
        "its class was not shown"
    );
    unbound(
        &mut filters,
        StorageClass {
            waits: false,
            ..WAITS
        },
        None,
    );
    assert_eq!(verdicts(&filters), ["volume-unbound"; 3]);
    unbound(
        &mut filters,
        StorageClass {
            provisions: false,
            ..WAITS
        },
        None,
    );
    assert_eq!(verdicts(&filters), ["volume-not-provisioned"; 3]);
    claim(
        &mut filters,
        ClaimBinding::Unbound {
            class: None,
            selected_node: None,
        },
    );
    assert_eq!(verdicts(&filters), ["volume-unbound"; 3]);
    claim(&mut filters, ClaimBinding::Unusable);
    assert_eq!(verdicts(&filters), ["volume-unbound"; 3]);
    bound(
        &mut filters,
        VolumeTopology {
            unreadable: true,
            ..VolumeTopology::default()
        },
    );
    assert_eq!(verdicts(&filters), ["unreadable"; 3]);
    bound(
        &mut filters,
        VolumeTopology {
            terms: Some(vec![term(ZONE, "west")]),
            ..VolumeTopology::default()
        },
    );
    let binding = ClaimBinding::Bound {
        volume: "pv".into(),
    };
    filters.set_storage(
        "team/data".into(),
        StorageObject::Claim(VolumeClaim {
            binding,
            of_one_pod: true,
        }),
    );
    assert_eq!(
        verdicts(&filters),
        ["-", "read-write-once-pod", "-"],
        "a refusal is certain all the same"
    );
}

#[test]
fn a_node_with_many_volumes_may_attach_no_more() {
    let mut filters = filters();
    bound(&mut filters, VolumeTopology::default());
    let footprint = |volumes| NodeFootprint {
        node: node("east"),
        amounts: ResourceList::default(),
        ports: Arc::default(),
        repels: Arc::default(),
        volumes,
        claims_devices: false,
    };
    filters.set_pod(uid("other"), footprint(7));
    assert_eq!(verdicts(&filters), ["+", "+", "+"]);
    filters.set_pod(uid("other"), footprint(8));
    assert_eq!(verdicts(&filters), ["attach-limit", "+", "+"]);
    let wants = Requirements {
        namespace: "team".into(),
        claims: ["data".into()].into(),
        ..Requirements::default()
    };
    let leaving = [uid("other")];
    let verdict = filters.query(None, &wants).verdict(
        &node("east"),
        &AssumedNodeChange {
            leaving: &leaving,
            coming: &[],
        },
    );
    assert_eq!(verdict, FilterVerdict::Accepts);
}

#[test]
fn what_is_gone_is_not_known_any_more_and_a_loaded_view_answers_the_same() {
    let mut filters = filters();
    bound(
        &mut filters,
        VolumeTopology {
            terms: Some(vec![term(ZONE, "west")]),
            ..VolumeTopology::default()
        },
    );
    let stored = serde_json::to_string(&filters.snapshot().export()).unwrap();
    let loaded = ClusterFilters::from_state(serde_json::from_str(&stored).unwrap());
    assert_eq!(verdicts(&loaded), ["-", "+", "-"]);
    filters.remove_storage(StorageKind::Volume, "pv");
    assert_eq!(verdicts(&filters), ["volume-unknown"; 3]);
    assert_eq!(&*filters.storage_names(StorageKind::Claim)[0], "team/data");
}

#[test]
fn a_change_while_a_plan_reads_copies_a_small_part_of_many_claims() {
    let mut filters = filters();
    for number in 0..2000 {
        let binding = ClaimBinding::Bound {
            volume: format!("pv-{number}").into(),
        };
        let object = StorageObject::Claim(VolumeClaim {
            binding,
            of_one_pod: false,
        });
        filters.set_storage(format!("team/data-{number}").into(), object);
    }
    let before = filters.snapshot();
    filters.remove_storage(StorageKind::Claim, "team/data-7");
    let after = filters.snapshot();
    let shards = before.volumes.claims.0.iter().zip(&after.volumes.claims.0);
    assert_eq!(
        shards
            .filter(|(before, after)| !Arc::ptr_eq(before, after))
            .count(),
        1
    );
    assert_eq!(before.volumes.names(StorageKind::Claim).len(), 2000);
    assert_eq!(after.volumes.names(StorageKind::Claim).len(), 1999);
}
