//! The stock kube-scheduler with a device plugin: GPUs are whole, a node has a number of them, and the kubelet picks which.
//!
//! Of its plugins those are here that tell GPU nodes apart: the fit of `nvidia.com/gpu`, `ImageLocality`, `NodeResourcesFit` by
//! least or most allocated, nominations, and default preemption with its order of nodes and victims. A pod's CPU and memory are
//! in proportion to its GPUs. It sees the hardware without delay, and tries a pending pod whenever a pod has left.

use super::FleetScheduler;
use crate::simulate::fleet::machines::{Machine, Machines};
use crate::simulate::fleet::messages::{BindingLoan, Message, PodSnapshot, SchedulerAction};
use crate::simulate::fleet::pods::{Image, PodSpec};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Moment;

/// How nodes are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoringStrategy {
    /// kube-scheduler's default, with image locality.
    LeastAllocated,
    /// Its bin-packing strategy, with image locality.
    MostAllocated,
}

/// Whether pods of higher priority evict others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreemptionMode {
    Never,
    LowerPriority,
}

/// Which nodes a pod may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Partition {
    /// All of them.
    None,
    /// Those whose label `team` is the pod's namespace.
    ByTeam,
}

/// `ImageLocality`: an image counts from 23 MB to 1,000 MB, times the share of nodes that have it.
const MIN_IMAGE_BYTES: f64 = 23e6;
const MAX_IMAGE_BYTES: f64 = 1e9;
/// Each plugin's scores are from 0 to 100.
const MAX_SCORE: f64 = 100.0;

pub(crate) struct KubeSchedulerBaseline {
    scoring_strategy: ScoringStrategy,
    preemption: PreemptionMode,
    partition: Partition,
    pods: BTreeMap<PodUid, TrackedPod>,
    /// Pending pods: higher priorities first, then as they came.
    pending: BTreeSet<(Reverse<i32>, u64, PodUid)>,
    arrivals: u64,
    /// Where pods wait for their victims to leave.
    nominated: BTreeMap<PodUid, NodeName>,
    ties: Random,
    /// Something has changed since the last round.
    has_changed: bool,
}

struct TrackedPod {
    spec: Arc<PodSpec>,
    arrival_number: u64,
    node: Option<NodeName>,
    since: Moment,
    is_terminating: bool,
}

/// Victims on a node, and what makes it the better one.
struct Candidate {
    node: NodeName,
    victims: Vec<PodUid>,
    rank: (i32, u64, usize, Reverse<Moment>),
}

impl KubeSchedulerBaseline {
    pub fn new(placing: ScoringStrategy, preempting: PreemptionMode, seed: u64) -> Self {
        Self {
            scoring_strategy: placing,
            preemption: preempting,
            partition: Partition::None,
            pods: BTreeMap::new(),
            pending: BTreeSet::new(),
            arrivals: 0,
            nominated: BTreeMap::new(),
            ties: Random::seeded(seed, 0x570c),
            has_changed: false,
        }
    }

    /// Each team has nodes of its own.
    pub fn partitioned(self) -> Self {
        Self {
            partition: Partition::ByTeam,
            ..self
        }
    }

    fn update_pod(&mut self, now: Moment, shown: &PodSnapshot) {
        let PodSnapshot {
            uid,
            spec,
            bound,
            terminating_since: leaving,
            ..
        } = shown;
        if !self.pods.contains_key(uid) {
            self.arrivals += 1;
            let came = self.arrivals;
            let tracked = TrackedPod {
                spec: spec.clone(),
                arrival_number: came,
                node: None,
                since: now,
                is_terminating: false,
            };
            self.pods.insert(uid.clone(), tracked);
            self.pending
                .insert((Reverse(spec.priority), came, uid.clone()));
        }
        let tracked = self.pods.get_mut(uid).expect("it was just put in");
        tracked.is_terminating = leaving.is_some();
        if let Some(bound) = bound {
            (tracked.node, tracked.since) = (Some(bound.node.clone()), bound.since);
        }
        if bound.is_some() || leaving.is_some() {
            self.pending
                .remove(&(Reverse(spec.priority), tracked.arrival_number, uid.clone()));
            self.nominated.remove(uid);
        }
    }

    fn is_allowed(&self, spec: &PodSpec, machine: &Machine) -> bool {
        match self.partition {
            Partition::None => true,
            Partition::ByTeam => machine.spec.labels.get("team") == Some(&spec.namespace),
        }
    }

    /// GPUs of the node that nobody has, less those that are nominated to pods of its priority or above.
    fn free_gpus(
        &self,
        uid: &PodUid,
        spec: &PodSpec,
        machine: &Machine,
        taken: &BTreeSet<GpuUuid>,
    ) -> usize {
        let free = machine
            .free_gpus()
            .filter(|(_, gpu)| !taken.contains(&gpu.uuid))
            .count();
        let kept = self
            .nominated
            .iter()
            .filter(|(other, node)| *other != uid && **node == machine.spec.name);
        let kept = kept.filter_map(|(other, _)| self.pods.get(other));
        let nominated_gpus: u32 = kept
            .filter(|other| other.spec.priority >= spec.priority)
            .map(|other| other.spec.gpus)
            .sum();
        free.saturating_sub(nominated_gpus as usize)
    }

    fn score(&self, spec: &PodSpec, machine: &Machine, free: usize, machines: &Machines) -> f64 {
        let all = machine.gpus.len().max(1) as f64;
        let after = (free as f64 - f64::from(spec.gpus)).max(0.0) / all;
        let fit = match self.scoring_strategy {
            ScoringStrategy::LeastAllocated => after,
            ScoringStrategy::MostAllocated => 1.0 - after,
        };
        MAX_SCORE
            * (fit
                + spec
                    .image
                    .as_ref()
                    .map_or(0.0, |image| image_locality(image, machine, machines)))
    }

    /// Picks the best node that has enough free GPUs now; of equal ones any.
    fn schedule(
        &mut self,
        uid: &PodUid,
        machines: &Machines,
        taken: &BTreeSet<GpuUuid>,
    ) -> Option<(NodeName, Arc<[GpuUuid]>)> {
        let spec = self.pods.get(uid)?.spec.clone();
        let count = spec.gpus as usize;
        let mut best: Vec<(&Machine, f64)> = Vec::new();
        for machine in machines
            .iter()
            .filter(|machine| self.is_allowed(&spec, machine))
        {
            let free = self.free_gpus(uid, &spec, machine, taken);
            if free < count || spec.vram_per_gpu() > machine.spec.vram {
                continue;
            }
            let score = self.score(&spec, machine, free, machines).floor();
            if best.first().is_none_or(|(_, top)| score > *top) {
                best.clear();
            }
            if best.first().is_none_or(|(_, top)| score >= *top) {
                best.push((machine, score));
            }
        }
        let (machine, _) = best.get(self.ties.below(best.len()))?;
        let free = machine
            .free_gpus()
            .filter(|(_, gpu)| !taken.contains(&gpu.uuid));
        let devices: Arc<[GpuUuid]> = free.take(count).map(|(_, gpu)| gpu.uuid.clone()).collect();
        Some((machine.spec.name.clone(), devices))
    }

    /// Default preemption: on each node all pods of lower priority leave, and the most important come back as long as there is
    /// room; then the node whose victims matter least.
    fn preempt(&self, uid: &PodUid, machines: &Machines) -> Option<Candidate> {
        let spec = &self.pods.get(uid)?.spec;
        let nodes = machines
            .iter()
            .filter(|machine| self.is_allowed(spec, machine));
        nodes
            .filter_map(|machine| self.candidate(uid, spec, machine))
            .min_by(|a, b| (a.rank, &a.node).cmp(&(b.rank, &b.node)))
    }

    fn candidate(&self, uid: &PodUid, spec: &PodSpec, machine: &Machine) -> Option<Candidate> {
        let node = &machine.spec.name;
        let here = self
            .pods
            .iter()
            .filter(|(_, tracked)| tracked.node.as_ref() == Some(node));
        // What leaves already leaves without being evicted.
        let leaving: u32 = here
            .clone()
            .filter(|(_, tracked)| tracked.is_terminating)
            .map(|(_, tracked)| tracked.spec.gpus)
            .sum();
        let mut lower: Vec<(&PodUid, &TrackedPod)> = here
            .filter(|(_, tracked)| !tracked.is_terminating && tracked.spec.priority < spec.priority)
            .collect();
        lower.sort_by_key(|(uid, tracked)| (Reverse(tracked.spec.priority), tracked.since, *uid));
        let evictable: u32 = lower.iter().map(|(_, tracked)| tracked.spec.gpus).sum();
        let mut room =
            self.free_gpus(uid, spec, machine, &BTreeSet::new()) + (leaving + evictable) as usize;
        if room < spec.gpus as usize {
            return None;
        }
        let mut victims = Vec::new();
        for (victim, tracked) in lower {
            match room - tracked.spec.gpus as usize >= spec.gpus as usize {
                true => room -= tracked.spec.gpus as usize,
                false => victims.push((victim, tracked)),
            }
        }
        let highest = victims
            .iter()
            .map(|(_, tracked)| tracked.spec.priority)
            .max()
            .unwrap_or(i32::MIN);
        let sum = victims
            .iter()
            .map(|(_, tracked)| u64::from(tracked.spec.priority.abs_diff(i32::MIN)))
            .sum();
        let of_highest = victims
            .iter()
            .filter(|(_, tracked)| tracked.spec.priority == highest);
        let began = of_highest
            .map(|(_, tracked)| tracked.since)
            .min()
            .unwrap_or_default();
        let rank = (highest, sum, victims.len(), Reverse(began));
        let victims = victims.into_iter().map(|(uid, _)| uid.clone()).collect();
        Some(Candidate {
            node: node.clone(),
            victims,
            rank,
        })
    }
}

/// `ImageLocality`'s score of a node, from 0 to 1.
fn image_locality(image: &Image, machine: &Machine, machines: &Machines) -> f64 {
    if !machine.images.contains(image) {
        return 0.0;
    }
    let (nodes, having) = machines.iter().fold((0.0, 0.0), |(nodes, having), other| {
        (
            nodes + 1.0,
            having
                + if other.images.contains(image) {
                    1.0
                } else {
                    0.0
                },
        )
    });
    let scaled = image.size.0 as f64 * having / nodes;
    ((scaled - MIN_IMAGE_BYTES) / (MAX_IMAGE_BYTES - MIN_IMAGE_BYTES)).clamp(0.0, 1.0)
}

impl FleetScheduler for KubeSchedulerBaseline {
    fn initialize(&mut self, _: Moment, _: &Machines) {}

    fn observe(&mut self, now: Moment, message: &Message) {
        match message {
            Message::Pod(shown) => self.update_pod(now, shown),
            Message::PodDeleted(uid) => {
                if let Some(tracked) = self.pods.remove(uid) {
                    self.pending.remove(&(
                        Reverse(tracked.spec.priority),
                        tracked.arrival_number,
                        uid.clone(),
                    ));
                }
                self.nominated.remove(uid);
            }
            Message::Start { .. }
            | Message::Images { .. }
            | Message::Reading { .. }
            | Message::Bound { .. }
            | Message::BindingRefused(_) => return,
        }
        self.has_changed = true;
    }

    fn round(&mut self, _: Moment, machines: &Machines) -> Vec<SchedulerAction> {
        let mut acts = Vec::new();
        let mut taken: BTreeSet<GpuUuid> = BTreeSet::new();
        self.has_changed = false;
        let queue: Vec<PodUid> = self.pending.iter().map(|(.., uid)| uid.clone()).collect();
        // Of pods with the same request, none fits after the first that does not.
        let mut refused: Vec<Arc<PodSpec>> = Vec::new();
        for uid in queue {
            let Some(spec) = self.pods.get(&uid).map(|tracked| tracked.spec.clone()) else {
                continue;
            };
            let is_alike = |other: &Arc<PodSpec>| {
                (
                    other.gpus,
                    other.priority,
                    &other.namespace,
                    other.vram_per_gpu(),
                ) == (
                    spec.gpus,
                    spec.priority,
                    &spec.namespace,
                    spec.vram_per_gpu(),
                )
            };
            if refused.iter().any(is_alike) {
                continue;
            }
            if let Some((node, devices)) = self.schedule(&uid, machines, &taken) {
                taken.extend(devices.iter().cloned());
                acts.push(SchedulerAction::Bind {
                    uid,
                    node,
                    devices,
                    loan: BindingLoan::default(),
                });
                continue;
            }
            refused.push(spec);
            if self.preemption == PreemptionMode::LowerPriority
                && !self.nominated.contains_key(&uid)
                && let Some(candidate) = self.preempt(&uid, machines)
            {
                for victim in candidate.victims {
                    self.pods
                        .get_mut(&victim)
                        .into_iter()
                        .for_each(|tracked| tracked.is_terminating = true);
                    acts.push(SchedulerAction::Evict {
                        uid: victim,
                        preemptor: Some(uid.clone()),
                    });
                }
                // A pod that waits for victims keeps only its own kind from preempting in this round.
                refused.pop();
                self.nominated.insert(uid, candidate.node);
            }
        }
        acts
    }

    fn reads_reports(&self) -> bool {
        false
    }

    fn has_pending(&self) -> bool {
        self.has_changed && !self.pending.is_empty()
    }
}
