//! The whole output of `stowage explain`: a golden file for each situation. `STOWAGE_BLESS=1` writes them again; read what
//! changed before you commit it.

use super::render::{Paint, text};
use crate::cli::output::Columns;
use std::path::PathBuf;
use std::sync::Arc;
use stowage_scheduling::explaining::testkit::{ExplainedCluster, TestPod, name, pod};
use stowage_scheduling::explaining::{ShownNodes, explain};
use stowage_scheduling::kube_filters::node::{Taint, TaintEffect};
use stowage_scheduling::kube_filters::{FilterNode, Requirements, ResourceList};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting};
use stowage_scheduling::policy::{
    Class, Match, Policy, Pool, Preemptibility, SpareRule, Tenant, UnusedRule, Window,
};
use stowage_scheduling::testkit::lending_policy;
use stowage_scheduling::units::{Bytes, Millis, Percent};
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};
use stowage_scheduling::verbs::observe::{FilterPod, FilterPodObserved, NodeObserved, PodDeleted};
use stowage_scheduling::verbs::wait::Reserve;
use stowage_scheduling::vocabulary::classification::Isolation;
use stowage_scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use stowage_scheduling::vocabulary::disruption_info::{
    DisruptionInfo, ObservedDisruptionInfo, ObservedLoan,
};
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{GpuActivity, SleepState};
use stowage_scheduling::vocabulary::placement::Reservation;

/// Two nodes of two GPUs on which a job and some services run.
fn usual(policy: Policy) -> ExplainedCluster {
    let job = TestPod {
        priority: -10,
        ..pod("fine-tune-1", "56Gi")
    };
    ExplainedCluster::new(policy)
        .with_node("node-a", 2)
        .with_node("node-b", 1)
        .with_running(&job, "node-a", &[0])
        .with_running(&pod("llama-8b", "40Gi"), "node-a", &[1])
        .with_running(&pod("qwen-32b", "66Gi"), "node-b", &[0])
}

/// Agents have reported since the pods came.
fn report(world: &mut ExplainedCluster, busy: &[(usize, u8, u32)]) {
    world.report("node-a", busy, &[("org/llama", ModelTier::Disk)]);
    world.report("node-b", &[], &[]);
    world.advance(Millis(1200));
}

fn check(golden: &str, world: &mut ExplainedCluster, pod: &TestPod) {
    let explanation = world.explained(pod, &ShownNodes::default());
    let text = text(&explanation, Columns(None), Paint::Plain);
    let path = PathBuf::from(env!("CARGO_WORKSPACE_DIR"))
        .join(format!("tests/golden/explain/{golden}.txt"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, committed, "{golden}: STOWAGE_BLESS=1 writes it again");
    let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(widest <= 100, "{golden} is {widest} columns wide");
}

#[test]
fn an_engine_near_its_limit_on_latency_says_what_it_leaves_to_others() {
    let mut classes = Policy::default().classes().to_vec();
    classes
        .iter_mut()
        .filter(|class| class.engine)
        .for_each(|class| class.max_time_per_token = Some(Millis(50)));
    let (engine, new) = (pod("llama-8b", "30Gi"), pod("llama-2", "20Gi"));
    let mut world = ExplainedCluster::new(Policy::default().with_classes(classes).unwrap())
        .with_node("node-a", 1)
        .with_running(&engine, "node-a", &[0]);
    world.report("node-a", &[], &[]);
    world.report_latency("node-a", &engine, 40, 60);
    let activity = GpuActivity::new(Percent::new(38), None);
    world.report_activity("node-a", activity.unwrap());
    world.add_waiting(&new);
    check("latency-limit", &mut world, &new);
}

#[test]
fn a_bound_pod_shows_what_is_granted_in_force_and_used() {
    let mut classes = Policy::default().classes().to_vec();
    classes
        .iter_mut()
        .for_each(|class| class.isolation = Isolation::Preferred);
    let both = TestPod {
        gpus: Some(3),
        ..pod("both", "60Gi")
    };
    let mut world = ExplainedCluster::new(Policy::default().with_classes(classes).unwrap())
        .with_node("node-a", 3)
        .with_running(&both, "node-a", &[0, 1, 2]);
    world.set_keeps_vram_limits("node-a", true);
    world.report("node-a", &[], &[]);
    let limits = [Some(Bytes::gib(20)), Some(Bytes::gib(80)), None];
    world.report_limits("node-a", &both, &limits);
    check("limits", &mut world, &both);
    world.set_keeps_vram_limits("node-a", false);
    world.report_limits("node-a", &both, &[]);
    check("limits-none", &mut world, &both);
}

#[test]
fn it_fits_and_the_scheduler_has_not_asked() {
    let mut world = usual(Policy::default());
    report(&mut world, &[(1, 45, 2)]);
    check(
        "fits",
        &mut world,
        &TestPod {
            model: Some("org/llama"),
            ..pod("llama-2", "16Gi")
        },
    );
}

#[test]
fn it_is_too_large_for_any_gpu_but_not_for_two() {
    let mut world = usual(Policy::default()).with_node("node-c", 2);
    report(&mut world, &[]);
    check("too-large", &mut world, &pod("llama-70b", "130Gi"));
    check("too-large-for-all", &mut world, &pod("llama-405b", "400Gi"));
}

#[test]
fn it_lacks_some_gib_and_a_pod_could_be_evicted() {
    let mut world = usual(Policy::default());
    report(&mut world, &[]);
    let wanted = pod("mistral", "40Gi");
    let uid = world.add_waiting(&wanted);
    let snapshot = world.cluster.snapshot();
    world.cluster.apply(FilterDecided {
        uid: uid.clone(),
        answer: FilterAnswer::Refused {
            queried_nodes: Some(snapshot.node_set(0..1)),
        },
    });
    world.advance(Millis::seconds(3));
    check("short", &mut world, &wanted);
}

#[test]
fn kube_scheduler_refuses_the_nodes_that_fit_best() {
    let mut world = usual(Policy::default()).with_node("node-c", 1);
    report(&mut world, &[]);
    let taint = Taint {
        key: "nvidia.com/gpu".into(),
        value: "present".into(),
        effect: TaintEffect::NoSchedule,
    };
    for (node, taints) in [
        ("node-a", Vec::new()),
        ("node-b", vec![Taint::unschedulable()]),
        ("node-c", vec![taint]),
    ] {
        let machine = FilterNode {
            name: name(node),
            labels: Arc::default(),
            taints: taints.into(),
            allocatable: ResourceList::default(),
            pods: 110,
        };
        world.cluster.apply(NodeObserved {
            machine: Some(machine),
            ..NodeObserved::new(name(node), NodeKind::Stowage)
        });
    }
    for (golden, vram) in [
        ("kube-scheduler-refuses", "40Gi"),
        ("kube-scheduler-and-stowage", "20Gi"),
    ] {
        let wanted = pod("mistral", vram);
        world.cluster.apply(FilterPodObserved {
            uid: wanted.uid(),
            pod: FilterPod::Waiting(Requirements::default()),
        });
        check(golden, &mut world, &wanted);
    }
}

#[test]
fn the_kv_cache_is_full() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("node-a", 1)
        .with_running(&pod("llama-8b", "30Gi"), "node-a", &[0]);
    world.report("node-a", &[(0, 97, 40)], &[]);
    check("kv-cache-full", &mut world, &pod("llama-2", "20Gi"));
}

#[test]
fn another_engine_is_starting() {
    let mut world = ExplainedCluster::new(Policy::default()).with_node("node-a", 1);
    world.add_bound(&pod("llama-8b", "30Gi"), "node-a", &[0], true);
    world.advance(Millis::seconds(5));
    world.report("node-a", &[], &[]);
    check("engine-starting", &mut world, &pod("llama-2", "20Gi"));
}

#[test]
fn a_gpu_that_is_gone_is_told_from_the_one_that_has_its_index_now() {
    let mut world = ExplainedCluster::new(Policy::default())
        .with_node("node-a", 4)
        .with_running(&pod("llama-8b", "40Gi"), "node-a", &[1]);
    world.remove_gpu("node-a", 1);
    check("gpu-gone", &mut world, &pod("mistral", "75Gi"));
}

#[test]
fn its_tenant_has_reached_its_limit() {
    let tenant = Tenant {
        guarantee: TenantUsage {
            vram: Bytes::gib(40),
            milli_gpus: u64::MAX,
        },
        limit: TenantLimit {
            vram: Some(Bytes::gib(170)),
            milli_gpus: None,
        },
        ..Tenant::new("research", &["team"])
    };
    let mut world = usual(Policy::default().with_tenants(vec![tenant]).unwrap());
    report(&mut world, &[]);
    check("tenant-limit", &mut world, &pod("mistral", "12Gi"));
}

#[test]
fn a_window_is_open_by_which_it_has_its_class_and_the_last_free_gpus_are_kept_from_it() {
    let window = |days: &str| -> Window {
        let text = format!(
            r#"{{"days": ["{days}"], "from": "20:00", "to": "06:00", "timeZone": "Europe/Berlin"}}"#
        );
        serde_json::from_str(&text).unwrap()
    };
    let class = |name, when| Class {
        matches: Match {
            namespaces: vec!["team".into()],
            ..Match::default()
        },
        when,
        eviction: Preemptibility::ForHigherPriority,
        engine: false,
        ..Class::new(name)
    };
    let mut classes = vec![
        class("weekend-job", vec![window("sat-sun")]),
        class("night-job", vec![window("mon-fri")]),
    ];
    classes.extend(Policy::default().classes().to_vec());
    let mut policy = Policy::default().with_classes(classes).unwrap();
    let rule = |gpus, model: &str, when| SpareRule {
        gpus,
        model: Some(model.into()),
        pool: None,
        when,
    };
    policy.planning.spare = vec![
        rule(2, "H100", Vec::new()),
        rule(8, "H100", vec![window("sat-sun")]),
    ];
    let policy = policy.with_open_windows([window("mon-fri")].into());
    let mut world = ExplainedCluster::new(policy).with_node("node-a", 2);
    world.report("node-a", &[], &[]);
    check("window-and-spare", &mut world, &pod("job", "20Gi"));
}

#[test]
fn its_class_shares_with_no_pod_there_and_the_pool_accepts_other_classes() {
    let fraud = Class {
        matches: Match {
            namespaces: vec!["fraud".into()],
            ..Match::default()
        },
        shares_with: Some(vec!["fraud".into()]),
        ..Class::new("fraud")
    };
    let classes = std::iter::once(fraud)
        .chain(Policy::default().classes().to_vec())
        .collect();
    let pool = Pool {
        selector: [("gpu-pool".into(), "credit".into())].into(),
        classes: Some(vec!["dedicated".into(), "serving".into()]),
        ..Pool::new("credit")
    };
    let policy = Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_pools(vec![pool])
        .unwrap();
    let mut world = ExplainedCluster::new(policy)
        .with_node("node-a", 1)
        .with_node("node-b", 1)
        .with_label("node-b", "gpu-pool", "credit")
        .with_running(&pod("llama-8b", "30Gi"), "node-a", &[0]);
    world.report("node-a", &[], &[]);
    check(
        "class-and-pool",
        &mut world,
        &TestPod {
            namespace: "fraud",
            ..pod("fraud-2", "20Gi")
        },
    );
}

#[test]
fn it_is_bound() {
    let mut world = usual(Policy::default());
    report(&mut world, &[(1, 45, 2)]);
    check("bound", &mut world, &pod("llama-8b", "40Gi"));
}

#[test]
fn its_reservation_waits_for_victims_that_have_not_left() {
    let mut world = usual(Policy::default());
    report(&mut world, &[]);
    let wanted = pod("mistral", "60Gi");
    let uid = world.add_waiting(&wanted);
    let devices = world
        .cluster
        .ledger()
        .node(&name("node-a"))
        .unwrap()
        .devices
        .clone();
    let hold = Reservation {
        node: name("node-a"),
        devices: Arc::new([devices[0].uuid.clone()]),
        victims: Arc::new([pod("fine-tune-1", "0").uid()]),
        deadline: world.cluster.ledger().now() + Millis::seconds(60),
    };
    world
        .cluster
        .apply(Reserve {
            uid: uid.clone(),
            reservation: hold,
        })
        .unwrap();
    check("holding", &mut world, &wanted);
}

#[test]
fn nodes_are_many_and_some_have_never_reported() {
    let mut world = (0..20).fold(usual(Policy::default()), |world, n| {
        world.with_node(&format!("node-x{n:02}"), 1)
    });
    for n in 0..20 {
        let one = pod(&format!("one-{n}"), "64Gi");
        world.add_bound(&one, &format!("node-x{n:02}"), &[0], false);
        world.report(&format!("node-x{n:02}"), &[], &[]);
    }
    // The second has no GPU.
    world = world
        .with_unreported_node("node-y")
        .with_unreported_node("node-z")
        .with_label("node-y", "nvidia.com/gpu.present", "true");
    report(&mut world, &[]);
    check("many-nodes", &mut world, &pod("mistral", "36Gi"));
}

#[test]
fn colors_are_put_on_where_they_are_wanted() {
    let mut world = usual(Policy::default());
    let uid = world.add_waiting(&pod("mistral", "20Gi"));
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::default()).unwrap();
    assert!(text(&explanation, Columns(None), Paint::Colored).contains("\u{1b}[1m"));
    assert!(!text(&explanation, Columns(None), Paint::Plain).contains('\u{1b}'));
}

/// A node with one GPU, on which an engine sleeps that was granted 60 GiB and uses 4.
fn asleep() -> ExplainedCluster {
    let mut world = ExplainedCluster::new(lending_policy())
        .with_node("node-a", 1)
        .with_running(&pod("llama-8b", "60Gi"), "node-a", &[0]);
    (0..3).for_each(|_| world.report_asleep("node-a", &[("llama-8b", 4)], &["llama-8b"]));
    world
}

fn fine_tune() -> TestPod {
    TestPod {
        priority: -10,
        ..pod("fine-tune-1", "30Gi")
    }
}

/// The same, with a job that borrows.
fn lent_out() -> ExplainedCluster {
    let mut world = asleep();
    bind_fine_tune(&mut world);
    world.report_asleep(
        "node-a",
        &[("llama-8b", 4), ("fine-tune-1", 30)],
        &["llama-8b"],
    );
    world
}

fn bind_fine_tune(world: &mut ExplainedCluster) {
    let uid = world.add_waiting(&fine_tune());
    let asked = BindAsked::for_pod(world.cluster.ledger(), &uid, &name("node-a")).unwrap();
    world.cluster.apply(asked).unwrap();
    let pod_state = world.cluster.ledger().pod_state(&uid).unwrap();
    let devices = pod_state.devices().cloned();
    world.cluster.apply(BindingWritten {
        uid,
        node: name("node-a"),
        devices,
    });
}

/// A pod on node-a shows that.
fn show_loan(world: &mut ExplainedCluster, pod: &TestPod, loan: ObservedLoan) {
    let shown = ObservedDisruptionInfo {
        loan,
        ..ObservedDisruptionInfo::default()
    };
    let state = ObservedPhase::Bound {
        node: name("node-a"),
        devices: None,
        starting: false,
        ran: None,
    };
    world.shows(pod, state, Some(shown));
}

#[test]
fn it_would_borrow_what_a_sleeping_engine_lends() {
    check("lending-fits", &mut asleep(), &fine_tune());
}

#[test]
fn it_may_not_borrow_because_it_could_not_be_evicted_alone() {
    let mut world = asleep();
    let disruption_info = DisruptionInfo {
        queue_managed: true,
        ..DisruptionInfo::default()
    };
    let observed = ObservedDisruptionInfo {
        disruption_info,
        ..ObservedDisruptionInfo::default()
    };
    world.shows(
        &fine_tune(),
        ObservedPhase::Waiting(ObservedWaiting::default()),
        Some(observed),
    );
    check("lending-kept-out", &mut world, &fine_tune());
}

#[test]
fn it_lies_on_lent_vram_and_the_engine_lends() {
    let mut world = lent_out();
    check("lending-borrower", &mut world, &fine_tune());
    check("lending-lender", &mut world, &pod("llama-8b", "60Gi"));
}

/// An awake engine with VRAM limits, of a class that lends what it does not use after two seconds.
fn awake_lender() -> ExplainedCluster {
    let mut policy = lending_policy();
    let classes = policy.classes().iter().map(|class| Class {
        isolation: Isolation::Preferred,
        unused: UnusedRule::Lend,
        ..class.clone()
    });
    policy = policy.clone().with_classes(classes.collect()).unwrap();
    policy.planning.lending.unused_after = Millis::seconds(2);
    let engine = pod("llama-8b", "60Gi");
    let mut world = ExplainedCluster::new(policy)
        .with_node("node-a", 1)
        .with_running(&engine, "node-a", &[0]);
    world.set_keeps_vram_limits("node-a", true);
    let loan = ObservedLoan {
        has_vram_limits: true,
        ..ObservedLoan::default()
    };
    show_loan(&mut world, &engine, loan);
    world
}

#[test]
fn an_awake_engine_that_uses_all_of_its_grant_lends_none_of_it() {
    let mut world = awake_lender();
    for _ in 0..3 {
        world.report_sleep(
            "node-a",
            &[("llama-8b", 59)],
            &[("llama-8b", SleepState::Awake)],
        );
        check("lending-awake-full", &mut world, &pod("llama-8b", "60Gi"));
    }
}

#[test]
fn it_lies_on_vram_that_an_awake_engine_does_not_use() {
    let (mut world, engine) = (awake_lender(), pod("llama-8b", "60Gi"));
    let awake = [("llama-8b", SleepState::Awake)];
    world.report_sleep("node-a", &[("llama-8b", 28)], &awake);
    check("lending-awake-steadies", &mut world, &engine);
    (0..2).for_each(|_| world.report_sleep("node-a", &[("llama-8b", 28)], &awake));
    bind_fine_tune(&mut world);
    world.report_sleep("node-a", &[("llama-8b", 28), ("fine-tune-1", 30)], &awake);
    check("lending-awake-lender", &mut world, &engine);
    check("lending-awake-borrower", &mut world, &fine_tune());
}

#[test]
fn it_waits_for_lent_vram_of_which_too_little_is_left() {
    check(
        "lending-too-little",
        &mut lent_out(),
        &TestPod {
            priority: -10,
            ..pod("fine-tune-2", "40Gi")
        },
    );
}

#[test]
fn an_engine_waits_to_wake_until_its_borrower_is_gone() {
    let mut world = lent_out();
    let loan = ObservedLoan {
        wake_requested: Some("1764".into()),
        ..ObservedLoan::default()
    };
    show_loan(&mut world, &pod("llama-8b", "60Gi"), loan);
    check(
        "lending-waits-to-wake",
        &mut world,
        &pod("llama-8b", "60Gi"),
    );
    world.cluster.apply(PodDeleted(fine_tune().uid()));
    check(
        "lending-waits-for-a-report",
        &mut world,
        &pod("llama-8b", "60Gi"),
    );
}
