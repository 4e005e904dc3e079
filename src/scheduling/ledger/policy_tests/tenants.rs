//! Limits, guarantees, borrowing and turns of tenants.

use super::*;

#[test]
fn one_pod_is_requeued_if_its_tenant_may_take_one_more() {
    let limit = TenantLimit {
        vram: Some(Bytes::gib(30)),
        milli_gpus: None,
    };
    let policy = with_tenant(Tenant {
        limit,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    for pod in ["a", "b", "c"] {
        ledger.add_waiting(pod, of_tenant(&policy, 20, 0));
    }
    ledger.ledger_mut().presume_all_refused();
    ledger.advance(2);
    assert_eq!(apply_plan(ledger.ledger_mut()), [uid("a")]);
}

/// Tenants without a guarantee, each with a class for its pods, in this order.
fn with_borrowers(names: [&str; 2]) -> Policy {
    let mut classes = names
        .map(|name| Class {
            matches: Match {
                namespaces: vec![name.into()],
                ..Match::default()
            },
            ..Class::new(name)
        })
        .to_vec();
    classes.extend(Policy::default().classes().to_vec());
    let tenants = names.map(|name| Tenant::new(name, &[name])).to_vec();
    Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_tenants(tenants)
        .unwrap()
}

fn in_namespace(policy: &Policy, namespace: &str) -> Demand {
    demand(
        policy,
        60,
        PodTraits {
            namespace: namespace.into(),
            ..PodTraits::default()
        },
    )
}

#[test]
fn of_pods_of_one_priority_the_one_whose_tenant_borrows_less_comes_first_whatever_their_classes() {
    let policy = with_borrowers(["red", "blue"]);
    let mut ledger = ledger(policy.clone());
    observe_bound(&mut ledger, "red-0", 0, in_namespace(&policy, "red"), None);
    ledger.add_waiting("red-1", in_namespace(&policy, "red"));
    ledger.add_waiting("blue-1", in_namespace(&policy, "blue"));
    ledger.ledger_mut().presume_all_refused();
    ledger.advance(2);
    assert_eq!(
        apply_plan(ledger.ledger_mut()),
        [uid("blue-1")],
        "one GPU is free, and red has one already"
    );
}

#[test]
fn borrowers_of_one_priority_take_turns_within_a_run() {
    let policy = with_borrowers(["red", "blue"]);
    let mut ledger = LedgerCluster::with_policy_and_nodes(policy.clone(), &[("n", 4)]);
    for n in 0..4 {
        ledger.add_waiting(&format!("red-{n}"), in_namespace(&policy, "red"));
        ledger.add_waiting(&format!("blue-{n}"), in_namespace(&policy, "blue"));
    }
    ledger.ledger_mut().presume_all_refused();
    ledger.advance(2);
    assert_eq!(
        apply_plan(ledger.ledger_mut()),
        ["red-0", "blue-0", "red-1", "blue-1"].map(uid)
    );
}

#[test]
fn a_pod_that_is_not_placed_does_not_use_up_its_tenants_turn() {
    let policy = with_borrowers(["red", "blue"]);
    let mut ledger = LedgerCluster::with_policy_and_nodes(policy.clone(), &[("n", 2)]);
    observe_bound(
        &mut ledger,
        "blue-0",
        0,
        in_namespace(&policy, "blue"),
        None,
    );
    for n in 0..3 {
        ledger.add_waiting(
            &format!("red-{n}"),
            Demand {
                gpus: 2,
                ..in_namespace(&policy, "red")
            },
        );
    }
    ledger.add_waiting("red-3", in_namespace(&policy, "red"));
    ledger.add_waiting("blue-1", in_namespace(&policy, "blue"));
    ledger.ledger_mut().presume_all_refused();
    ledger.advance(2);
    assert_eq!(
        apply_plan(ledger.ledger_mut()),
        [uid("red-3")],
        "one GPU is free, and red has none"
    );
}

#[test]
fn a_pod_beyond_its_tenants_gpu_guarantee_reclaims_nothing() {
    let guarantee = TenantUsage {
        vram: Bytes(u64::MAX),
        milli_gpus: 1000,
    };
    let policy = with_tenant(Tenant {
        guarantee,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    observe_bound(&mut ledger, "borrower", 0, job(&policy, 60), None);
    ledger.add_waiting("half", of_tenant(&policy, 36, 5));
    assert_eq!(
        candidates(ledger.ledger(), "half"),
        1,
        "nothing of the guarantee is used"
    );
    observe_bound(&mut ledger, "own", 1, of_tenant(&policy, 36, 9), None);
    assert_eq!(
        candidates(ledger.ledger(), "half"),
        1,
        "half a GPU and half a GPU"
    );
    observe_bound(&mut ledger, "more", 1, of_tenant(&policy, 10, 9), None);
    assert_eq!(
        candidates(ledger.ledger(), "half"),
        0,
        "it would have more than one GPU"
    );
}

#[test]
fn guaranteed_pods_are_recomputed_after_a_binding_and_not_after_a_reservation() {
    let guarantee = TenantUsage {
        vram: Bytes::gib(50),
        milli_gpus: u64::MAX,
    };
    let policy = with_tenant(Tenant {
        guarantee,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    let tenant = of_tenant(&policy, 40, 0).tenant.unwrap();
    observe_bound(&mut ledger, "own", 0, of_tenant(&policy, 40, 0), None);
    ledger.add_waiting("pod", of_tenant(&policy, 20, 5));
    let status = |ledger: &Ledger| {
        let shares = ledger.tenant_shares(&uid("pod"));
        ledger.quota_status(&uid("own"), ledger.pod_state(&uid("own")).unwrap(), &shares)
    };
    assert_eq!(status(ledger.ledger()), QuotaStatus::Guaranteed);
    reserve(ledger.ledger_mut(), "pod").unwrap();
    assert!(ledger.ledger().knows_guaranteed(tenant));
    observe_bound(&mut ledger, "prior", 1, of_tenant(&policy, 30, 9), None);
    assert!(!ledger.ledger().knows_guaranteed(tenant));
    assert_ne!(
        status(ledger.ledger()),
        QuotaStatus::Guaranteed,
        "no more fits beside the prior one"
    );
}

#[test]
fn an_exclusive_pod_is_not_guaranteed_once_its_gpu_turns_out_larger_than_the_guarantee() {
    let guarantee = TenantUsage {
        vram: Bytes::gib(80),
        milli_gpus: u64::MAX,
    };
    let policy = with_tenant(Tenant {
        guarantee,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    let demand = Demand {
        sharing: Sharing::Exclusive,
        ..of_tenant(&policy, 40, 0)
    };
    observe_bound(&mut ledger, "own", 0, demand, None);
    ledger.add_waiting("pod", of_tenant(&policy, 20, 5));
    let is_guaranteed = |ledger: &Ledger| {
        let shares = ledger.tenant_shares(&uid("pod"));
        let status =
            ledger.quota_status(&uid("own"), ledger.pod_state(&uid("own")).unwrap(), &shares);
        status == QuotaStatus::Guaranteed
    };
    assert!(is_guaranteed(ledger.ledger()));
    let larger = |index| Device {
        total: Bytes::gib(141),
        ..h100("n", index)
    };
    ledger
        .ledger_mut()
        .report_devices(&node("n"), (0..2).map(larger).collect())
        .unwrap();
    assert!(!is_guaranteed(ledger.ledger()));
}

#[test]
fn an_exclusive_pod_reclaims_gpus_only_if_the_guarantee_covers_all_their_vram() {
    let takes_back = |gib| {
        let guarantee = TenantUsage {
            vram: Bytes::gib(gib),
            milli_gpus: u64::MAX,
        };
        let policy = with_tenant(Tenant {
            guarantee,
            ..Tenant::new("red", &["red"])
        });
        let mut ledger = ledger(policy.clone());
        observe_bound(&mut ledger, "borrower", 0, job(&policy, 60), None);
        ledger.add_waiting(
            "whole",
            Demand {
                sharing: Sharing::Exclusive,
                ..of_tenant(&policy, 10, 5)
            },
        );
        candidates(ledger.ledger(), "whole")
    };
    assert_eq!([71, 72].map(takes_back), [0, 1]);
}

/// The pod has a reservation of GPU 0 without victims.

#[test]
fn a_tenant_at_its_limit_preempts_only_its_own_pods() {
    let limit = TenantLimit {
        vram: Some(Bytes::gib(60)),
        milli_gpus: None,
    };
    let policy = with_tenant(Tenant {
        limit,
        ..Tenant::new("red", &["red"])
    });
    let mut ledger = ledger(policy.clone());
    observe_bound(&mut ledger, "own", 0, of_tenant(&policy, 60, -1), None);
    observe_bound(&mut ledger, "foreign", 1, job(&policy, 60), None);
    ledger.add_waiting("urgent", of_tenant(&policy, 60, 5));
    let mut reservation = |victim: &str, gpu: u32| {
        let victims = [uid(victim)].into();
        let devices = [h100("n", gpu).uuid].into();
        let reservation = Reservation {
            node: node("n"),
            devices,
            victims,
            deadline: Moment(u64::MAX),
        };
        ledger
            .ledger_mut()
            .reserve(&uid("urgent"), reservation)
            .is_ok()
    };
    assert_eq!(
        (reservation("foreign", 1), reservation("own", 0)),
        (false, true)
    );
}
