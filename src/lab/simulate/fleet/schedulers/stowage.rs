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
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::{Amounts, FilterNode, NodeFootprint, Requirements};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::planning::{PlanStep, PlannedPlacement, PressureWatch, plan};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::binding::{BindingFailed, BindingWritten};
use stowage_scheduling::verbs::filter::{self, FilterAsked};
use stowage_scheduling::verbs::observe::{
    EngineStartObserved, FilterPod, FilterPodObserved, NodeImagesObserved, NodeObserved,
    PodDeleted, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::{ClockAdvanced, Tick};
use stowage_scheduling::verbs::wait::{
    EvictionsOrdered, NoPlacementFound, PodEvicted, PodRequeued, ReservePlaces, TakePending,
};
use stowage_scheduling::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, ObservedDisruptionInfo, PodDeletion,
};
use stowage_scheduling::vocabulary::image::{ImageId, NodeImage};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::placement::Placement;

/// The pods that a kubelet takes unless it is told otherwise.
const MAX_PODS: u64 = 110;
/// Pods of one planning run.
const PODS_PER_RUN: usize = 2048;

pub struct Stowage {
    cluster: Cluster,
    policy: Arc<Policy>,
    names: Vec<String>,
    scores: ScoreCache,
    /// Pods that kube-scheduler has not asked about yet: higher priorities first, then as they came.
    unasked: BTreeSet<(Reverse<i32>, u64, PodUid)>,
    came: u64,
    waiting: BTreeMap<PodUid, VerbRequest>,
    /// Evictions that were ordered and not seen yet.
    ordered: BTreeSet<PodUid>,
    pressure: PressureWatch,
    /// Whether its ledger is checked after each round: that takes as long as the round.
    audits: bool,
    pub violations: Vec<Violation>,
}

impl Stowage {
    pub fn new(policy: Policy) -> Self {
        let policy = Arc::new(policy);
        Self {
            cluster: shown::empty_cluster(policy.clone()),
            policy,
            names: Vec::new(),
            scores: ScoreCache::default(),
            unasked: BTreeSet::new(),
            came: 0,
            waiting: BTreeMap::new(),
            ordered: BTreeSet::new(),
            pressure: PressureWatch::default(),
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
                    .cluster
                    .reservation_of(uid)
                    .map(|status| status.reservation),
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
        if leaving.is_some() {
            self.ordered.remove(uid);
        }
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
        self.cluster.apply(FilterPodObserved {
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
        self.cluster.apply(PodObserved(pod));
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
        let view = self.cluster.apply(FilterAsked(request));
        let mut scores = self
            .scores
            .take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter::filter(&view, self.names.iter().map(String::as_str), &mut scores);
        self.scores.put(scores);
        let Some(best) = list.best.first() else {
            self.cluster.apply(filter::refused(&view, &list));
            return None;
        };
        self.cluster.apply(filter::offered(&view, best));
        Some(view.snapshot.nodes()[best.node].name.clone())
    }

    /// If the pod gets GPUs there, its Binding is written.
    fn bind(&mut self, uid: &PodUid, node: &NodeName, acts: &mut Vec<Act>) {
        let placement = shown::allocate(&mut self.cluster, uid, node);
        acts.extend(placement.map(|Placement { node, devices, .. }| Act::Bind {
            uid: uid.clone(),
            node,
            devices,
        }));
    }

    /// Orders the eviction, unless that was done.
    fn evict(&mut self, victim: &PodUid, preemptor: &PodUid, acts: &mut Vec<Act>) {
        if !self.cluster.is_leaving(victim) && self.ordered.insert(victim.clone()) {
            self.cluster.apply(PodEvicted(victim.clone()));
            acts.push(Act::Evict {
                uid: victim.clone(),
                preemptor: Some(preemptor.clone()),
            });
        }
    }

    /// The planner's run, and what follows from each reservation.
    fn plan(&mut self, acts: &mut Vec<Act>) {
        let pending = self.cluster.apply(TakePending {
            limit: PODS_PER_RUN,
        });
        if !pending.is_empty() {
            let kube_filters = self.cluster.kube_filters().snapshot();
            let generation = self.cluster.generation();
            for step in plan(self.cluster.scratch(), &kube_filters, &pending) {
                match step {
                    PlanStep::Place(places) => self.take(places, generation, acts),
                    PlanStep::Wake { uid, .. } => self.cluster.apply(PodRequeued(uid)),
                    PlanStep::Wait { uid, .. } => {
                        self.cluster.apply(NoPlacementFound { uid, generation })
                    }
                }
            }
        }
        for held in self
            .cluster
            .reservation_status()
            .into_iter()
            .filter(|held| held.is_free)
        {
            self.bind(&held.uid, &held.reservation.node, acts);
        }
    }

    /// Evicts neighbors of engines under pressure.
    fn relieve(&mut self, acts: &mut Vec<Act>) {
        for relief in self.pressure.look(&self.cluster, &BTreeSet::new()) {
            let uid = relief.uid;
            if self.cluster.may_order(std::slice::from_ref(&uid))
                && self.ordered.insert(uid.clone())
            {
                self.cluster.apply(EvictionsOrdered(vec![uid.clone()]));
                self.cluster.apply(PodEvicted(uid.clone()));
                acts.push(Act::Evict {
                    uid,
                    preemptor: None,
                });
            }
        }
    }

    fn take(&mut self, places: Vec<PlannedPlacement>, generation: u64, acts: &mut Vec<Act>) {
        if self
            .cluster
            .apply(ReservePlaces {
                places: places.clone(),
                generation,
            })
            .is_err()
        {
            return;
        }
        for place in places {
            let remaining = self
                .cluster
                .reservation_of(&place.uid)
                .map(|status| status.remaining);
            // Of the others nothing but their memory is there.
            remaining
                .iter()
                .flatten()
                .for_each(|victim| self.evict(&victim.uid, &place.uid, acts));
        }
    }
}

impl FleetScheduler for Stowage {
    fn meet(&mut self, now: Moment, machines: &Machines) {
        self.cluster.apply(ClockAdvanced(now));
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
            shown::add_node(&mut self.cluster, node, gpus, kind);
        }
    }

    fn observe(&mut self, now: Moment, message: &Message) {
        self.cluster.apply(ClockAdvanced(now));
        match message {
            Message::Pod(shown) => self.see(now, shown),
            Message::PodGone(uid) => {
                self.waiting.remove(uid);
                self.ordered.remove(uid);
                self.cluster.apply(PodDeleted(uid.clone()));
            }
            Message::Start { uid, progress } => {
                self.cluster.apply(EngineStartObserved {
                    uid: uid.clone(),
                    progress: *progress,
                });
            }
            Message::Reading { node, reading } => {
                self.cluster.apply(ReadingReported {
                    node: node.clone(),
                    reading: reading.clone(),
                });
            }
            Message::Images { node, images } => {
                let images = images.iter().filter_map(node_image).collect();
                self.cluster.apply(NodeImagesObserved {
                    node: node.clone(),
                    images: Some(images),
                });
            }
            Message::Bound { uid, node, devices } => {
                self.waiting.remove(uid);
                let (uid, node, devices) = (uid.clone(), node.clone(), Some(devices.clone()));
                self.cluster.apply(BindingWritten { uid, node, devices });
            }
            Message::NotBound(uid) => self.cluster.apply(BindingFailed(uid.clone())),
        }
    }

    fn round(&mut self, now: Moment, _: &Machines) -> Vec<Act> {
        let mut acts = Vec::new();
        self.cluster.apply(Tick {
            now,
            is_leading: true,
        });
        self.ask(&mut acts);
        self.relieve(&mut acts);
        self.plan(&mut acts);
        if self.audits {
            self.violations.extend(audit(&self.cluster));
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
