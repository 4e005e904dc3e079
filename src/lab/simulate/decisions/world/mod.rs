//! What happens outside of the core: an API server with its pods, machines with their processes, kube-scheduler's requests. It
//! brings inputs to the core, writes down in the [record](super::record) what was shown and answered, and has each answer checked.
//!
//! [`changes`]: pods, budgets and policies come and go; [`backlog`]: GPUs are full; [`machines`]: GPUs, processes and what agents report; [`verbs`]: the four
//! requests; [`planner`]: planner runs and evictions; [`writes`]: Bindings that land, or not; [`time`]: what falls due.

mod backlog;
mod changes;
mod machines;
mod planner;
mod time;
mod verbs;
mod writes;

use super::core_under_test::{CoreUnderTest, demand, node_name, pod_key, pod_uid};
use super::draws::Draws;
use super::oracle::Checked;
use super::planted::PlantedBug;
use super::record::{
    GIB, Hardware, KnownState, MOST_GPUS, Mask, NodeRecord, Place, PodRecord, PodSpec, Record, each,
};
use super::rules::{HEADROOM, PolicyRules};
use super::step::StepKind;
use super::tally::DecisionTally;
use machines::Machine;
use std::collections::VecDeque;
use std::sync::Arc;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::placement::Reservation;
use writes::{OpenWrite, Settling};

/// When a sequence begins, in milliseconds: pods can have run for long before.
const START: u64 = 1_000_000_000;

/// A pod as the API server has it.
#[derive(Debug, Clone, Default)]
struct ApiPod {
    exists: bool,
    bound: Option<(Place, u64)>,
    /// It is being deleted: when it is gone.
    leaving: Option<u64>,
    /// The reservation that its condition shows.
    condition: Option<Reservation>,
    is_gated: bool,
    nominated: Option<u8>,
    /// Nodes that passed when it was filtered last, best first.
    passed: Vec<u8>,
    is_refused: bool,
    /// It was refused all nodes.
    is_refused_everywhere: bool,
}

/// The parts of a pod that never change, as the core is told of them.
struct PodNames {
    uid: PodUid,
    key: PodKey,
    demand: Demand,
}

/// What the watches have not shown yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The pod is bound, or begins to leave.
    Changed(u32),
    Deleted(u32),
}

pub struct World<'b> {
    pub draws: Draws<'b>,
    pub tally: DecisionTally,
    pub record: Record,
    /// What the step did, if someone wants to know.
    pub notes: Vec<String>,
    pub is_aloud: bool,
    core: CoreUnderTest,
    policies: [PolicyRules; 2],
    active: usize,
    node_names: Vec<NodeName>,
    pods: Vec<PodNames>,
    api: Vec<ApiPod>,
    /// Pods that exist.
    alive: Vec<u32>,
    most_pods: usize,
    groups: u8,
    machines: Vec<Machine>,
    writes: Vec<OpenWrite>,
    settling: Vec<Settling>,
    events: VecDeque<Event>,
    deletions: u32,
}

impl<'b> World<'b> {
    pub fn new(mut draws: Draws<'b>, most_nodes: u8, planted: Option<PlantedBug>) -> Self {
        let policies = [PolicyRules::draw(&mut draws), PolicyRules::draw(&mut draws)];
        let nodes = match draws.below(20) {
            0..10 => draws.between(1, 3),
            10..17 => draws.between(4, 8),
            _ => draws.between(9, 32),
        };
        let nodes = nodes.min(usize::from(most_nodes));
        let hardware: Vec<Vec<Hardware>> = (0..nodes).map(|_| draw_hardware(&mut draws)).collect();
        let gpus: usize = hardware.iter().map(Vec::len).sum();
        let machines = hardware
            .iter()
            .map(|hardware| Machine::new(hardware, &mut draws))
            .collect();
        let policy = Arc::new(policies[0].policy(planted));
        let record = Record {
            now: START,
            rules: policies[0].clone(),
            nodes: hardware.into_iter().map(NodeRecord::new).collect(),
            pods: Vec::new(),
            known: Vec::new(),
            budgets: Default::default(),
            evictions: Vec::new(),
            minute_reserved: Vec::new(),
        };
        let mut world = Self {
            tally: DecisionTally::default(),
            record,
            notes: Vec::new(),
            is_aloud: false,
            core: CoreUnderTest {
                cluster: Cluster::new(policy),
                scores: Default::default(),
                planted,
            },
            policies,
            active: 0,
            node_names: (0..nodes as u8).map(node_name).collect(),
            pods: Vec::new(),
            api: Vec::new(),
            alive: Vec::new(),
            most_pods: (3 + gpus * 3 / 2).min(64),
            groups: 0,
            machines,
            writes: Vec::new(),
            settling: Vec::new(),
            events: VecDeque::new(),
            deletions: 0,
            draws,
        };
        world.show_everything();
        world
    }

    pub fn happens(&mut self, kind: StepKind) -> Checked {
        match kind {
            StepKind::Schedule => self.schedule(),
            StepKind::Rebind => self.rebind(),
            StepKind::Preempt => self.preempt(),
            StepKind::Plan => self.plan(),
            StepKind::Backlog => self.backlog(),
            StepKind::Arrive => self.arrive(),
            StepKind::Leave => self.leave(),
            StepKind::Answer => self.settle_one(),
            StepKind::Watch => self.watch(),
            StepKind::Report => self.report(),
            StepKind::Pass => self.pass(),
            StepKind::Device => self.change_device(),
            StepKind::Budget => self.change_budget(),
            StepKind::Policy => self.change_policy(),
            StepKind::Restart => self.restart(),
            StepKind::Store => self.store(),
        }
    }

    /// At the end: what is bound fits, and the ledger agrees with itself.
    pub fn check_all(&mut self) -> Checked {
        for node in 0..self.record.nodes.len() as u8 {
            self.check_bound(node)?;
        }
        match (audit(&self.core.cluster).first(), self.core.planted) {
            (Some(violation), None) => Err(format!("the ledger contradicts itself: {violation}")),
            _ => Ok(()),
        }
    }

    /// What is bound to a node's GPUs by the API server's record is no more than they have, and what is exclusive is alone.
    fn check_bound(&self, node: u8) -> Checked {
        let mut sums = [(0u64, 0u32, false); MOST_GPUS];
        for pod in &self.alive {
            let Some((place, _)) = self.api[*pod as usize].bound else {
                continue;
            };
            let spec = self.record.spec(*pod);
            if place.node != node {
                continue;
            }
            for gpu in each(place.gpus) {
                let capacity = self.record.nodes[usize::from(node)].hardware[gpu].capacity;
                let (vram, pods, is_exclusive) = &mut sums[gpu];
                *vram += spec.charge(capacity);
                (*pods, *is_exclusive) = (*pods + 1, *is_exclusive | spec.is_exclusive);
            }
        }
        for (gpu, hardware) in self.record.nodes[usize::from(node)]
            .hardware
            .iter()
            .enumerate()
        {
            let (vram, pods, is_exclusive) = sums[gpu];
            if vram > hardware.capacity || is_exclusive && pods > 1 {
                let capacity = hardware.capacity;
                return Err(format!(
                    "{pods} pods are bound to node {node} GPU {gpu}: {vram} of {capacity} B"
                ));
            }
        }
        Ok(())
    }

    /// What the record and the ledger have of each GPU, to look into a promise that was broken.
    pub fn describe(&mut self) -> Vec<String> {
        let snapshot = self.core.cluster.snapshot();
        let mut lines = Vec::new();
        for node in 0..self.record.nodes.len() as u8 {
            let (views, here) = (
                self.record.views(node),
                self.record.nodes[usize::from(node)].here.clone(),
            );
            lines.push(format!(
                "node {node} has {:?} of pods {here:?}",
                self.record.age_of(node)
            ));
            let of_node = self.record.nodes[usize::from(node)].hardware.len();
            let in_record = views[..of_node].iter().enumerate();
            lines.extend(
                in_record.map(|(gpu, view)| format!("  GPU {gpu} in the record: {view:?}")),
            );
            let shown = snapshot.node(self.node_names[usize::from(node)].as_str());
            for (gpu, device) in shown
                .iter()
                .flat_map(|node| node.gpus.iter().zip(node.devices.iter()))
            {
                lines.push(format!("  GPU {} in the ledger: {gpu:?}", device.index));
            }
            lines.extend(
                here.iter()
                    .map(|pod| format!("  pod {pod}: {:?}", self.record.pods[*pod as usize])),
            );
        }
        lines
    }

    /// A decision was made; of what size the world was.
    fn count(&mut self) {
        self.tally.world_nodes += self.record.nodes.len() as u64;
        self.tally.world_gpus += self
            .record
            .nodes
            .iter()
            .map(|node| node.hardware.len() as u64)
            .sum::<u64>();
        self.tally.world_pods += self.record.known.len() as u64;
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.is_aloud {
            self.notes.push(text());
        }
    }

    fn now(&self) -> Moment {
        Moment(self.record.now)
    }

    fn random_node(&mut self) -> u8 {
        self.draws.below(self.machines.len()) as u8
    }

    /// One of the pods that exist and are such.
    fn random_pod(&mut self, is_such: impl Fn(&Self, u32) -> bool) -> Option<u32> {
        let count = self.alive.len();
        let begin = self.draws.below(count);
        (0..count)
            .map(|at| self.alive[(begin + at) % count])
            .find(|pod| is_such(self, *pod))
    }

    fn add_pod(&mut self, spec: PodSpec, is_gated: bool) -> u32 {
        let pod = self.pods.len() as u32;
        let demand = demand(&spec, self.core.cluster.policy());
        self.pods.push(PodNames {
            uid: pod_uid(pod),
            key: pod_key(pod, &spec),
            demand,
        });
        self.api.push(ApiPod {
            exists: true,
            is_gated,
            ..ApiPod::default()
        });
        self.alive.push(pod);
        self.record.pods.push(PodRecord {
            spec,
            told: KnownState::Nothing,
            leaving: None,
            kept: None,
            was_kept: false,
            started: 0,
            starting: None,
            assumed_at: 0,
            open: Default::default(),
            offered: None,
        });
        pod
    }
}

/// GPUs that are alike: one to eight, or slices of some.
fn draw_hardware(draws: &mut Draws<'_>) -> Vec<Hardware> {
    let gib = draws.of(&[20, 40, 80, 80]);
    let reserved = draws.of(&[0, 1]);
    let is_slice = draws.chance(10);
    let total = gib * GIB;
    let capacity = total - total * HEADROOM / 100 - reserved * GIB;
    let count = draws.of(&[1, 2, 2, 4, 4, 8]);
    vec![
        Hardware {
            total,
            capacity,
            is_slice
        };
        count
    ]
}

/// The GPUs in a mask, lowest first.
fn mask_of(gpus: impl Iterator<Item = usize>) -> Mask {
    gpus.fold(0, |mask, gpu| mask | 1 << gpu)
}
