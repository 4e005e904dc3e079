//! Stowage as it ships: a pod is asked about by `filter`, bound on the best node by `bind`, and if no node fits, planned by the
//! planner, which reserves GPUs, evicts, and has the pod bound when its victims are gone. Engines under pressure get relief.

use super::FleetScheduler;
use crate::simulate::core_inputs::{self, NodeGpuKind};
use crate::simulate::fleet::machines::Machines;
use crate::simulate::fleet::messages::{BindingLoan, Message, PodSnapshot, SchedulerAction};
use crate::simulate::fleet::pods::Image;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::audit::ledger::{Violation, audit};
use stowage_scheduling::control_loop::{
    ControlLoop, EdgeFacts, EvictionTask, NominationChange, PodWrite,
};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{FilterNode, NodeFootprint, Requirements, ResourceList};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::binding::{BindingFailed, BindingWritten};
use stowage_scheduling::verbs::observe::{
    EngineStartObserved, FilterPod, FilterPodObserved, NodeImagesObserved, NodeObserved,
    PodDeleted, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, ObservedDisruptionInfo, ObservedLoan, PodDeletion,
};
use stowage_scheduling::vocabulary::image::{ImageId, NodeImage};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_signs::NodeSigns;
use stowage_scheduling::vocabulary::placement::Placement;

/// The pods that a kubelet takes unless it is told otherwise.
const MAX_PODS: u64 = 110;
/// The service ticks this often in a round. What follows from a write follows in a later tick.
const TICKS_PER_ROUND: usize = 5;

pub struct Stowage {
    control_loop: ControlLoop<Cluster>,
    policy: Arc<Policy>,
    node_names: Vec<String>,
    scores: ScoreCache,
    /// Pods that kube-scheduler has not asked about yet: higher priorities first, then as they came.
    new_pods: BTreeSet<(Reverse<i32>, u64, PodUid)>,
    arrivals: u64,
    waiting: BTreeMap<PodUid, VerbRequest>,
    /// The nodes to which waiting pods are nominated.
    nominated: BTreeMap<PodUid, NodeName>,
    /// Whether its ledger is checked after each round: that takes as long as the round.
    is_audited: bool,
    pub violations: Vec<Violation>,
}

impl Stowage {
    pub fn new(policy: Policy) -> Self {
        let policy = Arc::new(policy);
        Self {
            control_loop: ControlLoop::new(core_inputs::empty_cluster(policy.clone())),
            policy,
            node_names: Vec::new(),
            scores: ScoreCache::default(),
            new_pods: BTreeSet::new(),
            arrivals: 0,
            waiting: BTreeMap::new(),
            nominated: BTreeMap::new(),
            is_audited: false,
            violations: Vec::new(),
        }
    }

    /// Checks its ledger after each round.
    pub fn audited(self) -> Self {
        Self {
            is_audited: true,
            ..self
        }
    }

    fn update_pod(
        &mut self,
        now: Moment,
        PodSnapshot {
            uid,
            spec,
            bound,
            checkpoint,
            terminating_since: leaving,
        }: &PodSnapshot,
    ) {
        // Pods that cannot be understood are refused by the extender; scenarios have none.
        let Ok(demand) = spec.demand(&self.policy) else {
            return;
        };
        let state = match bound {
            Some(bound) => ObservedPhase::Bound {
                node: bound.node.clone(),
                devices: Some(bound.devices.clone()),
                starting: bound.is_starting,
                ran: Some(now.since(bound.since)),
            },
            None => ObservedPhase::Waiting(ObservedWaiting {
                // Its condition shows it, and the watch brings it back.
                reservation: self
                    .control_loop
                    .cluster_access
                    .ledger()
                    .reservation_status_of(uid)
                    .map(|status| status.reservation),
                nominated: self.nominated.get(uid).cloned(),
                ..ObservedWaiting::default()
            }),
        };
        let observed = ObservedDisruptionInfo {
            disruption_info: DisruptionInfo {
                owner: spec.owner.clone(),
                ..DisruptionInfo::default()
            },
            stamp: checkpoint.map_or(CheckpointAge::None, |at| CheckpointAge::Ago(now.since(at))),
            leaving: leaving.map(|at| PodDeletion {
                asked_ago: now.since(at),
                grace: spec.grace,
            }),
            loan: bound
                .as_ref()
                .map_or_else(ObservedLoan::default, |bound| ObservedLoan {
                    borrows: bound.loan.borrows,
                    has_vram_limits: bound.loan.has_vram_limits,
                    ..ObservedLoan::default()
                }),
            ..ObservedDisruptionInfo::default()
        };
        let requirements = || Requirements {
            namespace: spec.namespace.clone(),
            ..Requirements::default()
        };
        let filters = match bound {
            None => FilterPod::Waiting(requirements()),
            Some(bound) => FilterPod::Bound {
                footprint: footprint(&bound.node),
                successor: Some(requirements()),
            },
        };
        self.control_loop.cluster_access.apply(FilterPodObserved {
            uid: uid.clone(),
            pod: filters,
        });
        let pod = core_inputs::pod_observation(uid, &spec.namespace, demand, state, observed);
        if bound.is_none() && leaving.is_none() && !self.waiting.contains_key(uid) {
            self.arrivals += 1;
            self.new_pods
                .insert((Reverse(spec.priority), self.arrivals, uid.clone()));
            let (key, demand, waiting) = (
                pod.key.clone(),
                pod.demand.clone(),
                ObservedWaiting::default(),
            );
            self.waiting.insert(
                uid.clone(),
                VerbRequest {
                    uid: uid.clone(),
                    key,
                    demand,
                    waiting,
                    disruption: None,
                },
            );
        }
        self.control_loop.cluster_access.apply(PodObserved(pod));
    }

    /// kube-scheduler asks about each new pod, and binds it where filter ranks first.
    fn schedule_new_pods(&mut self, acts: &mut Vec<SchedulerAction>) {
        for (.., uid) in std::mem::take(&mut self.new_pods) {
            if let Some(node) = self.best_node(&uid) {
                self.bind(&uid, &node, acts);
            }
        }
    }

    /// The node that filter ranks first, of all nodes; `None` if the pod fits nowhere.
    fn best_node(&mut self, uid: &PodUid) -> Option<NodeName> {
        let request = self.waiting.get(uid)?.clone();
        let names = self.node_names.iter().map(String::as_str);
        self.control_loop
            .cluster_access
            .best_node(request, names, &mut self.scores)
    }

    /// If the pod gets GPUs there, its Binding is written. Answers whether it does.
    fn bind(&mut self, uid: &PodUid, node: &NodeName, acts: &mut Vec<SchedulerAction>) -> bool {
        let Some(decision) = self.control_loop.cluster_access.allocate(uid, node) else {
            return false;
        };
        let Placement {
            node,
            devices,
            borrowed_from,
            has_vram_limits,
            ..
        } = decision.placement;
        let loan = BindingLoan {
            borrows: !borrowed_from.is_empty(),
            has_vram_limits,
        };
        acts.push(SchedulerAction::Bind {
            uid: uid.clone(),
            node,
            devices,
            loan,
        });
        true
    }

    /// Each write lands at once. Answers whether there was one.
    fn perform_writes(&mut self, now: Moment, acts: &mut Vec<SchedulerAction>) -> bool {
        let mut is_written = false;
        while let Some(write) = self.control_loop.next_write(now) {
            is_written = true;
            self.commit(&write, acts);
            self.control_loop.complete_write(write, now);
        }
        is_written
    }

    /// What the API server and kube-scheduler make of a write. No pod has a gate.
    fn commit(&mut self, write: &PodWrite, acts: &mut Vec<SchedulerAction>) {
        match write {
            PodWrite::Status { uid, change, .. } => {
                match &change.nomination {
                    Some(NominationChange::To(node)) => {
                        self.nominated.insert(uid.clone(), node.clone());
                    }
                    Some(NominationChange::Cleared) => drop(self.nominated.remove(uid)),
                    None => {}
                }
                if !self.waiting.contains_key(uid) {
                    return;
                }
                self.observe_waiting(uid);
                if change.requeue.is_some() {
                    self.retry(uid, acts);
                }
            }
            PodWrite::RemoveGate { .. } => {}
            PodWrite::Evict { uid, task, .. } => acts.push(SchedulerAction::Evict {
                uid: uid.clone(),
                preemptor: match task {
                    EvictionTask::Reservation { preemptor } => Some(preemptor.clone()),
                    EvictionTask::Relief
                    | EvictionTask::LoanEnd
                    | EvictionTask::OrphanedMember
                    | EvictionTask::Overuse => None,
                },
            }),
        }
    }

    /// The watch shows what was written of a pod that waits.
    fn observe_waiting(&mut self, uid: &PodUid) {
        let Some(pod) = self.control_loop.cluster_access.ledger().pod_state(uid) else {
            return;
        };
        let state = ObservedPhase::Waiting(ObservedWaiting {
            reservation: pod.reservation().cloned(),
            nominated: self.nominated.get(uid).cloned(),
            ..ObservedWaiting::default()
        });
        let observation = PodObservation {
            uid: uid.clone(),
            key: pod.key.clone(),
            demand: pod.demand.clone(),
            state,
            observed: None,
        };
        self.control_loop
            .cluster_access
            .apply(PodObserved(observation));
    }

    /// kube-scheduler tries a pod again: on the node to which it is nominated, and else on any.
    fn retry(&mut self, uid: &PodUid, acts: &mut Vec<SchedulerAction>) {
        let nominated = self.nominated.get(uid).cloned();
        if nominated.is_some_and(|node| self.bind(uid, &node, acts)) {
            return;
        }
        if let Some(node) = self.best_node(uid) {
            self.bind(uid, &node, acts);
        }
    }
}

impl FleetScheduler for Stowage {
    fn initialize(&mut self, now: Moment, machines: &Machines) {
        self.control_loop.cluster_access.apply(ClockAdvanced(now));
        for machine in machines.iter() {
            let labels = Arc::new(machine.spec.labels.clone());
            let name = machine.spec.name.clone();
            self.node_names.push(name.as_str().into());
            let machine_labels = labels
                .iter()
                .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
                .collect();
            let filters = FilterNode {
                name: name.clone(),
                labels: Arc::new(machine_labels),
                taints: Arc::default(),
                allocatable: ResourceList::default(),
                pods: MAX_PODS,
            };
            let node = NodeObserved::new(name, NodeKind::Stowage);
            let node = NodeObserved {
                labels,
                signs: NodeSigns::with_vram_limits(),
                machine: Some(filters),
                ..node
            };
            let gpus = machine.gpus.iter().map(|gpu| gpu.uuid.clone());
            let kind = NodeGpuKind {
                model: &machine.spec.gpu,
                vram: machine.spec.vram,
            };
            core_inputs::add_node(&mut self.control_loop.cluster_access, node, gpus, kind);
        }
    }

    fn observe(&mut self, now: Moment, message: &Message) {
        self.control_loop.cluster_access.apply(ClockAdvanced(now));
        match message {
            Message::Pod(shown) => self.update_pod(now, shown),
            Message::PodDeleted(uid) => {
                self.waiting.remove(uid);
                self.nominated.remove(uid);
                self.control_loop
                    .cluster_access
                    .apply(PodDeleted(uid.clone()));
            }
            Message::Start { uid, progress } => {
                self.control_loop.cluster_access.apply(EngineStartObserved {
                    uid: uid.clone(),
                    progress: *progress,
                });
            }
            Message::Reading { node, reading } => {
                self.control_loop.cluster_access.apply(ReadingReported {
                    node: node.clone(),
                    reading: reading.clone(),
                });
            }
            Message::Images { node, images } => {
                let images = images.iter().filter_map(node_image).collect();
                self.control_loop.cluster_access.apply(NodeImagesObserved {
                    node: node.clone(),
                    images: Some(images),
                });
            }
            Message::Bound { uid, node, devices } => {
                self.waiting.remove(uid);
                let (uid, node, devices) = (uid.clone(), node.clone(), Some(devices.clone()));
                self.control_loop
                    .cluster_access
                    .apply(BindingWritten { uid, node, devices });
            }
            Message::BindingRefused(uid) => self
                .control_loop
                .cluster_access
                .apply(BindingFailed(uid.clone())),
        }
    }

    fn round(&mut self, now: Moment, _: &Machines) -> Vec<SchedulerAction> {
        let mut actions = Vec::new();
        self.control_loop.cluster_access.apply(ClockAdvanced(now));
        self.schedule_new_pods(&mut actions);
        for _ in 0..TICKS_PER_ROUND {
            self.control_loop.tick(now, true, EdgeFacts::default());
            if !self.perform_writes(now, &mut actions) {
                break;
            }
        }
        if self.is_audited {
            self.violations
                .extend(audit(self.control_loop.cluster_access.ledger()));
        }
        actions
    }

    fn reads_reports(&self) -> bool {
        true
    }

    fn has_pending(&self) -> bool {
        let policy = self.control_loop.cluster_access.ledger().policy();
        let mut classes = policy.classes().iter();
        // An engine may need relief while no pod waits.
        !self.waiting.is_empty() || classes.any(|class| !class.latency_limits().is_none())
    }
}

/// Its CPU and memory are left out: scenarios are about GPUs.
fn footprint(node: &NodeName) -> NodeFootprint {
    NodeFootprint {
        node: node.clone(),
        amounts: ResourceList::default(),
        ports: Arc::default(),
        repels: Arc::default(),
        volumes: 0,
        claims_devices: false,
    }
}

fn node_image(image: &Image) -> Option<NodeImage> {
    Some(NodeImage {
        image: ImageId::from_reference(&image.name)?,
        bytes: image.size,
    })
}
