//! The pod's ways through the ledger, one by one. Random histories are in `scheduling::proptests`.

mod devices;

use super::*;
use crate::ids::GpuUuid;
use crate::placing::fit::Misfit;
use crate::testkit::{
    LedgerCluster, START, apply_plan, demand_of, gpu, gpu_pair, node, uid, whole_gpu,
};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::observe::DevicesReported;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::gpu::{Device, GpuSet, Health};
use crate::vocabulary::headroom::Headroom;
use crate::vocabulary::node::{Node, NodeIdentity, NodeKind};
use crate::vocabulary::node_reading::NodeReading;

fn demand(gib: u64, sharing: Sharing, priority: i32) -> Demand {
    let demand = demand_of(gib << 30, 1, sharing, priority);
    // What an engine's start does to its neighbors has tests of its own.
    Demand {
        terms: ClassTerms {
            engine: false,
            ..demand.terms
        },
        ..demand
    }
}

fn gpus(uuids: &[&str]) -> Vec<Device> {
    let device = |(index, uuid): (usize, &&str)| whole_gpu(gpu(uuid), index as u32, Bytes::gib(80));
    uuids.iter().enumerate().map(device).collect()
}

/// One node `n` with two 80 GiB GPUs, of which 72 GiB each can be allocated.
fn ledger() -> LedgerCluster {
    LedgerCluster::empty(Policy::default()).with_node("n", gpu_pair(Bytes::gib(80)))
}

fn bind(ledger: &mut LedgerCluster, name: &str, demand: Demand) -> Arc<[GpuUuid]> {
    ledger.add_waiting(name, demand);
    let AssumeResult::New(placement) = ledger.ledger_mut().assume(&uid(name), &node("n")).unwrap()
    else {
        panic!("not new")
    };
    ledger
        .ledger_mut()
        .confirm(&uid(name), &placement.node, Some(placement.devices.clone()));
    placement.devices
}

fn observe_bound(
    ledger: &mut LedgerCluster,
    name: &str,
    demand: Demand,
    devices: Option<&[&str]>,
) -> PodWarning {
    let devices = devices.map(|uuids| uuids.iter().map(|uuid| gpu(uuid)).collect());
    let state = ObservedPhase::Bound {
        node: node("n"),
        devices,
        starting: false,
        ran: None,
    };
    ledger.observe(name, demand, state, None)
}

#[test]
fn vram_is_charged_from_assume_until_forget() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap();
    assert_eq!(ledger.free_gib("n"), [32, 72]);
    ledger.ledger_mut().forget(&uid("a"));
    assert_eq!(ledger.free_gib("n"), [72, 72]);
}

#[test]
fn assuming_twice_charges_once() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    let AssumeResult::New(first) = ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap()
    else {
        panic!()
    };
    assert_eq!(
        ledger.ledger_mut().assume(&uid("a"), &node("n")),
        Ok(AssumeResult::InFlight(first.clone()))
    );
    assert_eq!(
        ledger.ledger_mut().assume(&uid("a"), &node("m")),
        Err(AllocationFailure::Unsettled { node: node("n") })
    );
    ledger
        .ledger_mut()
        .confirm(&uid("a"), &first.node, Some(first.devices));
    assert_eq!(
        ledger.ledger_mut().assume(&uid("a"), &node("n")),
        Ok(AssumeResult::Bound)
    );
    assert_eq!(
        ledger.ledger_mut().assume(&uid("a"), &node("m")),
        Err(AllocationFailure::BoundElsewhere { node: node("n") })
    );
    assert_eq!(ledger.free_gib("n"), [32, 72]);
}

#[test]
fn a_failed_assume_says_why() {
    let mut ledger = ledger();
    for pod in ["a", "b", "c"] {
        ledger.add_waiting(pod, demand(60, Sharing::Shared, 0));
    }
    ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap();
    ledger.ledger_mut().assume(&uid("b"), &node("n")).unwrap();
    let lost = ledger
        .ledger_mut()
        .assume(&uid("c"), &node("n"))
        .unwrap_err();
    assert_eq!(lost.code(), "insufficient-vram");
    assert_eq!(
        lost.phrase(),
        "conflict: another pod took the GPU in the meantime"
    );
}

#[test]
fn gpus_that_are_too_small_are_not_reported_as_occupied() {
    let mut ledger = ledger();
    let refused = |ledger: &mut LedgerCluster, devices: Vec<Device>, pod: &str, demand| {
        ledger.add_waiting(pod, demand);
        ledger
            .ledger_mut()
            .report_devices(&node("n"), devices.into())
            .unwrap();
        ledger
            .ledger_mut()
            .assume(&uid(pod), &node("n"))
            .unwrap_err()
            .phrase()
    };
    let small = |device| Device {
        total: Bytes::gib(16),
        ..device
    };
    let draining = |device| Device {
        health: Health::Draining,
        ..device
    };
    let pair = || gpu_pair(Bytes::gib(80)).into_iter();
    let one = demand(20, Sharing::Shared, 0);
    let two = Demand {
        gpus: 2,
        per_gpu: Bytes::gib(10),
        ..one.clone()
    };
    let one_draining = [draining(pair().next().unwrap()), pair().nth(1).unwrap()].to_vec();
    let phrases = [
        refused(
            &mut ledger,
            pair().map(draining).collect(),
            "no-healthy-gpu",
            one.clone(),
        ),
        refused(&mut ledger, one_draining, "too-few-gpus", two),
        refused(&mut ledger, pair().map(small).collect(), "too-large", one),
    ];
    assert_eq!(phrases, ["conflict: the node's GPUs have changed"; 3]);
}

#[test]
fn an_exclusive_pod_is_charged_the_whole_gpu_and_granted_it() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(10, Sharing::Exclusive, 0));
    let AssumeResult::New(placement) = ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap()
    else {
        panic!()
    };
    assert_eq!(
        (
            placement.granted,
            placement.memory_fraction.ten_thousandths()
        ),
        (Bytes::gib(72), 9000)
    );
    assert_eq!(ledger.free_gib("n"), [0, 72]);
    ledger.add_waiting("b", demand(80, Sharing::Shared, 0));
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("b"), &node("n")),
        Err(AllocationFailure::NoLongerFits(Misfit::TooLarge { .. }))
    ));
}

#[test]
fn an_exclusive_pod_is_granted_its_request_on_reserved_gpus() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(71, Sharing::Exclusive, 0));
    reserve(ledger.ledger_mut(), "a", &[]).unwrap();
    // A margin of a GPU that a report does not show is held back, but not from the pod that the GPU is kept for.
    let sampled = ledger.ledger().now();
    ledger.ledger_mut().take_reading(
        &node("n"),
        NodeReading {
            sampled,
            ..NodeReading::default()
        }
        .into(),
    );
    let AssumeResult::New(placement) = ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap()
    else {
        panic!()
    };
    assert_eq!(
        (
            placement.granted,
            placement.memory_fraction.ten_thousandths()
        ),
        (Bytes::gib(71), 8875)
    );
}

#[test]
fn a_pod_bound_by_another_scheduler_is_charged_on_every_gpu() {
    let mut ledger = ledger();
    assert_eq!(
        observe_bound(&mut ledger, "a", demand(30, Sharing::Shared, 0), None),
        PodWarning::Unplaced
    );
    assert_eq!(ledger.free_gib("n"), [42, 42]);
    assert_eq!(ledger.ledger().totals().unplaced, 1);
}

#[test]
fn an_edited_record_changes_nothing_and_is_reported() {
    let mut ledger = ledger();
    let devices = bind(&mut ledger, "a", demand(30, Sharing::Shared, 0));
    assert_eq!(devices[0].as_str(), "GPU-a");
    let same = observe_bound(
        &mut ledger,
        "a",
        demand(30, Sharing::Shared, 0),
        Some(&["GPU-a"]),
    );
    let devices = observe_bound(
        &mut ledger,
        "a",
        demand(30, Sharing::Shared, 0),
        Some(&["GPU-b"]),
    );
    let removed = observe_bound(&mut ledger, "a", demand(30, Sharing::Shared, 0), None);
    let amount = observe_bound(
        &mut ledger,
        "a",
        demand(1, Sharing::Shared, 0),
        Some(&["GPU-a"]),
    );
    assert_eq!(
        [same, devices, removed, amount],
        [
            PodWarning::Nothing,
            PodWarning::DevicesEdited,
            PodWarning::DevicesEdited,
            PodWarning::DemandEdited
        ]
    );
    assert_eq!(ledger.free_gib("n"), [42, 72]);
}

#[test]
fn a_soft_reservation_steers_the_next_pod_to_another_gpu_until_it_expires() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .reserve_softly(&uid("a"), &view.name, &view.uuids(GpuSet::single(0)));
    assert_eq!(
        bind(&mut ledger, "b", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-b"
    );
    ledger.ledger_mut().release(&uid("b"));
    ledger.advance(2);
    assert_eq!(
        bind(&mut ledger, "c", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-a"
    );
}

#[test]
fn a_soft_reservation_does_not_keep_another_pod_from_being_bound() {
    let mut ledger = ledger();
    bind(&mut ledger, "full", demand(70, Sharing::Shared, 0));
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .reserve_softly(&uid("a"), &view.name, &view.uuids(GpuSet::single(1)));
    assert_eq!(
        bind(&mut ledger, "b", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-b"
    );
}

fn reserve(ledger: &mut Ledger, pod: &str, victims: &[&str]) -> Result<(), AllocationFailure> {
    let reservation = Reservation {
        node: node("n"),
        devices: [gpu("GPU-a")].into(),
        victims: victims.iter().map(|name| uid(name)).collect(),
        deadline: START + Millis::seconds(60),
    };
    ledger.reserve(&uid(pod), reservation)
}

#[test]
fn a_reservation_keeps_the_vram_of_its_victims_for_its_pod() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    bind(&mut ledger, "other", demand(70, Sharing::Shared, 0));
    ledger.add_waiting("urgent", demand(60, Sharing::Shared, 10));
    reserve(ledger.ledger_mut(), "urgent", &["victim"]).unwrap();
    assert_eq!(
        reserve(ledger.ledger_mut(), "urgent", &["victim"]),
        Err(AllocationFailure::AlreadyReserved { node: node("n") })
    );
    assert_eq!(
        ledger.free_gib("n"),
        [12, 2],
        "the reservation takes what its victim does not have already"
    );
    let waiting = ledger
        .ledger()
        .reserved_placement(&uid("urgent"))
        .unwrap()
        .1;
    assert_eq!(waiting, Err(Misfit::VictimsLeaving { remaining: 1 }));
    assert!(
        ledger
            .ledger_mut()
            .assume(&uid("urgent"), &node("n"))
            .is_err()
    );

    ledger.ledger_mut().release(&uid("victim"));
    assert_eq!(ledger.free_gib("n"), [12, 2]);
    ledger.add_waiting("thief", demand(60, Sharing::Shared, 0));
    assert!(
        ledger
            .ledger_mut()
            .assume(&uid("thief"), &node("n"))
            .is_err()
    );
    assert_eq!(
        ledger
            .ledger()
            .reserved_placement(&uid("urgent"))
            .unwrap()
            .1,
        Ok(GpuSet::single(0))
    );
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("urgent"), &node("n")),
        Ok(AssumeResult::New(_))
    ));
    assert_eq!(ledger.free_gib("n"), [12, 2]);
}

#[test]
fn a_failed_bind_restores_the_reservation() {
    let mut ledger = ledger();
    ledger.add_waiting("urgent", demand(60, Sharing::Shared, 10));
    reserve(ledger.ledger_mut(), "urgent", &[]).unwrap();
    ledger
        .ledger_mut()
        .assume(&uid("urgent"), &node("n"))
        .unwrap();
    ledger.ledger_mut().forget(&uid("urgent"));
    assert!(
        ledger
            .ledger()
            .pod_state(&uid("urgent"))
            .unwrap()
            .reservation()
            .is_some()
    );
    assert_eq!(
        ledger.advance(60),
        [uid("urgent")],
        "and its deadline with it"
    );
    assert_eq!(ledger.free_gib("n"), [72, 72]);
}

#[test]
fn a_pod_is_the_victim_of_one_reservation_only() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    for pod in ["one", "two"] {
        ledger.add_waiting(pod, demand(60, Sharing::Shared, 10));
    }
    reserve(ledger.ledger_mut(), "one", &["victim"]).unwrap();
    assert_eq!(
        reserve(ledger.ledger_mut(), "two", &["victim"]),
        Err(AllocationFailure::VictimGone)
    );
    assert!(
        ledger
            .ledger()
            .candidates_for(&ledger.ledger().preemptor(&uid("two")), [&node("n")])
            .pop()
            .unwrap()
            .potential_victims
            .is_empty()
    );
}

#[test]
fn a_change_of_one_node_copies_one_node() {
    let mut ledger = ledger();
    for name in ["m", "o"] {
        ledger
            .ledger_mut()
            .set_node(&node(name), NodeKind::Stowage, None);
        ledger
            .ledger_mut()
            .report_devices(&node(name), gpus(&["GPU-x"]).into())
            .unwrap();
    }
    let before = ledger.snapshot();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    let after = ledger.snapshot();
    assert!(Arc::ptr_eq(
        &before.node("m").unwrap().gpus,
        &after.node("m").unwrap().gpus
    ));
    assert_eq!(
        before.node("n").unwrap().gpus[0].free(),
        Bytes::gib(72),
        "a reader of the old one sees the old one"
    );
    assert_eq!(after.node("n").unwrap().gpus[0].free(), Bytes::gib(32));
    assert!(before.generation() < after.generation());
}

#[test]
fn changes_made_while_a_snapshot_is_read_are_in_the_next_snapshot() {
    let mut ledger = ledger();
    for name in ["m", "o"] {
        ledger
            .ledger_mut()
            .set_node(&node(name), NodeKind::Stowage, None);
        ledger
            .ledger_mut()
            .report_devices(&node(name), gpus(&["GPU-x"]).into())
            .unwrap();
    }
    let reader = ledger.snapshot();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    assert_eq!(reader.node("n").unwrap().gpus[0].free(), Bytes::gib(72));
    drop(reader);
    // This one goes to the view at once; the one before it still waits.
    ledger
        .ledger_mut()
        .report_devices(&node("o"), gpus(&["GPU-x", "GPU-y"]).into())
        .unwrap();
    let next = ledger.snapshot();
    assert_eq!(next.node("n").unwrap().gpus[0].free(), Bytes::gib(32));
    assert_eq!(next.node("o").unwrap().gpus.len(), 2);
    assert_eq!(next.node("m").unwrap().gpus.len(), 1);
}

#[test]
fn many_node_changes_made_while_a_snapshot_is_read_are_in_the_next_snapshot() {
    let mut ledger = LedgerCluster::empty(Policy::default());
    let add = |ledger: &mut Ledger, name: &str, devices: &[&str]| {
        ledger.set_node(&node(name), NodeKind::Stowage, None);
        ledger
            .report_devices(&node(name), gpus(devices).into())
            .unwrap();
    };
    let names = ["a", "b", "c", "d", "e"];
    names
        .iter()
        .for_each(|name| add(ledger.ledger_mut(), name, &["GPU-x"]));
    let shown = |snapshot: &Snapshot| serde_json::to_string(snapshot).unwrap();
    for round in 0..3 {
        let reader = ledger.snapshot();
        let before = shown(&reader);
        names.iter().for_each(|name| {
            add(
                ledger.ledger_mut(),
                name,
                &["GPU-x", &format!("GPU-{round}")],
            )
        });
        match round {
            1 => add(ledger.ledger_mut(), "bb", &["GPU-x"]),
            2 => ledger.ledger_mut().remove_node(&node("c")),
            _ => {}
        }
        add(ledger.ledger_mut(), "a", &["GPU-y"]);
        assert_eq!(
            shown(&reader),
            before,
            "a reader of the old one sees the old one"
        );
        let next = ledger.snapshot();
        let all: Vec<Node> = ledger
            .ledger()
            .all_node_states()
            .filter(|one| one.exists())
            .map(|one| one.view().clone())
            .collect();
        assert_eq!(
            shown(&next),
            shown(&Snapshot::new(
                next.generation(),
                next.node_list_generation(),
                all
            ))
        );
        assert_eq!(next.nodes().len(), [5, 6, 5][round]);
        assert!(
            next.nodes()
                .iter()
                .enumerate()
                .all(|(index, one)| next.index_of(one.name.as_str()) == Some(index))
        );
    }
}

#[test]
fn headroom_is_never_allocated() {
    let mut policy = Policy::default();
    policy.headroom = Headroom::uniform(Percent::new(25).unwrap());
    let mut ledger = LedgerCluster::empty(policy);
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, Some(gpus(&["index-0"])));
    assert_eq!(ledger.free_gib("n"), [60]);
}

#[test]
fn nothing_is_allocated_on_gpus_of_a_device_plugin() {
    let mut ledger = ledger();
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::DevicePlugin, None);
    ledger.add_waiting("a", demand(1, Sharing::Shared, 0));
    let refused = ledger.ledger_mut().assume(&uid("a"), &node("n"));
    assert_eq!(
        refused,
        Err(AllocationFailure::NoLongerFits(Misfit::DevicePluginNode))
    );
    let snapshot = ledger.snapshot();
    let misfit =
        crate::placing::fit::fit(snapshot.node("n").unwrap(), &demand(1, Sharing::Shared, 0));
    assert_eq!(misfit, Err(Misfit::DevicePluginNode));
}

#[test]
fn a_card_that_is_cut_into_slices_while_pods_have_it_takes_no_more_until_they_leave() {
    let mut ledger = ledger();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    let parent = Some(gpu("GPU-a"));
    let slices: Vec<Device> = gpus(&["MIG-1", "MIG-2"])
        .into_iter()
        .map(|slice| Device {
            parent: parent.clone(),
            total: Bytes::gib(40),
            ..slice
        })
        .collect();
    ledger
        .ledger_mut()
        .report_devices(&node("n"), slices.clone().into())
        .unwrap();
    ledger.add_waiting("b", demand(20, Sharing::Shared, 0));
    assert!(ledger.ledger_mut().assume(&uid("b"), &node("n")).is_err());
    ledger.ledger_mut().release(&uid("a"));
    ledger
        .ledger_mut()
        .report_devices(&node("n"), slices.into())
        .unwrap();
    assert!(ledger.ledger_mut().assume(&uid("b"), &node("n")).is_ok());
}

#[test]
fn lost_gpus_with_pods_count_towards_what_a_node_may_have() {
    let mut ledger = ledger();
    bind(&mut ledger, "a", demand(40, Sharing::Shared, 0));
    let names: Vec<String> = (0..64).map(|i| format!("GPU-{i}")).collect();
    let many = gpus(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let refused = ledger.ledger_mut().report_devices(&node("n"), many.into());
    assert_eq!(refused, Err(DeviceReportError::TooMany(65)));
    assert_eq!(ledger.free_gib("n"), [32, 72], "and nothing has changed");
}

#[test]
fn the_record_wins_over_an_assume_that_was_never_answered() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap();
    let warning = observe_bound(
        &mut ledger,
        "a",
        demand(40, Sharing::Shared, 0),
        Some(&["GPU-b"]),
    );
    assert_eq!(
        (warning, ledger.free_gib("n")),
        (PodWarning::Nothing, vec![72, 32])
    );
}

#[test]
fn a_soft_reservation_on_changed_gpus_is_dropped() {
    let mut ledger = ledger();
    ledger.add_waiting("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-a"]).into())
        .unwrap();
    ledger
        .ledger_mut()
        .reserve_softly(&uid("a"), &view.name, &view.uuids(GpuSet::single(1)));
    assert!(
        ledger
            .ledger()
            .pod_state(&uid("a"))
            .unwrap()
            .soft_reservation()
            .is_none()
    );
}

#[test]
fn pods_that_this_process_offered_or_refused_are_not_presumed_refused() {
    let mut ledger = ledger();
    for name in ["offered", "refused", "before", "new"] {
        ledger.add_waiting(name, demand(40, Sharing::Shared, 0));
    }
    let snapshot = ledger.snapshot();
    ledger
        .ledger_mut()
        .record_refusal(&uid("before"), Some(snapshot.node_set(0..1)));
    let then = START + Millis::seconds(1);
    ledger.ledger_mut().set_now(then);
    let found = ledger.ledger().possibly_refused_pods();
    assert_eq!(
        found,
        ["offered", "refused", "before", "new"].map(uid).into()
    );
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .reserve_softly(&uid("offered"), &view.name, &view.uuids(GpuSet::single(1)));
    ledger
        .ledger_mut()
        .record_refusal(&uid("refused"), Some(snapshot.node_set(0..1)));
    found
        .iter()
        .for_each(|uid| ledger.ledger_mut().presume_refused(uid, then));
    let supposed = |name| {
        let pod_state = ledger.ledger().pod_state(&uid(name)).unwrap();
        pod_state.refusal().map(|refused| refused.is_supposed)
    };
    assert_eq!(
        ["offered", "refused", "before", "new"].map(supposed),
        [None, Some(false), Some(true), Some(true)]
    );
}

#[test]
fn a_reservation_is_free_when_its_last_victim_has_left() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    ledger.add_waiting("urgent", demand(60, Sharing::Shared, 10));
    reserve(ledger.ledger_mut(), "urgent", &["victim"]).unwrap();
    let status = |ledger: &Ledger| {
        let [status] = &ledger.reservation_statuses()[..] else {
            panic!("one reservation")
        };
        (status.uid.clone(), status.remaining.len(), status.is_free)
    };
    assert_eq!(status(ledger.ledger()), (uid("urgent"), 1, false));
    ledger.ledger_mut().release(&uid("victim"));
    assert_eq!(status(ledger.ledger()), (uid("urgent"), 0, true));
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("urgent"), &node("n")),
        Ok(AssumeResult::New(_))
    ));
}

#[test]
fn pods_refused_for_lack_of_plugin_devices_are_requeued_one_at_a_time_when_devices_are_freed() {
    let gpu = || PluginResource::parse("nvidia.com/gpu").unwrap();
    let asks = |count| {
        let ask = GpuRequest::Plugin {
            resource: gpu(),
            count,
        };
        Demand {
            ask,
            per_gpu: Bytes::ZERO,
            gpus: count,
            ..demand(0, Sharing::Exclusive, 0)
        }
    };
    let mut ledger = LedgerCluster::empty(Policy::default());
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::DevicePlugin, None);
    ledger
        .ledger_mut()
        .set_plugin_devices(&node("n"), [(gpu(), 2)].into());
    bind(&mut ledger, "there", asks(2));
    for name in ["a", "b"] {
        ledger.add_waiting(name, asks(2));
        let snapshot = ledger.snapshot();
        ledger
            .ledger_mut()
            .record_refusal(&uid(name), Some(snapshot.node_set(0..1)));
    }
    let woken = |ledger: &mut Ledger, seconds| -> Vec<PodUid> {
        ledger.set_now(START + Millis::seconds(seconds));
        apply_plan(ledger)
    };
    assert_eq!(woken(ledger.ledger_mut(), 10), []);
    ledger.ledger_mut().release(&uid("there"));
    assert_eq!(woken(ledger.ledger_mut(), 20), [uid("a")]);
}

#[test]
fn changed_disruption_info_of_a_bound_pod_counts_at_once_and_changes_no_node() {
    use crate::vocabulary::disruption_info::{
        Checkpoint, CheckpointAge, DisruptionInfo, ObservedDisruptionInfo, PodDeletion,
    };
    let mut ledger = ledger();
    bind(&mut ledger, "a", demand(10, Sharing::Shared, 0));
    let generation = ledger.snapshot().generation();
    let pod_state = ledger.ledger().pod_state(&uid("a")).unwrap().clone();
    let mut see = |observed: Option<ObservedDisruptionInfo>| {
        let PodPhase::Bound(bound) = pod_state.phase.clone() else {
            panic!("it is bound")
        };
        let (node, devices) = (bound.node, bound.devices);
        let state = ObservedPhase::Bound {
            node,
            devices,
            starting: false,
            ran: None,
        };
        let warning = ledger.observe("a", pod_state.demand.clone(), state, observed);
        let after = ledger.ledger().pod_state(&uid("a")).unwrap().clone();
        let PodPhase::Bound(bound) = after.phase else {
            panic!("it stays bound")
        };
        (
            warning,
            DisruptionInfo::clone(&after.disruption_info),
            bound.leaving,
        )
    };
    let stamped = |stamp| {
        Some(ObservedDisruptionInfo {
            stamp,
            ..ObservedDisruptionInfo::default()
        })
    };
    let at = |moment| DisruptionInfo {
        checkpoint: Checkpoint::At(moment),
        ..DisruptionInfo::default()
    };
    assert_eq!(
        see(stamped(CheckpointAge::Ago(Millis(5_000)))),
        (PodWarning::Nothing, at(START.before(Millis(5_000))), None)
    );
    assert_eq!(
        see(None),
        (PodWarning::Nothing, at(START.before(Millis(5_000))), None),
        "an observation without it changes nothing"
    );
    assert_eq!(
        see(stamped(CheckpointAge::Unreadable)),
        (
            PodWarning::CheckpointUnreadable,
            DisruptionInfo::default(),
            None
        )
    );
    let ahead = stamped(CheckpointAge::Ahead(Millis::seconds(600)));
    assert_eq!(
        see(ahead),
        (PodWarning::CheckpointInFuture, at(START), None)
    );
    let leaving = PodDeletion {
        asked_ago: Millis(10_000),
        grace: Millis(30_000),
    };
    let leaves = Some(ObservedDisruptionInfo {
        leaving: Some(leaving),
        ..ObservedDisruptionInfo::default()
    });
    assert_eq!(see(leaves).2, Some(START + Millis::seconds(20)));
    assert_eq!(ledger.snapshot().generation(), generation);
}

/// As a predecessor leaves it that told the pod to end sooner: the API server counts the shorter grace from the first request on.
#[test]
fn an_overdue_deletion_gets_its_grace_period_from_when_it_is_first_observed() {
    use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, PodDeletion};
    // When it began, with what grace, and how much of it is left now, all in seconds.
    for (asked_ago, grace, left) in [
        (3600, 30, 30),
        (31, 30, 30),
        (30, 30, 0),
        (10, 30, 20),
        (3600, 0, 0),
    ] {
        let mut ledger = ledger();
        bind(&mut ledger, "a", demand(10, Sharing::Shared, 0));
        let pod_state = ledger.ledger().pod_state(&uid("a")).unwrap().clone();
        let mut see = |asked_ago: u64| {
            let PodPhase::Bound(bound) = pod_state.phase.clone() else {
                panic!("it is bound")
            };
            let state = ObservedPhase::Bound {
                node: bound.node,
                devices: bound.devices,
                starting: false,
                ran: None,
            };
            let leaving = Some(PodDeletion {
                asked_ago: Millis::seconds(asked_ago),
                grace: Millis::seconds(grace),
            });
            let observed = ObservedDisruptionInfo {
                leaving,
                ..ObservedDisruptionInfo::default()
            };
            ledger.observe("a", pod_state.demand.clone(), state, Some(observed));
            ledger
                .ledger()
                .pod_state(&uid("a"))
                .unwrap()
                .bound()
                .unwrap()
                .leaving
        };
        let by = Some(START + Millis::seconds(left));
        // Whatever the wall clock says afterwards, once its time counts it grows no longer.
        let seen = [asked_ago, asked_ago + 1, 0, 100_000, asked_ago].map(&mut see);
        assert_eq!(seen, [by; 5], "{asked_ago}, {grace}");
    }
}
