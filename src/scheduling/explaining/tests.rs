//! One obstacle at a time, and its explanation. Whole texts are golden files of the command line.

use super::explanation::{PodStage, PodVerdict};
use super::fleet::Fleet;
use super::obstacle::Obstacle;
use super::remedy::{PreemptionNeeds, RemedyChange};
use super::testkit::{ExplainedCluster, TestPod, name, pod};
use super::{Explanation, PodAccess, ShownNodes, explain, explain_for};
use crate::policy::{Class, Expression, KueueRule, Match, Policy, Pool, Tenant};
use crate::units::{Bytes, Millis};
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::disruption_info::{DisruptionInfo, GroupKey, GroupKind};
use crate::vocabulary::gpu::{Device, GpuSet, Health};
use crate::vocabulary::node_reading::{NodeReading, OverGrant};
use crate::vocabulary::placement::Reservation;
use std::sync::Arc;

fn with_classes(classes: Vec<Class>) -> Policy {
    let all = classes
        .into_iter()
        .chain(Policy::default().classes().to_vec())
        .collect();
    Policy::default().with_classes(all).unwrap()
}

fn changes(explanation: &Explanation) -> Vec<&RemedyChange> {
    explanation
        .remedies
        .iter()
        .map(|remedy| &remedy.change)
        .collect()
}

fn explained(world: &mut ExplainedCluster, pod: &TestPod) -> Explanation {
    world.explained(pod, &ShownNodes::default())
}

#[test]
fn each_class_that_did_not_match_names_its_unmet_condition() {
    let expression = Expression::compile("pod.labels['team'] == 'x'").unwrap();
    let policy = with_classes(vec![
        Class {
            matches: Match {
                namespaces: vec!["chat".into(), "talk".into()],
                ..Match::default()
            },
            ..Class::new("chat")
        },
        Class {
            matches: Match {
                labels: [("app".into(), "web".into())].into(),
                ..Match::default()
            },
            ..Class::new("web")
        },
        Class {
            matches: Match {
                expression: Some(expression),
                ..Match::default()
            },
            ..Class::new("x")
        },
    ]);
    let mut world = ExplainedCluster::new(policy).with_node("a", 1);
    let explanation = explained(&mut world, &pod("p", "1Gi"));
    let told: Vec<(&str, &str, &str)> = explanation.class.passed_over[..3]
        .iter()
        .map(|passed| {
            (
                passed.class.as_str(),
                passed.unmet.wants.as_str(),
                passed.unmet.has.as_str(),
            )
        })
        .collect();
    assert_eq!(told[0], ("chat", "any of chat, talk", "team"));
    assert_eq!(told[1], ("web", "app=web", "no label app"));
    assert_eq!((told[2].0, told[2].1), ("x", "pod.labels['team'] == 'x'"));
    assert!(
        told[2].2.starts_with("it fails on this pod: "),
        "{}",
        told[2].2
    );
    assert_eq!(
        (
            explanation.class.name.as_str(),
            explanation.class.because.len()
        ),
        ("serving", 0)
    );

    // What others are called, and how they are chosen, is for who may see all of them.
    let uid = pod("p", "1Gi").uid();
    let told = explain_for(
        PodAccess::Namespace,
        &mut world.cluster.copy(),
        &uid,
        &ShownNodes::All,
    )
    .unwrap();
    let wants: Vec<&str> = told.class.passed_over[..3]
        .iter()
        .map(|passed| &*passed.unmet.wants)
        .collect();
    assert_eq!(
        wants,
        ["as the policy says", "app=web", "as the policy says"]
    );
}

#[test]
fn the_rule_that_chose_the_class_is_named() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let explanation = explained(
        &mut world,
        &TestPod {
            priority: -5,
            ..pod("p", "1Gi")
        },
    );
    let condition = &explanation.class.because[0];
    assert_eq!(explanation.class.name, "opportunistic");
    assert_eq!(
        (
            condition.field.as_str(),
            condition.wants.as_str(),
            condition.has.as_str()
        ),
        ("priority", "-1 or less", "-5")
    );
}

#[test]
fn a_starting_engine_is_named_with_the_longest_time_its_start_gate_stays_closed() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    world.add_bound(&pod("first", "10Gi"), "a", &[0], true);
    world.advance(Millis::seconds(2));
    world.report("a", &[], &[]);
    let explanation = explained(&mut world, &pod("second", "10Gi"));
    let [
        RemedyChange::WaitForStartGate {
            gpu_candidate,
            by,
            opens_in_millis: Some(opens_in),
        },
    ] = changes(&explanation)[..]
    else {
        panic!("{:?}", explanation.remedies)
    };
    assert_eq!(
        (gpu_candidate.gpus.as_slice(), by.as_slice()),
        (&[0][..], &["team/first".to_owned()][..])
    );
    world.advance(Millis(opens_in.0 - 1));
    assert_eq!(
        explained(&mut world, &pod("second", "10Gi")).verdict,
        PodVerdict::DoesNotFit
    );
    world.advance(Millis(1));
    world.report("a", &[], &[]);
    assert_eq!(
        explained(&mut world, &pod("second", "10Gi")).verdict,
        PodVerdict::Fits
    );
}

#[test]
fn an_assumed_pods_start_gate_has_no_known_opening_time() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let first = pod("first", "10Gi");
    let uid = world.add_waiting(&first);
    world.cluster.ledger_mut().assume(&uid, &name("a")).unwrap();
    let explanation = explained(&mut world, &pod("second", "10Gi"));
    let [
        RemedyChange::WaitForStartGate {
            by,
            opens_in_millis: None,
            ..
        },
    ] = &changes(&explanation)[..]
    else {
        panic!("{:?}", explanation.remedies)
    };
    assert_eq!(*by, ["team/first".to_owned()]);
}

#[test]
fn a_pool_that_does_not_accept_the_class_is_named() {
    let pool = Pool {
        selector: [("pool".into(), "fraud".into())].into(),
        classes: Some(vec!["dedicated".into()]),
        ..Pool::new("fraud")
    };
    let policy = Policy::default().with_pools(vec![pool]).unwrap();
    let mut world = ExplainedCluster::new(policy)
        .with_node("a", 1)
        .with_label("a", "pool", "fraud");
    let explanation = explained(&mut world, &pod("p", "10Gi"));
    let expected = "admit class serving to node pool fraud (nodePools[].classes in the policy): a GPU 0 fits then";
    assert_eq!(explanation.remedies[0].text, expected);
}

#[test]
fn classes_that_do_not_share_are_named_with_the_pods_on_the_gpu() {
    let alone = Class {
        matches: Match {
            namespaces: vec!["fraud".into()],
            ..Match::default()
        },
        shares_with: Some(vec![]),
        engine: false,
        ..Class::new("fraud")
    };
    let fraud = TestPod {
        namespace: "fraud",
        ..pod("f", "10Gi")
    };
    let mut world = ExplainedCluster::new(with_classes(vec![alone]))
        .with_node("a", 1)
        .with_running(&fraud, "a", &[0]);
    let explanation = explained(&mut world, &pod("p", "10Gi"));
    assert_eq!(
        explanation.nodes[0].gpus[0].obstacles,
        [Obstacle::ClassExcluded {
            by: vec!["fraud/f".into()]
        }]
    );
    assert!(
        matches!(changes(&explanation)[0], RemedyChange::Lift { reason, by, .. } if reason == "class-excluded" && by[..] == ["fraud/f"])
    );
}

#[test]
fn a_limit_is_named_with_the_increase_that_would_be_enough() {
    let limit = TenantLimit {
        vram: Some(Bytes::gib(50)),
        milli_gpus: None,
    };
    let tenant = Tenant {
        limit,
        ..Tenant::new("work", &["team"])
    };
    let policy = Policy::default().with_tenants(vec![tenant]).unwrap();
    let mut world = ExplainedCluster::new(policy)
        .with_node("a", 2)
        .with_running(&pod("old", "30Gi"), "a", &[0]);
    let explanation = explained(&mut world, &pod("new", "40Gi"));
    let tenant = explanation.tenant.as_ref().unwrap();
    assert_eq!(tenant.left.vram_bytes, Some(Bytes::gib(20)));
    let raised = changes(&explanation)
        .into_iter()
        .find_map(|change| match change {
            RemedyChange::RaiseLimit { by, .. } => by.vram_bytes,
            _ => None,
        });
    assert_eq!(raised, Some(Bytes::gib(20)));
    assert!(
        explanation.remedies[0].text.starts_with("request 20Gi"),
        "{}",
        explanation.remedies[0].text
    );
}

#[test]
fn an_unhealthy_gpu_is_the_obstacle_to_remove() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    world.devices("a", &[Health::Draining]);
    let explanation = explained(&mut world, &pod("p", "10Gi"));
    assert_eq!(
        explanation.remedies[0].text,
        "a GPU 0 is draining; once healthy, the pod fits"
    );
}

#[test]
fn a_gpu_in_compute_mode_exclusive_process_takes_only_a_pod_that_has_it_exclusively() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let devices = world
        .cluster
        .ledger()
        .node(&name("a"))
        .unwrap()
        .devices
        .clone();
    let devices = devices
        .iter()
        .map(|device| Device {
            exclusive_process: true,
            ..device.clone()
        })
        .collect();
    world
        .cluster
        .ledger_mut()
        .report_devices(&name("a"), devices)
        .unwrap();
    let explanation = explained(&mut world, &pod("p", "10Gi"));
    assert_eq!(
        explanation.nodes[0].misfit.as_ref().unwrap().code,
        "exclusive-process"
    );
    assert_eq!(
        explanation.nodes[0].gpus[0].obstacles,
        [Obstacle::ExclusiveProcess]
    );
    let way_out =
        "set the compute mode of a GPU 0 to default (nvidia-smi -c DEFAULT): a GPU 0 fits then";
    let texts: Vec<&str> = explanation
        .remedies
        .iter()
        .map(|remedy| remedy.text.as_str())
        .collect();
    assert!(texts.contains(&way_out), "{texts:?}");
    let alone = explained(
        &mut world,
        &TestPod {
            exclusive: true,
            ..pod("q", "10Gi")
        },
    );
    assert_eq!(alone.nodes[0].misfit, None);
}

#[test]
fn the_priority_that_would_allow_an_eviction_is_named() {
    let job = TestPod {
        priority: -1,
        ..pod("job", "60Gi")
    };
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_running(&job, "a", &[0]);
    let low = TestPod {
        priority: -5,
        ..pod("p", "60Gi")
    };
    let needs = |explanation: &Explanation| {
        changes(explanation)
            .into_iter()
            .find_map(|change| match change {
                RemedyChange::Preempt { needs, .. } => Some(*needs),
                _ => None,
            })
    };
    assert_eq!(
        needs(&explained(&mut world, &low)),
        Some(PreemptionNeeds::Priority(0))
    );
    let never = TestPod {
        never_preempts: true,
        ..pod("q", "60Gi")
    };
    assert_eq!(
        needs(&explained(&mut world, &never)),
        Some(PreemptionNeeds::PreemptionPolicy)
    );
}

#[test]
fn the_eviction_limit_that_prevents_preemption_is_named() {
    let job = |name: &str| TestPod {
        priority: -1,
        ..pod(name, "60Gi")
    };
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute.cluster = 1;
    let mut world = ExplainedCluster::new(policy)
        .with_node("a", 2)
        .with_running(&job("one"), "a", &[0])
        .with_running(&job("two"), "a", &[1]);
    let high = pod("p", "60Gi");
    assert!(
        explained(&mut world, &high).remedies[0]
            .text
            .contains("could be evicted from a GPU 0 for it: kube-scheduler")
    );
    world
        .cluster
        .ledger_mut()
        .record_evictions(&[job("two").uid()]);
    let text = explained(&mut world, &high).remedies[0].text.clone();
    assert!(
        text.contains("the eviction allowance of this minute is used up: 1 a minute"),
        "{text}"
    );
    assert!(
        text.contains("preemption.evictionsPerMinute.cluster"),
        "{text}"
    );
    world.advance(Millis::seconds(61));
    assert!(
        !explained(&mut world, &high).remedies[0]
            .text
            .contains("used up")
    );
}

#[test]
fn a_pods_own_soft_reservation_is_no_obstacle_for_it() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let uid = world.add_waiting(&pod("p", "60Gi"));
    let node = world.cluster.snapshot().node("a").unwrap().clone();
    world
        .cluster
        .ledger_mut()
        .reserve_softly(&uid, &node.name, &node.uuids(GpuSet::single(0)));
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::default()).unwrap();
    let score = explanation.nodes[0].score.as_ref().unwrap();
    assert!(!score.contended);
    assert_eq!(
        explanation.nodes[0].gpus[0].soft_reserved_bytes,
        Bytes::ZERO
    );
    assert!(matches!(
        changes(&explanation)[..],
        [RemedyChange::NotBound { attempts: 0, .. }]
    ));
}

#[test]
fn a_pod_with_a_reservation_lists_its_remaining_victims() {
    let job = TestPod {
        priority: -1,
        ..pod("job", "60Gi")
    };
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_running(&job, "a", &[0]);
    let uid = world.add_waiting(&pod("p", "60Gi"));
    let devices = world
        .cluster
        .ledger()
        .node(&name("a"))
        .unwrap()
        .devices
        .clone();
    let reservation = Reservation {
        node: name("a"),
        devices: Arc::new([devices[0].uuid.clone()]),
        victims: Arc::new([job.uid()]),
        deadline: world.cluster.ledger().now() + Millis::seconds(60),
    };
    world
        .cluster
        .ledger_mut()
        .reserve(&uid, reservation)
        .unwrap();
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::default()).unwrap();
    assert_eq!(explanation.verdict, PodVerdict::Reserved);
    let PodStage::Reserved {
        victims,
        victims_left: 1,
        ..
    } = &explanation.stage
    else {
        panic!()
    };
    assert_eq!(victims[..], ["team/job".to_owned()]);
    world.cluster.ledger_mut().release(&job.uid());
    world.report("a", &[], &[]);
    assert_eq!(
        explain(&mut world.cluster.copy(), &uid, &ShownNodes::default())
            .unwrap()
            .verdict,
        PodVerdict::Fits
    );
}

#[test]
fn nodes_that_the_scheduler_did_not_ask_about_are_marked() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_node("b", 1);
    let uid = world.add_waiting(&pod("p", "80Gi"));
    let snapshot = world.cluster.snapshot();
    world
        .cluster
        .ledger_mut()
        .record_refusal(&uid, Some(snapshot.node_set([0].into_iter())));
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
    let was_queried: Vec<Option<bool>> = explanation
        .nodes
        .iter()
        .map(|node| node.was_asked)
        .collect();
    assert_eq!(was_queried, [Some(true), Some(false)]);
}

#[test]
fn a_pod_that_an_earlier_leader_may_have_refused_is_one_that_has_not_been_asked_about() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let uid = world.add_waiting(&pod("p", "20Gi"));
    world.cluster.ledger_mut().presume_all_refused();
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
    let PodStage::Waiting {
        refused: Some(refused),
        ..
    } = &explanation.stage
    else {
        panic!()
    };
    assert!(refused.supposed);
    assert!(
        matches!(changes(&explanation)[0], RemedyChange::NotAsked),
        "{:?}",
        changes(&explanation)
    );
    let all = world.cluster.snapshot().node_set([0].into_iter());
    world.cluster.ledger_mut().record_refusal(&uid, Some(all));
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
    assert!(matches!(
        changes(&explanation)[0],
        RemedyChange::Requeued { woken: 0, .. }
    ));
}

#[test]
fn no_remedy_proposes_a_node_that_another_plugin_rules_out() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_node("b", 1)
        .with_running(&pod("r", "60Gi"), "a", &[0]);
    let uid = world.add_waiting(&pod("p", "20Gi"));
    let snapshot = world.cluster.snapshot();
    world
        .cluster
        .ledger_mut()
        .record_refusal(&uid, Some(snapshot.node_set([0].into_iter())));
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::default()).unwrap();
    assert_eq!(explanation.verdict, PodVerdict::Fits);
    assert!(
        matches!(changes(&explanation)[0], RemedyChange::RejectedByOthers { node, nodes: 1 } if node.as_str() == "b")
    );
    let gpu_candidates: Vec<&str> = changes(&explanation)[1..]
        .iter()
        .filter_map(|c| Some(c.entry().1?.node.as_str()))
        .collect();
    assert!(
        !gpu_candidates.is_empty() && gpu_candidates.iter().all(|node| *node == "a"),
        "{gpu_candidates:?}"
    );
}

#[test]
fn many_nodes_are_grouped_and_a_single_node_can_be_requested() {
    let mut world = (0..30).fold(ExplainedCluster::new(Policy::default()), |world, n| {
        world.with_node(&format!("n{n:02}"), 1)
    });
    for n in 0..12 {
        world.add_bound(
            &pod(&format!("big-{n}"), "70Gi"),
            &format!("n{n:02}"),
            &[0],
            false,
        );
    }
    world.add_bound(&pod("less", "60Gi"), "n12", &[0], false);
    let wanted = pod("p", "40Gi");
    let explanation = explained(&mut world, &wanted);
    assert_eq!(
        (explanation.counts.fit, explanation.counts.refused),
        (17, 13)
    );
    assert_eq!(explanation.nodes.len(), 11);
    let [group] = &explanation.groups[..] else {
        panic!("{:?}", explanation.groups)
    };
    // The nearest node to fitting stands for all.
    assert_eq!(
        (group.code.as_str(), group.count, group.example.as_str()),
        ("insufficient-vram", 13, "n12")
    );
    assert_eq!(world.explained(&wanted, &ShownNodes::All).nodes.len(), 30);
    assert_eq!(
        world
            .explained(&wanted, &ShownNodes::Node(name("n29")))
            .nodes
            .len(),
        1
    );
    let unknown = world.explained(&wanted, &ShownNodes::Node(name("x")));
    assert_eq!(
        unknown.nodes[0].misfit.as_ref().unwrap().code,
        "unknown-node"
    );
}

#[test]
fn a_cluster_without_nodes_is_explained() {
    let explanation = explained(
        &mut ExplainedCluster::new(Policy::default()),
        &pod("p", "9Gi"),
    );
    assert_eq!(explanation.verdict, PodVerdict::DoesNotFit);
    assert_eq!(
        explanation.remedies[0].text,
        "add a node with an empty GPU of at least 10.0 GiB (9.0 GiB and 10 % headroom)"
    );
}

#[test]
fn a_device_plugin_pod_is_explained_in_devices() {
    let mut world = ExplainedCluster::new(Policy::default()).with_plugin_node("p", 4);
    let three = TestPod {
        devices: Some("3"),
        ..pod("three", "")
    };
    let uid = world.add_waiting(&three);
    world.cluster.ledger_mut().assume(&uid, &name("p")).unwrap();
    world.cluster.ledger_mut().confirm(&uid, &name("p"), None);
    assert_eq!(
        explain(&mut world.cluster.copy(), &uid, &ShownNodes::default())
            .unwrap()
            .verdict,
        PodVerdict::Bound
    );
    let explanation = explained(
        &mut world,
        &TestPod {
            devices: Some("2"),
            ..pod("two", "")
        },
    );
    assert_eq!(
        explanation.nodes[0]
            .devices
            .map(|devices| (devices.allocatable, devices.left)),
        Some((4, 1))
    );
    let texts: Vec<&str> = explanation
        .remedies
        .iter()
        .map(|remedy| remedy.text.as_str())
        .collect();
    assert_eq!(
        texts[0],
        "request 1 of nvidia.com/gpu instead of 2: p fits then"
    );
    assert!(
        texts[1].starts_with("wait until 1 more of nvidia.com/gpu is free on p"),
        "{texts:?}"
    );
    let one = explained(
        &mut world,
        &TestPod {
            devices: Some("1"),
            ..pod("one", "")
        },
    );
    assert_eq!(one.verdict, PodVerdict::Fits);
    let many = explained(
        &mut world,
        &TestPod {
            devices: Some("9"),
            ..pod("nine", "")
        },
    );
    assert!(
        many.impasse
            .unwrap()
            .text
            .ends_with("no node's device plugin offers 9 of nvidia.com/gpu; p offers most, 4")
    );
}

#[test]
fn the_victims_of_a_kueue_workload_show_what_its_restart_loses() {
    let mut policy = Policy::default();
    policy.preemption.kueue = KueueRule::EvictPods;
    let mut world = ExplainedCluster::new(policy)
        .with_node("a", 1)
        .with_node("b", 1);
    let group = GroupKey {
        namespace: "team".into(),
        kind: GroupKind::KueueWorkload,
        name: "train".into(),
    };
    let job = DisruptionInfo {
        group: Some(group),
        queue_managed: true,
        ..DisruptionInfo::default()
    };
    for (name, on) in [("train-0", "a"), ("train-1", "b")] {
        world.add_bound_with(
            &TestPod {
                priority: -1,
                ..pod(name, "60Gi")
            },
            on,
            &[0],
            job.clone(),
        );
    }
    let explanation = explained(&mut world, &pod("p", "60Gi"));
    let [RemedyChange::Preempt { victims, .. }, ..] = changes(&explanation)[..] else {
        panic!("{explanation:?}")
    };
    let [victim] = &victims[..] else {
        panic!("{victims:?}")
    };
    let group = victim.group.as_ref().unwrap();
    assert_eq!(
        (group.name.as_str(), group.pods),
        ("Kueue Workload team/train", 2)
    );
    assert_eq!(group.cost, 2 * victim.eviction_cost.total(), "both restart");
    let text = &explanation.remedies[0].text;
    assert!(
        text.contains("all 2 pods of its Kueue Workload team/train restart"),
        "{text}"
    );
    assert!(
        text.contains("is not requeued, and replacements wait inside its quota"),
        "{text}"
    );
}

#[test]
fn what_a_pod_uses_beyond_its_grant_is_shown_once_several_reports_agree() {
    let job = pod("job", "10Gi");
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_running(&job, "a", &[0]);
    let beyond = |world: &mut ExplainedCluster| {
        let explanation = explained(world, &pod("p", "60Gi"));
        explanation.nodes[0].gpus[0].occupants[0].over_grant_bytes
    };
    assert_eq!(beyond(&mut world), Bytes::ZERO);
    for _ in 0..3 {
        world.advance(Millis::seconds(1));
        let (granted, used) = (Bytes::gib(10), Bytes::gib(13));
        let over_grant = vec![OverGrant {
            pod: job.uid(),
            granted,
            used,
            ungranted: None,
        }];
        let reading = NodeReading {
            sampled: world.cluster.ledger().now(),
            over_grant,
            ..NodeReading::default()
        };
        world
            .cluster
            .ledger_mut()
            .take_reading(&name("a"), reading.into());
    }
    assert_eq!(beyond(&mut world), Bytes::gib(3));
}

#[test]
fn advice_names_no_node_that_shows_no_gpu() {
    let started = |explanation: &Explanation| {
        changes(explanation)
            .into_iter()
            .find_map(|change| match change {
                RemedyChange::StartAgent { node, nodes, .. } => Some((node.to_string(), *nodes)),
                _ => None,
            })
    };
    let full = || {
        ExplainedCluster::new(Policy::default())
            .with_node("b", 1)
            .with_unreported_node("a-cpu")
            .with_unreported_node("z-cpu")
    };
    let large = pod("p", "100Gi");
    assert_eq!(started(&explained(&mut full(), &large)), None);
    let mut labelled = full().with_unreported_node("g").with_label(
        "g",
        "feature.node.kubernetes.io/pci-10de.present",
        "true",
    );
    assert_eq!(
        started(&explained(&mut labelled, &large)),
        Some(("g".into(), 1))
    );
    let mut denied =
        full()
            .with_unreported_node("g")
            .with_label("g", "nvidia.com/gpu.present", "false");
    assert_eq!(started(&explained(&mut denied, &large)), None);
}

#[test]
fn without_any_known_gpu_the_remedy_is_to_label_gpu_nodes() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_unreported_node("a")
        .with_unreported_node("b");
    let explanation = explained(&mut world, &pod("p", "10Gi"));
    assert!(
        changes(&explanation).contains(&&RemedyChange::LabelGpuNodes),
        "{:?}",
        explanation.remedies
    );
    assert_eq!(
        explanation.impasse, None,
        "no GPU is known, so none is known to be too small"
    );
    let text = &explanation.remedies[0].text;
    assert!(text.contains("nvidia.com/gpu.present=true"), "{text}");
}

#[test]
fn an_impasse_is_reported_beside_the_remedies() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    let large = explained(&mut world, &pod("large", "100Gi"));
    assert!(
        large
            .impasse
            .is_some_and(|impasse| impasse.text.contains("can allocate 72.0 GiB"))
    );
    assert!(
        large
            .remedies
            .iter()
            .all(|remedy| !remedy.text.contains("will not help"))
    );
    let small = explained(&mut world, &pod("small", "10Gi"));
    assert_eq!((small.impasse, small.verdict), (None, PodVerdict::Fits));
}

fn of_others(name: &str, vram: &str) -> TestPod {
    TestPod {
        namespace: "elsewhere",
        priority: -1,
        ..pod(name, vram)
    }
}

/// The explanation as text of JSON, and its remedies' sentences.
fn explained_to(
    reader: PodAccess,
    world: &mut ExplainedCluster,
    asks: &TestPod,
) -> (serde_json::Value, String) {
    let uid = world.add_waiting(asks);
    let told = explain_for(reader, &mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
    let remedies: Vec<&str> = told
        .remedies
        .iter()
        .map(|remedy| remedy.text.as_str())
        .collect();
    (serde_json::to_value(&told).unwrap(), remedies.join("\n"))
}

#[test]
fn victims_that_the_reader_may_not_see_are_one_count_and_one_sum() {
    let own = TestPod {
        priority: -1,
        ..pod("own", "10Gi")
    };
    for (reader, named, others) in [
        (
            PodAccess::All,
            vec!["elsewhere/x", "elsewhere/y", "team/own"],
            None,
        ),
        (PodAccess::Namespace, vec!["team/own"], Some((2, 45))),
        (PodAccess::Own, vec![], Some((3, 55))),
    ] {
        let mut world = ExplainedCluster::new(Policy::default())
            .with_node("a", 1)
            .with_running(&of_others("x", "15Gi"), "a", &[0])
            .with_running(&of_others("y", "30Gi"), "a", &[0])
            .with_running(&own, "a", &[0]);
        let (json, text) = explained_to(reader, &mut world, &pod("p", "72Gi"));
        let change = json["remedies"]
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["change"] == "preempt")
            .unwrap();
        let victims: Vec<&str> = change["victims"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["pod"].as_str().unwrap())
            .collect();
        assert_eq!(victims, named);
        let told = others.map(|(pods, gib)| {
            assert!(
                text.contains(&format!("{pods} pods of others ({gib}.0 GiB)")),
                "{text}"
            );
            serde_json::json!({ "pods": pods, "bytes": (gib as u64) << 30 })
        });
        assert_eq!(change["others"], told.unwrap_or_default());
        assert_eq!(text.matches("opportunistic").count(), named.len(), "{text}");
    }
}

#[test]
fn pods_in_the_way_that_the_reader_may_not_see_are_counted_once() {
    let asks = TestPod {
        gpus: Some(2),
        ..pod("p", "20Gi")
    };
    for (engines, told) in [
        (&[("x", &[0][..]), ("y", &[1])][..], "2 pods of others"),
        (&[("x", &[0, 1])], "1 pod of others"),
        (
            &[("x", &[0, 1]), ("y", &[1]), ("z", &[0])],
            "3 pods of others",
        ),
    ] {
        let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 2);
        for (name, gpus) in engines {
            let engine = TestPod {
                priority: 0,
                gpus: Some(gpus.len() as u32),
                ..of_others(name, "20Gi")
            };
            world.add_bound(&engine, "a", gpus, false);
        }
        world.report("a", &[(0, 95, 0), (1, 95, 0)], &[]);
        let (_, text) = explained_to(PodAccess::Namespace, &mut world, &asks);
        assert!(text.contains(&format!("(the engine of {told})")), "{text}");
    }
    let alone = TestPod {
        exclusive: true,
        ..pod("alone", "20Gi")
    };
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("a", 1)
        .with_running(&of_others("x", "10Gi"), "a", &[0])
        .with_running(&of_others("y", "10Gi"), "a", &[0]);
    let (json, _) = explained_to(PodAccess::Namespace, &mut world, &alone);
    let text = &json["nodes"][0]["gpus"][0]["obstacles"][0]["text"];
    assert_eq!(
        text,
        "the pod requests it exclusively, and 2 pods of others have VRAM on it"
    );
}

#[test]
fn victims_of_a_reservation_that_the_reader_may_not_see_are_counted() {
    let own = TestPod {
        priority: -1,
        ..pod("own", "20Gi")
    };
    let jobs = [of_others("x", "20Gi"), of_others("y", "20Gi"), own];
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 1);
    jobs.iter()
        .for_each(|job| world.add_bound(job, "a", &[0], false));
    let uid = world.add_waiting(&pod("p", "60Gi"));
    let devices = world
        .cluster
        .ledger()
        .node(&name("a"))
        .unwrap()
        .devices
        .clone();
    let reservation = Reservation {
        node: name("a"),
        devices: Arc::new([devices[0].uuid.clone()]),
        victims: jobs.iter().map(TestPod::uid).collect(),
        deadline: world.cluster.ledger().now() + Millis::seconds(60),
    };
    world
        .cluster
        .ledger_mut()
        .reserve(&uid, reservation)
        .unwrap();
    let told = explain_for(
        PodAccess::Namespace,
        &mut world.cluster.copy(),
        &uid,
        &ShownNodes::All,
    )
    .unwrap();
    let text = &told.remedies[0].text;
    assert!(
        text.starts_with(
            "wait: 3 victims on a not terminated yet, of 2 pods of others and team/own;"
        ),
        "{text}"
    );
}

#[test]
fn a_node_without_gpus_is_none_whose_gpus_stowage_allocates() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_unreported_node("cpu")
        .with_node("gpu", 1);
    let asks_plugin = TestPod {
        devices: Some("1"),
        ..pod("p", "0")
    };
    let explanation = explained(&mut world, &asks_plugin);
    let codes: Vec<_> = explanation
        .nodes
        .iter()
        .map(|node| (node.name.as_str(), &*node.misfit.as_ref().unwrap().code))
        .collect();
    assert!(codes.contains(&("cpu", "no-gpus")), "{codes:?}");
    assert!(codes.contains(&("gpu", "stowage-node")), "{codes:?}");
}

#[test]
fn pods_that_may_be_on_any_gpu_are_shown_as_no_more_than_a_gpu_has() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 2);
    // On GPUs that the node does not have.
    for (number, gib) in [(7, "60Gi"), (8, "50Gi"), (9, "40Gi")] {
        world.add_bound(&pod(&format!("r-{number}"), gib), "a", &[number], false);
    }
    let explanation = explained(&mut world, &pod("p", "20Gi"));
    for gpu in &explanation.nodes[0].gpus {
        assert_eq!(gpu.allocated_bytes, gpu.allocatable_bytes);
    }
    let fleet = Fleet::from_ledger(world.cluster.ledger(), 1);
    for gpu in &fleet.nodes[0].gpus {
        assert_eq!(gpu.allocated_bytes, gpu.allocatable_bytes);
    }
    // What is known to be on a GPU is shown, however much it is.
    let mut world = ExplainedCluster::new(Policy::default()).with_node("a", 2);
    for name in ["r", "s"] {
        world.add_bound(&pod(name, "60Gi"), "a", &[0], false);
    }
    let fleet = Fleet::from_ledger(world.cluster.ledger(), 1);
    assert_eq!(fleet.nodes[0].gpus[0].allocated_bytes, Bytes::gib(120));
}
