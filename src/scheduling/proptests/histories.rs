//! Random histories of a small cluster: promises kept, books that add up, free VRAM by the formula, a rebuild that is the same.

use super::{demand_of, device, sharing};

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::audit::audit;
use crate::scheduling::decision::Hold;
use crate::scheduling::device::{Device, Gpu, Health};
use crate::scheduling::fit::fit;
use crate::scheduling::ledger::{Assumption, Ledger, Phase, PodEntry, Seen, SeenState, SeenWaiting};
use crate::scheduling::loading::Holdings;
use crate::scheduling::memo::Memo;
use crate::scheduling::node::{Node, NodeKind};
use crate::scheduling::plugin::{Ask, PluginDevices, PluginResource, PluginShare};
use crate::scheduling::policy::{Eviction, Limit, Policy};
use crate::scheduling::preempt::{Rules, cheapest_victims};
use crate::scheduling::rank::{Attempt, shortlist};
use crate::scheduling::reading::{Freshness, GpuReading, Pressure, Reading};
use crate::scheduling::request::{Companion, Demand, Sharing};
use crate::scheduling::snapshot::Snapshot;
use crate::scheduling::stake::{GroupKey, GroupKind, Leaving, Shown, Stake};
use crate::scheduling::worth::{Mix, Wish, Worth};
use crate::units::{Bytes, MilliCpu, Millis, Moment, Percent};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What can happen to a ledger.
#[derive(Debug, Clone)]
enum Step {
    Arrive(u8, u64, u32, Sharing, i32),
    /// One that asks a device plugin.
    ArriveForDevices(u8, u32, i32),
    Offer(u8, u8),
    Assume(u8, u8),
    Confirm(u8),
    Forget(u8),
    Release(u8),
    Hold(u8, u8),
    BoundByOthers(u8, u8),
    Started(u8),
    /// It shows a group, that it is to be left alone, or that it is being deleted.
    Show(u8, Option<u8>, bool, bool),
    Read(u8, u64, Vec<(u8, u8, u64)>, Vec<u64>),
    Tick(u64),
    LoseGpu(u8),
    RemoveNode(u8),
    AddNode(u8),
    /// It becomes a device plugin's, whoever is there.
    GiveToPlugin(u8),
    /// What it has of CPU beside its GPUs.
    Spare(u8, u64),
    /// What free VRAM is worth follows who came so far.
    Learn,
}

fn step() -> impl Strategy<Value = Step> {
    let pod = 0u8..14;
    let node = 0u8..3;
    prop_oneof![
        6 => (pod.clone(), 1u64..80, 1u32..3, sharing(), -3i32..4).prop_map(|(p, v, n, s, q)| Step::Arrive(p, v, n, s, q)),
        3 => (pod.clone(), 1u32..4, -3i32..4).prop_map(|(p, n, q)| Step::ArriveForDevices(p, n, q)),
        2 => (pod.clone(), node.clone()).prop_map(|(p, n)| Step::Offer(p, n)),
        8 => (pod.clone(), node.clone()).prop_map(|(p, n)| Step::Assume(p, n)),
        6 => pod.clone().prop_map(Step::Confirm),
        2 => pod.clone().prop_map(Step::Forget),
        2 => pod.clone().prop_map(Step::Release),
        4 => (pod.clone(), node.clone()).prop_map(|(p, n)| Step::Hold(p, n)),
        1 => (pod.clone(), node.clone()).prop_map(|(p, n)| Step::BoundByOthers(p, n)),
        3 => (pod.clone(), prop::option::of(0u8..3), proptest::bool::weighted(0.2), proptest::bool::weighted(0.3))
            .prop_map(|(p, group, is_kept, is_leaving)| Step::Show(p, group, is_kept, is_leaving)),
        3 => pod.clone().prop_map(Step::Started),
        4 => (
            node.clone(),
            0u64..40_000,
            prop::collection::vec((pod.clone(), 0u8..3, 0u64..120), 0..6),
            prop::collection::vec(0u64..110, 3),
        ).prop_map(|(node, age, attributed, used)| Step::Read(node, age, attributed, used)),
        2 => (1u64..40_000).prop_map(Step::Tick),
        1 => node.clone().prop_map(Step::LoseGpu),
        1 => node.clone().prop_map(Step::RemoveNode),
        1 => node.clone().prop_map(Step::GiveToPlugin),
        2 => node.clone().prop_map(Step::AddNode),
        1 => (node, 0u64..8).prop_map(|(node, cpu)| Step::Spare(node, cpu)),
        1 => Just(Step::Learn),
    ]
}

fn uid(pod: u8) -> PodUid {
    PodUid::parse(&format!("uid-{pod}")).unwrap()
}

fn key(pod: u8) -> PodKey {
    PodKey::parse("default", &format!("pod-{pod}")).unwrap()
}

fn name(node: u8) -> NodeName {
    NodeName::parse(&format!("node-{node}")).unwrap()
}

/// What a plugin offers on a node it has been given.
const DEVICES: u32 = 4;

fn gpu() -> PluginResource {
    PluginResource::parse("nvidia.com/gpu").unwrap()
}

fn devices(node: u8, gpus: u32) -> Vec<Device> {
    (0..gpus).map(|index| Device { reserved: Bytes(2), ..device(node, index) }).collect()
}

/// What an agent could have found on a node: who has how much on which GPU, and what each GPU has in use.
fn reading(node: u8, sampled: Moment, attributed: &[(u8, u8, u64)], used: &[u64]) -> Reading {
    let gpu = |(index, used): (usize, &u64)| {
        let on_it = attributed.iter().filter(|(_, gpu, _)| usize::from(*gpu) == index);
        let sums: BTreeMap<PodUid, u64> = on_it.fold(BTreeMap::new(), |mut sums, (pod, _, bytes)| {
            *sums.entry(uid(*pod)).or_default() += bytes;
            sums
        });
        GpuReading {
            uuid: GpuUuid::parse(&format!("GPU-{node}-{index}")).unwrap(),
            // The driver does not always say.
            used: (*used < 105).then_some(Bytes(*used)),
            attributed: sums.into_iter().map(|(uid, bytes)| (uid, Bytes(bytes))).collect(),
            pressure: Pressure::of(Percent::new((used % 101) as u8), None),
        }
    };
    Reading {
        sampled,
        gpus: used.iter().enumerate().map(gpu).collect(),
        holdings: Holdings::default(),
        in_flight: Vec::new(),
    }
}

/// A ledger beside a plain record of what was promised, and of what the API server would show.
struct Bench {
    ledger: Ledger,
    now: Moment,
    /// What Stowage itself promised: pod → (devices, amount on each, alone).
    promised: BTreeMap<PodUid, (Vec<GpuUuid>, u64, bool)>,
    /// Who is on devices of a plugin, and on how many.
    on_devices: BTreeMap<PodUid, (u8, u32)>,
    /// Of each GPU, what each of its readings could not explain, the latest last.
    unexplained: BTreeMap<GpuUuid, Vec<u64>>,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            ledger: Ledger::new(Arc::new(Policy::default())),
            now: Moment(0),
            promised: BTreeMap::new(),
            on_devices: BTreeMap::new(),
            unexplained: BTreeMap::new(),
        };
        (0..3).for_each(|node| bench.apply(&Step::AddNode(node)));
        bench
    }

    fn apply(&mut self, step: &Step) {
        let ledger = &mut self.ledger;
        ledger.set_now(self.now);
        match *step {
            Step::Arrive(pod, vram, gpus, sharing, priority) => {
                self.arrive(pod, demand_of(vram, gpus, sharing, priority));
            }
            Step::ArriveForDevices(pod, count, priority) => {
                let demand = demand_of(0, count, Sharing::Exclusive, priority);
                self.arrive(pod, Demand { ask: Ask::Plugin { resource: gpu(), count }, ..demand });
            }
            Step::Offer(pod, node) => {
                let snapshot = ledger.snapshot();
                let demand = ledger.entry(&uid(pod)).map(|entry| entry.demand.clone());
                if let (Some(demand), Some(view)) = (demand, snapshot.node(name(node).as_str()))
                    && let Ok(gpus) = fit(view, &demand)
                {
                    ledger.begin_attempt(&uid(pod));
                    ledger.offer(&uid(pod), view, gpus, self.now);
                }
            }
            Step::Assume(pod, node) => self.assume(pod, node),
            Step::Confirm(pod) => {
                let entry = ledger.entry(&uid(pod)).filter(|entry| entry.is_assumed()).cloned();
                if let Some(entry) = entry {
                    ledger.confirm(&uid(pod), entry.node().unwrap(), entry.devices().cloned());
                }
            }
            Step::Forget(pod) => {
                if ledger.entry(&uid(pod)).is_some_and(|entry| entry.is_assumed()) {
                    self.promised.remove(&uid(pod));
                    self.on_devices.remove(&uid(pod));
                }
                ledger.forget(&uid(pod));
            }
            Step::Release(pod) => {
                ledger.release(&uid(pod));
                self.promised.remove(&uid(pod));
                self.on_devices.remove(&uid(pod));
            }
            Step::Hold(pod, node) => self.hold(pod, node),
            Step::BoundByOthers(pod, node) => {
                let waiting = |entry: &PodEntry| matches!(entry.phase, Phase::Waiting(_));
                if let Some(demand) = ledger.entry(&uid(pod)).filter(|e| waiting(e)).map(|e| e.demand.clone())
                {
                    if let Ask::Plugin { count, .. } = demand.ask {
                        self.on_devices.insert(uid(pod), (node, count));
                    }
                    let state =
                        SeenState::Bound { node: name(node), devices: None, starting: false, ran: None };
                    ledger.see(Seen { uid: uid(pod), key: key(pod), demand, state, shown: None });
                }
            }
            Step::Started(pod) => self.see_bound(pod, None),
            Step::Show(pod, group, do_not_disrupt, is_leaving) => {
                let group = group.map(|group| GroupKey {
                    namespace: "default".into(),
                    kind: GroupKind::JobSet,
                    name: format!("set-{group}").into(),
                });
                let leaving = Leaving { asked_ago: Millis(0), grace: Millis::seconds(30) };
                let shown = Shown {
                    stake: Stake { group, do_not_disrupt, ..Stake::default() },
                    leaving: is_leaving.then_some(leaving),
                    ..Shown::default()
                };
                self.see_bound(pod, Some(shown));
            }
            Step::Read(node, age, ref attributed, ref used) => {
                let reading = reading(node, self.now.before(Millis(age)), attributed, used);
                self.read(node, reading);
            }
            Step::Tick(millis) => {
                self.now = self.now + Millis(millis);
                ledger.expire(self.now);
            }
            Step::LoseGpu(node) => {
                let _ = ledger.report_devices(&name(node), devices(node, 2));
            }
            Step::RemoveNode(node) => {
                ledger.remove_node(&name(node));
                let of_the_node = format!("GPU-{node}-");
                self.unexplained.retain(|uuid, _| !uuid.as_str().starts_with(&of_the_node));
            }
            Step::AddNode(node) => {
                ledger.set_node(&name(node), NodeKind::Stowage, None);
                ledger.set_plugin_devices(&name(node), PluginDevices::new());
                ledger.report_devices(&name(node), devices(node, 3)).unwrap();
            }
            Step::GiveToPlugin(node) => {
                ledger.set_node(&name(node), NodeKind::DevicePlugin, None);
                ledger.set_plugin_devices(&name(node), [(gpu(), DEVICES)].into());
            }
            Step::Spare(node, cpu) => {
                let spare = Companion { cpu: MilliCpu(cpu), memory: Bytes::gib(1) };
                ledger.set_spare(&name(node), Some(spare));
            }
            Step::Learn => {
                let mut mix = Mix::clone(ledger.mix());
                // Enough to believe in.
                (1..=10).for_each(|size| {
                    mix.arrive(Wish::of(&demand_of(size * 7, 1, Sharing::Shared, 0)).unwrap())
                });
                let worth = Worth::learn(&mix, ledger.snapshot().nodes().iter().map(Node::site));
                ledger.set_worth(worth);
            }
        }
    }

    fn see_bound(&mut self, pod: u8, shown: Option<Shown>) {
        let entry = self.ledger.entry(&uid(pod)).cloned();
        if let Some(PodEntry { key, demand, phase: Phase::Bound(bound), .. }) = entry {
            let (node, devices) = (bound.node, bound.devices);
            let state = SeenState::Bound { node, devices, starting: false, ran: None };
            self.ledger.see(Seen { uid: uid(pod), key, demand, state, shown });
        }
    }

    fn arrive(&mut self, pod: u8, demand: Demand) {
        if self.ledger.entry(&uid(pod)).is_none() {
            let state = SeenState::Waiting(SeenWaiting::default());
            self.ledger.see(Seen { uid: uid(pod), key: key(pod), demand, state, shown: None });
        }
    }

    fn assume(&mut self, pod: u8, node: u8) {
        if let Ok(Assumption::New(placement)) = self.ledger.assume(&uid(pod), &name(node)) {
            let demand = &self.ledger.entry(&uid(pod)).unwrap().demand;
            if let Ask::Plugin { count, .. } = demand.ask {
                assert_eq!(placement.devices.len(), 0, "nothing of a single GPU is promised");
                self.on_devices.insert(uid(pod), (node, count));
                let here = self.on_devices.values().filter(|(other, _)| *other == node);
                assert!(
                    here.map(|(_, count)| count).sum::<u32>() <= DEVICES,
                    "a plugin has no more than it has"
                );
                return;
            }
            let alone = demand.sharing == Sharing::Exclusive;
            // 88 = 100 − the driver's 2 − 10 % headroom.
            let amount = if alone { 88 } else { demand.per_gpu.0 };
            self.promised.insert(uid(pod), (placement.devices.to_vec(), amount, alone));
        }
    }

    /// Takes in a reading, and works out what it leaves unexplained from DESIGN's words.
    fn read(&mut self, node: u8, reading: Reading) {
        if !self.ledger.has_node(&name(node)) {
            return self.ledger.read(&name(node), reading);
        }
        let known: Vec<GpuUuid> =
            self.ledger.node(&name(node)).unwrap().devices.iter().map(|d| d.uuid.clone()).collect();
        for gpu in &reading.gpus {
            if !known.contains(&gpu.uuid) {
                self.unexplained.remove(&gpu.uuid);
                continue;
            }
            // A figure that is missing once takes nothing back.
            let Some(used) = gpu.used else { continue };
            let attributed: u64 = gpu.attributed.iter().map(|(_, bytes)| bytes.0).sum();
            let mut still_to_come = 0;
            for (uid, entry) in self.ledger.entries() {
                if let Phase::Bound(bound) = &entry.phase
                    && bound.since <= reading.sampled
                {
                    let has = gpu.attributed_to(uid).unwrap_or_default().0;
                    still_to_come += self.reserved(entry, &gpu.uuid).saturating_sub(has);
                }
            }
            let rest = used.0.saturating_sub(attributed).saturating_sub(still_to_come);
            self.unexplained.entry(gpu.uuid.clone()).or_default().push(rest);
        }
        // A GPU that a reading does not list has nothing unexplained in it, and begins anew.
        for gone in known.iter().filter(|uuid| reading.gpu(uuid).is_none()) {
            self.unexplained.remove(gone);
        }
        self.ledger.read(&name(node), reading);
    }

    /// What a pod was promised on one GPU: nothing, its share, or the whole of it.
    fn reserved(&self, entry: &PodEntry, gpu: &GpuUuid) -> u64 {
        if entry.demand.asks_plugin() {
            return 0;
        }
        let Some(node) = entry.node().and_then(|node| self.ledger.node(node)) else { return 0 };
        if !node.devices.iter().any(|device| device.uuid == *gpu) {
            return 0;
        }
        let placed = entry
            .devices()
            .filter(|uuids| uuids.iter().all(|uuid| node.devices.iter().any(|d| d.uuid == *uuid)));
        match placed {
            Some(uuids) if !uuids.contains(gpu) => 0,
            _ if entry.demand.sharing == Sharing::Exclusive => 88,
            _ => entry.demand.per_gpu.0,
        }
    }

    /// `free = total − reserved − headroom − Σ max(reserved, attributed) − unexplained`, for nodes whose reading is fresh.
    fn check_free(&mut self) {
        let entries: Vec<(PodUid, PodEntry)> =
            self.ledger.entries().into_iter().map(|(uid, entry)| (uid.clone(), entry.clone())).collect();
        for node in self.ledger.snapshot().nodes() {
            let Some(reading) = self.ledger.reading(&node.name) else { continue };
            let age = self.now.since(reading.sampled);
            let expected = if age < Millis(5_000) {
                Freshness::Fresh
            } else if age < Millis(30_000) {
                Freshness::Stale
            } else {
                Freshness::Expired
            };
            assert_eq!(node.freshness, expected);
            for (gpu, device) in node.gpus.iter().zip(node.devices.iter()) {
                let held =
                    entries.iter().any(|(_, entry)| entry.hold().is_some_and(|hold| hold.node == node.name));
                let Some(seen) = reading.gpu(&device.uuid).filter(|_| expected == Freshness::Fresh && !held)
                else {
                    continue;
                };
                if seen.used.is_none() {
                    continue;
                }
                let uids: std::collections::BTreeSet<&PodUid> = entries
                    .iter()
                    .map(|(uid, _)| uid)
                    .chain(seen.attributed.iter().map(|(uid, _)| uid))
                    .collect();
                let sum: u64 = uids
                    .into_iter()
                    .map(|uid| {
                        let reserved = entries
                            .iter()
                            .find(|(other, _)| other == uid)
                            .map_or(0, |(_, e)| self.reserved(e, &device.uuid));
                        reserved.max(seen.attributed_to(uid).unwrap_or_default().0)
                    })
                    .sum();
                let last = self.unexplained.get(&device.uuid).map_or(&[][..], Vec::as_slice);
                let believed = if last.len() < 3 { 0 } else { *last[last.len() - 3..].iter().min().unwrap() };
                assert_eq!(
                    gpu.free().0,
                    88u64.saturating_sub(sum).saturating_sub(believed),
                    "{}",
                    device.uuid
                );
            }
        }
    }

    fn hold(&mut self, pod: u8, node: u8) {
        let Some(demand) = self.ledger.entry(&uid(pod)).map(|entry| entry.demand.clone()) else { return };
        let Some(room) = self.ledger.room_for(&self.ledger.claim(&uid(pod)), &name(node)) else {
            return;
        };
        for candidate in &room.candidates {
            let victim = &self.ledger.entry(&candidate.uid).unwrap().demand;
            assert!(victim.priority < demand.priority, "a victim has lower priority");
            assert_eq!(self.ledger.policy().class(victim.class).eviction, Eviction::ForHigherPriority);
            assert!(
                !self.ledger.entry(&candidate.uid).unwrap().stake.do_not_disrupt,
                "it is to be left alone"
            );
        }
        let Some(set) = cheapest_victims(&room, &demand, Rules::Keep) else { return };
        let view = self.ledger.node(&name(node)).unwrap();
        let hold = Hold {
            node: name(node),
            devices: set.gpus.iter().map(|place| view.devices[place].uuid.clone()).collect(),
            victims: set.everyone().into(),
            deadline: self.now + Millis::seconds(60),
        };
        let result = self.ledger.hold(&uid(pod), hold);
        if self.ledger.entry(&uid(pod)).is_some_and(|entry| matches!(entry.phase, Phase::Waiting(_))) {
            let known =
                matches!(result, Ok(()) | Err(crate::scheduling::ledger::Conflict::AlreadyHolds { .. }));
            assert!(known, "what the search found can be held: {result:?}");
        }
    }

    /// No GPU was promised more than it has, one that a pod has to itself has that pod only, and of the engines placed on
    /// one no two start at once.
    fn check_promises(&self) {
        let mut starting: BTreeMap<&GpuUuid, usize> = BTreeMap::new();
        for (uid, (devices, ..)) in &self.promised {
            let starts = self.ledger.entry(uid).is_some_and(|entry| entry.starting.is_some());
            devices.iter().filter(|_| starts).for_each(|gpu| *starting.entry(gpu).or_default() += 1);
        }
        assert!(starting.values().all(|engines| *engines == 1), "two engines start at once: {starting:?}");
        let mut on: BTreeMap<&GpuUuid, Vec<(u64, bool)>> = BTreeMap::new();
        for (devices, amount, alone) in self.promised.values() {
            devices.iter().for_each(|gpu| on.entry(gpu).or_default().push((*amount, *alone)));
        }
        for (gpu, tenants) in on {
            assert!(
                tenants.iter().map(|(amount, _)| amount).sum::<u64>() <= 88,
                "{gpu} is promised beyond its capacity"
            );
            assert!(
                tenants.len() == 1 || tenants.iter().all(|(_, alone)| !alone),
                "{gpu} is not shared if exclusive"
            );
        }
    }

    /// A ledger built from nothing but what the API server keeps: nodes, bound pods, waiting pods with their holds.
    fn rebuilt(&self) -> Ledger {
        let mut ledger = Ledger::new(self.ledger.policy().clone());
        for (uid, entry) in self.ledger.entries() {
            let (uid, key, demand) = (uid.clone(), entry.key.clone(), entry.demand.clone());
            let state = match &entry.phase {
                Phase::Bound(bound) => {
                    let (node, devices) = (bound.node.clone(), bound.devices.clone());
                    SeenState::Bound { node, devices, starting: entry.starting.is_some(), ran: None }
                }
                _ => {
                    SeenState::Waiting(SeenWaiting { hold: entry.hold().cloned(), ..SeenWaiting::default() })
                }
            };
            ledger.see(Seen { uid, key, demand, state, shown: None });
        }
        let published = self.ledger.books().filter(|(name, _)| self.ledger.has_node(name));
        for (name, node) in published {
            ledger.set_node(name, node.kind, None);
            let offered = node.plugin.iter().filter(|share| share.allocatable > 0);
            let offered = offered.map(|share| (share.resource.clone(), share.allocatable)).collect();
            ledger.set_plugin_devices(name, offered);
            let reported =
                node.devices.iter().filter(|device| device.health != Health::Lost).cloned().collect();
            ledger.report_devices(name, reported).unwrap();
        }
        ledger
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn whatever_happens_no_gpu_is_promised_twice_and_the_books_add_up(steps in prop::collection::vec(step(), 1..80)) {
        let mut bench = Bench::new();
        for step in &steps {
            bench.apply(step);
            bench.check_promises();
            bench.check_free();
            // A GPU that was lost came back as it was, so nothing can be over-promised; nothing else may differ either.
            let violations = audit(&bench.ledger);
            prop_assert!(violations.is_empty(), "after {:?}: {:?}", step, violations);
        }
    }

    #[test]
    fn what_is_remembered_of_nodes_is_what_they_would_say_anew(steps in prop::collection::vec(step(), 1..60)) {
        let (mut bench, mut memo) = (Bench::new(), Memo::default());
        let demands = [(11, 1, Sharing::Shared), (30, 2, Sharing::Shared), (40, 1, Sharing::Exclusive)];
        let demands = demands.map(|(vram, gpus, sharing)| demand_of(vram, gpus, sharing, 0));
        for step in &steps {
            bench.apply(step);
            let (snapshot, policy) = (bench.ledger.snapshot(), bench.ledger.policy().clone());
            let names = ["node-2", "node-0", "node-1"];
            let failed = name(1);
            let attempt = Attempt { limit: 2, just_failed: Some(&failed), own_room: None, policy: &policy, allowance: Limit::default() };
            for demand in &demands {
                // Made of the nodes alone, it has nothing summed up.
                let anew = Snapshot::new(snapshot.generation(), snapshot.epoch(), snapshot.nodes().to_vec())
                    .with_worth(Arc::new(snapshot.worth().clone()));
                let fresh = shortlist(&anew, demand, names.into_iter(), attempt);
                prop_assert_eq!(memo.shortlist(&snapshot, demand, names.into_iter(), attempt), fresh, "after {:?}", step);
            }
        }
    }

    #[test]
    fn the_same_history_gives_the_same_books(steps in prop::collection::vec(step(), 1..60)) {
        let (mut one, mut other) = (Bench::new(), Bench::new());
        for step in &steps {
            one.apply(step);
            other.apply(step);
            // Taking snapshots in between must not matter.
            let _ = one.ledger.snapshot();
        }
        prop_assert_eq!(one.ledger.snapshot(), other.ledger.snapshot());
        prop_assert_eq!(one.ledger.entries(), other.ledger.entries());
    }

    #[test]
    fn the_ledger_rebuilt_from_the_pods_is_the_one_that_was_lost(steps in prop::collection::vec(step(), 1..60)) {
        let steps: Vec<_> = steps.into_iter().filter(|s| !matches!(s, Step::LoseGpu(_) | Step::RemoveNode(_) | Step::Read(..) | Step::Spare(..) | Step::Learn)).collect();
        let mut bench = Bench::new();
        steps.iter().for_each(|step| bench.apply(step));
        // What is in flight settles before a comparison means anything, and hints may be lost.
        (0..14).for_each(|pod| bench.apply(&Step::Confirm(pod)));
        (0..14).for_each(|pod| drop(bench.ledger.begin_attempt(&uid(pod))));
        let mut rebuilt = bench.rebuilt();
        let gpus = |ledger: &mut Ledger| -> Vec<(NodeName, Vec<Gpu>)> {
            ledger.snapshot().nodes().iter().map(|node| (node.name.clone(), node.gpus.to_vec())).collect()
        };
        prop_assert_eq!(gpus(&mut rebuilt), gpus(&mut bench.ledger));
        let shares = |ledger: &mut Ledger| -> Vec<Vec<PluginShare>> {
            ledger.snapshot().nodes().iter().map(|node| node.plugin.to_vec()).collect()
        };
        prop_assert_eq!(shares(&mut rebuilt), shares(&mut bench.ledger));
        let nodes = |ledger: &Ledger| -> Vec<(PodUid, Option<NodeName>, Option<Hold>)> {
            ledger.entries().into_iter().map(|(u, e)| (u.clone(), e.node().cloned(), e.hold().cloned())).collect()
        };
        prop_assert_eq!(nodes(&rebuilt), nodes(&bench.ledger));
    }
}
