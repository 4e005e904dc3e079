//! `stowage replay`: a recording through the same decisions once more.

#[cfg(feature = "lab")]
mod picture;
pub mod source;
mod under;

use super::output::OutputArgs;
use super::{NO_ANSWER, no_answer};
use crate::build_info;
use crate::recording::read::ReadError;
use crate::recording::replay::{Divergence, Progress, Replay, ReplayError};
use crate::units::plural;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use source::Source;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use under::UnderArgs;

const EXIT_CODES: &str = "Exit codes: 0 if every answer is the recorded one, 1 if one is not, 2 if the recording cannot be read to \
                          its end. Everything before the unreadable position is replayed. With --policy or --packing: 0 \
                          if the policies were compared, 1 if the policy has problems, 2 if something cannot be read.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ReplayArgs {
    /// The directory that `serve --record` writes, one of its segments, or a bundle of them; `-` is standard input
    #[arg(value_name = "RECORDING")]
    recording: PathBuf,

    #[command(flatten)]
    under: UnderArgs,

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
    #[serde(flatten)]
    progress: Progress,
    /// The first input whose answer is another.
    divergence: Option<Divergence>,
    /// Why the recording was not replayed to its end.
    error: Option<String>,
    /// How often a segment ends before its last entry does, as a killed process leaves it.
    torn: u64,
}

impl ReplayArgs {
    /// A recording that cannot be read is no answer that differs.
    pub fn run(self) -> Result<ExitCode> {
        self.replayed().or_else(no_answer)
    }

    fn replayed(self) -> Result<ExitCode> {
        if self.under.is_asked() {
            return self.under.run(&self.recording, &self.output);
        }
        let report = replay(Source::open(&self.recording)?);
        match self.output.data(&report)? {
            Some(data) => write!(std::io::stdout(), "{data}")?,
            None => write!(std::io::stdout(), "{}", text(&report))?,
        }
        Ok(match (&report.divergence, &report.error) {
            (Some(_), _) => ExitCode::FAILURE,
            (None, Some(_)) => NO_ANSWER.into(),
            (None, None) => ExitCode::SUCCESS,
        })
    }
}

fn replay(source: Source) -> ReplayReport {
    let (mut replay, mut torn) = (Replay::default(), 0);
    let (mut divergence, mut error) = (None, None);
    'recording: for file in source {
        for part in file.reader {
            let part = match part {
                Ok(part) => part,
                // The next segment begins with a checkpoint.
                Err(ReadError::Cut { .. }) if file.may_be_torn => {
                    torn += 1;
                    break;
                }
                Err(why) => {
                    error = Some(format!("{}: {why}", file.name));
                    break 'recording;
                }
            };
            match replay.step(part) {
                Ok(()) => {}
                Err(ReplayError::Diverged(found)) => {
                    divergence = Some(*found);
                    break 'recording;
                }
                Err(why) => {
                    error = Some(format!("{}: {why}", file.name));
                    break 'recording;
                }
            }
        }
    }
    let recorded_by = replay.segment().map(|segment| segment.stowage.clone());
    if replay.progress.segments == 0 && error.is_none() {
        error = Some("the recording has no segment: record with `stowage serve --record DIR`".into());
    }
    ReplayReport {
        recorded_by,
        replayed_by: build_info::text(),
        progress: replay.progress,
        divergence,
        error,
        torn,
    }
}

fn text(report: &ReplayReport) -> String {
    let Progress { segments, inputs, answers, unasked, checkpoints, gaps, dropped } = report.progress;
    let mut text = format!(
        "{}, {}, {} decided again, {} compared\n",
        plural(segments as usize, "segment"),
        plural(inputs as usize, "input"),
        plural(answers as usize, "answer"),
        plural(checkpoints as usize, "checkpoint"),
    );
    let mut line = |said: String| text.extend([said.as_str(), "\n"]);
    if gaps > 0 {
        line(format!(
            "{}, in which {} left out: replay went on from the checkpoint behind each",
            plural(gaps as usize, "gap"),
            match dropped {
                1 => "1 change is".to_owned(),
                dropped => format!("{dropped} changes are"),
            }
        ));
    }
    if unasked > 0 {
        line(format!(
            "{} to questions from before the recording, not compared",
            plural(unasked as usize, "answer")
        ));
    }
    if report.torn > 0 {
        line(format!(
            "{} without an end, as a killed process leaves it",
            plural(report.torn as usize, "segment")
        ));
    }
    if let Some(Divergence { input, at, what, recorded, replayed }) = &report.divergence {
        line(format!(
            "The first difference is at input {input}, at {} ms of the recorded clock: {what}",
            at.0
        ));
        line(format!("  recorded  {recorded}\n  replayed  {replayed}"));
        if let Some(by) = report.recorded_by.as_deref().filter(|by| *by != report.replayed_by) {
            line(format!(
                "It was recorded by {by}, and this is {}: another build may answer otherwise",
                report.replayed_by
            ));
        }
    } else if let Some(error) = &report.error {
        line(error.clone());
    } else {
        line("Every answer and every checkpoint is the recorded one".into());
    }
    text
}
