//! What policies change in the ledger, one setting at a time. Random histories are in `scheduling::proptests::tenants`.

mod isolation;
mod tenants;

use super::*;
use crate::ids::{GpuModel, ModelId};
use crate::placing::fit::{Misfit, fit};
use crate::placing::rank::{ScheduleAttempt, shortlist};
use crate::policy::{
    Class, Match, NamespaceSelector, Pool, Preemptibility, StartGate, Tenant, Weights,
};
use crate::testkit::{
    LedgerCluster, apply_plan, demand_of, gpu, gpu_at, h100, node, reclassified, uid,
};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::namespaces::NamespaceObserved;
use crate::verbs::observe::ReadingReported;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::vocabulary::gpu::{Device, GpuSet};
use crate::vocabulary::headroom::Headroom;
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{EngineLoad, Freshness, GpuReading, NodeReading};

fn slice(card: u32, index: u32, profile: &str) -> Device {
    Device {
        uuid: gpu(&format!("MIG-{card}-{index}")),
        model: GpuModel::parse(&format!("NVIDIA-H100-80GB-MIG-{profile}")).unwrap(),
        parent: Some(gpu(&format!("GPU-{card}"))),
        total: Bytes::gib(40),
        ..h100("n", index)
    }
}

/// Node `n` with two GPUs, of which 72 GiB each can be allocated by default.
fn ledger(policy: Policy) -> LedgerCluster {
    LedgerCluster::with_policy_and_nodes(policy, &[("n", 2)])
}

fn demand(policy: &Policy, gib: u64, traits: PodTraits) -> Demand {
    reclassified(
        demand_of(gib << 30, 1, traits.sharing, traits.priority),
        traits,
        policy,
    )
}

fn observe_bound(
    ledger: &mut LedgerCluster,
    pod: &str,
    gpu: u32,
    demand: Demand,
    ran: Option<Millis>,
) {
    ledger.add_running(
        pod,
        ("n", gpu),
        demand,
        ran,
        ObservedDisruptionInfo::default(),
    );
}

fn job(policy: &Policy, gib: u64) -> Demand {
    demand(
        policy,
        gib,
        PodTraits {
            priority: -1,
            ..PodTraits::default()
        },
    )
}

fn candidates(ledger: &Ledger, pod: &str) -> usize {
    ledger
        .candidates_for(&ledger.preemptor(&uid(pod)), [&node("n")])
        .pop()
        .unwrap()
        .potential_victims
        .len()
}

fn with_class(class: Class) -> Policy {
    let mut classes = vec![class];
    classes.extend(Policy::default().classes().to_vec());
    Policy::default().with_classes(classes).unwrap()
}

#[test]
fn a_new_policy_applies_to_all_pods_at_once() {
    let mut ledger = ledger(Policy::default());
    let old = ledger.ledger().policy().clone();
    observe_bound(
        &mut ledger,
        "service",
        0,
        demand(&old, 20, PodTraits::default()),
        None,
    );
    ledger.add_waiting(
        "urgent",
        demand(
            &old,
            70,
            PodTraits {
                priority: 5,
                ..PodTraits::default()
            },
        ),
    );
    assert_eq!(candidates(ledger.ledger(), "urgent"), 0);

    let mut harsh = with_class(Class {
        matches: Match {
            priority: Some(0..=0),
            ..Match::default()
        },
        eviction: Preemptibility::ForHigherPriority,
        ..Class::new("weak")
    });
    harsh.headroom = Headroom::uniform(Percent::new(20).unwrap());
    ledger.ledger_mut().set_policy(harsh);
    assert_eq!(candidates(ledger.ledger(), "urgent"), 1);
    assert_eq!(ledger.free_gib("n"), [44, 64]);
    assert_eq!(ledger.ledger().policy().version, old.version + 1);

    // A pod that was read under the old policy is classified by the new one.
    ledger.add_waiting("late", demand(&old, 1, PodTraits::default()));
    let late = &ledger.ledger().pod_state(&uid("late")).unwrap().demand;
    assert_eq!(ledger.ledger().policy().class(late.class).name, "weak");
}

#[test]
fn a_prepared_policy_applies_to_pods_that_came_meanwhile() {
    let mut ledger = ledger(Policy::default());
    let old = ledger.ledger().policy().clone();
    ledger.add_waiting(
        "known",
        demand(
            &old,
            1,
            PodTraits {
                namespace: "a".into(),
                ..PodTraits::default()
            },
        ),
    );
    ledger.add_waiting(
        "gone",
        demand(
            &old,
            1,
            PodTraits {
                namespace: "a".into(),
                ..PodTraits::default()
            },
        ),
    );
    let new = with_class(Class {
        matches: Match {
            namespaces: vec!["a".into(), "b".into()],
            ..Match::default()
        },
        ..Class::new("ours")
    });
    let prepared = PreparedPolicy::new(ledger.ledger().scratch(), new);
    ledger.ledger_mut().release(&uid("gone"));
    ledger.add_waiting(
        "missed",
        demand(
            &old,
            1,
            PodTraits {
                namespace: "b".into(),
                ..PodTraits::default()
            },
        ),
    );
    ledger.ledger_mut().install_policy(prepared);
    assert!(ledger.ledger().pod_state(&uid("gone")).is_none());
    for pod in ["known", "missed"] {
        let demand = &ledger.ledger().pod_state(&uid(pod)).unwrap().demand;
        assert_eq!(ledger.ledger().policy().class(demand.class).name, "ours");
        assert_eq!(demand.classified_by, 1);
    }
}

#[test]
fn readings_age_on_after_a_label_of_a_namespace_has_changed() {
    let selector = NamespaceSelector {
        match_labels: [("team".into(), "a".into())].into(),
        ..Default::default()
    };
    let policy = with_class(Class {
        matches: Match {
            namespace_selector: Some(selector),
            ..Match::default()
        },
        ..Class::new("own")
    });
    let mut ledger =
        LedgerCluster::with_policy_and_nodes(policy.clone(), &[("n", 2), ("untouched", 2)]);
    let traits = PodTraits {
        namespace: "chat".into(),
        ..PodTraits::default()
    };
    observe_bound(&mut ledger, "one", 0, demand(&policy, 20, traits), None);
    for name in ["n", "untouched"] {
        let reading = NodeReading {
            sampled: ledger.ledger().now(),
            ..NodeReading::default()
        };
        ledger.apply(ReadingReported {
            node: node(name),
            reading: reading.into(),
        });
    }
    let labels = Arc::new([("team".to_owned(), "a".to_owned())].into());
    assert!(
        ledger
            .apply(NamespaceObserved {
                name: "chat".into(),
                labels
            })
            .is_some(),
        "a selector asks for it"
    );
    let mut freshness = |seconds: u64| {
        ledger.advance(seconds);
        ["n", "untouched"].map(|name| ledger.snapshot().node(name).unwrap().freshness)
    };
    assert_eq!(freshness(0), [Freshness::Fresh; 2]);
    assert_eq!(freshness(6), [Freshness::Stale; 2]);
    assert_eq!(freshness(30), [Freshness::Expired; 2]);
}

#[test]
fn a_pod_that_has_not_run_its_minimum_is_left_alone_until_it_has() {
    let policy = with_class(Class {
        matches: Match {
            priority: Some(i32::MIN..=-1),
            ..Match::default()
        },
        eviction: Preemptibility::ForHigherPriority,
        min_runtime: Millis::seconds(600),
        ..Class::new("jobs")
    });
    let mut ledger = ledger(policy.clone());
    observe_bound(
        &mut ledger,
        "young",
        0,
        job(&policy, 60),
        Some(Millis::seconds(599)),
    );
    observe_bound(
        &mut ledger,
        "old",
        1,
        job(&policy, 60),
        Some(Millis::seconds(601)),
    );
    ledger.add_waiting("urgent", demand(&policy, 60, PodTraits::default()));
    assert_eq!(candidates(ledger.ledger(), "urgent"), 1);
    ledger.advance(1);
    assert_eq!(candidates(ledger.ledger(), "urgent"), 2);
}

#[test]
fn drain_time_comes_on_top_of_the_grace_period() {
    let policy = with_class(Class {
        matches: Match {
            priority: Some(i32::MIN..=-1),
            ..Match::default()
        },
        eviction: Preemptibility::ForHigherPriority,
        drain_time: Millis::seconds(45),
        ..Class::new("jobs")
    });
    let mut ledger = ledger(policy.clone());
    observe_bound(&mut ledger, "job", 0, job(&policy, 60), None);
    assert_eq!(
        ledger
            .ledger()
            .potential_victim_on(&uid("job"), &node("n"))
            .unwrap()
            .grace,
        Millis::seconds(75)
    );
}

#[test]
fn the_start_gate_stays_within_its_class_bounds() {
    let gate = |min, max| {
        let bounds = StartGate {
            min: Millis::seconds(min),
            max: Millis::seconds(max),
        };
        let policy = with_class(Class {
            start_gate: bounds,
            ..Class::new("engines")
        });
        let policy = policy
            .clone()
            .with_classes(vec![Class {
                start_gate: bounds,
                ..Class::new("engines")
            }])
            .unwrap();
        let mut ledger = ledger(policy.clone());
        ledger.add_waiting("engine", demand(&policy, 20, PodTraits::default()));
        ledger
            .ledger_mut()
            .assume(&uid("engine"), &node("n"))
            .unwrap();
        ledger
            .ledger()
            .pod_state(&uid("engine"))
            .unwrap()
            .starting
            .unwrap()
            .since(ledger.ledger().now())
    };
    // Twice what 20 GiB need over the network, from disk and to start: 97 s.
    assert_eq!(gate(0, 600).0 / 1000, 97);
    assert_eq!(gate(0, 60), Millis::seconds(60));
    assert_eq!(gate(300, 600), Millis::seconds(300));
}

#[test]
fn a_node_is_in_the_first_pool_that_selects_it_and_takes_that_pools_classes() {
    let labels = |pool: &str| [("pool".to_owned(), pool.to_owned())].into();
    let pool = |name: &str| Pool {
        selector: labels(name),
        ..Pool::new(name)
    };
    let picky = Pool {
        classes: Some(vec!["batch".into()]),
        ..pool("picky")
    };
    let plugin = Pool {
        allocator: NodeKind::DevicePlugin,
        ..pool("plugin")
    };
    let policy = Policy::default().with_pools(vec![picky, plugin]).unwrap();
    let mut ledger = ledger(policy.clone());
    let service = demand(&policy, 20, PodTraits::default());
    let batch = demand(
        &policy,
        20,
        PodTraits {
            priority_class: "stowage-batch".into(),
            ..PodTraits::default()
        },
    );
    let says = |ledger: &mut Ledger, demand: &Demand| {
        fit(ledger.snapshot().node("n").unwrap(), demand).err()
    };
    assert_eq!(
        says(ledger.ledger_mut(), &service),
        None,
        "a node in no pool takes all classes"
    );
    ledger.ledger_mut().set_labels(&node("n"), labels("picky"));
    assert_eq!(
        says(ledger.ledger_mut(), &service),
        Some(Misfit::ClassNotAdmitted)
    );
    assert_eq!(says(ledger.ledger_mut(), &batch), None);
    ledger.ledger_mut().set_labels(&node("n"), labels("plugin"));
    assert_eq!(
        says(ledger.ledger_mut(), &batch),
        Some(Misfit::DevicePluginNode)
    );
    ledger.add_waiting("late", batch);
    assert!(
        ledger
            .ledger_mut()
            .assume(&uid("late"), &node("n"))
            .is_err(),
        "a bind is checked again"
    );
}

#[test]
fn a_node_that_is_not_cut_as_its_pool_expects_takes_nothing_until_it_is() {
    let halves = Pool {
        mig: Some(vec!["3g.40gb".into(), "3g.40gb".into()]),
        ..Pool::new("halves")
    };
    let policy = Policy::default().with_pools(vec![halves]).unwrap();
    let mut ledger = ledger(policy.clone());
    let service = demand(&policy, 20, PodTraits::default());
    let says = |ledger: &mut Ledger| fit(ledger.snapshot().node("n").unwrap(), &service).err();
    assert_eq!(
        says(ledger.ledger_mut()),
        Some(Misfit::MigLayoutMismatch),
        "whole GPUs"
    );
    ledger
        .ledger_mut()
        .report_devices(
            &node("n"),
            [slice(0, 0, "3g.40gb"), slice(0, 1, "1g.10gb")].into(),
        )
        .unwrap();
    assert_eq!(says(ledger.ledger_mut()), Some(Misfit::MigLayoutMismatch));
    ledger
        .ledger_mut()
        .report_devices(
            &node("n"),
            [slice(0, 0, "3g.40gb"), slice(0, 1, "3g.40gb")].into(),
        )
        .unwrap();
    assert_eq!(says(ledger.ledger_mut()), None);
}

#[test]
fn weights_decide_between_a_tight_fit_and_replicas_apart() {
    let order = |weights: Weights| {
        let mut policy = Policy::default();
        policy.scoring.weights = weights;
        let mut ledger = ledger(policy.clone());
        ledger.add_node("m", vec![h100("m", 0), h100("m", 1)]);
        let model = Some(ModelId::parse("llama").unwrap());
        let of_model = |gib| Demand {
            model: model.clone(),
            ..demand(&policy, gib, PodTraits::default())
        };
        observe_bound(&mut ledger, "replica", 0, of_model(30), None);
        let (snapshot, allowance) = (ledger.snapshot(), Default::default());
        let attempt = ScheduleAttempt {
            limit: 2,
            just_failed: None,
            reserved_placement: None,
            policy: &policy,
            allowance,
        };
        let list = shortlist(&snapshot, &of_model(30), ["m", "n"].into_iter(), attempt);
        list.best
            .iter()
            .map(|candidate| snapshot.nodes()[candidate.node_index].name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(order(Weights::default()), ["n", "m"], "the tighter fit");
    assert_eq!(
        order(Weights {
            spread: 10,
            ..Weights::default()
        }),
        ["m", "n"],
        "not beside its replica"
    );
    assert_eq!(
        order(Weights {
            interference: 10,
            ..Weights::default()
        }),
        ["m", "n"],
        "not beside another pod"
    );
}

#[test]
fn readings_are_averaged_over_the_time_that_the_policy_says() {
    let counted_after_a_rise = |smoothing: Millis| {
        let mut policy = Policy::default();
        policy.telemetry.smoothing = smoothing;
        let mut cluster = ledger(policy);
        for kv in [20, 32] {
            cluster.advance(10);
            let gpu = GpuReading {
                uuid: gpu_at("n", 0),
                used: Some(Bytes::ZERO),
                attributed: Vec::new(),
                engine_load: EngineLoad::new(Percent::new(kv), Some(0)),
            };
            let sampled = cluster.ledger().now();
            let reading = NodeReading {
                sampled,
                gpus: vec![gpu],
                ..NodeReading::default()
            };
            cluster
                .ledger_mut()
                .take_reading(&node("n"), reading.into());
        }
        cluster.snapshot().node("n").unwrap().gpus[0]
            .engine_load
            .kv_cache
            .map(Percent::get)
    };
    assert_eq!(
        counted_after_a_rise(Millis::seconds(1000)),
        Some(20),
        "it hardly moves the average"
    );
    assert_eq!(counted_after_a_rise(Millis::seconds(1)), Some(32));
}

fn with_tenant(tenant: Tenant) -> Policy {
    Policy::default().with_tenants(vec![tenant]).unwrap()
}

/// A pod of the tenant's only namespace.
fn of_tenant(policy: &Policy, gib: u64, priority: i32) -> Demand {
    demand(
        policy,
        gib,
        PodTraits {
            namespace: "red".into(),
            priority,
            ..PodTraits::default()
        },
    )
}

fn reserve(ledger: &mut Ledger, pod: &str) -> Result<(), AllocationFailure> {
    let deadline = ledger.now() + Millis::seconds(60);
    let devices = [h100("n", 0).uuid].into();
    ledger.reserve(
        &uid(pod),
        Reservation {
            node: node("n"),
            devices,
            victims: [].into(),
            deadline,
        },
    )
}

#[test]
fn a_reservation_is_used_by_the_rules_of_the_policy_in_force() {
    let taken_under = |policy: Policy| {
        let mut ledger = ledger(Policy::default());
        let old = ledger.ledger().policy().clone();
        ledger.add_waiting("pod", of_tenant(&old, 20, 0));
        reserve(ledger.ledger_mut(), "pod").unwrap();
        ledger.ledger_mut().set_policy(policy);
        let own = ledger
            .ledger()
            .reserved_placement(&uid("pod"))
            .unwrap()
            .1
            .map(drop);
        let assumed = ledger
            .ledger_mut()
            .assume(&uid("pod"), &node("n"))
            .map(drop);
        assert_eq!(own.map_err(AllocationFailure::NoLongerFits), assumed);
        own.err()
    };
    let pool = |pool: Pool| Policy::default().with_pools(vec![pool]).unwrap();
    let limit = |gib| TenantLimit {
        vram: Some(Bytes::gib(gib)),
        milli_gpus: None,
    };
    let limited = |gib| {
        with_tenant(Tenant {
            limit: limit(gib),
            ..Tenant::new("red", &["red"])
        })
    };
    assert_eq!(taken_under(pool(Pool::new("all"))), None);
    let others = Pool {
        classes: Some(vec!["batch".into()]),
        ..Pool::new("others")
    };
    assert_eq!(taken_under(pool(others)), Some(Misfit::ClassNotAdmitted));
    let plugins = Pool {
        allocator: NodeKind::DevicePlugin,
        ..Pool::new("plugins")
    };
    assert_eq!(taken_under(pool(plugins)), Some(Misfit::DevicePluginNode));
    let cut = Pool {
        mig: Some(vec!["3g.40gb".into()]),
        ..Pool::new("cut")
    };
    assert_eq!(taken_under(pool(cut)), Some(Misfit::MigLayoutMismatch));
    assert_eq!(taken_under(limited(20)), None);
    assert_eq!(
        taken_under(limited(19)),
        Some(Misfit::TenantLimitOnNode { left: limit(19) })
    );
}

#[test]
fn a_pod_edited_after_its_reservation_stays_within_its_tenants_limit() {
    let limit = TenantLimit {
        vram: None,
        milli_gpus: Some(500),
    };
    let policy = with_tenant(Tenant {
        limit,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    let shared = of_tenant(&policy, 20, 0);
    ledger.add_waiting("pod", shared.clone());
    reserve(ledger.ledger_mut(), "pod").unwrap();
    ledger.add_waiting(
        "pod",
        Demand {
            sharing: Sharing::Exclusive,
            ..shared
        },
    );
    let refused = AllocationFailure::NoLongerFits(Misfit::TenantLimitOnNode { left: limit });
    assert_eq!(
        ledger.ledger_mut().assume(&uid("pod"), &node("n")),
        Err(refused)
    );
}

#[test]
fn nothing_is_reserved_on_a_node_that_does_not_admit_the_pods_class() {
    let others = Pool {
        classes: Some(vec!["batch".into()]),
        ..Pool::new("others")
    };
    let policy = Policy::default().with_pools(vec![others]).unwrap();
    let mut ledger = ledger(policy.clone());
    ledger.add_waiting("pod", of_tenant(&policy, 20, 0));
    assert_eq!(
        reserve(ledger.ledger_mut(), "pod"),
        Err(AllocationFailure::NoLongerFits(Misfit::ClassNotAdmitted))
    );
}

#[test]
fn nothing_is_reserved_by_evicting_a_pod_that_has_become_protected() {
    let guarantee = TenantUsage {
        vram: Bytes::gib(60),
        milli_gpus: u64::MAX,
    };
    let policy = with_tenant(Tenant {
        guarantee,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    observe_bound(&mut ledger, "borrower", 0, job(&policy, 60), None);
    ledger.add_waiting("urgent", of_tenant(&policy, 40, 5));
    assert_eq!(candidates(ledger.ledger(), "urgent"), 1);
    observe_bound(&mut ledger, "own", 1, of_tenant(&policy, 40, 5), None);
    let deadline = ledger.ledger().now() + Millis::seconds(60);
    let (devices, victims) = ([h100("n", 0).uuid].into(), [uid("borrower")].into());
    let reservation = Reservation {
        node: node("n"),
        devices,
        victims,
        deadline,
    };
    assert_eq!(
        ledger.ledger_mut().reserve(&uid("urgent"), reservation),
        Err(AllocationFailure::VictimProtected)
    );
}

#[test]
fn a_softly_reserved_gpu_is_avoided_by_classes_that_may_not_share_it() {
    let alone = Class {
        matches: Match {
            namespaces: vec!["red".into()],
            ..Match::default()
        },
        engine: false,
        shares_with: Some(vec![]),
        ..Class::new("alone")
    };
    let policy = with_class(alone);
    let mut ledger = ledger(policy.clone());
    ledger.add_waiting("first", of_tenant(&policy, 20, 0));
    let view = ledger.snapshot().node("n").unwrap().clone();
    ledger
        .ledger_mut()
        .reserve_softly(&uid("first"), &view.name, &view.uuids(GpuSet::single(0)));
    let other = demand(
        &policy,
        20,
        PodTraits {
            priority: -1,
            ..PodTraits::default()
        },
    );
    let chosen = fit(ledger.snapshot().node("n").unwrap(), &other).unwrap();
    assert_eq!(chosen, GpuSet::single(1));
}

#[test]
fn a_start_gate_stays_shut_as_long_as_its_class_says_however_soon_the_engine_is_ready() {
    let start_gate = StartGate {
        min: Millis::seconds(30),
        max: Millis::seconds(600),
    };
    let policy = Policy::default()
        .with_classes(vec![Class {
            start_gate,
            ..Class::new("engines")
        }])
        .unwrap();
    let mut ledger = ledger(policy.clone());
    let engine = demand(&policy, 20, PodTraits::default());
    let see = |ledger: &mut LedgerCluster, starting| {
        let devices = Some([h100("n", 0).uuid].into());
        let state = ObservedPhase::Bound {
            node: node("n"),
            devices,
            starting,
            ran: None,
        };
        ledger.observe("engine", engine.clone(), state, None);
        ledger
            .ledger()
            .pod_state(&uid("engine"))
            .unwrap()
            .starting
            .map(|until| until.since(ledger.ledger().now()))
    };
    assert_eq!(
        see(&mut ledger, true).map(|left| left > Millis::seconds(30)),
        Some(true)
    );
    ledger.advance(10);
    assert_eq!(see(&mut ledger, false), Some(Millis::seconds(20)));
    ledger.advance(20);
    assert_eq!(see(&mut ledger, false), None);
}

/// A policy whose engines keep others away for a minute, and a ledger with an engine that has just been assumed on its first GPU.
fn with_an_assumed_engine() -> (LedgerCluster, Demand, Millis) {
    let length = Millis::seconds(60);
    let start_gate = StartGate {
        min: length,
        max: length,
    };
    let policy = Policy::default()
        .with_classes(vec![Class {
            start_gate,
            ..Class::new("engines")
        }])
        .unwrap();
    let mut ledger = ledger(policy.clone());
    let engine = demand(&policy, 20, PodTraits::default());
    ledger.add_waiting("engine", engine.clone());
    ledger
        .ledger_mut()
        .assume(&uid("engine"), &node("n"))
        .unwrap();
    (ledger, engine, length)
}

fn gate_of(ledger: &Ledger) -> Option<Millis> {
    ledger
        .pod_state(&uid("engine"))
        .unwrap()
        .starting
        .map(|until| until.since(ledger.now()))
}

#[test]
fn an_assumed_engine_keeps_others_from_starting_beside_it() {
    let (mut ledger, engine, length) = with_an_assumed_engine();
    ledger.advance(1 + length.0 / 1000);
    assert!(
        gate_of(ledger.ledger()).is_some(),
        "it may begin to start at any moment"
    );
    ledger.ledger_mut().forget(&uid("engine"));
    assert_eq!(gate_of(ledger.ledger()), None);
    assert!(fit(ledger.snapshot().node("n").unwrap(), &engine).is_ok());
}

#[test]
fn a_start_gate_of_length_zero_keeps_no_engine_from_starting() {
    let start_gate = StartGate {
        min: Millis::default(),
        max: Millis::default(),
    };
    let policy = Policy::default()
        .with_classes(vec![Class {
            start_gate,
            ..Class::new("engines")
        }])
        .unwrap();
    let mut ledger = ledger(policy.clone());
    ledger.add_waiting("engine", demand(&policy, 20, PodTraits::default()));
    ledger
        .ledger_mut()
        .assume(&uid("engine"), &node("n"))
        .unwrap();
    assert_eq!(gate_of(ledger.ledger()), None);
}

#[test]
fn an_engine_begins_to_start_when_its_binding_lands() {
    let devices = || Some([h100("n", 0).uuid].into());
    for is_shown in [true, false] {
        for was_given_up in [true, false] {
            let (mut ledger, engine, length) = with_an_assumed_engine();
            ledger.advance(26);
            if was_given_up {
                ledger.ledger_mut().forget(&uid("engine"));
            }
            if is_shown {
                let state = ObservedPhase::Bound {
                    node: node("n"),
                    devices: devices(),
                    starting: true,
                    ran: None,
                };
                ledger.observe("engine", engine, state, None);
            } else {
                ledger
                    .ledger_mut()
                    .confirm(&uid("engine"), &node("n"), devices());
            }
            assert_eq!(
                gate_of(ledger.ledger()),
                Some(length),
                "shown {is_shown}, given up {was_given_up}"
            );
            ledger
                .ledger_mut()
                .confirm(&uid("engine"), &node("n"), devices());
            ledger.advance(59);
            assert_eq!(
                gate_of(ledger.ledger()),
                Some(Millis::seconds(1)),
                "an answer that comes again is no news"
            );
            ledger.advance(1);
            assert_eq!(gate_of(ledger.ledger()), None);
        }
    }
}
