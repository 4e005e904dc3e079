//! What a flight recorder keeps of one Stowage, as bytes, and its replay. Pure: bytes come from a reader and go to a writer that
//! are arguments.
//!
//! A recording is a sequence of *segments*. Each begins with a checkpoint of the whole cluster, so that replay can begin there,
//! and goes on with what came through the entry point (`scheduling::verbs`): every input with its number, the time when it
//! changed, and the answers of the verbs with the generation that they were decided on.
//!
//! - [`frame`]: a segment's bytes: a magic number and the format's version, then frames with length, checksum and compression.
//! - [`entry`]: what a segment says, a line of JSON each.
//! - [`answer`]: what a verb answered, small enough to be kept of every request.
//! - [`repeats`]: reports that say what the one before said, or the same with other [`figures`].
//! - [`write`](mod@write), [`read`]: entries to segments and back.
//! - [`whole_entries`]: a copy of a recording that is still written.
//! - [`redaction`]: a copy without names.
//! - [`replay`]: the same inputs through the same entry point, and the first answer that differs.
//! - [`closed_loop`]: the recorded demand under another policy, and what would have differed.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod answer;
pub mod closed_loop;
pub mod entry;
mod figures;
pub mod frame;
pub mod read;
pub mod redaction;
mod repeats;
pub mod replay;
pub mod whole_entries;
pub mod write;

#[cfg(test)]
mod proptests;
