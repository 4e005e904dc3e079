//! What changes between the question of the preempt verb and its decision.

use super::*;
use crate::kube_filters::{FilterNode, NodeFootprint, ResourceList};
use crate::ledger::{ObservedWaiting, PODS_LOOKED_AT};
use crate::policy::Policy;
use crate::testkit::{LedgerCluster, demand_of, gpu_at, key, node, uid};
use crate::verbs::observe::{FilterPod, FilterPodObserved, NodeObserved};
use crate::verbs::wait::Reserve;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_budget::DisruptionBudget;
use crate::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
};
use crate::vocabulary::label_selector::Selector;
use crate::vocabulary::node::NodeKind;
use std::sync::Arc;

/// A job of low priority on each of two nodes, a budget that covers both and lets one go, and a pod for each of their places.
fn two_jobs(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("a", 1), ("b", 1)]);
    for (job, on) in [("on-a", "a"), ("on-b", "b")] {
        let demand = demand_of(60 << 30, 1, Sharing::Shared, -10);
        cluster.add_running(
            job,
            (on, 0),
            demand,
            None,
            ObservedDisruptionInfo::default(),
        );
    }
    let namespace = demand_of(1, 1, Sharing::Shared, 0)
        .traits
        .namespace
        .to_string();
    cluster.ledger.set_budget(DisruptionBudget {
        namespace,
        name: "jobs".into(),
        selector: Selector::EVERYTHING,
        allowed: 1,
        unhealthy_may_go: false,
    });
    for preemptor in ["first", "second"] {
        cluster.add_waiting(preemptor, demand_of(50 << 30, 1, Sharing::Shared, 100));
    }
    cluster
}

/// The victims for the second pod on node `b`, chosen on the cluster as it is now.
fn chosen_on_b(cluster: &mut LedgerCluster) -> VictimSet {
    let offered = vec![OfferedNode {
        node: "b".into(),
        victims: vec!["on-b".into()],
        pdb_violations: 0,
    }];
    match preempt(view_of(cluster, "second", offered)) {
        PreemptDecision::Evict { victims, .. } => victims,
        other => panic!("{other:?}"),
    }
}

/// What the decision about a pending pod depends on.
fn view_of(cluster: &mut LedgerCluster, name: &str, offered: Vec<OfferedNode>) -> PreemptView {
    let demand = cluster
        .ledger()
        .pod_state(&uid(name))
        .unwrap()
        .demand
        .clone();
    let (uid, key, waiting) = (uid(name), key(name), ObservedWaiting::default());
    let request = VerbRequest {
        uid,
        key,
        demand,
        waiting,
        disruption: None,
    };
    let asked = PreemptAsked {
        request,
        wants: Requirements::default(),
        offered,
    };
    cluster.apply(asked).unwrap().1
}

fn decide(
    cluster: &mut LedgerCluster,
    victims: &VictimSet,
) -> Result<ReservationMade, NotReserved> {
    let policy = cluster.ledger().policy().version;
    cluster.apply(PreemptDecided {
        uid: uid("second"),
        victims: victims.clone(),
        policy,
    })
}

fn reserve_on_a(cluster: &mut LedgerCluster) {
    let reservation = Reservation {
        node: node("a"),
        devices: [gpu_at("a", 0)].into(),
        victims: [uid("on-a")].into(),
        deadline: cluster.ledger().now() + Millis::seconds(60),
    };
    cluster
        .apply(Reserve {
            uid: uid("first"),
            reservation,
        })
        .unwrap();
}

#[test]
fn victims_whose_budget_another_reservation_has_used_since_are_not_evicted() {
    for is_used in [false, true] {
        let mut cluster = two_jobs(Policy::default());
        let victims = chosen_on_b(&mut cluster);
        assert_eq!(victims.victims, [uid("on-b")]);
        if is_used {
            reserve_on_a(&mut cluster);
        }
        let made = decide(&mut cluster, &victims);
        assert_eq!(made.is_err(), is_used, "{made:?}");
    }
}

#[test]
fn victims_beyond_a_budget_are_evicted_if_the_policy_permits_it() {
    let mut policy = Policy::default();
    policy.preemption.violate_budgets = ViolateBudgets::WhenNothingElse;
    let mut cluster = two_jobs(policy);
    reserve_on_a(&mut cluster);
    let victims = chosen_on_b(&mut cluster);
    assert_eq!(victims.eviction_cost.violations, 1);
    let made = decide(&mut cluster, &victims);
    assert!(made.is_ok(), "{made:?}");
}

/// A member of one group on the first GPU of a node.
fn member(
    cluster: &mut LedgerCluster,
    name: &str,
    on: &str,
    gib: u64,
    leaving: Option<PodDeletion>,
) {
    let group = GroupKey {
        namespace: "default".into(),
        kind: GroupKind::JobSet,
        name: "jobs".into(),
    };
    let disruption_info = DisruptionInfo {
        group: Some(group),
        ..DisruptionInfo::default()
    };
    let shown = ObservedDisruptionInfo {
        disruption_info,
        leaving,
        ..ObservedDisruptionInfo::default()
    };
    cluster.add_running(
        name,
        (on, 0),
        demand_of(gib << 30, 1, Sharing::Shared, -10),
        None,
        shown,
    );
}

#[test]
fn a_group_leaves_if_all_its_members_that_stay_are_on_the_node() {
    let leaving = PodDeletion {
        asked_ago: Millis::default(),
        grace: Millis::seconds(30),
    };
    for (third, leaves) in [
        (None, true),
        (Some(Some(leaving)), true),
        (Some(None), false),
    ] {
        let mut cluster =
            LedgerCluster::with_policy_and_nodes(Policy::default(), &[("a", 1), ("b", 1)]);
        member(&mut cluster, "one", "a", 30, None);
        member(&mut cluster, "two", "a", 30, None);
        if let Some(leaving) = third {
            member(&mut cluster, "three", "b", 30, leaving);
        }
        cluster.add_waiting("asks", demand_of(30 << 30, 1, Sharing::Shared, 100));
        let offered = OfferedNode {
            node: "a".into(),
            victims: vec!["one".into()],
            pdb_violations: 0,
        };
        let decision = preempt(view_of(&mut cluster, "asks", vec![offered]));
        let victims = match &decision {
            PreemptDecision::Evict { victims, .. } => &*victims.victims,
            _ => &[],
        };
        let expected: &[PodUid] = if leaves {
            &[uid("one"), uid("two")]
        } else {
            &[]
        };
        assert_eq!(victims, expected, "{third:?}: {decision:?}");
    }
}

/// kube-scheduler knows no groups: its victims may be a part of one.
#[test]
fn a_group_of_which_kube_scheduler_evicts_a_part_costs_all_its_members() {
    for (allowed, leaves) in [(2, true), (1, false)] {
        let mut cluster = LedgerCluster::with_policy_and_nodes(Policy::default(), &[("a", 1)]);
        member(&mut cluster, "one", "a", 30, None);
        member(&mut cluster, "two", "a", 30, None);
        let namespace = demand_of(1, 1, Sharing::Shared, 0)
            .traits
            .namespace
            .to_string();
        let (name, selector) = ("jobs".into(), Selector::EVERYTHING);
        cluster.ledger.set_budget(DisruptionBudget {
            namespace,
            name,
            selector,
            allowed,
            unhealthy_may_go: false,
        });
        cluster.add_waiting("asks", demand_of(30 << 30, 1, Sharing::Shared, 100));
        let offered = OfferedNode {
            node: "a".into(),
            victims: vec!["one".into()],
            pdb_violations: 0,
        };
        let decision = preempt(view_of(&mut cluster, "asks", vec![offered]));
        let victims = match &decision {
            PreemptDecision::Evict { victims, .. } => {
                Some((victims.victims.clone(), victims.eviction_cost.victims))
            }
            _ => None,
        };
        let expected = leaves.then(|| (vec![uid("one"), uid("two")], 2));
        assert_eq!(victims, expected, "{allowed} may leave: {decision:?}");
    }
}

/// How many pods the decision looks at where each of the nodes that are offered has one job.
fn examinations_of(
    cluster: &mut LedgerCluster,
    nodes: &[String],
    expected: impl Fn(&PreemptDecision) -> bool,
) -> usize {
    cluster.add_waiting("asks", demand_of(50 << 30, 1, Sharing::Shared, 100));
    let offer = |node: &String| OfferedNode {
        node: node.clone(),
        victims: vec![format!("on-{node}")],
        pdb_violations: 0,
    };
    let view = view_of(cluster, "asks", nodes.iter().map(offer).collect());
    PODS_LOOKED_AT.set(0);
    let decision = preempt(view);
    assert!(expected(&decision), "{decision:?}");
    PODS_LOOKED_AT.get()
}

/// Nodes of one GPU.
fn nodes(count: usize) -> (LedgerCluster, Vec<String>) {
    let names: Vec<String> = (0..count).map(|n| format!("n-{n:02}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 1)).collect();
    (
        LedgerCluster::with_policy_and_nodes(Policy::default(), &gpus),
        names,
    )
}

/// Members of one group on all nodes: it is looked at once, and not once for each node.
#[test]
fn state_shared_by_the_offered_nodes_is_read_once() {
    let looks = |count: usize| {
        let (mut cluster, names) = nodes(count);
        names
            .iter()
            .for_each(|name| member(&mut cluster, &format!("on-{name}"), name, 60, None));
        // Members on other nodes keep the group.
        examinations_of(&mut cluster, &names, |decision| {
            *decision == PreemptDecision::NoCandidate
        })
    };
    let (few, many) = (looks(8), looks(64));
    assert!(
        few >= 8 && many <= few * 10,
        "{many} pods are looked at for 64 nodes, and {few} for 8"
    );
}

#[test]
fn a_node_whose_cost_bound_is_too_high_is_not_examined() {
    let looks = |count: usize| {
        let (mut cluster, names) = nodes(count);
        for (n, name) in names.iter().enumerate() {
            let priority = if n == 3 { -20 } else { -10 };
            let demand = demand_of(60 << 30, 1, Sharing::Shared, priority);
            let (job, shown) = (format!("on-{name}"), ObservedDisruptionInfo::default());
            cluster.add_running(&job, (name, 0), demand, None, shown);
        }
        examinations_of(
            &mut cluster,
            &names,
            |decision| matches!(decision, PreemptDecision::Evict { victims, .. } if victims.victims == [uid("on-n-03")]),
        )
    };
    let (few, many) = (looks(8), looks(64));
    assert!(few > 0 && few == many, "{few} {many}");
}

/// One node with a free GPU and a busy one, and with one adapter, which `holder` has; a cheaper job is beside it.
fn with_one_adapter(free_gpus: u32) -> (LedgerCluster, Requirements) {
    let mut cluster =
        LedgerCluster::with_policy_and_nodes(Policy::default(), &[("a", 1 + free_gpus)]);
    let adapter = |n: u64| ResourceList::from_amounts(&[("example.com/rdma", n)].into());
    let (labels, taints) = (Arc::default(), Arc::new([]));
    let machine = FilterNode {
        name: node("a"),
        labels,
        taints,
        allocatable: adapter(1),
        pods: 110,
    };
    cluster.apply(NodeObserved {
        machine: Some(machine),
        ..NodeObserved::new(node("a"), NodeKind::Stowage)
    });
    for (job, priority, adapters) in [("cheap", -20, 0), ("holder", -10, 1)] {
        let demand = demand_of(36 << 30, 1, Sharing::Shared, priority);
        cluster.add_running(
            job,
            ("a", 0),
            demand,
            None,
            ObservedDisruptionInfo::default(),
        );
        let Requirements { repels, .. } = Requirements::default();
        let (amounts, ports, claims_devices) = (adapter(adapters), Arc::default(), false);
        let footprint = NodeFootprint {
            node: node("a"),
            amounts,
            ports,
            repels,
            volumes: 0,
            claims_devices,
        };
        let pod = FilterPod::Bound {
            footprint,
            successor: None,
        };
        cluster.apply(FilterPodObserved { uid: uid(job), pod });
    }
    cluster.add_waiting("asks", demand_of(30 << 30, 1, Sharing::Shared, 100));
    (
        cluster,
        Requirements {
            amounts: adapter(1),
            ..Requirements::default()
        },
    )
}

#[test]
fn victims_proposed_for_another_resource_than_vram_are_evicted() {
    for free_gpus in [0, 1] {
        let (mut cluster, wants) = with_one_adapter(free_gpus);
        let offered = OfferedNode {
            node: "a".into(),
            victims: vec!["holder".into()],
            pdb_violations: 0,
        };
        let view = PreemptView {
            requirements: wants,
            ..view_of(&mut cluster, "asks", vec![offered])
        };
        match preempt(view) {
            PreemptDecision::Evict { victims, .. } => assert_eq!(victims.victims, [uid("holder")]),
            other => panic!("{free_gpus} free GPUs: {other:?}"),
        }
    }
}
