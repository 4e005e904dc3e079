//! The hardware, the API server and what is under way between them and the ledger.

use super::Step;
use crate::audit::ledger::audit;
use crate::ids::{GpuUuid, LeaderEpoch, ModelId, NodeName};
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation, WakeStatus};
use crate::planning::{RecallWatch, loans_to_end};
use crate::policy::{Class, LendingRules, Match, Policy, Preemptibility, SleepingRule, UnusedRule};
use crate::testkit::numbered::{key, node_name, uid};
use crate::testkit::{START, demand_of, reclassified, unit_gpu};
use crate::units::{Bytes, Millis, Moment, Percent};
use crate::verbs::bind::{BindAnswer, BindAsked};
use crate::verbs::binding::BindingWritten;
use crate::verbs::observe::{
    DevicesReported, NodeObserved, PodDeleted, PodObserved, ReadingReported,
};
use crate::verbs::tick::{ClockAdvanced, LeadershipBegan, PolicySet, Tick};
use crate::verbs::{Change, Cluster, ClusterState};
use crate::vocabulary::classification::{Isolation, PodTraits};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, ObservedLoan, PodDeletion};
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, SleepState};
use crate::vocabulary::node_signs::NodeSigns;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Of 100 B, a tenth is headroom.
pub(super) const CAPACITY: u64 = 90;
pub(super) const GPUS: u32 = 2;
pub(super) const ENGINES: u8 = 4;
pub(super) const PODS: u8 = 12;

/// What engines lend, and who gives it back to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lending {
    Nothing,
    /// What they do not use while they sleep; they ask before they wake.
    Asleep,
    /// What they do not use: the driver gives it back to them. They ask before they wake as well.
    Unused,
}

pub(super) fn policy(lends: Lending) -> Policy {
    let of = |class: &str| Match {
        priority_classes: vec![class.into()],
        ..Match::default()
    };
    let engines = Class {
        matches: of("engines"),
        engine: false,
        sleeping: match lends {
            Lending::Nothing => SleepingRule::Keep,
            Lending::Asleep | Lending::Unused => SleepingRule::Lend,
        },
        unused: match lends {
            Lending::Unused => UnusedRule::Lend,
            Lending::Nothing | Lending::Asleep => UnusedRule::Keep,
        },
        isolation: Isolation::Preferred,
        ..Class::new("engines")
    };
    let jobs = Class {
        matches: of("jobs"),
        engine: false,
        eviction: Preemptibility::ForHigherPriority,
        isolation: Isolation::Preferred,
        ..Class::new("jobs")
    };
    let loose_jobs = Class {
        matches: of("loose-jobs"),
        isolation: Isolation::None,
        ..Class {
            name: "loose-jobs".into(),
            ..jobs.clone()
        }
    };
    let others = Class {
        engine: false,
        ..Class::new("others")
    };
    let mut policy = Policy::default()
        .with_classes(vec![engines, jobs, loose_jobs, others])
        .unwrap();
    policy.planning.lending = LendingRules {
        after: Millis::seconds(2),
        margin: Bytes(2),
        unused_after: Millis::seconds(2),
        unused_margin: Bytes(4),
        ..LendingRules::default()
    };
    policy.planning.pressure.as_mut().unwrap().evict_after = Millis::seconds(2);
    policy
}

/// Pods 0 to 3 are engines, 4 to 10 jobs (5, 7 and 9 without limits), and 11 is another, without limits.
fn demand(pod: u8, policy: &Policy) -> Demand {
    let vram = [60, 50, 40, 30, 20, 25, 30, 35, 40, 45, 50, 30][usize::from(pod)];
    let (class, priority) = match pod {
        0..=3 => ("engines", 10),
        11 => ("others", 0),
        5 | 7 | 9 => ("loose-jobs", -10),
        _ => ("jobs", -10),
    };
    let traits = PodTraits {
        priority,
        priority_class: class.into(),
        ..PodTraits::default()
    };
    reclassified(
        demand_of(vram, 1, Sharing::Shared, priority),
        traits,
        policy,
    )
}

/// A pod as the API server has it.
#[derive(Debug, Clone, Default)]
pub(super) struct Record {
    pub devices: Option<Arc<[GpuUuid]>>,
    pub borrows: bool,
    pub has_limits: bool,
    pub leaving: bool,
    pub request: Option<Arc<str>>,
    pub answered_request: Option<Arc<str>>,
}

/// What a pod's processes have.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub gpu: GpuUuid,
    pub granted: u64,
    /// What it has of that while it is awake.
    pub held: u64,
    /// It borrows, and the driver keeps nothing for it.
    pub is_ended_by_driver: bool,
    pub asleep: bool,
    /// It has crashed, and loads again as soon as there is room.
    pub down: bool,
}

impl Process {
    fn used(&self) -> u64 {
        match (self.down, self.asleep) {
            (true, _) => 0,
            (false, true) => self.held.min(self.granted / 10),
            (false, false) => self.held,
        }
    }
}

pub(super) struct World {
    pub cluster: Cluster,
    pub lends: Lending,
    /// The driver keeps limits, whatever the policy says later.
    has_driver: bool,
    /// What the node's condition says.
    pub keeps_limits: bool,
    pub records: BTreeMap<u8, Record>,
    pub processes: BTreeMap<u8, Process>,
    pub reports: VecDeque<NodeReading>,
    /// The planner's writes that the API server has not taken yet.
    pub writes: VecDeque<(u8, Option<Arc<str>>)>,
    pub requests: u32,
    pub kv_cache: u8,
    pub recall: RecallWatch,
    pub borrowed: usize,
    pub woken_over: usize,
    pub taken_back: u32,
    pub wakes: usize,
    /// Pods that the driver has ended.
    pub ended_by_driver: usize,
}

fn node() -> NodeName {
    node_name(0)
}

impl World {
    pub fn new(lends: Lending) -> Self {
        let mut world = Self {
            cluster: Cluster::new(Arc::new(policy(lends))),
            lends,
            has_driver: lends == Lending::Unused,
            keeps_limits: lends == Lending::Unused,
            records: BTreeMap::new(),
            processes: BTreeMap::new(),
            reports: VecDeque::new(),
            writes: VecDeque::new(),
            requests: 0,
            kv_cache: 0,
            recall: RecallWatch::default(),
            borrowed: 0,
            woken_over: 0,
            taken_back: 0,
            wakes: 0,
            ended_by_driver: 0,
        };
        world.begin(START);
        world
    }

    pub fn apply<C: Change>(&mut self, change: C) -> C::Output {
        self.cluster.apply(change)
    }

    /// A process that knows nothing begins to lead.
    fn begin(&mut self, now: Moment) {
        self.cluster = Cluster::new(Arc::new(policy(self.lends)));
        self.recall = RecallWatch::default();
        self.apply(ClockAdvanced(now));
        self.observe_node();
        let devices = (0..GPUS).map(|index| unit_gpu(0, index)).collect();
        self.apply(DevicesReported {
            node: node(),
            devices,
            are_all: true,
        })
        .unwrap();
        for pod in self.records.keys().copied().collect::<Vec<_>>() {
            self.watch(pod);
        }
        self.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
    }

    fn observe_node(&mut self) {
        self.apply(NodeObserved {
            signs: NodeSigns {
                keeps_vram_limits: self.keeps_limits,
                ..NodeSigns::default()
            },
            ..NodeObserved::new(node(), NodeKind::Stowage)
        });
    }

    pub fn watch(&mut self, pod: u8) {
        let Some(record) = self.records.get(&pod).cloned() else {
            return self.apply(PodDeleted(uid(pod)));
        };
        let demand = demand(pod, self.cluster.ledger().policy());
        let state = match &record.devices {
            None => ObservedPhase::Waiting(ObservedWaiting::default()),
            Some(_) => ObservedPhase::Bound {
                node: node(),
                devices: record.devices.clone(),
                starting: false,
                ran: None,
            },
        };
        let leaving = PodDeletion {
            asked_ago: Millis(0),
            grace: Millis::seconds(30),
        };
        let observed = ObservedDisruptionInfo {
            leaving: record.leaving.then_some(leaving),
            loan: ObservedLoan {
                borrows: record.borrows,
                has_vram_limits: record.has_limits,
                wake_requested: record.request,
                wakeable: record.answered_request,
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
        let query = BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node(),
        };
        let Ok(BindAnswer::Write(decision)) = self.apply(query) else {
            self.records.remove(&pod);
            return self.watch(pod);
        };
        let placement = decision.placement;
        let record = self.records.get_mut(&pod).unwrap();
        record.devices = Some(placement.devices.clone());
        record.borrows = !placement.borrowed_from.is_empty();
        record.has_limits = placement.has_vram_limits;
        self.borrowed += usize::from(record.borrows);
        // At once all it may have.
        let gpu = placement.devices[0].clone();
        self.processes.insert(
            pod,
            Process {
                gpu,
                granted: placement.granted.0,
                held: placement.granted.0,
                is_ended_by_driver: placement.has_vram_limits
                    && !placement.borrowed_from.is_empty(),
                asleep: false,
                down: false,
            },
        );
        if is_answered {
            self.apply(BindingWritten {
                uid: uid(pod),
                node: node(),
                devices: Some(placement.devices),
            });
        }
        self.end_borrowers_after(pod);
    }

    fn sample(&mut self) {
        let gpu = |index: u32| {
            let uuid = unit_gpu(0, index).uuid;
            let here = || {
                self.processes
                    .iter()
                    .filter(|(_, process)| process.gpu == uuid)
            };
            let mut attributed: Vec<_> = here()
                .map(|(pod, process)| (uid(*pod), Bytes(process.used())))
                .collect();
            attributed.retain(|(_, used)| *used > Bytes::ZERO);
            attributed.sort_unstable();
            let used = Some(attributed.iter().map(|(_, bytes)| *bytes).sum());
            let engine_load = EngineLoad::new(Percent::new(self.kv_cache), Some(0));
            GpuReading {
                uuid: uuid.clone(),
                used,
                attributed,
                engine_load,
            }
        };
        let state = |process: &Process| {
            if process.asleep {
                SleepState::Asleep
            } else {
                SleepState::Awake
            }
        };
        let engines = self
            .processes
            .iter()
            .filter(|(pod, process)| **pod < ENGINES && !process.down);
        let mut sleep: Vec<_> = engines
            .map(|(pod, process)| (uid(*pod), state(process)))
            .collect();
        sleep.sort_unstable();
        let gpus = (0..GPUS).map(gpu).collect();
        let engine = |(uid, state): &(_, SleepState)| EngineReading {
            pod: crate::ids::PodUid::clone(uid),
            model: ModelId::parse("m").unwrap(),
            gpus: [self.processes[&number(uid)].gpu.clone()].into(),
            state: match state {
                SleepState::Awake | SleepState::Starting => EngineModelState::Resident,
                SleepState::Asleep => EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
            },
            reusable_in: None,
            observed_at: self.cluster.ledger().now(),
        };
        let engines = sleep.iter().map(engine).collect();
        let sampled = self.cluster.ledger().now();
        let reading = NodeReading {
            sampled,
            gpus,
            sleep,
            engines,
            ..NodeReading::default()
        };
        self.reports.push_back(reading);
    }

    fn deliver(&mut self) {
        if let Some(reading) = self.reports.pop_front() {
            let ended = self.apply(ReadingReported {
                node: node(),
                reading: reading.into(),
            });
            self.woken_over += ended.woken.len();
            self.taken_back += ended.taken_back;
        }
    }

    fn advance(&mut self, millis: u64) {
        let now = self.cluster.ledger().now() + Millis(millis);
        self.apply(Tick {
            now,
            is_leading: true,
        });
    }

    pub fn settle(&mut self) {
        for _ in 0..3 {
            self.advance(1000);
            self.sample();
        }
        while !self.reports.is_empty() {
            self.deliver();
        }
    }

    pub fn plan(&mut self) {
        let recalls = self.recall.check(self.cluster.ledger());
        self.apply(recalls);
        let going = self.records.iter().filter(|(_, record)| record.leaving);
        let going: BTreeSet<_> = going.map(|(pod, _)| uid(*pod)).collect();
        for eviction in loans_to_end(self.cluster.ledger(), &going, &BTreeSet::new()) {
            let pod = number(&eviction.uid);
            let Some(record) = self.records.get_mut(&pod) else {
                continue;
            };
            assert!(record.borrows, "only borrowers are evicted: {pod}");
            record.leaving = true;
        }
        for WakeStatus {
            uid,
            request,
            answered_request: told,
            is_wakeable,
            ..
        } in self.cluster.ledger().unanswered_wakes()
        {
            match (request, told) {
                (Some(request), answered) if is_wakeable && answered.as_ref() != Some(&request) => {
                    self.writes.push_back((number(&uid), Some(request)));
                }
                (None, Some(_)) => self.writes.push_back((number(&uid), None)),
                _ => {}
            }
        }
    }

    pub fn commit(&mut self) {
        if let Some((pod, told)) = self.writes.pop_front()
            && let Some(record) = self.records.get_mut(&pod)
        {
            record.answered_request = told;
        }
    }

    fn wake(&mut self, engine: u8) {
        let Some(record) = self.records.get(&engine) else {
            return;
        };
        let process = self
            .processes
            .get_mut(&engine)
            .expect("a bound engine has a process");
        if record.request.is_some() && record.answered_request == record.request && !process.down {
            self.wakes += usize::from(std::mem::replace(&mut process.asleep, false));
            self.end_borrowers_after(engine);
        }
    }

    fn end_borrowers_after(&mut self, allocating: u8) {
        if self.has_driver {
            let gpu = self.processes[&allocating].gpu.clone();
            self.end_borrowers_on(&gpu);
        }
    }

    /// An engine that is awake has so much of its grant from now on.
    pub fn hold(&mut self, engine: u8, percent: u64) {
        let Some(process) = self.processes.get_mut(&engine) else {
            return;
        };
        if !process.asleep && !process.down {
            process.held = process.granted * percent / 100;
            self.end_borrowers_after(engine);
        }
    }

    /// What the driver does when memory runs out: it ends pods that are beyond what it keeps for them, which is nothing for one
    /// that borrows and has limits.
    fn end_borrowers_on(&mut self, gpu: &GpuUuid) {
        let used = |processes: &BTreeMap<u8, Process>| -> u64 {
            let here = processes.values().filter(|process| process.gpu == *gpu);
            here.map(Process::used).sum()
        };
        while used(&self.processes) > CAPACITY {
            let mut here = self.processes.iter();
            let ended = here.find(|(_, process)| process.gpu == *gpu && process.is_ended_by_driver);
            let Some(ended) = ended.map(|(pod, _)| *pod) else {
                panic!(
                    "a pod lacks memory that it was granted: {:?}",
                    self.processes
                );
            };
            self.processes.remove(&ended);
            self.records.remove(&ended);
            self.ended_by_driver += 1;
        }
    }

    pub fn apply_step(&mut self, step: &Step) {
        match *step {
            Step::Bind(pod, is_answered) => self.bind(pod, is_answered),
            Step::Watch(pod) => self.watch(pod),
            Step::Sleep(engine) => {
                if let Some(process) = self.processes.get_mut(&engine) {
                    process.asleep = true;
                }
            }
            Step::Withdraw(engine) => {
                let sleeps = self
                    .processes
                    .get(&engine)
                    .is_some_and(|process| process.asleep);
                if let Some(record) = self.records.get_mut(&engine).filter(|_| sleeps) {
                    record.request = None;
                }
            }
            Step::Ask(engine) => {
                self.requests += 1;
                let request = self.requests.to_string().into();
                // An engine that is awake before it ever slept need not ask.
                if let Some(record) = self
                    .records
                    .get_mut(&engine)
                    .filter(|record| record.devices.is_some())
                {
                    record.request = Some(request);
                }
            }
            Step::Wake(engine) => self.wake(engine),
            Step::Hold(engine, percent) => self.hold(engine, percent),
            Step::Ready(is_ready) => {
                self.keeps_limits = is_ready && self.has_driver;
                self.observe_node();
            }
            Step::Crash(engine) => {
                if let Some(process) = self.processes.get_mut(&engine) {
                    process.down = true;
                }
            }
            Step::Plan => self.plan(),
            Step::Land => self.commit(),
            Step::End(pod) => {
                if self
                    .records
                    .get(&pod)
                    .is_some_and(|record| record.leaving || pod == 11)
                {
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
                    self.commit();
                }
                self.begin(self.cluster.ledger().now());
            }
            Step::Store => {
                let stored = serde_json::to_string(&self.cluster.export()).unwrap();
                let state: ClusterState = serde_json::from_str(&stored).unwrap();
                self.cluster = Cluster::load(state).unwrap();
                let again: serde_json::Value = serde_json::to_value(self.cluster.export()).unwrap();
                assert_eq!(
                    again,
                    serde_json::from_str::<serde_json::Value>(&stored).unwrap()
                );
            }
            Step::Policy(lends) => {
                self.lends = match (lends, self.has_driver) {
                    (false, _) => Lending::Nothing,
                    (true, false) => Lending::Asleep,
                    (true, true) => Lending::Unused,
                };
                self.apply(PolicySet {
                    policy: policy(self.lends),
                    prepared: None,
                });
            }
            Step::Load(kv_cache) => self.kv_cache = kv_cache,
            Step::Pass(millis) => self.advance(millis),
        }
    }

    /// The engine loads its model again, if it has crashed and there is room.
    fn start(&mut self, engine: u8) {
        let Some(process) = self.processes.get(&engine).filter(|process| process.down) else {
            return;
        };
        let beside = self
            .processes
            .values()
            .filter(|other| other.gpu == process.gpu);
        let used: u64 = beside.map(Process::used).sum();
        if used + process.granted <= CAPACITY {
            let process = self.processes.get_mut(&engine).unwrap();
            (process.down, process.asleep) = (false, false);
        }
    }

    /// What processes have of each GPU is at most what there is, and the ledger agrees with itself. A pod that comes after one
    /// that has ended needs longer to start than the driver needs to give memory back; an engine that wakes does not.
    pub fn check(&self, after: &Step) {
        let counts = |pod: &u8| self.records.contains_key(pod) || matches!(after, Step::Wake(_));
        for index in 0..GPUS {
            let uuid = unit_gpu(0, index).uuid;
            let here = self
                .processes
                .iter()
                .filter(|(pod, process)| process.gpu == uuid && counts(pod));
            let here: Vec<_> = here.collect();
            let used: u64 = here.iter().map(|(_, process)| process.used()).sum();
            assert!(
                used <= CAPACITY,
                "after {after:?} {used} B are used on {uuid}: {here:?}"
            );
            // What the driver keeps: a pod's grant, and nothing for a borrower.
            let kept = here.iter().filter(|(pod, _)| {
                let record = self.records.get(pod);
                record.is_some_and(|record| !record.borrows)
            });
            let kept: u64 = kept.map(|(_, process)| process.granted).sum();
            assert!(
                kept <= CAPACITY,
                "after {after:?} {kept} B are kept on {uuid}: {here:?}"
            );
        }
        assert_eq!(audit(self.cluster.ledger()), [], "after {after:?}");
    }

    /// Everything that is under way comes to its end.
    pub(crate) fn settle_all(&mut self) {
        for _ in 0..6 {
            (0..PODS).for_each(|pod| self.watch(pod));
            self.settle();
            self.plan();
            while !self.writes.is_empty() {
                self.commit();
            }
            for pod in 0..PODS {
                self.apply_step(&Step::End(pod));
                self.apply_step(&Step::Free(pod));
            }
            (0..ENGINES).for_each(|engine| self.start(engine));
        }
    }
}

fn number(uid: &crate::ids::PodUid) -> u8 {
    uid.as_str().trim_start_matches("uid-").parse().unwrap()
}
