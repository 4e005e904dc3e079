//! GPUs that become known, are missing in a report, disappear, and whose node is removed.

use super::*;

#[test]
fn gpus_known_by_index_become_the_reported_ones() {
    let mut ledger = LedgerCluster::empty(Policy::default());
    let labelled = gpus(&["index-0", "index-1"]);
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, Some(labelled.clone()));
    assert_eq!(
        bind(&mut ledger, "a", demand(40, Sharing::Shared, 0))[0].as_str(),
        "index-0"
    );
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpu_pair(Bytes::gib(80)).into())
        .unwrap();
    assert_eq!(ledger.free_gib("n"), [32, 72]);
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, Some(labelled));
    assert_eq!(
        ledger.snapshot().node("n").unwrap().devices[0]
            .uuid
            .as_str(),
        "GPU-a",
        "labels come second"
    );
}

fn machine(name: &str) -> NodeIdentity {
    NodeIdentity {
        uid: name.into(),
        machine: None,
        created: None,
    }
}

#[test]
fn a_gpu_known_by_index_is_never_a_lost_one_of_an_earlier_machine() {
    let earlier = || {
        let mut ledger = ledger();
        ledger
            .ledger_mut()
            .identify_node(&node("n"), machine("first"));
        bind(&mut ledger, "old", demand(40, Sharing::Shared, 0));
        ledger
            .ledger_mut()
            .identify_node(&node("n"), machine("second"));
        ledger
    };
    // The leader that bound the pod knew no more of the second machine than its labels.
    let mut ledger = earlier();
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-c", "GPU-d"]).into())
        .unwrap();
    observe_bound(
        &mut ledger,
        "new",
        demand(60, Sharing::Shared, 0),
        Some(&["index-0"]),
    );
    assert_eq!(
        ledger.free_gib("n"),
        [32, 12, 72],
        "of GPU-a, which is lost, GPU-c and GPU-d"
    );
    let mut ledger = earlier();
    observe_bound(
        &mut ledger,
        "new",
        demand(60, Sharing::Shared, 0),
        Some(&["index-0"]),
    );
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-c", "GPU-d"]).into())
        .unwrap();
    assert_eq!(
        ledger.free_gib("n"),
        [32, 12, 72],
        "the same if the pod is seen first"
    );
}

#[test]
fn a_gpu_known_by_index_may_be_missing_in_the_first_report() {
    let mut ledger = LedgerCluster::empty(Policy::default());
    ledger.ledger_mut().set_node(
        &node("n"),
        NodeKind::Stowage,
        Some(gpus(&["index-0", "index-1"])),
    );
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    let [first, second] = <[Device; 2]>::try_from(gpus(&["GPU-a", "GPU-b"])).unwrap();
    ledger
        .ledger_mut()
        .report_devices(&node("n"), [second.clone()].into())
        .unwrap();
    assert_eq!(ledger.free_gib("n"), [32], "it may be any");
    ledger
        .ledger_mut()
        .report_devices(&node("n"), [first, second.clone()].into())
        .unwrap();
    assert_eq!(ledger.free_gib("n"), [32, 72]);
    ledger
        .ledger_mut()
        .report_devices(&node("n"), [second].into())
        .unwrap();
    assert_eq!(
        ledger.free_gib("n"),
        [32, 72],
        "the first is lost, and has its pod"
    );
}

#[test]
fn after_a_restart_pods_are_charged_everywhere_until_the_agent_reports() {
    let mut ledger = LedgerCluster::empty(Policy::default());
    observe_bound(
        &mut ledger,
        "a",
        demand(40, Sharing::Shared, 0),
        Some(&["GPU-b"]),
    );
    ledger.ledger_mut().set_node(
        &node("n"),
        NodeKind::Stowage,
        Some(gpus(&["index-0", "index-1"])),
    );
    assert_eq!(ledger.free_gib("n"), [32, 32]);
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpu_pair(Bytes::gib(80)).into())
        .unwrap();
    assert_eq!(ledger.free_gib("n"), [72, 32]);
}

/// The agent of `n` lists its GPUs.
fn list(ledger: &mut LedgerCluster, devices: Vec<Device>) {
    ledger
        .apply(DevicesReported {
            node: node("n"),
            devices: devices.into(),
            are_all: true,
        })
        .unwrap();
}

#[test]
fn after_a_restart_pods_on_a_gpu_that_is_not_listed_are_charged_on_no_other() {
    let mut ledger = LedgerCluster::empty(Policy::default());
    observe_bound(
        &mut ledger,
        "lost",
        demand(40, Sharing::Shared, 0),
        Some(&["GPU-lost"]),
    );
    let over_two = Demand {
        gpus: 2,
        ..demand(10, Sharing::Shared, 0)
    };
    observe_bound(
        &mut ledger,
        "half-lost",
        over_two,
        Some(&["GPU-b", "GPU-lost"]),
    );
    ledger.ledger_mut().set_node(
        &node("n"),
        NodeKind::Stowage,
        Some(gpus(&["index-0", "index-1"])),
    );
    assert_eq!(
        ledger.free_gib("n"),
        [22, 22],
        "no agent says which GPUs there are"
    );
    list(&mut ledger, gpu_pair(Bytes::gib(80)));
    assert_eq!(ledger.free_gib("n"), [72, 62]);
    observe_bound(
        &mut ledger,
        "shown-late",
        demand(30, Sharing::Exclusive, 0),
        Some(&["GPU-lost"]),
    );
    assert_eq!(ledger.free_gib("n"), [72, 62]);
    assert_eq!(
        ledger.ledger().totals().unplaced,
        0,
        "their records say where they are"
    );
    list(&mut ledger, gpus(&["GPU-a", "GPU-b", "GPU-lost"]));
    assert!(
        ledger.free_gib("n")[2] <= 22,
        "it comes back, and has its pods"
    );
}

#[test]
fn a_gpu_that_is_not_listed_and_may_be_there_is_not_lost() {
    // A slice may be of any card, and a card that was cut has its pods still.
    for named in ["MIG-slice", "GPU-card"] {
        let mut ledger = LedgerCluster::empty(Policy::default());
        observe_bound(
            &mut ledger,
            "a",
            demand(40, Sharing::Shared, 0),
            Some(&[named]),
        );
        ledger
            .ledger_mut()
            .set_node(&node("n"), NodeKind::Stowage, None);
        let slice = Device {
            parent: Some(gpu("GPU-card")),
            ..gpus(&["MIG-other"])[0].clone()
        };
        list(
            &mut ledger,
            vec![slice, gpus(&["GPU-a", "GPU-b"])[1].clone()],
        );
        assert_eq!(ledger.free_gib("n"), [32, 32], "{named}");
    }
}

#[test]
fn a_gpu_that_disappears_keeps_its_pods_and_takes_no_more() {
    let mut ledger = ledger();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-b"]).into())
        .unwrap();
    let snapshot = ledger.snapshot();
    let view = snapshot.node("n").unwrap();
    let lost = view
        .devices
        .iter()
        .position(|device| device.uuid.as_str() == "GPU-a")
        .unwrap();
    assert_eq!(
        (view.gpus[lost].health, view.gpus[lost].residents),
        (Health::Lost, 1)
    );
    ledger.ledger_mut().release(&uid("a"));
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-b"]).into())
        .unwrap();
    assert_eq!(
        ledger.snapshot().node("n").unwrap().devices.len(),
        1,
        "with its last pod it is forgotten"
    );
}

#[test]
fn a_removed_node_takes_no_pods_and_its_pods_stay_charged() {
    let mut ledger = ledger();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    ledger.ledger_mut().remove_node(&node("n"));
    assert!(ledger.snapshot().node("n").is_none());
    ledger.add_waiting("b", demand(1, Sharing::Shared, 0));
    assert_eq!(
        ledger.ledger_mut().assume(&uid("b"), &node("n")),
        Err(AllocationFailure::NoLongerFits(Misfit::UnknownNode))
    );
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, None);
    assert_eq!(ledger.free_gib("n"), [32, 72]);
}

#[test]
fn gpus_that_cannot_be_read_take_no_pods_once_their_last_reading_is_no_longer_fresh() {
    let mut ledger = ledger();
    let healths = |ledger: &LedgerCluster| -> Option<Vec<Health>> {
        let devices = ledger.ledger().unread_devices(&node("n"))?;
        Some(devices.iter().map(|device| device.health).collect())
    };
    let reading = |sampled| NodeReading {
        sampled,
        ..NodeReading::default()
    };
    let now = ledger.ledger().now();
    ledger
        .ledger_mut()
        .take_reading(&node("n"), reading(now).into());
    assert_eq!(
        healths(&ledger),
        None,
        "a driver that takes a moment to answer"
    );
    let fresh = ledger.ledger().policy().telemetry.fresh;
    ledger.ledger_mut().expire(now + fresh);
    let unread = ledger.ledger().unread_devices(&node("n")).unwrap();
    assert_eq!(healths(&ledger), Some(vec![Health::Draining; 2]));
    ledger
        .ledger_mut()
        .report_devices(&node("n"), unread.into())
        .unwrap();
    assert!(
        ledger
            .ledger()
            .node(&node("n"))
            .unwrap()
            .gpus
            .iter()
            .all(|gpu| gpu.health == Health::Draining)
    );
    let mut labelled = LedgerCluster::empty(Policy::default());
    labelled
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, Some(gpus(&["index-0"])));
    assert_eq!(
        healths(&labelled),
        None,
        "no agent has listed what its labels say"
    );
}
