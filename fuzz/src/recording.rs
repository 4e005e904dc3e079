//! Recordings: any bytes, a sound recording with changed bytes, and one whose text was changed under right checksums.

use crate::small_cluster::{self, NOW};
use std::sync::{Arc, LazyLock};
use stowage_recording::answer::{Answer, AnsweredInput, Decision, KeptAnswer};
use stowage_recording::entry::{Checkpoint, Entry, Gap, NumberedInput, SegmentHeader};
use stowage_recording::frame::{self, MAX_FRAME_TEXT_BYTES};
use stowage_recording::read::{ReadError, Reader};
use stowage_recording::replay::Replay;
use stowage_recording::write::SegmentWriter;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::filter::{FilterAsked, filter};
use stowage_scheduling::verbs::{Cluster, Input};

/// A valid recording, and its text.
static VALID_RECORDING: LazyLock<(Vec<u8>, Vec<u8>)> = LazyLock::new(|| {
    let header = SegmentHeader {
        stowage: "0.0.0".into(),
        wall_ms: 1_700_000_000_000,
        began: NOW,
    };
    let entries = entries();
    let mut writer = SegmentWriter::begin(Vec::new(), &header).expect("memory takes it");
    entries
        .iter()
        .for_each(|entry| writer.push(entry.clone()).expect("memory takes it"));
    writer.flush().expect("memory takes it");
    let bytes = writer.get_ref().clone();
    (bytes.clone(), text_of(&bytes))
});

/// The first byte says which of the three the rest is. None of them is a panic, and none takes more memory than its frames.
pub fn recording(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else {
        return;
    };
    let (bytes, text) = &*VALID_RECORDING;
    match kind % 3 {
        0 => replay(rest),
        1 => replay(&mutated(bytes, rest)),
        _ => replay(&framed(&mutated(text, rest))),
    }
}

fn replay(bytes: &[u8]) {
    let mut replay = Replay::default();
    for part in Reader::new(bytes) {
        match part.map(|part| replay.step(part)) {
            Ok(Ok(())) => {}
            Ok(Err(why)) => return assert!(!why.to_string().is_empty()),
            Err(why) => {
                return assert!(
                    byte_of(&why).is_none_or(|at| at <= bytes.len() as u64),
                    "{why}"
                );
            }
        }
    }
    if let Some(cluster) = replay.cluster() {
        let _ = cluster.snapshot();
    }
}

/// Byte that an error names.
fn byte_of(why: &ReadError) -> Option<u64> {
    match why {
        ReadError::NotARecording | ReadError::Empty => None,
        ReadError::OtherFormat { at, .. }
        | ReadError::Cut { at }
        | ReadError::Damaged { at, .. }
        | ReadError::Entry { at, .. }
        | ReadError::Io { at, .. } => Some(*at),
    }
}

/// Entries of the small cluster's history, a request, its answer, and a checkpoint.
fn entries() -> Vec<Entry> {
    let mut cluster = Cluster::new(Arc::new(Policy::default()));
    let checkpoint = |next: usize, after: Gap, cluster: &Cluster| {
        Entry::Checkpoint(Box::new(Checkpoint {
            next: next as u64,
            after,
            state: cluster.export(),
        }))
    };
    let mut entries = vec![checkpoint(0, Gap::Start, &cluster)];
    let inputs = small_cluster::inputs();
    let asked = inputs.len();
    for (number, input) in inputs.into_iter().enumerate() {
        entries.push(Entry::Input(NumberedInput {
            number: number as u64,
            input: input.clone(),
        }));
        cluster.apply(input);
    }
    let waits = small_cluster::request(&cluster, &small_cluster::uid(5)).expect("it waits");
    let question = FilterAsked(waits);
    entries.push(Entry::Input(NumberedInput {
        number: asked as u64,
        input: Input::from(question.clone()),
    }));
    let view = cluster.apply(question);
    let mut scores = ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy);
    let names: Vec<&str> = view
        .snapshot
        .nodes()
        .iter()
        .map(|node| node.name.as_str())
        .collect();
    let list = filter(&view, names.into_iter(), &mut scores);
    let asked_at = AnsweredInput {
        number: asked as u64,
        generation: cluster.ledger().generation(),
    };
    entries.push(Entry::Answer(Answer {
        input: asked_at,
        answer: KeptAnswer::from_decision(Decision::Filter(list)),
    }));
    entries.push(checkpoint(asked + 1, Gap::None, &cluster));
    entries
}

/// Four bytes a change: what is done, where, and with which byte.
fn mutated(sound: &[u8], changes: &[u8]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    for change in changes.chunks_exact(4).take(64) {
        let place = usize::from(u16::from_be_bytes([change[1], change[2]])) * bytes.len() / 65_536;
        let amount = usize::from(change[3]);
        let end = (place + amount + 1).min(bytes.len());
        match change[0] % 6 {
            0 => bytes
                .get_mut(place)
                .into_iter()
                .for_each(|byte| *byte = change[3]),
            1 => drop(bytes.drain(place.min(end)..end)),
            2 => bytes.insert(place, change[3]),
            3 => bytes.truncate(place),
            // The same once more: a key twice, an entry twice.
            4 => {
                let again = bytes[place.min(end)..end].to_vec();
                drop(bytes.splice(place..place, again));
            }
            // A number is another one.
            _ => {
                let digit = bytes[place.min(end)..].iter().position(u8::is_ascii_digit);
                if let Some(digit) = digit.map(|after| place + after) {
                    let numbers: [&[u8]; 6] = [
                        b"0",
                        b"-1",
                        b"9",
                        b"255",
                        b"4294967296",
                        b"18446744073709551615",
                    ];
                    drop(bytes.splice(digit..=digit, numbers[amount % 6].iter().copied()));
                }
            }
        }
    }
    bytes
}

fn framed(text: &[u8]) -> Vec<u8> {
    let mut bytes = frame::preface().to_vec();
    let mut frames = text.chunks(MAX_FRAME_TEXT_BYTES).peekable();
    while let Some(frame) = frames.next() {
        bytes.extend(frame::encode(frame, frames.peek().is_none()));
    }
    bytes
}

fn text_of(mut bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    bytes = &bytes[frame::PREFACE_BYTES..];
    while let Some((head, rest)) = bytes.split_first_chunk() {
        let head = frame::FrameHeader::read(head).expect("it was just written");
        let (stored, rest) = rest.split_at(head.stored);
        text.extend(head.text(stored).expect("it was just written"));
        bytes = rest;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sound_recording_replays_with_its_answer_and_its_checkpoint() {
        let mut replay = Replay::default();
        for part in Reader::new(&VALID_RECORDING.0[..]) {
            replay.step(part.unwrap()).unwrap();
        }
        assert_eq!(
            (replay.progress.answers, replay.progress.checkpoints),
            (1, 1)
        );
        let text = framed(&VALID_RECORDING.1);
        assert_eq!(
            Reader::new(&text[..]).filter(Result::is_ok).count(),
            Reader::new(&VALID_RECORDING.0[..]).count()
        );
    }
}
