//! Whatever comes through the entry point is written, read back the same, and replays; what was cut is a prefix; what was changed
//! is noticed.

use super::answer::{Answer, AnsweredInput, Decision, KeptAnswer};
use super::closed_loop::comparison::Comparison;
use super::closed_loop::demand::RecordedDemand;
use super::closed_loop::policies::LoopPolicy;
use super::entry::{Checkpoint, Entry, Gap, NumberedInput, SegmentHeader};
use super::frame::FRAME_HEADER_BYTES;
use super::read::{ReadError, Reader, RecordingPart};
use super::replay::{Replay, ReplayError};
use super::whole_entries::copy_whole_entries;
use super::write::SegmentWriter;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::sync::Arc;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::PackingPolicy;
use stowage_scheduling::testkit::histories;
use stowage_scheduling::testkit::lending_policy;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::filter::filter;
use stowage_scheduling::verbs::{Cluster, Input};

/// Inputs that the core took of a history.
pub(super) fn taken_inputs(most: usize) -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(any::<u64>(), 1..most)
        .prop_map(|words| histories::recorded_inputs(&words))
}

pub(super) fn header() -> SegmentHeader {
    SegmentHeader {
        stowage: "0.0.0".into(),
        wall_ms: 1_700_000_000_000,
        began: Moment(7),
    }
}

fn input(text: &str) -> Input {
    serde_json::from_str(text).unwrap()
}

/// What a recorder would write of these inputs: a segment for each so many of them, and the answer of each filter with the next
/// input.
pub(super) fn entries(inputs: &[String], each_segment: usize) -> Vec<Vec<Entry>> {
    let mut cluster = Cluster::new(Arc::new(lending_policy()));
    let mut segments: Vec<Vec<Entry>> = Vec::new();
    let mut late = None;
    for (number, text) in inputs.iter().enumerate() {
        if number % each_segment == 0 {
            let after = if number == 0 { Gap::Start } else { Gap::None };
            let checkpoint = Checkpoint {
                next: number as u64,
                after,
                state: cluster.export(),
            };
            segments.push(vec![Entry::Checkpoint(Box::new(checkpoint))]);
        }
        let segment = segments.last_mut().unwrap();
        segment.push(Entry::Input(NumberedInput {
            number: number as u64,
            input: input(text),
        }));
        let answered = match input(text) {
            Input::FilterAsked(query) => {
                let view = cluster.apply(*query);
                let names: Vec<&str> = view
                    .snapshot
                    .nodes()
                    .iter()
                    .map(|node| node.name.as_str())
                    .collect();
                let scores = &mut ScoreCache::default().take(
                    &view.snapshot,
                    &view.request.demand,
                    &view.policy,
                );
                let list = filter(
                    &view,
                    names
                        .iter()
                        .rev()
                        .copied()
                        .chain(["nowhere"])
                        .collect::<Vec<_>>()
                        .into_iter(),
                    scores,
                );
                Some(Decision::Filter(list))
            }
            Input::BindAsked(query) => Some(Decision::Bind(cluster.apply(*query))),
            input => {
                cluster.apply(input);
                None
            }
        };
        segment.extend(late.take().map(Entry::Answer));
        late = answered.map(|decision| {
            let asked = AnsweredInput {
                number: number as u64,
                generation: cluster.ledger().generation(),
            };
            Answer {
                input: asked,
                answer: KeptAnswer::from_decision(decision),
            }
        });
    }
    segments
}

pub(super) fn written(segments: &[Vec<Entry>], flush_each: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entries in segments {
        let mut writer = SegmentWriter::begin(&mut bytes, &header()).unwrap();
        for (nth, entry) in entries.iter().enumerate() {
            writer.push(entry.clone()).unwrap();
            if nth % flush_each == 0 {
                writer.flush().unwrap();
            }
        }
        writer.flush().unwrap();
    }
    bytes
}

/// A part as text that shows all of it.
fn shown(part: &RecordingPart) -> String {
    let value = |entry: &Entry| match entry {
        // Maps without an order are stored, too.
        Entry::Checkpoint(checkpoint) => serde_json::to_value(checkpoint).unwrap(),
        Entry::Clock(now) => serde_json::to_value(now).unwrap(),
        Entry::Input(input) => serde_json::to_value(input).unwrap(),
        Entry::Answer(answer) => serde_json::to_value(answer).unwrap(),
    };
    match part {
        RecordingPart::Segment(header) => serde_json::to_string(header).unwrap(),
        RecordingPart::Entry(entry) => value(entry).to_string(),
    }
}

fn all(segments: &[Vec<Entry>]) -> Vec<String> {
    let parts = |entries: &Vec<Entry>| {
        let header = [RecordingPart::Segment(header())].into_iter();
        header
            .chain(entries.iter().cloned().map(RecordingPart::Entry))
            .map(|part| shown(&part))
            .collect::<Vec<_>>()
    };
    segments.iter().flat_map(parts).collect()
}

/// What is read, and the error at its end.
fn read(bytes: &[u8]) -> (Vec<String>, Option<ReadError>) {
    let (mut parts, mut error) = (Vec::new(), None);
    for part in Reader::new(bytes) {
        match part {
            Ok(part) => parts.push(shown(&part)),
            Err(why) => error = Some(why),
        }
    }
    (parts, error)
}

pub(super) fn replay(bytes: &[u8]) -> Result<Replay, ReplayError> {
    let mut replay = Replay::default();
    Reader::new(bytes).try_for_each(|part| replay.step(part.expect("it is whole")))?;
    Ok(replay)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_written_is_read_back_and_replays(
        inputs in taken_inputs(40), each_segment in 1usize..40, flush_each in 1usize..20,
    ) {
        let segments = entries(&inputs, each_segment);
        let bytes = written(&segments, flush_each);
        let (parts, error) = read(&bytes);
        prop_assert!(error.is_none(), "{:?}", error);
        prop_assert_eq!(parts, all(&segments));
        let replayed = replay(&bytes).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(replayed.progress.inputs, inputs.len() as u64);
        prop_assert_eq!(replayed.progress.checkpoints, segments.len() as u64 - 1);
        let answers = segments.iter().flatten().filter(|entry| matches!(entry, Entry::Answer(_))).count();
        prop_assert_eq!(replayed.progress.answers, answers as u64);
    }

    #[test]
    fn any_history_is_played_in_closed_loops_and_one_policy_differs_from_itself_in_nothing(inputs in taken_inputs(40)) {
        let parts: Vec<RecordingPart> = Reader::new(&*written(&entries(&inputs, 1000), 10)).map(|part| part.unwrap()).collect();
        let mut demand = RecordedDemand::default();
        parts.iter().for_each(|part| _ = demand.step(part).unwrap());
        for packing in [None, Some(PackingPolicy::BestFit)] {
            let mut comparison = Comparison::new(&demand, LoopPolicy { replacement: None, packing_override: packing });
            parts.iter().for_each(|part| _ = comparison.step(part).unwrap());
            let compared = comparison.finish().unwrap();
            prop_assert!(packing.is_some() || compared.recorded == compared.other);
        }
    }

    #[test]
    fn a_recording_cut_anywhere_is_a_prefix_and_says_where_it_is_cut(
        inputs in taken_inputs(12), cut in any::<prop::sample::Index>(),
    ) {
        let segments = entries(&inputs, 9);
        let bytes = written(&segments, 4);
        let at = cut.index(bytes.len());
        let (parts, error) = read(&bytes[..at]);
        prop_assert!(parts.len() < all(&segments).len());
        prop_assert_eq!(&parts[..], &all(&segments)[..parts.len()]);
        let error_is_cut = matches!(error, Some(ReadError::Cut { .. }));
        match error {
            Some(ReadError::Cut { at: named }) => prop_assert!(named <= at as u64),
            Some(ReadError::Empty) => prop_assert_eq!(at, 0),
            // Between two frames nothing shows that more came.
            None => prop_assert!(at > 0),
            Some(other) => prop_assert!(false, "{}", other),
        }
        let mut copy = Vec::new();
        let end = copy_whole_entries(&mut &bytes[..at], &mut copy).unwrap();
        prop_assert!(bytes.starts_with(&copy));
        match end {
            Some(end) => prop_assert!(error_is_cut && end.at == copy.len() as u64),
            // The beginning of a segment is not copied, and is not missed.
            None => prop_assert!(copy.len() == at || copy.len() + FRAME_HEADER_BYTES == at),
        }
    }

    #[test]
    fn one_changed_bit_is_noticed(
        inputs in taken_inputs(12), changed in any::<prop::sample::Index>(), bit in 0u32..8,
    ) {
        let segments = entries(&inputs, 9);
        let mut bytes = written(&segments, 4);
        let at = changed.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let (parts, error) = read(&bytes);
        prop_assert_eq!(&parts[..], &all(&segments)[..parts.len()], "nothing is misread");
        prop_assert!(error.is_some(), "bit {} of byte {}", bit, at);
        let end = copy_whole_entries(&mut &bytes[..], &mut std::io::sink()).unwrap();
        prop_assert!(end.is_some_and(|end| end.at <= at as u64), "{:?} of byte {}", end, at);
    }

    #[test]
    fn bytes_that_are_no_recording_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), begins_well: bool) {
        let mut recording = if begins_well { super::frame::preface().to_vec() } else { Vec::new() };
        recording.extend(bytes);
        let (parts, _) = read(&recording);
        prop_assert!(parts.is_empty());
    }
}

#[test]
fn a_diverging_answer_is_reported_with_its_input() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = taken_inputs(60);
    // The first history that asks a filter.
    let segments = loop {
        let inputs = strategy.new_tree(&mut runner).unwrap().current();
        let segments = entries(&inputs, 1000);
        if segments[0].iter().any(|entry| {
            matches!(
                entry,
                Entry::Answer(Answer {
                    answer: KeptAnswer::Filter(_),
                    ..
                })
            )
        }) {
            break segments;
        }
    };
    let mut changed = segments;
    let of = changed[0]
        .iter_mut()
        .find_map(|entry| match entry {
            Entry::Answer(Answer {
                input: asked,
                answer: KeptAnswer::Filter(list),
            }) => {
                list.digest ^= 1;
                Some(asked.number)
            }
            _ => None,
        })
        .unwrap();
    let Err(ReplayError::Diverged(divergence)) = replay(&written(&changed, 10)) else {
        panic!("it is noticed")
    };
    assert_eq!(
        (divergence.input, &*divergence.what),
        (of, "the answer of filter")
    );
}

#[test]
fn a_recording_of_another_format_names_the_version_to_use() {
    let mut bytes = written(&entries(&[], 1), 1);
    bytes.extend(super::frame::preface());
    bytes[8] = 9;
    let (parts, error) = read(&bytes);
    assert!(parts.is_empty());
    let text = error.unwrap().to_string();
    assert!(
        text.contains("byte 0 has format 9")
            && text.contains("the version of stowage that recorded it"),
        "{text}"
    );
}

#[test]
fn a_frame_with_a_huge_length_takes_no_memory() {
    let mut bytes = super::frame::preface().to_vec();
    bytes.extend([0xff; 64]);
    let (_, error) = read(&bytes);
    let text = error.unwrap().to_string();
    assert!(
        text.contains("at byte 12") && text.contains("stowage bundle --from"),
        "{text}"
    );
}

/// Frames that are whole, of one entry that never ends.
#[test]
fn an_entry_without_an_end_takes_no_more_memory_than_the_longest() {
    struct Endless {
        head: Vec<u8>,
        frame: Vec<u8>,
        at: usize,
    }
    impl std::io::Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let frame_offset = self
                .at
                .checked_sub(self.head.len())
                .map(|at| at % self.frame.len());
            let left = frame_offset.map_or(&self.head[self.at.min(self.head.len())..], |place| {
                &self.frame[place..]
            });
            let taken = left.len().min(buffer.len());
            buffer[..taken].copy_from_slice(&left[..taken]);
            self.at += taken;
            Ok(taken)
        }
    }
    let mut head = Vec::new();
    SegmentWriter::begin(&mut head, &header())
        .unwrap()
        .flush()
        .unwrap();
    let frame = super::frame::encode(&[b'x'; super::frame::MAX_FRAME_TEXT_BYTES], false);
    let mut reader = Reader::with_max_entry_bytes(4 << 20, Endless { head, frame, at: 0 });
    assert!(matches!(reader.next(), Some(Ok(RecordingPart::Segment(_)))));
    let Some(Err(error)) = reader.next() else {
        panic!("it never ends")
    };
    assert!(
        error.to_string().contains("it is longer than any entry is"),
        "{error}"
    );
    assert!(reader.next().is_none());
}
