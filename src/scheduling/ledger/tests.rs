//! The pod's ways through the ledger, one by one. Random histories are in `scheduling::proptests`.

mod devices;

use super::*;
use crate::ids::GpuUuid;
use crate::placing::fit::Misfit;
use crate::testkit::{
    LedgerCluster, START, demand_of, gpu, gpu_pair, node, placed, uid, whole_gpu,
};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::observe::DevicesReported;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::{Ask, PluginResource};
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
    ledger.wait(name, demand);
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
fn a_promise_counts_from_assume_and_is_given_back_by_forget() {
    let mut ledger = ledger();
    ledger.wait("a", demand(40, Sharing::Shared, 0));
    ledger.ledger_mut().assume(&uid("a"), &node("n")).unwrap();
    assert_eq!(ledger.free_gib("n"), [32, 72]);
    ledger.ledger_mut().forget(&uid("a"));
    assert_eq!(ledger.free_gib("n"), [72, 72]);
}

#[test]
fn assuming_twice_promises_once() {
    let mut ledger = ledger();
    ledger.wait("a", demand(40, Sharing::Shared, 0));
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
        Err(AssumeConflict::Unsettled { node: node("n") })
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
        Err(AssumeConflict::BoundElsewhere { node: node("n") })
    );
    assert_eq!(ledger.free_gib("n"), [32, 72]);
}

#[test]
fn the_loser_of_a_race_gets_a_typed_conflict() {
    let mut ledger = ledger();
    for pod in ["a", "b", "c"] {
        ledger.wait(pod, demand(60, Sharing::Shared, 0));
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
fn no_other_pod_is_blamed_for_what_the_nodes_gpus_themselves_lack() {
    let mut ledger = ledger();
    let refused = |ledger: &mut LedgerCluster, devices: Vec<Device>, pod: &str, demand| {
        ledger.wait(pod, demand);
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
    ledger.wait("a", demand(10, Sharing::Exclusive, 0));
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
    ledger.wait("b", demand(80, Sharing::Shared, 0));
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("b"), &node("n")),
        Err(AssumeConflict::NoLongerFits(Misfit::TooLarge { .. }))
    ));
}

#[test]
fn an_exclusive_pod_is_granted_what_it_requests_on_gpus_that_were_kept_for_it() {
    let mut ledger = ledger();
    ledger.wait("a", demand(71, Sharing::Exclusive, 0));
    reserve(ledger.ledger_mut(), "a", &[]).unwrap();
    // A margin of a GPU that a report does not show is held back, but not from the pod that the GPU is kept for.
    let sampled = ledger.ledger().now();
    ledger.ledger_mut().read(
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
fn a_pod_bound_by_someone_else_is_charged_on_every_gpu() {
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
fn a_hint_steers_the_next_pod_to_another_gpu_until_it_runs_out() {
    let mut ledger = ledger();
    ledger.wait("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .offer(&uid("a"), &view.name, &view.uuids(GpuSet::one(0)));
    assert_eq!(
        bind(&mut ledger, "b", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-b"
    );
    ledger.ledger_mut().release(&uid("b"));
    ledger.pass(2);
    assert_eq!(
        bind(&mut ledger, "c", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-a"
    );
}

#[test]
fn a_hint_is_advice_only() {
    let mut ledger = ledger();
    bind(&mut ledger, "full", demand(70, Sharing::Shared, 0));
    ledger.wait("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .offer(&uid("a"), &view.name, &view.uuids(GpuSet::one(1)));
    assert_eq!(
        bind(&mut ledger, "b", demand(40, Sharing::Shared, 0))[0].as_str(),
        "GPU-b"
    );
}

fn reserve(ledger: &mut Ledger, pod: &str, victims: &[&str]) -> Result<(), AssumeConflict> {
    let reservation = Reservation {
        node: node("n"),
        devices: [gpu("GPU-a")].into(),
        victims: victims.iter().map(|name| uid(name)).collect(),
        deadline: START + Millis::seconds(60),
    };
    ledger.reserve(&uid(pod), reservation)
}

#[test]
fn a_hold_keeps_the_room_its_victims_leave_for_its_pod() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    bind(&mut ledger, "other", demand(70, Sharing::Shared, 0));
    ledger.wait("urgent", demand(60, Sharing::Shared, 10));
    reserve(ledger.ledger_mut(), "urgent", &["victim"]).unwrap();
    assert_eq!(
        reserve(ledger.ledger_mut(), "urgent", &["victim"]),
        Err(AssumeConflict::AlreadyReserved { node: node("n") })
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
    ledger.wait("thief", demand(60, Sharing::Shared, 0));
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
        Ok(GpuSet::one(0))
    );
    assert!(matches!(
        ledger.ledger_mut().assume(&uid("urgent"), &node("n")),
        Ok(AssumeResult::New(_))
    ));
    assert_eq!(ledger.free_gib("n"), [12, 2]);
}

#[test]
fn a_failed_bind_gives_the_hold_back() {
    let mut ledger = ledger();
    ledger.wait("urgent", demand(60, Sharing::Shared, 10));
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
    assert_eq!(ledger.pass(60), [uid("urgent")], "and its deadline with it");
    assert_eq!(ledger.free_gib("n"), [72, 72]);
}

#[test]
fn one_pod_is_the_victim_of_one_hold() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    for pod in ["one", "two"] {
        ledger.wait(pod, demand(60, Sharing::Shared, 10));
    }
    reserve(ledger.ledger_mut(), "one", &["victim"]).unwrap();
    assert_eq!(
        reserve(ledger.ledger_mut(), "two", &["victim"]),
        Err(AssumeConflict::VictimGone)
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
fn what_changes_while_somebody_reads_and_after_it_is_all_in_the_next_view() {
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
fn many_nodes_that_change_come_and_go_while_somebody_reads_are_all_in_the_next_view() {
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
            shown(&Snapshot::new(next.generation(), next.epoch(), all))
        );
        assert_eq!(next.nodes().len(), [5, 6, 5][round]);
        assert!(
            next.nodes()
                .iter()
                .enumerate()
                .all(|(place, one)| next.place_of(one.name.as_str()) == Some(place))
        );
    }
}

#[test]
fn headroom_is_never_handed_out() {
    let mut policy = Policy::default();
    policy.headroom = Headroom::all(Percent::new(25).unwrap());
    let mut ledger = LedgerCluster::empty(policy);
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::Stowage, Some(gpus(&["index-0"])));
    assert_eq!(ledger.free_gib("n"), [60]);
}

#[test]
fn nothing_is_promised_where_a_device_plugin_hands_out_the_gpus() {
    let mut ledger = ledger();
    ledger
        .ledger_mut()
        .set_node(&node("n"), NodeKind::DevicePlugin, None);
    ledger.wait("a", demand(1, Sharing::Shared, 0));
    let refused = ledger.ledger_mut().assume(&uid("a"), &node("n"));
    assert_eq!(
        refused,
        Err(AssumeConflict::NoLongerFits(Misfit::DevicePluginNode))
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
    ledger.wait("b", demand(20, Sharing::Shared, 0));
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
    assert_eq!(refused, Err(DevicesRefused::TooMany(65)));
    assert_eq!(ledger.free_gib("n"), [32, 72], "and nothing has changed");
}

#[test]
fn the_record_wins_over_an_assume_that_was_never_answered() {
    let mut ledger = ledger();
    ledger.wait("a", demand(40, Sharing::Shared, 0));
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
fn an_offer_made_on_gpus_that_have_changed_since_is_dropped() {
    let mut ledger = ledger();
    ledger.wait("a", demand(40, Sharing::Shared, 0));
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .report_devices(&node("n"), gpus(&["GPU-a"]).into())
        .unwrap();
    ledger
        .ledger_mut()
        .offer(&uid("a"), &view.name, &view.uuids(GpuSet::one(1)));
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
fn what_this_process_offered_or_refused_since_is_not_supposed_to_be_refused() {
    let mut ledger = ledger();
    for name in ["offered", "refused", "before", "new"] {
        ledger.wait(name, demand(40, Sharing::Shared, 0));
    }
    let snapshot = ledger.snapshot();
    ledger
        .ledger_mut()
        .note_refused(&uid("before"), Some(snapshot.set_of(0..1)));
    let then = START + Millis::seconds(1);
    ledger.ledger_mut().set_now(then);
    let found = ledger.ledger().may_be_refused();
    assert_eq!(
        found,
        ["offered", "refused", "before", "new"].map(uid).into()
    );
    let view = ledger.ledger().node(&node("n")).unwrap().clone();
    ledger
        .ledger_mut()
        .offer(&uid("offered"), &view.name, &view.uuids(GpuSet::one(1)));
    ledger
        .ledger_mut()
        .note_refused(&uid("refused"), Some(snapshot.set_of(0..1)));
    found
        .iter()
        .for_each(|uid| ledger.ledger_mut().suppose_refused(uid, then));
    let supposed = |name| {
        let pod_state = ledger.ledger().pod_state(&uid(name)).unwrap();
        pod_state.refused().map(|refused| refused.is_supposed)
    };
    assert_eq!(
        ["offered", "refused", "before", "new"].map(supposed),
        [None, Some(false), Some(true), Some(true)]
    );
}

#[test]
fn a_hold_is_free_when_its_last_victim_has_left() {
    let mut ledger = ledger();
    bind(&mut ledger, "victim", demand(50, Sharing::Shared, -1));
    ledger.wait("urgent", demand(60, Sharing::Shared, 10));
    reserve(ledger.ledger_mut(), "urgent", &["victim"]).unwrap();
    let status = |ledger: &Ledger| {
        let [status] = &ledger.reservation_status()[..] else {
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
fn a_pod_refused_for_want_of_devices_is_woken_when_they_come_free_and_one_at_a_time() {
    let gpu = || PluginResource::parse("nvidia.com/gpu").unwrap();
    let asks = |count| {
        let ask = Ask::Plugin {
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
        ledger.wait(name, asks(2));
        let snapshot = ledger.snapshot();
        ledger
            .ledger_mut()
            .note_refused(&uid(name), Some(snapshot.set_of(0..1)));
    }
    let woken = |ledger: &mut Ledger, seconds| -> Vec<PodUid> {
        ledger.set_now(START + Millis::seconds(seconds));
        placed(ledger)
    };
    assert_eq!(woken(ledger.ledger_mut(), 10), []);
    ledger.ledger_mut().release(&uid("there"));
    assert_eq!(woken(ledger.ledger_mut(), 20), [uid("a")]);
}

#[test]
fn a_stake_that_changes_on_a_bound_pod_counts_at_once_and_moves_no_page() {
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
fn a_deletion_whose_time_is_over_when_it_is_first_seen_gets_its_grace_from_then_on() {
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
