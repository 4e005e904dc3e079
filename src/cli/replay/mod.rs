//! `stowage replay`: a recording through the same decisions once more.

#[cfg(feature = "lab")]
mod picture;
pub mod source;
mod under;

use super::output::OutputArgs;
use super::{NO_ANSWER, exit_without_answer};
use anyhow::Result;
use clap::Args;
use jiff::Timestamp;
use serde::Serialize;
use source::RecordingSource;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_recording::entry::Entry;
use stowage_recording::read::RecordingPart;
use stowage_recording::replay::{Divergence, Replay, ReplayError, ReplayProgress};
use stowage_scheduling::units::plural;
use stowage_telemetry::build_info;
use under::OtherPolicyArgs;

const EXIT_CODES: &str = "Exit codes: 0 if no answer differs from the recording, 1 if one does, 2 if the recording cannot be read to \
                          its end. Everything before the unreadable position is replayed. With --policy or --packing: 0 \
                          if the policies were compared, 1 if the policy has problems, 2 if something cannot be read.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ReplayArgs {
    /// The directory that `serve --record` writes, one of its segments, or a bundle of them; `-` is standard input
    #[arg(value_name = "RECORDING")]
    recording: PathBuf,

    #[command(flatten)]
    under: OtherPolicyArgs,

    #[command(flatten)]
    output: OutputArgs,
}

/// What came of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplayReport {
    /// The build that recorded, of the last segment.
    recorded_by: Option<String>,
    replayed_by: &'static str,
    /// The wall time that the recording covers.
    from: Option<Timestamp>,
    to: Option<Timestamp>,
    #[serde(flatten)]
    progress: ReplayProgress,
    /// The first input whose answer is another.
    divergence: Option<Divergence>,
    /// When that came.
    diverged_at: Option<Timestamp>,
    /// Why the recording was not replayed to its end.
    error: Option<String>,
    /// How often a segment ends before its last entry does, as a killed process leaves it.
    torn: u64,
}

impl ReplayArgs {
    /// A recording that cannot be read is no answer that differs.
    pub fn run(self) -> Result<ExitCode> {
        self.try_run().or_else(exit_without_answer)
    }

    fn try_run(self) -> Result<ExitCode> {
        if self.under.is_requested() {
            return self.under.run(&self.recording, &self.output);
        }
        let report = replay(RecordingSource::open(&self.recording)?);
        self.output
            .print(&report, |report, columns| columns.wrap(&text(report)))?;
        Ok(match (&report.divergence, &report.error) {
            (Some(_), _) => ExitCode::FAILURE,
            (None, Some(_)) => NO_ANSWER.into(),
            (None, None) => ExitCode::SUCCESS,
        })
    }
}

fn replay(mut source: RecordingSource) -> ReplayReport {
    let mut replay = Replay::default();
    let (mut divergence, mut error) = (None, None);
    let (mut from, mut to) = (None, None);
    while let Some(part) = source.next() {
        let stepped = part.map_err(|why| why.to_string()).and_then(|part| {
            let began = match &part {
                RecordingPart::Segment(header) => Some(header.began),
                RecordingPart::Entry(Entry::Clock(now)) => Some(*now),
                RecordingPart::Entry(_) => None,
            };
            let stepped = replay.step(part);
            let wall = began
                .and_then(|began| replay.wall_ms(began))
                .and_then(wall_time);
            (from, to) = (from.or(wall), wall.or(to));
            stepped.or_else(|why| match why {
                ReplayError::Diverged(found) => {
                    divergence = Some(*found);
                    Ok(())
                }
                why => Err(format!("{}: {why}", source.name())),
            })
        });
        error = stepped.err();
        if error.is_some() || divergence.is_some() {
            break;
        }
    }
    if error.is_none() && replay.cluster().is_none() {
        error = Some(
            "the recording has no checkpoint to begin at: record with `stowage serve --record DIR`"
                .into(),
        );
    }
    ReplayReport {
        recorded_by: replay.segment().map(|segment| segment.stowage.clone()),
        replayed_by: build_info::text(),
        from,
        to,
        diverged_at: divergence
            .as_ref()
            .and_then(|found| replay.wall_ms(found.at))
            .and_then(wall_time),
        progress: replay.progress,
        divergence,
        error,
        torn: source.torn_segments(),
    }
}

fn wall_time(millis: i64) -> Option<Timestamp> {
    Timestamp::from_millisecond(millis).ok()
}

fn text(report: &ReplayReport) -> String {
    let progress = report.progress;
    let ReplayProgress {
        segments,
        inputs,
        answers,
        unasked,
        checkpoints,
        restarts,
        ..
    } = progress;
    let mut text = format!(
        "{}, {}, {} decided again, {} compared\n",
        plural(segments, "segment"),
        plural(inputs, "input"),
        plural(answers, "answer"),
        plural(checkpoints, "checkpoint"),
    );
    let mut line = |sentence: String| text.extend([sentence.as_str(), "\n"]);
    if let (Some(from), Some(to), Some(by)) = (report.from, report.to, &report.recorded_by) {
        line(format!("Recorded from {from} to {to} by {by}"));
    }
    if restarts > 0 {
        line(format!(
            "{} of the service: replay went on from the first checkpoint after each",
            plural(restarts, "restart")
        ));
    }
    if progress.gaps > 0 {
        line(format!(
            "{}, in which {} left out: replay went on from the first checkpoint after each",
            plural(progress.gaps, "gap"),
            match progress.dropped {
                1 => "1 change is".to_owned(),
                dropped => format!("{dropped} changes are"),
            }
        ));
    }
    if progress.earlier_segments > 0 {
        line(format!(
            "{} with an earlier time than the segment before: the segments are not in order, or the clock was set back",
            plural(progress.earlier_segments, "segment")
        ));
    }
    if unasked > 0 {
        line(format!(
            "{} to questions from before the recording, not compared",
            plural(unasked, "answer")
        ));
    }
    if report.torn > 0 {
        line(format!(
            "{} without an end, as a killed process leaves it",
            plural(report.torn, "segment")
        ));
    }
    if let Some(Divergence {
        input,
        pod,
        what,
        recorded,
        replayed,
        ..
    }) = &report.divergence
    {
        let at = report
            .diverged_at
            .map_or(String::new(), |at| format!(", at {at}"));
        let pod = pod
            .as_ref()
            .map_or(String::new(), |pod| format!(" about pod {pod}"));
        line(format!(
            "The first difference is at input {input}{at}: {what}{pod}"
        ));
        line(format!("  recorded  {recorded}\n  replayed  {replayed}"));
        if let Some(by) = report
            .recorded_by
            .as_deref()
            .filter(|by| *by != report.replayed_by)
        {
            line(format!(
                "It was recorded by {by}, and this is {}: another build may answer otherwise",
                report.replayed_by
            ));
        }
    } else if let Some(error) = &report.error {
        line(error.clone());
    } else if answers + checkpoints == 0 {
        line("There is nothing to compare: no answer, and no checkpoint after the first".into());
    } else {
        line("Every answer and every checkpoint matches the recording".into());
    }
    text
}
