//! Plans for cases whose answer is known.

use super::bound::lower_bound;
use super::question::{NodeTemplate, PodToPlace, TemplateHost};
use super::report::{CapacityPlan, GpuSharing, OneMore};
use super::testkit::{
    nodes, nodes_with_gpu, plugin_pod, pod, policy, question, shared_pod, with_class, with_cpu,
};
use super::{copies_beside, plan};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::kube_filters::ResourceList;
use stowage_scheduling::kube_filters::requirements::{AntiAffinity, NamespaceScope};
use stowage_scheduling::kube_filters::resources::{ANY_ADDRESS, HostPort};
use stowage_scheduling::policy::{Policy, Pool};
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::vocabulary::classification::Isolation;
use stowage_scheduling::vocabulary::demand::Sharing;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::label_selector::Selector;
use stowage_scheduling::vocabulary::node::NodeKind;

/// The pods that share a GPU, by name, each GPU in order.
fn pods_by_gpu(plan: &CapacityPlan) -> Vec<Vec<&str>> {
    let gpus = plan.layout.iter().flat_map(|node| &node.gpus);
    gpus.map(|gpu| gpu.pods.iter().map(|pod| &*pod.pod.name).collect())
        .collect()
}

#[test]
fn two_gpus_hold_a_pod_that_shares_with_none_and_two_that_share() {
    let policy = policy(&[("fraud", Some(&[])), ("credit", None), ("chatbot", None)]);
    let pods = [("fraud", 20), ("credit", 40), ("chatbot", 32)]
        .map(|(name, gib)| with_class(shared_pod(name, gib), name, &policy));
    let plan = plan(&question(policy, pods, [nodes(8, 80)]));
    assert_eq!(
        (plan.gpus, plan.nodes, plan.held, plan.is_optimal),
        (2, 1, 3, true),
        "{plan:#?}"
    );
    let groups: BTreeSet<Vec<&str>> = pods_by_gpu(&plan).into_iter().collect();
    assert_eq!(
        groups,
        BTreeSet::from([vec!["fraud"], vec!["credit", "chatbot"]])
    );
    let of = |name: &str| {
        let mut gpus = plan.layout.iter().flat_map(|node| &node.gpus);
        gpus.find(|gpu| gpu.pods.iter().any(|pod| &*pod.pod.name == name))
            .unwrap()
    };
    assert_eq!(
        (of("fraud").sharing, of("credit").sharing),
        (GpuSharing::ClassAlone, GpuSharing::Shared)
    );
    assert_eq!(
        (of("credit").allocated_percent, of("credit").pods[0].percent),
        (90, 50)
    );
    // 25 % and 90 %.
    assert_eq!(
        plan.one_more,
        Some(OneMore {
            gpus: 3,
            idle_percent_now: 43,
            idle_percent_then: 62
        })
    );
}

#[test]
fn hypothetical_nodes_keep_the_limits_that_a_class_requires() {
    let mut classes = Policy::default().classes().to_vec();
    for class in &mut classes {
        class.isolation = Isolation::Required;
    }
    let policy = Policy::default().with_classes(classes).unwrap();
    let pods = [("chat", 40), ("code", 30)].map(|(name, gib)| shared_pod(name, gib));
    let plan = plan(&question(policy, pods, [nodes(8, 80)]));
    assert_eq!((plan.gpus, plan.held), (1, 2), "{plan:#?}");
}

#[test]
fn an_exclusive_pod_is_charged_its_whole_gpu() {
    let pods = [
        pod("alone", 10, 1, Sharing::Exclusive),
        shared_pod("a", 40),
        shared_pod("b", 40),
    ];
    let plan = plan(&question(policy(&[]), pods, [nodes(1, 80)]));
    assert_eq!((plan.gpus, plan.nodes, plan.lower_bound.gpus), (2, 2, 2));
    assert_eq!(plan.one_more.unwrap().idle_percent_now, 0);
    let because = plan.lower_bound.because.join("; ");
    assert_eq!(
        because,
        "1 GPU asked for exclusively; 80.0 GiB shared need 1 GPU"
    );
}

#[test]
fn a_pod_over_several_gpus_gets_them_on_one_node() {
    let pods = [
        pod("large", 60, 3, Sharing::Shared),
        pod("other", 60, 3, Sharing::Shared),
    ];
    let plan = plan(&question(policy(&[]), pods, [nodes(4, 80)]));
    // One node of four and one of three.
    assert_eq!((plan.gpus, plan.nodes, plan.held), (7, 2, 2), "{plan:#?}");
}

#[test]
fn cpu_that_is_given_counts_and_bounds_the_nodes() {
    let kind = |cpu| NodeTemplate {
        host: TemplateHost::Described { cpu, memory: None },
        ..nodes(4, 80)
    };
    let pods = || ["a", "b", "c"].map(|name| with_cpu(shared_pod(name, 10), 16));
    let free = plan(&question(policy(&[]), pods(), [kind(None)]));
    assert_eq!((free.gpus, free.nodes), (1, 1));
    let short = plan(&question(
        policy(&[]),
        pods(),
        [kind(Some(MilliCpu(20_000)))],
    ));
    assert_eq!(
        (
            short.nodes,
            short.lower_bound.nodes,
            short.held,
            short.is_optimal
        ),
        (3, 3, 3, true),
        "{short:#?}"
    );
}

#[test]
fn a_later_kind_of_node_is_for_what_the_earlier_ones_cannot_hold() {
    let pods = [
        shared_pod("large", 120),
        shared_pod("a", 60),
        shared_pod("b", 60),
    ];
    let plan = plan(&question(policy(&[]), pods, [nodes(2, 80), nodes(2, 140)]));
    let kinds: Vec<(&str, u32)> = plan
        .node_kinds
        .iter()
        .map(|kind| (&*kind.name, kind.gpus))
        .collect();
    assert_eq!(kinds, [("node", 2), ("node-1", 1)], "{plan:#?}");
}

#[test]
fn a_kind_with_a_count_has_no_more_nodes_and_other_pods_are_not_held() {
    let pods = ["a", "b", "c"].map(|name| shared_pod(name, 60));
    let only = NodeTemplate {
        max_nodes: Some(2),
        ..nodes(1, 80)
    };
    let plan = plan(&question(policy(&[]), pods, [only]));
    assert_eq!((plan.gpus, plan.held, plan.not_held.len()), (2, 2, 1));
    assert_eq!(plan.not_held[0].reasons[0].code, "insufficient-vram");
}

#[test]
fn a_pod_that_no_gpu_holds_says_what_it_lacks_and_the_others_are_planned() {
    let pods = [
        shared_pod("huge", 100),
        shared_pod("small", 10),
        pod("wide", 10, 3, Sharing::Shared),
    ];
    let plan = plan(&question(policy(&[]), pods, [nodes(2, 80)]));
    assert_eq!((plan.held, plan.gpus), (1, 1));
    let found: Vec<(&str, &str)> = plan
        .not_held
        .iter()
        .map(|pod| (&*pod.pod.name, &*pod.reasons[0].code))
        .collect();
    assert_eq!(found, [("huge", "too-large"), ("wide", "too-few-gpus")]);
    let remedy = &plan.not_held[0].reasons[0].remedy;
    assert!(remedy.contains("stowage.dev/gpus: \"2\""), "{remedy}");
    assert!(plan.not_held[1].reasons[0].remedy.contains("gpus=3"));
    assert_eq!(plan.not_held[0].source, "test: Pod default/huge");
}

#[test]
fn a_node_selector_and_a_node_pool_are_obeyed_and_name_the_label_that_is_missing() {
    let mut picky = shared_pod("picky", 10);
    picky.requirements.node_selector = BTreeMap::from([("zone".into(), "a".into())]);
    let asked = question(policy(&[]), [picky.clone()], [nodes(1, 80)]);
    assert!(
        plan(&asked).not_held[0].reasons[0]
            .remedy
            .contains("label=zone=a")
    );
    let kind = NodeTemplate {
        labels: picky.requirements.node_selector.clone(),
        ..nodes(1, 80)
    };
    assert_eq!(plan(&question(policy(&[]), [picky], [kind])).held, 1);

    let with_pools = policy(&[("fraud", None)]);
    let bank = Pool {
        selector: BTreeMap::from([("gpu-pool".into(), "bank".into())]),
        classes: Some(vec!["fraud".into()]),
        ..Pool::new("bank")
    };
    let rest = Pool {
        classes: Some(vec!["serving".into()]),
        ..Pool::new("rest")
    };
    let with_pools = with_pools.with_pools(vec![bank, rest]).unwrap();
    let fraud = with_class(shared_pod("fraud", 10), "fraud", &with_pools);
    let refused = plan(&question(with_pools, [fraud], [nodes(1, 80)]));
    let reason = &refused.not_held[0].reasons[0];
    assert_eq!(reason.code, "class-not-admitted");
    assert!(
        reason.remedy.contains("label=gpu-pool=bank (pool bank)"),
        "{}",
        reason.remedy
    );
}

/// The pod under the label `app`, and repelling pods of that label on its host.
fn repelling(mut pod: PodToPlace, app: &str, repelled: &str) -> PodToPlace {
    let repels = AntiAffinity {
        scope: NamespaceScope::Of(BTreeSet::from(["default".into()])),
        selector: Selector::from_labels(&BTreeMap::from([("app".into(), repelled.into())])),
        topology: "kubernetes.io/hostname".into(),
    };
    pod.requirements.labels = BTreeMap::from([("app".into(), app.into())]);
    pod.requirements.repels = Arc::new([Arc::new(repels)]);
    pod
}

/// The pod with another amount of a resource beside GPUs.
fn with_resource(mut pod: PodToPlace, resource: &str, amount: u64) -> PodToPlace {
    pod.requirements.amounts = ResourceList::from_amounts(&BTreeMap::from([(resource, amount)]));
    pod
}

#[test]
fn pods_of_a_device_plugin_that_cannot_share_a_node_get_nodes_of_their_own() {
    let gpu = |name: &str| plugin_pod(name, "nvidia.com/gpu", 1);
    let repelling = ["a", "b", "c"].map(|name| repelling(gpu(name), "x", "x"));
    let on_port = ["a", "b", "c"].map(|name| {
        let mut pod = gpu(name);
        let port = HostPort {
            ip: ANY_ADDRESS.into(),
            protocol: "TCP".into(),
            port: 8000,
        };
        pod.requirements.ports = vec![port];
        pod
    });
    for pods in [repelling, on_port] {
        let found = plan(&question(
            policy(&[]),
            pods.clone(),
            [nodes_with_gpu(8, "A100-80GB", None)],
        ));
        // Two full nodes, and one GPU of the last.
        assert_eq!(
            (found.held, found.nodes, found.gpus),
            (3, 3, 17),
            "{found:#?}"
        );
        let two = NodeTemplate {
            max_nodes: Some(2),
            ..nodes_with_gpu(8, "A100-80GB", None)
        };
        let found = plan(&question(policy(&[]), pods, [two]));
        assert_eq!(
            (found.held, found.nodes, &*found.not_held[0].reasons[0].code),
            (2, 2, "all-in-use")
        );
    }
}

#[test]
fn another_resource_of_observed_nodes_counts_for_a_device_plugin_and_bounds_them() {
    let allocatable = ResourceList {
        cpu: MilliCpu(96_000),
        ephemeral_storage: Bytes::gib(100),
        ..ResourceList::from_amounts(&BTreeMap::from([("rdma/ib", 1)]))
    };
    let kind = || NodeTemplate {
        plugin_devices: Some(BTreeMap::from([(
            PluginResource::parse("nvidia.com/gpu").unwrap(),
            8,
        )])),
        host: TemplateHost::Observed {
            allocatable: allocatable.clone(),
            pods: 110,
        },
        ..nodes_with_gpu(8, "A100-80GB", None)
    };
    for (resource, amount) in [("rdma/ib", 1), ("ephemeral-storage", 60 << 30)] {
        let pods = ["a", "b", "c"]
            .map(|name| with_resource(plugin_pod(name, "nvidia.com/gpu", 1), resource, amount));
        let found = plan(&question(policy(&[]), pods, [kind()]));
        let numbers = (
            found.held,
            found.nodes,
            found.gpus,
            found.lower_bound.nodes,
            found.is_optimal,
        );
        assert_eq!(numbers, (3, 3, 24, 3, true), "{found:#?}");
    }
}

#[test]
fn of_several_plugin_nodes_the_one_with_the_fewest_gpus_is_not_full() {
    let mut pods = vec![with_cpu(plugin_pod("wide", "nvidia.com/gpu", 3), 32)];
    pods.push(with_cpu(plugin_pod("two", "nvidia.com/gpu", 2), 1));
    pods.extend(
        (0..6).map(|number| with_cpu(plugin_pod(&format!("one-{number}"), "nvidia.com/gpu", 1), 1)),
    );
    let host = TemplateHost::Described {
        cpu: Some(MilliCpu(32_000)),
        memory: None,
    };
    let found = plan(&question(
        policy(&[]),
        pods,
        [NodeTemplate {
            host,
            ..nodes_with_gpu(8, "A100-80GB", None)
        }],
    ));
    assert_eq!(
        (found.held, found.nodes, found.gpus, found.is_optimal),
        (8, 2, 11, true),
        "{found:#?}"
    );
    assert_eq!(
        found
            .layout
            .iter()
            .map(|node| node.gpus.len())
            .collect::<Vec<_>>(),
        [8, 3]
    );
}

#[test]
fn a_pod_keeps_away_from_those_that_it_repels_in_either_order() {
    let mut repelled = shared_pod("repelled", 10);
    repelled.requirements.labels = BTreeMap::from([("app".into(), "y".into())]);
    let picky = repelling(shared_pod("picky", 10), "x", "y");
    for pods in [[picky.clone(), repelled.clone()], [repelled, picky]] {
        let found = plan(&question(policy(&[]), pods, [nodes(4, 80)]));
        assert_eq!((found.held, found.nodes), (2, 2), "{found:#?}");
    }
}

#[test]
fn a_kind_that_needs_fewer_gpus_by_itself_is_named() {
    let pods = || (0..6).map(|number| shared_pod(&format!("p-{number}"), 30));
    let both = plan(&question(policy(&[]), pods(), [nodes(2, 45), nodes(2, 80)]));
    assert_eq!(
        (
            both.gpus,
            both.fewer_alone.map(|alone| (alone.name, alone.gpus))
        ),
        (6, Some(("node-1".into(), 3)))
    );
    let other_way = plan(&question(policy(&[]), pods(), [nodes(2, 80), nodes(2, 45)]));
    assert_eq!((other_way.gpus, other_way.fewer_alone), (3, None));
}

#[test]
fn replicas_of_over_a_third_of_a_gpu_are_bounded_by_their_number() {
    let pods = (0..10).map(|number| shared_pod(&format!("p-{number}"), 30));
    let found = plan(&question(policy(&[]), pods, [nodes(8, 80)]));
    assert_eq!(
        (found.gpus, found.lower_bound.gpus, found.is_optimal),
        (5, 5, true)
    );
}

#[test]
fn pods_that_only_the_largest_slice_holds_are_bounded_by_it() {
    let pods = ["a", "b", "c"].map(|name| shared_pod(name, 30));
    let kind = nodes_with_gpu(8, "A100-80GB", Some("4g.40gb,2g.20gb,1g.10gb"));
    let found = plan(&question(policy(&[]), pods, [kind]));
    assert_eq!((found.gpus, found.lower_bound.gpus), (3, 3), "{found:#?}");
    assert!(
        found
            .lower_bound
            .because
            .join("; ")
            .ends_with("a GPU has 1 slice of 39.2 GiB or more"),
        "{found:#?}"
    );
}

#[test]
fn a_plan_that_holds_no_pod_is_not_called_optimal() {
    let found = plan(&question(
        policy(&[]),
        [shared_pod("huge", 100)],
        [nodes(1, 80)],
    ));
    assert_eq!((found.held, found.gpus, found.is_optimal), (0, 0, false));
}

#[test]
fn pods_that_repel_each_other_get_nodes_of_their_own() {
    let pods = ["a", "b"].map(|name| repelling(shared_pod(name, 10), "x", "x"));
    assert_eq!(plan(&question(policy(&[]), pods, [nodes(2, 80)])).nodes, 2);
}

#[test]
fn slices_are_gpus_of_their_own_to_pods_that_ask_for_vram() {
    let pods = ["a", "b", "c"].map(|name| shared_pod(name, 30));
    let kind = nodes_with_gpu(2, "A100-80GB", Some("3g.40gb,3g.40gb"));
    let found = plan(&question(policy(&[]), pods, [kind.clone()]));
    assert_eq!(
        (found.gpus, found.nodes, found.lower_bound.gpus),
        (2, 1, 2),
        "{found:#?}"
    );
    assert!(
        found.layout[0]
            .gpus
            .iter()
            .all(|gpu| gpu.mig.as_deref() == Some("3g.40gb"))
    );
    assert_eq!(
        found.layout[0]
            .gpus
            .iter()
            .map(|gpu| gpu.gpu)
            .collect::<Vec<_>>(),
        [0, 0, 1, 1]
    );
    let wide = plan(&question(
        policy(&[]),
        [pod("wide", 10, 2, Sharing::Shared)],
        [kind],
    ));
    assert!(
        wide.not_held[0].reasons[0]
            .remedy
            .contains("leave --mig out"),
        "{wide:#?}"
    );
}

#[test]
fn pods_of_a_device_plugin_decide_how_gpus_are_cut() {
    let pods = [
        plugin_pod("a", "nvidia.com/mig-3g.40gb", 1),
        plugin_pod("b", "nvidia.com/mig-3g.40gb", 1),
        plugin_pod("c", "nvidia.com/mig-2g.20gb", 2),
        plugin_pod("d", "nvidia.com/mig-1g.10gb", 1),
        plugin_pod("whole", "nvidia.com/gpu", 1),
    ];
    let found = plan(&question(
        policy(&[]),
        pods,
        [nodes_with_gpu(4, "A100-80GB", None)],
    ));
    assert_eq!(
        (found.held, found.gpus, found.nodes, found.lower_bound.gpus),
        (5, 3, 1, 3),
        "{found:#?}"
    );
    assert_eq!(found.node_kinds[0].allocator, NodeKind::DevicePlugin);
    assert!(found.is_optimal && found.order.is_none());
}

#[test]
fn four_slices_need_two_gpus_that_hold_three_each() {
    let pods = ["a", "b", "c", "d"].map(|name| plugin_pod(name, "nvidia.com/mig-2g.20gb", 1));
    let found = plan(&question(
        policy(&[]),
        pods.clone(),
        [nodes_with_gpu(1, "A100-80GB", None)],
    ));
    assert_eq!((found.gpus, found.lower_bound.gpus), (2, 2));
    let cut = plan(&question(
        policy(&[]),
        pods,
        [nodes_with_gpu(1, "A100-80GB", Some("3g.40gb,3g.40gb"))],
    ));
    assert_eq!(
        (cut.held, &*cut.not_held[0].reasons[0].code),
        (0, "no-such-device")
    );
    assert!(
        cut.not_held[0].reasons[0]
            .remedy
            .contains("add 2g.20gb to --mig"),
        "{cut:#?}"
    );
}

#[test]
fn pods_of_both_kinds_get_nodes_of_both_kinds() {
    let pods = [plugin_pod("p", "nvidia.com/gpu", 2), shared_pod("v", 20)];
    let found = plan(&question(
        policy(&[]),
        pods,
        [nodes_with_gpu(8, "H100-80GB", None)],
    ));
    let kinds: Vec<(NodeKind, u32, u32)> = found
        .node_kinds
        .iter()
        .map(|kind| (kind.allocator, kind.nodes, kind.gpus))
        .collect();
    assert_eq!(
        kinds,
        [(NodeKind::Stowage, 1, 1), (NodeKind::DevicePlugin, 1, 2)],
        "{found:#?}"
    );
    assert_eq!((found.gpus, found.is_optimal), (3, true));
}

#[test]
fn a_device_that_no_node_has_says_what_to_ask_for() {
    let reason = |resource| {
        let asked = question(
            policy(&[]),
            [plugin_pod("p", resource, 1)],
            [nodes_with_gpu(1, "L40S", None)],
        );
        plan(&asked).not_held[0].reasons[0].remedy.clone()
    };
    assert!(reason("nvidia.com/gpu.shared").contains("stowage.dev/vram"));
    assert!(reason("nvidia.com/mig-3g.40gb").contains("A100-80GB"));
}

#[test]
fn a_question_without_pods_needs_no_gpu() {
    let found = plan(&question(Policy::default(), [], [nodes(8, 80)]));
    assert_eq!((found.gpus, found.nodes, found.one_more), (0, 0, None));
}

#[test]
fn the_policys_headroom_is_not_allocated() {
    let pods = ["a", "b"].map(|name| shared_pod(name, 37));
    let found = plan(&question(Policy::default(), pods, [nodes(1, 80)]));
    assert_eq!(
        (found.gpus, found.node_kinds[0].allocatable_bytes),
        (2, Bytes::gib(72))
    );
}

/// Observed nodes of one kind with so many GPUs, each of which a device plugin offers so many times.
fn observed_plugin_nodes(gpus: u32, shares: u32) -> NodeTemplate {
    let resource = PluginResource::parse("nvidia.com/gpu").unwrap();
    NodeTemplate {
        plugin_devices: Some(BTreeMap::from([(resource, gpus * shares)])),
        ..nodes_with_gpu(gpus, "A100-80GB", None)
    }
}

#[test]
fn observed_plugin_nodes_of_several_sizes_are_bounded_by_the_devices_that_pods_ask_for() {
    let bound = |count: usize, each: u32, kinds: &[NodeTemplate]| {
        let name = |number| format!("p-{number}");
        let pods = (0..count).map(|number| plugin_pod(&name(number), "nvidia.com/gpu", each));
        let question = question(policy(&[]), pods.collect::<Vec<_>>(), kinds.to_vec());
        let all: Vec<usize> = (0..count).collect();
        let found = lower_bound(&question, &all);
        (found.gpus, found.nodes)
    };
    let whole = [observed_plugin_nodes(4, 1), observed_plugin_nodes(8, 1)];
    assert_eq!(bound(80, 1, &whole), (80, 10));
    assert_eq!(bound(10, 8, &whole), (80, 10));
    // Shares of a GPU: as many as the kind with the most of them has.
    let shared = [observed_plugin_nodes(4, 4), observed_plugin_nodes(8, 1)];
    assert_eq!(bound(80, 1, &shared), (20, 5));
    // No two of these pods are on one node.
    assert_eq!(bound(6, 5, &whole), (30, 6));
}

#[test]
fn copies_fit_beside_the_pods_and_on_no_exclusive_gpu() {
    let copies = |pods: Vec<PodToPlace>, gpus: u32, gib: u64| {
        let asked = question(policy(&[]), pods, [nodes(2, 80)]);
        copies_beside(&asked, &[gpus], &shared_pod("job", gib))
    };
    assert_eq!(copies(vec![shared_pod("a", 30)], 2, 20), 2 + 4);
    assert_eq!(copies(vec![pod("a", 1, 1, Sharing::Exclusive)], 2, 20), 4);
    assert_eq!(copies(vec![shared_pod("a", 30)], 2, 90), 0);
    assert_eq!(copies(vec![], 0, 20), 0);
    // The pods that are there go first, however many copies would fit without them.
    let full = (0..2).map(|_| shared_pod("a", 80)).collect();
    assert_eq!(copies(full, 2, 1), 0);
}
