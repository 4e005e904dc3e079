//! The control loop before an API server that loses writes and answers, watches that are late, and a Lease that comes and goes.
//!
//! The oracle knows pods as the API server has them, and nothing of the ledger. No replica that knows that it stands by writes; no pod
//! has two writes in progress; a victim is evicted only once its preemptor's reservation is written, and is of lower priority and
//! preemptible; no gate is lifted before the nomination is written; no GPU has more than it holds. When all writes land again, no pod
//! stays behind the gate.

use crate::control_loop::{
    ControlLoop, ControlPlaneError, EdgeFacts, EvictionOutcome, EvictionTask, LoopAction,
    NominationChange, PodWrite, ReservationChange, RunEnd, WriteOutcome,
};
use crate::ids::{GpuUuid, LeaderEpoch, NodeName, PodUid};
use crate::kube_filters::{FilterNode, Requirements, ResourceList};
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use crate::placing::score_cache::ScoreCache;
use crate::testkit::numbered::{key, node_name, uid};
use crate::testkit::{demand_of, unit_gpu};
use crate::units::Millis;
use crate::verbs::Cluster;
use crate::verbs::binding::BindingWritten;
use crate::verbs::observe::{
    DevicesReported, FilterPod, FilterPodObserved, NodeObserved, PodDeleted, PodObserved,
};
use crate::verbs::tick::{LeadershipBegan, LeadershipEnded};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, PodDeletion};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::placement::Reservation;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Of 100 B, a tenth is headroom.
const CAPACITY: u64 = 90;
const NODES: u8 = 2;
const PODS: u8 = 10;

#[derive(Debug, Clone)]
enum Step {
    Arrive(u8),
    Tick(u64),
    /// What becomes of the write in progress of this place.
    Answer(usize, WriteFate),
    /// The watch shows the pod as it is.
    Show(u8),
    /// kube-scheduler tries the pod.
    Schedule(u8),
    /// A pod that was told to leave is gone.
    Go(u8),
    Lead(bool),
}

#[derive(Debug, Clone, Copy)]
enum WriteFate {
    Lands,
    /// It lands, and the answer is lost.
    LandsUnanswered,
    /// It does not land, and nobody knows.
    Lost,
    Refused,
}

fn step() -> impl Strategy<Value = Step> {
    let fate = prop_oneof![
        8 => Just(WriteFate::Lands),
        2 => Just(WriteFate::LandsUnanswered),
        2 => Just(WriteFate::Lost),
        1 => Just(WriteFate::Refused),
    ];
    prop_oneof![
        4 => (0..PODS).prop_map(Step::Arrive),
        8 => (1u64..3000).prop_map(Step::Tick),
        12 => (any::<prop::sample::Index>(), fate)
            .prop_map(|(index, fate)| Step::Answer(index.index(64), fate)),
        8 => (0..PODS).prop_map(Step::Show),
        4 => (0..PODS).prop_map(Step::Schedule),
        3 => (0..PODS).prop_map(Step::Go),
        1 => prop::bool::weighted(0.7).prop_map(Step::Lead),
    ]
}

/// 0 to 3 are jobs that run or come ungated, 4 to 6 come behind the planner's gate, and the others are urgent ones.
fn demand(pod: u8) -> Demand {
    let vram = [60, 50, 40, 80, 50, 30, 90, 60, 80, 40][usize::from(pod)];
    demand_of(vram, 1, Sharing::Shared, priority(pod))
}

fn priority(pod: u8) -> i32 {
    match pod {
        0..4 => -10,
        4..7 => 0,
        _ => 100,
    }
}

fn number(uid: &PodUid) -> u8 {
    uid.as_str().trim_start_matches("uid-").parse().unwrap()
}

/// A pod as the API server has it.
#[derive(Debug, Clone, Default)]
struct StoredPod {
    is_gated: bool,
    nominated: Option<NodeName>,
    reservation: Option<Reservation>,
    /// A reservation was written for it at some time, and which victims it has had.
    victims: Vec<PodUid>,
    bound: Option<(NodeName, Arc<[GpuUuid]>)>,
    is_leaving: bool,
}

struct World {
    control_loop: ControlLoop<Cluster>,
    stored: BTreeMap<u8, StoredPod>,
    in_progress: Vec<PodWrite>,
    is_leading: bool,
    /// It has ticked since it stopped leading. Until then whoever sends its writes refuses them.
    knows: bool,
    epoch: i32,
}

impl World {
    fn new() -> Self {
        let mut cluster = Cluster::new(Arc::default());
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        for node in 0..NODES {
            let observed = NodeObserved::new(node_name(node), NodeKind::Stowage);
            cluster.apply(NodeObserved {
                machine: Some(FilterNode {
                    name: node_name(node),
                    labels: Arc::default(),
                    taints: Arc::default(),
                    allocatable: ResourceList::default(),
                    pods: 110,
                }),
                ..observed
            });
            let devices = [unit_gpu(node, 0)].into();
            let reported = DevicesReported {
                node: node_name(node),
                devices,
                are_all: true,
            };
            cluster.apply(reported).unwrap();
        }
        Self {
            control_loop: ControlLoop::new(cluster),
            stored: BTreeMap::new(),
            in_progress: Vec::new(),
            is_leading: true,
            knows: false,
            epoch: 1,
        }
    }

    fn cluster(&mut self) -> &mut Cluster {
        &mut self.control_loop.cluster_access
    }

    fn apply_step(&mut self, step: Step) {
        match step {
            Step::Arrive(pod) => {
                let is_gated = matches!(pod, 4..7);
                self.stored.entry(pod).or_insert_with(|| StoredPod {
                    is_gated,
                    ..StoredPod::default()
                });
                self.watch_pod(pod);
            }
            Step::Tick(millis) => self.tick(millis),
            Step::Answer(index, fate) => {
                if !self.in_progress.is_empty() {
                    let write = self.in_progress.remove(index % self.in_progress.len());
                    self.answer(write, fate);
                }
            }
            Step::Show(pod) => self.watch_pod(pod),
            Step::Schedule(pod) => self.schedule(pod),
            Step::Go(pod) => self.delete_pod(pod),
            Step::Lead(leads) => self.lead(leads),
        }
        self.check_gpus();
    }

    fn lead(&mut self, leads: bool) {
        if leads == self.is_leading {
            return;
        }
        (self.is_leading, self.knows) = (leads, false);
        if leads {
            self.epoch += 1;
            let epoch = LeaderEpoch::new("lease", self.epoch, "nonce");
            self.cluster().apply(LeadershipBegan(epoch));
        } else {
            self.cluster().apply(LeadershipEnded);
        }
    }

    fn tick(&mut self, millis: u64) {
        let now = self.cluster().ledger().now() + Millis(millis);
        let is_leading = self.is_leading;
        self.control_loop
            .tick(now, is_leading, EdgeFacts::default());
        self.knows = !is_leading;
        self.act();
    }

    fn act(&mut self) {
        while let Some(act) = self.control_loop.next_action() {
            let now = self.cluster().ledger().now();
            match act {
                LoopAction::Write(write) => self.begin(write),
                LoopAction::Plan(job) => {
                    let ended = RunEnd::Planned(job.run(&|| false));
                    let is_leading = self.is_leading;
                    self.control_loop.handle_run_end(ended, is_leading, now);
                }
                LoopAction::CheckPressure(job) => {
                    self.control_loop.handle_pressure(Some(job.run()))
                }
                LoopAction::Event(_) | LoopAction::Record(_) | LoopAction::StopPlanning => {}
            }
        }
    }

    fn begin(&mut self, write: PodWrite) {
        let now = self.cluster().ledger().now();
        if !self.is_leading {
            assert!(!self.knows, "a standby writes: {write:?}");
            return self.refuse(write);
        }
        let is_alone = |one: &PodWrite| one.uid() != write.uid();
        assert!(
            self.in_progress.iter().all(is_alone),
            "two at once: {write:?}"
        );
        let Some(write) = write.clone().revalidate(self.cluster().ledger()) else {
            return self
                .control_loop
                .handle_write_outcome(WriteOutcome::Dropped(write), now);
        };
        match &write {
            PodWrite::Evict { uid, task, .. } => self.check_eviction(uid, task),
            PodWrite::RemoveGate {
                uid, reservation, ..
            } => {
                // Of a pod that is gone meanwhile nothing is known.
                if let Some(pod) = self.stored.get(&number(uid)) {
                    assert_eq!(pod.nominated.as_ref(), Some(&reservation.node), "{pod:?}");
                }
            }
            PodWrite::Status { .. } => {}
        }
        self.in_progress.push(write);
    }

    fn check_eviction(&self, victim: &PodUid, task: &EvictionTask) {
        let EvictionTask::Reservation { preemptor } = task else {
            panic!("nothing else evicts here: {task:?}");
        };
        let (victim, preemptor) = (number(victim), number(preemptor));
        assert!(priority(victim) < 0, "{victim} is not preemptible");
        assert!(priority(victim) < priority(preemptor));
        if let Some(pod) = self.stored.get(&preemptor) {
            assert!(pod.victims.contains(&uid(victim)), "{victim} for {pod:?}");
        }
    }

    fn answer(&mut self, write: PodWrite, fate: WriteFate) {
        if matches!(fate, WriteFate::Lands | WriteFate::LandsUnanswered) {
            self.commit(&write);
        }
        let now = self.cluster().ledger().now();
        match (fate, write) {
            (WriteFate::Lands, write) => self.control_loop.complete_write(write, now),
            (WriteFate::LandsUnanswered | WriteFate::Lost, write) => {
                self.control_loop
                    .handle_write_outcome(write.into_panicked(), now);
            }
            (WriteFate::Refused, write) => self.refuse(write),
        }
        self.act();
    }

    fn refuse(&mut self, write: PodWrite) {
        let now = self.cluster().ledger().now();
        let written = Err(ControlPlaneError::Refused("no".into()));
        let later = EvictionOutcome::TryLater { after: None };
        self.control_loop
            .handle_write_outcome(write.into_outcome(written, later), now);
    }

    fn commit(&mut self, write: &PodWrite) {
        let Some(pod) = self.stored.get_mut(&number(write.uid())) else {
            return;
        };
        match write {
            PodWrite::Status {
                change, purpose, ..
            } => {
                match &change.nomination {
                    Some(NominationChange::To(node)) => pod.nominated = Some(node.clone()),
                    Some(NominationChange::Cleared) => pod.nominated = None,
                    None => {}
                }
                match &change.reservation {
                    Some(ReservationChange::Set(reservation)) => {
                        pod.victims.extend(reservation.victims.iter().cloned());
                        pod.reservation = Some(reservation.clone());
                    }
                    Some(ReservationChange::Ended) => pod.reservation = None,
                    None => {}
                }
                if matches!(purpose, crate::control_loop::StatusPurpose::Release { .. }) {
                    pod.is_gated = false;
                }
            }
            PodWrite::RemoveGate { .. } => pod.is_gated = false,
            PodWrite::Evict { .. } => pod.is_leaving = true,
        }
    }

    fn watch_pod(&mut self, pod: u8) {
        let Some(stored) = self.stored.get(&pod).cloned() else {
            return;
        };
        let gate = match stored.is_gated {
            true => SchedulingGate::Planned,
            false => SchedulingGate::Open,
        };
        let state = match stored.bound {
            Some((node, devices)) => ObservedPhase::Bound {
                node,
                devices: Some(devices),
                starting: false,
                ran: None,
            },
            None => ObservedPhase::Waiting(ObservedWaiting {
                reservation: stored.reservation,
                gate,
                nominated: stored.nominated,
            }),
        };
        let leaving = PodDeletion {
            asked_ago: Millis(0),
            grace: Millis::seconds(30),
        };
        let observed = ObservedDisruptionInfo {
            leaving: stored.is_leaving.then_some(leaving),
            ..ObservedDisruptionInfo::default()
        };
        self.cluster().apply(FilterPodObserved {
            uid: uid(pod),
            pod: FilterPod::Waiting(Requirements::default()),
        });
        self.cluster().apply(PodObserved(PodObservation {
            uid: uid(pod),
            key: key(pod),
            demand: demand(pod),
            state,
            observed: Some(observed),
        }));
    }

    /// Only the leader answers kube-scheduler.
    fn schedule(&mut self, pod: u8) {
        let waits = |pod: &StoredPod| !pod.is_gated && pod.bound.is_none();
        if !self.is_leading || !self.stored.get(&pod).is_some_and(waits) {
            return;
        }
        self.watch_pod(pod);
        let names: Vec<String> = (0..NODES).map(|node| node_name(node).to_string()).collect();
        let nominated = self.stored[&pod].nominated.clone();
        let cluster = self.cluster();
        let Some(request) = cluster.request_of(&uid(pod)) else {
            return;
        };
        let names = names.iter().map(String::as_str);
        let best = || cluster.best_node(request, names, &mut ScoreCache::default());
        let Some(node) = nominated.or_else(best) else {
            return;
        };
        let Some(decision) = self.cluster().allocate(&uid(pod), &node) else {
            return;
        };
        let (devices, recorded) = (
            decision.placement.devices.clone(),
            decision.placement.recorded_gpus(),
        );
        self.stored.get_mut(&pod).unwrap().bound = Some((node.clone(), devices));
        self.cluster().apply(BindingWritten {
            uid: uid(pod),
            node,
            devices: recorded,
        });
        self.watch_pod(pod);
    }

    fn delete_pod(&mut self, pod: u8) {
        if self.stored.get(&pod).is_some_and(|pod| pod.is_leaving) {
            self.stored.remove(&pod);
            self.cluster().apply(PodDeleted(uid(pod)));
        }
    }

    fn check_gpus(&self) {
        let mut used: BTreeMap<&GpuUuid, u64> = BTreeMap::new();
        for (pod, stored) in &self.stored {
            for gpu in stored.bound.iter().flat_map(|(_, gpus)| gpus.iter()) {
                *used.entry(gpu).or_default() += demand(*pod).per_gpu.0;
            }
        }
        for (gpu, used) in used {
            assert!(used <= CAPACITY, "{gpu} has {used} of {CAPACITY}");
        }
    }

    /// From now on every write lands, every watch shows, and who is to leave goes.
    fn recover(&mut self) {
        self.lead(true);
        for _ in 0..100 {
            self.tick(1000);
            while let Some(write) = self.in_progress.pop() {
                self.answer(write, WriteFate::Lands);
            }
            for pod in 0..PODS {
                self.watch_pod(pod);
                self.schedule(pod);
                self.delete_pod(pod);
            }
            self.check_gpus();
        }
        let gated = self.stored.iter().find(|(_, pod)| pod.is_gated);
        assert!(gated.is_none(), "{gated:?}");
        assert!(self.in_progress.is_empty());
    }
}

proptest! {
    #[test]
    fn the_control_loop_keeps_its_invariants_whatever_becomes_of_its_writes(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.apply_step(step));
        world.recover();
    }
}
