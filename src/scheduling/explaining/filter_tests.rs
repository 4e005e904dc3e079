//! What kube-scheduler's own filters say of a node, beside what Stowage says.

use super::explanation::PodVerdict;
use super::remedy::{PreemptionNeeds, Remedy, RemedyChange};
use super::testkit::{ExplainedCluster, TestPod, name, pod};
use super::{Explanation, ShownNodes, explain};
use crate::kube_filters::node::{Taint, TaintEffect};
use crate::kube_filters::resources::{ANY_ADDRESS, AmountsByResource, CPU, HostPort};
use crate::kube_filters::volumes::{ClaimBinding, VolumeClaim};
use crate::kube_filters::{FilterNode, NodeFootprint, Requirements, ResourceList, StorageObject};
use crate::ledger::{ObservedPhase, ObservedWaiting, SchedulingGate};
use crate::policy::Policy;
use crate::verbs::observe::{FilterPod, FilterPodObserved, NodeObserved, StorageObserved};
use crate::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo,
};
use crate::vocabulary::node::NodeKind;
use std::sync::Arc;

fn cpu(amount: u64) -> ResourceList {
    ResourceList::from_amounts(&AmountsByResource::from([(CPU, amount)]))
}

fn machine(node: &str) -> FilterNode {
    FilterNode {
        name: name(node),
        labels: Arc::new([("zone".into(), node.into())].into()),
        taints: [].into(),
        allocatable: cpu(8000),
        pods: 110,
    }
}

fn tainted(node: &str) -> FilterNode {
    let taint = Taint {
        key: "example.com/reserved".into(),
        value: String::new(),
        effect: TaintEffect::NoSchedule,
    };
    FilterNode {
        taints: [taint].into(),
        ..machine(node)
    }
}

fn set_machine(world: &mut ExplainedCluster, machine: FilterNode) {
    world.cluster.apply(NodeObserved {
        labels: machine.labels.clone(),
        machine: Some(machine.clone()),
        ..NodeObserved::new(machine.name, NodeKind::Stowage)
    });
}

/// Nodes of one GPU each, as kube-scheduler sees them.
fn world(machines: &[FilterNode]) -> ExplainedCluster {
    let mut world = machines.iter().fold(
        ExplainedCluster::new(Policy::default()),
        |world, machine| world.with_node(machine.name.as_str(), 1),
    );
    machines
        .iter()
        .for_each(|machine| set_machine(&mut world, machine.clone()));
    world
}

fn bind(
    world: &mut ExplainedCluster,
    pod: &TestPod,
    node: &str,
    amounts: ResourceList,
    ports: &[HostPort],
) {
    world.add_bound(pod, node, &[0], false);
    world.report(node, &[], &[]);
    let footprint = NodeFootprint {
        node: name(node),
        amounts,
        ports: ports.into(),
        repels: [].into(),
        volumes: 0,
        claims_devices: false,
    };
    world.cluster.apply(FilterPodObserved {
        uid: pod.uid(),
        pod: FilterPod::Bound {
            footprint,
            successor: None,
        },
    });
}

fn explained(world: &mut ExplainedCluster, pod: &TestPod, wants: Requirements) -> Explanation {
    let uid = world.add_waiting(pod);
    world.cluster.apply(FilterPodObserved {
        uid: uid.clone(),
        pod: FilterPod::Waiting(wants),
    });
    explain(&mut world.cluster.copy(), &uid, &ShownNodes::default()).unwrap()
}

fn remedies(explanation: &Explanation) -> String {
    let texts = explanation.remedies.iter().map(|remedy| &*remedy.text);
    texts.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_pod_does_not_fit_on_a_node_that_kube_scheduler_refuses_and_the_filter_is_named() {
    let port = |port| HostPort {
        ip: ANY_ADDRESS.into(),
        protocol: "TCP".into(),
        port,
    };
    let selecting = Requirements {
        node_selector: [("zone".into(), "b".into())].into(),
        ..Requirements::default()
    };
    let asking = Requirements {
        amounts: cpu(9000),
        ..Requirements::default()
    };
    let listening = Requirements {
        ports: vec![port(8000)],
        ..Requirements::default()
    };
    let cases = [
        ("tainted", tainted("a"), Requirements::default()),
        ("not-selected", machine("a"), selecting),
        ("insufficient-allocatable", machine("a"), asking),
        ("host-port-in-use", machine("a"), listening),
        (
            "too-many-pods",
            FilterNode {
                pods: 0,
                ..machine("a")
            },
            Requirements::default(),
        ),
    ];
    for (code, machine, wants) in cases {
        let mut world = world(&[machine]);
        if code == "host-port-in-use" {
            bind(&mut world, &pod("r", "1Gi"), "a", cpu(0), &[port(8000)]);
        }
        let explanation = explained(&mut world, &pod("p", "20Gi"), wants);
        assert_eq!(explanation.verdict, PodVerdict::DoesNotFit, "{code}");
        assert_eq!(
            (explanation.counts.fit, explanation.counts.refused),
            (0, 1),
            "{code}"
        );
        let [node] = &explanation.nodes[..] else {
            panic!("{code}")
        };
        assert_eq!((&node.score, &node.misfit), (&None, &None), "{code}");
        assert_eq!(node.kube_scheduler.as_ref().unwrap().code, code);
        assert!(
            explanation.remedies[0]
                .text
                .contains("kube-scheduler refuses"),
            "{code}: {}",
            remedies(&explanation)
        );
    }
}

#[test]
fn only_nodes_that_pass_both_are_ranked_and_advised() {
    // By Stowage alone the tainted nodes are the best.
    let mut world = world(&[tainted("a"), machine("b"), tainted("c")]);
    bind(&mut world, &pod("r", "40Gi"), "b", cpu(0), &[]);
    let fits = explained(&mut world, &pod("p", "20Gi"), Requirements::default());
    let ranks: Vec<_> = fits
        .nodes
        .iter()
        .map(|node| {
            (
                node.name.as_str(),
                node.score.as_ref().map(|score| score.rank),
            )
        })
        .collect();
    assert_eq!(ranks, [("b", Some(1)), ("a", None), ("c", None)]);
    assert_eq!((fits.verdict, fits.counts.fit), (PodVerdict::Fits, 1));

    let too_large = explained(&mut world, &pod("p", "60Gi"), Requirements::default());
    let candidates = too_large
        .remedies
        .iter()
        .filter_map(|remedy| Some(remedy.change.entry().1?.node.as_str()));
    let candidates: Vec<_> = candidates.collect();
    assert!(
        !candidates.is_empty() && candidates.iter().all(|node| *node == "b"),
        "{}",
        remedies(&too_large)
    );
}

#[test]
fn an_eviction_is_advised_where_it_frees_what_kube_scheduler_lacks_too() {
    let job = TestPod {
        priority: -10,
        cpu: Some("6"),
        ..pod("job", "70Gi")
    };
    let asking = |amount| Requirements {
        amounts: cpu(amount),
        ..Requirements::default()
    };
    let mut world = world(&[machine("a")]);
    bind(&mut world, &job, "a", cpu(6000), &[]);
    let advised = |world: &mut ExplainedCluster, wants| {
        let told = explained(world, &pod("p", "60Gi"), wants);
        let is_advised = |change: &RemedyChange| {
            let needs_nothing = PreemptionNeeds::Nothing;
            matches!(change, RemedyChange::Preempt { needs, .. } if *needs == needs_nothing)
        };
        told.remedies
            .iter()
            .any(|remedy| is_advised(&remedy.change))
    };
    assert!(advised(&mut world, asking(4000)));
    // More than the job leaves: two of the node's CPUs are another pod's.
    let other = TestPod {
        priority: 10,
        ..pod("other", "1Gi")
    };
    bind(&mut world, &other, "a", cpu(2000), &[]);
    assert!(!advised(&mut world, asking(7000)));
}

#[test]
fn an_eviction_is_advised_where_only_kube_scheduler_lacks_something() {
    let job = TestPod {
        priority: -10,
        cpu: Some("6"),
        ..pod("job", "1Gi")
    };
    let mut world = world(&[machine("a")]);
    bind(&mut world, &job, "a", cpu(6000), &[]);
    let wants = Requirements {
        amounts: cpu(4000),
        ..Requirements::default()
    };
    let told = explained(&mut world, &pod("p", "20Gi"), wants);
    let evicts = |remedy: &Remedy| matches!(remedy.change, RemedyChange::Preempt { .. });
    assert!(told.remedies.iter().any(evicts), "{}", remedies(&told));
}

#[test]
fn what_pods_on_their_way_take_is_not_there_for_another() {
    let asking = |amount| Requirements {
        amounts: cpu(amount),
        ..Requirements::default()
    };
    let mut world = world(&[machine("a")]);
    explained(&mut world, &pod("first", "20Gi"), asking(6000));
    let fits = explained(&mut world, &pod("p", "20Gi"), asking(4000));
    assert_eq!(fits.verdict, PodVerdict::Fits);
    let first = pod("first", "20Gi").uid();
    world
        .cluster
        .ledger_mut()
        .assume(&first, &name("a"))
        .unwrap();
    let told = explained(&mut world, &pod("p", "20Gi"), asking(4000));
    assert_eq!(told.verdict, PodVerdict::DoesNotFit);
    let reason = told.nodes[0].kube_scheduler.as_ref().unwrap();
    assert_eq!(reason.code, "insufficient-free");
    // It is there already, as far as it is concerned.
    let copy = &mut world.cluster.copy();
    let assumed = explain(copy, &first, &ShownNodes::default()).unwrap();
    assert_eq!(assumed.nodes[0].kube_scheduler, None);
    assert_eq!(assumed.unsupported, []);
}

/// Explains the first of so many pods behind the planner's gate, of a group that says its size.
fn group_member_explained(world: &mut ExplainedCluster, pods: u32, size: u32) -> Explanation {
    member_explained(world, pods, size, |name| pod(name, "60Gi"))
}

fn member_explained(
    world: &mut ExplainedCluster,
    pods: u32,
    size: u32,
    member: impl Fn(&str) -> TestPod,
) -> Explanation {
    let group = GroupKey {
        namespace: "team".into(),
        kind: GroupKind::Stowage,
        name: "train".into(),
    };
    let disruption_info = DisruptionInfo {
        group: Some(group),
        group_size: Some(size),
        ..DisruptionInfo::default()
    };
    for number in 0..pods {
        let gated = ObservedWaiting {
            gate: SchedulingGate::Planned,
            ..ObservedWaiting::default()
        };
        let observed = ObservedDisruptionInfo {
            disruption_info: disruption_info.clone(),
            ..ObservedDisruptionInfo::default()
        };
        let member = member(&format!("train-{number}"));
        world.shows(&member, ObservedPhase::Waiting(gated), Some(observed));
        world.cluster.apply(FilterPodObserved {
            uid: member.uid(),
            pod: FilterPod::Waiting(Requirements::default()),
        });
    }
    let first = pod("train-0", "60Gi").uid();
    explain(&mut world.cluster.copy(), &first, &ShownNodes::default()).unwrap()
}

#[test]
fn a_pod_whose_group_cannot_be_placed_says_why_as_its_event_does() {
    let world = |gpus| {
        let mut world = ExplainedCluster::new(Policy::default()).with_node("a", gpus);
        set_machine(&mut world, machine("a"));
        world
    };
    let cases = [
        (2, 3, 3, "2 of the group's 3 pods can be placed"),
        (4, 2, 3, "2 of the group's 3 pods exist"),
        (1, 1, 8, "1 of the group's 8 pods exist"),
    ];
    for (gpus, pods, size, why) in cases {
        let explanation = group_member_explained(&mut world(gpus), pods, size);
        let told = serde_json::to_string(&explanation).unwrap();
        assert!(told.contains(why), "{told}");
        assert_eq!(explanation.verdict, PodVerdict::DoesNotFit, "{why}");
        assert_eq!(explanation.counts.fit, 1, "it alone fits");
        assert!(explanation.remedies.is_empty(), "{why}");
    }
    let placed = group_member_explained(&mut world(3), 3, 3);
    assert_eq!(placed.verdict, PodVerdict::Fits);
}

/// The planner removes the gate of such a pod, whatever its group.
#[test]
fn a_reason_of_a_pod_that_is_planned_by_itself_is_none_of_its_group() {
    let mut world = ExplainedCluster::new(Policy::default()).with_plugin_node("a", 4);
    set_machine(&mut world, machine("a"));
    let of_plugin = |name: &str| TestPod {
        devices: Some("1"),
        ..pod(name, "0")
    };
    let told = member_explained(&mut world, 2, 2, of_plugin);
    assert_eq!(told.group, None);
}

#[test]
fn a_claim_that_does_not_exist_keeps_the_pod_from_all_nodes_and_is_named() {
    let wants = |claims: &[&str]| Requirements {
        namespace: "team".into(),
        claims: claims.iter().map(|claim| Arc::from(*claim)).collect(),
        ..Requirements::default()
    };
    let mut world = world(&[machine("a"), machine("b")]);
    // Of claims nothing is known: they are not watched, or not in the dump.
    let unknown = explained(&mut world, &pod("p", "20Gi"), wants(&["cache"]));
    assert_eq!(unknown.verdict, PodVerdict::Fits);
    assert_eq!(unknown.unsupported[0].rule, "volume-unknown");
    let claim = VolumeClaim {
        binding: ClaimBinding::Unusable,
        of_one_pod: false,
    };
    world.cluster.apply(StorageObserved {
        name: "team/models".into(),
        object: StorageObject::Claim(claim),
    });
    for (claims, missing) in [(&["cache"][..], "cache"), (&["models", "gone"], "gone")] {
        let told = explained(&mut world, &pod("p", "20Gi"), wants(claims));
        assert_eq!((told.verdict, told.counts.fit), (PodVerdict::DoesNotFit, 0));
        let text = format!("the persistent volume claim {missing} of the pod does not exist");
        assert!(remedies(&told).contains(&text), "{}", remedies(&told));
    }
    let there = explained(&mut world, &pod("p", "20Gi"), wants(&["models"]));
    assert_eq!(
        there.verdict,
        PodVerdict::Fits,
        "whether it will be bound is unknown"
    );
}
