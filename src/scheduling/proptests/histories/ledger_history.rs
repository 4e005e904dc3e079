//! A ledger to which random steps are applied, beside plain records of them. Its invariants are checked against those records, and
//! by the oracle.

use super::step::*;
use crate::evicting::{BudgetRules, cheapest_victims};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::{
    AssumeResult, Ledger, ObservedPhase, ObservedWaiting, PodObservation, PodPhase, PodState,
};
use crate::placing::fit::fit;
use crate::placing::learned::{DemandHistory, DemandShape, PackingModel};
use crate::placing::snapshot::Snapshot;
use crate::policy::{Policy, Preemptibility};
use crate::testkit::demand_of;
use crate::testkit::oracle::{Granted, Oracle, VictimFacts};
use crate::units::{Bytes, MilliCpu, Millis, Moment};
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::device_plugin::{GpuRequest, PluginDevices};
use crate::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
};
use crate::vocabulary::gpu::Health;
use crate::vocabulary::model_tier::LoadingSpeeds;
use crate::vocabulary::node::{Node, NodeKind};
use crate::vocabulary::node_reading::{Freshness, NodeReading};
use crate::vocabulary::placement::Reservation;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A ledger beside a plain record of what was allocated, and of what the API server would show.
#[derive(Clone)]
pub(crate) struct LedgerHistory {
    pub ledger: Ledger,
    now: Moment,
    /// Sees what Stowage itself allocates.
    oracle: Oracle,
    /// Engines that have not been seen ready, and how long no other may start on their GPUs.
    starting: BTreeMap<PodUid, Moment>,
    /// Pods on devices of a plugin, and their number of devices.
    on_devices: BTreeMap<PodUid, (u8, u32)>,
    /// Pods that ended on a node of which something was reported: when, and what each had of which GPUs.
    departed: BTreeMap<(NodeName, PodUid), (Moment, Vec<GpuUuid>, u64)>,
    /// By GPU: the unaccounted VRAM of each of its readings, the latest last.
    unaccounted: BTreeMap<GpuUuid, Vec<u64>>,
    /// The nodes as they were when a model was learned last.
    at_last_learning: Snapshot,
}

impl LedgerHistory {
    pub fn new() -> Self {
        // A byte of the weights takes a second, so that small differences count.
        let mut policy = Policy::default();
        policy.loading = LoadingSpeeds {
            network: Bytes(1),
            disk: Bytes(1),
            ..LoadingSpeeds::default()
        };
        let mut bench = Self {
            ledger: Ledger::new(Arc::new(policy)),
            now: Moment(0),
            oracle: Oracle::default(),
            starting: BTreeMap::new(),
            on_devices: BTreeMap::new(),
            departed: BTreeMap::new(),
            unaccounted: BTreeMap::new(),
            at_last_learning: Snapshot::default(),
        };
        for node in 0..3 {
            bench.apply(&LedgerStep::AddNode(node));
            // 88 = 100 − the driver's 2 − 10 % headroom.
            let gpus = devices(node, 3).into_iter();
            let gpus = gpus.map(|device| (device.uuid, Bytes(88)));
            bench.oracle.set_node(&node_name(node), gpus);
        }
        bench
    }

    pub fn apply(&mut self, step: &LedgerStep) {
        let ledger = &mut self.ledger;
        ledger.set_now(self.now);
        match *step {
            LedgerStep::Arrive(pod, vram, gpus, sharing, priority) => {
                self.arrive(pod, demand_of(vram, gpus, sharing, priority));
            }
            LedgerStep::ArriveForDevices(pod, count, priority) => {
                let demand = demand_of(0, count, Sharing::Exclusive, priority);
                self.arrive(
                    pod,
                    Demand {
                        ask: GpuRequest::Plugin {
                            resource: gpu(),
                            count,
                        },
                        ..demand
                    },
                );
            }
            LedgerStep::Offer(pod, node) => {
                let snapshot = ledger.snapshot();
                let demand = ledger
                    .pod_state(&uid(pod))
                    .map(|entry| entry.demand.clone());
                if let (Some(demand), Some(view)) =
                    (demand, snapshot.node(node_name(node).as_str()))
                    && let Ok(gpus) = fit(view, &demand)
                {
                    ledger.begin_attempt(&uid(pod));
                    ledger.reserve_softly(&uid(pod), &view.name, &view.uuids(gpus));
                }
            }
            LedgerStep::Assume(pod, node) => self.assume(pod, node),
            LedgerStep::Confirm(pod) => {
                let entry = ledger
                    .pod_state(&uid(pod))
                    .filter(|entry| entry.is_assumed())
                    .cloned();
                if let Some(entry) = entry {
                    ledger.confirm(&uid(pod), entry.node().unwrap(), entry.devices().cloned());
                }
            }
            LedgerStep::Forget(pod) => {
                if ledger
                    .pod_state(&uid(pod))
                    .is_some_and(|entry| entry.is_assumed())
                {
                    self.forget(pod);
                }
                self.ledger.forget(&uid(pod));
            }
            LedgerStep::Release(pod) => {
                self.record_departure(pod);
                self.ledger.release(&uid(pod));
                self.forget(pod);
            }
            LedgerStep::Hold(pod, node) => self.reserve(pod, node),
            LedgerStep::BoundByOthers(pod, node) => {
                let waiting = |entry: &PodState| matches!(entry.phase, PodPhase::Waiting(_));
                if let Some(demand) = ledger
                    .pod_state(&uid(pod))
                    .filter(|e| waiting(e))
                    .map(|e| e.demand.clone())
                {
                    if let GpuRequest::Plugin { count, .. } = demand.ask {
                        self.on_devices.insert(uid(pod), (node, count));
                    }
                    let state = ObservedPhase::Bound {
                        node: node_name(node),
                        devices: None,
                        starting: false,
                        ran: None,
                    };
                    ledger.observe_pod(PodObservation {
                        uid: uid(pod),
                        key: key(pod),
                        demand,
                        state,
                        observed: None,
                    });
                }
            }
            LedgerStep::Started(pod) => self.observe_bound(pod, None),
            LedgerStep::Show(pod, group, do_not_disrupt, is_leaving) => {
                let group = group.map(|group| GroupKey {
                    namespace: "default".into(),
                    kind: GroupKind::JobSet,
                    name: format!("set-{group}").into(),
                });
                let leaving = PodDeletion {
                    asked_ago: Millis(0),
                    grace: Millis::seconds(30),
                };
                let shown = ObservedDisruptionInfo {
                    disruption_info: DisruptionInfo {
                        group,
                        do_not_disrupt,
                        ..DisruptionInfo::default()
                    },
                    leaving: is_leaving.then_some(leaving),
                    ..ObservedDisruptionInfo::default()
                };
                self.observe_bound(pod, Some(shown));
            }
            LedgerStep::Read(node, age, ref attributed, ref used) => {
                let reading = reading(node, self.now.before(Millis(age)), attributed, used);
                self.read(node, reading);
            }
            LedgerStep::Tick(millis) => {
                self.now = self.now + Millis(millis);
                ledger.expire(self.now);
            }
            LedgerStep::LoseGpu(node) => {
                let _ = ledger.report_devices(&node_name(node), devices(node, 2).into());
            }
            LedgerStep::RemoveNode(node) => {
                ledger.remove_node(&node_name(node));
                let of_the_node = format!("GPU-{node}-");
                self.unaccounted
                    .retain(|uuid, _| !uuid.as_str().starts_with(&of_the_node));
            }
            LedgerStep::AddNode(node) => {
                ledger.set_node(&node_name(node), NodeKind::Stowage, None);
                ledger.set_plugin_devices(&node_name(node), PluginDevices::new());
                ledger
                    .report_all_devices(&node_name(node), devices(node, 3).into())
                    .unwrap();
            }
            LedgerStep::GiveToPlugin(node) => {
                ledger.set_node(&node_name(node), NodeKind::DevicePlugin, None);
                ledger.set_plugin_devices(&node_name(node), [(gpu(), DEVICES)].into());
            }
            LedgerStep::Spare(node, cpu) => {
                let free_host = HostResources {
                    cpu: MilliCpu(cpu),
                    memory: Bytes::gib(1),
                };
                ledger.set_free_host(&node_name(node), Some(free_host));
            }
            LedgerStep::Learn => {
                let mut demand_history = DemandHistory::clone(ledger.demand_history());
                // Enough to learn from.
                (1..=10).for_each(|size| {
                    demand_history.record_arrival(
                        DemandShape::from_demand(&demand_of(size * 7, 1, Sharing::Shared, 0))
                            .unwrap(),
                    )
                });
                let packing_model = PackingModel::learn(
                    &demand_history,
                    ledger.snapshot().nodes().iter().map(Node::node_gpus),
                );
                // Prepared of an old copy: what has changed since must not be missed.
                let present = Snapshot::clone(&ledger.snapshot());
                let summarized = std::mem::replace(&mut self.at_last_learning, present)
                    .with_packing_model(Arc::new(packing_model));
                summarized.summarize_nodes();
                drop(ledger.install_packing_model(summarized));
            }
        }
        // A node that is gone, with all its pods, is another when it comes back.
        let ledger = &self.ledger;
        self.departed
            .retain(|(node, _), _| ledger.node(node).is_some());
    }

    /// The pod ends where it is. As long as a reading shows it there, it keeps what it was granted.
    fn record_departure(&mut self, pod: u8) {
        let Some(entry) = self.ledger.pod_state(&uid(pod)) else {
            return;
        };
        let Some(node) = entry
            .node()
            .filter(|node| self.ledger.reading(node).is_some())
        else {
            return;
        };
        let granted = if entry.demand.sharing == Sharing::Exclusive {
            100
        } else {
            entry.demand.per_gpu.0
        };
        let devices = entry
            .devices()
            .map_or(Vec::new(), |devices| devices.to_vec());
        self.departed
            .insert((node.clone(), uid(pod)), (self.now, devices, granted));
    }

    fn observe_bound(&mut self, pod: u8, shown: Option<ObservedDisruptionInfo>) {
        let entry = self.ledger.pod_state(&uid(pod)).cloned();
        if let Some(PodState {
            key,
            demand,
            phase: PodPhase::Bound(bound),
            ..
        }) = entry
        {
            let (node, devices) = (bound.node, bound.devices);
            self.starting.remove(&uid(pod));
            let state = ObservedPhase::Bound {
                node,
                devices,
                starting: false,
                ran: None,
            };
            self.ledger.observe_pod(PodObservation {
                uid: uid(pod),
                key,
                demand,
                state,
                observed: shown,
            });
        }
    }

    fn arrive(&mut self, pod: u8, demand: Demand) {
        if self.ledger.pod_state(&uid(pod)).is_none() {
            let state = ObservedPhase::Waiting(ObservedWaiting::default());
            self.ledger.observe_pod(PodObservation {
                uid: uid(pod),
                key: key(pod),
                demand,
                state,
                observed: None,
            });
        }
    }

    fn assume(&mut self, pod: u8, node: u8) {
        if let Ok(AssumeResult::New(placement)) = self.ledger.assume(&uid(pod), &node_name(node)) {
            let demand = &self.ledger.pod_state(&uid(pod)).unwrap().demand;
            if let GpuRequest::Plugin { count, .. } = demand.ask {
                assert_eq!(
                    placement.devices.len(),
                    0,
                    "nothing of a single GPU is promised"
                );
                self.on_devices.insert(uid(pod), (node, count));
                let here = self.on_devices.values().filter(|(other, _)| *other == node);
                assert!(
                    here.map(|(_, count)| count).sum::<u32>() <= DEVICES,
                    "a plugin has no more than it has"
                );
                return;
            }
            let granted = Granted {
                gpus: demand.gpus,
                per_gpu: match demand.sharing {
                    Sharing::Shared => demand.per_gpu,
                    Sharing::Exclusive => Bytes(88),
                },
                sharing: demand.sharing,
                borrows: false,
            };
            if self.ledger.policy().class(demand.class).engine {
                self.check_start(&placement.devices);
                let closed_until = self.ledger.pod_state(&uid(pod)).unwrap().starting;
                self.starting
                    .insert(uid(pod), closed_until.expect("it is to start"));
            }
            let broken = self
                .oracle
                .bind(&uid(pod), &node_name(node), &placement.devices, granted);
            assert_eq!(broken, []);
        }
    }

    /// No two engines start on a GPU at once.
    fn check_start(&self, devices: &[GpuUuid]) {
        for (other, _) in self
            .starting
            .iter()
            .filter(|(_, closed_until)| **closed_until > self.now)
        {
            let (_, its) = self.oracle.placement_of(other).unwrap();
            let beside = devices.iter().find(|gpu| its.contains(gpu));
            assert_eq!(beside, None, "{other} starts there");
        }
    }

    /// The pod has nothing any more.
    fn forget(&mut self, pod: u8) {
        self.oracle.end(&uid(pod));
        self.starting.remove(&uid(pod));
        self.on_devices.remove(&uid(pod));
    }

    /// Takes in a reading, and computes the unaccounted VRAM from its definition.
    fn read(&mut self, node: u8, reading: NodeReading) {
        if !self.ledger.has_node(&node_name(node)) {
            self.ledger.take_reading(&node_name(node), reading.into());
            return;
        }
        let known: Vec<GpuUuid> = self
            .ledger
            .node(&node_name(node))
            .unwrap()
            .devices
            .iter()
            .map(|d| d.uuid.clone())
            .collect();
        for gpu in &reading.gpus {
            if !known.contains(&gpu.uuid) {
                self.unaccounted.remove(&gpu.uuid);
                continue;
            }
            // A figure that is missing once takes nothing back.
            let Some(used) = gpu.used else { continue };
            let attributed: u64 = gpu.attributed.iter().map(|(_, bytes)| bytes.0).sum();
            let mut still_to_come = 0;
            for (uid, entry) in self.ledger.pod_states() {
                if let PodPhase::Bound(bound) = &entry.phase
                    && bound.since <= reading.sampled
                {
                    let has = gpu.attributed_to(uid).unwrap_or_default().0;
                    still_to_come += self.reserved(entry, &gpu.uuid).saturating_sub(has);
                }
            }
            let rest = used
                .0
                .saturating_sub(attributed)
                .saturating_sub(still_to_come);
            self.unaccounted
                .entry(gpu.uuid.clone())
                .or_default()
                .push(rest);
        }
        // A GPU that a reading does not list has no unaccounted VRAM, and starts again.
        for gone in known.iter().filter(|uuid| reading.gpu(uuid).is_none()) {
            self.unaccounted.remove(gone);
        }
        let shows = |pod: &PodUid| {
            reading
                .gpus
                .iter()
                .any(|gpu| gpu.attributed_to(pod).is_some())
        };
        self.departed.retain(|(of, pod), (at, ..)| {
            *of != node_name(node) || reading.sampled < *at || shows(pod)
        });
        self.ledger.take_reading(&node_name(node), reading.into());
    }

    /// What a pod was allocated on one GPU: nothing, its share, or the whole of it.
    fn reserved(&self, entry: &PodState, gpu: &GpuUuid) -> u64 {
        if entry.demand.is_allocated_externally() {
            return 0;
        }
        let Some(node) = entry.node().and_then(|node| self.ledger.node(node)) else {
            return 0;
        };
        if !node.devices.iter().any(|device| device.uuid == *gpu) {
            return 0;
        }
        let placed = entry.devices().filter(|uuids| {
            uuids
                .iter()
                .all(|uuid| node.devices.iter().any(|d| d.uuid == *uuid))
        });
        match placed {
            Some(uuids) if !uuids.contains(gpu) => 0,
            _ if entry.demand.sharing == Sharing::Exclusive => 88,
            _ => entry.demand.per_gpu.0,
        }
    }

    /// `free = total − reserved − headroom − Σ max(allocated, attributed) − unaccounted`, for nodes whose reading is fresh. A pod
    /// that has ended counts with all it had where it is attributed anything.
    pub(crate) fn check_free(&mut self) {
        let entries: Vec<(PodUid, PodState)> = self
            .ledger
            .pod_states()
            .into_iter()
            .map(|(uid, entry)| (uid.clone(), entry.clone()))
            .collect();
        for node in self.ledger.snapshot().nodes() {
            let Some(reading) = self.ledger.reading(&node.name) else {
                continue;
            };
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
                let held = entries.iter().any(|(_, entry)| {
                    entry
                        .reservation()
                        .is_some_and(|reservation| reservation.node == node.name)
                });
                let Some(seen) = reading
                    .gpu(&device.uuid)
                    .filter(|_| expected == Freshness::Fresh && !held)
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
                        let kept = match self.departed.get(&(node.name.clone(), uid.clone())) {
                            Some((_, devices, granted)) if devices.contains(&device.uuid) => {
                                *granted
                            }
                            _ => 0,
                        };
                        reserved.max(
                            seen.attributed_to(uid)
                                .map_or(0, |attributed| attributed.0.max(kept)),
                        )
                    })
                    .sum();
                let last = self
                    .unaccounted
                    .get(&device.uuid)
                    .map_or(&[][..], Vec::as_slice);
                let believed = if last.len() < 3 {
                    0
                } else {
                    *last[last.len() - 3..].iter().min().unwrap()
                };
                assert_eq!(
                    gpu.free().0,
                    88u64.saturating_sub(sum).saturating_sub(believed),
                    "{}",
                    device.uuid
                );
            }
        }
    }

    fn reserve(&mut self, pod: u8, node: u8) {
        let Some(demand) = self
            .ledger
            .pod_state(&uid(pod))
            .map(|entry| entry.demand.clone())
        else {
            return;
        };
        let Some(candidate) = self
            .ledger
            .candidates_for(&self.ledger.preemptor(&uid(pod)), [&node_name(node)])
            .pop()
        else {
            return;
        };
        for potential in &candidate.potential_victims {
            let victim = self.ledger.pod_state(&potential.uid).unwrap();
            let class = self.ledger.policy().class(victim.demand.class);
            let facts = VictimFacts {
                priority: victim.demand.priority,
                is_preemptible: class.eviction == Preemptibility::ForHigherPriority,
                is_protected: victim.disruption_info.do_not_disrupt,
            };
            let checked = facts.check(&potential.uid, &uid(pod), demand.priority);
            assert_eq!(checked, Ok(()));
        }
        let Some(set) = cheapest_victims(&candidate, &demand, BudgetRules::Keep) else {
            return;
        };
        let view = self.ledger.node(&node_name(node)).unwrap();
        let reservation = Reservation {
            node: node_name(node),
            devices: set
                .gpus
                .iter()
                .map(|gpu_index| view.devices[gpu_index].uuid.clone())
                .collect(),
            victims: set.all_victims().into(),
            deadline: self.now + Millis::seconds(60),
        };
        let result = self.ledger.reserve(&uid(pod), reservation);
        if self
            .ledger
            .pod_state(&uid(pod))
            .is_some_and(|entry| matches!(entry.phase, PodPhase::Waiting(_)))
        {
            let known = matches!(
                result,
                Ok(()) | Err(crate::ledger::AllocationFailure::AlreadyReserved { .. })
            );
            assert!(known, "what the search found can be held: {result:?}");
        }
    }

    /// A ledger built from nothing but what the API server keeps: nodes, bound pods, pending pods with their reservations.
    pub fn rebuilt(&self) -> Ledger {
        let mut ledger = Ledger::new(self.ledger.policy().clone());
        for (uid, entry) in self.ledger.pod_states() {
            let (uid, key, demand) = (uid.clone(), entry.key.clone(), entry.demand.clone());
            let state = match &entry.phase {
                PodPhase::Bound(bound) => {
                    let (node, devices) = (bound.node.clone(), bound.devices.clone());
                    ObservedPhase::Bound {
                        node,
                        devices,
                        starting: entry.starting.is_some(),
                        ran: None,
                    }
                }
                _ => ObservedPhase::Waiting(ObservedWaiting {
                    reservation: entry.reservation().cloned(),
                    ..ObservedWaiting::default()
                }),
            };
            ledger.observe_pod(PodObservation {
                uid,
                key,
                demand,
                state,
                observed: None,
            });
        }
        let published = self
            .ledger
            .node_views()
            .filter(|(name, _)| self.ledger.has_node(name));
        for (name, node) in published {
            ledger.set_node(name, node.kind, None);
            let offered = node.plugin.iter().filter(|share| share.allocatable > 0);
            let offered = offered
                .map(|share| (share.resource.clone(), share.allocatable))
                .collect();
            ledger.set_plugin_devices(name, offered);
            let reported = node
                .devices
                .iter()
                .filter(|device| device.health != Health::Lost)
                .cloned()
                .collect();
            ledger.report_all_devices(name, reported).unwrap();
        }
        ledger
    }
}
