//! Two loops over one recording, and what differs between them: one under the recorded policy, one under another.

use super::demand::{RecordedDemand, RecordedPod};
use super::policies::LoopPolicy;
use super::reports::RecordedLoads;
use super::stage::ClosedLoop;
pub use super::tally::LoopSample;
use super::tally::{FirstPlacement, Tally};
use crate::entry::{Entry, SegmentHeader};
use crate::read::RecordingPart;
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeSet;
use stowage_scheduling::ids::{GpuUuid, NodeName};
use stowage_scheduling::ledger::LoadError;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::Input;

/// Both loops, in progress. Feed them the parts that the demand was read from, in order.
#[derive(Debug)]
pub struct Comparison<'d> {
    demand: &'d RecordedDemand,
    other_policy: LoopPolicy,
    loads: RecordedLoads<'d>,
    segment: Option<SegmentHeader>,
    /// The number of the next input.
    next: u64,
    loops: Option<[ClosedLoop<'d>; 2]>,
}

/// Comparison of the two loops.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyComparison {
    /// The length of what was played.
    pub lasted: Millis,
    /// The recording has a gap: what comes after it is not compared.
    pub stops_at_gap: bool,
    pub agreement: Agreement,
    /// The loop under the recorded policy.
    pub recorded: LoopFigures,
    /// The loop under the other one.
    pub other: LoopFigures,
    /// Every pod that came, in order of name, with its first placement in either loop.
    pub pods: Vec<PodComparison>,
}

/// How far the loop under the recorded policy decides as was recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Agreement {
    /// Placements in the recording that Stowage decided.
    pub placements: u64,
    pub same_node: u64,
    pub same_gpus: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoopFigures {
    /// Identifies the policy at the end.
    pub policy: String,
    /// Pods that came and had no place.
    pub pods: u64,
    pub placed: u64,
    pub waiting_at_the_end: u64,
    pub evictions: u64,
    /// Pods that came back after an eviction.
    pub returned: u64,
    /// Pods that wait at the end count with their wait so far.
    pub waits: Waits,
    /// Average allocated share of allocatable VRAM, in per cent.
    pub allocated_percent: Option<f64>,
    /// Free VRAM that pods like the latest cannot use, in bytes.
    pub stranded: Bytes,
    pub stranded_at_the_end: Bytes,
    /// The cluster from time to time, in order.
    pub samples: Vec<LoopSample>,
}

/// Waiting times: from the first filter, or from when the planner first sees a gated pod, to the Binding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Waits {
    pub mean: Millis,
    pub p50: Millis,
    pub p99: Millis,
    pub longest: Millis,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodComparison {
    pub pod: String,
    /// Placement in the recording itself.
    pub recording: PodPlacement,
    pub recorded: PodPlacement,
    pub other: PodPlacement,
}

/// First placement of a pod; empty if it had none by the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodPlacement {
    pub node: Option<NodeName>,
    pub gpus: Vec<GpuUuid>,
    /// Time until it was bound, or until the end.
    pub waited: Millis,
    pub evictions: u64,
}

impl<'d> Comparison<'d> {
    pub fn new(demand: &'d RecordedDemand, other: LoopPolicy) -> Self {
        Self {
            demand,
            other_policy: other,
            loads: RecordedLoads::new(demand),
            segment: None,
            next: 0,
            loops: None,
        }
    }

    /// Takes in the next part. Returns whether the recording continues without a gap.
    pub fn step(&mut self, part: &RecordingPart) -> Result<bool, LoadError> {
        match part {
            RecordingPart::Segment(header) => self.segment = Some(header.clone()),
            RecordingPart::Entry(Entry::Checkpoint(checkpoint)) if self.loops.is_none() => {
                let at = self.wall_time_at(checkpoint.state.now());
                let begin =
                    |rule| ClosedLoop::begin(self.demand, rule, checkpoint.state.clone(), at);
                self.next = checkpoint.next;
                self.loops = Some([
                    begin(LoopPolicy::default())?,
                    begin(self.other_policy.clone())?,
                ]);
            }
            RecordingPart::Entry(Entry::Checkpoint(checkpoint)) => {
                return Ok(checkpoint.continues(self.next));
            }
            RecordingPart::Entry(Entry::Clock(now)) => {
                let at = self.wall_time_at(*now);
                self.loops
                    .iter_mut()
                    .flatten()
                    .for_each(|one| one.advance(*now, at));
            }
            RecordingPart::Entry(Entry::Input(numbered)) => {
                self.next = numbered.number + 1;
                self.apply_input(&numbered.input);
            }
            RecordingPart::Entry(Entry::Answer(_)) => {}
        }
        Ok(true)
    }

    fn apply_input(&mut self, input: &Input) {
        let Some(loops) = &mut self.loops else { return };
        let now = loops[0].now();
        if let Input::ReadingReported(report) = input {
            self.loads
                .record_reading(now, &report.node, &report.reading);
            loops
                .iter_mut()
                .for_each(|one| one.apply_reading(&report.node, &report.reading, &self.loads));
            return;
        }
        let at = wall_time(self.segment.as_ref(), now);
        loops.iter_mut().for_each(|one| one.apply_input(input, at));
    }

    fn wall_time_at(&self, now: Moment) -> Timestamp {
        wall_time(self.segment.as_ref(), now)
    }

    /// Ends both loops and compares them; `None` if the recording has no checkpoint.
    pub fn finish(mut self) -> Option<PolicyComparison> {
        let at = self.wall_time_at(self.demand.ended);
        let mut loops = self.loops.take()?;
        loops.iter_mut().for_each(|one| one.finish(at));
        let [recorded, other] = &loops;
        let ended = self.demand.ended;
        let pods = self.demand.pods.iter().filter_map(|(uid, pod)| {
            let placement_in = |one: &ClosedLoop<'_>| one.tally.pods.get(uid).cloned();
            let (old, new) = (placement_in(recorded)?, placement_in(other)?);
            let (recorded, other) = (
                PodPlacement::new(&old, ended),
                PodPlacement::new(&new, ended),
            );
            let (pod, recording) = (
                pod.key.to_string(),
                PodPlacement::new(&pod.recorded_placement(), ended),
            );
            Some(PodComparison {
                pod,
                recording,
                recorded,
                other,
            })
        });
        let mut pods: Vec<_> = pods.collect();
        pods.sort_by(|a, b| a.pod.cmp(&b.pod));
        Some(PolicyComparison {
            lasted: self.demand.ended.since(self.demand.began),
            stops_at_gap: self.demand.stops_at_gap,
            agreement: Agreement::new(self.demand, &recorded.tally),
            recorded: LoopFigures::from_loop(recorded),
            other: LoopFigures::from_loop(other),
            pods,
        })
    }
}

/// Wall time, by the clock of the recording machine, of a moment of the recorded clock.
fn wall_time(segment: Option<&SegmentHeader>, now: Moment) -> Timestamp {
    let at = segment.map_or(0, |header| {
        let since = i64::try_from(now.0)
            .unwrap_or(i64::MAX)
            .saturating_sub_unsigned(header.began.0);
        header.wall_ms.saturating_add(since)
    });
    Timestamp::from_millisecond(at).unwrap_or_default()
}

impl Agreement {
    fn new(demand: &RecordedDemand, tally: &Tally) -> Self {
        let mut agreement = Self::default();
        let is_decided_by_stowage = |pod: &RecordedPod| {
            !pod.is_foreign() && !pod.is_replacement && pod.initial_binding(demand.began).is_none()
        };
        for (uid, pod) in demand
            .pods
            .iter()
            .filter(|(_, pod)| is_decided_by_stowage(pod))
        {
            let Some(bound) = &pod.bound else { continue };
            let binding = tally.pods.get(uid).and_then(|first| first.binding.as_ref());
            let is_same_node = binding.is_some_and(|binding| binding.node == bound.node);
            let is_same_gpus = is_same_node
                && binding
                    .is_some_and(|binding| gpu_set(&binding.devices) == gpu_set(&bound.devices));
            agreement.placements += 1;
            agreement.same_node += u64::from(is_same_node);
            agreement.same_gpus += u64::from(is_same_gpus);
        }
        agreement
    }
}

impl RecordedPod {
    fn recorded_placement(&self) -> FirstPlacement {
        FirstPlacement {
            arrived_at: Some(self.first_filtered.unwrap_or(self.arrived)),
            binding: self.bound.clone(),
            evictions: u64::from(self.was_evicted),
        }
    }
}

impl PodComparison {
    /// Whether the loops put it on other GPUs, or one of them on none.
    pub fn differs(&self) -> bool {
        (&self.recorded.node, &self.recorded.gpus) != (&self.other.node, &self.other.gpus)
    }
}

fn gpu_set(devices: &Option<std::sync::Arc<[GpuUuid]>>) -> BTreeSet<&GpuUuid> {
    devices.iter().flat_map(|devices| devices.iter()).collect()
}

impl LoopFigures {
    fn from_loop(closed_loop: &ClosedLoop<'_>) -> Self {
        let tally = &closed_loop.tally;
        let (stranded, stranded_at_the_end) = tally.stranded();
        let came = tally.pods.values().filter(|pod| pod.arrived_at.is_some());
        Self {
            policy: closed_loop.policy().to_string(),
            pods: came.clone().count() as u64,
            placed: came.filter(|pod| pod.binding.is_some()).count() as u64,
            waiting_at_the_end: closed_loop.waiting_pods() as u64,
            evictions: tally.evictions,
            returned: tally.returned,
            waits: Waits::from_durations(tally.waits.clone()),
            allocated_percent: tally.allocated_percent(),
            stranded,
            stranded_at_the_end,
            samples: tally.samples.clone(),
        }
    }
}

impl Waits {
    fn from_durations(mut waits: Vec<Millis>) -> Self {
        waits.sort_unstable();
        let at = |percent: usize| {
            let index = (waits.len() * percent / 100).min(waits.len().saturating_sub(1));
            waits.get(index).copied().unwrap_or_default()
        };
        let sum: u64 = waits.iter().map(|wait| wait.0).sum();
        Self {
            mean: Millis(sum / waits.len().max(1) as u64),
            p50: at(50),
            p99: at(99),
            longest: at(100),
        }
    }
}

impl PodPlacement {
    fn new(first: &FirstPlacement, ended: Moment) -> Self {
        let until = first.binding.as_ref().map_or(ended, |binding| binding.at);
        Self {
            node: first.binding.as_ref().map(|binding| binding.node.clone()),
            gpus: gpu_set(
                &first
                    .binding
                    .as_ref()
                    .and_then(|binding| binding.devices.clone()),
            )
            .into_iter()
            .cloned()
            .collect(),
            waited: first
                .arrived_at
                .map_or(Millis::default(), |came| until.since(came)),
            evictions: first.evictions,
        }
    }
}
