//! Stowage as it ships: a pod is asked about by `filter`, bound on the best node by `bind`, and if no node fits, planned by the
//! planner, which reserves GPUs, evicts, and has the pod bound when its victims are gone. Engines under pressure get relief.

use super::FleetScheduler;
use crate::simulate::fleet::machines::Machines;
use crate::simulate::fleet::messages::{Act, Message, PodShown};
use crate::simulate::fleet::pods::Image;
use crate::simulate::shown::{self, GpuKind};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::audit::ledger::{Violation, audit};
use stowage_scheduling::control_loop::{
    ControlLoop, EdgeFacts, EvictionTask, NominationChange, PodWrite,
};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{Amounts, FilterNode, NodeFootprint, Requirements};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting};
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
    CheckpointAge, DisruptionInfo, ObservedDisruptionInfo, PodDeletion,
};
use stowage_scheduling::vocabulary::image::{ImageId, NodeImage};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::placement::Placement;

/// The pods that a kubelet takes unless it is told otherwise.
const MAX_PODS: u64 = 110;
/// The service ticks this often in a round. What follows from a write follows in a later tick.
const TICKS_OF_ROUND: usize = 5;

pub struct Stowage {
    control_loop: ControlLoop<Cluster>,
    policy: Arc<Policy>,
    names: Vec<String>,
    scores: ScoreCache,
    /// Pods that kube-scheduler has not asked about yet: higher priorities first, then as they came.
    unasked: BTreeSet<(Reverse<i32>, u64, PodUid)>,
    came: u64,
    waiting: BTreeMap<PodUid, VerbRequest>,
    /// The nodes to which waiting pods are nominated.
    nominated: BTreeMap<PodUid, NodeName>,
    /// Whether its ledger is checked after each round: that takes as long as the round.
    audits: bool,
    pub violations: Vec<Violation>,
}

impl Stowage {
    pub fn new(policy: Policy) -> Self {
        let policy = Arc::new(policy);
        Self {
            control_loop: ControlLoop::new(shown::empty_cluster(policy.clone())),
            policy,
            names: Vec::new(),
            scores: ScoreCache::default(),
            unasked: BTreeSet::new(),
            came: 0,
            waiting: BTreeMap::new(),
            nominated: BTreeMap::new(),
            audits: false,
            violations: Vec::new(),
        }
    }

    /// Checks its ledger after each round.
    pub fn audited(self) -> Self {
        Self {
            audits: true,
            ..self
        }
    }

    fn see(
        &mut self,
        now: Moment,
        PodShown {
            uid,
            spec,
            bound,
            checkpoint,
            leaving,
        }: &PodShown,
    ) {
        // Pods that cannot be understood are refused by the extender; scenarios have none.
        let Ok(demand) = spec.demand(&self.policy) else {
            return;
        };
        let state = match bound {
            Some(bound) => ObservedPhase::Bound {
                node: bound.node.clone(),
                devices: Some(bound.devices.clone()),
                starting: bound.starting,
                ran: Some(now.since(bound.since)),
            },
            None => ObservedPhase::Waiting(ObservedWaiting {
                // Its condition shows it, and the watch brings it back.
                reservation: self
                    .control_loop
                    .books
                    .ledger()
                    .reservation_of(uid)
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
            ..ObservedDisruptionInfo::default()
        };
        let wants = || Requirements {
            namespace: spec.namespace.clone(),
            ..Requirements::default()
        };
        let filters = match bound {
            None => FilterPod::Waiting(wants()),
            Some(bound) => FilterPod::Bound {
                footprint: footprint(&bound.node),
                successor: Some(wants()),
            },
        };
        self.control_loop.books.apply(FilterPodObserved {
            uid: uid.clone(),
            pod: filters,
        });
        let pod = shown::pod(uid, &spec.namespace, demand, state, observed);
        if bound.is_none() && leaving.is_none() && !self.waiting.contains_key(uid) {
            self.came += 1;
            self.unasked
                .insert((Reverse(spec.priority), self.came, uid.clone()));
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
        self.control_loop.books.apply(PodObserved(pod));
    }

    /// kube-scheduler asks about each new pod, and binds it where filter ranks first.
    fn ask(&mut self, acts: &mut Vec<Act>) {
        for (.., uid) in std::mem::take(&mut self.unasked) {
            if let Some(node) = self.best(&uid) {
                self.bind(&uid, &node, acts);
            }
        }
    }

    /// The node that filter ranks first, of all nodes; `None` if the pod fits nowhere.
    fn best(&mut self, uid: &PodUid) -> Option<NodeName> {
        let request = self.waiting.get(uid)?.clone();
        let names = self.names.iter().map(String::as_str);
        self.control_loop
            .books
            .best_node(request, names, &mut self.scores)
    }

    /// If the pod gets GPUs there, its Binding is written. Answers whether it does.
    fn bind(&mut self, uid: &PodUid, node: &NodeName, acts: &mut Vec<Act>) -> bool {
        let Some(decision) = self.control_loop.books.allocate(uid, node) else {
            return false;
        };
        let Placement { node, devices, .. } = decision.placement;
        acts.push(Act::Bind {
            uid: uid.clone(),
            node,
            devices,
        });
        true
    }

    /// Each write lands at once. Answers whether there was one.
    fn carry_out(&mut self, now: Moment, acts: &mut Vec<Act>) -> bool {
        let mut is_written = false;
        while let Some(write) = self.control_loop.next_write(now) {
            is_written = true;
            self.land(&write, acts);
            self.control_loop.landed(write, now);
        }
        is_written
    }

    /// What the API server and kube-scheduler make of a write. No pod has a gate.
    fn land(&mut self, write: &PodWrite, acts: &mut Vec<Act>) {
        match write {
            PodWrite::Status { uid, change, .. } => {
                match &change.nomination {
                    Some(NominationChange::To(node)) => {
                        self.nominated.insert(uid.clone(), node.clone());
                    }
                    Some(NominationChange::Cleared) => drop(self.nominated.remove(uid)),
                    None => {}
                }
                if change.touch.is_some() && self.waiting.contains_key(uid) {
                    self.retry(uid, acts);
                }
            }
            PodWrite::LiftGate { .. } => {}
            PodWrite::Evict { uid, task, .. } => acts.push(Act::Evict {
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

    /// kube-scheduler tries a pod again: on the node to which it is nominated, and else on any.
    fn retry(&mut self, uid: &PodUid, acts: &mut Vec<Act>) {
        let nominated = self.nominated.get(uid).cloned();
        if nominated.is_some_and(|node| self.bind(uid, &node, acts)) {
            return;
        }
        if let Some(node) = self.best(uid) {
            self.bind(uid, &node, acts);
        }
    }
}

impl FleetScheduler for Stowage {
    fn meet(&mut self, now: Moment, machines: &Machines) {
        self.control_loop.books.apply(ClockAdvanced(now));
        for machine in machines.iter() {
            let labels = Arc::new(machine.spec.labels.clone());
            let name = machine.spec.name.clone();
            self.names.push(name.as_str().into());
            let machine_labels = labels
                .iter()
                .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
                .collect();
            let filters = FilterNode {
                name: name.clone(),
                labels: Arc::new(machine_labels),
                taints: Arc::default(),
                allocatable: Amounts::default(),
                pods: MAX_PODS,
            };
            let node = NodeObserved::new(name, NodeKind::Stowage);
            let node = NodeObserved {
                labels,
                machine: Some(filters),
                ..node
            };
            let gpus = machine.gpus.iter().map(|gpu| gpu.uuid.clone());
            let kind = GpuKind {
                model: &machine.spec.gpu,
                vram: machine.spec.vram,
            };
            shown::add_node(&mut self.control_loop.books, node, gpus, kind);
        }
    }

    fn observe(&mut self, now: Moment, message: &Message) {
        self.control_loop.books.apply(ClockAdvanced(now));
        match message {
            Message::Pod(shown) => self.see(now, shown),
            Message::PodGone(uid) => {
                self.waiting.remove(uid);
                self.nominated.remove(uid);
                self.control_loop.books.apply(PodDeleted(uid.clone()));
            }
            Message::Start { uid, progress } => {
                self.control_loop.books.apply(EngineStartObserved {
                    uid: uid.clone(),
                    progress: *progress,
                });
            }
            Message::Reading { node, reading } => {
                self.control_loop.books.apply(ReadingReported {
                    node: node.clone(),
                    reading: reading.clone(),
                });
            }
            Message::Images { node, images } => {
                let images = images.iter().filter_map(node_image).collect();
                self.control_loop.books.apply(NodeImagesObserved {
                    node: node.clone(),
                    images: Some(images),
                });
            }
            Message::Bound { uid, node, devices } => {
                self.waiting.remove(uid);
                let (uid, node, devices) = (uid.clone(), node.clone(), Some(devices.clone()));
                self.control_loop
                    .books
                    .apply(BindingWritten { uid, node, devices });
            }
            Message::NotBound(uid) => self.control_loop.books.apply(BindingFailed(uid.clone())),
        }
    }

    fn round(&mut self, now: Moment, _: &Machines) -> Vec<Act> {
        let mut acts = Vec::new();
        self.control_loop.books.apply(ClockAdvanced(now));
        self.ask(&mut acts);
        for _ in 0..TICKS_OF_ROUND {
            self.control_loop.tick(now, true, EdgeFacts::default());
            if !self.carry_out(now, &mut acts) {
                break;
            }
        }
        if self.audits {
            self.violations
                .extend(audit(self.control_loop.books.ledger()));
        }
        acts
    }

    fn reads_reports(&self) -> bool {
        true
    }

    fn has_pending(&self) -> bool {
        !self.waiting.is_empty()
    }
}

/// Its CPU and memory are left out: scenarios are about GPUs.
fn footprint(node: &NodeName) -> NodeFootprint {
    NodeFootprint {
        node: node.clone(),
        amounts: Amounts::default(),
        ports: Arc::default(),
        repels: Arc::default(),
        volumes: 0,
        claims_devices: false,
    }
}

fn node_image(image: &Image) -> Option<NodeImage> {
    Some(NodeImage {
        image: ImageId::of(&image.name)?,
        bytes: image.size,
    })
}
