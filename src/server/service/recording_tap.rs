//! The tap of the flight recorder: what comes through the entry point goes into a bounded queue, in its order.
//!
//! It stands in [`ClusterGuard`](super::ClusterGuard), the one place where this process changes its cluster, and works under the
//! cluster's lock. There an input costs a copy and a place in the queue; nothing is serialized, compressed or written. If the
//! queue is full nothing waits: the input is counted as dropped, and nothing is recorded until the recorder has taken a
//! checkpoint, from which replay can go on. A checkpoint costs a copy of the cluster that shares what neither side changes.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use stowage_recording::answer::{AnsweredInput, Decision};
use stowage_recording::entry::{Gap, NumberedInput};
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::{ClusterCopy, Input};
use stowage_telemetry::RecordingMetrics;

/// Inputs and answers that wait to be written; more are dropped.
const QUEUE_CAPACITY: usize = 16_384;

/// Bytes of inputs, and of answers, that wait to be written, roughly; more are dropped. In a large cluster an answer says something
/// of thousands of nodes until it is written, and a call of `preempt` names pods on as many.
const MAX_QUEUED_BYTES: usize = 64 << 20;

/// What goes to the recorder.
#[derive(Debug)]
pub enum TapMessage {
    Clock(Moment),
    Input(NumberedInput, QueuedBytes),
    Answer(AnsweredInput, Box<Decision>, QueuedBytes),
    Checkpoint {
        next: u64,
        after: Gap,
        copy: Box<ClusterCopy>,
    },
}

/// The memory of a queued input or answer. It counts until this is dropped.
#[derive(Debug)]
pub struct QueuedBytes {
    total: Arc<AtomicUsize>,
    bytes: usize,
}

#[derive(Debug)]
pub struct RecordingTap {
    queue: SyncSender<TapMessage>,
    /// Bytes of inputs in the queue.
    queued_input_bytes: Arc<AtomicUsize>,
    /// Bytes of answers in the queue.
    queued_answer_bytes: Arc<AtomicUsize>,
    state: Mutex<TapState>,
    metrics: RecordingMetrics,
}

#[derive(Debug)]
struct TapState {
    /// The number of the next input.
    next: u64,
    /// What is missing since the last recorded entry; `None` while everything is recorded.
    gap: Option<Gap>,
    /// The present, and the one that was recorded last: most of the times at which the lock is taken change nothing.
    now: Moment,
    recorded_now: Moment,
}

impl RecordingTap {
    /// A tap that records from its first checkpoint on, and what comes out of it.
    pub fn new(metrics: RecordingMetrics) -> (Self, Receiver<TapMessage>) {
        Self::with_capacity(QUEUE_CAPACITY, metrics)
    }

    fn with_capacity(capacity: usize, metrics: RecordingMetrics) -> (Self, Receiver<TapMessage>) {
        let (queue, receiver) = sync_channel(capacity);
        let (now, recorded_now) = (Moment::default(), Moment::default());
        let state = TapState {
            next: 0,
            gap: Some(Gap::Start),
            now,
            recorded_now,
        };
        let (waiting_inputs, waiting_answers) = Default::default();
        (
            Self {
                queue,
                queued_input_bytes: waiting_inputs,
                queued_answer_bytes: waiting_answers,
                state: Mutex::new(state),
                metrics,
            },
            receiver,
        )
    }

    /// Sets the present time. It is recorded with the next input.
    pub fn set_time(&self, now: Moment) {
        self.state.lock().now = now;
    }

    /// Records an input that is about to be applied.
    pub fn record_input(&self, input: impl FnOnce() -> Input) {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.gap.is_some() {
            return self.drop_input(&mut state);
        }
        let input = input();
        if self.send_clock(&mut state)
            && let Some(bytes) = QueuedBytes::add(&self.queued_input_bytes, input.bytes())
            && self
                .queue
                .try_send(TapMessage::Input(NumberedInput { number, input }, bytes))
                .is_ok()
        {
            self.metrics.inputs.inc();
        } else {
            self.drop_input(&mut state);
        }
    }

    /// The number of the latest input, if it was recorded.
    pub fn last_recorded(&self) -> Option<u64> {
        let state = self.state.lock();
        if state.gap.is_none() {
            state.next.checked_sub(1)
        } else {
            None
        }
    }

    /// Records a verb's answer. If the queue is full the answer is dropped, and a replay goes on without it.
    pub fn record_answer(&self, input: AnsweredInput, decision: Decision) {
        let is_sent = QueuedBytes::add(&self.queued_answer_bytes, decision.memory_bytes())
            .is_some_and(|bytes| {
                self.queue
                    .try_send(TapMessage::Answer(input, Box::new(decision), bytes))
                    .is_ok()
            });
        if !is_sent {
            self.metrics.dropped_answers.inc();
        }
    }

    /// Records the cluster as it is between two inputs. Recording continues from here if the queue has room.
    pub fn record_checkpoint(&self, copy: ClusterCopy) {
        let mut state = self.state.lock();
        if state.gap.is_none() && !self.send_clock(&mut state) {
            state.gap = Some(Gap::Dropped(0));
        }
        let (next, after) = (state.next, state.gap.unwrap_or(Gap::None));
        if self
            .queue
            .try_send(TapMessage::Checkpoint {
                next,
                after,
                copy: Box::new(copy),
            })
            .is_ok()
        {
            (state.gap, state.recorded_now) = (None, state.now);
        } else if state.gap.is_none() {
            state.gap = Some(Gap::Dropped(0));
        }
    }

    /// Ends recording until the next checkpoint: the state was discarded, or an entry could not be written.
    pub fn interrupt(&self, gap: Gap) {
        let mut state = self.state.lock();
        if !matches!(state.gap, Some(Gap::Dropped(_))) || gap == Gap::Discarded {
            state.gap = Some(gap);
        }
    }

    /// Whether what comes in is recorded.
    pub fn is_recording(&self) -> bool {
        self.state.lock().gap.is_none()
    }

    /// Records the present if it has changed. Answers whether it is recorded.
    fn send_clock(&self, state: &mut TapState) -> bool {
        if state.now == state.recorded_now {
            return true;
        }
        let is_sent = self.queue.try_send(TapMessage::Clock(state.now)).is_ok();
        if is_sent {
            state.recorded_now = state.now;
        }
        is_sent
    }

    fn drop_input(&self, state: &mut TapState) {
        state.gap = Some(match state.gap {
            None => Gap::Dropped(1),
            Some(Gap::Dropped(dropped)) => Gap::Dropped(dropped + 1),
            // Nothing is missing of what was recorded.
            Some(Gap::Start) => return,
            Some(other) => other,
        });
        self.metrics.dropped_inputs.inc();
    }
}

impl QueuedBytes {
    /// Adds the bytes of an entry; `None` if the queue would have too many. An entry of any size fits an empty queue.
    fn add(total: &Arc<AtomicUsize>, bytes: usize) -> Option<Self> {
        // Dropped at once if there is no room for it.
        let added = Self {
            total: total.clone(),
            bytes,
        };
        let before = total.fetch_add(bytes, Ordering::Relaxed);
        (before == 0 || before + bytes <= MAX_QUEUED_BYTES).then_some(added)
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::PodKey;
    use stowage_scheduling::kube_filters::Requirements;
    use stowage_scheduling::ledger::ObservedWaiting;
    use stowage_scheduling::placing::rank::Shortlist;
    use stowage_scheduling::placing::snapshot::NO_INDEX;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::testkit::{demand_of, uid};
    use stowage_scheduling::verbs::Cluster;
    use stowage_scheduling::verbs::preempt::{OfferedNode, PreemptAsked};
    use stowage_scheduling::verbs::request::VerbRequest;
    use stowage_scheduling::verbs::tick::LeadershipEnded;
    use stowage_scheduling::vocabulary::demand::Sharing;

    fn copy() -> ClusterCopy {
        Cluster::new(Arc::new(Policy::default())).copy()
    }

    fn input(tap: &RecordingTap) {
        tap.record_input(|| LeadershipEnded.into());
    }

    /// What comes out, shortened: inputs by their numbers.
    fn out(queue: &Receiver<TapMessage>) -> Vec<String> {
        let shown = |tapped| match tapped {
            TapMessage::Clock(now) => format!("clock {}", now.0),
            TapMessage::Input(numbered, _) => format!("{}", numbered.number),
            TapMessage::Answer(input, ..) => format!("answer of {}", input.number),
            TapMessage::Checkpoint { next, after, .. } => {
                format!("checkpoint before {next} after {after:?}")
            }
        };
        queue.try_iter().map(shown).collect()
    }

    #[test]
    fn nothing_is_recorded_before_the_first_checkpoint_and_everything_after_it() {
        let (tap, queue) = RecordingTap::new(RecordingMetrics::detached());
        input(&tap);
        assert_eq!((tap.is_recording(), tap.last_recorded()), (false, None));
        tap.record_checkpoint(copy());
        input(&tap);
        tap.set_time(Moment(5));
        assert_eq!(tap.last_recorded(), Some(1));
        input(&tap);
        input(&tap);
        assert_eq!(
            out(&queue),
            ["checkpoint before 1 after Start", "1", "clock 5", "2", "3"]
        );
        assert_eq!(tap.metrics.dropped_inputs.get(), 0);
    }

    #[test]
    fn a_full_queue_drops_and_counts_until_the_next_checkpoint_which_says_how_many() {
        let (tap, queue) = RecordingTap::with_capacity(3, RecordingMetrics::detached());
        tap.record_checkpoint(copy());
        (0..5).for_each(|_| input(&tap));
        assert!(!tap.is_recording());
        tap.record_checkpoint(copy());
        assert!(!tap.is_recording(), "the queue is full still");
        assert_eq!(out(&queue), ["checkpoint before 0 after Start", "0", "1"]);
        input(&tap);
        assert_eq!(
            out(&queue),
            Vec::<String>::new(),
            "a change without those before it is of no use"
        );
        tap.record_checkpoint(copy());
        input(&tap);
        assert_eq!(out(&queue), ["checkpoint before 6 after Dropped(4)", "6"]);
        assert_eq!(tap.metrics.dropped_inputs.get(), 4);
    }

    #[test]
    fn queued_answers_are_bounded_in_memory_and_accepted_again_after_writes() {
        let (tap, queue) = RecordingTap::new(RecordingMetrics::detached());
        tap.record_checkpoint(copy());
        // Of ten million names that are no node's.
        let answer = || {
            let list = Shortlist {
                node_indices: vec![NO_INDEX; 10_000_000],
                ..Shortlist::default()
            };
            tap.record_answer(
                AnsweredInput {
                    number: 0,
                    generation: 0,
                },
                Decision::Filter(list),
            );
            tap.metrics.dropped_answers.get()
        };
        assert_eq!([answer(), answer()], [0, 1]);
        assert_eq!(
            out(&queue),
            ["checkpoint before 0 after Start", "answer of 0"]
        );
        assert_eq!([answer(), answer()], [1, 2]);
        input(&tap);
        assert_eq!(
            out(&queue),
            ["answer of 0", "0"],
            "an input is not kept out by answers"
        );
    }

    /// kube-scheduler names the pods that it would evict on every node, call after call, while a disk hangs.
    #[test]
    fn queued_inputs_are_bounded_in_memory() {
        let (tap, queue) = RecordingTap::new(RecordingMetrics::detached());
        tap.record_checkpoint(copy());
        let asked = || {
            let key = PodKey::parse("default", "p").unwrap();
            let demand = demand_of(1 << 30, 1, Sharing::Shared, 0);
            let waiting = ObservedWaiting::default();
            let request = VerbRequest {
                uid: uid("p"),
                key,
                demand,
                waiting,
                disruption: None,
            };
            let victims = vec!["0".repeat(100); 400_000];
            let offered = vec![OfferedNode {
                node: "n".into(),
                victims,
                pdb_violations: 0,
            }];
            let asked = PreemptAsked {
                request,
                wants: Requirements::default(),
                offered,
            };
            tap.record_input(|| asked.into());
            tap.metrics.dropped_inputs.get()
        };
        assert_eq!([asked(), asked()], [0, 1]);
        assert!(!tap.is_recording());
        assert_eq!(out(&queue), ["checkpoint before 0 after Start", "0"]);
        tap.record_checkpoint(copy());
        assert_eq!(asked(), 1, "there is room again");
    }

    #[test]
    fn a_discarded_state_is_a_gap() {
        let (tap, queue) = RecordingTap::new(RecordingMetrics::detached());
        tap.record_checkpoint(copy());
        tap.interrupt(Gap::Discarded);
        input(&tap);
        tap.record_checkpoint(copy());
        assert_eq!(
            out(&queue),
            [
                "checkpoint before 0 after Start",
                "checkpoint before 1 after Discarded"
            ]
        );
    }
}
