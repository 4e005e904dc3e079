//! Plans for cases whose answer is known.

use super::plan;
use super::question::{NodeTemplate, TemplateHost};
use super::report::{CapacityPlan, GpuSharing, OneMore};
use super::testkit::{nodes, nodes_of, of_class, plugin, pod, policy, question, shared, with_cpu};
use crate::scheduling::kube_filters::requirements::{AntiAffinity, NamespaceScope};
use crate::scheduling::policy::{Policy, Pool};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::scheduling::vocabulary::label_selector::Selector;
use crate::scheduling::vocabulary::node::NodeKind;
use crate::units::{Bytes, MilliCpu};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Who is together on a GPU, by name, each GPU in order.
fn together(plan: &CapacityPlan) -> Vec<Vec<&str>> {
    let gpus = plan.layout.iter().flat_map(|node| &node.gpus);
    gpus.map(|gpu| gpu.pods.iter().map(|pod| &*pod.pod.name).collect()).collect()
}

#[test]
fn two_gpus_hold_a_pod_that_shares_with_none_and_two_that_share() {
    let policy = policy(&[("fraud", Some(&[])), ("credit", None), ("chatbot", None)]);
    let pods = [("fraud", 20), ("credit", 40), ("chatbot", 32)]
        .map(|(name, gib)| of_class(shared(name, gib), name, &policy));
    let plan = plan(&question(policy, pods, [nodes(8, 80)]));
    assert_eq!((plan.gpus, plan.nodes, plan.held, plan.is_optimal), (2, 1, 3, true), "{plan:#?}");
    let groups: BTreeSet<Vec<&str>> = together(&plan).into_iter().collect();
    assert_eq!(groups, BTreeSet::from([vec!["fraud"], vec!["credit", "chatbot"]]));
    let of = |name: &str| {
        let mut gpus = plan.layout.iter().flat_map(|node| &node.gpus);
        gpus.find(|gpu| gpu.pods.iter().any(|pod| &*pod.pod.name == name)).unwrap()
    };
    assert_eq!((of("fraud").sharing, of("credit").sharing), (GpuSharing::ClassAlone, GpuSharing::Shared));
    assert_eq!((of("credit").allocated_percent, of("credit").pods[0].percent), (90, 50));
    // 25 % and 90 %.
    assert_eq!(plan.one_more, Some(OneMore { gpus: 3, idle_percent_now: 43, idle_percent_then: 62 }));
}

#[test]
fn an_exclusive_pod_is_charged_its_whole_gpu() {
    let pods = [pod("alone", 10, 1, Sharing::Exclusive), shared("a", 40), shared("b", 40)];
    let plan = plan(&question(policy(&[]), pods, [nodes(1, 80)]));
    assert_eq!((plan.gpus, plan.nodes, plan.lower_bound.gpus), (2, 2, 2));
    assert_eq!(plan.one_more.unwrap().idle_percent_now, 0);
    let because = plan.lower_bound.because.join("; ");
    assert_eq!(because, "1 GPU asked for exclusively; 80.0 GiB shared need 1 GPU");
}

#[test]
fn a_pod_over_several_gpus_gets_them_on_one_node() {
    let pods = [pod("large", 60, 3, Sharing::Shared), pod("other", 60, 3, Sharing::Shared)];
    let plan = plan(&question(policy(&[]), pods, [nodes(4, 80)]));
    // One node of four and one of three.
    assert_eq!((plan.gpus, plan.nodes, plan.held), (7, 2, 2), "{plan:#?}");
}

#[test]
fn cpu_that_is_given_counts_and_bounds_the_nodes() {
    let kind = |cpu| NodeTemplate { host: TemplateHost::Described { cpu, memory: None }, ..nodes(4, 80) };
    let pods = || ["a", "b", "c"].map(|name| with_cpu(shared(name, 10), 16));
    let free = plan(&question(policy(&[]), pods(), [kind(None)]));
    assert_eq!((free.gpus, free.nodes), (1, 1));
    let short = plan(&question(policy(&[]), pods(), [kind(Some(MilliCpu(20_000)))]));
    assert_eq!(
        (short.nodes, short.lower_bound.nodes, short.held, short.is_optimal),
        (3, 3, 3, true),
        "{short:#?}"
    );
}

#[test]
fn a_later_kind_of_node_is_for_what_the_earlier_ones_cannot_hold() {
    let pods = [shared("large", 120), shared("a", 60), shared("b", 60)];
    let plan = plan(&question(policy(&[]), pods, [nodes(2, 80), nodes(2, 140)]));
    let kinds: Vec<(&str, u32)> = plan.node_kinds.iter().map(|kind| (&*kind.name, kind.gpus)).collect();
    assert_eq!(kinds, [("node", 2), ("node-1", 1)], "{plan:#?}");
}

#[test]
fn a_kind_with_a_count_gives_no_more_and_the_rest_has_no_place() {
    let pods = ["a", "b", "c"].map(|name| shared(name, 60));
    let only = NodeTemplate { at_most: Some(2), ..nodes(1, 80) };
    let plan = plan(&question(policy(&[]), pods, [only]));
    assert_eq!((plan.gpus, plan.held, plan.not_held.len()), (2, 2, 1));
    assert_eq!(plan.not_held[0].reasons[0].code, "insufficient-vram");
}

#[test]
fn a_pod_that_no_gpu_holds_says_what_it_lacks_and_the_others_are_planned() {
    let pods = [shared("huge", 100), shared("small", 10), pod("wide", 10, 3, Sharing::Shared)];
    let plan = plan(&question(policy(&[]), pods, [nodes(2, 80)]));
    assert_eq!((plan.held, plan.gpus), (1, 1));
    let found: Vec<(&str, &str)> =
        plan.not_held.iter().map(|pod| (&*pod.pod.name, &*pod.reasons[0].code)).collect();
    assert_eq!(found, [("huge", "too-large"), ("wide", "too-few-gpus")]);
    let remedy = &plan.not_held[0].reasons[0].remedy;
    assert!(remedy.contains("stowage.dev/gpus: \"2\""), "{remedy}");
    assert!(plan.not_held[1].reasons[0].remedy.contains("gpus=3"));
    assert_eq!(plan.not_held[0].source, "test: Pod default/huge");
}

#[test]
fn a_node_selector_and_a_node_pool_are_obeyed_and_name_the_label_that_is_missing() {
    let mut picky = shared("picky", 10);
    picky.requirements.node_selector = BTreeMap::from([("zone".into(), "a".into())]);
    let asked = question(policy(&[]), [picky.clone()], [nodes(1, 80)]);
    assert!(plan(&asked).not_held[0].reasons[0].remedy.contains("label=zone=a"));
    let kind = NodeTemplate { labels: picky.requirements.node_selector.clone(), ..nodes(1, 80) };
    assert_eq!(plan(&question(policy(&[]), [picky], [kind])).held, 1);

    let with_pools = policy(&[("fraud", None)]);
    let bank = Pool {
        selector: BTreeMap::from([("gpu-pool".into(), "bank".into())]),
        classes: Some(vec!["fraud".into()]),
        ..Pool::named("bank")
    };
    let rest = Pool { classes: Some(vec!["serving".into()]), ..Pool::named("rest") };
    let with_pools = with_pools.with_pools(vec![bank, rest]).unwrap();
    let fraud = of_class(shared("fraud", 10), "fraud", &with_pools);
    let refused = plan(&question(with_pools, [fraud], [nodes(1, 80)]));
    let reason = &refused.not_held[0].reasons[0];
    assert_eq!(reason.code, "class-not-admitted");
    assert!(reason.remedy.contains("label=gpu-pool=bank (pool bank)"), "{}", reason.remedy);
}

#[test]
fn pods_that_repel_each_other_get_nodes_of_their_own() {
    let selector = Selector::of_labels(&BTreeMap::from([("app".into(), "x".into())]));
    let repels = AntiAffinity {
        scope: NamespaceScope::Of(BTreeSet::from(["default".into()])),
        selector,
        topology: "kubernetes.io/hostname".into(),
    };
    let pods = ["a", "b"].map(|name| {
        let mut pod = shared(name, 10);
        pod.requirements.labels = BTreeMap::from([("app".into(), "x".into())]);
        pod.requirements.repels = Arc::new([Arc::new(repels.clone())]);
        pod
    });
    assert_eq!(plan(&question(policy(&[]), pods, [nodes(2, 80)])).nodes, 2);
}

#[test]
fn slices_are_gpus_of_their_own_to_pods_that_ask_for_vram() {
    let pods = ["a", "b", "c"].map(|name| shared(name, 30));
    let kind = nodes_of(2, "A100-80GB", Some("3g.40gb,3g.40gb"));
    let found = plan(&question(policy(&[]), pods, [kind.clone()]));
    assert_eq!((found.gpus, found.nodes, found.lower_bound.gpus), (2, 1, 2), "{found:#?}");
    assert!(found.layout[0].gpus.iter().all(|gpu| gpu.mig.as_deref() == Some("3g.40gb")));
    assert_eq!(found.layout[0].gpus.iter().map(|gpu| gpu.gpu).collect::<Vec<_>>(), [0, 0, 1, 1]);
    let wide = plan(&question(policy(&[]), [pod("wide", 10, 2, Sharing::Shared)], [kind]));
    assert!(wide.not_held[0].reasons[0].remedy.contains("leave --mig out"), "{wide:#?}");
}

#[test]
fn pods_of_a_device_plugin_decide_how_gpus_are_cut() {
    let pods = [
        plugin("a", "nvidia.com/mig-3g.40gb", 1),
        plugin("b", "nvidia.com/mig-3g.40gb", 1),
        plugin("c", "nvidia.com/mig-2g.20gb", 2),
        plugin("d", "nvidia.com/mig-1g.10gb", 1),
        plugin("whole", "nvidia.com/gpu", 1),
    ];
    let found = plan(&question(policy(&[]), pods, [nodes_of(4, "A100-80GB", None)]));
    assert_eq!((found.held, found.gpus, found.nodes, found.lower_bound.gpus), (5, 3, 1, 3), "{found:#?}");
    assert_eq!(found.node_kinds[0].allocator, NodeKind::DevicePlugin);
    assert!(found.is_optimal && found.order.is_none());
}

#[test]
fn four_slices_of_which_three_fit_on_a_gpu_need_two() {
    let pods = ["a", "b", "c", "d"].map(|name| plugin(name, "nvidia.com/mig-2g.20gb", 1));
    let found = plan(&question(policy(&[]), pods.clone(), [nodes_of(1, "A100-80GB", None)]));
    assert_eq!((found.gpus, found.lower_bound.gpus), (2, 2));
    let cut = plan(&question(policy(&[]), pods, [nodes_of(1, "A100-80GB", Some("3g.40gb,3g.40gb"))]));
    assert_eq!((cut.held, &*cut.not_held[0].reasons[0].code), (0, "no-such-device"));
    assert!(cut.not_held[0].reasons[0].remedy.contains("add 2g.20gb to --mig"), "{cut:#?}");
}

#[test]
fn pods_of_both_kinds_get_nodes_of_both_kinds() {
    let pods = [plugin("p", "nvidia.com/gpu", 2), shared("v", 20)];
    let found = plan(&question(policy(&[]), pods, [nodes_of(8, "H100-80GB", None)]));
    let kinds: Vec<(NodeKind, u32, u32)> =
        found.node_kinds.iter().map(|kind| (kind.allocator, kind.nodes, kind.gpus)).collect();
    assert_eq!(kinds, [(NodeKind::Stowage, 1, 1), (NodeKind::DevicePlugin, 1, 2)], "{found:#?}");
    assert_eq!((found.gpus, found.is_optimal), (3, true));
}

#[test]
fn a_device_that_no_node_has_says_what_to_ask_for() {
    let reason = |resource| {
        let asked = question(policy(&[]), [plugin("p", resource, 1)], [nodes_of(1, "L40S", None)]);
        plan(&asked).not_held[0].reasons[0].remedy.clone()
    };
    assert!(reason("nvidia.com/gpu.shared").contains("stowage.dev/vram"));
    assert!(reason("nvidia.com/mig-3g.40gb").contains("A100-80GB"));
}

#[test]
fn without_pods_nothing_is_needed() {
    let found = plan(&question(Policy::default(), [], [nodes(8, 80)]));
    assert_eq!((found.gpus, found.nodes, found.one_more), (0, 0, None));
}

#[test]
fn the_policys_headroom_is_not_handed_out() {
    let pods = ["a", "b"].map(|name| shared(name, 37));
    let found = plan(&question(Policy::default(), pods, [nodes(1, 80)]));
    assert_eq!((found.gpus, found.node_kinds[0].allocatable_bytes), (2, Bytes::gib(72)));
}
