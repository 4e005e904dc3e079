//! What readings do to the books, one by one. Random histories against DESIGN's formula are in `scheduling::proptests`.

use crate::ids::{GpuModel, GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::device::{Device, Health};
use crate::scheduling::fit::{Misfit, fit};
use crate::scheduling::ledger::{Assumption, Ledger, Seen, SeenState, SeenWaiting};
use crate::scheduling::loading::Holdings;
use crate::scheduling::node::NodeKind;
use crate::scheduling::plan::testing::placed;
use crate::scheduling::policy::{ExpiredRule, Policy};
use crate::scheduling::preempt::{Rules, cheapest_victims};
use crate::scheduling::reading::{Freshness, GpuReading, Pressure, Reading};
use crate::scheduling::request::{ContainerRequest, Demand, PodRequest};
use crate::units::{Bytes, Millis, Moment, Percent};
use std::collections::BTreeSet;
use std::sync::Arc;

/// One node `n` with two 100 GiB GPUs, of which 90 GiB each can be promised; a margin is 5 GiB.
struct Bench {
    ledger: Ledger,
    now: Moment,
}

impl Bench {
    fn new() -> Self {
        Self::with(Policy::default())
    }

    fn with(policy: Policy) -> Self {
        let mut ledger = Ledger::new(Arc::new(policy));
        ledger.set_node(&node(), NodeKind::Stowage, None);
        let devices = ["GPU-a", "GPU-b"].into_iter().enumerate().map(|(index, uuid)| Device {
            uuid: gpu(uuid),
            index: index as u32,
            model: GpuModel::parse("H100").unwrap(),
            parent: None,
            total: Bytes::gib(100),
            reserved: Bytes::ZERO,
            health: Health::Healthy,
            island: None,
        });
        ledger.report_devices(&node(), devices.collect()).unwrap();
        Self { ledger, now: Moment(1_000_000) }
    }

    fn wait(&mut self, name: &str, gib: u64, priority: i32) -> Demand {
        self.ledger.set_now(self.now);
        let demand = demand(gib, priority, self.ledger.policy());
        let state = SeenState::Waiting(SeenWaiting::default());
        self.ledger.see(Seen { uid: uid(name), key: key(name), demand: demand.clone(), state, shown: None });
        demand
    }

    /// Bound and starting.
    fn bind(&mut self, name: &str, gib: u64, priority: i32) -> Vec<String> {
        self.wait(name, gib, priority);
        let assumed = self.ledger.assume(&uid(name), &node()).unwrap();
        let Assumption::New(placement) = assumed else { panic!("{name} was bound before") };
        self.ledger.confirm(&uid(name), &node(), Some(placement.devices.clone()));
        placement.devices.iter().map(|uuid| uuid.to_string()).collect()
    }

    fn see_bound(&mut self, name: &str, gib: u64, devices: Option<&[&str]>, starting: bool) {
        self.ledger.set_now(self.now);
        let demand = demand(gib, 0, self.ledger.policy());
        let devices = devices.map(|uuids| uuids.iter().map(|uuid| gpu(uuid)).collect());
        let state = SeenState::Bound { node: node(), devices, starting, ran: None };
        self.ledger.see(Seen { uid: uid(name), key: key(name), demand, state, shown: None });
    }

    /// A reading sampled now; each GPU as (used, who has what).
    fn read(&mut self, gpus: [(u64, &[(&str, u64)]); 2]) {
        self.read_with(gpus, Pressure::NONE);
    }

    fn read_with(&mut self, gpus: [(u64, &[(&str, u64)]); 2], on_a: Pressure) {
        self.pass(1);
        let readings =
            ["GPU-a", "GPU-b"].into_iter().zip(gpus).map(|(uuid, (used, attributed))| GpuReading {
                uuid: gpu(uuid),
                used: Some(Bytes::gib(used)),
                attributed: attributed.iter().map(|(name, gib)| (uid(name), Bytes::gib(*gib))).collect(),
                pressure: if uuid == "GPU-a" { on_a } else { Pressure::NONE },
            });
        let reading = Reading {
            sampled: self.now,
            gpus: readings.collect(),
            holdings: Holdings::default(),
            in_flight: Vec::new(),
        };
        self.ledger.read(&node(), reading);
    }

    fn pass(&mut self, seconds: u64) {
        self.now = self.now + Millis::seconds(seconds);
        self.ledger.expire(self.now);
    }

    fn free(&mut self) -> [u64; 2] {
        let snapshot = self.ledger.snapshot();
        let gpus = &snapshot.node("n").unwrap().gpus;
        [gpus[0].free().0 >> 30, gpus[1].free().0 >> 30]
    }

    fn freshness(&mut self) -> Freshness {
        self.ledger.snapshot().node("n").unwrap().freshness
    }

    fn verdict(&mut self, demand: &Demand) -> Result<(), Misfit> {
        fit(self.ledger.snapshot().node("n").unwrap(), demand).map(drop)
    }
}

fn node() -> NodeName {
    NodeName::parse("n").unwrap()
}

fn gpu(uuid: &str) -> GpuUuid {
    GpuUuid::parse(uuid).unwrap()
}

fn uid(name: &str) -> PodUid {
    PodUid::parse(name).unwrap()
}

fn key(name: &str) -> PodKey {
    PodKey::parse("default", name).unwrap()
}

/// Of class `serving`, or `opportunistic` if the priority is negative.
fn demand(gib: u64, priority: i32, policy: &Policy) -> Demand {
    let vram = format!("{gib}Gi");
    let containers = [ContainerRequest { vram: Some(&vram), ..ContainerRequest::plain("engine") }];
    let request =
        PodRequest { priority, grace: Millis::seconds(1), ..PodRequest::plain("default", &containers) };
    Demand::of(&request, policy).unwrap()
}

#[test]
fn a_pod_above_its_grant_takes_from_what_is_free_and_one_below_gives_nothing() {
    let mut bench = Bench::new();
    bench.see_bound("greedy", 20, Some(&["GPU-a"]), false);
    bench.see_bound("modest", 20, Some(&["GPU-b"]), false);
    bench.read([(26, &[("greedy", 26)]), (3, &[("modest", 3)])]);
    assert_eq!(bench.free(), [64, 70]);
}

#[test]
fn vram_that_nobody_explains_is_believed_after_three_reports_in_a_row() {
    let mut bench = Bench::new();
    bench.read([(12, &[]), (0, &[])]);
    bench.read([(12, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 90]);
    bench.read([(10, &[]), (0, &[])]);
    assert_eq!(bench.free(), [80, 90], "the least of the three");
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 90], "it is gone at once");
}

#[test]
fn what_a_pod_was_promised_explains_what_its_processes_are_not_known_to_have() {
    let mut bench = Bench::new();
    bench.see_bound("engine", 30, Some(&["GPU-a"]), false);
    (0..4).for_each(|_| bench.read([(25, &[]), (0, &[])]));
    assert_eq!(bench.free(), [60, 90]);
}

#[test]
fn a_report_sampled_before_a_pod_was_bound_is_not_explained_by_it() {
    let mut bench = Bench::new();
    (0..3).for_each(|_| bench.read([(10, &[]), (0, &[])]));
    bench.see_bound("engine", 30, Some(&["GPU-a"]), false);
    assert_eq!(bench.free(), [50, 90]);
    bench.read([(10, &[]), (0, &[])]);
    assert_eq!(bench.free(), [60, 90], "from now on it may be the pod's");
}

#[test]
fn a_pod_that_nothing_records_is_charged_everywhere_until_an_agent_shows_where_it_runs() {
    let mut bench = Bench::new();
    bench.see_bound("stray", 30, None, false);
    assert_eq!(bench.free(), [60, 60]);
    bench.read([(0, &[]), (28, &[("stray", 28)])]);
    assert_eq!(bench.free(), [90, 60]);
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.free(), [90, 60], "it was found once");
}

#[test]
fn a_pod_on_another_gpu_than_its_binding_says_counts_on_both() {
    let mut bench = Bench::new();
    bench.see_bound("drifted", 30, Some(&["GPU-a"]), false);
    bench.read([(0, &[]), (28, &[("drifted", 28)])]);
    assert_eq!(bench.free(), [60, 62]);
}

#[test]
fn indices_recorded_before_any_agent_spoke_mean_the_cards_of_its_first_report() {
    let mut ledger = Ledger::new(Arc::new(Policy::default()));
    let device = |index, uuid: &str| Device {
        uuid: gpu(uuid),
        index,
        model: GpuModel::parse("H100").unwrap(),
        parent: None,
        total: Bytes::gib(100),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        island: None,
    };
    ledger.set_node(&node(), NodeKind::Stowage, Some(vec![device(0, "index-0"), device(1, "index-1")]));
    let demand = demand(30, 0, ledger.policy());
    let devices = Some(Arc::from([GpuUuid::from_index(1)]));
    let state = SeenState::Bound { node: node(), devices, starting: false, ran: None };
    ledger.see(Seen { uid: uid("early"), key: key("early"), demand, state, shown: None });
    ledger.report_devices(&node(), vec![device(0, "GPU-a"), device(1, "GPU-b")]).unwrap();
    // The driver numbers the cards anew.
    ledger.report_devices(&node(), vec![device(0, "GPU-b"), device(1, "GPU-a")]).unwrap();
    let snapshot = ledger.snapshot();
    let view = snapshot.node("n").unwrap();
    let charged = view.devices.iter().zip(view.gpus.iter()).find(|(d, _)| d.uuid == gpu("GPU-b")).unwrap();
    assert_eq!(charged.1.charged, Bytes::gib(30));
}

#[test]
fn a_silent_agent_costs_a_margin_and_then_the_policy_decides() {
    let mut bench = Bench::new();
    let pod = demand(10, 0, &Policy::default());
    bench.read_with([(0, &[]), (0, &[])], Pressure::of(Percent::new(99), Some(0)));
    assert_eq!((bench.freshness(), bench.free()), (Freshness::Fresh, [90, 90]));
    bench.pass(5);
    assert_eq!((bench.freshness(), bench.free()), (Freshness::Stale, [85, 85]));
    assert_eq!(bench.ledger.snapshot().node("n").unwrap().gpus[0].pressure, Pressure::default());
    bench.pass(25);
    assert_eq!((bench.freshness(), bench.free()), (Freshness::Expired, [85, 85]));
    assert_eq!(bench.verdict(&pod), Ok(()));
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!((bench.freshness(), bench.free()), (Freshness::Fresh, [90, 90]));
}

#[test]
fn a_policy_may_refuse_a_node_that_nobody_sees() {
    let mut policy = Policy::default();
    policy.telemetry.expired = ExpiredRule::Refuse;
    let mut bench = Bench::with(policy);
    let pod = bench.wait("pod", 10, 0);
    assert_eq!(bench.verdict(&pod), Err(Misfit::Unseen));
    assert_eq!(bench.ledger.assume(&uid("pod"), &node()), Err(Misfit::Unseen.into()));
    bench.read([(0, &[]), (0, &[])]);
    assert_eq!(bench.verdict(&pod), Ok(()));
    bench.pass(29);
    assert_eq!(bench.verdict(&pod), Ok(()), "stale is not expired");
    bench.pass(1);
    assert_eq!(bench.verdict(&pod), Err(Misfit::Unseen));
}

#[test]
fn an_old_report_is_as_old_as_its_sender_says() {
    let mut bench = Bench::new();
    let sampled = bench.now.before(Millis::seconds(12));
    bench.ledger.set_now(bench.now);
    bench.ledger.read(&node(), Reading { sampled, ..Reading::default() });
    assert_eq!(bench.freshness(), Freshness::Stale);
}

#[test]
fn two_engines_do_not_start_on_one_gpu_at_once() {
    let mut bench = Bench::new();
    assert_eq!(bench.bind("first", 20, 0), ["GPU-a"]);
    assert_eq!(bench.bind("second", 20, 0), ["GPU-b"], "beside the first it would fit more tightly");
    let third = bench.wait("third", 20, 0);
    let refused = Misfit::EngineStarting { starting: 2, asked: 1 };
    assert_eq!(bench.verdict(&third), Err(refused));
    assert_eq!(bench.bind("job", 20, -1), ["GPU-a"], "a class that is not of engines may join");
    bench.see_bound("first", 20, Some(&["GPU-a"]), false);
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_start_gate_opens_after_twice_the_time_the_start_should_take() {
    let mut bench = Bench::new();
    bench.bind("first", 15, 0);
    bench.bind("second", 15, 0);
    let third = bench.wait("third", 20, 0);
    // 15 GiB: 16.1 s over the network, 5.4 s from disk, 20 s of start.
    bench.pass(82);
    assert!(matches!(bench.verdict(&third), Err(Misfit::EngineStarting { .. })));
    bench.pass(1);
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_start_gate_opens_when_the_pod_is_released_or_its_binding_fails() {
    let mut bench = Bench::new();
    bench.bind("first", 15, 0);
    bench.wait("second", 15, 0);
    bench.ledger.assume(&uid("second"), &node()).unwrap();
    let third = bench.wait("third", 20, 0);
    assert!(bench.verdict(&third).is_err());
    bench.ledger.forget(&uid("second"));
    assert_eq!(bench.verdict(&third), Ok(()));
    bench.ledger.assume(&uid("second"), &node()).unwrap();
    bench.ledger.release(&uid("first"));
    assert_eq!(bench.verdict(&third), Ok(()));
}

#[test]
fn a_gpu_whose_engines_are_full_takes_no_more_of_a_class_that_minds() {
    let mut bench = Bench::new();
    bench.see_bound("engine", 30, Some(&["GPU-a"]), false);
    bench.see_bound("other", 85, Some(&["GPU-b"]), false);
    let serving = bench.wait("serving", 20, 0);
    let job = bench.wait("job", 20, -1);
    let full = |kv, queue| Pressure::of(Percent::new(kv), Some(queue));
    let at = |bench: &mut Bench, pressure| {
        bench.read_with([(30, &[("engine", 30)]), (85, &[("other", 85)])], pressure)
    };
    at(&mut bench, full(85, 0));
    assert_eq!(bench.verdict(&serving), Ok(()));
    assert_eq!(bench.verdict(&job).unwrap_err().code(), "engines-busy", "harvesting keeps further away");
    at(&mut bench, full(91, 0));
    assert_eq!(bench.verdict(&serving).unwrap_err().code(), "engines-busy");
    at(&mut bench, full(10, 33));
    assert_eq!(bench.verdict(&serving).unwrap_err().code(), "engines-busy");
    at(&mut bench, Pressure::default());
    assert_eq!(bench.verdict(&serving), Ok(()), "what is not known is not held against it");
}

#[test]
fn a_victim_is_gone_when_no_process_of_it_is_seen_any_more() {
    let mut bench = Bench::new();
    bench.bind("job", 80, -1);
    bench.bind("other", 80, -1);
    bench.read([(80, &[("job", 80)]), (80, &[("other", 80)])]);
    bench.wait("urgent", 60, 5);
    let deadline = bench.now + Millis::seconds(60);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    bench.ledger.hold(&uid("urgent"), hold).unwrap();
    bench.ledger.release(&uid("job"));
    let verdict = |bench: &Bench| bench.ledger.own_room(&uid("urgent")).unwrap().1;
    assert_eq!(
        verdict(&bench),
        Err(Misfit::VictimsLeaving { remaining: 1 }),
        "its memory is not given back yet"
    );
    assert!(!bench.ledger.held()[0].is_free);
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    assert!(verdict(&bench).is_ok());
    assert!(bench.ledger.held()[0].is_free);
}

#[test]
fn a_victim_that_ended_before_this_process_began_has_left_when_a_reading_shows_nothing_of_it() {
    let mut bench = Bench::new();
    bench.wait("urgent", 60, 5);
    let deadline = bench.now + Millis::seconds(60);
    bench.read([(80, &[("job", 80)]), (0, &[])]);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    let waiting = SeenWaiting { hold: Some(hold), ..SeenWaiting::default() };
    let demand = bench.ledger.entry(&uid("urgent")).unwrap().demand.clone();
    let (uid, key, state) = (uid("urgent"), key("urgent"), SeenState::Waiting(waiting));
    bench.ledger.see(Seen { uid, key, demand, state, shown: None });
    assert!(!bench.ledger.held()[0].is_free, "its process lives on");
    bench.read([(0, &[]), (0, &[])]);
    assert!(bench.ledger.held()[0].is_free);
}

#[test]
fn a_victim_of_before_this_process_began_is_waited_for_until_an_agent_should_have_spoken() {
    let mut bench = Bench::new();
    let demand = bench.wait("urgent", 60, 5);
    let deadline = bench.now + Millis::seconds(60);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    let state = SeenState::Waiting(SeenWaiting { hold: Some(hold), ..SeenWaiting::default() });
    bench.ledger.see(Seen { uid: uid("urgent"), key: key("urgent"), demand, state, shown: None });
    assert!(!bench.ledger.held()[0].is_free, "nobody has looked");
    bench.pass(9);
    assert!(!bench.ledger.held()[0].is_free);
    bench.pass(2);
    assert!(bench.ledger.held()[0].is_free, "there is no agent");
}

#[test]
fn a_victim_that_ends_while_its_agent_is_silent_is_waited_for() {
    let mut bench = Bench::new();
    bench.bind("job", 80, -1);
    bench.read([(80, &[("job", 80)]), (0, &[])]);
    bench.wait("urgent", 60, 5);
    let deadline = bench.now + Millis::seconds(600);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    bench.ledger.hold(&uid("urgent"), hold).unwrap();
    bench.pass(40);
    assert_eq!(bench.ledger.node(&node()).unwrap().freshness, Freshness::Expired);
    bench.ledger.release(&uid("job"));
    bench.pass(60);
    assert!(!bench.ledger.held()[0].is_free, "nobody has looked since it ended");
    bench.read([(0, &[]), (0, &[])]);
    assert!(bench.ledger.held()[0].is_free);
}

#[test]
fn of_those_who_were_refused_as_many_are_woken_as_would_fit() {
    let mut bench = Bench::new();
    bench.see_bound("other", 85, Some(&["GPU-b"]), false);
    bench.read([(70, &[]), (85, &[("other", 85)])]);
    (0..3).for_each(|_| bench.read([(70, &[]), (85, &[("other", 85)])]));
    for name in ["a", "b", "c"] {
        let demand = bench.wait(name, 40, if name == "c" { 7 } else { 0 });
        assert_eq!(bench.verdict(&demand).unwrap_err().code(), "no-room");
        let snapshot = bench.ledger.snapshot();
        bench.ledger.note_refused(&uid(name), Some(snapshot.set_of([0].into_iter())));
    }
    let woken = |bench: &mut Bench| placed(&mut bench.ledger);
    bench.pass(2);
    assert!(woken(&mut bench).is_empty(), "nothing has changed");
    bench.read([(0, &[]), (85, &[("other", 85)])]);
    assert_eq!(
        woken(&mut bench),
        [uid("c")],
        "two engines cannot start there at once, and the first comes first"
    );
    assert!(woken(&mut bench).is_empty(), "the seat is for the one who was woken");
    bench.ledger.drop_hold(&uid("c"));
    bench.ledger.begin_attempt(&uid("c"));
    bench.pass(4);
    bench.read([(0, &[]), (85, &[("other", 85)])]);
    assert_eq!(woken(&mut bench), [uid("a")], "who has asked has no claim any more");
    bench.ledger.begin_attempt(&uid("a"));
    bench.ledger.begin_attempt(&uid("b"));
    assert!(woken(&mut bench).is_empty(), "who asks is not waiting to be woken");
}

#[test]
fn refused_pods_are_looked_at_in_turn() {
    let mut bench = Bench::new();
    let names = ["a", "b", "c", "d", "e"];
    for name in names {
        bench.wait(name, 95, 0);
        let snapshot = bench.ledger.snapshot();
        bench.ledger.note_refused(&uid(name), Some(snapshot.set_of([0].into_iter())));
    }
    bench.pass(2);
    let mut look = || bench.ledger.pending(2).into_iter().map(|pending| pending.uid).collect::<BTreeSet<_>>();
    let looks: Vec<BTreeSet<PodUid>> = (0..5).map(|_| look()).collect();
    let round: Vec<PodUid> = names.iter().cycle().take(10).map(|name| uid(name)).collect();
    assert_eq!(looks, round.chunks(2).map(|two| two.iter().cloned().collect()).collect::<Vec<_>>());
}

#[test]
fn a_figure_that_is_missing_once_takes_back_nothing_that_was_known() {
    let mut bench = Bench::new();
    (0..3).for_each(|_| bench.read([(60, &[]), (0, &[])]));
    assert_eq!(bench.free(), [30, 90]);
    bench.pass(1);
    let unread = ["GPU-a", "GPU-b"].map(|uuid| GpuReading {
        uuid: gpu(uuid),
        used: None,
        attributed: Vec::new(),
        pressure: Pressure::NONE,
    });
    let reading = Reading {
        sampled: bench.now,
        gpus: unread.into(),
        holdings: Holdings::default(),
        in_flight: Vec::new(),
    };
    bench.ledger.read(&node(), reading);
    assert_eq!(bench.free(), [30, 85], "and where nothing was known, a margin");
    bench.read([(60, &[]), (0, &[])]);
    assert_eq!(bench.free(), [30, 90]);
}

#[test]
fn an_engine_that_was_just_offered_a_gpu_keeps_the_next_from_it() {
    let mut bench = Bench::new();
    bench.see_bound("tenant", 30, Some(&["GPU-a"]), false);
    let first = bench.wait("first", 20, 0);
    let second = bench.wait("second", 20, 0);
    let snapshot = bench.ledger.snapshot();
    let view = snapshot.node("n").unwrap();
    let seat = fit(view, &first).unwrap();
    assert_eq!(seat.iter().collect::<Vec<_>>(), [0], "beside the tenant it fits most tightly");
    bench.ledger.offer(&uid("first"), view, seat, bench.now);
    let next = fit(bench.ledger.snapshot().node("n").unwrap(), &second).unwrap();
    assert_eq!(next.iter().collect::<Vec<_>>(), [1], "there it would have to wait for the first one's start");
}

#[test]
fn no_engine_starts_where_room_is_held_for_one() {
    let mut bench = Bench::new();
    bench.bind("job", 60, -1);
    bench.bind("other", 85, -1);
    bench.wait("urgent", 40, 5);
    let deadline = bench.now + Millis::seconds(60);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    bench.ledger.hold(&uid("urgent"), hold).unwrap();
    let late = bench.wait("late", 10, 0);
    assert_eq!(bench.verdict(&late).unwrap_err().code(), "engine-starting");
    bench.ledger.release(&uid("job"));
    assert!(bench.ledger.own_room(&uid("urgent")).unwrap().1.is_ok(), "its own start is not in its way");
}

#[test]
fn a_victim_that_had_no_memory_yet_is_gone_when_somebody_has_looked() {
    let mut bench = Bench::new();
    bench.bind("job", 80, -1);
    bench.bind("other", 80, -1);
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    bench.wait("urgent", 60, 5);
    let deadline = bench.now + Millis::seconds(60);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: Arc::from([uid("job")]), deadline };
    bench.ledger.hold(&uid("urgent"), hold).unwrap();
    bench.pass(1);
    bench.ledger.release(&uid("job"));
    assert!(bench.ledger.own_room(&uid("urgent")).unwrap().1.is_err(), "it may have allocated since");
    bench.read([(0, &[]), (80, &[("other", 80)])]);
    assert!(bench.ledger.own_room(&uid("urgent")).unwrap().1.is_ok());
}

#[test]
fn what_a_victim_has_beyond_its_grant_leaves_with_it() {
    let mut bench = Bench::new();
    bench.bind("greedy", 20, -1);
    bench.bind("other", 85, -1);
    bench.read([(24, &[("greedy", 24)]), (85, &[("other", 85)])]);
    let whole = bench.wait("whole", 90, 5);
    let room = bench.ledger.room_for(&bench.ledger.claim(&uid("whole")), &node()).unwrap();
    let found = cheapest_victims(&room, &whole, Rules::Keep).unwrap();
    assert_eq!(found.victims, [uid("greedy")]);
    let deadline = bench.now + Millis::seconds(60);
    let hold =
        Hold { node: node(), devices: Arc::from([gpu("GPU-a")]), victims: found.victims.into(), deadline };
    assert_eq!(bench.ledger.hold(&uid("whole"), hold), Ok(()));
}

#[test]
fn whoever_waits_when_a_replica_begins_to_lead_may_have_been_refused_before() {
    let mut bench = Bench::new();
    bench.wait("old", 20, 0);
    bench.ledger.suppose_all_refused();
    bench.pass(2);
    assert_eq!(placed(&mut bench.ledger), [uid("old")]);
}
