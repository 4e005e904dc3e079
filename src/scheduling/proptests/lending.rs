//! VRAM that sleeping engines lend is never promised twice, whatever comes in between.
//!
//! The oracle is the hardware: a node whose processes have memory, beside an API server with its own record of pods, and a ledger
//! that learns of both late, is stored and loaded, or begins anew. Engines follow the protocol: they wake only after their pod
//! showed that this very request was answered.

use crate::ids::{GpuUuid, LeaderEpoch, ModelId, NodeName};
use crate::scheduling::audit::ledger::audit;
use crate::scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, WakeStatus};
use crate::scheduling::planning::{RecallWatch, loans_to_end};
use crate::scheduling::policy::{Class, LendingRules, Match, Policy, Preemptibility, SleepingRule};
use crate::scheduling::testkit::numbered::{key, node_name, uid};
use crate::scheduling::testkit::{START, classified, demand_of, unit_gpu};
use crate::scheduling::verbs::bind::{BindAnswer, BindAsked};
use crate::scheduling::verbs::binding::BindingWritten;
use crate::scheduling::verbs::observe::{
    DevicesReported, NodeObserved, PodDeleted, PodObserved, ReadingReported,
};
use crate::scheduling::verbs::tick::{ClockAdvanced, LeadershipBegan, PolicySet, Tick};
use crate::scheduling::verbs::{Change, Cluster, ClusterState};
use crate::scheduling::vocabulary::classification::PodTraits;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::disruption_info::{ObservedDisruptionInfo, ObservedLoan, PodDeletion};
use crate::scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::scheduling::vocabulary::node::NodeKind;
use crate::scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, SleepState};
use crate::units::{Bytes, Millis, Moment, Percent};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Of 100 B, a tenth is headroom.
const CAPACITY: u64 = 90;
const GPUS: u32 = 2;
const ENGINES: u8 = 4;
const PODS: u8 = 12;

#[derive(Debug, Clone)]
enum Step {
    /// A pod arrives and kube-scheduler binds it; the answer to its Binding may be lost.
    Bind(u8, bool),
    /// The watch shows what the API server has of a pod.
    Watch(u8),
    Sleep(u8),
    /// The engine's owner takes the annotation away.
    Withdraw(u8),
    Ask(u8),
    /// The engine wakes, if its pod shows that it may.
    Wake(u8),
    /// The planner looks: evicts, and sends what it has to say to pods.
    Plan,
    /// The API server takes the planner's next change of a pod's status.
    Land,
    /// A pod that is being deleted ends.
    End(u8),
    /// The driver gives back the memory of a pod that has ended.
    Free(u8),
    /// The agent samples; its report arrives later.
    Sample,
    Deliver,
    /// Three reports a second apart, which arrive at once.
    Settle,
    Restart,
    Store,
    Policy(bool),
    /// All awake engines have so much of their KV caches in use.
    Load(u8),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (engine, pod) = (0..ENGINES, 0..PODS);
    prop_oneof![
        8 => (pod.clone(), any::<bool>()).prop_map(|(pod, answered)| Step::Bind(pod, answered)),
        6 => pod.clone().prop_map(Step::Watch),
        6 => engine.clone().prop_map(Step::Sleep),
        3 => engine.clone().prop_map(Step::Withdraw),
        4 => engine.clone().prop_map(Step::Ask),
        5 => engine.prop_map(Step::Wake),
        6 => Just(Step::Plan),
        6 => Just(Step::Land),
        5 => pod.clone().prop_map(Step::End),
        5 => pod.prop_map(Step::Free),
        3 => Just(Step::Sample),
        3 => Just(Step::Deliver),
        8 => Just(Step::Settle),
        1 => Just(Step::Restart),
        1 => Just(Step::Store),
        1 => any::<bool>().prop_map(Step::Policy),
        2 => prop::sample::select(vec![20, 85, 97]).prop_map(Step::Load),
        3 => (1u64..3000).prop_map(Step::Pass),
    ]
}

fn policy(lends: bool) -> Policy {
    let of = |class: &str| Match { priority_classes: vec![class.into()], ..Match::default() };
    let engines = Class {
        matches: of("engines"),
        engine: false,
        sleeping: if lends { SleepingRule::Lend } else { SleepingRule::Keep },
        ..Class::named("engines")
    };
    let jobs = Class {
        matches: of("jobs"),
        engine: false,
        eviction: Preemptibility::ForHigherPriority,
        ..Class::named("jobs")
    };
    let others = Class { engine: false, ..Class::named("others") };
    let mut policy = Policy::default().with_classes(vec![engines, jobs, others]).unwrap();
    policy.planning.lending =
        LendingRules { after: Millis::seconds(2), margin: Bytes(2), ..LendingRules::default() };
    policy.planning.pressure.as_mut().unwrap().evict_after = Millis::seconds(2);
    policy
}

/// Pods 0 to 3 are engines, 4 to 10 jobs, and 11 is another.
fn demand(pod: u8, policy: &Policy) -> Demand {
    let vram = [60, 50, 40, 30, 20, 25, 30, 35, 40, 45, 50, 30][usize::from(pod)];
    let (class, priority) = match pod {
        0..ENGINES => ("engines", 10),
        11 => ("others", 0),
        _ => ("jobs", -10),
    };
    let traits = PodTraits { priority, priority_class: class.into(), ..PodTraits::default() };
    classified(demand_of(vram, 1, Sharing::Shared, priority), traits, policy)
}

/// A pod as the API server has it.
#[derive(Debug, Clone, Default)]
struct Record {
    devices: Option<Arc<[GpuUuid]>>,
    borrows: bool,
    leaving: bool,
    request: Option<Arc<str>>,
    told: Option<Arc<str>>,
}

/// What a pod's processes have.
#[derive(Debug, Clone)]
struct Process {
    gpu: GpuUuid,
    granted: u64,
    asleep: bool,
}

impl Process {
    fn used(&self) -> u64 {
        if self.asleep { self.granted / 10 } else { self.granted }
    }
}

struct World {
    cluster: Cluster,
    lends: bool,
    records: BTreeMap<u8, Record>,
    processes: BTreeMap<u8, Process>,
    reports: VecDeque<NodeReading>,
    /// The planner's writes that the API server has not taken yet.
    writes: VecDeque<(u8, Option<Arc<str>>)>,
    requests: u32,
    kv_cache: u8,
    recall: RecallWatch,
    borrowed: usize,
    woken_over: usize,
    wakes: usize,
}

fn node() -> NodeName {
    node_name(0)
}

impl World {
    fn new(lends: bool) -> Self {
        let mut world = Self {
            cluster: Cluster::new(Arc::new(policy(lends))),
            lends,
            records: BTreeMap::new(),
            processes: BTreeMap::new(),
            reports: VecDeque::new(),
            writes: VecDeque::new(),
            requests: 0,
            kv_cache: 0,
            recall: RecallWatch::default(),
            borrowed: 0,
            woken_over: 0,
            wakes: 0,
        };
        world.begin(START);
        world
    }

    fn apply<C: Change>(&mut self, change: C) -> C::Output {
        self.cluster.apply(change)
    }

    /// A process that knows nothing begins to lead.
    fn begin(&mut self, now: Moment) {
        self.cluster = Cluster::new(Arc::new(policy(self.lends)));
        self.recall = RecallWatch::default();
        self.apply(ClockAdvanced(now));
        self.apply(NodeObserved::new(node(), NodeKind::Stowage));
        let devices = (0..GPUS).map(|index| unit_gpu(0, index)).collect();
        self.apply(DevicesReported { node: node(), devices }).unwrap();
        for pod in self.records.keys().copied().collect::<Vec<_>>() {
            self.watch(pod);
        }
        self.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
    }

    fn watch(&mut self, pod: u8) {
        let Some(record) = self.records.get(&pod).cloned() else {
            return self.apply(PodDeleted(uid(pod)));
        };
        let demand = demand(pod, self.cluster.policy());
        let state = match &record.devices {
            None => ObservedPhase::Waiting(ObservedWaiting::default()),
            Some(_) => ObservedPhase::Bound {
                node: node(),
                devices: record.devices.clone(),
                starting: false,
                ran: None,
            },
        };
        let leaving = PodDeletion { asked_ago: Millis(0), grace: Millis::seconds(30) };
        let observed = ObservedDisruptionInfo {
            leaving: record.leaving.then_some(leaving),
            loan: ObservedLoan {
                borrows: record.borrows,
                wake_requested: record.request,
                wakeable: record.told,
            },
            ..ObservedDisruptionInfo::default()
        };
        self.apply(PodObserved(PodObservation {
            uid: uid(pod),
            key: key(pod),
            demand,
            state,
            observed: Some(observed),
        }));
    }

    fn bind(&mut self, pod: u8, is_answered: bool) {
        // A name is used again only when nothing of the last pod is left.
        if self.processes.contains_key(&pod) || self.records.contains_key(&pod) {
            return;
        }
        self.records.insert(pod, Record::default());
        self.watch(pod);
        let asked = BindAsked { uid: uid(pod), key: key(pod), node: node() };
        let Ok(BindAnswer::Write(decision)) = self.apply(asked) else {
            self.records.remove(&pod);
            return self.watch(pod);
        };
        let placement = decision.placement;
        let record = self.records.get_mut(&pod).unwrap();
        record.devices = Some(placement.devices.clone());
        record.borrows = !placement.borrowed_from.is_empty();
        self.borrowed += usize::from(record.borrows);
        // At once all it may have.
        let gpu = placement.devices[0].clone();
        self.processes.insert(pod, Process { gpu, granted: placement.granted.0, asleep: false });
        if is_answered {
            self.apply(BindingWritten { uid: uid(pod), node: node(), devices: Some(placement.devices) });
        }
    }

    fn sample(&mut self) {
        let gpu = |index: u32| {
            let uuid = unit_gpu(0, index).uuid;
            let here = || self.processes.iter().filter(|(_, process)| process.gpu == uuid);
            let mut attributed: Vec<_> =
                here().map(|(pod, process)| (uid(*pod), Bytes(process.used()))).collect();
            attributed.sort_unstable();
            let used = Some(attributed.iter().map(|(_, bytes)| *bytes).sum());
            let engine_load = EngineLoad::of(Percent::new(self.kv_cache), Some(0));
            GpuReading { uuid: uuid.clone(), used, attributed, engine_load }
        };
        let state = |process: &Process| if process.asleep { SleepState::Asleep } else { SleepState::Awake };
        let engines = self.processes.iter().filter(|(pod, _)| **pod < ENGINES);
        let mut sleep: Vec<_> = engines.map(|(pod, process)| (uid(*pod), state(process))).collect();
        sleep.sort_unstable();
        let gpus = (0..GPUS).map(gpu).collect();
        let engine = |(uid, state): &(_, SleepState)| EngineReading {
            pod: crate::ids::PodUid::clone(uid),
            model: ModelId::parse("m").unwrap(),
            gpus: [self.processes[&number(uid)].gpu.clone()].into(),
            state: match state {
                SleepState::Awake => EngineModelState::Resident,
                SleepState::Asleep => EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
            },
            reusable_in: None,
            seen: self.cluster.now(),
        };
        let engines = sleep.iter().map(engine).collect();
        let sampled = self.cluster.now();
        let reading = NodeReading { sampled, gpus, sleep, engines, ..NodeReading::default() };
        self.reports.push_back(reading);
    }

    fn deliver(&mut self) {
        if let Some(reading) = self.reports.pop_front() {
            self.woken_over += self.apply(ReadingReported { node: node(), reading }).len();
        }
    }

    fn pass(&mut self, millis: u64) {
        let now = self.cluster.now() + Millis(millis);
        self.apply(Tick { now, is_leading: true });
    }

    fn settle(&mut self) {
        for _ in 0..3 {
            self.pass(1000);
            self.sample();
        }
        while !self.reports.is_empty() {
            self.deliver();
        }
    }

    fn plan(&mut self) {
        let recalls = self.recall.look(&self.cluster);
        self.apply(recalls);
        let going = self.records.iter().filter(|(_, record)| record.leaving);
        let going: BTreeSet<_> = going.map(|(pod, _)| uid(*pod)).collect();
        for eviction in loans_to_end(&self.cluster, &going, &BTreeSet::new()) {
            let pod = number(&eviction.uid);
            let Some(record) = self.records.get_mut(&pod) else { continue };
            assert!(record.borrows, "only borrowers are evicted: {pod}");
            record.leaving = true;
        }
        for WakeStatus { uid, request, told, is_wakeable, .. } in self.cluster.open_wakes() {
            match (request, told) {
                (Some(request), told) if is_wakeable && told.as_ref() != Some(&request) => {
                    self.writes.push_back((number(&uid), Some(request)));
                }
                (None, Some(_)) => self.writes.push_back((number(&uid), None)),
                _ => {}
            }
        }
    }

    fn land(&mut self) {
        if let Some((pod, told)) = self.writes.pop_front()
            && let Some(record) = self.records.get_mut(&pod)
        {
            record.told = told;
        }
    }

    fn wake(&mut self, engine: u8) {
        let Some(record) = self.records.get(&engine) else { return };
        if record.request.is_some() && record.told == record.request {
            let process = self.processes.get_mut(&engine).expect("a bound engine runs");
            self.wakes += usize::from(std::mem::replace(&mut process.asleep, false));
        }
    }

    fn happens(&mut self, step: &Step) {
        match *step {
            Step::Bind(pod, is_answered) => self.bind(pod, is_answered),
            Step::Watch(pod) => self.watch(pod),
            Step::Sleep(engine) => {
                if let Some(process) = self.processes.get_mut(&engine) {
                    process.asleep = true;
                }
            }
            Step::Withdraw(engine) => {
                let sleeps = self.processes.get(&engine).is_some_and(|process| process.asleep);
                if let Some(record) = self.records.get_mut(&engine).filter(|_| sleeps) {
                    record.request = None;
                }
            }
            Step::Ask(engine) => {
                self.requests += 1;
                let request = self.requests.to_string().into();
                // An engine that is awake before it ever slept need not ask.
                if let Some(record) = self.records.get_mut(&engine).filter(|record| record.devices.is_some())
                {
                    record.request = Some(request);
                }
            }
            Step::Wake(engine) => self.wake(engine),
            Step::Plan => self.plan(),
            Step::Land => self.land(),
            Step::End(pod) => {
                if self.records.get(&pod).is_some_and(|record| record.leaving || pod == 11) {
                    self.records.remove(&pod);
                    self.watch(pod);
                    if pod == 11 {
                        self.processes.remove(&pod);
                    }
                }
            }
            Step::Free(pod) => {
                if !self.records.contains_key(&pod) {
                    self.processes.remove(&pod);
                }
            }
            Step::Sample => self.sample(),
            Step::Deliver => self.deliver(),
            Step::Settle => self.settle(),
            Step::Restart => {
                // What an earlier leader wrote has landed before the next one acts.
                while !self.writes.is_empty() {
                    self.land();
                }
                self.begin(self.cluster.now());
            }
            Step::Store => {
                let stored = serde_json::to_string(&self.cluster.export()).unwrap();
                let state: ClusterState = serde_json::from_str(&stored).unwrap();
                self.cluster = Cluster::load(state).unwrap();
                let again: serde_json::Value = serde_json::to_value(self.cluster.export()).unwrap();
                assert_eq!(again, serde_json::from_str::<serde_json::Value>(&stored).unwrap());
            }
            Step::Policy(lends) => {
                self.lends = lends;
                self.apply(PolicySet { policy: policy(lends), classified: Default::default() });
            }
            Step::Load(kv_cache) => self.kv_cache = kv_cache,
            Step::Pass(millis) => self.pass(millis),
        }
    }

    /// What processes have of each GPU is at most what there is, and the ledger agrees with itself. A pod that comes after one
    /// that has ended needs longer to start than the driver needs to give memory back; an engine that wakes does not.
    fn check(&self, after: &Step) {
        let counts = |pod: &u8| self.records.contains_key(pod) || matches!(after, Step::Wake(_));
        for index in 0..GPUS {
            let uuid = unit_gpu(0, index).uuid;
            let here = self.processes.iter().filter(|(pod, process)| process.gpu == uuid && counts(pod));
            let here: Vec<_> = here.collect();
            let used: u64 = here.iter().map(|(_, process)| process.used()).sum();
            assert!(used <= CAPACITY, "after {after:?} {used} B are used on {uuid}: {here:?}");
        }
        assert_eq!(audit(&self.cluster), [], "after {after:?}");
    }

    /// Everything that is under way comes to its end.
    fn come_to_rest(&mut self) {
        for _ in 0..6 {
            (0..PODS).for_each(|pod| self.watch(pod));
            self.settle();
            self.plan();
            while !self.writes.is_empty() {
                self.land();
            }
            for pod in 0..PODS {
                self.happens(&Step::End(pod));
                self.happens(&Step::Free(pod));
            }
        }
    }
}

fn number(uid: &crate::ids::PodUid) -> u8 {
    uid.as_str().trim_start_matches("uid-").parse().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn an_engine_that_asked_never_lacks_memory_and_is_always_answered(
        lends in prop::bool::weighted(0.9),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new(lends);
        for step in &steps {
            world.happens(step);
            world.check(step);
        }
        for engine in 0..ENGINES {
            world.happens(&Step::Ask(engine));
        }
        world.come_to_rest();
        let engines: Vec<u8> = world.processes.keys().copied().filter(|pod| *pod < ENGINES).collect();
        for engine in engines {
            world.happens(&Step::Wake(engine));
            world.check(&Step::Wake(engine));
            let record = &world.records[&engine];
            prop_assert!(!world.processes[&engine].asleep, "{engine} is not answered: {record:?}");
        }
    }
}

/// The random histories above do what they are for.
#[test]
fn an_engine_sleeps_its_vram_is_borrowed_and_given_back_before_it_wakes() {
    let mut world = World::new(true);
    world.happens(&Step::Bind(0, true));
    world.happens(&Step::Bind(1, true));
    world.happens(&Step::Bind(10, true));
    assert!(!world.records.contains_key(&10), "30 B and 40 B are free");
    world.happens(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.happens(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world.happens(&Step::Bind(11, true));
    assert!(!world.records[&11].borrows && world.records[&11].devices.is_some(), "what is free is not lent");
    world.happens(&Step::Ask(0));
    world.watch(0);
    world.plan();
    assert!(world.records[&10].leaving && world.writes.is_empty(), "it is not told before the room is free");
    world.happens(&Step::End(10));
    world.settle();
    world.plan();
    assert!(world.writes.is_empty(), "the driver has not given the memory back");
    world.happens(&Step::Free(10));
    world.settle();
    world.plan();
    world.land();
    world.happens(&Step::Wake(0));
    world.check(&Step::Wake(0));
    assert_eq!((world.wakes, world.borrowed, world.woken_over), (1, 1, 0));
}

#[test]
fn an_engine_that_wakes_without_asking_is_named_once_and_its_loan_ends() {
    let mut world = World::new(true);
    world.happens(&Step::Bind(0, true));
    world.happens(&Step::Bind(1, true));
    world.happens(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.happens(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world.processes.get_mut(&0).unwrap().asleep = false;
    world.settle();
    assert_eq!(world.woken_over, 1);
    world.plan();
    assert!(world.records[&10].leaving);
    world.happens(&Step::Bind(9, true));
    assert!(!world.records.contains_key(&9), "nothing more is lent");
}

#[test]
fn an_engine_that_flaps_costs_its_borrowers_at_most_six_evictions_in_an_hour() {
    let mut world = World::new(true);
    let mut policy = policy(true);
    policy.planning.lending.after = Millis::seconds(60);
    world.apply(PolicySet { policy, classified: Default::default() });
    world.happens(&Step::Bind(0, true));
    world.happens(&Step::Bind(1, true));
    let mut evicted = Vec::new();
    let begin = world.cluster.now();
    while world.cluster.now().since(begin) < Millis::seconds(4 * 3600) {
        world.processes.get_mut(&0).unwrap().asleep = true;
        // It sleeps until its VRAM is borrowed, and wakes at once then.
        world.happens(&Step::Bind(10, true));
        world.settle();
        if world.records.contains_key(&10) {
            world.processes.get_mut(&0).unwrap().asleep = false;
            world.settle();
            world.plan();
            world.watch(10);
            assert!(world.records[&10].leaving);
            world.happens(&Step::End(10));
            world.happens(&Step::Free(10));
            evicted.push(world.cluster.now());
        }
    }
    assert!(evicted.len() > 4, "{evicted:?}");
    for (first, _) in evicted.iter().enumerate() {
        let within = evicted[first..].iter().filter(|at| at.since(evicted[first]) < Millis::seconds(3600));
        assert!(within.count() <= 6, "{evicted:?}");
    }
}

/// An engine sleeps, another of its model is awake, and pod 10 borrows.
fn lent_out() -> World {
    let mut world = World::new(true);
    world.happens(&Step::Bind(0, true));
    world.happens(&Step::Bind(1, true));
    world.happens(&Step::Sleep(0));
    world.settle();
    world.settle();
    world.happens(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
    world
}

#[test]
fn a_full_model_takes_back_what_its_sleeping_engine_lent_and_tells_it_nothing() {
    let mut world = lent_out();
    world.kv_cache = 97;
    world.settle();
    world.plan();
    assert!(!world.records[&10].leaving, "it may be a spike");
    world.settle();
    world.plan();
    assert!(world.records[&10].leaving && world.writes.is_empty(), "it has not asked");
    world.happens(&Step::End(10));
    world.happens(&Step::Free(10));
    // Not busy enough to begin, and not idle enough to end.
    world.kv_cache = 85;
    for _ in 0..10 {
        world.settle();
        world.plan();
    }
    world.happens(&Step::Bind(10, true));
    assert!(!world.records.contains_key(&10), "nothing is lent meanwhile");
    assert!(world.writes.is_empty());
    // Its room is free when it asks.
    world.happens(&Step::Ask(0));
    world.watch(0);
    world.plan();
    assert_eq!(world.writes.len(), 1);
}

#[test]
fn an_engine_lends_again_some_time_after_its_model_is_full_no_more() {
    let mut world = lent_out();
    world.kv_cache = 97;
    for _ in 0..2 {
        world.settle();
        world.plan();
    }
    world.happens(&Step::Store);
    world.kv_cache = 20;
    world.settle();
    world.plan();
    world.happens(&Step::End(10));
    world.happens(&Step::Free(10));
    world.settle();
    world.happens(&Step::Bind(10, true));
    assert!(!world.records.contains_key(&10), "its next loan begins later than its first");
    world.settle();
    world.settle();
    world.happens(&Step::Bind(10, true));
    assert!(world.records[&10].borrows);
}

#[test]
fn a_load_that_jitters_evicts_borrowers_at_most_six_times_in_an_hour() {
    let mut world = lent_out();
    let mut policy = policy(true);
    policy.planning.lending.after = Millis::seconds(60);
    world.apply(PolicySet { policy, classified: Default::default() });
    let mut evicted = Vec::new();
    let begin = world.cluster.now();
    while world.cluster.now().since(begin) < Millis::seconds(4 * 3600) {
        // The load rises as soon as the VRAM is borrowed, and falls as soon as it is not.
        world.kv_cache = if world.records.contains_key(&10) { 97 } else { 20 };
        for _ in 0..2 {
            world.settle();
            world.plan();
        }
        if world.records.get(&10).is_some_and(|record| record.leaving) {
            world.happens(&Step::End(10));
            world.happens(&Step::Free(10));
            evicted.push(world.cluster.now());
        }
        world.happens(&Step::Bind(10, true));
    }
    assert!(evicted.len() > 4, "{evicted:?}");
    for (first, _) in evicted.iter().enumerate() {
        let within = evicted[first..].iter().filter(|at| at.since(evicted[first]) < Millis::seconds(3600));
        assert!(within.count() <= 6, "{evicted:?}");
    }
}

#[test]
fn a_policy_without_it_waits_until_the_engine_asks() {
    let mut world = lent_out();
    let mut policy = policy(true);
    policy.planning.lending.reclaim_on_load = false;
    world.apply(PolicySet { policy, classified: Default::default() });
    world.kv_cache = 97;
    for _ in 0..5 {
        world.settle();
        world.plan();
    }
    assert!(!world.records[&10].leaving);
}
