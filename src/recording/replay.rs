//! The inputs of a recording applied once more: the same build gives the same answers, byte for byte, or this names the first
//! input where it does not.
//!
//! Every answer of a verb is decided again on the state that the inputs before it led to, and compared with what was kept of it;
//! so is the generation of that state. Where a segment begins, the whole state is compared with the checkpoint, so a change that
//! went around the entry point cannot stay hidden.

mod difference;
mod pending_decisions;

use super::answer::{Answer, KeptAnswer};
use super::entry::{Checkpoint, Entry, Gap, NumberedInput, SegmentHeader};
use super::read::RecordingPart;
use difference::first_difference;
use pending_decisions::PendingDecisions;
use serde::Serialize;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::ledger::LoadError;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::verbs::{Cluster, Input};

/// A replay in progress. Feed it a recording's parts in order.
#[derive(Debug, Default)]
pub struct Replay {
    cluster: Option<Cluster>,
    /// The number of the next input.
    next: u64,
    pending: PendingDecisions,
    segment: Option<SegmentHeader>,
    pub progress: ReplayProgress,
}

/// Counters of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplayProgress {
    pub segments: u64,
    pub inputs: u64,
    /// Answers that were decided again, with the same result.
    pub answers: u64,
    /// Answers to requests from before the recording begins, or from before a gap.
    pub unasked: u64,
    /// Checkpoints that equal the replayed state.
    pub checkpoints: u64,
    /// How often a new process began to record. What the process before had not written is missing.
    pub restarts: u64,
    /// How often a segment has an earlier time than the one before it.
    pub earlier_segments: u64,
    /// How often the recording has a gap. Replay goes on after it.
    pub gaps: u64,
    /// Inputs that the gaps left out.
    pub dropped: u64,
}

/// Why a replay stops before its recording ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    #[error("{0}")]
    Diverged(Box<Divergence>),
    #[error("the checkpoint before input {next} does not load: {why}")]
    Load { next: u64, why: LoadError },
    #[error("input {found} follows, and {expected} should: entries are missing")]
    Missing { expected: u64, found: u64 },
}

/// The first input whose result is another than the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "camelCase")]
#[error("input {input}, {what}: recorded {recorded}, replayed {replayed}")]
pub struct Divergence {
    pub input: u64,
    /// Recorded clock at that input.
    pub at: Moment,
    /// Pod that the request was about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodKey>,
    pub what: String,
    pub recorded: String,
    pub replayed: String,
}

impl Replay {
    pub fn step(&mut self, part: RecordingPart) -> Result<(), ReplayError> {
        match part {
            RecordingPart::Segment(header) => {
                self.progress.segments += 1;
                let is_earlier = self
                    .segment
                    .as_ref()
                    .is_some_and(|before| header.wall_ms < before.wall_ms);
                self.progress.earlier_segments += u64::from(is_earlier);
                self.segment = Some(header);
                Ok(())
            }
            RecordingPart::Entry(Entry::Checkpoint(checkpoint)) => {
                self.load_or_compare_checkpoint(*checkpoint)
            }
            RecordingPart::Entry(Entry::Clock(now)) => {
                if let Some(cluster) = &mut self.cluster {
                    cluster.apply(ClockAdvanced(now));
                }
                Ok(())
            }
            RecordingPart::Entry(Entry::Input(input)) => self.apply_input(input),
            RecordingPart::Entry(Entry::Answer(answer)) => self.check_answer(answer),
        }
    }

    /// Cluster after the latest part; `None` before the first checkpoint.
    pub fn cluster(&mut self) -> Option<&mut Cluster> {
        self.cluster.as_mut()
    }

    /// Wall time of a moment in the current segment, in milliseconds since 1970; `None` before the first segment.
    pub fn wall_ms(&self, at: Moment) -> Option<i64> {
        let SegmentHeader { wall_ms, began, .. } = self.segment.as_ref()?;
        wall_ms.checked_add(i64::try_from(at.since(*began).0).ok()?)
    }

    /// Header of the current segment.
    pub fn segment(&self) -> Option<&SegmentHeader> {
        self.segment.as_ref()
    }

    fn load_or_compare_checkpoint(&mut self, checkpoint: Checkpoint) -> Result<(), ReplayError> {
        let Checkpoint { next, after, state } = checkpoint;
        if self.cluster.is_some() && after == Gap::None && next < self.next {
            return Err(ReplayError::Missing {
                expected: self.next,
                found: next,
            });
        }
        match (&self.cluster, after) {
            (Some(cluster), Gap::None) if next == self.next => {
                if let Some((pointer, recorded, replayed)) =
                    first_difference(&state, &cluster.export())
                {
                    let what = format!("the state before it at {pointer}");
                    return Err(self.diverged(next, None, what, recorded, replayed));
                }
                self.progress.checkpoints += 1;
            }
            _ => {
                match (&self.cluster, after) {
                    (None, _) => {}
                    (Some(_), Gap::Start) => self.progress.restarts += 1,
                    (Some(_), _) => self.progress.gaps += 1,
                }
                // A segment may be missing, and what failed to be written was not counted.
                let missing = if self.cluster.is_some() {
                    next.saturating_sub(self.next)
                } else {
                    0
                };
                self.progress.dropped += match after {
                    Gap::Dropped(dropped) => dropped.max(missing),
                    Gap::None => missing,
                    Gap::Start | Gap::Discarded => 0,
                };
                self.pending = PendingDecisions::default();
                self.cluster =
                    Some(Cluster::load(state).map_err(|why| ReplayError::Load { next, why })?);
                self.next = next;
            }
        }
        Ok(())
    }

    fn apply_input(
        &mut self,
        NumberedInput { number, input }: NumberedInput,
    ) -> Result<(), ReplayError> {
        let Some(cluster) = &mut self.cluster else {
            return Ok(());
        };
        if number != self.next {
            return Err(ReplayError::Missing {
                expected: self.next,
                found: number,
            });
        }
        self.next += 1;
        self.progress.inputs += 1;
        match input {
            Input::FilterAsked(query) => {
                let view = cluster.apply(*query);
                self.pending.filter(number, view);
            }
            Input::PrioritizeAsked(query) => {
                let view = cluster.apply(*query);
                self.pending.prioritize(number, view);
            }
            Input::PreemptAsked(query) => {
                let pod = query.request.key.clone();
                let view = cluster.apply(*query).map(|(_, view)| view);
                self.pending
                    .preempt(number, pod, cluster.ledger().generation(), view);
            }
            Input::NarrowAsked(query) => {
                let pod = query.request.key.clone();
                let narrowed = cluster.apply(*query);
                self.pending
                    .narrow(number, pod, cluster.ledger().generation(), narrowed);
            }
            Input::BindAsked(query) => {
                let pod = query.key.clone();
                let answer = cluster.apply(*query);
                self.pending
                    .bind(number, pod, cluster.ledger().generation(), answer);
            }
            input => cluster.apply(input),
        }
        Ok(())
    }

    fn check_answer(&mut self, recorded: Answer) -> Result<(), ReplayError> {
        let number = recorded.input.number;
        let pod = self.pending.pod(number).cloned();
        let Some(replayed) = self.pending.decide(&recorded) else {
            self.progress.unasked += 1;
            return Ok(());
        };
        let verb = recorded.answer.verb();
        if replayed.input.generation != recorded.input.generation {
            let (recorded, replayed) = (recorded.input.generation, replayed.input.generation);
            let what = format!("the generation that {verb} decided on");
            return Err(self.diverged(
                number,
                pod,
                what,
                recorded.to_string(),
                replayed.to_string(),
            ));
        }
        if replayed.answer != recorded.answer {
            let text = |answer: &KeptAnswer| serde_json::to_string(answer).unwrap_or_default();
            let what = format!("the answer of {verb}");
            return Err(self.diverged(
                number,
                pod,
                what,
                text(&recorded.answer),
                text(&replayed.answer),
            ));
        }
        self.progress.answers += 1;
        Ok(())
    }

    fn diverged(
        &self,
        input: u64,
        pod: Option<PodKey>,
        what: String,
        recorded: String,
        replayed: String,
    ) -> ReplayError {
        let at = self
            .cluster
            .as_ref()
            .map_or(Moment::default(), |cluster| cluster.ledger().now());
        ReplayError::Diverged(Box::new(Divergence {
            input,
            at,
            pod,
            what,
            recorded,
            replayed,
        }))
    }
}
